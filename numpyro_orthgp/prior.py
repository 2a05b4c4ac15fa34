"""The prior as seen through sets of inducing variables: what :func:`gp` and :class:`CollapsedGP` check and decompose alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import Partial

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.inducing import Feature
from numpyro_orthgp.math.linalg import default_jitter
from numpyro_orthgp.math.projection import Block, decompose
from numpyro_orthgp.types import KernelLike

__all__ = ["as_kernel", "check_jitter", "check_latents", "decompose_sets"]


def decompose_sets(kernel: KernelLike, features: Sequence[Feature], jitter: float) -> tuple[Block, ...]:
    """The orthogonal decomposition of the prior along the sets."""
    rows = [[other.covariance(kernel, s) for other in features[: i + 1]] for i, s in enumerate(features)]
    return decompose(rows, jitter)


def as_kernel(kernel: Any) -> Any:
    """A covariance function as a pytree.

    :raises TypeError: if it cannot be called.
    """
    if not callable(kernel):
        raise TypeError(
            f"`kernel` must be callable as kernel(X1, X2) and kernel(X); got {type(kernel).__name__}. "
            "Take one of numpyro_orthgp.kernels, a tinygp kernel, or a function."
        )
    opaque = jax.tree_util.treedef_is_leaf(jax.tree_util.tree_structure(kernel))
    return Partial(kernel) if opaque else kernel


def check_latents(num_latents: int | None, kernel: KernelLike, feature: Feature) -> int | None:
    """The number P of latent functions: what the user says, or what hyperparameters or points have a leading axis of.

    :raises ValueError: if these disagree, or the kernel returns no matrix.
    """
    shape, num = jax.eval_shape(lambda: feature.covariance(kernel, feature)).shape, feature.num
    if len(shape) not in (2, 3) or shape[-2:] != (num, num):
        raise ValueError(
            f"`kernel(Z, Z)` must have shape (M, M) or (P, M, M) with M = {num}; got {shape}. Do the kernel's "
            "hyperparameters have shape (), (D,), or a leading axis of one entry per latent function?"
        )
    batch = shape[0] if len(shape) == 3 else None
    if num_latents is None:
        return batch
    if isinstance(num_latents, bool) or not isinstance(num_latents, int) or num_latents < 1:
        raise ValueError(f"`num_latents` must be a positive integer or None; got {num_latents!r}.")
    if batch not in (None, num_latents):
        raise ValueError(
            f"`num_latents` is {num_latents} but the kernel's hyperparameters or the inducing points have a leading axis of "
            f"{batch}."
        )
    return num_latents


def check_jitter(jitter: float | None, dtype: Any, *, expectations: bool = False) -> float:
    """The relative jitter, by default that of the dtype and of what it is for.

    :raises ValueError: if a concrete one is not in [0, 1).
    """
    if jitter is None:
        return default_jitter(dtype, expectations=expectations)
    if is_concrete(jitter) and not 0 <= jitter < 1:
        raise ValueError(f"`jitter` must be in [0, 1), relative to the kernel's variance; got {jitter}.")
    return jitter
