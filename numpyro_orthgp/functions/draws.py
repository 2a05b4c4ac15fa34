"""Draws of a function at inputs or functionals. In a run of a model they belong to one function, elsewhere they come from q(f).

``functions/runs.py`` explains runs, and why their draws belong together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.tree_util import Partial
from numpyro.infer import ELBO

from numpyro_orthgp.errors import check_key
from numpyro_orthgp.functions.arithmetic import draw_columns, draw_scaled, draw_shifted, drawn_from, operands_of
from numpyro_orthgp.functions.callers import is_calling
from numpyro_orthgp.functions.keys import key_in_run
from numpyro_orthgp.functions.moved import moving
from numpyro_orthgp.functions.paths import Paths, draw_paths
from numpyro_orthgp.functions.prior import joint_root
from numpyro_orthgp.functions.projection import extend
from numpyro_orthgp.functions.runs import STACKED_MARGINALS, DrawInRun, Run, refuse_stacked
from numpyro_orthgp.functions.sites import as_seen
from numpyro_orthgp.functions.stacking import draw_stacked
from numpyro_orthgp.gaussians.family import Value
from numpyro_orthgp.inducing import Functional, InducingPoints
from numpyro_orthgp.inducing.rows import Rows, as_feature, join_rows
from numpyro_orthgp.math.linalg import default_jitter, join, safe_sqrt
from numpyro_orthgp.math.products import PRECISION, combine
from numpyro_orthgp.types import Array, PRNGKey

__all__ = [
    "MAX_JOINT_DRAW",
    "Joint",
    "JointInRun",
    "draw_process",
    "drawn_columns",
    "drawn_functions",
    "in_run",
    "moments_in_run",
    "numbers_in",
    "paths_of",
]

# A joint draw at B points needs a B x B Cholesky factor. Beyond this size the user should choose another way. In a fit each step
# has one, with its gradient.
MAX_JOINT_DRAW = 8192
MAX_FITTED_DRAW = 2048


def draw_process(f: Any, X: Rows, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    """Draws of f(X), shape ``shape`` + (B,) or (B, P): of the run's one function, or of q(f) outside of a run."""
    refuse_stacked(f, STACKED_MARGINALS)
    _check_joint_draw(len(X), fitting=f.fitting)
    if f.run is not None:
        known = f.run.values_at(X)
        if known is None and f.run.path is not None:
            (known,) = f.run.path(X)
        if known is None:
            known = _draw_in_run(f, f.run, X, rng_key, () if f.run.going else shape)
        # Within a run all S draws are of the one function.
        return jnp.broadcast_to(known, (*shape, *known.shape)) if shape and f.run.going else known
    # NumPyro draws in the default dtype, not in that of the function.
    draws = f.joint(X).sample(rng_key, shape).astype(X.dtype)
    return draws if f.num_latents is None else jnp.swapaxes(draws, -1, -2)


