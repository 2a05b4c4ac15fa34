"""Kernels against a double loop over the textbook formulas, finite differences, and each other."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_orthgp import kernels
from numpyro_orthgp.kernels import (
    RBF,
    ArcCosine,
    Constant,
    Kernel,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    RationalQuadratic,
    White,
)
from numpyro_orthgp.math.distances import middle_of, squared_distance, squared_distance_by_differences

D = 3
LENGTHSCALE = np.array([0.7, 1.3, 2.1])
WEIGHTS = np.array([0.5, 1.2, 0.9])


def _radius(x, y, lengthscale=LENGTHSCALE):
    return math.sqrt(sum(((a - b) / s) ** 2 for a, b, s in zip(x, y, lengthscale, strict=True)))


def _dot(x, y, offset=0.0):
    return sum(w * a * b for w, a, b in zip(WEIGHTS, x, y, strict=True)) + offset


def _periodic(x, y, period=(1.7, 2.3, 0.9)):
    terms = (math.sin(math.pi * (a - b) / p) ** 2 / s**2 for a, b, p, s in zip(x, y, period, LENGTHSCALE, strict=True))
    return math.exp(-2 * sum(terms))


def _arccosine(order, x, y, bias=0.8):
    norm_x, norm_y = math.sqrt(_dot(x, x, bias)), math.sqrt(_dot(y, y, bias))
    angle = 0.0 if x is y else math.acos(min(1.0, max(-1.0, _dot(x, y, bias) / (norm_x * norm_y))))
    angular = (
        math.pi - angle,
        math.sin(angle) + (math.pi - angle) * math.cos(angle),
        3 * math.sin(angle) * math.cos(angle) + (math.pi - angle) * (1 + 2 * math.cos(angle) ** 2),
    )[order]
    return (norm_x * norm_y) ** order * angular / math.pi


def _matern(order, r):
    s = math.sqrt(order) * r
    return {1: 1, 3: 1 + s, 5: 1 + s + s**2 / 3}[order] * math.exp(-s)


# name -> (kernel made from arrays of a dtype, the formula for two points)
CASES = {
    "rbf": (lambda a: RBF(a(LENGTHSCALE)), lambda x, y: math.exp(-(_radius(x, y) ** 2) / 2)),
    "rbf_scalar": (lambda a: RBF(0.8), lambda x, y: math.exp(-(_radius(x, y, 3 * [0.8]) ** 2) / 2)),
    "matern12": (lambda a: Matern12(a(LENGTHSCALE)), lambda x, y: _matern(1, _radius(x, y))),
    "matern32": (lambda a: Matern32(a(LENGTHSCALE)), lambda x, y: _matern(3, _radius(x, y))),
    "matern52": (lambda a: Matern52(a(LENGTHSCALE)), lambda x, y: _matern(5, _radius(x, y))),
    "rational_quadratic": (
        lambda a: RationalQuadratic(a(LENGTHSCALE), a(0.7)),
        lambda x, y: (1 + _radius(x, y) ** 2 / 1.4) ** -0.7,
    ),
    "periodic": (lambda a: Periodic(a(LENGTHSCALE), a([1.7, 2.3, 0.9])), _periodic),
    "linear": (lambda a: Linear(a(WEIGHTS)), _dot),
    "polynomial": (lambda a: Polynomial(3, a(WEIGHTS), a(0.9)), lambda x, y: _dot(x, y, 0.9) ** 3),
    "arccosine0": (lambda a: ArcCosine(0, a(WEIGHTS), a(0.8)), functools.partial(_arccosine, 0)),
    "arccosine1": (lambda a: ArcCosine(1, a(WEIGHTS), a(0.8)), functools.partial(_arccosine, 1)),
    "arccosine2": (lambda a: ArcCosine(2, a(WEIGHTS), a(0.8)), functools.partial(_arccosine, 2)),
    "constant": (lambda a: Constant(a(0.3)), lambda x, y: 0.3),
    "white": (lambda a: White(a(0.3)), lambda x, y: 0.3 * float(np.array_equal(x, y))),
    "sum": (
        lambda a: a(1.5) * Matern32(a(LENGTHSCALE)) + Linear(a(WEIGHTS)),
        lambda x, y: 1.5 * _matern(3, _radius(x, y)) + _dot(x, y),
    ),
    "product": (
        lambda a: RBF(a(LENGTHSCALE)) * Polynomial(1, a(WEIGHTS), a(0.9)) * a(0.4),
        lambda x, y: 0.4 * math.exp(-(_radius(x, y) ** 2) / 2) * _dot(x, y, 0.9),
    ),
    "on": (
        lambda a: Matern52(a([0.7, 2.1])).on([2, 0]) + 2,
        lambda x, y: 2 + _matern(5, _radius([x[2], x[0]], [y[2], y[0]], [0.7, 2.1])),
    ),
}
STATIONARY = [RBF, Matern12, Matern32, Matern52, RationalQuadratic]
# Derivatives with respect to inputs do not exist where inputs coincide, or are checked on their own.
SMOOTH = [name for name in CASES if name != "white"]

every_case = pytest.mark.parametrize("name", CASES)


def make(name, dtype=jnp.float64) -> Kernel:
    return CASES[name][0](lambda value: jnp.asarray(value, dtype))


@pytest.fixture
def X(rng):
    return rng.standard_normal((6, D))


@pytest.fixture
def X2(rng):
    return np.random.default_rng(1).standard_normal((4, D))


def loop(name, X1, X2):
    formula = CASES[name][1]
    return np.array([[formula(x, y) for y in X2] for x in X1])


@jax.jit
def matrix_and_diagonal(kernel, X, X2):
    return kernel(X, X2), kernel(X)


@jax.jit
def square_and_diagonal(kernel, X):
    return kernel(X, X), kernel(X)


# --- values ---


@every_case
def test_matrix_and_diagonal_are_the_textbook_formula(name, X, X2):
    kernel = make(name)
    assert kernel(X, X2).dtype == kernel(X).dtype == jnp.float64
    np.testing.assert_allclose(kernel(X, X2), loop(name, X, X2), rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(kernel(X, X), loop(name, list(X), list(X)), rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(kernel(X), np.diag(loop(name, list(X), list(X))), rtol=1e-12)


@every_case
def test_float32_stays_float32(name, X, X2):
    K, k = matrix_and_diagonal(make(name, jnp.float32), np.float32(X), np.float32(X2))
    assert K.dtype == k.dtype == jnp.float32
    np.testing.assert_allclose(K, loop(name, X, X2), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(k, np.diag(loop(name, list(X), list(X))), rtol=1e-5)


@every_case
def test_diagonal_equals_that_of_the_matrix(name, rng):
    X = 5 * rng.standard_normal((20, D))
    same, copied, diagonal = jax.jit(lambda kernel, X, copy: (kernel(X, X), kernel(X, copy), kernel(X)))(
        make(name), X, X
    )
    scale = np.abs(diagonal).max()
    np.testing.assert_allclose(np.diagonal(same), diagonal, rtol=0, atol=1e-12 * scale)
    np.testing.assert_allclose(np.diagonal(copied), diagonal, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("cls", STATIONARY)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_diagonal_of_stationary_is_exactly_one(cls, dtype, rng):
    for num_dims in (1, 4, 9):
        X = (100 + 30 * rng.standard_normal((30, num_dims))).astype(dtype)
        K, diagonal = square_and_diagonal(cls(0.01), X)
        assert (np.asarray(diagonal) == 1).all()
        assert (np.diagonal(K) == 1).all()


@every_case
def test_positive_semidefinite(name, rng):
    X = rng.standard_normal((12, D))
    X[3] = X[0]
    K = np.asarray(square_and_diagonal(make(name), X)[0])
    np.testing.assert_allclose(K, K.T, rtol=1e-12, atol=1e-14)
    assert np.linalg.eigvalsh((K + K.T) / 2).min() > -1e-12 * np.trace(K)


def test_batched_inputs_broadcast(rng):
    A, B = rng.standard_normal((2, 1, 5, D)), rng.standard_normal((3, 4, D))
    for name in CASES:
        kernel = make(name)
        K, k, expected = jax.jit(lambda kernel: (kernel(A, B), kernel(A), kernel(A[1, 0], B[2])))(kernel)
        assert K.shape == (2, 3, 5, 4) and k.shape == (2, 1, 5), name
        np.testing.assert_allclose(K[1, 2], expected, rtol=1e-9, atol=1e-12)


def test_far_from_the_origin_digits_are_kept(rng):
    for num_dims in (1, 6):
        X = rng.standard_normal((8, num_dims)).astype(np.float32)
        for cls in STATIONARY:
            value = jax.jit(cls(1.0))
            near, far = value(X, X), value(X + np.float32(1024), X + np.float32(1024))
            np.testing.assert_allclose(near, far, atol=1e-3)  # inputs themselves are rounded by 1e-4


def test_distances_by_products_and_differences_agree(rng):
    for num_dims in (1, 3, 4, 40):
        A, B = rng.standard_normal((2, 7, num_dims)), rng.standard_normal((5, num_dims))
        scale = rng.uniform(0.5, 2.0, num_dims)
        expected = (((A[:, :, None] - B) / scale) ** 2).sum(-1)
        A, B, scale = map(jnp.asarray, (A, B, scale))
        np.testing.assert_allclose(squared_distance(A, B, scale), expected, rtol=1e-11)
        np.testing.assert_allclose(squared_distance_by_differences(A, B, scale), expected, rtol=1e-12)


@pytest.mark.parametrize("span", [10.0, 100.0, 1000.0])
def test_distances_by_products_round_by_the_square_of_the_span(rng, span):
    """What docs/guide/trouble.md says of long inputs in float32."""
    A, B = rng.uniform(0, 1, (2, 200, 4)) * [span, 1, 1, 1]
    B[:100] = A[:100] + 0.01 * rng.standard_normal((100, 4))
    A, B = A.astype(np.float32), B.astype(np.float32)
    exact = ((A.astype(float)[:, None] - B.astype(float)) ** 2).sum(-1)
    error = np.abs(squared_distance(jnp.asarray(A), jnp.asarray(B), jnp.float32(1.0)) - exact).max()
    assert error < 4e-7 * (1 + span**2)
    by_differences = squared_distance_by_differences(jnp.asarray(A), jnp.asarray(B), jnp.float32(1.0))
    np.testing.assert_allclose(by_differences, exact, rtol=1e-6)


@pytest.mark.parametrize("far", [1e4, 1e9])
@pytest.mark.parametrize("kernel", [RBF(1.0), Matern52(1.0), Periodic(1.0, 3.0)])
def test_a_row_far_from_all_others_costs_these_no_digits(rng, kernel, far):
    """The mean of the rows was the origin; one row moved it, and the other rows' norms became as large."""
    Z, X = (jnp.asarray(rng.standard_normal((n, 4)), jnp.float32) for n in (30, 20))
    for row in (0, 10, 19):
        value = jax.jit(kernel)(Z, X.at[row, 1].set(far))
        np.testing.assert_allclose(jnp.delete(value, row, 1), jnp.delete(kernel(Z, X), row, 1), atol=1e-6)
    alone = kernel(X.at[10, 1].set(far), Z)
    np.testing.assert_allclose(jnp.delete(alone, 10, 0), jnp.delete(kernel(X, Z), 10, 0), atol=2e-6)


