"""`CollapsedGP` and `orthogonal` in models: SVI, autoguides, natural gradients, NUTS, BFGS, handlers, predictions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.util import log_density

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp.gaussians.family import Value
from tests import oracles, problems
from tests.test_collapsed import NOISE, mean_field_optimum, orthogonal_factor

N, KEY = 20, jax.random.PRNGKey(0)
TRUE = {"lengthscale": 0.8, "noise": 0.4}


def kernel_of(lengthscale):
    return 1.3 * kernels.Matern52(lengthscale)


def model(X, y=None, *, Z, **options):
    """Hyperparameters with priors, one or more sets at their best."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    numpyro.sample("y", ogp.CollapsedGP(kernel_of(lengthscale), X, Z, noise, **{"jitter": 0.0} | options), obs=y)


def log_prior(lengthscale, noise):
    return sum(
        -0.5 * (np.log(x) - mean) ** 2 - np.log(x) - 0.5 * np.log(2 * np.pi)
        for x, mean in ((lengthscale, 0.0), (noise, -1.0))
    )


def two_sets(X, y=None, *, Z, O, bound="titsias2009", jitter=0.0):
    """Fixed hyperparameters, q(v) the guide's."""
    v = ogp.orthogonal("f", O, num_latents=None if y is None or y.ndim == 1 else y.shape[1])
    gp = ogp.CollapsedGP(kernel_of(0.9), X, [Z, O], NOISE, orthogonal=v, bound=bound, jitter=jitter)
    numpyro.sample("y", gp, obs=y)


def oracle(lengthscale=0.9):
    return oracles.matern52(1.3, float(lengthscale))


@pytest.fixture
def problem(rng):
    X, y = problems.data(rng, N)
    Z, O = problems.sets(rng, [4, 3])
    return *(jnp.asarray(a) for a in (X, y, Z, O)), jnp.asarray(rng.uniform(-2, 2, (5, 2)))


def run(svi, steps, *args, init_params=None, **kwargs):
    """The state after some steps, and the losses before each of them and after the last."""

    @jax.jit
    def whole():
        state = svi.init(KEY, *args, init_params=init_params, **kwargs)
        state, losses = jax.lax.scan(lambda s, _: svi.update(s, *args, **kwargs), state, None, length=steps)
        return state, jnp.append(losses, svi.evaluate(state, *args, **kwargs))

    state, losses = whole()
    return svi.get_params(state), np.asarray(losses)


# ---------------------------------------------------------------- hyperparameters


