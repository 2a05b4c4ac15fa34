"""Weights of rows by `handlers.scale`, beside dense formulas: a power of the density of y does not make a residual cheaper."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

KEY, N, S = random.PRNGKey(0), 6, 0.3
X = np.linspace(0.0, 0.5, N)[:, None]
Y = np.array([0.3, -0.2, 0.5, 0.1, -0.4, 0.2])
Z = np.array([[0.1], [2.0]])
WEIGHTS = {
    "none": None,
    "one number": 0.2,
    "each row": np.array([0.1, 1.0, 0.5, 1e-3, 0.9, 0.2]),
    "above one": np.array([0.1, 3.0, 0.5, 2.0, 0.9, 1.0]),
}


def rbf(a, b):
    return np.exp(-((a - b.T) ** 2) / 2)


def residual_covariance():
    """K - Q at X, of inducing points Z with the library's jitter."""
    K = rbf(Z, Z) + 1e-10 * np.eye(len(Z))
    return rbf(X, X) - rbf(X, Z) @ np.linalg.solve(K, rbf(Z, X))


def at_the_prior(weights, groups):
    """The bound at q(u) = p(u), from its formula."""
    w = np.broadcast_to(1.0 if weights is None else weights, N)
    D, low = residual_covariance(), np.minimum(w, 1)
    explained = 1 - np.diag(D)
    density = -0.5 * np.log(2 * np.pi * S**2) - (Y**2 + explained) / (2 * S**2)
    scaled = D * np.sqrt(low[:, None] * low) / S**2
    if groups is None:
        charge = np.log1p(np.diag(scaled))
    else:
        blocks = [np.eye(groups) + scaled[i : i + groups, i : i + groups] for i in range(0, N, groups)]
        # Each row has its variance given the rows before it: with weights above one an equal split may give no bound.
        charge = np.concatenate([2 * np.log(np.diag(np.linalg.cholesky(b))) for b in blocks])
    return (w * density).sum() - 0.5 * (charge * w / low).sum()


def weighted_evidence(weights):
    """log of the integral of p(f) prod p(y_n | f_n)^w_n."""
    w = np.broadcast_to(1.0 if weights is None else weights, N)
    noise = S**2 / w
    C = rbf(X, X) + np.diag(noise)
    gauss = -0.5 * (Y @ np.linalg.solve(C, Y) + np.linalg.slogdet(C)[1] + N * np.log(2 * np.pi))
    return gauss + 0.5 * np.sum(np.log(2 * np.pi * noise) - w * np.log(2 * np.pi * S**2))


def bound(model, **options):
    svi = SVI(model, ogp.AutoSparseGP(model, **options), optax.adam(0.01), TraceMeanField_ELBO())
    return -float(svi.evaluate(svi.init(KEY)))


def model_of(weights, make=lambda f: likelihoods.Gaussian(f, S), dtype=np.float64):
    def model():
        f = ogp.gp("f", kernels.RBF(dtype(1.0)), jnp.asarray(Z, dtype))
        with numpyro.plate("data", N):
            with handlers.scale(scale=1.0 if weights is None else jnp.asarray(weights, dtype)):
                numpyro.sample("y", make(f(jnp.asarray(X, dtype))), obs=jnp.asarray(Y, dtype))

    return model


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("groups", [None, 2, 3])
@pytest.mark.parametrize("dtype, rtol", [(np.float64, 1e-8), (np.float32, 2e-5)])
def test_the_bound_is_its_formula_and_below_the_weighted_evidence(weights, groups, dtype, rtol):
    found = bound(model_of(weights, dtype=dtype), residual="tight", group_size=groups)
    np.testing.assert_allclose(found, at_the_prior(weights, groups), rtol=rtol)
    assert found < weighted_evidence(weights)


