r"""Terms of a sum: the posterior of f_1 for f = f_1 + f_2 + ...

With independent priors, :math:`k = k_1 + k_2`, the inducing variables of f depend on both terms, and given q

.. math:: E[f_1(x)] = \sum_i A^1_i(x)^\top m_i, \qquad \mathrm{Var}[f_1(x)] = k_1(x, x)
    - \sum_i |A^1_i(x)|^2 + \sum_i A^1_i(x)^\top S_i A^1_i(x)

with :math:`A^1_i(x)` the projections of :math:`k_1(Z, x)` in place of :math:`k(Z, x)` (Duvenaud 2014, Sec. 2.4.5, for exact GPs).
This is exact given q(u): terms are correlated, and the means of all terms add up to the mean of f. A term is a functional of f in
the sense of :mod:`numpyro_orthgp.inducing.functional`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_orthgp.errors import inspect
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.inducing.functional import Functional, Values
from numpyro_orthgp.inducing.tasks import Tasks
from numpyro_orthgp.kernels.summands import Place, summands
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Term", "term_names", "variance_shares"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Term:
    """One summand of a function, or several together; the result of :meth:`GPFunction.term <numpyro_orthgp.GPFunction.term>`.

    Call it like the function itself. :meth:`at` gives the functional, for joint distributions of several terms.
    """

    f: Any
    places: tuple[Place, ...] = field(metadata={"static": True})

    def __call__(self, X: ArrayLike | Functional | Tasks) -> Marginals:
        """Marginals of the term at inputs, at a functional, or at rows of several tasks; as for ``f(X)``.

        :param X: shape (B, D), or a functional.
        :return: marginals of shape (B,), or (B, P) with P latent functions.
        """
        if isinstance(X, Tasks):
            return self.f(replace(X, X=self.at(X.X)))
        return self.f(self.at(X))

    def joint(self, X: ArrayLike | Functional) -> dist.MultivariateNormal:
        """Joint distribution of the term at inputs; as for ``f.joint(X)``."""
        return self.f.joint(self.at(X))

    def at(self, X: ArrayLike | Functional) -> Functional:
        """The functional of f: values of the term at inputs, or the given functional applied to the term.

        ::

            f.joint(concatenate([f.term("trend").at(X), f.term("season").at(X)]))
        """
        rows = X if isinstance(X, Functional) else Values(X)  # type: ignore[arg-type]
        return rows.of(self.places)


def term_names(f: Any) -> list[str]:
    """Names of a function's terms: those given by ``kernel.named``, or else the class, numbered if needed."""
    labels = [s.label for s in summands(f.kernel)]
    return [name if labels.count(name) == 1 else f"{name} {i}" for i, name in enumerate(labels)]


def variance_shares(f: Any, X: ArrayLike) -> dict[str, Array]:
    r"""The share of each term in the variance of the posterior mean over inputs.

    .. math:: \frac{\mathrm{Cov}_n(m_j(x_n), m(x_n))}{\mathrm{Var}_n(m(x_n))}, \qquad m = \sum_j m_j

    The shares add up to one. A share is negative if a term runs against the sum. Shares are of means only; the terms' bands show
    the uncertainty.

    :param f: a function whose kernel is a sum, from :func:`posterior`.
    :param X: inputs for the variance, shape (B, D), two or more.
    :return: the shares by name of the term, in order, shape () or (P,).
    :raises ValueError: for a single input, or if the mean is the same at all inputs and has no variance to share.
    """
    if len(X) < 2:  # type: ignore[arg-type]
        raise ValueError(f"`X` must hold two inputs or more, over which a mean varies; got {len(X)}.")  # type: ignore[arg-type]
    names = term_names(f)
    means = jnp.stack([f.term(i)(X).mean for i in range(len(names))])
    inspect(_refuse_no_variance, means.sum(0))
    means = means - means.mean(1, keepdims=True)
    total = means.sum(0)
    shares = (means * total).sum(1) / (total**2).sum(0)
    return dict(zip(names, shares, strict=True))


def _refuse_no_variance(mean: Array) -> None:
    values = np.asarray(mean)
    if (np.ptp(values, 0) <= 8 * np.finfo(values.dtype).eps * np.abs(values).max(0)).any():
        raise ValueError(
            "The posterior mean is the same at all inputs `X`, so it has no variance to share. Is the function fitted, and do the "
            "inputs differ?"
        )
