"""Guides that pass their Gaussians to the model."""

from numpyro_orthgp.guides.auto import AutoSparseGP
from numpyro_orthgp.guides.declare import gp_posterior, latent_inputs_posterior
from numpyro_orthgp.guides.hyper import PointsAndEffects
from numpyro_orthgp.guides.posterior import posterior

__all__ = ["AutoSparseGP", "PointsAndEffects", "gp_posterior", "latent_inputs_posterior", "posterior"]
