"""Fits in files, and as programs: the same predictions in another process, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular import blocks
from numpyro_orthgp.tabular.blocks import BLOCKS
from numpyro_orthgp.tabular.files import FORMAT, write_fit

ROOT = Path(__file__).parents[1]
OUTPUTS = {
    "regression": ("mean", "sd"),
    "near": ("mean", "sd"),
    "classification": ("probabilities",),
    "counts": ("mean", "sd"),
}


def rows(num: int = 80):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 2))
    X[3, 1] = np.nan
    return X, np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=num), rng


class Fits(dict):
    """Inputs and fit by kind, made when they are asked for."""

    def __missing__(self, kind: str):
        X, y, rng = rows()
        small = {"M": 10, "num_steps": 20}
        if kind == "near":
            X = rng.uniform(0, 1, (500, 2))
            fit = ogp.regression(X, np.sin(25 * X[:, 0]) + 0.05 * rng.normal(size=500), M=8, num_steps=30)
            assert fit.found.near is not None
        elif kind == "regression":
            fit = ogp.regression(X, y, **small)
        elif kind == "classification":
            fit = ogp.classification(X, np.where(y > 0, "up", "down"), **small)
        else:
            fit = ogp.counts(X, rng.poisson(np.exp(1 + y)), **small)
        self[kind] = X, fit
        return X, fit


@pytest.fixture(scope="module")
def fits():
    return Fits()


@pytest.mark.parametrize("kind", OUTPUTS)
def test_copies_keep_64_bits(fits, kind):
    """Unpickled arrays of JAX had 32 bits, so predictions in processes of joblib raised an error, as those of copies did."""
    X, fit = fits[kind]
    with jax.enable_x64(False):
        for again in (pickle.loads(pickle.dumps(fit)), copy.deepcopy(fit), copy.copy(fit)):
            for name in OUTPUTS[kind]:
                np.testing.assert_array_equal(getattr(again.predict(X), name), getattr(fit.predict(X), name))
            assert str(again) == str(fit)


def run(script: str, *arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


ANEW = """
import sys
import numpy as np
import numpyro_orthgp as ogp
folder = sys.argv[1]
for kind in sys.argv[2:]:
    fit = ogp.load(f"{folder}/{kind}.npz")
    with np.load(f"{folder}/{kind}-predictions.npz") as known:
        p = fit.predict(known["X"])
        for name in known.files:
            if name != "X":
                np.testing.assert_array_equal(getattr(p, name), known[name])
print("the same bits")
"""


def test_the_same_bits_in_a_fresh_process(fits, tmp_path):
    for kind in OUTPUTS:
        X, fit = fits[kind]
        fit.save(tmp_path / f"{kind}.npz")
        p = fit.predict(X)
        np.savez(tmp_path / f"{kind}-predictions.npz", X=X, **{name: getattr(p, name) for name in OUTPUTS[kind]})
        again = ogp.load(tmp_path / f"{kind}.npz")
        assert str(again) == str(fit) and type(again) is type(fit) and again.importance() == fit.importance()
        assert again.arguments.keys() == fit.arguments.keys() and again.params.keys() == fit.params.keys()
    assert "the same bits" in run(ANEW, str(tmp_path), *OUTPUTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"{kind}{end}.npz" for kind in OUTPUTS for end in ("", "-predictions")
    )  # no temporary files


def test_labels_and_tables_in_files(tmp_path):
    pd = pytest.importorskip("pandas")
    X, y, _ = rows()
    frame = pd.DataFrame({"a": X[:, 0], "t": np.where(X[:, 0] > 1, "u", "v")})
    for labels in (
        pd.Series(pd.Categorical(np.where(y > 0, "up", "down"), categories=["up", "down"], ordered=True)),
        pd.Series(np.where(y > 0, "up", "down")).astype(object),
        pd.Series(y > 0),
    ):
        fit = ogp.classification(frame, labels, M=5, num_steps=10)
        fit.save(tmp_path / "f.npz")
        a, b = fit.predict(frame).frame(), ogp.load(tmp_path / "f.npz").predict(frame).frame()
        pd.testing.assert_frame_equal(a, b)


def test_what_cannot_be_read_is_refused(fits, tmp_path):
    path = tmp_path / "fit.npz"
    fits["regression"][1].save(path)
    whole = path.read_bytes()
    with pytest.raises(FileNotFoundError, match="There is no file"):
        ogp.load(tmp_path / "other.npz")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"damaged, or no file of fit.save"):
        ogp.load(path)
    turned, at = bytearray(whole), whole.index(fits["regression"][1].X.tobytes())
    turned[at + 9] ^= 0xFF
    path.write_bytes(bytes(turned))
    with pytest.raises(ValueError, match=r"cannot be read|damaged"):
        ogp.load(path)
    fits["near"][1].save(path)
    large = path.read_bytes()
    header = large.rindex(b"NUMPY", 0, large.index(fits["near"][1].X.tobytes()))
    for sign in (
        b"{",
        b"}",
        b"(",
        b")",
    ):  # of the header of an array whose checksum is read later: Python's tokenizer failed
        turned = bytearray(large)
        turned[large.index(sign, header)] ^= 0x08
        path.write_bytes(bytes(turned))
        with pytest.raises(ValueError, match=r"cannot be read|damaged"):
            ogp.load(path)
    np.savez(path, X=np.zeros(3))
    with pytest.raises(ValueError, match="it has no description"):
        ogp.load(path)
    np.savez(path, description=np.array([{"a": 1}], object))  # a pickle
    with pytest.raises(ValueError, match=r"damaged, or no file of fit.save"):
        ogp.load(path)
    write_fit(path, {"format": "other"}, {})
    with pytest.raises(ValueError, match="but of 'other'"):
        ogp.load(path)
    write_fit(path, {"version": 99}, {})
    with pytest.raises(ValueError, match=r"version 99 of the format.*newer library"):
        ogp.load(path)
    write_fit(path, {"format": FORMAT, "kind": "regression"}, {})
    with pytest.raises(ValueError, match="does not fit together"):
        ogp.load(path)


def test_arrays_that_do_not_fit_are_refused(fits, tmp_path):
    path = tmp_path / "fit.npz"
    fits["regression"][1].save(path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    description = json.loads(arrays.pop("description").tobytes())
    description.pop("digest")
    arrays["Z"] = arrays["Z"][1:]
    write_fit(path, description, arrays)
    with pytest.raises(ValueError, match="does not fit together"):
        ogp.load(path)
    np.savez(path, description=np.frombuffer(json.dumps(description).encode(), np.uint8), **arrays)
    with pytest.raises(ValueError, match="its arrays are not those that were saved"):
        ogp.load(path)


def test_a_failed_save_leaves_the_file_before(fits, tmp_path, monkeypatch):
    path = tmp_path / "fit.npz"
    fit = fits["regression"][1]
    fit.save(path)
    before = path.read_bytes()
    kernel = ogp.kernels.RBF(1.0)
    strange = replace(fit, function=ogp.CollapsedGP(kernel, fit.X, fit.found.Z, 0.1).posterior(fit.y))
    with pytest.raises(ValueError, match="a kernel or function of your own cannot be described"):
        strange.save(path)
    with pytest.raises(ValueError, match="cannot be written"):
        fit.save(tmp_path / "no folder" / "fit.npz")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):  # which left a file of half the fit
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        fit.save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["fit.npz"]


def test_a_device_is_neither_replaced_nor_read(fits, tmp_path):
    """As root a save to /dev/null replaced it by the fit."""
    path = tmp_path / "fit.npz"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="cannot be written: it is a folder, a device or a pipe"):
        fits["regression"][1].save(path)
    assert path.is_fifo() and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="cannot be read: it is a folder, a device or a pipe"):
        ogp.load(path)


def test_a_file_may_be_read_by_those_who_may_read_other_files(fits, tmp_path, monkeypatch):
    """It was for its owner alone, whatever the umask, and a service under another name could not load it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    fits["regression"][1].save("~/fit.npz")
    (tmp_path / "other").write_text("")
    assert (tmp_path / "fit.npz").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert ogp.load("~/fit.npz").num_rows == fits["regression"][1].num_rows


