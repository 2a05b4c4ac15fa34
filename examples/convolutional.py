"""Pictures of digits: GPs that see patches against GPs that see whole images.

    python examples/convolutional.py [--steps 500] [--out out] [--seeds 0] [--quick]
    python examples/convolutional.py --data mnist.npz --sizes 750 --methods tick --steps 1200 --rate 0.02 --refine 300

A convolutional GP (van der Wilk et al. 2017) adds one function of 5 x 5 (here 3 x 3) patches over the picture, with learned
weights, so inducing points are patches; with TICK (Dutordoir et al. 2019) it also depends on where a patch is. By default
scikit-learn's digits, 8 x 8 pixels, 1200 to train on, 597 to test; ``FILE.npz`` may hold others as arrays ``X_train`` (N, H, W) of
bytes, ``y_train``, ``X_test``, ``y_test`` (MNIST). Compared: SVGP with an RBF kernel of images; convolutional SVGP, SOLVE-GP and
TICK with as many inducing variables. ``--minutes`` gives each method the same time instead of the same number of steps.

Nearly all of a step's time goes into covariances with patches, which change only with patches and hyperparameters. ``--refine``
adds steps for q alone: covariances with all images are computed once, and a feature that looks them up takes the patches' place.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from itertools import pairwise
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
from sklearn.datasets import load_digits

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods
from numpyro_orthgp.inducing import InducingPatches, InducingPoints

CHUNK = 25  # steps per dispatch
VARIANCE = 10.0  # of f, to start from
positive, real = dist.constraints.positive, dist.constraints.real


class Pictures(NamedTuple):
    X: jax.Array  # (N, H W), in [0, 1]
    y: jax.Array
    X_test: jax.Array
    y_test: np.ndarray
    shape: tuple[int, ...]


def load(path: Path | None, seed: int) -> Pictures:
    if path is None:
        X, y = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(y))
        X, y = X[order].astype(np.float32) / 16, y[order]
        return Pictures(jnp.asarray(X[:1200]), jnp.asarray(y[:1200]), jnp.asarray(X[1200:]), y[1200:], (8, 8))
    with np.load(path) as arrays:
        X, X_test = (np.float32(arrays[name]) / 255 for name in ("X_train", "X_test"))
        y, y_test = arrays["y_train"].astype(int), arrays["y_test"].astype(int)
    flat = (jnp.asarray(images.reshape(len(images), -1)) for images in (X, X_test))
    return Pictures(next(flat), jnp.asarray(y), next(flat), y_test, X.shape[1:])


class Method(NamedTuple):
    name: str
    kernel: str  # "rbf", "conv" or "tick"
    sizes: tuple[int, ...]


class Options(NamedTuple):
    patch: int
    batch_size: int
    steps: int
    minutes: float | None
    refine: int
    seed: int
    natural: float
    rate: float
    saved: Path | None
    out: Path


class Start(NamedTuple):
    """Where a fit begins, and what its kernel is made of."""

    method: Method
    sets: list[jax.Array]
    locations: list[jax.Array]  # of patches
    lengthscale: jax.Array
    shape: tuple[int, ...]
    patch: tuple[int, int]
    num_classes: int
    variance: Any


def start(data: Pictures, method: Method, options: Options) -> Start:
    """Inducing variables: clusters of images, or patches that are not of one colour and where they were."""
    rng, patch = np.random.default_rng(options.seed), (options.patch, options.patch)
    rows = data.X[rng.choice(len(data.X), min(len(data.X), 5000), replace=False)]
    ends, where = np.cumsum(method.sizes)[:-1], np.zeros((sum(method.sizes), 2), np.float32)
    if method.kernel == "rbf":
        Z = np.asarray(init.kmeans(random.PRNGKey(options.seed), rows, len(where), num_iters=10))
        Z = Z[rng.permutation(len(Z))]  # each set is of all kinds
    else:
        patches = np.asarray(kernels.extract_patches(rows, data.shape, patch)).reshape(-1, options.patch**2)
        several = np.flatnonzero(patches.std(-1) > 0.1)
        _, first = np.unique(patches[several], axis=0, return_index=True)
        picked = several[rng.choice(first, len(where), replace=False)]
        Z = patches[picked]
        grid = kernels.PatchGrid.checked(data.shape, patch)
        where = np.asarray(grid.positions, np.float32)[picked % grid.num_patches]
        rows = jnp.asarray(Z)
    sets, locations = ([jnp.asarray(part) for part in np.split(a, ends)] for a in (Z, where))
    begin = Start(
        method, sets, locations, init.median_lengthscale(rows) / 2, data.shape, patch, int(data.y.max()) + 1, 1.0
    )
    variance = jax.jit(lambda X: prior(lambda _, value: value, begin)[0](X).mean())(data.X[:50])
    return begin._replace(variance=VARIANCE / variance)


def prior(param: Any, begin: Start) -> tuple[Any, list[Any]]:
    """The kernel and the sets of inducing variables; ``param(name, start)`` gives parameters their values."""
    variance = param("variance", jnp.asarray(begin.variance))
    base = kernels.RBF(param("lengthscale", begin.lengthscale))
    sets = [param(f"Z{i}", Z) for i, Z in enumerate(begin.sets)]
    if begin.method.kernel == "rbf":
        return variance * base, [InducingPoints(Z) for Z in sets]
    location, places = None, [None for _ in sets]
    if begin.method.kernel == "tick":
        location = kernels.Matern32(param("location_lengthscale", jnp.asarray(begin.shape[0] / 4.0)))
        places = [param(f"location{i}", place) for i, place in enumerate(begin.locations)]
    P = kernels.PatchGrid.checked(begin.shape, begin.patch).num_patches
    # Relative to 1/P, so that they are of order one, as optimizers like.
    weights = param("weights", jnp.ones(P)) / P
    kernel = kernels.Convolutional(
        base, image_shape=begin.shape, patch_shape=begin.patch, weights=weights, location=location
    )
    return variance * kernel, [InducingPatches(Z, place) for Z, place in zip(sets, places, strict=True)]


def model(X, y=None, *, N, begin):
    def param(name, start):
        return numpyro.param(name, start, constraint=positive if name.endswith(("lengthscale", "variance")) else real)

    classify(ogp.gp("f", *prior(param, begin), num_latents=begin.num_classes), X, y, N)


def classify(f, X, y, N):
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Categorical(f(X)), obs=y)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Known:
    """Inducing variables whose covariances with an input are columns of it, and among themselves a block of a matrix."""

    matrix: jax.Array
    columns: slice = field(metadata={"static": True})

    @property
    def num(self) -> int:
        return self.columns.stop - self.columns.start

    @property
    def dtype(self) -> Any:
        return self.matrix.dtype

    def covariance(self, kernel: Any, other: Known) -> jax.Array:
        return self.matrix[self.columns, other.columns]

    def covariance_with_inputs(self, kernel: Any, X: jax.Array) -> jax.Array:
        return X[:, self.columns].T


def last_column(X1, X2=None):
    """The kernel beside `Known` features: inputs end with their variance."""
    return X1[:, -1]


def known_model(C, y=None, *, N, features, num_classes):
    classify(ogp.gp("f", last_column, features, num_latents=num_classes), C, y, N)


def optimizer(natural: float, num_steps: int, rate: float = 0.01) -> Any:
    # A natural step of length r replaces a share r of what q knows by what this minibatch says: it has to shrink.
    lengths = optax.cosine_decay_schedule(natural, num_steps, 0.02)
    return ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(rate, num_steps, 0.01)), lengths, ramp_up=20)


class Trainer:
    """Minibatch SVI in chunks of steps, minibatches drawn inside; ``kwargs`` are the model's."""

    def __init__(self, model: Any, optimizer: Any, batch_size: int, seed: int, **kwargs: Any) -> None:
        self.guide = ogp.AutoSparseGP(model, natural=True)
        self.svi = SVI(model, self.guide, optimizer, TraceMeanField_ELBO())
        self.model, self.batch_size, self.key, self.kwargs = model, batch_size, random.PRNGKey(seed), kwargs
        self.chunk = jax.jit(self._chunk)

    def init(self, X: jax.Array, y: jax.Array, params: dict[str, Any] | None = None) -> Any:
        first = X[: self.batch_size], y[: self.batch_size]
        return jax.jit(lambda *batch: self.svi.init(self.key, *batch, init_params=params, **self.kwargs))(*first)

    def _chunk(self, state: Any, X: jax.Array, y: jax.Array, i: jax.Array) -> tuple[Any, jax.Array]:
        rows = random.randint(random.fold_in(self.key, i), (CHUNK, self.batch_size), 0, len(X))
        state, losses = lax.scan(lambda s, r: self.svi.update(s, X[r], y[r], **self.kwargs), state, rows)
        return state, -losses.mean()

    def run(
        self, state: Any, X: jax.Array, y: jax.Array, num_chunks: int, path: Path, every: int = 10
    ) -> tuple[Any, float]:
        """The state after all steps, and the seconds they took without compilation; parameters are saved on the way."""
        chunk = self.chunk.lower(state, X, y, jnp.asarray(0)).compile()
        begin = time.perf_counter()
        for i in range(num_chunks):
            state, elbo = chunk(state, X, y, jnp.asarray(i))
            if (i + 1) % every == 0 or i + 1 == num_chunks:
                np.savez(path, **{k: np.asarray(v) for k, v in self.svi.get_params(state).items()})
                if len(X) > 10_000:  # long runs report
                    print(f"  step {CHUNK * (i + 1)}, {time.perf_counter() - begin:.0f} s, ELBO {elbo:.0f}", flush=True)
        jax.block_until_ready(state)
        return state, time.perf_counter() - begin

    def probs(self, params: dict[str, Any], X: jax.Array, X_test: jax.Array, size: int = 500) -> np.ndarray:
        """Predictive probabilities of the classes, in batches of rows."""

        @jax.jit
        def predict(params: dict[str, Any], rows: jax.Array) -> jax.Array:
            f = ogp.posterior(self.model, self.guide, params, X[: self.batch_size], **self.kwargs)["f"]
            return likelihoods.Categorical(f(rows), integrator=ogp.QuasiMonteCarlo(512)).probs

        return np.concatenate([predict(params, X_test[i : i + size]) for i in range(0, len(X_test), size)])


