"""Data that are not what a fit began with, or not what a source should be: said in words that name the cause."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods, training
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.training.result import Fitted
from tests import fitting

N = fitting.N
quiet = {"num_steps": 12, "batch_size": 5, "progress_bar": False}
SECONDS = 1.7e9 + np.linspace(0, 50, N)  # float32 holds one number for all of them


def loss_of_reciprocals(X, y, *, N=N):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    # Finite at an infinite row, with a derivative of 0 times infinity.
    numpyro.factor("y", 0 * y.sum() - (w**2) * jnp.sum(jnp.exp(-jnp.abs(w * X[:, 0]))))


def guide(X, y, *, N=N):
    numpyro.sample("w", dist.Delta(numpyro.param("loc", 0.5)))


@pytest.mark.parametrize("steps_per_call", [1, 3, 64])
def test_an_infinite_row_is_named_though_its_own_loss_is_finite(steps_per_call):
    """The next loss is NaN, and that batch has nothing wrong in it."""
    X, y = fitting.data()
    X[33] = np.inf
    svi = SVI(loss_of_reciprocals, guide, optax.adam(0.05), Trace_ELBO())
    with pytest.warns(RuntimeWarning, match=r"nan, and the batch before has NaN or infinity in row 33 of `data\[0\]`"):
        result = ogp.fit(svi, fitting.KEY, (X, y), **quiet, steps_per_call=steps_per_call)
    assert result.status == "diverged"
    with pytest.raises(
        FloatingPointError, match=r"nothing to go on from\. Remove or impute such rows; missing outputs"
    ):
        ogp.fit(svi, fitting.KEY, (X, np.full(N, np.nan)), num_steps=2, progress_bar=False)


@pytest.mark.parametrize("kind", ["array", "column", "table"])
def test_a_column_that_becomes_one_value(kind):
    X, y = fitting.data()
    X[:, 1] = SECONDS
    data = X, y
    if kind == "table":
        pyarrow = pytest.importorskip("pyarrow")
        data = training.columns(
            pyarrow.table({"a": X[:, 0], "t": X[:, 1], "c": X[:, 2], "y": y}), X=["a", "t", "c"], y="y"
        )
    elif kind == "column":
        data = X[:, 1:2] * np.ones(3), y
    with jax.enable_x64(False):
        svi = fitting.make()
        with pytest.warns(
            UserWarning, match="50 rows hold one value, since near 1.7e.09 the next number of float32 is"
        ):
            ogp.fit(svi, fitting.KEY, data, **quiet)
        X[:, 1] = 0.1 + 1e-17 * np.arange(N)  # a constant up to rounding is one
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ogp.fit(svi, fitting.KEY, (X, y), **quiet)
        with pytest.warns(UserWarning, match="50 rows hold one value"):
            ogp.CollapsedGP(kernels.RBF(1.0), SECONDS[:, None], np.zeros((1, 1), np.float32), 0.1)


def test_whole_numbers_that_stand_for_real_ones():
    """The guide on training says so of outputs too; a Gaussian y was rounded."""
    large = np.array([2**24 + 1, 5], np.int32)
    with jax.enable_x64(False):
        m = Marginals(jnp.zeros(2), jnp.ones(2), jnp.zeros(2))
        with pytest.raises(ValueError, match="`obs` is int32 and holds 16777217, which float32 would round"):
            likelihoods.Gaussian(m, 1.0).log_prob(large)
        likelihoods.Poisson(m).log_prob(large)  # a count has its digits
        np.testing.assert_array_equal(
            likelihoods.Gaussian(m, 1.0).log_prob(large // 2**10),
            likelihoods.Gaussian(m, 1.0).log_prob((large // 2**10).astype(np.float32)),
        )
    likelihoods.Gaussian(Marginals(jnp.zeros(2), jnp.ones(2), jnp.zeros(2)), 1.0).log_prob(large)  # float64


def test_a_file_that_grew_or_shrank(tmp_path):
    """The result read all rows of the file, and NumPyro named two shapes."""
    h5py = pytest.importorskip("h5py")
    X, y = fitting.data()
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("X", data=X, chunks=(5, 3), maxshape=(None, 3))
        file.create_dataset("y", data=y, chunks=(5,), maxshape=(None,))
        fitted = Fitted(fitting.make(), (file["X"], file["y"]), 5, N, {})
        for num in (80, N):
            file["X"].resize((num, 3)), file["y"].resize((num,))
            (found, outputs), _ = fitted.arguments()
            np.testing.assert_array_equal(found, X)
            np.testing.assert_array_equal(outputs, y)
        file["X"].resize((30, 3)), file["y"].resize((30,))
        assert len(fitted.arguments(slice(5))[0][0]) == 5
        with pytest.raises(ValueError, match="The data had 50 rows in the fit, and have fewer now"):
            fitted.arguments()


def test_sources_that_are_none():
    class Source:
        num_rows = N

        def batches(self, step):
            return None

    def fit(source):
        return ogp.fit(fitting.make(), fitting.KEY, source, num_steps=2, progress_bar=False)

    source = Source()
    with pytest.raises(TypeError, match=r"`batches` of a source must be a method .* is, or gives, a NoneType"):
        fit(source)
    source.batches = [fitting.data()]
    with pytest.raises(TypeError, match="is, or gives, a list"):
        fit(source)
    source.batches = lambda step: [fitting.data(), fitting.data()]
    assert fit(source).status == "finished"
    del Source.num_rows
    with pytest.raises(TypeError, match="Source has no `num_rows`"):
        fit(source)
    pyarrow = pytest.importorskip("pyarrow")
    for names in ([0], 0):
        with pytest.raises(ValueError, match="Say which columns are which argument"):
            training.columns(pyarrow.table({"a": [1.0]}), X=names, y="a")
    assert training.columns(pyarrow.table({"a": [1.0]}), X=np.array(["a"]))["X"].shape == (1, 1)


def test_metrics_that_are_no_numbers():
    """A metric that is always NaN ended the fit early without a word, and others in Python's."""

    def fit(metric):
        stopping = ogp.EarlyStopping(patience=2, every=4, metric=metric)
        return ogp.fit(
            fitting.make(), fitting.KEY, fitting.data(), **quiet | {"num_steps": 40}, early_stopping=stopping
        )

    with pytest.warns(
        UserWarning, match="`metric` of EarlyStopping is NaN after step 4, which counts as no improvement"
    ):
        assert fit(lambda params: jnp.nan).num_steps == 8
    with pytest.raises(TypeError, match=r"must return one number, .* got NoneType"):
        fit(lambda params: None)
    with pytest.raises(TypeError, match=r"got ndarray of shape \(2,\)"):
        fit(lambda params: np.ones(2))
    ones, numbers = (fit(lambda params, of=of: of(params["loc"].sum())) for of in (lambda x: np.ones(1) * x, float))
    np.testing.assert_array_equal(ones.losses, numbers.losses)
