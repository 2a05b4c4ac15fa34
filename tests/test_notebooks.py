"""Examples as notebooks: the code of the script and the words of the page, executed, and never with outputs older than the code."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def notebooks():
    for package in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import notebooks
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return notebooks


def source(cells) -> str:
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "code")


def statements(code: str) -> list[str]:
    return [ast.dump(node) for node in ast.parse(code).body]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_code_of_the_script_and_the_words_of_the_page(name: str, notebooks) -> None:
    made = notebooks.notebook(name, [])
    script = statements((ROOT / "examples" / f"{name}.py").read_text())
    assert statements(source(made.cells[:-1]))[: len(script) - 2] == script[1:-1]  # without docstring and last lines
    page = (ROOT / "docs" / "examples" / f"{name}.md").read_text()
    first = made.cells[0]
    run, show = [cell for cell in made.cells if cell.cell_type == "code"][-2:]
    assert first.source.startswith(page.splitlines()[0]) and len(first.source) > 200
    assert "main(['--out', 'out'" in run.source and show.source.endswith(f'Image("out/{name}.png")')
    text = "".join(cell.source for cell in made.cells if cell.cell_type == "markdown")
    assert "```{" not in text and "](" not in text and "{download}" not in text
    assert f"<../_build/notebooks/{name}.ipynb>" in page


def test_outputs_are_offered_only_if_they_are_of_the_present_sources(notebooks, tmp_path: Path) -> None:
    import nbformat

    notebooks.offer(tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.ipynb")) == NAMES
    made, path = notebooks.notebook("counts", []), tmp_path / "counts.ipynb"
    assert not notebooks.is_current(path, made)  # not executed
    made.metadata["executed"] = True
    made.cells[-3].outputs = [nbformat.v4.new_output("stream", text="printed")]
    nbformat.write(made, path)
    notebooks.offer(tmp_path)
    assert notebooks.is_current(path, made) and "printed" in path.read_text()
    made.metadata["sources"] = "of other sources"
    nbformat.write(made, path)
    notebooks.offer(tmp_path)
    assert "printed" not in path.read_text()
    other = notebooks.notebook("counts", ["--quick"])
    assert notebooks.digest(other) != notebooks.digest(notebooks.notebook("counts", []))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_call", "counts"])
def test_notebooks_are_executed(name: str, notebooks, tmp_path: Path) -> None:
    import nbformat

    notebooks.main([name, "--quick", "--out", str(tmp_path)])
    made = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    printed = "".join(output.text for cell in made.cells for output in cell.get("outputs", []) if "text" in output)
    pictures = [o for cell in made.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(printed) > 300 and len(pictures) == 1 and len(pictures[0].data["image/png"]) > 20_000
    assert "site-packages" not in (tmp_path / f"{name}.ipynb").read_text()
    notebooks.main([name, "--quick", "--out", str(tmp_path)])  # as it was executed before
    assert nbformat.read(tmp_path / f"{name}.ipynb", as_version=4) == made


def test_a_cell_that_raises_ends_it(notebooks) -> None:
    from nbclient.exceptions import CellExecutionError

    broken = notebooks.nbformat.v4.new_notebook(cells=[notebooks.new_code_cell("raise ValueError('no')")])
    with pytest.raises(CellExecutionError, match="no"):
        notebooks.execute(broken)
