"""Growing a fit: conditioning on new data, the streaming bound, and functions seen through other points."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods, online
from numpyro_orthgp.gaussians import FAMILIES, Diagonal, Full, Shifted, Value
from numpyro_orthgp.math.kept import run_checked
from tests import oracles, problems

KERNEL = problems.kernel_oracle("matern52", 1.3, 0.9)
NOISE = 0.3


def kernel(dtype=float):
    return jnp.asarray(1.3, dtype) * kernels.Matern52(jnp.asarray(0.9, dtype))


def function(inducing, qs=None, *, kernel=kernel(), num_latents=None, **kwargs):  # noqa: B008
    """A function with given Gaussians, by default the prior's, as `posterior` returns it."""
    with handlers.block(), handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernel, inducing, num_latents=num_latents, jitter=0.0)
    if qs is None:
        beliefs = [Shifted(jnp.zeros_like(q.loc)) for q in f.beliefs]
    else:
        beliefs = [Full(jnp.asarray(m), jnp.asarray(T)) for m, T in qs]
    return ogp.GPFunction(f.kernel, f.features, f.blocks, tuple(beliefs), f.shift, num_latents=num_latents, **kwargs)


def gaussian(f):
    return likelihoods.Gaussian(f, NOISE)


def student(f):
    return likelihoods.StudentT(f, 4.0, 0.3)


# Compiled as wholes: run operation by operation they take several times as long.
condition = jax.jit(online.condition, static_argnums=3, static_argnames=("num_steps", "step_size"))
compress = jax.jit(online.compress, static_argnames="jitter")
at = jax.jit(lambda f, X: f(X))


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(5)
    X, y = problems.data(rng, 16)
    Zs = problems.sets(rng, [5, 4])
    return X, y, Zs, [problems.random_q(rng, M) for M in (5, 4)], rng.uniform(-2, 2, (7, 2))


def dense_condition(mean, cov, y, rows, noise):
    """Mean and covariance of a Gaussian vector given noisy values of some of its entries."""
    gain = cov[:, rows] @ np.linalg.inv(cov[np.ix_(rows, rows)] + noise**2 * np.eye(len(rows)))
    return mean + gain @ (y - mean[rows]), cov - gain @ cov[rows]


def close_joint(f, X, mean, cov, tol=1e-7):
    joint = jax.jit(lambda f: (lambda q: (q.mean, q.covariance_matrix))(f.joint(X)))(f)
    np.testing.assert_allclose(joint[0], mean, atol=tol, rtol=tol)
    np.testing.assert_allclose(joint[1], cov, atol=10 * tol, rtol=tol)


# ---- condition


def test_conditioning_the_prior_is_the_exact_gp(problem):
    X, y, Zs, _, Xs = problem
    f = function(Zs)
    for part in (slice(0, 10), slice(10, 16)):  # in two steps, too
        f = condition(f, X[part], y[part], gaussian, num_steps=1)
    mean, cov = oracles.exact_predict(KERNEL, X, y, NOISE**2, Xs)
    close_joint(f, Xs, mean, cov)
    assert f.features[0].num == 25


def test_conditioning_a_fit_is_dense_conditioning_of_its_process(problem):
    X, y, Zs, qs, Xs = problem
    everywhere = np.concatenate([Xs, X])
    mean, cov = oracles.q_f(KERNEL, problems.oracle_sets(Zs, qs), everywhere)
    mean, cov = dense_condition(mean, cov, y, np.arange(7, 23), NOISE)
    f = condition(function(Zs, qs), X, y, gaussian, num_steps=2)
    close_joint(f, Xs, mean[:7], cov[:7, :7])


def test_joined_variables_keep_the_jitter_of_their_sets(problem):
    X, y, Zs, _, _ = problem
    with handlers.block(), handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernel(), Zs, jitter=0.05)
    f = ogp.GPFunction(f.kernel, f.features, f.blocks, tuple(Shifted(jnp.zeros_like(q.loc)) for q in f.beliefs))
    (block,) = online.condition(f, X, y, gaussian, num_steps=1, jitter=1e-3).blocks
    points = np.concatenate([*Zs, X])
    noise = np.repeat([1.3 * 0.05, 1.3 * 1e-3], [9, 16])
    np.testing.assert_allclose(block.jitter, noise, rtol=1e-12)
    whitened = block.whitener @ (KERNEL(points, points) + np.diag(noise)) @ block.whitener.T
    np.testing.assert_allclose(whitened, np.eye(25), atol=1e-9)


