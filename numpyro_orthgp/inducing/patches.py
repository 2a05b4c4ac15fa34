"""Inducing variables of convolutional GPs: values of the patch response function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from numpyro_orthgp.errors import check_inputs
from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.inducing.interdomain import covariance_across
from numpyro_orthgp.kernels.components import Component, component
from numpyro_orthgp.kernels.convolutional import Convolutional
from numpyro_orthgp.types import Array, KernelLike

__all__ = ["InducingPatches"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InducingPatches:
    r"""Inducing variables :math:`u = g(Z)` of a convolutional GP, with g the patch response function (van der Wilk et al. 2017).

    ::

        patches = numpyro.param("patches", patches)
        sizes = {"image_shape": (28, 28), "patch_shape": (5, 5)}
        kernel = variance * kernels.Convolutional(kernels.RBF(3.0), **sizes)
        f = gp("f", kernel, InducingPatches(patches))

    They belong to one term of the kernel: the :class:`~numpyro_orthgp.kernels.Convolutional`, scaled or not, whose patches have as
    many entries. Other terms of a sum are independent of them, and may have another set, of points. Their covariances are Eqs. 28
    and 29 of Shi et al. 2020. Sets of patches of two such terms are independent.

    :param patches: Z, shape (M, d), in the units of the images' pixels.
    :param locations: rows and columns of the patches' upper left corners in pixels, shape (M, 2), only for a kernel with
        ``location``. They need not be integers, and can be learned.
    :raises TypeError: from :func:`~numpyro_orthgp.gp`, if the arrays are not floating.
    :raises ValueError: from :func:`~numpyro_orthgp.gp`, if shapes are wrong, ``locations`` are missing or not asked for, or the
        kernel has no such term, or several.
    """

    patches: Array
    locations: Array | None = None

    @property
    def num(self) -> int:
        return self.patches.shape[-2]

    @property
    def dtype(self) -> Any:
        return self.patches.dtype

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        if not isinstance(other, InducingPatches) or other.patches.shape[-1:] != self.patches.shape[-1:]:
            return covariance_across(self, kernel, other)
        term = self.term(kernel)
        return term.scaled(term.kernel.patch_kernel(self.patches, other.patches, self.locations, other.locations))

    def covariance_with_inputs(self, kernel: KernelLike, X: Array) -> Array:
        term = self.term(kernel)
        return term.scaled(term.kernel.patch_covariance(self.patches, term.columns(X), self.locations))

    def term(self, kernel: KernelLike) -> Component:
        """The term of the kernel that the patches belong to, after a check that they match it."""
        patches = check_inputs("patches", self.patches)
        d = patches.shape[1]
        term = component(
            kernel,
            lambda c: isinstance(c.kernel, Convolutional) and c.kernel.grid.patch_dim == d,
            f"InducingPatches of shape {patches.shape} need one term `kernels.Convolutional` whose patches have {d} entries",
        )
        if (term.kernel.location is None) != (self.locations is None):
            raise ValueError(
                "InducingPatches need `locations` of shape (M, 2) exactly if the kernel has a `location`; got "
                f"locations {'missing' if self.locations is None else 'given'} and location={term.kernel.location}."
            )
        if self.locations is not None and check_inputs("locations", self.locations, 2).shape[0] != self.num:
            raise ValueError(
                f"`locations` must have shape (M, 2) with M = {self.num} to match `patches`; got {self.locations.shape}."
            )
        return term
