"""What is compiled again: programs and seconds of first and later calls in one process.

    python -m benchmarks.second_calls [--data FILE.npz] [--num-inducing 100] [--steps 20]

A model with three hyperparameters that have priors is fitted on minibatches, goes on, sees more rows, and is fitted anew with
another rate by a new SVI; then its function is asked for twice, called at rows of several numbers, drawn from, conditioned on new
rows by a likelihood that is a new function each time, and compressed. At last ``svi.init`` by itself, which NumPyro does not
compile as a whole, with nothing kept, for the model and for one without priors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from benchmarks.peers.problem import load
from numpyro_orthgp import kernels, likelihoods, online

EVENT = "/jax/core/compile/backend_compile_duration"


def model(X: Any, y: Any = None, *, N: int, Z: Any) -> None:
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.zeros(X.shape[1]), 1.0).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = ogp.gp("f", variance * kernels.Matern32(lengthscale), Z)
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def without_priors(X: Any, y: Any = None, *, N: int, Z: Any) -> None:
    lengthscale = numpyro.param("lengthscale", jnp.ones(X.shape[1]))
    f = ogp.gp("f", numpyro.param("scale", 1.0) ** 2 * kernels.Matern32(lengthscale), Z)
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), numpyro.param("noise", 0.3)), obs=y)


def inference(rate: float, of: Callable[..., None] = model) -> SVI:
    return SVI(of, ogp.AutoSparseGP(of), optax.adam(rate), TraceMeanField_ELBO())


def main(argv: list[str] | None = None) -> dict[str, tuple[int, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="npz file with arrays X (N, D) and y (N,); made up if absent")
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    X, y = (a.astype(np.float32) for a in load(args.data, 3000))
    X, y, Z = X[:3000], y[:3000], X[: args.num_inducing]
    found: dict[str, tuple[int, float]] = {}
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))

    @contextmanager
    def row(name: str) -> Iterator[None]:
        before, started = compiled.count(EVENT), time.perf_counter()
        yield
        found[name] = compiled.count(EVENT) - before, time.perf_counter() - started
        print(f"{name:44s}{found[name][0]:10d}{found[name][1]:10.2f}", flush=True)

    def fit(svi: SVI, rows: int, key: int, **options: Any) -> Any:
        fixed = {"batch_size": 500, "num_steps": args.steps, "progress_bar": False, "N": rows, "Z": Z}
        return ogp.fit(svi, jax.random.PRNGKey(key), (X[:rows], y[:rows]), **fixed, **options)

    print(f"{'':44s}{'programs':>10s}{'seconds':>10s}")
    svi = inference(0.01)
    with row("fit of 2500 rows"):
        result = fit(svi, 2500, 0)
    with row("the fit goes on"):
        result = fit(svi, 2500, 1, init_state=result.state)
    with row("with 3000 rows"):
        result = fit(svi, 3000, 2, init_state=result.state)
    svi = inference(0.02)
    with row("a new SVI with another rate"):
        result = fit(svi, 3000, 3)
    for call in ("first", "second"):
        with row(f"posterior, {call} call"):
            f = ogp.posterior(model, svi.guide, result.params, X[:500], N=3000, Z=Z)["f"]
    for name, rows in (("f(X)", 1000), ("f(X) again", 1000), ("f(X) at another number of rows", 900)):
        with row(name):
            jax.block_until_ready(f(X[:rows]).mean)
    calls: dict[str, Callable[[], Any]] = {
        "f.joint(X)": lambda: f.joint(X[:50]).scale_tril,
        "f.sample_paths, at X": lambda: f.sample_paths(jax.random.PRNGKey(0), 10)(X[:50]),
        "online.condition, likelihood": lambda: online.condition(
            f, X[:20], y[:20], lambda f: likelihoods.StudentT(f, 4.0, 0.1)
        ),
        "online.compress": lambda: online.compress(f, X[:50]),
    }
    for name, call in calls.items():
        for which in ("first", "second"):
            with row(f"{name}, {which} call"):
                jax.block_until_ready(call())
    for name, of in (("svi.init by itself", model), ("the same, without priors", without_priors)):
        jax.clear_caches()
        with row(name):
            inference(0.01, of).init(jax.random.PRNGKey(0), X[:500], y[:500], N=2500, Z=Z)
    return found


if __name__ == "__main__":
    main()
