"""Linear functionals of f: each beside an exact GP, a dense formula, and what it is a functional of."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.errors import with_checks
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.math.grouped import Grouping
from tests import oracles, problems

VARIANCE, LENGTHSCALE, NOISE = 1.3, 0.8, 0.3
KERNEL = VARIANCE * kernels.RBF(LENGTHSCALE)
ORACLE = oracles.of_derivatives(VARIANCE, LENGTHSCALE)
X = np.linspace(-2.0, 2.0, 9)[:, None]
Y = np.sin(2 * X[:, 0])
AT = np.array([[-2.3], [-0.4], [0.0], [1.7]])  # 0.0 is one of the inputs


def augmented(X, *orders):
    return np.concatenate([X, np.broadcast_to(np.array(orders, float), X.shape)], 1)


def summed(nodes, weights):
    """Rows of weighted sums of values, for an oracle with derivatives."""
    weights = np.broadcast_to(weights, nodes.shape[:2])
    return np.concatenate([nodes, np.zeros_like(nodes), weights[..., None]], -1)


def of_one_node(rows):
    return np.concatenate([rows, np.ones((len(rows), 1))], 1)[:, None]


def exact(kernel=KERNEL, X=X, y=Y):
    """An SVGP whose inducing points are the data, at its best q: the exact posterior."""
    return ogp.CollapsedGP(kernel, jnp.asarray(X), jnp.asarray(X), NOISE, jitter=1e-13).posterior(jnp.asarray(y))


def random_f(rng, inducing, kernel=KERNEL, num_latents=None, **fixed):
    """A function with a random q, and the parameters."""
    features = inducing if isinstance(inducing, list) else [inducing]
    nums = [s.num if hasattr(s, "num") else len(s) for s in features if not isinstance(s, ogp.MeanOnly)]
    qs = [problems.random_q(rng, M) for M in nums]

    def model():
        return ogp.gp("f", kernel, inducing, jitter=0.0, num_latents=num_latents)

    guide = ogp.AutoSparseGP(model)
    f = jax.jit(lambda params: ogp.posterior(model, guide, params)["f"])({**problems.q_params(qs), **fixed})
    assert isinstance(f, GPFunction)
    return f, qs


def assert_marginals(m, mean, cov, atol=1e-6):
    np.testing.assert_allclose(m.mean, mean, atol=atol)
    np.testing.assert_allclose(m.variance**0.5, np.sqrt(np.diag(cov)), atol=atol)


# ---------------------------------------------------------------- derivatives of kernels


@jax.jit
def covariances(L, kernel, X):
    """With each other, with values, and the variances."""
    return L.covariance(kernel, L), L.covariance_with_inputs(kernel, X), L.variance(kernel)


def _matern32(a, t):
    s = a * np.abs(t)
    return (1 + s) * np.exp(-s), -(a**2) * t * np.exp(-s), -(a**2) * (1 - s) * np.exp(-s)


def _matern52(a, t):
    s, b = a * np.abs(t), a**2 / 3
    return (1 + s + s**2 / 3) * np.exp(-s), -b * t * (1 + s) * np.exp(-s), -b * (1 + s - s**2) * np.exp(-s)


@pytest.mark.parametrize("dtype, rtol", [(np.float64, 1e-13), (np.float32, 2e-5)])
@pytest.mark.parametrize(
    "kernel, profile, root",
    [(kernels.Matern32, _matern32, 3**0.5), (kernels.Matern52, _matern52, 5**0.5)],
    ids=["matern32", "matern52"],
)
def test_slopes_of_matern_kernels_also_where_inputs_coincide(kernel, profile, root, dtype, rtol):
    X = np.array([[0.0], [0.0], [0.3], [0.3 + 1e-4], [2.0]])
    slopes = ogp.Derivative(jnp.asarray(X, dtype), 0)
    _, slope, curvature = profile(root / LENGTHSCALE, X - X.T)
    K, with_values, variance = covariances(slopes, kernel(LENGTHSCALE), slopes.X)
    np.testing.assert_allclose(K, -curvature, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(with_values, slope, atol=rtol)
    np.testing.assert_allclose(variance, np.diag(-curvature), rtol=rtol)
    assert K.dtype == dtype


@pytest.mark.parametrize("D", [1, 2, 4])
def test_derivatives_of_any_order_of_rbf(rng, D):
    """D = 4 takes distances by products, where equal inputs have distances of rounding errors."""
    X = rng.normal(size=(6, D))
    X[1] = X[0]
    for dims in [(0,), (0, 0), (D - 1,), (0, D - 1)]:
        orders = np.bincount(dims, minlength=D)
        rows, L = augmented(X, *orders), ogp.Derivative(jnp.asarray(X), dims)
        expected = ORACLE(rows, rows)
        K, with_values, variance = covariances(L, KERNEL, jnp.asarray(X))
        np.testing.assert_allclose(K, expected, atol=1e-11 * np.abs(expected).max())
        np.testing.assert_allclose(variance, np.diag(expected), rtol=1e-12)
        np.testing.assert_allclose(with_values, ORACLE(rows, augmented(X, *[0] * D)), atol=1e-11)


def test_second_derivatives_of_matern52_where_inputs_coincide():
    # 1 - 5/6 r^2 + 25/24 r^4 - ...: the fourth derivative at zero is 25 / l^4.
    L = ogp.Derivative(jnp.zeros((2, 1)), (0, 0))
    np.testing.assert_allclose(L.covariance(kernels.Matern52(0.5), L), 25 / 0.5**4, rtol=1e-13)


@pytest.mark.parametrize(
    "kernel",
    [
        kernels.RationalQuadratic(0.7, 2.0),
        kernels.Periodic(0.9, 1.7),
        kernels.Linear(1.3) + 0.5,
        kernels.Polynomial(3),
        kernels.ArcCosine(2),
        2.0 * kernels.RBF(0.8).on(0) * kernels.Matern52(1.0).on([1, 0]) + kernels.Linear().on(-1).named("trend"),
        kernels.Function(lambda A, B=None: kernels.RBF(0.7)(A) if B is None else kernels.RBF(0.7)(A, B)),
        kernels.RBF(jnp.array([[0.5], [0.9]])),
    ],
    ids=["rational", "periodic", "linear", "polynomial", "arc-cosine", "composed", "function", "two latents"],
)
def test_derivatives_of_other_kernels_are_those_of_differences(rng, kernel):
    X, h = rng.normal(size=(5, 2)), 1e-3
    step = np.array([h, 0.0])
    # Of fourth order: (8 (f(h) - f(-h)) - (f(2 h) - f(-2 h))) / 12 h.
    nodes = jnp.asarray(np.stack([X + step, X - step, X + 2 * step, X - 2 * step], 1))
    difference = ogp.Average(nodes, jnp.array([8.0, -8.0, -1.0, 1.0]) / (12 * h)).checked(2, float)
    L = ogp.Derivative(jnp.asarray(X), 0)
    K, by_differences = jax.jit(lambda L, d: (L.matrix(kernel), d.matrix(kernel)))(L, difference)
    np.testing.assert_allclose(K, by_differences, rtol=1e-5, atol=1e-5)
    gradient = jax.jit(jax.grad(lambda X: ogp.Derivative(X, 0).matrix(kernel).sum()))(jnp.asarray(X))
    assert jnp.isfinite(gradient).all()


def test_a_direction_is_a_weighted_sum_of_columns(rng):
    X, V = rng.normal(size=(4, 2)), rng.normal(size=(4, 2))
    along = ogp.Derivative(jnp.asarray(X), direction=jnp.asarray(V)).covariance_with_inputs(KERNEL, jnp.asarray(X))
    columns = [ogp.Derivative(jnp.asarray(X), d).covariance_with_inputs(KERNEL, jnp.asarray(X)) for d in (0, 1)]
    np.testing.assert_allclose(along, V[:, :1] * columns[0] + V[:, 1:] * columns[1], atol=1e-13)


# ---------------------------------------------------------------- beside an exact GP, M = N


@pytest.fixture(scope="module")
def fitted():
    return exact()


@pytest.mark.parametrize("orders", [(1,), (2,)], ids=["slope", "curvature"])
def test_derivatives_of_an_exact_gp(fitted, orders):
    mean, cov = oracles.exact_predict(ORACLE, augmented(X, 0), Y, NOISE**2, augmented(AT, *orders))
    L = ogp.Derivative(jnp.asarray(AT), (0,) * orders[0])
    assert_marginals(fitted(L), mean, cov)
    np.testing.assert_allclose(fitted.joint(L).covariance_matrix, cov, atol=1e-6)


def test_weighted_sums_of_an_exact_gp(fitted, rng):
    nodes, weights = rng.uniform(-2, 2, (4, 3, 1)), rng.normal(size=(4, 3))
    assert_marginals(fitted(ogp.Average(jnp.asarray(nodes), jnp.asarray(weights))), *_exact_sums(nodes, weights))
    assert_marginals(fitted(ogp.Average(jnp.asarray(nodes))), *_exact_sums(nodes, np.full(3, 1 / 3)))


def _exact_sums(nodes, weights):
    """Of an exact GP, by its joint distribution at all nodes."""
    B, Q, _ = nodes.shape
    mean, cov = oracles.exact_predict(ORACLE, augmented(X, 0), Y, NOISE**2, augmented(nodes.reshape(-1, 1), 0))
    W = np.zeros((B, B * Q))
    for b in range(B):
        W[b, b * Q : (b + 1) * Q] = np.broadcast_to(weights, (B, Q))[b]
    return W @ mean, W @ cov @ W.T


def box_and_value(lower, upper, z, lengthscale):
    """The integral of exp(-|x - z|^2 / 2 l^2) over boxes, shape (boxes, points)."""
    erf = np.vectorize(math.erf)
    parts = [erf((edge[:, None] - z) / (lengthscale * 2**0.5)) for edge in (lower, upper)]
    return np.prod(lengthscale * (np.pi / 2) ** 0.5 * (parts[1] - parts[0]), -1)


def test_integrals_over_boxes(rng):
    lower, upper, z = rng.uniform(-1, 0, (3, 2)), rng.uniform(0, 1, (3, 2)), rng.normal(size=(4, 2))
    expected, volume = VARIANCE * box_and_value(lower, upper, z, LENGTHSCALE), np.prod(upper - lower, -1)
    box, share = (ogp.Integral(jnp.asarray(lower), jnp.asarray(upper), average=a) for a in (False, True))
    np.testing.assert_allclose(box.covariance_with_inputs(KERNEL, jnp.asarray(z)), expected, atol=1e-6)
    np.testing.assert_allclose(
        share.covariance_with_inputs(KERNEL, jnp.asarray(z)), expected / volume[:, None], atol=1e-6
    )
    # The variance is the integral over z of the covariance with z.
    x, w = oracles.legendre(20)
    nodes = np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2) / 2 + 0.5
    weights = np.outer(w, w).ravel() / 4
    for b in range(3):
        at = lower[b] + (upper[b] - lower[b]) * nodes
        known = VARIANCE * volume[b] * weights @ box_and_value(lower[b : b + 1], upper[b : b + 1], at, LENGTHSCALE)[0]
        np.testing.assert_allclose(box.variance(KERNEL)[b], known, rtol=1e-6)
    np.testing.assert_allclose(share.variance(KERNEL) * volume**2, box.variance(KERNEL), rtol=1e-12)


@pytest.mark.parametrize("width, atol", [(1.0, 1e-12), (3.0, 1e-6)])
def test_eight_nodes_are_exact_for_rbf(width, atol):
    """As the docstring of Integral says, in units of the kernel's variance and boxes in lengthscales."""
    z = np.linspace(-2.0, width + 2.0, 9)[:, None]
    lower, upper = np.zeros((1, 1)), np.full((1, 1), width)
    box = ogp.Integral(jnp.asarray(lower), jnp.asarray(upper))
    covariance = box.covariance_with_inputs(kernels.RBF(1.0), jnp.asarray(z))
    np.testing.assert_allclose(covariance, box_and_value(lower, upper, z, 1.0), atol=atol)


