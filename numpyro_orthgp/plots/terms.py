"""The terms of a sum, one panel for each, and the remainder of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.terms import term_names
from numpyro_orthgp.inducing import centred
from numpyro_orthgp.kernels.summands import find_summands, summands
from numpyro_orthgp.plots.points import check_function
from numpyro_orthgp.plots.predictions import predict
from numpyro_orthgp.plots.slices import check_data, slice_inputs
from numpyro_orthgp.plots.style import COLOURS, check_share, frame, new_axes
from numpyro_orthgp.types import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["terms"]

# Positions along the line: as many as data, for terms that repeat many times.
LEAST_GRID, MOST_GRID = 300, 3000


def terms(
    f: GPFunction,
    grid: ArrayLike | None = None,
    *,
    data: tuple[ArrayLike, ArrayLike] | None = None,
    which: Sequence[Any] | None = None,
    over: ArrayLike | None = None,
    dim: int | None = None,
    at: ArrayLike | None = None,
    output: int | None = None,
    interval: float = 0.95,
    names: Sequence[str] | None = None,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """Trend, season, remainder: the posterior of each term of a sum, along one input dimension.

    Each panel shows the mean and a central interval of one term, exact given q. Terms are correlated, because a constant can move
    from one to another. So their sum is known better than its parts. With data, the last panel has the remainder, y minus the mean
    of f.

    :param f: a function whose kernel is a sum, from :func:`~numpyro_orthgp.posterior`, or of a collapsed bound.
    :param grid: limits (low, high), or positions along ``dim``, shape (G,); by default a little more than the range of the
        data, or else of the inducing points.
    :param data: X of shape (N, D), and y of shape (N,), or (N, P), of which ``output`` picks a column, in units of f.
    :param which: the terms, one for each panel, as ``f.term`` takes them; by default all.
    :param over: a few dozen inputs, shape (Q, D); each term is centred by its average over them (:func:`~numpyro_orthgp.centred`).
        By default terms are not centred, and their intervals include the constants that can move between terms.
    :param dim: the dimension that varies; needed for D > 1.
    :param at: values of the other dimensions, shape (D,); by default the median of the data, or else of the inducing points.
    :param output: which of P functions.
    :param interval: probability of the bands.
    :param names: names of the D input dimensions.
    :param axes: axes to draw on, one for each panel, from top to bottom; by default those of a new figure.
    :return: the axes, shape (panels,).
    :raises TypeError: if ``f`` is not such a function, or ``data`` is no pair.
    :raises ValueError: for wrong shapes or unknown terms, or if ``dim``, ``output`` or ``axes`` are needed but missing.
    """
    check_function(f)
    level = check_share("interval", interval)
    X, y = check_data(data, f, output)
    where = slice_inputs(f, 1, None if dim is None else (dim,), X=X, at=at, names=names)
    num = LEAST_GRID if X is None else min(max(LEAST_GRID, 2 * len(X)), MOST_GRID)
    x = where.positions(grid, 0, num)
    chosen = list(range(len(term_names(f)))) if which is None else list(which)
    inputs: Any = where.inputs(x)
    inputs = inputs if over is None else centred(inputs, jnp.asarray(over, inputs.dtype))
    tails = [(1 - level) / 2, (1 + level) / 2]
    found = [(_label(f, one), predict(f.term(one), inputs, output, None)) for one in chosen]
    rest = None if X is None or y is None else y - predict(f, jnp.asarray(X, f.features[0].dtype), output, None).mean()

    panels = _panels(axes, len(chosen) + (rest is not None))
    for ax, (label, prediction) in zip(panels, found, strict=False):
        ax.fill_between(x, *prediction.signal(tails), color=COLOURS[0], alpha=0.3, linewidth=0)  # type: ignore[misc]
        ax.plot(x, prediction.mean(), color=COLOURS[0], linewidth=1.5)
        frame(ax, ylabel=label)
    if X is not None and rest is not None:
        panels[-1].axhline(0, color="0.6", linewidth=0.8)
        panels[-1].scatter(X[:, where.dims[0]], rest, s=5, color="0.25", linewidths=0)
        frame(panels[-1], ylabel="remainder")
    for ax in panels:
        ax.set_xlim(x[0], x[-1])
        ax.tick_params(labelbottom=ax is panels[-1])
    panels[-1].set_xlabel(where.label_with_remark(0))
    return panels


def _label(f: GPFunction, which: Any) -> str:
    labels = term_names(f)
    if isinstance(which, str):
        return which
    places = find_summands(f.kernel, which)
    return " + ".join(label for label, s in zip(labels, summands(f.kernel), strict=True) if s.place in places)


def _panels(axes: Sequence[Axes] | None, num: int) -> np.ndarray:
    if axes is None:
        figure: Any = new_axes(None).figure
        figure.clear()
        figure.set_size_inches(6.4, 1.5 * num + 0.5)
        return np.atleast_1d(figure.subplots(num, sharex=True))
    panels = np.ravel(np.asarray(axes, dtype=object))
    if len(panels) != num:
        raise ValueError(
            f"`axes` must be {num}, one for each term and one for the remainder if there are data; got {len(panels)}."
        )
    return panels
