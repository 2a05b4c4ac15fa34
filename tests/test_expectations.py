"""Expectations of kernels under Gaussian inputs against GPflow's, and against a quadrature and formulas of the test's own."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from numpyro_orthgp.kernels import (
    RBF,
    Constant,
    Function,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    Stationary,
    White,
)
from numpyro_orthgp.kernels.expectations import between_rows, psi0, psi1, psi2
from numpyro_orthgp.kernels.terms import terms
from tests.test_architecture import all_equations

ELL, OTHER, SLOPES = np.array([0.9, 1.7]), np.array([2.3, 1.1]), np.array([0.6, 1.4])


def rbf(x, y, ell=ELL):
    return np.exp(-0.5 * (((x - y) / ell) ** 2).sum(-1))


def linear(x, y, slopes=SLOPES):
    return (slopes * x * y).sum(-1)


def periodic(x, y):
    return np.exp(-2 * (np.sin(np.pi * (x - y) / 6.5) ** 2 / 1.4**2).sum(-1))


def matern32(x, y):
    r = np.sqrt(3 * (((x - y) / OTHER) ** 2).sum(-1))
    return (1 + r) * np.exp(-r)


# name -> (kernel, its formula for two distinct inputs, the variance of White that k(x, x) has besides)
CASES = {
    "rbf": (RBF(ELL), rbf, 0),
    "rbf scalar": (RBF(0.8), lambda x, y: rbf(x, y, 0.8), 0),
    "linear": (Linear(SLOPES), linear, 0),
    "constant": (Constant(0.4), lambda x, y: 0.4 + 0 * x[..., 0] * y[..., 0], 0),
    "polynomial": (Polynomial(1, SLOPES, 0.7), lambda x, y: 0.7 + linear(x, y), 0),
    "constant + rbf": (0.4 + RBF(ELL), lambda x, y: 0.4 + rbf(x, y), 0),
    "rbf + linear": (RBF(ELL) + Linear(SLOPES), lambda x, y: rbf(x, y) + linear(x, y), 0),
    "rbf + rbf": (RBF(ELL) + RBF(OTHER), lambda x, y: rbf(x, y) + rbf(x, y, OTHER), 0),
    "rbf * rbf": (RBF(ELL) * RBF(OTHER), lambda x, y: rbf(x, y) * rbf(x, y, OTHER), 0),
    "rbf * linear": (RBF(ELL) * Linear(SLOPES), lambda x, y: rbf(x, y) * linear(x, y), 0),
    "rbf on 0 * linear on 1 + constant": (
        RBF(0.9).on(0) * Linear(1.4).on(1) + 0.3,
        lambda x, y: rbf(x[..., :1], y[..., :1], 0.9) * 1.4 * x[..., 1] * y[..., 1] + 0.3,
        0,
    ),
    "rbf on 0 + rbf on 1": (
        RBF(0.9).on([0]) + RBF(1.1).on([1]),
        lambda x, y: rbf(x[..., :1], y[..., :1], 0.9) + rbf(x[..., 1:], y[..., 1:], 1.1),
        0,
    ),
    "columns swapped": (RBF(ELL).on([-1, 0]), lambda x, y: rbf(x, y, ELL[::-1]), 0),
    "columns of columns": (
        (RBF(0.9).on(1) + Linear(SLOPES)).on([1, 0]),
        lambda x, y: rbf(x[..., :1], y[..., :1], 0.9) + linear(x, y, SLOPES[::-1]),
        0,
    ),
    "a column twice": (
        RBF(ELL).on([0, 0]) + Linear(SLOPES).on([1, 1]),
        lambda x, y: rbf(x[..., [0, 0]], y[..., [0, 0]]) + linear(x[..., [1, 1]], y[..., [1, 1]]),
        0,
    ),
    "scaled": (1.7 * (RBF(ELL) + 0.2 * Linear(SLOPES)), lambda x, y: 1.7 * rbf(x, y) + 0.34 * linear(x, y), 0),
    "sum of three": (
        0.5 * RBF(ELL) + 1.3 * RBF(OTHER) * Linear() + Linear(SLOPES),
        lambda x, y: 0.5 * rbf(x, y) + 1.3 * rbf(x, y, OTHER) * linear(x, y, 1.0) + linear(x, y),
        0,
    ),
    "product of sums": (
        (RBF(ELL) + 0.5) * (Linear(1.4).on(1) + 0.2),
        lambda x, y: (rbf(x, y) + 0.5) * (1.4 * x[..., 1] * y[..., 1] + 0.2),
        0,
    ),
    "white added": (RBF(ELL) + White(0.6), rbf, 0.6),
    "white multiplied": (RBF(ELL) + 2 * White(0.6) * RBF(OTHER) + White(0.1) * White(2.0), rbf, 1.4),
}
# By quadrature: with 32 nodes per axis, the rule is exact for the first and has converged for the second.
SMOOTH = {
    "linear * linear": (
        Linear(SLOPES) * Linear() + White(0.6),
        lambda x, y: linear(x, y) * linear(x, y, 1.0),
        0.6,
    ),
    "periodic": (Periodic(1.4, 6.5), periodic, 0),
}

Z = np.array([[0.3, -0.4], [-1.2, 0.8], [1.5, 0.1], [0.2, 1.9]])
LOC = np.array([[0.1, 0.5], [-0.7, 1.1], [0.9, -1.3], [0.4, -0.2], [-1.6, 0.3]])
SCALE = np.array([[0.5, 0.3], [0.9, 0.7], [0.4, 0.0], [0.0, 0.6], [0.0, 0.0]])  # columns, and a row, are known


def tensor_rule(num, dim):
    x, w = np.polynomial.hermite.hermgauss(num)
    grids = np.meshgrid(*[np.arange(num)] * dim, indexing="ij")
    index = np.stack([grid.ravel() for grid in grids], axis=-1)
    return np.sqrt(2) * x[index], (w / np.sqrt(np.pi))[index].prod(-1)


def reference(formula, white, Z=Z, loc=LOC, scale=SCALE, num=50):
    nodes, weights = tensor_rule(num, loc.shape[-1])
    X = loc + scale * nodes[:, None]  # (S, B, D)
    K = formula(Z[:, None, None], X)  # (M, S, B)
    return (
        np.einsum("s,sb->b", weights, formula(X, X)) + white,
        np.einsum("s,msb->mb", weights, K),
        np.einsum("s,msb,nsb->bmn", weights, K, K, optimize=True),
    )


def expectations(kernel, Z, loc, scale, num_points=32):
    every = {"num_points": num_points}
    return psi0(kernel, loc, scale, **every), psi1(kernel, Z, loc, scale, **every), psi2(kernel, Z, loc, scale, **every)


# The small cases run faster as they are, as the operations that they share are compiled once.
jitted = jax.jit(expectations, static_argnames="num_points")


def close(got, expected, rtol, atol):
    for a, b in zip(got, expected, strict=True):
        assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_closed_forms(name):
    kernel, formula, white = CASES[name]
    assert terms(kernel, 2) is not None
    close(expectations(kernel, Z, LOC, SCALE), reference(formula, white), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_closed_forms_between_independent_inputs(name):
    kernel, formula, _ = CASES[name]
    nodes, weights = tensor_rule(24, 2)
    got, single = between_rows(kernel, LOC, SCALE), between_rows(kernel, *(np.float32(a) for a in (LOC, SCALE)))
    for a, b in [(0, 1), (1, 4), (2, 3), (3, 0)]:
        values = formula(LOC[a] + SCALE[a] * nodes[:, None], LOC[b] + SCALE[b] * nodes)
        assert_allclose(got[a, b], weights @ values @ weights, rtol=1e-7)
        assert_allclose(single[a, b], got[a, b], rtol=1e-5)
    assert_allclose(got, got.T, rtol=1e-12)


def test_known_columns_that_are_equal_between_inputs():
    same = np.array([[0.1, 0.5], [0.3, 0.5], [0.2, 0.7]])
    got = between_rows(RBF(ELL) * White(2.0).on(1), same, np.array([[0.4, 0.0], [0.2, 0.0], [0.2, 0.0]]))
    assert_allclose(got[0, 1], 2 * between_rows(RBF(ELL), same, np.array([[0.4, 0.0]] * 3) * [[1], [0.5], [0.5]])[0, 1])
    assert not got[:2, 2].any()
    unknown = between_rows(RBF(ELL) * White(2.0).on(1), same, np.array([[0.4, 0.0], [0.2, 0.1], [0.2, 0.0]]))
    assert unknown[0, 1] == 0  # known and equal only in the mean


@pytest.mark.parametrize("name", SMOOTH)
def test_nothing_is_known_between_inputs_without_a_closed_form(name):
    with pytest.raises(ValueError, match="between uncertain inputs is known for sums and products of RBF"):
        between_rows(SMOOTH[name][0], LOC, SCALE)


@pytest.mark.parametrize("name", SMOOTH)
def test_quadrature_of_smooth_kernels(name):
    kernel, formula, white = SMOOTH[name]
    assert terms(kernel, 2) is None
    close(expectations(kernel, Z, LOC, SCALE), reference(formula, white), rtol=1e-9, atol=1e-12)


def test_gplvm_golden(golden):
    case = json.loads((golden / "case08_bgplvm_oilflow60.json").read_text())
    given, true = case["inputs"], case["outputs"]
    Z, loc, scale = (np.array(a) for a in (given["Z"], given["X_mean"], np.sqrt(given["X_var"])))
    rbf = given["variance"] * RBF(np.array(given["lengthscales"]))
    linear = Linear(np.array(true["linear_kernel"]["variance"]))

    def compare(kernel, psi0, psi1, psi2):  # GPflow's psi1 is (N, M)
        close(jitted(kernel, Z, loc, scale), (np.array(psi0), np.array(psi1).T, psi2), rtol=1e-8, atol=1e-8)

    parts = true, true["linear_kernel"]
    compare(rbf, *(parts[0][name] for name in ("psi0", "psi1", "psi2")))
    compare(linear, *(parts[1][name] for name in ("psi0", "psi1", "psi2")))
    cross = np.array(true["linear_kernel"]["cross_rbf_linear"])  # E[rbf(z_m, x) linear(x, z_m')]
    sums = [np.array(parts[0][name]) + np.array(parts[1][name]) for name in ("psi0", "psi1", "psi2")]
    compare(rbf + linear, *sums[:2], sums[2] + cross + np.swapaxes(cross, 1, 2))


def test_quadrature_of_a_rough_kernel():
    """Matern32 has a kink in its second derivative: 20 nodes per axis give three digits, 64 four."""
    expected = reference(matern32, 0, num=300)
    for num_points, atol in ((20, 1e-3), (64, 5e-5)):
        close(jitted(Matern32(OTHER), Z, LOC, SCALE, num_points), expected, rtol=0, atol=atol)


def _opaque(X1, X2=None):
    return jnp.ones(len(X1)) if X2 is None else jnp.exp(-0.5 * ((X1[:, None] - X2) ** 2).sum(-1))


def test_sobol_points_in_many_columns(rng):
    Z, loc, scale = rng.standard_normal((4, 3)), rng.standard_normal((5, 3)), rng.uniform(0, 0.7, (5, 3))
    kernel, exact = Function(_opaque), expectations(RBF(1.0), Z, loc, scale)
    assert terms(kernel, 3) is None
    got = expectations(kernel, Z, loc, scale, 20)
    close(got, exact, rtol=0, atol=2e-3)
    again = psi1(kernel, Z, loc, scale, num_points=17)  # 17 ** 3 > 4096 too: the very same points
    assert_allclose(got[1], again, rtol=0, atol=0)
    assert_allclose(psi1(kernel, Z, loc, scale, num_points=16), exact[1], rtol=0, atol=1e-8)


def test_any_callable():
    got = psi0(_opaque, LOC, SCALE), psi1(_opaque, Z, LOC, SCALE), psi2(_opaque, Z, LOC, SCALE)
    close(got, expectations(RBF(1.0), Z, LOC, SCALE), rtol=0, atol=1e-6)


def test_the_rule_itself():
    """Seven nodes, four at a time: none is lost."""
    columns = Z[:, :1], LOC[:, :1], SCALE[:, :1]
    expected = reference(lambda x, y: rbf(x, y, 1.0), 0, *columns, num=7)
    close(expectations(Function(_opaque), *columns, 7), expected, rtol=1e-12, atol=1e-14)


def test_tinygp_kernels():
    tinygp = pytest.importorskip("tinygp")
    theirs = 0.7 * RBF(ELL) + tinygp.kernels.Matern32(0.8, distance=tinygp.kernels.distance.L2Distance())
    ours = 0.7 * RBF(ELL) + Matern32(0.8)
    close(expectations(theirs, Z, LOC, SCALE, 8), expectations(ours, Z, LOC, SCALE, 8), rtol=1e-9, atol=1e-9)


class Cosine(Stationary):
    def profile(self, r2):
        return jnp.cos(jnp.sqrt(r2))


class NotQuiteRBF(RBF):
    def profile(self, r2):
        return jnp.exp(-0.5 * r2) ** 2


@pytest.mark.parametrize(
    "kernel",
    [
        *(Matern12(), Matern32() + RBF(), RBF() * Matern52().on(1), Periodic(), Polynomial(2), Cosine(), NotQuiteRBF()),
        *(Linear() * Linear(), Linear().on(0) * Linear().on(1), (RBF() + Linear()) * (1 + Linear()), Function(_opaque)),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_what_has_no_closed_form(kernel):
    assert terms(kernel, 2) is None


KNOWN = [*CASES, *SMOOTH, "matern32"]


@pytest.mark.parametrize("name", KNOWN)
def test_known_inputs_give_the_kernel(name):
    kernel = {**CASES, **SMOOTH, "matern32": (Matern32(OTHER),)}[name][0]
    K = np.asarray(kernel(Z, LOC))
    expected = kernel(LOC), K, K.T[:, :, None] * K.T[:, None, :]
    close(expectations(kernel, Z, LOC, np.zeros_like(LOC)), expected, rtol=1e-12, atol=1e-13)


def test_white_noise_of_known_columns():
    """Groups: a column of whole numbers that are known, in which inputs are equal to some of the points."""
    groups, points = np.array([0.0, 1, 1, 2, 0]), np.array([0.0, 1, 2, 3])
    loc, Z1 = np.c_[LOC[:, 0], groups], np.c_[Z[:, 0], points]
    scale = np.c_[SCALE[:, 0], np.zeros(5)]
    kernel = 0.3 * RBF(0.9).on(0) + White(0.8).on(1) * RBF(1.2).on(0) + White(0.2).on(1)

    def formula(x, y):
        same = x[..., 1] == y[..., 1]
        return 0.3 * rbf(x[..., :1], y[..., :1], 0.9) + same * (0.8 * rbf(x[..., :1], y[..., :1], 1.2) + 0.2)

    assert terms(kernel, 2) is not None
    close(expectations(kernel, Z1, loc, scale), reference(formula, 0, Z1, loc, scale), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("smooth", [RBF(ELL), Periodic(1.4, 6.5)])
def test_white_noise_sees_no_coincidences(smooth):
    """Not where a quadrature node is one of the points, which has probability zero, nor where a known input is."""
    got, without = (psi1(k, LOC[:2], LOC[:2], SCALE[:2], num_points=21) for k in (smooth + White(0.6), smooth))
    assert_allclose(got, without, rtol=1e-14)
    known = psi2(smooth + White(0.6), LOC[:2], LOC[:2], 0 * SCALE[:2], num_points=1)
    assert_allclose(known, psi2(smooth, LOC[:2], LOC[:2], 0 * SCALE[:2], num_points=1), rtol=1e-14)
    close(expectations(White(0.6), Z, LOC, SCALE), (np.full(5, 0.6), 0, 0), rtol=0, atol=0)


def make(p):
    return RBF(p["ell"]) * Linear(p["slopes"]) + p["variance"]


def make_rough(p):
    return p["variance"] * Matern32(p["ell"])


PARAMS = {"variance": 0.8, "ell": ELL, "slopes": SLOPES}


def scalar(make, weights, p, *args):
    return sum((w * a).sum() for w, a in zip(weights, expectations(make(p), *args, 8), strict=True))


@pytest.mark.parametrize("make", [make, make_rough])
def test_gradients(make, rng):
    weights = [rng.standard_normal(shape) for shape in ((5,), (4, 5), (5, 4, 4))]
    f = functools.partial(scalar, make, weights)
    args = PARAMS, Z, LOC, np.where(SCALE > 0, SCALE, 0.2)
    gradient = jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))
    direction = jax.tree.map(lambda a: rng.standard_normal(np.shape(a)), args)
    step = [jax.tree.map(lambda a, d, h=h: a + h * d, args, direction) for h in (1e-5, -1e-5)]
    slope = sum((g * d).sum() for g, d in zip(*map(jax.tree.leaves, (gradient(*args), direction)), strict=True))
    assert_allclose((f(*step[0]) - f(*step[1])) / 2e-5, slope, rtol=1e-7)
    # Where inputs are known, all is even in `scale`.
    gradients = gradient(PARAMS, Z, LOC, 0 * SCALE)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    assert np.abs(gradients[3]).max() < 1e-14

    def at_known(p, Z, loc):
        K, variance = make(p)(Z, loc), make(p)(loc)
        return (weights[0] * variance).sum() + (weights[1] * K).sum() + jnp.einsum("bmn,mb,nb", weights[2], K, K)

    expected = jax.jit(jax.grad(at_known, argnums=(0, 1, 2)))(PARAMS, Z, LOC)
    for a, b in zip(jax.tree.leaves(gradients[:3]), jax.tree.leaves(expected), strict=True):
        assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_gradients_where_an_input_is_a_point():
    def f(loc, scale):
        return sum(a.sum() for a in expectations(RBF(ELL), Z, loc, scale))

    for gradient in jax.jit(jax.grad(f, argnums=(0, 1)))(Z + 0.0, 0 * Z):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["rbf * linear", "white multiplied", "periodic"])
def test_float32(name):
    kernel = {**CASES, **SMOOTH}[name][0]
    single = functools.partial(jax.tree.map, lambda a: jnp.asarray(a, jnp.float32))
    got = jitted(*single((kernel, Z, LOC, SCALE)))
    assert {a.dtype for a in got} == {jnp.dtype("float32")}
    for a, b in zip(got, expectations(kernel, Z, LOC, SCALE), strict=True):
        assert_allclose(a, b, rtol=1e-5, atol=2e-6 * max(1, np.abs(b).max()))


def test_far_from_the_origin():
    """Squares are taken around the points' mean, so moving everything by a thousand lengthscales costs three digits."""
    close(expectations(RBF(ELL), Z + 1e3, LOC + 1e3, SCALE), expectations(RBF(ELL), Z, LOC, SCALE), 1e-11, 1e-13)