@pytest.mark.parametrize("weights", [0.05, WEIGHTS["each row"]], ids=["one number", "each row"])
@pytest.mark.parametrize("draws", [False, True])
def test_a_learned_v_costs_the_same_whatever_the_weights(weights, draws):
    """Under StudentT, and of draws: (v - log v - 1)/2 for each row, while the density has its power."""

    def cost(weights, v):
        if draws:

            def model():
                f = ogp.gp("f", kernels.RBF(1.0), jnp.asarray(Z))
                with handlers.scale(scale=1.0 if weights is None else jnp.asarray(weights)):
                    values = f(jnp.asarray(X)).sample()
                    with numpyro.plate("data", N):
                        numpyro.sample("y", dist.Normal(values, S), obs=jnp.asarray(Y))
        else:
            model = model_of(weights, lambda f: likelihoods.StudentT(f, 4.0, S))
        guide = ogp.AutoSparseGP(model, residual="tight")
        svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
        params = svi.get_params(svi.init(KEY)) | {"f_residual_scale": jnp.asarray(v)}
        sites = handlers.trace(handlers.substitute(handlers.seed(guide, KEY), params)).get_trace()
        sites = handlers.trace(handlers.replay(handlers.seed(model, KEY), sites)).get_trace()
        if draws:
            site = sites["f.residual_cost0"]
            return float(np.sum(np.asarray(site["fn"].log_prob(site["value"]) * site["scale"])))
        fn = sites["y"]["fn"]
        return -float(np.sum((1.0 if weights is None else weights) * np.asarray(fn.tightening_cost)))

    expected = -N * (0.25 - np.log(0.25) - 1) / 2
    np.testing.assert_allclose(cost(None, 0.25), expected, rtol=1e-10)
    np.testing.assert_allclose(cost(weights, 0.25), expected, rtol=1e-10)


def test_outputs_of_a_row_share_its_weight():
    w = WEIGHTS["each row"]

    def model():
        f = ogp.gp("f", kernels.RBF(1.0), jnp.asarray(Z), num_latents=2)
        with numpyro.plate("data", N), handlers.scale(scale=jnp.asarray(w)):
            both = jnp.stack([jnp.asarray(Y)] * 2, -1)
            numpyro.sample("y", likelihoods.Gaussian(f(jnp.asarray(X)), S).to_event(1), obs=both)

    np.testing.assert_allclose(bound(model, residual="tight"), 2 * at_the_prior(w, None), rtol=1e-8)


def test_what_scales_the_divergence_too_is_no_weight():
    """A model and its guide in other units of the loss: everything is multiplied, the cost of the residual as well."""

    def scaled(model):
        model = handlers.scale(model, scale=0.1)
        guide = ogp.AutoSparseGP(model, residual="tight")
        svi = SVI(model, handlers.scale(guide, scale=0.1), optax.adam(0.01), TraceMeanField_ELBO())
        return -float(svi.evaluate(svi.init(KEY)))

    np.testing.assert_allclose(scaled(model_of(None)), 0.1 * at_the_prior(None, None), rtol=1e-8)


@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_a_weight_of_the_divergence(beta):
    """In the guide too it is beta KL; in the model alone NumPyro's objectives left it out, or took it for log p alone."""
    m, T = np.array([0.7, -0.4]), np.array([[0.5, 0.0], [0.2, 1.3]])

    def model(of_f=beta):
        with handlers.scale(scale=of_f):
            f = ogp.gp("f", kernels.RBF(1.0), jnp.asarray(Z))
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihoods.Gaussian(f(jnp.asarray(X)), S), obs=jnp.asarray(Y))

    guide, params = ogp.AutoSparseGP(model), {"f.u0_loc": jnp.asarray(m), "f.u0_scale_tril": jnp.asarray(T)}
    handlers.seed(guide, 0)()

    def loss(guide, *args, objective=TraceMeanField_ELBO):
        return objective().loss(KEY, params, model, guide, *args)

    A = np.linalg.solve(np.linalg.cholesky(rbf(Z, Z) + 1e-10 * np.eye(2)), rbf(Z, X))
    mean, variance = A.T @ m, 1 - (A**2).sum(0) + ((T.T @ A) ** 2).sum(0)
    fits = (-0.5 * np.log(2 * np.pi * S**2) - ((Y - mean) ** 2 + variance) / (2 * S**2)).sum()
    divergence = (m @ m + (T**2).sum() - 2 - 2 * np.log(np.diag(T)).sum()) / 2
    scaled = handlers.scale(guide, scale=beta)
    np.testing.assert_allclose(loss(scaled), beta * divergence - fits, rtol=1e-8)
    np.testing.assert_allclose(loss(scaled, 1.0), beta * divergence - fits, rtol=1e-8)  # in the guide alone
    np.testing.assert_allclose(loss(guide, 1.0), divergence - fits, rtol=1e-8)
    said = rf"`f\.u0` has a scale of {beta} in the model and {{}} in the guide.*handlers\.scale\(guide"
    for objective in (TraceMeanField_ELBO, Trace_ELBO):
        with pytest.raises(ValueError, match=said.format("none")):
            loss(guide, objective=objective)
    with pytest.raises(ValueError, match=said.format("one of 0.5")):
        loss(handlers.scale(guide, scale=0.5))
    assert ogp.posterior(model, guide, params)["f"](jnp.asarray(X)).mean == pytest.approx(mean, rel=1e-8)


