"""Whether the distribution of y at a row depends on f at that row alone.

Nodes are those of each row by itself, and the same numbers in all rows. So a distribution that depends on f at several rows (a
running sum, the distance from a mean) would get a wrong expectation. The density of a row must be a sum of functions of f at one
row each. That is looked at in models, where numbers are known, as when a guide first sees one, for what users write: ``fn`` of
``Likelihood``, and ``conditional`` of a class of their own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.functions.sites import model_running
from numpyro_orthgp.math.interactions import bits, not_additive
from numpyro_orthgp.types import Array

__all__ = ["refuse_several_rows"]

_FEW, _MANY = 4, 64  # rows of which each is compared with each
_LARGE = 4096  # rows from which only few are


def refuse_several_rows(likelihood: Any) -> None:
    """
    :raises ValueError: if the distribution of one row depends on f at several rows.
    """
    fn = getattr(likelihood, "fn", None)
    if model_running() is None or likelihood.lead or likelihood.sees_several or not _sees_several_rows(likelihood, fn):
        return
    what = f"`conditional` of {type(likelihood).__name__} makes the distribution of one row"
    if fn is not None:
        what = "`fn` of Likelihood(f(X), fn) makes the distribution of one row"
    raise ValueError(
        f"{what} depend on f at several rows, such as their sum or mean. f(X) has the distribution of f at each row alone, so the "
        "expectation would be wrong. Draw f, and give y a distribution of NumPyro: dist.Normal(jnp.cumsum(f(X).sample()), s). "
        "Where it is linear in f, f(Average(nodes, weights)) needs no draw."
    )


def _sees_several_rows(likelihood: Any, fn: Any) -> bool:
    """Whether the density of a row is no sum of functions of one row each; False where its numbers are not known."""
    m, random = likelihood.marginals, np.random.default_rng(0)
    own = m.own_shape
    step = random.choice([-1, 1], own) * random.uniform(0.5, 1.5, own)
    rows = np.arange(own[0]).reshape(-1, *(1,) * (len(own) - 1))

    @jax.jit  # one program in place of each operation's own
    def density(moved: Array) -> Array:
        given = likelihood.conditional(jnp.asarray(step * moved, m.mean.dtype))
        found: Array = given.log_prob(given.support.feasible_like(jnp.zeros(given.shape())))
        return found

    if not all(map(is_concrete, jax.tree.leaves(fn))):
        return False
    try:
        with jax.ensure_compile_time_eval():
            start, both = (np.asarray(density(moved)) for moved in (0 * rows, 0 * rows + 1))
            eps = float(jnp.finfo(start.dtype).eps)
            for bit in bits(min(own[0], _FEW if own[0] > _LARGE else _MANY)):
                a, b = (np.asarray(density(moved)) for moved in (rows >> bit & 1, 1 - (rows >> bit & 1)))
                if not_additive(start, a, b, both, eps).any():
                    return True
    except Exception:  # a distribution without a density or a support, or a function that needs its site
        pass
    return False
