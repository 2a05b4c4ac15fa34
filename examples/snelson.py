"""What a second inducing set, and the tight residual, buy in one dimension.

    python examples/snelson.py [--data FILE.npz] [--steps 10000] [--restarts 1] [--out out] [--seed 0] [--quick]

``FILE.npz`` holds Snelson and Ghahramani's data as arrays ``X`` (200, 1) and ``y`` (200,); without it the script makes a set of
the same look. Two experiments, each on a random subset, every fit full-batch Adam in float64:

* 100 points: SVGP with 5 inducing points, SOLVE-GP with 5 + 5, SVGP with 10 (Shi, Titsias, Mnih 2020, Sec. 3.1);
* 40 points: the exact GP against SVGP with 7, with and without the tight residual (Titsias 2025, Sec. 5.1 and Table 3), where
  the looser the bound, the more of the function it takes for noise.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods, plots

START = {"lengthscale": 1.0, "scale": 0.69, "noise": 0.51}  # Titsias 2025, appendix D


def hyperparameters() -> tuple[Any, jax.Array]:
    """The kernel, and the standard deviation of the noise."""
    positive = dist.constraints.softplus_positive
    lengthscale, scale, noise = (numpyro.param(name, value, constraint=positive) for name, value in START.items())
    return scale**2 * kernels.RBF(lengthscale), noise


def sparse(X, y=None, *, sets):
    kernel, noise = hyperparameters()
    f = ogp.gp("f", kernel, [numpyro.param(f"Z{i}", points) for i, points in enumerate(sets)])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def exact(X, y=None):
    kernel, noise = hyperparameters()
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(X)), kernel(X, X) + noise**2 * jnp.eye(len(X))), obs=y)


@dataclass
class Fit:
    name: str
    bound: float
    params: dict[str, jax.Array]
    function: ogp.GPFunction

    @property
    def noise_variance(self) -> float:
        return float(self.params["noise"] ** 2)


def optimize(svi_of: Any, num_steps: int, X, y, **kwargs) -> tuple[float, dict[str, jax.Array]]:
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, num_steps))
    result = svi_of(optimizer).run(random.PRNGKey(0), num_steps, X, y, progress_bar=False, **kwargs)
    return -float(result.losses[-1]), result.params


def fit_sparse(name, X, y, starts, num_steps, residual="prior", also_from=None) -> Fit:
    """The best fit from several starts, each a list of inducing sets, and from another fit's parameters if given."""
    guide = ogp.AutoSparseGP(sparse, residual=residual)

    def run(sets, init_params=None):
        return optimize(
            lambda adam: SVI(sparse, guide, adam, TraceMeanField_ELBO()),
            num_steps,
            X,
            y,
            sets=sets,
            init_params=init_params,
        )

    fits = [run(sets) for sets in starts] + ([] if also_from is None else [run(starts[0], also_from.params)])
    bound, params = max(fits, key=lambda fit: fit[0])
    return Fit(name, bound, params, ogp.posterior(sparse, guide, params, X, sets=starts[0])["f"])


def fit_exact(X, y, num_steps) -> Fit:
    bound, params = optimize(lambda adam: SVI(exact, lambda *_: None, adam, Trace_ELBO()), num_steps, X, y)
    kernel = params["scale"] ** 2 * kernels.RBF(params["lengthscale"])
    # With an inducing point at each of the data nothing is approximated.
    return Fit("exact GP", bound, params, ogp.CollapsedGP(kernel, X, X, params["noise"]).posterior(y))


def starts(X, M: int, num_restarts: int, orthogonal: int = 0) -> list[list[jax.Array]]:
    """Starting points: k-means, and for a second set the greedy choice; for two sets also one half of the line each."""
    kernel = START["scale"] ** 2 * kernels.RBF(START["lengthscale"])
    sets = [[init.kmeans(random.PRNGKey(seed), X, M)] for seed in range(num_restarts)]
    if not orthogonal:
        return sets
    # Two sets have more local optima than one, hence a second kind of start.
    line = jnp.sort(init.kmeans(random.PRNGKey(0), X, M + orthogonal), axis=0)
    return [*([Z, init.greedy_variance(kernel, X, orthogonal, given=Z)] for (Z,) in sets), [line[:M], line[M:]]]


def second_set(X, y, num_steps, num_restarts) -> list[Fit]:
    """SVGP (5), SOLVE-GP (5+5), SVGP (10)."""
    return [
        fit_sparse("SVGP (5)", X, y, starts(X, 5, num_restarts), num_steps),
        fit_sparse("SOLVE-GP (5+5)", X, y, starts(X, 5, num_restarts, orthogonal=5), num_steps),
        fit_sparse("SVGP (10)", X, y, starts(X, 10, num_restarts), num_steps),
    ]


