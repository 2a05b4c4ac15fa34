"""Reads the ``inducing`` argument: a set, or a list of sets in the order of their decomposition.

Points that differ between latent functions have shape (P, M, D), like hyperparameters with a leading axis P. A shared first set is
repeated P times if a later set is not shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from numpyro_orthgp.errors import check_inputs
from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.inducing.functional import Functional, InducingFunctionals
from numpyro_orthgp.inducing.points import InducingPoints, MeanOnly
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["as_sets", "input_dim"]


def input_dim(features: Sequence[Feature]) -> int | None:
    """Number of input dimensions D, from inducing points; ``None`` if no set consists of points."""
    return next((s.points.shape[-1] for s in features if isinstance(s, InducingPoints)), None)


def as_sets(inducing: Any) -> tuple[tuple[Feature, ...], MeanOnly | None]:
    """Read the ``inducing`` argument of :func:`~numpyro_orthgp.gp`.

    :param inducing: an array of shape (M, D) or (P, M, D), a feature, or a list of these, whose last entry may be a
        :class:`MeanOnly`. Sets shared by all P latent functions and sets that differ may be combined.
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
    """The features. If any set of points has an axis of latent functions, the first set gets it too."""
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
    if isinstance(entry, Functional):
        return InducingFunctionals(entry.checked(None, entry.dtype))
    if not hasattr(entry, "shape") and isinstance(entry, Feature):
        return entry
    return InducingPoints(check_inputs(name, entry, latents=True))
