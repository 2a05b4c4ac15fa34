"""Fourier features against numerical integrals of the RKHS inner product, and bounds with them against dense formulas."""

from __future__ import annotations

from functools import cache, cached_property, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from numpyro import handlers
from numpyro.infer import Predictive
from scipy.linalg import block_diag

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.functions.prior import decompose_sets
from numpyro_orthgp.functions.projection import project
from numpyro_orthgp.inducing import FourierFeatures, SphericalHarmonics, as_sets
from tests import oracles, problems
from tests.interdomain import features, joint, points

MATERNS = {"matern12": kernels.Matern12, "matern32": kernels.Matern32, "matern52": kernels.Matern52}
ORDER = {"matern12": 1, "matern32": 2, "matern52": 3}
POLYNOMIAL = {"matern12": [1], "matern32": [1, 1], "matern52": [1, 1, 1 / 3]}  # k = q(s) exp(-s), s = rate |x - y|
VARIANCE, LENGTHSCALE, NOISE = 1.3, 0.9, 0.4
LOWER, UPPER = -1.5, 1.8


# ---------------------------------------------------------------- the oracle


class Waves:
    """1, cos, sin on an interval: exact derivatives and inner products by quadrature, in the RKHS of a Matern kernel.

    The inner products are those of Durrande et al. 2016 for unit variance; scaling the kernel by v divides them by v.
    """

    def __init__(self, name, M, lower=LOWER, upper=UPPER, lengthscale=LENGTHSCALE, variance=VARIANCE):
        self.p, self.polynomial = ORDER[name], np.polynomial.Polynomial(POLYNOMIAL[name])
        self.rate, self.variance = np.sqrt(2 * self.p - 1) / lengthscale, variance
        self.a, self.b = lower, upper
        self.w = 2 * np.pi * np.arange(M + 1) / (upper - lower)
        self.num = 2 * M + 1
        self.column = cache(self.column_of)  # dense formulas ask again and again

    def waves(self, t):
        """Derivatives 0..p at ``t`` (T,), shape (p + 1, 2M + 1, T)."""
        z = np.exp(1j * self.w[:, None] * (t - self.a))
        d = np.stack([(1j * self.w[:, None]) ** j * z for j in range(self.p + 1)])
        return np.concatenate([d.real, d.imag[:, 1:]], 1)

    def kernel(self, x, t):
        """Derivatives 0..p with respect to ``t`` of k(x, t), shape (p + 1, 1, T)."""
        s, q, rows = self.rate * np.abs(t - x), self.polynomial, []
        for j in range(self.p + 1):
            rows.append((self.rate * np.where(t >= x, 1, -1)) ** j * q(s) * np.exp(-s))
            q = q.deriv() - q
        return np.stack(rows)[:, None]

    def inner(self, g, h, breaks):
        """<g, h>, where ``g`` and ``h`` map t to derivatives; exact up to 100 nodes between any two breaks."""
        nodes, weights = oracles.legendre(100)
        ends = np.unique([self.a, *breaks, self.b])
        t = np.concatenate([(lo + hi) / 2 + (hi - lo) / 2 * nodes for lo, hi in pairwise(ends)])
        w = np.concatenate([(hi - lo) / 2 * weights for lo, hi in pairwise(ends)])
        c = np.array([[1, 1], [1, 2, 1], [1, 3, 3, 1]][self.p - 1]) * self.rate ** np.arange(self.p, -1.0, -1)
        Lg, Lh = (np.tensordot(c, f(t), 1) for f in (g, h))
        integral = (Lg * w) @ Lh.T
        G, H, r = g(np.array([self.a]))[:, :, 0], h(np.array([self.a]))[:, :, 0], self.rate
        if self.p == 1:
            return integral / (2 * r) + np.outer(G[0], H[0])
        if self.p == 2:
            return integral / (4 * r**3) + np.outer(G[0], H[0]) + np.outer(G[1], H[1]) / r**2
        mixed = np.outer(G[1], H[1]) + (np.outer(G[2], H[0]) + np.outer(G[0], H[2])) / 8
        edge = 9 / 8 * np.outer(G[0], H[0]) + 9 / (8 * r**4) * np.outer(G[2], H[2]) + 3 / r**2 * mixed
        return 3 * integral / (16 * r**5) + edge

    @cached_property
    def Kuu(self):
        return self.inner(self.waves, self.waves, []) / self.variance

    def Kuf(self, X):
        """<phi, k(x, .)> restricted to the interval; the amplitude cancels."""
        return np.array([self.column(float(x)) for x in X[:, 0]]).reshape(-1, self.num).T

    def column_of(self, x):
        return self.inner(self.waves, partial(self.kernel, x), np.clip([x], self.a, self.b))[:, 0]


