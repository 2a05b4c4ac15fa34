"""Many outputs: sets and kernels per latent function, mixtures, tasks in a column, missing values, a likelihood per output."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import Predictive, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from tests import oracles, problems

P, N, D, M, O = 3, 13, 2, 4, 3
VARIANCE, LENGTHSCALE = np.array([1.3, 0.7, 2.0]), np.array([0.9, 1.4, 0.6])
NOISE = np.array([0.3, 0.5, 0.4])  # standard deviations
W = np.array([[1.0, -0.6, 0.2], [0.4, 0.9, -1.1], [-0.3, 0.2, 0.8]])  # (L, P)
V = np.array([0.5, 0.8, 0.3])
KEY = jax.random.PRNGKey(0)


def kernel_of(own: bool):
    """One kernel for all latent functions, or one for each."""
    if own:
        return jnp.asarray(VARIANCE) * kernels.Matern52(jnp.asarray(LENGTHSCALE)[:, None])
    return VARIANCE[0] * kernels.Matern52(LENGTHSCALE[0])


def oracle_kernels(own: bool):
    return [oracles.matern52(VARIANCE[p if own else 0], LENGTHSCALE[p if own else 0]) for p in range(P)]


@pytest.fixture
def X(rng):
    return jnp.asarray(rng.uniform(-2, 2, (N, D)))


@pytest.fixture
def Y(rng, X):
    return np.sin(np.asarray(X) @ rng.normal(size=(D, P))) + 0.3 * rng.normal(size=(N, P))


class Sets:
    """Sets of points that latent functions share, (M, D), or do not, (P, M, D), with a random q for each."""

    def __init__(self, rng, *shapes):
        self.points = [jnp.asarray(rng.uniform(-2, 2, shape)) for shape in shapes]
        self.q = [[problems.random_q(rng, shape[-2]) for _ in range(P)] for shape in shapes]

    @property
    def params(self):
        params = {}
        for i, qs in enumerate(self.q):
            params[f"f.u{i}_loc"] = jnp.stack([m for m, _ in qs])
            params[f"f.u{i}_scale_tril"] = jnp.stack([T for _, T in qs])
        return params

    def of(self, p):
        """The points of latent function p."""
        return [np.asarray(Z if Z.ndim == 2 else Z[p]) for Z in self.points]

    def oracle(self, p):
        return problems.oracle_sets(self.of(p), [qs[p] for qs in self.q])


SHARED, OWN = (M, D), (P, M, D)


def model(X, Y=None, *, inducing, kernel, likelihood, mix=None, mask=True, num_data=None):
    """All outputs in one site, with a plate for data and one for outputs."""
    f = ogp.gp("f", kernel, inducing, num_latents=P, jitter=0.0)
    m = f(X) if mix is None else f(X) @ mix
    with numpyro.plate("data", num_data or len(X), subsample_size=len(X), dim=-2), numpyro.plate("outputs", P, dim=-1):
        numpyro.sample("y", likelihood(m).mask(mask), obs=Y)


def each_output(X, Ys=None, *, inducing, kernel, mix=None):
    """A likelihood for each output, in a site of its own."""
    f = ogp.gp("f", kernel, inducing, jitter=0.0, num_latents=P)
    m = f(X) if mix is None else f(X) @ mix
    a, b, c = (None, None, None) if Ys is None else Ys
    with numpyro.plate("data", len(X)):
        numpyro.sample("a", likelihoods.Gaussian(m[..., 0], NOISE[0]), obs=a)
        numpyro.sample("b", likelihoods.Bernoulli(m[..., 1]), obs=b)
        numpyro.sample("c", likelihoods.Poisson(m[..., 2]), obs=c)


def gaussian(m):
    return likelihoods.Gaussian(m, NOISE)


def loss_of(model, *args, residual="prior", **kwargs):
    guide = ogp.AutoSparseGP(model, residual=residual)
    return jax.jit(lambda params, *Y: TraceMeanField_ELBO().loss(KEY, params, model, guide, *args, *Y, **kwargs))


def bound(model, params, *args, residual="prior", **kwargs):
    if residual == "tight":
        params = params | {"f_residual_scale": jnp.asarray(V)}
    return -float(loss_of(model, *args, residual=residual, **kwargs)(params))


def moments(ks, sets, X, v=None):
    """Means and variances (N, L) of the latent functions."""
    parts = [oracles.spherical_moments(k, sets.oracle(p), X, v=1.0 if v is None else v[p]) for p, k in enumerate(ks)]
    return tuple(np.stack(a, -1) for a in zip(*parts, strict=True))


def divergence(ks, sets):
    return sum(oracles.kl_q(k, sets.oracle(p)) for p, k in enumerate(ks))


def cost(v):
    return (v - np.log(v) - 1) / 2


# ---------------------------------------------------------------- sets and kernels for each latent function


@pytest.mark.parametrize(
    ("own_kernels", "shapes"),
    [
        (False, [SHARED]),
        (True, [SHARED]),
        (False, [OWN]),
        (True, [OWN]),
        (True, [OWN, (O, D)]),
        (False, [SHARED, (P, O, D)]),
        (True, [OWN, (P, O, D)]),
    ],
    ids=[
        "shared",
        "kernels",
        "points",
        "kernels+points",
        "kernels+points+shared",
        "shared+points",
        "kernels+points+points",
    ],
)
def test_the_bound_is_the_sum_of_single_ones(rng, X, Y, shapes, own_kernels):
    sets, ks = Sets(rng, *shapes), oracle_kernels(own_kernels)
    ours = bound(model, sets.params, X, Y, inducing=sets.points, kernel=kernel_of(own_kernels), likelihood=gaussian)
    expected = [oracles.elbo_gaussian(ks[p], sets.oracle(p), X, Y[:, p], NOISE[p] ** 2) for p in range(P)]
    assert_allclose(ours, sum(expected), rtol=1e-9)


def singles(X, Y, *, points, weights=None):
    """The same as P functions of their own."""
    functions = []
    for p in range(P):
        own = [Z if Z.ndim == 2 else Z[p] for Z in points]
        if weights is not None:
            own[-1] = ogp.MeanOnly(own[-1])
        functions.append(ogp.gp(f"f{p}", VARIANCE[p] * kernels.Matern52(LENGTHSCALE[p]), own, jitter=0.0))
    with numpyro.plate("data", N, dim=-2), numpyro.plate("outputs", P, dim=-1):
        numpyro.sample("y", gaussian(ogp.stack([f(X) for f in functions])), obs=Y)


def together(X, Y, *, points, weights=None):
    inducing = points if weights is None else [*points[:-1], ogp.MeanOnly(points[-1])]
    model(X, Y, inducing=inducing, kernel=kernel_of(True), likelihood=gaussian)


@pytest.mark.parametrize(
    ("shapes", "mean_only"),
    [
        ([OWN], False),
        ([OWN, (O, D)], False),
        ([SHARED, (P, 5, D)], True),
        ([OWN, (5, D)], True),
    ],
    ids=["SVGP", "SOLVE-GP", "shared+mean_only_points", "points+mean_only_shared"],
)
def test_values_and_gradients_are_those_of_single_functions(rng, X, Y, shapes, mean_only):
    sets = Sets(rng, *shapes)
    weights = jnp.asarray(rng.normal(size=(P, 5))) if mean_only else None
    params = sets.params | ({"f.u1_weights": weights} if mean_only else {})
    split = {name.replace("f.", f"f{p}."): value[p] for p in range(P) for name, value in params.items()}

    def loss(model, params, points):
        guide = ogp.AutoSparseGP(model)
        return TraceMeanField_ELBO().loss(KEY, params, model, guide, X, Y, points=points, weights=weights)

    ours, one_by_one = [
        jax.jit(jax.value_and_grad(partial(loss, m), argnums=1))(p, sets.points)
        for m, p in ((together, params), (singles, split))
    ]
    for a, b in zip(*map(jax.tree.leaves, (ours, one_by_one)), strict=True):
        assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def declare(inducing, kernel=None, num_latents=None, key=0, **kwargs):
    with handlers.seed(rng_seed=key):
        return ogp.gp("f", kernel_of(False) if kernel is None else kernel, inducing, num_latents=num_latents, **kwargs)


def test_points_of_their_own_say_how_many_functions_there_are(rng, X):
    own, other = jnp.asarray(rng.normal(size=(P, M, D))), jnp.asarray(rng.normal(size=(O, D)))

    def look(inducing):
        f = declare(inducing)
        return f.beliefs[0].loc, f(X).mean, f.joint(X).covariance_matrix

    cases = [
        (own, P, M),
        ([own, other], P, M),
        ([other, own], P, O),
        ([other, ogp.MeanOnly(own)], P, O),
        (own[:1], 1, M),
    ]
    for inducing, latents, size in cases:
        e, mean, covariance = jax.eval_shape(lambda inducing=inducing: look(inducing))
        assert (e.shape, mean.shape, covariance.shape) == ((latents, size), (N, latents), (latents, N, N))


def test_joint_distribution_with_points_of_their_own(rng, X):
    own, shared = jnp.asarray(rng.normal(size=(P, M, D))), jnp.asarray(rng.normal(size=(O, D)))

    @jax.jit
    def look():
        f = declare([own, shared], kernel_of(True), jitter=0.0)
        return f.joint(X), f(X).variance, [q.loc for q in f.beliefs]

    joint, variance, e = look()
    for p, k in enumerate(oracle_kernels(True)):
        sets = [
            oracles.WhitenedSet(np.asarray(own[p]), np.asarray(e[0][p]), np.zeros((M, M))),
            oracles.WhitenedSet(np.asarray(shared), np.asarray(e[1][p]), np.zeros((O, O))),
        ]
        mean, covariance = oracles.q_f(k, sets, np.asarray(X))
        assert_allclose(joint.mean[p], mean, rtol=1e-9, atol=1e-10)
        assert_allclose(joint.covariance_matrix[p], covariance, rtol=1e-7, atol=1e-8)  # draws add jitter
        assert_allclose(variance[:, p], np.diag(covariance), rtol=1e-8, atol=1e-10)


def test_any_kernel_takes_points_of_their_own(rng, X):
    """A function that knows two matrices and no latent axis; tinygp's kernels."""
    own = jnp.asarray(rng.normal(size=(P, M, D)))

    def rbf(X1, X2=None):
        if X2 is None:
            return jnp.ones(len(X1))
        assert X1.ndim == X2.ndim == 2
        return jnp.exp(-((X1[:, None] - X2[None]) ** 2).sum(-1) / 2)

    tinygp = pytest.importorskip("tinygp")
    shared = jnp.asarray(rng.normal(size=(O, D)))
    theirs = tinygp.kernels.ExpSquared(1.0, distance=tinygp.kernels.distance.L2Distance())

    @jax.jit
    def look():
        ms = [declare([own, shared], kernel)(X) for kernel in (kernels.RBF(1.0), rbf, theirs)]
        return [(m.mean, m.variance) for m in ms]

    ours, *others = look()
    for other in others:
        for one, another in zip(ours, other, strict=True):
            assert_allclose(another, one, rtol=1e-8)


