"""Pictures: that what is drawn are the right numbers, that axes and legends say what they are, and that nothing else is touched."""

from __future__ import annotations

import builtins
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import numpyro_orthgp as ogp
from numpyro_orthgp import FourierFeatures, MeanOnly, kernels, likelihoods, plots
from numpyro_orthgp.plots import style
from tests import problems

NOISE = 0.3


@pytest.fixture(autouse=True)
def figures():
    """Every test starts and ends without figures, and leaves the global settings as they were."""
    plt.close("all")
    before = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == before
    plt.close("all")


@pytest.fixture
def ax():
    return plt.figure(layout="constrained").subplots()


def line(rng, num_outputs=None, dtype=float):
    """Functions of one input: f, X, y."""
    X = np.sort(rng.uniform(-2, 2, (30, 1)), 0).astype(dtype)
    y = (np.sin(2 * X) + (0 if num_outputs is None else np.arange(num_outputs))).astype(dtype)
    y = y[:, 0] if num_outputs is None else y
    Z, O = X[::6], X[3::8]
    collapsed = ogp.CollapsedGP(kernels.RBF(0.8), X, [Z, O], NOISE, num_outputs=num_outputs)
    return jax.jit(collapsed.posterior)(y), X, y


def plane(rng, D=2):
    X = rng.uniform(-2, 2, (40, D))
    y = np.sin(2 * X[:, 0]) + X[:, 1]
    return jax.jit(ogp.CollapsedGP(2.0 * kernels.Matern52(1.0), X, X[::5], NOISE).posterior)(y), X, y


def fitted(rng, sets, kernel="matern32", **kwargs):
    """A function of one input as posterior() gives it, with a random q."""
    X, y = problems.data(rng, 10, D=1)
    sizes = [s.num if hasattr(s, "num") else len(s) for s in sets if not isinstance(s, MeanOnly)]
    params = problems.q_params([problems.random_q(rng, M) for M in sizes])
    return problems.posterior(params, X, y, inducing=sets, likelihood=problems.gaussian(NOISE), kernel=kernel, **kwargs)


def labelled(ax):
    """Artists by what the legend calls them."""
    return dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))


def edges(band):
    """Lower and upper edge of fill_between at the inputs, from its outline."""
    (outline,) = band.get_paths()
    n = (len(outline.vertices) - 3) // 2
    return outline.vertices[1 : n + 1], outline.vertices[n + 2 : 2 * n + 2][::-1]


# ---------------------------------------------------------------- functions of one input


def test_function_draws_mean_intervals_data_and_points(rng, ax):
    f, X, y = line(rng)
    grid = np.linspace(-3, 3, 50)
    likelihood = lambda m: likelihoods.Gaussian(m, NOISE)  # noqa: E731
    assert plots.function(f, grid, data=(X, y), likelihood=likelihood, interval=(0.5, 0.9), ax=ax) is ax
    drawn, at = labelled(ax), f(grid[:, None])
    x, mean = drawn["mean"].get_data()
    np.testing.assert_array_equal(x, grid)
    np.testing.assert_allclose(mean, at.mean)
    for label, level, variance in (
        ("50 % of f", 0.5, at.variance),
        ("90 % of f", 0.9, at.variance),
        ("90 % of y", 0.9, at.variance + NOISE**2),
    ):
        lower, upper = edges(drawn[label])
        half = scipy.stats.norm.ppf((1 + level) / 2) * np.sqrt(variance)
        np.testing.assert_allclose(lower, np.stack([grid, at.mean - half], -1), rtol=1e-9)
        np.testing.assert_allclose(upper, np.stack([grid, at.mean + half], -1), rtol=1e-9)
    np.testing.assert_array_equal(drawn["data"].get_offsets(), np.column_stack([X, y]))
    for label, feature in (("set 0 (M = 5)", f.features[0]), ("set 1 (M = 4)", f.features[1])):
        np.testing.assert_array_equal(drawn[label].get_offsets()[:, 0], feature.points[:, 0])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", "y") and ax.get_xlim() == (-3, 3)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == list(drawn)


def test_the_rug_and_the_legend_hide_nothing(rng):
    f, X, y = line(rng)
    ax = plots.function(f, data=(X, y))
    ax.figure.canvas.draw()
    legend = ax.get_legend().get_window_extent()
    lower, upper = edges(labelled(ax)["95 % of f"])
    top = ax.transData.transform(np.concatenate([upper, np.column_stack([X, y])]))[:, 1].max()
    rug = labelled(ax)["set 1 (M = 4)"]
    height = ax.transAxes.transform((0, rug.get_offsets()[0, 1]))[1]
    assert top < legend.y0 and height < ax.transData.transform(lower)[:, 1].min()