def kernel_of(name, variance=VARIANCE, lengthscale=LENGTHSCALE):
    return variance * MATERNS[name](lengthscale)


def dense(name, M, D=1):
    """The joint kernel of features and function, and the rows that stand for the features."""
    waves = Waves(name, M)
    return joint(problems.kernel_oracle(name), waves.Kuu, waves.Kuf), features(0, waves.num, D)


@jax.jit
def ask(F, kernel, X):
    """The two questions."""
    return F.covariance(kernel, F), F.covariance_with_inputs(kernel, X)


def data(rng, N=25):
    """One input column, partly outside of the interval."""
    X, y = problems.data(rng, N, D=1)
    return 1.2 * X, y


@jax.jit
def residual_covariance(kernel, sets, X):
    """K(X, X) - sum_i A_i(X)' A_i(X) as the package computes it, without jitter."""
    blocks = decompose_sets(kernel, sets, 0.0)
    A = project(blocks, [s.covariance_with_inputs(kernel, X) for s in sets])
    return kernel(X, X) - sum(jnp.swapaxes(a, -1, -2) @ a for a in A)


def dense_residual(k, Z, X):
    return k(X, X) - k(X, Z) @ np.linalg.solve(k(Z, Z), k(Z, X))


# ---------------------------------------------------------------- covariances


@pytest.mark.parametrize("name", MATERNS)
def test_covariances_are_inner_products_of_the_rkhs(name):
    """K_uu = <phi, phi'>; K_uf = <phi, k(x, .)>, which the reproducing property makes phi(x), and more outside."""
    waves, F = Waves(name, 4), FourierFeatures(4, LOWER, UPPER)
    X = np.array([-4.0, -1.6, LOWER, -1.49, -0.3, 0.7, UPPER, 1.81, 2.5, 6.0])[:, None]
    kernel, scale = kernel_of(name), np.sqrt(np.diag(waves.Kuu) * VARIANCE)
    Kuu, Kuf = ask(F, kernel, jnp.asarray(X))
    np.testing.assert_allclose(Kuu, VARIANCE**2 * waves.Kuu / np.outer(scale, scale), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(Kuf, VARIANCE * waves.Kuf(X) / scale[:, None], rtol=1e-10, atol=1e-12)
    inside = (X[:, 0] >= LOWER) & (X[:, 0] <= UPPER)
    np.testing.assert_allclose(waves.Kuf(X)[:, inside], waves.waves(X[inside, 0])[0], atol=1e-11)


@pytest.mark.parametrize("name", MATERNS)
def test_variables_have_the_variance_of_the_function(name):
    F = FourierFeatures(30, LOWER, UPPER)
    for lengthscale in (0.01, 1.0, 300.0):
        K = F.covariance(kernel_of(name, lengthscale=lengthscale), F)
        np.testing.assert_allclose(jnp.diag(K), VARIANCE, rtol=1e-13)


@pytest.mark.parametrize("name", MATERNS)
def test_covariance_is_continuous_at_the_edges_and_fades(name):
    F, kernel = FourierFeatures(3, LOWER, UPPER), kernel_of(name)
    edges = np.add.outer([LOWER, UPPER], [-1e-9, 1e-9]).reshape(4, 1)
    K = ask(F, kernel, jnp.asarray(edges))[1]
    np.testing.assert_allclose(K[:, ::2], K[:, 1::2], atol=1e-7)
    far = jnp.asarray([[-1e30], [-1e4], [1e4], [1e30]])
    for dtype in (np.float32, np.float64):
        G, k = FourierFeatures(3, LOWER, UPPER, dtype=dtype), kernel_of(name, dtype(VARIANCE), dtype(LENGTHSCALE))
        values, slopes = jax.jit(jax.value_and_grad(partial(sum_of_covariances, G, k)))(far.astype(dtype))
        assert values == 0 and values.dtype == dtype
        np.testing.assert_array_equal(slopes, jnp.zeros((4, 1), dtype), strict=True)


def sum_of_covariances(F, kernel, X):
    return jnp.abs(F.covariance_with_inputs(kernel, X)).sum()


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(MATERNS)), st.floats(0.05, 20), st.floats(-3, 2), st.floats(0.1, 6), st.integers(0, 2**32 - 1)
)  # fmt: skip
def test_what_features_explain_never_exceeds_the_prior(name, lengthscale, lower, width, seed):
    X = jnp.asarray(np.random.default_rng(seed).uniform(-4, 4, (12, 1)))
    F, kernel = FourierFeatures(5, lower, lower + width), kernel_of(name, 1.0, lengthscale)
    K, Kuu, Kuf = (
        kernel_oracle(name, lengthscale)(*2 * [np.asarray(X)]),
        F.covariance(kernel, F),
        F.covariance_with_inputs(kernel, X),
    )
    assert np.linalg.eigvalsh(Kuu).min() > 1e-8
    assert np.linalg.eigvalsh(K - Kuf.T @ np.linalg.solve(Kuu, Kuf)).min() > -1e-9


