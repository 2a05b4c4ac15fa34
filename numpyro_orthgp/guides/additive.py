r"""Which sites need the joint law of values that were drawn independently of each other.

Let :math:`v_1, v_2, \dots` be rows of draws ``f(X).independent().sample()``. Each has its own law under q(f), and all are
independent, although values of one function are not. The expectation of a log density is still right if this is a sum of functions
of one of them each,

.. math:: \log p(y \mid v) = \sum_k h_k(v_k),

as in ``dist.Normal(v, s)``, and wrong for the mean of several rows. Then for any two disjoint sets S and T of rows

.. math:: F(S \cup T) - F(S) - F(T) + F(\emptyset) = 0,

with F(S) the log density where rows of S have moved. Two rows differ in a bit of their number. So it suffices to take for S and T,
bit by bit, the rows that have it and those that do not. The steps are random numbers, so differences do not cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.functions.moved import DrawByRows
from numpyro_orthgp.math.interactions import bits, not_additive
from numpyro_orthgp.types import Array

__all__ = ["GAUSSIAN", "Moves", "Steps", "interactions", "moves_of", "with_stand_ins"]

# ``(gp, GAUSSIAN)`` names the argument that moves the Gaussian of a function, which its marginals follow.
GAUSSIAN = "gaussian"

# How far each of a program's arguments moves; those left out do not.
Steps = dict[Any, np.ndarray]

# Two disjoint sets of moves, and what it means if they are not additive.
Moves = tuple[str, Steps, Steps]

_MOST_COLUMNS = 8  # functions of a gp that are looked at
_ROUNDS = 2  # of random steps


def moves_of(gp: str, latents: int | None, draws: Sequence[DrawByRows], kinds: tuple[str, str, str]) -> Iterator[Moves]:
    """The moves that show which rows a density needs jointly, or which draws with marginals.

    :param gp: name of the function, and of the argument that moves its inducing variables. Draw k is moved by ``(gp, k)``.
    :param latents: P, or ``None`` for a single one.
    :param draws: its draws row by row.
    :param kinds: what is reported of marginals and a draw, of two draws, and of two rows of one draw.
    """
    random = np.random.default_rng(0)
    own, two, rows = kinds
    known = latents is not None and all(draw.columns for draw in draws)
    columns: list[int | None] = [*range(latents or 0)][:_MOST_COLUMNS] if known else [None]
    numbers = [np.arange(draw.num_rows) for draw in draws]
    for column in columns * _ROUNDS:
        of_joint = _of_latent(column, latents, random.choice([-1, 1]) * random.uniform(0.5, 1.5))
        moved = [draw.of(column, random) for draw in draws]

        def where(picked: Callable[[int], Any], moved: Sequence[np.ndarray] = moved) -> Steps:
            return {(gp, k): step * draws[k].rows(picked(k)) for k, step in enumerate(moved)}

        of_gaussian = _of_latent(column, latents, random.choice([-1, 1]) * random.uniform(0.5, 1.5))
        everything = where(lambda k: np.ones(draws[k].num_rows))
        yield own, {(gp, GAUSSIAN): of_gaussian}, everything | {gp: of_joint}
        for bit in bits(len(draws) + 1):  # the joint draws are the one with number zero
            picked = where(lambda k, bit=bit: np.full(draws[k].num_rows, (k + 1) >> bit & 1))  # type: ignore[misc]
            others = where(lambda k, bit=bit: np.full(draws[k].num_rows, 1 - ((k + 1) >> bit & 1)))  # type: ignore[misc]
            yield two, picked, others | {gp: of_joint}
        for bit in bits(max((draw.num_rows for draw in draws), default=0)):
            picked = where(lambda k, bit=bit: numbers[k] >> bit & 1)  # type: ignore[misc]
            yield rows, picked, where(lambda k, bit=bit: 1 - (numbers[k] >> bit & 1))  # type: ignore[misc]


def _of_latent(column: int | None, latents: int | None, step: float) -> np.ndarray:
    if latents is None:
        return np.asarray(step)
    return step * (np.ones((latents, 1)) if column is None else np.eye(latents)[:, [column]])


def interactions(
    densities: Callable[[list[Array]], list[Array]], moves: Sequence[Moves], shapes: Mapping[Any, tuple[int, ...]]
) -> list[set[str]]:
    """For each density the kinds of moves that are not additive in it.

    :param densities: a function of the steps of all arguments.
    :param shapes: of these arguments, in their order.
    """
    kinds = [kind for kind, *_ in moves]
    sets = [steps for _, a, b in moves for steps in (a, b, _joined(a, b))]
    steps = [
        np.stack([np.broadcast_to(s.get(mark, 0.0), shape) for s in [{}, *sets]]).astype(jnp.result_type(float))
        for mark, shape in shapes.items()
    ]
    with jax.ensure_compile_time_eval():
        found = jax.jit(lambda all_steps: jax.lax.map(densities, all_steps))(steps)
        return [_not_additive(np.asarray(f, float).reshape(len(sets) + 1, -1), kinds) for f in found]


def with_stand_ins(closed: core.ClosedJaxpr) -> Any:
    """The program with random numbers for the real ones of a user's ``jit``; ``None`` if others are not known."""
    random = np.random.default_rng(0)
    unknown = [not is_concrete(c) for c in closed.consts]
    if any(u and not jnp.issubdtype(c.dtype, jnp.floating) for u, c in zip(unknown, closed.consts, strict=True)):
        return None
    values = [
        np.asarray(random.uniform(0.5, 1.5, c.shape), c.dtype) if u else c
        for u, c in zip(unknown, closed.consts, strict=True)
    ]
    return core.ClosedJaxpr(closed.jaxpr, values)


def _joined(a: Steps, b: Steps) -> Steps:
    return {mark: np.asarray(a.get(mark, 0.0) + b.get(mark, 0.0)) for mark in a | b}


def _not_additive(F: np.ndarray, kinds: Sequence[str]) -> set[str]:
    eps = float(jnp.finfo(jnp.result_type(float)).eps)
    return {
        kind for i, kind in enumerate(kinds) if not_additive(F[0], F[1 + 3 * i], F[2 + 3 * i], F[3 + 3 * i], eps).any()
    }
