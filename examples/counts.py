"""Counts with exposure: how often coal mines exploded.

    python examples/counts.py [--steps 400] [--out out] [--seed 0] [--quick]

The 191 explosions in British coal mines that killed ten or more, from 15 March 1851 to 22 March 1962 (Jarrett 1979), as if
reported for periods of one to five years. A count of four in one year is not a count of four in five years: ``exposure`` is the
length of the period, and the function is the rate per year. Four likelihoods on the same GP, each fitted to four periods out of
five and scored on the fifth; the last row says what forgetting the exposure does.
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
from numpyro_orthgp import kernels, likelihoods

FIRST_YEAR = 1851
COUNTS = np.array([  # by calendar year
    4, 5, 4, 1, 0, 4, 3, 4, 0, 6, 3, 3, 4, 0, 2, 6, 3, 3, 5, 4, 5, 3, 1, 4, 4, 1, 5, 5, 3, 4, 2, 5, 2, 2, 3, 4, 2, 1, 3, 2,
    2, 1, 1, 1, 1, 3, 0, 0, 1, 0, 1, 1, 0, 0, 3, 1, 0, 3, 2, 2, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 2, 1, 0, 0, 0, 1, 1, 0, 2,
    3, 3, 1, 1, 2, 1, 1, 1, 1, 2, 3, 3, 0, 0, 0, 1, 4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 1,
])  # fmt: skip
positive = dist.constraints.positive


def poisson(f, exposure):
    return likelihoods.Poisson(f, exposure)


def poisson_softplus(f, exposure):
    return likelihoods.Poisson(f, exposure, link="softplus")


def negative_binomial(f, exposure):
    concentration = numpyro.param("concentration", jnp.asarray(5.0), constraint=positive)
    return likelihoods.NegativeBinomial(f, concentration, exposure)


def zero_inflated(f, exposure):
    gate = numpyro.param("gate", jnp.asarray(0.05), constraint=dist.constraints.unit_interval)
    return likelihoods.ZeroInflated(likelihoods.Poisson(f, exposure), gate)


LIKELIHOODS = {
    "Poisson, exp": poisson,
    "Poisson, softplus": poisson_softplus,
    "NegativeBinomial": negative_binomial,
    "ZeroInflated Poisson": zero_inflated,
}


def model(X, exposure, y=None, *, likelihood, Z):
    """Log rate: a constant and a smooth function of time, in units of 50 years."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.5))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    offset = numpyro.param("offset", jnp.asarray(0.5))
    f = ogp.gp("f", scale**2 * kernels.Matern52(lengthscale), Z)
    with numpyro.plate("periods", len(X)):
        return numpyro.sample("y", likelihood(f(X) + offset, exposure), obs=y)


class Periods(NamedTuple):
    """Middle of each period (in units of 50 years from 1906), its length in years, and the explosions in it."""

    X: jax.Array
    exposure: jax.Array
    y: jax.Array

    def rows(self, which: Any) -> Periods:
        return Periods(*(a[which] for a in self))


def load(seed: int) -> Periods:
    seen = np.ones(len(COUNTS))
    seen[0], seen[-1] = 292 / 365, 81 / 365  # from 15 March 1851; to 22 March 1962
    ends = np.cumsum(np.random.default_rng(seed).integers(1, 6, len(COUNTS)))
    starts = np.append(0, ends[ends < len(COUNTS)])
    exposure, y = np.add.reduceat(seen, starts), np.add.reduceat(COUNTS, starts)
    middle = FIRST_YEAR + 73 / 365 + np.cumsum(exposure) - exposure / 2
    return Periods(*(jnp.asarray(a, jnp.float32) for a in ((middle[:, None] - 1906) / 50, exposure, y)))


class Fit(NamedTuple):
    elbo: float
    params: dict[str, jax.Array]
    predict: Any  # the likelihood at other years


def fit(train: Periods, likelihood: Any, num_steps: int, seed: int) -> Fit:
    Z = jnp.linspace(-1.1, 1.1, 15)[:, None]
    kwargs = {"likelihood": likelihood, "Z": Z}
    guide = ogp.AutoSparseGP(model, residual="tight", natural=True)
    optimizer = ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(0.05, num_steps)), 0.3, ramp_up=10)
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())

    @jax.jit
    def run(train):
        state = svi.init(random.PRNGKey(seed), *train, **kwargs)
        state, losses = lax.scan(lambda s, _: svi.update(s, *train, **kwargs), state, None, length=num_steps)
        return state, -losses[-1]

    state, elbo = run(train)
    params = svi.get_params(state)
    f = jax.jit(lambda p: ogp.posterior(model, guide, p, *train, **kwargs)["f"])(params)

    def predict(data: Periods) -> Any:
        with numpyro.handlers.block(), numpyro.handlers.substitute(data=params):
            return likelihood(f(data.X) + params["offset"], data.exposure)

    return Fit(float(elbo), params, predict)


def save_figure(path: Path, data: Periods, fits: dict[str, Fit]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    grid = jnp.linspace(-1.1, 1.13, 300)
    every = Periods(grid[:, None], jnp.ones(300), jnp.zeros(300))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, name in zip(axes, ("Poisson, exp", "Poisson, no exposure"), strict=True):
        # The rate is the exponential of a Gaussian: its quantiles are those of f, mapped.
        f = fits[name].predict(every).marginals
        low, middle, high = (np.exp(f.mean + z * jnp.sqrt(f.variance)) for z in (-1.645, 0.0, 1.645))
        axis.fill_between(50 * grid + 1906, low, high, color="#0072B2", alpha=0.25, lw=0, label="90 % of the posterior")
        axis.plot(50 * grid + 1906, middle, color="#0072B2", lw=2, label="median rate")
        middles, half = 50 * np.asarray(data.X)[:, 0] + 1906, np.asarray(data.exposure) / 2
        rate = np.asarray(data.y / data.exposure)
        axis.hlines(rate, middles - half, middles + half, color="0.35", lw=2, label="explosions / length of the period")
        axis.set(title=name, xlabel="year")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("explosions per year")
    axes[0].legend(fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="natural-gradient and Adam steps of each fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    steps = 20 if args.quick else args.steps

    fits: dict[str, Fit] = {}
    data = load(args.seed)
    held_out = np.arange(len(data.y)) % 5 == 2
    train, test = data.rows(~held_out), data.rows(held_out)
    print(f"{int(data.y.sum())} explosions in {len(data.y)} periods; {int(held_out.sum())} periods held out.\n")
    print(f"{'likelihood':20s}  {'ELBO':>6s}  {'log p':>6s}  years  others")
    for name, likelihood in [*LIKELIHOODS.items(), ("Poisson, no exposure", poisson)]:
        known = [d._replace(exposure=jnp.ones_like(d.exposure)) if "no exposure" in name else d for d in (train, test)]
        result = fits[name] = fit(known[0], likelihood, steps, args.seed)
        score = float(result.predict(known[1]).log_predictive(test.y).mean())
        years = 50 * float(result.params["lengthscale_auto_loc"])
        others = [f"{k} {float(result.params[k]):.2f}" for k in ("concentration", "gate") if k in result.params]
        print(f"{name:20s}  {result.elbo:6.2f}  {score:6.3f}  {years:5.0f}  {', '.join(others)}".rstrip())
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "counts.png", data, fits)
    print("\nELBO: nats, with the log prior of hyperparameters.\nlog p: mean log predictive mass of a held-out count.")
    print("years: the lengthscale. others: parameters of the likelihood.")
    print(f"Wrote {args.out / 'counts.png'}.")


if __name__ == "__main__":
    main()
