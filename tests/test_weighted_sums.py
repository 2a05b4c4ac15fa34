"""Weighted sums of kernel values: against a loop over formulas, and with all derivatives against sums over the matrix."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_orthgp import inducing, kernels
from numpyro_orthgp.inducing import InducingPoints
from numpyro_orthgp.kernels import Kernel
from numpyro_orthgp.math.blocks import keep, sum_blocks

n, m = 5, 7
LENGTHSCALE = np.array([0.7, 1.3, 2.1, 0.9, 1.6])  # more dimensions than those of which differences are taken


class Rough(kernels.Stationary):
    """A user's kernel with a matrix of its own, which the profile does not tell."""

    def profile(self, r2):
        return jnp.exp(-0.5 * r2)

    def matrix(self, X1, X2):
        return 3 * super().matrix(X1, X2)


def formula(X1, X2):
    return jnp.exp(-0.3 * jnp.sum((X1[:, None] - X2) ** 2, -1))


def plain(X1, X2=None):
    return jnp.ones(len(X1)) if X2 is None else formula(X1, X2)


CASES = {
    "rbf": lambda a: kernels.RBF(a(LENGTHSCALE)),
    "matern12": lambda a: kernels.Matern12(a(LENGTHSCALE)),
    "matern32": lambda a: kernels.Matern32(a(LENGTHSCALE)),
    "matern52": lambda a: kernels.Matern52(a(1.1)),
    "rational_quadratic": lambda a: kernels.RationalQuadratic(a(LENGTHSCALE), a(0.7)),
    "periodic": lambda a: kernels.Periodic(a(LENGTHSCALE), a(1.7)),
    "scaled": lambda a: a(1.5) * kernels.Matern32(a(LENGTHSCALE)),
    "sum": lambda a: a(1.5) * kernels.RBF(a(LENGTHSCALE)) + kernels.Linear(a(LENGTHSCALE)) + a(0.2),
    "product": lambda a: a(0.4) * (kernels.RBF(a(LENGTHSCALE)) * kernels.Polynomial(2, a(0.7), a(0.9))),
    "many_columns": lambda a: kernels.Matern52(a(LENGTHSCALE[:4])).on([2, 0, 4, 1]),
    "few_columns": lambda a: a(0.3) * kernels.Matern52(a(LENGTHSCALE[:2])).on([2, 0]),
    "function": lambda a: a(1.5) * kernels.Function(plain) + kernels.RBF(a(LENGTHSCALE)),
    "own_matrix": lambda a: Rough(a(LENGTHSCALE)),
    "numbers": lambda a: 2 * kernels.RationalQuadratic(0.8, 1) + 1,
}
LATENTS = {
    "lengthscales": lambda a: kernels.RBF(a([[0.7], [1.5]])),
    "variances": lambda a: a([0.7, 1.5]) * kernels.Matern32(1.3),
    "both": lambda a: a([0.7, 1.5]) * kernels.Matern32(a([LENGTHSCALE, 2 * LENGTHSCALE])),
    "alphas": lambda a: kernels.RationalQuadratic(a(LENGTHSCALE), a([0.7, 1.5])),
    "neither": lambda a: kernels.Matern52(a(LENGTHSCALE)),
}


@pytest.fixture
def arguments(rng):
    return [jnp.asarray(rng.normal(size=shape)) for shape in ((n, 5), (m, 5), (m,))]


def over_the_matrix(kernel, X1, X2, weights):
    return jnp.einsum("...ij,...j->...i", kernel(X1, X2), weights)


def by_itself(kernel, X1, X2, weights):
    return kernel.weighted_sum(X1, X2, weights)


def agree(kernel, arguments):
    """Values, derivatives forward and backward, and derivatives of these."""
    kernel = jax.tree.map(jnp.asarray, kernel)
    direction = jax.tree.map(lambda x: jnp.cos(3.0 + jnp.arange(x.size).reshape(x.shape)), (kernel, *arguments))

    def results(function):
        def scalar(*args):
            return jnp.sum(jnp.sin(function(*args)))

        args = (kernel, *arguments)
        for_weights = jax.vmap(jax.grad(scalar, 3), (None, None, None, 0))(*args[:3], jnp.stack(2 * [args[3]]))
        return (
            jax.jvp(function, args, direction),
            jax.jvp(jax.grad(scalar, argnums=(0, 1, 2, 3)), args, direction),
            for_weights,
        )

    results = jax.jit(results, static_argnums=0)
    for a, b in zip(*(jax.tree.leaves(results(f)) for f in (by_itself, over_the_matrix)), strict=True):
        assert_allclose(a, b, rtol=1e-11, atol=1e-11 * max(1, np.abs(b).max()))


@pytest.mark.parametrize("name", sorted(set(CASES) - {"numbers"}))
def test_derivatives_are_those_of_a_sum_over_the_matrix(name, arguments):
    agree(CASES[name](jnp.asarray), arguments)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", LATENTS)
