"""`Kernel`, the base of all covariance functions, and its algebra: sums, products, scaling, columns."""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.closures import Closure
from numpyro_orthgp.errors import no_function
from numpyro_orthgp.kernels.foreign import PointByPoint, from_tinygp, introduce, refuse_words_of_others
from numpyro_orthgp.kernels.functions import kernel_as_pytree
from numpyro_orthgp.kernels.hyperparameters import (
    check_inputs,
    check_value,
    hyperparameter,
    latents_agree,
    per_latent,
    static,
)
from numpyro_orthgp.kernels.trees import register
from numpyro_orthgp.math.products import combine_columns
from numpyro_orthgp.types import Array, ArrayLike, KernelLike

__all__ = ["Constant", "Function", "Kernel", "Named", "Product", "Restricted", "Scaled", "Sum", "weighted_sum"]


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(hyperparameter, static))
class Kernel(PointByPoint, abc.ABC):
    """A covariance function.

    ``kernel(X1, X2)`` is the covariance matrix, shape (..., n, m); ``kernel(X)`` is the variance at each
    input, shape (..., n). Kernels are added, multiplied, scaled by numbers and arrays, and restricted to
    columns of the inputs::

        kernel = variance * Matern52(lengthscale).on([0, 1]) + Linear().on(2) + 0.1

    In sums and products the other operand may be any callable with the same convention, such as a tinygp
    kernel.

    Any hyperparameter may have a leading axis P, with one kernel per latent function. The result then has this
    axis first. Scalar hyperparameters have shape () or (P,). Hyperparameters with one value per input dimension
    have shape (), (D,), (P, D) or (P, 1). A kernel is a pytree whose leaves are its hyperparameters.

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import kernels
    >>> kernel = 4.0 * kernels.Matern52(0.5).on(0) + kernels.Linear().on(1) + 0.1
    >>> X = jnp.array([[0.0, 1.0], [0.5, 2.0], [1.0, 3.0]])
    >>> kernel(X, X[:2]).shape, kernel(X).tolist()
    ((3, 2), [5.1, 8.1, 13.1])

    To write a new kernel, subclass `Kernel`, annotate the fields (`hyperparameter` or `static`), and define the
    methods `matrix` and `diagonal`. The subclass becomes a frozen dataclass and a pytree automatically.
    """

    __array_ufunc__ = None  # numpy's numbers and arrays defer to our operators

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Kernel:
        introduce(Kernel)
        refuse_words_of_others(cls, kwargs)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if "sign" in field.metadata:
                check_value(field.name, getattr(self, field.name), field.metadata["sign"])

    @abc.abstractmethod
    def matrix(self, X1: Array, X2: Array) -> Array:
        """The covariance matrix, shape (..., n, m). `__call__` has already checked the inputs."""

    @abc.abstractmethod
    def diagonal(self, X: Array) -> Array:
        """The diagonal of ``matrix(X, X)``, shape (..., n)."""

    def weighted_sum(self, X1: Array, X2: Array, weights: Array) -> Array:
        """``matrix(X1, X2) @ weights``. Some kernels compute it, and its derivatives, in fewer passes over the matrix.

        :param weights: shape (..., m).
        :return: shape (..., n).
        """
        return combine_columns(self.matrix(X1, X2), weights)

    def __call__(self, X1: ArrayLike, X2: ArrayLike | None = None) -> Array:
        """The covariance matrix of two sets of inputs, or the variances of one.

        :param X1: inputs, shape (..., n, D).
        :param X2: inputs, shape (..., m, D). Leading axes broadcast against those of ``X1`` and of
            hyperparameters. If ``X2`` is the same array object as ``X1``, stationary kernels make the diagonal exact.
        :return: shape (..., n, m), or (..., n) without ``X2``.
        :raises TypeError: if inputs are not floating-point arrays.
        :raises ValueError: if shapes of inputs, or of inputs and hyperparameters, do not match.
        """
        if X2 is None:
            return self.diagonal(check_inputs("X", X1))
        first = check_inputs("X1", X1)
        second = first if X2 is X1 else check_inputs("X2", X2)
        if first.shape[-1] != second.shape[-1]:
            raise ValueError(
                f"`X2` must have shape (..., m, D) with D = {first.shape[-1]} to match `X1`; "
                f"got {second.shape}. Did you pass X2.T?"
            )
        return self.matrix(first, second)

    def on(self, dims: int | Iterable[int]) -> Restricted:
        """This kernel, applied to some columns of the inputs only.

        :param dims: one column, or several in the order in which the kernel sees them. Negative numbers count
            from the end.
        """
        return Restricted(self, dims)  # type: ignore[arg-type]

    def named(self, name: str) -> Named:
        """This kernel with a name. ``f.term(name)`` finds it in a sum by this name."""
        return Named(self, name)

    def __add__(self, other: Any) -> Kernel:
        return Sum(self, _summand(other))

    def __radd__(self, other: Any) -> Kernel:
        if isinstance(other, int) and other == 0:  # `sum` of a list of kernels starts with 0
            return self
        return Sum(_summand(other), self)

    def __mul__(self, other: Any) -> Kernel:
        return Scaled(self, other) if _is_number(other) else Product(self, _operand(other))

    def __rmul__(self, other: Any) -> Kernel:
        return Scaled(self, other) if _is_number(other) else Product(_operand(other), self)

    def __truediv__(self, divisor: Any) -> Kernel:
        return Scaled(self, 1 / divisor) if _is_number(divisor) else NotImplemented


