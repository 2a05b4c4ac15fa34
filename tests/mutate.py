"""Random mutations of the package, each put to tests: those that no test notices are printed.

    python -m tests.mutate --seed 0 --num 20 numpyro_orthgp/math/triangular.py -- tests/test_triangular.py tests/test_linalg.py

A mutation changes one operator, comparison, number, truth value or branch of one of the files, in a copy of the repository. Before
the first one the tests are run without any, since tests that fail anyway notice nothing. Some mutations change nothing that can be
seen (a block size, a dtype that is the default): look at what survives.

    python -m tests.mutate --num 100 --covered .coverage numpyro_orthgp/*/*.py

puts each mutation to tests that run its line, by coverage data with a context for each test (see ``tests/long.py``): first to those
of ``make test``, at most ``--most`` of them, and if these notice nothing, to those of ``tests/long.txt``.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.long import LIST, contexts

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
        code = subprocess.run(command, cwd=copy, capture_output=True, timeout=timeout).returncode
    except subprocess.TimeoutExpired:
        return True
    if code not in (0, 1, 2, 4):  # all passed, some failed, a file could not be imported: of files, of cases
        raise RuntimeError(f"pytest ended with {code}: {' '.join(command)}")
    return code != 0


def cases_of_lines(path: str, copy: Path) -> dict[tuple[str, int], set[str]]:
    """The cases that run each line, by path within the repository, without cases that are no more."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--slow", "-p", "no:cacheprovider"]
    there = set(
        subprocess.run(command, cwd=copy, capture_output=True, text=True).stdout.replace("tests/", "").splitlines()
    )
    return {(file[file.rindex("numpyro_orthgp/") :], i): cases & there for (file, i), cases in contexts(path).items()}


class Tests:
    """The same tests for each mutation, or those that run its line."""

    def __init__(self, args: argparse.Namespace, given: list[str], copy: Path) -> None:
        self.timeout, self.most, self.given, self.copy = args.timeout, args.most, given, copy
        self.runs = cases_of_lines(args.covered, copy) if args.covered else None
        self.long = frozenset(LIST.read_text().splitlines())

    def some(self, cases: set[str]) -> list[str]:
        return [f"tests/{case}" for case in sorted(random.Random(0).sample(sorted(cases), min(self.most, len(cases))))]

    def verdict(self, name: str, node: ast.AST) -> str:
        if self.runs is None:
            return "caught" if fails(self.copy, self.given, self.timeout) else "SURVIVED"
        cases = self.runs.get((name, node.lineno), set())
        quick, long = self.some(cases - self.long), self.some(cases & self.long)
        if quick and fails(self.copy, quick, self.timeout):
            return "caught"
        if long and fails(self.copy, ["--slow", *long], self.timeout):
            return "BY LONG"
        return "SURVIVED" if cases else "NOT RUN"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=20)
    parser.add_argument("--skip", type=int, default=0, help="so many of the first, which were tried before")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which tests count as failed")
    parser.add_argument("--covered", help="coverage data by test, in place of tests")
    parser.add_argument("--most", type=int, default=100, help="tests of one mutation, with --covered")
    parser.add_argument("files", nargs="+", help="to be changed; then --, and what pytest is given")
    argv = sys.argv[1:] if argv is None else argv
    at = argv.index("--") if "--" in argv else len(argv)
    args, given = parser.parse_args(argv[:at]), argv[at + 1 :]
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", ".jax_cache", "out", "_build"))
        if given and fails(copy, given, None):
            raise SystemExit("The tests fail without any mutation.")
        tests = Tests(args, given, copy)
        known = [(name, i) for name in args.files for i, _ in enumerate(places(ast.parse((ROOT / name).read_text())))]
        verdicts: Counter[str] = Counter()
        for name, i in rng.sample(known, min(args.num, len(known)))[args.skip :]:
            text = (ROOT / name).read_text()
            tree = ast.parse(text)
            node, field = list(places(tree))[i]
            line = text.splitlines()[node.lineno - 1].strip()
            mutate(node, field)
            (copy / name).write_text(ast.unparse(ast.fix_missing_locations(tree)))
            verdict = tests.verdict(name, node)
            verdicts[verdict] += 1
            print(f"{verdict:8} {name}:{node.lineno} {field}: {line}", flush=True)
            (copy / name).write_text(text)
    print(f"{len(known)} places; of {verdicts.total()} mutations: {dict(verdicts)}")
    return verdicts["SURVIVED"]


if __name__ == "__main__":
    main()
