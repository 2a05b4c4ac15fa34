"""`CollapsedGP` as a distribution: bounds, outputs, masks, blocks, sets, predictions and draws against dense formulas."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp.collapsed import distribution, sums
from numpyro_orthgp.gaussians import FAMILIES, Full, Value
from tests import oracles, problems

slow = pytest.mark.slow
LOWER = ("titsias2009", "artemev2021", "titsias2025")
NOISE, JITTER = 0.35, 0.02
VARIANCE, LENGTHSCALE = 1.3, 0.9  # those of `problems.kernel_oracle`


def collapsed(X, sets, noise=NOISE, *, kernel="matern52", variance=VARIANCE, lengthscale=LENGTHSCALE, **options):
    options = {"jitter": 0.0} | options
    return ogp.CollapsedGP(variance * problems.KERNELS[kernel](lengthscale), X, sets, noise, **options)


def compiled(function, *arrays):
    """The function of arrays, compiled as a whole: operation by operation takes three times as long."""
    return jax.jit(function)(*jax.tree.map(jnp.asarray, arrays))


def log_prob(y, X, sets, noise=NOISE, **options):
    """``log_prob`` with all arrays traced."""
    fixed = {n: v for n, v in options.items() if isinstance(v, str | int | None)}
    arrays = {n: v for n, v in options.items() if n not in fixed}
    return compiled(lambda y, X, sets, noise, a: collapsed(X, sets, noise, **fixed, **a).log_prob(y),
                    y, X, sets, noise, arrays)  # fmt: skip


def setting(rng, sizes, N=30):
    X, y = problems.data(rng, N)
    return X, y, problems.sets(rng, sizes)


def charge_of(bound: str, r, s) -> float:
    """What a bound takes off for residual variances r at noise variances s."""
    ratio = r / s
    return {
        "titsias2009": np.sum(ratio),
        "titsias2025": np.sum(np.log1p(ratio)),
        "artemev2021": len(r) * np.log1p(np.mean(ratio)),
    }[bound] / 2


# ---------------------------------------------------------------- one set, one output


@pytest.mark.parametrize(
    "kernel, per_point",
    [
        ("matern52", False),
        ("matern52", True),
        pytest.param("rbf", True, marks=slow),
        pytest.param("matern12", False, marks=slow),
        pytest.param("matern32", True, marks=slow),
    ],
)
def test_bounds_equal_dense_oracles(rng, kernel, per_point):
    X, y, (Z,) = setting(rng, [6])
    noise = rng.uniform(0.2, 0.6, len(X)) if per_point else np.asarray(NOISE)
    alphas = (1e-6, 0.4, 1.0)

    @jax.jit
    def values(y, X, Z, noise, jitter):
        def value(**options):
            return collapsed(X, Z, noise, kernel=kernel, jitter=jitter, **options).log_prob(y)

        return {b: value(bound=b) for b in oracles.COLLAPSED}, [value(bound="pep", alpha=a) for a in alphas]

    for jitter in (0.0, JITTER):
        ours, pep = values(y, X, Z, noise, jitter)
        args = (problems.kernel_oracle(kernel), X, y, Z, noise**2)
        for bound, oracle in oracles.COLLAPSED.items():
            assert_allclose(ours[bound], oracle(*args, VARIANCE * jitter), rtol=1e-9, err_msg=bound)
        assert_allclose(pep[1:], [oracles.pep(*args, a, VARIANCE * jitter) for a in alphas[1:]], rtol=1e-9)
        assert_allclose(pep[2], ours["fitc"], rtol=1e-12)
        assert_allclose(pep[0], ours["titsias2009"], rtol=1e-4)
        assert abs(pep[1] - ours["fitc"]) > 0.01 and abs(pep[1] - ours["titsias2009"]) > 0.01


def test_titsias2025_and_the_default_jitter_are_what_you_get(rng):
    X, y, (Z,) = setting(rng, [6])
    ours = compiled(lambda y, X, Z: ogp.CollapsedGP(kernels.RBF(0.9), X, Z, NOISE).log_prob(y), y, X, Z)
    assert_allclose(ours, oracles.titsias2025(oracles.rbf(1.0, 0.9), X, y, Z, NOISE**2, 1e-10), rtol=1e-9)


@pytest.mark.parametrize("per_point", [pytest.param(False, marks=slow), True])
def test_upper_bound(rng, per_point):
    X, y, Zs = setting(rng, [5, 4])
    Y = np.stack([y, rng.normal(size=len(y))], 1)
    noise = rng.uniform(0.2, 0.6, len(X)) if per_point else np.asarray(NOISE)
    observed = rng.uniform(size=Y.shape) < 0.7

    def values(Y, X, Zs, noise, observed):
        one, sets, masked = (
            collapsed(X, Zs[0], noise),
            collapsed(X, Zs, noise),
            collapsed(X, Zs, noise, observed=observed),
        )
        return one.upper_bound(Y[:, 0]), sets.upper_bound(Y[:, 0]), sets.upper_bound(Y), masked.upper_bound(Y)

    ours = compiled(values, Y, X, Zs, noise, observed)
    k = problems.kernel_oracle("matern52")

    def expected(Z, d, rows=slice(None)):
        s = np.broadcast_to(noise**2, len(X))[rows]
        return oracles.upper_bound_per_point(k, X[rows], Y[rows, d], Z, s)

    if not per_point:
        assert_allclose(ours[0], oracles.upper_bound(k, X, y, Zs[0], NOISE**2), rtol=1e-9)
    union = np.concatenate(Zs)
    assert_allclose(ours[0], expected(Zs[0], 0), rtol=1e-9)
    assert_allclose(ours[1], expected(union, 0), rtol=1e-9)
    assert_allclose(ours[2], expected(union, 0) + expected(union, 1), rtol=1e-9)
    assert_allclose(ours[3], sum(expected(union, d, observed[:, d]) for d in range(2)), rtol=1e-9)
    assert ours[0] > oracles.exact_log_marginal(k, X, y, noise**2)


# ---------------------------------------------------------------- many outputs, masks, means

D = 3
OWN = {"variance": np.array([1.3, 0.7, 2.0]), "lengthscale": np.array([[0.9], [1.4], [0.6]])}


def outputs(name, rng, N, M):
    """Options of one case, all that may differ between outputs."""
    hole = rng.uniform(size=(N, D)) < 0.7
    return {
        "shared": {},
        "noise (1, D)": {"noise": rng.uniform(0.2, 0.6, (1, D))},
        "noise (N, D)": {"noise": rng.uniform(0.2, 0.6, (N, D))},
        "observed (N,)": {"observed": hole[:, 0], "noise": rng.uniform(0.2, 0.6, N)},
        "observed (N, D)": {"observed": hole, "loc": rng.normal(size=(N, D))},
        "everything (N, D)": {
            "observed": hole, "noise": rng.uniform(0.2, 0.6, (N, D)), "loc": rng.normal(size=(1, D)),
            "points": rng.uniform(-2, 2, (D, M, 2)), **OWN,
        },
        "kernels": {**OWN, "loc": rng.normal(size=N), "noise": rng.uniform(0.2, 0.6, N)},
        "points (D, M, Q)": {"points": rng.uniform(-2, 2, (D, M, 2)), "loc": 0.7},
    }[name]  # fmt: skip


CASES = ["shared", "observed (N, D)", "everything (N, D)"]
CASES += [
    pytest.param(c, marks=slow)
    for c in ("kernels", "noise (1, D)", "noise (N, D)", "observed (N,)", "points (D, M, Q)")
]


class Dense:
    """Every output by itself, on the rows that are observed: hyperparameters, points, noise and mean of each."""

    def __init__(self, X, Y, Z, options):
        N, D = Y.shape
        o = {
            "noise": NOISE,
            "loc": 0.0,
            "observed": True,
            "points": Z,
            "variance": VARIANCE,
            "lengthscale": LENGTHSCALE,
        }
        o |= options

        def columns(x):
            x = np.asarray(x)
            return np.broadcast_to(x[:, None] if x.ndim == 1 else x, (N, D))

        self.parts = []
        for d in range(D):
            rows = columns(o["observed"])[:, d]
            kernel = oracles.matern52(
                np.broadcast_to(o["variance"], D)[d], np.broadcast_to(o["lengthscale"], (D, 1))[d, 0]
            )
            y = (Y - columns(o["loc"]))[rows, d]
            self.parts.append(
                (kernel, X[rows], y, np.broadcast_to(o["points"], (D, *Z.shape))[d], columns(o["noise"])[rows, d] ** 2)
            )

    def value(self, bound):
        return sum(oracles.COLLAPSED[bound](*part) for part in self.parts)


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_the_sum_of_single_ones(rng, case):
    N, M, bounds = 17, 5, ("titsias2025", "artemev2021", "conditional", "fitc")
    X, Z = problems.data(rng, N)[0], problems.sets(rng, [M])[0]
    Y = np.sin(X @ rng.normal(size=(2, D))) + 0.3 * rng.normal(size=(N, D))
    options = outputs(case, rng, N, M)
    dense = Dense(X, Y, Z, options)
    seen = options.get("observed")
    if seen is not None:
        Y = np.where(seen if seen.ndim == 2 else seen[:, None], Y, np.nan)
    options = {"points": Z, "noise": NOISE, **options}

    def values(Y, X, o):
        o = dict(o)
        gps = [collapsed(X, o["points"], o["noise"], bound=b, **{n: v for n, v in o.items() if n not in ("points", "noise")})
               for b in bounds]  # fmt: skip
        f = gps[0].posterior(Y)
        return [gp.log_prob(Y) for gp in gps], f(X[:7] + 0.1), f.joint(X[:3])

    ours, marginals, joint = compiled(values, Y, X, options)
    assert_allclose(ours, [dense.value(b) for b in bounds], rtol=1e-9)
    assert marginals.mean.shape == marginals.variance.shape == (7, D)
    for d, (k, *part) in enumerate(dense.parts):
        sets = [oracles.WhitenedSet(part[2], *oracles.optimal_q(k, *part, whitened=True))]
        mean, cov = oracles.q_f(k, sets, X[:7] + 0.1)
        assert_allclose(marginals.mean[:, d], mean, rtol=1e-8, atol=1e-9)
        assert_allclose(marginals.variance[:, d], np.diag(cov), rtol=1e-8, atol=1e-9)
        mean, cov = oracles.q_f(k, sets, X[:3])
        assert_allclose(joint.mean[d], mean, rtol=1e-8, atol=1e-9)
        assert_allclose(joint.covariance_matrix[d], cov, rtol=1e-7, atol=1e-9)


def test_one_output_with_a_mean_and_missing_values(rng):
    X, y, (Z,) = setting(rng, [5], N=17)
    loc, observed = rng.normal(size=17), rng.uniform(size=17) < 0.6
    holes = np.where(observed, y, np.nan)

    def values(y, holes, X, Z, loc, observed):
        gp = collapsed(X, Z, loc=loc, observed=observed)
        bounds = [collapsed(X, Z, loc=loc, observed=observed, bound=b).log_prob(holes) for b in oracles.COLLAPSED]
        gradient = jax.grad(lambda X: collapsed(X, Z, observed=observed).log_prob(holes))(X)
        return collapsed(X, Z, loc=2.0).log_prob(y), bounds, gp.posterior(holes)(X), gradient

    shifted, bounds, f, gradient = compiled(values, y, holes, X, Z, loc, observed)
    k = problems.kernel_oracle("matern52")
    assert_allclose(shifted, oracles.titsias2025(k, X, y - 2.0, Z, NOISE**2), rtol=1e-9)
    rows = (k, X[observed], (y - loc)[observed], Z, NOISE**2)
    assert_allclose(bounds, [oracle(*rows) for oracle in oracles.COLLAPSED.values()], rtol=1e-9)
    mean, cov = oracles.q_f(k, [oracles.WhitenedSet(Z, *oracles.optimal_q(*rows, whitened=True))], X)
    assert f.mean.shape == (17,)
    assert_allclose(f.mean, mean, rtol=1e-9, atol=1e-11)
    assert_allclose(f.variance, np.diag(cov), rtol=1e-9, atol=1e-11)
    assert np.isfinite(gradient).all() and (gradient[~observed] == 0).all() and (gradient[observed] != 0).all()


# ---------------------------------------------------------------- blocks of rows


@pytest.mark.parametrize(
    "case", ["masked outputs", *(pytest.param(c, marks=slow) for c in ("one output", "two sets", "given set"))]
)
def test_blocks_change_neither_value_nor_gradient(rng, case):
    N = 23
    X, y, Zs = setting(rng, [4, 3], N)
    inputs = {"X": X, "y": y, "Z": Zs[0], "lengthscale": LENGTHSCALE, "noise": np.asarray(NOISE)}
    options = {"bound": "artemev2021"}
    if case == "one output":
        options = {"bound": "fitc"}
    if case == "masked outputs":
        inputs |= {"y": rng.normal(size=(N, 2)), "noise": rng.uniform(0.2, 0.6, (1, 2))}
        options |= {"observed": jnp.asarray(rng.uniform(size=(N, 2)) < 0.7)}
    m, T = problems.random_q(rng, 3)
    inputs["q"] = {"loc": m, "scale": T}

    def value(inputs, block_size):
        sets = inputs["Z"] if case in ("one output", "masked outputs") else [inputs["Z"], jnp.asarray(Zs[1])]
        given = (Full(inputs["q"]["loc"], inputs["q"]["scale"]),) if case == "given set" else None
        return collapsed(
            inputs["X"], sets, inputs["noise"], lengthscale=inputs["lengthscale"], block_size=block_size, orthogonal=given,
            **options,
        ).log_prob(inputs["y"])  # fmt: skip

    def all_sizes(inputs):
        return [jax.value_and_grad(value)(inputs, size) for size in (None, 5, 1)]

    whole, *blocked = compiled(all_sizes, inputs)
    for one in blocked:
        jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-9, atol=1e-10), whole, one)


def test_blocks_of_kernels_that_know_no_zero(rng):
    """The last block is padded; a kernel of the logarithm of inputs must not see zeros there."""
    X, y, (Z,) = setting(rng, [4], 11)
    X, Z = np.exp(X), np.exp(Z)

    def value(Z, lengthscale, block_size):
        base = kernels.RBF(lengthscale)

        def kernel(A, B=None):
            return base(jnp.log(A)) if B is None else base(jnp.log(A), jnp.log(B))

        return ogp.CollapsedGP(kernel, X, Z, NOISE, block_size=block_size).log_prob(y)

    def both(Z, lengthscale):
        return [jax.value_and_grad(value, (0, 1))(Z, lengthscale, size) for size in (None, 4)]

    whole, blocked = compiled(both, Z, 0.9)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-8, atol=1e-10), blocked, whole)


def test_large_problems_are_cut_into_blocks(rng, monkeypatch):
    X, y, (Z,) = setting(rng, [4], 23)
    Y = rng.normal(size=(23, 2))

    def length(y, **options):
        """Number of blocks: the length of the only scan."""
        jaxpr = jax.make_jaxpr(lambda y, X: collapsed(X, Z, **options).log_prob(y))(jnp.asarray(y), jnp.asarray(X))
        return [e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"]

    assert length(y) == []
    assert length(y, block_size=23) == [] and length(y, block_size=5) == [5]
    expected = log_prob(y, X, Z)
    monkeypatch.setattr(distribution, "MAX_ENTRIES", 23 * 4)
    assert length(y) == []
    assert length(Y, noise=jnp.ones((1, 2))) == [
        12
    ]  # outputs with covariances of their own: 92 // (4 * 8) = 2 rows at once
    monkeypatch.setattr(distribution, "MAX_ENTRIES", 23 * 4 - 1)
    assert length(y) == [5]  # 91 // (4 * 4) = 5 rows at once
    assert_allclose(log_prob(y, X, Z), expected, rtol=1e-10)


def test_projections_of_few_rows_are_kept_for_the_gradient(rng, monkeypatch):
    """In blocks: fewer products backward, and the same numbers, as where each block is computed again."""
    X, y, sets = setting(rng, [4, 3], 23)

    def value(sets):
        bound = ogp.CollapsedGP(kernels.Matern32(0.9), jnp.asarray(X), sets, NOISE, block_size=5, bound="titsias2025")
        return bound.log_prob(y)

    def program():
        return jax.jit(lambda sets: jax.grad(value)(sets)).trace([jnp.asarray(Z) for Z in sets])

    kept = program()
    monkeypatch.setattr(sums, "MAX_KEPT", 23 * 7)
    assert str(program().jaxpr) == str(kept.jaxpr)
    monkeypatch.setattr(sums, "MAX_KEPT", 23 * 7 - 1)
    again = program()
    of_blocks = "f64[4,5] = dot_general"
    assert 0 < str(kept.jaxpr).count(of_blocks) < str(again.jaxpr).count(of_blocks)
    arguments = [jnp.asarray(Z) for Z in sets]
    values = [trace.lower().compile()(arguments) for trace in (kept, again)]
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-10, atol=1e-12), *values)


# ---------------------------------------------------------------- several sets, at the best q or a given one


def mean_field_optimum(k, X, y, sets, s, jitter=0.0):
    """Bound of independent Gaussians, one for each set, at their best: dense, from the covariance of all sets."""
    sizes = [len(Z) for Z in sets]
    Z, K, _, _ = oracles.union(k, [oracles.WhitenedSet(Z, np.zeros(len(Z)), np.eye(len(Z))) for Z in sets], jitter)
    A = np.linalg.inv(np.linalg.cholesky(K)) @ k(Z, X)
    s = oracles.noise_vector(s, len(X))
    Lambda, b = np.eye(len(Z)) + A @ np.diag(1 / s) @ A.T, A @ (y / s)
    ends = np.cumsum([0, *sizes])
    logdet = sum(np.linalg.slogdet(Lambda[i:j, i:j])[1] for i, j in pairwise(ends))
    r = np.diag(k(X, X)) - np.sum(A**2, 0)
    fit = -0.5 * (
        len(X) * np.log(2 * np.pi) + np.sum(np.log(s)) + np.sum(y**2 / s) + logdet - b @ np.linalg.solve(Lambda, b)
    )
    best = [oracles.WhitenedSet(Z, np.linalg.solve(Lambda, b)[i:j], np.linalg.inv(Lambda[i:j, i:j]))
            for Z, (i, j) in zip(sets, pairwise(ends), strict=True)]  # fmt: skip
    return float(fit), r, best


@pytest.mark.parametrize("sizes", [[5, 4], [4, 3, 5]], ids=str)
def test_several_sets_at_their_best(rng, sizes):
    X, y, Zs = setting(rng, sizes)
    noise = rng.uniform(0.2, 0.6, len(X))
    k, Xs = problems.kernel_oracle("matern52"), rng.uniform(-3, 3, (6, 2))

    @jax.jit
    def values(y, X, Zs, noise, jitter):
        gps = {b: collapsed(X, Zs, noise, bound=b, jitter=jitter) for b in LOWER}
        ends = [collapsed(X, Z, noise, bound="titsias2009", jitter=jitter) for Z in (Zs[0], jnp.concatenate(Zs))]
        f = gps["titsias2025"].posterior(y)
        return (
            {b: gp.log_prob(y) for b, gp in gps.items()},
            [gp.log_prob(y) for gp in ends],
            f.beliefs,
            f(Xs),
            f.joint(Xs),
        )

    for jitter in (0.0, JITTER):
        ours, (one, union), beliefs, marginals, joint = values(y, X, Zs, noise, jitter)
        fit, r, best = mean_field_optimum(k, X, y, Zs, noise**2, VARIANCE * jitter)
        for bound in LOWER:
            assert_allclose(ours[bound], fit - charge_of(bound, r, noise**2), rtol=1e-9)
        assert one <= ours["titsias2009"] <= union
        for q, expected in zip(beliefs, best, strict=True):
            assert_allclose(q.loc, expected.loc, rtol=1e-8, atol=1e-10)
            assert_allclose(q.scale_tril @ q.scale_tril.T, expected.cov, rtol=1e-8, atol=1e-10)
            assert (np.triu(q.scale_tril, 1) == 0).all() and (np.diag(q.scale_tril) > 0).all()
        mean, cov = oracles.q_f(k, best, Xs, VARIANCE * jitter)
        assert_allclose(marginals.mean, mean, rtol=1e-8, atol=1e-10)
        assert_allclose(marginals.variance, np.diag(cov), rtol=1e-8, atol=1e-10)
        assert_allclose(joint.covariance_matrix, cov, rtol=1e-7, atol=1e-9)
        assert_allclose(
            oracles.elbo_gaussian(k, best, X, y, noise**2, VARIANCE * jitter), ours["titsias2009"], rtol=1e-9
        )
        if len(sizes) > 2:
            continue
        args, jitters = (k, X, y, *Zs, noise**2), (VARIANCE * jitter, VARIANCE * jitter)
        m_v, S_v = oracles.solvegp_optimal_qv(*args, jitters)
        assert_allclose(ours["titsias2009"], oracles.solvegp_collapsed(*args, m_v, S_v, jitters), rtol=1e-9)
        for _ in range(3):
            T = np.linalg.cholesky(S_v) @ (np.eye(4) + 1e-2 * rng.normal(size=(4, 4)))
            other = oracles.solvegp_collapsed(*args, m_v + 1e-2 * rng.normal(size=4), T @ T.T, jitters)
            assert other < ours["titsias2009"]


def orthogonal_factor(k, Z, O, jitter=0.0):
    return np.linalg.cholesky(oracles.orthogonal_process(k, Z, jitter)(O, O) + jitter * np.eye(len(O)))


@pytest.mark.parametrize("covariance", ["full", *(pytest.param(c, marks=slow) for c in ("diagonal", "prior", "value"))])
def test_given_set(rng, covariance):
    """Eq. 21 of Shi et al. 2020 but for the divergence, which is the site's; Eq. 22; and a value of v, as NUTS gives."""
    X, y, (Z, O) = setting(rng, [5, 4])
    noise, k, jitter = rng.uniform(0.2, 0.6, len(X)), problems.kernel_oracle("matern52"), JITTER * VARIANCE
    m, T = problems.random_q(rng, 4)
    T = {"full": T, "diagonal": np.diag(np.diag(T)), "prior": np.eye(4), "value": np.zeros((4, 4))}[covariance]
    scale = {"full": T, "diagonal": np.diag(T)}.get(covariance)
    bounds = (*LOWER, "conditional")

    def values(y, X, sets, noise, m, scale):
        q = ((Value if covariance == "value" else FAMILIES[covariance])(m, *([] if scale is None else [scale])),)
        gps = [collapsed(X, sets, noise, bound=b, orthogonal=q, jitter=JITTER) for b in bounds]
        f = gps[0].posterior(y)
        return [gp.log_prob(y) for gp in gps], f(X), gps[0].upper_bound(y)

    ours, f, upper = compiled(values, y, X, [Z, O], noise, m, scale)
    L, jitters, s = orthogonal_factor(k, Z, O, jitter), (jitter, jitter), noise**2
    m_v, S_v = L @ m, L @ T @ T.T @ L.T
    kl = 0.0 if covariance == "value" else oracles.kl_normal(m, T @ T.T, np.zeros(4), np.eye(4))
    sets = [oracles.WhitenedSet(P, np.zeros(len(P)), np.eye(len(P))) for P in (Z, O)]
    r = np.diag(oracles.residual_covariance(k, sets, X, jitters))
    G = oracles.orthogonal_process(k, Z, jitter)(X, O) @ np.linalg.inv(L @ L.T)
    A = oracles.nystrom(k, X, Z, jitter)[0] + np.diag(s)
    S_perp = oracles.residual_covariance(k, sets, X, jitters) + G @ S_v @ G.T
    explained = np.diag(G @ S_v @ G.T)
    fit = oracles.log_normal(y, G @ m_v, A)
    for value, bound in zip(ours, bounds, strict=True):
        if bound == "conditional":
            expected = fit - 0.5 * np.trace(np.linalg.inv(A) @ S_perp)
        else:
            expected = fit - 0.5 * np.sum(explained / s) - charge_of(bound, r, s)
        assert_allclose(value, expected, rtol=1e-9, err_msg=bound)
    if covariance != "value":
        both = [oracles.solvegp_collapsed(k, X, y, Z, O, s, m_v, S_v, jitters, conditional=c) for c in (False, True)]
        assert_allclose([ours[0] - kl, ours[3] - kl], both, rtol=1e-9)
    if covariance == "prior":
        expected = oracles.solvegp_collapsed_prior_covariance(k, X, y, Z, O, s, m_v, jitters)
        assert_allclose(ours[0] - kl, expected, rtol=1e-9)
    q_u = oracles.whiten(
        *oracles.solvegp_optimal_qu(k, X, y, Z, O, s, m_v, jitters), oracles.prior_inducing(k, Z, jitter)
    )
    mean, cov = oracles.q_f(k, [oracles.WhitenedSet(Z, *q_u), oracles.WhitenedSet(O, m, T @ T.T)], X, jitters)
    assert_allclose(f.mean, mean, rtol=1e-8, atol=1e-10)
    assert_allclose(f.variance, np.diag(cov), rtol=1e-8, atol=1e-10)
    assert upper > oracles.exact_log_marginal(k, X, y, s)


