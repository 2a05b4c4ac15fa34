"""Numbers that disagree are said: rows of the data beside the plate's N, and numbers that their dtype does not resolve."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.random import PRNGKey
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.math.resolution import coarse_columns

N = 20
RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(N, 1)), RNG.normal(size=N)


def fit(observe, batch_size=5, arrays=DATA, **options):
    """One step, and the warnings of ours that it gave."""

    def model(X, y):
        observe(numpyro.sample("w", dist.Normal(0.0, 1.0)), X, y)

    def guide(X, y):
        numpyro.sample("w", dist.Normal(numpyro.param("loc", 0.0), 0.1))

    svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"num_steps": 1, "progress_bar": False} | options
        result = ogp.fit(svi, PRNGKey(0), arrays, batch_size=batch_size, **options)
    return result, [str(w.message) for w in caught if "counts its" in str(w.message)]


def in_plate(size, subsample=None, **options):
    def observe(w, X, y):
        with numpyro.plate("d", size, subsample_size=subsample or len(X), **options):
            numpyro.sample("y", dist.Normal(w, 1.0), obs=y)

    return observe


def nested(size, last=False):
    """Two plates of which one scales columns: never to be taken for the rows."""

    def observe(w, X, y):
        with numpyro.plate("columns", 100, subsample_size=3, dim=-2 if last else -1):
            with numpyro.plate("rows", size, subsample_size=len(X), dim=-1 if last else -2):
                values = jnp.broadcast_to(y, (3, len(y)))
                numpyro.sample("y", dist.Normal(w, 1.0), obs=values if last else values.T)

    return observe


def scaled(by):
    def observe(w, X, y):
        with handlers.scale(scale=by(len(X))):
            numpyro.sample("y", dist.Normal(w, 1.0).expand([len(y)]).to_event(1), obs=y)

    return observe


def in_scope(size):
    inner = in_plate(size)
    return lambda *args: handlers.scope(inner, "part")(*args)


def two_outputs(first, second):
    """As of two data sets that each have a plate."""

    def observe(w, X, y):
        for name, size in (("a", first), ("b", second)):
            with numpyro.plate("rows_" + name, size, subsample_size=len(X)):
                numpyro.sample(name, dist.Normal(w, 1.0), obs=y)

    return observe


def of_rows_and_others(w, X, y):
    """Five inducing features of fifty, say, have nothing to do with the five rows of a batch."""
    with numpyro.plate("d", N, subsample_size=len(X)):
        with numpyro.plate("features", 50, subsample_size=5):
            numpyro.sample("y", dist.Normal(w, 1.0), obs=jnp.broadcast_to(y, (5, len(y))))


@pytest.mark.parametrize(
    "observe, counted",
    [
        (in_plate(40), "`y` counts its {B} observations as 40 .*`data` has 20 rows: the fit would be too certain"),
        (nested(40), "`y` counts its {B} observations as 40"),
        (nested(40, last=True), "`y` counts its {B} observations as 40"),
        (in_scope(40), "`part/y` counts its {B} observations as 40"),
        (two_outputs(20, 30), "`b` counts its {B} observations as 30"),
    ],
)
@pytest.mark.parametrize("batch_size", [5, None])
def test_plates_that_disagree_with_the_data(observe, counted, batch_size):
    _, said = fit(observe, batch_size)
    assert len(set(said)) == 1
    with pytest.raises(AssertionError, match=counted.format(B=batch_size or N)):
        raise AssertionError(said[0])


def test_fewer_rows_than_there_are():
    _, said = fit(in_plate(10))
    assert "as 10 (the size of a plate, or a scale), but `data` has 20 rows: the fit would be too uncertain" in said[0]
    assert "numpyro.plate('data', 20, subsample_size=5)" in said[0] and "fit(..., stands_for=10)" in said[0]
    _, said = fit(scaled(lambda size: 40 / size))  # no plate, but as wrong
    assert "counts its 5 observations as 40" in said[0]


@pytest.mark.parametrize("batch_size", [5, None])
@pytest.mark.parametrize(
    "observe",
    [in_plate(20), nested(20), nested(20, last=True), in_scope(20), two_outputs(20, 20), of_rows_and_others,
     scaled(lambda size: N / size)],
)  # fmt: skip
def test_nothing_is_said_of_what_agrees(observe, batch_size):
    assert fit(observe, batch_size)[1] == []


def test_a_power_of_the_likelihood_is_no_fault():
    assert fit(scaled(lambda size: 0.1), None)[1] == []


def test_rows_may_stand_for_more():
    for batch_size in (5, None):
        _, said = fit(in_plate(40), batch_size, stands_for=40)
        assert said == []
    assert fit(in_plate(20), stands_for=40)[1][0].startswith("`y` counts its 5 observations as 20")
    assert "`stands_for` says 40" in fit(in_plate(20), stands_for=40)[1][0]

    def forgets(w, X, y):
        numpyro.sample("y", dist.Normal(w, 1.0).expand([len(y)]), obs=y)

    assert "as all the data" in fit(forgets, None, stands_for=40)[1][0]
    assert fit(forgets, None)[1] == []
    # The likelihood counts twice, and the prior once.
    once, twice = (fit(in_plate(size), None, stands_for=size)[0].losses[0] for size in (20, 40))
    prior = fit(lambda w, X, y: numpyro.factor("nothing", 0.0), None)[0].losses[0]
    np.testing.assert_allclose(twice - prior, 2 * (once - prior), rtol=1e-10)
    with pytest.raises(ValueError, match=r"`stands_for` must be a positive integer; got 1\.5"):
        fit(in_plate(20), stands_for=1.5)


def test_plates_of_more_rows_pick_those_of_the_batch():
    """Latent variables of single rows meet the row's data where `stands_for` says so."""
    seen = []

    def model(X, y):
        with numpyro.plate("d", 40, subsample_size=len(X)) as rows:
            jax.debug.callback(lambda r, y: seen.append((r, y)), rows, y)
            numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    svi = SVI(model, lambda X, y: None, optax.adam(0.1), Trace_ELBO())
    ogp.fit(svi, PRNGKey(0), DATA, batch_size=5, num_steps=4, stands_for=40, progress_bar=False)
    jax.effects_barrier()
    in_steps = [(r, y) for r, y in seen if (r < N).all() and np.array_equal(DATA[1][r], y)]
    assert len(in_steps) >= 4