def test_the_middle_of_points(rng):
    points = rng.standard_normal((3, 50, 2))
    points[0, [0, -1]] = 1e30, -1e30
    assert (np.abs(middle_of(jnp.asarray(points))) < 2).all()
    for few in (1, 2, 5):
        found = np.asarray(middle_of(jnp.asarray(points[1, :few])))
        assert all(found[d] in points[1, :few, d] for d in range(2))
    assert middle_of(jnp.zeros((0, 2))).shape == (2,)
    assert (jax.grad(lambda x: middle_of(x).sum())(jnp.ones((9, 2))) == 0).all()


def test_matern12_gradient_in_many_dimensions(rng):
    A, B = jnp.asarray(rng.standard_normal((3, 10))), jnp.asarray(rng.standard_normal((4, 10)))
    W = rng.standard_normal((3, 4))

    def naive(A, B, s):
        return (W * jnp.exp(-jnp.sqrt((((A[:, None] - B) / s) ** 2).sum(-1)))).sum()

    def ours(A, B, s):
        return (W * Matern12(s)(A, B)).sum()

    gradients = [jax.jit(jax.grad(f, argnums=(0, 1, 2)))(A, B, jnp.ones(10)) for f in (ours, naive)]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_arccosine_of_antipodal_and_zero_vectors():
    X = jnp.array([[1.0, 2.0], [-1.0, -2.0], [0.0, 0.0]])
    K0 = ArcCosine(0, bias_variance=0.0)(X, X)
    np.testing.assert_allclose(K0, [[1, 0, 0.5], [0, 1, 0.5], [0.5, 0.5, 1]], atol=1e-15)
    K1 = ArcCosine(1, bias_variance=0.0)(X, X)
    np.testing.assert_allclose(K1, [[5, 0, 0], [0, 5, 0], [0, 0, 0]], atol=1e-14)
    for order in (0, 1, 2):
        kernel = ArcCosine(order, bias_variance=jnp.array(0.0))
        gradients = jax.jit(jax.jacobian(lambda k, A, B: k(A, B), argnums=(0, 1, 2)))(kernel, X, X)
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


