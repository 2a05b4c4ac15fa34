"""What mean-only points add to a posterior mean, by vector solves only (Salimbeni et al. 2018).

**Weights are parameters of the model.** They only move the posterior mean. A latent site would need the Cholesky factor of an H
x H matrix to be drawn, and ``Predictive``, which carries sampled values but no ``infer``, would lose the shift. As
``numpyro.param("f.u{i}_weights")`` with a ``factor`` of -a'Ca/2, the same shift is seen by every guide, by ``Predictive`` and
by ``posterior``. At its start of zero, under NUTS or for prior draws, it changes nothing. It follows that ``MeanOnly`` comes
last, once, after at least one set that is not mean-only.

**Cost.** A_i(points) a is found by vector solves, so cost is linear in H but for the H x H product in the penalty, whose
columns ``subsample_size`` subsamples without bias. It draws columns of the difference C = K - A'A. To draw columns of K alone, with
all of A'A, is unbiased too but noisy, because ``a'Ka`` and ``|Aa|^2`` are large and nearly cancel: ODVGP 1024 + 8096 on kin40k
ended at a log density of -0.03 that way, and at 0.18 this way (docs/results.md, the papers' tables).

**Tightening.** With an untightened residual, a second set with covariance "prior" and the same points as ``MeanOnly`` give the
same bound. Tightened they do not: what a set with prior covariance explains is no longer residual and cannot shrink, so
``MeanOnly`` gives the better bound.
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
