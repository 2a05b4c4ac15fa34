"""Links from a real function f to probabilities or positive numbers, and their logarithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

from numpyro_orthgp.likelihoods.special import branches, expm1, log1mexp, log_ndtr
from numpyro_orthgp.types import Array

__all__ = ["POSITIVE_LINKS", "PROBABILITY_LINKS", "PositiveLink", "ProbabilityLink", "squared_distances"]


class ProbabilityLink(NamedTuple):
    """p(f), with log p and log(1 - p) that are precise for small and large f of either sign.

    :param width: the scale on which they bend, at zero.
    """

    p: Callable[[Array], Array]
    not_p: Callable[[Array], Array]
    log_p: Callable[[Array], Array]
    log_not_p: Callable[[Array], Array]
    width: float = 2.0


class PositiveLink(NamedTuple):
    """A positive function of f, its logarithm and its inverse."""

    value: Callable[[Array], Array]
    log: Callable[[Array], Array]
    inverse: Callable[[Array], Array]


def _rate(f: Array) -> Array:
    return jnp.exp(jnp.minimum(f, 6.6))  # beyond, p is one; at an infinite rate its derivative would be NaN


def _log_cloglog(f: Array) -> Array:
    # 1 - exp(-x) at x = e^f: x - x^2 / 2 + ... where e^f is tiny, one where it is huge
    small, low, rest = branches(f, -15.0)
    return jnp.where(small, low - jnp.exp(low) / 2, log1mexp(_rate(rest)))


def _log_softplus(f: Array) -> Array:
    # log(1 + x) at x = e^f: x - x^2 / 2 + ...
    small, low, rest = branches(f, -20.0)
    return jnp.where(small, low - jnp.exp(low) / 2, jnp.log(jax.nn.softplus(rest)))


PROBABILITY_LINKS = {
    "logit": ProbabilityLink(
        jax.nn.sigmoid, lambda f: jax.nn.sigmoid(-f), jax.nn.log_sigmoid, lambda f: jax.nn.log_sigmoid(-f), 2.0
    ),
    "probit": ProbabilityLink(ndtr, lambda f: ndtr(-f), log_ndtr, lambda f: log_ndtr(-f), 2.0),
    "cloglog": ProbabilityLink(
        lambda f: -expm1(-_rate(f)), lambda f: jnp.exp(-_rate(f)), _log_cloglog, lambda f: -jnp.exp(f), 1.5
    ),
}

POSITIVE_LINKS = {
    "exp": PositiveLink(jnp.exp, lambda f: f, jnp.log),
    "softplus": PositiveLink(jax.nn.softplus, _log_softplus, lambda rate: rate + log1mexp(rate)),
}


def squared_distances(link: ProbabilityLink, p: Array, not_p: Array) -> Callable[[Array], Array]:
    """Of p(f) from its mean ``p``, as a function of f; for p near one, where it would have no digits, by 1 - p(f)."""
    return lambda f: jnp.where(p < not_p, link.p(f) - p, link.not_p(f) - not_p) ** 2
