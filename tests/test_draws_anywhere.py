"""Draws of one run, however they are asked for: by `joint`, within loops of JAX, by paths. Beside dense formulas."""

from __future__ import annotations

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.contrib.control_flow import cond, scan
from numpyro.handlers import seed, substitute, trace

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from tests import problems
from tests.test_one_function import BINS, NODES, NOISE, B, J, assert_mean, bins, elbos, gaussian_problem

Z18 = np.linspace(-0.3, 10.3, 18)[:, None]
X, Y = jnp.asarray(NODES), jnp.asarray(NODES).reshape(B, J, 1)


def by_node(draw, f):
    """One draw for each node of a bin, in a row, for all bins."""
    return jnp.stack([draw(f, Y[:, j]) for j in range(J)], 1).reshape(-1)


DRAWS = {
    "joint, once": lambda f: f.joint(X).sample(numpyro.prng_key()),
    "joint, by node": partial(by_node, lambda f, x: f.joint(x).sample(numpyro.prng_key())),
    "joint, a batch of one": partial(by_node, lambda f, x: f.joint(x).sample(numpyro.prng_key(), (1,))[0]),
    "joint of a term": lambda f: f.term(0).joint(X).sample(numpyro.prng_key()),
    "vmap": lambda f: jax.vmap(lambda x: f(x).sample())(Y).reshape(-1),
    "lax.scan": lambda f: jax.lax.scan(lambda c, x: (c + 0.0 * (v := f(x).sample()).sum(), v), 0.0, Y)[1].reshape(-1),
    "lax.map": lambda f: jax.lax.map(lambda x: f(x).sample(), Y).reshape(-1),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_values_from_anywhere_are_of_the_function_of_this_run(draw):
    """Eighteen points leave nothing undetermined: all ways of drawing give the bound of the dense formula, below log p(y)."""
    y, evidence, params, bound = gaussian_problem(BINS, NODES, Z18)
    draws = elbos(partial(bins, Z18, DRAWS[draw], y), partial(ogp.gp_posterior, "f", 18), params)
    assert_mean(draws, bound, slack=5.0)
    assert bound < evidence


LOOPS = {
    "vmap": lambda f, X: jax.vmap(lambda x: f(x[None]).sample()[0])(X),
    "vmap, of jit": lambda f, X: jax.vmap(jax.jit(lambda x: f(x[None]).sample()[0]))(X),
    "vmap, row by row": lambda f, X: jax.vmap(lambda x: f(x[None]).independent().sample()[0])(X),
    "vmap, shifted": lambda f, X: jax.vmap(lambda x: (2.0 * f(x[None]) / 2.0 + 0.0).sample()[0])(X),
    "lax.map": lambda f, X: jax.lax.map(lambda x: f(x[None]).sample()[0], X),
    "lax.scan": lambda f, X: jax.lax.scan(lambda c, x: (c, f(x[None]).sample()[0]), None, X)[1],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_undetermined_differs_from_step_to_step(loop):
    """Far from all points values are those of the prior, independent of each other: as many normal numbers as steps."""
    far = 10.0 + 0.7 * jnp.arange(400.0)[:, None]

    def model():
        f, g = (ogp.gp(name, kernels.Matern12(1.0), jnp.zeros((1, 1))) for name in "fg")
        return LOOPS[loop](f, far), LOOPS[loop](g, far), f(far[:3]).sample()

    values, others, outside = seed(model, jax.random.PRNGKey(0))()
    for v in (values, others):
        assert_allclose(v.mean(), 0.0, atol=4 / 20)
        assert_allclose(v.std(), 1.0, atol=4 / np.sqrt(800))
    assert abs(np.corrcoef(values, others)[0, 1]) < 4 / 20
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / 20
    assert np.isfinite(outside).all()  # no key of a loop is kept


def test_a_likelihood_that_integrates_by_draws_keeps_no_key_of_a_loop():
    """Softmax needs quasi-Monte Carlo: in a loop as outside of it, up to its error."""
    x = jnp.linspace(0.0, 1.0, 6)[:, None]
    y = jnp.array([0, 1, 2, 0, 1, 2])

    def model(looped):
        f = ogp.gp("f", kernels.RBF(0.5), x[::2], num_latents=3)

        def row(total, at):
            point, label = at
            fn = ogp.likelihoods.Categorical(f(point[None]))
            return total + fn.log_prob(label[None])[0], None

        if looped:
            total, _ = jax.lax.scan(row, 0.0, (x, y))
            return total + 0.0 * f(x).sample().sum()
        return ogp.likelihoods.Categorical(f(x)).log_prob(y).sum()

    values = {"f.u0": 0.3 * jnp.ones((3, 3))}
    run = [seed(substitute(partial(model, looped), values), jax.random.PRNGKey(1))() for looped in (True, False)]
    assert_allclose(*run, atol=0.05)


def test_a_latent_site_of_joint_has_the_prior_of_this_run():
    """The density of f(X) as a latent site is that given u: with q in its place the loss fell below any bound."""
    x = jnp.linspace(0.0, 4.0, 5)[:, None]
    at = jnp.array([0.5, 1.5, -0.5, 0.2, 0.1])
    sites = {}

    def model():
        f = ogp.gp("f", kernels.RBF(1.0), jnp.array([[1.0], [3.0]]))
        sites["of"] = f.joint(x)
        numpyro.sample("v", f.joint(x), obs=at)

    q = problems.q_params([(np.array([0.3, -0.2]), 0.1 * np.eye(2))])
    trace = numpyro.handlers.trace(
        seed(substitute(partial(ogp.gp_posterior, "f", 2), q), jax.random.PRNGKey(0))
    ).get_trace()
    numpyro.handlers.replay(seed(model, jax.random.PRNGKey(1)), trace)()
    u = trace["f.u0"]["value"]
    K = kernels.RBF(1.0)
    Z = jnp.array([[1.0], [3.0]])
    A = np.linalg.solve(np.linalg.cholesky(K(Z, Z) + 1e-10 * np.eye(2)), K(Z, x))
    assert_allclose(sites["of"].mean, A.T @ u, atol=1e-6)
    assert_allclose(sites["of"].covariance_matrix, K(x, x) - A.T @ A, atol=1e-6)


def test_the_joint_distribution_of_tasks_is_given_the_run_too():
    x, task = jnp.linspace(0.0, 4.0, 6)[:, None], jnp.array([0, 1, 0, 1, 1, 0])

    def model():
        f = ogp.gp("f", kernels.RBF(1.0), jnp.array([[1.0], [3.0]]), num_latents=2)
        m, joint = f(ogp.Tasks(x, task)), f.joint(ogp.Tasks(x, task))
        return m, joint, f.joint(x)

    q = problems.q_params([(np.array([[0.3, -0.2], [1.0, 0.4]]), np.stack([0.5 * np.eye(2)] * 2))])
    guide = partial(ogp.gp_posterior, "f", 2, num_latents=2)
    trace = numpyro.handlers.trace(seed(substitute(guide, q), jax.random.PRNGKey(0))).get_trace()
    m, joint, both = numpyro.handlers.replay(seed(model, jax.random.PRNGKey(1)), trace)()
    assert_allclose(joint.mean, both.mean[task, jnp.arange(6)], atol=1e-6)
    assert_allclose(joint.variance, m.residual_variance, atol=1e-6)  # given u nothing but the residual is left


def test_paths_have_no_infinite_amplitude():
    """Of this key, as of one in two thousand, jax makes a Rayleigh number of log(0) in float32."""
    at = jnp.linspace(0.0, 5.0, 20, dtype=jnp.float32)[:, None]
    with seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(np.float32(1.0)), jnp.linspace(-0.2, 5.2, 9, dtype=jnp.float32)[:, None])
    assert np.isfinite(f.sample_paths(jax.random.PRNGKey(5254), 4)(at)).all()


def test_a_draw_of_joint_is_known_to_later_draws():
    x = jnp.linspace(0.0, 4.0, 5)[:, None]

    def model():
        f = ogp.gp("f", kernels.RBF(1.0), jnp.array([[1.0]]))
        joint = f.joint(x)
        first = joint.sample(numpyro.prng_key())
        return first, f(x).sample(), f.joint(x + 1e-4), joint.log_prob(first)

    first, again, near, density = seed(model, jax.random.PRNGKey(0))()
    assert np.array_equal(first, again)
    assert_allclose(near.mean, first, atol=1e-2)
    assert np.isfinite(density)


def two_ways(first, second):
    """f(a) and f(b) by two ways of drawing, in this order."""
    return lambda f, a, b: (first(f, a), second(f, b))


def by_path(f, x):
    return f.sample_paths(numpyro.prng_key(), 1, num_features=32)(x)[0]


def by_sample(f, x):
    return f(x).sample()


def by_joint(f, x):
    return f.joint(x).sample(numpyro.prng_key())


WAYS = {
    "two paths": two_ways(by_path, by_path),
    "a path, then a draw": two_ways(by_path, by_sample),
    "a path, then a joint draw": two_ways(by_path, by_joint),
    "a draw, then a path": two_ways(by_sample, by_path),
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_paths_and_draws_of_a_run_are_of_one_function(ways):
    """y = f(a) - f(b) + noise, and three points that leave most undetermined: the bound of the dense formula."""
    a = np.random.default_rng(3).uniform(0, 10, (8, 1))
    b, Z = a + 0.4, np.linspace(0, 10.4, 3)[:, None]
    A = np.concatenate([np.eye(8), -np.eye(8)], 1)
    y, evidence, params, bound = gaussian_problem(A, np.concatenate([a, b]), Z)

    def model():
        first, second = ways(ogp.gp("f", kernels.RBF(1.5), jnp.asarray(Z)), jnp.asarray(a), jnp.asarray(b))
        with numpyro.plate("data", 8):
            numpyro.sample("y", dist.Normal(first - second, NOISE), obs=y)

    assert_mean(elbos(model, partial(ogp.gp_posterior, "f", 3), params), bound)
    assert bound < evidence


@pytest.mark.parametrize("dtype, atol", [(np.float32, 5e-3), (np.float64, 1e-4)])
@pytest.mark.parametrize("num_latents", [None, 2])
@pytest.mark.parametrize("mean_only", [False, True])
def test_a_path_goes_through_what_was_drawn_and_draws_go_along_it(dtype, atol, num_latents, mean_only):
    x = jnp.linspace(0.0, 4.0, 5, dtype=dtype)[:, None]
    points = jnp.asarray([[1.0]], dtype)

    def model():
        sets = [points, ogp.MeanOnly(points + 1)] if mean_only else points
        f = ogp.gp("f", kernels.RBF(dtype(1.0)), sets, num_latents=num_latents)
        before = f(x).sample()
        path = f.sample_paths(numpyro.prng_key(), 1)
        slopes = f(ogp.Derivative(x + 7, 0)).sample()
        return (
            before,
            path(x)[0],
            f(x + 7).sample(),
            path(x + 7)[0],
            slopes,
            path(ogp.Derivative(x + 7, 0))[0],
            f(x).sample(),
        )

    weights = {} if not mean_only else {"f.u1_weights": jnp.full((1,) if num_latents is None else (2, 1), 2.0, dtype)}
    before, at_same, after, along, slopes, of_path, again = seed(substitute(model, weights), jax.random.PRNGKey(0))()
    assert at_same.dtype == dtype and np.array_equal(before, again)
    assert_allclose(at_same, before, atol=atol)
    assert_allclose(after, along, atol=1e-6)
    assert_allclose(slopes, of_path, atol=1e-6)


def in_scan(step, a, b):
    return jax.lax.scan(lambda carry, at: (carry, step(*at)), None, (a, b))[1]


def in_scan_of_numpyro(step, a, b):
    return scan(lambda carry, at: (carry, step(*at)), None, (a, b))[1]


STEPS = {
    "vmap": lambda step, a, b: jax.vmap(step)(a, b),
    "vmap of jit": lambda step, a, b: jax.vmap(jax.jit(step))(a, b),
    "lax.scan": in_scan,
    "scan": in_scan_of_numpyro,
}


@pytest.mark.parametrize("loop", STEPS.values(), ids=STEPS)
def test_draws_of_one_step_are_of_one_function(loop):
    """y_n = f(a_n) - f(b_n) + noise, both drawn in step n, with much undetermined: the bound of the dense formula."""
    a = np.random.default_rng(3).uniform(0, 10, (8, 1))
    b, Z = a + 0.4, np.linspace(0, 10.4, 3)[:, None]
    A = np.concatenate([np.eye(8), -np.eye(8)], 1)
    y, evidence, params, bound = gaussian_problem(A, np.concatenate([a, b]), Z)

    def model():
        f = ogp.gp("f", kernels.RBF(1.5), jnp.asarray(Z))
        values = loop(lambda a, b: f(a[None]).sample()[0] - f(b[None]).sample()[0], jnp.asarray(a), jnp.asarray(b))
        with numpyro.plate("data", 8):
            numpyro.sample("y", dist.Normal(values, NOISE), obs=y)

    assert_mean(elbos(model, partial(ogp.gp_posterior, "f", 3), params), bound)
    assert bound < evidence


@pytest.mark.parametrize("loop", STEPS.values(), ids=STEPS)
def test_a_step_knows_what_was_drawn_before_the_loop_and_in_itself(loop):
    x = 3.0 + jnp.arange(4.0)[:, None]

    def model():
        f = ogp.gp("f", kernels.RBF(0.3), jnp.zeros((1, 1)))
        before = f(x).sample()
        again, shifted = loop(
            lambda a, b: (
                f(a[None]).sample()[0],
                f(b[None]).sample()[0] - f.joint(b[None]).sample(numpyro.prng_key())[0],
            ),
            x,
            x + 0.5,
        )
        return before, again, shifted

    before, again, shifted = seed(model, jax.random.PRNGKey(0))()
    assert_allclose(again, before, atol=2e-4)
    assert_allclose(shifted, 0.0, atol=2e-4)


@pytest.mark.parametrize("inner", [jax.vmap, lambda step: partial(jax.lax.map, step)], ids=["vmap", "lax.map"])
@pytest.mark.parametrize("outer", [jax.vmap, lambda step: partial(jax.lax.map, step)], ids=["vmap", "lax.map"])
@pytest.mark.parametrize("whole", [lambda run: run, jax.jit], ids=["", "jit"])
def test_a_loop_within_a_step_knows_the_draws_of_the_step(whole, outer, inner):
    x, shifts = 3.0 + jnp.arange(4.0)[:, None], jnp.array([0.0, 5.0])

    def model():
        f = ogp.gp("f", kernels.RBF(0.3), jnp.zeros((1, 1)))

        def step(at):
            return f(at[None]).sample()[0] - inner(lambda shift: f((at + shift)[None]).sample()[0])(shifts)

        return outer(step)(x)

    same, far = whole(lambda: seed(model, jax.random.PRNGKey(0))())().T
    assert_allclose(same, 0.0, atol=2e-4)
    assert np.abs(far).min() > 1e-3


def helper(f, x):
    return f(x).sample()


def custom(f):
    draw = jax.custom_jvp(partial(helper, f))
    draw.defjvp(lambda primals, tangents: (draw(*primals), tangents[0][:, 0]))
    return draw


AT = jnp.linspace(0.0, 4.0, 5)[:, None]
WITHIN = {
    "jit, twice": lambda f: jax.jit(partial(helper, f))(AT) - jax.jit(partial(helper, f))(AT + 1),
    "jit, of the function": lambda f: jax.jit(helper)(f, AT),
    "checkpoint": lambda f: jax.checkpoint(partial(helper, f))(AT),
    "cond": lambda f: jax.lax.cond(AT[0, 0] < 1, partial(helper, f), lambda x: x[:, 0], AT),
    "cond of NumPyro": lambda f: cond(jnp.sum(f(AT).mean) < 99, partial(helper, f), lambda x: x[:, 0], AT),
    "custom_jvp": lambda f: custom(f)(AT),
    "joint": lambda f: jax.jit(lambda x: by_joint(f, x))(AT),
    "a path": lambda f: jax.jit(lambda x: by_path(f, x))(AT),
}
DERIVATIVES = {
    "grad": lambda f: jax.grad(lambda x: f(x).sample().sum())(AT),
    "grad, row by row": lambda f: jax.grad(lambda x: f(x).independent().sample().sum())(AT),
    "jvp": lambda f: jax.jvp(lambda x: f(x).sample(), (AT,), (AT,)),
    "jacobian": lambda f: jax.jacfwd(lambda x: by_joint(f, x[None])[0])(AT[0]),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x[None]).sample()[0]))(AT),
}


