"""Labels and counts as they come: of any type and size, with missing entries, in another order, far from all others."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
import scipy
from scipy import stats

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular import latent, renewal, stored
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.classification import shares_of, sharpened
from numpyro_orthgp.tabular.families import is_better, may_have_more_zeros, one_rate, predictions, zeros_at
from numpyro_orthgp.tabular.labels import Labels
from numpyro_orthgp.tabular.latent import LatentSearch, settled
from numpyro_orthgp.tabular.mixtures import Mixture, moments_of
from numpyro_orthgp.tabular.predicted_counts import CountPredictions
from numpyro_orthgp.tabular.predictions import Predictions
from numpyro_orthgp.tabular.rows import observed_counts, observed_numbers, warn_of_copies
from numpyro_orthgp.tabular.stages import Stage
from numpyro_orthgp.tabular.strays import StrayCounts, StrayNumbers

SMALL = {"M": 8, "num_steps": 15}
BIG = 2**53  # from here on float64 does not tell apart all integers


def read(y):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labels, codes, seen = Labels.read(y, len(y))
    return labels, labels.give_back(codes), seen


@pytest.fixture(scope="module")
def X():
    return np.random.default_rng(0).normal(size=(60, 2))


# ---------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("kind", ["regression", "classification", "counts"])
def test_ctrl_c_returns_what_was_found(kind, X, monkeypatch):
    """The third step is interrupted; what follows has no time. All that was found was lost."""
    f, watch, steps = 2 * np.sin(2 * X[:, 0]), Budget.watch, []

    def interrupt(self, progress):
        steps.append(progress.step)
        if len(steps) == 3:
            raise KeyboardInterrupt
        watch(self, progress)

    monkeypatch.setattr(Budget, "watch", interrupt)
    monkeypatch.setattr(latent, "LEAST_STEPS", 1)
    y = {"regression": f, "classification": f > 0, "counts": np.round(np.exp(f))}[kind]
    fit = getattr(ogp, kind)(X, y, M=8, num_steps=40)
    assert fit.was_interrupted and "searches (M = 8, 40 steps a search, ended by Ctrl-C)" in str(fit)
    assert len(fit.found.stages) == 1 and fit.found.stages[0].status == "interrupted"
    new = fit.predict(X)
    assert np.isfinite(new.probabilities if kind == "classification" else new.mean).all()


def test_ctrl_c_is_raised_where_nothing_can_be_returned(X, monkeypatch):
    """Of outputs with atoms, Ctrl-C in the first of two fits; of scikit-learn, whose searches would go on with another fit."""
    fit = ogp.classification(X, X[:, 0] > 0, **SMALL)
    stopped = replace(fit, budget=fit.budget + ", ended by Ctrl-C")
    module = sys.modules["numpyro_orthgp.tabular.regression"]
    monkeypatch.setattr(module, "classification", lambda *args, **options: stopped)
    with pytest.raises(KeyboardInterrupt):
        module.with_atoms(X, np.where(X[:, 0] > 0, X[:, 1], 0.0), np.zeros(1), Budget(None, 8, 15), {})
    pytest.importorskip("sklearn")
    from numpyro_orthgp import sklearn

    monkeypatch.setattr(sklearn, "classification", lambda *args, **options: stopped)
    estimator = sklearn.GPClassifier(**SMALL)
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(X, X[:, 0] > 0)
    assert len(estimator.gp_.predict(X).label) == 60


# ---------------------------------------------------------------- labels


def test_missing_entries_of_a_list_of_text_are_missing():
    """NumPy writes NaN among text as 'nan', which was a class."""
    labels, back, seen = read(["a", "b", float("nan")] * 6)
    assert labels.classes.tolist() == ["a", "b"] and seen.sum() == 12 and back.tolist() == ["a", "b"] * 6


@pytest.mark.parametrize("y", [["1", 1] * 6, [True, "True", "no"] * 6])
def test_lists_of_several_types_are_refused(y):
    """NumPy makes text of them all, so 1 and '1' were one class."""
    with pytest.raises(TypeError, match=r"all text, all numbers.*and.*Pass others as text, such as y\.astype\(str\)"):
        read(y)


@pytest.mark.parametrize("kind", ["pandas", "pandas of arrow", "polars", "arrow", "category"])
def test_large_integers_beside_missing_entries(kind):
    """Libraries make floats of them, which merged two classes."""
    y = [BIG, BIG + 1, None] * 6
    if kind.startswith("pandas") or kind == "category":
        pd = pytest.importorskip("pandas")
        if kind == "category":
            y = pd.Series(pd.Categorical.from_codes([0, 1, -1] * 6, categories=[BIG, BIG + 1]))
        else:
            pytest.importorskip("pyarrow")
            y = pd.Series(y, dtype="Int64" if kind == "pandas" else "int64[pyarrow]")
    else:
        y = pytest.importorskip("polars").Series(y) if kind == "polars" else pytest.importorskip("pyarrow").array(y)
    labels, back, seen = read(y)
    assert labels.classes.tolist() == [BIG, BIG + 1] and labels.classes.dtype.kind == "i"
    assert list(back) == [BIG, BIG + 1] * 6 and seen.sum() == 12


def test_integers_beyond_64_bits_are_refused():
    for large in (2**70, 2**63):
        with pytest.raises(TypeError, match="no integer of 64 bits holds"):
            read(np.array([large, -1] * 6, object))


def test_a_table_of_one_column_keeps_its_dtype():
    pd = pytest.importorskip("pandas")
    y = pd.DataFrame({"y": pd.Categorical(["u", "v"] * 6, categories=["v", "u"], ordered=True)})
    labels, back, _ = read(y)
    assert labels.classes.tolist() == ["v", "u"] and back.dtype == y.y.dtype


def test_further_kinds_of_text():
    _, back, _ = read(np.array(["a", "b"] * 6, np.dtypes.StringDType()))
    assert back.tolist() == ["a", "b"] * 6
    pl = pytest.importorskip("polars")
    labels, _, seen = read(pl.Series(["a", "b", None] * 6, dtype=pl.Enum(["b", "a", "c"])))
    assert labels.classes.tolist() == ["a", "b"] and seen.sum() == 12


def test_infinite_labels_are_refused():
    with pytest.raises(ValueError, match="`y` has infinite entries"):
        read(np.array([1, np.inf] * 6))


@pytest.mark.parametrize(
    "others, what",
    [
        (("New York", "New\u00a0York"), "spaces"),
        (("caf\u00e9", "cafe\u0301"), "signs that look alike or are not seen"),
        (("a\u200b", "a"), "signs that look alike or are not seen"),
        (("Yes", " yes"), "upper and lower case"),
    ],
)
def test_labels_that_look_alike(others, what):
    first, second = (re.escape(ascii(label)) for label in sorted(others))
    with pytest.warns(UserWarning, match=f"{first} and {second} differ only in {what}"):
        Labels.read(np.array([*others, "no"] * 6), 18)


def test_letters_may_differ_in_case():
    read(np.array(["a", "A"] * 6))


@pytest.mark.parametrize("label", ["nan", "", "<NA>", "None"])
def test_labels_that_mean_missing(label):
    with pytest.warns(UserWarning, match=f"Label '{label}' is a class of its own.*pass None there"):
        Labels.read(np.array(["a", "b", label] * 6), 18)


@pytest.mark.parametrize("levels", [[2, 1, 3], [True, False]])
def test_categories_of_objects_come_back_from_a_file(levels, X, tmp_path):
    """Numbers and truth values in a category of objects were loaded as text, so all labels were missing."""
    pd = pytest.importorskip("pandas")
    y = pd.Categorical.from_codes((X[:, 0] > 0).astype(int), categories=pd.Index(levels, dtype=object))
    fit = ogp.classification(X, y, **SMALL)
    fit.save(tmp_path / "fit.npz")
    found = ogp.load(tmp_path / "fit.npz").predict(X).label
    assert list(found) == list(fit.predict(X).label) and set(found) <= set(levels)


def test_labels_of_a_pandas_category_in_a_polars_table(X):
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    table = pl.DataFrame({"a": X[:, 0], "b": X[:, 1]})
    y = pd.Series(pd.Categorical(np.where(X[:, 0] > 0, "u", "v"), categories=["v", "u"]))
    p = ogp.classification(table, y, **SMALL).predict(table)
    frame = p.frame()
    assert frame["label"].to_list() == list(p.label) and frame.columns == ["label", "P(v)", "P(u)"]


def test_a_class_that_is_not_in_the_part(X, monkeypatch):
    """Of many rows a part is used, which may lack a rare class. Its share was zero, and sharper probabilities were no numbers."""
    shares = shares_of(np.array([0, 1] * 10), 3)
    assert shares.sum() == pytest.approx(1) and 0 < shares[2] < 0.03
    found = sharpened(np.array([[0.5, 0.4, 0.1]]), shares, 1.5)
    assert np.isfinite(found).all() and found.sum() == pytest.approx(1)
    monkeypatch.setattr(stored, "MOST", 20)
    monkeypatch.setattr(importlib.import_module("numpyro_orthgp.tabular.classification"), "MOST", 20)
    y = np.array(["a", "b"] * 29 + ["a", "rare"])
    p = ogp.classification(X, y, **SMALL).predict(X)
    assert np.isfinite(p.log_density(y)).all()


# ---------------------------------------------------------------- what is compared with predictions


def test_outputs_in_another_order_than_predictions(X):
    """Series are matched by position, so one with the rows in another order has other densities. It was taken as it stood."""
    pd = pytest.importorskip("pandas")
    table, y = pd.DataFrame(X, columns=["a", "b"]), pd.Series(np.where(X[:, 0] > 0, "u", "v"))
    labels = ogp.classification(table, y, **SMALL).predict(table)
    numbers = Predictions(X[:, 0], np.ones(60), np.ones(60), table.index)
    counts = CountPredictions(X[:, 0], np.ones(60), np.inf, lambda *_: X[:, 0], table.index)
    methods = [(labels.log_density, y), (counts.log_density, y == "u"), (counts.cdf, y == "u")]
    for method, given in [*methods, (numbers.log_density, y == "u"), (numbers.cdf, y == "u")]:
        assert method(given).shape == method(given.to_frame()).shape == (60,)
        np.testing.assert_array_equal(method(given), method(given.to_numpy()))
        with pytest.raises(ValueError, match="rows of `X` in another order by their labels"):
            method(given[::-1])


def test_text_has_no_density():
    p = CountPredictions(np.zeros(2), np.ones(2), np.inf, lambda *_: np.zeros(2))
    for method in (p.log_density, p.cdf, Predictions(np.zeros(2), np.ones(2), np.ones(2)).log_density):
        with pytest.raises(TypeError, match="`y` must be numbers; got <U1, 'a' for one"):
            method(np.array(["a", "b"]))


def test_levels_of_intervals():
    p = CountPredictions(np.zeros(2), np.ones(2), np.inf, lambda *_: np.zeros(2))
    with pytest.raises(ValueError, match=r"`level` must be between 0 and 1; got 95\.0"):
        p.interval(95)
    with pytest.raises(ValueError, match=r"`level` must be one number.*got \[0\.5, 0\.9\]\. For several use quantile"):
        p.interval([0.5, 0.9])


# ---------------------------------------------------------------- counts


def counted(log_mean, log_sd, k=np.inf):
    arrays = np.broadcast_arrays(np.asarray(log_mean, float), np.asarray(log_sd, float))
    return CountPredictions(*(np.atleast_1d(a) for a in arrays), k, lambda *_: np.zeros(1))


@pytest.mark.parametrize("k", [np.inf, 2.0])
def test_intervals_of_counts_far_from_all_rows(k):
    """Far from the rows a log rate may be anything. Bisection did not end beyond 2^53, and infinite means gave no number."""
    log_sd = np.array([8.0, 20.0, 30.0, 100.0])
    lower, upper = counted(0.0, log_sd, k).interval(0.95)
    assert (lower == 0).all()
    # Of the rate alone: the spread of counts given the rate is small beside it.
    slack = 0.0 if np.isinf(k) else 0.3
    np.testing.assert_allclose(np.log(upper), stats.norm.ppf(0.975) * log_sd, atol=0.02 + slack)
    lower, upper = counted(np.log(1e17), 0.01, k if np.isinf(k) else 1e6).interval(0.95)
    np.testing.assert_allclose([lower, upper], 1e17 * np.exp(0.01 * np.array([[-1.96], [1.96]])), rtol=1e-3)
    far = counted([-5000.0, 5000.0], 100.0, k)
    assert far.frame()["sd"].tolist()[1] == np.inf and not np.isnan(far.sd).any()


@pytest.mark.parametrize("k", [np.inf, 0.5, 3.0, 1e5])
def test_moments_of_counts(k):
    """By the law of total variance."""
    p = counted([-3.0, 2.0, 8.0], [0.0, 0.7, 1.5], k)
    mean = np.exp(p.log_mean + p.log_sd**2 / 2)
    square = mean**2 * np.exp(p.log_sd**2)
    np.testing.assert_allclose(p.mean, mean)
    np.testing.assert_allclose(p.sd**2, mean + square * (1 + 1 / k) - mean**2, rtol=1e-9)


@pytest.mark.parametrize("k, log_sd", [(np.inf, 1.0), (np.inf, 0.05), (30.0, 5.0), (1e7, 0.5)])
def test_probabilities_of_large_counts(k, log_sd):
    """Given the rate they rise from zero to one between two nodes of a quadrature, which took them for a stair."""
    log_mean, z = 20.0, np.linspace(-8, 8, 400_001)
    y = np.round(np.exp(log_mean + log_sd * np.array([-2.0, 0.1, 0.7233, 1.5])))
    rate = np.exp(log_mean + log_sd * z)
    weights = stats.norm.pdf(z) / stats.norm.pdf(z).sum()
    given = [stats.poisson.cdf(c, rate) if np.isinf(k) else stats.nbinom.cdf(c, k, k / (k + rate)) for c in y]
    found = counted(np.full(4, log_mean), np.full(4, log_sd), k).cdf(y)
    np.testing.assert_allclose(found, np.stack(given) @ weights, atol=2e-5)


def test_probabilities_of_no_number_and_of_infinity():
    assert counted(np.zeros(4), 1.0).cdf(np.array([-1, 0.5, np.inf, np.nan]))[[0, 2]].tolist() == [0, 1]
    assert np.isnan(counted(np.zeros(2), 1.0, 3.0).cdf(np.array([np.nan, 2.0]))).tolist() == [True, False]
    with pytest.raises(ValueError, match="`y` must hold counts"):
        counted(0.0, 1.0).log_density(np.array([np.inf]))


@pytest.mark.filterwarnings("error")
def test_counts_beyond_float64_with_strays():
    """The probability of at most infinity was not a number, with NumPy's warnings; so was the search for quantiles."""
    p = replace(counted(np.zeros(4), 500.0), strays=StrayCounts(0.01, np.full(4, 2.0)))
    np.testing.assert_array_equal(p.cdf([-np.inf, -1.0, np.inf, np.nan]), [0, 0, 1, np.nan])
    lower, upper = p.interval(0.95)
    assert (lower == 0).all() and (upper == np.inf).all()
    np.testing.assert_allclose(p.strays._cdf(np.array([0.0, 1.0, 1e300, -5.0])), [1 / 3, 1 / 2, 1, 0], atol=1e-15)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_log", [False, True])