def kernel_oracle(name, lengthscale):
    return problems.kernel_oracle(name, 1.0, lengthscale)


@pytest.mark.parametrize("name", MATERNS)
def test_residual_vanishes_far_from_the_edges_or_with_p_points(name):
    """Periodic functions lack p dimensions of the RKHS: a residual that fades from the edges, and that p points take up."""
    X, Z = np.linspace(0, 10, 41)[:, None], np.linspace(0, 1, 4)[: ORDER[name], None]
    k, kernel, alone, joined = kernel_oracle(name, 0.7), kernel_of(name, 1.0, 0.7), [], []
    for M in (20, 40, 80):
        Kuu, Kuf = (np.asarray(K) for K in ask(FourierFeatures(M, 0.0, 10.0), kernel, jnp.concatenate([X, Z])))
        both = np.concatenate([X, Z])
        R = k(both, both) - Kuf.T @ np.linalg.solve(Kuu, Kuf)
        alone.append(np.diag(R)[:41])
        joined.append(alone[-1] - np.einsum("im,im->i", R[:41, 41:] @ np.linalg.inv(R[41:, 41:]), R[:41, 41:]))
    assert all((fine <= coarse + 1e-9).all() for coarse, fine in pairwise(alone))
    assert 0.45 < alone[-1][0] < 0.51
    # Each doubling of frequencies leaves 2^(1 - 2p) of the residual, as the tail of the spectrum says; with points at most half.
    np.testing.assert_allclose(alone[2][20] / alone[1][20], 0.5 ** (2 * ORDER[name] - 1), rtol=0.1)
    assert joined[2].max() < 0.6 * joined[1].max() < 0.4 * joined[0].max()


@pytest.mark.parametrize("name", MATERNS)
def test_gradients(name):
    F, X = FourierFeatures(3, LOWER, UPPER), jnp.asarray([[-2.5], [-1.0], [0.4], [2.0]])

    def f(lengthscale, variance, X):
        return ask(F, kernel_of(name, variance, lengthscale), X)

    check_grads(f, (jnp.asarray(0.8), jnp.asarray(1.7), X), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_hyperparameters_of_each_latent_function(rng):
    X, y = data(rng)
    F, X = FourierFeatures(3, LOWER, UPPER), jnp.asarray(X)
    v, l = jnp.asarray([0.8, 1.7]), jnp.asarray([[0.5], [1.1]])
    both = kernel_of("matern32", v, l)
    apart = [kernel_of("matern32", *p) for p in zip(v, l, strict=True)]
    for together, *each in zip(ask(F, both, X), *(ask(F, k, X) for k in apart), strict=True):
        np.testing.assert_allclose(together, jnp.stack(each), rtol=1e-13)
    Y = jnp.stack([jnp.asarray(y), jnp.cos(X[:, 0])], -1)
    bound = jax.jit(lambda k, Y: ogp.CollapsedGP(k, X, F, 0.3).log_prob(Y))
    np.testing.assert_allclose(bound(both, Y), sum(bound(k, Y[:, i]) for i, k in enumerate(apart)), rtol=1e-10)


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    "name, order, residual",
    [("matern12", "F", "prior"), ("matern32", "FZ", "tight"), ("matern52", "ZF", "prior")],
    ids=["one_set", "points_second", "points_first"],
)
def test_bound_is_the_dense_one(rng, name, order, residual):
    X, y = data(rng)
    k, rows = dense(name, 3)
    Z = problems.sets(rng, [4], D=1)[0]
    sets = {"F": (FourierFeatures(3, LOWER, UPPER), rows), "Z": (Z, points(Z))}
    inducing, tagged = zip(*(sets[s] for s in order), strict=True)
    qs = [problems.random_q(rng, len(r)) for r in tagged]
    likelihood = problems.gaussian(NOISE)
    kwargs = {"inducing": list(inducing), "likelihood": likelihood, "kernel": name, "residual": residual}
    ours = -problems.loss(problems.q_params(qs), jnp.asarray(X), jnp.asarray(y), **kwargs)
    v = "optimal" if residual == "tight" else 1.0
    expected = oracles.elbo_gaussian(k, problems.oracle_sets(tagged, qs), points(X), y, NOISE**2, v=v)
    np.testing.assert_allclose(ours, expected, rtol=1e-9)


