"""Labels of any kind as classes 0, ..., C - 1, and back in their original form."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpyro_orthgp.tabular.meanings import alike
from numpyro_orthgp.tabular.rows import LEAST_ROWS, is_missing, one_column, series_of

__all__ = ["Labels", "categories_of"]

MOST_CLASSES = 100
MEANS_MISSING = ("", "nan", "NaN", "NaT", "<NA>", "NA", "N/A", "None", "null", "NULL", "?")  # as others write it
DECODED = " Bytes become text by [v.decode() for v in y]."
MOST_FRACTIONS = 10  # most distinct numbers with fractions that may be labels


@dataclass(frozen=True)
class Labels:
    """
    :param classes: the distinct labels, in order, in their original dtype.
    :param levels: all levels of a pandas category, in its order; ``None`` for other labels.
    :param ordered: whether the pandas category is ordered.
    """

    classes: np.ndarray
    levels: np.ndarray | None = None
    ordered: bool = False

    @classmethod
    def read(cls, y: Any, num_rows: int, index: Any = None) -> tuple[Labels, np.ndarray, np.ndarray]:
        """The labels, the classes of the rows that have a label, and a mask of these rows.

        :raises TypeError: for labels of several types, or of a type that cannot be ordered.
        :raises ValueError: for too few labels, a single class, or too many classes.
        """
        y = series_of(y)
        values = _exact(y, one_column(y, num_rows, index=index))
        seen = np.array([not is_missing(v) for v in values], bool)
        known = _of_one_type(values[seen])
        if len(known) < LEAST_ROWS:
            raise ValueError(f"At least {LEAST_ROWS} labels are needed; got {len(known)}.")
        classes = np.unique(known)
        _check_classes(classes, len(known))
        levels, ordered = None, False
        category = categories_of(y)
        if category is not None:
            levels, ordered = _of_one_type(np.asarray(category.to_numpy())), bool(y.dtype.ordered)
            present = set(classes.tolist())
            classes = np.array([v for v in levels.tolist() if v in present], classes.dtype)
        labels = cls(classes, levels, ordered)
        return labels, labels.codes(known), seen

    def codes(self, labels: np.ndarray) -> np.ndarray:
        """Classes of labels, shape (N,).

        :raises ValueError: for labels not seen in training.
        """
        position = {label: i for i, label in enumerate(self.classes.tolist())}
        values = np.asarray(labels).tolist()
        strange = [v for v in values if v not in position]
        if strange:
            raise ValueError(f"`y` holds {strange[0]!r}, a label that training did not have; it had {self.words()}.")
        return np.array([position[v] for v in values], int)

    def give_back(self, codes: np.ndarray) -> Any:
        """Labels of classes in their original form: an array, or a pandas category (an array if pandas is not installed)."""
        labels = self.classes[codes]
        if self.levels is None:
            return labels
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            return labels
        return pandas.Categorical(labels, categories=self.levels, ordered=self.ordered)

    def words(self) -> str:
        shown = [str(label) for label in self.classes[:8].tolist()]
        more = f" and {len(self.classes) - 8} more" if len(self.classes) > 8 else ""
        return ", ".join(shown) + more


def categories_of(y: Any) -> Any:
    """The levels of a pandas category, else ``None``."""
    dtype = getattr(y, "dtype", None)
    return getattr(dtype, "categories", None) if hasattr(dtype, "ordered") else None


def _exact(y: Any, values: np.ndarray) -> np.ndarray:
    """The entries of y, integers as integers also if others are missing: as floats, large ones are rounded."""
    dtype = getattr(categories_of(y), "dtype", getattr(y, "dtype", getattr(y, "type", "")))
    if values.dtype.kind != "f" or not str(dtype).lower().startswith(("int", "uint")):
        return values
    entries = next(getattr(y, name) for name in ("to_pylist", "to_list", "tolist") if hasattr(y, name))
    return np.array(entries(), object)


def _of_one_type(values: np.ndarray) -> np.ndarray:
    """Labels as an array that can be ordered. Objects that are all numbers or all truth values get that dtype."""
    values = values.astype(object) if values.dtype.kind == "T" else values  # NumPy's text of any length
    if values.dtype.kind in "biufU":
        return values
    if values.dtype.kind != "O":
        remedy = DECODED if values.dtype.kind == "S" else ""
        raise TypeError(f"Labels must be text, numbers, truth values or categories; got {values.dtype}.{remedy}")
    kinds = {
        "text" if isinstance(v, str) else "truth values" if isinstance(v, bool | np.bool_) else "numbers"
        for v in values
        if isinstance(v, str | bool | np.bool_ | int | float | np.number)
    }
    strange = [type(v).__name__ for v in values if not isinstance(v, str | bool | np.bool_ | int | float | np.number)]
    if strange or len(kinds) > 1:
        found = sorted(kinds | set(strange))
        remedy = DECODED if "bytes" in found else " Pass others as text, such as y.astype(str)."
        raise TypeError(f"Labels must be all text, all numbers or all truth values; got {' and '.join(found)}.{remedy}")
    if kinds == {"text"}:
        return values.astype(object)
    numbers = np.array(values.tolist())
    if numbers.dtype.kind not in "biuf" or (numbers.dtype.kind == "f" and all(isinstance(v, int) for v in values)):
        raise TypeError("`y` holds whole numbers that no integer of 64 bits holds. Pass them as text: y.astype(str).")
    return numbers


def _warn_of_alike(classes: np.ndarray) -> None:
    for what, label, other in alike([label for label in classes.tolist() if isinstance(label, str)]):
        warnings.warn(f"Labels {label!a} and {other!a} differ only in {what}, and count as two classes.", stacklevel=2)


def _warn_of_missing(classes: np.ndarray) -> None:
    missing = [label for label in classes.tolist() if isinstance(label, str) and label.strip() in MEANS_MISSING]
    if missing:
        warnings.warn(
            f"Label {missing[0]!r} is a class of its own. If it means that the label is missing, leave out these rows, or "
            "pass None there.",
            stacklevel=2,
        )


def _check_classes(classes: np.ndarray, num: int) -> None:
    if len(classes) == 1:
        raise ValueError(f"All labels are {classes.tolist()[0]!r}, one class: there is nothing to learn.")
    if classes.dtype.kind == "f" and np.isinf(classes).any():
        raise ValueError("`y` has infinite entries. Make them missing (NaN), or give them a label.")
    if classes.dtype.kind == "f" and len(classes) > MOST_FRACTIONS and (classes != np.round(classes)).any():
        raise ValueError(
            f"`y` holds {len(classes)} different numbers with fractions, which are no labels: use ogp.regression. Labels may be "
            "text, whole numbers, truth values or categories."
        )
    _warn_of_alike(classes)
    _warn_of_missing(classes)
    if len(classes) > min(MOST_CLASSES, num // 2):
        raise ValueError(
            f"{len(classes)} classes for {num} labels are too many; at most {MOST_CLASSES}, of two rows on average, can be told "
            "apart. For numbers use ogp.regression, for counts ogp.counts."
        )