class Sum(Kernel):
    r""":math:`k(x, y) = k_1(x, y) + k_2(x, y)`: the kernel of a sum of independent functions.

    :param left: a kernel.
    :param right: a kernel.
    """

    left: KernelLike
    right: KernelLike

    def matrix(self, X1: Array, X2: Array) -> Array:
        left, right = latents_agree(self.left(X1, X2), self.right(X1, X2))
        return left + right

    def weighted_sum(self, X1: Array, X2: Array, weights: Array) -> Array:
        left, right = latents_agree(weighted_sum(self.left, X1, X2, weights), weighted_sum(self.right, X1, X2, weights))
        return left + right

    def diagonal(self, X: Array) -> Array:
        left, right = latents_agree(self.left(X), self.right(X))
        return left + right


class Product(Kernel):
    r""":math:`k(x, y) = k_1(x, y)\, k_2(x, y)`.

    :param left: a kernel.
    :param right: a kernel.
    """

    left: KernelLike
    right: KernelLike

    def matrix(self, X1: Array, X2: Array) -> Array:
        left, right = latents_agree(self.left(X1, X2), self.right(X1, X2))
        return left * right

    def diagonal(self, X: Array) -> Array:
        left, right = latents_agree(self.left(X), self.right(X))
        return left * right


class Scaled(Kernel):
    r""":math:`k(x, y) = v\, k_1(x, y)`; the result of ``variance * kernel``.

    :param kernel: a kernel.
    :param variance: the factor :math:`v`, a variance (squared units of the function), shape () or (P,).
    """

    kernel: KernelLike
    variance: ArrayLike = hyperparameter()

    def matrix(self, X1: Array, X2: Array) -> Array:
        variance, value = latents_agree(per_latent("variance", self.variance, X1), self.kernel(X1, X2))
        return variance * value

    def weighted_sum(self, X1: Array, X2: Array, weights: Array) -> Array:
        variance = per_latent("variance", self.variance, X1, axes=1)
        variance, value = latents_agree(variance, weighted_sum(self.kernel, X1, X2, weights))
        return variance * value

    def diagonal(self, X: Array) -> Array:
        variance, value = latents_agree(per_latent("variance", self.variance, X, axes=1), self.kernel(X))
        return variance * value


def _column(dim: Any) -> int:
    if isinstance(dim, bool):  # else a boolean mask would be read as columns 0 and 1
        raise TypeError
    return operator.index(dim)


