"""From a table and a column of labels to probabilities, :func:`classification`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.likelihoods import Bernoulli, Categorical
from numpyro_orthgp.tabular.blocks import in_blocks
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.columns import Columns, read_table
from numpyro_orthgp.tabular.files import Arrays, describe_labels, labels_of
from numpyro_orthgp.tabular.fits import TableFit
from numpyro_orthgp.tabular.labels import Labels
from numpyro_orthgp.tabular.latent import USUAL_STEPS, LatentSearch, latent_function, new_guide
from numpyro_orthgp.tabular.models import classification_model
from numpyro_orthgp.tabular.points import Values
from numpyro_orthgp.tabular.predictions import ClassPredictions
from numpyro_orthgp.tabular.rows import order_of_classes
from numpyro_orthgp.tabular.settings import fitting, own_settings
from numpyro_orthgp.tabular.stages import CLEARLY, Found
from numpyro_orthgp.tabular.stored import MOST, part_of, table_of
from numpyro_orthgp.tabular.votes import REACHES, TOTALS, Votes, VotesOf
from numpyro_orthgp.types import Array

__all__ = ["ClassificationFit", "classification"]

SHARPNESS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)


def classification(
    X: Any, y: Any, *, time: float | None = 60.0, M: int | None = None, num_steps: int | None = None, seed: int = 0
) -> ClassificationFit:
    r"""Gaussian-process classification of y by the columns of a table; all options have defaults.

    ::

        fit = ogp.classification(X, y)  # a minute at most
        new = fit.predict(X_new)
        new.label, new.probabilities, new.frame()

    **Data.** Labels are text, whole numbers, truth values or pandas categories; predictions return them in the same form. Rows
    without a label are left out. A tenth of each class is held out, at least one row of each class with four rows or more; of fewer
    than 40 rows none.
    Columns become standardized numbers as in :func:`~numpyro_orthgp.regression`.

    **Model.** :func:`numpyro_orthgp.tabular.classification_model` has a Matern 5/2 kernel with a lengthscale for each column, plus
    a plane, and an offset. Two classes have one function and a probit. More classes have one function each, with a common kernel,
    and a softmax.

    **Search.** A step sees a minibatch of at most 1024 rows, of 256 with a hundred classes. It moves the Gaussian of the inducing
    variables along its natural gradient. Adam moves the hyperparameters, to their posterior modes, and the inducing points. As in
    ``regression``, there are two starts, and one more search if columns are skewed; then the number of inducing points doubles
    until the held-out rows gain less than 0.005 nats each, or the time is over. With fewer than 200 held-out rows the gain of the
    bound per row decides. The last fit is on all rows, in float64. Searches are in float64 too, or in float32 where time is short.

    **Calibration.** If flatter or sharper probabilities, :math:`p_c \propto q_c (p_c / q_c)^s` with q the shares of the classes,
    clearly predict held-out rows better, the fit returns these. If the shares alone predict better, it returns the shares, and the
    page says so.

    **Near rows.** If the labels of the rows nearest to held-out ones predict them clearly better together with these probabilities,
    the fit counts such labels: :math:`p_c = (a \hat p_c + \sum_b k_b [y_b = c]) / (a + \sum_b k_b)` over
    the 64 nearest rows b, each as much as its input is alike. The held-out rows decide how near.

    **Next steps.** ``SVI`` and ``NUTS`` take ``fit.model``, ``fit.guide``, ``fit.params`` and ``fit.arguments``.

    >>> import numpy as np
    >>> import numpyro_orthgp as ogp
    >>> x = np.linspace(0.0, 10.0, 80)
    >>> fit = ogp.classification(x, np.where(np.sin(x) > 0, "up", "down"), M=20, num_steps=100)
    >>> fit.predict([[1.5], [4.7]]).label
    array(['up', 'down'], dtype='<U4')

    :param X: a pandas or polars table, or an array of numbers, shape (N, D) or (N,), in memory or on disk. Of more than a million
        rows a random million is used.
    :param y: labels, shape (N,); None or NaN where missing.
    :param time: time limit in seconds; None for no limit. A running search stops within a call to the device. Compilation is not
        interrupted, so a fit may take some seconds more. Ctrl-C ends the fit as in :func:`~numpyro_orthgp.regression`.
    :param M: number of inducing points. It is used at once, without a time limit: the same fit on any machine.
    :param num_steps: number of steps of each search, by default 300, or as many as the time allows, but at least 50, if these
        do not take nearly half of it. The last fit, to all rows, takes half as many. If it is given, there is no time limit.
    :param seed: seed of the order of rows, which decides which rows are held out.
    :return: the fit.
    :raises TypeError: for invalid columns or labels.
    :raises ValueError: if table and labels do not match; for fewer than ten labels, a single class, more than 100 classes,
        numbers with fractions, and invalid options.
    """
    budget = Budget.of(time, M, num_steps, USUAL_STEPS)
    seed, table = check_integer("seed", seed, 0), table_of(X)
    labels, codes, seen = Labels.read(y, table.num_rows, table.index)
    part, of_part = part_of(table, seen, seed, MOST)
    used, codes = table.rows(part), codes[of_part]
    options = {"num_classes": len(labels.classes)}
    columns, inputs = Columns.learn(used, np.stack(of_classes(codes, options["num_classes"]), -1), seed)
    order, num_held = order_of_classes(codes, seed)
    data = {"X": inputs[order], "y": codes[order]}
    other, warped = columns.warped(used, data["X"], order)
    with fitting():
        found, data = found_for(data, warped, options, num_held, budget)
        columns = other if data["X"] is warped else columns
        f = latent_function(classification_model, found.params, found.Z, data, options)
    fixed = num_held, int((~seen).sum()), budget.words(), int(seen.sum())
    return ClassificationFit(columns, found, data["X"], data["y"], f, *fixed, labels)


def of_classes(codes: np.ndarray, num_classes: int) -> list[np.ndarray]:
    """One where a row is of the class, else zero, shape (N,) for each class; for one of two classes only."""
    return [(codes == c).astype(float) for c in (range(num_classes) if num_classes > 2 else [1])]


def found_for(
    data: dict[str, np.ndarray], warped: np.ndarray | None, options: dict[str, int], num_held: int, budget: Budget
) -> tuple[Found, dict[str, np.ndarray]]:
    """The fit, and its data: ``warped`` takes the place of the inputs if that is better."""
    relevant = of_classes(data["y"], options["num_classes"])
    shares = shares_of(data["y"][num_held:], options["num_classes"])

    def score(f: GPFunction, values: Values, rows: dict[str, np.ndarray]) -> np.ndarray:
        return log_probabilities(probabilities_of(f, values["offset"], rows["X"]), rows["y"])

    search = LatentSearch(
        classification_model, data, options, num_held, budget, relevant, score, warped, may_be_single=True
    )
    found = search.search(search.first())
    if not num_held:
        return found, search.data
    held = search.held
    baseline = float(np.log(shares[held["y"]]).mean())
    # The last search did not see the held-out rows, but the final fit did. So the search judges the choices.
    f, values = search.function(search.best["params"], search.best["Z"]), search.best["values"]
    p = probabilities_of(f, values["offset"], held["X"])  # with a hundred classes the slowest part
    totals = {s: float(log_probabilities(sharpened(p, shares, s), held["y"]).sum()) for s in SHARPNESS}
    best = max(totals, key=lambda s: totals[s])
    sharpness = best if totals[best] > totals[1.0] + CLEARLY else 1.0
    found = replace(found, baseline=baseline, sharpness=sharpness)
    if totals[sharpness] / num_held < baseline:
        found = replace(found, is_mean=True, sharpness=0.0)
    p = sharpened(p, shares, found.sharpness)
    seen = VotesOf.rows(values["lengthscale"], search.seen["X"], search.seen["y"], options["num_classes"])
    return replace(found, votes=votes_for(p, seen, held["X"], held["y"])), search.data


def votes_for(p: np.ndarray, rows: VotesOf, X: np.ndarray, y: np.ndarray) -> Votes | None:
    """The reach and the total that predict held-out rows best; None if these gain less than the logarithm of the number of pairs
    that are tried, as the best of so many gains something by chance.

    :param p: probabilities of the functions at the held-out rows, shape (N, C).
    :param rows: the other rows.
    :param X, y: the held-out rows and their classes.
    """

    counted = zip(REACHES, rows.counted_at(X, REACHES), strict=True)
    pairs = ((Votes(s, a), near) for s, near in counted for a in TOTALS)
    scores = {votes: float(log_probabilities(votes.mixed(p, near), y).sum()) for votes, near in pairs}
    best = max(scores, key=lambda votes: scores[votes])
    return best if scores[best] > log_probabilities(p, y).sum() + np.log(len(scores)) else None


def log_probabilities(p: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Log probabilities of the classes y, shape (N,), from those of all classes, shape (N, C)."""
    return np.log(p[np.arange(len(y)), y])


