"""Pictures of inducing points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from numpyro_orthgp.errors import check_inputs, check_integer
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.inducing import InducingPoints, input_dim
from numpyro_orthgp.plots.dims import check_dims, dimension_names
from numpyro_orthgp.plots.style import COLOURS, MARKERS, extend, frame, legend_on_top, legend_room, new_axes, scatter
from numpyro_orthgp.types import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["all_points", "draw_points", "draw_rug", "inducing", "point_sets"]


class PointSet(NamedTuple):
    """A set of inducing variables, ready to be drawn.

    :param label: its name in the legend.
    :param points: shape (M, D); ``None`` for a set that has no points in the space of the inputs.
    :param style: keyword arguments of ``Axes.scatter``.
    """

    label: str
    points: np.ndarray | None
    style: dict[str, Any]


def inducing(
    f: GPFunction,
    X: ArrayLike | None = None,
    *,
    dims: Sequence[int] | None = None,
    output: int | None = None,
    names: Sequence[str] | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """The inducing points of each set, in one or two input dimensions.

    In one dimension each set has its own row. Some sets have no points in the space of the inputs (patches, Fourier features,
    spherical harmonics). The legend lists them as not drawn.

    :param f: a function from :func:`~numpyro_orthgp.posterior`, or of a collapsed bound.
    :param X: inputs of the data, drawn as small dots behind the points, shape (N, D).
    :param dims: one or two dimensions; the first is the horizontal axis. By default the first two, or the only one.
    :param output: the latent function whose points are drawn, if each has its own; by default all of them together.
    :param names: names of the D input dimensions.
    :param legend: whether to draw a legend.
    :param ax: axes to draw on; by default those of a new figure.
    :return: the axes.
    :raises TypeError: if ``f`` is not such a function, or no set has points in the space of the inputs.
    :raises ValueError: for wrong shapes, or dimensions that are not one or two of D.
    """
    D = input_dim(check_function(f).features)
    sets = point_sets(f, output)
    if D is None:
        kinds = ", ".join(type(s).__name__ for s in f.features)
        raise TypeError(
            f"No set of the function has points in the space of its inputs that could be drawn; got {kinds}."
        )
    dims = tuple(range(min(D, 2)) if dims is None else dims)
    check_dims(dims, D, 1 if len(dims) == 1 else 2)
    labels = [dimension_names(names, D)[d] for d in dims]
    rows = None if X is None else np.asarray(check_inputs("X", X, dim=D))
    ax = new_axes(ax)
    if len(dims) == 1:
        _draw_rows(ax, sets, rows, dims[0])
        return frame(ax, xlabel=labels[0])
    if rows is not None:
        scatter(ax, rows[:, dims], s=6, color="0.7", linewidths=0, label=f"data (N = {len(rows)})", zorder=1)
    draw_points(ax, sets, dims)
    extend(ax, 0.0, legend_room(ax, legend))
    legend_on_top(ax, legend)
    return frame(ax, xlabel=labels[0], ylabel=labels[1])


def check_function(f: Any) -> GPFunction:
    """Return ``f``, after a check that it is a function with a kernel and inducing variables.

    :raises TypeError: if it is none.
    """
    if not isinstance(f, GPFunction):
        raise TypeError(
            f"`f` must be a function of posterior(...), or CollapsedGP(...).posterior(y); got {type(f).__name__}. posterior() "
            "returns a dictionary: posterior(...)['f']."
        )
    return f


def point_sets(f: Any, output: int | None = None) -> list[PointSet]:
    """The sets of a function in their order, mean-only points last; none for other callables."""
    if not isinstance(f, GPFunction):
        return []
    single = len(f.features) == 1
    sets = []
    for i, feature in enumerate(f.features):
        look: dict[str, Any] = {
            "color": COLOURS[1 + i % (len(COLOURS) - 1)],
            "marker": MARKERS[1 + i % (len(MARKERS) - 1)],
        }
        name = "inducing" if single else f"set {i}"
        if isinstance(feature, InducingPoints):
            points = _of_output(feature.points, output)
            label = f"inducing points (M = {_size(points)})" if single else f"{name} (M = {_size(points)})"
            sets.append(PointSet(label, _joined(points), look))
        else:
            label = f"{name}: {type(feature).__name__} (M = {feature.num}), no points"
            sets.append(PointSet(label, None, look))
    if f.shift is not None:
        points = _of_output(f.shift.points, output)
        sets.append(PointSet(f"mean-only (H = {_size(points)})", _joined(points), {"color": "black", "marker": "x"}))
    return sets


def all_points(f: Any) -> np.ndarray | None:
    """The points of all sets, shape (n, D), or ``None`` if there are none."""
    points = [s.points for s in point_sets(f) if s.points is not None]
    return np.concatenate(points) if points else None


def draw_points(ax: Axes, sets: Sequence[PointSet], dims: Sequence[int]) -> None:
    """Sets of points in two dimensions."""
    for s in sets:
        if s.points is None:
            ax.plot([], [], " ", label=s.label)
            continue
        edges: dict[str, Any] = (
            {"linewidths": 1.2} if s.style["marker"] == "x" else {"edgecolors": "white", "linewidths": 0.8}
        )
        scatter(ax, s.points[:, list(dims)], s=42, label=s.label, zorder=4, **s.style, **edges)


def draw_rug(ax: Axes, sets: Sequence[PointSet], dim: int) -> None:
    """Sets of points along the lower edge of a picture in one dimension, each a little higher than the one before."""
    for i, s in enumerate(sets):
        if s.points is None:
            ax.plot([], [], " ", label=s.label)
            continue
        heights = np.full(len(s.points), 0.03 + 0.045 * i)
        ax.scatter(
            s.points[:, dim], heights, s=26, label=s.label, zorder=4, transform=ax.get_xaxis_transform(), **s.style
        )


def _draw_rows(ax: Axes, sets: Sequence[PointSet], X: np.ndarray | None, dim: int) -> None:
    """A row for each set, the first on top, and one for the data beneath."""
    rows = [(s.label, s.points, {"s": 36, **s.style}) for s in sets]
    if X is not None:
        rows.append((f"data (N = {len(X)})", X, {"s": 90, "marker": "|", "color": "0.5", "linewidths": 0.6}))
    for height, (label, points, style) in enumerate(reversed(rows)):
        if points is not None:
            ax.scatter(points[:, dim], np.full(len(points), float(height)), label=label, **style)
    ax.set_yticks(range(len(rows)), [label for label, *_ in reversed(rows)])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.grid(axis="x", color="0.9")
    ax.set_axisbelow(True)


def _of_output(points: Any, output: int | None) -> np.ndarray:
    """Points of one latent function, (M, D), or of all, (P, M, D) where they differ."""
    points = np.asarray(points)
    if points.ndim == 3 and output is not None:
        if not -len(points) <= check_integer("output", output, least=None) < len(points):
            raise ValueError(f"`output` must lie in 0..{len(points) - 1}, one of the latent functions; got {output}.")
        return points[output]
    return points[0] if points.ndim == 3 and (points == points[0]).all() else points


def _size(points: np.ndarray) -> str:
    return str(len(points)) if points.ndim == 2 else f"{points.shape[1]} for each of {len(points)}"


def _joined(points: np.ndarray) -> np.ndarray:
    return points.reshape(-1, points.shape[-1])
