"""Sentences on fitted outputs: what they are, how far predictions are from them, and the likely cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from numpyro_orthgp.diagnostics.health import FunctionHealth
from numpyro_orthgp.diagnostics.outputs import LEAST, OutputFit
from numpyro_orthgp.diagnostics.scales import ALONE, SAME, Scales, words_of_level
from numpyro_orthgp.diagnostics.words import percent

__all__ = ["advice_on_outputs"]

TWICE = 0.05  # share of rows
BEYOND = 5.0  # standard deviations of noise between outputs and predictions, or of outputs in one of noise
LARGE = 10.0  # outputs that are not of about one
FEW = 10  # of the rarer label
REACHED = 0.05  # share of predictions of counts that reach below zero


def advice_on_outputs(
    outputs: Mapping[str, OutputFit], functions: Mapping[str, FunctionHealth], scales: Mapping[str, Scales]
) -> Iterator[str]:
    """Sentences."""
    for name, fit in outputs.items():
        if not fit.sd:
            yield (
                f"All {fit.num} outputs {name} are {fit.mean:.6g}. They say how large f is, and nothing about how it varies. Is "
                "this the column that was meant?"
            )
        if (words := _on_scale(name, fit)) is not None:
            yield words
        elif fit.says_nothing:
            yield _on_nothing(name, fit, functions, scales)
    for name, s in scales.items():
        known = any(name in fit.functions and fit.says_nothing for fit in outputs.values())
        if s.nearest < ALONE and name in functions and not known:
            yield f"{_alone(name, s)} {LONGER}"
    for name, fit in outputs.items():
        if fit.num_repeated > TWICE * fit.num:
            yield (
                f"{fit.num_repeated} of {fit.num} rows repeat an earlier one, in the inputs and in {name}. They count as new "
                "evidence, so noise and intervals become too small, and copies of held-out rows may have been fitted. Unless they "
                "are new measurements, drop them (np.unique(rows, axis=0)) before you hold out data."
            )
        if fit.overdispersed:
            yield (
                f"Counts {name} are further from their means than Poisson counts: {fit.dispersion:.2g} times the variance. Either "
                "f is too smooth (take more points, a shorter lengthscale), or the counts are overdispersed: take "
                "likelihoods.NegativeBinomial, or ZeroInflated if there are too many zeros."
            )
        if (words := _on_values(name, fit)) is not None:
            yield words
        elif fit.has_outliers:
            yield (
                f"{name} has outliers, or noise that differs from row to row. A Student t with {fit.df:g} degrees of freedom fits "
                f"the distances from predictions {fit.gain:.2g} nats per row better than a normal. Take likelihoods.StudentT, or "
                "HeteroskedasticGaussian if the inputs tell which rows are noisy."
            )


LONGER = (
    "Standardize the inputs, start at lengthscales of about sqrt(D) (init_params=, or a prior with that median), and take inducing "
    "points among the rows (init.greedy_variance)."
)


def _on_values(name: str, fit: OutputFit) -> str | None:
    """Outputs with real noise that are no real numbers."""
    if fit.likelihood not in ("Gaussian", "CollapsedGP", "Laplace", "StudentT") or fit.num < LEAST or not fit.sd:
        return None
    if fit.values == "two values":
        return (
            f"{name} has two values, and noise that is added is for real numbers. Labels 0 and 1 belong to "
            "likelihoods.Bernoulli, or ogp.classification."
        )
    if fit.values == "counts" and fit.below_zero > REACHED:
        return (
            f"{name} holds whole numbers from 0 on, and {percent(fit.below_zero)} of the predictions reach below 0. Counts "
            "belong to likelihoods.Poisson or NegativeBinomial, or ogp.counts; levels to likelihoods.Ordinal."
        )
    if fit.values and fit.has_outliers and fit.noise < 1:
        return (
            f"{name} holds whole numbers, and the noise is {fit.noise:.2g}: distances from predictions are those of rounding. Few "
            "levels belong to likelihoods.Ordinal."
        )
    return None


def _on_scale(name: str, fit: OutputFit) -> str | None:
    """Noise that is of another scale than the outputs."""
    if fit.num < LEAST or not fit.sd:
        return None
    if fit.missed > BEYOND:
        what = (
            f"Outputs {name} are {fit.missed:.2g} times as far from predictions as the noise, {fit.noise:.2g}, allows."
        )
    elif fit.noise > BEYOND * fit.sd:
        what = f"The noise, {fit.noise:.2g}, is {fit.noise / fit.sd:.2g} times the standard deviation of {name}."
    else:
        return None
    if 1 / LARGE < max(fit.sd, abs(fit.mean)) < LARGE:
        return (
            f"{what} Either it is wrong, or f has not followed yet: more steps, other starts (init_params=, starts=)."
        )
    return (
        f"{what} {name} has mean {fit.mean:.3g} and standard deviation {fit.sd:.2g}. Standardize it, y = (y - y.mean()) / y.std(), "
        "or let noise, amplitude and a mean start at these numbers."
    )


def _on_nothing(
    name: str, fit: OutputFit, functions: Mapping[str, FunctionHealth], scales: Mapping[str, Scales]
) -> str:
    share = f"{percent(fit.explained)}" if fit.explained > 0 else "nothing"
    what = f"The fit explains next to nothing of {name}: its predictions explain {share} of the variance"
    of = f"{fit.noise:.2g}; the standard deviation of {name} is {fit.sd:.2g}"
    if np.isnan(fit.noise):
        what = f"{what}."
    elif 2 * fit.noise < fit.sd:
        what = f"{what}, and most of the rest is no noise ({of})."
    else:
        what = f"{what}, the rest is noise ({of})."
    if fit.likelihood == "Bernoulli" and fit.values == "two values" and fit.num_rarest < FEW:
        return f"{what} Only {fit.num_rarest} of {fit.num} labels differ from the others, too few to tell where they occur."
    if any(functions[f].num_distinct == 1 for f in fit.functions if f in functions):
        return what  # what is said of its inputs says why
    known = [f for f in fit.functions if f in scales]
    alone = [f for f in known if scales[f].nearest < ALONE]
    if alone:
        return f"{what} {_alone(alone[0], scales[alone[0]])} {LONGER}"
    if level := [f for f in known if scales[f].farthest > SAME]:
        return f"{what} {words_of_level(level[0], scales[level[0]])}"
    return (
        f"{what} Either the inputs tell nothing about {name}, or the fit is stuck or unfinished. Try other starts (init_params=, "
        "starts=), more steps, or ogp.fit_lbfgs with a CollapsedGP; ogp.regression tries several starts."
    )


def _alone(name: str, s: Scales) -> str:
    return (
        f"No row tells about another: {name} at a row and at its nearest row have correlation {s.nearest:.2g} (median), so "
        "lengthscales are too short for these inputs."
    )
