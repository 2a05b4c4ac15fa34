"""From tables to standardized columns: rules, new rows, and what is refused."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular.columns import MOST_LEVELS, Columns, read_table
from numpyro_orthgp.tabular.importance import importance_of
from numpyro_orthgp.tabular.labels import Labels
from numpyro_orthgp.tabular.predicted_counts import CountPredictions
from numpyro_orthgp.tabular.predictions import Predictions
from numpyro_orthgp.tabular.rows import observed_counts, observed_numbers, order_of, positive_column
from numpyro_orthgp.tabular.starts import relevance, shorter, starts
from numpyro_orthgp.tabular.units import Units, rounding_of

pd = pytest.importorskip("pandas")


def learned(X):
    table = read_table(X)
    return Columns.learn(table, np.zeros((table.num_rows, 1)))


def test_numbers_are_standardized_and_what_says_nothing_is_left_out(rng):
    a, b = rng.normal(3, 2, 50), rng.normal(size=50)
    columns, X = learned(np.stack([a, np.full(50, 0.1), b, 2 * a + 1, -b], 1))
    assert columns.names == ["x0", "x2"] and columns.sources.tolist() == [0, 2]
    np.testing.assert_allclose(X, np.stack([(a - a.mean()) / a.std(), (b - b.mean()) / b.std()], 1), rtol=1e-12)
    assert columns.words() == ["constant or copies, left out: x1, x3, x4"]


def test_missing_numbers_are_medians_and_said(rng):
    a = rng.normal(size=40)
    a[:5] = np.nan
    columns, X = learned(pd.DataFrame({"a": a, "b": rng.normal(size=40)}))
    assert columns.names == ["a", "a is missing", "b"]
    filled = np.where(np.isnan(a), np.nanmedian(a), a)
    np.testing.assert_allclose(X[:, 0], (filled - filled.mean()) / filled.std())
    np.testing.assert_array_equal(X[:, 1], np.where(np.isnan(a), 1.0, -1.0))
    # Nothing was missing of b in training: its median stands in, and no column tells.
    with pytest.warns(UserWarning, match="'b' of `X` has no entry in 1 rows"):
        new = columns.encode(read_table(pd.DataFrame({"b": [np.nan], "a": [0.0]})))
    assert new.shape == (1, 3) and new[0, 1] == -1
    assert "missing entries are medians, with a column that tells which: a" in columns.words()


def test_categories_in_every_dress():
    values = ["x", "y", "z", "x", None, "x"]
    frames = [
        pd.DataFrame({"c": values}),
        pd.DataFrame({"c": pd.Categorical(values)}),
        pd.DataFrame({"c": pd.array(values, dtype="string")}),
    ]
    for frame in frames:
        columns, X = learned(frame)
        assert columns.names == ["c=x", "c=y", "c=z"] and set(np.unique(X)) == {-1, 1}
        np.testing.assert_array_equal(X[4], [-1, -1, -1])
        with pytest.warns(UserWarning, match=r"Column 'c' of `X` holds 'never seen'"):
            np.testing.assert_array_equal(
                columns.encode(read_table(pd.DataFrame({"c": ["never seen"]}))), [[-1, -1, -1]]
            )
    columns, X = learned(pd.DataFrame({"two": ["a", "b", "a"], "truth": [True, False, False]}))
    assert columns.names == ["two=a", "truth"] and X.shape == (3, 2)
    codes = pd.DataFrame({"c": pd.Categorical([3, 1, 2, 3])})  # numbers that are codes
    assert learned(codes)[0].names == ["c=3", "c=1", "c=2"]


def test_many_levels_share():
    _, X = learned(pd.DataFrame({"c": [f"l{i % 30}" for i in range(100)]}))
    assert X.shape[1] == MOST_LEVELS and (X == 1).any(1).sum() < 100


def test_numbers_of_pandas_that_may_be_missing():
    frame = pd.DataFrame({"a": pd.array([1, None, 3], dtype="Int64"), "b": [None, 2.0, 3.0], "c": [True, False, True]})
    table = read_table(frame)
    np.testing.assert_array_equal(table.values[0], [1, np.nan, 3])
    assert [v.dtype for v in table.values] == [np.dtype(float)] * 3
    assert read_table(pd.DataFrame({"a": np.array([1, None, 2.5], object)})).values[0].dtype == float


@pytest.mark.parametrize(
    "dtype", ["double[pyarrow]", "float[pyarrow]", "int64[pyarrow]", "bool[pyarrow]", "Sparse[float]"]
)
def test_numbers_whatever_holds_them(dtype):
    """Few different numbers are numbers all the same, and no categories."""
    if "pyarrow" in dtype:
        pytest.importorskip("pyarrow")
    numbers = np.array([0.0, 1.0] * 6)
    frame = pd.DataFrame({"a": pd.Series(numbers).astype(dtype), "b": np.arange(12.0)})
    (a, b), (_, X) = read_table(frame).values, learned(frame)
    assert a.dtype == float
    np.testing.assert_array_equal(a, numbers)
    np.testing.assert_allclose(X, learned(pd.DataFrame({"a": numbers, "b": b}))[1])


def test_complex_numbers():
    with pytest.raises(TypeError, match=r"Column 'a' of `X` holds complex numbers.*real and imaginary parts"):
        read_table(pd.DataFrame({"a": [1j, 2.0, 3.0]}))


def test_levels_that_training_did_not_have():
    """They are said; with two levels they lie between the two, and are not the rarer one."""
    two, _ = learned(pd.DataFrame({"c": ["u"] * 6 + ["v"] * 4, "a": np.arange(10.0)}))
    with (
        pytest.warns(UserWarning, match=r"Column 'c' of `X` holds 'z' in 2 rows.*lie between the two levels"),
        pytest.warns(UserWarning, match="'c' of `X` has no entry in 1 rows, and in training none was missing"),
    ):
        codes = two.encode(read_table(pd.DataFrame({"c": ["u", "v", "z", "z", None], "a": np.ones(5)})))
    np.testing.assert_array_equal(codes[:, 0], [1, -1, 0, 0, 0])
    three, _ = learned(pd.DataFrame({"c": ["u", "v", "w"] * 4, "a": np.arange(12.0)}))
    with pytest.warns(UserWarning, match=r"holds 'y', 'z' in 2 rows.*none of the levels"):
        codes = three.encode(read_table(pd.DataFrame({"c": ["u", "y", "z"], "a": np.ones(3)})))
    np.testing.assert_array_equal(codes[1:, :3], -np.ones((2, 3)))


def test_tables_of_arrow():
    pyarrow = pytest.importorskip("pyarrow")
    text = ["u", None, "v"]
    table = read_table(pyarrow.table({"a": [1, None, 3], "b": text, "c": pyarrow.array(text).dictionary_encode()}))
    assert table.names == ("a", "b", "c") and [v.tolist() for v in table.values[1:]] == [text, text]
    np.testing.assert_array_equal(table.values[0], [1, np.nan, 3])


def test_tables_of_polars():
    polars = pytest.importorskip("polars")
    text = ["u", None, "v", "u"]
    frame = polars.DataFrame(
        {
            "number": [1, None, 3, 5],
            "truth": [True, False, None, True],
            "text": text,
            "category": polars.Series(text, dtype=polars.Categorical),
            "enum": polars.Series(text, dtype=polars.Enum(["v", "u"])),
        }
    )
    table = read_table(frame)
    assert list(table.names) == frame.columns and table.index is None
    np.testing.assert_array_equal(table.values[0], [1, np.nan, 3, 5])
    np.testing.assert_array_equal(table.values[1], [1, 0, np.nan, 1])
    for values in table.values[2:]:
        assert values.tolist() == text
    predicted = Predictions(np.zeros(4), np.ones(4), np.ones(4), table.index, table.like).frame()
    assert isinstance(predicted, polars.DataFrame) and predicted.columns == ["mean", "sd", "lower", "upper"]


def test_tables_that_are_not_pandas():
    """What polars has: columns, shape, and columns with dtype and to_numpy."""

    class Series:
        def __init__(self, values, dtype):
            self.values, self.dtype = values, dtype

        def to_numpy(self):
            return np.asarray(self.values)

    class Frame(dict):
        columns = property(lambda self: list(self))
        shape = (3, 2)

    frame = Frame(a=Series([1, 2, 3], "Int64"), b=Series(np.array(["u", "v", "u"], object), "String"))
    columns, X = learned(frame)
    assert columns.names == ["a", "b=u"] and X.shape == (3, 2)
    assert read_table(frame).index is None


@pytest.mark.parametrize(
    "X, error, match",
    [
        (np.array([["a"]]), TypeError, "must be numbers, or a pandas or polars table"),
        (np.zeros((2, 2, 2)), ValueError, r"shape \(N, D\)"),
        (np.zeros((2, 0)), ValueError, "at least one column"),
        (np.array([[np.inf]]), ValueError, "'x0' of `X` has infinite"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), ValueError, "more than one column of the name 'a'"),
        (pd.DataFrame({"d": [{1: 2}]}), TypeError, "holds dict"),
    ],
)
def test_tables_that_are_refused(X, error, match):
    with pytest.raises(error, match=match):
        read_table(X)


def test_other_columns_are_refused(rng):
    with pytest.raises(ValueError, match="All columns of `X` are constant"):
        learned(np.ones((5, 2)))
    columns, _ = learned(pd.DataFrame({"a": rng.normal(size=5), "b": rng.normal(size=5)}))
    with pytest.raises(ValueError, match="lacks b, of the columns of training; it has a, c"):
        columns.encode(read_table(pd.DataFrame({"a": [1.0], "c": [2.0]})))
    with pytest.raises(ValueError, match="must have the 2 columns of training, a, b; got x0"):
        columns.encode(read_table([[1.0]]))
    with pytest.raises(TypeError, match="'a' was numbers in training"):
        columns.encode(read_table(pd.DataFrame({"a": ["u"], "b": [2.0]})))
    np.testing.assert_array_equal(
        columns.encode(read_table([[1.0, 2.0]])), columns.encode(read_table(pd.DataFrame({"b": [2.0], "a": [1.0]})))
    )


def test_outputs():
    values, seen = observed_numbers(pd.Series([1.0, None, *range(10)]), 12)
    assert len(values) == 11 and not seen[1]
    for y, match in [
        (np.zeros(12), "All outputs are 0: there"),
        (3 + 1e-15 * (np.arange(12) % 4), "All outputs are 3 up to rounding errors: there is nothing to learn"),
        (np.r_[np.inf, np.arange(11)], "infinite"),
        (np.r_[[np.nan] * 3, np.arange(9)], "At least 10 outputs are needed; got 9"),
        (np.zeros((12, 2)), r"shape \(12,\), one entry for each row"),
    ]:
        with pytest.raises(ValueError, match=match):
            observed_numbers(y, 12)
    with pytest.raises(TypeError, match=r"must be numbers; .* ogp.classification"):
        observed_numbers(["a"] * 12, 12)


def test_order():
    order, num_held = order_of(500, 0)
    assert sorted(order) == list(range(500)) and num_held == 50
    assert order_of(39, 0)[1] == 0 and order_of(39, 0, 0.2)[1] == 7 and order_of(10, 0, 0.2)[1] == 2
    assert order_of(40, 0)[1] == 10 and order_of(10**5, 0)[1] == 1000


def test_relevance_finds_means_and_variances(rng):
    X = rng.normal(size=(2000, 5))
    y = np.sin(X[:, 1]) + 0.1 * rng.normal(size=2000) + X[:, 3] * rng.normal(size=2000)
    found = relevance(X, y)
    assert set(np.argsort(found)[-2:]) == {1, 3} and found[[0, 2, 4]].max() < 0.01
    scales = starts(X, y)["lengthscales by relevance"]["lengthscale"]
    assert scales[[1, 3]].max() < scales[[0, 2, 4]].min()
    for columns, outputs in ((X[:, :2], np.zeros(2000)), (X[:, 1:2], y)):  # the second start would be the first again
        begin = starts(columns, outputs)
        assert list(begin) == ["equal lengthscales"]
        np.testing.assert_allclose(shorter(columns.shape[1])["lengthscale"], 0.1 * columns.shape[1] ** 0.5)


def test_importance_of_a_known_function(rng):
    """Sobol indices of x0 + 2 x1 x2 for independent columns: 1/5 and 4/5, 4/5 in total."""
    X = rng.normal(size=(1000, 4))
    columns, Z = learned(X)
    found = importance_of(lambda Z: Z[:, 0] + 2 * Z[:, 1] * Z[:, 2], Z, columns)
    np.testing.assert_allclose([found["x0"], found["x1"], found["x2"], found["x3"]], [0.2, 0.8, 0.8, 0.0], atol=0.15)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert set(importance_of(lambda Z: np.zeros(len(Z)), Z, columns).values()) == {0.0}


def test_predictions():
    p = Predictions(
        np.array([1.0, 2.0]), np.array([1.0, 0.5]), np.array([0.1, 0.1]), index=["u", "v"], like=pd.DataFrame
    )
    lower, upper = p.interval(0.95)
    np.testing.assert_allclose(upper - lower, 2 * 1.959964 * p.sd, rtol=1e-6)
    np.testing.assert_allclose(p.quantile(0.5), p.mean)
    assert p.quantile([0.1, 0.9, 0.95]).shape == (2, 3)
    np.testing.assert_allclose(p.log_density([1.0, 2.0]), -0.5 * np.log(2 * np.pi * p.sd**2))
    frame = p.frame()
    assert list(frame.index) == ["u", "v"] and list(frame.columns) == ["mean", "sd", "lower", "upper"]
    assert isinstance(Predictions(p.mean, p.sd, p.sd).frame(), dict)
    with pytest.raises(ValueError, match="between 0 and 1"):
        p.quantile(1.0)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        p.log_density([1.0])


def test_categories_may_come_as_numbers_where_they_are_codes():
    codes, _ = learned(pd.DataFrame({"c": pd.Categorical([3, 1, 2, 3])}))
    np.testing.assert_array_equal(
        codes.encode(read_table(pd.DataFrame({"c": [3, 1]}))), codes.encode(read_table(pd.DataFrame({"c": ["3", "1"]})))
    )
    assert (codes.encode(read_table(pd.DataFrame({"c": [3.0]}))) == 1).sum() == 1
    text, _ = learned(pd.DataFrame({"c": ["u", "v", "w"]}))
    with pytest.raises(TypeError, match="'c' was text or categories in training, and holds numbers now, 2 for one"):
        text.encode(read_table(pd.DataFrame({"c": [2.0, 3.0]})))
    with pytest.warns(UserWarning, match="'c' of `X` has no entry in 1 rows"):  # of no type
        assert (text.encode(read_table(pd.DataFrame({"c": [np.nan]}))) == -1).all()


def test_spaces_around_categories_mean_nothing():
    columns, X = learned(pd.DataFrame({"c": ["u", " u", "v ", "v", "w"]}))
    assert columns.names == ["c=u", "c=v", "c=w"]
    np.testing.assert_array_equal(X[0], X[1])
    np.testing.assert_array_equal(columns.encode(read_table(pd.DataFrame({"c": ["u\t"]}))), X[:1])


def test_text_that_is_numbers_is_said(rng):
    numbers = [f"{v:.3f}" for v in rng.normal(size=40)]
    with pytest.warns(UserWarning, match=r"'a' is text, 40 of whose 41 .* The others are '\?'\. If it is a number"):
        learned(pd.DataFrame({"a": [*numbers, "?"], "b": np.arange(41.0)}))
    learned(pd.DataFrame({"a": [str(i % 10) for i in range(50)]}))  # codes, each often


def test_what_is_masked_is_missing():
    masked = np.ma.masked_array([[1.0], [2.0], [99.0]], [[False], [False], [True]])
    np.testing.assert_array_equal(read_table(masked).values[0], [1.0, 2.0, np.nan])
    y = np.ma.masked_array(np.arange(12), np.arange(12) == 3)
    values, seen = observed_numbers(y, 12)
    assert not seen[3] and 3 not in values and len(values) == 11
    counts, seen = observed_counts(y, 12)
    assert not seen[3] and 3 not in counts
    with pytest.raises(ValueError, match="positive for each row; got nan"):
        positive_column("exposure", np.ma.masked_array(np.ones(12), np.arange(12) == 3), 12)
    for labels in (np.arange(12) % 2, np.where(np.arange(12) % 2, "u", "v")):
        _, codes, seen = Labels.read(np.ma.masked_array(labels, np.arange(12) == 3), 12)
        assert not seen[3] and len(codes) == 11


@pytest.mark.parametrize("read", [observed_numbers, observed_counts, lambda y, n: positive_column("y", y, n)])
@pytest.mark.parametrize(
    "y", [pd.date_range("2020", periods=12), pd.to_timedelta(np.arange(12), unit="h"), np.arange(12) + 1j]
)
def test_outputs_that_numpy_would_convert_are_refused(read, y):
    with pytest.raises(TypeError, match=r"`y` must be real numbers; got (datetime64|timedelta64|complex128)"):
        read(y, 12)


def test_outputs_in_another_order_than_their_rows_are_refused():
    y = pd.Series(np.arange(12.0), index=list("abcdefghijkl"))
    observed_numbers(y, 12, y.index)
    observed_numbers(y[::-1], 12, None)
    observed_numbers(y[::-1].reset_index(drop=True), 12, y.index)  # labels of their own: by position
    observed_numbers(y[::-1].to_numpy(), 12, y.index)
    for read in (
        observed_numbers,
        observed_counts,
        lambda y, n, index: positive_column("y", y, n, index),
        lambda y, n, index: Labels.read(y % 2, n, index),
    ):
        with pytest.raises(
            ValueError,
            match="in another order by their labels: row 0 of X has the label 'a', that of row 11 of y",
        ):
            read(y[::-1], 12, y.index)


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_a_series_is_a_table_of_one_column(kind, rng):
    """Its labels were lost, so that an y in another order than X was fitted without a word; and its text was refused."""
    series = pytest.importorskip(kind).Series
    x = rng.normal(size=12)
    columns, X = learned(series(name="a", **{"data" if kind == "pandas" else "values": x}))
    assert columns.names == ["a"] and np.array_equal(X, learned(x)[1])
    table = read_table(series(["u", "v", "u"]))  # without a name: by its place, as an array
    assert table.names == ("x0",) and table.like is None and list(table.values[0]) == ["u", "v", "u"]
    assert np.array_equal(columns.encode(read_table(series(x))), X)
    if kind == "pandas":
        with pytest.raises(ValueError, match="in another order by their labels"):
            ogp.regression(series(x), series(x)[::-1])


def test_one_row_of_a_table_is_said(rng):
    table = pd.DataFrame({"a": rng.normal(size=12), "b": rng.normal(size=12)})
    with pytest.raises(
        ValueError, match=r"2 columns of training, a, b; got 3\. One row of a table is table\.iloc\[\[i\]\]"
    ):
        learned(table)[0].encode(read_table(table.iloc[3]))


@pytest.mark.parametrize("number", [1e160, -1e300])
def test_new_numbers_beyond_float64_are_refused(number, rng):
    """Predictions were NaN without a word."""
    columns, _ = learned(pd.DataFrame({"a": rng.normal(size=12) / 1e20, "b": rng.normal(size=12)}))
    assert np.isfinite(columns.encode(read_table(pd.DataFrame({"b": [0.0], "a": [1e100]})))).all()
    with pytest.raises(
        ValueError, match=r"Column 'a' of `X` has a number in row 1 that is more than 1e\+150 standard dev"
    ):
        columns.encode(read_table(pd.DataFrame({"a": [0.0, number], "b": [0.0, 0.0]})))


def test_arrays_of_durations_are_columns_of_days():
    hours = np.arange(12, dtype="timedelta64[h]")
    np.testing.assert_array_equal(read_table(hours).values[0], np.arange(12) / 24)


def test_one_class_is_named():
    with pytest.raises(ValueError, match="All labels are 'x', one class: there is nothing to learn"):
        Labels.read(np.full(12, "x"), 12)


def test_labels_that_differ_in_spaces_only():
    with pytest.warns(UserWarning, match=r"Labels 'up' and 'up ' differ only in spaces"):
        Labels.read(np.array(["up", "up ", "down"] * 8), 24)


def test_probabilities_of_counts_are_asked_for_each_row():
    p = CountPredictions(np.zeros(3), np.full(3, 0.1), np.inf, lambda *_: np.zeros(3))
    assert p.cdf([1, 2, 3]).shape == (3,)
    for y in (3, [1], [1, 2]):
        with pytest.raises(ValueError, match=r"`y` must .*3"):
            p.cdf(y)


@pytest.mark.parametrize("unit", [1e200, 1e-200])
def test_outputs_whose_variance_is_no_number(unit):
    with pytest.raises(ValueError, match=r"its variance is no number of float64\. Take another unit"):
        observed_numbers(np.arange(20.0) * unit, 20)
    assert observed_numbers(np.arange(20.0) * unit**0.5, 20)[0].shape == (20,)


@pytest.mark.parametrize("step", [1e-3, 0.1, 0.5, 2.0, 1.0, 50.0, 1e4])
def test_steps_of_rounded_outputs(step, rng):
    y = step * np.round(rng.normal(3, 40, 200))
    np.testing.assert_allclose(rounding_of(y), step / 12**0.5, rtol=1e-12)
    assert rounding_of(y + 1e-9 * step * rng.normal(size=200)) == pytest.approx(step / 12**0.5)  # of the last digits
    assert rounding_of(rng.normal(3, 40 * step, 200)) == 0
    plain = Units.of(y)
    assert plain.standardized(y).rounding == pytest.approx(step / 12**0.5 / y.std())
    whole = np.round(np.exp(rng.normal(5, 1, 50)))
    logs = Units.of(whole, True)
    assert logs.standardized(whole).rounding == pytest.approx(1 / 12**0.5 / np.median(whole) / np.log(whole).std())


@pytest.mark.parametrize("mean", [1e9, 1e12, -1e13])
def test_outputs_beside_a_large_mean_are_not_taken_for_rounded(mean, rng):
    """Any number was near a multiple of any step there, so the noise was as large as the mean."""
    y = rng.normal(size=200)
    assert rounding_of(mean + y) < np.spacing(abs(mean))  # that of float64 itself, at most
    np.testing.assert_allclose(rounding_of(mean + np.round(y)), 1 / 12**0.5, rtol=1e-12)


@pytest.mark.parametrize("unit", [1e-300, 1e-200, 1e200, 1e300])
def test_columns_in_units_whose_squares_are_no_numbers(unit, rng):
    """They had no spread, or an infinite one, and were left out or not standardized."""
    X = rng.normal(size=(40, 2))
    np.testing.assert_allclose(learned(X * [unit, 1])[1], learned(X)[1], rtol=1e-9)


def test_numbers_that_float64_does_not_tell_apart_are_said():
    ids = 2**60 + np.arange(30)
    table = pd.DataFrame({"id": ids, "a": np.arange(30.0)})
    with pytest.warns(
        UserWarning, match=r"Column 'id' of `X` holds .* only in steps of 256: much of their differences is lost"
    ):
        columns, _ = learned(table)
    with (
        pytest.warns(UserWarning, match=r"`y` holds numbers as large as 1\.15292e\+18"),
        pytest.raises(ValueError, match="All outputs"),
    ):
        observed_numbers(ids, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        columns.encode(read_table(table[:1]))  # nothing to tell apart
        learned(pd.DataFrame({"time": 2**60 + 10**15 * np.arange(30)}))  # in nanoseconds, over eleven months


def test_outputs_some_of_whose_labels_are_elsewhere_are_said():
    """Such as those of a table whose first rows were dropped, beside outputs whose last rows were."""
    y = pd.Series(np.arange(14.0))
    words = r"Labels of the rows of `X` and `y` do not agree: row 0 of X has the label 2, that of row 2 of y, and rows are taken as"
    with pytest.warns(UserWarning, match=words):
        observed_numbers(y[:-2], 12, y.index[2:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observed_numbers(y[:12], 12, y.index[:12])
        observed_numbers(y[:12].set_axis(range(100, 112)), 12, y.index[2:])
        observed_numbers(y[:12].set_axis([0, 0, *range(10)]), 12, y.index[2:])


def test_dates_that_are_masked_or_too_far():
    dates = np.ma.masked_array(np.array([["2020-01-01"], ["2021-01-01"]], "M8[D]"), mask=[[True], [False]])
    np.testing.assert_array_equal(np.isnat(read_table(dates).values[0]), [True, False])
    with pytest.raises(ValueError, match="A date is in the year 300000; years up to 290,000 are possible"):
        read_table(np.array([["300000"], ["2020"]], "M8[Y]"))


def test_arrays_that_are_sparse_lazy_or_of_half_precision():
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(TypeError, match=r"got csr_array, which is sparse\. Pass X\.toarray\(\)"):
        read_table(sparse.csr_array(np.eye(3)))
    with pytest.raises(TypeError, match=r"`y` must be an array; got csr_array, which is sparse\. Pass y\.toarray\(\)"):
        observed_numbers(sparse.csr_array(np.eye(3)), 3)
    np.testing.assert_array_equal(read_table(jnp.array([[1.5], [2.5]], jnp.bfloat16)).values[0], [1.5, 2.5])
    with pytest.raises(ValueError, match="Column 'a' of `X` has infinite entries"):
        read_table(pd.DataFrame({"a": pd.Series([10**400, 1], dtype=object)}))


def test_tables_of_polars_that_are_not_collected():
    pl = pytest.importorskip("polars")
    with pytest.raises(TypeError, match=r"got LazyFrame, which is lazy\. Pass X\.collect\(\)"):
        read_table(pl.LazyFrame({"a": [1.0, 2.0]}))


def test_outputs_of_arrow_may_be_missing():
    pa = pytest.importorskip("pyarrow")
    for y in (pa.array([None, *range(1, 12)]), pa.chunked_array([[None, *range(1, 12)]])):
        values, seen = observed_numbers(y, 12)
        np.testing.assert_array_equal(values, np.arange(1.0, 12))
        assert seen.sum() == 11
