"""Which kind of program a seed is of."""

from __future__ import annotations

import numpy as np

from tests.fuzz import draw, nested
from tests.fuzz.nested import Nested
from tests.fuzz.programs import Program


def program(seed: int) -> Program | Nested:
    """One of seven is :class:`Nested`."""
    kind = draw.pick(np.random.default_rng([78, seed]), {"plain": 6, "nested": 1})
    return nested.nested(seed) if kind == "nested" else draw.program(seed)
