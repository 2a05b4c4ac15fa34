"""The examples run as a user would run them, and Snelson's data shows what the papers say of it."""

from __future__ import annotations

import re
import subprocess
import warnings
from pathlib import Path

import pytest

from tests.pages import ROOT, run_python


def run(*args: object) -> str:
    """The output of a Python run in a process of its own, so that no setting of the tests leaks into it."""
    return run_python(list(map(str, args)), timeout=900, warns=False)


def table(output: str) -> dict[str, list[float]]:
    """Rows of a printed table, by their first cell: the numbers in the others."""
    cells = (re.split(r"\s{2,}", line.strip()) for line in output.splitlines())
    rows = {row[0]: row[1:] for row in cells if len(row) > 3}
    numeric = re.compile(r"-?\d+(\.\d+)?( %)?$")
    return {
        name: [float(c.split()[0]) for c in row if numeric.match(c)]
        for name, row in rows.items()
        if numeric.match(row[0])
    }


def assert_picture(path: Path) -> None:
    image = path.read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 20_000


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import arviz as az

    output = run("examples/demo.py", "--quick", "--no-progress-bar", "--out", tmp_path)
    rows = table(output)
    assert list(rows) == ["SVGP (8)", "SOLVE-GP (8+8)", "SOLVE-GP (8+8), tight", "SVGP (16)"]
    assert all(len(row) >= 6 for row in rows.values())
    assert_picture(tmp_path / "demo.png")

    opened = az.from_netcdf(str(tmp_path / "demo.nc"))
    for group in (
        "posterior",
        "posterior_predictive",
        "log_likelihood",
        "sample_stats",
        "observed_data",
        "constant_data",
    ):
        assert len(opened[group].data_vars) > 0, group
    assert opened["posterior"]["f"].dims == ("chain", "draw", "picture")
    assert opened["posterior"]["f"].shape == (1, 50, 1200)
    assert opened["posterior_predictive"]["y"].shape == opened["log_likelihood"]["y"].shape == (1, 50, 1200)
    assert {"X", "Z0", "Z1", "lengthscale", "scale"} == set(opened["constant_data"].data_vars)


@pytest.mark.slow
def test_snelson_runs_without_data(tmp_path: Path) -> None:
    rows = table(run("examples/snelson.py", "--quick", "--out", tmp_path))
    assert list(rows) == ["SVGP (5)", "SOLVE-GP (5+5)", "SVGP (10)", "exact GP", "SVGP (7), tight", "SVGP (7)"]
    assert_picture(tmp_path / "snelson.png")


@pytest.mark.slow
def test_snelson_shows_what_the_papers_say(tmp_path: Path, data: Path) -> None:
    rows = table(run("examples/snelson.py", "--data", data / "snelson.npz", "--out", tmp_path))
    bound = {name: row[0] for name, row in rows.items()}
    noise = {name: row[1] for name, row in rows.items()}
    # Shi, Titsias, Mnih 2020, Sec. 3.1: 5 + 5 does nearly what 10 do, and 5 do not.
    assert bound["SVGP (10)"] - 1.0 < bound["SOLVE-GP (5+5)"] <= bound["SVGP (10)"] + 0.05
    assert bound["SVGP (5)"] < bound["SVGP (10)"] - 10
    # Titsias 2025, Table 3: 0.0715, 0.087 and 0.108 on another subset of 40.
    assert bound["exact GP"] > bound["SVGP (7), tight"] > bound["SVGP (7)"]
    assert noise["exact GP"] < noise["SVGP (7), tight"] < noise["SVGP (7)"]
    assert 0.05 < noise["exact GP"] and noise["SVGP (7)"] < 0.15


# For each example: what its rows are called, and the picture it writes.
EXAMPLES = {
    "classification": [
        "SVGP (8)",
        "SOLVE-GP (8+8), anywhere",
        "SOLVE-GP (8+8)",
        "SOLVE-GP (8+8), tight",
        "SOLVE-GP (8+8), probit",
        "SVGP (16)",
    ],
    "regression": [
        "     4  titsias2009",
        "     4  titsias2025",
        "     8  titsias2009",
        "     8  titsias2025",
        "   all  exact GP",
    ],
    "one_call": ["one call", "trees", "linear regression", "mean"],
    "gplvm": ["GP-LVM", "nearest picture", "mean picture"],
    "counts": ["Poisson, exp", "Poisson, softplus", "NegativeBinomial", "ZeroInflated Poisson", "Poisson, no exposure"],
    "areal_counts": ["sum", "sum, by marginals", "average of f", "centre"],
    "survey": ["Ordinal, probit", "Ordinal, logit", "Gaussian", "Categorical"],
    "survival": ["Exponential", "Weibull", "Gamma", "LogNormal", "censored as relapses", "censored thrown away"],
    "digits": ["SVGP, softmax, Adam", "SVGP, softmax", "SOLVE-GP, softmax", "SOLVE-GP, robust-max"],
    "multitask": ["independent", "LMC", "ICM"],
    "neighbors": ["single rows", "groups of 16", "PIC, groups of 16"],
    "deep": [
        "1 layer, SVGP(10)",
        "1 layer, SVGP(10), tight",
        "2 layers, SVGP(10)",
        "2 layers, SVGP(10), tight",
        "2 layers, SOLVE-GP(5+5), tight",
        "2 layers, SOLVE-GP(10+10), tight",
    ],
    "streaming": ["   200", "   400"],
    "nuts": ["AutoDelta", "AutoNormal", "AutoMultivariateNormal", "NUTS"],
    "spatial": ["SVGP (24)", "SOLVE-GP (24+24)", "SVGP (48)"],
    "deep_kernel": ["   50  GP", "   50  network", "   50  deep kernel"],
}
Rows = dict[str, list[float]]


