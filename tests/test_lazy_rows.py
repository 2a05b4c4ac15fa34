"""``lazy_rows``: steps of single rows beside NumPy, beside dense optimizers, and within ``fit`` as a whole."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.gaussians.natural_gradient import is_waiting
from numpyro_orthgp.training.batches import Batch, Batches
from numpyro_orthgp.training.lazy_rows import rows_of
from numpyro_orthgp.training.loop import seed_of
from numpyro_orthgp.training.steps import update_of
from tests.fitting import assert_close, assert_same_bits
from tests.test_fit_devices import assert_said, start

KEY = jax.random.PRNGKey(3)
N, B, Q = 20, 7, 2


def outputs(num=N):
    return np.random.default_rng(0).normal(size=(num, Q))


# ---------------------------------------------------------------- beside NumPy


def means(Y, num=N):
    """Mean and scale of each row, and a level that all rows have."""
    level = numpyro.param("level", jnp.zeros((), Y.dtype))
    with numpyro.plate("data", num, subsample_size=len(Y)):
        loc = numpyro.param("loc", jnp.ones((num, Q), Y.dtype), event_dim=1)
        scale = numpyro.param("scale", jnp.full(num, 2.0, Y.dtype), constraint=constraints.positive, event_dim=0)
        numpyro.sample("y", dist.Normal(loc + level, scale[:, None]).to_event(1), obs=Y)


def adam_of_rows(Y, batches, rate, beta=(0.9, 0.999), eps=1e-8):
    """Kingma and Ba 2015, Alg. 1, of each row by itself, with a count of its own; ``rate`` is of the steps of the fit.

    The loss is N / B times the sum over the batch of minus log Normal(y; loc + level, scale), by log scale.
    """
    x = {"level": np.zeros(1), "loc": np.ones((N, Q)), "log_scale": np.full((N, 1), np.log(2.0))}
    m, v = ({name: np.zeros_like(a) for name, a in x.items()} for _ in range(2))
    t = {"level": np.zeros(1), "loc": np.zeros((N, 1)), "log_scale": np.zeros((N, 1))}
    for step, rows in enumerate(batches):
        g = {name: np.zeros_like(a) for name, a in x.items()}
        seen = np.zeros(N, bool)
        for n in rows:
            s2 = np.exp(2 * x["log_scale"][n])
            r = x["loc"][n] + x["level"] - Y[n]
            g["loc"][n] += N / len(rows) * r / s2
            g["level"] += N / len(rows) * np.sum(r / s2)
            g["log_scale"][n] += N / len(rows) * np.sum(1 - r**2 / s2)
            seen[n] = True
        for name, a in x.items():
            who = slice(None) if name == "level" else seen
            t[name][who] += 1
            m[name][who] = beta[0] * m[name][who] + (1 - beta[0]) * g[name][who]
            v[name][who] = beta[1] * v[name][who] + (1 - beta[1]) * g[name][who] ** 2
            corrected = [p[who] / (1 - b ** t[name][who]) for p, b in zip((m[name], v[name]), beta, strict=True)]
            a[who] -= rate(step) * corrected[0] / (np.sqrt(corrected[1]) + eps)
    return x


@pytest.mark.parametrize("injected", [False, True], ids=["schedule", "injected"])
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-10), ("float32", 2e-5)])
def test_every_row_has_an_adam_of_its_own(dtype, rtol, injected):
    """Batches of 7 of 20 rows: epochs end within them, so some have a row twice. The rate is of the steps of the fit."""
    Y, rate = outputs().astype(dtype), lambda step: 0.2 * 0.5 ** (step * 0.2)
    rows = Batches((Y,), B, seed_of(KEY)).row_numbers(0, 30)
    assert any(len(set(r)) < B for r in rows)
    wanted = adam_of_rows(Y.astype(float), rows, rate)
    optimizer = (optax.inject_hyperparams(optax.adam) if injected else optax.adam)(rate)
    svi = SVI(means, lambda Y: None, ogp.lazy_rows(optimizer), Trace_ELBO())
    params = ogp.fit(svi, KEY, (Y,), batch_size=B, num_steps=30, progress_bar=False).params
    assert params["loc"].dtype == params["scale"].dtype == dtype
    np.testing.assert_allclose(params["level"], wanted["level"][0], rtol=rtol)
    np.testing.assert_allclose(params["loc"], wanted["loc"], rtol=rtol, atol=rtol)
    np.testing.assert_allclose(params["scale"], np.exp(wanted["log_scale"][:, 0]), rtol=rtol)


# ---------------------------------------------------------------- beside dense optimizers


def gplvm(Y, N=N, likelihood=None):
    noise = numpyro.param("noise", 0.5, constraint=constraints.positive)
    f = ogp.gp("f", kernels.RBF(1.0), jnp.linspace(-1.0, 1.0, 8).reshape(4, 2), num_latents=Q)
    with numpyro.plate("data", N, subsample_size=len(Y)):
        X = ogp.latent_inputs("X", N, 2)
        fn = likelihoods.Gaussian(f(X), noise) if likelihood is None else likelihood(f(X))
        numpyro.sample("y", fn.to_event(1), obs=Y)


def fit(optimizer, model=gplvm, guide=None, Y=None, **options):
    Y = outputs() if Y is None else Y
    if guide is None:
        guide = ogp.AutoSparseGP(model, latents={"X": jnp.asarray(outputs() / 2)})
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
    return ogp.fit(svi, KEY, (Y,), **({"progress_bar": False, "num_steps": 12, "batch_size": B} | options))


def test_steps_that_see_all_rows_are_those_of_adam():
    optimizer = optax.adamw(optax.cosine_decay_schedule(0.1, 20))
    lazy, dense = (fit(o, batch_size=None, num_steps=20) for o in (ogp.lazy_rows(optimizer), optimizer))
    assert_close(lazy.losses, dense.losses, rtol=1e-10)
    assert_close(lazy.params, dense.params, rtol=1e-10)
    assert not np.allclose(lazy.params["X_scale"], 0.3)


def effects(Y):
    """A random effect of each row, beside a function."""
    f = ogp.gp("f", kernels.RBF(1.0), jnp.linspace(-1.0, 1.0, 4)[:, None])
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("data", N, subsample_size=len(Y)):
        e = numpyro.sample("e", dist.Normal(0.0, spread))
        numpyro.sample("y", likelihoods.Gaussian(f(Y[:, 1:]) + e, 0.5), obs=Y[:, 0])


def wide(Y):
    """Rows along the second of three axes."""
    with numpyro.plate("outputs", Q, dim=-2), numpyro.plate("data", N, dim=-1, subsample_size=len(Y)):
        loc = numpyro.param("loc", jnp.ones((Q, N, 2)), event_dim=1)
        numpyro.sample("y", dist.Normal(loc.sum(-1), 1.0), obs=Y.T)


CASES = {
    "latent inputs": (gplvm, None, {"X_loc", "X_scale"}),
    "effects": (effects, lambda: ogp.AutoSparseGP(effects), {"e_auto_loc", "e_auto_scale"}),
    "AutoNormal": (effects, lambda: AutoNormal(effects), {"e_auto_loc", "e_auto_scale"}),
    "rows along another axis": (wide, lambda: lambda Y: None, {"loc"}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_steps_on_batches_are_those_of_a_dense_optimizer(case):
    """Gradient descent leaves rows without a gradient where they are; so both must agree, on any batches."""
    model, guide, tables = CASES[case]
    guides = [guide and guide() for _ in range(2)]
    runs = [fit(o, model, g) for o, g in zip((ogp.lazy_rows(optax.sgd(1e-3)), optax.sgd(1e-3)), guides, strict=True)]
    assert set(runs[0].state.optim_state[1].tables) == tables
    assert_close(runs[0].losses, runs[1].losses, rtol=1e-12)
    assert_close(runs[0].params, runs[1].params, rtol=1e-12)


def test_rows_wait_where_a_natural_step_is_taken_back():
    """Counts of a million: the first natural steps are too long, and everything else waits, rows too."""
    Y = np.random.default_rng(1).poisson(1e6, (N, Q)).astype(float)
    model = partial(gplvm, likelihood=likelihoods.Poisson)
    waited = []

    def run(lazy):
        guide = ogp.AutoSparseGP(model, latents={"X": jnp.asarray(outputs() / 2)}, natural=True)
        rest = optax.sgd(1e-9)
        optimizer = ogp.natural_gradient(rest, 0.3)
        svi = SVI(model, guide, ogp.lazy_rows(optimizer, rest) if lazy else optimizer, TraceMeanField_ELBO())
        arrays = Batches((Y,), B, seed_of(KEY))
        with rows_of(svi, N, B):
            state = svi.init(KEY, *arrays.first())
        update = jax.jit(update_of(svi, N, N, {}))
        for step in range(6):
            batch = arrays.stacked(step, 1, 1, lambda shape, dtype, axis, read: read((slice(None),) * len(shape)))
            state = update(state, jax.tree.map(lambda x: jnp.asarray(x[0]), batch))[0]
            if lazy:
                waited.append(bool(is_waiting(state.optim_state[1].of_others)))
        return svi.get_params(state)

    assert_close(run(True), run(False), rtol=1e-12)
    assert any(waited) and not all(waited)


# ---------------------------------------------------------------- within fit


def test_runs_go_on_with_the_same_bits(tmp_path):
    path = tmp_path / "run.npz"
    model, guide = means, lambda Y: None
    run = partial(fit, ogp.lazy_rows(optax.adam(0.05)), model, guide)
    whole = run(num_steps=20)
    run(num_steps=9, checkpoint=path)
    assert_same_bits(tuple(run(num_steps=20, checkpoint=path)[:3]), tuple(whole[:3]))
    assert_same_bits(tuple(run(num_steps=20, steps_per_call=3)[:3]), tuple(whole[:3]))
    with pytest.raises(ValueError, match="of another run: they differ in state"):
        fit(optax.adam(0.05), model, guide, num_steps=20, checkpoint=path)
    first = run(num_steps=20, init_state=whole.state)
    assert first.losses.mean() < whole.losses.mean()
    with pytest.raises(TypeError, match="`init_state` must be the state of a fit with lazy_rows"):
        run(init_state=fit(optax.adam(0.05), model, guide, num_steps=1).state)


def test_a_row_that_becomes_nan_is_found():
    """Its gradient is NaN and its loss is not, so no loss tells of it before the row is seen again."""

    def model(Y):
        with numpyro.plate("data", N, subsample_size=len(Y)):
            loc = numpyro.param("loc", jnp.ones(N), event_dim=0)
            root = jnp.sqrt(jnp.where(Y[:, 0] == 9, loc * 0, 1.0)) + loc
            numpyro.sample("y", dist.Normal(root, 1.0, validate_args=False), obs=Y[:, 1])

    Y, guide = outputs(), lambda Y: None
    Y[4, 0] = 9
    runs = []
    for optimizer in (ogp.lazy_rows(optax.sgd(1e-3)), optax.sgd(1e-3)):
        with pytest.warns(RuntimeWarning, match="parameters after step . are nan"):
            runs.append(fit(optimizer, model, guide, Y))
    assert runs[0].status == "diverged" and runs[0].num_steps == runs[1].num_steps
    assert_close(runs[0].params, runs[1].params)
    with pytest.raises(FloatingPointError, match=r"parameters after step 0 are nan|loss of step 1"):
        fit(ogp.lazy_rows(optax.sgd(1e-3)), model, guide, Y, init_params={"loc": jnp.full(N, jnp.nan)})


def test_work_and_memory_of_a_step_do_not_know_how_many_rows_there_are():
    """Counted by XLA in the compiled loop of two steps."""

    def cost(num, optimizer):
        model = partial(means, num=num)
        svi = SVI(model, lambda Y: None, optimizer, Trace_ELBO())
        batch = jax.tree.map(jnp.asarray, (outputs(num)[:B], np.arange(B)))
        with rows_of(svi, num, B):
            state = svi.init(KEY, batch[0])

        def loop(state, Y, rows):
            step = update_of(svi, num, num, {})
            return jax.lax.fori_loop(0, Y[0, 0].astype(int), lambda _, s: step(s, Batch((Y,), rows))[0], state)

        program = jax.jit(loop).lower(state, *batch).compile()
        return program.memory_analysis().temp_size_in_bytes, program.cost_analysis()["flops"]

    few, many = (cost(num, ogp.lazy_rows(optax.adam(0.1))) for num in (1000, 100_000))
    assert few == many
    dense = [cost(num, optax.adam(0.1)) for num in (1000, 100_000)]
    assert dense[1][1] > 20 * dense[0][1] and few[1] < dense[0][1]


TWO = """
import re, sys
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_enable_x64", True)
import numpyro_orthgp as ogp
from numpyro_orthgp.training import steps
from tests.fitting import assert_close, assert_same_bits
from tests.test_lazy_rows import fit, outputs

