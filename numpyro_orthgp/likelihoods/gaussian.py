"""Gaussian noise with a constant or varying standard deviation, and what is quadratic in f as its log density is.

**Two kinds of likelihood on one tightened gp.** The closed form for Gaussian noise has one v per point; other likelihoods share one
v. On one gp in one model they imply two different q's of the residual, so tighten a model only if its likelihoods are of one kind.
``f(X)[..., p]`` selects outputs, not rows. Each unmixed output of a tightened gp has its own residual and v, so different outputs
may have different kinds of likelihoods. The closed form applies to unmixed functions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_orthgp.errors import check_option
from numpyro_orthgp.functions.arithmetic import outputs_first
from numpyro_orthgp.functions.expected import AveragedMarginals
from numpyro_orthgp.functions.groups import best_scales, charges, shares
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, GaussHermite, Integrator, expectation
from numpyro_orthgp.likelihoods.links import POSITIVE_LINKS
from numpyro_orthgp.likelihoods.masks import refuse_enumerated_groups
from numpyro_orthgp.likelihoods.special import LOG_ROOT_TWO_PI, branches
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.peaks import log_normal_expectation
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Gaussian", "HeteroskedasticGaussian", "Quadratic"]


# Coefficients of 1 / log(1 + x)^2 - (1 + x) / x^2, highest first.
_SERIES = (407 / 172_800, -9829 / 3_628_800, 19 / 6048, -221 / 60_480, 1 / 240, -1 / 240, 0, 1 / 12)


class Quadratic(ExpectedLikelihood):
    r"""A base class: log p(y | f), or a lower bound on it, is quadratic in f, :math:`c + b f - f^2 / (2 s^2)`.

    Then a tightened residual has the best v of each row, :math:`v = 1 / (1 + r / s^2)`, as for Gaussian noise: after scaling by s,
    divergence and trace have closed forms (Titsias 2025, Eqs. 15-19). A subclass defines ``conditional``, ``noise`` and
    ``expected_log_density``. If s depends on f(X), as a bound that touches the density somewhere, it takes ``marginals.mean`` and
    ``marginals.variance``; the latter is the explained variance where v has its best value.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if any(getattr(cls, name) is getattr(Quadratic, name) for name in ("noise", "expected_log_density")):
            raise TypeError(
                f"{cls.__name__} must define the property `noise`, s of - f^2 / (2 s^2), and `expected_log_density(y)`, the "
                "expectation of what is quadratic in f, from self.marginals.mean and self.marginals.variance."
            )
        super().__init_subclass__(**kwargs)

    @property
    def noise(self) -> Array:
        """s, a standard deviation in units of f, of a shape that broadcasts to f(X)."""
        raise NotImplementedError

    def expected_log_density(self, y: Array) -> Array:
        """E_q(f) of the quadratic function, in closed form."""
        raise NotImplementedError

    def log_prob(self, value: ArrayLike) -> Array:
        y = self._checked(value)
        if not self.closed_form:
            return self.expected_log_density(y) - self.tightening_cost
        return self._without_residual.expected_log_density(y) - self._charge / 2

    @property
    def closed_form(self) -> bool:
        """Whether the residual is tightened with a separate v for each point.

        Outputs that mix latent functions use each function's learned v, with its cost.
        """
        return self.marginals.tight and self.marginals.mixing is None and self.marginals.groups is None

    @property
    def residual_scale(self) -> Array:
        """The v of each point if ``closed_form``, 1 / (1 + r / s^2), shape of f(X)."""
        return 1 / (1 + self.marginals.residual / self._noise**2)

    @property
    def _without_residual(self) -> Quadratic:
        changed, m = object.__new__(type(self)), self.marginals
        known = replace(m, residual=jnp.zeros_like(m.residual), residual_scale=None, total=None, groups=None)
        changed.__dict__.update(self.__dict__, marginals=known)
        return changed

    @property
    def _noise(self) -> Array:
        """``noise`` as the residual sees it: a power of the density is one of larger noise."""
        noise = self._without_residual.noise
        return noise if self.power is None else noise / jnp.sqrt(self.power)

    @property
    def _charge(self) -> Array:
        return self._charged(jnp.log1p(self.marginals.residual / self._noise**2))