def test_autodelta_minimizes_the_bound_and_the_prior(problem):
    X, y, Z, _, Xs = problem
    guide = AutoDelta(model)
    params, losses = run(SVI(model, guide, optax.adam(0.05), Trace_ELBO()), 60, X, y, Z=Z)
    assert losses[-1] < losses[0] - 1 and np.isfinite(losses).all()
    hyper = {n: float(params[f"{n}_auto_loc"]) for n in TRUE}
    k, noise = oracle(hyper["lengthscale"]), hyper["noise"]
    assert_allclose(-losses[-1], log_prior(**hyper) + oracles.titsias2025(k, X, y, Z, noise**2), rtol=1e-9)
    found, by_hand = jax.jit(
        lambda p: (
            ogp.posterior(model, guide, p, X, y, Z=Z)["y"](Xs),
            ogp.CollapsedGP(kernel_of(p["lengthscale_auto_loc"]), X, Z, p["noise_auto_loc"], jitter=0.0).posterior(y)(
                Xs
            ),
        )
    )(params)
    mean, cov = oracles.q_f(k, [oracles.WhitenedSet(Z, *oracles.optimal_q(k, X, y, Z, noise**2, whitened=True))], Xs)
    for f in (found, by_hand):
        assert_allclose(f.mean, mean, rtol=1e-8, atol=1e-10)
        assert_allclose(f.variance, np.diag(cov), rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_autonormal(problem):
    """The loss is that of the draw that the guide makes: its log density less log prior and bound."""
    X, y, Z, *_ = problem
    guide = AutoNormal(model, init_scale=0.1)
    svi = SVI(model, guide, optax.adam(0.03), Trace_ELBO())

    @jax.jit
    def fit(key):
        state = svi.init(KEY, X, y, Z=Z)
        params = svi.get_params(state)
        loss = Trace_ELBO().loss(key, params, model, guide, X, y, Z=Z)
        sites = handlers.trace(handlers.seed(handlers.substitute(guide, params), jax.random.split(key)[1])).get_trace(
            X, y, Z=Z
        )
        log_q = sum(jnp.sum(s["fn"].log_prob(s["value"])) for s in sites.values() if s["type"] == "sample")
        _, losses = jax.lax.scan(lambda s, _: svi.update(s, X, y, Z=Z), state, None, length=150)
        return loss, log_q, {n: sites[n]["value"] for n in TRUE}, losses

    loss, log_q, draw, losses = fit(KEY)
    draw = {n: float(v) for n, v in draw.items()}
    bound = oracles.titsias2025(oracle(draw["lengthscale"]), X, y, Z, draw["noise"] ** 2)
    assert_allclose(loss, log_q - log_prior(**draw) - bound, rtol=1e-9)
    assert np.isfinite(losses).all() and losses[-30:].mean() < losses[:10].mean()


def test_posterior_of_draws(problem):
    """``posterior`` without a guide, mapped over draws of MCMC."""
    X, y, Z, O, Xs = problem
    draws = {"lengthscale": jnp.asarray([0.6, 1.1, 0.9]), "noise": jnp.asarray([0.3, 0.5, 0.2])}
    f = jax.jit(jax.vmap(lambda p: ogp.posterior(model, None, p, X, y, Z=[Z, O])["y"](Xs)))(draws)
    assert f.mean.shape == (3, 5)
    for i in range(3):
        k = oracle(draws["lengthscale"][i])
        best = mean_field_optimum(k, X, np.asarray(y), [np.asarray(Z), np.asarray(O)], float(draws["noise"][i]) ** 2)[2]
        mean, cov = oracles.q_f(k, best, Xs)
        assert_allclose(f.mean[i], mean, rtol=1e-8, atol=1e-10)
        assert_allclose(f.variance[i], np.diag(cov), rtol=1e-8, atol=1e-10)


def dense_model(X, y):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    K = kernel_of(lengthscale)(X, X) + noise**2 * jnp.eye(len(X))
    numpyro.sample("y", dist.MultivariateNormal(0.0, K), obs=y)


def test_potential_of_the_exact_gp(problem):
    """With inducing points at the data NUTS sees the exact GP: value and gradient of log p(y, hyperparameters)."""
    X, y, *_ = problem

    @jax.jit
    def both(p):
        sparse = jax.value_and_grad(lambda p: log_density(model, (X, y), {"Z": X}, p)[0])(p)
        return sparse, jax.value_and_grad(lambda p: log_density(dense_model, (X, y), {}, p)[0])(p)

    for lengthscale, noise in ((0.5, 0.2), (0.9, 0.4), (2.0, 1.0)):
        sparse, dense = both({"lengthscale": jnp.asarray(lengthscale), "noise": jnp.asarray(noise)})
        exact = log_prior(lengthscale, noise) + oracles.exact_log_marginal(oracle(lengthscale), X, y, noise**2)
        assert_allclose([sparse[0], dense[0]], exact, rtol=1e-9)
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-6, atol=1e-7), sparse[1], dense[1])


@pytest.mark.slow
def test_nuts_has_the_posterior_of_the_exact_gp(problem):
    """Inducing points at the data; the reference is a grid over both hyperparameters."""
    X, y, *_ = problem
    mcmc = MCMC(
        NUTS(model), num_warmup=300, num_samples=1500, num_chains=2, chain_method="sequential", progress_bar=False
    )
    mcmc.run(KEY, X, y, Z=X)
    grid = np.stack(np.meshgrid(np.linspace(-3, 2.5, 120), np.linspace(-4, 1, 120), indexing="ij"), -1).reshape(-1, 2)
    K = jax.jit(jax.vmap(lambda t: log_density(dense_model, (X, y), {}, {"lengthscale": t[0], "noise": t[1]})[0]))
    log_p = np.asarray(K(jnp.exp(grid))) + grid.sum(1)  # of the logarithms
    p = np.exp(log_p - log_p.max())
    mean = p @ grid / p.sum()
    deviation = np.sqrt(p @ (grid - mean) ** 2 / p.sum())
    for i, name in enumerate(("lengthscale", "noise")):
        stats = numpyro.diagnostics.summary({name: np.log(mcmc.get_samples(group_by_chain=True)[name])}, prob=0.9)[name]
        error = stats["std"] / np.sqrt(stats["n_eff"])
        assert stats["r_hat"] < 1.02 and error < 0.05
        assert abs(stats["mean"] - mean[i]) < 4 * error
        assert abs(stats["std"] / deviation[i] - 1) < 0.15


