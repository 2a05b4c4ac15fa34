"""What devices of a mesh say to each other, counted in compiled programs, and what that means for N = 1e9 on 64 of them.

    XLA_FLAGS=--xla_force_host_platform_device_count=64 python -m benchmarks.collectives

Programs are compiled for simulated devices of a CPU and nothing is run. Rows are shared out, the state is on every device, as
``fit(..., mesh=...)`` has them, but for one program in which devices share functions (``layout=``); float32. Told of each, for one
device of D: collectives of a step and the bytes of their results (calls within loops of known length count as often as the loop
runs); products of matrices in GFLOP, of them those that D devices do all alike, which is what the division by D leaves; factors of
small matrices by LAPACK, which the products do not hold; temporary memory. Other compilers may merge collectives, which changes
their number and not the bytes.

The second table is arithmetic with these counts and with the assumptions that it prints: nothing in it was run. What all devices do
alike is taken from an H200, where a step of M = 1024 takes 1.85 ms at B = 1024 and one of 256 0.41 ms (docs/guide/accelerators.md).
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from benchmarks.peers import ours, problem
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.training.batches import Batch
from numpyro_orthgp.training.layout import layout_of_state
from numpyro_orthgp.training.lazy_rows import rows_of, sharding_of
from numpyro_orthgp.training.orders import ROUNDS, permuted
from numpyro_orthgp.training.steps import update_of

DIM, OUTPUTS = 8, 10
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")

# What the second table takes for granted.
ASSUMED = {
    "rows N": 1e9,
    "devices": 64,
    "devices of a host": 8,
    "memory of a device, GB": 80,
    "float32 products of a device, TFLOP/s": 30,
    "what every device does alike, whatever B, microseconds a point": 1.8,
    "all-reduce, GB/s of a device": 50,
    "a collective's latency, ms": 0.03,
    "reading of a host, GB/s": 2,
    "host to device, GB/s": 20,
}


class Counts(NamedTuple):
    """Of one device's program.

    :param collectives: their number by kind.
    :param megabytes: of their results.
    :param gflop: of products of matrices.
    :param factors: calls of LAPACK.
    :param memory: temporary, in MB.
    :param seconds: to compile.
    """

    collectives: dict[str, int]
    megabytes: float
    gflop: float
    factors: int
    memory: float
    seconds: float


def counted(text: str) -> tuple[Counter[str], float, float]:
    """Calls by kind, bytes of collectives and floating-point operations of products in an optimized program's text."""
    computations: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            computations[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            computations[name].append(line)
    known: dict[str, tuple[Counter[str], float, float]] = {}

    def of(name: str) -> tuple[Counter[str], float, float]:
        if name not in known:
            known[name] = _of_lines(computations.get(name, []), of)
        return known[name]

    return of(entry)


def _of_lines(lines: list[str], of: Callable[[str], Any]) -> tuple[Counter[str], float, float]:
    calls: Counter[str] = Counter()
    size = flop = 0.0
    shapes: dict[str, str] = {}
    for line in lines:
        found = INSTRUCTION.match(line)
        if not found:
            continue
        name, shape, kind, rest = found.groups()
        shapes[name], kind = shape, kind.removesuffix("-start")
        if kind in KINDS:
            calls[kind] += 1
            size += sum(math.prod(_dims(d)) * SIZES.get(t, 4) for t, d in SHAPE.findall(shape))
        elif kind == "dot":
            left = _dims(SHAPE.search(shapes[re.findall(r"%([\w.\-]+)", rest)[0]]).group(2))  # type: ignore[union-attr]
            summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
            axes = _dims(summed.group(1)) if summed else []
            flop += 2 * math.prod(left[a] for a in axes) * math.prod(_dims(SHAPE.search(shape).group(2)))  # type: ignore[union-attr]
        elif "lapack_" in rest:
            calls["lapack"] += 1
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
        inner = re.findall(r"(?:body|to_apply|calls|condition)=%?([\w.\-]+)", rest)
        for branches in re.findall(r"branch_computations=\{([^}]*)\}", rest):
            inner += [b.strip().lstrip("%") for b in branches.split(",")]
        for other in inner:
            times = int(trips.group(1)) if trips else 1
            more = of(other)
            calls.update({k: v * times for k, v in more[0].items()})
            size, flop = size + times * more[1], flop + times * more[2]
    return calls, size, flop


def _dims(text: str) -> list[int]:
    return [int(d) for d in text.split(",") if d]


def counts(function: Callable[..., Any], arguments: tuple[Any, ...], shardings: Any, out: Any = None) -> Counts:
    """Compile a function of shapes."""
    shapes = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(jnp.shape(a), jax.dtypes.canonicalize_dtype(a.dtype), sharding=s),
        arguments,
        shardings,
    )
    begin = time.perf_counter()
    program = jax.jit(function, out_shardings=out).lower(*shapes).compile()
    calls, size, flop = counted(program.as_text())
    memory = program.memory_analysis().temp_size_in_bytes / 1e6
    factors = calls.pop("lapack", 0)
    return Counts(dict(calls), size / 1e6, flop / 1e9, factors, memory, time.perf_counter() - begin)


