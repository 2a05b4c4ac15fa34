"""Kernels that depend on the distance between inputs. They have unit variance; for another write ``variance * kernel``.

Kernels are functions of r^2 with their own derivative rules, so there is no 0/0 at coincident points. Distances are computed from
differences in up to three dimensions, and from products above three. Matern 1/2 always uses differences, because its slope at
zero would magnify rounding errors. ``Periodic`` has MacKay's lengthscale.
"""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_orthgp.kernels.base import Kernel
from numpyro_orthgp.kernels.hyperparameters import hyperparameter, per_dimension, per_latent
from numpyro_orthgp.math.distances import (
    are_few,
    centre,
    distance_factors,
    squared_distance,
    squared_distance_by_differences,
)
from numpyro_orthgp.math.expansion import weighted_profile
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["RBF", "Matern12", "Matern32", "Matern52", "Periodic", "RationalQuadratic", "Stationary"]


# The Matern profiles as functions of q = s^2, where s is r times sqrt(3) or sqrt(5). Their derivatives in q do not
# need the derivative of a square root: that of (1 + s) exp(-s) is -exp(-s) / 2, that of (1 + s + s^2 / 3) exp(-s)
# is -(1 + s) exp(-s) / 6. Nothing divides by r, so both are correct and finite at r = 0. Where q overflows, both are 0.

_FAR = 1e8  # of q, where exp(-s) has long been 0 in float64


@jax.custom_jvp
def _matern32(q: Array) -> Array:
    s = safe_sqrt(jnp.minimum(q, _FAR))
    return (1 + s) * jnp.exp(-s)


@_matern32.defjvp
def _matern32_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (q,), (dq,) = primals, tangents
    return _matern32(q), -0.5 * jnp.exp(-safe_sqrt(q)) * dq


@jax.custom_jvp
def _matern52(q: Array) -> Array:
    q = jnp.minimum(q, _FAR)
    s = safe_sqrt(q)
    return (1 + s + q / 3) * jnp.exp(-s)


@_matern52.defjvp
def _matern52_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (q,), (dq,) = primals, tangents
    return _matern52(q), -_matern32(q) / 6 * dq


class Stationary(Kernel):
    r"""A function of the squared scaled distance, :math:`r^2 = \sum_d (x_d - y_d)^2 / \ell_d^2`.

    A subclass defines the function, `profile`, which must be 1 at 0.

    :param lengthscale: :math:`\ell`, same units as the inputs, shape (), (D,), (P, D) or (P, 1).
    """

    lengthscale: ArrayLike = hyperparameter(1.0)

    @abc.abstractmethod
    def profile(self, r2: Array) -> Array:
        """The kernel as a function of the squared scaled distance, elementwise, shape (..., n, m)."""

    def matrix(self, X1: Array, X2: Array) -> Array:
        return self.profile(squared_distance(X1, X2, per_dimension("lengthscale", self.lengthscale, X1)))

    def weighted_sum(self, X1: Array, X2: Array, weights: Array) -> Array:
        lengthscale = per_dimension("lengthscale", self.lengthscale, X1)
        # Several sums with one matrix are already a matrix product.
        several = weights.ndim > 1 and lengthscale.ndim < 3
        if several or are_few(X1.shape[-1]) or type(self).matrix is not Stationary.matrix:
            return super().weighted_sum(X1, X2, weights)
        profile = Partial(type(self).profile, self)
        return weighted_profile(profile, *distance_factors(X1, X2, lengthscale), weights)

    def diagonal(self, X: Array) -> Array:
        lengthscale = per_dimension("lengthscale", self.lengthscale, X)
        shape = jnp.broadcast_shapes(X.shape[:-1], lengthscale.shape[:-1])
        return self.profile(jnp.zeros((*shape, 1), jnp.result_type(X, lengthscale)))[..., 0]


class RBF(Stationary):
    r"""Squared exponential, infinitely smooth: :math:`k = \exp(-r^2 / 2)`.

    :param lengthscale: :math:`\ell`, same units as the inputs, shape (), (D,), (P, D) or (P, 1).
    """

    def profile(self, r2: Array) -> Array:
        return jnp.exp(-0.5 * r2)


