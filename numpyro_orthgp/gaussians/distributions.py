"""NumPyro distributions of whitened inducing variables: the prior, the guide's Gaussian, and the KL divergence between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_orthgp.errors import check_key
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["WhitenedGaussian", "WhitenedPrior"]


class WhitenedPrior(dist.Independent):
    """The prior N(0, I) of whitened inducing variables.

    It is an ``Independent`` normal, so KL divergences that NumPyro knows for these, such as ``AutoNormal``'s, hold here too.

    :param shape: event shape, (M,) or (P, M).
    :param dtype: dtype of the draws; NumPyro's normal would draw in the default dtype.
    """

    pytree_data_fields = ("base_dist",)
    pytree_aux_fields = ("reinterpreted_batch_ndims",)

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        # NumPy arrays: checks of JAX arrays would compile a program for each operation.
        super().__init__(dist.Normal(np.zeros(shape, dtype), np.ones(shape, dtype)), len(shape))

    def sample(self, key: PRNGKey | None, sample_shape: tuple[int, ...] = ()) -> Array:
        key = check_key(key, "gp() and orthogonal()")
        return jax.random.normal(key, sample_shape + self.event_shape, self.base_dist.loc.dtype)

    def sample_with_intermediates(
        self, key: PRNGKey | None, sample_shape: tuple[int, ...] = ()
    ) -> tuple[Array, list[Any]]:
        # `numpyro.sample` calls this; the base class would draw in the default dtype.
        return self.sample(key, sample_shape), []


class WhitenedGaussian(dist.Distribution):
    """A Gaussian over whitened inducing variables, from a guide.

    :param q: its family and parameters; all axes of ``q.loc`` are event axes.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("q",)
    reparametrized_params = ["q"]
    has_rsample = True

    def __init__(self, q: Whitened, *, validate_args: bool | None = None) -> None:
        self.q = q
        super().__init__((), jnp.shape(q.loc), validate_args=validate_args)

    @property
    def support(self) -> Any:
        return constraints.independent(constraints.real, self.event_dim)

    def rsample(self, key: PRNGKey | None, sample_shape: tuple[int, ...] = ()) -> Array:
        return _drawn(self.q, check_key(key, "guides of this package"), shape=tuple(sample_shape))

    def sample(self, key: PRNGKey | None, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.rsample(key, sample_shape)

    @broadcasting
    def log_prob(self, value: ArrayLike) -> Array:
        return self.q.log_density(jnp.asarray(value))

    @property
    def mean(self) -> Array:
        return self.q.loc

    @property
    def variance(self) -> Array:
        return jnp.broadcast_to(self.q.variance(), self.q.loc.shape)


@one_program
def _drawn(q: Whitened, key: PRNGKey, *, shape: tuple[int, ...]) -> Array:
    return q.sample(key, shape)


@one_program
def _from_prior(q: Whitened) -> Array:
    return q.kl_from_prior()


# Without this registration TraceMeanField_ELBO would silently fall back to one Monte Carlo sample.
@kl_divergence.register(WhitenedGaussian, WhitenedPrior)
@broadcasting
def _kl_from_prior(q: WhitenedGaussian, p: WhitenedPrior) -> Array:
    if q.event_shape != p.event_shape:
        raise ValueError(
            f"The guide's q has shape {q.event_shape} but the model has whitened inducing variables of shape {p.event_shape}."
        )
    return _from_prior(q.q)
