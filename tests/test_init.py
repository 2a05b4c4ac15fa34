"""Starting points: k-means, greedy conditional variance, the median lengthscale."""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_orthgp.init import (
    clusters,
    greedy_variance,
    groups,
    kmeans,
    linear_mean,
    median_lengthscale,
    scales,
    variance,
)
from numpyro_orthgp.init.counts import MOST_SORTED, _drawn, subset
from tests import oracles as orc


@dataclass(frozen=True)
class SquaredExponential:
    """A kernel as small as the protocol allows; ``variance`` and ``lengthscale`` of shape () or (P, 1, 1)."""

    variance: float | jax.Array = 1.0
    lengthscale: float | jax.Array = 1.0

    def __call__(self, X1, X2=None):
        if X2 is None:
            return jnp.broadcast_to(jnp.asarray(self.variance, X1.dtype), (*jnp.shape(self.variance)[:-2], 1, len(X1)))[
                ..., 0, :
            ]
        r2 = ((X1[:, None] - X2[None]) ** 2).sum(-1)
        return self.variance * jnp.exp(-r2 / 2 / self.lengthscale**2)


def inertia(X, C):
    return ((X[:, None] - C[None]) ** 2).sum(-1).min(1).sum()


# ---------------------------------------------------------------- k-means


@pytest.mark.parametrize("num", [5, 30])
@pytest.mark.parametrize("name", ["load_iris", "load_wine", "load_diabetes", "load_breast_cancer"])
def test_kmeans_is_as_good_as_scikit_learn(name, num):
    datasets, cluster = pytest.importorskip("sklearn.datasets"), pytest.importorskip("sklearn.cluster")
    X = getattr(datasets, name)().data
    X = (X - X.mean(0)) / X.std(0)
    # Both fall into local optima, so the average of five starts is compared.
    theirs = [cluster.KMeans(num, n_init=1, random_state=s).fit(X).inertia_ for s in range(5)]
    centres = [np.asarray(kmeans(random.key(s), X, num)) for s in range(5)]
    assert centres[0].shape == (num, X.shape[1])
    assert np.mean([inertia(X, C) for C in centres]) <= 1.1 * np.mean(theirs)


def test_kmeans_finds_separated_clusters(rng):
    means = np.array([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0], [1e3, 1e3]])
    X = np.concatenate([m + rng.normal(size=(20, 2)) for m in means])
    C = np.asarray(kmeans(random.key(1), X, 4))
    expected = X.reshape(4, 20, 2).mean(1)
    np.testing.assert_allclose(C[np.argsort(C.sum(1))], expected[np.argsort(expected.sum(1))], rtol=1e-10)


@pytest.mark.parametrize("num", [3, 250])
def test_kmeans_reads_few_rows_of_an_array_on_disk(rng, tmp_path, monkeypatch, num):
    """All were read, and a table larger than memory could not be."""
    monkeypatch.setattr(clusters, "MOST_ON_DISK", 200)
    X = (np.arange(2000) % 3 * 10.0)[:, None] + rng.normal(0, 0.1, (2000, 2))
    on_disk = np.memmap(tmp_path / "X", X.dtype, "w+", shape=X.shape)
    on_disk[:] = X
    read = []

    class Lazy:
        shape, dtype, ndim, chunks = X.shape, X.dtype, 2, (10, 2)

        def __len__(self):
            return len(X)

        def __getitem__(self, rows):
            read.append(len(X[rows]))
            return X[rows]

    found = [np.asarray(kmeans(random.key(1), given, num)) for given in (Lazy(), on_disk)]
    np.testing.assert_array_equal(*found)
    assert sum(read) <= len(X) and found[0].shape == (num, 2)
    if num == 3:
        np.testing.assert_allclose(np.sort(found[0][:, 0]), [0.0, 10.0, 20.0], atol=0.1)
    whole = np.asarray(kmeans(random.key(1), X, num))
    monkeypatch.setattr(clusters, "MOST_ON_DISK", 2000)
    np.testing.assert_array_equal(kmeans(random.key(1), on_disk, num), whole)
    with pytest.raises(ValueError, match="`num` must be between 1 and N = 2000"):
        kmeans(random.key(1), on_disk, 2001)


