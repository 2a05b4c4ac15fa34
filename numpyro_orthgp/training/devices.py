"""Places batches and states on one device, or on the devices of a mesh, in one process or several.

JAX handles several devices: batches are sharded along their rows, states are replicated, and XLA adds up the parts of sums.
Everything that decisions depend on (losses, metrics, the content of a checkpoint) comes from the first process, or is equal in
all. Metrics, callbacks and results have arrays of their own process.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from numpyro_orthgp.math.digest import from_host, to_host
from numpyro_orthgp.training.layout import Layout, axes_of_rows, check_layout, layout_of_state

__all__ = ["Devices", "gathered", "together"]


class Devices:
    """The default device, or a mesh. Its axes divide the rows of a batch, and each device has a copy of the state.

    :param mesh: ``None`` for the default device.
    :param by_process: whether each process has its own rows.
    :param layout: which parameters are divided instead, along axes that do not divide rows (``training/layout.py``).
    :raises TypeError: if ``mesh`` is something else.
    :raises ValueError: if a process has its own rows but no device.
    """

    def __init__(self, mesh: Mesh | None, by_process: bool = False, layout: Layout | None = None) -> None:
        if not (mesh is None or isinstance(mesh, Mesh)):
            raise TypeError(f"`mesh` must be a jax.sharding.Mesh; got {type(mesh).__name__}.")
        # Axes are `Auto`: models are written for arrays without explicit sharding.
        self.mesh = mesh and Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        if by_process:
            self.mesh = _by_process(mesh)
        check_layout(layout, mesh)
        self.layout, self.axes = layout, () if self.mesh is None else axes_of_rows(self.mesh, layout)
        self.was_interrupted = False
        self.is_distributed = mesh is not None and len({d.process_index for d in mesh.devices.flat}) > 1
        # Layout of a state: one sharding, or a tree of them. With several processes, each has the whole state for its own use.
        self.of_state: Any = self.replicated
        self.is_first = not self.is_distributed or jax.process_index() == 0

    def check_shares(self, batch_size: int, is_full: bool) -> None:
        """Check that the devices of the mesh can share a batch evenly.

        :param is_full: whether a batch is all the data.
        :raises ValueError: if they cannot.
        """
        num = 1 if self.mesh is None else int(np.prod([self.mesh.shape[axis] for axis in self.axes]))
        if batch_size % num:
            got = f"all N = {batch_size} rows" if is_full else batch_size
            fits = batch_size // num * num
            hint = f"Use {fits}." if fits and not is_full else "Leave some rows out, or use minibatches."
            raise ValueError(f"`batch_size` must be a multiple of the {num} devices of `mesh`; got {got}. {hint}")

    @property
    def replicated(self) -> NamedSharding | None:
        """Sharding for arrays that every device has a copy of; ``None`` on the default device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def put_rows(self, shape: tuple[int, ...], dtype: Any, axis: int, read: Callable[[Any], np.ndarray]) -> jax.Array:
        """An array that is sharded by rows along ``axis``. ``read`` is called only for the rows of this process."""
        if self.mesh is None:
            return jnp.asarray(read((slice(None),) * len(shape)), dtype)
        spec = PartitionSpec(*[None] * axis, self.axes)
        return jax.make_array_from_callback(shape, NamedSharding(self.mesh, spec), read)

    def lay_out(self, svi: Any, state: Any) -> None:
        """Decide where the parts of states like this one lie."""
        if not self.is_distributed:
            self.of_state = layout_of_state(svi, state, self.layout, self.replicated)

    def put_state(self, state: Any) -> Any:
        """The state, copied to every device, or sharded as ``of_state`` says."""
        return state if self.mesh is None else jax.device_put(state, self.of_state)

    def local(self, state: Any) -> Any:
        """The state as ordinary arrays of this process, which can be combined with any others."""
        return state if self.mesh is None else jax.tree.map(lambda x: from_host(to_host(x), x), state)

    def agree(self, value: float) -> float:
        """The first process's value, in all processes, so that rounding cannot lead to different decisions."""
        if not self.is_distributed:
            return value
        words = np.asarray([value], np.float64).view(np.uint32)  # JAX with 32 bits would round a float64
        return float(np.asarray(multihost_utils.broadcast_one_to_all(words), np.uint32).view(np.float64)[0])

    def check_equal(self, make: Callable[[], str], num_rows: int, are_own: bool = False) -> None:
        """Check that all processes have equal data: each reads its share of a batch from its own data.

        :param make: returns a short text that must be equal in all processes.
        :param num_rows: N, for the message.
        :param are_own: whether each process has its own rows.
        :raises ValueError: in all processes, if texts differ.
        """
        if not self.is_distributed:
            return
        found = gathered(f"{self.together(make)} {num_rows}")
        if len(set(found)) == 1:
            return
        if are_own:
            raise ValueError(
                "Processes differ in more than their rows: names, dtypes or shapes of the data, `rng_key` or `batch_size` "
                f"({found[0]} in the first, {next(text for text in found if text != found[0])} in another)."
            )
        raise ValueError(
            f"Processes have different data (rows: {[int(text.split()[-1]) for text in found]}), `rng_key` or "
            "`batch_size`. Each process must pass all the rows, the same in every process, and reads only those "
            "that it needs. Rows of its own would get wrong weights. Put the rows where all processes can read "
            "them (np.memmap, h5py, zarr or parquet files), or say that each process has its own: "
            "training.Local((X, y))."
        )

    def together(self, make: Callable[[], Any]) -> Any:
        """:func:`together`; Ctrl-C in any process also ends it."""

        def made() -> Any:
            if self.was_interrupted:
                raise KeyboardInterrupt
            return make()

        return together(made) if self.is_distributed else make()

    @contextmanager
    def interrupts_wait(self) -> Iterator[None]:
        """Ctrl-C waits for the next :meth:`together`, where all processes end. If one ended earlier, the others would wait forever.

        A second Ctrl-C does not wait.
        """
        if not (self.is_distributed and threading.current_thread() is threading.main_thread()):
            yield
            return

        def note(number: int, frame: Any) -> None:
            self.was_interrupted = True
            signal.signal(signal.SIGINT, before)

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def of_first(self, make: Callable[[], Any]) -> Any:
        """The value that ``make`` returns in the first process, in all processes. It must be JSON-serializable."""
        if not self.is_distributed:
            return make()
        content = self.share(self.together(lambda: json.dumps(make()).encode() if self.is_first else None))
        return json.loads(content or b"null")

    def share(self, content: bytes | None) -> bytes | None:
        """The first process's bytes, in all processes."""
        if not self.is_distributed:
            return content
        size = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if content is None else len(content))))
        if size < 0:
            return None
        buffer = np.frombuffer(content, np.uint8) if self.is_first and content else np.zeros(size, np.uint8)
        return np.asarray(multihost_utils.broadcast_one_to_all(buffer), np.uint8).tobytes()


