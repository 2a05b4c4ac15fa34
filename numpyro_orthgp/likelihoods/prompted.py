"""Expectations that are asked for outside of models and programs, as at a prompt: one program each, where JAX would compile each
operation. A log predictive density of a count has a hundred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import jax
import numpyro.distributions as dist

from numpyro_orthgp.foreign import as_outputs
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.sites import model_running
from numpyro_orthgp.likelihoods.wrapped import MASK
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.ranks import broadcasting

__all__ = ["prompted", "wrapped"]

_PACKAGE = __name__.partition(".")[0] + "."
_F = TypeVar("_F", bound=Callable[..., Any])


def prompted(method: _F) -> _F:
    """A method of a likelihood, which takes y or nothing, as one program outside of models.

    Within models it is what it was: there NumPyro's enumeration and masks change what arrays mean, and programs are kept for
    equal shapes.
    """
    within, outside = broadcasting(method), one_program(method)

    @wraps(method)
    def call(self: Any, *value: Any, **named: Any) -> Any:
        if named:
            _, *value = signature(method).bind(self, *value, **named).args  # type: ignore[assignment]
        if model_running() is not None or self.sees_several or not _is_of_package(self):
            return within(self, *value)
        return outside(jax.tree.map(_alone, self, is_leaf=_is_marginals), *(as_outputs("obs", y, MASK) for y in value))

    return call  # type: ignore[return-value]


def wrapped(wrap: Callable[[Any], Any], attribute: Any) -> Any:
    """A method, or a property with its getter, as ``wrap`` makes it."""
    return property(wrap(attribute.fget)) if isinstance(attribute, property) else wrap(attribute)


def _is_of_package(likelihood: Any) -> bool:
    """Whether all likelihoods in it are; what a user's has may not be in the pytree that a program takes."""
    parts = jax.tree.leaves(vars(likelihood), is_leaf=lambda x: isinstance(x, dist.Distribution))
    nested = (x for x in parts if isinstance(x, dist.Distribution))
    return type(likelihood).__module__.startswith(_PACKAGE) and all(map(_is_of_package, nested))


def _is_marginals(x: Any) -> bool:
    return isinstance(x, Marginals)


def _alone(x: Any) -> Any:
    """Marginals without what only draws need."""
    return replace(x, joint=None, names=None) if _is_marginals(x) else x
