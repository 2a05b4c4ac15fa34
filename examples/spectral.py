"""Fourier features in place of points: counts over time, and an additive model with features for each column.

    python examples/spectral.py [--data FILE.npz] [--num 15] [--steps 200] [--out out] [--seed 0] [--quick]

First, Poisson counts whose log rate is a GP, by default simulated; ``FILE.npz`` may hold others as arrays ``bin_centre`` and
``bin_count`` (the coal-mining disasters, say). The same number of inducing variables is spent on points, on Fourier features of an
interval wider than the data, and on Fourier features of the data's own interval with two points at its edge as an orthogonal
second set: what periodic waves cannot say of a Matern-3/2 process has rank two.

Then the progression of diabetes (scikit-learn's data) as a sum of functions of one column each.
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
from jax import lax, random
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta
from sklearn.datasets import load_diabetes

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods
from numpyro_orthgp.inducing import FourierFeatures

COLUMNS = ("bmi", "bp", "s5")


class Fit(NamedTuple):
    bound: float
    function: ogp.GPFunction  # the posterior
    offset: float = 0.0
    lengthscale: float = 1.0


# ---------------------------------------------------------------- counts over time


def load_counts(path: Path | None, seed: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Times scaled to 0..1, shape (N, 1), counts, shape (N,), and the times as they are."""
    if path is None:
        time = np.linspace(1850, 1960, 333)
        t = np.linspace(0, 1, len(time))
        count = np.random.default_rng(seed).poisson(
            0.15 + 0.7 / (1 + np.exp(25 * (t - 0.35))) + 0.35 * np.exp(-((t - 0.8) ** 2) / 0.005)
        )
    else:
        arrays = np.load(path)
        time, count = arrays["bin_centre"], arrays["bin_count"]
    X = (time - time.min()) / (time.max() - time.min())
    return jnp.asarray(X[:, None], jnp.float32), jnp.asarray(count, jnp.int32), time


def count_sets(num: int) -> dict[str, Any]:
    """Three ways to spend ``num`` inducing variables, an odd number, on times in 0..1."""
    points = jnp.linspace(0, 1, num, dtype=jnp.float32)[:, None]
    edge = jnp.asarray([[0.0], [0.05]], jnp.float32)
    return {
        "points": points,
        "Fourier": FourierFeatures((num - 1) // 2, -0.2, 1.2, dtype=jnp.float32),
        "Fourier + 2 points": [FourierFeatures((num - 3) // 2, 0.0, 1.0, dtype=jnp.float32), edge],
    }


def count_model(X, y=None, *, inducing):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.5, 0.5))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    offset = numpyro.param("offset", jnp.asarray(0.0))
    f = ogp.gp("f", scale**2 * kernels.Matern32(lengthscale), inducing)
    with numpyro.plate("bins", len(X)):
        numpyro.sample("y", likelihoods.Poisson(f(X) + offset), obs=y)


def fit_counts(X: jax.Array, y: jax.Array, inducing: Any, num_steps: int, seed: int) -> Fit:
    guide = ogp.AutoSparseGP(count_model, natural=True)
    optimizer = ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(0.05, num_steps)), 0.2, ramp_up=10)
    svi = SVI(count_model, guide, optimizer, TraceMeanField_ELBO())

    @jax.jit
    def run(X, y):
        state = svi.init(random.PRNGKey(seed), X, y, inducing=inducing)
        state, losses = lax.scan(lambda s, _: svi.update(s, X, y, inducing=inducing), state, None, length=num_steps)
        params = svi.get_params(state)
        f = ogp.posterior(count_model, guide, params, X, y, inducing=inducing)["f"]
        return -losses[-1], f, params["offset"], params["lengthscale_auto_loc"]

    bound, f, offset, lengthscale = run(X, y)
    return Fit(float(bound), f, float(offset), float(lengthscale))


# ---------------------------------------------------------------- a function of each column


def load_columns(seed: int) -> tuple[jax.Array, jax.Array]:
    """Standardized columns (N, 3) and outcomes (N,), in random order."""
    X, y = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    order = np.random.default_rng(seed).permutation(len(y))
    X, y = X[list(COLUMNS)].to_numpy()[order], y.to_numpy()[order]
    return jnp.asarray((X - X.mean(0)) / X.std(0)), jnp.asarray((y - y.mean()) / y.std())


def column_sets(X: jax.Array, seed: int) -> dict[str, Any]:
    """Features for each column, by themselves or after points; or points only."""
    margin = 6.0  # standard deviations beyond the data: the functions are smooth, and waves are periodic
    edges = [(float(x.min()) - margin, float(x.max()) + margin) for x in X.T]
    features = [FourierFeatures(4, *edge, dim=d) for d, edge in enumerate(edges)]
    points = init.kmeans(random.PRNGKey(seed), X, 27)
    return {"3 x 9 Fourier": features, "12 points, 3 x 9 Fourier": [points[:12], *features], "27 points": points}


