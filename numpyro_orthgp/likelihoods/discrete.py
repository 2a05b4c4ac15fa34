"""Labels, classes and counts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import gammaln, log_ndtr, ndtr

from numpyro_orthgp.errors import check_option, is_concrete
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, Integrator
from numpyro_orthgp.marginals import Marginals
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Bernoulli", "Categorical", "Poisson"]


class Bernoulli(ExpectedLikelihood):
    r"""Binary labels: :math:`p(y = 1 \mid f)` is :math:`1 / (1 + e^{-f})` ("logit") or :math:`\Phi(f)` ("probit").

    :param marginals: f(X), shape (B,) or (B, P).
    :param link: "logit" or "probit". With "probit" ``mean`` and ``log_predictive`` are in closed form,
        :math:`\Phi(m / \sqrt{1 + v})`.
    :param integrator: default 20 Gauss-Hermite nodes.
    :raises ValueError: for another link.
    """

    pytree_aux_fields: tuple[str, ...] = ("link",)

    def __init__(
        self,
        marginals: Marginals,
        link: str = "logit",
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.link = check_option("link", link, ("logit", "probit"))
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.BernoulliLogits(f) if self.link == "logit" else dist.BernoulliProbs(ndtr(f))

    def log_density(self, f: Array, y: Array) -> Array:
        signed = _signs(y, f.dtype) * f  # p(y | f) is the link at f for y = 1, at -f for y = 0
        return jax.nn.log_sigmoid(signed) if self.link == "logit" else log_ndtr(signed)

    def log_predictive(self, value: ArrayLike) -> Array:
        if self.link == "logit":
            return super().log_predictive(value)
        argument = self._probit_argument
        return log_ndtr(_signs(self._checked(value), argument.dtype) * argument)

    @property
    def mean(self) -> Array:
        return ndtr(self._probit_argument) if self.link == "probit" else super().mean

    @property
    def variance(self) -> Array:
        p = self.mean
        return p * (1 - p)

    @property
    def _probit_argument(self) -> Array:
        return self.marginals.mean / jnp.sqrt(1 + self.marginals.variance)


class Poisson(ExpectedLikelihood):
    r"""Counts with rate :math:`\text{exposure} \cdot e^{f}`; the expectation is in closed form:

    .. math:: E_q[\log p(y \mid f)] = y\,(m + \log c) - c\, e^{m + v / 2} - \log y!

    :param marginals: f(X), shape (B,) or (B, P).
    :param exposure: c > 0, what the rate is per unit of (time, area, population); broadcasts to f(X).
    :param integrator: for ``log_predictive``; default 20 Gauss-Hermite nodes.
    :raises ValueError: if a concrete ``exposure`` is not positive.
    """

    pytree_data_fields: tuple[str, ...] = ("exposure",)

    def __init__(
        self,
        marginals: Marginals,
        exposure: ArrayLike = 1.0,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.exposure = jnp.asarray(exposure, marginals.mean.dtype)
        if is_concrete(self.exposure) and not (np.asarray(self.exposure) > 0).all():
            raise ValueError(f"`exposure` must be positive; got a smallest value of {np.asarray(self.exposure).min()}.")
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Poisson(self.exposure * jnp.exp(f))

    def log_density(self, f: Array, y: Array) -> Array:
        y = _real(y, f.dtype)
        return y * (f + jnp.log(self.exposure)) - self.exposure * jnp.exp(f) - gammaln(y + 1)

    def expected_log_density(self, y: Array) -> Array:
        m = self.marginals.mean
        y = _real(y, m.dtype)
        return y * (m + jnp.log(self.exposure)) - self.mean - gammaln(y + 1)

    @property
    def mean(self) -> Array:
        return self.exposure * jnp.exp(self.marginals.mean + self.marginals.variance / 2)

    @property
    def variance(self) -> Array:
        return self.mean + self.mean**2 * jnp.expm1(self.marginals.variance)


class Categorical(ExpectedLikelihood):
    r"""Classes 0, ..., P-1 with :math:`p(y = c \mid f) = \mathrm{softmax}(f)_c`.

    :param marginals: f(X) of shape (B, P): a gp with ``num_latents=P``, or ``stack``ed or mixed single ones.
    :param integrator: default quasi-Monte Carlo with 128 points; Gauss-Hermite for up to two latent functions.
    :raises ValueError: if ``marginals`` has no latent axis.
    """

    def __init__(
        self, marginals: Marginals, *, integrator: Integrator | None = None, validate_args: bool | None = None
    ) -> None:
        if isinstance(marginals, Marginals) and marginals.mean.ndim != 2:
            raise ValueError(
                f"Categorical needs f(X) of shape (B, P), one latent function per class; got {marginals.shape}. "
                "Declare gp(..., num_latents=P)."
            )
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.CategoricalLogits(f)

    def log_density(self, f: Array, y: Array) -> Array:
        return super().log_density(f, y.astype(int))  # NumPyro takes no labels like 2.0

    @property
    def probs(self) -> Array:
        """E_q(f)[softmax(f)], the predictive probabilities, shape (B, P)."""
        f, weights = self._values()
        return jnp.tensordot(weights, jax.nn.softmax(f, axis=-1), 1)


def _real(y: Array, dtype: Any) -> Array:
    """Integer labels or counts as real numbers: unsigned ones would wrap around, any would end in the default dtype."""
    return y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(dtype)


def _signs(y: Array, dtype: Any) -> Array:
    """Labels 0 and 1 to -1 and 1."""
    return 2 * _real(y, dtype) - 1