def _by_many_nodes(kernel, lower, upper, num_nodes=60):
    """Averages over boxes of a kernel of one column, a rule of so many nodes that it is exact."""
    x, w = oracles.legendre(num_nodes)
    nodes = lower[:, :1] + (upper - lower)[:, :1] * (x + 1) / 2
    K = kernel(nodes.reshape(-1, 1), nodes.reshape(-1, 1)).reshape(len(lower), num_nodes, len(lower), num_nodes)
    return np.einsum("q,aqbr,r->ab", w / 2, K, w / 2)


WIDTHS = np.array([[0.0], [1e-3], [0.3], [0.79], [0.81], [3.0], [9.0]])  # in a lengthscale of 0.8


@pytest.mark.parametrize("dtype, atol", [(np.float64, 1e-12), (np.float32, 2e-6)])
def test_boxes_of_any_width_in_closed_form(dtype, atol):
    lower = np.linspace(-4.0, 1.0, 7)[:, None]
    upper = lower + WIDTHS
    box = ogp.Integral(jnp.asarray(lower, dtype), jnp.asarray(upper, dtype), average=True)
    kernel = kernels.RBF(dtype(LENGTHSCALE)) * dtype(VARIANCE) + dtype(0.5)
    expected = _by_many_nodes(oracles.rbf(VARIANCE, LENGTHSCALE), lower, upper) + 0.5
    K = box.covariance(kernel, box)
    assert K.dtype == dtype
    np.testing.assert_allclose(K, expected, atol=atol)
    np.testing.assert_allclose(box.variance(kernel), np.diag(expected), atol=atol)
    whole = ogp.Integral(box.lower, box.upper).covariance(kernel, box)
    np.testing.assert_allclose(whole, WIDTHS * expected, atol=10 * atol)
    z = np.linspace(-5.0, 9.0, 9)[:, None]
    wide = WIDTHS[:, 0] > 0
    known = VARIANCE * box_and_value(lower[wide], upper[wide], z, LENGTHSCALE) / WIDTHS[wide] + 0.5
    found = box.covariance_with_inputs(kernel, jnp.asarray(z, dtype))
    np.testing.assert_allclose(found[wide], known, atol=10 * atol if dtype == np.float64 else 1e-5)
    np.testing.assert_allclose(found[0], kernel(box.lower[:1], jnp.asarray(z, dtype))[0], atol=atol)
    gradient = jax.grad(lambda b: ogp.Integral(box.lower, b, average=True).matrix(kernel).sum())(box.upper)
    assert np.isfinite(gradient).all()


