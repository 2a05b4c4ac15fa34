"""Functions compiled as wholes where they are called outside of jit."""

from __future__ import annotations

import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import Partial
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import Marginals, kernels, likelihoods
from numpyro_orthgp.math.compiled import effort_for, one_program, quick_jit, quick_options
from numpyro_orthgp.math.work import elements_of


class Compiled(logging.Handler):
    """Names of the programs that JAX has compiled."""

    def __init__(self):
        super().__init__()
        self.names = []

    def emit(self, record):
        words = record.getMessage().split()
        if words[:3] == ["Finished", "XLA", "compilation"]:
            self.names.append(words[4])


@pytest.fixture
def compiled():
    handler = Compiled()
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    with jax.log_compiles():
        yield handler.names
    logger.removeHandler(handler)


def wave(scale, rows):
    return {"sum": jnp.sum(jnp.sin(rows["x"]) * scale), "rows": jnp.cosh(rows["x"])}


def test_one_program_outside_of_jit(compiled):
    rows = {"x": jnp.linspace(0, 1, 37)}
    values = one_program(wave)(2.0, rows)
    assert [name for name in compiled if "wave" in name] == ["jit(wave)"]
    assert not any("sin" in name or "cosh" in name for name in compiled)
    for name, value in wave(2.0, rows).items():
        assert_allclose(values[name], value, rtol=1e-14)


def test_inside_of_a_trace_it_is_the_function(compiled):
    rows = {"x": jnp.linspace(0, 1, 41)}
    call = one_program(wave)
    for inside in (call, jax.grad(lambda s, rows: call(s, rows)["sum"])):
        assert "wave" not in str(jax.make_jaxpr(inside)(2.0, rows))
    assert jax.vmap(lambda s: call(s, rows)["sum"])(jnp.ones(3)).shape == (3,)
    assert "jit(wave)" not in compiled


def test_one_program_under_grad(compiled):
    """NumPyro takes a gradient outside of jit before NUTS and its guides start."""
    rows = {"x": jnp.linspace(0, 1, 47)}
    slope, curvature = (d(lambda s: one_program(wave)(s, rows)["sum"] * s) for d in (jax.grad, jax.hessian))
    total = np.sin(np.linspace(0, 1, 47)).sum()
    assert_allclose(slope(2.0), 4 * total, rtol=1e-12)
    assert "jit(wave)" in compiled
    assert not any("sin" in name or "cosh" in name for name in compiled)
    assert_allclose(curvature(2.0), 2 * total, rtol=1e-12)


def test_functions_among_the_arguments_are_not_compiled_anew_each_time(compiled):
    for _ in range(3):
        value = one_program(lambda f, x: f(x))(Partial(lambda x: 2 * x), jnp.ones(43))
        assert value.sum() == 86
    assert not any("lambda" in name for name in compiled)


class Settings(NamedTuple):
    """A pytree of which one leaf is no array."""

    scale: float
    words: str


def test_what_jit_would_refuse_is_not_compiled():
    argument = Settings(2.0, "a")
    with pytest.raises(TypeError):
        jax.jit(lambda a: 3 * a.scale)(argument)
    assert one_program(lambda a: 3 * a.scale)(argument) == 6


@pytest.mark.parametrize("kernel", [kernels.Matern32(0.7), lambda X, Y=None: kernels.Matern32(0.7)(X, Y)])
def test_functions_of_gps_outside_of_jit(rng, kernel):
    """The same numbers, for kernels that are pytrees and for functions, which are not compiled."""
    Z, X = jnp.asarray(rng.normal(size=(5, 2))), jnp.asarray(rng.normal(size=(8, 2)))

    def moments():
        with handlers.seed(rng_seed=0):
            f = ogp.gp("f", kernel, [Z, Z + 0.3])
            joint = f.joint(X)
        return f(X).mean, f(X).residual, joint.mean, joint.covariance_matrix

    for a, b in zip(moments(), jax.jit(moments)(), strict=True):
        assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_few_programs_from_a_prior_draw_to_marginals(rng, compiled):
    Z, X = jnp.asarray(rng.normal(size=(6, 3))), jnp.asarray(rng.normal(size=(9, 3)))
    with handlers.seed(rng_seed=0):
        f = ogp.gp("f", 1.3 * kernels.Matern32(0.7), [Z, Z + 0.3])
    f(X)
    assert {"jit(decompose_sets)", "jit(_moments)"} <= set(compiled)
    # What is left are the draws of NumPyro and the checks of inputs; operation by operation they would be more than a hundred.
    assert len(compiled) < 40


