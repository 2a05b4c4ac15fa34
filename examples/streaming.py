"""Data that come in batches and are gone: a GP classifier that goes on learning from what it knows and what is new.

    python examples/streaming.py [--batches 6] [--num-inducing 80] [--steps 150] [--out out] [--seed 0] [--quick]

scikit-learn's digits, even against odd, 200 images at a time, 597 to test. After each batch:

  all data         a fit to all images so far, which the others may not see again
  newest batch     a fit to the newest images alone
  streaming bound  a fit to the newest images and to what the last posterior says (online.remember)
  conditioning     the last posterior conditioned on the newest images, hyperparameters of the first fit, then compressed to as
                   many points again (online.condition, online.compress)

Each has the same number of inducing points, chosen anew among the old ones and the new images by greedy conditional variance.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro.infer import SVI, TraceMeanField_ELBO
from sklearn.datasets import load_digits

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods, online

positive = dist.constraints.positive
BATCH = 200


def model(X, y=None, *, Z, past=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(1.0, 0.5))
    f = ogp.gp("f", scale**2 * kernels.Matern52(lengthscale), Z)
    if past is not None:
        online.remember("f_past", f, past)
    with numpyro.plate("images", len(X)):
        numpyro.sample("y", likelihoods.Bernoulli(f(X)), obs=y)


@jax.jit
def condition(f, X, y):
    return online.condition(f, X, y, likelihoods.Bernoulli)


@partial(jax.jit, static_argnames="steps")
def fit(X, y, Z, past: ogp.GPFunction | None = None, *, steps: int) -> ogp.GPFunction:
    """The posterior function after some steps of natural gradients for q and Adam for lengthscale and scale."""
    guide = ogp.AutoSparseGP(model, natural=True)
    schedule = optax.cosine_decay_schedule(0.05, steps)
    svi = SVI(model, guide, ogp.natural_gradient(optax.adam(schedule), 0.3), TraceMeanField_ELBO())
    state = svi.init(random.PRNGKey(0), X, y, Z=Z, past=past)
    state, _ = lax.scan(lambda s, _: svi.update(s, X, y, Z=Z, past=past), state, None, length=steps)
    return ogp.posterior(model, guide, svi.get_params(state), X, Z=Z, past=past)["f"]


@jax.jit
def scores(f, X, y):
    likelihood = likelihoods.Bernoulli(f(X))
    return likelihood.log_predictive(y).mean(), ((likelihood.mean > 0.5) != (y > 0.5)).mean()


def points(f: ogp.GPFunction | None, X, num: int):
    """Inducing points among those of the last function and the new inputs, where its kernel leaves most variance."""
    kernel = f.kernel if f else 9.0 * kernels.Matern52(3.0)
    return init.greedy_variance(kernel, jnp.concatenate([f.features[0].points, X]) if f else X, num)


def save_figure(path: Path, table: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for (name, values), style in zip(table.items(), ("k-", "C7:", "C0-", "C1--"), strict=True):
        axis.plot(np.arange(1, len(values) + 1) * BATCH, values, style, marker="o", ms=4, label=name)
    axis.set(xlabel="images seen", ylabel="mean log predictive probability of test labels")
    axis.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=6, help=f"of {BATCH} images, at most 6")
    parser.add_argument("--num-inducing", type=int, default=80)
    parser.add_argument("--steps", type=int, default=150, help="steps of each fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    steps, batches = (10, 2) if args.quick else (args.steps, min(args.batches, 6))

    X, digit = load_digits(return_X_y=True)
    order = np.random.default_rng(args.seed).permutation(len(digit))
    X, y = jnp.asarray(X[order] / 16, jnp.float32), jnp.asarray(digit[order] % 2, jnp.float32)
    X_test, y_test, M = X[1200:], y[1200:], args.num_inducing

    names = ["all data", "newest batch", "streaming bound", "conditioning"]
    table: dict[str, list[float]] = {name: [] for name in names}
    print("Mean log predictive probability of test labels, and error:\n")
    print(f"{'images':>6s}  " + "  ".join(f"{name:>17s}" for name in names))
    streaming = conditioned = None
    for b in range(batches):
        rows, seen = slice(b * BATCH, (b + 1) * BATCH), slice((b + 1) * BATCH)
        everything = fit(X[seen], y[seen], points(None, X[seen], M), steps=steps)
        newest = fit(X[rows], y[rows], points(None, X[rows], M), steps=steps)
        if streaming is None or conditioned is None:
            streaming = conditioned = newest
        else:
            streaming = fit(X[rows], y[rows], points(streaming, X[rows], M), streaming, steps=steps)
            Z = points(conditioned, X[rows], M)
            conditioned = online.compress(condition(conditioned, X[rows], y[rows]), Z)
        cells = []
        for name, f in zip(names, (everything, newest, streaming, conditioned), strict=True):
            log_p, error = scores(f, X_test, y_test)
            table[name].append(float(log_p))
            cells.append(f"{log_p:7.3f}  {100 * error:5.2f} %")
        print(f"{(b + 1) * BATCH:6d}  " + "  ".join(f"{cell:>17s}" for cell in cells), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "streaming.png", table)
    print(f"\nWrote {args.out / 'streaming.png'}.")


if __name__ == "__main__":
    main()