@pytest.mark.parametrize("bound", ["titsias2009", "titsias2025", "artemev2021"])
def test_collapsed_bound_is_the_dense_one(rng, bound):
    X, y = data(rng)
    k, rows = dense("matern32", 4)
    log_prob = jax.jit(
        lambda F, kernel: ogp.CollapsedGP(kernel, X, F, NOISE, bound=bound, jitter=0.0).log_prob(jnp.asarray(y))
    )
    ours = log_prob(FourierFeatures(4, LOWER, UPPER), kernel_of("matern32"))
    np.testing.assert_allclose(ours, oracles.COLLAPSED[bound](k, points(X), y, rows, NOISE**2), rtol=1e-9)


def test_optimal_q_reaches_the_collapsed_bound(rng):
    X, y = data(rng)
    k, rows = dense("matern12", 3)
    mean, cov = oracles.optimal_q(k, points(X), y, rows, NOISE**2, whitened=True)
    q = (mean, np.linalg.cholesky((cov + cov.T) / 2))
    kwargs = {
        "inducing": FourierFeatures(3, LOWER, UPPER),
        "likelihood": problems.gaussian(NOISE),
        "kernel": "matern12",
    }
    ours = -problems.loss(problems.q_params([q]), jnp.asarray(X), jnp.asarray(y), **kwargs)
    np.testing.assert_allclose(ours, oracles.titsias2009(k, points(X), y, rows, NOISE**2), rtol=1e-9)


