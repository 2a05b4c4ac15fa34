"""`check` says what the loss lacks of the cost of tightened residuals under a guide by hand, as `AutoSparseGP` refuses it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.guides.weights import unpaid

N, NOISE = 8, 0.4
X = jnp.linspace(0.0, 5.0, N)[:, None]
Z = jnp.array([[1.0], [4.0]])
Y = jnp.sin(X[:, 0])
ONES = jnp.ones(N, int)


def before_the_plate(f):
    v = f(X[: N // 2]).sample()
    with numpyro.plate("data", N, subsample_size=N // 2):
        numpyro.sample("y", dist.Normal(v, NOISE), obs=Y[: N // 2])


def within_the_plate(f):
    with numpyro.plate("data", N, subsample_size=N // 2):
        numpyro.sample("y", dist.Normal(f(X[: N // 2]).sample(), NOISE), obs=Y[: N // 2])


def an_expectation(f):
    numpyro.factor("z", likelihoods.Poisson(f(X)).expected_log_density(ONES).sum())
    observed(f)


def a_density(f):
    numpyro.factor("z", likelihoods.Poisson(f(X)).log_prob(ONES).sum())
    observed(f)


def observed(f):
    with numpyro.plate("data", N):
        numpyro.sample("y", likelihoods.Poisson(f(X)), obs=ONES)


UNPAID = {
    "f` has a tightened residual and is drawn at 4": before_the_plate,
    "`z` takes the marginals of `f`": an_expectation,
}
PAID = [within_the_plate, a_density, observed]


def model(see):
    see(ogp.gp("f", kernels.RBF(1.2), Z))


def by_hand(residual):
    ogp.gp_posterior("f", len(Z), residual=residual)


@pytest.mark.parametrize("words", UNPAID)
def test_what_is_not_paid_is_said_in_the_words_of_the_refusal(words):
    program = partial(model, UNPAID[words])
    with pytest.raises(ValueError, match=words) as error:
        guide = ogp.AutoSparseGP(program, residual="tight")
        SVI(program, guide, optax.sgd(0.0), TraceMeanField_ELBO()).init(random.PRNGKey(0))
    said = unpaid(program, (), {}, ["f"])
    assert said == str(error.value) and words in said


@pytest.mark.parametrize("see", PAID)
def test_what_is_paid_is_not(see):
    assert unpaid(partial(model, see), (), {}, ["f"]) is None


def test_the_page_says_it():
    program = partial(model, an_expectation)
    svi = SVI(program, partial(by_hand, "tight"), optax.sgd(0.0), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(random.PRNGKey(0)))
    assert (
        "`z` takes the marginals of `f`"
        in ogp.check(program, partial(by_hand, "tight"), params, num_samples=25).advice[0]
    )
    assert ogp.check(program, partial(by_hand, "prior"), params, num_samples=25).unpaid is None


def test_the_loss_is_no_bound():
    """What is said: the draw before the plate pays for half of the rows, so at a small v the ELBO is above log p(y)."""

    def elbo(see):
        program, guide = partial(model, see), partial(by_hand, "tight")
        params = {"f.u0_loc": jnp.zeros(2), "f.u0_scale_tril": jnp.eye(2), "f_residual_scale": jnp.asarray(0.3)}
        loss = lambda key: TraceMeanField_ELBO().loss(key, params, program, guide)  # noqa: E731
        draws = -jax.jit(lambda keys: lax.map(loss, keys))(random.split(random.PRNGKey(0), 4000))
        return draws.mean(), draws.var() / len(draws)

    cost = N // 2 * (0.3 - np.log(0.3) - 1) / 2  # of the rows that a minibatch has
    (before, error), (within, other) = elbo(before_the_plate), elbo(within_the_plate)
    assert before - within == pytest.approx(cost, abs=4 * float(jnp.sqrt(error + other)))
