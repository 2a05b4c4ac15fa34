"""Several threads, as of a web server, ask fits: NumPyro has one stack of handlers for all of them."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods, processes

KEY = jax.random.PRNGKey(0)
X = np.random.default_rng(0).uniform(-2, 2, (20, 1)).astype(np.float32)
Y = np.sin(2 * X[:, 0])


def fitted(name, noise, num_steps=20):
    def model(X, y=None):
        f = ogp.gp(name, kernels.RBF(numpyro.param("lengthscale", 1.0)), X[:5])
        with numpyro.plate("data", 20, subsample_size=len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.03), TraceMeanField_ELBO())
    return ogp.fit(svi, KEY, (X, Y), num_steps=num_steps, batch_size=10, progress_bar=False)


@pytest.fixture(scope="module")
def fits():
    return {name: fitted(name, noise) for name, noise in (("f", 0.3), ("g", 0.1))}


@pytest.fixture
def often():
    """Threads that change every tenth of a millisecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


ASKED = {
    "posterior": lambda name, fit: fit.posterior()[name](X).mean,
    "predict": lambda name, fit: fit.predict(X, num_samples=20)["y"].mean,
    "khat": lambda name, fit: fit.khat(num_samples=50).log_weights,
    "draws": lambda name, fit: fit._fitted.guide.sample_posterior(KEY, fit.params, X, Y)[f"{name}.u0"],
}


@pytest.mark.parametrize("what", ASKED)
def test_answers_are_those_of_one_thread(what, fits, often):
    """More than half of the calls raised an error, such as NumPyro's AssertionError without a word."""

    def ask(number):
        name = "fg"[number % 2]
        return np.asarray(ASKED[what](name, fits[name]))

    expected = [ask(0), ask(1)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(16)))
    for number, answer in enumerate(found):
        np.testing.assert_array_equal(answer, expected[number % 2])


def test_a_fit_goes_on_while_others_ask(fits, often):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(fitted, "f", 0.3, 100)
        asked = 0
        while not running.done():
            fits["g"].posterior()
            asked += 1
    np.testing.assert_array_equal(running.result().losses[:20], fits["f"].losses)
    assert asked


def test_a_call_for_a_table_is_not_ended_by_another(monkeypatch):
    """The second call is refused, and not the first, which had run for some time."""
    module, found = sys.modules["numpyro_orthgp.tabular.regression"], []
    search = module.search

    def other(*args):
        monkeypatch.setattr(module, "search", search)
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(ogp.regression, X, Y, M=5, num_steps=2).exception())
        return search(*args)

    monkeypatch.setattr(module, "search", other)
    assert ogp.regression(X, Y, M=5, num_steps=2).num_rows == 20
    assert "Another thread is fitting a model" in str(found[0])


INPUTS = jnp.asarray(X)
MARGINALS = ogp.Marginals(INPUTS[:, 0], INPUTS[:, 0] ** 2, INPUTS[:, 0] ** 2)
FORKED = {
    "fit": lambda fit, table, f: fitted("h", 0.2),
    "posterior": lambda fit, table, f: fit.posterior(),
    "check": lambda fit, table, f: fit.check(),
    "function": lambda fit, table, f: f(X),
    "table": lambda fit, table, f: ogp.regression(X, Y, M=5, num_steps=3),
    "predictions of a table": lambda fit, table, f: table.predict(X),
    "centres": lambda fit, table, f: ogp.init.kmeans(KEY, X, 5),
    "directions": lambda fit, table, f: ogp.init.pca(X, 1),
    "a kernel": lambda fit, table, f: kernels.RBF(1.0)(INPUTS, INPUTS),
    "a likelihood": lambda fit, table, f: likelihoods.Poisson(MARGINALS).log_prob(MARGINALS.mean),
    "columns": lambda fit, table, f: ogp.inputs_of(X),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_process_that_is_forked_after_a_fit_says_so(fits):
    """JAX waits there for threads that a fork does not copy: all of these never ended."""
    given = fits["f"], ogp.regression(X, Y, M=5, num_steps=3), fits["f"].posterior()["f"]
    for name, call in FORKED.items():
        said = in_child(partial(call, *given))
        assert "This process was forked from one in which JAX has run" in said, (name, said)
    assert np.isfinite(given[-1](X).mean).all()  # nothing has changed here


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_process_that_is_forked_after_jax_alone_has_run_says_so():
    """Nothing of ours had run before, only JAX for a key and for arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_process", None)
        assert "This process was forked from one in which JAX has run" in in_child(lambda: ogp.init.kmeans(KEY, X, 5))


def in_child(call):
    """What a call raises in a forked process, which ends after 20 seconds at the latest."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, of any fork
        pid = os.fork()
    if not pid:
        signal.alarm(20)
        try:
            call()
            said = "nothing"
        except BaseException as error:
            said = repr(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said