class Case(NamedTuple):
    """
    :param name: of a program.
    :param count: what compiles it for a mesh.
    :param sizes: M and B of steps, for the second table.
    """

    name: str
    count: Callable[[Mesh], Counts]
    sizes: tuple[int, int] | None = None


def rows_on(mesh: Mesh, ndim: int = 1) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names, *[None] * (ndim - 1)))


def step(mesh: Mesh, num_inducing: int, batch: int, second: int = 0) -> Counts:
    """A step of SVGP, or of tightened SOLVE-GP; all hyperparameters and points are learned."""
    num = 2**20
    p = problem.make(*problem.load(None, 40_000), "float32", batch=1024, num_inducing=num_inducing, second=second)
    p = p._replace(num_data=num)
    kwargs = {"problem": p, "sets": [p.Z, p.O] if second else [p.Z]}
    svi = ours.inference("tight" if second else "prior")
    start = ours.start(p, kwargs["sets"])
    state = jax.eval_shape(
        lambda X, y: svi.init(jax.random.PRNGKey(0), X, y, init_params=start, **kwargs), p.X[:64], p.y[:64]
    )
    X, y = (jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype) for a in (p.X, p.y))
    everywhere = NamedSharding(mesh, PartitionSpec())
    shared = jax.tree.map(lambda _: everywhere, state), Batch((rows_on(mesh, 2), rows_on(mesh)), rows_on(mesh))
    rows = Batch((X, y), jax.ShapeDtypeStruct((batch,), np.int32))
    return counts(update_of(svi, num, num, kwargs, everywhere), (state, rows), shared, everywhere)


def of_rows(function: Callable[..., Any], num: int, mesh: Mesh, out: Any) -> Counts:
    X, y = jax.ShapeDtypeStruct((num, DIM), np.float32), jax.ShapeDtypeStruct((num,), np.float32)
    return counts(function, (X, y), (rows_on(mesh, 2), rows_on(mesh)), out)


def collapsed(mesh: Mesh, num_inducing: int, num: int, block_size: int | None = None) -> Counts:
    """Value and gradient of the collapsed bound by lengthscales and points.

    :param block_size: rows of a block for each device.
    """
    options = {} if block_size is None else {"block_size": min(num, block_size * mesh.size)}
    Z = np.random.default_rng(0).normal(size=(num_inducing, DIM)).astype(np.float32)

    def bound(theta: Any, X: Any, y: Any) -> Any:
        return ogp.CollapsedGP(kernels.RBF(theta[0]), X, theta[1], 0.3, **options).log_prob(y)

    def value_and_grad(X: Any, y: Any) -> Any:
        return jax.value_and_grad(bound)((jnp.ones(DIM, jnp.float32), jnp.asarray(Z)), X, y)

    return of_rows(value_and_grad, num, mesh, NamedSharding(mesh, PartitionSpec()))