def test_paths_after_conditioning_have_the_variance_of_the_function(problem):
    X, y, _, _, _ = problem
    Z = X[:6]
    d = ogp.CollapsedGP(kernel(), jnp.asarray(X), jnp.asarray(Z), NOISE, jitter=0.05)
    f = online.condition(
        d.posterior(jnp.asarray(y)), jnp.asarray([[3.0, 3.0]]), jnp.asarray([0.5]), gaussian, num_steps=1
    )
    draws = jax.jit(lambda f: f.sample_paths(jax.random.PRNGKey(0), 20_000, num_features=8)(Z))(f)
    # Paths have more than Gaussian kurtosis with so few features; a tenth is far from what the wrong jitter does (a quarter).
    np.testing.assert_allclose(draws.var(0) / f(Z).variance, 1, atol=0.1)


def test_mean_only_points_are_kept(problem):
    X, y, Zs, qs, Xs = problem
    G, a = np.array([[0.5, 0.5], [-1.0, 1.5], [1.2, -0.7]]), np.array([0.8, -0.6, 0.4])
    f = function(Zs, qs)
    products = [s.covariance_with_inputs(f.kernel, G) @ a for s in f.features]
    projected = ogp.functions.projection.project(f.blocks, [p[:, None] for p in products])
    shift = ogp.functions.mean_only.MeanShift(jnp.asarray(G), jnp.asarray(a), tuple(p[:, 0] for p in projected))
    f = ogp.GPFunction(f.kernel, f.features, f.blocks, f.beliefs, shift)
    everywhere = np.concatenate([Xs, X])
    mean, cov = oracles.q_f(KERNEL, problems.oracle_sets(Zs, qs), everywhere, mean_only=oracles.MeanOnlySet(G, a))
    mean, cov = dense_condition(mean, cov, y, np.arange(7, 23), NOISE)
    close_joint(condition(f, X, y, gaussian, num_steps=1), Xs, mean[:7], cov[:7, :7])


def test_many_functions_condition_as_each_alone(problem):
    X, y, Zs, qs, Xs = problem
    Y = np.stack([y, -y + 1], -1)
    both = [tuple(np.stack([a, b]) for a, b in zip(q, (2 * q[0], q[1] / 2), strict=True)) for q in qs]
    f = condition(function(Zs, both, num_latents=2), X, Y, gaussian, num_steps=1)
    for p in range(2):
        alone = condition(function(Zs, [(m[p], T[p]) for m, T in both]), X, Y[:, p], gaussian, num_steps=1)
        np.testing.assert_allclose(at(f, Xs).mean[:, p], at(alone, Xs).mean, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(at(f, Xs).variance[:, p], at(alone, Xs).variance, rtol=1e-8)


def test_labels_condition_to_the_variational_optimum(problem):
    """Against natural gradients on a model whose inducing points are the data: both find the best Gaussian."""
    X, y, *_ = problem
    labels = (y > 0).astype(float)
    grown = condition(function(X[:1]), X[1:], labels[1:], likelihoods.Bernoulli, num_steps=50)
    mean, variance = at(grown, X[1:]).mean, at(grown, X[1:]).variance

    def model(X, y):
        f = ogp.gp("f", kernel(), X, jitter=0.0)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Bernoulli(f(X)), obs=y)

    guide = ogp.AutoSparseGP(model, natural=True)
    svi = SVI(model, guide, ogp.natural_gradient(optax.sgd(0.0), 0.7), TraceMeanField_ELBO())

    @jax.jit
    def fit(X, y):
        state = svi.init(jax.random.PRNGKey(0), X, y)
        state = jax.lax.fori_loop(0, 60, lambda _, s: svi.update(s, X, y)[0], state)
        return ogp.posterior(model, guide, svi.get_params(state), X, y)["f"]

    best = fit(jnp.asarray(X[1:]), labels[1:])
    np.testing.assert_allclose(mean, at(best, X[1:]).mean, atol=1e-7)
    np.testing.assert_allclose(variance, at(best, X[1:]).variance, atol=1e-7)


def test_classes_of_three_functions(problem):
    """Nodes for three functions are random in a model. Here, in a function that runs any number of times, that was refused."""
    X, _, Zs, qs, _ = problem
    X, labels = X[:4], jnp.array([0, 2, 1, 1])
    f = function(Zs[:1], [(np.stack([qs[0][0], -qs[0][0], 0 * qs[0][0]]), np.stack([qs[0][1]] * 3))], num_latents=3)

    def given(rule):
        with handlers.seed(rng_seed=0):  # whose keys a loop must not use
            g = condition(
                f, X, labels, lambda m: likelihoods.Categorical(m, integrator=rule), num_steps=60, step_size=0.7
            )
        return at(g, X)

    exact = given(likelihoods.GaussHermite(12))
    for rule, most in ((None, 0.05), (likelihoods.QuasiMonteCarlo(1024), 0.005)):
        np.testing.assert_allclose(given(rule).mean, exact.mean, atol=most)
        np.testing.assert_allclose(given(rule).variance, exact.variance, atol=most)
    assert np.abs(exact.mean - at(f, X).mean).max() > 0.1


