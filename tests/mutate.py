"""Random mutations of the package, each put to tests: those that no test notices are printed.

    python -m tests.mutate --seed 0 --num 20 numpyro_orthgp/math/triangular.py -- tests/test_triangular.py tests/test_linalg.py

A mutation changes one operator, comparison, number, truth value or branch of one of the files, in a copy of the repository. Before
the first one the tests are run without any, since tests that fail anyway notice nothing. Some mutations change nothing that can be
seen (a block size, a dtype that is the default): look at what survives.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.USub: ast.UAdd,
}  # fmt: skip


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """What can be changed in functions: nodes, and the field of each that is."""
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for s in f.body for n in ast.walk(s)}
    notes = {id(n) for f in ast.walk(tree) if isinstance(f, ast.arg | ast.AnnAssign) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if id(node) not in inside or id(node) in notes:
            continue
        if isinstance(node, ast.BinOp | ast.BoolOp | ast.UnaryOp) and type(node.op) in OPERATORS:
            yield node, "op"
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
            yield node, "ops"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            yield node, "value"
        elif isinstance(node, ast.If | ast.IfExp):
            yield node, "test"


def mutate(node: ast.AST, field: str) -> None:
    value = getattr(node, field)
    if field == "ops":
        value = [OPERATORS[type(value[0])](), *value[1:]]
    elif field == "op":
        value = OPERATORS[type(value)]()
    elif field == "test":
        value = ast.UnaryOp(ast.Not(), value)
    else:
        value = not value if isinstance(value, bool) else value + 1
    setattr(node, field, value)


def fails(copy: Path, tests: list[str], timeout: float | None) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(command, cwd=copy, capture_output=True, timeout=timeout).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which tests count as failed")
    parser.add_argument("files", nargs="+", help="to be changed; then --, and what pytest is given")
    argv = sys.argv[1:] if argv is None else argv
    at = argv.index("--")
    args, tests = parser.parse_args(argv[:at]), argv[at + 1 :]
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", ".jax_cache", "out", "_build"))
        if fails(copy, tests, None):
            raise SystemExit("The tests fail without any mutation.")
        known = [(name, i) for name in args.files for i, _ in enumerate(places(ast.parse((ROOT / name).read_text())))]
        survived = 0
        for name, i in rng.sample(known, min(args.num, len(known))):
            text = (ROOT / name).read_text()
            tree = ast.parse(text)
            node, field = list(places(tree))[i]
            line = text.splitlines()[node.lineno - 1].strip()
            mutate(node, field)
            (copy / name).write_text(ast.unparse(ast.fix_missing_locations(tree)))
            caught = fails(copy, tests, args.timeout)
            survived += not caught
            print(f"{'caught  ' if caught else 'SURVIVED'} {name}:{node.lineno} {field}: {line}", flush=True)
            (copy / name).write_text(text)
    print(f"{len(known)} places; of {min(args.num, len(known))} mutations {survived} survived")
    return survived


if __name__ == "__main__":
    main()
