"""Jitter policy, joined arrays, and functions whose derivatives need care.

**Jitter** is relative to the mean of the kernel's diagonal; to one where that vanishes, since such variables say nothing,
whatever their noise. It is 1e-6 in float32 and 1e-10 in float64. It stands for independent noise on the inducing variables, so
every bound remains a bound, and dense oracles can have the same jitter. A factor that fails gets eps M, then ten times that,
and so on (:func:`~numpyro_orthgp.math.cholesky.safe_cholesky`); the derivative uses the factor that was returned. A jitter of
zero is respected at the first attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from numpyro_orthgp.types import Array

__all__ = [
    "add_jitter", "clip_rounding", "default_jitter", "jitter_scale", "join", "join_blocks", "safe_sqrt", "with_derivative_of",
]  # fmt: skip

# Relative to the mean of the kernel's diagonal. Large enough for the factor to exist in nearly all cases, small
# enough not to be seen in a bound; `safe_cholesky` raises it where it is not enough.
_DEFAULT_JITTER = {"float32": 1e-6, "float64": 1e-10}


# Expectations of K(Z, x) K(x, Z) are whitened as a whole, from both sides: rounding errors grow with the inverse of the jitter
# and not with its root, times N and the ratio of signal to noise.
_JITTER_OF_EXPECTATIONS = {"float32": 1e-4, "float64": 1e-6}


def default_jitter(dtype: jnp.dtype, *, expectations: bool = False) -> float:
    """The relative jitter used when the user gives none: 1e-6 in float32, 1e-10 in float64.

    :param expectations: for kernel expectations under uncertain inputs: 1e-4 and 1e-6.
    """
    return (_JITTER_OF_EXPECTATIONS if expectations else _DEFAULT_JITTER).get(jnp.dtype(dtype).name, 1e-3)


def jitter_scale(variances: Array) -> Array:
    """What jitter is relative to: the mean of prior variances (..., M), shape (...).

    One where they vanish, as a linear kernel's at the origin: whatever the jitter, such variables say nothing then.
    """
    scale = variances.mean(-1)
    info = jnp.finfo(variances.dtype)
    return jnp.where(scale > float(info.tiny) / float(info.eps), scale, 1)


def join(parts: Sequence[Array], axis: int, *, event_dim: int) -> Array:
    """Concatenate along ``axis``, one of the last ``event_dim``; the axes before these broadcast."""
    batch = jnp.broadcast_shapes(*(p.shape[: p.ndim - event_dim] for p in parts))
    return jnp.concatenate([jnp.broadcast_to(p, batch + p.shape[p.ndim - event_dim :]) for p in parts], axis)


def join_blocks(rows: Sequence[Sequence[Array]]) -> Array:
    """A symmetric matrix from the blocks of its upper half.

    :param rows: ``rows[i][j]`` is the block of j and i, j <= i, shape (..., M_j, M_i).
    """

    def block(a: int, b: int) -> Array:
        return rows[b][a] if a <= b else jnp.swapaxes(rows[a][b], -1, -2)

    num = range(len(rows))
    return join([join([block(a, b) for b in num], -1, event_dim=2) for a in num], -2, event_dim=2)


@jax.custom_jvp
def safe_sqrt(x: Array) -> Array:
    """Square root of ``max(x, 0)`` whose derivatives at zero are zero rather than infinite."""
    # Not the usual pair of `where`s: XLA's CPU compiler (jaxlib 0.10.2) drops the outer one when it fuses them with a
    # product and an exponential beside a Cholesky factor, and a Matern kernel's diagonal comes out as exp(-1) instead of 1. The
    # root of `max(x, 0)` with a derivative rule is not affected; tests/test_linalg.py has the case. JAX forgets the rule
    # below when it takes a forward derivative of a gradient through a loop, so this has finite derivatives of its own too.
    least = _least_square(x)
    return jnp.sqrt(jnp.maximum(x, least)) - least**0.5


@safe_sqrt.defjvp
def _safe_sqrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,) = primals
    s = safe_sqrt(x)
    tiny = float(jnp.finfo(s.dtype).tiny) ** 0.25  # whose square still has a finite inverse, for second derivatives
    return s, tangents[0] * jnp.sign(jnp.maximum(x - _least_square(x), 0)) / (2 * jnp.maximum(s, tiny))


def _least_square(x: Array) -> float:
    """What counts as zero: its root is exact, far below the rounding of one, and has a finite second derivative."""
    return 4.0 ** round(0.325 * float(jnp.finfo(jnp.result_type(x, float)).minexp))


@jax.custom_jvp
def clip_rounding(x: Array) -> Array:
    """``max(x, 0)`` for what is negative by rounding alone: the derivative passes untouched, since what is cut off is not part of
    the function. (That of `maximum` would be 0 or 1/2 where second derivatives need 1.)"""
    return jnp.maximum(x, 0)


clip_rounding.defjvp(lambda primals, tangents: (clip_rounding(*primals), tangents[0]))


@jax.custom_jvp
def with_derivative_of(x: Array, y: Array) -> Array:
    """``x`` with the derivative of ``y``, of which it differs by rounding alone."""
    return x


with_derivative_of.defjvp(lambda primals, tangents: (with_derivative_of(*primals), tangents[1]))


def add_jitter(K: Array, amount: Array) -> Array:
    """``K + amount I`` with ``amount`` of shape ``K.shape[:-2]``."""
    return K + amount[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)
