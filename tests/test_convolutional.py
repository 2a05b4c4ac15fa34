"""Convolutional kernels, inducing patches and functions of patches, against explicit sums over patches in numpy."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpyro.infer import Predictive, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.functions.images import patchwise, patchwise_mean
from numpyro_orthgp.inducing import FourierFeatures, InducingPatches, InducingPoints
from tests import oracles, problems
from tests.test_architecture import all_equations

SHAPE, PATCH, NOISE = (4, 5, 2), (3, 2), 0.5
D = 4 * 5 * 2
LENGTHSCALE, REACH = 1.7, 2.5


# ---- the oracle: everything is a weighted sum of patches at positions, an inducing patch being a sum of one


class Item(NamedTuple):
    patches: np.ndarray
    weights: np.ndarray
    positions: np.ndarray


def items(entries) -> np.ndarray:
    out = np.empty(len(entries), object)
    out[:] = [Entry(entry) for entry in entries]
    return out


class Entry:
    """A box, so that numpy does not look inside."""

    def __init__(self, item: Item) -> None:
        self.item = item


def cut(image, colour="joint", stride=(1, 1), shape=SHAPE, patch=PATCH):
    """Patches of one flattened image and their corners, pixel by pixel."""
    (H, W, C), (h, w) = shape, patch
    patches, corners = [], []
    for channels in [range(C)] if colour == "joint" else [[c] for c in range(C)]:
        for i in range(0, H - h + 1, stride[0]):
            for j in range(0, W - w + 1, stride[1]):
                pixels = [(i + a) * W * C + (j + b) * C + c for a in range(h) for b in range(w) for c in channels]
                patches.append(image[pixels])
                corners.append((i, j))
    return np.array(patches), np.array(corners, float)


def images(X, weights=None, **where):
    cuts = [cut(x, **where) for x in X]
    return items([Item(p, np.ones(len(p)) if weights is None else weights, at) for p, at in cuts])


def patches(Z, locations=None):
    locations = np.zeros((len(Z), 2)) if locations is None else locations
    return items([Item(z[None], np.ones(1), at[None]) for z, at in zip(Z, locations, strict=True)])


def dense(located=False, variance=1.0, lengthscale=LENGTHSCALE) -> oracles.Kernel:
    response, location = oracles.rbf(variance, lengthscale), oracles.matern32(1.0, REACH)

    def covariance(a: Item, b: Item) -> float:
        K = response(a.patches, b.patches) * (location(a.positions, b.positions) if located else 1.0)
        return float(a.weights @ K @ b.weights)

    def kernel(A, B=None):
        if B is None:
            return np.array([covariance(a.item, a.item) for a in A])
        return np.array([[covariance(a.item, b.item) for b in B] for a in A])

    return kernel


def convolutional(located=False, **options) -> kernels.Convolutional:
    options = {"image_shape": SHAPE, "patch_shape": PATCH} | options
    location = kernels.Matern32(REACH) if located else None
    return kernels.Convolutional(kernels.RBF(LENGTHSCALE), location=location, **options)


# ---- patches


@pytest.mark.parametrize("colour", ["joint", "per_channel"])
@pytest.mark.parametrize("stride", [1, (2, 1)], ids=["stride1", "stride21"])
def test_patches_are_cut_in_order(rng, colour, stride):
    X = rng.normal(size=(3, D))
    steps = (1, 1) if stride == 1 else stride
    got = kernels.extract_patches(X, SHAPE, PATCH, stride, colour)
    np.testing.assert_array_equal(got, [cut(x, colour, steps)[0] for x in X])
    grid = kernels.PatchGrid.checked(SHAPE, PATCH, stride, colour)
    np.testing.assert_array_equal(grid.positions, cut(X[0], colour, steps)[1])
    assert got.shape == (3, grid.num_patches, grid.patch_dim)


def test_cutting_is_slices_forward_and_backward(rng):
    def total(X):
        return (kernels.extract_patches(X, SHAPE, PATCH, 2) ** 2).sum()

    for function in (total, jax.grad(total)):
        names = {e.primitive.name for e in all_equations(jax.make_jaxpr(function)(rng.normal(size=(3, D))).jaxpr)}
        assert "slice" in names or "pad" in names
        assert not any("gather" in name or "scatter" in name for name in names)


# ---- covariances


@pytest.mark.parametrize("max_entries", [2**20, 200, 5], ids=["whole", "images", "patches"])
@pytest.mark.parametrize("located", [False, True], ids=["anywhere", "located"])
@pytest.mark.parametrize(
    "colour, stride", [("joint", 1), ("per_channel", (1, 2))], ids=["joint", "per_channel_stride12"]
)
def test_covariances_are_sums_over_patches(rng, colour, stride, located, max_entries):
    where = {"colour": colour, "stride": (1, 1) if stride == 1 else stride}
    X1, X2 = rng.normal(size=(5, D)), rng.normal(size=(3, D))
    weights = rng.normal(size=len(cut(X1[0], **where)[0]))
    Z, locations = rng.normal(size=(4, cut(X1[0], **where)[0].shape[1])), rng.uniform(0, 3, (4, 2))
    k = convolutional(located, colour=colour, stride=stride, weights=weights, max_entries=max_entries)
    feature = InducingPatches(jnp.asarray(Z), jnp.asarray(locations) if located else None)

    @jax.jit
    def ours(k, feature, X1, X2):
        across = feature.covariance_with_inputs(k, X2)
        return k(X1, X2), k(X1), across, feature.covariance(k, feature), feature.covariance(k, InducingPoints(X2))

    oracle, A, B, U = dense(located), images(X1, weights, **where), images(X2, weights, **where), patches(Z, locations)
    expected = oracle(A, B), oracle(A), oracle(U, B), oracle(U, U), oracle(U, B)
    for got, reference in zip(ours(k, feature, X1, X2), expected, strict=True):
        assert_allclose(got, reference, rtol=1e-12, atol=1e-12)


def test_latent_functions_of_their_own(rng):
    """Weights, the kernel of patches, or images with a leading axis are as many kernels."""
    X, Z = rng.normal(size=(3, D)), rng.normal(size=(4, 12))
    weights, lengthscales = rng.normal(size=(3, 8)), np.array([0.8, 1.7, 2.4])
    separate = rng.normal(size=(3, 3, D))

    @jax.jit
    def values(weights, lengthscale, X):
        k = kernels.Convolutional(
            kernels.RBF(lengthscale),
            image_shape=SHAPE,
            patch_shape=PATCH,
            weights=weights,
            location=kernels.Matern32(REACH),
            max_entries=100,
        )
        across = InducingPatches(jnp.asarray(Z), jnp.ones((4, 2))).covariance_with_inputs(k, X)
        return k(X, X), k(X), across

    cases = [
        (weights, np.array(1.7), X),
        (weights, lengthscales[:, None], separate),
        (weights[0], np.array(1.7), separate),
    ]
    for w, ell, of_images in cases:
        together = values(w, ell, of_images)
        for p in range(3):
            one = w[p] if w.ndim == 2 else w, np.ravel(ell)[p % ell.size], of_images[p] if of_images.ndim == 3 else X
            for a, b in zip(together, values(*one), strict=True):
                assert_allclose(a[p], b, rtol=1e-12, atol=1e-12)


def test_plain_functions_are_kernels_of_patches(rng):
    """Of anything that is called as a kernel, tinygp's for one; the result is a pytree still."""
    X = jnp.asarray(rng.normal(size=(3, D)))

    def base(A, B=None):
        return (A**2).sum(-1) if B is None else A @ B.T

    k = kernels.Convolutional(base, image_shape=SHAPE, patch_shape=PATCH, max_entries=100)
    sums = kernels.extract_patches(X, SHAPE, PATCH).sum(1)  # linear: the sum of all patches
    K, variance = jax.jit(lambda k, X: (k(X, X), k(X)))(k, X)
    assert_allclose(K, sums @ sums.T, rtol=1e-12)
    assert_allclose(variance, jnp.diagonal(K), rtol=1e-12)


