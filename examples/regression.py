"""How many inducing points are enough? Bounds of the evidence on both sides, fitted by L-BFGS.

    python examples/regression.py [--sizes 4 8 16 32 64] [--data FILE.npz] [--out out] [--seed 0] [--quick]

Regression of a diabetes score on body mass, blood pressure and a blood serum measurement (scikit-learn's 442 patients;
``--data`` takes any file with arrays X and y, of which at most 2000 rows are used, so that the exact GP can stand beside). For
each number of inducing points it fits hyperparameters and points by L-BFGS, on the collapsed bound of 2009 and on the tighter one
of 2025. The upper bound at the same hyperparameters brackets the exact log evidence, which nobody has to compute to see that
points are too few. Then the same model draws hyperparameters by NUTS, beside those of the exact GP.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDelta
from sklearn.datasets import load_diabetes

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods

BOUNDS = {"titsias2009": ("#0072B2", "o"), "titsias2025": ("#D55E00", "s")}
MAX_ROWS = 2000


class Data(NamedTuple):
    """Standardized inputs (N, D) and outputs (N,)."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array

    @classmethod
    def load(cls, path: Path | None, seed: int) -> Data:
        if path is None:
            X, y = load_diabetes(return_X_y=True)
            X = X[:, [2, 3, 8]]
        else:
            with np.load(path) as file:
                X, y = file["X"].astype(float), file["y"].astype(float)
        rows = np.random.default_rng(seed).permutation(len(y))[:MAX_ROWS]
        train, test = np.split(rows, [int(0.8 * len(rows))])
        scale = np.where(X[train].std(0) > 0, X[train].std(0), 1)
        X = (X - X[train].mean(0)) / scale
        y = (y - y[train].mean()) / y[train].std()
        return cls(*(jnp.asarray(a) for a in (X[train], y[train], X[test], y[test])))


def model(X, y, Z, *, bound="titsias2025", learn_points=True):
    """GP regression through inducing points Z; with Z = X it is the exact GP."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1.0, 1.0).expand([X.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    if learn_points:
        Z = numpyro.param("Z", Z)
    kernel = scale**2 * kernels.RBF(lengthscale)
    numpyro.sample("y", ogp.CollapsedGP(kernel, X, Z, noise, bound=bound), obs=y)


START = {"scale": 1.0, "noise": 0.5}


def minimize(loss: Callable[[Any], jax.Array], start: Any, max_iterations: int, tolerance: float = 1e-3) -> Any:
    """optax's L-BFGS until no entry of the gradient is above the tolerance."""
    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        params, memory = carry
        value, gradient = value_and_grad(params, state=memory)
        updates, memory = optimizer.update(gradient, memory, params, value=value, grad=gradient, value_fn=loss)
        return optax.apply_updates(params, updates), memory

    def go_on(carry: tuple[Any, Any]) -> jax.Array:
        count, gradient = (optax.tree_utils.tree_get(carry[1], name) for name in ("count", "grad"))
        steepest = jnp.max(jnp.stack([jnp.abs(g).max() for g in jax.tree.leaves(gradient)]))
        return (count == 0) | ((count < max_iterations) & (steepest > tolerance))

    return lax.while_loop(go_on, step, (start, optimizer.init(start)))[0]


class Fit:
    """Posterior mode of the hyperparameters, and the best inducing points, under one bound."""

    def __init__(self, data: Data, Z: jax.Array, bound: str, max_iterations: int) -> None:
        args = (data.X, data.y, Z)
        kwargs = {"bound": bound, "learn_points": len(Z) < len(data.X)}
        guide = AutoDelta(model, init_loc_fn=init_to_value(values=START))
        objective = TraceMeanField_ELBO()
        svi = SVI(model, guide, optax.sgd(0.0), objective)  # for its parameters; the steps are L-BFGS's
        key = random.PRNGKey(0)

        @jax.jit
        def run(key):
            state = svi.init(key, *args, **kwargs)

            def loss(unconstrained):
                return objective.loss(key, svi.constrain_fn(unconstrained), model, guide, *args, **kwargs)

            return svi.constrain_fn(minimize(loss, svi.optim.get_params(state.optim_state), max_iterations))

        self.params = run(key)

        @jax.jit
        def report(params):
            gp = collapsed(params, data, Z, bound)
            marginals = gp.posterior(data.y)(data.X_test)
            score = likelihoods.Gaussian(marginals, params["noise_auto_loc"]).log_predictive(data.y_test).mean()
            return gp.log_prob(data.y), gp.upper_bound(data.y), score

        self.lower, self.upper, self.score = (float(x) for x in report(self.params))
        self.noise = float(self.params["noise_auto_loc"])