def test_kmeans_keeps_categories_whole(rng):
    codes = np.array([1.0, 4.0, 7.0])
    X = np.column_stack([rng.normal(size=200), rng.choice(codes, 200, p=[0.6, 0.3, 0.1]), rng.normal(size=200)])
    for columns in ([1], [-2]):
        C = np.asarray(kmeans(random.key(0), X, 30, categories=columns))
        assert set(np.unique(C[:, 1])) == set(codes)  # each of them, and nothing between
        assert len(np.unique(C[:, 0])) > 25
    # A centre is the mean of the rows nearest to it, a difference of categories counting two.
    distance = ((C[:, None, [0, 2]] - X[:, [0, 2]]) ** 2).sum(-1) + 2 * (C[:, None, 1] != X[:, 1])
    near = distance.argmin(0)
    alone = [m for m in range(30) if (near == m).any() and len(set(X[near == m, 1])) == 1]
    assert len(alone) > 10
    for m in alone:
        np.testing.assert_allclose(C[m], X[near == m].mean(0), atol=0.2)
    only = kmeans(random.key(0), X[:, 1:2], 3, categories=[0])
    assert sorted(np.asarray(only)[:, 0]) == [1.0, 4.0, 7.0]
    assert kmeans(random.key(0), X.astype(np.float32), 5, categories=[1]).dtype == np.float32


def test_kmeans_of_categories_says_what_it_cannot(rng):
    X = rng.normal(size=(20, 2))
    with pytest.raises(ValueError, match=r"`categories` must name columns in 0..1 of X with D = 2; got \[2\]"):
        kmeans(random.key(0), X, 3, categories=[2])
    with pytest.raises(ValueError, match="Under `jit` categories cannot be counted"):
        jax.jit(lambda X: kmeans(random.key(0), X, 3, categories=[0]))(X)


