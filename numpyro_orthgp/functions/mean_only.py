"""What mean-only points add to a posterior mean, by vector solves only (Salimbeni et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.functions.projection import Block, project
from numpyro_orthgp.inducing import Feature, weighted_covariance
from numpyro_orthgp.math.blocks import MAX_ENTRIES, sum_blocks
from numpyro_orthgp.types import Array

__all__ = ["MeanShift", "project_shift", "weigh_points"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanShift:
    """The part of the posterior mean that mean-only points carry.

    :param points: shape (H, D) or (P, H, D).
    :param weights: the a of Salimbeni et al. 2018, shape (H,) or (P, H).
    :param projected: for each set the projection A_i(points) weights, shape (..., M_i); cheaper than A_i itself.
    """

    points: Array
    weights: Array
    projected: tuple[Array, ...]


def weigh_points(kernel: Any, features: Sequence[Feature], points: Array, weights: Array) -> list[Array]:
    """K(Z_i, points) weights for each feature, shapes (..., M_i), without ever holding all of a K.

    :param points: shape (H, D) or (P, H, D).
    :param weights: shape (..., H).
    """

    def weigh(s: Feature, points: Array, weights: Array) -> Array:
        return weighted_covariance(kernel, s, jnp.moveaxis(points, 0, -2), jnp.moveaxis(weights, 0, -1))

    # Blocks are cut along first axes.
    rows, weights = jnp.moveaxis(points, -2, 0), jnp.moveaxis(weights, -1, 0)
    latents = math.prod(weights.shape[1:])
    return [sum_blocks(partial(weigh, s), rows, weights, MAX_ENTRIES // (s.num * latents)) for s in features]


def project_shift(
    kernel: Any, features: Sequence[Feature], blocks: Sequence[Block], points: Array, weights: Array
) -> tuple[Array, ...]:
    """A_i(points) weights for each set, shapes (..., M_i), by vector solves only."""
    # As if the weighted sum were one input.
    products = [p[..., None] for p in weigh_points(kernel, features, points, weights)]
    return tuple(p[..., 0] for p in project(blocks, products))
