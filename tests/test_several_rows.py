"""Functions of users that make the distribution of one row depend on f at several rows, where a likelihood takes row by row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp.math.interactions import bits, not_additive

KEY = jax.random.PRNGKey(0)
X = jnp.linspace(0.0, 5.0, 7)[:, None]
Y = jnp.sin(X[:, 0])

SEVERAL = {
    "a running sum": lambda f: dist.Normal(jnp.cumsum(f, -1), 0.3),
    "the distance from a mean": lambda f: dist.Normal(f - f.mean(-1, keepdims=True), 0.3),
    "the row before": lambda f: dist.Normal(f + jnp.roll(f, 1, -1), 0.3),
    "noise of another row": lambda f: dist.Normal(f, jnp.exp(f[..., ::-1])),
    "order": lambda f: dist.Normal(jnp.sort(f, -1), 0.3),
    "shares": lambda f: dist.Poisson(10 * jax.nn.softmax(f, -1)),
    "a mixture": lambda f: dist.MixtureSameFamily(
        dist.Categorical(logits=jnp.zeros(2)), dist.Normal(jnp.stack([f, f[..., :1] + 0 * f], -1), 0.3)
    ),
}
OF_TWO = {
    "several rows of one of two functions": lambda f: dist.Normal(f[..., 0], jnp.exp(jnp.cumsum(f[..., 1], -1))),
}
ONE = {
    "rows": lambda f: dist.Normal(jnp.tanh(f), 0.3),
    "another order": lambda f: dist.Normal(f[..., jnp.array([2, 0, 1, 6, 5, 4, 3])], 0.3),
    "an offset for each row": lambda f: dist.Normal(f + jnp.cumsum(X[:, 0]), 0.3),
    "counts": lambda f: dist.ZeroInflatedPoisson(0.2, jnp.exp(f)),
    "a bounded support": lambda f: dist.Beta(jnp.exp(f), 2.0),
    "no support that is known": lambda f: dist.ImproperUniform(dist.constraints.real, f.shape, ()),
}
ONE_OF_TWO = {
    "classes": lambda f: dist.Categorical(logits=f),
    "noise": lambda f: dist.Normal(f[..., 0], jnp.exp(f[..., 1])),
    "each by itself": lambda f: dist.Normal(f, 0.3),
}


def model(fn, num_latents=None, y=Y):
    f = ogp.gp("f", kernels.RBF(1.0), X[::2], num_latents=num_latents)
    likelihood = ogp.Likelihood(f(X), fn)
    numpyro.sample("y", likelihood.to_event(len(likelihood.batch_shape)), obs=y)


@pytest.mark.parametrize(
    "of, num_latents", [(of, None) for of in SEVERAL.values()] + [(of, 2) for of in OF_TWO.values()]
)
def test_several_rows_are_refused(of, num_latents):
    """Nodes are those of single rows: the ELBO of distances from a mean was -10.9, and that of draws is -14.4."""
    with pytest.raises(
        ValueError, match=r"`fn` of Likelihood\(f\(X\), fn\) makes the distribution of one row depend on f at several"
    ):
        numpyro.handlers.seed(partial(model, of, num_latents), KEY)()


@pytest.mark.parametrize(
    "of, num_latents", [(of, None) for of in ONE.values()] + [(of, 2) for of in ONE_OF_TWO.values()]
)
def test_one_row_is_not(of, num_latents):
    numpyro.handlers.seed(
        lambda: ogp.Likelihood(ogp.gp("f", kernels.RBF(1.0), X[::2], num_latents=num_latents)(X), of), KEY
    )()


@pytest.mark.parametrize("infer", [
    lambda model: SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO()).run(KEY, 2, progress_bar=False),
    lambda model: ogp.fit(SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO()), KEY, (X,), num_steps=2),
    lambda model: SVI(model, AutoNormal(model), optax.adam(0.1), TraceMeanField_ELBO()).run(KEY, 2, progress_bar=False),
    lambda model: MCMC(NUTS(model), num_warmup=2, num_samples=2, progress_bar=False).run(KEY),
], ids=["svi", "fit", "AutoNormal", "NUTS"])  # fmt: skip
def test_before_any_inference(infer):
    """A parameter of the function is known when the model is first looked at, and not within the compiled steps."""

    def with_parameter(*data):
        scale = numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
        model(lambda f: dist.Normal(jnp.cumsum(f, -1), scale))

    with pytest.raises(ValueError, match="depend on f at several rows"):
        infer(with_parameter)


class Distance(ogp.likelihoods.ExpectedLikelihood):
    """A class of the user's."""

    def __init__(self, marginals, centred):
        self.centred = centred
        super().__init__(marginals)

    def conditional(self, f):
        return dist.Normal(f - f.mean(-1, keepdims=True) if self.centred else f, 0.3)


def test_classes_of_users_are_looked_at_too():
    def of(centred, rows):
        with numpyro.handlers.seed(rng_seed=0):
            return Distance(ogp.gp("f", kernels.RBF(1.0), X[::2])(rows), centred)

    many = jnp.linspace(0.0, 5.0, 5000)[:, None]
    for rows in (X, many):
        assert of(False, rows).batch_shape == (len(rows),)
        with pytest.raises(
            ValueError, match="`conditional` of Distance makes the distribution of one row depend on f at"
        ):
            of(True, rows)


def test_sums_of_functions_of_one_part_each():
    def of(F):
        steps = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
        return not_additive(*(np.array([F(*step)]) for step in steps), eps=1e-16)[0]

    assert not of(lambda a, b: np.exp(a) - b**2 + 7)
    assert of(lambda a, b: np.exp(a) - b**2 + 0.01 * a * b)
    assert not of(lambda a, b: np.nan if a * b else a + b)
    assert [list(bits(n)) for n in (0, 1, 2, 3, 5)] == [[], [], [0], [0, 1], [0, 1, 2]]