def test_given_sets_of_many_outputs(rng):
    """Two given sets; a q for each output; holes. And a q that all outputs of a kernel of their own share."""
    N, sizes = 19, [4, 3, 3]
    X, _, Zs = setting(rng, sizes, N)
    Y, observed = rng.normal(size=(N, D)), rng.uniform(size=(N, D)) < 0.7
    qs = [[problems.random_q(rng, M) for _ in range(D)] for M in sizes[1:]]
    given = [(np.stack([m for m, _ in q]), np.stack([T for _, T in q])) for q in qs]

    def values(Y, X, Zs, given, observed):
        q = tuple(Full(m, T) for m, T in given)
        whole, holes = (collapsed(X, Zs, orthogonal=q, observed=o) for o in (None, observed))
        return whole.log_prob(Y), holes.log_prob(Y), holes.posterior(Y)(X), whole.posterior(Y)(X)

    whole, holes, f, g = compiled(values, Y, X, Zs, given, observed)
    k = problems.kernel_oracle("matern52")

    def dense(d, rows):
        x, y = X[rows], Y[rows, d]
        sets = [oracles.WhitenedSet(Zs[0], np.zeros(4), np.zeros((4, 4)))]
        sets += [oracles.WhitenedSet(Z, q[d][0], q[d][1] @ q[d][1].T) for Z, q in zip(Zs[1:], qs, strict=True)]
        mean, cov = oracles.q_f(k, sets, x)  # with u at zero for certain: all but what q(u) would add
        r = np.diag(oracles.residual_covariance(k, sets, x))
        fit = oracles.dtc(k, x, y - mean, Zs[0], NOISE**2)
        value = fit - 0.5 * np.sum((np.diag(cov) - r) / NOISE**2) - charge_of("titsias2025", r, NOISE**2)
        sets[0] = oracles.WhitenedSet(Zs[0], *oracles.optimal_q(k, x, y - mean, Zs[0], NOISE**2, whitened=True))
        return value, *oracles.q_f(k, sets, X)

    assert_allclose(whole, sum(dense(d, slice(None))[0] for d in range(D)), rtol=1e-9)
    assert_allclose(holes, sum(dense(d, observed[:, d])[0] for d in range(D)), rtol=1e-9)
    for d in range(D):
        for marginals, rows in ((f, observed[:, d]), (g, slice(None))):
            _, mean, cov = dense(d, rows)
            assert_allclose(marginals.mean[:, d], mean, rtol=1e-8, atol=1e-10)
            assert_allclose(marginals.variance[:, d], np.diag(cov), rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------- order


@jax.jit
def _all_bounds(y, X, Z, O, noise, lengthscale):
    def value(bound, sets, **options):
        return collapsed(X, sets, noise, bound=bound, lengthscale=lengthscale, jitter=None, **options).log_prob(y)

    at_data = [value(b, X) for b in (*LOWER, "conditional", "fitc", "dtc")]
    ours = {b: value(b, Z) for b in (*LOWER, "conditional")}
    ours |= {"sets": value("titsias2009", [Z, O]), "union": value("titsias2009", jnp.concatenate([Z, O]))}
    return ours | {"upper": collapsed(X, Z, noise, lengthscale=lengthscale).upper_bound(y)}, at_data


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    log_noise=st.floats(-2.5, 1),
    log_lengthscale=st.floats(-1.5, 1.5),
    spread=st.floats(0, 2),
)
def test_order_of_the_bounds(seed, log_noise, log_lengthscale, spread):
    rng = np.random.default_rng(seed)
    X, y, (Z, O) = setting(rng, [4, 3], N=12)
    noise, lengthscale = np.exp(log_noise + spread * rng.uniform(-1, 1, 12)), np.exp(log_lengthscale)
    ours, at_data = _all_bounds(y, X, Z, O, noise, lengthscale)
    exact = oracles.exact_log_marginal(problems.kernel_oracle("matern52", lengthscale=lengthscale), X, y, noise**2)
    slack = 1e-8 * (1 + abs(exact))
    for order in (
        ("titsias2009", "artemev2021", "titsias2025"), ("titsias2009", "conditional"), ("titsias2009", "sets", "union"),
    ):  # fmt: skip
        values = [ours[name] for name in order] + [exact, ours["upper"]]
        assert (np.diff(values) >= -slack).all(), (order, values)
    assert_allclose(at_data, exact, rtol=1e-6, atol=1e-6)  # but for the jitter