def test_closed_form_is_the_rule_of_many_nodes_on_columns_and_products(rng):
    """In two dimensions, factors on single columns, with slopes and weighted sums in both orders."""
    lower = rng.uniform(-2, 0, (4, 2))
    upper = lower + np.array([[0.1, 2.0], [1.5, 1.5], [4.0, 0.2], [0.3, 0.3]])
    kernel = 1.3 * kernels.RBF(0.8).on(0) * kernels.RBF(1.1) + 0.4 * kernels.RBF(0.9).on(1).named("b") + 0.2
    box = ogp.Integral(jnp.asarray(lower), jnp.asarray(upper))
    rule = ogp.Integral(box.lower, box.upper, num_nodes=30, exact=False)
    assert box.is_exact(kernel) and not rule.is_exact(kernel)
    np.testing.assert_allclose(box.covariance(kernel, box), rule.covariance(kernel, rule), rtol=1e-9)
    at = jnp.asarray(rng.uniform(-2, 2, (3, 2)))
    both = ogp.concatenate([at, box])
    for other in (ogp.Derivative(at, 0), ogp.Average(at[:, None] + 0.1), both):
        other = other.checked(2, float)
        known = rule.covariance(kernel, other)
        np.testing.assert_allclose(box.covariance(kernel, other), known, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(other.covariance(kernel, box), known.T, rtol=1e-8, atol=1e-9)
    place = [s.place for s in ogp.kernels.summands.summands(kernel)][1:2]
    np.testing.assert_allclose(
        box.of(tuple(place)).covariance_with_inputs(kernel, at),
        rule.of(tuple(place)).covariance_with_inputs(kernel, at),
        atol=1e-9,
    )


@pytest.mark.parametrize(
    "kernel", [kernels.Matern52(0.8), kernels.RBF(0.8) + kernels.Linear(), kernels.RBF(jnp.array([[0.5], [0.9]]))]
)
def test_other_kernels_take_the_rule(kernel):
    box = ogp.Integral(jnp.zeros((2, 1)), jnp.array([[0.5], [1.0]]))
    assert not box.is_exact(kernel)
    np.testing.assert_array_equal(box.covariance(kernel, box), box.by_nodes().covariance(kernel, box))


def test_a_wide_box_of_an_exact_gp(fitted):
    """Twelve lengthscales, where eight nodes are far off."""
    lower, upper = np.array([[-4.8]]), np.array([[4.8]])
    x, w = oracles.legendre(200)
    nodes, weights = 4.8 * x[:, None], 4.8 * w
    mean, cov = oracles.exact_predict(oracles.rbf(VARIANCE, LENGTHSCALE), X, Y, NOISE**2, nodes)
    box = ogp.Integral(jnp.asarray(lower), jnp.asarray(upper))
    assert_marginals(fitted(box), np.array([weights @ mean]), np.array([[weights @ cov @ weights]]))
    rule = fitted(ogp.Integral(jnp.asarray(lower), jnp.asarray(upper), exact=False))
    assert np.abs(rule.variance - weights @ cov @ weights).max() > 1e-3


# ---------------------------------------------------------------- beside dense formulas, sets of any kind


@pytest.mark.parametrize("sizes", [(6,), (5, 4), (4, 3, 2)])
def test_marginals_of_functionals_with_several_sets(rng, sizes):
    """Explained and residual variance, the joint covariance and the cross covariance of kinds."""
    Zs = [rng.uniform(-2, 2, (M, 2)) for M in sizes]
    f, qs = random_f(rng, [jnp.asarray(Z) for Z in Zs])
    at = rng.uniform(-2, 2, (3, 2))
    both = ogp.concatenate([jnp.asarray(at), ogp.Derivative(jnp.asarray(at), 1)])
    rows = np.concatenate([augmented(at, 0, 0), augmented(at, 0, 1)])
    sets = [oracles.WhitenedSet(augmented(Z, 0, 0), m, T @ T.T) for Z, (m, T) in zip(Zs, qs, strict=True)]
    mean, cov = oracles.q_f(ORACLE, sets, rows)
    m, joint, diagonalized = jax.jit(lambda f, L: (f(L), f.joint(L).covariance_matrix, f.diagonalized()(L)))(f, both)
    np.testing.assert_allclose(m.mean, mean, atol=1e-8)
    np.testing.assert_allclose(m.variance, np.diag(cov), atol=1e-8)
    np.testing.assert_allclose(m.residual_variance, np.diag(oracles.residual_covariance(ORACLE, sets, rows)), atol=1e-8)
    np.testing.assert_allclose(joint, cov, atol=1e-8)
    np.testing.assert_allclose(diagonalized.variance, m.variance, atol=1e-8)


def test_mean_only_points_move_derivatives_too(rng):
    Z, H, a = rng.uniform(-2, 2, (5, 1)), rng.uniform(-2, 2, (7, 1)), rng.normal(size=7)
    weights = {"f.u1_weights": jnp.asarray(a)}
    f, [(m, T)] = random_f(rng, [jnp.asarray(Z), ogp.MeanOnly(jnp.asarray(H))], **weights)
    sets = [oracles.WhitenedSet(augmented(Z, 0), m, T @ T.T)]
    mean, cov = oracles.q_f(ORACLE, sets, augmented(AT, 1), mean_only=oracles.MeanOnlySet(augmented(H, 0), a))
    assert_marginals(f(ogp.Derivative(jnp.asarray(AT), 0)), mean, cov, atol=1e-8)


def test_inducing_variables_may_be_derivatives(rng):
    Z = rng.uniform(-2, 2, (4, 1))
    f, qs = random_f(rng, [jnp.asarray(Z), ogp.Derivative(jnp.asarray(Z), 0)])
    sets = [oracles.WhitenedSet(augmented(Z, n), m, T @ T.T) for n, (m, T) in enumerate(qs)]
    for n, at in enumerate([jnp.asarray(AT), ogp.Derivative(jnp.asarray(AT), 0)]):
        assert_marginals(f(at), *oracles.q_f(ORACLE, sets, augmented(AT, n)), atol=1e-8)


def test_fourier_features_know_slopes(rng):
    features = ogp.FourierFeatures(4, -1.0, 1.0)
    L = ogp.Derivative(jnp.asarray(AT), 0)
    kernel = 1.7 * kernels.Matern52(0.6)
    slope = jax.vmap(jax.jacfwd(lambda x: features.covariance_with_inputs(kernel, x[None])[:, 0]))
    known, found = jax.jit(lambda at, L: (slope(at), L.covariance_with_feature(kernel, features)))(L.X, L)
    np.testing.assert_allclose(found, known[..., 0].T, atol=1e-12)


def test_derivatives_beside_fourier_features(rng):
    """Either of them first."""
    kernel, at = 1.7 * kernels.Matern52(0.6), jnp.asarray(AT)
    features, slopes = ogp.FourierFeatures(3, -1.0, 1.0), ogp.Derivative(at, 0)

    @jax.jit
    def residuals(slopes, at):
        with numpyro.handlers.seed(rng_seed=0):
            both = ogp.gp("f", kernel, [features, slopes]), ogp.gp("g", kernel, [slopes, features])
        return [(f(slopes).residual, f(at).residual) for f in both]

    (zero, f), (also_zero, g) = residuals(slopes, at)
    np.testing.assert_allclose([zero, also_zero], 0, atol=1e-6)
    np.testing.assert_allclose(f, g, atol=1e-6)  # what both explain does not depend on the order


@pytest.mark.parametrize("order", [1, 2])
def test_spherical_harmonics_know_slopes(rng, order):
    """Of a homogeneous kernel, at inputs of any length: differences of values."""
    f, _ = random_f(rng, ogp.SphericalHarmonics(3, 6, order=order), kernels.ArcCosine(order))
    at, h = jnp.asarray(rng.normal(size=(5, 3))), 1e-5
    step = jnp.zeros(3).at[0].set(h)
    slope, pairs = (
        f(ogp.Derivative(at, 0)),
        ogp.Average(jnp.stack([at + step, at - step], 1), jnp.array([0.5, -0.5]) / h),
    )
    np.testing.assert_allclose(slope.mean, f(pairs).mean, atol=1e-8)
    np.testing.assert_allclose(slope.variance, f(pairs).variance, rtol=2e-2)


def test_latent_functions_of_their_own(rng):
    f = ogp.CollapsedGP(KERNEL, jnp.asarray(X), jnp.asarray(X), NOISE, jitter=1e-13)
    f = f.posterior(jnp.stack([jnp.asarray(Y), -2 * jnp.asarray(Y)], -1))
    one = exact()
    for L in (ogp.Derivative(jnp.asarray(AT), 0), ogp.Average(jnp.asarray(AT)[:, None])):
        np.testing.assert_allclose(f(L).mean, one(L).mean[:, None] * np.array([1, -2]), atol=1e-9)
        np.testing.assert_allclose(f(L).variance, np.stack([one(L).variance] * 2, -1), atol=1e-9)


def test_many_rows_are_those_of_few(fitted, rng):
    """In blocks."""
    nodes = jnp.asarray(rng.uniform(-2, 2, (300, 5, 1)))
    many, few = fitted(ogp.Average(nodes)), fitted(ogp.Average(nodes[200:203]))
    np.testing.assert_allclose(many.mean[200:203], few.mean, atol=1e-12)
    np.testing.assert_allclose(many.variance[200:203], few.variance, atol=1e-12)


def test_float32_stays_float32(rng):
    Z = jnp.asarray(X, jnp.float32)
    f, exact64 = exact(kernels.RBF(jnp.float32(LENGTHSCALE)) * jnp.float32(VARIANCE), Z, Y.astype(np.float32)), exact()
    for L, L64 in [
        (ogp.Derivative(jnp.asarray(AT, jnp.float32), 0), ogp.Derivative(jnp.asarray(AT), 0)),
        (ogp.Integral(jnp.asarray(AT, jnp.float32), jnp.asarray(AT + 1, jnp.float32)), ogp.Integral(AT, AT + 1)),
    ]:
        assert f(L).mean.dtype == jnp.float32 == f(L).variance.dtype
        np.testing.assert_allclose(f(L).mean, exact64(L64).mean, atol=5e-3)
        np.testing.assert_allclose(f(L).variance ** 0.5, exact64(L64).variance ** 0.5, atol=1e-2)


# ---------------------------------------------------------------- in models


def gradient_model(X, y, slope, inducing, noise=NOISE):
    f = ogp.gp("f", KERNEL, inducing, jitter=1e-10)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)
        numpyro.sample("slope", likelihoods.Gaussian(f(ogp.Derivative(X, 0)), 2 * noise), obs=slope)


