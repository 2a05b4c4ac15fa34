"""Latent inputs: the Bayesian GP-LVM against dense formulas, and the stochastic GP-LVM under everything NumPyro has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.linalg import inv, slogdet
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO, log_likelihood
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods
from tests import oracles

N, D, Q, M = 9, 3, 2, 4
KEY = random.PRNGKey(0)


@pytest.fixture
def problem(rng):
    """Y, the Gaussian of X (mean, scale), Z."""
    Y = rng.normal(size=(N, D))
    return jnp.asarray(Y), rng.normal(size=(N, Q)), rng.uniform(0.2, 0.6, (N, Q)), jnp.asarray(rng.normal(size=(M, Q)))


def gplvm(Y, Z, *, bound="titsias2009", kernel=None, noise=0.4, jitter=0.0, **options):
    kernel = 1.3 * kernels.RBF(jnp.array([0.9, 1.4])) if kernel is None else kernel
    X = ogp.latent_inputs("X", len(Y), Q, dtype=Y.dtype)
    numpyro.sample("y", ogp.CollapsedGP(kernel, X, Z, noise, bound=bound, jitter=jitter, **options), obs=Y)


def elbo(model, guide, *args, key=KEY, params=None, objective=None, **kwargs):
    objective = objective or TraceMeanField_ELBO()

    def value(key):
        svi = SVI(model, guide, optax.sgd(0.0), objective)
        state = svi.init(key, *args, **kwargs)
        given = svi.get_params(state) | (params or {})
        return -objective.loss(key, given, model, guide, *args, **kwargs)

    return float(jax.jit(value)(key))


def guide_at(model, loc, scale, **options):
    return ogp.AutoSparseGP(model, latents={"X": (jnp.asarray(loc), jnp.asarray(scale))}, **options)


# ---------------------------------------------------------------- the dense formula


def expectations(k, Z, loc, scale, num=50, beside=None):
    """E[k(x, x)], E[k(x, Z)] and E[k(Z, x) k(x, Z)] for each row, by a tensor Gauss-Hermite rule; ``beside`` are known columns."""
    beside = np.zeros((len(loc), 0)) if beside is None else beside
    t, w = np.polynomial.hermite_e.hermegauss(num)
    nodes = np.stack(np.meshgrid(t, t, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(w, w).ravel() / w.sum() ** 2
    zero, one, two = [], [], []
    for m, s, c in zip(loc, scale, beside, strict=True):
        x = np.concatenate([m + s * nodes, np.tile(c, (len(nodes), 1))], -1)
        K = k(x, Z)
        zero.append(weights @ np.array([k(row[None], row[None])[0, 0] for row in x]))
        one.append(weights @ K)
        two.append((weights[:, None] * K).T @ K)
    return np.array(zero), np.array(one), np.array(two)


def dense_gplvm(k, Y, loc, scale, Z, noise, bound, beside=None):
    """Titsias and Lawrence 2010, and Titsias 2025, App. B.5: sum_d F_d - KL[q(X) || N(0, I)], column by column.

    ``noise`` are variances (N, D); zero weight where they are infinite.
    """
    psi0, psi1, psi2 = expectations(k, Z, loc, scale, beside=beside)
    Kuu = k(Z, Z)
    r = psi0 - np.einsum("mn,bnm->b", inv(Kuu), psi2)
    total = 0.0
    for d in range(Y.shape[1]):
        w = 1 / noise[:, d]
        seen = w > 0
        y = np.where(seen, Y[:, d], 0)
        A = Kuu + np.einsum("b,bmn->mn", w, psi2)
        b = psi1.T @ (w * y)
        F = slogdet(Kuu)[1] - slogdet(A)[1] + b @ inv(A) @ b - np.sum(w * y**2)
        F += np.sum(np.log(w[seen])) - seen.sum() * np.log(2 * np.pi)
        F -= np.sum(np.log1p(w * r)) if bound == "titsias2025" else np.sum(w * r)
        total += F / 2
    return total - 0.5 * np.sum(loc**2 + scale**2 - 1 - 2 * np.log(scale))


@pytest.mark.parametrize("bound", ["titsias2009", "titsias2025"])
@pytest.mark.parametrize("name", ["rbf", "matern32"])
def test_bound_is_the_dense_formula(problem, bound, name):
    Y, loc, scale, Z = problem
    oracle = {"rbf": oracles.rbf, "matern32": oracles.matern32}[name](1.3, np.array([0.9, 1.4]))
    kernel = 1.3 * {"rbf": kernels.RBF, "matern32": kernels.Matern32}[name](jnp.array([0.9, 1.4]))
    model = partial(gplvm, bound=bound, kernel=kernel, num_points=50)
    expected = dense_gplvm(oracle, np.asarray(Y), loc, scale, np.asarray(Z), np.full((N, D), 0.16), bound)
    actual = elbo(model, guide_at(model, loc, scale), Y, Z)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)
    np.testing.assert_allclose(
        elbo(partial(model, block_size=4), guide_at(model, loc, scale), Y, Z), expected, rtol=1e-9
    )


def test_bound_is_the_uncollapsed_one_at_its_best_q(problem):
    """The definition: E[log p(y | f)] under q(x) q(u) and q(f | u) of Titsias 2025, with the best v for each point."""
    Y, loc, scale, Z = (np.asarray(a) for a in problem)
    k = oracles.rbf(1.3, np.array([0.9, 1.4]))
    psi0, psi1, psi2 = expectations(k, Z, loc, scale)
    Kuu, noise = k(Z, Z), 0.16
    S = inv(inv(Kuu) + inv(Kuu) @ psi2.sum(0) @ inv(Kuu) / noise)
    r = psi0 - np.einsum("mn,bnm->b", inv(Kuu), psi2)
    v = 1 / (1 + r / noise)
    total = {"titsias2009": 0.0, "titsias2025": 0.0}
    for y in Y.T:
        m = S @ inv(Kuu) @ psi1.T @ y / noise
        second = np.einsum("mn,bnm->b", inv(Kuu) @ (S + np.outer(m, m)) @ inv(Kuu), psi2)
        fit = y**2 - 2 * y * (psi1 @ inv(Kuu) @ m) + second
        for bound, vi in (("titsias2009", np.ones(N)), ("titsias2025", v)):
            total[bound] -= 0.5 * np.sum(np.log(2 * np.pi * noise) + (fit + vi * r) / noise + vi - np.log(vi) - 1)
            total[bound] -= oracles.kl_normal(m, S, np.zeros(M), Kuu)
    kl = 0.5 * np.sum(loc**2 + scale**2 - 1 - 2 * np.log(scale))
    for bound, expected in total.items():
        model = partial(gplvm, bound=bound)
        np.testing.assert_allclose(
            elbo(model, guide_at(model, loc, scale), jnp.asarray(Y), Z), expected - kl, rtol=1e-9
        )


@pytest.mark.parametrize("bound", ["titsias2009", "titsias2025"])
def test_missing_entries_and_noise_of_each_entry(problem, rng, bound):
    Y, loc, scale, Z = problem
    observed = rng.uniform(size=(N, D)) < 0.7
    noise = rng.uniform(0.3, 0.6, (N, D))
    model = partial(gplvm, bound=bound, noise=jnp.asarray(noise), observed=observed)
    with_gaps = jnp.where(observed, Y, jnp.nan)
    variances = np.where(observed, noise**2, np.inf)
    k = oracles.rbf(1.3, np.array([0.9, 1.4]))
    expected = dense_gplvm(k, np.asarray(Y), loc, scale, np.asarray(Z), variances, bound)
    np.testing.assert_allclose(elbo(model, guide_at(model, loc, scale), with_gaps, Z), expected, rtol=1e-9)
    shared = partial(gplvm, bound=bound, observed=observed)
    variances = np.where(observed, 0.16, np.inf)
    expected = dense_gplvm(k, np.asarray(Y), loc, scale, np.asarray(Z), variances, bound)
    np.testing.assert_allclose(elbo(shared, guide_at(shared, loc, scale), with_gaps, Z), expected, rtol=1e-9)


def test_golden_bayesian_gplvm(golden):
    case = json.loads((golden / "case08_bgplvm_oilflow60.json").read_text())
    inputs, out = (
        {k: np.array(v) if isinstance(v, list) else v for k, v in case[part].items()} for part in ("inputs", "outputs")
    )
    start = {"X_loc": inputs["X_mean"], "X_scale": np.sqrt(inputs["X_var"]), "Z": inputs["Z"]}
    start |= {"variance": inputs["variance"], "lengthscales": inputs["lengthscales"], "noise": inputs["noise_variance"]}
    start = jax.tree.map(jnp.asarray, start)

    def model(Y):
        variance, lengthscales, noise, Z = (
            numpyro.param(name, start[name]) for name in ("variance", "lengthscales", "noise", "Z")
        )
        X = ogp.latent_inputs("X", len(Y), 2)
        gp = ogp.CollapsedGP(variance * kernels.RBF(lengthscales), X, Z, noise**0.5, bound="titsias2009", jitter=0.0)
        numpyro.sample("y", gp, obs=Y)

    Y = jnp.asarray(inputs["Y"])
    guide = guide_at(model, start["X_loc"], start["X_scale"])
    objective = TraceMeanField_ELBO()
    SVI(model, guide, optax.sgd(0.1), objective).init(KEY, Y)
    value, gradient = jax.jit(jax.value_and_grad(lambda p: -objective.loss(KEY, p, model, guide, Y)))(start)
    np.testing.assert_allclose(value, out["elbo"], rtol=1e-9)
    expected = {k: np.array(v) for k, v in case["outputs"]["elbo_grad"].items()}
    for ours, theirs in (
        ("variance",) * 2,
        ("lengthscales",) * 2,
        ("noise", "noise_variance"),
        ("Z",) * 2,
        ("X_loc", "X_mean"),
    ):
        np.testing.assert_allclose(gradient[ours], expected[theirs], rtol=1e-6, atol=1e-7, err_msg=ours)
    np.testing.assert_allclose(gradient["X_scale"], expected["X_var"] * 2 * start["X_scale"], rtol=1e-6, atol=1e-7)

    f = jax.jit(lambda p: ogp.posterior(model, guide, p, Y)["y"])(start)
    at = jnp.asarray(inputs["Xtest"])
    np.testing.assert_allclose(f(at).mean, out["f_mean"], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(f(at).variance, out["f_var"], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(f.joint(at).covariance_matrix[0], out["f_cov"], rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------- equivalences


@pytest.mark.parametrize("sets", [1, 2])
def test_known_inputs_are_latent_ones_without_spread(problem, sets):
    Y, loc, _, Z = problem
    inducing = [Z, Z[:2] + 0.5][:sets]
    sure = ogp.LatentInputs(jnp.asarray(loc), jnp.asarray(loc), jnp.zeros((N, Q)))

    @partial(jax.jit, static_argnames="bound")
    def both(bound):
        gps = [
            ogp.CollapsedGP(1.3 * kernels.RBF(0.9), X, inducing, 0.4, bound=bound, jitter=0.0) for X in (sure, sure.loc)
        ]
        return [(gp.log_prob(Y), [(q.loc, q.scale_tril) for q in gp.posterior(Y).beliefs]) for gp in gps]

    for bound in (["titsias2009", "artemev2021"], ["titsias2025"])[sets - 1]:
        uncertain, plain = both(bound=bound)
        np.testing.assert_allclose(uncertain[0], plain[0], rtol=1e-9)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-8), uncertain[1], plain[1])


def test_a_second_set_never_hurts_and_is_worse_than_one_joint_set(problem):
    Y, loc, scale, Z = problem
    O = Z[::-1] * 0.7 + 0.4

    def bound(inducing):
        model = partial(gplvm, bound="titsias2025")
        return elbo(model, guide_at(model, loc, scale), Y, inducing)

    assert bound(Z) < bound([Z, O]) < bound(jnp.concatenate([Z, O]))


def test_covariates_beside_latent_inputs(problem, rng):
    Y, loc, scale, Z = problem
    C = rng.normal(size=(N, 1))
    Z = jnp.concatenate([Z, rng.normal(size=(M, 1))], -1)
    lengthscale = np.array([0.9, 1.4, 0.7])

    def model(Y):
        X = ogp.latent_inputs("X", N, Q).beside(jnp.asarray(C))
        assert X.shape == (N, Q + 1)
        numpyro.sample("y", ogp.CollapsedGP(1.3 * kernels.RBF(jnp.asarray(lengthscale)), X, Z, 0.4, jitter=0.0), obs=Y)

    k, noise = oracles.rbf(1.3, lengthscale), np.full((N, D), 0.16)
    expected = dense_gplvm(k, np.asarray(Y), loc, scale, np.asarray(Z), noise, "titsias2025", beside=C)
    np.testing.assert_allclose(elbo(model, guide_at(model, loc, scale), Y), expected, rtol=1e-9)
    known = ogp.LatentInputs(jnp.asarray(loc)).beside(C)
    assert known.scale is None
    np.testing.assert_array_equal(known.value, np.concatenate([loc, C], -1))
    with pytest.raises(ValueError, match=r"one row for each of the 9 points; got shape \(4, 1\)"):
        known.beside(C[:4])


# ---------------------------------------------------------------- the stochastic version


def stochastic(Y, Z, *, batch=None, noise=0.4, likelihood=likelihoods.Gaussian):
    f = ogp.gp("f", 1.3 * kernels.RBF(jnp.array([0.9, 1.4])), Z, num_latents=Y.shape[1], jitter=0.0)
    noise = numpyro.sample("noise", dist.LogNormal(jnp.log(noise), 0.1))
    with numpyro.plate("rows", len(Y), subsample_size=batch) as rows:
        X = ogp.latent_inputs("X", len(Y), Q)
        numpyro.sample("y", likelihood(f(X), noise).to_event(1), obs=Y[rows])


def parameters(rng, sizes=(M,)):
    """Some parameters of the stochastic version's guide."""
    params = {"noise_auto_loc": jnp.asarray(0.4)}
    for i, size in enumerate(sizes):
        T = np.tril(0.2 * rng.normal(size=(D, size, size)), -1) + np.eye(size) * 0.5
        params |= {f"f.u{i}_loc": jnp.asarray(rng.normal(size=(D, size))), f"f.u{i}_scale_tril": jnp.asarray(T)}
    return params


