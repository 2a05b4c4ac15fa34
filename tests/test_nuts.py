"""NUTS: over whitened inducing variables, hyperparameters and inducing inputs, against a dense GP without inducing points."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from tests import oracles


def hyperparameters():
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.4))
    scale = numpyro.sample("scale", dist.LogNormal(0.7, 0.4))
    return scale**2 * kernels.RBF(lengthscale)


def sparse(X, y, *, sets):
    f = ogp.gp("f", hyperparameters(), sets)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Bernoulli(f(X)), obs=y)


def dense(X, y):
    """The same classifier without inducing points: f = L z at the data, z ~ N(0, I)."""
    K = hyperparameters()(X, X) + 1e-6 * jnp.eye(len(X))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([len(X)]).to_event(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.BernoulliLogits(jnp.linalg.cholesky(K) @ z), obs=y)


def sample(model, *args, num_warmup, num_samples, num_chains=2, **kwargs):
    kernel = NUTS(model, target_accept_prob=0.9)
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, num_chains=num_chains, chain_method="sequential",
                progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.PRNGKey(0), *args, **kwargs)
    draws = {k: np.log(v) for k, v in mcmc.get_samples(group_by_chain=True).items() if k in ("lengthscale", "scale")}
    return summary(draws, prob=0.9)


@pytest.fixture(scope="module")
def labels():
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-3, 3, 200))[:, None]
    f = 3 * np.sin(1.7 * X[:, 0])
    return jnp.asarray(X), jnp.asarray((rng.uniform(size=200) < 1 / (1 + np.exp(-f))).astype(float))


@pytest.fixture(scope="module")
def reference(labels):
    return sample(dense, *labels, num_warmup=400, num_samples=1000)


@pytest.mark.slow
@pytest.mark.parametrize("num", [(14,), (8, 6)], ids=["one set", "two sets"])
def test_hyperparameters_agree_with_a_dense_gp(labels, reference, num):
    Z = jnp.linspace(-3.2, 3.2, sum(num))[:, None]
    # Two sets: every other point, then those between.
    sets = [Z] if len(num) == 1 else [jnp.concatenate([Z[::2], Z[-1:]]), Z[1:-1:2]]
    assert tuple(len(s) for s in sets) == num
    ours = sample(sparse, *labels, sets=sets, num_warmup=400, num_samples=2000)
    for name in ("lengthscale", "scale"):
        a, b = ours[name], reference[name]
        assert a["r_hat"] < 1.01 and b["r_hat"] < 1.01, (name, a, b)
        error = np.hypot(a["std"] / np.sqrt(a["n_eff"]), b["std"] / np.sqrt(b["n_eff"]))
        assert error < 0.03
        assert abs(a["mean"] - b["mean"]) < 4 * error, (name, a, b)
        assert abs(a["std"] / b["std"] - 1) < 0.15
        print(
            f"{name}: log mean {a['mean']:.3f} against {b['mean']:.3f}, Monte Carlo error {error:.3f}, R-hat {a['r_hat']:.4f}"
        )


@pytest.mark.slow
def test_sampled_inducing_inputs(rng):
    """Hensman et al. 2015: inducing inputs with a prior, sampled with everything else."""
    X = jnp.asarray(rng.uniform(-2, 2, (30, 1)))
    y = jnp.asarray(np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=30))

    def model(X, y):
        Z = numpyro.sample("Z", dist.Uniform(-2.5, 2.5).expand([6, 1]).to_event(2))
        f = ogp.gp("f", kernels.RBF(0.7), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=150, num_samples=150, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0), X, y)
    Z, u = mcmc.get_samples()["Z"], mcmc.get_samples()["f.u0"]
    assert Z.shape == (150, 6, 1) and np.asarray(Z).std(0).max() > 0.05

    @jax.jit
    def mean(Z, u):
        def at(Z, u):
            with numpyro.handlers.block(), numpyro.handlers.condition(data={"f.u0": u}):
                return ogp.gp("f", kernels.RBF(0.7), Z)(X).mean

        return jax.vmap(at)(Z, u).mean(0)

    exact, _ = oracles.exact_predict(oracles.rbf(1.0, 0.7), np.asarray(X), np.asarray(y), 0.01, np.asarray(X))
    assert np.sqrt(np.mean((mean(Z, u) - exact) ** 2)) < 0.1
