"""Draws for ArviZ and the Pareto k-hat, against numpy and scipy formulas; under ArviZ 0.x and 1.x."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy import stats

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.diagnostics import ParetoK, importance, replay, sites, versions
from tests import oracles, problems

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import matplotlib

    matplotlib.use("Agg")
    import arviz as az

NOISE, S = 0.4, 4000
K = problems.kernel_oracle("matern52")
BEFORE_1 = int(az.__version__.split(".")[0]) < 1
HYPER = {"variance": jnp.asarray(1.3), "lengthscale": jnp.asarray([0.9, 0.9])}  # those of `K`


def names(data):
    return set(data.groups()) if BEFORE_1 else set(data.children)


def values(data, group, name):
    """Of the one chain of a guide."""
    found = np.asarray(data[group][name])
    return found[0] if group not in ("observed_data", "constant_data") else found


def whitened_sets(Zs, draws, s):
    """The sets with known values: a covariance of zero."""
    return [oracles.WhitenedSet(Z, e[s], np.zeros((len(Z), len(Z)))) for Z, e in zip(Zs, draws, strict=True)]


def given_draw(Zs, draws, s, X, kernel=K):
    mean, cov = oracles.q_f(kernel, whitened_sets(Zs, draws, s), X)
    return mean, np.diagonal(cov)


# ---- Gaussian noise, two sets, tightened


@pytest.fixture(scope="module")
def solvegp():
    """SOLVE-GP at random parameters: inputs, outputs, sets, Gaussians and what ArviZ gets."""
    rng = np.random.default_rng(0)
    X, y = problems.data(rng, N=9)
    Zs = problems.sets(rng, [4, 3])
    qs = [problems.random_q(rng, M) for M in (4, 3)]
    params = problems.q_params(qs) | HYPER | {"f_residual_scale": jnp.asarray(0.3)}
    guide = ogp.AutoSparseGP(problems.model, residual="tight")
    kwargs = {"inducing": [jnp.asarray(Z) for Z in Zs], "likelihood": problems.gaussian(NOISE)}
    args = jnp.asarray(X), jnp.asarray(y)
    data = ogp.to_arviz(
        problems.model, guide, params, *args, num_samples=S, coords={"data": list("abcdefghi")}, **kwargs
    )
    return X, y, Zs, qs, data, (guide, params, args, kwargs)


def test_groups_and_names(solvegp):
    X, y, Zs, _, data, _ = solvegp
    groups = {"posterior", "posterior_predictive", "log_likelihood", "sample_stats", "observed_data", "constant_data"}
    assert names(data) == groups
    assert data["posterior"]["f"].dims == ("chain", "draw", "data")
    assert data["posterior"]["f.u1"].dims == ("chain", "draw", "f.u1_dim_0")
    assert data["log_likelihood"]["y"].shape == data["posterior_predictive"]["y"].shape == (1, S, 9)
    assert list(data["posterior"]["data"].values) == list(data["observed_data"]["data"].values) == list("abcdefghi")
    constants = {"X": X, "f.u0_points": Zs[0], "f.u1_points": Zs[1], **HYPER}
    assert set(data["constant_data"].data_vars) == set(constants)
    for name, value in constants.items():
        np.testing.assert_array_equal(values(data, "constant_data", name), value)
    np.testing.assert_array_equal(values(data, "observed_data", "y"), y)


def test_log_likelihood_integrates_f_inside_the_logarithm(solvegp):
    X, y, Zs, _, data, _ = solvegp
    draws = [values(data, "posterior", f"f.u{i}") for i in (0, 1)]
    for s in (0, 1, S - 1):
        mean, var = given_draw(Zs, draws, s, X)
        assert var.max() > 0.1  # there is something to integrate
        expected = stats.norm.logpdf(y, mean, np.sqrt(var + NOISE**2))
        np.testing.assert_allclose(values(data, "log_likelihood", "y")[s], expected, rtol=1e-10)


def test_log_densities_of_model_and_guide(solvegp):
    _, _, _, qs, data, _ = solvegp
    draws = [values(data, "posterior", f"f.u{i}") for i in (0, 1)]
    prior = sum(stats.norm.logpdf(e).sum(-1) for e in draws)
    lp = prior + values(data, "log_likelihood", "y").sum(-1)
    log_q = sum(stats.multivariate_normal(m, T @ T.T).logpdf(e) for (m, T), e in zip(qs, draws, strict=True))
    np.testing.assert_allclose(values(data, "sample_stats", "lp"), lp, rtol=1e-10)
    np.testing.assert_allclose(values(data, "sample_stats", "log_q"), log_q, rtol=1e-10)


def test_draws_are_whole_functions_and_outputs_belong_to_them(solvegp):
    X, _, Zs, qs, data, _ = solvegp
    mean, cov = oracles.q_f(K, problems.oracle_sets(Zs, qs), X)
    f, y = values(data, "posterior", "f"), values(data, "posterior_predictive", "y")
    sd = np.sqrt(np.diagonal(cov))
    assert np.abs(f.mean(0) - mean).max() < 4.5 * sd.max() / np.sqrt(S)
    spread = np.sqrt((np.outer(sd, sd) ** 2 + cov**2) / S)
    assert (np.abs(np.cov(f.T) - cov) < 4.5 * spread).all()
    assert np.abs(cov[0, 1:]).max() > 20 * spread[0, 0]  # draws point by point would be found out
    noise = (y - f) / NOISE
    assert stats.kstest(noise[:, 0], "norm").pvalue > 1e-3
    assert np.abs(np.cov(noise.T) - np.eye(9)).max() < 5 * np.sqrt(2 / S)


def test_khat_is_that_of_the_same_draws(solvegp):
    """Its own draws, hence its own weights, but the same law; and blocks of draws change nothing."""
    *_, data, (guide, params, args, kwargs) = solvegp
    found = ogp.khat(problems.model, guide, params, *args, num_samples=2000, **kwargs)
    log_weights = (np.asarray(data["sample_stats"]["lp"]) - np.asarray(data["sample_stats"]["log_q"]))[0]
    assert stats.ks_2samp(found.log_weights, log_weights).pvalue > 1e-3
    assert 1 <= found.ess < 2000 and found.num_samples == 2000


def test_blocks_of_draws_change_nothing(solvegp, monkeypatch):
    *_, (guide, params, args, kwargs) = solvegp

    def log_weights():
        return ogp.khat(problems.model, guide, params, *args, num_samples=25, **kwargs).log_weights

    whole = log_weights()
    monkeypatch.setattr(replay, "MAX_ENTRIES", 4 * 9 * replay.NODES)  # blocks of four draws, which do not divide 25
    np.testing.assert_allclose(log_weights(), whole, rtol=1e-10)


@pytest.mark.parametrize(
    "likelihood, num",
    [
        (lambda m: likelihoods.Gaussian(m, 0.3), 8),
        (likelihoods.Bernoulli, 8),  # node by node
        (lambda m: likelihoods.Bernoulli(m, integrator=ogp.GaussHermite(50)), 1),
    ],
    ids=["closed form", "node by node", "all nodes"],
)
def test_draws_share_covariances_where_rows_are_many(likelihood, num, monkeypatch):
    """A draw by itself computes all of them again, as it did where nodes that were not held at once filled the memory allowed."""
    X = jnp.linspace(-1, 1, 40)[:, None]

    def model(X, y):
        f = ogp.gp("f", kernels.RBF(0.5), X[::10])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihood(f(X)), obs=y)

    guide = ogp.AutoSparseGP(model)
    y = (X[:, 0] > 0).astype(int)
    svi = SVI(model, guide, optax.adam(0.1), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(jax.random.PRNGKey(0), X, y))
    whole = ogp.khat(model, guide, params, X, y, num_samples=25).log_weights
    sizes, map_blocks = [], replay.map_blocks
    monkeypatch.setattr(replay, "map_blocks", lambda f, rows, size: sizes.append(size) or map_blocks(f, rows, size))
    monkeypatch.setattr(replay, "MAX_ENTRIES", 40 * 20)  # less than the nodes of a draw
    np.testing.assert_allclose(ogp.khat(model, guide, params, X, y, num_samples=25).log_weights, whole, rtol=1e-9)
    assert set(sizes) == {num}


# ---- other likelihoods and guides


def classifier(X, y, *, Z):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    f = ogp.gp("f", 1.3 * kernels.Matern52(lengthscale), Z, jitter=0.0)
    numpyro.deterministic("smoothness", 2 * lengthscale)
    with numpyro.plate("data", 50, subsample_size=50):
        numpyro.sample("y", likelihoods.Bernoulli(f(X) + 0.5), obs=y)


def labels(rng):
    X = rng.uniform(-2, 2, (50, 1))
    return X, (rng.uniform(size=50) < stats.norm.cdf(2 * np.sin(2 * X[:, 0]))).astype(float)


def test_random_hyperparameters_and_a_likelihood_by_quadrature(rng):
    """Bernoulli labels, a mean function, AutoNormal for the lengthscale: everything by hand."""
    X, y = labels(rng)
    Z = np.linspace(-2, 2, 3)[:, None]
    m, T = problems.random_q(rng, 3)
    params = problems.q_params([(m, T)]) | {
        "lengthscale_auto_loc": jnp.asarray(0.2),
        "lengthscale_auto_scale": jnp.asarray(0.3),
    }
    guide = ogp.AutoSparseGP(classifier, hyper=AutoNormal)
    data = ogp.to_arviz(classifier, guide, params, jnp.asarray(X), jnp.asarray(y), num_samples=50, Z=jnp.asarray(Z))
    u, ell = values(data, "posterior", "f.u0"), values(data, "posterior", "lengthscale")
    np.testing.assert_allclose(values(data, "posterior", "smoothness"), 2 * ell)
    log_lik = values(data, "log_likelihood", "y")
    for s in (0, 49):
        mean, var = given_draw([Z], [u], s, X, oracles.matern52(1.3, ell[s]))
        expected = oracles.log_predictive(oracles.log_bernoulli_logit, y, mean + 0.5, var)
        np.testing.assert_allclose(log_lik[s], expected, rtol=1e-6)
    log_q = stats.multivariate_normal(m, T @ T.T).logpdf(u) + stats.norm.logpdf(np.log(ell), 0.2, 0.3) - np.log(ell)
    lp = stats.norm.logpdf(u).sum(-1) + stats.lognorm(0.5).logpdf(ell) + log_lik.sum(-1)
    np.testing.assert_allclose(values(data, "sample_stats", "log_q"), log_q, rtol=1e-10)
    np.testing.assert_allclose(values(data, "sample_stats", "lp"), lp, rtol=1e-10)
    assert set(np.unique(values(data, "posterior_predictive", "y"))) == {0.0, 1.0}


def test_several_outputs(rng):
    """Two latent functions, one y of two entries for each point; and a guide that hands over nothing but values."""
    X, _ = problems.data(rng, N=6)
    Y = rng.normal(size=(6, 2))
    (Z,) = problems.sets(rng, [3])
    loc, scale = rng.normal(size=(2, 3)), rng.uniform(0.2, 1, (2, 3))
    params = {"loc": jnp.asarray(loc), "scale": jnp.asarray(scale)} | HYPER
    kwargs = {"inducing": jnp.asarray(Z), "likelihood": problems.gaussian(NOISE), "num_latents": 2, "to_event": 1}

    def guide(*args, **kwargs):
        loc, scale = (numpyro.param(name, jnp.ones((2, 3))) for name in ("loc", "scale"))
        numpyro.sample("f.u0", dist.Normal(loc, scale).to_event(2))

    dims = {"f": ["row", "output"], "y": ["row", "output"]}
    coords = {"output": ["left", "right"]}
    args = jnp.asarray(X), jnp.asarray(Y)
    data = ogp.to_arviz(problems.model, guide, params, *args, num_samples=5, dims=dims, coords=coords, **kwargs)
    assert data["posterior"]["f"].dims == data["posterior_predictive"]["y"].dims == ("chain", "draw", "row", "output")
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "row")
    assert data["constant_data"]["X"].dims == ("row", "X_dim")
    assert list(data["observed_data"]["output"].values) == ["left", "right"]
    u, log_lik = values(data, "posterior", "f.u0"), values(data, "log_likelihood", "y")
    for s in (0, 4):
        given = [given_draw([Z], [u[:, p]], s, X) for p in (0, 1)]
        expected = sum(stats.norm.logpdf(Y[:, p], m, np.sqrt(v + NOISE**2)) for p, (m, v) in enumerate(given))
        np.testing.assert_allclose(log_lik[s], expected, rtol=1e-10)
    log_q = stats.norm.logpdf(u, loc, scale).sum((-2, -1))
    np.testing.assert_allclose(values(data, "sample_stats", "log_q"), log_q, rtol=1e-10)


def pair(X, y, mask=None, count=None):
    """Two gps in one likelihood, outputs that are missing, and an output of NumPyro's own."""
    Z = jnp.asarray([[-1.0], [1.0]])
    f, g = (ogp.gp(name, kernels.Matern52(0.9), Z) for name in "fg")
    with numpyro.plate("rows", len(X)):
        fg = ogp.stack([f(X), g(X) - 1.0])
        numpyro.sample("y", likelihoods.HeteroskedasticGaussian(fg), obs=y, obs_mask=mask)
    numpyro.sample("count", dist.Poisson(jnp.full(2, 3.0)).to_event(1), obs=count)