def fit(model, args, *, steps=1, **options):
    guide = ogp.AutoSparseGP(model, natural=True, **options)
    svi = SVI(model, guide, ogp.natural_gradient(optax.adam(1e-2), 1.0), TraceMeanField_ELBO())
    result = svi.run(jax.random.PRNGKey(0), steps, *args, progress_bar=False)
    params = svi.get_params(result.state)
    return guide, params, -TraceMeanField_ELBO().loss(jax.random.PRNGKey(1), params, model, guide, *args)


@pytest.fixture(scope="module")
def slopes_seen():
    return jnp.asarray(X), jnp.asarray(Y), jnp.asarray(2 * np.cos(2 * X[:, 0]))


@pytest.fixture(scope="module")
def by_one_natural_step(slopes_seen):
    at, y, slope = slopes_seen
    args = (at, y, slope, ogp.concatenate([at, ogp.Derivative(at, 0)]))
    return args, *fit(gradient_model, args)


def dense_data():
    rows = np.concatenate([augmented(X, 0), augmented(X, 1)])
    noise = np.repeat([NOISE**2, 4 * NOISE**2], len(X))
    return rows, np.concatenate([Y, 2 * np.cos(2 * X[:, 0])]), noise


def test_observed_gradients_give_the_exact_gp(by_one_natural_step):
    """Values and slopes as the one set of inducing variables, one natural step: the exact posterior; the bound is log p(y)."""
    args, guide, params, elbo = by_one_natural_step
    rows, y, noise = dense_data()
    np.testing.assert_allclose(elbo, oracles.exact_log_marginal(ORACLE, rows, y, noise), atol=1e-4)
    f = ogp.posterior(gradient_model, guide, params, *args)["f"]
    for n, at in enumerate([jnp.asarray(AT), ogp.Derivative(jnp.asarray(AT), 0)]):
        assert_marginals(f(at), *oracles.exact_predict(ORACLE, rows, y, noise, augmented(AT, n)), atol=1e-5)