def column_gp(X, inducing):
    with numpyro.plate("columns", X.shape[1]):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 0.5))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    kernel = sum(scale[d] ** 2 * kernels.Matern52(lengthscale[d]).on(d) for d in range(X.shape[1]))
    return ogp.CollapsedGP(kernel, X, inducing, noise, bound="titsias2009")


def column_model(X, y, *, inducing):
    numpyro.sample("y", column_gp(X, inducing), obs=y)


def fit_columns(X: jax.Array, y: jax.Array, inducing: Any, num_steps: int, seed: int) -> Fit:
    start = numpyro.infer.init_to_median()
    svi = SVI(
        column_model,
        AutoDelta(column_model, init_loc_fn=start),
        optax.adam(optax.cosine_decay_schedule(0.1, num_steps)),
        Trace_ELBO(),
    )

    @jax.jit
    def run(X, y):
        state = svi.init(random.PRNGKey(seed), X, y, inducing=inducing)
        state, _ = lax.scan(lambda s, _: svi.update(s, X, y, inducing=inducing), state, None, length=num_steps)
        point = svi.guide.median(svi.get_params(state))
        with numpyro.handlers.block(), numpyro.handlers.substitute(data=point):
            gp = column_gp(X, inducing)
        return gp.log_prob(y), gp.posterior(y)

    bound, f = run(X, y)
    return Fit(float(bound), f)


# ---------------------------------------------------------------- what comes out


def save_figure(
    path: Path, time: np.ndarray, count: np.ndarray, rates: dict[str, Fit], X: jax.Array, columns: dict[str, Fit]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    per_bin = (time[-1] - time[0]) / (len(time) - 1)
    grouped, edges = np.histogram(time, bins=37, weights=count)
    axes[0].stairs(grouped / np.diff(edges), edges, fill=True, color="0.88", label="counts")
    for (name, fit), style in zip(rates.items(), ("-", "--", ":"), strict=True):
        f = fit.function(jnp.linspace(0, 1, 400, dtype=jnp.float32)[:, None])
        mean = np.exp(np.asarray(f.mean + fit.offset))
        axes[0].plot(np.linspace(time[0], time[-1], 400), mean / per_bin, style, label=f"{name}: {fit.bound:.2f} nats")
    axes[0].set(title="Counts over time", xlabel="year", ylabel="rate per year")
    axes[0].legend(fontsize=9)
    fit = columns["12 points, 3 x 9 Fourier"]
    for d, name in enumerate(COLUMNS):
        grid = jnp.linspace(X[:, d].min(), X[:, d].max(), 100)
        f = fit.function(jnp.zeros((100, len(COLUMNS))).at[:, d].set(grid))
        mean, sd = np.asarray(f.mean), np.sqrt(np.asarray(f.variance))
        line = axes[1].plot(grid, mean, label=name)[0]
        axes[1].fill_between(grid, mean - sd, mean + sd, color=line.get_color(), alpha=0.15, lw=0)
    axes[1].set(
        title="Diabetes: one column moves, the others at their mean",
        xlabel="standard deviations",
        ylabel="progression (sd)",
    )
    axes[1].legend(fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="npz file with arrays bin_centre (N,) and bin_count (N,)")
    parser.add_argument("--num", type=int, default=15, help="inducing variables of the counts' rate, an odd number")
    parser.add_argument("--steps", type=int, default=200, help="optimization steps of each fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    if args.num < 5 or args.num % 2 == 0:
        parser.error(f"--num must be odd and at least 5; got {args.num}")
    steps = 20 if args.quick else args.steps

    X, y, time = load_counts(args.data, args.seed)
    years = time[-1] - time[0]
    print(f"{len(y)} bins, {int(y.sum())} events, {args.num} inducing variables.\n")
    print(f"{'inducing variables':25s}  {'ELBO':>9s}  {'lengthscale':>11s}")
    rates = {}
    for name, inducing in count_sets(args.num).items():
        rates[name] = fit_counts(X, y, inducing, steps, args.seed)
        print(f"{name:25s}  {rates[name].bound:9.3f}  {years * rates[name].lengthscale:8.1f} yr")

    numpyro.enable_x64()
    X2, y2 = load_columns(args.seed)
    train, test = slice(0, 300), slice(300, None)
    print(f"\nDiabetes, {len(COLUMNS)} columns, 300 rows to train and {len(y2) - 300} to test.\n")
    print(f"{'inducing variables':25s}  {'bound':>9s}  {'test RMSE':>9s}")
    columns = {}
    for name, inducing in column_sets(X2[train], args.seed).items():
        columns[name] = fit_columns(X2[train], y2[train], inducing, steps, args.seed)
        error = jnp.sqrt(jnp.mean((columns[name].function(X2[test]).mean - y2[test]) ** 2))
        print(f"{name:25s}  {columns[name].bound:9.3f}  {error:9.4f}")
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "spectral.png", time, np.asarray(y), rates, X2, columns)
    print(f"\nSets are independent under q, which several sets pay for. Wrote {args.out / 'spectral.png'}.")


if __name__ == "__main__":
    main()
