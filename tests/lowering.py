"""Programs are lowered in a context that many share.

JAX makes a context of MLIR, with all its dialects, for each program that it lowers: a fifth of the time of a program of one
operation, of which the tests have thousands.
"""

from __future__ import annotations

import itertools
from typing import Any

from jax._src.interpreters import mlir

PROGRAMS = 200  # of a context, which keeps the constants of its programs


def share_contexts() -> None:
    """From here on; nothing where JAX makes its contexts in another way."""
    if (make := getattr(mlir, "make_ir_context", None)) is None:
        return
    uses = itertools.count()
    context: Any = None

    def shared() -> Any:
        nonlocal context
        if next(uses) % PROGRAMS == 0:
            context = make()
        return context

    mlir.make_ir_context = shared
