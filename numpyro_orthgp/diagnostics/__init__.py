"""What a fit is worth: its draws for ArviZ, and whether q is close to the posterior."""

from numpyro_orthgp.diagnostics.convert import to_arviz
from numpyro_orthgp.diagnostics.importance import ParetoK, khat

__all__ = ["ParetoK", "khat", "to_arviz"]
