"""A checkpoint goes on with the problem that it is of, in any process, and is refused by every other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.math import digest as digests
from numpyro_orthgp.math.program import program_of
from numpyro_orthgp.training import checkpoint, digest
from tests import fitting
from tests.fitting import KEY, assert_same_bits, make

ROWS = 24


def data():
    rng = np.random.default_rng(1)
    X = rng.uniform(0, 3, (ROWS, 1))
    return X, np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=ROWS)


def problem(
    arrays=None,
    *,
    kernel=kernels.Matern32,
    noise=0.3,
    likelihood=likelihoods.Gaussian,
    points=4,
    learned=True,
    rate=0.05,
    loss=None,
    N=ROWS,
    **options,
):
    """An SVI of a small GP, its data, and its keywords."""

    def model(X, y, *, N, Z):
        Z = numpyro.param("Z", Z) if learned else Z
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = ogp.gp("f", scale * kernel(0.8), Z)
        with numpyro.plate("rows", N, subsample_size=len(X)):
            numpyro.sample("y", likelihood(f(X), noise), obs=y)

    guide = ogp.AutoSparseGP(model, **options)
    svi = SVI(model, guide, optax.adam(rate), loss or TraceMeanField_ELBO())
    return svi, data() if arrays is None else arrays, {"N": N, "Z": jnp.linspace(0.1, 2.9, points)[:, None]}


def fit(path, *given, resume=True, num_steps=4, **options):
    svi, arrays, constants = problem(*given, **options)
    quiet = {"progress_bar": False, "steps_per_call": 4}
    return ogp.fit(
        svi, KEY, arrays, batch_size=8, num_steps=num_steps, checkpoint=path, resume=resume, **quiet, **constants
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A finished run."""
    path = tmp_path_factory.mktemp("runs") / "run.npz"
    fit(path)
    return path


def changed(i, change):
    arrays = [a.copy() for a in data()]
    change(arrays[i])
    return tuple(arrays)


def scaled(y):
    y *= 100


def one_entry(y):
    y[17] = np.nextafter(y[17], 9)


COMPUTE = "what model, guide and objective compute"


@pytest.mark.parametrize(
    "given, options, message",
    [
        ([changed(1, scaled)], {}, r"the values of data\[1\] \(\w{32} in the file, \w{32} now\)\."),
        ([changed(1, one_entry)], {}, r"the values of data\[1\]"),
        ([changed(0, one_entry)], {}, r"the values of data\[0\]"),
        ([], {"kernel": kernels.Matern52}, COMPUTE),
        ([], {"likelihood": lambda f, scale: likelihoods.StudentT(f, 4.0, scale)}, COMPUTE),
        ([], {"noise": 0.31}, "numbers or arrays that are constants of model"),
        ([], {"loss": TraceMeanField_ELBO(num_particles=2)}, COMPUTE),
        ([], {"covariance": "diagonal"}, r"state \("),
        ([], {"points": 5}, r"state \("),
        ([], {"analytic": False}, COMPUTE),
        ([], {"residual": "tight"}, r"state \(|" + COMPUTE),
    ],
)
def test_another_problem_is_refused(file, given, options, message):
    before = file.read_bytes()
    with pytest.raises(ValueError, match=rf"run.npz is of another run: they differ in ({message}).*resume=False"):
        fit(file, *given, **options)
    assert file.read_bytes() == before


@pytest.mark.filterwarnings("ignore:.*counts its 8 observations")
def test_another_number_of_rows_is_refused(file):
    with pytest.raises(ValueError, match=r"differ in the keyword N \(24 in the file, 48 now\)\. Use another file"):
        fit(file, N=48)


def test_a_constant_array_counts_wherever_the_model_has_it_from(tmp_path):
    path = tmp_path / "run.npz"
    fit(path, learned=False)
    svi, arrays, constants = problem(learned=False)
    constants["Z"] = constants["Z"].at[2].add(1e-12)
    with pytest.raises(ValueError, match=r"differ in the keyword Z \(float64\[4, 1\] \w{8} in the file"):
        ogp.fit(svi, KEY, arrays, batch_size=8, num_steps=4, progress_bar=False, checkpoint=path, **constants)

    offset = np.zeros(1000)

    def model(X, y=None):
        fitting.model(X + offset[7], y=y + 0 * jnp.asarray(offset).sum())

    path = tmp_path / "other.npz"
    quiet = {"num_steps": 2, "progress_bar": False, "checkpoint": path}
    ogp.fit(make(model=model), KEY, fitting.data(), **quiet)
    offset[999] = 1
    with pytest.raises(ValueError, match=r"constants of model, guide or objective \(a noise, N, inducing points\)\."):
        ogp.fit(make(model=model), KEY, fitting.data(), **quiet)


def test_rates_and_lengths_may_change(file, tmp_path):
    path = tmp_path / "run.npz"
    path.write_bytes(file.read_bytes())
    with pytest.warns(UserWarning, match="The optimizer has other numbers, such as a rate"):
        assert len(fit(path, rate=0.01, num_steps=6).losses) == 6


