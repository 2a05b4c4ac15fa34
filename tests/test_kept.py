"""Programs that are kept: a fit that goes on, grows or begins anew compiles nothing, and computes what it would have anyway."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp.errors import inspect
from numpyro_orthgp.math import kept

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 2))
Y = np.sin(X[:, 0])
Z = X[:10]


def model(X, y, *, N, Z, kernel=ogp.kernels.Matern32, noise=0.3):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = ogp.gp("f", kernel(lengthscale), Z)
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), noise), obs=y)


def run(rate=0.01, seed=0, rows=300, model=model, **options):
    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(rate), TraceMeanField_ELBO())
    fixed = {"batch_size": 50, "num_steps": 7, "progress_bar": False}
    options = {"Z": Z, "N": rows} | options
    return ogp.fit(svi, jax.random.PRNGKey(seed), (X[:rows], Y[:rows]), **fixed, **options)


def test_fits_that_differ_in_numbers_compile_nothing(compilations):
    state = run().state
    assert compilations
    others = (
        {"init_state": state},
        {"seed": 1},
        {"rows": 200},
        {"rate": 0.3},
        {"Z": Z + 0.5},
        {"rows": 299, "seed": 3, "init_state": state},
    )
    for options in others:
        compilations.clear()
        found = run(**options)
        assert not compilations, options
        kept._kept.clear()
        np.testing.assert_array_equal(found.losses, run(**options).losses, err_msg=str(options))


def test_a_constant_of_the_model_leaves_the_step_as_it_is(compilations):
    first = run()
    compilations.clear()
    other = run(noise=0.1)
    assert "jit(_run)" not in compilations
    assert not np.allclose(other.losses, first.losses)


def test_what_is_kept_holds_no_arrays(compilations):
    """Arrays that a program closes over may be all the data."""
    run()
    steps = [kept_one.__wrapped__.args[0] for kept_one in kept._kept.values() if hasattr(kept_one.__wrapped__, "args")]
    assert steps and all(program.numbers == [] for program in steps)


def test_what_differs_otherwise_is_compiled(compilations):
    first = run()
    for options in ({"kernel": ogp.kernels.RBF}, {"Z": Z[:9]}, {"rows": 50}):
        compilations.clear()
        other = run(**options)
        assert compilations, options
        assert not np.allclose(other.losses, first.losses)


def test_numbers_within_branches_are_part_of_a_program():
    def inner(x, factor):
        return jax.lax.cond(x > 0, lambda x: x * factor, lambda x: x, x)

    with_two, with_three = (kept.traced(lambda x, c=c: inner(x, c) + c, 1.0) for c in (2.0, 3.0))
    assert with_two.key != with_three.key
    one, other = (kept.traced(lambda x, c=c: jnp.sin(x) * c, 1.0) for c in (2.0, 3.0))
    assert one.key == other.key and one.numbers != other.numbers
    zero = kept.traced(lambda x: jnp.sin(x) * 0.0, 1.0)
    assert zero.key != one.key


def test_arguments_on_which_no_result_depends_are_part_of_a_program():
    def program(x, y):
        jnp.broadcast_to(y, (2, *y.shape))
        return jnp.sin(x)

    for rows in (3, 5):
        assert kept.run_kept(program, 0.0, np.ones(rows)) == 0


def test_operations_that_nothing_depends_on_are_left_out():
    def program(x, y):
        jnp.exp(jnp.cos(y))
        jax.debug.callback(noted.append, jnp.tan(y))
        return jnp.sin(x), x

    noted = []
    found = kept.traced(program, 1.0, 2.0)
    made = jax.make_jaxpr(found.leaves)(found.numbers, 1.0, 2.0)
    assert {eqn.primitive.name for eqn in made.eqns} == {"sin", "tan", "debug_callback"}
    np.testing.assert_allclose(kept.run_kept(program, 1.0, 2.0), (np.sin(1.0), 1.0))
    jax.effects_barrier()
    np.testing.assert_allclose(noted, np.tan(2.0))


def test_the_order_of_a_sum_is_part_of_a_program():
    """It has a say in the last bits."""
    one, other = (
        kept.traced(lambda x, y, z: x + y + z, *np.ones(3)),
        kept.traced(lambda x, y, z: x + (y + z), *np.ones(3)),
    )
    assert one.key != other.key


def test_arrays_are_arguments():
    first, second = (kept.traced(lambda x, a=a: x + jnp.asarray(a), 1.0) for a in (np.arange(3.0), np.ones(3)))
    assert first.key == second.key
    np.testing.assert_array_equal(first(second.numbers, 1.0), 2 * np.ones(3))
    assert kept.traced(lambda x: x + jnp.arange(4.0), 1.0).key != first.key
    assert kept.traced(lambda x: x + jnp.ones(3, jnp.float32), 1.0).key != first.key


@pytest.mark.parametrize("call", [
    lambda x: jax.pure_callback(lambda x: np.asarray(x) + 1, jax.typeof(x), x),
    lambda x: (jax.debug.callback(lambda x: None, x), x)[1],
])  # fmt: skip
def test_callbacks_to_python_are_not_kept(call):
    program = kept.traced(lambda x: call(jnp.sin(x)), 1.0)
    assert program.key is None
    assert float(kept.compiled(program.key, lambda: jax.jit(program.leaves))(program.numbers, 0.0)[0]) in (0.0, 1.0)


def test_a_model_with_a_callback_is_fitted_each_time_with_its_own():
    def make(offset):
        def with_callback(X, y, *, N, Z):
            y = jax.pure_callback(lambda y: np.asarray(y) + offset, jax.typeof(jnp.asarray(y)), y)
            model(X, y, N=N, Z=Z)

        return with_callback

    assert run(model=make(0.0)).losses[0] < run(model=make(10.0)).losses[0]


def test_the_store_is_bounded(monkeypatch):
    monkeypatch.setattr(kept, "_kept", type(kept._kept)())
    monkeypatch.setattr(kept, "MOST_KEPT", 3)
    for key in "abcad":
        kept.compiled(key, lambda key=key: key)
    assert list(kept._kept) == ["c", "a", "d"]


def test_checks_are_those_of_the_call():
    """Programs may be equal where messages are not."""

    def checked(name):
        def program(x):
            def check(x):
                if x < 0:
                    raise ValueError(f"{name} is negative")

            ogp.errors.inspect(check, x * 2.0)
            return x

        return program

    assert kept.run_checked(checked("a"), 1.0) == 1
    with pytest.raises(ValueError, match="b is negative"):
        kept.run_checked(checked("b"), -1.0)


def test_a_program_that_checks_its_values_is_kept(compilations):
    """It has gradients, by its arguments and by what it closes over."""

    def shifted(by):
        def function(x):
            inspect(lambda x: x.min() > 0 or pytest.fail("not positive"), x)
            return x + by

        return function

    assert kept.run_as_one(shifted(0.5), X[0] ** 2)[0] == X[0, 0] ** 2 + 0.5
    compilations.clear()
    assert kept.run_as_one(shifted(0.7), X[1] ** 2)[0] == X[1, 0] ** 2 + 0.7
    assert not compilations
    with pytest.raises(pytest.fail.Exception, match="not positive"):
        kept.run_as_one(shifted(0.5), -(X[0] ** 2))
    ones = jnp.ones(2)
    assert jax.grad(lambda x: kept.run_as_one(shifted(0.5), x * ones).sum())(1.0) == 2
    assert jax.grad(lambda by: kept.run_as_one(shifted(by), ones).sum())(1.0) == 2
    assert jax.jit(lambda x: kept.run_as_one(shifted(0.5), x))(ones)[0] == 1.5
