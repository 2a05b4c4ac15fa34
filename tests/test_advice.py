"""What ``check`` says about fits that are bad in known ways, and that it says nothing about good ones."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta
from scipy import stats

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.diagnostics.advice import _on_calibration
from numpyro_orthgp.diagnostics.advice_on_outputs import advice_on_outputs
from numpyro_orthgp.diagnostics.calibration import Calibration, _outside
from numpyro_orthgp.diagnostics.convergence import convergence_of
from numpyro_orthgp.diagnostics.outputs import OutputFit
from numpyro_orthgp.diagnostics.tails import tail_gain
from tests import problems

N, NOISE = 200, 0.2
RNG = np.random.default_rng(0)
X = RNG.uniform(-1.7, 1.7, (N, 2))
WAVE = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1]
ROUGH = RNG.normal(size=N)
Y = WAVE + NOISE * ROUGH
Z = X[:: N // 40]


def model(X, y=None, *, Z):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    numpyro.sample("y", ogp.CollapsedGP(scale**2 * kernels.Matern52(lengthscale), X, Z, noise), obs=y)


def report_of(X=X, y=Y, Z=Z, rate=0.05, num_steps=200, at=None):
    """Of a fit by Adam, or of hyperparameters as they are given."""
    svi = SVI(model, AutoDelta(model), optax.adam(optax.constant_schedule(rate)), Trace_ELBO())
    X, y, Z = (jnp.asarray(a) for a in (X, y, Z))
    begin = {"lengthscale": [1.0, 1.0], "scale": 1.0, "noise": 0.5} if at is None else at
    params, known = {f"{name}_auto_loc": jnp.asarray(v) for name, v in begin.items()}, {}
    if at is None:
        fit = ogp.fit(
            svi, jax.random.PRNGKey(0), (X, y), num_steps=num_steps, init_params=params, progress_bar=False, Z=Z
        )
        params, known = fit.params, {"losses": fit.losses}
    return ogp.check(model, svi.guide, params, X, y, Z=Z, num_samples=25, **known)


AT_ONE = {"lengthscale": [1.0, 1.0], "scale": 1.0, "noise": 0.5}
outlying = np.where(np.arange(N) % 20 == 0, 8.0, 1.0)
again = np.tile(np.arange(N // 2), 2)
TABLE = {
    "a good fit": ({}, []),
    "a weak signal": ({"y": 0.4 * WAVE + ROUGH}, []),
    "inputs that are not scaled, lengthscales that are": (
        {"X": X * [1e3, 1e-2], "Z": Z * [1e3, 1e-2], "at": {"lengthscale": [1e3, 3e-2], "scale": 1.0, "noise": NOISE}},
        [],
    ),
    "too few steps": ({"num_steps": 20}, ["The loss is still falling: take more steps"]),
    "too small a rate": ({"rate": 1e-3}, ["The loss is still falling: take more steps, or a larger learning rate"]),
    "too large a rate": ({"rate": 8.0}, ["take a smaller learning rate"]),
    "points in a corner": ({"Z": Z / 8 + 1.5}, ["Add points there"]),
    "all noise": (
        {"at": {"lengthscale": [0.045, 0.045], "scale": 0.3, "noise": 0.95}},
        [
            "The fit explains next to nothing of y",
            "No row tells about another",
            "start at lengthscales of about sqrt(D)",
        ],
    ),
    "no noise, and a function that is": (
        {"at": {"lengthscale": [0.03, 0.03], "scale": 0.9, "noise": 0.2}},
        ["No row tells about another"],
    ),
    "inputs that do not tell": (
        {"y": ROUGH},
        ["The fit explains next to nothing of y", "Either the inputs tell nothing about"],
    ),
    "inputs that are not scaled": (
        {"X": X * [1e4, 1e-2], "Z": Z * [1e4, 1e-2], "num_steps": 30},
        ["Columns of the inputs of y have very different scales", "Column 0 has standard deviation 9", "Standardize"],
    ),
    "rows twice": ({"X": X[again], "y": Y[again]}, ["100 of 200 rows repeat an earlier one"]),
    "outputs in another unit": (
        {"y": 1e6 * Y, "at": AT_ONE},
        ["times as far from predictions as the noise, 0.5, allows", "Standardize it"],
    ),
    "outputs in a large unit": (
        {"y": 1e-6 * Y, "at": AT_ONE},
        ["The noise, 0.5, is ", "times the standard deviation of y", "Standardize it"],
    ),
    "labels": ({"y": 1.0 * (WAVE > 0)}, ["y has two values", "likelihoods.Bernoulli"]),
    "counts": (
        {"y": 1.0 * np.random.default_rng(3).poisson(np.exp(WAVE - 1))},
        ["y holds whole numbers from 0 on", "likelihoods.Poisson"],
    ),
    "outputs that are one number": ({"y": np.full(N, 3.0), "at": AT_ONE}, ["All 200 outputs y are 3."]),
    "inputs that are one point": (
        {"X": np.ones((N, 2)), "Z": np.ones((4, 2)), "at": AT_ONE},
        ["The fit explains next to nothing of y", "All 200 inputs of y are the same"],
    ),
    "lengthscales that are too long": (
        {"X": 1e-9 * X, "Z": 1e-9 * Z, "at": AT_ONE},
        ["y is the same at all rows", "standard deviations 9.9e-10, 1e-09"],
    ),
    "outliers": ({"y": WAVE + NOISE * ROUGH * outlying}, ["y has outliers", "likelihoods.StudentT"]),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_is_said(case):
    options, expected = TABLE[case]
    report = report_of(**options)
    said = "\n".join(report.advice)
    for words in expected:
        assert words in said, report
    if not expected:
        assert not said, report
    if "No row tells about another" in expected:
        assert "Add points there" not in said and "does nothing" not in said
    # Causes that are known leave no room for guesses.
    if any(words.startswith(("All 200", "y is the same")) for words in expected):
        assert "Take fewer points" not in said and "the fit is stuck" not in said
    if any("likelihoods.Bernoulli" in words or "likelihoods.Poisson" in words for words in expected):
        assert "StudentT" not in said


@pytest.mark.parametrize("num, expected", [(1, "Only 1 of 60 labels differ"), (30, "")])
def test_labels_that_are_too_few(num, expected):
    fit = OutputFit(
        "Bernoulli", ("f",), 60, 0.3, 0.01, np.nan, np.nan, np.nan, np.inf, 0.0, 0, *[0.1] * 3, "two values", num
    )
    said = "\n".join(advice_on_outputs({"y": fit}, {}, {}))
    assert expected in said and ("the fit is stuck" in said) == (not expected)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, "has outliers"),
        ({"values": "counts", "below_zero": 0.2}, "likelihoods.Poisson"),
        ({"values": "counts", "below_zero": 0.01, "noise": 20.0}, "has outliers"),
        ({"values": "whole numbers", "noise": 0.3}, "those of rounding"),
        ({"values": "two values"}, "likelihoods.Bernoulli"),
        ({"missed": 7.0}, "7 times as far from predictions as the noise, 0.5, allows. Either it is wrong, or f"),
        ({"missed": 7.0, "sd": 20.0}, "7 times as far from predictions as the noise, 0.5, allows. y has mean 0 and"),
        ({"sd": 0.0}, "All 60 outputs y are 0."),
    ],
)
def test_what_outputs_are(changes, expected):
    fit = OutputFit("Gaussian", ("f",), 60, 1.0, 0.8, 0.5, np.nan, np.nan, 3.0, 0.5, 0, 0.0, 1.0, 0.0)
    said = list(advice_on_outputs({"y": replace(fit, **changes)}, {}, {}))
    assert expected in "\n".join(said) and len(said) <= 2


def test_rows_beyond_those_that_were_fitted():
    """By more than a tenth of the range of a column; arrays without columns, and few rows, say nothing."""
    fitted = {"X": np.linspace([0, 5], [1, 5], 50), "y": np.zeros(50), "Z": np.zeros((3, 2))}
    new = np.array([[0.5, 5], [1.09, 5], [1.11, 5], [-0.2, 5], [0.5, 5.01]])
    assert _outside(fitted, {"X": new, "y": np.ones(5), "Z": np.ones((3, 2))}) == 0.6
    assert _outside({"y": fitted["y"]}, {"y": np.ones(5)}) == 0
    held = Calibration(np.zeros(100), np.linspace(0, 0.2, 100), 0.6)
    [said] = _on_calibration("y", held, None)
    assert "60 % of the held-out rows are beyond the range of the inputs that were fitted" in said
    [said] = _on_calibration("y", replace(held, outside=0.0), None)
    assert "beyond" not in said


@functools.cache
def counts_model():
    def counts(X, y=None, *, Z):
        f = ogp.gp("f", kernels.RBF(1.0), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Poisson(f(X) + 1.0), obs=y)

    return counts


@pytest.mark.parametrize("spread, said", [(None, False), (2.0, True)], ids=["Poisson", "negative binomial"])
def test_counts_that_vary_too_much(spread, said):
    rate = np.exp(1 + WAVE)
    rate = rate if spread is None else np.random.default_rng(1).gamma(spread, rate / spread)
    y = jnp.asarray(np.random.default_rng(2).poisson(rate).astype(float))
    guide = ogp.AutoSparseGP(counts_model(), natural=True)
    svi = SVI(counts_model(), guide, ogp.natural_gradient(optax.adam(0.01), 0.3), TraceMeanField_ELBO())
    inputs, points = jnp.asarray(X), jnp.asarray(X[::5])
    fit = ogp.fit(svi, jax.random.PRNGKey(0), (inputs, y), num_steps=60, progress_bar=False, Z=points)
    report = ogp.check(counts_model(), guide, fit.params, inputs, y, Z=points, losses=fit.losses, num_samples=100)
    assert any("likelihoods.NegativeBinomial" in line for line in report.advice) == said, report
    others = [line for line in report.advice if "NegativeBinomial" not in line and not line.startswith("k-hat")]
    assert not others, report
    found = report.outputs["y"]
    m = fit.posterior()["f"](inputs)
    mean = np.exp(1 + np.asarray(m.mean + m.variance / 2))
    free = np.maximum(1 - np.asarray(m.explained) * mean, 0.1)
    square = (np.asarray(y) - mean) ** 2
    np.testing.assert_allclose(found.dispersion, np.sum(square / mean) / free.sum(), rtol=1e-6)
    np.testing.assert_allclose(found.explained, 1 - np.mean(square / free**2) / np.var(y), rtol=1e-6)


def test_predictions_without_the_own_row():
    """With a point at each row leverages are those of the dense formula: rows are left out one by one."""
    at = {"lengthscale": [1.0, 1.3], "scale": 0.8, "noise": NOISE}
    inputs, y = X[:40], Y[:40]
    found = report_of(X=inputs, y=y, Z=inputs, at=at).outputs["y"]
    k = problems.kernel_oracle("matern52", 0.64, np.array([1.0, 1.3]))(inputs, inputs)
    left_out = []
    for i in range(40):
        kept = np.arange(40) != i
        left_out.append(k[i, kept] @ np.linalg.solve(k[np.ix_(kept, kept)] + NOISE**2 * np.eye(39), y[kept]))
    np.testing.assert_allclose(found.explained, 1 - np.mean((y - left_out) ** 2) / y.var(), rtol=1e-5)
    assert found.noise == NOISE and found.num == 40 and found.likelihood == "CollapsedGP"


@pytest.mark.parametrize("covariance, weight", [("prior", 1), ("diagonal", 2)])
def test_leverages_are_those_of_the_mean(covariance, weight):
    """Whatever covariance q has. The prior's, as of the second set of ODVGP, made good predictions explain nothing."""
    inputs, Z, offset, factor = X[:40], X[:40:5], 0.3, np.linspace(0.5, 2.0, 40)
    wave, mask = np.sin(inputs[:, 0]), np.arange(40) % 7 > 0

    def moved(x, y, z):
        f, g = ogp.gp("f", kernels.RBF(1.0), z), ogp.gp("g", kernels.RBF(1.0), z, num_latents=2)
        with numpyro.plate("data", weight * 40, subsample_size=40):
            numpyro.sample("y", likelihoods.Gaussian(f(x) * factor + offset, NOISE), obs=y)
            both = likelihoods.Gaussian(g(x), jnp.array([NOISE, 2 * NOISE]))
            numpyro.sample("both", both.mask(mask[:, None]).to_event(1), obs=jnp.stack([y, -y], -1))

    k = problems.kernel_oracle("rbf", 1.0, np.array([1.0, 1.0]))
    A = np.linalg.solve(np.linalg.cholesky(k(Z, Z) + 1e-10 * np.eye(8)), k(Z, inputs))
    y = factor * wave + offset + NOISE * np.random.default_rng(0).normal(size=40)
    rng = np.random.default_rng(1)
    loc = {"f": rng.normal(size=8), "g": rng.normal(size=(2, 8))}
    params = {f"{name}.u0_loc": jnp.asarray(m) for name, m in loc.items()}
    if covariance == "diagonal":
        params |= {f"{name}.u0_scale": jnp.full(m.shape, 3.0) for name, m in loc.items()}

    def explained(a, m, y, noise):
        a = a / noise
        leverage = np.einsum("mn,mk,kn->n", a, np.linalg.inv(np.eye(8) + weight * a @ a.T), a)
        return (y - a.T @ m * noise) / (1 - leverage)

    left = explained(A * factor, loc["f"], y - offset, NOISE)
    a, seen = A[:, mask], y[mask]
    both = np.stack(
        [explained(a, m, s * seen, n) for m, s, n in zip(loc["g"], (1, -1), (NOISE, 2 * NOISE), strict=True)]
    )
    args = jnp.asarray(inputs), jnp.asarray(y), jnp.asarray(Z)
    outputs = ogp.check(moved, ogp.AutoSparseGP(moved, covariance=covariance), params, *args, num_samples=25).outputs
    np.testing.assert_allclose(outputs["y"].explained, 1 - np.mean(left**2) / y.var(), rtol=1e-5)
    spread = np.stack([seen, -seen]).var()
    np.testing.assert_allclose(outputs["both"].explained, 1 - np.mean(both**2) / spread, rtol=1e-5)


