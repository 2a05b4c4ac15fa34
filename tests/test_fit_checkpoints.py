"""Runs that are killed, interrupted or continued end with the same bits as runs that are not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp.training import checkpoint
from tests.fitting import KEY, assert_same_bits, data, make

STEPS = 60


def fit(svi=None, *, arrays=None, key=KEY, **options):
    options = {"progress_bar": False, "batch_size": 8, "steps_per_call": 3, "checkpoint_every": 5} | options
    if "num_epochs" not in options:
        options = {"num_steps": STEPS} | options
    return ogp.fit(svi or make(), key, data() if arrays is None else arrays, **options)


def stop_at(step):
    def callback(progress):
        if progress.step >= step:
            raise KeyboardInterrupt

    return callback


@pytest.fixture(scope="module")
def whole():
    """The run without interruption."""
    return fit()


@pytest.mark.parametrize("step", [1, 31])
def test_interrupted_runs_go_on_exactly(tmp_path, whole, step):
    path = tmp_path / "new folder" / "run.npz"
    stopped = fit(checkpoint=path, callback=stop_at(step))
    assert stopped.status == "interrupted" and step <= len(stopped.losses) < step + 3
    assert_same_bits(stopped.losses, whole.losses[: len(stopped.losses)])
    seen = []
    result = fit(checkpoint=path, callback=seen.append)
    assert seen[0].step - len(seen[0].losses) == len(stopped.losses)  # from the last step, not the last checkpoint
    assert_same_bits(tuple(result), tuple(whole))
    assert [p.name for p in path.parent.iterdir()] == ["run.npz"]


@pytest.mark.parametrize("error", [OSError("a crash"), SystemExit("a crash")])
def test_an_error_of_a_callback_loses_no_step(tmp_path, whole, error):
    path = tmp_path / "run.npz"

    def crash(progress):
        if progress.step >= 23:
            raise error

    with pytest.raises(type(error), match="a crash") as caught:
        fit(checkpoint=path, callback=crash)
    assert caught.value is error
    assert error.__notes__ == [f"`checkpoint` {path} holds step 23; the same call goes on from there."]
    seen = []
    assert_same_bits(tuple(fit(checkpoint=path, callback=seen.append)), tuple(whole))
    assert seen[0].step == 25 and len(seen[0].losses) == 2


def test_an_error_of_a_metric_loses_no_step_before_its_own(tmp_path):
    def rule(fails):
        left = iter([3.0, 2.0, ZeroDivisionError("no rows")] if fails else [1.0] * 99)

        def metric(params):
            score = next(left)
            if isinstance(score, Exception):
                raise score
            return score

        return ogp.EarlyStopping(99, every=5, metric=metric)

    path = tmp_path / "run.npz"
    with pytest.raises(ZeroDivisionError, match="no rows"):
        fit(early_stopping=rule(True), checkpoint=path, checkpoint_every=10**6)
    assert checkpoint_step(path) == 13  # calls end at 3, 5, 8, 10, 13 and 15


@pytest.mark.parametrize("fails", ["write", "dump"])
def test_an_error_is_not_replaced_by_one_of_saving(tmp_path, monkeypatch, fails):
    def crash(progress):
        if progress.step == 4:
            monkeypatch.setattr(checkpoint, fails, lambda *_: (_ for _ in ()).throw(OSError("no space left")))
            raise KeyError("a crash")

    path = tmp_path / "run.npz"
    with warnings.catch_warnings(), pytest.raises(KeyError, match="a crash") as caught:
        warnings.simplefilter("error")
        fit(checkpoint=path, callback=crash, steps_per_call=2, checkpoint_every=10**6)
    assert len(caught.value.__notes__) == 1 and "could not be written" in caught.value.__notes__[0]
    assert "no space left" in caught.value.__notes__[0] and not path.exists()


def test_an_error_before_the_first_step_leaves_no_file(tmp_path):
    """Which would belong to the data that are at fault."""
    X, y = data()
    with pytest.raises(FloatingPointError, match="loss of step 1 is "):
        fit(arrays=(X, np.full_like(y, 1e308)), checkpoint=tmp_path / "run.npz")
    assert not list(tmp_path.iterdir())


def test_a_finished_run_returns_at_once_and_can_be_made_longer(tmp_path, whole):
    path = tmp_path / "run.npz"
    assert_same_bits(tuple(fit(checkpoint=path, num_steps=20)[:3])[2], whole.losses[:20])
    before = path.stat().st_mtime_ns
    again = fit(checkpoint=path, num_steps=20, callback=stop_at(0))  # would be called if a step were taken
    assert again.status == "finished" and len(again.losses) == 20 and path.stat().st_mtime_ns == before
    assert len(fit(checkpoint=path, num_steps=10).losses) == 20  # it is further than that
    assert_same_bits(tuple(fit(checkpoint=path)), tuple(whole))
    anew = fit(checkpoint=path, num_steps=20, resume=False)
    assert len(anew.losses) == 20 and checkpoint_step(path) == 20


def checkpoint_step(path):
    with np.load(path) as file:
        return len(file["losses"])


def test_early_stopping_goes_on_with_its_counters(tmp_path):
    scores = [5.0, 3.0, 4.0, 4.0, 4.0, 4.0]

    def rule(start, patience=3):
        left = iter(scores[start:])
        return ogp.EarlyStopping(patience, every=5, metric=lambda params: next(left))

    plain = fit(early_stopping=rule(0))
    assert (plain.status, plain.num_steps, len(plain.losses)) == ("stopped early", 10, 25)
    path = tmp_path / "run.npz"
    stopped = fit(early_stopping=rule(0), checkpoint=path, callback=stop_at(17))
    assert (stopped.status, stopped.num_steps) == ("interrupted", 10)
    assert_same_bits(tuple(fit(early_stopping=rule(3), checkpoint=path)), tuple(plain))
    assert_same_bits(tuple(fit(early_stopping=rule(9), checkpoint=path)), tuple(plain))  # at once: no score is left
    patient = fit(early_stopping=rule(5, patience=4), checkpoint=path)
    assert (patient.num_steps, len(patient.losses)) == (10, 30)
    with pytest.raises(ValueError, match=r"differ in every \(5 in the file, 10 now\)"):
        fit(early_stopping=ogp.EarlyStopping(3, every=10, metric=lambda params: 0.0), checkpoint=path)


@pytest.mark.parametrize("bad", [5, 6])  # 5 is the first step after a checkpoint
def test_diverged_runs_leave_the_last_good_state(tmp_path, bad):
    path = tmp_path / "run.npz"
    rate = lambda start: optax.adam(lambda step: jnp.where(step == bad - 1, jnp.nan if start else 0.05, 0.05))  # noqa: E731
    with pytest.warns(RuntimeWarning, match=rf"after step {bad}\b.*returns what it had after step {bad - 1}\b"):
        diverged = fit(make(rate(True)), checkpoint=path, steps_per_call=1)
    assert diverged.status == "diverged" and checkpoint_step(path) == bad - 1
    with pytest.warns(RuntimeWarning, match="returns what it had"):
        assert_same_bits(tuple(fit(make(rate(True)), checkpoint=path)), tuple(diverged))
    # With another learning rate, the likely fix, it goes on from there.
    assert_same_bits(tuple(fit(make(rate(False)), checkpoint=path)), tuple(fit(make(rate(False)))))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch_size": 10}, r"batch_size \(8 in the file, 10 now\)"),
        ({"arrays": data(40), "N": 50}, r"N \(50 in the file, 40 now\)"),
        ({"key": jax.random.PRNGKey(9)}, r"seed \(\[0, 3\] in the file, \[0, 9\] now\)"),
        ({"arrays": tuple(a.astype(np.float32) for a in data())}, r"data \(.*float64\[3\] in the file, .*float32\[3\] now\)"),
        ({"svi": make(optax.sgd(0.01))}, r"state \(.*count: int32\[\] in the file, nothing now\)"),
        ({"svi": make(optax.adam(0.05, mu_dtype=jnp.float32))}, r"state \(.*mu.*float64\[3\] in the file, .*float32\[3\] now"),
        ({"early_stopping": ogp.EarlyStopping(2, metric=lambda params: 0.0)}, r"score \(loss in the file, metric now\)"),
    ],
)  # fmt: skip
def test_checkpoints_of_other_runs_are_refused(tmp_path, change, message):
    path = tmp_path / "run.npz"
    fit(checkpoint=path, num_steps=5)
    content = path.read_bytes()
    with pytest.raises(ValueError, match=rf"run.npz is of another run: they differ in {message}.*resume=False"):
        fit(checkpoint=path, **change)
    assert path.read_bytes() == content


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "run.npz"
    fit(checkpoint=path, num_steps=5)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(b"state0.npy") + 200] ^= 1
    np.savez(tmp_path / "foreign.npz", X=np.zeros(3))
    foreign = (tmp_path / "foreign.npz").read_bytes()
    for wrong in (b"", b"text", content[: len(content) // 2], content[:-30], bytes(flipped), foreign):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"run.npz is damaged or was not written by `fit`.*Delete it"):
            fit(checkpoint=path, num_steps=5)
        assert path.read_bytes() == wrong


def test_every_flipped_bit_of_the_directory_is_noticed_or_harmless(tmp_path):
    """The directory of a zip file has no checksum of its own."""
    path = tmp_path / "run.npz"
    result = fit(checkpoint=path, num_steps=15, early_stopping=ogp.EarlyStopping(9, every=5))
    content = path.read_bytes()
    mark = json.loads(str(np.load(path)["header"]))["fingerprint"]
    whole, losses = checkpoint.load(content, "run.npz", result.state, mark)
    assert whole.windows.best_state is not None
    refused = 0
    for position in range(content.index(b"PK\x01\x02"), len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 64
        try:
            found, others = checkpoint.load(bytes(flipped), "run.npz", result.state, mark)
        except ValueError as error:
            assert "run.npz is damaged" in str(error)
            refused += 1
        else:
            assert_same_bits((found.state, found.windows, others), (whole.state, whole.windows, losses))
    assert refused > 100


def test_a_place_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "file" / "run.npz", tmp_path / "loop" / "run.npz"):
        with pytest.raises(ValueError, match=r"`checkpoint` .*run.npz cannot be written: "):
            fit(checkpoint=path, callback=lambda _: pytest.fail("a step was taken"))


def test_a_finished_run_can_be_read_where_nothing_can_be_written(tmp_path, monkeypatch, whole):
    path = tmp_path / "run.npz"
    fit(checkpoint=path)
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(PermissionError("read-only file system")))
    assert_same_bits(fit(checkpoint=path).params, whole.params)
    with pytest.raises(ValueError, match=r"new.npz cannot be written: read-only file system"):
        fit(checkpoint=tmp_path / "new.npz")


def test_a_full_disk_does_not_lose_the_fit(tmp_path, monkeypatch, whole):
    path, write, full = tmp_path / "run.npz", checkpoint.write, []

    def fails_from_the_third(path, content):
        full.append(path)
        if len(full) > 2:
            raise OSError("no space left")
        write(path, content)

    monkeypatch.setattr(checkpoint, "write", fails_from_the_third)
    with pytest.warns(
        RuntimeWarning, match=r"run.npz could not be written after step 15: no space left.*holds step 10"
    ):
        result = fit(checkpoint=path)
    assert_same_bits((result.params, result.losses), (whole.params, whole.losses))
    monkeypatch.undo()
    assert_same_bits(fit(checkpoint=path).params, whole.params)


def test_ctrl_c_during_the_last_write_leaves_a_whole_file(tmp_path, monkeypatch, whole):
    path, fsync = tmp_path / "run.npz", os.fsync

    def interrupted(descriptor):
        monkeypatch.setattr(os, "fsync", fsync)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    try:
        result = fit(checkpoint=path, checkpoint_every=10**6)
    except KeyboardInterrupt:
        pytest.fail("the fit was lost")
    assert os.fsync is fsync
    assert result.status == "finished"
    assert_same_bits((result.params, result.losses), (whole.params, whole.losses))
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]
    assert_same_bits(fit(checkpoint=path).params, whole.params)


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_is_refused_before_the_first_step(tmp_path, resume):
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match=r"`checkpoint` must be a file; .*runs is a folder. Did you mean .*run.npz"):
        fit(checkpoint=tmp_path / "runs", resume=resume, num_steps=5)
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


def test_two_runs_with_one_file_are_told(tmp_path, whole):
    """Each overwrote the other's steps without a word."""
    path, others = tmp_path / "run.npz", tmp_path / "other.npz"
    fit(checkpoint=others, num_steps=5, key=jax.random.PRNGKey(7))

    def other(report):
        if report.step > 5 and others.exists():
            os.replace(others, path)

    with pytest.warns(RuntimeWarning, match=r"run.npz was written by another run while this one was running"):
        result = fit(checkpoint=path, callback=other)
    assert_same_bits(result.params, whole.params)
    assert checkpoint_step(path) == STEPS


