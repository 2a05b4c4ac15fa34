"""Survival with censoring: who was still well when the study ended says something too.

    python examples/survival.py [--num 600] [--steps 400] [--out out] [--seed 0] [--quick]

A simulated study, so that the truth is known: 600 people, a biomarker x with a U-shaped effect on the time to relapse, two arms of
treatment, log-normal times. People join over three years and the study ends after five, so about half of the times are right
censored: all that is known is that the relapse comes later. Four accelerated-failure-time models share one GP, exp(f) being the
scale of time; the last two rows show what becomes of the best of them when censored times are taken for relapses, or thrown away.
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
from numpyro_orthgp import init, kernels, likelihoods

NOISE = 0.6  # standard deviation of the true log times
positive = dist.constraints.softplus_positive


class Study(NamedTuple):
    """Biomarker and arm (N, 2), time to relapse or to the end of the study (years), whether it is the latter, true median."""

    X: jax.Array
    time: jax.Array
    censored: jax.Array
    median: jax.Array

    def rows(self, which: Any) -> Study:
        return Study(*(a[which] for a in self))


def simulate(num: int, seed: int) -> Study:
    rng = np.random.default_rng(seed)
    x, arm = rng.normal(size=num), rng.integers(0, 2, num)
    median = true_median(x, arm)
    relapse = median * np.exp(NOISE * rng.normal(size=num))
    follow_up = 5.0 - rng.uniform(0, 3, num)
    X, time = np.stack([x, arm], -1), np.minimum(relapse, follow_up)
    return Study(
        *(jnp.asarray(a, jnp.float32) for a in (X, time)), jnp.asarray(relapse > follow_up), jnp.asarray(median)
    )


def true_median(x: np.ndarray, arm: np.ndarray) -> np.ndarray:
    """Half relapse by then: best in the middle of the biomarker; the treatment helps only above it."""
    return np.exp(1.6 - 0.5 * x**2 + 0.9 * arm / (1 + np.exp(-4 * x)))


def parameter(name: str, value: float) -> jax.Array:
    return numpyro.param(name, jnp.asarray(value), constraint=positive)


LIKELIHOODS = {
    "Exponential": lambda f, c: likelihoods.Exponential(f, censored=c),
    "Weibull": lambda f, c: likelihoods.Weibull(f, parameter("concentration", 1.5), censored=c),
    "Gamma": lambda f, c: likelihoods.Gamma(f, parameter("concentration", 1.5), censored=c),
    "LogNormal": lambda f, c: likelihoods.LogNormal(f, parameter("scale", 0.7), censored=c),
}


def model(X, time=None, censored=None, *, likelihood, sets):
    """Log time scale: a constant, an effect of the biomarker, and one that differs between arms."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5).expand([2]).to_event(1))
    scale = numpyro.sample("amplitude", dist.HalfNormal(1.5).expand([2]).to_event(1))
    offset = numpyro.param("offset", jnp.asarray(1.0))
    common, arm = (kernels.Matern52(lengthscale[i]).on(0) for i in range(2))
    f = ogp.gp("f", scale[0] ** 2 * common + scale[1] ** 2 * arm * kernels.Linear().on(1), sets)
    with numpyro.plate("people", len(X)):
        return numpyro.sample("time", likelihood(f(X) + offset, censored), obs=time)


class Fit(NamedTuple):
    elbo: float
    params: dict[str, jax.Array]
    predict: Any  # the likelihood for other people: predict(X, censored)


def fit(train: Study, likelihood: Any, num_steps: int, seed: int) -> Fit:
    Z = init.kmeans(random.PRNGKey(seed), train.X, 20)
    O = init.greedy_variance(kernels.RBF(0.7), train.X, 10, given=Z)
    data, kwargs = (train.X, train.time, train.censored), {"likelihood": likelihood, "sets": [Z, O]}
    guide = ogp.AutoSparseGP(model, residual="tight", natural=True)
    optimizer = ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(0.05, num_steps)), 0.3, ramp_up=10)
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())

    @jax.jit
    def run(data):
        state = svi.init(random.PRNGKey(seed), *data, **kwargs)
        state, losses = lax.scan(lambda s, _: svi.update(s, *data, **kwargs), state, None, length=num_steps)
        return state, -losses[-1]

    state, elbo = run(data)
    params = svi.get_params(state)
    f = jax.jit(lambda p: ogp.posterior(model, guide, p, *data, **kwargs)["f"])(params)

    def predict(X: jax.Array, censored: Any = None) -> Any:
        with numpyro.handlers.block(), numpyro.handlers.substitute(data=params):
            return likelihood(f(X) + params["offset"], censored)

    return Fit(float(elbo), params, predict)


