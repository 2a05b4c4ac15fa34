"""The prior and its sets of inducing variables: checks and decomposition for :func:`gp` and :class:`CollapsedGP`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.closures import NoSites
from numpyro_orthgp.errors import inspect, no_function
from numpyro_orthgp.functions.projection import (
    Block,
    conditional_covariance,
    decompose,
    joint_whitener,
    residual_covariance,
    residual_variance,
)
from numpyro_orthgp.functions.values_of_users import check_values_of_users
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.inducing import Feature, InducingPoints
from numpyro_orthgp.inducing.rows import Rows, covariance_of_rows, covariance_with_rows, scale_of_rows, variance_of_rows
from numpyro_orthgp.kernels.base import ours
from numpyro_orthgp.kernels.centred import psi2_centred
from numpyro_orthgp.kernels.expectations import psi0, psi1, psi2
from numpyro_orthgp.kernels.functions import kernel_as_pytree
from numpyro_orthgp.kernels.hermite import hermite_factors, whitened_spread
from numpyro_orthgp.math.cholesky import inverse_cholesky, safe_cholesky
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.linalg import add_jitter, default_jitter, jitter_scale, join, join_blocks, safe_sqrt
from numpyro_orthgp.math.products import PRECISION, diagonal, matmul, transpose
from numpyro_orthgp.types import Array, ArrayLike, KernelLike, NumPoints

__all__ = [
    "Expectations",
    "as_kernel",
    "check_jitter",
    "check_latents",
    "decompose_sets",
    "expect_covariances",
    "joint_root",
    "root_given",
]

# In dtypes with fewer bits, whitened psi statistics keep no correct digits.
_BITS_OF_MANY_DIGITS = 64
_MAX_JOINT = 32768  # rows whose joint distribution has a factor, which takes several matrices of 9 GB in float64
_ROUNDING = 16  # units of rounding by which sums of squares and products of a kernel may differ


@one_program
def decompose_sets(kernel: KernelLike, features: Sequence[Feature], jitter: float) -> tuple[Block, ...]:
    """The orthogonal decomposition of the prior along the sets."""
    rows = [[other.covariance(kernel, s) for other in features[: i + 1]] for i, s in enumerate(features)]
    check_values_of_users(kernel, features, [row[-1] for row in rows])
    return decompose(rows, jitter)


def joint_root(kernel: Any, features: Sequence[Feature], blocks: Sequence[Block], X: Rows) -> Array:
    """The joint Cholesky factor of the covariance of all sets and f(X), shape (..., M + B, M + B).

    Its last rows are the projections of X on each set, and the root of the residual's covariance. If the residual is as small as
    rounding errors in float32, ``K - A' A`` cannot give this root, since its rounding errors are larger.

    :param blocks: decomposition of the sets; their jitter is added here too.
    """
    K, unit = covariance_of_rows(kernel, X), scale_of_rows(kernel, X)
    with_sets = [covariance_with_rows(kernel, s, X) for s in features]
    if unit is not None:  # jitter is relative to the mean variance; values and slopes may differ by orders of magnitude
        K, with_sets = K / unit[..., :, None] / unit[..., None, :], [C / unit[..., None, :] for C in with_sets]
    scale = jitter_scale(diagonal(K))
    rows = [[other.covariance(kernel, s) for other in features[: i + 1]] for i, s in enumerate(features)]
    rows.append([*with_sets, K])
    of_sets = (jnp.broadcast_to(b.jitter, (*b.jitter.shape[:-1], s.num)) for b, s in zip(blocks, features, strict=True))
    of_draw = jnp.broadcast_to((default_jitter(K.dtype) * scale)[..., None], (*scale.shape, len(X)))
    noise = join([*of_sets, of_draw], -1, event_dim=1)
    L = safe_cholesky(conditional_covariance(join_blocks(rows), (), noise), scale)
    if unit is None:
        return L
    of_rows = jnp.concatenate([jnp.ones((*unit.shape[:-1], L.shape[-1] - len(X)), unit.dtype), unit], -1)
    return of_rows[..., :, None] * L


def root_of_rows(C: Array, variance: Array, unit: Array | None) -> Array:
    """The Cholesky factor of the covariance of f at rows, shape (..., B, B).

    :param C: the covariance under q.
    :param variance: prior variances, shape (..., B); jitter is relative to their mean.
    :param unit: divisors of rows with different units, shape (..., B); ``None`` for values of f.
    """
    if unit is None:
        scale = jitter_scale(variance)
        return safe_cholesky(add_jitter(C, default_jitter(C.dtype) * scale), scale)
    one = jnp.ones(C.shape[:-2], C.dtype)
    C = C / unit[..., :, None] / unit[..., None, :]
    return unit[..., :, None] * safe_cholesky(add_jitter(C, default_jitter(C.dtype) * one), one)


def root_given(
    kernel: Any,
    features: Sequence[Feature],
    blocks: Sequence[Block],
    beliefs: Sequence[Whitened],
    X: Rows,
    A: Sequence[Array],
) -> Array:
    """The Cholesky factor of the covariance of f at rows under q, shape (..., B, B), from projections A on the sets.

    In float32 the residual's covariance has a root of its own (:func:`joint_root`), and both roots become one by a QR
    decomposition. The difference ``K - A' A`` is not positive definite to the digits of float32: its factor took so much extra
    jitter that standard deviations were ten times as large where they were a hundredth of the prior's. If many rows need extra
    jitter for the root too, its rows are as long as the residual's variances say.

    :raises ValueError: for more rows than a machine has memory for.
    """
    B = A[0].shape[-1]
    if isinstance(B, int) and B > _MAX_JOINT:  # under jax.export it is a symbol
        raise ValueError(
            f"f.joint(X) at B = {B} inputs needs several B x B matrices, each of {B**2 * X.dtype.itemsize / 1e9:.0f} GB; the limit "
            f"is {_MAX_JOINT}. For draws of one function at any number of inputs use f.sample_paths(rng_key, num)(X), for means "
            "and variances f(X)."
        )
    spreads = [W for q, Ai in zip(beliefs, A, strict=True) if (W := q.spread(Ai)) is not None]
    if jnp.finfo(X.dtype).bits >= _BITS_OF_MANY_DIGITS:
        K = covariance_of_rows(kernel, X)
        C = sum((matmul(transpose(W), W) for W in spreads), start=residual_covariance(K, A, A))
        return root_of_rows(C, diagonal(K), scale_of_rows(kernel, X))
    residual = joint_root(kernel, features, blocks, X)[..., -len(X) :, -len(X) :]
    prior, square, unit = variance_of_rows(kernel, X), jnp.sum(residual**2, -1), scale_of_rows(kernel, X)
    size = jitter_scale(prior)[..., None] if unit is None else unit**2
    most = residual_variance(prior, A) + default_jitter(X.dtype) * size
    residual = jnp.where(square > most, safe_sqrt(most / square), 1)[..., :, None] * residual
    if not spreads:
        return residual
    R = jnp.linalg.qr(join([*spreads, transpose(residual)], -2, event_dim=2), mode="r")
    return transpose(jnp.where(diagonal(R) < 0, -1, 1)[..., :, None] * R)


class Expectations(NamedTuple):
    """Expected covariances of Gaussian inputs with all M inducing points of all sets.

    In float64 E[A(x) A(x)'] is E[A] E[A]' + ``outer centred outer'``. In float32 it is ``outer second outer'`` plus
    F F' - R F F' R' for ``factors`` F and ``kept`` R, or E[A] E[A]' + ``spread``.

    :param first: E[A(x)], the projections on all sets, shape (M, B).
    :param outer: maps K(Z, x) to projections, shape (M, M).
    :param residual: expected variance that no set explains, shape (B,).
    :param centred: the covariance of K(Z, x) over each input, shape (B, M, M).
    :param second: E[K(Z, x) K(x, Z)] for each input, shape (B, M, M).
    :param factors: projections of each of :func:`~numpyro_orthgp.kernels.hermite.hermite_factors`, shape (S, B, M).
    :param raw: the factors themselves, shape (S, B, M).
    :param kept: R with ``outer`` = R W for the whitener W, shape (M, M).
    :param lacking: whether factors leave more than rounding of ``second``, shape (B,).
    :param spread: the covariance of A(x), shape (B, M, M).
    """

    first: Array
    outer: Array
    residual: Array
    centred: Array | None = None
    second: Array | None = None
    factors: Array | None = None
    raw: Array | None = None
    kept: Array | None = None
    lacking: Array | None = None
    spread: Array | None = None


def expect_covariances(
    kernel: Any,
    features: Sequence[Feature],
    blocks: Sequence[Block],
    loc: Array,
    scale: Array,
    num_points: NumPoints,
    magnified: ArrayLike = 1.0,
) -> Expectations:
    """The psi statistics (Titsias and Lawrence 2010) of all sets together, and the moments of the projections.

    :param magnified: factor by which rounding errors of E[A A'] will be multiplied. In float32 it decides in which small directions
        the part that :func:`~numpyro_orthgp.kernels.hermite.hermite_factors` lack counts as more than rounding.
    :raises TypeError: for features that are not inducing points.
    :raises ValueError: if hyperparameters or points differ between several functions.
    """
    points = [s.points for s in features if isinstance(s, InducingPoints)]
    if len(points) < len(features):
        raise TypeError("With latent inputs `inducing` must be inducing points, whose kernel expectations are known.")
    if any(p.ndim > 2 for p in points):
        raise ValueError("With latent inputs all functions must share their inducing points, shape (M, D).")
    Z = jnp.concatenate(points, -2)
    W = joint_whitener(blocks)
    variance = psi0(kernel, loc, scale, num_points=num_points)
    single = jnp.finfo(W.dtype).bits < _BITS_OF_MANY_DIGITS
    raw = hermite_factors(kernel, Z, loc, scale) if single else None
    mean = psi1(kernel, Z, loc, scale, num_points=num_points) if raw is None else raw[0].T
    first = matmul(W, mean)
    if raw is None:
        variance = variance - jnp.sum(first**2, 0)
        if single:
            spread = whitened_spread(kernel, W, Z, loc, scale, mean, num_points=num_points)
            explained = jnp.trace(spread, axis1=-2, axis2=-1)
            return Expectations(first, W, jnp.maximum(variance - explained, 0), spread=spread)
        centred = psi2_centred(kernel, Z, loc, scale, mean, num_points=num_points)
        return Expectations(first, W, jnp.maximum(variance - _traces(W, centred), 0), centred)
    second = psi2(kernel, Z, loc, scale, num_points=num_points)
    kept, lacking = _above_rounding(W, jitter_scale(kernel(Z)), magnified), _is_lacking(second, raw)
    factors, outer = matmul(raw, W.T), matmul(kept, W)
    rest = _traces(outer, second) - jnp.sum(matmul(factors, kept.T) ** 2, (0, -1))
    explained = jnp.sum(factors**2, (0, -1)) + jnp.where(lacking, rest, 0)
    residual = jnp.maximum(variance - explained, 0)
    return Expectations(first, outer, residual, None, second, factors, raw, kept, lacking)


def _traces(outer: Array, moments: Array) -> Array:
    """Traces of ``outer moments outer'``, shape (B,)."""
    return jnp.einsum("mn,bmn->b", matmul(outer.T, outer), moments, precision=PRECISION)


def _is_lacking(second: Array, raw: Array) -> Array:
    """Whether factors leave more than rounding of the second moment of an input, shape (B,). Whitened, rounding is more than all
    the variance of a function that is known well."""
    squares = diagonal(second)
    least = _ROUNDING * jnp.finfo(second.dtype).eps * jnp.max(squares, -1)
    return jnp.max(squares - jnp.sum(raw**2, 0), -1) > least


def _above_rounding(W: Array, variance: Array, magnified: ArrayLike) -> Array:
    r"""A matrix that removes directions in which whitening by W leaves only rounding errors: :math:`(I + c W W^\top)^{-1}`."""
    least = jnp.minimum(jnp.finfo(W.dtype).eps * jnp.asarray(magnified, W.dtype), 1) * variance
    least = lax.stop_gradient(least)
    Q = add_jitter(least * matmul(W, transpose(W)), jnp.ones((), W.dtype))
    V = inverse_cholesky(Q, jnp.ones((), W.dtype))
    return matmul(transpose(V), V)


def as_kernel(kernel: Any) -> Any:
    """A covariance function as a pytree.

    :raises TypeError: if it cannot be called, or is a class.
    """
    if isinstance(kernel, type) or not callable(kernel):
        raise TypeError(
            f"`kernel` must be callable as kernel(X1, X2) and kernel(X); got {no_function(kernel)} "
            "Take one of numpyro_orthgp.kernels, a tinygp kernel, or a function."
        )
    return ours(kernel_as_pytree(kernel))


def check_latents(
    num_latents: int | None, kernel: KernelLike, features: Sequence[Feature], X: Array | None = None
) -> int | None:
    """The number P of latent functions, from the user, or from a leading axis of hyperparameters or points.

    :param features: all sets, since an inter-domain feature sees only one term of the kernel.
    :param X: inputs, shape (B, D), whose variances may show P too.
    :raises ValueError: if these disagree, or the kernel does not return a matrix.
    """
    shapes = [_batch_of(kernel, feature) for feature in features]
    if X is not None:
        shapes.append(jax.eval_shape(lambda: kernel(X)).shape[:-1])
    batch = next(
        (shape[0] for shape in shapes if shape), None
    )  # sets and kernel agree, or their covariances have raised
    if num_latents is None:
        return batch
    if isinstance(num_latents, bool) or not isinstance(num_latents, int) or num_latents < 1:
        raise ValueError(f"`num_latents` must be a positive integer or None; got {num_latents!r}.")
    if batch not in (None, num_latents):
        raise ValueError(
            f"`num_latents` is {num_latents} but the kernel's hyperparameters or the inducing points have a leading axis of "
            f"{batch}."
        )
    return num_latents


def _batch_of(kernel: KernelLike, feature: Feature) -> tuple[int, ...]:
    """The shape of leading axes of a set's own covariance, () or (P,)."""
    with NoSites(f"A kernel or a feature ({type(kernel).__name__}, {type(feature).__name__})"):
        shape, num = jax.eval_shape(lambda: feature.covariance(kernel, feature)).shape, feature.num
    if len(shape) not in (2, 3) or shape[-2:] != (num, num):
        raise ValueError(
            f"`kernel(Z, Z)` must have shape (M, M) or (P, M, M) with M = {num}; got {shape}. Do the kernel's "
            "hyperparameters have shape (), (D,), or a leading axis of one entry per latent function?"
        )
    if isinstance(feature, InducingPoints) and feature.points.ndim == 2:
        _check_variances(kernel, feature.points, shape[:-2])
    return shape[:-2]


def _check_variances(kernel: KernelLike, Z: Array, batch: tuple[int, ...]) -> None:
    """
    :param batch: leading axes of ``kernel(Z, Z)``, () or (P,).
    :raises ValueError: if ``kernel(Z)`` is a matrix, as it is in other libraries.
    """
    wanted = f"`kernel(X)`, of one matrix of n inputs, must give their variances k(x, x), shape (n,){' or (P, n)' * bool(batch)}"
    hint = "Write `lambda A, B=None: variances of A if B is None else matrix of A and B`."
    try:
        shape = jnp.shape(jax.eval_shape(lambda: kernel(Z)))
    except TypeError as error:
        if "positional argument" not in str(error):
            raise
        raise TypeError(f"{wanted}; got an error: {error}. {hint}") from error
    if shape[-1:] not in ((), (len(Z),)) or shape[:-1] not in ((), batch):
        raise ValueError(f"{wanted}; got {shape} for n = {len(Z)}. {hint}")


def check_jitter(jitter: float | None, dtype: Any, *, expectations: bool = False) -> float:
    """The relative jitter; the default depends on the dtype and on ``expectations``.

    :raises ValueError: if it is concrete and not in [0, 1).
    """
    if jitter is None:
        return default_jitter(dtype, expectations=expectations)
    inspect(_refuse_large, jitter)
    return jitter


def _refuse_large(jitter: float) -> None:
    if not 0 <= jitter < 1:
        raise ValueError(f"`jitter` must be in [0, 1), relative to the kernel's variance; got {jitter}.")
