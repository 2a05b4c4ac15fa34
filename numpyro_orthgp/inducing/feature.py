"""The protocol of a set of inducing variables, which consists of two covariances.

An array stands for ordinary inducing points. For a new kind of feature, write a class with the two methods below, ``num``
and ``dtype``. If it is a pytree, its arrays can be learned.

Features of an interval or a sphere are static: they hold no arrays, so equal ones never recompile.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from numpyro_orthgp.types import Array, KernelLike

__all__ = ["Feature"]


@runtime_checkable
class Feature(Protocol):
    """The protocol of a set of inducing variables."""

    @property
    def num(self) -> int:
        """Number of inducing variables M."""
        ...

    @property
    def dtype(self) -> Any:
        """Floating dtype of the inducing variables."""
        ...

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        """Covariance with the variables of another feature, shape (..., M, M_other)."""
        ...

    def covariance_with_inputs(self, kernel: KernelLike, X: Array) -> Array:
        """Covariance with the function at inputs ``X``, shape (..., M, B).

        :param X: shape (B, D); or (P, B, D), points of another set, with one set of points for each latent function.
        """
        ...
