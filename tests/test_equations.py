"""The index of equations, the notation and the theory pages say what is there: code, tests, numbers and names of sites."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "docs" / "theory" / "equations.md"
THEORY = sorted((ROOT / "docs" / "theory").glob("*.md"))
NOTATION = ROOT / "docs" / "notation.md"

pages = pytest.mark.parametrize("page", [*THEORY, NOTATION], ids=lambda page: page.stem)

# Headings of the index, and the last number of each paper's equations.
SALIMBENI, SHI, CONFERENCE, TITSIAS = (
    "Salimbeni et al. 2018", "Shi et al. 2020", "Numbers of the conference version", "Titsias 2025",
)  # fmt: skip
OTHERS = ("Artemev et al. 2021", "Hensman et al. 2013 and 2015")
LAST = {SALIMBENI: 34, SHI: 30, CONFERENCE: 37, TITSIAS: 37}


# ---------------------------------------------------------------- reading the pages


def tables(text):
    """The rows of the table under each heading, as dictionaries from column to cell."""
    found, heading, columns = {}, None, None
    for line in text.splitlines():
        if line.startswith("#"):
            heading, columns = line.lstrip("# "), None
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if columns is None:
                columns = cells
            elif not set(line) <= set("|- "):
                found.setdefault(heading, []).append(dict(zip(columns, cells, strict=True)))
    return found


@cache
def index():
    return tables(INDEX.read_text())


def named_code(text):
    return re.findall(r"\{py:\w+\}`~?(numpyro_orthgp[\w.]*)`", text)


def named_tests(text):
    return re.findall(r"`(tests/test_\w+\.py)::(\w+)`", text)


def look_up(name):
    """The object of that dotted name: modules as far as there are some, then attributes."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@cache
def functions_of(path):
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


# ---------------------------------------------------------------- what is named is there


@pages
def test_code_can_be_imported(page):
    for name in named_code(page.read_text()):
        look_up(name)


@pages
def test_tests_exist(page):
    for path, name in named_tests(page.read_text()):
        assert name in functions_of(path), f"{page.name} names {path}::{name}, which is not there"


@pages
def test_files_exist(page):
    for path in re.findall(r"`((?:benchmarks|tests|docs|examples)/[\w/]+\.(?:py|md))`", page.read_text()):
        assert (ROOT / path).is_file(), f"{page.name} names {path}, which is not there"


@pages
def test_every_page_is_in_the_table_of_contents(page):
    contents = (ROOT / "docs" / "theory" / "index.md").read_text().split("```")[1].split()
    assert page.stem in {*contents, "index", "notation"}


def test_the_reader_would_miss_what_is_not_there():
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        look_up("numpyro_orthgp.functions.projection.projekt")
    with pytest.raises(ModuleNotFoundError):
        look_up("no_such_package.at_all")
    assert named_code("{py:func}`~numpyro_orthgp.gp` `numpyro_orthgp.fit`") == ["numpyro_orthgp.gp"]
    assert named_tests("`tests/test_a.py::test_b`, `tests/oracles.py`") == [("tests/test_a.py", "test_b")]


# ---------------------------------------------------------------- the index


def test_no_row_is_empty():
    assert set(index()) == {*LAST, *OTHERS}
    for heading, rows in index().items():
        for row in rows:
            assert all(row.values()), f"{heading}: an empty cell in {row}"


def test_rows_name_code_and_a_test_or_why_not():
    for heading, rows in index().items():
        if heading == CONFERENCE:
            continue
        for row in rows:
            if row["code"].startswith("not built: "):
                assert row["test"] == "none" or named_tests(row["test"]), (heading, row)
            else:
                assert named_code(row["code"]) and named_tests(row["test"]), (heading, row)


@pytest.mark.parametrize("paper", LAST)
def test_no_number_is_left_out_or_there_twice(paper):
    numbers = [row["number"] for row in index()[paper]]
    assert len(set(numbers)) == len(numbers)
    plain = [int(re.sub("[a-c]$", "", n)) for n in numbers if re.fullmatch(r"\d+[a-c]?", n)]
    assert list(dict.fromkeys(plain)) == list(range(1, LAST[paper] + 1))
    if paper == SALIMBENI:
        assert {"16a", "16b", "16c"} <= set(numbers)


