"""Who is calling: methods of NumPyro, loops, and transformations of JAX that the model itself applies.

NumPyro and JAX do not tell a model what they do with it, but it shows in the stack while they trace.
"""

from __future__ import annotations

import sys
from typing import Any

from numpyro.infer.autoguide import AutoGuide
from numpyro.primitives import _PYRO_STACK, plate

__all__ = [
    "in_control_flow",
    "is_calling",
    "is_latent_of_guide",
    "is_starting",
    "looking_ahead",
    "transformation",
    "who_asks",
    "without_randomness",
]

# What calls a function of the user's: modules of JAX, or names of functions in one of them.
_DERIVATIVES = ("value_and_grad_f", "_jvp", "_vjp", "linearize")
_LOOPS = ("jax._src.lax.control_flow.loops", "jax._src.lax.control_flow.for_loop")
_CALLS = (
    "jax._src.pjit",
    "jax._src.custom_derivatives",
    "jax._src.ad_checkpoint",
    "jax._src.lax.control_flow.conditionals",
)


def is_calling(owner: type | str, method: str = "") -> bool:
    """Whether a method of a class, or of a subclass, is among the callers.

    :param owner: the class, or its name if it may not be installed.
    :param method: the name of the method; by default any.
    """
    # Look at names of methods, not at local variables: reading those keeps a copy of them, including tracers.
    frame: Any = sys._getframe(1)
    while frame is not None:
        name, _, of_class = frame.f_code.co_qualname.partition(".")
        found = frame.f_globals.get(name)
        if isinstance(found, type) and of_class.startswith(method):
            if found.__name__ == owner if isinstance(owner, str) else issubclass(found, owner):
                return True
        frame = frame.f_back
    return False


def in_control_flow(which: str = "scan") -> bool:
    """Whether the model runs a step of NumPyro's ``scan``, or a branch of its ``cond``."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != f"numpyro.contrib.control_flow.{which}":
        frame = frame.f_back
    return frame is not None


def looking_ahead() -> bool:
    """Whether NumPyro's ``scan`` runs a step to see its sites, before it runs the step again and replays them."""
    frame: Any = sys._getframe(1)
    traced = False
    while frame is not None and (module := frame.f_globals.get("__name__")) != "numpyro.contrib.control_flow.scan":
        traced = traced or (module == "numpyro.handlers" and frame.f_code.co_name == "get_trace")
        frame = frame.f_back
    return frame is not None and traced


def without_randomness() -> bool:
    """Whether inference runs the model that takes its density for a function of latent sites, such as NUTS.

    Since 0.22 NumPyro gives it one and the same random key each time. Its guides look for first values there, which is harmless.
    """
    fixed = any(type(handler).__name__ == "_substitute_default_key" for handler in _PYRO_STACK)
    return fixed and not is_calling(AutoGuide, "_setup_prototype")


def is_starting(guide: str = "AutoGuide") -> bool:
    """Whether a guide of NumPyro looks for first values of all latent sites of the model.

    :param guide: the name of its class, or of one of its base classes.
    """
    return is_calling("AutoGuide", "_setup_prototype") and is_calling(guide, "_setup_prototype")


def is_latent_of_guide() -> bool:
    """Whether a guide of NumPyro asks a distribution for its support, as it does for all latent sites before it starts."""
    frame: Any = sys._getframe(1)
    while frame is not None and (module := frame.f_globals.get("__name__")) != "numpyro.primitives":
        if module == "numpyro.infer.util" and frame.f_code.co_name == "_get_model_transforms":
            return is_starting()
        frame = frame.f_back
    return False


def who_asks() -> str:
    """Who reads the property that calls this: a "plate" around a site, a "censored" distribution of NumPyro's, or nothing known."""
    asking: Any = sys._getframe(2)
    if asking.f_code is plate.process_message.__code__:
        return "plate"
    return "censored" if asking.f_globals.get("__name__") == "numpyro.distributions.censored" else ""


def transformation() -> str:
    """What JAX does with the part of the running model that calls this: "derivative", "loop", "call" or nothing."""
    frame: Any = sys._getframe(1)
    found = set()
    while frame is not None and (module := frame.f_globals.get("__name__")) != "numpyro.primitives":
        name = frame.f_code.co_name
        if module == "jax._src.api" and name in _DERIVATIVES:
            found.add("derivative")
        if module in _LOOPS or (module == "jax._src.api" and name == "vmap_f"):
            found.add("loop")
        if module in _CALLS:
            found.add("call")
        frame = frame.f_back
    return next((kind for kind in ("derivative", "loop", "call") if kind in found), "")
