"""Handwritten digits, all ten classes: one function for each, and two ways to turn them into probabilities.

    python examples/digits.py [--steps 300] [--num-inducing 100] [--out out] [--seed 0] [--quick]

scikit-learn's digits, 1200 to train on, 597 to test. Ten GPs share a kernel and inducing points. Compared: the softmax, whose
expectation is taken by quasi-Monte Carlo over ten dimensions, and the robust-max, a one-dimensional integral; SVGP against SOLVE-GP
with the same number of points in two sets; natural gradients against Adam alone, the same number of steps each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro.infer import SVI, TraceMeanField_ELBO
from sklearn.datasets import load_digits

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods

NUM_TRAIN, BATCH_SIZE, CLASSES = 1200, 200, 10


def model(X, y=None, *, N, sets, link):
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", jnp.asarray(4.0), constraint=positive)
    scale = numpyro.param("scale", jnp.asarray(4.0), constraint=positive)
    sets = [numpyro.param(f"Z{i}", points) for i, points in enumerate(sets)]
    f = ogp.gp("f", scale**2 * kernels.Matern52(lengthscale), sets, num_latents=CLASSES)
    with numpyro.plate("data", N, subsample_size=len(X)):
        return numpyro.sample("y", likelihoods.Categorical(f(X), link=link), obs=y)


class Digits(NamedTuple):
    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: np.ndarray


def load(seed: int) -> Digits:
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    X, y = X[order].astype(np.float32) / 16, y[order]
    return Digits(jnp.asarray(X[:NUM_TRAIN]), jnp.asarray(y[:NUM_TRAIN]), jnp.asarray(X[NUM_TRAIN:]), y[NUM_TRAIN:])


class Method(NamedTuple):
    name: str
    sizes: tuple[int, ...]
    link: str
    natural: bool


class Result(NamedTuple):
    probs: np.ndarray
    log_p: float
    error: float
    seconds: float


def fit(data: Digits, method: Method, num_steps: int, seed: int) -> Result:
    Z = init.kmeans(random.PRNGKey(seed), data.X, method.sizes[0])
    sets = [Z, *(init.greedy_variance(kernels.Matern52(4.0), data.X, n, given=Z) for n in method.sizes[1:])]
    kwargs = {"N": NUM_TRAIN, "sets": sets, "link": method.link}
    rows = np.random.default_rng(seed).integers(0, NUM_TRAIN, (num_steps, BATCH_SIZE))
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, num_steps))
    if method.natural:
        # The robust-max is not log-concave: long steps early on end in a poor optimum, so they grow slowly.
        rate, ramp_up = (0.1, 10) if method.link == "softmax" else (0.05, 100)
        optimizer = ogp.natural_gradient(optimizer, rate, ramp_up=ramp_up)
    guide = ogp.AutoSparseGP(model, natural=method.natural)
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())

    @jax.jit
    def start():
        return svi.init(random.PRNGKey(seed), data.X[:BATCH_SIZE], data.y[:BATCH_SIZE], **kwargs)

    @jax.jit
    def run(state, rows):
        return lax.scan(lambda s, r: (svi.update(s, data.X[r], data.y[r], **kwargs)[0], None), state, rows)[0]

    @jax.jit
    def predict(params):
        f = ogp.posterior(model, guide, params, data.X[:BATCH_SIZE], data.y[:BATCH_SIZE], **kwargs)["f"]
        return likelihoods.Categorical(f(data.X_test), link=method.link, integrator=integrator).probs

    integrator = ogp.QuasiMonteCarlo(1024) if method.link == "softmax" else ogp.GaussHermite(50)
    state = start()
    compiled = run.lower(state, rows).compile()
    begin = time.perf_counter()
    state = jax.block_until_ready(compiled(state, rows))
    seconds = time.perf_counter() - begin
    p = np.asarray(predict(svi.get_params(state)))
    right = p[np.arange(len(p)), data.y_test]
    return Result(p, float(np.log(right).mean()), 100 * float((p.argmax(-1) != data.y_test).mean()), seconds)


def save_figure(path: Path, data: Digits, result: Result, name: str) -> None:
    """The test pictures that were hardest: what they were taken for."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hardest = np.argsort(result.probs[np.arange(len(result.probs)), data.y_test])[:12]
    figure, axes = plt.subplots(2, 12, figsize=(12, 2.9), layout="constrained", height_ratios=(1.2, 1))
    figure.suptitle(f"{name}: the test pictures with the lowest probability of the right digit (orange)", fontsize=11)
    for (top, bottom), i in zip(axes.T, hardest, strict=True):
        top.imshow(np.asarray(data.X_test[i]).reshape(8, 8), cmap="gray_r")
        top.set(xticks=[], yticks=[])
        colours = np.where(np.arange(CLASSES) == data.y_test[i], "#D55E00", "#0072B2")
        bottom.bar(np.arange(CLASSES), result.probs[i], color=colours)
        bottom.set(ylim=(0, 1), xticks=[0, 3, 6, 9], yticks=[0, 1] if top is axes[0, 0] else [])
        bottom.tick_params(labelsize=8)
    axes[1, 0].set_ylabel("probability")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps of each method")
    parser.add_argument("--num-inducing", type=int, default=100, help="inducing points, in one set or in two halves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="a few steps and points, to see that all of it runs")
    args = parser.parse_args(argv)
    steps, M = (10, 20) if args.quick else (args.steps, args.num_inducing)

    data, halves = load(args.seed), (M // 2, M - M // 2)
    methods = [
        Method("SVGP, softmax, Adam", (M,), "softmax", False),
        Method("SVGP, softmax", (M,), "softmax", True),
        Method("SOLVE-GP, softmax", halves, "softmax", True),
        Method("SOLVE-GP, robust-max", halves, "robustmax", True),
    ]
    print(
        f"{NUM_TRAIN} pictures to train, {len(data.y_test)} to test; {M} inducing points, {steps} steps, batches of {BATCH_SIZE}.\n"
    )
    print(f"{'method':22s}  {'test log p':>10s}  {'test error':>10s}  {'ms/step':>7s}")
    results = {}
    for method in methods:
        result = results[method.name] = fit(data, method, steps, args.seed)
        print(f"{method.name:22s}  {result.log_p:10.3f}  {result.error:8.2f} %  {1e3 * result.seconds / steps:7.1f}")
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "digits.png", data, results["SOLVE-GP, softmax"], "SOLVE-GP, softmax")
    print("\nNatural gradients unless it says Adam. test log p: mean log predictive probability of a test label, nats.")
    print(f"Wrote {args.out / 'digits.png'}.")


if __name__ == "__main__":
    main()