def test_each_of_two_runs_writes_a_whole_file(tmp_path):
    """They had one temporary file: some writes failed, and a reader could find an empty checkpoint."""
    path = tmp_path / "run.npz"
    with checkpoint.replacing(path) as slow:
        slow.write(b"one")
        checkpoint.prepare(path)  # of a run that begins now
        checkpoint.write(path, b"two")
        assert path.read_bytes() == b"two"
        slow.write(b"!")
    assert path.read_bytes() == b"one!" and [p.name for p in tmp_path.iterdir()] == ["run.npz"]


def test_what_crashes_have_left_is_removed(tmp_path):
    left, young, other = (tmp_path / f"{name}.tmp" for name in ("run.npz.0123abcd", "run.npz.fedcba98", "run[1].npz"))
    for file in (left, young, other):
        file.write_bytes(b"half")
    for file in (left, other):
        os.utime(file, (0, 0))
    checkpoint.prepare(tmp_path / "run.npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.npz.fedcba98.tmp", "run[1].npz.tmp"]


def test_of_a_link_the_file_is_written_to_which_it_points(tmp_path):
    """The link was replaced by a file in its own folder, which may be a small disk."""
    (tmp_path / "large").mkdir()
    link, target = tmp_path / "run.npz", tmp_path / "large" / "run.npz"
    link.symlink_to(target)
    for content in (b"one", b"two"):
        checkpoint.write(link, content)
        assert link.is_symlink() and target.read_bytes() == content
    assert [p.name for p in target.parent.iterdir()] == ["run.npz"]


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    """A folder of the name ~ was made where the program ran."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fit(checkpoint="~/runs/run.npz", num_steps=5)
    assert checkpoint_step(tmp_path / "runs" / "run.npz") == 5 and not (tmp_path / "~").exists()


def test_a_pipe_is_refused(tmp_path):
    """Reading one waits for ever, and reading /dev/full fills the memory."""
    os.mkfifo(tmp_path / "run.npz")
    with pytest.raises(ValueError, match=r"`checkpoint` must be a file; .*run.npz is a device or a pipe"):
        fit(checkpoint=tmp_path / "run.npz", num_steps=5)


def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    checkpoint.write(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        checkpoint.write(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["run.npz"]


def test_every_kind_of_leaf_comes_back():
    state = {
        "bfloat16": jnp.asarray([1.5, -2.0], jnp.bfloat16),
        "int": jnp.arange(3),
        "bool": jnp.asarray([True, False]),
        "complex": jnp.asarray(1 + 2j),
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(5, impl="rbg"), 2),
        "empty": jnp.zeros((0, 3)),
    }
    windows = checkpoint.Windows(-1.25, 7, state, -1.0, 2)
    losses = np.random.default_rng(0).normal(size=9)
    content = checkpoint.dump(checkpoint.Snapshot(9, state, windows), losses, {"seed": [1]})
    like = jax.tree.map(lambda x: x, state)
    snapshot, restored = checkpoint.load(content, "name", like, {"seed": [1]})
    assert snapshot.step == 9 and snapshot.windows[:2] + snapshot.windows[3:] == (-1.25, 7, -1.0, 2)
    assert_same_bits(restored, losses)
    for tree in (snapshot.state, snapshot.windows.best_state):
        assert jax.tree.map(lambda x: x.dtype, tree) == jax.tree.map(lambda x: x.dtype, state)
        assert_same_bits(tree, state)


# ---------------------------------------------------------------- processes

SCRIPT = """
import os, signal, sys, time
import jax
jax.config.update("jax_enable_x64", True)
from tests.test_fit_checkpoints import fit

signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests run in the background would inherit as ignored
path, mode = sys.argv[1:]
replace, calls = os.replace, []

def killed_instead(*args):
    calls.append(args)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*args)

if mode == "crash":
    os.replace = killed_instead
# Near the end it waits for the signal, however late a busy machine sends that.
print(fit(checkpoint=path, callback=lambda progress: time.sleep(0.05 if progress.step < 50 else 30)).status)
"""


def start(path, mode="run"):
    command = [sys.executable, "-c", SCRIPT, str(path), mode]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[1], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_write(path, process, before=None):
    """Until the file is there, or another one than before."""
    while process.poll() is None and (not path.exists() or path.stat().st_mtime_ns == before):
        time.sleep(0.005)


def test_a_process_killed_while_it_writes(tmp_path, whole):
    path = tmp_path / "run.npz"
    process = start(path, "crash")
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert checkpoint_step(path) == 10 and (tmp_path / "run.npz.tmp").exists()
    assert_same_bits(tuple(fit(checkpoint=path)), tuple(whole))
    assert not (tmp_path / "run.npz.tmp").exists()


def test_a_process_that_gets_ctrl_c(tmp_path, whole):
    path = tmp_path / "run.npz"
    process = start(path)
    wait_for_write(path, process)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out.strip()) == (0, "interrupted"), err[-2000:]
    assert 5 < checkpoint_step(path) < STEPS
    assert_same_bits(tuple(fit(checkpoint=path)), tuple(whole))


@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_process_killed_at_random_moments(tmp_path, whole, kills):
    path, chance = tmp_path / "run.npz", random.Random(kills)
    for _ in range(kills):
        before = path.stat().st_mtime_ns if path.exists() else None
        process = start(path)
        wait_for_write(path, process, before)
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        process.communicate(timeout=300)
    assert checkpoint_step(path) < STEPS or kills > 3
    assert_same_bits(tuple(fit(checkpoint=path)), tuple(whole))