def collapsed(params: Any, data: Data, Z: jax.Array, bound: str) -> ogp.CollapsedGP:
    """The distribution of y that the model has at fitted parameters."""
    kernel = params["scale_auto_loc"] ** 2 * kernels.RBF(params["lengthscale_auto_loc"])
    return ogp.CollapsedGP(kernel, data.X, params.get("Z", Z), params["noise_auto_loc"], bound=bound)


def draw(data: Data, Z: jax.Array, num: int) -> dict[str, jax.Array]:
    """Hyperparameters from their posterior under the bound, by NUTS."""
    kernel = NUTS(model, init_strategy=init_to_value(values=START))
    mcmc = MCMC(kernel, num_warmup=num, num_samples=num, progress_bar=False)
    mcmc.run(random.PRNGKey(1), data.X, data.y, Z, learn_points=False)
    return mcmc.get_samples()


def save_figure(path: Path, sizes: list[int], fits: dict[tuple[str, int], Fit], exact: Fit) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for bound, (colour, marker) in BOUNDS.items():
        lower, upper = ([getattr(fits[bound, m], side) for m in sizes] for side in ("lower", "upper"))
        left.plot(sizes, lower, color=colour, marker=marker, label=f"{bound}, lower bound")
        left.plot(sizes, upper, color=colour, marker=marker, linestyle=":", mfc="white", label="upper bound there")
        right.plot(sizes, [fits[bound, m].noise for m in sizes], color=colour, marker=marker, label=bound)
    left.axhline(exact.lower, color="black", linewidth=1, label="exact GP")
    right.axhline(exact.noise, color="black", linewidth=1, label="exact GP")
    left.set_ylabel("log evidence (nats)")
    right.set_ylabel("noise, standard deviation of y = 1")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [str(m) for m in sizes])
        ax.set_xlabel("inducing points")
        ax.legend(frameon=False, fontsize="small")
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="numbers of inducing points")
    parser.add_argument("--draws", type=int, default=200, help="draws of NUTS, and as many to warm up")
    parser.add_argument("--iterations", type=int, default=100, help="most iterations of L-BFGS")
    parser.add_argument("--data", type=Path, help="file with arrays X and y instead of the diabetes data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that all of it runs")
    args = parser.parse_args(argv)
    if args.quick:
        args.sizes, args.draws, args.iterations = [4, 8], 10, 20
    jax.config.update("jax_enable_x64", True)

    data = Data.load(args.data, args.seed)
    print(f"{len(data.y)} rows to learn from, {len(data.y_test)} to predict; {data.X.shape[1]} inputs.\n")
    print(f"{'points':>6s}  {'bound':12s}  {'lower':>9s}  {'upper':>9s}  {'noise':>6s}  {'test log p':>10s}")
    fits: dict[tuple[str, int], Fit] = {}
    for size in args.sizes:
        Z = init.kmeans(random.PRNGKey(args.seed), data.X, size)
        for bound in BOUNDS:
            fit = fits[bound, size] = Fit(data, Z, bound, args.iterations)
            print(
                f"{size:6d}  {bound:12s}  {fit.lower:9.2f}  {fit.upper:9.2f}  {fit.noise:6.3f}  {fit.score:10.4f}",
                flush=True,
            )
    exact = Fit(data, data.X, "titsias2009", args.iterations)
    print(
        f"{'all':>6s}  {'exact GP':12s}  {exact.lower:9.2f}  {exact.upper:9.2f}  {exact.noise:6.3f}  {exact.score:10.4f}"
    )

    size = args.sizes[-1]
    print(f"\n{args.draws} draws by NUTS, mean and standard deviation:")
    for name, points in ((f"{size} points", fits["titsias2025", size].params["Z"]), ("exact GP", data.X)):
        draws = draw(data, points, args.draws)
        parts = [f"{key} {float(draws[key].mean()):.3f} +- {float(draws[key].std()):.3f}" for key in ("noise", "scale")]
        print(f"{name:12s}  {',  '.join(parts)}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "regression.png", args.sizes, fits, exact)
    print(f"\nlower, upper: nats, at the mode of the hyperparameters. Wrote {args.out / 'regression.png'}.")


if __name__ == "__main__":
    main()
