"""Moments at uncertain inputs in float32, where whitened psi statistics would have no digits left."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp.kernels.centred import psi2_centred
from numpyro_orthgp.kernels.expectations import psi1, psi2
from numpyro_orthgp.kernels.hermite import hermite_factors
from tests import oracles

# lengthscale, points in each column, columns, standard deviation of the inputs, noise, kernel
CASES = {
    "dense points": (0.9, 30, 1, 0.3, 0.1),
    "known well": (0.9, 30, 1, 0.05, 0.1),
    "broad": (0.9, 30, 1, 0.9, 0.1),
    "broader": (0.9, 30, 1, 2.7, 0.1),
    "long and little noise": (2.5, 30, 1, 0.5, 0.01),
    "two columns": (1.5, 9, 2, 0.5, 0.1),
}


def dense_moments(k, X, y, Z, noise, loc, scale, jitter):
    """Mean and variance of f at N(loc, scale^2), in float64 by quadrature: of the best q(u) of points with that jitter."""
    K = k(Z, Z)
    W = np.linalg.inv(np.linalg.cholesky(K + jitter * np.diag(K).mean() * np.eye(len(Z))))
    A = W @ k(Z, X)
    S = np.linalg.inv(np.eye(len(Z)) + A @ A.T / noise**2)
    m = S @ A @ y / noise**2
    t, w = np.polynomial.hermite_e.hermegauss(100 if Z.shape[1] == 1 else 40)
    axes = [t] * Z.shape[1]
    nodes = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, Z.shape[1])
    weights = np.ones(1)
    for _ in axes:
        weights = np.outer(weights, w / w.sum()).ravel()
    means, variances = [], []
    for mu, s in zip(loc, scale, strict=True):
        A = W @ k(Z, mu + s * nodes)
        f = m @ A
        means.append(weights @ f)
        prior = np.array([k(x[None], x[None])[0, 0] for x in mu + s * nodes])
        spread = np.sum(A * (S @ A), 0) + prior - np.sum(A**2, 0)
        variances.append(weights @ (spread + (f - weights @ f) ** 2))
    return np.array(means), np.array(variances)


def function_and_inputs(case, rng):
    lengthscale, num, D, s, noise = CASES[case]
    X, loc = rng.uniform(-3, 3, (200, D)), rng.uniform(-2.5, 2.5, (5, D))
    y = np.sin(2 * X).sum(1) + noise * rng.normal(size=200)
    axis = np.linspace(-3.5, 3.5, num)
    Z = np.stack(np.meshgrid(*[axis] * D, indexing="ij"), -1).reshape(-1, D)
    # What float32 sees, for both.
    X, y, Z, loc = (a.astype(np.float32).astype(float) for a in (X, y, Z, loc))
    return lengthscale, X, y, Z, noise, loc, np.full_like(loc, np.float32(s))


@pytest.mark.parametrize("case", CASES)
def test_moments_at_uncertain_inputs_in_float32(case, rng):
    lengthscale, X, y, Z, noise, loc, scale = function_and_inputs(case, rng)
    mean, variance = dense_moments(oracles.rbf(1.0, lengthscale), X, y, Z, noise, loc, scale, 1e-6)

    @jax.jit
    def moments(X, y, Z, loc, scale):
        f = ogp.CollapsedGP(kernels.RBF(jnp.float32(lengthscale)), X, Z, jnp.float32(noise)).posterior(y)
        found = f.expected(ogp.LatentInputs(loc, loc, scale))
        return found.mean, found.variance

    found = moments(*(jnp.asarray(a, jnp.float32) for a in (X, y, Z, loc, scale)))
    assert found[0].dtype == jnp.float32
    # What q(u) itself loses in float32 is in there too.
    np.testing.assert_allclose(found[1] ** 0.5, variance**0.5, rtol=0.02, atol=1e-3)
    np.testing.assert_allclose(found[0], mean, atol=0.01)


def test_inputs_known_well_lose_no_digits_to_what_factors_lack():
    """Beyond the factors there is rounding alone, which was whitened from both sides: standard deviations were off by a third."""
    lengthscale, *_, noise = CASES["known well"]

    @jax.jit
    def moments(X, y, Z, loc, scale):
        f = ogp.CollapsedGP(kernels.RBF(jnp.float32(lengthscale)), X, Z, jnp.float32(noise)).posterior(y)
        return f.expected(ogp.LatentInputs(loc, loc, scale)).variance

    for seed in range(12):
        _, X, y, Z, _, loc, scale = function_and_inputs("known well", np.random.default_rng(seed))
        _, variance = dense_moments(oracles.rbf(1.0, lengthscale), X, y, Z, noise, loc, scale, 1e-6)
        found = moments(*(jnp.asarray(a, jnp.float32) for a in (X, y, Z, loc, scale)))
        np.testing.assert_allclose(found**0.5, variance**0.5, rtol=0.02, atol=1e-4)


def linear(A, B):
    return 0.5 * A @ B.T


KERNELS = {
    "RBF": (lambda c: kernels.RBF(c(0.9)), oracles.rbf(1.0, 0.9)),
    "RBF + Linear": (
        lambda c: kernels.RBF(c(0.9)) + kernels.Linear(c(0.5)),
        lambda A, B: oracles.rbf(1.0, 0.9)(A, B) + linear(A, B),
    ),
    "RBF * Linear": (
        lambda c: kernels.RBF(c(0.9)) * kernels.Linear(c(0.5)),
        lambda A, B: oracles.rbf(1.0, 0.9)(A, B) * linear(A, B),
    ),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_moments_in_float64_at_the_jitter_of_known_inputs(kernel):
    """A gp that was fitted to known inputs. Standard deviations were off by 1e-3 to a half: rounding errors of second moments were
    whitened from both sides."""
    make, k = KERNELS[kernel]

    @jax.jit
    def moments(X, y, Z, loc, scale):
        f = ogp.CollapsedGP(make(jnp.asarray), X, Z, 0.01, jitter=1e-10).posterior(y)
        found = f.expected(ogp.LatentInputs(loc, loc, scale))
        return found.mean, found.variance

    _, X, y, Z, _, loc, _ = function_and_inputs("dense points", np.random.default_rng(0))
    for s in (0.003, 0.05, 0.3):
        scale = np.full_like(loc, s)
        mean, variance = dense_moments(k, X, y, Z, 0.01, loc, scale, 1e-10)
        found = moments(*map(jnp.asarray, (X, y, Z, loc, scale)))
        np.testing.assert_allclose(found[1] ** 0.5, variance**0.5, rtol=1e-4)
        np.testing.assert_allclose(found[0], mean, atol=1e-6)


def composed():
    return (
        0.7 * kernels.RBF(jnp.array([0.8, 1.3])) * kernels.Linear(jnp.array([0.5, 0.2]))
        + kernels.RBF(1.1).on(1)
        + kernels.Constant(0.3)
    )


@pytest.mark.parametrize(
    "kernel", [kernels.RBF(jnp.array([0.9, 1.4])), composed(), kernels.Linear(jnp.array([0.5, 0.2]))]
)
def test_hermite_factors_are_a_root_of_the_second_moment(kernel, rng):
    """The first is the first moment, the sum of all outer products the second, to what the cut-off leaves."""
    Z, loc, scale = (
        jnp.asarray(a) for a in (rng.normal(size=(5, 2)), rng.normal(size=(3, 2)), rng.uniform(0, 0.2, (3, 2)))
    )
    c = hermite_factors(kernel, Z, loc, scale)
    np.testing.assert_allclose(c[0].T, psi1(kernel, Z, loc, scale), rtol=1e-12)
    np.testing.assert_allclose(jnp.einsum("sbm,sbn->bmn", c, c), psi2(kernel, Z, loc, scale), rtol=1e-9)


@pytest.mark.parametrize(
    "kernel",
    [
        kernels.RBF(jnp.array([0.9, 1.4])),
        composed() + kernels.White(0.3).on(1),
        kernels.RBF(1.1).on(1) * kernels.Linear(0.4).on(0) + kernels.Linear(jnp.array([0.5, 0.2])),
        kernels.Matern32(0.7),
    ],
)
def test_centred_moments_are_the_second_less_the_square_of_the_first(kernel, rng):
    """Values and derivatives; nothing, not even rounding, is left where inputs are known."""
    Z, loc, scale = (
        jnp.asarray(a) for a in (rng.normal(size=(5, 2)), rng.normal(size=(3, 2)), rng.uniform(0, 1.5, (3, 2)))
    )
    weights = jnp.asarray(rng.normal(size=(3, 5, 5)))

    def centred(loc, scale):
        return psi2_centred(kernel, Z, loc, scale, psi1(kernel, Z, loc, scale))

    def difference(loc, scale):
        first = psi1(kernel, Z, loc, scale).T
        return psi2(kernel, Z, loc, scale) - first[:, :, None] * first[:, None, :]

    scale = scale.at[0, 1].set(0)
    np.testing.assert_allclose(centred(loc, scale), difference(loc, scale), atol=1e-13)
    one, two = (
        jax.grad(lambda *given, f=f: (weights * f(*given)).sum(), (0, 1))(loc, scale) for f in (centred, difference)
    )
    np.testing.assert_allclose(one, two, atol=1e-12)
    assert np.abs(centred(loc, 0 * scale)).max() < 1e-28


def test_centred_moments_of_points_far_away_are_zero():
    """The ratio of the product's expectation to that of the factors is more than the largest number; both are nothing."""
    kernel, Z, loc = kernels.RBF(1.0), jnp.array([[80.0], [81.0]]), jnp.zeros((1, 1))

    def total(scale):
        return psi2_centred(kernel, Z, loc, scale, psi1(kernel, Z, loc, scale)).sum()

    assert jax.value_and_grad(total)(jnp.ones((1, 1))) == (0, 0)