def test_float32_stays_float32_with_points_of_their_own(rng, X, Y):
    sets, X = Sets(rng, OWN, (O, D)), jnp.float32(X)
    arguments = {
        "inducing": [jnp.float32(Z) for Z in sets.points],
        "kernel": jax.tree.map(jnp.float32, kernel_of(True)),
        "likelihood": lambda m: likelihoods.Gaussian(m, jnp.float32(NOISE)),
    }
    guide = ogp.AutoSparseGP(model)

    def look(params):
        m = ogp.posterior(model, guide, params, X, jnp.float32(Y), **arguments)["f"](X)
        return m.mean, m.variance, m[..., 1].variance, (m @ jnp.float32(W))[..., 0].mean, m.sample(KEY)

    for value in jax.eval_shape(look, jax.tree.map(jnp.float32, sets.params)):
        assert value.dtype == jnp.float32


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (lambda z: {"inducing": [z(3, 4, 2), z(2, 4, 2)]}, r"must agree on P; got shapes \[\(3, 4, 2\), \(2, 4, 2\)\]"),
        (lambda z: {"inducing": [z(4, 2), z(3, 4, 2), ogp.MeanOnly(z(2, 5, 2))]}, "must agree on P"),
        (lambda z: {"inducing": z(3, 4, 2), "num_latents": 2}, r"`num_latents` is 2 but .* a leading axis of 3"),
        (
            lambda z: {"inducing": z(2, 4, 2), "kernel": kernel_of(True)},
            r"leading axis of 2.* hyperparameters one of 3",
        ),
        (lambda z: {"inducing": [z(4, 2), z(3, 4, 3)]}, r"shape \(n, D\) with D = 2; got \(3, 4, 3\)"),
        (lambda z: {"inducing": z(2, 3, 4, 2)}, r"got \(2, 3, 4, 2\)\. Points of their own .* shape \(P, n, D\)"),
        (lambda z: {"inducing": z(0, 4, 2)}, "at least one point"),
        (lambda z: {"inducing": [z(3, 4, 2), ogp.MeanOnly(z(3, 5, 2), 6)]}, "between 1 and H = 5"),
    ],
)
def test_what_disagrees_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        declare(**arguments(lambda *shape: jnp.arange(float(np.prod(shape))).reshape(shape)))


