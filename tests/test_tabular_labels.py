"""Labels and counts in one call: how they are read and given back, what is found, and what lies beneath."""

from __future__ import annotations

import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpyro.infer import MCMC, NUTS, SVI, TraceMeanField_ELBO
from scipy import special, stats

import numpyro_orthgp as ogp
from numpyro_orthgp.likelihoods import Bernoulli, Categorical, NegativeBinomial
from numpyro_orthgp.tabular import latent
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.classification import sharpened
from numpyro_orthgp.tabular.columns import read_table
from numpyro_orthgp.tabular.families import one_rate
from numpyro_orthgp.tabular.labels import Labels
from numpyro_orthgp.tabular.latent import LEAST_STEPS, USUAL_STEPS, LatentSearch
from numpyro_orthgp.tabular.models import classification_model
from numpyro_orthgp.tabular.pace import Pace
from numpyro_orthgp.tabular.predicted_counts import CountPredictions
from numpyro_orthgp.tabular.rows import observed_counts, order_of, order_of_classes, positive_column
from numpyro_orthgp.tabular.stages import Stage
from numpyro_orthgp.tabular.strays import NONE

SMALL = {"M": 20, "num_steps": 60}


def table(num: int):
    rng = np.random.default_rng(0)
    X = np.stack([50 * rng.normal(size=num), rng.uniform(5, 6, num)], 1)
    return X, X[:, 0] / 50, rng


@pytest.fixture(scope="module")
def two():
    X, z, rng = table(150)
    y = np.where(z + 0.2 * rng.normal(size=150) > 0, "yes", "no").astype(object)
    y[7] = None
    return X, y, ogp.classification(X, y, **SMALL)


@pytest.fixture(scope="module")
def three():
    X, z, _ = table(150)
    y = np.digitize(z, [-0.5, 0.5]) + 5
    return X, y, ogp.classification(X, y, **SMALL)


@pytest.fixture(scope="module")
def many():
    X, z, rng = table(200)
    exposure = rng.uniform(0.5, 20, 200)
    y = rng.poisson(exposure * np.exp(0.5 + z) * rng.gamma(2.0, 0.5, 200))
    return X, y, exposure, ogp.counts(X, y, exposure, **SMALL)


# ---------------------------------------------------------------- labels


def read(y):
    labels, codes, seen = Labels.read(y, len(y))
    return labels, labels.give_back(codes), seen


@pytest.mark.parametrize(
    "values",
    [
        np.array(["b", "a"] * 6),
        np.array([True, False] * 6),
        np.array([3, -1] * 6, np.int8),
        np.array([1.0, 2.0] * 6, np.float32),
    ],
)
def test_labels_come_back_as_they_came(values):
    labels, back, seen = read(values)
    assert back.dtype == values.dtype and seen.all()
    np.testing.assert_array_equal(back, values)
    np.testing.assert_array_equal(labels.classes, np.unique(values))


def test_missing_labels_and_objects():
    _, back, seen = read(np.array([None, float("nan"), *["x", "y"] * 6], object))
    assert back.dtype == object and back.tolist() == ["x", "y"] * 6 and seen.tolist() == [False] * 2 + [True] * 12
    _, back, _ = read(np.array([True, None, *[False] * 12], object))
    assert back.dtype == bool and back.sum() == 1
    _, _, seen = read(np.array([np.nan, *[0.0, 1.0] * 6], np.float32))
    assert not seen[0]


def test_labels_of_pandas():
    pd = pytest.importorskip("pandas")
    y = pd.Series(pd.Categorical(["low", "high"] * 6, categories=["low", "mid", "high"], ordered=True))
    labels, back, _ = read(y)
    assert labels.classes.tolist() == ["low", "high"] and back.dtype == y.dtype and list(back) == list(y)
    labels, back, seen = read(pd.Series(["u", None, *["v"] * 11], dtype="string"))
    assert back.tolist() == ["u"] + ["v"] * 11 and seen.sum() == 12
    _, back, _ = read(pd.Series([1, None, *[2] * 11], dtype="Int64"))
    assert back.dtype.kind == "i"