# ---------------------------------------------------------------- predictions


def test_predictions_of_one_set(rng):
    """The same q under all lower bounds, that of the inflated noise under FITC and PEP, the exact GP for Z = X."""
    X, y, (Z,) = setting(rng, [6])
    noise, Xs, k = rng.uniform(0.2, 0.6, len(X)), rng.uniform(-3, 3, (5, 2)), problems.kernel_oracle("matern52")
    bounds = (*LOWER, "conditional", "dtc", "fitc", "pep")

    def values(y, X, Z, noise):
        fs = [collapsed(X, Z, noise, bound=b, alpha=0.4 if b == "pep" else None).posterior(y) for b in bounds]
        exact = collapsed(X, X, noise).posterior(y)
        return [(f(Xs), f.joint(Xs)) for f in (*fs[-2:], exact)], [f(Xs) for f in fs]

    (fitc, pep, exact), found = compiled(values, y, X, Z, noise)
    inflated = oracles.fitc_noise(k, X, Z, noise**2) - noise**2
    joints = dict(zip(bounds[-2:], (fitc[1], pep[1]), strict=True))
    for marginals, bound in zip(found, bounds, strict=True):
        s = noise**2 + {"fitc": 1.0, "pep": 0.4}.get(bound, 0.0) * inflated
        mean, cov = oracles.q_f(k, [oracles.WhitenedSet(Z, *oracles.optimal_q(k, X, y, Z, s, whitened=True))], Xs)
        assert_allclose(marginals.mean, mean, rtol=1e-9, atol=1e-11, err_msg=bound)
        assert_allclose(marginals.variance, np.diag(cov), rtol=1e-9, atol=1e-11, err_msg=bound)
        if bound in joints:
            assert_allclose(joints[bound].mean, mean, rtol=1e-9, atol=1e-11)
            assert_allclose(joints[bound].covariance_matrix, cov, rtol=1e-8, atol=1e-9)
    mean, cov = oracles.exact_predict(k, X, y, noise**2, Xs)
    assert_allclose(exact[0].mean, mean, rtol=1e-8, atol=1e-10)
    assert_allclose(exact[0].variance, np.diag(cov), rtol=1e-7, atol=1e-9)
    assert_allclose(exact[1].covariance_matrix, cov, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "sizes, bound, residual",
    [
        ([5, 4], "titsias2025", "tight"),
        pytest.param([6], "titsias2009", "prior", marks=slow),
        pytest.param([6], "titsias2025", "tight", marks=slow),
        pytest.param([5, 4], "titsias2009", "prior", marks=slow),
    ],
)
def test_elbo_at_the_best_q_is_the_collapsed_bound(rng, sizes, bound, residual):
    X, y, Zs = setting(rng, sizes)

    def values(y, X, Zs):
        gp = collapsed(X, Zs, bound=bound)
        return gp.log_prob(y), gp.posterior(y).beliefs

    value, beliefs = compiled(values, y, X, Zs)
    params = {"f_residual_scale": jnp.asarray(1.0)} if residual == "tight" else {}
    for i, q in enumerate(beliefs):
        params |= {f"f.u{i}_loc": q.loc, f"f.u{i}_scale_tril": q.scale_tril}
    args = (params, jnp.asarray(X), jnp.asarray(y))
    loss = problems.loss(*args, inducing=Zs, likelihood=problems.gaussian(NOISE), residual=residual)
    assert_allclose(-loss, value, rtol=1e-9)


