"""Likelihoods that plates expand, under inference that hands y to nothing else than the log density: NUTS, NumPyro's guides."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_orthgp.functions.plates import at_another_axis
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Expanded"]


class Expanded(dist.ExpandedDistribution):
    """A likelihood with axes of plates that it does not have by itself."""

    def log_prob(self, value: ArrayLike, intermediates: list[Any] | None = None) -> Array:
        """
        :raises ValueError: if y lacks such an axis too, and it has as many entries as the likelihood has rows, each of which would
            count as often.
        """
        batch = self.base_dist.batch_shape
        own = jnp.shape(value)[: jnp.ndim(value) - self.event_dim]
        for plate, size in (*self._expanded_sizes.items(), *self._interstitial_sizes.items()):
            if 1 < size in batch and (-plate > len(own) or own[plate] == 1):
                words = at_another_axis(size, batch.index(size) - len(batch), plate)
                raise ValueError(f"A site counts each of its observations {words}")
        return super().log_prob(value, intermediates)