def test_minibatches_average_to_all_of_the_data(problem, rng):
    Y, loc, _, Z = problem
    # Next to no spread: the value is that of the means, and what is left is which rows were picked.
    guide = partial(guide_at, loc=loc, scale=np.full((N, Q), 1e-9))
    params = parameters(rng)
    whole = elbo(stochastic, guide(stochastic), Y, Z, params=params)
    model = partial(stochastic, batch=3)
    part = guide(model)
    objective = TraceMeanField_ELBO()
    svi = SVI(model, part, optax.sgd(0.0), objective)
    given = svi.get_params(jax.jit(lambda: svi.init(KEY, Y, Z))()) | params
    values = jax.jit(jax.vmap(lambda key: -objective.loss(key, given, model, part, Y, Z)))(random.split(KEY, 3000))
    assert values.std() > 1
    assert abs(values.mean() - whole) < 4 * values.std() / 3000**0.5


@pytest.mark.parametrize("hyper", ["AutoDelta", "AutoNormal"])
def test_guide_and_model_see_the_same_rows(problem, rng, hyper):
    """Rows of Y equal to their latent means: any row of another point would show in the likelihood."""
    _, loc, _, _ = problem
    seen = []

    def model(batch):
        numpyro.sample("shift", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", N, subsample_size=batch) as rows:
            X = ogp.latent_inputs("X", N, Q)
            extra = ogp.latent_inputs("X2", N, 1)
            numpyro.sample("offset", dist.Normal(0.0, 1.0))  # for which the other guide makes the plate once more
            seen.append((rows, X.loc, extra.loc))
            numpyro.sample("y", dist.Normal(jnp.asarray(X), 1.0).to_event(1), obs=jnp.zeros((batch, Q)))

    numbers = jnp.arange(N, dtype=float)
    guide = ogp.AutoSparseGP(
        model, latents={"X": jnp.asarray(loc), "X2": numbers[:, None]}, hyper=getattr(numpyro.infer.autoguide, hyper)
    )
    svi = SVI(model, guide, optax.adam(0.0), TraceMeanField_ELBO())
    state = svi.init(KEY, 4)

    @jax.jit
    def step(state):
        state, _ = svi.update(state, 4)
        svi.evaluate(state, 4)
        return state, seen[-1]

    picked = set()
    for _ in range(3):
        state, (rows, X_loc, extra) = step(state)
        np.testing.assert_array_equal(X_loc, loc[rows])
        np.testing.assert_array_equal(extra[:, 0], numbers[rows])
        picked.add(tuple(np.asarray(rows)))
    assert len(picked) == 3 and svi.get_params(state)["X_loc"].shape == (N, Q)


def test_stochastic_bound_averages_over_draws(problem, rng):
    """E over x of the SVGP bound, against the same integral by quadrature."""
    Y, loc, scale, Z = problem
    params = parameters(rng)
    guide = guide_at(stochastic, loc, scale)
    objective = TraceMeanField_ELBO(num_particles=4000)
    value = elbo(stochastic, guide, Y, Z, params=params, objective=objective)
    t, w = np.polynomial.hermite_e.hermegauss(20)
    nodes, weights = (
        np.stack(np.meshgrid(t, t, indexing="ij"), -1).reshape(-1, 2),
        np.outer(w, w).ravel() / w.sum() ** 2,
    )
    k, noise = oracles.rbf(1.3, np.array([0.9, 1.4])), 0.16
    total = float(dist.LogNormal(jnp.log(0.4), 0.1).log_prob(0.4))
    for d in range(D):
        m, T = np.asarray(params["f.u0_loc"])[d], np.asarray(params["f.u0_scale_tril"])[d]
        sets = [oracles.WhitenedSet(np.asarray(Z), m, T @ T.T)]
        total -= oracles.kl_q(k, sets)
        for i in range(N):
            mean, cov = oracles.q_f(k, sets, loc[i] + scale[i] * nodes)
            total += weights @ oracles.expected_log_normal(float(Y[i, d]), mean, np.diag(cov), noise)
    total -= 0.5 * np.sum(loc**2 + scale**2 - 1 - 2 * np.log(scale))
    assert abs(value - total) < 0.02 * abs(total)


def averaged(
    Y, Z, *, batch=None, noise=0.4, kernel=None, likelihood=likelihoods.Gaussian, mix=lambda m: m, observed=True
):
    kernel = 1.3 * kernels.RBF(jnp.array([0.9, 1.4])) if kernel is None else kernel
    f = ogp.gp("f", kernel, Z, num_latents=Y.shape[1], jitter=0.0)
    with numpyro.plate("rows", len(Y), subsample_size=batch) as rows:
        X = ogp.latent_inputs("X", len(Y), Q)
        expected = likelihood(mix(f.expected(X)), noise).mask(jnp.broadcast_to(observed, Y.shape)[rows])
        numpyro.sample("y", expected.to_event(1), obs=Y[rows])


@pytest.mark.parametrize("residual, bound", [("prior", "titsias2009"), ("tight", "titsias2025")])
@pytest.mark.parametrize("sets, gaps", [(1, False), (2, True)])
def test_averaged_moments_give_the_collapsed_bound_at_its_q(problem, rng, residual, bound, sets, gaps):
    """Loose and tight, one set or two, all entries or some."""
    Y, loc, scale, Z = problem
    inducing = [Z, Z[::-1] * 0.7 + 0.4][:sets]
    observed = rng.uniform(size=(N, D)) < 0.7 if gaps else None
    model = partial(gplvm, bound=bound, observed=observed)
    collapsed = elbo(model, guide_at(model, loc, scale), Y, inducing)
    X = ogp.LatentInputs(jnp.asarray(loc), jnp.asarray(loc), jnp.asarray(scale))
    kernel = 1.3 * kernels.RBF(jnp.array([0.9, 1.4]))
    gp = ogp.CollapsedGP(kernel, X, inducing, 0.4, bound=bound, jitter=0.0, observed=observed)
    beliefs = jax.jit(lambda: gp.posterior(Y).beliefs)()
    params = {}
    for i, q in enumerate(beliefs):
        T = jnp.broadcast_to(q.scale_tril, (D, *q.scale_tril.shape[-2:]))
        params |= {f"f.u{i}_loc": q.loc, f"f.u{i}_scale_tril": T}
    other = partial(averaged, observed=True if observed is None else observed)
    guide = guide_at(other, loc, scale, residual=residual)
    np.testing.assert_allclose(elbo(other, guide, Y, inducing, params=params), collapsed, rtol=1e-9)


def test_natural_steps_on_averaged_moments_reach_the_collapsed_bound(problem):
    """One natural step of length one, all rows: q(u) is the best, whatever q(X)."""
    Y, loc, scale, Z = problem
    collapsed = elbo(gplvm, guide_at(gplvm, loc, scale), Y, Z)
    guide = guide_at(averaged, loc, scale, natural=True)
    svi = SVI(averaged, guide, ogp.natural_gradient(optax.sgd(0.0), 1.0), TraceMeanField_ELBO())

    @jax.jit
    def step():
        state = svi.update(svi.init(KEY, Y, Z), Y, Z)[0]
        return svi.evaluate(state, Y, Z)

    np.testing.assert_allclose(-step(), collapsed, rtol=1e-8)


def test_averaged_moments_are_those_of_draws(problem, rng):
    Y, loc, scale, Z = problem
    f = jax.jit(
        lambda: ogp.CollapsedGP(kernels.Matern32(1.2), loc, [Z, Z[:2] + 0.5], 0.4, num_outputs=D).posterior(Y)
    )()
    X = ogp.LatentInputs(jnp.asarray(loc), jnp.asarray(loc), jnp.asarray(scale))
    found = jax.jit(lambda: f.expected(X, num_points=40))()
    t, w = np.polynomial.hermite_e.hermegauss(40)
    nodes, weights = (
        np.stack(np.meshgrid(t, t, indexing="ij"), -1).reshape(-1, 2),
        np.outer(w, w).ravel() / w.sum() ** 2,
    )
    at = jax.jit(jax.vmap(lambda x: f(x)))(loc + scale * nodes[:, None])
    mean = np.einsum("s,sbd->bd", weights, at.mean)
    second = np.einsum("s,sbd->bd", weights, at.variance + at.mean**2)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found.variance, second - mean**2, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(
        found.residual_variance, np.einsum("s,sbd->bd", weights, at.residual_variance), atol=1e-8
    )
    value = jax.jit(lambda: f.expected(ogp.LatentInputs(jnp.asarray(loc))))()
    np.testing.assert_allclose(value.mean, jax.jit(lambda x: f(x))(jnp.asarray(loc)).mean)


def test_averaged_moments_on_minibatches(problem, rng):
    """Deterministic but for the rows that are picked, and unbiased."""
    Y, loc, scale, Z = problem
    params = {k: v for k, v in parameters(rng).items() if k.startswith("f.")}
    whole = elbo(averaged, guide_at(averaged, loc, scale), Y, Z, params=params)
    model = partial(averaged, batch=3)
    guide, objective = guide_at(model, loc, scale), TraceMeanField_ELBO()
    svi = SVI(model, guide, optax.sgd(0.0), objective)
    given = svi.get_params(jax.jit(lambda: svi.init(KEY, Y, Z))()) | params
    values = jax.jit(jax.vmap(lambda key: -objective.loss(key, given, model, guide, Y, Z)))(random.split(KEY, 3000))
    assert len(np.unique(np.round(values, 8))) <= 84  # choices of three of nine rows
    assert abs(values.mean() - whole) < 4 * values.std() / 3000**0.5


def test_averaged_moments_refuse_what_is_not_known(problem):
    Y, loc, scale, Z = problem
    guide = guide_at(averaged, loc, scale)
    with pytest.raises(ValueError, match=r"StudentT needs more than the two moments that f.expected\(X\) knows"):
        elbo(averaged, guide, Y, Z, likelihood=lambda m, s: likelihoods.StudentT(m, 4.0, s))
    with pytest.raises(TypeError, match="needs more than the two moments"):
        elbo(averaged, guide, Y, Z, mix=lambda m: (likelihoods.Gaussian(m, 0.4).log_predictive(m.mean), m)[1])
    with pytest.raises(TypeError, match="cannot be drawn"):
        elbo(averaged, guide, Y, Z, mix=lambda m: (m.sample(jax.random.PRNGKey(0)), m)[1])
    with pytest.raises(TypeError, match="cannot be mixed by `@ W`"):
        elbo(averaged, guide, Y, Z, mix=lambda m: m @ jnp.eye(D))
    with pytest.raises(ValueError, match="not known with MeanOnly points"):
        elbo(averaged, guide, Y, [Z, ogp.MeanOnly(Z + 1.0)])
    with pytest.raises(ValueError, match="leading axis"):
        elbo(averaged, guide, Y, Z, kernel=kernels.RBF(jnp.ones((D, 1))))
    f = ogp.CollapsedGP(kernels.RBF(1.0), loc, Z, 0.4).posterior(Y[:, 0])
    with pytest.raises(TypeError, match=r"f.expected\(X\) needs what latent_inputs\(\) returns; got"):
        f.expected(loc)


def test_encoder_in_the_plate(problem):
    """Counts, an encoder, minibatches, two sets and the tightened bound, all at once."""
    Y, _, _, Z = problem
    Y = jnp.round(jnp.exp(1 + Y))

    def encoder(Y, Z, **kwargs):
        rows = jnp.log1p(numpyro.subsample(Y, event_dim=1))
        W = numpyro.param("W", 0.1 * jnp.ones((D, Q)))
        return rows @ W, jnp.full((len(rows), Q), 0.2)

    model = partial(stochastic, batch=4, likelihood=lambda m, _: likelihoods.Poisson(m))
    guide = ogp.AutoSparseGP(model, latents={"X": encoder}, residual="tight")
    svi = SVI(model, guide, optax.adam(0.05), TraceMeanField_ELBO())
    result = svi.run(KEY, 200, Y, [Z, Z[:2] + 0.3], progress_bar=False)
    assert result.params["W"].shape == (D, Q) and "X_loc" not in result.params
    assert jnp.isfinite(result.losses).all() and result.losses[-50:].mean() < result.losses[:50].mean()


def test_hand_written_guide_and_draws_only(problem):
    Y, loc, scale, Z = problem
    seen = []

    def model(Y, Z):
        X = ogp.latent_inputs("X", N, Q)
        seen.append(X)
        numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(1.0), X, Z, 0.4), obs=Y)

    def guide(Y, Z, analytic=True):
        ogp.latent_inputs_posterior("X", numpyro.param("X_loc", jnp.asarray(loc)), scale, analytic=analytic)

    exact = elbo(model, guide, Y, Z)
    assert seen[-1].scale is not None
    analytic = elbo(model, guide, Y, Z, objective=Trace_ELBO(num_particles=3000))
    assert abs(exact - analytic) < 0.5  # only log p(X) - log q(X) is averaged
    draws = partial(guide, analytic=False)
    averaged = elbo(model, draws, Y, Z, objective=TraceMeanField_ELBO(num_particles=3000))
    assert seen[-1].scale is None
    assert averaged > exact + 1  # E log p(y | X) with a q(u) for each X is at least the bound with one q(u)