def predictions(mesh: Mesh, num_inducing: int, num: int) -> Counts:
    """Means and variances of a fitted SVGP."""
    p = problem.make(*problem.load(None, 40_000), "float32", batch=1024, num_inducing=num_inducing)
    fitted, moments = ours.predictor(p, diagonalized=False)
    state = jax.eval_shape(fitted, p.X[:10], p.y[:10])
    X = jax.ShapeDtypeStruct((num, DIM), np.float32)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return counts(moments, (state, X), (jax.tree.map(lambda _: everywhere, state), rows_on(mesh, 2)), rows_on(mesh))


def gplvm(mesh: Mesh, num: int, batch: int, num_inducing: int = 64) -> Counts:
    """A step of a GP-LVM whose latent inputs are tables, shared out by rows."""
    Z = jnp.asarray(np.random.default_rng(0).normal(size=(num_inducing, 2)), jnp.float32)

    def model(Y: Any) -> None:
        f = ogp.gp("f", kernels.RBF(1.0), Z, num_latents=OUTPUTS)
        with numpyro.plate("data", num, subsample_size=len(Y)):
            X = ogp.latent_inputs("X", num, 2)
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.5).to_event(1), obs=Y)

    guide = ogp.AutoSparseGP(model, latents={"X": jnp.zeros((num, 2), jnp.float32)})
    svi = SVI(model, guide, ogp.lazy_rows(optax.adam(0.01)), TraceMeanField_ELBO())
    everywhere = NamedSharding(mesh, PartitionSpec())
    with rows_of(svi, num, batch):
        state = svi.init(jax.random.PRNGKey(0), jnp.zeros((batch, OUTPUTS), jnp.float32))
    Y, numbers = jax.ShapeDtypeStruct((batch, OUTPUTS), np.float32), jax.ShapeDtypeStruct((batch,), np.int32)
    of_state = sharding_of(svi, state, everywhere)
    if isinstance(of_state, NamedSharding):
        of_state = jax.tree.map(lambda _: everywhere, state)
    shared = of_state, Batch((rows_on(mesh, 2),), rows_on(mesh))
    return counts(
        update_of(svi, num, num, {}, everywhere), (state, Batch((Y,), numbers)), shared, (of_state, everywhere)
    )


def functions(mesh: Mesh, shared: bool, num_inducing: int, batch: int, num_latents: int = 64) -> Counts:
    """A step of many functions, each with points and lengthscales of its own.

    :param shared: whether devices share the functions, and what belongs to them, in place of rows.
    """
    num, shape = 2**20, (num_latents, num_inducing, DIM)
    Z = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)

    def model(X: Any, Y: Any) -> None:
        lengthscale = numpyro.param("lengthscale", jnp.ones((num_latents, DIM)))
        f = ogp.gp("f", kernels.RBF(lengthscale), numpyro.param("Z", Z), num_latents=num_latents)
        with numpyro.plate("data", num, subsample_size=len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.5).to_event(1), obs=Y)

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
    X, Y = (jax.ShapeDtypeStruct((batch, n), np.float32) for n in (DIM, num_latents))
    state = svi.init(jax.random.PRNGKey(0), *(jnp.zeros(a.shape, a.dtype) for a in (X, Y)))
    own = Mesh(mesh.devices.ravel(), ("functions",)) if shared else mesh
    everywhere = NamedSharding(own, PartitionSpec())
    layout = {name: PartitionSpec("functions") for name in ("f.*", "lengthscale", "Z")} if shared else None
    of_state = layout_of_state(svi, state, layout, everywhere)
    of_state = of_state if shared else jax.tree.map(lambda _: everywhere, state)
    of_rows = Batch((everywhere, everywhere), everywhere) if shared else Batch((rows_on(own, 2),) * 2, rows_on(own))
    rows = Batch((X, Y), jax.ShapeDtypeStruct((batch,), np.int32))
    return counts(update_of(svi, num, num, {}, everywhere), (state, rows), (of_state, of_rows), (of_state, everywhere))


