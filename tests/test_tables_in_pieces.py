"""Tables that come in pieces, or beside outputs of their own: rows belong together by their labels, columns by their place."""

from __future__ import annotations

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, online, training
from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.diagnostics.draws import Arguments
from numpyro_orthgp.training.columns import rows_of
from tests import fitting

pd = pytest.importorskip("pandas")

N, NOISE = 40, 0.3
ROWS, COLUMNS = "rows of `.*` in another order by their labels: row", r"one before it had them in the order a, b, c"
options = {"num_steps": 6, "progress_bar": False, "N": N}


@pytest.fixture(scope="module")
def arrays():
    return fitting.data(N)


@pytest.fixture(scope="module")
def tables(arrays):
    X, y = arrays
    return pd.DataFrame(X, columns=["a", "b", "c"]), pd.Series(y)


def pieces(X, y, of=10):
    return [(X[i : i + of], y[i : i + of]) for i in range(0, len(y), of)]


class Own:
    """A source that is no Stream."""

    num_rows = N

    def __init__(self, batches):
        self.of_step = batches

    def batches(self, step):
        while True:
            yield self.of_step[step % len(self.of_step)]
            step += 1


def stream(batches):
    return training.Stream(lambda: iter(batches), N)


def cut(batches):
    return training.Stream(lambda: iter(batches), N, batch_size=8)


@pytest.mark.parametrize("source", [stream, cut, Own])
def test_batches_are_tables(arrays, tables, source):
    """Columns in another order than before were fitted as they stood, and so were rows of y with the labels of others."""
    X, y = tables

    def fit(batches):
        return ogp.fit(fitting.make(), fitting.KEY, source(batches), **options)

    result, of_arrays = fit(pieces(X, y)), fit(pieces(*arrays))
    np.testing.assert_array_equal(result.losses, of_arrays.losses)
    with pytest.raises(ValueError, match=COLUMNS):
        fit([*pieces(X, y)[:2], *pieces(X[["b", "c", "a"]], y)[2:]])
    with pytest.raises(ValueError, match=ROWS):
        fit([*pieces(X, y)[:1], *((A, b[::-1]) for A, b in pieces(X, y)[1:])])
    with pytest.raises(ValueError, match=COLUMNS):
        result.predict(X[["c", "b", "a"]], num_samples=2)


def test_blocks_are_tables(arrays, tables):
    (X, y), kernel, Z = tables, kernels.RBF(1.0), arrays[0][:5]
    f = online.from_blocks(kernel, Z, NOISE, pieces(X, y))
    expected = CollapsedGP(kernel, *arrays[:1], Z, NOISE).posterior(arrays[1])
    np.testing.assert_allclose(f(X).mean, expected(arrays[0]).mean, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=COLUMNS):
        online.from_blocks(kernel, Z, NOISE, [*pieces(X, y)[:2], *pieces(X[["b", "c", "a"]], y)[2:]])
    with pytest.raises(ValueError, match=COLUMNS):
        online.from_blocks(kernel, X[:5], NOISE, pieces(X[["b", "c", "a"]], y))
    with pytest.raises(ValueError, match=ROWS):
        online.from_blocks(kernel, Z, NOISE, [(X, y[::-1])])
    with pytest.raises(ValueError, match=COLUMNS):
        f(X[["b", "c", "a"]])


def test_numbers_of_more_than_64_bits(arrays):
    X, y = arrays
    f, g = (online.from_blocks(kernels.RBF(1.0), X[:5], NOISE, [(A, y)]) for A in (X, X.astype(np.longdouble)))
    np.testing.assert_array_equal(f.beliefs[0].loc, g.beliefs[0].loc)


def test_outputs_beside_a_table(arrays, tables):
    (X, y), kernel = tables, kernels.RBF(1.0)
    one = CollapsedGP(kernel, X, arrays[0][:5], NOISE)
    f = one.posterior(y)
    assert float(one.log_prob(y)) == float(one.log_prob(arrays[1])) == float(jax.tree.map(lambda a: a, one).log_prob(y))
    for given in (
        lambda y: one.log_prob(y),
        lambda y: one.posterior(y),
        lambda y: online.condition(f, X, y, NOISE),
        lambda y: ogp.with_neighbors(f, X, y, NOISE),
        lambda y: Arguments((X, y), {}),
    ):
        with pytest.raises(ValueError, match=ROWS):
            given(y[::-1])
    one.log_prob(arrays[1][::-1])  # without labels rows are as they stand
    Arguments((X, y), {"Z": X[::-2]})  # which are no rows of y


def test_a_series_is_an_array_for_a_model_that_is_traced(tables):
    """Held-out outputs of pandas ended in JAX's words: pandas compares a series with a tracer itself."""
    X, y = tables
    (_, given), _ = Arguments((X, y), {}).join({})

    def log_density(scale):
        with handlers.block():
            return dist.Normal(0.0, scale).log_prob(given).sum()

    value = jax.jit(log_density)(2.0)
    np.testing.assert_allclose(value, -0.5 * np.sum((y / 2) ** 2) - N * np.log(2 * np.sqrt(2 * np.pi)))


def test_rows_of_a_table_are_counted(arrays, tables):
    """``check`` of a fit of tables with more than 5000 rows asked pandas for columns with these numbers."""
    X, y = (table.set_axis(np.arange(N)[::-1], axis=0) for table in tables)
    rows = np.array([0, 3, 7])
    np.testing.assert_array_equal(rows_of(X, rows), arrays[0][rows])
    np.testing.assert_array_equal(rows_of(y, rows), arrays[1][rows])
    np.testing.assert_array_equal(rows_of(X, slice(5)), arrays[0][:5])
