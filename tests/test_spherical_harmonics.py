"""Spherical harmonics against the addition theorem and quadrature; bounds with them against dense formulas."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from scipy.special import comb, eval_chebyt, eval_gegenbauer

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp.functions.prior import decompose_sets
from numpyro_orthgp.functions.projection import project
from numpyro_orthgp.inducing import SphericalHarmonics, as_sets
from numpyro_orthgp.math import harmonics as maths
from tests import oracles
from tests.interdomain import features, joint, points

# The angular parts of the arc-cosine kernels on the unit sphere (Cho and Saul 2009, Eqs. 4-6), as functions of the angle.
ANGULAR = [
    lambda a: 1 - a / np.pi,
    lambda a: (np.sin(a) + (np.pi - a) * np.cos(a)) / np.pi,
    lambda a: (3 * np.sin(a) * np.cos(a) + (np.pi - a) * (1 + 2 * np.cos(a) ** 2)) / np.pi,
]
DIMS = [2, 3, 4, 6, 9]
VARIANCE, NOISE = 1.3, 0.4


def polynomial(degree, dim, t):
    """The zonal polynomial with value 1 at 1, from scipy."""
    if dim == 2:
        return eval_chebyt(degree, t)
    alpha = (dim - 2) / 2
    return eval_gegenbauer(degree, alpha, t) / eval_gegenbauer(degree, alpha, 1.0)


def eigenvalue(degree, dim, order):
    """Funk-Hecke by quadrature in the angle, in which everything is smooth."""
    nodes, weights = oracles.legendre(120)
    angle = np.pi * (nodes + 1) / 2
    weights = weights * np.sin(angle) ** (dim - 2)
    return np.sum(weights * ANGULAR[order](angle) * polynomial(degree, dim, np.cos(angle))) / weights.sum()


def sphere(rng, num, dim):
    X = rng.normal(size=(num, dim))
    return X / np.linalg.norm(X, axis=-1, keepdims=True)


def arc_cosine(order, weight=0.7, bias=0.4):
    """The kernel written from its definition."""

    def k(A, B):
        a, b = (np.c_[np.sqrt(weight) * X, np.full(len(X), np.sqrt(bias))] for X in (A, B))
        lengths = np.outer(*(np.linalg.norm(x, axis=1) for x in (a, b)))
        a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
        apart = [np.linalg.norm(a[:, None] - sign * b, axis=-1) for sign in (1, -1)]
        angle = 2 * np.arctan2(*apart)  # arccos would lose half of the digits
        return VARIANCE * lengths**order * ANGULAR[order](angle)

    return k


def kernel_of(order, variance=VARIANCE, weight=0.7, bias=0.4):
    return variance * kernels.ArcCosine(order, weight, bias)


def dense(S, order):
    """Features as the paper has them, K_uu = diag(1 / eigenvalue), K_uf = |x|^n phi(x / |x|), for the scaled kernel."""
    dim = S.num_dims + 1
    degrees = [l for l in range(S.max_degree + 1) if eigenvalue(l, dim, order) > 1e-12]
    sizes = [maths.num_harmonics(l, dim) for l in degrees]
    eigenvalues = VARIANCE * np.repeat([eigenvalue(l, dim, order) for l in degrees], sizes)

    def Kuf(X):
        mapped = np.c_[np.sqrt(0.7) * X, np.full(len(X), np.sqrt(0.4))]
        lengths = np.linalg.norm(mapped, axis=1)
        parts = [maths.zonal_basis(l, dim) for l in degrees]
        unit = mapped / lengths[:, None]
        rows = [W @ polynomial(l, dim, eta @ unit.T) for l, (eta, W) in zip(degrees, parts, strict=True)]
        return lengths**order * np.concatenate(rows)

    return joint(arc_cosine(order), np.diag(1 / eigenvalues), Kuf), features(0, sum(sizes), S.num_dims)


@jax.jit
def ask(S, kernel, X):
    """The two questions."""
    return S.covariance(kernel, S), S.covariance_with_inputs(kernel, X)


# ---------------------------------------------------------------- mathematics


@pytest.mark.parametrize("dim", DIMS)
def test_number_of_harmonics_spans_all_polynomials(dim):
    """On the sphere, polynomials up to degree l are the homogeneous ones of degrees l and l - 1."""
    counts = np.cumsum([maths.num_harmonics(l, dim) for l in range(8)])
    homogeneous = np.array([comb(l + dim - 1, l, exact=True) for l in range(8)])
    np.testing.assert_array_equal(counts[1:], homogeneous[1:] + homogeneous[:-1])


@pytest.mark.parametrize("dim", DIMS)
def test_polynomials(dim):
    t = np.linspace(-1, 1, 41)
    for degree in (0, 1, 2, 5, 20):
        np.testing.assert_allclose(maths.gegenbauer(degree, dim, t), polynomial(degree, dim, t), atol=1e-13)


@pytest.mark.parametrize("dim, degree", [(2, 0), (2, 9), (3, 1), (3, 12), (4, 6), (6, 4), (9, 3)])
def test_harmonics_are_orthonormal(rng, dim, degree):
    """The addition theorem, which characterizes orthonormal bases."""
    X = sphere(rng, 3 * maths.num_harmonics(degree, dim), dim)
    phi, N = np.asarray(maths.harmonics(degree, jnp.asarray(X))), maths.num_harmonics(degree, dim)
    zonal = N * polynomial(degree, dim, np.clip(X @ X.T, -1, 1))
    np.testing.assert_allclose(phi.T @ phi, zonal, atol=1e-11 * N)
    assert np.linalg.matrix_rank(phi) == N
    single = np.asarray(maths.harmonics(degree, jnp.asarray(X, jnp.float32)))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single.T @ single, zonal, atol=2e-5 * N)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("dim", DIMS)
def test_eigenvalues(dim, order):
    ours = [maths.arc_cosine_eigenvalue(l, dim, order) for l in range(30)]
    np.testing.assert_allclose(ours, [eigenvalue(l, dim, order) for l in range(30)], rtol=1e-9, atol=2e-14)
    zero = [l for l, value in enumerate(ours) if value == 0]
    assert zero == [l for l in range(order + 1, 30) if (l - order) % 2 == 0]


@pytest.mark.parametrize("order", [0, 1, 2])
def test_eigenvalues_add_up_to_the_variance(order):
    """On the circle two harmonics each: the tail past degree 4000 is below its integral, 1 / 4000^(2 n + 1)."""
    total = sum(maths.num_harmonics(l, 2) * maths.arc_cosine_eigenvalue(l, 2, order) for l in range(4000))
    np.testing.assert_allclose(total, [1, 1, 3][order], rtol=4000.0 ** -(2 * order + 1) + 1e-12)


# ---------------------------------------------------------------- features


@pytest.mark.parametrize("D, order", [(1, 0), (2, 1), (3, 2)])
def test_covariances_are_those_of_the_definition(rng, D, order):
    S, X = SphericalHarmonics(D, 5, order=order), rng.normal(size=(6, D))
    k, rows = dense(S, order)
    Kuu, Kuf = ask(S, kernel_of(order), jnp.asarray(X))
    scale = np.sqrt(VARIANCE / np.diag(k(rows, rows)))
    assert len(rows) == S.num
    np.testing.assert_allclose(Kuu, VARIANCE * np.eye(S.num), atol=1e-14)
    np.testing.assert_allclose(Kuf, scale[:, None] * k(rows, points(X)), rtol=1e-10, atol=1e-11)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2), st.floats(0.01, 30), st.floats(0.01, 30), st.integers(0, 2**32 - 1))
def test_what_features_explain_never_exceeds_the_prior(order, weight, bias, seed):
    X = np.random.default_rng(seed).normal(size=(9, 2))
    _, Kuf = ask(SphericalHarmonics(2, 4, order=order), kernel_of(order, VARIANCE, weight, bias), X)
    K = arc_cosine(order, weight, bias)(X, X)
    assert np.linalg.eigvalsh(K - Kuf.T @ Kuf / VARIANCE).min() > -1e-9 * np.diag(K).max()


@pytest.mark.parametrize(
    "D, order, degrees", [(1, 0, (8, 18, 38)), (1, 1, (8, 16, 32)), (2, 1, (6, 12)), (1, 2, (9, 19, 39))]
)
def test_more_degrees_approach_the_kernel(rng, D, order, degrees):
    """Twice the degree divides what is left by 2^(2n + 1), as the eigenvalues fall."""
    X = rng.normal(size=(12, D))
    K, left = arc_cosine(order)(X, X), []
    for degree in degrees:
        Kuf = SphericalHarmonics(D, degree, order=order).covariance_with_inputs(kernel_of(order), jnp.asarray(X))
        left.append(np.diag(K - Kuf.T @ Kuf / VARIANCE))
        assert np.abs(K - Kuf.T @ Kuf / VARIANCE).max() <= left[-1].max() * (1 + 1e-9)
    for coarse, fine in pairwise(left):
        assert (fine < coarse).all()
        np.testing.assert_allclose(coarse.max() / fine.max(), 2 ** (2 * order + 1), rtol=0.3)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_without_bias_the_origin_has_finite_gradients(order):
    S, X = SphericalHarmonics(2, 4, order=order), jnp.asarray([[0.0, 0.0], [1.0, -0.5]])

    def total(X, weight):
        return S.covariance_with_inputs(kernels.ArcCosine(order, weight, 0.0), X).sum()

    assert all(jnp.isfinite(g).all() for g in jax.jit(jax.grad(total, (0, 1)))(X, 0.7))


def test_gradients(rng):
    S, X = SphericalHarmonics(2, 4), jnp.asarray(rng.normal(size=(4, 2)))

    def f(variance, weight, bias, X):
        return ask(S, kernel_of(1, variance, weight, bias), X)

    check_grads(
        f,
        (jnp.asarray(1.2), jnp.asarray([0.5, 1.3]), jnp.asarray(0.3), X),
        order=1,
        modes=["rev"],
        atol=1e-6,
        rtol=1e-6,
    )


def test_hyperparameters_of_each_latent_function(rng):
    S, X = SphericalHarmonics(2, 4, order=2), jnp.asarray(rng.normal(size=(5, 2)))
    v, w, b = jnp.asarray([0.8, 1.7]), jnp.asarray([[0.5], [1.1]]), jnp.asarray([0.2, 0.9])
    apart = [kernel_of(2, *p) for p in zip(v, w, b, strict=True)]
    for together, *each in zip(ask(S, kernel_of(2, v, w, b), X), *(ask(S, k, X) for k in apart), strict=True):
        np.testing.assert_allclose(together, jnp.stack(each), rtol=1e-12, atol=1e-13)


def test_lower_degrees_are_the_first_features():
    few, many = SphericalHarmonics(2, 2), SphericalHarmonics(2, 4)
    np.testing.assert_array_equal(few.covariance(kernel_of(1), many), VARIANCE * np.eye(9, 18))
    both = kernel_of(1).on([0, 1]) + kernel_of(0).on([1, 2])
    other = SphericalHarmonics(2, 3, order=0)
    np.testing.assert_array_equal(few.covariance(both, other), np.zeros((9, other.num)))


def test_a_feature_is_static_data_of_compiled_functions():
    S = SphericalHarmonics(2, 4, order=np.int64(1))
    assert not jax.tree.leaves(S) and jax.tree.map(lambda x: x, S) == S and hash(S) == hash(SphericalHarmonics(2, 4))


# ---------------------------------------------------------------- bounds


def test_points_as_second_set_take_up_the_rest(rng):
    X, Z = rng.normal(size=(8, 2)), rng.normal(size=(5, 2))
    S = SphericalHarmonics(2, 4)
    k, rows = dense(S, 1)

    @jax.jit
    def residual(kernel, sets, X):
        blocks = decompose_sets(kernel, sets, 0.0)
        return kernel(X, X) - sum(a.T @ a for a in project(blocks, [s.covariance_with_inputs(kernel, X) for s in sets]))

    tagged = np.concatenate([rows, points(Z)])
    expected = arc_cosine(1)(X, X) - k(points(X), tagged) @ np.linalg.solve(k(tagged, tagged), k(tagged, points(X)))
    np.testing.assert_allclose(residual(kernel_of(1), as_sets([S, Z])[0], X), expected, atol=1e-9)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_collapsed_bound_is_the_dense_one(rng, order):
    X = rng.normal(size=(20, 2))
    y, S = np.sin(2 * X[:, 0]) + X[:, 1], SphericalHarmonics(2, 4, order=order)
    k, rows = dense(S, order)
    log_prob = jax.jit(lambda X, y: ogp.CollapsedGP(kernel_of(order), X, S, NOISE, jitter=0.0).log_prob(y))
    np.testing.assert_allclose(log_prob(X, y), oracles.titsias2025(k, points(X), y, rows, NOISE**2), rtol=1e-9)


def test_float32(rng):
    X = rng.normal(size=(100, 2))
    y, bounds = np.sin(2 * X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=100), []
    for dtype in (np.float32, np.float64):
        S = SphericalHarmonics(2, 12, dtype=dtype)
        kernel = kernel_of(1, dtype(1.3), dtype(0.7), dtype(0.4))
        log_prob = jax.jit(lambda X, y, S=S, k=kernel: ogp.CollapsedGP(k, X, S, X.dtype.type(0.1)).log_prob(y))
        bounds.append(log_prob(jnp.asarray(X, dtype), jnp.asarray(y, dtype)))
        assert bounds[-1].dtype == dtype
    np.testing.assert_allclose(*bounds, atol=0.02)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        ((0, 3), {}, ValueError, "`num_dims` must be a positive integer; got 0"),
        ((2, 1.5), {}, ValueError, "`max_degree` must be an integer of at least 0; got 1.5"),
        ((2, 3), {"order": 3}, ValueError, "`order` must be 0, 1 or 2"),
        ((2, 3), {"dtype": int}, TypeError, "`dtype` must be a floating dtype; got int64"),
        ((8, 8), {}, ValueError, "There are 12879 harmonics up to degree 8 for inputs with D = 8; at most 2048"),
    ],
    ids=["no_dims", "fraction", "order", "dtype", "too_many"],
)
def test_errors_of_construction(args, options, error, message):
    with pytest.raises(error, match=message):
        SphericalHarmonics(*args, **options)


@pytest.mark.parametrize(
    "kernel, message",
    [
        (kernels.RBF(1.0), r"exactly one term ArcCosine\(order=1\); got no such terms"),
        (kernels.ArcCosine(0), r"exactly one term ArcCosine\(order=1\); got no such terms"),
        (kernels.ArcCosine(1).on([0, 1]) + kernels.ArcCosine(1).on([1, 2]), "got 2 such terms"),
        (kernels.ArcCosine(1), r"SphericalHarmonics\(num_dims=2, ...\) need .* D = 2 columns of the inputs; it sees 3"),
    ],
    ids=["other_kernel", "other_order", "several", "columns"],
)
def test_errors_of_kernels(kernel, message):
    with pytest.raises(ValueError, match=message):
        ogp.CollapsedGP(kernel, jnp.ones((4, 3)), SphericalHarmonics(2, 3), 0.1).log_prob(jnp.ones(4))


def test_unknown_features_are_refused():
    class Other:
        num, dtype = 1, np.dtype(float)

    with pytest.raises(TypeError, match="covariance of SphericalHarmonics with Other is not known"):
        SphericalHarmonics(2, 3).covariance(kernel_of(1), Other())
