"""What the device that JAX finds gives: precision of float32, times of steps, predictions, bounds and whole fits, memory.

    python -m benchmarks.accelerator [--sizes 128,256,512,1024,2048] [--dtype float32,float64] [--fits 25600x100,1300000x1]
        [--quick]

Runs on CPUs too, where no product is rounded to fewer bits and JAX reports no memory. Precision: relative errors against float64
NumPy of a matrix product and of a whole bound, as the library computes them, and as plain JAX does at JAX's default precision,
which on recent GPUs is TF32 for float32 and on TPUs bfloat16. Times: medians of blocks of steps, made up data of kin40k's shape.
The tasks are those of ``benchmarks.peers``; without peers, and in one process, so "peak" is the most memory since the start. Fits
are ``ogp.fit`` on so many rows in host memory for so many epochs, float32, in seconds from its call to its result, compiling
included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_orthgp as ogp
from benchmarks.peers import floor, ours, plain, problem
from benchmarks.peers.problem import JITTER, NOISE, VARIANCE, Problem
from benchmarks.peers.timing import block_times
from numpyro_orthgp.math.products import matmul

Task = tuple[str, int, Callable[[], ours.Run]]  # name, M if it has a floor else 0, what prepares it


def exact_bound(p: Problem) -> float:
    """SVGP's bound in float64 NumPy, at the parameters that all contenders of the task step start from."""
    X, y, Z, mean, root = (a.astype(np.float64) for a in (p.X, p.y, p.Z, p.mean, p.root))

    def kernel(A, B):
        A, B = A / p.lengthscale, B / p.lengthscale
        r2 = np.sum(A**2, 1)[:, None] + np.sum(B**2, 1) - 2 * A @ B.T
        r = np.sqrt(3 * np.maximum(r2, 0))
        return VARIANCE * (1 + r) * np.exp(-r)

    L = np.linalg.cholesky(kernel(Z, Z) + JITTER[p.dtype.name] * VARIANCE * np.eye(len(Z)))
    A = np.linalg.solve(L, kernel(Z, X))
    variance = VARIANCE - np.sum(A**2, 0) + np.sum((root.T @ A) ** 2, 0)
    fit = -0.5 * (np.log(2 * np.pi * NOISE**2) + ((y - A.T @ mean) ** 2 + variance) / NOISE**2)
    divergence = 0.5 * (mean @ mean + np.sum(root**2) - len(Z)) - np.sum(np.log(np.diag(root)))
    return p.num_data / len(y) * fit.sum() - divergence


