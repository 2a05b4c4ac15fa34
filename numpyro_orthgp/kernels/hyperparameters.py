"""Kinds of kernel fields, and checks of hyperparameter values, shapes and inputs.

Kernels are frozen dataclasses and pytrees. Values are checked when a kernel is built, never when it is unflattened.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_floating, inspect, is_concrete
from numpyro_orthgp.types import Array, ArrayLike

__all__ = [
    "as_array",
    "check_inputs",
    "check_value",
    "hyperparameter",
    "latents_agree",
    "per_dimension",
    "per_latent",
    "static",
]


def hyperparameter(default: Any = dataclasses.MISSING, *, zero: bool = False) -> Any:
    """A field that is differentiated and batched. A concrete value must be positive (or 0, if ``zero``)."""
    return dataclasses.field(default=default, metadata={"sign": "nonnegative" if zero else "positive"})


def static(default: Any = dataclasses.MISSING) -> Any:
    """A field that belongs to the kernel's static structure: hashable, never traced."""
    return dataclasses.field(default=default, metadata={"static": True})


def _is_number(value: Any) -> bool:
    if isinstance(value, jax.Array):
        return not is_concrete(value) or value.is_fully_addressable
    return isinstance(value, int | float | np.ndarray | np.generic)


def check_value(name: str, value: Any, sign: str) -> None:
    """Raise if a concrete hyperparameter is outside its domain. Tracers and values that are not numbers pass.

    :param name: the hyperparameter's name, for the message.
    :param value: a number, an array, or a list of them.
    :param sign: "positive" or "nonnegative".
    :raises ValueError: if a value is not finite or has the wrong sign.
    """
    for part in jax.tree.leaves(value):
        if _is_number(part):
            inspect(partial(_refuse_others, name, sign), part)


def _refuse_others(name: str, sign: str, value: Any) -> None:
    array = np.asarray(value)
    within = array > 0 if sign == "positive" else array >= 0
    bad = array[~(within & np.isfinite(array))]
    if bad.size:
        raise ValueError(f"`{name}` must be {sign} and finite; got {bad.flat[0]}.")


def as_array(value: Any, dtype: jnp.dtype) -> Array:
    """A hyperparameter as an array, with JAX's type promotion.

    Python numbers, lists of them and integer arrays get ``dtype``, the dtype of the inputs. Floating arrays keep
    theirs.
    """
    if isinstance(value, list | tuple):
        return jnp.asarray(value, dtype)
    array = jnp.asarray(value)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(dtype)


def per_dimension(name: str, value: ArrayLike, X: Array) -> Array:
    """A hyperparameter with one value per input dimension, shaped to broadcast against ``X``.

    :param name: its name, for the message.
    :param value: shape (), (D,), (P, D) or (P, 1).
    :param X: inputs, shape (..., n, D).
    :return: shape (), (D,), (P, 1, D) or (P, 1, 1).
    :raises ValueError: for other shapes.
    """
    array, num_dims = as_array(value, X.dtype), X.shape[-1]
    if array.ndim > 2 or (array.ndim > 0 and array.shape[-1] not in (1, num_dims)):
        raise ValueError(
            f"`{name}` must have shape (), (D,), (P, D) or (P, 1) with D = {num_dims} to match the "
            f"inputs; got {array.shape}. One value per latent function has shape (P, 1)."
        )
    return array if array.ndim < 2 else array[:, None, :]


def per_latent(name: str, value: ArrayLike, X: Array, *, axes: int = 2) -> Array:
    """A scalar hyperparameter, possibly one per latent function, shaped to broadcast against kernel values.

    :param name: its name, for the message.
    :param value: shape () or (P,).
    :param X: inputs, shape (..., n, D); only their dtype matters.
    :param axes: 2 for a kernel matrix, 1 for its diagonal.
    :return: shape (), or (P, 1, 1) with as many ones as ``axes``.
    :raises ValueError: for other shapes.
    """
    array = as_array(value, X.dtype)
    if array.ndim > 1:
        raise ValueError(f"`{name}` must have shape () or (P,), one per latent function; got {array.shape}.")
    return array.reshape(array.shape + array.ndim * axes * (1,))


def latents_agree(left: Any, right: Any) -> tuple[Any, Any]:
    """Both operands of a sum or product of kernels.

    :raises ValueError: if their leading axes, one entry per latent function, differ.
    """
    shapes = jnp.shape(left), jnp.shape(right)
    try:
        jnp.broadcast_shapes(*shapes)
    except ValueError as error:
        raise ValueError(
            f"Parts of a kernel that are added or multiplied must be for the same number of latent functions; got values of shapes "
            f"{shapes[0]} and {shapes[1]}. Hyperparameters have no leading axis, or each the same one, with an entry per function."
        ) from error
    return left, right


def check_inputs(name: str, X: ArrayLike) -> Array:
    """``X`` as a floating-point array with at least two axes and one column.

    :param name: the argument's name, for the message.
    :param X: shape (..., n, D).
    :raises TypeError: if ``X`` does not contain real numbers.
    :raises ValueError: if ``X`` has fewer than two axes, or no column.
    """
    array = check_floating(name, X)
    if array.ndim < 2 or array.shape[-1] == 0:
        hint = f" Did you mean `{name}[:, None]`, one column?" if array.ndim == 1 else ""
        raise ValueError(f"`{name}` must have shape (..., n, D); got {array.shape}.{hint}")
    return array
