"""Sparse orthogonal Gaussian processes as NumPyro primitives and guides.

A function with a Gaussian-process prior is split along sets of inducing variables,

    f(x) = sum_i A_i(x)^T e_i + residual(x),    e_i ~ N(0, I),

the whitened variables e_i being ordinary NumPyro latent sites. A guide draws them from Gaussians and hands those Gaussians
to the model, which then integrates over them exactly; any other inference sees plain values. One set is SVGP, two are
SOLVE-GP, and the residual's variance is what the tightened bounds shrink.

Read ``math/projection.py`` (the decomposition), ``primitives/`` (the sites) and ``guides/`` (the Gaussians).
"""

from numpyro_orthgp import init as init
from numpyro_orthgp import kernels as kernels
from numpyro_orthgp import likelihoods as likelihoods
from numpyro_orthgp import online as online
from numpyro_orthgp import plots as plots
from numpyro_orthgp.collapsed import CollapsedGP as CollapsedGP
from numpyro_orthgp.deep import DeepGP as DeepGP
from numpyro_orthgp.diagnostics import check as check
from numpyro_orthgp.diagnostics import khat as khat
from numpyro_orthgp.diagnostics import to_arviz as to_arviz
from numpyro_orthgp.guides import AutoSparseGP as AutoSparseGP
from numpyro_orthgp.guides import gp_posterior as gp_posterior
from numpyro_orthgp.guides import latent_inputs_posterior as latent_inputs_posterior
from numpyro_orthgp.guides import posterior as posterior
from numpyro_orthgp.images import patchwise as patchwise
from numpyro_orthgp.images import patchwise_mean as patchwise_mean
from numpyro_orthgp.inducing import FourierFeatures as FourierFeatures
from numpyro_orthgp.inducing import InducingPatches as InducingPatches
from numpyro_orthgp.inducing import InducingPoints as InducingPoints
from numpyro_orthgp.inducing import MeanOnly as MeanOnly
from numpyro_orthgp.inducing import SphericalHarmonics as SphericalHarmonics
from numpyro_orthgp.inputs import LatentInputs as LatentInputs
from numpyro_orthgp.latents import InferredLatents as InferredLatents
from numpyro_orthgp.latents import infer_latents as infer_latents
from numpyro_orthgp.likelihoods import GaussHermite as GaussHermite
from numpyro_orthgp.likelihoods import Likelihood as Likelihood
from numpyro_orthgp.likelihoods import MonteCarlo as MonteCarlo
from numpyro_orthgp.likelihoods import QuasiMonteCarlo as QuasiMonteCarlo
from numpyro_orthgp.marginals import Marginals as Marginals
from numpyro_orthgp.natural import natural_gradient as natural_gradient
from numpyro_orthgp.primitives import gp as gp
from numpyro_orthgp.primitives import latent_inputs as latent_inputs
from numpyro_orthgp.primitives import orthogonal as orthogonal
from numpyro_orthgp.process import GPFunction as GPFunction
from numpyro_orthgp.stacking import stack as stack
from numpyro_orthgp.training import EarlyStopping as EarlyStopping
from numpyro_orthgp.training import fit as fit

__version__ = "0.1.0"
