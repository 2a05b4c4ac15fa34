"""The residual tightened in groups of rows, beside dense formulas, and the ways by which groups come into a fit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from numpyro import handlers
from numpyro.infer import SVI, TraceEnum_ELBO, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import AutoSparseGP, CollapsedGP, gp, init, kernels, likelihoods
from numpyro_orthgp.functions import function
from numpyro_orthgp.functions.groups import charges
from numpyro_orthgp.gaussians import Full
from numpyro_orthgp.math.grouped import Grouping
from numpyro_orthgp.training import Blocks, columns
from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.columns import default_blocks
from numpyro_orthgp.training.orders import Part, spread
from tests import oracles

N = 23
RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0, 1, (N, 1)), 0)
Y = np.sin(6 * X[:, 0]) + 0.1 * RNG.normal(size=N)
Z, O = X[::5], X[2::7]
NOISE = np.append(RNG.uniform(0.1, 0.3, N - 1), 1.5)
SEEN = RNG.uniform(size=N) > 0.3
KERNEL = oracles.matern32(1.0, 0.3)


@pytest.fixture(autouse=True, params=["float64"])
def _x64(request):
    with jax.enable_x64(True):
        yield


def split(sets=(Z,)):
    """Explained and residual covariance of f(X)."""
    P = np.concatenate(sets)
    Q = KERNEL(X, P) @ np.linalg.solve(KERNEL(P, P) + 1e-10 * np.eye(len(P)), KERNEL(P, X))
    return Q, KERNEL(X, X) - Q


def dense_bound(y, size, name, alpha=1.0, seen=None, sets=(Z,)):
    Q, R = split(sets)
    rows = np.arange(N) if seen is None else np.flatnonzero(seen)
    blocks, charge = np.zeros((N, N)), 0.0
    for first in range(0, N, size):
        i = rows[(rows >= first) & (rows < first + size)]
        ratio = R[np.ix_(i, i)] / np.outer(NOISE[i], NOISE[i])
        blocks[np.ix_(i, i)] = R[np.ix_(i, i)]
        if name == "titsias2025":
            charge += np.linalg.slogdet(np.eye(len(i)) + ratio)[1]
        if name == "pep":
            charge += (1 - alpha) / alpha * np.linalg.slogdet(np.eye(len(i)) + alpha * ratio)[1]
    share = {"titsias2025": 0.0, "fitc": 1.0, "pep": alpha}[name]
    C = Q + share * blocks + np.diag(NOISE**2)
    return oracles.log_normal(y[rows], 0.0, C[np.ix_(rows, rows)]) - charge / 2


def collapsed(size, **options):
    return CollapsedGP(
        kernels.Matern32(0.3), jnp.asarray(X), jnp.asarray(Z), jnp.asarray(NOISE), group_size=size, **options
    )


@pytest.mark.parametrize("size", [1, 4, N])
@pytest.mark.parametrize(("name", "alpha"), [("titsias2025", None), ("fitc", None), ("pep", 0.4)])
def test_collapsed_bounds_of_groups(size, name, alpha):
    options = {"bound": name, "alpha": alpha}
    for block_size in (None, 8):
        value = collapsed(size, block_size=block_size, **options).log_prob(Y)
        np.testing.assert_allclose(value, dense_bound(Y, size, name, alpha or 1.0), rtol=1e-10)
    # Two outputs, of which other rows are missing.
    both = collapsed(size, observed=np.stack([SEEN, ~SEEN], 1), **options).log_prob(np.stack([Y, 2 * Y], 1))
    parts = [dense_bound(y, size, name, alpha or 1.0, seen) for y, seen in ((Y, SEEN), (2 * Y, ~SEEN))]
    np.testing.assert_allclose(both, sum(parts), rtol=1e-10)


def test_collapsed_bound_beside_a_given_orthogonal_set():
    """q of the second set is the prior's: what it explains is a variance, and no part of the residual."""
    M = len(O)
    given = (Full(jnp.zeros(M), jnp.eye(M)),)
    value = CollapsedGP(
        kernels.Matern32(0.3), jnp.asarray(X), [Z, O], jnp.asarray(NOISE), group_size=4, orthogonal=given
    ).log_prob(Y)
    (Q, _), (both, R) = split(), split((Z, O))
    expected = oracles.log_normal(Y, 0.0, Q + np.diag(NOISE**2)) - np.sum(np.diag(both - Q) / NOISE**2) / 2
    for first in range(0, N, 4):
        i = np.arange(first, min(first + 4, N))
        expected -= np.linalg.slogdet(np.eye(len(i)) + R[np.ix_(i, i)] / np.outer(NOISE[i], NOISE[i]))[1] / 2
    np.testing.assert_allclose(value, expected, rtol=1e-8)


