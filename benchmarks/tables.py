"""Tables of three papers, run again, ours beside theirs.

    python benchmarks/tables.py --data FOLDER [--tables shi2020:3 titsias2025] [--sets kin40k protein] [--methods SVGP "SOLVE-GP"]
        [--splits S] [--num-inducing 1024] [--epochs 100] [--max-rows N] [--dtype float32] [--out out/tables] [--list]

    shi2020        Tables 3-6: SVGP, ODVGP and SOLVE-GP (Shi, Titsias, Mnih 2020, App. I.1)
    titsias2025    Tables 2 and 4: SVGP and SVGP-new, the tightened bound; Table 1: collapsed bounds (medium_regression.py)
    salimbeni2018  Tables 3 and 4: coupled and decoupled bases (Salimbeni, Cheng, Boots, Deisenroth 2018, App. G)

Methods that are in no paper stand in the tables of Shi et al. and in Tables 2 and 4 of Titsias: SOLVE-GP-new, SOLVE-GP with the
tightened bound; -G16 and -G32, the bound tightened in groups of 16 and 32 near rows (Bui and Titsias 2025), by batches of groups;
and -1x64, by batches of single rows that end with one group of 64. Lines with "+near" are the predictions of the fit above them
with ``with_neighbors``.

FOLDER has files such as kin40k.npz with arrays X (N, D) and y (N,); sets without a file are named and left out.
``benchmarks/paper/settings.py`` says what each experiment is and what its paper leaves open.

Defaults are the papers' runs, for a GPU. One fit serves all tables that it occurs in. Fits that are done are lines of fits.jsonl
(Table 1 of Titsias: medium_regression.jsonl) in --out and are not run again; one that was stopped goes on from its checkpoint
there. So the same command, repeated, ends with the whole table, and one for more sets or splits starts from what there is.

Other runs than the papers' have a line that says so above them and * at each number of ours: --num-inducing is what stands for 1024
points, and 400, 700 or 2048 change in proportion, as do 20,000 or 10,000 steps with --epochs of 100; --max-rows are rows to train
with. A look at all of it, in minutes on a CPU:

    python benchmarks/tables.py --data FOLDER --sets kin40k --num-inducing 64 --epochs 2 --max-rows 4000 --splits 1

Printed: mean log predictive density or RMSE on test rows, in units where y has standard deviation 1, over splits, with standard
errors in parentheses; the median time of a step; the device that ran it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # as a script, and not installed, it finds only its own folder
from benchmarks.paper import collapsed, runs
from benchmarks.paper.runs import Key
from benchmarks.paper.settings import COLLAPSED_METHODS, EPOCHS, POINTS, SETTINGS, Method
from benchmarks.paper.values import TABLES, Table, Value
from benchmarks.store import Store

QUANTITIES = {
    "log_density": "mean log density of test outputs, higher is better",
    "rmse": "RMSE of test outputs, lower is better",
}
SETS = list(dict.fromkeys(name for table in TABLES.values() for name in table.values))
COLLAPSED = "collapsed"
DTYPES = {COLLAPSED: "float64"} | {name: setting.dtype for name, setting in SETTINGS.items()}
SPLITS = {COLLAPSED: collapsed.SPLITS} | {name: setting.splits for name, setting in SETTINGS.items()}


class Line(NamedTuple):
    """A line of a table, for one set of data.

    :param label: method and points in the paper.
    :param points: those of this run.
    :param rows: of the fits of all splits; none if there are more points than rows.
    :param quantity: which of their entries is shown.
    :param paper: what it is compared with.
    :param seconds: of a step.
    """

    label: str
    points: str
    rows: list[dict[str, Any]]
    quantity: str
    paper: Value | None
    seconds: float | None


# ---------------------------------------------------------------- what is asked for


def chosen_tables(names: list[str]) -> list[str]:
    """Keys of tables from words such as "shi2020:3", "shi2020:3,4" or "shi2020".

    :raises ValueError: for papers and tables that there are not.
    """
    chosen = []
    for name in names:
        paper, _, numbers = name.partition(":")
        known = [key for key in TABLES if key.split(":")[0] == paper]
        keys = [f"{paper}:{number}" for number in numbers.split(",")] if numbers else known
        unknown = sorted(set(keys) - set(TABLES)) if known else [paper]
        if unknown:
            raise ValueError(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
        chosen += keys
    return list(dict.fromkeys(chosen))


def methods_of(table: Table) -> list[Method]:
    """The methods of a table, in its order, and then our own."""
    by_label = {method.label: method for method in SETTINGS[table.setting].methods}
    return [by_label[label] for label in table.columns] + [m for m in by_label.values() if m.ours]


def all_methods() -> list[str]:
    return [m.label for setting in SETTINGS.values() for m in setting.methods] + list(COLLAPSED_METHODS)


def check_methods(wanted: list[str]) -> None:
    """
    :raises ValueError: for methods that there are not.
    """
    known = {name for label in all_methods() for name in (label, label.split()[0])}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no method {', '.join(unknown)}; there are {', '.join(all_methods())}")


def is_wanted(label: str, wanted: list[str] | None) -> bool:
    """Whether a method is chosen, by its name or by name and points of the paper."""
    return wanted is None or label in wanted or label.split()[0] in wanted


def differences(args: argparse.Namespace, setting: str, rows: int, all_rows: int) -> list[str]:
    """In what a run is not the paper's."""
    splits = args.splits or SPLITS[setting]
    found = []
    if args.num_inducing != POINTS:
        found.append(f"{args.num_inducing} inducing points where the paper has {POINTS}, and others in proportion")
    if args.epochs != EPOCHS:
        found.append(f"{args.epochs} of {EPOCHS} epochs" if setting == "large" else f"{args.epochs} % of the steps")
    if rows < all_rows:
        found.append(f"{rows} of {all_rows} rows to train")
    if splits < SPLITS[setting]:
        found.append(f"{splits} of {SPLITS[setting]} splits")
    return found


