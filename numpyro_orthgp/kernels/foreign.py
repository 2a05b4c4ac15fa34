"""Combines our kernels with tinygp's.

``ours + theirs`` calls our method. ``theirs + ours`` calls tinygp's, which accepts only its own kernels and takes anything else for
a number. So once tinygp has been imported, our kernels count as instances of its class, and have the two methods that it calls for
single points. If tinygp makes a sum or product of our kernels, we convert it to ours where it is used (``ours`` in
``kernels/base.py``). It then has all our features: terms, leading axes of hyperparameters, no loops over points.
"""

from __future__ import annotations

import abc
import sys
from typing import Any

from numpyro_orthgp.types import Array

__all__ = ["PointByPoint", "from_tinygp", "introduce"]


class PointByPoint:
    """The two methods that tinygp calls on a kernel."""

    def evaluate(self, X1: Array, X2: Array) -> Array:
        """The covariance of two single inputs of shape (D,), for tinygp; shape ()."""
        return self(X1[None], X2[None])[..., 0, 0]  # type: ignore[operator]

    def evaluate_diag(self, X: Array) -> Array:
        """The variance at a single input of shape (D,), for tinygp; shape ()."""
        return self(X[None])[..., 0]  # type: ignore[operator]


def introduce(kernel: type) -> None:
    """Register our kernels with tinygp, if it has been imported."""
    theirs = sys.modules.get("tinygp.kernels.base")
    if theirs is not None and not issubclass(kernel, theirs.Kernel):
        abc.ABCMeta.register(theirs.Kernel, kernel)  # not its own `register`, which equinox switches off


def from_tinygp(kernel: Any, base: type) -> tuple[str, Any, Any] | None:
    """The two parts of a sum or product that tinygp made from a kernel of ours; ``None`` for anything else.

    :param base: the base class of our kernels.
    :return: "Sum" or "Product", and the two parts.
    """
    kind = type(kernel)
    if kind.__module__ != "tinygp.kernels.base" or kind.__name__ not in ("Sum", "Product") or not _holds(kernel, base):
        return None
    return kind.__name__, kernel.kernel1, kernel.kernel2


def _holds(kernel: Any, base: type) -> bool:
    if base in type(kernel).__mro__:
        return True
    return any(
        _holds(part, base) for name in ("kernel1", "kernel2") if (part := getattr(kernel, name, None)) is not None
    )
