"""The primitive :func:`gp`: a function with a Gaussian-process prior whose inducing variables are latent sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import lax
from numpyro.distributions import constraints

from numpyro_orthgp.foreign import KnownTables
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.keys import note_where_seeded, prng_key
from numpyro_orthgp.functions.mean_only import MeanShift, project_shift, weigh_points
from numpyro_orthgp.functions.prior import as_kernel, check_jitter, check_latents, decompose_sets
from numpyro_orthgp.functions.projection import Block, project, residual_covariance, residual_variance
from numpyro_orthgp.functions.runs import Run
from numpyro_orthgp.functions.sites import Names, refuse_enumerated, told_of_enumeration
from numpyro_orthgp.gaussians.constraints import NaturalPart
from numpyro_orthgp.gaussians.natural_step import precondition
from numpyro_orthgp.inducing import Feature, InducingPoints, MeanOnly, as_sets, covariance_of_points
from numpyro_orthgp.math.cholesky import inverse_cholesky
from numpyro_orthgp.math.linalg import add_jitter, default_jitter, jitter_scale
from numpyro_orthgp.primitives.divergence import check_divergence
from numpyro_orthgp.primitives.messages import (
    Belief,
    Site,
    announce,
    belief_of,
    inducing_site,
    known,
    refuse_handlers_of_rows,
)
from numpyro_orthgp.types import Array, ArrayLike, KernelLike

__all__ = ["gp"]

# Up to this number of mean-only points the inverse of their Fisher matrix preconditions gradients; beyond it, its diagonal.
MAX_EXACT_FISHER = 1024


def gp(
    name: str,
    kernel: KernelLike,
    inducing: ArrayLike | Feature | Sequence[Any],
    *,
    num_latents: int | None = None,
    jitter: float | None = None,
) -> GPFunction:
    r"""Declare a function with a Gaussian-process prior and sets of inducing variables.

    Each set lives in the orthogonal complement of the earlier sets:

    .. math:: f(x) = \sum_i A_i(x)^\top e_i + \text{residual}(x), \qquad e_i \sim N(0, I),

    with :math:`A_i` as in :mod:`numpyro_orthgp.functions.projection`. The whitened variables :math:`e_i` are ordinary NumPyro
    latent sites ``{name}.u0``, ``{name}.u1``, ... One set gives SVGP [1], two give SOLVE-GP [2]. A last entry :class:`MeanOnly`
    gives ODVGP [3] and declares the param site ``{name}.u{i}_weights``, shape (H,) or (P, H).

    Under a guide of this package the function has the marginals of q(f). Otherwise (NUTS, ``Predictive``, NumPyro's autoguides,
    ``condition``) it has the marginals of p(f | u).

    >>> import jax.numpy as jnp, numpyro
    >>> from numpyro_orthgp import gp, kernels
    >>> Z, O, X = jnp.array([[0.0], [1.0]]), jnp.array([[0.5]]), jnp.array([[0.1], [0.2], [0.9]])
    >>> with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as sites:
    ...     f = gp("f", 4.0 * kernels.Matern52(0.5), [Z, O])
    >>> list(sites), f(X).shape
    (['f.u0', 'f.u1'], (3,))

    :param name: name of the function, the prefix of its sites.
    :param kernel: covariance function; ``kernel(X1, X2)`` of shape (n, m), or (P, n, m) for one per latent function.
    :param inducing: inducing points of shape (M, D), same units as the data's inputs, or (P, M, D), other points for each latent
        function; or a feature; or a list of sets.
    :param num_latents: number P of independent functions that share the kernel and inducing points. ``None`` gives one function
        without a latent axis, or as many functions as the leading axis of hyperparameters or points.
    :param jitter: variance of independent noise on the inducing variables, relative to the mean of the kernel's diagonal;
        by default 1e-6 in float32 and 1e-10 in float64. Zero adds none. If the Cholesky factor does not exist with
        this jitter, more is added. For ``f.expected`` use 1e-6 in float64; in float32 the default is right.
    :return: the function, callable at inputs.
    :raises ValueError: inside a plate (which would scale the KL divergence), a mask or scale of rows, or in a fit a mask of all;
        for wrong shapes, also of values; for empty sets, NaN or infinity; if the guide's Gaussians have other sizes; for a kernel
        that depends on an enumerated site; and for a name that is taken.
    :raises TypeError: for integer inputs, or a kernel that cannot be called.

    **References:**

    1. Hensman, Matthews, Ghahramani. Scalable Variational Gaussian Process Classification. 2015.
    2. Shi, Titsias, Mnih. Sparse Orthogonal Variational Inference for Gaussian Processes. 2020. Eqs. 2-4.
    3. Salimbeni, Cheng, Boots, Deisenroth. Orthogonally Decoupled Variational Gaussian Processes. 2018.
    """
    refuse_handlers_of_rows(name)
    with told_of_enumeration():
        kernel, given = as_kernel(kernel), num_latents
        features, mean_only = as_sets(inducing)
        num_latents = check_latents(given, kernel, features)
    if given is None:
        refuse_enumerated(num_latents)
    jitter = check_jitter(jitter, features[0].dtype)

    batch = () if num_latents is None else (num_latents,)
    messages = [inducing_site(f"{name}.u{i}", Site(i, (*batch, s.num), s.dtype)) for i, s in enumerate(features)]
    blocks = decompose_sets(kernel, features, jitter)
    beliefs = tuple(known(message) for message in messages)
    # The belief of the first set that has one; earlier sets may be conditioned on.
    belief = next((b for message in messages if (b := belief_of(message)) is not None), None)
    check_divergence(messages)
    natural = belief is not None and belief.natural
    note_where_seeded()
    full_name = messages[0]["name"].removesuffix("__CF").removesuffix(".u0")  # as `handlers.do` renames it
    f = GPFunction(
        kernel,
        features,
        blocks,
        beliefs,
        shift=_mean_shift(f"{name}.u{len(features)}", kernel, features, blocks, mean_only, batch, natural),
        residual_scale=None if belief is None else belief.residual_scale,
        grouping=None if belief is None else belief.grouping,
        num_latents=num_latents,
        fitting=belief is not None,
        names=Names(full_name, belief is not None, _words_of_residual(belief, mean_only), num_latents is not None),
        values=tuple(message["value"] for message in messages),
        run=Run(),
        tables=KnownTables.of(inducing),
    )
    announce(full_name, f)
    return f


def _words_of_residual(belief: Belief | None, mean_only: MeanOnly | None) -> str:
    """What makes the residual of q another than the prior's; nothing, if it is the same."""
    if belief is not None and belief.residual_scale is not None:
        return "a tightened residual (residual='tight')"
    return "" if mean_only is None else "mean-only points (MeanOnly)"


