"""Columns of text, categories and truth values as real tables have them: names of rows, and types that change."""

from __future__ import annotations

import re
import warnings
from datetime import date, time
from decimal import Decimal
from fractions import Fraction

import jax
import numpy as np
import pytest

from numpyro_orthgp.tabular.columns import MOST_LEVELS, Columns, read_table
from numpyro_orthgp.tabular.labels import Labels
from numpyro_orthgp.tabular.rows import observed_counts, observed_numbers
from numpyro_orthgp.tabular.serving import numbers_of, standardized

pd = pytest.importorskip("pandas")


def learned(X):
    table = read_table(X)
    return Columns.learn(table, np.zeros((table.num_rows, 1)))


@pytest.mark.parametrize("form", ["%m/%d/%Y %H:%M:%S", "%d.%m.%y", "%d-%b-%Y", "%B %d, %Y", "%b-%Y"])
def test_text_that_is_dates_is_said(form):
    """They become a category without a word otherwise, of which the twenty most frequent days are told apart."""
    days = pd.date_range("2020-01-01", periods=40, freq="31D").strftime(form)
    frame = pd.DataFrame({"when": [*days, *days], "b": np.arange(80.0)})
    with pytest.warns(UserWarning, match=r"'when' is text, \d+ of whose \d+ different entries are dates.*to_datetime"):
        learned(frame)


def test_decimal_commas_are_said(rng):
    text = [f"{v:.2f}".replace(".", ",") for v in rng.normal(size=60)]
    with pytest.warns(
        UserWarning, match=r"entries are numbers with a decimal comma.*str\.replace\(',', '\.'\)\.astype\(float\)"
    ):
        learned(pd.DataFrame({"price": [*text, *text], "b": np.arange(120.0)}))


def test_names_of_rows_are_no_categories(rng, recwarn):
    """A column for a level of one row fits the noise of this row, and says nothing about new ones."""
    frame = pd.DataFrame(
        {"name": [f"n{i}" for i in range(60)], "town": [f"t{min(i, 40)}" for i in range(60)], "a": rng.normal(size=60)}
    )
    columns, _ = learned(frame)
    assert columns.names == ["town=t40", "a"]
    assert "text whose entries hardly recur, left out: name" in columns.words()
    assert columns.encode(read_table(frame.assign(name="new").iloc[:3])).shape == (3, 2)
    assert not recwarn.list
    with pytest.raises(ValueError, match="constant, or text whose entries hardly recur"):
        learned(frame[["name"]])
    often = [f"l{i % 25}" for i in range(5000)]
    assert len(learned(pd.DataFrame({"c": ["u", "u", *often]}))[0].names) == MOST_LEVELS
    assert learned(pd.DataFrame({"c": [f"l{i // 3}" if i < 300 else "u" for i in range(5000)]}))[0].names == ["c=u"]


@pytest.mark.parametrize("train", [pd.Categorical([True, False, None] * 4), np.array([True, False, None] * 4, object)])
def test_truth_values_whatever_holds_them(train):
    columns, X = learned(pd.DataFrame({"c": train, "a": np.arange(12.0)}))
    assert columns.names == ["c", "c is missing", "a"]
    for new in ([True, False], pd.Categorical([True, False]), pd.array([True, False], dtype="boolean")):
        np.testing.assert_array_equal(columns.encode(read_table(pd.DataFrame({"c": new, "a": [0.0, 1.0]}))), X[:2])


def test_new_rows_of_which_all_are_missing(rng):
    """Whatever type holds them."""
    columns, _ = learned(pd.DataFrame({"a": [1.0, 2.0, 3.0, None], "b": [*"uvwu"], "c": [None] * 4}))
    expected = [[0.0, 1.0, -1.0, -1.0, -1.0]]  # "a", "a is missing", and the levels of "b"
    for dtype in ("float", "object", "category", "string"):
        new = pd.DataFrame({name: pd.Series([None], dtype=dtype) for name in "abc"})
        with pytest.warns(UserWarning, match="'b' of `X` has no entry in 1 rows"):
            np.testing.assert_array_equal(columns.encode(read_table(new)), expected)
    new = pd.DataFrame({"a": [None], "b": [None], "c": ["now it is known"]})  # it was left out
    with pytest.warns(UserWarning, match="'b' of `X` has no entry in 1 rows"):
        np.testing.assert_array_equal(columns.encode(read_table(new)), expected)


