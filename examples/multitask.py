"""A photograph that has lost a third of each colour: what three outputs gain from one model.

    python examples/multitask.py [--steps 400] [--num-inducing 150] [--block 16] [--out out] [--seed 0] [--quick]

A photograph (scikit-learn's ``china.jpg``, averaged over blocks of pixels) is three functions of the position: red, green and
blue. Each is lost in two bands of columns of its own, and at a tenth of the other pixels. Three models see what is left:

* independent: a GP for each colour, ``f(X)`` with three latent functions;
* LMC: their mixtures ``f(X) @ W`` with W learned, the linear model of coregionalization;
* ICM: one function of (position, colour) with ``kernels.Coregion``, the intrinsic model, in the long format: a row for each value.

It prints how well each predicts the lost values, and draws the pictures.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
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
from sklearn.datasets import load_sample_image

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods

COLOURS = ("red", "green", "blue")
P = len(COLOURS)
positive = dist.constraints.positive


@dataclass
class Photograph:
    """Pixels' positions (N, 2), their colours (N, 3), standardized, and which of these are seen."""

    shape: tuple[int, int]
    X: jax.Array
    Y: jax.Array
    seen: jax.Array
    centre: np.ndarray
    scale: np.ndarray

    @classmethod
    def load(cls, block: int, seed: int) -> Photograph:
        pixels = load_sample_image("china.jpg") / 255
        height, width = pixels.shape[0] // block, pixels.shape[1] // block
        pixels = pixels[: height * block, : width * block].reshape(height, block, width, block, P).mean((1, 3))
        row, column = np.mgrid[:height, :width].reshape(2, -1)
        X = np.stack([column, row], -1) / width
        # Six bands: a colour is missing in every third, so two of three colours are there at every position.
        lost = (column * 2 * P // width)[:, None] % P == np.arange(P)
        seen = ~lost & (np.random.default_rng(seed).uniform(size=lost.shape) < 0.9)
        Y = pixels.reshape(-1, P)
        centre = np.array([Y[seen[:, p], p].mean() for p in range(P)])
        scale = np.array([Y[seen[:, p], p].std() for p in range(P)])
        return cls((height, width), jnp.float32(X), jnp.float32((Y - centre) / scale), jnp.asarray(seen), centre, scale)

    def picture(self, Y: Any) -> np.ndarray:
        return np.clip(np.asarray(Y) * self.scale + self.centre, 0, 1).reshape(*self.shape, P)


def noise() -> jax.Array:
    """Standard deviations of the colours."""
    return numpyro.param("noise", jnp.full(P, 0.3), constraint=positive)


def wide(X, Y=None, seen=True, *, Z, mix):
    """A row for each pixel: P functions, each with its own lengthscales, mixed or not."""
    lengthscale = numpyro.param("lengthscale", jnp.full((P, 2), 0.15), constraint=positive)
    scale = numpyro.param("scale", jnp.ones(P), constraint=positive)
    f = ogp.gp("f", scale**2 * kernels.Matern32(lengthscale), Z)
    m = f(X)
    if mix:
        # The first function is what all colours share; the others begin as what is left of single ones.
        start = jnp.eye(P).at[0].set(1.0)
        m = m @ numpyro.param("W", start)
    with numpyro.plate("pixels", len(X), dim=-2), numpyro.plate("colours", P, dim=-1):
        numpyro.sample("y", likelihoods.Gaussian(m, noise()).mask(seen), obs=Y)


def long(X, Y=None, *, Z):
    """A row (position, colour) for each value."""
    lengthscale = numpyro.param("lengthscale", jnp.full(2, 0.15), constraint=positive)
    W = numpyro.param("W", jnp.stack([jnp.ones(P), jnp.linspace(-0.3, 0.3, P)], -1))
    kappa = numpyro.param("kappa", jnp.full(P, 0.1), constraint=positive)
    f = ogp.gp("f", kernels.Matern32(lengthscale).on([0, 1]) * kernels.Coregion(W, kappa).on(2), Z)
    with numpyro.plate("values", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise()[X[:, 2].astype(int)]), obs=Y)


@dataclass
class Fit:
    name: str
    bound: float
    seconds: float
    params: dict[str, jax.Array]
    y: dist.Normal  # what is predicted of all values, (N, P)

    def errors(self, photograph: Photograph) -> np.ndarray:
        """Root mean squared error at the lost values of each colour, in units of its full range."""
        lost = ~np.asarray(photograph.seen)
        error = np.asarray(self.y.mean - photograph.Y) * photograph.scale
        return np.array([(error[lost[:, p], p] ** 2).mean() ** 0.5 for p in range(P)])

    def row(self, photograph: Photograph) -> str:
        errors = self.errors(photograph)
        density = np.asarray(self.y.log_prob(photograph.Y)) - np.log(photograph.scale)
        density = density[~np.asarray(photograph.seen)].mean()
        colours = "".join(f"{error:12.4f}" for error in errors)
        return f"{self.name:12s} {self.bound:10.1f} {density:12.3f}{colours} {self.seconds:10.1f}"


def fit(model, args, kwargs, num_steps: int, seed: int) -> tuple[Any, dict[str, jax.Array], float, float]:
    guide = ogp.AutoSparseGP(model, residual="tight")
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(5e-2, num_steps)), TraceMeanField_ELBO())

    @jax.jit
    def run(rng_key):
        state = svi.init(rng_key, *args, **kwargs)
        return lax.scan(lambda state, _: svi.update(state, *args, **kwargs), state, length=num_steps)

    run = run.lower(random.PRNGKey(seed)).compile()
    start = time.perf_counter()
    state, losses = jax.block_until_ready(run(random.PRNGKey(seed)))
    return guide, svi.get_params(state), -float(losses[-1]), time.perf_counter() - start


