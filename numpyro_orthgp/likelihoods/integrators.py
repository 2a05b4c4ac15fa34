"""How expectations under Gaussians are integrated: nodes and weights for each latent function, or random ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.math.quadrature import gauss_hermite, quasi_normal
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["GaussHermite", "Integrator", "MonteCarlo", "QuasiMonteCarlo"]


@dataclass(frozen=True)
class GaussHermite:
    """Integrate by the Gauss-Hermite rule, ``num_points`` nodes for each latent function that a point mixes."""

    num_points: int = 20

    def nodes(
        self, rng_key: PRNGKey | None, batch: tuple[int, ...], dim: int | None, dtype: Any
    ) -> tuple[Array, Array]:
        nodes, weights = gauss_hermite(self.num_points, dim or 1)
        nodes = nodes.reshape((-1,) + (1,) * len(batch) + ((dim,) if dim else ()))
        return jnp.asarray(nodes, dtype), jnp.asarray(weights, dtype)


@dataclass(frozen=True)
class QuasiMonteCarlo:
    """Integrate by ``num_points`` randomly shifted Sobol points, with a shift of its own for each data point."""

    num_points: int = 128

    def nodes(
        self, rng_key: PRNGKey | None, batch: tuple[int, ...], dim: int | None, dtype: Any
    ) -> tuple[Array, Array]:
        nodes = quasi_normal(_or_fixed(rng_key), self.num_points, batch, dim or 1, dtype)
        return nodes if dim else nodes[..., 0], jnp.full(self.num_points, 1 / self.num_points, dtype)


@dataclass(frozen=True)
class MonteCarlo:
    """Integrate by ``num_points`` independent draws."""

    num_points: int = 128

    def nodes(
        self, rng_key: PRNGKey | None, batch: tuple[int, ...], dim: int | None, dtype: Any
    ) -> tuple[Array, Array]:
        shape = (self.num_points, *batch, *((dim,) if dim else ()))
        return jax.random.normal(_or_fixed(rng_key), shape, dtype), jnp.full(
            self.num_points, 1 / self.num_points, dtype
        )


Integrator = GaussHermite | QuasiMonteCarlo | MonteCarlo


def _or_fixed(rng_key: PRNGKey | None) -> PRNGKey:
    # Without randomness (NUTS) the same nodes each time: a deterministic objective.
    return jax.random.PRNGKey(0) if rng_key is None else rng_key
