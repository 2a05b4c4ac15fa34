"""Outputs given values of their functions. With these, several outputs of one draw belong to the same function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_orthgp.diagnostics.layout import is_marginals
from numpyro_orthgp.functions.draws import draw_process
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.stacking import draw_stacked
from numpyro_orthgp.inducing.rows import Rows
from numpyro_orthgp.likelihoods.base import is_expected
from numpyro_orthgp.types import Array

__all__ = ["Drawn", "given_functions"]

Drawn = tuple[GPFunction, Rows, Array]  # a function, inputs, and its values there


def given_functions(fn: Any, drawn: Sequence[Drawn]) -> Any:
    """A site's distribution with f(X) known, if all functions beneath it have been drawn."""

    def known(leaf: Any) -> Any:
        value = _value(leaf.joint, drawn) if is_marginals(leaf) else None
        if value is None:
            return leaf
        zero = jnp.zeros_like(value)
        return replace(
            leaf,
            mean=value,
            explained=zero,
            residual=zero,
            mixing=None,
            residual_scale=None,
            joint=Partial(_repeated, value),
            total=None,
        )

    return jax.tree.map(known, fn, is_leaf=is_marginals) if is_expected(fn) else fn


def _repeated(value: Array, rng_key: Any, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(value, (*shape, *value.shape))


def _value(joint: Any, drawn: Sequence[Drawn]) -> Array | None:
    """``Marginals.joint`` of these values; ``None`` if a function beneath it is not among them."""
    if not isinstance(joint, Partial):
        return None
    if joint.func is draw_process:
        own, at = joint.args
        return next((value for f, X, value in drawn if f is own and X is at), None)
    if joint.func is draw_stacked:
        columns = [_value(m.joint, drawn) for m in joint.args[0]]
        return None if any(column is None for column in columns) else jnp.stack(columns, -1)  # type: ignore[arg-type]
    beneath, *others = joint.args
    value = _value(beneath, drawn)
    return None if value is None else joint.func(lambda rng_key, shape: value, *others, None, ())
