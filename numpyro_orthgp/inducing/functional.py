r"""Linear functionals of f, which data may observe instead of values of f at inputs.

A functional provides for data what a feature provides for inducing variables: its covariance with the inducing variables,
:math:`k(z, L) = L_x\, k(z, x)`, and with itself, :math:`k(L, L') = L_x L'_{x'}\, k(x, x')`. A functional defines how it acts on any
function of inputs (:meth:`Functional.apply`). Both covariances follow for any kernel and any kind of inducing variables,
since covariances are linear in each argument. Projections, marginals and draws then work as for values.

A functional may apply to some summands of f only (``places``): with :math:`f = f_1 + f_2` a priori independent,
:math:`\mathrm{cov}(L f_1, f(z)) = L_x\, k_1(x, z)` and :math:`\mathrm{cov}(L f_1, L' f_2) = 0`.

A functional is a :class:`~numpyro_orthgp.inducing.feature.Feature`, and may also be a set of inducing variables, each divided by
its standard deviation (:class:`InducingFunctionals`), since jitter is relative to the mean variance, and values and slopes may
differ by orders of magnitude.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.errors import check_inputs, check_same_dtype
from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.inducing.interdomain import InterDomain
from numpyro_orthgp.inducing.points import InducingPoints, covariance_of_points
from numpyro_orthgp.kernels.summands import Place, select
from numpyro_orthgp.math.linalg import join
from numpyro_orthgp.types import Array, ArrayLike, KernelLike

__all__ = ["Concatenated", "Functional", "InducingFunctionals", "Values", "common_places", "concatenate"]

Evaluated = Callable[[Array], Array]  # a function of inputs: shape (n, D) to (..., n)


class Functional(abc.ABC):
    """Linear functionals of f, one for each of B rows; a pytree whose arrays all have B rows.

    A subclass is a dataclass with a field ``places``: the summands of the kernel to which it applies, or ``None`` for the whole f.
    """

    places: tuple[Place, ...] | None

    @property
    @abc.abstractmethod
    def num(self) -> int:
        """Number of rows B."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """Floating dtype of the inputs."""

    @abc.abstractmethod
    def checked(self, dim: int | None, dtype: Any) -> Functional:
        """Self, with all arrays checked and of full shape.

        :param dim: number of input dimensions D, if known.
        :param dtype: dtype of the inducing variables.
        """

    @abc.abstractmethod
    def apply(self, function: Evaluated) -> Array:
        """Apply the functional of each row to a function of inputs.

        :param function: maps inputs (n, D) to values (..., n); each value depends only on its own input.
        :return: shape (..., B).
        """

    @property
    def width(self) -> int:
        """Number of inputs at which one row needs values."""
        return 1

    def __len__(self) -> int:
        return self.num

    def check(self, kernel: Any) -> None:  # noqa: B027
        """Refuse a kernel, of the summands to which it applies, whose process does not have this functional."""

    def looked_at(self, kernel: Any) -> Functional:
        """Self; refuses, like :meth:`check`, kernels that only their concrete values can judge."""
        return self

    def is_exact(self, kernel: Any) -> bool:
        """Whether covariances with values and other functionals are known without :meth:`apply`."""
        return False

    def by_nodes(self) -> Functional:
        """The same functional with all covariances by :meth:`apply`, consistent with its action on other functions."""
        return self

    def of(self, places: tuple[Place, ...]) -> Functional:
        """The same functional, applied to some summands of f only.

        :raises ValueError: if it applies to other summands.
        """
        common = common_places(self.places, places)
        if not common:
            raise ValueError(
                "This functional is of one term of f, and is zero for the term that it is evaluated "
                "for. Give a functional to the term that it belongs to."
            )
        return replace(self, places=common)  # type: ignore[type-var]

    # ---------------------------------------------------------------- what follows

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        """Covariance with another functional, or a feature, shape (..., B, B_other)."""
        if isinstance(other, Concatenated):
            return join([self.covariance(kernel, part) for part in other.parts], -1, event_dim=2)
        if not isinstance(other, Functional):
            return jnp.swapaxes(self.covariance_with_feature(kernel, other), -1, -2)
        part = select(kernel, common_places(self.places, other.places))
        if part is None:
            return jnp.zeros((self.num, other.num), self.dtype)
        self.check(part)
        other.check(part)
        if other.is_exact(part):
            return jnp.swapaxes(other.covariance(kernel, self), -1, -2)

        def with_other(X: Array) -> Array:  # (n, D) to (..., B_other, n)
            return jnp.swapaxes(other.apply(lambda X2: covariance_of_points(part, X, X2)), -1, -2)

        return jnp.swapaxes(self.apply(with_other), -1, -2)

    def covariance_with_inputs(self, kernel: KernelLike, X: Array) -> Array:
        """Covariance with the function at inputs ``X``, shape (..., B, n)."""
        return jnp.swapaxes(self.covariance_with_feature(kernel, InducingPoints(X)), -1, -2)

    def covariance_with_feature(self, kernel: KernelLike, feature: Feature) -> Array:
        """Covariance of a set of inducing variables with these functionals, shape (..., M, B).

        :raises TypeError: if it applies to some summands, and the summand of the inducing variables is unknown.
        """
        if isinstance(feature, Functional | InducingFunctionals):
            return feature.covariance(kernel, self)
        part = select(kernel, self.places)
        self.check(part)
        if isinstance(feature, InducingPoints):
            return self.apply(lambda X: feature.covariance_with_inputs(part, X))
        if self.places is not None:
            if not isinstance(feature, InterDomain):
                raise TypeError(
                    "The covariance of a term of f is known with inducing points, and with features that belong "
                    f"to one term of the kernel; got {type(feature).__name__}."
                )
            if feature.term(kernel).place not in self.places:
                return jnp.zeros((feature.num, self.num), self.dtype)
        return self.apply(lambda X: feature.covariance_with_inputs(kernel, X))

    def variance(self, kernel: KernelLike) -> Array:
        """The prior variance of each functional, shape (..., B)."""
        rows = jax.tree.map(lambda a: a[:, None], self)
        return jnp.moveaxis(jax.vmap(lambda row: row.covariance(kernel, row)[..., 0, 0])(rows), 0, -1)

    def scale(self, kernel: KernelLike) -> Array:
        """The prior standard deviation of each functional, shape (..., B); one where it is zero."""
        variance = self.variance(kernel)
        return jnp.sqrt(jnp.where(variance > 0, variance, 1))

    def matrix(self, kernel: KernelLike) -> Array:
        """The prior covariance of all rows, with its diagonal from :meth:`variance`; shape (..., B, B)."""
        K, variance = self.covariance(kernel, self), self.variance(kernel)
        return jnp.where(jnp.eye(self.num, dtype=bool), variance[..., None, :], K)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Values(Functional):
    """Values at inputs.

    :param X: inputs, shape (B, D).
    """

    X: Array
    places: tuple[Place, ...] | None = field(default=None, metadata={"static": True})

    @property
    def num(self) -> int:
        return len(self.X)

    @property
    def dtype(self) -> Any:
        return self.X.dtype

    def checked(self, dim: int | None, dtype: Any) -> Values:
        return replace(self, X=check_same_dtype("X", check_inputs("X", self.X, dim=dim), dtype))

    def apply(self, function: Evaluated) -> Array:
        return function(self.X)

    def variance(self, kernel: KernelLike) -> Array:
        return select(kernel, self.places)(self.X)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Concatenated(Functional):
    """Functionals of several kinds, the rows of one after those of another; the result of :func:`concatenate`.

    :param parts: functionals of other classes.
    """

    parts: tuple[Functional, ...]
    places: tuple[Place, ...] | None = field(default=None, metadata={"static": True})

    @property
    def num(self) -> int:
        return sum(part.num for part in self.parts)

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    def checked(self, dim: int | None, dtype: Any) -> Concatenated:
        return replace(self, parts=tuple(part.checked(dim, dtype) for part in self.parts))

    def apply(self, function: Evaluated) -> Array:
        return join([part.apply(function) for part in self.parts], -1, event_dim=1)

    def of(self, places: tuple[Place, ...]) -> Concatenated:
        return replace(self, parts=tuple(part.of(places) for part in self.parts))

    def looked_at(self, kernel: Any) -> Concatenated:
        return replace(self, parts=tuple(part.looked_at(kernel) for part in self.parts))

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        return join([part.covariance(kernel, other) for part in self.parts], -2, event_dim=2)

    def covariance_with_feature(self, kernel: KernelLike, feature: Feature) -> Array:
        return join([part.covariance_with_feature(kernel, feature) for part in self.parts], -1, event_dim=2)

    def variance(self, kernel: KernelLike) -> Array:
        return join([part.variance(kernel) for part in self.parts], -1, event_dim=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InducingFunctionals:
    """Inducing variables that are functionals of f, divided by their prior standard deviations.

    :param functional: the functionals, M rows.
    """

    functional: Functional

    @property
    def num(self) -> int:
        return self.functional.num

    @property
    def dtype(self) -> Any:
        return self.functional.dtype

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        scale = self.functional.scale(kernel)[..., None]
        if other is self:
            return self.functional.matrix(kernel) / scale / jnp.swapaxes(scale, -1, -2)
        if isinstance(other, InducingFunctionals):
            return (
                self.functional.covariance(kernel, other.functional)
                / scale
                / other.functional.scale(kernel)[..., None, :]
            )
        return self.functional.covariance(kernel, other) / scale

    def covariance_with_inputs(self, kernel: KernelLike, X: Array) -> Array:
        return self.functional.covariance_with_inputs(kernel, X) / self.functional.scale(kernel)[..., None]

    def covariance_with_feature(self, kernel: KernelLike, feature: Feature) -> Array:
        """Covariance of another set with these variables, shape (..., M_other, M)."""
        return self.functional.covariance_with_feature(kernel, feature) / self.functional.scale(kernel)[..., None, :]


def concatenate(rows: Sequence[Functional | ArrayLike]) -> Functional:
    """Join functionals of several kinds, for joint distributions and for a y of several kinds.

    ::

        both = concatenate([X, Derivative(X, 0)])  # values, then slopes
        f.joint(both).covariance_matrix            # (2 B, 2 B)

    :param rows: functionals, and inputs of shape (B, D), which stand for values at them.
    :return: a functional with all rows.
    :raises ValueError: if there are none.
    """
    parts: list[Functional] = []
    for part in rows:
        if not isinstance(part, Functional) and hasattr(part, "places"):  # Tasks, which are asked of several functions
            raise TypeError(
                "`concatenate` goes inside of Tasks: Tasks(concatenate([...]), task), a task for each row of all."
            )
        if isinstance(part, Concatenated):
            parts += part.parts
        else:
            parts.append(part if isinstance(part, Functional) else Values(part))  # type: ignore[arg-type]
    if not parts:
        raise ValueError("`concatenate` needs at least one functional, or inputs; got none.")
    return Concatenated(tuple(parts))


def common_places(a: tuple[Place, ...] | None, b: tuple[Place, ...] | None) -> tuple[Place, ...] | None:
    """The summands of both, ``None`` standing for all."""
    if a is None or b is None:
        return b if a is None else a
    return tuple(place for place in a if place in b)
