"""Messages between guide and model in the ``infer`` dictionaries of sites, and how primitives read them.

A guide writes the Gaussian from which it drew a site's value into the site's ``infer`` dictionary. NumPyro's ``replay`` copies it
from guide to model. A primitive that finds a :class:`Belief` integrates over its Gaussian, if it is ``analytic``; without one it
uses the value. ``posterior`` always asks for the Gaussian.

Primitives read their site's message after the other handlers, and do not rely on its name. So ``scope``, ``condition``,
``substitute`` and ``mask`` keep working.

**Importance-weighted objectives.** Importance weights need the values that a belief integrates out. Neither model nor guide knows
the objective. So while tracing, ``gp`` searches the Python stack for a ``RenyiELBO`` and raises an error that names the remedy,
``analytic=False``. Hand-written importance sampling must set ``analytic=False`` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import RenyiELBO
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_orthgp.functions.callers import in_control_flow, is_calling, is_starting
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.gaussians.family import Value, Whitened
from numpyro_orthgp.math.grouped import Grouping
from numpyro_orthgp.primitives.branches import PriorInModel
from numpyro_orthgp.types import Array

__all__ = [
    "MESSAGE", "Belief", "InputBelief", "InputSite", "Site", "announce", "belief_of", "collected_functions", "collected_sites",
    "inducing_site", "input_site_of", "is_enumerated", "is_integrated", "known", "refuse_handlers_of_rows", "sample_and_read",
    "single_site_of", "site_of", "told_of_names",
]  # fmt: skip

# The key of `infer`.
MESSAGE = "numpyro_orthgp"

_OUT_OF_SCAN = "declare f = gp(...) before the loop and call f(X) inside it."


class Site(NamedTuple):
    """Entry that the model writes into the ``infer`` of a whitened inducing site, for guides to read.

    :param position: position of the set in its gp.
    :param shape: event shape of the site, (M,) or (P, M).
    :param dtype: dtype of the site.
    """

    position: int
    shape: tuple[int, ...]
    dtype: Any


class InputSite(NamedTuple):
    """Entry that the model writes into the ``infer`` of a site of latent inputs.

    :param num: number of all points N; a plate may have picked some of them.
    :param dim: number of latent dimensions.
    """

    num: int
    dim: int


class Belief(NamedTuple):
    """Entry that a guide writes into ``infer``, for the model to read.

    :param q: the Gaussian from which the site's value was drawn.
    :param residual_scale: v, shape () or (P,), if the gp's residual is tightened, on the gp's first site in the guide.
    :param grouping: which inputs are in groups, if the residual is tightened in groups; on the same site.
    :param natural: whether the gp's parameters take natural gradient steps; then gradients of mean-only weights are
        preconditioned.
    :param analytic: whether the model integrates over ``q``, as bounds may, or uses the value.
    :param asked: whether the model runs outside of a fit, for a caller that wants all that the guide knows; then it uses ``q``.
    """

    q: Whitened
    residual_scale: Array | None
    grouping: Grouping | None = None
    natural: bool = False
    analytic: bool = True
    asked: bool = False

    def as_infer(self) -> dict[str, Any]:
        """The ``infer`` argument of the guide's ``numpyro.sample``."""
        _refuse_stein_mixtures()
        _refuse_in_control_flow()
        return {MESSAGE: self, "kl": "analytic"}  # the latter for TraceEnum_ELBO


class InputBelief(NamedTuple):
    """Entry that a guide writes into the ``infer`` of a site of latent inputs: the Gaussian from which the value was drawn.

    :param loc: means, shape (B, D).
    :param scale: standard deviations, shape (B, D).
    :param analytic, asked: as in :class:`Belief`.
    """

    loc: Array
    scale: Array
    analytic: bool = True
    asked: bool = False

    def as_infer(self) -> dict[str, Any]:
        """The ``infer`` argument of the guide's ``numpyro.sample``."""
        _refuse_in_control_flow()
        return {MESSAGE: self}


def belief_of(message: dict[str, Any]) -> Belief | None:
    """The belief in a site's message, if a guide of this package put one there."""
    found = message["infer"].get(MESSAGE)
    return found if isinstance(found, Belief) else None


def site_of(message: dict[str, Any]) -> Site | None:
    """The entry of :func:`gp` in the message of one of its sites; ``None`` for other sites."""
    found = message.get("infer", {}).get(MESSAGE) if message["type"] == "sample" else None
    return found if isinstance(found, Site) else None


