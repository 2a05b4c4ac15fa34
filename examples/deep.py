"""Deep GPs: one, two and three layers, loose and tight, one set of inducing points in each layer or two.

    python examples/deep.py [--data FILE.npz] [--layers 2] [--num-inducing 100] [--steps 3000] [--batch-size 1000] [--draws 1]
                            [--seeds 1] [--out out] [--quick]

Without --data: 400 noisy values of a function of one variable with jumps of different height and a stretch that wiggles, which no
stationary kernel suits; a figure shows what each layer does. With --data: a file with arrays X (N, D) and y (N,); 90 % of its
rows to train, 10 % to test, all standardized. Inner layers have as many functions as there are inputs, at most --width, and the
identity (or principal directions) as their mean; the last one takes natural gradients, everything else Adam.
"""

from __future__ import annotations

import argparse
import time
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

positive = dist.constraints.positive


def model(X, y=None, *, N, sets, means, draws=1):
    """sets: for each layer its sets of inducing points; means: for each inner layer the matrix of its mean function."""
    layers = []
    for i, points in enumerate(sets):
        inner = i < len(means)
        lengthscale = numpyro.param(f"lengthscale{i}", jnp.full(points[0].shape[1], 2.0), constraint=positive)
        variance = numpyro.param(f"variance{i}", jnp.asarray(0.1 if inner else 1.0), constraint=positive)
        inducing = [numpyro.param(f"Z{i}.{j}", Z) for j, Z in enumerate(points)]
        num_latents = means[i].shape[1] if inner else None
        layers.append(ogp.gp(f"f{i}", variance * kernels.RBF(lengthscale), inducing, num_latents=num_latents))
    deep = ogp.DeepGP(layers, means)
    noise = numpyro.param("noise", jnp.asarray(0.3), constraint=positive)
    with numpyro.plate("data", N, subsample_size=len(X)):
        if draws == 1:
            likelihood = likelihoods.Gaussian(deep(X), noise)
        else:
            f, log_weights = deep.particles(X, draws)
            likelihood = likelihoods.Mixture(likelihoods.Gaussian(f, noise), log_weights)
        numpyro.sample("y", likelihood, obs=y)


class Data(NamedTuple):
    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array
    scale: float  # standard deviation of y, for log densities in its units


def jumps(x: np.ndarray) -> np.ndarray:
    steps = 1.0 * (x > -1.2) - 1.6 * (x > -0.3) + 1.0 * (x > 0.2)
    return steps + 0.4 * np.sin(12 * x) * (x > 0.6)


def load(path: Path | None, seed: int) -> Data:
    rng = np.random.default_rng(seed)
    if path is None:
        X = rng.uniform(-2, 2, (800, 1))
        y = jumps(X[:, 0]) + 0.1 * rng.normal(size=800)
        num_train = 400
    else:
        with np.load(path) as arrays:
            X, y = arrays["X"].astype(float), arrays["y"].astype(float)
        order = rng.permutation(len(X))
        X, y, num_train = X[order], y[order], int(0.9 * len(X))
    X = (X - X[:num_train].mean(0)) / X[:num_train].std(0)
    scale, y = y[:num_train].std(), (y - y[:num_train].mean()) / y[:num_train].std()
    X, y = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    return Data(X[:num_train], y[:num_train], X[num_train:], y[num_train:], float(scale))


class Method(NamedTuple):
    name: str
    layers: int
    sizes: tuple[int, ...]  # of the sets in each layer
    residual: str = "prior"


class Fit(NamedTuple):
    elbo: float
    deep: ogp.DeepGP
    noise: jax.Array
    ms_per_step: float


