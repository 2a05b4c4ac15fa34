"""The first look at a model, which finds the names and sizes of its sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpyro
from numpyro import handlers
from numpyro.infer.autoguide import AutoDelta
from numpyro.primitives import Messenger

from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.guides.handlers import OutputsByRow
from numpyro_orthgp.guides.hyper import PointsAndEffects
from numpyro_orthgp.guides.missing import NoBranches
from numpyro_orthgp.math.compiled import is_within_program
from numpyro_orthgp.math.kept import run_checked
from numpyro_orthgp.primitives.messages import collected_functions, collected_sites
from numpyro_orthgp.types import PRNGKey

__all__ = ["KeptArrays", "look", "looked_at", "start"]

KEEPERS = (AutoDelta, PointsAndEffects)
KEPT = ("prototype_trace", "_init_locs", "_effects")  # attributes that such guides use later
NOT_KEPT = (
    "_potential_fn_gen",
    "_potential_fn",
    "_postprocess_fn",
)  # functions of the first look, not used afterwards


class KeptArrays:
    """Arrays that NumPyro's ``AutoDelta`` keeps from its first look at the model. In a compiled look they are tracers, so the
    program returns them, and the guide gets the returned arrays.

    :param guide: an ``AutoDelta`` before its first look.
    """

    @staticmethod
    def are_known(guide: Any) -> bool:
        """Whether the guide keeps only these arrays. For other guides, and subclasses of ``AutoDelta``, this is unknown."""
        return type(guide) in KEEPERS and guide.prototype_trace is None

    @staticmethod
    def are_put(guide: Any) -> bool:
        """Whether such a guide has had its first look, after which it keeps nothing more."""
        return type(guide) in KEEPERS and guide.prototype_trace is not None

    def __init__(self, guide: AutoDelta) -> None:
        self.guide = guide
        self._names: list[str] = []
        self._tree: Any = None
        self._others: list[Any] = []

    def taken(self) -> list[Any]:
        """The arrays, for the program to return."""
        self._names = [name for name in KEPT if hasattr(self.guide, name)]
        leaves, self._tree = jax.tree.flatten([getattr(self.guide, name) for name in self._names])
        self._others = [None if isinstance(leaf, jax.Array) else (leaf,) for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def put(self, arrays: list[Any]) -> None:
        """Give the guide the arrays that the program returned."""
        rest = iter(arrays)
        leaves = [next(rest) if other is None else other[0] for other in self._others]
        found = dict(zip(self._names, jax.tree.unflatten(self._tree, leaves), strict=True))
        for name, value in found.items():  # in the order of the model, since JAX sorts the keys of a dict
            setattr(self.guide, name, type(value)((k, value[k]) for k in found["prototype_trace"] if k in value))
        for name in NOT_KEPT:
            self.guide.__dict__.pop(name, None)

    def forget(self) -> None:
        """Forget the first look, so that it is done again."""
        self.guide.prototype_trace = None


class _Key(Messenger):
    """Provides the next random key."""

    def __init__(self, rng_key: PRNGKey) -> None:
        super().__init__()
        self.rng_key = rng_key

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "prng_key":
            msg["kwargs"]["rng_key"] = self.rng_key


def start(guide: Any, compiled: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The first look of a ``hyper`` guide as one program, if the arrays that it keeps are known.

    :param compiled: ``compiled(function, rng_key)`` runs a function as one program, and other guides are called now; ``None`` if
        the guide is called next, which reports its errors.
    """
    if not KeptArrays.are_known(guide):
        if compiled:
            guide(*args, **kwargs)
    elif compiled:
        _look_apart(guide, compiled, args, kwargs)
    elif not is_within_program():
        with suppress(Exception):
            _look_apart(guide, run_checked, args, kwargs)


def _look_apart(guide: Any, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kept = KeptArrays(guide)

    def run(rng_key: PRNGKey) -> list[Any]:
        with _Key(rng_key):
            guide._setup_prototype(*args, **kwargs)
        return kept.taken()

    try:
        kept.put(compiled(run, numpyro.prng_key()))
    except BaseException:
        kept.forget()
        raise


@contextmanager
def looked_at() -> Iterator[tuple[list[str], dict[str, GPFunction], list[str]]]:
    """Context of the run of a model in which a guide looks at it.

    :return: the names of the sites that its primitives declare, its functions by name, and the names of sites in ``scan``.
    """
    branches = NoBranches()
    with (
        handlers.block(),
        OutputsByRow(),
        branches,
        collected_functions() as functions,
        collected_sites() as declared,
    ):
        yield declared, functions, branches.in_loops


def look(note: Callable[[], bool], *, only_abstractly: bool) -> None:
    """Call ``note``, which notes names and sizes: abstractly, and again with values if the model or a check needs them.

    An abstract run compiles nothing. NumPyro does not compile ``svi.init``, so with values each operation is a separate program.
    Within a program that is being traced both would be the same.

    :param note: runs the model; returns whether it has seen the values of all observations.
    :param only_abstractly: whether ``note`` must not be called with values.
    """
    if is_within_program():
        note()
        return
    seen: list[bool] = []
    try:
        jax.eval_shape(lambda: seen.append(note()))
    except Exception:  # errors of a model are clearest with its values
        if only_abstractly:
            raise
        seen = [False]
    if not (only_abstractly or all(seen)):
        note()
