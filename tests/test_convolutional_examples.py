"""The example and the benchmark of convolutional GPs run as a user would run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_examples import assert_picture, run, table


@pytest.mark.slow
def test_convolutional(tmp_path: Path) -> None:
    rows = table(run("examples/convolutional.py", "--quick", "--refine", 25, "--out", tmp_path))
    methods = ["SVGP (20), RBF", "SVGP (20), convolutional", "SOLVE-GP (10+10), convolutional", "SVGP (20), TICK"]
    assert list(rows) == methods
    assert all(row[1] < 95 for row in rows.values())  # % wrong: a few steps, yet better than constant guesses
    assert_picture(tmp_path / "convolutional.png")


@pytest.mark.slow
def test_cifar10(data: Path) -> None:
    pytest.importorskip("PIL")
    file = data / "cifar10_jpeg.npz"
    options = {
        "--rows": "1-solve",
        "--images": 100,
        "--test-images": 20,
        "--steps": 50,
        "--scale": 0.008,
        "--batch-size": 4,
    }
    output = run("benchmarks/cifar10.py", "--data", file, *(part for option in options.items() for part in option))
    assert "SOLVE-GP  8+8" in output and "(68.19)" in output
