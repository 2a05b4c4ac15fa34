"""Many small data sets, a model fitted to each: one program by ``jax.vmap``, a loop over one compiled fit, and plain loops.

    python benchmarks/many_data_sets.py [--sets 40] [--rows 60] [--num-inducing 12] [--steps 300] [--plain 5]

Data sets have from half of ``--rows`` to all of them, and are filled up with rows that are masked. Plain loops take the first
``--plain`` sets and are scaled up. Losses of the ways are compared.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

positive = numpyro.distributions.constraints.softplus_positive


def simulate(num_sets: int, num_rows: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """Inputs (S, N, 1), outputs (S, N), and which rows there are (S, N)."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 5, (num_sets, num_rows, 1))
    y = np.sin(X[..., 0] * rng.uniform(1, 3, (num_sets, 1))) + 0.2 * rng.normal(size=(num_sets, num_rows))
    seen = np.arange(num_rows) < rng.integers(num_rows // 2, num_rows + 1, num_sets)[:, None]
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32), jnp.asarray(seen)


def inference(num_inducing: int) -> SVI:
    Z = jnp.linspace(0.0, 5.0, num_inducing, dtype=jnp.float32)[:, None]

    def model(X: Any, y: Any, seen: Any) -> None:
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=positive)
        noise = numpyro.param("noise", 0.5, constraint=positive)
        f = ogp.gp("f", kernels.RBF(lengthscale), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), noise).mask(seen), obs=y)

    optimizer = ogp.natural_gradient(optax.adam(0.03), 0.3, ramp_up=10)
    return SVI(model, ogp.AutoSparseGP(model, natural=True), optimizer, TraceMeanField_ELBO())


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=40)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--num-inducing", type=int, default=12)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plain", type=int, default=5, help="sets of the plain loops")
    args = parser.parse_args(argv)
    data = simulate(args.sets, args.rows)

    def fit_one(*rows: jax.Array) -> jax.Array:
        svi = inference(args.num_inducing)
        return svi.run(jax.random.PRNGKey(0), args.steps, *rows, progress_bar=False).losses[-1]

    def loop(fit: Any, num: int) -> np.ndarray:
        return np.array([fit(*(a[i] for a in data)) for i in range(num)])

    compiled, kept = jax.jit(fit_one), inference(args.num_inducing)

    def fit_kept(*rows: jax.Array) -> float:
        whole = {"num_steps": args.steps, "progress_bar": False}
        return float(ogp.fit(kept, jax.random.PRNGKey(0), rows, **whole).losses[-1])

    ways = {
        "vmap": lambda: np.asarray(jax.jit(jax.vmap(fit_one))(*data)),
        "loop over one compiled fit": lambda: loop(compiled, args.sets),
        "loop of ogp.fit, one SVI": lambda: loop(fit_kept, args.plain),
        "loop of svi.run": lambda: loop(fit_one, args.plain),
    }
    seconds, losses = {}, {}
    for name, way in ways.items():
        start = time.perf_counter()
        losses[name] = way()
        scale = args.sets / len(losses[name])
        seconds[name] = scale * (time.perf_counter() - start)
        apart = np.abs(losses[name] - losses["vmap"][: len(losses[name])]).max()
        print(
            f"{name:28s}{seconds[name]:8.1f} s, with compilation; final losses within {apart:.3f} nats of those by vmap"
        )
    return seconds


if __name__ == "__main__":
    main()
