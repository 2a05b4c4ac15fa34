"""Infers latent inputs of new rows for a fitted GP-LVM, and reconstructs their missing entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
from jax import lax, random

from numpyro_orthgp.closures import as_pytree
from numpyro_orthgp.errors import (
    check_finite,
    check_floating,
    check_inputs,
    check_integer,
    is_concrete,
    with_checks,
)
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.sites import refuse_while_fitting
from numpyro_orthgp.inducing import input_dim
from numpyro_orthgp.likelihoods.base import check_observed
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.kept import run_as_one
from numpyro_orthgp.math.quadrature import quasi_normal
from numpyro_orthgp.online.checks import check_function
from numpyro_orthgp.online.noise import as_likelihood, check_likelihood
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["InferredLatents", "infer_latents"]

ROWS_AT_ONCE = 64
BEGIN, END, EARLY = 4, 4, 10  # so many times the starts take a tenth of the steps, and this part of them the others


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InferredLatents:
    """The result of :func:`infer_latents` for n rows.

    :param loc: means of the latent inputs, shape (n, Q).
    :param scale: their standard deviations, shape (n, Q).
    :param elbo: lower bound on the log density of each row's observed entries given the training data, nats, shape (n,).
    :param mean: reconstruction: posterior mean of the functions, averaged over the latent input, shape (n, D).
    :param variance: variance of the reconstruction, from functions and latent input, without noise, shape (n, D).
    """

    loc: Array
    scale: Array
    elbo: Array
    mean: Array
    variance: Array


def infer_latents(
    f: GPFunction,
    y: ArrayLike,
    likelihood: ArrayLike | Callable[[Marginals], dist.Distribution],
    *,
    observed: ArrayLike | None = None,
    covariates: ArrayLike | None = None,
    starts: ArrayLike | None = None,
    num_starts: int = 4,
    num_samples: int = 32,
    num_steps: int = 300,
    learning_rate: float = 0.1,
    rng_key: PRNGKey | None = None,
) -> InferredLatents:
    r"""Infer the latent inputs of new rows from their observed entries. The fitted functions do not change.

    For each row it maximizes, over a Gaussian :math:`q(x) = N(m, \mathrm{diag}(s^2))`,

    .. math:: E_{q(x)} \Big[ \sum_{d\ \text{observed}} E_{q(f_d(x))} \log p(y_d \mid f_d(x)) \Big] - KL[q(x) \,\|\, N(0, I)]

    (Titsias and Lawrence 2010, Sec. 3.3, with a fixed GP posterior). It runs Adam on fixed quasi-random nodes, so the result is
    deterministic. GP-LVMs have many local optima. So of many candidates the best, ``4 num_starts``, take a tenth of the steps, and
    the best quarter of ``num_starts`` among these take the others. The best result is kept.

    The result is one Gaussian. A row that fits at several latent inputs gets the best of these, and ``scale`` says nothing about
    the others. Nor does it see latent inputs far from all training rows, where functions vary so much that any row is possible.

    Later calls with the same numbers of rows, functions and nodes do not compile again. A likelihood is traced in each call, and
    compiled if its operations are new.

    :param f: the D fitted functions, :func:`posterior` of the model.
    :param y: new rows, shape (n, D), minus the prior mean if the model has one. Missing entries may be NaN.
    :param likelihood: for Gaussian outputs the noise's standard deviation, shape () or (D,); otherwise a function from marginals to
        a likelihood, such as ``lambda m: likelihoods.Poisson(m)``.
    :param observed: True where an entry is observed, shape (n, D); by default where y is not NaN.
    :param covariates: observed inputs in addition to the latent ones, shape (n, C).
    :param starts: candidates for the means besides draws from the prior, shape (K, Q). Means of the training data are good ones.
    :param num_starts: number of candidates to optimize for each row; their steps cost no more than if all took all of them.
    :param num_samples: number of nodes for the expectation over x.
    :param num_steps: number of Adam steps.
    :param learning_rate: initial step size of Adam. It decays along a cosine.
    :param rng_key: key for nodes and candidates; default ``jax.random.key(0)``.
    :raises ValueError: for wrong shapes, a row without observed entries, entries outside of the likelihood's support (also NaN that
        counts as observed), noise or a number that is not positive, or a function that a guide is fitting, within its model.
    :raises TypeError: for integer latent dimensions or a function without inducing points.
    """
    check_function("infer_latents", f)
    refuse_while_fitting("infer_latents", f.fitting)
    y, observed = _check_rows(y, observed, f.num_latents)
    dim, fixed = _check_covariates(f, covariates, len(y))
    dtype = f.features[0].dtype
    for name, number in (("num_starts", num_starts), ("num_samples", num_samples), ("num_steps", num_steps)):
        check_integer(name, number)
    make = as_likelihood(likelihood, dtype)
    given = np.zeros((0, dim), dtype) if starts is None else check_inputs("starts", starts, dim).astype(dtype)
    sizes = _Sizes(num_starts, num_samples, num_steps, float(learning_rate))
    parts = (f, random.key(0) if rng_key is None else rng_key, given, y, observed, fixed)
    if callable(likelihood):  # it may depend on what has changed since the last call, so it is traced again
        return run_as_one(partial(_infer, sizes), as_pytree(make), *parts)
    result, waiting = _infer_compiled(sizes, make, *parts)
    waiting.inspect()
    return result


def _with_moments_of_normal(nodes: Array) -> Array:
    """Nodes (S, Q) with mean zero and variance one in each dimension. Without this, 32 nodes move means by a tenth of a scale."""
    if len(nodes) == 1:
        return nodes
    centred = nodes - nodes.mean(0)
    return centred / jnp.sqrt(jnp.mean(centred**2, 0))


def _check_support(make: Callable[[Marginals], dist.Distribution], y: Array, observed: Array) -> None:
    zeros = jnp.zeros_like(y)
    fn = make(Marginals(zeros, zeros + 1, zeros))
    check_likelihood(fn)
    if fn.batch_shape == y.shape:
        check_observed("y", fn.mask(observed), y)


class _Sizes(NamedTuple):
    """What a program of :func:`infer_latents` is made for; see there."""

    num_starts: int
    num_samples: int
    num_steps: int
    learning_rate: float


class _Row(NamedTuple):
    """The problem of one row: y (D,), observed (D,), covariates (C,)."""

    f: GPFunction
    likelihood: Callable[[Marginals], dist.Distribution]
    nodes: Array
    candidates: Array
    sizes: _Sizes

    def infer(self, y: Array, observed: Array, fixed: Array) -> InferredLatents:
        # An observed entry replaces missing ones, so that every density and its gradient are finite.
        y = jnp.where(observed, y, y[jnp.argmax(observed)])
        fit = self._log_densities(self.candidates, y, observed, fixed) - jnp.sum(self.candidates**2, -1) / 2
        loc = self.candidates[lax.top_k(fit, BEGIN * self.sizes.num_starts)[1]]
        params: Any = (loc, jnp.full_like(loc, jnp.log(0.3)))
        optimizer = optax.adam(optax.cosine_decay_schedule(self.sizes.learning_rate, self.sizes.num_steps))

        def bounds(params: Any) -> Array:
            return self._elbo(params[0], params[1], y, observed, fixed)

        def step(state: Any, _: None) -> tuple[Any, None]:
            params, memory = state
            updates, memory = optimizer.update(jax.grad(lambda p: -jnp.sum(bounds(p)))(params), memory, params)
            return (optax.apply_updates(params, updates), memory), None

        first = self.sizes.num_steps // EARLY
        state = lax.scan(step, (params, optimizer.init(params)), None, length=first)[0]
        elbo = bounds(state[0])
        kept = lax.top_k(jnp.where(jnp.isfinite(elbo), elbo, -jnp.inf), -(-self.sizes.num_starts // END))[1]
        state = jax.tree.map(lambda leaf: leaf[kept] if leaf.ndim else leaf, state)  # but for the number of steps
        params = lax.scan(step, state, None, length=self.sizes.num_steps - first)[0][0]
        elbo = bounds(params)
        best = jnp.argmax(jnp.where(jnp.isfinite(elbo), elbo, -jnp.inf))
        loc, scale = params[0][best], jnp.exp(params[1][best])
        marginals = self._functions(loc + scale * self.nodes, fixed)
        mean = marginals.mean.mean(0)
        variance = marginals.variance.mean(0) + marginals.mean.var(0)
        return InferredLatents(loc, scale, elbo[best], mean, variance)

    def _elbo(self, loc: Array, log_scale: Array, y: Array, observed: Array, fixed: Array) -> Array:
        """The bound of each of K Gaussians, shape (K,)."""
        scale = jnp.exp(log_scale)
        x = loc + scale * self.nodes[:, None]  # (S, K, Q)
        fit = self._log_densities(x.reshape(-1, x.shape[-1]), y, observed, fixed).reshape(x.shape[:2]).mean(0)
        return fit - jnp.sum(loc**2 + scale**2 - 1 - 2 * log_scale, -1) / 2

    def _log_densities(self, x: Array, y: Array, observed: Array, fixed: Array) -> Array:
        """Expected log densities of the observed entries at latent inputs (n, Q), shape (n,)."""
        likelihood = self.likelihood(self._functions(x, fixed))
        if likelihood.batch_shape != (len(x), *y.shape):
            raise ValueError(
                "`likelihood` must have a density for each entry of y, so that missing ones can be left out: batch shape "
                f"{(len(x), *y.shape)} here; got {likelihood.batch_shape}. Leave out `.to_event(1)`."
            )
        log_density = likelihood.log_prob(jnp.broadcast_to(y, (len(x), *y.shape)))
        return jnp.sum(jnp.where(observed, log_density, 0), -1)

    def _functions(self, x: Array, fixed: Array) -> Marginals:
        return self.f(jnp.concatenate([x, jnp.broadcast_to(fixed, (len(x), len(fixed)))], -1))


def _infer(
    sizes: _Sizes, make: Any, f: GPFunction, rng_key: PRNGKey, given: Array, y: Array, observed: Array, fixed: Array
) -> InferredLatents:
    """Latent inputs of all rows.

    :param given: candidates besides draws from the prior, shape (K, Q).
    """
    _check_support(make, y, observed)
    node_key, start_key = random.split(rng_key)
    nodes = _with_moments_of_normal(quasi_normal(node_key, sizes.num_samples, (), given.shape[1], given.dtype))
    candidates = random.normal(start_key, (8 * sizes.num_starts, given.shape[1]), given.dtype)
    row = _Row(f, make, nodes, jnp.concatenate([given, candidates]), sizes)
    return lax.map(lambda part: row.infer(*part), (y, observed, fixed), batch_size=ROWS_AT_ONCE)


_infer_compiled = jax.jit(with_checks(_infer), static_argnums=0)


def _check_rows(y: ArrayLike, observed: ArrayLike | None, num_latents: int | None) -> tuple[Array, Array]:
    y = check_floating("y", y)
    if num_latents is None:
        raise ValueError("`f` must be the D functions of a GP-LVM (num_latents = D); got a single function.")
    if y.ndim != 2 or y.shape[1] != num_latents:
        raise ValueError(f"`y` must have shape (n, {num_latents}), one column per function; got {y.shape}.")
    mask = _are_numbers(y) if observed is None else jnp.asarray(observed)
    if mask.dtype != bool or mask.shape != y.shape:
        raise ValueError(
            f"`observed` must be boolean of the shape {y.shape} of y; got {mask.dtype} of shape {mask.shape}."
        )
    check_finite("y[observed]", _seen(mask, y))
    if is_concrete(mask) and not np.asarray(mask).any(-1).all():
        empty = int(np.argmin(np.asarray(mask).any(-1)))
        raise ValueError(f"Each row of `y` must have at least one observed entry; row {empty} has none.")
    return y, mask


@one_program
def _are_numbers(y: Array) -> Array:
    return ~jnp.isnan(y)


@one_program
def _seen(mask: Array, y: Array) -> Array:
    return jnp.where(mask, y, 0)


def _check_covariates(f: GPFunction, covariates: ArrayLike | None, num: int) -> tuple[int, Array | np.ndarray]:
    """The number of latent dimensions, and the covariates, shape (n, C), with C = 0 if there are none."""
    total, dtype = input_dim(f.features), f.features[0].dtype
    if total is None:
        raise TypeError("`f` must have inducing points, which show how many latent dimensions there are.")
    if covariates is None:
        return total, np.zeros((num, 0), dtype)
    fixed = check_inputs("covariates", covariates)
    if fixed.shape[0] != num or not fixed.shape[1] < total:
        raise ValueError(
            f"`covariates` must have shape ({num}, C) with C < {total}, the function's input dimensions; got {fixed.shape}."
        )
    return total - fixed.shape[1], fixed.astype(dtype)
