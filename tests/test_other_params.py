"""Parameters of another guide, or of the guide in another shape: refused or named, not broadcast to something else."""

import warnings

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO, autoguide

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

KEY = random.PRNGKey(0)
X = random.uniform(KEY, (12, 2))
Y = jnp.sin(6 * X[:, 0])


def model(X, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    f = ogp.gp("f", kernels.RBF(scale), jnp.eye(4, 2))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1), obs=y)


def started(guide, elbo=TraceMeanField_ELBO):
    svi = SVI(model, guide, optax.adam(0.01), elbo())
    return svi.get_params(svi.init(KEY, X, Y))


def ours(**options):
    return lambda model: ogp.AutoSparseGP(model, **options)


@pytest.mark.parametrize("use", [
    lambda guide, params: ogp.posterior(model, guide, params, X),
    lambda guide, params: jax.jit(lambda params: ogp.posterior(model, guide, params, X)["f"](X).mean)(params),
    lambda guide, params: ogp.check(model, guide, params, X, Y, num_samples=25),
    lambda guide, params: ogp.khat(model, guide, params, X, Y, num_samples=25),
])  # fmt: skip
@pytest.mark.parametrize("make, name", [
    (ours(), "scale_auto_loc"),
    (ours(hyper=autoguide.AutoNormal), "scale_auto_scale"),
    (ours(), "f.u0_scale_tril"),
    (autoguide.AutoNormal, "scale_auto_loc"),
    (autoguide.AutoMultivariateNormal, "auto_loc"),
    (autoguide.AutoDelta, "scale_auto_loc"),
])  # fmt: skip
def test_stacks_are_not_taken_for_a_parameter(make, name, use):
    """Two lengthscales of a stack would be those of the two columns."""
    guide = make(model)
    params = started(guide)
    stacked = {**params, name: jnp.stack([params[name]] * 2)}
    with pytest.raises(ValueError, match=rf"`params\['{name}'\]` must have shape .* or a stack for jax.vmap"):
        use(guide, stacked)


def by_hand(X, y=None):
    numpyro.sample("scale", dist.LogNormal(numpyro.param("loc", -1.0), 0.1))
    ogp.gp_posterior("f", 4)


def test_stacks_of_values_are_not_taken_for_one():
    """A guide by hand, and draws of MCMC, have no starts to compare shapes with; the model's site has its own."""
    params = started(by_hand)
    draws = {"f.u0": jnp.zeros(4), "scale": jnp.array([0.3, 0.4])}
    for guide, stacked in ((by_hand, {**params, "loc": jnp.array([-1.0, -2.0])}), (None, draws)):
        with pytest.raises(ValueError, match=r"`scale` is one number in the model; .* shape \(2,\). Pass one draw"):
            ogp.posterior(model, guide, stacked, X)


@pytest.mark.parametrize("make, name", [
    (ours(hyper=autoguide.AutoNormal), "scale_auto_loc"),
    (autoguide.AutoMultivariateNormal, "auto_loc"),
])  # fmt: skip
def test_stacks_are_for_vmap(make, name):
    guide = make(model)
    params = started(guide)

    def mean(params):
        return ogp.posterior(model, guide, params, X)["f"](X).mean

    moved = {**params, name: params[name] + 0.1}
    stack = jax.tree.map(lambda *v: jnp.stack(v), params, moved)
    assert_allclose(jax.vmap(mean)(stack), jnp.stack([mean(params), mean(moved)]), atol=1e-5)


@pytest.mark.parametrize("make", [autoguide.AutoIAFNormal, autoguide.AutoBNAFNormal])
def test_networks_of_flows_for_other_numbers_of_points(make):
    params = started(make(model), Trace_ELBO)

    def larger(X, y=None):
        model(X, y)
        numpyro.sample("another", dist.Normal(0.0, 1.0))

    assert ogp.posterior(model, make(model), params, X, Y)["f"](X).shape == (12,)
    for use in (ogp.posterior, ogp.check):
        with pytest.raises(
            ValueError, match=r"`params\['auto_arn__0\$params'\]` does not fit the network.*number of points"
        ):
            use(larger, make(larger), params, X, Y)


