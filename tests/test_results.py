"""What the result of a fit answers, beside the functions that it asks: the same numbers, with nothing written again."""

from __future__ import annotations

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose, assert_array_equal
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta
from scipy import stats

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.training.result import FitResult

RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0.0, 1.0, (120, 1)), axis=0)
Y = np.sin(6 * X[:, 0]) + 0.1 * RNG.normal(size=120)
Z = X[::15]


def model(X, y=None, *, N, Z):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = ogp.gp("f", scale**2 * kernels.RBF(0.3), Z)
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1), obs=y)


def required(X, offset, y):
    f = ogp.gp("f", kernels.RBF(0.3), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Poisson(f(X) + offset), obs=y)


@functools.cache
def fitted(batch_size=None, keywords=False, static=False):
    constants = {"N": len(X), "Z": Z}
    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.03), TraceMeanField_ELBO(), **(constants if static else {}))
    data = {"X": X, "y": Y} if keywords else (X, Y)
    steps = {"batch_size": batch_size, "num_steps": 200, "progress_bar": False}
    return guide, ogp.fit(svi, random.PRNGKey(0), data, **steps, **({} if static else constants))


ways = pytest.mark.parametrize("way", [{}, {"batch_size": 40}, {"keywords": True}, {"static": True}], ids=str)


@ways
def test_answers_are_those_of_the_functions(way):
    guide, result = fitted(**way)
    known = {"N": len(X), "Z": Z}
    f = ogp.posterior(model, guide, result.params, X, Y, **known)["f"](X[:5])
    own = result.posterior()["f"](X[:5])
    assert_array_equal(own.mean, f.mean)
    assert_array_equal(own.variance, f.variance)
    report = result.check(held_out=(X[:30], Y[:30]) if not way.get("keywords") else {"X": X[:30], "y": Y[:30]})
    expected = ogp.check(
        model,
        guide,
        result.params,
        jnp.asarray(X),
        jnp.asarray(Y),
        losses=result.losses,
        held_out=(X[:30], Y[:30]),
        **known,
    )
    assert str(report) == str(expected)
    assert result.khat().khat == ogp.khat(model, guide, result.params, jnp.asarray(X), jnp.asarray(Y), **known).khat
    draws = result.to_arviz(num_samples=10)
    assert_array_equal(
        draws["posterior"]["f"],
        ogp.to_arviz(model, guide, result.params, jnp.asarray(X), jnp.asarray(Y), num_samples=10, **known)["posterior"][
            "f"
        ],
    )


@ways
def test_predictions_are_draws_of_new_outputs(way):
    _, result = fitted(**way)
    new = np.linspace(0.05, 0.95, 11)[:, None]
    y = (result.predict(X=new) if way.get("keywords") else result.predict(new, num_samples=4000))["y"]
    m = result.posterior()["f"](new)
    sd = np.sqrt(np.asarray(m.variance) + 0.1**2)
    error = sd / np.sqrt(len(y.draws))
    assert (np.abs(y.mean - m.mean) < 5 * error).all()
    assert_allclose(y.sd, sd, rtol=5 / np.sqrt(2 * len(y.draws)))
    lower, upper = y.interval(0.8)
    assert_allclose((upper - lower) / sd, 2 * stats.norm.ppf(0.9), rtol=0.15)
    assert_array_equal(y.quantile(0.5), np.median(y.draws, 0))
    assert repr(y).startswith("<Prediction of shape (11,)")


def test_arguments_without_defaults_are_asked_for_but_the_last():
    guide = ogp.AutoSparseGP(required)
    svi = SVI(required, guide, optax.adam(0.03), TraceMeanField_ELBO())
    y = RNG.poisson(np.exp(1 + np.sin(6 * X[:, 0]))).astype(float)
    result = ogp.fit(svi, random.PRNGKey(0), (X, np.ones(len(X)), y), num_steps=300, progress_bar=False)
    counts = result.predict(X[:4], np.zeros(4))["y"].draws
    assert counts.shape == (1000, 4) and (counts == counts.round()).all()
    m = result.posterior()["f"](X[:4])
    assert_allclose(counts.mean(0), np.exp(m.mean + m.variance / 2), rtol=0.2)
    with pytest.raises(TypeError, match=r"`predict` needs .* Missing: `offset`, `y`, of \(X, offset, y\)"):
        result.predict(X[:4])
    with pytest.raises(ValueError, match="no output to draw"):
        result.predict(X[:4], np.zeros(4), y[:4])


