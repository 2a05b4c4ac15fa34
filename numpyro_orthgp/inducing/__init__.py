"""Inducing features: sets of inducing variables, each defined by two covariances. Functionals of f are such sets too."""

from numpyro_orthgp.inducing.averages import Average, Integral, centred
from numpyro_orthgp.inducing.derivative import Derivative
from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.inducing.fourier import FourierFeatures
from numpyro_orthgp.inducing.functional import Functional, concatenate
from numpyro_orthgp.inducing.patches import InducingPatches
from numpyro_orthgp.inducing.points import InducingPoints, MeanOnly, covariance_of_points, weighted_covariance
from numpyro_orthgp.inducing.sets import as_sets, input_dim
from numpyro_orthgp.inducing.spherical import SphericalHarmonics
from numpyro_orthgp.inducing.tasks import Tasks

__all__ = [
    "Average", "Derivative", "Feature", "FourierFeatures", "Functional", "InducingPatches", "InducingPoints", "Integral",
    "MeanOnly", "SphericalHarmonics", "Tasks", "as_sets", "centred", "concatenate",
    "covariance_of_points", "input_dim", "weighted_covariance",
]  # fmt: skip
