"""The base of all likelihoods: a NumPyro distribution over y whose log density is an expectation over the latent function.

To add one, subclass :class:`ExpectedLikelihood` and define the NumPyro distribution of y given f (``conditional``) and, if
there is a closed form, its expectation (``expected_log_density``).
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_orthgp.closures import NoSites, in_closure
from numpyro_orthgp.errors import inspect, is_concrete
from numpyro_orthgp.foreign import as_outputs
from numpyro_orthgp.functions.expected import AveragedMarginals
from numpyro_orthgp.functions.keys import prng_key
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.sites import enumerating
from numpyro_orthgp.likelihoods.checks import (
    POSITIVE,
    Allowed,
    check_allowed,
    check_broadcasts,
    check_variances,
    draw_given,
    moment_of,
    real,
)
from numpyro_orthgp.likelihoods.integrators import (
    GaussHermite,
    Integrator,
    MonteCarlo,
    QuasiMonteCarlo,
    expectation,
    log_expectation,
    usual,
)
from numpyro_orthgp.likelihoods.masks import refuse_groups
from numpyro_orthgp.likelihoods.nodes import AtNodes
from numpyro_orthgp.likelihoods.prompted import prompted, wrapped
from numpyro_orthgp.likelihoods.rows import refuse_several_rows
from numpyro_orthgp.likelihoods.tails import log_prob
from numpyro_orthgp.likelihoods.wrapped import (
    MASK,
    check_observed,
    hint_of_mixture,
    hint_of_shape,
    is_expected,
    key_of_draw,
    log_predictive,
    no_cdf,
    refuse_outside,
    unwrap,
)
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = [
    "ExpectedLikelihood", "GaussHermite", "Integrator", "MonteCarlo", "QuasiMonteCarlo", "check_observed", "expectation",
    "is_expected", "log_expectation", "log_predictive", "unwrap",
]  # fmt: skip

_MOST_AXES = 8  # of enumeration, in front of the axes of f

# Methods of subclasses in which parameters are aligned with points, and points with nodes; how they run at a prompt.
_BROADCASTING = {n: broadcasting for n in ("conditional", "log_density", "log_prob")} | {
    n: prompted for n in ("expected_log_density", "log_predictive", "mean", "probs", "variance")
}


class ExpectedLikelihood(AtNodes):
    r"""A distribution over y whose ``log_prob`` is :math:`E_{q(f)}[\log p(y \mid f)]`, minus the cost of tightening.

    The batch shape is that of ``conditional(f)``. It is (B,) if y depends on one latent function, or jointly on P of them. It is
    (B, P) if each of P outputs has its own y (then use ``.to_event(1)`` inside a plate over B). If parameters or f depend on a
    discrete site that NumPyro enumerates, the enumeration axes come first.

    :param marginals: f(X).
    :param integrator: the rule for integrals without a closed form. The default is nodes about the bends of log p(y | f) where the
        likelihood knows them, else 20 Gauss-Hermite nodes per latent function for one or two functions, and quasi-Monte Carlo for
        more: 128 points in a fit, 2048 in predictions. See :meth:`log_predictive` for predictive densities.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields: tuple[str, ...] = ("marginals", "rng_key", "power")
    pytree_aux_fields: tuple[str, ...] = ("integrator", "by_default", "mixes", "lead", "told")
    integrates_function = True  # a likelihood of this package, see `is_expected`
    sees_several = False  # whether one y sees f at several inputs, which need joint draws
    moments_suffice = False  # whether the expectation needs only mean and variance of f, for any distribution of f
    _of_users = False  # whether a user has written the distribution of y given f
    _few_nodes_suffice = False  # in a fit, for many functions
    cdf = icdf = no_cdf

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_formulas_of_another(cls)
        if "conditional" in vars(cls) and "_of_users" not in vars(cls):
            cls._of_users = not cls.__module__.startswith(__name__.partition(".")[0] + ".")
        for name in _BROADCASTING.keys() & vars(cls).keys():
            setattr(cls, name, wrapped(_BROADCASTING[name], vars(cls)[name]))

    def __init__(
        self, marginals: Marginals, *, integrator: Integrator | None = None, validate_args: bool | None = None
    ) -> None:
        self.marginals = self._required(marginals)
        batch_shape, event_shape = self._shapes()
        self.power = self._power(batch_shape[self.lead :])
        if marginals.groups is not None and not self.closed_form:
            refuse_groups(type(self).__name__)
        dim = (marginals.num_latents or 1) if self.mixes else 1
        self.by_default = integrator is None
        self.integrator = integrator or usual(dim, self._few_nodes_suffice)
        # Where a function makes the likelihood any number of times, as in `condition`, its nodes stay the same.
        self.rng_key = None if isinstance(self.integrator, GaussHermite) or in_closure() else prng_key()
        super().__init__(batch_shape, event_shape, validate_args=validate_args)
        if self._of_users:
            refuse_several_rows(self)

    def _power(self, batch: tuple[int, ...]) -> Array | None:
        """Weights below one that ``handlers.scale`` gives: powers of the density of y, not of what the residual costs."""
        m = self.marginals
        weights = m.names.weights() if m.tight and m.names is not None else None
        if weights is None or (is_concrete(weights) and np.min(weights) >= 1):
            return None
        weights = jnp.minimum(jnp.asarray(weights, m.mean.dtype), 1)
        return weights[:, None] if weights.shape == batch[:1] and len(batch) == 2 else weights

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Batch and event shape. It also sets ``mixes`` and ``lead``, which follow from these shapes."""
        f, own = self.marginals.mean, self._shape_of_points(self.marginals)
        # More axes than enumeration can add distinguish leading axes of parameters from axes of f.
        front = _MOST_AXES if enumerating() else self.marginals.lead
        with NoSites(type(self).__name__) if self._of_users else nullcontext():
            given = self.conditional(f.reshape((1,) * (front + len(own) - f.ndim) + f.shape))
        batch = given.batch_shape
        num = len(batch) - front
        self.mixes = len(own) == 2 and num == 1
        if num < 1 or batch[front:] != own[:num] or (num < len(own) and not self.mixes):
            single = len(own) == 1
            expected = f"{own}" if single else f"{own}, or {own[:1]} where y depends on all latent functions"
            hint = " If y depends on several functions, f(X) needs shape (B, P): gp(..., num_latents=P), or stack([f(X), g(X)])."
            raise ValueError(
                f"Given f of shape {own}, the likelihood has batch shape {_without_ones(batch, front)}; expected {expected}. Do "
                f"its other arguments broadcast against f?{hint if single else ''}"
            )
        lead = _without_ones(batch[:front], front)
        self.lead = len(lead)
        return lead + batch[front:], given.event_shape

    def _required(self, marginals: Any) -> Marginals:
        if not isinstance(marginals, Marginals):
            raise TypeError(
                f"{type(self).__name__} needs the marginals of a function, f(X); got {type(marginals).__name__}. For plain arrays "
                "use numpyro.distributions."
            )
        check_variances(marginals)
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
        """A parameter as a real array (integers get the dtype of f). Concrete values must be ``allowed``.

        :param per_point: whether the parameter must broadcast to f(X).
        """
        f = self._required(marginals)
        array = check_allowed(name, real(jnp.asarray(value), f.mean.dtype), allowed)
        return check_broadcasts(name, array, self._shape_of_points(f), f.lead) if per_point else array

    def _shape_of_points(self, marginals: Marginals) -> tuple[int, ...]:
        """The shape to which parameters broadcast: (B,) or (B, P); (B,) for sums of f(X) over several inputs."""
        return marginals.own_shape

    @abstractmethod
    def conditional(self, f: Array) -> dist.Distribution:
        """p(y | f) for latent values of shape (..., B) or (..., B, P)."""

    def log_density(self, f: Array, y: Array) -> Array:
        """log p(y | f). Subclasses override it if there is a more precise formula than that of ``conditional``."""
        return log_prob(self.conditional(f), y)

    @prompted
    def expected_log_density(self, y: Array) -> Array:
        """E_q(f)[log p(y | f)] by integration. Subclasses with a closed form override it."""
        f, weights = self._values(y)
        return expectation(weights, self.log_density(f, y))

    @broadcasting
    def log_prob(self, value: ArrayLike) -> Array:
        """E_q(f)[log p(y | f)] minus the cost of tightening, shape of the batch. The bound sums it over points.

        :param value: y, with the likelihood's batch shape + event shape.
        :raises ValueError: if y has another shape, or is concrete and outside the support; if the likelihood's arrays were
            stacked, for example by ``vmap``, so that their axes no longer match.
        """
        y = self._checked(value)
        density, own = self.expected_log_density(y), self.batch_shape[self.lead :]
        if jnp.ndim(density) < len(own):
            raise ValueError(
                f"`expected_log_density` of {type(self).__name__} must have one value for each row, shape {own}; got "
                f"{jnp.shape(density)}. The bound sums over rows."
            )
        return density - self.tightening_cost

    @prompted
    def log_predictive(self, value: ArrayLike) -> Array:
        """log E_q(f)[p(y | f)], the log density of y with the latent function integrated out, shape of the batch.

        If y depends on one or two functions, the default quadrature has nodes around the peaks of p(y | f) q(f), such as the two
        of y = f^2 + noise. Gauss-Hermite nodes depend only on q(f), and would miss a density that is much narrower than q(f), such
        as that of a large count. For two functions they are used where rules of 20 and 31 nodes agree, and within ``jax.vmap``, as
        over draws; elsewhere some ten milliseconds go to each point. For three or more it is quasi-Monte Carlo, whose points
        depend only on q(f) too.
        """
        y = self._checked(value)
        if not self.by_default or (self.mixes and self.marginals.num_latents != 2):
            return self._log_average(lambda f: self.log_density(f, y), y)
        shape = jnp.broadcast_shapes(y.shape[: y.ndim - len(self.event_shape)], self.batch_shape)
        return self._log_about_peaks(lambda f: self.log_density(f, y), shape)

    def sample(self, key: PRNGKey | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw f, then y given f. Draws are joint over inputs if those of ``f(X).sample()`` are."""
        self._check_not_stacked()
        f_key, y_key = jax.random.split(key_of_draw(key))
        f = self.marginals._draw(f_key, sample_shape)
        y = draw_given(self.conditional(f), y_key)
        # NumPyro draws in the default dtype, whatever the dtype of parameters.
        return self._rounded(y, f.dtype) if jnp.issubdtype(y.dtype, jnp.floating) else y

    def _rounded(self, y: Array, dtype: Any) -> Array:
        """Draws in ``dtype``. A subclass with an open support keeps draws inside it if rounding would put them on its edge."""
        return y.astype(dtype)

    @property
    def support(self) -> Any:
        return self.conditional(self.marginals.mean).support

    @property
    @prompted
    def mean(self) -> Array:
        """E[y], f integrated out, shape batch + event. Quadrature is checked, and finer where rules of 20 and 31 Gauss-Hermite
        nodes differ; for two functions within ``jax.vmap`` it is that of 31."""
        return self._average(lambda f: moment_of(self.conditional(f), "mean"))

    @property
    @prompted
    def variance(self) -> Array:
        """Var[y], f integrated out, by the law of total variance."""
        mean = self.mean

        def squared(f: Array) -> Array:
            given = self.conditional(f)
            return moment_of(given, "variance") + (given.mean - mean) ** 2

        return self._average(squared)

    @property
    def closed_form(self) -> bool:
        """Whether the best v of a tightened residual is known for each point (``residual_scale``). Otherwise one v is learned."""
        return False

    @property
    def tightening_cost(self) -> Array:
        """What ``log_prob`` pays for the tightened residual, broadcastable to the batch shape."""
        return self._charged(self.marginals.point_cost if self.mixes else self.marginals.tightening_cost)

    def _charged(self, cost: Array) -> Array:
        """A cost that weights below one, which are outside of it, leave what it is."""
        return cost if self.power is None else cost / self.power

    def _check_not_stacked(self) -> None:
        # `vmap` stacks every array of a distribution. Arrays with fewer axes than f, such as a noise, would get the wrong axis.
        if self.marginals.mean.ndim > len(self.batch_shape) + self.mixes:
            raise ValueError(
                f"f has the shape {self.marginals.shape} where {type(self).__name__} was made with the batch shape "
                f"{self.batch_shape}: its arrays were stacked, as by jax.vmap over a function that returns it. Let that function "
                f"return its log_prob, or evaluate f at all inputs at once.{hint_of_mixture()}"
            )

    def _checked(self, value: ArrayLike) -> Array:
        self._check_not_stacked()
        y = as_outputs("obs", value, MASK)
        self.check(y)
        return y

    def check(self, y: Array, name: str = "obs", mask: Any = True) -> None:
        """Check that observations have the right shape and that concrete, unmasked ones lie in the support.

        :raises ValueError: if not. The message says what was expected, or which value is outside.
        """
        shape = self.batch_shape[self.lead :] + self.event_shape  # one y for all enumerated values
        if y.shape[max(y.ndim - len(shape), 0) :] != shape:
            hint = hint_of_mixture() or hint_of_shape(y.shape, shape)
            raise ValueError(f"`{name}` must have shape {shape} to match the likelihood; got {y.shape}.{hint}")
        if mask is not False:
            inspect(partial(refuse_outside, type(self).__name__, name), self.support, y, mask)


