r"""Densities and draws of the sites of one run of a model, given values of its latent sites.

``gp`` gets values of the inducing variables, no Gaussian, so the only variance of f(x) is its residual. Here a likelihood
integrates f out inside the logarithm,

.. math:: \log p(y_i \mid u, \theta) = \log \int p(y_i \mid f_i) \, p(f_i \mid u, \theta) \, df_i,

while ``log_prob``, made for bounds, averages the logarithm.

``log_likelihood`` and ``lp`` use this logarithm of an average, ``log_predictive``: leave-one-out needs the density of an
observation, and ``log_prob`` under a guide is only a lower bound of it. Residuals of different points count as independent given
u, as in FITC's model. Their joint density would need an N x N Cholesky factor for each draw.
"""

from __future__ import annotations

from collections.abc import Container
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_orthgp.diagnostics.draws import density
from numpyro_orthgp.diagnostics.layout import Trace, is_marginals
from numpyro_orthgp.functions.draws import MAX_JOINT_DRAW
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.inducing.rows import Rows
from numpyro_orthgp.likelihoods import Categorical, Likelihood
from numpyro_orthgp.likelihoods.base import is_expected, log_predictive, unwrap
from numpyro_orthgp.likelihoods.mixture import Mixture
from numpyro_orthgp.likelihoods.stacked import Stacked
from numpyro_orthgp.likelihoods.survival import SurvivalLikelihood
from numpyro_orthgp.likelihoods.transformed import Transformed
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["are_classes", "censored_of", "function_draw", "log_joint", "mask_of", "predictive_draw"]


def log_joint(sites: Trace, hidden: Container[str]) -> Array:
    """log p(draw) + sum_i log p(y_i | draw), with missing outputs (``hidden``) integrated out."""
    terms = [
        density(site, log_predictive if site["is_observed"] else None)
        for name, site in sites.items()
        if site["type"] == "sample" and name not in hidden
    ]
    return sum((jnp.sum(term) for term in terms), start=jnp.zeros(()))


def mask_of(fn: Any) -> Array | None:
    """Which entries of a site's value count, shape of the value; ``None`` without a mask.

    A mask beneath ``to_event`` hides single entries; a mask outside of it hides whole events.
    """
    masks, shape = [], fn.shape()
    while isinstance(fn, (dist.MaskedDistribution, dist.Independent, dist.ExpandedDistribution)):
        if isinstance(fn, dist.MaskedDistribution):
            own = jnp.asarray(fn._mask)
            masks.append(own.reshape(own.shape + (1,) * fn.event_dim))
        fn = fn.base_dist
    if isinstance(fn, Mixture) and (of_draws := mask_of(fn.components)) is not None:
        masks.append(of_draws[:: fn.num_samples])  # all draws of a point have its mask
    return jnp.broadcast_to(reduce(jnp.logical_and, masks), shape) if masks else None


def censored_of(fn: Any) -> Array | None:
    """Which entries of a site's value are censored times, shape of the value; ``None`` if there are none."""
    likelihood, _ = unwrap(fn)
    censored: Array | None = None
    if isinstance(likelihood, SurvivalLikelihood | Transformed):
        censored = likelihood.censored
    elif isinstance(likelihood, Mixture):
        censored = censored_of(likelihood.components)
        censored = None if censored is None else censored[:: likelihood.num_samples]
    elif isinstance(likelihood, Stacked):
        censored = jax.vmap(censored_of)(likelihood.steps)
    return None if censored is None else jnp.broadcast_to(censored, fn.shape())


def are_classes(fn: Any) -> bool:
    """Whether a site's values are labels of classes, which have no order."""
    likelihood, _ = unwrap(fn)
    if isinstance(likelihood, Stacked):
        return are_classes(jax.tree.map(lambda leaf: leaf[0], likelihood.steps))
    if isinstance(likelihood, Mixture):
        return are_classes(likelihood.components)
    if isinstance(likelihood, Likelihood):
        likelihood, _ = unwrap(likelihood.conditional(likelihood.marginals.mean))
    ordered = isinstance(likelihood, dist.OrderedLogistic)
    return isinstance(likelihood, Categorical | dist.CategoricalProbs | dist.CategoricalLogits) and not ordered


def predictive_draw(fn: Any, rng_key: PRNGKey) -> Array:
    """A draw of an output."""

    def limited(m: Any) -> Any:
        return m.independent() if is_marginals(m) and m.shape[0] > MAX_JOINT_DRAW else m

    def whole(leaf: Any) -> bool:
        return is_marginals(leaf) or getattr(leaf, "sees_several", False)

    return jax.tree.map(limited, fn, is_leaf=whole).sample(rng_key) if is_expected(fn) else fn.sample(rng_key)


def function_draw(f: GPFunction, X: Rows, rng_key: PRNGKey) -> Array:
    """A draw of f(X): one function up to ``MAX_JOINT_DRAW`` inputs, beyond that each point on its own."""
    m = f(X)
    return (m if len(X) <= MAX_JOINT_DRAW else m.independent())._draw(rng_key)
