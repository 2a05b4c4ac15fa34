"""Predictions with the data near each input, beside dense formulas and the exact process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_orthgp as ogp
from numpyro_orthgp import CollapsedGP, kernels, with_neighbors
from numpyro_orthgp.functions.mean_only import MeanShift
from numpyro_orthgp.functions.projection import decompose
from numpyro_orthgp.gaussians.family import Full, Value
from numpyro_orthgp.inducing import InducingPoints
from tests import oracles

N, H = 40, 6
RNG = np.random.default_rng(0)
X = RNG.uniform(0, 1, (N, 2))
Y = np.sin(6 * X[:, 0]) * X[:, 1] + 0.1 * RNG.normal(size=N)
NEW = RNG.uniform(0, 1, (7, 2))
NOISE = RNG.uniform(0.1, 0.3, N)
SCALES = np.array([0.3, 0.5])
KERNEL = 1.3 * kernels.Matern32(SCALES)
DENSE = oracles.matern32(1.3, SCALES)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def one_of(sizes=(5,), dtype=float, num_latents=None):
    """A function with a q drawn at random, and its sets for the oracle."""
    rng, sets, P = np.random.default_rng(1), [], (num_latents,) if num_latents else ()
    for M in sizes:
        root = np.tril(rng.normal(size=(*P, M, M))) / M + 0.1 * np.eye(M)
        sets.append((rng.uniform(0, 1, (M, 2)), rng.normal(size=(*P, M)), root))
    kernel = jnp.asarray(1.3, dtype) * kernels.Matern32(jnp.asarray(SCALES, dtype))
    Zs = [jnp.asarray(Z, dtype) for Z, _, _ in sets]
    blocks = decompose([[kernel(Zs[j], Zs[i]) for j in range(i + 1)] for i in range(len(Zs))], 0.0)
    beliefs = tuple(Full(jnp.asarray(m, dtype), jnp.asarray(T, dtype)) for _, m, T in sets)
    features = tuple(map(InducingPoints, Zs))
    f = ogp.GPFunction(kernel, features, blocks, beliefs, num_latents=num_latents)
    dense = [
        [oracles.WhitenedSet(Z, m[p] if P else m, (T[p] if P else T) @ (T[p] if P else T).T) for Z, m, T in sets]
        for p in range(num_latents or 1)
    ]
    return f, dense if P else dense[0]


def near(x, rows=range(N), num=H):
    """The rows with the largest prior covariance with x, of a stationary kernel."""
    rows = np.asarray(rows)
    return rows[np.argsort(-DENSE(x[None], X[rows])[0], kind="stable")[:num]]


def dense(sets, y=Y, noise=NOISE**2, rows=range(N), num=H):
    """Mean, explained and residual variance at all new inputs."""
    each = [oracles.with_neighbors(DENSE, sets, X, y, noise, x[None], near(x, rows, num)) for x in NEW]
    return np.array(each).T


def parts(m):
    return np.array([m.mean, m.explained_variance, m.residual_variance])


@pytest.mark.parametrize("sizes", [(5,), (4, 3, 2)], ids=["one set", "three sets"])
def test_dense_formula(sizes):
    f, sets = one_of(sizes)
    np.testing.assert_allclose(parts(with_neighbors(f, X, Y, NOISE, num_neighbors=H)(NEW)), dense(sets), rtol=1e-9)


def test_in_float32_beside_float64():
    f, _ = one_of(dtype=jnp.float32)
    found = with_neighbors(f, *(a.astype("float32") for a in (X, Y, NOISE)), num_neighbors=H)(NEW.astype("float32"))
    assert found.mean.dtype == jnp.float32
    np.testing.assert_allclose(parts(found), dense(one_of()[1]), rtol=2e-4, atol=2e-5)


def test_latent_functions_with_missing_outputs():
    """Each output has rows of its own; a row that has none at all is nobody's neighbour."""
    f, sets = one_of(num_latents=2)
    y = np.stack([Y, Y**2], 1)
    y[::3, 0] = np.nan
    y[:6] = np.nan
    noise = np.stack([NOISE, 2 * NOISE], 1)
    found = with_neighbors(f, X, y, noise, num_neighbors=H)(NEW)
    assert found.shape == (len(NEW), 2)
    for p in range(2):
        for i, x in enumerate(NEW):
            rows = near(x, range(6, N))
            rows = rows[np.isfinite(y[rows, p])]
            expected = oracles.with_neighbors(DENSE, sets[p], X, y[:, p], noise[:, p] ** 2, x[None], rows)
            np.testing.assert_allclose(parts(found)[:, i, p], expected, rtol=1e-9)