def test_the_conference_version_points_to_rows():
    numbers = {row["number"] for row in index()[SHI]}
    for row in index()[CONFERENCE]:
        pointed = re.findall(r"\d+", row["number above"])
        assert pointed and set(pointed) <= numbers, row


# ---------------------------------------------------------------- citations

PAPERS = {
    SALIMBENI: r"Salimbeni(?: et al\.|, Cheng, Boots, Deisenroth\.?)(?: [A-Z][^\d]*?)? 2018",
    SHI: r"Shi(?: et al\.|, Titsias, Mnih\.?)(?: [A-Z][^\d]*?)? 2020",
    TITSIAS: r"(?<!, )Titsias\.?(?: [A-Z][^\d]*?)? 2025",
    "another": r"\b(?:19[5-9]\d|20[0-3]\d)\b",
}
NUMBER = r"(?:[A-Z]\.)?\d+(?:\.\d+)?[a-c]?"
CITATION = re.compile(
    rf"(Eqs?\.|Props?\.|Lemmas?) ({NUMBER}(?:(?:-|, | and |, and ){NUMBER})*)(?: of (\[\d+\]|[A-Z]))?"
)


def mentions(text):
    """Papers that the text mentions, as (start, end, paper); a year belongs to the longest mention it is part of."""
    found = []
    for paper, pattern in PAPERS.items():
        for match in re.finditer(pattern, text):
            if not any(start <= match.start() and match.end() <= end for start, end, _ in found):
                found.append((*match.span(), paper))
    return sorted(found)


def numbers_of(kind, text):
    """The numbers that "2-4", "16a and 17" or "8, 16, 36" stand for, as the index writes them."""
    numbers = []
    for part in re.split(r", and | and |, ", text):
        first, *rest = part.split("-")
        numbers += [str(n) for n in range(int(first), int(rest[0]) + 1)] if rest else [first]
    prefix = {"E": "", "P": "Prop. ", "L": "Lemma "}[kind[0]]
    return [prefix + n for n in numbers]


def citations(text):
    """The equations that a text cites, as (paper, number); the paper is ``None`` where none is named before."""
    references = dict(re.findall(r"^\s*(\d+)\. (.+)$", text, re.MULTILINE))
    text = " ".join(text.split())
    named = mentions(text)
    for match in CITATION.finditer(text):
        kind, numbers, of = match.groups()
        if of and of.startswith("["):
            inside = mentions(references.get(of.strip("[]"), ""))
            paper = inside[0][2] if inside else None
        elif of:
            paper = next((p for start, _, p in named if start >= match.start(3)), None)
        else:
            paper = next((p for _, end, p in reversed(named) if end <= match.start()), None)
        yield from ((paper, number) for number in numbers_of(kind, numbers))


def docstrings(path):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and ast.get_docstring(node):
            yield getattr(node, "name", "module"), ast.get_docstring(node)


@cache
def cited():
    """All that docstrings of the package and theory pages cite, as (where, paper, number)."""
    texts = [(page.name, page.read_text()) for page in THEORY if page != INDEX]
    for path in sorted((ROOT / "numpyro_orthgp").rglob("*.py")):
        texts += [(f"{path.relative_to(ROOT)}: {name}", text) for name, text in docstrings(path)]
    return [(where, *citation) for where, text in texts for citation in citations(text)]


def missing_from(rows):
    """The citations that the rows, as `index` reads them, do not hold."""
    known = {(paper, row["number"]) for paper in (SALIMBENI, SHI, TITSIAS) for row in rows[paper]}
    known |= {(paper, re.sub(r"(\d)[a-c]$", r"\1", number)) for paper, number in known}
    return [citation for citation in cited() if citation[1:] not in known]


def test_cited_equations_are_in_the_index():
    allowed = [("numpyro_orthgp/kernels/coregion.py: Coregion", "another", "1")]
    missing = missing_from(index())
    assert missing == allowed, (
        "cited, but not in docs/theory/equations.md; where no paper is recognized, name it before the number as in 'Shi et al. "
        f"2020, Eq. 21': {[m for m in missing if m not in allowed]}"
    )


def test_citations_are_found():
    by_paper = {paper: {n for _, p, n in cited() if p == paper} for paper in (SALIMBENI, SHI, TITSIAS)}
    assert {"12", "16a", "17", "Prop. A.1"} <= by_paper[SALIMBENI]
    assert {"2", "3", "4", "12", "17", "18", "21", "22", "23", "24", "27", "28", "29"} <= by_paper[SHI]
    assert {"8", "16", "19", "23", "29", "36", "37", "Lemma 3.1", "Prop. 3.5"} <= by_paper[TITSIAS]


