"""Which kind of program a seed is of."""

from __future__ import annotations

import numpy as np

from tests.fuzz import collapsed, draw, nested
from tests.fuzz.collapsed import Collapsed
from tests.fuzz.nested import Nested
from tests.fuzz.programs import Program

FAMILIES = {"plain": 12, "nested": 2, "collapsed": 1}


def program(seed: int) -> Program | Nested | Collapsed:
    """The program of a seed."""
    kind = draw.pick(np.random.default_rng([78, seed]), FAMILIES)
    return {"plain": draw.program, "nested": nested.nested, "collapsed": collapsed.collapsed}[kind](seed)