def shares_of(codes: np.ndarray, num_classes: int) -> np.ndarray:
    """Shares of the classes. One of many rows may be in none of the part that is used, and is not impossible for that."""
    counts = np.maximum(np.bincount(codes, minlength=num_classes), 0.5)
    return np.asarray(counts / counts.sum())


def sharpened(p: Any, shares: np.ndarray, sharpness: float) -> Any:
    """Probabilities relative to the shares of the classes, raised to a power; power zero gives the shares."""
    if sharpness == 1:
        return p
    xp = np if isinstance(p, np.ndarray) else jnp
    logits = sharpness * xp.log(p) + (1 - sharpness) * np.log(shares)
    raised = xp.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def class_probabilities(f: GPFunction, offset: Any, X: Any) -> Any:
    """Class probabilities with f integrated out, shape (B, C); never zero."""
    marginals = f(X) + offset
    if f.num_latents is not None:
        p = Categorical(marginals).probs
    else:
        # One minus the large probability would lose the small one's digits.
        p = jnp.stack([Bernoulli(m, "probit").mean for m in (-1.0 * marginals, marginals)], -1)
    return jnp.maximum(p, jnp.finfo(p.dtype).tiny)


@jax.jit
def _probabilities(given: Any, X: Any) -> tuple[Any]:
    f, offset = given
    return (class_probabilities(f, offset, X),)


