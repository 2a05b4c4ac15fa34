"""Triangular systems by products: LAPACK's solutions and their derivatives; and no call of LAPACK that starts threads."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.linalg import solve_triangular
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.math import triangular
from numpyro_orthgp.math.cholesky import inverse_cholesky, root_of_inverse
from numpyro_orthgp.math.triangular import BLOCK, THREADED, inverse_lower, solve_lower, solve_right

DTYPES = [jnp.float32, jnp.float64]
SIZES = [
    1,
    5,
    64,
    65,
    131,
    600,
]  # LAPACK; LAPACK a few columns at a time; halves; halves of halves, some solved for by halves


def lower(rng, *batch, M):
    A = rng.normal(size=(*batch, M, M)) / np.sqrt(M)
    return np.tril(A, -1) + (1 + rng.uniform(size=(*batch, M, 1))) * np.eye(M)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num", [1, 7, 300])
@pytest.mark.parametrize("M", SIZES)
def test_solutions(rng, M, num, dtype):
    L, B = lower(rng, M=M), rng.normal(size=(M, num))
    rtol = 3e-5 if dtype == jnp.float32 else 1e-12
    expected = np.linalg.solve(L, B)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(
        solve_lower(jnp.asarray(L, dtype), jnp.asarray(B, dtype)) / scale, expected / scale, atol=rtol
    )
    W = inverse_lower(jnp.asarray(L, dtype))
    np.testing.assert_allclose(W, np.linalg.inv(L), atol=rtol * np.abs(np.linalg.inv(L)).max())
    right = solve_right(jnp.asarray(B.T, dtype), jnp.asarray(L, dtype), W)
    np.testing.assert_allclose(right / scale, expected.T / scale, atol=rtol)


@pytest.mark.parametrize("M", [3, 70, 140])
def test_leading_axes_broadcast(rng, M):
    L, B = jnp.asarray(lower(rng, 3, M=M)), jnp.asarray(rng.normal(size=(M, 2)))
    np.testing.assert_allclose(L @ solve_lower(L, B), jnp.broadcast_to(B, (3, M, 2)), atol=1e-11)
    many = jnp.broadcast_to(B, (4, M, 2))
    np.testing.assert_allclose(L[0] @ solve_lower(L[0], many), many, atol=1e-11)
    np.testing.assert_allclose(jax.vmap(solve_lower, (0, None))(L, B), solve_lower(L, B), rtol=1e-12)


@pytest.mark.parametrize("M", [5, 90])
@pytest.mark.parametrize("mode", ["reverse", "forward", "second"])
def test_derivatives(rng, M, mode):
    L, B = jnp.asarray(lower(rng, 2, M=M)), jnp.asarray(rng.normal(size=(2, M, 3)))
    V, dL = jnp.asarray(rng.normal(size=(2, M, 3))), jnp.asarray(rng.normal(size=(2, M, M)))

    def along(solve):
        def value(L, B):
            return jnp.vdot(V, jnp.sin(solve(L, B)))

        if mode == "reverse":
            return jax.grad(value, (0, 1))(L, B)
        first = lambda L, B: jax.jvp(value, (L, B), (dL, jnp.cos(B)))[1]  # noqa: E731
        return first(L, B) if mode == "forward" else jax.grad(first, (0, 1))(L, B)

    ours, theirs = along(solve_lower), along(lambda L, B: solve_triangular(L, B, lower=True))
    by_inverse = along(lambda L, B: inverse_lower(L) @ B)
    for a, b, c in zip(*map(jax.tree.leaves, (ours, theirs, by_inverse)), strict=True):
        size = float(jnp.abs(b).max())
        np.testing.assert_allclose(a / size, b / size, atol=1e-10)
        np.testing.assert_allclose(c / size, b / size, atol=1e-10)


@pytest.mark.parametrize("M", [60, 200, 500])
def test_ill_conditioned_systems_are_solved_as_precisely_as_by_lapack(M):
    """|L X - B| relative to |L| |X| in float32, at a condition number of about the jitter's."""
    Z = np.random.default_rng(0).normal(size=(M, 3))
    K = np.exp(-((Z[:, None] - Z) ** 2).sum(-1) / 2) + 1e-5 * np.eye(M)
    L = np.linalg.cholesky(K)
    B = L @ np.random.default_rng(1).normal(size=(M, 400))  # of small solutions, which a product with the inverse loses
    single, right = jnp.asarray(L, jnp.float32), jnp.asarray(B, jnp.float32)

    def error(X):
        X = np.asarray(X, float)
        exact = np.asarray(single, float) @ X
        return np.max(np.abs(exact - np.asarray(right, float)) / (np.abs(L) @ np.abs(X)))

    assert error(solve_lower(single, right)) < 3 * error(solve_triangular(single, right, lower=True))
    W = inverse_lower(single)
    assert error(solve_right(right.T, single, W).T) < 3 * error(solve_triangular(single, right, lower=True))