def test_missing_outputs_and_other_distributions(rng):
    X, y = rng.uniform(-2, 2, (5, 1)), rng.normal(size=5)
    keep, count = np.array([True, False, True, True, False]), np.array([2, 5])
    params = problems.q_params([problems.random_q(rng, 2)]) | problems.q_params([problems.random_q(rng, 2)], "g")
    scoped = numpyro.handlers.scope(pair, prefix="a")
    params = {f"a/{name}": value for name, value in params.items()}
    guide = ogp.AutoSparseGP(scoped)
    look = numpyro.handlers.block(
        numpyro.handlers.seed(guide, 0)
    )  # it has no other sites, and keeps nothing of a first call
    jax.eval_shape(lambda *args: look(*args, count), jnp.asarray(X), jnp.asarray(y), keep)

    def converted(X, y, mask):
        return ogp.to_arviz(scoped, guide, params, jnp.asarray(X), y, mask, count, num_samples=4)

    holes, some = converted(X, jnp.where(keep, y, jnp.nan), keep), converted(X[keep], jnp.asarray(y[keep]), None)
    y_name, dim = "a.y", "a.y_observed"
    assert holes["observed_data"][y_name].dims == (dim,) and list(holes["observed_data"][dim].values) == [0, 2, 3]
    assert holes["posterior"]["a.f"].shape == holes["posterior"]["a.g"].shape == (1, 4, 5)
    assert holes["posterior_predictive"][y_name].shape == (1, 4, 3)
    # The same draws of u, of which missing outputs say nothing.
    for group, name in (
        ("log_likelihood", y_name),
        ("log_likelihood", "a.count"),
        ("sample_stats", "lp"),
        ("sample_stats", "log_q"),
    ):
        np.testing.assert_allclose(values(holes, group, name), values(some, group, name), rtol=1e-8, err_msg=name)
    np.testing.assert_allclose(values(some, "log_likelihood", "a.count"), stats.poisson(3.0).logpmf(count).sum())


