"""Rows that each of two processes has for itself, as many as it likes, against one process with all of them."""

from __future__ import annotations

import re

import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp import training
from numpyro_orthgp.training import orders
from numpyro_orthgp.training.devices import Devices
from tests.fitting import KEY, data, make
from tests.test_fit_devices import run_in_two

TWO = """
import os, signal, warnings
import numpyro, numpyro.distributions as dist
from numpyro_orthgp import training
from numpyro_orthgp.math.digest import to_host
from numpyro_orthgp.training.devices import Devices
mesh = Mesh(np.array(jax.devices()), ("data",))
cut = 20  # of 48 rows
mine = slice(None, cut) if process == 0 else slice(cut, None)
X, y = data(48)
own = training.Local((X[mine], y[mine]))
assert own.lengths == [20, 28] and own.num_rows == 48

def raised(kind, function, *args, **options):
    try:
        function(*args, **options)
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")

def model(X, y=None, row=None, *, N=48, table=False):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    if row is None and not table:  # quick to compile
        with numpyro.handlers.scale(scale=N / len(X)):
            numpyro.sample("y", dist.Normal(X @ w, 0.5).to_event(1), obs=y)
        return
    with numpyro.plate("data", N, subsample_size=len(X)) as number:
        b = numpyro.param("b", jnp.zeros(48), event_dim=0) if table else 0.0
        if row is not None:
            numpyro.factor("numbers", -1000.0 * (number != row))
        numpyro.sample("y", dist.Normal(X @ w + b, 0.5), obs=y)

def guide(X, y=None, row=None, **_):
    numpyro.sample("w", dist.Delta(numpyro.param("loc", jnp.full(3, 0.3)), event_dim=1))

def run(arrays, optimizer=optax.adam(0.05), **options):
    svi = make(optimizer, None, model, guide)
    options = {"progress_bar": False, "num_steps": 24, "batch_size": 8, "mesh": mesh} | options
    return ogp.fit(svi, KEY, arrays, **options)

# All rows at every step: the losses of one process that has them.
whole = fit(batch_size=None)
assert_close(fit(lambda: (make(), own, {}), mesh=mesh, batch_size=None).losses, whole.losses, rtol=1e-10)
assert_close(run(own, batch_size=None).params, run((X, y), batch_size=None, mesh=None).params, rtol=1e-10)

# At fixed parameters the losses of an epoch are those of all rows on average, as each row comes once: whatever the rows come from.
still = optax.sgd(0.0)
full = run((X, y), still, batch_size=None, num_steps=1, mesh=None).losses[0]
row = np.arange(48)
import h5py
with h5py.File(f"{path}/own.h5", "w") as file:
    file["X"], file["y"] = X[mine], y[mine]
file = h5py.File(f"{path}/own.h5")
def loader():  # of an odd size, with a short last batch, in an order of its own
    order = np.random.default_rng(process).permutation(len(y[mine]))
    for start in range(0, len(order), 5):
        rows = order[start : start + 5]
        yield X[mine][rows], y[mine][rows]
stream = lambda: training.Local(training.Stream(loader, len(y[mine])))
kinds = {
    "numbered": training.Local((X[mine], y[mine], row[mine])),
    "blocks": training.Local((file["X"], file["y"])),
    "stream": stream(),
}
for name, rows in kinds.items():
    shuffle = {"shuffle": training.Blocks(3, 2)} if name == "blocks" else {}
    losses = run(rows, still, **shuffle).losses.reshape(4, 6)
    assert np.ptp(losses) > 1, losses
    np.testing.assert_allclose(losses.mean(1), full, rtol=1e-12)
# With groups, losses of the first step are right on average over keys: rows that are left out are left out as often everywhere.
mine_11 = slice(None, 11) if process == 0 else slice(11, 22)  # of 22 rows; a row and three are left out of groups of four
for rows, shuffle in (((X[mine_11], y[mine_11], row[mine_11]), None), ((file["X"], file["y"]), training.Blocks(4, 2))):
    local, N = training.Local(rows), 22 if shuffle is None else 48
    keys = [jax.random.PRNGKey(k) for k in range(3 if shuffle else 40)]
    means = []
    for key in keys:
        shards = training.local.Shards(local, 8, (0, int(key[1])), 4, shuffle, Devices(mesh, True))
        counts = np.zeros(N)
        found = [to_host(a) for a in shards.steps(0, 60, 60, True)]
        numbers = found[-1][:60].reshape(-1, 4)
        assert ((numbers - numbers[:, :1] == np.arange(4)).all(1) | (shuffle is None)).mean() == 1
        np.testing.assert_array_equal(found[1][:60].ravel(), y[numbers.ravel()])
        means.append(np.bincount(numbers.ravel(), minlength=N) / 480)
    if shuffle is None:
        assert np.abs(np.mean(means, 0) * N - 1).max() < 0.1, np.mean(means, 0) * N
    losses = run(local, still, shuffle=shuffle, group_size=4, num_steps=12, N=N).losses
    assert np.isfinite(losses).all()
assert_same_bits(run(own, group_size=4).losses, run(own, group_size=4, steps_per_call=5).losses)
said = raised((ValueError, RuntimeError), run, own, group_size=24, batch_size=24)
assert ("Process 0 raised" if process else "each process needs at least 24 rows") in said, said

# Parameters of single rows are those of the rows of the batch.
tables = run(own, ogp.lazy_rows(optax.adam(0.1)), num_steps=6, table=True).params["b"]
assert (np.asarray(tables) != 0).all()
result = run(own)
assert jax.tree.leaves(result._fitted.arguments(slice(None)))[0].shape == (8, 3)
assert "rows of several processes" in raised(ValueError, result.khat)

# What was saved by the first process goes on in both.
half = run(kinds["blocks"], num_steps=13, checkpoint=f"{path}/run.npz")
assert_same_bits(tuple(run(kinds["blocks"], checkpoint=f"{path}/run.npz")[:3]), tuple(run(kinds["blocks"])[:3]))
run(stream(), num_steps=13, checkpoint=f"{path}/stream.npz")
assert_same_bits(run(stream(), checkpoint=f"{path}/stream.npz").losses, run(kinds["stream"]).losses)
other = training.Local((X[mine] + process, y[mine]))
said = raised(ValueError, run, other, checkpoint=f"{path}/run.npz", shuffle=training.Blocks(48, 64))
assert "another run" in said and "data[0] of process 1" in said and "of process 0" not in said, said
elsewhere = slice(None, 24) if process == 0 else slice(24, None)
other = training.Local((X[elsewhere], y[elsewhere]))
said = raised(ValueError, run, other, checkpoint=f"{path}/run.npz", shuffle=training.Blocks(48, 64))
assert "lengths, rows of each process ([20, 28] in the file, [24, 24] now)" in said, said
first = loader
def loader():  # the second process's later batches are others
    for i, (X, y) in enumerate(first()):
        yield X + 1.0 * (process == 1 and i > 0), y
said = raised((ValueError, RuntimeError), run, stream(), checkpoint=f"{path}/stream.npz", num_steps=30)
assert ("another batch of step" if process == 1 else "Process 1 raised") in said, said

# They end together.
spoilt = X[mine].copy()
spoilt[3] += np.nan * process  # one row of the second
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    broken = run(training.Local((spoilt, y[mine])))
assert broken.status == "diverged" and 0 < broken.num_steps < 6 and np.isfinite(broken.losses).all(), broken
assert any("is nan" in str(w.message) for w in caught)

def leave(progress):
    if process == 1 and progress.step == 10:
        raise KeyboardInterrupt
stopped = run(own, callback=leave, steps_per_call=5)
assert (stopped.status, len(stopped.losses)) == ("interrupted", 10), stopped
handler = signal.getsignal(signal.SIGINT)
def kill(progress):
    if process == 0 and progress.step == 10:
        os.kill(os.getpid(), signal.SIGINT)
stopped = run(own, callback=kill, steps_per_call=5, checkpoint=f"{path}/stopped.npz")
assert stopped.status == "interrupted" and len(stopped.losses) in (10, 15), stopped
assert signal.getsignal(signal.SIGINT) is handler
assert_same_bits(run(own, checkpoint=f"{path}/stopped.npz").losses, run(own).losses)

def loader():
    if process == 0:
        yield X[:5], y[:5]
        raise OSError("the disk is gone")
    yield from first()
said = raised((OSError, RuntimeError), run, stream())
assert said == "the disk is gone" if process == 0 else "Process 0 raised an error" in said, said
said = raised((ValueError, RuntimeError), training.Local, (X[:3], y[: 3 - process]))
assert ("same number of rows" if process else "Process 1 raised an error") in said, said
said = raised(ValueError, run, training.Local((X[mine].astype(np.float32 if process else np.float64), y[mine])))
assert "Processes differ in more than their rows" in said and "float32[3]" in said, said
assert "need `mesh`" in raised(ValueError, run, own, mesh=None)
assert "need `mesh`" in raised(ValueError, run, own, mesh=Mesh(np.array(jax.devices()[:3]), ("data",)))
assert "at most the number of rows of all processes, 48" in raised(ValueError, run, own, batch_size=52)
assert "`batch_size` must be given" in raised(ValueError, run, stream(), batch_size=None)
if "--slow" in sys.argv:  # a model with inducing points
    rng = np.random.default_rng(1)
    arrays, Z = problems.data(rng, 48), [jnp.asarray(s) for s in problems.sets(rng, [4])]
    kwargs = {"inducing": Z, "likelihood": problems.gaussian(0.3), "jitter": None, "N": 48}
    svgp = make(None, TraceMeanField_ELBO(), problems.model, ogp.AutoSparseGP(problems.model))
    parts, many = training.Local(tuple(a[mine] for a in arrays)), {"mesh": mesh, "batch_size": None}
    one = fit(lambda: (svgp, arrays, kwargs), batch_size=None).losses
    assert_close(fit(lambda: (svgp, parts, kwargs), **many).losses, one, rtol=1e-9)
    losses = fit(lambda: (svgp, parts, kwargs), mesh=mesh).losses
    assert losses[-6:].mean() < losses[:6].mean()
multihost_utils.sync_global_devices("end")
print("rows of two processes")
"""