def test_latent_functions(name, shared, arguments):
    X1, X2, weights = arguments
    weights = weights if shared else jnp.stack([weights, -2 * weights])
    agree(LATENTS[name](jnp.asarray), (X1, X2, weights))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_against_a_loop(dtype, rng):
    X1, X2, w = (rng.normal(size=shape).astype(dtype) for shape in ((n, 5), (m, 5), (m,)))

    def matern32(x, y):
        s = math.sqrt(3 * sum((float(a) - float(b)) ** 2 / l**2 for a, b, l in zip(x, y, LENGTHSCALE, strict=True)))
        return 1.5 * (1 + s) * math.exp(-s)

    expected = [sum(matern32(x, y) * float(wj) for y, wj in zip(X2, w, strict=True)) for x in X1]
    kernel = CASES["scaled"](lambda value: jnp.asarray(value, dtype))
    value = kernel.weighted_sum(*map(jnp.asarray, (X1, X2, w)))
    assert value.dtype == dtype
    assert_allclose(value, expected, rtol=2e-5 if dtype == "float32" else 1e-13, atol=1e-6 if dtype == "float32" else 0)


def test_python_numbers_take_the_dtype_of_the_inputs(rng):
    X1, X2, w = (jnp.asarray(rng.normal(size=shape), "float32") for shape in ((n, 5), (m, 5), (m,)))
    kernel = CASES["numbers"](None)
    gradient = jax.jit(jax.grad(lambda w: kernel.weighted_sum(X1, X2, w).sum()))(w)
    assert kernel.weighted_sum(X1, X2, w).dtype == gradient.dtype == "float32"
    assert_allclose(gradient, over_the_matrix(kernel, X1, X2, jnp.eye(m, dtype="float32")).sum(1), rtol=1e-5)


def test_float32_gradients_at_far_and_coincident_points(rng):
    """Inputs far from the origin, and points that are the same, lose no more digits than the matrix does."""
    X = 100 + rng.normal(size=(n, 5))
    exact = [jnp.asarray(a) for a in (X, np.concatenate([X, X[:2] + 1e-6]), rng.normal(size=n + 2))]

    def gradients(function, args):
        kernel = kernels.Matern32(jnp.asarray(LENGTHSCALE, args[0].dtype))
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args))), argnums=(0, 1, 2, 3)))(kernel, *args)

    rounded = [a.astype("float32") for a in exact]
    exact = [a.astype("float64") for a in rounded]
    reference = jax.tree.leaves(gradients(over_the_matrix, exact))
    ours, matrix = (jax.tree.leaves(gradients(f, rounded)) for f in (by_itself, over_the_matrix))
    for a, b, c in zip(ours, matrix, reference, strict=True):
        assert np.all(np.isfinite(a))
        error, allowed = (np.abs(np.asarray(x, float) - c).max() for x in (a, b))
        assert error <= 3 * allowed + 1e-5 * np.abs(c).max()


def test_sets_of_points_ask_the_kernel_for_its_sum(arguments, monkeypatch):
    """Other features, kernels of other libraries and points of each latent function's own sum over the matrix."""
    X1, X2, weights = arguments
    kernel = CASES["scaled"](jnp.asarray)
    expected = over_the_matrix(kernel, X1, X2, weights)
    each = jnp.stack([X1, X1 + 1])
    separate = [over_the_matrix(kernel, X, X2, weights) for X in each]
    asked = []
    original = Kernel.weighted_sum
    monkeypatch.setattr(Kernel, "weighted_sum", lambda self, *a: asked.append("matrix") or original(self, *a))
    assert_allclose(inducing.weighted_covariance(kernel, InducingPoints(X1), X2, weights), expected, rtol=1e-12)
    assert not asked  # neither Scaled nor Matern32 took the matrix
    assert_allclose(inducing.weighted_covariance(kernel, InducingPoints(each), X2, weights), separate, rtol=1e-12)
    for_matrices = kernel + kernels.Function(plain)  # which knows two matrices only
    found = inducing.weighted_covariance(for_matrices, InducingPoints(each), X2, weights)
    assert_allclose(found, [over_the_matrix(for_matrices, X, X2, weights) for X in each], rtol=1e-12)
    tinygp_like = jax.tree_util.Partial(plain)
    found = inducing.weighted_covariance(tinygp_like, InducingPoints(X1), X2, weights)
    assert_allclose(found, formula(X1, X2) @ weights, rtol=1e-12)


def test_a_kept_value_is_not_computed_again(arguments):
    """In blocks of rows, the derivative for a factor of the sum needs the sum; backward, exponentials are for slopes alone."""
    X1, X2, weights = arguments

    def loss(variance, lengthscale, keep):
        def block(X, w):
            return variance * keep(jnp.exp(-formula(X1, X) / lengthscale) @ w)

        return jnp.sum(jnp.sin(sum_blocks(block, X2, weights, 3)))

    def exponentials(keep):
        jaxpr = jax.make_jaxpr(jax.grad(lambda v: loss(v, 1.3, keep)))(0.7)
        return str(jaxpr).count("exp ")

    def exact(v, s):
        return jnp.sum(jnp.sin(v * jnp.exp(-formula(X1, X2) / s) @ weights))

    assert exponentials(keep) == 2 and exponentials(lambda value: value) == 4
    for argnum in (0, 1):
        found = jax.grad(lambda *a: loss(*a, keep), argnum)(0.7, 1.3)
        assert_allclose(found, jax.grad(exact, argnum)(0.7, 1.3), rtol=1e-12)