PROPERTY = {
    "rbf": lambda p: p["variance"] * RBF(p["ell"]),
    "rbf + linear": lambda p: p["variance"] * RBF(p["ell"]) + Linear(p["slopes"]),
    "rbf * linear": lambda p: RBF(p["ell"]) * Linear(p["slopes"]) + p["variance"],
    "disjoint": lambda p: RBF(p["ell"][:1]).on(0) * Linear(p["slopes"][:1]).on(1) + RBF(p["ell"][1:]).on(1),
}


@pytest.mark.parametrize("name", PROPERTY)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.floats(-1.5, 1.5), known=st.booleans())
def test_moments_of_one_random_vector(name, seed, size, known):
    """The covariance of k(Z, x) is positive semidefinite, and so is what Z leaves unexplained of f(x), on average."""
    rng = np.random.default_rng(seed)
    p = {"variance": rng.uniform(0.1, 3), "ell": np.exp(rng.normal(size=2) / 2), "slopes": rng.uniform(0.1, 2, 2)}
    Z, loc = rng.standard_normal((4, 2)), 2 * rng.standard_normal((3, 2))
    scale = 10**size * rng.uniform(size=(3, 2)) * np.array([1, 0 if known else 1])
    kernel = PROPERTY[name](p)
    a, b, c = (np.asarray(e) for e in jitted(kernel, Z, loc, scale))
    tolerance = 1e-11 * np.abs(c).max(axis=(1, 2))
    assert_allclose(c, np.swapaxes(c, 1, 2), rtol=0, atol=tolerance.max())
    covariance = c - b.T[:, :, None] * b.T[:, None, :]
    assert (np.linalg.eigvalsh(covariance).min(axis=-1) >= -tolerance).all()
    K = np.asarray(kernel(Z, Z)) + 1e-9 * np.eye(4)  # a little noise on the inducing variables leaves the bound one
    explained = np.trace(np.linalg.solve(K, c), axis1=1, axis2=2)
    assert (a - explained >= -1e-7 * a).all()