@pytest.mark.parametrize(
    "y, error, match",
    [
        (["a"] * 12, ValueError, "All labels are .*'a'.*nothing to learn"),
        (["a", "b"], ValueError, "At least 10 labels are needed; got 2"),
        (np.linspace(0, 1, 12), ValueError, "12 different numbers with fractions.*ogp.regression"),
        (list(range(12)), ValueError, "12 classes for 12 labels are too many"),
        (np.array(["a", 1] * 6, object), TypeError, "all text.*got numbers and text"),
        (np.array([b"a", "b"] * 6, object), TypeError, "got bytes and text"),
        (np.zeros(12, "datetime64[s]"), TypeError, "Labels must be text"),
        (np.zeros((12, 2)), ValueError, r"shape \(12,\)"),
    ],
)
def test_labels_that_are_refused(y, error, match):
    with pytest.raises(error, match=match):
        Labels.read(y, len(y))


def test_rare_classes_are_held_out_and_seen():
    codes = np.array([0] * 400 + [1] * 4 + [2])
    order, num_held = order_of_classes(codes, 0)
    assert sorted(order) == list(range(405)) and 38 <= num_held <= 44
    held, seen = codes[order[:num_held]], codes[order[num_held:]]
    assert (held == 1).sum() == 1 and (held == 2).sum() == 0 and set(seen) == {0, 1, 2}
    assert not np.array_equal(order, order_of_classes(codes, 1)[0])
    assert order_of_classes(codes[:30], 0)[1] == 0


# ---------------------------------------------------------------- classification


def test_it_finds_the_boundary_and_gives_labels_back(two):
    X, y, fit = two
    known = y != None  # noqa: E711
    p = fit.predict(X)
    assert (p.label[known] == y[known]).mean() > 0.9 and p.label.dtype == object
    np.testing.assert_allclose(p.probabilities.sum(-1), 1, rtol=1e-12)
    assert fit.classes.tolist() == ["no", "yes"] == p.classes.tolist()
    scores = p.log_density(np.where(known, y, "no"))
    np.testing.assert_allclose(scores, np.log(p.probabilities[np.arange(150), (y == "yes").astype(int)]))
    with pytest.raises(ValueError, match="holds 'maybe', a label that training did not have; it had no, yes"):
        p.log_density(["maybe"] * 150)
    page = str(fit)
    assert "149 rows (1 without y left out)" in page and "probit" in page and "shares of the classes alone" in page
    assert next(iter(fit.importance())) == "x0"


@pytest.mark.parametrize("which", ["two", "three"])
def test_probabilities_are_those_of_posterior_and_likelihood(which, request):
    X, _, fit = request.getfixturevalue(which)
    given = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in fit.arguments.items()}
    f = ogp.posterior(fit.model, fit.guide, fit.params, **given)["f"]
    marginals = f(jnp.asarray(fit.columns.encode(read_table(X)))) + fit.hyperparameters["offset"]
    if which == "two":
        m, v = np.asarray(marginals.mean), np.asarray(marginals.variance)
        expected = np.stack([special.ndtr(-m / np.sqrt(1 + v)), special.ndtr(m / np.sqrt(1 + v))], -1)
        np.testing.assert_allclose(Bernoulli(marginals, "probit").mean, expected[:, 1])
    else:
        expected = Categorical(marginals).probs
    found = sharpened(np.asarray(expected), fit.shares, fit.found.sharpness)
    np.testing.assert_allclose(fit.predict(X).probabilities, found, rtol=1e-8)


def test_loss_is_the_bound_of_the_model(two):
    """The last loss of the fit is near minus the bound, of all rows, at the parameters that are returned."""
    fit = two[2]
    svi = SVI(fit.model, fit.guide, ogp.natural_gradient(optax.adam(0.1), 0.1), TraceMeanField_ELBO())
    given = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in fit.arguments.items()}
    state = svi.init(jax.random.PRNGKey(0), init_params=jax.tree.map(jnp.asarray, fit.params), **given)
    np.testing.assert_allclose(float(svi.evaluate(state, **given)), fit.found.losses[-1], atol=0.2)


