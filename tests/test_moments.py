"""What a set adds to the moments: one derivative rule for all of it, against the derivatives of the products that it stands for."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.functions import projection
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.projection import Block, decompose
from numpyro_orthgp.functions.stacking import stack
from numpyro_orthgp.gaussians.family import Full
from numpyro_orthgp.inducing import InducingPoints
from numpyro_orthgp.math import whitened
from numpyro_orthgp.math.cholesky import inverse_cholesky, relative_carrier

M, B, LATER = 4, 40, 3  # inducing variables, inputs, points of a later set


def covariance(t, K, dK):
    return K + jnp.sin(t) * dK


@pytest.fixture
def matrices(rng):
    """A covariance and a symmetric change of it."""
    root, change = rng.normal(size=(M, 2 * M)), rng.normal(size=(M, M))
    return jnp.asarray(root @ root.T), jnp.asarray(0.1 * (change + change.T))


def test_carrier_is_zero_and_has_the_relative_derivative(matrices):
    one = jnp.ones(())

    def carried(t):
        C = covariance(t, *matrices)
        return relative_carrier(C, inverse_cholesky(C, one))

    def whitener(t):
        return jnp.linalg.inv(jnp.linalg.cholesky(covariance(t, *matrices)))

    def relative(t):
        return jax.jacfwd(whitener)(t) @ jnp.linalg.inv(whitener(t))

    assert not np.any(carried(0.3))
    assert_allclose(jax.jacfwd(carried)(0.3), relative(0.3), atol=1e-12)
    assert_allclose(jax.jacrev(carried)(0.3), relative(0.3), atol=1e-12)
    assert_allclose(jax.jacfwd(jax.jacfwd(carried))(0.3), jax.jacfwd(relative)(0.3), atol=1e-12)


def problem(rng, batch_C, batch_q):
    t = jnp.asarray(0.3)
    C = jnp.asarray(rng.normal(size=(*batch_C, M, B)))
    loc = jnp.asarray(rng.normal(size=(*batch_q, M)))
    T = jnp.asarray(np.tril(rng.normal(size=(*batch_q, M, M))))
    return t, C, loc, T, jnp.asarray(rng.normal(size=(*batch_C, M, LATER)))


def dense(t, C, loc, T, later, matrices):
    """The moments by an explicit inverse, and what the set explains of a later one's covariances; differentiated by JAX."""
    A = jnp.linalg.inv(jnp.linalg.cholesky(covariance(t, *matrices))) @ C
    mean = jnp.einsum("...m,...mb->...b", loc, A)
    spread = jnp.einsum("...mk,...mb->...kb", jnp.tril(T), A)
    explained, prior = jnp.sum(spread**2, -2), jnp.sum(A**2, -2)
    return mean, explained, -prior, explained - prior, jnp.einsum("...mk,...mb->...kb", later, A)


def ours(t, C, loc, T, later, matrices):
    (block,) = decompose([[covariance(t, *matrices)]], 0.0)
    added, (explains,) = projection.added_moments(Full(loc, jnp.tril(T)), block, C, [later])
    return *added, explains


