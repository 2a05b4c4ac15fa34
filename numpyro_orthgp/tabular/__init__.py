"""One call from a table to predictions: :func:`regression`, :func:`classification`, :func:`counts`.

``tables``, ``columns``, ``meanings``, ``level_means``, ``labels``, ``rows`` and ``units`` turn a table into standardized
numbers; ``stored`` is for tables on disk and for many rows. ``models`` has the models, and ``starts`` the initial
hyperparameters. ``search`` (numbers, collapsed) and ``latent`` (labels and counts) fit hyperparameters and inducing points
within a ``budget``, at their ``pace``, by the rules of ``stages``. ``near`` learns hyperparameters for predictions from the
nearest rows, and ``votes`` counts their labels. ``left_out`` calibrates predictions on rows that were left out; ``mixtures``
models their errors, ``atoms`` and ``fitted_atoms`` values that recur, and ``strays`` rows unlike them all. ``families``
chooses that of counts, and ``renewal`` is the one of less variance. ``blocks`` has programs for any number of rows. ``fits``
is the base class of all fits, and ``predictions`` and ``predicted_counts`` are in the user's units. ``files`` saves and loads
fits, ``serving`` exports them.
"""

from numpyro_orthgp.tabular.classification import ClassificationFit, classification
from numpyro_orthgp.tabular.counts import CountsFit, counts
from numpyro_orthgp.tabular.loading import load
from numpyro_orthgp.tabular.models import classification_model, counts_model, regression_model
from numpyro_orthgp.tabular.predicted_counts import CountPredictions
from numpyro_orthgp.tabular.predictions import ClassPredictions, Predictions
from numpyro_orthgp.tabular.regression import RegressionFit, regression

__all__ = [
    "ClassPredictions", "ClassificationFit", "CountPredictions", "CountsFit", "Predictions", "RegressionFit", "classification",
    "classification_model", "counts", "counts_model", "load", "regression", "regression_model",
]  # fmt: skip