@pytest.mark.parametrize("likelihood", [likelihoods.Gaussian, lambda m, s: likelihoods.Poisson(m)])
def test_single_entries_that_are_masked(rng, likelihood):
    """Rows without any entry are left out; of others hidden entries are NaN. The rest is what a plate over outputs gives."""
    X = jnp.asarray(rng.uniform(-2, 2, (5, 1)))
    seen = np.array([[True, False], [True, True], [False, False], [False, True], [True, True]])
    Y = jnp.where(seen, jnp.asarray(rng.integers(0, 5, (5, 2))), 50)

    def model(X, Y, event, seen=seen):
        m = likelihood(ogp.gp("f", kernels.Matern52(0.9), X[:2], num_latents=2)(X), 0.4)
        with numpyro.plate("rows", 5, dim=-1 if event else -2):
            if event:
                numpyro.sample("y", m.mask(jnp.asarray(seen)).to_event(1), obs=Y)
            else:
                with numpyro.plate("outputs", 2, dim=-1):
                    numpyro.sample("y", m.mask(jnp.asarray(seen)), obs=Y)

    params = {"f.u0_loc": jnp.ones((2, 2)), "f.u0_scale_tril": jnp.stack([0.5 * jnp.eye(2)] * 2)}
    of_rows, of_entries = (
        ogp.to_arviz(model, ogp.AutoSparseGP(model), params, X, Y, event, num_samples=6) for event in (True, False)
    )
    kept = seen.any(1)
    assert of_rows["observed_data"]["y"].dims == ("y_observed", "y_dim_1")
    assert list(of_rows["observed_data"]["y_observed"].values) == [0, 1, 3, 4]
    for group in ("observed_data", "posterior_predictive"):
        found = values(of_rows, group, "y")
        assert (np.isnan(found) == ~seen[kept]).all()
        np.testing.assert_array_equal(found[..., seen[kept]], values(of_entries, group, "y"))
    by_entry = np.zeros((6, 5, 2))
    by_entry[:, seen] = values(of_entries, "log_likelihood", "y")
    np.testing.assert_allclose(values(of_rows, "log_likelihood", "y"), by_entry.sum(-1)[:, kept], rtol=1e-10)
    whole = ogp.to_arviz(model, ogp.AutoSparseGP(model), params, X, Y, True, seen[:, :1] | seen[:, 1:], num_samples=6)
    assert whole["observed_data"]["y"].shape == (4, 2) and whole["observed_data"]["y"].dtype == Y.dtype  # no NaN needed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (az.plot_ppc if BEFORE_1 else az.plot_ppc_dist)(of_rows) is not None
    matplotlib.pyplot.close("all")


