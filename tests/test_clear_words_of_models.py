"""Models that handlers, loops and names make something else of: they are right, or refused in words."""

from __future__ import annotations

import pickle
import warnings
from contextlib import ExitStack, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
from numpyro.distributions.transforms import AffineTransform
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoLaplaceApproximation, AutoMultivariateNormal, AutoNormal
from numpyro.infer.reparam import ExplicitReparam, LocScaleReparam, NeuTraReparam

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods, online

KEY = jax.random.PRNGKey(0)
X = jnp.linspace(0.0, 1.0, 12)[:, None]
Z = X[::3]
y = jnp.sin(6 * X[:, 0])


def model(X, y=None, sets=Z):
    f = ogp.gp("f", kernels.RBF(0.3), sets)
    numpyro.deterministic("mean", f(X).mean)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1), obs=y)


def latent(X, y=None):
    x = ogp.latent_inputs("x", len(X), 1)
    f = ogp.gp("f", kernels.RBF(0.3), Z)
    numpyro.deterministic("mean", jnp.asarray(x))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(x), 0.1), obs=y)


def svi_of(model, guide=ogp.AutoSparseGP, elbo=TraceMeanField_ELBO, **options):
    return SVI(model, guide(model, **options), optax.adam(0.01), elbo())


def start(model, *args, guide=None):
    svi = SVI(model, guide or ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
    return svi.evaluate(svi.init(KEY, *(args or (X, y))), *(args or (X, y)))


DOUBLED = ExplicitReparam(AffineTransform(0.0, 2.0))


@pytest.mark.parametrize("how", [LocScaleReparam(0.0), DOUBLED], ids=["LocScale", "Explicit"])
@pytest.mark.parametrize("model, site", [(model, "f.u0"), (latent, "x")], ids=["gp", "latent_inputs"])
def test_reparametrized_sites_have_the_value_that_reparam_gives(model, site, how):
    """They had that of the site which reparam draws in their place: here half or twice as large."""
    changed = handlers.reparam(model, config={site: how})
    draws = Predictive(changed, num_samples=2000)(KEY, X)["mean"]
    assert_allclose(draws.var(0), np.ones(draws.shape[1:]), atol=0.15)
    sites = handlers.trace(handlers.seed(changed, 0)).get_trace(X)
    same = handlers.substitute(model, {site: sites[site]["value"]})
    assert_allclose(handlers.trace(handlers.seed(same, 0)).get_trace(X)["mean"]["value"], sites["mean"]["value"])


def test_a_function_of_reparametrized_sites_after_nuts():
    changed = handlers.reparam(model, config={"f.u0": DOUBLED})
    mcmc = MCMC(NUTS(changed), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(KEY, X, y)
    draw = {name: values[0] for name, values in mcmc.get_samples().items()}
    f = ogp.posterior(changed, None, draw, X, y)["f"]
    assert f.drawn == (0,)
    assert_allclose(f(X).mean, draw["mean"], rtol=1e-9)


@pytest.mark.parametrize("sets", [Z, [Z, Z + 0.1]], ids=["one set", "two sets"])
def test_neutra(sets):
    guide = AutoMultivariateNormal(model)
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    neutra = NeuTraReparam(guide, svi.run(KEY, 3, X, y, sets, progress_bar=False).params)
    mcmc = MCMC(NUTS(neutra.reparam(model)), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(KEY, X, y, sets)
    drawn = mcmc.get_samples()
    values = {name: drawn[name][0] for name in drawn if name.startswith("f.u")}
    f = ogp.posterior(model, None, values, X, y, sets)["f"]
    assert_allclose(f(X).mean, drawn["mean"][0], rtol=1e-9)


@pytest.mark.parametrize("model, site", [(model, "f.u0"), (latent, "x")], ids=["gp", "latent_inputs"])
def test_handlers_that_take_sites_from_the_guide(model, site):
    changed = handlers.reparam(model, config={site: DOUBLED})
    with pytest.raises(
        ValueError, match=rf"no Gaussian for `{site}`, since handlers\.reparam around the model replaces"
    ):
        start(changed)
    assert np.isfinite(start(changed, guide=AutoNormal(changed)))
    with pytest.raises(ValueError, match=rf"no Gaussian for `{site}`, since handlers\.block around it hides this site"):
        start(handlers.block(model, hide=[site]))


def test_one_of_two_sets_that_is_hidden():
    """It was taken for a set that is integrated out, and drawn from its prior."""
    with pytest.raises(ValueError, match=r"no Gaussian for `f\.u0`, since handlers\.block"):
        start(handlers.block(model, hide=["f.u0"]), X, y, [Z, Z + 0.1])


def test_fixed_values_that_are_hidden():
    fixed = handlers.condition(model, {"f.u0": jnp.ones(4)})
    assert_allclose(start(handlers.block(fixed, hide=["f.u0"]), X, y, [Z, Z + 0.1]), _loss_given_ones(), rtol=1e-9)


def _loss_given_ones():
    fixed = handlers.condition(model, {"f.u0": jnp.ones(4)})
    return start(fixed, X, y, [Z, Z + 0.1]) - 0.5 * 4 * (
        1 + np.log(2 * np.pi)
    )  # without the density of the hidden site


def test_posterior_within_a_model_is_no_site_of_it():
    svi = svi_of(model)
    params = svi.get_params(svi.init(KEY, X, y))
    before = ogp.AutoSparseGP(model)

    def second(X, y):
        past = ogp.posterior(model, before, params, X)["f"]
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X) + past(X).mean, 0.1), obs=y)

    assert_allclose(start(second), start(model))


def test_do():
    """The function has the value, and its name; the site itself is still drawn."""
    changed = handlers.do(model, {"f.u0": jnp.ones(4)})
    svi = svi_of(changed)
    state = svi.init(KEY, X, y)
    f = ogp.posterior(changed, svi.guide, svi.get_params(state), X, y)["f"]
    fixed = handlers.condition(model, {"f.u0": jnp.ones(4)})
    other = svi_of(fixed)
    other_state = other.init(KEY, X, y)
    same = ogp.posterior(fixed, other.guide, other.get_params(other_state), X, y)["f"]
    assert_allclose(f(X).mean, same(X).mean)
    assert_allclose(svi.evaluate(state, X, y), other.evaluate(other_state, X, y) - 0.5 * 4 * (1 + np.log(2 * np.pi)))


