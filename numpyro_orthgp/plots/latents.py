"""Latent inputs: positions of the points, and relevance of the dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_orthgp.errors import check_floating, check_inputs
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.plots.dims import check_dims
from numpyro_orthgp.plots.slices import Slice
from numpyro_orthgp.plots.style import COLOURS, MARKERS, colour_bar, frame, look_of, new_axes, scatter
from numpyro_orthgp.types import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["latent_space", "relevance"]


def relevance(lengthscale: ArrayLike, *, names: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    r"""Bars of the relevance :math:`1 / \ell_q` of each input dimension under an ARD kernel, the most relevant first.

    If a bar is near zero, the model does not use this dimension: its lengthscale is far beyond the range of N(0, 1).

    :param lengthscale: one per dimension, shape (Q,).
    :param names: names of the dimensions; by default their numbers.
    :param ax: axes to draw on; by default those of a new figure.
    :return: the axes.
    :raises ValueError: if there is not one lengthscale, or not one name, per dimension.
    """
    values = 1 / np.asarray(check_floating("lengthscale", lengthscale))
    if values.ndim != 1:
        raise ValueError(f"`lengthscale` must have shape (Q,), one per dimension; got {values.shape}.")
    labels = [str(q) for q in range(len(values))] if names is None else list(names)
    if len(labels) != len(values):
        raise ValueError(f"`names` must have one entry per dimension, {len(values)}; got {len(labels)}.")
    order = np.argsort(-values, kind="stable")
    ax = new_axes(ax)
    ax.bar(np.arange(len(values)), values[order], color=COLOURS[0], width=0.7)
    ax.set_xticks(np.arange(len(values)), [labels[q] for q in order])
    return frame(
        ax, xlabel="latent dimension" if names is None else "input dimension", ylabel="relevance, 1 / lengthscale"
    )


def latent_space(
    f: GPFunction,
    loc: ArrayLike,
    *,
    dims: tuple[int, int] = (0, 1),
    labels: ArrayLike | None = None,
    num_grid: int = 60,
    ax: Axes | None = None,
) -> Axes:
    """Latent points in two of their dimensions, over the functions' predictive uncertainty.

    The background is the standard deviation of f, root mean square over outputs, with all other dimensions at the mean of the
    points. It is dark near the data, and light where the model extrapolates.

    :param f: the fitted functions.
    :param loc: means of the latent inputs, shape (N, Q).
    :param dims: the two dimensions; the first is the horizontal axis.
    :param labels: classes of the points, shape (N,), for colours and markers.
    :param num_grid: number of rows and of columns of the grid of the background.
    :param ax: axes to draw on; by default those of a new figure.
    :return: the axes.
    :raises ValueError: for wrong shapes, or dimensions that are not two of Q.
    """
    points = np.asarray(check_inputs("loc", loc))
    first, second = check_dims(tuple(dims), points.shape[1], 2)
    classes = np.zeros(len(points), int) if labels is None else np.asarray(labels)
    if classes.shape != (len(points),):
        raise ValueError(f"`labels` must have shape ({len(points)},), one per point; got {classes.shape}.")
    names = tuple(f"latent dimension {q}" for q in range(points.shape[1]))
    where = Slice((first, second), points.mean(0), points, names, "", points.dtype)
    sides = [where.positions(None, i, num_grid) for i in range(2)]
    spread = _spread_on_grid(f, where, *np.meshgrid(*sides))
    ax = new_axes(ax)
    # `imshow` takes edges of cells, of which these positions are the middles.
    half = [(side[-1] - side[0]) / (len(side) - 1) / 2 for side in sides]
    extent = tuple(side[i] + sign * h for side, h in zip(sides, half, strict=True) for i, sign in ((0, -1), (-1, 1)))
    look: Any = {"cmap": "Greys_r", "alpha": 0.6, "interpolation": "bilinear", "aspect": "auto"}
    image = ax.imshow(spread, origin="lower", extent=extent, **look)
    colour_bar(ax, image, "standard deviation of f")
    for i, name in enumerate(np.unique(classes)):
        rows = classes == name
        style: Any = {
            "s": 14,
            "label": str(name),
            **look_of(i, marker=MARKERS),
        }
        scatter(ax, points[rows][:, dims], linewidths=0.3, edgecolors="white", **style)
    if labels is not None:
        ax.legend(title="class", frameon=True, fontsize="small")
    ax.set(xlabel=where.label(0), ylabel=where.label(1))
    return ax


def _spread_on_grid(f: GPFunction, where: Slice, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Root mean square over outputs of the standard deviation, shape of the grid."""
    variance = np.asarray(f(where.inputs(first.ravel(), second.ravel())).variance)
    return np.sqrt(variance.reshape(first.size, -1).mean(-1)).reshape(first.shape)
