"""What every likelihood is: a NumPyro distribution over y whose log density is an expectation over the latent function.

To add one, subclass :class:`ExpectedLikelihood`, say which NumPyro distribution y has given f (``conditional``), and, if
there is a closed form, what its expectation is (``expected_log_density``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from numpyro_orthgp.errors import check_key, inspect
from numpyro_orthgp.functions.expected import AveragedMarginals
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.sites import prng_key
from numpyro_orthgp.likelihoods.checks import POSITIVE, Allowed, check_allowed, check_broadcasts, moment_of, real
from numpyro_orthgp.likelihoods.integrators import (
    FOR_PREDICTIONS,
    GaussHermite,
    Integrator,
    MonteCarlo,
    QuasiMonteCarlo,
    by_blocks,
    expectation,
    log_expectation,
)
from numpyro_orthgp.likelihoods.masks import ToldOfMasks, refuse_groups
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.quadrature import log_normal_expectation
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = [
    "ExpectedLikelihood", "GaussHermite", "Integrator", "MonteCarlo", "QuasiMonteCarlo", "check_observed", "expectation",
    "is_expected", "log_expectation", "log_predictive", "unwrap",
]  # fmt: skip


class ExpectedLikelihood(ToldOfMasks):
    r"""A distribution over y whose ``log_prob`` is :math:`E_{q(f)}[\log p(y \mid f)]`, minus the cost of tightening.

    The batch shape is that of ``conditional(f)``: (B,) for one latent function, or for P that each y depends on jointly;
    (B, P) where each of P outputs has its own y (then ``.to_event(1)`` inside a plate over B).

    :param marginals: f(X).
    :param integrator: how to integrate where no closed form is known; by default 20 Gauss-Hermite nodes per latent
        function for one or two, quasi-Monte Carlo above: 128 points in a fit, 2048 in predictions; see :meth:`log_predictive` for
        predictive densities.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields: tuple[str, ...] = ("marginals", "rng_key")
    pytree_aux_fields: tuple[str, ...] = ("integrator", "by_default", "mixes")
    integrates_function = True  # a likelihood of this package, see `is_expected`
    moments_suffice = False  # whether the expectation depends on mean and variance of f only, whatever its distribution

    def __init__(
        self, marginals: Marginals, *, integrator: Integrator | None = None, validate_args: bool | None = None
    ) -> None:
        self.marginals = self._required(marginals)
        prototype = self.conditional(marginals.mean)
        self.mixes = marginals.mean.ndim == 2 and prototype.batch_shape == marginals.shape[:1]
        if prototype.batch_shape not in (marginals.shape, marginals.shape[:1]):
            raise ValueError(
                f"Given f of shape {marginals.shape}, the likelihood has batch shape {prototype.batch_shape}; expected "
                f"{marginals.shape}, or {marginals.shape[:1]} where y depends on all latent functions. Do its other arguments "
                "broadcast against f?"
            )
        if marginals.groups is not None and not self.closed_form:
            refuse_groups(type(self).__name__)
        dim = (marginals.num_latents or 1) if self.mixes else 1
        self.by_default = integrator is None
        self.integrator = integrator or (GaussHermite() if dim <= 2 else QuasiMonteCarlo())
        self.rng_key = None if isinstance(self.integrator, GaussHermite) else prng_key()
        super().__init__(prototype.batch_shape, prototype.event_shape, validate_args=validate_args)

    def _required(self, marginals: Any) -> Marginals:
        if not isinstance(marginals, Marginals):
            raise TypeError(
                f"{type(self).__name__} needs the marginals of a function, f(X); got {type(marginals).__name__}. For plain arrays "
                "use numpyro.distributions."
            )
        if not jnp.issubdtype(marginals.mean.dtype, jnp.floating):
            raise TypeError(
                f"{type(self).__name__} needs marginals of a floating dtype; their mean is of {marginals.mean.dtype}. Convert it: "
                "jnp.asarray(mean, float)."
            )
        if isinstance(marginals, AveragedMarginals) and not self.moments_suffice:
            raise ValueError(
                f"{type(self).__name__} needs more than the two moments that f.expected(X) knows, and would not give a bound. "
                "Use a draw of the latent inputs: f(X)."
            )
        return marginals

    def _parameter(
        self, marginals: Marginals, name: str, value: ArrayLike, allowed: Allowed = POSITIVE, *, per_point: bool = True
    ) -> Array:
        """A parameter as a real array (integers get the dtype of f), refused if it is concrete and not ``allowed``.

        :param per_point: whether it must broadcast to f(X).
        """
        f = self._required(marginals)
        array = check_allowed(name, real(jnp.asarray(value), f.mean.dtype), allowed)
        return check_broadcasts(name, array, f.shape) if per_point else array

    @abstractmethod
    def conditional(self, f: Array) -> dist.Distribution:
        """p(y | f) for latent values of shape (..., B) or (..., B, P)."""

    def log_density(self, f: Array, y: Array) -> Array:
        """log p(y | f), where it can be had more precisely than from ``conditional``."""
        return self.conditional(f).log_prob(y)

    def expected_log_density(self, y: Array) -> Array:
        """E_q(f)[log p(y | f)]; here by integration, in closed form where a subclass knows it."""
        f, weights = self._values(y)
        return expectation(weights, self.log_density(f, y))

    def log_prob(self, value: ArrayLike) -> Array:
        """E_q(f)[log p(y | f)] minus the cost of tightening, shape of the batch: what the bound sums over points.

        :param value: y, batch shape and event shape of the likelihood.
        :raises ValueError: if y has another shape or, where it is concrete, lies outside the support; if arrays of
            likelihoods were stacked, as by ``vmap``, so that their axes no longer belong together.
        """
        y = self._checked(value)
        return self.expected_log_density(y) - self.tightening_cost

    def log_predictive(self, value: ArrayLike) -> Array:
        """log E_q(f)[p(y | f)], the log density of y with the latent function integrated out, shape of the batch.

        If y depends on one function, the default quadrature places its nodes around the peak of p(y | f) q(f). Gauss-Hermite nodes,
        which are placed by q(f), would miss a density that is much narrower than q(f), such as that of a large count.
        """
        y = self._checked(value)
        if self.by_default and not self.mixes:
            m = self.marginals
            scale = safe_sqrt(m.variance)
            shape = y.shape[: y.ndim - len(self.event_shape)]
            dtype = m.mean.dtype  # NumPyro may make values in its default dtype

            def log_density(t: Array) -> Array:
                return self.log_density(m.mean + scale * t, y).astype(dtype)

            return log_normal_expectation(log_density, shape, dtype)
        return self._log_average(lambda f: self.log_density(f, y), y)

    def sample(self, key: PRNGKey | None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw f, then y given f; jointly over the inputs wherever ``f(X).sample()`` is joint."""
        key = check_key(key, "likelihoods")
        self._check_not_stacked()
        f_key, y_key = jax.random.split(key)
        f = self.marginals.draw(f_key, sample_shape)
        y = self.conditional(f).sample(y_key)
        # NumPyro draws in the default dtype, whatever that of the parameters.
        return self._rounded(y, f.dtype) if jnp.issubdtype(y.dtype, jnp.floating) else y

    def _rounded(self, y: Array, dtype: Any) -> Array:
        """Draws in ``dtype``; a subclass whose support is open keeps them inside of it, where rounding would end on its edge."""
        return y.astype(dtype)

    @property
    def support(self) -> Any:
        return self.conditional(self.marginals.mean).support

    @property
    def mean(self) -> Array:
        """E[y], f integrated out, shape batch + event."""
        return self._average(lambda f: moment_of(self.conditional(f), "mean"))

    @property
    def variance(self) -> Array:
        """Var[y], f integrated out, by the law of total variance."""
        mean = self.mean

        def squared(f: Array) -> Array:
            given = self.conditional(f)
            return moment_of(given, "variance") + (given.mean - mean) ** 2

        return self._average(squared)

    @property
    def closed_form(self) -> bool:
        """Whether the best v of a tightened residual is known for each point, as ``residual_scale``; else one is learned."""
        return False

    @property
    def tightening_cost(self) -> Array:
        """What ``log_prob`` pays for the tightened residual, broadcastable to the batch shape."""
        return self.marginals.point_cost if self.mixes else self.marginals.tightening_cost

    def _values(self, y: Array | None = None) -> tuple[Array, Array]:
        """Latent values at the integration nodes, shape (S,) + that of f, and the weights of the nodes, shape (S,).

        Where ``y`` has leading sample axes the values have axes of size one in their place.
        """
        m = self.marginals
        dim = m.num_latents if self.mixes else None
        batch = m.shape[:1] if self.mixes else m.shape
        nodes, weights = self.integrator.nodes(self.rng_key, batch, dim, m.mean.dtype)
        return self._at(nodes, y, line=False), weights

    def _line(self, y: Array | None = None) -> tuple[Array, Array]:
        """Standard-normal nodes of one dimension for each point, shape (S, B) or (S, 1), aligned as those of ``_values``."""
        m = self.marginals
        nodes, weights = self.integrator.nodes(self.rng_key, m.shape[:1], None, m.mean.dtype)
        return self._aligned(nodes, y), weights

    def _average(self, value: Callable[[Array], Array], y: Array | None = None, *, line: bool = False) -> Array:
        """E_q(f)[value(f)] of a prediction, for latent values with one axis in front: at nodes that all points share.

        :param line: ``value`` is a function of standard-normal nodes of one dimension for each point, not of latent values.
        """
        nodes, weights = self._shared_nodes(line)
        return by_blocks(lambda x, w: expectation(w, value(self._at(x, y, line))), nodes, weights).sum(0)

    def _log_average(self, log_value: Callable[[Array], Array], y: Array | None = None, *, line: bool = False) -> Array:
        """log E_q(f)[exp(log_value(f))] in the same way."""
        nodes, weights = self._shared_nodes(line)
        parts = by_blocks(lambda x, w: log_expectation(w, log_value(self._at(x, y, line))), nodes, weights)
        return logsumexp(parts, axis=0)

    def _shared_nodes(self, line: bool) -> tuple[Array, Array]:
        m, rule = self.marginals, self.integrator
        if self.by_default and isinstance(rule, QuasiMonteCarlo):
            rule = QuasiMonteCarlo(FOR_PREDICTIONS)  # nothing averages out here, as it does over the steps of a fit
        mixes = self.mixes and not line
        return rule.shared_nodes(1 if mixes or line else m.mean.ndim, m.num_latents if mixes else None, m.mean.dtype)

    def _at(self, nodes: Array, y: Array | None, line: bool) -> Array:
        m = self.marginals
        f = nodes if line else m.at(nodes) if self.mixes else m.mean + safe_sqrt(m.variance) * nodes
        return self._aligned(f, y)

    def _aligned(self, values: Array, y: Array | None) -> Array:
        leading = 0 if y is None else y.ndim - len(self.batch_shape) - len(self.event_shape)
        return values.reshape(values.shape[:1] + (1,) * leading + values.shape[1:])

    def _check_not_stacked(self) -> None:
        # `vmap` stacks every array of a distribution: those of fewer axes than f, as a noise, would lie along the wrong one.
        if self.marginals.mean.ndim > len(self.batch_shape) + self.mixes:
            raise ValueError(
                f"f has the shape {self.marginals.shape} where {type(self).__name__} was made with the batch shape "
                f"{self.batch_shape}: its arrays were stacked, as by jax.vmap over a function that returns it. Let that function "
                "return its log_prob, or evaluate f at all inputs at once."
            )

    def _checked(self, value: ArrayLike) -> Array:
        self._check_not_stacked()
        y = jnp.asarray(value)
        self.check(y)
        return y

    def check(self, y: Array, name: str = "obs", mask: Any = True) -> None:
        """Check the shape of observations and, where they are concrete and not masked, that they lie in the support.

        :raises ValueError: saying what was expected and which value is outside.
        """
        shape = self.batch_shape + self.event_shape
        if y.shape[max(y.ndim - len(shape), 0) :] != shape:
            hint = " Did you mean y[:, 0]?" if y.ndim == 2 and y.shape[1] == 1 else ""
            raise ValueError(f"`{name}` must have shape {shape} to match the likelihood; got {y.shape}.{hint}")
        if mask is not False:
            inspect(partial(_refuse_outside, type(self).__name__, name), self.support, y, mask)


def is_expected(fn: Any) -> bool:
    """Whether a site's distribution is, beneath masks and such, a likelihood of this package."""
    return getattr(unwrap(fn)[0], "integrates_function", False)


def log_predictive(fn: Any, y: ArrayLike) -> Array:
    """``log_predictive`` of a site's likelihood, whatever wraps it; of other distributions ``log_prob``.

    :return: shape of the batch; zero where masked.
    """
    if not is_expected(fn):
        return fn.log_prob(y)
    if isinstance(fn, dist.MaskedDistribution):
        return _log_predictive_masked(fn, jnp.asarray(y))
    if isinstance(fn, dist.Independent):
        values = log_predictive(fn.base_dist, y)
        return values.sum(tuple(range(values.ndim - fn.reinterpreted_batch_ndims, values.ndim)))
    if isinstance(fn, dist.ExpandedDistribution):
        values = log_predictive(fn.base_dist, y)
        return jnp.broadcast_to(values, jnp.broadcast_shapes(values.shape, fn.batch_shape))
    return fn.log_predictive(y)


def _log_predictive_masked(fn: dist.MaskedDistribution, y: Array) -> Array:
    if isinstance(fn._mask, bool):
        values = log_predictive(fn.base_dist, y) if fn._mask else jnp.zeros(y.shape[: y.ndim - fn.event_dim])
        return jnp.broadcast_to(values, jnp.broadcast_shapes(values.shape, fn.batch_shape))
    # As NumPyro does for `log_prob`: what is masked may be no output at all, and its derivatives no numbers.
    with suppress(NotImplementedError):
        allowed = fn.support.feasible_like(y)
        y = jnp.where(fn._mask.reshape(fn._mask.shape + (1,) * fn.event_dim), y, allowed)
    return jnp.where(fn._mask, log_predictive(fn.base_dist, y), 0.0)


def check_observed(name: str, fn: Any, value: Any) -> None:
    """:meth:`ExpectedLikelihood.check` for an observed site, whatever wraps its likelihood."""
    likelihood, mask = unwrap(fn)
    if isinstance(likelihood, ExpectedLikelihood):
        likelihood.check(jnp.asarray(value), name, mask)


def unwrap(fn: Any) -> tuple[Any, Any]:
    """A distribution beneath masks, expansions and ``to_event``, and what all the masks leave, True without one."""
    masks: list[tuple[Any, int]] = []
    while isinstance(fn, (dist.MaskedDistribution, dist.Independent, dist.ExpandedDistribution)):
        if isinstance(fn, dist.MaskedDistribution):
            masks.append((fn._mask, fn.event_dim))
        fn = fn.base_dist
    mask: Any = True
    for each, event_dim in masks:
        if np.ndim(each):  # a mask of events is one of all their entries
            each = each.reshape(each.shape + (1,) * (event_dim - fn.event_dim))
        mask = each if mask is True else mask & each
    return fn, mask


def _refuse_outside(likelihood: str, name: str, support: Any, y: Array, mask: Any) -> None:
    inside = np.asarray(support(np.asarray(y)))
    mask = np.asarray(mask).reshape(
        np.shape(mask) + (1,) * max(inside.ndim - np.ndim(mask), 0) if np.ndim(mask) else ()
    )
    bad = ~inside & mask
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        example = np.asarray(y)[first]
        hint = " Labels are 0 and 1: use (y + 1) / 2 for labels -1 and 1." if likelihood == "Bernoulli" else ""
        hint = (
            " Mask missing outputs: numpyro.handlers.mask, with any allowed value in their place."
            if np.isnan(example).any()
            else hint
        )
        raise ValueError(
            f"`{name}` must lie in the support of {likelihood} ({support}); got {example} at {first}, "
            f"{int(bad.sum())} in all.{hint}"
        )
