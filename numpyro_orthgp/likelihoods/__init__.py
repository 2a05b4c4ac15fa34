"""Likelihoods: NumPyro distributions over y that integrate the latent function out."""

from numpyro_orthgp.likelihoods.base import ExpectedLikelihood as ExpectedLikelihood
from numpyro_orthgp.likelihoods.base import GaussHermite as GaussHermite
from numpyro_orthgp.likelihoods.base import MonteCarlo as MonteCarlo
from numpyro_orthgp.likelihoods.base import QuasiMonteCarlo as QuasiMonteCarlo
from numpyro_orthgp.likelihoods.continuous import StudentT as StudentT
from numpyro_orthgp.likelihoods.discrete import Bernoulli as Bernoulli
from numpyro_orthgp.likelihoods.discrete import Categorical as Categorical
from numpyro_orthgp.likelihoods.discrete import Poisson as Poisson
from numpyro_orthgp.likelihoods.gaussian import Gaussian as Gaussian
from numpyro_orthgp.likelihoods.general import Likelihood as Likelihood
