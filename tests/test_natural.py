"""Natural gradients: the step's formula, optima of conjugate models, another library's values, and what holds at the edges."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.gaussians.family import Diagonal, Full
from numpyro_orthgp.gaussians.natural_step import precondition
from numpyro_orthgp.primitives import functions
from tests import oracles, problems

NOISE = 0.3
natural_step = jax.jit(lambda q, gradient, rate: q.natural_step(gradient, rate))


def natural_svi(model, optimizer=None, *, rate=1.0, ramp_up=0, mean_only=None, **options):
    optimizer = ogp.natural_gradient(optimizer or optax.sgd(0.0), rate, ramp_up=ramp_up, mean_only=mean_only)
    return SVI(model, ogp.AutoSparseGP(model, natural=True, **options), optimizer, TraceMeanField_ELBO())


def run(svi, steps, *args, init_params=None, **kwargs):
    """The state after some steps, and the losses before each of them and after the last."""

    @jax.jit
    def whole():
        state = svi.init(jax.random.PRNGKey(0), *args, init_params=init_params, **kwargs)
        state, losses = jax.lax.scan(lambda s, _: svi.update(s, *args, **kwargs), state, None, length=steps)
        return state, jnp.append(losses, svi.evaluate(state, *args, **kwargs))

    state, losses = whole()
    return state, np.asarray(losses)


# ---------------------------------------------------------------- the formula


def dense_step(m, S, g_m, g_S, rate):
    """theta <- theta - rate dL/d eta, written with inverses: theta = (S^-1 m, -S^-1 / 2), eta = (m, S + m m')."""
    precision = np.linalg.inv(S)
    theta_1 = precision @ m - rate * (g_m - 2 * g_S @ m)
    theta_2 = -precision / 2 - rate * g_S
    S = np.linalg.inv(-2 * theta_2)
    return S @ theta_1, S


def random_step(seed, M, dtype=float):
    rng = np.random.default_rng(seed)
    m, T = problems.random_q(rng, M)
    g_S = rng.normal(size=(M, M))
    g_S = g_S + g_S.T
    g_m = rng.normal(size=M)
    gradient = Full(jnp.asarray(g_m, dtype), jnp.asarray(np.tril(2 * g_S @ T), dtype))  # of a function of T T'
    return Full(jnp.asarray(m, dtype), jnp.asarray(T, dtype)), gradient, (m, T @ T.T, g_m, g_S)


def test_full_step_is_the_step_in_natural_parameters():
    q, gradient, dense = random_step(0, 5)
    after = natural_step(q, gradient, 0.02)
    m, S = dense_step(*dense, 0.02)
    assert_allclose(after.loc, m, rtol=1e-10)
    assert_allclose(after.scale_tril @ after.scale_tril.T, S, rtol=1e-10, atol=1e-12)
    assert_allclose(
        after.scale_tril, np.linalg.cholesky(S), rtol=1e-9, atol=1e-12
    )  # lower triangular, positive diagonal


def test_diagonal_step_is_the_same_for_independent_variables(rng):
    m, s, g_m, g_s = rng.normal(size=4), rng.uniform(0.5, 2, 4), rng.normal(size=4), 0.1 * rng.normal(size=4)
    q, gradient = (Diagonal(jnp.asarray(a), jnp.asarray(b)) for a, b in ((m, s), (g_m, g_s)))
    after = natural_step(q, gradient, 0.3)
    for i in range(4):
        mean, variance = dense_step(
            m[i : i + 1], s[None, None, i] ** 2, g_m[i : i + 1], g_s[None, None, i] / (2 * s[i]), 0.3
        )
        assert_allclose(after.loc[i], mean[0], rtol=1e-12)
        assert_allclose(after.scale[i] ** 2, variance[0, 0], rtol=1e-12)


def test_batches_step_one_by_one():
    parts = [random_step(seed, 4)[:2] for seed in range(3)]
    q, gradient = (jax.tree.map(lambda *a: jnp.stack(a), *side) for side in zip(*parts, strict=True))
    together = natural_step(q, gradient, 5.0)  # long enough for some of them, not all, to be shortened
    for i, part in enumerate(parts):
        assert_allclose(together.loc[i], natural_step(*part, 5.0).loc, rtol=1e-10)
        assert_allclose(together.scale_tril[i], natural_step(*part, 5.0).scale_tril, rtol=1e-10, atol=1e-14)


@given(seed=st.integers(0, 10_000), log_rate=st.floats(-3, 5), size=st.sampled_from([1, 3]), double=st.booleans())
@settings(max_examples=60, deadline=None)
def test_steps_stay_in_the_cone(seed, log_rate, size, double):
    """Any gradient, any length: a proper Gaussian comes out; where the full step has one, it is the full step."""
    q, gradient, dense = random_step(seed, size, np.float64 if double else np.float32)
    rate = 10.0**log_rate
    after = natural_step(q, gradient, rate)
    diagonal = natural_step(
        Diagonal(q.loc, jnp.diagonal(q.scale_tril)),
        Diagonal(gradient.loc, jnp.diagonal(gradient.scale_tril)),
        rate,
    )
    for part in jax.tree.leaves((after, diagonal)):
        assert part.dtype == q.loc.dtype and np.isfinite(part).all()
    assert (np.diagonal(after.scale_tril) > 0).all() and (diagonal.scale > 0).all()
    precision = np.linalg.inv(dense[1]) + 2 * rate * dense[3]
    if double and np.linalg.eigvalsh(precision).min() > 1e-6 * np.abs(precision).max():
        assert_allclose(after.loc, dense_step(*dense, rate)[0], rtol=1e-6, atol=1e-8)


def test_a_shortened_step_stays_well_inside():
    """Half the way to the edge of the cone: there no variance more than doubles."""
    q, gradient, dense = random_step(0, 3)
    precision = np.linalg.inv(dense[1])
    worst = (
        -1 / np.linalg.eigvalsh(np.linalg.cholesky(dense[1]).T @ (2 * dense[3]) @ np.linalg.cholesky(dense[1])).min()
    )
    rate = 1.5 * worst
    assert np.linalg.eigvalsh(precision + 2 * rate * dense[3]).min() < 0
    after = natural_step(q, gradient, rate)
    assert_allclose(after.loc, dense_step(*dense, worst / 2)[0], rtol=1e-9)
    growth = np.linalg.eigvals(np.linalg.solve(dense[1], np.asarray(after.scale_tril @ after.scale_tril.T)))
    assert_allclose(growth.real.max(), 2, rtol=1e-9)


def test_a_broken_gradient_is_seen_and_ends():
    q, gradient, _ = random_step(0, 3)
    after = natural_step(q, Full(gradient.loc, gradient.scale_tril.at[1, 0].set(jnp.nan)), 0.1)
    assert np.isnan(after.scale_tril).any()


# ---------------------------------------------------------------- conjugate models


@pytest.mark.parametrize("start", ["prior", "random"])
def test_one_step_is_the_collapsed_optimum(rng, start):
    X, y = problems.data(rng)
    (Z,) = problems.sets(rng, [7])
    kwargs = {"inducing": jnp.asarray(Z), "likelihood": problems.gaussian(NOISE)}
    params = problems.q_params([problems.random_q(rng, 7)]) if start == "random" else None
    _, losses = run(natural_svi(problems.model), 1, jnp.asarray(X), jnp.asarray(y), init_params=params, **kwargs)
    best = oracles.titsias2009(problems.kernel_oracle("matern52"), X, y, Z, NOISE**2)
    assert losses[0] > losses[1] + 10
    assert_allclose(-losses[1], best, rtol=1e-8)


def test_one_tight_step_is_the_tight_collapsed_optimum(rng):
    X, y = problems.data(rng)
    (Z,) = problems.sets(rng, [7])
    kwargs = {"inducing": jnp.asarray(Z), "likelihood": problems.gaussian(NOISE)}
    _, losses = run(natural_svi(problems.model, residual="tight"), 1, jnp.asarray(X), jnp.asarray(y), **kwargs)
    assert_allclose(-losses[1], oracles.titsias2025(problems.kernel_oracle("matern52"), X, y, Z, NOISE**2), rtol=1e-8)


@pytest.mark.parametrize("sizes", [[6, 5], [4, 4, 3]])
def test_orthogonal_sets_reach_their_joint_optimum(rng, sizes):
    """Each set steps by itself; together they descend to the best of all sets: that of the union's structured q."""
    X, y = problems.data(rng, 40)
    Zs = problems.sets(rng, sizes)
    kwargs = {"inducing": [jnp.asarray(Z) for Z in Zs], "likelihood": problems.gaussian(NOISE)}
    state, losses = run(natural_svi(problems.model, rate=0.7), 300, jnp.asarray(X), jnp.asarray(y), **kwargs)
    assert (np.diff(losses[:10]) < 0).all()
    params = natural_svi(problems.model).optim.get_params(state.optim_state)
    values = {name: getattr(v, "value", v) for name, v in params.items()}
    gradient = jax.grad(lambda p: problems.loss(p, jnp.asarray(X), jnp.asarray(y), **kwargs))(
        {n: v for n, v in values.items() if ".u" in n}
    )
    for name, g in gradient.items():
        assert np.abs(g).max() < 1e-7, name
    if len(sizes) == 2:
        oracle, m = problems.kernel_oracle("matern52"), oracles.solvegp_optimal_qv
        m_v, S_v = m(oracle, X, y, Zs[0], Zs[1], NOISE**2)
        assert_allclose(
            -losses[-1], oracles.solvegp_collapsed(oracle, X, y, Zs[0], Zs[1], NOISE**2, m_v, S_v), rtol=1e-8
        )


def test_diagonal_covariance_reaches_its_optimum(rng):
    X, y = (jnp.asarray(a) for a in problems.data(rng))
    kwargs = {"inducing": jnp.asarray(problems.sets(rng, [6])[0]), "likelihood": problems.gaussian(NOISE)}
    svi = natural_svi(problems.model, rate=0.3, covariance="diagonal")
    state, losses = run(svi, 400, X, y, **kwargs)
    params = {n: v for n, v in svi.get_params(state).items() if ".u" in n}
    gradient = jax.jit(jax.grad(lambda p: problems.loss(p, X, y, covariance="diagonal", **kwargs)))(params)
    assert all(np.abs(g).max() < 1e-6 for g in gradient.values()) and losses[-1] < losses[0]


def test_latent_functions_step_one_by_one(rng):
    """P functions with outputs of their own: the optimum of each, in one step."""
    X, _ = problems.data(rng)
    (Z,) = problems.sets(rng, [6])
    Y = rng.normal(size=(len(X), 3))
    kwargs = {"inducing": jnp.asarray(Z), "likelihood": problems.gaussian(NOISE), "num_latents": 3, "to_event": 1}
    _, losses = run(natural_svi(problems.model), 1, jnp.asarray(X), jnp.asarray(Y), **kwargs)
    best = sum(oracles.titsias2009(problems.kernel_oracle("matern52"), X, Y[:, p], Z, NOISE**2) for p in range(3))
    assert_allclose(-losses[1], best, rtol=1e-8)


def test_float32_steps_stay_float32_and_land_close(rng):
    X, y = problems.data(rng)
    (Z,) = problems.sets(rng, [7])
    kwargs = {"inducing": jnp.asarray(Z, jnp.float32), "likelihood": problems.gaussian(NOISE), "jitter": None}
    svi = natural_svi(problems.model)
    state, losses = run(svi, 3, jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32), **kwargs)
    assert {v.dtype.name for n, v in svi.get_params(state).items() if ".u" in n} == {"float32"}
    best = oracles.titsias2009(problems.kernel_oracle("matern52"), X, y, Z, NOISE**2, 1e-6)
    assert_allclose(-losses[1:], best, rtol=1e-4)