def test_the_grid_is_that_of_the_data_or_of_the_points(rng):
    f, X, y = line(rng)
    low, high = X.min(), X.max()
    margin = 0.08 * (high - low)
    assert plots.function(f, data=(X, y)).get_xlim() == pytest.approx((low - margin, high + margin))
    Z = np.concatenate([s.points for s in f.features])
    low, high = Z.min(), Z.max()
    margin = 0.08 * (high - low)
    assert plots.function(f).get_xlim() == pytest.approx((low - margin, high + margin))
    ax = plots.function(f, (-1, 2), legend=False)
    assert ax.get_xlim() == (-1, 2) and ax.get_legend() is None and ax.get_ylabel() == "f"


def test_draws_are_those_of_the_function(rng, ax):
    f, _, _ = line(rng)
    grid, key = np.linspace(-2, 2, 40), jax.random.PRNGKey(3)
    plots.function(f, grid, num_paths=3, rng_key=key, ax=ax)
    drawn = np.stack([a.get_ydata() for a in ax.lines if a.get_linestyle() == "--"])
    expected = f(grid[:, None]).sample(jax.random.split(key)[0], (3,))
    np.testing.assert_allclose(drawn, expected)
    assert "3 draws" in labelled(ax)


def test_other_likelihoods_are_drawn_in_units_of_y(rng, ax):
    f, _, _ = line(rng)
    grid = np.linspace(-2, 2, 20)
    plots.function(f, grid, likelihood=likelihoods.Poisson, num_paths=2, inducing=False, ax=ax)
    drawn, at = labelled(ax), f(grid[:, None])
    mean, deviation = np.asarray(at.mean), np.sqrt(at.variance)
    np.testing.assert_allclose(drawn["mean of y"].get_ydata(), np.exp(mean + deviation**2 / 2), rtol=1e-6)
    lower, upper = edges(drawn["95 % of E[y | f]"])
    z = scipy.stats.norm.ppf(0.975)
    np.testing.assert_allclose(lower[:, 1], np.exp(mean - z * deviation), rtol=0.02)
    np.testing.assert_allclose(upper[:, 1], np.exp(mean + z * deviation), rtol=0.02)
    # The distribution of y by itself: a mixture of Poissons over a fine rule.
    t, w = np.polynomial.hermite_e.hermegauss(60)
    rates = np.exp(mean[:, None] + deviation[:, None] * t)
    lower, upper = edges(drawn["95 % of y"])
    below = (scipy.stats.poisson.cdf(upper[:, 1][:, None], rates) * w).sum(-1) / w.sum()
    strictly = (scipy.stats.poisson.cdf(upper[:, 1][:, None] - 1, rates) * w).sum(-1) / w.sum()
    assert (below > 0.97).all() and (strictly < 0.98).all() and (lower[:, 1] == 0).any()
    assert min(a.get_ydata().min() for a in ax.lines if a.get_linestyle() == "--") > 0
    ax = plots.function(f, grid, likelihood=likelihoods.Bernoulli)
    assert "95 % of y" not in labelled(ax) and "95 % of E[y | f]" in labelled(ax)


def test_classes_in_order_are_drawn_as_numbers(rng, ax):
    f, _, _ = line(rng)
    grid = np.linspace(-2, 2, 20)
    cuts = jnp.array([-0.5, 0.5])
    plots.function(f, grid, likelihood=lambda m: likelihoods.Ordinal(m, cuts), num_paths=2, inducing=False, ax=ax)
    drawn, at = labelled(ax), f(grid[:, None])
    lower, upper = edges(drawn["95 % of E[y | f]"])
    z = scipy.stats.norm.ppf([0.025, 0.975])
    for edge, sign in zip((lower, upper), z, strict=True):  # E[y | f] = P(y > 0) + P(y > 1) rises with f
        f_at = np.asarray(at.mean) + sign * np.sqrt(at.variance)
        np.testing.assert_allclose(
            edge[:, 1], scipy.stats.norm.cdf(f_at[:, None] - np.asarray(cuts)).sum(-1), atol=0.02
        )
    paths = [a.get_ydata() for a in ax.lines if a.get_linestyle() == "--"]
    assert np.isfinite(paths).all() and np.min(paths) >= 0 and np.max(paths) <= 2


