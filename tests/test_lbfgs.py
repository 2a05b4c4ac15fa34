"""L-BFGS: where it ends, and what it says about that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.training import lbfgs
from numpyro_orthgp.training.objective import OfArguments
from tests import fitting, oracles

KEY = jax.random.PRNGKey(0)


def linear() -> SVI:
    return SVI(fitting.model, AutoDelta(fitting.model), optax.adam(0.1), Trace_ELBO())


def of_function(function) -> SVI:
    """Minimizes ``function(x)`` from x = 1; the data have no say."""

    def model(X):
        numpyro.factor("f", -function(numpyro.param("x", jnp.ones(2))))

    return SVI(model, lambda X: None, optax.adam(0.1), Trace_ELBO())


def minimize(function, **options):
    return ogp.fit_lbfgs(of_function(function), KEY, (np.zeros((3, 1)),), **options)


def test_the_mode_of_a_linear_model():
    X, y = fitting.data()
    result = ogp.fit_lbfgs(linear(), KEY, (X, y))
    mode = np.linalg.solve(X.T @ X / 0.25 + np.eye(3), X.T @ y / 0.25)
    assert result.status == "converged" and "begun anew" in result.message and result.num_steps == len(result.losses)
    np.testing.assert_allclose(result.params["w_auto_loc"], mode, rtol=1e-5)


def test_the_lowest_loss_is_returned_and_the_state_goes_on():
    data = fitting.data()
    result = ogp.fit_lbfgs(linear(), KEY, data)
    more = ogp.fit(linear(), KEY, data, num_steps=2, init_state=result.state, progress_bar=False)
    np.testing.assert_allclose(more.losses[0], result.losses.min(), rtol=1e-12)
    again = ogp.fit_lbfgs(linear(), KEY, data, init_params=result.params)
    assert again.num_steps <= 12
    same = ogp.fit_lbfgs(linear(), KEY, dict(zip(("X", "y"), data, strict=True)))
    np.testing.assert_array_equal(same.losses, result.losses)


@pytest.mark.filterwarnings("ignore:.* counts its 50 observations as all the data")
def test_a_loss_of_arguments_is_traced_once_and_takes_what_differs():
    """Data, arrays among the keywords and constants of a program that is used again are those of the present call."""

    def model(X, y, *, prior, noise, wide=False):
        w = numpyro.sample("w", dist.Normal(prior, 2.0 if wide else 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(X @ w, noise).to_event(1), obs=y)

    def svi(kind):
        return kind(model, AutoDelta(model), optax.adam(0.1), Trace_ELBO())

    X, y = fitting.data()
    prior, known = np.arange(3.0), svi(OfArguments)
    for num_programs, rows, options in (
        (1, (X, y), {"prior": prior, "noise": 0.5}),
        (1, (X[::-1] + 0.1, y), {"prior": 1 - prior, "noise": 0.5}),
        (2, (X, y), {"prior": prior, "noise": 0.3}),
        (3, (X, y), {"prior": prior, "noise": 0.5, "wide": True}),
        (4, (X[:-1], y[:-1]), {"prior": prior, "noise": 0.5}),
        (5, (X, y), {"prior": prior, "noise": 0.5, "stands_for": 2 * len(X)}),
        (5, (X, y), {"prior": prior, "noise": 0.5}),
        (6, (X, y), {"prior": prior, "noise": np.full(len(X), 0.5)}),
        (7, (X, y), {"prior": prior, "noise": np.array(0.3)}),
    ):
        ours, plain = (ogp.fit_lbfgs(svi, KEY, rows, **options) for svi in (known, svi(SVI)))
        assert len(known.programs) == num_programs
        np.testing.assert_allclose(ours.params["w_auto_loc"], plain.params["w_auto_loc"], rtol=1e-6, atol=1e-9)


def test_a_start_of_arguments_runs_the_model_once():
    """Values of all parameters are a start; with some, or with none, model and guide are run again."""

    def model(X, y):
        runs.append(1)
        noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
        w = numpyro.sample("w", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(X @ w, noise).to_event(1), obs=y)

    runs, data, few = [], fitting.data(), {"w_auto_loc": np.arange(3.0)}
    given = few | {"noise_auto_loc": np.array(0.7)}
    ours, plain = (kind(model, AutoDelta(model), optax.adam(0.1), Trace_ELBO()) for kind in (OfArguments, SVI))
    for params, runs_model in ((given, True), (given, False), (few, True), (None, True)):
        runs.clear()
        states = [ours.init(KEY, *data, init_params=params)]
        assert bool(runs) is runs_model
        states.append(plain.init(KEY, *data, init_params=params))
        one, other = (
            jax.tree.map(np.asarray, (svi.get_params(s), s.rng_key))
            for svi, s in zip((ours, plain), states, strict=True)
        )
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_rosenbrock_from_afar():
    result = minimize(lambda x: 100 * (x[1] + 3 - x[0] ** 2) ** 2 + (2 - x[0]) ** 2, tolerance=1e-9)
    assert result.status == "converged"
    np.testing.assert_allclose(result.params["x"], [2.0, 1.0], rtol=1e-4)


def test_walls_are_turned_back_from():
    """Where the loss is NaN, at x < 0, the line search shortens its step."""
    result = minimize(lambda x: jnp.sum(jnp.sqrt(x) + 1e-3 / x - jnp.log(x) * 1e-2), tolerance=1e-7)
    assert result.status == "converged" and np.isfinite(result.losses).all()
    x = np.asarray(result.params["x"])
    np.testing.assert_allclose(0.5 / np.sqrt(x) - 1e-3 / x**2 - 1e-2 / x, 0.0, atol=1e-2)


def test_a_gradient_that_is_wrong_is_no_convergence():
    @jax.custom_jvp
    def turned(x):
        return jnp.sum((x - 3) ** 2)

    turned.defjvp(lambda primals, tangents: (turned(*primals), -jnp.sum(2 * (primals[0] - 3) * tangents[0])))
    with pytest.warns(RuntimeWarning, match="Stalled: after 0 restarts line searches still .*enable_x64"):
        result = minimize(turned)
    assert result.status == "stalled"


def test_a_line_search_that_fails_at_the_optimum_has_converged(monkeypatch):
    """It was said to have stalled, where the gradient was as long as 1e-8: rounding errors end a search that has just gained."""
    one_search = lbfgs._Search.one_search
    monkeypatch.setattr(lbfgs._Search, "one_search", lambda self: one_search(self) and False)
    result = minimize(lambda x: jnp.sum(jnp.cosh(x - 5.1)), restarts=0)
    assert result.status == "converged" and "nothing lower" in result.message
    np.testing.assert_allclose(result.params["x"], 5.1, rtol=1e-5)


def test_steps_that_are_used_up():
    result = minimize(lambda x: jnp.sum(jnp.cosh(x - 5)), num_steps=2)
    assert result.status == "finished" and result.num_steps == 2 and "All 2 steps" in result.message


def test_restarts_that_are_used_up():
    result = minimize(lambda x: jnp.sum(jnp.cosh(x - 5)), restarts=0)
    assert result.status == "converged" and "no restarts were left" in result.message


def test_interrupted():
    def stop(progress):
        assert progress.params()["x"].shape == (2,) and progress.losses.shape == (1,)
        if progress.step == 2:
            raise KeyboardInterrupt

    result = minimize(lambda x: jnp.sum(jnp.cosh(x - 5)), callback=stop)
    assert result.status == "interrupted" and result.num_steps == 2


@pytest.fixture(scope="module")
def curve():
    rng = np.random.default_rng(1)
    X = rng.uniform(-2, 2, (40, 1))
    return X, np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=40)


def test_collapsed_beside_the_dense_oracle(curve):
    """With all points inducing it is the exact marginal likelihood, whose derivatives vanish there."""
    X, y = curve

    def model(X, y):
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=dist.constraints.positive)
        noise = numpyro.param("noise", 0.5, constraint=dist.constraints.positive)
        numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(lengthscale), X, X, noise, jitter=0.0), obs=y)

    result = ogp.fit_lbfgs(SVI(model, lambda X, y: None, optax.adam(0.1), Trace_ELBO()), KEY, curve, tolerance=1e-6)
    at = {k: float(v) for k, v in result.params.items()}

    def evidence(lengthscale, noise):
        K = oracles.rbf(1.0, lengthscale)(X, X) + noise**2 * np.eye(len(y))
        return -0.5 * (y @ np.linalg.solve(K, y) + np.linalg.slogdet(2 * np.pi * K)[1])

    best = evidence(**at)
    np.testing.assert_allclose(-result.losses[-1], best, rtol=1e-6)
    for name in at:
        for factor in (0.97, 1.03):
            assert evidence(**(at | {name: at[name] * factor})) < best


def gp_model(X, y):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    f = ogp.gp("f", kernels.RBF(lengthscale), jnp.linspace(-2, 2, 6)[:, None])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Bernoulli(f(X)), obs=y)


@pytest.mark.parametrize("natural", [False, True])
def test_svi_of_all_rows(curve, natural):
    """A bound by quadrature; natural parameters are left to no optimizer of their own."""
    data = curve[0], (curve[1] > 0).astype(int)
    optim = ogp.natural_gradient(optax.adam(0.05), 0.5) if natural else optax.adam(0.05)
    svi = SVI(gp_model, ogp.AutoSparseGP(gp_model, natural=natural), optim, TraceMeanField_ELBO())
    result = ogp.fit_lbfgs(svi, KEY, data)
    adam = ogp.fit(svi, KEY, data, num_steps=300, progress_bar=False)
    assert result.status == "converged" and result.losses[-1] < adam.losses[-1] + 0.05


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: SVI(gp_model, ogp.AutoSparseGP(gp_model, hyper=AutoNormal), optax.adam(0.1), TraceMeanField_ELBO()),
         "depends on the random key .* Or use ogp.fit"),
        (lambda: fitting.make(), "depends on the random key"),
    ],
)  # fmt: skip
def test_draws_are_refused(curve, make, match):
    data = (curve[0], (curve[1] > 0).astype(int)) if "gp" in str(make().model) else fitting.data()
    with pytest.raises(ValueError, match=match):
        ogp.fit_lbfgs(make(), KEY, data)


def test_what_else_is_refused():
    data = fitting.data()
    with pytest.raises(ValueError, match="not of minibatches"):
        ogp.fit_lbfgs(linear(), KEY, data, batch_size=10)
    with pytest.raises(ValueError, match="`tolerance` must be a positive number of nats; got 0"):
        ogp.fit_lbfgs(linear(), KEY, data, tolerance=0)
    with pytest.raises(TypeError, match=r"must be a numpyro\.infer\.SVI"):
        ogp.fit_lbfgs(None, KEY, data)
    with pytest.raises(FloatingPointError, match="The first loss is nan"):
        minimize(lambda x: jnp.log(-x).sum())

    def mutable(X):
        numpyro.primitives.mutable("count", {"n": 0.0})

    with pytest.raises(ValueError, match="mutable state"):
        ogp.fit_lbfgs(SVI(mutable, lambda X: None, optax.adam(0.1), Trace_ELBO()), KEY, data[:1])


def test_float32_keeps_its_dtype(curve):
    X, y = (a.astype(np.float32) for a in curve)

    def model(X, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(jnp.zeros((), X.dtype), 1.0))
        numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(lengthscale), X, X[::4], 0.3), obs=y)

    with jax.enable_x64(False):
        result = ogp.fit_lbfgs(SVI(model, AutoDelta(model), optax.adam(0.1), Trace_ELBO()), KEY, (X, y))
    assert result.params["lengthscale_auto_loc"].dtype == jnp.float32 and result.status == "converged"
