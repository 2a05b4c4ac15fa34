"""The primitives that models use. Only this package reads NumPyro's message stack."""

from numpyro_orthgp.primitives.functions import gp
from numpyro_orthgp.primitives.latent_inputs import latent_inputs
from numpyro_orthgp.primitives.orthogonal import orthogonal

__all__ = ["gp", "latent_inputs", "orthogonal"]
