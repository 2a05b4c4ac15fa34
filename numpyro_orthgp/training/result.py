"""The result of a fit, and its progress reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from numpyro_orthgp.processes import refuse_fork
from numpyro_orthgp.training.columns import rows_of

__all__ = ["FitResult", "Fitted", "Progress", "Status", "answer_with"]

Status = Literal["finished", "stopped early", "interrupted", "diverged", "converged", "stalled"]

# Functions that a result's methods call, by name. Modules that this one does not import set them (`answer_with`).
_answers: dict[str, Callable[..., Any]] = {}


def answer_with(**functions: Callable[..., Any]) -> None:
    """Register the functions behind a result's methods. Arguments: a :class:`Fitted`, the parameters, and the user's arguments."""
    _answers.update(functions)


@dataclass(frozen=True)
class Fitted:
    """The model that was fitted, and its data: references, no copies. A memory map remains one.

    :param svi: the ``SVI``.
    :param data: the user's data, a tuple or a dict.
    :param batch_size: rows of a step.
    :param num_rows: N.
    :param kwargs: further keyword arguments of the model.
    :param is_part: whether ``data`` are only one batch, from a stream or from rows of several processes.
    :param tables: columns of the tables that were batches, by their set.
    """

    svi: Any
    data: Any
    batch_size: int
    num_rows: int
    kwargs: dict[str, Any]
    is_part: bool = False
    tables: Mapping[frozenset[str], list[str]] = field(default_factory=dict)

    @property
    def model(self) -> Callable[..., Any]:
        return self.svi.model

    @property
    def guide(self) -> Callable[..., Any]:
        return self.svi.guide

    def arguments(self, rows: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model.

        :param rows: rows of the data, a slice or sorted numbers; by default all.
        """
        refuse_fork()
        if self.is_part and rows is None:
            raise ValueError(
                "This needs all rows, but the fit read its data as a stream, of which it keeps one batch, or as "
                "rows of several processes. Call the function with your own data: ogp.khat(model, guide, "
                "result.params, *batch, ...), ogp.to_arviz, ogp.check."
            )
        rows = slice(self.num_rows) if rows is None else rows  # a file may have grown since
        data = jax.tree.map(lambda a: rows_of(a, rows), self.data)
        wanted = min(rows.stop, self.num_rows) if isinstance(rows, slice) else len(rows)
        if not self.is_part and any(len(a) != wanted for a in jax.tree.leaves(data)):
            raise ValueError(
                f"The data had {self.num_rows} rows in the fit, and have fewer now. They must stay as they are as long as the "
                "result is in use; or pass others: ogp.check(model, guide, result.params, X, y, ...)."
            )
        # Cast and placed on JAX's default device, as in the fit.
        data = jax.tree.map(jax.numpy.asarray, data)
        return ((), data | self.constants) if isinstance(data, dict) else (tuple(data), self.constants)

    @property
    def constants(self) -> dict[str, Any]:
        """Keyword arguments of the model other than data, from the ``SVI`` and from ``fit``."""
        return getattr(self.svi, "static_kwargs", {}) | self.kwargs


class _Fields(NamedTuple):
    """The fields of a :class:`FitResult`, in their order."""

    params: dict[str, Any]
    state: Any
    losses: np.ndarray
    status: Status
    num_steps: int
    message: str = ""


