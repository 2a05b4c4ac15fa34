"""Columns of dates: what becomes of them, whatever holds them, and what is predicted beyond the last one."""

from __future__ import annotations

from datetime import time, timedelta, timezone

import jax
import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular.columns import Columns, read_table
from numpyro_orthgp.tabular.dates import periods_in
from numpyro_orthgp.tabular.serving import numbers_of, standardized

pd = pytest.importorskip("pandas")


def learned(X):
    table = read_table(X)
    return Columns.learn(table, np.zeros((table.num_rows, 1)))


def circle(fraction):
    return np.sqrt(2) * np.stack([np.cos(2 * np.pi * fraction), np.sin(2 * np.pi * fraction)], -1)


def test_days_and_places_in_periods(rng):
    """Beside the calendar's own hours, weekdays and days of the year."""
    when = pd.Timestamp("2019-03-01") + pd.to_timedelta(rng.uniform(0, 1500, 400), unit="D")
    columns, X = learned(pd.DataFrame({"when": when}))
    days = ((when - when[0]) / pd.Timedelta(days=1)).to_numpy()
    np.testing.assert_allclose(X[:, 0], (days - days.mean()) / days.std(), atol=1e-9)
    hours = ((when - when.normalize()) / pd.Timedelta(days=1)).to_numpy()
    np.testing.assert_allclose(X[:, 1:3], circle(hours), atol=1e-6)
    monday = circle((when.day_of_week.to_numpy() - pd.Timestamp("1970-01-01").day_of_week) % 7 / 7)
    np.testing.assert_allclose(X[:, 3:5], monday, atol=1e-6)
    # The day of the year moves by up to a day with leap years, and begins with some day.
    of_year = circle((when.day_of_year.to_numpy() - 1 + hours) / 365.2425)
    assert np.abs(X[:, 5:7] - of_year).max() < np.sqrt(2) * 2 * np.pi * 1.6 / 365
    assert columns.names[3] == "when: day of the week, cosine" and len(columns.names) == 7
    assert columns.words() == [
        "dates, as days and as points in periods: when (time of day, day of the week, time of year)"
    ]
    assert set(columns.sources) == {0}


@pytest.mark.parametrize(
    "days, expected",
    [
        (np.arange(0, 200.0), ("day of the week",)),
        (np.arange(0, 800.0), ("day of the week", "time of year")),
        (np.arange(0, 3.0, 1 / 24), ("time of day",)),
        (np.arange(0, 30.0, 1 / 24), ("time of day", "day of the week")),
        (np.arange(0, 4000.0, 30.44), ("time of year",)),
        (np.arange(0, 40000.0, 365.2425), ()),
        (np.arange(0, 1.0, 1 / 24), ()),
        (np.arange(0, 400.0, 7), ()),
        (np.array([3.0, 3.0]), ()),
        (np.array([np.nan, 3.0]), ()),
    ],
)
def test_periods_are_those_that_dates_show(days, expected):
    assert periods_in(days) == expected


def test_dates_whatever_holds_them():
    """Also in UTC or with another zone, whose clock counts; periods of pandas are their first day."""
    days = pd.date_range("2020-01-01", periods=40, freq="25D")
    frame, missing = pd.DataFrame({"d": days, "a": np.arange(40.0)}), days.to_series().reset_index(drop=True)
    columns, X = learned(frame)
    zone = timezone(timedelta(hours=-5))
    same = [
        days.tz_localize("Asia/Tokyo"),
        pd.Series([d.date() for d in days]),
        pd.Series([d.to_pydatetime().replace(tzinfo=zone) for d in days], dtype=object),
        pd.Series(list(days.to_numpy()), dtype=object),
        pd.Categorical(days),
        days.to_period("D"),
        days.strftime("%Y-%m-%d"),
        days.strftime("%Y-%m-%dT%H:%M:%SZ"),
        pd.Series(days.strftime("%Y-%m-%d %H:%M"), dtype="category"),
    ]
    for column in same:
        new = frame.assign(d=column)
        np.testing.assert_array_equal(columns.encode(read_table(new)), X)
        np.testing.assert_array_equal(learned(new)[1], X)
    missing[[3, 5]] = None
    for column in (
        missing,
        missing.astype(object),
        missing.dt.strftime("%Y-%m-%d"),
        [None if pd.isna(d) else d.date() for d in missing],
    ):
        of_missing, X = learned(frame.assign(d=column))
        assert of_missing.names == ["d", "d: time of year, cosine", "d: time of year, sine", "d is missing", "a"]
        known = np.delete(np.arange(40), [3, 5])
        mean = (known.sum() + 2 * np.median(known)) / 40
        np.testing.assert_allclose(X[3, 0] / X[0, 0], (np.median(known) - mean) / -mean, rtol=1e-6)
        assert X[:, 3].tolist() == [1.0 if i in (3, 5) else -1.0 for i in range(40)]


