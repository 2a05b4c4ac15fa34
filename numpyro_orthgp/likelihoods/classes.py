"""Ordered and unordered classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpyro.distributions as dist
from jax.nn import log_sigmoid, sigmoid
from numpyro.distributions import constraints

from numpyro_orthgp.errors import check_option
from numpyro_orthgp.functions.arithmetic import broadcasts, of_rows
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.sites import enumerating
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, GaussHermite, Integrator, expectation
from numpyro_orthgp.likelihoods.checks import INCREASING, OPEN_FRACTION
from numpyro_orthgp.likelihoods.softplus import expected_sigmoid, softplus_gap
from numpyro_orthgp.likelihoods.special import (
    LOG_ROOT_TWO_PI,
    log1mexp,
    log_ndtr,
    log_ndtr_difference,
    standardize,
)
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.peaks import log_normal_expectation
from numpyro_orthgp.math.quadrature import rising_edge
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Categorical", "Ordinal"]

# In the integral of robustmax, standard deviations have a floor: this factor times that of the class in question, and so many
# times the rounding error. Nodes cannot be denser.
_SHARPEST, _ROUNDINGS = 1e-7, 128


class Ordinal(ExpectedLikelihood):
    r"""Ordered classes 0, ..., K (ratings, grades): :math:`P(y \le k \mid f) = F(c_k - f)` with cutpoints :math:`c_0 < c_1 < \dots`

    To learn the cutpoints::

        numpyro.param("cutpoints", jnp.arange(4.0), constraint=dist.constraints.ordered_vector)

    :param marginals: f(X), shape (B,) or (B, P).
    :param cutpoints: shape (K,), increasing, in units of f. The noise of f has scale 1.
    :param link: "probit": F is the standard normal distribution function, and ``log_predictive`` and ``probs`` have closed forms.
        "logit": F is the logistic function.
    :param integrator: default for "logit" a closed form, for "probit" nodes about the cutpoints on either side of y.
    :raises ValueError: for another link; if ``cutpoints`` is not a vector, or is concrete and not increasing.
    """

    pytree_data_fields: tuple[str, ...] = ("cutpoints",)
    pytree_aux_fields: tuple[str, ...] = ("link",)
    _log_concave = True

    def __init__(
        self,
        marginals: Marginals,
        cutpoints: ArrayLike,
        link: str = "probit",
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.link = check_option("link", link, ("probit", "logit"))
        self.cutpoints = self._parameter(marginals, "cutpoints", cutpoints, INCREASING, per_point=False)
        if self.cutpoints.size == 0 or (self.cutpoints.ndim != 1 and not enumerating()):
            raise ValueError(f"`cutpoints` must have shape (K,) for K + 1 classes; got {self.cutpoints.shape}.")
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        cdf = jsp.ndtr if self.link == "probit" else sigmoid
        below = cdf(self.cutpoints - f[..., None])
        ends = jnp.zeros_like(below[..., :1])
        return dist.CategoricalProbs(jnp.diff(jnp.concatenate([ends, below, 1 + ends], -1)))

    def log_density(self, f: Array, y: Array) -> Array:
        return self._log_density(f, y, 1.0)

    def expected_log_density(self, y: Array) -> Array:
        if self.link != "logit" or not self.by_default:
            return super().expected_log_density(y)
        m = self.marginals
        first, last, upper, lower = self._sides(y)
        below, above = (softplus_gap(x, m.variance) for x in (upper - m.mean, m.mean - lower))
        return self.log_density(m.mean, y) - jnp.where(last, 0, below) - jnp.where(first, 0, above)

    def _bends(self, y: Array | None) -> tuple[ArrayLike, ArrayLike, ArrayLike] | None:
        if y is None:
            return None
        first, last, upper, lower = self._sides(y)
        return jnp.where(first, upper, lower), jnp.where(last, lower, upper), 2.0

    def log_predictive(self, value: ArrayLike) -> Array:
        if self.link != "probit":
            return super().log_predictive(value)
        m = self.marginals
        return self._log_density(m.mean, self._checked(value), jnp.sqrt(1 + m.variance))

    def _log_density(self, f: Array, y: Array, scale: ArrayLike) -> Array:
        """log(F((upper - f) / scale) - F((lower - f) / scale)) with the cutpoints on either side of y."""
        first, last, upper, lower = self._sides(y)
        below, above, width = (upper - f) / scale, (f - lower) / scale, (upper - lower) / scale
        if self.link == "probit":
            return log_ndtr_difference(jnp.where(last, above, below), width, first | last)
        # F(a) - F(b) = F(a) F(-b) (1 - exp(b - a)) for the logistic function
        sides = jnp.where(last, 0, log_sigmoid(below)) + jnp.where(first, 0, log_sigmoid(above))
        return sides + jnp.where(first | last, 0, log1mexp(jnp.where(first | last, 1, width)))

    def _sides(self, y: Array) -> tuple[Array, Array, Array, Array]:
        """Whether y is the first or the last class, and the cutpoints above and below it, the same if it is."""
        k, c = y.astype(int), self.cutpoints
        K = c.shape[-1]
        upper, lower = (_entry(c, at) for at in (jnp.minimum(k, K - 1), jnp.maximum(k - 1, 0)))
        return k == 0, k == K, upper, lower

    @property
    def support(self) -> Any:
        return constraints.integer_interval(0, self.cutpoints.shape[-1])

    @property
    def probs(self) -> Array:
        """Predictive probabilities of the classes, with f integrated out, shape of f(X) + (K + 1,)."""
        return _probs(self, self.cutpoints.shape[-1] + 1)

    @property
    def mean(self) -> Array:
        """The mean of the class index."""
        return self.probs @ jnp.arange(self.cutpoints.shape[-1] + 1, dtype=self.marginals.mean.dtype)

    @property
    def variance(self) -> Array:
        classes = jnp.arange(self.cutpoints.shape[-1] + 1, dtype=self.marginals.mean.dtype)
        return (self.probs * (classes - self.mean[..., None]) ** 2).sum(-1)


class Categorical(ExpectedLikelihood):
    r"""Classes 0, ..., P-1, with one latent function for each.

    "softmax": :math:`p(y = c \mid f) = e^{f_c} / \sum_j e^{f_j}`, integrated by quasi-Monte Carlo.

    "robustmax" (Hernandez-Lobato et al. 2011): the class of the largest function has probability :math:`1 - \epsilon`, each other
    class :math:`\epsilon / (P - 1)`. Everything is then a function of

    .. math:: P(f_c \text{ is the largest}) = E_{f_c}\Big[\prod_{j \ne c} \Phi\big((f_c - m_j) / s_j\big)\Big],

    an integral in one dimension for any P. The product is a step, as narrow as the narrowest function other than f_c, and
    Gauss-Hermite nodes may miss it. So by default 112 nodes are placed around the step (``math.quadrature.rising_edge``).

    In a fit, quasi-Monte Carlo points differ between data points. They are drawn with a key taken when the distribution is made. In
    predictions they are the same for all data points and classes, so probabilities sum to one, and those of one point do not
    depend on other points.

    :param marginals: f(X) of shape (B, P): a gp with ``num_latents=P``, or single gps that are stacked or (for "softmax") mixed.
    :param link: "softmax" or "robustmax".
    :param epsilon: for "robustmax", the probability of a label that is not the largest function's, shape () or (B,).
    :param integrator: for "softmax", the default is Gauss-Hermite for up to two latent functions, and quasi-Monte Carlo for more,
        with 128 points in a fit (32 for more than eight functions) and 2048 in predictions; probabilities are then accurate to 1e-3
        for ten classes and 2e-3 for a hundred. For "robustmax", the default is nodes around the step, accurate for any ratio of
        variances.
    :raises ValueError: for another link; an ``epsilon`` of another shape, or a concrete one that is not between 0 and 1; if
        ``marginals`` has no latent axis or only one function, or (for "robustmax") if its outputs mix latent functions.
    """

    pytree_data_fields: tuple[str, ...] = ("epsilon",)
    pytree_aux_fields: tuple[str, ...] = ("link", "about_step")
    _few_nodes_suffice = True

    def __init__(
        self,
        marginals: Marginals,
        link: str = "softmax",
        epsilon: ArrayLike = 1e-3,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.link = check_option("link", link, ("softmax", "robustmax"))
        self.epsilon = self._parameter(marginals, "epsilon", epsilon, OPEN_FRACTION, per_point=False)
        if len(self._required(marginals).own_shape) != 2:
            raise ValueError(
                f"Categorical needs f(X) of shape (B, P), one latent function per class; got {marginals.shape}. "
                "Declare gp(..., num_latents=P)."
            )
        if marginals.shape[-1] == 1:
            raise ValueError(
                "Categorical of one latent function has one class, whose probability is 1 whatever the data: declare "
                "gp(..., num_latents=P) for P classes. For two classes one function is enough: Bernoulli(f(X)) of a gp without "
                "`num_latents`."
            )
        self.about_step = link == "robustmax" and integrator is None
        if link == "robustmax":
            _check_robustmax(marginals, self.epsilon)
            integrator = integrator or GaussHermite()  # needs no key
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        if self.link == "softmax":
            return dist.CategoricalLogits(f)
        largest = jax.nn.one_hot(f.argmax(-1), f.shape[-1], dtype=f.dtype)
        return dist.CategoricalProbs(self._robust(largest, self.epsilon[..., None]))

    def log_density(self, f: Array, y: Array) -> Array:
        return super().log_density(f, y.astype(int))  # NumPyro takes no labels like 2.0

    def expected_log_density(self, y: Array) -> Array:
        if self._two:
            m, v = self._difference(y)
            return -softplus_gap(m, v) - jax.nn.softplus(m)
        if self.link == "softmax":
            return super().expected_log_density(y)
        p = self._probability_of_largest(y, None if self.about_step else self._line(y))
        return p * jnp.log(self._robust(1.0, self.epsilon)) + (1 - p) * jnp.log(self._robust(0.0, self.epsilon))

    def log_predictive(self, value: ArrayLike) -> Array:
        if self._two:
            m, v = self._difference(self._checked(value))
            return log_normal_expectation(
                lambda t: log_sigmoid(-m - safe_sqrt(v) * t), m.shape, m.dtype, log_concave=True
            )
        if self.link == "softmax":
            return super().log_predictive(value)
        y = self._checked(value)
        nodes, weights = self._shared_nodes(True, self.integrator)
        rule = None if self.about_step else (self._aligned(nodes, y), weights)
        return jnp.log(self._robust(self._probability_of_largest(y, rule), self.epsilon))

    @property
    def _two(self) -> bool:
        """Whether everything depends on the difference of two functions."""
        return self.link == "softmax" and self.by_default and self.marginals.shape[-1] == 2

    def _difference(self, y: Array) -> tuple[Array, Array]:
        """Mean and variance of the other class's function minus that of class y."""
        m = self.marginals
        mean = m.mean[..., 1] - m.mean[..., 0]
        variance = m.variance.sum(-1)
        if m.mixing is not None:
            variance = (m.latent_variance * (m.mixing[..., 1] - m.mixing[..., 0]) ** 2).sum(-1)
        mean, variance, y = jnp.broadcast_arrays(mean, variance, y.astype(int))
        return jnp.where(y == 0, mean, -mean), variance

    def _robust(self, p: ArrayLike, epsilon: Array) -> Array:
        """The probability of a class whose function is the largest with probability p."""
        return (1 - epsilon) * p + epsilon / (self.marginals.shape[-1] - 1) * (1 - p)

    def _probability_of_largest(self, y: Array, rule: tuple[Array, Array] | None) -> Array:
        """
        :param rule: one-dimensional nodes and weights of the user's ``integrator``; ``None`` for nodes around the step.
        """
        m, y = self.marginals, y.astype(int)
        y = jnp.broadcast_to(y, jnp.broadcast_shapes(y.shape, m.shape[:-1]))
        others = jnp.arange(m.shape[-1]) != y[..., None]

        def of_class(values: Array) -> Array:
            return jnp.take_along_axis(jnp.broadcast_to(values, (*y.shape, values.shape[-1])), y[..., None], -1)

        mean, variance = of_class(m.mean), of_class(m.variance)
        if rule is not None:
            nodes, weights = rule
            f = mean + safe_sqrt(variance) * nodes[..., None]
            z, _ = standardize(f - m.mean, m.variance)
            return expectation(weights, jnp.exp(jnp.where(others, log_ndtr(z), 0).sum(-1)))
        # With f_c = m_c + s_c t the factors are Phi(a_j + b_j t), and one for c itself.
        sharpest = max(_SHARPEST, _ROUNDINGS * float(jnp.finfo(variance.dtype).eps))
        sharp = m.variance + sharpest**2 * variance
        a, b = (standardize(x, sharp)[0] for x in (mean - m.mean, safe_sqrt(variance)))
        a, b = jnp.where(others, a, 1 / sharpest), jnp.where(others, b, 0)
        t, steps, weights = rising_edge(a, b)
        z = a + b * t[..., None] + b * steps[..., None]
        # JAX's log Phi is faster than ours, which is for tails. Tails do not matter: a factor below 1e-32 makes the product vanish.
        log_values = jsp.log_ndtr(jnp.maximum(z, -12)).sum(-1) - (t + steps) ** 2 / 2 - LOG_ROOT_TWO_PI
        return (weights * jnp.exp(log_values)).sum(0)

    @property
    def support(self) -> Any:
        return constraints.integer_interval(0, self.marginals.shape[-1] - 1)

    @property
    def probs(self) -> Array:
        """Predictive probabilities of the classes, with f integrated out, shape (B, P)."""
        if self.link == "robustmax":
            # One class after the other: each has its own nodes, and needs them for all classes.
            every = jnp.arange(self.marginals.shape[-1])
            every = jnp.broadcast_to(every.reshape(-1, *(1,) * len(self.batch_shape)), (len(every), *self.batch_shape))
            return jnp.moveaxis(jnp.exp(jax.lax.map(self.log_predictive, every)), 0, -1)
        if self._two:
            m, v = self._difference(jnp.zeros((), int))
            return jnp.stack([expected_sigmoid(-m, v), expected_sigmoid(m, v)], -1)
        return self._average(lambda f: jax.nn.softmax(f, axis=-1))

    @property
    def mean(self) -> Array:
        raise NotImplementedError("Classes without an order have no mean: use `.probs`, their probabilities.")

    @property
    def variance(self) -> Array:
        raise NotImplementedError("Classes without an order have no variance: use `.probs`, their probabilities.")


