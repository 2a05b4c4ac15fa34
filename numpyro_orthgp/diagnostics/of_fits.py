"""Methods of :class:`~numpyro_orthgp.training.FitResult`: functions of this package, called with the arguments of the fit.

``training`` knows nothing of Gaussian processes and may not import this room, so importing this module registers the functions.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np

from numpyro_orthgp.diagnostics.check import check
from numpyro_orthgp.diagnostics.convergence import comparable
from numpyro_orthgp.diagnostics.convert import to_arviz
from numpyro_orthgp.diagnostics.importance import khat
from numpyro_orthgp.diagnostics.prediction import Prediction, predict
from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.foreign import refuse_other_order
from numpyro_orthgp.guides import posterior
from numpyro_orthgp.training.columns import in_memory
from numpyro_orthgp.training.result import Fitted, answer_with

__all__ = ["MOST_ROWS"]

MOST_ROWS = 5000  # of a check that is asked for no number of them


def _posterior(fit: Fitted, params: dict[str, Any], **options: Any) -> Any:
    rows = None if fit.batch_size == fit.num_rows else slice(fit.batch_size)
    args, known = fit.arguments(rows)
    return posterior(fit.model, fit.guide, params, *args, **(known | options))


def _check(fit: Fitted, params: dict[str, Any], num_rows: int | None, losses_of_fit: np.ndarray, **options: Any) -> Any:
    wanted = MOST_ROWS if num_rows is None else check_integer("num_rows", num_rows)
    # All of them where every step saw them: a bound that takes no part of its data has no sample either.
    everything = wanted >= fit.num_rows or (num_rows is None and fit.batch_size == fit.num_rows)
    rows: Any = None if everything else np.arange(wanted) * fit.num_rows // wanted
    if fit.is_part:
        rows = slice(min(wanted, fit.batch_size))
    _refuse_other_order(fit, options.get("held_out"))
    args, known = fit.arguments(rows)
    return check(fit.model, fit.guide, params, *args, **(known | {"losses": comparable(losses_of_fit)} | options))


def _khat(fit: Fitted, params: dict[str, Any], **options: Any) -> Any:
    args, known = fit.arguments()
    return khat(fit.model, fit.guide, params, *args, **(known | options))


def _to_arviz(fit: Fitted, params: dict[str, Any], **options: Any) -> Any:
    args, known = fit.arguments()
    return to_arviz(fit.model, fit.guide, params, *args, **(known | options))


def _predict(
    fit: Fitted, params: dict[str, Any], args: tuple[Any, ...], num_samples: int, rng_key: Any, given: dict[str, Any]
) -> dict[str, Prediction]:
    _refuse_other_order(fit, (args, given))
    args, given = in_memory((args, given))
    args, known = _complete(fit, args, fit.constants | given)
    try:
        return predict(fit.model, fit.guide, params, args, known, num_samples, rng_key)
    except (ValueError, TypeError) as error:
        rows = max((len(a) for a in (*args, *given.values()) if np.ndim(a)), default=0)
        if rows <= fit.num_rows:
            raise
        raise ValueError(
            f"`predict` got {rows} rows, but the fit had N = {fit.num_rows}, and a plate of that size cannot hold them. Pass the "
            f"new size under the model's name for it: result.predict(X_new, N={rows}); or predict in parts. NumPyro says: {error}"
        ) from error


def _refuse_other_order(fit: Fitted, new: Any) -> None:
    """
    :param new: arguments of the model.
    :raises ValueError: if one is a table with the columns of the fit's in another order.
    """
    tables = dict(fit.tables)
    for leaf in jax.tree.leaves((fit.data, new), is_leaf=lambda x: isinstance(x, list)):  # of many numbers, perhaps
        refuse_other_order(leaf, tables)


def _complete(fit: Fitted, args: tuple[Any, ...], known: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model for predictions. The last one without a default, the outputs, may be left out.

    :raises TypeError: if more are missing, or the model has no such arguments.
    """
    signature = inspect.signature(fit.model)
    try:
        bound = signature.bind_partial(*args, **known)
    except TypeError as error:
        raise TypeError(f"`predict` passes its arguments on to the model, which takes {signature}: {error}.") from error
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [p for p in signature.parameters.values() if p.kind not in variable]
    missing = [p for p in own if p.name not in bound.arguments and p.default is p.empty]
    of_data = [p for p in own if p.kind is not p.KEYWORD_ONLY or (isinstance(fit.data, dict) and p.name in fit.data)]
    if missing and not (len(missing) == 1 and of_data and missing[0] is of_data[-1] and bound.arguments):
        lacking = ", ".join(f"`{p.name}`" for p in missing)
        raise TypeError(
            f"`predict` needs all arguments of the model except its outputs. Missing: {lacking}, of {signature}. Pass new inputs "
            "in place of the data, result.predict(X_new), and give outputs the default None: def model(X, y=None)."
        )
    for p in missing:
        bound.arguments[p.name] = None
    bound.arguments = {p: bound.arguments[p] for p in signature.parameters if p in bound.arguments}
    return bound.args, bound.kwargs


answer_with(posterior=_posterior, check=_check, khat=_khat, to_arviz=_to_arviz, predict=_predict)
