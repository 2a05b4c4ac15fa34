"""Intrinsic coregionalization: the covariance between tasks, for a column of the inputs that holds the task index."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_orthgp.errors import check_integer, inspect
from numpyro_orthgp.kernels.base import Kernel
from numpyro_orthgp.kernels.hyperparameters import as_array, hyperparameter
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.products import matmul
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Coregion"]


class Coregion(Kernel):
    r"""Covariance between T tasks: :math:`k(i, j) = (W W^\top + \mathrm{diag}(\kappa))_{ij}` for task indices i, j in 0..T-1.

    One column of the inputs holds the index, a whole number in a floating dtype. The product with a kernel of the other columns is
    the intrinsic model of coregionalization [1, 2]. Any (input, task) pair may be observed::

        Matern52(lengthscale).on([0, 1]) * Coregion(W, kappa).on(2)

    If every task is observed at the same inputs, ``f(X) @ W.T`` with ``num_latents=R`` is the same prior (for
    :math:`\kappa = 0`) at less cost.

    Concrete indices outside of 0..T-1 raise an error. Under ``jit`` their covariances are NaN, and so are losses.
    The derivative with respect to the inputs is zero, so inducing points keep their initial tasks when they are learned.

    :param W: loadings of the tasks on R independent functions, any sign, shape (T, R) or (P, T, R). Changing the sign of a
        column of W, or rotating the columns, does not change the kernel. Start from different columns: equal columns, such as
        zeros, get equal gradients.
    :param kappa: variance of each task's own part, shape (), (T,) or (P, T). With the default, zero, T tasks have rank R.
    :raises ValueError: if W contains NaN or infinity, or kappa a negative number; when called, for other shapes, more than one
        column, or indices outside of 0..T-1.

    **References:**

    1. Bonilla, Chai, Williams. Multi-task Gaussian Process Prediction. 2008. Eq. 1.
    2. Alvarez, Rosasco, Lawrence. Kernels for Vector-Valued Functions: a Review. 2012. Sec. 4.2.
    """

    W: ArrayLike
    kappa: ArrayLike = hyperparameter(0.0, zero=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in jax.tree.leaves(self.W):
            inspect(_refuse_infinite, part)

    @classmethod
    def exchangeable(cls, num: int, correlation: ArrayLike) -> Coregion:
        r"""Categories with the same correlation between any two: :math:`k(i, j) = \rho + (1 - \rho) [i = j]`.

        The kernel has variance 1, and one parameter for any number of categories. Use it for a column with many levels or few rows
        per level. A level that training has not seen is predicted from what all levels have in common. In a product, each category
        has its own function, and :math:`\rho` is the correlation between functions::

            Matern52(lengthscale).on([0, 1]) * Coregion.exchangeable(num, correlation).on(2)

        :param num: T, the largest number of categories.
        :param correlation: :math:`\rho` in [0, 1], shape () or (P,).
        :raises ValueError: if ``num`` is not a positive integer, or a concrete correlation is outside of [0, 1].
        """
        T = check_integer("num", num)
        for part in jax.tree.leaves(correlation):
            inspect(_refuse_no_correlation, part)
        rho = jnp.asarray(correlation)
        rho = rho if jnp.issubdtype(rho.dtype, jnp.floating) else rho.astype(float)
        W = jnp.broadcast_to(safe_sqrt(rho)[..., None, None], (*rho.shape, T, 1))
        return cls(W, jnp.broadcast_to(1 - rho[..., None], (*rho.shape, T)))

    def matrix(self, X1: Array, X2: Array) -> Array:
        task1, loadings1, kappa1 = self._tasks(X1)
        task2, loadings2, _ = (task1, loadings1, kappa1) if X2 is X1 else self._tasks(X2)
        same = task1[..., :, None] == task2[..., None, :]
        return matmul(loadings1, jnp.swapaxes(loadings2, -1, -2)) + jnp.where(same, kappa1[..., :, None], 0)

    def diagonal(self, X: Array) -> Array:
        _, loadings, kappa = self._tasks(X)
        return jnp.sum(loadings**2, axis=-1) + kappa

    def _tasks(self, X: Array) -> tuple[Array, Array, Array]:
        """The task of each input, shape (..., n), its loadings, (..., n, R), and its kappa, (..., n)."""
        W, kappa = as_array(self.W, X.dtype), as_array(self.kappa, X.dtype)
        if W.ndim not in (2, 3) or 0 in W.shape:
            raise ValueError(f"`W` must have shape (T, R) or (P, T, R), a row for each task; got {W.shape}.")
        T = W.shape[-2]
        if kappa.ndim > 2 or (kappa.ndim > 0 and kappa.shape[-1] != T):
            raise ValueError(
                f"`kappa` must have shape (), (T,) or (P, T) with T = {T} to match `W`; got {kappa.shape}."
            )
        if X.shape[-1] != 1:
            raise ValueError(
                f"Coregion needs one column, the index of the task; got {X.shape[-1]}. Did you mean Coregion(W, kappa).on(column)?"
            )
        inspect(partial(_refuse_unknown, T), X)
        task = lax.stop_gradient(X[..., 0])
        # Products with one-hot rows are exact, broadcast over latent functions, and need no scatter in the backward pass.
        chosen = (task[..., None] == jnp.arange(T, dtype=X.dtype)).astype(X.dtype)  # (..., n, T)
        known = chosen.any(-1)
        loadings = jnp.where(known[..., None], matmul(chosen, W), jnp.nan)
        kappa = jnp.broadcast_to(kappa, (*kappa.shape[:-1], T))
        return task, loadings, jnp.where(known, matmul(chosen, kappa[..., None])[..., 0], jnp.nan)


def _refuse_no_correlation(correlation: ArrayLike) -> None:
    values = np.asarray(correlation, float)
    bad = values[~((values >= 0) & (values <= 1))]
    if bad.size:
        raise ValueError(f"`correlation` must be in [0, 1]; got {bad.flat[0]}.")


def _refuse_infinite(W: ArrayLike) -> None:
    if not np.isfinite(np.asarray(W, float)).all():
        raise ValueError(f"`W` must be finite; got {W}.")


def _refuse_unknown(T: int, X: Array) -> None:
    tasks = np.asarray(X)
    bad = tasks[~np.isin(tasks, np.arange(T))]
    if bad.size:
        raise ValueError(
            f"Task indices must be whole numbers in 0..{T - 1}, one for each row of `W`; got {bad[0]}. Does "
            "`.on(...)` name the column of tasks? An average of task indices is no task: take inducing points "
            "from init.kmeans(..., categories=[column]), or from rows of X (init.greedy_variance)."
        )