def _by_process(mesh: Mesh | None) -> Mesh:
    """A mesh of the same devices, with one axis for processes and one for the devices of a process."""
    num = jax.process_count()
    devices = [] if mesh is None else sorted(mesh.devices.flat, key=lambda d: (d.process_index, d.id))
    if [d.process_index for d in devices] != [i for i in range(num) for _ in range(len(devices) // num)] or not devices:
        raise ValueError(
            f"Rows of each of {num} processes (training.Local) need `mesh`, of as many devices of each of them: "
            "jax.make_mesh((jax.device_count(),), ('data',))."
        )
    return Mesh(np.asarray(devices).reshape(num, -1), ("process", "device"), axis_types=(AxisType.Auto,) * 2)


def gathered(text: str) -> list[str]:
    """The texts of all processes, in each process."""
    content = text.encode()
    size = int(np.max(multihost_utils.process_allgather(np.int32(len(content)))))
    found = multihost_utils.process_allgather(np.frombuffer(content.ljust(size), np.uint8))
    return [row.tobytes().decode().rstrip() for row in np.asarray(found).reshape(jax.process_count(), size)]


def together(make: Callable[[], Any]) -> Any:
    """Return ``make()``. If it raises in one process, all raise; otherwise the others would wait forever.

    :raises KeyboardInterrupt: if another process raised it.
    :raises RuntimeError: if another process raised any other error.
    """
    error, result = None, None
    try:
        result = make()
    except BaseException as caught:
        error = caught
    code = 0 if error is None else 1 if isinstance(error, KeyboardInterrupt) else 2
    codes = np.asarray(multihost_utils.process_allgather(np.int32(code))).ravel()
    if error is not None and (code == 2 or codes.max() == 1):
        raise error
    if codes.max() == 2:
        raise RuntimeError(
            f"Process {int(codes.argmax())} raised an error, which it says itself; this one ends with it."
        )
    if codes.max():
        raise KeyboardInterrupt
    return result
