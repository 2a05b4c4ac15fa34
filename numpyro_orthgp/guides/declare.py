"""Guides by hand: :func:`gp_posterior` and :func:`latent_inputs_posterior` declare the Gaussians and hand them to the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_orthgp.errors import check_floating, check_option, inspect
from numpyro_orthgp.gaussians.constraints import dense_lower_cholesky
from numpyro_orthgp.gaussians.constraints import natural as natural_constraint
from numpyro_orthgp.gaussians.distributions import WhitenedGaussian
from numpyro_orthgp.gaussians.family import COVARIANCES, Whitened
from numpyro_orthgp.primitives.messages import Belief, InputBelief
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["RESIDUALS", "SetOfQ", "declare_sets", "gp_posterior", "latent_inputs_posterior", "per_set"]

RESIDUALS = ("prior", "tight")


def gp_posterior(
    name: str,
    num_inducing: int | Sequence[int],
    *,
    covariance: str | Sequence[str] = "full",
    residual: str = "prior",
    num_latents: int | None = None,
    natural: bool = False,
    analytic: bool = True,
    init_scale: float = 1.0,
    dtype: Any = None,
    first: int = 0,
) -> list[Array]:
    """Declare q for one gp in a hand-written guide.

    For each set i it declares the param sites ``{name}.u{i}_loc``, shape (M_i,) or (P, M_i), and ``{name}.u{i}_scale_tril``,
    shape (M_i, M_i) or (P, M_i, M_i), for covariance "full", or ``{name}.u{i}_scale`` for "diagonal"; then the sample
    site ``{name}.u{i}``. A ``MeanOnly`` set has its weights in the model and is not counted here.

    :param name: the name that the model gave its gp.
    :param num_inducing: number of inducing variables, one per set.
    :param covariance: of q in whitened coordinates: "full", "diagonal" or "prior" (the identity); one for all sets or one per set.
    :param residual: "tight" for the tightened bound of Titsias 2025 (a param site ``{name}_residual_scale`` for v, used by
        likelihoods that are not Gaussian, whose optimal v is known), or "prior".
    :param num_latents: P, if the model's gp has it.
    :param natural: whether :func:`~numpyro_orthgp.natural_gradient` is to step these Gaussians, and ``MeanOnly`` weights have
        preconditioned gradients. Names and values of the parameters are the same.
    :param analytic: whether the model integrates over the Gaussian while it is fitted, or sees samples only, as
        importance-weighted objectives (``RenyiELBO``) need. :func:`posterior` has the Gaussian in any case.
    :param init_scale: standard deviation, in whitened coordinates, that q starts with; 1 is the prior's. Small ones suit inner
        layers of deep GPs, which then start near their mean functions.
    :param dtype: dtype of the parameters; default JAX's default floating dtype.
    :param first: position of the first set declared here: 1 for those of :func:`orthogonal`, whose first set is integrated out.
    :return: a sample of the whitened inducing variables of each set.
    :raises ValueError: for an unknown option or a wrong number of them.
    """
    sizes = [num_inducing] if isinstance(num_inducing, int) else list(num_inducing)
    kinds = per_set("covariance", covariance, len(sizes))
    check_option("residual", residual, RESIDUALS)
    sets = [SetOfQ(i, size, kind) for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True), start=first)]
    batch = () if num_latents is None else (num_latents,)
    return declare_sets(
        name,
        sets,
        tight=residual == "tight" and first == 0,  # where the first set is integrated out, so is v
        batch=batch,
        natural=natural,
        analytic=analytic,
        init_scale=init_scale,
        dtype=jnp.dtype(dtype or jnp.result_type(float)),
    )


class SetOfQ(NamedTuple):
    """One Gaussian to be declared.

    :param position: of its set in the gp.
    :param size: number of inducing variables.
    :param covariance: "full", "diagonal" or "prior".
    """

    position: int
    size: int
    covariance: str


def declare_sets(
    name: str,
    sets: Sequence[SetOfQ],
    *,
    tight: bool,
    batch: tuple[int, ...],
    natural: bool,
    analytic: bool,
    init_scale: float,
    dtype: Any,
) -> list[Array]:
    """:func:`gp_posterior` for some of a gp's sets, of which others may be conditioned on."""
    inspect(_refuse_no_scale, init_scale)
    v = None
    if tight:
        v = numpyro.param(f"{name}_residual_scale", jnp.ones(batch, dtype), constraint=constraints.positive)
    values = []
    for i, size, covariance in sets:
        q = _family(f"{name}.u{i}", (*batch, size), covariance, natural, jnp.asarray(init_scale, dtype))
        belief = Belief(q, v if i == sets[0].position else None, natural, analytic)
        values.append(numpyro.sample(f"{name}.u{i}", WhitenedGaussian(q), infer=belief.as_infer()))
    return values


