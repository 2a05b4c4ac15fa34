"""Latent inputs of new rows, principal components, and the pictures of latent spaces."""

from __future__ import annotations

import jax
import matplotlib
import numpy as np
import numpyro.distributions as dist
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods, plots
from tests import oracles

N, D, NOISE = 40, 6, 0.1


@pytest.fixture(scope="module")
def curve():
    """Functions of one latent input, fitted at known values of it: f, X, and the true functions."""
    rng = np.random.default_rng(1)
    X = np.linspace(-2, 2, N)[:, None]
    phases = rng.uniform(0, 6, D)

    def truth(x):
        return np.sin(1.5 * x + phases) + 0.5 * x

    Y = truth(X) + NOISE * rng.normal(size=(N, D))
    f = jax.jit(lambda X, Y: ogp.CollapsedGP(kernels.RBF(0.8), X, X[::3], NOISE, num_outputs=D).posterior(Y))(X, Y)
    return f, X, truth


def dense_elbo(y, seen, loc, scale):
    """The bound of one row by a fine rule, everything about the functions from dense formulas."""
    rng = np.random.default_rng(1)
    X = np.linspace(-2, 2, N)[:, None]
    phases = rng.uniform(0, 6, D)
    Y = np.sin(1.5 * X + phases) + 0.5 * X + NOISE * rng.normal(size=(N, D))
    k, Z = oracles.rbf(1.0, 0.8), X[::3]
    t, w = np.polynomial.hermite_e.hermegauss(40)
    x, w = (loc + scale * t)[:, None], w / w.sum()
    total = -0.5 * (loc**2 + scale**2 - 1 - 2 * np.log(scale))
    jitter = 1e-10
    for d in np.flatnonzero(seen):
        m, S = oracles.optimal_q(k, X, Y[:, d], Z, NOISE**2, jitter)
        Kuu = k(Z, Z) + jitter * np.eye(len(Z))
        sets = [oracles.WhitenedSet(Z, *oracles.whiten(m, S, Kuu))]
        mean, cov = oracles.q_f(k, sets, x, jitter)
        total += w @ oracles.expected_log_normal(y[d], mean, np.diag(cov), NOISE**2)
    return total


def test_beside_a_fine_grid(curve):
    """Beside the density on a grid whose logarithm the bound averages. Nodes whose mean was not zero gave 0.09 and 5 percent."""
    f, _, truth = curve
    Y = truth(np.array([[-1.37], [0.21], [1.55]]))
    q = ogp.infer_latents(f, Y, NOISE)
    grid = np.linspace(-5, 5, 20001)[:, None]
    fit = np.asarray(
        jax.jit(
            lambda y: jax.vmap(lambda y: likelihoods.Gaussian(f(grid), NOISE).log_prob(y + 0 * f(grid).mean).sum(-1))(y)
        )(Y)
    )
    log_density = fit - grid[:, 0] ** 2 / 2
    w = np.exp(log_density - log_density.max(-1, keepdims=True))
    elbo = np.log(w.sum(-1) * (grid[1, 0] - grid[0, 0]) / np.sqrt(2 * np.pi)) + log_density.max(-1)
    w /= w.sum(-1, keepdims=True)
    mean = w @ grid[:, 0]
    scale = np.sqrt(w @ grid[:, 0] ** 2 - mean**2)
    np.testing.assert_array_less(np.abs(q.loc[:, 0] - mean) / scale, 0.02)
    np.testing.assert_allclose(q.scale[:, 0], scale, rtol=0.03)
    np.testing.assert_allclose(q.elbo, elbo, atol=0.02)