def test_importance_weights_are_refused(problem):
    Y, loc, scale, Z = problem
    with pytest.raises(ValueError, match="RenyiELBO weighs particles by importance"):
        elbo(gplvm, guide_at(gplvm, loc, scale), Y, Z, objective=RenyiELBO(num_particles=2))
    value = elbo(gplvm, guide_at(gplvm, loc, scale, analytic=False), Y, Z, objective=RenyiELBO(num_particles=2))
    assert np.isfinite(value)


# ---------------------------------------------------------------- all of NumPyro


def test_values_flow_into_the_ordinary_bound(problem, rng):
    Y, loc, _, Z = problem
    X = jnp.asarray(loc)
    expected = ogp.CollapsedGP(
        1.3 * kernels.RBF(jnp.array([0.9, 1.4])), X, Z, 0.4, bound="titsias2009", jitter=0.0
    ).log_prob(Y)
    np.testing.assert_allclose(
        log_density(gplvm, (Y, Z), {}, {"X": X})[0], expected + dist.Normal().log_prob(X).sum(), rtol=1e-10
    )
    with (
        handlers.seed(rng_seed=0),
        handlers.condition(data={"X": X}),
        handlers.scope(prefix="a"),
        handlers.trace() as tr,
    ):
        gplvm(Y, Z)
    assert set(tr) == {"a/X", "a/y"}
    found = log_likelihood(gplvm, {"X": X[None]}, Y, Z)["y"]
    np.testing.assert_allclose(found[0], expected, rtol=1e-10)


