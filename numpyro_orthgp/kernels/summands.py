"""The summands of a kernel, f = f_1 + f_2 + ...: finds some of them by name, position or kernel, and sums these alone.

A summand is identified by its place: the branch taken at each sum on the way to it, as in ``kernels/components.py``. Factors and
restrictions of a sum apply to each of its summands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from numpyro_orthgp.kernels.base import Kernel, Named, Restricted, Scaled, Sum
from numpyro_orthgp.types import KernelLike

__all__ = ["Place", "Summand", "find_summands", "select", "summands"]

Place = tuple[str, ...]


class Summand(NamedTuple):
    """One summand of a kernel.

    :param place: its position in the sum.
    :param path: its factors, names and restrictions, outermost first; the last entry is the kernel without them.
    """

    place: Place
    path: tuple[Any, ...]

    @property
    def names(self) -> list[str]:
        """All names of the summand, its own last."""
        return [kernel.name for kernel in self.path if type(kernel) is Named]

    @property
    def label(self) -> str:
        """The summand's own name, or the class name of its kernel."""
        return self.names[-1] if self.names else type(self.path[-1]).__name__


def summands(kernel: KernelLike) -> list[Summand]:
    """All summands of a kernel, from left to right."""
    return list(_walk(kernel, (), ()))


def _walk(kernel: Any, place: Place, path: tuple[Any, ...]) -> Iterator[Summand]:
    path = (*path, kernel)
    if type(kernel) is Sum:
        yield from _walk(kernel.left, (*place, "left"), path)
        yield from _walk(kernel.right, (*place, "right"), path)
    elif type(kernel) in (Scaled, Restricted, Named):
        yield from _walk(kernel.kernel, place, path)
    else:
        yield Summand(place, path)


def find_summands(kernel: KernelLike, which: Any) -> tuple[Place, ...]:
    """The places of the summands selected by ``which``.

    :param which: a name, a position (negative ones count from the end), a kernel that is part of this one, or a sequence of these.
    :raises TypeError: if ``which`` is none of these.
    :raises ValueError: if there is no such summand, or ``which`` is empty.
    """
    known = summands(kernel)
    wanted = which if isinstance(which, list | tuple) else [which]
    found = {s.place for one in wanted for s in _find(known, one)}
    if not found:
        raise ValueError(f"`which` must name at least one summand of the kernel; got {which!r}.")
    return tuple(s.place for s in known if s.place in found)


def _find(known: Sequence[Summand], which: Any) -> list[Summand]:
    listed = ", ".join(f"{i}: {s.label}" for i, s in enumerate(known))
    if isinstance(which, str):
        found = [s for s in known if which in s.names]
        if not found:
            raise ValueError(
                f"No summand of the kernel is named {which!r}; its summands are {listed}. Names are given by "
                f"kernel.named({which!r})."
            )
        return found
    if isinstance(which, Kernel):
        found = [s for s in known if any(which is part for part in s.path)]
        if not found:
            raise ValueError(
                f"The kernel given is no part of the function's kernel, whose summands are {listed}. "
                "posterior(...) and jit make copies of the kernel. So give a name, f.term('trend'), or a "
                "position, f.term(0)."
            )
        return found
    if isinstance(which, bool) or not hasattr(which, "__index__"):
        raise TypeError(f"`which` must be the name of a summand, its position or its kernel; got {which!r}.")
    if not -len(known) <= which.__index__() < len(known):
        raise ValueError(f"The kernel has {len(known)} summands, {listed}; got the position {which}.")
    return [known[which.__index__()]]


def select(kernel: KernelLike, places: Sequence[Place] | None) -> Any:
    """The sum of the selected summands, with all factors and restrictions; ``None`` if none is selected.

    :param places: places of the summands; ``None`` for the unchanged kernel.
    """
    return kernel if places is None else _select(kernel, set(places), ())


def _select(kernel: Any, places: set[Place], place: Place) -> Any:
    if type(kernel) is Sum:
        left = _select(kernel.left, places, (*place, "left"))
        right = _select(kernel.right, places, (*place, "right"))
        return right if left is None else left if right is None else Sum(left, right)
    if type(kernel) in (Scaled, Restricted, Named):
        inner = _select(kernel.kernel, places, place)
        if inner is None or inner is kernel.kernel:
            return None if inner is None else kernel
        return _around(kernel, inner)
    return kernel if place in places else None


def _around(kernel: Any, inner: Any) -> Any:
    if type(kernel) is Scaled:
        return Scaled(inner, kernel.variance)
    return Restricted(inner, kernel.dims) if type(kernel) is Restricted else Named(inner, kernel.name)