class TestAdditive:
    """A sum of kernels of single columns, features of each, and points that see the whole function."""

    KERNEL = 0.7 * kernels.Matern32(0.8).on(0) + 1.9 * kernels.Matern52([0.5]).on([2])
    SETS = (FourierFeatures(3, -2.0, 2.0, dim=0), FourierFeatures(4, -1.0, 2.5, dim=2))

    def oracle(self):
        parts = [
            Waves("matern32", 3, -2.0, 2.0, lengthscale=0.8, variance=0.7),
            Waves("matern52", 4, -1.0, 2.5, lengthscale=0.5, variance=1.9),
        ]
        k0, k1 = oracles.matern32(0.7, 0.8), oracles.matern52(1.9, 0.5)
        return joint(
            lambda A, B: k0(A[:, :1], B[:, :1]) + k1(A[:, 2:], B[:, 2:]),
            block_diag(*(p.Kuu for p in parts)),
            lambda X: np.concatenate([p.Kuf(X[:, c : c + 1]) for p, c in zip(parts, (0, 2), strict=True)]),
        )

    def test_residual(self, rng):
        X, Z = rng.uniform(-3, 3, (9, 3)), rng.uniform(-2, 2, (4, 3))
        inducing = as_sets([*self.SETS, Z])[0]
        rows = np.concatenate([features(0, 16, 3), points(Z)])
        ours = residual_covariance(self.KERNEL, inducing, jnp.asarray(X))
        np.testing.assert_allclose(ours, dense_residual(self.oracle(), rows, points(X)), rtol=1e-8, atol=1e-10)

    def test_collapsed_bound(self, rng):
        X = rng.uniform(-3, 3, (20, 3))
        y, k = np.sin(X[:, 0]) + X[:, 2], self.oracle()
        log_prob = jax.jit(
            lambda X: ogp.CollapsedGP(self.KERNEL, X, list(self.SETS), NOISE, bound="titsias2009").log_prob(y)
        )
        rows = features(0, 7, 3), features(7, 16, 3)
        best = oracles.solvegp_optimal_qv(k, points(X), y, *rows, NOISE**2)
        expected = oracles.solvegp_collapsed(k, points(X), y, *rows, NOISE**2, *best)
        np.testing.assert_allclose(log_prob(jnp.asarray(X)), expected, rtol=1e-7)

    def test_features_of_different_terms_are_independent(self):
        F0, F1 = self.SETS
        np.testing.assert_array_equal(F0.covariance(self.KERNEL, F1), np.zeros((7, 9)))
        S = SphericalHarmonics(2, 3)
        kernel = self.KERNEL + kernels.ArcCosine(1).on([0, 1])
        np.testing.assert_array_equal(F0.covariance(kernel, S), np.zeros((7, S.num)))
        np.testing.assert_array_equal(S.covariance(kernel, F0), np.zeros((S.num, 7)))

    def test_terms_may_share_a_kernel(self):
        """What tells terms apart is where they are in the sum: where the lengthscale is traced, one object stays one."""
        F0, F1 = (FourierFeatures(3, -2.0, 2.0, dim=c) for c in (0, 1))

        def covariances(lengthscale):
            kernel = kernels.Matern32(lengthscale)
            shared = kernel.on(0) + kernel.on(1)
            return F0.covariance(shared, F0), F0.covariance(shared, F1)

        K = F0.covariance(kernels.Matern32(0.8).on(0), F0)
        for function in (covariances, jax.jit(covariances)):
            K_00, K_01 = function(jnp.asarray(0.8))
            np.testing.assert_allclose(K_00, K, rtol=1e-12)
            np.testing.assert_array_equal(K_01, np.zeros((7, 7)))

    def test_columns_are_those_of_nested_restrictions(self, rng):
        X = jnp.asarray(rng.normal(size=(5, 3)))
        plain, nested = kernels.Matern32(0.8).on(2), kernels.RBF(1.0) + kernels.Matern32(0.8).on(0).on([2, 1])
        named, free = (FourierFeatures(2, -1.0, 1.0, dim=dim) for dim in (2, None))
        expected = named.covariance_with_inputs(plain, X)
        for F, kernel in ((named, nested), (free, nested), (free, plain)):
            np.testing.assert_array_equal(F.covariance_with_inputs(kernel, X), expected)
        np.testing.assert_array_equal(free.covariance(nested, named), named.covariance(plain, named))


def test_points_of_each_latent_function_as_second_set(rng):
    X, _ = data(rng, 6)
    k, rows = dense("matern32", 3)
    Z = rng.uniform(-2, 2, (2, 4, 1))
    ours = residual_covariance(kernel_of("matern32"), as_sets([FourierFeatures(3, LOWER, UPPER), Z])[0], jnp.asarray(X))
    for p in range(2):
        expected = dense_residual(k, np.concatenate([rows, points(Z[p])]), points(X))
        np.testing.assert_allclose(ours[p], expected, rtol=1e-8, atol=1e-10)


def test_float32(rng):
    """Raw projections, not scaled to one variance, would be off by 180 nats here: the jitter drowns the high frequencies."""
    X = rng.uniform(0, 1, (200, 1))
    y, results = np.sin(9 * X[:, 0]) + 0.1 * rng.normal(size=200), []
    for dtype in (np.float32, np.float64):
        F = FourierFeatures(30, -0.2, 1.2, dtype=dtype)

        def bound(lengthscale, X, y, F=F, dtype=dtype):
            return ogp.CollapsedGP(kernel_of("matern52", dtype(1.3), lengthscale), X, F, dtype(0.1)).log_prob(y)

        results.append(jax.jit(jax.value_and_grad(bound))(*(jnp.asarray(a, dtype) for a in (0.3, X, y))))
        assert all(a.dtype == dtype for a in results[-1])
    (value, slope), (value64, slope64) = results
    np.testing.assert_allclose(value, value64, atol=0.02)
    np.testing.assert_allclose(slope, slope64, rtol=2e-3)