def test_gradients_in_float32_are_those_of_float64(rng):
    """Of a bound's term that two moments decide, for the inputs' Gaussian and the lengthscale."""
    lengthscale, X, y, Z, noise, loc, scale = function_and_inputs("dense points", rng)

    def term(lengthscale, loc, scale):
        dtype = loc.dtype
        data, targets, points = (jnp.asarray(a, dtype) for a in (X, y, Z))
        f = ogp.CollapsedGP(kernels.RBF(lengthscale), data, points, jnp.asarray(noise, dtype), jitter=1e-6).posterior(
            targets
        )
        m = f.expected(ogp.LatentInputs(loc, loc, scale))
        return jnp.sum((m.mean - 0.5) ** 2 + m.variance)

    gradient = jax.jit(jax.grad(term, (0, 1, 2)))
    args = jnp.asarray(lengthscale), jnp.asarray(loc), jnp.asarray(scale)
    double, single = gradient(*args), gradient(*(a.astype(jnp.float32) for a in args))
    for one, two in zip(single[1:], double[1:], strict=True):
        np.testing.assert_allclose(one, two, atol=0.01 * np.abs(two).max())


def test_collapsed_bound_at_uncertain_inputs_in_float32(rng):
    lengthscale, X, y, Z, noise, _, _ = function_and_inputs("dense points", rng)

    @jax.jit
    def bound(X, y, Z, scale):
        inputs = ogp.LatentInputs(X, X, jnp.full_like(X, scale))
        return ogp.CollapsedGP(kernels.RBF(lengthscale), inputs, Z, noise, jitter=1e-4).log_prob(y)

    for scale in (0.05, 0.3):
        single, double = (bound(*(jnp.asarray(a, t) for a in (X, y, Z, scale))) for t in (jnp.float32, jnp.float64))
        np.testing.assert_allclose(single, double, rtol=1e-3, atol=0.5)