def precision(num_inducing: int, batch: int, rows: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Relative errors of float32: of a product's entries, in units of the largest, and of a bound."""
    A, B = np.random.default_rng(0).normal(size=(2, 1024, 1024)).astype(np.float32)
    exact = A.astype(np.float64) @ B.astype(np.float64)
    p = problem.make(*rows, "float32", batch=batch, num_inducing=num_inducing)
    bound = exact_bound(p)

    def of_product(product) -> float:
        return float(np.abs(np.asarray(product, np.float64) - exact).max() / np.abs(exact).max())

    def of_bound(run: ours.Run) -> float:
        return abs(run(1) - bound) / abs(bound)

    errors = {
        "product, this library": of_product(jax.jit(matmul)(A, B)),
        "product, JAX's default": of_product(jax.jit(jnp.matmul)(A, B)),
        "bound, this library": of_bound(ours.step(p, "SVGP")),
        "bound, plain JAX": of_bound(plain.step(p, "plain JAX")),
    }
    with jax.default_matmul_precision("highest"):
        errors["bound, plain JAX, highest precision"] = of_bound(plain.step(p, "plain JAX"))
    return errors


def tasks(dtype: str, args: argparse.Namespace, rows: tuple[np.ndarray, np.ndarray]) -> Iterator[Task]:
    def make(num_inducing: int, batch: int = args.batch_size, second: int = 0) -> Problem:
        return problem.make(*rows, dtype, batch=batch, num_inducing=num_inducing, second=second)

    for M in args.sizes:
        yield f"SVGP ({M})", M, lambda M=M: ours.step(make(M), "SVGP")
    for M in args.sizes[:-1]:
        yield f"SOLVE-GP ({M}+{M})", 0, lambda M=M: ours.solve(make(M, second=M), "SOLVE-GP")
        yield f"SOLVE-GP ({M}+{M}), tight", 0, lambda M=M: ours.solve(make(M, second=M), "SOLVE-GP, tight")
    M, H = args.mean_only
    yield f"ODVGP ({M}+{H})", 0, lambda: ours.odvgp(make(M, second=H), "ODVGP")
    subsampled = "ODVGP, columns subsampled"
    yield f"ODVGP ({M}+{H}), subsampled", 0, lambda: ours.odvgp(make(M, second=H), subsampled)
    N, M = args.num_data, args.num_inducing
    yield f"{N} marginals, SVGP ({M})", 0, lambda: ours.prediction(make(M, N), "SVGP")
    for bound in ("titsias2009", "titsias2025"):
        yield f"{bound}, N = {N}, M = {M}", 0, lambda bound=bound: ours.collapsed(make(M, N), bound)


def peak_memory() -> str:
    stats = jax.devices()[0].memory_stats() or {}
    return f"{stats['peak_bytes_in_use'] / 2**30:9.2f}" if "peak_bytes_in_use" in stats else f"{'-':>9s}"


def measure(dtype: str, args: argparse.Namespace, rows: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Milliseconds of each task, printed as they are found."""
    small = problem.make(*rows, dtype, batch=1, num_inducing=1)
    product = statistics.median(block_times(floor.step(small, ""), args.blocks, args.seconds))
    print(f"\n{dtype}: products of {floor.SIZE} x {floor.SIZE} at {floor.product_flops() / product / 1e6:.0f} GFLOP/s")
    print(f"{'':34s}{'ms':>10s}{'/ floor':>9s}{'peak GB':>9s}{'value':>18s}")
    found = {}
    for name, M, prepare in tasks(dtype, args, rows):
        run = prepare()
        value = run(1)
        found[name] = statistics.median(block_times(run, args.blocks, args.seconds))
        over = f"{found[name] / floor.floor_ms(M, args.batch_size, product):9.2f}" if M else f"{'':9s}"
        print(f"{name:34s}{found[name]:10.2f}{over}{peak_memory()}{value:18.9g}", flush=True)
    return found


def fits(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of whole fits of SVGP, printed as they are found."""
    print(f"\nfits, SVGP ({args.fit_inducing}), batches of {args.batch_size}, float32")
    print(f"{'':34s}{'s':>10s}{'steps/s':>10s}{'last loss / N':>16s}")
    found = {}
    for num_rows, num_epochs in args.fits:
        p = problem.make(*problem.load(None, num_rows), "float32", batch=num_rows, num_inducing=args.fit_inducing)
        begin = time.perf_counter()
        result = ogp.fit(
            ours.inference(),
            jax.random.PRNGKey(0),
            (p.X, p.y),
            batch_size=args.batch_size,
            num_epochs=num_epochs,
            progress_bar=False,
            problem=p,
            sets=[p.Z],
        )
        name = f"{num_rows} rows, {num_epochs} epochs"
        found[name] = time.perf_counter() - begin
        per_second, loss = len(result.losses) / found[name], result.losses[-1] / num_rows
        print(f"{name:34s}{found[name]:10.1f}{per_second:10.1f}{loss:16.4f}", flush=True)
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def pairs(text: str) -> list[tuple[int, int]]:
        return [(int(rows), int(epochs)) for rows, epochs in (part.split("x") for part in text.split(",") if part)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=integers, default=[128, 256, 512, 1024, 2048], help="M")
    parser.add_argument("--mean-only", type=integers, default=[1024, 8096], metavar="M,H", help="of ODVGP")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--num-data", type=int, default=20_000, help="rows for a collapsed bound, inputs to predict at")
    parser.add_argument("--num-inducing", type=int, default=512, help="M for these")
    parser.add_argument("--dtype", type=lambda text: text.split(","), default=["float32", "float64"])
    parser.add_argument("--fits", type=pairs, default="25600x100,1300000x1", help="rows x epochs; '' for none")
    parser.add_argument("--fit-inducing", type=int, default=1024, help="M for these")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a block")
    parser.add_argument("--quick", action="store_true", help="small sizes and few blocks: does it run?")
    args = parser.parse_args(argv)
    if args.quick:
        args.sizes, args.mean_only, args.batch_size = [32, 64], [32, 128], 128
        args.num_data, args.num_inducing, args.blocks, args.seconds = 1000, 64, 3, 0.02
        args.fits, args.fit_inducing = [(1000, 2), (2000, 1)], 32
    return args


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    args = parse(argv)
    device, rows, enabled = jax.devices()[0], problem.load(None), jax.config.jax_enable_x64
    print(f"JAX {jax.__version__}, {device.platform}, {device.device_kind}, {len(jax.devices())} of them")
    found = {"errors": precision(args.num_inducing, args.batch_size, rows)}
    print("\nrelative errors of float32")
    for name, error in found["errors"].items():
        print(f"{name:38s}{error:10.1e}")
    try:
        for dtype in args.dtype:
            jax.config.update("jax_enable_x64", dtype == "float64")
            found[dtype] = measure(dtype, args, rows)
        jax.config.update("jax_enable_x64", False)
        found["fits"] = fits(args)
    finally:
        jax.config.update("jax_enable_x64", enabled)
    return found


if __name__ == "__main__":
    main()
