"""Measurements of the inducing variables of a fitted function: Cholesky factors, and the variance that each set explains.

Pivots are used instead of condition numbers: they say how many points repeat others, and in which set. ``rescue_jitter``, the
function that adds extra jitter to a factor, also measures it here, on the same matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.diagnostics.layout import Trace, functions_at_data, is_marginals
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.projection import conditional_covariance
from numpyro_orthgp.functions.rounding import rounding_of, variance_at
from numpyro_orthgp.inducing import Functional
from numpyro_orthgp.inducing.functional import Concatenated
from numpyro_orthgp.inducing.rows import Rows, as_feature, join_rows, variance_of_rows
from numpyro_orthgp.likelihoods.base import unwrap
from numpyro_orthgp.likelihoods.stacked import Stacked
from numpyro_orthgp.math.blocks import MAX_ENTRIES, map_blocks
from numpyro_orthgp.math.cholesky import rescue_jitter
from numpyro_orthgp.math.kept import run_as_one
from numpyro_orthgp.math.linalg import jitter_scale
from numpyro_orthgp.math.products import diagonal
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["FunctionHealth", "SetHealth", "health_of", "inputs_of", "residual_scales"]

REPEATED = 3  # a variance of fewer times the jitter is next to none


@dataclass(frozen=True)
class SetHealth:
    """One set of inducing variables.

    :param name: its site, ``f.u0``.
    :param num: number of inducing variables M, of each latent function.
    :param divergence: KL[q || prior] in nats, summed over latent functions: zero for a set that does nothing; NaN if the guide has
        no Gaussian of it.
    :param pivots: variance of each variable given all before it, jitter included, relative to the mean of the kernel's diagonal;
        shape (M,) or (P, M). The square roots are the diagonal of the Cholesky factor.
    :param jitter: relative jitter, the default or the one given to :func:`~numpyro_orthgp.gp`.
    :param rescue: jitter that the factor needed beyond it, often zero.
    :param explained: share of the prior variance at the data that the set explains, mean over points; NaN without inputs.
    """

    name: str
    num: int
    divergence: float
    pivots: np.ndarray
    jitter: float
    rescue: float
    explained: float

    @property
    def repeats(self) -> int:
        """Number of variables that those before them determine, up to the jitter; with several functions, the largest number."""
        return int((self.pivots < REPEATED * (self.jitter + self.rescue)).sum(-1).max())


@dataclass(frozen=True)
class FunctionHealth:
    """A function and its sets.

    :param sets: in their order.
    :param residual: share of the prior variance that no set explains, at each input where a likelihood uses the function, shape
        (N,) or (N, P); ``None`` if there are none.
    :param num_mean_only: number of mean-only points, often zero.
    :param moved: share of the mean that comes from mean-only points: its standard deviation over the inputs, relative to that of
        the whole mean; NaN without inputs.
    :param num_distinct: number of distinct inputs; ``None`` without inputs.
    :param rounding: the largest relative error of the standard deviation at an input that is rounding
        (``functions/rounding.py``), roughly; NaN without inputs, or if q is a draw.
    :param mean: of the function at the inputs, on average, shape () or (P,); NaN without inputs.
    :param sd: root of the average posterior variance there, of that shape.
    :param dtype: of the function.
    """

    sets: tuple[SetHealth, ...]
    residual: np.ndarray | None
    num_mean_only: int
    moved: float
    num_distinct: int | None = None
    rounding: float = np.nan
    mean: ArrayLike = np.nan
    sd: ArrayLike = np.nan
    dtype: str = ""

    @property
    def worst(self) -> int:
        """The input with the largest share of residual variance."""
        assert self.residual is not None
        return int(np.argmax(self.residual.reshape(len(self.residual), -1).max(-1)))

    @property
    def offset(self) -> tuple[float, float]:
        """How far functions are from the mean of their prior, of the one furthest from it: as it is, and relative to ``sd``."""
        far = np.abs(np.ravel(self.mean)).astype(float)
        relative = far / np.maximum(np.ravel(self.sd), np.finfo(np.float32).tiny)
        i = int(np.argmax(relative))
        return float(far[i]), float(relative[i])


def health_of(name: str, f: GPFunction, X: Rows | None) -> FunctionHealth:
    """Measure one function.

    :param name: name of its gp.
    :param f: the function, with the Gaussians of a guide.
    :param X: inputs, shape (N, D); ``None`` if they are not known.
    """
    factors = run_as_one(_factors, f)
    unknown = None, np.nan, np.nan, np.nan, np.nan
    shares, moved, rounding, mean, sd = unknown if X is None else jax.device_get(run_as_one(_shares, f, X))
    sets = tuple(
        SetHealth(
            f"{name}.u{i}",
            s.num,
            float(divergence),
            np.asarray(pivots),
            float(np.max(jitter)),
            float(np.max(rescue)),
            np.nan if shares is None else float(shares[:, i].mean()),
        )
        for i, (s, (divergence, pivots, jitter, rescue)) in enumerate(zip(f.features, factors, strict=True))
    )
    residual = None if shares is None else np.maximum(1 - shares.sum(1), 0)
    num_distinct = None if X is None else len(X) if isinstance(X, Functional) else len(np.unique(np.asarray(X), axis=0))
    num_mean_only = 0 if f.shift is None else f.shift.points.shape[-2]
    dtype = f.features[0].dtype.name
    digits = float(np.max(rounding)), mean, sd, dtype
    return FunctionHealth(sets, residual, num_mean_only, float(moved), num_distinct, *digits)


def inputs_of(sites: Trace, functions: dict[str, GPFunction], rng_key: PRNGKey) -> dict[str, Rows]:
    """By name of the gp, the inputs at which outputs depend on it, shape (N, D), or the functionals of it."""
    found: dict[str, list[Rows]] = {}
    for _, _, f, X, _ in functions_at_data(sites, functions, rng_key):
        for name, g in functions.items():
            if g is f:
                found.setdefault(name, []).append(X)
    return {name: join_rows(parts) for name, parts in found.items()}


def residual_scales(subject: Subject) -> dict[str, np.ndarray]:
    """v of a tightened bound, by name of the output if each point has its own v, otherwise by name of the gp."""

    layout = subject.layout

    def collect(sites: Trace, functions: dict[str, GPFunction]) -> dict[str, Array]:
        outputs = {o.name: unwrap(sites[o.site]["fn"])[0] for o in layout.outputs}
        closed = {name: v for name, fn in outputs.items() if (v := _scales_of_points(fn)) is not None}
        sources = {name: layout.sources[name] | _named(fn, functions) for name, fn in outputs.items()}
        # Where v has a closed form, the learned v is not used. If nothing else uses the function, it stays at its start.
        others = {f for name in outputs if name not in closed for f in sources[name]}
        idle = {f for name in closed for f in sources[name]} - others
        return closed | {
            n: f.residual_scale for n, f in functions.items() if f.residual_scale is not None and n not in idle
        }

    return {name: np.asarray(v) for name, v in subject.measure(collect).items()}


def _scales_of_points(fn: Any) -> Array | None:
    """v of each point, if the likelihood has a closed form of it."""
    if isinstance(fn, Stacked):
        closed = getattr(fn.steps, "closed_form", False)
        return jax.vmap(lambda step: step.residual_scale)(fn.steps) if closed else None
    return fn.residual_scale if getattr(fn, "closed_form", False) else None


def _named(fn: Any, functions: Mapping[str, GPFunction]) -> set[str]:
    """Functions beneath a likelihood. Found also if marginals have lost their source, as in ``scan`` and with several particles."""
    beneath = [m.names for m in jax.tree.leaves(fn, is_leaf=is_marginals) if is_marginals(m)]
    prefixes = {names.prefix for names in beneath if names is not None}
    return {name for name, f in functions.items() if f.names is not None and f.names.prefix in prefixes}


def _factors(f: GPFunction) -> list[tuple[Array, Array, Array, Array]]:
    """For each set divergence, pivots, jitter and rescue jitter; the last three are relative to the kernel's diagonal."""
    found = []
    for s, block, q in zip(f.features, f.blocks, f.beliefs, strict=True):
        K = s.covariance(f.kernel, s)
        scale = jitter_scale(diagonal(K))
        C = conditional_covariance(K, block.before, block.jitter)
        pivots = 1 / (diagonal(block.whitener) ** 2 * scale[..., None])
        # NaN stands for a set without a Gaussian; that of one with NaN or infinity among its parameters is infinite.
        divergence = (
            jnp.asarray(jnp.nan) if q.is_value else jnp.nan_to_num(q.kl_from_prior(), nan=jnp.inf, posinf=jnp.inf)
        )
        found.append((divergence, pivots, block.jitter.max(-1) / scale, rescue_jitter(C, scale)))
    return found


