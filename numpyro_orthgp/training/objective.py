"""The loss of an ``SVI`` on all data as a function of one vector, for optimizers that evaluate it at any point.

It is the same loss, of the same unconstrained parameters, that ``svi.update`` minimizes, so a minimum is a state of the ``SVI``.
A loss that is estimated from random draws is a different function at each call, and raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from numpyro.infer.util import transform_fn

from numpyro_orthgp.math.compiled import quick_jit
from numpyro_orthgp.math.kept import Traced, compiled, traced
from numpyro_orthgp.training.batches import Batch, Batches, as_arguments
from numpyro_orthgp.training.devices import Devices
from numpyro_orthgp.training.plates import PlatesOfBatch

__all__ = ["Objective", "OfArguments", "objective_of"]

ROUNDINGS = 100  # by which two evaluations of one function may differ, as devices may add up in any order


class OfArguments(SVI):
    """An ``SVI`` whose model and guide are functions of their arguments alone: of no global value, and of no array in a closure.

    So its loss is traced once for arguments of the same shapes. Arrays among the keywords are arguments of the program too. And
    model and guide are run once to start: a later start is a matter of the parameters alone, if all are given.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.programs: dict[str, Traced] = {}

    def init(
        self, rng_key: jax.Array, *args: Any, init_params: dict[str, Any] | None = None, **kwargs: Any
    ) -> SVIState:
        if self.constrain_fn is None or set(init_params or ()) != set(self.constrain_fn.args[0]):
            return super().init(rng_key, *args, init_params=init_params, **kwargs)
        params = transform_fn(self.constrain_fn.args[0], init_params, invert=True)
        return SVIState(self.optim.init(params), None, jax.random.split(rng_key, 3)[0])  # the key that SVI.init keeps

    def traced(self, function: Callable[..., Any], *args: Any, fixed: Any) -> Traced:
        """The program of a function that depends on ``fixed`` and on this ``SVI``."""
        leaves, tree = jax.tree.flatten(args)
        key = f"{fixed} {tree} {[jax.typeof(leaf) for leaf in leaves]}"
        if key not in self.programs:
            self.programs[key] = traced(function, *args)
        return self.programs[key]


class Objective(NamedTuple):
    """
    :param start: the initial vector.
    :param value_and_grad: maps a vector to the loss and its gradient; one compiled program.
    :param state_at: maps a vector to an ``SVIState``.
    """

    start: np.ndarray
    value_and_grad: Callable[[Any], tuple[Any, Any]]
    state_at: Callable[[Any], Any]


def objective_of(svi: Any, state: Any, batches: Batches, stands_for: int, kwargs: dict[str, Any]) -> Objective:
    """The loss of all rows.

    :param state: the initial state, from ``svi.init``.
    :param stands_for: number of observations that the rows stand for.
    :param kwargs: further keyword arguments of model and guide.
    :raises ValueError: if the loss depends on the random key or on a mutable state.
    """
    if getattr(state, "mutable_state", None) is not None:
        raise ValueError(
            "The model has a mutable state, which each step would change: L-BFGS needs a loss that is a function of the "
            "parameters alone. Use ogp.fit."
        )
    tree = svi.optim.get_params(state.optim_state)
    start, unravel = ravel_pytree(tree)
    data, key = batches.everything(Devices(None).put_rows), state.rng_key

    given = {k: v for k, v in kwargs.items() if isinstance(svi, OfArguments) and isinstance(v, np.ndarray | jax.Array)}
    fixed = {k: v for k, v in kwargs.items() if k not in given}

    def loss(vector: Any, rng_key: Any, batch: Batch, given: dict[str, Any]) -> Any:
        args, keywords = as_arguments(batch.data)
        with PlatesOfBatch(batch.rows, batches.num_rows, batches.num_rows, stands_for):
            params = svi.constrain_fn(unravel(vector))
            named = given | fixed | getattr(svi, "static_kwargs", {})
            return svi.loss.loss(rng_key, params, svi.model, svi.guide, *args, **keywords, **named)

    value, args = jax.value_and_grad(loss), (start, key, data, given)
    if isinstance(svi, OfArguments):
        program = svi.traced(value, *args, fixed=(fixed, stands_for, jax.tree.map(jnp.shape, tree)))
    else:
        program = traced(value, *args)
    known = None if program.key is None else ("value and gradient", program.key)
    run = compiled(known, lambda: quick_jit(program.without_numbers().leaves, 1))  # some hundred evaluations

    def value_and_grad(vector: Any, rng_key: Any = key) -> tuple[Any, Any]:
        return tuple(run(program.numbers, jnp.asarray(vector, start.dtype), rng_key, data, given))

    _refuse_draws(value_and_grad, start, key)

    def state_at(vector: Any) -> Any:
        params = unravel(jnp.asarray(vector, start.dtype))
        return state._replace(optim_state=svi.optim.init(params))

    return Objective(np.asarray(start, np.float64), value_and_grad, state_at)


def _refuse_draws(value_and_grad: Callable[..., tuple[Any, Any]], start: jax.Array, key: Any) -> None:
    """
    :raises ValueError: if the value depends on the key.
    """
    one, other = (float(value_and_grad(start, k)[0]) for k in jax.random.split(key))
    few = ROUNDINGS * float(jnp.finfo(start.dtype).eps)
    if np.isfinite(one) and not abs(one - other) <= few * max(1.0, abs(one)):
        raise ValueError(
            f"The loss depends on the random key ({one:.6g} and {other:.6g} at the same parameters): it is an estimate by draws, "
            "and L-BFGS needs a function. Use likelihoods whose expectation is in closed form or by quadrature, a guide that "
            "draws nothing (AutoSparseGP(model), AutoDelta; not hyper=AutoNormal), TraceMeanField_ELBO, and all rows: no plate "
            "that draws its own. Or use ogp.fit with Adam, which is made for estimates."
        )