def gaps(X, y, seen, Z, own=dist.Normal):
    """A covariate with gaps: its missing values are no outputs, since y depends on them."""
    with numpyro.plate("rows", len(X)):
        x = numpyro.sample("x", own(jnp.zeros(len(X)), 1.5), obs=X, obs_mask=seen)
    f = ogp.gp("f", 1.3 * kernels.RBF(0.9), Z, jitter=0.0)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(x[:, None]), NOISE), obs=y)


def gaps_guide(X, y, seen, *others):
    numpyro.sample("f.u0", dist.Normal(jnp.array([0.2, -0.1]), 0.7).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("x_unobserved", dist.Normal(X + 0.3, 0.1).mask(~seen))


@pytest.mark.parametrize("by_hand", [True, False])
def test_gaps_of_a_covariate_are_latent(rng, by_hand):
    X, Z, seen = rng.uniform(-2, 2, 6), np.array([[-1.0], [1.0]]), np.arange(6) % 3 > 0
    y = np.sin(X)
    args = *map(jnp.asarray, (X, y, seen)), Z
    params = {} if by_hand else {"f.u0_loc": jnp.array([0.2, -0.1]), "f.u0_scale_tril": 0.7 * jnp.eye(2)}
    guide = gaps_guide if by_hand else ogp.AutoSparseGP(gaps)
    data = ogp.to_arviz(gaps, guide, params, *args, num_samples=300)
    u, drawn = values(data, "posterior", "f.u0"), values(data, "posterior", "x_unobserved")
    q = stats.norm(X + 0.3, 0.1) if by_hand else stats.norm(np.zeros(6), 1.5)
    assert stats.kstest(q.cdf(drawn).ravel(), "uniform").pvalue > 1e-3
    for s in (0, 299):
        x = np.where(seen, X, drawn[s])
        mean, var = given_draw([Z], [u], s, x[:, None], oracles.rbf(1.3, 0.9))
        log_lik = stats.norm.logpdf(y, mean, np.sqrt(var + NOISE**2))
        np.testing.assert_allclose(values(data, "log_likelihood", "y")[s], log_lik, rtol=1e-8)
        prior = stats.norm.logpdf(u[s]).sum() + stats.norm(0, 1.5).logpdf(x).sum()
        np.testing.assert_allclose(values(data, "sample_stats", "lp")[s], prior + log_lik.sum(), rtol=1e-8)
        log_q = stats.norm.logpdf(u[s], [0.2, -0.1], 0.7).sum() + q.logpdf(drawn[s])[~seen].sum()
        np.testing.assert_allclose(values(data, "sample_stats", "log_q")[s], log_q, rtol=1e-8)
    assert set(data["log_likelihood"].data_vars) == {"x", "y"} and "X" not in data["constant_data"].data_vars
    if by_hand:
        match = "Other sites depend on unobserved values of 'x_unobserved'"
        with pytest.raises(ValueError, match=match):
            ogp.khat(
                gaps, guide, params, *args, lambda loc, scale: likelihoods.Gaussian(ogp.Marginals(*[loc] * 3), scale)
            )


def two_columns(X, y):
    """Two outputs, each of its own latent function of one gp."""
    f = ogp.gp("f", kernels.Matern52(0.5), jnp.asarray([[-1.0], [1.0]]), num_latents=2)
    with numpyro.plate("data", len(X)):
        numpyro.sample("a", likelihoods.Gaussian(f(X)[..., 0], 0.01), obs=y)
        numpyro.sample("b", likelihoods.Gaussian(f(X)[..., 1] + 1.0, 0.01), obs=y)


def one_function(X, y):
    """Three outputs of the same function, one through a mixture with another, one through a transform."""
    f, g = (ogp.gp(name, kernels.Matern52(0.5), jnp.asarray([[-1.0], [1.0]])) for name in "fg")
    exp = dist.transforms.ExpTransform()
    with numpyro.plate("data", len(X)):
        numpyro.sample("a", likelihoods.Gaussian(f(X), 0.01), obs=y)
        numpyro.sample("b", likelihoods.Gaussian((ogp.stack([f(X), g(X)]) @ jnp.ones((2, 1)))[..., 0], 0.01), obs=y)
        numpyro.sample("c", likelihoods.Transformed(likelihoods.Gaussian(2 * f(X), 0.01), exp), obs=jnp.exp(y))


@pytest.mark.parametrize("model", [two_columns, one_function])
@pytest.mark.parametrize("limit", [8192, 3])
def test_all_outputs_of_a_draw_belong_to_the_same_function(rng, model, limit, monkeypatch):
    for module in (sites, ogp.functions.draws):
        monkeypatch.setattr(module, "MAX_JOINT_DRAW", limit)
    X = jnp.asarray(rng.uniform(-2, 2, (8, 1)))
    params = {
        f"{name}.u0_{part}": v for name in "fg" for part, v in (("loc", jnp.zeros(2)), ("scale_tril", jnp.eye(2)))
    }
    if model is two_columns:
        params = {"f.u0_loc": jnp.zeros((2, 2)), "f.u0_scale_tril": jnp.stack([jnp.eye(2)] * 2)}
    data = ogp.to_arviz(model, ogp.AutoSparseGP(model), params, X, jnp.zeros(8), num_samples=500)
    f, a, b = (
        values(data, *where) for where in (("posterior", "f"), *(("posterior_predictive", name) for name in "ab"))
    )
    if model is two_columns:
        noise = [a - f[..., 0], b - f[..., 1] - 1.0]
    else:
        assert set(data["posterior"].data_vars) == {"f", "g", "f.u0", "g.u0"}
        g, c = values(data, "posterior", "g"), values(data, "posterior_predictive", "c")
        noise = [a - f, b - f - g, np.log(c) - 2 * f]
    for own in noise:
        np.testing.assert_allclose(own.std(), 0.01, rtol=4.5 / np.sqrt(2 * own.size))
    assert np.abs(np.corrcoef([own.ravel() for own in noise]) - np.eye(len(noise))).max() < 4.5 / np.sqrt(a.size)
    assert f.std() > 0.5


def test_a_function_at_other_inputs(rng):
    """Each output has the values of f that it belongs to, under a name of their own where inputs differ."""
    X, at = jnp.asarray(rng.uniform(-2, 2, (8, 1))), jnp.asarray(rng.uniform(-2, 2, (5, 1)))

    def model(X, at):
        f = ogp.gp("f", kernels.Matern52(0.5), X[:2])
        for name, inputs in (("a", X), ("b", at), ("c", at)):
            with numpyro.plate(f"rows_{name}", len(inputs)):
                numpyro.sample(name, likelihoods.Gaussian(f(inputs), 0.01), obs=inputs[:, 0])

    data = ogp.to_arviz(
        model, ogp.AutoSparseGP(model), problems.q_params([problems.random_q(rng, 2)]), X, at, num_samples=50
    )
    assert set(data["posterior"].data_vars) == {"f", "f_b", "f.u0"}
    for name, own in (("a", "f"), ("b", "f_b"), ("c", "f_b")):
        gap = values(data, "posterior_predictive", name) - values(data, "posterior", own)
        assert np.abs(gap).max() < 0.06, name


def test_beyond_the_limit_of_joint_draws(rng, monkeypatch):
    """More inputs than one joint draw may have: point by point, f and y still belonging together."""
    for module in (sites, ogp.functions.draws):
        monkeypatch.setattr(module, "MAX_JOINT_DRAW", 3)
    X, y = (jnp.asarray(a) for a in problems.data(rng, N=4))
    Zs = problems.sets(rng, [2])
    qs = [problems.random_q(rng, 2)]
    kwargs = {"inducing": jnp.asarray(Zs[0]), "likelihood": problems.gaussian(0.01), "N": 4}
    guide = ogp.AutoSparseGP(problems.model)
    data = ogp.to_arviz(problems.model, guide, problems.q_params(qs) | HYPER, X, y, num_samples=S, **kwargs)
    f = values(data, "posterior", "f")
    assert np.abs(values(data, "posterior_predictive", "y") - f).max() < 0.06
    mean, cov = oracles.q_f(K, problems.oracle_sets(Zs, qs), np.asarray(X))
    sd = np.sqrt(np.diagonal(cov))
    assert (np.abs(f.mean(0) - mean) < 4.5 * sd / np.sqrt(S)).all()
    np.testing.assert_allclose(f.std(0), sd, rtol=4.5 / np.sqrt(2 * S))


# ---- MCMC


def regression(X, y):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    f = ogp.gp("f", kernels.RBF(0.9), jnp.linspace(-2, 2, 4)[:, None])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


@pytest.fixture(scope="module")
def mcmc():
    rng = np.random.default_rng(1)
    X = jnp.asarray(rng.uniform(-2, 2, (12, 1)))
    y = jnp.sin(2 * X[:, 0]) + 0.3 * jnp.asarray(rng.normal(size=12))
    sampler = MCMC(
        NUTS(regression), num_warmup=50, num_samples=100, num_chains=2, chain_method="vectorized", progress_bar=False
    )
    sampler.run(jax.random.PRNGKey(0), X, y, extra_fields=("diverging", "num_steps", "potential_energy"))
    return sampler, X, y, ogp.to_arviz(regression, sampler, None, X, y)


def test_mcmc_keeps_chains_and_values(mcmc):
    sampler, X, y, data = mcmc
    samples = sampler.get_samples(group_by_chain=True)
    for name in ("noise", "f.u0"):
        np.testing.assert_array_equal(data["posterior"][name], samples[name])
    assert data["posterior"]["f"].shape == data["log_likelihood"]["y"].shape == (2, 100, 12)
    assert set(data["sample_stats"].data_vars) == {"diverging", "n_steps", "tree_depth", "lp"}
    Z, kernel = np.linspace(-2, 2, 4)[:, None], oracles.rbf(1.0, 0.9)
    u, noise = np.asarray(samples["f.u0"])[1], np.asarray(samples["noise"])[1]
    mean, var = given_draw([Z], [u], 7, np.asarray(X), kernel)
    expected = stats.norm.logpdf(y, mean, np.sqrt(var + noise[7] ** 2))
    np.testing.assert_allclose(np.asarray(data["log_likelihood"]["y"])[1, 7], expected, rtol=1e-6)  # the default jitter


# ---- k-hat


def best(rng):
    """Exact inference: Gaussian noise, inducing points at the data, the best q."""
    X, y = problems.data(rng, N=12)
    mean, cov = oracles.optimal_q(K, X, y, X, NOISE**2, whitened=True)
    kwargs = {"inducing": jnp.asarray(X), "likelihood": problems.gaussian(NOISE)}
    return X, y, mean, np.linalg.cholesky((cov + cov.T) / 2), kwargs


def test_weights_of_the_exact_posterior_are_the_evidence(rng):
    X, y, mean, T, kwargs = best(rng)
    guide, args = ogp.AutoSparseGP(problems.model), (jnp.asarray(X), jnp.asarray(y))

    def khat(scale):
        params = problems.q_params([(mean, scale * T)]) | HYPER
        return ogp.khat(problems.model, guide, params, *args, num_samples=500, **kwargs)

    exact = khat(1.0)
    np.testing.assert_allclose(exact.log_weights, oracles.exact_log_marginal(K, X, y, NOISE**2), rtol=1e-9)
    assert exact.khat < 0.5 and exact.ess > 499.9 and "good" in str(exact)
    narrow = khat(0.3)
    assert narrow.khat > 0.7 and narrow.ess < 50 and "do not trust" in str(narrow)
    wide = khat(1.1)  # heavier tails than the posterior's, so weights are bounded
    assert wide.khat < 0.5 and 250 < wide.ess < 500
    np.testing.assert_allclose(np.log(np.exp(wide.log_weights - exact.log_weights.mean()).mean()), 0, atol=0.2)


def smoothed_by_hand(log_weights):
    """k-hat and effective sample size by the formulas of Zhang and Stephens 2009 and Vehtari et al. 2024."""
    x = log_weights - log_weights.max()
    S, order = len(x), np.argsort(x)
    tail, cut = order[-(M := int(np.ceil(min(S / 5, 3 * np.sqrt(S))))) :], np.exp(x[order[-M - 1]])
    over = np.exp(x[tail]) - cut
    m = 30 + int(np.sqrt(M))
    j = np.arange(1, m + 1)
    theta = 1 / over[-1] + (1 - np.sqrt(m / (j - 0.5))) / (3 * over[int(M / 4 + 0.5) - 1])
    k = np.log1p(-theta[:, None] * over).mean(1)
    likelihood = M * (np.log(-theta / k) - k - 1)
    theta = theta @ np.exp(likelihood - np.logaddexp.reduce(likelihood))
    k = np.log1p(-theta * over).mean()
    sigma, k = -k / theta, (M * k + 5) / (M + 10)
    x[tail] = np.minimum(np.log(stats.genpareto(k, cut, sigma).ppf((np.arange(M) + 0.5) / M)), 0)
    return k, np.exp(x).sum() ** 2 / np.exp(2 * x).sum()


@pytest.mark.parametrize("num", [30, 400, 2500])  # of which a fifth, or the root, is a whole number
@pytest.mark.parametrize("law", [stats.norm(), stats.t(3, scale=2), stats.uniform(), stats.expon()])
def test_khat_by_its_formulas(num, law):
    log_weights = law.rvs(num, random_state=1)
    found = importance._smoothed(3.0 + log_weights, np.full(num, 3.0), 1e-16)
    np.testing.assert_allclose((found.khat, found.ess), smoothed_by_hand(log_weights), rtol=1e-6)


def test_a_tail_without_a_distribution_is_not_trusted():
    log_weights = np.linspace(-1, 0, 1000)
    log_weights[-95:-20] = log_weights[-95]  # most of the largest weights tie
    found = importance._smoothed(log_weights, np.zeros(1000), 1e-16)
    assert not np.isnan(found.khat) and np.isfinite(found.ess) and "nan" not in str(found)
    few = importance._smoothed(np.random.default_rng(0).normal(size=25), np.zeros(25), 1e-16)
    assert not np.isnan(few.khat)


def test_largest_weights_that_are_equal():
    """Bounded weights with nothing above the bound, as of draws that are impossible under the model beside equal ones."""
    for lower, ess in ((-np.inf, 900), (-1.0, (900 + 100 / np.e) ** 2 / (900 + 100 / np.e**2))):
        found = importance._smoothed(np.where(np.arange(1000) < 100, lower, 0.0), np.zeros(1000), 1e-16)
        assert found.khat == -np.inf and "good" in str(found)
        np.testing.assert_allclose(found.ess, ess)


def test_khat_says_what_it_means():
    weights = np.zeros(1000)
    said = {k: str(ParetoK(k, 800.0, 1000, weights)) for k in (-np.inf, 0.3, 0.6, 0.68, 0.9)}
    assert "good" in said[-np.inf] and "good" in said[0.3] and "worth 800" in said[0.3]
    assert "usable" in said[0.6] and "too few draws" in said[0.68] and "do not trust" in said[0.9]
    assert ParetoK(0.6, 90.0, 100, weights).threshold == 0.5 and "too few draws" in str(
        ParetoK(0.6, 90.0, 100, weights)
    )


# ---- what ArviZ makes of it


def test_arviz_functions(solvegp, mcmc, tmp_path):
    *_, data, (_, params, args, kwargs) = solvegp
    svgp = ogp.to_arviz(
        problems.model,
        ogp.AutoSparseGP(problems.model),
        {name: value for name, value in params.items() if "u1" not in name},
        *args,
        num_samples=500,
        **kwargs | {"inducing": kwargs["inducing"][0]},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loo = az.loo(mcmc[-1], pointwise=True)
        table = az.compare({"SOLVE-GP": data, "SVGP": svgp})
        summary = az.summary(mcmc[-1], var_names=["noise", "f"])
        (az.plot_ppc if BEFORE_1 else az.plot_ppc_dist)(mcmc[-1])
    assert np.isfinite(loo.elpd_loo if BEFORE_1 else loo.elpd)
    assert loo.n_data_points == 12 and set(table.index) == {"SOLVE-GP", "SVGP"} and len(summary) == 13
    path = str(tmp_path / "fit.nc")
    data.to_netcdf(path, engine="h5netcdf")
    opened = az.from_netcdf(path)
    for group in names(data):
        assert set(opened[group].data_vars) == set(data[group].data_vars)
        for name, values in data[group].data_vars.items():
            np.testing.assert_array_equal(opened[group][name], values)


def test_zarr_round_trip(solvegp, tmp_path):
    pytest.importorskip("zarr")
    import xarray as xr

    *_, data, _ = solvegp
    tree = data.to_datatree() if BEFORE_1 else data  # ArviZ 0.x writes formats of zarr 2 only
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of consolidated metadata
        tree.to_zarr(tmp_path / "fit.zarr")
        opened = xr.open_datatree(tmp_path / "fit.zarr", engine="zarr")
    for group in names(data):
        assert set(opened[group].data_vars) == set(data[group].data_vars)
        for name, values in data[group].data_vars.items():
            np.testing.assert_array_equal(opened[group][name], values)


def test_calibration_plot_of_leave_one_out(solvegp):
    *_, data, _ = solvegp
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = az.plot_loo_pit(data, y="y") if BEFORE_1 else az.plot_loo_pit(data)
    assert drawn is not None
    matplotlib.pyplot.close("all")


def exact_regression(rng, spread=1.0):
    """Draws of the exact posterior, or of one whose standard deviations are larger; exact leave-one-out; the in-sample fit."""
    X = np.linspace(-2, 2, 25)[:, None]
    y = np.sin(2 * X[:, 0]) + NOISE * rng.normal(size=25)
    mean, cov = oracles.optimal_q(K, X, y, X, NOISE**2, whitened=True)
    params = problems.q_params([(mean, spread * np.linalg.cholesky((cov + cov.T) / 2))]) | HYPER
    params["lengthscale"] = params["lengthscale"][:1]
    kwargs = {"inducing": jnp.asarray(X), "likelihood": problems.gaussian(NOISE), "posterior_predictive": False}
    guide = ogp.AutoSparseGP(problems.model)
    data = ogp.to_arviz(problems.model, guide, params, jnp.asarray(X), jnp.asarray(y), num_samples=S, **kwargs)
    exact = 0.0
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        m, V = oracles.exact_predict(K, X[rest], y[rest], NOISE**2, X[[i]])
        exact += stats.norm.logpdf(y[i], m[0], np.sqrt(V[0, 0] + NOISE**2))
    return data, exact, stats.norm.logpdf(y, values(data, "posterior", "f").mean(0), NOISE).sum()


def test_loo_is_that_of_the_exact_posterior(rng):
    """Draws of the exact posterior: PSIS-LOO against leaving out each point in turn."""
    data, exact, in_sample = exact_regression(rng)
    assert "posterior_predictive" not in names(data)
    loo = az.loo(data)
    found = loo.elpd_loo if BEFORE_1 else loo.elpd
    assert abs(found - exact) < 0.1 * (in_sample - exact), (found, exact, in_sample)


@pytest.mark.skipif(BEFORE_1, reason="ArviZ 1.x has it")
def test_loo_of_an_approximate_posterior(rng):
    """log p and log q of the draws make good that q is too wide."""
    data, exact, _ = exact_regression(rng, spread=1.2)
    statistics = data["sample_stats"]
    corrected = az.loo_approximate_posterior(data, np.asarray(statistics["lp"])[0], np.asarray(statistics["log_q"])[0])
    assert abs(corrected.elpd - exact) < 0.3 * abs(az.loo(data).elpd - exact), (
        corrected.elpd,
        az.loo(data).elpd,
        exact,
    )


# ---- errors


def test_errors(solvegp, mcmc, rng):
    *_, (guide, params, args, kwargs) = solvegp
    model = problems.model

    def refused(error, match, *given, function=ogp.to_arviz, **options):
        with pytest.raises(error, match=match):
            function(*given, **{"num_samples": 30} | kwargs | options)

    lacking = {name: value for name, value in params.items() if name != "f.u1_loc"}
    for function in (ogp.to_arviz, ogp.khat):
        match = "parameters of the guide; it lacks 'f.u1_loc'"
        refused(ValueError, match, model, guide, lacking, *args, function=function)
        refused(TypeError, "before the model's arguments", model, guide, *args, function=function)
        refused(TypeError, "callable; got dict", model, {}, params, *args, function=function)
    refused(ValueError, "no observed site", model, guide, params, args[0])
    refused(ValueError, "size 90 holds 9 rows", model, guide, params, *args, N=90)
    lacking = {name: value for name, value in params.items() if name != "variance"}
    refused(ValueError, "parameters of the model; it lacks 'variance'", model, guide, lacking, *args)
    one_set = {"inducing": kwargs["inducing"][0]}
    refused(ValueError, r"no sites \['f.u1'\]", model, guide, params, *args, **one_set)
    larger = {"inducing": [jnp.ones((6, 2)), kwargs["inducing"][1]]}
    refused(ValueError, r"`f.u0` have shape \(4,\); .* shape \(6,\)", model, guide, params, *args, **larger)
    refused(ValueError, "names 2 dimensions", model, guide, params, *args, dims={"f": ["rows", "more"]})
    refused(ValueError, "at least 25", model, guide, params, *args, function=ogp.khat, num_samples=3)
    refused(ValueError, "for guides", regression, mcmc[0], None, *mcmc[1:3], num_samples=10)
    refused(TypeError, "to_arviz\\(model, mcmc, None, X, y\\)", regression, mcmc[0], *mcmc[1:3])
    fresh = MCMC(NUTS(regression), num_warmup=1, num_samples=1)
    with pytest.raises(ValueError, match="no draws yet"):
        ogp.to_arviz(regression, fresh, None, *mcmc[1:3])
    shifted = [kwargs["inducing"][0], ogp.MeanOnly(kwargs["inducing"][1])]
    weights = {"f.u1_weights": jnp.ones(3)}
    own = ogp.AutoSparseGP(model)
    refused(
        ValueError, "mean-only points of 'f'", model, own, params | weights, *args, function=ogp.khat, inducing=shifted
    )

    def collapsed(X, y):
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(1.0), X, X[:3], noise), obs=y)

    def point(X, y):
        numpyro.sample("noise", dist.Delta(jnp.asarray(0.5)))

    with pytest.raises(ValueError, match="a CollapsedGP, are not independent"):
        ogp.to_arviz(collapsed, point, {}, *args)
    with pytest.raises(ValueError, match="the same point each time"):
        ogp.khat(collapsed, point, {}, *args)


