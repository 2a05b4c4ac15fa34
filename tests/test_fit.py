"""The training loop: what a step sees, the same bits however steps are grouped, stopping, and what users get wrong."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.loop import seed_of
from numpyro_orthgp.training.plan import Plan
from numpyro_orthgp.training.result import FitResult
from numpyro_orthgp.training.stopping import Windows
from tests import problems
from tests.fitting import KEY, N, assert_close, assert_same_bits, by_hand, data, guide, make, model


def fit(svi, arrays=None, **options):
    options = {"progress_bar": False, "batch_size": 8} | options
    return ogp.fit(svi, KEY, data() if arrays is None else arrays, **options)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("batch_size", [1, 7, 8, 25, 49])
def test_every_epoch_sees_each_row_once(batch_size):
    batches = Batches((np.arange(N),), batch_size, (0, 1))
    rows = batches.row_numbers(0, 4 * N).ravel()  # whole epochs
    epochs = rows.reshape(-1, N)
    assert (np.sort(epochs, axis=1) == np.arange(N)).all()
    assert len({tuple(e) for e in epochs}) == len(epochs)
    for step in (0, 3, 11, 60):  # any step by itself, in any order
        np.testing.assert_array_equal(batches.row_numbers(step, 2).ravel(), rows[step * batch_size :][: 2 * batch_size])
    assert (Batches((np.arange(N),), batch_size, (0, 2)).row_numbers(0, N).ravel() != rows[: N * batch_size]).any()


def test_rows_at_a_position_are_uniform():
    """Also where batches span the end of an epoch, which keeps minibatch losses unbiased."""
    draws = np.asarray([Batches((np.arange(5),), 3, (seed,)).row_numbers(0, 3).ravel() for seed in range(2000)])
    counts = np.asarray([np.bincount(column, minlength=5) for column in draws.T])  # (9 positions, 5 rows)
    assert (np.abs(counts - 400) < 4.5 * np.sqrt(2000 * 0.2 * 0.8)).all()


def test_steps_are_those_of_svi_on_these_rows():
    svi = make()
    states, losses = by_hand(svi, KEY, data(), 8, 30)
    result = fit(svi, num_steps=30)
    assert result.status == "finished" and result.num_steps == 30 and len(result.losses) == 30
    assert_close((result.losses, result.state), (losses, states[-1]))
    assert_close(result.params, svi.get_params(states[-1]))


def test_all_data_at_every_step_is_svi_run():
    svi, (X, y) = make(), data()
    expected = svi.run(KEY, 60, jnp.asarray(X), jnp.asarray(y), progress_bar=False)
    for options in ({"batch_size": None}, {"batch_size": N}):
        result = fit(svi, num_steps=60, **options)
        assert_close(tuple(result[:3]), tuple(expected))
    assert_same_bits(fit(svi, {"X": X, "y": y}, batch_size=None, num_epochs=60).losses, result.losses)


def test_epochs_are_counted_in_rows():
    assert [len(fit(make(), num_epochs=e).losses) for e in (1, 2, 4)] == [7, 13, 25]  # 50 rows, 8 at a time


def test_data_may_be_nested_mapped_and_of_any_numeric_dtype(tmp_path):
    X, y = data()
    on_disk = np.memmap(tmp_path / "X", dtype=np.float32, mode="w+", shape=X.shape)
    on_disk[:] = X

    def nested(batch, scale, N=N):
        model(batch["inputs"][0] * scale[0], jnp.where(batch["kept"], batch["y"], 0.0), N=N)

    arrays = (
        {"inputs": (on_disk,), "kept": np.arange(N) % 2 == 0, "y": jnp.asarray(y)},
        np.ones((N, 1), np.int8),
        None,
    )
    svi = make(model=lambda *batch: nested(*batch[:2]), guide=lambda *batch: guide(batch))
    result = fit(svi, arrays, num_steps=12)
    plain = fit(make(), (X.astype(np.float32), np.where(np.arange(N) % 2 == 0, y, 0.0)), num_steps=12)
    np.testing.assert_allclose(result.losses, plain.losses, rtol=1e-6)


# ---------------------------------------------------------------- calls to the device


def solve_gp(optimizer=None, **guide):
    rng = np.random.default_rng(1)
    X, y = problems.data(rng, N)
    sets = [jnp.asarray(s) for s in problems.sets(rng, [4, 3])]
    svi = make(optimizer, TraceMeanField_ELBO(), problems.model, ogp.AutoSparseGP(problems.model, **guide))
    return svi, (X, y), {"inducing": sets, "likelihood": problems.gaussian(0.3), "jitter": None, "N": N}


def test_grouping_of_steps_does_not_change_a_bit():
    one = fit(make(), num_steps=70, steps_per_call=1)
    for steps in (7, 64, None):
        assert_same_bits(tuple(fit(make(), num_steps=70, steps_per_call=steps)[:3]), tuple(one[:3]))


@pytest.mark.slow
def test_grouping_of_steps_does_not_change_a_bit_of_solve_gp():
    svi, arrays, kwargs = solve_gp(residual="tight")
    one, *others = (fit(svi, arrays, num_steps=70, steps_per_call=steps, **kwargs) for steps in (1, 2, 7, 64, None))
    for other in others:
        assert_same_bits(tuple(other[:3]), tuple(one[:3]))


def test_a_step_is_compiled_once():
    calls = []

    def counted(X, y=None):
        calls.append(len(X))
        model(X, y)

    svi = make(model=counted)
    svi.init(KEY, *(jnp.asarray(a[:8]) for a in data()))
    calls.clear()
    fit(svi, num_steps=3, steps_per_call=5)
    once = len(calls)
    calls.clear()
    fit(svi, num_steps=61, steps_per_call=5, early_stopping=ogp.EarlyStopping(99, every=9))
    assert len(calls) == once


def test_calls_end_where_something_is_to_be_done():
    plan = Plan(100, [30, 40], 25, 0, may_adapt=True)
    step, ends = 0, []
    while num := plan.length(step):
        step += num
        ends.append(step)
        plan.took(num, 1e-9)
    assert ends == [25, 30, 40, 60, 80, 90, 100]


def test_calls_get_shorter_when_steps_are_slow():
    plan = Plan(10**6, [], None, 2**20, may_adapt=True)
    assert plan.capacity == 16  # megabytes
    for seconds, expected in ((0.001, 16), (0.1, 5), (3.0, 1), (1e-9, 16)):
        plan.took(1, seconds)
        assert plan.length(0) == expected
    fixed = Plan(10**6, [], None, 2**20, may_adapt=False)
    fixed.took(1, 3.0)
    assert fixed.length(0) == 16


def test_callback_and_progress_bar(capfd):
    seen = []
    result = fit(make(), num_steps=20, steps_per_call=8, callback=seen.append, progress_bar=True)
    assert [p.step for p in seen] == [8, 16, 20] and [p.epoch for p in seen] == [64 / 50, 128 / 50, 160 / 50]
    assert_same_bits(np.concatenate([p.losses for p in seen]), result.losses)
    assert seen[-1].elbo == -np.mean(result.losses[16:])
    assert_same_bits(seen[-1].params(), result.params)
    assert_same_bits(seen[0].params(), fit(make(), num_steps=8).params)
    shown = capfd.readouterr().err
    assert "20/20" in shown and f"ELBO {seen[-1].elbo:.6g}" in shown and "epoch 3.20" in shown
    fit(make(), num_steps=20)
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------- any SVI


def hand_written(X, y=None):
    loc = numpyro.param("loc", lambda key: jax.random.normal(key, (3,)))
    scale = numpyro.param("scale", 0.5 * jnp.ones(3), constraint=dist.constraints.positive)
    numpyro.sample("w", dist.Normal(loc, scale).to_event(1))


ANY = {
    "AutoNormal": lambda: (make(guide=AutoNormal(model)), data(), {}),
    "particles": lambda: (make(loss=Trace_ELBO(num_particles=3)), data(), {}),
    "constrained": lambda: (make(guide=hand_written), data(), {}),
    "numpyro's Adam": lambda: (make(numpyro.optim.Adam(0.05)), data(), {}),
    "schedule": lambda: (make(optax.adam(optax.cosine_decay_schedule(0.1, 15))), data(), {}),
    "SOLVE-GP": lambda: solve_gp(),
    "natural": lambda: solve_gp(ogp.natural_gradient(optax.adam(0.01), 0.3), natural=True),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "SOLVE-GP")) for n in ANY])
def test_any_svi(name):
    svi, arrays, kwargs = ANY[name]()
    states, losses = by_hand(svi, KEY, arrays, 8, 20, **kwargs)
    result = fit(svi, arrays, num_steps=20, steps_per_call=6, **kwargs)
    assert_close((result.losses, result.params), (losses, svi.get_params(states[-1])), rtol=1e-9)
    if name == "schedule":  # the last five steps have a rate of zero
        assert_close(svi.get_params(states[15]), result.params)


def test_mutable_state():
    def counting(X, y=None):
        count = numpyro.primitives.mutable("count", {"steps": jnp.zeros(())})
        model(X, y)
        count["steps"] += 1

    result = fit(make(model=counting), num_steps=20, steps_per_call=6)
    assert result.state.mutable_state["count"]["steps"] == 20 + 1  # once more while it was initialised


def test_starts():
    svi = make()
    first = fit(svi, batch_size=None, num_steps=10)
    halves = fit(svi, batch_size=None, num_steps=10, init_state=first.state)
    assert_same_bits(halves.state, fit(svi, batch_size=None, num_steps=20).state)
    start = {"loc": jnp.asarray([3.0, 2.0, 1.0])}
    unmoved = fit(make(optax.sgd(0.0)), num_steps=1, init_params=start)
    assert_same_bits(unmoved.params["loc"], start["loc"])
    typed = ogp.fit(svi, jax.random.key(3), data(), num_steps=10, progress_bar=False)
    assert_same_bits(typed.losses, first.losses)


def test_starts_that_no_parameter_has_are_warned_of():
    start = {"loc": jnp.ones(3), "lok": jnp.ones(3)}
    with pytest.warns(UserWarning, match=r"`init_params` has 'lok', of which .*They have 'loc'\."):
        fit(make(), num_steps=1, init_params=start)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(make(), num_steps=1, init_params={"loc": jnp.ones(3)})


# ---------------------------------------------------------------- stopping


def test_windows():
    windows = Windows()
    for step, score in enumerate([5.0, 4.0, 3.9, 3.7, np.nan, 3.4, 9.0], 1):
        windows = windows.after(score, step, f"state {step}", min_delta=0.5)
    # 3.9 and 3.7 are better than 4 but by too little; 3.4 is an improvement on 4.
    assert windows == Windows(3.4, 6, "state 6", 3.4, 1)


def test_early_stopping_by_metric_returns_the_best_state():
    scores = iter([3.0, 2.0, 2.5, 2.5, 0.0])
    rule = ogp.EarlyStopping(patience=2, every=5, metric=lambda params: next(scores))
    result = fit(make(), num_steps=100, early_stopping=rule)
    assert (result.status, result.num_steps, len(result.losses)) == ("stopped early", 10, 20)
    assert_same_bits(result.state, fit(make(), num_steps=10).state)


def test_early_stopping_by_mean_loss():
    rise_after_30 = optax.adam(lambda step: jnp.where(step < 30, 0.05, -0.05))
    result = fit(make(rise_after_30), num_steps=1000, early_stopping=ogp.EarlyStopping(3, every=10))
    means = result.losses.reshape(-1, 10).mean(1)
    best = means.argmin()
    assert result.status == "stopped early" and len(means) == best + 1 + 3
    assert result.num_steps == 10 * (best + 1) and 30 <= result.num_steps <= 40
    assert_same_bits(result.params, fit(make(rise_after_30), num_steps=result.num_steps).params)
    assert fit(make(), num_steps=40, early_stopping=ogp.EarlyStopping(3, every=10)).status == "finished"


def test_ctrl_c_returns_the_best_so_far():
    def interrupt(progress):
        if progress.step >= 120:
            raise KeyboardInterrupt

    result = fit(make(), num_steps=500, steps_per_call=30, callback=interrupt)  # windows are epochs: 8 of 7 steps
    assert result.status == "interrupted" and len(result.losses) == 142
    means = result.losses[:112].reshape(2, 56).mean(1)
    assert result.num_steps == 56 * (means.argmin() + 1) == 112
    assert_same_bits(result.state, fit(make(), num_steps=112).state)
    early = fit(
        make(), num_steps=500, steps_per_call=120, callback=interrupt, early_stopping=ogp.EarlyStopping(1, every=400)
    )
    assert early.num_steps == 120  # no window is complete: the last state


# ---------------------------------------------------------------- losses that are not finite


def with_bad_row(step):
    """Data whose row that is seen last by ``step`` steps is NaN, so that the loss of that step is the first bad one."""
    X, y = data()
    rows = Batches((X,), 8, tuple(np.asarray(KEY))).row_numbers(0, 6)
    y[rows[step, 0]] = np.nan
    assert step == np.argmax((rows == rows[step, 0]).any(1))
    return X, y


@pytest.fixture(scope="module")
def good_states():
    return by_hand(make(), KEY, data(), 8, 5)[0]


@pytest.mark.parametrize("bad, steps_per_call", [(1, 1), (3, 1), (1, 3), (3, 3), (4, 3), (5, 3), (1, 64), (5, 64)])
def test_nan_returns_the_last_state_whose_loss_was_finite(good_states, bad, steps_per_call):
    with pytest.warns(
        RuntimeWarning,
        match=rf"loss of step {bad + 1} is (nan|inf), .* in row .*after step {bad - 1}\b.*impute such rows",
    ) as found:
        result = fit(make(), with_bad_row(bad), num_steps=20, steps_per_call=steps_per_call)
    assert found[0].filename == __file__
    assert (result.status, result.num_steps, len(result.losses)) == ("diverged", bad - 1, bad)
    assert np.isfinite(result.losses).all()
    assert f"{-result.losses[-1]:.6g}" in str(found[0].message)
    assert_close(result.state, good_states[bad - 1])


def test_nan_at_the_first_step_is_an_error():
    with pytest.raises(
        FloatingPointError, match=r"loss of step 1 is (nan|inf), .* in row .*Remove or impute such rows"
    ):
        fit(make(), with_bad_row(0), num_steps=20)


def test_parameters_that_become_nan_at_the_end_are_not_returned():
    def kink(X, y=None):
        a = numpyro.param("a", jnp.asarray(0.0))
        numpyro.factor("kink", -jnp.sqrt(jnp.square(a)))  # 0 at 0, where its gradient is 0 / 0

    svi = make(model=kink, guide=lambda X, y=None: None)
    with pytest.warns(RuntimeWarning, match="parameters after step 1 are nan: .*standardize"):
        result = fit(svi, num_steps=1)
    assert (result.status, result.num_steps, float(result.params["a"])) == ("diverged", 0, 0.0)
    assert result.losses.tolist() == [0.0]


@pytest.mark.parametrize("steps_per_call", [1, 3, 10, 64, None])
def test_parameters_that_no_loss_sees_for_long_are_not_returned_as_nan(tmp_path, steps_per_call):
    """One parameter for each row, NaN after a step that sees its row: neither results nor files depend on where calls end."""
    start = jnp.where(jnp.arange(N) == 7, 0.0, 1.0)

    def kinks(i, y):
        z = numpyro.param("z", start)[i]
        numpyro.factor("kinks", -jnp.sum(jnp.sqrt(z**2)) - jnp.sum((y - z) ** 2))

    svi, file, arrays = make(model=kinks, guide=lambda i, y: None), tmp_path / "run.npz", (np.arange(N), np.ones(N))
    seen = int(np.argmax((Batches(arrays, 2, seed_of(KEY)).row_numbers(0, N // 2) == 7).any(1))) + 1
    options = {"batch_size": 2, "num_steps": N // 2, "steps_per_call": steps_per_call, "checkpoint": file}
    assert 5 < seen < N // 2 - 3
    with pytest.warns(
        RuntimeWarning, match=rf"parameters after step {seen} are nan: .* returns what it had after step {seen - 1}\b"
    ):
        result = ogp.fit(svi, KEY, arrays, progress_bar=False, **options)
    assert (result.status, result.num_steps, len(result.losses)) == ("diverged", seen - 1, seen)
    assert np.isfinite(result.params["z"]).all() and result.params["z"][7] == 0
    with np.load(file) as saved:
        assert all(np.isfinite(saved[name]).all() for name in saved.files if name.startswith("state"))


def test_a_loss_that_fails_after_its_parameters_did():
    """The earlier of the two counts: here a loss is not finite within the call at whose start a parameter became NaN."""

    def kinks(i, y):
        z = numpyro.param("z", jnp.where(jnp.arange(4) == 1, 0.0, 1.0))
        step = numpyro.param("step", jnp.zeros(()))
        numpyro.factor("kinks", -jnp.sum(jnp.sqrt(z[i] ** 2)) - jnp.where(step < -3, jnp.nan, step))

    svi = make(optax.sgd(1.0), model=kinks, guide=lambda i, y: None)
    rows = Batches((np.arange(4),), 1, seed_of(KEY)).row_numbers(0, 8)[:, 0]
    seen = int(np.argmax(rows == 1)) + 1
    assert seen <= 4
    with pytest.warns(RuntimeWarning, match=f"parameters after step {seen} are nan"):
        result = ogp.fit(svi, KEY, (np.arange(4), np.zeros(4)), batch_size=1, num_steps=8, progress_bar=False)
    assert result.num_steps == seen - 1 and np.isfinite(result.params["z"]).all()


def test_byte_order_and_masks_without_masked_entries():
    arrays = data()
    swapped = tuple(a.astype(a.dtype.newbyteorder()) for a in arrays)
    unmasked = tuple(np.ma.masked_invalid(a) for a in arrays)
    for given in (swapped, unmasked):
        for batch_size in (8, None):
            found = ogp.fit(make(), KEY, given, batch_size=batch_size, num_steps=5, progress_bar=False)
            wanted = ogp.fit(make(), KEY, arrays, batch_size=batch_size, num_steps=5, progress_bar=False)
            np.testing.assert_array_equal(found.losses, wanted.losses)


# ---------------------------------------------------------------- what users get wrong

X, y = data()
RESULT = FitResult({}, None, np.zeros(0), "finished", 0)
WRONG = {
    "neither": ({}, ValueError, "Exactly one of `num_epochs` and `num_steps` must be given; got neither"),
    "both": ({"num_steps": 1, "num_epochs": 1}, ValueError, "got both"),
    "no steps": ({"num_steps": 0}, ValueError, "`num_steps` must be a positive integer; got 0"),
    "half an epoch": ({"num_epochs": 0.5}, ValueError, "`num_epochs` must be a positive integer; got 0.5"),
    "lengths": ({"data": (X, y[:-1])}, ValueError, r"same number of rows; got 50 in data\[0\], 49 in data\[1\].*keyword"),
    "empty": ({"data": (X[:0], y[:0])}, ValueError, "`data` must hold at least one row"),
    "no arrays": ({"data": ()}, ValueError, "`data` must hold at least one row; got no arrays"),
    "array": ({"data": X}, TypeError, r"tuple of arrays.*\(X, y\).*got ndarray"),
    "list": ({"data": [X, y]}, TypeError, "`data` must be a tuple of arrays.*got list"),
    "lists": ({"data": {"X": X.tolist()}}, TypeError, r"`data\['X'\]\[0\]\[0\]` must be an array; got float"),
    "strings": ({"data": (X, np.asarray(["a"] * N))}, TypeError, r"`data\[1\]` must hold numbers"),
    "number": ({"data": (X, np.float64(3.0))}, ValueError, r"`data\[1\]` must have a first axis"),
    "large": ({"batch_size": 51}, ValueError, "`batch_size` must be at most the number of rows N = 50; got 51"),
    "float": ({"batch_size": 8.0}, ValueError, "`batch_size` must be a positive integer; got 8.0"),
    "zero": ({"batch_size": 0}, ValueError, "`batch_size` must be a positive integer; got 0"),
    "svi": ({"svi": model}, TypeError, "`svi` must be a numpyro.infer.SVI; got function"),
    "key": ({"rng_key": 3}, TypeError, r"`rng_key` must be a key, such as jax.random.PRNGKey\(0\); got 3"),
    "mesh": ({"mesh": 4}, TypeError, "`mesh` must be a jax.sharding.Mesh; got int"),
    "call": ({"steps_per_call": 0}, ValueError, "`steps_per_call` must be a positive integer; got 0"),
    "every": ({"checkpoint": "x.npz", "checkpoint_every": 0}, ValueError, "`checkpoint_every` must be a positive integer"),
    "masked": ({"data": (X, np.ma.masked_greater(y, 0))}, TypeError, r"`data\[1\]` is a masked array with entries missing.*filled"),
    "keys": ({"data": {0: X, "y": y}}, TypeError, "Keys of `data` are names of the model's arguments; got"),
    "callback": ({"callback": 3}, TypeError, "`callback` must be a function of a Progress; got int"),
    "result": ({"init_state": RESULT}, TypeError, r"`init_state` must be a part of a FitResult, result.state; got all of it"),
    "params": ({"init_params": RESULT}, TypeError, r"`init_params` must be a part of a FitResult, result.params"),
    "stopping": ({"early_stopping": 3}, TypeError, "`early_stopping` must be an EarlyStopping; got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, kind, message = WRONG[name]
    options = {"svi": make(), "rng_key": KEY, "data": (X, y), "progress_bar": False, "batch_size": 8} | options
    if name not in ("neither", "both", "half an epoch"):
        options = {"num_steps": 2} | options
    with pytest.raises(kind, match=message):
        ogp.fit(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"patience": 0}, "`patience` must be a positive integer; got 0"),
        ({"patience": 1, "every": 0}, "`every` must be a positive integer"),
        ({"patience": 1, "min_delta": -1.0}, "`min_delta` must not be negative; got -1.0"),
    ],
)
def test_errors_of_early_stopping(options, message):
    with pytest.raises(ValueError, match=message):
        ogp.EarlyStopping(**options)


def test_a_fit_within_a_program_is_refused():
    """It said that a key was no key."""
    key = jax.random.PRNGKey(0)
    options = {"num_steps": 1, "progress_bar": False}
    for fit in (partial(ogp.fit, **options), partial(ogp.fit_lbfgs, num_steps=1)):
        svi = SVI(model, AutoNormal(model), optax.adam(0.1), TraceMeanField_ELBO())
        within = {
            "all": lambda X, y, fit=fit, svi=svi: jax.jit(lambda X, y: fit(svi, key, (X, y)).losses)(X, y),
            "key": lambda X, y, fit=fit, svi=svi: jax.jit(lambda key: fit(svi, key, (X, y)).losses)(key),
            "data": lambda X, y, fit=fit, svi=svi: jax.vmap(lambda y: fit(svi, key, (X, y)).losses)(y[None]),
        }
        for call in within.values():
            with pytest.raises(TypeError, match=r"cannot be within jax\.jit, vmap or grad: call it outside"):
                call(X, y)


# ---------------------------------------------------------------- what is local to a row


def local_effects(y, *, N):
    """An effect for each row: its posterior given y is Gaussian and known."""
    with numpyro.plate("rows", N, subsample_size=len(y)):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(effect, 0.5), obs=y)


def test_plates_of_the_data_pick_the_rows_of_the_batch():
    N = 40
    y = np.random.default_rng(0).normal(size=N) * 2
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 4000))
    svi = SVI(local_effects, AutoNormal(local_effects), optimizer, TraceMeanField_ELBO())
    result = ogp.fit(svi, jax.random.PRNGKey(0), (y,), batch_size=8, num_steps=4000, progress_bar=False, N=N)
    np.testing.assert_allclose(result.params["effect_auto_loc"], y / 1.25, atol=0.15)
    np.testing.assert_allclose(result.params["effect_auto_scale"], np.sqrt(0.2), rtol=0.2)


def test_latent_inputs_are_those_of_the_batch():
    rng = np.random.default_rng(1)
    N = 60
    x = rng.uniform(-2, 2, (N, 1))
    Y = np.concatenate([np.sin(x), np.cos(x), x / 2], 1) + 0.05 * rng.normal(size=(N, 3))
    Z = np.linspace(-2.5, 2.5, 8)[:, None]

    def model(Y, *, N):
        f = ogp.gp("f", kernels.RBF(1.0), Z, num_latents=3)
        with numpyro.plate("rows", N, subsample_size=len(Y)):
            latent = ogp.latent_inputs("latent", N, 1)
            numpyro.sample("Y", likelihoods.Gaussian(f(latent), 0.1).to_event(1), obs=Y)

    guide = ogp.AutoSparseGP(model, latents={"latent": (ogp.init.pca(Y, 1), 0.1)})
    svi = SVI(model, guide, optax.adam(0.02), TraceMeanField_ELBO())
    result = ogp.fit(svi, jax.random.PRNGKey(0), (Y,), batch_size=20, num_steps=1500, progress_bar=False, N=N)
    assert abs(np.corrcoef(result.params["latent_loc"][:, 0], x[:, 0])[0, 1]) > 0.98


@pytest.mark.parametrize("plate", [True, False])
def test_a_batch_that_counts_as_all_the_data_is_warned_of(plate):
    def model(y):
        mean = numpyro.param("mean", 0.0)
        with numpyro.plate("rows", len(y)) if plate else nullcontext():
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    svi = SVI(model, lambda y: None, optax.adam(0.1), Trace_ELBO())
    options = {"num_steps": 2, "progress_bar": False}
    with pytest.warns(
        UserWarning,
        match=r"`y` counts its 5 observations as all the data.*numpyro.plate\('data', 20, subsample_size=5\)",
    ):
        ogp.fit(svi, jax.random.PRNGKey(0), (np.zeros(20),), batch_size=5, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ogp.fit(svi, jax.random.PRNGKey(0), (np.zeros(20),), **options)
        scaled = SVI(handlers.scale(model, 4.0), lambda y: None, optax.adam(0.1), Trace_ELBO())
        ogp.fit(scaled, jax.random.PRNGKey(0), (np.zeros(20),), batch_size=5, **options)


def test_rows_of_tables_in_another_order_are_refused():
    """By their labels; rows of X and y were taken as they stand, without a word."""
    pd = pytest.importorskip("pandas")
    frame, target = pd.DataFrame(X), pd.Series(y)
    mixed = target.sample(frac=1.0, random_state=0)
    with pytest.raises(
        ValueError, match=r"`data\[1\]` has the rows of `data\[0\]` in another order by their labels: row"
    ):
        Batches((frame, mixed), 4, (0,))
    with pytest.warns(UserWarning, match=r"Labels of the rows of `data\['X'\]` and `data\['y'\]` do not agree"):
        Batches(
            {"X": frame, "y": target.iloc[1:].set_axis(range(len(y) - 1)).reindex([*range(1, len(y)), 99]).fillna(0)},
            4,
            (0,),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (target, target.to_numpy(), mixed.to_numpy(), mixed.loc[frame.index]):
            Batches((frame, given), 4, (0,))
