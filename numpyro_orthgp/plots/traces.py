"""The trace of a fit: the bound at each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.plots.style import LINES, frame, look_of, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["elbo"]

NUM_WINDOWS = 40  # a window of the running mean is this part of a trace
LOWEST = 0.1  # share of the smoothed steps that may fall below the picture
HIGHEST = 0.995  # quantile of the noisy values that is still in it


def elbo(
    losses: Any,
    *,
    window: int | None = None,
    gap_to: float | str | None = None,
    steps_per_epoch: float | None = None,
    legend: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """The bound (minus the loss) of one fit or of several. A faint line has the value of each step, a strong line the running mean.

    The vertical range leaves out poor first steps: at most a tenth of each running mean lies below it. Losses that are not finite
    leave gaps in the lines and are marked along the lower edge. The running mean ignores them.

    :param losses: an array of losses (number of steps,), an object with such an array as ``losses`` (NumPyro's ``SVIRunResult``,
        the result of :func:`~numpyro_orthgp.fit`), or a dictionary of these by name.
    :param window: number of steps in the running mean; by default a fortieth of each trace. With 1 there is no mean.
    :param gap_to: show how far the running mean is below this value, on a logarithmic axis. It may be the log evidence, or "best"
        for the highest of all running means. The line has gaps where the mean is not below it.
    :param steps_per_epoch: for minibatches: the horizontal axis then counts epochs.
    :param legend: whether to draw a legend.
    :param ax: axes to draw on; by default those of a new figure.
    :return: the axes.
    :raises TypeError: if ``losses`` holds anything else.
    :raises ValueError: for wrong shapes, a trace without a finite loss, or a ``gap_to`` that no bound is below.
    """
    raw = {name: -_as_losses(name, value) for name, value in _by_name(losses).items()}
    windows = {name: _window(window, len(values)) for name, values in raw.items()}
    smooth = {name: _running_mean(values, windows[name]) for name, values in raw.items()}
    means = [mean for _, mean in smooth.values()]
    level = _level(gap_to, means)
    scale = 1 if steps_per_epoch is None else 1 / _positive("steps_per_epoch", steps_per_epoch)
    ax = new_axes(ax)
    for i, (name, values) in enumerate(raw.items()):
        every = np.arange(1, len(values) + 1)
        look = look_of(i)
        # Single steps of minibatches lie on both sides of any level, which a logarithm cannot show.
        if windows[name] > 1 and level is None:
            ax.plot(scale * every, _finite(values), alpha=0.25, linewidth=0.6, zorder=1, **look)
        steps, mean = smooth[name]
        line = {"linewidth": 1.8, "label": name, **look_of(i, linestyle=LINES)}
        ax.plot(scale * steps, mean if level is None else _gap(mean, level), **line)
        _mark_missing(ax, scale * every[~np.isfinite(values)], look)
    if level is None:
        _limit(ax, list(raw.values()), means)
        ylabel = "ELBO (nats)"
    else:
        ax.set_yscale("log")
        ylabel = ("best" if gap_to == "best" else f"{level:.6g}") + " - ELBO (nats)"
    return frame(ax, legend=legend, xlabel="step" if steps_per_epoch is None else "epoch", ylabel=ylabel)


def _by_name(losses: Any) -> Mapping[str, Any]:
    """Traces by what the legend calls them; a name that begins with "_" is not in it."""
    if not isinstance(losses, Mapping):
        return {"_": losses}
    if not losses:
        raise ValueError("`losses` must hold at least one trace; got an empty dictionary.")
    return {str(name): value for name, value in losses.items()}


def _as_losses(name: str, value: Any) -> np.ndarray:
    what = "`losses`" if name == "_" else f"`losses[{name!r}]`"
    try:
        values = np.asarray(getattr(value, "losses", value), float)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be an array, or have one as `losses`; got {type(value).__name__}.") from error
    if values.ndim != 1 or not len(values):
        raise ValueError(f"{what} must have shape (number of steps,), one or more; got {values.shape}.")
    if not np.isfinite(values).any():
        raise ValueError(f"{what} has no finite loss among its {len(values)}: there is nothing to draw.")
    return values


def _window(window: int | None, num_steps: int) -> int:
    if window is None:
        return max(1, num_steps // NUM_WINDOWS)
    return min(check_integer("window", window), num_steps)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"`{name}` must be positive; got {value!r}.")
    return float(value)


def _running_mean(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the mean of the finite ones of the last ``window`` values there; for wide windows not at each step."""
    if window == 1:
        return np.arange(1, len(values) + 1), _finite(values)
    ends = np.arange(len(values), window, -max(1, window // 10))
    ends = np.append(ends, window)[::-1]
    rows = np.lib.stride_tricks.sliding_window_view(values, window)[ends - window]
    finite = np.isfinite(rows)
    count = finite.sum(-1)
    return ends, np.sum(rows, axis=-1, where=finite) / np.where(count > 0, count, np.nan)


def _level(gap_to: Any, smooth: list[np.ndarray]) -> float | None:
    """What gaps are measured from, or ``None`` where they are not asked for."""
    if gap_to is None:
        return None
    if isinstance(gap_to, str) and gap_to != "best":
        raise ValueError(f"`gap_to` must be a number, or 'best'; got {gap_to!r}.")
    level = max(np.nanmax(s) for s in smooth) if gap_to == "best" else float(gap_to)
    lowest = min(np.nanmin(s) for s in smooth)
    if not lowest < level:
        raise ValueError(
            f"`gap_to` must lie above some value of the bound, the lowest of which is {lowest:.6g}; got {gap_to!r}."
        )
    return float(level)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


def _gap(mean: np.ndarray, level: float) -> np.ndarray:
    gap = level - mean
    return np.where(gap > 0, gap, np.nan)


def _limit(ax: Axes, raw: list[np.ndarray], smooth: list[np.ndarray]) -> None:
    """Leave the beginning out where it would press everything else flat."""
    values = [v[np.isfinite(v)] for v in raw]
    noisy = min(np.quantile(v[len(v) // 2 :], 1 - HIGHEST) for v in values)
    low = min(noisy, *(np.nanquantile(s, LOWEST) for s in smooth))
    high = max(np.quantile(v, HIGHEST) for v in values)
    if low < high and min(v.min() for v in values) < low - (high - low) / 4:
        ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def _mark_missing(ax: Axes, steps: np.ndarray, look: dict[str, Any]) -> None:
    if len(steps):
        heights = np.full(len(steps), 0.02)
        label = f"{len(steps)} not finite"
        ax.scatter(steps, heights, marker="x", s=24, label=label, transform=ax.get_xaxis_transform(), **look)