@pytest.mark.parametrize("name", ["titsias2025", "fitc"])
def test_outputs_with_a_kernel_each(name):
    kernel = kernels.Matern32(jnp.asarray([[0.3], [0.3]])) * jnp.asarray([1.0, 1.0])
    both = CollapsedGP(kernel, jnp.asarray(X), jnp.asarray(Z), jnp.asarray(NOISE), bound=name, group_size=4)
    value = both.log_prob(np.stack([Y, 2 * Y], 1))
    np.testing.assert_allclose(value, sum(dense_bound(y, 4, name) for y in (Y, 2 * Y)), rtol=1e-8)


def test_posterior_of_a_partially_independent_conditional():
    Q, R = split()
    blocks = np.where(np.arange(N)[:, None] // 4 == np.arange(N) // 4, R, 0)
    at = np.array([[0.11], [0.52]])
    Qs = KERNEL(at, Z) @ np.linalg.solve(KERNEL(Z, Z) + 1e-10 * np.eye(len(Z)), KERNEL(Z, X))
    expected = Qs @ np.linalg.solve(Q + blocks + np.diag(NOISE**2), Y)
    f = collapsed(4, bound="fitc").posterior(Y)
    np.testing.assert_allclose(f(jnp.asarray(at)).mean, expected, rtol=1e-7)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(2, 4), st.integers(0, 10**6))
def test_bounds_are_in_order(size, factor, seed):
    with jax.enable_x64(True):
        y = np.random.default_rng(seed).normal(size=N)
        sizes = (None, size, factor * size)
        diagonal, fine, coarse = (float(collapsed(s).log_prob(y)) for s in sizes)
        loose = float(collapsed(None, bound="titsias2009").log_prob(y))
        exact = oracles.exact_log_marginal(KERNEL, X, y, NOISE**2)
        assert loose <= diagonal <= fine + 1e-9 <= coarse + 2e-9 <= exact + 3e-9
        np.testing.assert_allclose(float(collapsed(1).log_prob(y)), diagonal, rtol=1e-12)


def svi_of(size, *, wrap=lambda fn: fn, handler=None, optim=None, sets=(Z, O), **options):
    def model(X, y):
        f = gp("f", kernels.Matern32(0.3), [jnp.asarray(s) for s in sets])
        with numpyro.plate("data", N, subsample_size=len(X)), handler or nullcontext():
            numpyro.sample("y", wrap(likelihoods.Gaussian(f(X), jnp.asarray(NOISE))), obs=y)

    guide = AutoSparseGP(model, residual="tight", group_size=size, **options)
    return SVI(model, guide, optim or optax.adam(1e-2), TraceMeanField_ELBO())


def dense_start(size, seen=None, sets=(Z, O)):
    """The bound at q(u) = p(u)."""
    Q, R = split(sets)
    rows = np.arange(N) if seen is None else np.flatnonzero(seen)
    value = -0.5 * np.sum(np.log(2 * np.pi * NOISE[rows] ** 2) + (Y[rows] ** 2 + np.diag(Q)[rows]) / NOISE[rows] ** 2)
    for first in range(0, N, size):
        i = rows[(rows >= first) & (rows < first + size)]
        value -= np.linalg.slogdet(np.eye(len(i)) + R[np.ix_(i, i)] / np.outer(NOISE[i], NOISE[i]))[1] / 2
    return value


