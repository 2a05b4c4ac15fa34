"""The observation model of y: a likelihood, or the standard deviation of Gaussian noise as a shorthand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.tree_util import Partial

from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods import Gaussian
from numpyro_orthgp.likelihoods.base import is_expected
from numpyro_orthgp.likelihoods.checks import POSITIVE, check_allowed
from numpyro_orthgp.types import Array

__all__ = ["as_likelihood", "check_likelihood"]


def as_likelihood(value: Any, dtype: Any) -> Callable[[Marginals], dist.Distribution]:
    """A function from marginals to the likelihood of y. If ``value`` is noise as an array, it compiles once for all values.

    :param value: such a function, or the noise's standard deviation.
    :raises TypeError: for a likelihood that already has marginals.
    :raises ValueError: for noise that is not positive.
    """
    if isinstance(value, dist.Distribution):
        name = type(value).__name__
        raise TypeError(
            f"`likelihood` must be a function from marginals to a likelihood, lambda f: {name}(f, ...), or the standard deviation "
            f"of Gaussian noise; got a {name} that has its marginals already."
        )
    if callable(value):
        return value
    if value is None or isinstance(value, str):
        raise TypeError(
            "`likelihood` must be a function from marginals to a likelihood, lambda f: Bernoulli(f), or the standard deviation of "
            f"Gaussian noise; got {value!r}."
        )
    return Partial(_gaussian, check_allowed("likelihood", jnp.asarray(value, dtype), POSITIVE))


def check_likelihood(fn: Any) -> None:
    """
    :param fn: what a user's function has made of marginals.
    :raises TypeError: if no likelihood in it averages over f.
    """
    if not any(map(is_expected, jax.tree.leaves(fn, is_leaf=is_expected))):
        raise TypeError(
            f"`likelihood` must make a likelihood of numpyro_orthgp of the marginals; got {type(fn).__name__}, which does not "
            "average over f. Write lambda f: likelihoods.Gaussian(f, s), or for any distribution of numpyro "
            "lambda f: Likelihood(f, lambda f: dist.Normal(f, s))."
        )


def _gaussian(noise: Array, marginals: Marginals) -> Gaussian:
    return Gaussian(marginals, noise)