def test_dates_of_polars_and_numpy():
    polars = pytest.importorskip("polars")
    days = pd.date_range("2020-01-01", periods=40, freq="25D")
    _, X = learned(pd.DataFrame({"d": days}))
    of_polars = polars.Series("d", days.to_numpy().astype("datetime64[us]"))
    for column in (
        of_polars,
        of_polars.dt.date(),
        of_polars.dt.replace_time_zone("America/Lima"),
        of_polars.dt.to_string("%F"),
    ):
        np.testing.assert_array_equal(learned(polars.DataFrame({"d": column}))[1], X)
    for array in (days.to_numpy(), days.to_numpy().astype("datetime64[D]")[:, None], days):
        np.testing.assert_array_equal(learned(array)[1], X)
    hours = polars.DataFrame({"t": [timedelta(hours=h) for h in range(12)], "a": [*range(11), 3]})
    table = read_table(hours)
    np.testing.assert_allclose(table.values[0], np.arange(12) / 24)


@pytest.mark.parametrize("dtype", [None, "object", "category"])
def test_durations_are_numbers_of_days(dtype):
    column = pd.Series(pd.Series([timedelta(hours=12), None, timedelta(days=3)], dtype=dtype))
    np.testing.assert_array_equal(read_table(pd.DataFrame({"d": column})).values[0], [0.5, np.nan, 3.0])