@pytest.mark.parametrize("column", [False, True], ids=["y (N,)", "y (N, 1)"])
@pytest.mark.parametrize("axis", ["q", "kernel"])
def test_functions_of_one_output_with_a_leading_axis(rng, axis, column):
    """One output may be written (N,) or (N, 1), and its kernel or q with a leading axis of one."""
    X, y, (Z, O) = setting(rng, [4, 3], 9)
    m, T = problems.random_q(rng, 3)

    def values(y, X, Z, O, m, T):
        plain = collapsed(X, [Z, O], orthogonal=(Full(m, T),))
        if axis == "q":
            other = collapsed(X, [Z, O], orthogonal=(Full(m[None], T[None]),))
        else:
            other = collapsed(X, [Z, O], lengthscale=jnp.full((1, 1), LENGTHSCALE), orthogonal=(Full(m, T),))
        outputs = y[:, None] if column else y
        return [(gp.log_prob(v), gp.posterior(v)(X)) for gp, v in ((plain, y), (other, outputs))]

    (value, f), (other, g) = compiled(values, y, X, Z, O, m, T)
    assert_allclose(other, value, rtol=1e-10)
    assert g.mean.shape == (9, 1)  # as gp() has it
    assert_allclose(np.ravel(g.mean), f.mean, rtol=1e-9, atol=1e-11)
    assert_allclose(np.ravel(g.variance), f.variance, rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------- gradients, float32, edges


@pytest.mark.parametrize(
    "bounds",
    [
        ("titsias2025", "artemev2021", "given set"),
        pytest.param(("titsias2009", "fitc", "dtc", "pep"), marks=slow),
        pytest.param(("conditional", "two sets", "upper"), marks=slow),
    ],
    ids=", ".join,
)
def test_gradients_against_finite_differences(rng, bounds):
    X, y, (Z, O) = setting(rng, [4, 3], N=12)
    m, T = problems.random_q(rng, 3)
    inputs = {
        "Z": Z,
        "O": O,
        "noise": np.asarray(NOISE),
        "lengthscale": np.array([0.9, 1.2]),
        "X": X,
        "y": y,
        "m": m,
        "T": T,
    }

    def values(i):
        def value(bound):
            common = {"lengthscale": i["lengthscale"]}
            if bound == "upper":
                return collapsed(i["X"], i["Z"], i["noise"], **common).upper_bound(i["y"])
            if bound in ("two sets", "given set"):
                given = (Full(i["m"], i["T"]),) if bound == "given set" else None
                return collapsed(i["X"], [i["Z"], i["O"]], i["noise"], orthogonal=given, **common).log_prob(i["y"])
            common |= {"bound": bound, "alpha": 0.4 if bound == "pep" else None}
            return collapsed(i["X"], i["Z"], i["noise"], **common).log_prob(i["y"])

        return jnp.stack([value(b) for b in bounds])

    inputs = jax.tree.map(jnp.asarray, inputs)
    gradient = jax.jit(jax.jacrev(values))(inputs)
    values = jax.jit(values)
    for _ in range(3):
        step = {n: rng.normal(size=x.shape) for n, x in inputs.items()}
        step["T"] = np.tril(step["T"])
        above, below = (values({n: x + e * step[n] for n, x in inputs.items()}) for e in (1e-5, -1e-5))
        along = sum(np.tensordot(gradient[n], step[n], step[n].ndim) for n in inputs)
        assert_allclose(along, (above - below) / 2e-5, rtol=1e-6)


def single(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32) if np.asarray(x).dtype == float else jnp.asarray(x), tree)


