"""What a function needs of the model that it is in: a random key, and names for sites of its own."""

from __future__ import annotations

import warnings

import numpyro

from numpyro_orthgp.types import PRNGKey

__all__ = ["Names", "prng_key"]


def prng_key() -> PRNGKey | None:
    """A key from the model's ``seed`` handler; ``None``, without a warning, where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return numpyro.prng_key()


class Names:
    """Fresh site names for one function, the same ones each time the model runs.

    Equal to every other instance, so that as static data of a pytree it never causes a recompilation.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix, self.used = prefix, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names)

    def __hash__(self) -> int:
        return 0

    def fresh(self) -> str:
        self.used += 1
        return f"{self.prefix}.residual_cost{self.used - 1}"