def test_kmeans_with_as_many_centres_as_points_returns_the_points(rng):
    X = rng.normal(size=(12, 3))
    C = np.asarray(kmeans(random.key(0), X, 12))
    np.testing.assert_allclose(C[np.lexsort(C.T)], X[np.lexsort(X.T)], atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_kmeans_with_fewer_distinct_points_than_centres(rng, dtype):
    distinct = rng.normal(size=(3, 2)).astype(dtype)
    X = np.repeat(distinct, 10, axis=0)
    C = kmeans(random.key(0), X, 7)
    assert C.dtype == dtype
    assert np.isfinite(C).all()
    assert inertia(X, np.asarray(C)) < 1e-5
    same = kmeans(random.key(0), np.full((9, 2), 3.5, dtype), 4)
    np.testing.assert_allclose(same, np.full((4, 2), 3.5), rtol=1e-6)


def test_kmeans_reseeds_empty_clusters(rng):
    """An empty cluster goes to the row farthest from its centre, so an outlier far away gets one."""
    from numpyro_orthgp.init.clusters import _lloyd

    X = jnp.concatenate([jnp.asarray(rng.normal(size=(30, 2))), jnp.array([[50.0, 50.0]])])
    start = jnp.array([[0.0, 0.0], [-900.0, 900.0], [-990.0, 900.0]])
    C = _lloyd(X, start)
    np.testing.assert_allclose(C[1], [50.0, 50.0])
    assert np.abs(C[2]).max() < 10
    np.testing.assert_allclose(C[0], X.mean(0))


def test_kmeans_blocks_change_nothing(rng, monkeypatch):
    X = jnp.asarray(rng.normal(size=(103, 2)))
    whole = clusters._assign(X, X[:7])
    monkeypatch.setattr(clusters, "_BLOCK_ENTRIES", 70)  # blocks of ten rows, the last one padded
    for blocked, desired in zip(clusters._assign(X, X[:7]), whole, strict=True):
        np.testing.assert_allclose(blocked, desired, atol=1e-12)
    assert int(whole[1].sum()) == 103


def test_sums_of_clusters_in_an_order_that_is_fixed(rng):
    X, label = jnp.asarray(rng.normal(size=(50, 3))), jnp.asarray(rng.integers(0, 5, 50))  # the last label is padding's
    np.testing.assert_allclose(clusters._ordered_sums(4, X, label), clusters._sums(4, X, label), rtol=1e-12, atol=1e-12)


def test_kmeans_depends_on_the_key_alone(rng):
    X = rng.normal(size=(200, 2))
    np.testing.assert_array_equal(kmeans(random.key(3), X, 10), kmeans(random.key(3), X, 10))
    assert not np.array_equal(kmeans(random.key(3), X, 10), kmeans(random.key(4), X, 10))


def test_kmeans_far_from_the_origin_in_float32(rng):
    X = (1e4 + rng.normal(size=(300, 2))).astype(np.float32)
    C = np.asarray(kmeans(random.key(0), X, 20), np.float64)
    best = inertia(X.astype(float), np.asarray(kmeans(random.key(0), X.astype(float), 20)))
    assert inertia(X.astype(float), C) < 1.2 * best


# ---------------------------------------------------------------- greedy conditional variance


def greedy_by_inverses(k, X, num, given):
    """Row numbers: argmax of k(x, x) - k(x, S) k(S, S)^{-1} k(S, x), S growing."""
    S, picks = given, []
    for _ in range(num):
        variance = k(X)
        if len(S):
            K = orc.prior_inducing(k, S)
            variance = np.diag(k(X, X) - k(X, S) @ np.linalg.inv(K) @ k(S, X))
        i = int(np.argmax(np.where(np.isin(np.arange(len(X)), picks), -np.inf, variance)))
        picks.append(i)
        S = np.concatenate([S, X[i : i + 1]])
    return picks


@pytest.mark.parametrize("sizes", [(), (4,), (3, 2)])
def test_greedy_picks_the_largest_conditional_variance(rng, sizes):
    X = rng.normal(size=(60, 2))
    given = [rng.normal(size=(M, 2)) for M in sizes]
    picks = greedy_variance(SquaredExponential(1.3, 0.8), X, 9, given=given or None)
    joined = np.concatenate(given) if given else np.zeros((0, 2))
    expected = greedy_by_inverses(orc.rbf(1.3, 0.8), X, 9, joined)
    np.testing.assert_array_equal(picks, X[expected])
    if len(sizes) == 1:
        np.testing.assert_array_equal(picks, greedy_variance(SquaredExponential(1.3, 0.8), X, 9, given=given[0]))


def test_greedy_picks_distinct_points_that_reduce_the_trace(rng):
    X = rng.normal(size=(80, 2))
    k = orc.rbf()
    picks = np.asarray(greedy_variance(SquaredExponential(), X, 15))
    assert len(np.unique(picks, axis=0)) == 15
    traces = [np.trace(orc.nystrom(k, X, picks[:m])[1]) for m in range(1, 16)]
    assert (np.diff(traces) < 0).all()
    random_rows = np.mean([np.trace(orc.nystrom(k, X, X[rng.permutation(80)[:15]])[1]) for _ in range(10)])
    assert traces[-1] < 0.8 * random_rows


def test_greedy_with_given_points_avoids_them(rng):
    X = np.concatenate([rng.normal(size=(50, 1)), 6 + rng.normal(size=(5, 1))])
    near = greedy_variance(SquaredExponential(), X, 3, given=np.linspace(-3, 3, 12)[:, None])
    assert (np.asarray(near)[:2] > 3.5).all()


def test_greedy_sums_variances_over_latents(rng):
    X = rng.normal(size=(40, 2))
    variance, lengthscale = jnp.array([2.0, 0.5]).reshape(2, 1, 1), jnp.array([1.5, 0.3]).reshape(2, 1, 1)
    given = rng.normal(size=(3, 2))
    actual = greedy_variance(SquaredExponential(variance, lengthscale), X, 8, given=given)
    S, picks = given, []
    for _ in range(8):
        total = sum(
            np.diag(orc.orthogonal_process(orc.rbf(float(v), float(s)), S)(X, X))
            for v, s in zip(variance.ravel(), lengthscale.ravel(), strict=True)
        )
        picks.append(int(np.argmax(total)))
        S = np.concatenate([S, X[picks[-1] :][:1]])
    np.testing.assert_array_equal(actual, X[picks])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_greedy_survives_duplicates(rng, dtype):
    distinct = rng.normal(size=(4, 2)).astype(dtype)
    X = np.repeat(distinct, 6, axis=0) + (1e-7 * rng.normal(size=(24, 2))).astype(dtype)
    picks = greedy_variance(SquaredExponential(), X, 20, given=X[:5])
    assert picks.dtype == dtype
    assert picks.shape == (20, 2)
    assert np.isfinite(picks).all()
    first = np.asarray(greedy_variance(SquaredExponential(), X, 4))
    assert len({int(((x - distinct) ** 2).sum(-1).argmin()) for x in first}) == 4
    assert np.isfinite(greedy_variance(SquaredExponential(), np.zeros((5, 1), dtype), 5)).all()


def test_greedy_threshold_stops_conditioning_but_returns_num_rows(rng):
    X = np.sort(rng.normal(size=(50, 1)), axis=0)
    picks = np.asarray(greedy_variance(SquaredExponential(1.0, 3.0), X, 30, threshold=0.1))
    assert np.isfinite(picks).all()
    assert len(np.unique(picks)) == 30
    free = np.asarray(greedy_variance(SquaredExponential(1.0, 3.0), X, 30))
    np.testing.assert_array_equal(picks[:2], free[:2])


def test_greedy_float32_follows_float64_while_variance_remains(rng):
    X = rng.normal(size=(300, 3))
    kernel = SquaredExponential()
    low, high = greedy_variance(kernel, X.astype(np.float32), 40), greedy_variance(kernel, X, 40)
    assert low.dtype == np.float32
    traces = [np.trace(orc.nystrom(orc.rbf(), X, np.asarray(Z, float), 1e-10)[1]) for Z in (low, high)]
    assert traces[0] < 1.1 * traces[1]


def test_greedy_subset_of_large_inputs(rng):
    X = rng.normal(size=(500, 2))
    args = (SquaredExponential(), X, 10)
    first = greedy_variance(*args, max_points=50)
    np.testing.assert_array_equal(first, greedy_variance(*args, max_points=50, rng_key=random.key(0)))
    other = greedy_variance(*args, max_points=50, rng_key=random.key(1))
    assert not np.array_equal(first, other)
    for picks in (first, other):
        assert all((X == x).all(1).any() for x in np.asarray(picks))
    # Small enough: the key plays no part.
    np.testing.assert_array_equal(greedy_variance(*args), greedy_variance(*args, rng_key=random.key(5)))


# ---------------------------------------------------------------- median lengthscale


def test_median_is_over_pairs(rng):
    X = rng.normal(size=(40, 3))
    i, j = np.triu_indices(40, 1)
    np.testing.assert_allclose(median_lengthscale(X), np.median(np.sqrt(((X[i] - X[j]) ** 2).sum(-1))), rtol=1e-12)
    expected = np.median(np.abs(X[i] - X[j]), axis=0) * np.sqrt(3)
    np.testing.assert_allclose(median_lengthscale(X, ard=True), expected, rtol=1e-12)


def test_median_follows_the_units_of_each_column(rng):
    X, units = rng.normal(size=(50, 2)), np.array([1e-3, 1e6])
    scaled = median_lengthscale(X * units, ard=True)
    np.testing.assert_allclose(scaled, median_lengthscale(X, ard=True) * units, rtol=1e-10)


@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_median_is_positive_and_finite(rng, dtype, ard):
    spike = np.zeros((30, 3))
    spike[0] = 2.0
    cases = {
        "constant": np.full((20, 3), 7.1),
        "one row": np.ones((1, 3)),
        "one constant column": np.stack([rng.normal(size=20), np.full(20, 0.1), rng.normal(size=20)], 1),
        "mostly constant": spike,
        "huge": 1e30 * rng.normal(size=(20, 3)),
        "tiny": 1e-30 * rng.normal(size=(20, 3)),
    }
    for name, X in cases.items():
        value = np.asarray(median_lengthscale(X.astype(dtype), ard=ard))
        assert value.dtype == dtype, name
        assert value.shape == ((3,) if ard else ()), name
        assert (np.isfinite(value) & (value > 0)).all(), name
    np.testing.assert_allclose(median_lengthscale(cases["constant"].astype(dtype), ard=ard), 1.0)
    np.testing.assert_allclose(median_lengthscale(spike.astype(dtype), ard=ard), 2 * np.sqrt(3), rtol=1e-6)


def test_median_of_a_subset(rng):
    X = rng.normal(size=(1500, 2))
    whole = median_lengthscale(X, num_points=1500)
    part = median_lengthscale(X, num_points=500)
    np.testing.assert_allclose(part, whole, rtol=0.1)
    np.testing.assert_array_equal(part, median_lengthscale(X, num_points=500, rng_key=random.key(0)))
    assert part != median_lengthscale(X, num_points=500, rng_key=random.key(1))


# ---------------------------------------------------------------- errors

FUNCTIONS = {
    "kmeans": lambda X, num=3: kmeans(random.key(0), X, num),
    "greedy_variance": lambda X, num=3: greedy_variance(SquaredExponential(), X, num),
}
INPUTS = {**FUNCTIONS, "median_lengthscale": lambda X: median_lengthscale(X)}


@pytest.mark.parametrize("function", INPUTS.values(), ids=INPUTS)
def test_bad_inputs(function):
    with pytest.raises(ValueError, match=r"`X` must have shape \(n, D\); got \(5,\)"):
        function(np.ones(5))
    with pytest.raises(ValueError, match="at least one point"):
        function(np.ones((0, 2)))
    with pytest.raises(ValueError, match="`X` must be finite; got 1 NaN"):
        function(np.array([[1.0], [np.nan], [2.0], [3.0]]))


def test_whole_numbers_are_numbers_but_have_no_centres_unless_asked(rng):
    X = rng.permutation(np.arange(40)).reshape(20, 2)
    for name in ("greedy_variance", "median_lengthscale"):
        np.testing.assert_array_equal(INPUTS[name](X), INPUTS[name](X.astype(float)))
    with pytest.raises(
        TypeError, match=r"`X` must have a floating dtype; got int64.*Codes of categories have no means"
    ):
        kmeans(random.key(0), X, 3)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_bad_num(function):
    X = np.ones((50, 2))
    for bad in (80, 0, -1):
        message = f"`num` must be between 1 and N = 50, the number of rows of `X`; got {bad}."
        with pytest.raises(ValueError, match=message):
            function(X, bad)
    for bad in (3.0, "3", None):
        with pytest.raises(TypeError, match="`num` must be an integer; got"):
            function(X, bad)


def test_other_bad_arguments():
    X, kernel = np.ones((50, 2)), SquaredExponential()
    with pytest.raises(ValueError, match="`num` must be at most `max_points` = 10, the candidates kept; got 20"):
        greedy_variance(kernel, X, 20, max_points=10)
    with pytest.raises(ValueError, match="`max_points` must be at least 1; got 0"):
        greedy_variance(kernel, X, 20, max_points=0)
    with pytest.raises(ValueError, match=r"`threshold` must be from 0 to 1.*got -0.5"):
        greedy_variance(kernel, X, 2, threshold=-0.5)
    with pytest.raises(ValueError, match=r"`given` must have shape \(n, D\) with D = 2; got \(4, 3\)"):
        greedy_variance(kernel, X, 2, given=np.ones((4, 3)))
    with pytest.raises(ValueError, match="`num_points` must be at least 1; got 0"):
        median_lengthscale(X, num_points=0)
    with pytest.raises(ValueError, match="`num_iters` must be at least 1; got 0"):
        kmeans(random.key(0), X, 2, num_iters=0)


# ---------------------------------------------------------------- size


@pytest.mark.slow
def test_large_inputs():
    """200,000 rows: seconds, and never an N x num array of distances (which would be 0.8 GB in float32)."""
    X = random.normal(random.key(0), (200_000, 8), jnp.float32)
    start = time.perf_counter()
    C = kmeans(random.key(1), X, 1000, num_iters=3).block_until_ready()
    Z = greedy_variance(SquaredExponential(1.0, 2.0), X, 200).block_until_ready()
    assert np.isfinite(C).all()
    assert np.isfinite(Z).all()
    assert time.perf_counter() - start < 120

    from numpyro_orthgp.init.clusters import _kmeans

    analysis = _kmeans.lower(random.key(1), X, 1000, 3).compile().memory_analysis()
    if analysis is not None:
        assert analysis.temp_size_in_bytes < 200e6


def test_linear_mean(rng):
    X = jnp.asarray(rng.normal(size=(40, 3)) @ np.diag([1.0, 5.0, 2.0]))
    np.testing.assert_array_equal(linear_mean(X, 3), np.eye(3))
    np.testing.assert_array_equal(linear_mean(X, 5), np.eye(3, 5))
    W = linear_mean(X, 2)
    directions = np.linalg.svd(np.asarray(X - X.mean(0)))[2][:2]
    np.testing.assert_allclose(np.abs(directions @ W), np.eye(2), atol=1e-10)
    assert (W[[1, 2], [0, 1]] > 0).all()  # the largest entry of each
    with pytest.raises(ValueError, match="`dim` must be at least 1; got 0"):
        linear_mean(X, 0)


@pytest.mark.parametrize("store", ["memory map", "chunks"])
def test_of_an_array_on_disk_few_rows_are_read(store, tmp_path, monkeypatch):
    """The rows that are drawn anyway, and no others: all had gone to memory and to the device."""
    X = np.random.default_rng(0).normal(size=(5000, 2)).astype(np.float32)
    np.save(tmp_path / "X.npy", X)

    class Chunked:
        shape, dtype, chunks = X.shape, X.dtype, (10, 2)
        __len__ = lambda self: 5000  # noqa: E731

        def __getitem__(self, rows):
            assert len(X[rows]) <= 1024
            return X[rows]

    def answers(X):
        return greedy_variance(SquaredExponential(), X, 5, max_points=100), median_lengthscale(X, num_points=100)

    expected, seen = answers(X), []
    for module in (scales, variance):
        monkeypatch.setattr(module, "check_inputs", lambda name, X: seen.append(X.shape) or jnp.asarray(X))
    stored = Chunked() if store == "chunks" else np.load(tmp_path / "X.npy", mmap_mode="r")
    for one, other in zip(answers(stored), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert seen == [(100, 2), (100, 2)]
    with pytest.raises(ValueError, match="`num` must be at most `max_points` = 100, the candidates kept; got 101"):
        greedy_variance(SquaredExponential(), stored, 101, max_points=100)


@pytest.mark.parametrize("unit", [2.0**40, 2.0**-60])
def test_groups_do_not_depend_on_the_unit(unit):
    """Squares of sums of squares overflowed in float32, and rows of a group were anywhere."""
    X = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    np.testing.assert_array_equal(groups(np.float32(unit) * X, 8), groups(X, 8))


@pytest.mark.parametrize("make", [random.key, random.PRNGKey])
def test_few_of_many_rows_are_drawn_without_a_sort_of_all(make):
    """A billion rows on disk would be sorted in memory to draw a thousand."""
    drawn = [np.asarray(_drawn(2**40, 2000, make(seed))) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.intersect1d(drawn[0], drawn[2]).size
    for rows in drawn[1:]:
        assert len(np.unique(rows)) == 2000 and 0 <= rows.min() < rows.max() < 2**40
        counts = np.histogram(rows, 20, (0, 2**40))[0]
        assert np.sum((counts - 100) ** 2 / 100) < 45  # chi-squared with 19 degrees of freedom
    X = np.arange(MOST_SORTED + 1.0)[:, None]
    assert len(np.unique(subset(X, 50, make(0)))) == 50
