"""Fits that are done: a line of JSON for each, found again by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class Key(NamedTuple):
    """All that a fit depends on.

    :param setting: the experiment.
    :param set: of data.
    :param method: its name.
    :param points: their numbers, such as "64+64".
    :param split: number of the random split.
    :param epochs: of the 100 that stand for the paper's run.
    :param rows: to train with.
    :param dtype: of the data.
    """

    setting: str
    set: str
    method: str
    points: str
    split: int
    epochs: int
    rows: int
    dtype: str

    @property
    def file_name(self) -> str:
        return "_".join(map(str, self)).replace("+", "-")


class Store:
    """Rows by key, in a file to which they are appended.

    A last line that was cut off when a run was killed is left out, and that fit is run again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[Key, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
                self.rows[Key(*(row.pop(field) for field in Key._fields))] = row
            except (json.JSONDecodeError, KeyError):
                print(f"{path}: left out a damaged line")

    def get(self, key: Key) -> dict[str, Any] | None:
        return self.rows.get(key)

    def add(self, key: Key, row: dict[str, Any]) -> None:
        self.rows[key] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text() if self.path.exists() else ""
        with self.path.open("a") as file:
            file.write(("\n" if text and not text.endswith("\n") else "") + json.dumps(key._asdict() | row) + "\n")
