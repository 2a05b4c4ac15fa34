"""Common parts of all pictures: colours, markers, lines and axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COLOURS", "COLOUR_MAP", "LINES", "MARKERS", "check_share", "colour_bar", "extend", "frame", "legend_on_top", "legend_room",
    "look_of", "new_axes", "percent", "scatter",
]  # fmt: skip

# Okabe and Ito's colours, for all eyes; markers and lines say the same once more, for print without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3)))
# Of a legend: height of a row, and of both edges together; width of an entry.
ROW_INCHES, EDGE_INCHES, ENTRY_INCHES = 0.2, 0.12, 1.15
COLOUR_MAP = "cividis"  # made for all eyes too; its lightness grows steadily


def look_of(i: int, **cycles: Sequence[Any]) -> dict[str, Any]:
    """The i-th colour, and the i-th entry of other cycles, which shift by one whenever the cycle of colours starts again.

    >>> [look_of(i, marker=MARKERS)["marker"] for i in (0, 1, 8, 9)]
    ['o', '^', '^', 's']
    """
    rounds = i // len(COLOURS)
    return {"color": COLOURS[i % len(COLOURS)]} | {name: c[(i + rounds) % len(c)] for name, c in cycles.items()}


def new_axes(ax: Axes | None) -> Axes:
    """The given axes, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("numpyro_orthgp.plots needs matplotlib: pip install 'numpyro_orthgp[plots]'.") from error
    return plt.subplots(layout="constrained")[1]


def frame(ax: Axes, *, legend: bool = False, **labels: Any) -> Axes:
    """Set labels, remove the box, and add a legend if it is wanted and not empty."""
    ax.set(**labels)
    ax.spines[["top", "right"]].set_visible(False)
    if legend and ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="small", framealpha=0.85)
    return ax


def legend_room(ax: Axes, legend: bool) -> float:
    """Height of the legend that :func:`legend_on_top` would draw, as a share of the picture below it; 0 without one."""
    entries = len(ax.get_legend_handles_labels()[0]) if legend else 0
    height = ROW_INCHES * -(-entries // _legend_columns(ax)) + (EDGE_INCHES if entries else 0.0)
    whole = _inches(ax)[1]
    return height / max(whole - height, whole / 3)


def legend_on_top(ax: Axes, legend: bool = True) -> None:
    """A flat legend at the upper edge, where there is room for it. Anywhere else it would hide data."""
    if legend and ax.get_legend_handles_labels()[0]:
        look: Any = {"fontsize": "small", "frameon": False, "columnspacing": 1.0, "handlelength": 1.6}
        ax.legend(loc="upper left", ncols=_legend_columns(ax), **look)


def _legend_columns(ax: Axes) -> int:
    return max(1, int(_inches(ax)[0] / ENTRY_INCHES))


def _inches(ax: Axes) -> tuple[float, float]:
    """Width and height before the layout is made, a little more than afterwards."""
    extent = ax.get_window_extent()
    return extent.width / ax.figure.dpi, max(extent.height / ax.figure.dpi, 1.0)


def extend(ax: Axes, below: float, above: float) -> None:
    """Make room for a rug and a legend, in shares of the height of the drawing; limits stay automatic."""
    low, high = ax.dataLim.intervaly
    x = ax.dataLim.x0
    ax.update_datalim([(x, low - below * (high - low)), (x, high + above * (high - low))])
    ax.autoscale_view(scalex=False)


def colour_bar(ax: Axes, mappable: Any, label: str) -> None:
    ax.figure.colorbar(mappable, ax=ax, label=label)


def scatter(ax: Axes, X: Any, **style: Any) -> Any:
    """Draw points of shape (n, 2)."""
    return ax.scatter(X[:, 0], X[:, 1], **style)


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def check_share(name: str, value: float) -> float:
    """Check that a probability is strictly between 0 and 1.

    :raises ValueError: if it is none.
    """
    if not (isinstance(value, int | float | np.floating) and 0 < value < 1):
        raise ValueError(f"`{name}` must lie between 0 and 1, 0.95 for 95 %; got {value!r}.")
    return float(value)
