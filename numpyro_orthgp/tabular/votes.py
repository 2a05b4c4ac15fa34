r"""Class probabilities that also use the labels of the rows nearest to each input.

A few inducing points follow the slow part of the functions of many rows. What near rows say beyond that is counted: with
:math:`\hat p_c(x)` the probabilities of the functions, the rows b near an input x and their labels give

.. math::
    p_c(x) = \frac{a \, \hat p_c(x) + \sum_b k_b [y_b = c]}{a + \sum_b k_b}, \qquad k_b = k_{5/2}(x, x_b; s \ell) .

This is the mean of class probabilities whose prior is a Dirichlet distribution of mean :math:`\hat p` and total a, after
observations that count as much as their inputs are alike: one for a row with the same input, nothing for one that is some
lengthscales away. So far from all rows the functions' probabilities stay. The lengthscales are the model's. Held-out rows decide
on a and s, and on whether to count at all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.functions.neighbors import nearest_rows
from numpyro_orthgp.kernels import Matern52
from numpyro_orthgp.math.compiled import quick_jit
from numpyro_orthgp.tabular.blocks import in_blocks
from numpyro_orthgp.tabular.stored import PART
from numpyro_orthgp.types import Array

__all__ = ["REACHES", "TOTALS", "Votes", "VotesOf"]

NEAR = 64  # rows near an input
MANY = 5000  # rows from which a program that is compiled as JAX does saves more time than compiling it takes
REACHES = tuple(2.0**k for k in (-10, -8, *range(-6, 1)))
TOTALS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Votes(NamedTuple):
    """
    :param reach: s, in lengthscales: how far rows count.
    :param total: a, the number of rows that the probabilities of the functions stand for.
    """

    reach: float
    total: float

    def mixed(self, p: Any, counted: Any) -> Any:
        """Class probabilities, from those of the functions and the counted labels of near rows, shape (N, C) each."""
        mixed = self.total * p + counted
        return mixed / mixed.sum(-1, keepdims=True)


class VotesOf(NamedTuple):
    """The rows whose labels count, a pytree.

    :param lengthscale: those of the model, shape (D,).
    :param X: standardized rows, shape (N, D).
    :param labels: one where a row is of the class, else zero, shape (N, C).
    """

    lengthscale: Array
    X: Array
    labels: Array

    @classmethod
    def rows(cls, lengthscale: Any, X: np.ndarray, y: np.ndarray, num_classes: int) -> VotesOf:
        """
        :param X, y: rows and classes; if there are more than 100,000, the first of them are taken.
        """
        return cls(*map(jnp.asarray, (lengthscale, X[:PART], np.eye(num_classes)[y[:PART]])))

    def near(self, X: Array) -> tuple[Array, Array]:
        """Squared distances of the nearest rows in lengthscales, shape (B, H), and their labels, shape (B, H, C)."""
        # The order of near ties does not matter, but the distance of a row with the same input must be zero.
        kernel, new, rows = jax.tree.map(lambda a: a.astype(jnp.float32), (Matern52(self.lengthscale), X, self.X))
        found = nearest_rows(kernel, new, rows, min(NEAR, len(self.X)))
        return jnp.sum(((X[:, None] - self.X[found]) / self.lengthscale) ** 2, -1), self.labels[found]

    def counted(self, X: Array, reaches: tuple[Any, ...]) -> tuple[Array, ...]:
        """Labels of the rows near each input, shape (B, C) for each reach: a label counts as much as the inputs are alike."""
        squared, labels = self.near(X)
        alike = [Matern52(1.0).profile(squared / s**2) for s in reaches]
        return tuple(jnp.einsum("bh,bhc->bc", each, labels) for each in alike)

    def counted_each(self, X: Array, reach: float) -> Array:
        """The same one row at a time, within a program for any number of rows."""
        return jax.lax.map(lambda x: self.counted(x[None], (reach,))[0][0], X)

    def counted_at(self, X: np.ndarray, reaches: tuple[float, ...]) -> tuple[np.ndarray, ...]:
        """The same at any number of inputs. At most three programs are compiled."""
        counted = _counted if len(self.X) < MANY else _counted_of_many
        return in_blocks(counted, (self, tuple(map(jnp.asarray, reaches))), X)


def _program(given: tuple[VotesOf, tuple[Any, ...]], X: Array) -> tuple[Array, ...]:
    rows, reaches = given
    return rows.counted(X, reaches)


_counted, _counted_of_many = quick_jit(_program, 1), quick_jit(_program, 2)