@pytest.mark.parametrize("M", [4, 100])
def test_roots_of_inverses(rng, M):
    A = rng.normal(size=(2, M, M))
    K = A @ np.swapaxes(A, -1, -2) + np.eye(M)
    T = root_of_inverse(jnp.asarray(K), jnp.ones(2))
    np.testing.assert_array_equal(T, jnp.tril(T))
    np.testing.assert_allclose(T @ T.mT, np.linalg.inv(K), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(root_of_inverse(jnp.asarray(K)), T, rtol=1e-12, atol=1e-12)
    singular = jnp.asarray(K).at[1].set(1.0)
    assert bool(jnp.isnan(root_of_inverse(singular)[1]).any()) and bool(
        jnp.isfinite(root_of_inverse(singular)[0]).all()
    )
    assert bool(jnp.isfinite(root_of_inverse(singular, jnp.ones(2))).all())


# ---------------------------------------------------------------- threads


def lapack_calls(function, *args):
    """Of the program for CPUs: rows of factors, entries of right-hand sides."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",)).as_text()
    factors, sides = [], []
    for name, types in re.findall(r"custom_call @lapack_[sd](potrf|trsm)_ffi.*? : \((.*?)\) ->", text):
        operands = [[int(n) for n in dims.split("x")[:-1]] for dims in re.findall(r"tensor<([^>]*)>", types)]
        if name == "potrf":
            factors.append(operands[0][-1])
        else:
            sides.append(operands[1][-1] * operands[1][-2])
    return factors, sides


@pytest.mark.parametrize("M", [64, 65, 256, 1024])
def test_lapack_gets_small_blocks(M):
    K = jax.ShapeDtypeStruct((M, M), jnp.float32)
    factors, sides = lapack_calls(lambda K: inverse_cholesky(K, 1.0), K)
    assert max(factors) <= BLOCK and max(sides) < THREADED
    assert len(factors) == 2 ** int(np.ceil(np.log2(M / BLOCK)))  # rescued in the same loop: nothing is compiled twice


M, N = 150, 200
X, Z = np.random.default_rng(0).normal(size=(2, N, 2))
Z = Z[:M]
KERNEL = kernels.RBF(1.0)


def model(X, y, sets):
    f = ogp.gp("f", KERNEL, sets)
    noise = numpyro.param("noise", 0.3, constraint=dist.constraints.positive)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def update(sets, **options):
    svi = SVI(model, ogp.AutoSparseGP(model, **options), optax.adam(0.01), TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), X, X[:, 0], sets)
    return lambda: svi.update(state, X, X[:, 0], sets)


def natural():
    guide = ogp.AutoSparseGP(model, natural=True)
    svi = SVI(model, guide, ogp.natural_gradient(optax.adam(0.01), 0.5), TraceMeanField_ELBO())
    state = svi.init(jax.random.key(0), X, X[:, 0], Z)
    return lambda: svi.update(state, X, X[:, 0], Z)


def collapsed(bound="titsias2025"):
    def value(Z):
        gp = ogp.CollapsedGP(KERNEL, X, [Z, Z + 0.1], 0.1, bound=bound)
        return gp.log_prob(X[:, 0])

    return lambda: jax.value_and_grad(value)(jnp.asarray(Z))


def fitted():
    return ogp.CollapsedGP(KERNEL, X, Z, 0.1).posterior(X[:, 0])


PATHS = {
    "svgp": lambda: update(Z),
    "solve-gp, tight": lambda: update([Z, Z + 0.1], residual="tight"),
    "natural": natural,
    "collapsed": collapsed,
    "upper bound": lambda: lambda: ogp.CollapsedGP(KERNEL, X, Z, 0.1).upper_bound(X[:, 0]),
    "posterior": lambda: fitted,
    "joint draws": lambda: lambda: fitted().joint(X).sample(jax.random.key(0)),
    "paths": lambda: lambda: fitted().sample_paths(jax.random.key(0), 2)(X),
    "remembered": lambda: lambda: ogp.online.compress(fitted(), Z[:100]),
    "greedy points": lambda: lambda: ogp.init.greedy_variance(KERNEL, jnp.asarray(X), 3, given=jnp.asarray(Z)),
}


@pytest.mark.parametrize("name", PATHS)
def test_no_path_calls_lapack_with_what_starts_threads(name):
    factors, sides = lapack_calls(PATHS[name]())
    assert factors and max(factors) <= BLOCK
    assert sides and max(sides) < THREADED


# ---------------------------------------------------------------- GPUs


@pytest.fixture
def gpu(monkeypatch):
    """Programs are cut as for a GPU, and run on the CPU."""
    jax.clear_caches()
    monkeypatch.setattr(triangular, "_platform", lambda: "cuda")
    yield
    jax.clear_caches()


def test_blocks_follow_the_default_device(monkeypatch):
    assert triangular.block() == BLOCK
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert triangular.block() == BLOCK
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert triangular.block() == 256
    with jax.default_device(jax.devices("cpu")[0]):
        assert triangular.block() == BLOCK
    with jax.default_device("cpu"):
        assert triangular.block() == BLOCK


@pytest.mark.parametrize(("M", "num"), [(256, 1), (257, 2), (1024, 4)])
def test_gpus_get_large_blocks_and_few_products(M, num, gpu):
    K = jax.ShapeDtypeStruct((M, M), jnp.float32)
    program = jax.jit(lambda K: inverse_cholesky(K, 1.0)).trace(K)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @cusolver_potrf_ffi") == num
    assert text.count("stablehlo.dot_general") <= 16 * (num - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [200, 300])
def test_blocks_of_gpus_give_the_same_factors(rng, M, dtype, gpu):
    A = rng.normal(size=(M, M))
    K = A @ A.T / M + np.eye(M)
    W = inverse_cholesky(jnp.asarray(K, dtype), jnp.ones((), dtype))
    rtol = 3e-5 if dtype == jnp.float32 else 1e-12
    np.testing.assert_allclose(W, np.linalg.inv(np.linalg.cholesky(K)), atol=rtol)
    B = rng.normal(size=(M, 400))
    L = np.linalg.cholesky(K)
    np.testing.assert_allclose(
        solve_lower(jnp.asarray(L, dtype), jnp.asarray(B, dtype)), np.linalg.solve(L, B), atol=8 * rtol
    )
