"""Pages of the documentation that run: their blocks of Python, and what they say that these print."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from tests import forks

ROOT = Path(__file__).parents[1]

# Output that differs from machine to machine by more than numbers do is shown in blocks of another language, `console`.
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
END = "-- end of block --"


class Block(NamedTuple):
    """A block of Python and the output that follows it on the page, ``None`` where the page shows none."""

    code: str
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    return [Block(*match.groups()) for match in BLOCK.finditer(page.read_text())]


def run_blocks(blocks: list[Block], script: Path, timeout: float = 600) -> list[str]:
    """What each block prints, all of them run as one session in a process of its own, in JAX's default precision."""
    script.write_text("".join(f"{block.code}\nprint({END!r}, flush=True)\n" for block in blocks))
    return run_python([str(script)], cwd=script.parent, timeout=timeout).split(f"{END}\n")[:-1]


def run_python(words: list[str], cwd: Path = ROOT, timeout: float = 600, warns: bool = True) -> str:
    """What ``python`` with these words prints, in JAX's default precision.

    :param warns: whether it may warn.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    env.pop("JAX_ENABLE_X64", None)
    done = forks.run(words, cwd, env, timeout)
    assert done.status == 0, f"exit status {done.status}: {done.stderr[-3000:]}"
    assert warns or "Warning" not in done.stderr, done.stderr[-3000:]
    return done.stdout


def differences(shown: str, printed: str) -> list[str]:
    """Where what a page shows is not what its block prints: words must be equal, numbers within 2 % or a unit of the last digit."""
    ours, theirs = shown.split(), printed.split()
    if len(ours) != len(theirs):
        return [f"{len(ours)} words shown, {len(theirs)} printed:\n{printed}"]
    return [f"{a} is shown, {b} printed" for a, b in zip(ours, theirs, strict=True) if not _same(a, b)]


def _same(a: str, b: str) -> bool:
    if NUMBER.sub("0", a) != NUMBER.sub("0", b):
        return a == b
    return all(_close(x, y) for x, y in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True))


def _close(shown: str, printed: str) -> bool:
    if "." not in shown and "." not in printed and "e" not in shown + printed and abs(int(shown)) < 100:
        return shown == printed  # a count
    decimals = len(shown.partition(".")[2]) if "e" not in shown else 0
    unit = 1.5 * 10.0**-decimals if "e" not in shown else 0.0
    return abs(float(shown) - float(printed)) <= max(unit, 0.02 * abs(float(shown)))
