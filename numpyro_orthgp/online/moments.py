"""A function's distribution at inducing variables of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import jax.numpy as jnp

from numpyro_orthgp.inducing import Feature
from numpyro_orthgp.math.gaussian import spread
from numpyro_orthgp.math.linalg import PRECISION, matmul
from numpyro_orthgp.math.projection import project, residual_covariance
from numpyro_orthgp.process import GPFunction
from numpyro_orthgp.types import Array

__all__ = ["mean_at", "moments_at", "project_sets", "split"]


def split(values: Array, features: Sequence[Feature], axis: int = -1) -> list[Array]:
    """Values at all features, joined along ``axis``, as one array for each."""
    return jnp.split(values, list(accumulate(s.num for s in features))[:-1], axis)


def project_sets(f: GPFunction, features: Sequence[Feature]) -> tuple[Array, ...]:
    """The projections of inducing variables on each set of ``f``, shapes (..., M_i, M)."""
    return project(f.blocks, [_join([s.covariance(f.kernel, other) for other in features], -1) for s in f.features])


def mean_at(f: GPFunction, features: Sequence[Feature], A: Sequence[Array]) -> Array:
    """Mean of inducing variables whose projections are ``A``, shape (..., M)."""
    mean = jnp.zeros((), f.features[0].dtype)
    for i, (q, Ai) in enumerate(zip(f.beliefs, A, strict=True)):
        loc = q.loc if f.shift is None else q.loc - f.shift.projected[i]
        mean = mean + jnp.einsum("...mb,...m->...b", Ai, loc, precision=PRECISION)
    if f.shift is not None:
        K = _join([s.covariance_with_inputs(f.kernel, f.shift.points) for s in features], -2)
        mean = mean + jnp.einsum("...bh,...h->...b", K, f.shift.weights, precision=PRECISION)
    return mean


def moments_at(f: GPFunction, features: Sequence[Feature]) -> tuple[Array, Array]:
    """Mean, shape (..., M), and covariance, shape (..., M, M), of all inducing variables together, without jitter."""
    A = project_sets(f, features)
    K = _join([_join([s.covariance(f.kernel, other) for other in features], -1) for s in features], -2)
    covariance = residual_covariance(K, A, A)
    for q, Ai in zip(f.beliefs, A, strict=True):
        W = spread(q, Ai)
        if W is not None:
            covariance = covariance + matmul(jnp.swapaxes(W, -1, -2), W)
    return mean_at(f, features, A), covariance


def _join(parts: Sequence[Array], axis: int) -> Array:
    batch = jnp.broadcast_shapes(*(p.shape[:-2] for p in parts))
    return jnp.concatenate([jnp.broadcast_to(p, (*batch, *p.shape[-2:])) for p in parts], axis)
