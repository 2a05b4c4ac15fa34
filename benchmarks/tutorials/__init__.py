"""What GPyTorch and GPflow give a user who follows their own tutorials, each in an environment of its own.

``gpytorch_`` and ``gpflow_`` say which tutorials and where these end. They import nothing of this library and run as scripts of the
other interpreter: ``python SCRIPT GIVEN.npz FOUND.npz``. They get X (N, D), y (N,) and X_test, with standardized columns, and for
labels num_classes. They give the mean and scale of the test outputs, or probabilities of shape (number of test rows, C).
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import numpy as np

__all__ = ["SCRIPTS", "PeerFailed", "follow"]

FOLDER = Path(__file__).parent
SCRIPTS = {"GPyTorch": FOLDER / "gpytorch_.py", "GPflow": FOLDER / "gpflow_.py"}


class PeerFailed(Exception):
    """The last line that the other interpreter printed."""


def follow(python: str, script: Path, **given: np.ndarray | int) -> dict[str, np.ndarray]:
    """Run a script with another interpreter on these arrays; return the arrays that it saves."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("given.npz", "found.npz")]
        np.savez(paths[0], **given)
        done = subprocess.run([python, str(script), *paths], capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise PeerFailed(lines[-1])
        with np.load(paths[1]) as file:
            return dict(file)
