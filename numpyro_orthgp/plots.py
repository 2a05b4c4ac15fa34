"""Pictures of fitted models. Needs matplotlib, the extra ``plots``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_floating, check_inputs
from numpyro_orthgp.process import GPFunction
from numpyro_orthgp.types import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["latent_space", "relevance"]

# Okabe and Ito's colours, for all eyes; markers say the same once more, for print without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")
GRID_ROWS = 1024  # rows of the grid that are predicted at once


def relevance(lengthscale: ArrayLike, *, names: Sequence[str] | None = None, ax: Axes | None = None) -> Axes:
    r"""Bars of the relevance :math:`1 / \ell_q` of each input dimension under an ARD kernel, the most relevant first.

    Latent dimensions whose bar is near zero are switched off: their lengthscale is far beyond the range of N(0, 1).

    :param lengthscale: one per dimension, shape (Q,).
    :param names: what the dimensions are called; by default their numbers.
    :param ax: where to draw; by default a new figure.
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
    ax = _axes(ax)
    ax.bar(np.arange(len(values)), values[order], color=COLOURS[0], width=0.7)
    ax.set_xticks(np.arange(len(values)), [labels[q] for q in order])
    ax.set_xlabel("latent dimension" if names is None else "input dimension")
    ax.set_ylabel("relevance, 1 / lengthscale")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


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

    The background is the standard deviation of f, root mean square over outputs, with all other dimensions at the points' mean:
    dark where the model knows the data, light where it would extrapolate.

    :param f: the fitted functions.
    :param loc: means of the latent inputs, shape (N, Q).
    :param dims: the two dimensions, first that of the horizontal axis.
    :param labels: classes of the points, shape (N,), for colours and markers.
    :param num_grid: rows and columns of the grid behind.
    :param ax: where to draw; by default a new figure.
    :return: the axes.
    :raises ValueError: for wrong shapes, or dimensions that are not two of Q.
    """
    points = np.asarray(check_inputs("loc", loc))
    if len(set(dims)) != 2 or not all(0 <= q < points.shape[1] for q in dims):
        raise ValueError(f"`dims` must be two different dimensions in 0..{points.shape[1] - 1}; got {dims}.")
    classes = np.zeros(len(points), int) if labels is None else np.asarray(labels)
    if classes.shape != (len(points),):
        raise ValueError(f"`labels` must have shape ({len(points)},), one per point; got {classes.shape}.")
    ax = _axes(ax)
    low, high = points[:, dims].min(0), points[:, dims].max(0)
    margin = 0.08 * np.maximum(high - low, np.finfo(points.dtype).eps)
    sides = [np.linspace(low[i] - margin[i], high[i] + margin[i], num_grid) for i in range(2)]
    spread = _spread_on_grid(f, points, dims, sides)
    extent = (sides[0][0], sides[0][-1], sides[1][0], sides[1][-1])
    look: Any = {"cmap": "Greys_r", "alpha": 0.6, "interpolation": "bilinear", "aspect": "auto"}
    image = ax.imshow(spread, origin="lower", extent=extent, **look)
    ax.figure.colorbar(image, ax=ax, label="standard deviation of f")
    for i, name in enumerate(np.unique(classes)):
        rows = classes == name
        style: Any = {
            "s": 14,
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "label": str(name),
        }
        ax.scatter(*points[rows][:, dims].T, linewidths=0.3, edgecolors="white", **style)
    if labels is not None:
        ax.legend(title="class", frameon=True, fontsize="small")
    ax.set_xlabel(f"latent dimension {dims[0]}")
    ax.set_ylabel(f"latent dimension {dims[1]}")
    return ax


def _spread_on_grid(f: GPFunction, points: np.ndarray, dims: tuple[int, int], sides: Sequence[Any]) -> np.ndarray:
    first, second = np.meshgrid(*sides)
    grid = np.tile(points.mean(0), (first.size, 1))
    grid[:, dims[0]], grid[:, dims[1]] = first.ravel(), second.ravel()
    variance_at = jax.jit(lambda X: jnp.reshape(f(X).variance, (len(X), -1)).mean(-1))
    parts = [variance_at(jnp.asarray(grid[i : i + GRID_ROWS], points.dtype)) for i in range(0, len(grid), GRID_ROWS)]
    return np.sqrt(np.concatenate(parts)).reshape(first.shape)


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("numpyro_orthgp.plots needs matplotlib: pip install 'numpyro_orthgp[plots]'.") from error
    return plt.subplots(layout="constrained")[1]
