"""How :class:`AutoSparseGP` shares a model's sites with the ``hyper`` guide.

``TraceMeanField_ELBO`` warns if guide and model differ in the order of sites, so each gp is emitted at the model's position between
the other latent sites (:class:`InModelOrder`). Before NumPyro's guides start, they run their model and its gradient operation by
operation. During this time the model of the ``hyper`` guide runs only up to the sites that it needs (:meth:`WithoutGPs.only`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions.transforms import biject_to
from numpyro.primitives import Messenger

from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import is_expected
from numpyro_orthgp.primitives.messages import input_site_of, is_enumerated, site_of
from numpyro_orthgp.types import Array

__all__ = ["EvenRows", "InModelOrder", "KeysUsed", "OutputsByRow", "SamePlates", "WithoutGPs", "hidden_by_mask"]


def hidden_by_mask(name: str, names: Container[str]) -> bool:
    """Whether a site is the hidden part of a site with `obs_mask`, {site}_unobserved; the other part is {site}_observed."""
    return name.endswith("_unobserved") and name.removesuffix("_unobserved") + "_observed" in names


class _NothingLeft(Exception):
    """All sites that the caller of a model needs have been emitted."""


class WithoutGPs(Messenger):
    """A model for ``hyper``: outer handlers do not see its gp sites, enumerated sites, or outputs hidden by `obs_mask`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)
        self._seen: set[str] = set()
        self._needed: Collection[str] = ()
        self._left: set[str] = set()
        self._step: Any = None
        self.after_functions: set[str] = set()  # latent sites that may depend on a function of ours, in the last run
        self._has_function = False

    @contextmanager
    def moved(self, step: Any) -> Iterator[None]:
        """Context in which the sites of ours have this value, so that what depends on them does on ``step``."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    @contextmanager
    def only(self, names: Collection[str]) -> Iterator[None]:
        """Context in which the model stops after it has emitted these sites, usually before the functions that use them.

        NumPyro's guides run the model and its gradient several times before they start, operation by operation.
        """
        self._needed = names
        try:
            yield
        finally:
            self._needed = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left, self._has_function, self.after_functions = set(self._needed), False, set()
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
        self._has_function |= ours
        if is_enumerated(msg):
            if msg["value"] is None:
                first = msg["fn"].enumerate_support(expand=False)[0]
                msg["value"] = jnp.broadcast_to(first, msg["fn"].shape())
            msg["stop"] = True
        elif ours or is_expected(msg["fn"]) or hidden_by_mask(msg["name"], self._seen):
            if msg["value"] is None:
                msg["value"] = jnp.zeros(msg["fn"].shape(), getattr(site_of(msg), "dtype", None))
            if ours and self._step is not None:
                msg["value"] = msg["value"] + self._step.astype(msg["value"].dtype)
            msg["stop"] = True
        elif self._has_function:
            self.after_functions.add(msg["name"])


class EvenRows(Messenger):
    """Lets plates that would pick rows at random pick evenly spread rows; a fitted function does not depend on them.

    On CPUs NumPyro's random choice is a loop that XLA compiles anew each time.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["value"] is None:
            size, picked = msg["args"]
            if picked < size:
                msg["value"] = jnp.asarray(np.arange(picked) * size // picked)


class InModelOrder(Messenger):
    """Emits our sites at the model's positions between the other latent sites, as TraceMeanField_ELBO requires.

    :param order: names of all latent sites in the model's order.
    :param pending: our sites, each with its position and a function that emits it.
    """

    def __init__(self, order: list[str], pending: list[tuple[int, Callable[[], Any]]]) -> None:
        super().__init__()
        self.order = order
        self.pending = sorted(pending, key=lambda entry: entry[0])

    def __enter__(self) -> InModelOrder:
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        # Inside a plate the gp's sites would become part of it, so wait for the next site outside.
        if msg["type"] == "sample" and not msg["cond_indep_stack"] and msg["name"] in self.order:
            self.emit(before=self.order.index(msg["name"]))

    def emit(self, before: int | None = None) -> None:
        while self.pending and (before is None or self.pending[0][0] < before):
            self.pending.pop(0)[1]()


class OutputsByRow(Messenger):
    """Draws unobserved outputs row by row, if only their marginals matter.

    Joint draws would need a covariance between all rows, and there may be too many rows. Sites with an improper prior, which has no
    draws, get the value whose unconstrained numbers are zero.
    """

    def __init__(self) -> None:
        super().__init__()

    def __enter__(self) -> OutputsByRow:
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        if _has_no_draws(msg["fn"]):
            transform = biject_to(msg["fn"].support)
            shape = transform.inverse_shape(msg["kwargs"].get("sample_shape", ()) + msg["fn"].shape())
            msg["value"] = transform(jnp.zeros(shape))
        elif is_expected(msg["fn"]):
            msg["fn"] = jax.tree.map(
                lambda leaf: leaf.independent() if isinstance(leaf, Marginals) else leaf,
                msg["fn"],
                is_leaf=lambda leaf: isinstance(leaf, Marginals) or getattr(leaf, "sees_several", False),
            )


def _has_no_draws(fn: Any) -> bool:
    """Whether a prior cannot be drawn from: ``ImproperUniform``, also expanded, masked or transformed."""
    while isinstance(fn, dist.Distribution) and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return getattr(type(fn), "sample", None) is dist.Distribution.sample and not fn.support.is_discrete


class KeysUsed(Messenger):
    """Counts requests for random keys while a condition holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self.condition, self.count = condition, 0

    def __enter__(self) -> KeysUsed:
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        # A key from an inner handler does not count.
        if msg["type"] == "prng_key" and msg["kwargs"]["rng_key"] is None and self.condition():
            self.count += 1


class SamePlates(Messenger):
    """Lets plates with these names pick the same rows again.

    :param picked: row numbers by name of the plate.
    """

    def __init__(self, picked: dict[str, Array]) -> None:
        super().__init__()
        self.picked = picked

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] in self.picked:
            msg["value"] = self.picked[msg["name"]]