# ---------------------------------------------------------------- lines


def fitted_lines(table: Table, name: str, arrays: Any, args: argparse.Namespace, store: Store[Key]) -> Iterator[Line]:
    """Lines of one set, each after its fits."""
    setting = SETTINGS[table.setting]
    rows = runs.num_rows(setting, len(arrays[1]), args.max_rows)
    for method in methods_of(table):
        if not is_wanted(method.label, args.methods):
            continue
        ours = method.scaled(args.num_inducing)
        found = []
        for seed in range(args.splits or setting.splits) if sum(ours.sizes) <= rows else ():
            dtype = args.dtype or setting.dtype
            key = Key(setting.name, name, ours.name, ours.points, seed, args.epochs, rows, dtype)
            found.append(runs.run(key, arrays, setting, ours, store))
        times = [row["seconds"] for row in found if row["seconds"] is not None]
        seconds = float(np.median(times)) if times else None
        yield Line(method.label, ours.points, found, table.quantity, table.values[name].get(method.label), seconds)
        near = f"{table.quantity}_near"
        if found and all(near in row for row in found):
            yield Line(f"  +near {method.points}", ours.points, found, near, None, None)


def collapsed_lines(
    table: Table, name: str, arrays: Any, args: argparse.Namespace, store: Store[Key]
) -> Iterator[Line]:
    """Lines of one set; the script that runs them runs all methods."""
    cases = collapsed.run(
        args.data,
        args.out,
        name,
        arrays,
        num_inducing=args.num_inducing,
        epochs=args.epochs,
        rows=collapsed.num_rows(name, len(arrays[1]), args.max_rows),
        splits=args.splits or collapsed.SPLITS,
        dtype=args.dtype or DTYPES[COLLAPSED],
    )
    for label, points, rows, seconds in cases:
        if is_wanted(label, args.methods):
            yield Line(label, points, rows, "score", table.values[name].get(label), seconds)


# ---------------------------------------------------------------- printing


def shown(value: Value | None, mark: str = "") -> str:
    if value is None:
        return "-"
    error = "" if value.error is None else f" ({value.error:.{value.digits}f})"
    return f"{value.mean:.{value.digits}f}{mark}{error}"


def mean(values: list[float]) -> Value:
    """With its standard error, if there are two values or more."""
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None
    return Value(float(np.mean(values)), error)


def text(line: Line, reduced: bool) -> str:
    method, of_paper = line.label.split()
    start = f"{method:14s}{of_paper:>10s}{line.points:>12s}"
    if not line.rows:
        return f"{start}  left out: more points than rows"
    ours = shown(mean([row[line.quantity] for row in line.rows]), "*" if reduced else "")
    seconds = "-" if line.seconds is None else f"{line.seconds:.5f}"
    devices = ", ".join(sorted({row.get("device", "") for row in line.rows}))
    broken = sum(row.get("status", "finished") != "finished" for row in line.rows)
    note = f"  ({broken} of {len(line.rows)} diverged)" if broken else ""
    return f"{start}{ours:>20s}{shown(line.paper):>20s}{seconds:>10s}  {devices}{note}".rstrip()


