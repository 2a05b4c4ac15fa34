"""A hundred random programs beside dense formulas (tests/fuzz), and faults planted to see that they are found.

More of them: ``make fuzz SEEDS=0:5000``. One again: ``make fuzz SEEDS=17``, which prints the program if it fails.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

from numpyro_orthgp.functions import function as process
from numpyro_orthgp.functions.marginals import Marginals
from tests.fuzz.families import program
from tests.fuzz.properties import check


def failures(seed: int) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = check(program(seed))
    return "\n".join([f"seed {seed}", run.program.source(), *run.failures]) if run.failures else ""


@pytest.mark.parametrize("seed", range(100))
def test_program(seed):
    assert not (found := failures(seed)), found
    if seed % 10 == 9:
        jax.clear_caches()


def free_tightening(patch):
    patch.setattr(Marginals, "_latent_cost", property(lambda m: jnp.zeros_like(m.explained)))


def larger_variances(patch):
    variance = Marginals.variance.fget
    patch.setattr(Marginals, "variance", property(lambda m: 1.001 * variance(m)))


def lost_derivatives(patch):
    patch.setattr(process, "with_derivative_of", lambda x, y: jax.lax.stop_gradient(x))


def draws_row_by_row(patch):
    call = process.GPFunction.__call__
    patch.setattr(process.GPFunction, "__call__", lambda f, X: call(f, X).independent())


@pytest.mark.parametrize(
    ("plant", "seed", "says"),
    [
        (free_tightening, 4, "bound: ELBO"),
        (larger_variances, 2, "bound: ELBO"),
        (lost_derivatives, 22, "gradient: slope"),
        (draws_row_by_row, 0, "bound: ELBO"),
    ],
)
def test_planted_faults_are_found(plant, seed, says, monkeypatch):
    jax.clear_caches()
    plant(monkeypatch)
    found = failures(seed)
    jax.clear_caches()
    assert says in found
    assert "model(rows" in found  # the program that shows it
