"""The kernel between tasks against dense matrices, and its place in multi-task models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_orthgp as ogp
from numpyro_orthgp.kernels import RBF, Coregion, Kernel, Matern52
from tests import oracles

T, R = 4, 2
W = np.array([[1.0, -0.5], [0.3, 2.0], [0.0, -1.1], [-0.7, 0.2]])
KAPPA = np.array([0.4, 0.0, 1.3, 0.2])
TASKS = np.array([0.0, 3, 3, 1, 2, 0, 1])[:, None]
OTHERS = np.array([1.0, 3, 2])[:, None]


def between(X1, X2, W=W, kappa=KAPPA):
    """W W^T + diag(kappa), looked up."""
    B = W @ W.T + np.diag(np.broadcast_to(kappa, len(W)))
    return B[np.ix_(X1[:, 0].astype(int), X2[:, 0].astype(int))]


@pytest.mark.parametrize("kappa", [0.0, 0.7, KAPPA], ids=["zero", "scalar", "per_task"])
def test_matrix_and_diagonal(kappa):
    kernel = Coregion(W, kappa)
    K = between(TASKS, TASKS, W, kappa)
    np.testing.assert_allclose(kernel(TASKS, OTHERS), between(TASKS, OTHERS, W, kappa), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(kernel(TASKS, TASKS), K, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(kernel(TASKS, TASKS.copy()), K, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(kernel(TASKS), np.diag(K), rtol=1e-13)
    np.testing.assert_allclose(jax.jit(lambda k: k(TASKS, OTHERS))(kernel), kernel(TASKS, OTHERS), rtol=1e-13)


@pytest.mark.parametrize("rho", [0.0, 0.3, 1.0])
def test_exchangeable_categories(rho):
    kernel, K = Coregion.exchangeable(T, rho), rho + (1 - rho) * (TASKS == OTHERS.T)
    np.testing.assert_allclose(kernel(TASKS, OTHERS), K, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(kernel(TASKS), 1, rtol=1e-13)
    each = Coregion.exchangeable(T, jnp.array([rho, 0.5]))
    np.testing.assert_allclose(each(TASKS, OTHERS)[0], K, rtol=1e-13, atol=1e-15)
    slope = jax.grad(lambda rho: Coregion.exchangeable(T, rho)(TASKS, OTHERS).sum())(max(rho, 0.1))
    np.testing.assert_allclose(slope, (TASKS != OTHERS.T).sum(), rtol=1e-12)
    assert Coregion.exchangeable(T, jnp.float32(rho))(jnp.float32(TASKS)).dtype == jnp.float32


def test_kappa_is_zero_by_default_and_lists_are_arrays():
    np.testing.assert_allclose(Coregion(W.tolist())(TASKS, OTHERS), Coregion(W, np.zeros(T))(TASKS, OTHERS), rtol=1e-13)
    integers = Coregion(jnp.array([[1], [-2]]), jnp.array([0, 3]))
    np.testing.assert_allclose(integers(np.array([[0.0], [1]]), np.array([[0.0], [1]])), [[1, -2], [-2, 7]])


def test_float32_stays_float32():
    kernel, X, X2 = Coregion(jnp.float32(W), jnp.float32(KAPPA)), jnp.float32(TASKS), jnp.float32(OTHERS)
    assert kernel(X, X2).dtype == kernel(X).dtype == jnp.float32
    np.testing.assert_allclose(kernel(X, X2), between(TASKS, OTHERS), rtol=1e-6, atol=1e-7)
    assert Coregion([[1.0], [2.0]], 0.5)(jnp.zeros((3, 1), jnp.float32)).dtype == jnp.float32


def test_one_kernel_per_latent_function(rng):
    own_W, own_kappa = rng.normal(size=(3, T, R)), rng.uniform(0, 1, (3, T))
    own_tasks = np.stack([TASKS, TASKS[::-1], (TASKS + 1) % T])
    for W_, kappa in ((own_W, own_kappa), (own_W, KAPPA), (W, own_kappa)):
        kernel = Coregion(W_, kappa)
        assert kernel(TASKS, OTHERS).shape == (3, 7, 3) and kernel(TASKS).shape == (3, 7)
        for p in range(3):
            one = [a if a.ndim == n else a[p] for a, n in ((W_, 2), (kappa, 1))]
            np.testing.assert_allclose(kernel(TASKS, OTHERS)[p], between(TASKS, OTHERS, *one), rtol=1e-13, atol=1e-15)
            np.testing.assert_allclose(kernel(TASKS)[p], np.diag(between(TASKS, TASKS, *one)), rtol=1e-13)
            separate = kernel(own_tasks, OTHERS)[p]
            np.testing.assert_allclose(separate, between(own_tasks[p], OTHERS, *one), rtol=1e-13, atol=1e-15)


def test_product_with_a_kernel_of_other_columns_is_the_intrinsic_model(rng):
    X = np.hstack([rng.normal(size=(7, 2)), TASKS])
    kernel = 1.3 * Matern52(0.9).on([0, 1]) * Coregion(W, KAPPA).on(2)
    expected = oracles.matern52(1.3, 0.9)(X[:, :2], X[:, :2]) * between(TASKS, TASKS)
    np.testing.assert_allclose(kernel(X, X), expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(kernel(X), np.diag(expected), rtol=1e-12)
    # All tasks at the same inputs: the Kronecker product.
    grid = np.hstack([np.tile(X[:3, :2], (T, 1)), np.repeat(np.arange(T), 3)[:, None]])
    k = oracles.matern52(1.3, 0.9)(X[:3, :2], X[:3, :2])
    np.testing.assert_allclose(kernel(grid, grid), np.kron(W @ W.T + np.diag(KAPPA), k), rtol=1e-12, atol=1e-14)


def test_gradients_are_finite_differences(rng):
    weights, diagonal = rng.normal(size=(7, 3)), rng.normal(size=7)

    @jax.jit
    def total(parts):
        kernel = Coregion(*parts)
        return (weights * kernel(TASKS, OTHERS)).sum() + (diagonal * kernel(TASKS)).sum()

    parts = (jnp.asarray(W), jnp.asarray(KAPPA))
    tangents = (jnp.asarray(rng.normal(size=W.shape)), jnp.asarray(rng.normal(size=T)))
    reverse = sum(jnp.vdot(g, t) for g, t in zip(jax.grad(total)(parts), tangents, strict=True))
    forward = jax.jvp(total, (parts,), (tangents,))[1]

    def moved(h):
        return total(jax.tree.map(lambda a, t: a + h * t, parts, tangents))

    np.testing.assert_allclose(reverse, forward, rtol=1e-12)
    # A quadratic function: central differences are exact but for rounding.
    np.testing.assert_allclose(reverse, (moved(0.2) - moved(-0.2)) / 0.4, rtol=1e-10)


def test_no_gradient_in_the_inputs(rng):
    kernel = RBF(0.8).on(0) * Coregion(W, KAPPA).on(1)
    X = jnp.asarray(np.hstack([rng.normal(size=(7, 1)), TASKS]))
    for function in (lambda X: kernel(X, X).sum(), lambda X: kernel(X, X[:3]).sum() + kernel(X).sum()):
        gradient = jax.jit(jax.grad(function))(X)
        assert (gradient[:, 1] == 0).all() and (gradient[:, 0] != 0).any()


def test_traced_indices_that_are_no_tasks_are_nan():
    """A program that cannot look at them says nothing of them, and does not answer for another task."""
    kernel = Coregion(W, KAPPA)
    rough, known = jnp.array([[0.0], [2.8], [-1.0], [4.0], [jnp.nan], [3.0]]), [0, 5]
    K, diagonal = jax.jit(lambda X: (kernel(X, X), kernel(X)))(rough)
    expected = np.full((6, 6), np.nan)
    expected[np.ix_(known, known)] = between(rough[known, :], rough[known, :])
    np.testing.assert_allclose(K, expected, rtol=1e-13)
    np.testing.assert_allclose(diagonal, np.diag(expected), rtol=1e-13)


@pytest.mark.parametrize("task", [7.0, 1.4])
def test_indices_are_checked_wherever_no_jit_is_the_users(task, rng):
    """Functions and collapsed bounds compile their parts as wholes, and check what they saw afterwards, at every call."""
    kernel = RBF(0.8).on(0) * Coregion(W, KAPPA).on(1)
    X = jnp.asarray(np.hstack([rng.normal(size=(7, 1)), TASKS]))
    bad = X.at[3, 1].set(task)

    def declared(Z):
        with numpyro.handlers.seed(rng_seed=0):
            return ogp.gp("f", kernel, Z)

    f = declared(X)
    for _ in range(2):
        assert np.isfinite(f(X).mean).all()
        for refused in (
            lambda: f(bad).mean,
            lambda: f.joint(bad).mean,
            lambda: declared(bad),
            lambda: ogp.CollapsedGP(kernel, bad, X, 0.1).log_prob(jnp.ones(7)),
            lambda: ogp.CollapsedGP(kernel, X, X, 0.1).posterior(jnp.ones(7))(bad).mean,
        ):
            with pytest.raises(ValueError, match=rf"whole numbers in 0..3, .*; got {task}"):
                refused()
    paths = f.sample_paths(jax.random.PRNGKey(0), 2, num_features=4)
    for traced in (jax.jit(lambda X: f(X).mean)(bad), *jax.jit(paths.__call__)(bad)):
        assert np.isnan(traced[3]) and np.isfinite(np.delete(traced, 3)).all()


def test_pytree_and_vmap(rng):
    kernel = Coregion(jnp.asarray(W), jnp.asarray(KAPPA))
    leaves, structure = jax.tree.flatten(kernel)
    assert len(leaves) == 2
    assert isinstance(jax.tree.map(lambda a: -a, kernel), Kernel)  # a gradient, say: negative kappa is not checked
    stacked = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), kernel)
    mapped = jax.jit(jax.vmap(lambda k: k(TASKS, OTHERS)))(stacked)
    np.testing.assert_allclose(mapped[1], between(TASKS, OTHERS, 2 * W, 2 * KAPPA), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(jax.tree.unflatten(structure, leaves)(TASKS, OTHERS), kernel(TASKS, OTHERS), rtol=0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Coregion(np.array([[1.0], [np.nan]])), "`W` must be finite"),
        (lambda: Coregion([[1.0], [np.inf]]), "`W` must be finite"),
        (lambda: Coregion(W, -0.1), "`kappa` must be nonnegative and finite; got -0.1"),
        (lambda: Coregion(np.ones(3))(TASKS), r"`W` must have shape \(T, R\) or \(P, T, R\), .*got \(3,\)"),
        (lambda: Coregion(np.ones((3, 0)))(TASKS), r"`W` must have shape"),
        (lambda: Coregion(W, np.ones(3))(TASKS), r"`kappa` must have shape .* with T = 4 .*got \(3,\)"),
        (lambda: Coregion(W, np.ones((2, 2, 4)))(TASKS), r"`kappa` must have shape"),
        (lambda: Coregion(W)(np.zeros((5, 2))), r"one column, the index of the task; got 2.*\.on\(column\)"),
        (lambda: Coregion(W)(np.array([[0.0], [4.0]])), r"whole numbers in 0..3, .*; got 4\.0"),
        (lambda: Coregion(W)(TASKS, np.array([[-1.0]])), r"whole numbers in 0..3, .*; got -1\.0"),
        (lambda: Coregion(W)(np.array([[0.5]])), r"got 0\.5"),
        (lambda: Coregion.exchangeable(3, 1.2), r"`correlation` must be in \[0, 1\]; got 1\.2"),
        (lambda: Coregion.exchangeable(0, 0.2), "`num` must be a positive integer; got 0"),
        (lambda: Coregion(W)(np.array([[np.nan]])), r"got nan"),
    ],
)
def test_what_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


finite = st.floats(-3, 3, width=32)


@settings(max_examples=40, deadline=None)
@given(st.lists(finite, min_size=6, max_size=6), st.lists(st.floats(0, 3, width=32), min_size=3, max_size=3))
def test_symmetric_and_positive_semidefinite(loadings, kappa):
    X = np.array([0.0, 1, 2, 2, 0])[:, None]
    K = np.asarray(Coregion(np.array(loadings).reshape(3, 2), np.array(kappa))(X, X.copy()))
    np.testing.assert_allclose(K, K.T, rtol=1e-12, atol=1e-14)
    assert np.linalg.eigvalsh(K).min() >= -1e-12 * max(np.trace(K), 1)
