r"""Expectations of kernels under Gaussian inputs: the psi statistics of the Bayesian GP-LVM [1, 2].

For independent inputs :math:`x_b \sim N(\mu_b, \mathrm{diag}(\sigma_b^2))` and fixed points :math:`z_m` they are

.. math::
    \psi^0_b = E[k(x_b, x_b)], \qquad \psi^1_{mb} = E[k(z_m, x_b)], \qquad
    \psi^2_{bmn} = E[k(z_m, x_b)\, k(x_b, z_n)].

**Closed form.** Sums, products, multiples and restrictions to columns of `RBF`, `Linear`, `Constant`, `White` and
``Polynomial(1)`` multiply out to a sum of terms :math:`c \exp(-\frac12 \sum_d p_d (x_d - z_d)^2) \prod_j \sum_d v_{jd} x_d z_d`.
Two of them, at :math:`z` and :math:`z'`, contain the factor :math:`\exp(-\frac12 P x^2 + h x)` in each column, with
:math:`P = p + p'` and :math:`h = p z + p' z'`. Under :math:`N(\mu, \sigma^2)` its expectation is

.. math:: \sqrt{r} \exp\bigl(\tfrac12 (2 r \mu h + \tau h^2 - P r \mu^2)\bigr), \qquad
    r = 1 / (1 + \sigma^2 P), \quad \tau = \sigma^2 r,

and the tilted distribution is :math:`N(r \mu + \tau h, \tau)`. It gives the expectation of the linear factors; each term has at
most one. Nothing divides by :math:`\sigma` or :math:`P`: both may be 0. Squares are multiplied out into products of matrices, so
that no array is larger than the result.

The distance between two independent inputs in a column is also Gaussian, with variance :math:`s^2 = \sigma_a^2 + \sigma_b^2`:

.. math:: E[e^{-\frac12 p (x_a - x_b)^2}] = \sqrt{\varrho}\, e^{-\frac12 p \varrho \delta^2}, \qquad
    \delta = \mu_a - \mu_b, \quad \varrho = 1 / (1 + p s^2),

Under the tilted distribution the means are :math:`\mu_a - \sigma_a^2 p \varrho \delta` and
:math:`\mu_b + \sigma_b^2 p \varrho \delta`, and the covariance is :math:`\sigma_a^2 \sigma_b^2 p \varrho`.

**Quadrature.** All other kernels are evaluated at nodes, as a whole even if only one part has no closed form. By default these are
128 nodes in one column, and 32 in each of two, dense in the middle (:func:`~numpyro_orthgp.math.quadrature.dense_about_zero`):
kernels are not smooth, or vary within an input's standard deviation. If that is at most a lengthscale, psi statistics are off by
2e-4 for `Matern12` and 1e-5 for `Matern32`, at ten lengthscales by 2e-3. For `Periodic` with a lengthscale of one they are off
by 2e-5 if it is 0.3 periods, by 5e-3 at one period (1e-6 in one column), and by 0.06 at three (2e-3). In more columns 1024 Sobol
points, the same in every call, give two or three digits. ``num_points`` asks for a tensor Gauss-Hermite rule, while
``num_points ** D <= 4096``. ``nodes_miss`` in ``functions/expected.py`` compares with many more nodes.

**References:**

1. Titsias, Lawrence. Bayesian Gaussian Process Latent Variable Model. 2010.
2. Damianou, Titsias, Lawrence. Variational Inference for Latent Variables and Uncertain Inputs in Gaussian Processes. 2016.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.kernels.base import Constant, Restricted
from numpyro_orthgp.kernels.hyperparameters import check_inputs, check_value
from numpyro_orthgp.kernels.terms import Term, add, terms
from numpyro_orthgp.kernels.white import White
from numpyro_orthgp.math.distances import middle_of
from numpyro_orthgp.math.products import PRECISION, matmul
from numpyro_orthgp.math.quadrature import dense_about_zero, gauss_hermite, quasi_normal
from numpyro_orthgp.types import Array, ArrayLike, KernelLike, NumPoints

__all__ = [
    "between_rows", "by_quadrature", "covariances", "equal_columns", "gram_of_nodes", "prepare", "psi0", "psi1",
    "psi2",
]  # fmt: skip

_MAX_TENSOR_NODES = 4096
# Per column, by the number of columns, and how far they go; of Sobol points beyond.
_USUAL, _MANY, _REACH = {1: 128, 2: 32}, {1: 1024, 2: 96}, {1: 8.0, 2: 7.0}
_SOBOL_NODES, _MANY_SOBOL_NODES = 1024, 2**13


def psi0(kernel: KernelLike, loc: ArrayLike, scale: ArrayLike, *, num_points: NumPoints = None) -> Array:
    """Expected prior variances, :math:`E[k(x_b, x_b)]`.

    :param kernel: a kernel of one function: no hyperparameter has a leading axis of latent functions.
    :param loc: means of the inputs, shape (B, D).
    :param scale: their standard deviations, shape (B, D); 0 where an input is known.
    :param num_points: Gauss-Hermite nodes per column, for kernels without a closed form; by default other nodes, see above.
    :return: shape (B,).
    :raises TypeError: if inputs are not floating-point arrays.
    :raises ValueError: if shapes do not match, the kernel is one of several functions, or a concrete ``scale`` is negative.
    """
    loc, scale = _check_gaussian(loc, scale)
    _check_single(kernel, loc.shape[:1], "(B,)", loc)
    expansion = terms(kernel, loc.shape[-1], loc.dtype)
    if expansion is None:
        return by_quadrature(lambda w, X: w * kernel(X[0]), loc, scale, num_points, at_once=1)
    second_moments = jnp.square(loc) + jnp.square(scale)
    total = jnp.zeros_like(second_moments[:, 0])
    for term in expansion:
        total = total + term.weight * (matmul(second_moments, term.slopes[0]) if term.slopes else 1)
    return total


def psi1(kernel: KernelLike, Z: ArrayLike, loc: ArrayLike, scale: ArrayLike, *, num_points: NumPoints = None) -> Array:
    """Expected covariances with fixed points, :math:`E[k(z_m, x_b)]`; oriented like ``kernel(Z, X)``.

    `White` noise counts only if it is restricted to some columns, whose inputs may be known. Whole inputs are assumed to differ
    from the points: they almost surely do. This holds even if all inputs are known and equal to the points.

    :param kernel: as for `psi0`, like ``loc``, ``scale``, ``num_points`` and the errors raised.
    :param Z: the points, shape (M, D).
    :return: shape (M, B).
    """
    Z, loc, scale, expansion = prepare(kernel, Z, loc, scale)
    if expansion is None:
        return by_quadrature(lambda w, X: _mean(w, covariances(kernel, Z, X)), loc, scale, num_points, len(Z))
    one = Term(jnp.ones((), Z.dtype))
    total = jnp.zeros((len(loc), len(Z), 1), jnp.result_type(Z, loc, scale))
    for term in expansion:
        total = total + _expected_product(term, one, Z, Z[:1], loc, scale)
    return total[..., 0].T


def psi2(kernel: KernelLike, Z: ArrayLike, loc: ArrayLike, scale: ArrayLike, *, num_points: NumPoints = None) -> Array:
    """Expected products of covariances with fixed points, :math:`E[k(z_m, x_b) k(x_b, z_n)]`; positive semidefinite.

    `White` noise counts as in `psi1`. A sum of T terms costs T (T + 1) / 2 times as much as one.

    :param kernel: as for `psi0`, like ``loc``, ``scale``, ``num_points`` and the errors raised.
    :param Z: the points, shape (M, D).
    :return: shape (B, M, M).
    """
    Z, loc, scale, expansion = prepare(kernel, Z, loc, scale)
    if expansion is None:
        return by_quadrature(lambda w, X: gram_of_nodes(w, covariances(kernel, Z, X)), loc, scale, num_points, len(Z))
    total = jnp.zeros((len(loc), len(Z), len(Z)), jnp.result_type(Z, loc, scale))
    for i, term in enumerate(expansion):
        total = total + _expected_product(term, term, Z, Z, loc, scale)
        for other in expansion[:i]:
            cross = _expected_product(term, other, Z, Z, loc, scale)
            total = total + cross + jnp.swapaxes(cross, -1, -2)
    return total


def between_rows(kernel: KernelLike, loc: ArrayLike, scale: ArrayLike) -> Array:
    """Expected covariances between independent inputs, :math:`E[k(x_a, x_b)]` for a other than b.

    `White` noise counts as in `psi1`: whole inputs are assumed to differ.

    :param kernel: as for `psi0`, like ``loc``, ``scale`` and the errors raised.
    :return: shape (B, B). The diagonal is for two independent inputs of the same distribution; it is not `psi0`.
    :raises ValueError: also for a kernel without a closed form. Quadrature would need nodes for two inputs jointly.
    """
    loc, scale = _check_gaussian(loc, scale)
    D = loc.shape[-1]
    _check_single(kernel, loc.shape[:1], "(B,)", loc)
    expansion = terms(kernel, D, loc.dtype)
    if expansion is None:
        raise ValueError(
            f"The expected covariance between uncertain inputs is known for sums and products of RBF, Linear, Constant and White "
            f"(at most one linear factor in each term); got {type(kernel).__name__}. Leave `group_size` out."
        )
    total = jnp.zeros((len(loc), len(loc)), jnp.result_type(loc, scale))
    for term in expansion:
        if len(term.equal) < D:
            total = total + _expected_between(term, loc, scale)
    return total


# Closed forms


def _expected_between(term: Term, loc: Array, scale: Array) -> Array:
    """The expectation of one term between two independent inputs, shape (B, B)."""
    p = jnp.zeros(loc.shape[-1], loc.dtype) if term.precision is None else term.precision
    variance, away = jnp.square(scale), loc[:, None] - loc  # (B, B, D)
    shrunk = 1 / (1 + p * (variance[:, None] + variance))
    gain = p * shrunk
    value = term.weight * jnp.exp((jnp.log(shrunk) - gain * jnp.square(away)).sum(-1) / 2)
    if term.slopes:
        left = loc[:, None] - variance[:, None] * gain * away
        right = loc + variance * gain * away
        value = value * (term.slopes[0] * (left * right + variance[:, None] * variance * gain)).sum(-1)
    return value * equal_columns(term, loc, loc, scale, scale) if term.equal else value


def _expected_product(s: Term, t: Term, Z1: Array, Z2: Array, loc: Array, scale: Array) -> Array:
    """The expectation of s(z, x) t(z', x) for all z of ``Z1``, shape (M1, D), and z' of ``Z2``: shape (B, M1, M2)."""
    variance, precision = jnp.square(scale), add(s.precision, t.precision)
    r = jnp.ones_like(variance) if precision is None else 1 / (1 + variance * precision)
    tilted = loc, r, variance * r
    value = jnp.broadcast_to(s.weight * t.weight, (len(loc), len(Z1), len(Z2)))
    if precision is not None:
        value = value * jnp.exp(_log_gaussians(s, t, Z1, Z2, *tilted))
    if s.slopes or t.slopes:
        value = value * _linear_factors(s, t, Z1, Z2, *tilted)
    if s.equal:
        value = value * equal_columns(s, Z1, loc, scale)[:, :, None]
    if t.equal:
        value = value * equal_columns(t, Z2, loc, scale)[:, None, :]
    return value


def _log_gaussians(s: Term, t: Term, Z1: Array, Z2: Array, loc: Array, r: Array, tau: Array) -> Array:
    """The logarithm of the expected product of two Gaussian factors, shape (B, M1, M2)."""
    # Centred, so that the cancellation error of squares is relative to the spread of the points (see `math.distances`).
    origin = middle_of(Z1)
    Z1, Z2, loc = Z1 - origin, Z2 - origin, loc - origin
    shrunk = r * loc

    def of_one(h: Array, Z: Array) -> Array:  # the part that depends on one of z and z' only
        return matmul(shrunk, h.T) + (matmul(tau, jnp.square(h).T) - (h * Z).sum(axis=-1)) / 2

    # Absent parts are left out, not multiplied by zero, because contractions cost most of the time.
    h1, h2 = _scaled(s, Z1), _scaled(t, Z2)
    precision = add(s.precision, t.precision)
    squares = 0 if precision is None else precision * shrunk * loc
    total = (jnp.log(r) - squares).sum(axis=-1)[:, None, None] / 2
    if h1 is not None:
        total = total + of_one(h1, Z1)[:, :, None]
    if h2 is not None:
        total = total + of_one(h2, Z2)[:, None, :]
    return total if h1 is None or h2 is None else total + contract(tau, h1, h2)


def _linear_factors(s: Term, t: Term, Z1: Array, Z2: Array, loc: Array, r: Array, tau: Array) -> Array:
    """The expected product of one or two linear factors under the Gaussian factors, shape (B, M1, M2) or one that broadcasts."""
    h1, h2 = _scaled(s, Z1), _scaled(t, Z2)

    def of_one(
        w: Array, h: Array | None
    ) -> Array:  # the factor's mean, w (r mu + tau h), without the other term's part of h
        mean = matmul(r * loc, w.T)
        return mean if h is None else mean + matmul(tau, (w * h).T)

    if s.slopes:
        w1 = s.slopes[0] * Z1
        mean1 = of_one(w1, h1)[:, :, None]
        mean1 = mean1 if h2 is None else mean1 + contract(tau, w1, h2)
    if t.slopes:
        w2 = t.slopes[0] * Z2
        mean2 = of_one(w2, h2)[:, None, :]
        mean2 = mean2 if h1 is None else mean2 + contract(tau, h1, w2)
    if s.slopes and t.slopes:
        return mean1 * mean2 + contract(tau, w1, w2)
    return mean1 if s.slopes else mean2


def _scaled(term: Term, Z: Array) -> Array | None:
    return None if term.precision is None else term.precision * Z


def contract(A: Array, U: Array, V: Array) -> Array:
    """Sum over d of A_bd U_md V_nd, shape (B, M1, M2), as one product of matrices."""
    return jnp.tensordot(A, U.T[:, :, None] * V.T[:, None, :], axes=1, precision=PRECISION)


def equal_columns(term: Term, Z: Array, loc: Array, scale: Array, uncertain: ArrayLike = 0.0) -> Array:
    """The probability, 0 or 1, that inputs and points are equal in the columns that the term requires, shape (B, M).

    :param uncertain: standard deviations of Z, shape (M, D).
    """
    uncertain = jnp.broadcast_to(uncertain, Z.shape)
    equal = jnp.ones((len(loc), len(Z)), bool)
    for d in term.equal:
        equal &= (loc[:, d, None] == Z[:, d]) & (scale[:, d, None] == 0) & (uncertain[:, d] == 0)
    return equal.astype(loc.dtype)


# Quadrature


def by_quadrature(
    partial_sum: Callable[[Array, Array], Array], loc: Array, scale: Array, num_points: NumPoints, at_once: int
) -> Array:
    """Add up ``partial_sum(w, X)`` for groups of nodes: weights w, shape (S,), and inputs X, (S, B, D); S <= ``at_once``."""
    weights, nodes = _nodes(num_points, loc.shape[-1], loc.dtype)
    size = min(at_once, len(weights))
    padding = -len(weights) % size  # by nodes of weight 0
    weights = jnp.pad(weights, (0, padding)).reshape(-1, size)
    nodes = jnp.pad(nodes, ((0, padding), (0, 0))).reshape(-1, size, 1, loc.shape[-1])

    @jax.checkpoint  # recompute kernels in the backward pass: memory does not grow with the number of nodes
    def add(total: Array, group: tuple[Array, Array]) -> tuple[Array, None]:
        return total + partial_sum(group[0], loc + scale * group[1]), None

    result = jax.eval_shape(lambda w, X: partial_sum(w, loc + scale * X), weights[0], nodes[0])
    return lax.scan(add, jnp.zeros(result.shape, result.dtype), (weights, nodes))[0]


def _nodes(num_points: NumPoints, dim: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Weights, shape (S,), and nodes, (S, D), of a rule for N(0, I)."""
    many, tensor = num_points == "many", None
    if isinstance(num_points, str) or num_points is None:
        if dim in _REACH:
            tensor = dense_about_zero((_MANY if many else _USUAL)[dim], _REACH[dim], dim)
    elif num_points**dim <= _MAX_TENSOR_NODES:
        tensor = gauss_hermite(num_points, dim)
    if tensor is not None:
        nodes, weights = tensor
        return jnp.asarray(weights, dtype), jnp.asarray(nodes, dtype)
    num = _MANY_SOBOL_NODES if many else _SOBOL_NODES
    # Always float32, so that both precisions have the same nodes; the many have another shift.
    points = quasi_normal(jax.random.key(int(many)), num, (), dim, jnp.dtype("float32"))
    return jnp.full(num, 1 / num, dtype), points.astype(dtype)


def covariances(kernel: KernelLike, Z: Array, X: Array) -> Array:
    """``k(Z, X)`` at nodes ``X`` of shape (S, B, D), without noise: shape (M, S, B)."""
    # White noise on all columns is removed: a node may equal a point by chance. Noise on some columns stays: they may be known.
    smooth = jax.tree.map(
        lambda part: Constant(0.0) if type(part) is White else part,
        kernel,
        is_leaf=lambda part: type(part) in (White, Restricted),
    )
    return smooth(Z, X.reshape(-1, X.shape[-1])).reshape(len(Z), *X.shape[:-1])  # (M, S, B)


def _mean(weights: Array, K: Array) -> Array:
    return jnp.tensordot(weights, K, axes=(0, 1), precision=PRECISION)  # (M, B)


def gram_of_nodes(weights: Array, K: Array) -> Array:
    """``sum_s weights[s] k(Z, X[s]) k(X[s], Z)`` per input, for ``K`` from :func:`covariances`: shape (B, M, M)."""
    return jnp.einsum("msb,nsb->bmn", K * weights[:, None], K, precision=PRECISION)  # (B, M, M)


def prepare(
    kernel: KernelLike, Z: ArrayLike, loc: ArrayLike, scale: ArrayLike
) -> tuple[Array, Array, Array, tuple[Term, ...] | None]:
    """Checked inputs, and the terms that are not almost surely zero (``None`` without a closed form)."""
    loc, scale = _check_gaussian(loc, scale)
    Z, D = check_inputs("Z", Z), loc.shape[-1]
    if Z.ndim != 2 or Z.shape[-1] != D:
        raise ValueError(f"`Z` must have shape (M, D) with D = {D} to match `loc`; got {Z.shape}. Did you pass Z.T?")
    _check_single(kernel, (len(Z), len(loc)), "(M, B)", Z, loc)
    expansion = terms(kernel, D, jnp.result_type(Z, loc, scale))
    return Z, loc, scale, expansion and tuple(term for term in expansion if len(term.equal) < D)


def _check_gaussian(loc: ArrayLike, scale: ArrayLike) -> tuple[Array, Array]:
    loc, scale = check_inputs("loc", loc), check_inputs("scale", scale)
    if loc.ndim != 2 or scale.shape != loc.shape:
        raise ValueError(f"`loc` and `scale` must have the same shape (B, D); got {loc.shape} and {scale.shape}.")
    check_value("scale", scale, "nonnegative")
    return loc, scale


def _check_single(kernel: KernelLike, expected: tuple[int, ...], letters: str, *inputs: Array) -> None:
    got = jax.eval_shape(lambda: kernel(*inputs)).shape
    if got != expected:
        raise ValueError(
            f"`kernel` must be of one function, with values of shape {letters} = {expected}; got {got}. If a hyperparameter has "
            "a leading axis, one value per latent function, use `jax.vmap` over the kernel."
        )
