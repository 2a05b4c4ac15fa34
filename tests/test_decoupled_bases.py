"""The bases that live in benchmarks/decoupled_bases.py only are the library's in other coordinates, and its optima are optima."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import TraceMeanField_ELBO

from benchmarks import decoupled_bases as bases
from numpyro_orthgp import kernels, likelihoods
from tests import oracles, problems

NOISE = 0.3
KERNEL, ORACLE = 1.3 * kernels.Matern32(0.9), oracles.matern32(1.3, 0.9)
GAUSSIAN = partial(likelihoods.Gaussian, scale=NOISE)


@pytest.fixture
def problem(rng):
    return [jnp.asarray(a) for a in (*problems.data(rng, 40), *problems.sets(rng, [6, 5]))]


def bound(basis, params, X, y, beta, gamma):
    svi = bases.Method(basis, optax.sgd(0.0)).svi(len(X), GAUSSIAN)
    loss = partial(TraceMeanField_ELBO().loss, jax.random.PRNGKey(0))
    fixed = {**svi.static_kwargs, "kernel": KERNEL, "beta": beta, "gamma": gamma}
    return -jax.jit(lambda params: loss(params, svi.model, svi.guide, X, y, **fixed))(params)


def test_hybrid_is_orth_in_other_coordinates(rng, problem):
    _, _, beta, gamma = problem
    a, (e, T) = rng.normal(size=5), problems.random_q(rng, 6)
    L = np.linalg.cholesky(bases.prior_covariance(KERNEL, beta))
    moved = e + np.linalg.solve(L, KERNEL(beta, gamma) @ a)
    ours = {"f.u0_loc": moved, "f.u0_scale_tril": T, "f.u1_weights": a}
    theirs = {"a": a, "e": e, "T": T}
    both = bound(bases.hybrid, theirs, *problem), bound(bases.orth, ours, *problem)
    assert_allclose(*both, rtol=1e-9)


@pytest.mark.parametrize("points", ["others", "the same"])
def test_decoupled_is_a_smaller_covariance(rng, problem, points):
    """S^-1 = K^-1 + B. Where gamma repeats beta it is SVGP, whose weights are the sums of both."""
    X, y, beta, gamma = problem
    gamma = gamma if points == "others" else beta
    weights = {"a_gamma": rng.normal(size=len(gamma)), "a_beta": rng.normal(size=6)}
    R = problems.random_q(rng, 6)[1]
    L = np.linalg.cholesky(bases.prior_covariance(KERNEL, beta))
    T = np.linalg.cholesky(np.linalg.inv(np.eye(6) + L.T @ R @ R.T @ L))  # of S whitened
    if points == "others":
        other = bases.hybrid, {"a": weights["a_gamma"], "e": L.T @ weights["a_beta"], "T": T}
    else:
        other = bases.coupled, {"f.u0_loc": L.T @ (weights["a_gamma"] + weights["a_beta"]), "f.u0_scale_tril": T}
    assert_allclose(
        bound(bases.decoupled, {**weights, "R": R}, X, y, beta, gamma),
        bound(*other, X, y, beta, gamma),
        rtol=1e-9,
    )


def test_decoupled_at_the_prior(problem):
    zero = {"a_gamma": jnp.zeros(5), "a_beta": jnp.zeros(6), "R": jnp.zeros((6, 6))}
    prior = {"f.u0_loc": jnp.zeros(6), "f.u0_scale_tril": jnp.eye(6)}
    assert_allclose(bound(bases.decoupled, zero, *problem), bound(bases.coupled, prior, *problem))


def test_optima_for_gaussian_noise(problem):
    X, y, beta, gamma = problem
    dense = [np.asarray(a) for a in problem]
    best = partial(bases.optimum, X, y, KERNEL, likelihood=GAUSSIAN)
    assert_allclose(best([beta]), oracles.titsias2009(ORACLE, *dense[:3], NOISE**2), rtol=1e-8)
    q = oracles.solvegp_optimal_qv(ORACLE, *dense, NOISE**2)
    expected = oracles.solvegp_collapsed(ORACLE, *dense, NOISE**2, *q)
    assert_allclose(best([beta, gamma], num_covariances=2), expected, rtol=1e-8)

    # Salimbeni et al. 2018, App. E, in Decoupled's own parameters: all three decoupled bases have this optimum.
    alpha = np.concatenate([dense[3], dense[2]])
    cross, K = ORACLE(alpha, dense[0]), ORACLE(dense[2], dense[2])
    a = np.linalg.solve(cross @ cross.T / NOISE**2 + ORACLE(alpha, alpha), cross @ dense[1] / NOISE**2)
    half = np.linalg.solve(K, cross[5:]) / NOISE
    params = {"a_gamma": a[:5], "a_beta": a[5:], "R": np.linalg.cholesky(half @ half.T)}
    assert_allclose(best([beta, gamma]), bound(bases.decoupled, params, *problem), rtol=1e-8)


@pytest.mark.slow
def test_the_script_prints_training_that_reaches_the_optimum(capsys):
    options = "--num-data 60 --num-inducing 6 --likelihood bernoulli --steps 300 --mean-only 0.1 --only OrthNat"
    bases.main(options.split())
    name, *cells = capsys.readouterr().out.splitlines()[-1].split()
    first, *_, last, optimum, _ = map(float, cells)
    assert name == "OrthNat"
    assert first < optimum - 1e-3
    assert abs(last - optimum) <= 1e-4  # of the digits printed
