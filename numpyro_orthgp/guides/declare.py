"""Hand-written guides: :func:`gp_posterior` and :func:`latent_inputs_posterior` declare Gaussians and pass them to the model.

``init_scale`` lets inner layers of deep GPs start near their mean functions; at the prior's scale they start as noise. The
default stays 1, where the KL divergence is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
from numpyro.primitives import _PYRO_STACK

from numpyro_orthgp.errors import check_floating, check_integer, check_option, check_params, inspect
from numpyro_orthgp.functions.callers import is_calling
from numpyro_orthgp.gaussians import FAMILIES, Whitened
from numpyro_orthgp.gaussians.checks import check_member
from numpyro_orthgp.gaussians.constraints import NaturalPart
from numpyro_orthgp.gaussians.distributions import WhitenedGaussian
from numpyro_orthgp.math.grouped import Grouping
from numpyro_orthgp.primitives.messages import Belief, InputBelief, told_of_names
from numpyro_orthgp.types import Array, ArrayLike

__all__ = [
    "Covariance", "Residual", "SetOfQ", "check_names", "declare_sets", "fitted", "gp_posterior", "grouping_of",
    "latent_inputs_posterior", "per_set", "residual_of", "start_of_inputs",
]  # fmt: skip

_START_SCALE = 0.3  # initial standard deviation of latent inputs

# Maps the shape of a mean and a standard deviation to the initial member of a family.
Start = Callable[[tuple[int, ...], Array], Whitened]

# A family, its name, or a function that makes its initial member.
Covariance = str | type[Whitened] | Start

# Maps the name of the gp, the shape of v and its dtype to the v of a tightened residual.
Residual = Callable[[str, tuple[int, ...], Any], Array]


def _learned_scale(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    return numpyro.param(f"{name}_residual_scale", jnp.ones(shape, dtype), constraint=constraints.positive)


RESIDUALS: dict[str, Residual | None] = {"prior": None, "tight": _learned_scale}


def gp_posterior(
    name: str,
    num_inducing: int | Sequence[int],
    *,
    covariance: Covariance | Sequence[Covariance] = "full",
    residual: str | Residual = "prior",
    group_size: int | None = None,
    num_groups: int | None = None,
    num_latents: int | None = None,
    natural: bool = False,
    analytic: bool = True,
    init_scale: float = 1.0,
    dtype: Any = None,
    first: int = 0,
) -> list[Array]:
    """Declare q for one gp in a hand-written guide.

    For each set i it declares the param sites ``{name}.u{i}_loc``, shape (M_i,) or (P, M_i), and ``{name}.u{i}_scale_tril``,
    shape (M_i, M_i) or (P, M_i, M_i), for covariance "full", or ``{name}.u{i}_scale`` for "diagonal"; for "low_rank" also
    ``{name}.u{i}_left`` and ``_right``. Then it declares the sample site ``{name}.u{i}``. A ``MeanOnly`` set has its weights
    in the model and is not counted here.

    :param name: the name of the model's gp.
    :param num_inducing: number of inducing variables, one per set.
    :param covariance: covariance of q in whitened coordinates: "full", "diagonal", "prior" (the identity), "low_rank"
        (:class:`~numpyro_orthgp.gaussians.LowRank`, which also has other ranks), or your own family, a subclass of
        :class:`~numpyro_orthgp.gaussians.Whitened`; one for all sets or one per set.
    :param residual: "prior"; "tight" for the tightened bound of Titsias 2025 (with a param site ``{name}_residual_scale`` for v,
        used by non-Gaussian likelihoods; for Gaussian ones the optimal v is known); or your own v, a function that maps the gp's
        name, the shape of v, () or (P,), and its dtype to positive numbers.
    :param group_size: with "tight", G: the residual of unmixed functions with Gaussian noise is tightened in groups of G
        consecutive rows of each minibatch, a better bound than for single rows (:mod:`numpyro_orthgp.functions.groups`).
        Groups should hold nearby rows: sort the data by :func:`numpyro_orthgp.init.groups`, and make minibatches of whole groups,
        as ``fit(..., group_size=G)`` does.
    :param num_groups: number of groups, the last rows of each minibatch, if the rows before them are single ones from anywhere, as
        ``fit(..., group_size=G, num_groups=n)`` gives them. Single rows are less noisy than groups, and few groups suffice. By
        default all rows are in groups.
    :param num_latents: P, if the model's gp has it.
    :param natural: whether :func:`~numpyro_orthgp.natural_gradient` updates these Gaussians, and gradients of ``MeanOnly`` weights
        are preconditioned. Names and values of the parameters stay the same.
    :param analytic: whether the model integrates over the Gaussian in a fit, or sees only samples, as importance-weighted
        objectives (``RenyiELBO``) need. :func:`posterior` has the Gaussian in any case.
    :param init_scale: initial standard deviation of q in whitened coordinates; 1 is the prior's. Small values suit inner
        layers of deep GPs, which then start near their mean functions.
    :param dtype: dtype of the parameters; by default JAX's default floating dtype.
    :param first: position of the first set declared here: 1 for the sets of :func:`orthogonal`, since set 0 is integrated out.
    :return: a sample of the whitened inducing variables of each set.
    :raises ValueError: for an unknown option or a wrong number of them.
    """
    sizes = [num_inducing] if isinstance(num_inducing, int) else list(num_inducing)
    starts = per_set("covariance", covariance, len(sizes))
    v = residual_of(residual)
    grouping = grouping_of(group_size, num_groups, v)
    sets = [SetOfQ(i, size, begin) for i, (size, begin) in enumerate(zip(sizes, starts, strict=True), start=first)]
    batch = () if num_latents is None else (num_latents,)
    return declare_sets(
        name,
        sets,
        residual=v if first == 0 else None,  # if the first set is integrated out, so is v
        grouping=grouping,
        batch=batch,
        natural=natural,
        analytic=analytic,
        init_scale=init_scale,
        dtype=jnp.dtype(dtype or jnp.result_type(float)),
    )


class SetOfQ(NamedTuple):
    """One Gaussian to be declared.

    :param position: position of its set in the gp.
    :param size: number of inducing variables.
    :param start: makes the initial member of its family, from a shape and a standard deviation.
    """

    position: int
    size: int
    start: Start


def declare_sets(
    name: str,
    sets: Sequence[SetOfQ],
    *,
    residual: Residual | None,
    grouping: Grouping | None,
    batch: tuple[int, ...],
    natural: bool,
    analytic: bool,
    init_scale: float,
    dtype: Any,
) -> list[Array]:
    """:func:`gp_posterior` for some of a gp's sets; others may be conditioned on."""
    inspect(_refuse_no_scale, init_scale)
    v = None if residual is None else _checked_scale(name, residual(name, batch, dtype), batch)
    values = []
    for i, size, start in sets:
        q = _declared(f"{name}.u{i}", start((*batch, size), jnp.asarray(init_scale, dtype)), natural)
        is_first = v is not None and i == sets[0].position
        belief = Belief(q, v if is_first else None, grouping if is_first else None, natural, analytic)
        with told_of_names(f"{name}.u{i}"):
            values.append(numpyro.sample(f"{name}.u{i}", WhitenedGaussian(q), infer=belief.as_infer()))
    return values


