"""Kernels that are functions of the weighted inner product of inputs."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.kernels.base import Kernel
from numpyro_orthgp.kernels.hyperparameters import hyperparameter, per_dimension, per_latent, static
from numpyro_orthgp.math.distances import squared_distance_by_differences
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.products import matmul
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["ArcCosine", "Linear", "Polynomial"]


def _inner(X1: Array, X2: Array, weights: Array) -> Array:
    return matmul(X1 * weights, jnp.swapaxes(X2, -1, -2))  # (..., n, m)


def _squared_norm(X: Array, weights: Array) -> Array:
    return (weights * jnp.square(X)).sum(axis=-1)  # (..., n)


class Linear(Kernel):
    r"""Bayesian linear regression through the origin: :math:`k(x, y) = \sum_d v_d x_d y_d`.

    :param variance: prior variance :math:`v` of the slopes, shape (), (D,), (P, D) or (P, 1).
    """

    variance: ArrayLike = hyperparameter(1.0)

    def matrix(self, X1: Array, X2: Array) -> Array:
        return _inner(X1, X2, per_dimension("variance", self.variance, X1))

    def diagonal(self, X: Array) -> Array:
        return _squared_norm(X, per_dimension("variance", self.variance, X))


class Polynomial(Kernel):
    r"""Polynomials of a given degree: :math:`k(x, y) = (\sum_d v_d x_d y_d + c)^n`.

    :param degree: :math:`n`, a positive integer.
    :param variance: :math:`v`, shape (), (D,), (P, D) or (P, 1).
    :param offset: :math:`c`, shape () or (P,). If 0, only terms of degree n remain.
    :raises ValueError: if ``degree`` is not a positive integer.
    """

    degree: int = static()
    variance: ArrayLike = hyperparameter(1.0)
    offset: ArrayLike = hyperparameter(1.0, zero=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "degree", _integer("degree", self.degree, "a positive integer: 1, 2, 3, ..."))
        if self.degree < 1:
            raise ValueError(f"`degree` must be a positive integer: 1, 2, 3, ...; got {self.degree}.")

    def matrix(self, X1: Array, X2: Array) -> Array:
        inner = _inner(X1, X2, per_dimension("variance", self.variance, X1))
        return lax.integer_pow(inner + per_latent("offset", self.offset, X1), self.degree)

    def diagonal(self, X: Array) -> Array:
        inner = _squared_norm(X, per_dimension("variance", self.variance, X))
        return lax.integer_pow(inner + per_latent("offset", self.offset, X, axes=1), self.degree)


def _integer(name: str, value: object, known: str) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"`{name}` must be {known}; got {value!r}.") from None


# The angular parts J_n of the arc-cosine kernels as functions of c = cos(theta). Their derivatives in c are
# J_1' = J_0 and J_2' = 4 J_1. These stay finite at c = 1, where d theta / d c does not. Rounding may push c past 1:
# the value is clipped, the derivative is not.


@jax.custom_jvp
def _angular0(c: Array) -> Array:
    return jnp.arccos(-jnp.clip(c, -1, 1))


@_angular0.defjvp
def _angular0_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (c,), (dc,) = primals, tangents
    sine = safe_sqrt((1 - c) * (1 + c))
    return _angular0(c), jnp.where(sine > 0, dc / jnp.where(sine > 0, sine, 1), 0)


@jax.custom_jvp
def _angular1(c: Array) -> Array:
    clipped = jnp.clip(c, -1, 1)
    return safe_sqrt((1 - clipped) * (1 + clipped)) + clipped * _angular0(c)


_angular1.defjvp(lambda primals, tangents: (_angular1(*primals), _angular0(*primals) * tangents[0]))


@jax.custom_jvp
def _angular2(c: Array) -> Array:
    clipped = jnp.clip(c, -1, 1)
    sine = safe_sqrt((1 - clipped) * (1 + clipped))
    return 3 * sine * clipped + (1 + 2 * jnp.square(clipped)) * _angular0(c)


_angular2.defjvp(lambda primals, tangents: (_angular2(*primals), 4 * _angular1(*primals) * tangents[0]))


class ArcCosine(Kernel):
    r"""The arc-cosine kernel: an infinitely wide layer of units with activation :math:`\max(0, a)^n`.

    .. math:: k(x, y) = \tfrac{1}{\pi}\, |x|^n |y|^n J_n(\theta), \qquad \cos\theta = \frac{x \cdot y}{|x| |y|}

    with :math:`x \cdot y = \sum_d w_d x_d y_d + b`, :math:`|x|^2 = x \cdot x`, and

    .. math::
        J_0 &= \pi - \theta, \quad J_1 = \sin\theta + (\pi - \theta) \cos\theta, \\
        J_2 &= 3 \sin\theta \cos\theta + (\pi - \theta) (1 + 2 \cos^2\theta).

    Order 0 has a kink where two inputs coincide. There, its derivative is defined as 0.

    :param order: :math:`n`: 0 (steps), 1 (rectified linear units) or 2.
    :param weight_variance: variance :math:`w` of the weights, shape (), (D,), (P, D) or (P, 1).
    :param bias_variance: variance :math:`b` of the biases, shape () or (P,); may be 0.
    :raises ValueError: if ``order`` is not 0, 1 or 2.

    **References:**
        1. Cho, Saul. Kernel Methods for Deep Learning. 2009.
    """

    order: int = static(0)
    weight_variance: ArrayLike = hyperparameter(1.0)
    bias_variance: ArrayLike = hyperparameter(1.0, zero=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "order", _integer("order", self.order, "0, 1 or 2"))
        if self.order not in (0, 1, 2):
            raise ValueError(f"`order` must be 0, 1 or 2; got {self.order}.")

    def _squared_norm(self, X: Array) -> Array:
        weights = per_dimension("weight_variance", self.weight_variance, X)
        return _squared_norm(X, weights) + per_latent("bias_variance", self.bias_variance, X, axes=1)

    def polar(self, X: Array) -> tuple[Array, Array]:
        """Length and direction of (sqrt(w) x, sqrt(b)). The kernel depends on inner products and angles of these vectors.

        :param X: inputs, shape (..., n, D).
        :return: lengths, shape (..., n), and unit vectors, shape (..., n, D + 1). The direction of a zero vector is zero.
        """
        scaled = X * jnp.sqrt(per_dimension("weight_variance", self.weight_variance, X))
        bias = safe_sqrt(per_latent("bias_variance", self.bias_variance, X))
        norm = safe_sqrt(self._squared_norm(X))
        batch = norm.shape
        parts = [jnp.broadcast_to(scaled, (*batch, X.shape[-1])), jnp.broadcast_to(bias, (*batch, 1))]
        return norm, jnp.concatenate(parts, axis=-1) / jnp.where(norm > 0, norm, 1)[..., None]

    def _order0(self, X1: Array, X2: Array) -> Array:
        # theta = 2 atan(|a - b| / |a + b|) for unit vectors is accurate at all angles. arccos, or any rounding
        # of products, would leave sqrt(eps) on the diagonal.
        a = self.polar(X1)[1]
        b = a if X2 is X1 else self.polar(X2)[1]
        one, eps = jnp.ones((), a.dtype), jnp.finfo(a.dtype).eps
        opposite2 = squared_distance_by_differences(a, b, one)
        adjacent2 = squared_distance_by_differences(a, -b, one)
        # An angle within rounding of zero counts as zero, with derivative zero. Two zero vectors have angle zero.
        opposite2 = jnp.where(opposite2 > (8 * eps) ** 2, opposite2, 0)
        adjacent2 = jnp.where(opposite2 + adjacent2 > 0, adjacent2, 1)
        return 1 - 2 / jnp.pi * jnp.arctan2(safe_sqrt(opposite2), safe_sqrt(adjacent2))

    def matrix(self, X1: Array, X2: Array) -> Array:
        if self.order == 0:
            return self._order0(X1, X2)
        weights = per_dimension("weight_variance", self.weight_variance, X1)
        inner = _inner(X1, X2, weights) + per_latent("bias_variance", self.bias_variance, X1)
        norms1, norms2 = safe_sqrt(self._squared_norm(X1)), safe_sqrt(self._squared_norm(X2))
        norms = norms1[..., :, None] * norms2[..., None, :]
        cosine = inner / jnp.where(norms > 0, norms, 1)
        if self.order == 1:
            return norms * _angular1(cosine) / jnp.pi
        return jnp.square(norms) * _angular2(cosine) / jnp.pi

    def diagonal(self, X: Array) -> Array:
        squared_norm = self._squared_norm(X)
        if self.order == 0:
            return jnp.ones_like(squared_norm)
        return squared_norm if self.order == 1 else 3 * jnp.square(squared_norm)