VARIANTS = [{"bound": b} for b in (*LOWER, "conditional", "fitc", "dtc")] + [{"block_size": 7}]


@pytest.mark.parametrize("outputs", [False, pytest.param(True, marks=slow)], ids=["one output", "masked outputs"])
def test_float32(rng, outputs):
    X, y, Zs = setting(rng, [5, 4])
    options = {}
    if outputs:
        y, options = rng.normal(size=(30, 2)), {"observed": rng.uniform(size=(30, 2)) < 0.8}

    def everything(y, X, Zs, options):
        gps = [collapsed(X, Zs[0], **v, **options, jitter=None) for v in VARIANTS]
        gps.append(collapsed(X, Zs, **options, jitter=None))
        return [(gp.log_prob(y), gp.upper_bound(y), gp.posterior(y).beliefs, gp.posterior(y)(X).variance) for gp in gps]

    shapes = jax.eval_shape(everything, *single((y, X, Zs, options)))
    assert {a.dtype for a in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}

    def values(y, X, Zs, options):
        gps = [collapsed(X, Zs, bound="artemev2021", block_size=7, **options, jitter=None)]
        gps.append(collapsed(X, Zs[0], bound="conditional", **options, jitter=None))
        f = gps[0].posterior(y)(X)
        return [gp.log_prob(y) for gp in gps], f.mean, f.variance

    exact = compiled(values, y, X, Zs, options)
    ours = compiled(values, *single((y, X, Zs, options)))
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-3), ours, exact)


