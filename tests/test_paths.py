"""Posterior paths against the dense posterior, and what makes them functions: one value at one input, however they are called."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp.functions import paths
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.mean_only import MeanShift
from numpyro_orthgp.functions.prior import check_latents, decompose_sets
from numpyro_orthgp.functions.projection import project
from numpyro_orthgp.gaussians.family import Full, Shifted, Value, Whitened
from numpyro_orthgp.inducing import InducingPatches, InducingPoints, as_sets, covariance_of_points
from tests import oracles, problems
from tests.test_random_features import z_scores

NUM, B, D = 20_000, 6, 2
KEY = jax.random.PRNGKey(0)
MATERN = 1.3 * kernels.Matern52(0.9)
ORACLE = oracles.matern52(1.3, 0.9)


def function(kernel, inducing, qs, *, jitter=1e-10, dtype=jnp.float64) -> GPFunction:
    """A function with sets, beliefs and, after the sets, weights of mean-only points."""
    features, mean_only = as_sets(jax.tree.map(partial(jnp.asarray, dtype=dtype), inducing))
    blocks = jax.jit(lambda kernel, features: decompose_sets(kernel, features, jitter))(kernel, features)
    shift = None
    if mean_only is not None:
        *qs, weights = qs
        products = [s.covariance_with_inputs(kernel, mean_only.points) @ weights for s in features]
        projected = tuple(p[..., 0] for p in project(blocks, [p[..., None] for p in products]))
        shift = MeanShift(mean_only.points, weights, projected)
    return GPFunction(kernel, features, blocks, tuple(qs), shift, num_latents=check_latents(None, kernel, features))


def full(rng, M, batch=()) -> Whitened:
    T = np.tril(0.3 * rng.normal(size=(*batch, M, M)), -1) + 0.6 * np.eye(M)
    return Full(jnp.asarray(rng.normal(size=(*batch, M))), jnp.asarray(T))


class Case(NamedTuple):
    f: GPFunction
    X: jax.Array
    mean: np.ndarray  # (P, B)
    covariance: np.ndarray  # (P, B, B)


def dense(f: GPFunction, X, *, jitter=0.0) -> Case:
    """The dense oracle's moments."""
    sets = []
    for s, q in zip(f.features, f.beliefs, strict=True):
        T = q.lower_root()
        sets.append(oracles.WhitenedSet(np.asarray(s.points), np.asarray(q.loc), np.asarray(T @ T.T)))
    shift = None if f.shift is None else oracles.MeanOnlySet(np.asarray(f.shift.points), np.asarray(f.shift.weights))
    mean, covariance = oracles.q_f(ORACLE, sets, np.asarray(X), jitter, shift)
    return Case(f, X, mean[None], covariance[None])


def own(f: GPFunction, X) -> Case:
    """The moments of ``f.joint``, which other tests hold against the oracle."""
    joint = jax.jit(lambda f: f.joint(X))(f)
    B = X.shape[0]
    return Case(f, X, np.reshape(joint.mean, (-1, B)), np.reshape(joint.covariance_matrix, (-1, B, B)))


def three_sets(rng, X):
    """So much noise on the inducing variables that paths would show it if prior functions did not have it."""
    qs = [full(rng, 4), Shifted(jnp.ones(3)), full(rng, 3)]
    return dense(function(MATERN, problems.sets(rng, (4, 3, 3)), qs, jitter=0.5), X, jitter=[0.5 * 1.3] * 3)


def mean_only(rng, X):
    """After a Gaussian and a known value."""
    inducing = [*problems.sets(rng, (4, 3)), ogp.MeanOnly(rng.uniform(-2, 2, (4, D)))]
    known = Value(jnp.asarray(rng.normal(size=3)))
    return dense(function(MATERN, inducing, [full(rng, 4), known, jnp.asarray(rng.normal(size=4))]), X)


def latents(rng, X):
    """Hyperparameters and points of each latent function's own, and a sum of kernels."""
    kernel = jnp.asarray([1.0, 2.0]) * kernels.RBF([[0.7, 1.3], [0.9, 0.4]]) + kernels.Linear(0.3)
    sets = [rng.uniform(-2, 2, (2, 4, D)), rng.uniform(-2, 2, (3, D))]
    return own(function(kernel, sets, [full(rng, 4, (2,)), full(rng, 3, (2,))]), X)


def patches(rng, X):
    """Images of 2 x 3 pixels, of whose function patches see one part."""
    X = jnp.asarray(rng.normal(size=(B, 6)))
    options = {"image_shape": (2, 3), "patch_shape": (2, 2), "weights": [0.7, -1.2], "location": kernels.RBF(2.0)}
    kernel = 0.8 * kernels.Convolutional(kernels.RBF(1.5), **options) + kernels.Linear(0.2)
    Z = InducingPatches(rng.normal(size=(4, 4)), rng.uniform(0, 1, (4, 2)))
    return own(function(kernel, Z, [full(rng, 4)]), X)