@pytest.mark.slow
def test_nuts_and_other_guides(problem):
    Y, _, _, Z = problem
    mcmc = MCMC(NUTS(gplvm), num_warmup=100, num_samples=100, progress_bar=False)
    mcmc.run(KEY, Y, Z)
    draws = mcmc.get_samples()["X"]
    assert draws.shape == (100, N, Q) and jnp.isfinite(draws).all()
    guide = AutoNormal(partial(stochastic, batch=4))
    svi = SVI(guide.model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    assert jnp.isfinite(svi.run(KEY, 50, Y, Z, progress_bar=False).losses).all()


def test_predictive(problem):
    Y, loc, scale, Z = problem
    guide = guide_at(stochastic, loc, scale)
    svi = SVI(stochastic, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params = svi.get_params(jax.jit(lambda: svi.init(KEY, Y, Z))())
    draws = Predictive(guide, params=params, num_samples=400)(KEY, Y, Z)
    np.testing.assert_allclose(draws["X"].mean(0), loc, atol=5 * 0.6 / 20)
    np.testing.assert_allclose(draws["X"].std(0), scale, rtol=0.25)
    medians = guide.median(params)
    np.testing.assert_array_equal(medians["X"], loc)
    prior = Predictive(gplvm, num_samples=3)(KEY, Y, Z)
    assert prior["X"].shape == (3, N, Q)


def test_prior_of_the_user(problem):
    Y, loc, scale, Z = problem

    def model(Y, Z, prior):
        X = ogp.latent_inputs("X", N, Q, prior=prior)
        numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(1.0), X, Z, 0.4), obs=Y)

    base = elbo(model, guide_at(model, loc, scale), Y, Z, None)
    shifted = elbo(model, guide_at(model, loc, scale), Y, Z, dist.Normal(jnp.ones((N, Q)), 2.0).to_event(1))
    q, p0 = dist.Normal(loc, scale), dist.Normal(0.0, 1.0)
    kl = dist.kl_divergence(q, p0).sum() - dist.kl_divergence(q, dist.Normal(1.0, 2.0)).sum()
    np.testing.assert_allclose(shifted - base, kl, rtol=1e-8)


