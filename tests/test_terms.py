"""Terms of a sum: the posterior of each summand beside an exact GP and a dense formula."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.functions.terms import term_names
from numpyro_orthgp.kernels.summands import find_summands, select, summands
from tests import oracles, problems

NOISE = 0.2
TREND, SEASON, ROUGH = 1.5 * kernels.RBF(1.1), 0.7 * kernels.RBF(0.3), 0.2 * kernels.Matern32(0.5)
KERNEL = TREND.named("trend") + SEASON.named("season") + ROUGH
ORACLE = oracles.of_terms([oracles.rbf(1.5, 1.1), oracles.rbf(0.7, 0.3), oracles.matern32(0.2, 0.5)])
X = np.linspace(-2.0, 2.0, 25)[:, None]
Y = 0.5 * X[:, 0] + np.sin(6 * X[:, 0])
AT = np.array([[-2.2], [-0.45], [0.0], [1.5]])


def rows(X, j):
    return np.concatenate([X, np.full((len(X), 1), float(j))], 1)


@pytest.fixture(scope="module")
def fitted():
    prior = ogp.CollapsedGP(KERNEL, jnp.asarray(X), jnp.asarray(X), NOISE, jitter=1e-13)
    return prior.posterior(jnp.asarray(Y))


def test_terms_of_an_exact_gp(fitted):
    means = []
    for j, which in enumerate(["trend", "season", 2], start=1):
        mean, cov = oracles.exact_predict(ORACLE, rows(X, 0), Y, NOISE**2, rows(AT, j))
        m = fitted.term(which)(jnp.asarray(AT))
        np.testing.assert_allclose(m.mean, mean, atol=1e-6)
        np.testing.assert_allclose(m.variance**0.5, np.sqrt(np.diag(cov)), atol=1e-6)
        means.append(m.mean)
    np.testing.assert_allclose(sum(means), fitted(jnp.asarray(AT)).mean, atol=1e-10)


def test_few_points_have_standard_deviations_within_two_percent(rng):
    """300 rows, 30 points: each of two terms beside an exact GP."""
    many = np.sort(rng.uniform(-2, 2, 300))[:, None]
    y = 0.5 * many[:, 0] + np.sin(6 * many[:, 0]) + NOISE * rng.normal(size=300)
    Z = jnp.linspace(-2.1, 2.1, 30)[:, None]
    f = ogp.CollapsedGP(TREND + SEASON, jnp.asarray(many), Z, NOISE).posterior(jnp.asarray(y))
    exact = oracles.of_terms([oracles.rbf(1.5, 1.1), oracles.rbf(0.7, 0.3)])
    for j in (1, 2):
        mean, cov = oracles.exact_predict(exact, rows(many, 0), y, NOISE**2, rows(AT, j))
        m, sd = f.term(j - 1)(jnp.asarray(AT)), np.sqrt(np.diag(cov))
        np.testing.assert_allclose(m.variance**0.5, sd, rtol=0.02)
        np.testing.assert_allclose(m.mean, mean, atol=0.1 * sd.max())


def test_terms_together_and_their_covariance(fitted):
    at = jnp.asarray(AT)
    both = ogp.concatenate([fitted.term("trend").at(at), at, fitted.term("season").at(at)])
    dense = np.concatenate([rows(AT, j) for j in (1, 0, 2)])
    mean, cov = oracles.exact_predict(ORACLE, rows(X, 0), Y, NOISE**2, dense)
    joint = fitted.joint(both)
    np.testing.assert_allclose(joint.mean, mean, atol=1e-6)
    np.testing.assert_allclose(joint.covariance_matrix, cov, atol=1e-6)
    np.testing.assert_allclose(fitted.term(0).joint(at).covariance_matrix, cov[:4, :4], atol=1e-6)
    assert np.corrcoef(cov[:4, 8:]).shape == (4, 4) and abs(cov[:4, 8:]).max() > 1e-3  # they are not independent
    kernel = summands(fitted.kernel)[0].path[-1]
    for names in (["trend", "season"], [0, 1], [kernel, 1]):
        m = fitted.term(names)(at)
        part = [slice(0, 4), slice(8, 12)]
        np.testing.assert_allclose(m.mean, sum(mean[p] for p in part), atol=1e-6)
        np.testing.assert_allclose(m.variance, np.diag(sum(cov[p, q] for p in part for q in part)), atol=1e-6)
    every = fitted.term([0, 1, 2])(at)
    np.testing.assert_allclose(every.variance, fitted(at).variance, atol=1e-9)


@pytest.mark.parametrize("sizes, mean_only", [((6,), False), ((5, 4), False), ((4, 3, 2), True)])
def test_terms_with_several_sets(rng, sizes, mean_only):
    """Explained and residual variance; with mean-only points, which move each term by its share."""
    Zs, H, a = [rng.uniform(-2, 2, (M, 1)) for M in sizes], rng.uniform(-2, 2, (5, 1)), rng.normal(size=5)
    qs = [problems.random_q(rng, M) for M in sizes]
    inducing = [jnp.asarray(Z) for Z in Zs] + ([ogp.MeanOnly(jnp.asarray(H))] if mean_only else [])

    def model():
        return ogp.gp("f", KERNEL, inducing, jitter=0.0)

    params = problems.q_params(qs) | ({f"f.u{len(sizes)}_weights": jnp.asarray(a)} if mean_only else {})
    guide, at = ogp.AutoSparseGP(model), jnp.asarray(AT)

    @jax.jit
    def moments(params):
        f = ogp.posterior(model, guide, params)["f"]
        terms = [f.term(j)(at) for j in range(3)]
        return [(m.mean, m.variance, m.residual_variance) for m in terms], f(at).mean

    found, whole = moments(params)
    sets = [oracles.WhitenedSet(rows(Z, 0), m, T @ T.T) for Z, (m, T) in zip(Zs, qs, strict=True)]
    shift = oracles.MeanOnlySet(rows(H, 0), a) if mean_only else None
    total = 0
    for j in (1, 2, 3):
        mean, cov = oracles.q_f(ORACLE, sets, rows(AT, j), mean_only=shift)
        residual = np.diag(oracles.residual_covariance(ORACLE, sets, rows(AT, j)))
        for ours, dense in zip(found[j - 1], (mean, np.diag(cov), residual), strict=True):
            np.testing.assert_allclose(ours, dense, atol=1e-8)
        total = total + found[j - 1][0]
    np.testing.assert_allclose(total, whole, atol=1e-10)


def test_features_of_one_term_say_nothing_of_another(rng):
    """Fourier features of one term, points of all: beside the covariances of both written out."""
    kernel = 1.3 * kernels.Matern52(0.8).on(0) + kernels.RBF(0.7).on(1)
    features = ogp.FourierFeatures(3, -1.0, 1.0, dim=0)
    at = jnp.asarray(rng.uniform(-1, 1, (4, 2)))

    @jax.jit
    def both(at):
        with numpyro.handlers.seed(rng_seed=0):
            f = ogp.gp("f", kernel, [features, at[:2]])
        terms = [f.term(i).at(at) for i in (0, 1)]
        with_features = [L.covariance_with_feature(kernel, features) for L in terms]
        joint = f.joint(ogp.concatenate(terms)).covariance_matrix
        means = f(terms[0]).mean + f(terms[1]).mean - f(at).mean
        known = features.covariance_with_inputs(kernel, at)
        return with_features, known, means, joint, f.joint(at).covariance_matrix

    (first, second), known, difference, joint, whole = both(at)
    np.testing.assert_allclose(first, known, atol=1e-13)
    np.testing.assert_allclose(second, 0)
    np.testing.assert_allclose(difference, 0, atol=1e-10)
    np.testing.assert_allclose(sum(joint[a : a + 4, b : b + 4] for a in (0, 4) for b in (0, 4)), whole, atol=1e-8)


def test_functionals_of_a_term(fitted):
    """Its slope, its average: those of paths too."""
    at, smooth = jnp.asarray(AT), fitted.term("trend")
    slope = jax.vmap(jax.grad(lambda x: smooth(x[None]).mean[0]))(at)[:, 0]
    np.testing.assert_allclose(smooth(ogp.Derivative(at, 0)).mean, slope, atol=1e-8)
    average = smooth(ogp.Average(at.reshape(2, 2, 1)))
    joint = smooth.joint(at)
    np.testing.assert_allclose(average.mean, joint.mean.reshape(2, 2).mean(1), atol=1e-9)
    np.testing.assert_allclose(average.variance[0], joint.covariance_matrix[:2, :2].mean(), atol=1e-7)


def test_paths_fall_into_terms(fitted):
    at = jnp.asarray(AT)

    @jax.jit
    def of_paths(f, at):
        paths = f.sample_paths(jax.random.PRNGKey(1), 400, num_features=8)
        slopes = jax.jacfwd(lambda shift: paths(f.term(0).at(at + shift)))(0.0)
        return (
            [paths(f.term(i).at(at)) for i in range(3)],
            paths(at),
            slopes,
            paths(f.term(0).at(ogp.Derivative(at, 0))),
        )

    parts, whole, slopes, known = of_paths(fitted, at)
    np.testing.assert_allclose(sum(parts), whole, atol=1e-8)
    np.testing.assert_allclose(slopes, known, atol=1e-8)
    for i, part in enumerate(parts):
        m = fitted.term(i)(at)
        np.testing.assert_allclose((part.mean(0) - m.mean) / m.variance**0.5, 0, atol=5 / 400**0.5)
        np.testing.assert_allclose(part.std(0) / m.variance**0.5, 1, atol=0.2)


def test_draws_of_terms_in_one_run_add_up():
    at = jnp.asarray(AT)

    def model():
        f = ogp.gp("f", KERNEL, jnp.asarray(X[::6]))
        whole = f(at).sample()
        numpyro.deterministic("left", whole - sum(f.term(i)(at).sample() for i in range(3)))

    guide = ogp.AutoSparseGP(model)

    @jax.jit
    def run():
        with numpyro.handlers.seed(rng_seed=0):
            of_guide = numpyro.handlers.trace(guide).get_trace()
            return numpyro.handlers.trace(numpyro.handlers.replay(model, of_guide)).get_trace()["left"]["value"]

    np.testing.assert_allclose(run(), 0, atol=1e-3)


def test_a_term_may_be_observed(fitted):
    """A likelihood of one term: its marginals are what it integrates over."""
    m = fitted.term("season")(jnp.asarray(AT))
    y = jnp.array([0.3, 0.1, -0.2, 0.5])
    expected = oracles.expected_log_normal(np.asarray(y), np.asarray(m.mean), np.asarray(m.variance), NOISE**2)
    np.testing.assert_allclose(likelihoods.Gaussian(m, NOISE).log_prob(y), expected, atol=1e-10)


def test_latent_functions_and_float32(rng):
    Z = jnp.asarray(X[::4], jnp.float32)
    kernel = kernels.RBF(jnp.array([[1.0], [0.5]], jnp.float32)).named("a") + 0.5 * kernels.Matern52(jnp.float32(0.4))
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernel, Z)
    at = jnp.asarray(AT, jnp.float32)
    a, b = f.term("a")(at), f.term(1)(at)
    assert a.mean.shape == (4, 2) and a.mean.dtype == jnp.float32 == a.variance.dtype
    np.testing.assert_allclose(a.mean + b.mean, f(at).mean, atol=2e-5)
    assert (a.variance <= 1 + 1e-5).all() and (b.variance <= 0.5 + 1e-5).all()


# ---------------------------------------------------------------- which


def test_names_positions_and_kernels():
    season = kernels.Periodic(1.0, 0.5)
    inner = 0.3 * (season.named("week") + kernels.Linear()).on(0)
    kernel = TREND.named("trend") + inner.named("rest") + 0.1
    assert [s.label for s in summands(kernel)] == ["trend", "week", "rest", "Constant"]
    everything = find_summands(kernel, ["trend", "rest", -1])
    assert everything == find_summands(kernel, [0, 1, 2, 3]) == tuple(s.place for s in summands(kernel))
    assert find_summands(kernel, "rest") == find_summands(kernel, inner) == everything[1:3]
    assert find_summands(kernel, season) == find_summands(kernel, "week") == everything[1:2]
    A, B = jnp.asarray(AT), jnp.asarray(X[:3])
    np.testing.assert_allclose(select(kernel, everything[1:2])(A, B), 0.3 * season(A, B))
    np.testing.assert_allclose(select(kernel, everything[1:])(A), 0.3 * (1 + AT[:, 0] ** 2) + 0.1)
    assert select(kernel, None) is kernel and select(kernel, everything) is not None and select(kernel, ()) is None


def test_names_change_nothing_else():
    plain = TREND + SEASON
    named = TREND.named("trend") + SEASON.named("season")
    at = jnp.asarray(AT)
    np.testing.assert_array_equal(named(at, at), plain(at, at))
    np.testing.assert_array_equal(named(at), plain(at))
    np.testing.assert_array_equal(named.weighted_sum(at, at, jnp.ones(4)), plain.weighted_sum(at, at, jnp.ones(4)))
    psi = [kernels.expectations.psi1(k, at, at, jnp.full((4, 1), 0.1)) for k in (named, plain)]
    np.testing.assert_allclose(*psi, atol=1e-14)


def test_names_of_terms_tell_them_apart(fitted):
    assert term_names(fitted) == ["trend", "season", "Matern32"]
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(1.0) + kernels.RBF(0.1), jnp.asarray(X[:3]))
    assert term_names(f) == ["RBF 0", "RBF 1"]


@pytest.mark.parametrize(
    "which, error, message",
    [
        (
            "tide",
            ValueError,
            "No summand of the kernel is named 'tide'; its summands are 0: trend, 1: season, 2: Matern32",
        ),
        (3, ValueError, "The kernel has 3 summands, 0: trend, 1: season, 2: Matern32; got the position 3"),
        (kernels.RBF(), ValueError, "no part of the function's kernel.*give a name"),
        (1.0, TypeError, "`which` must be the name of a summand, its position or its kernel; got 1.0"),
        ([], ValueError, "at least one summand"),
    ],
)
def test_unknown_terms_say_so(fitted, which, error, message):
    with pytest.raises(error, match=message):
        fitted.term(which)


def test_a_term_of_another_term_says_so(fitted):
    season = fitted.term("season").at(jnp.asarray(AT))
    with pytest.raises(ValueError, match="This functional is of one term of f"):
        fitted.term("trend")(season)
    assert fitted.term([0, 1]).at(season).places == season.places


def test_names_are_words():
    with pytest.raises(ValueError, match="`name` must be a word, such as 'trend'; got ''"):
        kernels.RBF().named("")


# ---------------------------------------------------------------- shares


def test_shares_of_variance(fitted):
    half = jnp.asarray(X[:12])  # over all of X each mean is zero on average
    shares = ogp.variance_shares(fitted, half)
    assert list(shares) == ["trend", "season", "Matern32"]
    np.testing.assert_allclose(sum(shares.values()), 1, rtol=1e-10)
    means = np.stack([fitted.term(i)(half).mean for i in range(3)])
    np.testing.assert_allclose(shares["season"], np.cov(means[1], means.sum(0))[0, 1] / means.sum(0).var(ddof=1))
    with pytest.raises(ValueError, match="two inputs or more"):
        ogp.variance_shares(fitted, jnp.asarray(X[:1]))
    with pytest.raises(ValueError, match=r"the same at all inputs `X`, so it has no variance to share"):
        ogp.variance_shares(fitted, jnp.asarray(X[[0, 0, 0]]))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_variances_of_terms_lie_in_their_bounds(fitted, seed):
    """Never above the prior's; and the sum's lies between what correlations of -1 and 1 would make of those of two parts."""
    at = jnp.asarray(np.random.default_rng(seed).uniform(-4, 4, (4, 1)))
    a, b, whole = (m.variance for m in (fitted.term(0)(at), fitted.term([1, 2])(at), fitted(at)))
    assert (a <= 1.5 + 1e-9).all() and (b <= 0.9 + 1e-9).all()
    assert (whole <= (a**0.5 + b**0.5) ** 2 + 1e-8).all()
    assert (whole >= (a**0.5 - b**0.5) ** 2 - 1e-8).all()