EDGES = np.linspace(-2.0, 2.0, 8)[:, None]
BOX_NODES, BOX_WEIGHTS = oracles.legendre(12)
IN_BOXES = EDGES[:-1, None] + (EDGES[1:] - EDGES[:-1])[:, None] * (BOX_NODES[:, None] + 1) / 2
TRIPLES, SIGNED = np.linspace(-2.2, 2.2, 21).reshape(7, 3, 1), np.array([0.5, 1.0, -0.7])


@pytest.mark.parametrize(
    ("seen", "nodes", "weights"),
    [
        (ogp.Average(jnp.asarray(TRIPLES), jnp.asarray(SIGNED)), TRIPLES, SIGNED),
        (ogp.Integral(jnp.asarray(EDGES[:-1]), jnp.asarray(EDGES[1:]), average=True), IN_BOXES, BOX_WEIGHTS / 2),
        (ogp.Derivative(jnp.asarray(EDGES[:7]), 0), None, None),
    ],
    ids=["weighted sums", "integrals", "slopes"],
)
def test_what_is_observed_gives_the_exact_gp(seen, nodes, weights):
    """Each kind as y and as the inducing variables, M = N: one natural step, and values of f are those of the exact GP."""
    y = np.cos(np.arange(7.0))

    def model(y):
        f = ogp.gp("f", KERNEL, seen, jitter=1e-13)
        with numpyro.plate("data", 7):
            numpyro.sample("y", likelihoods.Gaussian(f(seen), NOISE), obs=y)

    guide, params, elbo = fit(model, (jnp.asarray(y),))
    rows = of_one_node(augmented(EDGES[:7], 1)) if nodes is None else summed(nodes, weights)
    k = oracles.of_sums(ORACLE)
    np.testing.assert_allclose(elbo, oracles.exact_log_marginal(k, rows, y, NOISE**2), atol=1e-6)
    expected = oracles.exact_predict(k, rows, y, NOISE**2, of_one_node(augmented(AT, 0)))
    assert_marginals(ogp.posterior(model, guide, params, jnp.asarray(y))["f"](jnp.asarray(AT)), *expected)


def test_bounds_with_few_points_and_the_tightened_one(slopes_seen):
    at, y, slope = slopes_seen
    rows, both, noise = dense_data()
    evidence = oracles.exact_log_marginal(ORACLE, rows, both, noise)
    args = (at, y, slope, at[::2])
    loose, tight = fit(gradient_model, args)[2], fit(gradient_model, args, steps=2, residual="tight")[2]
    Z = augmented(X[::2], 0)
    np.testing.assert_allclose(loose, oracles.titsias2009(ORACLE, rows, both, Z, noise), atol=1e-4)
    np.testing.assert_allclose(tight, oracles.titsias2025(ORACLE, rows, both, Z, noise), atol=1e-4)
    assert loose < tight < evidence


def test_checks_and_draws_of_a_fit(by_one_natural_step):
    args, guide, params, _ = by_one_natural_step
    page = ogp.check(gradient_model, guide, params, *args, num_samples=30)
    assert "f.u0" in str(page)
    assert np.isfinite(page.functions["f"].residual).all()
    data = ogp.to_arviz(gradient_model, guide, params, *args, num_samples=5)
    groups = getattr(data, "log_likelihood", None)
    assert groups is None or {"y", "slope"} <= set(groups)
    drawn = Predictive(gradient_model, guide=guide, params=params, num_samples=3)(
        jax.random.PRNGKey(0), args[0], None, None, args[3]
    )
    assert drawn["slope"].shape == (3, len(X))


