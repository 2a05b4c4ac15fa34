"""Count the lines of three stories: python -m benchmarks.stories

A line counts if it has code: blank lines, comments and docstrings do not. All scripts are formatted by ruff, 120 columns.
"""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parent
STORIES = {
    "table": "a table, with intervals of predictions",
    "counties": "a hierarchical model of counts",
    "classes": "a classifier on minibatches, ported from GPyTorch",
}
LIBRARIES = "ours", "gpflow", "gpytorch"


def lines_of_code(source: str) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    silent = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            silent |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in silent for i, line in lines)


def counts() -> dict[str, dict[str, int]]:
    """Lines of code of each story in each library."""
    return {
        story: {library: lines_of_code((FOLDER / f"{story}_{library}.py").read_text()) for library in LIBRARIES}
        for story in STORIES
    }


def table() -> str:
    """The counts as the table of docs/guide/coming_from.md."""
    rows = ["| story | this package | GPflow | GPyTorch |", "| --- | --- | --- | --- |"]
    for story, of in counts().items():
        rows.append(f"| {STORIES[story]} | {' | '.join(str(of[library]) for library in LIBRARIES)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
