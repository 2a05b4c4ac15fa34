"""Maps of skewed columns: which columns get one, that all calls for tables choose it by the bound, and that new rows follow it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular.columns import Columns, read_table
from numpyro_orthgp.tabular.starts import (
    NOISES,
    RELATIVE,
    SHORTER,
    WARPED,
    Alternative,
    in_order,
    promise,
    shorter,
    starts,
)
from numpyro_orthgp.tabular.warps import LEAST_DISTINCT, WORTH, Warp, warp_of

pd = pytest.importorskip("pandas")


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize(
    "make",
    [
        lambda z: np.exp(2 * z),
        lambda z: 100 + np.exp(2 * z),
        lambda z: -np.exp(2 * z),
        lambda z: np.where(z < 0, 0.0, np.exp(2 * z)),  # half of them zeros
        lambda z: np.sinh(3 * z),  # heavy tails on both sides
    ],
    ids=["lognormal", "shifted", "mirrored", "zeros", "both sides"],
)
def test_skewed_numbers_become_alike_in_any_unit(make, unit, rng):
    x = make(rng.normal(size=500))
    warp = warp_of(unit * x)
    assert warp is not None
    warped, distinct = warp(unit * x), np.unique(x)
    assert scipy.stats.kurtosis(warp(unit * distinct)) < 0.2 * scipy.stats.kurtosis(distinct)
    # The order of rows is that of the numbers.
    np.testing.assert_array_equal(np.argsort(warped, kind="stable"), np.argsort(x, kind="stable"))
    np.testing.assert_allclose(warped, warp_of(x)(x), rtol=1e-9, atol=1e-9)


def test_what_is_about_normal_or_uniform_stays(rng):
    for x in (
        rng.normal(size=500),
        rng.uniform(size=500),
        1e6 + rng.normal(size=500),
        np.arange(500.0),
        rng.beta(2, 5, 500),
    ):
        assert warp_of(x) is None
    assert warp_of(10.0 ** np.arange(LEAST_DISTINCT - 1)) is None  # few numbers tell nothing of their distribution
    assert warp_of(np.repeat(10.0 ** np.arange(LEAST_DISTINCT - 1), 9)) is None
    assert warp_of(10.0 ** np.arange(LEAST_DISTINCT)) is not None
    assert warp_of(np.full(9, np.nan)) is None


def test_the_gain_is_that_of_the_density(rng):
    """The density of x under a normal distribution of the mapped numbers, by its definition."""
    x = np.unique(rng.lognormal(size=400))
    warp = warp_of(x)

    def log_density(values, x, of=lambda x: x):
        z = of(values)
        slope = (of(x * (1 + 1e-6)) - of(x * (1 - 1e-6))) / (2e-6 * x)
        return np.mean(scipy.stats.norm.logpdf(of(x), z.mean(), z.std()) + np.log(slope))

    gained = log_density(x, x, warp) - log_density(x, x)
    assert gained > WORTH
    for other in (Warp(warp.loc, 3 * warp.scale), Warp(warp.loc + 0.3, warp.scale)):
        assert gained > log_density(x, x, other) - log_density(x, x) - 0.05


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.lists(st.floats(-1e12, 1e12), min_size=2, max_size=9))
def test_the_map_keeps_the_order_and_stays_finite(loc, scale, values):
    x = np.sort(np.array(values))
    warped = Warp(loc, scale)(x)
    assert np.isfinite(warped).all() and (np.diff(warped) >= 0).all()


def test_encoding_of_a_warped_table(rng):
    frame = pd.DataFrame({
        "skewed": rng.lognormal(sigma=2, size=200),
        "copy": np.full(200, 1.0),
        "town": rng.choice(["x", "y", "z"], 200),
        "plain": rng.normal(size=200),
        "gaps": np.where(rng.uniform(size=200) < 0.2, np.nan, rng.lognormal(sigma=2, size=200)),
    })  # fmt: skip
    table, order = read_table(frame), rng.permutation(200)
    columns, X = Columns.learn(table, np.zeros((200, 1)))
    other, warped = columns.warped(table, X[order], order)
    assert other.names == columns.names and other.kept == columns.kept
    np.testing.assert_allclose(warped, other.encode(table)[order], rtol=1e-12)
    changed = [name for name, a, b in zip(other.names, warped.T, X[order].T, strict=True) if not np.array_equal(a, b)]
    assert changed == ["skewed", "gaps"]
    np.testing.assert_allclose(warped[:, [0, -2]].std(0), 1)
    assert "skewed, as arcsinh((x - loc) / scale): skewed, gaps" in other.words()
    plain, Z = Columns.learn(read_table(frame[["plain", "town"]]), np.zeros((200, 1)))
    assert plain.warped(read_table(frame[["plain", "town"]]), Z, order) == (plain, None)


@pytest.mark.parametrize("kind", ["regression", "classification", "counts"])
def test_calls_choose_by_the_bound(kind, rng, tmp_path):
    z = rng.normal(size=(160, 2))
    f = np.sin(2 * z[:, 0]) + z[:, 1]
    y = {"regression": f + 0.1 * rng.normal(size=160), "classification": f > 0, "counts": rng.poisson(np.exp(1 + f))}[
        kind
    ]
    X = pd.DataFrame({"a": np.exp(3 * z[:, 0]), "b": z[:, 1]})
    fit = getattr(ogp, kind)(X, y, M=30, num_steps=40)
    # The search for Poisson counts goes on with what the one for negative binomial ones chose.
    chosen = {stage.start: stage.loss for stage in fit.found.stages}
    plain = [chosen.pop(start) for start in list(chosen) if start not in (WARPED, "Poisson, where the other ended")]
    assert max(chosen.values()) < min(plain)
    assert "skewed, as arcsinh((x - loc) / scale): a" in str(fit)
    warp = fit.columns.columns[0].warp
    assert warp is not None and fit.columns.columns[1].warp is None
    np.testing.assert_allclose(np.sort(fit.X[:, 0]), np.sort(fit.columns.encode(read_table(X))[:, 0]))
    # The same predictions after a file, and by an exported program.
    new = pd.DataFrame({"a": [0.0, 1e-3, 1.0, 1e4], "b": [0.0, 1.0, -1.0, 0.5]})
    name = {"regression": "mean", "classification": "probabilities", "counts": "mean"}[kind]
    predicted = getattr(fit.predict(new), name)
    fit.save(tmp_path / "fit.npz")
    np.testing.assert_array_equal(getattr(ogp.load(tmp_path / "fit.npz").predict(new), name), predicted)
    more = [np.ones(4)] if kind == "counts" else []
    with jax.enable_x64(True):
        exported = fit.export().call(fit.as_array(new), *more)
    np.testing.assert_allclose(exported[name], predicted, rtol=1e-9)


@pytest.mark.parametrize("kind", ["regression", "classification", "counts"])
@pytest.mark.parametrize("skewed", [True, False])
def test_where_time_is_short_the_promising_start_comes_first(kind, skewed, rng):
    """Time for one search: it was that of equal lengthscales and of the numbers themselves, and of two others by far too long."""
    z = rng.normal(size=(100, 2))
    f = 2 * np.sin(2 * z[:, 0]) + 0.5 * z[:, 1]
    y = {"regression": f + 0.1 * rng.normal(size=100), "classification": f > 0, "counts": rng.poisson(np.exp(1 + f))}
    fit = getattr(ogp, kind)(np.exp(3 * z) if skewed else z, y[kind], time=1e-3)
    assert fit.found.stages[0].start == (WARPED if skewed else "lengthscales by relevance")
    assert len({stage.start for stage in fit.found.stages} & {WARPED, "lengthscales by relevance"}) == 1


def test_clusters_far_apart_begin_with_short_lengthscales(rng):
    """Three clusters whose distance is a thousand times their width: all starts took what is within them for noise."""
    cluster, z = rng.integers(0, 3, 160), rng.normal(size=(160, 2))
    X = z + np.array([[0, 0], [1e3, 0], [0, 2e3]])[cluster]
    y = np.sin(2 * z[:, 0]) + cluster + 0.1 * rng.normal(size=160)
    fit = ogp.regression(X, y, M=60, num_steps=40)
    assert fit.found.stages[0].start == SHORTER and fit.found.stages[0].loss == min(s.loss for s in fit.found.stages)
    assert np.sqrt(np.mean((fit.predict(X).mean - y) ** 2)) < 0.2
    begin = in_order([z], [y - cluster], [Alternative((y - cluster)[:, None])])
    assert SHORTER not in begin[0][1]


def test_promises_are_evidences_of_a_dense_model(rng):
    """The density of y by NumPy's inverse and determinant, at the best of a grid of variances."""
    X, y = rng.normal(size=(40, 2)), rng.normal(size=(40, 1)) + 5
    start = starts(X, y[:, 0])["equal lengthscales"]
    r = np.sqrt(5 * ((X[:, None] - X) ** 2).sum(-1))
    found = []
    for s in RELATIVE:
        d = r / (s * 2**0.5)
        K = (1 + d + d**2 / 3) * np.exp(-d) + 0.09 / 2 * X @ X.T
        for noise in NOISES:
            C, c = K + noise * np.eye(40), y[:, 0] - y.mean()
            scale = c @ np.linalg.inv(C) @ c / 40
            found.append(scipy.stats.multivariate_normal.logpdf(c, np.zeros(40), scale * C))
    expected = max(found) / 40 + 0.5 + 0.5 * np.log(2 * np.pi)
    assert promise(X, start, Alternative(y)) == pytest.approx(expected, rel=1e-9)
    assert promise(X, start, Alternative(np.hstack([y, y]), 0.3)) == pytest.approx(2 * expected + 0.3, rel=1e-9)
    assert promise(X, shorter(2, RELATIVE[1]), Alternative(y), (1.0,)) == pytest.approx(
        promise(X, start, Alternative(y), RELATIVE[1:]), rel=1e-9
    )
    assert promise(X, start, Alternative(100 * y)) == pytest.approx(expected - np.log(100), rel=1e-9)


