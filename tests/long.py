"""``python -m tests.long junit.xml``: writes the list of tests that ``make test`` leaves to ``make slow``, ``tests/long.txt``.

``make slow PYTEST=--junitxml=junit.xml`` measures. After ``make test`` instead, what is listed already stays listed. Of each
test the cheapest case stays if it takes less than a second, or if the file has not taken fifteen by then. Further cases stay that
take less than 0.3 seconds, and others until the file has taken eight; where each case is another part of the package, they stay as
first cases do. So every file has some, and what is left out is a further case of a test, or a long way through the whole library.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).parent / "long.txt"
FIRST, FURTHER = (1.0, 15.0), (0.3, 8.0)  # seconds: of a case, and of a file
PARTS = {"test_kernels", "test_likelihoods", "test_distribution_laws"}


def measured(path: str) -> dict[str, dict[str, list[tuple[float, str]]]]:
    """Seconds and name of each case, by file and test."""
    files: dict[str, dict[str, list[tuple[float, str]]]] = defaultdict(lambda: defaultdict(list))
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is None:
            name = case.get("name", "")
            file = case.get("classname", "").split(".")[-1]
            files[file][name.partition("[")[0]].append((float(case.get("time", 0)), name))
    return files


def long_of(file: str, tests: dict[str, list[tuple[float, str]]]) -> list[str]:
    first = sorted(min(cases) for cases in tests.values())
    further = sorted(case for cases in tests.values() for case in sorted(cases)[1:])
    total, left = 0.0, []
    for cases, (cheap, of_a_file) in ((first, FIRST), (further, FIRST if file in PARTS else FURTHER)):
        for seconds, name in cases:
            if seconds <= cheap or not total or total + seconds <= of_a_file:
                total += seconds
            else:
                left.append(f"{file}.py::{name}")
    return left


if __name__ == "__main__":
    files = measured(sys.argv[1])
    names = {name for file, tests in files.items() for name in long_of(file, tests)}
    ran = {f"{file}.py::{name}" for file, tests in files.items() for cases in tests.values() for _, name in cases}
    names |= set(LIST.read_text().splitlines()) - ran
    LIST.write_text("".join(f"{name}\n" for name in sorted(names)))
