"""One run of a model sees one function: values of y that depend on f at many inputs, beside dense formulas and NUTS."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from tests import oracles, problems

NOISE = 0.2


rbf = oracles.rbf(1.0, 1.5)


def gaussian_problem(A, nodes, Z, v=1.0, seed=0):
    """y = A f(nodes) + noise: the data, log p(y), the best q of the whitened variables and its bound, all dense."""
    rng = np.random.default_rng(seed)
    y = A @ np.sin(nodes[:, 0]) + NOISE * rng.normal(size=len(A))
    C = A @ rbf(nodes, nodes) @ A.T + NOISE**2 * np.eye(len(A))
    evidence = -0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(C)[1] + len(y) * np.log(2 * np.pi))
    L = np.linalg.cholesky(rbf(Z, Z) + 1e-10 * np.eye(len(Z)))
    Phi = np.linalg.solve(L, rbf(Z, nodes)) @ A.T
    S = np.linalg.inv(np.eye(len(Z)) + Phi @ Phi.T / NOISE**2)
    m = S @ Phi @ y / NOISE**2
    residual = A @ (rbf(nodes, nodes) - rbf(nodes, Z) @ np.linalg.solve(L @ L.T, rbf(Z, nodes))) @ A.T
    fit = -0.5 * (np.sum((y - Phi.T @ m) ** 2) + np.trace(Phi.T @ S @ Phi) + v * np.trace(residual)) / NOISE**2
    fit -= len(y) * np.log(NOISE * np.sqrt(2 * np.pi))
    kl = 0.5 * (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1])
    cost = len(nodes) * (v - np.log(v) - 1) / 2
    params = problems.q_params([(m, np.linalg.cholesky(S))])
    return jnp.asarray(y), evidence, params, fit - kl - cost


def elbos(model, guide, params, num=4000, objective=None):
    """Draws of the bound."""
    objective = TraceMeanField_ELBO() if objective is None else objective
    loss = jax.jit(jax.vmap(lambda key: -objective.loss(key, params, model, guide)))
    return np.asarray(loss(jax.random.split(jax.random.PRNGKey(1), num)))


def assert_mean(draws, value, slack=4.5):
    """That draws have this mean, as far as their number tells."""
    assert abs(draws.mean() - value) < slack * draws.std() / np.sqrt(len(draws)) + 1e-9, (draws.mean(), value)


B, J = 10, 4
NODES = ((np.arange(B)[:, None] + (np.arange(J) + 0.5) / J) * (10 / B)).reshape(-1, 1)
BINS = np.kron(np.eye(B), np.full((1, J), 1 / J))


def bins(Z, draw, y):
    f = draw(ogp.gp("f", kernels.RBF(1.5), jnp.asarray(Z)))
    with numpyro.plate("bins", B):
        numpyro.sample("y", dist.Normal(f.reshape(B, J).mean(1), NOISE), obs=y)


@pytest.mark.parametrize("objective", [TraceMeanField_ELBO(), Trace_ELBO()], ids=["mean field", "plain"])
@pytest.mark.parametrize("residual, v", [("prior", 1.0), ("tight", 0.4)])
@pytest.mark.parametrize("num_inducing", [18, 5])
def test_bins_have_a_bound(num_inducing, residual, v, objective):
    """y is an average of f over a bin: the bound of NumPyro's objective is that of the dense formula, below log p(y)."""
    Z = np.linspace(-0.3, 10.3, num_inducing)[:, None]
    y, evidence, params, bound = gaussian_problem(BINS, NODES, Z, v)
    model = partial(bins, Z, lambda f: f(jnp.asarray(NODES)).sample(), y)
    guide = partial(ogp.gp_posterior, "f", num_inducing, residual=residual)
    draws = elbos(model, guide, params | {"f_residual_scale": jnp.asarray(v)}, objective=objective)
    assert_mean(draws, bound)
    assert bound < evidence
    if num_inducing == 18:
        assert residual == "tight" or evidence - bound < 0.3
        f = jax.jit(lambda p: ogp.posterior(model, guide, p)["f"])(params | {"f_residual_scale": jnp.asarray(v)})
        t = np.array([[5.0]])
        C = BINS @ rbf(NODES, NODES) @ BINS.T + NOISE**2 * np.eye(B)
        c = BINS @ rbf(NODES, t)
        exact = np.sqrt(1 - (c.T @ np.linalg.solve(C, c))[0, 0])
        assert_allclose(np.sqrt(f(jnp.asarray(t)).variance[0]), exact, rtol=0.05)


