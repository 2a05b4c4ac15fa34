r"""How many derivatives a process has, and which part of a kernel has too few.

A process with a Matern kernel of order :math:`\nu` has mean-square derivatives of orders below :math:`\nu`
(Rasmussen and Williams 2006, Sec. 4.2.1): none for order 1/2, one for 3/2, two for 5/2. The arc-cosine kernel of order n belongs
to units :math:`\max(0, a)^n`, which have n derivatives; with order 0 they jump. A sum has the derivatives that all its summands
have. A product, by Leibniz' rule, has those that each factor has in its own columns. Nothing is known (:func:`is_known`) of plain
functions, tinygp's kernels and the user's own classes; these are tested by their values, see ``inducing/derivative.py``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numpyro_orthgp.kernels.base import Function, Named, Product, Restricted, Scaled, Sum
from numpyro_orthgp.kernels.convolutional import Convolutional
from numpyro_orthgp.kernels.coregion import Coregion
from numpyro_orthgp.kernels.dot_product import ArcCosine
from numpyro_orthgp.kernels.stationary import Matern12, Matern32, Matern52
from numpyro_orthgp.kernels.white import White

__all__ = ["check_smooth", "has_white", "is_known"]

_ORDERS: dict[Any, float] = {Matern12: 0, Matern32: 1, Matern52: 2, White: 0, Coregion: 0, Convolutional: 0}


_AROUND = (Scaled, Named, Restricted)


def is_known(kernel: Any) -> bool:
    """Whether all parts of a kernel are classes of this package. Plain functions are not."""
    if type(kernel) in (Sum, Product):
        return is_known(kernel.left) and is_known(kernel.right)
    if type(kernel) in _AROUND:
        return is_known(kernel.kernel)
    return type(kernel) is not Function and type(kernel).__module__.startswith(__name__.rpartition(".")[0] + ".")


def has_white(kernel: Any) -> bool:
    """Whether a kernel contains white noise."""
    if type(kernel) in (Sum, Product):
        return has_white(kernel.left) or has_white(kernel.right)
    return has_white(kernel.kernel) if type(kernel) in _AROUND else type(kernel) is White


def check_smooth(kernel: Any, dims: tuple[int | None, ...], num_dims: int) -> None:
    """Raise an error if the process does not have these derivatives.

    :param dims: the input column of each derivative; ``None`` for a direction in all columns.
    :param num_dims: D.
    :raises ValueError: if a part of the kernel is too rough. The message names it.
    """
    rough = _rough(kernel, dims, np.arange(num_dims))
    if rough is None:
        return
    name, order, wanted = type(rough).__name__, int(_order(rough)), len(dims)
    has = {0: "no derivatives", 1: "first derivatives only"}.get(order, f"derivatives up to order {order}")
    why: dict[Any, str] = {
        Coregion: "Coregion is a function of task indices, which have no derivative. Take the derivative along "
        "another column.",
        Convolutional: "Derivatives of functions of images are not known.",
        White: "White noise has no derivatives. Leave it to the likelihood's noise, or ask for the derivative of the other "
        "terms: f.term(...)(Derivative(X, dim)).",
    }
    raise ValueError(
        why.get(type(rough))
        or f"A process with the kernel {name} has {has}; this needs one of order {wanted}. Take a smoother kernel "
        "(RBF, Matern52), or the derivative of the other terms alone: f.term(...)(Derivative(X, dim))."
    )


def _order(kernel: Any) -> float:
    return float(kernel.order) if type(kernel) is ArcCosine else _ORDERS.get(type(kernel), math.inf)


def _rough(kernel: Any, dims: tuple[int | None, ...], columns: Any) -> Any:
    """The first part of a kernel that has too few derivatives, or ``None``."""
    if type(kernel) in (Sum, Product):
        left = _rough(kernel.left, dims, columns)
        return _rough(kernel.right, dims, columns) if left is None else left
    if type(kernel) in (Scaled, Named):
        return _rough(kernel.kernel, dims, columns)
    if type(kernel) is Restricted:
        return _rough(kernel.kernel, dims, kernel.columns(columns))
    seen = sum(dim is None or dim in columns for dim in dims)
    return kernel if seen > _order(kernel) else None