# ---------------------------------------------------------------- numbers that a dtype does not resolve

SECONDS = 1.7e9 + 60.0 * np.arange(500)  # a minute each


def f32(x):
    return np.asarray(x, np.float32)


def test_columns_that_are_not_resolved():
    [found] = coarse_columns(f32(SECONDS))
    assert found[:3] == (None, 500, 235) and (found.magnitude, found.unit) == (f32(SECONDS).max(), 128)
    wide = np.stack([np.linspace(0, 1, 500), SECONDS, np.ones(500)], 1)
    assert [c.column for c in coarse_columns(f32(wide))] == [1]
    assert coarse_columns(f32(1e4 + 1e-3 * np.arange(100)))  # without a repetition, but a step of one unit
    assert coarse_columns(1e17 + 3.0 * np.arange(100))  # float64


@pytest.mark.parametrize(
    "values",
    [
        SECONDS,  # float64 has room
        f32(SECONDS - SECONDS.mean()),
        f32(np.repeat(np.linspace(1000, 1010, 20), 25)),  # repeated measurements
        f32(np.random.default_rng(0).integers(0, 10, 500)),
        f32(16_000_000 + np.arange(400).repeat(2)),  # whole numbers that float32 holds
        f32(2015 + np.arange(10).repeat(30)),
        f32(np.random.default_rng(0).uniform(size=2**20)),  # many, but not far from zero
        np.linspace(0, 1, 2000).astype(np.float16),
        np.full(50, 3e9, np.float32),  # a constant
        np.arange(50),
        np.zeros((0, 3)),
        np.asarray([np.nan, 1.7e9, 1.7e9 + 128], np.float32),
        np.zeros(3, jnp.bfloat16),
    ],
)
def test_columns_that_are_as_they_should_be(values):
    assert coarse_columns(values) == []


def minutes(dtype):
    X = SECONDS[:, None].astype(dtype)
    return X, np.sin(np.arange(500) / 40).astype(dtype)


