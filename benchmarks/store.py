"""Runs that are done: a line of JSON for each, found again by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=NamedTuple)


class Store(Generic[Key]):
    """Rows by key, in a file to which they are appended.

    A last line that was cut off when a run was killed is left out, and that run is done again.

    :param key: the class of keys; all its fields are written.
    """

    def __init__(self, path: Path, key: type[Key]) -> None:
        self.path = path
        self.rows: dict[Key, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
                self.rows[key(*(row.pop(field) for field in key._fields))] = row
            except (ValueError, KeyError, TypeError, AttributeError):
                print(f"{path}: left out a damaged line")

    def get(self, key: Key) -> dict[str, Any] | None:
        return self.rows.get(key)

    def add(self, key: Key, row: dict[str, Any]) -> dict[str, Any]:
        """Write a row; return it."""
        self.rows[key] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text() if self.path.exists() else ""
        with self.path.open("a") as file:
            file.write(("\n" if text and not text.endswith("\n") else "") + json.dumps(key._asdict() | row) + "\n")
        return row
