"""What quick compilation saves and costs: a collapsed bound with its gradient, the function given the data, marginals and a joint
distribution of a function, a step of SVI, and predictive densities of counts at draws of f.

    python -m benchmarks.quick_compiles [--repeats 10]

Printed for each program: CPU seconds to compile it as JAX does, with effort 1 and with effort 0 (``math/compiled.py``), and how
long it then runs, relative to JAX's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import CollapsedGP, kernels, likelihoods
from numpyro_orthgp.math.compiled import quick_options

SIZES = ((200, 100), (1400, 200), (8000, 400))  # rows and points of the bound
BATCH = 1024


def bound(num: int, num_points: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 8))

    def value(lengthscale: Any, noise: Any, X: Any, y: Any, Z: Any) -> Any:
        return CollapsedGP(kernels.Matern52(lengthscale), X, Z, noise).log_prob(y)

    return jax.value_and_grad(value, (0, 1)), (np.full(8, 3.0), np.array(0.3), X, np.sin(X[:, 0]), X[:num_points])


def function(num: int, num_points: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    _, args = bound(num, num_points)

    def given(lengthscale: Any, noise: Any, X: Any, y: Any, Z: Any) -> Any:
        return CollapsedGP(kernels.Matern52(lengthscale), X, Z, noise).posterior(y)

    return given, args


def predictions(num: int, joint: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    X = np.random.default_rng(0).normal(size=(num, 4)).astype(np.float32)

    def of(lengthscale: Any, Z: Any, X: Any) -> Any:
        with handlers.seed(rng_seed=0):
            f = ogp.gp("f", kernels.Matern32(lengthscale), Z)
        return f.joint(X).scale_tril if joint else f(X).variance

    return of, (np.ones(4, np.float32), X[:30], X)


def svi_step(num_points: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    X = np.random.default_rng(0).normal(size=(BATCH, 8)).astype(np.float32)

    def model(X: Any, y: Any) -> None:
        f = ogp.gp("f", kernels.Matern32(numpyro.param("lengthscale", jnp.ones(8))), numpyro.param("Z", X[:num_points]))
        with numpyro.plate("data", 10 * BATCH, subsample_size=BATCH):
            numpyro.sample("y", likelihoods.Gaussian(f(X), numpyro.param("noise", 0.3)), obs=y)

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
    y = np.sin(X[:, 0])
    return svi.update, (svi.init(jax.random.PRNGKey(0), X, y), X, y)


def densities(draws: int, num: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    mean = rng.normal(size=(draws, num)).astype(np.float32)

    def at_draws(mean: Any, y: Any) -> Any:
        spread = jnp.full(num, 0.02, jnp.float32)
        return jax.vmap(lambda m: likelihoods.Poisson(ogp.Marginals(m, spread, 0 * spread)).log_predictive(y).sum())(
            mean
        )

    return at_draws, (mean, rng.poisson(np.exp(mean[0])))


def measure(program: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> str:
    compiled, seconds, times = [], [], []
    for options in (None, quick_options(1), quick_options(0)):
        lowered = jax.jit(program).lower(*args)
        begin = time.process_time()
        compiled.append(lowered.compile(compiler_options=options))
        seconds.append(time.process_time() - begin)
        jax.block_until_ready(compiled[-1](*args))
        times.append([])
    for _ in range(repeats):  # in turns: others may use the machine
        for run, found in zip(compiled, times, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(run(*args))
            found.append(time.perf_counter() - begin)
    each = np.median(times, axis=1)
    return (
        " ".join(f"{s:9.2f}" for s in seconds)
        + f"{1e3 * each[0]:11.1f}"
        + "".join(f"{t / each[0]:9.2f}" for t in each[1:])
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args(argv)
    print(f"{'':34s}compile, CPU s: JAX's, effort 1, 0   run: ms, effort 1, 0 times it")
    with jax.enable_x64(True):
        for num, num_points in SIZES:
            print(
                f"{f'bound and gradient, {num} x {num_points}':34s}",
                measure(*bound(num, num_points), args.repeats),
                flush=True,
            )
        print(f"{'function, 1400 x 200':34s}", measure(*function(1400, 200), args.repeats), flush=True)
    for joint in (False, True):
        name = f"{'joint distribution' if joint else 'marginals'} of 200 rows, M = 30"
        print(f"{name:34s}", measure(*predictions(200, joint), 10 * args.repeats), flush=True)
    print(f"{'200,000 densities of counts, float32':34s}", measure(*densities(1000, 200), args.repeats), flush=True)
    for num_points in (64, 256):
        print(
            f"{f'step of SVI, float32, M = {num_points}':34s}",
            measure(*svi_step(num_points), 3 * args.repeats),
            flush=True,
        )


if __name__ == "__main__":
    main()