def start(svi):
    return -svi.evaluate(
        svi.init(jax.random.PRNGKey(0), jnp.asarray(X), jnp.asarray(Y)), jnp.asarray(X), jnp.asarray(Y)
    )


@pytest.mark.parametrize("size", [1, 4, N, 40])
def test_groups_of_rows_in_a_fit(size):
    np.testing.assert_allclose(start(svi_of(size)), dense_start(size), rtol=1e-8)


@pytest.mark.parametrize(
    "how", [{"handler": handlers.mask(mask=jnp.asarray(SEEN))}, {"wrap": lambda fn: fn.mask(jnp.asarray(SEEN))}]
)
def test_missing_rows_leave_their_group(how):
    np.testing.assert_allclose(start(svi_of(4, **how)), dense_start(4, SEEN), rtol=1e-8)


def test_masks_that_nobody_tells_of_are_refused():
    seen = jnp.asarray(SEEN)
    for wrap in (lambda fn: dist.MaskedDistribution(fn, seen), lambda fn: dist.Independent(fn, 1).mask(seen.all())):
        with pytest.raises(ValueError, match="was not told of this mask"):
            start(svi_of(4, wrap=wrap))
    single = start(svi_of(None, wrap=lambda fn: dist.MaskedDistribution(fn, seen)))
    np.testing.assert_allclose(single, start(svi_of(1, wrap=lambda fn: fn.mask(seen))), rtol=1e-8)


def test_masks_around_transforms_of_numpyro_are_refused():
    """They tell nobody of a mask: hidden rows paid a part of their group's charge, which was cut off afterwards."""
    seen, affine = jnp.asarray(SEEN), dist.transforms.AffineTransform(0.0, 1.0)
    wraps = {
        "numpyro": lambda fn: dist.TransformedDistribution(fn, affine),
        "ours": lambda fn: likelihoods.Transformed(fn, affine),
    }
    with pytest.raises(ValueError, match=r"not told of a mask by.*likelihoods\.Transformed"):
        start(svi_of(4, wrap=lambda fn: wraps["numpyro"](fn).mask(seen)))
    np.testing.assert_allclose(start(svi_of(4, wrap=wraps["numpyro"])), dense_start(4), rtol=1e-8)
    ours = start(svi_of(4, wrap=lambda fn: wraps["ours"](fn).mask(seen)))
    np.testing.assert_allclose(ours, dense_start(4, SEEN), rtol=1e-8)
    with pytest.raises(ValueError, match=r"group_size.*a mixture of NumPyro's"):
        start(svi_of(4, wrap=lambda fn: dist.MixtureGeneral(dist.Categorical(jnp.array([0.5, 0.5])), [fn, fn])))


def test_missing_rows_of_outputs_that_are_events():
    def model(X, Y):
        f = gp("f", kernels.Matern32(0.3), [jnp.asarray(Z), jnp.asarray(O)], num_latents=2)
        with numpyro.plate("data", N), handlers.mask(mask=jnp.asarray(SEEN)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), jnp.asarray(NOISE)[:, None]).to_event(1), obs=Y)

    svi = SVI(model, AutoSparseGP(model, residual="tight", group_size=4), optax.adam(1e-2), TraceMeanField_ELBO())
    data = jnp.asarray(X), jnp.stack([jnp.asarray(Y)] * 2, 1)
    value = -svi.evaluate(svi.init(jax.random.PRNGKey(0), *data), *data)
    np.testing.assert_allclose(value, 2 * dense_start(4, SEEN), rtol=1e-8)


