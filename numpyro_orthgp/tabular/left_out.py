"""Calibration on rows that were left out: the noise, the use of nearby rows, the distribution of errors, and whether the mean alone
is better.

If rows are few, all of them are left out in turn, a fifth at a time. The hyperparameters for each fifth come from a search on the
other rows, since they would predict rows that they have seen too well. Of very few rows, a search misses those that are held out,
and errors do not tell their spread: one more search sees all, and the errors' spread is shrunk towards the stated one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from numpyro_orthgp.tabular.blocks import moments
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.mixtures import STANDARD, Mixture, fit_mixture
from numpyro_orthgp.tabular.near import NEIGHBORS, Near, learn_near
from numpyro_orthgp.tabular.points import Values, as_params, as_values
from numpyro_orthgp.tabular.rows import FEW
from numpyro_orthgp.tabular.search import Rows, Searched, Searches, everything, function_of, predictor_of
from numpyro_orthgp.tabular.stages import CLEARLY, FOLDS, MOST_POINTS, Found, Stage
from numpyro_orthgp.tabular.units import Outputs

__all__ = ["LeftOut", "calibrate", "calibration_words", "finish", "folds", "left_out"]

MOST_WORK = 1e10  # largest N M^2 of the last step, which has no gradient
STEP, MOST_CHANGES = 1.4, 6  # factors of the noise
SEARCHES_LEFT_OUT = 0.15  # least share of the time for rows that are left out
OF_Y_ALONE = 0.1  # least standard deviation within the distribution of y alone: values that recur are no peaks of it
LEARNED = 0.8  # share of the time until which hyperparameters are learned: those of rows left out, and of neighbours
WITH_NEIGHBORS = 3  # times as long as without, for the first predictions with them
FEW_NEIGHBORS = 32  # rows near an input, by the model's hyperparameters
POINTS = 100  # inducing points beside many neighbours
FOLD_POINTS = 400  # most inducing points of a search for rows that are left out
LEAST_ERRORS = 20  # errors that a mixture can be fitted to
AS_STATED = 5.0  # errors with the stated spread that count beside few others
FLAT = {"scale": 1e-3, "slope": 1e-3, "noise": 1.0}  # the mean and the standard deviation

Judge = Callable[[float, np.ndarray], float]  # what left-out rows say, from their log density and their distances


class LeftOut(NamedTuple):
    """Rows to predict, with the hyperparameters, inducing points and rows that predict them."""

    values: Values
    Z: np.ndarray
    rows: Rows
    X_new: np.ndarray
    y_new: np.ndarray
    rounding: float = 0.0  # least noise

    def predicted(self, factor: float, num_neighbors: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Predicted means and variances with the noise times ``factor``, and the observed outputs."""
        values = with_noise(self.values, factor, self.rounding)
        near = Near(values, self.Z, num_neighbors, own=False)
        f = predictor_of(near, self.rows) if num_neighbors else function_of(values, self.rows, self.Z)
        mean, variance = moments(f, self.X_new)
        return mean, variance + values["noise"] ** 2, self.y_new


class Climbed(NamedTuple):
    """The best factor of the noise; the value by which it was chosen; log density and distances of left-out rows; how long the
    first predictions took."""

    factor: float
    value: float
    score: float
    distances: np.ndarray
    seconds: float


class Calibrated(NamedTuple):
    """
    :param values: the model's hyperparameters.
    :param near: how predictions use the rows nearest to each input; ``None`` if these do not help. Its points are of training rows.
    :param score: mean log density of the left-out rows.
    :param distances: their distances from predictions, in predicted standard deviations.
    """

    values: Values
    near: Near | None
    score: float
    distances: np.ndarray


def with_noise(values: Values, factor: float, least: float) -> Values:
    return values | {"noise": np.maximum(values["noise"] * factor, least)}


def folds(num_rows: int) -> list[np.ndarray]:
    """Masks of the rows that are left out, a fifth at a time, shape (N,) each; True for rows left out.

    All folds have the same size, so programs compile once. Up to four rows are never left out.

    :param num_rows: N, number of rows, in random order.
    """
    size, rows = num_rows // FOLDS, np.arange(num_rows)
    return [(k * size <= rows) & (rows < (k + 1) * size) for k in range(FOLDS)]