def test_draws_in_float32_are_not_noisy():
    """160 inputs, 18 points that leave nothing: in float32 too the values have the variance that q says, and are smooth."""
    nodes, Z = (
        np.linspace(0, 10, 160, dtype=np.float32)[:, None],
        np.linspace(-0.3, 10.3, 18, dtype=np.float32)[:, None],
    )

    def model():
        return ogp.gp("f", kernels.RBF(np.float32(1.5)), Z)(nodes).sample()

    def run(key):
        guide = numpyro.handlers.seed(partial(ogp.gp_posterior, "f", 18, dtype=np.float32), key)
        trace = numpyro.handlers.trace(guide).get_trace()
        return numpyro.handlers.replay(numpyro.handlers.seed(model, jax.random.fold_in(key, 1)), trace)()

    values = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.PRNGKey(0), 200)))
    assert values.dtype == np.float32
    assert_allclose(values.var(0), 1.0, atol=0.5)
    steps = np.diff(values, 2, axis=1)  # of a smooth function next to nothing; of white noise sqrt(6) times its size
    assert steps.std() < 0.03


def test_the_best_q_of_bins_is_where_the_gradient_vanishes():
    Z = np.linspace(-0.3, 10.3, 18)[:, None]
    y, _, params, _ = gaussian_problem(BINS, NODES, Z)
    model = partial(bins, Z, lambda f: f(jnp.asarray(NODES)).sample(), y)
    guide = partial(ogp.gp_posterior, "f", 18)

    def loss(p, key):
        return TraceMeanField_ELBO().loss(key, p, model, guide)

    keys = jax.random.split(jax.random.PRNGKey(2), 4000)
    gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, keys)
    for name, g in gradients.items():
        error = np.std(g, 0) / np.sqrt(len(g))
        lower = np.tril(np.ones(g.shape[1:]), 0) > 0 if name.endswith("tril") else slice(None)
        assert np.abs(np.mean(g, 0)[lower] / error[lower]).max() < 5, name


@pytest.mark.parametrize("num_inducing", [12, 3])
@pytest.mark.parametrize("residual, v", [("prior", 1.0), ("tight", 0.5)])
def test_differences_of_two_calls(num_inducing, residual, v):
    """y = f(a) - f(b) + noise for nearby a, b, where what inducing variables leave is nearly the same in both."""
    rng = np.random.default_rng(3)
    a = rng.uniform(0, 10, (8, 1))
    nodes, Z = np.concatenate([a, a + 0.4]), np.linspace(0, 10.4, num_inducing)[:, None]
    A = np.concatenate([np.eye(8), -np.eye(8)], 1)
    y, evidence, params, bound = gaussian_problem(A, nodes, Z, v)

    def model():
        f = ogp.gp("f", kernels.RBF(1.5), jnp.asarray(Z))
        first, second = f(nodes[:8]).sample(), f(nodes[8:]).sample()
        with numpyro.plate("data", 8):
            numpyro.sample("y", dist.Normal(first - second, NOISE), obs=y)

    guide = partial(ogp.gp_posterior, "f", num_inducing, residual=residual)
    params = params | {"f_residual_scale": jnp.asarray(v)}
    assert_mean(elbos(model, guide, params), bound)
    assert bound < evidence
    if num_inducing == 12:
        f = jax.jit(lambda p: ogp.posterior(model, guide, p)["f"])(params)
        joint = jax.jit(lambda f: f.joint(jnp.asarray(nodes)).covariance_matrix)(f)
        C = A @ rbf(nodes, nodes) @ A.T
        exact = C - C @ np.linalg.solve(C + NOISE**2 * np.eye(8), C)
        assert_allclose(np.sqrt(np.diag(A @ joint @ A.T)), np.sqrt(np.diag(exact)), rtol=0.05)