def test_inducing_variables_that_are_given_are_no_output():
    def model(X, y):
        shift, f = numpyro.sample("shift", dist.Normal()), ogp.gp("f", kernels.RBF(0.9), X[:2])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X) + shift, NOISE), obs=y)

    X, u = jnp.linspace(-1, 1, 6)[:, None], jnp.array([0.5, -0.2])
    given = numpyro.handlers.condition(model, {"f.u0": u})
    params = {"shift_auto_loc": jnp.zeros(()), "shift_auto_scale": jnp.ones(())}
    data = ogp.to_arviz(given, AutoNormal(given), params, X, X[:, 0], num_samples=5)
    for group in ("log_likelihood", "posterior_predictive", "observed_data"):
        assert set(data[group].data_vars) == {"y"}
    prior = stats.norm.logpdf(u).sum() + stats.norm.logpdf(values(data, "posterior", "shift"))
    lp = prior + values(data, "log_likelihood", "y").sum(-1)
    np.testing.assert_allclose(values(data, "sample_stats", "lp"), lp, rtol=1e-10)


def coin(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", 3):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def test_a_model_without_gps_and_errors_of_names():
    def guide(y):
        numpyro.sample("mu", dist.Normal(0.1, 0.5))

    y = jnp.asarray([0.5, -0.5, 0.4])
    data = ogp.to_arviz(coin, guide, {}, y, num_samples=50)
    mu = values(data, "posterior", "mu")
    np.testing.assert_allclose(values(data, "log_likelihood", "y"), stats.norm.logpdf(y, mu[:, None]))
    assert "constant_data" not in names(data)
    wrong = [
        ({"coords": {"rows": np.arange(3)}}, "`coords` has \\['rows'\\]"),
        ({"coords": {"data": np.arange(2)}}, "must have 3 labels"),
        ({"dims": {"h": ["rows"]}}, "`dims` has \\['h'\\]"),
        ({"num_samples": 0}, "positive integer"),
    ]
    for options, match in wrong:
        with pytest.raises(ValueError, match=match):
            ogp.to_arviz(coin, guide, {}, y, **options)
    found = ogp.khat(coin, guide, {}, y)  # the exact posterior
    assert found.khat == -np.inf and found.ess == found.num_samples
    with pytest.raises(FloatingPointError, match="1000 of 1000 log weights are NaN"):
        ogp.khat(coin, guide, {}, y * jnp.nan)


def test_marginals_in_a_deterministic_site_are_no_values():
    X = jnp.linspace(0.0, 1.0, 5)[:, None]

    def model(y):
        f = ogp.gp("f", kernels.RBF(0.5), X[::2])
        numpyro.deterministic("all", f(X))
        numpyro.deterministic("mean", f(X).mean)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)

    guide, y = ogp.AutoSparseGP(model), jnp.zeros(5)
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.1), numpyro.infer.TraceMeanField_ELBO())
    params = svi.run(jax.random.PRNGKey(0), 3, y, progress_bar=False).params
    found = ogp.to_arviz(model, guide, params, y, num_samples=10)["posterior"]
    assert {"mean", "f"} <= set(found.data_vars) and "all" not in found.data_vars


def test_a_home_folder_that_cannot_be_written(monkeypatch):
    """ArviZ 0.23 makes a folder there when it is imported."""

    class Finder:
        def find_spec(self, name, *_):
            if name == "arviz":
                raise PermissionError("read-only file system: '/home/.cache/arviz'")

    monkeypatch.delitem(sys.modules, "arviz", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    if versions._is_before_1():
        with pytest.raises(RuntimeError, match=r"read-only file system.*Set XDG_CACHE_HOME to a folder"):
            versions.smooth_weights(np.zeros(100))
    else:  # of which parts are enough
        assert versions.smooth_weights(np.random.default_rng(0).normal(size=100))[1] < 0.7
        assert versions.tree_of({"posterior": None}).groups == ("/", "/posterior")


def test_pareto_weights_without_docstrings(monkeypatch):
    """ArviZ 0.x ended in an error of `+=` under `python -OO`."""
    monkeypatch.setattr(versions, "_is_before_1", lambda: True)
    monkeypatch.setattr(versions, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    with pytest.raises(
        RuntimeError, match=r"ArviZ before 1\.0 needs its docstrings for k-hat, and `python -OO` leaves them out"
    ):
        versions.smooth_weights(np.zeros(100))
