"""Kernels that are functions of one or two arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.closures import Closure, as_pytree
from numpyro_orthgp.types import Array

__all__ = ["KernelFunction", "kernel_as_pytree"]


@jax.tree_util.register_pytree_node_class
class KernelFunction(Closure):
    """A kernel that is a function. ``kernel(X)`` may be one number, the variance at all inputs."""

    def __call__(self, *X: Array) -> Array:
        value = super().__call__(*X)
        return value if len(X) > 1 or jnp.ndim(value) else jnp.full(X[0].shape[:-1], value, X[0].dtype)


def kernel_as_pytree(kernel: Any) -> Any:
    """``kernel`` if it is a pytree of arrays, else a pytree that calls it."""
    kernel = as_pytree(kernel)
    return KernelFunction(kernel.function) if type(kernel) is Closure else kernel