@pytest.mark.parametrize("option", ["", pytest.param("--slow", marks=pytest.mark.slow)])
def test_rows_of_two_processes(tmp_path, option):
    folders = run_in_two(TWO, tmp_path, option, "rows of two processes")
    assert sorted(p.name for p in folders[1].iterdir()) == ["own.h5"]


@pytest.mark.parametrize("lengths", [[7], [8, 12], [1, 5, 1, 30], [3] * 6])
def test_turns_are_fair(lengths, monkeypatch):
    """Over all shifts of an epoch an owner has each place as often as it has rows; beside counting one by one."""
    N = sum(lengths)
    turns, taken = orders.Turns(lengths, (0,)), []
    for shift in range(N):
        monkeypatch.setattr(orders, "generator_of", lambda *_, s=shift: type("", (), {"integers": lambda *_: s})())
        before = turns.before(range(2 * N + 1))
        steps = np.diff(before, axis=0)
        assert (steps.sum(1) == 1).all() and (steps >= 0).all()
        np.testing.assert_array_equal(before[[0, N, 2 * N]], np.outer([0, 1, 2], lengths))
        taken.append(steps[:N])
    np.testing.assert_array_equal(np.sum(taken, 0), np.tile(lengths, (N, 1)))
    share = np.outer(np.arange(2 * N + 1), lengths) / N
    assert np.abs(before - share).max() < 2