def test_where_the_mean_given_f_is_not_known_y_is_drawn(rng, ax):
    f, _, _ = line(rng)
    grid = np.linspace(-2, 2, 20)
    transform = dist.transforms.ExpTransform()
    warped = lambda m: likelihoods.Transformed(likelihoods.Gaussian(m, 0.2), transform)  # noqa: E731
    plots.function(f, grid, likelihood=warped, inducing=False, ax=ax)
    drawn, at = labelled(ax), f(grid[:, None])
    assert "95 % of E[y | f]" not in drawn
    expected = np.exp(np.asarray(at.mean) + (np.asarray(at.variance) + 0.04) / 2)
    np.testing.assert_allclose(drawn["mean of y"].get_ydata(), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`num_paths` needs E\[y given f\], which is not known for Transformed"):
        plots.function(f, grid, likelihood=warped, num_paths=2)


def test_a_likelihood_may_shift_and_scale_the_function(rng):
    """Bands and draws are of f as the likelihood sees it."""
    f, _, _ = line(rng)
    grid = np.linspace(-2, 2, 20)
    inside = {
        "95 % of E[y | f]": lambda m: likelihoods.Poisson(m + 2.0),
        "95 % of f": lambda m: likelihoods.Gaussian(10 * m + 50, 1.0).mask(True),
    }
    before = [
        (lambda X: f(X) + 2.0, likelihoods.Poisson),
        (lambda X: 10 * f(X) + 50, lambda m: likelihoods.Gaussian(m, 1.0)),
    ]
    for (name, likelihood), (shifted, plain) in zip(inside.items(), before, strict=True):
        ours, expected = (
            plots.function(g, grid, likelihood=p, num_paths=2, inducing=False)
            for g, p in ((f, likelihood), (shifted, plain))
        )
        for a, b in zip(edges(labelled(ours)[name]), edges(labelled(expected)[name]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        assert len(ours.lines) == len(expected.lines) > 2
        for a, b in zip(ours.lines, expected.lines, strict=True):
            np.testing.assert_allclose(a.get_ydata(), b.get_ydata(), rtol=1e-5)


def test_looks_of_many_things_differ():
    looks = {tuple(style.look_of(i, marker=style.MARKERS, linestyle=style.LINES).items()) for i in range(40)}
    assert len(looks) == 40


def test_any_function_to_marginals_or_a_distribution(rng):
    f, _, _ = line(rng, 2)
    grid = np.linspace(-2, 2, 9)
    mixed = lambda X: f(X) @ np.array([[1.0], [2.0]]) + 3.0  # noqa: E731
    drawn = labelled(plots.function(mixed, grid, output=0, num_paths=1))
    np.testing.assert_allclose(drawn["mean"].get_ydata(), f(grid[:, None]).mean @ np.array([1.0, 2.0]) + 3)
    assert set(drawn) == {"95 % of f", "a draw", "mean"}
    two = lambda m: likelihoods.HeteroskedasticGaussian(m)  # noqa: E731
    by_likelihood = labelled(plots.function(f, grid, likelihood=two))
    itself = labelled(plots.function(lambda X: two(f(X).independent()), grid))
    np.testing.assert_allclose(by_likelihood["mean of y"].get_ydata(), itself["mean of y"].get_ydata())
    np.testing.assert_allclose(*(edges(d["95 % of y"])[1] for d in (by_likelihood, itself)))
    assert "95 % of E[y | f]" not in itself


def test_slices_say_where_they_are(rng):
    f, X, y = plane(rng, 3)
    grid = np.linspace(-1, 1, 7)
    ax = plots.function(f, grid, data=(X, y), dim=1)
    at = np.tile(np.median(X, 0), (7, 1))
    at[:, 1] = grid
    np.testing.assert_allclose(labelled(ax)["mean"].get_ydata(), f(at).mean)
    assert ax.get_xlabel() == "x[1]\n(others at the median of the data)" and "data, projected" in labelled(ax)
    assert not any(label.startswith("inducing") for label in labelled(ax))
    ax = plots.function(f, grid, dim=1, at=[2, 0, 1], names=["age", "dose", "mass"], inducing=True)
    at = np.column_stack([np.full(7, 2.0), grid, np.full(7, 1.0)])
    np.testing.assert_allclose(labelled(ax)["mean"].get_ydata(), f(at).mean)
    assert ax.get_xlabel() == "dose\n(age = 2, mass = 1)" and "inducing points (M = 8)" in labelled(ax)
    assert plots.function(f, grid, dim=0).get_xlabel().endswith("(others at the median of the inducing points)")


def test_float32_stays_float32(rng):
    f, X, y = line(rng, dtype=np.float32)
    seen = []

    def watched(X):
        seen.append(X.dtype)
        return f(X)

    plots.function(watched, data=(X, y))
    ax = plots.function(f, data=(X, y), likelihood=lambda m: likelihoods.Gaussian(m, NOISE), num_paths=2)
    np.testing.assert_allclose(
        labelled(ax)["mean"].get_ydata(), f(labelled(ax)["mean"].get_xdata()[:, None].astype(np.float32)).mean
    )
    assert seen == [np.float32]
    plots.residual(f, X)
    plots.inducing(f, X)


# ---------------------------------------------------------------- two inputs


def test_surface_shows_mean_and_deviation(rng, ax):
    f, X, y = plane(rng)
    sides = np.linspace(-1, 1, 5), np.linspace(0, 3, 4)
    grid = np.stack(np.meshgrid(*sides), -1)
    at = f(grid.reshape(-1, 2))
    for show, values in (("mean", at.mean), ("sd", np.sqrt(at.variance))):
        ax = plt.figure().subplots()
        seen = {}
        draw = ax.contourf
        ax.contourf = lambda *args, seen=seen, draw=draw, **kw: seen.update(values=args[2]) or draw(*args, **kw)
        plots.surface(f, sides, show=show, data=(X, y), ax=ax)
        np.testing.assert_allclose(seen["values"], np.reshape(values, (4, 5)))
        drawn = labelled(ax)
        np.testing.assert_array_equal(drawn["data"].get_offsets(), X)
        np.testing.assert_array_equal(drawn["inducing points (M = 8)"].get_offsets(), f.features[0].points)
        assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_xlim()) == ("x[0]", "x[1]", (-1, 1))
        bar = ax.figure.axes[1]
        assert bar.get_ylabel() == {"mean": "mean of f", "sd": "standard deviation of f"}[show]
        assert (drawn["data"].get_array() is None) == (show == "sd")
        if show == "mean":
            np.testing.assert_array_equal(drawn["data"].get_array(), y)


def test_surface_of_labels_is_their_probability(rng):
    f, X, y = plane(rng)
    labels = (y > 0).astype(int)
    ax = plots.surface(f, data=(X, labels), likelihood=likelihoods.Bernoulli, num_grid=8)
    drawn = labelled(ax)
    np.testing.assert_array_equal(drawn["y = 0"].get_offsets(), X[labels == 0])
    np.testing.assert_array_equal(drawn["y = 1"].get_offsets(), X[labels == 1])
    bar = ax.figure.axes[1]
    assert bar.get_ylabel() == "probability of y = 1" and bar.get_ylim() == (0, 1)


def test_surface_of_a_slice(rng):
    f, X, y = plane(rng, 3)
    ax = plots.surface(f, dims=(2, 0), at=[0, 5, 0], data=(X, y), num_grid=5)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x[2]\n(x[1] = 5)", "x[0]")
    np.testing.assert_array_equal(labelled(ax)["data, projected"].get_offsets(), X[:, [2, 0]])


# ---------------------------------------------------------------- inducing points


def test_inducing_points_of_every_set(rng):
    sets = problems.sets(rng, [5, 4])
    more = rng.uniform(-2, 2, (7, 2))
    f = problems.posterior(
        problems.q_params([problems.random_q(rng, M) for M in (5, 4)]),
        *problems.data(rng, 10),
        inducing=[*sets, MeanOnly(more)],
        likelihood=problems.gaussian(NOISE),
    )
    X = rng.uniform(-2, 2, (9, 2))
    drawn = labelled(plots.inducing(f, X, dims=(1, 0)))
    expected = {"data (N = 9)": X, "set 0 (M = 5)": sets[0], "set 1 (M = 4)": sets[1], "mean-only (H = 7)": more}
    assert list(drawn) == list(expected)
    for label, points in expected.items():
        np.testing.assert_array_equal(drawn[label].get_offsets(), points[:, ::-1])
    shapes = [drawn[label].get_paths()[0].vertices.tolist() for label in list(expected)[1:]]
    assert all(a != b for a, b in itertools.combinations(shapes, 2)), "sets share a marker"
    ax = plots.inducing(f, dims=(1,), names=["a", "b"])
    assert [t.get_text() for t in ax.get_yticklabels()] == list(expected)[:0:-1] and ax.get_xlabel() == "b"


def test_sets_without_points_are_named(rng):
    features = FourierFeatures(2, -3.0, 3.0)
    f = fitted(rng, [features, rng.uniform(-1, 1, (3, 1))])
    for ax in (plots.inducing(f), plots.function(f)):
        texts = [t.get_text() for t in (ax.get_legend().get_texts() if ax.get_legend() else ax.get_yticklabels())]
        assert "set 0: FourierFeatures (M = 5), no points" in texts
    with pytest.raises(TypeError, match=r"No set of the function has points .* got FourierFeatures"):
        plots.inducing(fitted(rng, [features]))
    assert plots.function(fitted(rng, [features]), (-1, 1)).get_xlim() == (-1, 1)


def test_points_of_each_latent_functions_own(rng):
    Z = rng.uniform(-1, 1, (2, 4, 1))
    q = [problems.random_q(rng, 4) for _ in range(2)]
    params = {"f.u0_loc": jnp.stack([m for m, _ in q]), "f.u0_scale_tril": jnp.stack([T for _, T in q])}
    X = rng.uniform(-1, 1, (6, 1))
    kwargs = {"inducing": Z, "num_latents": 2, "to_event": 1, "likelihood": problems.gaussian(NOISE)}
    f = problems.posterior(params, X, np.zeros((6, 2)), **kwargs)
    one = labelled(plots.function(f, output=1))["inducing points (M = 4)"]
    np.testing.assert_array_equal(one.get_offsets()[:, 0], Z[1, :, 0])
    ax = plots.inducing(f)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["inducing points (M = 4 for each of 2)"]
    with pytest.raises(ValueError, match=r"`output` must lie in 0..1"):
        plots.inducing(f, output=2)


# ---------------------------------------------------------------- residual


def test_residual_is_the_share_of_the_prior_variance(rng):
    f, X, _ = plane(rng)
    Z = np.asarray(f.features[0].points)
    Kzz, Kzx = (np.asarray(f.kernel(Z, A)) for A in (Z, X))
    expected = 1 - (Kzx * np.linalg.solve(Kzz + 1e-10 * np.eye(len(Z)), Kzx)).sum(0) / 2.0
    ax = plots.residual(f, X)
    dots = ax.collections[0]
    order = np.argsort(dots.get_offsets()[:, 0])
    np.testing.assert_allclose(dots.get_array()[order], expected[np.argsort(X[:, 0])], atol=1e-6)
    np.testing.assert_array_equal(dots.get_offsets()[order], X[np.argsort(X[:, 0])])
    assert dots.get_clim() == (0, 1) and ax.figure.axes[1].get_ylabel() == "share of prior variance left"
    flat = plots.residual(f, X, dims=(1,), inducing=False).collections[0].get_offsets()
    np.testing.assert_allclose(flat, np.column_stack([X[:, 1], expected]), atol=1e-6)


def test_residual_of_one_of_several_functions(rng):
    X, y = problems.data(rng, 20, D=1)
    kernel = jnp.array([1.0, 3.0]) * kernels.RBF(jnp.array([[0.2], [1.0]]))
    f = jax.jit(ogp.CollapsedGP(kernel, X, X[::4], NOISE).posterior)(np.column_stack([y, y]))
    for p, (variance, lengthscale) in enumerate(((1.0, 0.2), (3.0, 1.0))):
        alone = variance * kernels.RBF(lengthscale)
        single = jax.jit(ogp.CollapsedGP(alone, X, X[::4], NOISE).posterior)(y)
        drawn = [
            plots.residual(g, X, **kw).collections[0].get_offsets() for g, kw in ((f, {"output": p}), (single, {}))
        ]
        np.testing.assert_allclose(*drawn, atol=1e-6)
        assert drawn[0][:, 1].max() <= 1 and drawn[0][:, 1].max() > 1e-3


# ---------------------------------------------------------------- traces


def test_elbo_is_minus_the_loss_and_its_running_mean(rng, ax):
    losses = 50 + rng.normal(size=30)
    plots.elbo({"one": losses, "two": SimpleNamespace(losses=jnp.asarray(losses + 5))}, window=4, ax=ax)
    drawn = labelled(ax)
    expected = np.convolve(-losses, np.full(4, 0.25), "valid")
    np.testing.assert_array_equal(drawn["one"].get_xdata(), np.arange(4, 31))
    np.testing.assert_allclose(drawn["one"].get_ydata(), expected)
    np.testing.assert_allclose(drawn["two"].get_ydata(), expected - 5)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), -losses)
    assert drawn["one"].get_linestyle() != drawn["two"].get_linestyle()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "ELBO (nats)")
    ax = plots.elbo(losses, window=1, steps_per_epoch=10)
    np.testing.assert_allclose(ax.lines[0].get_data(), [np.arange(1, 31) / 10, -losses])
    assert ax.get_xlabel() == "epoch" and ax.get_legend() is None and len(ax.lines) == 1