def test_nuts_sees_the_same_functionals(slopes_seen):
    """With two inducing points NUTS draws p(u | y), whose moments a dense formula has."""
    at, y, slope = slopes_seen
    args = (at, y, slope, at[::4])
    mcmc = MCMC(NUTS(gradient_model), num_warmup=200, num_samples=600, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0), *args)
    rows, both, noise = dense_data()
    K = ORACLE(augmented(X[::4], 0), augmented(X[::4], 0))
    A = np.linalg.solve(np.linalg.cholesky(K), ORACLE(augmented(X[::4], 0), rows))
    S = np.linalg.inv(np.eye(3) + A @ np.diag(1 / noise) @ A.T)
    draws = np.asarray(mcmc.get_samples()["f.u0"])
    np.testing.assert_allclose(draws.mean(0), S @ A @ (both / noise), atol=6 * np.sqrt(np.diag(S)).max() / 400**0.5)
    np.testing.assert_allclose(draws.std(0), np.sqrt(np.diag(S)), rtol=0.15)


def test_draws_of_one_run_go_together():
    """The average of values is the draw of the average, in a fit and of a posterior, whichever comes first."""
    nodes = jnp.linspace(-1.5, 1.5, 6)[:, None]
    sums = ogp.Average(nodes.reshape(2, 3, 1))

    def model():
        f = ogp.gp("f", KERNEL, jnp.asarray(X[::2]))
        a, b = f(sums).sample(), f(nodes).sample()
        numpyro.deterministic("after", b.reshape(2, 3).mean(1) - a)
        numpyro.deterministic("again", f(ogp.Average(nodes.reshape(2, 3, 1))).sample() - a)

    guide = ogp.AutoSparseGP(model)

    @jax.jit
    def run():
        with numpyro.handlers.seed(rng_seed=0):
            of_guide = numpyro.handlers.trace(guide).get_trace()
            of_model = numpyro.handlers.trace(numpyro.handlers.replay(model, of_guide)).get_trace()
        return of_model["after"]["value"], of_model["again"]["value"]

    after, again = run()
    np.testing.assert_allclose(after, 0, atol=1e-3)
    np.testing.assert_allclose(again, 0, atol=1e-3)


def test_a_joint_draw_of_values_and_slopes(fitted):
    both = ogp.concatenate([jnp.asarray(AT), ogp.Derivative(jnp.asarray(AT), 0)])
    draws = fitted(both).sample(jax.random.PRNGKey(0), (20_000,))
    rows, at = augmented(X, 0), np.concatenate([augmented(AT, 0), augmented(AT, 1)])
    mean, cov = oracles.exact_predict(ORACLE, rows, Y, NOISE**2, at)
    sd = np.sqrt(np.diag(cov))
    np.testing.assert_allclose((draws - mean).mean(0) / sd, 0, atol=0.04)
    np.testing.assert_allclose(np.cov(draws.T) / np.outer(sd, sd), cov / np.outer(sd, sd), atol=0.05)


@pytest.mark.parametrize("dtype, atol", [(jnp.float64, 1e-6), (jnp.float32, 2e-3)])
def test_units_far_apart_leave_values_alone(dtype, atol):
    """Curvatures have a variance of 480,000 here, to which jitter must not be relative where it is that of values."""

    @jax.jit
    def model(at):
        curvature, kernel = ogp.Derivative(at, (0, 0)), kernels.RBF(jnp.asarray(0.05, dtype))
        with numpyro.handlers.seed(rng_seed=0):
            f = ogp.gp("f", kernel, ogp.concatenate([at, curvature]))
            g = ogp.gp("g", kernel, at[::4])
            f(curvature).sample()
            drawn = f(at).sample()
        C = g.joint(ogp.concatenate([at[1:4], curvature])).covariance_matrix
        return drawn, f(at).mean, f(at).variance, jnp.diag(C)[:3], g(at[1:4]).variance

    drawn, mean, variance, joint, alone = model(jnp.linspace(0.0, 1.0, 5, dtype=dtype)[:, None])
    assert drawn.dtype == dtype
    np.testing.assert_allclose(drawn, mean, atol=50 * atol)  # inducing variables, and known
    np.testing.assert_allclose(variance, 0, atol=atol)
    np.testing.assert_allclose(joint, alone, atol=atol)


def test_paths_have_slopes_and_averages(fitted):

    @jax.jit
    def of_paths(f, at):
        paths = f.sample_paths(jax.random.PRNGKey(0), 3, num_features=64)
        slopes = jax.jacfwd(lambda shift: paths(at + shift))(0.0)
        averages = paths(ogp.Average(at.reshape(2, 2, 1)))
        return paths(at), slopes, paths(ogp.concatenate([at, ogp.Derivative(at, 0)])), averages

    values, slopes, both, averages = of_paths(fitted, jnp.asarray(AT))
    np.testing.assert_allclose(both, np.concatenate([values, slopes], 1), atol=1e-8)
    np.testing.assert_allclose(averages, values.reshape(3, 2, 2).mean(2), atol=1e-10)


def test_other_likelihoods_integrate_over_the_functional(fitted):
    """A probit of slopes, and Poisson counts whose log rate is an average."""
    slope, average = fitted(ogp.Derivative(jnp.asarray(AT), 0)), fitted(ogp.Average(jnp.asarray(AT).reshape(2, 2, 1)))
    ones, (mean, variance) = np.ones(4), (np.asarray(slope.mean), np.asarray(slope.variance))
    expected = oracles.expected_log_density(oracles.log_bernoulli_probit, ones, mean, variance)
    found = likelihoods.Bernoulli(slope, "probit").log_prob(jnp.ones(4, int))
    np.testing.assert_allclose(found, expected, atol=1e-3)
    rate = np.exp(average.mean + average.variance / 2)
    known = 3 * average.mean - rate - math.log(6)
    np.testing.assert_allclose(likelihoods.Poisson(average).log_prob(jnp.array([3, 3])), known, atol=1e-10)


# ---------------------------------------------------------------- fewer points than data, and no Gaussian noise