@pytest.mark.parametrize(("paper", "number"), [(TITSIAS, "23"), (SHI, "21"), (SALIMBENI, "Prop. A.1"), (SHI, "24")])
def test_a_row_that_is_taken_out_is_missed(paper, number):
    without = index() | {paper: [row for row in index()[paper] if row["number"] != number]}
    assert (paper, number) in [m[1:] for m in missing_from(without)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Shi et al. 2020, Eq. 21", [(SHI, "21")]),
        ("Shi, Titsias, Mnih. Sparse Orthogonal Inference. 2020. Eqs. 2-4.", [(SHI, "2"), (SHI, "3"), (SHI, "4")]),
        ("of Hensman et al. 2015; Eqs. 17-18 of\nShi et al. 2020; more", [(SHI, "17"), (SHI, "18")]),
        ("Salimbeni et al. 2018, Prop. A.1", [(SALIMBENI, "Prop. A.1")]),
        ("Eqs. 16a and 17 of [3]\n\n  3. Salimbeni, Cheng, Boots, Deisenroth. ODVGP. 2018.",
         [(SALIMBENI, "16a"), (SALIMBENI, "17")]),
        ("Salimbeni, Eleftheriadis, Hensman 2018, Eq. 3", [("another", "3")]),
        ("Titsias 2009; Titsias 2025, Eqs. 8, 16, 36", [(TITSIAS, "8"), (TITSIAS, "16"), (TITSIAS, "36")]),
        ("Titsias, Lawrence 2010, Eq. 7", [("another", "7")]),
        ("Titsias 2025, Lemma 3.1 and App. B.5", [(TITSIAS, "Lemma 3.1")]),
        ("at most 2048 of them (Eq. 5)", [(None, "5")]),
    ],
)  # fmt: skip
def test_citations_are_read(text, expected):
    assert list(citations(text)) == expected


# ---------------------------------------------------------------- claims of the pages that other tests do not hold


def test_sites_and_their_shapes_are_those_of_the_notation(rng):
    """Names and shapes under "Sites": a gp with mean-only points and one with two sets, at latent inputs."""
    sizes = {"M_i": 4, "H": 3, "N": 6, "B": 5, "Q": 2}
    points = [jnp.asarray(rng.normal(size=(sizes[n], 2))) for n in ("M_i", "M_i", "H")]

    def model(Y, *, inducing):
        f = ogp.gp("f", kernels.RBF(1.0), inducing)
        with numpyro.plate("rows", sizes["N"], subsample_size=sizes["B"]) as rows:
            X = ogp.latent_inputs("X", sizes["N"], sizes["Q"])
            numpyro.sample("y", dist.Normal(f(X).sample(), 1.0), obs=Y[rows])

    def shapes_of(inducing, covariance):
        arguments = {"Y": jnp.zeros(sizes["N"]), "inducing": inducing}
        guide = ogp.AutoSparseGP(model, residual="tight", covariance=covariance)
        ours = handlers.trace(handlers.seed(guide, 0)).get_trace(**arguments)
        theirs = handlers.trace(handlers.seed(handlers.replay(model, ours), 1)).get_trace(**arguments)
        # A factor has no value; what it adds to the log density has the shape.
        return {
            name: site["value"] if site["value"].size else site["fn"].log_prob(site["value"])
            for name, site in (theirs | ours).items()
            if site["type"] in ("sample", "param")
        }

    shapes = {}
    for inducing, covariance in (([points[0], ogp.MeanOnly(points[2])], "full"), (points[:2], "diagonal")):
        sites = jax.eval_shape(lambda inducing=inducing, covariance=covariance: shapes_of(inducing, covariance))
        shapes |= {name: site.shape for name, site in sites.items()}
    for row in tables(NOTATION.read_text())["Sites"]:
        letters = [letter for letter in re.split(r"[(),$ ]+", row["shape"]) if letter]
        for name in re.findall(r"`([^`]+)`", row["site"]):
            assert name in shapes, f"the notation names {name}; there are {sorted(shapes)}"
            if row["shape"]:
                assert shapes[name] == tuple(sizes[letter] for letter in letters), name
