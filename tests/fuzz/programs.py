"""A program: a model, its guide and parameters, as choices. They are printed as Python of a few lines, which is what is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.fuzz import covariances
from tests.fuzz.covariances import Hyper, listed
from tests.fuzz.functionals import see
from tests.fuzz.outcomes import OUTCOMES
from tests.fuzz.views import Seen, View

Rows = tuple[Any, ...]  # an array as nested tuples of numbers with two decimals


@dataclass(frozen=True)
class GP:
    """A ``gp`` statement and what the guide says of it.

    :param tree: its kernel, see :mod:`tests.fuzz.covariances`.
    :param sets: inducing points of each set, (M, D) or (P, M, D).
    :param mean_only: points of a last set :class:`MeanOnly`.
    :param num_latents: P, or ``None``; ``told`` if it is written, and not left to leading axes.
    :param learned: whether points are parameters.
    """

    name: str
    tree: tuple[Any, ...]
    sets: tuple[Rows, ...]
    mean_only: Rows | None
    num_latents: int | None
    told: bool
    learned: bool
    jitter: float | None
    covariances: tuple[str, ...]
    residual: str

    @property
    def latents(self) -> int:
        return self.num_latents or 1

    def hypers(self) -> list[Hyper]:
        return covariances.hypers(self.tree)


@dataclass(frozen=True)
class Site:
    """A ``sample`` statement with ``obs``.

    :param outcome: a name of :data:`tests.fuzz.outcomes.OUTCOMES`.
    :param numbers: its numbers; a tuple of N is one of each row.
    :param how: "ours", "general" (``Likelihood``) or "plain" (a NumPyro distribution of a draw).
    :param mask: of each row, or ``None``; ``masked_by`` "handler", "distribution" or "obs_mask".
    :param inside: whether functions are called inside of the plate.
    """

    name: str
    view: View
    outcome: str
    numbers: tuple[tuple[str, Any], ...]
    how: str
    y: Rows
    mask: tuple[bool, ...] | None
    masked_by: str
    inside: bool = False


@dataclass(frozen=True)
class Program:
    """Everything that a seed decides.

    :param plate: "rows" (a plate), "event" (none), "more" (one of ``total`` rows, of which these are a minibatch) or "scale" (a
        handler that weighs them as ``total`` rows).
    :param guide: "auto", "sampled" (``analytic=False``), "natural", "hand" or "normal" (NumPyro's ``AutoNormal``).
    """

    seed: int
    dtype: str
    X: Rows
    gps: tuple[GP, ...]
    sites: tuple[Site, ...]
    plate: str
    total: int
    guide: str
    params: tuple[tuple[str, Any], ...]

    @property
    def num(self) -> int:
        return len(self.X)

    def gp(self, name: str) -> GP:
        return next(g for g in self.gps if g.name == name)

    def values(self) -> dict[str, np.ndarray]:
        return {name: np.array(value, float) for name, value in self.params}

    def sees(self, site: Site) -> Seen:
        return see(site.view, np.array(self.X, float), {g.name: g.num_latents for g in self.gps})

    def source(self) -> str:
        """The program as it is run."""
        return source(self)

    @property
    def scale(self) -> float:
        """What data terms are weighed with."""
        return self.total / self.num

    @property
    def random(self) -> bool:
        """Whether the loss is an estimate from draws."""
        drawn = any(c.drawn for site in self.sites for c in self.sees(site).calls)
        drawn = drawn or any(site.outcome == "categorical" or OUTCOMES[site.outcome].random for site in self.sites)
        # `Likelihood` of more than two functions integrates by random points.
        return drawn or self.guide in ("sampled", "normal") or any(g.latents > 2 for g in self.gps)


HEADER = """\
import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
import numpyro_orthgp as ogp
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro_orthgp import kernels, likelihoods

jax.config.update("jax_enable_x64", True)
A = lambda values: np.array(values, np.{dtype})
"""
AS_FUNCTION = """\
as_function = lambda k: lambda X1, X2=None: k(X1) if X2 is None else k(X1, X2)
"""


def source(program: Program) -> str:
    """The program as it is run."""
    lines = [HEADER.format(dtype=program.dtype)]
    if any("function" in covariances.names(g.tree) for g in program.gps):
        lines.append(AS_FUNCTION)
    lines.append(f"X = A({listed(program.X)})")
    for site in program.sites:
        lines += [f"{name} = A({listed(value)})" for name, value in site.view.arrays]
        lines += [f"{site.name}_{n} = A({listed(v)})" for n, v in site.numbers if per_row(program, v)]
        lines.append(f"{site.name} = A({listed(site.y)})")
        if site.mask is not None:
            lines.append(f"{site.name}_mask = np.array({list(site.mask)})")
    for g in program.gps:
        lines += [f"{name} = A({listed(Z)})" for name, Z in points_of(g).items()]
    lines += ["", f"def model(rows=np.arange({program.num})):"]
    for g in program.gps:
        lines += ["    " + line for line in declare(g)]
    for site in program.sites:
        lines += ["    " + line for line in observe(program, site)]
    lines += ["", *guide(program), f"params = {{{', '.join(f'{n!r}: A({listed(v)})' for n, v in program.params)}}}"]
    return "\n".join(lines) + "\n"


def per_row(program: Program, value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == program.num


def points_of(g: GP) -> dict[str, Rows]:
    """Names of a gp's sets of points."""
    named = {f"{g.name}_Z{i}": Z for i, Z in enumerate(g.sets)}
    return named | ({} if g.mean_only is None else {f"{g.name}_H": g.mean_only})


def declare(g: GP) -> list[str]:
    lines = []
    for h in g.hypers():
        if h.how == "param":
            lines.append(f'{h.name} = numpyro.param("{h.name}", A({listed(h.start)}))')
        else:
            shape = np.shape(h.start)
            more = f".expand({list(shape)}).to_event({len(shape)})" if shape else ""
            lines.append(f'{h.name} = numpyro.sample("{h.name}", dist.LogNormal(A(0.0), A(0.7)){more})')
    named = list(points_of(g))
    if g.learned:
        named = [f'numpyro.param("{name}", {name})' for name in named]
    if g.mean_only is not None:
        named[-1] = f"ogp.MeanOnly({named[-1]})"
    inducing = named[0] if len(named) == 1 else "[" + ", ".join(named) + "]"
    options = f", num_latents={g.num_latents}" if g.told else ""
    options += f", jitter={g.jitter}" if g.jitter is not None else ""
    return [*lines, f'{g.name} = ogp.gp("{g.name}", {covariances.code(g.tree)}, {inducing}{options})']


def observe(program: Program, site: Site) -> list[str]:
    """The statements of one observed site."""
    seen, outcome = program.sees(site), OUTCOMES[site.outcome]
    numbers = {n: f"{site.name}_{n}[rows]" if per_row(program, v) else show(v) for n, v in site.numbers}
    lines = [*seen.lines, f"eta = {seen.expression}"]
    if site.how == "general":
        fn = f"likelihoods.Likelihood(eta, lambda f: {outcome.plain.format(f='f', **numbers)})"
    else:
        fn = (outcome.ours if site.how == "ours" else outcome.plain).format(f="eta", **numbers)
    events = len(seen.shape) - (outcome.columns > 1) - (program.plate in ("rows", "more"))
    if site.mask is not None and site.masked_by == "distribution":
        column = "[:, None]" if len(seen.shape) - (outcome.columns > 1) == 2 else ""
        fn += f".mask({site.name}_mask[rows]{column})"
    if events:
        fn += f".to_event({events})"
    mask = f", obs_mask={site.name}_mask[rows]" if site.mask is not None and site.masked_by == "obs_mask" else ""
    around = []
    if program.plate == "scale":
        around.append(f"numpyro.handlers.scale(scale={program.scale!r})")
    if site.mask is not None and site.masked_by == "handler":
        around.append(f"numpyro.handlers.mask(mask={site.name}_mask[rows])")
    labels = ".astype(int)" if site.outcome == "categorical" else ""
    statement = f'numpyro.sample("{site.name}", {fn}, obs={site.name}[rows]{labels}{mask})'
    observed = [f"with {', '.join(around)}:", f"    {statement}"] if around else [statement]
    if program.plate not in ("rows", "more"):
        return [*lines, *observed]
    plate = f'with numpyro.plate("rows_{site.name}", {program.total}, subsample_size=len(rows)):'
    within = [*lines, *observed] if site.inside else observed
    return [*([] if site.inside else lines), plate, *("    " + line for line in within)]


def show(value: Any) -> str:
    return listed(value) if isinstance(value, tuple) else repr(value)


def guide(program: Program) -> list[str]:
    if program.guide == "normal":
        return ["guide = AutoNormal(model)"]
    if program.guide == "hand":
        lines = [
            f'    ogp.gp_posterior("{g.name}", {[np.shape(Z)[-2] for Z in g.sets]}, covariance={list(g.covariances)}, '
            f"residual={g.residual!r}, num_latents={g.num_latents}, dtype=np.{program.dtype})"
            for g in program.gps
        ]
        return [f"def guide(rows=np.arange({program.num})):", *lines]
    covariance = {g.name: g.covariances[0] if len(g.covariances) == 1 else list(g.covariances) for g in program.gps}
    residual = {g.name: g.residual for g in program.gps}
    more = {"sampled": ", analytic=False", "natural": ", natural=True"}.get(program.guide, "")
    return [f"guide = ogp.AutoSparseGP(model, covariance={covariance}, residual={residual}{more})"]
