"""CIFAR-10 by convolutional GPs of one, two and three layers: Tables 1-2 and 7-9 of Shi, Titsias, Mnih 2020.

    python benchmarks/cifar10.py --data cifar10_jpeg.npz                               # all rows, as in the paper; needs a GPU
    python benchmarks/cifar10.py --data cifar10_jpeg.npz --rows 1-svgp 1-solve 2-solve --images 2000 --steps 200 --scale 0.05

``FILE.npz`` holds ``jpeg``, the bytes of all files one after another, ``offset``, ``label`` and ``is_test``. (JPEG loses detail, so
the numbers are not quite comparable.) Outputs of every model are ten convolutional GPs with TICK kernels (Dutordoir et al. 2019):
5 x 5 patches over all colours, an RBF kernel of patches times a Matern 3/2 kernel of where they are, learned weights. Layers before
are functions of patches with ten channels: 5 x 5, then 4 x 4 with stride 2. The paper tells inducing patches per layer and nothing
of geometry, batch size or optimizer; those are ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
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
from numpyro_orthgp.functions.images import patchwise, patchwise_mean
from numpyro_orthgp.inducing import InducingPatches

CHANNELS, CLASSES, PATCH, CHUNK = 10, 10, (5, 5), 25
HIDDEN = [((5, 5), 1), ((4, 4), 2)]  # patch and stride of the layers before the last


class Row(NamedTuple):
    """One row of the paper's tables: inducing patches of each set of each layer, and what they report."""

    method: str
    sizes: tuple[tuple[int, ...], ...]
    accuracy: float
    log_p: float
    seconds: float


ROWS = {
    "1-svgp": Row("SVGP", ((1000,),), 66.07, -1.59, 0.241),
    "1-svgp-1.6k": Row("SVGP", ((1600,),), 67.18, -1.54, 0.380),
    "1-solve": Row("SOLVE-GP", ((1000, 1000),), 68.19, -1.51, 0.370),
    "1-svgp-2k": Row("SVGP", ((2000,),), 68.06, -1.48, 0.474),
    "2-svgp": Row("SVGP", ((384,), (1000,)), 76.35, -1.04, 0.392),
    "2-solve": Row("SOLVE-GP", ((384, 384), (1000, 1000)), 77.80, -0.98, 0.657),
    "2-svgp-2x": Row("SVGP", ((768,), (2000,)), 77.46, -0.98, 1.104),
    "3-svgp": Row("SVGP", ((384,), (384,), (1000,)), 78.76, -0.88, 0.418),
    "3-solve": Row("SOLVE-GP", ((384, 384), (384, 384), (1000, 1000)), 80.30, -0.79, 0.752),
    "3-svgp-2x": Row("SVGP", ((768,), (768,), (2000,)), 80.33, -0.82, 1.246),
}


class Images(NamedTuple):
    X: jax.Array  # (N, 32 * 32 * 3), in [0, 1]
    y: jax.Array
    X_test: jax.Array
    y_test: np.ndarray


def load(path: Path, num_train: int | None, num_test: int | None, seed: int) -> Images:
    try:
        from PIL import Image
    except ImportError as error:
        raise SystemExit("Reading JPEG files needs Pillow: pip install pillow.") from error
    with np.load(path) as arrays:
        jpeg, offset, label, is_test = (arrays[name] for name in ("jpeg", "offset", "label", "is_test"))
    rng = np.random.default_rng(seed)

    def pick(which: np.ndarray, num: int | None) -> tuple[jax.Array, np.ndarray]:
        rows = rng.permutation(np.flatnonzero(which))[:num]
        files = (jpeg[offset[i] : offset[i + 1]].tobytes() for i in rows)
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])
        return jnp.asarray(np.float32(pixels.reshape(len(rows), -1)) / 255), label[rows].astype(int)

    (X, y), (X_test, y_test) = pick(~is_test, num_train), pick(is_test, num_test)
    return Images(X, jnp.asarray(y), X_test, y_test)


class Layer(NamedTuple):
    """Where a hidden layer's patches are, or the last layer's."""

    image: tuple[int, int, int]
    patch: tuple[int, int]
    stride: int

    @property
    def where(self) -> dict[str, Any]:
        return {"image_shape": self.image, "patch_shape": self.patch, "stride": self.stride}

    @property
    def grid(self) -> kernels.PatchGrid:
        return kernels.PatchGrid.checked(self.image, self.patch, self.stride)

    def mean(self, X: jax.Array) -> jax.Array:
        """The centre pixel: its average colour in each channel in the first layer, itself in others."""
        C = self.image[2]
        return patchwise_mean(X, None if C == CHANNELS else jnp.ones((C, CHANNELS), X.dtype) / C, **self.where)


def geometry(num_layers: int) -> list[Layer]:
    image, layers = (32, 32, 3), []
    for patch, stride in HIDDEN[: num_layers - 1]:
        layers.append(Layer(image, patch, stride))
        image = (*layers[-1].grid.shape, CHANNELS)
    return [*layers, Layer(image, PATCH, 1)]