def _entry(c: Array, at: Array) -> Array:
    """``c[at]``; with enumeration axes, (..., 1 or B, K), from each row's own cutpoints."""
    return c[at] if c.ndim == 1 else of_rows(c, at)


def _probs(likelihood: Ordinal, num_classes: int) -> Array:
    classes = jnp.arange(num_classes).reshape((-1,) + (1,) * len(likelihood.batch_shape))
    every = jnp.broadcast_to(classes, (num_classes, *likelihood.batch_shape))
    return jnp.exp(jnp.moveaxis(likelihood.log_predictive(every), 0, -1))


def _check_robustmax(marginals: Marginals, epsilon: Array) -> None:
    if marginals.mixing is not None:
        raise ValueError(
            'Categorical(link="robustmax") needs independent latent functions. For mixed functions (`@ W`) the '
            'probability that one is the largest is no one-dimensional integral. Use link="softmax", or '
            "functions that are not mixed."
        )
    if marginals.shape[-1] < 2:
        raise ValueError(
            f'Categorical(link="robustmax") needs two classes or more; got f(X) of shape {marginals.shape}.'
        )
    rows = marginals.own_shape[:1]
    if epsilon.shape not in ((), rows) and not (epsilon.ndim > 1 and broadcasts(epsilon.shape, rows)):
        raise ValueError(f"`epsilon` must have shape () or {rows}, one for each point; got {epsilon.shape}.")
