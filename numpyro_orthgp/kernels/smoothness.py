r"""How many derivatives a process has, and which part of a kernel has too few.

A process with a Matern kernel of order :math:`\nu` has the mean-square derivatives of orders below :math:`\nu`
(Rasmussen and Williams 2006, Sec. 4.2.1): of order 1/2 none, 3/2 one, 5/2 two. The arc-cosine kernel of order n is that of
units :math:`\max(0, a)^n`, which have n; that of order 0 jumps. A sum has what all its summands have, and a product, by
Leibniz' rule, what each factor has in the columns that it sees. Of kernels that are functions, tinygp's, or classes of the user's
own nothing is known (:func:`is_known`); their values tell, see ``inducing/derivative.py``.
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
    """Whether all parts of a kernel are of this package, and none is a plain function."""
    if type(kernel) in (Sum, Product):
        return is_known(kernel.left) and is_known(kernel.right)
    if type(kernel) in _AROUND:
        return is_known(kernel.kernel)
    return type(kernel) is not Function and type(kernel).__module__.startswith(__name__.rpartition(".")[0] + ".")


def has_white(kernel: Any) -> bool:
    """Whether white noise is a part of a kernel."""
    if type(kernel) in (Sum, Product):
        return has_white(kernel.left) or has_white(kernel.right)
    return has_white(kernel.kernel) if type(kernel) in _AROUND else type(kernel) is White


def check_smooth(kernel: Any, dims: tuple[int | None, ...], num_dims: int) -> None:
    """Refuse derivatives that the process does not have.

    :param dims: the input columns along which is differentiated, one for each derivative; ``None`` for a direction of all columns.
    :param num_dims: D.
    :raises ValueError: naming the part of the kernel that is too rough.
    """
    rough = _rough(kernel, dims, np.arange(num_dims))
    if rough is None:
        return
    name, order, wanted = type(rough).__name__, int(_order(rough)), len(dims)
    has = {0: "no derivatives", 1: "first derivatives only"}.get(order, f"derivatives up to order {order}")
    why: dict[Any, str] = {
        Coregion: "Coregion is a function of tasks, which are no numbers to differentiate along. Take the derivative along another "
        "column.",
        Convolutional: "Derivatives of functions of images are not known here.",
        White: "White noise has no derivatives. Leave it to the likelihood's noise, or ask for the derivative of the other "
        "terms: f.term(...)(Derivative(X, dim)).",
    }
    raise ValueError(
        why.get(type(rough))
        or f"A process with the kernel {name} has {has}; asked for is one of order {wanted}. Take a smoother kernel (RBF, "
        f"Matern52), or the derivative of the other terms alone: f.term(...)(Derivative(X, dim))."
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
