"""Likelihoods of y that see sums over areas, beside quadrature of the joint law of f at the nodes of an area."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO
from scipy import stats
from scipy.special import expit, logsumexp, ndtr

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp import likelihoods as L
from tests import oracles, problems

KEY = jax.random.PRNGKey(0)
VARIANCE, LENGTHSCALE, NOISE = 0.7, 0.8, 0.3
X = np.linspace(-2.0, 2.0, 9)[:, None]
B, Q = 4, 3
NODES = np.random.default_rng(5).uniform(-2.6, 2.6, (B, Q, 1))
W = np.array([[1.0, 0.4, 2.0], [0.5, 1.5, 0.0], [3.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
COUNTS, TOTALS, K = np.array([0, 3, 9, 2]), np.array([3, 8, 9, 4]), np.array([0.7, 2.0, 5.0, 40.0])
SHARES = W / W.sum(1, keepdims=True)


def softplus(f):
    return np.logaddexp(0, f)


def rate(f, link=np.exp):
    return (W * link(f)).sum(-1)


def log_negative_binomial(f):
    return stats.nbinom.logpmf(COUNTS, K, K / (K + rate(f)))


def log_binomial(f, p=expit):
    return stats.binom.logpmf(COUNTS, TOTALS, (SHARES * p(f)).sum(-1))


# Likelihood of marginals, log p(y | f) for f of shape (..., B, Q), E[y | f].
CASES = {
    "poisson": (partial(L.PoissonOfSum, weights=W), lambda f: stats.poisson.logpmf(COUNTS, rate(f)), rate),
    "softplus": (
        partial(L.PoissonOfSum, weights=W, link="softplus"),
        lambda f: stats.poisson.logpmf(COUNTS, rate(f, softplus)),
        lambda f: rate(f, softplus),
    ),
    "negative binomial": (partial(L.NegativeBinomialOfSum, weights=W, concentration=K), log_negative_binomial, rate),
    "binomial": (
        partial(L.BinomialOfAverage, weights=2 * W, total_count=TOTALS),
        log_binomial,
        lambda f: TOTALS * (SHARES * expit(f)).sum(-1),
    ),
    "probit": (
        partial(L.BinomialOfAverage, weights=W, total_count=TOTALS, link="probit"),
        lambda f: log_binomial(f, ndtr),
        lambda f: TOTALS * (SHARES * ndtr(f)).sum(-1),
    ),
}


@pytest.fixture(scope="module")
def m():
    f = ogp.CollapsedGP(VARIANCE * kernels.RBF(LENGTHSCALE), jnp.asarray(X), jnp.asarray(X), NOISE, jitter=1e-12)
    return f.posterior(jnp.sin(2 * jnp.asarray(X[:, 0])))(jnp.asarray(NODES.reshape(B * Q, 1)))


@pytest.fixture(scope="module")
def law():
    """Of an exact GP: nodes of a rule of Q dimensions at the Q inputs of each area, shape (S, B, Q), and weights (S,)."""
    x, w = np.polynomial.hermite_e.hermegauss(24)
    eps = np.stack(np.meshgrid(*[x] * Q, indexing="ij"), -1).reshape(-1, Q)
    weights = np.prod(np.meshgrid(*[w / w.sum()] * Q, indexing="ij"), axis=0).ravel()
    areas = []
    for nodes in NODES:
        mean, cov = oracles.exact_predict(oracles.rbf(VARIANCE, LENGTHSCALE), X, np.sin(2 * X[:, 0]), NOISE**2, nodes)
        areas.append(mean + eps @ np.linalg.cholesky(cov + 1e-12 * np.eye(Q)).T)
    return np.stack(areas, 1), weights


@pytest.mark.parametrize("name", CASES)
def test_bounds_lie_below_expectations_and_draws_about_them(m, law, name):
    build, log_density, mean = CASES[name]
    f, weights = law
    truth = weights @ log_density(f)
    bound = build(m, by_marginals=True).log_prob(COUNTS)
    assert (bound <= truth + 1e-9).all() and (bound > truth - 1.0).all() and (bound[1:] < truth[1:] - 1e-3).all()
    np.testing.assert_allclose(build(m, integrator=ogp.QuasiMonteCarlo(4096)).log_prob(COUNTS), truth, atol=5e-3)
    np.testing.assert_allclose(build(m).log_prob(COUNTS), truth, atol=0.1)
    np.testing.assert_allclose(build(m).mean, weights @ mean(f), rtol=1e-6)
    predictive = np.log(weights @ np.exp(log_density(f)))
    np.testing.assert_allclose(build(m).log_predictive(COUNTS), predictive, atol=5e-3)


def test_functions_that_are_mixed_take_joint_draws(m, law):
    """Here of one function that is told to be a mixture."""
    build, log_density, _ = CASES["poisson"]
    f, weights = law
    log_p = log_density(f)
    latent = ogp.Marginals(
        m.mean[:, None], m.explained[:, None], m.residual[:, None], joint=lambda *args: m.joint(*args)[..., None]
    )
    mixed = (latent @ jnp.ones((1, 1)))[..., 0]
    num = 4000
    drawn = build(mixed, integrator=ogp.MonteCarlo(num)).log_prob(COUNTS)
    spread = np.sqrt(weights @ (log_p - weights @ log_p) ** 2)
    np.testing.assert_allclose(drawn, weights @ log_p, atol=4 * spread.max() / num**0.5)
    found = build(mixed).log_predictive(COUNTS)
    np.testing.assert_allclose(found, np.log(weights @ np.exp(log_p)), atol=0.15)


def test_the_bound_by_its_formula_and_its_gap(m, law):
    mean, variance = (np.asarray(a).reshape(B, Q) for a in (m.mean, m.variance))
    low, high = (logsumexp(e, axis=1, b=W) for e in (mean, mean + variance / 2))
    log_factorial = np.array([0.0, np.log(6), stats.poisson.logpmf(9, 1) * -1 - 1, np.log(2)])
    np.testing.assert_allclose(
        L.PoissonOfSum(m, W, by_marginals=True).log_prob(COUNTS),
        COUNTS * low - np.exp(high) - log_factorial,
        rtol=1e-10,
    )
    f, weights = law
    gap = weights @ stats.poisson.logpmf(COUNTS, rate(f)) - L.PoissonOfSum(m, W, by_marginals=True).log_prob(COUNTS)
    assert (gap <= COUNTS * (high - low) + 1e-9).all() and abs(gap[0]) < 1e-6  # of a count of zero it is exact
    k = jnp.asarray(K)
    formula = COUNTS * low - (COUNTS + K) * np.log(K + np.exp(high)) + K * np.log(K)
    constant = L.NegativeBinomialOfSum(m, W, k, by_marginals=True).log_prob(COUNTS) - formula
    at_one = stats.nbinom.logpmf(COUNTS, K, K / (K + 1)) + (COUNTS + K) * np.log(K + 1) - K * np.log(K)
    np.testing.assert_allclose(constant, at_one, rtol=1e-9, atol=1e-12)


def test_one_node_is_a_likelihood_of_values(m):
    one, y = jnp.full((B * Q, 1), 1.7), jnp.arange(12)
    for link in ("exp", "softplus"):
        of_sum, plain = L.PoissonOfSum(m, one, link, by_marginals=True), L.Poisson(m, 1.7, link)
        np.testing.assert_allclose(of_sum.log_prob(y), plain.log_prob(y), rtol=1e-9)
        np.testing.assert_allclose(of_sum.mean, plain.mean, rtol=1e-9)
    for link in ("logit", "probit", "cloglog"):
        of_sum, plain = L.BinomialOfAverage(m, one, 12, link, by_marginals=True), L.Binomial(m, 12, link)
        np.testing.assert_allclose(of_sum.log_prob(y), plain.log_prob(y), rtol=1e-5)
    many = L.NegativeBinomialOfSum(m, one, 1e7, by_marginals=True).log_prob(y)
    np.testing.assert_allclose(many, L.Poisson(m, 1.7).log_prob(y), rtol=1e-4)


def test_nodes_of_no_weight_are_as_if_they_were_not_there(m):
    padded = jnp.asarray(W).at[:, 2].set(0.0)
    two = m.mean.reshape(B, Q)[:, :2], m.variance.reshape(B, Q)[:, :2]
    fewer = ogp.Marginals(two[0].ravel(), two[1].ravel(), jnp.zeros(2 * B))
    np.testing.assert_allclose(
        L.PoissonOfSum(m, padded, by_marginals=True).log_prob(COUNTS),
        L.PoissonOfSum(fewer, padded[:, :2], by_marginals=True).log_prob(COUNTS),
        rtol=1e-12,
    )
    gradient = jax.grad(lambda w: L.PoissonOfSum(m, w).log_prob(COUNTS).sum())(padded)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(
        L.PoissonOfSum(m, jnp.ones(Q)).log_prob(COUNTS), L.PoissonOfSum(m, jnp.ones((B, Q))).log_prob(COUNTS)
    )


def test_draws_of_y_and_variances_know_that_nodes_vary_together(m, law):
    f, weights = law
    for name, (build, _, mean) in CASES.items():
        given = mean(f)
        within = {"negative binomial": given + given**2 / K}.get(name, given)
        within = given * (1 - given / TOTALS) if name in ("binomial", "probit") else within
        variance = weights @ (within + (given - weights @ given) ** 2)
        y = build(m).sample(KEY, (20_000,))
        np.testing.assert_allclose(y.mean(0), weights @ given, rtol=0.05)
        np.testing.assert_allclose(y.var(0), variance, rtol=0.12)
        np.testing.assert_allclose(build(m).variance, variance, rtol=0.25)
    apart = m.independent()
    for refused in (
        lambda fn: fn.sample(KEY),
        lambda fn: fn.log_predictive(COUNTS),
        lambda fn: fn.variance,
        lambda fn: fn.log_prob(COUNTS),
    ):
        with pytest.raises(
            ValueError, match=r"needs f at all inputs of an area together.*leave out `.independent\(\)`"
        ):
            refused(L.PoissonOfSum(apart, W))
    found, known = (L.PoissonOfSum(x, W, by_marginals=True).log_prob(COUNTS) for x in (apart, m))
    np.testing.assert_array_equal(found, known)


def test_float32_with_large_counts():
    mean, variance = jnp.linspace(8.0, 9.0, 6), jnp.full(6, 1e-4)
    y, w = np.array([4000, 2500]), np.full((2, 3), 0.4)
    values = []
    for dtype in (jnp.float32, jnp.float64):
        m = ogp.Marginals(mean.astype(dtype), variance.astype(dtype), jnp.zeros(6, dtype))
        of_m = {"by_marginals": True}
        found = [
            L.PoissonOfSum(m, w, **of_m),
            L.NegativeBinomialOfSum(m, w, 9.0, **of_m),
            L.BinomialOfAverage(m - 8.2, w, 5000, **of_m),
        ]
        values.append([fn.log_prob(y) for fn in found])
        assert all(v.dtype == dtype for v in values[-1])
    np.testing.assert_allclose(values[0], values[1], rtol=2e-4)


def test_arithmetic_and_enumerated_offsets(m):
    """An offset of the nodes is one of log rates; of an enumerated site each value has its row."""
    shift = np.linspace(-0.5, 0.5, B * Q)
    np.testing.assert_allclose(
        L.PoissonOfSum(m + shift, W).log_prob(COUNTS),
        L.PoissonOfSum(m, W * np.exp(shift.reshape(B, Q))).log_prob(COUNTS),
        rtol=1e-10,
    )
    pytest.importorskip("funsor")
    levels, probs = np.array([-1.0, 0.5]), np.array([0.3, 0.7])

    def shifted():
        z = numpyro.sample("z", dist.Categorical(jnp.asarray(probs)), infer={"enumerate": "parallel"})
        with numpyro.plate("areas", B):
            of_sum = L.PoissonOfSum(m + jnp.asarray(levels)[z], W, by_marginals=True)
            numpyro.sample("y", of_sum, obs=jnp.asarray(COUNTS))

    from numpyro.contrib.funsor import config_enumerate, enum, log_density, plate_to_enum_plate

    with plate_to_enum_plate():
        found = log_density(enum(config_enumerate(numpyro.handlers.seed(shifted, 0)), -2), (), {}, {})[0]
    each = [L.PoissonOfSum(m + level, W, by_marginals=True).log_prob(COUNTS).sum() for level in levels]
    np.testing.assert_allclose(found, logsumexp(each, b=probs), rtol=1e-9)


# ---------------------------------------------------------------- fits


@pytest.fixture(scope="module")
def areas():
    """Twelve bins of a line, five nodes in each."""
    nodes = (np.arange(12)[:, None] + (np.arange(5) + 0.5) / 5)[..., None] / 2
    weights = np.random.default_rng(2).uniform(2, 6, (12, 5))
    counts = np.random.default_rng(3).poisson((weights * np.exp(np.sin(nodes[..., 0]))).sum(1))
    return jnp.asarray(nodes), jnp.asarray(weights), jnp.asarray(counts)


def model(nodes, weights, counts=None, *, num=12, M=10, integrator=None, likelihood=None, mask=True):
    Z = jnp.linspace(0.0, 6.0, M)[:, None]
    f = ogp.gp("f", kernels.RBF(1.0), Z)
    m = f(nodes.reshape(-1, 1))
    with numpyro.plate("areas", num, subsample_size=len(nodes)):
        fn = L.PoissonOfSum(m, weights, integrator=integrator) if likelihood is None else likelihood(m, weights)
        numpyro.sample("y", fn.mask(mask), obs=counts)


def natural_fit(args, steps=60, length=0.3, **kwargs):
    guide = ogp.AutoSparseGP(partial(model, **kwargs), natural=True)
    optimizer = ogp.natural_gradient(optax.adam(1e-2), length, ramp_up=5)
    svi = SVI(partial(model, **kwargs), guide, optimizer, TraceMeanField_ELBO())
    return guide, svi.run(KEY, steps, *args, progress_bar=False).params


def test_a_fit_its_checks_and_its_predictions(areas):
    nodes, weights, _ = areas
    guide, params = natural_fit(areas)
    of = partial(model)
    f = ogp.posterior(of, guide, params, *areas)["f"]
    at = nodes.reshape(-1, 1)
    assert np.abs(f(at).mean - np.sin(at[:, 0])).max() < 0.35
    page = ogp.check(of, guide, params, *areas, num_samples=30)
    assert np.isfinite(page.functions["f"].residual).all() and "f.u0" in str(page)
    assert ogp.khat(of, guide, params, *areas, num_samples=100).khat < 0.7
    drawn = Predictive(of, guide=guide, params=params, num_samples=20)(KEY, nodes, weights)["y"]
    assert drawn.shape == (20, 12)
    pytest.importorskip("arviz")
    data = ogp.to_arviz(of, guide, params, *areas, num_samples=10)
    assert data["log_likelihood"]["y"].shape[-1] == 12


def test_minibatches_masks_and_the_tightened_bound(areas):
    """A batch is of whole areas; a masked count is none; v near one, since each node pays for it."""
    nodes, weights, counts = areas
    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.05), TraceMeanField_ELBO())
    result = ogp.fit(svi, KEY, areas, batch_size=4, num_steps=150, progress_bar=False)
    assert result.losses[-20:].mean() < result.losses[:20].mean()
    seen, wrong = np.arange(12) != 4, counts.at[4].set(900)
    params = problems.q_params([problems.random_q(np.random.default_rng(0), 10)])

    def loss(counts, residual="prior", v=None, **kwargs):
        extra = {} if v is None else {"f_residual_scale": jnp.asarray(v)}
        bound = partial(model, **kwargs)
        guide = ogp.AutoSparseGP(bound, residual=residual)
        return TraceMeanField_ELBO().loss(KEY, {**params, **extra}, bound, guide, nodes, weights, counts)

    np.testing.assert_allclose(loss(wrong, mask=seen), loss(counts, mask=seen), rtol=1e-12)
    np.testing.assert_allclose(loss(counts, "tight", 1.0), loss(counts), rtol=1e-12)
    few = {"M": 4}
    params = problems.q_params([problems.random_q(np.random.default_rng(0), 4)])
    v = 0.6
    bounded = {"likelihood": partial(L.PoissonOfSum, by_marginals=True), **few}
    charged = loss(counts, "tight", v, **bounded) - 60 * (v - np.log(v) - 1) / 2

    def known(nodes, weights, counts):  # the same with residual variances that are v times as large
        f = ogp.gp("f", kernels.RBF(1.0), jnp.linspace(0.0, 6.0, 4)[:, None])
        m = f(nodes.reshape(-1, 1))
        scaled = ogp.Marginals(m.mean, m.explained_variance, v * m.residual_variance)
        with numpyro.plate("areas", 12):
            numpyro.sample("y", L.PoissonOfSum(scaled, weights, by_marginals=True), obs=counts)

    expected = TraceMeanField_ELBO().loss(KEY, params, known, ogp.AutoSparseGP(known), *areas)
    np.testing.assert_allclose(charged, expected, rtol=1e-10)


def test_a_fit_has_the_bound_of_the_function(areas):
    """With few points, and tightened: the expectation over q(u) and the residual, beside draws of its joint law."""
    rng = np.random.default_rng(1)
    params = problems.q_params([problems.random_q(rng, 5)])
    nodes, weights, counts = areas
    m, S = np.asarray(params["f.u0_loc"]), np.asarray(params["f.u0_scale_tril"])
    kl = 0.5 * (m @ m + (S**2).sum() - len(m)) - np.log(np.diag(S)).sum()
    Z, X = np.linspace(0.0, 6.0, 5)[:, None], np.asarray(nodes).reshape(-1, 1)
    k = oracles.rbf(1.0, 1.0)
    A = np.linalg.solve(np.linalg.cholesky(k(Z, Z)), k(Z, X))
    for v in (1.0, 0.5):
        cov = A.T @ S @ S.T @ A + v * (k(X, X) - A.T @ A)
        f = rng.multivariate_normal(A.T @ m, cov, 20_000).reshape(-1, 12, 5)
        each = stats.poisson.logpmf(counts, np.sum(weights * np.exp(f), -1)).sum(-1)
        charge = 60 * (v - np.log(v) - 1) / 2
        of = partial(model, M=5)
        guide = ogp.AutoSparseGP(of, residual="tight")
        with_v = {**params, "f_residual_scale": jnp.asarray(v)}
        one = jax.jit(lambda key, p=with_v, of=of, g=guide: TraceMeanField_ELBO().loss(key, p, of, g, *areas))
        losses = np.array([one(key) for key in jax.random.split(KEY, 30)])
        error = 4 * np.hypot(each.std() / len(each) ** 0.5, losses.std() / 30**0.5)
        np.testing.assert_allclose(-losses.mean(), each.mean() - kl - charge, atol=error)
        assert losses.std() < each.std() / 10  # of one evaluation, with 64 points for each area


@pytest.mark.slow
def test_nuts_has_the_same_posterior(areas):
    """With as many points as the function needs: rates of the bins by NUTS, whose bound has no gap then, and by both fits."""
    nodes, weights, _ = areas
    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=2000, progress_bar=False)
    mcmc.run(KEY, *areas)

    def log_rates(u):
        with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data={"f.u0": u}):
            f = ogp.gp("f", kernels.RBF(1.0), jnp.linspace(0.0, 6.0, 10)[:, None])
        return jax.nn.logsumexp(f(nodes.reshape(-1, 1)).mean.reshape(12, 5), axis=1, b=weights)

    by_nuts = jax.jit(jax.vmap(log_rates))(mcmc.get_samples()["f.u0"])
    guide, params = natural_fit(areas, steps=200, length=optax.cosine_decay_schedule(0.3, 200, 0.01))
    f = ogp.posterior(model, guide, params, *areas)["f"]
    values = f(nodes.reshape(-1, 1)).sample(KEY, (4000,)).reshape(4000, 12, 5)
    by_fit = jax.nn.logsumexp(values, axis=-1, b=weights)
    np.testing.assert_allclose(by_fit.mean(0), by_nuts.mean(0), atol=0.03)
    np.testing.assert_allclose(by_fit.std(0), by_nuts.std(0), rtol=0.12)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda m: L.PoissonOfSum(m, W[:, :2]), ValueError, r"got f\(X\) of shape \(12,\) and weights \(4, 2\)"),
        (lambda m: L.PoissonOfSum(m, np.ones(5)), ValueError, r"`weights` of shape \(B, Q\) or \(Q,\).*nodes.reshape"),
        (lambda m: L.PoissonOfSum(ogp.stack([m, m.independent()]), W), ValueError, "twice|shape"),
        (lambda m: L.PoissonOfSum(m, W - 1), ValueError, "must be finite and not negative; got a value of -1.0"),
        (lambda m: L.PoissonOfSum(m, W * [[0], [1], [1], [1]]), ValueError, "all zero in row 0"),
        (lambda m: L.PoissonOfSum(m, W, "identity"), ValueError, "Unknown `link` 'identity'"),
        (
            lambda m: L.PoissonOfSum(m, W, integrator=ogp.GaussHermite(9)),
            TypeError,
            "over f at all inputs of an area together.*got GaussHermite",
        ),
        (lambda m: L.PoissonOfSum(m.mean, W), TypeError, r"needs the marginals of a function, f\(X\)"),
        (lambda m: L.NegativeBinomialOfSum(m, W, -1.0), ValueError, "`concentration` must be positive"),
        (
            lambda m: L.NegativeBinomialOfSum(m, W, np.ones(12)),
            ValueError,
            r"broadcast to the shape \(4,\).*got \(12,\)",
        ),
        (lambda m: L.BinomialOfAverage(m, W, 2.5), ValueError, "`total_count` must be whole"),
        (
            lambda m: L.PoissonOfSum(m, W.T).log_prob(COUNTS),
            ValueError,
            r"`obs` has 4 areas, and `weights` have 3: .*weights.T",
        ),
        (
            lambda m: L.NegativeBinomialOfSum(m, W.T, np.ones(4)),
            ValueError,
            r"`concentration` has 4 areas, and `weights` have 3: shape \(B, Q\) = \(3, 4\)",
        ),
        (lambda m: L.PoissonOfSum(m, W).log_prob(np.ones(12)), ValueError, r"must have shape \(4,\).*got \(12,\)"),
        (lambda m: L.PoissonOfSum(m, W).log_prob(np.array([1, 2, -1, 0])), ValueError, "support of PoissonOfSum"),
    ],
)
def test_what_is_refused(m, make, error, match):
    with pytest.raises(error, match=match):
        make(m)


@pytest.mark.parametrize("name", CASES)
def test_what_is_linear_in_f_makes_no_noise(m, law, name):
    """All areas together, beside the standard deviation of a plain average of as many draws."""
    build, log_density, _ = CASES[name]
    f, weights = law
    log_p, num, keys = log_density(f), 64, jax.random.split(KEY, 200)
    truth = weights @ log_p
    plain = np.sqrt(weights @ (log_p - truth) ** 2 / num)

    @jax.vmap
    def drawn(key):
        fn = build(m, integrator=ogp.MonteCarlo(num))
        fn.rng_key = key
        return fn.log_prob(COUNTS)

    errors = np.asarray(jax.jit(drawn)(keys)) - truth
    noise = errors.std(0)
    np.testing.assert_array_less(abs(errors.mean(0)), 4 * noise / np.sqrt(len(keys)))
    assert np.linalg.norm(noise) < 0.7 * np.linalg.norm(plain)  # which is 1 if nothing is left out