# --- derivatives ---


def directional(function, args, rng, step=1e-6):
    """A random directional derivative of a function of a pytree: reverse mode, forward mode, finite difference."""
    tangents = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(jnp.shape(a))), args)
    function = jax.jit(function)
    gradient = jax.jit(jax.grad(function))(args)
    reverse = sum(jnp.vdot(g, t) for g, t in zip(*map(jax.tree.leaves, (gradient, tangents)), strict=True))
    forward = jax.jit(lambda args, tangents: jax.jvp(function, (args,), (tangents,))[1])(args, tangents)

    def moved(h):
        return function(jax.tree.map(lambda a, t: a + h * t, args, tangents))

    return reverse, forward, (moved(step) - moved(-step)) / (2 * step)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_finite_differences(name, X, X2, rng):
    W, w = rng.standard_normal((6, 4)), rng.standard_normal(6)

    def function(args):
        kernel, A, B = args
        return (W * kernel(A, B)).sum() + (w * kernel(A)).sum()

    kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), make(name))
    reverse, forward, numeric = directional(function, (kernel, jnp.asarray(X), jnp.asarray(X2)), rng)
    np.testing.assert_allclose(reverse, forward, rtol=1e-10)
    np.testing.assert_allclose(reverse, numeric, rtol=1e-6, atol=1e-8)


