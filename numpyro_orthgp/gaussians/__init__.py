"""What q is: the families of Gaussians over whitened inducing variables, as mathematics, as distributions, as parameters.

- ``family``: what the package asks of a family, and the families with a covariance that is full, diagonal, the prior's or zero.
- ``low_rank``: the one for many inducing variables of which data determine few directions.
- ``distributions``: q and the prior as NumPyro distributions, and the divergence between them.
- ``constraints``: how the parameters of q are stored while they are optimized.
- ``natural_step``, ``natural_gradient``: steps along the natural gradient, and the optimizer that takes them.
"""

from numpyro_orthgp.gaussians.family import Diagonal, Full, Shifted, Value, Whitened
from numpyro_orthgp.gaussians.low_rank import LowRank

__all__ = ["FAMILIES", "Diagonal", "Full", "LowRank", "Shifted", "Value", "Whitened"]

#: Those that have a name, for ``covariance=``.
FAMILIES = {family.name: family for family in (Full, Diagonal, Shifted, LowRank)}
