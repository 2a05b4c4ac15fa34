"""The long format: each row at its task's function, beside the wide format, dense formulas and an exact GP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import Tasks, kernels, likelihoods
from numpyro_orthgp.functions import separate
from tests import oracles, problems

T, N, D, M = 3, 17, 2, 4
VARIANCE, LENGTHSCALE = np.array([1.3, 0.7, 2.0]), np.array([0.9, 1.4, 0.6])
NOISE = np.array([0.3, 0.5, 0.4])
W = np.array([[1.0, -0.6, 0.2, 0.5], [0.4, 0.9, -1.1, 0.1], [-0.3, 0.2, 0.8, 2.0]])  # (L, 4 tasks)
OWN = np.array([0.5, 0.2, 0.7, 1.0])
V = np.array([0.5, 0.8, 0.3])
KEY = jax.random.PRNGKey(0)
SEPARATE = jnp.asarray(VARIANCE) * kernels.Matern52(jnp.asarray(LENGTHSCALE)[:, None])


@pytest.fixture
def X(rng):
    return jnp.asarray(rng.uniform(-2, 2, (N, D)))


@pytest.fixture
def task(rng):
    return jnp.asarray(rng.integers(0, T, N))


def random_f(rng, kernel=SEPARATE, num=T, *, sets=((M, D),), points=None, dtype=float, mean_only=False):
    """A function of ``num`` latent ones with a random q of each."""
    points = points or [jnp.asarray(rng.uniform(-2, 2, shape), dtype) for shape in sets]
    params, nums = {}, [Z.shape[-2] for Z in points]
    for i, size in enumerate(nums):
        qs = [problems.random_q(rng, size) for _ in range(num)]
        params[f"f.u{i}_loc"] = jnp.asarray(np.stack([m for m, _ in qs]), dtype)
        params[f"f.u{i}_scale_tril"] = jnp.asarray(np.stack([S for _, S in qs]), dtype)
    if mean_only:
        points.append(ogp.MeanOnly(jnp.asarray(rng.uniform(-2, 2, (num, 5, D)))))
        params[f"f.u{len(nums)}_weights"] = jnp.asarray(rng.normal(size=(num, 5)))

    def model():
        return ogp.gp("f", kernel, points, num_latents=num)

    return ogp.posterior(model, ogp.AutoSparseGP(model), params)["f"]


def picked(values, task):
    return np.asarray(values)[np.arange(len(task)), np.asarray(task)]


def assert_picked(m, wide, task, rtol=1e-9):
    for name in ("mean", "variance", "explained_variance", "residual_variance"):
        np.testing.assert_allclose(getattr(m, name), picked(getattr(wide, name), task), rtol=rtol, atol=rtol)


# ---------------------------------------------------------------- each row at a function of its own


def plain(X1, X2=None):
    """A function of two inputs that has an axis of three functions."""
    K = kernels.RBF(1.0)(X1) if X2 is None else kernels.RBF(1.0)(X1, X2)
    return jnp.asarray(VARIANCE)[(...,) + (None,) * K.ndim] * K


def holding(lengthscale):
    """One kernel for all functions."""
    return lambda X1, X2=None: kernels.RBF(lengthscale)(*(X for X in (X1, X2) if X is not None))


KERNELS = {
    "shared": kernels.RBF(0.8),
    "separate": SEPARATE,
    "as many columns as functions": kernels.RBF(jnp.array([0.5, 0.9, 1.4])).on([0, 1, 0]) * jnp.asarray(VARIANCE),
    "both": kernels.RBF(jnp.array([0.5, 0.9, 1.4])).on([0, 1, 0])
    + kernels.Matern32(jnp.ones((3, 3)) * jnp.array([[0.4], [1], [2]])).on([0, 1, 1]) * 0.5,
    "loadings of three tasks": kernels.Coregion(jnp.asarray(W[:, :2]), jnp.asarray(V)).on(0) * SEPARATE.on(1),
    "lists": 2.0 * kernels.RBF([[0.5], [0.7], [1.2]]),
    "a function": plain,
    "a function that holds arrays": holding(jnp.array([0.8])),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_rows_have_the_marginals_of_their_functions(rng, X, task, kernel):
    X = X.at[:, 0].set(jnp.asarray(rng.integers(0, 3, N)))  # which one of the kernels takes for tasks
    f = random_f(rng, kernel, points=[X[:M]])
    m, wide = jax.jit(lambda f, X, task: (f(Tasks(X, task)), f(X)))(f, X, task)
    assert m.shape == (N,)
    assert_picked(m, wide, task)


@pytest.mark.parametrize("mean_only", [False, True])
def test_several_sets_some_of_each_functions_own(rng, X, task, mean_only):
    f = random_f(rng, sets=((T, M, D), (3, D)), mean_only=mean_only)
    assert_picked(f(Tasks(X, task)), f(X), task)
    assert_picked(f.diagonalized()(Tasks(X, task)), f(X), task)


def test_float32_stays_float32(rng, X, task):
    kernel = jnp.asarray(VARIANCE, jnp.float32) * kernels.Matern52(jnp.asarray(LENGTHSCALE, jnp.float32)[:, None])
    f, X = random_f(rng, kernel, dtype=jnp.float32), X.astype(jnp.float32)
    m = f(Tasks(X, task))
    assert m.mean.dtype == m.variance.dtype == jnp.float32
    assert_picked(m, f(X), task, rtol=1e-4)
    assert f(Tasks(X, task, W.astype(np.float32))).mean.dtype == jnp.float32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_blocks_have_each_row_once_and_one_function(which):
    which = np.array(which)
    rows, places, functions = separate._arranged(jnp.asarray(which), 5)
    assert (np.asarray(rows).ravel()[np.asarray(places)] == np.arange(len(which))).all()
    assert len(set(np.asarray(places).tolist())) == len(which)
    assert (np.asarray(functions)[np.asarray(places) // rows.shape[1]] == which).all()
    assert rows.size <= 1.5 * len(which) + 5


def test_many_rows_in_blocks(rng, monkeypatch):
    monkeypatch.setattr(separate, "MAX_ENTRIES", 100)
    f = random_f(rng)
    X, task = jnp.asarray(rng.uniform(-2, 2, (700, D))), jnp.asarray(rng.integers(0, T, 700))
    assert_picked(f(Tasks(X, task)), f(X), task)


def test_cost_is_that_of_one_function(rng):
    """Sixteen functions: the wide format takes sixteen times as many operations, blocks at most twice those of one."""
    P, B, size = 16, 512, 64
    Z, kernel = jnp.asarray(rng.uniform(-2, 2, (size, 1))), kernels.RBF(jnp.linspace(0.5, 2, P)[:, None])
    params = {"f.u0_loc": jnp.zeros((P, size)), "f.u0_scale_tril": jnp.stack([jnp.eye(size)] * P)}

    def model():
        return ogp.gp("f", kernel, Z)

    f = ogp.posterior(model, ogp.AutoSparseGP(model), params)["f"]
    X, task = jnp.asarray(rng.uniform(-2, 2, (B, 1))), jnp.asarray(rng.integers(0, P, B))

    def flops(function):
        return jax.jit(function).lower(f, X, task).compile().cost_analysis()["flops"]

    long, wide = flops(lambda f, X, task: f(Tasks(X, task)).variance), flops(lambda f, X, task: f(X).variance)
    assert long < wide / 8


def test_functionals_and_terms_of_tasks(rng, X, task):
    f = random_f(rng, SEPARATE.named("a") + kernels.RBF(1.7).named("b"))
    for L in (
        ogp.Derivative(X, 0),
        ogp.Average(jnp.stack([X, X + 0.3], 1)),
        ogp.concatenate([X[:5], ogp.Derivative(X[5:], 1)]),
        f.term("a").at(X),
    ):
        m, wide = jax.jit(lambda f, L, task: (f(Tasks(L, task)), f(L)))(f, L, task)
        assert_picked(m, wide, task, rtol=1e-8)
    assert_picked(f.term("b")(Tasks(X, task)), f.term("b")(X), task)


# ---------------------------------------------------------------- mixtures


def test_mixtures_are_columns_of_the_wide_format(rng, X):
    f, task = random_f(rng), jnp.asarray(rng.integers(0, 4, N))
    assert_picked(f(Tasks(X, task, W)), f(X) @ jnp.asarray(W), task)


@pytest.mark.parametrize("own", [OWN, 0.4], ids=["each", "one"])
def test_a_function_of_each_task_besides(rng, X, own):
    kernel = jnp.linspace(0.5, 2.0, 7) * kernels.RBF(jnp.linspace(0.4, 1.5, 7)[:, None])
    f, task = random_f(rng, kernel, 7), jnp.asarray(rng.integers(0, 4, N))
    stacked = jnp.concatenate([jnp.asarray(W), jnp.eye(4) * own])
    m = f(Tasks(X, task, W, own))
    assert m.num_latents == 4
    assert_picked(m, f(X) @ stacked, task)


def test_joint_distributions_draws_and_paths(rng, X, task):
    f = random_f(rng)
    few, which = X[:6], jnp.array([0, 1, 1, 0, 2, 1])
    joint = f.joint(Tasks(few, which))
    C = f.joint(few).covariance_matrix
    expected = np.where(which[:, None] == which, np.asarray(C)[np.asarray(which), np.arange(6)], 0)
    np.testing.assert_allclose(joint.covariance_matrix, expected, atol=1e-8)
    mixed = f.joint(Tasks(few, which, W))
    seen = jnp.asarray(W)[:, which]
    np.testing.assert_allclose(mixed.covariance_matrix, jnp.einsum("pi,pj,pij->ij", seen, seen, C), atol=1e-8)
    np.testing.assert_allclose(mixed.mean, f(Tasks(few, which, W)).mean, atol=1e-12)
    paths = f.sample_paths(KEY, 3, num_features=16)
    np.testing.assert_allclose(paths(Tasks(few, which)), np.asarray(paths(few))[:, np.arange(6), which], rtol=1e-12)
    np.testing.assert_allclose(
        paths(Tasks(few, which, W)), np.einsum("sbp,pb->sb", paths(few), seen), rtol=1e-9, atol=1e-9
    )
    draws = f(Tasks(few, which)).sample(KEY, (4000,))
    z = (draws.mean(0) - joint.mean) / jnp.sqrt(joint.variance / 4000)
    assert np.abs(z).max() < 4
    np.testing.assert_allclose(np.cov(draws.T), joint.covariance_matrix, atol=0.12 * float(joint.variance.max()))


def test_draws_of_one_run_are_of_one_function(rng, X, task):
    def model():
        f = ogp.gp("f", SEPARATE, X[::4])
        numpyro.deterministic("apart", picked_now(f(X).sample(), task) - f(Tasks(X, task)).sample())

    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.1), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(KEY))
    with numpyro.handlers.seed(rng_seed=1):
        trace = numpyro.handlers.trace(numpyro.handlers.substitute(guide, params)).get_trace()
        run = numpyro.handlers.trace(numpyro.handlers.replay(numpyro.handlers.seed(model, 2), trace)).get_trace()
    assert np.abs(run["apart"]["value"]).max() < 1e-9


def picked_now(values, task):
    return jnp.take_along_axis(values, task[:, None], 1)[:, 0]


# ---------------------------------------------------------------- bounds


def long_model(X, task, y=None, *, Z, likelihood=likelihoods.Gaussian, num_data=None, mixing=None):
    f = ogp.gp("f", SEPARATE, Z)
    m = f(Tasks(X, task, mixing))
    noise = jnp.asarray(np.resize(NOISE, 4))
    with numpyro.plate("data", num_data or len(X), subsample_size=len(X)):
        numpyro.sample("y", likelihood(m, noise[task]), obs=y)


def wide_model(X, Y, seen, *, Z, likelihood=likelihoods.Gaussian, mixing=None):
    f = ogp.gp("f", SEPARATE, Z)
    m = f(X) if mixing is None else f(X) @ mixing
    P = m.shape[1]
    noise = jnp.asarray(np.resize(NOISE, P))
    with numpyro.plate("data", len(X), dim=-2), numpyro.plate("tasks", P, dim=-1):
        numpyro.sample("y", likelihood(m, noise).mask(seen), obs=Y)


def student(m, scale):
    return likelihoods.StudentT(m, 4.0, scale)


@pytest.mark.parametrize("mixing", [None, W], ids=["independent", "mixed"])
@pytest.mark.parametrize("residual", ["prior", "tight"])
@pytest.mark.parametrize("likelihood", [likelihoods.Gaussian, student], ids=["gaussian", "student"])
def test_bound_and_gradient_are_those_of_the_wide_format_with_missing_outputs(rng, X, residual, likelihood, mixing):
    P = T if mixing is None else 4
    Y, seen = rng.normal(size=(N, P)), rng.uniform(size=(N, P)) < 0.6
    seen[:, 1] = False  # a task without rows
    rows, task = np.nonzero(seen)
    Z = jnp.asarray(rng.uniform(-2, 2, (M, D)))
    qs = [problems.random_q(rng, M) for _ in range(T)]
    params = {"f.u0_loc": jnp.stack([m for m, _ in qs]), "f.u0_scale_tril": jnp.stack([S for _, S in qs])}
    if residual == "tight":
        params["f_residual_scale"] = jnp.asarray(V)
    kwargs = {"Z": Z, "likelihood": likelihood, "mixing": None if mixing is None else jnp.asarray(mixing)}

    def loss(model, *args):
        guide = ogp.AutoSparseGP(model, residual=residual)
        return jax.jit(
            jax.value_and_grad(lambda params: TraceMeanField_ELBO().loss(KEY, params, model, guide, *args, **kwargs))
        )(params)

    long = loss(long_model, X[rows], jnp.asarray(task), jnp.asarray(Y[rows, task]))
    wide = loss(wide_model, X, jnp.asarray(Y), jnp.asarray(seen))
    np.testing.assert_allclose(long[0], wide[0], rtol=1e-10)
    for name, gradient in wide[1].items():
        np.testing.assert_allclose(long[1][name], gradient, rtol=1e-7, atol=1e-9)


def test_bound_of_independent_functions_by_the_formula(rng, X, task):
    Z, y = rng.uniform(-2, 2, (M, D)), rng.normal(size=N)
    qs = [problems.random_q(rng, M) for _ in range(T)]
    params = {"f.u0_loc": jnp.stack([m for m, _ in qs]), "f.u0_scale_tril": jnp.stack([S for _, S in qs])}

    def model(X, task, y):
        f = ogp.gp("f", SEPARATE, jnp.asarray(Z), jitter=0.0)
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihoods.Gaussian(f(Tasks(X, task)), jnp.asarray(NOISE)[task]), obs=y)

    guide = ogp.AutoSparseGP(model)
    loss = jax.jit(lambda p: TraceMeanField_ELBO().loss(KEY, p, model, guide, X, task, jnp.asarray(y)))(params)
    expected = 0.0
    for t, q in enumerate(qs):
        rows, k = np.asarray(task) == t, oracles.matern52(VARIANCE[t], LENGTHSCALE[t])
        sets = problems.oracle_sets([Z], [q])
        expected += oracles.elbo_gaussian(k, sets, np.asarray(X)[rows], y[rows], NOISE[t] ** 2)
    np.testing.assert_allclose(-loss, expected, rtol=1e-9)


def natural_fit(model, *args, steps=1, **kwargs):
    guide = ogp.AutoSparseGP(model, natural=True)
    svi = SVI(model, guide, ogp.natural_gradient(optax.adam(1e-2), 1.0), TraceMeanField_ELBO())
    params = svi.run(KEY, steps, *args, progress_bar=False, **kwargs).params
    return ogp.posterior(model, guide, params, *args, **kwargs)["f"], guide, params


def test_independent_functions_beside_an_exact_gp_for_each(rng):
    """M = N, one natural step; task 1 has no rows and keeps its prior."""
    X, y = np.linspace(-2.0, 2.0, 12)[:, None], rng.normal(size=12)
    task, at = np.array([0, 2] * 6), np.linspace(-2.5, 2.5, 7)[:, None]

    def model(X, task, y):
        f = ogp.gp("f", SEPARATE, X, jitter=1e-13)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(Tasks(X, task)), jnp.asarray(NOISE)[task]), obs=y)

    f, _, _ = natural_fit(model, jnp.asarray(X), jnp.asarray(task), jnp.asarray(y))
    for t in range(T):
        rows, k = task == t, oracles.matern52(VARIANCE[t], LENGTHSCALE[t])
        if t == 1:
            mean, sd = np.zeros(7), np.full(7, VARIANCE[t] ** 0.5)
        else:
            mean, cov = oracles.exact_predict(k, X[rows], y[rows], NOISE[t] ** 2, at)
            sd = np.sqrt(np.diag(cov))
        m = f(Tasks(jnp.asarray(at), t))
        np.testing.assert_allclose(m.mean, mean, atol=1e-6)
        np.testing.assert_allclose(np.sqrt(m.variance), sd, atol=1e-6)


def test_few_points_have_standard_deviations_within_two_percent(rng):
    """300 rows, 30 points for each task, one natural step: beside an exact GP for each."""
    X, task = rng.uniform(-2, 2, (300, 1)), rng.integers(0, T, 300)
    y, at = rng.normal(size=300), np.linspace(-2.0, 2.0, 7)[:, None]
    Z = jnp.linspace(-2.1, 2.1, 30)[:, None]

    def model(X, task, y):
        f = ogp.gp("f", SEPARATE, Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(Tasks(X, task)), jnp.asarray(NOISE)[task]), obs=y)

    f, _, _ = natural_fit(model, jnp.asarray(X), jnp.asarray(task), jnp.asarray(y))
    for t in range(T):
        k, own = oracles.matern52(VARIANCE[t], LENGTHSCALE[t]), task == t
        mean, cov = oracles.exact_predict(k, X[own], y[own], NOISE[t] ** 2, at)
        m, sd = f(Tasks(jnp.asarray(at), t)), np.sqrt(np.diag(cov))
        np.testing.assert_allclose(np.sqrt(m.variance), sd, rtol=0.02)
        np.testing.assert_allclose(m.mean, mean, atol=0.1 * sd.max())


def test_the_intrinsic_model_in_a_column_beside_an_exact_gp(rng):
    """One function of (input, task), M = N."""
    X = np.column_stack([np.linspace(-2.0, 2.0, 12), [0, 2, 1, 2] * 3])
    y, at = rng.normal(size=12), np.column_stack([np.linspace(-2.5, 2.5, 9), [0, 1, 2] * 3])
    loadings, kappa = rng.normal(size=(T, 2)), np.array([0.3, 0.1, 0.6])
    B = loadings @ loadings.T + np.diag(kappa)

    def exact(X1, X2):
        of_inputs = oracles.matern52(1.3, 0.9)(X1[:, :1], X2[:, :1])
        return of_inputs * B[np.ix_(X1[:, 1].astype(int), X2[:, 1].astype(int))]

    def model(X, y):
        kernel = 1.3 * kernels.Matern52(0.9).on(0) * kernels.Coregion(loadings, kappa).on(1)
        f = ogp.gp("f", kernel, X, jitter=1e-13)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), jnp.asarray(NOISE)[X[:, 1].astype(int)]), obs=y)

    f, _, _ = natural_fit(model, jnp.asarray(X), jnp.asarray(y))
    mean, cov = oracles.exact_predict(exact, X, y, NOISE[X[:, 1].astype(int)] ** 2, at)
    np.testing.assert_allclose(f(jnp.asarray(at)).mean, mean, atol=1e-6)
    np.testing.assert_allclose(np.sqrt(f(jnp.asarray(at)).variance), np.sqrt(np.diag(cov)), atol=1e-6)


def test_mixtures_have_the_prior_of_the_intrinsic_model(rng):
    """W' W + diag(own^2) between tasks, times one kernel of the inputs."""
    X, task = rng.uniform(-2, 2, (8, 1)), np.array([0, 3, 2, 1, 1, 0, 3, 2])

    def model():
        return ogp.gp("f", 1.3 * kernels.Matern52(0.9), jnp.asarray(X), num_latents=7, jitter=1e-12)

    guide = ogp.AutoSparseGP(model, covariance="prior")
    f = ogp.posterior(model, guide, {"f.u0_loc": jnp.zeros((7, 8))})["f"]
    expected = oracles.matern52(1.3, 0.9)(X, X) * (W.T @ W + np.diag(OWN**2))[np.ix_(task, task)]
    np.testing.assert_allclose(f.joint(Tasks(jnp.asarray(X), task, W, OWN)).covariance_matrix, expected, atol=1e-8)
    np.testing.assert_allclose(f(Tasks(jnp.asarray(X), task, W, OWN)).variance, np.diag(expected), rtol=1e-8)