def test_a_natural_step_ends_on_the_collapsed_bound():
    svi = svi_of(4, natural=True, optim=ogp.natural_gradient(optax.sgd(0.0), 1.0), sets=(Z,))
    state = svi.init(jax.random.PRNGKey(0), jnp.asarray(X), jnp.asarray(Y))
    state, _ = svi.update(state, jnp.asarray(X), jnp.asarray(Y))
    value = -svi.evaluate(state, jnp.asarray(X), jnp.asarray(Y))
    np.testing.assert_allclose(value, collapsed(4).log_prob(Y), rtol=1e-8)


def test_gradients_are_those_of_differences():
    def bound(lengthscale, noise):
        return CollapsedGP(kernels.Matern32(lengthscale), jnp.asarray(X), jnp.asarray(Z), noise, group_size=4).log_prob(
            Y
        )

    check_grads(bound, (0.3, 0.2), order=1, modes=("rev",), rtol=1e-5)


@pytest.mark.parametrize("what", ["noise", "factor", "mask", "offset"])
def test_states_of_rows_have_no_groups(what):
    """The states of rows are enumerated one by one, and a group is charged for all its rows together."""

    def model(X, y):
        f = gp("f", kernels.Matern32(0.3), jnp.asarray(Z))
        with numpyro.plate("data", N):
            z = numpyro.sample("z", dist.Categorical(jnp.array([0.3, 0.7])), infer={"enumerate": "parallel"})
            m = f(X) * jnp.array([1.0, 2.0])[z] if what == "factor" else f(X)
            m = m + jnp.array([0.0, 1.0])[z] if what == "offset" else m
            noise = jnp.array([0.2, 1.0])[z] if what == "noise" else 0.2
            with handlers.mask(mask=jnp.array([True, False])[z] if what == "mask" else True):
                numpyro.sample("y", likelihoods.Gaussian(m, noise), obs=y)

    def value(size):
        guide = AutoSparseGP(model, residual="tight", group_size=size)
        return start(SVI(model, guide, optax.adam(1e-2), TraceEnum_ELBO()))

    if what == "offset":  # the charge is the same in all states
        (_, R), s = split(), 0.2
        groups = [R[i : i + 4, i : i + 4] for i in range(0, N, 4)]
        gain = np.log1p(np.diag(R) / s**2).sum() - sum(np.linalg.slogdet(np.eye(len(D)) + D / s**2)[1] for D in groups)
        np.testing.assert_allclose(value(4) - value(None), gain / 2, rtol=1e-6)
    else:
        with pytest.raises(ValueError, match="must not depend on an enumerated site of each row"):
            value(4)


def test_what_groups_cannot_do_is_refused():
    def fit(likelihood, at=lambda X: X, **options):
        def model(X, y):
            f = gp("f", kernels.Matern32(0.3), jnp.asarray(Z), num_latents=2)
            with numpyro.plate("data", N):
                numpyro.sample("y", likelihood(f(at(X))), obs=y)

        svi = SVI(model, AutoSparseGP(model, **options), optax.adam(1e-2), TraceMeanField_ELBO())
        svi.evaluate(
            svi.init(jax.random.PRNGKey(0), jnp.asarray(X), jnp.asarray(SEEN)), jnp.asarray(X), jnp.asarray(SEEN)
        )

    tight = {"residual": "tight", "group_size": 4}
    with pytest.raises(
        ValueError, match="`group_size` needs Gaussian noise on functions that are not mixed; Bernoulli"
    ):
        fit(lambda f: likelihoods.Bernoulli(f[..., 0]), **tight)
    with pytest.raises(ValueError, match="not mixed; Gaussian"):
        fit(lambda f: likelihoods.Gaussian((f @ jnp.ones((2, 1)))[..., 0], 0.1), **tight)
    with pytest.raises(ValueError, match="Tasks cannot have groups of rows"):
        tasks = ogp.Tasks(jnp.asarray(X), jnp.arange(N) % 2)
        fit(lambda f: likelihoods.Gaussian(f, 0.1), at=lambda X: tasks, **tight)
    with pytest.raises(ValueError, match="tightened by one number for all rows, not in groups"):
        fit(lambda f: numpyro.distributions.Normal(f[..., 0].sample(), 0.1), **tight)
    with pytest.raises(ValueError, match="needs residual='tight'"):
        fit(lambda f: likelihoods.Gaussian(f[..., 0], 0.1), group_size=4)
    with pytest.raises(ValueError, match="`group_size` belongs to the bounds 'titsias2025'"):
        collapsed(4, bound="titsias2009")


