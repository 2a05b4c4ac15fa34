"""Checks of the arguments of `CollapsedGP`: compatible options, and shapes of noise and outputs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.collapsed.bounds import BOUNDS, GROUPED
from numpyro_orthgp.errors import check_finite, check_floating, check_integer, check_option, inspect, is_concrete
from numpyro_orthgp.foreign import check_labels_of_rows
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.inducing import Feature
from numpyro_orthgp.types import Array

__all__ = [
    "MAX_CONDITIONAL", "check_block_size", "check_bound", "check_columns", "check_given", "check_group_size", "check_loc",
    "check_noise", "check_observed", "check_outputs",
]  # fmt: skip

# The "conditional" bound holds N x N matrices.
MAX_CONDITIONAL = 5000


def check_bound(bound: str, alpha: Any, N: int, num_sets: int, given: bool, uncertain: bool) -> float:
    """Check the bound against the other options; return alpha (1 for bounds without alpha).

    :raises ValueError: if they are incompatible.
    """
    check_option("bound", bound, BOUNDS)
    if (bound == "pep") != (alpha is not None):
        raise ValueError(f"`alpha` belongs to bound='pep', which needs it; got bound={bound!r} and alpha={alpha!r}.")
    if alpha is not None and not is_concrete(alpha):
        raise ValueError(
            "`alpha` is an option of the bound, so it must be a number that is known where the program is traced, such as 0.5; got "
            f"an array of jit, vmap, grad or a site, {alpha!r}. Compare a few values in a loop of Python."
        )
    if alpha is not None and not 0 < alpha <= 1:
        raise ValueError(f"`alpha` must be in (0, 1]: near 0 is titsias2009, 1 is fitc; got {alpha!r}.")
    if bound == "conditional" and N > MAX_CONDITIONAL:
        raise ValueError(
            f"bound='conditional' holds N x N matrices and takes O(N^2 M) time: at most N = {MAX_CONDITIONAL}; got {N}. Use "
            "'titsias2025', which needs O(N M)."
        )
    if bound in ("fitc", "dtc", "pep") and num_sets > 1:
        raise ValueError(
            f"bound={bound!r} is no lower bound, and is known for one set of inducing points only; got {num_sets} "
            "sets. Join them, or use 'titsias2009' or 'titsias2025'."
        )
    if bound == "conditional" and num_sets > 1 and not given:
        raise ValueError(
            "bound='conditional' with several sets needs a q for each set after the first: "
            "orthogonal=numpyro_orthgp.orthogonal(name, O)."
        )
    if uncertain and (bound in ("conditional", "fitc", "pep") or given):
        what = "sets whose q is given by `orthogonal`" if given else f"bound={bound!r}"
        raise ValueError(
            f"If the guide gives latent inputs a Gaussian, {what} has no closed form; use 'titsias2009' or "
            "'titsias2025' without `orthogonal`, or a guide that passes draws only (analytic=False)."
        )
    return 1.0 if alpha is None else float(alpha)


def check_group_size(group_size: Any, bound: str, N: int) -> int | None:
    """The number of points in a group, at most N; or ``None``.

    :raises ValueError: for anything else, or if the bound has no groups.
    """
    if group_size is None:
        return None
    if bound not in GROUPED:
        raise ValueError(f"`group_size` belongs to the bounds {', '.join(map(repr, GROUPED))}; got bound={bound!r}.")
    return min(check_integer("group_size", group_size), N)


def check_given(given: Sequence[Whitened] | None, features: Sequence[Feature]) -> None:
    """Check that the given Gaussians match the further sets.

    :raises ValueError, TypeError: if they do not.
    """
    if given is None:
        return
    if not all(isinstance(q, Whitened) for q in given):
        raise TypeError("`orthogonal` must be what numpyro_orthgp.orthogonal(name, sets) returns.")
    sizes, expected = [q.loc.shape[-1] for q in given], [s.num for s in features[1:]]
    if sizes != expected:
        raise ValueError(
            f"`orthogonal` must hold a q for each set after the first, of sizes {expected}; got sizes {sizes}. "
            "Pass the same sets to orthogonal() and to CollapsedGP."
        )


def check_noise(noise_scale: Any, N: int) -> Array:
    """The noise's standard deviation, shape (), (N, 1), (1, D) or (N, D).

    :raises ValueError: for another shape or a concrete value that is not positive.
    """
    noise = check_finite("noise_scale", check_floating("noise_scale", noise_scale))
    inspect(_refuse_no_noise, noise)
    if noise.ndim == 1 and noise.shape != (1,):
        if noise.shape[0] != N:
            raise ValueError(
                f"`noise_scale` must have shape (), (N,), (N, D) or (1, D) with N = {N} points; got {noise.shape}. For one per "
                "output use noise_scale[None, :]."
            )
        return noise[:, None]
    if noise.ndim > 2 or (noise.ndim == 2 and noise.shape[0] not in (1, N)):
        raise ValueError(f"`noise_scale` must have shape (), (N,), (N, D) or (1, D) with N = {N}; got {noise.shape}.")
    return noise


def _refuse_no_noise(noise: Array) -> None:
    if (np.asarray(noise) <= 0).any():
        raise ValueError(f"`noise_scale` must be positive, a standard deviation; got {float(noise.min())}.")


def check_observed(observed: Any, N: int) -> Array | None:
    """The mask of observations, shape (N, 1) or (N, D), or ``None``.

    :raises TypeError, ValueError: if it is not a boolean array of such a shape.
    """
    if observed is None:
        return None
    observed = jnp.asarray(observed)
    if observed.dtype != bool:
        raise TypeError(
            f"`observed` must be boolean, True where y was observed; got {observed.dtype}. Use ~numpy.isnan(y)."
        )
    if observed.ndim not in (1, 2) or observed.shape[0] != N:
        raise ValueError(f"`observed` must have shape (N,) or (N, D) with N = {N}; got {observed.shape}.")
    return observed[:, None] if observed.ndim == 1 else observed


def check_loc(loc: Any, N: int) -> Array:
    """The prior mean, shape (), (N,), (1, D) or (N, D).

    :raises ValueError: for another shape.
    """
    loc = jnp.asarray(loc)
    if loc.ndim > 2 or (loc.ndim == 1 and loc.shape != (N,)) or (loc.ndim == 2 and loc.shape[0] not in (1, N)):
        raise ValueError(f"`loc` must have shape (), (N,), (N, D) or (1, D) with N = {N}; got {loc.shape}.")
    return loc


def check_columns(num_outputs: int | None, parts: dict[str, Array | None]) -> int | None:
    """The number D of outputs, if known, from the user or from the columns of a part.

    :raises ValueError: if these disagree.
    """
    for name, x in parts.items():
        columns = x.shape[1] if x is not None and x.ndim == 2 else 1
        if columns > 1 and num_outputs not in (None, columns):
            raise ValueError(f"`{name}` has one column for each of {columns} outputs, but there are {num_outputs}.")
        num_outputs = columns if columns > 1 else num_outputs
    return num_outputs


def check_block_size(block_size: Any) -> int | None:
    """A positive number of rows, or ``None``.

    :raises ValueError: for anything else.
    """
    if block_size is None:
        return None
    if isinstance(block_size, bool) or not hasattr(block_size, "__index__") or operator.index(block_size) < 1:
        raise ValueError(f"`block_size` must be a positive number of rows, or None; got {block_size!r}.")
    return operator.index(block_size)


def check_outputs(y: Any, N: int, num_outputs: int | None, observed: Array | None, labels: Any = None) -> Array:
    """y as an array of shape (N,) or (N, D), finite where it is observed.

    :param labels: of the rows of X, if it is a table.
    :raises TypeError, ValueError: if it is not.
    """
    check_labels_of_rows("y", getattr(y, "index", None), "X", labels)
    y = check_floating("y", y)
    shapes = {(N,)} | ({(N, num_outputs)} if num_outputs else {(N, *y.shape[1:2])})
    if num_outputs and num_outputs > 1:
        shapes.discard((N,))
    if y.shape not in shapes:
        expected = f"(N, {num_outputs})" if num_outputs else "(N,) or (N, D)"
        raise ValueError(f"`y` must have shape {expected} with N = {N}, one row per input; got {y.shape}.")
    if observed is not None:
        y = jnp.where(observed if y.ndim == 2 else observed[:, 0], y, 0)
    try:
        return check_finite("y", y)
    except ValueError as error:
        where = " where it counts as observed" if observed is not None else ""
        raise ValueError(
            f"{error} Say which entries are there{where}: CollapsedGP(..., observed=~numpy.isnan(y))."
        ) from None