@pytest.mark.parametrize("kind", ["regression", "classification", "counts"])
def test_calls_keep_the_numbers_if_these_are_better(kind, rng):
    """The function has one lengthscale in the skewed numbers themselves."""
    x = rng.lognormal(sigma=0.9, size=160)
    f = np.sin(3 * x)
    y = {"regression": f + 0.1 * rng.normal(size=160), "classification": f + 0.1 * rng.normal(size=160) > 0}
    y |= {"counts": rng.poisson(np.exp(1 + f))}
    fit = getattr(ogp, kind)(x, y[kind], M=30, num_steps=40)
    losses = {stage.start: stage.loss for stage in fit.found.stages if not stage.start.startswith("Poisson")}
    assert losses[WARPED] > min(losses.values())
    assert fit.columns.columns[0].warp is None and "arcsinh" not in str(fit)
    np.testing.assert_allclose(np.sort(fit.X[:, 0]), np.sort((x - x.mean()) / x.std()))


def test_a_slip_of_the_pen_leaves_the_column_its_use(rng):
    """One number a million times too large: standardized, all others would be the same."""
    x = rng.normal(size=(150, 2))
    y = np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=150)
    x[7, 0] = 1e6
    fit = ogp.regression(x, y, M=30, num_steps=40)
    errors = np.delete(fit.predict(x).mean - y, 7)
    assert np.sqrt(np.mean(errors**2)) < 0.3 * y.std()
