"""Inducing features: what a set of inducing variables is, seen through two covariances.

A feature answers two questions, its covariance with another feature and with inputs; an array stands for ordinary
inducing points. To add a kind of feature, write a class with these two methods and ``num`` and ``dtype``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from numpyro_orthgp.errors import check_inputs
from numpyro_orthgp.types import Array, ArrayLike, KernelLike

__all__ = ["Feature", "InducingPoints", "MeanOnly", "as_sets", "covariance_of_points", "input_dim"]


@runtime_checkable
class Feature(Protocol):
    """The protocol of a set of inducing variables."""

    @property
    def num(self) -> int:
        """Number of inducing variables M."""
        ...

    @property
    def dtype(self) -> Any:
        """Floating dtype of the inducing variables."""
        ...

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        """Covariance with the variables of another feature, shape (..., M, M_other)."""
        ...

    def covariance_with_inputs(self, kernel: KernelLike, X: Array) -> Array:
        """Covariance with the function at inputs ``X``, shape (..., M, B).

        :param X: shape (B, D); or (P, B, D), where they are another set's points, one set for each latent function.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InducingPoints:
    """Inducing variables that are values of the function: u = f(Z).

    :param points: inputs Z, shape (M, D), same units as the data's inputs; or (P, M, D), points of its own for each of P
        latent functions.
    """

    points: Array

    @property
    def num(self) -> int:
        return self.points.shape[-2]

    @property
    def dtype(self) -> Any:
        return self.points.dtype

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        # Points are inputs, so the other feature already knows the answer, whatever its kind.
        return other.covariance_with_inputs(kernel, self.points).swapaxes(-1, -2)

    def covariance_with_inputs(self, kernel: KernelLike, X: Array) -> Array:
        return covariance_of_points(kernel, self.points, X)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanOnly:
    r"""Points that shape the posterior mean alone (ODVGP, Salimbeni et al. 2018), in the orthogonal complement of all sets.

    Their posterior covariance is the prior's, so they need no Cholesky factor and cost grows linearly in their number H:
    with weights :math:`a`, the mean gains :math:`(k(x, \Gamma) - \sum_i A_i(x)^\top A_i(\Gamma)) a` and the bound loses
    :math:`a^\top C a / 2`.

    :param points: inputs Gamma, shape (H, D) or (P, H, D), same units as the data's inputs.
    :param subsample_size: how many columns of the H x H matrix C enter the penalty at each step; a random choice
        (unbiased) where the model has a random key. ``None`` takes all of them.
    :raises ValueError: if ``subsample_size`` is not between 1 and H.
    """

    points: Array
    subsample_size: int | None = field(default=None, metadata={"static": True})

    @property
    def num(self) -> int:
        return self.points.shape[-2]

    def checked(self, name: str) -> MeanOnly:
        """Self, with its points checked under the name that the user knows them by."""
        points = check_inputs(name, self.points, latents=True)
        size = self.subsample_size
        if size is not None and not 1 <= size <= self.num:
            raise ValueError(
                f"`subsample_size` must be between 1 and H = {self.num}, the number of mean-only points; got {size}."
            )
        return MeanOnly(points, size)


def input_dim(features: Sequence[Feature]) -> int | None:
    """Number of input dimensions D, as inducing points show it; ``None`` if no set is of points."""
    return next((s.points.shape[-1] for s in features if isinstance(s, InducingPoints)), None)


def covariance_of_points(kernel: KernelLike, X1: Array, X2: Array) -> Array:
    """The covariance matrix of two sets of points, either of which may differ between latent functions.

    :param X1: shape (n, D) or (P, n, D).
    :param X2: shape (m, D) or (P, m, D).
    :return: shape (n, m), or (P, n, m) if points or hyperparameters have a leading axis of P.
    :raises ValueError: if the kernel returns another shape, or has hyperparameters for another number of latent functions.
    """
    expected = (X1.shape[-2], X2.shape[-2])
    if X1.ndim == X2.ndim == 2:
        return _check_matrix(kernel(X1, X2), expected)
    P = max(X1.shape, X2.shape, key=len)[0]
    one = [jax.ShapeDtypeStruct(X.shape[-2:], X.dtype) for X in (X1, X2)]
    shape = _check_matrix(jax.eval_shape(kernel, *one), expected).shape
    if shape[:-2] not in ((), (P,)):
        raise ValueError(
            f"The inducing points have a leading axis of {P}, one set of points for each latent function, but the kernel's "
            f"hyperparameters one of {shape[0]}."
        )
    if shape[:-2] == (P,):
        return _check_matrix(kernel(X1, X2), (P, *expected))
    # A kernel without a latent axis of its own may be anything that takes two matrices.
    if X2 is X1:
        return jax.vmap(lambda X: kernel(X, X))(X1)
    return jax.vmap(kernel, in_axes=tuple(0 if X.ndim == 3 else None for X in (X1, X2)))(X1, X2)