def latent_inputs_posterior(name: str, loc: ArrayLike, scale: ArrayLike, *, analytic: bool = True) -> Array:
    """Give latent inputs a Gaussian in a hand-written guide: independent points and dimensions.

    For parameters of each point, ``loc = numpyro.param("X_loc", start, event_dim=1)``; or let an encoder compute them from the
    data. In a plate like the model's where that has one, with the rows that the plate picks.

    :param name: the name that the model gave its :func:`latent_inputs`.
    :param loc: means, shape (B, D).
    :param scale: standard deviations, shape (B, D), or what broadcasts to it.
    :param analytic: whether the model may integrate over the Gaussian while it is fitted, or sees a draw only.
    :return: a draw, shape (B, D).
    :raises TypeError: if they are not floating.
    :raises ValueError: if the shapes do not fit.
    """
    loc, scale = check_floating("loc", loc), check_floating("scale", scale)
    if loc.ndim != 2 or jnp.broadcast_shapes(loc.shape, scale.shape) != loc.shape:
        raise ValueError(
            f"`loc` must have shape (B, D), and `scale` broadcast to it; got {loc.shape} and {scale.shape} for the latent inputs "
            f"`{name}`."
        )
    belief = InputBelief(loc, jnp.broadcast_to(scale, loc.shape), analytic)
    return numpyro.sample(name, dist.Normal(loc, belief.scale).to_event(1), infer=belief.as_infer())


def _refuse_no_scale(init_scale: float) -> None:
    if not init_scale > 0:
        raise ValueError(f"`init_scale` must be positive, 1 for the prior's; got {init_scale}.")


def _family(name: str, shape: tuple[int, ...], covariance: str, natural: bool, scale: Array) -> Whitened:
    """Declare the parameters of one q, starting at the prior's mean with standard deviations ``scale``."""
    dtype = scale.dtype

    def declare(suffix: str, start: Array, constraint: Any) -> Array:
        # With the prior's covariance the natural gradient is the gradient, for any optimizer to follow.
        own = natural and covariance != "prior"
        value = numpyro.param(f"{name}_{suffix}", start, constraint=natural_constraint if own else constraint)
        if jnp.shape(value) != start.shape:
            raise ValueError(
                f"`{name}_{suffix}` must have shape {start.shape}, that of the model's inducing variables; got {jnp.shape(value)}. "
                "Parameters (`init_params`, a result's) of another number of points?"
            )
        return value

    loc = declare("loc", jnp.zeros(shape, dtype), constraints.real)
    if covariance == "full":
        start = _scaled_identity(scale, shape)
        return Whitened(loc, jnp.tril(declare("scale_tril", start, dense_lower_cholesky)), "full")
    if covariance == "diagonal":
        return Whitened(loc, declare("scale", jnp.full(shape, scale), constraints.positive), "diagonal")
    return Whitened(loc, None, "prior")


@partial(jax.jit, static_argnums=1)  # one program and not one for each operation
def _scaled_identity(scale: Array, shape: tuple[int, ...]) -> Array:
    return scale * jnp.broadcast_to(jnp.eye(shape[-1], dtype=scale.dtype), (*shape, shape[-1]))


def per_set(option: str, value: str | Sequence[str], num_sets: int) -> list[str]:
    """What an option says about each set.

    :raises ValueError: for another number of values, or unknown ones.
    """
    values = [value] * num_sets if isinstance(value, str) else list(value)
    if len(values) != num_sets:
        raise ValueError(f"`{option}` must be one name or one per set, {num_sets} here; got {len(values)}: {values}.")
    return [check_option(option, v, COVARIANCES) for v in values]
