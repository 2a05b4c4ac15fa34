""":class:`TableFit`, the base class of all fits of tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.diagnostics import Report, check
from numpyro_orthgp.diagnostics.convergence import comparable
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.tabular.blocks import moments
from numpyro_orthgp.tabular.budget import BY_CTRL_C
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
from numpyro_orthgp.tabular.settings import own_settings
from numpyro_orthgp.tabular.stages import Found
from numpyro_orthgp.types import Array

__all__ = ["TableFit"]


class _Wide:
    """An array of JAX in a pickle. By itself it would come back with 32 bits, unless those of 64 are enabled for all."""

    def __init__(self, array: Array) -> None:
        self.array = np.asarray(array)

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_was, (self.array,)


def _as_it_was(array: np.ndarray) -> Array:
    with own_settings():
        return jnp.asarray(array)


@dataclass(frozen=True, repr=False)
class TableFit(ABC):
    """
    :param columns: the encoding of the table's columns.
    :param found: hyperparameters, inducing points and the searches for them.
    :param X, y: standardized rows, (N, D), and outputs as the model takes them, (N,), in the random order of the fit, held-out rows
        first.
    :param function: the model's function of standardized columns, given all rows.
    :param num_held: number of rows that the searches did not see.
    :param num_dropped: number of rows without y.
    :param budget: the budget of the fit, in words.
    :param num_rows: number of rows with y. If there are many, ``X`` and ``y`` are a part of them.
    """

    columns: Columns
    found: Found
    X: np.ndarray
    y: np.ndarray
    function: GPFunction
    num_held: int
    num_dropped: int
    budget: str
    num_rows: int

    kind: ClassVar[str]
    model: ClassVar[Any]

    @property
    @abstractmethod
    def guide(self) -> Any:
        """The guide, a new one at each call."""

    @property
    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model, which ``NUTS(fit.model)`` takes unchanged."""

    @abstractmethod
    def predict(self, X: Any) -> Any:
        """Predictions for new rows."""

    @abstractmethod
    def _model_words(self) -> list[str]:
        """The model and its hyperparameters, in words."""

    @abstractmethod
    def _prediction_words(self) -> list[str]:
        """How predictions differ from the model's, in words."""

    @abstractmethod
    def _program(self, X: Array, *more: Array) -> dict[str, Array]:
        """Outputs of an exported program, from standardized columns."""

    @abstractmethod
    def _recipe(self) -> Callable[[], GPFunction]:
        """A callable that makes the model's function."""

    @abstractmethod
    def _more(self) -> tuple[dict[str, Any], Arrays]:
        """Description and arrays that only this kind of fit saves."""

    @classmethod
    @abstractmethod
    def _with_more(cls, common: dict[str, Any], more: dict[str, Any], arrays: Arrays) -> TableFit:
        """A fit of this kind, from saved description and arrays."""

    title: ClassVar[str]
    num_more: ClassVar[int] = 0  # arguments of an exported program, beside the columns
    baseline: ClassVar[str]
    bounds: ClassVar[str] = "loss in nats, "

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the guide."""
        return self.found.params

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C has ended the searches."""
        return self.budget.endswith(BY_CTRL_C)

    @property
    def hyperparameters(self) -> dict[str, np.ndarray]:
        """Hyperparameters by site, in standardized units."""
        return dict(self.found.values)

    def importance(self) -> dict[str, float]:
        """Importance of the table's columns: the share of the function's variance that depends on each, largest first.

        These are total Sobol indices of the function's mean. The mean comes from the inducing points, and each column is exchanged
        between up to 1000 rows (Jansen 1999). Variance from an interaction of columns counts for each of them, so the sum may
        exceed one. For correlated columns the fitted function decides, not the data.
        """

        with own_settings():
            return importance_of(self._mean_at, self.X, self.columns)

    def _mean_at(self, X: np.ndarray) -> np.ndarray:
        """Means of the function at standardized rows, shape (N,) or (N, P)."""
        return moments(self.function, X)[0]

    def check(self, **options: Any) -> Report:
        """The page of :func:`numpyro_orthgp.check` for the underlying model. Its data include the held-out rows.

        :param options: options of ``check``, such as ``nuts=200``.
        """
        options = {"losses": comparable(self.found.losses)} | options
        with own_settings():
            arguments: dict[str, Any] = jax.tree.map(
                lambda a: jnp.asarray(a) if isinstance(a, np.ndarray) else a, self.arguments
            )
            return check(self.model, self.guide, self.params, **arguments, **options)

    def __getstate__(self) -> dict[str, Any]:
        return jax.tree.map(lambda a: _Wide(a) if isinstance(a, jax.Array) else a, dict(vars(self)))

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        vars(new).update(vars(self))  # not by the state above, which is for pickle
        return new

    def save(self, path: Any) -> None:
        """Save the fit in one file for :func:`numpyro_orthgp.load`. Predictions of the loaded fit are the same to the last bit.

        The file holds arrays and a description, and no pickle. It includes the standardized rows of training. An existing file is
        replaced as a whole or not at all.

        :param path: path of the file, preferably with suffix ``.npz``.
        :raises ValueError: if the file cannot be written, or the fit's function was replaced by one that cannot be described.
        """
        write_fit(path, *self._described())

    def _described(self) -> tuple[dict[str, Any], Arrays]:
        found, found_arrays = describe_found(self.found)
        more, more_arrays = self._more()
        with own_settings():
            function = describe_function(self.function, self._recipe())
        common = {"num_held": self.num_held, "num_dropped": self.num_dropped, "budget": self.budget}
        common["num_rows"] = self.num_rows
        columns = describe_columns(self.columns)
        description = {"kind": self.kind, "common": common, "columns": columns, "found": found, "more": more}
        return description, {"X": self.X, "y": self.y, **found_arrays, **more_arrays, **function}

    @classmethod
    def _restored(cls, description: dict[str, Any], arrays: Arrays) -> TableFit:
        """
        :raises Exception: if description and arrays do not fit together.
        """
        found = found_of(description["found"], arrays)
        common = description["common"] | {"columns": columns_of(description["columns"]), "found": found}
        common |= {"X": arrays["X"], "y": arrays["y"], "function": None}
        fit = cls._with_more(common, description["more"], arrays)
        with own_settings():
            return fit._with_functions(arrays)

    def _with_functions(self, arrays: Arrays) -> TableFit:
        return replace(self, function=function_from(arrays, self._recipe()))

    def as_array(self, X: Any) -> np.ndarray:
        """A table as the array for an exported program, float64, shape (N, number of columns). Numbers stay as they are, NaN where
        missing. A category becomes the position of its level in the ``known`` of ``fit.columns.columns``, or -1 if not there."""
        return numbers_of(self.columns, read_table(X))

    def export(self, *, platforms: Sequence[str] | None = None) -> Any:
        """Export the predictions as a program that runs without this library, a ``jax.export.Exported`` for any number of rows. JAX
        needs ``flatbuffers`` to serialize it::

            open("fit.bin", "wb").write(fit.export().serialize())

            program = jax.export.deserialize(open("fit.bin", "rb").read())  # in a process that has JAX only
            with own_settings():
                program.call(X)["mean"]

        Its argument is the array of :meth:`as_array`, float64; for counts the exposure, shape (N,), is a second argument. For
        labels it returns ``probabilities``, for counts ``mean`` and ``sd``. For numbers it returns ``mean``, ``sd``,
        ``function_sd``, ``loc`` and ``scale``: a new output is ``loc + scale * e``, or its exponential if ``fit.units.is_log``.
        For the quantile at ``level``, put ``fit.found.errors.quantile(level)`` in the place of e; ``predict`` also
        allows for rows unlike those seen. If y has atoms, ``atoms`` are their probabilities, and e is of the others.

        :param platforms: platforms such as ``("cpu", "cuda")``; by default the current one.
        """

        def program(X: Array, *more: Array) -> dict[str, Array]:
            return self._program_of_table(X, *more)

        return exported(program, self._num_columns, self.num_more, platforms)

    @property
    def _num_columns(self) -> int:
        """Number of columns of the array for an exported program."""
        return len(self.columns.columns)

    def _program_of_table(self, X: Array, *more: Array) -> dict[str, Array]:
        """Outputs of an exported program, from the array of :meth:`as_array`."""
        return self._program(standardized(self.columns, X), *more)

    def __str__(self) -> str:
        found, X = self.found, self.X
        dropped = f" ({self.num_dropped} without y left out)" if self.num_dropped else ""
        head = f"{self.title}: {self.num_rows} rows{dropped}, {X.shape[1]} columns, {len(found.Z)} inducing points"
        lines = [head, *(f"  {line}" for line in self._part_words() + self.columns.words()), *self._model_words(), ""]
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

    def _part_words(self) -> list[str]:
        few = len(self.X) < self.num_rows
        return [f"searched in {len(self.X)} rows, picked at random"] if few else []

    def _left_out_words(self) -> str:
        return f"held-out rows {self.num_held}"

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {self.num_rows} rows, {self.X.shape[1]} columns; print it to see what was done>"
        )
