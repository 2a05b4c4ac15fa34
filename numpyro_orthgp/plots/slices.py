"""Slices of the inputs: some dimensions vary, the others are fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_inputs
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.inducing import input_dim
from numpyro_orthgp.plots.dims import check_dims, dimension_names, padded_range
from numpyro_orthgp.plots.points import all_points

__all__ = ["Slice", "check_data", "slice_inputs"]


@dataclass(frozen=True)
class Slice:
    """Some dimensions of D, and the values of the others.

    :param dims: the dimensions that vary.
    :param at: values of all dimensions, those of ``dims`` unused, shape (D,).
    :param reference: points to take ranges from, shape (n, D), or ``None``.
    :param names: names of the D dimensions.
    :param remark: how the values of the others were chosen; empty if there are no others.
    :param dtype: dtype of the inputs of the function.
    """

    dims: tuple[int, ...]
    at: np.ndarray
    reference: np.ndarray | None
    names: tuple[str, ...]
    remark: str
    dtype: Any

    @property
    def complete(self) -> bool:
        """Whether all dimensions vary."""
        return len(self.dims) == len(self.at)

    def positions(self, grid: Any, which: int, num: int, name: str = "grid") -> np.ndarray:
        """Positions along the varying dimension ``which``: the given ones, or ``num`` between given limits or those of the points.

        :raises ValueError: for another shape, limits not in order, or if no limits are known.
        """
        if grid is None:
            if self.reference is None:
                raise ValueError(
                    f"`{name}` is needed where there are neither `data` nor inducing points to take it from."
                )
            return np.linspace(*padded_range(self.reference[:, self.dims[which]]), num)
        values = np.asarray(grid, float)
        values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        if values.ndim != 1 or len(values) < 2 or not np.isfinite(values).all():
            raise ValueError(
                f"`{name}` must be limits (low, high), or finite positions of shape (G,) with G > 2; got shape {values.shape}."
            )
        if not (np.diff(values) > 0).all():
            raise ValueError(f"`{name}` must increase; got {values[:2]} at its beginning. Sort it.")
        return np.linspace(values[0], values[1], num) if len(values) == 2 else values

    def inputs(self, *moving: np.ndarray) -> jax.Array:
        """Inputs whose varying dimensions have these values, each of shape (G,); shape (G, D)."""
        X = np.tile(self.at, (len(moving[0]), 1))
        X[:, self.dims] = np.stack(moving, -1)
        return jnp.asarray(X, self.dtype)

    def label(self, which: int) -> str:
        return self.names[self.dims[which]]

    def label_with_remark(self, which: int) -> str:
        return f"{self.label(which)}\n({self.remark})" if self.remark else self.label(which)


def slice_inputs(
    f: Any,
    num: int,
    dims: Sequence[int] | None,
    *,
    X: np.ndarray | None = None,
    at: Any = None,
    names: Sequence[str] | None = None,
) -> Slice:
    """The slice of a function along ``num`` dimensions.

    :param dims: the dimensions that vary; ``None`` if the function has no others.
    :param X: inputs of the data, shape (N, D).
    :param at: values of the other dimensions, shape (D,); by default the median of the data, or else of the inducing points.
    """
    D = _input_dim(f, X, at, names) or num
    if dims is None and D != num:
        wanted = "dim=0" if num == 1 else "dims=(0, 1)"
        raise ValueError(
            f"The function has D = {D} input dimensions, of which this picture shows {num}: say which, for example {wanted}; "
            "the others stay where `at` puts them."
        )
    dims = check_dims(tuple(range(num)) if dims is None else tuple(dims), D, num)
    reference, source = X, "data"
    if X is None:
        reference, source = all_points(f), "inducing points"
    values, remark = _others(D, dims, at, reference, source, dimension_names(names, D))
    dtype = f.features[0].dtype if isinstance(f, GPFunction) else jnp.result_type(float if X is None else X.dtype)
    return Slice(dims, values, reference, dimension_names(names, D), remark, dtype)


def check_data(data: Any, f: Any, output: int | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Inputs (N, D) and outputs (N,) from ``data=(X, y)``; two ``None`` for ``None``.

    :raises TypeError: if it is not a pair, or X not floating.
    :raises ValueError: if shapes do not match.
    :raises IndexError: if y has no such column.
    """
    if data is None:
        return None, None
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(f"`data` must be a pair (X, y); got {type(data).__name__}.")
    dim = input_dim(f.features) if isinstance(f, GPFunction) else None
    X, y = np.asarray(check_inputs("data[0]", data[0], dim=dim)), np.asarray(data[1])
    if y.ndim == 2 and output is not None:
        if not -y.shape[1] <= output < y.shape[1]:
            raise IndexError(f"`output` must lie in 0..{y.shape[1] - 1}, the columns of data[1]; got {output}.")
        y = y[:, output]
    if y.shape != (len(X),):
        hint = " Pick a column with `output`." if y.ndim == 2 else ""
        raise ValueError(f"`data[1]` must have shape ({len(X)},) to match data[0]; got {y.shape}.{hint}")
    return X, y


def _input_dim(f: Any, X: np.ndarray | None, at: Any, names: Sequence[str] | None) -> int | None:
    known = input_dim(f.features) if isinstance(f, GPFunction) else None
    if known is None and X is not None:
        return X.shape[1]
    said: Any = at if at is not None else names
    return len(said) if known is None and np.ndim(said) == 1 else known


def _others(
    D: int, dims: tuple[int, ...], at: Any, reference: np.ndarray | None, source: str, names: tuple[str, ...]
) -> tuple[np.ndarray, str]:
    """Values of all dimensions, and a remark on those that do not move."""
    rest = [d for d in range(D) if d not in dims]
    if at is not None:
        values = np.array(at, float)
        if values.shape != (D,):
            raise ValueError(f"`at` must have shape ({D},), a value for each input dimension; got {values.shape}.")
        shown = [f"{names[d]} = {values[d]:.3g}" for d in rest]
        return values, ", ".join(shown) if len(shown) <= 3 else "others as given"
    if not rest:
        return np.zeros(D), ""
    if reference is None:
        raise ValueError(f"`at` of shape ({D},) is needed where there are neither `data` nor inducing points.")
    return np.median(reference, 0), f"others at the median of the {source}"
