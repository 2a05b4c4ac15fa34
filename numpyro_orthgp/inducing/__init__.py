"""Inducing features: what a set of inducing variables is, seen through two covariances."""

from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.inducing.fourier import FourierFeatures
from numpyro_orthgp.inducing.patches import InducingPatches
from numpyro_orthgp.inducing.points import InducingPoints, MeanOnly, covariance_of_points, weighted_covariance
from numpyro_orthgp.inducing.sets import as_sets, input_dim
from numpyro_orthgp.inducing.spherical import SphericalHarmonics

__all__ = [
    "Feature", "FourierFeatures", "InducingPatches", "InducingPoints", "MeanOnly", "SphericalHarmonics", "as_sets",
    "covariance_of_points", "input_dim", "weighted_covariance",
]  # fmt: skip
