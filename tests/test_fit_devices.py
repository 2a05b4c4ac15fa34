"""Batches divided among several devices, of one process or of two, give the losses of one device."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import numpyro_orthgp as ogp
from numpyro_orthgp.training.devices import Devices
from numpyro_orthgp.training.layout import layout_of_state
from tests.fitting import KEY, assert_close, data, make

ROOT = Path(__file__).parents[1]

START = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_enable_x64", True)
from jax.sharding import Mesh
from numpyro.infer import TraceMeanField_ELBO
import numpyro_orthgp as ogp
from tests import problems
from tests.fitting import KEY, assert_close, assert_same_bits, data, make

def solve_gp(**options):
    rng = np.random.default_rng(1)
    arrays = problems.data(rng, 48)
    sets = [jnp.asarray(s) for s in problems.sets(rng, [4, 3])]
    guide = ogp.AutoSparseGP(problems.model, residual="tight", **options)
    kwargs = {"inducing": sets, "likelihood": problems.gaussian(0.3), "jitter": None, "N": 48}
    return make(None, TraceMeanField_ELBO(), problems.model, guide), arrays, kwargs

def fit(problem=lambda: (make(), data(48), {}), **options):
    svi, arrays, kwargs = problem()
    return ogp.fit(svi, KEY, arrays, **({"progress_bar": False, "batch_size": 8, "num_steps": 40} | options | kwargs))
"""

FOUR = """
assert len(jax.devices()) == 4
row, square = Mesh(np.array(jax.devices()), ("data",)), jax.make_mesh((2, 2), ("a", "b"))
one = fit()
for mesh in (row, square):
    many = fit(mesh=mesh)
    assert_close(tuple(many[:3]), tuple(one[:3]), rtol=1e-10)
    assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves((many.params, many.state)))
assert_close(fit(mesh=row, batch_size=None).losses, fit(batch_size=None).losses, rtol=1e-10)
assert_same_bits(fit(mesh=row, steps_per_call=3).losses, fit(mesh=row, steps_per_call=7).losses)
one, many = fit(solve_gp), fit(solve_gp, mesh=row)
assert_close(many.losses, one.losses, rtol=1e-10)
grouped = lambda: solve_gp(group_size=4)  # groups of which a device has a half
assert_close(fit(grouped, mesh=row, group_size=4).losses, fit(grouped, group_size=4).losses, rtol=1e-10)
assert one.losses[-8:].mean() < one.losses[:8].mean()

path = sys.argv[1]
fit(mesh=row, checkpoint=path, num_steps=20)
assert_same_bits(tuple(fit(mesh=row, checkpoint=path)), tuple(fit(mesh=row)))
print("same losses on 4 devices")
"""

