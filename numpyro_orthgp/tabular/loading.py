""":func:`load`, which reads fits of tables from files."""

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
    """Load a fit of :func:`regression`, :func:`classification` or :func:`counts` that ``fit.save(path)`` wrote.

    Nothing in the file is executed, and nothing is fitted again. Predictions equal those of the saved fit to the last bit.

    :param path: path of the file, text or a ``pathlib.Path``.
    :return: the fit.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: if the file is damaged, is not a saved fit, or has another version of the format.
    """
    return read_fit(path, _restored)


def _restored(description: dict[str, Any], arrays: Arrays) -> TableFit:
    return KINDS[description["kind"]]._restored(description, arrays)