def test_inputs_have_no_latent_axis(X):
    with pytest.raises(ValueError, match=r"`X` must have shape \(n, D\); got \(3, 13, 2\)"):
        jax.eval_shape(lambda: declare(X[:M])(jnp.stack([X] * P)))


# ---------------------------------------------------------------- mixtures


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_mixture_with_a_learned_W(rng, X, Y, residual):
    sets, ks = Sets(rng, OWN), oracle_kernels(True)

    def mixture(X, Y):
        model(
            X, Y, inducing=sets.points, kernel=kernel_of(True), likelihood=gaussian, mix=numpyro.param("W", jnp.eye(P))
        )

    v = V if residual == "tight" else np.ones(P)
    mean, variance = moments(ks, sets, np.asarray(X), v)

    def expected(W):
        terms = oracles.expected_log_normal(Y, mean @ W, variance @ W**2, NOISE**2) - cost(v).sum()
        return terms.sum() - divergence(ks, sets)

    params = sets.params | {"W": jnp.asarray(W)} | ({"f_residual_scale": jnp.asarray(V)} if residual == "tight" else {})
    loss, gradient = jax.jit(jax.value_and_grad(loss_of(mixture, X, Y, residual=residual)))(params)
    assert_allclose(-loss, expected(W), rtol=1e-9)
    for i, j in ((0, 1), (2, 0)):
        step = 1e-4 * np.eye(P)[:, [i]] * np.eye(P)[j]
        assert_allclose(-gradient["W"][i, j], (expected(W + step) - expected(W - step)) / 2e-4, rtol=1e-6)