@pytest.mark.slow
def test_bfgs_finds_a_stationary_point(problem):
    """All of it, inducing points too, by NumPyro's own ``Minimize``."""
    X, y, Z, *_ = problem

    def learned(X, y):
        model(X, y, Z=numpyro.param("Z", Z), jitter=None)

    guide = AutoDelta(learned)
    svi = SVI(learned, guide, numpyro.optim.Minimize(), Trace_ELBO())
    state = svi.init(KEY, X, y)
    before = svi.evaluate(state, X, y)
    state, _ = jax.jit(lambda s: svi.update(s, X, y))(state)
    params = {n: jnp.asarray(v) for n, v in svi.get_params(state).items()}
    after, gradient = jax.jit(
        jax.value_and_grad(lambda p: Trace_ELBO().loss(KEY, p, learned, guide, X, y))
    )(params)  # fmt: skip
    assert after < before - 1
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) < 2e-2


# ---------------------------------------------------------------- orthogonal(): q(v) of a guide


def elbo(params, guide, *args, loss=None, **kwargs):
    loss = loss or TraceMeanField_ELBO()
    return -jax.jit(lambda p: loss.loss(KEY, p, two_sets, guide, *args, **kwargs))(params)


@pytest.mark.parametrize("covariance", ["full", "prior"])
def test_autosparsegp_gives_equations_21_and_22(rng, problem, covariance):
    X, y, Z, O, Xs = problem
    m, T = problems.random_q(rng, 3)
    guide = ogp.AutoSparseGP(two_sets, covariance={"f": covariance})
    names = {"f.u1_loc", "f.u1_scale_tril"} if covariance == "full" else {"f.u1_loc"}
    assert set(handlers.trace(handlers.seed(guide, KEY)).get_trace(X, y, Z=Z, O=O)) == names | {"f.u1"}
    params = {"f.u1_loc": jnp.asarray(m), "f.u1_scale_tril": jnp.asarray(T)}
    params = {n: params[n] for n in names}
    L, k = orthogonal_factor(oracle(), Z, O), oracle()
    if covariance == "prior":
        expected = oracles.solvegp_collapsed_prior_covariance(k, X, y, Z, O, NOISE**2, L @ m)
        T = np.eye(3)
    else:
        expected = oracles.solvegp_collapsed(k, X, y, Z, O, NOISE**2, L @ m, L @ T @ T.T @ L.T)
    assert_allclose(elbo(params, guide, X, y, Z=Z, O=O), expected, rtol=1e-9)
    f = jax.jit(lambda p: ogp.posterior(two_sets, guide, p, X, y, Z=Z, O=O)["y"](Xs))(params)
    q_u = oracles.whiten(*oracles.solvegp_optimal_qu(k, X, y, Z, O, NOISE**2, L @ m), k(Z, Z))
    mean, cov = oracles.q_f(k, [oracles.WhitenedSet(Z, *q_u), oracles.WhitenedSet(O, m, T @ T.T)], Xs)
    assert_allclose(f.mean, mean, rtol=1e-8, atol=1e-10)
    assert_allclose(f.variance, np.diag(cov), rtol=1e-8, atol=1e-10)


def test_outputs_with_a_q_each(rng, problem):
    X, y, Z, O, _ = problem
    Y = jnp.stack([y, jnp.asarray(rng.normal(size=N))], 1)
    guide = ogp.AutoSparseGP(two_sets)
    qs = [problems.random_q(rng, 3) for _ in range(2)]
    params = {"f.u1_loc": jnp.stack([m for m, _ in qs]), "f.u1_scale_tril": jnp.stack([T for _, T in qs])}
    k, L = oracle(), orthogonal_factor(oracle(), Z, O)
    expected = sum(
        oracles.solvegp_collapsed(k, X, Y[:, d], Z, O, NOISE**2, L @ m, L @ T @ T.T @ L.T)
        for d, (m, T) in enumerate(qs)
    )
    assert_allclose(elbo(params, guide, X, Y, Z=Z, O=O), expected, rtol=1e-9)