# ---------------------------------------------------------------- inside of models


def model(X, F, lengthscale=LENGTHSCALE):
    f = ogp.gp("f", kernel_of("matern32", lengthscale=lengthscale), F, jitter=0.0)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE))
    return f(X)


def test_values_are_what_the_function_is_conditioned_on(rng):
    X, _ = data(rng, 7)
    waves, e = Waves("matern32", 3), rng.normal(size=7)
    A = np.linalg.solve(np.linalg.cholesky(waves.Kuu), waves.Kuf(X))

    @jax.jit
    def conditioned(X, F, e):
        return handlers.substitute(handlers.seed(model, 0), {"f.u0": e})(X, F)

    f = conditioned(jnp.asarray(X), FourierFeatures(3, LOWER, UPPER), jnp.asarray(e))
    np.testing.assert_allclose(f.mean, A.T @ e, rtol=1e-9)
    np.testing.assert_allclose(f.variance, VARIANCE - (A**2).sum(0), rtol=1e-8)


def test_predictive(rng):
    X = jnp.asarray(data(rng, 7)[0])
    draws = Predictive(model, num_samples=400)(jax.random.PRNGKey(0), X, FourierFeatures(3, LOWER, UPPER))
    assert draws["f.u0"].shape == (400, 7)
    z = (jnp.square(draws["y"]).mean(0) / (VARIANCE + NOISE**2) - 1) * np.sqrt(400 / 2)
    assert jnp.abs(z).max() < 4


def test_a_feature_is_static_data_of_compiled_functions():
    F, traces = FourierFeatures(3, LOWER, np.float64(UPPER)), []

    @jax.jit
    def f(F, lengthscale):
        traces.append(F)
        return F.covariance(kernels.Matern32(lengthscale), F)

    np.testing.assert_allclose(f(F, 0.5), F.covariance(kernels.Matern32(0.5), F), rtol=1e-14)
    f(FourierFeatures(3, LOWER, UPPER), 0.7)
    assert len(traces) == 1 and not jax.tree.leaves(F)
    assert jax.tree.map(lambda x: x, F) == F and hash(F) == hash(FourierFeatures(3, LOWER, UPPER))
    assert f(FourierFeatures(4, LOWER, UPPER), 0.7).shape == (9, 9)


def test_the_dtype_follows_the_edges():
    assert FourierFeatures(1, 0, 1).dtype == jnp.result_type(float)
    assert FourierFeatures(1, jnp.float32(0), 1.0).dtype == jnp.float32
    assert FourierFeatures(1, 0.0, 1.0, dtype=jnp.float32).covariance(kernels.Matern12(), FourierFeatures(
        1, 0.0, 1.0, dtype=jnp.float32)).dtype == jnp.float32  # fmt: skip


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        ((0, 0.0, 1.0), {}, ValueError, "`num_frequencies` must be a positive integer; got 0"),
        ((2.5, 0.0, 1.0), {}, ValueError, "`num_frequencies` must be a positive integer; got 2.5"),
        ((3, 1.0, 1.0), {}, ValueError, "`lower` must be below `upper`"),
        ((3, 0.0, np.inf), {}, ValueError, "`upper` must be finite"),
        ((3, 0.0, [1.0, 2.0]), {}, TypeError, "`upper` must be a number"),
        ((3, 0.0, 1.0), {"dim": "x"}, ValueError, "`dim` must be an integer; got 'x'"),
        ((3, 0.0, 1.0), {"dtype": int}, TypeError, "`dtype` must be a floating dtype; got int64"),
    ],
    ids=["none", "fraction", "empty", "infinite", "list", "dim", "dtype"],
)
def test_errors_of_construction(args, options, error, message):
    with pytest.raises(error, match=message):
        FourierFeatures(*args, **options)


def test_a_traced_edge_is_refused():
    with pytest.raises(TypeError, match=r"`upper` must be a number known before tracing.*float\(X.max\(\)\)"):
        jax.jit(lambda X: FourierFeatures(3, 0.0, X.max()).num)(jnp.ones(3))


M32 = kernels.Matern32


