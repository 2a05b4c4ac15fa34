"""What a user's script sees of the package's types: clean under ``mypy --strict`` and pyright (``make types``). It is not run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

X: jax.Array = jnp.linspace(0.0, 1.0, 50)[:, None]
y: jax.Array = jnp.sin(6 * X[:, 0])


def model(X: jax.Array, y: jax.Array | None = None) -> None:
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    kernel = variance * kernels.Matern52(0.3).on(0) + 0.1
    f = ogp.gp("f", kernel, [X[::10], X[5::10]])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X) + 1.0, 0.1), obs=y)


class Exponential(kernels.Kernel):
    """A kernel of a user's own."""

    scale: float = kernels.hyperparameter()

    def matrix(self, X1: jax.Array, X2: jax.Array) -> jax.Array:
        return jnp.exp(-jnp.abs(X1 - X2.T) / self.scale)

    def diagonal(self, X: jax.Array) -> jax.Array:
        return jnp.ones(X.shape[:-1])


guide: ogp.AutoSparseGP = ogp.AutoSparseGP(model, residual="tight")
optimizer = ogp.natural_gradient(optax.adam(1e-2), 0.1)
svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
result = ogp.fit(svi, jax.random.PRNGKey(0), (X, y), num_steps=10)
f: ogp.GPFunction = ogp.posterior(model, guide, result.params, X, y)["f"]
marginals: ogp.Marginals = f(X)
mean: jax.Array = marginals.mean
spread: jax.Array = jnp.sqrt(marginals.variance)
quantiles: dict[str, jax.Array] = guide.quantiles(result.params, [0.05, 0.95])
report: str = str(ogp.check(model, guide, result.params, X, y))
bound: jax.Array = ogp.CollapsedGP(Exponential(0.3), X, X[::10], 0.1).log_prob(y)
fitted = ogp.regression(X, y)