class Gaussian(Quadratic):
    r"""y = f(x) + Gaussian noise. Everything has a closed form, including the best tightening.

    .. math:: E_q[\log N(y \mid f, s^2)] = \log N(y \mid m, s^2) - \frac{e + r}{2 s^2},

    with mean m, explained variance e and residual variance r of f(x). With a tightened residual, :math:`-r / (2 s^2)` becomes
    :math:`-\tfrac12 \log(1 + r / s^2)`, the value at the best :math:`v = 1 / (1 + r / s^2)` of each point (Titsias 2025, Eq. 19).
    The noise may differ between points: after scaling by it, divergence and trace still have closed forms. With groups of rows it
    becomes :math:`-\tfrac12 \log |I + S^{-1/2} D S^{-1/2}|` with the residual covariance D of each group
    (:mod:`numpyro_orthgp.functions.groups`), divided among the group's rows.

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import Marginals
    >>> from numpyro_orthgp.likelihoods import Gaussian
    >>> f = Marginals(mean=jnp.zeros(2), explained=jnp.array([0.0, 1.0]), residual=jnp.zeros(2))
    >>> y = Gaussian(f, 1.0)
    >>> ones = jnp.ones(2)
    >>> print(y.log_prob(ones).round(3), y.log_predictive(ones).round(3))  # equal if f is known
    [-1.419 -1.919] [-1.419 -1.516]

    :param marginals: f(X), shape (B,) or (B, P).
    :param scale: standard deviation of the noise, in units of y: a scalar, shape (P,), one per point, or any shape that
        broadcasts to that of f(X).
    :raises ValueError: if ``scale`` does not broadcast, or is concrete and not positive; with groups of rows, if ``scale`` or a
        factor of f depends on an enumerated site that may differ between rows.
    """

    pytree_data_fields: tuple[str, ...] = ("scale",)
    moments_suffice = True

    def __init__(self, marginals: Marginals, scale: ArrayLike, *, validate_args: bool | None = None) -> None:
        self.scale = self._parameter(marginals, "scale", scale)
        super().__init__(marginals, validate_args=validate_args)
        num = len(marginals.own_shape)
        if marginals.groups is not None and max(marginals.groups.ndim - 2, self.scale.ndim) > num:
            refuse_enumerated_groups()

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Normal(f, self.scale)

    @property
    def noise(self) -> Array:
        """Its standard deviation, ``scale``."""
        return self.scale

    def log_prob(self, value: ArrayLike) -> Array:
        m = self.marginals
        weights = None if m.groups is None or not self.closed_form else shares(m.groups, m.own_shape[0])
        if weights is None:
            return super().log_prob(value)
        of_outputs, of_charges = (w.reshape(-1, *(1 for _ in m.own_shape[1:])) for w in weights)
        density = self._without_residual.expected_log_density(self._checked(value))
        return of_outputs * density - of_charges * self._charge / 2

    @property
    def closed_form(self) -> bool:
        """Whether the residual is tightened with a separate v for each point, or in groups.

        Outputs that mix latent functions use each function's learned v, with its cost.
        """
        return self.marginals.tight and self.marginals.mixing is None

    @property
    def residual_scale(self) -> Array:
        """The v of each point if ``closed_form``, 1 / (1 + r / s^2); for groups the diagonal of V. Shape of f(X)."""
        m = self.marginals
        if m.groups is None:
            return super().residual_scale
        return outputs_first(best_scales(m.groups, *self._by_output), m.own_shape)

    @property
    def _charge(self) -> Array:
        m = self.marginals
        if m.groups is None:
            return super()._charge
        self.refuse_wrappers()
        return self._charged(outputs_first(charges(m.groups, *self._by_output), m.own_shape))

    @property
    def _by_output(self) -> tuple[Array, Array]:
        """Variances of the residual, and standard deviations of the noise, shape (B,) or (P, B)."""
        own, noise = self.marginals.own_shape, jnp.broadcast_to(self._noise, self.batch_shape)
        return outputs_first(self.marginals.residual, own), outputs_first(noise, own)

    def expected_log_density(self, y: Array) -> Array:
        return dist.Normal(self.marginals.mean, self.scale).log_prob(y) - self.marginals.variance / (2 * self.scale**2)

    def log_predictive(self, value: ArrayLike) -> Array:
        if isinstance(self.marginals, AveragedMarginals):
            raise TypeError(
                "The predictive density at uncertain inputs needs more than the two moments that f.expected(X) knows. Average it "
                "over draws of the inputs: the logarithm of the mean of exp(log_predictive) at f(X)."
            )
        return dist.Normal(self.mean, jnp.sqrt(self.variance)).log_prob(self._checked(value))

    @property
    def support(self) -> Any:
        return constraints.real if self.marginals.groups is None else self.real_of_groups

    @property
    def mean(self) -> Array:
        return self.marginals.mean

    @property
    def variance(self) -> Array:
        return self.marginals.variance + self.scale**2