@pytest.mark.parametrize("as_text", [False, True])
def test_times_of_several_zones_are_said(as_text, recwarn):
    """Their clocks do not show what came first: 8:00 in Tokyo is before 1:00 in Lima."""
    hours = pd.date_range("2024-01-01", periods=40, freq="h")
    times = [
        h.to_pydatetime().replace(tzinfo=timezone(timedelta(hours=(0, 9, -5.5)[i % 3]))) for i, h in enumerate(hours)
    ]
    column = pd.Series([t.isoformat() for t in times] if as_text else times, dtype=object)
    learned(pd.DataFrame({"t": column}))
    (said,) = recwarn.list
    assert "several zones, from -5.5 to +9 hours from universal time" in str(said.message)
    assert "pandas.to_datetime(table['t'], utc=True)" in str(said.message)
    recwarn.clear()
    summer = [t.replace(tzinfo=timezone(timedelta(hours=1 + i // 20))) for i, t in enumerate(times)]
    for one_zone in (summer, [t.isoformat() for t in summer], hours.tz_localize("Europe/Berlin")):
        learned(pd.DataFrame({"t": pd.Series(one_zone)}))
    assert not recwarn.list


def test_what_is_no_date(recwarn):
    """Codes and other text stay categories, and columns keep their kind."""
    for text in (["2020-13-01"] * 2, ["2020-01-01", "today"], ["20200101"] * 2, [None, None]):
        assert learned(pd.DataFrame({"t": [*text] * 6, "a": np.arange(12.0)}))[0].columns[0].periods is None
    with pytest.raises(TypeError, match="'t' of `X` holds time; columns are numbers, dates, text or categories"):
        read_table(pd.DataFrame({"t": [time(3), time(4)]}))
    with pytest.raises(TypeError, match="'t' of `X` holds Timestamp"):
        read_table(pd.DataFrame({"t": ["u", pd.Timestamp("2020-01-01")]}))
    days = pd.date_range("2020-01-01", periods=12)
    frame = pd.DataFrame({"day": days, "number": np.arange(12.0), "text": [*"uvw"] * 4})
    columns, _ = learned(frame)
    for name, values, match in (
        ("day", 3.0, "'day' of `X` was dates in training, and holds numbers now, 3 for one"),
        ("day", "soon", "'day' of `X` was dates in training, and holds 'soon' now, which is no date"),
        ("number", days, "'number' was numbers in training, and holds dates now"),
        ("number", "u", "'number' was numbers in training, and holds text or categories now"),
        ("text", days, "'text' was text or categories in training, and holds dates now"),
    ):
        with pytest.raises(TypeError, match=match):
            columns.encode(read_table(frame.assign(**{name: values})))
    assert not recwarn.list
    for nothing in (None, np.nan, pd.NaT):
        with pytest.warns(UserWarning, match="'day' of `X` has no entry in 12 rows"):
            assert np.isfinite(columns.encode(read_table(frame.assign(day=nothing)))).all()
    with pytest.raises(TypeError, match=r"'day' holds dates\. Say what about them matters for your kernel"):
        ogp.inputs_of(frame)


def test_dates_where_training_had_nothing():
    """The column was left out then, in fits and in exported programs."""
    columns, X = learned(pd.DataFrame({"d": [None] * 12, "a": np.arange(12.0)}))
    new = read_table(pd.DataFrame({"d": pd.date_range("2020-01-01", periods=12), "a": np.arange(12.0)}))
    np.testing.assert_array_equal(columns.encode(new), X)
    assert numbers_of(columns, new)[:, 0].tolist() == [-1.0] * 12


def test_numbers_are_no_durations():
    """Hours in the place of durations were taken as days, without a word."""
    a, hours = np.arange(12.0), np.arange(12.0) ** 2
    durations, numbers = (pd.DataFrame({"a": a, "d": d}) for d in (pd.to_timedelta(hours, unit="h"), hours))
    objects = durations.astype({"d": object})
    for made, other in ((durations, numbers), (objects, numbers), (numbers, durations)):
        columns, _ = learned(made)
        with pytest.raises(
            TypeError, match=r"Column 'd' of `X` was .* in training, and holds .* now\. Durations are taken as days"
        ):
            columns.encode(read_table(other))
    columns, X = learned(objects)
    np.testing.assert_array_equal(columns.encode(read_table(durations)), X)
    np.testing.assert_allclose(columns.encode(read_table(np.stack([a, hours / 24], -1))), X)  # an array tells no units
    with pytest.warns(UserWarning, match="'d' of `X` has no entry in 12 rows"):
        one, other = (columns.encode(read_table(durations.assign(d=nothing))) for nothing in (np.nan, None))
    np.testing.assert_array_equal(one[:, 1], other[:, 1])


def test_times_of_another_zone_are_said(recwarn):
    """A server's universal time was taken for the clock at the place."""
    when = pd.Series(pd.date_range("2024-01-01", periods=200, freq="5h", tz="Europe/Berlin"))
    columns, X = learned(when.to_frame("when"))
    for same in (when, when.dt.tz_localize(None), when.astype("datetime64[s, Europe/Berlin]")):
        np.testing.assert_array_equal(columns.encode(read_table(same.to_frame("when"))), X)
    assert not recwarn.list
    utc = when.dt.tz_convert("UTC").to_frame("when")
    with pytest.warns(
        UserWarning, match="held times of Europe/Berlin in training, and holds times of UTC now.*tz_convert"
    ):
        assert np.abs(columns.encode(read_table(utc)) - X).max() > 0.1
    polars = pytest.importorskip("polars")
    with pytest.warns(UserWarning, match="holds times of UTC now"):
        columns.encode(read_table(polars.from_pandas(utc)))


def test_an_exported_program_takes_dates_as_a_fit_does(rng):
    when = pd.Series(pd.Timestamp("2019-03-01") + pd.to_timedelta(rng.uniform(0, 1500, 60), unit="D"))
    when[4] = None
    frame = pd.DataFrame({"when": when, "a": rng.normal(size=60)})
    columns, X = learned(frame)
    with jax.enable_x64(True):
        found = standardized(columns, numbers_of(columns, read_table(frame)))
    np.testing.assert_allclose(found, X, atol=1e-8)


def test_a_series_is_predicted_beyond_its_end(rng, tmp_path):
    """A trend and a year: the season recurs in the months after the last date."""
    days = pd.date_range("2012-01-01", periods=96, freq="MS")
    season = np.cos(2 * np.pi * (days.day_of_year.to_numpy() - 30) / 365.25)
    y = 0.02 * np.arange(96) + season + 0.1 * rng.normal(size=96)
    frame = pd.DataFrame({"month": days, "price": y})
    old, new = frame[:84], frame[84:]
    fit = ogp.regression(old[["month"]], old["price"], M=30, num_steps=40)
    predicted = fit.predict(new[["month"]])
    assert np.sqrt(np.mean((predicted.mean - new["price"]) ** 2)) < 0.3
    lower, upper = predicted.interval(0.95)
    assert np.mean((lower < new["price"]) & (new["price"] < upper)) > 0.8
    fit.save(tmp_path / "fit.npz")
    again = ogp.load(tmp_path / "fit.npz")
    assert again.columns == fit.columns
    np.testing.assert_array_equal(
        again.predict(new.assign(month=new["month"].dt.strftime("%Y-%m-%d"))[["month"]]).mean, predicted.mean
    )
    assert list(fit.importance()) == ["month"]