def probabilities_of(f: GPFunction, offset: Any, X: np.ndarray) -> np.ndarray:
    return in_blocks(_probabilities, (f, jnp.asarray(offset)), X)[0]


@dataclass(frozen=True, repr=False)
class ClassificationFit(TableFit):
    """The result of :func:`numpyro_orthgp.classification`; ``print`` it.

    :param columns: the encoding of the table's columns.
    :param found: hyperparameters, inducing points and the searches for them.
    :param X, y: standardized rows, (N, D), and classes 0, ..., C - 1, (N,), in the random order of the fit, held-out rows first.
    :param function: the fitted function, or functions, of standardized columns, without the offset.
    :param num_held: number of rows that the searches did not see.
    :param num_dropped: number of rows without a label.
    :param budget: the budget of the fit, in words.
    :param num_rows: number of rows with y. If there are many, ``X`` and ``y`` are a part of them.
    :param labels: the labels of the classes.
    """

    labels: Labels

    kind = "classification"
    title = "Gaussian-process classification"
    baseline = "the shares of the classes"
    model = staticmethod(classification_model)

    @property
    def guide(self) -> Any:
        """``AutoSparseGP`` with posterior modes of the hyperparameters, a new one at each call."""
        return new_guide(self.model)

    @property
    def classes(self) -> np.ndarray:
        """The labels, in order."""
        return self.labels.classes

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model, which ``NUTS(fit.model)`` takes unchanged."""
        return {"X": self.X, "y": self.y, "Z": self.found.Z, "num_classes": len(self.classes)}

    @property
    def shares(self) -> np.ndarray:
        """Of the classes, among the rows that the searches saw."""
        return shares_of(self.y[self.num_held :], len(self.classes))

    def predict(self, X: Any) -> ClassPredictions:
        """Predict class probabilities at the rows of a table. At most six programs are compiled for any number of rows.

        :param X: a table with the columns of training, or an array with as many columns.
        :raises ValueError: for other columns.
        """
        table, votes = read_table(X), self.found.votes
        with own_settings():
            columns = self.columns.encode(table)
            p = sharpened(
                probabilities_of(self.function, self.found.values["offset"], columns), self.shares, self.found.sharpness
            )
            if votes is not None:
                p = votes.mixed(p, *self._voters.counted_at(columns, (votes.reach,)))
        return ClassPredictions(p, self.labels, table.index, table.like)

    def _program(self, X: Array, *more: Array) -> dict[str, Array]:
        p, votes = class_probabilities(self.function, self.found.values["offset"], X), self.found.votes
        p = sharpened(p, self.shares, self.found.sharpness)
        return {"probabilities": p if votes is None else votes.mixed(p, self._voters.counted_each(X, votes.reach))}

    @cached_property  # else each prediction would hand all rows to the device
    def _voters(self) -> VotesOf:
        with own_settings(), jax.ensure_compile_time_eval():
            return VotesOf.rows(self.found.values["lengthscale"], self.X, self.y, len(self.classes))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_voters"}

    def _recipe(self) -> Callable[[], GPFunction]:
        data, options = {"X": self.X, "y": self.y}, {"num_classes": len(self.classes)}
        return partial(latent_function, self.model, self.found.params, self.found.Z, data, options)

    def _more(self) -> tuple[dict[str, Any], Arrays]:
        return describe_labels(self.labels)

    @classmethod
    def _with_more(cls, common: dict[str, Any], more: dict[str, Any], arrays: Arrays) -> ClassificationFit:
        return cls(**common, labels=labels_of(more, arrays))

    def _model_words(self) -> list[str]:
        v, link = self.found.values, "probit of f(x) + offset"
        if len(self.classes) > 2:
            link = "softmax of f_c(x) + offset_c"
        counts = np.bincount(self.y, minlength=len(self.classes))
        shown = [f"{label} ({n})" for label, n in zip(self.classes.tolist(), counts, strict=True)][:8]
        more = f" and {len(counts) - 8} more" if len(counts) > 8 else ""
        return [
            f"classes (rows): {', '.join(shown)}{more}",
            f"model: {link}, f ~ GP(0, scale^2 Matern52(lengthscale) + slope^2 / D Linear)",
            f"  scale {v['scale']:.3g}, slope {v['slope']:.3g}",
        ]

    def _prediction_words(self) -> list[str]:
        s, votes, words = self.found.sharpness, self.found.votes, []
        if s not in (0.0, 1.0):
            how = "flatter" if s < 1 else "sharper"
            words = [
                f"probabilities are {how} than the model's, by a power of {s:g}: held-out rows were clearly better so"
            ]
        if votes is not None:
            words.append(
                f"labels of rows within about {votes.reach:.2g} lengthscales count, one each at most, beside {votes.total:g} for "
                "the model: held-out rows were clearly better so"
            )
        return words
