"""One call: what it finds, what it says, and what lies beneath."""

from __future__ import annotations

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
from scipy import stats

import numpyro_orthgp as ogp
from numpyro_orthgp.init import greedy_variance
from numpyro_orthgp.tabular import search as searching
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.columns import read_table
from numpyro_orthgp.tabular.left_out import LeftOut, calibrate, distribution_of, finish, folds
from numpyro_orthgp.tabular.points import kernel_of
from numpyro_orthgp.tabular.rows import order_of
from numpyro_orthgp.tabular.search import Rows, Searched, Searches, everything, function_of
from numpyro_orthgp.tabular.stages import Stage, while_it_pays
from numpyro_orthgp.tabular.starts import starts
from numpyro_orthgp.tabular.units import Outputs, Units
from tests import oracles

SMALL = {"M": 30, "num_steps": 40}


def table(num: int = 120):
    """Two columns that matter, one that does not, in units of their own."""
    rng = np.random.default_rng(0)
    X = np.stack([1e3 * rng.normal(size=num), rng.normal(size=num), rng.uniform(5, 6, num)], 1)
    y = 50 + 10 * np.sin(X[:, 0] / 500) + 5 * X[:, 1] + rng.normal(size=num)
    return X, y


@pytest.fixture(scope="module")
def fit():
    X, y = table()
    return ogp.regression(X, np.where(np.arange(120) == 7, np.nan, y), **SMALL)


def test_it_predicts_in_the_units_of_y(fit):
    X, y = table(400)
    p = fit.predict(X[120:])
    assert np.sqrt(np.mean((p.mean - y[120:]) ** 2)) < 3
    lower, upper = p.interval(0.8)
    assert 0.7 < np.mean((lower < y[120:]) & (y[120:] < upper)) < 0.95
    assert p.log_density(y[120:]).mean() > -3 and (p.sd > p.function_sd).all()


def test_predictions_are_those_of_the_model_and_of_the_dense_oracle(fit):
    X = fit.X[:5]
    values, Z = fit.hyperparameters, fit.arguments["Z"]
    f = ogp.posterior(fit.model, fit.guide, fit.params, **{k: jnp.asarray(v) for k, v in fit.arguments.items()})["y"]
    np.testing.assert_allclose(fit.function(X).mean, f(jnp.asarray(X)).mean, rtol=1e-8)

    matern = oracles.matern52(values["scale"] ** 2, values["lengthscale"])

    def kernel(A, B):
        return matern(A, B) + values["slope"] ** 2 / A.shape[1] * A @ B.T

    # Titsias 2009, Eq. 6, which the tightened bound shares.
    Kuu, Kuf, s2 = kernel(Z, Z), kernel(Z, fit.X), values["noise"] ** 2
    mean = kernel(X, Z) @ np.linalg.solve(Kuu + Kuf @ Kuf.T / s2, Kuf @ fit.y) / s2
    np.testing.assert_allclose(fit.function(X).mean, mean, rtol=1e-3, atol=1e-3)


def test_any_number_of_rows_is_the_same_prediction(fit):
    X, _ = table()
    many = fit.predict(np.tile(X, (10, 1)))
    np.testing.assert_allclose(fit.predict(X[3][None]).mean, many.mean[123], rtol=1e-10)


def test_importance_and_page(fit):
    found = fit.importance()
    assert list(found)[-1] == "x2" and found["x2"] < 0.05 and found["x0"] > 0.3
    page = str(fit)
    assert "119 rows (1 without y left out), 3 columns, 30 inducing points" in page
    assert (
        "equal lengthscales; " in page and "lengthscales by relevance" in page and "by mean and sd of y alone" in page
    )
    assert "119 rows" in repr(fit)


def test_check_and_nuts_go_on_from_it(fit):
    report = fit.check(num_samples=30)
    assert "y" in report.functions and "points" in str(report)
    arguments = {name: jnp.asarray(value) for name, value in fit.arguments.items()}
    mcmc = MCMC(NUTS(fit.model, max_tree_depth=2), num_warmup=2, num_samples=2, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0), **arguments)
    assert set(mcmc.get_samples()) == set(fit.hyperparameters)


