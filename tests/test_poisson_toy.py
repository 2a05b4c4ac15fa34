"""Counts on a line: the toy experiment of Titsias 2025, Sec. 5.4, by the repository's own script."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from benchmarks import poisson


def test_the_tight_bound_is_higher_and_v_is_well_below_one():
    X, y = poisson.toy_data(1)
    Z = jnp.linspace(-8, 8, 6)[:, None]
    loose, _, _ = poisson.fit(X, y, Z, "prior", 1500, learn_points=True)
    tight, params, _ = poisson.fit(X, y, Z, "tight", 1500, learn_points=True)
    assert tight > loose + 1
    assert 0.6 < float(params["f_residual_scale"]) < 0.75  # the paper: about 0.675


@pytest.mark.slow
def test_on_every_draw_of_the_data():
    vs = []
    for seed in range(3):
        loose, tight, full, v = poisson.toy(seed, 2000)
        assert loose + 0.3 < tight < full
        vs.append(v)
    assert 0.6 < sum(vs) / 3 < 0.8
