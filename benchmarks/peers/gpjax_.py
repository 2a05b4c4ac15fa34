"""GPJax, in an environment of its own. The interface is that of ``ours``."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import optax

from benchmarks.peers.floor import device as device
from benchmarks.peers.problem import LEARNING_RATE, NOISE, VARIANCE, Problem

Run = Callable[[int], float]


def joint(problem: Problem, kernel):
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=kernel, jitter=problem.jitter)
    return prior * gpx.likelihoods.Gaussian(obs_stddev=jnp.asarray(NOISE, problem.dtype))


def cast(family, problem: Problem):
    """Every floating array in the problem's dtype; some are made in the default one."""
    params, static = eqx.partition(family, eqx.is_inexact_array)
    return eqx.combine(jax.tree.map(lambda a: a.astype(problem.dtype), params), static)


def svgp(problem: Problem):
    variance, lengthscale = jnp.asarray(VARIANCE, problem.dtype), jnp.asarray(problem.lengthscale)
    kernel = gpx.kernels.Matern32(lengthscale=lengthscale, variance=variance)
    family = gpx.variational_families.WhitenedVariationalGaussian(
        model=joint(problem, kernel),
        inducing_inputs=jnp.asarray(problem.Z),
        variational_mean=jnp.asarray(problem.mean[:, None]),
        variational_root_covariance=jnp.asarray(problem.root),
    )
    return cast(family, problem)


def step(problem: Problem, variant: str) -> Run:
    """A training step as ``gpjax.fit`` does it (loss, gradients of all parameters, optax's Adam), jitted; there in a loop."""
    family, optimizer = svgp(problem), optax.adam(LEARNING_RATE)
    params, static = eqx.partition(family, eqx.is_inexact_array)
    batch = gpx.Dataset(X=jnp.asarray(problem.X), y=jnp.asarray(problem.y[:, None]), n_total=problem.num_data)
    state = params, optimizer.init(params), jnp.zeros((), problem.dtype)

    @jax.jit
    def update(state, batch):
        def loss(params):
            return -gpx.objectives.elbo(eqx.combine(params, static), batch)

        params, moments, _ = state
        value, gradient = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    @jax.jit
    def loop(num, state, batch):
        return jax.lax.fori_loop(0, num, lambda _, state: update(state, batch), state)

    def run(num: int) -> float:
        nonlocal state
        if variant == "loop":
            state = loop(num, state, batch)
        else:
            for _ in range(num):
                state = update(state, batch)
        return -float(jax.block_until_ready(state[-1]))

    return run


startup = restart = step


def collapsed(problem: Problem, variant: str) -> Run:
    """Value and gradient of the collapsed bound."""
    variance, lengthscale = jnp.asarray(VARIANCE, problem.dtype), jnp.asarray(problem.lengthscale)
    model = joint(problem, gpx.kernels.RBF(lengthscale=lengthscale, variance=variance))
    Z = jnp.asarray(problem.Z)
    family = cast(gpx.variational_families.CollapsedVariationalGaussian(model=model, inducing_inputs=Z), problem)
    params, static = eqx.partition(family, eqx.is_inexact_array)
    data = gpx.Dataset(X=jnp.asarray(problem.X), y=jnp.asarray(problem.y[:, None]))

    @jax.jit
    def gradient(params, data):
        return jax.value_and_grad(lambda p: gpx.objectives.collapsed_elbo(eqx.combine(p, static), data))(params)

    def run(num: int) -> float:
        for _ in range(num):
            value, _ = jax.block_until_ready(gradient(params, data))
        return float(value)

    return run


def prediction(problem: Problem, variant: str) -> Run:
    """Means and variances; conditioned anew in each call, or once, which keeps the Cholesky factor."""
    family, X = svgp(problem), jnp.asarray(problem.X)
    params, static = eqx.partition(family.condition(None) if variant.endswith("once") else family, eqx.is_array)

    @jax.jit
    def moments(params, X):
        fitted = eqx.combine(params, static)
        f = (fitted if variant.endswith("once") else fitted.condition(None))(X, covariance="diagonal")
        return f.mean, f.variance

    def run(num: int) -> float:
        for _ in range(num):
            mean, variance = jax.block_until_ready(moments(params, X))
        return float(jnp.mean(mean**2) + jnp.mean(variance))

    return run