def twice(X, y=None):
    for _ in range(2):
        f = ogp.gp("f", kernels.RBF(0.3), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1), obs=y)


def twice_in_scope(X, y=None):
    with handlers.scope(prefix="a"):
        twice(X, y)


def twice_inputs(X, y=None):
    ogp.latent_inputs("f.u0", 3, 1)
    ogp.gp("f", kernels.RBF(0.3), Z)


def twice_orthogonal(X, y=None):
    for _ in range(2):
        ogp.orthogonal("f", [Z])


@pytest.mark.parametrize("model", [twice, twice_in_scope, twice_inputs, twice_orthogonal])
def test_a_name_twice_in_a_model(model):
    with pytest.raises(ValueError, match=r"The site `f\.u[01]` is declared twice.*gp\('g', \.\.\.\).*scope"):
        start(model)
    with pytest.raises(ValueError, match=r"declared twice"):
        MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False).run(KEY, X, y)


def test_a_name_twice_in_a_guide():
    def guide(X, y=None):
        ogp.gp_posterior("f", 4)
        ogp.gp_posterior("f", 4)

    def inputs(X, y=None):
        for _ in range(2):
            ogp.latent_inputs_posterior("x", X, 1.0)

    with pytest.raises(ValueError, match=r"The site `f\.u0` is declared twice.*each gp_posterior\(\) of a guide"):
        start(model, guide=guide)
    with pytest.raises(ValueError, match=r"The site `x` is declared twice"):
        start(latent, guide=inputs)


def steps(X, y=None):
    def step(carry, row):
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        numpyro.sample("y", likelihoods.Gaussian(f(row[0][None]), 0.1), obs=row[1])
        return carry, None

    scan(step, None, (X, y[:, None]))


def test_guides_of_functions_in_loops():
    def inside(X, y):
        def step(carry, _):
            ogp.gp_posterior("f", 4)
            return carry, None

        scan(step, None, X)

    def stacked(X, y):
        numpyro.sample("f.u0", dist.Normal(jnp.zeros((12, 4)), 1.0).to_event(1))

    with pytest.raises(ValueError, match=r"gp_posterior\(\).* within scan would belong to one step.*f = gp\(\.\.\.\)"):
        start(steps, guide=inside)
    assert np.isfinite(start(steps, guide=stacked))
    with pytest.raises(ValueError, match=r"`f` is another function in each step of scan: declare f = gp\(\.\.\.\)"):
        ogp.posterior(steps, stacked, {}, X, y)


WEIGHTS = dist.Categorical(jnp.array([0.3, 0.7]))


def of_two(f):
    return dist.MixtureSameFamily(WEIGHTS, dist.Normal(f, 0.1))


def test_mixtures_of_numpyro_around_likelihoods():
    with handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(0.3), Z, num_latents=2)
    hint = r"A mixture of NumPyro's asks for this density.*Likelihood\(f\(X\), lambda f: dist\.MixtureSameFamily"
    with pytest.raises(ValueError, match=rf"must have shape \(12, 2\).*got \(12, 1\)\. {hint}"):
        dist.MixtureSameFamily(WEIGHTS, likelihoods.Gaussian(f(X), 0.1)).log_prob(y)
    with pytest.raises(ValueError, match=r"must have shape \(12, 2\).*got \(12, 1\)\.$"):
        likelihoods.Gaussian(f(X), 0.1).log_prob(y[:, None])
    m = f(X)
    right = ogp.Likelihood(m, of_two, integrator=likelihoods.GaussHermite(40)).log_prob(y)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    a, b = (np.asarray(m.mean)[:, p, None] + np.sqrt(np.asarray(m.variance))[:, p, None] * nodes for p in (0, 1))
    values = np.stack(np.broadcast_arrays(a[:, :, None], b[:, None, :]), -1)
    each = np.asarray(of_two(jnp.asarray(values)).log_prob(y[:, None, None]))
    assert_allclose(right, np.einsum("bij,i,j->b", each, weights, weights) / weights.sum() ** 2, rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: dist.MixtureGeneral(WEIGHTS, [likelihoods.Gaussian(m[..., p], 0.1) for p in (0, 1)]),
        lambda m: dist.MixtureSameFamily(WEIGHTS, likelihoods.Gaussian(m, 0.1)),
    ],
    ids=["General", "SameFamily"],
)
def test_mixtures_in_loops(make):
    def loop(make):
        def model(X, y):
            f = ogp.gp("f", kernels.RBF(0.3), Z, num_latents=2)

            def step(carry, row):
                numpyro.sample("y", make(f(row[0][None])), obs=row[1])
                return carry, None

            scan(step, None, (X, y[:, None]))

        return model

    with pytest.raises(ValueError, match=r"arrays were stacked.*A mixture of NumPyro's.*numpyro_orthgp\.Likelihood"):
        start(loop(make))

    def at_once(X, y):
        f = ogp.gp("f", kernels.RBF(0.3), Z, num_latents=2)
        numpyro.sample("y", ogp.Likelihood(f(X), of_two), obs=y)

    assert_allclose(start(loop(lambda m: ogp.Likelihood(m, of_two))), start(at_once), rtol=1e-9)


