"""Times of this library beside its peers', all in one run on the same machine.

    python -m benchmarks.peers --data kin40k.npz --peer gpflow=PYTHON --peer gpytorch=PYTHON --peer gpjax=PYTHON

A peer takes part if the interpreter of an environment that has it is given. Contenders take turns, each time in a fresh process
that warms up and reports the median of several blocks of steps; so what else the machine does hits all alike. Printed are medians
over the rounds of these and of the ratios within a round, the most memory a process had, and the bound (or moments) that each
computed at the same parameters: a contender that computes another one stops the run. Tasks:

step        SVGP on minibatches of N rows: loss, gradients of q's mean and full root, inducing points, a lengthscale per input,
            variance and noise, Adam. Matern 3/2, whitened, Gaussian noise. Beside it the arithmetic floor: the step's operations
            at the rate of a product of 2048 x 2048 in the same run. "In a loop" all steps are one program, as fit, svi.run
            and gpjax.fit have them: temporary arrays are allocated once.
solve       SOLVE-GP (M + M), also tight, against SVGP with 2 M points, for each M of --pairs.
odvgp       ODVGP with --mean-only points against SVGP.
collapsed   value and gradient of SGPR's bound on --num-data rows, RBF with a lengthscale per input.
prediction  means and variances at --num-data inputs of a fitted SVGP.
startup     from the start of the process to the end of the first training step.
restart     the same with JAX's persistent cache, which a process before has filled. The peers that are not on JAX have none.

The same minibatch comes again and again, and is where the library wants it: reading data is not part of a step. Each library runs
on the accelerator that it finds; printed is which.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import problem as problems
from benchmarks.peers.contenders import FLOOR, PEERS, TASKS, Contender, tolerance
from benchmarks.peers.timing import measure

NUM_DATA = 32_000  # rows that minibatches stand for


class Case(NamedTuple):
    """One table: a task at one size and dtype."""

    task: str
    dtype: str
    batch: int
    num_inducing: int
    second: int = 0

    @property
    def title(self) -> str:
        points = f"M = {self.num_inducing}" + (f" + {self.second}" if self.second else "")
        return f"{self.task}, {self.dtype}, {points}, {self.batch} rows"


def cases(args: argparse.Namespace) -> list[Case]:
    sizes = {
        "step": [(args.batch_size, M) for M in args.sizes],
        "solve": [(args.batch_size, M, M) for M in args.pairs],
        "odvgp": [(args.batch_size, *args.mean_only)],
        "collapsed": [(args.num_data, args.num_inducing)],
        "prediction": [(args.num_data, args.num_inducing)],
        "startup": [(args.batch_size, args.num_inducing)],
        "restart": [(args.batch_size, args.num_inducing)],
    }
    return [Case(task, dtype, *size) for dtype in args.dtype for task in args.tasks for size in sizes[task]]


def check(contenders: list[Contender], found: dict[str, list[dict[str, Any]]], dtype: str) -> None:
    """Stop unless all that should compute the same did."""
    expected = found[contenders[0].name][-1]["value"]
    for contender in contenders:
        value = found[contender.name][-1]["value"]
        error = abs(value - expected) / abs(expected) if contender.same else 0.0
        if not math.isfinite(value) or error > tolerance(contender, dtype):
            raise SystemExit(
                f"{contender.name} has {value!r}, {contenders[0].name} {expected!r}: {error:.1e} relative."
            )


def fastest(contenders: list[Contender], found: dict[str, list[dict[str, Any]]]) -> list[Contender]:
    """All of ours, and the fastest variant of each peer."""

    def ms(contender: Contender) -> float:
        return found[contender.name][0]["ms"]

    peers = {c.library for c in contenders if c.library in PEERS}
    best = {library: min((c for c in contenders if c.library == library), key=ms) for library in peers}
    return [c for c in contenders if best.get(c.library, c) == c]


def race(case: Case, problem: Path, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What each contender found in each round; slower variants of a peer are in the first only."""
    pythons = dict.fromkeys(("ours", "plain", "floor"), sys.executable) | args.peer
    first, *others = (c for c in TASKS[case.task] if c.library in pythons)
    # The first is what ratios are to, and the product what the floor is made of.
    running = [first, *(c for c in others if not args.only or c.name in args.only or c == FLOOR)]
    found: dict[str, list[dict[str, Any]]] = {c.name: [] for c in running}
    for round_ in range(args.rounds):
        for c in running:
            python = pythons[c.library]
            found[c.name].append(measure(python, c, case.task, problem, case.dtype, args.blocks, args.seconds))
        if round_ == 0:
            check(running, found, case.dtype)
            running = fastest(running, found)
    return found


