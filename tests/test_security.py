"""Files that are read cannot execute code, as SECURITY.md says."""

from __future__ import annotations

import ast
import io
import json
import os
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp.training import checkpoint
from tests.fitting import KEY, assert_same_bits, data, make

PACKAGE = Path(ogp.__file__).parent
FORBIDDEN = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "socket",
    "urllib",
    "requests",
    "http",
    "subprocess",
    "yaml",
}
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen"}


def test_source_has_nothing_that_executes_what_it_reads():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & FORBIDDEN, path
            if isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                called = f"os.{node.func.attr}" if _is_of_os(node.func) else called
                assert called.removeprefix("os.") not in CALLS, path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, path


def _is_of_os(function):
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "os"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.npz"
    result = ogp.fit(make(), KEY, data(), num_steps=5, checkpoint=path, progress_bar=False)
    return path, result


class Trap:
    """What runs a command where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _replaced(content: bytes, name: str, array: np.ndarray) -> bytes:
    out, entry = io.BytesIO(), io.BytesIO()
    np.save(entry, array, allow_pickle=True)
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.namelist():
            new.writestr(item, entry.getvalue() if item == name else old.read(item))
    return out.getvalue()


@pytest.mark.parametrize("entry", ["header.npy", "losses.npy", "state0.npy"])
def test_pickles_in_checkpoints_are_refused(entry, saved, tmp_path):
    path, _ = saved
    trapped, proof = tmp_path / "run.npz", tmp_path / "executed"
    content = _replaced(path.read_bytes(), entry, np.array(Trap(proof), dtype=object))
    trapped.write_bytes(content)
    with np.load(io.BytesIO(content), allow_pickle=True) as file:  # it is a trap
        file[entry.removesuffix(".npy")]
    assert proof.is_dir()
    proof.rmdir()
    with pytest.raises(ValueError, match=r"run.npz is damaged or was not written by `fit`"):
        ogp.fit(make(), KEY, data(), num_steps=5, checkpoint=trapped, progress_bar=False)
    assert not proof.exists()


def test_flipped_bits_are_refused_or_harmless(saved):
    path, result = saved
    content = path.read_bytes()
    mark = json.loads(str(np.load(path)["header"]))["fingerprint"]
    whole, losses = checkpoint.load(content, "run.npz", result.state, mark)
    chance, refused = random.Random(0), 0
    for _ in range(60):
        flipped = bytearray(content)
        flipped[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        try:
            found, others = checkpoint.load(bytes(flipped), "run.npz", result.state, mark)
        except ValueError as error:
            assert "run.npz is" in str(error)
            refused += 1
        else:
            assert_same_bits((found.state, others), (whole.state, losses))
    assert refused > 30
