"""The fitted model that ``check`` measures, run once more by a compiled program whose inputs are data and parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from numpyro_orthgp.diagnostics.draws import Arguments
from numpyro_orthgp.diagnostics.layout import Layout, Trace
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.guides.posterior import fitted_trace
from numpyro_orthgp.types import PRNGKey

__all__ = ["Subject"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Subject:
    """
    :param model: the model that was fitted.
    :param guide: its guide.
    :param params: what was learned.
    :param arguments: of both.
    :param layout: of the model's sites.
    :param rng_key: of the draw of what the guide draws; the same for all measurements.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    params: dict[str, Any]
    arguments: Arguments
    layout: Layout
    rng_key: PRNGKey

    def measure(self, of: Callable[[Trace, dict[str, GPFunction]], _T]) -> _T:
        """A function, compiled, of the model's sites and of the functions of its ``gp`` statements, as they are while fitting."""

        def run(arrays: Any, params: dict[str, Any]) -> _T:
            args, kwargs = self.arguments.join(arrays)
            return of(*fitted_trace(self.model, self.guide, params, args, kwargs, self.rng_key))

        return jax.jit(run)(self.arguments.arrays, self.params)
