"""The shift of the posterior mean by mean-only points, with vector solves only (Salimbeni et al. 2018).

**Weights are parameters of the model.** They only move the posterior mean. A draw of a latent site would need the Cholesky factor
of an H x H matrix, and ``Predictive``, which carries sampled values but no ``infer``, would lose the shift. With
``numpyro.param("f.u{i}_weights")`` and a ``factor`` of -a'Ca/2, every guide, ``Predictive`` and ``posterior`` see the same shift.
At the initial value of zero, under NUTS or for prior draws, it changes nothing. So ``MeanOnly`` comes last, once, after at least
one set that is not mean-only.

**Cost.** Vector solves give A_i(points) a, so the cost is linear in H, except for the H x H product in the penalty.
``subsample_size`` subsamples its columns without bias: columns of the difference C = K - A'A. Drawing columns of K alone, with all
of A'A, is unbiased too but noisy, because ``a'Ka`` and ``|Aa|^2`` are large and nearly cancel: ODVGP 1024 + 8096 on kin40k
ended at a log density of -0.03 that way, and at 0.18 this way (docs/results.md, the papers' tables).

**Tightening.** With an untightened residual, ``MeanOnly`` and a second set with covariance "prior" and the same points give the
same bound. With a tightened one ``MeanOnly`` is better: the part that a set with prior covariance explains is no longer residual
and cannot shrink.
"""

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
    """The part of the posterior mean that comes from mean-only points.

    :param points: shape (H, D) or (P, H, D).
    :param weights: the a of Salimbeni et al. 2018, shape (H,) or (P, H).
    :param projected: the projection A_i(points) weights for each set, shape (..., M_i); cheaper than A_i itself.
    """

    points: Array
    weights: Array
    projected: tuple[Array, ...]


def weigh_points(kernel: Any, features: Sequence[Feature], points: Array, weights: Array) -> list[Array]:
    """K(Z_i, points) weights for each feature, shapes (..., M_i), without holding a whole K.

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
    # The weighted sum is treated as one input.
    products = [p[..., None] for p in weigh_points(kernel, features, points, weights)]
    return tuple(p[..., 0] for p in project(blocks, products))