@settings(max_examples=20, deadline=None)
@given(hnp.arrays(float, st.integers(2, 300), elements=st.floats(-100, 100)), st.integers(2, 60))
def test_running_means_are_means_of_windows(losses, window):
    ax = plots.elbo(losses, window=window)
    window = min(window, len(losses))
    steps, mean = ax.lines[-1].get_data()
    np.testing.assert_allclose(mean, [-losses[t - window : t].mean() for t in steps], atol=1e-9)
    assert steps[0] == window and steps[-1] == len(losses) and (np.diff(steps) <= max(1, window // 10)).all()
    plt.close("all")


def test_a_wild_beginning_is_left_out(rng):
    losses = 10 + 1e6 * np.exp(-np.arange(400) / 3) + rng.normal(size=400)
    low, high = plots.elbo(losses, window=10).get_ylim()
    assert -30 < low < -11 and -10 < high < 0
    calm = plots.elbo(10 + rng.normal(size=400), window=10)
    assert calm.get_ylim()[0] < calm.lines[0].get_ydata().min()


def test_losses_that_are_not_finite_are_marked():
    losses = np.array([3.0, np.nan, 5.0, np.inf, 7.0, 9.0])
    ax = plots.elbo(losses, window=2)
    np.testing.assert_array_equal(ax.lines[-1].get_ydata(), [-3, -5, -5, -7, -8])
    assert labelled(ax)["2 not finite"].get_offsets()[:, 0].tolist() == [2, 4]
    ax = plots.elbo([np.nan, 1.0, 2.0], window=1)
    np.testing.assert_array_equal(ax.lines[-1].get_ydata(), [np.nan, -1, -2])


def test_gaps_are_logarithmic():
    losses = np.array([108.0, 12.0, 9.0, 8.0])
    ax = plots.elbo(losses, window=1, gap_to=-8.0)
    np.testing.assert_array_equal(ax.lines[-1].get_ydata(), [100, 4, 1, np.nan])
    assert ax.get_yscale() == "log" and ax.get_ylabel() == "-8 - ELBO (nats)"
    ax = plots.elbo({"a": losses, "b": losses - 2}, window=1, gap_to="best")
    np.testing.assert_array_equal(labelled(ax)["a"].get_ydata(), [102, 6, 3, 2])
    assert ax.get_ylabel() == "best - ELBO (nats)"


# ---------------------------------------------------------------- calibration


@pytest.mark.parametrize("num_bins, interval", [(10, 0.95), (4, 0.5)])
def test_pit_histogram_beside_binomial_quantiles(rng, ax, num_bins, interval):
    pit = rng.uniform(size=200)
    plots.calibration(pit, num_bins=num_bins, interval=interval, ax=ax)
    drawn = labelled(ax)
    counts = drawn["data (N = 200)"].get_data().values
    np.testing.assert_array_equal(counts, [np.sum(np.floor(pit * num_bins) == i) for i in range(num_bins)])
    lower, upper = edges(drawn[f"{100 * interval:g} % if calibrated"])
    tails = scipy.stats.binom.ppf([(1 - interval) / 2, (1 + interval) / 2], 200, 1 / num_bins)
    assert set(lower[:, 1]) == {tails[0]} and set(upper[:, 1]) == {tails[1]}
    assert ax.lines[0].get_ydata() == [200 / num_bins] * 2


def test_coverage_of_central_intervals(rng, ax):
    pit = rng.beta(2, 2, size=150)
    plots.calibration(pit, kind="coverage", label="wide", ax=ax)
    plots.calibration(1 - pit, kind="coverage", label="mirrored", ax=ax)
    levels, inside = labelled(ax)["wide"].get_data()
    for level, share in zip(levels, inside, strict=True):
        low, high = (1 - level) / 2, (1 + level) / 2
        assert abs(share - np.mean((pit >= low) & (pit <= high))) <= 1 / 150  # a point on an edge may round either way
    np.testing.assert_allclose(labelled(ax)["mirrored"].get_ydata(), inside, atol=1 / 150)
    assert labelled(ax)["mirrored"].get_linestyle() != labelled(ax)["wide"].get_linestyle()
    lower, upper = edges(labelled(ax)["95 % if calibrated"])
    np.testing.assert_allclose(lower[:, 1], scipy.stats.binom.ppf(0.025, 150, levels) / 150)
    np.testing.assert_allclose(upper[:, 1], scipy.stats.binom.ppf(0.975, 150, levels) / 150)


# ---------------------------------------------------------------- the page


def test_the_page_shows_every_picture():
    page = Path(__file__).parents[1] / "docs" / "guide" / "pictures.md"
    text = page.read_text()
    images = [page.parent / name for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)]
    assert {p.resolve() for p in images} == set((page.parents[1] / "_static" / "plots").resolve().glob("*.png"))
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size < 120_000 for p in images)
    assert all(f"plots.{name}(" in text for name in plots.__all__)


