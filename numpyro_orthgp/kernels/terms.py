"""Expands kernels to sums of terms whose expectations under Gaussian inputs are known."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.kernels.base import Constant, Named, Product, Restricted, Scaled, Sum
from numpyro_orthgp.kernels.dot_product import Linear, Polynomial
from numpyro_orthgp.kernels.hyperparameters import as_array
from numpyro_orthgp.kernels.stationary import RBF
from numpyro_orthgp.kernels.white import White
from numpyro_orthgp.types import Array, ArrayLike, KernelLike

__all__ = ["Term", "add", "terms"]


class Term(NamedTuple):
    r"""One term of an expanded kernel.

    :param weight: the factor :math:`c`, shape ().
    :param precision: inverse squared lengthscales :math:`p`, shape (D,), 0 for columns that do not matter; ``None`` if none does.
    :param slopes: variances :math:`v_j` of the slopes of each linear factor, shapes (D,).
    :param equal: columns in which x and z must be equal, else the term is zero, as for `White`.
    """

    weight: Array
    precision: Array | None = None
    slopes: tuple[Array, ...] = ()
    equal: frozenset[int] = frozenset()


def terms(kernel: KernelLike, num_dims: int, dtype: Any = float) -> tuple[Term, ...] | None:
    """A kernel of ``num_dims`` columns as a sum of terms with at most one linear factor each. ``None`` if it is no such sum; then
    its expectations have no closed form."""
    try:
        expansion = _expand(kernel, _Columns(np.arange(num_dims), num_dims, jnp.zeros((), dtype).dtype))
    except _NoClosedForm:
        return None
    return expansion if all(len(term.slopes) <= 1 for term in expansion) else None


class _NoClosedForm(Exception): ...


class _Columns(NamedTuple):
    """The columns that a kernel sees, out of ``num_dims``, integers of shape (n,)."""

    seen: Any
    num_dims: int
    dtype: jnp.dtype

    def embed(self, value: ArrayLike) -> Array:
        """Values for the columns seen, shape () or (n,), filled up with zeros for other columns, shape (D,)."""
        values = jnp.broadcast_to(as_array(value, self.dtype), self.seen.shape)
        zeros = jnp.zeros(self.num_dims, jnp.result_type(values, self.dtype))
        return zeros.at[self.seen].add(values)  # a column seen twice counts twice

    def term(self, weight: ArrayLike, precision: ArrayLike | None = None) -> Term:
        return Term(as_array(weight, self.dtype), None if precision is None else self.embed(precision))

    def linear(self, variance: ArrayLike) -> Term:
        return self.term(1.0)._replace(slopes=(self.embed(variance),))


def _expand(kernel: KernelLike, columns: _Columns) -> tuple[Term, ...]:
    rule = _RULES.get(type(kernel))  # not for subclasses, which may compute something else
    if rule is None:
        raise _NoClosedForm
    return rule(kernel, columns)


def add(p: Array | None, q: Array | None) -> Array | None:
    """The sum of two precisions. Either may be ``None``."""
    return q if p is None else p if q is None else p + q


def _polynomial(kernel: Polynomial, columns: _Columns) -> tuple[Term, ...]:
    if kernel.degree > 1:
        raise _NoClosedForm
    return columns.linear(kernel.variance), columns.term(kernel.offset)


def _product(left: tuple[Term, ...], right: tuple[Term, ...]) -> tuple[Term, ...]:
    return tuple(
        Term(s.weight * t.weight, add(s.precision, t.precision), s.slopes + t.slopes, s.equal | t.equal)
        for s, t in itertools.product(left, right)
    )


_RULES: dict[type, Callable[[Any, _Columns], tuple[Term, ...]]] = {
    RBF: lambda k, columns: (columns.term(1.0, 1 / jnp.square(as_array(k.lengthscale, columns.dtype))),),
    Linear: lambda k, columns: (columns.linear(k.variance),),
    Polynomial: _polynomial,
    Constant: lambda k, columns: (columns.term(k.value),),
    White: lambda k, columns: (columns.term(k.value)._replace(equal=frozenset(columns.seen.tolist())),),
    Sum: lambda k, columns: _expand(k.left, columns) + _expand(k.right, columns),
    Product: lambda k, columns: _product(_expand(k.left, columns), _expand(k.right, columns)),
    Scaled: lambda k, columns: _product((columns.term(k.variance),), _expand(k.kernel, columns)),
    Named: lambda k, columns: _expand(k.kernel, columns),
    Restricted: lambda k, columns: _expand(k.kernel, columns._replace(seen=k.columns(columns.seen))),
}