seen, keep = [], steps.compiled
def spy(key, make):
    program = keep(key, make)
    if not hasattr(program, "lower"):  # the one that looks for NaN
        return program
    return lambda *args: (seen.append(program.lower(*args).compile().as_text()), program(*args))[1]

mesh = jax.make_mesh((2,), ("data",))
run = lambda **options: fit(ogp.lazy_rows(optax.adam(0.05)), **({"batch_size": 6} | options))
one = run()
steps.compiled = spy
many = run(mesh=mesh)
steps.compiled = keep
assert_close(tuple(many[:3]), tuple(one[:3]), rtol=1e-10)
lines = [line for line in seen[0].splitlines() if re.search(r"(all-|reduce-scatter|collective)[a-z-]*[(]", line)]
assert lines and not [line for line in lines if re.search(r"\\[20[,\\]]", line)], lines
assert "f64[10,2]" in seen[0] and "f64[20,2]" not in seen[0]  # each device has a half of each table
run(mesh=mesh, num_steps=5, checkpoint=sys.argv[1])
assert_same_bits(tuple(run(mesh=mesh, checkpoint=sys.argv[1])[:3]), tuple(many[:3]))
print("same rows on 2 devices")
"""


def test_two_devices(tmp_path):
    """Losses are those of one, and no table goes from one device to another."""
    assert_said(start(TWO, 2, tmp_path / "run.npz"), "same rows on 2 devices")


# ---------------------------------------------------------------- errors


def test_what_is_refused():
    lazy, guide = ogp.lazy_rows(optax.adam(0.1)), lambda Y: None
    with pytest.raises(TypeError, match=r"`rows` must be an optimizer of optax.* got Adam"):
        ogp.lazy_rows(numpyro.optim.Adam(0.1))
    with pytest.raises(TypeError, match="`others` must be an optimizer"):
        ogp.lazy_rows(0.1, optax.adam(0.1))
    svi = SVI(means, guide, lazy, Trace_ELBO())
    with pytest.raises(ValueError, match=r"SVI.init does not know which rows a batch holds.* use ogp.fit"):
        svi.init(KEY, outputs())
    result = ogp.fit(svi, KEY, (outputs(),), num_steps=1, progress_bar=False)
    with pytest.raises(ValueError, match=r"SVI.update does not know which rows"):
        svi.update(result.state, outputs())
    with pytest.raises(ValueError, match="no `stable_update`"):
        svi.stable_update(result.state, outputs())
    with pytest.raises(ValueError, match="takes no gradients of whole tables"):
        lazy.update({}, result.state.optim_state)
    with pytest.raises(ValueError, match=r"SVI.init does not know"):
        ogp.fit_lbfgs(svi, KEY, (outputs(),))


def in_plate(declare):
    def model(Y):
        with numpyro.plate("data", N, subsample_size=len(Y)):
            loc = declare()
            numpyro.sample("y", dist.Normal(loc, 1.0), obs=Y[:, 0])

    return model


def bounded():
    return numpyro.param("loc", jnp.ones(N), constraint=constraints.greater_than(jnp.zeros(N)), event_dim=0)


def along_rows():
    return numpyro.param("loc", jnp.ones(N) / N, constraint=constraints.simplex, event_dim=0)


def whole():
    return numpyro.param("whole", jnp.ones(N))[:B] + numpyro.param("loc", jnp.ones(N), event_dim=0)


@pytest.mark.parametrize(
    "declare, message",
    [
        (lambda: numpyro.param("loc", 1.0), r"found no parameter with a row.*subsample_size=7\), or latent_inputs"),
        (lambda: numpyro.param("loc", jnp.ones(N))[:B], "found no parameter with a row.*'loc' is none"),
        (bounded, "takes rows out of `loc`, so its constraint must be the same for all rows"),
        (along_rows, "takes rows out of `loc`, so its constraint must be"),
    ],
)
def test_parameters_that_are_no_tables(declare, message):
    with pytest.raises(ValueError, match=message):
        fit(ogp.lazy_rows(optax.adam(0.1)), in_plate(declare), lambda Y: None)


def test_a_parameter_that_is_stepped_as_a_whole_is_named():
    with pytest.warns(UserWarning, match="'whole' has 20 rows, and lazy_rows updates all of them"):
        fit(ogp.lazy_rows(optax.adam(0.1)), in_plate(whole), lambda Y: None)


def test_tables_that_are_read_elsewhere_are_refused():
    def guide(Y):
        numpyro.param("loc", jnp.ones(N))

    with pytest.raises(
        ValueError, match=r"`loc`, which has a row for each of the data, is also read outside of their plate"
    ):
        fit(ogp.lazy_rows(optax.adam(0.1)), in_plate(lambda: numpyro.param("loc", jnp.ones(N), event_dim=0)), guide)

    def nested(Y):
        with numpyro.plate("outer", 4, subsample_size=2, dim=-2):
            in_plate(lambda: numpyro.param("loc", jnp.ones((4, N)), event_dim=0))(Y)

    with pytest.raises(ValueError, match="`loc` is in several plates that pick rows"):
        fit(ogp.lazy_rows(optax.adam(0.1)), nested, lambda Y: None)


def test_rows_of_a_stream_are_not_known():
    Y = outputs()

    def model(Y):
        with numpyro.plate("rows", N, subsample_size=len(Y)):
            loc = numpyro.param("loc", jnp.zeros((N, Q)), event_dim=1)
            numpyro.sample("y", dist.Normal(loc, 1.0).to_event(1), obs=Y)

    svi = SVI(model, lambda Y: None, ogp.training.lazy_rows(optax.adam(0.1)), Trace_ELBO())
    stream = ogp.training.Stream([(Y[:5],), (Y[5:10],), (Y[10:15],), (Y[15:],)], num_rows=N, batch_size=5)
    with pytest.raises(
        ValueError, match=r"`loc` has a value for each row.*a stream does not say which rows are in a batch"
    ):
        ogp.fit(svi, KEY, stream, num_steps=2, progress_bar=False)
