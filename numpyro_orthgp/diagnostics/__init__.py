"""Diagnostics of a fit: ``check`` prints a page, ``khat`` says how close q is to the posterior, ``to_arviz`` exports draws.

Each runs the model again, at draws of a guide or of MCMC (``replay``) or at the fit (``subject``), and reads the sites of that run
(``sites``, ``layout``). ``check`` measures (``health``, ``outputs``, ``scales``, ``calibration``, ``comparison``, ``convergence``,
``integration``, ``plugged``). ``advice`` turns the measurements into sentences.
"""

from numpyro_orthgp.diagnostics.check import check
from numpyro_orthgp.diagnostics.convert import to_arviz
from numpyro_orthgp.diagnostics.importance import ParetoK, khat
from numpyro_orthgp.diagnostics.of_fits import MOST_ROWS as MOST_ROWS  # which lets results of `fit` answer
from numpyro_orthgp.diagnostics.report import Report

__all__ = ["ParetoK", "Report", "check", "khat", "to_arviz"]
