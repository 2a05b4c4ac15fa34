"""Many steps of an SVI as one compiled program.

Up to K steps are a ``fori_loop`` whose bound the compiler does not know. So calls can end at a checkpoint, at the end of a window
or earlier without another compilation. The body of the loop is the same for every K except K = 1, for which XLA drops the axis of
length one and rounds differently. Arrays then have room for two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

from numpyro_orthgp.math.compiled import quick_jit
from numpyro_orthgp.math.kept import Traced, compiled, traced
from numpyro_orthgp.training.batches import Batch, as_arguments
from numpyro_orthgp.training.devices import Devices
from numpyro_orthgp.training.lazy_rows import params_have_nan, rows_of
from numpyro_orthgp.training.plates import PlatesOfBatch

__all__ = ["Steps", "Update", "compile_steps", "strongly_typed", "update_of"]

# Maps a state, batches and a number of steps to the state after them, their losses in an array of fixed length, and whether a
# parameter is NaN.
Steps = Callable[[Any, Any, int], tuple[Any, jax.Array, jax.Array]]

# Maps a state and a batch to the state after a step, and its loss.
Update = Callable[[Any, Batch], tuple[Any, jax.Array]]


def update_of(
    svi: Any, num_rows: int, stands_for: int, kwargs: dict[str, Any], everywhere: Sharding | None = None
) -> Update:
    """One step of ``svi.update``.

    :param num_rows: number of rows of all data.
    :param stands_for: number of observations that these rows stand for.
    :param kwargs: further keyword arguments of model and guide, constants of the program.
    :param everywhere: sharding for arrays that every device has a copy of, on a mesh.
    """

    def update(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        args, keywords = as_arguments(batch.data)
        size = jax.tree.leaves(batch.data)[0].shape[0]
        known = rows_of(svi, stands_for, size, None if size == num_rows else batch.rows, everywhere)
        with PlatesOfBatch(batch.rows, size, num_rows, stands_for), known:
            return svi.update(state, *args, **keywords, **kwargs)

    return update


def compile_steps(svi: Any, update: Update, capacity: int, is_full: bool, devices: Devices) -> Steps:
    """A program for up to ``capacity`` steps. The compiler does not know their number.

    It is a pure function, and its results are bitwise equal however steps are grouped into calls: its loop body is one step.
    Whether a parameter is NaN is a program of its own, since it can be compiled in a fraction of the time.

    :param update: one step.
    :param is_full: whether every step sees the same rows; otherwise batches are stacked along a first axis.
    :param devices: devices for the results.
    """

    def run(state: Any, batches: Any, num: int) -> tuple[Any, jax.Array, jax.Array]:
        if not made:
            made.append(make(state, batches))
        program, look, numbers, of_look = made[0]
        state, losses = program(numbers, state, batches, np.int32(num))
        return state, losses, look(of_look, state)[0]

    def make(state: Any, batches: Any) -> tuple[Any, Any, Any, Any]:
        rows = batches if is_full else jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batches)
        step, nan = traced(update, state, rows), traced(partial(params_have_nan, svi), state)
        everywhere = devices.replicated
        key = step.key and (step.key, str(step.tree), capacity, is_full, everywhere, str(devices.of_state))
        # The cached program must not refer to arrays, which may be all the data.
        program = partial(_run, step.without_numbers(), capacity, is_full)
        shardings = (devices.of_state, everywhere), [everywhere]
        of_run, of_look = ({} if everywhere is None else {"out_shardings": each} for each in shardings)
        run = compiled(key, partial(jax.jit, program, **of_run))
        look = compiled(nan.key and (nan.key, everywhere), partial(quick_jit, nan.leaves, 0, **of_look))
        return run, look, step.numbers, nan.numbers

    made: list[tuple[Any, Any, Any, Any]] = []  # once the shapes are known
    return run


def _run(
    update: Traced, capacity: int, is_full: bool, numbers: list[Any], state: Any, batches: Any, num: jax.Array
) -> tuple[Any, jax.Array]:
    """The program."""

    def step(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, losses = carry
        batch = batches
        if not is_full:
            batch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), batches)
            # Otherwise XLA may fuse reading into the step, differently for different capacities.
            batch = lax.optimization_barrier(batch)
        state, loss = update(numbers, state, batch)
        return state, losses.at[i].set(jnp.asarray(loss, losses.dtype))

    return lax.fori_loop(0, num, step, (state, jnp.zeros(capacity)))


def strongly_typed(state: Any) -> Any:
    """The state with the dtypes that steps return. If an optimizer starts from Python numbers, this avoids a second compilation."""

    def convert(x: Any) -> Any:
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if is_key else lax.convert_element_type(x, jnp.result_type(x))

    return jax.tree.map(convert, state)