def test_a_function_that_is_its_prior():
    """Whatever the likelihood; the only set of a function cannot be left out."""

    def classes(X, y, Z):
        f = ogp.gp("f", kernels.RBF(1.0), Z, num_latents=3)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Categorical(f(X)), obs=y)

    params = {"f.u0_loc": jnp.zeros((3, 9)), "f.u0_scale_tril": jnp.stack([jnp.eye(9)] * 3)}
    labels = jnp.asarray(np.arange(40) % 3)
    args = jnp.asarray(X[:40]), labels, jnp.asarray(X[:9])
    said = "\n".join(ogp.check(classes, ogp.AutoSparseGP(classes), params, *args, num_samples=25).advice)
    assert "q of f still equals its prior (0 nats)" in said and "leave it out" not in said


def test_a_loss_that_was_lower():
    """Its last two tenths tell nothing of it."""
    steps = np.arange(200)
    fell = 100 * np.exp(-steps / 10)
    assert not convergence_of(fell).was_lower
    rose = np.where(steps < 100, fell, 30.0)
    found = convergence_of(rose)
    assert found.was_lower and not found.rising and 29 < found.risen < 30
    noisy = fell + np.random.default_rng(0).normal(size=200)
    assert not convergence_of(noisy).was_lower


def test_tails_beside_a_normal_law_of_any_scale():
    rng = np.random.default_rng(0)
    assert tail_gain(3 * rng.normal(size=2000))[1] < 0.003
    z = 0.5 * rng.standard_t(3, size=2000)
    df, gain = tail_gain(z)
    exact = stats.t.logpdf(z, 3, scale=0.5).mean() - stats.norm.logpdf(z, scale=np.sqrt(np.mean(z**2))).mean()
    assert df in (2.5, 3.0, 4.0) and abs(gain - exact) < 0.01