def test_natural_steps_reach_the_best_q(problem):
    """One step of length 1 lands on the best covariance; the mean, whose curvature is smaller once u is gone, follows.

    With B = A S^-1 A' and C = A (Q + S)^-1 A' (A of the second set) the step takes the mean m to
    (I + B)^-1 (A (Q + S)^-1 y + (B - C) m), which contracts towards the best one, (I + C)^-1 A (Q + S)^-1 y.
    """
    X, y, Z, O, _ = problem
    k, s = oracle(), NOISE**2
    L = orthogonal_factor(k, Z, O)
    A = np.linalg.solve(L, oracles.orthogonal_process(k, Z)(O, X))
    inverse = np.linalg.inv(oracles.nystrom(k, X, Z)[0] + s * np.eye(N))
    B, C, b = A @ A.T / s, A @ inverse @ A.T, A @ inverse @ y
    m, S = oracles.solvegp_optimal_qv(k, X, y, Z, O, s)
    assert_allclose(np.linalg.solve(L, m), np.linalg.solve(np.eye(3) + C, b), rtol=1e-8)

    guide = ogp.AutoSparseGP(two_sets, natural=True)
    svi = SVI(two_sets, guide, ogp.natural_gradient(optax.sgd(0.0), 1.0), TraceMeanField_ELBO())

    @jax.jit
    def steps():
        def step(state, _):
            state, _ = svi.update(state, X, y, Z=Z, O=O)
            return state, svi.get_params(state)

        state, params = jax.lax.scan(step, svi.init(KEY, X, y, Z=Z, O=O), None, length=200)
        best = ogp.CollapsedGP(kernel_of(0.9), X, [Z, O], NOISE, bound="titsias2009", jitter=0.0).log_prob(y)
        return params, svi.evaluate(state, X, y, Z=Z, O=O), best

    params, loss, best = steps()
    mean = np.zeros(3)
    for i in range(3):
        mean = np.linalg.solve(np.eye(3) + B, b + (B - C) @ mean)
        T = params["f.u1_scale_tril"][i]
        assert_allclose(L @ T @ T.T @ L.T, S, rtol=1e-7, atol=1e-10)
        assert_allclose(params["f.u1_loc"][i], mean, rtol=1e-7, atol=1e-9)
    assert_allclose(L @ params["f.u1_loc"][-1], m, rtol=1e-6, atol=1e-8)
    assert_allclose(-loss, best, rtol=1e-9)


@pytest.mark.parametrize("guide", ["none", pytest.param("values only", marks=pytest.mark.slow), "AutoNormal"])
def test_values_of_v(rng, problem, guide):
    """Whatever hands over no Gaussian: log N(y | A' v, Q + S), less the trace, and the prior N(v | 0, I)."""
    X, y, Z, O, _ = problem
    k, e = oracle(), rng.normal(size=3)

    def formula(e):
        e = np.asarray(e)
        A = np.linalg.solve(orthogonal_factor(k, Z, O), oracles.orthogonal_process(k, Z)(O, X))
        sets = [oracles.WhitenedSet(P, np.zeros(len(P)), np.eye(len(P))) for P in (Z, O)]
        r = np.diag(oracles.residual_covariance(k, sets, X))
        return (
            oracles.dtc(k, X, y - A.T @ e, Z, NOISE**2)
            - 0.5 * r.sum() / NOISE**2
            + oracles.log_normal(e, 0.0, np.eye(3))
        )

    if guide == "none":
        ours = jax.jit(lambda e: log_density(two_sets, (X, y), {"Z": Z, "O": O}, {"f.u1": e})[0])(e)
        assert_allclose(ours, formula(e), rtol=1e-9)
        return
    guide = AutoNormal(two_sets) if guide == "AutoNormal" else ogp.AutoSparseGP(two_sets, analytic=False)

    @jax.jit
    def one():
        svi = SVI(two_sets, guide, optax.adam(0.1), Trace_ELBO())
        params = svi.get_params(svi.init(KEY, X, y, Z=Z, O=O))
        seeded = handlers.seed(handlers.substitute(guide, params), jax.random.split(KEY)[1])
        sites = handlers.trace(seeded).get_trace(X, y, Z=Z, O=O)
        log_q = sum(jnp.sum(s["fn"].log_prob(s["value"])) for s in sites.values() if s["type"] == "sample")
        return Trace_ELBO().loss(KEY, params, two_sets, guide, X, y, Z=Z, O=O), log_q, sites["f.u1"]["value"]

    loss, log_q, value = one()
    assert_allclose(loss, log_q - formula(value), rtol=1e-9)


