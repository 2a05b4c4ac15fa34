"""Hierarchical models with a GP: scales and effects by four guides, beside NUTS.

Five models: counts of 100 counties in 12 regions (``--data nc_sids.npz``: level, slope, regions, a GP over the map), and four
on data made here: intercepts of groups, centred; effects of subjects on answers of yes or no, non-centred; intercepts and
slopes of groups, centred; counts with two crossed effects, non-centred. For each guide it prints the loss, and means
(standard deviations) of hyperparameters.

    points          every site a point, AutoDelta
    default         points, and a Gaussian for each random effect
    normal, random  AutoNormal as NumPyro starts it, at random within (-2, 2)
    normal          AutoNormal as AutoSparseGP starts it, at prior medians

Example::

    python benchmarks/hierarchical.py --data nc_sids.npz --nuts 500
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO, init_to_median
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods

GUIDES = {
    "points": {"hyper": AutoDelta},
    "default": {},
    "normal, random": {"hyper": lambda model: AutoNormal(model)},
    "normal": {"hyper": AutoNormal},
}


def function(name_of_kernel, Z, prior_scale=1.0):
    scale = numpyro.sample("scale", dist.HalfNormal(prior_scale))
    lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(3.0, 3.0))
    return ogp.gp("f", scale**2 * getattr(kernels, name_of_kernel)(lengthscale), Z)


def counties(X, share, region, births, y, Z):
    level = numpyro.sample("level", dist.Normal(-6.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(0.5))
    with numpyro.plate("regions", 12):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    f = function("Matern32", Z, 0.5)
    with numpyro.plate("data", len(X)):
        log_rate = f(X) + level + slope * share + spread * effect[region]
        numpyro.sample("y", likelihoods.Poisson(log_rate, births), obs=y)


def intercepts(X, group, y, Z):
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 15):
        effect = numpyro.sample("effect", dist.Normal(level, spread))
    f = function("Matern52", Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X) + effect[group], noise), obs=y)


def subjects(X, subject, y, Z):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("subjects", 30):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    f = function("Matern52", Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Bernoulli(f(X) + level + spread * effect[subject]), obs=y)


def slopes(X, time, group, y, Z):
    level = numpyro.sample("level", dist.Normal(0.0, 3.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    spread_slope = numpyro.sample("spread_slope", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 20):
        a = numpyro.sample("a", dist.Normal(level, spread))
        b = numpyro.sample("b", dist.Normal(slope, spread_slope))
    f = function("Matern52", Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X) + a[group] + b[group] * time, noise), obs=y)


def crossed(X, shop, item, y, Z):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    spread_shop = numpyro.sample("spread_shop", dist.HalfNormal(1.0))
    spread_item = numpyro.sample("spread_item", dist.HalfNormal(1.0))
    concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.0))
    with numpyro.plate("shops", 12):
        a = numpyro.sample("shop", dist.Normal(0.0, 1.0))
    with numpyro.plate("items", 10):
        b = numpyro.sample("item", dist.Normal(0.0, 1.0))
    f = function("Matern52", Z)
    with numpyro.plate("data", len(X)):
        log_mean = f(X) + level + spread_shop * a[shop] + spread_item * b[item]
        numpyro.sample("y", likelihoods.NegativeBinomial(log_mean, concentration), obs=y)


def problems(path):
    """Each model with its arguments; of made-up data the truth is in the code."""
    found = {}
    if path is not None:
        data = np.load(path)
        X, share = ((a - a.mean(0)) / a.std(0) for a in (data["X"].astype(float), data["nonwhite"].astype(float)))
        region = data["region"] - data["region"].min()
        Z = init.kmeans(random.PRNGKey(0), jnp.asarray(X), 30)
        found["counties"] = counties, (X, share, region, data["births"].astype(float), data["y"].astype(float), Z)
    line = jnp.linspace(0.0, 6.0, 15)[:, None]

    rng = np.random.default_rng(0)
    group, X = rng.integers(0, 15, 150), rng.uniform(0, 6, (150, 1))
    y = 2 + 0.7 * rng.normal(size=15)[group] + 0.8 * np.sin(1.5 * X[:, 0]) + 0.4 * rng.normal(size=150)
    found["intercepts"] = intercepts, (X, group, y, line)

    rng = np.random.default_rng(1)
    subject, X = np.repeat(np.arange(30), 8), rng.uniform(0, 6, (240, 1))
    logit = 0.5 + rng.normal(size=30)[subject] + 1.2 * np.sin(1.2 * X[:, 0])
    y = (rng.uniform(size=240) < 1 / (1 + np.exp(-logit))).astype(int)
    found["subjects"] = subjects, (X, subject, y, jnp.linspace(0.0, 6.0, 12)[:, None])

    rng = np.random.default_rng(2)
    group, time, X = np.repeat(np.arange(20), 10), np.tile(np.linspace(-1, 1, 10), 20), rng.uniform(0, 6, (200, 1))
    y = -1 + 0.5 * rng.normal(size=20)[group] + (0.6 + 0.3 * rng.normal(size=20))[group] * time
    y += 0.7 * np.cos(1.3 * X[:, 0]) + 0.3 * rng.normal(size=200)
    found["slopes"] = slopes, (X, time, group, y, line)

    rng = np.random.default_rng(3)
    shop, item, X = rng.integers(0, 12, 240), rng.integers(0, 10, 240), rng.uniform(0, 6, (240, 1))
    log_mean = 1.5 + 0.4 * rng.normal(size=12)[shop] + 0.6 * rng.normal(size=10)[item] + 0.5 * np.sin(1.5 * X[:, 0])
    y = rng.poisson(np.exp(log_mean) * rng.gamma(5.0, 1 / 5.0, 240)).astype(float)
    found["crossed"] = crossed, (X, shop, item, y, line)
    return {name: (model, tuple(jnp.asarray(a) for a in args)) for name, (model, args) in found.items()}


def scalars(draws):
    return {name: (float(np.mean(v)), float(np.std(v))) for name, v in draws.items() if np.ndim(v) == 1}


def fit(model, args, steps, rate=0.03, seed=0, **options):
    """Mean loss of the last steps, and moments of hyperparameters."""
    guide = ogp.AutoSparseGP(model, **options)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(rate, steps)), TraceMeanField_ELBO())
    result = svi.run(random.PRNGKey(seed), steps, *args, progress_bar=False)
    keys = random.split(random.PRNGKey(9), 500)
    draws = jax.jit(jax.vmap(lambda key: guide.sample_posterior(key, result.params, *args)))(keys)
    return float(np.mean(result.losses[-100:])), scalars(draws)


def sample(model, args, num):
    """Moments of hyperparameters by two chains of NUTS, R-hat, divergent transitions, gradients."""
    options = {"num_chains": 2, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(NUTS(model, init_strategy=init_to_median), num_warmup=num, num_samples=num, **options)
    mcmc.run(random.PRNGKey(0), *args, extra_fields=("diverging", "num_steps"))
    rhat = max(float(np.max(split_gelman_rubin(v))) for v in mcmc.get_samples(group_by_chain=True).values())
    extra = mcmc.get_extra_fields()
    return scalars(mcmc.get_samples()), rhat, int(extra["diverging"].sum()), int(extra["num_steps"].sum())


def line_of(name, moments):
    return f"  {name:15s}" + "  ".join(f"{site} {m:.2f} ({sd:.2f})" for site, (m, sd) in sorted(moments.items()))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="nc_sids.npz with X, nonwhite, region, births, y")
    parser.add_argument(
        "--models", nargs="*", help="of counties, intercepts, subjects, slopes, crossed; by default all"
    )
    parser.add_argument("--steps", type=int, default=3000, help="of Adam, from 0.03 down to zero by a cosine")
    parser.add_argument("--nuts", type=int, default=0, help="draws of each of two chains, after as many to warm up")
    args = parser.parse_args(argv)
    numpyro.enable_x64()
    for name, (model, arguments) in problems(args.data).items():
        if args.models and name not in args.models:
            continue
        print(name, flush=True)
        for label, options in GUIDES.items():
            loss, moments = fit(model, arguments, args.steps, **options)
            print(line_of(label, moments) + f"  loss {loss:.1f}", flush=True)
        if args.nuts:
            moments, rhat, divergent, gradients = sample(model, arguments, args.nuts)
            print(line_of("NUTS", moments))
            print(f"  R-hat {rhat:.3f}, {divergent} divergent, {gradients} gradients after the warm-up", flush=True)


if __name__ == "__main__":
    main()