def test_lowest_loss_is_the_density_of_the_model(fit):
    """What the optimizer says is minus the model's log density at these hyperparameters."""
    num_held = fit.num_held
    stage = min(fit.found.stages, key=lambda s: s.loss)
    X, y = fit.X[num_held:], fit.y[num_held:]
    assert stage.num_rows == len(y) and stage.num_points == 30
    start = {"scale": np.array(1.0), "slope": np.array(0.3), "noise": np.array(0.3)}
    scales = np.full(3, 3**0.5) if stage.start == "equal lengthscales" else starts(X, y)[stage.start]["lengthscale"]
    Z = greedy_variance(kernel_of(start | {"lengthscale": scales}), jnp.asarray(X), 30)
    value, _ = log_density(fit.model, (), {"X": jnp.asarray(X), "y": jnp.asarray(y), "Z": Z}, fit.hyperparameters)
    np.testing.assert_allclose(stage.loss, -value, rtol=1e-8)


def test_never_worse_than_the_mean():
    rng = np.random.default_rng(3)
    X, y = rng.normal(size=(5000, 3)), rng.normal(size=5000)
    order, num_held = order_of(5000, 0)
    y[order[num_held:]] += 3 * X[order[num_held:], 0]  # what holds in training does not hold in the held-out rows
    fit = ogp.regression(X, y, **SMALL)
    assert fit.found.is_mean and "BETTER than the fit" in str(fit)
    p, held = fit.predict(X), y[order[:num_held]]  # as the rows that were left out are distributed
    assert np.ptp(p.mean) < 0.02 * fit.units.scale and np.ptp(p.sd) < 1e-3
    np.testing.assert_allclose(p.mean, held.mean(), atol=0.1)
    np.testing.assert_allclose(p.sd, held.std(), rtol=0.05)


@pytest.mark.parametrize("discards", [False, True])
def test_a_fit_is_discarded_for_y_alone_if_normals_and_mixtures_say_so(monkeypatch, discards):
    """One far row decides between normal distributions; the others are predicted well."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 1))
    z = 3.0 * rng.normal(size=200) if discards else np.append(0.1 * rng.normal(size=199), 60.0)

    def calibrated(parts, values, budget, own):
        return values, None, float(stats.norm.logpdf(z).mean()), z

    monkeypatch.setattr("numpyro_orthgp.tabular.left_out.calibrate", calibrated)
    fit = ogp.regression(X, np.sin(X[:, 0]) + 0.1 * rng.normal(size=200), **SMALL)
    assert stats.norm.logpdf(z).mean() < fit.found.baseline
    assert fit.found.is_mean == discards


def test_rows_left_out_have_searches_of_their_own_though_the_time_is_over(fit, monkeypatch):
    """Hyperparameters that have seen these rows would predict them too well."""
    late = Budget(1000.0, None, 1, begin=time.monotonic() - 2000.0)
    searches, searched = Searches(fit.X, fit.num_held, late), []
    found = SimpleNamespace(params={"noise_auto_loc": np.array(0.7)})
    monkeypatch.setattr(Searches, "fitted", lambda self, rows, *_: searched.append(rows.num) or found)
    monkeypatch.setattr("numpyro_orthgp.tabular.left_out.as_values", lambda params: fit.found.values)
    outputs = Outputs(fit.y, np.zeros(len(fit.y)), fit.units)
    with jax.enable_x64(True):
        finish(searches, fit.found.stages, fit.found.stages[0], Searched(fit.found.values, outputs), grows=False)
    assert searched == [len(fit.y) - len(fit.y) // 5] * 5 and searches.budget.allows(100.0)


def test_few_rows_are_all_left_out_to_see_whether_the_mean_is_better():
    """Ten held-out rows that are otherwise than the rest do not decide."""
    rng = np.random.default_rng(3)
    X, y = rng.normal(size=(119, 3)), rng.normal(size=119)
    order, num_held = order_of(119, 0)
    y[order[num_held:]] += 3 * X[order[num_held:], 0]
    fit = ogp.regression(X, y, **SMALL)
    assert not fit.found.is_mean and "all rows, left out a fifth at a time: log density" in str(fit)


def test_noise_that_held_out_rows_ask_for():
    """Outliers that training did not have."""
    X, y = table(5000)
    order, num_held = order_of(5000, 0)
    y[order[:num_held]] += 6 * np.where(np.arange(num_held) % 2, 1, -1)
    assert ogp.regression(X, y, **SMALL).hyperparameters["noise"] * y.std() > 2.5


def test_neighbours_where_points_are_too_few(monkeypatch):
    """Eight points for four waves: the rows near each input say more, and predictions take them; the model stays what it is."""
    rng = np.random.default_rng(3)
    X = rng.uniform(0, 1, (700, 1))
    y = 100 + 20 * np.sin(25 * X[:, 0]) + rng.normal(size=700)
    fit = ogp.regression(X[:500], y[:500], M=8, num_steps=40)
    assert fit.found.near.noise < fit.hyperparameters["noise"] and "32 rows nearest to each input" in str(fit)
    p, f = fit.predict(X[500:]), fit.function
    alone = fit.units.loc + fit.units.scale * np.asarray(f(jnp.asarray(fit.columns.encode(read_table(X[500:])))).mean)
    assert np.std(p.mean - y[500:]) < 0.6 * np.std(alone - y[500:])
    lower, upper = p.interval(0.8)
    assert 0.7 < np.mean((lower < y[500:]) & (y[500:] < upper)) < 0.95

    def interrupt(self, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(Budget, "watch", interrupt)
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C ends the call, not one search
        ogp.regression(X[:500], y[:500], M=8, num_steps=40)


def test_irrelevant_columns_are_no_trap():
    """As pumadyn32nm: from equal lengthscales all is noise."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(400, 25))
    y = np.sin(3 * X[:, 3]) + 0.1 * rng.normal(size=400)
    fit = ogp.regression(X[:300], y[:300], M=30, num_steps=60)
    assert np.sqrt(np.mean((fit.predict(X[300:]).mean - y[300:]) ** 2)) < 0.4
    assert next(iter(fit.importance())) == "x3"


