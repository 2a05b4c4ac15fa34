"""Checks of a function whose Gaussians are compared with the prior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import inspect
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.products import diagonal
from numpyro_orthgp.types import Array

__all__ = ["check_function", "check_gaussians"]


def check_function(who: str, f: Any, name: str = "f") -> None:
    """
    :param who: name of the function that needs a fitted function, for the message.
    :param name: name of its argument.
    :raises TypeError: for anything else than a function of one gp.
    """
    if isinstance(f, GPFunction):
        return
    hint = ""
    if isinstance(f, Mapping):
        hint = f" Pick one by its name: posterior(...)[{next(iter(f), 'f')!r}]."
    elif isinstance(f, Marginals):
        hint = " Pass f, and not f(X)."
    raise TypeError(
        f"`{who}` needs as `{name}` a function of one gp, posterior(model, guide, params, ...)['f'] or "
        f"CollapsedGP(...).posterior(y); got {type(f).__name__}.{hint}"
    )


def check_gaussians(who: str, f: GPFunction) -> None:
    """Raise an error for fixed values of inducing variables: their divergence from the prior is infinite.

    :param who: name of the function that needs Gaussians, for the message.
    :raises TypeError: if it is no function of one gp.
    :raises ValueError: if a set has values or, if this is concrete, a Gaussian without variance in some direction.
    """
    check_function(who.strip("`"), f)
    if any(q.is_value for q in f.beliefs):
        raise ValueError(_message(who, "values of inducing variables"))
    with jax.ensure_compile_time_eval():  # a Gaussian may be concrete under `jit`
        inspect(partial(_refuse_no_variance, who), _pivots(f.beliefs))


@one_program
def _pivots(beliefs: Sequence[Whitened]) -> list[Array]:
    return [jnp.abs(diagonal(q.lower_root())) for q in beliefs]


def _refuse_no_variance(who: str, of_sets: Sequence[Array]) -> None:
    # `condition` joins values and Gaussians to one set. Then rows of its root are zero, or singular values within rounding of zero.
    for pivots in map(np.asarray, of_sets):
        _refuse_small(who, pivots)


def _refuse_small(who: str, pivots: np.ndarray) -> None:
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
