"""The fitted model that ``check`` measures: a compiled program of data and parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from numpyro_orthgp.diagnostics.draws import Arguments
from numpyro_orthgp.diagnostics.layout import Layout, Trace
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.guides.posterior import fitted_trace
from numpyro_orthgp.math.kept import run_kept
from numpyro_orthgp.types import PRNGKey

__all__ = ["Subject"]

_T = TypeVar("_T")


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
