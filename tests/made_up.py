"""Parts that a user could make: a kernel, a feature, a functional, a likelihood, a family of q, a residual. None is ours."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.gaussians import Whitened
from numpyro_orthgp.inducing import Functional


class Cauchy(kernels.Stationary):
    r"""k = 1 / (1 + r^2)."""

    def profile(self, r2):
        return 1 / (1 + r2)


def cauchy(lengthscale):
    """The same as a plain function."""

    def kernel(X1, X2=None):
        if X2 is None:
            return jnp.ones(X1.shape[:-1], X1.dtype)
        r2 = jnp.sum(((X1[..., :, None, :] - X2[..., None, :, :]) / lengthscale) ** 2, -1)
        return 1 / (1 + r2)

    return kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Averages:
    """Averages of f over three points around each of M centres (M, D)."""

    centres: jax.Array
    width: float = dataclasses.field(default=0.2, metadata={"static": True})

    @property
    def num(self):
        return self.centres.shape[0]

    @property
    def dtype(self):
        return self.centres.dtype

    @property
    def points(self):
        steps = self.width * jnp.arange(-1.0, 2.0, dtype=self.dtype)
        return (self.centres[:, None] + steps[:, None]).reshape(-1, self.centres.shape[-1])

    def covariance(self, kernel, other):
        across = other.covariance_with_inputs(kernel, self.points)
        return across.reshape(*across.shape[:-1], self.num, 3).mean(-1).swapaxes(-1, -2)

    def covariance_with_inputs(self, kernel, X):
        K = kernel(self.points, X)
        return K.reshape(*K.shape[:-2], self.num, 3, K.shape[-1]).mean(-2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Oscillator(Functional):
    """f'' + w^2 f at inputs X (B, 1), with w of shape (B,)."""

    X: jax.Array
    w: jax.Array
    places: tuple | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def num(self):
        return self.X.shape[0]

    @property
    def dtype(self):
        return self.X.dtype

    def checked(self, dim, dtype):
        return self

    def check(self, kernel):
        ogp.Derivative(self.X, (0, 0)).check(kernel)

    def apply(self, function):
        return ogp.Derivative(self.X, (0, 0)).apply(function) + self.w**2 * function(self.X)


class WrappedNormal(dist.Distribution):
    """A normal of an angle: N(loc, scale^2) modulo one turn."""

    arg_constraints = {"loc": dist.constraints.real, "scale": dist.constraints.positive}
    support = dist.constraints.interval(-jnp.pi, jnp.pi)

    def __init__(self, loc, scale, *, validate_args=None):
        self.loc, self.scale = jnp.broadcast_arrays(loc, scale)
        super().__init__(self.loc.shape, (), validate_args=validate_args)

    def sample(self, key, sample_shape=()):
        y = self.loc + self.scale * jax.random.normal(key, sample_shape + self.batch_shape, self.loc.dtype)
        return (y + jnp.pi) % (2 * jnp.pi) - jnp.pi

    def log_prob(self, value):
        turns = 2 * jnp.pi * jnp.arange(-2, 3, dtype=self.loc.dtype)
        each = dist.Normal(self.loc[..., None], self.scale[..., None]).log_prob(value[..., None] + turns)
        return jax.nn.logsumexp(each, -1)

    @property
    def mean(self):
        return self.loc

    @property
    def variance(self):
        return self.scale**2


class Angle(likelihoods.ExpectedLikelihood):
    """An angle with wrapped normal noise about f."""

    pytree_data_fields = ("scale",)

    def __init__(self, marginals, scale, *, integrator=None, validate_args=None):
        self.scale = self._parameter(marginals, "scale", scale)
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f):
        return WrappedNormal(f, self.scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reflected(Whitened):
    """Independent variables, reflected along a direction; what it does not say follows from its spread."""

    scale: jax.Array
    direction: jax.Array

    name = "reflected"
    constraints = {"scale": dist.constraints.positive}

    @classmethod
    def start(cls, shape, scale):
        return cls(jnp.zeros(shape, scale.dtype), jnp.full(shape, scale), jnp.ones(shape, scale.dtype))

    def spread(self, A):
        u = self.direction / jnp.linalg.norm(self.direction, axis=-1, keepdims=True)
        along = jnp.einsum("...m,...mb->...b", u, A)
        W = self.scale[..., None] * (A - 2 * u[..., None] * along[..., None, :])
        return jnp.concatenate([W, jnp.zeros_like(W[..., :1, :])], -2)  # a spread may have any number of rows


def shrunk(name, shape, dtype):
    """A residual of one's own: v between 0.2 and 1, learned."""
    raw = numpyro.param(f"{name}_shrink", jnp.zeros(shape, dtype))
    return 0.2 + 0.8 * jax.nn.sigmoid(raw)