def left_out(searches: Searches, outputs: Outputs, values: Values, last: Stage, num_points: int) -> list[LeftOut]:
    """Rows for calibration, which the hyperparameters have not seen. These are the held-out rows if they are many. Otherwise they
    are all rows, a fifth at a time, and each fifth has its own search on the other rows.

    :param last: the search that found the hyperparameters.
    :param num_points: number of inducing points for predictions.
    """
    X, y, num_held = searches.X, outputs.values, searches.num_held
    if not searches.are_few:
        rows = Rows(X[num_held:], y[num_held:])
        Z = rows.points(values, num_points)
        return [LeftOut(values, Z, rows, X[:num_held], y[:num_held], outputs.rounding)]
    parts = []
    for new in folds(len(y)):
        found, rows = values, Rows(X, y, ~new)
        if searches.budget.allows(0.0):
            found = searched(searches, rows, values, min(last.num_points, FOLD_POINTS))
        parts.append(LeftOut(found, rows.points(found, num_points), rows, X[new], y[new], outputs.rounding))
    return parts


def of_neighbors(part: LeftOut, budget: Budget) -> list[LeftOut]:
    """The same rows with hyperparameters of their own for predictions from nearby rows, if there is time to learn them."""
    rows = part.rows
    if len(part.Z) >= rows.num or not budget.allows(0.0):
        return []
    values = learn_near(part.values, rows.X, rows.y, part.rounding, budget)
    return [part._replace(values=values, Z=rows.points(values, POINTS))]


def searched(searches: Searches, rows: Rows, values: Values, num_points: int) -> Values:
    """Hyperparameters by one more search, on these rows."""
    return as_values(searches.fitted(rows, rows.points(values, num_points), values).params)


def finish(searches: Searches, stages: list[Stage], last: Stage, ended: Searched, grows: bool) -> Found:
    """The fit of all rows, with inducing points for them; the distribution of y alone instead, if it predicts left-out rows better.

    :param stages, last, ended, grows: results of :func:`~numpyro_orthgp.tabular.search.search`.
    """
    values, outputs = ended.values, ended.outputs
    rows = everything(searches.X, outputs.values, searches.num_held)
    num_points = points_of_all(last.num_points, rows.num, searches.num_held, grows)
    if rows.num < FEW:
        values = searched(searches, rows, values, last.num_points)
    whole, searches.budget = searches.budget, searches.budget.part(LEARNED).renewed(SEARCHES_LEFT_OUT)
    parts = left_out(searches, outputs, values, last, num_points)
    own = [] if searches.are_few else of_neighbors(parts[0], searches.budget)
    values, near, score, found = calibrate(parts, values, whole, own)
    alone = np.concatenate([part.y_new for part in parts])
    errors, flat = distribution_of(found), fit_mixture(alone, OF_Y_ALONE) if len(alone) >= LEAST_ERRORS else STANDARD
    baseline = float(STANDARD.log_density(alone).mean())
    # A few far rows decide between normal distributions, and values that recur between mixtures: so both must say it.
    is_mean = bool(score < baseline and score + gain(errors, found) < baseline + gain(flat, alone))
    if is_mean:
        values, near, errors = values | {k: np.array(v) for k, v in FLAT.items()}, None, flat
    Z = rows.points(values, num_points)
    if near is not None:
        near = near._replace(Z=rows.points(near.values, POINTS) if near.own else Z)
    params = {name: np.asarray(value) for name, value in as_params(values).items()}
    baseline += float(outputs.log_slopes[: len(found)].mean())
    return Found(values, Z, params, stages, baseline, is_mean, near, errors)


def points_of_all(num_points: int, num_rows: int, num_held: int, grows: bool) -> int:
    """Number of inducing points for all rows: all of them, if the search had all that it saw; and twice the points if that paid."""
    if grows:
        most = min(MOST_POINTS, int((MOST_WORK / num_rows) ** 0.5))
        num_points = min(num_rows, max(num_points, min(most, 2 * num_points)))
    return num_rows if num_points >= num_rows - num_held else num_points


def distribution_of(z: np.ndarray) -> Mixture:
    """The distribution of new errors, from those of left-out rows."""
    errors = fit_mixture(z) if len(z) >= LEAST_ERRORS else STANDARD
    return wider(z) if errors.is_standard and len(z) < FEW else errors


def wider(z: np.ndarray) -> Mixture:
    """A normal distribution with the spread of few errors, shrunk towards the stated one and not below it."""
    variance = (AS_STATED + np.sum(z**2)) / (AS_STATED + len(z))
    return Mixture(np.ones(1), np.zeros(1), np.array([max(float(variance), 1.0) ** 0.5]))


