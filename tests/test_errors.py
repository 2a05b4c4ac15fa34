"""Bad input gets a clear error before anything is compiled: what was expected, what came, the likely fix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import errors, kernels, likelihoods
from tests import problems

X = jnp.linspace(-1, 1, 12).reshape(6, 2)
Z = jnp.linspace(-1, 1, 6).reshape(3, 2)


def declare(inducing=Z, kernel=None, X=X, **kwargs):
    with handlers.seed(rng_seed=0):
        return ogp.gp("f", kernels.RBF(1.0) if kernel is None else kernel, inducing, **kwargs)(X)


@pytest.mark.parametrize(
    "inducing, error, match",
    [
        ([], ValueError, "at least one set"),
        (jnp.zeros(3), ValueError, r"must have shape \(n, D\); got \(3,\).*\[:, None\]"),
        (jnp.zeros((0, 2)), ValueError, "at least one point"),
        (jnp.zeros((3, 2), complex), TypeError, "real numbers; got complex128"),
        (Z.at[1, 0].set(jnp.nan), ValueError, r"finite; got 1 NaN or infinite of 6 entries, the first at \(1, 0\)"),
        (Z.at[0, 0].set(jnp.inf), ValueError, "finite"),
        ("Z", TypeError, "array"),
        ([[0.0, 1.0]], TypeError, "got list"),
        ([Z, jnp.zeros((4, 3))], ValueError, r"D = 2; got \(4, 3\)"),
        ([Z, jnp.zeros((2, 5))], ValueError, r"Did you pass .*\.T"),
        ([ogp.MeanOnly(Z)], ValueError, "must begin with a set"),
        ([Z, ogp.MeanOnly(Z), Z], ValueError, "must come last"),
        ([Z, ogp.MeanOnly(Z, subsample_size=4)], ValueError, "between 1 and H = 3"),
        ([Z, ogp.MeanOnly(jnp.zeros((3, 2), complex))], TypeError, "real numbers"),
    ],
)
def test_inducing(inducing, error, match):
    with pytest.raises(error, match=match):
        declare(inducing)


@pytest.mark.parametrize(
    "X, error, match",
    [
        (jnp.zeros(6), ValueError, r"\[:, None\]"),
        (jnp.zeros((6, 3)), ValueError, r"D = 2; got \(6, 3\)"),
        (X.at[2, 1].set(jnp.nan), ValueError, r"NaN.*\(2, 1\)"),
        (
            X.at[2, 1].set(-1e300),
            ValueError,
            r"`X` holds -1e\+300, whose square is no number in float64.*a missing value",
        ),
        (jnp.zeros((6, 2), complex), TypeError, "real numbers"),
        (X.astype(jnp.float32), TypeError, "float32 but the inducing variables are float64"),
        (jnp.zeros((0, 2)), ValueError, "at least one"),
        (None, TypeError, "`X` must be an array"),
    ],
)
def test_inputs(X, error, match):
    with pytest.raises(error, match=match):
        declare(X=X)


def test_nan_in_traced_inputs_cannot_be_seen_and_is_not_asked_for():
    marginals = jax.jit(lambda X: declare(X=X).mean)(X.at[0, 0].set(jnp.nan))
    assert bool(jnp.isnan(marginals[0]))


@pytest.mark.parametrize(
    "kwargs, error, match",
    [
        ({"jitter": -1e-6}, ValueError, r"\[0, 1\).*got -1e-06"),
        ({"jitter": 2.0}, ValueError, r"\[0, 1\)"),
        ({"num_latents": 0}, ValueError, "positive integer"),
        ({"num_latents": 2.0}, ValueError, "positive integer"),
        ({"kernel": 3.0}, TypeError, "callable"),
        ({"kernel": lambda A, B=None: jnp.zeros(3)}, ValueError, r"must have shape \(3, 3\)"),
        ({"kernel": jnp.ones(3) * kernels.RBF(1.0), "num_latents": 2}, ValueError, "leading axis of 3"),
    ],
)
def test_gp_arguments(kwargs, error, match):
    with pytest.raises(error, match=match):
        declare(**kwargs)


def test_jitter_of_zero_is_respected():
    k = kernels.RBF(1.0)
    with handlers.seed(rng_seed=0):
        f = ogp.gp("f", k, Z, jitter=0.0)
    np.testing.assert_allclose(
        f.blocks[0].whitener, jnp.linalg.inv(jnp.linalg.cholesky(k(Z, Z))), rtol=1e-12, atol=1e-14
    )


def test_gp_inside_a_plate():
    with (
        handlers.seed(rng_seed=0),
        numpyro.plate("data", 6),
        pytest.raises(ValueError, match=r"outside of plates.*'data'"),
    ):
        ogp.gp("f", kernels.RBF(1.0), Z)


@pytest.mark.parametrize("handler", [handlers.mask, handlers.scale])
@pytest.mark.parametrize("of_kernel", [False, True])
def test_masks_and_scales_of_rows_around_a_whole_model(handler, of_kernel):
    """Around a gp they gave errors about its number of functions, and a scale multiplied the divergence by its sum."""
    name = handler.__name__
    rows = {name: jnp.ones(6, bool if name == "mask" else float)}
    with handlers.seed(rng_seed=0), handler(**rows):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal()) if of_kernel else 1.0
        with pytest.raises(ValueError, match=rf"handlers\.{name}.*shape \(6,\).*`f`.*rows alone"):
            ogp.gp("f", kernels.RBF(lengthscale), Z)
        with pytest.raises(ValueError, match=rf"handlers\.{name}.*`g`"):
            ogp.orthogonal("g", Z)
    with handlers.seed(rng_seed=0), handler(**{name: rows[name][0]}):  # of all rows alike
        assert ogp.gp("f", kernels.RBF(1.0), Z)(X).shape == (6,)


def test_guide_of_another_size():
    def guide(X, y, **kwargs):
        ogp.gp_posterior("f", 4)

    with pytest.raises(ValueError, match=r"q of `f.u0` has shape \(4,\).*shape \(3,\)"):
        problems.loss({}, X, jnp.zeros(6), guide=guide, inducing=Z, likelihood=problems.gaussian(0.1))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"covariance": "fulll"}, r"Unknown `covariance` 'fulll'; known are 'full', 'diagonal', 'prior'"),
        ({"residual": "loose"}, r"Unknown `residual` 'loose'; known are 'prior', 'tight'"),
        ({"covariance": {"g": "full"}}, r"Unknown `covariance key` 'g'; known are 'f'"),
        ({"covariance": ["full", "full"]}, "one name or one per set, 1 here; got 2"),
        ({"covariance": {"f": "none"}}, "Unknown `covariance` 'none'"),
        ({"residual": {"f": "none"}}, "Unknown `residual` 'none'"),
    ],
)
def test_guide_options(options, match):
    with pytest.raises(ValueError, match=match):
        guide = ogp.AutoSparseGP(problems.model, **options)
        problems.loss({}, X, jnp.zeros(6), guide=guide, inducing=Z, likelihood=problems.gaussian(0.1))


def test_guide_of_a_model_without_a_gp():
    guide = ogp.AutoSparseGP(lambda: numpyro.sample("x", numpyro.distributions.Normal(0, 1)))
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match="no gp"):
        guide()


@pytest.mark.parametrize(
    "likelihood, y, match",
    [
        (likelihoods.Bernoulli, jnp.asarray([-1.0, 1, 1, -1, 1, 1]), r"support of Bernoulli.*got -1.*\(y \+ 1\) / 2"),
        (likelihoods.Poisson, jnp.asarray([0.5, 1, 1, 1, 1, 1]), "support of Poisson.*got 0.5"),
        (likelihoods.Poisson, jnp.asarray([1, 1, -2, 1, 1, 1]), r"got -2 at \(2,\)"),
        (problems.gaussian(0.1), jnp.full(6, jnp.nan), "Mask missing outputs"),
        (problems.gaussian(0.1), jnp.zeros((6, 1)), r"shape \(6,\).*got \(6, 1\).*y\[:, 0\]"),
    ],
)
def test_observations_are_checked_when_svi_starts(likelihood, y, match):
    svi = SVI(problems.model, ogp.AutoSparseGP(problems.model), optax.adam(0.1), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match=match):
        svi.init(jax.random.PRNGKey(0), X, y, inducing=Z, likelihood=likelihood)


def test_option_and_concreteness_helpers():
    assert errors.check_option("a", "b", ("b", "c")) == "b"
    assert errors.is_concrete(jnp.ones(2)) and errors.is_concrete(1.0)
    jax.jit(lambda x: pytest.fail("traced values are not concrete") if errors.is_concrete(x) else x)(1.0)


def test_a_joint_distribution_of_very_many_rows_is_refused():
    """It asked for 80 GB."""
    f = ogp.CollapsedGP(kernels.RBF(1.0), X, Z, 0.1).posterior(X[:, 0])
    loc = jax.eval_shape(lambda X: f.joint(X).loc, jax.ShapeDtypeStruct((20_000, 2), X.dtype))
    assert loc.shape == (20_000,)
    with pytest.raises(ValueError, match=r"B = 100000 inputs needs several .* 80 GB; the limit is 32768.*sample_paths"):
        jax.eval_shape(lambda X: f.joint(X).loc, jax.ShapeDtypeStruct((100_000, 2), X.dtype))


def test_a_kernel_class_instead_of_a_kernel():
    with pytest.raises(TypeError, match=r"`kernel` must be callable .* Did you mean `RBF\(\.\.\.\)`, an instance\?"):
        ogp.CollapsedGP(kernels.RBF, jnp.ones((3, 1)), jnp.ones((2, 1)), 0.1)


@pytest.mark.parametrize("likelihood", [lambda f: likelihoods.Gaussian(f, 0.2), likelihoods.Bernoulli])
def test_stacked_likelihoods_are_refused(likelihood):
    """`vmap` stacks f to (T, B) but noise, and the scale of a tightened residual, to (T,), which would be read along B."""
    X, y = jnp.linspace(0.0, 1.0, 3)[:, None], jnp.array([0.0, 1.0, 1.0])
    f = ogp.CollapsedGP(kernels.RBF(0.5), X, X, 0.1).posterior(y)
    with pytest.raises(
        ValueError, match=r"was made with the batch shape \(1,\): its arrays were stacked, as by jax.vmap"
    ):
        jax.vmap(lambda x: likelihood(f(x[None])))(X).log_prob(y[:, None])
