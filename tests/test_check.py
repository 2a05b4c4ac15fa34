"""``check``: what it measures against numpy formulas and exact posteriors, and what it says about fits wrong on purpose."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from scipy import stats

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.diagnostics import calibration, comparison
from numpyro_orthgp.diagnostics.calibration import Calibration, with_held_out
from numpyro_orthgp.diagnostics.convergence import convergence_of
from numpyro_orthgp.diagnostics.sites import are_classes, censored_of, mask_of
from numpyro_orthgp.diagnostics.words import percent
from numpyro_orthgp.math.cholesky import inverse_cholesky, rescue_jitter
from tests import oracles, problems

NOISE = 0.4
K = problems.kernel_oracle("matern52")
HYPER = {"variance": jnp.asarray(1.3), "lengthscale": jnp.asarray([0.9, 0.9])}  # those of `K`


def checked(X, y, Zs, qs, *, likelihood=None, params=(), inducing=None, **options):
    """The report on the shared model with these Gaussians."""
    guide = ogp.AutoSparseGP(problems.model, **{k: options.pop(k) for k in ("residual", "covariance") if k in options})
    inducing = [jnp.asarray(Z) for Z in Zs] if inducing is None else inducing
    fitted = jax.tree.map(lambda v: jnp.asarray(v, X.dtype), problems.q_params(qs) | HYPER | dict(params))
    likelihood = likelihood or problems.gaussian(NOISE)
    options = {"num_samples": 25} | options
    args = jnp.asarray(X), jnp.asarray(y)
    return ogp.check(problems.model, guide, fitted, *args, inducing=inducing, likelihood=likelihood, **options)


@pytest.fixture
def sets():
    rng = np.random.default_rng(0)
    X, y = problems.data(rng, N=9)
    Zs = problems.sets(rng, [4, 3])
    return X, y, Zs, [problems.random_q(rng, M) for M in (4, 3)]


# ---- sets and residuals


def test_sets_against_dense_formulas(sets):
    X, y, Zs, qs = sets
    health = checked(X, y, Zs, qs).functions["f"]
    L = np.linalg.cholesky(K(np.concatenate(Zs), np.concatenate(Zs)))
    A = np.linalg.solve(L, K(np.concatenate(Zs), X))
    share = [(part**2).sum(0) / 1.3 for part in (A[:4], A[4:])]
    for s, (m, T), own, pivots in zip(health.sets, qs, share, (np.diag(L)[:4], np.diag(L)[4:]), strict=True):
        np.testing.assert_allclose(s.divergence, oracles.kl_normal(m, T @ T.T, np.zeros(len(m)), np.eye(len(m))))
        np.testing.assert_allclose(s.explained, own.mean(), rtol=1e-8)
        np.testing.assert_allclose(s.pivots, pivots**2 / 1.3, rtol=1e-8)
        assert (s.num, s.repeats, s.rescue, s.jitter) == (len(m), 0, 0, 0)
    np.testing.assert_allclose(health.residual, 1 - sum(share), rtol=1e-8)
    assert health.worst == np.argmax(1 - sum(share)) and health.num_mean_only == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_repeated_points_are_counted(sets, dtype):
    X, y, Zs, qs = (jax.tree.map(lambda a: jnp.asarray(a, dtype), part) for part in sets)
    Zs = [Zs[0], jnp.concatenate([Zs[0][:2], Zs[1][:1]])]  # two of three are in the first set
    report = checked(X, y, Zs, qs, jitter=None)
    first, second = report.functions["f"].sets
    assert (first.repeats, second.repeats) == (0, 2)
    np.testing.assert_allclose(second.jitter, {np.float32: 1e-6, np.float64: 1e-10}[dtype], rtol=1e-5)
    assert "2 of 3 points of f.u1 are redundant" in str(report)


def test_rescue_is_what_the_factor_took():
    rng = np.random.default_rng(2)
    X, y = problems.data(rng, N=9)
    Z = 0.01 * rng.normal(size=(12, 2))  # too close to each other for float32
    X, y, Z = (jnp.asarray(a, jnp.float32) for a in (X, y, Z))
    report = checked(X, y, [Z], [problems.random_q(rng, 12)], jitter=0.0)
    found = report.functions["f"].sets[0].rescue
    assert found > 0 and "f.u0 needed extra jitter" in report.advice[0] and f"0e+00 + {found:.0e}" in str(report)
    C = 1.3 * kernels.Matern52(jnp.full(2, 0.9, jnp.float32))(Z, Z)
    L = np.linalg.inv(np.asarray(inverse_cholesky(C, jnp.float32(1.3)), float))
    np.testing.assert_allclose(np.diag(L @ L.T - np.asarray(C, float)), 1.3 * found, atol=0.5 * 1.3 * found)


def test_rescue_of_single_matrices_of_a_batch():
    """Eigenvalues say which of them need it, and how much is enough."""
    good, bad = jnp.eye(4), jnp.ones((4, 4)) - 1e-3 * jnp.eye(4)
    found = rescue_jitter(jnp.stack([good, bad]), jnp.asarray([1.0, 2.0]))
    assert found[0] == 0
    assert 1e-3 < 2 * found[1] <= 10 * 1e-3 * (1 + 1e-6)  # tenfold steps: never more than ten times too much


def test_idle_sets_and_missing_points(sets):
    X, y, Zs, qs = sets
    report = checked(X, y, Zs, [qs[0], (np.zeros(3), np.eye(3))])
    assert report.functions["f"].sets[1].divergence == 0
    assert any("f.u1 does nothing" in line for line in report.advice)
    left = np.quantile(report.functions["f"].residual, 0.95)
    assert left > 0.1 and any(f"leave {percent(left)} of the prior variance" in line for line in report.advice)
    enough = checked(X, y, [X], [problems.random_q(np.random.default_rng(1), 9)], jitter=1e-10)
    assert enough.functions["f"].residual.max() < 1e-6
    assert not any("prior variance" in line for line in enough.advice)


def test_mean_only_points(sets):
    X, y, Zs, qs = sets
    rng = np.random.default_rng(3)
    H, a = rng.uniform(-2, 2, (5, 2)), rng.normal(size=5)
    inducing = [jnp.asarray(Zs[0]), ogp.MeanOnly(jnp.asarray(H))]
    report = checked(X, y, Zs, qs[:1], inducing=inducing, params={"f.u1_weights": jnp.asarray(a)})
    health = report.functions["f"]
    whitened = problems.oracle_sets(Zs[:1], qs[:1])
    whole, _ = oracles.q_f(K, whitened, X, mean_only=oracles.MeanOnlySet(H, a))
    rest, _ = oracles.q_f(K, whitened, X)
    np.testing.assert_allclose(health.moved, np.std(whole - rest) / np.std(whole), rtol=1e-8)
    assert health.num_mean_only == 5 and "mean only" in str(report)
    assert "are parameters, not latent sites" in report.khat and "k-hat: none." in str(report)
    idle = [(np.zeros(4), np.eye(4))]
    report = checked(X, y, Zs, idle, inducing=inducing, params={"f.u1_weights": jnp.asarray(a)})
    said = [line for line in report.advice if "f.u0 does nothing" in line]
    assert len(said) == 1 and "drop_sets" not in said[0]


def test_sets_where_the_prior_has_no_variance():
    """A linear function at zero: nothing is left to explain, and a second set does not."""

    def model(X, y):
        f = ogp.gp("f", kernels.Linear(1.0), [jnp.array([[0.5]]), jnp.array([[0.0]])])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)

    X, qs = jnp.array([[0.0], [1.0], [2.0]]), [(np.zeros(1), np.eye(1))] * 2
    health = ogp.check(model, ogp.AutoSparseGP(model), problems.q_params(qs), X, X[:, 0], num_samples=25).functions["f"]
    np.testing.assert_allclose([s.explained for s in health.sets], [1, 0], atol=1e-9)
    np.testing.assert_allclose(health.residual, 0, atol=1e-9)


@pytest.mark.parametrize("own_kernels", [False, True])
def test_several_functions(own_kernels):
    rng = np.random.default_rng(4)
    X, Z = rng.uniform(-2, 2, (6, 2)), rng.uniform(-2, 2, (3, 2))
    Y, m = rng.normal(size=(6, 2)), rng.normal(size=(2, 3))
    params = {"f.u0_loc": m, "f.u0_scale_tril": np.stack([np.eye(3)] * 2), "variance": 1.3}
    scales = np.array([[0.9, 0.9], [0.4, 0.4]]) if own_kernels else np.array([0.9, 0.9])
    params = jax.tree.map(jnp.asarray, params | {"lengthscale": scales})
    health = ogp.check(
        problems.model, ogp.AutoSparseGP(problems.model), params, jnp.asarray(X), jnp.asarray(Y), inducing=jnp.asarray(Z),
        likelihood=problems.gaussian(NOISE), num_latents=2, lengthscale=scales, to_event=1, num_samples=25,
    ).functions["f"]  # fmt: skip
    k = [problems.kernel_oracle("matern52", lengthscale=scale) for scale in np.atleast_2d(scales)]
    residual = np.stack([oracles.residual_covariance(k, problems.oracle_sets([Z], [(m[0], np.eye(3))]), X) for k in k])
    share = np.diagonal(residual, axis1=1, axis2=2).T / 1.3
    np.testing.assert_allclose(health.residual, share if own_kernels else share[:, 0], rtol=1e-7)
    np.testing.assert_allclose(health.sets[0].divergence, (m**2).sum() / 2)


def test_what_cannot_be_seen_is_said():
    def hidden(X, y, Z):
        f = ogp.gp("f", kernels.RBF(1.0), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(f(X).sample())), obs=y)

    X = jnp.linspace(-1, 1, 6)[:, None]
    params = {"f.u0_loc": jnp.zeros(2), "f.u0_scale_tril": jnp.eye(2)}
    report = ogp.check(hidden, ogp.AutoSparseGP(hidden), params, X, jnp.arange(6), X[:2], num_samples=25)
    assert report.functions["f"].residual is None and np.isnan(report.functions["f"].sets[0].explained)
    assert "inputs: unknown" in str(report) and "NUTS: not run" in str(report)


def regression(X, y, Z):
    f = ogp.gp("f", kernels.RBF(0.9), Z, jitter=0.0)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)


GUIDES = {
    "values only": (ogp.AutoSparseGP(regression, analytic=False), {"f.u0_loc": (2,), "f.u0_scale_tril": (2, 2)}),
    "AutoNormal": (AutoNormal(regression), {"f.u0_auto_loc": (2,), "f.u0_auto_scale": (2,)}),
}


@pytest.mark.parametrize("name", GUIDES)
def test_guides_that_hand_over_no_gaussian_in_fits(name):
    """It is asked for: KL[N(1, I) || N(0, I)] is one half for each variable."""
    guide, shapes = GUIDES[name]
    params = {n: jnp.eye(*shape) if len(shape) == 2 else jnp.ones(shape) for n, shape in shapes.items()}
    X, Z = jnp.linspace(-1, 1, 6)[:, None], jnp.array([[-1.0], [0.5]])
    report = ogp.check(regression, guide, params, X, X[:, 0], Z, num_samples=25)
    k, (only,) = oracles.rbf(1.0, 0.9), report.functions["f"].sets
    A = np.linalg.solve(np.linalg.cholesky(k(Z, Z)), k(Z, X))
    np.testing.assert_allclose(only.explained, (A**2).sum(0).mean(), rtol=1e-8)
    np.testing.assert_allclose(only.divergence, 1.0, rtol=1e-6)
    assert "nan" not in str(report) and not any("does nothing" in line for line in report.advice)


def test_collapsed_regression():
    def model(X, y, Z):
        scale = numpyro.sample("scale", dist.LogNormal())
        numpyro.sample("y", ogp.CollapsedGP(scale**2 * kernels.RBF(1.0), X, Z, 0.3), obs=y)

    X = jnp.linspace(-2, 2, 12)[:, None]
    guide = AutoNormal(model)
    params = {"scale_auto_loc": jnp.asarray(0.2), "scale_auto_scale": jnp.asarray(0.3)}
    report = ogp.check(model, guide, params, X, jnp.sin(3 * X[:, 0]), X[::3], num_samples=100)
    k = oracles.rbf(1.0, 1.0)
    Z = np.asarray(X[::3])
    share = 1 - np.diag(k(X, Z) @ np.linalg.solve(k(Z, Z), k(Z, X)))
    np.testing.assert_allclose(report.functions["y"].residual, share, atol=1e-8)
    assert report.khat.num_samples == 100
    assert "predict them from y, CollapsedGP(...).posterior(y)(X_test)" in str(report)
    assert "held_out=" not in str(report)
    with pytest.raises(ValueError, match=r"outputs of `y`, a CollapsedGP, are not.*posterior\(y\)\(X_test\)"):
        ogp.check(model, guide, params, X, jnp.sin(3 * X[:, 0]), X[::3], held_out=(X, jnp.sin(3 * X[:, 0])))


# ---- v of the tightened bound


def test_residual_scales(sets):
    X, y, Zs, qs = sets
    assert checked(X, y, Zs, qs).residual_scales == {}
    report = checked(X, y, Zs, qs, residual="tight", params={"f_residual_scale": jnp.asarray(0.3)})
    r = np.diag(oracles.residual_covariance(K, problems.oracle_sets(Zs, qs), X))
    assert list(report.residual_scales) == ["y"]  # in closed form the learned one has no say
    np.testing.assert_allclose(report.residual_scales["y"], 1 / (1 + r / NOISE**2), rtol=1e-8)
    counts = {"likelihood": likelihoods.Poisson, "residual": "tight", "params": {"f_residual_scale": jnp.asarray(0.3)}}
    report = checked(X, np.round(np.exp(y)), Zs, qs, **counts)
    assert report.residual_scales == {"f": pytest.approx(0.3)}
    assert "v of the tightened bound, f: 0.3" in str(report)
    assert any("prefers less residual" in line for line in report.advice)


def log_gaussian(m):
    return likelihoods.Transformed(likelihoods.Gaussian(m, NOISE), dist.transforms.ExpTransform())


WRAPPED = {
    "LogNormal": lambda m: likelihoods.LogNormal(m, NOISE),
    "Transformed": log_gaussian,
    "Transformed twice": lambda m: likelihoods.Transformed(log_gaussian(m), dist.transforms.AffineTransform(0.0, 2.0)),
    "Mixture": lambda m: likelihoods.Mixture(log_gaussian(m), jnp.zeros((9, 1))),
    "Mixture of events": lambda m: likelihoods.Mixture(
        likelihoods.Gaussian(ogp.stack([m]), NOISE).to_event(1), jnp.zeros((9, 1))
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_residual_scales_of_what_wraps_a_gaussian(sets, name):
    X, y, Zs, qs = sets
    y = np.exp(y)[:, None] if "events" in name else np.exp(y)
    options = {"residual": "tight", "params": {"f_residual_scale": jnp.asarray(0.3)}}
    found = checked(X, y, Zs, qs, likelihood=WRAPPED[name], **options).residual_scales
    r = np.diag(oracles.residual_covariance(K, problems.oracle_sets(Zs, qs), X))
    assert list(found) == ["y"] and found["y"].shape[0] == 9
    np.testing.assert_allclose(found["y"].ravel(), 1 / (1 + r / NOISE**2), rtol=1e-8)


def test_residual_scales_of_censored_times_are_learned(sets):
    X, y, Zs, qs = sets
    options = {"residual": "tight", "params": {"f_residual_scale": jnp.asarray(0.3)}}
    found = checked(X, np.exp(y), Zs, qs, likelihood=lambda m: likelihoods.LogNormal(m, NOISE, y > 0), **options)
    assert found.residual_scales == {"f": pytest.approx(0.3)}


def test_a_learned_v_without_a_say_is_left_out():
    """One function under Gaussian noise, whose v is each point's own; one of counts; one that is drawn."""

    def model(X, y, counts):
        f, g, h = (ogp.gp(name, kernels.RBF(0.7), X[::2]) for name in "fgh")
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)
            numpyro.sample("counts", likelihoods.Poisson(g(X)), obs=counts)
            numpyro.sample("others", dist.Poisson(jnp.exp(h(X).sample())), obs=counts)

    params = {
        f"{name}.u0_{part}": v for name in "fgh" for part, v in (("loc", jnp.zeros(3)), ("scale_tril", jnp.eye(3)))
    }
    params |= {f"{name}_residual_scale": jnp.asarray(v) for name, v in (("f", 1.0), ("g", 0.6), ("h", 0.5))}
    X = jnp.linspace(-1, 1, 6)[:, None]
    guide = ogp.AutoSparseGP(model, residual="tight")
    found = ogp.check(model, guide, params, X, X[:, 0], jnp.arange(6), num_samples=25).residual_scales
    assert found.keys() == {"y", "g", "h"}
    assert found["y"].shape == (6,) and found["g"] == pytest.approx(0.6) and found["h"] == pytest.approx(0.5)


