"""The primitives that models use."""

from numpyro_orthgp.primitives.functions import gp
from numpyro_orthgp.primitives.latent_inputs import latent_inputs
from numpyro_orthgp.primitives.orthogonal import orthogonal

__all__ = ["gp", "latent_inputs", "orthogonal"]
