"""A hundred thousand measurements on a map: a smooth field with fine structure, and blocks of the map left out.

    python examples/spatial.py [--num 100000] [--num-inducing 256] [--epochs 8] [--batch-size 1000] [--out out] [--seed 0]
                               [--quick] [--no-progress-bar]

Places lie in a square of 100 km, crowded around towns. The field is the sum of a smooth one and of one whose lengthscale is 3.5 km,
each made of a few hundred random waves, so that no N x N matrix is needed; noise has standard deviation 0.3. The model knows that
there are two scales, not which. SVGP and SOLVE-GP are fitted by ``ogp.fit`` on minibatches, and scored twice: at random places
held out, which have neighbours in the data, and in whole blocks of 10 km, which do not.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods

SIDE = 10  # of the map, in units of 10 km
NOISE = 0.3
NUM_BLOCKS = 8  # of 10 km, out of 100


class Places(NamedTuple):
    """Where (N, 2), in units of 10 km; what was measured (N,); the field there (N,)."""

    X: np.ndarray
    y: np.ndarray
    field: np.ndarray

    def rows(self, which: np.ndarray) -> Places:
        return Places(*(a[which] for a in self))


class Field:
    """A smooth function and a rough one, added: waves of random directions and phases."""

    def __init__(self, rng: np.random.Generator, num_waves: int = 400) -> None:
        scales = np.repeat([2.5, 0.35], num_waves)
        self.frequencies = rng.normal(size=(2, 2 * num_waves)) / scales
        self.phases = rng.uniform(0, 2 * np.pi, 2 * num_waves)
        self.weights = rng.normal(size=2 * num_waves) * np.repeat([1.0, 0.5], num_waves) * np.sqrt(2 / num_waves)

    def __call__(self, X: np.ndarray) -> np.ndarray:
        blocks = np.array_split(X, len(X) // 5000 + 1)
        return np.concatenate([np.cos(x @ self.frequencies + self.phases) @ self.weights for x in blocks])


class Survey(NamedTuple):
    train: Places
    random: Places  # held out here and there
    blocks: Places  # held out with all around them
    corners: np.ndarray  # of the blocks (NUM_BLOCKS, 2)
    field: Field

    @classmethod
    def simulate(cls, num: int, seed: int) -> Survey:
        rng = np.random.default_rng(seed)
        field, towns = Field(rng), rng.uniform(0, SIDE, (40, 2))
        crowded = towns[rng.integers(40, size=num)] + 0.7 * rng.normal(size=(num, 2))
        crowded = SIDE - np.abs(SIDE - np.abs(crowded))  # mirrored at the edges
        X = np.where(rng.uniform(size=(num, 1)) < 0.5, crowded, rng.uniform(0, SIDE, (num, 2)))
        f = field(X)
        places = Places(*(a.astype(np.float32) for a in (X, f + NOISE * rng.normal(size=num), f)))
        left_out = rng.choice(SIDE**2, NUM_BLOCKS, replace=False)
        in_block = np.isin(X.astype(int) @ [1, SIDE], left_out)
        here_and_there = ~in_block & (rng.uniform(size=num) < 0.05)
        split = (places.rows(rows) for rows in (~in_block & ~here_and_there, here_and_there, in_block))
        return cls(*split, np.stack([left_out % SIDE, left_out // SIDE], 1), field)


def model(X, y=None, *, N, sets):
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", jnp.asarray([2.0, 1.0]), constraint=positive)
    scale = numpyro.param("scale", jnp.ones(2), constraint=positive)
    noise = numpyro.param("noise", jnp.asarray(0.5), constraint=positive)
    kernel = sum(scale[i] ** 2 * kernels.Matern52(lengthscale[i]) for i in range(2))
    sets = [numpyro.param(f"Z{i}", Z) for i, Z in enumerate(sets)]
    f = ogp.gp("f", kernel, sets)
    with numpyro.plate("places", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def starting_points(X: np.ndarray, M: int, seed: int) -> dict[str, list[jax.Array]]:
    """Points for three models: M in one set, M in each of two, 2 M in one."""
    rows = np.random.default_rng(seed).permutation(len(X))[: max(10_000, 4 * M)]
    sample = jnp.asarray(X[rows])
    Z, Z2 = (init.kmeans(random.PRNGKey(seed), sample, num) for num in (M, 2 * M))
    O = init.greedy_variance(kernels.Matern52(1.0), sample, M, given=Z)
    return {f"SVGP ({M})": [Z], f"SOLVE-GP ({M}+{M})": [Z, O], f"SVGP ({2 * M})": [Z2]}


class Fit:
    def __init__(self, train: Places, sets: list[jax.Array], num_epochs: int, batch_size: int, bar: bool) -> None:
        constants: dict[str, Any] = {"N": len(train.y), "sets": sets}
        num_steps = max(1, num_epochs * len(train.y) // batch_size)
        guide = ogp.AutoSparseGP(model, natural=True)
        # A natural step of length r replaces a share r of what q knows by what one minibatch says: it has to shrink.
        lengths = optax.cosine_decay_schedule(0.1, num_steps, 0.01)
        optimizer = ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(0.02, num_steps)), lengths, ramp_up=20)
        svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
        data, key = (train.X, train.y), random.PRNGKey(0)
        start = time.process_time()
        result = ogp.fit(svi, key, data, batch_size=batch_size, num_steps=num_steps, progress_bar=bar, **constants)
        self.seconds = time.process_time() - start
        self.params = result.params
        self.elbo = -result.losses[-max(1, num_steps // num_epochs) :].mean() / len(train.y)
        self.f = ogp.posterior(model, guide, result.params, jnp.asarray(train.X[:1]), **constants)["f"].diagonalized()
        self._moments = jax.jit(lambda f, X: (f(X).mean, f(X).variance))

    def at(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the field."""
        mean, variance = self._moments(self.f, jnp.asarray(X, jnp.float32))
        return np.asarray(mean), np.sqrt(np.asarray(variance))

    def scores(self, places: Places) -> tuple[float, float, float]:
        """Mean log density of a measurement, and of the field: error (RMS) and how much of it is in the 90 % intervals."""
        mean, spread = self.at(places.X)
        log_p = dist.Normal(mean, np.hypot(spread, self.params["noise"])).log_prob(places.y).mean()
        error = np.abs(places.field - mean)
        return float(log_p), float(np.sqrt(np.mean(error**2))), float(np.mean(error < 1.645 * spread))

    def row(self, name: str, survey: Survey) -> str:
        cells = [f"{name:21s}", f"{self.elbo:9.4f}"]
        for places in (survey.random, survey.blocks):
            log_p, error, covered = self.scores(places)
            cells.append(f"{log_p:7.4f}  {error:6.4f}  {100 * covered:4.1f} %")
        long, short = sorted(10 * self.params["lengthscale"], reverse=True)
        return "  ".join(
            [*cells, f"{long:5.1f}, {short:4.1f} km", f"{self.params['noise']:6.3f}", f"{self.seconds:6.0f}"]
        )