def test_scales_of_points_in_steps_and_of_particles():
    """What gives no draws of its functions: the learned v has no say there either."""

    def model(X, y):
        f, g, h = (ogp.gp(name, kernels.RBF(0.7), X[::3], jitter=0.0) for name in "fgh")

        def step(carry, row):
            numpyro.sample("y", likelihoods.Gaussian(f(row[0]), row[2]), obs=row[1])
            return carry, None

        scan(step, None, (X.reshape(2, 3, 1), y.reshape(2, 3), jnp.array([NOISE, 2 * NOISE])))
        with numpyro.plate("data", len(X)):
            m, log_weights = ogp.DeepGP([g, h]).particles(X, 4)
            numpyro.sample("deep", likelihoods.Mixture(likelihoods.Gaussian(m, NOISE), log_weights), obs=y)

    params = {
        f"{name}.u0_{part}": v for name in "fgh" for part, v in (("loc", jnp.zeros(2)), ("scale_tril", jnp.eye(2)))
    }
    params |= {f"{name}_residual_scale": jnp.asarray(v) for name, v in (("f", 1.0), ("g", 0.6), ("h", 1.0))}
    X = jnp.linspace(-1, 1, 6)[:, None]
    found = ogp.check(model, ogp.AutoSparseGP(model, residual="tight"), params, X, X[:, 0], num_samples=25)
    found = found.residual_scales
    assert found.keys() == {"y", "deep", "g"} and found["g"] == pytest.approx(0.6) and found["deep"].shape == (6, 4)
    r = np.diag(
        oracles.residual_covariance(
            oracles.rbf(1.0, 0.7), problems.oracle_sets([X[::3]], [(np.zeros(2), np.eye(2))]), X
        )
    )
    noise = np.array([[NOISE], [2 * NOISE]])
    np.testing.assert_allclose(found["y"], 1 / (1 + r.reshape(2, 3) / noise**2), rtol=1e-8)


