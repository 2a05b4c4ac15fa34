"""What fits of tables have in common, :class:`TableFit`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.diagnostics import Report, check
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.tabular.columns import Columns, read_table
from numpyro_orthgp.tabular.files import (
    Arrays,
    columns_of,
    describe_columns,
    describe_found,
    describe_function,
    found_of,
    function_from,
    write_fit,
)
from numpyro_orthgp.tabular.importance import importance_of
from numpyro_orthgp.tabular.serving import exported, numbers_of, standardized
from numpyro_orthgp.tabular.stages import Found, moments
from numpyro_orthgp.types import Array

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
    model: ClassVar[Any]

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

    @abstractmethod
    def _program(self, X: Array, *more: Array) -> dict[str, Array]:
        """What an exported program computes, of standardized columns."""

    @abstractmethod
    def _recipe(self) -> Callable[[], GPFunction]:
        """What makes the function of the model."""

    @abstractmethod
    def _more(self) -> tuple[dict[str, Any], Arrays]:
        """What is to be saved of this kind of fit alone."""

    @classmethod
    @abstractmethod
    def _with_more(cls, common: dict[str, Any], more: dict[str, Any], arrays: Arrays) -> TableFit:
        """A fit of this kind, of what was saved."""

    title: ClassVar[str]
    num_more: ClassVar[int] = 0  # arguments of an exported program, beside the columns
    baseline: ClassVar[str]
    bounds: ClassVar[str] = "loss in nats, "

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

    def save(self, path: Any) -> None:
        """Keep the fit in one file, which :func:`numpyro_orthgp.load` reads; predictions are the same to the last bit.

        It holds arrays and a description, no pickle, and is replaced as a whole or not at all. The standardized rows of training
        are in it.

        :param path: of the file; ``.npz`` is a good end for its name.
        :raises ValueError: if it cannot be written, or the fit's function was replaced by one that cannot be described.
        """
        found, found_arrays = describe_found(self.found)
        more, more_arrays = self._more()
        with jax.enable_x64(True):
            function = describe_function(self.function, self._recipe())
        common = {"num_held": self.num_held, "num_dropped": self.num_dropped, "budget": self.budget}
        columns = describe_columns(self.columns)
        description = {"kind": self.kind, "common": common, "columns": columns, "found": found, "more": more}
        write_fit(path, description, {"X": self.X, "y": self.y, **found_arrays, **more_arrays, **function})

    @classmethod
    def _restored(cls, description: dict[str, Any], arrays: Arrays) -> TableFit:
        """
        :raises Exception: if description and arrays do not fit together.
        """
        found = found_of(description["found"], arrays)
        common = description["common"] | {"columns": columns_of(description["columns"]), "found": found}
        common |= {"X": arrays["X"], "y": arrays["y"], "function": None}
        fit = cls._with_more(common, description["more"], arrays)
        with jax.enable_x64(True):
            return fit._with_functions(arrays)

    def _with_functions(self, arrays: Arrays) -> TableFit:
        return replace(self, function=function_from(arrays, self._recipe()))

    def as_array(self, X: Any) -> np.ndarray:
        """A table as an exported program takes it, float64, shape (N, number of columns): numbers as they are, NaN where they are
        missing, and of a category the position of the level among the ``levels`` in ``fit.columns.columns``, -1 for any other."""
        return numbers_of(self.columns, read_table(X))

    def export(self, *, platforms: Sequence[str] | None = None) -> Any:
        """The predictions as a program for any number of rows, ``jax.export.Exported``, which runs without this library (to write
        it JAX needs
        ``flatbuffers``)::

            open("fit.bin", "wb").write(fit.export().serialize())

            program = jax.export.deserialize(open("fit.bin", "rb").read())  # in a process that has JAX only
            with jax.enable_x64(True):
                program.call(X)["mean"]

        Its argument is the array of :meth:`as_array`, float64; of counts there is a second one, the exposure, shape (N,). It
        returns ``probabilities`` of labels, and ``mean`` and ``sd`` of counts. Of numbers it returns ``mean``, ``sd``,
        ``function_sd``, and ``loc`` and ``scale``: a new output is ``loc + scale * e``, or the exponential of this where
        ``fit.units.is_log``. Its quantile at ``level`` is that at ``fit.found.errors.quantile(level)`` in the place of e.

        :param platforms: such as ``("cpu", "cuda")``; by default the one at hand.
        """

        def program(X: Array, *more: Array) -> dict[str, Array]:
            return self._program(standardized(self.columns, X), *more)

        return exported(program, len(self.columns.columns), self.num_more, platforms)

    def __str__(self) -> str:
        found, X = self.found, self.X
        dropped = f" ({self.num_dropped} without y left out)" if self.num_dropped else ""
        head = f"{self.title}: {len(X)} rows{dropped}, {X.shape[1]} columns, {len(found.Z)} inducing points"
        lines = [head, *(f"  {line}" for line in self.columns.words()), *self._model_words(), ""]
        lines += [f"searches ({self.budget})", f"  {self.bounds}held-out log density per row"]
        lines.append("   rows  points  steps      loss  gap/row  held out  from, and how it ended")
        for s in found.stages:
            gap = f"{s.gap:8.3f}" if np.isfinite(s.gap) else f"{'-':>8s}"
            row = f"{s.num_rows:7d} {s.num_points:7d} {s.num_steps:6d} {s.loss:9.1f} {gap} {s.held_out:9.3f}"
            lines.append(f"{row}  {s.start}; {s.status}")
        if self.num_held:
            better = "BETTER than the fit, and returned instead of it" if found.is_mean else f"by {self.baseline} alone"
            lines.append(f"{self._left_out_words()}: log density {found.baseline:.3f} {better}")
        return "\n".join(lines + self._prediction_words())

    def _left_out_words(self) -> str:
        return f"held-out rows {self.num_held}"

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {len(self.X)} rows, {self.X.shape[1]} columns; print it to see what was done>"
        )
