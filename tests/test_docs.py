"""The documentation is true: blocks run and print what pages show, links lead somewhere, every public name has an entry."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

import numpyro_orthgp
from numpyro_orthgp import init, kernels, likelihoods, online, plots
from tests.pages import ROOT, Block, blocks_of, differences, run_blocks, run_python

DOCS = ROOT / "docs"
QUICK = {"guide/accelerators.md", "guide/trouble.md"}  # others take more than about ten seconds
PAGES = sorted(DOCS.glob("**/*.md"))
WITH_CODE = (ROOT / "README.md", DOCS / "getting_started.md", *sorted((DOCS / "guide").glob("*.md")))
RUNNING = [page for page in WITH_CODE if blocks_of(page)]

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(
    r"^\.\. auto(module|class|function|data):: numpyro_orthgp\.?([\w.]*)(?:\(\))?$(\n   :no-members:)?", re.M
)


def name_of(page: Path) -> str:
    return page.relative_to(DOCS if DOCS in page.parents else ROOT).as_posix()


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=name_of(p), marks=[] if name_of(p) in QUICK else pytest.mark.slow) for p in RUNNING],
)
def test_blocks_run_and_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    printed = run_blocks(blocks, tmp_path / "page.py")
    assert len(printed) == len(blocks)
    for block, output in zip(blocks, printed, strict=True):
        if block.output is not None:
            assert differences(block.output, output) == [], block.code


def test_blocks_of_a_page_are_found_and_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\nWords.\n\n```python\nprint(x, 0.123)\n```\n\n```text\n1 0.12\n```\n")
    assert blocks_of(page) == [Block("x = 1\n", None), Block("print(x, 0.123)\n", "1 0.12\n")]
    assert run_blocks(blocks_of(page), tmp_path / "page.py") == ["", "1 0.123\n"]
    assert differences("1 0.12", "1 0.123") == [] and differences("loss 376.0", "loss 376.9") == []
    assert differences("1 0.12", "2 0.12") and differences("-0.42", "-0.47") and differences("a 1", "b 1")
    assert differences("loss 376.0", "loss 386.0") and differences("one two", "one")
    with pytest.raises(AssertionError, match="NameError"):
        run_blocks([Block("print(y)\n", None)], tmp_path / "page.py")


def test_forked_scripts_are_processes_of_their_own(tmp_path: Path) -> None:
    def run(code: str, *words: str, **options: object) -> str:
        (tmp_path / "script.py").write_text(code)
        return run_python([str(tmp_path / "script.py"), *words], **options)

    said = run(
        "import os, sys, jax\njax.left = __name__\nprint(os.getcwd(), sys.argv[1:], sys.path[0])", "a", cwd=tmp_path
    )
    assert said == f"{tmp_path} ['a'] {tmp_path}\n"
    assert run("import jax, os\nprint(hasattr(jax, 'left'), jax.config.jax_enable_x64)") == "False False\n"
    warning = "import warnings\nwarnings.warn('so')\nprint(1)"
    assert run(warning) == "1\n"
    with pytest.raises(AssertionError, match="UserWarning: so"):
        run(warning, warns=False)
    with pytest.raises(AssertionError, match="exit status 3"):
        run("raise SystemExit(3)")
    with pytest.raises(AssertionError, match="exit status -14"):
        run("import time\ntime.sleep(60)", timeout=1)


PICTURE = re.compile(
    r"^```python\n(?P<code>.*?)^```$|!\[(?P<says>[^\]]*)\]\((?P<image>[^)]+\.png)\)", re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page.parent != ROOT], ids=name_of)
def test_pictures_follow_the_block_that_draws_them(page: Path) -> None:
    """`python docs/pictures.py --page PAGE` makes them all: each is the last figure of the block before it."""
    code = ""
    for found in PICTURE.finditer(page.read_text()):
        if found["code"] is not None:
            code = found["code"]
            continue
        picture = (page.parent / found["image"]).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) < 150_000, found["image"]
        assert "plt." in code or "plots." in code, found["image"]
        assert len(found["says"]) > 20, found["image"]  # for those who cannot see it


def test_getting_started_shows_a_picture_of_each_step() -> None:
    shown = [
        Path(found["image"]).stem
        for found in PICTURE.finditer((DOCS / "getting_started.md").read_text())
        if found["image"]
    ]
    assert shown == ["data", "one_call", "prior", "loss", "fit", "residual", "two_sets", "labels"]


def too_wide(lines: Iterable[str], columns: int) -> list[str]:
    return [line for line in lines if len(line) > columns]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_is_not_wider_than_the_page(page: Path) -> None:
    """Beyond 98 columns it would have to be moved sideways to be read, on a screen of 1400 pixels."""
    assert [line for block in blocks_of(page) for line in too_wide(block.code.splitlines(), 98)] == []


def test_examples_of_docstrings_are_not_wider_than_the_page() -> None:
    found = {}
    for path in sorted((ROOT / "numpyro_orthgp").glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                examples = [
                    line for example in re.findall(r"^(?:>>>|\.\.\.) .*(?:\n.+)*", ast.get_docstring(node) or "", re.M)
                    for line in example.splitlines()
                ]  # fmt: skip
                if wide := too_wide(examples, 93):
                    found[path.name] = wide
    assert found == {}


def test_every_page_is_in_a_toctree() -> None:
    listed = {"index"}
    for page in PAGES:
        for block in TOCTREE.findall(page.read_text()):
            entries = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith(":")]
            found = [(page.parent / entry).resolve() for entry in entries]
            assert [e.name for e in found if not e.with_name(f"{e.name}.md").exists()] == [], name_of(page)
            listed |= {entry.relative_to(DOCS).as_posix() for entry in found}
    included = {"guide/corners"}  # within guide/numpyro
    pages = {name_of(page).removesuffix(".md") for page in PAGES if "_build" not in page.parts}
    assert pages - included == listed


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES], ids=str)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", prose)):
        target, _, heading = link.partition("#")
        if "://" in link or heading.startswith(
            "numpyro_orthgp."
        ):  # of other sites, and of entries: Sphinx looks at these
            continue
        file = page if not target else page.parent / target
        assert file.exists(), f"{page.name}: {link}"
        assert not heading or heading in anchors(file), f"{page.name}: {link}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    targets |= set(re.search(r"^EXAMPLES := (.*)$", makefile, re.MULTILINE)[1].split())
    texts = [path.read_text() for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES)]
    named = {name for text in texts for name in re.findall(r"(?:`|^    )make ([a-z_]+)", text, re.MULTILINE)}
    assert len(named) > 10 and named <= targets


def entries() -> tuple[set[str], set[str]]:
    """Names that the API pages have by themselves, and those that they have as members of a module; without the package's own."""
    by_themselves, members = set(), set()
    for page in (DOCS / "api").glob("*.md"):
        for kind, name, without_members in DIRECTIVE.findall(page.read_text()):
            if kind != "module":
                by_themselves.add(name)
            elif not without_members:
                module = importlib.import_module(f"numpyro_orthgp.{name}")
                members |= {f"{name}.{m}" for m in module.__all__ if callable(getattr(module, m))}
    return by_themselves, members


