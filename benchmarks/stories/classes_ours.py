import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from benchmarks.stories.data import classes
from numpyro_orthgp import init, kernels, likelihoods


def model(X, y=None, *, N, Z):
    lengthscale = numpyro.param("lengthscale", jnp.ones(2), constraint=constraints.softplus_positive)
    variance = numpyro.param("variance", 1.0, constraint=constraints.softplus_positive)
    f = ogp.gp("f", variance * kernels.RBF(lengthscale), numpyro.param("Z", Z))
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Bernoulli(f(X) + numpyro.param("mean", 0.0), link="probit"), obs=y)


X, y, X_test, y_test = classes()
Z = init.kmeans(random.PRNGKey(0), X, 30)
svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.02), TraceMeanField_ELBO())
options = {"batch_size": 128, "num_steps": 1000, "progress_bar": False}
result = ogp.fit(svi, random.PRNGKey(1), (X, y), **options, N=len(X), Z=Z)
print(f"accuracy {np.mean((result.predict(X_test, N=len(X_test))['y'].mean > 0.5) == y_test):.2f}")