def tight_residual(X, y, num_steps, num_restarts) -> list[Fit]:
    """The exact GP, SVGP (7) with the tight residual, SVGP (7)."""
    points = starts(X, 7, num_restarts)
    loose = fit_sparse("SVGP (7)", X, y, points, num_steps)
    # At the looser bound's optimum the tight one is already higher, so starting there too leaves no doubt which is better.
    tight = fit_sparse("SVGP (7), tight", X, y, points, num_steps, residual="tight", also_from=loose)
    return [fit_exact(X, y, num_steps), tight, loose]


def print_fits(title: str, bound: str, fits: list[Fit]) -> None:
    print(
        f"\n{title}\n{'method':16s} {bound:>16s} {'noise variance':>15s} {'variance of f':>14s} {'lengthscale^2':>14s}"
    )
    for fit in fits:
        scale, lengthscale = (float(fit.params[name]) ** 2 for name in ("scale", "lengthscale"))
        print(f"{fit.name:16s} {fit.bound:16.2f} {fit.noise_variance:15.4f} {scale:14.3f} {lengthscale:14.3f}")


def synthetic(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """200 noisy values on [0, 6], with a gap, of a smooth function that swings as Snelson and Ghahramani's does."""
    rng = np.random.default_rng(seed)
    x = np.sort(np.concatenate([rng.uniform(0.0, 1.8, 65), rng.uniform(2.3, 6.0, 135)]))
    turns, heights = np.array([0.0, 1.4, 2.8, 3.6, 4.4, 5.4, 6.3]), np.array([-0.2, -1.8, 0.6, -0.2, 0.85, -0.8, 0.1])
    f = bumps(x, turns) @ np.linalg.solve(bumps(turns, turns), heights)
    return x[:, None], f + 0.28 * rng.normal(size=200)


def bumps(x: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return np.exp(-((x[:, None] - centres) ** 2) / (2 * 0.6**2))


def plot(path: Path, panels: list[tuple[Any, Any, Fit]], limits: tuple[float, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(11, 6), sharex=True, sharey=True, layout="constrained")
    for axis, (X, y, fit) in zip(axes.ravel(), panels, strict=True):
        plots.function(
            fit.function,
            limits,
            data=(X, y),
            likelihood=lambda m, noise=fit.params["noise"]: likelihoods.Gaussian(m, noise),
            inducing=fit.name != "exact GP",
            legend=False,
            ax=axis,
        )
        axis.set_title(f"{fit.name}: {fit.bound:.1f} nats, noise variance {fit.noise_variance:.3f}", fontsize=10)
        axis.label_outer()
    handles, labels = axes[0, 1].get_legend_handles_labels()
    names = [*labels[:4], "inducing points", "orthogonal inducing points"]  # however many a panel has
    figure.legend(handles, names, loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def load(path: Path | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and outputs, in an order drawn with the seed."""
    if path is None:
        X, y = synthetic(seed)
    else:
        with np.load(path) as arrays:
            X, y = arrays["X"].astype(np.float64), arrays["y"].astype(np.float64)
    order = np.random.default_rng(seed).permutation(len(X))
    return X[order], y[order]


def main(argv: list[str] | None = None) -> dict[str, Fit]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="npz file with arrays X and y; default a made-up set")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--restarts", type=int, default=1, help="starting points; the best fit of each method is kept")
    parser.add_argument("--seed", type=int, default=0, help="of the subsets")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    steps = 50 if args.quick else args.steps
    with jax.enable_x64(True):
        X, y = map(jnp.asarray, load(args.data, args.seed))
        first = second_set(X[:100], y[:100], steps, args.restarts)
        second = tight_residual(X[:40], y[:40], steps, args.restarts)
        print_fits("A second, orthogonal set (100 points)", "ELBO", first)
        print_fits("The tight residual (40 points)", "log p(y) or ELBO", second)
        args.out.mkdir(parents=True, exist_ok=True)
        path, limits = args.out / "snelson.png", (float(X.min()) - 1, float(X.max()) + 1)
        plot(path, [(X[:100], y[:100], f) for f in first] + [(X[:40], y[:40], f) for f in second], limits)
    print(f"\nWrote {path}.")
    return {fit.name: fit for fit in first + second}


if __name__ == "__main__":
    main()