def in_model(of):
    with seed(rng_seed=0):
        return of(ogp.gp("f", kernels.RBF(1.0), AT[::2]))


@pytest.mark.parametrize("of", WITHIN.values(), ids=WITHIN)
def test_draws_that_others_cannot_know_are_refused(of):
    """The second call of a jitted helper runs what the first has traced: values of another function, 6 standard errors off."""
    with pytest.raises(ValueError, match=r"`f` is drawn within jax.jit, checkpoint or cond.*Leave jax.jit out"):
        jax.jit(seed(lambda: of(ogp.gp("f", kernels.RBF(1.0), AT[::2])), 0))()  # as in a fit


@pytest.mark.parametrize("of", DERIVATIVES.values(), ids=DERIVATIVES)
def test_a_draw_is_no_function_that_has_a_derivative(of):
    with pytest.raises(ValueError, match=r"`f` within jax.grad, jax.jvp and such.*f\(Derivative\(X, 0\)\).*path"):
        in_model(of)


def test_a_function_can_be_pickled():
    """Outside of a run: in one it holds what has been drawn."""
    f = ogp.CollapsedGP(kernels.RBF(1.0), AT, AT[::2], 0.3).posterior(jnp.sin(AT[:, 0]))
    fitted = ogp.posterior(declared, partial(ogp.gp_posterior, "f", 3), START)["f"]
    for g in (f, fitted):
        assert np.array_equal(pickle.loads(pickle.dumps(g))(AT).mean, g(AT).mean)