def test_float32(rng):
    Y, loc = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((N, D), (N, Q)))
    guide = ogp.AutoSparseGP(gplvm, latents={"X": (loc, 0.3)})
    kernel = kernels.RBF(jnp.float32(1.0))

    def value(Y, loc):
        kwargs = {"kernel": kernel, "noise": jnp.float32(0.4), "jitter": None}
        params = {"X_loc": loc, "X_scale": jnp.full_like(loc, 0.3)}
        svi = SVI(gplvm, guide, optax.sgd(0.1), TraceMeanField_ELBO())
        svi.init(KEY, Y, loc[:M], **kwargs)
        return TraceMeanField_ELBO().loss(KEY, params, gplvm, guide, Y, loc[:M], **kwargs)

    single = value(Y, loc)
    guide = ogp.AutoSparseGP(gplvm, latents={"X": (loc.astype(float), 0.3)})
    double = value(Y.astype(float), loc.astype(float))
    np.testing.assert_allclose(single, double, rtol=1e-4)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"num": 0, "dim": 2}, "`num` must be a positive integer; got 0"),
        ({"num": 3, "dim": 2.0}, "`dim` must be a positive integer; got 2.0"),
        (
            {"num": 3, "dim": 2, "prior": dist.Normal(0.0, 1.0)},
            r"`prior` must be a distribution of rows, event shape \(2,\)",
        ),
    ],
)
def test_errors_of_latent_inputs(kwargs, message):
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=message):
        ogp.latent_inputs("X", **kwargs)