M = ogp.Marginals(jnp.linspace(-1.0, 1.0, 5), jnp.full(5, 0.3), jnp.full(5, 0.1))


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        jnp.asarray,
        lambda m: np.array([m, m]),
        float,
        int,
        round,
        lambda m: dist.Normal(m, 0.1),
        lambda m: dist.Normal(m, jnp.ones(5)).log_prob(0.0),
        lambda m: dist.StudentT(3.0, m, jnp.ones(5)),
        lambda m: dist.Delta(m).log_prob(0.0),
        list,
        jnp.exp,
        jnp.mean,
        lambda m: jnp.where(m, 1.0, 0.0),
        lambda m: jnp.stack([m, m]),
        jax.vmap(jnp.exp),
        np.exp,
        np.sum,
        lambda m: np.maximum(m, 0.0),
        lambda m: np.add.outer(m, np.ones(5)),
        jax.nn.sigmoid,
        jax.lax.exp,
        lambda m: jax.lax.max(jnp.ones(5), m),
        jax.jit(jax.nn.sigmoid),
    ],
)
def test_marginals_taken_for_arrays(use):
    with pytest.raises(
        (TypeError, ValueError), match=r"f\(X\).*likelihoods\.Gaussian\(f\(X\), s\).*f\(X\)\.sample\(\).*f\(X\)\.mean"
    ):
        use(M)


@pytest.mark.parametrize(
    "use",
    [
        bool,
        lambda m: m == 0.0,
        lambda m: m != jnp.ones(5),
        lambda m: m > 0,
        lambda m: np.zeros(5) <= m,
        lambda m: m < m,
        lambda m: ~m,
        lambda m: m & True,
        lambda m: np.less(np.zeros(5), m),
    ],
)
def test_marginals_taken_for_conditions(use):
    with pytest.raises(TypeError, match=r"neither true nor false.*norm\.sf\(c, m\.mean, m\.variance\*\*0\.5\)"):
        use(M)
    assert M == M and M != ogp.Marginals(M.mean, M.explained, M.residual) and M not in [None, "f"]


@pytest.mark.parametrize(
    "use", [abs, lambda m: 1 / m, lambda m: 2.0**m, lambda m: m % 2, lambda m: m // 2, lambda m: np.ones(5) / m]
)
def test_functions_of_marginals_that_are_not_linear(use):
    with pytest.raises(TypeError, match=r"Only sums with arrays.*Likelihood\(f\(X\), lambda f"):
        use(M)


def test_other_words_about_marginals():
    with pytest.raises(TypeError, match=r"The number of its rows is f\(X\)\.shape\[0\]"):
        len(M)
    with pytest.raises(TypeError, match=r"Outputs are f\(X\)\[\.\.\., p\]"):
        _, _ = ogp.stack([M, M])
    with handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(0.3), Z)
    for make in (
        np.asarray, jnp.asarray, np.exp, jax.lax.exp, float, list, lambda f: f + 1, lambda f: jnp.ones(5) * f, lambda f: f * f,
        lambda f: -f, lambda f: f[0], lambda f: f > 0, lambda f: f @ jnp.ones(5), lambda f: f.sample(X), lambda f: f.predict(X),
    ):  # fmt: skip
        with pytest.raises(
            (TypeError, ValueError, AttributeError),
            match=r"GPFunction (is no array|has no `.*`).*call it at inputs, f\(X\)\.mean",
        ):
            make(f)
    with pytest.raises(
        AttributeError, match=r"Marginals has no `stddev`\. f\(X\) has .* f\(X\)\.mean and f\(X\)\.variance"
    ):
        _ = M.stddev
    for shifted in (
        np.ones(5) + M, jnp.ones(5) + M, 1.0 + M, jnp.ones(5) - (-M), np.add(M, 1), np.float32(1.0) + M, np.ones(5) - (-M),
    ):  # fmt: skip
        assert_allclose(shifted.mean, M.mean + 1)


@pytest.mark.parametrize(
    "key", [(3,), 3, jnp.ones((5, 1)), jax.random.split(KEY, 3)], ids=["shape", "int", "X", "keys"]
)
@pytest.mark.parametrize(
    "use",
    [
        lambda key, f: f(X).sample(key),
        lambda key, f: f(X).draw(key),
        lambda key, f: f(X).independent().sample(key),
        lambda key, f: f.sample_paths(key, 3),
        lambda key, f: likelihoods.Gaussian(f(X), 0.1).sample(key),
        lambda key, f: ogp.DeepGP([f, f])(X, rng_key=key),
        lambda key, f: ogp.DeepGP([f, f]).sample_paths(key, 3),
        lambda key, f: ogp.init.kmeans(key, X, 3),
    ],
)
def test_what_is_no_random_key(use, key):
    with handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(0.3), Z)
    with pytest.raises(
        TypeError, match=r"A random key is expected first, jax\.random\.PRNGKey\(0\); got .*sample\(rng_key, \(3,\)\)"
    ):
        use(key, f)
    for good in (KEY, jax.random.key(0), np.asarray(KEY)):
        use(good, f)


def test_kernel_and_points_that_are_swapped():
    with (
        handlers.seed(rng_seed=0),
        pytest.raises(TypeError, match=r"`kernel` must be callable.*got an object of type Array"),
    ):
        ogp.gp("f", Z, kernels.RBF(0.3))


def test_functions_in_branches_of_cond():
    """NumPyro's cond goes on with a draw of its own, whatever the guide has drawn."""

    def branches(X, y):
        f = cond(jnp.asarray(True), *[lambda _: ogp.gp("f", kernels.RBF(0.3), Z)] * 2, None)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1), obs=y)

    with pytest.raises(ValueError, match=r"`f\.u0` is declared in a branch of numpyro's cond.*before the cond"):
        start(branches)


@pytest.mark.parametrize("both", [True, False])
def test_sites_in_branches_of_cond(both):
    """The branch goes on with its own draw of any site, and the trace says it was the guide's; scan hands on what a guide draws."""

    def branches(X, y):
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        inner = [lambda _: numpyro.sample("w", dist.Normal(0.0, 1.0))] * 2 if both else [lambda w: w, lambda w: 2 * w]
        w = cond(jnp.asarray(True), *inner, None if both else numpyro.sample("w", dist.Normal(0.0, 1.0)))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X) + w, 0.1), obs=y)
        return w

    if both:
        with pytest.raises(
            ValueError, match=r"`w` is in a branch of numpyro's cond.*before the cond, and use its value"
        ):
            start(branches)
        given = {"w": {"type": "sample", "name": "w", "value": 7.0, "is_observed": False, "infer": {}}}
        assert (
            handlers.replay(handlers.seed(branches, 0), given)(X, y) != 7.0
        )  # the fault of NumPyro's; else refuse no more
    else:
        start(branches)


