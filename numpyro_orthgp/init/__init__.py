"""Initial values: inducing points, latent inputs, lengthscales and mean functions.

These functions run once, before training. They take and return arrays; nothing is differentiated.
"""

from numpyro_orthgp.init.clusters import kmeans
from numpyro_orthgp.init.directions import linear_mean, pca
from numpyro_orthgp.init.groups import groups
from numpyro_orthgp.init.scales import median_lengthscale
from numpyro_orthgp.init.variance import greedy_variance

__all__ = ["greedy_variance", "groups", "kmeans", "linear_mean", "median_lengthscale", "pca"]