def test_errors_of_plates_and_shapes(problem):
    Y, loc, scale, Z = problem
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match="invalid shape"), numpyro.plate("rows", N + 1):
        ogp.latent_inputs("X", N, Q)
    rows = dist.Normal(jnp.zeros((N, Q)), 1.0).to_event(1)
    with (
        handlers.seed(rng_seed=0),
        pytest.raises(ValueError, match="picks 4 rows"),
        numpyro.plate("rows", N, subsample_size=4),
    ):
        ogp.latent_inputs("X", N, Q, prior=rows)

    def short(Y, Z):
        ogp.latent_inputs_posterior("X", loc[:4], scale[:4])

    with pytest.raises(
        ValueError, match=r"shapes \(4, 2\) and \(4, 2\); the model's latent inputs have shape \(9, 2\)"
    ):
        elbo(gplvm, short, Y, Z)
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=r"`loc` must have shape \(B, D\)"):
        ogp.latent_inputs_posterior("X", loc[0], scale[0])
    with pytest.raises(ValueError, match=r"`latents\['X'\]` must have shape \(9, 2\)"):
        elbo(gplvm, ogp.AutoSparseGP(gplvm, latents={"X": loc[:4]}), Y, Z)
    with pytest.raises(ValueError, match="Unknown `latents key` 'x'; known are 'X'"):
        elbo(gplvm, ogp.AutoSparseGP(gplvm, latents={"x": loc}), Y, Z)

    def nested(Y, Z):
        with numpyro.plate("outer", 2, dim=-2), numpyro.plate("rows", N):
            ogp.latent_inputs("X", N, Q)

    with pytest.raises(ValueError, match="at most one plate"):
        elbo(nested, ogp.AutoSparseGP(nested), Y, Z)


