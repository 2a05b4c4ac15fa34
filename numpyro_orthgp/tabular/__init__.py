"""One call from a table to predictions, made of the rooms above: :func:`regression`, :func:`classification`, :func:`counts`.

``columns``, ``labels``, ``rows`` and ``units`` make standardized numbers of a table, ``models`` has the models, ``starts`` says
where hyperparameters begin. ``search`` (numbers, collapsed) and ``latent`` (labels and counts) find them and the inducing points
within a ``budget``, by the rules of ``stages``. ``left_out`` learns from rows left out how wide predictions are, and ``mixtures``
what their errors are distributed as. ``fits`` is what all fits have in common, ``predictions`` are in the user's units, ``files``
and ``serving`` are for what comes after.
"""

from numpyro_orthgp.tabular.classification import ClassificationFit, classification
from numpyro_orthgp.tabular.counts import CountsFit, counts
from numpyro_orthgp.tabular.loading import load
from numpyro_orthgp.tabular.models import classification_model, counts_model, regression_model
from numpyro_orthgp.tabular.predictions import ClassPredictions, CountPredictions, Predictions
from numpyro_orthgp.tabular.regression import RegressionFit, regression

__all__ = [
    "ClassPredictions", "ClassificationFit", "CountPredictions", "CountsFit", "Predictions", "RegressionFit", "classification",
    "classification_model", "counts", "counts_model", "load", "regression", "regression_model",
]  # fmt: skip
