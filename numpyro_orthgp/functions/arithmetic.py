"""Arithmetic on marginals: checks of operands, and draws.

**Axes of enumeration.** While NumPyro enumerates a discrete site, its value has an axis to the left of all plates. So have arrays
that it indexes, such as ``offset[z]`` of shape (K, 1). Marginals and likelihoods accept these axes in front of their own. Otherwise
an operand may not have more axes than f(X): (B, 1) with (B,) would broadcast to (B, B), which is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from numpyro_orthgp.functions.sites import enumerating
from numpyro_orthgp.math.products import PRECISION, matmul
from numpyro_orthgp.types import Array, PRNGKey

__all__ = [
    "NOT_LINEAR", "OF_ROWS", "broadcasts", "check_operand", "check_rows", "check_weights", "draw_columns", "draw_mixed",
    "draw_of_rows", "draw_of_tasks", "draw_scaled", "draw_shifted", "drawn_from", "mix_rows", "of_outputs", "of_rows", "operand",
    "operands_of", "outputs_first", "refuse_no_output", "rows_drawn", "weighted",
]  # fmt: skip


OF_ROWS = (
    "`A @ f(X)` needs the covariances between rows, which marginals do not have. For weighted sums of values of f use "
    "f(Average(nodes, A)), with nodes of shape (len(A), B, D), here jnp.broadcast_to(X, (len(A), *X.shape)); or draw f: "
    "A @ f(X).sample(). To mix outputs, write f(X) @ W."
)
NOT_LINEAR = (
    "`f(X) ** n` is not Gaussian, so it has no marginals. Use likelihoods.Likelihood(f(X), lambda f: dist.Normal(f**2, s)), "
    "or draw f: f(X).sample() ** 2."
)


def broadcasts(shape: tuple[int, ...], own: tuple[int, ...], lead: int = 0) -> bool:
    """Whether an array broadcasts to the shape ``own`` of f(X), apart from axes of enumeration in front.

    :param lead: number of axes of enumeration that f(X) is known to have, also after the model has ended.
    """
    try:
        together = jnp.broadcast_shapes(shape, own)
    except ValueError:
        return False
    extra = len(together) - len(own)
    return together[extra:] == own and (extra <= lead or enumerating())


def operand(symbol: str, value: Any, dtype: Any) -> Array:
    """An operand of arithmetic on marginals, as a real array.

    :raises TypeError: if the operand is marginals too, or complex.
    """
    if hasattr(value, "explained"):
        raise TypeError(
            f"Marginals {symbol} Marginals: the result needs the covariance between the two functions, which "
            "marginals do not have. Use a kernel that is a sum (k1 + k2), whose terms are f.term(...). For "
            "independent functions use (stack([f(X), g(X)]) @ jnp.ones((2, 1)))[..., 0]. For one function at two "
            "inputs use f(Average(jnp.stack([a, b], 1), jnp.array([1.0, -1.0])))."
        )
    value = jnp.asarray(value)
    if jnp.iscomplexobj(value):
        raise TypeError(f"`f(X) {symbol} array` needs a real array, since f is real; got dtype {value.dtype}.")
    # Integers become real first: unsigned ones would wrap around when negated or squared.
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(dtype)


def check_operand(symbol: str, value: Array, mean: Array, lead: int) -> int:
    """The number of axes of enumeration in the result of ``f(X) symbol value``.

    :param lead: their number in f(X).
    :raises ValueError: if the shapes do not match.
    """
    own = mean.shape[lead:]
    extra = value.ndim - len(own)
    if not broadcasts(value.shape, own, lead):
        fixes: dict[tuple[int, ...], str] = {own[:1]: "[:, None]"} if len(own) == 2 else {(*own, 1): "[:, 0]"}
        hint = f" Did you mean array{fixes[value.shape]}?" if value.shape in fixes else ""
        raise ValueError(
            f"`f(X) {symbol} array` needs an array that broadcasts to the shape {own} of f(X); got {value.shape}.{hint}"
        )
    return max(lead, extra)


def check_weights(W: Array, mean: Array, lead: int) -> int:
    """The number of axes of enumeration of ``f(X) @ W``. W may have them in front of an axis of rows, (K, 1, P, Q).

    :raises ValueError: if the shapes do not match.
    """
    own = mean.shape[lead:]
    per_row = W.ndim > 2 and enumerating() and W.shape[-3] in (1, own[0])
    if len(own) != 2 or not (W.ndim == 2 or per_row) or W.shape[-2] != own[1]:
        raise ValueError(
            f"`f(X) @ W` needs f(X) of shape (B, P) and W of shape (P, Q); got {own} and {W.shape}. "
            "Give gp() `num_latents=P`, or stack single functions with numpyro_orthgp.stack([...])."
        )
    return max(lead, W.ndim - 3)


def check_rows(which: Any, mean: Array, lead: int) -> Array:
    """Checked indices of one output per row: integers of shape (B,) or (), with axes of enumeration in front of (B,) or (1,).

    :raises TypeError: if they are not integers.
    :raises ValueError: for another shape, or a single output.
    """
    own, which = mean.shape[lead:], jnp.asarray(which)
    if not jnp.issubdtype(which.dtype, jnp.integer):
        raise TypeError(f"`f(X).pick(which)` needs integers, the output of each row; got {which.dtype}.")
    fits = which.shape in ((), own[:1]) or (enumerating() and which.ndim > 1 and which.shape[-1] in (1, own[0]))
    if len(own) != 2 or not fits:
        raise ValueError(
            f"`f(X).pick(which)` needs f(X) of shape (B, P) and one output for each row, shape (B,); got {own} and {which.shape}."
        )
    return jnp.broadcast_to(which, (*which.shape[:-1], own[0]))  # an axis of rows, also if all have the same index


def mix_rows(values: Array, W: Array) -> Array:
    """(..., B, L) times weights (L, P), or (..., 1 or B, L, P) of each row."""
    return matmul(values, W) if W.ndim == 2 else jnp.matmul(values[..., None, :], W, precision=PRECISION)[..., 0, :]


def of_rows(values: Array, which: Array) -> Array:
    """Entry ``which`` (..., B) of each row of ``values`` (..., B, P)."""
    shape = jnp.broadcast_shapes(which.shape, values.shape[:-1])
    every = jnp.broadcast_to(values, (*shape, values.shape[-1]))
    return jnp.take_along_axis(every, jnp.broadcast_to(which, shape)[..., None], -1)[..., 0]


def weighted(latent: Array, weights: Array) -> Array:
    """Latent (..., B, L) to outputs (..., B, P), by weights (L, P) or (..., 1 or B, L, P)."""
    if weights.ndim == 2:
        return jnp.einsum("...bl,lp->...bp", latent, weights, precision=PRECISION)
    weights = jnp.broadcast_to(weights, (*weights.shape[:-3], latent.shape[-2], *weights.shape[-2:]))
    return jnp.einsum("...bl,...blp->...bp", latent, weights, precision=PRECISION)


def of_outputs(factor: Array, own: tuple[int, ...]) -> Array:
    """The factor of weights (L, P) or (..., B, L, P) if outputs are multiplied by ``factor``."""
    if factor.ndim < len(own):  # () or (P,)
        return factor
    factor = jnp.broadcast_to(factor, factor.shape[: -len(own)] + own)
    return factor[..., None, :] if len(own) == 2 else factor[..., None, None]


def outputs_first(values: Array, own: tuple[int, ...]) -> Array:
    """(..., B, P) to (..., P, B), the order of axes of groups; (..., B) unchanged."""
    return values if len(own) == 1 else jnp.swapaxes(values, -1, -2)


def refuse_no_output(P: int, which: Array) -> None:
    """
    :raises ValueError: if an index is outside of 0..P-1.
    """
    values = np.asarray(which)
    outside = values[(values < 0) | (values >= P)]
    if outside.size:
        raise ValueError(f"`f(X).pick(which)` needs outputs in 0..{P - 1}; got {outside[0]}.")


def _lifted(values: Array, samples: int, axes: int) -> Array:
    """Draws with axes of size one after the sample axes, so that the remaining axes are as many as an operand's."""
    shape = values.shape
    extra = max(axes - (values.ndim - samples), 0)
    return values.reshape(shape[:samples] + (1,) * extra + shape[samples:]) if extra and samples else values