def test_more_classes_and_nuts(three):
    X, y, fit = three
    p = fit.predict(X)
    assert (p.label == y).mean() > 0.9 and p.label.dtype == y.dtype and p.probabilities.shape == (150, 3)
    assert list(p.frame()) == ["label", "P(5)", "P(6)", "P(7)"]
    assert "softmax" in str(fit) and "5 (" in str(fit)
    report = fit.check(num_samples=30)
    assert "f" in report.functions and report.convergence is not None
    given = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in fit.arguments.items()}
    mcmc = MCMC(NUTS(fit.model, max_tree_depth=1), num_warmup=1, num_samples=1, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0), **given)
    assert set(mcmc.get_samples()) == {*fit.hyperparameters, "f.u0"}


def test_tables_with_categories():
    pd = pytest.importorskip("pandas")
    X, z, _ = table(60)
    frame = pd.DataFrame({"a": X[:, 0], "t": np.where(z > 1, "u", "v")}, index=[f"r{i}" for i in range(60)])
    y = pd.Series(pd.Categorical(np.where(z > 0, "high", "low"), categories=["low", "high", "never"]))
    fit = ogp.classification(frame, y, M=10, num_steps=40)
    found = fit.predict(frame).frame()
    assert list(found.index) == list(frame.index) and list(found.columns) == ["label", "P(low)", "P(high)"]
    assert found["label"].dtype == y.dtype and (found["label"].to_numpy() == y.to_numpy()).mean() > 0.9


def test_a_check_of_few_steps_says_nothing_of_its_losses(rng):
    """It raised an error about `losses`, which nobody had passed."""
    X = rng.normal(size=(40, 1))
    fit = ogp.classification(X, X[:, 0] > 0, M=5, num_steps=10)
    assert 1 < len(fit.found.losses) < 20 and fit.check(num_samples=30).convergence is None


def test_never_worse_than_the_shares_of_the_classes():
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(119, 2)), np.r_[np.zeros(60, int), np.ones(59, int)]
    order, num_held = order_of_classes(y, 0)
    sign = np.where(np.arange(119) < num_held, -1, 1)  # what holds in training does not hold in the held-out rows
    X[order, 0] = sign * (2 * y[order] - 1) + 0.3 * rng.normal(size=119)
    fit = ogp.classification(X, y, M=10, num_steps=30)
    assert fit.found.is_mean and "BETTER than the fit" in str(fit)
    np.testing.assert_allclose(fit.predict(X).probabilities, np.tile(fit.shares, (119, 1)), rtol=1e-12)


def test_never_worse_than_one_rate():
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(119, 2)), rng.poisson(3.0, 119)
    order, num_held = order_of(119, 0)
    y[order[num_held:]] = rng.poisson(np.exp(1 + X[order[num_held:], 0]))
    y[order[:num_held]] = rng.poisson(np.exp(1 - X[order[:num_held], 0]))
    fit = ogp.counts(X, y, M=10, num_steps=40)
    assert fit.found.is_mean and "BETTER than the fit" in str(fit)
    np.testing.assert_allclose(fit.predict(X).mean, y[order[num_held:]].mean(), rtol=0.01)


def test_sharpness():
    p, shares = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0.7, 0.3])
    np.testing.assert_allclose(sharpened(p, shares, 0.0), np.tile(shares, (2, 1)))
    assert sharpened(p, shares, 1.0) is p
    expected = p**0.5 * shares**0.5
    np.testing.assert_allclose(sharpened(p, shares, 0.5), expected / expected.sum(-1, keepdims=True))


# ---------------------------------------------------------------- counts


