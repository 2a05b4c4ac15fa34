"""Integers and truth values where real numbers belong: converted where that loses nothing, refused where it does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from jax import random
from numpy.testing import assert_array_equal
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.errors import check_floating

WHOLE = np.arange(24).reshape(12, 2) % 7


def model(X, y, Z):
    f = ogp.gp("f", kernels.RBF(2.0), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.5), obs=y)


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.int8, bool, "jax"])
def test_a_model_of_integers_is_that_of_their_numbers(kind, x64):
    def loss(X, y):
        svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO())
        result = ogp.fit(svi, random.PRNGKey(0), (X, y), num_steps=3, progress_bar=False, Z=X[:4])
        f = result.posterior()["f"]
        return result.losses, f(X).mean

    with jax.enable_x64(x64):
        X = jnp.asarray(WHOLE) if kind == "jax" else WHOLE.astype(kind)
        dtype = np.float64 if x64 else np.float32
        y = np.asarray(X[:, 0])
        for own, expected in zip(loss(X, y), loss(np.asarray(X, dtype), y.astype(dtype)), strict=True):
            assert own.dtype == dtype
            assert_array_equal(own, expected)


def test_kernels_bounds_and_starts():
    kernel, Z = kernels.Matern32(2.0), WHOLE[:3]
    assert_array_equal(kernel(WHOLE, Z), kernel(WHOLE.astype(float), Z.astype(float)))
    y = WHOLE[:, 1] > 2
    bound = [
        ogp.CollapsedGP(kernel, X, X[:3], 0.5).log_prob(y.astype(t)) for X, t in ((WHOLE, bool), (WHOLE + 0.0, float))
    ]
    assert bound[0] == bound[1]
    assert_array_equal(ogp.init.greedy_variance(kernel, WHOLE, 3), ogp.init.greedy_variance(kernel, WHOLE + 0.0, 3))


def test_float64_arrays_become_what_jax_makes_of_them():
    with jax.enable_x64(False):
        assert check_floating("X", np.zeros(3)).dtype == np.float32
    assert check_floating("X", np.zeros(3)).dtype == np.float64
    assert check_floating("X", np.zeros(3, np.float32)).dtype == np.float32


@pytest.mark.parametrize(
    "x64, largest, dtype",
    [(False, 2**24, np.int32), (False, 2**24, np.int64), (True, 2**53, np.int64), (False, 2**24, np.uint32)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_that_is_exact(x64, largest, dtype, sign):
    if sign < 0 and dtype == np.uint32:
        pytest.skip("no negative numbers")
    with jax.enable_x64(x64):
        x = np.array([0, sign * largest], dtype)
        assert_array_equal(np.asarray(check_floating("X", x), np.float64), x)
        with pytest.raises(
            ValueError, match=rf"`X` is {np.dtype(dtype)} and holds -?{largest + 1}, which .* round.*X - X.min"
        ):
            check_floating("X", x + dtype(sign))


def test_unix_seconds_are_refused_and_not_wrapped_around():
    with jax.enable_x64(False), pytest.raises(ValueError, match="`X` is int64 and holds 5000000000"):
        ogp.init.greedy_variance(kernels.RBF(1.0), np.array([[5_000_000_000], [5_000_000_001]]), 1)


@pytest.mark.parametrize(
    "x, match",
    [
        (np.zeros(3, complex), "real numbers; got complex"),
        (np.array(["a"]), "Text and categories need numbers"),
        (np.array(["2020-01-01"], "datetime64[D]"), r"Times need a start and a unit: \(X - X.min\(\)\)"),
        ("X", "got str"),
    ],
)
def test_what_is_no_real_number(x, match):
    with pytest.raises(TypeError, match=match):
        check_floating("X", x)
