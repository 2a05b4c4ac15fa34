r"""How far the Gaussians of natural gradients are from their optimum.

A natural step follows the gradient of its own draw. If the loss is random (draws of f, minibatches) and the rate does not fall, q
keeps moving around its optimum, which losses of single steps do not show. With g the gradient of the expected loss and F the Fisher
matrix of q,

.. math:: g^\top F^{-1} g / 2

is what a step of length one gains, if the loss is quadratic along it: in nats, zero at the optimum, and too large a number far away
from it. Each product is of two different averages over draws, so the noise of a gradient does not count as its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpyro import handlers
from numpyro.infer import TraceMeanField_ELBO

from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.gaussians.constraints import NaturalPart
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.math.kept import run_kept
from numpyro_orthgp.types import Array

__all__ = ["Unsettled", "advice_on_unsettled", "unsettled_of"]

_AVERAGES, _DRAWS = 8, 64  # of gradients, and draws in each
_MUCH, _CLEAR = 0.1, 2  # nats for each inducing variable; standard errors


@dataclass(frozen=True)
class Unsettled:
    """
    :param gain: what the gradient promises for a natural step of length one, in nats.
    :param error: its standard error.
    :param num: number of inducing variables.
    """

    gain: float
    error: float
    num: int

    @property
    def matters(self) -> bool:
        """Whether it is much, and clearly more than nothing."""
        return self.gain > max(_MUCH * self.num, _CLEAR * self.error)

    @property
    def is_known(self) -> bool:
        """Whether more draws would not change the answer."""
        return abs(self.gain - _MUCH * self.num) > 2 * _CLEAR * self.error


def unsettled_of(subject: Subject) -> dict[str, Unsettled]:
    """By name of the gp, for the gps whose q takes natural steps. Discrete sites need another loss: there nothing is measured."""
    names = _natural(subject)
    if not names or getattr(subject.guide, "_enumerated", None):
        return {}
    sizes = {site: int(np.size(subject.params[site + "_loc"])) for site in names}
    found: dict[str, Unsettled] = {}
    for draws in (1, _DRAWS):
        products = _products(subject, names, draws)
        for gp in dict.fromkeys(map(_gp_of, names)):
            sites = [site for site in names if _gp_of(site) == gp]
            found[gp] = _gain(np.sum([products[site] for site in sites], 0), sum(sizes[site] for site in sites))
        if all(of.is_known for of in found.values()):
            break
    return found


def _gp_of(site: str) -> str:
    return site.rpartition(".u")[0]


def advice_on_unsettled(found: Mapping[str, Unsettled]) -> Iterator[str]:
    """Sentences."""
    for gp, of in found.items():
        if of.matters:
            yield (
                f"q of {gp} is not at its optimum: its gradient promises {of.gain:.1f} nats. Natural steps were too few, or so "
                "long that they follow the noise of the loss. Let their rate fall, "
                "natural_gradient(others, optax.cosine_decay_schedule(0.1, num_steps)), or average over draws, "
                "TraceMeanField_ELBO(num_particles=10)."
            )


def _natural(subject: Subject) -> dict[str, type[Whitened]]:
    """The sites whose q takes natural steps, and its family."""
    found: dict[str, type[Whitened]] = {}

    def look(arrays: Any, params: Any) -> Array:
        args, kwargs = subject.arguments.join(arrays)
        guide = handlers.substitute(handlers.seed(subject.guide, jax.random.key(0)), params)
        with handlers.block():
            sites = handlers.trace(guide).get_trace(*args, **kwargs)
        for name, site in sites.items():
            constraint = site["kwargs"].get("constraint") if site["type"] == "param" else None
            if isinstance(constraint, NaturalPart) and constraint.part == "loc":
                found[name.removesuffix("_loc")] = constraint.family
        return jnp.zeros(())

    jax.eval_shape(look, subject.arguments.arrays, subject.params)
    return found


def _products(subject: Subject, names: Mapping[str, type[Whitened]], draws: int) -> dict[str, np.ndarray]:
    """By site, products of averages of gradients, each with each, shape (averages, averages)."""
    keys = jax.random.split(subject.rng_key, (_AVERAGES, draws))
    parts = {f"{site}_{part}" for site, family in names.items() for part in family.parts()}

    def measure(arrays: Any, params: dict[str, Any], keys: Array) -> dict[str, Array]:
        args, kwargs = subject.arguments.join(arrays)

        def loss(moving: dict[str, Any], key: Array) -> Array:
            found: Array = TraceMeanField_ELBO().loss(
                key, params | moving, subject.model, subject.guide, *args, **kwargs
            )
            return found

        at = {name: params[name] for name in parts}

        def average(keys: Array) -> dict[str, Array]:
            return jax.tree.map(lambda g: g.mean(0), lax.map(lambda key: jax.grad(loss)(at, key), keys))

        gradients = lax.map(average, keys)
        return {site: _gram(family, site, at, gradients) for site, family in names.items()}

    return {
        site: np.asarray(a, float)
        for site, a in run_kept(measure, subject.arguments.arrays, subject.params, keys).items()
    }


def _gram(family: type[Whitened], site: str, at: Mapping[str, Array], gradients: Mapping[str, Array]) -> Array:
    def member(of: Mapping[str, Array]) -> Whitened:
        return family(*(of[f"{site}_{part}"] for part in family.parts()))

    def ahead(gradient: Whitened) -> Whitened:
        return jax.jvp(lambda rate: member(at).natural_step(gradient, rate), (0.0,), (-1.0,))[1]

    g = member(gradients)
    d = lax.map(ahead, g)
    pairs = zip(jax.tree.leaves(g), jax.tree.leaves(d), strict=True)
    return sum((jnp.einsum("i...,j...->ij", a, b) for a, b in pairs), jnp.zeros(()))


def _gain(products: np.ndarray, num: int) -> Unsettled:
    """Half the mean over pairs of different averages, and its error by leaving each out."""

    def mean(kept: np.ndarray) -> float:
        inner = products[np.ix_(kept, kept)]
        return float((inner.sum() - np.trace(inner)) / (2 * len(kept) * (len(kept) - 1)))

    every = np.arange(len(products))
    left_out = np.array([mean(np.delete(every, i)) for i in every])
    error = np.sqrt((len(every) - 1) * left_out.var())
    return Unsettled(mean(every), float(error), num)