def declared():
    f = ogp.gp("f", kernels.RBF(1.0), AT[::2])
    numpyro.sample("y", ogp.likelihoods.Gaussian(f(AT), 0.3).to_event(1), obs=jnp.sin(AT[:, 0]))


START = {"f.u0_loc": jnp.arange(3.0), "f.u0_scale_tril": jnp.eye(3)}


def test_what_may_be_within_jit_and_derivatives():
    def slopes(f):
        path = f.sample_paths(numpyro.prng_key(), 1)
        return jax.vmap(jax.grad(lambda x: path(x[None])[0, 0]))(AT)[:, 0], f(ogp.Derivative(AT, 0)).sample()

    assert_allclose(*in_model(slopes), atol=1e-6)
    assert np.array_equal(in_model(lambda f: jax.jit(f)(AT).mean), in_model(lambda f: f(AT).mean))
    assert in_model(lambda f: jax.checkpoint(lambda x: f(x).independent().sample())(AT)).shape == (5,)
    whole = in_model(lambda f: f(AT).sample())
    assert_allclose(jax.jit(lambda: in_model(lambda f: f(AT).sample()))(), whole, atol=1e-4)
    assert np.isfinite(jax.grad(lambda s: in_model(lambda f: f(s * AT).sample()).sum())(1.0))


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("of", [lambda f, x: f(x), lambda f, x: f.joint(x)], ids=["f(X)", "joint"])
def test_several_draws_of_a_run_are_of_its_one_function(of, num):
    def model():
        f = ogp.gp("f", kernels.RBF(0.3), AT[:1])
        return of(f, AT).sample(numpyro.prng_key(), (num,)), f(AT).sample(), f

    several, one, f = seed(model, jax.random.PRNGKey(0))()
    assert np.array_equal(several, np.stack([one] * num))
    assert f(AT[1:]).sample(jax.random.PRNGKey(0), (500,)).std(0).min() > 0.9  # after the run each is another function


