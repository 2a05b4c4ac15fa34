r"""The streaming bound: adds a fitted function's knowledge to the model of new data, as a factor.

Bui, Nguyen, Turner 2017 ("Streaming sparse Gaussian process approximations"): the ratio :math:`q_{old}(a) / p_{old}(a)` of old
posterior and old prior at the old inducing variables a replaces the past data. The bound for new data gains the term

.. math:: E_{q(f)}\left[\log \frac{q_{old}(a)}{p_{old}(a)}\right]
    = \sum_i E_{q(f)}\left[\log \frac{N(e_i; m_i, S_i)}{N(e_i; 0, I)}\right],

where :math:`e_i` are the old function's whitened variables. They are linear in the new function's values at the old inducing
variables. So this works for any number and kind of sets, kernel and inducing points may change, and only the factors of
:math:`S_i` are inverted.

In these variables the ratio q / p of each set is that of N(m, S) and N(0, I). No difference of precisions, which may not be
positive definite, is inverted. A tightened gp raises an error: the spherical argument would have to count the old inducing
variables as points, and the argument for Gaussian noise does not hold off the diagonal.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpyro

from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.projection import project
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.online.checks import check_function, check_gaussians
from numpyro_orthgp.online.moments import moments_at, noise_of, split
from numpyro_orthgp.types import Array

__all__ = ["log_ratio", "remember"]


def remember(name: str, f: GPFunction, past: GPFunction) -> Array:
    """Add to the model what another function learned from data that are no longer available.

    ::

        past = ogp.posterior(model, guide, params, X_old)["f"]  # after the old data

        def model(X, y, *, Z):
            f = gp("f", kernel, Z)       # other points, other hyperparameters
            remember("f_past", f, past)  # outside of plates
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", likelihoods.Bernoulli(f(X)), obs=y)

    >>> import jax.numpy as jnp, numpyro
    >>> from numpyro_orthgp import AutoSparseGP, CollapsedGP, gp, kernels, online
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> past = CollapsedGP(kernels.RBF(0.3), X, X[::10], 0.1).posterior(jnp.sin(6 * X[:, 0]))
    >>> def model():
    ...     f = gp("f", kernels.RBF(0.3), X[::10])
    ...     return online.remember("f_past", f, past)
    >>> with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as sites:
    ...     log_ratio = model()
    >>> list(sites), log_ratio.shape
    (['f.u0', 'f_past'], ())

    :param name: name of the factor site.
    :param f: the model's function.
    :param past: result of :func:`~numpyro_orthgp.posterior` for the old data. Hyperparameters and inducing points may differ.
    :return: the factor's logarithm, shape ().
    :raises TypeError: if ``past`` is no function of one gp, or of another dtype.
    :raises ValueError: if ``past`` has values (an MCMC draw, conditioned or not), mean-only points or another number of latent
        functions; if the guide tightens ``f``, since the bound is not known then.
    """
    check_function("remember", f)
    check_function("remember", past, "past")
    if f.num_latents != past.num_latents:
        raise ValueError(
            f"`past` must have as many latent functions as the model's function, {f.num_latents}; got {past.num_latents}."
        )
    own, other = f.features[0].dtype, past.features[0].dtype
    if own != other:
        raise TypeError(
            f"`past` is {other} and the model's function {own}, and nothing is cast silently. Fit both in one dtype, or convert: "
            f"jax.tree.map(lambda a: a.astype(jnp.{own}), past)."
        )
    check_gaussians("`remember`", past)
    if past.shift is not None:
        raise ValueError("`past` must not have MeanOnly points, whose part of the mean no inducing variable holds.")
    if f.residual_scale is not None:
        raise ValueError(
            "The streaming bound is not known with residual='tight'; give this gp residual='prior' in the guide."
        )
    value = log_ratio(f, past)
    numpyro.factor(name, value)
    return value


def log_ratio(f: GPFunction, past: GPFunction) -> Array:
    """E_q(f)[log q_old(a) / p_old(a)], shape ()."""
    mean, covariance = moments_at(f, past.features)
    # The old variables have independent noise: their jitter.
    noise = noise_of(past.blocks, past.features)
    covariance = covariance + noise[..., None] * jnp.eye(noise.shape[-1], dtype=covariance.dtype)
    means = [m[..., 0] for m in project(past.blocks, split(mean[..., None], past.features, -2))]
    half = project(past.blocks, split(covariance, past.features, -2))
    total = jnp.zeros((), covariance.dtype)
    for i, q in enumerate(past.beliefs):
        other = project(past.blocks[: i + 1], split(jnp.swapaxes(half[i], -1, -2), past.features, -2)[: i + 1])
        total = total + jnp.sum(_expected_log_ratio(q, means[i], other[i]))
    return total


def _expected_log_ratio(q: Whitened, mean: Array, covariance: Array) -> Array:
    """E[log q(e) - log N(e; 0, I)] for e with the given moments, shape (...)."""
    centred, trace = mean - q.loc, jnp.trace(covariance, axis1=-2, axis2=-1)
    prior = jnp.sum(mean**2, -1) + trace
    second = covariance + centred[..., :, None] * centred[..., None, :]
    half = q.standardized(second)
    own = jnp.trace(q.standardized(jnp.swapaxes(half, -1, -2)), axis1=-2, axis2=-1)
    return (prior - own) / 2 - q.half_log_det()
