"""Deep GPs: against input warping, against brute force, and the bounds from several draws for each point."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods
from numpyro_orthgp.functions.shared_draws import draw_grouped
from tests import oracles, problems

NOISE = 0.4


def warped(X):
    """What the linear inner layer of `shallow` computes: weights times inputs."""
    return X @ np.array([[0.7, -0.4], [0.3, 1.1]])


def narrow(X, y=None, *, num_samples=None, Z=None):
    """Two layers of one function each, the inner one far from determined by its two points."""
    Z1, Z2 = jnp.asarray([[-1.0], [0.5]]), jnp.asarray([[-1.5], [0.0], [1.5]])
    f1 = ogp.gp("f1", 0.5 * kernels.RBF(0.7), Z1, jitter=0.0)
    f2 = ogp.gp("f2", kernels.RBF(0.9), Z2, jitter=0.0)
    deep = ogp.DeepGP([f1, f2], means=[jnp.eye(1)])
    with numpyro.plate("data", len(X)):
        if num_samples is None:
            numpyro.sample("y", likelihoods.Gaussian(deep(X), NOISE), obs=y)
        else:
            f, log_weights = deep.particles(X, num_samples)
            numpyro.sample("y", likelihoods.Mixture(likelihoods.Gaussian(f, NOISE), log_weights), obs=y)


def linear_inside(X, y=None, *, Z2):
    """A deep GP whose inner layer has a linear kernel, so that two points determine it."""
    f1 = ogp.gp("f1", kernels.Linear(), jnp.eye(2), num_latents=2, jitter=0.0)
    f2 = ogp.gp("f2", kernels.Matern52(0.8), Z2, jitter=0.0)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(ogp.DeepGP([f1, f2])(X), NOISE), obs=y)


def elbo(model, guide, params, key, *args, **kwargs):
    return -TraceMeanField_ELBO().loss(key, params, model, guide, *args, **kwargs)


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(3)
    X, y = problems.data(rng, 12)
    return X, y, [*problems.sets(rng, [4, 3])], [problems.random_q(rng, M) for M in (4, 3)]


# ---- equivalences


def test_a_deterministic_inner_layer_warps_the_inputs(problem):
    X, y, Z2, qs = problem
    # In whitened coordinates of the points (1, 0), (0, 1) the function x W has u = W'; its standard deviation is nothing.
    params = problems.q_params(qs, "f2") | {
        "f1.u0_loc": jnp.asarray([[0.7, 0.3], [-0.4, 1.1]]),
        "f1.u0_scale_tril": 1e-13 * jnp.eye(2)[None].repeat(2, 0),
    }
    guide = ogp.AutoSparseGP(linear_inside)
    deep = jax.jit(lambda p: elbo(linear_inside, guide, p, jax.random.PRNGKey(0), X, y, Z2=Z2))(params)
    kernel = problems.kernel_oracle("matern52", 1.0, 0.8)
    shallow = oracles.elbo_gaussian(kernel, problems.oracle_sets(Z2, qs), warped(X), y, NOISE**2)
    inner = sum(
        oracles.kl_normal(np.asarray(m), np.asarray(T) @ np.asarray(T).T, np.zeros(2), np.eye(2))
        for m, T in zip(params["f1.u0_loc"], params["f1.u0_scale_tril"], strict=True)
    )
    np.testing.assert_allclose(float(deep) + inner, shallow, rtol=1e-9)


def test_one_layer_is_the_function_itself(problem):
    X, _, Z2, qs = problem
    f = problems.posterior(problems.q_params(qs) | {"variance": 1.3, "lengthscale": jnp.full(2, 0.9)}, X, None,
                           inducing=Z2, likelihood=problems.gaussian(0.3))  # fmt: skip
    plain, deep = f(X), ogp.DeepGP([f])(X)
    np.testing.assert_array_equal(plain.mean, deep.mean)
    np.testing.assert_array_equal(plain.variance, deep.variance)
    particles, log_weights = ogp.DeepGP([f]).particles(X, 3, rng_key=jax.random.PRNGKey(0))
    np.testing.assert_allclose(particles.mean.reshape(-1, 3), np.repeat(plain.mean[:, None], 3, 1), rtol=1e-12)
    assert log_weights.shape == (12, 3) and not log_weights.any()


def test_by_hand_and_as_a_stack(problem):
    """`f2(f1(X).independent().sample() + X W)` is what the stack does, to the draw, with the cost of a tightened inner layer."""
    X, _, Z2, qs = problem
    W = jnp.asarray([[0.5, 0.1], [-0.2, 0.9]])

    def model(X, y, by_hand):
        f1 = ogp.gp("f1", kernels.RBF(1.1), jnp.asarray(Z2[0]), num_latents=2)
        f2 = ogp.gp("f2", kernels.Matern52(0.8), Z2)
        with numpyro.plate("data", 24, subsample_size=12):
            f = f2(f1(X).independent().sample() + X @ W) if by_hand else ogp.DeepGP([f1, f2], means=[W])(X)
            numpyro.sample("y", likelihoods.Poisson(f), obs=y)

    guide = ogp.AutoSparseGP(model, residual={"f1": "tight"}, init_scale={"f1": 0.3})
    counts = jnp.asarray(np.arange(12) % 4)
    params = problems.q_params(qs, "f2") | {"f1_residual_scale": jnp.asarray([0.4, 0.7])}
    key = jax.random.PRNGKey(1)
    loss = jax.jit(lambda p, by_hand: elbo(model, guide, p, key, X, counts, by_hand), static_argnums=1)
    values = [float(loss(params, by_hand)) for by_hand in (True, False)]
    np.testing.assert_allclose(*values, rtol=1e-12)
    loose = ogp.AutoSparseGP(model, init_scale={"f1": 0.3})
    v = np.array([0.4, 0.7])
    # With residuals scaled down by hand nothing but the cost of v is missing: 24 points' worth of it.
    cost = 24 * ((v - np.log(v) - 1) / 2).sum()

    def shrunk(X, y, by_hand):
        f1 = ogp.gp("f1", kernels.RBF(1.1), jnp.asarray(Z2[0]), num_latents=2)
        f2 = ogp.gp("f2", kernels.Matern52(0.8), Z2)
        with numpyro.plate("data", 24, subsample_size=12):
            m = f1(X)
            m = ogp.Marginals(m.mean, m.explained, m.residual * v, names=m.names)
            numpyro.sample("y", likelihoods.Poisson(f2(m.sample() + X @ W)), obs=y)

    free = float(jax.jit(lambda p: elbo(shrunk, loose, p, key, X, counts, True))(params))
    np.testing.assert_allclose(values[0], free - cost, rtol=1e-9)


# ---- several draws for each point

XS, YS = np.array([[-0.8], [0.1], [0.9]]), np.array([0.9, -0.3, 0.6])


def inner_prior(X):
    k = problems.kernel_oracle("rbf", 0.5, 0.7)
    return k(X, X)


def log_evidence():
    """log p(y) of `narrow` by a product rule over f1 at the three inputs."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    grid = np.stack(np.meshgrid(nodes, nodes, nodes, indexing="ij"), -1).reshape(-1, 3)
    weight = np.prod(np.stack(np.meshgrid(weights, weights, weights, indexing="ij"), -1).reshape(-1, 3), -1)
    H = grid @ np.linalg.cholesky(inner_prior(XS)).T + XS[:, 0]
    K = np.exp(-((H[:, :, None] - H[:, None, :]) ** 2) / (2 * 0.9**2)) + NOISE**2 * np.eye(3)
    quadratic = np.einsum("gi,gij,gj->g", np.broadcast_to(YS, H.shape), np.linalg.inv(K), np.broadcast_to(YS, H.shape))
    density = np.exp(-quadratic / 2) / np.sqrt(np.linalg.det(2 * np.pi * K))
    return np.log(weight @ density / (2 * np.pi) ** 1.5)