def test_subsampled_bins_average_to_the_whole():
    """Half of the bins at a time, under a tightened guide: values and the cost of v are scaled up alike."""
    Z = np.linspace(-0.3, 10.3, 5)[:, None]
    y, _, params, bound = gaussian_problem(BINS, NODES, Z, v=0.4)

    def model(rows):
        f = ogp.gp("f", kernels.RBF(1.5), jnp.asarray(Z))
        with numpyro.plate("bins", B, subsample_size=5):
            values = f(jnp.asarray(NODES).reshape(B, J)[rows].reshape(-1, 1)).sample()
            numpyro.sample("y", dist.Normal(values.reshape(5, J).mean(1), NOISE), obs=y[rows])

    guide = lambda rows: ogp.gp_posterior("f", 5, residual="tight")  # noqa: E731
    params = params | {"f_residual_scale": jnp.asarray(0.4)}
    halves = [elbos(partial(model, rows), partial(guide, rows), params) for rows in np.arange(B).reshape(2, 5)]
    assert_mean(sum(halves) / 2, bound)


KERNELS = {
    "float64": (np.float64, lambda Z: [Z[:4], Z[4:]], None),
    "float32": (np.float32, lambda Z: [Z[:4], Z[4:]], None),
    "mean only": (np.float64, lambda Z: [Z[:4], ogp.MeanOnly(Z[4:])], None),
    "two functions": (np.float64, lambda Z: [Z[:4], Z[4:]], 2),
}