def test_weights_of_the_divergence_that_are_traced():
    def model(beta):
        with handlers.scale(scale=beta):
            v = ogp.orthogonal("f", jnp.asarray(Z))
        numpyro.sample(
            "y", ogp.CollapsedGP(kernels.RBF(1.0), X, [X[::3], jnp.asarray(Z)], S, orthogonal=v), obs=jnp.asarray(Y)
        )

    guide = ogp.AutoSparseGP(model)

    def loss(guide, beta):
        svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
        return jax.jit(lambda beta: svi.evaluate(svi.init(KEY, beta), beta))(beta)

    def scaled(beta):
        with handlers.scale(scale=beta):
            return guide(beta)

    assert np.isfinite(loss(scaled, 0.5))
    with pytest.raises(ValueError, match=r"`f\.u1` has a scale in the model and none in the guide"):
        loss(guide, 0.5)


def test_weights_of_a_minibatch():
    """Batches in a plate that stands for all rows average to the bound of all rows."""
    w = WEIGHTS["each row"]

    def model(rows):
        f = ogp.gp("f", kernels.RBF(1.0), jnp.asarray(Z))
        with numpyro.plate("data", N, subsample_size=2), handlers.scale(scale=jnp.asarray(w)[rows]):
            numpyro.sample("y", likelihoods.Gaussian(f(jnp.asarray(X)[rows]), S), obs=jnp.asarray(Y)[rows])

    svi = SVI(model, ogp.AutoSparseGP(model, residual="tight"), optax.adam(0.01), TraceMeanField_ELBO())
    batches = jnp.arange(N).reshape(3, 2)
    state = svi.init(KEY, batches[0])
    found = -np.mean([svi.evaluate(state, rows) for rows in batches])
    np.testing.assert_allclose(found, at_the_prior(w, None), rtol=1e-8)


@pytest.mark.parametrize(
    "make",
    [
        lambda f: likelihoods.LogNormal(f, S),
        lambda f: likelihoods.Transformed(likelihoods.Gaussian(f, S), dist.transforms.ExpTransform()),
    ],
    ids=["LogNormal", "Transformed"],
)
def test_logarithms_are_charged_as_their_gaussian_is(make):
    w = WEIGHTS["each row"]

    def model():
        f = ogp.gp("f", kernels.RBF(1.0), jnp.asarray(Z))
        with numpyro.plate("data", N), handlers.scale(scale=jnp.asarray(w)):
            numpyro.sample("y", make(f(jnp.asarray(X))), obs=jnp.exp(jnp.asarray(Y)))

    np.testing.assert_allclose(bound(model, residual="tight"), at_the_prior(w, None) - w @ Y, rtol=1e-8)


# ---------------------------------------------------------------- draws before the plate of a minibatch


def pairs_of(where, A, B, y):
    """Differences of f, in minibatches of two rows of eight."""
    f, g = (ogp.gp(name, kernels.RBF(0.8), jnp.array([[-1.0], [1.0]])) for name in "fg")
    plate = numpyro.plate("data", 8, subsample_size=len(A))
    if where == "within":
        with plate:
            numpyro.sample("y", dist.Normal(f(A).sample() - f(B).sample(), S), obs=y)
        return
    if where == "all rows":
        v = f(jnp.linspace(0.0, 1.0, 8)[:, None]).sample()
        with plate as rows:
            numpyro.sample("y", dist.Normal(v[rows], S), obs=y)
        return
    if where == "all rows of another plate":
        with numpyro.plate("others", 5):
            numpyro.sample("z", dist.Normal(f(jnp.linspace(0.0, 1.0, 5)[:, None]).sample(), S), obs=jnp.ones(5))
        with plate:
            numpyro.sample("y", likelihoods.Gaussian(f(A), S), obs=y)
        return
    if where == "scale":
        v = f(A).sample()
        with plate, handlers.scale(scale=0.5):
            numpyro.sample("y", likelihoods.Gaussian(g(A), jnp.exp(v)), obs=y)
        return
    if where == "layer":
        deep = ogp.DeepGP([f, g])(A)
    elif where == "at once":
        v = f(jnp.concatenate([A, B])).sample()
    else:
        v = jnp.concatenate([f(A).sample(), f(B).sample()])
    with plate:
        likelihood = likelihoods.Gaussian(deep, S) if where == "layer" else dist.Normal(v[: len(A)] - v[len(A) :], S)
        numpyro.sample("y", likelihood, obs=y)