MIX = np.array([[1.0, 0.5, 0.5], [0.5, 1.0, 0.5], [0.5, 0.5, 1.0]])


def mixed(f):
    return likelihoods.Gaussian(f @ jnp.asarray(MIX), NOISE)


def test_mixed_functions_settle(problem):
    """Each function's factors are found as if the others stood still: whole steps would grow for ever."""
    X, y, Zs, _, Xs = problem
    Y = np.stack([y, y[::-1], 0.5 * y**2 - 1], -1)
    f = function(Zs, num_latents=3)
    # The best independent Gaussians have the exact mean.
    everywhere = np.concatenate([Xs, X])
    prior = np.kron(np.eye(3), KERNEL(everywhere, everywhere))
    rows = np.kron(MIX.T, np.eye(23)[7:])
    gain = prior @ rows.T @ np.linalg.inv(rows @ prior @ rows.T + NOISE**2 * np.eye(48))
    mean = (gain @ Y.T.ravel()).reshape(3, 23)[:, :7].T
    np.testing.assert_allclose(at(condition(f, X, Y, mixed, num_steps=300), Xs).mean, mean, atol=1e-4)
    with pytest.warns(UserWarning, match="has not found the best Gaussian: after 10 steps means still move by up to"):
        early = run_checked(lambda f: online.condition(f, X, Y, mixed, num_steps=10), f)
    assert np.abs(at(early, Xs).mean).max() < 2 * np.abs(mean).max()


def test_counts_far_from_the_prior(problem):
    """Whole steps from where the prior is flow over; compared with E[log p] = y m - exp(m + v / 2) at its best."""
    X, _, Zs, _, _ = problem
    y, K = np.round(200 * np.exp(np.sin(X[:, 0]))), KERNEL(X, X)
    m, precision = np.log(y), y
    for _ in range(200):
        S = np.linalg.inv(np.linalg.inv(K) + np.diag(precision))
        rate = np.exp(m + np.diag(S) / 2)
        m, precision = m + 0.2 * (S @ (y - rate - np.linalg.solve(K, m))), 0.8 * precision + 0.2 * rate
    found = at(condition(function(Zs), X, y, likelihoods.Poisson, num_steps=40), X)
    np.testing.assert_allclose(found.mean, m, rtol=1e-6)
    np.testing.assert_allclose(found.variance, np.diag(S), rtol=1e-6)
    lost = np.where(y > 500, np.nan, y)  # is not taken for steps that were too long
    assert np.isnan(at(condition(function(Zs), X, lost, gaussian, num_steps=2), X).mean).all()


@pytest.mark.parametrize("largest", [1e4, 1e6])
def test_a_count_far_beyond_what_is_expected(problem, largest):
    """The first whole step has an infinite bound, whose rounding was infinite too: it counted as better, and means were NaN."""
    X, y = problem[0][:3], np.array([largest, 3.0, 0.0])
    K, m, precision = KERNEL(X, X), np.log([largest, 3.0, 1.0]), np.array([largest, 3.0, 1.0])
    for _ in range(400):
        S = np.linalg.inv(np.linalg.inv(K) + np.diag(precision))
        rate = np.exp(m + np.diag(S) / 2)
        m, precision = m + 0.2 * (S @ (y - rate - np.linalg.solve(K, m))), 0.8 * precision + 0.2 * rate
    few, many = (at(condition(function(problem[2]), X, y, likelihoods.Poisson, num_steps=n), X) for n in (20, 80))
    assert np.isfinite(few.mean).all()  # a step is halved so often
    np.testing.assert_allclose(many.mean, m, rtol=1e-6)
    np.testing.assert_allclose(many.variance, np.diag(S), rtol=1e-6, atol=1e-9)  # new points have a jitter of 1e-10


def test_outputs_of_another_dtype(problem):
    """NumPy's float64 beside a function in float32 ended in JAX's words about a scan."""
    X, y, Zs, _, Xs = problem
    f = jax.tree.map(lambda a: a.astype(jnp.float32), function(Zs[:1]))
    X, Xs = X.astype(np.float32), Xs.astype(np.float32)
    one, other = (online.condition(f, X, given, NOISE)(Xs).mean for given in (y, y.astype(np.float32)))
    assert one.dtype == jnp.float32
    np.testing.assert_array_equal(one, other)