def scored(parts: Sequence[LeftOut], factor: float = 1.0, num_neighbors: int = 0) -> tuple[float, np.ndarray]:
    """Log density of all left-out rows, and their distances from predictions in predicted standard deviations."""
    mean, variance, y = map(
        np.concatenate, zip(*(part.predicted(factor, num_neighbors) for part in parts), strict=True)
    )
    z = (y - mean) / np.sqrt(variance)
    return float(np.sum(-0.5 * (np.log(2 * np.pi * variance) + z**2))), z


def gain(errors: Mixture, z: np.ndarray) -> float:
    """What a distribution of the errors gains over the standard normal one, nats per row."""
    return float(np.mean(errors.log_density(z) - STANDARD.log_density(z)))


def calibrate(parts: list[LeftOut], found: Values, budget: Budget, own: Sequence[LeftOut] = ()) -> Calibrated:
    """Calibrate on left-out rows: change the noise, or use neighbours, if this clearly predicts the rows better.

    Posterior modes underestimate the noise if rows are few or outputs have heavy tails. If there are fewer inducing points than
    rows, the rows near an input may add information. With them, what the points miss no longer counts as noise. Each step is taken
    if there is time for it.

    :param found: hyperparameters that the searches found.
    :param own: the same rows with hyperparameters learned for predictions with neighbours, or none.
    """
    least = parts[0].rounding

    def climb(parts: Sequence[LeftOut], num_neighbors: int, judge: Judge, *steps: float) -> Climbed:
        begin = budget.spent
        score, distances = scored(parts, 1.0, num_neighbors)
        seconds = took = budget.spent - begin
        best = Climbed(1.0, judge(score, distances), score, distances, seconds)
        for step in steps:
            for _ in range(MOST_CHANGES):
                if not budget.allows(2 * took):  # and the fit of all rows still is to come
                    break
                factor, begin = best.factor * step, budget.spent
                score, distances = scored(parts, factor, num_neighbors)
                took = min(took, budget.spent - begin)  # the first ones compile
                if (value := judge(score, distances)) < best.value + CLEARLY:
                    break
                best = Climbed(factor, value, score, distances, seconds)
            if best.factor != 1:
                break  # the other way leads back to where this one began
        return best

    best = climb(parts, 0, lambda score, _: score, STEP)  # the model's noise is that of normal errors
    values, near = with_noise(found, best.factor, least), None
    best = best._replace(value=with_errors(best.score, best.distances))
    of_model = parts if any(len(part.Z) < part.rows.num for part in parts) else []
    for tried, num_neighbors in ((own, NEIGHBORS), (of_model, FEW_NEIGHBORS)):
        if tried and near is None and (tried is own or budget.allows(WITH_NEIGHBORS * best.seconds)):
            new = climb(tried, num_neighbors, with_errors, 1 / STEP, STEP)
            if new.value > best.value + CLEARLY:
                of_near = with_noise(own[0].values if tried is own else found, new.factor, least)
                near, best = Near(of_near, tried[0].Z, num_neighbors, own=tried is own), new
    return Calibrated(values, near, best.score / len(best.distances), best.distances)


def with_errors(score: float, z: np.ndarray) -> float:
    """Log density of left-out rows by the distribution of errors that they have, less half a log N for each of its parameters.

    :param score: their log density if errors are normal with the stated spread.
    :param z: their distances from predictions, in predicted standard deviations.
    """
    errors = distribution_of(z)
    return score + len(z) * gain(errors, z) - 0.5 * np.log(len(z)) * errors.num_parameters


def calibration_words(found: Found, stray: float, part: str = "") -> list[str]:
    """How predictions differ from the model's, in words.

    :param stray: weight of rows that are unlike all others.
    :param part: of which rows near ones are, if not of all.
    """
    lines = []
    if found.near is not None:
        near = found.near
        own = ", with hyperparameters learned for this" if near.own else ""
        lines.append(
            f"predictions also use the {near.num_neighbors} rows nearest to each input{part}{own}, and noise {near.noise:.3g}:"
            "\n  rows left out were clearly better with them"
        )
    if not found.errors.is_standard:
        half, most = np.diff(found.errors.quantile(np.array([[0.25, 0.75], [0.025, 0.975]])))[:, 0] / 2
        num = len(found.errors.weights)
        lines.append(
            f"new outputs: as rows left out, by {num} normal distribution{'s' * (num > 1)}; half of the errors are within"
            f"\n  {half:.2g} predicted standard deviations and 95 % within {most:.2g} (for one: 0.67 and 1.96)"
        )
    if stray:
        once = round(1 / stray)
        lines.append(
            f"one new output in {once} is taken to have nothing to do with the inputs,\n  as no row seen rules that out"
        )
    return lines