def save_figure(path: Path, survey: Survey, fits: dict[str, Fit], num_grid: int = 120) -> None:
    import matplotlib
    import matplotlib.colors

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sides = (np.arange(num_grid) + 0.5) * SIDE / num_grid
    grid = np.stack(np.meshgrid(sides, sides), -1).reshape(-1, 2)
    square: Any = {"extent": (0, 10 * SIDE, 0, 10 * SIDE), "origin": "lower"}
    truth = survey.field(grid)
    limit = np.abs(truth).max()
    figure, axes = plt.subplots(2, 3, figsize=(12, 7.6), sharex=True, sharey=True, layout="constrained")
    shown = {name: fit.at(grid) for name, fit in list(fits.items())[:2]}
    spreads = np.concatenate([spread for _, spread in shown.values()])
    norm = matplotlib.colors.LogNorm(*np.quantile(spreads, [0.005, 0.999]))
    maps = {"the field": truth} | {f"{name}: mean": mean for name, (mean, _) in shown.items()}
    for axis, (name, values) in zip(axes[0], maps.items(), strict=True):
        image = axis.imshow(values.reshape(num_grid, -1), cmap="PuOr", vmin=-limit, vmax=limit, **square)
        axis.set_title(name, fontsize=10)
    figure.colorbar(image, ax=axes[0], label="field", shrink=0.8)
    for axis, (name, (_, spread)) in zip(axes[1, 1:], shown.items(), strict=True):
        image = axis.imshow(spread.reshape(num_grid, -1), cmap="cividis", norm=norm, **square)
        axis.set_title(f"{name}: standard deviation", fontsize=10)
    bar = figure.colorbar(image, ax=axes[1], label="standard deviation of the field", shrink=0.8, extend="both")
    ticks = np.array([0.02, 0.05, 0.1, 0.2, 0.5])
    bar.set_ticks(ticks[(norm.vmin <= ticks) & (ticks <= norm.vmax)])
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.minorticks_off()
    places = survey.train.X[:4000]
    axes[1, 0].plot(*10 * places.T, ".", color="0.3", ms=1.2, mew=0)
    axes[1, 0].set(aspect="equal")
    axes[1, 0].set_title(f"{len(places)} of the places", fontsize=10)
    for axis in axes.flat:
        for corner in survey.corners:
            axis.add_patch(plt.Rectangle(10 * corner, 10, 10, fill=False, lw=1.2, ec="black"))
    axes[0, 0].set_ylabel("km")
    axes[1, 0].set_ylabel("km")
    for axis in axes[1]:
        axis.set_xlabel("km")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=100_000, help="measurements")
    parser.add_argument("--num-inducing", type=int, default=256, help="M: SVGP has M and 2 M, SOLVE-GP M + M")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="few data and steps, to see that all of it runs")
    parser.add_argument("--no-progress-bar", action="store_true")
    args = parser.parse_args(argv)
    if args.quick:
        args.num, args.num_inducing, args.epochs, args.batch_size = 5000, 24, 4, 200

    survey = Survey.simulate(args.num, args.seed)
    counts = [len(places.y) for places in survey[:3]]
    print(
        f"{counts[0]} places to learn from; {counts[1]} held out here and there, {counts[2]} in {NUM_BLOCKS} blocks.\n"
    )
    print(f"{'':21s}  {'':9s}  {'here and there':^23s}  {'blocks':^23s}")
    columns = "  ".join(f"{name:>{width}s}" for name, width in (("log p", 7), ("RMSE", 6), ("90 %", 6)))
    print(
        f"{'method':21s}  {'ELBO / N':>9s}  {columns}  {columns}  {'lengthscales':>14s}  {'noise':>6s}  {'CPU s':>6s}"
    )
    fits: dict[str, Fit] = {}
    for name, sets in starting_points(survey.train.X, args.num_inducing, args.seed).items():
        fit = fits[name] = Fit(survey.train, sets, args.epochs, args.batch_size, not args.no_progress_bar)
        print(fit.row(name, survey), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "spatial.png", survey, fits)
    print(
        "\nlog p: of a measurement, nats. RMSE and 90 %: of the field itself, and how much of it the 90 % intervals hold."
    )
    print(f"CPU s: of all cores, compilation included. Wrote {args.out / 'spatial.png'}.")


if __name__ == "__main__":
    main()
