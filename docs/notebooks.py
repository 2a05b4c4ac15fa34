"""Every example as an executed notebook: python docs/notebooks.py [NAME ...] [--out FOLDER] [--quick]

A notebook is made of two sources: the words of the example's page (docs/examples/NAME.md) and the code of its script
(examples/NAME.py), which jupytext cuts into cells. nbclient runs it with the script's defaults; a cell that raises ends the run.
A notebook that was executed with the present sources, those of the package among them, is kept and not executed again.

The site offers the notebooks for download. It calls :func:`offer`, which writes those that were not executed without outputs, so
that outputs are never older than the code.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples"
PAGES = ROOT / "docs" / "examples"
FOLDER = ROOT / "docs" / "_build" / "notebooks"

DIRECTIVE = re.compile(
    r"^```\{.*?^```$\n?|^\{download\}.*$\n?|^By default it prints$\n?|^and draws$\n?", re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
LIMIT = 3600  # seconds for one cell


def names() -> list[str]:
    return sorted(path.stem for path in SCRIPTS.glob("*.py"))


def words(name: str) -> tuple[str, str]:
    """What the page says before its first piece of code, and what it says after its picture."""
    page = (PAGES / f"{name}.md").read_text()
    before, after = page.partition("```{literalinclude}")[0], page.rpartition("```{image}")[2].partition("```\n")[2]
    return tuple(LINK.sub(r"\1", DIRECTIVE.sub("", text)).strip() for text in (before, after))  # type: ignore[return-value]


def code_cells(name: str) -> list[NotebookNode]:
    """The cells of the script without its docstring and its last lines, all imports in one."""
    cells = jupytext.reads((SCRIPTS / f"{name}.py").read_text(), fmt="py:light").cells
    cells = [cell for cell in cells if not cell.source.startswith(('"""', "if __name__"))]
    first = next(i for i, cell in enumerate(cells) if not re.match(r"from |import ", cell.source))
    imports = "\n\n".join(cell.source for cell in cells[:first])
    kept = [new_code_cell(imports)]
    for cell in cells[first:]:
        kept.append(new_code_cell(cell.source) if cell.cell_type == "code" else new_markdown_cell(cell.source))
    return kept


def notebook(name: str, options: list[str]) -> NotebookNode:
    """The notebook of an example, not executed, with the digest of its sources."""
    before, after = words(name)
    bar = ["--no-progress-bar"] if "--no-progress-bar" in (SCRIPTS / f"{name}.py").read_text() else []
    needs = (
        f"*The script `examples/{name}.py` in cells. It needs `pip install '.[examples]'` in a copy of the repository.*"
    )
    run = new_code_cell(f"main({['--out', 'out', *bar, *options]!r});")
    show = new_code_cell(f'from IPython.display import Image\n\nImage("out/{name}.png")')
    cells = [new_markdown_cell(f"{before}\n\n{needs}"), *code_cells(name), run, show]
    cells += [new_markdown_cell(after)] if after else []
    for i, cell in enumerate(cells):
        cell["id"] = f"{name}-{i}"  # the same each time it is made
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    made.metadata["sources"] = digest(made)
    return made


def digest(made: NotebookNode) -> str:
    """Of the notebook's cells and of the package that they call."""
    hashed = hashlib.sha256("\0".join(cell.source for cell in made.cells).encode())
    for path in sorted((ROOT / "numpyro_orthgp").rglob("*.py")):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


def is_current(path: Path, made: NotebookNode) -> bool:
    """Whether the file is this notebook, executed with the present sources."""
    if not path.exists():
        return False
    metadata = nbformat.read(path, as_version=4).metadata
    return metadata.get("sources") == made.metadata["sources"] and metadata.get("executed", False)


def execute(made: NotebookNode) -> None:
    """Run all cells in an empty folder, with the package of this repository."""
    from nbclient import NotebookClient

    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "MPLBACKEND": "Agg"}
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(made, timeout=LIMIT, kernel_name="python3", coalesce_streams=True, resources=where).execute(
            env=environment
        )
    for cell in made.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":  # warnings of other packages name folders of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    made.metadata["executed"] = True


def offer(out: Path = FOLDER) -> None:
    """See to it that the folder has each notebook: executed with the present sources, or without outputs."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names():
        made = notebook(name, [])
        if not is_current(out / f"{name}.ipynb", made):
            nbformat.write(made, out / f"{name}.ipynb")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="examples to execute; by default all")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the notebooks")
    parser.add_argument("--quick", action="store_true", help="a few steps only, as the scripts have it")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(names())):
        parser.error(f"no such example: {', '.join(unknown)}; there are {', '.join(names())}")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or names():
        made, path, start = notebook(name, ["--quick"] * args.quick), args.out / f"{name}.ipynb", time.perf_counter()
        if is_current(path, made):
            print(f"{name}: as it was executed before")
            continue
        execute(made)
        nbformat.write(made, path)
        size = path.stat().st_size / 1000
        print(f"{name}: executed in {time.perf_counter() - start:.0f} s, {size:.0f} kB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
