"""The first look at a model, which finds the names and sizes of its sites."""

from __future__ import annotations

from collections.abc import Callable

import jax

__all__ = ["look"]


def look(note: Callable[[], bool], *, only_abstractly: bool) -> None:
    """Call what notes names and sizes: without values, and again with them if the model or a check needs them.

    Without values nothing is compiled. NumPyro does not compile ``svi.init``, so with them each operation is a program of its own.

    :param note: runs the model; returns whether it has seen the values of all observations.
    :param only_abstractly: whether it is not to be called with values.
    """
    seen: list[bool] = []
    try:
        jax.eval_shape(lambda: seen.append(note()))
    except Exception:  # what is wrong in a model is said best with its values
        if only_abstractly:
            raise
        seen = [False]
    if not (only_abstractly or all(seen)):
        note()