def test_missing_outputs_have_no_density(is_log):
    """Of a fit of log y their density was zero, which a mean over rows shows as minus infinity, and so was their probability."""
    p = Predictions(np.zeros(2), np.ones(2), np.ones(2), is_log=is_log, strays=StrayNumbers(0.01))
    for found in (p.log_density([np.nan, 1.0]), p.cdf([np.nan, 1.0])):
        assert np.isnan(found).tolist() == [True, False]
    assert p.log_density([0.0, -1.0])[0] == (-np.inf if is_log else p.log_density([0.0, 0.0])[0])


@pytest.mark.filterwarnings("error")
def test_moments_of_logarithms_beyond_float64():
    """Standard deviations were not numbers where means are infinite, and infinite where only their squares are."""
    loc, scale = np.array([0.0, 500.0, 1e4, -1e4, 0.0]), np.array([0.5, 0.5, 0.5, 0.5, 100.0])
    two = Mixture(np.array([0.3, 0.7]), np.array([-1.0, 1.0]), np.array([0.5, 1.0]))
    mean, sd = moments_of(two, loc, scale, True)
    each = np.exp(0.5 * two.locs + (0.5 * two.scales) ** 2 / 2), np.expm1((0.5 * two.scales) ** 2)
    expected = (
        two.weights @ each[0],
        (two.weights @ (each[0] ** 2 * (1 + each[1])) - (two.weights @ each[0]) ** 2) ** 0.5,
    )
    np.testing.assert_allclose([mean[0], sd[0]], expected, rtol=1e-12)
    np.testing.assert_allclose([mean[1], sd[1]], np.exp(500) * np.array(expected), rtol=1e-12)
    assert [mean[2], sd[2], mean[3], sd[3], mean[4], sd[4]] == [np.inf, np.inf, 0, 0, np.inf, np.inf]