# ---------------------------------------------------------------- inference


@pytest.fixture(scope="module")
def counts():
    rng = np.random.default_rng(3)
    X, task = rng.uniform(-2, 2, (60, 1)), rng.integers(0, T, 60)
    y = rng.poisson(np.exp(np.sin(2 * X[:, 0]) + 0.5 * task))
    return jnp.asarray(X), jnp.asarray(task), jnp.asarray(y)


def count_model(X, task, y=None, num_data=60):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([T]).to_event(1))
    f = ogp.gp("f", kernels.RBF(jnp.full((T, 1), 1.0)), jnp.linspace(-2.0, 2.0, 6)[:, None])
    with numpyro.plate("data", num_data, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Poisson(f(Tasks(X, task)) + level[task]), obs=y)


def test_minibatches_checks_weights_and_predictions_of_a_fit(counts):
    guide = ogp.AutoSparseGP(count_model)
    svi = SVI(count_model, guide, optax.adam(0.05), TraceMeanField_ELBO())
    result = ogp.fit(svi, KEY, counts, batch_size=20, num_steps=200, progress_bar=False)
    assert result.losses[-20:].mean() < result.losses[:20].mean()
    page = ogp.check(count_model, guide, result.params, *counts, num_samples=30)
    assert np.isfinite(page.functions["f"].residual).all() and "f.u0" in str(page)
    assert np.isfinite(ogp.khat(count_model, guide, result.params, *counts, num_samples=200).khat)
    drawn = Predictive(count_model, guide=guide, params=result.params, num_samples=5)(KEY, *counts[:2])
    assert drawn["y"].shape == (5, 60)
    data = ogp.to_arviz(count_model, guide, result.params, *counts, num_samples=5)
    assert "log_likelihood" in data


