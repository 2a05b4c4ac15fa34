"""An ordinal survey: answers from "strongly disagree" to "strongly agree" are ordered, but not numbers.

    python examples/survey.py [--data FILE.npz] [--steps 300] [--out out] [--seed 0] [--quick]

By default a simulated survey, so that the truth is known: 1500 people of different age and income, five answers. ``FILE.npz`` may
hold another table as arrays ``X`` and integer ``y`` (the red wines of UCI's wine quality, say). A GP gives each person a position
on a line and learned cutpoints cut it into answers. Compared: the probit and logit links, a Gaussian
on the numbers of the answers, and a softmax that does not know their order.
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
from jax.scipy.special import ndtr
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods

CUTPOINTS = np.array([-2.2, -1.4, -0.6, 0.7])
ANSWERS = ("strongly disagree", "disagree", "neither", "agree", "strongly agree")


class Survey(NamedTuple):
    X: jax.Array
    y: jax.Array

    def rows(self, which: Any) -> Survey:
        return Survey(self.X[which], self.y[which])


def attitude(X: np.ndarray) -> np.ndarray:
    """The true position: falls with age from 50 on, more so for low incomes. Columns are standardized."""
    age, income = X[:, 0], X[:, 1]
    return 0.6 * np.sin(1.5 * age) - np.maximum(age, 0) * (1 - 0.7 * income) + 0.3 * income


def simulate(num: int, seed: int) -> Survey:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num, 2))
    y = np.searchsorted(CUTPOINTS, attitude(X) + rng.normal(size=num))
    return Survey(jnp.asarray(X, jnp.float32), jnp.asarray(y))


def load(path: Path | None, seed: int) -> Survey:
    if path is None:
        return simulate(1500, seed)
    arrays = np.load(path)
    X, levels = arrays["X"], np.unique(arrays["y"])
    X = (X - X.mean(0)) / X.std(0)
    order = np.random.default_rng(seed).permutation(len(X))
    return Survey(jnp.asarray(X[order], jnp.float32), jnp.asarray(np.searchsorted(levels, arrays["y"][order])))


def ordinal(link: str) -> Any:
    def likelihood(f, num_answers):
        start = jnp.linspace(-1.5, 1.5, num_answers - 1)
        cutpoints = numpyro.param("cutpoints", start, constraint=dist.constraints.ordered_vector)
        return likelihoods.Ordinal(f, cutpoints, link=link)

    return likelihood


def gaussian(f, num_answers):
    noise = numpyro.param("noise", jnp.asarray(1.0), constraint=dist.constraints.softplus_positive)
    offset = numpyro.param("offset", jnp.asarray((num_answers - 1) / 2))
    return likelihoods.Gaussian(f + offset, noise)


def softmax(f, num_answers):
    return likelihoods.Categorical(f)


LIKELIHOODS = {
    "Ordinal, probit": ordinal("probit"),
    "Ordinal, logit": ordinal("logit"),
    "Gaussian": gaussian,
    "Categorical": softmax,
}


def model(X, y=None, *, likelihood, num_answers, Z):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.5, 0.5).expand([X.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    latents = num_answers if likelihood is softmax else None
    f = ogp.gp("f", scale**2 * kernels.Matern52(lengthscale), Z, num_latents=latents)
    with numpyro.plate("people", len(X)):
        return numpyro.sample("y", likelihood(f(X), num_answers), obs=y)


class Fit(NamedTuple):
    elbo: float
    params: dict[str, jax.Array]
    predict: Any  # the likelihood of other people


def fit(train: Survey, name: str, num_answers: int, num_steps: int, seed: int) -> Fit:
    likelihood = LIKELIHOODS[name]
    kwargs = {"likelihood": likelihood, "num_answers": num_answers, "Z": init.kmeans(random.PRNGKey(seed), train.X, 40)}
    y = train.y.astype(train.X.dtype) if likelihood is gaussian else train.y
    guide = ogp.AutoSparseGP(model, natural=True)
    optimizer = ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(0.05, num_steps)), 0.2, ramp_up=10)
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())

    @jax.jit
    def run(X, y):
        state = svi.init(random.PRNGKey(seed), X, y, **kwargs)
        state, losses = lax.scan(lambda s, _: svi.update(s, X, y, **kwargs), state, None, length=num_steps)
        return state, -losses[-1]

    state, elbo = run(train.X, y)
    params = svi.get_params(state)
    f = jax.jit(lambda p: ogp.posterior(model, guide, p, train.X, y, **kwargs)["f"])(params)

    def predict(X: jax.Array) -> Any:
        with numpyro.handlers.block(), numpyro.handlers.substitute(data=params):
            return likelihood(f(X), num_answers)

    return Fit(float(elbo), params, predict)


def probabilities(likelihood: Any, num_answers: int) -> np.ndarray:
    """Predictive probability of each answer, shape (B, num_answers); a Gaussian's are those of rounding to the nearest one."""
    if hasattr(likelihood, "probs"):
        return np.asarray(likelihood.probs)
    edges = np.arange(num_answers - 1) + 0.5
    z = (edges - likelihood.mean[:, None]) / np.sqrt(likelihood.variance)[:, None]
    return np.diff(np.asarray(ndtr(z)), prepend=0.0, append=1.0)


