"""Latent values at the nodes of an integral over q(f), in fits and in predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.scipy.special import logsumexp

from numpyro_orthgp.likelihoods.integrators import (
    GaussHermite,
    by_blocks,
    checked_expectation,
    expectation,
    for_predictions,
    log_expectation,
)
from numpyro_orthgp.likelihoods.masks import ToldOfMasks
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.peaks import log_normal_expectation, log_plane_expectation
from numpyro_orthgp.math.quadrature import NUM_ABOUT_BENDS, about_bends
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["AtNodes"]

_MOST_PEAKS = 6  # of a density that a user has written; those of this package have one
# What a user's log density, as a difference of large logarithms of factorials, may reach that many standard deviations from the
# mean of f, where nothing but rounding is left of it.
_HIGHEST, _FAR = 20.0, 7.0


class AtNodes(ToldOfMasks):
    """A likelihood that integrates at nodes: of its ``integrator``, or by default about the bends of its log density."""

    integrator: Any
    rng_key: Any
    by_default: bool
    mixes: bool
    lead: int
    _of_users: bool
    _log_concave = False  # whether log p(y | f) is concave in f, so that p(y | f) q(f) has one peak

    def __getattr__(self, name: str) -> Any:  # asked only for what is not there
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property, which failed for an error of its own
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}. What `__init__` sets must be named in `pytree_data_fields` (arrays) "
            "or `pytree_aux_fields` (options): a program of JAX rebuilds the likelihood from these."
        )

    @broadcasting
    def _values(self, y: Array | None = None) -> tuple[Array, Array]:
        """Latent values at the integration nodes, shape (S,) + that of f, and weights, shape (S,) or that of the values.

        If ``y`` has leading sample axes, the values have axes there too, at least of size one.
        """
        m = self.marginals
        if (own := self._about_bends(y)) is not None:
            return m.mean + safe_sqrt(m.variance) * own[0], own[1]
        dim = m.num_latents if self.mixes else None
        batch = m.own_shape[:1] if self.mixes else m.own_shape
        nodes, weights = self.integrator.nodes(self.rng_key, batch, dim, m.mean.dtype)
        return self._at(nodes, y, line=False), weights

    def _line(self, y: Array | None = None) -> tuple[Array, Array]:
        """One-dimensional standard-normal nodes for each point, shape (S, B) or (S, 1), aligned as in ``_values``."""
        m = self.marginals
        if (own := self._about_bends(y)) is not None:
            return own
        nodes, weights = self.integrator.nodes(self.rng_key, m.own_shape[:1], None, m.mean.dtype)
        return self._aligned(nodes, y), weights

    @broadcasting
    def _average(self, value: Callable[[Array], Array], y: Array | None = None, *, line: bool = False) -> Array:
        """E_q(f)[value(f)] for predictions, at nodes that do not depend on other points.

        :param value: takes latent values with one leading axis.
        :param line: whether ``value`` is a function of one-dimensional standard-normal nodes for each point, not of latent values.
        """
        if (own := self._about_bends(y)) is not None:
            return expectation(own[1], value(own[0] if line else self._values(y)[0]))

        def by(rule: Any) -> Array:
            nodes, weights = self._shared_nodes(line, rule)
            return by_blocks(lambda x, w: expectation(w, value(self._at(x, y, line))), nodes, weights).sum(0)

        if self.by_default and isinstance(self.integrator, GaussHermite):
            return checked_expectation(by, plane=self.mixes and not line)
        return by(self.integrator)

    @broadcasting
    def _log_average(self, log_value: Callable[[Array], Array], y: Array | None = None, *, line: bool = False) -> Array:
        """log E_q(f)[exp(log_value(f))], as in ``_average``."""
        nodes, weights = self._shared_nodes(line, self.integrator)
        parts = by_blocks(lambda x, w: log_expectation(w, log_value(self._at(x, y, line))), nodes, weights)
        return logsumexp(parts, axis=0)

    def _log_about_peaks(self, log_density: Callable[[Array], Array], shape: tuple[int, ...]) -> Array:
        """log E_q(f)[exp(log_density(f))] of one function, or of two that a point mixes, by nodes about peaks."""
        m, dtype = self.marginals, self.marginals.mean.dtype  # NumPyro may make values in its default dtype
        most = 0.0 if self._of_users and self.support.is_discrete else _HIGHEST

        def of_nodes(t: Array) -> Array:
            values = log_density(m._at(t) if self.mixes else m.mean + safe_sqrt(m.variance) * t).astype(dtype)
            if not self._of_users:
                return values
            distance = jnp.abs(t).max(-1) if self.mixes else jnp.abs(t)
            return jnp.where(distance > _FAR, jnp.minimum(values, most), values)

        if self.mixes:
            return log_plane_expectation(of_nodes, shape, dtype)
        if self._of_users:
            return log_normal_expectation(of_nodes, shape, dtype, peaks=_MOST_PEAKS)
        return log_normal_expectation(of_nodes, shape, dtype, log_concave=self._log_concave)

    def _bends(self, y: Array | None) -> tuple[ArrayLike, ArrayLike, ArrayLike] | None:
        """The first and the last place of f at which log p(y | f), or without ``y`` a moment given f, bends, and on which scale.

        :return: ``None`` if that is not known; then nodes are those of Gauss and Hermite.
        """
        return None

    def _about_bends(self, y: Array | None) -> tuple[Array, Array] | None:
        """Standard-normal nodes of each point and their weights, both of shape (S, ...), if no ``integrator`` was given."""
        bends = self._bends(y) if self.by_default and isinstance(self.integrator, GaussHermite) else None
        if bends is None:
            return None
        nodes, weights = about_bends(*self._bent, *bends)
        missing = 1 + len(self.batch_shape) + self._sample_axes(y) - nodes.ndim
        shape = nodes.shape[:1] + (1,) * max(missing, 0) + nodes.shape[1:]
        return nodes.reshape(shape), weights.reshape(shape)

    @property
    def _bent(self) -> tuple[Array, Array]:
        """Mean and standard deviation of the latent values that are integrated over."""
        return self.marginals.mean, safe_sqrt(self.marginals.variance)

    def _num_nodes(self, y: Array) -> int:
        """How many nodes the expectations of a fit have, for each latent function that a point mixes."""
        num: int = self.integrator.num_points if self._about_bends(y) is None else NUM_ABOUT_BENDS
        return num

    def _shared_nodes(self, line: bool, rule: Any) -> tuple[Array, Array]:
        m, rule = self.marginals, for_predictions(rule) if self.by_default else rule
        mixes = self.mixes and not line
        axes = 1 if mixes or line else len(m.own_shape)
        return rule.shared_nodes(axes, m.num_latents if mixes else None, m.mean.dtype)

    def _at(self, nodes: Array, y: Array | None, line: bool) -> Array:
        m, nodes = self.marginals, self._aligned(nodes, y)
        return nodes if line else m._at(nodes) if self.mixes else m.mean + safe_sqrt(m.variance) * nodes

    def _aligned(self, nodes: Array, y: Array | None) -> Array:
        """Nodes (S, B), (S, B, P) or (S, B, L), with axes of size one for sample and enumeration axes."""
        return nodes.reshape(nodes.shape[:1] + (1,) * (self.lead + self._sample_axes(y)) + nodes.shape[1:])

    def _sample_axes(self, y: Array | None) -> int:
        """How many axes y has in front of those of the likelihood."""
        return 0 if y is None else max(y.ndim - len(self.batch_shape) - len(self.event_shape), 0)
