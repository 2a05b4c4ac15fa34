"""Real outputs with noise that is not Gaussian."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, Integrator
from numpyro_orthgp.marginals import Marginals
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["StudentT"]


class StudentT(ExpectedLikelihood):
    """y = f(x) + Student-t noise: robust to outliers.

    :param marginals: f(X), shape (B,) or (B, P).
    :param df: degrees of freedom; broadcasts to f(X).
    :param scale: scale of the noise, in units of y (its standard deviation times sqrt((df - 2) / df)).
    :param integrator: default 20 Gauss-Hermite nodes. Where the posterior of f is much wider than the noise the integrand
        is narrow: take more.
    """

    pytree_data_fields: tuple[str, ...] = ("df", "scale")

    def __init__(
        self,
        marginals: Marginals,
        df: ArrayLike,
        scale: ArrayLike,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.df, self.scale = jnp.asarray(df), jnp.asarray(scale)
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.StudentT(self.df, f, self.scale)