@pytest.fixture(scope="module")
def fitted():
    """`narrow` fitted with one draw, and its bound with other numbers of draws, by key."""
    guides = {kind: ogp.AutoSparseGP(narrow, residual={"f1": kind}) for kind in ("prior", "tight")}
    svi = SVI(narrow, guides["tight"], optax.adam(0.02), TraceMeanField_ELBO(num_particles=20))
    params = svi.run(jax.random.PRNGKey(0), 600, XS, YS, progress_bar=False).params

    def bounds(num_samples, kind, params, num_keys=2000):
        keys = jax.random.split(jax.random.PRNGKey(7), num_keys)
        one = jax.jit(
            lambda p: jax.vmap(lambda k: elbo(narrow, guides[kind], p, k, XS, YS, num_samples=num_samples))(keys)
        )
        return np.asarray(one(params))

    return params, bounds


def test_more_draws_tighten_the_bound(fitted):
    params, bounds = fitted
    evidence = log_evidence()
    draws = {S: bounds(S, "tight", params) for S in (None, 1, 8, 64)}
    means = {S: d.mean() for S, d in draws.items()}
    error = {S: d.std() / len(d) ** 0.5 for S, d in draws.items()}
    assert abs(means[None] - means[1]) < 5 * np.hypot(error[None], error[1])
    assert means[8] > means[1] + 5 * np.hypot(error[8], error[1])
    assert means[64] > means[8]
    assert all(means[S] < evidence + 4 * error[S] for S in draws)


