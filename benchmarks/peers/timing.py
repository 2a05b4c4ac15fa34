"""One contender in a process of its own: :func:`measure` starts it and reads what it prints, :func:`main` is that process."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.peers import problem as problems
from benchmarks.peers.contenders import LIBRARIES, STARTS, Contender

ROOT = Path(__file__).parents[2]
KEEP_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


def block_times(run: Callable[[int], float], blocks: int, seconds: float) -> list[float]:
    """Milliseconds per step in each of several blocks of about so many seconds, after a block to warm up."""

    def timed(num: int) -> float:
        begin = time.perf_counter()
        run(num)
        return (time.perf_counter() - begin) / num

    once = min(timed(1), timed(1))
    num = max(1, math.ceil(seconds / once))
    timed(num)
    return [1e3 * timed(num) for _ in range(blocks)]


def versions(library: str) -> dict[str, str]:
    found = {}
    for package in LIBRARIES[library].packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("library", "variant", "task"):
        parser.add_argument(name)
    parser.add_argument("problem", type=Path)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--started", type=float, required=True, help="when the process was started, seconds since 1970")
    args = parser.parse_args(argv)
    module = importlib.import_module(f"benchmarks.peers.{LIBRARIES[args.library].module}")
    run = getattr(module, args.task)(problems.read(args.problem), args.variant)
    value = run(1)
    times = [1e3 * (time.time() - args.started)]
    if args.task not in STARTS:
        times = block_times(run, args.blocks, args.seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    found = {"value": value, "ms": statistics.median(times), "peak": peak, "versions": versions(args.library)}
    found["versions"] |= {f"{args.library} on": module.device()}
    print(json.dumps(found))


def measure(
    python: str, contender: Contender, task: str, problem: Path, dtype: str, blocks: int, seconds: float
) -> dict[str, Any]:
    """What a fresh process finds: the value at the start, milliseconds, the most memory of its host in GB, versions, device."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": str(int(dtype == "float64"))}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Threads of OpenMP, torch's, spin while they wait. Beside any other work a step of GPyTorch then takes up to 30 times as long.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # This library is compiled to bytecode once, as the others were when they were installed.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # What it compiled in one process JAX finds in the next: in a restart only, whatever the user keeps.
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    programs = {"JAX_COMPILATION_CACHE_DIR": str(problem.parent / "programs"), **KEEP_ALL} if task == "restart" else {}
    command = [python, "-m", "benchmarks.peers.timing", contender.library, contender.variant, task, str(problem)]
    command += ["--blocks", str(blocks), "--seconds", str(seconds), "--started"]
    for _ in range(2 if programs else 1):
        now = [repr(time.time())]
        done = subprocess.run(command + now, cwd=ROOT, env=environment | programs, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{contender.name}, {task}, failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
