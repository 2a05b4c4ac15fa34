"""The convolutional kernel: an image's function is a weighted sum of one function of its patches.

Covariances with images are sums over patches. They are computed in blocks of ``MAX_ENTRIES`` kernel values, because blocks that
fit in the cache cost less, and recomputed for the gradient. As in the papers, and unlike in GPflow, sums are not divided by the
number of patches.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_orthgp.closures import Closure, as_pytree
from numpyro_orthgp.kernels.base import Function, Kernel
from numpyro_orthgp.kernels.hyperparameters import as_array, static
from numpyro_orthgp.kernels.patches import PatchGrid
from numpyro_orthgp.math.blocks import MAX_ENTRIES, map_blocks
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.types import Array, ArrayLike, KernelLike

__all__ = ["Convolutional"]

# Each pair of patches of one image is computed once: a row group meets only the columns from its own onwards. Four groups save 3/8
# of the work; many groups would save 1/2.
_GROUPS = 4


class Convolutional(Kernel):
    r"""The kernel of a sum over patches, :math:`f(x) = \sum_p w_p\, g(x^{[p]})` (Eq. 27 of [2]; [1]):

    .. math::
        k(x, x') = \sum_{p, q} w_p w_q\, k_g(x^{[p]}, x'^{[q]})\, k_\ell(p, q)

    Here :math:`k_g` is the kernel of the patch response function g, and :math:`k_\ell` a kernel of the patches' positions. With
    :math:`k_\ell`, g varies with the position of a patch, but little between nearby positions (TICK, [3]). Without it
    (``location=None``) :math:`k_\ell = 1`. The sum is not divided by the number P of patches. With weights near 1/P, f has the
    variance of g if patches are alike, and less if they differ. Inducing variables are values of g, see
    :class:`~numpyro_orthgp.InducingPatches`.

    At most ``max_entries`` patch kernel values are held in memory. More are computed in blocks, and recomputed for the gradient.
    Kernel evaluations: ``kernel(X1, X2)`` B1 B2 P^2, ``kernel(X)`` about 5 B P^2 / 8, covariances with M inducing patches M B P.

    :param base: kernel :math:`k_g` of patches, d columns.
    :param image_shape: (H, W) or (H, W, C). Inputs are images flattened row-major, channel fastest, H W C columns.
    :param patch_shape: (h, w).
    :param weights: w, shape (P,), or (L, P) for L latent functions (then give :func:`~numpyro_orthgp.gp` ``num_latents=L``);
        ``None`` for ones. To learn the weights, make them a ``numpyro.param``. They may be negative.
    :param stride: steps between patches in pixels, an integer or (rows, columns).
    :param colour: "joint": whole patches, d = h w C entries in the order row, column, channel; patches in the order row, column.
        "per_channel": patches of each channel, d = h w, in the order channel, row, column.
    :param location: kernel :math:`k_\ell` of two columns: row and column of a patch's upper left corner, in pixels; or ``None``.
    :param max_entries: largest number of kernel values in memory at once.
    :raises TypeError: if sizes are not integers or a kernel is not callable.
    :raises ValueError: if sizes are not positive or do not fit each other; when called, if inputs or weights have another shape.

    **References:**

    1. van der Wilk, Rasmussen, Hensman. Convolutional Gaussian Processes. 2017.
    2. Shi, Titsias, Mnih. Sparse Orthogonal Variational Inference for Gaussian Processes. 2020. Appendix G.
    3. Dutordoir, van der Wilk, Artemev, Tomczak, Hensman. Translation Insensitivity for Deep Convolutional GPs. 2019.
    """

    base: KernelLike
    _: KW_ONLY
    image_shape: tuple[int, ...] = static()
    patch_shape: tuple[int, int] = static()
    weights: ArrayLike | None = None
    stride: int | tuple[int, int] = static(1)
    colour: str = static("joint")
    location: KernelLike | None = None
    max_entries: int = static(MAX_ENTRIES)

    def __post_init__(self) -> None:
        grid = PatchGrid.checked(self.image_shape, self.patch_shape, self.stride, self.colour)
        for name in ("image_shape", "patch_shape", "stride"):
            object.__setattr__(self, name, getattr(grid, name))
        for name, kernel in (("base", self.base), ("location", self.location)):
            if isinstance(kernel, type) or not (callable(kernel) or (kernel is None and name == "location")):
                raise TypeError(f"`{name}` must be a kernel, such as kernels.RBF(); got {kernel!r}.")
            if kernel is not None and isinstance(kernel := as_pytree(kernel), Closure):
                object.__setattr__(self, name, Function(kernel))

    @property
    def grid(self) -> PatchGrid:
        """The grid of patches."""
        return PatchGrid.checked(self.image_shape, self.patch_shape, self.stride, self.colour)

    def patch_kernel(self, Z1: Array, Z2: Array, locations1: Any = None, locations2: Any = None) -> Array:
        """Covariance of the patch response g between patches (with a location kernel, at positions), shape (..., n, m).

        Shi et al. 2020, Eq. 29.

        :param Z1: shape (..., n, d).
        :param Z2: shape (..., m, d).
        :param locations1: shape (n, 2), in pixels; ``None`` without a location kernel.
        :param locations2: shape (m, 2).
        """
        K = self.base(Z1, Z2)
        return K if self.location is None else K * self.location(locations1, locations2)

    def patch_covariance(self, Z: Array, X: Array, locations: Array | None = None) -> Array:
        r"""Covariance between the patch response g and f, :math:`\sum_p w_p k_g(z, x^{[p]}) k_\ell(\cdot, p)`.

        Shi et al. 2020, Eq. 28.

        :param Z: patches, shape (..., M, d).
        :param X: images, shape (..., B, H W C).
        :param locations: positions of the patches Z in pixels, shape (M, 2); ``None`` without a location kernel.
        :return: shape (..., M, B).
        """
        grid, weights = self.grid, self._weights(X.dtype)
        factor = None if self.location is None else self.location(locations, self._positions(X.dtype))  # (..., M, P)
        per_image = self._entries(Z, X, factor) * grid.num_patches

        def block(images: Array) -> Array:  # (b, ..., D) to (b, ..., M)
            patches = jnp.moveaxis(grid.extract(images), 0, -3)  # (..., b, P, d)
            values = self._weighted(Z, patches, weights, factor, -(-per_image // self.max_entries))
            return jnp.moveaxis(values, -1, 0)

        return jnp.moveaxis(map_blocks(block, jnp.moveaxis(X, -2, 0), self.max_entries // per_image), 0, -1)

    def matrix(self, X1: Array, X2: Array) -> Array:
        weights, positions = self._weights(X1.dtype), self._positions(X1.dtype)

        def row(image: Array) -> Array:  # (1, ..., D) to (1, ..., B2)
            responses = self.patch_covariance(self.grid.extract(image[0]), X2, positions)
            return _sum_patches("...pb,...p->...b", responses, weights)[None]

        return jnp.moveaxis(map_blocks(row, jnp.moveaxis(X1, -2, 0), 1), 0, -2)

    def diagonal(self, X: Array) -> Array:
        grid, weights, positions = self.grid, self._weights(X.dtype), self._positions(X.dtype)
        P = grid.num_patches
        factor = None if self.location is None else self.location(positions, positions)  # (..., P, P)
        patches_of_one = jax.ShapeDtypeStruct((*X.shape[:-2], P, grid.patch_dim), X.dtype)
        per_image = self._entries(patches_of_one, X, factor) * P

        def pairs_once(image: Array) -> Array:
            patches, total = grid.extract(image), jnp.zeros((), X.dtype)
            size = -(-P // _GROUPS)
            for start in range(0, P, size):
                rows, columns = slice(start, start + size), slice(start, None)
                K = self.base(patches[..., rows, :], patches[..., columns, :])
                K = K if factor is None else K * factor[..., rows, columns]
                # Pairs off the diagonal block count twice.
                count = np.where(np.arange(P - start) < size, 1, 2).astype(X.dtype)
                responses = _sum_patches("...pq,...q->...p", K, weights[..., columns] * count)
                total = total + _sum_patches("...p,...p->...", responses, weights[..., rows])
            return total

        def in_parts(image: Array) -> Array:
            responses = self.patch_covariance(grid.extract(image), image[..., None, :], positions)[..., 0]
            return _sum_patches("...p,...p->...", responses, weights)

        one_image = pairs_once if per_image <= self.max_entries else in_parts
        images = jnp.moveaxis(X, -2, 0)
        return jnp.moveaxis(map_blocks(jax.vmap(one_image), images, self.max_entries // per_image), 0, -1)

    def _weighted(self, Z: Array, patches: Array, weights: Array, factor: Array | None, num_parts: int) -> Array:
        """Sum over P of weighted kernel values with patches (..., b, P, d), in parts of P; shape (..., M, b)."""

        def part(patches: Array, weights: Array, factor: Array | None) -> Array:
            *batch, b, P, d = patches.shape
            K = self.base(Z, patches.reshape(*batch, b * P, d))
            K = K.reshape(*K.shape[:-1], b, P)
            K = K if factor is None else K * factor[..., :, None, :]
            return _sum_patches("...mbp,...p->...mb", K, weights)

        P = patches.shape[-2]
        size = -(-P // min(num_parts, P))
        if size == P:
            return part(patches, weights, factor)
        num = -(-P // size)
        padding = num * size - P  # patches of weight zero

        def split(values: Array | None, axis: int) -> Array | None:
            if values is None:
                return None
            widths = [(0, padding if a == values.ndim + axis else 0) for a in range(values.ndim)]
            padded = jnp.pad(values, widths)
            return jnp.stack(jnp.split(padded, num, axis))

        parts = split(patches, -2), split(weights, -1), split(factor, -1)
        start = jax.eval_shape(part, *(None if p is None else p[0] for p in parts))
        add = jax.checkpoint(lambda total, p: (total + part(*p), None), prevent_cse=False)
        return lax.scan(add, jnp.zeros(start.shape, start.dtype), parts)[0]

    def _entries(self, Z: Array | jax.ShapeDtypeStruct, X: Array, factor: Array | None) -> int:
        """Number of kernel values between patches Z and one patch of an image."""
        one = jax.ShapeDtypeStruct((*X.shape[:-2], 1, self.grid.patch_dim), X.dtype)
        shape = jax.eval_shape(self.base, Z, one).shape
        batch = () if factor is None else factor.shape[:-2]
        return math.prod(jnp.broadcast_shapes(shape[:-2], batch)) * shape[-2]

    def _positions(self, dtype: Any) -> Array:
        return jnp.asarray(self.grid.positions, dtype)

    def _weights(self, dtype: Any) -> Array:
        P = self.grid.num_patches
        if self.weights is None:
            return jnp.ones(P, dtype)
        weights = as_array(self.weights, dtype)
        if weights.ndim not in (1, 2) or weights.shape[-1] != P:
            raise ValueError(
                f"`weights` must have shape (P,) or (L, P) with P = {P} patches for images {self.image_shape}, patches "
                f"{self.patch_shape}, stride {self.stride} and colour {self.colour!r}; got {weights.shape}."
            )
        return weights


def _sum_patches(spec: str, values: Array, weights: Array) -> Array:
    return jnp.einsum(spec, values, weights, precision=PRECISION)
