r"""Weighted sums of f over nodes, one sum for each row: averages of areas, differences, integrals by quadrature.

The covariances are double sums over the nodes of two rows, :math:`\sum_{qq'} w_q w'_{q'} k(x_q, x'_{q'})`. For any nodes these are
the exact covariances of the weighted sums, so no variance can turn negative. Only the quadrature rule decides how close a sum is to
an integral.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_finite, check_floating, check_inputs, check_integer, check_same_dtype, inspect
from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.inducing.functional import Concatenated, Evaluated, Functional, common_places
from numpyro_orthgp.inducing.points import InducingPoints
from numpyro_orthgp.kernels.boxes import box_terms, boxes_with_boxes, boxes_with_points
from numpyro_orthgp.kernels.smoothness import has_white
from numpyro_orthgp.kernels.summands import Place, select
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.types import Array, ArrayLike, KernelLike

__all__ = ["Average", "Integral", "centred"]

MAX_NODES = 10_000  # most nodes of one box


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Average(Functional):
    r"""Weighted sums :math:`\sum_q w_{bq} f(x_{bq})` over the nodes of each row, by default their average.

    Use it if y is an average over a bin, an area or a field of view, or a difference::

        numpyro.sample("y", likelihoods.Gaussian(f(Average(nodes, shares)), noise), obs=y)      # areas of a map
        pairs = Average(jnp.stack([A, B], 1), jnp.array([1.0, -1.0]))                            # f(a) - f(b)
        numpyro.sample("won", likelihoods.Bernoulli(f(pairs), "probit"), obs=won)

    A likelihood sees the average of f. ``Poisson(f(Average(...)))`` has the rate exp(average), the geometric mean of the
    rates at the nodes, which is below their average. For counts of an area use the sum of rates, ``likelihoods.PoissonOfSum``.

    >>> import jax.numpy as jnp, numpyro
    >>> from numpyro_orthgp import Average, gp, kernels
    >>> nodes = jnp.linspace(0.0, 1.0, 12).reshape(4, 3, 1)
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     f = gp("f", kernels.RBF(0.3), nodes[:, 0])
    >>> f(Average(nodes)).shape
    (4,)

    Cost: B Q kernel values with each inducing variable, and Q^2 for the variance of each row.

    :param nodes: shape (B, Q, D), units of the inputs.
    :param weights: shape (Q,) or (B, Q), of any sign and sum; by default 1 / Q. Pad rows that have fewer nodes with any nodes of
        weight zero.
    :param places: summands of the kernel to which it applies, set by ``f.term(...)``; ``None`` for the whole f.
    :raises TypeError: when used, if arrays are not floating, or of another dtype than the inducing variables.
    :raises ValueError: when used, for wrong shapes, NaN or infinity.
    """

    nodes: ArrayLike
    weights: ArrayLike | None = None
    places: tuple[Place, ...] | None = field(default=None, metadata={"static": True})

    @property
    def num(self) -> int:
        return jnp.shape(self.nodes)[0]

    @property
    def width(self) -> int:
        return jnp.shape(self.nodes)[1]

    @property
    def dtype(self) -> Any:
        return jnp.result_type(self.nodes)

    def checked(self, dim: int | None, dtype: Any) -> Average:
        nodes = check_floating("nodes", self.nodes)
        if nodes.ndim != 3 or 0 in nodes.shape:
            hint = " For one node in each row: nodes[:, None, :], or f(X)." if nodes.ndim == 2 else ""
            raise ValueError(f"`nodes` must have shape (B, Q, D), Q nodes for each row; got {nodes.shape}.{hint}")
        check_inputs("nodes.reshape(-1, D)", nodes.reshape(-1, nodes.shape[-1]), dim=dim)
        check_same_dtype("nodes", nodes, dtype)
        B, Q = nodes.shape[:2]
        if self.weights is None:
            return replace(self, nodes=nodes, weights=jnp.full((B, Q), 1 / Q, dtype))
        weights = check_finite("weights", check_floating("weights", self.weights))
        if weights.shape not in ((Q,), (B, Q)):
            raise ValueError(
                f"`weights` must have shape (Q,) or (B, Q) = {(B, Q)} to match `nodes`; got {weights.shape}."
            )
        return replace(self, nodes=nodes, weights=jnp.broadcast_to(weights, (B, Q)).astype(dtype))

    def apply(self, function: Evaluated) -> Array:
        nodes = jnp.asarray(self.nodes)
        B, Q, D = nodes.shape
        values = function(nodes.reshape(B * Q, D))
        weights = jnp.full((B, Q), 1 / Q, nodes.dtype) if self.weights is None else jnp.asarray(self.weights)
        weights = jnp.broadcast_to(weights, (B, Q))
        return jnp.einsum("...bq,bq->...b", values.reshape(*values.shape[:-1], B, Q), weights, precision=PRECISION)


def centred(X: ArrayLike, over: ArrayLike) -> Average:
    r"""Values at inputs minus the average over other inputs, :math:`f(x) - \frac1Q \sum_q f(x_q)`.

    Use it for terms of a sum, which data determine only up to a constant shared between terms.
    ``f.term("week")(centred(days, week))`` is the difference of days from the week's average, which is known far better than the
    term itself.

    :param X: inputs, shape (B, D).
    :param over: inputs for the average, shape (Q, D): a few dozen that cover the range of the term.
    :return: weighted sums of Q + 1 nodes for each row.
    :raises TypeError: if arrays are not floating.
    :raises ValueError: if shapes do not match.
    """
    X, over = check_inputs("X", X), check_inputs("over", over, dim=jnp.shape(X)[-1])
    nodes = jnp.concatenate([X[:, None], jnp.broadcast_to(over, (len(X), *over.shape))], 1)
    return Average(nodes, jnp.concatenate([jnp.ones(1), jnp.full(len(over), -1 / len(over))]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Integral(Functional):
    r"""Integrals of f over boxes, :math:`\int_a^b f(x)\, dx`, or averages over them, one box for each row.

    Covariances with inducing points and other functionals have closed forms for RBF and constant kernels on any columns, also
    scaled, summed and multiplied. Other kernels, and paths, use the Gauss-Legendre rule with ``num_nodes`` in each dimension, exact
    for polynomials of degree 2 ``num_nodes`` - 1. For kernels as smooth as RBF, eight nodes are exact to 1e-6 in boxes up to three
    lengthscales wide. For a kernel with a kink (Matern) the error falls as a power of ``num_nodes``. Covariances of two boxes use
    the product of both rules.

    >>> import jax.numpy as jnp, numpyro
    >>> from numpyro_orthgp import Integral, gp, kernels
    >>> edges = jnp.linspace(0.0, 1.0, 6)[:, None]
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     f = gp("f", kernels.RBF(0.3), edges)
    >>> whole, bins = f(Integral(edges[:1], edges[-1:])), f(Integral(edges[:-1], edges[1:]))
    >>> bool(jnp.allclose(whole.mean[0], bins.mean.sum(), atol=1e-4))
    True

    :param lower: lower corners a of the boxes, shape (B, D), units of the inputs.
    :param upper: upper corners b, shape (B, D), not below the lower ones.
    :param average: whether to divide each integral by the volume of its box.
    :param num_nodes: nodes in each dimension; at most 10,000 for a box.
    :param exact: whether to use the closed form if there is one.
    :param places: summands of the kernel to which it applies, set by ``f.term(...)``; ``None`` for the whole f.
    :raises TypeError: when used, if arrays are not floating, or of another dtype than the inducing variables.
    :raises ValueError: when used, for wrong shapes, corners in the wrong order, or too many nodes.
    """

    lower: ArrayLike
    upper: ArrayLike
    average: bool = field(default=False, metadata={"static": True})
    num_nodes: int = field(default=8, metadata={"static": True})
    exact: bool = field(default=True, metadata={"static": True})
    places: tuple[Place, ...] | None = field(default=None, metadata={"static": True})

    @property
    def num(self) -> int:
        return jnp.shape(self.lower)[0]

    @property
    def width(self) -> int:
        return self.num_nodes ** jnp.shape(self.lower)[-1]

    @property
    def dtype(self) -> Any:
        return jnp.result_type(self.lower)

    def checked(self, dim: int | None, dtype: Any) -> Integral:
        lower, upper = check_inputs("lower", self.lower, dim=dim), check_inputs("upper", self.upper)
        if lower.shape != upper.shape:
            raise ValueError(f"`lower` and `upper` must have one shape (B, D); got {lower.shape} and {upper.shape}.")
        for name, corner in (("lower", lower), ("upper", upper)):
            check_same_dtype(name, corner, dtype)
        nodes = check_integer("num_nodes", self.num_nodes)
        if nodes ** lower.shape[1] > MAX_NODES:
            raise ValueError(
                f"{nodes} nodes in each of {lower.shape[1]} dimensions are more than {MAX_NODES} for a box. Take fewer, or "
                "nodes of your own: Average(nodes, weights)."
            )
        inspect(_refuse_inverted, lower, upper)
        return replace(self, lower=lower, upper=upper)

    def check(self, kernel: Any) -> None:
        if has_white(kernel):
            raise ValueError(
                "White noise has no integral: the result would depend on the number of nodes. Leave white noise "
                "to the likelihood, or ask for the integral of the other terms: f.term(...)(Integral(lower, "
                "upper))."
            )

    def is_exact(self, kernel: Any) -> bool:
        return self.exact and self._terms(kernel) is not None

    def by_nodes(self) -> Integral:
        return replace(self, exact=False)

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        if not isinstance(other, Functional) or isinstance(other, Concatenated):
            return super().covariance(kernel, other)
        places = common_places(self.places, other.places)
        part = select(kernel, places)
        if part is None or not self.is_exact(part):
            return super().covariance(kernel, other)
        if not (isinstance(other, Integral) and other.exact):
            other.check(part)
            return other.apply(lambda X: self._with_inputs(part, X))
        found, (lower, upper) = self._terms(part), self._corners
        return self._volume[:, None] * boxes_with_boxes(found, lower, upper, *other._corners) * other._volume

    def covariance_with_feature(self, kernel: KernelLike, feature: Feature) -> Array:
        part = select(kernel, self.places)
        points = feature.points if isinstance(feature, InducingPoints) else None
        if points is None or points.ndim > 2 or not self.is_exact(part):
            return super().covariance_with_feature(kernel, feature)
        return self._with_inputs(part, points).T

    def _with_inputs(self, part: KernelLike, X: Array) -> Array:
        """Covariance with values at inputs, shape (B, n), in closed form."""
        return self._volume[:, None] * boxes_with_points(self._terms(part), *self._corners, X)

    def _terms(self, kernel: KernelLike) -> Any:
        return box_terms(kernel, jnp.shape(self.lower)[-1], self.dtype)

    @property
    def _corners(self) -> tuple[Array, Array]:
        return jnp.asarray(self.lower), jnp.asarray(self.upper)

    @property
    def _volume(self) -> Array:
        lower, upper = self._corners
        return jnp.ones(len(lower), lower.dtype) if self.average else jnp.prod(upper - lower, -1)

    def apply(self, function: Evaluated) -> Array:
        lower, upper = self._corners
        D = lower.shape[-1]
        x, w = np.polynomial.legendre.leggauss(self.num_nodes)
        grid = np.stack(np.meshgrid(*[(x + 1) / 2] * D, indexing="ij"), -1).reshape(-1, D)
        shares = np.prod(np.stack(np.meshgrid(*[w / 2] * D, indexing="ij"), -1).reshape(-1, D), -1)
        nodes = lower[:, None] + (upper - lower)[:, None] * jnp.asarray(grid, lower.dtype)
        return Average(nodes, self._volume[:, None] * jnp.asarray(shares, lower.dtype)).apply(function)


def _refuse_inverted(lower: Array, upper: Array) -> None:
    bad = np.asarray(lower) > np.asarray(upper)
    if bad.any():
        raise ValueError(
            f"`lower` must not be above `upper`; got {int(bad.sum())} corners that are, the first at "
            f"{tuple(int(i) for i in np.argwhere(bad)[0])}."
        )
