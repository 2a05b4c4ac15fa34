"""The distribution of a function at inducing variables of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import jax.numpy as jnp

from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.projection import Block, conditional_covariance, project
from numpyro_orthgp.inducing import Feature
from numpyro_orthgp.math.cholesky import safe_cholesky
from numpyro_orthgp.math.linalg import jitter_scale, join, join_blocks
from numpyro_orthgp.math.products import diagonal
from numpyro_orthgp.types import Array

__all__ = ["moments_at", "noise_of", "project_sets", "root_at", "split"]


def split(values: Array, features: Sequence[Feature], axis: int = -1) -> list[Array]:
    """Split values at all features, joined along ``axis``, into one array for each feature."""
    return jnp.split(values, list(accumulate(s.num for s in features))[:-1], axis)


def project_sets(f: GPFunction, features: Sequence[Feature]) -> tuple[Array, ...]:
    """The projections of inducing variables on each set of ``f``, shapes (..., M_i, M)."""
    return project(f.blocks, [_covariance(f, s, features) for s in f.features])


def moments_at(f: GPFunction, features: Sequence[Feature]) -> tuple[Array, Array]:
    """Mean, shape (..., M), and covariance, shape (..., M, M), of all inducing variables together, without jitter."""
    A = project_sets(f, features)
    K = join([_covariance(f, s, features) for s in features], -2, event_dim=2)
    return f.mean_from(features, A), f.covariance_from(K, A)


def noise_of(blocks: Sequence[Block], features: Sequence[Feature]) -> Array:
    """The jitter of each variable, shape (..., M)."""
    pairs = zip(blocks, features, strict=True)
    return join([jnp.broadcast_to(b.jitter, (*b.jitter.shape[:-1], s.num)) for b, s in pairs], -1, event_dim=1)


def root_at(f: GPFunction, features: Sequence[Feature], noise: Array) -> Array:
    """A root of the covariance of variables with independent noise, shape (..., M', L).

    Of a root whitened once, rounding errors grow with the root of the inverse jitter. Of a covariance whitened from both sides they
    grow with the inverse itself, a million in float32, and more than that where it is a difference of two.

    :param noise: variances, shape (..., M').
    """
    every, own = (*f.features, *features), noise_of(f.blocks, f.features)
    K = join_blocks([[other.covariance(f.kernel, s) for other in every[: i + 1]] for i, s in enumerate(every)])
    K = conditional_covariance(K, (), join([own, noise], -1, event_dim=1))
    rest = safe_cholesky(K, jitter_scale(diagonal(K)))[..., own.shape[-1] :, own.shape[-1] :]
    spread = [q.spread(A) for q, A in zip(f.beliefs, project_sets(f, features), strict=True)]
    return join([*(jnp.swapaxes(W, -1, -2) for W in spread if W is not None), rest], -1, event_dim=2)


def _covariance(f: GPFunction, s: Feature, features: Sequence[Feature]) -> Array:
    """Prior covariance between one feature and all features, shape (..., M_s, M)."""
    return join([s.covariance(f.kernel, other) for other in features], -1, event_dim=2)
