"""Every kind of number in float32 beside float64, from inputs that both hold: off by little more than rounding these explains."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods, online
from numpyro_orthgp.online.memory import log_ratio

JITTER = 1e-6  # in both


def rounded(a):
    return np.asarray(np.asarray(a, np.float32), float)


def three_ways(program, arguments):
    """Results in float32, in float64, and how far those in float64 move if inputs do by half a unit of float32."""
    arguments, rng = [rounded(a) for a in arguments], np.random.default_rng(0)
    compiled = jax.jit(program)

    def run(dtype, values):
        return {k: np.asarray(v, float) for k, v in compiled(*(jnp.asarray(a, dtype) for a in values)).items()}

    exact, effect = run(jnp.float64, arguments), {}
    for _ in range(2):
        moved = run(jnp.float64, [a * (1 + 6e-8 * rng.choice([-1, 1], np.shape(a))) for a in arguments])
        effect = {k: np.fmax(np.abs(moved[k] - v), effect.get(k, 0)) for k, v in exact.items()}
    return run(jnp.float32, arguments), exact, effect


def functions(kernel, num_sets, X, Z, y, new, at, lengthscale, noise):
    """Numbers of a fit, of what grows out of it, and of functionals; standard deviations are `...sd`, means `...mean`."""
    sets = [Z] if num_sets == 1 else [Z[::2], Z[1::2]]

    def bound(lengthscale, noise):
        model = ogp.CollapsedGP(kernel(lengthscale), X, sets, noise, jitter=JITTER)
        return model.log_prob(y) / len(y)

    value, slopes = jax.value_and_grad(bound, (0, 1))(lengthscale, noise)
    found = {"bound": value, "slope of lengthscale": slopes[0] * lengthscale, "slope of noise": slopes[1] * noise}
    f = ogp.CollapsedGP(kernel(lengthscale), X, sets, noise, jitter=JITTER).posterior(y)
    grown = online.condition(f, at[:3], f(at[:3]).mean + noise, noise, jitter=JITTER)
    compressed = online.compress(f, new, jitter=JITTER)
    apart = jnp.stack([at, at[::-1]], 1)
    marginals = {
        "f": f(at), "average": f(ogp.Average(apart)), "grown": grown(at), "compressed": compressed(at),
        "slope": f(ogp.Derivative(at, 0)) * lengthscale,
        "integral": f(ogp.Integral(at, at + 0.5, average=True)),
    }  # fmt: skip
    for name, m in marginals.items():
        found |= {f"{name} mean": m.mean, f"{name} sd": jnp.sqrt(m.variance + noise**2)}
    joint = f.joint(at)
    found["joint sd"] = jnp.sqrt(jnp.diagonal(joint.covariance_matrix) + noise**2)
    found["memory"] = log_ratio(compressed, f) / len(y)
    return found


BASE = {"offset": 0.0, "lengthscale": 0.4, "noise": 0.1, "N": 100, "M": 15, "kernel": kernels.RBF, "sets": 1}
FAST = {
    "as usual": {},
    "years": {"offset": 2000.0, "kernel": kernels.Matern52},
    "many points": {"M": 30, "lengthscale": 1.0},
}
SLOW = {
    "long": {"lengthscale": 30.0},
    "short": {"lengthscale": 0.01},
    "much noise": {"noise": 1e3},
    "one row": {"N": 1, "M": 1},
    "two sets": {"sets": 2},
    "rough": {"kernel": kernels.Matern32},
    "heavy": {"kernel": kernels.RationalQuadratic},
    "metres": {"offset": 4e6, "lengthscale": 40.0, "kernel": kernels.Matern32},
}


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)], ids=lambda n: n.replace(" ", "-")
)
def test_functions(name, rng):
    c = BASE | (FAST | SLOW)[name]
    spread = c["lengthscale"] if name == "metres" else 1.0
    X = c["offset"] + spread * rng.uniform(-1, 1, (c["N"], 1))
    y = np.sin(3 * (X[:, 0] - c["offset"]) / spread) + c["noise"] * rng.normal(size=c["N"])
    Z, new = (c["offset"] + spread * w * np.linspace(-1, 1, M)[:, None] for w, M in ((1, c["M"]), (1.1, c["M"] + 3)))
    at = c["offset"] + spread * np.linspace(-1.5, 1.5, 7)[:, None]
    kernel = c["kernel"]

    def program(*arguments):
        return functions(kernel, c["sets"], *arguments)

    got, exact, effect = three_ways(program, (X, Z, y, new, at, c["lengthscale"], c["noise"]))
    for key, value in exact.items():
        scale = exact[key.replace("mean", "sd")] if key.endswith(("mean", "sd")) else 1 + np.abs(value)
        error = np.abs(got[key] - value) / scale
        assert (error <= 0.02 + 30 * effect[key] / scale).all(), (key, error.max(), (effect[key] / scale).max())


MEANS, VARIANCES = (-9.0, -4.5, 0.0, 0.3, 4.0), (0.0, 1e-6, 1e-2, 1.0, 9.0)
LIKELIHOODS = {
    "Gaussian": (lambda m: likelihoods.Gaussian(m, 0.01), (0.0, 1e6)),
    "StudentT": (lambda m: likelihoods.StudentT(m, 4.0, 0.1), (0.0, 1e4)),
    "Laplace": (lambda m: likelihoods.Laplace(m, 0.01), (0.0, 1e4)),
    "Poisson": (lambda m: likelihoods.Poisson(m, 1e3), (0.0, 7.0, 1e4)),
    "Binomial": (lambda m: likelihoods.Binomial(m, 1e7), (0.0, 1e3, 1e7)),
    "probit": (lambda m: likelihoods.Binomial(m, 1e7, "probit"), (0.0, 1e3)),
    "cloglog": (lambda m: likelihoods.Bernoulli(m, "cloglog"), (0.0, 1.0)),
    "NegativeBinomial": (lambda m: likelihoods.NegativeBinomial(m, 0.5), (0.0, 1e7)),
    "Beta": (lambda m: likelihoods.Beta(m, 1e3), (1e-6, 0.5)),
    "Gamma": (lambda m: likelihoods.Gamma(m, 20.0), (1e-6, 3.0)),
    "Ordinal": (lambda m: likelihoods.Ordinal(m, jnp.asarray([-1.0, 1e-3, 2e-3], m.mean.dtype)), (0.0, 2.0, 3.0)),
}
QUICK = ("Laplace", "Poisson", "probit", "cloglog")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LIKELIHOODS])
def test_likelihoods(name):
    """Values in nats, or in standard deviations of y; derivatives in nats for a standard deviation of f, or its logarithm."""
    build, outputs = LIKELIHOODS[name]
    mean, variance, y = (np.array(a) for a in zip(*itertools.product(MEANS, VARIANCES, outputs), strict=True))

    def program(mean, variance, y):
        def likelihood(mean, variance):
            return build(ogp.Marginals(mean, variance, jnp.zeros_like(variance)))

        now = likelihood(mean, variance)
        found = {"mean": now.mean, "sd": jnp.sqrt(now.variance)}
        for key in ("log_prob", "log_predictive"):
            found[key], pull = jax.vjp(lambda *a: getattr(likelihood(*a), key)(y), mean, variance)  # noqa: B023
            slopes = pull(jnp.ones_like(found[key]))
            found |= {f"{key} by mean": slopes[0] * jnp.sqrt(variance), f"{key} by variance": slopes[1] * variance}
        return found

    got, exact, effect = three_ways(program, (mean, variance, y))
    for key, value in exact.items():
        moments = key in ("mean", "sd")
        scale = np.abs(exact["sd"]) + 1e-30 if moments else 1 + np.abs(value)
        # Where p(y | f) is out of reach of q(f), nodes are at the edge of the region in which its peak is looked for.
        within = np.abs(exact["log_predictive"]) < (1e3 if "predictive" in key else np.inf)
        error = np.abs(got[key] - value) / scale
        allowed = 5e-3 + (30 * effect[key] + 5e-7 * np.abs(exact["mean"]) * moments) / scale
        bad = within & ~(error <= allowed)
        assert not bad.any(), (
            key,
            [(mean[i], variance[i], y[i], got[key][i], value[i]) for i in np.flatnonzero(bad)[:3]],
        )