EDGES = ["little noise", "O in Z"]
EDGES += [
    pytest.param(c, marks=slow)
    for c in ("a point twice", "one point", "more inducing points than data", "all data twice, little noise")
]


@pytest.mark.parametrize("case", EDGES)
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=slow)])
def test_edges_have_finite_values_and_gradients(rng, dtype, case):
    X, y, (Z, O, many) = setting(rng, [4, 3, 40], N=15)
    args = {
        "one point": (X[:1], y[:1], Z, 0.3),
        "more inducing points than data": (X, y, many, 0.3),
        "a point twice": (X, y, np.concatenate([Z, Z[:2]]), 0.3),
        "O in Z": (X, y, [Z, np.concatenate([Z[:2], O])], 0.3),
        "all data twice, little noise": (np.concatenate([X, X]), np.concatenate([y, y]), X, 1e-3),
        "little noise": (X, y, Z, 1e-3),
    }[case]

    def value(X, y, sets, noise):
        return collapsed(X, sets, noise, jitter=None).log_prob(y)

    args = jax.tree.map(lambda x: jnp.asarray(x, dtype), args)
    found = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2, 3)))(*args)
    assert all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(found))


# ---------------------------------------------------------------- a distribution


def test_draws_have_the_exact_prior(rng):
    """Whatever the inducing points: shapes, mean and covariance of (N,), and of (N, D) with own kernels and noise."""
    X, _, (Z,) = setting(rng, [2], 4)
    loc, noise, n = rng.normal(size=4), rng.uniform(0.2, 0.6, 4), 5_000
    locs, noises = rng.normal(size=(4, D)), rng.uniform(0.2, 0.6, (1, D))
    own = {name: jnp.asarray(x) for name, x in OWN.items()}

    def gps():
        one, many = collapsed(X, Z, noise, loc=loc), collapsed(X, Z, noises, loc=locs, **own)
        return one, many, collapsed(X, Z, noise, num_outputs=2)

    for shape in ((), (2, 5)):
        few = jax.eval_shape(lambda key: [gp.sample(key, shape) for gp in gps()], jax.random.PRNGKey(0))  # noqa: B023
        assert [a.shape for a in few] == [(*shape, 4), (*shape, 4, D), (*shape, 4, 2)]
    draws, moments = jax.jit(
        lambda key: ([gp.sample(key, (n,)) for gp in gps()], [(gp.mean, gp.variance) for gp in gps()])
    )(jax.random.PRNGKey(0))  # fmt: skip

    def check(draws, mean, covariance, moments):
        centred = np.asarray(draws) - mean
        deviation = np.sqrt(np.diag(covariance))
        assert (abs(centred.mean(0)) < 4 * deviation / np.sqrt(n)).all()
        error = np.sqrt((np.outer(deviation**2, deviation**2) + covariance**2) / n)
        assert (abs(centred.T @ centred / n - covariance) < 4 * error).all()
        assert_allclose(moments[0], mean, rtol=1e-12)
        assert_allclose(moments[1], np.diag(covariance), rtol=1e-12)

    k = problems.kernel_oracle("matern52")
    check(draws[0], loc, k(X, X) + np.diag(noise**2), moments[0])
    for d in range(D):
        kernel = oracles.matern52(OWN["variance"][d], OWN["lengthscale"][d, 0])
        covariance = kernel(X, X) + noises[0, d] ** 2 * np.eye(4)
        check(draws[1][..., d], locs[:, d], covariance, [a[:, d] for a in moments[1]])
    for d in range(2):
        check(draws[2][..., d], np.zeros(4), k(X, X) + np.diag(noise**2), [a[:, d] for a in moments[2]])
    correlation = np.mean(draws[2][:, 0, 0] * draws[2][:, 0, 1]) / (k(X, X)[0, 0] + noise[0] ** 2)
    assert abs(correlation) < 4 / np.sqrt(n)