def test_new_rows_are_found_and_completed(curve):
    f, X, truth = curve
    x = np.array([[-1.37], [0.21], [1.55]])
    Y = truth(x)
    hidden = Y.copy()
    hidden[0, 3:], hidden[1, ::2], hidden[2, 0] = np.nan, np.nan, np.nan
    found = ogp.infer_latents(f, hidden, NOISE, starts=X)
    np.testing.assert_allclose(found.loc, x, atol=0.1)
    np.testing.assert_allclose(found.mean, Y, atol=0.15)
    assert found.scale.shape == (3, 1) and found.variance.shape == (3, D) and (np.asarray(found.variance) > 0).all()
    for i in range(3):
        expected = dense_elbo(hidden[i], ~np.isnan(hidden[i]), float(found.loc[i, 0]), float(found.scale[i, 0]))
        np.testing.assert_allclose(found.elbo[i], expected, rtol=0.02, atol=0.05)
        for move, stretch in ((0.02, 1), (-0.02, 1), (0, 1.3), (0, 0.75)):  # it is a maximum
            other = dense_elbo(
                hidden[i], ~np.isnan(hidden[i]), float(found.loc[i, 0]) + move, float(found.scale[i, 0]) * stretch
            )
            assert other < expected + 1e-2
    # The same by a mask, whatever stands in the hidden places; and by a likelihood, which is another program.
    filled, seen = np.where(np.isnan(hidden), 99.0, hidden), ~np.isnan(hidden)
    jax.tree.map(np.testing.assert_array_equal, ogp.infer_latents(f, filled, NOISE, observed=seen, starts=X), found)
    again = ogp.infer_latents(f, filled, lambda m: likelihoods.Gaussian(m, NOISE), observed=seen, starts=X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), again, found)


