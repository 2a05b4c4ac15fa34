"""What a fit is worth: its draws for ArviZ, whether q is close to the posterior, and a page that sums it up.

All of it runs the model again at draws of a guide or of MCMC (``replay``) or at the fit (``subject``), and looks at what the model
makes of them (``sites``, ``layout``). ``check`` measures (``health``, ``outputs``, ``scales``, ``calibration``, ``comparison``,
``convergence``, ``integration``); ``advice`` judges.
"""

from numpyro_orthgp.diagnostics.check import check
from numpyro_orthgp.diagnostics.convert import to_arviz
from numpyro_orthgp.diagnostics.importance import ParetoK, khat
from numpyro_orthgp.diagnostics.of_fits import MOST_ROWS as MOST_ROWS  # which lets results of `fit` answer
from numpyro_orthgp.diagnostics.report import Report

__all__ = ["ParetoK", "Report", "check", "khat", "to_arviz"]
