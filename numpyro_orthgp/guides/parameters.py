"""Checks that the parameters of a fit belong to this model and guide.

``params`` must hold all parameters of the model. Some of them are an error, since the others would have initial values. None of
them is a warning: they may all be known, and the model written with their values as starting values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.infer.autoguide import AutoGuide
from numpyro.primitives import Messenger

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.errors import check_params, is_concrete
from numpyro_orthgp.gaussians.constraints import Natural
from numpyro_orthgp.primitives.messages import MESSAGE, Belief, InputBelief, site_of

__all__ = [
    "Checked", "check_guide_sites", "check_model_params", "refuse_lists", "refuse_other_guide", "refuse_own_names",
]  # fmt: skip

Trace = Mapping[str, Mapping[str, Any]]

FIRST_CALL = (
    "An automatic guide takes its sites from its first call: if that was without the observations, or with other data, make the "
    "guide anew, and pass the data of the fit."
)


class Checked(Messenger):
    """A model or guide whose parameters are checked against their constraints before it sees them.

    :param params: parameters; of those that are not concrete arrays only shapes are checked.
    :param guide: the guide, if ``fn`` is one. Those of an automatic guide have the shapes of their starting values. Elsewhere a
        starting value may depend on the data of the call, such as ``param("Z", X[::10])``.
    """

    def __init__(self, fn: Callable[..., Any], params: Mapping[str, Any], guide: Any = None) -> None:
        super().__init__(fn)
        self.params, self.sized = params, isinstance(guide, AutoGuide)
        refuse_lists(params)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except RuntimeError as error:  # NumPyro's, for a latent site of counts
            if self.sized and "enumerate support" in str(error):
                raise ValueError(f"{error} {FIRST_CALL}") from error
            raise
        except TypeError as error:
            # JAX's, for weights of a network, of which NumPyro does not say what shapes they should have.
            networks = [name for name in self.params if name.endswith("$params")]
            if self.sized and networks and "shape" in str(error):
                raise ValueError(
                    f"`params[{networks[0]!r}]` does not fit the network of the guide: {error} Is it of another model, guide or "
                    f"number of points, or a stack for jax.vmap? {FIRST_CALL}"
                ) from error
            raise

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "param" and msg["name"] in self.params:
            constraint = msg["kwargs"].get("constraint", constraints.real)
            if self.sized and not msg["name"].endswith("_residual_scale"):
                _refuse_other_shape(msg["name"], self.params[msg["name"]], *msg["args"])
            _refuse_unconstrained(msg["name"], self.params[msg["name"]], constraint)


def refuse_lists(params: Mapping[str, Any]) -> None:
    """
    :raises TypeError: if a parameter is a list of numbers.
    """
    for name, value in params.items():
        if isinstance(value, list) and all(isinstance(leaf, int | float) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"`params[{name!r}]` is a list of numbers, as JSON keeps them, and a parameter is an array: "
                "{name: jnp.asarray(value) for name, value in params.items()}."
            )


def refuse_own_names(of_guide: Trace, of_model: Trace) -> None:
    """Refuse sites of the model with the name of a parameter of one of our Gaussians: NumPyro would take them for one.

    :param of_guide: sites of the guide by name.
    :param of_model: sites of the model by name.
    :raises ValueError: with the name.
    """
    for name, site in of_guide.items():
        belief = site.get("infer", {}).get(MESSAGE)
        own = f"{name}_", f"{name.rpartition('.u')[0]}_residual_scale" if isinstance(belief, Belief) else f"{name}_"
        if isinstance(belief, Belief | InputBelief):
            for other, of in of_model.items():
                if of_guide.get(other, site)["type"] == "param" and other.startswith(own):
                    kind = "parameter" if of["type"] == "param" else "site"
                    raise ValueError(
                        f"The model's {kind} `{other}` has the name of a parameter of the guide, of the Gaussian of `{name}`: "
                        "both would be one and the same number. Give it another name."
                    )


def check_guide_sites(sites: Trace, params: Mapping[str, Any], guide: Any) -> None:
    """Refuse a guide that is a model, and missing parameters, which would silently stay at their initial values.

    :param sites: sites of the guide.
    :raises ValueError: with the names.
    """
    declared = [name for name, site in sites.items() if _is_of_model(site)]
    if declared:
        raise ValueError(
            f"`guide` declares {declared[0]!r} by gp() or CollapsedGP, as a model does: are model and guide swapped? The model "
            "comes first: (model, guide, params, ...)."
        )
    # A residual's v does not affect predictions.
    hint = FIRST_CALL if isinstance(guide, AutoGuide) else ""
    check_params("guide", {n: s for n, s in sites.items() if not n.endswith("_residual_scale")}, params, hint)


def check_model_params(
    sites: Trace, others: Collection[str], params: Mapping[str, Any], *, guided: bool = True
) -> None:
    """Refuse parameters of another model, and warn if ``params`` holds none of the model's, which then keep their initial values.

    :param sites: sites of the model.
    :param others: names of the guide's sites.
    :param guided: whether the parameters are those of a fit with a guide. Draws of MCMC hold none, and other names among them mean
        nothing.
    :raises ValueError: if some of the model's parameters are missing but not all, or unknown ones replace them.
    """
    declared = [name for name, site in sites.items() if site["type"] == "param" and name not in others]
    missing = [name for name in declared if name not in params]
    if not missing:
        return
    # Weights of mean-only points belong to q, although the model declares them.
    given = [name for name in declared if name in params and not name.endswith("_weights")]
    unknown = [name for name in params if name not in sites and name not in others] if guided else []
    if given or unknown:
        beside = f"holds {_listed(given)}" if given else f"holds {_listed(unknown)}, which model and guide do not have,"
        raise ValueError(
            f"`params` {beside} but not {_listed(missing)}, which the model would take at the starting value. Pass all parameters "
            "of the fit: svi_result.params, or svi.get_params(state). To mean a value of your own, add it: "
            f"{{**params, {missing[0]!r}: value}}."
        )
    if guided:
        warnings.warn(
            f"`params` holds none of the model's own parameters: {_listed(missing)} keep the values that the model "
            "starts from, which a fit has changed. Pass all parameters of the fit: svi_result.params, or svi.get_params(state). If "
            "these values are meant, add them to `params`.",
            UserWarning,
            stacklevel=4,
        )


def refuse_other_guide(guide_sites: Trace, sites: Trace, params: Mapping[str, Any]) -> None:
    """Refuse parameters that bear the name of a guide's site and that neither guide nor model has, such as ``f.u0_left``.

    Guides give one name to different things: ``f.u0_scale`` and ``auto_scale`` are only parts of a low-rank covariance, and
    ``scale_auto_loc`` is a value of AutoDelta and the logarithm of one of AutoNormal.

    :param guide_sites, sites: sites of the guide, and of the model.
    :raises ValueError: with the names.
    """
    drawn = [name for name, site in guide_sites.items() if site["type"] == "sample"]
    stems = tuple(name.removeprefix("_").removesuffix("latent").removesuffix("_") + "_" for name in drawn)
    strange = [n for n in params if n.startswith(stems) and n not in guide_sites and n not in sites]
    if strange:
        raise ValueError(
            f"`params` holds {_listed(strange)}, which this guide does not have: are they of another guide, or of another "
            "`covariance` or `hyper`? Others of its names may then mean something else. Give the guide that was fitted, or leave "
            "these out."
        )


def _is_of_model(site: Mapping[str, Any]) -> bool:
    return site_of(dict(site)) is not None or (site["type"] == "sample" and isinstance(site["fn"], CollapsedGP))


def _listed(names: Collection[str]) -> str:
    most = 5
    shown = ", ".join(map(repr, list(names)[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _refuse_other_shape(name: str, value: Any, start: Any = None) -> None:
    """
    :raises ValueError: if ``value`` has another shape than the start. It may broadcast, and be taken for something else.
    """
    shape, expected = getattr(value, "shape", None), getattr(start, "shape", None)
    if None not in (shape, expected) and shape != expected:
        raise ValueError(
            f"`params[{name!r}]` must have shape {expected}, that of the guide's parameter; got {shape}. Is it of another model, "
            f"guide or number of points, or a stack for jax.vmap? {FIRST_CALL}"
        )


def _refuse_unconstrained(name: str, value: Any, constraint: Any) -> None:
    """
    :raises ValueError: if ``value`` is the optimizer's unconstrained form of a parameter, not the parameter.
    """
    leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, Natural))
    if any(isinstance(leaf, Natural) for leaf in leaves):
        _raise_unconstrained(name, "one that is wrapped for natural_gradient")
    if not all(map(_is_visible, leaves)):
        return
    if len(leaves) != 1 or leaves[0] is not value or _allows(constraint, np.asarray(value)):
        return
    _raise_unconstrained(name, f"values outside of {constraint!r}, the constraint of the site")


def _is_visible(leaf: Any) -> bool:
    return is_concrete(leaf) and getattr(leaf, "is_fully_addressable", True)


def _allows(constraint: Any, value: np.ndarray) -> bool:
    """Whether a parameter may have this value, up to rounding; also true if this cannot be determined."""
    base = constraint.base_constraint if isinstance(constraint, constraints.independent) else constraint
    leaves = jax.tree.leaves(constraint)
    if constraint is None or isinstance(base, type(constraints.real)) or not all(map(is_concrete, leaves)):
        return True
    if not np.issubdtype(value.dtype, np.floating) or not np.isfinite(value).all():
        return True  # a diverged fit is not checked here
    with jax.ensure_compile_time_eval():  # the caller may be traced, but the values are concrete
        try:
            transform = biject_to(constraint)
            if value.ndim < transform.codomain.event_dim:
                return False
            if np.all(constraint(value)):
                return True
            # Rounding may have put a value on the boundary; the transform and its inverse do not move it.
            again = np.asarray(transform(transform.inv(value)))
        except NotImplementedError:
            return True
        except (TypeError, ValueError):
            return False
    rounding = np.sqrt(np.finfo(value.dtype).eps)
    return again.shape == value.shape and bool(np.allclose(again, value, rtol=rounding, atol=rounding))


def _raise_unconstrained(name: str, what: str) -> None:
    raise ValueError(
        f"`params[{name!r}]` must be a parameter as model and guide see it; got {what}. These look like the optimizer's "
        "unconstrained parameters; use svi.get_params(state), or svi_result.params, not svi.optim.get_params(state.optim_state)."
    )