def model(X, y=None):
    f = ogp.gp("f", kernels.RBF(jnp.asarray(3e3, X.dtype)), X[:: len(X) // 5])
    with numpyro.plate("d", 500, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), jnp.asarray(0.1, X.dtype)), obs=y)


def start(X, y, **options):
    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
    return svi, ogp.fit(svi, PRNGKey(0), (X, y), num_steps=1, progress_bar=False, **options)


def test_fit_says_that_rows_become_equal():
    words = r"`data\[0\]`: 500 rows hold 235 distinct values, since near 1.7e\+09 the next number of float32 is 1.3e\+02 away"
    with pytest.warns(UserWarning, match=words + r"\. Subtract an offset and divide by a scale.*enable_x64"):
        start(*minutes(np.float32))
    with jax.enable_x64(False), pytest.warns(UserWarning, match=words):  # what is given is float64, and JAX casts it
        start(*minutes(np.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        start(*minutes(np.float64))


def test_fit_refuses_numbers_that_a_cast_would_change():
    with jax.enable_x64(False):
        with pytest.raises(
            ValueError, match=r"`data\[0\]` is int64, which JAX casts to int32, where 17\d+ does not fit"
        ):
            fit(in_plate(20), arrays=((SECONDS * 1000).astype(np.int64)[:N], DATA[1]))
        with pytest.raises(
            ValueError, match=r"`data\[1\]` is float64, which JAX casts to float32, where -1e\+39 does not"
        ):
            fit(in_plate(20), arrays=(DATA[0], np.full(N, -1e39)))
        least = np.full(N, np.iinfo(np.int32).min, np.int64)
        assert fit(in_plate(20), arrays=(least, DATA[1]))[1] == []


def test_check_counts_distinct_rows_as_the_model_sees_them():
    X, y = map(jnp.asarray, minutes(np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        svi, result = start(X, y)
        report = ogp.check(model, svi.guide, result.params, X, y, num_samples=25)
    assert report.functions["f"].num_distinct == 235 and "at 500 inputs (235 distinct): median" in str(report)
    [advice] = [line for line in report.advice if "distinct" in line]
    assert advice.startswith("X: 500 rows hold 235 distinct values") and "Subtract an offset" in advice
    # Standardized they are told apart.
    X, y = minutes(np.float64)
    X = jnp.asarray((X - X.mean()) / X.std(), jnp.float32)
    svi, result = start(X, jnp.asarray(y, jnp.float32))
    report = ogp.check(model, svi.guide, result.params, X, jnp.asarray(y, jnp.float32), num_samples=25)
    assert report.functions["f"].num_distinct == 500 and report.coarse == () and "distinct" not in str(report)


def test_an_event_within_a_plate_is_counted_as_often_as_it_has_rows():
    def repeated(w, X, y):
        with numpyro.plate("d", len(y)):
            numpyro.sample("y", dist.Normal(w, 1.0).expand([len(y)]).to_event(1), obs=y)

    def once(w, X, y):
        numpyro.sample("y", dist.Normal(w, 1.0).expand([len(y)]).to_event(1), obs=y)

    def rows(w, X, y):
        with numpyro.plate("d", len(y)):
            numpyro.sample("y", dist.Normal(w, 1.0).expand([len(y), 2]).to_event(1), obs=jnp.stack([y, y], -1))

    assert "`y` counts its only event, of shape (20,), once for each of the 20 rows" in fit(repeated, None)[1][0]
    assert fit(once, None)[1] == fit(rows, None)[1] == []


def test_weights_with_an_axis_too_many():
    def weighted(shape):
        def observe(w, X, y):
            with numpyro.plate("d", len(y)), handlers.scale(scale=jnp.full(shape, 0.5)):
                numpyro.sample("y", dist.Normal(w, 1.0), obs=y)

        return observe

    (said,) = (m for m in fit(weighted((20, 1)), None)[1] if "several times" in m)
    assert "`y` counts its rows several times: a scale of shape (20, 1)" in said and "to (20, 20)" in said
    assert fit(weighted((20,)), None)[1] == fit(weighted(()), None)[1] == []