@pytest.mark.parametrize("dtype, sets, num_latents", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("v", [None, 0.4])
def test_three_calls_draw_one_function(dtype, sets, num_latents, v):
    """Draws of f at three places in one run have the joint law of q(f), residuals included: dense formula beside 40,000 draws."""
    rng = np.random.default_rng(5)
    Z, X = rng.uniform(-2, 2, (6, 2)), rng.uniform(-2, 2, (7, 2))
    mean_only = sets is KERNELS["mean only"][1]
    sizes = [4] if mean_only else [4, 2]
    num = num_latents or 1
    qs = [[problems.random_q(rng, M) for M in sizes] for _ in range(num)]
    stacked = [tuple(np.stack([q[i][j] for q in qs]) for j in (0, 1)) for i in range(len(sizes))]
    stacked = stacked if num_latents else [(m[0], T[0]) for m, T in stacked]
    params = {k: jnp.asarray(p, dtype) for k, p in problems.q_params(stacked).items()}
    weights = rng.normal(size=2)
    params |= {"f.u1_weights": jnp.asarray(weights)} if mean_only else {}
    if v is not None:
        params |= {"f_residual_scale": jnp.full((num,) if num_latents else (), v, dtype)}
    Zs, Xs = sets(jnp.asarray(Z, dtype)), jnp.asarray(X, dtype)

    def model():
        f = ogp.gp("f", kernels.Matern32(1.1), Zs, num_latents=num_latents)
        first = Xs[:3]
        parts = [f(first).sample(), f(Xs[3:4]).sample(), (2.0 * f(Xs[4:])).sample() / 2]
        return jnp.concatenate(parts), f(first).sample() - parts[0], f(Xs[:3]).sample() - parts[0]

    def guide():
        ogp.gp_posterior("f", sizes, num_latents=num_latents, dtype=dtype, residual="prior" if v is None else "tight")

    def run(key):
        drawn = numpyro.handlers.substitute(numpyro.handlers.seed(guide, key), params)
        trace = numpyro.handlers.trace(drawn).get_trace()
        seeded = numpyro.handlers.substitute(numpyro.handlers.seed(model, jax.random.fold_in(key, 1)), params)
        return numpyro.handlers.replay(seeded, trace)()

    values, same, again = jax.jit(jax.vmap(run))(jax.random.split(jax.random.PRNGKey(0), 40_000))
    assert values.dtype == dtype and not same.any()
    assert np.abs(again).max() < (2e-2 if dtype == np.float32 else 2e-4)  # a few of the jitter's standard deviations
    values = np.asarray(values, np.float64).reshape(40_000, 7, num)
    jitter = 1e-6 if dtype == np.float32 else 1e-10

    k, points = oracles.matern32(1.0, 1.1), np.split(Z[: sum(sizes)], np.cumsum(sizes)[:-1])
    for p in range(num):
        q = problems.oracle_sets(points, qs[p])
        mean, total = oracles.q_f(k, q, X, jitter, oracles.MeanOnlySet(Z[4:], weights) if mean_only else None)
        residual = oracles.residual_covariance(k, q, X, jitter)
        covariance = total + ((1.0 if v is None else v) - 1.0) * residual
        scale = np.sqrt(np.diag(covariance))
        assert np.abs((values[..., p].mean(0) - mean) / scale).max() < 5 / np.sqrt(40_000)
        error = (np.cov(values[..., p].T) - covariance) / np.outer(scale, scale)
        assert np.abs(error).max() < 5 * np.sqrt(2 / 40_000)


def test_predictive_draws_of_several_outputs_belong_to_one_function():
    """Also where values of inducing variables are known; and draws that follow a run are its own again."""
    X = jnp.linspace(0.0, 4.0, 5)[:, None]
    kept = {}

    def model():
        f = kept["f"] = ogp.gp("f", kernels.Matern32(1.0), jnp.asarray([[-9.0]]))
        numpyro.sample("a", likelihoods.Gaussian(f(X), 1e-3))
        numpyro.sample("b", likelihoods.Gaussian(f(X + 1e-7), 1e-3))

    draws = Predictive(model, num_samples=50)(jax.random.PRNGKey(0))
    assert draws["a"].std() > 0.5
    assert_allclose(draws["a"], draws["b"], atol=0.02)
    with numpyro.handlers.seed(rng_seed=0):
        model()
    one, other = (kept["f"](X).sample(jax.random.PRNGKey(i)) for i in (0, 1))
    assert np.abs(one - other).max() > 0.1


def test_inside_of_loops_draws_share_inducing_variables():
    """In `vmap` and `scan` the inducing variables are those of the run; marginals that left a loop refuse to be drawn."""
    X = jnp.linspace(0.0, 1.0, 6)[:, None]
    Z = X  # so that there is no residual to speak of

    def model(how):
        f = ogp.gp("f", kernels.RBF(0.5), Z)
        whole = f(X).sample()
        if how == "vmap":
            each = jax.vmap(lambda x, key: f(x[None]).sample(key)[0])(X, jax.random.split(numpyro.prng_key(), 6))
        elif how == "scan":
            keys = jax.random.split(numpyro.prng_key(), 6)
            each = jax.lax.scan(lambda _, row: (None, f(row[0][None]).sample(row[1])[0]), None, (X, keys))[1]
        else:
            each = jax.vmap(lambda x: f(x[None]))(X).sample(jax.random.PRNGKey(0))
        return whole - each

    def run(how):
        trace = numpyro.handlers.trace(numpyro.handlers.seed(partial(ogp.gp_posterior, "f", 6), 0)).get_trace()
        return numpyro.handlers.replay(numpyro.handlers.seed(partial(model, how), 1), trace)()

    for how in ("vmap", "scan"):
        assert np.abs(run(how)).max() < 1e-3
    with pytest.raises(ValueError, match=r"have passed through.*f\(X\)\.independent\(\)\.sample\(\)"):
        run("marginals")


def test_large_draws_while_fitting_are_refused_with_the_remedy():
    def model(draw):
        f = ogp.gp("f", kernels.RBF(0.5), jnp.zeros((1, 1)))
        return draw(f(jnp.zeros((2049, 1))))

    def run(draw):
        trace = numpyro.handlers.trace(numpyro.handlers.seed(partial(ogp.gp_posterior, "f", 1), 0)).get_trace()
        return jax.eval_shape(lambda: numpyro.handlers.replay(numpyro.handlers.seed(partial(model, draw), 1), trace)())

    with pytest.raises(ValueError, match=r"B = 2049 .*each step of a fit; the limit is 2048.*f\(X\)\.independent\(\)"):
        run(lambda m: m.sample())
    assert run(lambda m: m.independent().sample()).shape == (2049,)

    def of_y():
        numpyro.sample("y", dist.Normal(model(lambda m: m.sample()), 1.0).to_event(1), obs=jnp.zeros(2049))

    trace = numpyro.handlers.trace(numpyro.handlers.seed(of_y, 0)).get_trace  # without a fit
    assert jax.eval_shape(lambda: trace()["y"]["fn"].base_dist.loc).shape == (2049,)
    svi = SVI(of_y, AutoNormal(of_y), optax.adam(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match=r"B = 2049 .*each step of a fit; the limit is 2048"):
        jax.eval_shape(lambda: svi.evaluate(svi.init(jax.random.PRNGKey(0))))


def test_outputs_that_nobody_looks_at_need_no_joint_draw():
    """Those hidden by `obs_mask` in a fit, and those of a model that `posterior` runs without y: more than joint draws allow."""
    X, y = jnp.zeros((8193, 1)), jnp.zeros(8193)

    def model(y=None, mask=None):
        f = ogp.gp("f", kernels.RBF(0.5), jnp.zeros((1, 1)))
        with numpyro.plate("data", 8193):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 1.0), obs=y, obs_mask=mask)

    guide = ogp.AutoSparseGP(model)
    values = jax.eval_shape(lambda: numpyro.handlers.seed(guide, 0)(y, y > 0))
    assert values["y_unobserved"].shape == (8193,)

    def by_hand(y=None, mask=None):
        ogp.gp_posterior("f", 1)

    params = {"f.u0_loc": jnp.zeros(1), "f.u0_scale_tril": jnp.eye(1)}
    assert set(jax.eval_shape(lambda p: ogp.posterior(model, ogp.AutoSparseGP(model), p), params)) == {"f"}
    assert set(jax.eval_shape(lambda p: ogp.posterior(model, by_hand, p), params)) == {"f"}


