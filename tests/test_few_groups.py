"""Minibatches of single rows that end with a few groups: the charge, that it is unbiased, and how it comes into a fit."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.training import Blocks
from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.orders import Part
from tests import oracles

N, G = 12, 3  # batches of three single rows and one group
KEY = jax.random.PRNGKey(0)
RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0, 1, (N, 1)), 0)
Y = np.stack([np.sin(6 * X[:, 0]), np.cos(5 * X[:, 0])], 1) + 0.1 * RNG.normal(size=(N, 2))
Z, O = X[::5], X[2::4]
NOISE = RNG.uniform(0.1, 0.3, N)
SEEN = np.arange(N) % 4 != 1
KERNEL = oracles.matern32(1.0, 0.3)


@pytest.fixture(autouse=True, scope="module")
def _x64():
    with jax.enable_x64(True):
        yield


def one(X, y, s, N=N, mask=None):
    f = ogp.gp("f", kernels.Matern32(0.3), [jnp.asarray(Z), jnp.asarray(O)])
    with numpyro.plate("data", N, subsample_size=len(X)):
        with handlers.mask(mask=True if mask is None else mask):
            numpyro.sample("y", likelihoods.Gaussian(2.0 * f(X), s), obs=y[:, 0])


def two(X, y, s, N=N, mask=None):
    f = ogp.gp("f", kernels.Matern32(0.3), jnp.asarray(Z), num_latents=2)
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), s[:, None] * jnp.array([1.0, 2.0])).to_event(1), obs=y)


def uncertain(X, y, s, N=N, mask=None):
    f = ogp.gp("f", kernels.RBF(0.3), jnp.asarray(Z))
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f.expected(ogp.LatentInputs(X, X, 0.1 + 0 * X)), s), obs=y[:, 0])


def guide_of(model, num, size=G):
    return ogp.AutoSparseGP(model, residual="tight", group_size=size, num_groups=num)


def svi_of(model, num, size=G):
    return SVI(model, guide_of(model, num, size), optax.adam(1e-2), TraceMeanField_ELBO())


def data_of(rows, masked=False):
    arrays = (jnp.asarray(a[rows]) for a in (X, Y, NOISE))
    return (*arrays, N, jnp.asarray(SEEN[rows])) if masked else (*arrays, N)


def dense_charge(rows, num, seen):
    """Of a batch at q(u) = p(u), by its definition: the mean of the single rows, and the mean of what the groups change."""
    P = np.concatenate([Z, O])
    Q = KERNEL(X, P) @ np.linalg.solve(KERNEL(P, P) + 1e-10 * np.eye(len(P)), KERNEL(P, X))
    D = 4 * (KERNEL(X, X) - Q) / np.outer(NOISE, NOISE)
    single, last = np.log1p(np.diag(D)), rows[-num * G :]
    rows, change = rows[: -num * G], -single[last][seen[last]].sum()
    for group in last.reshape(-1, G):
        i = group[seen[group]]
        change += np.linalg.slogdet(np.eye(len(i)) + D[np.ix_(i, i)])[1]
    f2 = np.diag(Q)[rows] * 4
    residuals = (Y[rows, 0] ** 2 + f2) / NOISE[rows] ** 2 + np.log(2 * np.pi * NOISE[rows] ** 2)
    return -N / 2 * ((residuals + single[rows])[seen[rows]].sum() / len(rows) + change / len(last))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rows", "num"), [([1, 7, 11, 3, 4, 5], 1), ([0, 6, 7, 8, 3, 4, 5], 2)])
def test_the_loss_of_a_batch(rows, num, masked):
    rows, svi = np.array(rows), svi_of(one, num)
    data = data_of(rows, masked)
    loss = svi.evaluate(svi.init(KEY, *data), *data)
    np.testing.assert_allclose(-loss, dense_charge(rows, num, SEEN if masked else np.ones(N, bool)), rtol=1e-7)


@pytest.mark.parametrize("model", [one, two, uncertain])
def test_batches_are_unbiased(model):
    """The mean over all pairs of single rows and a group is the bound with all rows in groups."""
    svi, whole = svi_of(model, 1), svi_of(model, None)
    states = [s.init(KEY, *data_of(np.arange(2 * G))) for s in (svi, whole)]
    loss = jax.jit(lambda *data: svi.evaluate(states[0], *data, N))
    singles, groups = RNG.permutation(N).reshape(-1, 3), np.arange(N).reshape(-1, G)
    losses = [loss(*data_of(np.concatenate(pair))[:3]) for pair in product(singles, groups)]
    np.testing.assert_allclose(np.mean(losses), whole.evaluate(states[1], *data_of(np.arange(N))), rtol=1e-10)
    assert np.std(losses) > 0


def test_a_batch_of_groups_alone_is_as_without_a_number():
    rows = np.arange(2 * G)
    losses = []
    for num in (None, 2, 5):  # five groups are more rows than there are
        svi = svi_of(one, num)
        losses.append(float(svi.evaluate(svi.init(KEY, *data_of(rows)), *data_of(rows))))
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("num", [None, 1])
def test_the_best_v_of_each_row(num):
    """The diagonal of the inverse within groups, and single rows before them."""
    rows = np.array([1, 7, 11, 3, 4, 5])
    svi = svi_of(one, num)
    data = data_of(rows)
    params = svi.get_params(svi.init(KEY, *data))
    guide = handlers.substitute(handlers.seed(svi.guide, 0), params)
    model = handlers.replay(handlers.seed(one, 0), handlers.trace(guide).get_trace(*data))
    likelihood = handlers.trace(model).get_trace(*data)["y"]["fn"]
    P = np.concatenate([Z, O])
    Q = KERNEL(X, P) @ np.linalg.solve(KERNEL(P, P) + 1e-10 * np.eye(len(P)), KERNEL(P, X))
    D = (4 * (KERNEL(X, X) - Q) / np.outer(NOISE, NOISE))[np.ix_(rows, rows)]
    v = 1 / (1 + np.diag(D))
    for group in ([3, 4, 5], [0, 1, 2])[: 1 if num else 2]:
        v[group] = np.diag(np.linalg.inv(np.eye(G) + D[np.ix_(group, group)]))
    np.testing.assert_allclose(likelihood.residual_scale, v, rtol=1e-7)


def test_the_last_layer_of_a_deep_gp():
    """Inner layers are drawn jointly within groups. With an inner layer that is known, the loss is as in one layer."""

    def model(X, y):
        f1 = ogp.gp("f1", 1e-8 * kernels.RBF(0.3), jnp.asarray(Z))
        f2 = ogp.gp("f2", kernels.Matern32(0.3), jnp.asarray(Z), jitter=0.0)
        with numpyro.plate("data", N, subsample_size=len(X)):
            numpyro.sample("y", likelihoods.Gaussian(ogp.DeepGP([f1, f2], means=[jnp.eye(1)])(X), 0.2), obs=y)

    def shallow(X, y):
        f2 = ogp.gp("f2", kernels.Matern32(0.3), jnp.asarray(Z), jitter=0.0)
        with numpyro.plate("data", N, subsample_size=len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f2(X), 0.2), obs=y)

    rows = np.array([1, 7, 11, 3, 4, 5, 6, 7, 8])
    data = jnp.asarray(X[rows]), jnp.asarray(Y[rows, 0])
    losses = []
    for fn in (model, shallow):
        guide = ogp.AutoSparseGP(fn, residual={"f2": "tight"}, group_size={"f2": G}, num_groups={"f2": 2})
        svi = SVI(fn, guide, optax.adam(1e-2), TraceMeanField_ELBO())
        losses.append(float(svi.evaluate(svi.init(KEY, *data), *data)))
    np.testing.assert_allclose(*losses, rtol=1e-2)


def test_orders_of_single_rows_and_of_groups():
    """Each row comes once in each epoch of its order, whole groups at the end of each batch, and any step can be the first."""
    batches = Batches((np.arange(40),), 10, (3,), 3, None, 2)
    rows = batches.row_numbers(0, 200)
    single, groups = rows[:, :4].ravel(), rows[:, 4:].reshape(-1, 3)
    assert (np.sort(single[:40]) == np.arange(40)).all() and (np.sort(single[40:80]) == np.arange(40)).all()
    whole = groups[(groups < 39).all(1) & (np.sort(groups // 3, 1)[:, 0] == np.sort(groups // 3, 1)[:, 2])]
    assert (np.diff(whole) == 1).all() and len(whole) > 0.9 * len(groups)  # others have row 39, which is in no group
    counts = np.bincount(groups.ravel(), minlength=40)
    assert counts.min() > 0.8 * counts.mean() and counts.max() < 1.2 * counts.mean()  # row 39 takes the place of others
    assert (batches.row_numbers(17, 5) == rows[17:22]).all()
    assert (batches.order.rows(Part(1, 3, 25)) == rows[4:8].ravel()[3:25]).all()  # four steps an epoch


def test_a_fit_goes_on_where_it_stopped(tmp_path):
    data = X, Y, NOISE
    how = {"batch_size": 6, "group_size": G, "num_groups": 1, "progress_bar": False}
    whole = ogp.fit(svi_of(one, 1), KEY, data, num_steps=20, **how)
    assert np.isfinite(whole.losses).all()
    file = tmp_path / "fit.npz"
    ogp.fit(svi_of(one, 1), KEY, data, num_steps=8, checkpoint=file, **how)
    result = ogp.fit(svi_of(one, 1), KEY, data, num_steps=20, checkpoint=file, **how)
    assert (np.asarray(result.losses) == np.asarray(whole.losses)[-len(result.losses) :]).all()
    with pytest.raises(ValueError, match="num_groups"):
        ogp.fit(svi_of(one, None), KEY, data, num_steps=20, checkpoint=file, **how | {"num_groups": None})
    f = ogp.posterior(one, svi_of(one, 1).guide, result.params, *data_of(np.arange(N)))["f"]
    assert f.grouping is None and f(X).groups is None


def test_what_is_refused_or_warned_of():
    data, rows = (X, Y, NOISE), data_of(np.arange(N))
    how = {"num_steps": 2, "progress_bar": False}
    with pytest.raises(ValueError, match="`num_groups` is the number of groups of `group_size` rows"):
        svi_of(one, 1, None).init(KEY, *data_of(np.arange(6)))
    with pytest.raises(ValueError, match=r"`num_groups` = 1 is for minibatches, .* no plate of the model picks rows"):
        svi_of(one, 1).init(KEY, *rows)
    with pytest.raises(ValueError, match="`num_groups` must be a positive integer"):
        svi_of(one, 1.5).init(KEY, *data_of(np.arange(6)))
    for wrong in ({}, {"batch_size": N}, {"batch_size": 3}, {"batch_size": 6, "group_size": 1}):
        with pytest.raises(
            ValueError, match="fewer rows in groups than in a batch, and fewer in a batch than in the data"
        ):
            ogp.fit(svi_of(one, None), KEY, data, **{"group_size": 3, "num_groups": 1} | wrong, **how)
    with pytest.raises(ValueError, match="each step sees all rows"):
        ogp.fit(svi_of(one, 1), KEY, data, **how)
    with pytest.raises(ValueError, match="each step sees all rows"):
        ogp.fit_lbfgs(svi_of(one, 1), KEY, data, num_steps=2)
    with pytest.raises(ValueError, match="`num_groups` needs rows from anywhere"):
        ogp.fit(svi_of(one, 1), KEY, data, batch_size=6, group_size=3, num_groups=1, shuffle=Blocks(), **how)
    stream = ogp.training.Stream([tuple(a[:6] for a in data)], num_rows=N)
    with pytest.raises(ValueError, match="`num_groups` is for arrays"):
        ogp.fit(svi_of(one, 1), KEY, stream, num_groups=1, **how)
    with pytest.warns(UserWarning, match="`num_groups` is 1 for the guide and None for `fit`"):
        ogp.fit(svi_of(one, 1), KEY, data, batch_size=6, group_size=3, **how)
