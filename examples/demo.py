"""Is a handwritten digit odd? Four sparse GP classifiers on scikit-learn's digits, fitted by NumPyro's own ``SVI``.

    python examples/demo.py [--steps 1500] [--num-inducing 64] [--out out] [--seed 0] [--quick] [--no-progress-bar]

The model is written once; what differs is how many inducing sets it is given and one word to the guide. The four fits see the
same minibatches and take turns on the machine. It prints one table, and writes a figure and a NetCDF file for ArviZ.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from dataclasses import dataclass, field
from functools import cached_property
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
from tqdm.auto import tqdm

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods

NUM_TRAIN = 1200
START_SCALE = 4.0  # standard deviation of f to begin with: pictures of digits are far apart, and labels sure
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#555555")  # Okabe and Ito's, for all eyes
STYLES = ("-", "-", "--", ":")


def model(X, y=None, *, N, sets, lengthscale):
    """A GP classifier; ``sets`` holds one set of inducing points (SVGP) or two (SOLVE-GP)."""
    lengthscale = numpyro.param("lengthscale", lengthscale, constraint=dist.constraints.positive)
    scale = numpyro.param("scale", START_SCALE, constraint=dist.constraints.positive)
    sets = [numpyro.param(f"Z{i}", points) for i, points in enumerate(sets)]
    f = ogp.gp("f", scale**2 * kernels.Matern52(lengthscale), sets)
    with numpyro.plate("data", N, subsample_size=X.shape[0]):
        numpyro.sample("y", likelihoods.Bernoulli(f(X)), obs=y)


@dataclass
class Digits:
    """Pictures of 8 x 8 pixels in [0, 1], flattened, and whether the digit is odd."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array

    @classmethod
    def load(cls, seed: int) -> Digits:
        pixels, digit = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(digit))
        X = jnp.asarray(pixels[order] / 16, jnp.float32)
        y = jnp.asarray(digit[order] % 2, jnp.float32)
        return cls(X[:NUM_TRAIN], y[:NUM_TRAIN], X[NUM_TRAIN:], y[NUM_TRAIN:])


@dataclass
class Fit:
    """One method's training, in legs of some steps."""

    name: str
    data: Digits
    kwargs: dict[str, Any]
    residual: str
    num_steps: int
    seed: int
    steps: list[int] = field(default_factory=list)
    elbos: list[float] = field(default_factory=list)
    seconds_per_step: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.guide = ogp.AutoSparseGP(model, residual=self.residual)
        schedule = optax.cosine_decay_schedule(1e-2, self.num_steps)
        self.svi = SVI(model, self.guide, optax.adam(schedule), TraceMeanField_ELBO())
        # Compiled, where an uncompiled init would compile each of its operations by itself.
        self.state = jax.jit(self._init)(random.PRNGKey(self.seed))
        self._compiled: Any = None

    def _init(self, rng_key):
        return self.svi.init(rng_key, self.data.X[:1], self.data.y[:1], **self.kwargs)

    def _run(self, state, batches):
        def step(state, rows):
            return self.svi.update(state, self.data.X[rows], self.data.y[rows], **self.kwargs)

        return lax.scan(step, state, batches)

    def advance(self, batches: np.ndarray) -> None:
        if self._compiled is None:
            self._compiled = jax.jit(self._run).lower(self.state, batches).compile()
            self._evaluate = jax.jit(lambda state: -self.svi.evaluate(state, self.data.X, self.data.y, **self.kwargs))
        start = time.perf_counter()
        self.state, losses = self._compiled(self.state, batches)
        losses.block_until_ready()
        self.seconds_per_step.append((time.perf_counter() - start) / len(batches))
        self.steps.append((self.steps or [0])[-1] + len(batches))
        self.elbos.append(float(self._evaluate(self.state)))
        if not np.isfinite(self.elbos[-1]):
            raise FloatingPointError(f"{self.name}: the ELBO is {self.elbos[-1]}.")

    @property
    def params(self) -> dict[str, jax.Array]:
        return self.svi.get_params(self.state)

    @property
    def step_time(self) -> float:
        """Seconds: the fastest leg, since whatever else the machine does can only add."""
        return min(self.seconds_per_step)

    @cached_property
    def predicted(self) -> likelihoods.Bernoulli:
        """The labels of the test pictures, f integrated out exactly."""

        def predict(params, X):
            f = ogp.posterior(model, self.guide, params, self.data.X[:1], **self.kwargs)["f"]
            return f(X)

        return likelihoods.Bernoulli(jax.jit(predict)(self.params, self.data.X_test))

    def row(self) -> tuple[str, ...]:
        predicted, y = self.predicted, self.data.y_test
        v = self.params.get("f_residual_scale")
        return (
            self.name,
            f"{self.elbos[-1]:.1f}",
            f"{float(predicted.log_predictive(y).mean()):.4f}",
            f"{100 * float(((predicted.mean > 0.5) != y).mean()):.2f} %",
            f"{1e3 * self.step_time:.1f}",
            f"{float(self.params['lengthscale']):.2f}",
            f"{float(self.params['scale']):.2f}",
            "-" if v is None else f"{float(v):.3f}",
        )