def test_missing_outputs_of_one_function():
    """A row without an output takes nobody's place among the neighbours."""
    f, sets = one_of()
    y = np.where(np.arange(N) % 2 == 0, np.nan, Y)
    seen = range(1, N, 2)
    found = parts(with_neighbors(f, X, y, NOISE, num_neighbors=H)(NEW))
    np.testing.assert_allclose(found, dense(sets, rows=seen), rtol=1e-9)


@pytest.mark.parametrize("num", [N, 10 * N])
def test_all_rows_and_the_exact_q_are_the_exact_process(num):
    """One group of all rows makes PIC exact, and so is q(u); with all rows beside it nothing is approximated."""
    f = CollapsedGP(KERNEL, X, X[:5], NOISE, bound="fitc", group_size=N).posterior(Y)
    m = with_neighbors(f, X, Y, NOISE, num_neighbors=num)(NEW)
    mean, cov = oracles.exact_predict(DENSE, X, Y, NOISE**2, NEW)
    np.testing.assert_allclose(m.mean, mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(m.variance, np.diag(cov), rtol=1e-6)


def test_of_a_fitted_guide_nearer_to_the_exact_process():
    """Few points, a fit in closed form: predictions are nearer to the exact ones, in mean and in variance."""
    f = CollapsedGP(KERNEL, X, X[:5], NOISE, bound="titsias2025").posterior(Y)
    exact, cov = oracles.exact_predict(DENSE, X, Y, NOISE**2, NEW)
    exact_sd = np.sqrt(np.diag(cov))

    def errors(m):
        return np.abs(m.mean - exact).mean(), np.abs(np.sqrt(m.variance) - exact_sd).mean()

    before, after = errors(f(NEW)), errors(with_neighbors(f, X, Y, NOISE, num_neighbors=H)(NEW))
    assert after[0] < before[0] / 2 and after[1] < before[1] / 2


def test_points_that_say_everything_leave_nothing_to_the_neighbours():
    f = CollapsedGP(KERNEL, X, X, NOISE).posterior(Y)
    m = with_neighbors(f, X, Y, NOISE, num_neighbors=H)(X[:7])
    np.testing.assert_allclose(parts(m), parts(f(X[:7])), atol=1e-7)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), scale=st.floats(0.05, 3.0))
def test_order_of_rows_and_infinite_noise(seed, scale):
    """Rows may come in any order; rows that say nothing change nothing; residuals only shrink."""
    f, _ = one_of()
    order = np.random.default_rng(seed).permutation(N)
    m = with_neighbors(f, X, Y, scale, num_neighbors=H)(NEW)
    again = with_neighbors(f, X[order], Y[order], scale, num_neighbors=H)(NEW)
    np.testing.assert_allclose(parts(m), parts(again), rtol=1e-10)
    assert (m.residual_variance <= f(NEW).residual_variance + 1e-12).all()
    nothing = with_neighbors(f, X, Y, 1e9, num_neighbors=H)(NEW)
    np.testing.assert_allclose(parts(nothing), parts(f(NEW)), rtol=1e-9)


