"""The variational distribution q: families of Gaussians over whitened inducing variables, their distributions and parameters.

- ``family``: the interface of a family, and the families with full, diagonal, prior and zero covariance.
- ``checks``: what a user's family makes.
- ``low_rank``: the family for many inducing variables, if data determine few directions.
- ``distributions``: q and the prior as NumPyro distributions, and the KL divergence between them.
- ``constraints``: how parameters of q are stored during optimization.
- ``natural_step``, ``natural_gradient``: natural gradient steps, and the optimizer that takes them.
"""

from numpyro_orthgp.gaussians.family import Diagonal, Full, Shifted, Value, Whitened
from numpyro_orthgp.gaussians.low_rank import LowRank

__all__ = ["FAMILIES", "Diagonal", "Full", "LowRank", "Shifted", "Value", "Whitened"]

#: The families with a name, for ``covariance=``.
FAMILIES = {family.name: family for family in (Full, Diagonal, Shifted, LowRank)}