def test_sums_and_scalings_find_their_term(rng):
    """Patches of two sizes and images as sets of one kernel v1 conv1 + v2 conv2 on some columns + RBF."""
    X, Z, O, points = (
        rng.normal(size=(4, D)),
        rng.normal(size=(3, 12)),
        rng.normal(size=(2, 4)),
        rng.normal(size=(3, D)),
    )
    small = kernels.Convolutional(kernels.RBF(1.1), image_shape=(4, 5), patch_shape=(2, 2))
    columns = range(10, 30)
    k = 0.7 * (2.0 * convolutional() + 0.3 * small.on(columns)) + kernels.RBF(3.0)
    sets = [InducingPatches(jnp.asarray(Z)), InducingPatches(jnp.asarray(O)), InducingPoints(jnp.asarray(points))]

    def narrow(X):
        return images(X[:, columns], shape=(4, 5, 1), patch=(2, 2))

    def whole(X1, X2):
        first, second = dense(variance=1.4), dense(variance=0.21, lengthscale=1.1)
        return first(images(X1), images(X2)) + second(narrow(X1), narrow(X2)) + oracles.rbf(1.0, 3.0)(X1, X2)

    first, second = dense(variance=1.4), dense(variance=0.21, lengthscale=1.1)
    expected = [
        [first(patches(Z), patches(Z)), np.zeros((3, 2)), first(patches(Z), images(points))],
        [np.zeros((2, 3)), second(patches(O), patches(O)), second(patches(O), narrow(points))],
        [first(images(points), patches(Z)), second(narrow(points), patches(O)), whole(points, points)],
    ]
    got = jax.jit(lambda k, sets: [[a.covariance(k, b) for b in sets] for a in sets])(k, sets)
    for row, reference in zip(got, expected, strict=True):
        for a, b in zip(row, reference, strict=True):
            assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    assert_allclose(sets[1].covariance_with_inputs(k, X), second(patches(O), narrow(X)), rtol=1e-12)