def test_rows_that_fit_at_several_places():
    """Fast functions of two latent inputs, some entries hidden: many local optima. Four starts that all took all of the steps fell
    short of the row's own input by 7 nats on average."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(160, 2))
    K = np.exp(-np.sum((x[:, None] - x) ** 2, -1) / (2 * 0.5**2)) + 1e-6 * np.eye(160)
    y = np.linalg.cholesky(K) @ rng.normal(size=(160, 8)) + NOISE * rng.normal(size=(160, 8))
    f = jax.jit(lambda X, Y: ogp.CollapsedGP(kernels.RBF(0.5), X, X[:40], NOISE, num_outputs=8).posterior(Y))(
        x[:120], y[:120]
    )
    hidden = np.where((rng.uniform(size=(40, 8)) < 0.3) & (np.arange(8) > 0), np.nan, y[120:])
    found = np.asarray(ogp.infer_latents(f, hidden, NOISE).elbo)
    own = np.asarray(ogp.infer_latents(f, hidden, NOISE, starts=x[120:]).elbo)
    short = np.maximum(own - found, 0)
    assert short.mean() < 2


def test_counts_and_covariates(rng):
    """A latent input beside an observed one, and a likelihood that is not Gaussian."""
    X = rng.uniform(-2, 2, (60, 2))
    rate = np.stack([np.exp(1.5 + X[:, 0] + 0.3 * X[:, 1]), np.exp(2 - X[:, 0]), np.exp(1 + 0.5 * X[:, 1])], -1)
    f = jax.jit(lambda X, Y: ogp.CollapsedGP(4.0 * kernels.RBF(2.0), X, X[:20], 0.05, num_outputs=3).posterior(Y))(
        X, np.log(rate)
    )
    x = np.array([[0.8, -1.0], [-1.2, 0.5]])
    counts = np.round(np.exp(np.stack([1.5 + x[:, 0] + 0.3 * x[:, 1], 2 - x[:, 0], 1 + 0.5 * x[:, 1]], -1)))
    found = ogp.infer_latents(f, counts.astype(float), lambda m: likelihoods.Poisson(m), covariates=x[:, 1:])
    assert found.loc.shape == (2, 1)
    np.testing.assert_allclose(found.loc, x[:, :1], atol=0.5)
    assert found.loc[0] > found.loc[1] + 1


def test_errors(curve):
    f, X, truth = curve
    y = truth(np.array([[0.3]]))
    with pytest.raises(ValueError, match=r"`y` must have shape \(n, 6\)"):
        ogp.infer_latents(f, y[:, :4], NOISE)
    with pytest.raises(
        ValueError, match=r"`likelihood` must have a density for each entry.*Leave out `.to_event\(1\)`"
    ):
        ogp.infer_latents(f, y, lambda m: likelihoods.Gaussian(m, NOISE).to_event(1))
    with pytest.raises(ValueError, match="row 0 has none"):
        ogp.infer_latents(f, np.full((1, D), np.nan), NOISE)
    with pytest.raises(ValueError, match="`observed` must be boolean of the shape"):
        ogp.infer_latents(f, y, NOISE, observed=np.ones((1, D)))
    with pytest.raises(ValueError, match=r"`y\[observed\]` must be finite"):
        ogp.infer_latents(f, np.full((1, D), np.nan), NOISE, observed=np.ones((1, D), bool))
    with pytest.raises(ValueError, match=r"`covariates` must have shape \(1, C\) with C < 1"):
        ogp.infer_latents(f, y, NOISE, covariates=np.zeros((1, 1)))
    for noise in (0.0, -0.2, np.array([0.1] * 5 + [np.nan])):
        with pytest.raises(ValueError, match="`likelihood` must be positive; got a value of "):
            ogp.infer_latents(f, y, noise)
    for name in ("num_starts", "num_steps", "num_samples"):
        with pytest.raises(ValueError, match=f"`{name}` must be a positive integer; got 0"):
            ogp.infer_latents(f, y, NOISE, **{name: 0})
    single = jax.jit(lambda y: ogp.CollapsedGP(kernels.RBF(0.8), X, X[::3], NOISE).posterior(y))(X[:, 0])
    with pytest.raises(ValueError, match="`f` must be the D functions of a GP-LVM"):
        ogp.infer_latents(single, y, NOISE)


def test_principal_components(rng):
    W = rng.normal(size=(2, 5))
    scores = rng.normal(size=(200, 2)) * [3.0, 1.0]
    Y = scores @ W + 7.0
    found = np.asarray(init.pca(Y, 2))
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(found.T @ found / 200, np.eye(2), atol=1e-12)
    rebuilt = found @ np.linalg.lstsq(found, Y - Y.mean(0), rcond=None)[0]
    np.testing.assert_allclose(rebuilt, Y - Y.mean(0), atol=1e-10)  # two components are all there is
    first = np.asarray(init.pca(Y, 3))[:, 2]
    np.testing.assert_array_equal(first, 0)
    holes = np.where(rng.uniform(size=Y.shape) < 0.02, np.nan, Y)
    near = np.asarray(init.pca(holes, 2))
    assert np.isfinite(near).all() and abs(np.corrcoef(near[:, 0], found[:, 0])[0, 1]) > 0.98
    assert init.pca(Y.astype(np.float32), 2).dtype == np.float32
    with pytest.raises(ValueError, match="`dim` must be between 1 and N = 5"):
        init.pca(Y, 6)


def test_pictures(curve, tmp_path):
    _, X, truth = curve
    ax = plots.relevance(np.array([2.0, 0.5, 1.0]))
    assert [bar.get_height() for bar in ax.patches] == [2.0, 1.0, 0.5]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "2", "0"]
    with pytest.raises(ValueError, match="`names` must have one entry per dimension"):
        plots.relevance(np.ones(3), names=["a"])
    two = jax.jit(lambda X, Y: ogp.CollapsedGP(kernels.RBF(0.8), X, X[::2], NOISE, num_outputs=D).posterior(Y))
    points = np.concatenate([X, np.cos(2 * X)], -1)
    g = two(points, truth(X))
    ax = plots.latent_space(g, points, labels=np.arange(N) % 3)
    assert ax.get_xlabel() == "latent dimension 0" and len(ax.get_legend().get_texts()) == 3
    ax.figure.savefig(tmp_path / "latent.png")
    mesh = ax.images[0].get_array()
    assert mesh.min() < 0.3 and mesh.max() > 0.9  # certain at the data, the prior far from it
    left, right, bottom, top = ax.images[0].get_extent()  # edges; values were computed at the middles of cells
    rows, columns = mesh.shape
    x, y = left + (right - left) * (0.5 + 7) / columns, bottom + (top - bottom) * (0.5 + 40) / rows
    at = g(np.asarray([[x, y]]))
    np.testing.assert_allclose(mesh[40, 7], np.sqrt(at.variance).mean(), rtol=1e-6)
    with pytest.raises(ValueError, match="`dims` must be two different dimensions"):
        plots.latent_space(g, points, dims=(0, 0))
    with pytest.raises(ValueError, match="`labels` must have shape"):
        plots.latent_space(g, points, labels=[1])
    plt.close("all")


@pytest.mark.slow
def test_a_likelihood_with_random_nodes(curve):
    """A model's nodes are random. Here the likelihood is made any number of times, and a key for them was refused."""
    f, _, truth = curve
    y = truth(np.array([[0.4]]))

    def noisy(f):
        return likelihoods.Likelihood(f, lambda f: dist.Normal(f, NOISE), integrator=likelihoods.QuasiMonteCarlo(64))

    found = ogp.infer_latents(f, y, noisy, num_samples=8, num_starts=1, num_steps=200)
    np.testing.assert_allclose(found.loc, 0.4, atol=0.1)
    assert 0.005 < float(found.scale[0, 0]) < 0.1  # about NOISE / |slope of the functions|