def counts_say(rows: Rows) -> None:
    # Even after a few steps: forgetting how long a period was costs a lot.
    assert rows["Poisson, no exposure"][0] < rows["Poisson, exp"][0] - 5


def regression_says(rows: Rows) -> None:
    # Lower bound, exact evidence, upper bound: each of the first and the last at parameters of its own.
    assert all(row[0] < row[1] for n, row in rows.items() if "titsias" in n)
    assert abs(rows["   all  exact GP"][0] - rows["   all  exact GP"][1]) < 0.01


def multitask_says(rows: Rows) -> None:
    assert min(rows["LMC"][1], rows["ICM"][1]) > rows["independent"][1] + 0.1


def classification_says(rows: Rows) -> None:
    # A second set can only add to the fit it grows from; a probit needs less of f than a logit.
    assert min(row[0] for name, row in rows.items() if name.startswith("SOLVE-GP (8+8)")) > rows["SVGP (8)"][0]
    assert rows["SOLVE-GP (8+8), probit"][3] < rows["SOLVE-GP (8+8)"][3]


def nuts_say(rows: Rows) -> None:
    # Median, 5 % and 95 % of the lengthscale, then of the scale: a point has no width, and a draw of NUTS may be anywhere.
    widths = {name: (row[2] - row[1], row[5] - row[4]) for name, row in rows.items()}
    assert widths["AutoDelta"] == (0, 0)
    assert min(*widths["AutoNormal"], *widths["AutoMultivariateNormal"], *widths["NUTS"]) > 0.2


def spatial_says(rows: Rows) -> None:
    # Neighbours help: blocks left out are harder than places held out here and there. So does a second set.
    assert all(row[4] < row[1] and row[5] > row[2] for row in rows.values())
    assert rows["SOLVE-GP (24+24)"][0] > rows["SVGP (24)"][0]


def neighbors_say(rows: Rows) -> None:
    # Objective, noise, log density and RMSE, each by the points and with neighbours.
    assert all(row[3] > row[2] and row[5] < row[4] for row in rows.values())


def deep_kernel_says(rows: Rows) -> None:
    # Few data: the better bound, and the worse predictions.
    gp, deep = rows["   50  GP"], rows["   50  deep kernel"]
    assert deep[0] > gp[0] and deep[1] < gp[1] and deep[3] < gp[3]


SAYS = {
    "counts": counts_say,
    "regression": regression_says,
    "multitask": multitask_says,
    "classification": classification_says,
    "nuts": nuts_say,
    "spatial": spatial_says,
    "deep_kernel": deep_kernel_says,
    "neighbors": neighbors_say,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, said",
    [
        ("thompson", "Thompson"),
        ("spectral", "Fourier + 2 points"),
        ("large", "SVGP (16)"),
        ("seasons", "one gp"),
        ("dates", "52 weeks before"),
    ],
)
def test_examples_with_tables_of_their_own(name: str, said: str, tmp_path: Path) -> None:
    bar = ["--no-progress-bar"] * (name == "large")
    assert said in run(f"examples/{name}.py", "--quick", "--out", tmp_path, *bar)
    assert_picture(tmp_path / f"{name}.png")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_examples(name: str, tmp_path: Path) -> None:
    if name == "deep_kernel":
        pytest.importorskip("flax")
    output = run(f"examples/{name}.py", "--quick", "--out", tmp_path, *(["--no-progress-bar"] * (name == "spatial")))
    rows = {row: [float(v) for v in re.findall(r"-?\d+\.\d+", line[len(row) :])] for row in EXAMPLES[name]
            for line in output.splitlines() if re.match(re.escape(row) + r"\s{2,}-?\d", line)}  # fmt: skip
    assert list(rows) == EXAMPLES[name] and all(rows.values())
    assert_picture(tmp_path / f"{name}.png")
    if name in SAYS:
        SAYS[name](rows)


SCRIPTS = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_gallery(name: str) -> None:
    """Every example has a page that shows its model, its table and its picture, a target, a line in the list, and a card."""
    docs = ROOT / "docs"
    page = (docs / "examples" / f"{name}.md").read_text()
    assert f"../../examples/{name}.py\n:" in page
    for shown in (f"tables/{name}.txt", f"../_static/examples/{name}.png"):
        assert shown in page and (docs / "examples" / shown).is_file()
    assert re.search(rf"^{name}$", (docs / "examples" / "index.md").read_text(), re.MULTILINE)
    picture = docs / "_static" / "examples" / f"{name}.png"
    assert_picture(picture)
    assert len(picture.read_bytes()) < 150_000
    assert (docs / "examples" / "tables" / f"{name}.txt").read_text().startswith(f"$ make {name}\n")
    assert f"| `make {name}` |" in (docs / "examples" / "index.md").read_text()
    card = (docs / "_static" / "cards" / f"{name}.png").read_bytes()
    assert card.startswith(b"\x89PNG") and 2_000 < len(card) < 40_000
    front = (docs / "index.md").read_text()
    assert f":img-top: _static/cards/{name}.png" in front and f":link: examples/{name}\n" in front
    done = subprocess.run(["make", "-n", name], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"examples/{name}.py" in done.stdout, done.stderr