@pytest.mark.filterwarnings("error")
def test_outputs_that_are_all_missing_are_no_truth_values(X):
    with pytest.raises(ValueError, match="At least 10 outputs are needed; got 0"):
        ogp.regression(X, np.full(len(X), np.nan))
    with pytest.raises(ValueError, match="At least 10 counts are needed; got 0"):
        ogp.counts(X, np.full(len(X), np.nan))


def test_a_count_that_is_nearly_whole_is_shown_as_it_is(X):
    with pytest.raises(ValueError, match=r"Counts must be whole numbers; got 3\.0000000000001\."):
        ogp.counts(X, np.full(len(X), 3.0000000000001))


@pytest.mark.parametrize("alpha", [1.0, 1.4, 5.0, 60.0])
def test_events_at_regular_times(alpha):
    """Their mean is the rate, whatever their regularity, as the count begins at any time; without it counts are Poisson."""
    rate, n = np.array([0.02, 0.7, 1.0, 6.3, 40.0])[:, None], np.arange(200.0)
    p = np.diff(renewal.cdf(n, rate, alpha), prepend=0)
    assert (p > -1e-12).all()
    mean = p @ n
    np.testing.assert_allclose(mean, rate[:, 0], rtol=1e-9)
    if alpha == 1:
        np.testing.assert_allclose(p, stats.poisson.pmf(n, rate), atol=1e-12)
    np.testing.assert_allclose(p @ n**2 - mean**2, renewal.variance(mean, alpha), rtol=1e-3, atol=0.09)
    gaps = np.random.default_rng(0).gamma(alpha, 1 / alpha, (20_000, 30))
    late = np.cumsum(gaps, 1) - 9.7  # after ten events or so the start is any time
    seen = np.sum((late > 0) & (late < 6.3), 1)
    np.testing.assert_allclose(np.bincount(seen, minlength=12)[:12] / len(seen), p[3, :12], atol=0.02)


