"""The result of :func:`check`, and the page that it prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from numpyro_orthgp.diagnostics.advice import advise
from numpyro_orthgp.diagnostics.calibration import LEVELS, Calibration
from numpyro_orthgp.diagnostics.comparison import CHAINS, Comparison, Moments
from numpyro_orthgp.diagnostics.convergence import Convergence
from numpyro_orthgp.diagnostics.formulas import advice_on_formulas
from numpyro_orthgp.diagnostics.health import FunctionHealth
from numpyro_orthgp.diagnostics.hierarchy import Point, Starts, advice_on_points, advice_on_starts
from numpyro_orthgp.diagnostics.importance import ParetoK
from numpyro_orthgp.diagnostics.integration import IntegrationError
from numpyro_orthgp.diagnostics.means_alone import advice_on_means_alone
from numpyro_orthgp.diagnostics.nearby import GROUP_SIZE, NEIGHBORS, Nearby
from numpyro_orthgp.diagnostics.outputs import OutputFit
from numpyro_orthgp.diagnostics.plugged import advice_on_own_draws, advice_on_plugged
from numpyro_orthgp.diagnostics.samples import words_of_sample
from numpyro_orthgp.diagnostics.scales import Scales
from numpyro_orthgp.diagnostics.unsettled import Unsettled, advice_on_unsettled
from numpyro_orthgp.diagnostics.words import percent, table
from numpyro_orthgp.functions.expected import REMEDY, TOO_MUCH, words_of_nodes
from numpyro_orthgp.guides.own_draws import TwoWays

__all__ = ["Report"]

WIDTH = 96  # columns that a page of the documentation, or a terminal beside an editor, has room for


@dataclass(frozen=True)
class Report:
    """The result of :func:`~numpyro_orthgp.check`; ``print`` it.

    :param functions: sets and residuals, by name of the gp, or of the site of a :class:`~numpyro_orthgp.CollapsedGP`.
    :param residual_scales: v of the tightened bound, by name of the gp (one number, or one for each function), or by name of the
        output if each point has its own v.
    :param khat: Pareto k-hat of the guide's importance weights; a string says why there is none.
    :param convergence: trend of the loss; ``None`` if no losses were given.
    :param held_out: predictions of held-out data, by name of the output.
    :param nuts: the guide compared with NUTS; ``None`` if NUTS was not run.
    :param collapsed: names of outputs that are a :class:`~numpyro_orthgp.CollapsedGP`, which has no held-out data.
    :param coarse: sentences about arguments of the model, and inputs of functions, whose dtype is too coarse for their spacing.
    :param integration: error of Gauss-Hermite nodes, by name of the output, for outputs that use them.
    :param nearby: what nearby rows would add, by name of the output, for outputs with one function and Gaussian noise.
    :param samples: number of rows used and number of rows in all, by name of the plate, for plates that hold a sample.
    :param points: latent sites that are point estimates in the guide and may be random effects.
    :param starts: final losses of fits from other starts; ``None`` if they were not given.
    :param outputs: distances of the fitted outputs from their predictions, by name.
    :param scales: inputs compared with lengthscales, by name of the function, for 20 rows or more and 50 columns or fewer.
    :param plugged: gps whose mean or variance a site takes as numbers, by name of the site.
    :param own_draws: sites that take a function in two ways that are independent of each other, such as marginals and draws.
    :param unsettled: how far q is from its optimum, by name of the gp, for gps that take natural steps.
    :param averaging: what nodes over uncertain inputs miss, in units of the prior's standard deviation, by name of the output, for
        kernels whose averages have no closed form.
    :param means_alone: gps whose mean given the inducing variables a site takes without the covariance, by name of the site, each
        with the largest share of the prior variance that the inducing variables leave, if that is known.
    :param unpaid: in words, what the loss lacks of the cost of tightened residuals, under a guide by hand.
    :param formulas: by how many nats per point the formula of a user's likelihood is above E[log p(y | f)] of the distribution that
        its ``conditional`` gives, by name of the output, where it differs.
    """

    functions: Mapping[str, FunctionHealth]
    residual_scales: Mapping[str, np.ndarray]
    khat: ParetoK | str
    convergence: Convergence | None
    held_out: Mapping[str, Calibration]
    nuts: Comparison | None
    collapsed: tuple[str, ...] = ()
    coarse: tuple[str, ...] = ()
    integration: Mapping[str, IntegrationError] = field(default_factory=dict)
    nearby: Mapping[str, Nearby] = field(default_factory=dict)
    samples: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    starts: Starts | None = None
    outputs: Mapping[str, OutputFit] = field(default_factory=dict)
    scales: Mapping[str, Scales] = field(default_factory=dict)
    plugged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    own_draws: tuple[TwoWays, ...] = ()
    unsettled: Mapping[str, Unsettled] = field(default_factory=dict)
    averaging: Mapping[str, float] = field(default_factory=dict)
    means_alone: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unpaid: str | None = None
    formulas: Mapping[str, float] = field(default_factory=dict)

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice, most urgent first; empty if no problem was found."""
        points = advice_on_points(self.points, self.nuts is not None)
        no_bound = (
            *advice_on_plugged(self.plugged),
            *advice_on_means_alone(self.means_alone),
            *advice_on_own_draws(self.own_draws),
        )
        no_bound += (*(() if self.unpaid is None else (self.unpaid,)), *advice_on_formulas(self.formulas))
        averages = (f"{words_of_nodes(n, e)} {REMEDY}" for n, e in self.averaging.items() if e > TOO_MUCH)
        own = (*no_bound, *advice_on_unsettled(self.unsettled), *averages, *points, *advice_on_starts(self.starts))
        return own + tuple(
            advise(
                self.functions,
                self.residual_scales,
                self.khat,
                self.convergence,
                self.held_out,
                self.nuts,
                self.collapsed,
                self.coarse,
                self.integration,
                self.nearby,
                self.outputs,
                self.scales,
            )
        )

    def __str__(self) -> str:
        sections = [_function(name, health) for name, health in self.functions.items()]
        if self.samples:
            sections.insert(0, [words_of_sample(*sample) for sample in self.samples.items()])
        sections.append(list(self._fit()))
        sections += [_held_out(name, calibration) for name, calibration in self.held_out.items()]
        if self.nuts is not None:
            sections.append(_nuts(self.nuts))
        advice = [_bullet(line) for line in self.advice] or [f"  no problem was found{self._unseen()}"]
        sections.append(["What to do", *advice])
        return "\n\n".join("\n".join(map(_fold, section)) for section in sections)

    def _unseen(self) -> str:
        """What nothing on the page has looked at, if that is the guide itself."""
        if not isinstance(self.khat, str) or self.nuts is not None:
            return ""
        return " in what was measured; nothing here compares the guide with the posterior (nuts=200 does)"

    def _fit(self) -> Iterator[str]:
        if self.convergence is not None:
            yield str(self.convergence)
        if self.starts is not None:
            yield str(self.starts)
        for name, output in self.outputs.items():
            yield f"{name}: {output}"
        for name, v in self.residual_scales.items():
            spread = f"{v.item():.3g}" if v.size == 1 else f"median {np.median(v):.3g}, {v.min():.3g} to {v.max():.3g}"
            yield f"v of the tightened bound, {name}: {spread}"
        for name, found in self.integration.items():
            yield (
                f"quadrature error of {name}, {found.num_points} nodes: {found.mean:+.1g} nats per point (largest "
                f"{found.most:.1g})"
            )
        for name, above in self.formulas.items():
            where = "above" if above > 0 else "below"
            yield f"formula of {name}: {abs(above):.2g} nats per point {where} the expectation of its density"
        for name, missed in self.averaging.items():
            yield f"nodes over uncertain inputs of {name} miss {missed:.1g} of the prior's standard deviation"
        for name, gain in self.nearby.items():
            groups = "the fit has groups, "
            if gain.groups is not None:
                groups = f"groups of {GROUP_SIZE} would add {gain.groups:.2g} to the bound, "
            yield (
                f"nearby rows of {name}, nats per row: {groups}the {NEIGHBORS} nearest {gain.neighbors:.2g} to the log density of "
                f"{gain.num} rows"
            )
        yield str(self.khat) if isinstance(self.khat, ParetoK) else f"k-hat: none. {self.khat}"
        if self.collapsed:
            yield f"held-out data: not checked; predict them from {self.collapsed[0]}, CollapsedGP(...).posterior(y)(X_test)"
        elif not self.held_out:
            yield "held-out data: not checked; pass held_out=(X_test, y_test)"
        if self.nuts is None:
            yield "NUTS: not run; for few data pass nuts=200"