def test_counts_with_exposure(many):
    X, y, exposure, fit = many
    assert fit.overdispersed and "negative binomial" in str(fit) and "one rate for all rows alone" in str(fit)
    p = fit.predict(X, exposure)
    rate = exposure * np.exp(0.5 + X[:, 0] / 50)
    assert np.corrcoef(np.log(p.mean), np.log(rate))[0, 1] > 0.95
    lower, upper = p.interval(0.8)
    assert 0.75 < np.mean((lower <= y) & (y <= upper)) < 0.97
    np.testing.assert_allclose(fit.predict(X, 2.0).mean, 2 * fit.predict(X).mean, rtol=1e-10)
    assert set(p.frame()) == {"mean", "sd", "lower", "upper"}


def test_distributions_of_counts_are_those_of_the_likelihood(many):
    X, y, exposure, fit = many
    p = fit.predict(X[:6], exposure[:6])
    given = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in fit.arguments.items()}
    f = ogp.posterior(fit.model, fit.guide, fit.params, **given)["f"]
    marginals = f(jnp.asarray(fit.columns.encode(read_table(X[:6])))) + fit.hyperparameters["offset"]
    k = fit.hyperparameters["concentration"]
    likelihood = NegativeBinomial(marginals, k, fit.rate * exposure[:6])
    np.testing.assert_allclose(p.mean, likelihood.mean, rtol=1e-8)
    np.testing.assert_allclose(p.sd, np.sqrt(likelihood.variance), rtol=1e-8)
    assert p.strays.weight == 0.5 / (len(fit.y) + 1)
    p = replace(p, strays=NONE)
    np.testing.assert_allclose(p.log_density(y[:6]), likelihood.log_predictive(jnp.asarray(y[:6])), rtol=1e-7)
    # A dense sum of the mixture is the distribution function, and quantiles are its steps.
    t, w = special.roots_hermitenorm(60)
    rates = np.exp(p.log_mean[:, None] + p.log_sd[:, None] * t)
    cdf = stats.nbinom.cdf(y[:6, None], k, k / (k + rates)) @ w / w.sum()
    np.testing.assert_allclose(p.cdf(y[:6]), cdf, atol=1e-4)
    median = p.quantile(0.5)
    assert (p.cdf(median) >= 0.5).all() and (p.cdf(median - 1) < 0.5).all() and (p.cdf(np.full(6, -1.0)) == 0).all()


def test_poisson_counts_stay_poisson():
    X, z, rng = table(200)
    y = rng.poisson(np.exp(1 + z))
    fit = ogp.counts(X, y, M=15, num_steps=60)
    assert not fit.overdispersed and "Poisson counts" in str(fit) and "concentration" not in fit.hyperparameters
    p = fit.predict(X)
    assert np.isinf(p.concentration) and (p.quantile([0.1, 0.9])[:, 0] <= p.quantile(0.9)).all()
    report = fit.check(num_samples=30)
    assert "f" in report.functions


def test_one_rate_is_the_most_likely(rng):
    expected = rng.uniform(1, 5, 4000)
    y = rng.negative_binomial(2.0, 2.0 / (2.0 + 3.0 * expected))
    rate, k, zeros = one_rate(y, expected)
    np.testing.assert_allclose([rate, k], [3.0, 2.0], rtol=0.1)
    assert zeros == 0


@pytest.mark.parametrize(
    "y, match",
    [
        ([1.5] * 12, "whole numbers; got 1.5.*`exposure`"),
        ([-1] * 12, "cannot be negative; got -1.*ogp.regression"),
        ([0] * 12, "All counts are 0"),
        ([1, 2], "At least 10 counts"),
        ([np.inf] * 12, "infinite"),
    ],
)
def test_counts_that_are_refused(y, match):
    with pytest.raises(ValueError, match=match):
        observed_counts(y, len(y))


def test_exposures():
    np.testing.assert_array_equal(positive_column("exposure", None, 3), 1.0)
    np.testing.assert_array_equal(positive_column("exposure", 2, 3), 2.0)
    for bad in ([1.0, 0.0], [1.0, np.nan], -1.0):
        with pytest.raises(ValueError, match="`exposure` must be positive"):
            positive_column("exposure", bad, 2)
    with pytest.raises(ValueError, match=r"`exposure` must have shape \(2,\)"):
        positive_column("exposure", [1.0], 2)
    with pytest.raises(TypeError, match="`exposure` must be numbers"):
        positive_column("exposure", ["a", "b"], 2)


