"""Handwritten digits in a few latent dimensions, and halves of pictures filled in.

    python examples/gplvm.py [--digits 0 1 2 3] [--dims 6] [--num-inducing 40] [--steps 800] [--out out] [--seed 0] [--quick]

A Bayesian GP-LVM (Titsias and Lawrence 2010; the tighter bound of Titsias 2025, App. B.5) of scikit-learn's digits, 8 x 8 pixels,
without their labels. Automatic relevance determination switches off dimensions that it does not need. Then the lower half of
new pictures is hidden, and filled in from what the upper half says about where they lie. It prints errors beside those of
plainer ways to fill in, and draws the latent space, the relevance of its dimensions, and the pictures.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

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
from numpyro_orthgp import init, kernels, plots

positive = dist.constraints.positive
NUM_TEST = 100
SHOWN = 8


def load(digits: list[int], seed: int) -> tuple[np.ndarray, ...]:
    """Pictures to learn from and to complete, pixels in [0, 1] less their mean, labels of both, and that mean."""
    pixels, label = load_digits(return_X_y=True)
    rows = np.flatnonzero(np.isin(label, digits))
    rows = np.random.default_rng(seed).permutation(rows)
    pixels, label = pixels[rows] / 16, label[rows]
    mean = pixels[NUM_TEST:].mean(0)
    return pixels[NUM_TEST:] - mean, pixels[:NUM_TEST] - mean, label[NUM_TEST:], label[:NUM_TEST], mean


def model(Y, start, num_inducing):
    dim = start.shape[1]
    lengthscale = numpyro.param("lengthscale", jnp.full(dim, dim**0.5, Y.dtype), constraint=positive)
    scale = numpyro.param("scale", jnp.full((), 0.3, Y.dtype), constraint=positive)
    noise = numpyro.param("noise", jnp.full((), 0.1, Y.dtype), constraint=positive)
    Z = numpyro.param("Z", start[:num_inducing])
    X = ogp.latent_inputs("X", *start.shape)
    numpyro.sample("y", ogp.CollapsedGP(scale**2 * kernels.RBF(lengthscale), X, Z, noise), obs=Y)


def fit(Y: jax.Array, start: jax.Array, num_inducing: int, steps: int) -> tuple[Any, dict[str, jax.Array], float]:
    """The fitted functions, parameters, and the bound at the end."""
    guide = ogp.AutoSparseGP(model, latents={"X": (start, 0.5)})
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.03, steps)), TraceMeanField_ELBO())
    args = (Y, start, num_inducing)

    @jax.jit
    def run(key):
        state = svi.init(key, *args)
        state, losses = lax.scan(lambda s, _: svi.update(s, *args), state, None, length=steps)
        params = svi.get_params(state)
        return ogp.posterior(model, guide, params, *args)["y"], params, -losses[-1]

    return run(random.PRNGKey(0))


def nearest(Y: np.ndarray, rows: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """For each row the training picture that is most like it where it is seen."""
    distance = ((rows[:, None, seen] - Y[None][:, :, seen]) ** 2).sum(-1)
    return Y[distance.argmin(1)]


def save_figure(path: Path, f, params, label, pictures: list[tuple[str, np.ndarray]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 7.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    left, right = above.subplots(1, 2, width_ratios=[1.5, 1])
    best = [int(q) for q in np.argsort(np.asarray(params["lengthscale"]))[:2]]
    plots.latent_space(f, params["X_loc"], dims=tuple(best), labels=label, ax=left)
    plots.relevance(params["lengthscale"], ax=right)
    axes = below.subplots(len(pictures), SHOWN)
    for row, (name, images) in zip(axes, pictures, strict=True):
        for ax, image in zip(row, images, strict=False):
            ax.imshow(np.ma.masked_invalid(image.reshape(8, 8)), cmap="gray_r", vmin=0, vmax=1)
            ax.set_facecolor("#56B4E9")
            ax.set_xticks([])
            ax.set_yticks([])
        row[0].set_ylabel(name, rotation=0, ha="right", va="center")
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--digits", type=int, nargs="+", default=[0, 1, 2, 3], help="which digits")
    parser.add_argument("--dims", type=int, default=6, help="latent dimensions to begin with")
    parser.add_argument("--num-inducing", type=int, default=40)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    steps = 20 if args.quick else args.steps
    jax.config.update("jax_enable_x64", True)  # the collapsed GP-LVM needs the digits

    Y, Y_test, label, _, mean = load(args.digits, args.seed)
    start = init.pca(Y, args.dims)
    begin = time.perf_counter()
    f, params, bound = fit(jnp.asarray(Y), start, args.num_inducing, steps)
    lengthscale = np.asarray(params["lengthscale"])
    print(f"{len(Y)} pictures, bound {float(bound):.0f} nats, {time.perf_counter() - begin:.0f} s.")
    print(f"Relevance of the latent dimensions, 1 / lengthscale: {np.round(np.sort(1 / lengthscale)[::-1], 2)}\n")

    seen = np.arange(64) < 32
    hidden = np.where(seen, Y_test, np.nan)
    found = ogp.infer_latents(f, hidden, float(params["noise"]), starts=params["X_loc"])
    ways = {
        "GP-LVM": np.asarray(found.mean),
        "nearest picture": nearest(Y, Y_test, seen),
        "mean picture": np.zeros_like(Y_test),
    }
    print(f"{'lower half filled in by':24s}  {'error':>7s}")
    for name, guess in ways.items():
        print(f"{name:24s}  {np.sqrt(((guess - Y_test)[:, ~seen] ** 2).mean()):7.4f}")
    filled = np.where(seen, Y_test, ways["GP-LVM"])
    pictures = [("truth", Y_test + mean), ("seen", hidden + mean), ("filled in", filled + mean)]
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "gplvm.png", f, params, label, pictures)
    print(f"\nerror: root mean square, where pixels are in [0, 1]. Wrote {args.out / 'gplvm.png'}.")


if __name__ == "__main__":
    main()