class HeteroskedasticGaussian(ExpectedLikelihood):
    r"""y = f(x) + Gaussian noise. Its standard deviation depends on x: :math:`e^{g(x)}` or :math:`\log(1 + e^{g(x)})`.

    Let f(x) and g(x) have means :math:`m_f, m_g`, variances :math:`v_f, v_g` and covariance c (zero unless they mix latent
    functions). For "exp" the expectation has a closed form (Lazaro-Gredilla and Titsias 2011, with a covariance):

    .. math:: E_q[\log p(y \mid f, g)] = -\tfrac12 \log 2\pi - m_g
        - \tfrac12 \left((y - m_f + 2c)^2 + v_f\right) e^{2 v_g - 2 m_g}

    Otherwise f is integrated in closed form, and g by the integrator, in one dimension.

    :param marginals: f(X) of shape (B, 2): ``stack([f(X), g(X)])``, a gp with ``num_latents=2``, or mixed latent functions.
    :param link: "exp" or "softplus", from g to the standard deviation of the noise, in units of y.
    :param integrator: default nodes about the bend of the link for g; for ``log_predictive``, around the peak.
    :raises ValueError: for another link, or if f(X) does not have shape (B, 2).
    """

    pytree_aux_fields: tuple[str, ...] = ("link",)

    def __init__(
        self,
        marginals: Marginals,
        link: str = "exp",
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.link = check_option("link", link, POSITIVE_LINKS)
        if self._required(marginals).own_shape[1:] != (2,):
            raise ValueError(
                f"HeteroskedasticGaussian needs f(X) of shape (B, 2), a mean and a noise level; got {marginals.shape}. Put two "
                "functions side by side with numpyro_orthgp.stack([f(X), g(X)]), or declare gp(..., num_latents=2)."
            )
        super().__init__(marginals, integrator=integrator or GaussHermite(), validate_args=validate_args)
        self.by_default = integrator is None

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Normal(f[..., 0], POSITIVE_LINKS[self.link].value(f[..., 1]))

    def expected_log_density(self, y: Array) -> Array:
        if self.link == "exp":
            return -LOG_ROOT_TWO_PI - self._bent[0] - self._squares_over_power(y, 2) / 2
        nodes, weights = self._line(y)
        mean, variance, g = self._given_noise(nodes)
        square, link = (y - mean) ** 2 + variance, POSITIVE_LINKS[self.link]
        if not self.by_default:
            return expectation(weights, -LOG_ROOT_TWO_PI - link.log(g) - square / (2 * link.value(g) ** 2))
        # The part that grows exponentially comes from far below the nodes, and has a closed form.
        growth = self._squares_over_power(y, 2) + self._squares_over_power(y, 1)
        return expectation(weights, -LOG_ROOT_TWO_PI - link.log(g) - square * _bounded_part(g) / 2) - growth / 2

    def _squares_over_power(self, y: Array, power: int) -> Array:
        """E[(y - f)^2 exp(-power g)]."""
        (m_f, m_g), (v_f, v_g), c = self._moments
        return ((y - m_f + power * c) ** 2 + v_f) * jnp.exp(power * (power * v_g / 2 - m_g))

    def _bends(self, y: Array | None) -> tuple[float, float, float]:
        return 0.0, 0.0, 2.0

    @property
    def _bent(self) -> tuple[Array, Array]:
        (_, m_g), (_, v_g), _ = self._moments
        return m_g, safe_sqrt(v_g)

    def log_predictive(self, value: ArrayLike) -> Array:
        y = self._checked(value)

        def log_density(nodes: Array) -> Array:
            mean, variance, g = self._given_noise(nodes)
            total = variance + POSITIVE_LINKS[self.link].value(g) ** 2
            return dist.Normal(mean, jnp.sqrt(total)).log_prob(y)

        if self.by_default:
            shape = jnp.broadcast_shapes(y.shape, self.batch_shape)
            return log_normal_expectation(log_density, shape, self.marginals.mean.dtype)
        return self._log_average(log_density, y, line=True)

    @property
    def support(self) -> Any:
        return constraints.real

    @property
    def mean(self) -> Array:
        return self.marginals.mean[..., 0]

    @property
    def variance(self) -> Array:
        (_, m_g), (v_f, v_g), _ = self._moments
        if self.link == "exp":
            return v_f + jnp.exp(2 * (m_g + v_g))
        return v_f + self._average(lambda t: POSITIVE_LINKS[self.link].value(self._given_noise(t)[2]) ** 2, line=True)

    @property
    def _moments(self) -> tuple[tuple[Array, Array], tuple[Array, Array], Array]:
        """Means and variances of f and g, and their covariance, shape (B,) each."""
        m = self.marginals
        mean, variance = m.mean, m.variance
        covariance = jnp.zeros_like(mean[..., 0])
        if m.mixing is not None:
            covariance = (m.latent_variance * m.mixing[..., 0] * m.mixing[..., 1]).sum(-1)
        return (mean[..., 0], mean[..., 1]), (variance[..., 0], variance[..., 1]), covariance

    def _given_noise(self, nodes: Array) -> tuple[Array, Array, Array]:
        """Mean and variance of f(x) given values of g(x) at standard-normal ``nodes``, and those values."""
        (m_f, m_g), (v_f, v_g), c = self._moments
        s_g = safe_sqrt(v_g)
        slope = c / jnp.where(s_g > 0, s_g, 1)  # no covariance with a constant
        return m_f + slope * nodes, jnp.maximum(v_f - slope**2, 0), m_g + s_g * nodes


def _bounded_part(g: Array) -> Array:
    """1 / softplus(g)^2 - exp(-2 g) - exp(-g), between 0 and 1/12."""
    # Of x = exp(g) it is 1 / log(1 + x)^2 - (1 + x) / x^2; the two cancel for small x, which have the series.
    small, low, rest = branches(g, -3.0)
    near = jnp.polyval(jnp.asarray(_SERIES, g.dtype), jnp.exp(low))
    return jnp.where(small, near, 1 / jax.nn.softplus(rest) ** 2 - (1 + jnp.exp(-rest)) * jnp.exp(-rest))
