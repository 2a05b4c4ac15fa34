"""The public interface as text: names, arguments and their defaults, one line each.

    python -m tests.public_api > tests/public_api.txt

writes the list that ``test_public_api.py`` holds against the code. What a release had is the file at its tag.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpyro_orthgp
from numpyro_orthgp import diagnostics, init, kernels, likelihoods, online, plots, tabular, training
from numpyro_orthgp.functions import paths

MODULES = (numpyro_orthgp, kernels, likelihoods, init, online, plots, diagnostics, training, tabular, paths)


def lines() -> Iterator[str]:
    """The version, then every public name of every public module with what it takes."""
    yield f"numpyro_orthgp {numpyro_orthgp.__version__}"
    for module in MODULES:
        yield ""
        for name in names_of(module):
            yield from described(f"{module.__name__}.{name}", getattr(module, name))


def names_of(module: types.ModuleType) -> list[str]:
    own = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    return sorted(name for name in own if not isinstance(getattr(module, name), types.ModuleType))


def described(name: str, value: Any) -> Iterator[str]:
    """One line for a function; for a class one more for each public attribute of its own, or, for a guide, of its base."""
    if not callable(value):
        yield f"{name}: {type(value).__name__}"
        return
    yield name + arguments_of(value)
    if inspect.isclass(value):
        members = {k: v for kind in (*hidden_bases(value), value) for k, v in vars(kind).items()}
        for attribute, member in sorted(members.items()):
            if not attribute.startswith("_"):
                yield "    " + member_of(attribute, member)


def hidden_bases(kind: type) -> list[type]:
    """Those that hold some of a guide's methods."""
    return [base for base in kind.__bases__ if base.__module__.startswith("numpyro_orthgp.guides.")]


def member_of(name: str, member: Any) -> str:
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    return name + arguments_of(member) if inspect.isfunction(member) else name


def arguments_of(function: Any) -> str:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=p.empty, default=default_of(p.default)) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


class Written:
    """A default as text that is the same in every process."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def default_of(value: Any) -> Any:
    """Numbers, strings and such as they are; classes and functions by name; all else as "..."."""
    if value is inspect.Parameter.empty or value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return tuple(default_of(v) for v in value)
    return Written(getattr(value, "__name__", "..."))


if __name__ == "__main__":
    print("\n".join(lines()))