@pytest.mark.parametrize(
    "kernel, dim, D, message",
    [
        (
            kernels.RBF(1.0),
            None,
            1,
            r"exactly one term Matern12, Matern32 or Matern52 of a single column.*got no such terms",
        ),
        (M32(1.0).on(0) + kernels.Matern52(2.0).on(0), 0, 1, r"of column 0, such as .*on\(0\); got 2 such terms"),
        (M32(1.0).on(0) + M32(2.0).on(1), None, 2, "got 2 such terms"),
        (M32(1.0).on(0), 1, 2, "of column 1.*got no such terms"),
        (M32(1.0).on(0) * M32(1.0).on(1), 0, 2, "got no such terms"),
        (M32(1.0).on([0, 1]), None, 2, "got no such terms"),
        (
            M32(1.0),
            None,
            2,
            r"need a Matern32 of one column; this one sees all 2 columns .* Matern32\(lengthscale\).on\(0\)",
        ),
        (M32(1.0).on(3), 3, 2, "`dims` must lie in 0..1 for inputs with D = 2"),
        (M32([1.0, 2.0]), None, 2, "`lengthscale` must have shape"),
    ],
    ids=[
        "other_kernel",
        "one_column_twice",
        "ambiguous",
        "other_column",
        "product",
        "plane",
        "unrestricted",
        "range",
        "scales",
    ],
)
def test_errors_of_kernels(kernel, dim, D, message):
    F = FourierFeatures(3, 0.0, 1.0, dim=dim)
    with pytest.raises(ValueError, match=message):
        ogp.CollapsedGP(kernel, jnp.ones((4, D)), F, 0.1).log_prob(jnp.ones(4))


def test_other_features_of_the_same_term_are_refused():
    F, G = FourierFeatures(3, 0.0, 1.0), FourierFeatures(3, 0.0, 2.0)
    with pytest.raises(ValueError, match="Two sets of Fourier features on the same column"):
        F.covariance(M32(1.0), G)
    with pytest.raises(TypeError, match="inducing variables are float64"):
        ogp.CollapsedGP(M32(1.0), jnp.ones((4, 1), jnp.float32), F, 0.1)


# ---------------------------------------------------------------- edges, and latent functions beside features


@pytest.mark.parametrize("name", ["matern32", "matern52"])
def test_the_slope_at_an_edge_is_that_on_both_sides(name):
    """A point may start on an edge, where the covariance changes its formula but has no kink."""
    feature, kernel = FourierFeatures(2, LOWER, UPPER), MATERNS[name](LENGTHSCALE)
    for edge in (LOWER, UPPER):
        slope = jax.jacobian(lambda x: feature.covariance_with_inputs(kernel, x[None, None])[:, 0])
        found, step = slope(jnp.asarray(edge)), 1e-9
        assert np.abs(found[3:]).min() > 0.1  # that of sines is not zero
        for near in (edge - step, edge + step):
            np.testing.assert_allclose(found, slope(jnp.asarray(near)), atol=1e-6)


def test_latent_functions_that_features_do_not_know_of(rng):
    """The leading axis is in another term than the features', or in the points of a later set."""
    X = jnp.asarray(rng.uniform(size=(6, 2)))
    Y = jnp.asarray(rng.normal(size=(6, 2)))
    v = jnp.asarray([1.0, 2.0])

    def kernel(v):
        return kernels.Matern32(1.0).on(0) + v * kernels.RBF(1.0)

    F = FourierFeatures(2, -0.5, 1.5, dim=0)
    for inducing in (F, [F, X[:2]], [F, jnp.stack([X[:2], X[:2]])]):
        with pytest.raises(ValueError, match=r"must have shape \(N, 2\)"):
            ogp.CollapsedGP(kernel(v), X, inducing, 0.1).log_prob(Y[:, 0])
        plain = inducing if inducing is F else [F, X[:2]]
        each = [ogp.CollapsedGP(kernel(v[p]), X, plain, 0.1).log_prob(Y[:, p]) for p in range(2)]
        np.testing.assert_allclose(ogp.CollapsedGP(kernel(v), X, inducing, 0.1).log_prob(Y), sum(each), rtol=1e-10)
    with handlers.seed(rng_seed=0):
        assert ogp.gp("f", kernel(v), [F, X[:2]])(X).mean.shape == (6, 2)
        with pytest.raises(ValueError, match=r"a leading axis of 3, .* the kernel's hyperparameters one of 2"):
            ogp.gp("g", kernel(v), [F, jnp.stack(3 * [X[:2]])])
