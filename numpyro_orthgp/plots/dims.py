"""Input dimensions of a picture: their choice, names and ranges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["check_dims", "dimension_names", "padded_range"]

MARGIN = 0.08  # of the range of the points, on either side


def check_dims(dims: tuple[int, ...], D: int, num: int) -> tuple[int, ...]:
    """``num`` different dimensions out of D.

    :raises ValueError: if they are not.
    """
    if len(dims) != num or len(set(dims)) != num or not all(0 <= d < D for d in dims):
        name, wanted = ("dim", "a dimension") if num == 1 else ("dims", "two different dimensions")
        raise ValueError(f"`{name}` must be {wanted} in 0..{D - 1}; got {dims[0] if len(dims) == num == 1 else dims}.")
    return dims


def dimension_names(names: Sequence[str] | None, D: int) -> tuple[str, ...]:
    """Names of D input dimensions, by default x, or x[0], x[1], ...

    :raises ValueError: if there is not one name for each.
    """
    if names is None:
        return ("x",) if D == 1 else tuple(f"x[{d}]" for d in range(D))
    if isinstance(names, str) or len(names) != D:
        raise ValueError(f"`names` must have one entry per input dimension, {D}; got {names!r}.")
    return tuple(names)


def padded_range(values: np.ndarray) -> tuple[float, float]:
    """The range of values with a margin on either side."""
    low, high = float(values.min()), float(values.max())
    margin = MARGIN * (high - low) if high > low else max(abs(high), 1.0) / 2
    return low - margin, high + margin