def test_few_points_have_standard_deviations_within_two_percent(rng):
    """200 rows over ten lengthscales, 30 points: slopes, integrals and averages beside an exact GP."""
    many = np.sort(rng.uniform(-4, 4, 200))[:, None]
    y = np.sin(2 * many[:, 0]) + NOISE * rng.normal(size=200)
    Z = jnp.linspace(-4.2, 4.2, 30)[:, None]
    f = ogp.CollapsedGP(KERNEL, jnp.asarray(many), Z, NOISE).posterior(jnp.asarray(y))
    at = np.linspace(-3.5, 3.5, 12)[:, None]
    mean, cov = oracles.exact_predict(ORACLE, augmented(many, 0), y, NOISE**2, augmented(at, 1))
    nodes, weights = oracles.legendre(30)
    boxes = at[:, :1] + 0.25 * (nodes + 1)  # from at to at + 0.5
    of_nodes = oracles.exact_predict(oracles.rbf(VARIANCE, LENGTHSCALE), many, y, NOISE**2, boxes.reshape(-1, 1))
    W = np.kron(np.eye(12), 0.25 * weights)
    integral = W @ of_nodes[0], W @ of_nodes[1] @ W.T
    exact_moments = {"slope": (mean, cov), "integral": integral, "average": (2 * integral[0], 4 * integral[1])}
    rows = {
        "slope": ogp.Derivative(jnp.asarray(at), 0),
        "integral": ogp.Integral(jnp.asarray(at), jnp.asarray(at + 0.5)),
        "average": ogp.Average(jnp.asarray(boxes)[..., None], jnp.asarray(weights / 2)),
    }
    for name, (known, covariance) in exact_moments.items():
        m, sd = f(rows[name]), np.sqrt(np.diag(covariance))
        np.testing.assert_allclose(np.sqrt(m.variance), sd, rtol=0.02)
        np.testing.assert_allclose(m.mean, known, atol=0.1 * sd.max())


@pytest.mark.slow
def test_a_monotone_function_is_that_of_nuts(rng):
    """Values, and slopes that a probit of ten times the slope sees to be positive."""
    at = rng.uniform(0, 1, (30, 1))
    y = jnp.asarray(np.tanh(5 * (at[:, 0] - 0.3)) + 0.3 * rng.normal(size=30))
    at, grid, Z = jnp.asarray(at), jnp.linspace(0.0, 1.0, 12)[:, None], jnp.linspace(0.0, 1.0, 10)[:, None]

    def rising(y):
        f = ogp.gp("f", 2.0 * kernels.RBF(0.2), Z)
        numpyro.deterministic("values", f(grid).mean)
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", likelihoods.Gaussian(f(at), 0.3), obs=y)
        with numpyro.plate("grid", len(grid)):
            upwards = likelihoods.Bernoulli(f(ogp.Derivative(grid, 0)), "probit")
            numpyro.sample("upwards", upwards, obs=jnp.ones(len(grid), int))

    guide = ogp.AutoSparseGP(rising, natural=True)
    optimizer = ogp.natural_gradient(optax.adam(1e-2), 0.3, ramp_up=10)
    svi = SVI(rising, guide, optimizer, TraceMeanField_ELBO())
    params = svi.run(jax.random.PRNGKey(0), 150, y, progress_bar=False).params
    m = ogp.posterior(rising, guide, params, y)["f"](grid)
    mcmc = MCMC(NUTS(rising), num_warmup=500, num_samples=2000, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(1), y)
    values = mcmc.get_samples()["values"]
    np.testing.assert_allclose(m.mean, values.mean(0), atol=0.25 * float(values.std(0).max()))
    np.testing.assert_allclose(np.sqrt(m.variance), values.std(0), rtol=0.15)


# ---------------------------------------------------------------- invariants


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 10.0))
def test_marginals_are_linear_in_the_functional(fitted, seed, scale):
    """Of random sums: the joint distribution of values tells them, and factors come out."""
    rng = np.random.default_rng(seed)
    nodes, weights = jnp.asarray(rng.uniform(-3, 3, (2, 4, 1))), jnp.asarray(rng.normal(size=(2, 4)))
    m, scaled = fitted(ogp.Average(nodes, weights)), fitted(ogp.Average(nodes, scale * weights))
    np.testing.assert_allclose(scaled.mean, scale * m.mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(scaled.variance, scale**2 * m.variance, rtol=1e-7, atol=1e-9 * scale**2)
    assert (m.residual_variance >= 0).all()
    assert (m.variance <= ogp.Average(nodes, weights).variance(KERNEL) + 1e-9).all()
    joint = fitted.joint(nodes[0])
    np.testing.assert_allclose(m.mean[0], weights[0] @ joint.mean, atol=1e-8)
    np.testing.assert_allclose(m.variance[0], weights[0] @ joint.covariance_matrix @ weights[0], atol=1e-6)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "kernel, dims, message",
    [
        (kernels.Matern12(), 0, "Matern12 has no derivatives; this needs one of order 1"),
        (kernels.Matern32(), (0, 0), "Matern32 has first derivatives only; this needs one of order 2"),
        (2.0 * kernels.RBF() + kernels.Matern52().on(0), (0, 0, 0), "Matern52 has derivatives up to order 2"),
        (kernels.ArcCosine(1), (0, 0), "ArcCosine has first derivatives only"),
        (kernels.RBF() + kernels.White(0.1), 0, "White noise has no derivatives"),
        (kernels.RBF().on(1) * kernels.Coregion(jnp.ones((2, 1))).on(0), 0, "Coregion is a function of task indices"),
    ],
)
def test_rough_kernels_are_refused(kernel, dims, message):
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernel, jnp.array([[0.0, 0.5], [1.0, -0.4]]))
    with pytest.raises(ValueError, match=message):
        f(ogp.Derivative(jnp.zeros((3, 2)), dims))


def as_function(kernel):
    return lambda A, B=None: kernel(A) if B is None else kernel(A, B)


def with_a_root(A, B=None):
    r = jnp.zeros(len(A)) if B is None else jnp.sqrt(((A[:, None] - B) ** 2).sum(-1))
    return (1 + r) * jnp.exp(-r)


@pytest.mark.parametrize(("dtype", "unit"), [(np.float64, 1e-2), (np.float32, 1e3)])
def test_values_tell_of_kernels_that_are_functions(dtype, unit):
    """So they do of tinygp's."""
    X = unit * jnp.linspace(-2.0, 2.0, 4, dtype=dtype)[:, None]
    first, second, along = (
        ogp.Derivative(X, 0),
        ogp.Derivative(X, (0, 0)),
        ogp.Derivative(X, direction=jnp.ones(1, dtype)),
    )
    first, second, along = (rows.checked(1, dtype) for rows in (first, second, along))
    smooth, once, rough = (as_function(k(dtype(unit))) for k in (kernels.RBF, kernels.Matern32, kernels.Matern12))

    def look(kernel, rows):
        jax.jit(with_checks(lambda rows: rows.looked_at(kernel).num))(rows)[1].inspect()

    for kernel, rows in ((smooth, second), (once, first), (1.5 * kernels.Function(smooth), along)):
        look(kernel, rows)
    mixed = kernels.RBF(dtype(unit)) + kernels.Function(rough)
    for kernel, rows in ((rough, first), (once, second), (mixed, ogp.concatenate([first]))):
        with pytest.raises(ValueError, match="has no such derivative: the kernel has a kink"):
            look(kernel, rows)