def documented() -> set[str]:
    return set.union(*entries())


def public() -> set[str]:
    """Public names of the package, and of the rooms that are called by their own name, without the package's own."""
    names = {n for n, v in vars(numpyro_orthgp).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    for module in (kernels, likelihoods, init, online, plots):
        room = module.__name__.rpartition(".")[2]
        members = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if isinstance(v, type)]
        names |= {f"{room}.{member}" for member in members}
    return names


def test_every_public_name_has_an_entry() -> None:
    also_in_likelihoods = {"Likelihood", "GaussHermite", "MonteCarlo", "QuasiMonteCarlo"}
    assert len(public()) > 80
    assert public() - also_in_likelihoods - documented() == set()
    assert {f"likelihoods.{name}" for name in also_in_likelihoods} <= documented()


def test_functions_with_rules_of_their_own_have_an_entry() -> None:
    """Sphinx's ``automodule`` passes over what JAX wrapped: those names need ``autofunction``."""
    by_themselves, members = entries()
    wrapped = {name for name in members if not is_plain(name)}
    assert len(wrapped) > 5 and wrapped <= by_themselves


def test_members_of_modules_that_pages_list_have_a_docstring() -> None:
    """Sphinx's ``automodule`` passes over members without one."""
    by_themselves, members = entries()
    assert [name for name in sorted(members - by_themselves) if not (member(name).__doc__ or "").strip()] == []


