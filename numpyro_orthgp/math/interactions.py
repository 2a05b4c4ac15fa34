r"""Whether a function is a sum of functions of one part of its arguments each.

Where two parts have moved, each by itself and both together, a sum has

.. math:: F(a, b) - F(a, 0) - F(0, b) + F(0, 0) = 0.
"""

from __future__ import annotations

import numpy as np

__all__ = ["bits", "not_additive"]

_SHARE = 1e-3  # of the changes, what counts as a difference


def bits(num: int) -> range:
    """Two of ``num`` numbers differ in one of these bits, so parts that have it and parts that do not need be moved only."""
    return range(max(num - 1, 0).bit_length())


def not_additive(start: np.ndarray, a: np.ndarray, b: np.ndarray, both: np.ndarray, eps: float) -> np.ndarray:
    """Where values are not those of a sum; what is no number, of a step out of a support, is not compared.

    :param start: values where nothing has moved; the others where one part has, the other, and both.
    :param eps: precision of the values.
    """
    with np.errstate(invalid="ignore"):
        changes = abs(a - start) + abs(b - start) + abs(both - start)
        rounding = 64 * eps * np.max(np.abs([start, a, b, both]), 0)
        found: np.ndarray = abs(both - a - b + start) > _SHARE * changes + rounding
    return found
