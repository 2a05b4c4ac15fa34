"""``online.from_blocks``: rows that come block by block give the function of all rows at once, and a dense formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, online
from numpyro_orthgp.collapsed.blocks import sums_of_blocks

CUTS = ((0, 10), (10, 11), (11, 11), (11, 130), (130, 203))
NOISE = 0.2


def data(dtype):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(203, 2)).astype(dtype)
    return X, np.sin(X @ np.ones(2)).astype(dtype), X[:15], rng.normal(size=(20, 2)).astype(dtype)


def cut(X, y):
    return ((X[a:b], y[a:b]) for a, b in CUTS)


def kernel(dtype):
    return kernels.RBF(jnp.array([1.0, 1.5], dtype))


def dense(X, y, Z, new, noise, jitter=1e-10):
    """Titsias 2009, Eq. 10, by inverses."""

    def k(A, B):
        return np.exp(-0.5 * (((A[:, None] - B[None]) / np.array([1.0, 1.5])) ** 2).sum(-1))

    K = k(Z, Z) + jitter * np.eye(len(Z))
    Kuf, Kun = k(Z, X), k(Z, new)
    Sigma = np.linalg.inv(K + Kuf @ Kuf.T / noise**2)
    mean = Kun.T @ Sigma @ Kuf @ y / noise**2
    return mean, 1 - np.sum(Kun * np.linalg.solve(K, Kun), 0) + np.sum(Kun * (Sigma @ Kun), 0)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("block_size", [32, 1000])
def test_rows_in_blocks_give_the_function_of_all_rows(dtype, block_size):
    with jax.enable_x64(dtype == np.float64):
        X, y, Z, new = data(dtype)
        f = online.from_blocks(kernel(dtype), Z, NOISE, cut(X, y), block_size=block_size)
        g = ogp.CollapsedGP(kernel(dtype), X, Z, NOISE).posterior(y)
        tolerance = 1e-10 if dtype == np.float64 else 2e-4
        np.testing.assert_allclose(f(new).mean, g(new).mean, atol=tolerance)
        np.testing.assert_allclose(f(new).variance, g(new).variance, atol=tolerance)
        assert jax.tree.structure(f) == jax.tree.structure(g)


def test_a_reader_may_fill_the_same_arrays_again():
    """Blocks that wait to be put together are copies: all had been the rows of the last one."""
    X, y, Z, new = data(np.float32)

    def read():
        rows, outputs = np.empty((29, 2), np.float32), np.empty(29, np.float32)
        for start in range(0, 203, 29):
            rows[:], outputs[:] = X[start : start + 29], y[start : start + 29]
            yield rows, outputs

    for block_size in (64, 1000):
        found, expected = (
            online.from_blocks(kernel(np.float32), Z, NOISE, b, block_size=block_size) for b in (read(), cut(X, y))
        )
        np.testing.assert_allclose(found(new).mean, expected(new).mean, atol=1e-6)


def test_beside_the_dense_formula():
    with jax.enable_x64(True):
        X, y, Z, new = data(np.float64)
        f = online.from_blocks(kernel(np.float64), Z, NOISE, cut(X, y), block_size=50)
        mean, variance = dense(X, y, Z, new, NOISE)
        np.testing.assert_allclose(f(new).mean, mean, atol=1e-6)
        np.testing.assert_allclose(f(new).variance, variance, atol=1e-6)


def test_several_outputs_and_other_noise():
    with jax.enable_x64(True):
        X, y, Z, new = data(np.float64)
        Y = np.stack([y, 5 - y**2], -1)
        make = partial(ogp.CollapsedGP, kernel(np.float64), inducing=Z, noise_scale=NOISE)
        sums = sums_of_blocks(make, cut(X, Y), 64)
        g = ogp.CollapsedGP(kernel(np.float64), X, Z, 3 * NOISE).posterior(Y)
        np.testing.assert_allclose(sums.function(3.0)(new).mean, g(new).mean, atol=1e-9)
        np.testing.assert_allclose(sums.function(3.0)(new).variance, g(new).variance, atol=1e-10)
        assert sums.num_rows == 203


def test_then_new_data_condition_it():
    X, y, Z, _ = data(np.float32)
    f, far = online.from_blocks(kernel(np.float32), Z, NOISE, cut(X, y)), jnp.array([[4.0, 4.0]], np.float32)
    g = online.condition(f, far, jnp.array([3.0], np.float32), 0.01)
    assert abs(float(g(far).mean[0]) - 3.0) < 0.05


def test_words():
    X, y, Z, _ = data(np.float32)
    k = kernel(np.float32)
    with pytest.raises(ValueError, match=r"`blocks` had no rows\. It must yield pairs of inputs"):
        online.from_blocks(k, Z, NOISE, [])
    with pytest.raises(ValueError, match="`blocks` had no rows"):
        online.from_blocks(k, Z, NOISE, [(X[:0], y[:0])])
    with pytest.raises(TypeError, match=r"must yield pairs \(X, y\) of arrays; got ndarray"):
        online.from_blocks(k, Z, NOISE, [X])
    with pytest.raises(ValueError, match=r"X of shape \(B, D\) and y of shape .* got \(203, 2\) and \(200,\)"):
        online.from_blocks(k, Z, NOISE, [(X, y[:200])])
    with pytest.raises(ValueError, match="All blocks must have the same columns"):
        online.from_blocks(k, Z, NOISE, [(X, y), (X, y[:, None])])
    with pytest.raises(ValueError, match="2"):
        online.from_blocks(k, Z, NOISE, [(X[:, :1], y)])
    with pytest.raises(ValueError, match="`y` of a block holds NaN or infinite numbers"):
        online.from_blocks(k, Z, NOISE, [(X, y), (X, np.full_like(y, np.nan))])
    with pytest.raises(ValueError, match="`X` of a block holds NaN or infinite"):
        online.from_blocks(k, Z, NOISE, [(X * np.nan, y)])
    with pytest.raises(ValueError, match="`block_size` must be"):
        online.from_blocks(k, Z, NOISE, [(X, y)], block_size=0)