def test_it_works_where_jax_has_32_bits(fit):
    X, y = table()
    with jax.enable_x64(False):
        again = ogp.regression(X, np.where(np.arange(120) == 7, np.nan, y), **SMALL)
        assert again.predict(X).mean.dtype == np.float64
    np.testing.assert_allclose(again.predict(X).mean, fit.predict(X).mean, rtol=1e-9)


def test_few_rows_of_which_a_fifth_is_left_out_in_turn():
    x = np.linspace(0, 6, 20)
    fit = ogp.regression(x, np.sin(x), M=50, num_steps=40)
    assert fit.num_held == 4 and len(fit.arguments["Z"]) == 20 and "left out a fifth at a time" in str(fit)
    np.testing.assert_allclose(fit.predict(x).mean, np.sin(x), atol=0.1)


def test_few_errors_widen_predictions_towards_their_spread():
    """Six errors of twice the stated spread, beside five that count as stated."""
    z = 2.0 * np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    assert distribution_of(z).scales[0] == pytest.approx(((5 + 24) / 11) ** 0.5)
    assert distribution_of(0.1 * z).is_standard  # never narrower
    assert distribution_of(np.tile(z, 100)).scales.max() > 1.9  # many are taken as they are


def test_of_few_rows_a_last_search_sees_all(monkeypatch):
    seen = []
    real = Searches.fitted
    monkeypatch.setattr(Searches, "fitted", lambda self, rows, *a: seen.append(rows.num) or real(self, rows, *a))
    x = np.linspace(0, 6, 20)
    ogp.regression(x, np.sin(x), M=50, num_steps=3)
    assert seen.count(20) == 1 and seen[-6:] == [20, *[16] * 5]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("unit", [1.0, 1e-12])
def test_outputs_that_are_a_formula_of_the_columns(rng, unit):
    """Their noise went to zero until the loss was -1e93, a rounding error, and searches warned that they stalled."""
    X = rng.normal(size=(150, 2))
    y = unit * (2 * X[:, 0] - 3 * X[:, 1] + 1)
    fit = ogp.regression(X[:100], y[:100], M=30, num_steps=100)
    assert all(s.status == "converged" and s.loss > -2000 for s in fit.found.stages)
    p = fit.predict(X[100:])
    np.testing.assert_allclose(p.mean, y[100:], atol=1e-8 * unit)
    assert 1e-5 < fit.noise < 1e-4 and p.log_density(y[100:]).mean() + np.log(y.std()) > 15