def test_arguments_that_the_model_has_not_and_too_many_rows():
    _, result = fitted()
    many = np.linspace(0, 1, 130)[:, None]
    with pytest.raises(TypeError, match=r"`predict` passes its arguments on to the model, which takes \(X, y=None"):
        result.predict(X[:3], offset=1.0)
    with (
        pytest.warns(UserWarning, match="subsample_size"),
        pytest.raises(ValueError, match=r"130 rows.* N = 120.*N=130"),
    ):
        result.predict(many)
    assert result.predict(many, N=130)["y"].mean.shape == (130,)


def test_a_memory_map_is_kept_as_one(tmp_path):
    np.save(tmp_path / "X.npy", X)
    on_disk = np.load(tmp_path / "X.npy", mmap_mode="r")
    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.03), TraceMeanField_ELBO())
    steps = {"batch_size": 40, "num_steps": 5, "progress_bar": False}
    result = ogp.fit(svi, random.PRNGKey(0), (on_disk, Y), **steps, N=len(X), Z=Z)
    assert result._fitted.data[0] is on_disk
    assert result._fitted.arguments(slice(40))[0][0].shape == (40, 1)
    assert np.isfinite(result.posterior()["f"](X[:2]).mean).all()


def test_lbfgs_and_collapsed_bounds():
    def collapsed(X, y, *, Z):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
        numpyro.sample("y", ogp.CollapsedGP(scale**2 * kernels.RBF(0.3), X, Z, 0.1), obs=y)

    svi = SVI(collapsed, AutoDelta(collapsed), optax.adam(0.01), Trace_ELBO())
    result = ogp.fit_lbfgs(svi, random.PRNGKey(0), (X, Y), Z=Z)
    assert_allclose(result.posterior()["y"](X[:9]).mean, np.sin(6 * X[:9, 0]), atol=0.2)
    assert "converged" in repr(result)


def test_a_resumed_fit_knows_as_much(tmp_path):
    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.03), TraceMeanField_ELBO())
    run = functools.partial(ogp.fit, svi, random.PRNGKey(0), (X, Y), progress_bar=False, N=len(X), Z=Z)
    run(num_steps=5, checkpoint=tmp_path / "run.npz")
    again = run(num_steps=5, checkpoint=tmp_path / "run.npz")
    assert_array_equal(again.posterior()["f"](X[:3]).mean, run(num_steps=5).posterior()["f"](X[:3]).mean)


def test_it_is_the_tuple_that_it_was():
    _, result = fitted()
    params, state, losses, status, num_steps, message = result
    assert (params, state, losses, status, num_steps, message) == tuple(result)
    assert result[0] is result.params and len(result) == 6 == len(
        jax.tree.leaves(result, is_leaf=lambda x: x is not result)
    )
    assert result._replace(num_steps=7).posterior().keys() == {"f"}
    assert repr(result) == f"<FitResult: finished after 200 steps, last loss {losses[-1]:.6g}, 3 parameters.>"
    assert repr(FitResult({}, None, np.zeros(0), "finished", 0)) == "<FitResult: finished after 0 steps, 0 parameters.>"


@pytest.mark.parametrize("copy", [lambda r: pickle.loads(pickle.dumps(r)), lambda r: jax.tree.map(lambda x: x, r)])
def test_copies_have_the_fields_and_say_what_they_lack(copy):
    _, result = fitted()
    again = copy(result)
    assert type(again) is FitResult
    jax.tree.map(assert_array_equal, again.params, result.params)
    with pytest.raises(ValueError, match=r"This result is a copy.* ogp\.check\(model, guide, result\.params, \.\.\.\)"):
        again.check()
    with pytest.raises(ValueError, match=r"ogp\.posterior"):
        again.predict(X)


def test_what_is_no_svi_of_numpyro_may_have_no_model():
    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.03), TraceMeanField_ELBO())

    class Bare:
        init, update, get_params = svi.init, svi.update, svi.get_params

    result = ogp.fit(Bare(), random.PRNGKey(0), (X, Y), num_steps=2, progress_bar=False, N=len(X), Z=Z)
    with pytest.raises(TypeError, match=r"`result.posterior` needs the SVI's model; Bare has none"):
        result.posterior()