# ---- held-out data


def test_predictions_against_the_exact_ones(sets):
    X, y, Zs, qs = sets
    X_test, y_test = problems.data(np.random.default_rng(5), N=7)
    found = checked(X, y, Zs, qs, held_out=(jnp.asarray(X_test), jnp.asarray(y_test)), num_samples=4000, N=9).held_out[
        "y"
    ]
    mean, cov = oracles.q_f(K, problems.oracle_sets(Zs, qs), X_test)
    exact = stats.norm(mean, np.sqrt(np.diag(cov) + NOISE**2))
    np.testing.assert_allclose(found.pit, exact.cdf(y_test), atol=4.5 * 0.5 / np.sqrt(4000))
    np.testing.assert_allclose(found.log_density, exact.logpdf(y_test), atol=0.1)


def test_counts_have_a_share_of_their_own_probability(sets):
    X, y, Zs, qs = sets
    y = np.round(np.exp(y))
    X_test, y_test = problems.data(np.random.default_rng(6), N=40)
    held_out = {"X": jnp.asarray(X_test), "y": jnp.asarray(np.round(np.exp(y_test)))}
    found = checked(X, y, Zs, qs, likelihood=likelihoods.Poisson, held_out=held_out, num_samples=2000).held_out["y"]
    mean, cov = oracles.q_f(K, problems.oracle_sets(Zs, qs), X_test)
    f = mean + np.sqrt(np.diag(cov)) * np.random.default_rng(7).normal(size=(20_000, 40))
    below, up_to = (stats.poisson.cdf(held_out["y"] - d, np.exp(f)).mean(0) for d in (1, 0))
    slack = 4.5 * 0.5 / np.sqrt(2000)
    assert (found.pit > below - slack).all() and (found.pit < up_to + slack).all()
    share = (found.pit - below) / (up_to - below)
    assert stats.kstest(share, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("scale, said", [(0.15, "too narrow"), (NOISE, None), (1.5, "too wide")])
def test_intervals_of_a_wrong_noise_are_found_out(scale, said):
    rng = np.random.default_rng(8)
    X = rng.uniform(-2, 2, (300, 2))
    y = rng.normal(0, NOISE, 300)
    qs = [(np.zeros(4), 1e-3 * np.eye(4))]
    model_kernel = {"variance": jnp.asarray(1e-6)}  # a function that is zero: all is noise
    report = checked(
        X, y, [X[:4]], qs, likelihood=problems.gaussian(scale), params=model_kernel,
        held_out=(jnp.asarray(X), jnp.asarray(rng.normal(0, NOISE, 300))), num_samples=400,
    )  # fmt: skip
    calibration = report.held_out["y"]
    for level in (0.5, 0.8, 0.95):
        z = stats.norm.ppf((1 + level) / 2) * scale / NOISE
        expected = 2 * stats.norm.cdf(z) - 1
        error = np.sqrt(expected * (1 - expected) / 300)
        assert abs(calibration.coverage(level) - expected) < 4 * error + 0.03
    said_so = [line for line in report.advice if line.startswith("Predictive intervals of y")]
    assert [said in line for line in said_so] == ([True] if said else [])


def test_classes_and_masks():
    rng = np.random.default_rng(9)
    X = jnp.asarray(rng.uniform(-2, 2, (8, 2)))
    labels = jnp.asarray(rng.integers(0, 3, 8))
    mask = jnp.arange(8) < 5

    def model(X, y=None):
        f = ogp.gp("f", kernels.RBF(1.0), X[:3], num_latents=3)
        with numpyro.plate("data", 8), numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", likelihoods.Categorical(f(X)), obs=y)

    params = {"f.u0_loc": jnp.zeros((3, 3)), "f.u0_scale_tril": jnp.stack([jnp.eye(3)] * 3)}
    report = ogp.check(model, ogp.AutoSparseGP(model), params, X, labels, held_out=(X, labels), num_samples=25)
    assert report.held_out["y"].pit is None and report.held_out["y"].log_density.shape == (5,)
    assert "classes have no order" in str(report) and report.functions["f"].sets[0].name == "f.u0"


def test_masks_of_single_entries():
    """A mask beneath `to_event` hides what the same mask hides in a plate over outputs."""
    rng = np.random.default_rng(12)
    X = jnp.asarray(rng.uniform(-2, 2, (20, 1)))
    seen = jnp.asarray(rng.uniform(size=(20, 2)) < 0.6).at[3].set(False).at[4, 0].set(False).at[4, 1].set(True)
    Y = jnp.where(seen, jnp.asarray(rng.normal(size=(20, 2))), 50.0)  # what stands in hidden places must not count

    def function():
        return ogp.gp("f", kernels.RBF(1.0), X[:3], num_latents=2)

    def event(X, Y):
        likelihood = likelihoods.Gaussian(function()(X), NOISE)
        with numpyro.plate("data", 20):
            numpyro.sample("y", likelihood.mask(seen).to_event(1), obs=Y)

    def plates(X, Y):
        likelihood = likelihoods.Gaussian(function()(X), NOISE)
        with numpyro.plate("data", 20, dim=-2), numpyro.plate("outputs", 2):
            numpyro.sample("y", likelihood.mask(seen), obs=Y)

    params = {"f.u0_loc": jnp.zeros((2, 3)), "f.u0_scale_tril": jnp.stack([jnp.eye(3)] * 2)}
    of_rows, of_entries = (
        ogp.check(model, ogp.AutoSparseGP(model), params, X, Y, held_out=(X, Y), num_samples=200).held_out["y"]
        for model in (event, plates)
    )
    np.testing.assert_array_equal(of_rows.pit, of_entries.pit)
    assert of_rows.pit.shape == of_entries.log_density.shape == (int(seen.sum()),)
    assert of_rows.log_density.shape == (int(seen.any(1).sum()),) and seen[4].sum() == 1
    single = np.asarray(seen & (seen.sum(1, keepdims=True) == 1))  # rows of which one entry was seen have its density
    np.testing.assert_allclose(
        of_rows.log_density[single.any(1)[np.asarray(seen.any(1))]], of_entries.log_density[single[np.asarray(seen)]]
    )


def test_masks_within_masks():
    rows, entries = jnp.array([True, True, False]), jnp.array([[True, False]] * 3)
    normal = dist.Normal(jnp.zeros((3, 2)), 1.0)
    expected = np.array([[True, False], [True, False], [False, False]])
    np.testing.assert_array_equal(mask_of(normal.mask(entries).to_event(1).mask(rows)), expected)
    np.testing.assert_array_equal(mask_of(normal.to_event(1).mask(rows).mask(True)), np.stack([rows, rows], 1))
    np.testing.assert_array_equal(mask_of(dist.Normal(0, 1).mask(False).expand([4])), np.zeros(4, bool))
    assert mask_of(normal.to_event(1)) is None
    m = ogp.Marginals(jnp.zeros((6, 2)), jnp.ones((6, 2)), jnp.ones((6, 2)))  # two draws of each point
    of_draws = likelihoods.Gaussian(m, 1.0).mask(jnp.repeat(entries, 2, axis=0)).to_event(1)
    np.testing.assert_array_equal(mask_of(likelihoods.Mixture(of_draws, jnp.zeros((3, 2))).mask(rows)), expected)


def test_censored_times_are_lower_bounds():
    """A function that is zero, hence standard exponential times: transforms are uniform, whoever was cut off."""
    rng = np.random.default_rng(13)
    X = rng.uniform(-2, 2, (200, 2))
    times, ends = rng.exponential(size=200), rng.uniform(0, 2, 200)
    censored, y = times > ends, np.minimum(times, ends)
    assert censored.sum() > 75
    found = checked(
        X, y, [X[:4]], [(np.zeros(4), 1e-3 * np.eye(4))], likelihood=lambda m: likelihoods.Exponential(m, censored),
        params={"variance": jnp.asarray(1e-6)}, held_out=(jnp.asarray(X), jnp.asarray(y)), num_samples=500,
    ).held_out["y"]  # fmt: skip
    below, slack = -np.expm1(-y), 4.5 * 0.5 / np.sqrt(500)
    np.testing.assert_allclose(found.pit[~censored], below[~censored], atol=slack)
    above = (found.pit - below) / (1 - below)
    assert (found.pit > below - slack)[censored].all() and stats.kstest(above[censored], "uniform").pvalue > 1e-3
    assert stats.kstest(found.pit, "uniform").pvalue > 1e-3
    np.testing.assert_allclose(found.log_density, -y, atol=0.05)  # that of a density and of a survival function


def test_censored_times_beneath_what_wraps_them():
    censored = jnp.array([True, False, True])
    m = ogp.Marginals(*(jnp.ones(3) for _ in range(3)))
    times = likelihoods.Weibull(m, 2.0, censored)
    np.testing.assert_array_equal(censored_of(times.mask(~censored)), censored)
    np.testing.assert_array_equal(censored_of(times.to_event(1)), censored)
    assert censored_of(likelihoods.Weibull(m, 2.0)) is None and censored_of(likelihoods.Gaussian(m, 1.0)) is None
    of_draws = likelihoods.LogNormal(jax.tree.map(lambda a: jnp.repeat(a, 2), m), 1.0, jnp.repeat(censored, 2))
    np.testing.assert_array_equal(censored_of(likelihoods.Mixture(of_draws, jnp.zeros((3, 2)))), censored)
    steps = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), times)
    np.testing.assert_array_equal(censored_of(likelihoods.Stacked(steps)), [censored, censored])
    scale = dist.transforms.AffineTransform(0.0, 365.0)
    np.testing.assert_array_equal(censored_of(likelihoods.Transformed(times, scale)), censored)
    assert censored_of(likelihoods.Transformed(likelihoods.Gaussian(m, 1.0), scale)) is None


