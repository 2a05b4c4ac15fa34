"""The fitted model that ``check`` measures, a compiled program of data and parameters; and a model at a draw of MCMC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from numpyro_orthgp.diagnostics.draws import Arguments, Draws
from numpyro_orthgp.diagnostics.layout import Layout, Trace
from numpyro_orthgp.diagnostics.replay import run as run_at
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.guides.posterior import fitted_trace
from numpyro_orthgp.math.kept import run_kept
from numpyro_orthgp.types import PRNGKey

__all__ = ["Drawn", "Subject"]

_T = TypeVar("_T")
FINER = 16  # times as long as a predictive density takes the rule that an expectation is compared with


@dataclass(frozen=True)
class Subject:
    """
    :param model: the model that was fitted.
    :param guide: its guide.
    :param params: the fitted parameters.
    :param arguments: arguments of both.
    :param layout: the model's sites.
    :param rng_key: key of the guide's draw, the same for all measurements.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    params: dict[str, Any]
    arguments: Arguments
    layout: Layout
    rng_key: PRNGKey

    def measure(self, of: Callable[[Trace, dict[str, GPFunction]], _T]) -> _T:
        """A function of the model's sites and of its gps, as they are during a fit, compiled."""

        def run(arrays: Any, params: dict[str, Any]) -> _T:
            args, kwargs = self.arguments.join(arrays)
            return of(*fitted_trace(self.model, self.guide, params, args, kwargs, self.rng_key))

        return run_kept(run, self.arguments.arrays, self.params)


@dataclass(frozen=True)
class Drawn:
    """
    :param model: the model that was sampled.
    :param arguments: its arguments.
    :param draws: draws of MCMC, of which the first is looked at.
    """

    model: Callable[..., Any]
    arguments: Arguments
    draws: Draws

    def measure(self, of: Callable[[Trace, dict[str, GPFunction]], _T]) -> _T:
        """A function of the model's sites and of its gps at the draw."""
        arguments = self.arguments.join(self.arguments.arrays)
        return of(*run_at(self.model, arguments, self.draws.params, self.draws.first(), jax.random.key(0)))
