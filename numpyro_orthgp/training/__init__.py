"""Training of any NumPyro ``SVI``, by the loop :func:`fit` or by :func:`fit_lbfgs`. Nothing here depends on Gaussian processes.

``batches`` chooses the rows of a step, in the orders of ``orders`` and ``groups``. ``columns`` contains arrays that are read in
slices, ``sparse`` matrices, ``streams`` loaders that provide batches, and ``local`` combines rows of several processes. ``devices``
places rows on devices, and ``layout`` parameters. ``steps`` compiles many steps to one program, and ``plan`` chooses the number of
steps per call. ``stopping`` tracks the best state, and ``checkpoint`` stores what a run needs to continue after a crash. ``run``
combines these, and ``loop`` checks the user's arguments. ``objective`` is the loss of all data as a function of one vector, and
``lbfgs`` minimizes it. ``lazy_rows`` is an optimizer that updates only the batch's rows of ``tables``.
"""

from numpyro_orthgp.training.columns import columns as columns
from numpyro_orthgp.training.lazy_rows import lazy_rows as lazy_rows
from numpyro_orthgp.training.lbfgs import fit_lbfgs as fit_lbfgs
from numpyro_orthgp.training.local import Local as Local
from numpyro_orthgp.training.loop import fit as fit
from numpyro_orthgp.training.orders import Blocks as Blocks
from numpyro_orthgp.training.result import FitResult as FitResult
from numpyro_orthgp.training.result import Progress as Progress
from numpyro_orthgp.training.stopping import EarlyStopping as EarlyStopping
from numpyro_orthgp.training.streams import Source as Source
from numpyro_orthgp.training.streams import Stream as Stream

__all__ = [
    "Blocks",
    "EarlyStopping",
    "FitResult",
    "Local",
    "Progress",
    "Source",
    "Stream",
    "columns",
    "fit",
    "fit_lbfgs",
    "lazy_rows",
]
