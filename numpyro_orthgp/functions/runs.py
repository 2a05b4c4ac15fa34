r"""One run of a model sees one function.

Under a guide the model integrates over q, so a likelihood gets marginals. Draws, ``f(X).sample()``, are different. One y may
depend on f at many inputs (the average over a bin, a difference, an integral, the solution of a differential equation), and a bound
on its density needs draws of one function of q(f),

.. math:: f(x) = m(x) + \sum_i A_i(x)^\top e_i + \text{residual}(x),

with the same :math:`e_i` at all inputs and the residual's covariance between them. So the :math:`e_i` of a run are the values of
its latent sites, and each call draws its residual from the joint law given all earlier draws of the run. In terms of
:mod:`~numpyro_orthgp.functions.projection`, inputs of an earlier draw are one more orthogonal set with known whitened variables.

**Why.** With draws point by point, as in an early version, averages over bins with Gaussian noise had an ELBO of -2.9, but
log p(y) is -9.7.

**The root.** A draw takes one Cholesky factor of the covariance of all sets, drawn inputs and new ones
(``joint_root`` of ``functions/prior.py``). In float32 the residual's covariance is a difference of large matrices, so its own root
consisted of rounding errors. It needed so much jitter that draws were noisy: 0.14 per value, at 160 inputs and 18 points.

**Limits.** More than 2048 inputs in a fit, or 8192 elsewhere, are refused. ``f(X).independent()`` is the opt-out, for models
where each y sees only its own row. ``DeepGP`` and hidden outputs use it automatically; ``patchwise`` shares the inducing variables
within an image.

**Tightened.** Under a tightened guide the residual's covariance is v C, which is Titsias' spherical V for several inputs. A call
costs (v - log v - 1)/2 for each of its inputs, so the bound holds as for marginals.

**Loops.** In ``scan`` and ``vmap`` arrays of one step cannot reach another. There residuals of different steps are independent
given the inducing variables, which gives a bound for FITC's model. Draws of one step belong together, and to draws before the
loop. (Not with ``jax_check_tracer_leaks``, for which what a run remembers of a step is a leak: each has a residual of its own.)
From ``jit``, ``checkpoint`` and ``cond`` draws cannot get out either, but there nobody expects it: they are refused.

**What a run is.** Its outermost handler identifies it. After the run, each call draws the function anew. :class:`Run`, the
memory, is a pytree without leaves, and so is :class:`DrawInRun` of marginals in a fit: neither compiled programs nor loops over
likelihoods keep the arrays of a run. In a model ``f.joint(X)`` is p(f | u) given all earlier draws of the run, and its draws are
draws of the run. With q(f) each call would draw other inducing variables, and a latent site would have the guide's q as its prior.
A single path of ``f.sample_paths`` goes through the values drawn before, and later draws are its values. Of several paths, and
after draws of functionals, each has a residual of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.functions.callers import looking_ahead
from numpyro_orthgp.functions.sites import model_running
from numpyro_orthgp.inducing import Functional
from numpyro_orthgp.inducing.rows import join_rows
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["STACKED_MARGINALS", "DrawInRun", "Drawn", "Run", "refuse_stacked"]

STACKED_MARGINALS = (
    "These marginals are stacked, as by jax.vmap, and no longer know the one function that they belong to. Draw within it: "
    "jax.vmap(lambda x: f(x).sample())(X). Or draw each row by itself, where each y sees one: f(X).independent().sample()."
)
_FUNCTIONS = (
    "These are several functions, stacked as by jax.vmap. Map over them too: jax.vmap(lambda f: f(X).mean)(functions)."
)


class Drawn(NamedTuple):
    """The inputs at which a run has drawn a function: one more orthogonal set.

    :param X: all these inputs, shape (n, D), or functionals.
    :param noise: the whitened variables, shape (n,) or (P, n).
    """

    X: Array | Functional
    noise: Array


@jax.tree_util.register_pytree_node_class
class Run:
    """The draws of one function in one run of a model.

    It is part of a pytree without being data: a rebuilt function, as in ``vmap``, has no draws. Draws within ``scan``, ``vmap`` and
    similar depend on draws of the same step and on those made outside. After the run nothing is known, and its function is
    drawn anew.
    """

    def __init__(self) -> None:
        self._notes: list[tuple[Any, Drawn, Array]] = []  # the trace of JAX around each draw, the draw, its values
        self._path: Any = None
        self._model, self.trace = model_running(), get_opaque_trace_state()

    @property
    def going(self) -> bool:
        """Whether the model is still running."""
        return self._model is not None and model_running() is self._model

    @property
    def drawn(self) -> Drawn | None:
        """All draws so far."""
        if not (known := self._known()):
            return None
        X, noise = zip(*(drawn for drawn, _ in known), strict=True)
        return Drawn(join_rows(X), jnp.concatenate(noise, -1))

    def _known(self) -> list[tuple[Drawn, Array]]:
        """The draws whose arrays are valid here: those of this step of a loop, and those outside of it."""
        return [note[1:] for note in self._notes if note[0] == self.trace or _is_around(note[0])] if self.going else []

    def values_at(self, X: Array | Functional) -> Array | None:
        """The values drawn at exactly these inputs, if there are any."""
        return next((values for drawn, values in self._known() if _same(drawn.X, X)), None)

    @property
    def path(self) -> Any:
        """The single path that the run has drawn: its function at all other inputs."""
        return self._path if self.going else None

    def note_path(self, path: Any) -> None:
        """Remember a single path, unless it was drawn in a loop."""
        if self.going and get_opaque_trace_state() == self.trace:
            self._path = path

    def has_drawn(self, values: Any) -> bool:
        """Whether this array is one of the draws."""
        return any(values is drawn for _, _, drawn in self._notes)

    def note(self, X: Array | Functional, noise: Array, values: Array) -> None:
        """Remember a draw. What is drawn in a loop is known in the same step only."""
        where = get_opaque_trace_state()
        leaks: bool = jax.config.jax_check_tracer_leaks  # type: ignore[attr-defined]
        if self.going and (where == self.trace or not leaks) and not looking_ahead():
            self._notes.append((where, Drawn(X, noise), values))

    def tree_flatten(self) -> tuple[tuple[()], None]:
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Sequence[Any]) -> Run:
        return cls()


@jax.tree_util.register_pytree_node_class
class DrawInRun:
    """``func(*args, rng_key, sample_shape)`` for marginals of a function that is being fitted.

    Like ``Partial``, but its arguments are not pytree data. Otherwise a loop over a likelihood, which does not need them, would
    keep all arrays of the function for each step.
    """

    def __init__(self, func: Any = None, *args: Any) -> None:
        self.func, self.args = func, args

    def __call__(self, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
        if self.func is None:
            raise ValueError(
                "These marginals have passed through `scan`, `vmap`, `jit` or another transformation since f(X) was called, and no "
                "longer know the function that they belong to. Call f(X).sample() in one place, or draw each row by itself: "
                "f(X).independent().sample()."
            )
        return self.func(*self.args, rng_key, shape)

    def tree_flatten(self) -> tuple[tuple[()], None]:
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Sequence[Any]) -> DrawInRun:
        return cls()


def refuse_stacked(f: Any, words: str = _FUNCTIONS) -> None:
    """
    :param words: what a user has in the hand, and what to write.
    :raises ValueError: if the arrays of a function have an axis more than those of one function, or of P.
    """
    if any(jnp.ndim(q.loc) > 1 + (f.num_latents is not None) for q in f.beliefs):
        raise ValueError(words)


def _is_around(where: Any) -> bool:
    """Whether this is within a transformation of JAX that is still going on.

    :param where: what ``get_opaque_trace_state`` returned in it.
    """
    here = get_opaque_trace_state()
    # JAX does not say officially what is around what. Without these names draws of a step are known in inner loops no longer.
    traces = [getattr(state, "_trace_ref", lambda: None)() for state in (here, where)]
    trace, sought = traces
    while trace is not None and trace is not sought:
        trace = getattr(trace, "parent_trace", None)
    return bool(here == where) or trace is not None


def _same(a: Array | Functional, b: Array | Functional) -> bool:
    if a is b:
        return True
    (of_a, kind_a), (of_b, kind_b) = jax.tree.flatten(a), jax.tree.flatten(b)
    return bool(kind_a == kind_b) and all(  # type: ignore[operator]
        map(_same_arrays, of_a, of_b)
    )


def _same_arrays(a: Array, b: Array) -> bool:
    if a is b:
        return True
    return is_concrete(a) and is_concrete(b) and a.shape == b.shape and np.array_equal(a, b)
