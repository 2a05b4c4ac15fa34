"""How :class:`AutoSparseGP` shares a model's sites with the guide of everything else.

``TraceMeanField_ELBO`` warns when guide and model differ in the order of sites, so each gp is emitted between the other latent
sites where the model has it (:class:`InModelOrder`). NumPyro's guides run their model and its gradient before they start,
operation by operation; of the model that the ``hyper`` guide gets only the sites before the functions are run meanwhile
(:meth:`WithoutGPs.only`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import is_expected
from numpyro_orthgp.primitives.messages import input_site_of, is_enumerated, site_of
from numpyro_orthgp.types import Array

__all__ = ["EvenRows", "InModelOrder", "KeysUsed", "OutputsByRow", "SamePlates", "WithoutGPs", "hidden_by_mask"]


def hidden_by_mask(name: str, names: Container[str]) -> bool:
    """Whether a site is the hidden part of one with `obs_mask`, which NumPyro calls {site}_unobserved beside {site}_observed."""
    return name.endswith("_unobserved") and name.removesuffix("_unobserved") + "_observed" in names


class _NothingLeft(Exception):
    """Every site has been emitted that the caller of a model asked for."""


class WithoutGPs(Messenger):
    """A model whose gp sites no outer handler sees, nor enumerated ones, nor outputs hidden by `obs_mask`: for ``hyper``."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)
        self._seen: set[str] = set()
        self._needed: Collection[str] = ()
        self._left: set[str] = set()

    @contextmanager
    def only(self, names: Collection[str]) -> Iterator[None]:
        """Meanwhile the model stops once it has emitted these sites: before the functions that are made of them, as a rule.

        NumPyro's guides run it and its gradient several times before they start, operation by operation.
        """
        self._needed = names
        try:
            yield
        finally:
            self._needed = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left = set(self._needed)
        try:
            return super().__call__(*args, **kwargs)
        except _NothingLeft:
            return None

    def process_message(self, msg: dict[str, Any]) -> None:
        if self._needed and not self._left and msg["type"] in ("sample", "param", "plate"):
            raise _NothingLeft
        if msg["type"] != "sample":
            return
        self._left.discard(msg["name"])
        self._seen.add(msg["name"])
        if msg["is_observed"]:
            return
        ours = site_of(msg) is not None or input_site_of(msg) is not None
        if is_enumerated(msg):
            if msg["value"] is None:
                first = msg["fn"].enumerate_support(expand=False)[0]
                msg["value"] = jnp.broadcast_to(first, msg["fn"].shape())
            msg["stop"] = True
        elif ours or is_expected(msg["fn"]) or hidden_by_mask(msg["name"], self._seen):
            if msg["value"] is None:
                msg["value"] = jnp.zeros(msg["fn"].shape(), getattr(site_of(msg), "dtype", None))
            msg["stop"] = True


class EvenRows(Messenger):
    """Lets plates that would pick rows at random pick evenly spread ones: a fitted function does not depend on which.

    On CPUs NumPyro's random choice is a loop that XLA compiles anew each time.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            size, picked = msg["args"]
            if picked < size:
                msg["value"] = jnp.asarray(np.arange(picked) * size // picked)


class InModelOrder(Messenger):
    """Emits our sites between the other latent sites where the model has them, as TraceMeanField_ELBO asks.

    :param order: names of all latent sites in the model's order.
    :param pending: ours, each with its position and what emits it.
    """

    def __init__(self, order: list[str], pending: list[tuple[int, Callable[[], Any]]]) -> None:
        super().__init__()
        self.order = order
        self.pending = sorted(pending, key=lambda entry: entry[0])

    def __enter__(self) -> InModelOrder:
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        # Inside a plate the gp's sites would become part of it: wait for the next site outside.
        if msg["type"] == "sample" and not msg["cond_indep_stack"] and msg["name"] in self.order:
            self.emit(before=self.order.index(msg["name"]))

    def emit(self, before: int | None = None) -> None:
        while self.pending and (before is None or self.pending[0][0] < before):
            self.pending.pop(0)[1]()


class OutputsByRow(Messenger):
    """Outputs that nobody observed are drawn row by row, where nothing looks at more of them than their marginals.

    Joint draws would take a covariance between all rows, of which there may be too many.
    """

    def __init__(self) -> None:
        super().__init__()

    def __enter__(self) -> OutputsByRow:
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["value"] is None and is_expected(msg["fn"]):
            msg["fn"] = jax.tree.map(
                lambda leaf: leaf.independent() if isinstance(leaf, Marginals) else leaf,
                msg["fn"],
                is_leaf=lambda leaf: isinstance(leaf, Marginals) or getattr(leaf, "sees_several", False),
            )


class KeysUsed(Messenger):
    """Counts the random keys that are asked for while a condition holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self.condition, self.count = condition, 0

    def __enter__(self) -> KeysUsed:
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        # One that an inner handler has given already costs nothing outside.
        if msg["type"] == "prng_key" and msg["kwargs"]["rng_key"] is None and self.condition():
            self.count += 1


class SamePlates(Messenger):
    """Lets plates of these names pick the rows that have been picked already, wherever they are made again.

    :param picked: row numbers by the name of the plate.
    """

    def __init__(self, picked: dict[str, Array]) -> None:
        super().__init__()
        self.picked = picked

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] in self.picked:
            msg["value"] = self.picked[msg["name"]]