def test_other_starting_values_are_said(file):
    with pytest.warns(UserWarning, match=r"starting values of f.u0_scale_tril are not those of the run in .*run.npz"):
        fit(file, init_scale=0.5)


def test_a_run_may_be_continued_on_purpose(file, tmp_path):
    path = tmp_path / "run.npz"
    path.write_bytes(file.read_bytes())
    with pytest.warns(UserWarning, match=rf"goes on from .*of another run: they differ in .*{COMPUTE}"):
        result = fit(path, kernel=kernels.Matern52, resume="anyway", num_steps=6)
    assert len(result.losses) == 6
    assert len(fit(path, kernel=kernels.Matern52, num_steps=6).losses) == 6  # now it is this problem's
    with pytest.raises(ValueError, match=r"differ in state"):
        fit(path, points=5, resume="anyway")
    with pytest.raises(ValueError, match=r"Unknown `resume` 'always'; known are 'anyway'"):
        fit(path, resume="always")


def rewritten(path, change):
    """The file with another header or other arrays."""
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(str(arrays["header"]))
    change(header, arrays)
    arrays["header"] = np.asarray(json.dumps(header))
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda h, a: a.update(state0=np.zeros(3)), r"damaged.*float64\[3\] where .*\[\] was expected"),
        (lambda h, a: a.update(state1=a["state1"].astype(np.float32)), r"damaged.*float32\[.*where float64\["),
        (lambda h, a: h.update(step=5), r"damaged.*step 5, best step 0 and 4 losses"),
        (lambda h, a: h["windows"].update(best_step=9), r"damaged"),
        (lambda h, a: a.pop("state1"), r"damaged"),
        (lambda h, a: h.update(fingerprint=[1]), r"damaged.*no fingerprint"),
        (lambda h, a: h.update(format=3), r"damaged.*format 3, known up to 2"),
        (lambda h, a: h.update(format=1), r"run.npz was written by an earlier version of this package.*resume=False"),
        (
            lambda h, a: h["fingerprint"].update(constants="0", versions={"jax": "0.1"}),
            rf"the version of jax \(0.1 in the file, {re.escape(jax.__version__)} now\), which may trace the same model to another",
        ),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_themselves(file, tmp_path, change, message):
    path = tmp_path / "run.npz"
    path.write_bytes(file.read_bytes())
    rewritten(path, change)
    with pytest.raises(ValueError, match=message):
        fit(path)


@pytest.mark.parametrize("length", [252, 300])  # with ".tmp" the first is too long too
def test_a_name_that_is_too_long(tmp_path, length):
    with pytest.raises(ValueError, match=r"`checkpoint` .* cannot be written: .*File name too long"):
        fit(tmp_path / ("x" * length))


def test_a_file_that_cannot_be_read(file, monkeypatch):
    monkeypatch.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(PermissionError("not yours")))
    with pytest.raises(ValueError, match=r"`checkpoint` .*run.npz cannot be read: not yours"):
        fit(file)


# ---------------------------------------------------------------- digests


def test_digests_of_data(tmp_path, monkeypatch):
    X = np.random.default_rng(0).normal(size=(5000, 3))
    whole = digest.digest_of_data(X, np.float64)
    on_disk = np.memmap(tmp_path / "X", X.dtype, "w+", shape=X.shape)
    on_disk[:] = X
    on_disk.flush()
    for same in (X.copy(order="F"), X.astype(">f8"), on_disk, np.asarray(on_disk)[:]):
        assert digest.digest_of_data(same, np.float64) == whole
    monkeypatch.setattr(digests, "PIECE", 1000)  # many pieces, of which no two are the same
    in_pieces = digest.digest_of_data(X, np.float64)
    other = X.copy()
    other[[0, -1]] = X[[-1, 0]]
    two = X[:82]  # pieces have 41 rows
    assert digests.digest_of_array(two) != digests.digest_of_array(np.roll(two, 41, axis=0))
    assert len({whole, in_pieces, digest.digest_of_data(other, np.float64), digest.digest_of_data(X, np.float32)}) == 4
    assert digest.digest_of_data(X.ravel(), np.float64) != digest.digest_of_data(X, np.float64)
    for odd in (np.zeros((3, 0)), np.zeros(2, bool), np.asarray(jnp.ones(3, jnp.bfloat16)), np.zeros(2, complex)):
        assert len(digests.digest_of_array(odd)) == 32

    monkeypatch.setattr(digest, "LARGE", 1000)  # only some rows of the memory map are read
    sampled = digest.digest_of_data(on_disk, np.float64)
    assert f"a file of {X.nbytes} bytes changed 20" in sampled
    assert digest.digest_of_data(X, np.float64) == in_pieces
    os.utime(tmp_path / "X", (1, 1))
    assert sampled.split()[0] in digest.digest_of_data(on_disk, np.float64) != sampled