@pytest.mark.parametrize("around", [True, False])
def test_sites_of_scan_within_a_scope(around):
    """A scope around scan renames its sites, and scan looks for their old names: it goes on with draws of its own."""

    def steps(X, y):
        f = ogp.gp("f", kernels.RBF(0.3), Z)

        def step(state, row):
            with nullcontext() if around else handlers.scope(prefix="s"):
                state = numpyro.sample("state", dist.Normal(state, 1.0))
            numpyro.sample("y", likelihoods.Gaussian(f(row[0][None]) + state, 0.1), obs=row[1][None])
            return state, state

        return scan(step, 0.0, (X, y))[1]

    model = handlers.scope(steps, prefix="s") if around else steps
    if around:
        with pytest.raises(
            ValueError, match=r"`s/state` is a site of numpyro's scan within handlers\.scope.*within the step"
        ):
            start(model)
    else:
        assert np.isfinite(start(model))
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(X, y)
    replayed = handlers.replay(handlers.seed(model, 1), trace)(X, y)
    assert np.array_equal(replayed, trace["s/state"]["value"]) != around  # the fault of NumPyro's; else refuse no more


@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
def test_latent_sites_with_a_likelihood(elbo):
    """The model drew them anew in each step: an ELBO of -18.6 instead of -12.2, or a KeyError."""

    def latent(X, y, make=likelihoods.Gaussian):
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        with numpyro.plate("data", len(X)):
            z = numpyro.sample("z", make(f(X), 0.5))
            numpyro.sample("y", dist.Normal(z, 0.3), obs=y)

    def plain(X, y):
        latent(X, y, lambda m, s: dist.Normal(m.sample(), s))

    def by_hand(X, y):
        ogp.gp_posterior("f", len(Z))

    words = r"neither observed nor drawn by the guide.*dist\.Normal\(f\(X\)\.sample\(\), s\)"
    for guide in (ogp.AutoSparseGP(latent), by_hand):
        svi = SVI(latent, guide, optax.adam(0.01), elbo())
        with pytest.raises(ValueError, match=words):
            svi.evaluate(svi.init(KEY, X, y), X, y)
    svi = svi_of(plain, elbo=elbo)
    assert np.isfinite(svi.evaluate(svi.init(KEY, X, y), X, y))


@pytest.mark.parametrize("make", [likelihoods.Gaussian, likelihoods.StudentT, likelihoods.LogNormal])
@pytest.mark.parametrize("guide", [AutoNormal, AutoDelta, AutoMultivariateNormal])
def test_latent_sites_with_a_likelihood_under_guides_of_numpyro(guide, make):
    """These drew z under its expectation, and only `check` said so."""

    def latent(X, y):
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        z = numpyro.sample("z", (make(f(X), 3.0, 0.5) if make is likelihoods.StudentT else make(f(X), 0.5)).to_event(1))
        numpyro.sample("y", dist.Normal(z, 0.3).to_event(1), obs=y)

    svi = SVI(latent, guide(latent), optax.adam(0.01), Trace_ELBO())
    with pytest.raises(
        ValueError, match=f"the likelihood {make.__name__} of numpyro_orthgp is not observed.*of NumPyro would"
    ):
        svi.init(KEY, X, y)


def test_hidden_outputs_under_guides_of_numpyro():
    """These drew them under their expectation, which biased the noise."""
    seen = jnp.arange(len(y)) > 3
    program = outputs(ours, obs_mask=seen)
    with pytest.raises(ValueError, match="obs_mask= needs AutoSparseGP"):
        SVI(program, AutoNormal(program), optax.adam(0.01), Trace_ELBO()).init(KEY, X, y)
    masked = outputs(ours, mask=seen)
    for guided, guide in ((masked, AutoNormal(masked)), (program, ogp.AutoSparseGP(program))):
        svi = SVI(guided, guide, optax.adam(0.01), TraceMeanField_ELBO())
        assert np.isfinite(svi.evaluate(svi.init(KEY, X, y), X, y))


def test_draws_under_a_laplace_approximation():
    """Its curvature is that at one random key: variances of 0.082 for 0.033."""
    program = outputs()
    with pytest.raises(ValueError, match=r"`f` is drawn in a model of AutoLaplaceApproximation.*at one random key"):
        SVI(program, AutoLaplaceApproximation(program), optax.adam(0.01), Trace_ELBO()).init(KEY, X, y)


def test_a_gp_in_a_branch_under_guides_of_numpyro():
    def program(X, y):
        def branch(x):
            return ogp.gp("f", kernels.RBF(0.3), Z)(x).mean

        mean = cond(X[0, 0] < 9.0, branch, lambda x: branch(x) + 1, X)
        numpyro.sample("y", dist.Normal(mean, 0.3).to_event(1), obs=y)

    with pytest.raises(ValueError, match=r"`f.u0` is declared in a branch of numpyro's cond"):
        SVI(program, AutoNormal(program), optax.adam(0.01), Trace_ELBO()).init(KEY, X, y)


def outputs(make=lambda f, X: dist.Normal(f(X).sample(), 0.1), plate=True, mask=None, **options):
    def model(X, y):
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        with numpyro.plate("data", len(X)) if plate else nullcontext():
            with nullcontext() if mask is None else handlers.mask(mask=mask):
                numpyro.sample("y", make(f, X), obs=y, **options)

    return model


def ours(f, X):
    return likelihoods.Gaussian(f(X), 0.1)


COLUMN = jnp.ones((12, 1), bool)


