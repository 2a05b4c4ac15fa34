"""Checks of a function whose Gaussians are compared with the prior."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import inspect
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.gaussians.family import Whitened

__all__ = ["check_gaussians"]


def check_gaussians(who: str, f: GPFunction) -> None:
    """Raise an error for fixed values of inducing variables: their divergence from the prior is infinite.

    :param who: name of the function that needs Gaussians, for the message.
    :raises ValueError: if a set has values or, if this is concrete, a Gaussian without variance in some direction.
    """
    if any(q.is_value for q in f.beliefs):
        raise ValueError(_message(who, "values of inducing variables"))
    for q in f.beliefs:
        inspect(partial(_refuse_no_variance, who), q)


def _refuse_no_variance(who: str, q: Whitened) -> None:
    # `condition` joins values and Gaussians to one set. Then rows of its root are zero, or singular values within rounding of zero.
    with jax.ensure_compile_time_eval():  # a Gaussian may be concrete under `jit`
        pivots = np.abs(np.diagonal(q.lower_root(), axis1=-2, axis2=-1))
    rounding = 8 * float(jnp.finfo(pivots.dtype).eps) * pivots.max(-1, keepdims=True)
    fixed = int((pivots <= rounding).sum(-1).max())
    if fixed:
        came = f"a Gaussian with no variance in {fixed} of {pivots.shape[-1]} variables, values that `condition` joined with others"
        raise ValueError(_message(who, came))


def _message(who: str, came: str) -> str:
    return (
        f"{who} needs the Gaussians of a guide; got {came}. Take the function from posterior(model, guide, params, ...), not from "
        "a draw of MCMC or a model conditioned on values of inducing variables."
    )