def heading(key: str) -> str:
    table = TABLES[key]
    columns = f"{'method':14s}{'in paper':>10s}{'points':>12s}{'ours':>20s}{'paper':>20s}{'s/step':>10s}  device"
    return f"\n{key}: {table.title}: {QUANTITIES[table.quantity]}\n\n{columns}"


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """64-bit arrays if they are asked for, and only then."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", dtype == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def print_set(key: str, name: str, args: argparse.Namespace, store: Store[Key]) -> None:
    """One set of one table."""
    table = TABLES[key]
    arrays = runs.load(args.data / f"{name}.npz")
    N, dim = arrays[0].shape
    if table.setting == COLLAPSED:
        lines, rows, of_paper = collapsed_lines, *(collapsed.num_rows(name, N, m) for m in (args.max_rows, None))
    else:
        setting = SETTINGS[table.setting]
        lines, rows, of_paper = fitted_lines, *(runs.num_rows(setting, N, m) for m in (args.max_rows, None))
    dtype, splits = args.dtype or DTYPES[table.setting], args.splits or SPLITS[table.setting]
    print(f"-- {name}: {rows} rows to train, {dim} inputs, {dtype}, {splits} split{'s' * (splits > 1)}")
    reduced = differences(args, table.setting, rows, of_paper)
    if reduced:
        print(f"   NOT THE PAPER'S RUN: {'; '.join(reduced)}")
    with precision(dtype):
        for line in lines(table, name, arrays, args, store):
            print(text(line, bool(reduced)), flush=True)


def print_table(key: str, args: argparse.Namespace, store: Store[Key]) -> None:
    """All sets of one table that were asked for and are there."""
    names = [name for name in TABLES[key].values if name in args.sets and (args.data / f"{name}.npz").exists()]
    labels = (m.label for m in methods_of(TABLES[key])) if TABLES[key].setting != COLLAPSED else COLLAPSED_METHODS
    if not names or not any(is_wanted(label, args.methods) for label in labels):
        print(f"\n{key}: nothing to run, for these sets and methods")
        return
    print(heading(key), flush=True)
    for name in names:
        print_set(key, name, args, store)


def print_list(args: argparse.Namespace) -> None:
    """What there is to choose from."""
    for key in args.tables:
        table = TABLES[key]
        labels = table.columns if table.setting == COLLAPSED else [m.label for m in methods_of(table)]
        print(f"{key}: {table.title}: {QUANTITIES[table.quantity]}")
        print(f"    sets:    {', '.join(map(marks(args.data), table.values))}\n    methods: {', '.join(labels)}")


def marks(folder: Path | None) -> Callable[[str], str]:
    """A function that marks names of sets that have no file in the folder."""
    return lambda name: name if folder is None or (folder / f"{name}.npz").exists() else f"{name} (no file)"


# ---------------------------------------------------------------- the script


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of npz files with arrays X and y")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), metavar="PAPER[:TABLE]")
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS, metavar="SET", help="names of data sets")
    parser.add_argument("--methods", nargs="+", help='names, such as SVGP, or "SVGP 1024" for one line of the paper')
    parser.add_argument("--splits", type=positive, help="random splits; by default as many as in the paper")
    parser.add_argument("--num-inducing", type=positive, default=POINTS, help="what stands for 1024 points")
    parser.add_argument("--epochs", type=positive, default=EPOCHS, help="what stands for 100 epochs")
    parser.add_argument("--max-rows", type=positive, help="rows to train with, at most")
    dtypes = ", ".join(f"{dtype} for {name}" for name, dtype in DTYPES.items())
    parser.add_argument("--dtype", choices=("float32", "float64"), help=f"by default {dtypes}")
    parser.add_argument("--out", type=Path, default=Path("out/tables"), help="folder of fits that are done")
    parser.add_argument("--list", action="store_true", help="print tables, sets and methods, and run nothing")
    args = parser.parse_args(argv)
    try:
        args.tables = chosen_tables(args.tables)
        check_methods(args.methods or [])
    except ValueError as error:
        parser.error(str(error))
    if not args.list and args.data is None:
        parser.error("the following arguments are required: --data")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.list:
        print_list(args)
        return
    wanted = {name for key in args.tables for name in TABLES[key].values if name in args.sets}
    for name in SETS:
        if name in wanted and not (args.data / f"{name}.npz").exists():
            print(f"{name}: no file {args.data / f'{name}.npz'}, left out")
    store = Store(args.out / "fits.jsonl", Key)
    for key in args.tables:
        print_table(key, args, store)


if __name__ == "__main__":
    main()