class Result(NamedTuple):
    probs: np.ndarray
    steps: int
    seconds: float  # per step
    total: float  # seconds, refinement included
    params: dict[str, np.ndarray]


def fit(data: Pictures, method: Method, options: Options) -> Result:
    begin = start(data, method, options)
    path = options.out / f"{method.kernel}_{'_'.join(map(str, method.sizes))}.npz"
    params = None if options.saved is None else dict(np.load(options.saved))

    def prepare(steps: int) -> tuple[Trainer, Any]:
        optimize, kwargs = optimizer(options.natural, steps, options.rate), {"N": len(data.X), "begin": begin}
        trainer = Trainer(model, optimize, options.batch_size, options.seed, **kwargs)
        return trainer, trainer.init(data.X, data.y, params)

    steps = options.steps
    trainer, state = prepare(steps)
    if options.minutes is not None:
        _, seconds = trainer.run(state, data.X, data.y, 1, path)
        steps = max(1, int(60 * options.minutes / seconds)) * CHUNK
        trainer, state = prepare(steps)
    tick = time.perf_counter()
    state, seconds = trainer.run(state, data.X, data.y, -(-steps // CHUNK), path)
    params = trainer.svi.get_params(state)
    if options.refine:
        probs = refine(data, begin, options, params, path)
    else:
        probs = trainer.probs(params, data.X, data.X_test)
    total = time.perf_counter() - tick
    return Result(probs, steps, seconds / max(steps, 1), total, {k: np.asarray(v) for k, v in params.items()})


def refine(data: Pictures, begin: Start, options: Options, params: dict[str, Any], path: Path) -> np.ndarray:
    """Steps of q alone, kernel and inducing variables fixed; the predictive probabilities after these."""

    @jax.jit
    def with_images(params: dict[str, Any], X: jax.Array) -> jax.Array:
        kernel, features = prior(lambda name, _: params[name], begin)
        rows = [s.covariance_with_inputs(kernel, X).T for s in features]
        return jnp.concatenate([*rows, kernel(X)[:, None]], 1)

    kernel, features = prior(lambda name, _: params[name], begin)
    matrix = jnp.block([[a.covariance(kernel, b) for b in features] for a in features])
    ends = np.cumsum([0, *begin.method.sizes])
    known = [Known(matrix, slice(int(a), int(b))) for a, b in pairwise(ends)]

    def table(X: jax.Array) -> jax.Array:
        return jnp.concatenate([with_images(params, X[i : i + 1000]) for i in range(0, len(X), 1000)])

    C = table(data.X)
    kwargs = {"N": len(data.X), "features": known, "num_classes": begin.num_classes}
    trainer = Trainer(
        known_model, optimizer(options.natural, options.refine), min(1000, len(data.X)), options.seed, **kwargs
    )
    q = {name: value for name, value in params.items() if name.startswith("f.")}
    state, _ = trainer.run(
        trainer.init(C, data.y, q), C, data.y, -(-options.refine // CHUNK), path.with_suffix(".q.npz"), 2
    )
    params |= trainer.svi.get_params(state)
    return trainer.probs(params, C, table(data.X_test))


def save_figure(path: Path, data: Pictures, patch: int, name: str, result: Result) -> None:
    """Inducing patches, the map of weights, and the test pictures with the lowest probability of the right digit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def mosaic(pictures: np.ndarray, across: int) -> np.ndarray:
        """Pictures (n, h, w) side by side, with white lines between them."""
        n, h, w = pictures.shape
        padded = np.pad(pictures, ((0, -n % across), (0, 1), (0, 1)), constant_values=np.nan)
        return padded.reshape(-1, across, h + 1, w + 1).swapaxes(1, 2).reshape(-1, across * (w + 1))

    figure, axes = plt.subplots(1, 3, figsize=(12, 4.6), layout="constrained")
    figure.suptitle(name)
    Z = np.concatenate([v for k, v in sorted(result.params.items()) if k.startswith("Z")])[:100]
    axes[0].imshow(mosaic(Z.reshape(-1, patch, patch), 10), cmap="gray_r", vmin=0, vmax=1)
    axes[0].set(title=f"{len(Z)} of the inducing patches", xticks=[], yticks=[])
    weights = result.params["weights"].reshape([n - patch + 1 for n in data.shape])
    limit = np.abs(weights).max()
    image = axes[1].imshow(weights, cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes[1].set(title="weights of patches, times their number", xlabel="column of the patch", ylabel="row of the patch")
    figure.colorbar(image, ax=axes[1], shrink=0.8)
    hardest = np.argsort(result.probs[np.arange(len(result.probs)), data.y_test])[:16]
    axes[2].imshow(mosaic(np.asarray(data.X_test)[hardest].reshape(-1, *data.shape), 4), cmap="gray_r")
    for i, row in enumerate(hardest):
        x, y = (i % 4) * (data.shape[1] + 1), (i // 4) * (data.shape[0] + 1)
        text = f"{data.y_test[row]} as {result.probs[row].argmax()}"
        axes[2].text(x, y, text, color="#D55E00", fontsize=8, va="top")
    axes[2].set(title="lowest probability of the right digit", xticks=[], yticks=[])
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="npz file with X_train (N, H, W) of bytes, y_train, X_test, y_test")
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="inducing variables of SVGP, then those of SOLVE-GP's sets"
    )
    parser.add_argument("--patch", type=int, help="side of a patch, in pixels")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["rbf", "conv", "solve", "tick"],
        choices=["rbf", "conv", "solve", "tick", "tick-solve"],
    )
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--steps", type=int, default=500, help="steps of each method")
    parser.add_argument("--minutes", type=float, help="training time of each method, instead of --steps")
    parser.add_argument("--refine", type=int, default=0, help="further steps, of batches of 1000, for q alone")
    parser.add_argument("--saved", type=Path, help="parameters that a run has left in the folder, to go on from")
    parser.add_argument("--natural", type=float, default=0.1, help="length of the first natural-gradient steps")
    parser.add_argument("--rate", type=float, default=0.01, help="Adam's first rate, for everything else")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure and the parameters")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all of it runs")
    args = parser.parse_args(argv)
    sizes = args.sizes or ([20, 10, 10] if args.quick else [100, 50, 50])
    sets = sizes[1:] or [sizes[0] // 2, sizes[0] - sizes[0] // 2]
    methods = {
        "rbf": Method(f"SVGP ({sizes[0]}), RBF", "rbf", (sizes[0],)),
        "conv": Method(f"SVGP ({sizes[0]}), convolutional", "conv", (sizes[0],)),
        "solve": Method(f"SOLVE-GP ({'+'.join(map(str, sets))}), convolutional", "conv", tuple(sets)),
        "tick": Method(f"SVGP ({sizes[0]}), TICK", "tick", (sizes[0],)),
        "tick-solve": Method(f"SOLVE-GP ({'+'.join(map(str, sets))}), TICK", "tick", tuple(sets)),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    patch, steps = args.patch or (3 if args.data is None else 5), CHUNK if args.quick else args.steps
    print(
        f"{'method':36s}  {'seed':>4s}  {'test error':>10s}  {'test log p':>10s}  {'steps':>6s}  {'ms/step':>7s}  {'s':>6s}"
    )
    for seed in args.seeds:
        data = load(args.data, seed)
        numbers = patch, args.batch_size, steps, args.minutes, args.refine, seed
        options = Options(*numbers, args.natural, args.rate, args.saved, args.out)
        for name in args.methods:
            report(data, methods[name], fit(data, methods[name], options), options)
    print("\ntest log p: mean log predictive probability of a test label, nats. s: seconds, all steps and predictions.")
    if args.methods != ["rbf"]:
        print(f"Wrote {args.out / 'convolutional.png'}.")


def report(data: Pictures, method: Method, result: Result, options: Options) -> None:
    error = 100 * float((result.probs.argmax(-1) != data.y_test).mean())
    log_p = np.log(result.probs[np.arange(len(data.y_test)), data.y_test]).mean()
    times = f"{result.steps:6d}  {1e3 * result.seconds:7.1f}  {result.total:6.0f}"
    print(f"{method.name:36s}  {options.seed:4d}  {error:8.2f} %  {log_p:10.4f}  {times}", flush=True)
    if method.kernel != "rbf":
        save_figure(options.out / "convolutional.png", data, options.patch, method.name, result)


if __name__ == "__main__":
    main()