# ---------------------------------------------------------------- errors, and what is left alone


def every_picture(rng):
    f, X, y = plane(rng)
    g, x, values = line(rng)
    return {
        "function": lambda **kw: plots.function(g, data=(x, values), **kw),
        "surface": lambda **kw: plots.surface(f, data=(X, y), num_grid=5, **kw),
        "inducing": lambda **kw: plots.inducing(f, X, **kw),
        "residual": lambda **kw: plots.residual(f, X, **kw),
        "elbo": lambda **kw: plots.elbo(values, **kw),
        "calibration": lambda **kw: plots.calibration(np.abs(np.sin(values)), **kw),
        "relevance": lambda **kw: plots.relevance(np.array([1.0, 2.0]), **kw),
        "latent_space": lambda **kw: plots.latent_space(f, X, num_grid=5, **kw),
    }


def test_axes_that_are_given_are_all_that_is_touched(rng):
    assert {*every_picture(rng), "terms"} == set(plots.__all__)  # terms has several axes, and tests of its own
    for name, picture in every_picture(rng).items():
        figure = matplotlib.figure.Figure(layout="constrained")  # not one of pyplot's
        ax, other = figure.subplots(1, 2)
        assert picture(ax=ax) is ax, name
        assert not plt.get_fignums(), f"{name} left a figure open"
        assert not (other.lines or other.collections or other.patches or other.get_xlabel())
        figure.canvas.draw()
        fresh = picture()
        assert plt.get_fignums() == [fresh.figure.number] and fresh.get_xlabel()
        plt.close("all")


