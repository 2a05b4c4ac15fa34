"""``python -m tests.fuzz --seeds 0:5000``: random programs beside dense formulas; a failing one is printed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from queue import Queue
from typing import Any

from tests.xla_flags import known

CHUNK = 50


def look(seed: int) -> dict[str, Any]:
    """One seed: what failed, and the program."""
    import jax

    from tests.fuzz.families import program
    from tests.fuzz.properties import check

    jax.config.update("jax_enable_x64", True)
    start = time.perf_counter()
    run = check(program(seed))
    jax.clear_caches()
    seconds = time.perf_counter() - start
    return {
        "seed": seed,
        "failures": run.failures,
        "text": run.program.source(),
        "properties": run.properties,
        "seconds": seconds,
    }


def seeds_of(text: str) -> range:
    """One, "17", or "0:5000"."""
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


@cache
def fast() -> dict[str, str]:
    """Programs are small and run a few times: compiling them is what takes the time."""
    return {"XLA_FLAGS": " ".join(known()), "OPENBLAS_NUM_THREADS": "1"}


def in_process(seeds: range, found: Queue) -> None:
    """Some seeds in a process of their own, whose memory ends with it; each result goes into the queue at once."""
    command = [sys.executable, "-m", "tests.fuzz", "--json", "--seeds", f"{seeds.start}:{seeds.stop}"]
    left = list(seeds)
    with subprocess.Popen(command, env={**fast(), **os.environ}, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith("{"):
                found.put(json.loads(line))
                left.pop(0)
    for seed in left:
        failures = [f"no answer, exit status {process.returncode}"]
        found.put({"seed": seed, "failures": failures, "text": "", "properties": [], "seconds": 0.0})


def results(seeds: range, workers: int) -> Iterator[dict[str, Any]]:
    found: Queue = Queue()
    with ThreadPoolExecutor(workers) as pool:
        for i in range(0, len(seeds), CHUNK):
            pool.submit(in_process, seeds[i : i + CHUNK], found)
        for _ in seeds:
            yield found.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=range(100), help="one, or first:last")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--show", action="store_true", help="print each program, failing or not")
    parser.add_argument("--json", action="store_true", help="a line for each seed, in this process")
    options = parser.parse_args()
    if options.json:
        warnings.simplefilter("ignore")
        for seed in options.seeds:
            print(json.dumps(look(seed)), flush=True)
        return
    failed, spent, start = [], 0.0, time.perf_counter()
    looked: Counter[str] = Counter()
    for found in results(options.seeds, options.workers):
        spent += found["seconds"]
        looked.update(("bound", *found["properties"]))
        if found["failures"] or options.show:
            lines = "".join(f"# {line}\n" for line in found["failures"])
            print(f"# seed {found['seed']}: {', '.join(found['properties'])}\n{found['text']}{lines}", flush=True)
        if found["failures"]:
            failed.append(found["seed"])
    each = spent / max(len(options.seeds), 1)
    print(f"{len(options.seeds)} seeds in {time.perf_counter() - start:.0f} s, {each:.2f} s each; {dict(looked)}")
    print(f"failed: {sorted(failed)}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
