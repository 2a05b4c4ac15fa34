"""Mixed columns of a table as inputs of a gp: columns, kernels of these, and what is said of unseen and missing entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels
from tests import oracles

pd = pytest.importorskip("pandas")


@pytest.fixture
def table(rng):
    return pd.DataFrame(
        {
            "area": rng.gamma(4.0, 25.0, 30),
            "town": rng.choice(["north", "lake"], 30),
            "code": rng.choice([7, 11, 20], 30),
            "year": rng.integers(1900, 2000, 30),
        }
    )


def test_numbers_are_standardized_and_categories_are_indices(table):
    inputs = ogp.inputs_of(table, categories=["code"])
    X = np.asarray(inputs(table))
    assert inputs.numbers == (0, 3) and inputs.names == ("area", "town", "code", "year")
    assert [(c.name, c.column, c.levels, c.num) for c in inputs.categories] == [
        ("town", 1, ("lake", "north"), 2),
        ("code", 2, ("11", "20", "7"), 3),
    ]
    np.testing.assert_allclose(X[:, [0, 3]].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(X[:, [0, 3]].std(0), 1, rtol=1e-12)
    np.testing.assert_array_equal(X[:, 1], table.town == "north")
    np.testing.assert_array_equal(np.array(["11", "20", "7"])[X[:, 2].astype(int)], table.code.astype(str))
    assert inputs["code"] is inputs.categories[1]
    with pytest.raises(KeyError, match=r"'area'.*\['town', 'code'\]"):
        inputs["area"]
    # Other rows by the numbers of these, whatever the order of columns.
    few = table.iloc[:3][["year", "code", "town", "area"]]
    np.testing.assert_array_equal(inputs(few), X[:3])
    np.testing.assert_array_equal(ogp.inputs_of(table.assign(code=table.code.astype(str)))(table), X)
    assert ogp.inputs_of(table, dtype=jnp.float32)(table).dtype == jnp.float32


def test_arrays_have_columns_of_numbers(rng):
    X = rng.normal(size=(10, 2))
    inputs = ogp.inputs_of(X, categories=[])
    np.testing.assert_allclose(inputs(X), (X - X.mean(0)) / X.std(0), rtol=1e-12)


def test_categories_that_training_has_not_seen(table):
    new = table.iloc[:4].assign(town=["north", "hill", "hill", "moor"])
    with pytest.raises(ValueError, match=r"'town' has 3 rows with categories .* not seen: hill, moor\. .*unseen='new'"):
        ogp.inputs_of(table)(new)
    inputs = ogp.inputs_of(table, unseen="new")
    assert inputs["town"].num == 3
    with pytest.warns(UserWarning, match="hill, moor. They are taken for one new category"):
        X = inputs(new)
    np.testing.assert_array_equal(X[:, 1], [1, 2, 2, 2])


def test_missing_categories_are_one(table):
    table.loc[[2, 5], "town"] = None
    inputs = ogp.inputs_of(table)
    assert inputs["town"].levels == ("lake", "north", "(missing)")
    np.testing.assert_array_equal(inputs(table)[np.array([2, 5]), 1], 2)


def test_missing_numbers_are_refused_told_or_kept(table):
    whole = ogp.inputs_of(table)
    table = table.assign(year=table.year.astype(float))
    table.loc[[2, 5], "year"] = np.nan
    with pytest.raises(ValueError, match=r"'year' has 2 missing numbers\. .*'indicator'.*'keep'.*latent"):
        ogp.inputs_of(table)
    with pytest.raises(ValueError, match="'year' has 2 missing numbers"):
        whole(table)
    told = ogp.inputs_of(table, missing="indicator")
    X = np.asarray(told(table))
    assert told.names[-2:] == ("year", "year is missing") and told.numbers == (0, 2, 3, 4)
    np.testing.assert_array_equal(X[:, 4] == 1, table.year.isna())
    filled = table.year.fillna(table.year.median())
    np.testing.assert_allclose(X[:, 3], (filled - filled.mean()) / filled.std(ddof=0), rtol=1e-9)
    with pytest.raises(ValueError, match="'area' has 1 missing numbers and none in training"):
        told(table.iloc[:3].assign(area=[np.nan, 1.0, 2.0]))
    kept = np.asarray(ogp.inputs_of(table, missing="keep")(table))
    np.testing.assert_array_equal(np.isnan(kept[:, 3]), table.year.isna())
    np.testing.assert_allclose(np.nanmean(kept[:, 3]), 0, atol=1e-12)


def test_nan_never_reaches_a_gp(table):
    """What a model has not filled is refused."""
    table = table.assign(year=table.year.astype(float))
    table.loc[2, "year"] = np.nan
    X = ogp.inputs_of(table, missing="keep")(table)
    with pytest.raises(ValueError, match="must be finite; got 1 NaN"):
        ogp.CollapsedGP(kernels.RBF(1.0), X, X[5:9], 0.1).log_prob(jnp.zeros(30))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda t: ogp.inputs_of(t, categories=["door"]), "`categories` names 'door'; the table has area, town"),
        (
            lambda t: ogp.inputs_of(t, missing="median"),
            "Unknown `missing` 'median'; known are 'refuse', 'indicator', 'keep'",
        ),
        (lambda t: ogp.inputs_of(t, unseen="drop"), "Unknown `unseen` 'drop'"),
        (lambda t: ogp.inputs_of(t.assign(year=np.nan)), "'year' has no number at all"),
        (lambda t: ogp.inputs_of(t)(t[["area", "year"]]), "The table lacks town; it has area, year|lacks town, code"),
    ],
)
def test_what_is_refused(table, make, match):
    with pytest.raises(ValueError, match=match):
        make(table)


def test_a_gp_of_mixed_columns_is_the_exact_one(rng, table):
    """Numbers, a category with loadings, one that is exchangeable, an unseen level; M = N."""
    y, rho = rng.normal(size=30), 0.6
    inputs = ogp.inputs_of(table, categories=["code"], unseen="new")
    X, town, code = inputs(table), inputs["town"], inputs["code"]
    W = np.array([[0.5], [-0.3], [0.2]])
    kappa = np.array([0.4, 0.7, 0.1])
    kernel = 1.3 * kernels.Matern52(0.9).on(inputs.numbers)
    kernel = (
        kernel
        * kernels.Coregion(W, kappa).on(town.column)
        * kernels.Coregion.exchangeable(code.num, rho).on(code.column)
    )
    new = table.iloc[:5].assign(code=[7, 99, 11, 99, 20])
    with pytest.warns(UserWarning, match="99"):
        at = inputs(new)
    f = ogp.CollapsedGP(kernel, X, X, 0.3, jitter=1e-13).posterior(jnp.asarray(y))

    def exact(A, B):
        towns = (W @ W.T + np.diag(kappa))[np.ix_(A[:, 1].astype(int), B[:, 1].astype(int))]
        codes = rho + (1 - rho) * (A[:, 2:3] == B[:, 2])
        return oracles.matern52(1.3, 0.9)(A[:, [0, 3]], B[:, [0, 3]]) * towns * codes

    mean, cov = oracles.exact_predict(exact, np.asarray(X), y, 0.09, np.asarray(at))
    np.testing.assert_allclose(f(at).mean, mean, atol=1e-6)
    np.testing.assert_allclose(jnp.sqrt(f(at).variance), np.sqrt(np.diag(cov)), atol=1e-6)


def test_learned_points_keep_their_categories(rng, table):
    """No derivative along columns of categories, from where init.kmeans has put them."""
    inputs = ogp.inputs_of(table)
    X, town = inputs(table), inputs["town"]
    Z = init.kmeans(jax.random.PRNGKey(0), X, 6, categories=[town.column])
    assert set(np.unique(Z[:, town.column])) <= {0.0, 1.0}
    kernel = kernels.RBF(1.0).on(inputs.numbers) * kernels.Coregion.exchangeable(town.num, 0.5).on(town.column)
    y = jnp.asarray(rng.normal(size=30))
    slope = jax.grad(lambda Z: ogp.CollapsedGP(kernel, X, Z, 0.3).log_prob(y))(Z)
    assert (slope[:, town.column] == 0).all() and (slope[:, 0] != 0).all()


def test_columns_that_are_constant_or_huge_are_standardized(rng):
    """Rounding errors were the scale of the first, and the second was zero throughout: its variance is no number of float64."""
    x = rng.normal(size=50)
    table = pd.DataFrame({"constant": np.full(50, 0.1), "huge": 1e200 * x})
    inputs = ogp.inputs_of(table)
    np.testing.assert_allclose(inputs(table)[:, 1], (x - x.mean()) / x.std(), rtol=1e-12)
    np.testing.assert_allclose(inputs(table.assign(constant=0.2))[:, 0], 0.1, rtol=1e-12)
