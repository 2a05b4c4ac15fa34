"""Predictions at inputs: a function's marginals, a distribution over y, and their quantiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import ndtri

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods import Gaussian
from numpyro_orthgp.likelihoods.base import unwrap
from numpyro_orthgp.math.quadrature import quasi_normal
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["Prediction", "picked", "predict"]

NUM_VALUES = 1024  # of f, for quantiles of what a likelihood makes of it
NUM_DRAWS = 10_000  # of y, for its quantiles


@dataclass(frozen=True)
class Prediction:
    """Marginals of f at B inputs, a distribution over y, or both; each of one value per input.

    :param marginals: of f, as they enter ``outcome``; ``None`` if only y is known.
    :param outcome: the distribution of y; ``None`` if only f is drawn.
    """

    marginals: Marginals | None
    outcome: Any = None

    @property
    def plain(self) -> bool:
        """Whether f itself is drawn: there is no y, or y is f and Gaussian noise."""
        return self.outcome is None or isinstance(self.outcome, Gaussian)

    @property
    def has_labels(self) -> bool:
        """Whether y is 0 or 1."""
        return self.outcome is not None and self.outcome.support is dist.constraints.boolean

    def mean(self) -> np.ndarray:
        """The mean of f, or of y, shape (B,)."""
        values = np.asarray(self.marginals.mean if self.outcome is None else self.outcome.mean)  # type: ignore[union-attr]
        if not np.isfinite(values).all():
            name = "f" if self.outcome is None else type(self.outcome).__name__
            raise ValueError(
                f"The mean of {name} is not finite at {int((~np.isfinite(values)).sum())} of {values.size} inputs."
            )
        return values

    def deviation(self) -> np.ndarray:
        """Standard deviation of f, or of y, shape (B,)."""
        known = self.marginals if self.outcome is None else self.outcome
        return np.sqrt(np.asarray(known.variance))  # type: ignore[union-attr]

    def signal(self, probabilities: Sequence[float]) -> np.ndarray | None:
        """Quantiles over f of f, or of E[y given f] for a likelihood that is not Gaussian; shape (Q, B).

        ``None`` if E[y given f] is not known.
        """
        m, p = self.marginals, jnp.asarray(probabilities)
        if m is None:
            return None
        if self.plain:
            return np.asarray(m.mean[None] + jnp.sqrt(m.variance)[None] * ndtri(p)[:, None].astype(m.mean.dtype))
        # The same nodes at all inputs, so that quantiles are as smooth as the marginals.
        nodes = quasi_normal(jax.random.key(0), NUM_VALUES, (1,), m.num_latents or 1, m.mean.dtype)
        nodes = nodes if m.num_latents else nodes[..., 0]
        expected = self.expected(m.at(nodes))
        return None if expected is None else np.quantile(np.asarray(expected), probabilities, axis=0)

    def expected(self, f: Array) -> Array | None:
        """E[y given f] if it is not f itself; for ordered classes, of their numbers. ``None`` if NumPyro does not know it."""
        if self.plain:
            return f
        given = self.outcome.conditional(f)
        if isinstance(given, dist.CategoricalProbs):
            return given.probs @ jnp.arange(given.probs.shape[-1], dtype=f.dtype)
        try:
            return given.mean
        except NotImplementedError:
            return None

    def outcomes(self, probabilities: Sequence[float], rng_key: PRNGKey) -> np.ndarray:
        """Quantiles of y, shape (Q, B): exact for Gaussian noise, otherwise those of draws."""
        y = self.outcome
        if isinstance(y, Gaussian):
            return np.asarray(y.mean + jnp.sqrt(y.variance) * ndtri(jnp.asarray(probabilities))[:, None])
        return np.quantile(np.asarray(y.sample(rng_key, (NUM_DRAWS,))), probabilities, axis=0)

    def paths(self, num: int, rng_key: PRNGKey) -> np.ndarray:
        """Draws of f as a function, or of E[y given f], shape (num, B)."""
        if self.marginals is None or self.marginals.joint is None:
            raise ValueError(
                "`num_paths` needs a function whose draws are joint over inputs: one from posterior(...), or arithmetic on what "
                "it returns. Draws of a stack of layers come from DeepGP(...).sample_paths."
            )
        expected = self.expected(self.marginals.draw(rng_key, (num,)))
        if expected is None:
            raise ValueError(
                f"`num_paths` needs E[y given f], which is not known for {type(self.outcome).__name__}. Leave out `likelihood` to "
                "draw f."
            )
        return np.asarray(expected)


def predict(f: Callable[[Any], Any], X: Array, output: int | None, likelihood: Callable[..., Any] | None) -> Prediction:
    """The prediction of ``f(X)``, through the likelihood if there is one.

    :raises TypeError: if ``f(X)`` is neither marginals nor a distribution, or the likelihood returns no distribution.
    :raises ValueError: if there is not one value per input.
    """
    if not callable(f):
        hint = " posterior() returns a dictionary: posterior(...)['f']." if isinstance(f, dict) else ""
        raise TypeError(f"`f` must be a function; got {type(f).__name__}.{hint}")
    found = f(X)
    if isinstance(found, dist.Distribution):
        if likelihood is not None:
            raise ValueError("`likelihood` is for an f that returns marginals; f(X) is a distribution over y already.")
        return Prediction(None, _one_each(found, len(X)))
    if not isinstance(found, Marginals):
        raise TypeError(f"f(X) must be Marginals, or a distribution over y; got {type(found).__name__}.")
    if likelihood is None:
        return Prediction(picked(found, output))
    marginals = found if output is None else picked(found, output)
    outcome = likelihood(marginals.independent())
    if not isinstance(outcome, dist.Distribution):
        raise TypeError(
            f"`likelihood` must return a distribution over y, as likelihoods.Bernoulli or lambda m: likelihoods.Gaussian(m, noise) "
            f"do; got {type(outcome).__name__}."
        )
    # Of f as the likelihood sees it, which may have shifted or scaled it; draws of it are joint.
    seen = unwrap(likelihood(marginals))[0]
    return Prediction(getattr(seen, "marginals", marginals), _one_each(outcome, len(X)))


def picked(marginals: Marginals, output: int | None) -> Marginals:
    """One output of marginals, shape (B,).

    :raises ValueError: if it is needed and not given, or given and not needed.
    """
    shape = marginals.shape
    if len(shape) == 1:
        if output is not None:
            raise ValueError(f"`output` picks one of several functions, but f(X) has shape {shape}: leave it out.")
        return marginals
    if output is None:
        raise ValueError(
            f"f(X) has shape {shape}, {shape[1]} functions: pick one with `output`, 0..{shape[1] - 1}, and draw a panel for each."
        )
    return marginals[..., check_integer("output", output, least=None)]


def _one_each(outcome: Any, num: int) -> Any:
    shape = outcome.batch_shape + outcome.event_shape
    if shape != (num,):
        hint = " Pick one function with `output`." if len(shape) == 2 else ""
        raise ValueError(
            f"y must have one value for each of the {num} inputs; got a distribution of shape {shape}.{hint}"
        )
    return outcome