@every_case
def test_gradient_of_the_square_matrix(name, X, rng):
    # K(X, X) from one array takes another path (the diagonal is exact): it must agree with K(X, copy of X).
    W = rng.standard_normal((6, 6))
    kernel = make(name)
    same = jax.jit(jax.grad(lambda X: (W * kernel(X, X)).sum()))(jnp.asarray(X))
    both = jax.jit(jax.grad(lambda A, B: (W * kernel(A, B)).sum(), argnums=(0, 1)))(jnp.asarray(X), X)
    np.testing.assert_allclose(same, both[0] + both[1], rtol=1e-9, atol=1e-10)


@every_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_gradients_are_finite_at_coincident_points(name, dtype, X):
    kernel, A = make(name, dtype), X.astype(dtype)
    B = A[[0, 1, 1, 3, 4, 5]]  # two equal rows, others equal to those of A

    @jax.jit
    def jacobians(kernel, A, B):
        both = jax.jacobian(lambda k, A, B: k(A, B), argnums=(0, 1, 2))(kernel, A, B)
        return both, jax.jacobian(lambda A: kernel(A, A))(A)

    kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), kernel)
    for leaf in jax.tree.leaves(jacobians(kernel, A, B)):
        assert leaf.dtype == dtype
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_hessians_are_finite_at_coincident_points(name, dtype, X):
    kernel, A = make(name, dtype), X[:3].astype(dtype)
    B = A.copy()
    assert np.isfinite(jax.jit(jax.hessian(lambda A: kernel(A, B).sum()))(A)).all()


@pytest.mark.parametrize("num_dims", [2, 7])  # differences, products
@pytest.mark.parametrize(("cls", "curvature"), [(RBF, 1.0), (Matern32, 3.0), (Matern52, 5 / 3)])
def test_hessian_at_a_coincident_pair_is_right(cls, curvature, num_dims, rng):
    A = jnp.asarray(rng.standard_normal((1, num_dims)))
    mixed = jax.jit(jax.jacfwd(jax.jacrev(lambda a, b: cls(0.5)(a, b)[0, 0], argnums=0), argnums=1))
    np.testing.assert_allclose(mixed(A, A + 0)[0, :, 0, :], curvature / 0.25 * np.eye(num_dims), rtol=1e-6, atol=1e-7)


def test_matern12_gradient_at_a_coincident_pair_is_zero():
    A = jnp.array([[0.3, -0.2]])
    slopes = jax.jit(jax.grad(lambda A, B, s: Matern12(s)(A, B).sum(), argnums=(0, 1, 2)))(A, A, jnp.ones(2))
    for leaf in jax.tree.leaves(slopes):
        assert (np.asarray(leaf) == 0).all()


@pytest.mark.parametrize("num_dims", [1, 3, 4, 9])
@pytest.mark.parametrize("cls", [*STATIONARY, lambda s: ArcCosine(0, 1 / s**2)])
def test_compiled_value_and_gradient_at_coincident_points(cls, num_dims, rng):
    # Compilers fuse and recompute: equal points must stay equal, and no stand-in for 1 / 0 may reach the value.
    for dtype, tolerance in ((jnp.float32, 2e-5), (jnp.float64, 1e-12)):
        A = rng.standard_normal((9, num_dims)).astype(dtype)
        B = np.concatenate([A, rng.standard_normal((4, num_dims)).astype(dtype)])
        scale = rng.uniform(0.3, 3.0, num_dims).astype(dtype)

        def function(A, B, scale, variance):
            K = variance * cls(scale)(A, B)
            return (K * jnp.eye(*K.shape, dtype=K.dtype)).sum(), K

        gradient = jax.jit(jax.grad(function, argnums=(0, 1, 2, 3), has_aux=True))
        (dA, dB, dscale, dvariance), K = gradient(A, B, scale, jnp.ones((), dtype))
        np.testing.assert_allclose(np.diagonal(K), 1, rtol=tolerance)
        np.testing.assert_allclose(dvariance, 9, rtol=tolerance)
        for leaf in (dA, dB, dscale):
            np.testing.assert_allclose(leaf, 0, atol=100 * tolerance)


def test_white_has_no_gradient_in_the_inputs(X):
    gradient = jax.grad(lambda X: White(0.3)(X, X).sum() + White(0.3)(X).sum())(jnp.asarray(X))
    assert (gradient == 0).all()


# --- pytrees, transformations, batches ---


