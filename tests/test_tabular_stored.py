"""Tables with many rows, and tables on disk: a part is searched, all rows are in the function."""

import functools
from importlib import import_module

import jax
import numpy as np
import pandas as pd
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular import stored
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.near import Near
from numpyro_orthgp.tabular.search import Rows, function_of, predictor_of

OPTIONS = {"M": 15, "num_steps": 20}


@pytest.fixture
def small(monkeypatch):
    """Few rows are many."""
    for where in ("stored", "regression"):
        monkeypatch.setattr(import_module(f"numpyro_orthgp.tabular.{where}"), "PART", 120)
    for where in ("stored", "classification", "counts"):
        monkeypatch.setattr(import_module(f"numpyro_orthgp.tabular.{where}"), "MOST", 200)
    monkeypatch.setattr(stored, "BLOCK", 64)


def rows(num=500):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 2))
    return X, 10 + 3 * np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=num)


@functools.cache
def in_memory():
    """The fit of `rows`, for tests in which few rows are many."""
    return ogp.regression(*rows(), **OPTIONS)


def of_all_rows(fit, X, y, near=False):
    """The predicting function given all rows at once."""
    values, encoded = (
        fit.found.values,
        (X - [c.mean for c in fit.columns.columns]) / [c.scale for c in fit.columns.columns],
    )
    loc, scale, is_log = fit.units
    outputs = ((np.log(y) if is_log else y) - loc) / scale
    if not near:
        return function_of(values, Rows(encoded, outputs), fit.found.Z)
    return predictor_of(fit.found.near, Rows(encoded, outputs))


@pytest.mark.parametrize("log", [False, True])
def test_the_function_is_given_all_rows(small, log):
    X, y = rows()
    y = np.exp(y - 10) if log else y
    missing = np.arange(500) % 7 == 0
    fit = ogp.regression(X, np.where(missing, np.nan, y), **OPTIONS)
    assert fit.units.is_log == log
    assert len(fit.X) == len(fit.y) == 120
    assert fit.num_rows == fit.num_given == (~missing).sum()
    assert fit.num_dropped == missing.sum()
    page = str(fit)
    assert "regression: 428 rows (72 without y left out)" in page
    assert "searched in 120 rows, picked at random; the function is given all" in page
    with jax.enable_x64(True):
        f, here = of_all_rows(fit, X[~missing], y[~missing]), fit.X[:30]
        np.testing.assert_allclose(fit.function(here).mean, f(here).mean, atol=1e-7)
        np.testing.assert_allclose(fit.function(here).variance, f(here).variance, atol=1e-7)
        part = function_of(fit.found.values, Rows(fit.X, fit.y), fit.found.Z)
        assert np.abs(fit.function(here).mean - part(here).mean).max() > 1e-4


def test_logarithms_are_for_rows_that_all_have_one(small):
    """Also for rows that the searches do not see."""
    X, y = rows()
    y = np.exp(y - 10)
    part, _ = stored.part_of(stored.table_of(X), np.ones(500, bool), 0, 120)
    y[np.setdiff1d(np.arange(500), part)[0]] = -0.1
    fit = ogp.regression(X, y, **OPTIONS)
    assert not fit.units.is_log and fit.num_given == 500


def test_y_alone_needs_no_pass(small):
    X, _ = rows()
    fit = ogp.regression(X, np.random.default_rng(1).normal(size=500), **OPTIONS)
    assert fit.found.is_mean and fit.num_given == 120
    assert "searched in 120 rows, picked at random\n" in str(fit)


def test_neighbours_are_of_the_part(small, monkeypatch):
    """Predictions with neighbours have q(u) given all rows, at the noise that goes with neighbours."""
    from numpyro_orthgp.tabular import left_out

    real = left_out.calibrate

    def chosen(parts, values, budget, own):
        found = real(parts, values, budget, own)
        less = found.values | {"noise": 0.5 * found.values["noise"]}
        return found._replace(near=Near(less, parts[0].Z, 32, own=False))

    monkeypatch.setattr(left_out, "calibrate", chosen)
    X, y = rows()
    fit = ogp.regression(X, y, **OPTIONS)
    with jax.enable_x64(True):
        f = of_all_rows(fit, X, y, near=True).f
        g = fit.predictor.f
        np.testing.assert_allclose(g(fit.X[:20]).mean, f(fit.X[:20]).mean, atol=1e-7)
        np.testing.assert_allclose(g(fit.X[:20]).variance, f(fit.X[:20]).variance, atol=1e-7)
    assert "the 32 rows nearest to each input among 120 rows, and noise" in str(fit)


def test_hyperparameters_of_neighbours_are_of_the_part(small, monkeypatch):
    """Sums of all rows are of other hyperparameters, so these predictions use the part alone."""
    from numpyro_orthgp.tabular import left_out

    real = left_out.calibrate

    def chosen(parts, values, budget, own):
        found = real(parts, values, budget, own)
        other = found.values | {"noise": 0.5 * found.values["noise"], "lengthscale": 0.5 * found.values["lengthscale"]}
        return found._replace(near=Near(other, parts[0].Z, 16, own=True))

    monkeypatch.setattr(left_out, "calibrate", chosen)
    X, y = rows()
    fit = ogp.regression(X, y, **OPTIONS)
    assert fit.num_given == 500 and len(fit.X) == 120 and fit.predictor.num_neighbors == 16
    with jax.enable_x64(True):
        f = predictor_of(fit.found.near, Rows(fit.X, fit.y))
        np.testing.assert_allclose(fit.predictor(fit.X[:20]).mean, f(fit.X[:20]).mean, atol=1e-9)
        np.testing.assert_allclose(fit.predictor(fit.X[:20]).variance, f(fit.X[:20]).variance, atol=1e-9)