def test_more_rows_than_matrices_have_room_for(problem):
    X = np.zeros((16_384, 2))
    with pytest.raises(
        ValueError, match="9 old and 16384 new ones, and needs several matrices of 16393 x 16393; the limit"
    ):
        online.condition(function(problem[2]), X, np.zeros(len(X)), 0.3)


def test_derivatives_where_a_precision_is_cut_off(problem):
    X, y, Zs, qs, Xs = problem
    y = np.where(np.arange(16) == 3, 8.0, y)  # far out, where Student's t is not log-concave

    def at_test_inputs(y):
        return online.condition(function(Zs, qs), X, y, student, num_steps=80, step_size=0.5)(Xs).mean.sum()

    value, slope = jax.jit(jax.value_and_grad(at_test_inputs))(jnp.asarray(y))
    direction, h = np.random.default_rng(0).normal(size=16), 1e-4
    ends = [jax.jit(at_test_inputs)(y + sign * h * direction) for sign in (1, -1)]
    assert np.isfinite(value)
    np.testing.assert_allclose(slope @ direction, (ends[0] - ends[1]) / (2 * h), rtol=1e-3)


def test_condition_float32(problem):
    X, y, Zs, _, Xs = (jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), part) for part in problem)
    f = function(Zs, kernel=kernel(jnp.float32))
    f = condition(f, X, y, student, step_size=0.5)
    assert at(f, Xs).mean.dtype == jnp.float32 and np.isfinite(at(f, Xs).variance).all()


# ---- the streaming bound


def dense_log_ratio(new_mean, new_cov, old_mean, old_cov, prior_cov):
    """-KL[q_new(a) || q_old(a)] + KL[q_new(a) || p_old(a)], as Bui et al. 2017 write it."""
    return oracles.kl_normal(new_mean, new_cov, np.zeros_like(new_mean), prior_cov) - oracles.kl_normal(
        new_mean, new_cov, old_mean, old_cov
    )


@pytest.mark.parametrize("kind", ["full", "diagonal", "prior"])
def test_memory_is_the_ratio_of_bui_2017(problem, kind):
    _, _, Zs, qs, _ = problem
    rng = np.random.default_rng(1)
    old_Z = problems.sets(rng, [4, 3])
    old_q = [problems.random_q(rng, M) for M in (4, 3)]
    if kind == "diagonal":
        old_q = [(m, np.diag(np.diag(T))) for m, T in old_q]
    if kind == "prior":
        old_q = [old_q[0], (old_q[1][0], np.eye(3))]
    old_kernel = problems.kernel_oracle("rbf", 0.7, 1.4)
    past = function(old_Z, old_q, kernel=0.7 * kernels.RBF(1.4))
    if kind != "full":
        m = jnp.asarray(old_q[1][0])
        last = Shifted(m) if kind == "prior" else Diagonal(m, jnp.diag(old_q[1][1]))
        past = ogp.GPFunction(past.kernel, past.features, past.blocks, (past.beliefs[0], last))
    both = np.concatenate(old_Z)
    new = oracles.q_f(KERNEL, problems.oracle_sets(Zs, qs), both)
    old = oracles.q_f(old_kernel, problems.oracle_sets(old_Z, old_q), both)
    expected = dense_log_ratio(*new, *old, old_kernel(both, both))
    value = jax.jit(online.memory.log_ratio)(function(Zs, qs), past)
    np.testing.assert_allclose(value, expected, rtol=1e-7)


