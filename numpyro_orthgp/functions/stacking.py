"""Single functions side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_orthgp.functions.arithmetic import drawn_from
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.runs import DrawInRun
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["draw_stacked", "stack"]


def stack(marginals: Sequence[Marginals]) -> Marginals:
    """Put single functions side by side: P marginals of shape (B,) become one of shape (B, P).

    :param marginals: marginals of *different* functions at the same inputs (different functions are independent). Do not stack one
        function at two inputs, ``f(a)`` and ``f(b)``: their covariance would be lost. Draws keep it.
    :raises ValueError: if they are not all of shape (B,), one is an output of ``f(X) @ W``, only some are tightened, or two belong
        to one function.
    """
    marginals = list(marginals)
    shapes = {m.shape for m in marginals}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError(f"`stack` needs marginals of one shape (B,); got {[m.shape for m in marginals]}.")
    if any(m.mixing is not None for m in marginals):
        raise ValueError(
            "`stack` needs functions that are not mixed by `@ W`. Stack first, then mix: stack([f(X), g(X)]) @ "
            "W. For several outputs of one mixture use (f(X) @ W)[..., [0, 2]]."
        )
    if len({(m.tight, type(m)) for m in marginals}) != 1:
        raise ValueError(
            "`stack` needs all functions tightened or none; give AutoSparseGP one `residual` for all of them."
        )
    origins = [origin for m in marginals if (origin := _origin(m)) is not None]
    if len(set(origins)) < len(origins):
        raise ValueError(
            "`stack` needs different functions, since it treats them as independent; here one function comes "
            "twice. If one y depends on one function at several inputs, draw it there: f(a).sample() and "
            "f(b).sample() belong to one function. If each input has a y of its own, give each y its own "
            "statement."
        )
    columns = {name: jnp.stack([getattr(m, name) for m in marginals], -1) for name in ("mean", "explained", "residual")}
    totals = [m.total for m in marginals if m.total is not None]
    total = jnp.stack(totals, -1) if len(totals) == len(marginals) else None
    groups = _stacked_groups([m.groups for m in marginals])
    scales = [m.residual_scale for m in marginals if m.residual_scale is not None]
    v = jnp.stack(jnp.broadcast_arrays(*scales), -1) if scales else None
    joint = Partial(draw_stacked, marginals) if any(m.joint is not None for m in marginals) else None
    names = None if marginals[0].names is None else marginals[0].names.side_by_side()
    others: Any = {"total": total, "residual_scale": v, "joint": joint, "groups": groups, "names": names}
    return replace(marginals[0], **others, **columns)  # type: ignore[arg-type]


def _stacked_groups(groups: Sequence[Array | None]) -> Array | None:
    sizes = {None if g is None else g.shape[-1] for g in groups}
    if len(sizes) > 1:
        raise ValueError(f"`stack` needs functions with one `group_size`; got {', '.join(map(str, sizes))}.")
    return None if None in sizes else jnp.stack([g for g in groups if g is not None])


def _origin(m: Marginals) -> tuple[int, tuple[int, ...]] | None:
    """The function of marginals of shape (B,), and its picked outputs; ``None`` if unknown."""
    joint, picked = drawn_from(m.joint)
    return (id(m.names.whole), picked) if isinstance(joint, Partial | DrawInRun) and m.names is not None else None


def draw_stacked(marginals: Sequence[Marginals], rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    keys = jax.random.split(rng_key, len(marginals))
    return jnp.stack([m._draw(key, shape) for m, key in zip(marginals, keys, strict=True)], -1)