@pytest.mark.slow
def test_nuts_over_v(problem):
    """The posterior of v that NUTS samples is that of the Gaussian model: its mean is the best q's, as the joint one is."""
    X, y, Z, O, _ = problem
    mcmc = MCMC(NUTS(two_sets), num_warmup=200, num_samples=1000, progress_bar=False)
    mcmc.run(KEY, X, y, Z=Z, O=O)
    k, s = oracle(), NOISE**2
    A = np.linalg.solve(orthogonal_factor(k, Z, O), oracles.orthogonal_process(k, Z)(O, X))
    inverse = np.linalg.inv(oracles.nystrom(k, X, Z)[0] + s * np.eye(N))
    S = np.linalg.inv(np.eye(3) + A @ inverse @ A.T)
    draws = np.asarray(mcmc.get_samples()["f.u1"])
    assert draws.shape == (1000, 3) and np.isfinite(draws).all()
    n_eff = numpyro.diagnostics.effective_sample_size(draws[None])
    assert (abs(draws.mean(0) - S @ A @ inverse @ y) < 4 * np.sqrt(np.diag(S) / n_eff)).all()
    assert_allclose(draws.std(0), np.sqrt(np.diag(S)), rtol=0.15)


# ---------------------------------------------------------------- handlers, draws, refusals


def test_scope_and_condition(problem):
    X, y, Z, O, Xs = problem
    hyper = {"lengthscale": jnp.asarray(0.8), "noise": jnp.asarray(0.4)}

    @jax.jit
    def densities(hyper):
        plain = log_density(model, (X, y), {"Z": Z}, hyper)[0]
        observed = log_density(handlers.condition(model, {"y": y}), (X,), {"Z": Z}, hyper)[0]
        fixed = log_density(handlers.condition(model, hyper), (X, y), {"Z": Z}, {})[0]
        scoped = handlers.scope(model, prefix="a")
        renamed = {f"a/{n}": v for n, v in hyper.items()}
        return plain, observed, fixed, log_density(scoped, (X, y), {"Z": Z}, renamed)[0], {
            n: f(Xs).mean for n, f in (
                ogp.posterior(model, None, hyper, X, y, Z=Z) | ogp.posterior(scoped, None, renamed, X, y, Z=Z)
                | ogp.posterior(handlers.condition(model, {"y": y}), None, hyper, X, Z=Z)
            ).items()
        }  # fmt: skip

    *values, means = densities(hyper)
    expected = log_prior(0.8, 0.4) + oracles.titsias2025(oracle(0.8), X, y, Z, 0.4**2)
    assert_allclose(values, expected, rtol=1e-9)
    assert set(means) == {"y", "a/y"}
    assert_allclose(means["y"], means["a/y"], rtol=1e-12)
    scoped = handlers.scope(two_sets, prefix="a")
    guide = ogp.AutoSparseGP(scoped)
    assert set(handlers.trace(handlers.seed(guide, KEY)).get_trace(X, y, Z=Z, O=O)) >= {"a/f.u1_loc", "a/f.u1"}


@pytest.mark.parametrize("num_outputs", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_predictive_draws_outputs(problem, num_outputs):
    X, _, Z, *_ = problem
    draws = jax.jit(lambda key: Predictive(model, num_samples=7)(key, X, Z=Z, num_outputs=num_outputs))(KEY)
    assert draws["y"].shape == ((7, N) if num_outputs is None else (7, N, 3))
    assert draws["lengthscale"].shape == (7,) and np.isfinite(draws["y"]).all()


def test_refuses_plates_and_mean_only_points(problem):
    X, y, Z, O, _ = problem
    with handlers.seed(rng_seed=0), numpyro.plate("data", 6):
        with pytest.raises(ValueError, match=r"outside of plates.*`f\.u1` is inside 'data'"):
            ogp.orthogonal("f", O)
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match="`orthogonal` takes no MeanOnly points"):
        ogp.orthogonal("f", [O, ogp.MeanOnly(O)])
    with pytest.raises(ValueError, match="CollapsedGP needs no other"), handlers.seed(rng_seed=0):
        ogp.AutoSparseGP(model)(X, y, Z=Z)
    with handlers.seed(rng_seed=0):
        (v,) = ogp.orthogonal("f", O)
        w = ogp.orthogonal("g", [O, Z], num_latents=2)
    assert isinstance(v, Value) and v.loc.shape == (3,)
    assert [q.loc.shape for q in w] == [(2, 3), (2, 4)]
