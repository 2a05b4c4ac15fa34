"""The models of tables: ordinary NumPyro models of standardized columns, to read, to call, and to copy and change.

Their priors are weak, on the scale of standardized data. Log-normals are given by their mode, since fits find posterior modes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.kernels import Kernel
from numpyro_orthgp.primitives import gp
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["classification_model", "counts_model", "covariance", "extra_zeros", "regression_model"]

MOST_LOGIT = 15.0  # of additional zeros
LEAST_NOISE = 2.0**-16  # y that is a formula of the columns has no noise, and a bound without any is rounding errors


def log_normal(mode: Any, spread: float) -> dist.Distribution:
    """A log-normal distribution with a given mode and standard deviation of the logarithm."""
    return dist.LogNormal(jnp.log(mode) + spread**2, spread)


def covariance(num_columns: int) -> Kernel:
    r"""Sample the hyperparameters of the kernel: Matern 5/2 with a lengthscale for each column, plus a plane.

    .. math:: k(x, x') = s^2 \, k_{5/2}(x, x'; \ell_1, \dots, \ell_D) + \frac{b^2}{D} x^\top x'

    Prior lengthscales are about sqrt(D). Typical standardized rows are then a lengthscale or two apart for any D.

    :param num_columns: D.
    """
    lengthscale = log_normal(num_columns**0.5, 1.5).expand([num_columns]).to_event(1)
    scale = numpyro.sample("scale", log_normal(1.0, 1.0))
    slope = numpyro.sample("slope", log_normal(0.3, 1.0))
    smooth = kernels.Matern52(numpyro.sample("lengthscale", lengthscale))
    return scale**2 * smooth + kernels.Linear(slope**2 / num_columns)


def regression_model(X: Array, y: Array | None = None, *, Z: Array, observed: Array | None = None) -> None:
    """Gaussian-process regression with the inducing variables integrated out.

    :param X: standardized columns, shape (N, D).
    :param y: standardized outputs, shape (N,).
    :param Z: inducing points, shape (M, D). ``numpyro.param("Z", Z)`` in a copy of this model would learn them.
    :param observed: False for rows that are left out, shape (N,); by default all rows are used.
    """
    kernel = covariance(X.shape[1])
    above = dist.transforms.AffineTransform(LEAST_NOISE, 1.0, domain=dist.constraints.positive)
    noise = numpyro.sample("noise", dist.TransformedDistribution(log_normal(0.2, 1.5), above))
    numpyro.sample("y", CollapsedGP(kernel, X, Z, noise, observed=observed), obs=y)


def classification_model(
    X: Array, y: Array | None = None, *, Z: Array, num_classes: int, num_rows: int | None = None
) -> None:
    """Gaussian-process classification. Two classes have one function and a probit, more have one function each and a softmax.

    :param X: standardized columns, shape (N, D), or a batch of their rows.
    :param y: classes 0, ..., C - 1, shape (N,).
    :param Z: inducing points, shape (M, D).
    :param num_classes: C.
    :param num_rows: N, if X is a batch.
    """
    num_latents = None if num_classes == 2 else num_classes
    wide = dist.Normal(0.0, 2.0)
    offset = numpyro.sample("offset", wide if num_latents is None else wide.expand([num_latents]).to_event(1))
    f = gp("f", covariance(X.shape[1]), Z, num_latents=num_latents)
    with numpyro.plate("rows", num_rows or len(X), subsample_size=len(X)):
        marginals = f(X) + offset
        one = num_latents is None
        y_given = likelihoods.Bernoulli(marginals, "probit") if one else likelihoods.Categorical(marginals)
        numpyro.sample("y", y_given, obs=y)


def extra_zeros(X: Any, gate: Any, slope: Any, xp: Any = jnp) -> Any:
    """Probabilities of additional zeros, shape (N,): those whose logit is gate + X slope, and neither 0 nor 1 for far rows.

    :param X: standardized columns, shape (N, D).
    :param xp: ``numpy`` or ``jax.numpy``.
    """
    logit = MOST_LOGIT * xp.tanh((gate + X @ slope) / MOST_LOGIT)
    return 0.5 * (1 + xp.tanh(logit / 2))


def counts_model(
    X: Array,
    y: Array | None = None,
    expected: ArrayLike = 1.0,
    *,
    Z: Array,
    overdispersed: bool,
    zero_inflated: bool = False,
    regularity: float = 1.0,
    num_rows: int | None = None,
) -> None:
    """Gaussian-process regression of counts, whose mean is ``expected`` times the exponential of a Gaussian process.

    :param X: standardized columns, shape (N, D), or a batch of their rows.
    :param y: counts, shape (N,).
    :param expected: counts at the mean rate, the exposure times this rate, shape (N,) or a scalar.
    :param Z: inducing points, shape (M, D).
    :param overdispersed: whether counts are negative binomial instead of Poisson.
    :param zero_inflated: whether there are additional zeros, with a probability whose logit is linear in the columns.
    :param regularity: power of the likelihood. Counts with so many times less variance than Poisson ones say so much more.
    :param num_rows: N, if X is a batch.
    """
    offset = numpyro.sample("offset", dist.Normal(0.0, 2.0))
    f = gp("f", covariance(X.shape[1]), Z)
    concentration = numpyro.sample("concentration", log_normal(3.0, 1.5)) if overdispersed else None
    if zero_inflated:
        gate = numpyro.sample("gate", dist.Normal(-1.0, 2.0))
        gate_slope = numpyro.sample("gate_slope", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", num_rows or len(X), subsample_size=len(X)):
        marginals = f(X) + offset
        if concentration is None:
            y_given = likelihoods.Poisson(marginals, expected)
        else:
            y_given = likelihoods.NegativeBinomial(marginals, concentration, expected)
        if zero_inflated:
            y_given = likelihoods.ZeroInflated(y_given, extra_zeros(X, gate, gate_slope))
        with numpyro.handlers.scale(scale=regularity):
            numpyro.sample("y", y_given, obs=y)