@pytest.mark.filterwarnings("ignore:Missing a plate statement")
@pytest.mark.parametrize("plate", [True, False])
@pytest.mark.parametrize(
    "options, y, came",
    [
        ({}, y[:, None], r"its distribution \(12,\), its value \(12, 1\)"),
        ({"make": ours, "mask": COLUMN}, y, r"its distribution \(12,\), its value \(12,\), a mask \(12"),
        ({"make": ours, "obs_mask": COLUMN}, y, r"its distribution \(12,\), its value \(12,\), a mask \(12"),
        ({"make": lambda f, X: ours(f, X).mask(COLUMN)}, y, r"its distribution \(12,\).*, a mask \(12"),
    ],
)
def test_columns_that_are_counted_with_each_row(plate, options, y, came):
    """Silently, without a plate: twelve times the observations."""
    with pytest.raises(ValueError, match=rf"`y(_observed)?` counts each of its observations.*{came}.*to \(12, 12\)"):
        start(outputs(plate=plate, **options), X, y)


def test_columns_that_are_counted_with_each_entry_of_an_event():
    """The shapes of a distribution after `to_event` broadcast as those before it did, and no plate says otherwise."""
    model = outputs(lambda f, X: dist.Normal(f(X).sample(), 0.1).to_event(1), plate=False)
    with pytest.raises(
        ValueError, match=r"`y` counts each of its observations.*\(12,\), its value \(12, 1\).*to \(12, 12\)"
    ):
        start(model, X, y[:, None])
    start(model, X, y)


def test_check_says_so_of_other_guides():
    model = outputs()
    guide = AutoNormal(model)
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    params = svi.get_params(svi.init(KEY, X, y[:, None]))
    with pytest.raises(ValueError, match=r"`y` counts each of its observations.*its value \(12, 1\).*to \(12, 12\)"):
        ogp.check(model, guide, params, X, y[:, None])


def test_rows_of_several_plates_are_no_columns():
    def plates(X, y, mask):
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        with numpyro.plate("times", 3, dim=-2), numpyro.plate("data", len(X)), handlers.mask(mask=mask):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1), obs=y)

    whole = start(outputs(ours))
    for mask, times in ((True, 3), (jnp.array([[True], [False], [True]]), 2)):
        assert_allclose(start(plates, X, jnp.stack([y] * 3), mask), times * whole)
        assert_allclose(start(plates, X, y, mask), times * whole)
    for shaped in (y, y[None]):
        assert_allclose(start(outputs(ours, plate=False), X, shaped), whole)
    each = outputs(lambda f, X: dist.Normal(f(X).sample()[:, None], jnp.array([0.1, 0.2])).to_event(1))
    assert np.isfinite(start(each, X, jnp.stack([y, y], 1)))


FITTED = ogp.CollapsedGP(kernels.RBF(0.3), X, Z, 0.1).posterior(y)


@pytest.mark.parametrize(
    "use",
    [
        lambda f: online.condition(f, X, y, 0.1),
        lambda f: online.compress(f, Z),
        lambda f: online.start_from("f", f),
        lambda f: online.divergences(f),
        lambda f: online.drop_sets(f),
        lambda f: ogp.infer_latents(f, y[:, None], 0.1),
        lambda f: online.remember("past", f, FITTED),
        lambda f: online.remember("past", FITTED, f),
    ],
)
def test_no_fitted_function(use):
    for given, hint in (
        (FITTED(X), r"got Marginals\. Pass f, and not f\(X\)"),
        ({"g": FITTED}, r"got dict\. Pick.*\['g'\]"),
    ):
        with pytest.raises(TypeError, match=rf"needs as `(f|past)` a function of one gp.*{hint}"):
            use(given)


def test_no_likelihood():
    columns = ogp.CollapsedGP(kernels.RBF(0.3), X, Z, 0.1).posterior(y[:, None])
    for given, came in ((lambda m: dist.Normal(m.mean, 0.1), "Normal"), (lambda m: m, "Marginals")):
        for use in (lambda g: online.condition(FITTED, X, y, g), lambda g: ogp.infer_latents(columns, y[:, None], g)):
            with pytest.raises(TypeError, match=rf"got {came}, which does not average over f.*Likelihood\(f, lambda f"):
                use(given)
    with pytest.raises(TypeError, match=r"`likelihood` must be a function from marginals.*got None"):
        online.condition(FITTED, X, y, None)
    mixed = dist.Categorical(jnp.array([0.5, 0.5]))
    mixture = online.condition(
        FITTED, X + 2, y, lambda m: dist.MixtureGeneral(mixed, [likelihoods.Gaussian(m, 0.1)] * 2), num_steps=1
    )
    assert_allclose(mixture(X + 2).mean, online.condition(FITTED, X + 2, y, 0.1)(X + 2).mean, atol=1e-6)


def test_blocks_of_other_kinds():
    of = lambda *block: online.from_blocks(kernels.RBF(0.3), Z, 0.1, [block])  # noqa: E731
    whole = np.arange(12)[:, None]
    assert_allclose(of(whole, np.arange(12) % 3)(X).mean, of(whole * 1.0, np.arange(12) % 3 * 1.0)(X).mean)
    with pytest.raises(
        TypeError, match=r"`y of a block` is a masked array with 1 entries missing.*Leave out such rows"
    ):
        of(np.asarray(X), np.ma.array(np.asarray(y), mask=np.arange(12) == 3))
    with pytest.raises(
        TypeError, match=r"`X of a block` must be an array of floating-point numbers; got ndarray of <U1"
    ):
        of(np.array([["a"]]), np.ones(1))
    with pytest.raises(TypeError, match=r"`blocks` must be an iterable of pairs.*got an object of type function"):
        online.from_blocks(kernels.RBF(0.3), Z, 0.1, lambda: [(X, y)])


@pytest.mark.parametrize("shape", [(3,), (), (2, 4)])
def test_values_of_other_shapes(shape):
    """A number for all variables was taken without a word."""
    said = r"The value of `f\.u0` has shape .*; the model's inducing variables have shape \(4,\)\. Give the guide, or draws"
    with pytest.raises(ValueError, match=said):
        start(handlers.condition(model, {"f.u0": jnp.ones(shape)}))
    with pytest.raises(ValueError, match=said):
        Predictive(model, {"f.u0": jnp.ones((5, *shape))})(KEY, X)
    with pytest.raises(ValueError, match=said):
        ogp.posterior(model, None, {"f.u0": jnp.ones(shape)}, X)
    with pytest.raises(
        ValueError, match=r"The value of `x` has shape .*; the model's latent inputs have shape \(12, 1\)"
    ):
        Predictive(latent, {"x": jnp.ones((5, *shape)), "f.u0": jnp.ones((5, 4))})(KEY, X)