def test_any_number_of_rows_takes_three_programs(fits, monkeypatch):
    X, fit = fits["regression"]
    counted = []

    @jax.jit
    def moments(f, X):
        counted.append(X.shape)
        marginals = f(X)
        return marginals.mean, marginals.variance

    monkeypatch.setattr(blocks, "_moments", moments)
    many = np.tile(X, (14, 1))
    for num in (1, 2, 15, 16, 17, 100, 128, 129, 1000, 1024, 1100):
        assert fit.predict(many[:num]).mean.shape == (num,)
    assert sorted(shape[0] for shape in counted) == list(BLOCKS)
    np.testing.assert_allclose(fit.predict(many).mean[:80], fit.predict(X).mean, rtol=1e-10)


# ---------------------------------------------------------------- exported programs

SERVED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpyro_orthgp", "numpyro"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Blocked())
import jax, numpy as np
from jax import export
with np.load(sys.argv[2]) as known, jax.enable_x64(True):
    program = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
    for num in (1, 5, len(known["array"])):
        more = [np.ones(num)] if "exposure" in known.files else []
        out = program.call(known["array"][:num], *more)
        for name in out:
            if name in known.files:
                np.testing.assert_allclose(out[name], known[name][:num], rtol=1e-8)
                print(name)
assert "numpyro_orthgp" not in sys.modules
"""


@pytest.mark.parametrize("kind", list(OUTPUTS))
def test_programs_run_where_this_library_is_not(fits, kind, tmp_path):
    pytest.importorskip("flatbuffers")  # which JAX needs to write programs
    X, fit = fits[kind]
    p = fit.predict(X)
    (tmp_path / "program").write_bytes(fit.export().serialize())
    known = {name: getattr(p, name) for name in OUTPUTS[kind]} | ({"exposure": np.ones(1)} if kind == "counts" else {})
    np.savez(tmp_path / "known.npz", array=fit.as_array(X), **known)
    out = run(SERVED, str(tmp_path / "program"), str(tmp_path / "known.npz"))
    assert sorted(out.split()) == sorted(list(OUTPUTS[kind]) * 3)


def test_programs_take_tables_as_arrays():
    pd = pytest.importorskip("pandas")
    X, y, _ = rows()
    frame = pd.DataFrame(
        {"t": np.where(X[:, 0] > 1, "u", np.where(X[:, 0] < -1, "w", "v")), "a": X[:, 0], "b": X[:, 1]}
    )
    fit = ogp.regression(frame, y, M=10, num_steps=20)
    new = frame[["b", "a", "t"]].copy()
    new.loc[0, "t"], new.loc[1, "t"] = None, "never seen"
    with pytest.warns(UserWarning, match="'never seen' in 1 rows"):
        array = fit.as_array(new)
    assert array.shape == (80, 3) and array[:2, 0].tolist() == [-1, -1] and np.isnan(array[3, 2])
    with jax.enable_x64(True):
        out = fit.export().call(array)
    with pytest.warns(UserWarning, match="'never seen' in 1 rows"):
        p = fit.predict(new)
    np.testing.assert_allclose(out["mean"], p.mean, rtol=1e-8)
    np.testing.assert_allclose(out["function_sd"], p.function_sd, rtol=1e-8)
