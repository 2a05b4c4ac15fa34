r"""Moments of functions at Gaussian inputs, averaged in closed form.

For :math:`x \sim N(\mu, \mathrm{diag}(\sigma^2))` and f(x) given x with mean m(x), explained variance e(x) and residual r(x), the
first two moments of f(x) are

.. math:: E[f] = E[m], \qquad \mathrm{Var}[f] = \mathrm{Var}[m] + E[e] + E[r],

which are sums of the psi statistics of :mod:`numpyro_orthgp.kernels.expectations`. Under Gaussian noise the expected log density
depends only on these moments. So the bound of the Bayesian GP-LVM, with q(u) kept rather than integrated out, is exact on
minibatches, without draws (Damianou, Titsias, Lawrence 2016, Sec. 3.3, before the optimization over q(u)). The same holds for its
tightened form, whose v of each point (Titsias 2025, App. B.5), or V of each group (:mod:`numpyro_orthgp.functions.groups`), does
not depend on x.

At the best q(u) the bound equals the collapsed one, loose or tight, up to rounding. Other likelihoods refuse these moments. Mixing
refuses them too, since functions that are independent at each input are not independent on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from numpyro_orthgp.functions.groups import covariance_of_groups
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.prior import Expectations, expect_covariances
from numpyro_orthgp.functions.projection import Block
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.inducing import Feature
from numpyro_orthgp.math.grouped import Grouping, gram_of_groups
from numpyro_orthgp.math.linalg import join
from numpyro_orthgp.math.products import PRECISION, matmul
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["AveragedMarginals", "average"]

# In float32 a direction beyond Hermite factors counts if it exceeds rounding errors times |m|^2 times this.
_SMALLEST_SEEN = 50.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AveragedMarginals(Marginals):
    """Means and variances averaged over uncertain inputs: the exact moments of non-Gaussian mixtures.

    They serve likelihoods that need only two moments, :class:`~numpyro_orthgp.likelihoods.Gaussian`. ``explained`` includes the
    variance of the mean.
    """

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
    num_points: int,
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
    explained = _explained(beliefs, m, mean, psi)
    return mean, jnp.maximum(explained, 0), psi.residual, groups


def _explained(beliefs: Sequence[Whitened], m: Array, mean: Array, psi: Expectations) -> Array:
    if psi.factors is None and psi.spread is None:
        assert psi.second is not None
        return _contract(_square(beliefs, m, psi.outer), psi.second) - mean**2
    eye = jnp.eye(m.shape[-1], dtype=m.dtype)
    S = _spread(beliefs, eye)
    explained = jnp.sum(psi.first * matmul(S, psi.first), -2)
    if psi.spread is not None:
        return explained + _contract(_square(beliefs, m, eye), psi.spread)
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
