"""NumPyro's laws of a distribution (shapes, expand, mask, pytree, transforms, gradients, divergences), for every class here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from numpy.testing import assert_allclose
from numpyro.distributions.kl import kl_divergence

import numpyro_orthgp as ogp
from numpyro_orthgp import GaussHermite, QuasiMonteCarlo
from numpyro_orthgp import likelihoods as L
from numpyro_orthgp.gaussians import FAMILIES, Diagonal
from numpyro_orthgp.gaussians.distributions import WhitenedGaussian, WhitenedPrior

B, M = 3, 4
KEY = jax.random.PRNGKey(0)
RNG = np.random.default_rng(0)


class Law(NamedTuple):
    """A distribution as a function of its differentiable parameters, and a value of it."""

    build: Callable[[Any], dist.Distribution]
    params: Any
    y: Any

    @property
    def distribution(self):
        return self.build(self.params)


def f(P=None):
    shape = (B,) if P is None else (B, P)
    return tuple(jnp.asarray(a) for a in (RNG.normal(size=shape), *RNG.uniform(0.1, 1, (2, *shape))))


def law(build, y, P=None, **params):
    params = {k: jnp.asarray(p) for k, p in params.items()}
    return Law(lambda p: build(ogp.Marginals(*p[0]), **p[1]), (f(P), params), jnp.asarray(y))


def _negative_binomial(m, c):
    # a Partial carries c as data of the pytree; a lambda would keep it as a tracer of whatever transform made it
    return ogp.Likelihood(m, Partial(lambda c, f: dist.NegativeBinomial2(jnp.exp(f), c), c))


def _multinomial(m):
    return ogp.Likelihood(m, lambda f: dist.Multinomial(5, logits=f), integrator=QuasiMonteCarlo(16))


def _gaussian(covariance, P=None):
    batch = () if P is None else (P,)
    loc = jnp.asarray(RNG.normal(size=(*batch, M)))
    scale = {
        "full": jnp.asarray(np.tril(RNG.normal(size=(*batch, M, M)) / 4) + np.eye(M)),
        "diagonal": jnp.asarray(RNG.uniform(0.5, 2, (*batch, M))),
        "prior": None,
    }[covariance]

    def build(params):
        loc, scale = params
        # as in a guide, what is above the diagonal of a factor is no parameter
        return WhitenedGaussian(
            FAMILIES[covariance](loc, *([] if scale is None else [jnp.tril(scale) if covariance == "full" else scale]))
        )

    return Law(build, (loc, scale), jnp.asarray(RNG.normal(size=loc.shape)))


REAL = np.array([0.3, -1.0, 2.0])
CENSORED = np.array([False, True, False])
EXP = dist.transforms.ExpTransform()
TIMES = np.array([0.5, 2.0, 0.1])
LIKELIHOODS = {
    "Gaussian": law(L.Gaussian, REAL, scale=0.4),
    "Gaussian (B, P)": law(L.Gaussian, np.stack([REAL, -REAL], -1), 2, scale=[0.4, 0.7]),
    "HeteroskedasticGaussian": law(L.HeteroskedasticGaussian, REAL, 2),
    "StudentT": law(L.StudentT, REAL, df=4.0, scale=0.5),
    "Laplace": law(L.Laplace, REAL, scale=0.5),
    "AsymmetricLaplace": law(L.AsymmetricLaplace, REAL, scale=0.5, quantile=0.8),
    "Beta": law(L.Beta, [0.2, 0.9, 0.4], concentration=3.0),
    "Bernoulli logit": law(L.Bernoulli, [0, 1, 1]),
    "Bernoulli probit": law(lambda m: L.Bernoulli(m, "probit"), [0, 1, 1]),
    "Bernoulli cloglog": law(lambda m: L.Bernoulli(m, "cloglog"), [0, 1, 1]),
    "Binomial": law(lambda m: L.Binomial(m, [4, 5, 3], "cloglog"), [0, 3, 1]),
    "Poisson": law(L.Poisson, [0, 3, 1], exposure=[0.5, 1.0, 2.0]),
    "NegativeBinomial": law(L.NegativeBinomial, [0, 3, 1], concentration=2.5, exposure=1.5),
    "ZeroInflated": law(lambda m, gate: L.ZeroInflated(L.Poisson(m), gate), [0, 3, 1], gate=[0.1, 0.2, 0.3]),
    "Exponential": law(lambda m: L.Exponential(m, CENSORED), TIMES),
    "Weibull": law(lambda m, k: L.Weibull(m, k, CENSORED), TIMES, k=1.5),
    "Gamma": law(lambda m, k: L.Gamma(m, k, CENSORED), TIMES, k=1.5),
    "LogNormal": law(lambda m, scale: L.LogNormal(m, scale, CENSORED), TIMES, scale=0.6),
    "Ordinal": law(L.Ordinal, [0, 2, 1], cutpoints=[-0.5, 0.7]),
    "Categorical": law(lambda m: L.Categorical(m, integrator=GaussHermite(4)), [0, 2, 1], 3),
    "Categorical robustmax": law(lambda m, epsilon: L.Categorical(m, "robustmax", epsilon), [0, 2, 1], 3, epsilon=0.01),
    "Transformed": law(lambda m, scale: L.Transformed(L.Gaussian(m, scale), EXP), TIMES, scale=0.4),
    "NegativeBinomial2": law(_negative_binomial, [0, 3, 1], c=2.5),
    "Multinomial": law(_multinomial, [[5, 0, 0], [1, 2, 2], [0, 4, 1]], 3),
}
GAUSSIANS = {f"q {kind} {P}": _gaussian(kind, P) for kind in ("full", "diagonal", "prior") for P in (None, 2)}
LAWS = {
    **LIKELIHOODS,
    **GAUSSIANS,
    "prior (M,)": Law(lambda _: WhitenedPrior((M,), jnp.float64), (), jnp.asarray(RNG.normal(size=M))),
    "prior (P, M)": Law(lambda _: WhitenedPrior((2, M), jnp.float32), (), jnp.zeros((2, M), jnp.float32)),
}
every_law = pytest.mark.parametrize("name", LAWS)
every_likelihood = pytest.mark.parametrize("name", LIKELIHOODS)
# Wrappers ask a distribution for no more than `log_prob` and `sample` with sample axes: a few kinds stand for all.
WRAPPED = (
    "Gaussian (B, P)",
    "Poisson",
    "Categorical robustmax",
    "Transformed",
    "Multinomial",
    *GAUSSIANS,
    "prior (P, M)",
)
# Compiling is most of what these tests cost.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@every_law
def test_shapes_and_support_of_samples(name):
    d = LAWS[name].distribution

    def draw(d, sample_shape):
        y = d.sample(KEY, sample_shape)
        return y, d.log_prob(y)

    for sample_shape in ((), (3,), (2, 3)):
        y, log_prob = jax.eval_shape(lambda d, shape=sample_shape: draw(d, shape), d)
        assert y.shape == sample_shape + d.batch_shape + d.event_shape == d.shape(sample_shape)
        assert log_prob.shape == sample_shape + d.batch_shape


@pytest.mark.parametrize("name", [n for n in LAWS if n not in LIKELIHOODS])
def test_support_and_dtype_of_samples(name):
    d = LAWS[name].distribution  # those of likelihoods: tests/test_likelihoods.py
    y = d.sample(KEY, (2, 3))
    assert bool(np.all(d.support(y)))
    assert y.dtype == d.log_prob(y).dtype == LAWS[name].y.dtype


@every_law
def test_densities_take_sample_axes(name):
    d, y = LAWS[name].distribution, LAWS[name].y
    # three different rows, each allowed
    rows = jnp.stack([y, y, y[:1].repeat(len(y), 0) if name in LIKELIHOODS else 2 * y])
    methods = ("log_prob", "log_predictive") if name in LIKELIHOODS else ("log_prob",)

    def run(d):
        each = [getattr(d, method) for method in methods]
        return [(f(jnp.stack([rows, rows])), jnp.stack([jnp.stack([f(row) for row in rows])] * 2)) for f in each]

    for together, one_by_one in quick(run)(d):
        assert together.shape == (2, 3, *d.batch_shape)
        assert_allclose(together, one_by_one, rtol=1e-9)


@pytest.mark.parametrize("name", WRAPPED)
def test_expand_and_to_event(name):
    d, y = LAWS[name].distribution, LAWS[name].y
    wide = d.expand((5, *d.batch_shape))
    assert jax.eval_shape(lambda: wide.sample(KEY, (2,))).shape == (2, 5, *d.shape())
    whole = d.to_event(len(d.batch_shape))
    assert whole.batch_shape == () and whole.event_shape == d.shape()
    fifth = jnp.broadcast_to(y, (5, *y.shape))
    many, one, total = quick(lambda: (wide.log_prob(fifth), d.log_prob(y), whole.log_prob(y)))()
    assert_allclose(many[3], one, rtol=1e-12)
    assert_allclose(total, one.sum(), rtol=1e-12)


@every_likelihood
def test_mask_hides_what_may_be_nan(name):
    build, params, y = LAWS[name]
    mask = jnp.asarray(np.arange(B) > 0)
    mask = jnp.broadcast_to(mask.reshape(-1, *(1,) * (len(build(params).batch_shape) - 1)), build(params).batch_shape)
    broken = y.astype(float).at[0].set(jnp.nan)

    def total(params):
        return build(params).mask(mask).log_prob(broken).sum()

    def reference(params):
        return jnp.where(mask, build(params).log_prob(y), 0).sum()

    got, expected = quick(lambda p: [jax.value_and_grad(f)(p) for f in (total, reference)])(params)
    assert_allclose(got[0], expected[0], rtol=1e-10)
    for gradient, exact in zip(*map(jax.tree.leaves, (got[1], expected[1])), strict=True):
        assert_allclose(gradient, exact, rtol=1e-9, atol=1e-12)


@every_law
def test_pytree_and_jit(name):
    build, params, y = LAWS[name]
    d = build(params)
    leaves, structure = jax.tree.flatten(d)
    log_prob = quick(lambda d, y: d.log_prob(y))
    expected = quick(lambda y: d.log_prob(y))(y)  # its arrays are constants here
    for again in (d, jax.tree.unflatten(structure, leaves), quick(lambda: d)(), quick(build)(params)):
        assert (again.batch_shape, again.event_shape) == (d.batch_shape, d.event_shape)
        assert_allclose(log_prob(again, y), expected, rtol=1e-10)
    if name not in ("NegativeBinomial2", "Multinomial"):  # whose functions are made anew each time
        assert jax.tree.structure(build(params)) == structure  # equal static parts: nothing is compiled twice


@pytest.mark.parametrize("name", [n for n in LAWS if not n.startswith("prior")])
def test_map_and_vmap(name):
    build, params, y = LAWS[name]
    flat, unravel = ravel_pytree(params)
    steps = jnp.asarray(1e-5 * np.eye(len(flat)))

    def total(flat):
        return build(unravel(flat)).log_prob(y).sum()

    up, down = quick(jax.vmap(total))(flat + steps), quick(lambda x: jax.lax.map(total, x))(flat - steps)
    if name not in LIKELIHOODS:  # whose gradients are in tests/test_likelihoods.py
        assert_allclose(quick(jax.grad(total))(flat), (up - down) / 2e-5, rtol=1e-6, atol=1e-7)
    assert_allclose(up, down, rtol=1e-2)
    # a batch of distributions, made inside vmap and used outside
    many = quick(jax.vmap(lambda x: build(unravel(x))))(flat + steps)
    log_probs = quick(jax.vmap(lambda d: d.log_prob(y).sum()))(many)
    assert_allclose(log_probs, up, rtol=1e-10)


# ---------------------------------------------------------------- outputs that are refused


@pytest.mark.parametrize(
    ("name", "y", "message"),
    [
        ("Gaussian", REAL[:, None], r"`obs` must have shape \(3,\) .* got \(3, 1\). Did you mean y\[:, 0\]\?"),
        ("Bernoulli logit", np.zeros((B, 1)), r"got \(3, 1\). Did you mean"),
        ("Gaussian (B, P)", REAL, r"`obs` must have shape \(3, 2\) .* got \(3,\)"),
        ("Bernoulli logit", [-1, 1, 1], r"support of Bernoulli .* got -1 .* labels -1 and 1"),
        ("Bernoulli probit", [0.5, 1, 1], r"support of Bernoulli .* got 0.5"),
        ("Poisson", [-1, 0, 1], r"support of Poisson .* got -1"),
        ("Poisson", [0, 0.5, 1], r"support of Poisson .* got 0.5 at \(1,\)"),
        ("Categorical", [0, 3, 1], r"support of Categorical .* got 3 at \(1,\)"),
        ("Gaussian", [0.0, np.nan, 1], r"support of Gaussian .* got nan at \(1,\).* Mask missing outputs"),
        ("StudentT", [0.0, np.nan, 1], r"support of StudentT .* got nan"),
        ("HeteroskedasticGaussian", [0.0, np.nan, 1], r"support of HeteroskedasticGaussian .* got nan"),
        ("Beta", [0.5, 1.0, 0.1], r"support of Beta .* got 1.0 at \(1,\)"),
        ("Beta", [0.0, 0.5, 0.1], r"support of Beta .* got 0.0 at \(0,\)"),
        ("Binomial", [4, 6, 0], r"support of Binomial .* got 6 at \(1,\)"),
        ("NegativeBinomial", [0, 1.5, 2], r"support of NegativeBinomial .* got 1.5"),
        ("ZeroInflated", [0, 1, -1], r"support of ZeroInflated .* got -1"),
        ("Exponential", [1.0, 0.0, 2.0], r"support of Exponential .* got 0.0 at \(1,\)"),
        ("Weibull", [1.0, 1.0, -2.0], r"support of Weibull .* got -2.0"),
        ("Gamma", [1.0, 1.0, 0.0], r"support of Gamma .* got 0.0"),
        ("LogNormal", [-1.0, 1.0, 2.0], r"support of LogNormal .* got -1.0"),
        ("Transformed", [-1.0, 1.0, 2.0], r"support of Transformed .* got -1.0"),
        ("Ordinal", [0, 1, 3], r"support of Ordinal .* got 3 at \(2,\)"),
        ("Categorical robustmax", [0, -1, 1], r"support of Categorical .* got -1"),
        ("NegativeBinomial2", [0, 1, -2], r"support of Likelihood .* got -2 at \(2,\)"),
        ("Multinomial", [[5, 0, 0], [1, 2, 1], [5, 0, 0]], r"support of Likelihood .* got \[1 2 1\] at \(1,\)"),
    ],
)
def test_bad_outputs_are_refused_when_concrete(name, y, message):
    d = LAWS[name].distribution
    for method in (d.log_prob, d.log_predictive):
        with pytest.raises(ValueError, match=message):
            method(np.asarray(y))
    if "support" in message:  # nothing to look at inside jit
        assert jax.eval_shape(d.log_prob, np.asarray(y)).shape == d.batch_shape


# ---------------------------------------------------------------- divergences


@pytest.mark.parametrize("name", GAUSSIANS)
def test_divergence_from_the_prior(name):
    q, y = LAWS[name].distribution, LAWS[name].y
    p = WhitenedPrior(q.event_shape, y.dtype)
    kl = float(kl_divergence(q, p))
    loc, scale = LAWS[name].params
    if scale is None:
        scale = jnp.ones(M)
    factor = jnp.tril(scale) if "full" in name else scale[..., None] * jnp.eye(M)
    # NumPyro wants positive diagonals; only factor factor^T matters
    L = jnp.linalg.cholesky(factor @ jnp.swapaxes(factor, -1, -2))
    dense = dist.MultivariateNormal(loc, scale_tril=L)
    standard = dist.MultivariateNormal(jnp.zeros(M), scale_tril=jnp.eye(M))
    assert_allclose(kl, kl_divergence(dense, standard).sum(), rtol=1e-12)
    assert_allclose(q.log_prob(y), dense.log_prob(y).sum(), rtol=1e-12)
    assert_allclose(q.mean, loc)
    assert_allclose(q.variance, np.broadcast_to(dense.variance, loc.shape), rtol=1e-12)

    draws = q.sample(jax.random.PRNGKey(1), (100_000,))
    ratio = np.asarray(q.log_prob(draws) - p.log_prob(draws))
    assert abs(ratio.mean() - kl) < 4 * ratio.std() / np.sqrt(len(ratio))


@pytest.mark.parametrize("shape", [(M,), (2, M)])
def test_divergence_of_independent_normals_is_analytic(shape):
    loc, scale = jnp.asarray(RNG.normal(size=shape)), jnp.asarray(RNG.uniform(0.5, 2, shape))
    q = dist.Normal(loc, scale).to_event(len(shape))  # what AutoNormal samples from
    expected = kl_divergence(WhitenedGaussian(Diagonal(loc, scale)), WhitenedPrior(shape, loc.dtype))
    assert_allclose(kl_divergence(q, WhitenedPrior(shape, loc.dtype)), expected, rtol=1e-12)


def test_divergence_between_other_shapes_is_refused():
    with pytest.raises(ValueError, match=r"guide's q has shape \(4,\) but the model has .* of shape \(5,\)"):
        kl_divergence(LAWS["q full None"].distribution, WhitenedPrior((5,), jnp.float64))


def test_whitened_samples_are_reparametrized():
    build, params, _ = LAWS["q full None"]
    gradient = jax.grad(lambda params: build(params).sample(KEY).sum())(params)
    assert_allclose(gradient[0], 1.0) and np.abs(gradient[1]).max() > 0


def test_the_prior_warns_of_values_that_are_no_numbers():
    """With NumPyro's validation on, as any distribution does."""
    prior = WhitenedPrior((3,), jnp.float64)
    with numpyro.validation_enabled(), pytest.warns(UserWarning, match="Out-of-support"):
        prior.log_prob(jnp.asarray([1.0, jnp.nan, 0.0]))
