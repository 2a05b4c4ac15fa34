"""Patches of images.

Patches are stacked slices, so the backward pass consists of paddings.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_option
from numpyro_orthgp.kernels.hyperparameters import check_inputs
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["PatchGrid", "extract_patches"]

COLOURS = ("joint", "per_channel")


@jax.tree_util.register_static
@dataclass(frozen=True)
class PatchGrid:
    """The positions of an image's patches. Images are flattened row-major, channel fastest.

    :param image_shape: (H, W, C).
    :param patch_shape: (h, w).
    :param stride: steps between patches, (rows, columns).
    :param colour: "joint" or "per_channel".
    """

    image_shape: tuple[int, int, int]
    patch_shape: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    colour: str = "joint"

    @classmethod
    def checked(cls, image_shape: Any, patch_shape: Any, stride: Any = 1, colour: str = "joint") -> PatchGrid:
        """A grid from a user's arguments, after checking them.

        :raises TypeError: if sizes are not integers.
        :raises ValueError: if a size is not positive, patches are larger than images, or the colour is unknown.
        """
        image = _sizes("image_shape", image_shape, (2, 3), "(H, W) or (H, W, C)")
        patch = _sizes("patch_shape", patch_shape, (2,), "(h, w)")
        steps = _sizes(
            "stride", stride if np.iterable(stride) else (stride, stride), (2,), "an integer or (rows, columns)"
        )
        if patch[0] > image[0] or patch[1] > image[1]:
            raise ValueError(
                f"`patch_shape` must fit into the image, of shape {image[:2]}; got {patch}. Shapes are (rows, columns)."
            )
        H, W, C = (*image, 1)[:3]
        return cls((H, W, C), (patch[0], patch[1]), (steps[0], steps[1]), check_option("colour", colour, COLOURS))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of patches down and across."""
        rows, columns = (
            (n - size) // step + 1
            for n, size, step in zip(self.image_shape, self.patch_shape, self.stride, strict=False)
        )
        return rows, columns

    @property
    def num_patches(self) -> int:
        """Number P of patches of an image; if ``colour`` is "per_channel", patches of all channels count."""
        rows, columns = self.shape
        return rows * columns * (self.image_shape[2] if self.colour == "per_channel" else 1)

    @property
    def patch_dim(self) -> int:
        """Number d of entries of a patch."""
        height, width = self.patch_shape
        return height * width * (self.image_shape[2] if self.colour == "joint" else 1)

    @property
    def positions(self) -> np.ndarray:
        """Row and column of each patch's upper left corner in pixels, shape (P, 2)."""
        corners = np.stack(np.meshgrid(*map(np.arange, self.shape), indexing="ij"), -1).reshape(-1, 2) * self.stride
        return np.tile(corners, (self.num_patches // len(corners), 1))

    def extract(self, X: Array) -> Array:
        """Patches of images (..., D), shape (..., P, d).

        :raises ValueError: if D is not H W C.
        """
        H, W, C = self.image_shape
        if X.shape[-1] != H * W * C:
            raise ValueError(
                f"Images of shape {self.image_shape}, flattened, must have {H * W * C} columns, row by row and channel "
                f"fastest; got {X.shape[-1]}."
            )
        images, (rows, columns), (down, across) = X.reshape(*X.shape[:-1], H, W, C), self.shape, self.stride
        height, width = self.patch_shape
        # One slice for each pixel of a patch: the backward pass is as many paddings. A gather would need a scatter.
        pixels = [
            images[..., i : i + (rows - 1) * down + 1 : down, j : j + (columns - 1) * across + 1 : across, :]
            for i in range(height)
            for j in range(width)
        ]
        patches = jnp.stack(pixels, axis=-2)  # (..., rows, columns, h w, C)
        if self.colour == "per_channel":
            patches = jnp.moveaxis(patches, -1, -4)
        return patches.reshape(*X.shape[:-1], self.num_patches, self.patch_dim)


def extract_patches(
    X: ArrayLike, image_shape: Any, patch_shape: Any, stride: int | tuple[int, int] = 1, colour: str = "joint"
) -> Array:
    """The patches of images, for example to choose inducing patches::

        patches = kernels.extract_patches(X, (28, 28), (5, 5)).reshape(-1, 25)
        Z = init.kmeans(rng_key, patches[rows], 100)

    :param X: images, flattened row-major, channel fastest, shape (B, H W C).
    :param image_shape: (H, W) or (H, W, C).
    :param patch_shape: (h, w).
    :param stride: steps between patches in pixels, an integer or (rows, columns).
    :param colour: "joint": whole patches, entries in the order row, column, channel; "per_channel": patches of each channel, in the
        order channel, row, column.
    :return: shape (B, P, d), patches in the order row, column.
    :raises TypeError: if ``X`` is not floating-point or sizes are not integers.
    :raises ValueError: if sizes are not positive or do not fit each other.
    """
    return PatchGrid.checked(image_shape, patch_shape, stride, colour).extract(check_inputs("X", X))


def _sizes(name: str, value: Any, lengths: tuple[int, ...], form: str) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, value))
    except TypeError as error:
        raise TypeError(f"`{name}` must be {form}, integers; got {value!r}.") from error
    if len(sizes) not in lengths or min(sizes) < 1:
        raise ValueError(f"`{name}` must be {form}, positive integers; got {value!r}.")
    return sizes
