r"""Draws of a function that share its inducing variables within groups of inputs.

Under q the values at inputs :math:`x_1, \dots, x_R` of one group are

.. math:: f(x_r) = m(x_r) + \sum_i A_i(x_r)^\top T_i \epsilon_i + \sqrt{v\, r(x_r)}\, \eta_r,
    \qquad \epsilon_i \sim N(0, I) \text{ of the group}, \quad \eta_r \sim N(0, 1) \text{ of each input}.

:class:`~numpyro_orthgp.DeepGP` has one group per data point, whose members are the particles of the point. Given the inducing
variables, the particles are independent draws, so an average *inside* a logarithm gives a bound. Other inputs of a group are
treated as independent given the inducing variables, as in FITC.

The next layer may see several inputs of a group at once, as with a residual that is tightened in groups of rows. Then residuals are
drawn jointly, :math:`\sqrt v\, L \eta` with the factor L of the residual's covariance in the group. Rows of L are scaled to
length :math:`\sqrt{r(x_r)}`, so jitter and rounding change correlations a little, but no variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_orthgp.functions.frozen import constant_if_frozen
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.groups import covariance_of_groups
from numpyro_orthgp.functions.projection import residual_variance
from numpyro_orthgp.inducing import InducingPoints
from numpyro_orthgp.math.cholesky import safe_cholesky
from numpyro_orthgp.math.grouped import cut_groups, gram_of_groups
from numpyro_orthgp.math.linalg import add_jitter, default_jitter, jitter_scale, safe_sqrt
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["GroupedDraw", "draw_by_groups", "draw_grouped"]


class GroupedDraw(NamedTuple):
    """Draws at G groups of R inputs, S for each input.

    :param values: shape (S, G, R) or (S, G, R, P).
    :param log_weights: log density ratio of the residual, prior over q, summed over the P functions, shape (S, G, R); zero
        unless the residual is tightened.
    """

    values: Array
    log_weights: Array


def draw_by_groups(f: GPFunction, X: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    """One draw of q(f) at inputs (B, D), jointly within each group of f's, shape (B,) or (B, P)."""
    assert shape == () and f.grouping is not None
    start, size = f.grouping.start(len(X)), f.grouping.size

    def drawn(rng_key: PRNGKey, rows: Array, size: int) -> Array:
        groups = jnp.moveaxis(cut_groups(rows.T, size, "edge"), 0, -1)
        (values,) = draw_grouped(f, groups, rng_key, jointly=size > 1).values
        return values.reshape(-1, *values.shape[2:])[: len(rows)]

    if not start:
        return drawn(rng_key, X, size)
    keys = jax.random.split(rng_key)
    return jnp.concatenate([drawn(keys[0], X[:start], 1), drawn(keys[1], X[start:], size)])


def draw_grouped(f: GPFunction, X: Array, rng_key: PRNGKey, num: int = 1, *, jointly: bool = False) -> GroupedDraw:
    """Draw the function at groups of inputs.

    :param X: inputs, shape (G, R, D).
    :param num: S, number of residuals for each input, which all share the inducing variables of the group.
    :param jointly: whether residuals within a group are drawn jointly, not independently.
    """
    G, R, D = X.shape
    flat, P = X.reshape(G * R, D), f.num_latents
    A = f.project(flat)
    batch = () if P is None else (P,)
    keys = jax.random.split(rng_key, len(A) + 1)
    mean = f.mean_from([InducingPoints(flat)], A)
    for key, q, Ai in zip(keys[1:], f.beliefs, A, strict=True):
        W = q.spread(Ai)
        if W is not None:
            noise = jax.random.normal(key, (*batch, W.shape[-2], G), X.dtype)
            W = W.reshape(*W.shape[:-1], G, R)
            shared = jnp.einsum("...mgr,...mg->...gr", W, noise, precision=PRECISION)
            mean = mean + shared.reshape(*shared.shape[:-2], G * R)
    residual = residual_variance(f.kernel(flat), A)
    residual, mean = (jnp.broadcast_to(a, (*batch, G * R)) for a in (residual, mean))
    noise = jax.random.normal(keys[0], (num, *mean.shape), X.dtype)
    v = jnp.ones((), X.dtype) if f.residual_scale is None else f.residual_scale[..., None]
    unit = _correlated(f, flat, A, residual, noise.reshape(*noise.shape[:-1], G, R)) if jointly else noise
    values = constant_if_frozen(mean + safe_sqrt(v * residual) * unit)
    # Log density ratio of N(0, r) and N(0, v r) at sqrt(v r) noise, which does not depend on r.
    log_weights = (jnp.log(v) + (1 - v) * noise**2) / 2
    if f.residual_scale is None:
        log_weights = jnp.zeros_like(noise)
    if P is None:
        return GroupedDraw(values.reshape(num, G, R), log_weights.reshape(num, G, R))
    return GroupedDraw(jnp.moveaxis(values, 1, -1).reshape(num, G, R, P), log_weights.sum(1).reshape(num, G, R))


def _correlated(f: GPFunction, X: Array, A: Sequence[Array], residual: Array, noise: Array) -> Array:
    """Noise (..., G, R) with the correlations of the residual within groups, shape (..., G R)."""
    size = noise.shape[-1]
    C = covariance_of_groups(f.kernel, X, gram_of_groups(A, size), residual)
    scale = jitter_scale(cut_groups(f.kernel(X), size))
    L = safe_cholesky(add_jitter(C, default_jitter(C.dtype) * scale), scale)
    L = L / jnp.sqrt(jnp.sum(L**2, -1, keepdims=True))
    unit = jnp.einsum("...gij,...gj->...gi", L, noise, precision=PRECISION)
    return unit.reshape(*unit.shape[:-2], -1)