def of_counts(X, y=None):
    f = ogp.gp("f", kernels.RBF(0.5), jnp.eye(4, 2))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Poisson(f(X)), obs=y)


def of_draws(X, y=None):
    f = ogp.gp("f", kernels.RBF(0.5), jnp.eye(4, 2))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f(X).sample(), 0.3), obs=y)


@pytest.mark.parametrize("make", [autoguide.AutoNormal, autoguide.AutoMultivariateNormal])
@pytest.mark.parametrize(
    ("new", "match"),
    [
        (model, r"not observed, so this guide of NumPyro would draw its values.*Pass observations"),
        (of_counts, r"not observed, so this guide of NumPyro would draw its values.*Pass observations"),
        (of_draws, "takes its sites from its first call: if that was without the observations"),
    ],
)
def test_a_guide_that_first_sees_no_observations(new, match, make):
    """It would take y for a latent variable."""
    with pytest.raises(ValueError, match=match):
        ogp.posterior(new, make(new), started(make(model)), X)


@pytest.mark.parametrize("fitted, other, names", [
    (ours(covariance="low_rank"), ours(covariance="diagonal"), "'f.u0_left', 'f.u0_right'"),
    (autoguide.AutoLowRankMultivariateNormal, autoguide.AutoDiagonalNormal, "'auto_cov_factor'"),
])  # fmt: skip
def test_scales_of_low_rank_covariances_are_no_diagonal_ones(fitted, other, names):
    params = started(fitted(model))
    guide = other(model)
    started(guide)
    with pytest.raises(ValueError, match=f"holds {names}, which this guide does not have"):
        ogp.posterior(model, guide, params, X)


@pytest.mark.parametrize("make", [ours(hyper=autoguide.AutoNormal), autoguide.AutoNormal])
def test_a_guide_made_anew_draws_what_the_fitted_one_draws(make):
    guide = make(model)
    params = started(guide)
    own, anew = (ogp.posterior(model, g, params, X, Y, rng_key=KEY)["f"](X) for g in (guide, make(model)))
    assert_allclose(anew.mean, own.mean, rtol=1e-6)
    assert_allclose(anew.variance, own.variance, rtol=1e-6)


def test_a_distribution_of_a_scale_is_no_point():
    """AutoDelta takes `scale_auto_loc` for the value, of which AutoNormal keeps the logarithm."""
    params = started(ogp.AutoSparseGP(model, hyper=autoguide.AutoNormal)) | {"scale_auto_loc": jnp.array(0.5)}
    with pytest.raises(ValueError, match="holds 'scale_auto_scale', which this guide does not have"):
        ogp.posterior(model, ogp.AutoSparseGP(model), params, X, Y)


