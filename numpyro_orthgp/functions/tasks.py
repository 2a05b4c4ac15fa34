"""Marginals, joint distributions and draws in the long format: several tasks, one task per row."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.tree_util import Partial

from numpyro_orthgp.functions.arithmetic import draw_of_tasks
from numpyro_orthgp.functions.draws import Joint, draw_process, in_run, moments_in_run
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.runs import DrawInRun
from numpyro_orthgp.functions.separate import moments_of_own, some_functions
from numpyro_orthgp.functions.sites import as_seen
from numpyro_orthgp.inducing.rows import Rows
from numpyro_orthgp.inducing.tasks import Chosen, Tasks
from numpyro_orthgp.math.cholesky import safe_cholesky
from numpyro_orthgp.math.linalg import jitter_scale
from numpyro_orthgp.math.products import PRECISION, diagonal
from numpyro_orthgp.types import Array

__all__ = ["joint_of_tasks", "marginals_of_tasks"]


def marginals_of_tasks(f: Any, X: Rows, tasks: Tasks) -> Marginals:
    """Marginals of shape (B,).

    :param X: the rows, checked.
    :raises ValueError: if the residual is tightened in groups of rows.
    """
    if f.grouping is not None:
        raise ValueError(
            "Tasks cannot have groups of rows, since rows of one group would be of different functions. Leave "
            "`group_size` out for this gp: group_size={'another gp': 16}."
        )
    chosen = tasks.chosen(f.num_latents, X.dtype)
    mean, explained, residual, total = _moments(f, X, chosen)
    functions, v = chosen.functions(len(X)), f.residual_scale
    if v is not None and v.ndim:
        v = v[functions[:, 0] if chosen.weights is None else functions]
    joint = (DrawInRun if f.fitting else Partial)(draw_process, f, X)
    joint = Partial(draw_of_tasks, joint, functions, chosen.weights)
    mixing = None
    if chosen.weights is not None:
        mean, mixing = jnp.sum(chosen.weights * mean, -1), chosen.weights[..., None]
    mean = jnp.where(chosen.known, mean, jnp.nan)
    m = Marginals(mean, explained, residual, mixing, v, joint, f.names, total)
    return as_seen("see_marginals", f, X, m)


def _moments(f: Any, X: Rows, chosen: Chosen) -> tuple[Array, ...]:
    """Mean, explained and residual variance and their sum, for the functions that rows see, shape (B,) or (B, K)."""
    shared: Any = ()
    if chosen.shared:
        shared = (f if chosen.shared == f.num_latents else some_functions(f, X, chosen.shared))._moments(X)[:-1]
        if chosen.own is None:
            return shared
    assert chosen.own is not None
    own = moments_of_own(f, X, chosen.own)
    return tuple(jnp.column_stack(pair) for pair in zip(shared, own, strict=True)) if chosen.shared else own


def joint_of_tasks(f: Any, X: Rows, tasks: Tasks) -> dist.MultivariateNormal:
    """Joint distribution of all rows, event shape (B,). Functions are independent, so rows covary through common functions only."""
    chosen = tasks.chosen(f.num_latents, X.dtype)
    if in_run(f):
        mean, L = as_seen("see_joint", f, X, moments_in_run(f, f.run, X))
    else:
        mean, L = (q := f._joint(X)).loc, q.scale_tril
    functions = chosen.functions(len(X))
    weights = jnp.ones_like(functions, X.dtype) if chosen.weights is None else chosen.weights
    seen = jnp.zeros((len(X), f.num_latents), X.dtype).at[jnp.arange(len(X))[:, None], functions].add(weights)
    rows = seen.T[..., None] * L  # (P, B, B)
    C = jnp.einsum("pik,pjk->ij", rows, rows, precision=PRECISION)
    loc = jnp.where(chosen.known, jnp.sum(seen * mean.T, -1), jnp.nan)
    return Joint(loc, scale_tril=safe_cholesky(C, jitter_scale(diagonal(C))))