def start(data: Data, method: Method, width: int, seed: int) -> dict[str, Any]:
    """Means of the inner layers, and inducing points at centres of what comes out of these means."""
    H, sets, means = data.X, [], []
    for layer in range(method.layers):
        Z = init.kmeans(random.PRNGKey(seed), H[:5000], sum(method.sizes))
        Z = random.permutation(random.PRNGKey(seed + 1), Z)
        sets.append([Z[a : a + n] for a, n in zip(np.cumsum((0, *method.sizes)), method.sizes, strict=False)])
        if layer + 1 < method.layers:
            means.append(init.linear_mean(H, min(width, H.shape[1])))
            H = H @ means[-1]
    return {"sets": sets, "means": means}


def fit(data: Data, method: Method, args: argparse.Namespace, seed: int) -> Fit:
    kwargs = {"N": len(data.y), "draws": args.draws, **start(data, method, args.width, seed)}
    last = f"f{method.layers - 1}"
    inner = {f"f{i}": 0.01 for i in range(method.layers - 1)}
    guide = ogp.AutoSparseGP(model, residual=method.residual, natural={last: True}, init_scale=inner)
    schedule = optax.cosine_decay_schedule(0.01, args.steps)
    svi = SVI(model, guide, ogp.natural_gradient(optax.adam(schedule), 0.1, ramp_up=20), TraceMeanField_ELBO())
    size = min(args.batch_size, len(data.y))

    def update(state, key):
        rows = random.randint(key, (size,), 0, len(data.y)) if size < len(data.y) else slice(None)
        return svi.update(state, data.X[rows], data.y[rows], **kwargs)

    @jax.jit
    def run(state, keys):
        return lax.scan(update, state, keys)

    state = jax.jit(lambda: svi.init(random.PRNGKey(seed), data.X[:size], data.y[:size], **kwargs))()
    keys = random.split(random.PRNGKey(seed + 2), args.steps)
    tenth = max(1, args.steps // 10)
    begin, losses = None, jnp.zeros(1)
    for first in range(0, args.steps - tenth + 1, tenth):
        state, losses = jax.block_until_ready(run(state, keys[first : first + tenth]))
        begin = begin or (time.perf_counter(), first + tenth)  # without the compilation
    done = args.steps // tenth * tenth - begin[1]
    seconds = (time.perf_counter() - begin[0]) / max(done, 1)
    params = svi.get_params(state)
    X, y = data.X[:size], data.y[:size]
    functions = jax.jit(lambda p: ogp.posterior(model, guide, p, X, y, **kwargs))(params)
    layers = [functions[f"f{i}"] for i in range(method.layers)]
    return Fit(-float(losses.mean()), ogp.DeepGP(layers, kwargs["means"]), params["noise"], 1000 * seconds)


def test_scores(fitted: Fit, data: Data, num_draws: int, seed: int) -> tuple[float, float]:
    """Mean log density of the test data, in their own units, and the root of the mean squared error, in standard deviations."""

    @jax.jit
    def scores(X, y, key):
        f, log_weights = fitted.deep.particles(X, num_draws, rng_key=key)
        mixture = likelihoods.Mixture(likelihoods.Gaussian(f, fitted.noise), log_weights)
        return mixture.log_predictive(y), (mixture.mean - y) ** 2

    blocks = range(0, len(data.y_test), 500)
    parts = [scores(data.X_test[i : i + 500], data.y_test[i : i + 500], random.PRNGKey(seed + i)) for i in blocks]
    log_density, square = (np.concatenate([np.asarray(part[j]) for part in parts]) for j in range(2))
    return float(log_density.mean()) - np.log(data.scale), float(square.mean()) ** 0.5


def save_figure(path: Path, data: Data, fits: dict[str, Fit], seed: int) -> None:
    """One layer beside two, and what the inner layer does to the inputs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x = np.linspace(-1.75, 1.75, 400, dtype=np.float32)[:, None]
    figure, axes = plt.subplots(1, len(fits) + 1, figsize=(4.6 * (len(fits) + 1), 3.8), layout="constrained")
    for axis, (name, fitted) in zip(axes, fits.items(), strict=False):
        f, log_weights = fitted.deep.particles(x, 200, rng_key=random.PRNGKey(seed))
        mixture = likelihoods.Mixture(likelihoods.Gaussian(f, fitted.noise), log_weights)
        mean, deviation = np.asarray(mixture.mean), np.sqrt(np.asarray(mixture.variance))
        axis.plot(data.X[:, 0], data.y, ".", color="0.6", ms=3, label="data")
        axis.plot(x, mean, color="C0", label="predictive mean")
        axis.fill_between(
            x[:, 0], mean - 2 * deviation, mean + 2 * deviation, color="C0", alpha=0.25, label="2 sd of y"
        )
        axis.set(title=name, xlabel="x (standardized)", ylim=(-3, 3))
    axes[0].set_ylabel("y (standardized)")
    axes[0].legend(loc="lower left", fontsize=8)
    deep = list(fits.values())[-1].deep
    inner = deep.layers[0](x) + x @ deep.means[0]
    mean, deviation = np.asarray(inner.mean)[:, 0], np.sqrt(np.asarray(inner.variance))[:, 0]
    axes[-1].plot(x, mean, color="C1", label="mean")
    axes[-1].fill_between(x[:, 0], mean - 2 * deviation, mean + 2 * deviation, color="C1", alpha=0.25, label="2 sd")
    axes[-1].set(title="inner layer: inputs of the outer one", xlabel="x (standardized)", ylabel="f1(x) + x")
    axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def methods(args: argparse.Namespace) -> list[Method]:
    M, L = args.num_inducing, args.layers
    half = (M // 2, M - M // 2)
    return [
        Method(f"1 layer, SVGP({M})", 1, (M,)),
        Method(f"1 layer, SVGP({M}), tight", 1, (M,), "tight"),
        Method(f"{L} layers, SVGP({M})", L, (M,)),
        Method(f"{L} layers, SVGP({M}), tight", L, (M,), "tight"),
        Method(f"{L} layers, SOLVE-GP({half[0]}+{half[1]}), tight", L, half, "tight"),
        Method(f"{L} layers, SOLVE-GP({M}+{M}), tight", L, (M, M), "tight"),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="npz file with arrays X (N, D) and y (N,)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=8, help="most functions of an inner layer")
    parser.add_argument("--num-inducing", type=int, help="inducing points M of each layer; 20 without --data, else 100")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=1, help="draws of the inner layers for each point, while fitting")
    parser.add_argument("--seeds", type=int, default=1, help="number of splits and starts, from --seed on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.num_inducing = 20, 10
    args.num_inducing = args.num_inducing or (20 if args.data is None else 100)

    draws = 10 if args.quick else 100
    print(f"{'method':36s}  {'ELBO / N':>8s}  {'test log p':>16s}  {'test RMSE':>16s}  {'ms/step':>7s}")
    fits = {}
    for method in methods(args):
        rows = []
        for seed in range(args.seed, args.seed + args.seeds):
            data = load(args.data, seed)
            fitted = fit(data, method, args, seed)
            rows.append((fitted.elbo / len(data.y), *test_scores(fitted, data, draws, seed), fitted.ms_per_step))
        fits[method.name] = fitted
        elbo, log_p, rmse, ms = np.mean(rows, 0)
        errors = [""] * 2
        if args.seeds > 1:
            errors = [f" +- {e:.3f}" for e in np.std(rows, 0, ddof=1)[1:3] / args.seeds**0.5]
        print(
            f"{method.name:36s}  {elbo:8.3f}  {log_p:7.3f}{errors[0]:9s}  {rmse:7.3f}{errors[1]:9s}  {ms:7.2f}",
            flush=True,
        )
    print("\ntest log p: mean log density of a held-out y, in its own units; RMSE in standard deviations of y.")
    if args.data is None:
        args.out.mkdir(parents=True, exist_ok=True)
        shown = {name: fits[name] for name in list(fits)[1:4:2]}
        save_figure(args.out / "deep.png", data, shown, args.seed)
        print(f"Wrote {args.out / 'deep.png'}.")


if __name__ == "__main__":
    main()