@pytest.mark.parametrize("ratio", [1, 1000], ids=["by P", "by products"])
@pytest.mark.parametrize(
    ("batch_C", "batch_q"), [((), ()), ((), (3,)), ((3,), (3,))], ids=["one", "shared points", "own points"]
)
def test_values_and_derivatives_of_all_kinds(rng, matrices, monkeypatch, ratio, batch_C, batch_q):
    monkeypatch.setattr(whitened, "_RATIO_WITH_OTHERS", ratio)
    arguments = problem(rng, batch_C, batch_q)
    weights = [jnp.asarray(rng.normal(size=B)) for _ in range(5)]  # the two variances' differ

    @jax.jit
    def results(*arguments):
        def all_of(f):
            def loss(*arguments):
                values = f(*arguments, matrices)
                return sum(jnp.sum(w * jnp.sin(v)) for w, v in zip(weights, values, strict=True)), values

            gradient = jax.grad(loss, range(5), has_aux=True)  # the values of a rule are not those outside of it
            tangents = jax.tree.map(jnp.cos, arguments)
            return f(*arguments, matrices), gradient(*arguments), jax.jvp(gradient, arguments, tangents)

        return all_of(ours), all_of(dense)

    for a, b in zip(*map(jax.tree.leaves, results(*arguments)), strict=True):
        assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def products_over_inputs(loss, *arguments):
    """How many products of matrices the compiled value and gradient take over the inputs, and how many of these make a P."""
    gradient = jax.jit(jax.value_and_grad(loss, range(len(arguments))))
    text = gradient.lower(*arguments).compile().as_text()
    products = [line for line in text.splitlines() if " dot(" in line]
    to_inputs = [line for line in products if f"f64[{M},{B}]" in line.split("dot(")[0]]
    over_inputs = [line for line in products if f"f64[{M},{M}]" in line.split("dot(")[0]]
    num = sum(f"f64[{M},{B}]" in operands(text, line) for line in over_inputs)
    return len(to_inputs) + num, num


def test_few_products_over_the_inputs(rng, matrices):
    """Three for a bound that needs the variances' sum: A, F and P. One with weights of their own has more."""

    def shared(*arguments):
        mean, _, _, net, _ = ours(*arguments, matrices)
        return jnp.sum(net**2 + mean**2)

    def with_later(*arguments):
        return shared(*arguments) + jnp.sum(ours(*arguments, matrices)[-1] ** 2)

    def unequal(*arguments):
        mean, explained, change, _, _ = ours(*arguments, matrices)
        return jnp.sum((explained + 0.5 * change) ** 2 + mean**2)

    arguments = problem(rng, (), ())
    assert products_over_inputs(shared, *arguments) == (3, 1)
    assert products_over_inputs(with_later, *arguments)[1] == 1
    assert products_over_inputs(unequal, *arguments) == (5, 2)