def summarise(case: Case, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each contender. Ratios are of the same round."""
    ours = TASKS[case.task][0].name
    rows = []
    for name, rounds in found.items():
        ratios = [r["ms"] / o["ms"] for r, o in zip(rounds, found[ours], strict=False)]
        row = {"name": name, "rounds": len(rounds), "value": rounds[0]["value"], "peak": max(r["peak"] for r in rounds)}
        row |= {"ms": statistics.median(r["ms"] for r in rounds), "least": min(r["ms"] for r in rounds)}
        row |= {"ratio": statistics.median(ratios), "ratios": ratios}
        rows.append(row | {"versions": rounds[0]["versions"]})
    return rows


def add_floor(case: Case, rows: list[dict[str, Any]]) -> str:
    """Say for each row how many times the arithmetic floor it takes; return a line about the floor."""
    from benchmarks.peers import floor  # imports JAX, which the other tasks leave to their own processes

    product = next(row["ms"] for row in rows if row["name"] == FLOOR.name)
    least = floor.floor_ms(case.num_inducing, case.batch, product)
    for row in rows:
        row["over_floor"] = row["ms"] / least
    return (
        f"floor {least:.2f} ms: {floor.step_flops(case.num_inducing, case.batch) / 1e9:.2f} GFLOP at "
        f"{floor.product_flops() / product / 1e6:.0f} GFLOP/s"
    )


def show(case: Case, rows: list[dict[str, Any]]) -> None:
    step = case.task == "step"
    note = add_floor(case, rows) if step else ""
    columns = f"{'ms':>10s}{'least':>10s}{'/ ours':>8s}" + (f"{'/ floor':>9s}" if step else "")
    print(f"\n{case.title}\n{'':34s}{columns}{'peak GB':>9s}{'value':>18s}{'rounds':>8s}")
    for row in rows:
        if row["name"] == FLOOR.name:
            continue
        over = f"{row['over_floor']:9.2f}" if step else ""
        times = f"{row['ms']:10.2f}{row['least']:10.2f}{row['ratio']:8.2f}{over}"
        print(f"{row['name']:34s}{times}{row['peak']:9.2f}{row['value']:18.9g}{row['rounds']:8d}")
    print(note, end="\n" if note else "", flush=True)


def header(args: argparse.Namespace) -> str:
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "not set")
    return (
        f"{os.cpu_count()} cores, OPENBLAS_NUM_THREADS {threads}, Python {platform.python_version()}, "
        f"N = {args.rows}, D = {args.columns}; medians of {args.rounds} rounds, each the median of {args.blocks} blocks "
        f"of about {args.seconds} s"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="npz file with arrays X (N, D) and y (N,); made up if absent")
    parser.add_argument("--tasks", type=names, default=list(TASKS), help="of " + ",".join(TASKS))
    parser.add_argument("--sizes", type=integers, default=[128, 256, 512, 1024], help="M of the task step")
    parser.add_argument("--pairs", type=integers, default=[256, 512], help="M of the task solve")
    parser.add_argument("--mean-only", type=integers, default=[1024, 8096], metavar="M,H", help="of the task odvgp")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--num-data", type=int, default=20_000, help="rows for a collapsed bound, inputs to predict at")
    parser.add_argument(
        "--num-inducing", type=int, default=512, help="M of the tasks collapsed, prediction, startup, restart"
    )
    parser.add_argument("--dtype", type=names, default=["float32"], help="float32,float64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a block")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="one of " + ", ".join(PEERS))
    parser.add_argument("--only", action="append", metavar="CONTENDER", help="besides the first: as the tables name it")
    parser.add_argument("--out", type=Path, default=Path("out/peers.json"))
    args = parser.parse_args(argv)
    args.peer = dict(peer.split("=", 1) for peer in args.peer)
    for known, given in ((TASKS, args.tasks), (PEERS, args.peer), (problems.JITTER, args.dtype)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if len(args.mean_only) != 2:
        parser.error("--mean-only takes two numbers, M,H")
    return args


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    X, y = problems.load(args.data, max(NUM_DATA, args.num_data))
    args.rows, args.columns = X.shape
    tables: list[dict[str, Any]] = []
    print(header(args), flush=True)
    seen: dict[str, str] = {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(args):
            path = Path(folder) / "problem.npz"
            size = {"batch": case.batch, "num_inducing": case.num_inducing, "second": case.second}
            problems.save(problems.make(X, y, case.dtype, **size), path)
            rows = summarise(case, race(case, path, args))
            new = {k: v for row in rows for k, v in row.pop("versions").items()}
            if new.items() - seen.items():
                print(", ".join(f"{k} {v}" for k, v in new.items()))
                seen |= new
            show(case, rows)
            tables.append(case._asdict() | {"rows": rows})
            args.out.write_text(json.dumps({"header": header(args), "versions": seen, "tables": tables}, indent=1))
    return tables


if __name__ == "__main__":
    main()
