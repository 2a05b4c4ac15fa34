"""Inputs that break kernel matrices give finite values and gradients, in float32 too; and traps that other libraries fell into."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro.infer import TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from tests import problems

DTYPES = [jnp.float32, jnp.float64]


def value_and_gradient(X, y, sets, kernel=kernels.RBF):
    """A compiled function of lengthscale and noise: loss of a model with everything learned, and all its gradients."""

    def model(hyper):
        f = ogp.gp("f", hyper["variance"] * kernel(hyper["lengthscale"]), hyper["sets"])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), hyper["noise"]), obs=y)

    guide = ogp.AutoSparseGP(model, residual="tight")
    loss = jax.jit(jax.value_and_grad(lambda h: TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), {}, model, guide, h)))

    def at(lengthscale=1.0, noise=0.3):
        dtype = X.dtype
        hyper = {
            "variance": jnp.ones((), dtype),
            "lengthscale": jnp.full(X.shape[1], lengthscale, dtype),
            "noise": jnp.asarray(noise, dtype),
            "sets": sets,
        }
        return loss(hyper)

    return at


def all_finite(tree):
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree))


def hard_cases(dtype):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3))
    y = np.sin(X[:, 0])
    Z, O = X[:8], X[20:26]
    near = np.concatenate([Z, Z + 1e-7 * rng.normal(size=Z.shape)])
    constant = X.copy()
    constant[:, 1] = 5.0
    cases = {
        "equal inducing points": (X, y, [np.concatenate([Z, Z])]),
        "near-duplicate inducing points": (X, y, [near]),
        "second set inside the first": (X, y, [Z, Z[:4]]),
        "second set equal to the first": (X, y, [Z, Z]),
        "inducing points at the data": (X, y, [X, O]),
        "more inducing points than data": (X[:5], y[:5], [X[:30], O]),
        "constant column": (constant, y, [constant[:8], constant[20:26]]),
        "one data point": (X[:1], y[:1], [Z, O]),
        "one inducing point": (X, y, [Z[:1], O[:1]]),
        "mean-only points equal to the first set": (X, y, [Z, ogp.MeanOnly(jnp.asarray(Z, dtype))]),
        "far from the origin": (X + 1e3, y, [Z + 1e3, O + 1e3]),
        "large targets": (X, 1e8 * y, [Z, O]),
    }
    return {
        name: (
            jnp.asarray(X, dtype),
            jnp.asarray(y, dtype),
            [s if isinstance(s, ogp.MeanOnly) else jnp.asarray(s, dtype) for s in sets],
        )
        for name, (X, y, sets) in cases.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", list(hard_cases(jnp.float64)))
def test_hard_inputs(case, dtype):
    value, gradient = value_and_gradient(*hard_cases(dtype)[case])()
    assert value.dtype == dtype and all_finite((value, gradient))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [kernels.RBF, kernels.Matern12, kernels.Matern32])
def test_extreme_hyperparameters(kernel, dtype):
    """HSGP's squared-exponential gradients are NaN from a lengthscale of 2 on; here from 1e-3 to 1e3 they are finite."""
    X, y, sets = hard_cases(dtype)["second set inside the first"]
    loss = value_and_gradient(X, y, sets, kernel)
    for lengthscale in (1e-3, 1.0, 1e3):
        for noise in (1e-3, 1.0):
            assert all_finite(loss(lengthscale, noise))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_set_that_knows_nothing_changes_nothing(dtype):
    """A varying coefficient: the function is zero where its covariate is, and so are inducing variables there."""
    rng = np.random.default_rng(0)
    X = jnp.asarray(np.stack([rng.uniform(-2, 2, 30), np.arange(30) % 2], -1), dtype)
    y = jnp.asarray(rng.normal(size=30), dtype)
    kernel = kernels.RBF(jnp.ones((), dtype)).on(0) * kernels.Linear(jnp.ones((), dtype)).on(1)
    treated, control = X[1::2][:5], X[::2][:4]

    def bound(scale, sets):
        return ogp.CollapsedGP(scale * kernel, X, sets, 0.5).log_prob(y)

    runs = [
        jax.jit(jax.value_and_grad(bound))(jnp.ones((), dtype), s)
        for s in (treated, [treated, control], [control, treated])
    ]
    for run in runs[1:]:
        np.testing.assert_allclose(run, runs[0], atol=1e-3 if dtype == jnp.float32 else 1e-8)

    value, gradient = value_and_gradient(
        X, y, [treated, control], lambda l: kernels.RBF(l[0]).on(0) * kernels.Linear(l[1]).on(1)
    )()
    assert all_finite((value, gradient))

    f = ogp.CollapsedGP(kernel, X, treated, 0.5).posterior(y)
    for draw in (f(control).sample(jax.random.PRNGKey(0)), f.joint(control).sample(jax.random.PRNGKey(0))):
        np.testing.assert_allclose(draw, 0, atol=0.02)  # jitter of a zero matrix is that of a variance of one
    given = ogp.init.greedy_variance(kernel, X, 6, given=control)
    np.testing.assert_array_equal(given, ogp.init.greedy_variance(kernel, X, 6))
    conditioned = ogp.online.condition(f, control[:1], y[:1], lambda m: likelihoods.Gaussian(m, 0.5), num_steps=1)
    np.testing.assert_allclose(conditioned(X).mean, f(X).mean, atol=1e-4 if dtype == jnp.float32 else 1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_of_next_to_no_variance_is_finite(dtype):
    tiny = 1e-38 if dtype == jnp.float32 else 1e-300
    X, y, sets = hard_cases(dtype)["second set inside the first"]
    scaled = lambda lengthscale: jnp.asarray(tiny, dtype) * kernels.RBF(lengthscale)  # noqa: E731
    assert all_finite(value_and_gradient(X, y, sets, scaled)())


def test_float32_fits_stay_finite():
    """Adam from starts that break other libraries' kernel matrices: 30 steps, and every loss and parameter is finite."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    y, Z, O = np.sin(X[:, 0]), rng.normal(size=(150, 3)), rng.normal(size=(10, 3))  # more inducing points than data
    adam = optax.adam(0.01)

    @jax.jit
    def fit(start, X, y):
        def loss(unconstrained):
            params, (lengthscale, noise) = unconstrained["q"], jnp.exp(unconstrained["log"])

            def model():
                f = ogp.gp("f", kernels.Matern32(lengthscale), [unconstrained["Z"], unconstrained["O"]])
                with numpyro.plate("data", len(X)):
                    numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)

            guide = ogp.AutoSparseGP(model, residual="tight")
            return TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide)

        def step(state, _):
            value, gradient = jax.value_and_grad(loss)(state[0])
            updates, opt = adam.update(gradient, state[1])
            return (optax.apply_updates(state[0], updates), opt), value

        (end, _), losses = jax.lax.scan(step, (start, adam.init(start)), length=30)
        return end, losses

    def run(X=X, y=y, Z=Z, O=O, lengthscale=1.0, noise=0.3):
        q = problems.q_params([(np.zeros(M), np.eye(M)) for M in (len(Z), len(O))])
        start = {"q": q, "log": np.log([lengthscale, noise]), "Z": Z, "O": O}
        start, X, y = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (start, X, y))
        return fit(start, X, y)

    constant = np.where(np.arange(3) == 1, 5.0, X)
    cases = {
        "near-duplicate points": {"Z": np.concatenate([Z[:75], Z[:75] + 1e-7])},
        "lengthscale 1e-3": {"lengthscale": 1e-3},
        "lengthscale 1e3": {"lengthscale": 1e3},
        "noise 1e-6": {"noise": 1e-6},
        "lengthscale 1e3, noise 1e-6": {"lengthscale": 1e3, "noise": 1e-6},
        "second set inside the first": {"O": Z[:10]},
        "constant column": {"X": constant, "Z": np.where(np.arange(3) == 1, 5.0, Z)},
        "inputs times 1e8": {"X": 1e8 * X, "Z": 1e8 * Z, "O": 1e8 * O},
        "inputs times 1e8, lengthscale too": {"X": 1e8 * X, "Z": 1e8 * Z, "O": 1e8 * O, "lengthscale": 1e8},
        "inputs times 1e-8": {"X": 1e-8 * X, "Z": 1e-8 * Z, "O": 1e-8 * O},
        "inputs of 1e8 that differ by 1": {"X": X + 1e8, "Z": Z + 1e8, "O": O + 1e8},
        "targets times 1e8": {"y": 1e8 * y},
        "targets times 1e8, noise 1e-6": {"y": 1e8 * y, "noise": 1e-6},
        "targets times 1e-8": {"y": 1e-8 * y},
    }
    for name, case in cases.items():
        end, losses = run(**case)
        assert losses.dtype == jnp.float32 and all_finite((end, losses)), f"{name}: {losses}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rescued_factor_still_gives_a_bound(dtype, rng):
    """Extra jitter is noise on the inducing variables: the bound drops a little, it does not break."""
    X, y = problems.data(rng)
    Z = np.concatenate([X[:6]] * 3)
    params = problems.q_params([(np.zeros(18), np.eye(18))])
    cast = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)  # noqa: E731
    kwargs = {"likelihood": problems.gaussian(0.4), "jitter": 0.0, "kernel": "rbf"}
    repeated = problems.loss(cast(params), cast(X), cast(y), inducing=cast(Z), **kwargs)
    once = problems.loss(
        cast(problems.q_params([(np.zeros(6), np.eye(6))])), cast(X), cast(y), inducing=cast(X[:6]), **kwargs
    )
    np.testing.assert_allclose(
        repeated, once, rtol=1e-3 if dtype == jnp.float32 else 1e-6
    )  # at the prior q all are equal


@pytest.mark.parametrize("dtype", DTYPES)
def test_whitening_keeps_the_first_loss_small(dtype, rng):
    """Unwhitened, the first loss of such a fit is in the millions in float32."""
    X = jnp.asarray(rng.normal(size=(200, 1)), dtype)
    value, _ = value_and_gradient(X, jnp.sin(3 * X[:, 0]), [jnp.sort(X[:50], axis=0)])()
    assert abs(float(value)) < 200 * 10


def test_float32_follows_float64(rng):
    X = rng.normal(size=(100, 2))
    y, sets = np.sin(X).sum(1), [X[:10], X[10:20]]
    values = [
        value_and_gradient(
            jnp.asarray(X, d), jnp.asarray(y, d), [jnp.asarray(s, d) for s in sets], kernel=kernels.Matern32
        )()
        for d in DTYPES
    ]
    np.testing.assert_allclose(values[0][0], values[1][0], rtol=1e-4)
    for a, b in zip(jax.tree.leaves(values[0][1]), jax.tree.leaves(values[1][1]), strict=True):
        assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b)


def test_predictions_do_not_need_a_b_by_b_matrix(rng):
    """gpytorch#1951: marginals at 200,000 inputs would need 320 GB otherwise."""
    X, y = problems.data(rng)
    Zs = problems.sets(rng, [5, 4])
    params = problems.q_params([problems.random_q(rng, M) for M in (5, 4)])
    f = problems.posterior(params, jnp.asarray(X), jnp.asarray(y), inducing=Zs, likelihood=problems.gaussian(0.3))
    many = jnp.asarray(rng.normal(size=(200_000, 2)))
    variance = jax.jit(lambda f, X: f(X).variance)(f, many)
    np.testing.assert_allclose(variance[:5], f(many[:5]).variance, rtol=1e-10)
    with pytest.raises(ValueError, match=r"limit is 8192.*independent\(\)"):
        f(many).sample(jax.random.PRNGKey(0))


def test_tinygp_kernels_work_as_they_are(rng):
    tinygp = pytest.importorskip("tinygp")
    X, y = (jnp.asarray(a) for a in problems.data(rng))
    sets = [jnp.asarray(s) for s in problems.sets(rng, [5, 4])]

    def loss(kernel):
        def model():
            f = ogp.gp("f", kernel, [*sets, ogp.MeanOnly(X[:3])], jitter=0.0)
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)

        params = problems.q_params([(np.linspace(-1, 1, M), 0.5 * np.eye(M)) for M in (5, 4)])
        params["f.u2_weights"] = jnp.ones(3)
        guide = ogp.AutoSparseGP(model)
        return jax.jit(lambda p: TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), p, model, guide))(params)

    theirs = 1.3 * tinygp.transforms.Linear(
        1 / 0.9, tinygp.kernels.Matern52(distance=tinygp.kernels.distance.L2Distance())
    )
    np.testing.assert_allclose(loss(theirs), loss(1.3 * kernels.Matern52(0.9)), rtol=1e-9)

    def plain(A, B=None):  # any function of that form will do
        return jnp.ones(len(A)) if B is None else jnp.exp(-0.5 * jnp.sum((A[:, None] - B[None]) ** 2, -1))

    np.testing.assert_allclose(loss(plain), loss(kernels.RBF(1.0)), rtol=1e-9)