def test_what_is_remembered_is_as_good_as_the_data(problem):
    """Same points, same hyperparameters, Gaussian noise: learning in two parts ends where learning at once does."""
    X, y, Zs, _, _ = problem
    Z, first, second = Zs[0], slice(0, 9), slice(9, 16)

    def model(X, y, past=None):
        f = ogp.gp("f", kernel(), Z, jitter=0.0)
        if past is not None:
            online.remember("f_past", f, past)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", gaussian(f(X)), obs=y)

    guide = ogp.AutoSparseGP(model, natural=True)
    svi = SVI(model, guide, ogp.natural_gradient(optax.sgd(0.0), 1.0), TraceMeanField_ELBO())

    @jax.jit
    def fit(X, y, past=None):
        # With Gaussian noise one natural step of length 1 is the optimum.
        state = svi.update(svi.init(jax.random.PRNGKey(0), X, y, past), X, y, past)[0]
        params = svi.get_params(state)
        return params, ogp.posterior(model, guide, params, X, y)["f"], -svi.evaluate(state, X, y, past)

    _, past, bound_first = fit(X[first], y[first])
    _, in_parts, bound_second = fit(X[second], y[second], past)
    _, at_once, bound = fit(X, y)
    np.testing.assert_allclose(in_parts.beliefs[0].loc, at_once.beliefs[0].loc, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(in_parts.beliefs[0].scale_tril, at_once.beliefs[0].scale_tril, rtol=1e-7, atol=1e-9)
    # log p(y2 | y1) is what the second bound bounds.
    np.testing.assert_allclose(bound_first + bound_second, bound, rtol=1e-9)


def test_memory_of_another_dtype(problem):
    """It ended in an error of JAX's triangular solve."""
    f = function(problem[2])
    past = jax.tree.map(lambda a: a.astype(jnp.float32), f)
    with pytest.raises(
        TypeError, match="`past` is float32 and the model's function float64, and nothing is cast silently"
    ):
        online.remember("past", f, past)
    again = jax.tree.map(lambda a: a.astype(jnp.float64), past)
    with handlers.block():
        online.remember("past", f, again)


def test_memory_refuses_what_it_cannot_remember(problem):
    _, _, Zs, qs, _ = problem
    past = function(Zs, qs)
    with pytest.raises(ValueError, match="as many latent functions as the model's function, 2; got None"):
        online.remember("past", function(Zs, num_latents=2), past)
    value = ogp.GPFunction(past.kernel, past.features, past.blocks, (Value(past.beliefs[0].loc), past.beliefs[1]))
    for refused in (lambda: online.remember("past", past, value), lambda: online.start_from("f", value),
                    lambda: online.divergences(value)):  # fmt: skip
        with pytest.raises(ValueError, match="Gaussians of a guide; got values"):
            refused()
    with pytest.raises(ValueError, match="not known with residual='tight'"):
        online.remember("past", function(Zs, qs, residual_scale=jnp.ones(())), past)


@pytest.mark.parametrize("valued, dtype", [((0,), float), ((0, 1), float), ((1,), jnp.float32)], ids=str)
def test_values_stay_values_when_conditioned(problem, valued, dtype):
    """They are joined with what is learned, which hides them from whoever looks at the kind of a covariance."""
    X, y, Zs, qs, Xs = jax.tree.map(lambda a: jnp.asarray(a, dtype), problem)
    f = function(Zs, qs, kernel=kernel(dtype))
    kinds = [Value(q.loc) if i in valued else q for i, q in enumerate(f.beliefs)]
    f = ogp.GPFunction(f.kernel, f.features, f.blocks, tuple(kinds))
    for part in (slice(0, 10), slice(10, 16)):
        f = condition(f, X[part], y[part], gaussian, num_steps=1)
    tol = 1e-7 if dtype is float else 2e-3
    covs = [np.zeros((len(m), len(m))) if i in valued else T @ T.T for i, (m, T) in enumerate(problem[3])]
    sets = [oracles.WhitenedSet(Z, m, S) for Z, (m, _), S in zip(problem[2], problem[3], covs, strict=True)]
    mean, cov = oracles.q_f(KERNEL, sets, np.concatenate([problem[4], problem[0]]))
    mean, cov = dense_condition(mean, cov, problem[1], np.arange(7, 23), NOISE)
    np.testing.assert_allclose(at(f, Xs).mean, mean[:7], atol=tol)
    np.testing.assert_allclose(at(f, Xs).variance, np.diag(cov)[:7], atol=tol)
    new = function(Zs[:1], kernel=kernel(dtype))
    fixed = sum(len(Zs[i]) for i in valued)
    for g in (f, f.diagonalized()):
        with pytest.raises(
            ValueError, match=f"`remember` needs the Gaussians .* no variance in {fixed} of 25 variables"
        ):
            jax.jit(lambda new, g=g: online.remember("past", new, g))(new)  # a constant of a compiled model
        with pytest.raises(ValueError, match=f"`divergences` needs the Gaussians .* no variance in {fixed} of 25"):
            online.drop_sets(g)
    with pytest.raises(ValueError, match=f"`start_from` needs the Gaussians .* no variance in {fixed} of 25"):
        online.start_from("f", f)


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_signs_of_pivots_say_nothing(problem, kind):
    """With natural=True the pivots are not constrained, and another optimizer may take one across zero."""
    _, _, Zs, qs, _ = problem
    m, T = qs[0]
    signs = np.array([1, -1, 1, 1, -1])
    roots = (T, T * signs) if kind == "full" else (np.diag(T), np.diag(T) * signs)
    plain, turned = (
        ogp.GPFunction(f.kernel, f.features, f.blocks, (FAMILIES[kind](jnp.asarray(m), jnp.asarray(root)),))
        for f, root in zip([function(Zs[:1])] * 2, roots, strict=True)
    )
    new = function(Zs, qs)
    np.testing.assert_allclose(online.memory.log_ratio(new, turned), online.memory.log_ratio(new, plain), rtol=1e-12)
    np.testing.assert_allclose(online.divergences(turned), online.divergences(plain), rtol=1e-12)
    for name, value in online.start_from("f", plain).items():
        np.testing.assert_allclose(online.start_from("f", turned)[name], value, rtol=1e-12)


def test_gaussians_of_little_variance_are_gaussians(problem):
    _, _, Zs, qs, _ = problem
    narrow = function(Zs[:1], [(qs[0][0], 1e-9 * qs[0][1])])
    one_narrow = function(Zs[:1], [(qs[0][0], qs[0][1] * np.geomspace(1e-9, 1, 5)[:, None])])
    for f in (narrow, one_narrow):
        assert np.isfinite(online.divergences(f)).all() and set(online.start_from("f", f)) == {
            "f.u0_loc",
            "f.u0_scale_tril",
        }


# ---- other points


def test_a_new_set_leaves_the_fit_as_it_is(problem):
    """Adding points needs nothing of ours: an orthogonal set begins at its prior."""
    X, y, Zs, qs, Xs = problem
    params = {"variance": jnp.asarray(1.3), "lengthscale": jnp.full(2, 0.9)} | problems.q_params(qs)
    O = np.random.default_rng(2).uniform(-2, 2, (3, 2))
    grown = params | problems.q_params([(np.zeros(3), np.eye(3))], "f")
    grown = params | {k.replace("u0", "u2"): v for k, v in grown.items() if "u0" in k}
    kwargs = {"likelihood": problems.gaussian(NOISE)}
    before = problems.posterior(params, X, y, inducing=Zs, **kwargs)
    after = problems.posterior(grown, X, y, inducing=[*Zs, O], **kwargs)
    np.testing.assert_allclose(at(before, Xs).mean, at(after, Xs).mean, atol=1e-12)
    np.testing.assert_allclose(at(before, Xs).variance, at(after, Xs).variance, atol=1e-10)
    dropped = online.drop_sets(after)
    assert len(dropped.features) == 2
    np.testing.assert_allclose(at(dropped, Xs).variance, at(before, Xs).variance, atol=1e-10)
    np.testing.assert_allclose(online.divergences(after)[2], 0, atol=1e-12)
    np.testing.assert_allclose(
        online.divergences(before), [oracles.kl_normal(m, T @ T.T, np.zeros(len(m)), np.eye(len(m))) for m, T in qs]
    )


def test_compress_to_the_same_points_changes_nothing(problem):
    _, _, Zs, qs, Xs = problem
    f = function(Zs, qs)
    for points in (np.concatenate(Zs), np.concatenate([*Zs, Xs])):
        same = compress(f, points, jitter=0.0)
        np.testing.assert_allclose(at(same, Xs).mean, at(f, Xs).mean, atol=1e-8)
        np.testing.assert_allclose(at(same, Xs).variance, at(f, Xs).variance, atol=1e-8)
    as_sets = compress(f, Zs, jitter=0.0)
    for q, (m, T) in zip(as_sets.beliefs, qs, strict=True):
        np.testing.assert_allclose(q.loc, m, atol=1e-9)
        np.testing.assert_allclose(q.scale_tril, T, atol=1e-9)
    params = online.start_from("f", as_sets)
    assert set(params) == set(problems.q_params(qs))


def test_compress_keeps_the_marginal_of_the_points(problem):
    _, _, Zs, qs, Xs = problem
    f = compress(function(Zs, qs), Xs[:4], jitter=0.0)
    mean, cov = oracles.q_f(KERNEL, problems.oracle_sets(Zs, qs), Xs[:4])
    close_joint(f, Xs[:4], mean, cov)


def test_dropping_a_set_in_the_middle(problem):
    _, _, Zs, qs, _ = problem
    idle = (np.zeros(4), np.eye(4))
    O = np.random.default_rng(4).uniform(-2, 2, (3, 2))
    f = function([*Zs, O], [qs[0], idle, problems.random_q(np.random.default_rng(0), 3)])
    dropped = online.drop_sets(f)
    assert [s.num for s in dropped.features] == [5, 3]
    kept = np.concatenate([Zs[0], O])
    mean, cov = (np.asarray(a) for a in online.moments.moments_at(f, dropped.features))
    new_mean, new_cov = (np.asarray(a) for a in online.moments.moments_at(dropped, dropped.features))
    np.testing.assert_allclose(new_mean, mean, atol=1e-8)
    # Marginals of the first set, and of the other given it, are kept; covariance between them is not.
    np.testing.assert_allclose(new_cov[:5, :5], cov[:5, :5], atol=1e-8)
    assert np.isfinite(at(dropped, kept).variance).all()
    with pytest.raises(ValueError, match="cannot run under jit"):
        jax.jit(online.drop_sets)(f)


@pytest.mark.parametrize("idle", [0, 1])
def test_no_set_is_dropped_beside_mean_only_points(problem, idle):
    """They are orthogonal to every set: without one, they would say something else, and the function is another."""
    _, _, Zs, qs, Xs = problem
    G = ogp.MeanOnly(jnp.asarray(Xs[:3]))
    chosen = [(np.zeros(len(m)), np.eye(len(m))) if i == idle else (m, T) for i, (m, T) in enumerate(qs)]
    with pytest.raises(ValueError, match="cannot drop 1 of 2 sets of a function with MeanOnly points"):
        online.drop_sets(function([*Zs, G], chosen))
    f = function([*Zs, G], qs)
    assert online.drop_sets(f) is f


def test_errors(problem):
    X, y, Zs, qs, _ = problem
    f = function(Zs, qs)
    with pytest.raises(ValueError, match="`step_size` must be in"):
        online.condition(f, X, y, gaussian, step_size=0.0)
    with pytest.raises(ValueError, match="with D = 2"):
        online.condition(f, X[:, :1], y, gaussian)
    with pytest.raises(ValueError, match="no MeanOnly points"):
        online.compress(f, [X[:3], ogp.MeanOnly(X[3:])])


# ---- several outputs that share a covariance


@pytest.mark.parametrize("sizes", [1, 2], ids=["one set", "two sets"])
def test_outputs_with_one_covariance_count_it_each(problem, sizes):
    X, y, Zs, _, _ = problem
    Y = np.stack([y, y[::-1], 0.5 * y**2], -1)
    inducing = [jnp.asarray(Z) for Z in Zs[:sizes]]
    d = ogp.CollapsedGP(kernel(), jnp.asarray(X), inducing, NOISE, bound="titsias2009", jitter=0.0)
    f = d.posterior(jnp.asarray(Y))
    each = [d.posterior(jnp.asarray(column)) for column in Y.T]
    divergences = sum(np.asarray(online.divergences(g)) for g in each)
    np.testing.assert_allclose(online.divergences(f), divergences, rtol=1e-9)
    for belief, *single in zip(f.beliefs, *(g.beliefs for g in each), strict=True):
        values = np.random.default_rng(0).normal(size=belief.loc.shape)
        expected = sum(q.log_density(v) for q, v in zip(single, values, strict=True))
        np.testing.assert_allclose(belief.log_density(values), expected, rtol=1e-9)

    def model(X, Y):
        g = ogp.gp("f", kernel(), inducing, num_latents=3, jitter=0.0)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(g(X), NOISE).to_event(1), obs=Y)

    params = online.start_from("f", f)
    assert params["f.u0_scale_tril"].shape == (3, 5, 5)
    loss = TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, ogp.AutoSparseGP(model), jnp.asarray(X), Y)
    np.testing.assert_allclose(-loss, d.log_prob(jnp.asarray(Y)), rtol=1e-9)