@dataclass(frozen=True)
class Shifted:
    """A feature that is not points, as far as the library can see."""

    inner: ogp.InducingPoints

    num = property(lambda self: self.inner.num)
    dtype = property(lambda self: self.inner.dtype)

    def covariance(self, kernel, other):
        return self.inner.covariance(kernel, other.inner)

    def covariance_with_inputs(self, kernel, X):
        return self.inner.covariance_with_inputs(kernel, X)


def test_errors_of_collapsed_bounds_with_latent_inputs(problem):
    Y, loc, scale, Z = problem
    X = ogp.LatentInputs(jnp.asarray(loc), jnp.asarray(loc), jnp.asarray(scale))
    with pytest.raises(ValueError, match="bound='fitc' has no closed form"):
        ogp.CollapsedGP(kernels.RBF(1.0), X, Z, 0.4, bound="fitc")
    with pytest.raises(ValueError, match="`upper_bound` needs known inputs"):
        ogp.CollapsedGP(kernels.RBF(1.0), X, Z, 0.4).upper_bound(Y)
    with pytest.raises(TypeError, match="`inducing` must be inducing points, whose kernel expectations are known"):
        ogp.CollapsedGP(kernels.RBF(1.0), X, Shifted(ogp.InducingPoints(Z)), 0.4).log_prob(Y)
    with pytest.raises(ValueError, match="must not have a leading axis"):
        ogp.CollapsedGP(kernels.RBF(jnp.ones((D, 1))), X, Z, 0.4)


# ---------------------------------------------------------------- real data


@pytest.mark.slow
def test_oil_flow(data):
    """Titsias and Lawrence 2010, Sec. 4.1: classes that no fit saw are apart; and the stochastic version gets as far."""
    from benchmarks import oil_flow

    with np.load(data / "three_phase_oil_flow.npz") as file:
        Y, label = jnp.asarray(file["X"]), file["label"]
    Y = Y - Y.mean(0)
    found = {}
    for name, fit in oil_flow.fits(Y, init.pca(Y, 10), oil_flow.parser().parse_args(["--data", "-"])):
        found[name] = fit.bound, fit.error(label)
    assert found["titsias2009"][1] <= 3 and found["titsias2025"][1] <= 3
    # From the same start, so that it is the bounds that are compared and not two local optima.
    assert found["titsias2025, continued"][0] > found["titsias2009, continued"][0]
    for residual in ("prior", "tight"):
        assert found[f"minibatches, {residual}, continued"][0] > 0.95 * found["titsias2009"][0]
    assert found["minibatches, prior"][0] > 0.8 * found["titsias2009"][0]
