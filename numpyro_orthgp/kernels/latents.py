"""Splits a kernel of P latent functions: which hyperparameters have a leading axis of P, and the kernel of some functions.

A kernel does not record whether a leaf of shape (P,) has one value per function or one per input column. So this module infers it
from shapes, without computing values. A leaf has one value per function if the kernel accepts the leaf's first entry in its
place, and still has a leading axis when all other such leaves are replaced by their first entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.kernels.base import Kernel
from numpyro_orthgp.types import Array, KernelLike

__all__ = ["OfFunctions", "separable"]


class OfFunctions(Kernel):
    """The kernel of some of P functions, for a kernel that cannot be split. It computes all functions and selects some.

    :param kernel: a kernel with a leading axis of P.
    :param which: index of the function, shape (), or several, shape (n,).
    """

    kernel: KernelLike
    which: Any

    def matrix(self, X1: Array, X2: Array) -> Array:
        return self.kernel(X1, X2)[self.which]

    def diagonal(self, X: Array) -> Array:
        return self.kernel(X)[self.which]


def separable(
    kernel: Any, num_latents: int, dtype: Any, batch_of: Callable[[Any], tuple[int, ...]]
) -> tuple[Any, list[bool]]:
    """A kernel whose leaves can be selected by function, and which leaves have an axis of functions.

    :param dtype: dtype for lists of numbers.
    :param batch_of: function of a kernel; gives the leading axes, () or (P,), of results computed with it.
    :return: the kernel, and a truth value for each leaf. If its leaves cannot be told apart, the kernel is wrapped in
        :class:`OfFunctions` with ``which`` = 0..P-1.
    """
    kernel = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype) if _is_list(leaf) else leaf, kernel, is_leaf=_is_list)
    leaves, structure = jax.tree.flatten(kernel)
    if batch_of(kernel) == ():
        return kernel, [False] * len(leaves)
    candidates = [i for i, leaf in enumerate(leaves) if np.ndim(leaf) and np.shape(leaf)[0] == num_latents]

    def batch_without(dropped: list[int]) -> tuple[int, ...] | None:
        kept = [leaf[0] if i in dropped else leaf for i, leaf in enumerate(leaves)]
        try:
            return batch_of(jax.tree.unflatten(structure, kept))
        except (TypeError, ValueError, IndexError):
            return None

    candidates = [i for i in candidates if batch_without([i]) is not None]
    own = [i for i in candidates if batch_without([j for j in candidates if j != i]) not in ((), None)]
    if batch_without(own) == ():
        return kernel, [i in own for i in range(len(leaves))]
    return OfFunctions(kernel, jnp.arange(num_latents)), [False] * len(leaves) + [True]


def _is_list(leaf: Any) -> bool:
    """A list of numbers, as hyperparameters may be given."""
    return isinstance(leaf, list) and all(_is_list(x) or isinstance(x, int | float) for x in leaf)