def test_several_draws_bound_the_model_of_independent_residuals_only():
    """Two equal inputs, different outputs, no inducing points near: `docs/theory/deep.md` says what happens."""
    X, y, noise = jnp.zeros((2, 1)), np.array([1.5, -1.5]), 0.5

    def model(num_samples):
        inner = ogp.gp("f1", kernels.RBF(1.0), jnp.full((1, 1), 100.0), jitter=0.0)
        outer = ogp.gp("f2", kernels.Linear(1.0), jnp.ones((1, 1)), jitter=0.0)
        with numpyro.plate("data", 2):
            f, log_weights = ogp.DeepGP([inner, outer]).particles(X, num_samples)
            numpyro.sample("y", likelihoods.Mixture(likelihoods.Gaussian(f, noise), log_weights), obs=jnp.asarray(y))

    guide = ogp.AutoSparseGP(model)
    params = {"f1.u0_loc": jnp.zeros(1), "f1.u0_scale_tril": jnp.eye(1)}
    params |= {"f2.u0_loc": jnp.ones(1), "f2.u0_scale_tril": 0.02 * jnp.eye(1)}

    def bound(num_samples):
        keys = jax.random.split(jax.random.PRNGKey(0), 400)
        loss = lambda key: TraceMeanField_ELBO().loss(key, params, model, guide, num_samples)  # noqa: E731
        values = -np.asarray(jax.jit(jax.vmap(loss))(keys))
        return values.mean(), values.std() / 20

    # f2(h) = w h with w ~ N(0, 1), and f1 at both inputs is h ~ N(0, 1): one h for both, or one for each.
    grid = np.linspace(-8, 8, 801)
    step = grid[1] - grid[0]
    prior = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    density = np.exp(-((y[:, None, None] - grid[:, None] * grid) ** 2) / (2 * noise**2)) / np.sqrt(2 * np.pi) / noise
    together = np.log(np.einsum("w,h,wh->", prior, prior, density[0] * density[1]) * step**2)
    apart = np.log(prior @ ((density[0] @ prior) * (density[1] @ prior)) * step**3)
    one, many = bound(1), bound(50)
    assert one[0] < together - 4 * one[1]
    assert together + 4 * many[1] < many[0] < apart + 4 * many[1]


