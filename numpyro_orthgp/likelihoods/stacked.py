"""Likelihoods made step by step in ``numpyro.contrib.control_flow.scan``, combined to one distribution outside of it.

``scan`` gives every array of a distribution a leading axis and calls NumPyro's ``promote_batch_shape``. A noise of shape (T,) would
then be aligned with the points of f, (T, B). So :class:`Stacked` is registered there. It is also registered for
``ExpandedDistribution``; other distributions than ours are passed on to NumPyro's function. ``vmap`` alone does not call
``promote_batch_shape``, so a likelihood raises an error if its f has an extra axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.batch_util import promote_batch_shape

from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, is_expected, log_predictive
from numpyro_orthgp.likelihoods.mixture import Mixture
from numpyro_orthgp.likelihoods.wrapped import key_of_draw, unwrap
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["Stacked"]


class Stacked(dist.Distribution):
    """The likelihoods of T steps, all of the same kind and shape. The batch shape is (T,) + that of one step.

    ``scan`` gives each array of a likelihood a leading axis, whatever its rank. So f(X) becomes (T, B) and a noise (T,), and they
    no longer broadcast against each other. Each step is therefore evaluated separately, under ``vmap``.

    :param steps: a likelihood, possibly expanded by a plate, whose arrays all have the leading axis.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields: tuple[str, ...] = ("steps",)
    integrates_function = True

    def __init__(self, steps: dist.Distribution, *, validate_args: bool | None = None) -> None:
        self.steps = steps
        num_steps = len(jax.tree.leaves(steps)[0])
        super().__init__((num_steps, *steps.batch_shape), steps.event_shape, validate_args=validate_args)

    def log_prob(self, value: ArrayLike) -> Array:
        """``log_prob`` of each step, shape of the batch."""
        return self._densities(lambda step, y: step.log_prob(y), value)

    def log_predictive(self, value: ArrayLike) -> Array:
        """``log_predictive`` of each step, shape of the batch."""
        return self._densities(log_predictive, value)

    def sample(self, key: PRNGKey | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw y at each step, independently of the others."""
        key = key_of_draw(key)
        keys = jax.random.split(key, self.batch_shape[0])
        draw = jax.vmap(lambda step, key: step.sample(key, sample_shape), out_axes=len(sample_shape))
        return draw(self.steps, keys)

    @property
    def mean(self) -> Array:
        """E[y] at each step, shape batch + event."""
        return jax.vmap(lambda step: step.mean)(self.steps)

    @property
    def variance(self) -> Array:
        """Var[y] at each step, shape batch + event."""
        return jax.vmap(lambda step: step.variance)(self.steps)

    @property
    def support(self) -> Any:
        """The support of the first step; all steps have the same kind of values."""
        return jax.tree.map(lambda leaf: leaf[0], self.steps).support

    def _densities(self, density: Callable[[Any, Array], Array], value: ArrayLike) -> Array:
        y, shape = jnp.asarray(value), self.batch_shape + self.event_shape
        leading, given = y.ndim - len(shape), y.shape[max(y.ndim - len(shape), 0) :]
        lead = slice(1, 1 + getattr(unwrap(self.steps)[0], "lead", 0))  # one y for all enumerated values
        if any(n != 1 for n in given[lead]) or given[:1] + given[lead.stop :] != shape[:1] + shape[lead.stop :]:
            raise ValueError(f"y must have shape {shape} to match the likelihoods of {shape[0]} steps; got {y.shape}.")
        return jax.vmap(density, in_axes=(0, leading), out_axes=leading)(self.steps, y)


# `scan` calls this for each distribution that it has stacked; for a scan within a scan it does so twice.
for _kind in (ExpectedLikelihood, Mixture, Stacked):
    promote_batch_shape.register(_kind, Stacked)


def _stack_wrapped(kind: type) -> None:
    """Stack likelihoods within a wrapper of NumPyro, whose own function would misalign their arrays without calling the above."""
    of_others = promote_batch_shape.dispatch(kind)
    promote_batch_shape.register(kind, lambda d: Stacked(d) if is_expected(d.base_dist) else of_others(d))


for _kind in (dist.ExpandedDistribution, dist.TransformedDistribution):
    _stack_wrapped(_kind)
