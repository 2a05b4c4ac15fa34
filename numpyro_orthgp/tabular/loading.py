"""Fits of tables from files, :func:`load`."""

from __future__ import annotations

from typing import Any

from numpyro_orthgp.tabular.classification import ClassificationFit
from numpyro_orthgp.tabular.counts import CountsFit
from numpyro_orthgp.tabular.files import Arrays, read_fit
from numpyro_orthgp.tabular.fits import TableFit
from numpyro_orthgp.tabular.regression import RegressionFit

__all__ = ["load"]

KINDS: dict[str, type[TableFit]] = {cls.kind: cls for cls in (RegressionFit, ClassificationFit, CountsFit)}


def load(path: Any) -> Any:
    """A fit that ``fit.save(path)`` has kept: of :func:`regression`, :func:`classification` or :func:`counts`.

    Nothing in the file is executed, and nothing is fitted again. Predictions are those of the fit that was saved, to the last bit.

    :param path: of the file, text or a ``pathlib.Path``.
    :return: the fit.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: if it is damaged, of something else, or of a later version of the format.
    """
    return read_fit(path, _restored)


def _restored(description: dict[str, Any], arrays: Arrays) -> TableFit:
    return KINDS[description["kind"]]._restored(description, arrays)