def test_a_search_leaves_its_start_though_compilation_takes_the_time():
    """One search of enough steps, instead of several of one step each."""
    X, z, rng = table(150)
    for fit in (
        ogp.counts(X, rng.poisson(np.exp(1 + z)), time=1e-3),
        ogp.classification(X, z > 0, time=1e-3),
    ):
        (stage,) = fit.found.stages
        assert stage.status == "interrupted" and stage.num_steps == LEAST_STEPS and not fit.found.is_mean


class Ran:
    """The result of a fit that moved nothing."""

    params: dict = {}
    losses = np.zeros(1)


def stage_of(num_points, num_steps, loss=0.0):
    return Stage(15, num_points, "", loss, "finished", num_steps, np.nan, np.nan, 1.0)


def search_of(seconds, num_held=15, **options):
    X, z, _ = table(150)
    data, budget = {"X": X, "y": (z > 0).astype(int)}, Budget(seconds, None, USUAL_STEPS)
    return LatentSearch(classification_model, data, {"num_classes": 2}, num_held, budget, [], np.zeros, **options)


def test_a_search_has_the_steps_that_its_time_allows():
    """The rate falls to its end within the time."""

    def steps(seconds, per_step, num_points):
        search = search_of(seconds)
        search.pace = Pace(per_step / 100**2, 7.0)  # seconds of a step with 100 points, and of a start
        return search.steps_for(num_points), search.least_time(num_points)

    # 15 % of the 90 s that are for searches; two starts, as 135 rows are fewer than a batch, and a hundred steps
    assert steps(100.0, 0.1, 100) == (135, pytest.approx(24))
    assert steps(100.0, 0.1, 200) == (pytest.approx(225, abs=1), pytest.approx(54))  # all of them, at 0.4 s a step
    assert steps(100.0, 1e-4, 100)[0] == USUAL_STEPS
    assert steps(100.0, 0.6, 100)[0] == LEAST_STEPS
    assert steps(100.0, 10.0, 400)[0] == latent.CALL  # fifty would take more than two hours
    assert steps(None, 10.0, 400)[0] == USUAL_STEPS


def test_the_pace_of_a_search_is_that_of_its_later_calls():
    pace = Pace()
    assert pace.seconds(10, 5) == 0 and pace.steps(1.0, 5, 30) == 30
    pace.learn([(10, 8.0)], 5)
    assert np.isnan(pace.per_step)
    pace.learn([(10, 8.0), (20, 9.0), (30, 10.0)], 5)
    assert (pace.start, pace.seconds(10, 5), pace.seconds(10, 10)) == pytest.approx((7.0, 1.0, 4.0))
    assert [pace.steps(seconds, 10, 30) for seconds in (-1.0, 4.1, 100.0)] == [0, 10, 30]
    pace.learn([(10, 3.0), (30, 5.0)], 5)  # compiled before
    assert pace.start == pytest.approx(7.0)


def test_the_last_fit_has_the_steps_that_are_left(monkeypatch):
    """Half of those of the best search, but no more than its time allows."""
    given = []
    monkeypatch.setattr(LatentSearch, "trained", lambda self, *args, **options: given.append(args[3]) or Ran())
    for seconds in (100.0, 12.0, 1.0, None):
        search = search_of(seconds)
        search.pace, search.best_stage = Pace(0.1 / 100**2, 7.0), stage_of(100, 120)
        search.on_all_rows({"Z": np.zeros((100, 1)), "params": {}})
    assert given == [60, pytest.approx(49, abs=1), pytest.approx(1, abs=1), 60]


