"""What other libraries' tutorials give, in benchmarks/no_choices.py: environments of their own, and rows of several splits.

``NUMPYRO_ORTHGP_PEERS="gpytorch=PYTHON gpflow=PYTHON"`` names interpreters for the tests that need one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import no_choices, tutorials
from benchmarks.labels_and_counts import Probabilities, classes_scores, labels_by_tutorial
from benchmarks.scores import Scores, together
from benchmarks.splits import Split

PEERS = dict(word.split("=", 1) for word in os.environ.get("NUMPYRO_ORTHGP_PEERS", "").split())

# A script like those of the tutorials: the first column, and the share of each class.
SCRIPT = """
import sys
import numpy as np
given = np.load(sys.argv[1])
X, num = given["X"], len(given["X_test"])
assert np.allclose(X.mean(0), 0) and np.allclose(X.std(0), 1)
if "num_classes" in given:
    shares = np.bincount(given["y"], minlength=int(given["num_classes"])) / len(X)
    np.savez(sys.argv[2], probabilities=np.tile(shares, (num, 1)))
else:
    assert np.isclose(given["y"].std(), 1)
    np.savez(sys.argv[2], mean=given["X_test"][:, 0], scale=np.full(num, 0.5))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "peer.py"
    path.write_text(SCRIPT)
    return path


def split(rng: np.random.Generator, y: np.ndarray) -> Split:
    X = np.column_stack([3 + 2 * rng.normal(size=len(y)), np.ones(len(y)), rng.normal(size=len(y))])
    return Split(X[:-10], y[:-10], X[-10:], y[-10:])


def test_a_peer_sees_standardized_numbers_and_its_predictions_are_in_the_units_of_y(rng, script) -> None:
    data = split(rng, 5 + 3 * rng.normal(size=40))
    found = no_choices.by_tutorial(sys.executable, script)(data, 1.0)
    column = data.X[:, 0]
    expected = data.y.mean() + data.y.std() * (data.X_test[:, 0] - column.mean()) / column.std()
    np.testing.assert_allclose(found.mean, expected)
    np.testing.assert_allclose(found.scale, 0.5 * data.y.std())


def test_a_peer_gives_probabilities_of_the_classes_of_y(rng, script) -> None:
    data = split(rng, np.array([3, 7, 9, 9] * 10))
    found = labels_by_tutorial(sys.executable, script)(data, 1.0)
    np.testing.assert_array_equal(found.classes, [3, 7, 9])
    np.testing.assert_allclose(found.of, np.tile([8, 8, 14], (10, 1)) / 30)


def test_a_peer_that_fails_says_why(tmp_path) -> None:
    path = tmp_path / "peer.py"
    path.write_text("raise ValueError('not positive definite')")
    with pytest.raises(tutorials.PeerFailed, match=r"^ValueError: not positive definite$"):
        tutorials.follow(sys.executable, path, X=np.zeros((2, 1)))


@pytest.fixture
def folder(rng, tmp_path: Path) -> Path:
    X = rng.normal(size=(60, 2))
    np.savez(tmp_path / "concrete.npz", X=X, y=X[:, 0] + 0.1 * rng.normal(size=60))
    np.savez(tmp_path / "wdbc.npz", X=X, y=(X[:, 0] > 0) + 0)
    np.savez(tmp_path / "letter.npz", X=X, y=np.digitize(X[:, 0], [-0.5, 0.5]))
    return tmp_path


def test_the_benchmark_leaves_out_peers_without_interpreter_and_goes_on_after_one_that_fails(
    folder, script, monkeypatch, capsys
) -> None:
    script.write_text("raise RuntimeError('no memory')")
    monkeypatch.setitem(tutorials.SCRIPTS, "GPflow", script)
    words = [
        "--data",
        str(folder),
        "--sets",
        "concrete",
        "--methods",
        "GPyTorch",
        "GPflow",
        "mean",
        "--splits",
        "0",
        "1",
    ]
    no_choices.main([*words, "--peer", f"gpflow={sys.executable}"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["GPyTorch:", "no", "--peer,", "left", "out"] in lines
    failed = [line for line in lines if "GPflow" in line]
    assert [line[-4:] for line in failed] == 2 * [["failed:", "RuntimeError:", "no", "memory"]]
    assert [line[1:4] for line in lines if "mean" in line] == [
        ["0", "54", "mean"],
        ["1", "54", "mean"],
        ["all", "12", "mean"],
    ]


@pytest.mark.parametrize("word", ["torch=PYTHON", "gpytorch"])
def test_peers_are_named(word, capsys) -> None:
    with pytest.raises(SystemExit):
        no_choices.main(["--data", "FOLDER", "--peer", word])
    assert "--peer takes NAME=PYTHON with a name of gpytorch, gpflow; got" in capsys.readouterr().err


def test_rows_of_several_splits_count_alike() -> None:
    inside = [np.array([[1, 0], [1, 1], [1, 1]], bool), np.array([[1], [1], [0]], bool)]
    parts = [
        Scores(np.array([-1.0, -3.0]), np.array([1.0, 4.0]), inside[0]),
        Scores(np.array([1.0]), np.array([4.0]), inside[1]),
    ]
    every = together(parts)
    assert every.num == 3
    assert str(every).split() == ["-1.000", "1.732", "66.7", "100.0", "66.7"]


def test_of_labels_the_share_that_is_right_and_no_intervals() -> None:
    data = Split(np.zeros((2, 1)), np.array([3, 7]), np.zeros((2, 1)), np.array([7, 7]))
    found = classes_scores(data, Probabilities(np.array([[0.25, 0.75], [0.5, 0.0]]), np.array([3, 7])))
    assert str(together([found, found])).split() == [f"{np.log([0.75, 1e-6]).mean():.3f}", "0.500"]


@pytest.mark.slow
@pytest.mark.parametrize("peer", tutorials.SCRIPTS)
@pytest.mark.parametrize("name", ["concrete", "wdbc", "letter"])
def test_tutorials_predict_better_than_the_mean(peer, name, folder, capsys) -> None:
    if (python := PEERS.get(peer.lower())) is None:
        pytest.skip(f"NUMPYRO_ORTHGP_PEERS names no interpreter with {peer}")
    words = ["--data", str(folder), "--sets", name, "--methods", peer, "mean"]
    no_choices.main([*words, "--peer", f"{peer.lower()}={python}"])
    found = {line.split()[3]: float(line.split()[5]) for line in capsys.readouterr().out.splitlines() if name in line}
    assert found[peer] > found["mean"] + 0.1
