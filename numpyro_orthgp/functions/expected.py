r"""Moments of functions at Gaussian inputs, averaged in closed form.

For :math:`x \sim N(\mu, \mathrm{diag}(\sigma^2))` and f(x) given x with mean m(x), explained variance e(x) and residual r(x), the
first two moments of f(x) are

.. math:: E[f] = E[m], \qquad \mathrm{Var}[f] = \mathrm{Var}[m] + E[e] + E[r],

which are sums of the psi statistics of :mod:`numpyro_orthgp.kernels.expectations`. Under Gaussian noise the expected log density
depends only on these moments. So the bound of the Bayesian GP-LVM, with q(u) kept rather than integrated out, is exact on
minibatches, without draws (Damianou, Titsias, Lawrence 2016, Sec. 3.3, before the optimization over q(u)). The same holds for its
tightened form, whose v of each point (Titsias 2025, App. B.5), or V of each group (:mod:`numpyro_orthgp.functions.groups`), does
not depend on x.

**Nodes.** Kernels whose expectations have no closed form are evaluated at nodes, and where inputs are known to less than some
lengthscales or periods, these may be too few. ``nodes_miss`` compares with many more nodes: ``f.expected`` warns, and
:func:`~numpyro_orthgp.check` says it of a fit.

At the best q(u) the bound equals the collapsed one, loose or tight, up to rounding. Other likelihoods refuse these moments. Mixing
refuses them too, since functions that are independent at each input are not independent on average.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.functions.groups import covariance_of_groups
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.prior import Expectations, expect_covariances
from numpyro_orthgp.functions.projection import Block
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.inducing import Feature
from numpyro_orthgp.kernels.terms import terms
from numpyro_orthgp.math.compiled import is_within_program, one_program
from numpyro_orthgp.math.grouped import Grouping, gram_of_groups
from numpyro_orthgp.math.linalg import join
from numpyro_orthgp.math.products import PRECISION, matmul
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array, NumPoints, PRNGKey

__all__ = ["REMEDY", "TOO_MUCH", "AveragedMarginals", "Nodes", "average", "nodes_miss", "nodes_of", "words_of_nodes"]

TOO_MUCH = 0.01  # of the prior's standard deviation, that nodes miss
_FEW = 2  # inputs at which they are compared
REMEDY = (
    "Its inputs are uncertain by more than a lengthscale or a period of the kernel. Give more nodes (num_points=), or average f(X) "
    "over draws of the inputs."
)

# In float32 a direction beyond Hermite factors counts if it exceeds rounding errors times |m|^2 times this.
_SMALLEST_SEEN = 50.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Nodes:
    """What nodes averaged: arguments of ``nodes_miss``, which :func:`~numpyro_orthgp.check` calls."""

    kernel: Any
    features: tuple[Feature, ...]
    blocks: tuple[Block, ...]
    loc: Array
    scale: Array
    num_points: NumPoints = field(default=None, metadata={"static": True})

    def missed(self) -> Array:
        """Shape ()."""
        given = self.kernel, self.features, self.blocks, self.loc, self.scale
        return nodes_miss(*given, num_points=self.num_points)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AveragedMarginals(Marginals):
    """Means and variances averaged over uncertain inputs: the exact moments of non-Gaussian mixtures.

    They serve likelihoods that need only two moments, :class:`~numpyro_orthgp.likelihoods.Gaussian`. ``explained`` includes the
    variance of the mean.

    :param nodes: what was averaged by nodes; ``None`` where averages have a closed form.
    """

    nodes: Nodes | None = None

    def _draw(self, rng_key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> NoReturn:
        raise TypeError(
            "f.expected(X) cannot be drawn: averaged over uncertain inputs f is a mixture that is not Gaussian. Draw at a draw of "
            "the inputs: f(X).sample()."
        )

    def __matmul__(self, W: Any) -> NoReturn:
        raise TypeError(
            "f.expected(X) cannot be mixed by `@ W`: functions that are independent at each input are not so on average over "
            "inputs. Use draws of the inputs, f(X) @ W."
        )


@broadcasting
def average(
    kernel: Any,
    features: Sequence[Feature],
    blocks: Sequence[Block],
    beliefs: Sequence[Whitened],
    loc: Array,
    scale: Array,
    num_points: NumPoints,
    grouping: Grouping | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Mean, explained variance (with the variance of the mean) and residual variance at Gaussian inputs.

    :param loc: means of the inputs, shape (B, D).
    :param scale: their standard deviations, shape (B, D).
    :param grouping: if the residual's expected covariance within groups of consecutive inputs is wanted too.
    :return: shapes (..., B), (..., B) and (B,), with the leading axes of the beliefs; and (n, G, G), or ``None``.
    """
    m = join([q.loc for q in beliefs], -1, event_dim=1)
    magnified = _SMALLEST_SEEN * (1 + jnp.max(jnp.sum(m**2, -1)))
    psi = expect_covariances(kernel, features, blocks, loc, scale, num_points, magnified)
    mean = jnp.einsum("...m,mb->...b", m, psi.first, precision=PRECISION)
    groups = None
    if grouping is not None:
        groups = covariance_of_groups(kernel, loc, gram_of_groups([psi.first], *grouping), psi.residual, scale)
    explained = _explained(beliefs, m, psi)
    return mean, jnp.maximum(explained, 0), psi.residual, groups


