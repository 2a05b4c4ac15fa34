"""Changes the inducing variables of fitted functions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import inspect, is_concrete
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.prior import check_jitter, decompose_sets
from numpyro_orthgp.functions.projection import Block, project
from numpyro_orthgp.gaussians.family import Full, Whitened
from numpyro_orthgp.inducing import Feature, as_sets
from numpyro_orthgp.math.cholesky import safe_cholesky
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.products import gram_transposed
from numpyro_orthgp.online.checks import check_function, check_gaussians
from numpyro_orthgp.online.moments import noise_of, project_sets, root_at, split
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["compress", "divergences", "drop_sets", "start_from"]


def divergences(f: GPFunction) -> Array:
    """The KL divergence of each set, KL[q(e_i) || N(0, I)] in nats. It is zero for a set that does nothing.

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import CollapsedGP, kernels, online
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> d = CollapsedGP(kernels.RBF(0.3), X, [X[::10], X[5::10]], 0.1)
    >>> print(online.divergences(d.posterior(jnp.sin(6 * X[:, 0]))).round(1))
    [14.2  1.8]

    :param f: a fitted function with the Gaussians of a guide.
    :return: shape (K,), one value for each set, without mean-only points.
    :raises ValueError: if ``f`` has values (an MCMC draw, conditioned or not).
    """
    check_gaussians("`divergences`", f)
    return _divergences(f.beliefs)


@one_program
def _divergences(beliefs: Sequence[Whitened]) -> Array:
    return jnp.stack([q.kl_from_prior() for q in beliefs])


def drop_sets(f: GPFunction, below: float = 0.01) -> GPFunction:
    """Drop the sets that do nothing, so that later steps cost less.

    If the last sets are dropped, the function loses only their contributions. Sets after a dropped one are computed again in the
    orthogonal complement of the remaining sets (:func:`compress`).

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import CollapsedGP, kernels, online
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> far = X + 100.0  # no data there
    >>> y, sets = jnp.sin(6 * X[:, 0]), [X[::10], far[::10]]
    >>> f = CollapsedGP(kernels.RBF(0.3), X, sets, 0.1).posterior(y)
    >>> f.num_inducing, online.drop_sets(f).num_inducing
    (10, 5)

    :param f: a fitted function with the Gaussians of a guide.
    :param below: sets with a smaller divergence are dropped, in nats. The set with the largest divergence is always kept.
    :raises ValueError: if ``f`` has values or, if a set must be dropped, mean-only points; under ``jit``, where divergences are not
        known.
    """
    cost = divergences(f)
    if not is_concrete(cost):
        raise ValueError("`drop_sets` looks at divergences and cannot run under jit.")
    kept = [i for i, c in enumerate(np.asarray(cost)) if c >= below] or [int(np.argmax(np.asarray(cost)))]
    count = len(kept)
    if count == len(f.features):
        return f
    if f.shift is not None:
        raise ValueError(
            f"`drop_sets` cannot drop {len(f.features) - count} of {len(f.features)} sets of a function with "
            "MeanOnly points: these are orthogonal to every set, so without a set they would change the mean "
            "differently. Fit again without it."
        )
    if kept == list(range(count)):
        return replace(f, features=f.features[:count], blocks=f.blocks[:count], beliefs=f.beliefs[:count])
    return compress(f, [f.features[i] for i in kept])


def compress(
    f: GPFunction, inducing: ArrayLike | Feature | Sequence[Any], *, jitter: float | None = None
) -> GPFunction:
    r"""Replace the inducing variables. At the new ones the function keeps q; elsewhere it follows the prior given these.

    .. math:: q(e') = N(W' E[u'], \; G G^\top), \qquad G = W' [A_1(Z')^\top T_1, \dots, R],

    where W' whitens the new sets, :math:`T_i T_i^\top = S_i`, and R is a root of the covariance that the old sets leave. The result
    is exact if the new variables determine the old ones. With several sets the covariance between sets is left out. Use it to limit
    the number of points in a stream, or to move a fit to better points.

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import CollapsedGP, kernels, online
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> f = CollapsedGP(kernels.RBF(0.3), X, X[::5], 0.1).posterior(jnp.sin(6 * X[:, 0]))
    >>> g = online.compress(f, X[::8])
    >>> g.num_inducing, bool(jnp.abs(f(X).mean - g(X).mean).max() < 0.05)
    (7, True)

    :param f: a fitted function.
    :param inducing: points, features or a list of sets, as for :func:`~numpyro_orthgp.gp`, but without
        :class:`~numpyro_orthgp.MeanOnly`.
    :param jitter: relative jitter of the new sets, as for :func:`~numpyro_orthgp.gp`.
    :return: a function with the same kernel, Gaussians of full covariance and no mean-only points. There is a warning if it has
        less than half of the :func:`divergences` of ``f``, and so has lost much of what the data said.
    :raises ValueError: for mean-only points, or as :func:`~numpyro_orthgp.gp` does.
    """
    check_function("compress", f)
    features, mean_only = as_sets(inducing)
    if mean_only is not None:
        raise ValueError(
            "`compress` takes no MeanOnly points: its result is a Gaussian at inducing variables, "
            "which cannot hold their part of the mean."
        )
    blocks, beliefs = _compress(f, features, check_jitter(jitter, features[0].dtype))
    return GPFunction(f.kernel, features, blocks, beliefs, num_latents=f.num_latents, tables=f.tables)


@one_program
def _compress(
    f: GPFunction, features: tuple[Feature, ...], jitter: float
) -> tuple[tuple[Block, ...], tuple[Full, ...]]:
    blocks = decompose_sets(f.kernel, features, jitter)
    mean = f.mean_from(features, project_sets(f, features))[..., None]
    root = root_at(f, features, noise_of(blocks, features))
    batch = () if f.num_latents is None else (f.num_latents,)
    beliefs = []
    for s, loc, G in zip(features, *(project(blocks, split(x, features, -2)) for x in (mean, root)), strict=True):
        scale = safe_cholesky(gram_transposed(jnp.swapaxes(G, -1, -2)), jnp.ones(G.shape[:-2], s.dtype))
        loc, scale = jnp.broadcast_to(loc[..., 0], (*batch, s.num)), jnp.broadcast_to(scale, (*batch, s.num, s.num))
        beliefs.append(Full(loc, scale))
    if not f.drawn:
        inspect(_warn_of_loss, jnp.stack([sum(q.kl_from_prior() for q in found) for found in (f.beliefs, beliefs)]))
    return blocks, tuple(beliefs)


def _warn_of_loss(nats: Array) -> None:
    before, after = np.asarray(nats)
    if after < before / 2 and before - after > 1:
        kept = round(max(float(after), 0.0), 3)
        warnings.warn(
            f"Of the {before:.3g} nats by which the function differs from its prior, the new inducing variables of `compress` keep "
            f"{kept:.2g}: much of what the data said is lost. Put the new points among the old ones, or take more.",
            UserWarning,
            stacklevel=2,
        )


def start_from(name: str, f: GPFunction) -> dict[str, Array]:
    """Convert a function to parameters of :func:`~numpyro_orthgp.gp_posterior`, for ``SVI.init(..., init_params=...)``.

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import CollapsedGP, kernels, online
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> f = CollapsedGP(kernels.RBF(0.3), X, X[::10], 0.1).posterior(jnp.sin(6 * X[:, 0]))
    >>> {name: value.shape for name, value in online.start_from("f", f).items()}
    {'f.u0_loc': (5,), 'f.u0_scale_tril': (5, 5)}

    :param name: the name of the gp.
    :param f: a function with Gaussians, from :func:`~numpyro_orthgp.posterior`, :func:`condition` or :func:`compress`.
    :return: ``{name}.u{i}_loc`` with ``{name}.u{i}_scale_tril``, ``{name}.u{i}_scale`` or other parameters of q's family; for
        mean-only points ``{name}.u{i}_weights``.
    :raises ValueError: if ``f`` has values (an MCMC draw, conditioned or not), or comes from ``f.diagonalized()``.
    """
    check_function("start_from", f)
    if not all(block.triangular for block in f.blocks):
        raise ValueError(
            "`start_from` needs a function in a guide's coordinates; got one that f.diagonalized() returned. Give it f."
        )
    check_gaussians("`start_from`", f)
    params = {f"{name}.u{i}_{part}": v for i, q in enumerate(f.beliefs) for part, v in q.parameters().items()}
    if f.shift is not None:
        params[f"{name}.u{len(f.beliefs)}_weights"] = f.shift.weights
    return params