def test_mixture_with_a_sampled_W(rng, X, Y):
    """The bound for a point of W, less its log prior; and whole posteriors of W by another guide."""
    sets = Sets(rng, OWN)
    arguments = {"inducing": sets.points, "kernel": kernel_of(True), "likelihood": gaussian}

    def bayesian(X, Y=None):
        mix = numpyro.sample("W", dist.Normal(0.0, 1.0).expand([P, P]).to_event(2))
        model(X, Y, **arguments, mix=mix)

    at_W = bound(partial(model, **arguments, mix=jnp.asarray(W)), sets.params, X, Y)
    ours = bound(bayesian, sets.params | {"W_auto_loc": jnp.asarray(W)}, X, Y)
    assert_allclose(ours, at_W + dist.Normal(0, 1).log_prob(W).sum(), rtol=1e-10)


def test_predictive_draws_of_a_mixture(rng, X):
    """Draws of all outputs in one statement have the covariance between outputs that W makes."""
    sets, points = Sets(rng, OWN), X[:2]
    arguments = {"inducing": sets.points, "kernel": kernel_of(True), "likelihood": gaussian, "mix": jnp.asarray(W)}
    guide = ogp.AutoSparseGP(model)

    @jax.jit
    def predict():
        guide(X, jnp.zeros((N, P)), **arguments)
        return Predictive(model, guide=guide, params=sets.params, num_samples=40_000)(KEY, points, **arguments)["y"]

    with handlers.seed(rng_seed=0):
        draws = predict()
    latent = [oracles.q_f(k, sets.oracle(p), np.asarray(points)) for p, k in enumerate(oracle_kernels(True))]
    mean = np.stack([m for m, _ in latent], -1) @ W
    blocks = np.zeros((2, P, 2, P))
    for p, (_, covariance) in enumerate(latent):
        blocks[:, p, :, p] = covariance
    covariance = np.einsum("alcm,lp,mq->apcq", blocks, W, W).reshape(2 * P, 2 * P) + np.diag(np.tile(NOISE**2, 2))
    draws = np.asarray(draws).reshape(-1, 2 * P)
    diagonal = np.diag(covariance)
    standard_error = np.sqrt((np.outer(diagonal, diagonal) + covariance**2) / len(draws))
    assert np.abs((draws.mean(0) - mean.ravel()) / np.sqrt(diagonal / len(draws))).max() < 4
    assert np.abs((np.cov(draws.T) - covariance) / standard_error).max() < 4