def test_many_inputs_in_blocks_under_jit_with_gradients():
    f, _ = one_of()
    g = with_neighbors(f, X, Y, NOISE, num_neighbors=H)
    many = np.random.default_rng(2).uniform(0, 1, (30_000, 2))
    found = parts(g(many))
    np.testing.assert_allclose(found[:, -7:], parts(jax.jit(lambda g, X: g(X))(g, many[-7:])), rtol=1e-9)
    slope = jax.grad(lambda x: g(x[None]).mean[0])(jnp.asarray(NEW[0]))
    step = 1e-6 * np.eye(2)
    means = g(np.concatenate([NEW[:1] + step, NEW[:1] - step])).mean
    np.testing.assert_allclose(slope, (means[:2] - means[2:]) / 2e-6, rtol=1e-5)


@pytest.mark.parametrize("num_inputs, most", [(2, 2 * (1 + H)), (30, N)])
def test_rows_that_inputs_share_are_projected_once(monkeypatch, num_inputs, most):
    """Each input projected all of its neighbours, which took most of the time where points are many."""
    sizes, project = [], ogp.GPFunction.project
    monkeypatch.setattr(ogp.GPFunction, "project", lambda self, X: sizes.append(len(X)) or project(self, X))
    f, _ = one_of((5, 3), num_latents=2)
    g = with_neighbors(f, X, np.stack([Y, -Y], 1), 0.2, num_neighbors=H)
    new = RNG.uniform(0, 1, (num_inputs, 2))
    with jax.disable_jit():
        found = g(new)
    assert max(sizes) == most
    each = [g(x[None]) for x in new[:2]]
    np.testing.assert_allclose(found.mean[:2], [m.mean[0] for m in each], atol=1e-12)
    np.testing.assert_allclose(found.variance[:2], [m.variance[0] for m in each], atol=1e-12)


def test_mean_only_points():
    """What a mean-only set adds to the mean is in the mean at the neighbours too."""

    def model(X, y=None):
        f = ogp.gp("f", KERNEL, [X[:5], ogp.MeanOnly(X[5:12])])
        with numpyro.plate("data", N):
            numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), NOISE), obs=y)

    guide = ogp.AutoSparseGP(model)
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.05), numpyro.infer.TraceMeanField_ELBO())
    params = svi.run(jax.random.PRNGKey(0), 30, jnp.asarray(X), jnp.asarray(Y), progress_bar=False).params
    f = ogp.posterior(model, guide, params, jnp.asarray(X), jnp.asarray(Y))["f"]
    assert isinstance(f.shift, MeanShift)
    m = with_neighbors(f, X, Y, NOISE, num_neighbors=H)(NEW)
    for i, x in enumerate(NEW):
        rows = np.concatenate([x[None], X[near(x)]])
        joint = f.joint(rows)
        without = ogp.GPFunction(f.kernel, f.features, f.blocks, tuple(Value(q.loc) for q in f.beliefs))
        D = without.joint(rows).covariance_matrix
        gain = np.linalg.solve(D[1:, 1:] + np.diag(NOISE[near(x)] ** 2), D[1:, 0])
        np.testing.assert_allclose(m.mean[i], joint.mean[0] + gain @ (Y[near(x)] - joint.mean[1:]), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"f": lambda X: X}, TypeError, "must be a function of one gp"),
        ({"y": Y[:5]}, ValueError, r"must have the shape \(40,\)"),
        ({"y": Y.astype(complex)}, TypeError, "`y` must hold real numbers"),
        ({"y": np.where(np.arange(N) == 3, np.inf, Y)}, ValueError, "`y` must be finite, or NaN"),
        ({"noise": 0.0}, ValueError, "`noise` must be positive"),
        ({"noise": -NOISE}, ValueError, "`noise` must be positive"),
        ({"noise": NOISE[:3]}, ValueError, "`noise` must be a scalar or broadcast"),
        ({"num_neighbors": 0}, ValueError, "`num_neighbors` must be a positive integer"),
        ({"X": X[:, :1]}, ValueError, "X"),
    ],
)
def test_refusals(change, error, message):
    arguments = {"f": one_of()[0], "X": X, "y": Y, "noise": NOISE} | change
    f, X_, y, noise = (arguments.pop(name) for name in ("f", "X", "y", "noise"))
    with pytest.raises(error, match=message):
        with_neighbors(f, X_, y, noise, **arguments)


