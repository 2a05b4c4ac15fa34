r"""Predictions that use the inducing variables and also the data near each input.

The exact prediction is an average over the inducing variables u of all sets,

.. math:: p(f_* \mid y) = \int p(f_* \mid u, y) \, p(u \mid y) \, du .

``f(X)`` replaces the second factor by q(u), and the first by :math:`p(f_* \mid u)`, without the data. Here the first factor keeps
the H rows b that are nearest to the input, :math:`p(f_* \mid u, y_b)`. With D the residual's covariance given u, S the noise's
covariance and A the projections,

.. math::
    g &= (D_{bb} + S_b)^{-1} D_{b*}, \qquad h = A_* - A_b g \\
    E f_* &= A_*^\top m + g^\top (y_b - A_b^\top m), \qquad
    \mathrm{Var} f_* = h^\top S_u h + D_{**} - g^\top D_{b*}

for :math:`q(u) = N(m, S_u)` in whitened coordinates. No observation counts twice: with :math:`q(u) = p(u \mid y)` and H = N this is
the exact posterior. If b is a group of rows and q(u) that of PIC, it is the prediction of Snelson and Ghahramani 2007, "Local and
global sparse Gaussian process approximations". For each input it costs O(H M^2 + H^3), and one kernel value for each row of the
data. Many inputs at once cost O(M^2 + H^2 M + H^3) each, as all rows are projected just once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_orthgp.errors import check_floating, check_integer, inspect
from numpyro_orthgp.foreign import check_labels_of_tables
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.groups import covariance_of_groups
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.sites import refuse_while_fitting
from numpyro_orthgp.inducing import Functional, InducingPoints
from numpyro_orthgp.math.blocks import MAX_ENTRIES, map_blocks
from numpyro_orthgp.math.cholesky import rescue_jitter
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.grouped import added_identity, cut_groups, gram_of_groups, group_whitener, solve_groups
from numpyro_orthgp.math.linalg import add_jitter, clip_rounding, jitter_scale, safe_sqrt
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["NeighborFunction", "with_neighbors"]

MAX_PROJECTED = 2**25  # values of the projections of all rows that are held at once
MIN_SEARCHED = 64  # least number of inputs at once, for any number of rows of data


def with_neighbors(
    f: GPFunction, X: ArrayLike, y: ArrayLike, noise: ArrayLike, *, num_neighbors: int = 32
) -> NeighborFunction:
    r"""A fitted function whose predictions also use the outputs observed near each input.

    With too few inducing points predictions become much better; with enough they stay the same. Train with a bound, or with "fitc"
    in groups. Do not train with "fitc" row by row: it treats residuals as independent, so its noise is too small for nearby rows,
    which share a residual. :func:`check` measures the gain for a given fit::

        f = posterior(model, guide, params, X, y)["f"]
        g = with_neighbors(f, X, y, params["noise"])
        likelihoods.Gaussian(g(X_test), params["noise"]).log_predictive(y_test)

    This is for Gaussian noise only. With the residual's covariance D given the inducing variables, the noise's covariance S,
    whitened projections A and :math:`q(u) = N(m, S_u)`, the H nearest rows b give

    .. math:: g = (D_{bb} + S_b)^{-1} D_{b*}, \quad E f_* = A_*^\top m + g^\top (y_b - A_b^\top m), \quad
        \mathrm{Var} f_* = (A_* - A_b g)^\top S_u (A_* - A_b g) + D_{**} - g^\top D_{b*}

    (Snelson and Ghahramani 2007, where b is a group of the data).

    In float32 D has few digits if the points say nearly everything about f. Rounding errors beyond the noise count as noise of the
    rows then, and the prediction goes back to that of f. Use float64 for noise below a hundredth of the signal.

    :param f: a function from :func:`posterior` or ``CollapsedGP(...).posterior(y)``.
    :param X: inputs of the data, shape (N, D).
    :param y: outputs, shape (N,), or (N, P) for P latent functions; NaN where missing. Subtract parts other than f, such as a mean
        function.
    :param noise: standard deviation of the noise, a scalar or an array that broadcasts to the shape of y.
    :param num_neighbors: H. The nearest rows have the largest prior correlation with the input, so lengthscales count.
    :return: a callable that maps inputs (B, D) to :class:`Marginals`.
    :raises TypeError: if ``f`` is not a function of a Gaussian process, or arrays are not floating.
    :raises ValueError: if shapes do not match, y is infinite, the noise is not positive, or a guide is fitting ``f``, within its
        model.
    """
    if not isinstance(f, GPFunction):
        raise TypeError(
            f"`f` must be a function of one gp, from posterior(...) or CollapsedGP.posterior; got {type(f).__name__}. Stacked, "
            "deep and patchwise functions have no neighbours here."
        )
    refuse_while_fitting("with_neighbors", f.fitting or f.residual_scale is not None)
    check_labels_of_tables(("X", "y"), (X, y))
    X = _inputs(f, X)
    y, noise = (check_floating(name, a).astype(X.dtype) for name, a in (("y", y), ("noise", jnp.asarray(noise, float))))
    shape = (len(X),) if f.num_latents is None else (len(X), f.num_latents)
    if y.shape != shape:
        raise ValueError(f"`y` must have the shape {shape} of f(X), an output for each row of X; got {y.shape}.")
    try:
        noise = jnp.broadcast_to(noise, shape)
    except ValueError:
        raise ValueError(
            f"`noise` must be a scalar or broadcast to the shape {shape} of y; got {noise.shape}."
        ) from None
    inspect(_refuse_values, y, noise)
    count = min(check_integer("num_neighbors", num_neighbors), len(X))
    observed = jnp.isfinite(y)
    return NeighborFunction(f, X, jnp.where(observed, y, 0), jnp.where(observed, 1 / noise, 0), count)


def _inputs(f: GPFunction, X: Any) -> Array:
    if isinstance(X, Functional):
        raise TypeError(
            "`X` must be inputs, since neighbours are the training rows nearest to an input; got "
            f"{type(X).__name__}. Predict functionals and terms of f by f itself."
        )
    return f.checked(X)


def _refuse_values(y: Any, noise: Any) -> None:
    if np.isinf(y).any():
        raise ValueError("`y` must be finite, or NaN where there is no output; got infinity.")
    if not (noise > 0).all():
        raise ValueError(f"`noise` must be positive, the noise's standard deviation; got {noise.min()}.")


def nearest_rows(kernel: Any, X: Array, data: Array, num: int, *, seen: Any = True, but: Array | None = None) -> Array:
    """Indices of the ``num`` rows of ``data`` with the largest prior correlation with each input, shape (B, num).

    :param X: inputs, shape (B, D).
    :param data: shape (N, D).
    :param seen: False for rows of ``data`` that do not count, shape (N,).
    :param but: for each input the index of a row that does not count, shape (B,).
    """
    scale = safe_sqrt(kernel(data))

    def of_block(block: tuple[Array, ...]) -> Array:
        X, *but = block
        correlation = jnp.abs(kernel(X, data)) / jnp.where(scale > 0, scale, 1)[..., None, :]
        # Kernels may have an axis for each latent function.
        correlation = jnp.where(seen, correlation.reshape(-1, len(X), len(data)).mean(0), -1)
        for rows in but:
            correlation = correlation.at[jnp.arange(len(X)), rows].set(-1)
        # On CPUs, XLA's top_k is a hundred times as fast in float32 as in float64, and the order of ties does not matter.
        return lax.top_k(correlation.astype(jnp.float32), num)[1]

    return map_blocks(of_block, (X,) if but is None else (X, but), max(MAX_ENTRIES // len(data), MIN_SEARCHED))


def given_rows(kernel: Any, noise: Array, X: Array, near: Array, y: Array) -> tuple[Array, Array]:
    """Mean and variance of f at each input given noisy outputs of rows of its own, shape (B,) each.

    :param noise: standard deviation, a scalar.
    :param X: inputs, shape (B, D).
    :param near: the rows, shape (B, H, D).
    :param y: their outputs, shape (B, H).
    """
    across = jax.vmap(kernel)(X[:, None], near)[:, 0] / noise
    W = group_whitener(added_identity(jax.vmap(kernel)(near, near) / noise**2))
    a, b = (jnp.einsum("nkh,nh->nk", W, r, precision=PRECISION) for r in (across, y / noise))
    return jnp.sum(a * b, -1), clip_rounding(kernel(X) - jnp.sum(a**2, -1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NeighborFunction:
    """The result of :func:`~numpyro_orthgp.with_neighbors`; a pytree.

    :param f: the function.
    :param X: inputs of the data, shape (N, D).
    :param y: outputs, zero where missing.
    :param precision_root: one over the noise's standard deviation, zero where y is missing, shape of y.
    :param num_neighbors: H.
    """

    f: GPFunction
    X: Array
    y: Array
    precision_root: Array
    num_neighbors: int = field(metadata={"static": True})

    def __call__(self, X: ArrayLike) -> Marginals:
        """Marginals at inputs (B, D), of shape (B,) or (B, P). Draws are independent between inputs."""
        return Marginals(*self._moments(_inputs(self.f, X)))

    @one_program
    def _moments(self, X: Array) -> tuple[Array, Array, Array]:
        seen = self.precision_root > 0 if self.y.ndim == 1 else (self.precision_root > 0).any(-1)
        near = nearest_rows(self.f.kernel, X, self.X, self.num_neighbors, seen=seen)
        size, columns = 1 + self.num_neighbors, self.f.num_inducing * (self.f.num_latents or 1)
        held = size * max(columns, size * (self.f.num_latents or 1))
        # Inputs share neighbours: where they have more of them than there are data, each row is projected once.
        shared = len(self.X) < near.size and len(self.X) * columns <= MAX_PROJECTED
        known = self.f.project(self.X) if shared else None
        return map_blocks(
            lambda rows: self._moments_given(rows[0], rows[1], known), (X, near), max(MAX_ENTRIES // held, 1)
        )

    def _moments_given(self, X: Array, near: Array, known: tuple[Array, ...] | None) -> tuple[Array, Array, Array]:
        f, size = self.f, 1 + self.num_neighbors
        rows = jnp.concatenate([X[:, None], self.X[near]], 1).reshape(
            -1, X.shape[-1]
        )  # each input before its neighbours
        A = f.project(rows) if known is None else tuple(map(partial(_with_near, near), f.project(X), known))
        residual = clip_rounding(f.kernel(rows) - sum(jnp.sum(Ai**2, -2) for Ai in A))
        D = covariance_of_groups(f.kernel, rows, gram_of_groups(A, size), residual)
        mean = cut_groups(f.mean_from([InducingPoints(rows)], A), size)
        y, root = (jnp.moveaxis(a[near], -1, 0) if a.ndim == 2 else a[near] for a in (self.y, self.precision_root))

        near_rows = D[..., 1:, 1:]
        near_rows = add_jitter(near_rows, _rounding(near_rows, root, jitter_scale(f.kernel(rows))))
        C = added_identity(root[..., :, None] * near_rows * root[..., None, :])
        across = root * D[..., 1:, 0]
        weights = solve_groups(C, across)
        g = root * weights
        explained = jnp.zeros((), X.dtype)
        for q, Ai in zip(f.beliefs, A, strict=True):
            cut = cut_groups(Ai, size)
            W = q.spread(cut[..., 0] - jnp.einsum("...mbh,...bh->...mb", cut[..., 1:], g, precision=PRECISION))
            explained = explained if W is None else explained + jnp.sum(W**2, -2)
        values = (
            mean[..., 0] + jnp.sum(g * (y - mean[..., 1:]), -1),
            explained,
            # Of second order in errors of the weights, where D** - g' D_b* is of first.
            clip_rounding(D[..., 0, 0] - jnp.sum(weights * (2 * across - _times(C, weights)), -1)),
        )
        mean, explained, residual = (f._columns(jnp.broadcast_to(a, values[0].shape)) for a in values)
        return mean, explained, residual


def _rounding(D: Array, root: Array, scale: Array) -> Array:
    """The noise to be added to covariances (..., n, H, H) of near rows for what rounding has done to them, shape (..., n).

    It is zero where rounding is below the noise of the rows: where D + S / 4 has a Cholesky factor. Elsewhere eigenvalues of D + S
    may be near zero, and weights of rows have no bound.

    :param root: one over the noise's standard deviation, shape (..., n, H).
    :param scale: the size of prior variances, shape (...).
    """
    scale = jnp.broadcast_to(scale[..., None], D.shape[:-2])
    quarter = jnp.where(root > 0, 0.25 / jnp.where(root > 0, root, 1) ** 2, scale[..., None])
    with_noise = D + quarter[..., None] * jnp.eye(D.shape[-1], dtype=D.dtype)
    # In steps from the rounding of one entry on. Ten times what it takes, since weights have errors of that size over the noise.
    step = lax.stop_gradient(scale / D.shape[-1])
    return 10 * step * rescue_jitter(lax.stop_gradient(with_noise), step)


def _with_near(near: Array, new: Array, known: Array) -> Array:
    """Projections (..., M, B) of inputs before those of their neighbours, of all rows (..., M, N): (..., M, B (1 + H))."""
    both = jnp.concatenate([new[..., None], known[..., near]], -1)
    return both.reshape(*new.shape[:-1], -1)


def _times(C: Array, x: Array) -> Array:
    return jnp.einsum("...gh,...h->...g", C, x, precision=PRECISION)