def test_parameters_of_parts_that_are_left_out_are_no_others():
    guide = ogp.AutoSparseGP(model, residual="tight")
    params = started(guide) | {"g.u0_loc": jnp.zeros(3), "another": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ogp.posterior(model, ogp.AutoSparseGP(model), params, X)


@pytest.mark.parametrize("measure", [
    lambda guide, params: ogp.check(model, guide, params, X, Y).functions["f"].residual,
    lambda guide, params: ogp.khat(model, guide, params, X, Y).khat,
])  # fmt: skip
def test_diagnostics_within_jit(measure):
    guide = ogp.AutoSparseGP(model)
    params = started(guide)
    with pytest.raises(TypeError, match=r"Call them outside of jax.jit and jax.vmap"):
        jax.jit(lambda params: measure(guide, params))(params)


@pytest.mark.filterwarnings("ignore:Hessian of log posterior")
def test_a_laplace_approximation_without_a_covariance_is_its_point():
    """NumPyro's covariance is zero where the Hessian is singular, as before the fit; the conditional one was NaN."""
    guide = autoguide.AutoLaplaceApproximation(model)
    params = started(guide, Trace_ELBO)
    assert not guide.get_posterior(params).scale_tril.any()
    f = ogp.posterior(model, guide, params, X)["f"]
    point = ogp.posterior(model, None, guide.median(params), X)["f"]
    assert_allclose(f(X).mean, point(X).mean, rtol=1e-6)
    assert_allclose(f(X).variance, point(X).variance, rtol=1e-6)


@pytest.mark.parametrize("start, into", [("full", "diagonal"), ("diagonal", "full"), ("low_rank", "full")])
def test_a_fit_does_not_start_from_another_family_without_a_word(start, into):
    params = started(ogp.AutoSparseGP(model, covariance=start))
    svi = SVI(model, ogp.AutoSparseGP(model, covariance=into), optax.adam(0.01), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match=rf"`init_params` hold 'f.u0_.*covariance '{into}' of `f.u0` does not have"):
        svi.init(KEY, X, Y, init_params=params)
    same = SVI(model, ogp.AutoSparseGP(model, covariance=start), optax.adam(0.01), TraceMeanField_ELBO())
    moved = {name: value + 0.1 if name == "f.u0_loc" else value for name, value in params.items()}
    begun = same.get_params(same.init(KEY, X, Y, init_params=moved))
    assert_allclose(begun["f.u0_loc"], moved["f.u0_loc"], rtol=1e-6)


@pytest.mark.parametrize("use", [ogp.posterior, ogp.khat])
def test_lists_of_numbers_are_named(use):
    """As JSON keeps parameters."""
    guide = ogp.AutoSparseGP(model)
    params = {name: value.tolist() for name, value in started(guide).items()}
    with pytest.raises(TypeError, match=r"`params\['f.u0_loc'\]` is a list of numbers, as JSON keeps them"):
        use(model, guide, params, X, Y)


@pytest.mark.parametrize("use", [
    lambda guide, params: guide.quantiles(params, [0.1, 0.9]),
    lambda guide, params: guide.median(params),
    lambda guide, params: guide.sample_posterior(KEY, params, X, sample_shape=(3,)),
])  # fmt: skip
def test_lists_of_numbers_are_named_by_guides_too(use):
    guide = ogp.AutoSparseGP(model)
    params = started(guide)
    use(guide, params)
    with pytest.raises(TypeError, match=r"`params\['.*'\]` is a list of numbers, as JSON keeps them"):
        use(guide, {name: value.tolist() for name, value in params.items()})


def learned(X, y=None):
    noise = numpyro.param("noise", 0.1, constraint=dist.constraints.positive)
    f = ogp.gp("f", kernels.RBF(numpyro.param("lengthscale", 0.5)), jnp.eye(4, 2))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


USES = {
    "posterior": lambda *of: ogp.posterior(*of, X),
    "posterior, within jit": lambda model, guide, params: jax.jit(
        lambda params: ogp.posterior(model, guide, params, X)["f"](X).mean
    )(params),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_parameters_of_the_guide_alone(use):
    """The model would keep its starting values: of some parameters that is an error, and of all nothing was said."""
    guide = ogp.AutoSparseGP(learned)
    svi = SVI(learned, guide, optax.adam(0.1), TraceMeanField_ELBO())
    params = svi.run(KEY, 5, X, Y, progress_bar=False).params
    alone = {name: value for name, value in params.items() if name.startswith("f.")}
    with pytest.warns(
        UserWarning, match="holds none of the model's own parameters: 'noise', 'lengthscale' keep the values"
    ):
        use(learned, guide, alone)
    with pytest.raises(ValueError, match="`params` holds 'noise' but not 'lengthscale'"):
        use(learned, guide, alone | {"noise": params["noise"]})
    draw = {"f.u0": params["f.u0_loc"]}  # of MCMC, for which parameters keep their starting values
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(learned, guide, params)
        ogp.posterior(learned, None, draw, X)
