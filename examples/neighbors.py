"""What too few inducing points leave out is still in the data: the bound in groups of near rows, predictions with neighbours.

    python examples/neighbors.py [--steps 1500] [--out out] [--seed 0] [--quick]

A function of two columns with more detail than 40 inducing points can hold, observed at 2000 places. The collapsed bound is trained
for single rows (Titsias 2025) and for groups of 16 near rows (Bui and Titsias 2025), and so is the PIC objective (Snelson and
Ghahramani 2007). Each fit predicts 1000 new places twice: by its inducing points alone, and with the outputs of the 32 nearest
rows. The picture is a slice of the function. Full-batch Adam in float64.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI, Trace_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods

NOISE, SLICE = 0.2, 0.5


def truth(X: np.ndarray) -> np.ndarray:
    a, b = X.T
    return np.sin(14 * a) * np.cos(5 * b) + 0.7 * np.sin(31 * a * b) + 0.5 * a


class Data(NamedTuple):
    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def make_data(seed: int, num: int, num_test: int) -> Data:
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 1, (num + num_test, 2))
    y = truth(X) + NOISE * rng.normal(size=len(X))
    return Data(X[:num], y[:num], X[num:], y[num:])


def process(params: dict[str, Any], X: Any, bound: str, group_size: int | None) -> ogp.CollapsedGP:
    kernel = params["scale"] ** 2 * kernels.Matern32(params["lengthscale"])
    return ogp.CollapsedGP(kernel, X, params["Z"], params["noise"], bound=bound, group_size=group_size)


def model(X, y, Z, bound, group_size):
    def positive(name, value):
        return numpyro.param(name, value, constraint=dist.constraints.softplus_positive)

    params = {"scale": positive("scale", 1.0), "noise": positive("noise", 0.3), "Z": numpyro.param("Z", Z)}
    params["lengthscale"] = positive("lengthscale", 0.3 * jnp.ones(2))
    numpyro.sample("y", process(params, X, bound, group_size), obs=y)


def fit(data: Data, Z: jax.Array, bound: str, group_size: int | None, num_steps: int) -> tuple[float, dict, Any]:
    """The bound per row, parameters, and the function given the data."""
    order = np.arange(len(data.y)) if group_size is None else init.groups(data.X, group_size)  # near rows side by side
    X, y = jnp.asarray(data.X[order]), jnp.asarray(data.y[order])
    adam = optax.adam(optax.cosine_decay_schedule(0.03, num_steps))
    svi = SVI(model, lambda *args: None, adam, Trace_ELBO())
    result = svi.run(random.PRNGKey(0), num_steps, X, y, Z, bound, group_size, progress_bar=False)
    return -float(result.losses[-1]) / len(y), result.params, process(result.params, X, bound, group_size).posterior(y)


def predictions(data: Data, params: dict, f: Any) -> dict[str, Any]:
    near = ogp.with_neighbors(f, data.X, data.y, params["noise"], num_neighbors=32)
    return {"points": f, "near": near}


def scores(data: Data, params: dict, f: Any) -> tuple[float, float]:
    """Mean log density and RMSE of the test outputs."""
    predicted = likelihoods.Gaussian(f(data.X_test), params["noise"])
    error = jnp.sqrt(jnp.mean((predicted.mean - data.y_test) ** 2))
    return float(predicted.log_predictive(data.y_test).mean()), float(error)


FITS = {
    "single rows": ("titsias2025", None),
    "groups of 16": ("titsias2025", 16),
    "PIC, groups of 16": ("fitc", 16),
}


def draw(found: dict[str, tuple[dict, Any]], data: Data, path: Path) -> None:
    """The function along a line, by the points and with neighbours, of the first and of the last fit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    line = np.column_stack([np.linspace(0, 1, 400), np.full(400, SLICE)])
    close = np.abs(data.X[:, 1] - SLICE) < 0.015
    figure, axes = plt.subplots(2, 2, figsize=(10, 5.4), sharex=True, sharey=True, layout="constrained")
    titles = {"points": "by the inducing points", "near": "with the 32 nearest rows"}
    for row, name in zip(axes, (next(iter(found)), list(found)[-1]), strict=True):
        params, f = found[name]
        for ax, (how, g) in zip(row, predictions(data, params, f).items(), strict=True):
            m = g(line)
            mean, sd = np.asarray(m.mean), np.sqrt(np.asarray(m.variance))
            ax.fill_between(line[:, 0], mean - 2 * sd, mean + 2 * sd, color="#0072B2", alpha=0.25, linewidth=0)
            ax.plot(line[:, 0], mean, color="#0072B2", linewidth=1.8, label="mean of f, ± 2 sd")
            ax.plot(line[:, 0], truth(line), color="black", linewidth=1, linestyle="--", label="truth")
            ax.plot(
                data.X[close, 0], data.y[close], ".", color="grey", markersize=4, label="rows within 0.015 of the slice"
            )
            ax.set_title(f"{name}, {titles[how]}", fontsize="medium")
            ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("first column")
    axes[0, 0].legend(frameon=False, fontsize="small", loc="lower left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few rows and steps: does it run?")
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    sizes, num_steps = ((300, 100), min(args.steps, 100)) if args.quick else ((2000, 1000), args.steps)
    data = make_data(args.seed, *sizes)
    Z = init.kmeans(random.PRNGKey(args.seed), jnp.asarray(data.X), 40)
    print(f"{len(data.y)} rows, 40 inducing points, {num_steps} steps; the noise is {NOISE}")
    print(
        f"{'trained in':18s}{'objective':>11s}{'noise':>9s}{'log density':>13s}{'+ near':>9s}{'RMSE':>9s}{'+ near':>9s}"
    )
    found = {}
    for name, (bound, group_size) in FITS.items():
        value, params, f = fit(data, Z, bound, group_size, num_steps)
        found[name] = params, f
        (density, error), near = (scores(data, params, g) for g in predictions(data, params, f).values())
        row = (f"{value:11.3f}{params['noise']:9.3f}", f"{density:13.3f}{near[0]:9.3f}", f"{error:9.3f}{near[1]:9.3f}")
        print(f"{name:18s}" + "".join(row), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    draw(found, data, args.out / "neighbors.png")
    print(f"wrote {args.out / 'neighbors.png'}")


if __name__ == "__main__":
    main()
