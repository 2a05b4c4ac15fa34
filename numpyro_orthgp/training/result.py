"""What a fit returns, and what it tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from numpyro_orthgp.training.columns import rows_of

__all__ = ["FitResult", "Fitted", "Progress", "Status", "answer_with"]

Status = Literal["finished", "stopped early", "interrupted", "diverged", "converged", "stalled"]

# What a result can be asked, by name: functions of the rooms below, which this one does not know (`answer_with`).
_answers: dict[str, Callable[..., Any]] = {}


def answer_with(**functions: Callable[..., Any]) -> None:
    """Let results answer by these functions of a :class:`Fitted`, the parameters, and what the user gave."""
    _answers.update(functions)


@dataclass(frozen=True)
class Fitted:
    """What was fitted, and to what: references, no copies. A memory map remains one.

    :param svi: the ``SVI``.
    :param data: as the user gave them, a tuple or a dict.
    :param batch_size: rows of a step.
    :param num_rows: N.
    :param kwargs: further keyword arguments of the model.
    :param is_part: whether ``data`` are one batch, of a stream or of rows of several processes, and no other is kept.
    """

    svi: Any
    data: Any
    batch_size: int
    num_rows: int
    kwargs: dict[str, Any]
    is_part: bool = False

    @property
    def model(self) -> Callable[..., Any]:
        return self.svi.model

    @property
    def guide(self) -> Callable[..., Any]:
        return self.svi.guide

    def arguments(self, rows: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model.

        :param rows: of the data, a slice or sorted numbers; by default all of them.
        """
        if self.is_part and rows is None:
            raise ValueError(
                "The fit saw its data as a stream, of which it keeps one batch, or as rows of several processes, and this asks "
                "for all rows. Ask the function with data of yours: ogp.khat(model, guide, result.params, *batch, ...), "
                "ogp.to_arviz, ogp.check."
            )
        data = jax.tree.map(lambda a: rows_of(a, rows), self.data)
        # Cast and put where JAX has its arrays, as the fit does.
        data = jax.tree.map(jax.numpy.asarray, data)
        return ((), data | self.constants) if isinstance(data, dict) else (tuple(data), self.constants)

    @property
    def constants(self) -> dict[str, Any]:
        """Keyword arguments of the model that are no data: of the ``SVI``, and of ``fit``."""
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
    """What :func:`~numpyro_orthgp.fit` and :func:`~numpyro_orthgp.fit_lbfgs` return; the first three as in
    NumPyro's ``SVIRunResult``.

    ::

        result = ogp.fit(svi, random.PRNGKey(0), (X, y), num_steps=2000, N=len(X), Z=Z)
        f = result.posterior()["f"]  # the functions
        new = result.predict(X_new)["y"]  # new outputs: new.mean, new.sd, new.interval(0.9)
        print(result.check(held_out=(X_test, y_test)))
        data = result.to_arviz()

    It remembers model, guide, data and constants (``N``, ``Z``), so these need not be written again; what is passed to a method
    comes in their place. It holds references to the data, not copies. A copy made by ``pickle`` or ``jax.tree.map`` has the six
    fields only: ask ``ogp.posterior(model, guide, result.params, ...)`` and its like then.

    :param params: constrained parameters, by name.
    :param state: the ``SVIState`` that they are read from; ``init_state=`` of another fit goes on from it.
    :param losses: the losses of all steps that were taken, NumPy, shape (number of steps,); for "diverged" those that were
        finite.
    :param status: "finished" (``params`` are those after the last step), "stopped early" or "interrupted" (those of the best window
        so far, see :class:`~numpyro_orthgp.EarlyStopping`), "diverged" (the last whose loss was finite). Of
        :func:`~numpyro_orthgp.fit_lbfgs` also "converged" and "stalled"; ``params`` are those of the lowest loss.
    :param num_steps: the number of steps after which ``params`` were reached.
    :param message: of :func:`~numpyro_orthgp.fit_lbfgs`: why it ended, in words.
    """

    _fitted: Fitted | None = None

    def of(self, fitted: Fitted) -> FitResult:
        """This result, which knows what was fitted from now on."""
        self._fitted = fitted
        return self

    def posterior(self, **options: Any) -> dict[str, Any]:
        """The fitted functions, by name: :func:`numpyro_orthgp.posterior`.

        After a fit by minibatches the model is run on as many rows as a batch has, since functions do not depend on rows.

        :param options: of that function, and constants of the model to change.
        """
        return self._ask("posterior", options)

    def predict(self, *args: Any, num_samples: int = 1000, rng_key: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Draws of new outputs, by name of the site; each has ``mean``, ``sd``, ``quantile``, ``interval``.

        :param args: arguments of the model in the place of the data: inputs, without outputs. What is not given has its default,
            or, if it is the last one and has none, is ``None``. Constants are those of the fit.
        :param num_samples: draws of the guide, one of the outputs for each.
        :param rng_key: default ``jax.random.PRNGKey(0)``.
        :param kwargs: the same by name.
        :return: outputs of rows that are independent given what the guide draws: of several outputs of one function, or for joint
            draws, use ``numpyro.infer.Predictive``.
        :raises TypeError: if the model needs more of its arguments.
        """
        return self._ask("predict", {"args": args, "num_samples": num_samples, "rng_key": rng_key, "given": kwargs})

    def check(self, num_rows: int | None = None, **options: Any) -> Any:
        """One look at the fit: :func:`numpyro_orthgp.check`, with its losses.

        :param num_rows: how many rows of the data to look at, evenly spread; by default all, or 5000 of more. The page says so.
        :param options: of that function: ``held_out=(X_test, y_test)``, ``nuts=200``.
        """
        return self._ask("check", {"num_rows": num_rows, "losses": self.losses, **options})

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
        """A model is a function, and its data may be large: a pickled result has its fields only."""

    def __repr__(self) -> str:
        loss = f"last loss {self.losses[-1]:.6g}, " if len(self.losses) else ""
        words = f" {self.message}" if self.message else ""
        return f"<FitResult: {self.status} after {self.num_steps} steps, {loss}{len(self.params)} parameters.{words}>"


@dataclass(frozen=True)
class Progress:
    """What a ``callback`` sees after each call to the device.

    :param step: number of steps taken so far.
    :param epoch: how many times the data have been seen, a fraction.
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
        """The constrained parameters after ``step`` steps; nothing is computed unless this is called."""
        return self._params()
