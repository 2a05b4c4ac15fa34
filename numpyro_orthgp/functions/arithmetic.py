"""What ``Marginals.joint`` may be made of: draws of a function, and arithmetic on what was drawn."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from numpyro_orthgp.math.products import matmul
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["draw_columns", "draw_mixed", "draw_of_tasks", "draw_scaled", "draw_shifted", "drawn_from"]


def draw_shifted(draw: Any, shift: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    return draw(rng_key, shape) + shift


def draw_scaled(draw: Any, factor: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    return draw(rng_key, shape) * factor


def draw_mixed(draw: Any, W: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    return matmul(draw(rng_key, shape), W)


def draw_columns(draw: Any, columns: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    return draw(rng_key, shape)[..., columns]


def draw_of_tasks(
    draw: Any, functions: Array, weights: Array | None, rng_key: PRNGKey | None, shape: tuple[int, ...]
) -> Array:
    """Weighted sums of the functions (B, K) that each row sees; of one function, whatever it is, for weights of ``None``."""
    seen = jnp.take_along_axis(draw(rng_key, shape), jnp.broadcast_to(functions, (*shape, *functions.shape)), -1)
    return seen[..., 0] if weights is None else jnp.sum(weights * seen, -1)


# Each draws what its first argument draws, and changes it.
_ARITHMETIC = (draw_shifted, draw_scaled, draw_mixed, draw_columns, draw_of_tasks)


def drawn_from(joint: Any) -> tuple[Any, tuple[int, ...]]:
    """What draws beneath arithmetic, of all that ``Marginals.joint`` may be made of, and the columns that were picked last."""
    picked: tuple[int, ...] = ()
    while isinstance(joint, Partial) and joint.func in _ARITHMETIC:
        if joint.func is draw_columns:
            picked = picked or tuple(np.ravel(joint.args[1]).tolist())
        joint = joint.args[0]
    return joint, picked
