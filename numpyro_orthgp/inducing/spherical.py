"""Inducing variables that are coefficients of spherical harmonics, for arc-cosine kernels."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.inducing.interdomain import covariance_across, floating_dtype
from numpyro_orthgp.kernels.components import Component, component
from numpyro_orthgp.kernels.dot_product import ArcCosine
from numpyro_orthgp.math.harmonics import arc_cosine_eigenvalue, harmonics, num_harmonics
from numpyro_orthgp.types import Array, KernelLike

__all__ = ["SphericalHarmonics"]

# Beyond this number, the M x M matrices and the choice of directions cost more than the harmonics are worth.
MAX_HARMONICS = 2048


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SphericalHarmonics:
    r"""Coefficients of spherical harmonics [1] of a function with an `ArcCosine` kernel.

    The kernel maps an input to :math:`\tilde x = (\sqrt{w} x, \sqrt{b})` in :math:`R^{D+1}`, and its functions are :math:`f(x)
    = |\tilde x|^n g(\tilde x / |\tilde x|)`, with n its order and g a function on the unit sphere. With orthonormal harmonics and
    the eigenvalues :math:`\lambda_l` of the kernel on the sphere

    .. math::
        f(x) = |\tilde x|^n \sum_{lk} \sqrt{\lambda_l}\, u_{lk}\, \phi_{lk}(\tilde x / |\tilde x|), \qquad \mathrm{cov}(u) = v I

    with v the product of factors in front of the kernel. The :math:`\lambda_l`, and the directions that span the harmonics, depend
    only on D and n; they are computed once, in float64. Degrees with eigenvalue zero have no features: for order 0 the even ones
    from 2, for order 1 the odd ones from 3, for order 2 the even ones from 4.

    The number of harmonics of a degree grows as its power D - 1, so use them for few input dimensions, at most about 8. A second
    set of points, ``[SphericalHarmonics(...), Z]``, explains what higher degrees would explain near the data [2]. With harmonics
    alone the covariance is diagonal; the library does not exploit this and factorizes it like any other.

    :param num_dims: number D of input columns that the kernel sees.
    :param max_degree: the highest degree of harmonics.
    :param order: order n of the kernel.
    :param dtype: floating dtype of the inputs; by default JAX's default.
    :raises ValueError: for values out of range, or more than 2048 harmonics. When used: if the kernel has no term
        ``ArcCosine(order)``, or several; for inputs with another number of columns.
    :raises TypeError: if the dtype is not floating.

    **References:**

    1. Dutordoir, Durrande, Hensman. Sparse Gaussian Processes with Spherical Harmonic Features. 2020.
    2. Tiao, Dutordoir, Picheny. Spherical Inducing Features for Orthogonally-Decoupled Gaussian Processes. 2023.
    """

    num_dims: int = field(metadata={"static": True})
    max_degree: int = field(metadata={"static": True})
    _: KW_ONLY
    order: int = field(default=1, metadata={"static": True})
    dtype: Any = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        for name, least in (("num_dims", 1), ("max_degree", 0), ("order", 0)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), least))
        if self.order > 2:
            raise ValueError(f"`order` must be 0, 1 or 2, that of the ArcCosine kernel; got {self.order}.")
        object.__setattr__(self, "dtype", floating_dtype(self.dtype))
        if self.num > MAX_HARMONICS:
            raise ValueError(
                f"There are {self.num} harmonics up to degree {self.max_degree} for inputs with D = {self.num_dims}; at most "
                f"{MAX_HARMONICS} are practical. Take a lower `max_degree`, and inducing points as the next set."
            )

    @property
    def num(self) -> int:
        return sum(num_harmonics(degree, self.num_dims + 1) for degree, _ in self._spectrum)

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        """Covariance with another feature, shape (..., M, M_other); zero with features of an independent term.

        :raises TypeError: if it is of another kind and belongs to the same term.
        """
        if not isinstance(other, SphericalHarmonics) or other.order != self.order:
            return covariance_across(self, kernel, other)
        term = self.term(kernel)
        # The features of a lower maximal degree are the first features of a higher one.
        return term.scaled(jnp.eye(self.num, other.num, dtype=self.dtype))

    def covariance_with_inputs(self, kernel: KernelLike, X: Array) -> Array:
        """Covariance with the function at inputs ``X`` (B, D), or (P, B, D), shape (..., M, B).

        :raises ValueError: if the kernel sees another number of columns than ``num_dims``.
        """
        term = self.term(kernel)
        columns = term.columns(X)
        if columns.shape[-1] != self.num_dims:
            raise ValueError(
                f"SphericalHarmonics(num_dims={self.num_dims}, ...) need an ArcCosine kernel that sees D = {self.num_dims} "
                f"columns of the inputs; it sees {columns.shape[-1]}."
            )
        length, direction = term.kernel.polar(columns)
        parts = [math.sqrt(eigenvalue) * harmonics(degree, direction) for degree, eigenvalue in self._spectrum]
        return term.scaled(length[..., None, :] ** self.order * jnp.concatenate(parts, -2))

    @property
    def _spectrum(self) -> list[tuple[int, float]]:
        """Degrees with nonzero eigenvalues, and the eigenvalues."""
        degrees = range(self.max_degree + 1)
        pairs = [(degree, arc_cosine_eigenvalue(degree, self.num_dims + 1, self.order)) for degree in degrees]
        return [pair for pair in pairs if pair[1] > 0]

    def term(self, kernel: KernelLike) -> Component:
        """The term of the kernel that the features belong to."""
        return component(
            kernel,
            lambda term: isinstance(term.kernel, ArcCosine) and term.kernel.order == self.order,
            f"SphericalHarmonics(order={self.order}) need a kernel with exactly one term ArcCosine(order={self.order})",
        )
