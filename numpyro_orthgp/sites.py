"""What a function needs of the model that it is in: a random key, names for sites of its own, and where its rows lie."""

from __future__ import annotations

import warnings

import numpyro
from numpyro.distributions import Unit
from numpyro.primitives import _PYRO_STACK

from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["Names", "charge", "prng_key"]


def prng_key() -> PRNGKey | None:
    """A key from the model's ``seed`` handler; ``None``, without a warning, where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return numpyro.prng_key()


def charge(name: str, cost: Array) -> None:
    """Subtract a cost of each row from the model's log density: once for each, along the plate of the rows.

    Where that plate is not the rightmost one, ``numpyro.factor`` would lay the costs along another and repeat them. Of several
    plates of that size it is the one that subsamples, whose scale the costs have; which of others is the same in sum.

    :param cost: shape (B,).
    """
    plates = [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]
    fitting = [p for p in plates if p.subsample_size == len(cost)]
    of_rows = max(fitting, key=lambda p: (p.size != p.subsample_size, p.dim), default=None)
    others = [] if of_rows is None else [p.name for p in plates if p is not of_rows]
    dim = -1 if of_rows is None else of_rows.dim
    fn = Unit(-cost.reshape(-1, *(1,) * (-dim - 1)))
    numpyro.sample(name, fn, obs=fn.sample(None), infer={"block_plates": others})


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
