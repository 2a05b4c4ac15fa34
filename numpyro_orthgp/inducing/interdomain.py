"""Features that are not values of the whole function: each belongs to one term of a sum of kernels."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.inducing.points import InducingPoints
from numpyro_orthgp.kernels.components import Component
from numpyro_orthgp.types import Array, KernelLike

__all__ = ["InterDomain", "covariance_across", "floating_dtype"]


@runtime_checkable
class InterDomain(Feature, Protocol):
    """A feature of one term of a sum of kernels."""

    def term(self, kernel: KernelLike) -> Component:
        """The term of the kernel that the features belong to."""
        ...


def covariance_across(feature: InterDomain, kernel: KernelLike, other: Feature) -> Array:
    """Covariance with points, or with features of another term, which are independent; shape (..., M, M_other).

    :raises TypeError: for other features of the same term, or of a kind that belongs to no term.
    """
    if isinstance(other, InducingPoints):
        return feature.covariance_with_inputs(kernel, other.points)
    if isinstance(other, InterDomain) and other.term(kernel).place != feature.term(kernel).place:
        return jnp.zeros((feature.num, other.num), feature.dtype)
    if hasattr(other, "covariance_with_feature"):  # functionals, which use covariances with inputs
        return other.covariance_with_feature(kernel, feature)
    raise TypeError(f"The covariance of {type(feature).__name__} with {type(other).__name__} is not known.")


def floating_dtype(dtype: Any, *values: Any) -> Any:
    """``dtype`` as a dtype; if it is ``None``, the dtype of the ``values`` (for Python's numbers JAX's default).

    :raises TypeError: if it is not floating.
    """
    dtype = jnp.result_type(*values, 1.0) if dtype is None else jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`dtype` must be a floating dtype; got {dtype}.")
    return dtype