@pytest.mark.parametrize("plain", [False, True])
def test_collapsed_bounds_outside_of_jit(rng, compiled, plain):
    """One program for the bound, its gradient and the posterior each; for kernels that are functions the same numbers."""
    X, y = jnp.asarray(rng.normal(size=(11, 2))), jnp.asarray(rng.normal(size=11))

    def make(scale):
        kernel = kernels.Matern32(scale)
        return ogp.CollapsedGP((lambda X, Y=None: kernel(X, Y)) if plain else kernel, X, X[::3], 0.3)

    def everything(scale):
        gp = make(scale)
        f = gp.posterior(y)
        return gp.log_prob(y), gp.upper_bound(y), f(X).mean, jax.grad(lambda s: make(s).log_prob(y))(scale)

    found = everything(0.7)
    ours = {"jit(_log_bound)", "jit(_log_upper_bound)", "jit(_optimum)"}
    assert ours.isdisjoint(compiled) if plain else ours <= set(compiled)
    if not plain:
        assert not {"jit(cholesky)", "jit(triangular_solve)"} & set(compiled)
    for a, b in zip(found, jax.jit(everything)(0.7), strict=True):
        assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_few_programs_start_the_guide(rng, compiled):
    """`svi.init` is not compiled as a whole; what q starts from and how it is stored are one program each."""
    Z = jnp.asarray(rng.normal(size=(7, 3)))

    def model():
        ogp.gp("f", kernels.RBF(0.7), [Z])

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO())
    state = svi.init(jax.random.PRNGKey(0))
    assert {"jit(_scaled_identity)", "jit(_any_diagonal)"} <= set(compiled)
    assert not {"jit(expm1)", "jit(eye)", "jit(diagonal)"} & set(compiled)
    assert_allclose(svi.get_params(state)["f.u0_scale_tril"], np.eye(7), rtol=1e-12)


def test_new_rows_of_a_gplvm_are_inferred_by_one_program(rng, compiled):
    """For noise as an array it is kept; a likelihood may read what has changed since, and is traced anew."""
    X, Y = jnp.linspace(-2, 2, 12)[:, None], jnp.asarray(rng.normal(size=(12, 3)))
    f = ogp.CollapsedGP(kernels.RBF(0.8), X, X[::3], 0.1, num_outputs=3).posterior(Y)

    def names(*args):
        compiled.clear()
        elbo = ogp.infer_latents(f, *args, num_steps=2, num_samples=4).elbo
        return elbo, [name for name in compiled if "infer" in name or "lambda" in name]

    assert names(Y[:2], 0.1)[1] == ["jit(_infer)"]
    again, kept = names(Y[2:4], 0.3)
    assert kept == []
    scale = 0.1
    likelihood = lambda m: ogp.likelihoods.Gaussian(m, scale)  # noqa: E731
    other, _ = names(Y[2:4], likelihood)
    scale = 0.3
    changed, _ = names(Y[2:4], likelihood)
    assert_allclose(changed, again, rtol=1e-9)
    assert not np.allclose(other, again)


