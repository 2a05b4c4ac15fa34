"""A run: the work between calls to the device.

**Reading ahead.** JAX computes asynchronously, so Python reads the rows of the next call while the device computes. Blocks on disk
take longer than one call, so a thread reads their next window (``Batches``).

**States are never overwritten** (no donated buffers), and a call is a pure function of its start. When a loss is not finite,
the call is repeated for fewer steps, from its start or from that of the call before, to find the last good state. So steps have no
extra cost. The last good state is the last one whose own loss was finite: the next one came from a gradient that may not have
been finite.

**NaN among the parameters** counts as a failed loss of the next step, so checkpoints and results never contain it. If no loss saw
it, bisection finds the step at which it appeared, so the answer does not depend on where calls end.

**Ctrl-C** saves the last state and returns the best one. If a process continues from a file and the next loss fails, there is no
earlier state, and it returns the file's state.

**An error** of a source, metric or callback saves the last state too, and then goes on. An error of reading ahead waits until the
steps of the call are counted.

**Several processes end together**: an error in one (in its reader, a callback, or Ctrl-C) is raised in all at the end of the call.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tqdm

from numpyro_orthgp.training import checkpoint
from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.checkpoint import Snapshot
from numpyro_orthgp.training.devices import Devices
from numpyro_orthgp.training.local import Feed, Shards
from numpyro_orthgp.training.not_finite import words_of_bad_rows
from numpyro_orthgp.training.plan import Plan
from numpyro_orthgp.training.result import FitResult, Progress, Status
from numpyro_orthgp.training.steps import Steps
from numpyro_orthgp.training.stopping import EarlyStopping, Windows, as_score

__all__ = ["Keeper", "Run"]

FIXES = (
    "Likely fixes: standardize inputs and outputs, a smaller learning rate, a larger `jitter`, 64-bit floats "
    "(numpyro.enable_x64())."
)
OF_ROWS = (
    "Remove or impute such rows; missing outputs may be masked (handlers.mask, with any allowed number in their place)."
)


@dataclass
class Keeper:
    """Writes checkpoints of one run to one file.

    :param path: the file.
    :param every: steps between checkpoints.
    :param fingerprint: identifies this run.
    :param devices: devices of the run; only the first process has a file.
    :param batches: the run's batches. If they are a stream, it must be at the same place when a run continues.
    :param saved: the number of steps after which the file was written, if known.
    :param stamp: of the file, as this run read or wrote it.
    """

    path: Path
    every: int
    fingerprint: dict[str, Any]
    devices: Devices
    batches: Feed
    saved: int | None = None
    stamp: tuple[int, ...] | None = None

    def begin(self, like: Any, resume: bool | str) -> tuple[Snapshot, np.ndarray] | None:
        """The run so far and its losses; ``None`` if there is no file, or it should not be read.

        :param like: a state with the structure of the file's state.
        :param resume: ``False`` to ignore the file, "anyway" to continue even from another problem's file.
        """

        def read() -> bytes | None:
            if not self.devices.is_first:
                return None
            checkpoint.prepare(self.path)
            self.stamp = checkpoint.stamp_of(self.path)
            return checkpoint.read(self.path) if resume else None

        content = self.devices.share(self.devices.together(read))
        if content is None:
            return None
        snapshot, losses = checkpoint.load(content, str(self.path), like, self.fingerprint, resume == "anyway")
        if not isinstance(self.batches, Batches) and resume != "anyway":
            self.batches.expect(snapshot.step, checkpoint.mark_in(content), str(self.path))
        self.saved = snapshot.step
        windows = snapshot.windows
        best = None if windows.best_state is None else self.devices.put_state(windows.best_state)
        state = self.devices.put_state(snapshot.state)
        return Snapshot(snapshot.step, state, windows._replace(best_state=best)), losses

    def save(self, snapshot: Snapshot, losses: np.ndarray) -> None:
        """Write the run so far, unless the file is up to date. Errors, such as a full disk, do not end the fit."""
        # All processes exchange the mark, before the check below: only the first knows whether this step is saved.
        last = None if isinstance(self.batches, Batches) else self.batches.mark(snapshot.step)
        if snapshot.step == self.saved:
            return
        if self.devices.is_first:
            mark = self.fingerprint if last is None else self.fingerprint | {"rows of the last batch": last}
            content = checkpoint.dump(snapshot, losses[: snapshot.step], mark)
            checkpoint.warn_of_others(self.path, self.stamp)
            try:
                checkpoint.write(self.path, content)
                self.stamp = checkpoint.stamp_of(self.path)
            except OSError as error:
                warnings.warn(
                    f"`checkpoint` {self.path} could not be written after step {snapshot.step}: {error}. The fit goes on; the file "
                    f"holds {'nothing of it' if self.saved is None else f'step {self.saved}'}.",
                    RuntimeWarning,
                    stacklevel=5,
                )
                return
        self.saved = snapshot.step


@dataclass
class Run:
    """Everything that a running fit needs.

    ``now`` is the current state, and ``before`` the state one call earlier, if that was in this process. States are never
    overwritten, so a call can be repeated for fewer steps.

    :param full: the data, if every step sees all rows.
    :param losses: shape (number of steps,), filled up to ``num_losses``.
    :param window: steps in a window.
    """

    svi: Any
    steps: Steps
    batches: Feed
    full: Any
    plan: Plan
    devices: Devices
    early_stopping: EarlyStopping | None
    window: int
    keeper: Keeper | None
    callback: Callable[[Progress], Any] | None
    show: bool
    now: Snapshot
    losses: np.ndarray
    num_losses: int
    before: Snapshot | None = None

    def fit(self) -> FitResult:
        """Run the fit, and handle interruptions."""
        bar = tqdm.tqdm(total=self.plan.num_steps, initial=self.now.step, disable=not self.show)
        try:
            status = self.train(bar)
        except KeyboardInterrupt:
            status = "interrupted"
        except BaseException as error:
            self.save_before(error)
            raise
        finally:
            bar.close()
        self.save()
        step, state, windows = self.now
        if status in ("stopped early", "interrupted") and windows.best_state is not None:
            step, state = windows.best_step, windows.best_state
        state = self.devices.local(state)
        return FitResult(self.svi.get_params(state), state, self.losses[: self.num_losses].copy(), status, step)

    def save(self) -> None:
        """Write the checkpoint, if the user wants one."""
        if self.keeper is not None:
            try:
                self.keeper.save(self.now, self.losses)
            except KeyboardInterrupt:  # asked to stop: it stops once the file is complete
                self.keeper.save(self.now, self.losses)

    def save_before(self, error: BaseException) -> None:
        """Write the checkpoint before an error goes on, which says so in a note. Whatever fails here does not replace it."""
        if self.keeper is None or not self.now.step:
            return
        if self.devices.is_distributed and isinstance(error, jax.errors.JaxRuntimeError):
            return  # not in all processes, and they exchange marks before they save
        try:
            self.save()  # a full disk is a warning
            if self.keeper.saved == self.now.step:
                error.add_note(
                    f"`checkpoint` {self.keeper.path} holds step {self.now.step}; the same call goes on from there."
                )
        except Exception as other:
            error.add_note(
                f"`checkpoint` {self.keeper.path} could not be written either: {type(other).__name__}: {other}"
            )

    def train(self, bar: Any) -> Status:
        """Take all remaining steps, in calls to the device, and return how the run ended.

        While the device computes, the rows of the next call are read from host memory.
        """
        self.batches.until(self.plan.num_steps)
        num = 0 if self.has_waited() else self.plan.length(self.now.step)
        batches = self.fetch(self.now.step, num)
        last: tuple[Any, int] = None, 0  # batches of the call before, and which of them was the last
        while num:
            started = time.perf_counter()
            state, losses, nan = self.steps(self.now.state, batches, num)  # does not wait
            end = self.now.step + num
            ahead = self.plan.length(end)
            taken, (batches, error) = batches, self.fetch_ahead(end, ahead)
            new = np.asarray(losses)[:num]  # waits
            self.plan.took(num, time.perf_counter() - started)
            self.losses[end - num : end] = new
            sound = self.sound_steps(taken, new, bool(nan))
            if sound is not None:
                of_steps = [last, *((taken, i) for i in range(num))][sound : sound + 2]
                self.roll_back(end - num + sound, end, words_of_bad_rows(self.batches, *of_steps))
                return "diverged"
            last = taken, num - 1
            windows = self.score(end, state)
            self.before, self.now, self.num_losses = self.now, Snapshot(end, state, windows), end
            self.report(bar, new)
            if self.has_waited():
                return "stopped early"
            if error is not None:
                raise error
            num = ahead
        return "stopped early" if self.has_waited() else "finished"

    def sound_steps(self, batches: Any, losses: np.ndarray, nan: bool) -> int | None:
        """The number of a call's steps before the first one with a loss that is not finite or a NaN parameter at its start.

        If not every loss depends on a parameter, it may be NaN long before a loss is. So the call is repeated for fewer steps:
        the answer must not depend on where calls end.

        :param nan: whether a parameter is NaN at the end.
        :return: the number of steps; ``None`` if all are good.
        """
        bad = np.flatnonzero(~np.isfinite(losses))
        if not bad.size and not nan:
            return None
        sound, broken = 0, int(bad[0]) if bad.size else len(losses)
        if not (broken and self.steps(self.now.state, batches, broken)[2]):
            return broken
        while broken - sound > 1:
            middle = (sound + broken) // 2
            if self.steps(self.now.state, batches, middle)[2]:
                broken = middle
            else:
                sound = middle
        return broken

    def has_waited(self) -> bool:
        """Whether early stopping has run out of patience."""
        return self.early_stopping is not None and self.now.windows.waited >= self.early_stopping.patience

    def fetch(self, step: int, num: int) -> Any:
        """The batches for ``num`` steps from ``step`` on."""
        if self.batches.is_full or not num:
            return self.full
        read = partial(self.batches.stacked, step, num, self.plan.capacity, self.devices.put_rows)
        return read() if isinstance(self.batches, Shards) else self.devices.together(read)

    def fetch_ahead(self, step: int, num: int) -> tuple[Any, Exception | None]:
        """As :meth:`fetch`, while the device computes the steps before; they count even if reading fails."""
        try:
            return self.fetch(step, num), None
        except Exception as error:
            return None, error

    def score(self, step: int, state: Any) -> Windows:
        """The windows so far, including one that ends at this step, if any."""
        if step % self.window:
            return self.now.windows
        rule = self.early_stopping
        if rule is not None and rule.metric is not None:
            metric = rule.metric
            value = self.devices.agree(self.devices.together(lambda: as_score(metric(self.params(state)), step)))
        else:
            value = float(np.mean(self.losses[step - self.window : step], dtype=np.float64))
        return self.now.windows.after(value, step, state, 0.0 if rule is None else rule.min_delta)

    def params(self, state: Any) -> dict[str, Any]:
        """Constrained parameters, as ordinary arrays of this process."""
        return self.svi.get_params(self.devices.local(state))

    def report(self, bar: Any, losses: np.ndarray) -> None:
        """Checkpoint, progress bar and callback, after a call."""
        step, state, _ = self.now
        if self.keeper is not None and step % self.keeper.every == 0:
            self.keeper.save(self.now, self.losses)
        epoch = step * self.batches.batch_size / self.batches.num_rows
        progress = Progress(step, epoch, losses, partial(self.params, state))
        if self.show:
            bar.set_postfix_str(f"ELBO {progress.elbo:.6g}, epoch {epoch:.2f}", refresh=False)
            bar.update(len(losses))
        self.devices.together(lambda: self.callback and self.callback(progress))

    def roll_back(self, bad: int, end: int, where: str) -> None:
        """Return to the last state whose loss was finite.

        :param bad: the first step, counted from 0, with a loss that is not finite or a NaN parameter at its start. For a NaN
            parameter it may be ``end``.
        :param end: the step at which the call to the device ended.
        :param where: which row of that step, or of the one before, is not finite.
        :raises FloatingPointError: if there is no such state, because ``bad`` is 0.
        """
        is_loss = bad < end and not np.isfinite(self.losses[bad])
        what = (
            f"loss of step {bad + 1} is {self.losses[bad]}{where}"
            if is_loss
            else f"parameters after step {bad} are nan{where}"
        )
        self.num_losses, fixes = bad, OF_ROWS if where else FIXES
        if bad == 0:
            look = "" if where else " Look for NaN and infinity in the data and in the initial parameters."
            raise FloatingPointError(f"The {what}, so there is nothing to go on from.{look} {fixes}")
        good = bad - 1
        start = self.now if good >= self.now.step else self.before
        if start is None:
            # This process began here, so the state one step earlier is not known. The parameters here are not NaN.
            start, good = self.now, self.now.step
        state = start.state
        if good > start.step:
            state = self.steps(state, self.fetch(start.step, good - start.step), good - start.step)[0]
        self.now = Snapshot(good, state, start.windows)
        warnings.warn(
            f"The {what}: the fit stops there and returns what it had after step {good}. The last finite ELBO "
            f"was {-self.losses[bad - 1]:.6g}. {fixes}",
            RuntimeWarning,
            stacklevel=5,
        )