def fit_wide(name: str, photograph: Photograph, num_inducing: int, num_steps: int, seed: int) -> Fit:
    """The independent functions, or their mixtures."""
    args = photograph.X, photograph.Y, photograph.seen
    kwargs = {"Z": init.kmeans(random.PRNGKey(seed), photograph.X, num_inducing), "mix": name == "LMC"}
    guide, params, bound, seconds = fit(wide, args, kwargs, num_steps, seed)

    @jax.jit
    def predict(params):
        m = ogp.posterior(wide, guide, params, *args, **kwargs)["f"](photograph.X)
        m = m @ params["W"] if kwargs["mix"] else m
        return m.mean, jnp.sqrt(m.variance + params["noise"] ** 2)

    return Fit(name, bound, seconds, params, dist.Normal(*predict(params)))


def fit_long(name: str, photograph: Photograph, num_inducing: int, num_steps: int, seed: int) -> Fit:
    """The function of position and colour, whose inducing points are spread over the colours."""
    N = len(photograph.X)
    every = jnp.hstack([jnp.tile(photograph.X, (P, 1)), jnp.repeat(jnp.arange(P, dtype=float), N)[:, None]])
    rows = np.flatnonzero(photograph.seen.T)
    args = every[rows], photograph.Y.T.ravel()[rows]
    Z = init.kmeans(random.PRNGKey(seed), photograph.X, 2 * num_inducing)
    kwargs = {"Z": jnp.hstack([Z, (jnp.arange(len(Z)) % P)[:, None].astype(Z.dtype)])}
    guide, params, bound, seconds = fit(long, args, kwargs, num_steps, seed)

    @jax.jit
    def predict(params):
        m = ogp.posterior(long, guide, params, *args, **kwargs)["f"](every)
        scale = jnp.sqrt(m.variance + jnp.repeat(params["noise"], N) ** 2)
        return m.mean.reshape(P, N).T, scale.reshape(P, N).T

    return Fit(name, bound, seconds, params, dist.Normal(*predict(params)))


def plot(path: Path, photograph: Photograph, fits: list[Fit]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    seen = np.asarray(photograph.seen)
    whole = photograph.picture(photograph.Y)
    panels = {"photograph": whole, "what is seen (lost colours are black)": whole * seen.reshape(whole.shape)}
    for f in fits:
        panels[f.name] = photograph.picture(jnp.where(photograph.seen, photograph.Y, f.y.mean))
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.2), layout="constrained")
    for axis, (title, picture) in zip(axes.ravel(), panels.items(), strict=False):
        axis.imshow(picture)
        axis.set(xticks=[], yticks=[])
        axis.set_title(title, fontsize=10)
    bars = axes[1, 2]
    for p, (colour, shade) in enumerate(zip(COLOURS, ("#D55E00", "#009E73", "#0072B2"), strict=True)):
        heights = [f.errors(photograph)[p] for f in fits]
        bars.bar(np.arange(len(fits)) + 0.27 * (p - 1), heights, width=0.25, color=shade, label=colour)
    bars.set_xticks(range(len(fits)), [f.name for f in fits])
    bars.set_ylabel("RMSE of lost values")
    bars.legend(fontsize=9)
    bars.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> list[Fit]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="Adam steps of each model, all values at once")
    parser.add_argument("--num-inducing", type=int, default=150, help="per function; the long format has twice as many")
    parser.add_argument("--block", type=int, default=16, help="pixels of the original, squared, to one")
    parser.add_argument("--seed", type=int, default=0, help="of the lost values and the starting points")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="few steps and points, to see that all of it runs")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.num_inducing, args.block = 60, 40, 32
    photograph = Photograph.load(args.block, args.seed)
    options = (photograph, args.num_inducing, args.steps, args.seed)
    lost = int((~photograph.seen).sum())
    print(
        f"{photograph.shape[0]} x {photograph.shape[1]} pixels of {P} colours; {lost} of {photograph.Y.size} values are lost."
    )
    names = "".join(f"{'RMSE ' + colour:>12s}" for colour in COLOURS)
    print(f"\n{'model':12s} {'ELBO':>10s} {'test log p':>12s}{names} {'seconds':>10s}")
    fits = []
    for name, method in (("independent", fit_wide), ("LMC", fit_wide), ("ICM", fit_long)):
        fits.append(method(name, *options))
        print(fits[-1].row(photograph), flush=True)
    print(
        "\nELBO and test log p: nats, the latter for a lost value. RMSE: of lost values, in units of a colour's full range."
    )
    W, kappa = fits[-1].params["W"], fits[-1].params["kappa"]
    B = np.asarray(W @ W.T + jnp.diag(kappa))
    pairs = [
        f"{COLOURS[i]}-{COLOURS[j]} {B[i, j] / np.sqrt(B[i, i] * B[j, j]):.2f}" for i, j in ((0, 1), (0, 2), (1, 2))
    ]
    print(f"Correlations between colours that ICM learned: {', '.join(pairs)}.")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "multitask.png"
    plot(path, photograph, fits)
    print(f"Wrote {path}.")
    return fits


if __name__ == "__main__":
    main()
