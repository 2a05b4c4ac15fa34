"""Threads take turns where Python's state is that of the whole process.

NumPyro has one stack of handlers for all threads, so models that run in two threads at once mix: sites of one come into the trace
of the other, and values of one into the other. Programs that have been traced run in any number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from numpyro_orthgp.processes import refuse_fork

__all__ = ["in_turn"]

_turn = threading.RLock()


@contextmanager
def in_turn() -> Iterator[None]:
    """A context, or the decorator of a function, that other threads wait for. The same thread may enter it again."""
    refuse_fork()
    with _turn:
        yield
