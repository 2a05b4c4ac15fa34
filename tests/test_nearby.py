"""What `check` says of near rows: the gain of groups beside dense determinants, that of neighbours beside two predictions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import CollapsedGP, init, kernels, likelihoods
from numpyro_orthgp.diagnostics import nearby
from numpyro_orthgp.diagnostics.draws import Arguments, GuideDraws
from numpyro_orthgp.diagnostics.nearby import GROUP_SIZE, NEIGHBORS
from numpyro_orthgp.diagnostics.replay import look
from numpyro_orthgp.diagnostics.subject import Subject
from tests import oracles

N = 80
RNG = np.random.default_rng(0)
X = RNG.uniform(0, 1, (N, 2))
Y = np.sin(12 * X[:, 0]) * np.cos(9 * X[:, 1]) + 0.1 * RNG.normal(size=N)
Z, SCALE, NOISE = X[:6], 0.2, 0.15
DENSE = oracles.matern32(1.0, SCALE)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def observe(f, y, mask=None):
    numpyro.sample("y", likelihoods.Gaussian(f, NOISE), obs=y, obs_mask=mask)


def model(X, y, N, how=lambda f: f, mask=None):
    f = ogp.gp("f", kernels.Matern32(SCALE), Z)
    with numpyro.plate("data", N):
        observe(how(f(X)), y, mask)


def collapsed(X, y, loc):
    numpyro.sample("y", CollapsedGP(kernels.Matern32(SCALE), X, Z, NOISE, loc=loc, bound="titsias2025"), obs=y + 0.5)


def fitted(model, guide, *args, **kwargs):
    svi = SVI(model, guide, optax.adam(0.1), TraceMeanField_ELBO())
    return svi.run(jax.random.PRNGKey(0), 60, *args, progress_bar=False, **kwargs).params


def dense_gain_of_groups():
    D = DENSE(X, X) - DENSE(X, Z) @ np.linalg.solve(DENSE(Z, Z), DENSE(Z, X))
    D = np.eye(N) + D / NOISE**2
    rows = np.asarray(init.groups(X, GROUP_SIZE)).reshape(-1, GROUP_SIZE)
    return (np.log(np.diag(D)).sum() - sum(np.linalg.slogdet(D[np.ix_(i, i)])[1] for i in rows)) / (2 * N)


@pytest.fixture(scope="module")
def params():
    with jax.enable_x64(True):
        return fitted(model, ogp.AutoSparseGP(model), X, Y, N)


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_gains_of_a_guide(params, residual):
    guide = ogp.AutoSparseGP(model, residual=residual)
    if residual == "tight":
        params = fitted(model, guide, X, Y, N)
    report = ogp.check(model, guide, params, X, Y, N, num_samples=25)
    gain = report.nearby["y"]
    np.testing.assert_allclose(gain.groups, dense_gain_of_groups(), rtol=1e-6)

    f = ogp.posterior(model, guide, params, X, Y, N)["f"]
    order = np.random.default_rng(0).permutation(N)
    out, kept = order[: gain.num], order[gain.num :]
    near = ogp.with_neighbors(f, X[kept], Y[kept], NOISE, num_neighbors=NEIGHBORS)
    of = [likelihoods.Gaussian(g(X[out]), NOISE).log_predictive(Y[out]).mean() for g in (near, f)]
    np.testing.assert_allclose(gain.neighbors, of[0] - of[1], rtol=1e-9)
    assert gain.num == N // 5 and gain.neighbors > 0.1
    assert any("ogp.with_neighbors(f, X, y, noise)" in line for line in report.advice)
    assert "nearby rows of y, nats per row: groups of 16 would add" in str(report)


@pytest.mark.parametrize("by_guide", [True, False])
def test_a_fit_in_groups_is_told_of_no_gain(by_guide):
    def grouped(X, y, N):
        numpyro.sample("y", CollapsedGP(kernels.Matern32(SCALE), X, Z, NOISE, group_size=4), obs=y)

    of, guide = (
        (model, ogp.AutoSparseGP(model, residual="tight", group_size=4)) if by_guide else (grouped, lambda *a: None)
    )
    params = fitted(of, guide, X, Y, N) if by_guide else {}
    report = ogp.check(of, guide, params, X, Y, N, num_samples=25)
    assert report.nearby["y"].groups is None
    assert "nearby rows of y, nats per row: the fit has groups, the 32 nearest" in str(report)


def test_function_and_noise_are_of_one_draw(monkeypatch):
    """Of a guide that draws hyperparameters: here the function's standard deviation is the noise's."""

    def drawn(X, y):
        noise = numpyro.sample("noise", numpyro.distributions.LogNormal(0.0, 1.0))
        f = ogp.gp("f", noise**2 * kernels.Matern32(SCALE), Z)
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)

    found = []
    monkeypatch.setattr(nearby, "_gains", lambda f, X, y, noise: found.append((f.kernel(X), noise)))
    guide = ogp.AutoSparseGP(drawn, hyper=numpyro.infer.autoguide.AutoNormal)
    params = fitted(drawn, guide, X, Y)
    arguments, keys = Arguments((jnp.asarray(X), jnp.asarray(Y)), {}), jax.random.split(jax.random.PRNGKey(0), 4)
    layout = look(drawn, arguments, GuideDraws(guide, params, arguments, keys[0]), fitted=True)
    for key in keys:
        nearby.nearby_gains(Subject(drawn, guide, params, arguments, layout, key))
    for variance, noise in found:
        np.testing.assert_allclose(variance, noise**2, rtol=1e-9)
    assert len({float(noise[0]) for _, noise in found}) == 4


@pytest.mark.parametrize("loc", [0.5, np.full(N, 0.5)], ids=["scalar", "of each row"])
def test_gains_of_a_collapsed_bound_with_a_mean(loc):
    def guide(*args):
        pass

    gain = ogp.check(collapsed, guide, {}, X, Y, loc, num_samples=25).nearby["y"]
    np.testing.assert_allclose(gain.groups, dense_gain_of_groups(), rtol=1e-6)
    f = CollapsedGP(kernels.Matern32(SCALE), X, Z, NOISE).posterior(Y)
    order = np.random.default_rng(0).permutation(N)
    out, kept = order[: gain.num], order[gain.num :]
    near = ogp.with_neighbors(f, X[kept], Y[kept], NOISE, num_neighbors=NEIGHBORS)
    of = [likelihoods.Gaussian(g(X[out]), NOISE).log_predictive(Y[out]).mean() for g in (near, f)]
    np.testing.assert_allclose(gain.neighbors, of[0] - of[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"how": lambda f: 2.0 * f}, "arithmetic"), ({"mask": jnp.arange(N) > 3}, "masks")],
    ids=["arithmetic", "masks"],
)
def test_left_out_where_y_is_not_f_and_noise(params, change, message):
    report = ogp.check(model, ogp.AutoSparseGP(model), params, X, Y, N, num_samples=25, **change)
    assert not report.nearby, message
    assert "near rows" not in str(report)