CLASSES = {
    "own": lambda m: likelihoods.Categorical(m),
    "general": lambda m: ogp.Likelihood(m, lambda f: dist.Categorical(logits=f)),
    "NumPyro's": lambda m: dist.Categorical(logits=m.mean),
    "events": lambda m: ogp.Likelihood(m, lambda f: dist.Categorical(logits=f)).expand([9]).to_event(1),
    "steps": lambda m: likelihoods.Stacked(jax.tree.map(lambda leaf: leaf[None], likelihoods.Categorical(m))),
    "mixture": lambda m: likelihoods.Mixture(likelihoods.Categorical(m), jnp.zeros((9, 1))),
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_no_order_whatever_wraps_them(name):
    m = ogp.Marginals(*(jnp.ones((9, 3)) for _ in range(3)))
    assert are_classes(CLASSES[name](m))


def test_what_has_an_order():
    m = ogp.Marginals(*(jnp.ones(9) for _ in range(3)))
    ordinal = likelihoods.Ordinal(m, jnp.array([0.0, 1.0]))
    mixed = likelihoods.Mixture(ordinal, jnp.zeros((9, 1)))
    logistic = ogp.Likelihood(m, lambda f: dist.OrderedLogistic(f, jnp.array([0.0, 1.0])))
    for fn in (ordinal, mixed, logistic, likelihoods.Poisson(m), dist.Normal(m.mean, 1.0)):
        assert not are_classes(fn)


def test_predictions_of_classes_by_particles():
    def model(X, y):
        f = ogp.gp("f", kernels.RBF(0.7), X[:2], num_latents=3)
        with numpyro.plate("data", len(X)):
            m, log_weights = ogp.DeepGP([f]).particles(X, 2)
            numpyro.sample("y", likelihoods.Mixture(likelihoods.Categorical(m), log_weights), obs=y)

    X, y = jnp.linspace(-1, 1, 6)[:, None], jnp.arange(6) % 3
    params = {"f.u0_loc": jnp.zeros((3, 2)), "f.u0_scale_tril": jnp.stack([jnp.eye(2)] * 3)}
    report = ogp.check(model, ogp.AutoSparseGP(model), params, X, y, num_samples=25, held_out=(X, y))
    assert report.held_out["y"].pit is None and report.held_out["y"].log_density.shape == (6,)
    assert "classes have no order" in str(report)


def test_outputs_that_are_masked_as_a_whole():
    def model(X, y, seen):
        f = ogp.gp("f", kernels.RBF(0.7), X[:2])
        with numpyro.plate("data", len(X)):
            for name, mask in seen.items():
                numpyro.sample(name, likelihoods.Gaussian(f(X), NOISE).mask(mask), obs=y)

    X = jnp.linspace(-1, 1, 6)[:, None]
    none, some = np.zeros(6, bool), np.arange(6) > 1
    args = model, ogp.AutoSparseGP(model), problems.q_params([(np.zeros(2), np.eye(2))]), X, X[:, 0]

    def checked(seen):
        return ogp.check(*args, {"a": some, "b": some}, held_out={"seen": seen}, num_samples=25)

    report = checked({"a": none, "b": some})
    assert report.held_out.keys() == {"b"} and len(report.held_out["b"].pit) == 4
    assert "held out, 4 of b" in str(report) and "of a:" not in str(report)
    with pytest.raises(ValueError, match=r"`held_out` must hold observations; got masks that hide all of 'a', 'b'"):
        checked({"a": none, "b": none})


def test_held_out_arguments():
    def model(X, y=None, *, N, Z=0):
        pass

    def open_model(X, **kwargs):
        pass

    args, kwargs = (1, 2), {"N": 3}
    assert with_held_out(model, args, kwargs, (10,)) == ((10, 2), {"N": 3})
    assert with_held_out(model, args, kwargs, {"y": 20, "N": 30}) == ((1, 20), {"N": 30})
    assert with_held_out(open_model, (1,), kwargs, {"N": 30, "X": 2}) == ((2,), {"N": 30})
    with pytest.raises(TypeError, match=r"`held_out` has \['x'\], which the model does not take"):
        with_held_out(model, args, kwargs, {"x": 1})
    with pytest.raises(TypeError, match="must be a tuple of the model's positional arguments"):
        with_held_out(model, args, kwargs, jnp.zeros(3))


def test_rows_picked_at_random_are_refused(sets):
    X, y, Zs, qs = sets

    def model(X, y, N, B):
        f = ogp.gp("f", kernels.Matern52(0.9), jnp.asarray(Zs[0]))
        with numpyro.plate("data", N, subsample_size=B) as rows:
            numpyro.sample("y", likelihoods.Gaussian(f(X[rows]), NOISE), obs=y[rows])

    args = model, ogp.AutoSparseGP(model), problems.q_params(qs[:1]), jnp.asarray(X), jnp.asarray(y)
    with pytest.raises(ValueError, match="a plate picks rows at random"):
        ogp.check(*args, 9, 9, held_out={"B": 3}, num_samples=25)
    with pytest.raises(ValueError, match="Diagnostics need all the data at once"):
        ogp.check(*args, 9, 3, num_samples=25)
    assert ogp.check(
        *args, 9, 9, held_out={"X": jnp.asarray(X[:4]), "y": jnp.asarray(y[:4]), "N": 4, "B": 4}, num_samples=25
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.sampled_from([0.5, 0.8, 0.95]))
def test_coverage_counts_what_lies_between_quantiles(pit, level):
    calibration = Calibration(np.zeros(len(pit)), np.asarray(pit))
    low, high = (1 - level) / 2, (1 + level) / 2
    inside = sum(low + 1e-12 < u < high - 1e-12 for u in pit), sum(low - 1e-12 <= u <= high + 1e-12 for u in pit)
    assert inside[0] <= round(calibration.coverage(level) * len(pit)) <= inside[1]


# ---- losses


def test_convergence():
    rng = np.random.default_rng(10)
    steps = np.arange(1000)
    flat = convergence_of(100 + rng.normal(size=1000))
    assert not flat.falling and not flat.rising and flat.num_steps == 1000
    np.testing.assert_allclose(flat.standard_error, np.sqrt(2 / 100), rtol=0.3)
    falling, rising = convergence_of(500 - 0.1 * steps), convergence_of(500 + 0.1 * steps)
    assert falling.falling and rising.rising and falling.gain == pytest.approx(10) and "fell by 10 nats" in str(falling)
    assert "rose by 10 nats" in str(rising)
    assert not convergence_of(np.exp(-0.01 * steps)).falling  # less than a nat is no reason to go on
    assert not convergence_of(500 - 0.1 * steps + 100 * rng.normal(size=1000)).falling  # lost in the noise
    for bad in (np.nan, np.inf):
        broken = convergence_of(np.where(steps < 990, 100.0, bad))
        assert not broken.falling and not broken.rising
        assert str(broken) == "loss: not finite at 10 of the last 200 of 1000 steps"
    assert convergence_of(np.where(steps > 10, 100.0, np.nan)).num_not_finite == 0  # long ago
    for wrong in (np.zeros(19), np.zeros((20, 2))):
        with pytest.raises(ValueError, match="`losses` must have shape"):
            convergence_of(wrong)


def test_losses_are_looked_at(sets):
    report = checked(*sets, losses=500 - 0.1 * np.arange(1000))
    assert report.advice[0].startswith("The loss is still falling") and "loss: fell by 10 nats" in str(report)
    report = checked(*sets, losses=np.append(np.ones(95), np.full(5, np.nan)))
    assert report.advice[0].startswith("The loss is not finite")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gaussian_that_is_not_finite(sets, bad):
    """Without losses the page said that the guide gives one value, and to take AutoSparseGP, which it was."""
    X, y, Zs, ((m, S), *others) = sets
    report = checked(X, y, Zs, [(bad * np.ones_like(m), S), *others])
    assert report.advice[0].startswith(
        "The Gaussian of f.u0 is not finite: the fit broke down, and nothing on this page holds."
    )
    assert not any("gives one value" in line for line in report.advice)


# ---- NUTS


def best():
    """Regression with the q that is best."""
    rng = np.random.default_rng(11)
    X, y = problems.data(rng, N=12)
    Z = problems.sets(rng, [3])[0]
    m, S = oracles.optimal_q(K, X, y, Z, NOISE**2, whitened=True)
    return X, y, [Z], [(m, np.linalg.cholesky(S))]


def test_nuts_agrees_with_the_best_q(monkeypatch):
    starts = []

    class Recorded(MCMC):
        def run(self, *args, init_params, **kwargs):
            starts.append(init_params["f.u0"])
            super().run(*args, init_params=init_params, **kwargs)

    monkeypatch.setattr(comparison, "MCMC", Recorded)
    good = checked(*best(), nuts=400, num_samples=1000)
    f = good.nuts.functions["f"]
    assert good.nuts.rhat < 1.05 and good.nuts.ess > 100 and good.nuts.sites == {}
    assert f.shift.max() < 0.4 and 0.8 < f.ratio.min() and f.ratio.max() < 1.25
    X, _, Zs, qs = best()
    mean, cov = oracles.q_f(K, problems.oracle_sets(Zs, qs), X)
    np.testing.assert_allclose(f.loc_q, mean, atol=4.5 * np.sqrt(np.diag(cov).max() / 1000))
    assert not any("NUTS" in line and "disagree" in line for line in good.advice)
    assert starts[0].shape == (2, 3) and np.abs(starts[0][0] - starts[0][1]).max() > 0.1  # draws of their own
    assert "NUTS, 2 chains of 400 draws" in str(good)


def test_nuts_integrates_missing_outputs_out():
    X, y, (Z,), qs = best()
    seen = jnp.arange(12) % 3 > 0

    def model(X, y, missing=True):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        likelihood = likelihoods.Gaussian(ogp.gp("f", kernels.Matern52(0.9), jnp.asarray(Z))(X), noise)
        with numpyro.plate("data", 12):
            numpyro.sample(
                "y", likelihood if missing else likelihood.mask(seen), obs=y, obs_mask=seen if missing else None
            )

    params = problems.q_params(qs) | {"noise_auto_loc": jnp.asarray(NOISE)}
    args = jnp.asarray(X), jnp.asarray(y)
    report = ogp.check(model, ogp.AutoSparseGP(model), params, *args, nuts=25, num_samples=25)
    assert report.nuts.sites.keys() == {"noise"} and report.nuts.functions["f"].loc.shape == (12,)
    values = {"f.u0": jnp.ones(3), "noise": jnp.asarray(0.3)}
    whole, left = model, comparison._without(("y_unobserved",), model)
    expected, _ = log_density(whole, args, {"missing": False}, values)
    found, sites = log_density(left, args, {}, values)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert "y_unobserved" not in sites


def test_functions_that_are_known_somewhere():
    """A linear function at zero: neither q nor NUTS has a variance there, which is no difference."""
    moments = comparison.Moments(
        *map(np.array, ([0.0, 1.0, 0.0, 3.0], [0.0, 1.0, 1.0, 2.0], [0.0] * 4, [0.0, 2.0, 0.0, 2.0]))
    )
    np.testing.assert_array_equal(moments.ratio, [1.0, 0.5, np.inf, 1.0])
    np.testing.assert_array_equal(moments.shift, [0.0, 0.5, 0.0, 1.5])


@pytest.mark.slow
def test_nuts_finds_out_a_narrow_q():
    """All inputs are inducing points, so that nothing but q spreads f."""
    X, y, *_ = best()
    m, S = oracles.optimal_q(K, X, y, X, NOISE**2, whitened=True)
    q = m, 0.3 * np.linalg.cholesky((S + S.T) / 2)
    report = checked(X, y, [X], [q], nuts=200, num_samples=1000)
    np.testing.assert_allclose(report.nuts.functions["f"].ratio, 0.3, rtol=0.35)
    assert any("q and NUTS disagree about f itself" in line for line in report.advice)


@pytest.mark.slow
def test_hyperparameters_beside_nuts():
    X, y, Zs, _ = best()

    def model(X, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
        f = ogp.gp("f", 1.3 * kernels.Matern52(lengthscale), jnp.asarray(Zs[0]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)

    q = {"f.u0_loc": jnp.zeros(3), "f.u0_scale_tril": jnp.eye(3)}
    args = jnp.asarray(X), jnp.asarray(y)
    guide = ogp.AutoSparseGP(model)
    params = q | {"lengthscale_auto_loc": jnp.asarray(1.0)}
    report = ogp.check(model, guide, params, *args, nuts=100, num_samples=100)
    m = report.nuts.sites["lengthscale"]
    assert m.scale_q == 0 and m.loc_q == 1.0 and m.scale > 0.05
    assert any("lengthscale is a point estimate in this guide" in line for line in report.advice)
    narrow = ogp.AutoSparseGP(model, hyper=AutoNormal)
    params = q | {"lengthscale_auto_loc": jnp.log(m.loc), "lengthscale_auto_scale": jnp.asarray(0.02)}
    report = ogp.check(model, narrow, params, *args, nuts=100, num_samples=100)
    assert any("q is too narrow in lengthscale" in line for line in report.advice)


# ---- the page


def test_the_page_of_a_good_fit(sets):
    """All that was found is on it, and the advice names only what was not checked."""
    X, y, Zs, qs = best()
    report = checked(X, y, Zs, qs, num_samples=1000, losses=np.zeros(100), held_out=(jnp.asarray(X), jnp.asarray(y)))
    page = str(report)
    share = "unexplained share of the prior variance at 12 inputs"
    for part in ("f.u0", share, "k-hat = ", "held out, 12 of y", "95 %", "NUTS: not run"):
        assert part in page, part
    assert max(map(len, page.splitlines())) <= 96


def test_percent():
    cases = {0.0: "0 %", 1.0: "100 %", 0.5: "50 %", 0.0312: "3.1 %", 0.995: "99.5 %", np.nan: "-"}
    assert {share: percent(share) for share in cases if share == share} == {s: p for s, p in cases.items() if s == s}
    assert percent(np.nan) == "-"


def test_wrong_arguments(sets):
    X, y, Zs, qs = sets
    for options, error, match in (
        ({"nuts": 3}, ValueError, "`nuts` must be an integer of at least 25"),
        ({"num_samples": 3}, ValueError, "`num_samples` must be an integer of at least 25"),
        ({"held_out": [X, y]}, TypeError, "`held_out` must be a tuple"),
        ({"losses": np.zeros(3)}, ValueError, "`losses` must have shape"),
    ):
        with pytest.raises(error, match=match):
            checked(X, y, Zs, qs, **options)
    with pytest.raises(TypeError, match="`params` must be the dict"):
        ogp.check(problems.model, ogp.AutoSparseGP(problems.model), jnp.asarray(X), jnp.asarray(y))


def test_held_out_rows_that_are_stored(tmp_path, monkeypatch):
    """Lazy arrays are read, and many rows are said to be many."""
    h5py = pytest.importorskip("h5py")
    X = np.linspace(0.0, 1.0, 40)[:, None]
    y = np.sin(6 * X[:, 0])

    def model(X, y=None):
        f = ogp.gp("f", kernels.RBF(0.3), jnp.linspace(0.0, 1.0, 5)[:, None])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.2), obs=y)

    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.05), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(jax.random.PRNGKey(0), jnp.asarray(X), jnp.asarray(y)))
    check = partial(ogp.check, model, guide, params, jnp.asarray(X), jnp.asarray(y), num_samples=25)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["X"], file["y"] = X, y
        found = check(held_out=(file["X"], file["y"])).held_out["y"]
    wanted = check(held_out=(jnp.asarray(X), jnp.asarray(y))).held_out["y"]
    np.testing.assert_array_equal(found.pit, wanted.pit)
    monkeypatch.setattr(calibration, "MANY", 25 * 40 - 1)
    with pytest.warns(
        UserWarning, match=r"`held_out` has 40 rows, for each of which 25 outputs are drawn.*held_out=\(X_test\[::2\]"
    ):
        check(held_out=(X, y))