def test_noise_is_at_least_that_of_rounding():
    """Rows that recur with the same rounded output let it go to zero, and their neighbours were predicted far too surely."""
    x = np.repeat(np.linspace(0, 6, 40), 3)
    y = np.round(np.sin(x), 1)
    with pytest.warns(UserWarning, match="80 of 120 rows are copies of others"):
        fit = ogp.regression(x, y, M=20, num_steps=100)
    step = 0.1 / 12**0.5 / y.std()
    assert fit.noise >= step * (1 - 1e-12) and fit.hyperparameters["noise"] >= step * (1 - 1e-12)
    with jax.enable_x64(True):
        rows = Rows(fit.X, fit.y, np.arange(120) >= 20)
        parts = [LeftOut(fit.found.values, fit.found.Z[:10], rows, fit.X[:20], fit.y[:20], 0.7)]
        values, near, *_ = calibrate(parts, fit.found.values, Budget.of(None, 30, 40))
        _, variance, _ = parts[0].predicted(1.0)
    assert values["noise"] == 0.7 and (near is None or near.noise == 0.7) and (variance > 0.49).all()


@pytest.mark.parametrize("best", [0.3, 1.0, 3.0])
def test_no_factor_of_the_noise_is_tried_twice(fit, monkeypatch, best):
    """After a step down helped, the step up led back to the beginning: seconds for many points, when the time was over."""
    tried = []

    def scored(parts, factor=1.0, num_neighbors=0):
        tried.append((num_neighbors, round(factor, 6)))
        return -30 * np.log(factor / best) ** 2, np.linspace(-2, 2, 20)

    monkeypatch.setattr("numpyro_orthgp.tabular.left_out.scored", scored)
    rows = Rows(fit.X, fit.y, np.arange(120) >= 20)
    parts = [LeftOut(fit.found.values, fit.found.Z[:10], rows, fit.X[:20], fit.y[:20])]
    calibrate(parts, fit.found.values, Budget.of(None, 30, 40))
    assert len(set(tried)) == len(tried) and {n for n, _ in tried} == {0, 32}


def test_budgets():
    by_clock = Budget.of(60.0, None, None)
    assert by_clock.allows(1.0) and not by_clock.allows(61.0)
    assert Budget.of(60.0, 10, None).seconds is None and Budget.of(None, None, 7).num_steps == 7
    with pytest.raises(KeyboardInterrupt):
        Budget(1.0, None, 5, begin=by_clock.begin - 2).watch(None)
    for options, match in [
        ({"time": 0}, "`time` must be"),
        ({"M": 0}, "`M` must be"),
        ({"num_steps": 1.5}, "`num_steps` must be"),
    ]:
        with pytest.raises(ValueError, match=match):
            Budget.of(**({"time": None, "M": None, "num_steps": None} | options))


def test_a_third_of_the_time_is_left_for_what_comes_after_the_searches(monkeypatch):
    seen = {}

    def stage(self, num_points, name, begun):
        seen["search"] = self.budget
        return Stage(len(self.X), num_points, name, 0.0, "converged", 1, 0.0, 0.0, 0.0), begun

    monkeypatch.setattr(Searches, "stage", stage)
    budget = Budget.of(60.0, None, None)
    X = np.linspace(-1, 1, 40)[:, None]
    after, *_ = searching.search(X, [Outputs(X[:, 0], np.zeros(40), Units(0.0, 1.0))], 4, budget)
    assert after.budget is budget and (seen["search"].seconds, seen["search"].begin) == (40.0, budget.begin)
    assert not seen["search"].allows(41.0) and budget.allows(41.0)
    assert Budget.of(None, None, 7).part(0.75).seconds is None


@pytest.mark.parametrize(
    "gaps, sizes",
    [({100: 0.5, 400: 0.1, 800: 0.004}, [100, 400, 800]), ({100: 0.1, 200: 0.3, 800: 0.0}, [100, 200, 800])],
)
def test_how_many_points_come_next(gaps, sizes):
    """Four times as many while bounds are far apart, then twice, until they meet; none if they do at once."""

    def search(num_points, name, ended):
        return Stage(900, num_points, name, 0.0, "converged", 10, np.nan, gaps[num_points], 0.0), ended

    given = search, Budget.of(None, None, 5), 1000, 0, lambda num_points: 900
    stages, (last, _), pays = while_it_pays([search(100, "a start", None)], *given)
    assert [stage.num_points for stage in stages] == sizes and last.num_points == sizes[-1] and not pays
    gaps[100] = 0.001
    assert len(while_it_pays([search(100, "a start", None)], *given)[0]) == 1


