r"""How much of a function's variance is rounding.

In exact arithmetic :math:`\sum_i |A_i(x)|^2 \le k(x, x)`: no sets explain more than all of the prior variance. Rounding errors of
projections are those of the kernel times the inverse factors, which are as large as the root of the inverse jitter. At inputs far
from a set that follows another, where both nearly vanish in exact arithmetic, they are variance that q does not remove. So where
the sum is above k(x, x), the excess is an error of the variance. Beside the posterior variance it says how many digits of the
standard deviation are right.
"""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.projection import moments_of_whitened
from numpyro_orthgp.inducing.rows import Rows, variance_of_rows
from numpyro_orthgp.types import Array

__all__ = ["MUCH_ROUNDED", "rounding_of", "variance_at"]

MUCH_ROUNDED = 0.02  # of a standard deviation
_UNITS = 2  # of rounding, that a sum of squares has at least


def rounding_of(f: GPFunction, X: Rows, A: tuple[Array, ...]) -> Array:
    """A rough estimate of the relative error of the standard deviation at inputs, shape (..., B); NaN for a draw of f.

    :param A: projections of the inputs.
    """
    prior = variance_of_rows(f.kernel, X)
    if any(q.is_value for q in f.beliefs):
        return jnp.full_like(prior, jnp.nan)
    info = jnp.finfo(prior.dtype)
    excess = sum((jnp.sum(Ai**2, -2) for Ai in A), start=-prior)
    variance = variance_at(f, prior, A)
    wrong = jnp.maximum(excess, 0) + _UNITS * float(info.eps) * prior
    return jnp.where(prior > 0, wrong / (2 * jnp.maximum(variance, float(info.tiny))), 0)


def variance_at(f: GPFunction, prior: Array, A: tuple[Array, ...]) -> Array:
    """The variance of f at inputs, shape (..., B), from prior variances and projections."""
    of_sets = (moments_of_whitened(q, Ai).explained for q, Ai in zip(f.beliefs, A, strict=True) if not q.is_value)
    residual = sum((-jnp.sum(Ai**2, -2) for Ai in A), start=prior)
    return sum(of_sets, start=jnp.maximum(residual, 0))