def test_one_density_outside_of_plates(rng):
    X, _, (Z,) = setting(rng, [2], 4)
    gp = collapsed(X, Z)
    assert gp.expand(()) is gp and gp.batch_shape == () and gp.event_shape == (4,)
    assert gp.support.event_dim == 1 and collapsed(X, Z, num_outputs=2).support.event_dim == 2
    with pytest.raises(ValueError, match=r"one joint density.*outside of plates.*minibatches use gp\(\.\.\.\)"):
        gp.expand((3,))
    with (
        numpyro.handlers.seed(rng_seed=0), numpyro.plate("data", 4),
        pytest.raises(ValueError, match="outside of plates"),
    ):  # fmt: skip
        numpyro.sample("y", gp, obs=jnp.zeros(4))


def test_it_is_a_pytree(rng):
    """It crosses the border of ``jit`` and is mapped over hyperparameters."""
    X, y, (Z, O) = setting(rng, [4, 3], 9)
    y, lengthscales = jnp.asarray(y), jnp.asarray([0.6, 0.9, 1.4])

    def make(lengthscale):
        return collapsed(jnp.asarray(X), [jnp.asarray(Z), jnp.asarray(O)], lengthscale=lengthscale, block_size=4)

    gps = jax.jit(jax.vmap(make))(lengthscales)
    assert isinstance(gps, ogp.CollapsedGP) and (gps.bound, gps.block_size) == ("titsias2025", 4)
    mapped = jax.jit(jax.vmap(lambda gp: gp.log_prob(y)))(gps)
    for value, lengthscale in zip(mapped, lengthscales, strict=True):
        expected, r, _ = mean_field_optimum(
            oracles.matern52(VARIANCE, float(lengthscale)), X, np.asarray(y), [Z, O], NOISE**2
        )
        assert_allclose(value, expected - charge_of("titsias2025", r, NOISE**2), rtol=1e-9)
    leaves, treedef = jax.tree.flatten(make(0.9))
    again = jax.tree.unflatten(treedef, leaves)
    assert again.event_shape == (9,) and jax.tree.structure(again) == treedef


# ---------------------------------------------------------------- what it refuses

