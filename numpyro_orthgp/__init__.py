"""Sparse orthogonal Gaussian processes as NumPyro primitives and guides.

A function with a Gaussian-process prior is split along sets of inducing variables,

    f(x) = sum_i A_i(x)^T e_i + residual(x),    e_i ~ N(0, I),

where the whitened variables e_i are ordinary NumPyro latent sites. A guide draws them from Gaussians and passes these Gaussians
to the model, which integrates over them exactly. Any other inference sees plain values. One set gives SVGP, two give SOLVE-GP.
The tightened bounds shrink the variance of the residual.

The rooms of the package, in reading order; each imports only from those before it:

    types, closures           array aliases and axis letters; functions as pytrees of what they close over
    processes, foreign, errors   where JAX cannot run; arrays of other libraries; clear words
    math                      linear algebra and quadrature: arrays in, arrays out, made fast
    kernels                   covariance functions, their random features, and their expectations at Gaussian inputs
    inducing                  what is conditioned on: points, patches, Fourier and spherical features; functionals, for data too
    gaussians                 what q is: families, distributions, constraints, natural gradients
    functions                 what f is: the decomposition (``projection``), marginals, draws, paths, deep GPs
    likelihoods               distributions of y that integrate f out
    collapsed                 bounds of regression with q integrated out
    primitives                ``gp``, ``latent_inputs``, ``orthogonal``: the statements of a model
    guides                    ``AutoSparseGP``, ``gp_posterior``, ``posterior``: guides, and the fitted functions
    online                    a fit that grows: new data, new inducing points, latent inputs of new rows
    training                  ``fit``: minibatches, checkpoints, devices; ``fit_lbfgs``
    init                      starting points
    diagnostics               ``check``, ``khat``, ``to_arviz``
    plots                     pictures
    tabular                   ``regression``, ``classification``, ``counts``: from a table to predictions in one call
    sklearn                   the same as estimators of scikit-learn
"""

from numpyro_orthgp import init as init
from numpyro_orthgp import kernels as kernels
from numpyro_orthgp import likelihoods as likelihoods
from numpyro_orthgp import online as online
from numpyro_orthgp import plots as plots
from numpyro_orthgp.collapsed import CollapsedGP as CollapsedGP
from numpyro_orthgp.diagnostics import check as check
from numpyro_orthgp.diagnostics import khat as khat
from numpyro_orthgp.diagnostics import to_arviz as to_arviz
from numpyro_orthgp.functions.deep import DeepGP as DeepGP
from numpyro_orthgp.functions.function import GPFunction as GPFunction
from numpyro_orthgp.functions.images import patchwise as patchwise
from numpyro_orthgp.functions.images import patchwise_mean as patchwise_mean
from numpyro_orthgp.functions.latent_inputs import LatentInputs as LatentInputs
from numpyro_orthgp.functions.marginals import Marginals as Marginals
from numpyro_orthgp.functions.neighbors import with_neighbors as with_neighbors
from numpyro_orthgp.functions.stacking import stack as stack
from numpyro_orthgp.functions.terms import variance_shares as variance_shares
from numpyro_orthgp.gaussians.natural_gradient import natural_gradient as natural_gradient
from numpyro_orthgp.guides import AutoSparseGP as AutoSparseGP
from numpyro_orthgp.guides import gp_posterior as gp_posterior
from numpyro_orthgp.guides import latent_inputs_posterior as latent_inputs_posterior
from numpyro_orthgp.guides import posterior as posterior
from numpyro_orthgp.inducing import Average as Average
from numpyro_orthgp.inducing import Derivative as Derivative
from numpyro_orthgp.inducing import FourierFeatures as FourierFeatures
from numpyro_orthgp.inducing import InducingPatches as InducingPatches
from numpyro_orthgp.inducing import InducingPoints as InducingPoints
from numpyro_orthgp.inducing import Integral as Integral
from numpyro_orthgp.inducing import MeanOnly as MeanOnly
from numpyro_orthgp.inducing import SphericalHarmonics as SphericalHarmonics
from numpyro_orthgp.inducing import Tasks as Tasks
from numpyro_orthgp.inducing import centred as centred
from numpyro_orthgp.inducing import concatenate as concatenate
from numpyro_orthgp.likelihoods import GaussHermite as GaussHermite
from numpyro_orthgp.likelihoods import Likelihood as Likelihood
from numpyro_orthgp.likelihoods import MonteCarlo as MonteCarlo
from numpyro_orthgp.likelihoods import QuasiMonteCarlo as QuasiMonteCarlo
from numpyro_orthgp.online.latents import InferredLatents as InferredLatents
from numpyro_orthgp.online.latents import infer_latents as infer_latents
from numpyro_orthgp.primitives import gp as gp
from numpyro_orthgp.primitives import latent_inputs as latent_inputs
from numpyro_orthgp.primitives import orthogonal as orthogonal
from numpyro_orthgp.tabular import classification as classification
from numpyro_orthgp.tabular import counts as counts
from numpyro_orthgp.tabular import load as load
from numpyro_orthgp.tabular import regression as regression
from numpyro_orthgp.tabular.inputs import inputs_of as inputs_of
from numpyro_orthgp.training import EarlyStopping as EarlyStopping
from numpyro_orthgp.training import fit as fit
from numpyro_orthgp.training import fit_lbfgs as fit_lbfgs
from numpyro_orthgp.training import lazy_rows as lazy_rows

__version__ = "0.1.0"