def loss_of_two_rows(where, **options):
    A, B, y = jnp.array([[0.0], [0.4]]), jnp.array([[0.2], [0.9]]), jnp.array([0.3, -0.2])
    model = partial(pairs_of, where)
    svi = SVI(model, ogp.AutoSparseGP(model, **options), optax.adam(0.1), TraceMeanField_ELBO())
    return svi.evaluate(svi.init(KEY, A, B, y), A, B, y)


@pytest.mark.parametrize("where", ["before", "at once", "layer", "scale"])
def test_tightened_draws_before_the_plate_of_a_minibatch(where):
    """They paid once for each row of the minibatch: the mean loss of minibatches was 34.4, where that of all rows is 42.9."""
    with pytest.raises(
        ValueError, match=r"`f` has a tightened residual and is drawn at [24] inputs outside of the plate.*`y`"
    ):
        loss_of_two_rows(where, residual="tight")
    assert jnp.isfinite(loss_of_two_rows(where, residual={"g": "tight"}))


@pytest.mark.parametrize("where", ["within", "all rows", "all rows of another plate"])
def test_other_tightened_draws_are_weighed(where):
    assert jnp.isfinite(loss_of_two_rows(where, residual="tight"))


# ---------------------------------------------------------------- expectations of one's own


def own(of):
    """A model whose density is ``of`` of marginals of f and outputs near zero."""

    def model():
        f = ogp.gp("f", kernels.RBF(1.0), jnp.asarray(Z))
        numpyro.factor("y", jnp.sum(of(f(jnp.asarray(X)), jnp.asarray(Y / 10))))

    return model


def formula(m, y):
    return dist.Normal(m.mean, S).log_prob(y) - m.variance / (2 * S**2)


OF_ONES_OWN = {
    "formula": formula,
    "expected_log_density": lambda m, y: likelihoods.Gaussian(m, S).expected_log_density(y),
    "of Student's t": lambda m, y: 0.01 * likelihoods.StudentT(m, 4.0, S).expected_log_density(y),
    "nodes": lambda m, y: dist.Normal(m.at(random.normal(numpyro.prng_key(), (4, N))), S).log_prob(y).mean(0),
}
THAT_PAY = {
    "formula": lambda m, y: formula(m, y) - m.tightening_cost,
    "Gaussian": lambda m, y: likelihoods.Gaussian(m, S).log_prob(y),
    "of Student's t": lambda m, y: 1e-4 * likelihoods.StudentT(m, 4.0, 1e-3).log_prob(y),
    "draws": lambda m, y: dist.Normal(m.sample(), S).log_prob(y),
    "draws row by row": lambda m, y: dist.Normal(m.independent().sample(), S).log_prob(y),
}


def loss_of_factor(of, residual):
    model = own(of)
    svi = SVI(model, ogp.AutoSparseGP(model, residual=residual), optax.adam(0.1), TraceMeanField_ELBO())
    return svi.evaluate(svi.init(KEY))


@pytest.mark.parametrize("of", OF_ONES_OWN.values(), ids=OF_ONES_OWN)
def test_expectations_in_a_factor_that_do_not_pay_for_v(of):
    """The residual vanished, and the loss ended at 2.8 where the negative log evidence was 5.1."""
    with pytest.raises(
        ValueError, match=r"`y` takes the marginals of `f`, whose residual is tightened.*tightening_cost"
    ):
        loss_of_factor(of, "tight")
    assert jnp.isfinite(loss_of_factor(of, "prior"))


@pytest.mark.parametrize("of", THAT_PAY.values(), ids=THAT_PAY)
def test_expectations_in_a_factor_that_pay(of):
    assert jnp.isfinite(loss_of_factor(of, "tight"))
