"""Rows at which f is evaluated: inputs, shape (B, D), or a functional of f for each row, with common operations for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.inducing.functional import Functional, concatenate
from numpyro_orthgp.inducing.points import InducingPoints
from numpyro_orthgp.types import Array

__all__ = ["as_feature", "covariance_of_rows", "covariance_with_rows", "join_rows", "scale_of_rows", "variance_of_rows"]

Rows = Array | Functional


def covariance_with_rows(kernel: Any, feature: Feature, X: Rows) -> Array:
    """Covariance of inducing variables with f at the rows, shape (..., M, B).

    :raises ValueError: if a feature gives another shape.
    """
    if isinstance(X, Functional):
        return X.covariance_with_feature(kernel, feature)
    C, expected = feature.covariance_with_inputs(kernel, X), (feature.num, X.shape[-2])
    if not isinstance(feature, InducingPoints) and C.shape[-2:] != expected:
        raise ValueError(
            f"`covariance_with_inputs` of {type(feature).__name__} must have shape (..., M, B) = {expected}, one row for each "
            f"variable; got {C.shape}."
        )
    return C


def variance_of_rows(kernel: Any, X: Rows) -> Array:
    """Prior variances, shape (..., B)."""
    return X.variance(kernel) if isinstance(X, Functional) else kernel(X)


def covariance_of_rows(kernel: Any, X: Rows) -> Array:
    """The prior covariance of all rows, shape (..., B, B)."""
    return X.matrix(kernel) if isinstance(X, Functional) else kernel(X, X)


def scale_of_rows(kernel: Any, X: Rows) -> Array | None:
    """Divisors of rows with different units, applied before a Cholesky factor; ``None`` for values of f, which share one unit."""
    return X.scale(kernel) if isinstance(X, Functional) else None


def as_feature(X: Rows) -> Feature:
    """The rows as inducing variables."""
    return X if isinstance(X, Functional) else InducingPoints(X)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of all parts, one part after another."""
    if any(isinstance(X, Functional) for X in parts):
        return concatenate(parts)
    return jnp.concatenate(parts)  # type: ignore[arg-type]
