"""NUTS beside variational inference: what becomes of the hyperparameters when labels are few.

    python examples/nuts.py [--num 60] [--draws 500] [--chains 4] [--steps 1000] [--out out] [--seed 0] [--quick]

A classifier of one input, with a lengthscale and a scale that have priors. The same model function is given to ``NUTS``, which
samples hyperparameters and inducing variables, and to ``AutoSparseGP`` with three guides for the hyperparameters: a point
(``AutoDelta``), or on the logarithms of both independent Gaussians (``AutoNormal``) or one Gaussian (``AutoMultivariateNormal``).
ArviZ says whether the chains have converged and what leave-one-out thinks of each; the Pareto k-hat says how far each guide is
from the posterior, given what it holds fixed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from jax.scipy.special import logsumexp
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what ArviZ's next version will do
    import arviz as az

NUM_TEST = 5000
HYPER = ("lengthscale", "scale")
COLOURS = ("#E69F00", "#0072B2", "#009E73", "#000000")
STYLES = (":", "--", "-.", "-")


def model(X, y=None, *, Z):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.LogNormal(1.0, 1.0))
    f = ogp.gp("f", scale**2 * kernels.Matern52(lengthscale), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Bernoulli(f(X)), obs=y)


def simulate(num: int, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Inputs (N, 1), sorted, and labels (N,)."""
    X = np.sort(rng.uniform(-3, 3, num))[:, None]
    p = 1 / (1 + np.exp(-3 * np.sin(1.5 * X[:, 0])))
    return jnp.asarray(X), jnp.asarray((rng.uniform(size=num) < p).astype(float))