def patches_beside_a_product(rng, X):
    """A product with patches of the same size comes first: the inducing variables are of the second term alone."""
    X = jnp.asarray(rng.normal(size=(B, 6)))
    options = {"image_shape": (2, 3), "patch_shape": (2, 2)}
    product = kernels.Constant(0.3) * kernels.Convolutional(kernels.RBF(3.0), **options)
    kernel = product + kernels.Convolutional(kernels.RBF(1.0), weights=[0.7, -1.2], **options)
    return own(function(kernel, InducingPatches(kernels.extract_patches(X, **options)[:, 0]), [full(rng, B)]), X)


def collapsed(rng, X):
    data, y = (jnp.asarray(a) for a in problems.data(rng, 20))
    Z = jnp.asarray(rng.uniform(-2, 2, (6, D)))
    return own(jax.jit(lambda y: ogp.CollapsedGP(MATERN, data, Z, 0.3).posterior(y))(y), X)


CASES = [three_sets, mean_only, latents, patches, patches_beside_a_product, collapsed]


def diagonalized(rng, X):
    case = three_sets(rng, X)
    return case._replace(f=jax.jit(lambda f: f.diagonalized())(case.f))


@pytest.mark.parametrize("case", [*CASES, diagonalized], ids=lambda case: case.__name__)
def test_mean_and_covariance_are_those_of_the_posterior(rng, case):
    f, X, mean, covariance = case(rng, jnp.asarray(rng.uniform(-2, 2, (B, D))))
    draws = jax.jit(lambda f: f.sample_paths(KEY, NUM, num_features=6)(X))(f)
    assert draws.shape == ((NUM, B) if f.num_latents is None else (NUM, B, f.num_latents))
    draws = draws.reshape(NUM, B, -1)
    for p, (m, C) in enumerate(zip(mean, covariance, strict=True)):
        assert np.abs(z_scores(draws[..., p], m, C)).max() < 5


draw = jax.jit(lambda f, key: f.sample_paths(key, 5, num_features=64))


@pytest.fixture(scope="module")
def example():
    """A function seen through two sets, 5 paths and inputs."""
    rng = np.random.default_rng(3)
    f = function(MATERN, problems.sets(rng, (5, 4)), [full(rng, 5), full(rng, 4)], jitter=0.0)
    return f, draw(f, KEY), jnp.asarray(rng.uniform(-2, 2, (7, D)))


def test_each_path_at_inputs_of_its_own(example):
    _, drawn, X = example
    X = X + jnp.arange(5.0)[:, None, None] / 5
    values = drawn(X)
    assert values.shape == (5, 7)
    for i in range(5):
        assert_allclose(values[i], drawn(X[i])[i], rtol=1e-12, atol=1e-13)


def test_some_of_the_paths(example):
    _, drawn, X = example
    values = drawn(X)
    assert drawn.num == 5
    assert_allclose(drawn.pick(slice(1, 3))(X), values[1:3], rtol=1e-12)
    assert_allclose(drawn.pick(np.array([4, 0]))(X), values[np.array([4, 0])], rtol=1e-12)
    one_by_one = jax.jit(jax.vmap(lambda i, x: drawn.pick(i)(x[None])[0, 0]))(jnp.arange(5), X[:5])
    assert_allclose(one_by_one, np.diag(values), rtol=1e-12)


def test_many_paths_are_computed_in_blocks(example, monkeypatch):
    _, drawn, X = example

    def value_and_gradient():
        value, back = jax.vjp(drawn, X)
        return value, *back(jnp.sin(value))

    whole = jax.jit(value_and_gradient)()
    monkeypatch.setattr(paths, "MAX_ENTRIES", 2 * 65 * len(X))  # two paths at once
    assert "scan" in str(jax.make_jaxpr(drawn)(X))
    for in_blocks, at_once in zip(jax.jit(lambda: value_and_gradient())(), whole, strict=True):
        assert_allclose(in_blocks, at_once, rtol=1e-10, atol=1e-12)


def test_gradient_equals_finite_differences(example):
    _, drawn, X = example
    value = jax.jit(lambda X: drawn(X)[2].sum())
    step = 1e-6
    for d in range(D):
        shift = step * jnp.eye(D)[d]
        numeric = (drawn(X + shift)[2] - drawn(X - shift)[2]) / (2 * step)
        assert_allclose(jax.grad(value)(X)[:, d], numeric, rtol=1e-6, atol=1e-7)


def test_paths_pass_through_known_values(example):
    """With Z = X and no uncertainty left every path interpolates, whatever its prior function."""
    f, _, X = example
    es = [jnp.asarray(np.random.default_rng(M).normal(size=M)) for M in (5, 4)]
    Z = np.concatenate([s.points for s in f.features])
    u = np.linalg.cholesky(ORACLE(Z, Z)) @ np.concatenate(es)
    certain = [Full(e, 1e-9 * jnp.eye(len(e))) for e in es]
    drawn = draw(replace(f, beliefs=tuple(certain)), KEY)
    assert_allclose(drawn(Z), np.broadcast_to(u, (5, 9)), atol=1e-8)
    assert np.std(np.asarray(drawn(X)), axis=0).max() > 0.3  # but not elsewhere


