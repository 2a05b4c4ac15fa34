"""Bounds and marginals against dense oracles that share nothing with the package, in float64 and float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_orthgp as ogp
from numpyro_orthgp import likelihoods
from numpyro_orthgp.math.linalg import default_jitter
from tests import oracles, problems

SIZES = [[6], [5, 4], [4, 3, 5]]
NOISE = 0.35


def setting(rng, sizes, N=30):
    X, y = problems.data(rng, N)
    Zs = problems.sets(rng, sizes)
    return X, y, Zs, [problems.random_q(rng, M) for M in sizes]


@pytest.mark.parametrize("kernel", ["rbf", "matern12", "matern32", "matern52"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_elbo_equals_dense_oracle(rng, sizes, kernel):
    X, y, Zs, qs = setting(rng, sizes)
    ours = -problems.loss(
        problems.q_params(qs),
        jnp.asarray(X),
        jnp.asarray(y),
        inducing=Zs,
        kernel=kernel,
        likelihood=problems.gaussian(NOISE),
    )
    expected = oracles.elbo_gaussian(problems.kernel_oracle(kernel), problems.oracle_sets(Zs, qs), X, y, NOISE**2)
    np.testing.assert_allclose(ours, expected, rtol=1e-9)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_default_jitter_is_noise_on_inducing_variables(rng, sizes):
    X, y, Zs, qs = setting(rng, sizes)
    amounts = [1.3 * default_jitter(jnp.float64)] * len(sizes)
    args = (problems.q_params(qs), jnp.asarray(X), jnp.asarray(y))
    expected = oracles.elbo_gaussian(
        problems.kernel_oracle("matern52"), problems.oracle_sets(Zs, qs), X, y, NOISE**2, jitter=amounts
    )
    ours = -problems.loss(*args, inducing=Zs, likelihood=problems.gaussian(NOISE), jitter=None)
    np.testing.assert_allclose(ours, expected, rtol=1e-10)
    amounts = [1.3 * 0.05] * len(sizes)
    expected = oracles.elbo_gaussian(
        problems.kernel_oracle("matern52"), problems.oracle_sets(Zs, qs), X, y, NOISE**2, jitter=amounts
    )
    ours = -problems.loss(*args, inducing=Zs, likelihood=problems.gaussian(NOISE), jitter=0.05)
    np.testing.assert_allclose(ours, expected, rtol=1e-9)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("per_point", [False, True], ids=["one noise", "noise per point"])
def test_tight_gaussian_elbo(rng, sizes, per_point):
    X, y, Zs, qs = setting(rng, sizes)
    scale = rng.uniform(0.2, 0.6, len(X)) if per_point else NOISE
    kernel, oracle_sets = problems.kernel_oracle("matern52"), problems.oracle_sets(Zs, qs)
    residual = np.diag(oracles.residual_covariance(kernel, oracle_sets, X))
    best = 1 / (1 + residual / scale**2)
    params = problems.q_params(qs) | {"f_residual_scale": jnp.asarray(0.3)}  # not used: v has its best value
    args = (params, jnp.asarray(X), jnp.asarray(y))
    kwargs = {"inducing": Zs, "likelihood": problems.gaussian(jnp.asarray(scale))}
    tight = -problems.loss(*args, residual="tight", **kwargs)
    np.testing.assert_allclose(tight, oracles.elbo_gaussian(kernel, oracle_sets, X, y, scale**2, v=best), rtol=1e-9)
    assert tight > -problems.loss(*args, **kwargs)


@pytest.mark.parametrize("residual", ["prior", "tight"])
@pytest.mark.parametrize("name", ["logit", "probit", "poisson", "student"])
def test_other_likelihoods(rng, name, residual):
    X, y, Zs, qs = setting(rng, [5, 4], N=20)
    exposure = rng.uniform(0.5, 2, len(X))
    rule = likelihoods.GaussHermite(100)
    ours, density, y = {
        "logit": (lambda m: likelihoods.Bernoulli(m, integrator=rule), oracles.log_bernoulli_logit, (y > 0) * 1.0),
        "probit": (lambda m: likelihoods.Bernoulli(m, "probit", integrator=rule), oracles.log_bernoulli_probit, (y > 0) * 1.0),
        "poisson": (
            lambda m: likelihoods.Poisson(m, jnp.asarray(exposure)), oracles.log_poisson(exposure), rng.poisson(2, len(X)) * 1.0,
        ),
        "student": (lambda m: likelihoods.StudentT(m, 5.0, 1.5, integrator=rule), oracles.log_student_t(5.0, 1.5), y),
    }[name]  # fmt: skip
    v = 0.6 if residual == "tight" else 1.0
    params = problems.q_params(qs) | {"f_residual_scale": jnp.asarray(v)}
    value = -problems.loss(params, jnp.asarray(X), jnp.asarray(y), inducing=Zs, likelihood=ours, residual=residual)
    expected = oracles.elbo(
        problems.kernel_oracle("matern52"),
        problems.oracle_sets(Zs, qs),
        X,
        y,
        density,
        v=v if residual == "tight" else 1.0,
    )
    np.testing.assert_allclose(value, expected, rtol=1e-6 if name == "student" else 1e-9)


@pytest.mark.parametrize("sizes", [[5], [4, 3]], ids=str)
def test_mean_only_set(rng, sizes):
    """ODVGP: the divergence is the dense one of the q it defines (GPyTorch's is not, and its objective no bound)."""
    X, y, Zs, qs = setting(rng, sizes)
    H, a = problems.sets(rng, [7])[0], 0.5 * rng.normal(size=7)
    params = problems.q_params(qs) | {f"f.u{len(sizes)}_weights": jnp.asarray(a)}
    value = -problems.loss(
        params, jnp.asarray(X), jnp.asarray(y), inducing=[*Zs, ogp.MeanOnly(H)], likelihood=problems.gaussian(NOISE)
    )
    expected = oracles.elbo_gaussian(
        problems.kernel_oracle("matern52"),
        problems.oracle_sets(Zs, qs), X, y, NOISE**2, mean_only=oracles.MeanOnlySet(H, a),
    )  # fmt: skip
    np.testing.assert_allclose(value, expected, rtol=1e-9)


def subsampled_value(rng, explained):
    """The bound as a function of how many columns of the penalty are drawn, and with which key."""
    X, y, Zs, qs = setting(rng, [5])
    H = Zs[0][:4] if explained else problems.sets(rng, [6])[0]
    params = problems.q_params(qs) | {"f.u1_weights": jnp.asarray(0.5 * rng.normal(size=len(H)))}

    def value(size, key):
        sets = [*Zs, ogp.MeanOnly(H, subsample_size=size)]
        return problems.loss(
            params, jnp.asarray(X), jnp.asarray(y), inducing=sets, likelihood=problems.gaussian(NOISE), key=key
        )

    return value


def test_mean_only_columns_subsampled_without_bias(rng):
    value = subsampled_value(rng, explained=False)
    exact = value(None, 0)
    assert value(6, 1) == pytest.approx(float(exact), rel=1e-12)
    draws = np.array(jax.vmap(lambda key: value(2, key))(jnp.arange(4000)))
    assert abs(draws.mean() - exact) < 4 * draws.std() / np.sqrt(len(draws))
    assert draws.std() > 1e-3


def test_mean_only_columns_are_of_what_the_sets_leave(rng):
    """Where the sets explain the mean-only points, every draw of columns gives the same: no noise from terms that cancel."""
    value = subsampled_value(rng, explained=True)
    draws = np.array(jax.vmap(lambda key: value(2, key))(jnp.arange(50)))
    np.testing.assert_allclose(draws, value(None, 0), rtol=1e-6)


@pytest.mark.parametrize(
    "covariance", ["full", "diagonal", "prior", ["full", "diagonal"], ["diagonal", "prior"]], ids=str
)
def test_covariance_families(rng, covariance):
    X, y, Zs, _ = setting(rng, [4, 3])
    params, qs = {}, []
    for i, kind in enumerate([covariance] * 2 if isinstance(covariance, str) else covariance):
        m, T = problems.random_q(rng, len(Zs[i]))
        T = {"full": T, "diagonal": np.diag(np.diag(T)), "prior": np.eye(len(m))}[kind]
        qs.append((m, T))
        params[f"f.u{i}_loc"] = jnp.asarray(m)
        params |= {"full": {f"f.u{i}_scale_tril": T}, "diagonal": {f"f.u{i}_scale": np.diag(T)}, "prior": {}}[kind]
    value = -problems.loss(
        params, jnp.asarray(X), jnp.asarray(y), inducing=Zs, likelihood=problems.gaussian(NOISE), covariance=covariance
    )
    expected = oracles.elbo_gaussian(problems.kernel_oracle("matern52"), problems.oracle_sets(Zs, qs), X, y, NOISE**2)
    np.testing.assert_allclose(value, expected, rtol=1e-9)


@pytest.mark.parametrize("mean_only", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_posterior_marginals_and_joint(rng, sizes, mean_only):
    X, y, Zs, qs = setting(rng, sizes)
    Xs = rng.uniform(-3, 3, (9, 2))
    params, sets, extra = problems.q_params(qs), list(Zs), None
    if mean_only:
        extra = oracles.MeanOnlySet(problems.sets(rng, [7])[0], rng.normal(size=7))
        sets.append(ogp.MeanOnly(extra.H))
        params[f"f.u{len(sizes)}_weights"] = jnp.asarray(extra.a)
    f = problems.posterior(
        params, jnp.asarray(X), jnp.asarray(y), inducing=sets, likelihood=problems.gaussian(NOISE), residual="tight"
    )
    mean, cov = oracles.q_f(problems.kernel_oracle("matern52"), problems.oracle_sets(Zs, qs), Xs, mean_only=extra)
    marginals, joint = f(Xs), f.joint(Xs)
    np.testing.assert_allclose(marginals.mean, mean, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(marginals.variance, np.diag(cov), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(joint.mean, mean, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(joint.covariance_matrix, cov, rtol=1e-8, atol=1e-9)
    residual = np.diag(
        oracles.residual_covariance(problems.kernel_oracle("matern52"), problems.oracle_sets(Zs, qs), Xs)
    )
    np.testing.assert_allclose(marginals.residual_variance, residual, rtol=1e-8, atol=1e-11)


def test_gradients_against_finite_differences(rng):
    X, y, Zs, qs = setting(rng, [4, 3], N=12)
    params = problems.q_params(qs) | {
        "variance": jnp.asarray(1.2), "lengthscale": jnp.asarray([0.8, 1.1]), "f.u2_weights": jnp.asarray(rng.normal(size=3)),
    }  # fmt: skip
    H = problems.sets(rng, [3])[0]

    def objective(params, Zs, scale):
        return problems.loss(
            params, jnp.asarray(X), jnp.asarray(y), inducing=[*Zs, ogp.MeanOnly(H)], likelihood=problems.gaussian(scale),
            residual="tight", jitter=None,
        )  # fmt: skip

    inputs = (params, [jnp.asarray(Z) for Z in Zs], jnp.asarray(NOISE))
    gradient = jax.jit(jax.grad(objective, argnums=(0, 1, 2)))(*inputs)
    objective = jax.jit(objective)
    for direction in range(6):
        keys = iter(jax.random.split(jax.random.PRNGKey(direction), 50))
        step = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), inputs)  # noqa: B023
        along = sum(jnp.vdot(g, s) for g, s in zip(jax.tree.leaves(gradient), jax.tree.leaves(step), strict=True))
        above, below = (objective(*jax.tree.map(lambda x, s, e=e: x + e * s, inputs, step)) for e in (1e-5, -1e-5))
        np.testing.assert_allclose(along, (above - below) / 2e-5, rtol=1e-6)


@pytest.mark.parametrize("residual", ["prior", "tight"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_float32(rng, sizes, residual):
    X, y, Zs, qs = setting(rng, sizes)
    exact = problems.loss(
        problems.q_params(qs),
        jnp.asarray(X),
        jnp.asarray(y),
        inducing=Zs,
        likelihood=problems.gaussian(NOISE),
        residual=residual,
    )

    def single(tree):
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)

    def objective(params, sets):
        return problems.loss(
            params,
            single(X),
            single(y),
            inducing=sets,
            likelihood=problems.gaussian(NOISE),
            residual=residual,
            jitter=None,
        )

    value, gradient = jax.jit(jax.value_and_grad(objective, argnums=(0, 1)))(single(problems.q_params(qs)), single(Zs))
    np.testing.assert_allclose(value, exact, rtol=1e-4)
    assert all(g.dtype == jnp.float32 and jnp.isfinite(g).all() for g in jax.tree.leaves(gradient))
    f = problems.posterior(
        single(problems.q_params(qs)), single(X), single(y), inducing=single(Zs), likelihood=problems.gaussian(NOISE)
    )
    marginals = f(single(X))
    assert {a.dtype for a in (marginals.mean, marginals.variance, f.joint(single(X)).scale_tril)} == {
        jnp.dtype("float32")
    }


@jax.jit
def untight_and_tight(params, noise, Zs, X, y):
    kwargs = {"inducing": Zs, "likelihood": problems.gaussian(noise), "jitter": None}
    return [-problems.loss(params, X, y, residual=r, **kwargs) for r in ("prior", "tight")]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    log_noise=st.floats(-2.5, 1),
    log_lengthscale=st.floats(-1.5, 1.5),
    sizes=st.sampled_from([(3,), (6,), (3, 3), (2, 3, 4)]),
)
def test_order_of_the_bounds(seed, log_noise, log_lengthscale, sizes):
    """log p(y) >= tight >= untight, whatever q, sets and hyperparameters."""
    rng = np.random.default_rng(seed)
    X, y, Zs, qs = setting(rng, sizes, N=15)
    noise, lengthscale = np.exp(log_noise), np.exp(log_lengthscale)
    params = problems.q_params(qs) | {"lengthscale": jnp.asarray([lengthscale] * 2)}
    prior, tight = untight_and_tight(params, noise, Zs, X, y)
    exact = oracles.exact_log_marginal(problems.kernel_oracle("matern52", lengthscale=lengthscale), X, y, noise**2)
    slack = 1e-9 * abs(exact)
    assert prior <= tight + slack and tight <= exact + slack
