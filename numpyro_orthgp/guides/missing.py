"""Outputs hidden by ``obs_mask``: NumPyro turns them into latent sites, and a guide needs a distribution for them.

With their predictive distribution they contribute exactly nothing to the bound. Only the model knows it, so ``AutoSparseGP`` runs
the model once more, given the guide's draws.

The model runs with the current parameters, with the rows that the guide has picked for plates that subsample, and with their
weight. Missing covariates look the same to the guide, and are drawn from their prior: this gives a bound, but a loose one.
Diagnostics have draws, so they move a hidden value and test whether other densities change; then it is latent
(``diagnostics/replay.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpyro
from numpyro import handlers
from numpyro.infer import SVI, TraceEnum_ELBO, TraceMeanField_ELBO
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_orthgp.functions.callers import in_control_flow, is_calling
from numpyro_orthgp.guides.handlers import OutputsByRow, hidden_by_mask
from numpyro_orthgp.likelihoods.base import is_expected
from numpyro_orthgp.primitives.branches import IN_A_BRANCH

__all__ = ["NoBranches", "check_handlers", "refuse_objective", "refuse_unobserved", "sample_missing"]


class _Beside(Messenger):
    """A run that sees the real run's parameters and mutable state, changes neither, and shows no sites to outer handlers."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] not in ("param", "mutable"):
            msg["stop"] = True

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "mutable":
            msg["value"] = jax.tree.map(lambda leaf: leaf, msg["value"])  # a copy: models write into what they get


class NoBranches(Messenger):
    """Refuses latent sites in branches of NumPyro's ``cond``, and in its ``scan`` under a ``scope``: up to NumPyro 0.22 these go on
    with draws of their own.
    """

    _scoped = False

    def __init__(self) -> None:
        super().__init__()
        self.in_loops: list[str] = []  # names of sites of `scan`, also of observed ones

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and in_control_flow("scan"):
            self.in_loops.append(msg["name"])
        if msg["type"] == "control_flow":
            self._scoped = any(isinstance(handler, handlers.scope) for handler in _PYRO_STACK)
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        if self._scoped and in_control_flow("scan"):
            raise ValueError(
                f"`{msg['name']}` is a site of numpyro's scan within handlers.scope, which does not hand on what a guide draws: "
                "the loss would not belong to it. Leave the scope out, or put it within the step: scan(handlers.scope(step, "
                "prefix='s'), ...)."
            )
        if in_control_flow("cond"):
            raise ValueError(IN_A_BRANCH.format(name=msg["name"]))


def sample_missing(model: Callable[..., Any], emitted: dict[str, Any], args: Any, kwargs: Any) -> None:
    """Emit every hidden output of ``model``.

    :param emitted: the guide's trace so far, including rows of plates that subsample.
    """
    # A separate key for this call: if densities are Monte Carlo averages, their errors then cancel on average.
    rng_key = numpyro.prng_key()
    seeded = handlers.seed(model, jax.random.key(0) if rng_key is None else rng_key)
    with _Beside(), OutputsByRow():
        messages = handlers.trace(handlers.replay(seeded, emitted)).get_trace(*args, **kwargs)
    for name, message in messages.items():
        if hidden_by_mask(name, messages) and not message["is_observed"]:
            # The site is outside of the model's plates here; only their scale is applied.
            with handlers.scale(scale=1.0 if message["scale"] is None else message["scale"]):
                numpyro.sample(name, message["fn"])


def refuse_unobserved(name: str, message: dict[str, Any], messages: Container[str]) -> None:
    """Refuse an unobserved output if its values would be enumerated, or ``SVI.run`` fits it.

    :param messages: messages of all sites, by name.
    :raises ValueError: for such an output.
    """
    if not is_expected(message["fn"]):
        return
    if message["infer"].get("enumerate") == "parallel":
        raise ValueError(
            f"`{name}` has a likelihood of numpyro_orthgp and no observations. Its log density is an expectation, "
            f'so there are no values to enumerate. Leave infer={{"enumerate": "parallel"}} out, or leave out the '
            "rows without outputs."
        )
    if not hidden_by_mask(name, messages) and is_calling(SVI, "run"):
        raise ValueError(
            f"`{name}` is not observed, so there is nothing to fit. Pass the observations, svi.run(rng_key, num_steps, X, y), and "
            f"hand them on in the model: numpyro.sample({name!r}, ..., obs=y)."
        )


