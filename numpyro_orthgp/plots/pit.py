"""Whether predicted probabilities come true."""

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
    """Probability integral transforms of held-out data, beside what chance allows if predictions are calibrated.

    A PIT is the predicted probability of a value up to the one that came, P(Y <= y): uniform over points if predictions are
    calibrated. The histogram shows in which way they are not: a hump says that intervals are too wide, a valley too narrow, a slope
    that predictions are shifted. The coverage is the share of points in central intervals, against their probability.

    The bands are quantiles of the binomial distribution of each bar, and of each height of the curve, by itself: points are
    taken for independent, and of 20 bars one leaves a band of 95 % by chance. Counts need a randomized PIT: between P(Y < y) and
    P(Y <= y) at random.

    :param pit: values in [0, 1], shape (N,).
    :param kind: "histogram", or "coverage".
    :param num_bins: bars of the histogram.
    :param interval: probability of the bands.
    :param label: what the legend calls the curve or the bars, where several are drawn on the same axes.
    :param legend: whether to draw a legend.
    :param ax: where to draw; by default a new figure.
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
