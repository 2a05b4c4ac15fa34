"""What handlers around a function do to the divergence of its q, in fits with a guide of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.primitives import _PYRO_STACK

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.primitives.messages import belief_of

__all__ = ["check_divergence"]


def check_divergence(messages: Sequence[dict[str, Any]]) -> None:
    """Refuse masks and scales after which the loss would not be what they say.

    :param messages: of the sites of one function.
    :raises ValueError: within ``handlers.mask(mask=False)``, and if ``handlers.scale`` is around the model alone.
    """
    for message in messages:
        belief = belief_of(message)
        if belief is not None and not belief.asked:
            _refuse_no_prior(message)
            _refuse_scale_of_model_alone(message)


def _refuse_no_prior(message: dict[str, Any]) -> None:
    """Refuse a fit without the density of the prior: the less q says, the lower its loss."""
    fn = message["fn"]
    if isinstance(fn, dist.MaskedDistribution) and is_concrete(fn._mask) and not np.any(np.asarray(fn._mask)):
        raise ValueError(
            f"`{message['name']}` is within handlers.mask(mask=False), so that f has no prior, and the loss may fall without "
            "end as q becomes wider. Put the mask around the sites of y alone, and declare f = gp(...) outside of it."
        )


def _refuse_scale_of_model_alone(message: dict[str, Any]) -> None:
    """Refuse a scale that the guide's site does not have: NumPyro multiplies the divergence by the scale of the guide's site or,
    with draws, log p alone by that of the model's."""
    name, scale = message["name"], message.get("scale")
    if scale is None or (is_concrete(scale) and np.all(np.asarray(scale) == 1)):
        return
    sites = [h.trace[name] for h in _PYRO_STACK if isinstance(h, numpyro.handlers.replay) and name in (h.trace or ())]
    other = sites[-1].get("scale") if sites else None
    are_known = is_concrete(scale) and is_concrete(other)
    if other is None or (are_known and np.any(np.asarray(scale) != np.asarray(other))):
        value, of_guide = (f" of {x}" if is_concrete(x) else "" for x in (scale, other))
        raise ValueError(
            f"`{name}` has a scale{value} in the model and {'none' if other is None else f'one{of_guide}'} in the guide, whose "
            "site tells NumPyro by what to multiply the divergence. To weigh it, scale the guide too: SVI(model, "
            "handlers.scale(guide, scale=...), ...). To weigh y, put handlers.scale around the sites of y alone, and declare "
            "f = gp(...) outside of it."
        )