# ---------------------------------------------------------------- missing values


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_missing_outputs_are_as_if_their_rows_were_removed(rng, X, Y, residual):
    sets, ks, seen = Sets(rng, OWN), oracle_kernels(True), rng.uniform(size=(N, P)) < 0.7
    holes = jnp.where(seen, Y, jnp.nan)
    arguments = {"inducing": sets.points, "kernel": kernel_of(True), "likelihood": gaussian, "mask": seen}
    ours = bound(model, sets.params, X, holes, residual=residual, **arguments)
    v = "optimal" if residual == "tight" else 1.0
    expected = [
        oracles.elbo_gaussian(ks[p], sets.oracle(p), X[seen[:, p]], Y[seen[:, p], p], NOISE[p] ** 2, v=v)
        for p in range(P)
    ]
    assert_allclose(ours, sum(expected), rtol=1e-9)


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_missing_outputs_of_a_mixture(rng, X, Y, residual):
    sets, ks, seen = Sets(rng, SHARED), oracle_kernels(False), rng.uniform(size=(N, P)) < 0.7
    arguments = {"inducing": sets.points, "kernel": kernel_of(False), "likelihood": gaussian, "mask": seen, "mix": W}
    v = V if residual == "tight" else np.ones(P)
    mean, variance = moments(ks, sets, np.asarray(X), v)
    terms = oracles.expected_log_normal(Y, mean @ W, variance @ W**2, NOISE**2) - cost(v).sum()
    params = sets.params | ({"f_residual_scale": jnp.asarray(V)} if residual == "tight" else {})
    value_and_gradient = jax.value_and_grad(loss_of(model, X, residual=residual, **arguments))
    nan, seven = (value_and_gradient(params, jnp.where(seen, Y, missing)) for missing in (jnp.nan, 7.0))
    assert_allclose(-nan[0], terms[seen].sum() - divergence(ks, sets), rtol=1e-9)
    for a, b in zip(*map(jax.tree.leaves, (nan, seven)), strict=True):
        assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_minibatch_scales_all_outputs_and_no_divergence(rng, X, Y):
    sets, ks = Sets(rng, OWN), oracle_kernels(False)
    arguments = {"inducing": sets.points, "kernel": kernel_of(False), "likelihood": gaussian, "num_data": 4 * N}
    whole = sum(oracles.elbo_gaussian(ks[p], sets.oracle(p), X, Y[:, p], NOISE[p] ** 2) for p in range(P))
    kl = divergence(ks, sets)
    assert_allclose(bound(model, sets.params, X, Y, **arguments), 4 * (whole + kl) - kl, rtol=1e-9)


# ---------------------------------------------------------------- a likelihood for each output

LOG_DENSITIES = [oracles.log_gaussian(NOISE[0] ** 2), oracles.log_bernoulli_logit, oracles.log_poisson()]


