"""Two classes in the plane, and a boundary that winds more and more: where should inducing points go?

    python examples/classification.py [--num 2000] [--num-inducing 16] [--steps 400] [--out out] [--seed 0] [--quick]

The data are made here, so the true probability of each label is known. First SVGP is fitted with M points spread over the
inputs. A second, orthogonal set leaves that fit as it is, so it is where SOLVE-GP begins: the new points are chosen
where the first fit is undecided, or, to compare, wherever the first set explains least of the prior. The tightened bound, a probit
in place of the logit, and SVGP with all points in one set stand beside.
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

WIDTH, HEIGHT = 3.0, 1.5  # of the half of the rectangle
NUM_TEST = 5000
START = {"lengthscale": jnp.ones(2), "scale": jnp.asarray(3.0)}


def boundary(x: np.ndarray) -> np.ndarray:
    """A wave whose length falls from left to right."""
    return 0.8 * np.sin(0.55 * (x + WIDTH) ** 2)


class Data(NamedTuple):
    """Inputs (N, 2), labels (N,) and the true probabilities of label one."""

    X: jax.Array
    y: jax.Array
    p: jax.Array

    @classmethod
    def simulate(cls, num: int, seed: int) -> Data:
        rng = np.random.default_rng(seed)
        X = rng.uniform(-1, 1, (num, 2)) * [WIDTH, HEIGHT]
        p = 1 / (1 + np.exp(-8 * (X[:, 1] - boundary(X[:, 0]))))
        y = rng.uniform(size=num) < p
        return cls(*(jnp.asarray(a, jnp.float32) for a in (X, y, p)))


def model(X, y=None, *, sets, link="logit"):
    """A GP classifier; ``sets`` holds one set of inducing points (SVGP) or two (SOLVE-GP)."""
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", START["lengthscale"], constraint=positive)
    scale = numpyro.param("scale", START["scale"], constraint=positive)
    sets = [numpyro.param(f"Z{i}", points) for i, points in enumerate(sets)]
    f = ogp.gp("f", scale**2 * kernels.Matern52(lengthscale), sets)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Bernoulli(f(X), link=link), obs=y)


class Fit(NamedTuple):
    elbo: float
    params: dict[str, Any]
    f: ogp.GPFunction
    link: str

    def predict(self, X: jax.Array) -> likelihoods.Bernoulli:
        return likelihoods.Bernoulli(jax.jit(lambda f, X: f(X))(self.f, X), link=self.link)


def fit(data: Data, sets, num_steps: int, *, start=None, residual: str = "prior", link: str = "logit") -> Fit:
    """Natural gradients for q, Adam for the rest; ``start`` holds parameters of an earlier fit."""
    guide = ogp.AutoSparseGP(model, residual=residual, natural=True)
    optimizer = ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(0.02, num_steps)), 0.1)
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
    kwargs = {"sets": sets, "link": link}

    @jax.jit
    def run(X, y):
        state = svi.init(random.PRNGKey(0), X, y, **kwargs, init_params=start)
        state, _ = lax.scan(lambda s, _: svi.update(s, X, y, **kwargs), state, None, length=num_steps)
        params = svi.get_params(state)
        return -svi.evaluate(state, X, y, **kwargs), params, ogp.posterior(model, guide, params, X, **kwargs)["f"]

    elbo, params, f = run(data.X, data.y)
    return Fit(float(elbo), params, f, link)


def six_fits(data: Data, M: int, steps: int, seed: int) -> dict[str, Fit]:
    """All of them take 2 ``steps`` in all, those with two sets half of these with the first set alone."""
    Z, Z2 = (init.kmeans(random.PRNGKey(seed), data.X, num) for num in (M, 2 * M))
    first = fit(data, [Z], steps)
    kernel, Z0 = first.f.kernel, first.params["Z0"]
    undecided = data.X[jnp.abs(first.predict(data.X).mean - 0.5) < 0.4]
    near = init.greedy_variance(kernel, undecided if len(undecided) >= M else data.X, M, given=Z0)
    anywhere = init.greedy_variance(kernel, data.X, M, given=Z0)

    def grown(O, **options):
        return fit(data, [Z0, O], steps, start=first.params, **options)

    return {
        f"SVGP ({M})": fit(data, [Z0], steps, start=first.params),
        f"SOLVE-GP ({M}+{M}), anywhere": grown(anywhere),
        f"SOLVE-GP ({M}+{M})": grown(near),
        f"SOLVE-GP ({M}+{M}), tight": grown(near, residual="tight"),
        f"SOLVE-GP ({M}+{M}), probit": grown(near, link="probit"),
        f"SVGP ({2 * M})": fit(data, [Z2], 2 * steps),
    }


def save_figure(path: Path, data: Data, fits: dict[str, Fit], M: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sides = np.linspace(-WIDTH, WIDTH, 160), np.linspace(-HEIGHT, HEIGHT, 80)
    grid = jnp.asarray(np.stack(np.meshgrid(*sides), -1).reshape(-1, 2), jnp.float32)
    shown = [f"SVGP ({M})", f"SOLVE-GP ({M}+{M}), tight", f"SVGP ({2 * M})"]
    figure, axes = plt.subplots(3, 1, figsize=(7.5, 10.5), sharex=True, layout="constrained")
    for axis, name in zip(axes, shown, strict=True):
        p = np.asarray(fits[name].predict(grid).mean).reshape(80, 160)
        filled = axis.contourf(*sides, p, levels=np.linspace(0, 1, 11), cmap="PuOr", alpha=0.6)
        lines = axis.contour(*sides, p, levels=[0.1, 0.5, 0.9], colors="black", linewidths=(0.7, 1.8, 0.7))
        axis.clabel(lines, levels=[0.1, 0.9], fontsize=7)
        axis.plot(sides[0], boundary(sides[0]), "--", color="#D81B60", lw=1.5, label="1/2 in truth")
        for label, marker in ((0, "_"), (1, "+")):
            axis.plot(
                *data.X[data.y == label].T, marker, color="0.2", ms=3.5, mew=0.6, alpha=0.6, label=f"label {label}"
            )
        for i, (marker, colour) in enumerate((("o", "#56B4E9"), ("s", "#F0E442"))):
            points = fits[name].params.get(f"Z{i}")
            if points is not None:
                axis.plot(*points.T, marker, color=colour, mec="black", ms=7, label=("first set", "second set")[i])
        axis.set(title=name, ylabel="$x_2$", xlim=(-WIDTH, WIDTH), ylim=(-HEIGHT, HEIGHT))
    axes[-1].set_xlabel("$x_1$")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
    figure.colorbar(filled, ax=axes, label="probability of label 1", shrink=0.6)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=2000, help="labelled points")
    parser.add_argument("--num-inducing", type=int, default=16, help="M: SVGP has M and 2 M, SOLVE-GP M + M")
    parser.add_argument("--steps", type=int, default=400, help="half of the steps of each fit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="few steps and points, to see that all of it runs")
    args = parser.parse_args(argv)
    if args.quick:
        args.num, args.num_inducing, args.steps = 400, 8, 40

    data, test = Data.simulate(args.num, args.seed), Data.simulate(NUM_TEST, args.seed + 1)
    print(f"{args.num} points to learn from, {NUM_TEST} to predict.\n")
    print(f"{'method':28s}  {'ELBO':>7s}  {'test log p':>10s}  {'test error':>10s}  {'scale of f':>10s}")
    fits = six_fits(data, args.num_inducing, args.steps, args.seed)
    for name, result in fits.items():
        predicted = result.predict(test.X)
        score, wrong = predicted.log_predictive(test.y).mean(), ((predicted.mean > 0.5) != (test.y > 0.5)).mean()
        print(f"{name:28s}  {result.elbo:7.1f}  {score:10.4f}  {100 * wrong:8.2f} %  {result.params['scale']:10.2f}")
    score = jnp.log(jnp.where(test.y > 0.5, test.p, 1 - test.p)).mean()
    wrong = ((test.p > 0.5) != (test.y > 0.5)).mean()
    print(f"{'the true probabilities':28s}  {'':7s}  {score:10.4f}  {100 * wrong:8.2f} %")
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "classification.png", data, fits, args.num_inducing)
    print("\nELBO: nats. test log p: mean log predictive probability of a test label, nats.")
    print(f"Wrote {args.out / 'classification.png'}.")


if __name__ == "__main__":
    main()
