"""What fits of tables have in common, :class:`TableFit`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.diagnostics import Report, check
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.tabular.columns import Columns
from numpyro_orthgp.tabular.importance import importance_of
from numpyro_orthgp.tabular.stages import Found, moments

__all__ = ["TableFit"]


@dataclass(frozen=True, repr=False)
class TableFit(ABC):
    """
    :param columns: what becomes of the table's columns.
    :param found: hyperparameters, points and the searches for them.
    :param X, y: standardized rows, (N, D), and outputs as the model takes them, (N,), in the random order of the fit, the held-out
        ones first.
    :param function: the function given all rows, of standardized columns, by the model.
    :param num_held: number of rows that the searches did not see.
    :param num_dropped: number of rows without y.
    :param budget: what the fit was allowed, in words.
    """

    columns: Columns
    found: Found
    X: np.ndarray
    y: np.ndarray
    function: GPFunction
    num_held: int
    num_dropped: int
    budget: str

    kind: ClassVar[str]
    model: ClassVar[Callable[..., None]]

    @property
    @abstractmethod
    def guide(self) -> Any:
        """The guide, a new one each time."""

    @property
    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model: ``NUTS(fit.model)`` takes them as they are."""

    @abstractmethod
    def predict(self, X: Any) -> Any:
        """Predictions for new rows."""

    @abstractmethod
    def _model_words(self) -> list[str]:
        """What the model is, and its hyperparameters."""

    @abstractmethod
    def _prediction_words(self) -> list[str]:
        """In which way predictions differ from the model's."""

    title: ClassVar[str]
    baseline: ClassVar[str]
    bounds: ClassVar[str] = "; loss in nats"

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the guide."""
        return self.found.params

    @property
    def hyperparameters(self) -> dict[str, np.ndarray]:
        """By site, in standardized units."""
        return dict(self.found.values)

    def importance(self) -> dict[str, float]:
        """For each column of the table the share of the variance of the function that goes through it, the largest first.

        Total Sobol indices of the function's mean, by its inducing points, by exchanging the column between up to 1000 of the
        rows (Jansen 1999): columns that act together count the variance that they share once each, so that the sum may be
        more than one. Between columns that are correlated the function decides, not the data.
        """

        def mean(X: np.ndarray) -> np.ndarray:
            return moments(self.function, X)[0]

        with jax.enable_x64(True):
            return importance_of(mean, self.X, self.columns)

    def check(self, **options: Any) -> Report:
        """The page of :func:`numpyro_orthgp.check` on the model beneath. Rows that were held out are part of the data by now.

        :param options: of ``check``, ``nuts=200`` for one.
        """
        if self.found.losses is not None and len(self.found.losses) > 1:
            options = {"losses": self.found.losses} | options
        with jax.enable_x64(True):
            arguments: dict[str, Any] = jax.tree.map(
                lambda a: jnp.asarray(a) if isinstance(a, np.ndarray) else a, self.arguments
            )
            return check(self.model, self.guide, self.params, **arguments, **options)

    def __str__(self) -> str:
        found, X = self.found, self.X
        dropped = f" ({self.num_dropped} without y left out)" if self.num_dropped else ""
        head = f"{self.title}: {len(X)} rows{dropped}, {X.shape[1]} columns, {len(found.Z)} inducing points"
        lines = [head, *(f"  {line}" for line in self.columns.words()), *self._model_words(), ""]
        lines.append(f"searches ({self.budget}){self.bounds}, held-out log density per row")
        lines.append("   rows  points  steps      loss  gap/row  held out  from, and how it ended")
        for s in found.stages:
            gap = f"{s.gap:8.3f}" if np.isfinite(s.gap) else f"{'-':>8s}"
            row = f"{s.num_rows:7d} {s.num_points:7d} {s.num_steps:6d} {s.loss:9.1f} {gap} {s.held_out:9.3f}"
            lines.append(f"{row}  {s.start}; {s.status}")
        if self.num_held:
            better = "BETTER than the fit, and returned instead of it" if found.is_mean else f"by {self.baseline} alone"
            lines.append(f"held-out rows {self.num_held}: log density {found.baseline:.3f} {better}")
        return "\n".join(lines + self._prediction_words())

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {len(self.X)} rows, {self.X.shape[1]} columns; print it to see what was done>"
        )