@pytest.fixture
def Ys(Y, rng):
    """Real values, labels, counts."""
    return Y[:, 0], jnp.asarray(Y[:, 1] > 0, int), jnp.asarray(rng.poisson(1.5, N))


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_a_likelihood_for_each_output(rng, X, Ys, residual):
    sets, ks = Sets(rng, OWN, (O, D)), oracle_kernels(True)
    arguments = {"inducing": sets.points, "kernel": kernel_of(True)}
    ours = bound(each_output, sets.params, X, Ys, residual=residual, **arguments)
    if residual == "tight":  # Gaussian noise has the best v of each point, the others one v for each function
        first = oracles.elbo_gaussian(ks[0], sets.oracle(0), X, Ys[0], NOISE[0] ** 2, v="optimal")
    else:
        first = oracles.elbo_gaussian(ks[0], sets.oracle(0), X, Ys[0], NOISE[0] ** 2)
    v = V if residual == "tight" else np.ones(P)
    rest = [oracles.elbo(ks[p], sets.oracle(p), X, np.asarray(Ys[p]), LOG_DENSITIES[p], v=v[p]) for p in (1, 2)]
    assert_allclose(ours, first + sum(rest), rtol=1e-8)


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_a_likelihood_for_each_output_of_a_mixture(rng, X, Ys, residual):
    sets, ks = Sets(rng, SHARED), oracle_kernels(True)
    ours = bound(
        each_output, sets.params, X, Ys, residual=residual, inducing=sets.points, kernel=kernel_of(True), mix=W
    )
    v = V if residual == "tight" else np.ones(P)
    mean, variance = moments(ks, sets, np.asarray(X), v)
    mean, variance = mean @ W, variance @ W**2
    fit = sum(
        oracles.expected_log_density(LOG_DENSITIES[p], np.asarray(Ys[p]), mean[:, p], variance[:, p]).sum()
        for p in range(P)
    )
    assert_allclose(ours, fit - N * P * cost(v).sum() - divergence(ks, sets), rtol=1e-8)


@pytest.mark.parametrize("mix", [None, W], ids=["unmixed", "mixed"])
def test_one_site_or_three_are_the_same_bound(rng, X, Y, mix):
    sets = Sets(rng, SHARED)
    arguments = {"inducing": sets.points, "kernel": kernel_of(False), "mix": mix}

    def three(X, Y, *, inducing, kernel, mix):
        f = ogp.gp("f", kernel, inducing, jitter=0.0, num_latents=P)
        m = f(X) if mix is None else f(X) @ mix
        with numpyro.plate("data", N):
            numpyro.sample("a", likelihoods.Gaussian(m[:, 0], NOISE[0]), obs=Y[:, 0])
            numpyro.sample("bc", likelihoods.Gaussian(m[..., [2, 1]], NOISE[[2, 1]]).to_event(1), obs=Y[:, [2, 1]])

    one = bound(partial(model, likelihood=gaussian), sets.params, X, Y, residual="tight", **arguments)
    assert_allclose(bound(three, sets.params, X, Y, residual="tight", **arguments), one, rtol=1e-12)


def test_predictive_and_posterior_of_a_likelihood_for_each_output(rng, X, Ys):
    sets = Sets(rng, OWN)
    arguments = {"inducing": sets.points, "kernel": kernel_of(True), "mix": W}
    guide = ogp.AutoSparseGP(each_output)
    new = X[:5] + 0.1

    @jax.jit
    def predict():
        guide(X, Ys, **arguments)
        return Predictive(each_output, guide=guide, params=sets.params, num_samples=20_000)(KEY, new, **arguments)

    with handlers.seed(rng_seed=0):
        draws = predict()
    assert {name: draws[name].shape for name in "abc"} == dict.fromkeys("abc", (20_000, 5))

    @jax.jit
    def moments():
        m = ogp.posterior(each_output, guide, sets.params, X, Ys, **arguments)["f"](new) @ W
        ys = likelihoods.Gaussian(m[..., 0], NOISE[0]), likelihoods.Bernoulli(m[..., 1]), likelihoods.Poisson(m[..., 2])
        return [(y.mean, y.variance) for y in ys]

    for name, (mean, variance) in zip("abc", moments(), strict=True):
        z = (draws[name].mean(0) - mean) / np.sqrt(variance / 20_000)
        assert np.abs(z).max() < 4, name


