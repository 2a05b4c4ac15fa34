"""Corners of NumPyro: the methods of its guides, Stein mixtures, its optimizers; kernels of others; the table of all of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.contrib.einstein import RBFKernel, SteinVI
from numpyro.infer import SVI, TraceMeanField_ELBO, autoguide
from numpyro.infer.reparam import NeuTraReparam
from scipy import stats

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

DOCS = Path(__file__).parents[1] / "docs"
Z = jnp.linspace(-2.0, 2.0, 4)[:, None]


@pytest.fixture
def table(rng):
    X = rng.uniform(-2, 2, (20, 1))
    return jnp.asarray(X), jnp.asarray(np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=20))


def model(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = ogp.gp("f", kernels.RBF(scale), [Z, Z[:2] + 0.3], num_latents=2)
    with numpyro.plate("data", len(X)):
        x = ogp.latent_inputs("x", len(X), 1)
        numpyro.sample("y", likelihoods.Gaussian(f(x)[..., 0], 0.3), obs=y)


def fitted(guide, table, model=model, optimizer=None, steps=20):
    svi = SVI(model, guide, optimizer or optax.adam(0.02), TraceMeanField_ELBO())
    return svi.run(jax.random.PRNGKey(0), steps, *table, progress_bar=False).params


# ---------------------------------------------------------------- methods of a guide


@pytest.mark.parametrize("hyper", [autoguide.AutoDelta, autoguide.AutoNormal])
@pytest.mark.parametrize("covariance", ["full", ["diagonal", "prior"], ["low_rank", "full"]], ids=str)
def test_quantiles_are_those_of_draws(hyper, covariance, table):
    guide = ogp.AutoSparseGP(model, hyper=hyper, covariance=covariance)
    params = fitted(guide, table)
    p = [0.1, 0.5, 0.9]
    found = guide.quantiles(params, p)
    draws = guide.sample_posterior(jax.random.PRNGKey(1), params, *table, sample_shape=(4000,))
    assert found.keys() == draws.keys() == {"scale", "f.u0", "f.u1", "x"}
    for name, values in found.items():
        assert values.shape == (3, *draws[name].shape[1:])
        np.testing.assert_allclose(values, np.quantile(draws[name], p, axis=0), atol=0.12)
    for name, median in guide.median(params).items():
        np.testing.assert_allclose(found[name][1], median, rtol=1e-6, atol=1e-9)
    if hyper is autoguide.AutoDelta:
        assert (found["scale"] == params["scale_auto_loc"]).all()


def test_quantiles_of_a_known_gaussian(table):
    def one(X, y=None):
        f = ogp.gp("f", kernels.RBF(1.0), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)

    guide = ogp.AutoSparseGP(one)
    fitted(guide, table, one, steps=1)
    T = np.tril(np.arange(16.0).reshape(4, 4)) / 10 + np.eye(4)
    params = {"f.u0_loc": jnp.arange(4.0), "f.u0_scale_tril": jnp.asarray(T)}
    expected = stats.norm.ppf([[0.05], [0.8]], np.arange(4.0), np.sqrt(np.diag(T @ T.T)))
    np.testing.assert_allclose(guide.quantiles(params, [0.05, 0.8])["f.u0"], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="`quantiles` must be probabilities between 0 and 1; got"):
        guide.quantiles(params, [5, 95])
    with pytest.raises(ValueError, match=r"it lacks 'f.u0_scale_tril'"):
        guide.quantiles({"f.u0_loc": jnp.arange(4.0)}, [0.5])


def test_what_a_guide_does_not_know(table):
    guide = ogp.AutoSparseGP(model, hyper=autoguide.AutoIAFNormal)
    with pytest.raises(RuntimeError, match="has not seen its model yet"):
        guide.quantiles({}, [0.5])
    params = fitted(ogp.AutoSparseGP(model), table)
    known = ogp.AutoSparseGP(model)
    fitted(known, table, steps=1)
    for method, arguments in {"get_posterior": (params,), "get_transform": (params,), "get_base_dist": ()}.items():
        with pytest.raises(NotImplementedError, match=f"{method} is for guides of one joint distribution"):
            getattr(known, method)(*arguments)
    with pytest.raises((TypeError, NotImplementedError), match="AutoContinuous"):
        NeuTraReparam(known, params)


def test_quantiles_of_a_flow_are_taken_from_draws(table):
    def two(X, y=None):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        f = ogp.gp("f", kernels.RBF(1.0), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X) + a + b, 0.3), obs=y)

    guide = ogp.AutoSparseGP(two, hyper=autoguide.AutoIAFNormal)
    params = fitted(guide, table, two, steps=1)
    for method, arguments in {"quantiles": ([0.5],), "median": ()}.items():
        with pytest.raises(NotImplementedError, match=f"AutoIAFNormal, the guide of 'a', 'b', knows no {method}"):
            getattr(guide, method)(params, *arguments)


# ---------------------------------------------------------------- Stein mixtures, optimizers


def test_SteinVI_is_refused_for_a_fault_of_its_own(table):
    """NumPyro scores the mixture with parameters that went through their constraints twice."""

    def scale(y):
        numpyro.sample("y", dist.Normal(0.0, numpyro.sample("s", dist.LogNormal(0.0, 1.0))), obs=y)

    stein = SteinVI(scale, autoguide.AutoNormal(scale), numpyro.optim.Adagrad(0.1), RBFKernel(), num_stein_particles=3)
    state = stein.init(jax.random.PRNGKey(0), table[1])
    stored = stein.optim.get_params(state.optim_state)
    once = stein.constrain_fn(stored)["s_auto_scale"]
    scored = stein.constrain_fn(stein.particle_transform_fn(stored))["s_auto_scale"]
    np.testing.assert_allclose(once, 0.1, rtol=1e-5)
    assert (scored > 0.5).all(), "NumPyro has mended this: let our guides take part again"

    guide = ogp.AutoSparseGP(model, hyper=autoguide.AutoNormal)
    stein = SteinVI(model, guide, numpyro.optim.Adagrad(0.1), RBFKernel(), num_stein_particles=3)
    with pytest.raises(ValueError, match="SteinVI cannot be right with guides of numpyro_orthgp"):
        stein.init(jax.random.PRNGKey(0), *table)


def gp_with_points(X, y=None):
    scale = numpyro.param("scale", jnp.asarray(0.5), constraint=dist.constraints.positive)
    f = ogp.gp("f", kernels.RBF(scale), [Z, ogp.MeanOnly(Z + 0.2)])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)


def test_natural_gradients_around_optimizers_of_numpyro(table):
    def run(others, mean_only):
        guide = ogp.AutoSparseGP(gp_with_points, natural=True)
        return fitted(guide, table, gp_with_points, ogp.natural_gradient(others, 0.5, mean_only=mean_only))

    expected = run(optax.adam(0.01), optax.sgd(0.001))
    for others in (numpyro.optim.Adam(0.01), numpyro.optim.optax_to_numpyro(optax.adam(0.01))):
        got = run(others, numpyro.optim.SGD(0.001))
        assert got.keys() == expected.keys()
        for name, value in got.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "others, match",
    [
        (numpyro.optim.Minimize(), "`others` must step along a gradient; numpyro.optim.Minimize calls the loss itself"),
        (0.01, "`others` must be an optimizer of optax or of numpyro.optim, such as optax.adam.*got float"),
    ],
)
def test_optimizers_that_are_refused(others, match):
    with pytest.raises(TypeError, match=match):
        ogp.natural_gradient(others, 0.1)


# ---------------------------------------------------------------- kernels of others


def test_tinygp_on_the_left():
    tinygp = pytest.importorskip("tinygp")
    X = jnp.linspace(0.0, 1.0, 5)[:, None]
    theirs, ours = tinygp.kernels.ExpSquared(0.7), 0.5 * kernels.Matern32(0.4).named("rough")
    A, B = np.asarray(theirs(X, X)), np.asarray(ours(X, X))
    made: dict[str, tuple[Any, Any]] = {
        "sum": (theirs + ours, A + B),
        "product": (theirs * ours, A * B),
        "sum of a list": (sum([theirs, ours]), A + B),
        "with numbers": (2.0 * theirs + ours, 2 * A + B),
        "number of a sum": ((theirs + ours) * 3.0, 3 * (A + B)),
        "nested": (theirs * (theirs + ours) + ours, A * (A + B) + B),
        "ours on the left": (ours + theirs, A + B),
    }
    for name, (kernel, expected) in made.items():
        np.testing.assert_allclose(kernel(X, X), expected, rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(kernel(X), np.diag(expected), rtol=1e-12, err_msg=name)
        with numpyro.handlers.seed(rng_seed=0):
            f = ogp.gp("f", kernel, X[::2])
        np.testing.assert_allclose(f.kernel(X, X), expected, rtol=1e-12, err_msg=name)
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", theirs + ours, X[::2])
        several = ogp.gp("g", theirs + kernels.RBF(jnp.ones((3, 1))), X[::2])
    assert isinstance(f.kernel, kernels.Kernel) and f.term("rough")(X).shape == (5,)
    assert several.num_latents == 3

    def total(scale):
        return (theirs + kernels.RBF(scale))(X, X).sum()

    np.testing.assert_allclose(jax.grad(total)(0.4), jax.grad(lambda s: kernels.RBF(s)(X, X).sum())(0.4), rtol=1e-10)


def test_a_network_of_equinox_within_a_kernel(table):
    eqx = pytest.importorskip("equinox")
    X, y = table

    class Deep(kernels.Kernel):
        net: Any
        base: Any

        def matrix(self, X1, X2):
            return self.base(jax.vmap(self.net)(X1), jax.vmap(self.net)(X2))

        def diagonal(self, X):
            return self.base(jax.vmap(self.net)(X))

    shift = jnp.asarray(0.3)
    net = eqx.nn.MLP(1, 2, 4, 1, activation=lambda x: jnp.tanh(x + shift), key=jax.random.PRNGKey(0))
    for network in (net, eqx.nn.MLP(1, 2, 4, 1, key=jax.random.PRNGKey(0))):
        kernel = Deep(network, kernels.RBF(0.8))
        expected = kernel(X, X)
        np.testing.assert_allclose(jax.jit(lambda k: k(X, X))(kernel), expected, rtol=1e-10)
        slopes = jax.grad(lambda k: k(X, X).sum())(kernel)
        h = 1e-6
        moved = jax.tree.map(lambda p, g, h=h: p + h * g, kernel, slopes)
        rise = (moved(X, X).sum() - expected.sum()) / h
        np.testing.assert_allclose(rise, sum(jnp.sum(g**2) for g in jax.tree.leaves(slopes)), rtol=1e-3)
        leaves, tree = jax.tree.flatten(kernel)
        assert all(isinstance(leaf, jax.Array | float) for leaf in leaves)
        assert tree == jax.tree.structure(Deep(network, kernels.RBF(0.2)))
        assert jax.tree.map(lambda _: object(), kernel) is not None  # placeholders travel too

    def deep(X, y=None):
        f = ogp.gp("f", Deep(net, kernels.RBF(0.8)), X[::4])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)

    guide = ogp.AutoSparseGP(deep)
    params = ogp.fit(
        SVI(deep, guide, optax.adam(0.01), TraceMeanField_ELBO()), jax.random.PRNGKey(0), (X, y), num_steps=3
    ).params
    f = jax.jit(lambda p: ogp.posterior(deep, guide, p, X, y)["f"])(params)
    assert jax.jit(lambda f: f(X).mean)(f).shape == (20,)


# ---------------------------------------------------------------- the table of the docs

QUICK = (
    "`SVI`, `Trace_ELBO`", "`SVI`, `RenyiELBO`", "`SteinVI`", "`HMCGibbs`", "`plate` within `plate`", "`gp` within `plate`",
    "`scope`", "`lift`", "`condition`", "`mutable`",
)  # fmt: skip


@pytest.fixture(scope="module")
def corners():
    pytest.importorskip("funsor")
    sys.path.insert(0, str(DOCS))
    try:
        import corners
    finally:
        sys.path.remove(str(DOCS))
    return corners


def written() -> dict[tuple[str, str], str]:
    rows, section = {}, ""
    for line in (DOCS / "guide" / "corners.md").read_text().splitlines():
        if line.startswith("### "):
            section = line[4:]
        elif line.startswith("| `"):
            name, outcome = line.strip("| ").split(" | ", 1)
            rows[section, name] = outcome
    return rows


def test_the_table_has_every_row(corners):
    assert set(written()) == {(section, name) for section, rows in corners.ROWS.items() for name in rows}


@pytest.mark.parametrize("name", QUICK)
def test_quick_rows_of_the_table(corners, name):
    for section, rows in corners.ROWS.items():
        if name in rows:
            assert corners.outcome(rows[name]) == written()[section, name]


@pytest.mark.slow
def test_all_rows_of_the_table(corners):
    # Up to the first digits: sizes in words of NumPyro's may differ between versions, kinds may not.
    kinds = {key: value.partition(":")[0] for key, value in written().items()}
    got = {(s, n): corners.outcome(f).partition(":")[0] for s, rows in corners.ROWS.items() for n, f in rows.items()}
    assert got == kinds