def single_site_of(message: dict[str, Any]) -> Site | None:
    """:func:`site_of` for guides, which declare each site once.

    :raises ValueError: if a loop of NumPyro has stacked the sites of several functions, one of each step.
    """
    site = site_of(message)
    if site is not None and not message["is_observed"] and (shape := np.shape(message["value"])) != site.shape:
        raise ValueError(
            f"`{message['name']}` has shape {shape}, and {site.shape} in one step: gp() or orthogonal() within scan declares "
            "another function in each step. Declare f = gp(...) before the loop and call f(X) inside it."
        )
    return site


def input_site_of(message: dict[str, Any]) -> InputSite | None:
    """The entry of :func:`latent_inputs` in the message of its site; ``None`` for other sites."""
    found = message.get("infer", {}).get(MESSAGE) if message["type"] == "sample" else None
    return found if isinstance(found, InputSite) else None


def is_enumerated(message: dict[str, Any]) -> bool:
    """Whether inference sums over a discrete latent site, so that no guide draws it."""
    is_latent = message["type"] == "sample" and not message["is_observed"]
    return is_latent and message["infer"].get("enumerate") == "parallel" and message["fn"].has_enumerate_support


class _LastMessage(Messenger):
    """Keeps the message of the last site, as all other handlers have left it (renamed by ``scope``, for example).

    ``handlers.reparam`` makes it a deterministic site, and what it draws instead has been a site before that.
    """

    message: dict[str, Any]

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] in ("sample", "deterministic"):
            self.message = msg


# Functions of the innermost `collected_functions`, and names of the innermost `collected_sites`. They are no messages of NumPyro,
# since a user's handlers would see those.
_collected: ContextVar[dict[str, GPFunction] | None] = ContextVar("collected", default=None)
_declared: ContextVar[list[str] | None] = ContextVar("declared", default=None)


@contextmanager
def collected_functions() -> Iterator[dict[str, GPFunction]]:
    """Context that collects the functions of ``gp`` statements, by their full names."""
    functions: dict[str, GPFunction] = {}
    tokens = _collected.set(functions), _declared.set(None)  # another model, which an outer one may call
    try:
        yield functions
    finally:
        _collected.reset(tokens[0])
        _declared.reset(tokens[1])


def announce(name: str, function: GPFunction) -> None:
    """Give a finished function to :func:`collected_functions`, by its full name.

    :raises ValueError: if there is one function in each step of a loop of NumPyro.
    """
    functions = _collected.get()
    if functions is not None:
        if in_control_flow():
            raise ValueError(f"`{name}` is another function in each step of scan: {_OUT_OF_SCAN}")
        functions[name] = function


@contextmanager
def collected_sites() -> Iterator[list[str]]:
    """Context that collects the names of sites that primitives declare, also of those that handlers hide or replace."""
    names: list[str] = []
    token = _declared.set(names)
    try:
        yield names
    finally:
        _declared.reset(token)


@contextmanager
def told_of_names(name: str) -> Iterator[None]:
    """Context in which a second site of the same name raises an error that says so.

    :raises ValueError: if there is one.
    """
    try:
        yield
    except AssertionError as error:
        if "unique names" not in str(error):
            raise
        raise ValueError(
            f"The site `{name}` is declared twice. Each gp(), orthogonal(), latent_inputs() and numpyro.sample() of a model needs "
            "a name of its own, and so does each gp_posterior() of a guide: rename one, gp('g', ...), or put it under "
            "numpyro.handlers.scope(prefix='...')."
        ) from error


def sample_and_read(name: str, fn: Any, site: Site | InputSite) -> dict[str, Any]:
    """Declare a sample site, and return its message after all handlers.

    If ``handlers.reparam`` has made it a deterministic site, this site has the value and no belief.

    :raises ValueError: if there is a site of this name.
    """
    reader = _LastMessage()
    with told_of_names(name), reader:
        numpyro.sample(name, fn, infer={MESSAGE: site})
    names, observed = _declared.get(), reader.message.get("is_observed")
    if not observed and (names is not None or is_starting()):
        if in_control_flow("cond"):  # up to NumPyro 0.22; the branch goes on with a draw of its own
            raise ValueError(
                f"`{name}` is declared in a branch of numpyro's cond, which does not hand on what a guide draws: the loss would "
                "not belong to it. Declare f = gp(...) before the cond and call f(X) inside it."
            )
        if names is not None:
            names.append(reader.message["name"])
    return {"fn": fn, "infer": {}} | reader.message