def residual_of(value: Any) -> Residual | None:
    """The residual with a name, or the given function.

    :raises ValueError: for anything else.
    """
    return value if callable(value) else RESIDUALS[check_option("residual", value, tuple(RESIDUALS))]


def grouping_of(size: Any, num: Any, residual: Residual | None) -> Grouping | None:
    """Which rows are in groups, if the residual is tightened in groups.

    :raises TypeError, ValueError: for anything else than positive integers, if there is a number of groups without their size, or
        if the residual is the prior's.
    """
    if size is None:
        if num is not None:
            raise ValueError("`num_groups` is the number of groups of `group_size` rows in a minibatch: give both.")
        return None
    if residual is None:
        raise ValueError("`group_size` says in which groups the residual is tightened: it needs residual='tight'.")
    return Grouping(check_integer("group_size", size), None if num is None else check_integer("num_groups", num))


def check_names(covariance: Any, residual: Any) -> None:
    """Refuse unknown names, before the model is seen.

    :raises ValueError: if a name is unknown.
    """
    if isinstance(covariance, str):
        start_of("covariance", covariance)
    if isinstance(residual, str):
        residual_of(residual)


def _checked_scale(name: str, v: Any, shape: tuple[int, ...]) -> Array:
    v = check_floating(f"the residual's v of `{name}`", v)
    inspect(partial(_refuse_no_residual, name), v)
    if jnp.shape(v) != shape:
        raise ValueError(f"The residual's v of `{name}` must have shape {shape}; got {jnp.shape(v)}.")
    return v


def _refuse_no_residual(name: str, v: Array) -> None:
    # With NumPy: within a traced loop, JAX operations on a concrete v are not concrete.
    if not (np.asarray(v) > 0).all():
        raise ValueError(f"The residual's v of `{name}` must be positive, 1 for the prior's; got {v}.")