def test_one_function_twice_is_no_stack():
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(0.5), jnp.zeros((1, 1)))
        g = ogp.gp("g", kernels.RBF(0.5), jnp.zeros((1, 1)))
        h = ogp.gp("h", kernels.RBF(0.5), jnp.zeros((1, 1)), num_latents=2)
    a, b = jnp.zeros((3, 1)), jnp.ones((3, 1))
    for first, second in ((f(a), f(b)), (f(a), 2.0 * f(a) + 1.0), (h(a)[..., 0], h(b)[..., 0])):
        with pytest.raises(ValueError, match="one function comes twice"):
            ogp.stack([first, second])
    with pytest.raises(TypeError, match=r"f\(Average\(jnp\.stack\(\[a, b\], 1\), jnp\.array\(\[1\.0, -1\.0\]\)\)\)"):
        f(a) - f(b)
    assert ogp.stack([f(a), g(a)]).shape == ogp.stack([h(a)[..., 0], h(a)[..., 1]]).shape == (3, 2)


@pytest.mark.parametrize("num_latents", [None, 2])
def test_marginals_and_a_draw_of_one_function(num_latents):
    """`f(a) + f(b).sample()` is refused in a fit, whose likelihood would take the two for independent; other arrays are not."""
    X = jnp.linspace(0.0, 1.0, 3)[:, None]

    def model(combine):
        f = ogp.gp("f", kernels.RBF(1.0), X, num_latents=num_latents)
        g = ogp.gp("g", kernels.RBF(1.0), X, num_latents=num_latents)
        return combine(f, g)

    def run(combine):
        def guide():
            for name in "fg":
                ogp.gp_posterior(name, 3, num_latents=num_latents)

        trace = numpyro.handlers.trace(numpyro.handlers.seed(guide, 0)).get_trace()
        return numpyro.handlers.replay(numpyro.handlers.seed(partial(model, combine), 1), trace)()

    for symbol, combine in {
        r"\+": lambda f, g: f(X) + f(X + 0.1).sample(),
        "-": lambda f, g: 2.0 * f(X) - f(X + 0.1).sample(),
        r"\*": lambda f, g: f(X + 0.1).sample() * f(X),
    }.items():
        with pytest.raises(ValueError, match=rf"Draw both: f\(a\)\.sample\(\) {symbol} f\(b\)"):
            run(combine)
    shape = (3,) if num_latents is None else (3, 2)
    assert run(lambda f, g: f(X) + g(X).sample()).shape == run(lambda f, g: f(X) + jnp.ones(shape)).shape == shape
    assert run(lambda f, g: f(X).sample() + f(X + 0.1).sample()).shape == shape


# ---- beside NUTS


def dense_nuts(likelihood, X, t, lengthscale=1.5, num=800):
    """Posterior mean and standard deviation of f(t) where y depends on f(X): NUTS on the exact model, no sparsity."""
    both = np.concatenate([t, X])
    L = np.linalg.cholesky(oracles.rbf(1.0, lengthscale)(both, both) + 1e-8 * np.eye(len(both)))

    def model():
        e = numpyro.sample("e", dist.Normal(0.0, 1.0).expand([len(both)]).to_event(1))
        f = numpyro.deterministic("f", jnp.asarray(L) @ e)
        likelihood(f[len(t) :])

    mcmc = MCMC(NUTS(model), num_warmup=400, num_samples=num, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0))
    f = np.asarray(mcmc.get_samples()["f"])[:, : len(t)]
    return f.mean(0), f.std(0)


