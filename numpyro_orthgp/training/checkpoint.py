"""Checkpoint files. They are written atomically, and refused if they belong to another run.

A file is an ``npz`` without pickled objects. It contains the leaves of the state and of the best state so far, the losses, and a
JSON header with the step, the scores of windows and a fingerprint of the run: all that later steps depend on.

If there is no file yet, writing is tested before the first step. If a later write fails, the fit warns and continues.
"""

from __future__ import annotations

import glob
import io
import json
import os
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from numpyro_orthgp.math.digest import from_host, to_host
from numpyro_orthgp.training.fingerprint import check_same
from numpyro_orthgp.training.stopping import Windows

__all__ = [
    "Snapshot", "dump", "load", "mark_in", "place", "prepare", "read", "replacing", "stamp_of", "warn_of_others", "write",
]  # fmt: skip

FORMAT = 2  # 1 did not record data and program
LEFT = 3600  # seconds after which a temporary file is one that a crash has left


class Snapshot(NamedTuple):
    """The state of a run after ``step`` steps."""

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
    """The mark of the source's last batch before the file's step."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return json.loads(str(file["header"]))["fingerprint"].get("rows of the last batch")


def load(
    content: bytes, name: str, like: Any, mark: dict[str, Any], anyway: bool = False
) -> tuple[Snapshot, np.ndarray]:
    """The inverse of :func:`dump`.

    :param name: name of the file, for messages.
    :param like: a state of the same structure.
    :param mark: the required fingerprint.
    :param anyway: whether to accept other data and another program.
    :return: the run, and its losses.
    :raises ValueError: if the bytes are not a checkpoint, or belong to a run with another fingerprint.
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
    except Exception as error:  # damaged zip files and arrays raise many kinds of errors
        raise ValueError(
            f"`checkpoint` {name} is damaged or was not written by `fit` ({type(error).__name__}: {error}). Delete it, or pass "
            "resume=False to begin anew and overwrite it."
        ) from error


def _plain(x: Any) -> np.ndarray:
    """The array in a dtype that NumPy can store. Others, such as bfloat16, become integers of the same size."""
    array = to_host(x)
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _restored(array: np.ndarray, like: Any) -> jax.Array:
    expected = _plain(like)
    if (array.shape, array.dtype) != (expected.shape, expected.dtype):
        raise ValueError(f"{array.dtype}{list(array.shape)} where {expected.dtype}{list(expected.shape)} was expected")
    return from_host(array.view(to_host(like).dtype), like)


def place(path: Any) -> Path:
    """The path, with ``~`` for the home folder, as in a shell: otherwise a folder of that name would be made."""
    return Path(os.path.expanduser(path))


def _temporary(path: Path) -> Path:
    """A name beside the file that no other process has: runs may share a file, and a reader must find all of one."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")


def prepare(path: Path) -> None:
    """Make the folder and test writing now, not after an hour. Remove what crashes during writing have left.

    A folder that cannot be written is accepted if the file already exists: reading it may be enough.

    :raises ValueError: if ``path`` is itself a folder or a device, or can neither be read nor written.
    """
    temporary = _temporary(path)
    try:
        if path.is_dir():
            raise ValueError(f"`checkpoint` must be a file; {path} is a folder. Did you mean {path / 'run.npz'}?")
        if path.exists() and not path.is_file():  # it would be read without end, or replaced by a file
            raise ValueError(f"`checkpoint` must be a file; {path} is a device or a pipe.")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(b"")
        _remove_left(path, temporary.stat().st_mtime)
        temporary.unlink()
    except OSError as error:
        if not _is_file(path):
            raise ValueError(f"`checkpoint` {path} cannot be written: {error}.") from error


def _remove_left(path: Path, now: float) -> None:
    """Remove temporary files that no process can still be writing.

    :param now: by the clock of the file system.
    """
    for left in path.parent.glob(f"{glob.escape(path.name)}.????????.tmp"):
        with suppress(OSError):  # another run may remove it too
            if now - left.stat().st_mtime > LEFT:
                left.unlink()


def _is_file(path: Path) -> bool:
    with suppress(OSError):  # the name may be too long
        return path.is_file()
    return False


def read(path: Path) -> bytes | None:
    """The file's content; ``None`` if there is no file.

    :raises ValueError: if the file cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"`checkpoint` {path} cannot be read: {error}.") from error


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """Tells two files of one name apart; ``None`` if there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def warn_of_others(path: Path, stamp: tuple[int, ...] | None) -> None:
    """Warn if the file is not the one that this run read or wrote: two runs that share it undo each other's steps."""
    if stamp_of(path) not in (None, stamp):
        warnings.warn(
            f"`checkpoint` {path} was written by another run while this one was running. Each overwrites what the other has "
            "saved, and the last one wins. Give each run a file of its own.",
            RuntimeWarning,
            stacklevel=6,
        )


def write(path: Path, content: bytes) -> None:
    """Replace the file atomically: at any time a reader finds the complete old or new file."""
    with replacing(path) as file:
        file.write(content)
    with suppress(OSError):  # some systems cannot open a folder; there a power failure may lose the new name
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, which takes the place of ``path`` when the block ends, and is removed if it does not. Of a link it takes the
    place of what it points to."""
    path = Path(os.path.realpath(path))
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