def _function(name: str, health: FunctionHealth) -> list[str]:
    rows = [["set", "points", "KL (nats)", "explains", "least pivot", "repeats", "jitter"]]
    for s in health.sets:
        jitter = f"{s.jitter:.0e}" + (f" + {s.rescue:.0e}" if s.rescue > 0 else "")
        cells = [
            s.name,
            str(s.num),
            "-" if np.isnan(s.divergence) else f"{s.divergence:.3g}",
            percent(s.explained),
            f"{s.pivots.min():.1e}",
            str(s.repeats),
        ]
        rows.append([*cells, jitter])
    if health.num_mean_only:
        moved = "" if np.isnan(health.moved) else f"{percent(health.moved)} of the mean"
        rows.append([f"{name}.u{len(health.sets)}", str(health.num_mean_only), "", moved, "", "", "mean only"])
    lines = [name, *table(rows)]
    if drawn := [s.name for s in health.sets if np.isnan(s.divergence)]:
        lines.append(
            f"  {', '.join(drawn)}: the guide gives one draw, not a Gaussian; posterior(...) uses this draw, so its variance lacks "
            "that of the guide"
        )
    if health.residual is None:
        return [*lines, "  inputs: unknown, because no likelihood of this package uses the function itself"]
    share = health.residual
    distinct = "" if health.num_distinct in (None, len(share)) else f" ({health.num_distinct} distinct)"
    return [
        *lines,
        f"  unexplained share of the prior variance at {len(share)} inputs{distinct}: median {percent(np.median(share))}, 95th "
        f"percentile {percent(np.quantile(share, 0.95))}, largest {percent(share.max())} (input {health.worst})",
    ]


