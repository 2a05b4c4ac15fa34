"""A hundred random programs beside dense formulas (tests/fuzz), and faults planted to see that they are found.

More of them: ``make fuzz SEEDS=0:5000``. One again: ``make fuzz SEEDS=17``, which prints the program if it fails.
"""

from __future__ import annotations

import warnings

import jax
import pytest

from tests.fuzz.families import program
from tests.fuzz.properties import check


def failures(seed: int) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = check(program(seed))
    return "\n".join([f"seed {seed}", run.program.source(), *run.failures]) if run.failures else ""


@pytest.mark.parametrize("seed", range(100))
def test_program(seed):
    assert not (found := failures(seed)), found
    if seed % 10 == 9:
        jax.clear_caches()