def _block_size(f: GPFunction, X: Rows) -> int:
    return max(MAX_ENTRIES // (f.num_inducing * (X.width if isinstance(X, Functional) else 1)), 1)


def _shares(f: GPFunction, X: Rows) -> tuple[Array, ...]:
    """Share of the prior variance that each set explains, shape (N, K) or (N, K, P), the mean-only share of the mean, what rounding
    is of standard deviations, shape (N,) or (N, P), and ``mean`` and ``sd`` of :class:`FunctionHealth`."""

    def at(X: Rows) -> tuple[Array, ...]:
        A = f.project(X)
        prior = variance_of_rows(f.kernel, X)
        # Where the prior has no variance, there is nothing left to explain.
        parts = [jnp.where(prior > 0, jnp.sum(Ai**2, -2) / prior, float(i == 0)) for i, Ai in enumerate(A)]
        shares = jnp.stack(parts, -2)
        mean, own = f.mean_from([as_feature(X)], A), replace(f, shift=None).mean_from([as_feature(X)], A)
        shares = jnp.moveaxis(shares, -1, 0).swapaxes(1, -1)
        return shares, mean.T, (mean - own).T, rounding_of(f, X, A).T, variance_at(f, prior, A).T

    parts = X.parts if isinstance(X, Concatenated) else (X,)
    done = [map_blocks(at, part, _block_size(f, part)) for part in parts]
    shares, mean, moved, rounding, variance = (jnp.concatenate(of_parts) for of_parts in zip(*done, strict=True))
    of_mean_only = jnp.std(moved) / jnp.maximum(jnp.std(mean), jnp.finfo(mean.dtype).tiny)
    return shares, of_mean_only, rounding, mean.mean(0), jnp.sqrt(variance.mean(0))