def _refuse_formulas_of_another(cls: type[ExpectedLikelihood]) -> None:
    """
    :raises TypeError: if a user's class changes the density of a likelihood of this package, and keeps what belongs to the old one;
        or if it defines what the likelihood does not use.
    """
    package = __name__.partition(".")[0] + "."
    above: Any = next(base for base in cls.__mro__[1:] if base.__module__.startswith(package))
    if cls.__module__.startswith(package):
        return
    own_bound = above.log_prob is not ExpectedLikelihood.log_prob and "log_prob" not in vars(cls)
    # What `Quadratic.log_prob` follows.
    own_noise = getattr(cls, "noise", None) is not getattr(above, "noise", None)
    if own_bound and not own_noise and "expected_log_density" in vars(cls):
        raise TypeError(
            f"{cls.__name__} changes `expected_log_density` of {above.__name__}, whose `log_prob` has a formula of its own and "
            "does not use it. Define `log_prob` too, or derive the class from ExpectedLikelihood."
        )
    changed = sorted({"conditional", "log_density"} & vars(cls).keys())
    if not changed or "expected_log_density" in vars(cls):
        return
    if any(
        getattr(above, n) is not getattr(ExpectedLikelihood, n)
        for n in ("expected_log_density", "log_predictive", "_bends")
    ):
        raise TypeError(
            f"{cls.__name__} changes `{changed[0]}` of {above.__name__}, whose expectations and predictions are made for its own "
            "density. Derive the class from ExpectedLikelihood, or write Likelihood(f(X), fn); or define `expected_log_density` "
            "and `log_predictive` too."
        )


def _without_ones(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """A shape without leading axes of size one; at most ``most`` are removed."""
    return shape[next((i for i, size in enumerate(shape[:most]) if size != 1), min(most, len(shape))) :]