@pytest.mark.parametrize("kind, v, spread", [("prior", 1.0, 1.5), ("tight", 0.5, 1.5), ("tight", 1.6, 0.0)])
def test_many_draws_integrate_residuals_within_the_logarithm(fitted, kind, v, spread):
    """Given u1 the average over residuals is an integral, whatever v; over u1 the mean is taken outside, as a bound needs."""
    params, bounds = fitted
    m1, T1, T2 = np.array([0.4, -0.7]), max(spread, 1e-12) * np.eye(2), np.asarray(params["f2.u0_scale_tril"])
    known = {"f1.u0_loc": m1, "f1.u0_scale_tril": T1, "f1_residual_scale": v}
    params = params | {name: jnp.asarray(value) for name, value in known.items()}
    Z1, Z2 = np.array([[-1.0], [0.5]]), np.array([[-1.5], [0.0], [1.5]])
    inner, outer = problems.kernel_oracle("rbf", 0.5, 0.7), problems.kernel_oracle("rbf", 1.0, 0.9)
    q1 = [oracles.WhitenedSet(Z1, m1, T1 @ T1.T)]
    q2 = [oracles.WhitenedSet(Z2, np.asarray(params["f2.u0_loc"]), T2 @ T2.T)]
    mean, cov = oracles.q_f(inner, q1, XS)
    residual = np.diag(oracles.residual_covariance(inner, q1, XS))
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    expected = 0.0
    for n in range(3):
        shared = XS[n] + mean[n] + np.sqrt(max(cov[n, n] - residual[n], 0)) * nodes
        H = (shared[:, None] + np.sqrt(residual[n]) * nodes).reshape(-1, 1)
        log_density = oracles.gaussian_terms(outer, q2, H, np.full(len(H), YS[n]), NOISE**2)
        expected += weights @ np.log(np.exp(log_density.reshape(60, 60)) @ weights)
    kl = sum(oracles.kl_normal(m, T @ T.T, np.zeros(len(T)), np.eye(len(T))) for m, T in ((m1, T1), (q2[0].loc, T2)))
    d = bounds(1000, kind, params, num_keys=400)
    bias = 4e-3  # of the logarithm of an average over 1000 draws
    assert abs(d.mean() - (expected - kl)) < 4 * d.std() / len(d) ** 0.5 + bias


def test_grouped_draws_have_the_moments_of_q(problem):
    X, _, Zs, qs = problem
    v = jnp.asarray([0.5, 2.0])
    kernel = kernels.Matern52(0.8)
    with handlers.block(), handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernel, Zs, num_latents=2, jitter=0.0)
    beliefs = tuple(ogp.gaussians.family.Full(jnp.stack([m, -m]), jnp.stack([T, T])) for m, T in qs)
    f = ogp.GPFunction(kernel, f.features, f.blocks, beliefs, None, v, 2, True)
    draw = jax.jit(lambda k: jax.vmap(lambda k: draw_grouped(f, jnp.asarray(X[:6]).reshape(2, 3, 2), k, 2))(k))
    values, log_weights = draw(jax.random.split(jax.random.PRNGKey(0), 20000))
    assert values.shape == (20000, 2, 2, 3, 2) and log_weights.shape == (20000, 2, 2, 3)
    k = problems.kernel_oracle("matern52", 1.0, 0.8)
    sets = problems.oracle_sets(Zs, qs)
    mean, cov = oracles.q_f(k, sets, X[:6])
    residual = oracles.residual_covariance(k, sets, X[:6])
    explained = cov - residual
    flat = np.asarray(values).reshape(20000, 2, 6, 2)
    np.testing.assert_allclose(flat.mean((0, 1)), np.stack([mean, -mean], -1), atol=0.03)
    same = np.kron(np.eye(2), np.ones((3, 3)))  # inputs of one group
    for p in range(2):
        centred = flat[..., p] - [mean, -mean][p]
        within = np.einsum("nsi,nsj->ij", centred, centred) / 40000
        np.testing.assert_allclose(within, same * explained + np.diag(v[p] * np.diag(residual)), atol=0.06)
        across = np.einsum("ni,nj->ij", centred[:, 0], centred[:, 1]) / 20000
        np.testing.assert_allclose(across, same * explained, atol=0.06)
    cost = ((v - jnp.log(v) - 1) / 2).sum()
    np.testing.assert_allclose(log_weights.mean(), -cost, atol=0.01)


