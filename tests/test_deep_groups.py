"""Deep GPs whose last layer is tightened in groups of rows: inner layers are drawn jointly within groups."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.functions.shared_draws import draw_by_groups
from numpyro_orthgp.gaussians.family import Full
from numpyro_orthgp.math.grouped import Grouping
from tests import oracles, problems
from tests.test_deep import NOISE, XS, YS, elbo, linear_inside, log_evidence, warped

Z1, Z2 = np.array([[-1.0], [0.5]]), np.array([[-1.5], [0.0], [1.5]])
QS = [problems.random_q(np.random.default_rng(0), 2), problems.random_q(np.random.default_rng(1), 3)]
K1, K2 = problems.kernel_oracle("rbf", 0.5, 0.7), problems.kernel_oracle("rbf", 1.0, 0.9)


def stack(X, y, *, by_hand=False, N=None):
    """As `tests.test_deep.narrow`: two points leave much of the inner layer open."""
    f1 = ogp.gp("f1", 0.5 * kernels.RBF(0.7), jnp.asarray(Z1), jitter=0.0)
    f2 = ogp.gp("f2", kernels.RBF(0.9), jnp.asarray(Z2), jitter=0.0)
    with numpyro.plate("data", N or len(X), subsample_size=len(X)):
        f = f2((f1(X).sample() + X[:, 0])[:, None]) if by_hand else ogp.DeepGP([f1, f2], means=[jnp.eye(1)])(X)
        numpyro.sample("y", likelihoods.Gaussian(f, NOISE), obs=y)


def guide_of(model, size, inner="prior"):
    group_size = None if size is None else {"f2": size}
    return ogp.AutoSparseGP(model, residual={"f1": inner, "f2": "tight"}, group_size=group_size)


def at_rows(h, size):
    """The expected log density of y and what groups are charged, given the values of the inner layer (3,)."""
    sets = problems.oracle_sets([Z2], QS[1:])
    mean, cov = oracles.q_f(K2, sets, h[:, None])
    R, total = oracles.residual_covariance(K2, sets, h[:, None]), 0.0
    explained = np.diag(cov - R)
    total -= 0.5 * np.sum(np.log(2 * np.pi * NOISE**2) + ((YS - mean) ** 2 + explained) / NOISE**2)
    for first in range(0, 3, size):
        b = slice(first, first + size)
        total -= np.linalg.slogdet(np.eye(len(R[b])) + R[b, b] / NOISE**2)[1] / 2
    return total


def dense(size, v):
    """The bound by a product rule over the joint law of the inner layer within groups."""
    inner = problems.oracle_sets([Z1], QS[:1])
    mean, cov = oracles.q_f(K1, inner, XS)
    R = oracles.residual_covariance(K1, inner, XS)
    root = np.linalg.cholesky(cov - R + v * R)
    t, w = np.polynomial.hermite_e.hermegauss(12)
    nodes = np.stack(np.meshgrid(t, t, t, indexing="ij"), -1).reshape(-1, 3)
    weights = np.prod(np.stack(np.meshgrid(w, w, w, indexing="ij"), -1).reshape(-1, 3), -1) / w.sum() ** 3
    value = weights @ np.array([at_rows(mean + root @ z + XS[:, 0], size) for z in nodes])
    kl = oracles.kl_q(K1, inner) + oracles.kl_q(K2, problems.oracle_sets([Z2], QS[1:]))
    return value - kl - 3 * (v - np.log(v) - 1) / 2


def values(model, guide, v=1.0, num=4000):
    params = problems.q_params(QS[:1], "f1") | problems.q_params(QS[1:], "f2")
    params |= {} if v == 1.0 else {"f1_residual_scale": jnp.asarray(v)}
    keys = jax.random.split(jax.random.PRNGKey(3), num)
    draws = np.asarray(jax.jit(jax.vmap(lambda k: elbo(model, guide, params, k, XS, YS)))(keys))
    return draws.mean(), draws.std() / num**0.5


@pytest.mark.parametrize(("size", "inner", "v", "by_hand"), [(3, "prior", 1.0, False), (2, "tight", 0.4, False),
                                                              (3, "prior", 1.0, True)])  # fmt: skip
def test_the_bound_is_that_of_joint_draws(size, inner, v, by_hand):
    def model(X, y):
        stack(X, y, by_hand=by_hand)

    mean, error = values(model, guide_of(model, size, inner), v)
    expected = dense(size, v)
    assert error < 0.05 and abs(mean - expected) < 4 * error
    assert expected < log_evidence()


def test_groups_are_never_worse_and_stay_below_the_evidence():
    """Fitted by groups of all rows, so that the bound comes close to the evidence."""
    svi = SVI(stack, guide_of(stack, 3), optax.adam(0.02), TraceMeanField_ELBO(num_particles=10))
    params = svi.run(jax.random.PRNGKey(0), 500, XS, YS, progress_bar=False).params
    keys = jax.random.split(jax.random.PRNGKey(7), 4000)

    def bounds(size):
        guide = guide_of(stack, size)
        return np.asarray(jax.jit(jax.vmap(lambda k: elbo(stack, guide, params, k, XS, YS)))(keys))

    whole, pairs, rows = (bounds(size) for size in (3, 2, 1))
    single = bounds(None)  # rows are drawn by themselves: other draws, of the same marginals
    error = [d.std() / 4000**0.5 for d in (whole, pairs, rows, single)]
    assert rows.mean() < pairs.mean() + 4 * error[1] and pairs.mean() < whole.mean() + 4 * error[0]
    assert rows.mean() < whole.mean()
    assert abs(rows.mean() - single.mean()) < 4 * np.hypot(error[2], error[3])
    assert whole.mean() < log_evidence() + 4 * error[0]


def test_a_deterministic_inner_layer_warps_the_inputs():
    rng = np.random.default_rng(3)
    X, y = problems.data(rng, 11)
    Z, q = problems.sets(rng, [4])[0], problems.random_q(rng, 4)
    params = problems.q_params([q], "f2") | {
        "f1.u0_loc": jnp.asarray([[0.7, 0.3], [-0.4, 1.1]]),
        "f1.u0_scale_tril": 1e-13 * jnp.eye(2)[None].repeat(2, 0),
    }
    deep = ogp.AutoSparseGP(linear_inside, residual={"f2": "tight"}, group_size={"f2": 4})
    value = jax.jit(lambda p: elbo(linear_inside, deep, p, jax.random.PRNGKey(0), X, y, Z2=jnp.asarray(Z)))(params)

    def shallow(X, y):
        f = ogp.gp("f2", kernels.Matern52(0.8), jnp.asarray(Z), jitter=0.0)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)

    guide = ogp.AutoSparseGP(shallow, residual="tight", group_size=4)
    own = problems.q_params([q], "f2")
    expected = jax.jit(lambda p: elbo(shallow, guide, p, jax.random.PRNGKey(0), jnp.asarray(warped(X)), y))(own)
    inner = sum(
        oracles.kl_normal(np.asarray(m), np.asarray(T) @ np.asarray(T).T, np.zeros(2), np.eye(2))
        for m, T in zip(params["f1.u0_loc"], params["f1.u0_scale_tril"], strict=True)
    )
    np.testing.assert_allclose(float(value) + inner, float(expected), rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("own_kernels", "grouping", "group"),
    [
        (False, Grouping(3), [0, 0, 0, 1, 1]),
        (True, Grouping(3), [0, 0, 0, 1, 1]),
        (False, Grouping(2, 1), [0, 1, 2, 3, 3]),
    ],
)
def test_draws_have_the_law_of_q_within_groups(dtype, own_kernels, grouping, group):
    """Two sets, a scaled residual, near rows; a ragged last group, or single rows before one group."""
    rng = np.random.default_rng(2)
    X, Zs = np.sort(rng.uniform(-1, 1, (5, 1)), 0), [np.array([[-0.5]]), np.array([[0.6]])]
    qs, v = [problems.random_q(rng, 1) for _ in Zs], np.array([0.5, 2.0])
    scale = np.array([[0.8], [0.8]]) if own_kernels else 0.8
    kernel = kernels.Matern52(jnp.asarray(scale, dtype))
    with handlers.block(), handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernel, [jnp.asarray(Z, dtype) for Z in Zs], num_latents=2, jitter=0.0)
    beliefs = tuple(Full(*(jnp.stack([jnp.asarray(a, dtype)] * 2) for a in q)) for q in qs)
    f = replace(f, beliefs=beliefs, residual_scale=jnp.asarray(v, dtype), fitting=True, grouping=grouping)
    keys = jax.random.split(jax.random.PRNGKey(0), 20000)
    drawn = jax.jit(jax.vmap(lambda k: draw_by_groups(f, jnp.asarray(X, dtype), k, ())))(keys)
    assert drawn.shape == (20000, 5, 2) and drawn.dtype == dtype
    k, sets = problems.kernel_oracle("matern52", 1.0, 0.8), problems.oracle_sets(Zs, qs)
    mean, cov = oracles.q_f(k, sets, X)
    R = oracles.residual_covariance(k, sets, X)
    together = np.asarray(group)[:, None] == group
    for p in range(2):
        expected = np.where(together, cov - R + v[p] * R, 0)
        np.testing.assert_allclose(drawn[..., p].mean(0), mean, atol=0.03)
        np.testing.assert_allclose(np.cov(drawn[..., p].T), expected, atol=0.04)


def test_what_stays_refused():
    def particles(X, y):
        f1 = ogp.gp("f1", kernels.RBF(0.7), jnp.asarray(Z1))
        f2 = ogp.gp("f2", kernels.RBF(0.9), jnp.asarray(Z2))
        with numpyro.plate("data", len(X)):
            f, log_weights = ogp.DeepGP([f1, f2]).particles(X, 2)
            numpyro.sample("y", likelihoods.Mixture(likelihoods.Gaussian(f, NOISE), log_weights), obs=y)

    def of_others(X, y):
        f1 = ogp.gp("f1", kernels.RBF(0.7), jnp.asarray(Z1))
        f2 = ogp.gp("f2", kernels.RBF(0.9), jnp.asarray(Z2))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(ogp.DeepGP([lambda x: f1(x) + 1.0, f2])(X), NOISE), obs=y)

    def by_rows(X, y):
        f1 = ogp.gp("f1", kernels.RBF(0.7), jnp.asarray(Z1))
        f2 = ogp.gp("f2", kernels.RBF(0.9), jnp.asarray(Z2))
        with numpyro.plate("data", len(X)):
            H = f1(X).independent().sample()[:, None] + X
            numpyro.sample("y", likelihoods.Gaussian(f2(H), NOISE), obs=y)

    def loss(model, guide):
        svi = SVI(model, guide, optax.adam(1e-2), TraceMeanField_ELBO())
        return svi.evaluate(svi.init(jax.random.PRNGKey(0), XS, YS), XS, YS)

    with pytest.raises(ValueError, match="these rows are several draws of one point"):
        loss(particles, guide_of(particles, 2))
    with pytest.raises(TypeError, match="needs inner layers made by gp"):
        loss(of_others, guide_of(of_others, 2))
    with pytest.raises(ValueError, match="Give `group_size` for the last layer alone"):
        loss(stack, ogp.AutoSparseGP(stack, residual="tight", group_size=2))
    with pytest.raises(ValueError, match="was drawn row by row before"):
        loss(by_rows, guide_of(by_rows, 2))
    assert np.isfinite(loss(by_rows, guide_of(by_rows, None)))


@pytest.mark.parametrize("jointly", [True, False])
def test_a_collapsed_layer_needs_joint_draws(jointly):
    """It sees all rows at once, as a group does."""

    def model(X, y):
        marginals = ogp.gp("f1", kernels.RBF(0.7), jnp.asarray(Z1))(X)
        H = (marginals if jointly else marginals.independent()).sample()[:, None] + X
        numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(0.9), H, jnp.asarray(Z2), NOISE), obs=y)

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(1e-2), TraceMeanField_ELBO())
    if jointly:
        assert np.isfinite(svi.evaluate(svi.init(jax.random.PRNGKey(0), XS, YS), XS, YS))
    else:
        with pytest.raises(ValueError, match="CollapsedGP sees all rows at once, and 'f1' was drawn row by row before"):
            svi.init(jax.random.PRNGKey(0), XS, YS)
        with numpyro.handlers.seed(rng_seed=0):  # no q, so draws of the prior
            model(XS, YS)


def test_a_fit_in_batches_of_groups_and_what_comes_after():
    X = np.linspace(-1, 1, 24)[:, None]
    y = np.sign(X[:, 0]) + 0.1 * np.random.default_rng(0).normal(size=24)

    def model(X, y):
        stack(X, y, N=24)

    svi = SVI(model, guide_of(model, 4, "tight"), optax.adam(3e-2), TraceMeanField_ELBO())
    result = ogp.fit(svi, jax.random.PRNGKey(0), (X, y), batch_size=8, group_size=4, num_steps=150, progress_bar=False)
    assert result.losses[-10:].mean() < result.losses[:10].mean()
    functions = ogp.posterior(model, svi.guide, result.params, X, y)
    f, _ = ogp.DeepGP([functions["f1"], functions["f2"]], means=[jnp.eye(1)]).particles(
        X, 50, rng_key=jax.random.PRNGKey(1)
    )
    assert np.isfinite(likelihoods.Gaussian(f, NOISE).log_predictive(jnp.repeat(y, 50))).all()