def test_a_mask_of_all_leaves_no_prior():
    """NumPyro's ordinary sites give the same number, the entropy of the guide, which has no minimum."""
    masked = handlers.mask(model, mask=False)
    for guide in (ogp.AutoSparseGP(masked), ogp.AutoSparseGP(model), lambda X, y: ogp.gp_posterior("f", 4)):
        with pytest.raises(ValueError, match=r"`f\.u0` is within handlers\.mask\(mask=False\), so that f has no prior"):
            start(masked, guide=guide)
    assert Predictive(masked, num_samples=3)(KEY, X)["y"].shape == (3, 12)
    assert_allclose(start(handlers.mask(model, mask=True)), start(model))
    assert_allclose(start(outputs(ours, mask=False)), 0.0, atol=1e-9)
    for scale in (3.0, 0.1):
        scaled = handlers.scale(ogp.AutoSparseGP(model), scale=scale)
        assert_allclose(start(handlers.scale(model, scale=scale), guide=scaled), scale * start(model))


def test_hyperparameters_that_nothing_knows():
    """They were drawn from their prior without a word."""

    def of_site(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
        f = ogp.gp("f", kernels.RBF(lengthscale), Z)
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))  # no function depends on it
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), scale), obs=y)

    svi = svi_of(model)
    params = svi.get_params(svi.init(KEY, X, y))
    with pytest.warns(UserWarning, match=r"^'lengthscale' is drawn from its prior.*Give the guide that was fitted"):
        ogp.posterior(of_site, svi.guide, params, X)
    with pytest.warns(UserWarning, match=r"^'lengthscale' is drawn from its prior"):
        ogp.posterior(of_site, None, {"f.u0": jnp.ones(4)}, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ogp.posterior(of_site, svi.guide, params | {"lengthscale": jnp.asarray(0.3)}, X)
        ogp.posterior(of_site, None, {"f.u0": jnp.ones(4), "lengthscale": jnp.asarray(0.3)}, X)
        right = svi_of(of_site)
        ogp.posterior(of_site, right.guide, right.get_params(right.init(KEY, X, y)), X)


def test_a_factor_of_one_number_in_a_plate():
    def factor(of):
        def model(X, y):
            f = ogp.gp("f", kernels.RBF(0.3), Z)
            with numpyro.plate("data", len(X)):
                numpyro.factor("ll", of(likelihoods.Gaussian(f(X), 0.1).log_prob(y)))

        return svi_of(model)

    options = {"num_steps": 1, "progress_bar": False}
    with pytest.warns(UserWarning, match=r"`ll` adds its one number once for each of the 12 rows.*numpyro\.factor"):
        summed = ogp.fit(factor(jnp.sum), KEY, (X, y), **options).losses
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        each = ogp.fit(factor(lambda densities: densities), KEY, (X, y), **options).losses
    assert_allclose(summed, 12 * each, rtol=1e-6)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("guide", [AutoNormal, AutoDelta])
def test_sites_in_branches_under_guides_of_numpyro(guide, before):
    """Silently, an ELBO of -283 for a guide that had learned nothing; sites of scan are handed on."""

    def program(X, y, branch=True):
        f = ogp.gp("f", kernels.RBF(0.3), Z) if before else None
        if branch:
            w = cond(y[0] < 9.0, *[lambda _: numpyro.sample("w", dist.Normal(0.0, 1.0))] * 2, None)
        else:
            w, _ = scan(lambda w, _: (numpyro.sample("w", dist.Normal(w, 1.0)), None), 0.0, jnp.arange(2))
            w = cond(
                y[0] < 9.0, lambda w: numpyro.deterministic("v", w), lambda w: 2 * numpyro.deterministic("v", w), w
            )
        f = f or ogp.gp("f", kernels.RBF(0.3), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X) + w, 0.1), obs=y)

    svi = SVI(program, guide(program), optax.adam(0.01), Trace_ELBO())
    with pytest.raises(ValueError, match=r"`w` is in a branch of numpyro's cond.*before the cond, and use its value"):
        svi.init(KEY, X, y)
    svi = SVI(program, whole := guide(program), optax.adam(0.01), Trace_ELBO())
    svi.init(KEY, X, y, branch=False)
    pickle.dumps(whole.prototype_trace["f.u0"]["fn"])


def rows_of(likelihood, plates, y):
    def program(X, y=y):
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        with ExitStack() as stack:
            for plate in plates:
                stack.enter_context(numpyro.plate(*plate[:2], **plate[2]))
            numpyro.sample("y", likelihood(f, X), obs=y)

    return program


PICKS = ("data", 12, {"subsample_size": 4})
TWO = jnp.ones((1, 2))