# ---- Mixture


def test_mixture_is_the_average_of_its_components():
    rng = np.random.default_rng(0)
    B, S, P = 5, 4, 3
    m = ogp.Marginals(*(jnp.asarray(rng.uniform(0.2, 1.0, (B * S, P))) for _ in range(3)))
    log_weights, y = jnp.asarray(rng.normal(size=(B, S))), jnp.asarray(rng.normal(size=(B, P)))
    base = likelihoods.Gaussian(m, 0.3)
    mixture = likelihoods.Mixture(base.to_event(1), log_weights)
    assert mixture.batch_shape == (B,) and mixture.event_shape == (P,)
    repeated = np.repeat(y, S, 0)
    keep = jnp.asarray(rng.random((B * S, P)) < 0.5)
    masked = likelihoods.Mixture(base.mask(keep).to_event(1), log_weights)
    for name in ("log_prob", "log_predictive"):
        terms = np.asarray(getattr(base, name)(repeated)).sum(1).reshape(B, S) + log_weights
        np.testing.assert_allclose(getattr(mixture, name)(y), np.log(np.exp(terms).mean(1)), rtol=1e-12)
        kept = np.where(keep, getattr(base, name)(repeated), 0).sum(1).reshape(B, S) + log_weights
        np.testing.assert_allclose(getattr(masked, name)(y), np.log(np.exp(kept).mean(1)), rtol=1e-12)
    means, variances = base.mean.reshape(B, S, P), base.variance.reshape(B, S, P)
    # Moments and draws of the density that log_predictive is, whose weights have a sum of their own.
    shares = np.exp(log_weights - jax.nn.logsumexp(log_weights, axis=1, keepdims=True))[..., None]
    mean = (shares * means).sum(1)
    np.testing.assert_allclose(mixture.mean, mean, rtol=1e-12)
    spread = variances + (means - mean[:, None]) ** 2
    np.testing.assert_allclose(mixture.variance, (shares * spread).sum(1), rtol=1e-12)
    draws = mixture.sample(jax.random.PRNGKey(0), (20000,))
    assert draws.shape == (20000, B, P)
    np.testing.assert_allclose(draws.mean(0), mixture.mean, atol=0.05)
    np.testing.assert_allclose(draws.var(0), mixture.variance, atol=0.06)
    with pytest.raises(ValueError, match=r"must have batch shape \(B S,\).*to_event"):
        likelihoods.Mixture(base, log_weights)
    with pytest.raises(ValueError, match=r"y must have shape \(5, 3\)"):
        mixture.log_prob(y[:4])


# ---- fitting and predicting