def test_turns_of_more_rows_than_32_bits_hold():
    lengths = [3_000_000_000, 5_000_000_000]
    found = orders.Turns(lengths, (1,)).before([0, 8_000, 8 * 10**9, 8 * 10**9 + 8_000, 5 * 10**17])
    np.testing.assert_array_equal(found.sum(1), [0, 8_000, 8 * 10**9, 8 * 10**9 + 8_000, 5 * 10**17])
    assert abs(found[1, 0] - 3000) <= 1 and found[2].tolist() == lengths and abs(found[3, 1] - lengths[1] - 5000) <= 1


def test_one_process_alone_fits_as_without():
    arrays = data()
    local = training.Local(arrays)
    assert (local.lengths, local.num_rows) == ([50], 50)
    options = {"num_steps": 5, "batch_size": 7, "progress_bar": False}
    one, other = (ogp.fit(make(), KEY, rows, **options) for rows in (arrays, local))
    np.testing.assert_array_equal(one.losses, other.losses)


def test_refusals():
    with pytest.raises(TypeError, match=r"training\.Local, rows of several processes, is for ogp\.fit"):
        training.batches.Batches(training.Local(data()), None, (0,))
    with pytest.raises(ValueError, match=re.escape("Rows of each of 1 processes (training.Local) need `mesh`")):
        Devices(None, by_process=True)
