"""Regression with three bounds and the exact GP: the experiment of Titsias 2025, Sec. 5.2, small, by the repository's script."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from benchmarks import medium_regression as script
from benchmarks.store import Store
from numpyro_orthgp import init


@pytest.mark.slow
def test_all_methods_run_and_bounds_are_in_order_at_equal_parameters(rng, tmp_path):
    X = 3 * rng.normal(size=(80, 2)) + 5
    y = np.sin(X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=80)
    np.savez(tmp_path / "toy.npz", X=X, y=y)
    small = ["--num-data", "40", "--num-inducing", "6", "--steps", "20"]
    args = script.parse(["--data", str(tmp_path), "--out", str(tmp_path), *small])
    store = Store(tmp_path / "rows.jsonl", script.Key)
    cases = list(script.run_set("toy", *script.load(tmp_path, "toy"), args, store))
    assert [method for _, method, _ in cases] == list(script.BOUNDS)
    for _, _, (row,) in cases:
        assert all(np.isfinite(v) for k, v in row.items() if k != "curves")
        assert row["bound"] > row["curves"]["value"][0]
    # What has been run is read and not run again.
    again = Store(tmp_path / "rows.jsonl", script.Key)
    assert list(script.run_set("toy", *script.load(tmp_path, "toy"), args, again)) == cases
    assert len(store.path.read_text().splitlines()) == len(cases)

    data = script.split(X, y, 0, 40)
    Z = init.kmeans(random.PRNGKey(0), data.X, 6)
    params = {"noise": jnp.asarray(0.3), "scale": jnp.asarray(0.9), "lengthscale": jnp.asarray([0.8, 2.0]), "Z": Z}

    @jax.jit
    def compare(params):
        at_every_point = {**params, "Z": data.X}
        predictions = [script.predict(at_every_point, data, bound) for bound in ("titsias2025", None)]
        return [script.objective(params, data, bound) for bound in script.BOUNDS.values()], *predictions

    values, sparse, exact = compare(params)
    assert values == sorted(values) and len({float(v) for v in values}) == 5
    # With a point at each input predictions are those of the exact GP.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sparse, exact)


def test_split_is_that_of_the_paper(rng):
    X, y = rng.normal(size=(17379, 3)), rng.normal(size=17379)
    X[:, 1] = 4.0  # a constant column is only centred
    data = script.split(X, y, 0)
    assert len(data.y) == 11122 and len(data.y_test) == 17379 // 5
    np.testing.assert_allclose(data.X.std(0), [1, 0, 1], atol=1e-6)
    np.testing.assert_allclose([data.y.mean(), data.y.std()], [0, 1], atol=1e-6)


@pytest.mark.slow
def test_bounds_of_bike_are_in_order_each_trained_by_itself(data):
    arrays = script.load(data, "bike")
    part = script.split(*arrays, 0, 400)
    Z = init.kmeans(random.PRNGKey(0), part.X, 32)
    rows = [script.measure(part, Z, method, 1000) for method in script.BOUNDS]
    bounds, noises = [row["bound"] for row in rows], [row["noise"] for row in rows]
    assert bounds == sorted(bounds) and min(np.diff(bounds)) > 0.005
    assert noises == sorted(noises, reverse=True)  # the looser the bound, the more is taken for noise
    assert all(row["bound"] <= row["evidence"] + 1e-9 for row in rows)
