"""Chunks of a zarr array in a folder: zarr reads lost ones as zeros, and other numbers from those that were cut short.

The folder is listed once, and of each chunk of Blosc the first bytes are read. zarr's own count of its chunks takes longer than
reading them, so it is asked only if files are too few or too many.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

__all__ = ["check_chunks"]

BLOSC_HEADER = 16  # bytes, the last four of which are the length of the whole


def check_chunks(name: str, array: Any, folder: str) -> None:
    """Warn of chunks that are not there, and refuse those that were cut short.

    :param name: of the array, for messages.
    :param array: of zarr.
    :raises ValueError: for a chunk that was cut short.
    """
    files = _files_in(folder)
    _warn_of_missing(name, array, folder, len(files))
    if any(type(codec).__name__.startswith("Blosc") for codec in getattr(array, "compressors", ())):
        _refuse_cut(files)


def _files_in(folder: str) -> dict[str, int]:
    """Files of chunks, and their sizes."""
    found: dict[str, int] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                found |= _files_in(entry.path)
            elif not entry.name.startswith(".") and entry.name != "zarr.json":
                found[entry.path] = entry.stat().st_size
    return found


def _warn_of_missing(name: str, array: Any, folder: str, num_files: int) -> None:
    """zarr does not tell lost chunks from those that were never written."""
    # `hasattr` of the array itself would already count them.
    if not hasattr(type(array), "nchunks_initialized") or num_files == array.nchunks:
        return
    num, stored = array.nchunks, array.nchunks_initialized
    if num != stored:
        warnings.warn(
            f"{num - stored} of {num} chunks of `{name}` are not stored in {folder}, and their rows read as {array.fill_value}. "
            "zarr leaves out chunks of this value, unless config={'write_empty_chunks': True}; if there should be other numbers, "
            "files are lost.",
            UserWarning,
            stacklevel=2,
        )


def _refuse_cut(files: dict[str, int]) -> None:
    """Other numbers are read from them, often without an error."""
    for path, found in files.items():
        with open(path, "rb") as file:
            header = file.read(BLOSC_HEADER)
        expected = int.from_bytes(header[12:16], "little")
        if len(header) < BLOSC_HEADER or found < expected:
            raise ValueError(
                f"{path} has {found} bytes, fewer than it was written with: the chunk was cut short. Write it again."
            )
