"""SVGP as one would write it by hand, with JAX and Optax. Nothing else is imported: a first step takes what it takes without us."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.scipy.linalg import solve_triangular

from benchmarks.peers.floor import device as device
from benchmarks.peers.problem import LEARNING_RATE, NOISE, VARIANCE, Problem

Run = Callable[[int], float]


def plain_jax_step(Z, N, X, y, optimizer):
    """SVGP as one would write it by hand: no NumPyro, no library, autodiff through everything."""
    M, D = Z.shape
    params = {
        "Z": Z,
        "m": jnp.zeros(M, Z.dtype),
        "T": jnp.eye(M, dtype=Z.dtype),
        "log_lengthscale": jnp.zeros(D, Z.dtype),
        "log_variance": jnp.zeros((), Z.dtype),
        "log_noise": jnp.log(jnp.asarray(0.3, Z.dtype)),
    }

    def kernel(p, A, B):
        A, B = A / jnp.exp(p["log_lengthscale"]), B / jnp.exp(p["log_lengthscale"])
        r2 = jnp.sum(A**2, 1)[:, None] + jnp.sum(B**2, 1) - 2 * A @ B.T
        r = jnp.sqrt(3 * jnp.maximum(r2, 1e-12))
        return jnp.exp(p["log_variance"]) * (1 + r) * jnp.exp(-r)

    def loss(p, X, y):
        v, s2 = jnp.exp(p["log_variance"]), jnp.exp(2 * p["log_noise"])
        T = jnp.tril(p["T"])
        L = jnp.linalg.cholesky(kernel(p, p["Z"], p["Z"]) + 1e-6 * v * jnp.eye(M, dtype=Z.dtype))
        A = solve_triangular(L, kernel(p, p["Z"], X), lower=True)
        mean = A.T @ p["m"]
        variance = v - jnp.sum(A**2, 0) + jnp.sum((T.T @ A) ** 2, 0)
        fit = -0.5 * (jnp.log(2 * jnp.pi * s2) + ((y - mean) ** 2 + variance) / s2)
        kl = 0.5 * (p["m"] @ p["m"] + jnp.sum(T**2) - M) - jnp.sum(jnp.log(jnp.abs(jnp.diag(T))))
        return kl - N / X.shape[0] * jnp.sum(fit)

    @jax.jit
    def step(state, X, y):
        params, opt = state
        value, gradient = jax.value_and_grad(loss)(params, X, y)
        updates, opt = optimizer.update(gradient, opt)
        return (optax.apply_updates(params, updates), opt), value

    return step, (params, optimizer.init(params))


def repeat(step, state, *args, looped: bool = False) -> Run:
    """Steps one after the other; the value is minus the loss of the last, before its update.

    :param looped: all steps in one program, as ``fit`` and ``svi.run`` have them.
    """

    @jax.jit
    def loop(num, state, *args):
        loss = jnp.zeros_like(jax.eval_shape(step, state, *args)[1])
        return jax.lax.fori_loop(0, num, lambda _, carry: step(carry[0], *args), (state, loss))

    def run(num: int) -> float:
        nonlocal state
        if looped:
            state, loss = loop(num, state, *args)
        else:
            for _ in range(num):
                state, loss = step(state, *args)
        return -float(jax.block_until_ready(loss))

    return run


def step(problem: Problem, variant: str) -> Run:
    """The same for the first step and for later ones."""
    X, y, Z = (jnp.asarray(a) for a in (problem.X, problem.y, problem.Z))
    optimizer = optax.adam(LEARNING_RATE)
    update, (params, _) = plain_jax_step(Z, problem.num_data, X, y, optimizer)
    params |= {
        "m": jnp.asarray(problem.mean),
        "T": jnp.asarray(problem.root),
        "log_lengthscale": jnp.log(jnp.asarray(problem.lengthscale)),
        "log_variance": jnp.log(jnp.asarray(VARIANCE, Z.dtype)),
        "log_noise": jnp.log(jnp.asarray(NOISE, Z.dtype)),
    }
    return repeat(update, (params, optimizer.init(params)), X, y)


startup = restart = step
