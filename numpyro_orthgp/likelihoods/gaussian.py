"""Gaussian noise: everything in closed form, including the best tightening."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_orthgp.likelihoods.base import ExpectedLikelihood
from numpyro_orthgp.marginals import Marginals
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Gaussian"]


class Gaussian(ExpectedLikelihood):
    r"""y = f(x) + noise.

    .. math:: E_q[\log N(y \mid f, s^2)] = \log N(y \mid m, s^2) - \frac{e + r}{2 s^2},

    with mean m, explained variance e and residual variance r of f(x). Tightened, :math:`-r / (2 s^2)` becomes
    :math:`-\tfrac12 \log(1 + r / s^2)`, the value at the best :math:`v = 1 / (1 + r / s^2)` of each point (Titsias 2025,
    Eq. 19; the noise may differ from point to point, since scaling by it first leaves divergence and trace in closed form).

    :param marginals: f(X), shape (B,) or (B, P).
    :param scale: standard deviation of the noise, in units of y; a scalar, (P,), or one per point: any shape that
        broadcasts to that of f(X).
    :raises ValueError: if ``scale`` does not broadcast.
    """

    pytree_data_fields: tuple[str, ...] = ("scale",)

    def __init__(self, marginals: Marginals, scale: ArrayLike, *, validate_args: bool | None = None) -> None:
        self.scale = jnp.asarray(scale)
        super().__init__(marginals, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Normal(f, self.scale)

    def log_prob(self, value: ArrayLike) -> Array:
        y, m, s2 = self._checked(value), self.marginals, self.scale**2
        closed = m.tight and m.mixing is None
        ratio = (m.residual if closed else m.residual_variance) / s2
        # Outputs that mix latent functions share each function's v: there the learned one, at its cost.
        gap = jnp.log1p(ratio) / 2 if closed else ratio / 2 + self.tightening_cost
        return dist.Normal(m.mean, self.scale).log_prob(y) - m.explained_variance / (2 * s2) - gap

    def expected_log_density(self, y: Array) -> Array:
        return dist.Normal(self.marginals.mean, self.scale).log_prob(y) - self.marginals.variance / (2 * self.scale**2)

    def log_predictive(self, value: ArrayLike) -> Array:
        return dist.Normal(self.mean, jnp.sqrt(self.variance)).log_prob(self._checked(value))

    @property
    def support(self) -> Any:
        return constraints.real

    @property
    def mean(self) -> Array:
        return self.marginals.mean

    @property
    def variance(self) -> Array:
        return self.marginals.variance + self.scale**2