def exchange(mesh: Mesh, batch: int) -> Counts:
    """The rows of a batch of ``training.Local``, each device being a process."""
    shapes = (mesh.size, batch, DIM), (mesh.size, batch)
    rows = tuple(jax.ShapeDtypeStruct(s, np.float32) for s in shapes)
    return counts(
        lambda X, y: (X.sum(0), y.sum(0)), rows, (rows_on(mesh, 3), rows_on(mesh, 2)), (rows_on(mesh, 2), rows_on(mesh))
    )


def cases(sizes: list[int], batches: list[int], num: int) -> Iterator[Case]:
    for M in sizes:
        for B in batches:
            yield Case(f"SVGP {M}, B = {B}", lambda mesh, M=M, B=B: step(mesh, M, B), (M, B))
    M, B = sizes[0], batches[-1]
    yield Case(f"SOLVE-GP {M} + {M}, B = {B}", lambda mesh: step(mesh, M, B, M))
    yield Case(f"CollapsedGP {M}, N = {num}, with gradient", lambda mesh: collapsed(mesh, M, num))
    each = 2**20 // M
    yield Case(f"the same, {each} rows of a block for each device", lambda mesh: collapsed(mesh, M, num, each))
    yield Case(f"{num} predictions, SVGP {M}", lambda mesh: predictions(mesh, M, num))
    B = batches[len(batches) // 2]
    yield Case(f"GP-LVM 64, N = {num}, B = {B}", lambda mesh: gplvm(mesh, num, B))
    yield Case(f"training.Local, B = {B}", lambda mesh: exchange(mesh, B))
    for shared in (False, True):
        name = f"64 functions of {M} own points, {'functions' if shared else 'rows'} shared out, B = {batches[0]}"
        yield Case(name, lambda mesh, shared=shared: functions(mesh, shared, M, batches[0]))


def order_rate() -> float:
    """Numbers of rows a second that one thread computes of an order that is not drawn as a whole, here, the best of three."""
    keys, index = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15), np.arange(2**18)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        permuted(index, int(ASSUMED["rows N"]), keys)
        times.append(time.perf_counter() - begin)
    return len(index) / min(times)


PARTS = ("order", "order, Local", "reading", "to device", "products", "repeated", "all-reduce", "Local's rows")


def extrapolated(found: dict[tuple[int, int], Counts], rate: float) -> Iterator[tuple[str, ...]]:
    """By M and B of a step: milliseconds of its parts, of the slowest of host and device, and minutes of an epoch.

    Hosts work while devices do. Of files that all hosts read each computes the whole order, of rows of its own its share.
    """
    N, devices, of_host, _, tflops, alike, link, latency, disk, bus = ASSUMED.values()
    row, hosts = 4 * (DIM + 1), devices / of_host
    for (M, B), c in found.items():
        parts = dict(
            zip(
                PARTS,
                (
                    1e3 * B / rate,
                    1e3 * B / hosts / rate,
                    B * row / (disk * 1e6 * hosts),
                    B * row / devices / (bus * 1e6),
                    c.gflop / tflops,
                    alike * M / 1e3,
                    2 * c.megabytes / link + latency * sum(c.collectives.values()),
                    2 * B * row / 1e6 / link + latency,
                ),
                strict=True,
            )
        )
        device = sum(parts[name] for name in PARTS[3:])
        host = parts["order, Local"] + parts["reading"]
        slowest = max(PARTS[1:], key=lambda name: parts[name])
        minutes = N / B * max(device, host) / 6e4
        cells = [*(f"{ms:.2g}" for ms in parts.values()), slowest, f"{minutes:.2g}", f"{c.memory / 1e3:.2g}"]
        yield (f"{M}", f"{B}", *cells)


