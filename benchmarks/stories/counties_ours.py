import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from benchmarks.stories.data import counties
from numpyro_orthgp import init, kernels, likelihoods


def model(X, covariate, region, births, y=None, *, Z):
    level, slope = numpyro.sample("level", dist.Normal(-6, 1)), numpyro.sample("slope", dist.Normal(0, 1))
    spread, scale = (numpyro.sample(name, dist.HalfNormal(0.5)) for name in ("spread", "scale"))
    with numpyro.plate("regions", 12):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    f = ogp.gp("f", scale**2 * kernels.Matern32(numpyro.sample("lengthscale", dist.InverseGamma(3, 3))), Z)
    log_rate = f(X) + level + slope * covariate + spread * effect[region]
    with numpyro.plate("counties", len(X)):
        numpyro.sample("y", likelihoods.Poisson(log_rate, births), obs=y)


data = counties()
Z = init.kmeans(random.PRNGKey(0), data[0], 30)
svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.03), TraceMeanField_ELBO())
result = ogp.fit(svi, random.PRNGKey(1), data, num_steps=3000, progress_bar=False, Z=Z)
found = svi.guide.median(result.params)
print(f"level {found['level']:.2f}, slope {found['slope']:.2f}, spread {found['spread']:.2f}")