def test_without_matplotlib_the_error_says_what_to_install(rng, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    by_terms, X, _ = two_terms(rng)
    pictures = every_picture(rng) | {"terms": lambda: plots.terms(by_terms, X)}
    monkeypatch.setattr(builtins, "__import__", without)
    for picture in pictures.values():
        with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'numpyro_orthgp\[plots\]'"):
            picture()


def test_errors_of_functions(rng):
    f, X, _ = line(rng)
    two, _, y2 = line(rng, 2)
    three, X3, y3 = plane(rng, 3)
    cases = [
        (TypeError, r"posterior\(\.\.\.\)\['f'\]", lambda: plots.function({"f": f}, (0, 1))),
        (TypeError, "must be Marginals, or a distribution over y; got", lambda: plots.function(lambda X: X, (0, 1))),
        (TypeError, "`likelihood` must return a distribution", lambda: plots.function(f, likelihood=lambda m: 1.0)),
        (ValueError, "f.X. is a distribution over y already",
         lambda: plots.function(lambda X: likelihoods.Poisson(f(X)), (0, 1), likelihood=likelihoods.Poisson)),
        (TypeError, r"`data` must be a pair \(X, y\); got", lambda: plots.function(f, data=X)),
        (ValueError, r"`data\[1\]` must have shape \(30,\).*Pick a column", lambda: plots.function(two, data=(X, y2))),
        (ValueError, r"D = 1", lambda: plots.function(f, data=(X3, y3))),
        (ValueError, r"2 functions: pick one with `output`, 0..1", lambda: plots.function(two)),
        (ValueError, "leave it out", lambda: plots.function(f, output=0)),
        (IndexError, r"p must lie in 0..1", lambda: plots.function(two, (0, 1), output=2)),
        (ValueError, r"one value for each of the 300 inputs.*Pick one function",
         lambda: plots.function(two, likelihood=likelihoods.Poisson)),
        (ValueError, "D = 3 input dimensions, of which this picture shows 1", lambda: plots.function(three)),
        (ValueError, r"`dim` must be a dimension in 0..2; got 3", lambda: plots.function(three, dim=3)),
        (ValueError, r"`at` must have shape \(3,\)", lambda: plots.function(three, dim=0, at=[1.0])),
        (ValueError, "`at` of shape", lambda: plots.function(lambda X: three(X), (0, 1), dim=0, names=list("abc"))),
        (ValueError, "one entry per input dimension, 1", lambda: plots.function(f, names=["a", "b"])),
        (ValueError, "`grid` must increase", lambda: plots.function(f, (1, 0))),
        (ValueError, r"`grid` must be limits \(low, high\)", lambda: plots.function(f, np.zeros((3, 2)))),
        (ValueError, "`grid` is needed", lambda: plots.function(lambda X: f(X))),
        (ValueError, "`interval` must lie between 0 and 1", lambda: plots.function(f, interval=95)),
        (ValueError, "`interval` must name at least one", lambda: plots.function(f, interval=[])),
        (ValueError, "`num_paths` must be an integer of at least 0", lambda: plots.function(f, num_paths=-1)),
        (ValueError, "draws are joint", lambda: plots.function(lambda X: f(X).independent(), (0, 1), num_paths=1)),
        (NotImplementedError, "Classes without an order have no mean",
         lambda: plots.function(two, likelihood=likelihoods.Categorical)),
        (ValueError, "Cauchy, the distribution of y given f, has no mean",
         lambda: plots.function(f, likelihood=lambda m: ogp.Likelihood(m, lambda f: dist.Cauchy(f, 1.0)))),
        (ValueError, "this picture shows 2", lambda: plots.surface(three)),
        (ValueError, r"labels 0 and 1, .*; got -1.*\(y \+ 1\) / 2", lambda: plots.surface(
            three, data=(X3, np.sign(y3)), likelihood=likelihoods.Bernoulli, dims=(0, 1), num_grid=4)),
        (IndexError, r"`output` must lie in 0..1, the columns of data\[1\]; got 7",
         lambda: plots.function(two, data=(X, y2), output=7)),
        (ValueError, "`dims` must be two different dimensions", lambda: plots.surface(three, dims=(1, 1))),
        (ValueError, "Unknown `show` 'var'", lambda: plots.surface(three, show="var", dims=(0, 1))),
        (ValueError, "`grid` must have an entry for each of two", lambda: plots.surface(three, 3.0, dims=(0, 1))),
        (ValueError, r"`grid\[1\]` must increase", lambda: plots.surface(three, ((0, 1), (1, 0)), dims=(0, 1))),
        (TypeError, "`f` must be a function of posterior", lambda: plots.inducing({"f": f})),
        (ValueError, "`dims` must be two different", lambda: plots.inducing(three, dims=(0, 3))),
        (TypeError, "`f` must be a function of posterior", lambda: plots.residual(lambda X: f(X), X)),
        (ValueError, "pick one with `output`", lambda: plots.residual(two, X)),
    ]  # fmt: skip
    for kind, message, draw in cases:
        with pytest.raises(kind, match=message):
            draw()
    assert not plt.get_fignums(), "a picture that failed leaves no figure behind"


# ---------------------------------------------------------------- terms of a sum


def two_terms(rng):
    X = np.sort(rng.uniform(-2, 2, (30, 1)), 0)
    kernel = kernels.RBF(1.5).named("trend") + kernels.Periodic(1.0, 0.7)
    f = jax.jit(ogp.CollapsedGP(kernel, X, X[::3], NOISE).posterior)(X[:, 0] + np.sin(9 * X[:, 0]))
    return f, X, X[:, 0] + np.sin(9 * X[:, 0])


def test_terms_have_a_panel_each_and_the_remainder(rng):
    f, X, y = two_terms(rng)
    grid = np.linspace(-1, 1, 5)
    panels = plots.terms(f, grid, data=(X, y), interval=0.9, names=["time"])
    assert [ax.get_ylabel() for ax in panels] == ["trend", "Periodic", "remainder"]
    assert [ax.get_xlabel() for ax in panels] == ["", "", "time"] and panels[0].get_xlim() == (-1, 1)
    for which, ax in zip(("trend", 1), panels, strict=False):
        m, z = f.term(which)(grid[:, None]), scipy.stats.norm.ppf(0.95)
        np.testing.assert_allclose(ax.lines[0].get_ydata(), m.mean, atol=1e-9)
        lower, upper = edges(ax.collections[0])
        np.testing.assert_allclose(upper[:, 1], m.mean + z * m.variance**0.5, atol=1e-9)
        np.testing.assert_allclose(lower[:, 1], m.mean - z * m.variance**0.5, atol=1e-9)
    np.testing.assert_allclose(panels[2].collections[0].get_offsets()[:, 1], y - f(X).mean, atol=1e-9)


def test_terms_may_be_centred_and_chosen(rng):
    f, X, y = two_terms(rng)
    grid, axes = np.linspace(-1, 1, 5), plt.figure().subplots(1, 2)
    panels = plots.terms(f, grid, which=["trend", [0, 1]], over=X[::5], axes=axes)
    assert panels.tolist() == list(axes) and [ax.get_ylabel() for ax in axes] == ["trend", "trend + Periodic"]
    m = f.term("trend")(ogp.centred(grid[:, None], X[::5]))
    np.testing.assert_allclose(axes[0].lines[0].get_ydata(), m.mean, atol=1e-9)
    known = f.term(0)(grid[:, None]).mean - f.term(0)(X[::5]).mean.mean()
    np.testing.assert_allclose(m.mean, known, atol=1e-9)
    plt.close("all")
    assert len(plots.terms(f)) == 2  # at the inducing points
    plt.close("all")
    with pytest.raises(ValueError, match="`axes` must be 3, one for each term and one for the remainder"):
        plots.terms(f, grid, data=(X, y), axes=[None] * 2)
    with pytest.raises(ValueError, match="No summand of the kernel is named 'tide'"):
        plots.terms(f, grid, which=["tide"])
    with pytest.raises(TypeError, match="`f` must be a function of posterior"):
        plots.terms(lambda X: f(X), grid)
    assert not plt.get_fignums()


def test_errors_of_traces_and_calibration():
    cases = [
        (TypeError, "`losses` must be an array, or have one as `losses`; got str", lambda: plots.elbo("losses")),
        (ValueError, "empty dictionary", lambda: plots.elbo({})),
        (ValueError, r"`losses\['a'\]` must have shape .*got \(2, 2\)", lambda: plots.elbo({"a": np.ones((2, 2))})),
        (ValueError, "no finite loss among its 3", lambda: plots.elbo(np.full(3, np.nan))),
        (ValueError, "`window` must be a positive integer", lambda: plots.elbo(np.ones(3), window=0)),
        (ValueError, "`steps_per_epoch` must be positive", lambda: plots.elbo(np.ones(3), steps_per_epoch=0)),
        (ValueError, "must be a number, or 'best'", lambda: plots.elbo(np.ones(3), gap_to="worst")),
        (ValueError, "must lie above some value of the bound", lambda: plots.elbo(np.ones(3), gap_to=-2.0)),
        (ValueError, "must lie above some value of the bound", lambda: plots.elbo(np.ones(3), gap_to="best")),
        (ValueError, "Unknown `kind` 'ecdf'", lambda: plots.calibration(np.ones(3), kind="ecdf")),
        (ValueError, r"`pit` must have shape \(N,\).*ravel", lambda: plots.calibration(np.ones((3, 2)))),
        (ValueError, r"must lie in \[0, 1\]; got 1.5 at 1, 2 in all", lambda: plots.calibration([0.1, 1.5, np.nan])),
        (TypeError, "real numbers", lambda: plots.calibration(np.ones(3, complex))),
        (ValueError, "`interval` must lie between", lambda: plots.calibration(np.ones(3), interval=1.0)),
    ]  # fmt: skip
    for kind, message, draw in cases:
        with pytest.raises(kind, match=message):
            draw()
    assert not plt.get_fignums()