HEADER = ("method", "ELBO", "test log p", "test error", "ms/step", "lengthscale", "scale of f", "v")


def starting_points(data: Digits, M: int, seed: int) -> tuple[list[Any], list[Any], jax.Array]:
    """Inducing points for one set of 2 M and two of M; where the first M come from is the same for all."""
    lengthscale = init.median_lengthscale(data.X)
    Z = init.kmeans(random.PRNGKey(seed), data.X, M)
    Z2 = init.kmeans(random.PRNGKey(seed), data.X, 2 * M)
    O = init.greedy_variance(START_SCALE**2 * kernels.Matern52(lengthscale), data.X, M, given=Z)
    return [Z2], [Z, O], lengthscale


def four_fits(data: Digits, M: int, num_steps: int, seed: int) -> list[Fit]:
    double, pair, lengthscale = starting_points(data, M, seed)
    rest = {"N": NUM_TRAIN, "lengthscale": lengthscale}

    def fit(name, sets, residual="prior"):
        return Fit(name, data, {"sets": sets, **rest}, residual, num_steps, seed)

    return [
        fit(f"SVGP ({M})", pair[:1]),
        fit(f"SOLVE-GP ({M}+{M})", pair),
        fit(f"SOLVE-GP ({M}+{M}), tight", pair, "tight"),
        fit(f"SVGP ({2 * M})", double),
    ]


def minibatches(num_steps: int, batch_size: int, seed: int) -> np.ndarray:
    """Row numbers, shape (num_steps, batch_size): shuffled epochs, one after another."""
    rng = np.random.default_rng(seed)
    epochs = -(-num_steps * batch_size // NUM_TRAIN)
    rows = np.concatenate([rng.permutation(NUM_TRAIN) for _ in range(epochs)])
    return rows[: num_steps * batch_size].reshape(num_steps, batch_size)


def train(fits: list[Fit], batches: np.ndarray, num_legs: int, progress_bar: bool) -> None:
    """All fits take turns, leg by leg, so that what disturbs the machine disturbs them alike."""
    legs = np.split(batches, num_legs)
    with tqdm(total=len(batches) * len(fits), disable=not progress_bar, unit="step", mininterval=0.5) as bar:
        for leg in legs:
            for fit in fits:
                bar.set_description(fit.name)
                fit.advance(leg)
                bar.update(len(leg))
            bar.set_postfix_str("ELBOs " + " ".join(f"{fit.elbos[-1]:.0f}" for fit in fits))


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    for i, row in enumerate(table):
        print("  ".join(c.ljust(w) if j == 0 else c.rjust(w) for j, (c, w) in enumerate(zip(row, widths, strict=True))))
        if i == 0:
            print("  ".join("-" * w for w in widths))


def machine_facts(dtype: Any) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "numpyro"))
    return f"{cores} cores, {jax.default_backend().upper()}, {versions}, {jnp.dtype(dtype).name}"


# ---- what is kept


def save_draws(path: Path, fit: Fit, seed: int, num_draws: int) -> None:
    """Write a NetCDF file that ArviZ opens: draws of the latent function at the training pictures, and what belongs to them."""
    tree = ogp.to_arviz(
        model,
        fit.guide,
        fit.params,
        fit.data.X,
        fit.data.y,
        rng_key=random.PRNGKey(seed),
        num_samples=num_draws,
        dims={"f": ["picture"], "y": ["picture"], "X": ["picture", "pixel"]},
        **fit.kwargs,
    )
    tree.to_netcdf(str(path), engine="h5netcdf")


def plot_elbos(axis: Any, fits: list[Fit], seconds: bool) -> None:
    for fit, colour, style in zip(fits, COLOURS, STYLES, strict=True):
        x = np.array(fit.steps) * (fit.step_time if seconds else 1)
        axis.plot(x, fit.elbos, style, color=colour, lw=2, label=fit.name)
    best = max(fit.elbos[-1] for fit in fits)
    worst = min(fit.elbos[-1] for fit in fits)
    axis.set_ylim(best - 6 * max(best - worst, 1.0), best + max(best - worst, 1.0))
    axis.set_xlabel("time spent in steps (s)" if seconds else "step")
    axis.set_ylabel("ELBO, all training data (nats)")
    axis.grid(alpha=0.3)


