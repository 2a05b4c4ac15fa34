"""Random functions against their kernels: moments over many draws, exact properties of single ones, and the law of their values.

Second moments are exact for any number of features, so few features and many functions make sharp tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_orthgp import kernels
from numpyro_orthgp.closures import as_pytree
from numpyro_orthgp.kernels import patch_features  # noqa: F401  (makes Convolutional known)
from numpyro_orthgp.kernels.random_features import _FEATURES, FREQUENCIES, draw_functions, register
from tests import oracles

NUM, B, D = 30_000, 5, 3
W = np.array([[1.0, 0.3], [-0.5, 0.8], [0.2, -1.0]])
KEY = jax.random.PRNGKey(0)

RBF, Matern32, Linear, Periodic = kernels.RBF, kernels.Matern32, kernels.Linear, kernels.Periodic
KERNELS = {
    "rbf": RBF([0.7, 1.3, 2.0]),
    "matern12": kernels.Matern12(0.8),
    "matern32": Matern32(0.8),
    "matern52": 2.3 * kernels.Matern52([0.8, 1.4, 1.1]),
    "rational_quadratic": kernels.RationalQuadratic(0.7, alpha=0.8),
    "periodic": Periodic([0.8, 0.5, 2.0], 1.7),
    "linear": Linear([0.5, 1.0, 2.0]),
    "polynomial": kernels.Polynomial(3, 0.3, 0.5),
    "polynomial_1": kernels.Polynomial(1, 0.3, 0.5),
    "steps": kernels.ArcCosine(0),
    "rectified": kernels.ArcCosine(1, 0.5, 0.3),
    "rectified_squared": kernels.ArcCosine(2, 0.4, 0.2),
    "constant": kernels.Constant(0.6),
    "coregion": kernels.Coregion(W, [0.1, 0.2, 0.3]).on(2),
    "sum": RBF([0.7, 1.3]).on([2, 0]) + 0.5 * Linear().on(1) + 0.3,
    "product_of_stationary": RBF(2.0).on(0) * Periodic(0.6).on(0) * Matern32(0.9).on([1, 2]),
    "product_with_linear": Matern32(0.9).on([0, 1]) * Linear(0.5).on(1) * Linear().on(0),
    "product_with_coregion": Matern32(0.9).on([0, 1]) * kernels.Coregion(W, 0.3).on(2),
    "product_of_sums": (RBF() + Linear(0.2)) * (Periodic(1.0).on(0) + 0.5),
    "convolutional": kernels.Convolutional(RBF(1.2), image_shape=(1, 3), patch_shape=(1, 2), weights=[0.7, -1.2]),
    "product_with_convolutional": kernels.Convolutional(
        RBF(1.2) + 0.2, image_shape=(1, 3), patch_shape=(1, 2), location=RBF(2.0)
    )
    * Linear().on(0),
}  # fmt: skip


def inputs(seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.c_[rng.uniform(-1.5, 1.5, (B, D - 1)), np.arange(B) % len(W)])


def draw(kernel, batch, key=KEY, *, num_features=6, dtype=jnp.float64):
    return draw_functions(key, kernel, batch, D, num_features=num_features, dtype=dtype)


def z_scores(draws, mean, covariance):
    """Differences of sample moments from true ones, in standard errors that the draws themselves show."""
    e = np.asarray(draws, float) - mean
    products = e[:, :, None] * e[:, None, :]
    root = np.sqrt(len(e))
    first, second = e.std(0) / root, products.std(0) / root
    return np.concatenate([e.mean(0) / first, ((products.mean(0) - covariance) / second).ravel()])


SLOW = {"convolutional", "product_with_convolutional", "product_of_sums"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in KERNELS])
def test_moments_are_those_of_the_kernel(name):
    kernel, X = KERNELS[name], inputs()
    assert np.abs(z_scores(draw(kernel, (NUM,))(X), 0, np.asarray(kernel(X, X)))).max() < 5


class Cauchy(kernels.Stationary):
    """1 / (1 + r^2) is the mean of exp(-s r^2) over s ~ Exp(1)."""

    def profile(self, r2):
        return 1 / (1 + r2)


class Table(kernels.Kernel):
    """A kernel of finite rank that is no function of a difference."""

    root: Any  # (T, R)

    def matrix(self, X1, X2):
        return self.features(X1) @ self.features(X2).swapaxes(-1, -2)

    def diagonal(self, X):
        return (self.features(X) ** 2).sum(-1)

    def features(self, X):
        return jnp.asarray(self.root)[(X[..., 0] > 0).astype(int)]


def test_features_of_classes_that_users_define():
    X, key = inputs(), jax.random.PRNGKey(0)
    own = 1.3 * Cauchy([0.5, 1.0]).on([2, 0]) + RBF(0.8) * Table(W[:2]).on(1)
    with pytest.raises(
        TypeError, match=r"those of Cauchy are not known.*by `numpyro_orthgp\.kernels\.random_features\.register`"
    ):
        draw(own, (2,), key)
    try:

        @register(Cauchy, stationary=True)
        def frequencies(kernel, draw):
            z, s = draw.normals(len(draw.columns), 2)
            return jnp.sqrt((s**2).sum(-1, keepdims=True)) * z / jnp.asarray(kernel.lengthscale)

        @register(Table)
        def features(kernel, draw):
            (z,) = draw.normals(W.shape[1])
            return [Looked(z @ kernel.root.T, int(draw.columns[0]))]

        assert np.abs(z_scores(draw(own, (NUM,), key)(X), 0, np.asarray(own(X, X)))).max() < 5
    finally:
        for known in (FREQUENCIES, _FEATURES):
            for kind in (Cauchy, Table):
                known.pop(kind, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Looked:
    """Features of `Table`: (..., L, T) values, looked up by the sign of a column."""

    values: Any
    column: int = dataclasses.field(metadata={"static": True})

    @property
    def width(self):
        return self.values.shape[-2]

    def __call__(self, X):
        low, high = self.values[..., None, :, 0], self.values[..., None, :, 1]
        return jnp.where(X[..., self.column, None] > 0, high, low)


def test_a_plain_function_is_named():
    def gibbs(X1, X2=None):
        return 1.0

    with pytest.raises(TypeError, match=r"those of <function .*gibbs"):
        draw(as_pytree(gibbs), (2,))


@pytest.mark.parametrize("name", oracles.KERNELS)
def test_moments_are_those_of_dense_formulas(name):
    X, lengthscale = inputs(1), np.array([0.6, 1.2, 2.0])
    kernel = 1.7 * getattr(kernels, name)(lengthscale)
    covariance = oracles.KERNELS[name](1.7, lengthscale)(np.asarray(X), np.asarray(X))
    assert np.abs(z_scores(draw(kernel, (NUM,), jax.random.PRNGKey(1))(X), 0, covariance)).max() < 5


LATENTS = {
    "stationary": kernels.Scaled(kernels.RationalQuadratic([[0.7], [1.3]], alpha=[0.7, 2.0]), jnp.asarray([0.5, 2.0]))
    * Periodic([[0.7, 1.0, 2.0], [1.3, 0.4, 1.0]], [[1.7], [0.9]]),
    "arc_cosine": kernels.ArcCosine(1, [[0.5], [0.2]], [0.3, 0.8]) + kernels.Constant(jnp.asarray([0.1, 0.6])),
    "coregion": kernels.Coregion(np.stack([W, -2 * W[::-1]]), [[0.1, 0.2, 0.3], [0.3, 0.0, 1.0]]).on(2)
    * RBF([[1.0], [2.0]]),
}


@pytest.mark.parametrize("name", [pytest.param("stationary", marks=pytest.mark.slow), "arc_cosine", "coregion"])
def test_hyperparameters_of_each_latent_function(name):
    kernel, X = LATENTS[name], inputs()
    draws, K = draw(kernel, (NUM, 2))(X), kernel(X, X)
    for p in range(2):
        assert np.abs(z_scores(draws[:, p], 0, np.asarray(K[p]))).max() < 5
    cross = draws[:, 0, :, None] * draws[:, 1, None, :]  # latent functions are independent
    assert np.abs(cross.mean(0) / cross.std(0)).max() * np.sqrt(NUM) < 5


def excess_kurtosis(values):
    values = np.asarray(values)
    return (values**4).mean(0) / (values**2).mean(0) ** 2 - 3


def test_single_values_are_gaussian_for_any_number_of_features():
    for name in ("rbf", "matern12", "product_of_stationary", "linear", "coregion"):
        values = draw(KERNELS[name], (NUM,), num_features=1)(inputs()[1:])
        assert np.abs(excess_kurtosis(values)).max() < 5 * np.sqrt(24 / NUM), name


def test_joint_law_becomes_gaussian_with_the_number_of_features():
    num, X = 4000, inputs()[:2] * 0.4
    few, many = (
        draw(KERNELS["rbf"], (num if L > 1 else NUM,), num_features=L)(X) @ jnp.asarray([1.0, -1.0]) for L in (1, 1024)
    )
    assert excess_kurtosis(few) > 0.5  # so that the next line can fail
    assert abs(excess_kurtosis(many)) < 4 * np.sqrt(24 / num)


def test_functions_have_the_form_that_their_kernel_says():
    X = inputs()
    f = draw(Linear([0.5, 1.0, 2.0]), (4,))
    assert_allclose(f(2 * X), 2 * f(X), rtol=1e-12)
    f = draw(Periodic(0.5, [[1.7, 0.8, 2.5]]), (4,))
    assert_allclose(f(X + jnp.asarray([1.7, -1.6, 2.5])), f(X), rtol=1e-9, atol=1e-11)
    f = draw(RBF().on([0, 1]) + 0.5, (4,))
    assert_allclose(f(X.at[:, 2].add(3.0)), f(X), rtol=1e-12)
    assert np.ptp(np.asarray(draw(kernels.Constant(2.0), (4,))(X)), axis=1).max() == 0


@pytest.mark.parametrize(
    "name",
    ["matern12", "matern52", "rational_quadratic", "periodic", "polynomial", "rectified", "product_with_coregion"],
)
def test_float32_is_kept_and_finite(name):
    X = inputs().astype(jnp.float32)
    kernel = jax.tree.map(lambda leaf: np.float32(leaf) if np.ndim(leaf) else leaf, KERNELS[name])
    values = draw(kernel, (50,), dtype=jnp.float32)(X)
    assert values.dtype == jnp.float32
    assert np.isfinite(values).all()


def test_draws_are_differentiable_with_respect_to_hyperparameters():
    X = inputs()

    def total(theta):
        kernel = theta[0] * kernels.Matern52(theta[1]) * Linear(theta[2]) + RBF(theta[1]).on(0)
        return draw(kernel, (3,))(X).sum()

    theta, step = jnp.asarray([1.3, 0.8, 0.5]), 1e-6
    shifted = theta + step * jnp.concatenate([jnp.zeros((1, 3)), jnp.eye(3), -jnp.eye(3)])
    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(total)))(shifted)
    assert_allclose(gradients[0], (values[1:4] - values[4:]) / (2 * step), rtol=1e-6)


class Mine(RBF):
    pass


@pytest.mark.parametrize(
    "kernel, message",
    [
        (RBF() + kernels.White(0.1), "without White: .* f.joint"),
        (RBF() * Mine(), "those of Mine are not known. Known are ArcCosine, .*RBF"),
        (RBF() + (lambda X1, X2=None: RBF()(X1, X2)), "of <function .*f.joint"),
    ],
    ids=["white", "subclass", "function"],
)
def test_kernels_without_features_are_refused(kernel, message):
    with pytest.raises(TypeError, match=message):
        draw(kernel, (2,))