def nodes_of(
    kernel: Any, features: Sequence[Feature], blocks: Sequence[Block], loc: Array, scale: Array, num_points: NumPoints
) -> Nodes | None:
    """``None`` where averages have a closed form. If values are known, as in predictions, too few nodes are said."""
    if terms(kernel, loc.shape[-1], loc.dtype) is not None:
        return None
    nodes = Nodes(kernel, tuple(features), tuple(blocks), loc, scale, num_points)
    known = not is_within_program() and all(map(is_concrete, jax.tree.leaves(nodes)))
    if known and (missed := float(nodes.missed())) > TOO_MUCH:
        warnings.warn(f"{words_of_nodes('f.expected(X)', missed)} {REMEDY}", UserWarning, stacklevel=3)
    return nodes


def words_of_nodes(name: str, missed: float) -> str:
    """A sentence."""
    return (
        f"Nodes that average {name} over uncertain inputs are too few: with many more it moves by {missed:.2g} of the prior's "
        "standard deviation."
    )


@one_program
def nodes_miss(
    kernel: Any,
    features: Sequence[Feature],
    blocks: Sequence[Block],
    loc: Array,
    scale: Array,
    *,
    num_points: NumPoints = None,
) -> Array:
    """By how much f moves with many more nodes, at the inputs that are known least, in units of the prior's standard deviation.

    It is the larger of two errors: of the mean, for a function like those of the prior, and of the residual's variance.
    """
    tiny = jnp.finfo(scale.dtype).tiny
    least = jnp.argsort(-jnp.sum(scale / jnp.maximum(scale.max(0), tiny), -1))[:_FEW]
    given = kernel, features, blocks, loc[least], scale[least]
    usual, many = expect_covariances(*given, num_points), expect_covariances(*given, "many")
    prior = jnp.maximum(many.residual + jnp.sum(many.first**2, 0), tiny)
    moved = jnp.sqrt(jnp.sum((usual.first - many.first) ** 2, 0) / prior)
    return jnp.max(jnp.maximum(moved, jnp.abs(usual.residual - many.residual) / prior))


def _explained(beliefs: Sequence[Whitened], m: Array, psi: Expectations) -> Array:
    eye = jnp.eye(m.shape[-1], dtype=m.dtype)
    S = _spread(beliefs, eye)
    explained = jnp.sum(psi.first * matmul(S, psi.first), -2)
    if psi.spread is not None:
        return explained + _contract(_square(beliefs, m, eye), psi.spread)
    if psi.centred is not None:
        return explained + _contract(_square(beliefs, m, psi.outer), psi.centred)
    assert psi.factors is not None and psi.raw is not None and psi.second is not None and psi.lacking is not None
    explained = explained + _contract(_square(beliefs, m, eye), _outer_products(psi.factors[1:]))
    # Subtracted before large factors multiply them.
    rest = _contract(_square(beliefs, m, psi.outer), psi.second - _outer_products(psi.raw))
    return explained + jnp.where(psi.lacking, rest, 0)


def _square(beliefs: Sequence[Whitened], m: Array, W: Array) -> Array:
    """W' E[e e'] W, shape (..., M, M)."""
    weights = jnp.einsum("mk,...m->...k", W, m, precision=PRECISION)
    return weights[..., :, None] * weights[..., None, :] + _spread(beliefs, W)


def _contract(forms: Array, second: Array) -> Array:
    """Averages of quadratic forms, shape (..., B), from forms (..., M, M) and second moments (B, M, M)."""
    return jnp.einsum("...mn,bmn->...b", forms, second, precision=PRECISION)


def _outer_products(factors: Array) -> Array:
    """The sum of outer products of factors (S, B, M), shape (B, M, M)."""
    return jnp.einsum("sbm,sbn->bmn", factors, factors, precision=PRECISION)


def _spread(beliefs: Sequence[Whitened], W: Array) -> Array:
    """The covariance of q in the coordinates of the kernel: W' S W, shape (..., M, M)."""
    total, start = jnp.zeros((W.shape[-1],) * 2, W.dtype), 0
    for q in beliefs:
        rows = W[start : start + q.loc.shape[-1]]
        start += len(rows)
        spread = q.spread(rows)
        if spread is not None:
            total = total + matmul(jnp.swapaxes(spread, -1, -2), spread)
    return total