def _check_matrix(K: Any, expected: tuple[int, ...]) -> Any:
    if K.shape[-len(expected) :] != expected:
        raise ValueError(
            f"`kernel(X1, X2)` must have shape {expected} for {expected[-2]} and {expected[-1]} inputs, or (P, n, m); "
            f"got {K.shape}. A kernel takes two matrices of inputs, not two points."
        )
    return K


def as_sets(inducing: Any) -> tuple[tuple[Feature, ...], MeanOnly | None]:
    """Read the ``inducing`` argument of :func:`~numpyro_orthgp.gp`.

    :param inducing: an array of shape (M, D) or (P, M, D), a feature, or a list of these, whose last entry may be a
        :class:`MeanOnly`. Sets that all P latent functions share may stand beside sets of their own.
    :return: the features in order, and the mean-only points if there are any.
    :raises ValueError: for an empty list, a wrong shape, a ``MeanOnly`` that is first or not last, or sets that disagree on P.
    :raises TypeError: for entries of another kind, and integer arrays.
    """
    entries: Sequence[Any] = inducing if isinstance(inducing, (list, tuple)) else [inducing]
    if not entries:
        raise ValueError("`inducing` must hold at least one set of inducing points; got an empty list.")
    mean_only = None
    if isinstance(entries[-1], MeanOnly):
        mean_only = entries[-1].checked(f"inducing[{len(entries) - 1}]")
        entries = entries[:-1]
    if not entries:
        raise ValueError(
            "`inducing` must begin with a set of inducing points; got `MeanOnly` alone. Use [Z, MeanOnly(points)]."
        )
    features = tuple(_as_feature(f"inducing[{i}]", entry) for i, entry in enumerate(entries))
    points = [s for s in (*features, mean_only) if isinstance(s, (InducingPoints, MeanOnly))]
    for s in points:
        check_inputs("each set of `inducing`", s.points, dim=points[0].points.shape[-1], latents=True)
    return _with_latents(features, [s.points for s in points if s.points.ndim == 3]), mean_only


def _with_latents(features: tuple[Feature, ...], separate: Sequence[Array]) -> tuple[Feature, ...]:
    """The features, the first of which shows how many latent functions there are if any set of points does."""
    if len({points.shape[0] for points in separate}) > 1:
        raise ValueError(
            "Sets of `inducing` with a leading axis, one set of points for each of P latent functions, must agree on P; got "
            f"shapes {[points.shape for points in separate]}."
        )
    first = features[0]
    if not separate or not isinstance(first, InducingPoints):
        return features
    shared = jnp.broadcast_to(first.points, (separate[0].shape[0], *first.points.shape[-2:]))
    return InducingPoints(shared if first.points.ndim == 2 else first.points), *features[1:]


def _as_feature(name: str, entry: Any | ArrayLike) -> Feature:
    if isinstance(entry, MeanOnly):
        raise ValueError(
            f"`MeanOnly` must come last, and once: a set after it would need the Cholesky factor that it avoids; got it as "
            f"`{name}`. Move it to the end, or join its points into one MeanOnly(jnp.concatenate([...]))."
        )
    if isinstance(entry, (list, tuple, str)) or entry is None:
        raise TypeError(
            f"`{name}` must be an array of shape (M, D) or (P, M, D), or a feature; got {type(entry).__name__}."
        )
    if not hasattr(entry, "shape") and isinstance(entry, Feature):
        return entry
    return InducingPoints(check_inputs(name, entry, latents=True))
