"""Bayesian GP-LVM of the three-phase oil flow data: collapsed bounds of 2009 and 2025, and the stochastic version.

    python benchmarks/oil_flow.py --data three_phase_oil_flow.npz [--dims 10] [--num-inducing 50] [--steps 2000] [--batch 500]

1000 rows of 12 measurements from a simulated pipeline, in three classes that no fit sees (Titsias and Lawrence 2010,
Sec. 4.1). Each fit starts at the principal components. Printed are the bound at the end, and in how many rows the nearest
neighbour in the two most relevant latent dimensions is of another class. The picture shows these and the relevance of all.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods

positive = dist.constraints.positive
JITTER = 1e-6


def hyperparameters(start: jax.Array, num_inducing: int, spread: float):
    """Kernel, noise and inducing points, all of them parameters."""
    dim = start.shape[1]
    lengthscale = numpyro.param("lengthscale", jnp.full(dim, dim**0.5, start.dtype), constraint=positive)
    scale = numpyro.param("scale", jnp.asarray(spread, start.dtype), constraint=positive)
    noise = numpyro.param("noise", jnp.asarray(0.3 * spread, start.dtype), constraint=positive)
    Z = numpyro.param("Z", start[:: len(start) // num_inducing][:num_inducing])
    return scale**2 * kernels.RBF(lengthscale), Z, noise


def collapsed(Y, start, spread, *, num_inducing, bound):
    kernel, Z, noise = hyperparameters(start, num_inducing, spread)
    X = ogp.latent_inputs("X", *start.shape)
    numpyro.sample("y", ogp.CollapsedGP(kernel, X, Z, noise, bound=bound, jitter=JITTER), obs=Y)


def stochastic(Y, start, spread, *, num_inducing, batch):
    kernel, Z, noise = hyperparameters(start, num_inducing, spread)
    f = ogp.gp("f", kernel, Z, num_latents=Y.shape[1], jitter=JITTER)
    with numpyro.plate("rows", len(Y), subsample_size=batch) as rows:
        X = ogp.latent_inputs("X", *start.shape)
        numpyro.sample("y", likelihoods.Gaussian(f.expected(X), noise).to_event(1), obs=Y[rows])


def neighbours_of_another_class(X: np.ndarray, label: np.ndarray) -> int:
    distance = ((X[:, None] - X[None]) ** 2).sum(-1)
    np.fill_diagonal(distance, np.inf)
    return int((label[distance.argmin(1)] != label).sum())


class Fit:
    """One fit of some passes over the data, and the bound at its end on all of them."""

    def __init__(self, model, guide, args, kwargs, *, steps, rate=0.03, natural=False, start=None):
        if natural:
            # q(u) lags behind q(X): steps of X must become as small as the noise is.
            optimizer = ogp.natural_gradient(optax.adam(optax.exponential_decay(rate, steps, 0.1)), 0.5)
        else:
            optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
        svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
        state = jax.jit(lambda key: svi.init(key, *args, **kwargs, init_params=start))(random.PRNGKey(0))
        run = jax.jit(lambda state: lax.scan(lambda s, _: svi.update(s, *args, **kwargs), state, None, length=steps))
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(run(state))
        self.seconds = time.perf_counter() - begin
        self.params = svi.get_params(state)
        kwargs = {**kwargs, **({"batch": None} if "batch" in kwargs else {})}
        bound = jax.jit(lambda params: -svi.loss.loss(random.PRNGKey(1), params, model, guide, *args, **kwargs))
        self.bound = float(bound(self.params))

    def error(self, label: np.ndarray) -> int:
        lengthscale = np.asarray(self.params["lengthscale"])
        best = np.argsort(lengthscale)[:2]
        return neighbours_of_another_class(np.asarray(self.params["X_loc"])[:, best] / lengthscale[best], label)


def fits(Y, start, args):
    """Name and fit, one by one. The tighter bound is also started where the other one ended, and so is that one."""
    data = (Y, start, float(Y.std()))
    latents = {"X": (start, 0.5)}
    loose = None
    for bound in ("titsias2009", "titsias2025"):
        kwargs = {"num_inducing": args.num_inducing, "bound": bound}
        fit = Fit(collapsed, ogp.AutoSparseGP(collapsed, latents=latents), data, kwargs, steps=args.steps)
        loose = loose or fit.params
        yield f"{bound}", fit
    for bound in ("titsias2009", "titsias2025"):
        kwargs = {"num_inducing": args.num_inducing, "bound": bound}
        guide = ogp.AutoSparseGP(collapsed, latents=latents)
        yield f"{bound}, continued", Fit(collapsed, guide, data, kwargs, steps=args.steps // 4, rate=0.01, start=loose)
    for residual in ("prior", "tight"):
        kwargs = {"num_inducing": args.num_inducing, "batch": args.batch}
        guide = ogp.AutoSparseGP(stochastic, latents=latents, natural=True, residual=residual)
        per_pass = len(Y) // args.batch
        steps = 2 * args.steps * per_pass
        yield f"minibatches, {residual}", Fit(stochastic, guide, data, kwargs, steps=steps, rate=0.01, natural=True)
        # From the latent inputs, points and hyperparameters of the collapsed fit, with q(u) at the prior.
        steps = args.steps // 8 * per_pass
        fit = Fit(stochastic, guide, data, kwargs, steps=steps, rate=0.001, natural=True, start=loose)
        yield f"minibatches, {residual}, continued", fit


def draw(results, Y, start, label, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fit = next(f for n, f in results if n == "titsias2025, continued")
    kwargs = {"num_inducing": len(fit.params["Z"]), "bound": "titsias2025"}
    guide, spread = ogp.AutoSparseGP(collapsed, latents={"X": start}), float(Y.std())
    f = jax.jit(lambda p: ogp.posterior(collapsed, guide, p, Y, start, spread, **kwargs)["y"])(fit.params)
    best = np.argsort(np.asarray(fit.params["lengthscale"]))[:2]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    ogp.plots.latent_space(f, fit.params["X_loc"], dims=tuple(int(q) for q in best), labels=label, ax=axes[0])
    ogp.plots.relevance(fit.params["lengthscale"], ax=axes[1])
    figure.savefig(path, dpi=150)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="three_phase_oil_flow.npz, with arrays X and label")
    parser.add_argument("--dims", type=int, default=10, help="latent dimensions")
    parser.add_argument("--num-inducing", type=int, default=50)
    parser.add_argument("--steps", type=int, default=2000, help="passes over the data")
    parser.add_argument("--batch", type=int, default=500, help="rows of a minibatch of the stochastic version")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser


def main() -> None:
    args = parser().parse_args()
    jax.config.update("jax_enable_x64", True)

    with np.load(args.data) as file:
        Y, label = jnp.asarray(file["X"]), file["label"]
    Y = Y - Y.mean(0)
    start = init.pca(Y, args.dims)
    print(f"{os.cpu_count()} CPU cores, JAX {importlib.metadata.version('jax')}, float64")
    print(f"{'method':30s}{'bound':>10s}{'error':>8s}{'noise sd':>10s}{'seconds':>10s}")
    results = []
    for name, fit in fits(Y, start, args):
        results.append((name, fit))
        print(
            f"{name:30s}{fit.bound:10.1f}{fit.error(label):8d}{float(fit.params['noise']):10.4f}{fit.seconds:10.0f}",
            flush=True,
        )
    args.out.mkdir(parents=True, exist_ok=True)
    draw(results, Y, start, label, args.out / "oil_flow.png")


if __name__ == "__main__":
    main()