@pytest.mark.parametrize(
    "num_steps, seconds, goes_on", [(60, 100.0, True), (USUAL_STEPS, 100.0, False), (60, 8.0, False)]
)
def test_the_best_of_short_searches_goes_on(monkeypatch, num_steps, seconds, goes_on):
    """If there is time for more steps than it had."""
    search = search_of(seconds)
    search.pace = Pace(0.2 / 10**2)
    tried = [(stage_of(10, num_steps, loss), {"of": loss}) for loss in (2.0, 1.0)]
    monkeypatch.setattr(LatentSearch, "stage", lambda self, *args, **options: (args, options))
    assert search.longer(tried)[:2] == tried
    more = [(args[0], args[2]["of"], options) for args, options in search.longer(tried)[2:]]
    assert more == ([(10, 1.0, {"goes_on": True})] if goes_on else [])


def test_a_search_that_goes_on_begins_where_the_other_ended(monkeypatch):
    class Begun(Exception):
        pass

    def trained(self, data, Z, start, num_steps, rate, **options):
        raise Begun(Z, start, num_steps)

    monkeypatch.setattr(LatentSearch, "trained", trained)
    search = search_of(100.0)
    search.pace = Pace(0.45 / 10**2)
    ended = {"values": {}, "Z": np.full((10, 1), 0.123), "params": {"of": "the other"}}
    with pytest.raises(Begun) as begun:
        search.stage(10, "more", ended, goes_on=True)
    Z, start, num_steps = begun.value.args
    assert Z is ended["Z"] and start is ended["params"] and num_steps == pytest.approx(200, abs=1)


@pytest.mark.parametrize(
    "seconds, per_step, num_held, single",
    [
        (100.0, 0.1, 15, True),
        (100.0, 0.089, 15, False),
        (100.0, 0.1, 0, False),
        (None, 9.0, 15, False),
        (30.0, 9.0, 15, False),
    ],
)
def test_searches_take_float32_where_time_is_short(seconds, per_step, num_held, single):
    """If a first search has time for fewer than half of its steps, and another program for time to compile."""
    for may in (True, False):
        search = search_of(seconds, num_held, may_be_single=may)
        search.pace = Pace(per_step / 100**2, 27.5)
        search.choose_precision(100)
        assert (search.single is not None) == (single and may)


def test_steps_that_take_long_are_fewer():
    """A hundred classes: fifty steps and ten of the last fit took five times as long as the time."""
    data = {"X": np.zeros((400, 1)), "y": np.zeros(400, int)}

    def searching(seconds, num_functions):
        given = data, {}, 40, Budget(seconds, None, 300), [data["y"]] * num_functions, lambda *_: np.zeros(40)
        return LatentSearch(classification_model, *given)

    assert searching(20.0, 25).share == 1 and searching(20.0, 100).share == 0.25
    search = searching(20.0, 100)
    for per_step, num in ((1e-3, 300), (0.01, 270), (0.1, LEAST_STEPS), (0.2, 36), (5.0, latent.CALL)):
        search.pace = Pace(per_step / 50**2)
        assert search.steps_for(50) == pytest.approx(num, abs=1)


def test_a_search_in_float32(monkeypatch):
    """Its parameters mean the same in float64, where the last fit goes on. One that diverges is made again in float64."""
    _, z, rng = table(400)
    data = {"X": z[:, None], "y": (z + 0.3 * rng.normal(size=400) > 0).astype(int)}  # near points in one column
    none = Budget(None, 80, 30)
    search = LatentSearch(
        classification_model, data, {"num_classes": 2}, 40, none, [z], lambda f, v, rows: np.zeros(40)
    )
    with jax.enable_x64(True):
        start, *_ = search.in_order([data["X"]])[0][1].values()
        in_double, _ = search.stage(80, "", {"values": start})
        search.single = Pace()
        stage, ended = search.stage(80, "", {"values": start})
        assert {a.dtype for a in ended["params"].values()} == {np.dtype(np.float64)}
        assert stage.loss != in_double.loss and stage.loss == pytest.approx(in_double.loss, abs=0.5)
        f = search.function(ended["params"], ended["Z"])(data["X"])
        with jax.enable_x64(False):
            search.data, params, Z = jax.tree.map(latent.as_single, (data, ended["params"], ended["Z"]))
            same = search.function(params, Z)(search.data["X"])
        assert same.mean.dtype == np.float32
        np.testing.assert_allclose(f.mean, same.mean, atol=2e-3)
        np.testing.assert_allclose(f.variance, same.variance, atol=2e-3)
        result = search.trained(data, ended["Z"], ended["params"], 20, 1e-3, is_last=True)
        assert result.losses.dtype == np.float64 and search.single is not None
        run = LatentSearch.run

        def diverges(self, given, *args, **options):
            result = run(self, given, *args, **options)
            return result if given[0]["X"].dtype == np.float64 else result._replace(status="diverged")

        monkeypatch.setattr(LatentSearch, "run", diverges)
        again = search.trained(data, ended["Z"], ended["params"], 20, 1e-3)
        assert again.status == "finished" and search.single is None


