"""Array aliases, axis letters and the kernel protocol.

Axis letters used in every shape of this package: ``N`` data points, ``B`` points of a (mini)batch, ``M`` inducing
variables of one set (``M_i`` of set ``i``), ``H`` mean-only points, ``D`` input dimensions, ``P`` latent functions.
``...`` stands for leading batch axes, usually none or ``(P,)``.

Inputs must have the dtype of the inducing points, else an error: nothing is cast silently. Hyperparameters follow JAX's
promotion. With 64-bit mode on, NumPyro draws sampled hyperparameters in float64, which makes the kernel float64 even for
float32 inputs.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import jax
from jax.typing import ArrayLike

__all__ = ["Array", "ArrayLike", "KernelLike", "NumPoints", "PRNGKey"]

Array = jax.Array
PRNGKey = jax.Array
# Gauss-Hermite nodes per column; None is the usual rule, and "many" one to compare it with.
NumPoints = int | Literal["many"] | None


@runtime_checkable
class KernelLike(Protocol):
    """What the package asks of a covariance function; tinygp's kernels satisfy it as they are.

    ``kernel(X1, X2)`` is the covariance matrix, shape (..., n, m), of inputs of shape (n, D) and (m, D);
    ``kernel(X)`` is the variance of each input, shape (..., n).
    """

    def __call__(self, X1: Any, X2: Any = None) -> Any: ...
