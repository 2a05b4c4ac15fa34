"""The training loop :func:`fit`, for any NumPyro ``SVI``: it knows nothing of Gaussian processes.

``batches`` says which rows a step sees, ``devices`` where they are put, ``steps`` makes many steps one program, ``kept`` keeps it,
``plan`` says how many of them are taken at once, ``stopping`` what was best so far, ``checkpoint`` what a run needs to go on after
a crash; ``run`` puts these together and ``loop`` checks what the user handed in.
"""

from numpyro_orthgp.training.loop import fit as fit
from numpyro_orthgp.training.result import FitResult as FitResult
from numpyro_orthgp.training.result import Progress as Progress
from numpyro_orthgp.training.stopping import EarlyStopping as EarlyStopping

__all__ = ["EarlyStopping", "FitResult", "Progress", "fit"]
