"""Calibration: comparison of predicted probabilities with observations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy

from numpyro_orthgp.errors import check_floating, check_integer, check_option
from numpyro_orthgp.plots.style import COLOURS, LINES, check_share, frame, look_of, new_axes, percent
from numpyro_orthgp.types import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["calibration"]

KINDS = ("histogram", "coverage")
NUM_COVERAGE = 101


def calibration(
    pit: ArrayLike,
    *,
    kind: str = "histogram",
    num_bins: int = 10,
    interval: float = 0.95,
    label: str | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Probability integral transforms (PIT) of held-out data, with the range that calibrated predictions have by chance.

    The PIT of an observation y is the predicted probability of a value at most as large, P(Y <= y). If predictions are calibrated,
    it is uniform over points. The histogram shows how they are not: with a hump, intervals are too wide; with a valley, too narrow;
    with a slope, predictions are shifted. The coverage is the share of points in central intervals, against their probability.

    The bands are binomial quantiles, separately for each bar and for each point of the curve. They assume independent points. Of
    20 bars, one lies outside a band of 95 % by chance. For counts use a randomized PIT, a random number between P(Y < y) and
    P(Y <= y).

    :param pit: values in [0, 1], shape (N,).
    :param kind: "histogram", or "coverage".
    :param num_bins: number of bars of the histogram.
    :param interval: probability of the bands.
    :param label: name of the curve or the bars in the legend, if several share the axes.
    :param legend: whether to draw a legend.
    :param ax: axes to draw on; by default those of a new figure.
    :return: the axes.
    :raises TypeError: if ``pit`` is not floating.
    :raises ValueError: for another shape or ``kind``, or values outside of [0, 1].
    """
    check_option("kind", kind, KINDS)
    values = np.asarray(check_floating("pit", pit), float)
    if values.ndim != 1 or not len(values):
        raise ValueError(
            f"`pit` must have shape (N,), one or more; got {values.shape}. For several outputs: pit.ravel()."
        )
    outside = ~((values >= 0) & (values <= 1))
    if outside.any():
        raise ValueError(
            f"`pit` must lie in [0, 1]; got {values[outside][0]:.6g} at {int(np.argmax(outside))}, {int(outside.sum())} in all."
        )
    num_bins, interval = check_integer("num_bins", num_bins), check_share("interval", interval)
    ax = new_axes(ax)
    if kind == "histogram":
        _histogram(ax, values, num_bins, interval, label)
    else:
        _coverage(ax, values, interval, label)
    return frame(ax, legend=legend)


def _band(num: int, probability: np.ndarray, interval: float) -> tuple[np.ndarray, np.ndarray]:
    lower, upper = (scipy.stats.binom.ppf(tail, num, probability) for tail in ((1 - interval) / 2, (1 + interval) / 2))
    return lower, upper


def _histogram(ax: Axes, pit: np.ndarray, num_bins: int, interval: float, label: str | None) -> None:
    N = len(pit)
    counts, edges = np.histogram(pit, num_bins, (0, 1))
    lower, upper = _band(N, np.full(2, 1 / num_bins), interval)
    ax.stairs(counts, edges, fill=True, color=COLOURS[5], alpha=0.5)
    ax.stairs(counts, edges, color=COLOURS[0], linewidth=1.2, label=label or f"data (N = {N})")
    ax.fill_between(
        [0, 1], lower, upper, color="0.3", alpha=0.25, linewidth=0, label=f"{percent(interval)} if calibrated"
    )
    ax.axhline(N / num_bins, color="black", linewidth=1, linestyle="--")
    ax.set(xlabel="probability integral transform of y", ylabel="points", xlim=(0, 1), ylim=(0, None))


def _coverage(ax: Axes, pit: np.ndarray, interval: float, label: str | None) -> None:
    N = len(pit)
    levels = np.linspace(0, 1, NUM_COVERAGE)
    inside = (np.abs(2 * pit - 1) <= levels[:, None]).mean(-1)
    lower, upper = _band(N, levels, interval)
    ax.fill_between(
        levels, lower / N, upper / N, color="0.3", alpha=0.2, linewidth=0, label=f"{percent(interval)} if calibrated"
    )
    before = sum(not str(line.get_label()).startswith("_") for line in ax.lines)  # curves drawn earlier on these axes
    look = {"linewidth": 1.8, **look_of(before, linestyle=LINES)}
    ax.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    ax.plot(levels, inside, label=label or f"data (N = {N})", **look)
    ax.set(xlabel="probability of the central interval", ylabel="share of points inside", xlim=(0, 1), ylim=(0, 1.01))