def test_nuts_of_rows_is_nuts_of_outputs(counts):
    """The same potential, in the long and in the wide format."""
    X, task, y = (a[:20] for a in counts)
    seen = jnp.arange(T) == task[:, None]

    def wide(X, task, y):
        f = ogp.gp("f", kernels.RBF(jnp.full((T, 1), 1.0)), jnp.linspace(-2.0, 2.0, 6)[:, None])
        with numpyro.plate("data", len(X), dim=-2), numpyro.plate("tasks", T, dim=-1):
            numpyro.sample("y", likelihoods.Poisson(f(X)).mask(seen), obs=jnp.broadcast_to(y[:, None], seen.shape))

    def long(X, task, y):
        f = ogp.gp("f", kernels.RBF(jnp.full((T, 1), 1.0)), jnp.linspace(-2.0, 2.0, 6)[:, None])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Poisson(f(Tasks(X, task))), obs=y)

    e = {"f.u0": jnp.asarray(np.random.default_rng(0).normal(size=(T, 6)))}
    found = [
        jax.value_and_grad(lambda e, m=m: numpyro.infer.util.log_density(m, (X, task, y), {}, e)[0])(e)
        for m in (long, wide)
    ]
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-12)
    np.testing.assert_allclose(found[0][1]["f.u0"], found[1][1]["f.u0"], rtol=1e-9, atol=1e-12)
    mcmc = MCMC(NUTS(long), num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(KEY, X, task, y)
    assert np.isfinite(mcmc.get_samples()["f.u0"]).all()


def test_stacked_functions_of_tasks_each_with_its_own_v(rng, X, task):
    """A mean and a noise level for each task: tightened, rows have the v of their functions."""
    y = jnp.asarray(rng.normal(size=N))

    def model(X, task, y):
        f, g = (ogp.gp(name, SEPARATE, X[::4]) for name in "fg")
        both = ogp.stack([f(Tasks(X, task)), g(Tasks(X, task))])
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihoods.HeteroskedasticGaussian(both), obs=y)

    def wide(X, task, y):
        f, g = (ogp.gp(name, SEPARATE, X[::4])(X) for name in "fg")
        with numpyro.plate("data", N):
            for t in range(T):
                likelihood = likelihoods.HeteroskedasticGaussian(ogp.stack([f[..., t], g[..., t]]))
                numpyro.sample(f"y{t}", likelihood.mask(task == t), obs=y)

    guide = ogp.AutoSparseGP(model, residual="tight")
    params = SVI(model, guide, optax.adam(0.1), TraceMeanField_ELBO())
    params = dict(params.get_params(params.init(KEY, X, task, y)))
    params |= {"f_residual_scale": jnp.asarray(V), "g_residual_scale": jnp.asarray(V[::-1])}
    losses = [
        TraceMeanField_ELBO().loss(KEY, params, m, ogp.AutoSparseGP(m, residual="tight"), X, task, y)
        for m in (model, wide)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-10)


