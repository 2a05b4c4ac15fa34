"""Layers of deep convolutional GPs: a function of patches, evaluated at all patches of images, gives images again.

All patches of an image share the inducing variables of a draw, and are independent given these
(:mod:`numpyro_orthgp.functions.shared_draws`). The next layer sees patches together, so draws from marginals would not belong
to any q. The result is a bound for the model with FITC in its hidden layers. Joint residuals over the patches of an image would
take a Cholesky factor for each image and channel.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_orthgp.errors import check_inputs
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.shared_draws import draw_grouped
from numpyro_orthgp.kernels.hyperparameters import as_array
from numpyro_orthgp.kernels.patches import PatchGrid
from numpyro_orthgp.math.blocks import MAX_ENTRIES, map_blocks
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["patchwise", "patchwise_mean"]


def patchwise(
    f: GPFunction,
    X: ArrayLike,
    *,
    image_shape: tuple[int, ...],
    patch_shape: tuple[int, int],
    stride: int | tuple[int, int] = 1,
    max_entries: int = MAX_ENTRIES,
) -> Marginals:
    r"""Evaluate a function of patches at every patch of every image (Blomqvist et al. 2018; Shi et al. 2020, App. G).

    The outputs are images again, of shape (rows, columns, C') with C' the number of functions of ``f``, flattened row-major,
    channel fastest. A deep convolutional GP draws them and feeds the draw to the next layer (doubly stochastic)::

        f1 = gp("f1", kernels.RBF(5.0), Z1, num_latents=10)  # Z1: patches, shape (M, 5 * 5 * 3)
        k2 = kernels.Convolutional(kernels.RBF(5.0), image_shape=(28, 28, 10), patch_shape=(5, 5))
        f2 = gp("f2", k2, InducingPatches(Z2))               # Z2: shape (M, 5 * 5 * 10)
        with numpyro.plate("data", N, subsample_size=len(X)):
            h = patchwise(f1, X, image_shape=(32, 32, 3), patch_shape=(5, 5))
            h = h + patchwise_mean(X, ...)
            numpyro.sample("y", likelihoods.Gaussian(f2(h.sample()), noise), obs=y)

    Draws share the inducing variables within each image, or over all images if the inducing variables have values. Given these they
    are independent, as in FITC. Draws from the marginals would be wrong, since the next layer sees all patches of an image at once.
    With a function from :func:`posterior`, one draw is one function at all B P patches, at most 8192. ``.independent()`` draws
    point by point.

    Under a tightened guide each image is charged for v once per patch and channel. If more than ``max_entries`` numbers would be
    held at once, images are computed in blocks, and again for the gradient.

    :param f: a function of patches, d = h w C inputs in the order row, column, channel.
    :param X: images, flattened row-major, channel fastest, shape (B, H W C).
    :param image_shape: (H, W) or (H, W, C).
    :param patch_shape: (h, w).
    :param stride: steps between patches in pixels, an integer or (rows, columns).
    :param max_entries: most numbers held at once, counted as inducing variables times functions times patches.
    :return: marginals of shape (B, P C') for P patches, as if they were independent functions.
    :raises TypeError: if ``X`` is not floating, or of another dtype than the inducing variables.
    :raises ValueError: if sizes do not match; from a joint draw, at more than 8192 patches.
    """
    grid = PatchGrid.checked(image_shape, patch_shape, stride)
    X = check_inputs("X", X)
    channels = 1 if f.num_latents is None else f.num_latents
    per_image = grid.num_patches * channels * sum(s.num for s in f.features)

    def moments(images: Array) -> Any:
        m = f(_rows_of_patches(grid, images))
        # All channels of each patch: row-major, channel fastest.
        return jax.tree.map(lambda a: a.reshape(len(images), -1), (m.mean, m.explained, m.residual, m.total))

    mean, explained, residual, total = map_blocks(moments, X, max_entries // per_image)
    if f.grouping is not None:
        raise ValueError(
            "patchwise() has no groups of rows, since its rows are patches. Leave `group_size` out for this gp: "
            "group_size={'another gp': 16}."
        )
    v = f.residual_scale
    if v is not None:
        v = jnp.tile(jnp.broadcast_to(v, (channels,)), grid.num_patches)
    shared = f.fitting or all(q.is_value for q in f.beliefs)
    draw = Partial(_draw_shared, f, X, grid, max_entries // per_image) if shared else Partial(_draw_images, f, X, grid)
    return Marginals(mean, explained, residual, None, v, draw, f.names, total)


def patchwise_mean(
    X: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    image_shape: tuple[int, ...],
    patch_shape: tuple[int, int],
    stride: int | tuple[int, int] = 1,
    average: bool = False,
) -> Array:
    """A mean function for :func:`patchwise`: the central pixel of each patch, so that a layer starts as a copy of its input.

    :param X: images, shape (B, H W C).
    :param weights: weights that mix the image's C channels to C', shape (C, C'); ``None`` keeps the channels.
        ``jnp.ones((C, C'))`` sums them, as Blomqvist et al. 2018 do.
    :param image_shape: (H, W) or (H, W, C).
    :param patch_shape: (h, w); for an even side the central pixel is the one right of, or below, the middle.
    :param stride: steps between patches in pixels, an integer or (rows, columns).
    :param average: take the average over the patch instead.
    :return: shape (B, P C'), in the order of :func:`patchwise`.
    :raises TypeError: if ``X`` is not floating.
    :raises ValueError: if sizes do not match.
    """
    grid = PatchGrid.checked(image_shape, patch_shape, stride)
    X = check_inputs("X", X)
    (height, width), C = grid.patch_shape, grid.image_shape[2]
    pixels = grid.extract(X).reshape(len(X), grid.num_patches, height * width, C)
    means = pixels.mean(2) if average else pixels[:, :, height // 2 * width + width // 2]
    if weights is not None:
        W = as_array(weights, X.dtype)
        if W.ndim != 2 or W.shape[0] != C:
            raise ValueError(f"`weights` must have shape (C, C') with C = {C} channels of the images; got {W.shape}.")
        means = jnp.einsum("bpc,ck->bpk", means, W, precision=PRECISION)
    return means.reshape(len(X), -1)


def _rows_of_patches(grid: PatchGrid, images: Array) -> Array:
    """All patches of all images, shape (B P, d)."""
    return grid.extract(images).reshape(-1, grid.patch_dim)


def _draw_shared(
    f: GPFunction, X: Array, grid: PatchGrid, at_once: int, rng_key: PRNGKey, shape: tuple[int, ...]
) -> Array:
    def images(rows: tuple[Array, Array]) -> Array:
        pixels, keys = rows  # the first key suffices: each block has others
        return draw_grouped(f, grid.extract(pixels), keys[0]).values[0].reshape(len(pixels), -1)

    def one(key: PRNGKey) -> Array:
        return map_blocks(images, (X, jax.random.split(key, len(X))), at_once)

    draws = jax.vmap(one)(jax.random.split(rng_key, math.prod(shape)))
    return draws.reshape(*shape, *draws.shape[1:])


def _draw_images(f: GPFunction, X: Array, grid: PatchGrid, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    # Marginals with patches as rows know how to draw, and their limit.
    return f(_rows_of_patches(grid, X))._draw(rng_key, shape).reshape(*shape, len(X), -1)