def member(name: str) -> object:
    module, _, attribute = f"numpyro_orthgp.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def is_plain(name: str) -> bool:
    value = member(name)
    return inspect.isroutine(value) or inspect.isclass(value)


def test_messages_that_the_guide_explains_are_those_of_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "numpyro_orthgp").rglob("*.py"))
    table = (DOCS / "guide" / "trouble.md").read_text().partition("## What messages mean")[2]
    messages = [re.sub(r"^`+ ?| ?`+$", "", row[0].split(" (or ")[0].strip()) for row in
                (line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `"))]  # fmt: skip
    assert len(messages) > 10
    for message in messages:
        for part in re.split(r"\.\.\.|`\w+`|\(N,\)|\(N, 1\)|float32|float64|Marginals \+|Bernoulli", message):
            assert part.strip(" ;") in code, message


# What a browser fetches by itself: scripts, pictures and frames, links of a page's head, and what style sheets import.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?P<src>(?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon|modulepreload))[^>]*\bhref=["']?(?P<href>(?:https?:)?//[^"'\s>]+)"""
    r"""|(?:@import\s+|url\()\s*["']?(?P<url>(?:https?:)?//[^"'\s)]+)"""
)


def outside(site: Path) -> list[str]:
    """Addresses of other sites that the pages or style sheets of a built site would have a browser fetch."""
    files = sorted([*site.rglob("*.html"), *site.rglob("*.css")])
    return [f"{path.relative_to(site)}: {found[0]}" for path in files for found in FETCHED.finditer(path.read_text())]


def test_addresses_of_other_sites_are_found(tmp_path: Path) -> None:
    bad = [
        '<script defer="defer" src="https://cdn.example/mathjax.js"></script>',
        '<link rel="stylesheet" type="text/css" href="//fonts.example/a.css" />',
        '<link href="https://fonts.example" rel="preconnect">',
        "<style>@font-face { src: url('https://fonts.example/a.woff2') }</style>",
        '<style>@import "https://fonts.example/b.css";</style>',
        '<img alt="x" src="http://pictures.example/a.png">',
    ]
    good = (
        '<a href="https://num.pyro.ai">NumPyro</a><script src="_static/a.js"></script><link rel="next" href="b.html" />'
    )
    (tmp_path / "bad.html").write_text("\n".join(bad))
    (tmp_path / "good.html").write_text(good)
    assert [line.partition(":")[0] for line in outside(tmp_path)] == ["bad.html"] * len(bad)


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo", "sphinx_design", "sphinx-mathjax-offline", "jupytext"):
        pytest.importorskip(name)
    site = Path(os.environ.get("BUILT_SITE", tmp_path))  # `make site` has just built one
    if site == tmp_path:
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-b", "html", "docs", str(site)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
    assert outside(site) == []
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    with_formulas = [page for page in pages.values() if 'class="math' in page]
    assert len(with_formulas) > 20 and all("_static/tex-svg.js" in page for page in with_formulas)
    assert b"MathJax" in (site / "_static" / "tex-svg.js").read_bytes()
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, uri: uri)
    entries = {name for kind, objects in inventory.items() if kind.startswith("py:") for name in objects}
    assert {f"numpyro_orthgp.{name}" for name in documented()} <= entries


@pytest.mark.slow
def test_examples_in_docstrings() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--doctest-modules", "numpyro_orthgp", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 25
