"""Marginals: their arithmetic against dense matrices, their draws, and what they do inside a model."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp.functions import draws as module
from numpyro_orthgp.functions.sites import Names

B = 3
X = jnp.array([[-0.6], [0.1], [0.9]])
Z = jnp.array([[-1.0], [0.0], [1.0]])
OFFSET = np.array([0.5, -1.0, 2.0])
FACTOR = np.array([2.0, -0.5, 1.5])
W = np.array([[1.0, -0.5, 0.0], [0.3, 2.0, -1.0]])


@functools.cache
def function(num_latents: int | None, key: int = 0) -> ogp.GPFunction:
    """A function outside of any fit, u known: f | u has only residual variance, joint over inputs."""
    with numpyro.handlers.seed(rng_seed=key):
        return ogp.gp("f", 1.3 * kernels.Matern32(0.8), Z, num_latents=num_latents)


# What is done to f(X), and to vectors of its values: the dense matrix and offset of an affine map, by rows of outputs.
SINGLE = {
    "f": lambda f: f,
    "+ scalar": lambda f: f + 2.0,
    "+ array": lambda f: f + OFFSET,
    "array +": lambda f: OFFSET + f,
    "- array": lambda f: f - OFFSET,
    "array -": lambda f: OFFSET - f,
    "* scalar": lambda f: f * 3,
    "* array": lambda f: f * FACTOR,
    "array *": lambda f: FACTOR * f,
    "/ array": lambda f: f / FACTOR,
    "unary -": lambda f: -f,
    "chain": lambda f: -(f * FACTOR + OFFSET) * 0.5 - 1.0,
}
MULTIPLE = {
    "f": lambda f: f,
    "+ (P,)": lambda f: f + OFFSET[:2],
    "+ (B, 1)": lambda f: f + OFFSET[:, None],
    "* (P,)": lambda f: f * FACTOR[:2],
    "* (B, P)": lambda f: f * (FACTOR[:, None] * OFFSET[:2]),
    "@ W": lambda f: f @ W,
    "chain": lambda f: -((f * FACTOR[:, None] + 1.0) @ W) * OFFSET + FACTOR,
    "@ W * (B, P) @ V": lambda f: ((f @ W) * np.outer(FACTOR, OFFSET) + 2.0) @ W.T - 1.0,
    "B = P": lambda f: (f @ W) * FACTOR,
    "(P,) -": lambda f: OFFSET - f @ W / 2,
    "[..., p]": lambda f: f[..., 1],
    "[..., p] * array": lambda f: f[:, -2] * FACTOR + OFFSET,
    "[..., [p, q]]": lambda f: f[..., [1, 0]] * FACTOR[:2],
    "@ W [..., p]": lambda f: (f @ W)[..., 1],
    "@ W [..., p] * array": lambda f: (f @ W + 1.0)[:, 0] * FACTOR - OFFSET,
    "@ W * (B, P) [..., a:b] @ V": lambda f: ((f @ W) * np.outer(FACTOR, OFFSET))[..., 1:] @ W[:, 1:] + 1.0,
    "[..., [p, q]] @ W [..., p]": lambda f: (f[..., [1, 0]] @ W)[..., 2] / 3,
}
CASES = [(None, op) for op in SINGLE] + [(2, op) for op in MULTIPLE]
cases = pytest.mark.parametrize(("num_latents", "op"), CASES)


def operation(num_latents, op):
    return (SINGLE if num_latents is None else MULTIPLE)[op]


def affine(fn, shape):
    """The matrix and offset of ``fn`` on arrays of ``shape``, flattened."""
    size = int(np.prod(shape))
    offset = np.asarray(fn(np.zeros(shape))).ravel()
    columns = [np.asarray(fn(np.eye(size)[i].reshape(shape))).ravel() - offset for i in range(size)]
    return np.stack(columns, -1), offset


@cases
def test_moments_of_arithmetic(num_latents, op, rng):
    shape = (B,) if num_latents is None else (B, num_latents)
    mean, e, r = rng.normal(size=shape), rng.uniform(0.1, 1, shape), rng.uniform(0.1, 1, shape)
    v = np.asarray(0.6 if num_latents is None else [0.6, 1.5])
    A, offset = affine(operation(num_latents, op), shape)
    for scale, factor in ((None, np.ones_like(v)), (jnp.asarray(v), v)):
        m = operation(num_latents, op)(ogp.Marginals(*map(jnp.asarray, (mean, e, r)), residual_scale=scale))
        assert isinstance(m, ogp.Marginals) and m.shape == m.mean.shape == m.variance.shape
        assert_allclose(m.mean.ravel(), A @ mean.ravel() + offset, rtol=1e-12)
        assert_allclose(m.explained_variance.ravel(), A**2 @ e.ravel(), rtol=1e-12)
        assert_allclose(m.residual_variance.ravel(), A**2 @ (factor * r).ravel(), rtol=1e-12)
        assert_allclose(m.variance, m.explained_variance + m.residual_variance, rtol=1e-12)
        assert m.num_latents == (None if m.mixing is None and m.mean.ndim == 1 else num_latents)


def z_scores(draws, mean, covariance):
    """How many standard errors the sample mean and covariance are away."""
    S, deviation = len(draws), draws - mean
    sample = deviation.T @ deviation / S
    stderr = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / S)
    z_mean = (draws.mean(0) - mean) / np.sqrt(np.diag(covariance) / S)
    return max(np.abs(z_mean).max(), np.abs((sample - covariance) / stderr).max())


@cases
def test_covariance_of_draws(num_latents, op):
    fn, f = operation(num_latents, op), function(num_latents)
    m = fn(f(X))
    shape = (B,) if num_latents is None else (B, num_latents)
    A, offset = affine(fn, shape)
    joint = f.joint(X)
    prior = np.zeros((*shape, *shape))
    for p in range(num_latents or 1):
        block = joint.covariance_matrix if num_latents is None else joint.covariance_matrix[p]
        prior[(slice(None), slice(None)) if num_latents is None else (slice(None), p, slice(None), p)] = block
    size = int(np.prod(shape))
    prior = prior.reshape(size, size)
    mean = A @ np.asarray(joint.mean.T).ravel() + offset
    for marginals, latent in ((m, prior), (m.independent(), np.diag(np.diag(prior)))):
        # Not compiled as a whole: the operations are the same ones in all cases.
        draws = np.asarray(marginals.sample(jax.random.PRNGKey(1), (20_000,)))
        assert draws.shape == (20_000, *m.shape)
        # 1e-9: an output that an operation leaves without variance must not divide by zero
        assert z_scores(draws.reshape(len(draws), -1), mean, A @ latent @ A.T + 1e-9 * np.eye(len(mean))) < 4.5


@pytest.mark.parametrize("key", [0, -1, slice(1, None), [2, 0]], ids=str)
@pytest.mark.parametrize("mixed", [False, True])
def test_picked_outputs_are_columns(mixed, key, rng):
    """Of everything that a likelihood looks at, and of draws, with v for all latent functions, for each, and without."""
    mean, e, r = (jnp.asarray(rng.uniform(0.5, 1, (B, 3))) for _ in range(3))
    mix = jnp.asarray(rng.normal(size=(3, 3)))
    for v in (None, jnp.asarray(0.6), jnp.asarray([0.6, 1.5, 0.2])):
        m = ogp.Marginals(mean, e, r, residual_scale=v)
        m = (m @ mix) * jnp.asarray(rng.normal(size=(B, 3))) if mixed else m
        picked = m[..., key]
        names = ("mean", "variance", "explained_variance", "residual_variance", "tightening_cost")
        for name in names if mixed else (*names, "explained", "residual", "latent_variance"):
            assert_allclose(getattr(picked, name), getattr(m, name)[..., key], rtol=1e-13, err_msg=name)
        cost = m.point_cost if mixed else m.tightening_cost[..., key]
        assert_allclose(picked.point_cost, cost if mixed or isinstance(key, int) else cost.sum(-1), rtol=1e-13)
        nodes = jnp.asarray(rng.normal(size=(5, B, 3)))
        assert_allclose(picked.at(nodes if mixed else nodes[..., key]), m.at(nodes)[..., key], rtol=1e-12)
        assert picked.tight == m.tight


def test_a_picked_output_is_drawn_as_a_column_of_the_same_function():
    m, rng_key = (function(2)(X) + 1.0) @ W, jax.random.PRNGKey(0)
    draw = jax.jit(lambda m: m.sample(rng_key, (4,)))
    whole = draw(m)
    assert_allclose(draw(m[..., 1]), whole[..., 1], rtol=1e-12)
    assert_allclose(draw(m[:, [2, 0]] * 2.0), 2 * whole[..., [2, 0]], rtol=1e-12)
    again = jax.tree.unflatten(*jax.tree.flatten(m[..., 1])[::-1])
    assert_allclose(draw(again), whole[..., 1], rtol=1e-12)


def test_arithmetic_with_jax_arrays_from_the_left():
    m, offset = function(None)(X), jnp.asarray(OFFSET)
    assert_allclose((offset - m).mean, OFFSET - m.mean)
    assert_allclose((offset + m).mean, OFFSET + m.mean)
    assert_allclose((offset * m).variance, OFFSET**2 * m.variance)
    assert_allclose((m / 4).variance, m.variance / 16)


def test_stack_is_side_by_side():
    f, g = function(None, 0), function(None, 1)
    m = ogp.stack([f(X), 2.0 * g(X)])
    for part, column in ((f(X), 0), (2.0 * g(X), 1)):
        for name in ("mean", "variance", "explained_variance", "residual_variance"):
            assert_allclose(getattr(m, name)[:, column], getattr(part, name), rtol=1e-12)
    by_hand = ogp.stack([f(X), replace(g(X), total=None)])
    assert by_hand.total is None and m.total is not None
    assert_allclose(by_hand.variance[:, 1], g(X).variance, rtol=1e-12)
    draws = np.asarray(jax.jit(lambda m: m.sample(jax.random.PRNGKey(0), (20_000,)))(m))
    covariance = np.zeros((2 * B, 2 * B))
    covariance[::2, ::2], covariance[1::2, 1::2] = f.joint(X).covariance_matrix, 4 * g.joint(X).covariance_matrix
    assert z_scores(draws.reshape(len(draws), -1), np.asarray(m.mean).ravel(), covariance) < 4.5
    mixed = ogp.stack([f(X), g(X)]) @ np.ones((2, 1))
    assert_allclose(mixed.variance[:, 0], f(X).variance + g(X).variance, rtol=1e-12)


def test_a_square_factor_follows_numpy_broadcasting(rng):
    mean = rng.normal(size=(B, B))
    m = ogp.Marginals(jnp.asarray(mean), jnp.ones((B, B)), jnp.ones((B, B)))
    assert_allclose((m * FACTOR).mean, mean * FACTOR)
    assert_allclose((m * FACTOR[:, None]).mean, mean * FACTOR[:, None])
    assert_allclose((m * FACTOR[:, None]).variance, np.broadcast_to(2 * FACTOR[:, None] ** 2, (B, B)))


@pytest.mark.parametrize("value", [np.uint8(200), np.array([1, 2, 200], np.uint8), np.array([True, False, True]), 3])
def test_integers_are_numbers(value):
    m = function(None)(X)
    number = np.asarray(value, float)
    assert_allclose((m - value).mean, m.mean - number)
    assert_allclose((m * value).variance, m.variance * number**2)
    assert (m * value).variance.dtype == m.variance.dtype


def test_python_numbers_keep_float32():
    m = ogp.Marginals(*(jnp.ones(B, jnp.float32) for _ in range(3)))
    m = -(2.5 * m + 1.0) * 3 - np.arange(B)
    assert {a.dtype for a in (m.mean, m.variance, m.sample(jax.random.PRNGKey(0)))} == {jnp.dtype("float32")}


def test_a_small_residual_is_not_lost_beside_a_large_explained_variance():
    m = ogp.Marginals(jnp.zeros(B), jnp.full(B, 1e9), jnp.full(B, 1e-9), residual_scale=jnp.asarray(0.5))
    assert_allclose(m.residual_variance, 5e-10, rtol=1e-12)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("operation", "error", "message"),
    [
        (
            lambda f, g: f + np.ones((B, 1)),
            ValueError,
            r"broadcasts to the shape \(3,\) of f\(X\); got \(3, 1\).*array\[:, 0\]",
        ),
        (
            lambda f, g: g * np.ones(B),
            ValueError,
            r"broadcasts to the shape \(3, 2\) of f\(X\); got \(3,\).*array\[:, None\]",
        ),
        (lambda f, g: f - np.ones(7), ValueError, r"`f\(X\) \+ array` needs an array"),
        (lambda f, g: f + f, TypeError, r"Marginals \+ Marginals: the result needs the covariance"),
        (lambda f, g: f * f, TypeError, r"Marginals \* Marginals"),
        (
            lambda f, g: f @ W,
            ValueError,
            r"`f\(X\) @ W` needs f\(X\) of shape \(B, P\) and W of shape \(P, Q\); got \(3,\)",
        ),
        (lambda f, g: g @ W.T, ValueError, r"got \(3, 2\) and \(3, 2\)"),
        (lambda f, g: 1.0 / f, TypeError, r"Only sums with arrays"),
        (lambda f, g: jnp.ones((2, B)) @ f, TypeError, r"covariances between rows.*f\(Average\(nodes, A\)\)"),
        (lambda f, g: np.ones((2, B)) @ f, TypeError, r"covariances between rows"),
        (lambda f, g: f**2, TypeError, r"`f\(X\) \*\* n` is not Gaussian"),
        (lambda f, g: f * 1j, TypeError, r"`f\(X\) \* array` needs a real array, since f is real; got dtype complex"),
        (lambda f, g: f + np.ones(B, complex), TypeError, r"needs a real array"),
        (lambda f, g: f / f, TypeError, r"Marginals / Marginals"),
        (lambda f, g: f[..., 0], TypeError, r"picks outputs of an f\(X\) of shape \(B, P\).* for shape \(3,\)"),
        (lambda f, g: g[0], TypeError, r"got the key 0 for shape \(3, 2\)\. For other inputs index X: f\(X\[rows\]\)"),
        (lambda f, g: list(g), TypeError, r"cannot be iterated over"),
        (lambda f, g: g[1:, 0], TypeError, r"index X"),
        (lambda f, g: g[np.array([0, 1]), 0], TypeError, r"index X"),
        (lambda f, g: g[...], TypeError, r"index X"),
        (lambda f, g: g[..., None, 0], TypeError, r"index X"),
        (lambda f, g: g[..., 0.0], TypeError, r"must be an integer, a slice or a list of integers; got 0\.0"),
        (lambda f, g: g[..., [True, False]], TypeError, r"list of integers; got \[True, False\]"),
        (lambda f, g: g[..., None], TypeError, r"list of integers; got None"),
        (lambda f, g: g[..., 2], IndexError, r"p must lie in 0\.\.1 for f\(X\) of shape \(3, 2\); got 2"),
        (lambda f, g: g[..., [0, -3]], IndexError, r"p must lie in 0\.\.1"),
        (lambda f, g: g[..., 2:], ValueError, "at least one output"),
        (lambda f, g: g[..., [1, -1]], ValueError, r"none twice; got \[1, -1\]"),
        (lambda f, g: ogp.stack([(g @ W)[..., 0], f]), ValueError, r"Stack first, then mix"),
        (lambda f, g: (g @ W)[..., 0] @ W, ValueError, r"got \(3,\)"),
        (lambda f, g: ogp.stack([f, g]), ValueError, r"`stack` needs marginals of one shape \(B,\)"),
        (lambda f, g: ogp.stack([]), ValueError, r"`stack` needs marginals of one shape"),
        (
            lambda f, g: ogp.stack([f, replace(f, residual_scale=jnp.ones(()))]),
            ValueError,
            "all functions tightened or none",
        ),
        (
            lambda f, g: f.sample(),
            ValueError,
            r"`sample\(\)` needs a random key: give `rng_key`, or run the model under",
        ),
    ],
)
def test_what_is_refused(operation, error, message):
    f, g = function(None)(X), function(2)(X)
    with pytest.raises(error, match=message):
        operation(f, g)


def test_large_joint_draws_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_JOINT_DRAW", 2)
    m = function(None)(X)
    with pytest.raises(ValueError, match=r"joint draw at B = 3 inputs .* the limit is 2.*f\(X\).independent\(\)"):
        m.sample(jax.random.PRNGKey(0))
    assert m.independent().sample(jax.random.PRNGKey(0)).shape == (B,)


# ---------------------------------------------------------------- pytree


def test_round_trip_through_jit_and_leaves():
    m = (function(2)(X) + 1.0) @ W
    for again in (jax.tree.unflatten(*jax.tree.flatten(m)[::-1]), jax.jit(lambda m: m)(m)):
        assert_allclose(again.mean, m.mean)
        assert_allclose(again.variance, m.variance)
        key = jax.random.PRNGKey(0)
        assert_allclose(again.sample(key), m.sample(key))


def test_names_never_recompile():
    traces = []

    @jax.jit
    def mean(m):
        traces.append(1)
        return m.mean

    for name in ("a", "b"):
        mean(ogp.Marginals(*(jnp.ones(B) for _ in range(3)), names=Names(name)))
    assert len(traces) == 1


def test_vmap_over_a_batch_of_marginals(rng):
    shifts = jnp.asarray(rng.normal(size=(4, B)))
    f = function(None)
    batch = jax.vmap(lambda shift: 2.0 * f(X + shift[:, None]) + shift)(shifts)
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    draws = jax.vmap(lambda m, key: m.sample(key))(batch, keys)
    for i, shift in enumerate(shifts):
        one = 2.0 * f(X + shift[:, None]) + shift
        assert_allclose(batch.variance[i], one.variance, rtol=1e-10)
        assert_allclose(draws[i], one.sample(keys[i]), rtol=1e-6)


# ---------------------------------------------------------------- sample() inside a model


@pytest.mark.parametrize("num_latents", [None, 2])
def test_tight_draws_in_a_minibatch_pay_for_v(num_latents):
    y, N, v = jnp.array([0.3, -1.0, 2.0]), 12, np.array(0.4 if num_latents is None else [0.4, 1.7])

    def model():
        f = ogp.gp("f", 1.3 * kernels.Matern32(0.8), Z, num_latents=num_latents)
        with numpyro.plate("data", N, subsample_size=B):
            rate = f(X).sample() if num_latents is None else f(X).sample().sum(-1)
            numpyro.deterministic("rate", rate)
            numpyro.sample("y", dist.Normal(rate, 0.5), obs=y)

    def guide():
        ogp.gp_posterior("f", len(Z), residual="tight", num_latents=num_latents)

    params = {"f_residual_scale": jnp.asarray(v)}
    key = jax.random.PRNGKey(3)
    loss = TraceMeanField_ELBO().loss(key, params, model, guide)
    # the same draws by hand: q is the prior, so the divergence is zero
    model_key, guide_key = jax.random.split(key)
    guide_trace = numpyro.handlers.trace(
        numpyro.handlers.substitute(numpyro.handlers.seed(guide, guide_key), params)
    ).get_trace()
    trace = numpyro.handlers.trace(
        numpyro.handlers.replay(numpyro.handlers.seed(model, model_key), guide_trace)
    ).get_trace()
    fit = dist.Normal(trace["rate"]["value"], 0.5).log_prob(y).sum()
    cost = B * ((v - np.log(v) - 1) / 2).sum()
    assert cost > 0.1
    assert_allclose(-loss, N / B * (fit - cost), rtol=1e-10)
    assert trace["f.residual_cost0"]["is_observed"]


def test_two_tight_draws_in_one_model_have_names_of_their_own():
    def model():
        f = ogp.gp("f", 1.3 * kernels.Matern32(0.8), Z)
        numpyro.deterministic("a", f(X).sample())
        numpyro.deterministic("b", f(X + 0.5).sample())

    def guide():
        ogp.gp_posterior("f", len(Z), residual="tight")

    params = {"f_residual_scale": jnp.asarray(0.4)}
    loss = TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide)
    assert_allclose(loss, 2 * B * (0.4 - np.log(0.4) - 1) / 2, rtol=1e-10)


def test_outputs_that_jax_computes_are_picked_by_pick():
    m = function(2)(X)
    with pytest.raises(TypeError, match=r"p must be known while the model is traced.*f\(X\)\.pick\(p\)"):
        jax.jit(lambda p: m[..., p].mean)(jnp.asarray([1]))
    which = jnp.asarray([1, 0, 1])
    assert_allclose(jax.jit(lambda p: m.pick(p).mean)(which), np.asarray(m.mean)[np.arange(3), which])
