"""Likelihoods: NumPyro distributions over y that integrate the latent function out.

====================================== ================================= ==========================================
likelihood                             E[log p(y given f)]               log E[p(y given f)]
====================================== ================================= ==========================================
Gaussian                               closed, with the best tightening  closed
HeteroskedasticGaussian                "exp": closed; "softplus": 1-D    one dimension
Laplace, AsymmetricLaplace             closed                            closed
StudentT                               a shifted line of integration     integrated
Beta                                   integrated                        integrated
Bernoulli                              "logit", and "cloglog" at 0:      "probit": closed
                                       closed
Binomial                               "logit": closed                   integrated
Poisson                                "exp": closed                     integrated
NegativeBinomial                       "exp": closed                     integrated
ZeroInflated                           y > 0: as what it wraps           integrated
Exponential, Weibull                   closed, censored or not           integrated
Gamma                                  closed; censored: integrated      integrated
LogNormal                              closed; censored: integrated      closed, censored or not
Ordinal                                "logit": closed                   "probit": closed
Categorical                            "softmax": quasi-Monte Carlo, two the same
                                       classes closed; "robustmax": one
                                       dimension
Transformed                            as what it wraps                  as what it wraps
Likelihood                             integrated                        integrated
PoissonOfSum, NegativeBinomialOfSum,   quasi-Monte Carlo in each area,   quasi-Monte Carlo in each area
BinomialOfAverage                      or a bound
Mixture                                log of an average over draws      log of an average over draws
====================================== ================================= ==========================================

"Closed" for a logistic link means to twelve digits (``likelihoods/softplus.py``). "Integrated" means 24 nodes, dense where the log
density bends, so that a q that is many times as wide as the likelihood's own scale loses no digits that matter: for a q thirty
times as wide errors are below 1e-4 of the value. ``Likelihood``, whose bends are not known, has 20 Gauss-Hermite nodes for each
latent function that a point mixes, which are off by some per cent there. Predictive densities with one latent function
use 129 nodes around each peak of p(y | f) q(f), which may be narrow; so does HeteroskedasticGaussian, in its noise level. With two
functions they use such nodes on 65 lines of either direction, where Gauss-Hermite rules do not agree.
"robustmax" uses 112 nodes around its step. ``integrator`` replaces these defaults. The report of :func:`numpyro_orthgp.check`
shows the integration error of a fit, in nats per point.
"""

from numpyro_orthgp.likelihoods.areas import BinomialOfAverage as BinomialOfAverage
from numpyro_orthgp.likelihoods.areas import NegativeBinomialOfSum as NegativeBinomialOfSum
from numpyro_orthgp.likelihoods.areas import PoissonOfSum as PoissonOfSum
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood as ExpectedLikelihood
from numpyro_orthgp.likelihoods.base import GaussHermite as GaussHermite
from numpyro_orthgp.likelihoods.base import MonteCarlo as MonteCarlo
from numpyro_orthgp.likelihoods.base import QuasiMonteCarlo as QuasiMonteCarlo
from numpyro_orthgp.likelihoods.classes import Categorical as Categorical
from numpyro_orthgp.likelihoods.classes import Ordinal as Ordinal
from numpyro_orthgp.likelihoods.continuous import AsymmetricLaplace as AsymmetricLaplace
from numpyro_orthgp.likelihoods.continuous import Beta as Beta
from numpyro_orthgp.likelihoods.continuous import Laplace as Laplace
from numpyro_orthgp.likelihoods.continuous import StudentT as StudentT
from numpyro_orthgp.likelihoods.counts import NegativeBinomial as NegativeBinomial
from numpyro_orthgp.likelihoods.counts import Poisson as Poisson
from numpyro_orthgp.likelihoods.counts import ZeroInflated as ZeroInflated
from numpyro_orthgp.likelihoods.gaussian import Gaussian as Gaussian
from numpyro_orthgp.likelihoods.gaussian import HeteroskedasticGaussian as HeteroskedasticGaussian
from numpyro_orthgp.likelihoods.gaussian import Quadratic as Quadratic
from numpyro_orthgp.likelihoods.general import Likelihood as Likelihood
from numpyro_orthgp.likelihoods.mixture import Mixture as Mixture
from numpyro_orthgp.likelihoods.stacked import Stacked as Stacked
from numpyro_orthgp.likelihoods.survival import Exponential as Exponential
from numpyro_orthgp.likelihoods.survival import Gamma as Gamma
from numpyro_orthgp.likelihoods.survival import LogNormal as LogNormal
from numpyro_orthgp.likelihoods.survival import Weibull as Weibull
from numpyro_orthgp.likelihoods.transformed import Transformed as Transformed
from numpyro_orthgp.likelihoods.trials import Bernoulli as Bernoulli
from numpyro_orthgp.likelihoods.trials import Binomial as Binomial