def test_no_array_outgrows_the_result(rng):
    B, M, D = 64, 6, 20
    Z, loc, scale = rng.standard_normal((M, D)), rng.standard_normal((B, D)), rng.uniform(0, 1, (B, D))

    def f(kernel, *args):
        return psi2(kernel, *args).sum()

    for kernel in (RBF(1.0), RBF(1.0) * Linear() + Linear()):
        program = jax.make_jaxpr(jax.value_and_grad(f, argnums=(0, 1, 2, 3)))(kernel, Z, loc, scale)
        sizes = [v.aval.size for e in all_equations(program.jaxpr) for v in e.outvars]
        assert max(sizes) <= B * M * M  # and not B * M * M * D, or even B * M * D
    assert B * M * D > B * M * M


def test_one_kernel_at_a_time():
    ell = jnp.array([[0.7], [1.3]])
    for kernel in (RBF(ell), Matern32(ell), RBF(1.0) + Constant(jnp.ones(2))):
        for f in (lambda k: psi0(k, LOC, SCALE), lambda k: psi1(k, Z, LOC, SCALE), lambda k: psi2(k, Z, LOC, SCALE)):
            with pytest.raises(ValueError, match=r"`kernel` must be of one function.*got \(2, .*jax.vmap"):
                f(kernel)
    both = jax.vmap(lambda kernel: psi2(kernel, Z, LOC, SCALE))(RBF(ell))
    assert_allclose(both[1], psi2(RBF(1.3), Z, LOC, SCALE), rtol=1e-13)