def test_entries_that_are_missing_in_new_rows_only_are_said(rng):
    """The median took their place without a word: intervals of 90 % held 4 % of the outputs that depended on the column."""
    days = np.datetime64("2024-01-01") + np.arange(40)
    known = pd.DataFrame({"a": rng.normal(size=40), "b": [*"uv"] * 20, "day": days, "same": 1.0})
    columns, X = learned(known)
    new = read_table(known.assign(a=np.nan, b=None, day=np.datetime64("NaT"), same=np.nan))
    with pytest.warns(UserWarning, match="has no entry in 40 rows, and in training none was missing") as said:
        encoded = columns.encode(new)
    names = [str(w.message).split("'")[1] for w in said]
    assert names == ["a", "b", "day"] and np.isfinite(encoded).all()  # the one that is always the same is left out
    with pytest.warns(UserWarning, match="so predictions for these rows are too sure"):
        numbers_of(columns, new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(columns.encode(read_table(known)), X)


@pytest.mark.parametrize("num_levels", [3, 30])
def test_text_that_is_missing_in_new_rows_only_is_said(rng, num_levels):
    levels = [f"level {i % num_levels}" for i in range(90)]
    frame = pd.DataFrame({"a": rng.normal(size=90), "c": levels})
    some = frame.assign(c=[None, *levels[1:]])
    new = read_table(frame.assign(c=[None] * 4 + levels[4:]))
    with pytest.warns(
        UserWarning, match=r"'c' of `X` has no entry in 4 rows, .* count as none of the levels .* too sure"
    ):
        learned(frame)[0].encode(new)
    columns, _ = learned(some)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        columns.encode(new)
    assert not any("missing entries are medians" in line for line in columns.words())


def test_an_exported_program_takes_categories_as_a_fit_does(rng):
    """Two levels with a new one between them, and codes that come as numbers."""
    num = 60
    frame = pd.DataFrame(
        {
            "two": ["u", "v"] * 30,
            "code": pd.Categorical([1, 2, 3] * 20),
            "name": [f"n{i}" for i in range(num)],
            "many": [f"m{i % 25}" for i in range(num)],
            "nothing": [None] * num,
            "a": np.where(np.arange(num) == 3, np.nan, rng.normal(size=num)),
        }
    )
    columns, _ = learned(frame)
    new = frame.iloc[:5].assign(two=["u", "v", "new", None, "v"], code=[3.0, 1.0, 2.0, np.nan, 4.0], nothing=1.0)
    for rows in (read_table(frame), read_table(new)):
        with jax.enable_x64(True), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = standardized(
                columns, numbers_of(columns, rows)
            )  # the array is warned of, as a program cannot say anything
            num_said = len(said)
            np.testing.assert_allclose(found, columns.encode(rows), rtol=1e-12)
        assert [str(w.message) for w in said[:num_said]] == [str(w.message) for w in said[num_said:]]
    for message, column in zip(said[:num_said], ("two", "code"), strict=False):
        assert f"'{column}' of `X` has no entry in 1 rows" in str(message.message)
    assert num_said == 4 and "'new' in 1 rows, which training did not have" in str(said[2].message)


def test_numbers_as_databases_give_them():
    columns, X = learned(pd.DataFrame({"a": [Decimal("1.5"), Decimal("2.5"), None, Decimal("4")]}))
    assert columns.names == ["a", "a is missing"]
    assert X[2, 0] == columns.encode(read_table(pd.DataFrame({"a": [2.5]})))[0, 0]


def test_ranges_are_categories():
    ages = pd.Series([3, 17, 44, 60, 71, 5])
    old, new = (
        pd.DataFrame({"age": pd.cut(ages, [0, 20, 50, 80])}),
        pd.DataFrame({"age": pd.cut(ages[:2], [0, 20, 50, 80])}),
    )
    columns, X = learned(old)
    assert sorted(columns.names) == ["age=(0, 20]", "age=(20, 50]", "age=(50, 80]"]
    np.testing.assert_array_equal(columns.encode(read_table(new)), X[:2])
    np.testing.assert_array_equal(learned(pd.DataFrame({"age": pd.arrays.IntervalArray(old["age"])}))[1], X)


@pytest.mark.parametrize("form", ["${:,.2f}", "{:.1f}%", "{:.1f} kg", "{:.3f}€"])
def test_text_that_is_numbers_with_signs_or_units_is_said(form, rng):
    """Without a word it would be names of rows, or levels without an order."""
    text = [form.format(v) for v in rng.uniform(900, 9000, 60)]
    match = r"60 of whose 60 different entries are numbers with signs or units.*str\.replace\('\[\^-\.0-9\]', '', regex"
    with pytest.warns(UserWarning, match=match):
        learned(pd.DataFrame({"price": text, "b": np.arange(60.0)}))


def test_names_and_codes_are_no_numbers_with_units(rng, recwarn):
    for text in ([f"{i}{'abcdefgh'[i % 8]}" for i in range(60)], [f"id {i}" for i in range(60)]):
        learned(pd.DataFrame({"code": text, "b": np.arange(60.0)}))
    assert not recwarn.list


def test_levels_that_differ_only_in_how_they_are_written_are_said(recwarn):
    colours = ["red", "Red", "RED", "blue", "green"] * 6
    learned(pd.DataFrame({"a": np.arange(30.0), "colour": colours}))
    (said,) = recwarn.list
    assert "column 'colour' differ only in upper and lower case, and count as two, the first of 2 such pairs" in str(
        said.message
    )
    recwarn.clear()
    learned(pd.DataFrame({"a": np.arange(30.0), "grade": ["a", "A", "b"] * 10}))  # letters
    learned(pd.DataFrame({"a": np.arange(30.0), "name": [f"{'aA'[i % 2]}b{i // 2}" for i in range(30)]}))  # in one row
    assert not recwarn.list


@pytest.mark.parametrize(
    "code",
    [-999.0, 9999.0, -9.0, 999.9, 9999.99, -32768, 2**31 - 1, 1e20, 9.969209968386869e36, -3.4028234663852886e38],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_that_may_mean_missing_are_said(code, dtype, rng):
    """A temperature of -999 leaves the others equal. Weather services write 999.9, and rasters the largest number of float32."""
    x = rng.uniform(0, 5, 50).astype(dtype)
    x[:3] = code
    match = f"is {re.escape(f'{float(x[0]):g}')} in 3 rows, far from all other numbers, .* make it NaN"
    with pytest.warns(UserWarning, match="Column 'x' of `X` " + match):
        learned(pd.DataFrame({"x": x, "b": np.arange(50.0)}))
    with pytest.warns(UserWarning, match="`y` " + match):
        observed_numbers(x, 50)


def test_counts_that_may_mean_missing_are_said():
    with pytest.warns(UserWarning, match="`y` is 999 in 2 rows, far from all other numbers, 0 to 4. .* make it NaN"):
        observed_counts(np.array([0, 1, 2, 3, 4, 999] * 2), 12)


def test_numbers_that_are_no_codes(rng, recwarn):
    ages, prices = rng.integers(20, 99, 300).astype(float), rng.uniform(0, 500, 300)
    ages[:5], prices[0], prices[1:3] = 99, 999, 731
    for x in (ages, prices, np.array([0.0, 9.0] * 20), np.array([1.0, 2.0, 9.0] * 20)):
        observed_numbers(x, len(x))
    assert not recwarn.list


def test_fractions_are_numbers_and_complex_ones_are_refused():
    table = pd.DataFrame({"a": [Fraction(i, 3) for i in range(12)]})
    np.testing.assert_allclose(read_table(table).values[0], np.arange(12) / 3)
    with pytest.raises(TypeError, match=r"Column 'a' of `X` holds complex numbers\. Pass real and imaginary parts"):
        read_table(pd.DataFrame({"a": pd.Series([1 + 2j, 3.0, None] * 4, dtype=object)}))


def test_truth_values_as_numbers_are_said():
    with pytest.warns(UserWarning, match=r"`y` holds truth values.*the numbers 0 and 1.*use ogp\.classification"):
        observed_numbers(np.array([True, False] * 6), 12)


def test_several_outputs_are_refused():
    with pytest.raises(ValueError, match=r"shape \(12,\).*got \(12, 2\)\. Fit each of its columns by itself"):
        observed_numbers(np.ones((12, 2)), 12)


@pytest.mark.parametrize("value, other, words", [
    (b"x", None, r"bytes; .*Decode them: table\['a'\]\.str\.decode\('utf-8'\)"),
    (date(2024, 5, 31), "2024-05-31", r"date beside str; .*pandas\.to_datetime\(table\['a'\], errors='coerce'\)"),
    (time(12), None, "time; .*numbers of hours"),
    ([1, 2], None, r"(list|ndarray); .*a column of its own"),
    ({"b": 1}, None, "dict; .*a column of its own"),
])  # fmt: skip
def test_columns_that_are_refused_say_what_to_do(value, other, words):
    column = pd.Series([value, None, other, value], dtype=object)
    with pytest.raises(TypeError, match=f"Column 'a' of `X` holds {words}"):
        read_table(pd.DataFrame({"a": column}))


@pytest.mark.parametrize("y", [np.array([b"no", b"yes"] * 5), np.array([b"no", b"yes"] * 5, object)])
def test_labels_that_are_bytes_say_what_to_do(y):
    with pytest.raises(TypeError, match=r"Labels must be .*Bytes become text by \[v\.decode\(\) for v in y\]"):
        Labels.read(y, 10)


@pytest.mark.parametrize("y, words", [
    ("price", r"pass table\['price'\], and X without it"),
    ((v for v in range(10)), "A generator is no array: pass a list"),
    (dict(enumerate(range(10))), "A dict is no array"),
    (None, "A NoneType is no array"),
])  # fmt: skip
def test_outputs_that_are_no_arrays_say_what_to_do(y, words):
    with pytest.raises(ValueError, match=rf"`y` must have shape \(10,\), .*got \(\)\..*{words}"):
        observed_numbers(y, 10)
