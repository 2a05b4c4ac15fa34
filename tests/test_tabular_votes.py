"""Labels of near rows beside the probabilities of the functions."""

from __future__ import annotations

import pickle
from dataclasses import replace

import jax
import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular.classification import votes_for
from numpyro_orthgp.tabular.columns import read_table
from numpyro_orthgp.tabular.votes import REACHES, TOTALS, Votes, VotesOf

SMALL = {"M": 8, "num_steps": 15}


def expected(votes, lengthscale, X, y, p, new):
    """The formula, over all rows."""
    r = np.sqrt(5) * np.sqrt((((new[:, None] - X) / lengthscale) ** 2).sum(-1)) / votes.reach
    alike = (1 + r + r**2 / 3) * np.exp(-r)
    counted = np.stack([(alike * (y == c)).sum(1) for c in range(p.shape[1])], -1)
    return (votes.total * p + counted) / (votes.total + alike.sum(1, keepdims=True))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(60, 3)), rng.integers(0, 3, 60), np.array([0.7, 2.0, 5.0]), rng


@pytest.mark.parametrize("votes", [Votes(0.25, 0.3), Votes(1.0, 10.0)])
def test_probabilities_are_those_of_the_formula(rows, votes):
    X, y, lengthscale, rng = rows
    new, p = rng.normal(size=(21, 3)), rng.dirichlet(np.ones(3), 21)
    with jax.enable_x64(True):
        voters = VotesOf.rows(lengthscale, X, y, 3)
        found = votes.mixed(p, *voters.counted_at(new, (votes.reach,)))
        each = votes.mixed(p, voters.counted_each(new, votes.reach))
    np.testing.assert_allclose(found, expected(votes, lengthscale, X, y, p, new), rtol=1e-10)
    np.testing.assert_allclose(each, found, rtol=1e-12)


def test_the_nearest_of_many_rows(rows):
    """The others are so far that they count nothing."""
    *_, lengthscale, rng = rows
    X, y = 10 * rng.normal(size=(3000, 3)), rng.integers(0, 3, 3000)
    new, p, votes = X[:9] + 0.01, np.full((9, 3), 1 / 3), Votes(0.25, 0.1)
    with jax.enable_x64(True):
        found = votes.mixed(p, *VotesOf.rows(lengthscale, X, y, 3).counted_at(new, (votes.reach,)))
    np.testing.assert_allclose(found, expected(votes, lengthscale, X, y, p, new), atol=1e-7)


def test_the_same_row_counts_one_and_a_far_one_nothing(rows):
    X, y, lengthscale, _ = rows
    with jax.enable_x64(True):
        (counted,) = VotesOf.rows(lengthscale, X, y, 3).counted_at(np.stack([X[0], X[0] + 1e3]), (REACHES[0],))
    np.testing.assert_allclose(counted, [np.eye(3)[y[0]], np.zeros(3)], atol=1e-3)


def test_held_out_rows_decide(rows):
    """Labels at random gain nothing beyond chance, also of few rows. Labels of the nearest row gain much."""
    *_, rng = rows
    X, held = rng.normal(size=(1000, 2)), rng.normal(size=(250, 2))
    p = np.full((250, 2), 0.5)
    with jax.enable_x64(True):
        for seed in range(5):
            y = np.random.default_rng(seed).integers(0, 2, 1250)
            for num in (10, 60, 250):
                assert votes_for(p[:num], VotesOf.rows(np.ones(2), X, y[250:], 2), held[:num], y[:num]) is None
        # Squares like those of a chess board, too many for the functions.
        y, new = ((np.floor(2 * a).sum(1) % 2).astype(int) for a in (X, held))
        voters = VotesOf.rows(np.ones(2), X, y, 2)
        votes = votes_for(p, voters, held, new)
        assert votes is not None and votes.reach in REACHES and votes.total in TOTALS
        found = votes.mixed(p, *voters.counted_at(held, (votes.reach,)))
        assert np.log(found[np.arange(250), new]).mean() > np.log(0.5) + 0.2


@pytest.fixture(scope="module")
def recurring():
    """Rows that recur with their labels, which no function of the columns follows."""
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(1200, 2)), rng.integers(0, 2, 1200)
    order = rng.permutation(2400)
    X, y = np.tile(X, (2, 1))[order], np.array(["u", "v"])[np.tile(y, 2)[order]]
    return X, y, ogp.classification(X[:2040], y[:2040], **SMALL)


def test_rows_that_recur_are_found_again(recurring):
    X, y, fit = recurring
    new = slice(2040, None)
    p = fit.predict(X[new])
    assert (p.label == y[new]).mean() > 0.85 and p.log_density(y[new]).mean() > np.log(0.5) + 0.2
    np.testing.assert_allclose(p.probabilities.sum(-1), 1)
    assert "held-out rows were clearly better so" in str(fit) and "labels of rows within about" in str(fit)
    alone = replace(fit, found=replace(fit.found, votes=None)).predict(X[new]).probabilities
    columns = fit.columns.encode(read_table(X[new]))
    exact = expected(fit.found.votes, fit.hyperparameters["lengthscale"], fit.X, fit.y, alone, columns)
    np.testing.assert_allclose(p.probabilities, exact, atol=1e-6)


def test_they_count_in_files_copies_programs_and_single_rows(recurring, tmp_path):
    X, _, fit = recurring
    p = fit.predict(X[:40]).probabilities
    fit.save(tmp_path / "fit.npz")
    again = ogp.load(tmp_path / "fit.npz")
    assert again.found.votes == fit.found.votes is not None
    for other in (again, pickle.loads(pickle.dumps(fit))):
        np.testing.assert_array_equal(other.predict(X[:40]).probabilities, p)
    one = np.concatenate([fit.predict(X[i : i + 1]).probabilities for i in range(5)])
    np.testing.assert_allclose(one, p[:5], rtol=1e-12)
    with jax.enable_x64(True):
        served = fit.export().call(fit.as_array(X[:40]))["probabilities"]
    np.testing.assert_allclose(served, p, rtol=1e-10)