# ---------------------------------------------------------------- tasks in a column


def tasks(X, Y, *, inducing, W, kappa, noise):
    """The intrinsic model in the long format: rows (x, task), one output, noise by task."""
    kernel = VARIANCE[0] * kernels.Matern52(LENGTHSCALE[0]).on([0, 1]) * kernels.Coregion(W, kappa).on(2)
    f = ogp.gp("f", kernel, inducing, jitter=0.0)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise[X[:, 2].astype(int)]), obs=Y)


def long_format(X, seen):
    """Rows (x, task) of the outputs that are seen, in the order of ``Y[seen]``."""
    rows, columns = np.nonzero(seen)
    return jnp.asarray(np.hstack([np.asarray(X)[rows], columns[:, None]]))


def intrinsic(B):
    def kernel(X1, X2):
        k = oracles.matern52(VARIANCE[0], LENGTHSCALE[0])
        return k(X1[:, :2], X2[:, :2]) * B[np.ix_(X1[:, 2].astype(int), X2[:, 2].astype(int))]

    return kernel


def test_bound_with_a_column_of_tasks(rng, X, Y):
    loadings, kappa, seen = rng.normal(size=(P, 2)), np.array([0.3, 0.1, 0.6]), rng.uniform(size=(N, P)) < 0.6
    rows, y = long_format(X, seen), Y[seen]
    Z, k = np.asarray(rows)[rng.permutation(len(rows))[:6]], intrinsic(loadings @ loadings.T + np.diag(kappa))
    q = [problems.random_q(rng, 6)]
    noise = NOISE[np.asarray(rows)[:, 2].astype(int)] ** 2
    params = problems.q_params(q)

    def with_params(X, Y):
        learned = numpyro.param("loadings", jnp.asarray(loadings)), numpyro.param("kappa", jnp.asarray(kappa))
        points = numpyro.param("Z", jnp.asarray(Z))
        tasks(X, Y, inducing=points, W=learned[0], kappa=learned[1], noise=jnp.asarray(NOISE))

    params |= {"loadings": jnp.asarray(loadings), "kappa": jnp.asarray(kappa), "Z": jnp.asarray(Z)}
    loss, gradient = jax.jit(jax.value_and_grad(loss_of(with_params, rows, y)))(params)

    def expected(loadings):
        k = intrinsic(loadings @ loadings.T + np.diag(kappa))
        return oracles.elbo_gaussian(k, problems.oracle_sets([Z], q), np.asarray(rows), y, noise)

    assert_allclose(
        -loss, oracles.elbo_gaussian(k, problems.oracle_sets([Z], q), np.asarray(rows), y, noise), rtol=1e-9
    )
    step = 1e-5 * np.eye(P)[:, [1]] * np.eye(2)[0]
    assert_allclose(
        -gradient["loadings"][1, 0], (expected(loadings + step) - expected(loadings - step)) / 2e-5, rtol=1e-6
    )
    assert (gradient["Z"][:, 2] == 0).all() and (gradient["Z"][:, :2] != 0).all()


def test_one_column_of_W_is_the_mixture_of_one_function(rng, X, Y):
    """Of rank one, the intrinsic model is f(X) @ W for any points and any q: inducing values of task 0 are W_0 f(Z)."""
    loadings, seen = np.array([[0.8], [-1.2], [0.5]]), rng.uniform(size=(N, P)) < 0.7
    Z, q = jnp.asarray(rng.uniform(-2, 2, (M, D))), problems.random_q(rng, M)
    rows = long_format(X, seen)
    long = bound(
        tasks, problems.q_params([q]), rows, Y[seen], inducing=jnp.hstack([Z, jnp.zeros((M, 1))]), W=loadings, kappa=0.0,
        noise=jnp.asarray(NOISE),
    )  # fmt: skip

    def mixture(X, Y):
        f = ogp.gp("f", VARIANCE[0] * kernels.Matern52(LENGTHSCALE[0]), Z, num_latents=1, jitter=0.0)
        with numpyro.plate("data", N, dim=-2), numpyro.plate("outputs", P, dim=-1):
            numpyro.sample("y", gaussian(f(X) @ loadings.T).mask(seen), obs=Y)

    params = {name: value[None] for name, value in problems.q_params([q]).items()}
    assert_allclose(long, bound(mixture, params, X, Y), rtol=1e-10)