@every_case
def test_pytree_round_trip_jit_and_vmap(name, X, X2):
    kernel = make(name)
    leaves, structure = jax.tree.flatten(kernel)
    again = jax.tree.unflatten(structure, leaves)
    np.testing.assert_array_equal(again(X, X2), kernel(X, X2))
    jitted = jax.jit(lambda k, A, B: (k(A, B), k(A)))(kernel, X, X2)
    np.testing.assert_allclose(jitted[0], kernel(X, X2), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(jitted[1], kernel(X), rtol=1e-12)
    stacked = jax.tree.map(lambda a: jnp.stack([jnp.asarray(a), jnp.asarray(a) * 2]), kernel)
    mapped = jax.jit(jax.vmap(lambda k: k(X, X2)))(stacked)
    for i in range(2):
        one = jax.tree.map(lambda a, i=i: a[i], stacked)
        np.testing.assert_allclose(mapped[i], one(X, X2), rtol=1e-9, atol=1e-14)


@every_case
def test_unflatten_takes_anything(name):
    kernel = make(name)
    _, structure = jax.tree.flatten(kernel)
    for leaf in (object(), None, -1.0, float("nan"), "text"):
        jax.tree.unflatten(structure, [leaf] * structure.num_leaves)
    negative = jax.tree.map(lambda a: -a, kernel)  # a gradient, say
    assert jax.tree.structure(negative) == structure
    assert "Kernel" in Kernel.__name__ and type(kernel).__name__ in repr(kernel)


def test_paths_of_leaves_are_field_names():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(2.0 * Periodic())]
    assert paths == [".kernel.lengthscale", ".kernel.period", ".variance"]


