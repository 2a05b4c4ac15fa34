"""Latent sites in branches of NumPyro's ``cond``, under guides of NumPyro, which do not say that the branch ignores what they draw.

Such a site does not know where it is once the model has ended. But before a guide of NumPyro starts, it asks each latent site of
its look at the model for its support. So the prior of a gp looks at the other sites then.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from numpyro.handlers import trace
from numpyro.primitives import _PYRO_STACK

from numpyro_orthgp.functions.callers import is_latent_of_guide, is_starting
from numpyro_orthgp.gaussians.distributions import WhitenedPrior

__all__ = ["IN_A_BRANCH", "PriorInModel"]

IN_A_BRANCH = (
    "`{name}` is in a branch of numpyro's cond, which does not hand on what a guide draws: the loss would not belong to it. "
    "Declare the site before the cond, and use its value in the branches."
)


class PriorInModel(WhitenedPrior):
    """The prior of a gp's inducing variables, which refuses other latent sites in branches to guides of NumPyro."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        super().__init__(shape, dtype)
        if is_starting():
            looks = [handler.trace for handler in _PYRO_STACK if isinstance(handler, trace)]
            self._beside = ref(looks[-1]) if looks else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_beside"}

    @property
    def support(self) -> Any:
        """
        :raises ValueError: if a guide of NumPyro asks, and there is such a site.
        """
        beside = getattr(self, "_beside", None)
        if beside is not None and is_latent_of_guide():
            for name, site in (beside() or {}).items():
                # NumPyro notes the step at sites of `scan`, whose values are handed on.
                of_cond = site.get("_control_flow_done") and "_scan_current_index" not in site.get("infer", {})
                if of_cond and site["type"] == "sample" and not site["is_observed"]:
                    raise ValueError(IN_A_BRANCH.format(name=name))
        return super().support
