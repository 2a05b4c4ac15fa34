"""The types of a user's script, under the strictest settings, and what the built distributions hold (``make package``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_users_script_is_clean_under_mypy_strict(tmp_path):
    pytest.importorskip("mypy")
    # Not the repository's settings. NumPyro and optax have no types; that is all that a user may have to allow.
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = true\nignore_missing_imports = true\n")
    script = ROOT / "tests" / "typing_user.py"
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(tmp_path), str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
