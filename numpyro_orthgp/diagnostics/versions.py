"""Differences between ArviZ 0.x and 1.x. Its import takes seconds, so it waits until it is needed; of 1.x parts are enough."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

__all__ = ["smooth_weights", "tree_of"]


def tree_of(datasets: Mapping[str, Any]) -> Any:
    """Datasets by group as an ``InferenceData`` (0.x) or a ``DataTree`` (1.x)."""
    if _is_before_1():
        return _arviz().InferenceData(**datasets)
    import xarray as xr

    return xr.DataTree.from_dict(dict(datasets))


def smooth_weights(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto-smoothed log weights, and k-hat, which is infinite if ArviZ finds no such distribution.

    :raises RuntimeError: without docstrings, which ArviZ 0.x lengthens.
    """
    if _is_before_1():
        if sys.flags.optimize > 1:
            raise RuntimeError(
                "ArviZ before 1.0 needs its docstrings for k-hat, and `python -OO` leaves them out. Run `check` and `khat` with "
                "`python` or `python -O`; all else works."
            )
        smoothed, khat = _arviz().psislw(log_weights)
    else:
        from arviz_stats.base import array_stats

        # ArviZ takes log likelihoods; their negatives are the log weights of leave-one-out.
        smoothed, khat = array_stats.psislw(-log_weights)
    # NaN of 1.x: a quarter of the tail does not stand out from its end, or there are 25 to 29 draws.
    return smoothed, np.inf if np.isnan(khat) else float(khat)


def _is_before_1() -> bool:
    return int(version("arviz").partition(".")[0]) < 1


def _arviz() -> Any:
    """
    :raises RuntimeError: if ArviZ 0.23 cannot note that it has announced 1.0 today.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 0.23 announces 1.0 when it is imported
        try:
            import arviz as az
        except OSError as error:
            raise RuntimeError(
                f"ArviZ, which `check`, `khat` and `to_arviz` use, writes to the user's cache folder when it is imported: {error}. "
                "Set XDG_CACHE_HOME to a folder that can be written, or install ArviZ 1.0."
            ) from error
    return az