def _held_out(name: str, calibration: Calibration) -> list[str]:
    density = calibration.log_density
    error = density.std(ddof=1) / np.sqrt(len(density)) if len(density) > 1 else np.nan
    lines = [f"held out, {len(density)} of {name}: mean log density {density.mean():.4g} (standard error {error:.2g})"]
    if calibration.pit is None:
        return [*lines, "  classes have no order, so there are no intervals"]
    rows = [["interval", *(percent(level) for level in LEVELS)]]
    rows.append(["holds", *(percent(calibration.coverage(level)) for level in LEVELS)])
    rows.append(["standard error", *(percent(calibration.standard_error(level)) for level in LEVELS)])
    return lines + table(rows)


def _nuts(nuts: Comparison) -> list[str]:
    lines = [
        f"NUTS, {CHAINS} chains of {nuts.num_samples} draws: largest R-hat {nuts.rhat:.3f}, smallest effective sample size "
        f"{nuts.ess:.0f}, {nuts.divergences} divergent"
    ]
    rows = [["site", "q", "NUTS"]]
    for name, m in nuts.sites.items():
        for index in np.ndindex(m.loc.shape):
            label = name + "".join(f"[{i}]" for i in index)
            rows.append([label, _moments(m.loc_q[index], m.scale_q[index]), _moments(m.loc[index], m.scale[index])])
    return lines + (table(rows) if len(rows) > 1 else []) + [_function_line(n, m) for n, m in nuts.functions.items()]


def _function_line(name: str, m: Moments) -> str:
    return (
        f"  {name} at {len(m.loc)} inputs: means differ by {np.median(m.shift):.2f} standard deviations (median; largest "
        f"{m.shift.max():.2f}), standard deviations of q are {np.median(m.ratio):.2f} times those of NUTS ({m.ratio.min():.2f} to "
        f"{m.ratio.max():.2f})"
    )


def _moments(loc: np.ndarray, scale: np.ndarray) -> str:
    return f"{loc:.3g} ± {scale:.2g}"


def _bullet(line: str) -> str:
    return _fill(line, "  * ", "    ")


def _fold(line: str) -> str:
    """A sentence on lines of ``WIDTH`` columns. Rows of tables, which have runs of spaces, stay in one piece."""
    if len(line) <= WIDTH or "\n" in line or "  " in line.strip():
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    return _fill(line.lstrip(), indent, f"{indent}  ")


def _fill(line: str, first: str, later: str) -> str:
    page = textwrap.TextWrapper(
        WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False, break_long_words=False
    )
    return page.fill(line)
