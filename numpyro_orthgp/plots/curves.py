"""A function along one input dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.plots.points import draw_rug, point_sets
from numpyro_orthgp.plots.predictions import Prediction, predict
from numpyro_orthgp.plots.slices import Slice, check_data, slice_inputs
from numpyro_orthgp.plots.style import (
    COLOURS,
    check_share,
    extend,
    frame,
    legend_on_top,
    legend_room,
    new_axes,
    percent,
)
from numpyro_orthgp.types import ArrayLike, PRNGKey

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["function"]

NUM_GRID = 300


def function(
    f: Callable[[Any], Any],
    grid: ArrayLike | None = None,
    *,
    data: tuple[ArrayLike, ArrayLike] | None = None,
    dim: int | None = None,
    at: ArrayLike | None = None,
    output: int | None = None,
    likelihood: Callable[..., Any] | None = None,
    interval: float | Sequence[float] = 0.95,
    num_paths: int = 0,
    inducing: bool | None = None,
    names: Sequence[str] | None = None,
    legend: bool = True,
    rng_key: PRNGKey | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A function along one input dimension: mean, central intervals, draws, data, inducing points.

    With a ``likelihood`` the picture is in units of y. The line is the mean of y. The inner band is an interval of E[y given f],
    or of f itself for Gaussian noise. The outer, lighter band is an interval of y; labels 0 and 1 have none. Intervals of f, and
    of y with Gaussian noise, are exact. Those of E[y given f] come from 1024 values of f, all others of y from 10,000 draws.

    :param f: a function from :func:`~numpyro_orthgp.posterior`, or of a collapsed bound; or any callable that maps inputs of
        shape (G, D) to :class:`~numpyro_orthgp.Marginals`, such as ``lambda X: f(X) * scale + loc``, or to a distribution over y.
    :param grid: limits (low, high), or positions along ``dim``, shape (G,); by default a little more than the range of the
        data, or else of the inducing points.
    :param data: X of shape (N, D), and y of shape (N,), or (N, P), of which ``output`` picks a column.
    :param dim: the dimension that varies; needed for D > 1.
    :param at: values of the other dimensions, shape (D,); by default the median of the data, or else of the inducing points. The
        label of the axis shows them.
    :param output: which of P functions; draw a panel for each.
    :param likelihood: maps marginals to a distribution over y: ``likelihoods.Bernoulli``, or
        ``lambda m: likelihoods.Gaussian(m, noise)``.
    :param interval: probability of the band, or several; y has a band for the largest only.
    :param num_paths: number of draws of the function to show.
    :param inducing: whether to mark inducing points along the lower edge; by default if D = 1.
    :param names: names of the D input dimensions.
    :param legend: whether to draw a legend.
    :param rng_key: for paths, and draws of y; by default ``jax.random.key(0)``.
    :param ax: axes to draw on; by default those of a new figure.
    :return: the axes.
    :raises TypeError: if ``f`` or ``likelihood`` return something else, or ``data`` is no pair.
    :raises ValueError: for wrong shapes, or if ``dim``, ``output`` or ``grid`` are needed but missing.
    """
    levels = _levels(interval)
    check_integer("num_paths", num_paths, least=0)
    X, y = check_data(data, f, output)
    where = slice_inputs(f, 1, None if dim is None else (dim,), X=X, at=at, names=names)
    x = where.positions(grid, 0, NUM_GRID)
    prediction = predict(f, where.inputs(x), output, likelihood)
    path_key, outcome_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    mean, bands = prediction.mean(), _bands(prediction, levels, outcome_key)
    paths = prediction.paths(num_paths, path_key) if num_paths else None

    ax = new_axes(ax)
    for label, lower, upper, style in bands:
        ax.fill_between(x, lower, upper, label=label, **style)
    if paths is not None:
        name = f"{num_paths} draws" if num_paths > 1 else "a draw"
        lines = ax.plot(x, paths.T, color=COLOURS[0], linewidth=0.8, alpha=0.7, linestyle="--")
        lines[0].set_label(name)
    ax.plot(x, mean, color=COLOURS[0], linewidth=2, label="mean" if prediction.plain else "mean of y")
    if X is not None:
        _draw_data(ax, where, X, y, x)
    sets = point_sets(f, output) if (where.complete if inducing is None else inducing) else []
    draw_rug(ax, sets, where.dims[0])
    ax.set_xlim(x[0], x[-1])
    extend(ax, 0.05 * len(sets), legend_room(ax, legend))
    legend_on_top(ax, legend)
    return frame(ax, xlabel=where.label_with_remark(0), ylabel="f" if prediction.outcome is None else "y")


def _levels(interval: Any) -> list[float]:
    """Probabilities of the bands, the largest first."""
    levels = [interval] if np.ndim(interval) == 0 else list(interval)
    if not levels:
        raise ValueError("`interval` must name at least one probability; got none.")
    return sorted((check_share("interval", level) for level in levels), reverse=True)


def _bands(prediction: Prediction, levels: list[float], rng_key: PRNGKey) -> list[tuple[str, Any, Any, dict[str, Any]]]:
    """Label, lower and upper edge and style of each band, from the widest to the narrowest."""
    tails = [(1 - level) / 2 for level in levels]
    bands = []
    if prediction.outcome is not None and not prediction.has_labels:
        lower, upper = prediction.outcomes([tails[0], 1 - tails[0]], rng_key)
        style: dict[str, Any] = {"color": COLOURS[5], "alpha": 0.25, "linewidth": 0}
        bands.append((f"{percent(levels[0])} of y", lower, upper, style))
    signal = prediction.signal([*tails, *(1 - tail for tail in tails)])
    if signal is not None:
        name = "f" if prediction.plain else "E[y | f]"
        for level, lower, upper in zip(levels, *np.split(signal, 2), strict=True):
            style = {"color": COLOURS[0], "alpha": 0.3, "linewidth": 0}
            bands.append((f"{percent(level)} of {name}", lower, upper, style))
    return bands


def _draw_data(ax: Axes, where: Slice, X: Any, y: Any, x: np.ndarray) -> None:
    position = X[:, where.dims[0]]
    inside = (position >= x[0]) & (position <= x[-1])
    label = "data" if where.complete else "data, projected"
    ax.scatter(position[inside], y[inside], s=9, color="0.25", linewidths=0, label=label, zorder=3)
