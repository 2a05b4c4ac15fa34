"""What all pictures share: colours, markers, lines, and where to draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COLOURS",
    "COLOUR_MAP",
    "LINES",
    "MARKERS",
    "check_share",
    "colour_bar",
    "frame",
    "new_axes",
    "percent",
    "scatter",
]

# Okabe and Ito's colours, for all eyes; markers and lines say the same once more, for print without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3)))
COLOUR_MAP = "cividis"  # made for all eyes too; its lightness grows steadily


def new_axes(ax: Axes | None) -> Axes:
    """The axes given, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("numpyro_orthgp.plots needs matplotlib: pip install 'numpyro_orthgp[plots]'.") from error
    return plt.subplots(layout="constrained")[1]


def frame(ax: Axes, *, legend: bool = False, **labels: Any) -> Axes:
    """Labels, no box, and a legend if it is wanted and there is anything to say."""
    ax.set(**labels)
    ax.spines[["top", "right"]].set_visible(False)
    if legend and ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="small", framealpha=0.85)
    return ax


def colour_bar(ax: Axes, mappable: Any, label: str) -> None:
    ax.figure.colorbar(mappable, ax=ax, label=label)


def scatter(ax: Axes, X: Any, **style: Any) -> Any:
    """Points of shape (n, 2)."""
    return ax.scatter(X[:, 0], X[:, 1], **style)


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def check_share(name: str, value: float) -> float:
    """A probability strictly between 0 and 1.

    :raises ValueError: if it is none.
    """
    if not (isinstance(value, int | float) and 0 < value < 1):
        raise ValueError(f"`{name}` must lie between 0 and 1, 0.95 for 95 %; got {value!r}.")
    return float(value)
