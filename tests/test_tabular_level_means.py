"""Categories with more levels than get columns: what each level says of y, from other rows."""

from __future__ import annotations

import re
import warnings

import jax
import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular.columns import MOST_LEVELS, Columns, read_table
from numpyro_orthgp.tabular.level_means import PARTS, level_means
from numpyro_orthgp.tabular.serving import numbers_of, standardized

pd = pytest.importorskip("pandas")

NUM = 40  # levels


def towns(rng, num_rows=400, noise=0.3):
    """Rows of towns whose means of y differ, some without a town, one town with a single row."""
    town = rng.integers(0, NUM, num_rows)
    y = rng.normal(size=NUM)[town] + noise * rng.normal(size=num_rows)
    values = np.array([f"t{i:02d}" for i in town], object)
    values[:10], values[10] = None, "alone"
    return values, y


def by_formula(values, y, seed):
    """Row by row: shrunk means over the rows of the other parts."""
    away, part = y - y.mean(), np.random.default_rng(seed).permutation(len(y)) % PARTS
    levels = [v for v in sorted({v for v in values if v is not None}) if np.sum(values == v) > 1]
    rows = np.isin(values, levels)
    n = np.array([np.sum(values == v) for v in levels])
    means = np.array([away[values == v].mean() for v in levels])
    total, L = rows.sum(), len(levels)
    within = sum(np.sum((away[values == v] - m) ** 2) for v, m in zip(levels, means, strict=True)) / (total - L)
    between = np.sum(n * (means - away[rows].mean()) ** 2) / (L - 1)
    tau2 = (between - within) / ((total - np.sum(n**2) / total) / (L - 1))

    def of(value, those):
        mine = those & (values == value)
        return away[mine].sum() / (mine.sum() + within / tau2) if value in levels else 0.0

    crossed = np.array([of(v, part != p) for v, p in zip(values, part, strict=True)])
    return crossed / crossed.std(), {v: of(v, np.ones(len(y), bool)) / crossed.std() for v in levels}


def test_means_are_those_of_the_formula(rng):
    values, y = towns(rng)
    found, (column,) = level_means(values, y[:, None], seed=3)
    crossed, of_level = by_formula(values, y, 3)
    np.testing.assert_allclose(column, crossed, rtol=1e-12, atol=1e-14)
    assert set(found.levels) == set(of_level) and "alone" not in found.levels
    np.testing.assert_allclose(found.values[0], [of_level[v] for v in found.levels], rtol=1e-12)
    new = found.encode(np.array(["t07", None, "alone", "never seen"], object))
    np.testing.assert_allclose(new, [[of_level["t07"], 0.0, 0.0, 0.0]])


def test_levels_that_differ_by_chance_only_have_no_means(rng):
    values, _ = towns(rng)
    given = [level_means(values, rng.normal(size=(400, 1)), 0) is not None for _ in range(200)]
    assert np.mean(given) < 0.1
    assert level_means(values, np.zeros((400, 1)), 0) is None
    # Of two outputs one may say something.
    _, y = towns(rng)
    found, columns = level_means(values, np.stack([rng.permuted(y), 1.0 * (values == "t01")], -1), 0)
    assert len(found.values) == len(columns) == 1
    # Levels that decide y have means without shrinkage.
    exact = np.array([0.0 if v is None else float(v == "t03") for v in values])
    found, _ = level_means(values, exact[:, None], 0)
    at = found.levels.index("t03")
    assert np.ptp(np.delete(found.values[0], at)) < 1e-12 < found.values[0][at]


def test_only_categories_with_many_levels_have_means(rng):
    values, y = towns(rng)
    few = np.array([f"f{i}" for i in rng.integers(0, MOST_LEVELS, 400)], object)
    table = read_table(pd.DataFrame({"town": values, "few": few, "a": rng.normal(size=400)}))
    columns, X = Columns.learn(table, y[:, None])
    assert [c.means is not None for c in columns.columns] == [True, False, False]
    assert columns.names.count("town: mean of y") == 1 and len(columns.names) == X.shape[1]
    assert f"categories, means of y by level, from other rows (levels): town ({NUM})" in columns.words()
    at = columns.names.index("town: mean of y")
    assert set(columns.sources[[at, 0]]) == {0}
    first = columns.columns[0]
    assert first.known[:MOST_LEVELS] == first.levels and len(first.known) == NUM  # positions in exported arrays
    three = Columns.learn(table, np.stack([y, y**2, -(y**2)], -1))[0].names
    assert [name for name in three if "mean" in name] == [f"town: mean of y {i}" for i in range(2)]
    # New rows take the means of all rows, and an exported program's as well.
    new = columns.encode(table)
    np.testing.assert_array_equal(np.delete(new, at, 1), np.delete(X, at, 1))
    assert 0 < np.abs(new[:, at] - X[:, at]).max() < 1.5
    with jax.enable_x64(True):
        np.testing.assert_allclose(standardized(columns, numbers_of(columns, table)), new, rtol=1e-12)