@pytest.mark.parametrize(
    "likelihood, plates, came, fix",
    [
        (ours, [PICKS], r"\(12,\).*plate 'data'.* 4 rows at dim=-1", r"f\(X\[rows\]\) and obs=y\[rows\]"),
        (lambda f, X: ours(f, X).to_event(0), [PICKS], r"\(12,\).* 4 rows", r"f\(X\[rows\]\)"),
        (ours, [("data", 7, {})], r"\(12,\).* 7 rows", r"numpyro\.plate\('data', len\(X\)\).*N=len\(X_new\)"),
        (
            lambda f, X: likelihoods.Gaussian(ogp.stack([f(X)]) @ TWO, 0.1),
            [("data", 12, {})],
            r"\(12, 2\).* 12 rows at dim=-1",
            r"likelihood\.to_event\(1\)",
        ),
        (
            lambda f, X: likelihoods.Gaussian(ogp.stack([f(X)]) @ TWO, 0.1).to_event(1),
            [PICKS],
            r"\(12,\).*'data'.* 4 rows",
            r"f\(X\[rows\]\)",
        ),
        (
            lambda f, X: likelihoods.Gaussian(ogp.stack([f(X)]) @ TWO, 0.1),
            [("outputs", 2, {"dim": -1}), ("data", 12, {"subsample_size": 4, "dim": -2})],
            r"\(12, 2\).*'data'.* 4 rows at dim=-2",
            r"f\(X\[rows\]\)",
        ),
        (
            lambda f, X: likelihoods.Gaussian(ogp.stack([f(X)]) @ TWO, 0.1),
            [("outputs", 2, {"dim": -2}), ("data", 12, {"dim": -1})],
            r"\(12, 2\).*'outputs'.* 2 rows at dim=-2",
            r"numpyro\.plate\('outputs', 2, dim=-1\), the plate of the rows with dim=-2",
        ),
        (
            ours,
            [("repeats", 3, {}), ("data", 12, {})],
            r"\(12,\).*'repeats'.* 3 rows at dim=-1",
            r"numpyro\.plate\('data', 12, dim=-1\), the plate 'repeats' with dim=-2, and y of shape \(3, 12\)",
        ),
        (ours, [("repeats", 3, {})], r"\(12,\).*'repeats'.* 3 rows at dim=-1", r"several y for all.*to_event\(1\)"),
    ],
    ids=[
        "minibatch", "no event", "more rows", "no to_event", "event", "two plates", "plates the other way round", "in front", "no",
    ],
)  # fmt: skip
def test_other_rows_than_those_of_a_plate(likelihood, plates, came, fix):
    program = rows_of(likelihood, plates, y)
    for run in (
        lambda: start(program),
        lambda: start(program, guide=AutoNormal(program)),
        lambda: Predictive(program, num_samples=2)(KEY, X, None),
    ):
        with pytest.raises(ValueError, match=rf"The likelihood has batch shape {came}.*{fix}"):
            run()


def test_rows_that_a_plate_does_not_count():
    """As many rows as a plate has that subsamples, but in an event, which the plate repeats; and one row for all."""
    program = rows_of(lambda f, X: ours(f, X).to_event(1), [PICKS], jnp.stack([y] * 4))
    once = rows_of(lambda f, X: ours(f, X).to_event(1), [], y)
    svi, other = (SVI(p, ogp.AutoSparseGP(p), optax.adam(0.01), TraceMeanField_ELBO()) for p in (program, once))
    at_prior = [s.evaluate(s.init(KEY, X), X) for s in (svi, other)]
    assert_allclose(at_prior[0], 12 * at_prior[1], rtol=1e-5)


ROWS, REPEATS = ("data", 12, {"dim": -1}), ("repeats", 3, {"dim": -2})


@pytest.mark.filterwarnings("ignore:Missing a plate statement")
@pytest.mark.parametrize(
    "likelihood, plates, outputs, words",
    [
        (
            ours,
            [ROWS, REPEATS],
            jnp.stack([y] * 3, -1),
            r"\(12,\).*got \(12, 3\).*y\.T of shape \(3, 12\).*num_latents=3",
        ),
        (
            lambda f, X: ours(f, X).to_event(1),
            [ROWS, REPEATS],
            jnp.stack([y] * 3),
            r"has shape \(3, 12\).*batch shape \(3, 12\).*no plate of their own",
        ),
        # silently, twelve times the observations
        (ours, [("data", 12, {"dim": -2})], y, r"12 times.*rows are at dim=-1.*'data'.*at dim=-2\. Leave dim=-2 out"),
        (
            lambda f, X: dist.Normal(f(X).sample(), 0.1),
            [("data", 12, {"dim": -2})],
            y,
            r"12 times.*'data'.*at dim=-2\. Leave dim=-2 out",
        ),
    ],
    ids=["y the other way round", "rows twice", "rows at another axis", "a draw at another axis"],
)
def test_repetitions_of_one_function(likelihood, plates, outputs, words):
    with pytest.raises(ValueError, match=words):
        start(rows_of(likelihood, plates, outputs), X)


def column(f, X):
    return likelihoods.Gaussian(ogp.stack([f(X)]), 0.1)


@pytest.mark.filterwarnings("ignore:Missing a plate statement")
@pytest.mark.parametrize("guide", [ogp.AutoSparseGP, AutoNormal, None], ids=["ours", "of NumPyro", "NUTS"])
@pytest.mark.parametrize(
    "likelihood, dim, outputs, words",
    [
        (ours, -2, y, r"rows are at dim=-1.*at dim=-2\. Leave dim=-2 out"),
        (
            column,
            -1,
            y[:, None],
            r"rows are at dim=-2.*at dim=-1\. .*write likelihood\.to_event\(1\), or f\(X\)\[\.\.\., 0\]",
        ),
    ],
    ids=["one function", "a column"],
)
def test_a_plate_at_another_axis_than_the_rows(guide, likelihood, dim, outputs, words):
    """Silently, each observation counted twelve times, under all inference but ours at dim=-2."""
    program = rows_of(likelihood, [("data", 12, {"dim": dim})], outputs)
    with pytest.raises(ValueError, match=rf"counts each of its observations 12 times: its {words}"):
        if guide is None:
            MCMC(NUTS(program), num_warmup=1, num_samples=1, progress_bar=False).run(KEY, X)
        else:
            start(program, X, guide=guide(program))


def test_repetitions_of_one_function_as_they_should_be():
    """The bound counts each of them once."""
    program, once = rows_of(ours, [ROWS, REPEATS], jnp.stack([y] * 3)), rows_of(ours, [ROWS], y)
    svi, other = (SVI(p, ogp.AutoSparseGP(p), optax.adam(0.01), TraceMeanField_ELBO()) for p in (program, once))
    at_prior = [s.evaluate(s.init(KEY, X), X) for s in (svi, other)]
    assert_allclose(at_prior[0], 3 * at_prior[1], rtol=1e-5)


