"""Training of any NumPyro ``SVI``, by the loop :func:`fit` or by :func:`fit_lbfgs`: it knows nothing of Gaussian processes.

``batches`` says which rows a step sees, in the orders of ``orders``; ``columns`` are arrays of which slices are read, and
``streams`` loaders that give batches themselves; ``local`` puts together the rows of several processes. ``devices`` says where
rows are put, ``steps`` makes many steps one program, ``kept`` keeps it, ``plan`` says how many of them are taken at once,
``stopping`` what was best so far, ``checkpoint`` what a run needs to go on after a crash; ``run`` puts these together and ``loop``
checks what the user handed in. ``objective`` is the loss of all the data as a function of one vector, and ``lbfgs`` finds its
least value. ``lazy_rows`` is an optimizer whose steps see rows of ``tables`` only.
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
