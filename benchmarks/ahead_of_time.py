"""What XLA makes of training steps and predictions for an accelerator that is not here.

    python -m benchmarks.ahead_of_time --target h100    # in an environment with jax[cuda12]
    python -m benchmarks.ahead_of_time --target v5e     # with libtpu
    python -m benchmarks.ahead_of_time --target host    # for the device that JAX finds

Programs are compiled to the end, nothing is run. Printed are for each: seconds to compile, here; the memory that it needs besides
arguments and results; its products, and how many of them are at less than full precision; its calls of libraries, for factors of
small matrices and solves with them; and for an NVIDIA GPU how often its machine code (PTX) names TF32, a format of 10 bits. The
first line is a control: a product at JAX's default precision, where both are seen; anywhere else they end the script with an
error. Made up data of kin40k's shape. ``JAX_OPTIMIZATION_LEVEL=O1`` in the environment asks XLA for less work.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.peers import ours, problem
from numpyro_orthgp.math import triangular

# What XLA asks an NVIDIA H100 about itself.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84929347584
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

FULL_PRECISION = "precision = [HIGHEST, HIGHEST]"
CONTROL = "a product, JAX's default"
Case = tuple[str, Callable[[], tuple[Any, ...]]]  # a name, and what makes a function and the arrays it is called with


class Program(NamedTuple):
    """What is told of a compiled program.

    :param seconds: to compile it.
    :param megabytes: of temporary memory.
    :param products: number of matrix products.
    :param rounded: those of them that may round their factors.
    :param calls: calls of a library.
    :param tf32: how often the machine code names it; None where there is none to read.
    """

    seconds: float
    megabytes: float
    products: int
    rounded: int
    calls: int
    tf32: int | None


def device_of(target: str) -> Any:
    if target == "host":
        return jax.devices()[0]
    if target == "v5e":
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # it asks the driver, which is not here
    return topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1").devices[0]


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...], device: Any) -> Program:
    """Compile a function of arrays (or of their shapes and dtypes) for a device."""
    sharding = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jax.dtypes.canonicalize_dtype(a.dtype), sharding=sharding),
        arguments,
    )
    with mock.patch.object(triangular, "_platform", lambda: device.platform):  # that of this process otherwise
        lowered = jax.jit(function).lower(*shapes)
    with tempfile.TemporaryDirectory() as folder:
        is_cuda = device.platform in ("gpu", "cuda")
        begin = time.perf_counter()
        program = lowered.compile(compiler_options={"xla_dump_to": folder} if is_cuda else None)
        seconds = time.perf_counter() - begin
        codes = [path.read_text() for path in Path(folder).glob("*.ptx")]
    if is_cuda and not codes:
        raise RuntimeError("XLA wrote no machine code.")
    text, memory = program.as_text(), program.memory_analysis()
    products = [line for line in lowered.as_text().splitlines() if "stablehlo.dot" in line]
    return Program(
        seconds,
        memory.temp_size_in_bytes / 1e6,
        len(products),
        sum(FULL_PRECISION not in line for line in products),
        len(re.findall(r'custom_call_target="(?:lapack|cusolver|__cublas|Cholesky|Invert|Triangular)', text)),
        sum(code.lower().count("tf32") for code in codes) if is_cuda else None,
    )


def cases(dtype: str, args: argparse.Namespace, rows: tuple[np.ndarray, np.ndarray]) -> Iterator[Case]:
    """The programs: a control, products alone, training steps, predictions."""

    def make(num_inducing: int, batch: int = args.batch_size, second: int = 0) -> problem.Problem:
        return problem.make(*rows, dtype, batch=batch, num_inducing=num_inducing, second=second)

    def training(p: problem.Problem, residual: str = "prior") -> tuple[Any, ...]:
        init, update = ours.steps(p, [p.Z, p.O] if len(p.O) else [p.Z], residual)
        return update, jax.eval_shape(init, p.X, p.y), p.X, p.y

    def prediction(p: problem.Problem) -> tuple[Any, ...]:
        fitted, moments = ours.predictor(p, diagonalized=False)
        return moments, jax.eval_shape(fitted, p.X[:10], p.y[:10]), p.X

    def product(M: int, precision: str | None = None) -> tuple[Any, ...]:
        return partial(jnp.matmul, precision=precision), *2 * [np.zeros((M, M), dtype)]

    yield CONTROL, lambda: product(512)
    for M in args.products:
        yield f"a product ({M}), full precision", lambda M=M: product(M, "highest")
    for M in args.sizes:
        yield f"SVGP ({M})", lambda M=M: training(make(M))
    for M in args.pairs:
        yield f"SOLVE-GP ({M}+{M}), tight", lambda M=M: training(make(M, second=M), "tight")
    for M in args.sizes:
        yield f"{args.num_data} marginals, SVGP ({M})", lambda M=M: prediction(make(M, args.num_data))


def parse(argv: list[str] | None) -> argparse.Namespace:
    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=["h100", "v5e", "host"], default="host")
    parser.add_argument("--sizes", type=integers, default=[512, 1024], help="M")
    parser.add_argument("--pairs", type=integers, default=[512], help="M of each of two sets")
    parser.add_argument(
        "--products", type=integers, default=[], help="rows of matrix products, each a program of its own"
    )
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--num-data", type=int, default=20_000, help="inputs to predict at")
    parser.add_argument("--dtype", type=lambda text: text.split(","), default=["float32"])
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, dict[str, Program]]:
    args = parse(argv)
    where, rows, enabled = device_of(args.target), problem.load(None), jax.config.jax_enable_x64
    print(f"JAX {jax.__version__}, for {where.device_kind}, compiled on {jax.default_backend()}")
    found: dict[str, dict[str, Program]] = {}
    try:
        for dtype in args.dtype:
            jax.config.update("jax_enable_x64", dtype == "float64")
            print(f"\n{dtype:34s}{'s':>8s}{'MB':>9s}{'products':>10s}{'rounded':>9s}{'calls':>7s}{'TF32':>6s}")
            found[dtype] = {}
            for name, prepare in cases(dtype, args, rows):
                function, *arguments = prepare()
                p = found[dtype][name] = compiled(function, tuple(arguments), where)
                tf32 = "-" if p.tf32 is None else p.tf32
                line = f"{p.seconds:8.1f}{p.megabytes:9.1f}{p.products:10d}{p.rounded:9d}{p.calls:7d}{tf32:>6}"
                print(f"{name:34s}{line}", flush=True)
                if name != CONTROL and (p.rounded or p.tf32):
                    raise SystemExit(f"{name}: {p.rounded} products may be rounded, TF32 is named {p.tf32} times.")
    finally:
        jax.config.update("jax_enable_x64", enabled)
    return found


if __name__ == "__main__":
    main()
