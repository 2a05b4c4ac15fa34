"""The Gaussian that any guide has at the sites of a gp, if a function can carry it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import transforms
from numpyro.infer.autoguide import AutoContinuous, AutoGuideList, AutoLaplaceApproximation

from numpyro_orthgp.gaussians.distributions import WhitenedGaussian
from numpyro_orthgp.gaussians.family import Diagonal, Full, Whitened
from numpyro_orthgp.math.cholesky import safe_cholesky
from numpyro_orthgp.math.products import diagonal, matmul
from numpyro_orthgp.math.triangular import solve_lower
from numpyro_orthgp.primitives.messages import site_of
from numpyro_orthgp.types import Array

__all__ = ["flat_gaussians", "gaussian_of", "read_by_others", "what_is_read"]

Trace = dict[str, dict[str, Any]]


def gaussian_of(fn: Any, shape: tuple[int, ...]) -> Whitened | None:
    """A distribution as the Gaussian of whitened inducing variables; ``None`` if it is not Gaussian.

    :param fn: a normal or multivariate normal distribution, possibly beneath ``to_event``, ``expand`` or affine transforms.
    :param shape: shape of the site, (M,) or (P, M); variables of different rows must be independent.
    """
    if fn.shape() != shape:
        return None
    while isinstance(fn, (dist.Independent, dist.ExpandedDistribution)):
        fn = fn.base_dist
    if isinstance(fn, dist.TransformedDistribution):
        return _transformed(gaussian_of(fn.base_dist, shape), fn.transforms)
    if isinstance(fn, WhitenedGaussian):
        return fn.q
    if isinstance(fn, dist.Normal):
        return Diagonal(jnp.broadcast_to(fn.loc, shape), jnp.broadcast_to(fn.scale, shape))
    if isinstance(fn, (dist.MultivariateNormal, dist.LowRankMultivariateNormal)):
        return Full(jnp.broadcast_to(fn.loc, shape), jnp.broadcast_to(_root(fn), (*shape, shape[-1])))
    return None


def _transformed(q: Whitened | None, maps: Sequence[transforms.Transform]) -> Whitened | None:
    """The Gaussian of affine maps of a Gaussian, such as loc + L e."""
    for each in maps:
        inner = each.base_transform if isinstance(each, transforms.IndependentTransform) else each
        if q is None or isinstance(inner, transforms.IdentityTransform):
            continue
        if isinstance(inner, transforms.ComposeTransform):
            q = _transformed(q, inner.parts)
        elif isinstance(inner, transforms.AffineTransform):
            scale = jnp.broadcast_to(inner.scale, q.loc.shape)
            if isinstance(q, Diagonal):
                q = Diagonal(inner(q.loc), abs(scale * q.scale))
            else:
                q = Full(inner(q.loc), scale[..., None] * q.lower_root())
        elif isinstance(inner, transforms.LowerCholeskyAffine):
            root = q.lower_root()
            q = Full(inner(q.loc), matmul(jnp.broadcast_to(inner.scale_tril, root.shape), root))
        else:
            return None
    return q


def flat_gaussians(guide: Any, params: Mapping[str, Any], trace: Trace, laplace: bool) -> dict[str, Whitened]:
    """The same for NumPyro's guides with one joint Gaussian of all sites, whose single sites are deltas; by name of the site.

    For one set of one function it is the Gaussian given the guide's draws of all other sites, such as hyperparameters. Several
    correlated sets or functions have no separate Gaussians, so they are left out.

    :param trace: trace of ``guide``, run with ``params``.
    :param laplace: whether a Laplace approximation has its data, which it takes from its first call.
    """
    found: dict[str, Whitened] = {}
    for part in _parts(guide):
        flat = trace.get(f"_{part.prefix}_latent")
        ours = {
            n: site["value"].shape for n, s in part.prototype_trace.items() if site_of(s) and (site := trace.get(n))
        }
        if flat is None or not ours:
            continue
        fn, value = flat["fn"], flat["value"]
        if isinstance(part, AutoLaplaceApproximation) and laplace:
            fn = part.get_posterior(dict(params))
        q = gaussian_of(fn, value.shape)
        places = part._unpack_latent(np.arange(part.latent_dim))
        if isinstance(q, Diagonal):
            found |= {n: Diagonal(q.loc[places[n]], q.scale[places[n]]) for n in ours}
        elif q is not None and len(ours) == 1:
            ((name, shape),) = ours.items()
            if len(shape) == 1 or shape[0] == 1:
                found[name] = _given_rest(q, value, places[name])
    return found


def read_by_others(run: Callable[[dict[str, Array]], Trace], values: dict[str, Array]) -> set[str]:
    """Sites of a guide on whose draws the distributions of other sites depend.

    :param run: maps values of sites to the guide's trace with these values.
    """
    return set().union(*(found - {name} for name, found in what_is_read(run, values, values).items()))


def what_is_read(
    run: Callable[[dict[str, Array]], Trace], values: dict[str, Array], of: Collection[str]
) -> dict[str, set[str]]:
    """Sites and parameters on whose values the distributions of some sites depend, by name of the site.

    :param run: maps values of sites and parameters to the trace with these values.
    :param of: names of the sites whose distributions are examined.
    """

    def distributions(values: dict[str, Array]) -> dict[str, list[Any]]:
        trace = run(values)
        return {n: [v for v in jax.tree.leaves(trace[n]["fn"]) if hasattr(v, "dtype")] for n in of if n in trace}

    program, shape = jax.make_jaxpr(distributions, return_shape=True)(values)
    leaves = [n for n in sorted(values) for _ in jax.tree.leaves(values[n])]  # in JAX's order of a dict's leaves
    sources: dict[Any, set[str]] = {v: {n} for v, n in zip(program.jaxpr.invars, leaves, strict=True)}

    def of_atoms(atoms: Collection[Any]) -> set[str]:
        return set().union(*(sources.get(a, set()) for a in atoms if not hasattr(a, "val")))

    for equation in program.jaxpr.eqns:
        known = of_atoms(equation.invars)
        sources |= dict.fromkeys(equation.outvars, known)
    left = iter(program.jaxpr.outvars)
    return {name: of_atoms([next(left) for _ in shape[name]]) for name in sorted(shape)}


def _parts(guide: Any) -> Iterator[Any]:
    """NumPyro's guides with one joint Gaussian."""
    if isinstance(guide, AutoGuideList):
        for part in guide:
            yield from _parts(part)
    elif isinstance(guide, AutoContinuous):
        yield guide