class Matern12(Stationary):
    r"""Matern of order 1/2, rough (Ornstein-Uhlenbeck): :math:`k = \exp(-r)`.

    It has a kink where two inputs coincide. There, its derivative is defined as 0.

    :param lengthscale: :math:`\ell`, same units as the inputs, shape (), (D,), (P, D) or (P, 1).
    """

    def profile(self, r2: Array) -> Array:
        return jnp.exp(-safe_sqrt(r2))

    def matrix(self, X1: Array, X2: Array) -> Array:
        # exp(-r) has slope 1 in r, so the rounding error of products, eps in r^2, would be sqrt(eps) in the kernel.
        lengthscale = per_dimension("lengthscale", self.lengthscale, X1)
        return self.profile(squared_distance_by_differences(X1, X2, lengthscale))


class Matern32(Stationary):
    r"""Matern of order 3/2, once differentiable: :math:`k = (1 + \sqrt{3} r) \exp(-\sqrt{3} r)`.

    :param lengthscale: :math:`\ell`, same units as the inputs, shape (), (D,), (P, D) or (P, 1).
    """

    def profile(self, r2: Array) -> Array:
        return _matern32(3 * r2)


class Matern52(Stationary):
    r"""Matern of order 5/2, twice differentiable: :math:`k = (1 + \sqrt{5} r + 5 r^2 / 3) \exp(-\sqrt{5} r)`.

    :param lengthscale: :math:`\ell`, same units as the inputs, shape (), (D,), (P, D) or (P, 1).
    """

    def profile(self, r2: Array) -> Array:
        return _matern52(5 * r2)


class RationalQuadratic(Stationary):
    r"""A scale mixture of squared exponentials: :math:`k = (1 + r^2 / (2 \alpha))^{-\alpha}`.

    :param lengthscale: :math:`\ell`, same units as the inputs, shape (), (D,), (P, D) or (P, 1).
    :param alpha: :math:`\alpha`, shape () or (P,). The larger it is, the closer the kernel is to `RBF`.
    """

    alpha: ArrayLike = hyperparameter(1.0)

    def profile(self, r2: Array) -> Array:
        alpha = per_latent("alpha", self.alpha, r2)
        return jnp.exp(-alpha * jnp.log1p(0.5 * r2 / alpha))


class Periodic(Kernel):
    r"""MacKay's periodic kernel: :math:`k = \exp\bigl(-2 \sum_d \sin^2(\pi (x_d - y_d) / p_d) /
    \ell_d^2\bigr)`.

    It is `RBF` on the circle: with :math:`u = 2 \pi x / p` every input becomes the point :math:`(\cos u, \sin u) /
    \ell`. Squared distances between these points are computed from products.

    :param lengthscale: :math:`\ell`, no units, shape (), (D,), (P, D) or (P, 1).
    :param period: :math:`p`, same units as the inputs, shape (), (D,), (P, D) or (P, 1).
    """

    lengthscale: ArrayLike = hyperparameter(1.0)
    period: ArrayLike = hyperparameter(1.0)

    def _on_circle(self, X: Array) -> Array:
        angle = 2 * jnp.pi * X / per_dimension("period", self.period, X)
        return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)

    def _lengthscale(self, X: Array) -> Array:  # for both coordinates of every circle
        lengthscale = per_dimension("lengthscale", self.lengthscale, X)
        return lengthscale if jnp.shape(lengthscale)[-1:] in ((), (1,)) else jnp.concatenate(2 * [lengthscale], axis=-1)

    def matrix(self, X1: Array, X2: Array) -> Array:
        A, B = centre(X1, X2)
        first = self._on_circle(A)
        second = first if B is A else self._on_circle(B)
        return jnp.exp(-0.5 * squared_distance(first, second, self._lengthscale(X1)))

    def diagonal(self, X: Array) -> Array:
        return jnp.ones_like((self._on_circle(X) / self._lengthscale(X))[..., 0])
