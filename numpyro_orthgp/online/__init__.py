"""Growing a fit: new data, more inducing points or fewer, without the data of the past.

- :func:`condition`: a fitted function given new data, whose inputs become inducing points (online variational conditioning).
- :func:`remember`: what a fitted function knows, as a factor in the model of new data (the streaming bound).
- :func:`compress`: a fitted function seen through other inducing variables.
- :func:`divergences`, :func:`drop_sets`: what each set does, and a function without those that do nothing.
- :func:`start_from`: a function as parameters to begin a fit from.

To *add* points to a fit nothing is needed: a new orthogonal set begins at its prior, which leaves the posterior as it is. Give
``SVI.init(..., init_params=old_params)`` to a model with one more set.
"""

from numpyro_orthgp.online.condition import condition
from numpyro_orthgp.online.memory import remember
from numpyro_orthgp.online.sets import compress, divergences, drop_sets, start_from

__all__ = ["compress", "condition", "divergences", "drop_sets", "remember", "start_from"]