def test_fit_predict_and_draw(problem):
    """Through SVI, posterior and Predictive: mixture predictions agree with the mean and spread of draws of y."""
    X, y, Z2, _ = problem

    def model(X, y=None, num_samples=None):
        f1 = ogp.gp("f1", kernels.RBF(1.0), Z2[0], num_latents=2)
        f2 = ogp.gp("f2", kernels.RBF(1.0), Z2)
        with numpyro.plate("data", len(X)):
            f = ogp.DeepGP([f1, f2], means=[jnp.eye(2)])(X)
            return numpyro.sample("y", likelihoods.Gaussian(f, NOISE), obs=y)

    guide = ogp.AutoSparseGP(model, residual="tight", init_scale={"f1": 0.1})
    svi = SVI(model, guide, optax.adam(0.03), TraceMeanField_ELBO())
    result = svi.run(jax.random.PRNGKey(0), 300, X, y, progress_bar=False)
    assert result.losses[-50:].mean() < result.losses[:20].mean() - 5
    fs = jax.jit(lambda p: ogp.posterior(model, guide, p, X))(result.params)
    assert sorted(fs) == ["f1", "f2"]
    deep = ogp.DeepGP([fs["f1"], fs["f2"]], means=[jnp.eye(2)])
    f, log_weights = jax.jit(lambda k: deep.particles(X[:4], 4000, rng_key=k))(jax.random.PRNGKey(1))
    mixture = likelihoods.Mixture(likelihoods.Gaussian(f, NOISE), log_weights)
    draws = Predictive(model, guide=guide, params=result.params, num_samples=4000)(jax.random.PRNGKey(2), X[:4])["y"]
    np.testing.assert_allclose(draws.mean(0), mixture.mean, atol=0.06)
    np.testing.assert_allclose(draws.var(0), mixture.variance, rtol=0.15)
    assert mixture.log_predictive(jnp.asarray(y[:4])).shape == (4,)
    # 16,000 particles: point by point, whatever the limit of joint draws.
    drawn = jax.jit(lambda k: mixture.sample(k, (100,)))(jax.random.PRNGKey(4))
    np.testing.assert_allclose(drawn.mean(0), mixture.mean, atol=5 * np.sqrt(np.asarray(mixture.variance).max() / 100))
    paths = jax.jit(lambda k: deep.sample_paths(k, 4000, num_features=32)(X[:4]))(jax.random.PRNGKey(3))
    assert paths.shape == (4000, 4)
    np.testing.assert_allclose(paths.mean(0), mixture.mean, atol=0.06)
    np.testing.assert_allclose(paths.var(0) + NOISE**2, mixture.variance, rtol=0.15)


def test_natural_gradients_for_the_last_layer(problem):
    """With an inner layer that is a fixed warping, one natural step of the last layer lands on the collapsed optimum."""
    X, y, Z2, _ = problem
    Z = Z2[:1]
    guide = ogp.AutoSparseGP(linear_inside, natural={"f2": True})
    svi = SVI(linear_inside, guide, ogp.natural_gradient(optax.sgd(0.0), 1.0), TraceMeanField_ELBO())
    start = {
        "f1.u0_loc": jnp.asarray([[0.7, 0.3], [-0.4, 1.1]]),
        "f1.u0_scale_tril": 1e-13 * jnp.eye(2)[None].repeat(2, 0),
    }

    @jax.jit
    def step():
        state = svi.init(jax.random.PRNGKey(0), X, y, Z2=Z, init_params=start)
        return svi.get_params(svi.update(state, X, y, Z2=Z)[0])

    params = step()
    mean, cov = oracles.optimal_q(
        problems.kernel_oracle("matern52", 1.0, 0.8), warped(X), y, Z[0], NOISE**2, whitened=True
    )
    # The warping's residual variance is rounding of 1e-16, with whose root, 1e-8, its outputs are drawn.
    np.testing.assert_allclose(params["f2.u0_loc"], mean, rtol=1e-7, atol=3e-8)
    T = np.asarray(params["f2.u0_scale_tril"])
    np.testing.assert_allclose(T @ T.T, cov, rtol=1e-7, atol=1e-9)