def test_inducing_points_move(monkeypatch):
    """They are no rows of the table where a search ends, and its bound is higher than where they stay."""
    X = np.random.default_rng(0).normal(size=(300, 2))
    y = (X**2).sum(1) > 1.4
    moved = ogp.classification(X, y, M=12, num_steps=100)
    monkeypatch.setattr(latent, "moving_points", lambda model: model)
    fixed = ogp.classification(X, y, M=12, num_steps=100)
    ends = [min(stage.loss for stage in fit.found.stages) for fit in (moved, fixed)]
    assert ends[0] < ends[1] - 10
    far = [np.abs(fit.found.Z[:, None] - fit.X).sum(-1).min(1).max() for fit in (moved, fixed)]
    assert far[0] > 0.01 and far[1] < 1e-12
    assert "shift" not in moved.params


@pytest.mark.parametrize("k", [np.inf, 0.5, 20.0])
def test_probabilities_of_counts_by_as_few_nodes_as_suffice(monkeypatch, k):
    """Intervals for many rows take seconds otherwise, and not minutes."""
    log_mean, log_sd = np.linspace(-3, 5, 50), np.full(50, 0.2)
    p = CountPredictions(log_mean, log_sd, k, lambda *_: log_mean)
    name = "pdtr" if np.isinf(k) else "betainc"
    evaluate, sizes = getattr(special, name), []

    def counted(*args):
        found = evaluate(*args)
        sizes.append(found.size)
        return found

    monkeypatch.setattr(special, name, counted)
    y = np.floor(p.mean)
    found = p.cdf(y)
    assert max(sizes) < 150 * len(y)  # of 401 nodes
    z, weights = np.polynomial.hermite_e.hermegauss(200)
    rate = np.exp(log_mean[:, None] + 0.2 * z)
    given = stats.poisson.cdf(y[:, None], rate) if np.isinf(k) else stats.nbinom.cdf(y[:, None], k, k / (k + rate))
    np.testing.assert_allclose(found, given @ weights / weights.sum(), atol=1e-7)


def test_fast_functions_are_not_taken_for_noise():
    """Sixteen periods, of which lengthscales of a standard deviation see nothing."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 100, 400)
    labels = ogp.classification(x[:300], np.where(np.sin(x[:300]) > 0, "up", "down"), M=80, num_steps=100)
    assert {stage.start for stage in labels.found.stages} == {"equal lengthscales", "short lengthscales"}
    assert np.mean(labels.predict(x[300:]).label == np.where(np.sin(x[300:]) > 0, "up", "down")) > 0.85


def test_choices_of_held_out_rows_share_their_probabilities(rng, monkeypatch):
    """They were computed anew for each of eleven powers."""
    module, computed = importlib.import_module("numpyro_orthgp.tabular.classification"), []
    compute = module.probabilities_of
    monkeypatch.setattr(module, "probabilities_of", lambda *given: computed.append(1) or compute(*given))
    X = rng.normal(size=(60, 2))
    fit = ogp.classification(X, X[:, 0] > 0, M=5, num_steps=10)
    assert len(computed) == len(fit.found.stages) + 1