def test_quick_programs_are_the_same_functions_alone_and_within_others():
    """XLA takes its options for whole programs only: within another one, and under `vmap` and `grad`, they are left out."""

    def f(x, power):
        return jnp.sin(x) ** power

    x = jnp.linspace(0.1, 1.0, 5)
    for effort in (0, 1):
        quick = quick_jit(f, effort, static_argnums=1)
        np.testing.assert_allclose(quick(x, 3), f(x, 3), rtol=1e-6)
        np.testing.assert_allclose(jax.jit(lambda x, quick=quick: 2 * quick(x, 3))(x), 2 * f(x, 3), rtol=1e-6)
        np.testing.assert_allclose(jax.jit(lambda quick=quick: quick(np.ones(2), 3))(), f(np.ones(2), 3), rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(lambda x, quick=quick: quick(x, 3))(x), f(x, 3), rtol=1e-6)
        slope = jax.grad(lambda x, quick=quick: quick(x, 3).sum())(x)
        np.testing.assert_allclose(slope, 3 * jnp.sin(x) ** 2 * jnp.cos(x), rtol=1e-5)


def test_programs_at_a_prompt_are_compiled_quickly_where_they_are_small(monkeypatch):
    asked = []
    monkeypatch.setattr("numpyro_orthgp.math.compiled.quick_options", lambda effort: asked.append(effort))
    total = one_program(lambda x, y: (x * y).sum())
    assert total(jnp.ones(3), jnp.ones(3)) == 3 and total(jnp.ones(4), 2.0) == 8 and asked == [1]
    assert total(np.ones((200, 100)), 2.0) == 40_000 and asked == [1, 2]
    assert_allclose(jax.grad(total)(jnp.ones(3), 2.0), 2 * np.ones(3))
    assert asked == [1, 2] and jax.jit(total)(jnp.ones(3), 2.0) == 6
    monkeypatch.undo()
    options = {"xla_backend_optimization_level": 1}
    monkeypatch.setattr("numpyro_orthgp.math.compiled.quick_options", lambda effort: options if effort == 1 else None)
    total = one_program(lambda x, y: (x * y).sum())  # XLA takes options of whole programs only
    assert jax.jit(lambda x: x + total(np.ones(3), 2.0))(1.0) == 7 and total(np.ones(3), 2.0) == 6
    assert jax.vmap(lambda x: x + total(np.ones(3), 2.0))(jnp.ones(2)).tolist() == [7, 7]
    assert jax.grad(lambda x: x * total(np.ones(3), 2.0))(1.0) == 6
    assert jax.eval_shape(lambda x: x + total(np.ones(3), 2.0), 1.0).shape == ()


def test_work_counts_loops_as_often_as_they_run():
    x = jnp.ones(1000)

    def elements(function):
        return elements_of(jax.make_jaxpr(function)(x).jaxpr)

    def loop(x, step=jnp.sin):
        return jax.lax.scan(lambda c, _: (step(c), None), x, None, 50)[0]

    assert elements(jnp.sin) == 1000 and elements(jax.jit(jnp.sin)) == 1000
    assert elements(loop) == 50_000 and elements(lambda x: loop(x, loop)) == 2_500_000
    assert elements(lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)) > 2000
    assert effort_for(elements(loop)) == 1 and effort_for(2**28) == 2
    counts = likelihoods.Poisson(Marginals(x, x, 0 * x))  # each has integrals of its own, in loops over nodes
    normal = likelihoods.Gaussian(Marginals(x, x, 0 * x), 1.0)
    found = [elements(of.log_predictive) for of in (normal, counts)]
    assert found[0] < 10**5 < 10**7 < found[1]


def test_quick_options_are_those_of_the_platform_and_of_an_xla_that_has_them(monkeypatch):
    look, level = quick_options.__wrapped__, "xla_backend_optimization_level"
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert [look(effort)[level] for effort in (0, 1)] == [0, 1] and look(2) is None
    monkeypatch.setenv("XLA_FLAGS", f"--{level}=2")
    assert look(1) is None  # who chose a level has it
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert look(0) == {"xla_gpu_autotune_level": 0} and look(1) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert look(0) is None
    monkeypatch.undo()

    def refuse(*args, **options):
        raise ValueError("No such compile option")

    monkeypatch.setattr(jax, "jit", refuse)
    assert look(0) is None