def draw_shifted(draw: Any, shift: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    return _lifted(draw(rng_key, shape), len(shape), shift.ndim) + shift


def draw_scaled(draw: Any, factor: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    return _lifted(draw(rng_key, shape), len(shape), factor.ndim) * factor


def draw_mixed(draw: Any, W: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    return mix_rows(_lifted(draw(rng_key, shape), len(shape), W.ndim - 1), W)


def draw_columns(draw: Any, columns: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    return draw(rng_key, shape)[..., columns]


def draw_of_rows(draw: Any, which: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    return of_rows(_lifted(draw(rng_key, shape), len(shape), which.ndim + 1), which)


def draw_of_tasks(
    draw: Any, functions: Array, weights: Array | None, rng_key: PRNGKey | None, shape: tuple[int, ...]
) -> Array:
    """Weighted sums of the functions (B, K) that each row sees; for weights ``None``, the one function of each row."""
    seen = jnp.take_along_axis(draw(rng_key, shape), jnp.broadcast_to(functions, (*shape, *functions.shape)), -1)
    return seen[..., 0] if weights is None else jnp.sum(weights * seen, -1)


# Functions that `Marginals.joint` may consist of: each takes the draw of its first argument, and changes it.
_ARITHMETIC = (draw_shifted, draw_scaled, draw_mixed, draw_columns, draw_of_rows, draw_of_tasks)


def _is_arithmetic(joint: Any) -> bool:
    return isinstance(joint, Partial) and joint.func in _ARITHMETIC


def rows_drawn(joint: Any) -> Any:
    """The inputs or functionals at which ``Marginals.joint`` draws one function; ``None`` in other cases."""
    while _is_arithmetic(joint):
        joint = joint.args[0]
    args: tuple[Any, ...] = getattr(joint, "args", ())
    return args[1] if len(args) == 2 else None


def drawn_from(joint: Any) -> tuple[Any, tuple[int, ...]]:
    """The underlying draw of ``Marginals.joint`` without arithmetic, and the columns that were picked last."""
    picked: tuple[int, ...] = ()
    while _is_arithmetic(joint):
        if joint.func is draw_columns:
            picked = picked or tuple(np.ravel(joint.args[1]).tolist())
        joint = joint.args[0]
    return joint, picked


def operands_of(joint: Any) -> Iterator[Any]:
    """The operands of the arithmetic in ``Marginals.joint``."""
    while _is_arithmetic(joint):
        joint, *operands = joint.args
        yield from operands
