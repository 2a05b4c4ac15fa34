"""One call from a table to predictions, made of the rooms above: :func:`regression`.

``columns`` makes standardized numbers of a table, ``models`` has the models, ``starts`` says where hyperparameters begin,
``search`` finds them and the inducing points within a ``budget``, ``predictions`` are in the user's units.
"""

from numpyro_orthgp.tabular.models import regression_model
from numpyro_orthgp.tabular.predictions import Predictions
from numpyro_orthgp.tabular.regression import RegressionFit, regression

__all__ = ["Predictions", "RegressionFit", "regression", "regression_model"]