def save_figure(path: Path, fits: dict[str, Fit]) -> None:
    """Shares of the answers by age for low and high income, predicted and true (simulated survey)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    age = np.linspace(-2, 2, 100)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    colours = plt.get_cmap("cividis")(np.linspace(0.05, 0.95, len(ANSWERS)))
    for axis, income in zip(axes, (-1.0, 1.0), strict=True):
        X = np.stack([age, np.full_like(age, income)], -1)
        p = probabilities(fits["Ordinal, probit"].predict(jnp.asarray(X, jnp.float32)), len(ANSWERS))
        axis.stackplot(age, p.T, labels=ANSWERS, colors=colours)
        truth = np.asarray(ndtr(CUTPOINTS - attitude(X)[:, None]))
        for k, edge in enumerate(truth.T):
            axis.plot(age, edge, "--", color="white", lw=1.5, label="truth" if k == 0 else None)
        axis.set(
            title=f"income {income:+.0f} sd",
            xlabel="age (standard deviations from the mean)",
            xlim=(-2, 2),
            ylim=(0, 1),
        )
    axes[0].set_ylabel("share of answers")
    handles, labels = axes[0].get_legend_handles_labels()
    legend = figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=9)
    legend.get_frame().set_facecolor("0.7")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="npz file with arrays X (N, D) and integer y (N,)")
    parser.add_argument("--steps", type=int, default=300, help="natural-gradient and Adam steps of each fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    steps = 20 if args.quick else args.steps

    data = load(args.data, args.seed)
    num_answers, num_train = int(data.y.max()) + 1, int(0.6 * len(data.y))
    train, test = data.rows(slice(num_train)), data.rows(slice(num_train, None))
    print(f"{num_train} people to train, {len(test.y)} to test, {num_answers} answers.\n")
    print(f"{'likelihood':16s}  {'test log p':>10s}  {'accuracy':>8s}  {'error':>6s}  cutpoints")
    fits = {}
    for name in LIKELIHOODS:
        fits[name] = fit(train, name, num_answers, steps, args.seed)
        p = probabilities(fits[name].predict(test.X), num_answers)
        y = np.asarray(test.y)
        log_p = np.log(np.maximum(p[np.arange(len(y)), y], np.finfo(np.float32).tiny)).mean()
        cutpoints = " ".join(f"{c:5.2f}" for c in np.asarray(fits[name].params.get("cutpoints", [])))
        error = np.abs(p.argmax(-1) - y).mean()
        print(f"{name:16s}  {log_p:10.3f}  {100 * (p.argmax(-1) == y).mean():6.1f} %  {error:6.3f}  {cutpoints}")
    print(
        "\ntest log p: mean log predictive probability of a held-out answer. error: mean distance of the likeliest answer."
    )
    if args.data is None:
        args.out.mkdir(parents=True, exist_ok=True)
        save_figure(args.out / "survey.png", fits)
        print(
            f"True cutpoints: {CUTPOINTS}, probit, up to a constant that f may carry. Wrote {args.out / 'survey.png'}."
        )


if __name__ == "__main__":
    main()