# ---------------------------------------------------------------- another library's steps


@pytest.fixture(scope="module")
def load(golden):
    return lambda name: json.loads((golden / f"case09_natgrad_{name}.json").read_text())


def golden_svi(inputs, likelihood, rate):
    kernel = inputs["variance"] * getattr(kernels, inputs["kernel"])(
        jnp.asarray(inputs.get("lengthscales", inputs.get("lengthscale")))
    )

    def model(X, y):
        f = ogp.gp("f", kernel, jnp.asarray(inputs["Z"]), jitter=0.0)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihood(f(X)), obs=y)

    return natural_svi(model, rate=rate)


def start(q):
    return {"f.u0_loc": jnp.asarray(q["q_mu"])[:, 0], "f.u0_scale_tril": jnp.asarray(q["q_sqrt"])[0]}


def check_golden_q(params, expected):
    assert_allclose(params["f.u0_loc"], np.asarray(expected["q_mu"])[:, 0], rtol=1e-8, atol=1e-9)
    assert_allclose(params["f.u0_scale_tril"], np.asarray(expected["q_sqrt"])[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("q", ["whitened_default", "whitened_random"])
def test_golden_conjugate_step(load, q):
    case = load("gaussian")
    inputs, outputs = case["inputs"], case["outputs"][q]
    X, y = jnp.asarray(inputs["X"]), jnp.asarray(inputs["y"]).reshape(-1)
    svi = golden_svi(inputs, problems.gaussian(inputs["noise_variance"] ** 0.5), inputs["gamma"])
    state, losses = run(svi, 1, X, y, init_params=start(outputs["initial"]))
    assert_allclose(-losses, [outputs["elbo_0"], outputs["elbo_1"]], rtol=1e-10)
    check_golden_q(svi.get_params(state), outputs["step_1"])


@pytest.mark.parametrize("nodes", [20, 100])
@pytest.mark.parametrize("name, link", [("bernoulli_logit", "logit"), ("bernoulli_probit_exact", "probit")])
def test_golden_non_conjugate_steps(load, name, link, nodes):
    case = load(name)
    inputs, outputs = case["inputs"], case["outputs"][f"whitened_gh{nodes}"]
    X, y = jnp.asarray(inputs["X"]), jnp.asarray(inputs["y"]).reshape(-1)
    svi = golden_svi(
        inputs, lambda m: likelihoods.Bernoulli(m, link, integrator=ogp.GaussHermite(nodes)), inputs["gamma"]
    )
    state, losses = run(svi, 3, X, y, init_params=start(inputs))
    assert_allclose(-losses, [outputs[f"elbo_{i}"] for i in range(4)], rtol=1e-9)
    check_golden_q(svi.get_params(state), outputs["step_3"])


# ---------------------------------------------------------------- other likelihoods, other parameters


def classification(X, y=None, *, Z, lengthscale=None):
    if lengthscale is None:
        lengthscale = numpyro.param(
            "lengthscale", jnp.asarray(1.0), constraint=numpyro.distributions.constraints.positive
        )
    f = ogp.gp("f", 4.0 * kernels.RBF(lengthscale), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Bernoulli(f(X)), obs=y)


@pytest.fixture
def labels(rng):
    X = rng.uniform(-2, 2, (60, 2))
    return (
        jnp.asarray(X),
        jnp.asarray((np.sin(2 * X).sum(1) > 0).astype(float)),
        jnp.asarray(problems.sets(rng, [8])[0]),
    )


def test_natural_steps_beat_adam_on_labels(labels):
    X, y, Z = labels
    _, losses = run(natural_svi(classification, rate=0.5, ramp_up=3), 20, X, y, Z=Z, lengthscale=1.0)
    svi = SVI(classification, ogp.AutoSparseGP(classification), optax.adam(0.03), TraceMeanField_ELBO())
    adam = svi.run(jax.random.PRNGKey(0), 200, X, y, Z=Z, lengthscale=1.0, progress_bar=False).losses
    assert losses[-1] < adam[-1]


def test_ramp_up_shortens_the_first_steps(labels):
    X, y, Z = labels

    def first(**options):
        svi = natural_svi(classification, rate=0.5, **options)
        state, _ = run(svi, 1, X, y, Z=Z, lengthscale=1.0)
        return svi.get_params(state)["f.u0_loc"]

    expected = natural_svi(classification, rate=0.5e-4)
    state, _ = run(expected, 1, X, y, Z=Z, lengthscale=1.0)
    assert_allclose(first(ramp_up=4), expected.get_params(state)["f.u0_loc"], rtol=1e-6)
    assert np.abs(first()).max() > 100 * np.abs(first(ramp_up=4)).max()


def test_a_schedule_of_lengths(labels):
    X, y, Z = labels
    svi = natural_svi(classification, rate=optax.piecewise_constant_schedule(0.5, {1: 0.0}))
    one, two = (svi.get_params(run(svi, steps, X, y, Z=Z, lengthscale=1.0)[0])["f.u0_loc"] for steps in (1, 2))
    assert_allclose(one, two, rtol=0) and np.abs(one).max() > 0.1


def test_hyperparameters_follow_the_other_optimizer(labels):
    X, y, Z = labels
    svi = natural_svi(classification, optax.adam(0.05), rate=0.3)
    state, losses = run(svi, 60, X, y, Z=Z)
    # Adam's first step is its rate, whatever the gradient; parameters of q take natural steps meanwhile
    begin = {"f.u0_loc": jnp.linspace(-1, 1, 8)}
    one = svi.get_params(run(svi, 1, X, y, Z=Z, init_params=begin)[0])
    assert_allclose(np.abs(np.log(one["lengthscale"])), 0.05, rtol=1e-4)
    fixed = natural_svi(classification, rate=0.3)
    again = fixed.get_params(run(fixed, 1, X, y, Z=Z, init_params=begin)[0])
    assert_allclose(one["f.u0_loc"], again["f.u0_loc"], rtol=1e-10)
    assert losses[-1] < losses[0] and float(svi.get_params(state)["lengthscale"]) != 1.0


def test_likelihoods_that_are_not_log_concave_stay_finite(rng):
    """Student t far from its data: the full step has no covariance, where other optimizers stop with an error or a NaN."""
    X, y = (jnp.asarray(a) for a in problems.data(rng, 200))
    kwargs = {
        "inducing": jnp.asarray(problems.sets(rng, [8])[0]),
        "likelihood": lambda m: likelihoods.StudentT(m, 3.0, 0.1),
    }
    far = {"f.u0_loc": jnp.full(8, 3.0), "f.u0_scale_tril": 0.5 * jnp.eye(8)}
    g = jax.jit(jax.grad(lambda T: problems.loss({**far, "f.u0_scale_tril": T}, X, y + 5, **kwargs)))(
        far["f.u0_scale_tril"]
    )
    G = np.asarray(far["f.u0_scale_tril"].T @ g)
    assert np.linalg.eigvalsh(np.eye(8) + np.tril(G) + np.tril(G, -1).T).min() < 0
    for rate in (1.0, 0.1):
        _, losses = run(natural_svi(problems.model, rate=rate), 60, X, y + 5, init_params=far, **kwargs)
        assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 50  # the shorter ones


def test_bayesian_hyperparameters_and_two_gps(labels):
    X, y, Z = labels

    def model(X, y):
        lengthscale = numpyro.sample("lengthscale", numpyro.distributions.LogNormal(0.0, 0.5))
        f, g = ogp.gp("f", kernels.RBF(lengthscale), Z), ogp.gp("g", kernels.Matern52(2.0), Z[:4])
        with numpyro.plate("data", len(X)):
            numpyro.sample(
                "y", likelihoods.Bernoulli(ogp.stack([f(X), g(X)]) @ jnp.ones((2, 1))).to_event(1), obs=y[:, None]
            )

    guide = ogp.AutoSparseGP(model, natural={"f": True}, hyper=AutoNormal)
    svi = SVI(model, guide, ogp.natural_gradient(optax.adam(0.05), 0.2), TraceMeanField_ELBO())
    state, losses = run(svi, 80, X, y)
    assert losses[-20:].mean() < losses[0] - 5  # the first steps do nearly all: hyperparameters start at their medians
    kinds = {name: type(v).__name__ for name, v in svi.optim.get_params(state.optim_state).items()}
    assert {n for n, k in kinds.items() if k == "Natural"} == {"f.u0_loc", "f.u0_scale_tril"}
    assert set(svi.get_params(state)) == {
        "f.u0_loc", "f.u0_scale_tril", "g.u0_loc", "g.u0_scale_tril", "lengthscale_auto_loc", "lengthscale_auto_scale",
    }  # fmt: skip


def test_one_optimizer_goes_on_where_the_other_stopped(labels):
    X, y, Z = labels
    natural = natural_svi(classification, rate=0.3)
    state, losses = run(natural, 10, X, y, Z=Z, lengthscale=1.0)
    adam = SVI(classification, ogp.AutoSparseGP(classification), optax.adam(0.01), TraceMeanField_ELBO())
    after, later = run(adam, 20, X, y, Z=Z, lengthscale=1.0, init_params=natural.get_params(state))
    assert_allclose(later[0], losses[-1], rtol=1e-10)
    _, last = run(natural, 1, X, y, Z=Z, lengthscale=1.0, init_params=adam.get_params(after))
    assert_allclose(last[0], later[-1], rtol=1e-10)


# ---------------------------------------------------------------- mean-only points


def mean_only(X, y=None, *, Z, points):
    f = ogp.gp("f", kernels.Matern52(0.9), [Z, ogp.MeanOnly(points)])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)


@pytest.mark.parametrize("exact", [True, False])
def test_gradients_of_weights_are_preconditioned(rng, monkeypatch, exact):
    """Salimbeni et al. 2018: Eq. 16a for few points, Eq. 17 for many."""
    X, y = (jnp.asarray(a) for a in problems.data(rng))
    Z, points = (jnp.asarray(s) for s in problems.sets(rng, [5, 6]))
    if not exact:
        monkeypatch.setattr(functions, "MAX_EXACT_FISHER", 5)

    def gradient(natural):
        guide = ogp.AutoSparseGP(mean_only, natural=natural)
        loss = lambda w: TraceMeanField_ELBO().loss(  # noqa: E731
            jax.random.PRNGKey(0), {"f.u1_weights": w}, mean_only, guide, X, y, Z=Z, points=points
        )
        return jax.jit(jax.grad(loss))(jnp.linspace(-1, 1, 6))

    k = oracles.matern52(1.0, 0.9)
    C = oracles.orthogonal_process(k, np.asarray(Z))(np.asarray(points), np.asarray(points))
    fisher = C if exact else np.diag(np.diag(C))
    assert_allclose(gradient(True), np.linalg.solve(fisher, gradient(False)), rtol=1e-5)


def test_natural_steps_converge_for_a_decoupled_basis(rng):
    """Where other libraries' natural gradients of decoupled bases break down: the best mean of both bases is found."""
    X, y = (jnp.asarray(a) for a in problems.data(rng, 60))
    Z, points = (jnp.asarray(s) for s in problems.sets(rng, [5, 8]))
    svi = natural_svi(mean_only, rate=0.5, mean_only=optax.adam(optax.exponential_decay(0.3, 200, 0.3)))
    state, losses = run(svi, 1500, X, y, Z=Z, points=points)
    params = svi.get_params(state)
    assert np.isfinite(losses).all()
    # the dense optimum: S of the first set by itself, both means jointly
    k, s2 = oracles.matern52(1.0, 0.9), NOISE**2
    L = np.linalg.cholesky(k(np.asarray(Z), np.asarray(Z)))
    A = np.linalg.solve(L, k(np.asarray(Z), np.asarray(X)))
    perp = oracles.orthogonal_process(k, np.asarray(Z))
    B, C = perp(np.asarray(points), np.asarray(X)), perp(np.asarray(points), np.asarray(points))
    both = np.vstack([A, B])
    H = both @ both.T / s2 + np.block([[np.eye(5), np.zeros((5, 8))], [np.zeros((8, 5)), C]])
    best = np.linalg.solve(H, both @ np.asarray(y) / s2)
    assert_allclose(both.T @ np.append(params["f.u0_loc"], params["f.u1_weights"]), both.T @ best, atol=2e-3)
    assert_allclose(
        params["f.u0_scale_tril"] @ params["f.u0_scale_tril"].T,
        np.linalg.inv(np.eye(5) + A @ A.T / s2),
        rtol=1e-4,
        atol=1e-7,
    )


def test_preconditioning_leaves_values_and_other_gradients_alone(rng):
    root = jnp.asarray(rng.normal(size=(2, 3, 3)))
    weights = jnp.asarray(rng.normal(size=(2, 3)))
    assert_allclose(precondition(weights, root, False), weights, rtol=0)
    g_w, g_root = jax.grad(lambda w, r: jnp.sum(precondition(w, r, False) ** 2), (0, 1))(weights, root)
    assert_allclose(g_w, np.einsum("pkh,pkl,pl->ph", root, root, 2 * weights), rtol=1e-12)
    assert_allclose(g_root, 0)


# ---------------------------------------------------------------- what is refused


def test_mistakes_are_named(labels):
    X, y, Z = labels
    with pytest.raises(TypeError, match=r"`others` must be an optimizer.*got float"):
        ogp.natural_gradient(0.1, optax.adam(0.1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`learning_rate` must be positive; got 0"):
        ogp.natural_gradient(optax.adam(0.1), 0)
    with pytest.raises(ValueError, match=r"`ramp_up` must be a number of steps.*got -1"):
        ogp.natural_gradient(optax.adam(0.1), 0.1, ramp_up=-1)
    optimizer = ogp.natural_gradient(optax.adam(0.1), 0.1)
    for options in ({}, {"natural": True, "covariance": "prior"}):
        svi = SVI(classification, ogp.AutoSparseGP(classification, **options), optimizer, TraceMeanField_ELBO())
        with pytest.raises(ValueError, match=r"found no Gaussian to step.*natural=True"):
            svi.init(jax.random.PRNGKey(0), X, y, Z=Z)
    with pytest.raises(ValueError, match=r"Unknown `natural key` 'g'; known are 'f'"):
        ogp.AutoSparseGP(classification, natural={"g": True})(X, y, Z=Z)
    params = {"f.u0_loc": jnp.zeros(2)}
    with pytest.raises(ValueError, match=r"needs the parameters"):
        optimizer.update(params, None)
