"""Mixed columns of a table as inputs of a gp: numbers, and categories as columns of indices, each for its own kernel.

``columns`` encodes categories for models of numbers only, with one column per level. Here a category is one column of indices,
which :class:`~numpyro_orthgp.kernels.Coregion` reads. That kernel learns how similar the categories are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpyro_orthgp.errors import check_option
from numpyro_orthgp.foreign import as_jax
from numpyro_orthgp.tabular.columns import Column, Table, read_table
from numpyro_orthgp.types import Array

__all__ = ["Category", "Inputs", "inputs_of"]

MISSING = "(missing)"  # level of missing categories
_MISSING_NUMBERS = ("refuse", "indicator", "keep")
_UNSEEN = ("refuse", "new")


@dataclass(frozen=True)
class Category:
    """A column of categories.

    :param name: name of the table's column.
    :param column: position of the column of indices in the inputs.
    :param levels: the categories, in the order of their indices, with ``"(missing)"`` if any were missing in training.
    :param num: number of possible indices: one more than levels if unseen categories become a new one.
    """

    name: str
    column: int
    levels: tuple[str, ...]
    num: int


@dataclass(frozen=True)
class Inputs:
    """A map from tables to inputs of a gp, learned by :func:`~numpyro_orthgp.inputs_of`. Call it with a table.

    :param numbers: columns of the inputs that hold standardized numbers.
    :param categories: the other columns.
    :param names: names of all columns of the inputs.
    """

    numbers: tuple[int, ...]
    categories: tuple[Category, ...]
    names: tuple[str, ...]
    encoders: tuple[Column | Category, ...]
    missing: str
    dtype: Any

    def __getitem__(self, name: str) -> Category:
        """A category, by the name of its column in the table.

        :raises KeyError: if there is none.
        """
        for category in self.categories:
            if category.name == name:
                return category
        raise KeyError(f"No column of categories is called {name!r}; there are {[c.name for c in self.categories]}.")

    def __call__(self, table: Any) -> Array:
        """A table as inputs, shape (N, D).

        :param table: a table with the columns of training, in any order.
        :raises ValueError: if a column is missing; for missing numbers and for categories not seen in training, unless the options
            of :func:`~numpyro_orthgp.inputs_of` admit them.
        """
        found = read_table(table)
        lacking = [e.name for e in self.encoders if e.name not in found.names]
        if lacking:
            raise ValueError(f"The table lacks {', '.join(lacking)}; it has {', '.join(found.names)}.")
        columns: list[np.ndarray] = []
        for encoder in self.encoders:
            values = found.values[found.names.index(encoder.name)]
            if isinstance(encoder, Category):
                columns.append(_indices(encoder, values))
            else:
                columns += self._numbers(encoder, values)
        return as_jax(np.stack(columns, -1).astype(self.dtype))

    def _numbers(self, encoder: Column, values: np.ndarray) -> list[np.ndarray]:
        encoded = encoder.encode(values)
        gaps = int((~np.isfinite(values)).sum()) if values.dtype != object else 0
        if not gaps:
            return encoded
        if self.missing == "keep":
            return [(values - encoder.mean) / encoder.scale]
        if self.missing == "refuse" or not encoder.tells_missing:
            trained = "" if self.missing == "refuse" else " and none in training, so no column can tell which"
            raise ValueError(
                f"Column {encoder.name!r} has {gaps} missing numbers{trained}. inputs_of(table, missing='indicator') puts the "
                "median there and a column beside it that tells which: right where being missing says something itself. "
                "missing='keep' leaves NaN for a model that draws them, as latent variables. Or leave out these rows."
            )
        return encoded


def inputs_of(
    table: Any,
    *,
    categories: Sequence[str] = (),
    missing: str = "refuse",
    unseen: str = "refuse",
    dtype: Any = None,
) -> Inputs:
    r"""Learn the map from a table of mixed columns to inputs: standardized numbers, and categories as columns of indices.

    ::

        inputs = inputs_of(table)
        X = inputs(table)                                        # (N, D)
        town = inputs["town"]
        kernel = Matern52(lengthscale).on(inputs.numbers) * Coregion.exchangeable(town.num, correlation).on(town.column)
        Z = init.kmeans(rng_key, X, 50, categories=[c.column for c in inputs.categories])

    Text, pandas' categories and other columns that are not numbers are categories. Missing ones are a further category,
    ``"(missing)"``.

    :param table: a pandas or polars table, or an array of numbers, shape (N, D), whose columns are called x0, x1, ...
    :param categories: names of columns whose numbers are codes, such as postcodes or machines.
    :param missing: treatment of missing numbers: "refuse" raises an error; "indicator" replaces them by the median and adds a
        column of -1 and 1; "keep" leaves NaN, for a model that samples them (a gp refuses NaN).
    :param unseen: treatment of categories not seen in training: "refuse" raises an error with their names; "new" makes one new
        category of all that a column has, with a warning, for a kernel such as ``Coregion.exchangeable``, which models what all
        categories share.
    :param dtype: floating dtype of the inputs, by default JAX's.
    :return: ``Inputs``, to call with this and other tables.
    :raises TypeError: for columns of dates, or of objects that are not text.
    :raises ValueError: for other options, missing numbers that are refused, columns without any number, or ``categories`` that
        name no column.
    """
    check_option("missing", missing, _MISSING_NUMBERS)
    check_option("unseen", unseen, _UNSEEN)
    found = read_table(table)
    if not found.num_rows:
        raise ValueError("`table` must have at least one row.")
    strange = [name for name in categories if name not in found.names]
    if strange:
        raise ValueError(f"`categories` names {', '.join(map(repr, strange))}; the table has {', '.join(found.names)}.")
    inputs = _learned(found, set(categories), missing, unseen, as_jax(np.zeros((), dtype)).dtype)
    inputs(table)  # makes the same checks as for other tables
    return inputs


def _learned(table: Table, coded: set[str], missing: str, unseen: str, dtype: Any) -> Inputs:
    encoders: list[Column | Category] = []
    numbers: list[int] = []
    names: list[str] = []
    for name, values in zip(table.names, table.values, strict=True):
        if values.dtype.kind == "M":
            raise TypeError(
                f"Column {name!r} holds dates. Say what about them matters for your kernel, as numbers: days since a start, hour "
                "of the day, month."
            )
        if values.dtype == object or name in coded:
            levels = tuple(sorted(set(_levels(values)), key=lambda level: (level == MISSING, level)))
            encoders.append(Category(name, len(names), levels, len(levels) + (unseen == "new")))
            names.append(name)
            continue
        known = np.isfinite(values)
        if not known.any():
            raise ValueError(f"Column {name!r} has no number at all. Leave it out.")
        # Only "indicator" marks missing numbers; otherwise they are refused or kept.
        column = Column.learn(name, values if missing == "indicator" else values[known])
        encoders.append(column)
        numbers += range(len(names), len(names) + len(column.names()))
        names += column.names()
    found = tuple(e for e in encoders if isinstance(e, Category))
    return Inputs(tuple(numbers), found, tuple(names), tuple(encoders), missing, dtype)


def _levels(values: np.ndarray) -> list[str]:
    """Categories as text, whole numbers as integers."""
    return [MISSING if v is None or v != v else str(int(v)) if _is_whole(v) else str(v) for v in values.tolist()]


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value == int(value)


def _indices(category: Category, values: np.ndarray) -> np.ndarray:
    position = {level: i for i, level in enumerate(category.levels)}
    given = _levels(values)
    unseen = [level for level in given if level not in position]
    if unseen:
        each = sorted(set(unseen))
        words = (
            f"Column {category.name!r} has {len(unseen)} rows with categories that training has not seen: "
            f"{', '.join(each[:5])}{' and others' if len(each) > 5 else ''}."
        )
        if category.num == len(category.levels):
            raise ValueError(
                f"{words} Nothing is known of these. With inputs_of(table, unseen='new') all of them are one new category, and "
                "kernels.Coregion.exchangeable predicts for it what is common to all."
            )
        warnings.warn(f"{words} They are taken for one new category.", stacklevel=3)
    return np.array([position.get(level, len(category.levels)) for level in given], float)