def test_nothing_of_a_step_is_kept_where_jax_looks_for_leaks():
    with jax.checking_leaks():
        twice = in_model(lambda f: jax.lax.map(lambda x: f(x[None]).sample() - f(x[None]).sample(), AT))
    assert np.isfinite(twice).all()


def test_a_step_that_numpyro_runs_twice():
    """To replay a guide, `scan` runs each step once more than it returns: what that draws is not of this run."""
    Z, states, u = jnp.array([[1.0], [4.0]]), jnp.array([1.4, 0.8, 2.4]).reshape(3, 1, 1), jnp.array([0.2, -0.4])

    def model():
        f = ogp.gp("f", kernels.RBF(1.0), Z)

        def step(x, _):
            x = numpyro.sample("state", dist.Normal(x, 0.5).to_event(2))
            return x, numpyro.deterministic("value", f(x).sample())

        scan(step, jnp.ones((1, 1)), None, length=3)

    def guide():
        numpyro.sample("f.u0", dist.Delta(u, event_dim=1))
        numpyro.sample("state", dist.Delta(states, event_dim=3))

    def values(key):
        replayed = numpyro.handlers.replay(seed(model, key), trace(seed(guide, key)).get_trace())
        return trace(replayed).get_trace()["value"]["value"][:, 0]

    draws = np.asarray(jax.jit(partial(jax.lax.map, values))(jax.random.split(jax.random.PRNGKey(0), 4000)))
    points, at = (np.asarray(a, float).ravel() for a in (Z, states))
    A = np.linalg.solve(
        np.linalg.cholesky(np.exp(-((points[:, None] - points) ** 2) / 2)), np.exp(-((points[:, None] - at) ** 2) / 2)
    )
    assert_allclose(draws.mean(0), np.asarray(u) @ A, atol=0.05)
    assert_allclose(draws.var(0), 1 - (A**2).sum(0), rtol=0.12)
