"""Likelihoods whose bound is quadratic in f: the best v of each row, for other noise than Gaussian."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.handlers import scale
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

KEY = jax.random.PRNGKey(0)
RNG = np.random.default_rng(0)
N, M = 24, 5
X, Z = np.sort(RNG.uniform(-3, 3, (N, 1)), 0), np.linspace(-3, 3, M)[:, None]
Y = (RNG.uniform(size=N) < 0.5 + 0.4 * np.sin(2 * X[:, 0])).astype(int)
LOC, ROOT = RNG.normal(size=M), np.tril(0.2 * RNG.normal(size=(M, M))) + 0.5 * np.eye(M)


class Logistic(likelihoods.Quadratic):
    """The quadratic bound of Jaakkola and Jordan 1997 at its best place, as of Polya-Gamma variables."""

    def conditional(self, f):
        return dist.BernoulliLogits(f)

    @property
    def at(self):
        return jnp.sqrt(self.marginals.mean**2 + self.marginals.variance)

    @property
    def noise(self):
        return jnp.sqrt(2 * self.at / jnp.tanh(self.at / 2))

    def expected_log_density(self, y):
        m, c = self.marginals, self.at
        beyond = (m.mean**2 + m.variance - c**2) / (2 * self.noise**2)
        return jax.nn.log_sigmoid(c) + ((2 * y - 1) * m.mean - c) / 2 - beyond


class Same(likelihoods.Quadratic):
    """Gaussian noise, written as a user would."""

    pytree_data_fields = ("noise_scale",)

    def __init__(self, marginals, noise_scale):
        self.noise_scale = noise_scale
        super().__init__(marginals)

    def conditional(self, f):
        return dist.Normal(f, self.noise_scale)

    @property
    def noise(self):
        return self.noise_scale

    def expected_log_density(self, y):
        m = self.marginals
        return dist.Normal(m.mean, self.noise_scale).log_prob(y) - m.variance / (2 * self.noise_scale**2)


def model(X, y, *, Z, likelihood=Logistic, weight=1.0):
    f = ogp.gp("f", 4.0 * kernels.RBF(jnp.asarray(0.6, X.dtype)), Z)
    with numpyro.plate("data", N), scale(scale=weight):
        numpyro.sample("y", likelihood(f(X)), obs=y)


def loss(dtype=jnp.float64, residual="tight", y=Y, v=1.0, **options):
    x, z = (jnp.asarray(a, dtype) for a in (X, Z))
    params = {"f.u0_loc": LOC, "f.u0_scale_tril": ROOT, "f_residual_scale": np.array(v)}
    params = {name: jnp.asarray(p, dtype) for name, p in params.items()}
    run, elbo = functools.partial(model, **options), TraceMeanField_ELBO()
    guide = ogp.AutoSparseGP(run, residual=residual)
    return jax.jit(lambda params, x, y, z: elbo.loss(KEY, params, run, guide, x, y, Z=z))(params, x, jnp.asarray(y), z)


def dense(tight, weight, dtype):
    """By the covariance of the residual under q, with N x N roots; nothing is known of its trace or divergence."""
    k = [4 * np.exp(-(np.subtract.outer(a[:, 0], b[:, 0]) ** 2) / 0.72) for a, b in ((Z, Z), (Z, X), (X, X))]
    jitter = 4 * (1e-10 if dtype == jnp.float64 else 1e-6)
    A = np.linalg.solve(np.linalg.cholesky(k[0] + jitter * np.eye(M)), k[1])
    R, mean, e = k[2] - A.T @ A, A.T @ LOC, np.sum((ROOT.T @ A) ** 2, 0)
    at = np.sqrt(mean**2 + e + (0 if tight else np.diag(R)))
    precision = np.tanh(at / 2) / (2 * at)
    power, times = (
        min(weight, 1.0),
        max(weight, 1.0),
    )  # a weight below one is a power; one above, of rows that stand for others
    s = 1 / np.sqrt(power * precision)
    values, axes = np.linalg.eigh(R / s / s[:, None])
    root = axes @ np.diag(np.sqrt(np.maximum(values, 0))) @ axes.T
    V = np.diag(1 / (1 + np.diag(R) / s**2)) if tight else np.eye(N)
    C = s[:, None] * (root @ V @ root) * s  # of the residual under q
    sign = 2 * Y - 1
    density = -np.log1p(np.exp(-at)) + (sign * mean - at) / 2 - precision * (mean**2 + e + np.diag(C) - at**2) / 2
    of_residual = (np.trace(V) - N - np.linalg.slogdet(V)[1]) / 2
    S = ROOT @ ROOT.T
    of_u = (np.trace(S) + LOC @ LOC - M - np.linalg.slogdet(S)[1]) / 2
    return -(times * (power * density.sum() - of_residual) - of_u)


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("residual", ["prior", "tight"])
@pytest.mark.parametrize("dtype, tol", [(jnp.float64, 1e-10), (jnp.float32, 2e-5)])
def test_bound_is_the_elbo_of_its_definition(residual, weight, dtype, tol):
    """A ``log_prob`` by hand forgets that a weight below one is outside of the cost, and is no bound."""
    assert_allclose(loss(dtype, residual, weight=weight), dense(residual == "tight", weight, dtype), rtol=tol)


def test_the_best_v_of_each_row_is_no_worse_than_one_v():
    class OneV(Logistic):
        closed_form = False

    of_one = [loss(likelihood=OneV, v=v) for v in (0.5, 0.7, 1.0)]
    assert loss() < min(of_one) and loss() < loss(residual="prior")
    exact = loss(likelihood=likelihoods.Bernoulli, v=0.7)  # of the density itself, with one v
    assert exact < min(of_one)


def test_gaussian_noise_is_one_of_them():
    y = np.sin(2 * X[:, 0])
    for weight in (0.3, 1.0):
        found = [
            loss(y=y, weight=weight, likelihood=lambda f, kind=kind: kind(f, 0.3))
            for kind in (Same, likelihoods.Gaussian)
        ]
        assert_allclose(*found, rtol=1e-12)


def test_what_else_sees_it():
    """Mixed outputs and groups have no best v; `check` shows those of rows."""
    mean, part = jnp.array([[0.3, -1.0]]), jnp.full((1, 2), 0.4)
    m = ogp.Marginals(mean, part, part, residual_scale=jnp.array([0.5, 0.5]))
    mixed = Logistic(m @ jnp.array([[1.0], [2.0]]))
    assert not mixed.closed_form
    assert_allclose(mixed.log_prob(jnp.ones((1, 1), int)), mixed.expected_log_density(1) - mixed.tightening_cost)
    grouped = ogp.Marginals(mean[0], part[0], part[0], residual_scale=jnp.ones(()), groups=jnp.eye(2)[None])
    with pytest.raises(ValueError, match=r"`group_size`.*Logistic"):
        Logistic(grouped)
    args, z = (jnp.asarray(X), jnp.asarray(Y)), jnp.asarray(Z)
    guide = ogp.AutoSparseGP(model, residual="tight")
    svi = SVI(model, guide, optax.adam(0.05), TraceMeanField_ELBO())
    fit = ogp.fit(svi, KEY, args, num_steps=50, progress_bar=False, Z=z)
    assert fit.losses[-1] < fit.losses[0]
    v = ogp.check(model, guide, fit.params, *args, Z=z, num_samples=25).residual_scales["y"]
    assert v.shape == (N,) and (v > 0).all() and (v < 1).all()


@pytest.mark.parametrize("parts", [{"noise": 1.0}, {"expected_log_density": lambda self, y: y}])
def test_what_it_must_define_is_said(parts):
    with pytest.raises(TypeError, match=r"Half must define the property `noise`, .* `expected_log_density\(y\)`"):
        type("Half", (likelihoods.Quadratic,), parts)


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"explained": jnp.ones((3, 1))},
            r"`explained` of Marginals must have the shape of `mean`, \(3,\); got \(3, 1\)",
        ),
        (
            {"residual": jnp.ones((3, 1))},
            r"`residual` of Marginals must have the shape of `mean`, \(3,\); got \(3, 1\)",
        ),
        ({"explained": 1.0}, "`explained` of Marginals must be an array; got a float"),
        ({"mean": [0.0, 1.0, 2.0]}, "`mean` of Marginals must be an array; got a list"),
    ],
)
def test_marginals_of_ones_own_have_one_shape(change, words):
    """With a column of variances a loss counted each row as often as there are rows."""
    parts = {"mean": jnp.zeros(3), "explained": jnp.ones(3), "residual": jnp.ones(3)}
    with pytest.raises(ValueError, match=words):
        likelihoods.Gaussian(ogp.Marginals(**parts | change), 0.1)