def plot_calibration(axis: Any, fit: Fit) -> None:
    """Among pictures given about the same probability of being odd: how many are."""
    p, y = np.asarray(fit.predicted.mean), np.asarray(fit.data.y_test)
    edges = np.array([0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1])
    bins = np.digitize(p, edges[1:-1])
    for b in np.unique(bins):
        n, odd = (bins == b).sum(), y[bins == b].mean()
        low, high = wilson(odd, n)
        axis.plot([p[bins == b].mean()] * 2, [low, high], color=COLOURS[2], lw=1.5)
        axis.plot(p[bins == b].mean(), odd, "o", color=COLOURS[2], ms=6)
        above = odd < 0.5
        axis.annotate(
            f"{n}",
            (p[bins == b].mean(), high if above else low),
            xytext=(0, 4 if above else -4),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=8,
        )
    axis.plot([0, 1], [0, 1], color="0.6", lw=1, zorder=0)
    axis.set(xlabel="predicted probability of odd", ylabel="fraction odd", xlim=(-0.06, 1.06), ylim=(-0.08, 1.08))
    axis.set_title(f"{fit.name}: calibration, {len(y)} test pictures", fontsize=10)
    axis.grid(alpha=0.3)


def wilson(rate: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate (Wilson)."""
    centre = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    return centre - half, centre + half


def plot_uncertain(area: Any, fit: Fit, rows: int = 3, columns: int = 6) -> None:
    p, y = np.asarray(fit.predicted.mean), np.asarray(fit.data.y_test)
    area.suptitle("Least certain test pictures: P(odd), and a box around the wrong ones", fontsize=10)
    axes = area.subplots(rows, columns).ravel()
    for axis, i in zip(axes, np.argsort(np.abs(p - 0.5)), strict=False):
        axis.imshow(np.asarray(fit.data.X_test[i]).reshape(8, 8), cmap="gray_r")
        axis.set_title(f"{p[i]:.2f}", fontsize=8, pad=2)
        axis.set(xticks=[], yticks=[])
        wrong = (p[i] > 0.5) != y[i]
        for spine in axis.spines.values():
            spine.set(visible=wrong, color=COLOURS[1], linewidth=2.5)


def save_figure(path: Path, fits: list[Fit]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 7.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1))
    left, right = top.subplots(1, 2)
    plot_elbos(left, fits, seconds=False)
    plot_elbos(right, fits, seconds=True)
    left.legend(fontsize=9, loc="lower right")
    calibration, pictures = bottom.subfigures(1, 2)
    plot_calibration(calibration.subplots(), fits[2])
    plot_uncertain(pictures, fits[2])
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps of each method")
    parser.add_argument("--num-inducing", type=int, default=64, help="M: SVGP has M and 2 M, SOLVE-GP M + M")
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--legs", type=int, default=15, help="parts of the training; the ELBO is recorded after each")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the starting points and the minibatches")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure and the NetCDF file")
    parser.add_argument("--quick", action="store_true", help="a few steps and points, to see that all of it runs")
    parser.add_argument("--no-progress-bar", action="store_true")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.num_inducing, args.legs, args.batch_size = 20, 8, 2, 50
    args.steps = max(args.steps // args.legs, 1) * args.legs
    return args


def main(argv: list[str] | None = None) -> list[Fit]:
    args = parse(argv)
    start = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    data = Digits.load(args.seed)
    print(
        f"scikit-learn's digits, odd or even: {NUM_TRAIN} to train, {len(data.y_test)} to test, {data.X.shape[1]} pixels."
    )
    facts = machine_facts(data.X.dtype)
    print(f"{args.steps} Adam steps on minibatches of {args.batch_size}; {facts}.")
    print("Starting points and compilation ...", flush=True)
    fits = four_fits(data, args.num_inducing, args.steps, args.seed)
    train(fits, minibatches(args.steps, args.batch_size, args.seed), args.legs, not args.no_progress_bar)
    print()
    print_table(HEADER, [fit.row() for fit in fits])
    print(
        "\nELBO: nats, all training data. test log p: mean log predictive density of a test label, nats. ms/step: fastest leg,"
    )
    print("without compilation. v: learned scale of the residual variance; 1 is the untightened bound.")
    save_figure(args.out / "demo.png", fits)
    save_draws(args.out / "demo.nc", fits[2], args.seed, num_draws=50 if args.quick else 500)
    print(f"\nWrote {args.out / 'demo.png'} and {args.out / 'demo.nc'} (for ArviZ: draws of {fits[2].name}).")
    print(f"{time.perf_counter() - start:.0f} s in all.")
    return fits


if __name__ == "__main__":
    main()
