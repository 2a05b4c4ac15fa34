"""Some of P latent functions, or one function for each row of inputs, at the cost of one function.

Rows are sorted by function into blocks of C rows, with one function per block. The last block of each function is padded. The
number of blocks is the largest possible, (B + min(P, B) (C - 1)) / C, so shapes do not depend on the functions of the rows. With
C = B / 2P the blocks hold less than 1.5 B + P rows. The parts of a single function (hyperparameters, inducing points, whitener, q)
are looked up once for each block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.functions.projection import Block
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.inducing import Functional, InducingPoints
from numpyro_orthgp.inducing.functional import Concatenated
from numpyro_orthgp.inducing.rows import Rows, variance_of_rows
from numpyro_orthgp.kernels.latents import OfFunctions, separable
from numpyro_orthgp.math.blocks import MAX_ENTRIES, map_blocks
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.types import Array

__all__ = ["moments_of_own", "some_functions"]

MIN_BLOCK = 256  # rows at once outside of a fit, as in ``functions/function.py``


def some_functions(f: Any, X: Rows, num: int) -> Any:
    """The first ``num`` of P functions.

    :param X: rows at which they will be called.
    """
    separated, own = _separated(f, X)
    leaves, structure = jax.tree.flatten(replace(separated, num_latents=num))
    return jax.tree.unflatten(structure, [a[:num] if o else a for a, o in zip(leaves, own, strict=True)])


@one_program
def moments_of_own(f: Any, X: Rows, which: Array) -> tuple[Array, ...]:
    """Mean, explained and residual variance and their sum at rows, with one function for each row, shapes (B,).

    :param which: the function of each row, integers in 0..P-1, shape (B,).
    """
    if isinstance(X, Concatenated):
        ends = [0]
        for part in X.parts:
            ends.append(ends[-1] + len(part))
        parts = [moments_of_own(f, p, which[a:b]) for p, a, b in zip(X.parts, ends, ends[1:], strict=False)]
        return tuple(jnp.concatenate(values) for values in zip(*parts, strict=True))
    size = max(MAX_ENTRIES // f.num_inducing, MIN_BLOCK)
    size = max(size // X.width, 1) if isinstance(X, Functional) else size
    separated, own = _separated(f, X)
    return map_blocks(lambda rows: _by_blocks(separated, own, *rows), (X, which), len(which) if f.fitting else size)


def _by_blocks(f: Any, own: list[bool], X: Rows, which: Array) -> tuple[Array, ...]:
    rows, slots, functions = _arranged(which, f.num_latents)
    leaves, structure = jax.tree.flatten(replace(f, num_latents=None))
    taken = [jnp.asarray(a)[functions] if o else a for a, o in zip(leaves, own, strict=True)]

    def of_block(leaves: list[Any], X: Rows) -> tuple[Array, ...]:
        return jax.tree.unflatten(structure, leaves)._moments_at_once(X)[:-1]

    blocks = jax.tree.map(lambda a: a[rows], X)
    moments = jax.vmap(of_block, in_axes=([0 if o else None for o in own], 0))(taken, blocks)
    return tuple(values.reshape(-1)[slots] for values in moments)


def _arranged(which: Array, P: int) -> tuple[Array, Array, Array]:
    """Rows in blocks of one function each.

    :return: the rows of each block, shape (n, C), arbitrary where padded; the position of each row among all these, shape (B,);
        the function of each block, shape (n,).
    """
    B = which.shape[0]
    if not isinstance(B, int):  # a symbol, by jax.export: a block for each row
        return jnp.arange(B)[:, None], jnp.arange(B), which
    C = -(-B // (2 * P))
    n = (B + min(P, B) * (C - 1)) // C
    order = jnp.argsort(which)
    ordered, counts = which[order], jnp.bincount(which, length=P)
    blocks = -(-counts // C)
    first_row, first_block = jnp.cumsum(counts) - counts, jnp.cumsum(blocks) - blocks
    places = first_block[ordered] * C + jnp.arange(B) - first_row[ordered]
    rows = jnp.zeros(n * C, int).at[places].set(order)
    functions = jnp.zeros(n, int).at[places // C].set(ordered)
    return rows.reshape(n, C), jnp.zeros(B, int).at[order].set(places), functions


def _separated(f: Any, X: Rows) -> tuple[Any, list[bool]]:
    """The function, and for each leaf of its pytree, whether it has an axis of latent functions.

    :raises TypeError: for a term of a kernel that cannot be separated by function.
    """
    f = replace(f, names=None, values=None, run=None)

    def batch_of(kernel: Any) -> tuple[int, ...]:
        return jax.eval_shape(lambda: variance_of_rows(kernel, X)).shape[:-1]

    kernel, own = separable(f.kernel, f.num_latents, f.features[0].dtype, batch_of)
    if isinstance(kernel, OfFunctions) and isinstance(X, Functional) and X.places is not None:
        raise TypeError(
            "`term` of one of several functions needs a kernel whose hyperparameters have a leading axis, one "
            "entry for each function. A kernel that is a plain function has no such hyperparameters."
        )
    marks = replace(
        f,
        kernel=own,  # in its order; a closure holds no truth values
        features=tuple(map(_points, f.features)),
        blocks=tuple(map(_block, f.blocks)),
        beliefs=tuple(map(_belief, f.beliefs)),
        shift=None if f.shift is None else _shift(f.shift),
        residual_scale=None if f.residual_scale is None else jnp.ndim(f.residual_scale) > 0,
    )
    return replace(f, kernel=kernel), jax.tree.leaves(marks)


def _points(feature: Any) -> Any:
    return jax.tree.map(lambda a: isinstance(feature, InducingPoints) and jnp.ndim(a) > 2, feature)


def _block(block: Block) -> Block:
    matrices = jax.tree.map(lambda a: jnp.ndim(a) > 2, block)
    return replace(matrices, jitter=jnp.ndim(block.jitter) > 1)


def _belief(q: Whitened) -> Whitened:
    own: dict[str, Any] = {name: jnp.ndim(getattr(q, name)) > q.event_dim(name) for name in q.parts()}
    return replace(q, **own)


def _shift(shift: Any) -> Any:
    vectors = jax.tree.map(lambda a: jnp.ndim(a) > 1, shift)
    return replace(vectors, points=jnp.ndim(shift.points) > 2)