def test_noise_stands_for_a_gaussian_likelihood(problem):
    X, y, Zs, _, _ = problem
    f = ogp.CollapsedGP(kernel(), jnp.asarray(X), jnp.asarray(Zs[0]), NOISE).posterior(jnp.asarray(y))
    new, values = jnp.asarray(X[:3] + 0.1), jnp.asarray(y[:3])
    grown = online.condition(f, new, values, 0.2)
    expected = online.condition(f, new, values, lambda f: likelihoods.Gaussian(f, 0.2))
    np.testing.assert_allclose(grown(new).mean, expected(new).mean, rtol=1e-12)
    with pytest.raises(ValueError, match="`likelihood` must be positive"):
        online.condition(f, new, values, -0.2)
    with pytest.raises(
        TypeError, match=r"lambda f: Gaussian\(f, \.\.\.\).*got a Gaussian that has its marginals already"
    ):
        online.condition(f, new, values, likelihoods.Gaussian(f(new), 0.2))


def test_observations_that_are_none(problem):
    """NaN would make the whole function NaN; a mask hides it."""
    X, y, Zs, qs, _ = problem
    f, y = function(Zs, qs, kernel=kernel()), np.array(y)
    y[3] = np.nan
    with pytest.raises(
        ValueError, match=r"`y` must lie in the support of Gaussian.*got nan at \(3,\).*Mask missing outputs"
    ):
        online.condition(f, X, y, NOISE, num_steps=1)
    with pytest.raises(ValueError, match=r"`y` must lie in the support of Bernoulli"):
        online.condition(f, X, np.full(len(X), 2), likelihoods.Bernoulli, num_steps=1)
    seen = ~np.isnan(y)
    masked = online.condition(f, X, y, lambda f: gaussian(f).mask(jnp.asarray(seen)), num_steps=1)
    without = online.condition(f, X[seen], y[seen], NOISE, num_steps=1)
    np.testing.assert_allclose(masked(X).mean, without(X).mean, atol=1e-6)