@pytest.mark.parametrize("alpha", [1.0, 3.0, 50.0])
def test_when_an_event_comes(alpha):
    """At most n events before t means that the next one comes after t: moments of its time are integrals of the cdf."""
    t, step = np.linspace(0, 60, 60001, retstep=True)
    for count in (0, 4):
        late = renewal.cdf(np.full(t.shape, count), t, alpha)
        mean, square = (scipy.integrate.simpson(w * late, dx=step) for w in (1.0, 2 * t))
        np.testing.assert_allclose(renewal.arrival(count, alpha), [mean, square / mean**2 - 1], rtol=1e-5)


def test_predictions_of_regular_counts():
    """Probabilities add up, also where the time of an event is taken for normal: beyond a million, or beside a wide rate."""
    p = replace(counted([-2.0, 2.0], [0.4, 0.1]), regularity=8.0)
    y = np.arange(120.0)
    each = np.exp([replace(p, log_mean=np.repeat(m, 120), log_sd=np.repeat(s, 120)).log_density(y)
                   for m, s in zip(p.log_mean, p.log_sd, strict=True)])  # fmt: skip
    np.testing.assert_allclose(each.sum(1), 1, rtol=1e-9)
    np.testing.assert_allclose(each @ y, p.mean, rtol=1e-4)
    np.testing.assert_allclose(np.sqrt(each @ y**2 - (each @ y) ** 2), p.sd, rtol=0.1)
    lower, upper = p.interval(0.9)
    assert upper[1] - lower[1] < 0.6 * np.subtract(*counted(2.0, 0.1).interval(0.9)[::-1])[0]
    many = np.array([0.999999, 1.000001]) * renewal.MANY
    for log_sd in (0.0, 1e-3, 0.5):
        p = replace(counted(np.full(2, np.log(renewal.MANY)), log_sd), regularity=3.0)
        np.testing.assert_allclose(*p.cdf(many), atol=2e-3)
    assert p.cdf(np.array([-1.0, np.inf])).tolist() == [0, 1]


