"""The primitive :func:`orthogonal`: the sets of a collapsed GP that are not integrated out.

A distribution cannot declare sites, so a model needs this extra line. It declares sites as ``gp`` does, any guide gives them
Gaussians, and ``CollapsedGP(..., orthogonal=...)`` integrates out the first set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.inducing import Feature, as_sets
from numpyro_orthgp.primitives.divergence import check_divergence
from numpyro_orthgp.primitives.messages import Site, inducing_site, known, refuse_handlers_of_rows
from numpyro_orthgp.types import ArrayLike

__all__ = ["orthogonal"]


def orthogonal(
    name: str, inducing: ArrayLike | Feature | Sequence[Any], *, num_latents: int | None = None
) -> tuple[Whitened, ...]:
    r"""Declare the whitened inducing variables of the second and later sets of a :class:`CollapsedGP`.

    ``CollapsedGP`` integrates out its first set. The others are latent sites ``{name}.u1``, ``{name}.u2``, ... with prior
    N(0, I), as in :func:`gp`. A guide gives them Gaussians, the q(v) of Shi et al. 2020, Eq. 21; covariance "prior" in the guide
    gives the special case Eq. 22::

        v = orthogonal("f", O)
        numpyro.sample("y", CollapsedGP(kernel, X, [Z, O], noise, orthogonal=v), obs=y)

    Without both, ``CollapsedGP(kernel, X, [Z, O], noise)`` uses the best q(v) in closed form, at the cost of a joint Cholesky
    factor of all sets.

    :param name: name of the function, the prefix of the sites.
    :param inducing: the sets after the first, as for :func:`gp`.
    :param num_latents: number D of outputs if y has shape (N, D); ``None`` for y of shape (N,).
    :return: for each set the guide's Gaussian, or a value.
    :raises ValueError: inside a plate, or a mask or scale of rows; for mean-only points, which belong to :func:`gp`.
    """
    refuse_handlers_of_rows(name)
    features, mean_only = as_sets(inducing)
    if mean_only is not None:
        raise ValueError("`orthogonal` takes no MeanOnly points; use gp(...), or a set whose covariance is 'prior'.")
    batch = () if num_latents is None else (num_latents,)
    sites = [Site(i, (*batch, s.num), s.dtype) for i, s in enumerate(features, start=1)]
    messages = [inducing_site(f"{name}.u{site.position}", site) for site in sites]
    check_divergence(messages)
    return tuple(map(known, messages))
