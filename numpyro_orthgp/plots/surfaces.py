"""A function over two input dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_orthgp.errors import check_integer, check_option
from numpyro_orthgp.plots.points import draw_points, point_sets
from numpyro_orthgp.plots.predictions import Prediction, predict
from numpyro_orthgp.plots.slices import Slice, check_data, slice_inputs
from numpyro_orthgp.plots.style import COLOUR_MAP, colour_bar, frame, legend_on_top, legend_room, new_axes, scatter
from numpyro_orthgp.types import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["surface"]

NUM_LEVELS = 12
SHOWN = ("mean", "sd")


def surface(
    f: Callable[[Any], Any],
    grid: tuple[ArrayLike, ArrayLike] | None = None,
    *,
    show: str = "mean",
    data: tuple[ArrayLike, ArrayLike] | None = None,
    dims: Sequence[int] | None = None,
    at: ArrayLike | None = None,
    output: int | None = None,
    likelihood: Callable[..., Any] | None = None,
    num_grid: int = 60,
    inducing: bool | None = None,
    names: Sequence[str] | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """A function over two input dimensions: its mean or its standard deviation as colours, data, inducing points.

    If the colours show the mean and D = 2, each data point has the colour of its y, so a point that is not fitted stands out.
    Labels 0 and 1 have different markers.

    :param f: as for :func:`function`.
    :param grid: limits (low, high) or positions for each of the two dimensions; by default a little more than the range of the
        data, or else of the inducing points.
    :param show: "mean", or "sd" for the standard deviation.
    :param data: X of shape (N, D), and y of shape (N,), or (N, P), of which ``output`` picks a column.
    :param dims: the dimensions that vary; the first is the horizontal axis. Needed for D > 2.
    :param at: values of the other dimensions, shape (D,); by default the median of the data, or else of the inducing points. The
        label of the axis shows them.
    :param output: which of P functions; draw a panel for each.
    :param likelihood: maps marginals to a distribution over y, whose mean or standard deviation is shown. With
        ``likelihoods.Bernoulli`` the mean is the probability of 1.
    :param num_grid: number of rows and of columns, if ``grid`` has limits only.
    :param inducing: whether to mark inducing points; by default if D = 2.
    :param names: names of the D input dimensions.
    :param legend: whether to draw a legend.
    :param ax: axes to draw on; by default those of a new figure. The colour bar takes its room from them.
    :return: the axes.
    :raises TypeError: if ``f`` or ``likelihood`` return something else, or ``data`` is no pair.
    :raises ValueError: for wrong shapes or an unknown ``show``, or if ``dims``, ``output`` or ``grid`` are needed but missing.
    """
    check_option("show", show, SHOWN)
    X, y = check_data(data, f, output)
    where = slice_inputs(f, 2, dims, X=X, at=at, names=names)
    sides = _sides(where, grid, check_integer("num_grid", num_grid, least=2))
    first, second = np.meshgrid(*sides)
    prediction = predict(f, where.inputs(first.ravel(), second.ravel()), output, likelihood)
    if prediction.has_labels and y is not None:
        _check_labels(y)
    values = (prediction.mean() if show == "mean" else prediction.deviation()).reshape(first.shape)

    ax = new_axes(ax)
    levels: Any = np.linspace(0, 1, 11) if show == "mean" and prediction.has_labels else NUM_LEVELS
    filled = ax.contourf(first, second, values, levels, cmap=COLOUR_MAP)
    colour_bar(ax, filled, _meaning(prediction, show))
    if X is not None:
        by_colour = filled if show == "mean" and where.complete else None
        _draw_data(ax, X[:, list(where.dims)], y, prediction.has_labels, by_colour, where.complete)
    if where.complete if inducing is None else inducing:
        draw_points(ax, point_sets(f, output), where.dims)
    legend = legend and (not where.complete or len(ax.get_legend_handles_labels()[0]) > 1)
    low, high = sides[1][[0, -1]]
    ax.set(xlim=sides[0][[0, -1]], ylim=(low, high + legend_room(ax, legend) * (high - low)))
    legend_on_top(ax, legend)
    return frame(ax, xlabel=where.label_with_remark(0), ylabel=where.label(1))


def _sides(where: Slice, grid: Any, num: int) -> list[np.ndarray]:
    if grid is not None and (not isinstance(grid, tuple | list) or len(grid) != 2):
        raise ValueError(
            f"`grid` must have an entry for each of two dimensions, ((low, high), (low, high)); got {grid!r}."
        )
    return [where.positions(None if grid is None else grid[i], i, num, f"grid[{i}]") for i in range(2)]


def _meaning(prediction: Prediction, show: str) -> str:
    if prediction.has_labels and show == "mean":
        return "probability of y = 1"
    variable = "f" if prediction.outcome is None else "y"
    return f"mean of {variable}" if show == "mean" else f"standard deviation of {variable}"


def _check_labels(y: np.ndarray) -> None:
    if not np.isin(y, (0, 1)).all():
        raise ValueError(
            f"`data[1]` must hold labels 0 and 1, as the likelihood has them; got {np.setdiff1d(y, (0, 1))[0]}. Of labels -1 and 1 "
            "take (y + 1) / 2."
        )


def _draw_data(ax: Axes, X: np.ndarray, y: Any, has_labels: bool, filled: Any, complete: bool) -> None:
    """Points in two dimensions: coloured like ``filled``, else small and grey; labels with markers of their own."""
    style: dict[str, Any] = {"s": 22, "edgecolors": "black", "linewidths": 0.5, "zorder": 3}
    name = "data" if complete else "data, projected"
    if has_labels:
        for label, marker, colour in ((0, "o", "black"), (1, "s", "white")):
            look = {**style, "color": colour, "edgecolors": "0.5", "marker": marker}
            scatter(ax, X[y == label], label=f"y = {label}", **look)
    elif filled is None:
        scatter(ax, X, s=7, color="white", edgecolors="black", linewidths=0.4, label=name, zorder=3)
    else:
        scatter(ax, X, c=y, cmap=filled.cmap, norm=filled.norm, **style, label=name)
