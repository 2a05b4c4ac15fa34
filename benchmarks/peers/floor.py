"""The arithmetic floor of a training step: what its matrix products would take at the machine's own rate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.peers.problem import Problem

SIZE = 2048


def step_flops(M: int, B: int) -> float:
    """Floating-point operations of an SVGP step, a multiplication and an addition being two.

    Forward: Cholesky factor M^3/3, triangular solve M^2 B, explained variance 2 M^2 B (a full product). Three times that
    with the gradients.
    """
    return 3 * (M**3 / 3 + 3 * M**2 * B)


def product_flops() -> float:
    return 2.0 * SIZE**3


def floor_ms(M: int, B: int, product_ms: float) -> float:
    """Milliseconds for the operations of a step at the rate at which the timed product ran."""
    return step_flops(M, B) * product_ms / product_flops()


def device() -> str:
    """What JAX computes on, by name."""
    return jax.devices()[0].device_kind


def step(problem: Problem, variant: str) -> Callable[[int], float]:
    """A jitted product of two matrices of SIZE x SIZE, in the problem's dtype."""
    A, B = jax.random.normal(jax.random.PRNGKey(0), (2, SIZE, SIZE), problem.dtype)
    product = jax.jit(lambda A, B: jnp.matmul(A, B, precision=jax.lax.Precision.HIGHEST))

    def run(num: int) -> float:
        for _ in range(num):
            C = product(A, B).block_until_ready()
        return float(C[0, 0])

    return run
