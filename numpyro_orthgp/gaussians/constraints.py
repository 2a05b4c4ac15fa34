"""How parameters of q are stored during optimization: NumPyro constraints with our own unconstrained forms.

The unconstrained form of ``scale_tril`` is a dense matrix with an unused upper triangle, and a softplus on the diagonal. NumPyro's
form is a packed vector; unpacking it is a scatter of M^2 / 2 entries at each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints
from numpyro.distributions.transforms import ParameterFreeTransform, biject_to

from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.products import diagonal
from numpyro_orthgp.types import Array

__all__ = ["Natural", "NaturalPart", "dense_lower_cholesky"]


class _DenseLowerCholesky(type(constraints.lower_cholesky)):  # type: ignore[misc]
    """Lower-triangular matrices with positive diagonal; the unconstrained form is a dense matrix with an unused upper triangle.

    NumPyro's own transform packs the triangle into a vector. Unpacking it is a scatter of M^2 / 2 entries at each step, which takes
    noticeable time beside the matrix products. Here it is one fused elementwise pass.
    """


dense_lower_cholesky = _DenseLowerCholesky()


class _DenseLowerCholeskyTransform(ParameterFreeTransform):
    domain = constraints.independent(constraints.real, 2)
    codomain = dense_lower_cholesky

    def __call__(self, x: Array) -> Array:
        return _positive_diagonal(x)

    def _inverse(self, y: Array) -> Array:
        return _any_diagonal(y)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        return -jnp.sum(jax.nn.softplus(-diagonal(x)), -1)

    def forward_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


@one_program
def _positive_diagonal(x: Array) -> Array:
    positive = jax.nn.softplus(diagonal(x))
    return jnp.where(jnp.eye(x.shape[-1], dtype=bool), positive[..., None], jnp.tril(x, -1))


@one_program
def _any_diagonal(y: Array) -> Array:
    positive = diagonal(y)
    inverse = positive + jnp.log(-jnp.expm1(-positive))  # softplus^-1
    return jnp.tril(y, -1) + inverse[..., None] * jnp.eye(y.shape[-1], dtype=y.dtype)


biject_to.register(_DenseLowerCholesky)(lambda constraint: _DenseLowerCholeskyTransform())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Natural:
    """An array among the optimizer's parameters that belongs to :func:`~numpyro_orthgp.natural_gradient`.

    The wrapper marks the arrays of a q at their declaration, so they need not be guessed from names. Any other optimizer sees an
    ordinary array inside.

    :param value: the array.
    :param family: family of its Gaussian, a subclass of ``Whitened``; ``None`` for mean-only weights.
    :param part: field of the family, the end of the parameter's name.
    """

    value: Array
    family: Any = field(default=None, metadata={"static": True})
    part: str = field(default="", metadata={"static": True})


class NaturalPart(constraints.Constraint):
    """Any array; its unconstrained form is the wrapper :class:`Natural`, with family and part."""

    def __init__(self, family: Any = None, part: str = "") -> None:
        self.family, self.part = family, part

    def __call__(self, x: Array) -> Array:
        return constraints.real(x)

    def feasible_like(self, prototype: Array) -> Array:
        return jnp.zeros_like(prototype)

    def tree_flatten(self) -> tuple[tuple[()], tuple[tuple[()], dict[str, Any]]]:
        return (), ((), {"family": self.family, "part": self.part})

    def eq(self, other: object, static: bool = False) -> bool:
        return isinstance(other, NaturalPart) and (self.family, self.part) == (other.family, other.part)


class _NaturalTransform(ParameterFreeTransform):
    domain = constraints.real
    codomain = constraints.real

    def __init__(self, family: Any, part: str) -> None:
        self.family, self.part = family, part

    def tree_flatten(self) -> tuple[tuple[()], tuple[tuple[()], dict[str, Any]]]:
        return (), ((), {"family": self.family, "part": self.part})

    def __call__(self, x: Natural) -> Array:
        return x.value

    def _inverse(self, y: Array) -> Natural:
        return Natural(jnp.asarray(y), self.family, self.part)

    def log_abs_det_jacobian(self, x: Natural, y: Array, intermediates: Any = None) -> Array:
        return jnp.zeros_like(y)


biject_to.register(NaturalPart)(lambda constraint: _NaturalTransform(constraint.family, constraint.part))
