"""Checks of what a user's family of q makes."""

from __future__ import annotations

from typing import Any

import jax

from numpyro_orthgp.gaussians.family import Whitened

__all__ = ["check_member"]


def check_member(name: str, start: Any, natural: bool) -> None:
    """
    :param name: the site's.
    :param start: what a family's ``start`` has made.
    :param natural: whether it will take natural steps.
    :raises TypeError: if it is no member of a family, or a field is no array.
    :raises ValueError: if natural steps are not known.
    """
    family = type(start)
    if not isinstance(start, Whitened) or jax.tree_util.all_leaves([start]):
        raise TypeError(
            f"`covariance` must make members of a family for `{name}`: of a subclass of numpyro_orthgp.gaussians.Whitened that is "
            f"a pytree, with @jax.tree_util.register_dataclass above its @dataclass(frozen=True); got {family.__name__}."
        )
    for part in family.parts():
        if not hasattr(value := getattr(start, part), "shape"):
            raise TypeError(
                f"All fields of a family are parameters of q, arrays; `{part}` of {family.__name__} is {value!r} for `{name}`. An "
                f"option is no field, but an argument of `start`: covariance=partial({family.__name__}.start, {part}={value!r})."
            )
    # With the prior's covariance the natural gradient is the gradient, so any optimizer will do.
    if natural and len(family.parts()) > 1 and not family.has_natural_step:
        raise ValueError(
            f"natural=True: natural steps are not known for the covariance {family.name!r} of `{name}`; use 'full' or 'diagonal', "
            "or natural=False."
        )
