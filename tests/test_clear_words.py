"""Errors that name the remedy, and that the remedy they name works."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.contrib.control_flow
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods
from numpyro_orthgp.likelihoods.base import log_predictive

KEY = jax.random.PRNGKey(0)
M = ogp.Marginals(jnp.linspace(-1.0, 1.0, 5), jnp.full(5, 0.3), jnp.full(5, 0.1))


@pytest.mark.parametrize("which", ["mean", "variance"])
@pytest.mark.parametrize(
    "given",
    [
        lambda f: dist.Cauchy(f, 1.0),
        lambda f: dist.OrderedLogistic(f, jnp.asarray([-1.0, 1.0])),
        lambda f: dist.TransformedDistribution(dist.Normal(f, 1.0), dist.transforms.SigmoidTransform()),
    ],
)
def test_moments_that_do_not_exist(given, which):
    fn = ogp.Likelihood(M, given)
    kind = type(given(M.mean)).__name__
    with pytest.raises(
        ValueError, match=rf"{kind}, the distribution of y given f, has no .*fn\.sample\(rng_key, \(1000,\)\)"
    ):
        getattr(fn, which)
    assert fn.sample(jax.random.PRNGKey(0), (1000,)).shape == (1000, 5)


def test_moments_that_do_exist_are_as_they_were():
    fn = ogp.Likelihood(M, lambda f: dist.Normal(f, 0.5))
    assert_allclose(fn.mean, M.mean, atol=1e-12)
    assert_allclose(fn.variance, M.variance + 0.25, rtol=1e-10)


def test_one_output_in_each_row():
    X, task = jnp.linspace(0.0, 1.0, 500)[:, None], jnp.arange(500) % 3
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(0.5), X[::100], num_latents=3)
    m = f(X)
    with pytest.raises(
        TypeError, match=r"got the key \(array of shape \(500,\), array of shape \(500,\)\).*f\(Tasks\(X, task\)\)"
    ) as error:
        m[jnp.arange(500), task]
    assert len(str(error.value)) < 400
    picked = ((m * jax.nn.one_hot(task, 3)) @ jnp.ones((3, 1)))[..., 0]
    rows = np.arange(500)
    assert_allclose(picked.mean, m.mean[rows, task], atol=1e-12)
    assert_allclose(picked.variance, m.variance[rows, task], atol=1e-12)
    y = jnp.ones(500, int)
    each = likelihoods.Poisson(m).log_prob(jnp.ones((500, 3), int))
    assert_allclose(likelihoods.Poisson(picked).log_prob(y), each[rows, task], rtol=1e-10)


def test_a_function_that_several_outputs_share():
    for key in ((slice(None), None), (..., None)):
        with pytest.raises(
            TypeError, match=r"share one function: stack\(\[f\(X\)\]\) @ jnp\.ones\(\(1, P\)\), plus off"
        ):
            M[key]
    shared = ogp.stack([M]) @ jnp.ones((1, 3)) + jnp.arange(3.0)
    assert_allclose(shared.mean, M.mean[:, None] + jnp.arange(3.0))
    assert_allclose(shared.variance, jnp.stack([M.variance] * 3, 1), rtol=1e-6)


def test_centres_of_tasks_are_no_tasks():
    rng = np.random.default_rng(0)
    X = np.stack([rng.normal(size=30), rng.integers(0, 3, 30)], 1)
    kernel = kernels.RBF(1.0).on(0) * kernels.Coregion(jnp.ones((3, 1)), jnp.ones(3)).on(1)

    def declare(Z):
        with numpyro.handlers.seed(rng_seed=0):
            return ogp.gp("f", kernel, Z)

    with pytest.raises(
        ValueError, match=r"An average of task indices is no task.*init\.kmeans\(\.\.\., categories=\[column\]\)"
    ):
        declare(init.kmeans(jax.random.PRNGKey(0), X, 4))
    beside = np.concatenate([init.kmeans(jax.random.PRNGKey(0), X[:, :1], 6), np.arange(6)[:, None] % 3.0], 1)
    assert declare(beside)(X).shape == declare(init.greedy_variance(kernel, X, 4))(X).shape == (30,)


def test_columns_of_categories_have_no_centres():
    key = jax.random.PRNGKey(0)
    for X in (np.arange(10)[:, None], np.ones((10, 1), bool)):
        with pytest.raises(
            TypeError, match=r"Codes of categories have no means: name their columns.*init\.greedy_variance"
        ):
            init.kmeans(key, X, 2)
    for X in (np.array([["a"], ["b"]]), np.array([[1.0, "a"]], object)):
        with pytest.raises(
            TypeError, match=r"got ndarray of (<U1|object)\. Text and categories need numbers.*Coregion"
        ):
            init.kmeans(key, X, 1)
    one_hot = jax.nn.one_hot(np.arange(10) % 3, 3)
    assert init.kmeans(key, one_hot, 3).shape == (3, 3)


@pytest.mark.parametrize(
    "fn",
    [
        likelihoods.Gaussian(M, 0.1),
        ogp.Likelihood(M, lambda f: dist.Normal(f, 0.5)),
        likelihoods.Stacked(jax.vmap(lambda s: likelihoods.Gaussian(M, s))(jnp.ones(3))),
        ogp.CollapsedGP(kernels.RBF(1.0), jnp.zeros((2, 1)), jnp.ones((1, 1)), 0.1),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_draws_without_a_key(fn):
    with pytest.raises(ValueError, match=r"belong in a model.* no random key.*\.sample\(jax\.random\.PRNGKey\(0\)\)"):
        numpyro.sample("y", fn)


def test_joint_draws_without_a_key():
    f = ogp.CollapsedGP(kernels.RBF(1.0), X8, X8[::2], 0.1).posterior(jnp.sin(X8[:, 0]))
    with pytest.raises(ValueError, match=r"Draws of f\.joint\(X\) belong in a model.* no random key"):
        f.joint(X8).sample()
    with pytest.raises(ValueError, match=r"likelihoods belong in a model.* no random key"):
        likelihoods.Gaussian(f(X8), 0.1).sample()
    for shape in ((3,), 3):
        with pytest.raises(TypeError, match=r"A random key is expected first.*got.*3"):
            f.joint(X8).sample(shape)
    assert f.joint(X8).sample(jax.random.PRNGKey(0), (3,)).shape == (3, 8)


X8 = jnp.linspace(0.0, 1.0, 8)[:, None]
MISSING = np.ma.array(np.sin(6 * np.asarray(X8[:, 0])), mask=np.arange(8) == 3)


def regression(X, y=None, make=likelihoods.Gaussian):
    f = ogp.gp("f", kernels.RBF(0.3), X8[::2])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", make(f(X), 0.1), obs=y)


def svi_of(model, guide=ogp.AutoSparseGP, **options):
    return SVI(model, guide(model, **options), optax.adam(0.01), TraceMeanField_ELBO())


@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")
@pytest.mark.parametrize("guide", [ogp.AutoSparseGP, AutoNormal])
@pytest.mark.parametrize("fit", [ogp.fit, ogp.fit_lbfgs])
def test_a_fit_without_observations(guide, fit):
    steps = {"num_steps": 3, "progress_bar": False} if fit is ogp.fit else {"num_steps": 3}
    words = r"observes nothing.*\(f\.u0.*numpyro\.sample\(\.\.\., obs=y\)"
    if guide is AutoNormal:  # which starts before the fit looks for observations
        words = r"the likelihood Gaussian of numpyro_orthgp is not observed.*Pass observations, obs=y"
    with pytest.raises(ValueError, match=words):
        fit(svi_of(regression, guide), KEY, (X8,), **steps)


def test_a_run_without_observations():
    with pytest.raises(ValueError, match=r"`y` is not observed.*numpyro\.sample\('y', \.\.\., obs=y\)"):
        svi_of(regression).run(KEY, 3, X8, progress_bar=False)
    svi = svi_of(regression)  # to begin without is allowed
    assert np.isfinite(svi.evaluate(svi.init(KEY, X8), X8, X8[:, 0]))


def test_observations_by_a_handler_or_a_factor_are_some():
    y = jnp.sin(6 * X8[:, 0])

    def factors(X):
        f = ogp.gp("f", kernels.RBF(0.3), X8[::2])
        numpyro.factor("y", likelihoods.Gaussian(f(X), 0.1).log_prob(y).sum())

    for model in (numpyro.handlers.condition(regression, {"y": y}), factors):
        assert np.isfinite(ogp.fit(svi_of(model), KEY, (X8,), num_steps=2, progress_bar=False).losses).all()


@pytest.mark.parametrize("measure", [ogp.check, ogp.khat, ogp.to_arviz])
def test_a_model_of_factors_has_no_data_points(measure):
    def model(X):
        f = ogp.gp("f", kernels.RBF(0.3), X8[::2])
        numpyro.factor("y", likelihoods.Gaussian(f(X), 0.1).log_prob(jnp.sin(6 * X[:, 0])).sum())

    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(KEY, X8))
    with pytest.raises(ValueError, match=r"no observed site.*numpyro\.factor is one number.*posterior\(model, guide"):
        measure(model, guide, params, X8)
    assert ogp.posterior(model, guide, params, X8)["f"](X8).shape == (8,)


def test_masked_arrays():
    with pytest.raises(TypeError, match=r"`y` is a masked array with 1 entries missing.*obs_mask=mask"):
        svi_of(regression).init(KEY, X8, MISSING)
    with pytest.raises(TypeError, match=r"`obs` is a masked array with 1 entries.*filled\(0\.0\)"):
        likelihoods.Gaussian(ogp.Marginals(*3 * (jnp.ones(8),)), 0.1).log_prob(MISSING)
    with pytest.raises(TypeError, match=r"`X` is a masked array with 1 entries missing.*leave these rows out"):
        svi_of(regression).init(KEY, MISSING[:, None], X8[:, 0])


def test_masked_arrays_of_which_nothing_is_masked():
    """As pandas and netCDF give them."""
    y, X = (np.ma.array(np.asarray(a)) for a in (np.sin(X8[:, 0]), X8))
    svi = svi_of(regression)
    expected = svi.evaluate(svi.init(KEY, X8, y.data), X8, y.data)
    assert svi.evaluate(svi.init(KEY, X, y), X, y) == expected
    m = ogp.Marginals(*3 * (jnp.ones(8),))
    np.testing.assert_array_equal(
        likelihoods.Gaussian(m, 0.1).log_prob(y), likelihoods.Gaussian(m, 0.1).log_prob(y.data)
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    with pytest.raises(TypeError, match=rf"`X` is {jnp.dtype(dtype)}, of \d digits.*jnp\.asarray\(X, jnp\.float32\)"):
        svi_of(regression).init(KEY, X8.astype(dtype), X8[:, 0])


def tightened(draw):
    def model(X, y=None):
        values = draw(ogp.gp("f", kernels.RBF(0.3), X8[::2]), X)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(values, 0.1), obs=y)

    return model


@pytest.mark.parametrize(
    "draw",
    [
        lambda f, X: jax.vmap(lambda x: f(x[None]).sample()[0])(X),
        lambda f, X: jax.lax.map(lambda x: f(x[None]).independent().sample()[0], X),
        lambda f, X: f(X).draw(KEY),
    ],
    ids=["vmap", "map", "draw"],
)
def test_tightened_draws_that_nothing_is_charged_for(draw):
    with pytest.raises(ValueError, match=r"not charged for the tightened residual.*Call f\(X\)\.sample\(\)"):
        svi_of(tightened(draw), residual="tight").init(KEY, X8, X8[:, 0])
    svi = svi_of(tightened(draw))
    assert np.isfinite(svi.evaluate(svi.init(KEY, X8, X8[:, 0]), X8, X8[:, 0]))


def test_tightened_draws_in_a_loop_of_numpyro_are_charged():
    """Each step pays for its row, as one call for all rows does."""

    def steps(f, X):
        def step(carry, x):
            return carry, f(x[None]).independent().sample()[0]

        return numpyro.contrib.control_flow.scan(step, None, X)[1]

    def charge(draw):
        model = tightened(draw)
        svi = svi_of(model, residual="tight")
        state = svi.init(KEY, X8, X8[:, 0])
        params = svi.get_params(state) | {"f_residual_scale": jnp.asarray(0.25)}
        guide = numpyro.handlers.trace(numpyro.handlers.seed(numpyro.handlers.substitute(svi.guide, params), KEY))
        sites = numpyro.handlers.trace(
            numpyro.handlers.seed(numpyro.handlers.replay(model, guide.get_trace(X8, X8[:, 0])), KEY)
        ).get_trace(X8, X8[:, 0])
        return sum(s["fn"].log_prob(s["value"]).sum() for n, s in sites.items() if "residual_cost" in n)

    assert_allclose(charge(steps), charge(lambda f, X: f(X).independent().sample()), rtol=1e-6)


def test_rows_that_no_likelihood_has():
    """Rows whose latent inputs are to be inferred: outside of the support only where they count."""
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(1.0), jnp.linspace(-1.0, 1.0, 4)[:, None], num_latents=2)
    y, few = jnp.asarray([[1.0, -1.0], [2.0, 3.0]]), {"num_starts": 2, "num_samples": 8, "num_steps": 2}
    with pytest.raises(ValueError, match=r"`y` must lie in the support of Poisson.*got -1\.0 at \(0, 1\)"):
        ogp.infer_latents(f, y, likelihoods.Poisson, **few)
    found = ogp.infer_latents(f, y, likelihoods.Poisson, observed=y >= 0, **few)
    assert np.isfinite(found.loc).all()


def test_a_name_is_no_guide():
    with pytest.raises(TypeError, match=r"`hyper` must make a guide from a model.*got 'AutoNormal'"):
        ogp.AutoSparseGP(regression, hyper="AutoNormal")


def test_predictive_densities_within_distributions_of_numpyro():
    """They were taken for plain distributions, whose ``log_prob`` is then an expectation and no predictive density."""
    y, seen, exp = jnp.linspace(0.2, 2.0, 5), jnp.arange(5) != 2, dist.transforms.ExpTransform()
    fn = likelihoods.Gaussian(M, 0.5)
    wrapped, ours = dist.TransformedDistribution(fn, exp), likelihoods.Transformed(fn, exp)
    assert_allclose(wrapped.log_prob(y), ours.log_prob(y), rtol=1e-6)
    assert_allclose(log_predictive(wrapped, y), ours.log_predictive(y), rtol=1e-6)
    assert_allclose(log_predictive(wrapped.mask(seen), y), jnp.where(seen, ours.log_predictive(y), 0.0), rtol=1e-6)
    together = log_predictive(wrapped.to_event(1), y)
    assert_allclose(together, ours.log_predictive(y).sum(), rtol=1e-6)
    mixture = dist.MixtureGeneral(dist.Categorical(jnp.array([0.5, 0.5])), [fn, likelihoods.Gaussian(M, 2.0)])
    assert mixture.log_prob(y).shape == (5,)
    for other in (mixture, dist.FoldedDistribution(fn)):
        with pytest.raises(TypeError, match=r"of (Mixture\w*|FoldedDistribution) around Gaussian.*ogp\.Likelihood"):
            log_predictive(other, y)
    right = ogp.Likelihood(M, lambda f: dist.FoldedDistribution(dist.Normal(f, 0.5)))
    assert log_predictive(right, y).shape == (5,)


@pytest.mark.parametrize("wrapper", [dist.RightCensoredDistribution, dist.LeftCensoredDistribution])
def test_censored_distributions_of_numpyro_are_refused_with_a_way_out(wrapper):
    y, censored = jnp.linspace(-1.0, 2.0, 5), jnp.arange(5) % 2 == 0
    with pytest.raises(NotImplementedError, match=r"Gaussian has no cdf.*numpyro_orthgp\.Likelihood.*RightCensored"):
        wrapper(likelihoods.Gaussian(M, 0.5), censored).log_prob(y)
    with numpyro.handlers.seed(rng_seed=0):  # whose marginals know the function, with arrays of other shapes
        f = ogp.gp("f", kernels.RBF(1.0), jnp.arange(3.0)[:, None])
        fn = likelihoods.Gaussian(f(y[:, None]), 0.5)
        for each, flags in ((fn, censored), (fn.to_event(1), False)):
            with pytest.raises(NotImplementedError, match=r"Gaussian has no cdf.*numpyro_orthgp\.Likelihood"):
                wrapper(each, flags)
    whole = ogp.Likelihood(M, lambda f: wrapper(dist.Normal(f, 0.5), censored))
    nodes, weights = np.polynomial.hermite_e.hermegauss(50)
    f = np.asarray(M.mean)[:, None] + np.sqrt(np.asarray(M.variance))[:, None] * nodes
    each = wrapper(dist.Normal(f, 0.5), censored[:, None]).log_prob(y[:, None]) @ (weights / weights.sum())
    assert_allclose(whole.log_prob(y), each, atol=2e-3)
    with pytest.raises(NotImplementedError, match="has no cdf"):
        whole.icdf(0.5)


def test_hints_of_shapes_are_given_where_they_help():
    two = ogp.stack([M, M])
    for m, array, hint in (
        (M, jnp.ones((5, 1)), "[:, 0]"),
        (M, jnp.ones((3, 1)), None),
        (two, jnp.ones(5), "[:, None]"),
    ):
        with pytest.raises(ValueError, match="needs an array that broadcasts") as error:
            m + array
        assert (f"Did you mean array{hint}?" in str(error.value)) == ("Did you mean" in str(error.value)) == bool(hint)


def test_kernels_do_not_change():
    """Nor in an ``__init__`` of a user's own kernel: what it sets is no field, and would be lost."""

    class Own(kernels.Kernel):
        def __init__(self, width):
            self.width = width

        def matrix(self, X1, X2):
            return kernels.RBF(self.width)(X1, X2)

        def diagonal(self, X):
            return jnp.ones(X.shape[:-1])

    with pytest.raises(
        FrozenInstanceError, match=r"'width' of Own:.*no __init__.*`width: float = kernels\.hyperparameter"
    ):
        Own(1.0)
    kernel = kernels.RBF(1.0)
    with pytest.raises(FrozenInstanceError, match=r"'lengthscale' of RBF.*replace\(kernel, lengthscale=\.\.\.\)"):
        kernel.lengthscale = 2.0
    assert replace(kernel, lengthscale=2.0).lengthscale == 2.0 and kernel.lengthscale == 1.0