@pytest.mark.parametrize("kind", ["condition", "with_neighbors", "infer_latents"])
def test_data_are_not_given_to_a_function_that_is_being_fitted(problem, kind):
    """They would count twice: losses were 12 and 3 nats below the negative log evidence."""
    X, y, Zs, _, _ = problem
    y, P = jnp.asarray(y), 2 if kind == "infer_latents" else None

    def model():
        f = ogp.gp("f", kernel(), Zs[0], num_latents=P)
        if kind == "condition":
            f = online.condition(f, X, y, NOISE)
        elif kind == "with_neighbors":
            f = ogp.with_neighbors(f, X, y, NOISE)
        else:
            ogp.infer_latents(f, y[:4].reshape(2, 2), NOISE)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE) if P is None else gaussian(f(X)[..., 0]), obs=y)

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match=rf"`{kind}` needs a function after its fit.* count twice"):
        svi.init(jax.random.PRNGKey(0))


def test_compress_says_what_it_loses():
    X = jnp.linspace(0.0, 1.0, 50)[:, None]
    f = ogp.CollapsedGP(kernels.RBF(0.3), X, X[::5], 0.1).posterior(jnp.sin(6 * X[:, 0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = online.compress(f, X[::16])
    np.testing.assert_allclose(online.divergences(kept).sum(), online.divergences(f).sum(), rtol=0.25)
    with pytest.warns(UserWarning, match=r"Of the 15.3 nats .* `compress` keep 0: .* among the old ones"):
        lost = online.compress(f, X[::5] + 10.0)
    np.testing.assert_allclose(lost(X).mean, 0.0, atol=1e-6)


def dense_compressed(k, X, y, Z, new, noise, jitter, at):
    """Mean and variance of a fit of Gaussian noise at Z, held by other points, from covariances of values alone."""
    K, B = k(Z, Z) + jitter * np.eye(len(Z)), k(Z, X)
    P = K + B @ B.T / noise**2
    C, mean = k(Z, new), k(new, Z) @ np.linalg.solve(P, B @ y) / noise**2
    covariance = k(new, new) + jitter * np.eye(len(new)) - C.T @ np.linalg.solve(K, C) + C.T @ np.linalg.solve(P, C)
    prior, c = k(new, new) + jitter * np.eye(len(new)), k(new, at)
    b = np.linalg.solve(prior, c)
    return b.T @ mean, 1 - np.sum(c * b, 0) + np.sum(b * (covariance @ b), 0)


@pytest.mark.parametrize("lengthscale", [0.4, 1.0])
def test_compress_in_float32_keeps_what_is_known_well(rng, lengthscale):
    """The covariance whitened from both sides, as a difference, made standard deviations 2 and 12 times too large."""
    X, Z, new = rng.uniform(-1, 1, (200, 1)), np.linspace(-1, 1, 15)[:, None], np.linspace(-1.1, 1.1, 18)[:, None]
    y = np.sin(3 * X[:, 0]) + 0.1 * rng.normal(size=200)
    X, Z, new, y = (a.astype(np.float32) for a in (X, Z, new, y))
    f = ogp.CollapsedGP(
        kernels.RBF(np.float32(lengthscale)), jnp.asarray(X), jnp.asarray(Z), np.float32(0.1)
    ).posterior(jnp.asarray(y))
    g = online.compress(f, jnp.asarray(new))(jnp.asarray(Z))
    exact = (a.astype(float) for a in (X, y, Z, new))
    mean, variance = dense_compressed(
        oracles.rbf(1.0, float(np.float32(lengthscale))), *exact, 0.1, 1e-6, Z.astype(float)
    )
    assert g.mean.dtype == jnp.float32
    np.testing.assert_allclose(np.sqrt(g.variance), np.sqrt(variance), rtol=0.08)
    assert (np.abs(g.mean - mean) < 0.08 * np.sqrt(variance)).all()