x, z = jnp.linspace(-1, 1, 12).reshape(6, 2), jnp.linspace(-1, 1, 6).reshape(3, 2)
flat = jnp.zeros(6)
q_of_three = Value(jnp.zeros(3))
nan = jnp.full(6, jnp.nan)
latent = ogp.LatentInputs(x, x, jnp.ones_like(x))
many = jnp.zeros((5001, 2))


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"bound": "titsias"}, ValueError, r"Unknown `bound` 'titsias'; known are 'titsias2009', 'titsias2025'.*'pep'"),
        ({"bound": "pep"}, ValueError, r"`alpha` belongs to bound='pep', which needs it; got bound='pep' and alpha=None"),
        ({"alpha": 0.5}, ValueError, r"`alpha` belongs to bound='pep'.*bound='titsias2025' and alpha=0.5"),
        ({"bound": "pep", "alpha": 0.0}, ValueError, r"`alpha` must be in \(0, 1\].*got 0.0"),
        ({"bound": "pep", "alpha": 1.5}, ValueError, r"in \(0, 1\].*got 1.5"),
        ({"X": many, "bound": "conditional"}, ValueError, r"N x N matrices.*at most N = 5000; got 5001. Use 'titsias2025'"),
        ({"inducing": [z, z], "bound": "fitc"}, ValueError, r"bound='fitc' is no lower bound.*one set.*got 2 sets. Join them"),
        ({"inducing": [z, z], "bound": "dtc"}, ValueError, "bound='dtc' is no lower bound"),
        ({"inducing": [z, z], "bound": "pep", "alpha": 0.5}, ValueError, "bound='pep' is no lower bound"),
        ({"inducing": [z, z], "bound": "conditional"}, ValueError, r"needs a q for each set after the first: orthogonal="),
        ({"X": latent, "bound": "fitc"}, ValueError, r"guide gives latent inputs a Gaussian, bound='fitc' has no closed form"),
        ({"X": latent, "bound": "conditional"}, ValueError, "bound='conditional' has no closed form"),
        ({"X": latent, "inducing": [z, z], "orthogonal": (q_of_three,)}, ValueError, "sets whose q is given by `orthogonal` has"),
        ({"X": latent, "kernel": kernels.RBF(jnp.ones((2, 1)))}, ValueError, "must not have a leading axis"),
        ({"inducing": [z, z], "orthogonal": (flat,)}, TypeError, r"must be what numpyro_orthgp.orthogonal\(name, sets\) returns"),
        ({"inducing": [z, z[:2]], "orthogonal": (q_of_three,)}, ValueError, r"of sizes \[2\]; got sizes \[3\]. Pass the same sets"),
        ({"orthogonal": (q_of_three,)}, ValueError, r"of sizes \[\]; got sizes \[3\]"),
        ({"inducing": [z, ogp.MeanOnly(z)]}, ValueError, "takes no MeanOnly points: its q is optimal"),
        ({"inducing": []}, ValueError, "at least one set"),
        ({"noise": 1j}, TypeError, "`noise_scale` must hold real numbers"),
        ({"noise": 0.0}, ValueError, "`noise_scale` must be positive, a standard deviation; got 0.0"),
        ({"noise": jnp.full(6, -0.1)}, ValueError, "must be positive, a standard deviation; got -0.1"),
        ({"noise": jnp.nan}, ValueError, "`noise_scale` must be finite"),
        ({"noise": jnp.ones(3)}, ValueError, r"shape \(\), \(N,\), \(N, D\) or \(1, D\).*6.*\(3,\).*noise_scale\[None, :\]"),
        ({"noise": jnp.ones((2, 3))}, ValueError, r"`noise_scale` must have shape .* with N = 6; got \(2, 3\)"),
        ({"noise": jnp.ones((1, 6, 1))}, ValueError, r"got \(1, 6, 1\)"),
        ({"observed": flat}, TypeError, r"`observed` must be boolean.*got float64. Use ~numpy.isnan\(y\)"),
        ({"observed": jnp.ones(5, bool)}, ValueError, r"`observed` must have shape \(N,\) or \(N, D\) with N = 6; got \(5,\)"),
        ({"X": jnp.zeros((6, 2), complex)}, TypeError, "`X` must hold real numbers"),
        ({"X": jnp.zeros((6, 3))}, ValueError, r"D = 2; got \(6, 3\)"),
        ({"X": nan[:, None] * x}, ValueError, "`X` must be finite"),
        ({"jitter": 2.0}, ValueError, r"`jitter` must be in \[0, 1\)"),
        ({"kernel": 3.0}, TypeError, "`kernel` must be callable"),
        ({"loc": jnp.ones(5)}, ValueError, r"`loc` must have shape .* with N = 6; got \(5,\)"),
        ({"block_size": 0}, ValueError, "`block_size` must be a positive number of rows, or None; got 0"),
        ({"block_size": 2.5}, ValueError, "`block_size` must be a positive number of rows, or None; got 2.5"),
        ({"X": jnp.zeros((6, 2), jnp.float32)}, TypeError, "`X` is float32 but the inducing variables are float64"),
        ({"noise": jnp.ones((1, 2)), "num_outputs": 3}, ValueError, "`noise_scale` has one column for each of 2 .* there are 3"),
        ({"noise": jnp.ones((1, 2)), "loc": jnp.ones((6, 3))}, ValueError, "`loc` has one column for each of 3 .* there are 2"),
        ({"kernel": kernels.RBF(jnp.ones((2, 1))), "num_outputs": 3}, ValueError, "`num_outputs` is 3 but .* leading axis of 2"),
    ],
)  # fmt: skip
def test_refuses(options, error, match):
    options = {"kernel": kernels.RBF(1.0), "X": x, "inducing": z, "noise": 0.3} | options
    arguments = [options.pop(n) for n in ("kernel", "X", "inducing", "noise")]
    with pytest.raises(error, match=match):
        ogp.CollapsedGP(*arguments, **options)


@pytest.mark.parametrize(
    "options, y, error, match",
    [
        ({}, jnp.zeros(5), ValueError, r"`y` must have shape \(N,\) or \(N, D\) with N = 6, one row per input; got \(5,\)"),
        ({}, jnp.zeros((2, 6)), ValueError, r"got \(2, 6\)"),
        ({}, jnp.zeros((6, 2, 2)), ValueError, r"got \(6, 2, 2\)"),
        ({"num_outputs": 3}, jnp.zeros((6, 2)), ValueError, r"shape \(N, 3\) with N = 6.*got \(6, 2\)"),
        ({"num_outputs": 3}, flat, ValueError, r"shape \(N, 3\) with N = 6.*got \(6,\)"),
        ({}, jnp.zeros(6, complex), TypeError, "`y` must hold real numbers; got complex"),
        ({}, nan, ValueError, r"`y` must be finite; got 6 NaN.*CollapsedGP\(\.\.\., observed=~numpy.isnan\(y\)\)"),
        ({"observed": jnp.ones(6, bool)}, nan, ValueError, r"`y` must be finite; got 6 NaN.*where it counts as observed"),
        ({"observed": jnp.ones((6, 2), bool)}, jnp.zeros((6, 3)), ValueError, r"`y` must have shape \(N, 2\) .* got \(6, 3\)"),
        ({"noise": jnp.ones((1, 2))}, jnp.zeros((6, 3)), ValueError, r"`y` must have shape \(N, 2\) .* got \(6, 3\)"),
        ({"loc": jnp.ones((1, 2))}, flat, ValueError, r"`y` must have shape \(N, 2\) .* got \(6,\)"),
        ({"inducing": [z, z], "orthogonal": (q_of_three,)}, jnp.zeros((6, 2)), ValueError, r"give orthogonal\(\) num_latents=2"),
        ({"observed": jnp.ones((6, 2), bool)}, flat, ValueError, r"`y` must have shape \(N, 2\) .* got \(6,\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["log_prob", "posterior", "upper_bound"])
def test_refuses_outputs(options, y, error, match, method):
    options = {"inducing": z, "noise": 0.3} | options
    gp = ogp.CollapsedGP(kernels.RBF(1.0), x, options.pop("inducing"), options.pop("noise"), **options)
    with pytest.raises(error, match=match):
        getattr(gp, method)(y)


def test_refuses_the_rest():
    gp = ogp.CollapsedGP(kernels.RBF(1.0), jnp.zeros((8193, 2)), z, 0.3)
    with pytest.raises(
        ValueError, match=r"N x N matrix; the limit is N = 8192, got 8193.*predict with \.posterior\(y\)"
    ):
        gp.sample(jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match="`upper_bound` needs known inputs"):
        ogp.CollapsedGP(kernels.RBF(1.0), latent, z, 0.3).upper_bound(flat)
