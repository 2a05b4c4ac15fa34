"""Three users' stories: ours run and find what made the data, in fewer lines than GPflow's and GPyTorch's, as the guide says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import jax
import pytest

from benchmarks.stories.__main__ import counts, lines_of_code, table

ROOT = Path(__file__).parents[1]


def test_ours_have_the_fewest_lines_and_the_guide_has_the_counts() -> None:
    for story, of in counts().items():
        assert of["ours"] < min(of["gpflow"], of["gpytorch"]), story
    assert table() in (ROOT / "docs" / "guide" / "coming_from.md").read_text()


def test_lines_are_those_with_code() -> None:
    assert lines_of_code('"""Words.\n\nMore."""\n\n# a comment\nx = [\n    1,\n]  # code\ny = """text"""\n') == 4


def numbers(story: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    with jax.enable_x64(False):
        runpy.run_module(f"benchmarks.stories.{story}_ours")
    return [float(number) for number in re.findall(r"-?\d+\.\d+", capsys.readouterr().out)]


@pytest.mark.slow
def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rmse, inside = numbers("table", capsys)
    assert rmse < 0.65 and 0.85 < inside < 0.99  # the noise has the standard deviation 0.5


@pytest.mark.slow
def test_a_hierarchical_model_of_counts(capsys: pytest.CaptureFixture[str]) -> None:
    level, slope, spread = numbers("counties", capsys)
    assert abs(level + 6) < 0.25 and abs(slope - 0.5) < 0.1 and 0.15 < spread < 0.45


@pytest.mark.slow
def test_a_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    (accuracy,) = numbers("classes", capsys)
    assert accuracy > 0.93