class Setting(NamedTuple):
    """What the model is made of beside parameters: layers, starting points of each set and lengthscales of each layer."""

    layers: list[Layer]
    patches: list[list[jax.Array]]
    places: list[jax.Array]  # of the last layer's sets
    lengthscales: list[jax.Array]
    max_entries: int


def setting(X: jax.Array, row: Row, scale: float, max_entries: int, seed: int) -> Setting:
    """Inducing patches are drawn from images, those of later layers from what the mean functions make of them."""
    layers, rng = geometry(len(row.sizes)), np.random.default_rng(seed)
    patches, places, lengthscales, h = [], [], [], X[rng.choice(len(X), min(len(X), 500), replace=False)]
    for layer, sizes in zip(layers, row.sizes, strict=True):
        sizes = [max(8, round(scale * size)) for size in sizes]
        cut = np.asarray(kernels.extract_patches(h, layer.image, layer.patch, layer.stride))
        flat = cut.reshape(-1, cut.shape[-1])
        rows = rng.choice(len(flat), min(len(flat), max(5000, 2 * sum(sizes))), replace=False)
        chosen, ends = flat[rows[: sum(sizes)]], np.cumsum(sizes)[:-1]
        patches.append([jnp.asarray(Z) for Z in np.split(chosen, ends)])
        at = layer.grid.positions[rows[: sum(sizes)] % cut.shape[1]].astype(np.float32)
        places = [jnp.asarray(p) for p in np.split(at, ends)]
        lengthscales.append(init.median_lengthscale(jnp.asarray(flat[rows])))
        h = layer.mean(h) if layer is not layers[-1] else h
    return Setting(layers, patches, places, lengthscales, max_entries)


def functions(s: Setting) -> list[Any]:
    """The gp of each layer."""

    def learned(name, start):
        return numpyro.param(name, jnp.asarray(start, jnp.float32), constraint=dist.constraints.positive)

    fs = []
    for i, (layer, sets) in enumerate(zip(s.layers, s.patches, strict=True)):
        Zs = [numpyro.param(f"Z{i}.{j}", Z) for j, Z in enumerate(sets)]
        base, last = kernels.RBF(learned(f"lengthscale{i}", s.lengthscales[i])), layer is s.layers[-1]
        variance = learned(f"variance{i}", 10.0 if last else 0.1)
        if not last:
            fs.append(ogp.gp(f"f{i}", variance * base, Zs, num_latents=CHANNELS))
            continue
        P = layer.grid.num_patches
        tick = kernels.Convolutional(
            base,
            weights=numpyro.param("weights", jnp.ones(P, jnp.float32)) / P,
            location=kernels.Matern32(learned("reach", 5.0)),
            max_entries=s.max_entries,
            **layer.where,
        )
        places = [numpyro.param(f"place{j}", at) for j, at in enumerate(s.places)]
        sets = [InducingPatches(Z, at) for Z, at in zip(Zs, places, strict=True)]
        fs.append(ogp.gp("f", variance * tick, sets, num_latents=CLASSES))
    return fs


def hidden(s: Setting, fs: list[Any]) -> list[Any]:
    """What turns each layer's input into marginals of its output, before the last."""
    return [
        lambda h, f=f, layer=layer: patchwise(f, h, max_entries=s.max_entries, **layer.where) + layer.mean(h)
        for f, layer in zip(fs[:-1], s.layers[:-1], strict=True)
    ]


def model(X, y=None, *, N, s):
    fs = functions(s)
    with numpyro.plate("data", N, subsample_size=len(X)):
        h = X
        for layer in hidden(s, fs):
            h = layer(h).sample()
        numpyro.sample("y", likelihoods.Categorical(fs[-1](h)), obs=y)


class Result(NamedTuple):
    accuracy: float
    log_p: float
    train_accuracy: float
    seconds: float