@pytest.mark.parametrize("least, sizes", [(1.0, [100, 200, 400, 800, 1000]), (1e3, [100])])
def test_a_search_without_time_for_its_least_is_not_begun(least, sizes):
    """Though held-out rows gain by more points."""

    def search(num_points, name, ended):
        return Stage(900, num_points, name, 0.0, "finished", 10, np.log(num_points), np.nan, 0.0), ended

    def least_time(num_points):
        asked.append(num_points)
        return least

    asked = []
    given = search, Budget.of(60.0, None, None), 1000, 300, lambda num_points: 900, least_time
    found, *_ = while_it_pays([search(100, "a start", None)], *given)
    assert [stage.num_points for stage in found] == sizes and asked == [200, 400, 800, 1000][: len(asked)]


@pytest.mark.slow
def test_more_points_while_they_pay():
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 100, 600))
    fit = ogp.regression(x, np.sin(x) + np.sin(1.7 * x) + 0.1 * rng.normal(size=600), time=None, num_steps=30)
    sizes = [stage.num_points for stage in fit.found.stages]
    assert sizes[:3] == [100, 100, 400] and sizes == sorted(sizes) and fit.found.stages[-1].gap < 0.05


def test_a_fast_function_is_not_taken_for_noise():
    """Sixteen periods, of which neither lengthscales of a standard deviation nor ten bins see anything."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 100, 400)
    fit = ogp.regression(x[:300], np.sin(x[:300]), M=100, num_steps=40)
    assert min(fit.found.stages, key=lambda stage: stage.loss).start == "short lengthscales"
    assert np.sqrt(np.mean((fit.predict(x[300:]).mean - np.sin(x[300:])) ** 2)) < 0.3


def test_errors_that_rows_left_out_ask_for():
    """Heavy tails on one side: intervals hold what they say, and the mean is that of what comes."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, 1200)
    y = np.sin(x) + 0.2 * rng.exponential(size=1200) * np.where(rng.uniform(size=1200) < 0.1, 5, 1)
    fit = ogp.regression(x[:600], y[:600] - 1, M=20, num_steps=40)
    p, y = fit.predict(x[600:]), y[600:] - 1
    assert not fit.found.errors.is_standard and "normal distributions; half of the errors" in str(fit)
    for level in (0.5, 0.8, 0.95):
        lower, upper = p.interval(level)
        assert abs(np.mean((lower < y) & (y < upper)) - level) < 0.05
    assert abs(np.mean(p.cdf(y) < 0.1) - 0.1) < 0.04 and abs(np.mean(p.mean - y)) < 0.03
    assert not any("outliers" in line for line in fit.check(num_samples=25).advice)  # of which predictions know
    normal = stats.norm.logpdf((y - p.loc) / p.scale) - np.log(p.scale)
    assert p.log_density(y).mean() > normal.mean() + 0.2