def latent_inputs_posterior(name: str, loc: ArrayLike, scale: ArrayLike, *, analytic: bool = True) -> Array:
    """Give latent inputs a Gaussian in a hand-written guide, with independent points and dimensions.

    For parameters of each point use ``loc = numpyro.param("X_loc", start, event_dim=1)``, or let an encoder compute them from the
    data. If the model has a plate, call it in the same plate, with the rows that the plate picks.

    :param name: the name of the model's :func:`latent_inputs`.
    :param loc: means, shape (B, D).
    :param scale: standard deviations, broadcastable to shape (B, D).
    :param analytic: whether the model may integrate over the Gaussian in a fit, or sees only a draw.
    :return: a draw, shape (B, D).
    :raises TypeError: if ``loc`` or ``scale`` is not floating.
    :raises ValueError: if the shapes do not match.
    """
    loc, scale = check_floating("loc", loc), check_floating("scale", scale)
    if loc.ndim != 2 or jnp.broadcast_shapes(loc.shape, scale.shape) != loc.shape:
        raise ValueError(
            f"`loc` must have shape (B, D), and `scale` broadcast to it; got {loc.shape} and {scale.shape} for the latent inputs "
            f"`{name}`."
        )
    belief = InputBelief(loc, jnp.broadcast_to(scale, loc.shape), analytic)
    with told_of_names(name):
        return numpyro.sample(name, dist.Normal(loc, belief.scale).to_event(1), infer=belief.as_infer())


def start_of_inputs(name: str, start: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Initial parameters of latent inputs: means (or a function that draws them) and standard deviations."""
    start, scale = start if isinstance(start, tuple) else (start, _START_SCALE)
    if start is None:
        return lambda key: jax.random.normal(key, shape), jnp.full(shape, scale)
    loc = check_floating(f"latents['{name}']", start)
    if loc.shape != shape:
        raise ValueError(f"`latents['{name}']` must have shape {shape}, one row per point; got {loc.shape}.")
    return loc, jnp.broadcast_to(jnp.asarray(scale, loc.dtype), shape)


def fitted(name: str, start: Whitened, params: Mapping[str, Any]) -> Whitened:
    """The Gaussian of a set with its parameters in ``params``.

    :param name: name of its site.
    :param start: the initial member of its family.
    :raises ValueError: if a parameter is missing.
    """
    parts = type(start).parts()
    check_params("guide", {f"{name}_{part}": {"type": "param"} for part in parts}, params)
    return start.given(**{part: params[f"{name}_{part}"] for part in parts})


def _refuse_no_scale(init_scale: float) -> None:
    if not init_scale > 0:
        raise ValueError(f"`init_scale` must be positive, 1 for the prior's; got {init_scale}.")


def _refuse_other_start(name: str, family: type[Whitened]) -> None:
    """Refuse ``init_params`` of another family, which ``svi.init`` would leave out without a word.

    :raises ValueError: with the names.
    """
    given = [n for h in _PYRO_STACK if isinstance(h, numpyro.handlers.substitute) for n in h.data or ()]
    strange = sorted(n for n in given if n.startswith(f"{name}_") and n.removeprefix(f"{name}_") not in family.parts())
    if strange and is_calling(SVI, "init"):
        raise ValueError(
            f"`init_params` hold {', '.join(map(repr, strange))}, which the covariance {family.name!r} of `{name}` does not have: "
            "its fit would not start there. Start with the covariance that was fitted, or leave these out."
        )


def _declared(name: str, start: Whitened, natural: bool) -> Whitened:
    """Declare the parameters of one q, with initial value ``start``."""
    check_member(name, start, natural)
    family = type(start)
    _refuse_other_start(name, family)
    values = {}
    for part in family.parts():
        first, constraint = getattr(start, part), family.constraints.get(part, constraints.real)
        if natural and family.has_natural_step:
            constraint = NaturalPart(family, part)
        values[part] = value = numpyro.param(f"{name}_{part}", first, constraint=constraint)
        if jnp.shape(value) != first.shape:
            raise ValueError(
                f"`{name}_{part}` must have shape {first.shape}, that of the model's inducing variables; got {jnp.shape(value)}. "
                "Parameters (`init_params`, a result's) of another number of points?"
            )
    return start.given(**values)


def per_set(option: str, value: Any, num_sets: int) -> list[Start]:
    """The start of each set's q.

    :raises ValueError: for another number of values, or unknown values.
    """
    several = isinstance(value, Sequence) and not isinstance(value, str)
    values = list(value) if several else [value] * num_sets
    if len(values) != num_sets:
        raise ValueError(f"`{option}` must be one name or one per set, {num_sets} here; got {len(values)}: {values}.")
    return [start_of(option, v) for v in values]


def start_of(option: str, value: Any) -> Start:
    """The start of a family's q, from the family's name, a subclass of :class:`Whitened`, or a start itself.

    :raises ValueError: if the value is none of these.
    """
    if isinstance(value, type) and issubclass(value, Whitened) and not value.is_value:
        return value.start
    if callable(value) and not isinstance(value, type):
        return value
    if not isinstance(value, str):
        raise ValueError(
            f"`{option}` must be the name of a family, one of {', '.join(map(repr, FAMILIES))}, or a family: a subclass of "
            f"numpyro_orthgp.gaussians.Whitened, or what gaussians.LowRank.of_rank(50) returns; got {value!r}."
        )
    return FAMILIES[check_option(option, value, tuple(FAMILIES))].start