def _mean_shift(
    name: str,
    kernel: KernelLike,
    features: Sequence[Feature],
    blocks: Sequence[Block],
    mean_only: MeanOnly | None,
    batch: tuple[int, ...],
    natural: bool,
) -> MeanShift | None:
    r"""Declare the weights a of the mean-only points, with cost :math:`a^\top C a / 2` (Salimbeni et al. 2018, Prop. A.1)."""
    if mean_only is None:
        return None
    points, H = mean_only.points, mean_only.num
    # A parameter of the model, like the inducing points, so that every guide, Predictive and posterior see the same shift.
    constraint = NaturalPart() if natural else constraints.real
    weights = numpyro.param(f"{name}_weights", jnp.zeros((*batch, H), points.dtype), constraint=constraint)
    if weights.shape != (*batch, H):
        raise ValueError(
            f"`{name}_weights` must have shape {(*batch, H)}, one weight per mean-only point; got {weights.shape}."
        )
    if natural:
        weights = precondition(weights, *_root_of_fisher(kernel, features, blocks, points))
    projected = project_shift(kernel, features, blocks, points, weights)
    drawn, scaled = _drawn(mean_only, weights)
    (product,) = weigh_points(kernel, [InducingPoints(drawn)], points, weights)
    # The same columns as in the product: a^T K a and the sets' share of it are large and cancel, column by column.
    of_drawn = projected if drawn is points else project_shift(kernel, features, blocks, drawn, scaled)
    explained = sum(jnp.sum(s * p) for s, p in zip(of_drawn, projected, strict=True))
    numpyro.factor(f"{name}_kl", (explained - jnp.sum(scaled * product)) / 2)
    return MeanShift(points, weights, projected)


def _root_of_fisher(
    kernel: KernelLike, features: Sequence[Feature], blocks: Sequence[Block], points: Array
) -> tuple[Array, bool]:
    """W with W'W = C^-1 for the mean-only points, with C their covariance given the sets, or its diagonal if they are many."""
    diagonal = points.shape[-2] > MAX_EXACT_FISHER
    A = project(blocks, [s.covariance_with_inputs(kernel, points) for s in features])
    variance = kernel(points)
    scale = jitter_scale(variance)
    jitter = default_jitter(variance.dtype) * scale
    if diagonal:
        return lax.stop_gradient(1 / jnp.sqrt(residual_variance(variance, A) + jitter[..., None])), True
    C = add_jitter(residual_covariance(covariance_of_points(kernel, points, points), A, A), jitter)
    return lax.stop_gradient(inverse_cholesky(C, scale)), False


def _drawn(mean_only: MeanOnly, weights: Array) -> tuple[Array, Array]:
    """Points whose columns of C enter the penalty, and their weights scaled so that the sum stays unbiased."""
    points, H, size = mean_only.points, mean_only.num, mean_only.subsample_size or mean_only.num
    rng_key = None if size == H else prng_key()
    if rng_key is None:
        return points, weights
    columns = jax.random.choice(rng_key, H, (size,), replace=False)
    return points[..., columns, :], weights[..., columns] * (H / size)
