"""Counts of the areas of a map: a rate that varies within areas, from one number for each of them.

    python examples/areal_counts.py [--data FILE.npz] [--steps 300] [--num-inducing 80] [--out out] [--seed 0] [--quick]

A made map, so that the truth is known: 60 districts, small ones in the city and wide ones around it, the people who live at each
place, and cases of a disease. Four likelihoods of the same gp are fitted: the sum of rates over the places of a district, its
bound by marginals, the average of log rates, and the log rate in the middle of the district. Every fifth district is left out, and
its count is predicted. FILE.npz may hold counts of your own: centres X (N, 2) of areas, y (N,) and exposure ``births`` or
``people`` (N,), spread evenly over what is nearest to each centre.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
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
from numpyro_orthgp import init, kernels, likelihoods

AREAS, SIDE, WITHHELD = 60, 32, 5  # districts, places along each side of the map, every which district is left out
LEVEL = -4.0  # log of a case per person


class Map(NamedTuple):
    places: np.ndarray  # (n, 2)
    people: np.ndarray  # at each place (n,)
    area: np.ndarray  # of each place (n,)
    counts: np.ndarray  # of each area (B,)
    truth: np.ndarray | None  # log rate at each place (n,)

    @classmethod
    def simulate(cls, seed: int) -> Map:
        rng = np.random.default_rng(seed)
        places = np.stack(np.meshgrid(*[(np.arange(SIDE) + 0.5) / SIDE] * 2, indexing="ij"), -1).reshape(-1, 2)
        city = np.exp(-0.5 * ((places - [0.4, 0.6]) ** 2).sum(-1) / 0.16**2)
        centres = places[rng.choice(len(places), AREAS, replace=False, p=(city + 0.05) / (city + 0.05).sum())]
        people = rng.gamma(4.0, 1.0, len(places)) * (3 + 40 * city)
        x, y = places.T
        valley = 2.5 * np.exp(-0.5 * ((y - 0.25 - 0.4 * x) / 0.06) ** 2)
        truth = LEVEL + valley + 0.7 * np.sin(6 * x + 1) * np.cos(5 * y)
        area = nearest(places, centres)
        rates = np.bincount(area, people * np.exp(truth), minlength=AREAS)
        return cls(places, people, area, rng.poisson(rates), truth)

    @classmethod
    def read(cls, path: Path) -> Map:
        """Areas of which only the centres are known: what is nearest to each."""
        with np.load(path) as file:
            centres, counts = file["X"], file["y"]
            exposure = file["births" if "births" in file else "people"]
        low, high = centres.min(0), centres.max(0)
        axes = [np.linspace(a, b, SIDE) for a, b in zip(low, high, strict=True)]
        places = np.concatenate([centres, np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)])
        area = nearest(places, centres)
        return cls(places, (exposure / np.bincount(area))[area], area, counts, None)

    def of_areas(self, chosen: np.ndarray) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray]:
        """Nodes (B, Q, 2), the people at each (B, Q), zero where an area has fewer nodes, and counts (B,)."""
        rows = [np.flatnonzero(self.area == b) for b in chosen]
        Q = max(map(len, rows))
        filled = np.stack([np.resize(r, Q) for r in rows])
        there = np.arange(Q) < np.array([len(r) for r in rows])[:, None]
        arrays = self.places[filled], self.people[filled] * there, self.counts[chosen]
        return tuple(jnp.asarray(a, jnp.float32) for a in arrays)  # type: ignore[return-value]


def nearest(places: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return ((places[:, None] - centres) ** 2).sum(-1).argmin(1)


def of_sum(f: Any, level: Any, nodes: Any, people: Any) -> Any:
    return likelihoods.PoissonOfSum(f(nodes.reshape(-1, 2)) + level, people)


def of_marginals(f: Any, level: Any, nodes: Any, people: Any) -> Any:
    return likelihoods.PoissonOfSum(f(nodes.reshape(-1, 2)) + level, people, by_marginals=True)


def of_average(f: Any, level: Any, nodes: Any, people: Any) -> Any:
    total = people.sum(1)
    return likelihoods.Poisson(f(ogp.Average(nodes, people / total[:, None])) + level, exposure=total)


def of_centre(f: Any, level: Any, nodes: Any, people: Any) -> Any:
    total = people.sum(1)
    centres = (nodes * people[..., None]).sum(1) / total[:, None]
    return likelihoods.Poisson(f(centres) + level, exposure=total)


LIKELIHOODS = {"sum": of_sum, "sum, by marginals": of_marginals, "average of f": of_average, "centre": of_centre}


def model(nodes, people, counts=None, *, Z, likelihood):
    positive = dist.constraints.softplus_positive
    scale = numpyro.param("scale", jnp.asarray(1.0), constraint=positive)
    length = numpyro.param("length", 0.25 * jnp.ptp(Z, 0), constraint=positive)
    level = numpyro.param("level", jnp.asarray(LEVEL))
    f = ogp.gp("f", scale**2 * kernels.RBF(length), Z)
    with numpyro.plate("areas", len(nodes)):
        numpyro.sample("y", likelihood(f, level, nodes, people), obs=counts)


def fit(likelihood: Callable[..., Any], data: Any, Z: Any, num_steps: int) -> tuple[dict[str, Any], Any]:
    """The parameters and the function."""
    of_areas = partial(model, Z=Z, likelihood=likelihood)
    guide = ogp.AutoSparseGP(of_areas, natural=True)
    adam = optax.adam(optax.cosine_decay_schedule(0.03, num_steps))
    svi = SVI(of_areas, guide, ogp.natural_gradient(adam, 0.1, ramp_up=20), TraceMeanField_ELBO())

    @jax.jit
    def run(data):
        state = svi.init(random.PRNGKey(0), *data)
        state, _ = lax.scan(lambda s, _: svi.update(s, *data), state, None, length=num_steps)
        return svi.get_params(state)

    params = run(data)
    return params, ogp.posterior(of_areas, guide, params, *data)["f"]


def row(name: str, f: Any, level: Any, seen: Map, held: Any) -> str:
    """Counts of districts that were left out, and where it is known the log rate at all places."""
    nodes, people, counts = held
    predicted = of_sum(f, level, nodes, people)
    score = predicted.log_predictive(counts).mean()
    text = f"{name:18s} {predicted.mean.sum():10.0f} {counts.sum():8.0f} {score:10.2f}"
    if seen.truth is None:
        return text
    m, w = f(jnp.asarray(seen.places, jnp.float32)) + level, seen.people / seen.people.sum()
    error, sd = np.asarray(m.mean) - seen.truth, np.sqrt(np.asarray(m.variance))
    rmse, inside = np.sqrt(w @ error**2), 100 * np.sum(w * (np.abs(error) < 1.96 * sd))
    return f"{text} {rmse:10.3f} {inside:8.1f} %"


def save_figure(path: Path, seen: Map, fits: dict[str, tuple[dict[str, Any], Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def log10(values: Any) -> np.ndarray:
        return np.asarray(values) / np.log(10)

    raw = np.log10(np.maximum(seen.counts, 0.5) / np.bincount(seen.area, seen.people))
    raw[::WITHHELD] = np.nan
    moments = {}
    for name, (params, f) in fits.items():
        m = f(jnp.asarray(seen.places, jnp.float32)) + params["level"]
        moments[name] = log10(m.mean), log10(m.variance**0.5)
    whole = "people" if seen.truth is None else "truth"
    known = np.log10(seen.people) if seen.truth is None else log10(seen.truth)
    panels = {
        "cases per person, by area; grey: left out": raw[seen.area],
        "rate by the sum": moments["sum"][0],
        whole: known,
        "rate by the average of f": moments["average of f"][0],
        "sd by the sum": moments["sum"][1],
        "sd by the bound of marginals": moments["sum, by marginals"][1],
    }
    rates = raw[~np.isnan(raw)] if seen.truth is None else known
    limits = {"vmin": rates.min(), "vmax": rates.max(), "cmap": "viridis"}
    spread = {"vmin": 0.0, "vmax": max(m[1].max() for m in moments.values()), "cmap": "magma"}
    figure, axes = plt.subplots(2, 3, figsize=(10, 6.4), layout="constrained")
    images, low, high = [], seen.places.min(0), seen.places.max(0)
    for ax, (title, values) in zip(axes.flat, panels.items(), strict=True):
        style = spread if title.startswith("sd") else {} if title == "people" else limits
        ax.set_facecolor("0.85")
        images.append(ax.scatter(*seen.places.T, c=values, marker="s", linewidths=0, s=52, **style))
        ax.set_title(title, fontsize="medium")
        ax.set(xticks=[], yticks=[], xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    figure.colorbar(images[1], ax=axes[0, :], label="log10 of the rate", pad=0.01)
    figure.colorbar(images[4], ax=axes[1, :], label="sd of log10", pad=0.01)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="an npz file of centres X, counts y and exposure; else a map is made")
    parser.add_argument("--steps", type=int, default=300, help="natural-gradient and Adam steps of each fit")
    parser.add_argument("--num-inducing", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    steps, M = (20, 20) if args.quick else (args.steps, args.num_inducing)

    seen = Map.read(args.data) if args.data else Map.simulate(args.seed)
    areas = np.arange(len(seen.counts))
    data, held = (seen.of_areas(chosen) for chosen in (areas[areas % WITHHELD > 0], areas[areas % WITHHELD == 0]))
    Z = init.kmeans(random.PRNGKey(args.seed), jnp.asarray(seen.places, jnp.float32), M)
    print(f"{len(data[0])} areas of up to {data[0].shape[1]} places, {len(held[0])} areas left out.\n")
    known = "" if seen.truth is None else f" {'error':>10s} {'in 95 %':>10s}"
    print(f"{'y is of the':18s} {'predicted':>10s} {'counted':>8s} {'nats':>10s}{known}")
    fits = {}
    for name, likelihood in LIKELIHOODS.items():
        params, f = fits[name] = fit(likelihood, data, Z, steps)
        print(row(name, f, params["level"], seen, held))
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "areal_counts.png", seen, fits)
    print(f"\nWrote {args.out / 'areal_counts.png'}.")


if __name__ == "__main__":
    main()