def fitted(model, t, steps=1500, rate=0.03):
    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(rate, steps)), TraceMeanField_ELBO(num_particles=4))
    params = svi.run(jax.random.PRNGKey(0), steps, progress_bar=False).params
    m = jax.jit(lambda p: ogp.posterior(model, guide, p)["f"](jnp.asarray(t)))(params)
    return np.asarray(m.mean), np.sqrt(np.asarray(m.variance))


def assert_agree(ours, nuts):
    assert_allclose(ours[1], nuts[1], rtol=0.15)
    assert np.abs((ours[0] - nuts[0]) / nuts[1]).max() < 0.3


TIMES = np.array([[1.0], [5.0], [9.5]])


def test_counts_per_bin_beside_nuts():
    """Poisson counts of an intensity that is summed over each bin."""
    counts = jnp.asarray(np.random.default_rng(0).poisson(8 * np.exp(BINS @ np.sin(NODES[:, 0]))))

    def likelihood(f):
        rate = 8 * jnp.exp(f).reshape(B, J).mean(1)
        with numpyro.plate("bins", B):
            numpyro.sample("y", dist.Poisson(rate), obs=counts)

    def model():
        f = ogp.gp("f", kernels.RBF(1.5), jnp.linspace(-0.3, 10.3, 14)[:, None])
        likelihood(f(jnp.asarray(NODES)).sample())

    assert_agree(fitted(model, TIMES), dense_nuts(likelihood, NODES, TIMES))


@pytest.mark.slow
def test_a_renewal_equation_beside_nuts():
    """Infections are the reproduction number exp(f) times a weighted sum of earlier infections, counted with overdispersion."""
    days, weights = 20, np.array([0.2, 0.5, 0.3])
    X = np.linspace(0, 10, days)[:, None]

    def infections(f):
        past, out = jnp.full(3, 30.0), []
        for i in range(days):
            out.append(jnp.exp(0.3 * f[i]) * past @ weights)
            past = jnp.concatenate([out[-1][None], past[:-1]])
        return jnp.stack(out)

    truth = jax.jit(infections)(jnp.sin(X[:, 0]))
    counts = jnp.asarray(np.random.default_rng(1).poisson(truth))

    def likelihood(f):
        with numpyro.plate("days", days):
            numpyro.sample("y", dist.NegativeBinomial2(infections(f), 20.0), obs=counts)

    def model():
        f = ogp.gp("f", kernels.RBF(1.5), jnp.linspace(-0.3, 10.3, 14)[:, None])
        likelihood(f(jnp.asarray(X)).sample())

    assert_agree(fitted(model, TIMES), dense_nuts(likelihood, X, TIMES))


@pytest.mark.slow
def test_an_ode_beside_nuts():
    """x' = f(x) by Euler's steps, each of which calls f at the state where it is: six calls of one function."""
    steps, size = 6, 0.4
    grid = np.linspace(-3, 3, 25)[:, None]
    t = np.array([[0.5], [1.0], [1.5]])
    y = np.zeros(steps)
    x = -1.0
    for i in range(steps):
        x += size * np.cos(x)
        y[i] = x
    y = jnp.asarray(y + 0.1 * np.random.default_rng(2).normal(size=steps))

    def likelihood(move):
        x = jnp.asarray(-1.0)
        for i in range(steps):
            x = x + size * move(x)
            numpyro.sample(f"y{i}", dist.Normal(x, 0.1), obs=y[i])

    def model():
        f = ogp.gp("f", kernels.RBF(1.0), jnp.linspace(-3, 3, 10)[:, None])
        likelihood(lambda x: f(x[None, None]).sample()[0])

    # On a grid so fine that f between its points is known to 1e-6.
    K = oracles.rbf(1.0, 1.0)(grid, grid) + 1e-8 * np.eye(len(grid))
    weights = np.linalg.inv(K)

    def on_grid(f):
        def move(x):
            return jnp.exp(-((x - grid[:, 0]) ** 2) / 2) @ jnp.asarray(weights) @ f

        likelihood(move)

    assert_agree(fitted(model, t, steps=4000), dense_nuts(on_grid, grid, t, lengthscale=1.0))
