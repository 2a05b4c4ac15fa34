"""Pictures of the residual variance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_orthgp.errors import check_inputs
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.inducing import input_dim
from numpyro_orthgp.plots.dims import check_dims, dimension_names
from numpyro_orthgp.plots.points import check_function, draw_points, draw_rug, point_sets
from numpyro_orthgp.plots.predictions import picked
from numpyro_orthgp.plots.style import (
    COLOUR_MAP,
    COLOURS,
    colour_bar,
    extend,
    frame,
    legend_on_top,
    legend_room,
    new_axes,
    scatter,
)
from numpyro_orthgp.types import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["residual"]


def residual(
    f: GPFunction,
    X: ArrayLike,
    *,
    dims: Sequence[int] | None = None,
    output: int | None = None,
    inducing: bool = True,
    names: Sequence[str] | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    r"""The residual share at each point: the share of the prior variance that no set explains, :math:`r(x) / k(x, x)`.

    Near 0 the inducing variables determine the function. Near 1 they say nothing about it, and more of them are needed there.
    The share depends on the kernel and on the sets, not on q. It depends on all dimensions, also on those that are not drawn.

    :param f: a function from :func:`~numpyro_orthgp.posterior`, or of a collapsed bound.
    :param X: inputs at which the share is shown, usually those of the data, shape (N, D).
    :param dims: one or two dimensions; by default the first two, or the only one. The share is the height for one dimension and the
        colour for two, from 0 to 1; dark is a large share.
    :param output: which of P functions.
    :param inducing: whether to mark inducing points.
    :param names: names of the D input dimensions.
    :param legend: whether to draw a legend.
    :param ax: axes to draw on; by default those of a new figure. The colour bar takes its room from them.
    :return: the axes.
    :raises TypeError: if ``f`` is not such a function.
    :raises ValueError: for wrong shapes, dimensions that are not one or two of D, or if ``output`` is needed but missing.
    """
    rows = np.asarray(check_inputs("X", X, dim=input_dim(check_function(f).features)))
    D = rows.shape[1]
    dims = tuple(range(min(D, 2)) if dims is None else dims)
    check_dims(dims, D, 1 if len(dims) == 1 else 2)
    share = _share(f, rows, output)
    sets = point_sets(f, output) if inducing else []
    labels = [dimension_names(names, D)[d] for d in dims]
    ax = new_axes(ax)
    if len(dims) == 1:
        ax.scatter(rows[:, dims[0]], share, s=12, color=COLOURS[0], linewidths=0, label="data")
        draw_rug(ax, sets, dims[0])
        ax.set_ylim(-0.12, 1.02)
        return frame(ax, legend=legend and inducing, xlabel=labels[0], ylabel="share of prior variance left")
    order = np.argsort(share, kind="stable")  # the open ones on top
    look: Any = {"s": 18, "cmap": f"{COLOUR_MAP}_r", "vmin": 0, "vmax": 1, "edgecolors": "0.5", "linewidths": 0.3}
    dots = scatter(ax, rows[order][:, dims], c=share[order], **look)
    colour_bar(ax, dots, "share of prior variance left")
    draw_points(ax, sets, dims)
    legend = legend and inducing
    extend(ax, 0.0, legend_room(ax, legend))
    legend_on_top(ax, legend)
    return frame(ax, xlabel=labels[0], ylabel=labels[1])


def _share(f: GPFunction, X: np.ndarray, output: int | None) -> np.ndarray:
    inputs = f.checked(np.asarray(X, f.features[0].dtype))
    left = np.asarray(picked(f(inputs), output).residual)
    prior = np.asarray(f.kernel(inputs))
    # Hyperparameters of each latent function's own: one row for each.
    prior = prior if prior.ndim == 1 else prior[output]
    return np.divide(left, prior, out=np.zeros_like(left), where=prior > 0)
