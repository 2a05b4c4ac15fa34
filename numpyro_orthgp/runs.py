r"""One run of a model sees one function.

Under a guide the model integrates over q, so a likelihood gets marginals. A draw, ``f(X).sample()``, is a different matter: one y
may depend on f at many inputs (the average over a bin, a difference, an integral, the solution of a differential equation), and a
bound on its density needs draws of one function of q(f),

.. math:: f(x) = m(x) + \sum_i A_i(x)^\top e_i + \text{residual}(x),

with the same :math:`e_i` at all inputs and the residual's covariance between them. So the :math:`e_i` of a run are the values that
its latent sites have, and the residual of a call is drawn from its joint law given all that the run has drawn before. In the terms
of :mod:`numpyro_orthgp.math.projection` the inputs of an earlier draw are one more orthogonal set, whose whitened variables are
known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.math.linalg import join, matmul, matmul_transposed, solve_lower
from numpyro_orthgp.math.projection import residual_covariance
from numpyro_orthgp.sites import model_running
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["DrawInRun", "Drawn", "Run", "add_draw", "project_on_drawn"]


class Drawn(NamedTuple):
    """The inputs that a run has drawn a function at, as an orthogonal set.

    :param X: all of them, shape (n, D).
    :param before: their projections on each set of the function, shapes (..., M_i, n).
    :param whitener: inverse of the root of their covariance given these sets, shape (..., n, n).
    :param noise: the whitened residual, shape (..., n).
    """

    X: Array
    before: tuple[Array, ...]
    whitener: Array
    noise: Array


def project_on_drawn(drawn: Drawn, K: Array, A: Sequence[Array]) -> Array:
    """The projections of inputs on what has been drawn, shape (..., n, B).

    :param K: prior covariance of the drawn inputs with them, shape (..., n, B).
    :param A: their projections on each set of the function, shapes (..., M_i, B).
    """
    return matmul(drawn.whitener, residual_covariance(K, drawn.before, A))


def add_draw(
    drawn: Drawn | None, X: Array, A: Sequence[Array], on_drawn: Array | None, root: Array, noise: Array
) -> Drawn:
    """One more draw, beside those before it.

    :param on_drawn: the projections of X on what was drawn before, shape (..., n, B).
    :param root: root of the covariance of f(X) given all before, shape (..., B, B).
    """
    W = solve_lower(root, jnp.broadcast_to(jnp.eye(len(X), dtype=root.dtype), root.shape))
    if drawn is None or on_drawn is None:
        return Drawn(X, tuple(A), W, noise)
    # The inverse of the joint root, whose new rows are those of `on_drawn` and `root`.
    across = -matmul(W, matmul_transposed(on_drawn, drawn.whitener))
    above = jnp.concatenate([drawn.whitener, jnp.zeros_like(jnp.swapaxes(across, -1, -2))], -1)
    return Drawn(
        jnp.concatenate([drawn.X, X]),
        tuple(jnp.concatenate(pair, -1) for pair in zip(drawn.before, A, strict=True)),
        jnp.concatenate([above, jnp.concatenate([across, W], -1)], -2),
        join([drawn.noise, noise], -1, event_dim=1),
    )


@jax.tree_util.register_pytree_node_class
class Run:
    """The draws of one function in one run of a model.

    Part of a pytree without being data of it: whatever rebuilds the function, as ``vmap`` does, gets one without draws. Draws
    within ``scan``, ``vmap`` and such know those made outside, and not each other. When the run is over nothing is known: its
    function is drawn anew by whoever has kept it.
    """

    def __init__(self) -> None:
        self._drawn: Drawn | None = None
        self._last: Callable[[], Drawn] | None = None  # what adds the last draw: where none follows it costs nothing
        self._values: list[tuple[Array, Array]] = []
        self._model, self._trace = model_running(), get_opaque_trace_state()

    @property
    def _going(self) -> bool:
        return self._model is not None and model_running() is self._model

    @property
    def _in_loop(self) -> bool:
        """Whether arrays that are made now end with a loop of the model."""
        return get_opaque_trace_state() != self._trace

    @property
    def drawn(self) -> Drawn | None:
        """All draws so far."""
        if not self._going or self._last is None:
            return self._drawn if self._going else None
        if self._in_loop:
            return self._last()
        self._drawn, self._last = self._last(), None
        return self._drawn

    def values_at(self, X: Array) -> Array | None:
        """The values drawn at just these inputs, if there are any."""
        return next((values for at, values in self._values if _same(at, X)), None) if self._going else None

    def note(self, X: Array, values: Array, add: Callable[[], Drawn]) -> None:
        """Remember a draw.

        :param add: returns all draws with this one.
        """
        if self._going and not self._in_loop:
            self._values.append((X, values))
            self._last = add

    def tree_flatten(self) -> tuple[tuple[()], None]:
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Sequence[Any]) -> Run:
        return cls()


@jax.tree_util.register_pytree_node_class
class DrawInRun:
    """``func(*args, rng_key, sample_shape)`` for marginals of a function that is being fitted.

    Like ``Partial``, but its arguments are no data: a loop over a likelihood, which needs none of them, would keep all arrays of
    the function for each of its steps.
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


def _same(a: Array, b: Array) -> bool:
    if a is b:
        return True
    return is_concrete(a) and is_concrete(b) and a.shape == b.shape and np.array_equal(a, b)
