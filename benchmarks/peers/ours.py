"""This library. Each function prepares a task: it returns ``run(n) -> value``, n steps and the value of the last."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from benchmarks.peers.floor import device as device
from benchmarks.peers.plain import Run, repeat
from benchmarks.peers.problem import LEARNING_RATE, NOISE, VARIANCE, Problem
from numpyro_orthgp import kernels, likelihoods

SUBSAMPLED = 1024  # columns of the mean-only points' covariance at each step


def model(X, y, *, problem: Problem, sets, mean_only=None, columns=None):
    """SVGP, SOLVE-GP or ODVGP of kin40k: Matern 3/2, a lengthscale per input; all hyperparameters and points are learned."""
    positive = dist.constraints.positive
    one = jnp.ones((), X.dtype)
    lengthscale = numpyro.param("lengthscale", jnp.asarray(problem.lengthscale), constraint=positive)
    variance = numpyro.param("variance", VARIANCE * one, constraint=positive)
    noise = numpyro.param("noise", NOISE * one, constraint=positive)
    inducing = [numpyro.param(f"Z{i}", jnp.asarray(Z)) for i, Z in enumerate(sets)]
    if mean_only is not None:
        inducing.append(ogp.MeanOnly(numpyro.param("mean_only", jnp.asarray(mean_only)), subsample_size=columns))
    f = ogp.gp("f", variance * kernels.Matern32(lengthscale), inducing, jitter=problem.jitter)
    with numpyro.plate("data", problem.num_data, subsample_size=X.shape[0]):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def start(problem: Problem, sets) -> dict[str, jax.Array]:
    """The problem's q for the first set if it is of that size, else the library's own start."""
    if len(sets[0]) != len(problem.mean):
        return {}
    return {"f.u0_loc": jnp.asarray(problem.mean), "f.u0_scale_tril": jnp.asarray(problem.root)}


def inference(residual: str = "prior", model=model) -> SVI:
    return SVI(model, ogp.AutoSparseGP(model, residual=residual), optax.adam(LEARNING_RATE), TraceMeanField_ELBO())


def with_priors(problem: Problem):
    """The model with hyperparameters that are sampled, and so estimated by their posterior mode."""
    prior = dist.LogNormal(jnp.zeros((), problem.X.dtype), 1.0)
    each = prior.expand(problem.lengthscale.shape).to_event()
    return numpyro.handlers.lift(model, {"lengthscale": each, "variance": prior, "noise": prior})


def steps(problem: Problem, sets, residual: str = "prior", **kwargs):
    """``svi.init`` and ``svi.update`` as functions of arrays: ``init(X, y) -> state``, ``update(state, X, y) -> (state, loss)``."""
    kwargs |= {"problem": problem, "sets": sets}
    svi = inference(residual)

    def init(X, y):
        return svi.init(jax.random.PRNGKey(0), X, y, init_params=start(problem, sets), **kwargs)

    return init, lambda state, X, y: svi.update(state, X, y, **kwargs)


def training(
    problem: Problem, sets, residual: str = "prior", jit_init: bool = True, looped: bool = False, **kwargs
) -> Run:
    X, y = jnp.asarray(problem.X), jnp.asarray(problem.y)
    init, update = steps(problem, sets, residual, **kwargs)
    state = (jax.jit(init) if jit_init else init)(X, y)
    return repeat(jax.jit(update), state, X, y, looped=looped)


def step(problem: Problem, variant: str) -> Run:
    """A training step of SVGP: loss, all gradients, Adam."""
    return training(problem, [problem.Z], looped="loop" in variant)


def startup(problem: Problem, variant: str) -> Run:
    """The first such step. Outside of ``fit``, ``svi.init`` compiles operation by operation unless it is jitted."""
    if not variant.startswith("SVGP, fit"):
        return training(problem, [problem.Z], jit_init="jitted" in variant)
    sets = [problem.Z]
    options = {"init_params": start(problem, sets), "problem": problem, "sets": sets, "progress_bar": False}

    def run(num: int) -> float:
        svi = inference(model=with_priors(problem) if variant.endswith("priors") else model)
        return -float(ogp.fit(svi, jax.random.PRNGKey(0), (problem.X, problem.y), num_steps=num, **options).losses[-1])

    return run


restart = startup


def solve(problem: Problem, variant: str) -> Run:
    """Steps of SOLVE-GP (M + M) and of SVGP with both sets' points in one."""
    looped = variant.endswith("loop")
    if variant == "SVGP, half the points":
        return training(problem, [problem.Z])
    if variant.startswith("SVGP, all points"):
        return training(problem, [jnp.concatenate([problem.Z, problem.O])], looped=looped)
    return training(problem, [problem.Z, problem.O], "tight" if variant.endswith("tight") else "prior", looped=looped)


def odvgp(problem: Problem, variant: str) -> Run:
    """Steps of ODVGP, whose second set of points moves the mean alone, and of SVGP with the first set."""
    if variant == "SVGP":
        return training(problem, [problem.Z])
    columns = min(SUBSAMPLED, len(problem.O)) if variant.endswith("subsampled") else None
    return training(problem, [problem.Z], mean_only=problem.O, columns=columns)


def collapsed(problem: Problem, variant: str) -> Run:
    """Value and gradient of the collapsed bound for lengthscales, variance, noise and inducing points; RBF."""
    X, y, Z = (jnp.asarray(a) for a in (problem.X, problem.y, problem.Z))
    bound, _, at_once = variant.partition(", ")

    def log_prob(params):
        kernel = params["variance"] * kernels.RBF(params["lengthscale"])
        options = {"bound": bound, "jitter": problem.jitter, "block_size": len(y) if at_once else None}
        return ogp.CollapsedGP(kernel, X, params["Z"], params["noise"], **options).log_prob(y)

    one = jnp.ones((), X.dtype)
    lengthscale = jnp.asarray(problem.lengthscale)
    params = {"variance": VARIANCE * one, "lengthscale": lengthscale, "noise": NOISE * one, "Z": Z}
    gradient = jax.jit(jax.value_and_grad(log_prob))

    def run(num: int) -> float:
        for _ in range(num):
            value, _ = jax.block_until_ready(gradient(params))
        return float(value)

    return run


def predictor(problem: Problem, diagonalized: bool):
    """``fitted(X, y)``, a function fitted to a few rows, and ``moments(f, X)``, its means and variances at many."""
    kwargs = {"problem": problem, "sets": [problem.Z]}
    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(LEARNING_RATE), TraceMeanField_ELBO())

    def fitted(X, y):
        state = svi.init(jax.random.PRNGKey(0), X, y, init_params=start(problem, [problem.Z]), **kwargs)
        f = ogp.posterior(model, guide, svi.get_params(state), X, y, **kwargs)["f"]
        return f.diagonalized() if diagonalized else f

    def moments(f, X):
        marginals = f(X)
        return marginals.mean, marginals.variance

    return fitted, moments


def prediction(problem: Problem, variant: str) -> Run:
    """Means and variances of the fitted function, which is made once. Diagonalized is what peers' caches are."""
    X, y = jnp.asarray(problem.X), jnp.asarray(problem.y)
    fitted, moments = map(jax.jit, predictor(problem, variant.endswith("diagonalized")))
    f = fitted(X[:10], y[:10])

    def run(num: int) -> float:
        for _ in range(num):
            mean, variance = jax.block_until_ready(moments(f, X))
        return float(jnp.mean(mean**2) + jnp.mean(variance))

    return run