@pytest.mark.parametrize("kind", ["regression", "classification", "counts"])
def test_levels_beyond_those_with_columns_are_told_apart(kind, rng, tmp_path):
    """Rare levels counted as one before: their effects were noise."""
    town = rng.integers(0, 60, 900)
    effect = 1.5 * rng.normal(size=60)[town]
    frame = pd.DataFrame({"town": [f"t{i}" for i in town], "a": rng.normal(size=900)})
    y = {
        "regression": effect + np.sin(2 * frame.a) + 0.1 * rng.normal(size=900),
        "classification": np.where(effect + 0.3 * rng.normal(size=900) > 0, "up", "down"),
        "counts": rng.poisson(np.exp(1 + effect)),
    }[kind]
    y = pd.Series(y)
    fit = getattr(ogp, kind)(frame[:600], y[:600], M=60, num_steps=60)
    assert "means of y by level, from other rows (levels): town (60)" in str(fit)
    new = fit.predict(frame[600:])
    if kind == "regression":
        assert np.std(new.mean - y[600:]) < 0.4 * y[600:].std()
    elif kind == "classification":
        assert np.mean(new.label == y[600:].to_numpy()) > 0.85
    else:
        assert np.corrcoef(np.log(new.mean), effect[600:])[0, 1] > 0.9
    fit.save(tmp_path / "fit.npz")
    again = ogp.load(tmp_path / "fit.npz")
    assert again.columns == fit.columns
    with jax.enable_x64(True):
        given = fit.export().call(fit.as_array(frame[600:]), *[np.ones(300)] * fit.num_more)
    of_new = new.probabilities if kind == "classification" else new.mean
    np.testing.assert_allclose(given["probabilities" if kind == "classification" else "mean"], of_new, rtol=1e-8)
    with pytest.warns(UserWarning, match="which training did not have"):
        fit.predict(pd.DataFrame({"town": ["elsewhere"], "a": [0.0]}))


def test_whole_numbers_that_are_names_are_said(rng):
    """As numbers of 60 shops they left errors of 1.2; as text, of 0.35. The advice leads to no other warning."""
    shop = rng.integers(0, 60, 400)
    table = pd.DataFrame({"x": rng.normal(size=400), "shop": 7 + 3 * shop})
    y = table.x + (37 * shop % 60) / 15 + 0.2 * rng.normal(size=400)
    num = table.shop.nunique()
    with pytest.warns(UserWarning, match=f"Column 'shop' of `X` has {num} different whole numbers") as caught:
        Columns.learn(read_table(table), np.asarray(y)[:, None])
    assert len(caught) == 1
    advice = re.search(r"make them text: (.*)\.$", str(caught[0].message)).group(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        columns, _ = Columns.learn(read_table(table.assign(shop=eval(advice))), np.asarray(y)[:, None])
    assert columns.columns[1].means is not None


@pytest.mark.parametrize("kind", ["order", "week", "chance", "formula", "amounts", "few", "fractions"])
def test_numbers_that_are_no_names(kind, rng, recwarn):
    x = rng.integers(0, 20 if kind == "few" else 60, 600).astype(float)
    of_x = rng.normal(size=60)[x.astype(int)]
    y = {"order": np.sin(x / 5), "week": 2 * np.sin(2 * np.pi * x / 7), "chance": np.zeros(600)}.get(kind, of_x)
    y = y + (kind != "formula") * 0.2 * rng.normal(size=600)
    if kind == "amounts":  # zero in most rows, such as gains
        x[:400] = 0.0
    Columns.learn(read_table(x / 2 if kind == "fractions" else x), y[:, None])
    assert not recwarn.list