def test_counts_that_vary_less_than_poisson_ones(X, tmp_path):
    """Grades, years and numbers of rooms: intervals of 90 % held all of them, and a normal distribution was 0.9 nats better."""
    y = np.round(50 + 8 * X[:, 0] + np.random.default_rng(0).normal(size=60))
    fit = ogp.counts(X, y, **SMALL)
    assert fit.found.regularity > 4 and not fit.overdispersed and "times less variance than Poisson ones" in str(fit)
    p = fit.predict(X)
    assert p.log_density(y).mean() > -2.8  # -3.3 by Poisson counts with the same rates
    fit.save(tmp_path / "fit.npz")
    again = ogp.load(tmp_path / "fit.npz").predict(X)
    np.testing.assert_array_equal(again.quantile(0.9), p.quantile(0.9))
    with jax.enable_x64(True):
        served = fit.export().call(X, np.ones(60))
    np.testing.assert_allclose(served["sd"], p.sd, rtol=1e-9)


@pytest.mark.parametrize(
    "num_held, gain, by_bound, expected",
    [(15, -0.2, 60.0, True), (15, 0.2, -60.0, False), (20, -9.0, 60.0, False), (20, 9.0, -60.0, True),
     (300, 0.2, 60.0, False), (300, 2.0, -60.0, True), (0, np.nan, 5.0, True)],
)  # fmt: skip
def test_few_held_out_rows_miss_the_far_ones(num_held, gain, by_bound, expected):
    """Of 135 rows with many zeros the bound gained by the wider counts, but 15 held-out rows did not: it lost half a nat a row."""
    stage = Stage(100, 10, "", 500.0, "", 1, -2.0, np.nan, 1.0)
    wide = stage._replace(loss=500.0 - by_bound, held_out=-2.0 + gain / num_held if num_held else np.nan)
    assert is_better(wide, stage, num_held) == expected


