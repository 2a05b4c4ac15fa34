"""Updates a fit with new data, or with more or fewer inducing points, without the past data.

- :func:`condition`: condition a fitted function on new data. Their inputs become inducing points (online variational conditioning).
- :func:`from_blocks`: the function given data that do not fit in memory, block by block, with known hyperparameters.
- :func:`remember`: add a fitted function's knowledge to the model of new data, as a factor (the streaming bound).
- :func:`compress`: replace the inducing variables of a fitted function.
- :func:`divergences`, :func:`drop_sets`: the KL divergence of each set, and a function without the sets that do nothing.
- :func:`start_from`: convert a function to initial parameters of a fit.

To *add* points to a fit, give the model one more orthogonal set and use ``SVI.init(..., init_params=old_params)``. The new set
starts at its prior, which does not change the posterior.
"""

from numpyro_orthgp.collapsed.blocks import from_blocks
from numpyro_orthgp.online.condition import condition
from numpyro_orthgp.online.memory import remember
from numpyro_orthgp.online.sets import compress, divergences, drop_sets, start_from

__all__ = ["compress", "condition", "divergences", "drop_sets", "from_blocks", "remember", "start_from"]