def refuse_objective(enumerated: Iterable[str], in_loops: Sequence[str]) -> None:
    """Refuse objectives that calculate something else than a bound for the model, where they call the guide.

    ``TraceMeanField_ELBO`` looks for sites that are enumerated in the guide. ``TraceEnum_ELBO``, up to NumPyro 0.22, leaves out
    the first step of NumPyro's ``scan``, and does not sum over the states of a chain there.

    :param enumerated: names of sites that are enumerated.
    :param in_loops: names of sites in ``scan``, also of observed ones.
    :raises ValueError: for these two.
    """
    names = ", ".join(f"`{name}`" for name in enumerated)
    if names and is_calling(TraceMeanField_ELBO):
        raise ValueError(
            f"TraceMeanField_ELBO does not sum over {names}, which the model marks by infer={{'enumerate': 'parallel'}}. "
            "TraceEnum_ELBO does, and has the same analytic divergence of f: SVI(model, guide, optim, TraceEnum_ELBO())."
        )
    if in_loops and is_calling(TraceEnum_ELBO):
        raise ValueError(
            f"TraceEnum_ELBO leaves out the first step of numpyro's scan, which holds `{in_loops[0]}`: the loss would be no bound. "
            "NUTS and HMC sum over states in scan as they should. In SVI write the steps as a loop of Python, or sum over states "
            "in the model, with numpyro.factor and the log_prob of likelihoods of numpyro_orthgp, and take TraceMeanField_ELBO."
        )


def check_handlers(declared: Iterable[str], messages: Mapping[str, dict[str, Any]], in_loops: Iterable[str]) -> None:
    """Say what handlers around the model do to its sites that a guide does not follow.

    :param declared: names of the sites that the primitives of the model have declared.
    :param messages: messages of all sites, by name.
    :param in_loops: names of sites in ``scan``, which have values before other handlers see them.
    :raises ValueError: if there is no Gaussian for a site that they hide or replace.
    """
    _refuse_replaced(declared, messages)
    looped = set(in_loops)
    for name, message in messages.items():
        is_latent = message["type"] == "sample" and not message["is_observed"] and name not in looped
        if is_latent and message["kwargs"].get("rng_key") is None:  # nobody had to draw it
            warnings.warn(
                f"`{name}` has a value from handlers.substitute around the model. In a fit the guide's values take its place, so "
                f"it is a start, and does not fix `{name}`. To fix it use handlers.condition(model, {{{name!r}: value}}).",
                RuntimeWarning,
                stacklevel=2,
            )


def _refuse_replaced(declared: Iterable[str], messages: Mapping[str, dict[str, Any]]) -> None:
    # `handlers.do` keeps the site, and gives its value to a second one that nobody sees.
    types = {name: messages.get(name.removesuffix("__CF"), {}).get("type") for name in declared}
    for name, kind in types.items():
        if kind == "deterministic":
            raise ValueError(
                f"AutoSparseGP has no Gaussian for `{name}`, since handlers.reparam around the model replaces this site. Leave it "
                "out there: inducing variables have the prior N(0, I), and f needs no reparametrization. NUTS and NumPyro's guides "
                "take the model as it is."
            )
        if kind is None:
            raise ValueError(
                f"AutoSparseGP has no Gaussian for `{name}`, since handlers.block around it hides this site: each step would draw "
                "it anew from its prior. Do not hide it. To fix its value use handlers.condition; for a fitted function call "
                "posterior(...) outside of the model."
            )