def test_logarithms_of_what_is_positive_and_skewed(tmp_path):
    """Lengths, prices, times: errors are shares, not differences."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, 700)
    y = 1000 * np.exp(1.5 * np.sin(x) + 0.2 * rng.normal(size=700))
    fit = ogp.regression(x[:400], y[:400], M=20, num_steps=40)
    assert fit.units.is_log and "log y = f(x) + noise" in str(fit) and "mean and sd of log y alone" in str(fit)
    assert [stage.start for stage in fit.found.stages][-1] == "the logarithm of y"
    p, y = fit.predict(x[400:]), y[400:]
    exact = stats.lognorm(0.2, scale=1000 * np.exp(1.5 * np.sin(x[400:])))
    assert p.log_density(y).mean() > exact.logpdf(y).mean() - 0.05
    np.testing.assert_allclose(p.mean, exact.mean(), rtol=0.2)
    np.testing.assert_allclose(np.median(p.sd / exact.std()), 1, atol=0.15)
    lower, upper = p.interval(0.8)
    assert (lower > 0).all() and abs(np.mean((lower < y) & (y < upper)) - 0.8) < 0.08
    assert (p.log_density(-y) == -np.inf).all() and (p.cdf(-y) == 0).all()
    fit.save(tmp_path / "fit")
    np.testing.assert_array_equal(ogp.load(tmp_path / "fit").predict(x[400:]).quantile(0.9), p.quantile(0.9))
    # Losses compare: the other stages' are of the same outputs in their own units.
    plain = ogp.regression(x[:400], y.mean() - y[:1] + 0 * x[:400] + np.sin(x[:400]), M=20, num_steps=5)
    assert not plain.units.is_log and [stage.start for stage in plain.found.stages] == [
        "equal lengthscales"
    ]  # negative, so not tried


def test_losses_of_y_and_of_its_logarithm_compare():
    """Densities of the standardized outputs, whichever is modelled."""
    rng = np.random.default_rng(0)
    y = np.exp(rng.normal(2, 0.5, 50))
    for is_log, density in [
        (False, stats.norm(y.mean(), y.std())),
        (True, stats.lognorm(np.log(y).std(), 0, np.exp(np.log(y).mean()))),
    ]:
        values, log_slopes, units, _ = Units.of(y, is_log).standardized(y)
        np.testing.assert_allclose(
            stats.norm.logpdf(values) + log_slopes, density.logpdf(y) + np.log(y.std()), rtol=1e-10
        )
        assert abs(values.mean()) < 1e-12 and units.is_log == is_log


def test_rows_left_out_are_as_if_they_were_not_there(fit):
    """One shape of programs serves all: rows that are not observed take no part."""
    values, Z, X = fit.hyperparameters, fit.found.Z, jnp.asarray(fit.X[:7])
    seen = np.arange(len(fit.y)) % 3 > 0
    with jax.enable_x64(True):
        f = function_of(values, Rows(fit.X, np.where(seen, fit.y, 1e3), seen), Z)(X)
        g = function_of(values, Rows(fit.X[seen], fit.y[seen]), Z)(X)
        np.testing.assert_allclose(f.mean, g.mean, rtol=1e-9)
        np.testing.assert_allclose(f.variance, g.variance, rtol=1e-7)
        points = Rows(fit.X, fit.y, seen).points(values, 30)
        np.testing.assert_array_equal(points, Rows(fit.X[seen], fit.y[seen]).points(values, 30))


def test_a_small_table_takes_few_programs(fit, monkeypatch):
    """Searches of all starts and of all rows that are left out share theirs."""
    sizes = set()
    monkeypatch.setattr(
        Searches,
        "fitted",
        lambda self, rows, Z, start, old=Searches.fitted: (
            sizes.add((rows.X.shape, Z.shape)) or old(self, rows, Z, start)
        ),
    )
    X, y = table()
    ogp.regression(X, y, M=40, num_steps=2)
    assert sizes == {((120, 3), (40, 3))}


def test_distances_of_rows_left_out(fit):
    """A fifth of the rows at a time, each predicted by the others, at the noise that is most likely of a few."""
    values = fit.hyperparameters
    parts = [
        LeftOut(values, fit.found.Z, Rows(fit.X, fit.y, ~new), fit.X[new], fit.y[new]) for new in folds(len(fit.y))
    ]
    found, _, score, z = calibrate(parts, values, Budget.of(None, 30, 40))
    known = np.setdiff1d(np.arange(119), np.arange(23, 46))
    f = function_of(found, Rows(fit.X[known], fit.y[known]), fit.found.Z)(jnp.asarray(parts[1].X_new))
    sd = np.sqrt(np.asarray(f.variance) + found["noise"] ** 2)
    np.testing.assert_allclose(z[23:46], (fit.y[23:46] - f.mean) / sd, rtol=1e-6)
    assert len(z) == 115 and score > -0.5


def test_hyperparameters_have_not_seen_what_is_left_out(monkeypatch):
    """Many columns and few rows: hyperparameters find relations that are none, and distances from predictions by such as have seen
    all rows are too short. Those of rows that they have not seen are as those of new rows, or longer: there are fewer to go by."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1060, 25))
    y = X[:, 0] + rng.normal(size=1060)
    taken = []
    monkeypatch.setattr(
        "numpyro_orthgp.tabular.left_out.calibrate", lambda *args: taken.extend(args[:2]) or calibrate(*args)
    )
    fit = ogp.regression(X[:60], y[:60], M=60, num_steps=60)
    parts, values = taken
    assert len(parts) == 5 and all(len(part.y_new) == 12 and part.rows.num == 48 for part in parts)

    def typical(parts):
        found = [part.predicted(1.0) for part in parts]
        return np.sqrt(np.mean([(y - mean) ** 2 / variance for mean, variance, y in found]))

    seen = typical([part._replace(values=values) for part in parts])
    left_out = typical(parts)
    columns = fit.columns.encode(read_table(X[60:]))
    new = typical(
        [LeftOut(values, fit.found.Z, everything(fit.X, fit.y, 6), columns, (y[60:] - fit.units.loc) / fit.units.scale)]
    )
    assert seen < 0.9 * new < new < 1.05 * left_out, (seen, new, left_out)