def median_time(likelihood: Any) -> np.ndarray:
    """The time by which half relapse, by draws; NumPyro's distributions know means, which censoring leaves uncertain."""
    return np.median(likelihood.sample(random.PRNGKey(0), (400,)), axis=0)


def pointwise(likelihood: Any) -> Any:
    likelihood.marginals = likelihood.marginals.independent()  # people one by one: no joint covariance needed
    return likelihood


def save_figure(path: Path, data: Study, fits: dict[str, Fit]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x = np.linspace(-2.2, 2.2, 80)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for arm, axis in enumerate(axes):
        X = jnp.asarray(np.stack([x, np.full_like(x, arm)], -1), jnp.float32)
        axis.plot(x, true_median(x, np.full_like(x, arm)), "k--", lw=1.5, label="truth")
        shown = {
            "LogNormal": ("#0072B2", "-"),
            "censored as relapses": ("#D55E00", "-."),
            "censored thrown away": ("#CC79A7", ":"),
        }
        for name, (colour, style) in shown.items():
            f = fits[name].predict(X).marginals  # exp(f) is the median of a log-normal time
            axis.plot(x, np.exp(f.mean), style, color=colour, lw=2, label=name)
            if name == "LogNormal":
                low, high = (np.exp(f.mean + z * jnp.sqrt(f.variance)) for z in (-1.645, 1.645))
                axis.fill_between(x, low, high, color=colour, alpha=0.2, lw=0, label="its 90 % of the posterior")
        here = np.asarray(data.X[:, 1]) == arm
        for mark, which, name in (
            ("o", ~np.asarray(data.censored), "relapse"),
            ("^", np.asarray(data.censored), "censored"),
        ):
            rows = here & which
            axis.plot(
                data.X[rows, 0],
                data.time[rows],
                mark,
                ms=3.5,
                mfc="none" if mark == "^" else None,
                color="0.55",
                label=name,
            )
        axis.set(
            title=("control", "treatment")[arm], xlabel="biomarker", yscale="log", ylim=(0.2, 20), xlim=(-2.3, 2.3)
        )
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("median time to relapse (years)")
    axes[1].legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=600, help="people in the study")
    parser.add_argument("--steps", type=int, default=400, help="natural-gradient and Adam steps of each fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    steps = 20 if args.quick else args.steps

    data, test = simulate(args.num, args.seed), simulate(1000, args.seed + 1)
    cases = {name: (data, likelihood) for name, likelihood in LIKELIHOODS.items()}
    cases["censored as relapses"] = data._replace(censored=jnp.zeros_like(data.censored)), LIKELIHOODS["LogNormal"]
    cases["censored thrown away"] = data.rows(~np.asarray(data.censored)), LIKELIHOODS["LogNormal"]
    print(f"{args.num} people, {100 * float(data.censored.mean()):.0f} % of the times censored; 1000 others to test.\n")
    print(f"{'model':22s}  {'ELBO':>8s}  {'test log p':>10s}  {'error of the median':>19s}  learned")
    fits = {}
    for name, (train, likelihood) in cases.items():
        result = fits[name] = fit(train, likelihood, steps, args.seed)
        predicted = pointwise(result.predict(test.X, test.censored))
        error = np.mean(np.abs(np.log(median_time(predicted) / test.median)))
        learned = {k: float(v) for k, v in result.params.items() if k in ("concentration", "scale")}
        print(
            f"{name:22s}  {result.elbo:8.1f}  {float(predicted.log_predictive(test.time).mean()):10.3f}  "
            f"{100 * np.expm1(error):17.0f} %  {', '.join(f'{k} {v:.2f}' for k, v in learned.items())}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "survival.png", data, fits)
    print(
        "\nELBO: nats, with the log prior of hyperparameters; the last two rows are of other data and not to be compared."
    )
    print(
        "test log p: mean log density of a relapse, or log probability of none so far. Error: typical factor off the true median."
    )
    print(f"Times were log-normal with scale {NOISE}. Wrote {args.out / 'survival.png'}.")


if __name__ == "__main__":
    main()