def inducing_site(name: str, site: Site) -> dict[str, Any]:
    """Declare the site of one set's whitened inducing variables and return its message.

    :raises ValueError: inside a plate.
    """
    message = sample_and_read(name, PriorInModel(site.shape, site.dtype), site)
    if message["type"] == "deterministic":
        message["value"] = jnp.asarray(message["value"], site.dtype)
    if message["cond_indep_stack"]:
        plates = ", ".join(repr(frame.name) for frame in message["cond_indep_stack"])
        raise ValueError(
            f"gp() and orthogonal() must be declared outside of plates, whose scale would multiply their divergence; `{name}` is "
            f"inside {plates}. Declare f = gp(...) before the plate and call f(X) inside it."
        )
    return message


def refuse_handlers_of_rows(name: str) -> None:
    """Refuse a mask or scale with one entry per row around a function: a function is one event of all rows.

    NumPyro would copy every site within it for each row, hyperparameters too, and multiply the divergence by the sum of a scale.

    :param name: the function's.
    :raises ValueError: if there is one.
    """
    for handler in _PYRO_STACK:
        for kind in (numpyro.handlers.mask, numpyro.handlers.scale):
            if isinstance(handler, kind) and (shape := np.shape(getattr(handler, kind.__name__))):
                raise ValueError(
                    f"handlers.{kind.__name__} with one entry per row, shape {shape}, is around the function `{name}`, which all "
                    "rows share. Put it around the rows alone: declare f = gp(...) and hyperparameters outside of it, and sample y "
                    "inside."
                )


def known(message: dict[str, Any]) -> Whitened:
    """The guide's Gaussian of a set, or the value.

    :raises ValueError: if Gaussian or value have another size, or the objective is importance-weighted.
    """
    belief, shape = belief_of(message), message["fn"].event_shape
    what: str = "The value of"
    q: Whitened = Value(message["value"])
    if belief is not None and is_integrated(belief, message["name"]):
        what, q = "The guide's q of", belief.q
    if (found := np.shape(q.loc)) != shape:
        fix = "Give the guide, or draws and conditions, the numbers of inducing points that the model uses."
        if found == shape[1:]:
            fix += " For several draws of the guide take num_particles, not multi_sample_guide=True."
        raise ValueError(
            f"{what} `{message['name']}` has shape {found}; the model's inducing variables have shape {shape}. {fix}"
        )
    return q


def is_integrated(belief: Belief | InputBelief, name: str) -> bool:
    """Whether the model integrates over the Gaussian of site ``name``, instead of using the value.

    :raises ValueError: if it does, and the objective is importance-weighted.
    """
    if belief.analytic and not belief.asked:
        _refuse_importance_weights(name)
    return belief.analytic or belief.asked


def _refuse_importance_weights(name: str) -> None:
    """Refuse a belief under an objective that averages inside a logarithm.

    :raises ValueError: if a ``RenyiELBO`` calls the model.
    """
    # With the Gaussian integrated out, the weight p(u)/q(u) of a particle would average to one inside the logarithm, and the
    # "bound" would lose its KL divergence. Neither model nor guide knows the objective, so look at the callers, while tracing.
    if is_calling(RenyiELBO):
        raise ValueError(
            f"RenyiELBO weighs particles by importance and must see values, but the guide of `{name}` hands over its Gaussian: "
            "the result would not be a bound. Use AutoSparseGP(model, analytic=False) or gp_posterior(..., analytic=False)."
        )


def _refuse_in_control_flow() -> None:
    """Refuse a guide's Gaussian in a loop of NumPyro, from which the model would get an array of the loop.

    :raises ValueError: within such a loop.
    """
    if in_control_flow():
        raise ValueError(
            "A Gaussian of gp_posterior() or latent_inputs_posterior() within scan would belong to one step of the loop. Call them "
            f"outside of it. The same holds for the model: {_OUT_OF_SCAN}"
        )


def _refuse_stein_mixtures() -> None:
    """Refuse ``SteinVI``, which scores draws by densities of other Gaussians than those that they came from.

    :raises ValueError: if a ``SteinVI`` calls the guide.
    """
    # Up to NumPyro 0.22 it applies constraints to parameters twice when it scores the mixture of its guides.
    if is_calling("SteinVI"):
        raise ValueError(
            "SteinVI cannot be right with guides of numpyro_orthgp: NumPyro takes the parameters of a guide through their "
            "constraints twice where it scores the mixture, so the covariances there are not those that were drawn from. Use "
            "SVGD(model, ...) of numpyro.contrib.einstein, which needs no guide, or SVI."
        )