# ---------------------------------------------------------------- what is refused


def test_tasks_may_be_whole_numbers_of_a_floating_column(rng, X, task):
    f = random_f(rng)
    np.testing.assert_array_equal(f(Tasks(X, task.astype(float))).mean, f(Tasks(X, task)).mean)
    np.testing.assert_array_equal(f(Tasks(X, task.astype(np.uint8))).mean, f(Tasks(X, task)).mean)
    np.testing.assert_array_equal(f(Tasks(X, 1)).mean, f(Tasks(X, jnp.ones(N, int))).mean)


@pytest.mark.parametrize("bad", [3, -1, 0.5, np.nan])
def test_a_task_that_is_none_is_refused_and_nan_under_jit(rng, X, task, bad):
    f, wrong = random_f(rng), task.astype(float).at[4].set(bad)
    with pytest.raises(
        ValueError, match=rf"whole numbers in 0..2, one of T = 3 tasks .*; got {bad}.* at row 4, 1 such"
    ):
        f(Tasks(X, wrong))
    m = jax.jit(lambda task: f(Tasks(X, task)))(wrong)
    assert np.isnan(m.mean[4]) and np.isfinite(np.delete(m.mean, 4)).all() and np.isfinite(m.variance).all()


def test_fit_refuses_tasks_that_are_none(counts):
    """Before the first step, where the start is made of the data."""
    X, task, y = counts
    svi = SVI(count_model, ogp.AutoSparseGP(count_model), optax.adam(0.05), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match=r"whole numbers in 0\.\.2"):
        svi.run(KEY, 2, X, task.at[3].set(7), y, progress_bar=False)
    with pytest.raises(ValueError, match=r"whole numbers in 0\.\.2"):
        ogp.fit(svi, KEY, (X, task.at[3].set(7), y), num_steps=2, progress_bar=False)
    with pytest.warns(RuntimeWarning, match="is nan: the fit stops"):  # a row that is not in the first batch
        result = ogp.fit(svi, KEY, (X, task.at[3].set(7), y), batch_size=6, num_steps=12, progress_bar=False)
    assert result.status != "finished" and np.isfinite(result.losses).sum() < 12


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda X, t: Tasks(X, t[:-1]), ValueError, r"`task` must have shape \(\) or \(B,\) = \(17,\).*got \(16,\)"),
        (lambda X, t: Tasks(X, t[:, None]), ValueError, r"got \(17, 1\).*task\[:, 0\]"),
        (lambda X, t: Tasks(X, t > 1), TypeError, "indices of tasks.*got an array of bool"),
        (lambda X, t: Tasks(X, np.array(list("abc"))[t]), TypeError, "got names or objects.*numpy.unique"),
        (lambda X, t: ogp.concatenate([Tasks(X, t), X]), TypeError, r"Tasks\(concatenate\(\[...\]\), task\)"),
        (lambda X, t: Tasks(X[:, :1], t), ValueError, "D = 2"),
        (lambda X, t: Tasks(X.astype(np.float32), t), TypeError, "nothing is cast silently"),
        (lambda X, t: Tasks(X, t, own=OWN), ValueError, "`own` goes with `mixing`"),
        (lambda X, t: Tasks(X, t, W[0]), ValueError, r"`mixing` must have shape \(L, T\).*got \(4,\)"),
        (lambda X, t: Tasks(X, t, W.T), ValueError, r"num_latents=4, L = 4; got 3. Did you pass mixing.T\?"),
        (lambda X, t: Tasks(X, t, W, OWN), ValueError, r"num_latents=7, L \+ T = 7; got 3"),
        (
            lambda X, t: Tasks(X, t, W, OWN[:2]),
            ValueError,
            r"`own` must have shape \(\) or \(T,\) = \(4,\); got \(2,\)",
        ),
        (lambda X, t: Tasks(X, t, W.astype(complex)), TypeError, "`mixing` must hold real numbers; got complex"),
    ],
)
def test_what_is_refused(rng, X, task, make, error, match):
    with pytest.raises(error, match=match):
        random_f(rng)(make(X, task))


def test_who_knows_no_tasks_says_so(rng, X, task):
    single = random_f(rng, kernels.RBF(1.0), num=1)
    with numpyro.handlers.seed(rng_seed=0):
        single = ogp.gp("g", kernels.RBF(1.0), X[:3])
    with pytest.raises(TypeError, match=r"f is a single one. .*Coregion\(W, kappa\).on\(column\).*column_stack"):
        single(Tasks(X, task))
    with pytest.raises(TypeError, match="`concatenate` goes inside of Tasks"):
        ogp.concatenate([Tasks(X, task)]).checked(2, float)
    with pytest.raises(TypeError, match="linear functional"):
        ogp.gp("h", kernels.RBF(1.0), Tasks(X, task))
    f = random_f(rng, lambda A, B=None: plain(A, B))
    with pytest.raises(TypeError, match="`term` of one of several functions needs a kernel"):
        f(Tasks(f.term(0).at(X), task))


def test_picking_rows_of_the_wide_format_points_here(rng, X, task):
    with pytest.raises(TypeError, match=r"f\(Tasks\(X, task\)\)"):
        random_f(rng)(X)[jnp.arange(N), task]