def test_float32(problem):
    X, y, Z2, _ = problem
    X, y, Z = (jnp.asarray(a, jnp.float32) for a in (X, y, Z2[0]))

    def model(X, y=None):
        f1 = ogp.gp("f1", kernels.RBF(1.0), Z, num_latents=1)
        f2 = ogp.gp("f2", kernels.RBF(1.0), Z[:, :1])
        with numpyro.plate("data", len(X)):
            f, log_weights = ogp.DeepGP([f1, f2], means=[init.linear_mean(X, 1)]).particles(X, 3)
            numpyro.sample("y", likelihoods.Mixture(likelihoods.Gaussian(f, 0.5), log_weights), obs=y)

    guide = ogp.AutoSparseGP(model, residual="tight")
    svi = SVI(model, guide, optax.sgd(0.0), TraceMeanField_ELBO())
    params = jax.jit(lambda: svi.get_params(svi.init(jax.random.PRNGKey(0), X, y)))()
    value, gradient = jax.jit(jax.value_and_grad(lambda p: elbo(model, guide, p, jax.random.PRNGKey(0), X, y)))(params)
    assert value.dtype == jnp.float32 and np.isfinite(value)
    assert all(g.dtype == jnp.float32 and np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_errors(problem):
    X, _, Z2, _ = problem
    with handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(), Z2[0])
    with pytest.raises(ValueError, match="at least one function"):
        ogp.DeepGP([])
    with pytest.raises(ValueError, match="one entry for each inner layer, 1 for 2 layers; got 2"):
        ogp.DeepGP([f, f], means=[None, None])
    key = jax.random.PRNGKey(0)
    for num_latents, mean in ((None, jnp.eye(2)), (2, jnp.eye(2)[:, :1]), (2, lambda X: X[:, 0])):
        with handlers.seed(rng_seed=0):
            inner = ogp.gp("g", kernels.RBF(), Z2[0], num_latents=num_latents)
        deep, num = ogp.DeepGP([inner, f], means=[mean]), num_latents or 1
        calls = (
            lambda deep=deep: deep(X, rng_key=key),
            lambda deep=deep: deep.particles(X, 2, rng_key=key),
            lambda deep=deep: deep.sample_paths(key, 2)(X),
        )
        for call in calls:
            with pytest.raises(
                ValueError, match=rf"`means\[0\]` must give shape \(\d+, {num}\) for the {num} function.*; got \("
            ):
                call()
    with pytest.raises(ValueError, match="`num_samples` must be a positive integer; got 0"):
        ogp.DeepGP([f]).particles(X, 0, rng_key=jax.random.PRNGKey(0))
    with pytest.raises(TypeError, match="layers made by gp"):
        ogp.DeepGP([lambda X: f(X), f]).particles(X, 2, rng_key=jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match="needs a random key"):
        ogp.DeepGP([f]).particles(X, 2)
    for mean in (jnp.eye(1), lambda X: X):
        with pytest.raises(TypeError, match=r"`means` must be a list.*Did you mean `means=\[W\]`"):
            ogp.DeepGP([f, f], means=mean)
    with pytest.raises(ValueError, match="`init_scale` must be positive"):
        ogp.gp_posterior("f", 3, init_scale=0.0)
    with pytest.raises(ValueError, match="Unknown `init_scale key` 'g'"):
        handlers.seed(ogp.AutoSparseGP(linear_inside, init_scale={"g": 1.0}), 0)(X, X[:, 0], Z2=Z2)


def test_means_that_do_not_fit_the_inputs():
    with handlers.seed(rng_seed=0):
        inner = ogp.gp("inner", kernels.RBF(0.5), jnp.linspace(0.0, 1.0, 4)[:, None])
        last = ogp.gp("last", kernels.RBF(0.5), jnp.linspace(0.0, 1.0, 4)[:, None])
        X = jnp.linspace(0.0, 1.0, 5)[:, None]
        with pytest.raises(ValueError, match=r"`means\[0\]` must have shape \(1, 1\), from the columns.*got \(2, 1\)"):
            ogp.DeepGP([inner, last], means=[jnp.ones((2, 1))])(X)
        assert ogp.DeepGP([inner, last], means=[jnp.ones(1)])(X).shape == (5,)