def test_groups_of_near_rows():
    points = np.random.default_rng(1).uniform(size=(1003, 3))
    order = init.groups(points, 16)
    assert sorted(order) == list(range(1003))
    np.testing.assert_array_equal(order, init.groups(points, 16))
    cut = points[order][:992].reshape(-1, 16, 3)
    assert cut.var(1).mean() < 0.1 * points.var(0).mean()
    assert len(init.groups(np.zeros((7, 2)), 3)) == 7  # rows that do not differ


@pytest.mark.parametrize(("num", "size"), [(12, 4), (50, 7), (5, 5), (9, 1)])
def test_batches_have_a_group_of_each_stretch(num, size):
    """Every group comes once, one of each stretch of the data in each batch, and none earlier than others on average."""
    orders = np.array([spread(np.random.default_rng(seed), num, size) for seed in range(400)])
    assert (np.sort(orders, 1) == np.arange(num)).all()
    stretches = orders[:, : num // size * size].reshape(400, -1, size) * size // num
    assert (np.sort(stretches, -1) == np.arange(size)).all()
    if num % size == 0:
        first = np.bincount(orders[:, :size].ravel(), minlength=num) / 400  # of the first batch
        np.testing.assert_allclose(first, size / num, atol=5 * np.sqrt(size / num * (1 - size / num) / 400) + 1e-12)


def test_batches_are_whole_groups_and_leave_out_each_row_as_often():
    batches = Batches((np.arange(11),), 4, (0,), 4)
    counts, epochs = np.zeros(11), 3000
    for epoch in range(epochs):
        order = batches.order.order(epoch)
        assert len(order) == len(set(order)) == 8
        counts[order] += 1
        whole = [group for group in order.reshape(-1, 4) if max(group) < 8]
        assert all((np.diff(group) == 1).all() and group[0] % 4 == 0 for group in whole)
    np.testing.assert_allclose(counts / epochs, 8 / 11, atol=0.04)
    with pytest.raises(ValueError, match="`batch_size` must be a multiple of `group_size`"):
        Batches((np.arange(11),), 6, (0,), 4)


@pytest.mark.parametrize(("num", "size", "held"), [(11, 4, 1), (11, 8, 1), (22, 8, 2), (24, 8, 2), (50, 12, 2)])
def test_blocks_are_of_whole_groups_and_leave_out_each_row_as_often(num, size, held):
    G, epochs = 4, 3000
    batches = Batches((np.arange(num),), 8, (0,), G, Blocks(size, held))
    order, length = batches.order, num // G * G
    counts, first = np.zeros(num), np.zeros(num)
    for epoch in range(epochs):
        rows = order.rows(Part(epoch, 0, length))
        assert len(set(rows.tolist())) == length
        counts[rows] += 1
        first[rows[:G]] += 1
        whole = [group for group in rows.reshape(-1, G) if max(group) < length]
        assert (
            all((np.diff(group) == 1).all() and group[0] % G == 0 for group in whole) and len(whole) >= length // G - 1
        )
    tolerance = 4.5 * np.sqrt(0.25 / epochs)
    np.testing.assert_allclose(counts / epochs, length / num, atol=tolerance)
    np.testing.assert_allclose(first / epochs, G / num, atol=tolerance)  # also at any one place of an epoch
    found, numbers = batches.between(3 * length - 8, 3 * length + 8)  # what is read is what the order says
    np.testing.assert_array_equal(found[0], numbers)
    for epoch in (2, 0):  # by itself, in any order
        parts = [order.rows(Part(epoch, i, i + G)) for i in range(0, length, G)]
        np.testing.assert_array_equal(np.concatenate(parts), order.rows(Part(epoch, 0, length)))


def test_blocks_of_files_are_rounded_to_whole_groups():
    class Lazy:
        chunks, shape, dtype = (10,), (10_000,), np.dtype(float)

    assert Batches((Lazy(),), 12, (0,), 4, Blocks(held=2)).blocks == (10_000, 2)  # less than a megabyte
    assert Batches((Lazy(),), 12, (0,), 4, Blocks(size=8)).blocks[0] == 8
    with pytest.raises(ValueError, match="`size` must be a multiple of 4; got 10"):
        Batches((Lazy(),), 12, (0,), 4, Blocks(size=10))
    assert default_blocks([np.zeros((10**6, 1))], None, None, 48)[0] % 48 == 0


@pytest.mark.parametrize("store", ["h5py", "parquet", "memmap"])
def test_fits_with_groups_read_files(store, tmp_path):
    """The steps of arrays in memory in the same blocks."""
    inputs, outputs = np.asarray(X[:22], float), np.asarray(Y[:22], float)
    if store == "h5py":
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / "data.h5", "w") as file:
            file["X"], file["y"] = inputs, outputs
        file = h5py.File(tmp_path / "data.h5")
        stored = file["X"], file["y"]
    elif store == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").table({str(i): x for i, x in enumerate(inputs.T)} | {"y": outputs})
        parquet.write_table(table, tmp_path / "data.parquet", row_group_size=5)
        stored = columns(tmp_path / "data.parquet", X=[str(i) for i in range(inputs.shape[1])], y="y")
    else:
        np.save(tmp_path / "X.npy", inputs)
        stored = np.load(tmp_path / "X.npy", mmap_mode="r"), outputs

    def model(X, y):
        f = gp("f", kernels.Matern32(0.3), jnp.asarray(Z))
        with numpyro.plate("data", 22, subsample_size=len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.2), obs=y)

    def run(data, num_steps, **options):
        svi = SVI(model, AutoSparseGP(model, residual="tight", group_size=4), optax.adam(1e-2), TraceMeanField_ELBO())
        options = {"batch_size": 8, "group_size": 4, "shuffle": Blocks(8, 2), "progress_bar": False} | options
        return ogp.fit(svi, jax.random.PRNGKey(0), data, num_steps=num_steps, **options).losses

    wanted = run((inputs, outputs), 9)
    np.testing.assert_array_equal(run(stored, 9), wanted)
    run(stored, 4, checkpoint=tmp_path / "run.npz")
    np.testing.assert_array_equal(run(stored, 9, checkpoint=tmp_path / "run.npz"), wanted)