def test_functions_are_looked_at_before_they_are_used():
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", with_a_root, jnp.linspace(-2.0, 2.0, 4)[:, None])
    rows = ogp.Derivative(jnp.zeros((2, 1)), 0)
    for asked in (f, f.joint):
        with pytest.raises(ValueError, match="is NaN where two inputs coincide"):
            asked(rows)


def test_white_noise_has_no_integral():
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF() + 0.3 * kernels.White(0.5), jnp.zeros((1, 1)))
    box = ogp.Integral(jnp.zeros((1, 1)), jnp.ones((1, 1)))
    with pytest.raises(ValueError, match="White noise has no integral"):
        f(box)
    assert jnp.isfinite(f.term(0)(box).variance).all()


def test_smooth_columns_and_terms_have_derivatives_beside_rough_ones():
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF().on(0) * kernels.Matern12().on(1), jnp.array([[0.0, 0.5], [1.0, -0.4]]))
        g = ogp.gp("g", kernels.RBF() + kernels.Matern12(), jnp.array([[0.0, 0.5], [1.0, -0.4]]))
    assert jnp.isfinite(f(ogp.Derivative(jnp.zeros((3, 2)), 0)).variance).all()
    assert jnp.isfinite(g.term(0)(ogp.Derivative(jnp.zeros((3, 2)), 0)).variance).all()
    mixed = kernels.Matern32().on(0) * kernels.Matern32().on(1)  # each once
    assert jnp.isfinite(ogp.Derivative(jnp.zeros((3, 2)), (0, 1)).variance(mixed)).all()


@pytest.mark.parametrize(
    "functional, error, message",
    [
        (ogp.Derivative(jnp.zeros((3, 2))), ValueError, "needs `dim`, the input column, one of 0..1"),
        (ogp.Derivative(jnp.zeros((3, 2)), 2), ValueError, "`dim` must lie in 0..1 for inputs with D = 2; got 2"),
        (ogp.Derivative(jnp.zeros((3, 2)), ()), ValueError, "`dim` must lie in 0..1"),
        (ogp.Derivative(jnp.zeros((3, 2)), 0.5), ValueError, "`dim` must be an integer"),
        (ogp.Derivative(jnp.zeros((3, 3)), 0), ValueError, "D = 2; got \\(3, 3\\)"),
        (ogp.Derivative(jnp.zeros((3, 2), complex), 0), TypeError, "`X` must hold real numbers"),
        (ogp.Derivative(jnp.zeros((3, 2), jnp.float32), 0), TypeError, "nothing is cast silently"),
        (ogp.Derivative(jnp.zeros((3, 2)), 0, direction=jnp.ones(2)), ValueError, "`dim` or `direction`; got both"),
        (ogp.Derivative(jnp.zeros((3, 2)), direction=jnp.ones(3)), ValueError, "`direction` must have shape"),
        (ogp.Average(jnp.zeros((3, 2))), ValueError, "`nodes` must have shape \\(B, Q, D\\).*nodes\\[:, None, :\\]"),
        (ogp.Average(jnp.zeros((3, 4, 2)), jnp.ones(3)), ValueError, "`weights` must have shape \\(Q,\\) or"),
        (ogp.Average(jnp.full((3, 4, 2), jnp.nan)), ValueError, "must be finite"),
        (ogp.Integral(jnp.zeros((3, 2)), jnp.ones((2, 2))), ValueError, "must have one shape"),
        (ogp.Integral(jnp.ones((3, 2)), jnp.zeros((3, 2))), ValueError, "`lower` must not be above `upper`; got 6"),
        (ogp.Integral(jnp.zeros((3, 2)), jnp.ones((3, 2)), num_nodes=200), ValueError, "more than 10000 for a box"),
    ],
)
def test_wrong_functionals_say_so(functional, error, message):
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(), jnp.array([[0.0, 0.5], [1.0, -0.4]]))
    with pytest.raises(error, match=message):
        f(functional)


def test_nothing_is_not_concatenated():
    with pytest.raises(ValueError, match="at least one functional"):
        ogp.concatenate([])


def test_where_functionals_do_not_go(fitted):
    slope = ogp.Derivative(jnp.asarray(AT), 0)
    with pytest.raises(ValueError, match=r"not of functionals or terms of it; got Derivative\. Leave `group_size` out"):
        replace(fitted, grouping=Grouping(2))(slope)
    with pytest.raises(
        TypeError, match=r"got Derivative, a linear functional\. Only a single function takes functionals"
    ):
        ogp.DeepGP([fitted, fitted])(slope)
    with pytest.raises(TypeError, match="got Derivative, a linear functional"):
        ogp.patchwise(fitted, slope, image_shape=(2, 2), patch_shape=(1, 1))
    with pytest.raises(TypeError, match=r"f.expected\(X\) needs what latent_inputs\(\) returns; got Derivative"):
        fitted.expected(slope)
    with pytest.raises(TypeError, match="got Derivative, a linear functional"):
        ogp.online.condition(fitted, slope, jnp.zeros(4), 0.1)
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", KERNEL, jnp.asarray(X))
    with pytest.raises(ValueError, match="here one function comes twice"):
        ogp.stack([f(jnp.asarray(AT)), f(slope)])


def test_images_have_no_derivatives_but_averages(rng):
    kernel = kernels.Convolutional(kernels.RBF(), image_shape=(2, 2), patch_shape=(1, 1))
    images = jnp.asarray(rng.normal(size=(2, 3, 4)))

    @jax.jit
    def both(images, flat):
        return ogp.Average(images).matrix(kernel), kernel(flat, flat).reshape(2, 3, 2, 3).mean((1, 3))

    np.testing.assert_allclose(*both(images, images.reshape(6, 4)), atol=1e-12)
    with pytest.raises(ValueError, match="Derivatives of functions of images are not known"):
        ogp.Derivative(images[0], 0).variance(kernel)