def test_another_key_is_another_draw(example):
    f, drawn, X = example
    assert np.abs(draw(f, jax.random.PRNGKey(1))(X) - drawn(X)).min() > 1e-4


def test_weights_of_covariances_are_as_precise_as_projections():
    """In float32 they lose no more digits than A_i(x) themselves, dense and smooth as the sets may be."""
    rng = np.random.default_rng(0)
    sets, X = [rng.uniform(-3, 3, (M, 1)) for M in (40, 20)], rng.uniform(-3, 3, (100, 1))
    changes = [rng.normal(size=(M, 8)) for M in (40, 20)]

    @jax.jit
    def both(sets, X, d):
        kernel, points = kernels.RBF(1.0), [InducingPoints(Z) for Z in sets]
        blocks = decompose_sets(kernel, points, 1e-6)
        K = [covariance_of_points(kernel, Z, X) for Z in sets]
        folded = jax.linear_transpose(partial(project, blocks), d)(tuple(d))[0]
        projected = project(blocks, K)
        return sum(A.T @ c for A, c in zip(projected, d, strict=True)), sum(
            k.T @ c for k, c in zip(K, folded, strict=True)
        )

    truth, same = both(sets, X, changes)
    assert_allclose(same, truth, atol=1e-7)
    in_float32 = both(*jax.tree.map(np.float32, (sets, X, changes)))
    by_projection, by_weights = (np.abs(np.asarray(v, float) - truth).max() for v in in_float32)
    assert 0.001 < by_weights < 1.5 * by_projection


def test_float32_is_kept(rng):
    kernel = jnp.float32(1.3) * kernels.Matern52(jnp.float32(0.9))
    beliefs = [jax.tree.map(jnp.float32, full(rng, 5)), jax.tree.map(jnp.float32, full(rng, 4))]
    f = function(kernel, problems.sets(rng, (5, 4)), beliefs, jitter=1e-6, dtype=jnp.float32)
    values = draw(f, KEY)(jnp.zeros((3, D), jnp.float32))
    assert values.dtype == jnp.float32
    assert np.isfinite(values).all()


def test_fitted_functions(rng):
    X, y = (jnp.asarray(a) for a in problems.data(rng, 12))
    kwargs = {"inducing": problems.sets(rng, [4]), "likelihood": problems.gaussian(0.3)}
    guide = ogp.AutoSparseGP(problems.model, residual="tight")  # of which the fitted function keeps nothing
    params = problems.q_params([(np.ones(4), 1e-9 * np.eye(4))])

    @jax.jit
    def paths_and_mean(params):
        f = ogp.posterior(problems.model, guide, params, X, y, **kwargs)["f"]
        Z = kwargs["inducing"][0]
        return f.sample_paths(KEY, 3, num_features=8)(Z), f(jnp.asarray(Z)).mean

    values, mean = paths_and_mean(params)
    assert_allclose(values, np.broadcast_to(mean, (3, 4)), atol=1e-6)


def test_while_a_tightened_bound_is_fitted_paths_are_refused(example):
    f = replace(example[0], residual_scale=jnp.ones(()), fitting=True)
    with pytest.raises(ValueError, match=r"while fitting\. Draw from the fitted function: posterior"):
        f.sample_paths(KEY, 2)


def test_errors(example):
    f, drawn, X = example
    with pytest.raises(ValueError, match=r"num = 5 for inputs of its own.*got \(2, 7, 2\)"):
        drawn(jnp.stack([X, X]))
    with pytest.raises(ValueError, match=r"shape \(n, D\) with D = 2"):
        drawn(X[:, :1])
    with pytest.raises(TypeError, match="float32 but the inducing variables are float64"):
        drawn(X.astype(jnp.float32))
    with pytest.raises(ValueError, match="NaN or infinite"):
        drawn(X.at[0, 0].set(jnp.nan))
    with pytest.raises(ValueError, match="`num` must be a positive integer; got 0"):
        f.sample_paths(KEY, 0)
    with pytest.raises(ValueError, match=r"`num_features` must be a positive integer; got 2\.5"):
        f.sample_paths(KEY, 2, num_features=2.5)
    with pytest.raises(TypeError, match="without White"):
        function(MATERN + kernels.White(0.1), X, [full(np.random.default_rng(0), 7)]).sample_paths(KEY, 2)


def test_sets_that_are_no_points_are_refused():
    class Feature(NamedTuple):
        num: int = 3
        dtype: type = jnp.float64

    with pytest.raises(TypeError, match=r"points or patches, .*got Feature"):
        GPFunction(MATERN, (Feature(),), (), ()).sample_paths(KEY, 2)
    images = kernels.Convolutional(kernels.RBF(), image_shape=(2, 3), patch_shape=(2, 2)).on(range(6))
    f = function(images, InducingPatches(np.eye(4)), [full(np.random.default_rng(0), 4)])
    with pytest.raises(ValueError, match=r"number of input columns from images, .*no such terms"):
        f.sample_paths(KEY, 2)