def test_fit_with_groups_and_a_warning_without():
    data = X[:20], Y[:20]

    def model(X, y):
        f = gp("f", kernels.Matern32(0.3), jnp.asarray(Z))
        with numpyro.plate("data", 20, subsample_size=len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.2), obs=y)

    svi = SVI(model, AutoSparseGP(model, residual="tight", group_size=4), optax.adam(1e-2), TraceMeanField_ELBO())
    steps = {"batch_size": 8, "num_steps": 5, "progress_bar": False}
    assert ogp.fit(svi, jax.random.PRNGKey(0), data, group_size=4, **steps).losses.shape == (5,)
    with pytest.warns(UserWarning, match=r"groups of 4 consecutive rows, but batches hold groups of 1"):
        ogp.fit(svi, jax.random.PRNGKey(0), data, **steps)
    stream = ogp.training.Stream([(X[i : i + 8], Y[i : i + 8]) for i in (0, 8)], num_rows=20)
    with pytest.warns(
        UserWarning, match=r"a stream are taken as they come: .* only if each batch consists of whole groups"
    ):
        ogp.fit(svi, jax.random.PRNGKey(0), stream, num_steps=2, progress_bar=False)


def test_missing_outputs_beneath_a_transform():
    def bound(transformed, seen):
        def model(X, y):
            f = gp("f", kernels.Matern32(0.3), jnp.asarray(Z))
            fn = likelihoods.Gaussian(f(X), jnp.asarray(NOISE))
            if transformed:
                fn = likelihoods.Transformed(fn, numpyro.distributions.transforms.ExpTransform())
            with numpyro.plate("data", N), handlers.mask(mask=jnp.asarray(seen)):
                numpyro.sample("y", fn, obs=jnp.exp(y) if transformed else y)

        svi = SVI(model, AutoSparseGP(model, residual="tight", group_size=4), optax.adam(1e-2), TraceMeanField_ELBO())
        return start(svi)

    np.testing.assert_allclose(bound(True, SEEN), bound(False, SEEN) - Y[SEEN].sum(), rtol=1e-8)
    np.testing.assert_allclose(bound(False, SEEN), dense_start(4, SEEN, (Z,)), rtol=1e-8)


