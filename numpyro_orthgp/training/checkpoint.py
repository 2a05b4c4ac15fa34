"""Files from which a run goes on: written in one piece or not at all, and refused if they are another run's.

A file is an ``npz`` without pickled objects: the leaves of the state and of the best state so far, the losses, and a header in
JSON with the step, the scores of windows and a fingerprint of the run.

Writing is tried out before the first step, if there is no file yet; a file that cannot be written later is a warning, not the
end of the fit. A file holds all that later steps depend on.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_orthgp.training.devices import from_host, to_host
from numpyro_orthgp.training.fingerprint import check_same
from numpyro_orthgp.training.stopping import Windows

__all__ = ["Snapshot", "dump", "load", "mark_in", "prepare", "read", "write"]

FORMAT = 2  # 1 did not say which data and which program it was of


class Snapshot(NamedTuple):
    """Where a run stands after ``step`` steps."""

    step: int
    state: Any
    windows: Windows = Windows()


def dump(snapshot: Snapshot, losses: np.ndarray, mark: dict[str, Any]) -> bytes:
    """A run as bytes.

    :param losses: of all steps so far, shape (step,).
    :param mark: the fingerprint.
    """
    windows = snapshot.windows
    counters = {k: v for k, v in windows._asdict().items() if k != "best_state"}
    header = {"format": FORMAT, "fingerprint": mark, "step": snapshot.step, "windows": counters}
    arrays = {"header": np.asarray(json.dumps(header)), "losses": losses}
    arrays |= {f"state{i}": _plain(x) for i, x in enumerate(jax.tree.leaves(snapshot.state))}
    arrays |= {f"best{i}": _plain(x) for i, x in enumerate(jax.tree.leaves(windows.best_state))}
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def mark_in(content: bytes) -> Any:
    """What a source's batch before the file's step was known by."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return json.loads(str(file["header"]))["fingerprint"].get("last batch")


def load(
    content: bytes, name: str, like: Any, mark: dict[str, Any], anyway: bool = False
) -> tuple[Snapshot, np.ndarray]:
    """The inverse of :func:`dump`.

    :param name: of the file, for messages.
    :param like: a state of the same structure.
    :param mark: the fingerprint that it must have.
    :param anyway: whether other data and another program are no reason to refuse it.
    :return: the run, and its losses.
    :raises ValueError: if the bytes are not a checkpoint, or one of a run with another fingerprint.
    """
    leaves, tree = jax.tree.flatten(like)
    with _damaged(name):
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        header = json.loads(str(arrays["header"]))
        number = header["format"]
        if number not in range(1, FORMAT + 1):
            raise ValueError(f"format {number}, known up to {FORMAT}")
        found, counters, losses, step = header["fingerprint"], header["windows"], arrays["losses"], header["step"]
        if not isinstance(found, dict):
            raise TypeError("no fingerprint")
    if number < FORMAT:
        raise ValueError(
            f"`checkpoint` {name} was written by an earlier version of this package, whose files do not say which data and "
            "which model they are of. Finish the run with that version, use another file, or pass resume=False to begin anew and "
            "overwrite this one."
        )
    check_same(name, found, mark, anyway)

    def restore(prefix: str) -> Any:
        stored = (arrays[f"{prefix}{i}"] for i in range(len(leaves)))
        return jax.tree.unflatten(tree, [_restored(a, x) for a, x in zip(stored, leaves, strict=True)])

    with _damaged(name):
        windows = Windows(best_state=restore("best") if counters["best_step"] else None, **counters)
        if losses.shape != (step,) or not 0 <= windows.best_step <= step:
            raise ValueError(f"step {step}, best step {windows.best_step} and {losses.size} losses")
        return Snapshot(step, restore("state"), windows), losses


@contextmanager
def _damaged(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the many that a zip file or its arrays raise if bytes have changed
        raise ValueError(
            f"`checkpoint` {name} is damaged or was not written by `fit` ({type(error).__name__}: {error}). Delete it, or pass "
            "resume=False to begin anew and overwrite it."
        ) from error


def _plain(x: Any) -> np.ndarray:
    """In a dtype that NumPy can store: others, such as bfloat16, as integers of the same size."""
    array = to_host(x)
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _restored(array: np.ndarray, like: Any) -> jax.Array:
    expected = _plain(like)
    if (array.shape, array.dtype) != (expected.shape, expected.dtype):
        raise ValueError(f"{array.dtype}{list(array.shape)} where {expected.dtype}{list(expected.shape)} was expected")
    return from_host(array.view(to_host(like).dtype), like)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def prepare(path: Path) -> None:
    """Make the folder and try to write there, rather than fail after an hour; remove what a crash while writing may have left.

    A file that is there may be all that is wanted of a folder that cannot be written any more.

    :raises ValueError: if ``path`` is itself a folder, or can neither be read nor written.
    """
    temporary = _temporary(path)
    try:
        if path.is_dir():
            raise ValueError(f"`checkpoint` must be a file; {path} is a folder. Did you mean {path / 'run.npz'}?")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(b"")
        temporary.unlink()
    except OSError as error:
        if not _is_file(path):
            raise ValueError(f"`checkpoint` {path} cannot be written: {error}.") from error


def _is_file(path: Path) -> bool:
    with suppress(OSError):  # of a name that is too long
        return path.is_file()
    return False


def read(path: Path) -> bytes | None:
    """The file's content, None if there is none.

    :raises ValueError: if it may not be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"`checkpoint` {path} cannot be read: {error}.") from error


def write(path: Path, content: bytes) -> None:
    """Replace the file at once: whoever looks, at whatever time, finds the old one or the new one, whole."""
    temporary = _temporary(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # not every system lets a folder be opened; then the new name may be lost with the power
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
