"""Uncertain inputs: the latent variables of a GP-LVM.

**q(u) lags behind q(X).** If q(u) is kept, moving latent inputs worsens the fit until q(u) follows. So steps of X must be as small
as the noise. On the oil flow data, minibatch fits from principal components stay below the collapsed bound for long
(docs/results.md), although both bounds are equal at the same parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.errors import check_inputs
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["LatentInputs"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentInputs:
    """Latent inputs of B points: a draw, and the Gaussian that it comes from, if a guide provides it.

    Where an array is expected, as in ``f(X)``, the draw is used; :class:`~numpyro_orthgp.CollapsedGP` uses the Gaussian, if there
    is one.

    :param value: the draw, shape (B, D).
    :param loc: mean of the Gaussian, shape (B, D), or ``None``.
    :param scale: its standard deviations, shape (B, D); zero in observed columns.
    """

    value: Array
    loc: Array | None = None
    scale: Array | None = None

    def __jax_array__(self) -> Array:
        return self.value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    def beside(self, covariates: ArrayLike) -> LatentInputs:
        """These inputs with observed covariates as further columns on the right.

        :param covariates: shape (B, C).
        :return: inputs with D + C columns, the last C of them certain.
        :raises ValueError: if there is not one row for each point.
        """
        columns = check_inputs("covariates", covariates)
        if columns.shape[0] != self.shape[0]:
            raise ValueError(
                f"`covariates` must have one row for each of the {self.shape[0]} points; got shape {columns.shape}. In a plate "
                "that subsamples take its rows: covariates[index]."
            )

        def join(own: Array, other: Array) -> Array:
            return jnp.concatenate([own, other.astype(own.dtype)], -1)

        if self.loc is None or self.scale is None:
            return LatentInputs(join(self.value, columns))
        return LatentInputs(
            join(self.value, columns), join(self.loc, columns), join(self.scale, jnp.zeros_like(columns))
        )