def test_functionals_have_no_neighbours():
    f, _ = one_of()
    g = with_neighbors(f, X, Y, NOISE)
    with pytest.raises(TypeError, match=r"got Derivative.* by f itself"):
        g(ogp.Derivative(jnp.asarray(NEW), 0))
    with pytest.raises(TypeError, match="got Derivative"):
        with_neighbors(f, ogp.Derivative(jnp.asarray(X), 0), Y, NOISE)


def test_refused_within_a_guide():
    f, _ = one_of()
    tight = ogp.GPFunction(f.kernel, f.features, f.blocks, f.beliefs, None, jnp.ones(()))
    with pytest.raises(ValueError, match="`with_neighbors` needs a function after its fit"):
        with_neighbors(tight, X, Y, NOISE)


def test_float32_where_noise_is_a_hundredth_of_the_signal():
    """Beside float64 with the same jitter: covariances of near rows over the noise's have condition numbers of 1e6."""
    rng = np.random.default_rng(0)
    X, Xs = rng.uniform(0, 10, (300, 1)), rng.uniform(0, 10, (40, 1))
    Z, noise = np.linspace(0, 10, 6)[:, None], 0.01
    y = np.sin(2 * X[:, 0]) + noise * rng.normal(size=300)

    def moments(dtype):
        X_, Z_, y_, Xs_ = (jnp.asarray(a, dtype) for a in (X, Z, y, Xs))
        s = jnp.asarray(noise, dtype)
        f = CollapsedGP(kernels.RBF(jnp.asarray(1.0, dtype)), X_, Z_, s, jitter=1e-6).posterior(y_)
        m = ogp.with_neighbors(f, X_, y_, s)(Xs_)
        assert m.mean.dtype == dtype
        return np.asarray(m.mean, float), np.asarray(m.variance, float) + noise**2

    (mean, variance), (mean32, variance32) = moments(jnp.float64), moments(jnp.float32)
    np.testing.assert_allclose(variance32, variance, rtol=0.01)
    assert (np.abs(mean32 - mean) / np.sqrt(variance)).max() < 0.5


@pytest.mark.parametrize("num, noise, off", [(32, 0.001, 5.0), (32, 0.01, 0.1), (32, 0.1, 0.01), (200, 0.1, 0.02)])
def test_float32_where_points_leave_nothing_but_rounding(num, noise, off):
    """Many points of a smooth kernel: what rounding left of the residual's covariance was indefinite, with entries up to 9, and
    means were wrong by up to 50 000. Off by so many standard deviations of y, about as f alone."""
    rng = np.random.default_rng(0)
    X, new = rng.uniform(0, 1, (400, 1)).astype("float32"), rng.uniform(0, 1, (50, 1)).astype("float32")
    Z = np.linspace(0, 1, num)[:, None].astype("float32")
    y = (np.sin(20 * X[:, 0]) + noise * rng.normal(size=400)).astype("float32")
    kernel = oracles.rbf(1.0, float(np.float32(0.1)))
    C = kernel(X.astype(float), X.astype(float)) + noise**2 * np.eye(400)
    k = kernel(new.astype(float), X.astype(float))
    mean, variance = k @ np.linalg.solve(C, y), 1 + noise**2 - np.sum(k * np.linalg.solve(C, k.T).T, 1)
    f = CollapsedGP(kernels.RBF(jnp.float32(0.1)), X, Z, jnp.float32(noise)).posterior(y)
    m = with_neighbors(f, X, y, jnp.float32(noise))(new)
    assert (np.abs(m.mean - mean) / np.sqrt(variance)).max() < off
    assert (((m.variance + noise**2) / variance) > 0.9).all()
