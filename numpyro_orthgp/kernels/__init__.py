"""Covariance functions.

Stationary kernels have unit variance. For another variance write ``variance * Matern52(lengthscale)``. `Linear`,
`Polynomial`, `ArcCosine`, `Constant`, `White` and `Coregion` have their own variances. `Kernel` says how all
kernels are called, combined and batched.
"""

from numpyro_orthgp.kernels.base import Constant, Function, Kernel, Named, Product, Restricted, Scaled, Sum
from numpyro_orthgp.kernels.convolutional import Convolutional
from numpyro_orthgp.kernels.coregion import Coregion
from numpyro_orthgp.kernels.dot_product import ArcCosine, Linear, Polynomial
from numpyro_orthgp.kernels.hyperparameters import hyperparameter, per_dimension, per_latent, static
from numpyro_orthgp.kernels.patches import PatchGrid, extract_patches
from numpyro_orthgp.kernels.stationary import (
    RBF,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    Stationary,
)
from numpyro_orthgp.kernels.white import White

__all__ = [
    "RBF",
    "ArcCosine",
    "Constant",
    "Convolutional",
    "Coregion",
    "Function",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Named",
    "PatchGrid",
    "Periodic",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "Restricted",
    "Scaled",
    "Stationary",
    "Sum",
    "White",
    "extract_patches",
    "hyperparameter",
    "per_dimension",
    "per_latent",
    "static",
]
