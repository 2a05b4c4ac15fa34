"""Tells plates the rows of a batch: ``fit`` picks the rows, not the plates.

``fit`` passes the row numbers of the batch through a handler around ``svi.update``, which uses no random key. The same handler
warns of observations that are not scaled up from the batch, and raises an error for a model without observations.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.primitives import Messenger

from numpyro_orthgp.errors import Unobserved
from numpyro_orthgp.types import Array

__all__ = ["PlatesOfBatch"]


class PlatesOfBatch(Messenger):
    """Makes the plates of the data pick the rows of the batch, so that latent variables of single rows belong to the batch's rows.

    By itself, a plate of size N with ``subsample_size`` B draws its own row numbers, and the batch would get latent variables of
    other rows. There is a warning if observations count for the batch alone, or for a number other than that of the data. If a
    site has several plates, one of the right size is enough: another may pick B of something else.

    :param rows: row numbers of the batch, shape (B,); ``None`` if they are not known, as for a stream. Then latent variables of
        single rows raise an error.
    :param size: B.
    :param num_rows: N.
    :param stands_for: number of observations that the N rows stand for.
    """

    def __init__(self, rows: Array | None, size: int, num_rows: int, stands_for: int) -> None:
        super().__init__(None)
        self.rows, self.size, self.num_rows, self.stands_for = rows, size, num_rows, stands_for
        self.sizes: dict[str, tuple[int, int | None]] = {}  # sizes of all plates so far, and how many rows each picks
        self.latents: list[str] = []
        self.observes = False

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        """
        :raises ValueError: if there were latent sites, but no observed ones.
        """
        super().__exit__(exc_type, exc_value, traceback)
        # One objective of NumPyro looks up sites in the guide's trace, and finds no output there.
        is_drawn = exc_type in (None, Unobserved) or (exc_type is KeyError and exc_value.args[0] in self.latents)
        if is_drawn and self.latents and not self.observes:
            raise ValueError(
                f"The model observes nothing, so the fit would end at the prior: none of its sites ({', '.join(self.latents[:5])}) "
                "has `obs`. Pass the observations, fit(svi, rng_key, (X, y), ...), and hand them on: numpyro.sample(..., obs=y)."
            )

    def process_message(self, msg: dict[str, Any]) -> None:
        size = self.size
        if msg["type"] == "sample":
            self.observes |= msg["is_observed"]
            if not msg["is_observed"] and msg["name"] not in self.latents:
                self.latents.append(msg["name"])
        if msg["type"] == "plate":
            self.sizes[msg["name"]] = msg["args"]
            if msg["args"] == (self.stands_for, size) and msg["value"] is None:
                # For a stream any numbers will do, as nothing may depend on them.
                msg["value"] = jnp.arange(size) if self.rows is None else self.rows
        elif self.rows is None and not msg.get("is_observed") and self.is_of_rows(msg):
            raise ValueError(
                f"`{msg['name']}` has a value for each row of the data, but a stream does not say which rows are "
                "in a batch. Pass arrays instead, or lazy ones (h5py, zarr, training.columns), whose rows have "
                "numbers."
            )
        elif msg["type"] == "sample" and msg["is_observed"]:
            if (repeats := _repeats(msg)) > 1:
                warnings.warn(_words_of_repeats(msg, repeats), UserWarning, stacklevel=2)
            _warn_of_scale(msg)
            if (counted := self.counted(msg)) not in (None, self.stands_for):
                warnings.warn(self.words(msg, counted), UserWarning, stacklevel=2)

    def is_of_rows(self, msg: dict[str, Any]) -> bool:
        """Whether a site has a value for each row, of which the batch's rows are selected."""
        if msg["type"] not in ("sample", "param", "subsample"):
            return False
        if msg["type"] != "sample" and msg["kwargs"].get("event_dim") is None:
            return False
        if msg["type"] == "subsample" and self.stands_for not in jnp.shape(msg["value"]):
            return False
        plates = (self.sizes.get(frame.name) for frame in msg["cond_indep_stack"])
        return (self.stands_for, self.size) in plates

    def counted(self, msg: dict[str, Any]) -> float | None:
        """For how many observations the batch counts at a site; ``None`` if unknown, or if the site does not see a batch."""
        size, scale = self.size, msg["scale"]
        picking = [
            whole
            for whole, picked in (self.sizes.get(frame.name, (0, None)) for frame in msg["cond_indep_stack"])
            if picked == size != whole
        ]
        if picking:
            return self.stands_for if self.stands_for in picking else picking[0]
        # With all data at once a smaller weight may be intended: a power of the likelihood.
        if size == self.stands_for or size not in jnp.shape(msg["value"])[:1]:
            return None
        if scale is None:
            return size
        return round(size * scale, 6) if isinstance(scale, (int, float)) else None

    def words(self, msg: dict[str, Any], counted: float) -> str:
        """The text of the warning."""
        size, wanted = self.size, self.stands_for
        say = f"numpyro.plate('data', {wanted}, subsample_size={size})"
        if counted == size:
            return (
                f"`{msg['name']}` counts its {size} observations as all the data, of which they are a batch: the fit would be too "
                f"uncertain. Say how many rows there are: {say}."
            )
        why = f"`stands_for` says {wanted}" if wanted != self.num_rows else f"`data` has {wanted} rows"
        return (
            f"`{msg['name']}` counts its {size} observations as {counted:g} (the size of a plate, or a scale), but {why}: the fit "
            f"would be too {'certain' if counted > wanted else 'uncertain'}. Give the plate the number of rows that are fitted, "
            f"after any split: {say}. If the rows stand for {counted:g} observations, say so: fit(..., stands_for={counted:g})."
        )


def _repeats(msg: dict[str, Any]) -> int:
    """How often the plates around an observed site count its value, which is one event and has no axis of theirs."""
    event_dim = msg["fn"].event_dim
    is_one_event = event_dim > 0 and jnp.shape(msg["value"]) == tuple(msg["fn"].event_shape)
    return math.prod(frame.size for frame in msg["cond_indep_stack"]) if is_one_event else 1


def _words_of_repeats(msg: dict[str, Any], repeats: int) -> str:
    fn = msg["fn"]
    if isinstance(getattr(fn, "base_dist", fn), dist.Unit):
        return (
            f"`{msg['name']}` adds its one number once for each of the {repeats} rows of plates around it. Give numpyro.factor one "
            "number for each row, or put it outside of the plate."
        )
    return (
        f"`{msg['name']}` counts its only event, of shape {jnp.shape(msg['value'])}, once for each of the {repeats} rows of plates "
        "around it: the fit would be too certain. Leave `.to_event()` out within the plate, or leave the plate out."
    )


def _warn_of_scale(msg: dict[str, Any]) -> None:
    """Warn of weights that broadcast log densities to more axes, so that each row counts several times."""
    batch, scale = msg["fn"].batch_shape, () if msg["scale"] is None else jnp.shape(msg["scale"])
    if not batch or not scale:
        return
    together = jnp.broadcast_shapes(scale, batch)
    if math.prod(together) > math.prod(batch):
        warnings.warn(
            f"`{msg['name']}` counts its rows several times: a scale of shape {scale} and log densities of shape {batch} broadcast "
            f"to {together}. Weights of rows have the shape {batch}.",
            UserWarning,
            stacklevel=2,
        )