LAYOUT = """
from jax.sharding import PartitionSpec as P
from numpyro_orthgp import kernels, likelihoods
import numpyro
assert len(jax.devices()) == 4
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(48, 2)), rng.normal(size=(48, 4))
layout = {"f.*": P("functions"), "lengthscale": P("functions"), "Z": P("functions")}

def model(X, Y=None, *, Z, N):
    Z = numpyro.param("Z", Z) if Z.ndim == 3 else Z
    lengthscale = numpyro.param("lengthscale", jnp.ones((4, 2)))
    f = ogp.gp("f", kernels.Matern52(lengthscale), Z, num_latents=4)
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3).to_event(1), obs=Y)

def problem(own=True):
    Z = jnp.asarray(rng.normal(size=(4, 5, 2)))
    guide = ogp.AutoSparseGP(model, residual="tight")
    return lambda: (make(None, TraceMeanField_ELBO(), model, guide), (X, Y), {"Z": Z if own else Z[0], "N": 48})

for own, square in ((True, (2, 2)), (True, (1, 4)), (True, (4, 1)), (False, (2, 2))):
    mesh = jax.make_mesh(square, ("data", "functions"))
    of, spec = problem(own), layout if own else {k: v for k, v in layout.items() if k != "Z"}
    one, many = fit(of), fit(of, mesh=mesh, layout=spec)
    assert_close(tuple(many[:3]), tuple(one[:3]), rtol=1e-9)
    assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves((many.params, many.state)))
assert one.losses[-8:].mean() < one.losses[:8].mean()

# What a step returns lies as it should, the optimizer's moments too.
seen, put = [], ogp.training.devices.Devices.put_state
ogp.training.devices.Devices.put_state = lambda self, state: seen.append(put(self, state)) or seen[-1]
path, of, mesh = sys.argv[1], problem(), jax.make_mesh((2, 2), ("data", "functions"))
shared = {"mesh": mesh, "layout": layout}
fit(of, **shared, checkpoint=path, num_steps=20)
assert_same_bits(tuple(fit(of, **shared, checkpoint=path)), tuple(fit(of, **shared)))
for state in seen:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    divided = [x for p, x in leaves if any(getattr(k, "key", "").startswith("f.u0") for k in p)]
    assert len(divided) == 6 and all(x.sharding.spec == P("functions") for x in divided), divided
assert len(seen) == 3
# Rows are divided by the other axis alone.
fit(of, mesh=jax.make_mesh((1, 4), ("data", "functions")), layout=layout, batch_size=7, num_steps=2)

for wrong, message in (
    ({"layout": {"g.*": P("functions")}, "mesh": mesh}, "names 'g.*', which is no parameter that has so many axes"),
    ({"layout": {"f.*": P("f")}, "mesh": mesh}, "names the axis 'f'; the axes of `mesh` are 'data', 'functions'"),
    ({"layout": {"f.*": P(None, "functions")}, "mesh": mesh}, "of shape (4, 5), by P(None, 'functions'): 2 devices cannot share 5"),
    ({"layout": layout}, "`layout` needs `mesh`, of devices of one process"),
    ({"layout": {"f.*": "functions"}, "mesh": mesh}, "`layout` must map names of parameters to jax.sharding.PartitionSpec"),
    ({**shared, "batch_size": 7}, "must be a multiple of the 2 devices"),
):
    try:
        fit(of, **wrong)
    except (TypeError, ValueError) as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
print("functions on two devices each")
"""

# Before anything else touches a device.
CONNECT = """
import sys
import jax
from jax.experimental import multihost_utils
address, process, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=process)
"""

TWO = """
assert (jax.process_count(), len(jax.devices()), len(jax.local_devices())) == (2, 4, 2)
mesh = Mesh(np.array(jax.devices()), ("data",))

read, take = [], np.take

def spy(array, rows, *args, **options):
    if getattr(array, "shape", ()) in ((48, 3), (48,)):  # JAX uses it too
        read.append(rows.shape)
    return take(array, rows, *args, **options)

metrics = []
def metric(params):  # differs between the processes, which must agree nevertheless
    assert jax.tree.leaves(params)[0].is_fully_addressable
    metrics.append(0)
    return len(metrics) if process == 0 else -len(metrics)

one = fit()
# `path` is a folder of this process alone: what the first process finds is sent to the second.
half = fit(mesh=mesh, checkpoint=path + "/run.npz", checkpoint_every=10, num_steps=20)
result = fit(mesh=mesh, checkpoint=path + "/run.npz", num_steps=40)
assert_close(tuple(result[:3]), tuple(one[:3]), rtol=1e-10)
assert_close(fit(mesh=mesh, batch_size=None).losses, fit(batch_size=None).losses, rtol=1e-10)
np.take = spy
assert_same_bits(fit(mesh=mesh, num_steps=10, steps_per_call=5).losses, result.losses[:10])
# The first batch, to start from. Then two calls, two arrays, two devices of this process: a quarter of a batch for each.
assert read == [(8,)] * 2 + [(5, 2)] * 8, read
blocks = {"shuffle": ogp.training.Blocks(10, 2), "num_steps": 10}
assert_close(fit(mesh=mesh, **blocks).losses, fit(**blocks).losses, rtol=1e-10)
stream = lambda: (make(), ogp.training.Stream([tuple(a[i : i + 8] for a in data(48)) for i in range(0, 48, 8)], 48), {})
streamed = {"num_steps": 10, "batch_size": None}
assert_close(fit(stream, mesh=mesh, **streamed).losses, fit(stream, **streamed).losses, rtol=1e-10)
for own in (data(40 + 8 * process), tuple(a + process for a in data(48))):  # rows of each process's own
    try:
        fit(lambda: (make(), own, {}), mesh=mesh, num_steps=2)
    except ValueError as error:
        assert "Processes have different data (rows: " in str(error), error
    else:
        raise AssertionError("rows of its own were weighed as if all had them")
stopped = fit(mesh=mesh, early_stopping=ogp.EarlyStopping(2, every=5, metric=metric))
assert (stopped.status, stopped.num_steps, len(stopped.losses)) == ("stopped early", 5, 15)
try:
    fit(mesh=mesh, checkpoint=path + "/run.npz", batch_size=12)
except ValueError as error:
    assert "another run" in str(error)
else:
    raise AssertionError("the checkpoint of another run was taken")
if "--slow" in sys.argv:
    assert_close(fit(solve_gp, mesh=mesh).losses, fit(solve_gp).losses, rtol=1e-10)
multihost_utils.sync_global_devices("end")
print("same losses in two processes")
"""


