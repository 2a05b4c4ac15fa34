"""For :func:`lazy_rows`: which parameters have one row per row of the data (tables), and which rows a step sees.

NumPyro's messages show it: a table is a ``param`` site with an ``event_dim`` in a plate that picks the rows of the batch. The plate
takes rows out of the table. A table already reduced to the batch is passed on without ``event_dim``, so the plate does not change
it.

**A batch may contain a row twice**, if an epoch ends within it. The gradients of both add up, as in a dense gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from numpyro_orthgp.types import Array

__all__ = ["Picked", "RowsOfBatch", "known_rows"]

_batch: ContextVar[RowsOfBatch | None] = ContextVar("rows of the batch", default=None)


def known_rows(method: str) -> RowsOfBatch:
    batch = _batch.get()
    if batch is None:
        raise ValueError(
            f"{method} does not know which rows a batch holds, so lazy_rows cannot step them: use ogp.fit, which does. It starts "
            "from init_params=, or from the state of another fit."
        )
    return batch


class RowsOfBatch(Messenger):
    """Finds the tables among parameters when a state is made, and passes their rows on during a step.

    It is an outer handler, so it sees a parameter before the parameter's plate takes rows out of it.

    :param size, batch_size, rows, everywhere: as for :func:`rows_of`.
    """

    def __init__(self, size: int, batch_size: int, rows: Array | None, everywhere: Sharding | None) -> None:
        super().__init__(None)
        self.size, self.batch_size, self.rows, self.everywhere = size, batch_size, rows, everywhere
        self.sizes: dict[str, tuple[int, int]] = {}  # sizes of plates, and how many rows each picks
        self.tables: dict[str, int] = {}  # tables found, and the axis of their rows
        self.given: frozenset[str] | None = None  # tables passed on during a step
        self._token: Token[Any] | None = None

    def __enter__(self) -> RowsOfBatch:
        super().__enter__()
        self._token = _batch.set(self)
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._token is not None
        _batch.reset(self._token)
        super().__exit__(*error)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            self.sizes[msg["name"]] = msg["args"]

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "param":
            return
        if self.given is None:
            self._note(msg)
        elif msg["name"] in self.given:
            if self._frame(msg) is None:
                raise ValueError(
                    f"lazy_rows knows only the rows of the batch, but `{msg['name']}`, which has a row for each "
                    "of the data, is also read outside of their plate, or without event_dim. Read it inside of "
                    "the plate, with event_dim."
                )
            msg["kwargs"] = {name: value for name, value in msg["kwargs"].items() if name != "event_dim"}

    def _frame(self, msg: dict[str, Any]) -> Any:
        """The plate of the data, if the parameter is in it and has one row per element."""
        frames = msg["cond_indep_stack"]
        own = [frame for frame in frames if self.sizes.get(frame.name) == (self.size, self.batch_size)]
        if not own or msg["kwargs"].get("event_dim") is None:
            return None
        others = [frame for frame in frames if frame is not own[0] and frame.size != self.sizes[frame.name][0]]
        if len(own) > 1 or others:
            raise ValueError(
                f"`{msg['name']}` is in several plates that pick rows ({', '.join(repr(f.name) for f in frames)}); lazy_rows "
                "knows tables with rows of one of them. Take optax.adam."
            )
        return own[0]

    def _note(self, msg: dict[str, Any]) -> None:
        name, shape, frame = msg["name"], jnp.shape(msg["value"]), self._frame(msg)
        axis = -1 if frame is None else len(shape) + frame.dim - msg["kwargs"]["event_dim"]
        if axis < 0 or shape[axis] != self.size:
            return
        constraint = msg["kwargs"].get("constraint", constraints.real)
        differs = any(np.ndim(leaf) for leaf in jax.tree.leaves(constraint))
        if differs or constraint.event_dim > msg["kwargs"]["event_dim"]:
            raise ValueError(
                f"lazy_rows takes rows out of `{name}`, so its constraint must be the same for all rows and concern one at a time: "
                f"got {constraint!r} with event_dim={msg['kwargs']['event_dim']}. Use bounds that are numbers."
            )
        self.tables[name] = axis

    def checked_tables(self, params: dict[str, Any]) -> dict[str, int]:
        """Names of the tables and the axis of their rows.

        :param params: all parameters, unconstrained.
        :raises ValueError: if there are none.
        """
        others = {name: x for name, x in params.items() if name not in self.tables}
        whole = [name for name, x in others.items() if any(self.size in leaf.shape[:1] for leaf in jax.tree.leaves(x))]
        if not self.tables:
            raise ValueError(
                "lazy_rows found no parameter with a row for each of the data: numpyro.param(name, start, event_dim=...) inside of "
                f"numpyro.plate('data', {self.size}, subsample_size={self.batch_size})"
                + (
                    f"; {', '.join(map(repr, whole))} is none."
                    if whole
                    else ", or latent_inputs. Take its `others` alone."
                )
            )
        if whole:
            warnings.warn(
                f"{', '.join(map(repr, whole))} has {self.size} rows, and lazy_rows updates all of them at each "
                "step, not only those of the batch. Declare it inside of the plate of the data, with event_dim.",
                UserWarning,
                stacklevel=2,
            )
        return self.tables

    @contextmanager
    def handed(self, rows: dict[str, Any]) -> Iterator[None]:
        """A context in which these tables have only the rows of the batch."""
        self.given = frozenset(rows)
        try:
            yield
        finally:
            self.given = None

    def picked(self, num: int) -> Picked:
        """
        :param num: number of rows of the tables.
        """
        if self.rows is None:
            return Picked(None, None, self.everywhere)
        rows = _constrained(self.rows, self.everywhere)
        # Unused places get a number that no row has, so that nothing is put there.
        unique, inverse = jnp.unique(rows, return_inverse=True, size=self.batch_size, fill_value=num)
        return Picked(unique, inverse, self.everywhere)


@dataclass(frozen=True)
class Picked:
    """The distinct rows of a batch; ``None`` for all rows, in order.

    :param unique: their numbers, shape (B,), padded with a number that no row has.
    :param inverse: index of each row of the batch in ``unique``, shape (B,).
    :param sharding: sharding for arrays that every device has a copy of.
    """

    unique: Array | None
    inverse: Array | None
    sharding: Sharding | None

    def everywhere(self, x: Array) -> Array:
        """On a mesh, copy ``x`` to every device. Otherwise XLA may make one table per device and add them up."""
        return x if self.unique is None else _constrained(x, self.sharding)

    def take(self, table: Array, axis: int) -> Array:
        """Rows of a table. Unused places get an arbitrary row."""
        return table if self.unique is None else self.everywhere(jnp.take(table, self.unique, axis, mode="clip"))

    def in_batch(self, rows: Array, axis: int) -> Array:
        """Distinct rows, expanded to the rows of the batch."""
        return rows if self.inverse is None else jnp.take(rows, self.inverse, axis, mode="clip")

    def put(self, table: Array, rows: Array, axis: int) -> Array:
        """The table with these rows replaced; in place within a loop."""
        if self.unique is None:
            return rows
        at = (slice(None),) * axis + (self.unique,)
        return table.at[at].set(self.everywhere(rows), mode="drop", unique_indices=True)


def _constrained(x: Array, sharding: Sharding | None) -> Array:
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)
