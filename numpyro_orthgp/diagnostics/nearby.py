"""What nearby rows would add to the inducing points: in groups to the bound, as neighbours to predictions.

Both are measured on the fit, for Gaussian noise about one function. Groups: the cost of the residual in groups
(``functions/groups.py``) minus that of single rows, at the same parameters. Neighbours: rows are left out of the data, and
predicted from the others by f alone and by :func:`~numpyro_orthgp.with_neighbors`. q has seen these rows in both cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.diagnostics.layout import Layout, Trace
from numpyro_orthgp.diagnostics.sites import mask_of
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.functions.draws import draw_process
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.groups import charges
from numpyro_orthgp.functions.latent_inputs import LatentInputs
from numpyro_orthgp.functions.neighbors import with_neighbors
from numpyro_orthgp.guides.posterior import functions_of
from numpyro_orthgp.inducing import Functional
from numpyro_orthgp.init import groups as near_groups
from numpyro_orthgp.likelihoods import Gaussian
from numpyro_orthgp.likelihoods.base import unwrap
from numpyro_orthgp.math.grouped import Grouping
from numpyro_orthgp.math.kept import run_as_one
from numpyro_orthgp.types import Array

__all__ = ["GROUP_SIZE", "NEIGHBORS", "Nearby", "nearby_gains", "regressions"]

GROUP_SIZE, NEIGHBORS = 16, 32
MAX_LEFT_OUT = 500  # rows that are predicted
MAX_GROUPED = 16_384  # rows whose charge is looked at, whole groups taken at random
MAX_DATA = 100_000  # rows among which neighbours are looked for


@dataclass(frozen=True)
class Nearby:
    """What nearby rows would add, in nats per row.

    :param groups: gain of the tightened bound by ``group_size=16``; ``None`` for a fit that has groups.
    :param neighbors: gain of the log predictive density by :func:`~numpyro_orthgp.with_neighbors` of 32 rows.
    :param num: number of rows that were left out and predicted.
    """

    groups: float | None
    neighbors: float
    num: int


def nearby_gains(subject: Subject) -> dict[str, Nearby]:
    """By name of the output, for outputs without a mask that are one function at their rows plus Gaussian noise."""
    names: list[str] = []

    def collect(sites: Trace, fitting: dict[str, GPFunction]) -> list[tuple[Any, ...]]:
        functions = functions_of(sites, fitting)
        functions |= {name: replace(functions[name], grouping=f.grouping) for name, f in fitting.items()}
        found = list(regressions(subject.layout, sites, functions))
        names[:] = [name for name, *_ in found]
        return [tuple(rest) for _, *rest in found]

    found = subject.measure(collect)
    return {name: _gains(*rest) for name, rest in zip(names, found, strict=True)}


def regressions(
    layout: Layout, sites: dict[str, Any], functions: dict[str, GPFunction]
) -> Iterator[tuple[str, GPFunction, Array, Array, Array]]:
    """Name, function, inputs, outputs and the noise's standard deviation, shape of the outputs."""
    for output in layout.outputs:
        fn, y = sites[output.site]["fn"], sites[output.site]["value"]
        if mask_of(fn) is not None:
            continue
        inner = unwrap(fn)[0]
        if isinstance(inner, CollapsedGP):
            f = functions.get(output.name)
            plain = y.ndim == 1 and inner.observed is None and not isinstance(inner.X, LatentInputs)
            if f is not None and plain and f.num_latents is None:
                loc, noise = (a[:, 0] if jnp.ndim(a) == 2 else a for a in (inner.loc, inner.noise_scale))
                noise = jnp.broadcast_to(noise, y.shape)
                f = replace(f, grouping=None if inner.group_size is None else Grouping(inner.group_size))
                yield output.name, f, jnp.asarray(inner.X), y - loc, noise
        elif isinstance(inner, Gaussian) and getattr(inner.marginals.joint, "func", None) is draw_process:
            seen, X = inner.marginals.joint.args  # f itself: no arithmetic
            same = [f for f in functions.values() if f.names is not None and f.names == seen.names]
            if same and not isinstance(X, Functional):
                yield output.name, same[0], X, y, jnp.broadcast_to(inner.scale, y.shape)


def _gains(f: GPFunction, X: Array, y: Array, noise: Array) -> Nearby:
    has_groups, f = f.grouping is not None, replace(f, residual_scale=None, grouping=None)
    generator = np.random.default_rng(0)
    order = generator.permutation(len(X))[:MAX_DATA]
    num = min(MAX_LEFT_OUT, len(order) // 5)
    out, kept = order[:num], order[num:]
    data = tuple(map(np.asarray, (X, y, noise)))
    left_out = [tuple(a[rows] for a in data) for rows in (kept, out)] if num and len(kept) > NEIGHBORS else None
    rows = None if has_groups else _rows_in_groups(X, generator)
    grouped = None if rows is None else (data[0][rows], data[2][rows])
    # One program: what it computes is small, and most of the time of a first call would go into compiling its parts.
    neighbors, groups = run_as_one(_differences, f, left_out, grouped)
    return Nearby(None if has_groups else float(groups), float(neighbors), num)


def _rows_in_groups(X: Array, generator: np.random.Generator) -> np.ndarray | None:
    """Groups of near rows, one after the other; ``None`` if there are fewer rows than a group has."""
    rows = np.asarray(near_groups(X, GROUP_SIZE))
    rows = rows[: len(rows) // GROUP_SIZE * GROUP_SIZE].reshape(-1, GROUP_SIZE)
    return rows[generator.permutation(len(rows))[: MAX_GROUPED // GROUP_SIZE]].ravel() if len(rows) else None


def _differences(
    f: GPFunction, left_out: list[tuple[Array, Array, Array]] | None, grouped: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """The gains by neighbours and by groups, in nats per row; zero for what is not given."""
    neighbors = groups = jnp.zeros(())
    if left_out is not None:
        (X, y, noise), (X_out, y_out, noise_out) = left_out
        near = with_neighbors(f, X, y, noise, num_neighbors=NEIGHBORS)
        density = [Gaussian(g(X_out), noise_out).log_predictive(y_out) for g in (near, f)]
        neighbors = jnp.mean(density[0] - density[1])
    if grouped is not None:
        X, noise = grouped
        m = replace(f, grouping=Grouping(GROUP_SIZE))(X)
        assert m.groups is not None
        single, together = jnp.log1p(m.residual / noise**2), charges(m.groups, m.residual.T, noise.T)
        groups = (single.sum() - together.sum()) / (2 * len(X))
    return neighbors, groups