LOSSES = {
    "variance": lambda m: jnp.sum(m.variance**2 + m.mean**2),
    "scaled": lambda m: jnp.sum((2 * m).variance ** 2 + m.mean**2),
    "shifted": lambda m: jnp.sum((m + 1.0).variance ** 2 + m.mean**2),
    "one of several": lambda m: jnp.sum(stack([m])[..., 0].variance ** 2 + m.mean**2),
    "Gaussian": lambda m: jnp.sum(likelihoods.Gaussian(m, 0.3).log_prob(jnp.ones(B))),
    "Bernoulli": lambda m: jnp.sum(likelihoods.Bernoulli(m).log_prob(jnp.ones(B))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_few_products_of_a_function_and_what_is_made_of_it(rng, name):
    Z, X = (jnp.asarray(rng.normal(size=(n, 2))) for n in (M, B))
    _, _, loc, T, _ = problem(rng, (), ())

    def loss(lengthscale, loc, T):
        kernel, points = kernels.RBF(lengthscale), (InducingPoints(Z),)
        blocks = decompose([[kernel(Z, Z)]], 1e-10)
        return LOSSES[name](GPFunction(kernel, points, blocks, (Full(loc, T),))(X))

    assert products_over_inputs(loss, jnp.asarray(0.7), loc, T) == (3, 1)


@pytest.mark.parametrize(("tight", "num_inputs"), [(False, 2 * M), (False, 2 * M - 1), (True, 2 * M)])
def test_where_the_rule_is_used(rng, tight, num_inputs):
    """By a function of one set where there are enough inputs; not where the residual is scaled, nothing being gained there."""
    Z, X = (jnp.asarray(rng.normal(size=(n, 2))) for n in (M, num_inputs))
    _, _, loc, T, _ = problem(rng, (), ())
    kernel = kernels.RBF(0.7)
    belief = Full(loc, T)
    scale = jnp.asarray(0.9) if tight else None
    f = GPFunction(kernel, (InducingPoints(Z),), decompose([[kernel(Z, Z)]], 1e-10), (belief,), residual_scale=scale)
    program = str(jax.make_jaxpr(lambda X: f(X).variance)(X))
    assert ("full_variances" in program) == (not tight and num_inputs == 2 * M)


def test_a_variance_that_is_explained_is_never_negative():
    """Nor in the value that comes with a gradient, which is computed in a way of its own."""
    n = 64
    rng = np.random.default_rng(0)
    root = np.tril(rng.normal(size=(n, n))).astype("float32")
    # Inputs on which nothing is left of S but rounding errors of its large part.
    A = np.linalg.solve(root.T.astype(float), rng.normal(size=(n, 8 * n)) * 1e-6).astype("float32")
    A /= np.abs(A).max(0)
    (block,) = decompose([[jnp.eye(n, dtype="float32")]], 0.0)

    def explained(A):
        return projection.added_moments(Full(jnp.zeros(n, "float32"), jnp.asarray(root)), block, A)[0][1]

    value, _ = jax.jvp(explained, (jnp.asarray(A),), (jnp.zeros_like(A),))
    assert np.all(value >= 0)
    scale = np.sum((np.abs(root.T) @ np.abs(A)) ** 2, 0)
    assert_allclose(value / scale, explained(jnp.asarray(A)) / scale, atol=1e-6)
    assert np.any(np.asarray(value) == 0)


def operands(text, line):
    """The shapes of what a product takes, where the line itself names them only."""
    names = line.split("dot(")[1].split(")")[0].split(",")
    return " ".join(
        next(x for x in text.splitlines() if x.strip().removeprefix("ROOT ").startswith(f"{n.strip()} ="))
        for n in names
    )


def test_float32_is_kept(rng, matrices):
    arguments = [jnp.asarray(a, jnp.float32) for a in problem(rng, (), ())]
    small = [jnp.asarray(a, jnp.float32) for a in matrices]
    values, gradient = jax.jvp(lambda *a: ours(*a, small), arguments, arguments)
    assert {a.dtype for a in (*values, *gradient)} == {jnp.dtype("float32")}
    for a, b in zip(values, dense(*arguments, small), strict=True):
        assert_allclose(a, b, rtol=2e-4, atol=1e-4)


def test_a_block_without_carrier_has_the_whiteners_own_derivative(rng, matrices):
    t, C, loc, T, later = problem(rng, (), ())

    def plain(t, C, loc, T, later, matrices):
        (block,) = decompose([[covariance(t, *matrices)]], 0.0)
        block = Block(block.whitener, (), block.jitter)
        added, (explains,) = projection.added_moments(Full(loc, T), block, C, [later])
        return *added, explains

    for i in range(5):
        gradients = [
            jax.grad(lambda t, f=f, i=i: jnp.sum(jnp.sin(f(t, C, loc, T, later, matrices)[i])))(t)
            for f in (plain, dense)
        ]
        assert_allclose(*gradients, rtol=1e-9)


@pytest.mark.parametrize("lengthscale", [0.3, 3.0, 30.0])
def test_the_rule_is_as_precise_as_products_in_float32(rng, monkeypatch, lengthscale):
    """Up to condition numbers of one over the jitter: values of the variance, and its gradients for points and hyperparameters."""
    Z, X, T = rng.normal(size=(48, 2)), rng.normal(size=(200, 2)), np.tril(rng.normal(size=(48, 48))) * 0.05
    weights = rng.normal(size=200)

    def results(dtype):
        def loss(lengthscale, Z, T):
            kernel = kernels.RBF(lengthscale)
            block = decompose([[kernel(Z, Z)]], 1e-6)
            belief = (Full(jnp.zeros(48, dtype), T),)
            variance = GPFunction(kernel, (InducingPoints(Z),), block, belief)(jnp.asarray(X, dtype)).variance
            return jnp.sum(variance * jnp.asarray(weights, dtype)), variance

        arguments = (jnp.asarray(a, dtype) for a in (lengthscale, Z, T))
        (_, variance), gradients = jax.jit(jax.value_and_grad(loss, range(3), has_aux=True))(*arguments)
        return [np.asarray(a, float) for a in (variance, *gradients)]

    exact = results("float64")
    by_rule = results("float32")
    monkeypatch.setattr(whitened, "_RATIO", 1000)
    by_products = results("float32")
    for a, b, c in zip(by_rule, by_products, exact, strict=True):
        assert np.linalg.norm(a - c) < 3 * np.linalg.norm(b - c) + 1e-5 * np.linalg.norm(c)


def test_the_variance_is_the_sum_of_its_parts_and_so_is_its_derivative(rng):
    Z, X = (jnp.asarray(rng.normal(size=(n, 2))) for n in (M, B))
    _, _, loc, T, _ = problem(rng, (), (2,))

    def marginals(lengthscale):
        kernel = kernels.RBF(lengthscale)
        block = decompose([[kernel(Z, Z)]], 1e-10)
        f = GPFunction(kernel, (InducingPoints(Z),), block, (Full(loc, T),), num_latents=2)
        return f(X)

    v = jnp.asarray([0.3, 0.6])
    m = marginals(0.7)
    tight = replace(m, residual_scale=v)
    assert_allclose(tight.variance, m.explained + v * m.residual, rtol=1e-12)
    factor = jnp.asarray(rng.normal(size=(B, 1)))
    W = jnp.asarray(rng.normal(size=(2, 3)))
    for change in (lambda m: m, lambda m: factor * m, lambda m: m[..., [1]], lambda m: m @ W):

        def both(lengthscale, change=change):
            m = change(marginals(lengthscale))
            assert m.total is not None
            return m.variance, m.explained_variance + m.residual_variance

        (total, parts), (dtotal, dparts) = jax.jvp(both, (jnp.asarray(0.7),), (jnp.ones(()),))
        assert_allclose(total, parts, rtol=1e-12)
        assert_allclose(dtotal, dparts, rtol=1e-9)


def test_many_functions_of_one_projection_are_one_product(rng, monkeypatch):
    """No product of M x M for each function; beyond some size the functions are worked on a few at a time, with equal results."""
    P, M, B = 6, 5, 40
    A = jnp.asarray(rng.normal(size=(M, B)))
    q = Full(jnp.asarray(rng.normal(size=(P, M))), jnp.asarray(np.tril(rng.normal(size=(P, M, M)))))
    weights = jnp.asarray(rng.normal(size=(P, B)))

    def value(q, A):
        return jnp.sum(weights * projection.moments_of_whitened(q, A).net)

    def each(q, A):
        T = q.scale_tril
        return jnp.sum(weights * (jnp.einsum("pmk,mb,plk,lb->pb", T, A, T, A) - jnp.sum(A**2, 0)))

    def results(function):
        return jax.jit(jax.value_and_grad(lambda q, A: function(q, A), (0, 1)))(q, A)

    whole, expected = results(value), results(each)
    program = str(jax.make_jaxpr(jax.grad(value, (0, 1)))(q, A))
    assert "batch" not in "".join(line for line in program.splitlines() if "dot_general" in line)
    monkeypatch.setattr(projection, "MOST_AT_ONCE", 0)
    monkeypatch.setattr(projection, "MAX_ENTRIES", 4 * M * B)
    blocks = results(value)
    assert "scan" in str(jax.make_jaxpr(lambda q, A: value(q, A))(q, A))
    for a, b, c in zip(*map(jax.tree.leaves, (whole, blocks, expected)), strict=True):
        lower = jnp.tril if c.shape == (P, M, M) else jnp.asarray  # the rest of a root's gradient is of no meaning
        assert_allclose(lower(a), lower(c), rtol=1e-10, atol=1e-10)
        assert_allclose(b, a, rtol=1e-12, atol=1e-12)
