"""NumPyro's optimizers as optax transformations, for :func:`~numpyro_orthgp.natural_gradient`, itself such a transformation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import optax
from numpyro.optim import _NumPyroOptim

__all__ = ["as_optax"]


def as_optax(name: str, optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """An optax optimizer unchanged, or a NumPyro optimizer as a transformation.

    :param name: name of the argument, for messages.
    :raises TypeError: if it is neither, or calls the loss itself.
    """
    if isinstance(optimizer, numpyro.optim.Minimize):
        raise TypeError(
            f"`{name}` must step along a gradient; numpyro.optim.Minimize calls the loss itself. For L-BFGS use fit_lbfgs."
        )
    if isinstance(optimizer, _NumPyroOptim):
        return _transformation(optimizer)
    if isinstance(optimizer, optax.GradientTransformation):
        return optax.with_extra_args_support(optimizer)
    raise TypeError(
        f"`{name}` must be an optimizer of optax or of numpyro.optim, such as optax.adam(1e-2); got {type(optimizer).__name__}."
    )


def _transformation(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        # Its state holds the parameters. The update is the difference from the current ones, so rounding does not add up.
        state = optimizer.update(gradients, state, value=extra.get("value", jnp.zeros(())))
        return jax.tree.map(lambda new, old: new - old, optimizer.get_params(state), params), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