def test_guides_of_several_samples():
    program = rows_of(ours, [ROWS], y)
    svi = SVI(program, ogp.AutoSparseGP(program), optax.adam(0.01), Trace_ELBO(3, multi_sample_guide=True))
    with pytest.raises(ValueError, match=r"`f\.u0` has shape \(\);.*num_particles, not multi_sample_guide=True"):
        svi.evaluate(svi.init(KEY, X), X)


@pytest.mark.parametrize("handwritten", [True, False])
def test_parameters_of_the_model_named_like_those_of_the_guide(handwritten):
    """Silently, both were one number."""

    def program(X, y):
        level = numpyro.param("f.u0_loc", jnp.zeros(len(Z)))
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X) + level[0], 0.1), obs=y)

    said = pytest.raises(
        ValueError, match=r"parameter `f\.u0_loc` has the name of a parameter of the guide.*another name"
    )
    if not handwritten:
        with said:
            start(program)
        return

    def guide(X, y):
        ogp.gp_posterior("f", len(Z))

    svi = SVI(program, guide, optax.adam(0.01), TraceMeanField_ELBO())
    with said:
        ogp.posterior(program, guide, svi.get_params(svi.init(KEY, X, y)), X, y)


def test_a_latent_site_named_like_a_parameter_of_the_guide():
    """NumPyro said that it must be sampled."""

    def program(X, y):
        level = numpyro.sample("f.u0_loc", dist.Normal())
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        numpyro.sample("y", likelihoods.Gaussian(f(X) + level, 0.1), obs=y)

    with pytest.raises(ValueError, match=r"The model's site `f\.u0_loc` has the name of a parameter of the guide"):
        start(program)


@pytest.mark.parametrize("name", ["f_residual_scale", "x_loc"])
def test_other_parameters_named_like_those_of_the_guide(name):
    def program(X, y):
        own = numpyro.param(name, jnp.ones((len(X), 1) if name == "x_loc" else ()))
        x = ogp.latent_inputs("x", len(X), 1)
        f = ogp.gp("f", kernels.RBF(0.3), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Poisson(f(x) * own.ravel()[0]), obs=jnp.ones(12, int))

    with pytest.raises(ValueError, match=rf"parameter `{name}` has the name of a parameter of the guide"):
        start(program, guide=ogp.AutoSparseGP(program, residual="tight"))
    encoder = {"x": lambda X, y: (X, 0.1 * jnp.ones_like(X))}
    start(program, guide=ogp.AutoSparseGP(program, latents=encoder))  # which declares neither


def test_moments_of_functions_are_those_of_marginals():
    for name in ("mean", "covariance"):
        with pytest.raises(AttributeError, match=rf"GPFunction has no `{name}`\. It is a function.*f\(X\)\.mean"):
            getattr(FITTED, name)(X)


def test_columns_of_a_table_in_another_order():
    """Silently, each lengthscale was that of another column."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": np.linspace(0, 1, 12), "b": np.linspace(3, 1, 12)}, dtype="float32")

    def program(X, y):
        f = ogp.gp("f", kernels.RBF(jnp.array([0.3, 2.0])), table[::3])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1), obs=y)

    svi = svi_of(program)
    params = svi.get_params(svi.init(KEY, table, y))
    f = ogp.posterior(program, svi.guide, params, table, y)["f"]
    for at in (f, pickle.loads(pickle.dumps(f)), f.diagonalized()):
        with pytest.raises(ValueError, match=r"columns b, a, and one before it.* order a, b\..*Pass X\[\['a', 'b'\]\]"):
            at(table[["b", "a"]])
    swapped = f(table[["b", "a"]].to_numpy())
    renamed = f(table[["b", "a"]].set_axis(["c", "d"], axis=1))
    assert_allclose(swapped.variance, renamed.variance)
    assert_allclose(f(table.iloc[:3]).mean, f(table.to_numpy()[:3]).mean)
    assert f.joint(table).mean.shape == (12,)
    collapsed = ogp.CollapsedGP(kernels.RBF(jnp.array([0.3, 2.0])), table, table[::3], 0.1)
    leaves, tree = jax.tree.flatten(collapsed)
    for d in (collapsed, jax.tree.unflatten(tree, leaves)):
        with pytest.raises(ValueError, match=r"columns b, a, and one before it.* order a, b\..*Pass X\[\['a', 'b'\]\]"):
            d.posterior(y)(table[["b", "a"]])
    assert_allclose(collapsed.posterior(y)(table).mean, collapsed.posterior(y)(table.to_numpy()).mean)
    for wrong in (
        lambda: ogp.CollapsedGP(kernels.RBF(0.3), table, table[["b", "a"]][::3], 0.1),
        lambda: ogp.online.compress(f, table[::4])(table[["b", "a"]]),
        lambda: ogp.online.condition(f, table[1:3], y[1:3], lambda m: likelihoods.Gaussian(m, 0.1))(table[["b", "a"]]),
    ):
        with pytest.raises(ValueError, match="columns b, a, and one before it"):
            wrong()
    result = ogp.fit(svi, KEY, (table, y), num_steps=2, progress_bar=False)
    for use in (
        lambda: result.predict(table[["b", "a"]]),
        lambda: result.check(held_out=(table[["b", "a"]], y)),
    ):
        with pytest.raises(ValueError, match=r"columns b, a, and one before it.* order a, b"):
            use()
    assert result.predict(table, num_samples=4)["y"].mean.shape == (12,)


@pytest.mark.parametrize("how", [jax.jit, jax.grad, lambda f: lambda a: jax.vmap(f)(jnp.stack([a, a]))])
def test_a_traced_power_of_the_collapsed_bound(how):
    def bound(alpha):
        return ogp.CollapsedGP(kernels.RBF(0.3), X, Z, 0.1, bound="pep", alpha=alpha).log_prob(y)

    with pytest.raises(
        ValueError, match="`alpha` is an option of the bound, so it must be a number that is known where"
    ):
        how(bound)(jnp.asarray(0.5))
    assert jnp.isfinite(bound(jnp.asarray(0.5)))