@pytest.mark.parametrize(
    "args, error, message",
    [
        ((Z[:, :1], LOC, SCALE), ValueError, r"`Z` must have shape \(M, D\) with D = 2 .* got \(4, 1\)"),
        ((Z, LOC, SCALE[0]), ValueError, r"`scale` must have shape \(..., n, D\); got \(2,\)"),
        ((Z, LOC, SCALE[:1]), ValueError, r"must have the same shape \(B, D\); got \(5, 2\) and \(1, 2\)"),
        ((Z, LOC, -SCALE), ValueError, "`scale` must be nonnegative"),
        ((Z.astype(complex), LOC, SCALE), TypeError, "`Z` must hold real numbers"),
    ],
)
def test_errors(args, error, message):
    for f in (psi1, psi2):
        with pytest.raises(error, match=message):
            f(RBF(ELL), *args)


def test_columns_out_of_range():
    with pytest.raises(ValueError, match=r"`dims` must lie in 0\.\.1"):
        psi1(RBF().on(2), Z, LOC, SCALE)


def test_terms():
    """Multiplied out, products distribute and precisions add."""
    first, second = terms(RBF(ELL) * (2 * RBF(0.5).on(1) + Linear(3.0).on(0)), 2)
    assert_allclose(first.precision, ELL**-2 + np.array([0, 4]))
    assert (first.weight, first.slopes) == (2, ())
    assert_allclose(second.slopes, [[3, 0]])
    assert_allclose(second.precision, ELL**-2)


def test_a_point_far_from_all_others_costs_these_no_digits(rng):
    """The mean of the points was the origin, and psi2 of all others was infinite in float32."""
    Z, loc = (jnp.asarray(rng.standard_normal((n, 3)), jnp.float32) for n in (20, 5))
    with_far = psi2(RBF(1.0), jnp.concatenate([Z, jnp.full((1, 3), 1e6)]), loc, 0.3 + 0 * loc)
    assert_allclose(with_far[:, :20, :20], psi2(RBF(1.0), Z, loc, 0.3 + 0 * loc), atol=2e-6)