class FitResult(_Fields):
    """The result of :func:`~numpyro_orthgp.fit` and :func:`~numpyro_orthgp.fit_lbfgs`. The first three fields are as in
    NumPyro's ``SVIRunResult``.

    ::

        result = ogp.fit(svi, random.PRNGKey(0), (X, y), num_steps=2000, N=len(X), Z=Z)
        f = result.posterior()["f"]  # the functions
        new = result.predict(X_new)["y"]  # new outputs: new.mean, new.sd, new.interval(0.9)
        print(result.check(held_out=(X_test, y_test)))
        data = result.to_arviz()

    It remembers model, guide, data and constants (``N``, ``Z``), so methods do not need them again. Arguments passed to a method
    replace the remembered ones. It has references to the data, not copies. Copies made by ``pickle`` or ``jax.tree.map`` have only
    the six fields; for these use ``ogp.posterior(model, guide, result.params, ...)`` and similar functions.

    :param params: constrained parameters, by name.
    :param state: the ``SVIState`` of ``params``; another fit continues from it with ``init_state=``.
    :param losses: losses of all steps, NumPy, shape (number of steps,); for "diverged" the finite ones.
    :param status: "finished" (``params`` are from the last step), "stopped early" or "interrupted" (from the best window so far,
        see :class:`~numpyro_orthgp.EarlyStopping`), "diverged" (from the last state with a finite loss).
        :func:`~numpyro_orthgp.fit_lbfgs` also has "converged" and "stalled"; its ``params`` have the lowest loss.
    :param num_steps: the number of steps after which ``params`` were reached.
    :param message: why :func:`~numpyro_orthgp.fit_lbfgs` ended, in words.
    """

    _fitted: Fitted | None = None

    def of(self, fitted: Fitted) -> FitResult:
        """This result, with model and data attached."""
        self._fitted = fitted
        return self

    def posterior(self, **options: Any) -> dict[str, Any]:
        """The fitted functions, by name: :func:`numpyro_orthgp.posterior`.

        After a fit on minibatches the model is run on one batch of rows, since functions do not depend on rows.

        :param options: options of that function, and constants of the model to change.
        """
        return self._ask("posterior", options)

    def predict(self, *args: Any, num_samples: int = 1000, rng_key: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Draws of new outputs, by site name. Each has ``mean``, ``sd``, ``quantile``, ``interval``.

        :param args: arguments of the model that replace the data: inputs, without outputs. Missing arguments get their defaults. If
            the last one has no default, it is ``None``. Constants are those of the fit.
        :param num_samples: number of draws from the guide, with one draw of the outputs for each.
        :param rng_key: default ``jax.random.key(0)``.
        :param kwargs: the same arguments, by name.
        :return: draws of outputs, independent between rows given the guide's draw. For several outputs of one function, or for
            joint draws, use ``numpyro.infer.Predictive``.
        :raises TypeError: if the model needs more arguments.
        """
        return self._ask("predict", {"args": args, "num_samples": num_samples, "rng_key": rng_key, "given": kwargs})

    def check(self, num_rows: int | None = None, **options: Any) -> Any:
        """Check the fit with :func:`numpyro_orthgp.check`, including its losses.

        :param num_rows: how many rows to use, evenly spread; by default all, but at most 5000. The page says if it used a sample.
        :param options: options of that function, such as ``held_out=(X_test, y_test)``, ``nuts=200``.
        """
        return self._ask("check", {"num_rows": num_rows, "losses_of_fit": self.losses, **options})

    def khat(self, **options: Any) -> Any:
        """The Pareto k-hat of the guide: :func:`numpyro_orthgp.khat`."""
        return self._ask("khat", options)

    def to_arviz(self, **options: Any) -> Any:
        """Draws for ArviZ: :func:`numpyro_orthgp.to_arviz`."""
        return self._ask("to_arviz", options)

    def _ask(self, what: str, options: dict[str, Any]) -> Any:
        fitted = self._fitted
        if fitted is None:
            raise ValueError(
                f"This result is a copy, by pickle or jax.tree.map, and no longer knows its model and data; ask "
                f"ogp.{'posterior' if what == 'predict' else what}(model, guide, result.params, ...)."
            )
        for part in ("model", "guide"):
            if not callable(getattr(fitted.svi, part, None)):
                raise TypeError(f"`result.{what}` needs the SVI's {part}; {type(fitted.svi).__name__} has none.")
        return _answers[what](fitted, self.params, **options)

    def _replace(self, **fields: Any) -> FitResult:
        copy = super()._replace(**fields)
        copy._fitted = self._fitted
        return copy

    def __getstate__(self) -> None:
        """A pickled result has only its fields: a model is a function, and data may be large."""

    def __repr__(self) -> str:
        loss = f"last loss {self.losses[-1]:.6g}, " if len(self.losses) else ""
        words = f" {self.message}" if self.message else ""
        return f"<FitResult: {self.status} after {self.num_steps} steps, {loss}{len(self.params)} parameters.{words}>"


@dataclass(frozen=True)
class Progress:
    """The argument of ``callback``, after each call to the device.

    :param step: number of steps so far.
    :param epoch: number of passes through the data so far, a fraction.
    :param losses: losses of the steps since the last call, NumPy, shape (number of steps,).
    """

    step: int
    epoch: float
    losses: np.ndarray
    _params: Callable[[], dict[str, Any]] = field(repr=False)

    @property
    def elbo(self) -> float:
        """Minus the mean of ``losses``."""
        return -float(np.mean(self.losses, dtype=np.float64))

    def params(self) -> dict[str, Any]:
        """The constrained parameters after ``step`` steps, computed only when this is called."""
        return self._params()
