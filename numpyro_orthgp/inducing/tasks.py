"""The long format: each row belongs to one task, and names the function that it sees.

Each row sees a weighted sum of a few functions. With T independent functions it sees one. With outputs that mix L functions by W
(the linear model of coregionalization) it sees L, for any number of tasks, and one more if each task also has its own function
(the intrinsic model with :math:`\\kappa`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_finite, check_floating, check_inputs, check_same_dtype, inspect
from numpyro_orthgp.inducing.functional import Functional
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Chosen", "Tasks"]


class Chosen(NamedTuple):
    """The K functions that each row sees: K - 1 that all rows see and one that the row names, or K that all rows see.

    :param shared: number of functions that all rows see, which are the first ones of f.
    :param own: index of the further function of each row, shape (B,), integers; ``None`` if there is none.
    :param weights: weights of all these, shape (B, K); ``None`` for a single function with weight 1.
    :param known: mask of the rows with a valid task, shape (B,).
    """

    shared: int
    own: Array | None
    weights: Array | None
    known: Array

    def functions(self, B: int) -> Array:
        """Index of each function that a row sees, shape (B, K)."""
        shared = jnp.broadcast_to(jnp.arange(self.shared), (B, self.shared))
        return shared if self.own is None else jnp.column_stack([shared, self.own])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Tasks:
    r"""Rows of several tasks, one task per row: the argument of ``f(...)`` in the long format.

    With T independent functions, ``num_latents=T``, each row sees one::

        f = gp("f", kernel, Z, num_latents=T)
        numpyro.sample("y", likelihoods.Gaussian(f(Tasks(X, task)), noise[task]), obs=y)

    With ``mixing`` W each row sees its task's mixture of L functions, :math:`\sum_l W_{l t} f_l(x)`. This is the linear model of
    coregionalization, which ``f(X) @ W`` evaluates for all tasks. With ``own`` it also sees a function of its task,
    :math:`s_t f_{L + t}(x)`; then f has L + T functions. If all have one kernel, this is the intrinsic model with covariance
    :math:`W^\top W + \mathrm{diag}(s^2)` between tasks, which :class:`~numpyro_orthgp.kernels.Coregion` provides for one function
    of (input, task).

    Marginals have shape (B,). A row costs as much as the functions that it sees: B M kernel values and B M^2 products for each of
    K = 1, L or L + 1 functions. Parameters that differ between tasks are indexed by the task, ``noise[task]``. A draw draws all
    functions at all rows.

    >>> import jax.numpy as jnp, numpyro
    >>> from numpyro_orthgp import Tasks, gp, kernels
    >>> X, task = jnp.linspace(0.0, 1.0, 6)[:, None], jnp.array([0, 2, 1, 1, 0, 2])
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     f = gp("f", kernels.RBF(0.3), X[::2], num_latents=3)
    ...     each, every = f(Tasks(X, task)), f(X)
    >>> each.shape, every.shape
    ((6,), (6, 3))
    >>> bool(jnp.allclose(each.mean, every.mean[jnp.arange(6), task], atol=1e-5))
    True

    :param X: inputs, shape (B, D); or a functional of B rows, such as ``Derivative(X, 0)`` or ``f.term("trend").at(X)``.
    :param task: index of each row's task, 0..T-1, shape (B,), or () for all rows; integers, or whole numbers of a floating dtype,
        such as a column of a table.
    :param mixing: W, shape (L, T); ``None`` for independent functions.
    :param own: with ``mixing``, standard deviations s of each task's own function, shape () or (T,); ``None`` for no such function.
    :raises TypeError: when used, if arrays have wrong dtypes, or f is a single function.
    :raises ValueError: when used, for wrong shapes, other numbers of functions than f has, or invalid tasks. Under ``jit`` tasks
        cannot be checked: rows with an invalid task have mean NaN, so losses are NaN.
    """

    X: ArrayLike | Functional
    task: ArrayLike
    mixing: ArrayLike | None = None
    own: ArrayLike | None = None

    places: ClassVar[None] = None  # error messages recognize a functional by it

    @property
    def num(self) -> int:
        return self.X.num if isinstance(self.X, Functional) else jnp.shape(self.X)[0]

    def __len__(self) -> int:
        return self.num

    def checked(self, dim: int | None, dtype: Any) -> Tasks:
        """Self, with rows and tasks as arrays of full shape.

        :param dim: number of input dimensions, if known.
        :param dtype: dtype of the inducing variables.
        """
        if isinstance(self.X, Functional):
            X: Any = self.X.checked(dim, dtype)
        else:
            X = check_same_dtype("X", check_inputs("X", self.X, dim=dim), dtype)
        task = self.task if isinstance(self.task, jax.Array) else np.asarray(self.task)
        if task.dtype.kind in "OSU":
            raise TypeError(
                f"`task` must hold indices of tasks, 0, 1, ...; got names or objects, such as {np.ravel(task)[0]!r}. Names become "
                "indices by numpy.unique(names, return_inverse=True)."
            )
        task = jnp.asarray(task)
        if not (jnp.issubdtype(task.dtype, jnp.integer) or jnp.issubdtype(task.dtype, jnp.floating)):
            raise TypeError(f"`task` must hold indices of tasks, 0, 1, ...; got an array of {task.dtype}.")
        if task.shape not in ((), (len(X),)):
            hint = " Did you mean task[:, 0]?" if task.shape == (len(X), 1) else ""
            raise ValueError(f"`task` must have shape () or (B,) = {(len(X),)} to match `X`; got {task.shape}.{hint}")
        return replace(self, X=X, task=jnp.broadcast_to(task, (len(X),)))

    def chosen(self, num_latents: int | None, dtype: Any) -> Chosen:
        """The functions of f that each row sees; call :meth:`checked` first.

        :param num_latents: P, number of functions of f.
        """
        if num_latents is None:
            raise TypeError(
                "Tasks(X, task) needs a function for each task, gp(..., num_latents=T), or functions to mix; f is a single one. Of "
                "one function of input and task, kernels.Coregion(W, kappa).on(column) reads the task from a column of the "
                "inputs: f(jnp.column_stack([X, task]))."
            )
        W, own = self._mixture(num_latents, dtype)
        T = num_latents if W is None else W.shape[1]
        index, known = _index(jnp.asarray(self.task), T)
        if W is None:
            return Chosen(0, index, None, known)
        if own is None:
            return Chosen(len(W), None, W.T[index], known)
        weights = jnp.concatenate([W.T[index], own[index][:, None]], 1)
        return Chosen(len(W), len(W) + index, weights, known)

    def _mixture(self, P: int, dtype: Any) -> tuple[Array | None, Array | None]:
        if self.mixing is None:
            if self.own is not None:
                raise ValueError("`own` goes with `mixing`: functions of each task, beside what all tasks mix.")
            return None, None
        W = check_finite("mixing", check_floating("mixing", self.mixing)).astype(dtype)
        if W.ndim != 2 or 0 in W.shape:
            raise ValueError(f"`mixing` must have shape (L, T), L functions mixed to T tasks; got {W.shape}.")
        own = None
        if self.own is not None:
            own = check_finite("own", check_floating("own", self.own)).astype(dtype)
            if own.shape not in ((), W.shape[1:]):
                raise ValueError(f"`own` must have shape () or (T,) = {W.shape[1:]}; got {own.shape}.")
            own = jnp.broadcast_to(own, W.shape[1:])
        needed = W.shape[0] + (0 if own is None else W.shape[1])
        if P != needed:
            hint = " Did you pass mixing.T?" if own is None and P == W.shape[1] else ""
            of = f"L = {W.shape[0]}" if own is None else f"L + T = {needed}"
            raise ValueError(
                f"`mixing` of shape (L, T) = {W.shape} needs a function with num_latents={needed}, {of}; got {P}.{hint}"
            )
        return W, own


def _index(task: Array, T: int) -> tuple[Array, Array]:
    """Tasks as integers in 0..T-1, and a mask of those that were valid."""
    inspect(partial(_refuse_unknown, T), task)
    rounded = jnp.round(task) if jnp.issubdtype(task.dtype, jnp.floating) else task
    known = (rounded == task) & (task >= 0) & (task < T)
    return jnp.where(known, rounded, 0).astype(jnp.int32), known


def _refuse_unknown(T: int, task: Array) -> None:
    tasks = np.asarray(task)
    bad = np.flatnonzero(~np.isin(tasks, np.arange(T)))
    if bad.size:
        raise ValueError(
            f"`task` must hold whole numbers in 0..{T - 1}, one of T = {T} tasks for each row; got {tasks[bad[0]]} at row "
            f"{bad[0]}, {bad.size} such rows in all. Names of tasks become indices by numpy.unique(names, return_inverse=True)."
        )