def test_waves_of_another_term_are_independent(rng):
    """Patches beside Fourier features of one column: in a sum each kind sees its own term, and neither the other."""
    Z, X = jnp.asarray(rng.normal(size=(3, 12))), jnp.asarray(rng.normal(size=(4, D)))
    convolution, smooth = convolutional(), kernels.Matern32(0.8).on(2)
    patches, waves = InducingPatches(Z), FourierFeatures(2, -4.0, 4.0, dim=2)
    k = 2.0 * convolution + 0.3 * smooth
    assert_allclose(patches.covariance(k, waves), np.zeros((3, 5)))
    assert_allclose(waves.covariance(k, patches), np.zeros((5, 3)))
    assert_allclose(waves.covariance_with_inputs(k, X), waves.covariance_with_inputs(0.3 * smooth, X), rtol=1e-12)
    assert_allclose(
        patches.covariance_with_inputs(k, X), patches.covariance_with_inputs(2.0 * convolution, X), rtol=1e-12
    )
    other = dataclasses.make_dataclass("Unknown", ["num", "dtype"])(2, Z.dtype)
    with pytest.raises(TypeError, match="covariance of InducingPatches with Unknown is not known"):
        patches.covariance(k, other)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_equal_weights_do_not_see_where_patches_are(seed):
    """Exchanging patches, whole tiles of the image here, changes nothing where all weigh the same."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(3, 6, 6))
    tiles = X.reshape(3, 3, 2, 3, 2).swapaxes(2, 3).reshape(3, 9, 2, 2)
    shuffled = np.stack([t[rng.permutation(9)] for t in tiles]).reshape(3, 3, 3, 2, 2).swapaxes(2, 3).reshape(3, 36)
    K, _ = TILES(np.ones(9), X.reshape(3, 36), X.reshape(3, 36))
    across, variance = TILES(np.ones(9), shuffled, X.reshape(3, 36))
    assert_allclose(across, K, rtol=1e-12)
    assert_allclose(variance, np.diag(K), rtol=1e-12)
    weighted = [
        TILES(np.arange(9.0), images_, images_)[1] for images_ in (X.reshape(3, 36), np.roll(X, 2, 2).reshape(3, 36))
    ]
    assert np.abs(weighted[0] - weighted[1]).max() > 0.01


@jax.jit
def TILES(weights, X1, X2):
    k = kernels.Convolutional(kernels.RBF(), image_shape=(6, 6), patch_shape=(2, 2), stride=2, weights=weights)
    return k(X1, X2), k(X1)


# ---- memory and gradients


def objective(located=True, max_entries=2**20):
    """Everything that a training step takes of the kernel, as a function of what is learned."""
    mix = np.random.default_rng(1).normal(size=(6, 9))

    def value(params, X):
        k = kernels.Convolutional(
            kernels.RBF(params["lengthscale"]),
            image_shape=SHAPE,
            patch_shape=PATCH,
            weights=params["weights"],
            location=kernels.RBF(params["reach"]) if located else None,
            max_entries=max_entries,
        )
        across = InducingPatches(params["Z"], params["locations"] if located else None).covariance_with_inputs(k, X)
        return jnp.sum(jnp.asarray(mix, X.dtype) * across) + jnp.sum(k(X) ** 2) + jnp.sum(jnp.sin(k(X[:2], X)))

    return value


@pytest.fixture(scope="module")
def step():
    rng = np.random.default_rng(2)
    params = {"lengthscale": 1.5, "reach": 2.0, "weights": rng.normal(size=8), "Z": rng.normal(size=(6, 12)),
              "locations": rng.uniform(0, 3, (6, 2))}  # fmt: skip
    return jax.tree.map(jnp.asarray, params), jnp.asarray(rng.normal(size=(9, D)))


@pytest.mark.parametrize("max_entries", [150, 60, 12], ids=["images", "rows", "patches"])
def test_blocks_hold_no_more_than_their_budget(step, max_entries):
    """9 images of 8 patches with 6 inducing patches are 432 kernel values with these, 576 among themselves."""
    params, X = step
    P, b, M = 8, len(X), 6
    inputs = max(X.size + D * b, 12 * P * max(1, max_entries // (M * P)))  # images, padded, and patches of one block
    largest = 0
    for function in (objective(max_entries=max_entries), jax.grad(objective(max_entries=max_entries))):
        for e in all_equations(jax.make_jaxpr(function)(params, X).jaxpr):
            for v in e.outvars:
                shape = v.aval.shape
                # Patches have 12 entries, and two more columns where distances are taken.
                if D in shape or 12 in shape or 14 in shape or 3 in shape[-1:] or set(PATCH) & set(shape[-3:]):
                    assert v.aval.size <= 2 * inputs, (e.primitive, shape)  # images and patches, not kernel values
                else:
                    largest = max(largest, v.aval.size)
    assert largest <= max(max_entries, P**2, b * P), largest


@pytest.fixture(scope="module")
def whole():
    return jax.jit(jax.value_and_grad(objective(), (0, 1)))


@pytest.mark.parametrize("max_entries", [150, 12], ids=["images", "patches"])
def test_blocks_change_nothing(step, whole, max_entries):
    blocked = jax.jit(jax.value_and_grad(objective(max_entries=max_entries), (0, 1)))(*step)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-10, atol=1e-10), blocked, whole(*step))


def test_gradients_are_right(step, whole):
    params, X = step
    gradient = whole(*step)[1][0]
    for name, array in params.items():
        direction = np.random.default_rng(3).normal(size=array.shape)
        shifted = [float(whole(params | {name: array + sign * 1e-6 * direction}, X)[0]) for sign in (1, -1)]
        assert_allclose(jnp.sum(gradient[name] * direction), (shifted[0] - shifted[1]) / 2e-6, rtol=1e-6, err_msg=name)


def test_float32(step, whole):
    low = jax.tree.map(lambda a: a.astype(jnp.float32), step)
    value, gradient = jax.jit(jax.value_and_grad(objective(max_entries=60), (0, 1)))(*low)
    assert value.dtype == jnp.float32
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradient))
    expected, exact = whole(*step)
    assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max())), gradient, exact)


# ---- models


def conv_model(X, y=None, *, sets, located=False, residual=None, N=None):
    weights = numpyro.param("weights", jnp.ones(8))
    k = 0.8 * convolutional(located, weights=weights)
    f = ogp.gp("f", k + 0.1 * kernels.RBF(4.0) if len(sets) > 2 else k, sets, jitter=0.0)
    with numpyro.plate("data", N or len(X), subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_patches_in_both_sets(rng, residual):
    """SOLVE-GP on patches with positions is what the dense formulas say, and the posterior too."""
    X, y, weights = rng.normal(size=(6, D)), rng.normal(size=6), rng.normal(size=8) / 2
    Zs, places = [rng.normal(size=(M, 12)) for M in (4, 3)], [rng.uniform(0, 3, (M, 2)) for M in (4, 3)]
    qs = [problems.random_q(rng, M) for M in (4, 3)]
    sets = [InducingPatches(jnp.asarray(Z), jnp.asarray(at)) for Z, at in zip(Zs, places, strict=True)]
    params = problems.q_params(qs) | {"weights": jnp.asarray(weights)}
    guide = ogp.AutoSparseGP(conv_model, residual=residual)
    options = {"sets": sets, "located": True}

    @jax.jit
    def ours(params, X, y):
        loss = TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, conv_model, guide, X, y, **options)
        f = ogp.posterior(conv_model, guide, params, X, y, **options)["f"]
        return -loss, f.joint(X)

    k, inputs = dense(True, 0.8), images(X, weights)
    oracle_sets = problems.oracle_sets([patches(Z, at) for Z, at in zip(Zs, places, strict=True)], qs)
    r = np.diag(oracles.residual_covariance(k, oracle_sets, inputs))
    v = 1.0 if residual == "prior" else 1 / (1 + r / NOISE**2)
    elbo, joint = ours(params, X, y)
    assert_allclose(elbo, oracles.elbo_gaussian(k, oracle_sets, inputs, y, NOISE**2, v=v), rtol=1e-9)
    mean, covariance = oracles.q_f(k, oracle_sets, inputs)
    assert_allclose(joint.mean, mean, rtol=1e-9)
    assert_allclose(joint.covariance_matrix, covariance, atol=1e-8)


def test_patches_and_then_images(rng):
    """Patches see the convolutional term, images after them the whole of a sum."""
    X, y, weights = rng.normal(size=(6, D)), rng.normal(size=6), rng.normal(size=8) / 2
    Z, O, points = rng.normal(size=(4, 12)), rng.normal(size=(3, 12)), rng.normal(size=(2, D))
    qs = [problems.random_q(rng, M) for M in (4, 3, 2)]
    params = problems.q_params(qs) | {"weights": jnp.asarray(weights)}
    options = {"sets": [InducingPatches(jnp.asarray(Z)), InducingPatches(jnp.asarray(O)), jnp.asarray(points)]}
    guide = ogp.AutoSparseGP(conv_model)

    def loss(params):
        return TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, conv_model, guide, X, y, **options)

    convolution, smooth = dense(False, 0.8), oracles.rbf(0.1, 4.0)
    tagged = images(np.r_[X, points], weights)
    pixels = dict(zip(map(id, tagged), np.r_[X, points], strict=True))

    def k(A, B):
        def second(a: Any, b: Any) -> float:
            both = id(a) in pixels and id(b) in pixels
            return float(smooth(pixels[id(a)][None], pixels[id(b)][None])[0, 0]) if both else 0.0

        return convolution(A, B) + np.array([[second(a, b) for b in B] for a in A])

    oracle_sets = problems.oracle_sets([patches(Z), patches(O), tagged[6:]], qs)
    assert_allclose(-jax.jit(loss)(params), oracles.elbo_gaussian(k, oracle_sets, tagged[:6], y, NOISE**2), rtol=1e-9)


# ---- functions of patches


def deep_model(X, y=None, *, N, Z1, Z2, max_entries=2**20):
    """A hidden layer of two channels, 2 x 4 patches of images, and a convolutional output."""
    f1 = ogp.gp("f1", kernels.RBF(LENGTHSCALE), jnp.asarray(Z1), num_latents=2)
    k2 = kernels.Convolutional(kernels.RBF(1.3), image_shape=(2, 4, 2), patch_shape=(2, 2), weights=jnp.ones(3) / 3)
    f2 = ogp.gp("f2", k2, InducingPatches(jnp.asarray(Z2)))
    with numpyro.plate("data", N, subsample_size=len(X)):
        h = patchwise(f1, X, image_shape=SHAPE, patch_shape=PATCH, max_entries=max_entries) + patchwise_mean(
            X, image_shape=SHAPE, patch_shape=PATCH
        )
        h = h.sample()
        numpyro.deterministic("h", h)
        numpyro.sample("y", likelihoods.Gaussian(f2(h), NOISE), obs=y)


@pytest.fixture(scope="module")
def deep():
    rng = np.random.default_rng(4)
    sets = {"Z1": rng.normal(size=(4, 12)), "Z2": rng.normal(size=(3, 8))}
    q1 = [problems.random_q(rng, 4) for _ in range(2)]
    params = problems.q_params([tuple(np.stack(parts) for parts in zip(*q1, strict=True))], "f1")
    params |= problems.q_params([problems.random_q(rng, 3)], "f2")
    return params, rng.normal(size=(5, D)), rng.normal(size=5), sets


@pytest.fixture(scope="module")
def layer(deep):
    """The fitted inner layer, tightened."""
    params, X, y, sets = deep
    params = params | {"f1_residual_scale": jnp.asarray([0.4, 0.7])}
    guide = ogp.AutoSparseGP(deep_model, residual={"f1": "tight"})
    return jax.jit(lambda p: ogp.posterior(deep_model, guide, p, X, y, N=5, **sets)["f1"])(params)


WHERE = {"image_shape": SHAPE, "patch_shape": PATCH}


def test_patchwise_is_the_function_at_every_patch(deep, layer):
    _, X, _, _ = deep

    @jax.jit
    def ours(f, X, pieces):
        h = patchwise(f, X, **WHERE)
        key = jax.random.PRNGKey(0)
        draws = h.draw(key, (3,)), f(pieces).draw(key, (3,)), h.independent().draw(key, (4000,))
        return f(pieces), h, patchwise(f, X, **WHERE, max_entries=100), draws

    flat, h, blocked, (joint, of_pieces, independent) = ours(layer, X, np.concatenate([cut(x)[0] for x in X]))
    assert h.shape == (5, 16)
    for got in (h, blocked):
        for name in ("mean", "explained", "residual", "total"):
            assert_allclose(getattr(got, name), getattr(flat, name).reshape(5, 16), rtol=1e-9, atol=1e-12)
    assert_allclose(joint, of_pieces.reshape(3, 5, 16), rtol=1e-9)
    assert float(jnp.abs((independent.mean(0) - h.mean) / jnp.sqrt(h.variance / 4000)).max()) < 4.5
    assert_allclose(independent.var(0), h.variance, rtol=0.15)


def test_joint_draws_are_of_functions(deep, layer):
    """Equal patches of different images have equal values in one draw; there is a limit to how many patches."""
    _, X, _, _ = deep
    twice = jax.jit(lambda f, X: patchwise(f, X, **WHERE).draw(jax.random.PRNGKey(1)))(layer, np.repeat(X[:1], 2, 0))
    assert_allclose(twice[0], twice[1], atol=1e-3)
    many = jax.eval_shape(lambda f: patchwise(f, jnp.ones((1025, D)), **WHERE), layer)
    with pytest.raises(ValueError, match="joint draw at B = 8200 inputs"):
        jax.eval_shape(lambda m: m.draw(jax.random.PRNGKey(0)), many)
    # Images that share nothing but inducing variables take no factor, so there may be as many as there are.
    fitting = dataclasses.replace(layer, fitting=True)
    draw = jax.eval_shape(lambda f: patchwise(f, jnp.ones((9000, D)), **WHERE).draw(jax.random.PRNGKey(0)), fitting)
    assert draw.shape == (9000, 16)


@pytest.mark.parametrize("max_entries", [2**20, 100], ids=["whole", "blocks"])
def test_draws_while_fitting_share_inducing_variables_in_an_image(deep, layer, max_entries):
    params, X, _, sets = deep
    f = dataclasses.replace(layer, fitting=True)
    draws = jax.jit(lambda f, k: patchwise(f, X[:2], **WHERE, max_entries=max_entries).draw(k, (20000,)))(
        f, jax.random.PRNGKey(0)
    )
    k, pieces = dense(False, 1.0, LENGTHSCALE), patches(np.concatenate([cut(x)[0] for x in X[:2]]))
    for channel in range(2):
        T = np.asarray(params["f1.u0_scale_tril"][channel])
        q = [oracles.WhitenedSet(patches(sets["Z1"]), np.asarray(params["f1.u0_loc"][channel]), T @ T.T)]
        mean, total = oracles.q_f(k, q, pieces, jitter=1e-10)
        residual = oracles.residual_covariance(k, q, pieces, jitter=1e-10)
        same_image = np.kron(np.eye(2), np.ones((8, 8)))
        values = np.asarray(draws).reshape(20000, 16, 2)[..., channel]
        assert_allclose(values.mean(0), mean, atol=0.04)
        assert_allclose(np.cov(values.T), same_image * (total - residual) + np.diag(np.diag(residual)), atol=0.08)


@pytest.mark.parametrize("max_entries", [2**20, 100], ids=["whole", "blocks"])
def test_bound_of_two_layers(deep, max_entries):
    """The doubly stochastic bound, by hand from the same draw: likelihood, divergences, and v per patch and channel."""
    params, X, y, sets = deep
    v = np.array([0.4, 0.7])
    params = params | {"f1_residual_scale": jnp.asarray(v)}
    options = {"N": 15, "max_entries": max_entries, **sets}
    guide = ogp.AutoSparseGP(deep_model, residual={"f1": "tight"})

    @jax.jit
    def ours(params):
        key_model, key_guide = jax.random.split(jax.random.PRNGKey(0))
        guide_trace = numpyro.handlers.trace(
            numpyro.handlers.seed(numpyro.handlers.substitute(guide, params), key_guide)
        ).get_trace(X, y, **options)
        model = numpyro.handlers.replay(numpyro.handlers.seed(deep_model, key_model), guide_trace)
        trace = numpyro.handlers.trace(numpyro.handlers.substitute(model, params)).get_trace(X, y, **options)
        elbo = TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, deep_model, guide, X, y, **options)
        return -elbo, trace["h"]["value"], trace["f1.residual_cost0"]["fn"].log_factor

    elbo, h, cost = ours(params)
    assert_allclose(cost, 5 * -8 * ((v - np.log(v) - 1) / 2).sum(), rtol=1e-12)

    q2 = problems.oracle_sets([patches(sets["Z2"])], [(params["f2.u0_loc"], params["f2.u0_scale_tril"])])
    inner = images(np.asarray(h), np.ones(3) / 3, shape=(2, 4, 2), patch=(2, 2))
    k2 = dense(False, 1.0, 1.3)
    mean, covariance = oracles.q_f(k2, q2, inner, jitter=1e-10)
    data = oracles.expected_log_normal(y, mean, np.diag(covariance), NOISE**2).sum()
    kls = sum(
        oracles.kl_normal(np.asarray(m), np.asarray(T) @ np.asarray(T).T, np.zeros(len(m)), np.eye(len(m)))
        for m, T in [
            *zip(params["f1.u0_loc"], params["f1.u0_scale_tril"], strict=True),
            (params["f2.u0_loc"], params["f2.u0_scale_tril"]),
        ]
    )
    assert_allclose(elbo, 3 * (data + cost) - kls, rtol=1e-8)


def test_predictive_draws_images(deep):
    _, X, _, sets = deep
    draws = Predictive(deep_model, num_samples=3)(jax.random.PRNGKey(0), X, N=5, **sets)
    assert draws["h"].shape == (3, 5, 16) and draws["y"].shape == (3, 5)


def test_mean_functions_of_patches(rng):
    X = rng.normal(size=(2, D))
    pixels = np.stack(
        [cut(x)[0].reshape(8, 3, 2, 2) for x in X]
    )  # (image, patch, row, column, channel) -> rows, columns
    pixels = pixels.reshape(2, 8, 3, 2, 2)
    assert_allclose(patchwise_mean(X, **WHERE), pixels[:, :, 1, 1].reshape(2, 16))
    assert_allclose(patchwise_mean(X, average=True, **WHERE), pixels.mean((2, 3)).reshape(2, 16), rtol=1e-12)
    W = rng.normal(size=(2, 3))
    assert_allclose(patchwise_mean(X, W, **WHERE), (pixels[:, :, 1, 1] @ W).reshape(2, 24), rtol=1e-12)
    with pytest.raises(ValueError, match=r"shape \(C, C'\) with C = 2 channels of the images; got \(3, 2\)"):
        patchwise_mean(X, W.T, **WHERE)


# ---- errors


def call(k, Z=None, locations=None, columns=D):
    feature = InducingPatches(jnp.ones((3, 12)) if Z is None else Z, locations)
    return feature.covariance_with_inputs(k, jnp.ones((2, columns)))


@pytest.mark.parametrize(
    "run, error, message",
    [
        (lambda: convolutional(image_shape=(4,)), ValueError, r"`image_shape` must be \(H, W\) or \(H, W, C\), positive"),
        (lambda: convolutional(image_shape=(4.0, 5)), TypeError, r"`image_shape` must be .*integers; got \(4.0, 5\)"),
        (lambda: convolutional(patch_shape=3), TypeError, r"`patch_shape` must be \(h, w\), integers; got 3"),
        (lambda: convolutional(patch_shape=(5, 2)), ValueError, r"`patch_shape` must fit into .*\(4, 5\); got \(5, 2\)"),
        (lambda: convolutional(stride=0), ValueError, r"`stride` must be an integer or \(rows, columns\), positive"),
        (lambda: convolutional(colour="grey"), ValueError, "Unknown `colour` 'grey'; known are 'joint', 'per_channel'"),
        (lambda: kernels.Convolutional(kernels.RBF, image_shape=(4, 5), patch_shape=(2, 2)), TypeError, "`base` must be"),
        (lambda: convolutional(weights=np.ones(7))(np.ones((2, D))), ValueError, r"`weights` .* P = 8 patches .*\(7,\)"),
        (lambda: convolutional()(np.ones((2, 20))), ValueError, r"of shape \(4, 5, 2\), .*must have 40 columns, .*got 20"),
        (lambda: call(convolutional(), columns=41), ValueError, "must have 40 columns.*got 41"),
        (lambda: call(convolutional(), Z=jnp.ones((3, 5))), ValueError, r"\(3, 5\) need one term .*5 entries; got no such"),
        (lambda: call(convolutional() + convolutional()), ValueError, "got 2 such terms"),
        (lambda: call(kernels.RBF()), ValueError, "got no such terms"),
        (lambda: call(convolutional(True)), ValueError, "exactly if the kernel has a `location`; got locations missing"),
        (lambda: call(convolutional(), locations=jnp.ones((3, 2))), ValueError, "got locations given and location=None"),
        (lambda: call(convolutional(True), locations=jnp.ones((4, 2))), ValueError, r"M = 3 to match `patches`; got \(4, 2\)"),
        (lambda: call(convolutional(), Z=jnp.full((3, 12), np.nan)), ValueError, "`patches` must be finite"),
        (lambda: call(convolutional(), Z=jnp.ones((3, 12), complex)), TypeError, "`patches` must hold real numbers"),
        (lambda: call(convolutional(), Z=jnp.ones((2, 3, 12))), ValueError, r"`patches` must have shape \(n, D\)"),
        (lambda: kernels.extract_patches(np.ones(D), SHAPE, PATCH), ValueError, r"`X` must have shape \(..., n, D\)"),
    ],
    ids=lambda value: None if callable(value) else getattr(value, "__name__", value[:24]),
)  # fmt: skip
def test_errors(run, error, message):
    with pytest.raises(error, match=message):
        run()
