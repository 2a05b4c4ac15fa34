"""On which arguments results of a program depend, by its graph."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from numpyro_orthgp.math.dependence import reached


def scanned(a, b, c):
    """What the carry holds of ``a`` reaches its last part in the second step only."""

    def step(carry, row):
        first, second, third = carry
        return (first, second + first, third + second), row * c

    carry, rows = lax.scan(step, (a, b, 0.0), jnp.arange(3.0))
    return *carry, rows


PROGRAMS = {
    "arithmetic": (lambda a, b, c: (a + b, c, 2.0), ["ab", "c", ""]),
    "calls": (jax.jit(lambda a, b, c: (jnp.sin(a), b * c)), ["a", "bc"]),
    "checkpoints": (lambda a, b, c: jax.checkpoint(lambda x, y: (x * x, y))(a, b), ["a", "b"]),
    "rows": (scanned, ["a", "ab", "ab", "c"]),
    "branches, of which all count": (lambda a, b, c: lax.cond(a > 0, lambda: b, lambda: c), ["abc"]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_marks_go_with_the_graph(name):
    program, expected = PROGRAMS[name]
    jaxpr = jax.make_jaxpr(program)(1.0, 2.0, 3.0).jaxpr
    assert reached(jaxpr, [frozenset(mark) for mark in "abc"]) == [frozenset(marks) for marks in expected]