def _root(fn: dist.Distribution) -> Array:
    if isinstance(fn, dist.MultivariateNormal):
        return fn.scale_tril
    C = fn.covariance_matrix
    return safe_cholesky(C, jnp.ones(C.shape[:-2], C.dtype))


def _given_rest(q: Whitened, value: Array, places: np.ndarray) -> Whitened:
    """The Gaussian of some variables given the values of all others.

    :param places: positions of these variables, shape (M,) or (1, M).
    """
    own = places.ravel()
    rest = np.setdiff1d(np.arange(len(q.loc)), own)
    # With the other variables first, L L' = R'R for the rows of L in this order, and the last block of R' is the conditional.
    lower = jnp.linalg.qr(q.lower_root()[np.concatenate([rest, own])].T, mode="r").T
    lower = lower * jnp.where(diagonal(lower) < 0, -1, 1)
    head, tail = lower[: len(rest), : len(rest)], lower[len(rest) :]
    loc, scale = q.loc[own], tail[:, len(rest) :]
    if len(rest):
        # A Laplace approximation without a covariance is one of zeros: its point.
        head = head + jnp.diag(jnp.where(diagonal(head) == 0, 1, 0).astype(head.dtype))
        loc = loc + tail[:, : len(rest)] @ solve_lower(head, (value - q.loc)[rest][:, None])[:, 0]
    return Full(loc.reshape(places.shape), scale.reshape(*places.shape[:-1], *scale.shape))