def start(script, devices, *args):
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_said(process, sentence):
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-3000:]
    assert sentence in out


def run_in_two(script, tmp_path, option, sentence):
    """Two processes that know of each other, each with a folder; the folders."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    processes = [start(CONNECT + START + script, 2, address, i, folder, option) for i, folder in enumerate(folders)]
    try:
        for process in processes:
            assert_said(process, sentence)
    finally:
        for process in processes:
            process.kill()
    return folders


def test_four_devices(tmp_path):
    assert_said(start(START + FOUR, 4, tmp_path / "run.npz"), "same losses on 4 devices")


def test_devices_share_functions(tmp_path):
    assert_said(start(START + LAYOUT, 4, tmp_path / "run.npz"), "functions on two devices each")


def test_tables_of_rows_have_a_layout_of_their_own():
    svi = SimpleNamespace(optim=ogp.lazy_rows(optax.adam(0.1)))
    everywhere = NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("data",)), PartitionSpec())
    with pytest.raises(ValueError, match="`layout` does not go with lazy_rows"):
        layout_of_state(svi, {}, {"f.*": PartitionSpec("data")}, everywhere)


@pytest.mark.parametrize("option", ["", pytest.param("--slow", marks=pytest.mark.slow)])
def test_two_processes(tmp_path, option):
    folders = run_in_two(TWO, tmp_path, option, "same losses in two processes")
    assert [[p.name for p in folder.iterdir()] for folder in folders] == [["run.npz"], []]


def test_a_mesh_of_one_device_is_that_device():
    options = {"num_steps": 5, "batch_size": 7, "progress_bar": False}
    one = ogp.fit(make(), KEY, data(), **options)
    many = ogp.fit(make(), KEY, data(), mesh=Mesh(np.asarray(jax.devices()[:1]), ("data",)), **options)
    assert_close(tuple(many[:3]), tuple(one[:3]))


@pytest.mark.parametrize(
    "batch_size, is_full, message",
    [
        (10, False, r"`batch_size` must be a multiple of the 4 devices of `mesh`; got 10. Use 8"),
        (3, False, r"got 3. Leave some rows out"),
        (50, True, r"got all N = 50 rows. Leave some rows out, or use minibatches"),
    ],
)
def test_batches_that_devices_cannot_share_are_refused(batch_size, is_full, message):
    devices = Devices(None)
    devices.check_shares(batch_size, is_full)
    devices.mesh, devices.axes = SimpleNamespace(shape={"data": 4}), ("data",)
    with pytest.raises(ValueError, match=message):
        devices.check_shares(batch_size, is_full)