P = 2
BATCHES = {
    "rbf": lambda s: RBF(s([[0.7, 1.3, 2.1], [1.0, 0.5, 0.8]])),
    "rbf_p1": lambda s: RBF(s([[0.7], [1.5]])),
    "matern12": lambda s: Matern12(s([[0.7, 1.3, 2.1], [1.0, 0.5, 0.8]])),
    "matern52_scaled": lambda s: s([1.5, 0.2]) * Matern52(s([[0.7], [1.5]])),
    "scaled_only": lambda s: s([1.5, 0.2]) * Matern32(0.7),
    "rational_quadratic": lambda s: RationalQuadratic(1.1, s([0.5, 2.0])),
    "periodic": lambda s: Periodic(s([[0.7], [1.5]]), s([[1.0, 2.0, 3.0], [1.5, 1.6, 1.7]])),
    "linear": lambda s: Linear(s([[0.7, 1.3, 2.1], [1.0, 0.5, 0.8]])),
    "polynomial": lambda s: Polynomial(2, s([[0.7], [1.5]]), s([0.1, 0.4])),
    "polynomial_offset": lambda s: Polynomial(2, 0.7, s([0.1, 0.4])),
    "arccosine0": lambda s: ArcCosine(0, s([[0.7], [1.5]]), s([0.1, 0.4])),
    "arccosine0_bias": lambda s: ArcCosine(0, 0.7, s([0.1, 0.4])),
    "arccosine1": lambda s: ArcCosine(1, s([[0.7, 1.3, 2.1], [1.0, 0.5, 0.8]])),
    "arccosine2_bias": lambda s: ArcCosine(2, 0.7, s([0.1, 0.4])),
    "constant": lambda s: Constant(s([0.3, 0.4])),
    "white": lambda s: White(s([0.3, 0.4])),
    "combined": lambda s: (s([1.5, 0.2]) * RBF(0.5).on(1) + Linear() * White(s([0.3, 0.4]))) * Periodic(),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batch_of_kernels_is_a_loop_over_kernels(name, rng):
    X, X2 = rng.standard_normal((6, D)), rng.standard_normal((5, D))
    X2[:2] = X[:2]
    own = np.stack([X, X + 1.0])  # other inputs for every latent function

    @jax.jit
    def values(kernel, X, X2, own):
        return kernel(X, X2), kernel(X, X), kernel(X), kernel(own, X2), kernel(own)

    batched = values(BATCHES[name](jnp.asarray), X, X2, own)
    assert batched[0].shape == (P, 6, 5) and batched[2].shape == (P, 6)
    for p in range(P):
        one = values(BATCHES[name](lambda value, p=p: jnp.asarray(np.asarray(value)[p])), X, X2, own[p])
        for ours, expected, matrix in zip(batched, one, (True, True, False, True, False), strict=True):
            tolerance = {"rtol": 1e-9, "atol": 1e-13} if matrix else {"rtol": 1e-12}
            np.testing.assert_allclose(ours[p], expected, **tolerance)


def test_python_numbers_take_the_dtype_of_the_inputs(X):
    A = jnp.float32(X)
    for kernel in (
        2 * RBF(1) + 1,
        2.0 * Matern12([1, 2, 3]),
        RationalQuadratic(2, 3),
        Periodic(1, 2),
        Polynomial(2, 1, 0),
        ArcCosine(0, 1, 1),
        ArcCosine(2, [1.0, 2.0, 3.0], 0),
        Linear(2) * White(1),
    ):
        for function in (kernel, jax.jit(lambda k: k)(kernel)):  # numbers; arrays of weak type
            for value in jax.eval_shape(lambda A, k=function: (k(A, A[:2]), k(A)), A):
                assert value.dtype == jnp.float32
        real = jax.tree.map(float, kernel)
        both = jax.jit(lambda X, a=kernel, b=real: (a(X, X[:2]), b(X, X[:2])))(X)
        np.testing.assert_allclose(*both, rtol=1e-12)
    assert RBF(jnp.ones(()))(A, A).dtype == jnp.float64  # two arrays promote as JAX says
    np.testing.assert_allclose(RBF(jnp.array([1, 2, 3]))(X), 1.0)


# --- arithmetic ---


def test_scaling_from_either_side_by_any_number(X, X2):
    base = RBF(0.8)
    expected = 2.0 * np.asarray(base(X, X2))
    for two in (2, 2.0, np.float64(2), np.array(2.0), np.int64(2), jnp.array(2.0)):
        for kernel in (two * base, base * two):
            assert isinstance(kernel, Kernel)
            np.testing.assert_allclose(kernel(X, X2), expected, rtol=1e-14)
            np.testing.assert_allclose(kernel(X), 2.0)
        np.testing.assert_allclose((base / two)(X, X2), expected / 4, rtol=1e-14)
        for kernel in (two + base, base + two):
            assert isinstance(kernel, Kernel)
            np.testing.assert_allclose(kernel(X, X2), 2 + base(X, X2), rtol=1e-14)
            np.testing.assert_allclose(kernel(X), 3.0)
    np.testing.assert_allclose(jax.jit(lambda v: (v * base)(X, X2))(2.0), expected, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(lambda v: (base * v)(X, X2))(2.0), expected, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(lambda v: (v + base)(X, X2))(2.0), 2 + expected / 2, rtol=1e-12)
    np.testing.assert_allclose(jax.grad(lambda v: (v * base + v)(X).sum())(2.0), 12.0)


def test_a_kernel_is_divided_by_numbers_alone():
    for two, one in ((RBF(0.8), RBF(0.8)), (2.0, RBF(0.8))):
        with pytest.raises(TypeError, match="unsupported operand"):
            two / one


def test_sum_of_a_list(X, X2):
    parts = [RBF(0.8), Linear(), White(0.1)]
    np.testing.assert_allclose(sum(parts)(X, X2), sum(np.asarray(part(X, X2)) for part in parts))


def test_on_takes_an_integer_several_or_negative(X, X2):
    for dims in (1, [1], (1,), np.array([1]), -2, np.int64(1), range(1, 2)):
        np.testing.assert_array_equal(RBF(0.8).on(dims)(X, X2), RBF(0.8)(X[:, 1:2], X2[:, 1:2]))
    nested = (RBF(0.8).on(0) * Linear()).on([2, 1])
    expected = RBF(0.8)(X[:, 2:], X2[:, 2:]) * Linear()(X[:, 1:], X2[:, 1:])
    np.testing.assert_allclose(nested(X, X2), expected, rtol=1e-12)
    assert (jnp.diagonal(RBF(0.001).on([0, 2])(X, X)) == 1).all()


def test_plain_functions_are_kernels(X, X2):
    def brownian(X1, X2=None):
        return jnp.abs(X1[:, 0]) if X2 is None else jnp.minimum(jnp.abs(X1), jnp.abs(X2).T)

    kernel = 2.0 * (brownian + RBF()) * brownian
    column, column2 = X[:, :1], X2[:, :1]
    expected = 2 * (brownian(column, column2) + RBF()(column, column2)) * brownian(column, column2)
    np.testing.assert_allclose(jax.jit(lambda k: k(column, column2))(kernel), expected, rtol=1e-12)
    np.testing.assert_allclose(kernel(column), 2 * (brownian(column) + 1) * brownian(column), rtol=1e-12)


def test_tinygp_kernels(X, X2):
    tinygp = pytest.importorskip("tinygp")
    distance = tinygp.kernels.distance.L2Distance()
    pairs = [
        (RBF(0.8), tinygp.kernels.ExpSquared(0.8, distance=distance)),
        (Matern12(0.8), tinygp.kernels.Exp(0.8, distance=distance)),
        (Matern32(0.8), tinygp.kernels.Matern32(0.8, distance=distance)),
        (Matern52(0.8), tinygp.kernels.Matern52(0.8, distance=distance)),
        (RationalQuadratic(0.8, 1.3), tinygp.kernels.RationalQuadratic(0.8, distance=distance, alpha=1.3)),
    ]
    for ours, theirs in pairs:
        K, k = jax.jit(lambda theirs: (theirs(X, X2), theirs(X)))(theirs)
        np.testing.assert_allclose(ours(X, X2), K, rtol=1e-9)
        np.testing.assert_allclose(ours(X), k, rtol=1e-12)
    ours, theirs = pairs[2]
    K = np.asarray(ours(X, X2))
    for mixed, matrix, variance in ((2.0 * ours + theirs, 3 * K, 3.0), (ours * theirs, K**2, 1.0)):
        assert isinstance(mixed, Kernel)
        np.testing.assert_allclose(jax.jit(lambda k: k(X, X2))(mixed), matrix, rtol=1e-9)
        np.testing.assert_allclose(mixed(X), variance, rtol=1e-12)
    gradient = jax.grad(lambda k: k(X, X2).sum())(Linear(1.0) + tinygp.kernels.Matern32(jnp.array(0.8)))
    assert jnp.isfinite(gradient.right.scale)


def test_user_kernels(X, X2):
    class Cosine(Kernel):
        frequency: float = kernels.hyperparameter(1.0)
        power: int = kernels.static(1)

        def matrix(self, X1, X2):
            return jnp.cos(self.frequency * (X1[:, None, 0] - X2[None, :, 0])) ** self.power

        def diagonal(self, X):
            return jnp.ones_like(X[:, 0])

    kernel = 2.0 * Cosine(jnp.array(3.0), power=2)
    expected = 2 * np.cos(3 * (X[:, None, 0] - X2[None, :, 0])) ** 2
    np.testing.assert_allclose(jax.jit(lambda k: k(X, X2))(kernel), expected, rtol=1e-12)
    assert len(jax.tree.leaves(kernel)) == 2
    with pytest.raises(ValueError, match="`frequency` must be positive"):
        Cosine(-1.0)
    with pytest.raises(TypeError, match="abstract"):
        kernels.Stationary(1.0)


# --- errors ---


def test_inputs_of_wrong_shape_or_type(X):
    kernel = RBF(0.8)
    with pytest.raises(ValueError, match=r"`X` must have shape \(..., n, D\); got \(6,\). Did you mean `X\[:, None\]`"):
        kernel(X[:, 0])
    with pytest.raises(ValueError, match=r"`X2` must have shape .*got \(6,\). Did you mean `X2\[:, None\]`"):
        kernel(X, X[:, 0])
    with pytest.raises(ValueError, match=r"`X` must have shape .*got \(\)\.$"):
        kernel(np.float64(1.0))
    with pytest.raises(ValueError, match=r"`X` must have shape .*got \(6, 0\)\.$"):
        kernel(X[:, :0])
    with pytest.raises(ValueError, match=r"D = 3 to match `X1`; got \(6, 2\). Did you pass X2.T"):
        kernel(X, X[:, :2])
    with pytest.raises(TypeError, match="`X1` must hold real numbers; got complex128"):
        kernel(1j * np.arange(6)[:, None], X)


def test_hyperparameters_of_wrong_shape(X):
    for make_kernel, name in (
        (RBF, "lengthscale"),
        (Linear, "variance"),
        (lambda v: Periodic(1.0, v), "period"),
        (lambda v: ArcCosine(1, v), "weight_variance"),
        (lambda v: RBF().on([0, 1]) * Matern32(v), "lengthscale"),
    ):
        with pytest.raises(ValueError, match=rf"`{name}` must have shape .* with D = 3 .* got \(2,\).*\(P, 1\)"):
            make_kernel(jnp.ones(2))(X)
    with pytest.raises(ValueError, match=r"with D = 2 .* got \(3,\)"):
        RBF(jnp.ones(3)).on([0, 1])(X, X)
    with pytest.raises(ValueError, match=r"`lengthscale` must have shape .* got \(4, 2, 3\)"):
        RBF(jnp.ones((4, 2, 3)))(X)
    for kernel, name in (
        (jnp.ones((2, 3)) * RBF(), "variance"),
        (RationalQuadratic(1.0, jnp.ones((2, 3))), "alpha"),
        (Polynomial(2, 1.0, jnp.ones((2, 3))), "offset"),
        (Constant(jnp.ones((2, 3))), "value"),
        (White(jnp.ones((2, 3))), "value"),
    ):
        with pytest.raises(ValueError, match=rf"`{name}` must have shape \(\) or \(P,\).* got \(2, 3\)"):
            kernel(X, X)


def test_hyperparameters_outside_their_domain():
    for make_kernel, name in (
        (RBF, "lengthscale"),
        (Periodic, "lengthscale"),
        (lambda v: Periodic(1.0, v), "period"),
        (lambda v: RationalQuadratic(1.0, v), "alpha"),
        (lambda v: v * RBF(), "variance"),
        (Linear, "variance"),
        (lambda v: Polynomial(2, v), "variance"),
        (ArcCosine, None),
        (lambda v: ArcCosine(0, v), "weight_variance"),
    ):
        for bad in (0.0, -1, float("nan"), np.inf, np.array([1.0, -2.0]), jnp.array(-1.0), [1.0, -2.0]):
            if name and not (name == "variance" and isinstance(bad, list)):
                with pytest.raises(ValueError, match=f"`{name}` must be positive and finite; got"):
                    make_kernel(bad)
    for make_kernel, name in (
        (lambda v: Polynomial(2, 1.0, v), "offset"),
        (lambda v: ArcCosine(0, 1.0, v), "bias_variance"),
        (Constant, "value"),
        (White, "value"),
        (lambda v: RBF() + v, "value"),
    ):
        make_kernel(0.0)
        with pytest.raises(ValueError, match=f"`{name}` must be nonnegative and finite; got -1"):
            make_kernel(-1.0)
    assert jnp.isfinite(jax.jit(lambda s: RBF(s)(jnp.ones((2, 1))))(-1.0)).all()  # not known while tracing


def test_structure_outside_its_domain(X):
    for order in (3, -1, 0.5, "one"):
        with pytest.raises(ValueError, match="`order` must be 0, 1 or 2; got"):
            ArcCosine(order)
    for degree in (0, -2, 1.5, "two"):
        with pytest.raises(ValueError, match=r"`degree` must be a positive integer: 1, 2, 3, \.\.\.; got"):
            Polynomial(degree)
    with pytest.raises(ValueError, match=r"`dims` must lie in 0..2 for inputs with D = 3; got \(0, 3\)"):
        RBF().on([0, 3])(X)
    with pytest.raises(ValueError, match=r"`dims` must lie in 0..2 for inputs with D = 3; got \(-4,\)"):
        RBF().on(-4)(X, X)
    with pytest.raises(ValueError, match=r"`dims` must name at least one column"):
        RBF().on([])
    for mask in (True, [True, False], np.array([True, False])):
        with pytest.raises(TypeError, match="`dims` must be an integer or several"):
            RBF().on(mask)
    with pytest.raises(TypeError, match="`dims` must be an integer or several"):
        RBF().on([0.5])
    with pytest.raises(TypeError, match="`dims` must be an integer or several"):
        RBF().on("ab")


def test_operands_that_are_no_kernels():
    for combine in (lambda k, o: k + o, lambda k, o: o + k, lambda k, o: k * o, lambda k, o: o * k):
        for other in ("text", None, [1.0], {}):
            with pytest.raises(TypeError, match=r"combined with a number, an array or a kernel.*of type"):
                combine(RBF(), other)
        with pytest.raises(TypeError, match=r"the class Linear. Did you mean `Linear\(...\)`, an instance\?"):
            combine(RBF(), Linear)


# --- properties ---

finite = st.floats(-3, 3, width=32)
points = st.lists(st.lists(finite, min_size=D, max_size=D), min_size=5, max_size=5)


@functools.cache
def compiled(name):
    return jax.jit(make(name).__call__)


@settings(max_examples=25, deadline=None)
@given(points, st.lists(finite, min_size=D, max_size=D), st.sampled_from(["matern12", "matern52", "periodic"]))
def test_stationary_kernels_do_not_know_the_origin(rows, shift, name):
    X = np.array(rows, dtype=float)
    np.testing.assert_allclose(compiled(name)(X, X + 0), compiled(name)(X + shift, X + shift + 0), atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(points, st.sampled_from(sorted(CASES)))
def test_symmetric_and_positive_semidefinite(rows, name):
    X = np.array(rows, dtype=float)
    K = np.asarray(compiled(name)(X, X + 0))
    np.testing.assert_allclose(K, K.T, rtol=1e-12, atol=1e-12)
    assert np.linalg.eigvalsh((K + K.T) / 2).min() >= -1e-11 * max(np.trace(K), 1)


@pytest.mark.parametrize("part", [kernels.RBF(jnp.ones((2, 1))), jnp.ones(2), kernels.Constant(jnp.ones(2)).on(0)])
def test_parts_for_different_numbers_of_functions(part):
    three, X = kernels.RBF(jnp.ones((3, 1))), jnp.linspace(0.0, 1.0, 4)[:, None]
    for kernel in [three * part] if isinstance(part, jax.Array) else [three + part, three * part]:
        for call, others in ((kernel, (X,)), (kernel, ()), (kernel.weighted_sum, (X, jnp.ones(4)))):
            with pytest.raises(ValueError, match="same number of latent functions; got values of shapes"):
                call(X, *others)
    assert (three + kernels.RBF(jnp.ones((1, 1)))).weighted_sum(X, X, jnp.ones(4)).shape == (3, 4)


@pytest.mark.parametrize("kernel", [RBF, Matern12, Matern32, Matern52, RationalQuadratic])
def test_where_squared_distances_overflow(kernel):
    """Matern kernels were NaN."""
    far = np.array([[1e150]])
    for number in jax.jit(jax.value_and_grad(lambda x: kernel(1e-10)(x, 0 * far).sum()))(far):
        assert np.abs(number) < 1e-100


@pytest.mark.parametrize(
    "kernel, word, answer",
    [
        (kernels.RBF, "variance", r"The variance is a factor: variance \* RBF\(\.\.\.\)\."),
        (kernels.Periodic, "outputscale", r"The variance is a factor: variance \* Periodic"),
        (kernels.Matern32, "lengthscales", r"Write Matern32\(lengthscale\), with shape \(D,\)"),
        (kernels.Linear, "active_dims", r"Select columns by Linear\(\.\.\.\)\.on\(\[0, 2\]\)"),
        (kernels.RBF, "lengthscale_prior", r'Draw it in the model: RBF\(numpyro.sample\("lengthscale", prior\)\)'),
    ],
)
def test_arguments_of_other_libraries_are_answered(kernel, word, answer):
    with pytest.raises(TypeError, match=f"{kernel.__name__} has no argument `{word}`. {answer}"):
        kernel(**{word: 1.0})


def test_kernels_keep_arguments_that_other_libraries_name_alike():
    assert kernels.Linear(variance=2.0).variance == 2.0
    with pytest.raises(TypeError, match="unexpected keyword argument 'lengthscales'"):
        kernels.Linear(lengthscales=1.0)