def test_hidden_outputs_of_obs_mask():
    def model(X, y):
        f = gp("f", kernels.Matern32(0.3), jnp.asarray(Z))
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihoods.Gaussian(f(X), jnp.asarray(NOISE)), obs=y, obs_mask=jnp.asarray(SEEN))

    svi = SVI(model, AutoSparseGP(model, residual="tight", group_size=4), optax.adam(1e-2), TraceMeanField_ELBO())
    np.testing.assert_allclose(start(svi), dense_start(4, SEEN, (Z,)), rtol=1e-8)


def test_mean_only_points_leave_the_charge():
    """Whatever they add to the mean, the residual is that of the sets before."""
    with_points = svi_of(4, sets=(Z,))
    plain = start(with_points)

    def model(X, y):
        f = gp("f", kernels.Matern32(0.3), [jnp.asarray(Z), ogp.MeanOnly(jnp.asarray(O))])
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihoods.Gaussian(f(X), jnp.asarray(NOISE)), obs=y)

    svi = SVI(model, AutoSparseGP(model, residual="tight", group_size=4), optax.adam(1e-2), TraceMeanField_ELBO())
    np.testing.assert_allclose(start(svi), plain, rtol=1e-10)  # weights begin at zero


def test_a_plate_of_groups_is_unbiased():
    """The loss of whole groups, in ordinary NumPyro, averaged over all groups."""
    rows_of_all = 20

    def model(X, y, group):
        f = gp("f", kernels.Matern32(0.3), jnp.asarray(Z))
        with handlers.substitute(data={"groups": group}), numpyro.plate("groups", 5, subsample_size=1) as g:
            pass
        rows = (4 * g[:, None] + jnp.arange(4)).ravel()
        with numpyro.plate("data", rows_of_all, subsample_size=4):
            numpyro.sample("y", likelihoods.Gaussian(f(X[rows]), 0.2), obs=y[rows])

    guide = AutoSparseGP(model, residual="tight", group_size=4)
    svi = SVI(model, guide, optax.adam(1e-2), TraceMeanField_ELBO())
    data = jnp.asarray(X[:rows_of_all]), jnp.asarray(Y[:rows_of_all])
    state = svi.init(jax.random.PRNGKey(0), *data, jnp.array([0]))
    parts = [svi.evaluate(state, *data, jnp.array([i])) for i in range(5)]

    def whole(X, y):
        f = gp("f", kernels.Matern32(0.3), jnp.asarray(Z))
        with numpyro.plate("data", rows_of_all):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.2), obs=y)

    full = SVI(whole, AutoSparseGP(whole, residual="tight", group_size=4), optax.adam(1e-2), TraceMeanField_ELBO())
    np.testing.assert_allclose(
        np.mean(parts), full.evaluate(full.init(jax.random.PRNGKey(0), *data), *data), rtol=1e-10
    )


