"""Titsias 2025, Table 1, by the script that has it, ``benchmarks/medium_regression.py``: its functions and its file of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import medium_regression as script
from benchmarks.paper.settings import EPOCHS, POINTS
from benchmarks.store import Store

STEPS = 10_000  # of the paper
SPLITS = 5


def num_rows(name: str, N: int, max_rows: int | None) -> int:
    """Rows to train with; of bike the paper left some out."""
    return min(int(0.64 * N), script.MAX_ROWS.get(name, N), max_rows or N)


def run(
    data: Path,
    out: Path,
    name: str,
    arrays: tuple[np.ndarray, np.ndarray],
    *,
    num_inducing: int,
    epochs: int,
    rows: int,
    splits: int,
    dtype: str,
) -> Iterator[tuple[str, str, list[dict[str, Any]], float]]:
    """For each line: its label in the paper, points, the rows of all splits, and seconds of a step."""
    steps = -(-STEPS * epochs // EPOCHS)
    sizes = [num_inducing, 2 * num_inducing]
    options = {"data": data, "out": out, "num-data": rows, "steps": steps, "repeats": splits, "dtype": dtype}
    argv = [str(word) for option, value in options.items() for word in (f"--{option}", value)]
    args = script.parse([*argv, "--num-inducing", *map(str, sizes)])
    store = Store(out / "medium_regression.jsonl", script.Key)
    for M, method, found in script.run_set(name, *arrays, args, store):
        of_paper = POINTS * (1 + sizes.index(M)) if M else 0
        seconds = float(np.mean([row["seconds"] for row in found])) / steps
        yield f"{method.replace(' ', '-')} {of_paper}", str(M or ""), found, seconds