class Posterior(NamedTuple):
    """One way to infer: draws of hyperparameters, and of functions that carry what is known given each of them."""

    hyper: dict[str, np.ndarray]
    functions: ogp.GPFunction  # a batch of them
    data: Any  # for ArviZ
    khat: float | None
    seconds: float  # of all cores

    def at(self, X: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of f at X under each draw, both of shape (S, N)."""
        moments = jax.jit(jax.vmap(lambda f, X: (f(X).mean, f(X).variance), in_axes=(0, None)))
        return moments(self.functions, X)

    def log_predictive(self, X: jax.Array, y: jax.Array) -> jax.Array:
        """Log probability of each label, averaged over draws, shape (N,)."""
        each = jax.jit(jax.vmap(lambda f: likelihoods.Bernoulli(f(X)).log_predictive(y)))(self.functions)
        return logsumexp(each, axis=0) - jnp.log(len(each))

    def probability(self, X: jax.Array) -> jax.Array:
        return jnp.exp(self.log_predictive(X, jnp.ones(len(X))))


def variational(hyper: Any, X, y, Z, num_steps: int, num_draws: int) -> Posterior:
    start = time.process_time()
    guide = ogp.AutoSparseGP(model, hyper=hyper)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.03, num_steps))
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO(num_particles=10))

    @jax.jit
    def run(X, y):
        state = svi.init(random.PRNGKey(0), X, y, Z=Z)
        state, _ = lax.scan(lambda s, _: svi.update(s, X, y, Z=Z), state, None, length=num_steps)
        return svi.get_params(state)

    params = jax.block_until_ready(run(X, y))
    seconds = time.process_time() - start

    def draw(key):
        site = guide.sample_posterior(key, params, X, y, Z=Z)
        return {name: site[name] for name in HYPER}, ogp.posterior(model, guide, params, X, rng_key=key, Z=Z)["f"]

    _, functions = jax.jit(jax.vmap(draw))(random.split(random.PRNGKey(1), num_draws))
    data = ogp.to_arviz(model, guide, params, X, y, num_samples=4 * num_draws, Z=Z)
    drawn = {name: np.asarray(data.posterior[name]).ravel() for name in HYPER}
    return Posterior(
        drawn, functions, data, ogp.khat(model, guide, params, X, y, Z=Z, num_samples=8 * num_draws).khat, seconds
    )


def markov_chain(X, y, Z, num_draws: int, num_chains: int) -> Posterior:
    start = time.process_time()
    kernel = NUTS(model, target_accept_prob=0.95)
    sequential: Any = {"chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=num_draws, num_samples=num_draws, num_chains=num_chains, **sequential)
    mcmc.run(random.PRNGKey(2), X, y, Z=Z)
    seconds = time.process_time() - start
    samples = mcmc.get_samples()
    thinned = {name: value[::num_chains] for name, value in samples.items()}
    functions = jax.jit(jax.vmap(lambda values: ogp.posterior(model, None, values, X, Z=Z)["f"]))(thinned)
    data = ogp.to_arviz(model, mcmc, None, X, y, Z=Z)
    return Posterior({name: np.asarray(samples[name]) for name in HYPER}, functions, data, None, seconds)


def row(name: str, result: Posterior, X_test: jax.Array, y_test: jax.Array) -> str:
    intervals = []
    for hyper in HYPER:
        low, middle, high = np.quantile(result.hyper[hyper], [0.05, 0.5, 0.95])
        intervals.append(f"{middle:5.2f} ({low:4.2f} to {high:5.2f})")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of points that have a large k-hat of their own
        loo = az.loo(result.data)
    elpd = float(loo.elpd if hasattr(loo, "elpd") else loo.elpd_loo)  # ArviZ 1.x, and 0.x
    k = "-" if result.khat is None else f"{result.khat:.2f}"
    score = float(result.log_predictive(X_test, y_test).mean())
    cells = [f"{name:22s}", *intervals, f"{k:>5s}", f"{elpd:8.2f}", f"{score:10.4f}"]
    return "  ".join([*cells, f"{result.seconds:7.1f}"])


def save_figure(path: Path, results: dict[str, Posterior], X: jax.Array, y: jax.Array) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from scipy.stats import gaussian_kde

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    limits = {name: np.quantile(results["NUTS"].hyper[name], [0.001, 0.99]) for name in HYPER}
    grid = jnp.linspace(-4.5, 4.5, 200)[:, None]
    for (name, result), colour, style in zip(results.items(), COLOURS, STYLES, strict=True):
        look: Any = {"color": colour, "ls": style, "lw": 2, "label": name}
        for axis, hyper in zip(axes[0], HYPER, strict=True):
            values = np.log(result.hyper[hyper])
            if np.ptp(values) < 1e-6:
                axis.axvline(np.exp(values[0]), **look)
                continue
            at = np.linspace(*np.log(limits[hyper] * [0.7, 1.3]), 200)
            axis.plot(np.exp(at), gaussian_kde(values)(at), **look)
        mean, variance = result.at(grid)
        spread = jnp.sqrt(variance.mean(0) + mean.var(0))
        for sign in (-1, 1):
            axes[1, 0].plot(
                grid, mean.mean(0) + 1.645 * sign * spread, **(look | {"label": name if sign > 0 else None})
            )
        axes[1, 1].plot(grid, result.probability(grid), **look)
    for axis, hyper in zip(axes[0], HYPER, strict=True):
        axis.set(xscale="log", xlabel=hyper, ylabel="density of its logarithm", title=f"Posterior of the {hyper}")
        axis.set_xticks([t for t in (0.2, 0.5, 1, 2, 5, 10, 20, 50) if axis.get_xlim()[0] < t < axis.get_xlim()[1]])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_ylim(bottom=0)
    truth = 3 * np.sin(1.5 * np.asarray(grid[:, 0]))
    axes[1, 0].plot(grid, truth, color="0.6", lw=4, alpha=0.6, label="truth", zorder=0)
    axes[1, 1].plot(grid, 1 / (1 + np.exp(-truth)), color="0.6", lw=4, alpha=0.6, label="truth", zorder=0)
    axes[1, 1].plot(X[:, 0], y, "|", color="0.3", ms=9, label="labels")
    axes[1, 0].set(xlabel="x", ylabel="f", title="f: mean plus and minus 1.645 standard deviations")
    axes[1, 1].set(xlabel="x", ylabel="probability of label 1", title="Prediction")
    figure.legend(*axes[1, 1].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=60, help="labels to learn from")
    parser.add_argument("--draws", type=int, default=500, help="of each chain, and as many to warm up")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000, help="Adam steps of each guide")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that all of it runs")
    args = parser.parse_args(argv)
    if args.quick:
        args.draws, args.chains, args.steps = 50, 2, 100
    numpyro.enable_x64()

    rng = np.random.default_rng(args.seed)
    num_test = NUM_TEST // 10 if args.quick else NUM_TEST
    (X, y), test = simulate(args.num, rng), simulate(num_test, rng)
    Z = jnp.linspace(-3.2, 3.2, 12)[:, None]
    print(f"{args.num} labels to learn from, {num_test} to predict, {len(Z)} inducing points.\n")
    print(
        f"{'hyperparameters':22s}  {'lengthscale, 90 %':>21s}  {'scale, 90 %':>21s}  {'k-hat':>5s}  {'elpd_loo':>8s}  "
        f"{'test log p':>10s}  {'CPU s':>7s}"
    )
    results: dict[str, Posterior] = {}
    for hyper in (AutoDelta, AutoNormal, AutoMultivariateNormal):
        name = hyper.__name__
        results[name] = variational(hyper, X, y, Z, args.steps, args.draws)
        print(row(name, results[name], *test), flush=True)
    results["NUTS"] = markov_chain(X, y, Z, args.draws, args.chains)
    print(row("NUTS", results["NUTS"], *test))
    print(f"\n{args.chains} chains of {args.draws} draws, ArviZ's diagnostics:")
    print(
        az.summary(results["NUTS"].data, var_names=list(HYPER), kind="diagnostics")[["ess_bulk", "ess_tail", "r_hat"]]
    )
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "nuts.png", results, X, y)
    print(
        "\nk-hat: of q(u, hyperparameters), of q(u) for AutoDelta. elpd_loo: nats, of all labels. test log p: of one."
    )
    print(f"CPU s: of all cores, compilation included. Wrote {args.out / 'nuts.png'}.")


if __name__ == "__main__":
    main()
