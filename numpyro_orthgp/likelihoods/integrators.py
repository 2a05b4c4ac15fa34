"""Integration rules for expectations under Gaussians: nodes and weights for each latent function, or random nodes.

In a fit, random nodes differ between data points, so errors average out over a batch. Predictions of one point must not depend on
other points, so in predictions all points have the same fixed nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.math.peaks import AGREES, ORDERS, some_differ
from numpyro_orthgp.math.quadrature import gauss_hermite, quasi_normal, sobol_normal, trapezoidal
from numpyro_orthgp.types import Array, PRNGKey

__all__ = [
    "FOR_PREDICTIONS", "GaussHermite", "Integrator", "MonteCarlo", "QuasiMonteCarlo", "by_blocks", "checked_expectation",
    "expectation", "for_predictions", "log_expectation", "usual",
]  # fmt: skip

FOR_PREDICTIONS = 2048  # quasi-Monte Carlo points: probabilities of up to ten classes are accurate to 1e-3
MODERATE = 8  # functions that a softmax integrates by as many points as other likelihoods
# Of predictions where Gauss-Hermite rules differ: nodes for one function and for each of two, and how far they go, in standard
# deviations.
_LINE, _PLANE, _REACH = 577, 121, 12.0
_BLOCK = 128  # nodes processed together, if there are many


@dataclass(frozen=True)
class GaussHermite:
    """Integrate by the Gauss-Hermite rule, ``num_points`` nodes for each latent function that a point mixes."""

    num_points: int = 20

    def nodes(
        self, rng_key: PRNGKey | None, batch: tuple[int, ...], dim: int | None, dtype: Any
    ) -> tuple[Array, Array]:
        nodes, weights = gauss_hermite(self.num_points, dim or 1)
        nodes = nodes.reshape((-1,) + (1,) * len(batch) + ((dim,) if dim else ()))
        return jnp.asarray(nodes, dtype), jnp.asarray(weights, dtype)

    def shared_nodes(self, axes: int, dim: int | None, dtype: Any) -> tuple[Array, Array]:
        """Nodes for predictions, the same as in a fit, with ``axes`` axes of size one instead of the batch."""
        return self.nodes(None, (1,) * axes, dim, dtype)


@dataclass(frozen=True)
class QuasiMonteCarlo:
    """Integrate by ``num_points`` Sobol points.

    In a fit they are randomly shifted, with a separate shift for each data point. In predictions (moments, probabilities and
    ``log_predictive``) they are fixed, in the middle of their cells, and the same for all data points. So the prediction of one
    data point does not depend on others.
    """

    num_points: int = 128

    def nodes(
        self, rng_key: PRNGKey | None, batch: tuple[int, ...], dim: int | None, dtype: Any
    ) -> tuple[Array, Array]:
        nodes = quasi_normal(_or_fixed(rng_key), self.num_points, batch, dim or 1, dtype)
        return nodes if dim else nodes[..., 0], jnp.full(self.num_points, 1 / self.num_points, dtype)

    def shared_nodes(self, axes: int, dim: int | None, dtype: Any) -> tuple[Array, Array]:
        """Nodes for predictions, with ``axes`` axes of size one in the place of the batch."""
        return _shared(sobol_normal(self.num_points, dim or 1, dtype), axes, dim)


@dataclass(frozen=True)
class MonteCarlo:
    """Integrate by ``num_points`` independent draws. In predictions the draws are fixed, and the same for all data points."""

    num_points: int = 128

    def nodes(
        self, rng_key: PRNGKey | None, batch: tuple[int, ...], dim: int | None, dtype: Any
    ) -> tuple[Array, Array]:
        shape = (self.num_points, *batch, *((dim,) if dim else ()))
        return jax.random.normal(_or_fixed(rng_key), shape, dtype), jnp.full(
            self.num_points, 1 / self.num_points, dtype
        )

    def shared_nodes(self, axes: int, dim: int | None, dtype: Any) -> tuple[Array, Array]:
        """Nodes for predictions, with ``axes`` axes of size one in the place of the batch."""
        return _shared(jax.random.normal(jax.random.key(0), (self.num_points, dim or 1), dtype), axes, dim)


@dataclass(frozen=True)
class _Dense:
    """The trapezoidal rule, for predictions: for functions with kinks or steps, or that vary within a small part of a deviation."""

    def shared_nodes(self, axes: int, dim: int | None, dtype: Any) -> tuple[Array, Array]:
        nodes, weights = trapezoidal(_LINE if (dim or 1) == 1 else _PLANE, _REACH, dim or 1)
        return jnp.asarray(nodes.reshape(-1, *(1,) * axes, *((dim,) if dim else ())), dtype), jnp.asarray(
            weights, dtype
        )


Integrator = GaussHermite | QuasiMonteCarlo | MonteCarlo


def usual(num_functions: int, few_suffice: bool) -> Integrator:
    """The rule by default for functions that are integrated over together.

    :param few_suffice: whether the integrand's derivatives are bounded, as those of a softmax are. Then for many functions 32
        points in a fit add little noise beside that of a minibatch (under 5 % of the spread between rows), and cost a quarter.
    """
    if num_functions <= 2:
        return GaussHermite()
    return QuasiMonteCarlo(32) if few_suffice and num_functions > MODERATE else QuasiMonteCarlo()


def for_predictions(rule: Integrator) -> Integrator:
    """The rule by default for predictions: errors do not average out here, as over the steps of a fit."""
    return QuasiMonteCarlo(FOR_PREDICTIONS) if isinstance(rule, QuasiMonteCarlo) else rule


def checked_expectation(by: Callable[[Any], Array], plane: bool) -> Array:
    """An expectation in a prediction: by Gauss-Hermite nodes where two numbers of them agree, else by the trapezoidal rule.

    Where q is wide, few nodes miss kinks, and what a link does near zero. Gauss-Hermite nodes are better for what grows, as exp(f)
    does. On two axes the other rule has 14,641 nodes: within ``vmap``, as over draws, it is that of 31 Gauss-Hermite nodes on each.

    :param by: the expectation by a rule.
    :param plane: whether nodes have two axes.
    """
    first, second = (by(GaussHermite(num)) for num in ORDERS)
    agree = jax.lax.stop_gradient(jnp.abs(first - second) <= AGREES * jnp.abs(second))
    if is_concrete(agree) and np.all(agree):
        return second

    def fine() -> Array:
        dense = by(_Dense())
        return jnp.where(agree | ~jnp.isfinite(dense), second, dense)

    return jax.lax.cond(some_differ(agree) if plane else ~agree.all(), fine, lambda: second)


def expectation(weights: Array, values: Array) -> Array:
    """The weighted sum over the leading axis of nodes, in the dtype of f (NumPyro's values may have its default dtype).

    :param weights: shape (S,), or that of ``values`` if each point has nodes of its own.
    """
    values = values.astype(weights.dtype)
    return jnp.tensordot(weights, values, 1) if weights.ndim == 1 else (weights * values).sum(0)


def log_expectation(weights: Array, log_values: Array) -> Array:
    """log of the weighted sum of exp(log_values) over the leading axis of nodes."""
    # Weights enter as logarithms: in float32 their products with small densities would underflow.
    log_weights = jnp.log(weights)
    if weights.ndim == 1:
        log_weights = log_weights.reshape((-1,) + (1,) * (log_values.ndim - 1))
    return logsumexp(log_values.astype(weights.dtype) + log_weights, axis=0)


def by_blocks(function: Callable[[Array, Array], Array], nodes: Array, weights: Array) -> Array:
    """``function`` of nodes and weights. Many nodes are processed in blocks; the result has a leading axis of blocks."""
    S = len(weights)
    if S <= 4 * _BLOCK:
        return function(nodes, weights)[None]
    padding = -S % _BLOCK  # nodes in the middle, with weight zero
    nodes = jnp.pad(nodes, [(0, padding)] + [(0, 0)] * (nodes.ndim - 1)).reshape(-1, _BLOCK, *nodes.shape[1:])
    return jax.lax.map(lambda part: function(*part), (nodes, jnp.pad(weights, (0, padding)).reshape(-1, _BLOCK)))


def _shared(nodes: Array, axes: int, dim: int | None) -> tuple[Array, Array]:
    """Nodes of shape (S, D) with ``axes`` axes after the first, and their weights."""
    S = len(nodes)
    nodes = nodes.reshape(S, *(1,) * axes, *((dim,) if dim else ()))
    return nodes, jnp.full(S, 1 / S, nodes.dtype)


def _or_fixed(rng_key: PRNGKey | None) -> PRNGKey:
    # Without a random key (NUTS) the nodes are fixed, so the objective is deterministic.
    return jax.random.key(0) if rng_key is None else rng_key
