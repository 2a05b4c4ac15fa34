"""What plates know of the rows of a batch, which ``fit`` picks and not they."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
from numpyro.primitives import Messenger

from numpyro_orthgp.types import Array

__all__ = ["PlatesOfBatch"]


class PlatesOfBatch(Messenger):
    """Lets the plates of the data pick the rows that a batch holds, so that what is local to a row is that row's.

    Left alone a plate of size N with ``subsample_size`` B draws numbers of its own, and latent variables of other rows would meet
    the batch. Warns of observations that stand for the batch alone.

    :param rows: numbers of the batch's rows, shape (B,).
    :param num_rows: N.
    """

    def __init__(self, rows: Array, num_rows: int) -> None:
        super().__init__(None)
        self.rows, self.num_rows = rows, num_rows

    def process_message(self, msg: dict[str, Any]) -> None:
        size = len(self.rows)
        if size == self.num_rows:
            return
        if msg["type"] == "plate" and msg["args"] == (self.num_rows, size) and msg["value"] is None:
            msg["value"] = self.rows
        elif msg["type"] == "sample" and msg["is_observed"] and msg["scale"] is None:
            if size in jnp.shape(msg["value"])[:1]:
                warnings.warn(
                    f"`{msg['name']}` counts its {size} observations as all the data, of which they are a batch: the fit would be "
                    f"too uncertain. Say how many rows there are: numpyro.plate('data', {self.num_rows}, subsample_size={size}).",
                    UserWarning,
                    stacklevel=2,
                )
