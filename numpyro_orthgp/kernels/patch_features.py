"""Random functions of images with a `Convolutional` kernel: one random function of a patch, summed over patches."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.kernels.base import Product, Restricted
from numpyro_orthgp.kernels.convolutional import Convolutional
from numpyro_orthgp.kernels.hyperparameters import as_array
from numpyro_orthgp.kernels.patches import PatchGrid
from numpyro_orthgp.kernels.random_features import Factor, RandomFunctions, Term, draw_functions, register
from numpyro_orthgp.kernels.spectral import Draw
from numpyro_orthgp.math.blocks import MAX_ENTRIES, map_blocks
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.types import Array, KernelLike

__all__ = ["patch_response"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Patches:
    r"""Features :math:`\sum_p w_p\, g_l(x^{[p]}, p)`.

    :param responses: the functions g of a patch and, with a location kernel, its position; leaves of shape (*batch, L, ...).
    :param weights: w, shape (*batch, P).
    :param columns: the input columns of the image; ``None`` for all.
    :param located: whether g depends on the position.
    """

    responses: RandomFunctions
    weights: Array
    grid: PatchGrid = field(metadata={"static": True})
    columns: tuple[int, ...] | None = field(metadata={"static": True})
    located: bool = field(metadata={"static": True})

    @property
    def width(self) -> int:
        """How many numbers one input needs in memory."""
        num_features = self.responses.terms[0].amplitudes.shape[self.weights.ndim - 1]
        return self.grid.num_patches * num_features * self.responses.width

    def __call__(self, X: Array) -> Array:
        X = X if self.columns is None else X[..., np.array(self.columns)]

        def block(images: Array) -> Array:  # (b, ..., D) to (b, ..., L)
            patches = self.grid.extract(jnp.moveaxis(images, 0, -2))  # (..., b, P, d)
            if self.located:
                positions = jnp.asarray(self.grid.positions, X.dtype)
                patches = jnp.concatenate([patches, jnp.broadcast_to(positions, (*patches.shape[:-1], 2))], axis=-1)
            *batch, b, P, d = patches.shape
            values = self.respond(patches.reshape(*batch, b * P, d))
            values = values.reshape(*values.shape[:-2], b, P, values.shape[-1])
            return jnp.moveaxis(jnp.einsum("...bpl,...p->...bl", values, self.weights, precision=PRECISION), -2, 0)

        return jnp.moveaxis(map_blocks(block, jnp.moveaxis(X, -2, 0), MAX_ENTRIES // self.width), 0, -2)

    def respond(self, points: Array) -> Array:
        """The responses g at patches (..., n, d), shape (..., n, L)."""
        return jax.vmap(lambda g: g(points), in_axes=self.weights.ndim - 1, out_axes=-1)(self.responses)


@register(Convolutional, single=True)
def _convolutional(kernel: Convolutional, draw: Draw) -> list[Factor]:
    d, located = kernel.grid.patch_dim, kernel.location is not None
    base: KernelLike = kernel.base
    if kernel.location is not None:
        base = Product(Restricted(base, tuple(range(d))), Restricted(kernel.location, (d, d + 1)))

    def response(rng_key: Array) -> RandomFunctions:
        num_dims = d + 2 if located else d
        return draw_functions(
            rng_key, base, draw.batch, num_dims, num_features=draw.num_inner_features, dtype=draw.dtype
        )

    responses = jax.vmap(response, out_axes=len(draw.batch))(jax.random.split(draw.rng_key, draw.num_features))
    P = kernel.grid.num_patches
    weights = jnp.ones(P, draw.dtype) if kernel.weights is None else as_array(kernel.weights, draw.dtype)
    columns = None if np.array_equal(draw.columns, np.arange(draw.num_dims)) else tuple(draw.columns.tolist())
    return [Patches(responses, jnp.broadcast_to(weights, (*draw.batch, P)), kernel.grid, columns, located)]


def patch_response(term: Term, patches: Array, locations: Array | None = None) -> Array:
    """The patch response function of a convolutional term, times the term's factor.

    :param term: drawn from a `Convolutional` kernel that is not part of a product.
    :param patches: shape (n, d).
    :param locations: shape (n, 2) if the kernel has a ``location``.
    :return: shape (*batch, n).
    """
    points = patches if locations is None else jnp.concatenate([patches, locations], axis=-1)
    (factor,) = term.factors
    assert isinstance(factor, Patches)
    return factor.respond(points)[..., 0] * term.amplitudes
