"""Processes in which JAX cannot run.

A fork copies one thread only. JAX's programs wait for others, so in a process that is forked after JAX has run they wait for ever.
"""

from __future__ import annotations

import os
from importlib import import_module

__all__ = ["refuse_fork"]

_process: int | None = None  # that has run programs of JAX


def _note_process() -> None:
    """JAX may have run before a fork though nothing of ours has, as for a key."""
    global _process
    has_run = getattr(import_module("jax._src.xla_bridge"), "backends_are_initialized", lambda: False)
    if _process is None and has_run():
        _process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_process)


def refuse_fork() -> None:
    """
    :raises RuntimeError: in a process that was forked from one in which JAX had run.
    """
    global _process
    if _process is None:
        _process = os.getpid()
    if _process != os.getpid():
        raise RuntimeError(
            "This process was forked from one in which JAX has run, and a fork does not copy the threads that JAX waits for: its "
            "programs would never end here. Start processes by multiprocessing.get_context('spawn') or by joblib's default "
            "backend, or fork before the first fit."
        )
