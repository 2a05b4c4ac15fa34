"""Principal directions: initial latent inputs, and mean functions of a deep GP's inner layers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from numpyro_orthgp.errors import check_floating, check_inputs
from numpyro_orthgp.init.counts import check_count
from numpyro_orthgp.math.products import matmul
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array

__all__ = ["linear_mean", "pca"]


@broadcasting
def pca(Y: Array, dim: int) -> Array:
    r"""Initial latent inputs of a GP-LVM: scores on the leading principal components, each with unit variance.

    Missing entries (NaN) count as the mean of their column. The scores of a component without variance are zero. The sign of a
    component is chosen so that its largest loading is positive.

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import init
    >>> Y = jnp.array([[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [3.0, jnp.nan, 0.0]])
    >>> init.pca(Y, 1).shape
    (3, 1)

    :param Y: data, shape (N, D). First scale columns with different units.
    :param dim: number of components Q, from 1 to min(N, D).
    :return: shape (N, Q), dtype of ``Y``.
    :raises TypeError: if ``Y`` is not floating-point or ``dim`` not an integer.
    :raises ValueError: if ``Y`` does not have shape (N, D) or contains infinity, or ``dim`` is out of range.

    **References:**
        1. Lawrence. Probabilistic non-linear principal component analysis with Gaussian process latent variable
        models. 2005. Sec. 2.
    """
    missing = jnp.isnan(check_floating("Y", Y))
    Y = check_inputs("Y", jnp.where(missing, 0, Y))
    check_count("dim", dim, min(Y.shape))
    return _pca(Y, missing, int(dim))


@partial(jax.jit, static_argnames="dim")
def _pca(Y: Array, missing: Array, dim: int) -> Array:
    count = jnp.maximum((~missing).sum(axis=0), 1)
    centred = jnp.where(missing, 0, Y - Y.sum(axis=0) / count)
    U, sizes, loadings = jnp.linalg.svd(centred, full_matrices=False)
    U, sizes, loadings = U[:, :dim], sizes[:dim], loadings[:dim]
    largest = jnp.take_along_axis(loadings, jnp.abs(loadings).argmax(axis=1)[:, None], axis=1)[:, 0]
    present = sizes > jnp.finfo(Y.dtype).eps * max(Y.shape) * sizes[0]
    return U * jnp.where(present, jnp.sign(largest), 0) * Y.shape[0] ** 0.5


@broadcasting
def linear_mean(X: Array, dim: int) -> Array:
    r"""The matrix W of the mean function :math:`x \mapsto x W` of a deep GP's inner layer.

    W is the identity if the layer keeps the number of dimensions. If it has fewer, W contains the leading principal directions of
    ``X``; if it has more, the identity next to zeros (Salimbeni and Deisenroth 2017, Sec. 3).

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import init
    >>> X = jnp.array([[-1.0, 0.1], [0.0, -0.2], [1.0, 0.1]])
    >>> print(init.linear_mean(X, 1).tolist(), init.linear_mean(X, 3).tolist())
    [[1.0], [0.0]] [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]

    :param X: inputs of the layer, shape (N, D), standardized.
    :param dim: number P of functions of the layer.
    :return: shape (D, P), dtype of ``X``.
    :raises TypeError: if ``X`` is not floating-point or ``dim`` not an integer.
    :raises ValueError: if ``X`` does not have shape (N, D), or ``dim`` is not positive.
    """
    X = check_inputs("X", X)
    check_count("dim", dim, None)
    D = X.shape[1]
    if dim >= D:
        return jnp.eye(D, dim, dtype=X.dtype)
    centred = X - X.mean(axis=0)
    W = jnp.linalg.eigh(matmul(centred.T, centred))[1][:, ::-1][:, :dim]
    largest = jnp.take_along_axis(W, jnp.abs(W).argmax(axis=0)[None], axis=0)
    return W * jnp.sign(largest)  # signs that do not depend on the machine