class Fit:
    """One row's model and its training."""

    def __init__(self, data: Images, row: Row, args: argparse.Namespace) -> None:
        self.data, self.args, self.key = data, args, random.PRNGKey(args.seed)
        self.s = setting(data.X, row, args.scale, args.max_entries, args.seed)
        self.kwargs = {"N": len(data.X), "s": self.s}
        self.first = data.X[: args.batch_size], data.y[: args.batch_size]
        self.inner = [f"f{i}" for i in range(len(row.sizes) - 1)]
        # Hidden layers start as their mean functions; their Gaussians follow Adam, whose steps noise does not throw off.
        self.guide = ogp.AutoSparseGP(
            model,
            natural={"f": True} | dict.fromkeys(self.inner, False),
            init_scale={"f": 1.0} | dict.fromkeys(self.inner, 0.01),
        )
        adam = optax.adam(optax.cosine_decay_schedule(args.rate, args.steps, 0.01))
        lengths = optax.cosine_decay_schedule(0.1, args.steps, 0.05)
        optimizer = ogp.natural_gradient(adam, lengths, ramp_up=20)
        self.svi = SVI(model, self.guide, optimizer, TraceMeanField_ELBO())
        self.chunk, self.predict = jax.jit(self._chunk), jax.jit(self._predict)

    def _chunk(self, state: Any, X: jax.Array, y: jax.Array, i: jax.Array) -> Any:
        def step(state: Any, j: jax.Array) -> Any:
            rows = random.randint(random.fold_in(self.key, j), (self.args.batch_size,), 0, len(X))
            return self.svi.update(state, X[rows], y[rows], **self.kwargs)

        return lax.scan(step, state, i * CHUNK + jnp.arange(CHUNK))

    def train(self) -> tuple[dict[str, Any], float]:
        """Parameters after all steps, and seconds per step, compilation left out."""
        X, y = self.data.X, self.data.y
        state = jax.jit(lambda *batch: self.svi.init(self.key, *batch, **self.kwargs))(*self.first)
        state, _ = jax.block_until_ready(self.chunk(state, X, y, jnp.asarray(0)))
        begin, chunks = time.perf_counter(), max(1, self.args.steps // CHUNK - 1)
        for i in range(1, chunks + 1):
            state, losses = self.chunk(state, X, y, jnp.asarray(i))
            if i % 40 == 0:
                print(f"  step {CHUNK * (i + 1)}, ELBO per image {-losses.mean() / len(X):.3f}", flush=True)
        jax.block_until_ready(state)
        return self.svi.get_params(state), (time.perf_counter() - begin) / (chunks * CHUNK)

    def _predict(self, params: dict[str, Any], key: jax.Array, X: jax.Array) -> jax.Array:
        """Predictive probabilities of the classes, shape (B, 10), averaged over draws of the hidden layers."""
        found = ogp.posterior(model, self.guide, params, *self.first, **self.kwargs)
        # Draws that share inducing variables within an image, as in training, and not within all images of a batch.
        fs = [dataclasses.replace(found[name], fitting=True) for name in (*self.inner, "f")]

        def draw(key: jax.Array) -> jax.Array:
            h = X
            for i, layer in enumerate(hidden(self.s, fs)):
                h = layer(h).draw(random.fold_in(key, i))
            return likelihoods.Categorical(fs[-1](h), integrator=ogp.QuasiMonteCarlo(512)).probs

        return lax.map(draw, random.split(key, self.args.draws if self.inner else 1)).mean(0)

    def scores(self, params: dict[str, Any], X: jax.Array, y: Any, size: int = 100) -> tuple[float, float]:
        """Accuracy in % and mean log predictive probability."""
        keys, y = random.split(self.key, -(-len(X) // size)), np.asarray(y)
        p = np.concatenate([self.predict(params, key, X[i * size : (i + 1) * size]) for i, key in enumerate(keys)])
        return 100 * float((p.argmax(-1) == y).mean()), float(np.log(p[np.arange(len(y)), y]).mean())


def fit(data: Images, row: Row, args: argparse.Namespace) -> Result:
    fit = Fit(data, row, args)
    params, seconds = fit.train()
    train, _ = fit.scores(params, data.X[:1000], data.y[:1000])
    return Result(*fit.scores(params, data.X_test, data.y_test), train, seconds)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="npz file of JPEG bytes, see above")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}"
    )
    parser.add_argument("--images", type=int, help="training images, of 50000")
    parser.add_argument("--test-images", type=int, help="test images, of 10000")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all numbers of inducing patches")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.01, help="Adam's first rate")
    parser.add_argument("--draws", type=int, default=5, help="draws of the hidden layers for predictions")
    parser.add_argument(
        "--max-entries", type=int, default=2**20, help="kernel values held at once; 2**26 suits large GPUs"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    data = load(args.data, args.images, args.test_images, args.seed)
    print(
        f"{len(data.y)} images to train, {len(data.y_test)} to test; {args.steps} steps of {args.batch_size} images; inducing "
        f"patches times {args.scale}. In brackets: Shi et al. 2020, all images, lossless.\n"
    )
    print(
        f"{'method':10s}{'inducing patches':34s}  {'test accuracy':>17s}  {'test log p':>15s}  {'train':>7s}  {'s/step':>15s}"
    )
    for name in args.rows:
        row = ROWS[name]
        result = fit(data, row, args)
        sizes = ", ".join("+".join(str(max(8, round(args.scale * m))) for m in sets) for sets in row.sizes)
        accuracy, log_p = f"{result.accuracy:.2f} % ({row.accuracy:.2f})", f"{result.log_p:.3f} ({row.log_p:.2f})"
        times = f"{result.seconds:.3f} ({row.seconds:.3f})"
        train = f"{result.train_accuracy:5.1f} %"
        row_text = f"{row.method:10s}{sizes:34s}  {accuracy:>17s}  {log_p:>15s}  {train}  {times:>15s}"
        print(row_text, flush=True)


if __name__ == "__main__":
    main()