def test_programs_are_named_by_what_they_compute():
    x = jax.ShapeDtypeStruct((3,), float)
    base = program_of(lambda x: jnp.sin(x).sum() * 2.0 + x[0], x)

    def renamed(points):
        unused = jnp.exp(points)  # noqa: F841
        first = points[0]
        return first + 2.0 * jnp.sum(jnp.sin(points))

    def of(f):
        return program_of(f, x)

    reordered = [of(lambda x, s=s: sum((x[i] for i in s), x[1])) for s in ([0, 1, 2], [2, 0, 1], [1, 2, 0])]
    assert len(set(reordered)) == 1
    assert of(lambda x: x[0] - x[1] + x[2]) == of(lambda x: x[2] - (x[1] - x[0])) != of(lambda x: x[0] + x[1] - x[2])
    assert of(lambda x: jnp.sin(x).sum() * 2.0 + x[0]) == base
    other_number = of(lambda x: jnp.sin(x).sum() * 2.5 + x[0])
    assert other_number.operations == base.operations and other_number.constants != base.constants
    large = np.arange(3000.0)
    arrays = []
    for shift in (0, 0, 1):
        large = large + 0  # another object
        large[2999] += shift
        arrays.append(of(lambda x, a=large: (a * x[0]).sum()))
    assert arrays[0] == arrays[1] and arrays[1].operations == arrays[2].operations and arrays[1] != arrays[2]
    keys = [
        of(lambda x, k=k: x + jax.random.normal(k)) for k in (jax.random.key(0), jax.random.key(0), jax.random.key(1))
    ]
    assert keys[0] == keys[1] != keys[2]
    inner = [of(lambda x, p=p: jax.lax.fori_loop(0, 3, lambda i, c: c**p, x)) for p in (2, 2, 3)]
    assert inner[0] == inner[1] and inner[0].operations != inner[2].operations


def test_an_object_that_is_no_svi(tmp_path):
    """All that its update does counts, since what the loss is is not known."""

    class Own:
        def __init__(self, rate):
            self.rate = rate

        def init(self, key, X, y):
            return {"w": jnp.zeros(3)}

        def update(self, state, X, y):
            loss, gradient = jax.value_and_grad(lambda w: ((X @ w - y) ** 2).mean())(state["w"])
            return {"w": state["w"] - self.rate * gradient}, loss

        def get_params(self, state):
            return state

    path = tmp_path / "run.npz"
    quiet = {"num_steps": 3, "progress_bar": False, "checkpoint": path}
    first = ogp.fit(Own(0.1), KEY, fitting.data(), **quiet)
    assert_same_bits(ogp.fit(Own(0.1), KEY, fitting.data(), **quiet).params, first.params)
    with pytest.raises(ValueError, match="constants of model, guide or objective"):
        ogp.fit(Own(0.2), KEY, fitting.data(), **quiet)


def test_an_svi_that_steps_in_its_own_way(tmp_path):
    class Stable(SVI):
        def update(self, state, *args, **kwargs):
            loss = lambda p: (self.loss.loss(state.rng_key, self.constrain_fn(p), self.model, self.guide, *args), None)  # noqa: E731
            params = self.optim.get_params(state.optim_state)
            (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(params)
            return state._replace(optim_state=self.optim.update(gradient, state.optim_state, value)), value

    path = tmp_path / "run.npz"
    svi = Stable(fitting.model, fitting.guide, optax.adam(0.1), Trace_ELBO())
    quiet = {"num_steps": 2, "progress_bar": False, "checkpoint": path}
    first = ogp.fit(svi, KEY, fitting.data(), **quiet)
    assert_same_bits(ogp.fit(svi, KEY, fitting.data(), **quiet).params, first.params)


@pytest.mark.parametrize("loss", [Trace_ELBO(), RenyiELBO(0.5, num_particles=2)])
def test_any_objective(tmp_path, loss):
    path = tmp_path / "run.npz"
    quiet = {"num_steps": 2, "progress_bar": False, "checkpoint": path}
    ogp.fit(make(loss=loss), KEY, fitting.data(), **quiet)
    with pytest.warns(UserWarning, match="The optimizer has other numbers, such as a rate"):
        assert ogp.fit(make(optax.adam(0.1), loss=loss), KEY, fitting.data(), **quiet).status == "finished"
    with pytest.raises(ValueError, match=COMPUTE):
        ogp.fit(make(loss=TraceMeanField_ELBO()), KEY, fitting.data(), **quiet)


# ---------------------------------------------------------------- processes

SCRIPT = """
import sys
import jax
jax.config.update("jax_enable_x64", True)
from tests.test_fit_fingerprint import fit
result = fit(sys.argv[1], num_steps=int(sys.argv[2]))
print(result.num_steps)
"""


def test_another_process_goes_on_with_the_same_bits(tmp_path):
    """Whatever the order of its sets of strings is."""
    path, whole = tmp_path / "run.npz", fit(tmp_path / "whole.npz", num_steps=8)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "4321"}
    command = [sys.executable, "-c", SCRIPT, str(path), "4"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "4", done.stderr[-2000:]
    result = fit(path, num_steps=8)
    assert_same_bits((result.params, result.losses), (whole.params, whole.losses))
    assert checkpoint.read(path) is not None