def limits() -> Iterator[tuple[str, str]]:
    """What grows with N whatever a step costs."""
    N, devices, of_host, memory = list(ASSUMED.values())[:4]
    row, hosts = 4 * (DIM + 1), devices / of_host
    yield "rows on disk or in memory", f"{N * row / 1e9:.0f} GB, {N * row / hosts / 1e9:.1f} GB of a host"
    yield "rows on devices (full batches)", f"{N * row / devices / 1e9:.2g} GB of {memory:.0f}"
    yield (
        "latent inputs of 2 dimensions, Adam, lazy_rows",
        f"{N * (2 * 2 * 4 * 3 + 8) / devices / 1e9:.2g} GB of {memory:.0f}",
    )
    yield "the same as whole tables on every device", f"{N * 2 * 2 * 4 * 3 / 1e9:.0f} GB of {memory:.0f}"
    yield "numbers of rows in int32", f"{N / 2**31:.0%} of what they hold; streams have none"
    yield "order of an epoch, blocks of a megabyte", f"{N * row / 2**20 * 8 / 1e6:.2g} MB"


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head), flush=True)
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main(argv: list[str] | None = None) -> dict[str, dict[int, Counts]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024], help="M")
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 8192, 524288], help="B")
    parser.add_argument("--only", default="", help="programs whose names hold this")
    parser.add_argument("--rows", type=int, default=2**20, help="N of what sees all rows")
    args = parser.parse_args(argv)
    if max(args.devices) > len(jax.devices()):
        parser.error(
            f"{max(args.devices)} devices are needed, {len(jax.devices())} are there: "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={max(args.devices)}"
        )
    found: dict[str, dict[int, Counts]] = {}
    last: dict[tuple[int, int], Counts] = {}

    def lines() -> Iterator[tuple[str, ...]]:
        for case in (c for c in cases(args.sizes, args.batches, args.rows) if args.only in c.name):
            found[case.name] = {}
            for num in args.devices:
                c = found[case.name][num] = case.count(Mesh(np.asarray(jax.devices()[:num]), ("data",)))
                if case.sizes:
                    last[case.sizes] = c
                kinds = ", ".join(f"{v} {k}" for k, v in sorted(c.collectives.items())) or "none"
                yield (
                    case.name, f"{num}", kinds, f"{c.megabytes:.3g}", f"{c.gflop:.3g}",
                    f"{_alike(found[case.name]):.0%}" if num > args.devices[0] else "", f"{c.factors}", f"{c.memory:.3g}",
                )  # fmt: skip

    print(f"JAX {jax.__version__}, compiled for simulated devices of a {jax.devices()[0].platform}\n")
    table(("program", "devices", "collectives", "MB", "GFLOP", "repeated", "factors", "memory, MB"), lines())
    print("\nAssumed: " + "; ".join(f"{k} {v:g}" for k, v in ASSUMED.items()) + ".\n")
    rate = order_rate()
    print(f"Measured: {rate / 1e6:.2g} million numbers of rows a second of a computed order, one thread.\n")
    table(("M", "B", *PARTS, "slowest with Local", "epoch, min", "memory, GB"), extrapolated(last, rate))
    print()
    table(("what grows with N", "size"), limits())
    return found


def _alike(by_devices: dict[int, Counts]) -> float:
    """The part a of one device's products that D devices do all alike: their share of it is a + (1 - a) / D."""
    one, (num, many) = by_devices[min(by_devices)], max(by_devices.items())
    return (many.gflop / one.gflop - 1 / num) / (1 - 1 / num) if one.gflop else 0.0


if __name__ == "__main__":
    main()
