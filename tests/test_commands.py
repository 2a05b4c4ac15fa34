"""Commands that README and the documentation name: scripts know their options, and run on made-up data at sizes of a test."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.pages import ROOT, run_python

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
COMMAND = re.compile(r"`(?:[A-Z_]+=\d+ )?python ((?:-m benchmarks\.|benchmarks/|examples/)[^`]*)`")

# What makes a run of each script short; the last word given for an option is the one that holds. Examples that need no data
# are in test_examples.py, benchmarks that need none in test_benchmarks.py.
SHORT = {
    "cifar10": "--rows 1-svgp --images 24 --test-images 8 --steps 2 --batch-size 4 --scale 0.01",
    "convolutional": "--quick --methods tick --sizes 8 --refine 1",
    "decoupled_bases": "--num-data 60 --num-inducing 6 --steps 10",
    "deep": "--quick --seeds 1 --steps 2",
    "few_rows": "--sets airfoil --rows 12 --splits 1 --budget 1",
    "families": "--rows 200 --num-inducing 12 --steps 20",
    "equal_time": "--num-inducing 8 --steps 4 --seeds 0",
    "hierarchical": "--steps 4 --models counties",
    "groups": "--num-data 60 --num-inducing 6 --neighbors 5 --steps 2 --sets bike --group-sizes 4",
    "lbfgs": "--num-inducing 8 --steps 4 --max-rows 60 --sets airfoil",
    "medium_regression": "--num-data 60 --num-inducing 6 --steps 2 --sets bike",
    "no_choices": "--sets airfoil wdbc nyc_bicycle --max-rows 60 --budget 1 --methods 'one call' trees linear mean GPyTorch",
    "natural_gradients": "--num-data 100 --num-inducing 8 --batch-size 20 --steps 4 --natural-steps 4",
    "oil_flow": "--dims 2 --num-inducing 6 --steps 40 --batch 20",
    "peers": "--tasks step --sizes 8 --batch-size 20 --rounds 1 --blocks 1 --seconds 0.01",
    "poisson": "--repeats 1 --steps 2",
    "step_time": "--num-inducing 8 --batch-size 20 --blocks 1 --per-block 1",
    "tables": "--num-inducing 8 --epochs 1 --max-rows 60 --splits 1 --sets kin40k --tables titsias2025:2",
}
WRITING = {"convolutional", "deep", "medium_regression", "oil_flow", "peers", "tables"}


def script_of(command: str) -> str:
    return re.match(r"(?:-m benchmarks\.|(?:benchmarks|examples)/)(\w+)", command)[1]


def commands() -> list[str]:
    """Each command once, without the interpreters of other libraries, which a reader fills in."""
    found = [" ".join(m.split()) for page in PAGES for m in COMMAND.findall(page.read_text())]
    return sorted({re.sub(r" --peer \w+=PYTHON| \.\.\.", "", command) for command in found})


def jpeg(rng: np.random.Generator) -> np.ndarray:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(file, "JPEG")
    return np.frombuffer(file.getvalue(), np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Files of the names and shapes that the commands ask for."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("data")

    def regression(name: str, num: int, dim: int) -> None:
        X = rng.normal(size=(num, dim))
        np.savez(folder / f"{name}.npz", X=X, y=np.sin(X.sum(1)) + 0.1 * rng.normal(size=num))

    regression("kin40k", 1300, 8)
    for name in ("airfoil", "bike"):
        regression(name, 150, 5)
    counties = {
        "nonwhite": rng.normal(size=40),
        "region": rng.integers(1, 13, 40),
        "births": rng.uniform(500, 2000, 40),
    }
    np.savez(folder / "nc_sids.npz", X=rng.normal(size=(40, 2)), y=rng.poisson(3.0, 40), **counties)
    np.savez(folder / "nyc_bicycle_kaggle210.npz", X=rng.uniform(size=(50, 2)), counts=rng.poisson(5.0, (50, 1)))
    label = np.arange(60) % 3
    np.savez(folder / "three_phase_oil_flow.npz", X=rng.normal(size=(60, 12)) + label[:, None], label=label)
    np.savez(folder / "wdbc.npz", X=rng.normal(size=(80, 3)), y=np.arange(80) % 2)
    rides = {"total": rng.poisson(5.0, 80), "day_of_week": np.arange(80) % 7}
    np.savez(folder / "nyc_bicycle.npz", X=rng.uniform(size=(80, 3)), **rides)
    pictures = {f"X{end}": rng.integers(0, 256, (120, 28, 28), np.uint8) for end in ("_train", "_test")}
    np.savez(folder / "mnist.npz", **pictures, y_train=np.arange(120) % 10, y_test=np.arange(120) % 10)
    files = [jpeg(rng) for _ in range(40)]
    offset = np.cumsum([0, *map(len, files)])
    arrays = {"jpeg": np.concatenate(files), "offset": offset, "label": np.arange(40) % 10}
    np.savez(folder / "cifar10_jpeg.npz", **arrays, is_test=np.arange(40) % 4 == 0)
    return folder


def by_script() -> dict[str, list[str]]:
    scripts: dict[str, list[str]] = {}
    for command in commands():
        scripts.setdefault(script_of(command), []).append(command)
    return scripts


def test_commands_are_found_and_none_is_left_out() -> None:
    needing_data = {script for script, found in by_script().items() if any("--data" in command for command in found)}
    assert needing_data == set(SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("script", by_script())
def test_script_runs_and_knows_the_options_it_is_given(script: str, folder: Path, tmp_path: Path) -> None:
    found = by_script()[script]
    start = next((i for i, command in enumerate(found) if "--data" in command), 0)
    words = [
        str(folder / word) if word.endswith(".npz") else str(folder) if word == "DIR" else word
        for word in shlex.split(found[start])
    ]
    target = words[: 1 + (words[0] == "-m")]
    known = set(re.findall(r"--[a-z0-9-]+", run_python([*target, "--help"])))
    assert {word for command in found for word in command.split() if word.startswith("--")} <= known
    if script not in SHORT:
        return
    words += shlex.split(SHORT[script])
    if script in WRITING:
        words += ["--out", str(tmp_path / "peers.json" if script == "peers" else tmp_path)]
    assert len(run_python(words).splitlines()) > 2