class Restricted(Kernel):
    r""":math:`k(x, y) = k_1(x_S, y_S)` for a set :math:`S` of input dimensions; the result of ``kernel.on(dims)``.

    :param kernel: a kernel.
    :param dims: the dimensions, an integer or several.
    :raises TypeError: if ``dims`` are not integers.
    :raises ValueError: if ``dims`` is empty; when called, if a dimension is out of range.
    """

    kernel: KernelLike
    dims: tuple[int, ...] = static()

    def __post_init__(self) -> None:
        dims: Any = self.dims
        try:
            dims = tuple(map(_column, dims if np.iterable(dims) else (dims,)))
        except TypeError as error:
            raise TypeError(f"`dims` must be an integer or several, such as [0, 2]; got {dims!r}.") from error
        if not dims:
            raise ValueError("`dims` must name at least one column; got none.")
        object.__setattr__(self, "dims", dims)

    def columns(self, X: Array) -> Array:
        """The columns of inputs (..., D) that the kernel sees."""
        num_dims = X.shape[-1]
        if any(not -num_dims <= dim < num_dims for dim in self.dims):
            raise ValueError(f"`dims` must lie in 0..{num_dims - 1} for inputs with D = {num_dims}; got {self.dims}.")
        dims = [dim % num_dims for dim in self.dims]
        if dims == list(range(dims[0], dims[0] + len(dims))):  # a slice costs less than a gather
            return X[..., dims[0] : dims[0] + len(dims)]
        return X[..., np.array(dims)]

    def matrix(self, X1: Array, X2: Array) -> Array:
        columns = self.columns(X1)
        return self.kernel(columns, columns if X2 is X1 else self.columns(X2))

    def weighted_sum(self, X1: Array, X2: Array, weights: Array) -> Array:
        return weighted_sum(self.kernel, self.columns(X1), self.columns(X2), weights)

    def diagonal(self, X: Array) -> Array:
        return self.kernel(self.columns(X))


class Named(Kernel):
    """A kernel with a name; the result of ``kernel.named(name)``.

    :param kernel: a kernel.
    :param name: its name, not empty.
    """

    kernel: KernelLike
    name: str = static()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"`name` must be a word, such as 'trend'; got {self.name!r}.")

    def matrix(self, X1: Array, X2: Array) -> Array:
        return self.kernel(X1, X2)

    def weighted_sum(self, X1: Array, X2: Array, weights: Array) -> Array:
        return weighted_sum(self.kernel, X1, X2, weights)

    def diagonal(self, X: Array) -> Array:
        return self.kernel(X)


class Constant(Kernel):
    r""":math:`k(x, y) = c`: an unknown constant function with variance :math:`c`; ``kernel + c`` adds it.

    :param value: the variance :math:`c`, shape () or (P,).
    """

    value: ArrayLike = hyperparameter(zero=True)

    def matrix(self, X1: Array, X2: Array) -> Array:
        value = per_latent("value", self.value, X1)
        batch = jnp.broadcast_shapes(value.shape[:-2], X1.shape[:-2], X2.shape[:-2])
        dtype = jnp.result_type(value, X1, X2)
        return jnp.broadcast_to(value, (*batch, X1.shape[-2], X2.shape[-2])).astype(dtype)

    def diagonal(self, X: Array) -> Array:
        value = per_latent("value", self.value, X, axes=1)
        shape = jnp.broadcast_shapes(value.shape, X.shape[:-1])
        return jnp.broadcast_to(value, shape).astype(jnp.result_type(value, X))


class Function(Kernel):
    """Wraps a plain function with the convention of kernels as a kernel. The arrays in the function are the pytree's leaves.

    :param function: ``function(X1, X2)`` has shape (..., n, m), ``function(X)`` shape (..., n).
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", kernel_as_pytree(self.function))

    def matrix(self, X1: Array, X2: Array) -> Array:
        return self.function(X1, X2)

    def diagonal(self, X: Array) -> Array:
        return self.function(X)


def weighted_sum(kernel: KernelLike, X1: Array, X2: Array, weights: Array) -> Array:
    """:meth:`Kernel.weighted_sum` for any kernel, also for a plain callable; shape (..., n)."""
    if isinstance(kernel, Kernel):
        return kernel.weighted_sum(X1, X2, weights)
    return combine_columns(kernel(X1, X2), weights)


def _is_number(other: Any) -> bool:
    return isinstance(other, int | float | np.ndarray | np.generic | jax.Array)


def _operand(other: Any) -> KernelLike:
    if isinstance(other, type) or not callable(other):
        raise TypeError(
            "A kernel can be combined with a number, an array or a kernel, that is any callable with "
            f"`k(X1, X2)` and `k(X)`; got {no_function(other)}"
        )
    other = ours(kernel_as_pytree(other))
    return Function(other) if isinstance(other, Closure) else other


def ours(kernel: Any) -> Any:
    """Convert sums and products that tinygp made from our kernels to our own; return other kernels unchanged."""
    parts = from_tinygp(kernel, Kernel)
    return kernel if parts is None else {"Sum": Sum, "Product": Product}[parts[0]](*map(ours, parts[1:]))


def _summand(other: Any) -> KernelLike:
    return Constant(other) if _is_number(other) else _operand(other)
