"""Names, arguments and defaults that users write change on purpose only."""

from __future__ import annotations

import difflib
from pathlib import Path

import numpyro_orthgp
from tests import public_api

PINNED = Path(__file__).with_name("public_api.txt")


def test_public_interface_is_the_pinned_one():
    pinned, now = PINNED.read_text().splitlines(), list(public_api.lines())
    changes = "\n".join(difflib.unified_diff(pinned, now, "public_api.txt", "now", lineterm="", n=0))
    assert not changes, (
        f"The public interface changed:\n{changes}\nIf that is meant, write it into CHANGELOG.md and renew the list: "
        "python -m tests.public_api > tests/public_api.txt"
    )


def test_the_version_has_its_changes():
    changelog = (PINNED.parents[1] / "CHANGELOG.md").read_text()
    assert f"\n## {numpyro_orthgp.__version__}" in changelog
    assert PINNED.read_text().startswith(f"numpyro_orthgp {numpyro_orthgp.__version__}\n")


def test_what_is_listed(tmp_path):
    def function(a, b=1, *, c: int = 2, d=len, e=(1, None), **rest) -> int:
        """One of everything."""

    class Thing:
        size = 3

        def __init__(self, x):
            pass

        def method(self, y=0):
            pass

        @property
        def shape(self):
            pass

        @classmethod
        def make(cls, z):
            pass

    assert list(public_api.described("f", function)) == ["f(a, b=1, *, c=2, d=len, e=(1, None), **rest)"]
    expected = ["t.Thing(x)", "    make(cls, z)", "    method(self, y=0)", "    shape", "    size"]
    assert list(public_api.described("t.Thing", Thing)) == expected
    assert list(public_api.described("t.N", 3)) == ["t.N: int"]
