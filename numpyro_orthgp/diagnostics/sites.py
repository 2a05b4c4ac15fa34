r"""What one run of a model says, its latent sites being values: no Gaussian of a guide is handed over.

So ``gp`` sees inducing variables that are known, and what f(x) still varies by is its residual. A likelihood integrates that
out inside the logarithm,

.. math:: \log p(y_i \mid u, \theta) = \log \int p(y_i \mid f_i) \, p(f_i \mid u, \theta) \, df_i,

where its ``log_prob``, made for bounds, has the average outside.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_orthgp.diagnostics.draws import density
from numpyro_orthgp.diagnostics.layout import Trace, is_marginals, is_missing_output
from numpyro_orthgp.likelihoods.base import is_expected, log_predictive
from numpyro_orthgp.marginals import MAX_JOINT_DRAW
from numpyro_orthgp.process import GPFunction
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["function_draw", "log_joint", "mask_of", "predictive_draw"]


def log_joint(sites: Trace) -> Array:
    """log p(draw) + sum_i log p(y_i | draw), missing outputs integrated out."""
    terms = [
        density(site, log_predictive if site["is_observed"] else None)
        for name, site in sites.items()
        if site["type"] == "sample" and not is_missing_output(name, site, sites)
    ]
    return sum((jnp.sum(term) for term in terms), start=jnp.zeros(()))


def mask_of(fn: Any) -> Any:
    """The mask of a site's distribution, shape of the batch; ``None`` without one."""
    mask = None
    while isinstance(fn, dist.MaskedDistribution):
        mask = fn._mask if mask is None else mask & fn._mask
        shape, fn = fn.batch_shape, fn.base_dist
    return None if mask is None else jnp.broadcast_to(jnp.asarray(mask), shape)


def predictive_draw(fn: Any, rng_key: PRNGKey) -> Array:
    """A draw of an output."""

    def limited(m: Any) -> Any:
        return m.independent() if is_marginals(m) and m.shape[0] > MAX_JOINT_DRAW else m

    return jax.tree.map(limited, fn, is_leaf=is_marginals).sample(rng_key) if is_expected(fn) else fn.sample(rng_key)


def function_draw(f: GPFunction, X: Array, rng_key: PRNGKey) -> Array:
    """f(X), as one function up to ``MAX_JOINT_DRAW`` inputs, beyond point by point."""
    m = f(X)
    return (m if len(X) <= MAX_JOINT_DRAW else m.independent()).draw(rng_key)
