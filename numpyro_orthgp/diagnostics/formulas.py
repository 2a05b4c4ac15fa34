"""Densities that a user has written, compared with the distribution of y that the same class gives.

A likelihood of one's own may have a closed form of the expectation, or a ``log_prob`` of another objective. Above the expectation
of log p(y | f) the loss is no bound on log p(y), whether that is meant or a slip of the pen. Below it is one, as a quadratic one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.diagnostics.integration import dense_expectation, which_count
from numpyro_orthgp.diagnostics.layout import Trace
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.functions.expected import AveragedMarginals
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, GaussHermite, unwrap
from numpyro_orthgp.likelihoods.general import Likelihood
from numpyro_orthgp.types import Array

__all__ = ["MISSED", "advice_on_formulas", "formulas_of"]

MISSED = 0.01  # nats per point
_FORMULAS = ("log_prob", "expected_log_density", "log_density")


def formulas_of(subject: Subject) -> dict[str, float]:
    """By how many nats per point an output's own formula is above E_q(f)[log p(y | f)], without what a tightened residual costs.

    :return: by name of the output, for classes of a user's with a formula of its own, if it differs.
    """

    def collect(sites: Trace, functions: Any) -> dict[str, tuple[Array, Array]]:
        found = {}
        for output in subject.layout.outputs:
            fn, y = sites[output.site]["fn"], jnp.asarray(sites[output.site]["value"])
            if _has_own_formula(inner := unwrap(fn)[0]):
                found[output.name] = _above(inner, y), which_count(fn, y)
        return found

    found = jax.device_get(subject.measure(collect))
    means = {name: float(np.mean(d[seen & np.isfinite(d)])) for name, (d, seen) in found.items() if np.any(seen)}
    return {name: mean for name, mean in means.items() if abs(mean) > MISSED}


def _has_own_formula(fn: Any) -> bool:
    """Whether a formula comes from a class outside of this package."""
    if not isinstance(fn, ExpectedLikelihood) or isinstance(fn.marginals, AveragedMarginals) or fn.sees_several:
        return False
    ours = __name__.partition(".")[0] + "."
    users = [c for c in type(fn).__mro__ if issubclass(c, ExpectedLikelihood) and not c.__module__.startswith(ours)]
    return any(name in vars(c) for c in users for name in _FORMULAS)


def _above(fn: ExpectedLikelihood, y: Array) -> Array:
    untight = replace(fn.marginals, residual_scale=None, total=None, groups=None)
    own = object.__new__(type(fn))
    own.__dict__.update(fn.__dict__, marginals=untight, power=None)
    known = Likelihood(untight, own.conditional, integrator=GaussHermite())
    dim = (untight.num_latents or 1) if fn.mixes else 1
    return own.log_prob(y) - dense_expectation(known, y, dim)


def advice_on_formulas(formulas: Mapping[str, float]) -> Iterator[str]:
    for name, above in formulas.items():
        if above > 0:
            yield (
                f"The likelihood of {name} is {above:.2g} nats per point above the expectation of log p(y | f) with the "
                "distribution that its `conditional` gives, so the loss is no bound on log p(y). Either a formula of its class "
                f"({', '.join(_FORMULAS)}) is wrong, or it is another objective: then compare fits by held-out data, not by losses."
            )
