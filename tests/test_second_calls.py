"""Public calls a second time, with other numbers of the same shapes: they compile nothing that the first call has compiled.

Programs are counted as JAX's monitoring reports them. Of the first call there is a bound, rounded up, since versions of JAX differ.
"""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 2))
Y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=60)
Z = X[:7]
COUNTS = rng.poisson(2.0, 12)


def model(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = ogp.gp("f", kernels.Matern32(lengthscale), Z)
    with numpyro.plate("data", 60, subsample_size=len(X)):
        numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), numpyro.param("noise", 0.3)), obs=y)


def inference():
    return SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())


def fit(data=(X, Y), **options):
    svi = inference()
    return svi, ogp.fit(svi, key(), data, num_steps=3, progress_bar=False, **options)


def key():
    return jax.random.PRNGKey(int(rng.integers(2**31)))


def inputs(num=12):
    return rng.normal(size=(num, 2))


def some():
    """A number that differs from call to call."""
    return float(rng.uniform(0.5, 1.5))


def plain_kernel():
    """A new function at each call. Its numbers are part of a program with a loop."""
    return lambda X1, X2=None: kernels.RBF(0.7)(X1, X2)


def own_noise():
    """A new function at each call, and other noise."""
    noise = jax.numpy.asarray(some())
    return lambda f: ogp.likelihoods.StudentT(f, 4.0, noise)


def counts_given(made):
    return ogp.likelihoods.Poisson(made["f"](inputs()), some())


def collapsed(**options):
    return ogp.CollapsedGP(kernels.RBF(some()), X, Z, some(), **options)


def one_call(data):
    return ogp.regression(*data, M=8, num_steps=3, time=60.0)


def table():
    X = rng.normal(size=(60, 3))
    return X, X[:, 0] + 0.1 * rng.normal(size=60)


@pytest.fixture(scope="module")
def made():
    """What the calls start from."""
    svi, result = fit()
    f = ogp.posterior(model, svi.guide, result.params, X)["f"]
    many = ogp.CollapsedGP(kernels.RBF(0.8), X, Z, 0.1, num_outputs=3).posterior(rng.normal(size=(60, 3)))
    of_terms = ogp.CollapsedGP(kernels.RBF(0.8) + kernels.Matern32(2.0), X, Z, 0.1).posterior(Y)
    guide, params = svi.guide, result.params
    kept = {"svi": svi, "state": result.state}
    return kept | {
        "f": f,
        "many": many,
        "of_terms": of_terms,
        "guide": guide,
        "params": params,
        "table": one_call(table()),
    }


# What is called, and at most how many programs the first call compiles in a process that has compiled none.
CALLS = {
    "svi.init": (lambda m: inference().init(key(), X, Y), 35),
    "svi.evaluate": (lambda m: m["svi"].evaluate(m["state"], X, Y), 55),
    "fit": (lambda m: fit(), 25),
    "fit, batches": (lambda m: fit(batch_size=20), 25),
    "fit_lbfgs": (lambda m: ogp.fit_lbfgs(inference(), key(), (X, Y), num_steps=2, restarts=0), 35),
    "posterior": (lambda m: ogp.posterior(model, m["guide"], m["params"], X), 40),
    "f(X)": (lambda m: m["f"](inputs()).variance, 5),
    "f.joint(X)": (lambda m: m["f"].joint(inputs()).covariance_matrix, 10),
    "f.diagonalized()": (lambda m: m["f"].diagonalized()(inputs()), 15),
    "y's mean, variance": (lambda m: [getattr(counts_given(m), name) for name in ("mean", "variance")], 12),
    "y's densities": (lambda m: [getattr(counts_given(m), n)(COUNTS) for n in ("log_prob", "log_predictive")], 20),
    "f.sample_paths": (lambda m: m["f"].sample_paths(key(), 2)(inputs()), 10),
    "f.term": (lambda m: m["of_terms"].term(0)(inputs()), 5),
    "variance_shares": (lambda m: ogp.variance_shares(m["of_terms"], inputs()), 20),
    "with_neighbors": (lambda m: ogp.with_neighbors(m["f"], X, Y, some(), num_neighbors=4)(inputs()), 20),
    "CollapsedGP.log_prob": (lambda m: collapsed().log_prob(Y), 10),
    "its gradient": (
        lambda m: jax.grad(lambda s: ogp.CollapsedGP(kernels.RBF(s), X, Z, 0.1).log_prob(Y))(some()),
        30,
    ),
    "CollapsedGP.upper_bound": (lambda m: collapsed().upper_bound(Y), 10),
    "CollapsedGP.posterior": (lambda m: collapsed().posterior(Y)(inputs()), 15),
    "infer_latents": (lambda m: ogp.infer_latents(m["many"], rng.normal(size=(4, 3)), some(), num_steps=2), 10),
    "the same, own likelihood": (
        lambda m: ogp.infer_latents(m["many"], rng.normal(size=(4, 3)), own_noise(), num_steps=2),
        15,
    ),
    "online.condition": (lambda m: ogp.online.condition(m["f"], inputs(5), rng.normal(size=5), some()), 10),
    "the same, own noise": (lambda m: ogp.online.condition(m["f"], inputs(5), rng.normal(size=5), own_noise()), 10),
    "online.compress": (lambda m: ogp.online.compress(m["f"], inputs(5)), 5),
    "online.divergences": (lambda m: ogp.online.divergences(m["f"]), 5),
    "online.drop_sets": (lambda m: ogp.online.drop_sets(m["f"]), 5),
    "online.start_from": (lambda m: ogp.online.start_from("f", m["f"]), 10),
    "online.from_blocks": (lambda m: ogp.online.from_blocks(kernels.RBF(some()), Z, some(), [(X, Y)]), 20),
    "check": (lambda m: ogp.check(model, m["guide"], m["params"], X, Y, num_samples=30, rng_key=key()), 50),
    "khat": (lambda m: ogp.khat(model, m["guide"], m["params"], X, Y, num_samples=30, rng_key=key()), 25),
    "guide.quantiles": (lambda m: m["guide"].quantiles(m["params"], [0.1, 0.9]), 25),
    "init.kmeans": (lambda m: ogp.init.kmeans(key(), X, 5), 10),
    "init.greedy_variance": (lambda m: ogp.init.greedy_variance(kernels.RBF(some()), X, 5), 15),
    "the same, own kernel": (lambda m: ogp.init.greedy_variance(plain_kernel(), inputs(30), 5), 20),
    "init.median_lengthscale": (lambda m: ogp.init.median_lengthscale(X, rng_key=key()), 10),
    "init.pca": (lambda m: ogp.init.pca(rng.normal(size=(20, 4)), 2), 10),
    "regression": (lambda m: one_call(table()), 50),
    "its predict": (lambda m: m["table"].predict(rng.normal(size=(9, 3))), 10),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_compiles_nothing(name, made, compilations):
    call, most = CALLS[name]
    call(made)
    first = len(compilations)
    compilations.clear()
    jax.block_until_ready(call(made))
    assert not compilations
    assert first <= most