def test_a_residual_of_zero_has_a_derivative():
    slope = jax.grad(lambda r: charges(r * jnp.eye(3)[None], jnp.full(3, r), jnp.full(3, 0.5)).sum())(0.0)
    np.testing.assert_allclose(slope, 3 / 0.5**2)


def test_what_comes_after_a_fit():
    svi = svi_of(4)
    data = jnp.asarray(X), jnp.asarray(Y)
    result = ogp.fit(svi, jax.random.PRNGKey(0), data, num_steps=50, progress_bar=False)
    f = ogp.posterior(svi.model, svi.guide, result.params, *data)["f"]
    assert f.grouping is None and f(data[0]).groups is None
    report = ogp.check(svi.model, svi.guide, result.params, *data, rng_key=jax.random.PRNGKey(1))
    (v,) = report.residual_scales.values()
    assert ((v > 0) & (v <= 1)).all()
    assert np.isfinite(ogp.khat(svi.model, svi.guide, result.params, *data, num_samples=100).khat)


@pytest.mark.parametrize("size", [4, 16])
def test_float32(size):
    # Near rows and little noise: the residual of a group is close to singular, and large beside the noise.
    points = np.linspace(0, 1, 64)[:, None]
    y = np.sin(6 * points[:, 0])

    def bound(lengthscale, dtype):
        X, Z = points.astype(dtype), points[::13].astype(dtype)
        return CollapsedGP(kernels.RBF(lengthscale), X, Z, jnp.asarray(0.05, dtype), group_size=size).log_prob(
            y.astype(dtype)
        )

    for scale in (0.1, 0.3):
        (exact, slope), (value, slope32) = (
            jax.value_and_grad(bound)(jnp.asarray(scale, d), d) for d in ("float64", "float32")
        )
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, exact, rtol=1e-3)
        np.testing.assert_allclose(slope32, slope, rtol=1e-2, atol=1e-2 * abs(exact))


@pytest.mark.parametrize("own_kernels", [False, True])
def test_blocks_of_many_inputs_hold_whole_groups(monkeypatch, own_kernels):
    """Blocks are not stretches of rows, and groups are."""
    scale = jnp.array([[0.3], [0.2]]) if own_kernels else 0.3
    options = {"num_latents": 2} if own_kernels else {}
    with handlers.seed(rng_seed=0):
        f = gp("f", kernels.Matern32(scale), jnp.asarray(Z), **options)
    f = replace(f, fitting=False, grouping=Grouping(4))
    at_once = f(jnp.asarray(X))
    monkeypatch.setattr(function, "MAX_ENTRIES", 1)
    monkeypatch.setattr(function, "MIN_BLOCK", 8)
    jax.clear_caches()
    for num in (N, 20):
        some = f(jnp.asarray(X[:num]))
        np.testing.assert_allclose(some.mean, at_once.mean[:num], atol=1e-12)
        np.testing.assert_allclose(some.residual, at_once.residual[:num], atol=1e-12)
        np.testing.assert_allclose(some.groups, at_once.groups[..., : some.groups.shape[-3], :, :], atol=1e-12)


@pytest.mark.parametrize("num, slack", [(32, 0.05), (200, 1.5)])
def test_float32_with_many_points_of_a_smooth_kernel(num, slack):
    """The bound in groups is not above the evidence by rounding: it was, by more than one nat with 32 points."""
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0, 1, (400, 1)), 0).astype("float32")
    y = (np.sin(20 * X[:, 0]) + 0.1 * rng.normal(size=400)).astype("float32")
    Z = np.linspace(0, 1, num)[:, None].astype("float32")
    C = oracles.rbf(1.0, 0.1)(X.astype(float), X.astype(float)) + 0.01 * np.eye(400)
    evidence = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(C)[1] + 400 * np.log(2 * np.pi))
    bounds = [
        CollapsedGP(kernels.RBF(jnp.float32(0.1)), X, Z, jnp.float32(0.1), group_size=G).log_prob(y) for G in (1, 16)
    ]
    assert max(bounds) < evidence + 0.05
    assert min(bounds) > evidence - slack
