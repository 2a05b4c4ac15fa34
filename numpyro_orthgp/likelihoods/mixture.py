"""Average of a likelihood over several draws of its inputs, inside the logarithm.

``Mixture`` is a separate likelihood, not an option of others: it sees B S rows and returns B densities.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from numpyro_orthgp.likelihoods.base import log_predictive, unwrap
from numpyro_orthgp.likelihoods.wrapped import key_of_draw
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["Mixture"]


class Mixture(dist.Distribution):
    r"""Average of a likelihood over S draws of its inputs, for :class:`~numpyro_orthgp.DeepGP`. That module explains the bound.

    .. math:: \log \tfrac1S \sum_s w_s \exp\big( E_{q(f)}[\log p(y \mid f(h_s))] \big)

    Here :math:`h_s` are the draws of one point and :math:`w_s` their importance weights, from
    :meth:`DeepGP.particles <numpyro_orthgp.DeepGP.particles>`. :meth:`log_predictive` has
    :math:`\log E_{q(f)}[p(y \mid f(h_s))]` in the exponent instead: the density of new data, with f and draws integrated out.
    Moments and samples are those of this density divided by the mean weight, which is one only on average.

    ::

        f, log_weights = deep.particles(X, 10)
        numpyro.sample("y", likelihoods.Mixture(likelihoods.Gaussian(f, noise), log_weights), obs=y)

    :param components: a likelihood of the marginals at B S inputs, the S draws of a point consecutive. Its batch shape is (B S,),
        after ``to_event`` for several outputs. Repeat parameters that differ between points: ``jnp.repeat(noise, S)``.
    :param log_weights: shape (B, S).
    :raises ValueError: if the shapes do not match.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields: tuple[str, ...] = ("components", "log_weights")
    integrates_function = True

    def __init__(
        self, components: dist.Distribution, log_weights: ArrayLike, *, validate_args: bool | None = None
    ) -> None:
        self.log_weights = jnp.asarray(log_weights)
        if self.log_weights.ndim != 2 or components.batch_shape != (self.log_weights.size,):
            raise ValueError(
                f"`components` must have batch shape (B S,) for `log_weights` of shape (B, S); got {components.batch_shape} and "
                f"{self.log_weights.shape}. Several outputs of a point are an event: .to_event(1)."
            )
        marginals = getattr(unwrap(components)[0], "marginals", None)
        if getattr(marginals, "groups", None) is not None:
            raise ValueError(
                "`group_size` makes groups of different rows, but these rows are several draws of one point: "
                "leave `group_size` out."
            )
        self.components = components
        super().__init__(self.log_weights.shape[:1], components.event_shape, validate_args=validate_args)

    @property
    def num_samples(self) -> int:
        """Number of draws S of each point."""
        return self.log_weights.shape[1]

    def log_prob(self, value: ArrayLike) -> Array:
        """log of the average of exp(E_q(f)[log p(y | f)]) over draws, shape (B,)."""
        return self._average(self.components.log_prob(self._repeated(value)))

    def log_predictive(self, value: ArrayLike) -> Array:
        """log of the average of E_q(f)[p(y | f)] over draws, shape (B,)."""
        return self._average(log_predictive(self.components, self._repeated(value)))

    @property
    def closed_form(self) -> bool:
        """Whether the components are tightened in closed form, as :class:`Gaussian` is."""
        return getattr(unwrap(self.components)[0], "closed_form", False)

    @property
    def residual_scale(self) -> Array:
        """The components' v for each draw of a point if ``closed_form``, shape (B, S) or (B, S, P)."""
        return self._split(unwrap(self.components)[0].residual_scale)

    def sample(self, key: PRNGKey | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw y. Each draw uses one particle, the same for all points whose particles have the same weights."""
        key = key_of_draw(key)
        pick_key, y_key = jax.random.split(key)
        y = self._split(self.components.sample(y_key, sample_shape))
        # One uniform number for all points selects a particle from the cumulative weights of each point.
        shares = self._shares
        u = jax.random.uniform(pick_key, sample_shape, shares.dtype)[..., None, None]
        picked = (jnp.cumsum(shares[:, :-1], 1) <= u).sum(-1)
        axis = len(sample_shape) + 1
        picked = picked.reshape(picked.shape + (1,) * (y.ndim - len(sample_shape) - 1))
        return jnp.take_along_axis(y, picked, axis=axis).squeeze(axis)

    @property
    def mean(self) -> Array:
        """E[y], with particles in proportion to their weights, shape batch + event."""
        return self._averaged(self._split(self.components.mean))

    @property
    def variance(self) -> Array:
        """Var[y] by the law of total variance, shape batch + event."""
        mean = self._split(self.components.mean)
        spread = (mean - self.mean[:, None]) ** 2
        return self._averaged(self._split(self.components.variance) + spread)

    @property
    def support(self) -> Any:
        return self.components.support

    @property
    def _shares(self) -> Array:
        """Weights that sum to one over the particles of a point, shape (B, S)."""
        return jax.nn.softmax(self.log_weights, axis=1)

    def _averaged(self, values: Array) -> Array:
        """The average over particles of values of shape (B, S, *event)."""
        return (self._shares.reshape(self.log_weights.shape + (1,) * (values.ndim - 2)) * values).sum(1)

    def _split(self, values: Array) -> Array:
        """Reshape (..., B S, *event) to (..., B, S, *event)."""
        axis = values.ndim - len(self.event_shape) - 1
        return values.reshape(*values.shape[:axis], *self.log_weights.shape, *values.shape[axis + 1 :])

    def _repeated(self, value: ArrayLike) -> Array:
        y, shape = jnp.asarray(value), self.batch_shape + self.event_shape
        if y.shape[max(y.ndim - len(shape), 0) :] != shape:
            raise ValueError(f"y must have shape {shape} to match the mixture; got {y.shape}.")
        return jnp.repeat(y, self.num_samples, axis=y.ndim - len(shape))

    def _average(self, log_densities: Array) -> Array:
        values = log_densities.reshape(*log_densities.shape[:-1], *self.log_weights.shape) + self.log_weights
        return logsumexp(values, axis=-1) - jnp.log(jnp.asarray(self.num_samples, values.dtype))
