"""Pictures of fitted models. Needs matplotlib, the extra ``plots``.

Each function draws on the axes ``ax``, by default those of a new figure, and returns them. It sets their labels and limits, but no
title and no global settings. A colour bar takes its room from these axes.
"""

from numpyro_orthgp.plots.curves import function
from numpyro_orthgp.plots.latents import latent_space, relevance
from numpyro_orthgp.plots.pit import calibration
from numpyro_orthgp.plots.points import inducing
from numpyro_orthgp.plots.residuals import residual
from numpyro_orthgp.plots.surfaces import surface
from numpyro_orthgp.plots.terms import terms
from numpyro_orthgp.plots.traces import elbo

__all__ = ["calibration", "elbo", "function", "inducing", "latent_space", "relevance", "residual", "surface", "terms"]
