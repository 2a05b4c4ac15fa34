"""The distribution of a function at inducing variables of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import jax.numpy as jnp

from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.projection import project
from numpyro_orthgp.inducing import Feature
from numpyro_orthgp.math.linalg import join
from numpyro_orthgp.types import Array

__all__ = ["moments_at", "project_sets", "split"]


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
    return f.mean(features, A), f.covariance(K, A)


def _covariance(f: GPFunction, s: Feature, features: Sequence[Feature]) -> Array:
    """Prior covariance between one feature and all features, shape (..., M_s, M)."""
    return join([s.covariance(f.kernel, other) for other in features], -1, event_dim=2)