def test_intrinsic_model_and_mixture_of_equal_kernels_are_one_exact_gp(rng, X, Y):
    """Z = X, best q: both bounds are log p(y). W orthonormal, so that the mixture's posterior factorises over functions."""
    loadings = np.linalg.qr(rng.normal(size=(P, 2)))[0]
    X, Y, noise = np.asarray(X)[:7], Y[:7], 0.4
    rows = np.asarray(long_format(X, np.ones((7, P), bool)))
    k, one = intrinsic(loadings @ loadings.T), oracles.matern52(VARIANCE[0], LENGTHSCALE[0])
    exact = oracles.exact_log_marginal(k, rows, Y.ravel(), noise**2)

    # Two tasks at all inputs determine the third, since W has rank two.
    Z = rows[rows[:, 2] < 2]
    mean, covariance = oracles.optimal_q(k, rows, Y.ravel(), Z, noise**2, whitened=True)
    params = problems.q_params([(mean, np.linalg.cholesky(covariance))])
    long = bound(
        tasks,
        params,
        jnp.asarray(rows),
        Y.ravel(),
        inducing=jnp.asarray(Z),
        W=loadings,
        kappa=0.0,
        noise=jnp.full(P, noise),
    )

    def mixture(X, Y):
        f = ogp.gp("f", VARIANCE[0] * kernels.Matern52(LENGTHSCALE[0]), jnp.asarray(X), num_latents=2, jitter=0.0)
        with numpyro.plate("data", 7):
            numpyro.sample("y", likelihoods.Gaussian(f(jnp.asarray(X)) @ loadings.T, noise).to_event(1), obs=Y)

    qs = [oracles.optimal_q(one, X, column, X, noise**2, whitened=True) for column in (Y @ loadings).T]
    params = {
        "f.u0_loc": jnp.stack([m for m, _ in qs]),
        "f.u0_scale_tril": jnp.stack([np.linalg.cholesky(S) for _, S in qs]),
    }
    assert_allclose(long, exact, rtol=1e-8)
    assert_allclose(bound(mixture, params, X, Y), exact, rtol=1e-8)


def test_subsampled_columns_of_separate_mean_only_points_are_unbiased(rng):
    """Every latent function has its own points; the penalty's columns are a random choice of the same places in each."""
    Z, points, weights = rng.normal(size=(2, 4, 1)), rng.normal(size=(2, 6, 1)), jnp.asarray(rng.normal(size=(2, 6)))

    def penalty(key, size):
        def model():
            ogp.gp("f", kernels.RBF(1.0), [jnp.asarray(Z), ogp.MeanOnly(jnp.asarray(points), size)], jitter=0.0)

        seeded = numpyro.handlers.substitute(numpyro.handlers.seed(model, key), {"f.u1_weights": weights})
        return numpyro.handlers.trace(seeded).get_trace()["f.u1_kl"]["fn"].log_factor

    full = penalty(jax.random.PRNGKey(0), None)
    draws = jax.jit(jax.vmap(lambda key: penalty(key, 3)))(jax.random.split(jax.random.PRNGKey(1), 2000))
    assert abs(draws.mean() - full) < 4 * draws.std() / np.sqrt(2000) and draws.std() > 0
    each = [oracles.orthogonal_process(oracles.rbf(1.0, 1.0), Z[p])(points[p], points[p]) for p in range(2)]
    assert_allclose(full, -sum(w @ C @ w for w, C in zip(weights, each, strict=True)) / 2, rtol=1e-6)


def test_prior_draws_of_float32_functions_are_float32():
    def model():
        return ogp.gp("f", kernels.RBF(jnp.float32(1.0)), jnp.zeros((3, 1), jnp.float32)).beliefs[0].loc

    assert numpyro.handlers.seed(model, 0)().dtype == jnp.float32
