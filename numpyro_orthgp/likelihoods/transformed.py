"""Outputs that are a known transformation of simpler ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.transforms import ComposeTransform, Transform

from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, GaussHermite, Integrator, expectation
from numpyro_orthgp.likelihoods.gaussian import Gaussian
from numpyro_orthgp.likelihoods.wrapped import READ_AS
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["Transformed"]


class Transformed(ExpectedLikelihood):
    r"""y = T(z), where z follows a given likelihood. With :class:`Gaussian` this is a warped Gaussian process.

    ::

        Transformed(Gaussian(f(X), noise), dist.transforms.ExpTransform())

    .. math:: \log p(y) = \log p_z(T^{-1} y) - \log |T'(T^{-1} y)|,

    This also holds for expectations, since the Jacobian does not depend on f. The likelihood's closed forms remain, including
    Gaussian's best tightening.

    :param likelihood: any likelihood of real outputs, with its own marginals.
    :param transforms: NumPyro transforms (:mod:`numpyro.distributions.transforms`) of single numbers, one or a list. The first is
        applied first. Their parameters may be learned.
    :param integrator: for ``mean`` and ``variance``, which exist if ``likelihood`` is :class:`Gaussian`; default 20
        Gauss-Hermite nodes for z.
    :raises TypeError: if ``likelihood`` is not a likelihood of this package, or ``transforms`` are not transforms.
    :raises ValueError: if likelihood or transforms are for vectors, or the likelihood has discrete outputs.
    """

    pytree_data_fields: tuple[str, ...] = ("likelihood", "transforms")

    def __init__(
        self,
        likelihood: ExpectedLikelihood,
        transforms: Transform | Sequence[Transform],
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(likelihood, ExpectedLikelihood):
            raise TypeError(f"Transformed wraps a likelihood of numpyro_orthgp; got {type(likelihood).__name__}.")
        self.likelihood = likelihood
        self.transforms = [transforms] if isinstance(transforms, Transform) else list(transforms)
        if not self.transforms or not all(isinstance(t, Transform) for t in self.transforms):
            raise TypeError(
                f"`transforms` must be one or more of numpyro.distributions.transforms; got {transforms!r}."
            )
        whole = ComposeTransform(self.transforms)
        dims = (whole.domain.event_dim, whole.codomain.event_dim, len(likelihood.event_shape))
        if any(dims):
            raise ValueError(
                "Transformed changes each output on its own: likelihood and transforms must have event dimension 0; got "
                f"{dims[2]} for the likelihood, and transforms from {dims[0]} to {dims[1]}."
            )
        if likelihood.support.is_discrete:  # no Jacobian for probabilities
            raise ValueError(
                f"Transformed changes the density of real outputs; those of {type(likelihood).__name__} are discrete. Transform y "
                "back and use the likelihood itself."
            )
        integrator = integrator or likelihood.integrator
        super().__init__(likelihood.marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.TransformedDistribution(self.likelihood.conditional(f), self.transforms)

    def log_density(self, f: Array, y: Array) -> Array:
        z, log_slope = self._inverse(y)
        return self.likelihood.log_density(f, z) - log_slope

    def log_prob(self, value: ArrayLike) -> Array:
        z, log_slope = self._inverse(self._checked(value))
        return self.likelihood.log_prob(z) - log_slope

    def expected_log_density(self, y: Array) -> Array:
        z, log_slope = self._inverse(y)
        return self.likelihood.expected_log_density(z) - log_slope

    def log_predictive(self, value: ArrayLike) -> Array:
        z, log_slope = self._inverse(self._checked(value))
        return self.likelihood.log_predictive(z) - log_slope

    @property
    def censored(self) -> Array | None:
        """Which y are censored, from the likelihood of z; ``None`` if it has no censoring."""
        return getattr(self.likelihood, "censored", None)

    def without(self, mask: Any) -> Any:
        changed = super().without(mask)
        changed.likelihood = self.likelihood.without(mask)
        return changed

    @property
    def closed_form(self) -> bool:
        """Whether the likelihood of z has the closed-form tightening, as in :class:`Gaussian`."""
        return self.likelihood.closed_form

    @property
    def residual_scale(self) -> Array:
        """The v of each point if ``closed_form``."""
        return self.likelihood.residual_scale

    def sample(self, key: PRNGKey | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw f, then z, and transform z."""
        return self._forward(self.likelihood.sample(key, sample_shape))

    @property
    def mean(self) -> Array:
        y, weights = self._outputs()
        return expectation(weights, y)

    @property
    def variance(self) -> Array:
        y, weights = self._outputs()
        return expectation(weights, (y - expectation(weights, y)) ** 2)

    def _forward(self, z: Array) -> Array:
        for transform in self.transforms:
            z = jnp.asarray(transform(z))
        return z

    def _inverse(self, y: Array) -> tuple[Array, Array]:
        """z = T^-1(y) and log |T'(z)|. The latter is zero for a censored time, which has a probability, not a density."""
        log_slope: Any = 0.0
        for transform in reversed(self.transforms):
            z = jnp.asarray(transform.inv(y))
            log_slope = log_slope + transform.log_abs_det_jacobian(z, y)
            y = z
        if self.censored is not None:
            log_slope = jnp.where(self.censored, 0, log_slope)
        return y, log_slope

    def _outputs(self) -> tuple[Array, Array]:
        """y at nodes of the marginal distribution of z, and the weights of the nodes."""
        z = self.likelihood
        if not isinstance(z, Gaussian):
            raise NotImplementedError(
                f"The moments of a transformed {type(z).__name__} are not known: average draws, `.sample(key, (1000,))`."
            )
        rule = self.integrator if isinstance(self.integrator, GaussHermite) else GaussHermite()
        nodes, weights = rule.nodes(None, self.batch_shape, None, z.mean.dtype)
        return self._forward(z.mean + jnp.sqrt(z.variance) * nodes), weights


def _as_transformed(fn: Any) -> Any:
    """NumPyro's distribution as :class:`Transformed`, which knows more of its likelihood; others unchanged."""
    ours = isinstance(fn.base_dist, ExpectedLikelihood) and not fn.base_dist.support.is_discrete
    return Transformed(fn.base_dist, fn.transforms) if ours and not fn.event_dim else fn


READ_AS[dist.TransformedDistribution] = _as_transformed
