"""Trend, season and days of the week of a time series: the posterior of each term of a sum.

    python examples/seasons.py [--steps 600] [--num-inducing 100] [--out out] [--seed 0] [--quick]

A made series, so that the truth of each term is known: the logarithm of a museum's daily visitors over three years, one week in ten
missing. One gp whose kernel is a sum of three is fitted, and its terms are asked for. Beside it three gps are added, whose guide
takes them for independent of each other given the data, which they are not: see the standard deviations of the terms.
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
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods, plots

YEARS, WEEK, NOISE = 3, 7 / 365.25, 0.15
SOME = 25  # every so many-th day, which is every weekday in turn
TERMS = ("trend", "season", "week")


class Series(NamedTuple):
    X: np.ndarray  # days that were open, in years (N, 1)
    y: np.ndarray  # log visitors, less a constant (N,)
    days: np.ndarray  # all days (T, 1)
    truth: dict[str, np.ndarray]  # the terms on all days (T,)

    @classmethod
    def simulate(cls, seed: int) -> Series:
        rng = np.random.default_rng(seed)
        number = np.arange(int(365.25 * YEARS))
        t = number / 365.25
        of_weekday = np.array([-0.6, -0.25, -0.2, -0.1, 0.05, 0.55, 0.55])
        truth = {
            "trend": 0.35 * t - 0.6 + 0.25 * np.sin(1.7 * t + 0.5),
            "season": 0.5 * np.cos(2 * np.pi * (t - 0.55)) + 0.15 * np.sin(4 * np.pi * t),
            "week": of_weekday[number % 7],
        }
        y = sum(truth.values()) + NOISE * rng.normal(size=len(t))
        seen = rng.uniform(size=len(t) // 7 + 1)[number // 7] > 0.1
        return cls(t[seen, None].astype(np.float32), y[seen].astype(np.float32), t[:, None].astype(np.float32), truth)


def three_kernels():
    scale = numpyro.param("scale", jnp.ones(3), constraint=dist.constraints.softplus_positive)
    length = numpyro.param("length", jnp.array([1.0, 1.0, 1.0]), constraint=dist.constraints.softplus_positive)
    trend = scale[0] ** 2 * kernels.RBF(length[0])
    season = scale[1] ** 2 * kernels.Periodic(length[1], 1.0)
    week = scale[2] ** 2 * kernels.Periodic(length[2], WEEK)
    return trend, season, week


def model(X, y=None, *, Z):
    trend, season, week = three_kernels()
    kernel = trend.named("trend") + season.named("season") + week.named("week")
    f = ogp.gp("f", kernel, Z)
    noise = numpyro.param("noise", jnp.asarray(0.3), constraint=dist.constraints.softplus_positive)
    with numpyro.plate("days", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def three_gps(X, y=None, *, Z):
    fs = [ogp.gp(name, kernel, Z[name]) for name, kernel in zip(TERMS, three_kernels(), strict=True)]
    total = (ogp.stack([f(X) for f in fs]) @ jnp.ones((3, 1)))[..., 0]
    noise = numpyro.param("noise", jnp.asarray(0.3), constraint=dist.constraints.softplus_positive)
    with numpyro.plate("days", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(total, noise), obs=y)


def fit(model: Any, series: Series, Z: Any, num_steps: int) -> tuple[float, dict[str, Any], Any]:
    """The bound, the parameters and the functions."""
    guide = ogp.AutoSparseGP(model, natural=True)
    optimizer = ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(0.05, num_steps)), 0.3, ramp_up=10)
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())

    @jax.jit
    def run(X, y):
        state = svi.init(random.PRNGKey(0), X, y, Z=Z)
        state, losses = lax.scan(lambda s, _: svi.update(s, X, y, Z=Z), state, None, length=num_steps)
        return svi.get_params(state), -losses[-1]

    data = jnp.asarray(series.X), jnp.asarray(series.y)
    params, elbo = run(*data)
    return float(elbo), params, ogp.posterior(model, guide, params, *data, Z=Z)


def row(name: str, method: str, f: Any, series: Series, truth: np.ndarray) -> str:
    """How well a term is known: as it is, and less its average over some days, which no other term can take."""
    days, some = jnp.asarray(series.days), jnp.asarray(series.days[::SOME])
    whole, m = f(days), f(ogp.centred(days, some))
    mean, sd = np.asarray(m.mean), np.sqrt(np.asarray(m.variance))
    error = mean - (truth - truth[::SOME].mean())
    inside = 100 * np.mean(np.abs(error) < 1.96 * sd)
    spread = np.sqrt(np.asarray(whole.variance)).mean()
    return f"{name:8s} {method:10s} {spread:12.3f} {sd.mean():12.3f} {np.sqrt(np.mean(error**2)):9.3f} {inside:8.1f} %"


def save_figure(path: Path, series: Series, f: ogp.GPFunction) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 2, figsize=(11, 7), sharex="col", width_ratios=[2.2, 1], layout="constrained")
    for column, limits in enumerate([(0.0, float(YEARS)), (0.5, 0.5 + 5 * WEEK)]):
        grid = np.linspace(*limits, 1500)
        plots.terms(f, grid, data=(series.X, series.y), over=series.days[::SOME], names=["years"], axes=axes[:, column])
        shown = (series.days[:, 0] >= limits[0]) & (series.days[:, 0] <= limits[1])
        for ax, name in zip(axes[:, column], TERMS, strict=False):
            truth = series.truth[name] - series.truth[name][::SOME].mean()
            style = {"ls": "", "marker": "."} if name == "week" else {"ls": "--", "lw": 1}
            if column or name != "week":  # three years of weeks are a blot
                ax.plot(series.days[shown, 0], truth[shown], color="#D55E00", label="truth", **style)
        if column:
            for ax in axes[:, 1]:
                ax.set_ylabel("")
    axes[0, 0].legend(fontsize="small", frameon=False)
    axes[0, 1].set_title("five weeks", fontsize="medium")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="natural-gradient and Adam steps of each fit")
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    steps, M = (20, 40) if args.quick else (args.steps, args.num_inducing)

    series = Series.simulate(args.seed)
    rows = np.random.default_rng(args.seed).choice(len(series.X), M, replace=False)
    apart = {
        "trend": jnp.linspace(0.0, YEARS, 20),
        "season": jnp.linspace(0.0, 1.0, 21)[:-1],
        "week": WEEK * jnp.arange(7) / 7,
    }
    elbo, params, fs = fit(model, series, jnp.asarray(series.X[rows]), steps)
    elbo_apart, _, gs = fit(three_gps, series, {name: Z[:, None] for name, Z in apart.items()}, steps)
    f, days = fs["f"], jnp.asarray(series.days)
    print(f"{len(series.y)} days of {len(series.days)}. ELBO of one gp {elbo:.1f}, of three added {elbo_apart:.1f}.\n")
    print(f"{'term':8s} {'from':10s} {'sd':>12s} {'sd, centred':>12s} {'error':>9s} {'in 95 %':>10s}")
    for name in TERMS:
        print(row(name, "one gp", f.term(name), series, series.truth[name]))
        print(row("", "its own gp", gs[name], series, series.truth[name]))
    shares = ogp.variance_shares(f, days)
    print(
        "\nShares of variance: "
        + ", ".join(f"{name} {100 * float(share):.0f} %" for name, share in shares.items())
        + "."
    )
    print(f"Noise {float(params['noise']):.3f}, in truth {NOISE}.")
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "seasons.png", series, f)
    print(f"Wrote {args.out / 'seasons.png'}.")


if __name__ == "__main__":
    main()