def _draw_in_run(f: Any, run: Run, X: Rows, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    """Draws given this run's inducing variables and earlier draws, shape ``shape`` + (B,) or (B, P)."""
    if f.names is not None:
        f.names.refuse_within("derivative", "call")
    if moving():
        mean, _, variance, *_ = f._at_values()._moments(X)
        return mean + safe_sqrt(variance) * jax.random.normal(rng_key, (*shape, *mean.shape), X.dtype)
    mean, L = moments_in_run(f, run, X)
    noise = jax.random.normal(rng_key, (*shape, *mean.shape), X.dtype)
    if f.residual_scale is not None:  # spherical in the residual's whitened coordinates (Titsias 2025, Sec. 3.3)
        noise = safe_sqrt(f.residual_scale)[..., None] * noise
    draws = mean + jnp.einsum("...bc,...c->...b", L, noise, precision=PRECISION)
    draws = draws if f.num_latents is None else jnp.swapaxes(draws, -1, -2)
    if not shape:
        run.note(X, noise, draws)
    return draws


def paths_of(f: Any, rng_key: PRNGKey, num: int, num_features: int) -> Paths:
    """Paths of q(f), or of the run's function: a single path then stands for the function, see ``GPFunction.sample_paths``."""
    refuse_stacked(f)
    single = num == 1 and in_run(f)
    if single and f.run.path is not None:
        return f.run.path
    if single and f.names is not None:
        f.names.refuse_within("call")
    if in_run(f):
        rng_key = key_in_run(f.names, check_key(rng_key, "Paths"))
    given, shift, drawn = f._at_values(), f.shift, f.run.drawn if in_run(f) else None
    features, blocks, beliefs = f.features, f.blocks, given.beliefs
    if drawn is not None and not isinstance(drawn.X, Functional):  # as one more set, see ``functions/runs.py``
        at = InducingPoints(drawn.X)
        row = [s.covariance(f.kernel, at) for s in (*features, at)]
        blocks = extend(blocks, row, default_jitter(at.dtype))
        features, beliefs = (*features, at), (*beliefs, Value(drawn.noise))
        if shift is not None:
            shift = replace(shift, projected=(*shift.projected, jnp.zeros_like(drawn.noise)))
    paths = draw_paths(rng_key, num, num_features, (f.kernel, features, blocks, beliefs, shift), f.num_latents)
    if single:
        f.run.note_path(paths)
    return paths


def in_run(f: Any) -> bool:
    """Whether a function belongs to a running model."""
    return f.run is not None and f.run.going


def moments_in_run(f: Any, run: Run, X: Rows) -> tuple[Array, Array]:
    """Mean of f(X), (B,) or (P, B), and a root of its covariance, given this run's inducing variables and earlier draws."""
    f, drawn, B = f._at_values(), run.drawn, len(X)
    all_drawn = X if drawn is None else join_rows([drawn.X, X])
    L = joint_root(f.kernel, f.features, f.blocks, all_drawn)[..., -B:, :]
    known = [q.loc for q in f._without_shift()] + ([] if drawn is None else [drawn.noise])
    mean = combine(join(known, -1, event_dim=1), jnp.swapaxes(L[..., :-B], -1, -2))
    return f._per_latent(mean + f._shift_at([as_feature(X)]), event_dim=1), L[..., -B:]


class Joint(dist.MultivariateNormal):
    """f(X) at several inputs, which refuses what is no random key in words."""

    def sample(self, key: PRNGKey | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        return super().sample(check_key(key, "Draws of f.joint(X)"), sample_shape)


class JointInRun(Joint):
    """f(X) in a run of a model, given the run's earlier draws. Its own draws are draws of the run.

    :param f, X: the function and inputs. They are not pytree data: a rebuilt distribution draws outside of the run.
    """

    def __init__(self, f: Any, X: Rows) -> None:
        # The cost of a scaled residual is charged at sites, and there is no site here.
        self._of: tuple[Any, Rows] | None = replace(f, residual_scale=None), X
        mean, L = moments_in_run(f, f.run, X)
        L = L if f.num_latents is None else f._per_latent(L, event_dim=2)
        mean, L = as_seen("see_joint", f, X, (mean, L))
        super().__init__(mean, scale_tril=L)

    def sample(self, key: PRNGKey | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        of = getattr(self, "_of", None)
        if of is None or key is None or not in_run(of[0]):
            return super().sample(key, sample_shape)
        f, X = of
        draws = draw_process(f, X, key_in_run(f.names, key, X), sample_shape)
        return draws if f.num_latents is None else jnp.swapaxes(draws, -1, -2)


def drawn_functions(joint: Any) -> Iterator[tuple[Any, Rows]]:
    """The functions that ``Marginals.joint`` draws, each with its inputs or functionals."""
    return ((f, X) for f, X, _ in drawn_columns(joint))


def drawn_columns(joint: Any, columns: Any = None) -> Iterator[tuple[Any, Rows, tuple[int, ...]]]:
    """As :func:`drawn_functions`, with the outputs of each function; none, if these are all or not known.

    :param columns: the outputs of ``joint`` that count; by default all.
    """
    if not isinstance(joint, Partial | DrawInRun) or joint.func is None:
        return
    if joint.func is draw_process:
        yield (*joint.args, () if columns is None else tuple(map(int, columns)))
    elif joint.func is draw_stacked:
        (marginals,) = joint.args
        for m in marginals if columns is None else [marginals[p] for p in columns]:
            yield from drawn_columns(m.joint)
    elif joint.func is draw_columns:
        picked = np.atleast_1d(joint.args[1])
        yield from drawn_columns(joint.args[0], picked if columns is None else picked[columns])
    elif joint.func in (draw_shifted, draw_scaled):
        yield from drawn_columns(joint.args[0], columns)
    else:  # arithmetic on marginals; functions of patches are not evaluated at the inputs themselves
        yield from drawn_columns(joint.args[0])


def numbers_in(joint: Any) -> Iterator[Any]:
    """What ``Marginals.joint`` takes besides functions: operands of arithmetic, and inputs or functionals."""
    yield from operands_of(joint)
    joint, _ = drawn_from(joint)
    if isinstance(joint, Partial) and joint.func is draw_stacked:
        for m in joint.args[0]:
            yield from numbers_in(m.joint)
    else:
        yield from (X for _, X in drawn_functions(joint))


def _check_joint_draw(B: int, *, fitting: bool = False) -> None:
    """
    :raises ValueError: if there are too many inputs for a Cholesky factor of their covariance.
    """
    least = min(MAX_FITTED_DRAW, MAX_JOINT_DRAW)
    if B <= least:
        return
    fitting = fitting or is_calling(ELBO)  # of other guides
    limit = least if fitting else MAX_JOINT_DRAW
    if B <= limit:
        return
    needs = f"A joint draw at B = {B} inputs needs a B x B Cholesky factor"
    if fitting:
        raise ValueError(
            f"{needs} at each step of a fit; the limit is {limit}. Where each y depends on f at its own row only, draw point by "
            "point: f(X).independent().sample(). Else use minibatches, or fewer inputs (quadrature nodes) for each y."
        )
    raise ValueError(
        f"{needs}; the limit is {limit}. Predict in batches, use the `mean` and `variance` of posterior(...), or draw point by "
        "point: f(X).independent()."
    )