def test_files_keep_all_of_it(small, tmp_path):
    X, fit = rows()[0], in_memory()
    fit.save(tmp_path / "fit.npz")
    again = ogp.load(tmp_path / "fit.npz")
    assert str(again) == str(fit)
    np.testing.assert_array_equal(again.predict(X[:9]).mean, fit.predict(X[:9]).mean)


def test_time_ends_the_pass(small):
    """Rows of the part are in the sums anyway; a pass without time is those alone."""
    X, y = rows()
    table = stored.table_of(X)
    part, _ = stored.part_of(table, np.ones(500, bool), 0, 120)
    fit = in_memory()
    others = (y - fit.units.loc) / fit.units.scale
    others[part] = np.nan
    over = Budget(1e-9, None, 1)
    with jax.enable_x64(True):
        args = fit.found.values, fit.found.Z, (fit.X, fit.y), table, fit.columns, others
        assert stored.all_rows(*args, over).num_rows == 120
        assert stored.all_rows(*args, over.renewed(1e12)).num_rows == 500
    assert over.renewed(1e12).allows(1.0)
    assert Budget(None, 3, 1).renewed(0.5).allows(1e9)


def memmap(folder, X):
    path = folder / "X.npy"
    np.save(path, X)
    return np.load(path, mmap_mode="r")


def hdf5(folder, X):
    h5py = pytest.importorskip("h5py")
    file = h5py.File(folder / "X.h5", "w")
    return file.create_dataset("X", data=X, chunks=(50, X.shape[1]))


def parquet(folder, X):
    pytest.importorskip("pyarrow")
    path = folder / "X.parquet"
    pd.DataFrame(X, columns=["a", "b"]).to_parquet(path, row_group_size=100)
    return ogp.training.columns(str(path), X=["a", "b"])["X"]


@pytest.mark.parametrize("store", [memmap, hdf5, parquet])
def test_arrays_on_disk(small, tmp_path, store):
    """The same part, order and searches as for an array in memory."""
    X, y = rows()
    there = store(tmp_path, X)
    assert isinstance(stored.table_of(there), stored.StoredTable)
    on_disk = ogp.regression(there, y, **OPTIONS)
    np.testing.assert_array_equal(on_disk.X, in_memory().X)
    np.testing.assert_array_equal(on_disk.predict(there).mean, in_memory().predict(X).mean)


def test_outputs_on_disk(small, tmp_path):
    X, y = rows()
    y_there = hdf5(tmp_path, y[:, None])
    fit = ogp.regression(X, y_there, **OPTIONS)
    np.testing.assert_array_equal(fit.predict(X).mean, in_memory().predict(X).mean)


def test_bad_rows_of_an_array_on_disk_are_said(small, tmp_path):
    X, y = rows()
    X[321, 1] = np.inf
    with pytest.raises(ValueError, match="Column 'x1' of `X` has infinite entries"):
        ogp.regression(memmap(tmp_path, X), y, **OPTIONS)
    with pytest.raises(ValueError, match=r"`y` must have shape \(500,\)"):
        ogp.regression(memmap(tmp_path, X), y[:9], **OPTIONS)
    with pytest.raises(TypeError, match="`X` must be numbers"):
        ogp.regression(memmap(tmp_path, X.astype("S8")), y, **OPTIONS)


def test_a_table_with_categories_is_read_in_blocks(small):
    """Levels that only the other rows have are no reason to warn."""
    X, y = rows()
    table = pd.DataFrame(X, columns=["a", "b"]).assign(town=np.where(np.arange(500) % 2, "north", "south"))
    part, _ = stored.part_of(stored.table_of(table), np.ones(500, bool), 0, 120)
    table.loc[np.setdiff1d(np.arange(500), part)[:3], "town"] = "lake"
    fit = ogp.regression(table, y, **OPTIONS)
    assert fit.num_given == 500
    with pytest.warns(UserWarning, match="'lake'"):
        fit.predict(table)


@pytest.mark.parametrize("on_disk", [False, True])
def test_labels_and_counts_have_a_part(small, tmp_path, on_disk):
    X, y = rows(250)
    there = memmap(tmp_path, X) if on_disk else X
    options = {"M": 10, "num_steps": 5}
    labels = ogp.classification(there, np.where(y > 10, "up", "down"), **options)
    counts = ogp.counts(there, np.round(np.maximum(y, 0)), np.ones(250), **options)
    for fit in (labels, counts):
        assert (len(fit.X), len(fit.y), fit.num_rows) == (200, 200, 250)
        assert "250 rows" in str(fit)
        assert "searched in 200 rows, picked at random\n" in str(fit)
    assert labels.predict(there).probabilities.shape == (250, 2)