def test_the_exposure_of_new_rows_is_asked_for(X):
    """Without it counts are those of one hour, or of one person."""
    y = np.random.default_rng(1).poisson(3.0, 60)
    fit = ogp.counts(X, y, np.linspace(1, 100, 60), **SMALL)
    with pytest.warns(UserWarning, match=r"fit had an `exposure`.*are for an exposure of 1.*exposure=1 for rates"):
        p = fit.predict(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(fit.predict(X, 1.0).mean, p.mean)
        ogp.counts(X, y, **SMALL).predict(X)


def test_counts_of_rows_that_may_have_none(tmp_path):
    """Where half of the rows cannot have events, negative binomial counts were too wide for the others."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(700, 2))
    y = np.where(rng.random(700) < stats.norm.cdf(2 * X[:, 1]), 0, rng.poisson(20 * np.exp(0.3 * X[:, 0])))
    fit = ogp.counts(X[:300], y[:300], M=8, num_steps=60)
    assert fit.overdispersed and fit.zero_inflated and "zero by themselves in 5" in str(fit)
    p, new = fit.predict(X[300:]), y[300:]
    assert p.log_density(new).mean() > -2.0  # -3.0 by negative binomial counts
    lower, upper = p.interval(0.5)
    assert upper[X[300:, 1] > 1.5].max() == 0 and (lower[X[300:, 1] < -1.5] > 0).all()
    assert fit.importance()["x1"] > 0.5  # which says nothing about the rate
    fit.save(tmp_path / "fit.npz")
    np.testing.assert_array_equal(ogp.load(tmp_path / "fit.npz").predict(X).quantile(0.9), fit.predict(X).quantile(0.9))
    with jax.enable_x64(True):
        served = fit.export().call(X[300:], np.ones(400))
    np.testing.assert_allclose([served["mean"], served["sd"]], [p.mean, p.sd], rtol=1e-9)


@pytest.mark.parametrize("k", [np.inf, 2.0])
def test_probabilities_of_additional_zeros(k):
    zeros, y = np.array([0.0, 0.3, 0.999]), np.arange(400.0)
    plain = predictions(
        {} if np.isinf(k) else {"concentration": np.array(k)}, np.arange(3) / 2, np.array([0.4, 0.1, 0.3])
    )
    p = replace(plain, extra_zeros=zeros)
    for i in range(3):
        one = {"log_mean": np.repeat(p.log_mean[i], 400), "log_sd": np.repeat(p.log_sd[i], 400)}
        each = np.exp(replace(p, **one, extra_zeros=zeros[i]).log_density(y))
        counts = np.exp(replace(plain, **one).log_density(y))
        np.testing.assert_allclose(each, (1 - zeros[i]) * counts + zeros[i] * (y == 0), rtol=1e-9, atol=1e-300)
        np.testing.assert_allclose(np.cumsum(each), replace(p, **one, extra_zeros=zeros[i]).cdf(y), atol=2e-4)
        np.testing.assert_allclose(each @ y, p.mean[i], rtol=1e-4)
        np.testing.assert_allclose(np.sqrt(each @ y**2 - (each @ y) ** 2), p.sd[i], rtol=1e-3)
    assert p.quantile(0.99)[2] == 0 and (p.quantile(0.99)[:2] > 0).all()


def test_one_rate_with_additional_zeros(rng):
    expected = rng.uniform(1, 5, 4000)
    y = np.where(rng.random(4000) < 0.4, 0, rng.negative_binomial(2.0, 2.0 / (2.0 + 3.0 * expected)))
    np.testing.assert_allclose(one_rate(y, expected, gated=True), [3.0, 2.0, 0.4], rtol=0.1)
    assert may_have_more_zeros(y, {"concentration": np.array(0.5)})
    assert not may_have_more_zeros(y + 1, {"concentration": np.array(0.5)})
    assert not may_have_more_zeros(y, {"concentration": np.array(50.0)})  # nearly Poisson


def test_zeros_by_themselves_have_probabilities_also_far_away():
    values = {"gate": np.array(1.0), "gate_slope": np.array([2.0, 0.0])}
    X = np.array([[0.0, 5.0], [-0.5, 1.0], [1e6, 0.0], [-1e6, 0.0]])
    p = zeros_at(values, X)
    np.testing.assert_allclose(p[:2], [scipy.special.expit(1.0), 0.5], rtol=2e-3)
    assert 0 < p[3] < 1e-6 and 1 - 1e-6 < p[2] < 1 and zeros_at({}, X) == 0


def test_large_counts_are_not_taken_for_regular_ones(X):
    """Poisson counts of a billion were so unlikely that more regular ones, whose probabilities have a least value, seemed right."""
    y = 10**9 * np.random.default_rng(0).poisson(3 * np.exp(X[:, 0] / 2))
    fit = ogp.counts(X, y, **SMALL)
    assert fit.overdispersed and fit.predict(X).log_density(y).mean() > -25  # it was less than minus a million


@pytest.mark.parametrize("y", [np.array([True, False] * 6), np.array([True, None, *[False] * 10], object)])
def test_truth_values_are_no_counts(y):
    with pytest.warns(UserWarning, match=r"`y` holds truth values.*use ogp\.classification"):
        observed_counts(y, 12)


def test_a_last_fit_that_goes_astray(X, monkeypatch):
    """Counts of a billion without noise: the last fit left the solution, and predictions were wrong by a percent and sure to a
    hundredth of that. Then the search stands."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2))
    y = rng.poisson(1e9 * np.exp(X[:, 0]))
    taken = []
    run = LatentSearch.trained
    monkeypatch.setattr(
        LatentSearch, "trained", lambda self, *args, **options: taken.append(run(self, *args, **options)) or taken[-1]
    )
    with jax.enable_x64(True):
        fit = ogp.counts(X, y, M=50, num_steps=300)
    assert settled(taken[-1].losses) > 1e6 > settled(fit.found.losses)
    assert np.median(np.abs(np.log(fit.predict(X).mean / y))) < 1e-3


@pytest.mark.parametrize("call", [ogp.regression, ogp.classification, ogp.counts])
@pytest.mark.parametrize("seed", [-1, 1.5, "a", True, None])
def test_seeds_are_integers(call, seed, X):
    with pytest.raises(ValueError, match=f"`seed` must be an integer of at least 0; got {seed!r}"):
        call(X, np.arange(60) % 3, seed=seed, **SMALL)


@pytest.mark.parametrize("slips", [{77: 1e6}, {3: 1e6, 50: 2e6, 51: 1e6}])
def test_outputs_far_from_all_others_are_said_with_their_row(slips, rng):
    """One count of 1e6 among those up to 9 made a mean of 7e4 for 1.4. A missing entry before it moves no row."""
    y = rng.poisson(3.0, 100).astype(float)
    y[0] = np.nan
    y[list(slips)] = list(slips.values())
    more = " \\(and 2 more\\)" if len(slips) > 1 else ""
    match = f"`y` is 1e\\+06 in row {min(slips)}{more}, far from all other numbers, 0 to .*make it NaN"
    with pytest.warns(UserWarning, match=match):
        ogp.counts(np.arange(100.0), y, M=5, num_steps=2)
    with pytest.warns(UserWarning, match=match):
        observed_numbers(y, 100)


@pytest.mark.parametrize("num, signs", [(3, [1, -1, 1]), (8, [1] * 8), (10, [1, -1] * 5)])
def test_several_slips_on_both_sides_are_said(num, signs, rng):
    """Three rows in another unit, not all of one sign, made errors a thousand times as large without a word."""
    y = rng.normal(size=200)
    rows = np.sort(rng.choice(200, num, replace=False))
    y[rows] = 1000 * (1 + rng.random(num)) * signs
    others = np.delete(y, rows)
    more = f"row {rows[0]} (and {num - 1} more), far from all other numbers, {others.min():g} to {others.max():g}"
    with pytest.warns(UserWarning, match=re.escape(more)):
        observed_numbers(y, 200)


def test_outputs_that_are_many_or_not_far_are_no_slips(rng, recwarn):
    y = rng.normal(size=200)
    many = np.where(np.arange(200) < 11, 1e4, y)
    near = np.where(np.arange(200) < 3, 25 * np.ptp(y), y)
    for others in (many, near, np.r_[many, -1e5 + many[:6]], np.r_[np.zeros(195), np.arange(5) + 1e6]):
        observed_numbers(others, len(others))
    assert not recwarn.list


def test_outputs_of_heavy_tails_and_large_exposures_are_not_far(rng, recwarn):
    """The largest of numbers whose tail is as heavy as 1 / y^2 is more than 30 times the second in one table of 900."""
    for y in (
        rng.pareto(2.0, 1000),
        np.exp(2 * rng.normal(size=1000)),
        np.r_[np.zeros(99), 1.0],
        np.r_[0.0, [1e6, 1e6 + 1] * 20],
    ):
        observed_numbers(y, len(y))
    assert not recwarn.list
    y, exposure = rng.poisson(3.0, 100).astype(float), np.ones(100)
    y[7], exposure[7] = 3e4, 1e4
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*far from all other")
        ogp.counts(np.arange(100.0), y, exposure, M=5, num_steps=2)


def test_rows_that_are_copies_are_said(rng):
    """Rows left out had copies among the others: predictions 0.3 off had a standard deviation of 1e-8, without a word."""
    X, y = rng.normal(size=(12, 3)), rng.normal(size=12)
    twice, given = np.r_[y, np.nan, y], np.r_[X, X[:1], X]
    match = r"12 of 24 rows are copies of others, in `X` and in `y`, such as rows (\d+) and (\d+)\..*drop_duplicates"
    with pytest.warns(UserWarning, match=match) as caught:
        ogp.regression(given, twice, **SMALL)
    first, second = map(int, re.match(match, str(caught[0].message)).groups())
    assert first < second and twice[first] == twice[second] and (given[first] == given[second]).all()


@pytest.mark.parametrize("num, is_said", [(20, False), (30, True)])
def test_how_many_copies_are_said(num, is_said, rng, recwarn):
    X, y = rng.normal(size=(500, 3)), rng.normal(size=500)
    rows = rng.permutation(500 + num)
    X, y = np.r_[X, X[:num]][rows], np.r_[y, y[:num]][rows]
    warn_of_copies(X, y, np.arange(len(y)))
    num_rows = len({(*x, z) for x, z in zip(X.tolist(), y.tolist(), strict=True)})
    words = [str(w.message) for w in recwarn.list]
    assert [w.startswith(f"{len(y) - num_rows} of {len(y)} rows") for w in words] == [True] * is_said


def test_inputs_and_outputs_that_recur_are_no_copies(rng, recwarn):
    """Categories and repeated measurements, and scores."""
    X, y, cells = rng.normal(size=(100, 2)), rng.normal(size=300), rng.integers(0, 3, (300, 2))
    for inputs, outputs in [
        (np.tile(X, (3, 1)), y),
        (cells, y.round(1)),
        (np.tile(X, (3, 1)), np.tile(y[:100].round(), 3)),
    ]:
        warn_of_copies(inputs, outputs, np.arange(300))
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["regression", "logarithms", "atoms", "two classes", "three classes", "counts"])
def test_predictions_of_no_rows(kind, rng):
    """As of a filter that nothing passes: a table of the same columns."""
    pd = pytest.importorskip("pandas")
    days = np.datetime64("2024-01-01") + np.arange(60)
    X = pd.DataFrame({"a": rng.normal(size=60), "c": [*"uvw"] * 20, "day": days})
    y = rng.normal(size=60)
    fit = {
        "regression": lambda: ogp.regression(X, y, **SMALL),
        "logarithms": lambda: ogp.regression(X, np.exp(3 * y), **SMALL),
        "atoms": lambda: ogp.regression(X, np.maximum(y, 0), **SMALL),
        "two classes": lambda: ogp.classification(X, y > 0, **SMALL),
        "three classes": lambda: ogp.classification(X, X["c"], **SMALL),
        "counts": lambda: ogp.counts(X, rng.poisson(3, 60), **SMALL),
    }[kind]()
    some, none = fit.predict(X[:2]).frame(), fit.predict(X[:0]).frame()
    assert list(none.columns) == list(some.columns) and len(none) == 0 and none.index.equals(X.index[:0])
    assert list(none.dtypes)[1:] == list(some.dtypes)[1:]  # pandas asks the rows of labels for their type
    assert fit.as_array(X[:0]).shape == (0, 3)
    assert len(fit.predict(pd.DataFrame({"a": [], "c": [], "day": []})).frame()) == 0  # of no types
    if "classes" not in kind:
        predicted = fit.predict(X[:0])
        for found in (predicted.log_density([]), predicted.cdf([]), predicted.quantile(0.5)):
            assert found.shape == (0,)
        assert predicted.quantile([0.1, 0.5]).shape == (0, 2)
    with pytest.raises(ValueError, match="`X` must have at least one row"):
        ogp.regression(X[:0], y[:0])
