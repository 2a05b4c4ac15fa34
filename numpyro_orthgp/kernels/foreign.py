"""Combines our kernels with tinygp's, and answers arguments that kernels have in other libraries.

``ours + theirs`` calls our method. ``theirs + ours`` calls tinygp's, which accepts only its own kernels and takes anything else for
a number. So once tinygp has been imported, our kernels count as instances of its class, and have the two methods that it calls for
single points. If tinygp makes a sum or product of our kernels, we convert it to ours where it is used (``ours`` in
``kernels/base.py``). It then has all our features: terms, leading axes of hyperparameters, no loops over points.
"""

from __future__ import annotations

import abc
import inspect
import sys
from collections.abc import Iterable
from typing import Any

from numpyro_orthgp.types import Array

__all__ = ["PointByPoint", "from_tinygp", "introduce", "refuse_words_of_others"]

_LENGTHSCALE = "Write {}(lengthscale), with shape (D,) for a lengthscale of each column."
_VARIANCE = "The variance is a factor: variance * {}(...)."
_COLUMNS = "Select columns by {}(...).on([0, 2])."
# Arguments of kernels in GPyTorch, GPflow, GPJax, tinygp and scikit-learn.
_WORDS = {
    "variance": _VARIANCE, "outputscale": _VARIANCE, "amplitude": _VARIANCE, "constant_value": _VARIANCE,
    "lengthscales": _LENGTHSCALE, "length_scale": _LENGTHSCALE, "scale": _LENGTHSCALE, "ard_num_dims": _LENGTHSCALE,
    "active_dims": _COLUMNS, "n_dims": _COLUMNS,
    "lengthscale_prior": "Draw it in the model: {}(numpyro.sample(\"lengthscale\", prior)).",
}  # fmt: skip


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


def refuse_words_of_others(kernel: type, given: Iterable[str]) -> None:
    """
    :param given: names of arguments for ``kernel``.
    :raises TypeError: if one of them is another library's name for what is written differently here.
    """
    for word in _WORDS.keys() & given:
        own = inspect.signature(kernel.__init__).parameters  # type: ignore[misc]
        if word not in own and (_WORDS[word] is not _LENGTHSCALE or "lengthscale" in own):
            name = kernel.__name__
            raise TypeError(f"{name} has no argument `{word}`. {_WORDS[word].format(name)}")
