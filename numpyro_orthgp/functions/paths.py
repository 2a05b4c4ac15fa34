r"""Functions drawn from a posterior process, by Matheron's rule: a draw from the prior plus an update by the data.

Write :math:`u_i = f(Z_i)` plus the noise that the jitter stands for. A prior function :math:`g` has the whitened inducing variables
:math:`\hat e = A(u)`, with the linear map of :func:`~numpyro_orthgp.functions.projection.project`. The residual of :math:`g` is
independent of them. So replacing them by variables of another distribution gives a draw of the posterior:

.. math:: f(x) = g(x) + \sum_i A_i(x)^\top (e_i - \hat e_i), \qquad e_i \sim N(m_i, S_i)

(the decoupled sampling of [1], in whitened and orthogonal coordinates; :math:`g` is a sum of L random features, see
:mod:`numpyro_orthgp.kernels.random_features`). The update is linear in the covariances K(Z_i, x), so it is folded once into
:math:`\sum_i K(x, Z_i)\, c_i`: a path costs O(L + M) for each input instead of O(L + M^2). In float32 this loses no more digits
than the projections (a test compares both). Mean-only points are one more set, whose c is the same for all paths.

**References:**

1. Wilson, Borovitskiy, Terenin, Mostowsky, Deisenroth. Efficiently Sampling Functions from Gaussian Process Posteriors. 2020.
2. Wilson, Borovitskiy, Terenin, Mostowsky, Deisenroth. Pathwise Conditioning of Gaussian Processes. 2021.

**Why each path has its own features.** Mean and covariance over paths are then exact for any number of features; only higher
moments depend on this number. Prior functions are whitened with the noise that the jitter stands for; otherwise the variance would
be too small. The test of float32 is in ``tests/test_paths.py``. Paths are refused while a tightened bound is fitted; without
tightening they are draws of q(f).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_orthgp.errors import check_floating, check_inputs, check_integer, check_is_key, check_same_dtype
from numpyro_orthgp.functions.arithmetic import draw_of_tasks
from numpyro_orthgp.functions.projection import Block, project
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.inducing import Feature, Functional, InducingPatches, InducingPoints, input_dim
from numpyro_orthgp.inducing.functional import Concatenated
from numpyro_orthgp.inducing.rows import covariance_with_rows
from numpyro_orthgp.inducing.tasks import Tasks
from numpyro_orthgp.kernels.components import component
from numpyro_orthgp.kernels.convolutional import Convolutional
from numpyro_orthgp.kernels.patch_features import patch_response
from numpyro_orthgp.kernels.random_features import RandomFunctions, draw_functions, term_at, terms_at
from numpyro_orthgp.kernels.summands import select
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array, ArrayLike, KernelLike, PRNGKey

__all__ = ["Paths", "draw_paths"]

# Most random features at inputs held at once. Beyond that, paths are computed in groups, and again for the gradient.
MAX_ENTRIES = 2**24


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paths:
    """Functions drawn from a posterior process; the result of :meth:`~numpyro_orthgp.GPFunction.sample_paths`.

    It is a pytree, which can be returned from ``jit``, mapped over and saved. Calls are deterministic, and differentiable with
    respect to inputs.

    :param kernel: the covariance function.
    :param features: the sets of inducing variables, including mean-only points.
    :param prior: functions drawn from the prior, one for each path.
    :param weights: the weights c of each set's covariances with the input, shape (num, M_i) or (num, P, M_i).
    :param num_latents: P, or ``None`` for a single function.
    """

    kernel: Any
    features: tuple[Feature, ...]
    prior: RandomFunctions
    weights: tuple[Array, ...]
    num_latents: int | None = field(default=None, metadata={"static": True})

    @property
    def num(self) -> int:
        """Number of paths."""
        return self.weights[0].shape[0]

    def pick(self, which: Any) -> Paths:
        """Some of the paths.

        :param which: a slice, an index or an array of indices, which may be traced.
        """
        rows = which if isinstance(which, slice) else jnp.atleast_1d(jnp.asarray(which))
        prior, weights = jax.tree.map(lambda leaf: leaf[rows], (self.prior, self.weights))
        return replace(self, prior=prior, weights=weights)

    @broadcasting
    def __call__(self, X: ArrayLike | Functional | Tasks) -> Array:
        """Values of every path, or functionals of it.

        :param X: inputs, shape (B, D), the same for all paths; or (num, B, D), other inputs for each path; or a functional of
            B rows, such as ``Derivative(X, 0)`` or ``f.term(0).at(X)``; or rows of tasks, ``Tasks(X, task)``.
        :return: shape (num, B), or (num, B, P) with P latent functions.
        :raises TypeError: if ``X`` is not floating, or of another dtype than the inducing variables.
        :raises ValueError: if ``X`` has another shape or holds NaN or infinity.
        """
        if isinstance(X, Tasks):
            return self._tasks(X.checked(input_dim(self.features), self.features[0].dtype))
        if isinstance(X, Functional):
            return self._functionals(X.checked(input_dim(self.features), self.features[0].dtype))
        return self._at(self._checked(X))

    @one_program
    def _at(self, X: Array) -> Array:
        entries = X.shape[-2] * (self.num_latents or 1) * self.prior.width
        if X.ndim == 3:
            values = _for_each_path(lambda own: self._one_path(*own), (self.prior, self.weights, X), entries)
        else:
            values = _for_each_path(lambda p: self._one_path(p[0], p[1], X), (self.prior, self.weights), entries)
        return values if self.num_latents is None else jnp.swapaxes(values, -1, -2)

    def _one_path(self, prior: RandomFunctions, weights: tuple[Array, ...], X: Array) -> Array:
        """One path at X of shape (B, D), shape (B,) or (P, B)."""
        values = prior(X)
        for feature, c in zip(self.features, weights, strict=True):
            K = feature.covariance_with_inputs(self.kernel, X)
            values = values + jnp.einsum("...mb,...m->...b", K, c, precision=PRECISION)
        return values

    def _tasks(self, X: Tasks) -> Array:
        chosen = X.chosen(self.num_latents, X.X.dtype)  # type: ignore[union-attr]
        values = draw_of_tasks(lambda *_: self(X.X), chosen.functions(len(X)), chosen.weights, None, (self.num,))
        return jnp.where(chosen.known, values, jnp.nan)

    @one_program
    def _functionals(self, L: Functional) -> Array:
        if isinstance(L, Concatenated):
            return jnp.concatenate([self._functionals(part) for part in L.parts], 1)
        L.check(select(self.kernel, L.places))
        L = L.by_nodes()  # the prior path and the update use the same functional
        num_dims = _num_dims(self.kernel, self.features)
        prior = self.prior if L.places is None else terms_at(self.prior, self.kernel, num_dims, L.places)

        def one_path(own: tuple[RandomFunctions, tuple[Array, ...]]) -> Array:
            values = L.apply(own[0].__call__)
            for feature, c in zip(self.features, own[1], strict=True):
                K = covariance_with_rows(self.kernel, feature, L)
                values = values + jnp.einsum("...mb,...m->...b", K, c, precision=PRECISION)
            return values

        entries = len(L) * L.width * (self.num_latents or 1) * prior.width
        values = _for_each_path(one_path, (prior, self.weights), entries)
        return values if self.num_latents is None else jnp.swapaxes(values, -1, -2)

    def _checked(self, X: ArrayLike) -> Array:
        X = check_floating("X", X)
        if X.ndim == 3 and X.shape[0] != self.num:
            raise ValueError(
                f"`X` must have shape (B, D), or (num, B, D) with num = {self.num} for inputs of its own for each path; got "
                f"{X.shape}."
            )
        rows = X.reshape(-1, X.shape[-1]) if X.ndim == 3 else X
        check_inputs("X", rows, dim=input_dim(self.features))
        return check_same_dtype("X", X, self.features[0].dtype)


def draw_paths(
    rng_key: PRNGKey,
    num: int,
    num_features: int,
    parts: tuple[KernelLike, Sequence[Feature], Sequence[Block], Sequence[Whitened], Any],
    num_latents: int | None,
) -> Paths:
    """Draw functions from a process; see ``GPFunction.sample_paths``.

    :param parts: kernel, features, blocks, beliefs and mean-only points of the function.
    """
    sizes = {"num": check_integer("num", num), "num_features": check_integer("num_features", num_features)}
    prior, weights = _draw(check_is_key(rng_key), parts, num_latents=num_latents, **sizes)
    kernel, features, *_, shift = parts
    if shift is not None:
        features = (*features, InducingPoints(shift.points))
    return Paths(kernel, tuple(features), prior, weights, num_latents)


@one_program
def _draw(
    rng_key: PRNGKey, parts: Any, *, num: int, num_features: int, num_latents: int | None
) -> tuple[RandomFunctions, tuple[Array, ...]]:
    """Functions of the prior, and the weights of all features."""
    kernel, features, blocks, beliefs, shift = parts
    prior_key, jitter_key, *belief_keys = jax.random.split(rng_key, 2 + len(features))
    batch = (num,) if num_latents is None else (num, num_latents)
    num_dims = _num_dims(kernel, features)
    prior = draw_functions(prior_key, kernel, batch, num_dims, num_features=num_features, dtype=features[0].dtype)
    values = [_values(prior, kernel, num_dims, s) for s in features]

    changes = []
    for i, e_hat in enumerate(_whitened(values, blocks, jitter_key)):
        q = beliefs[i]
        e = q.sample(belief_keys[i], (num,))
        e = e if shift is None else e - shift.projected[i]
        changes.append(jnp.moveaxis(e, 0, -1) - e_hat)
    # sum_i A_i(x)' d_i is linear in K(Z_i, x); its coefficients are the transpose of the projection, applied to d.
    transpose = jax.linear_transpose(partial(project, blocks), changes)
    weights = [jnp.moveaxis(c, -1, 0) for c in transpose(tuple(changes))[0]]
    if shift is not None:
        weights.append(jnp.broadcast_to(shift.weights, (num, *shift.weights.shape)))
    return prior, tuple(weights)


def _whitened(values: Sequence[Array], blocks: Sequence[Block], rng_key: PRNGKey) -> tuple[Array, ...]:
    """Inducing variables of prior functions (num, ..., M_i), whitened: exactly N(0, I), shapes (..., M_i, num)."""
    sizes = [u.shape[-1] for u in values]
    noise = jax.random.normal(rng_key, (*values[0].shape[:-1], sum(sizes)), values[0].dtype)
    noisy = []
    for u, own, block in zip(values, jnp.split(noise, np.cumsum(sizes)[:-1], axis=-1), blocks, strict=True):
        # Functions go last: they are projected like inputs.
        noisy.append(jnp.moveaxis(u + safe_sqrt(block.jitter) * own, 0, -1))
    return project(blocks, noisy)


def _for_each_path(function: Callable[[Any], Array], paths: Any, entries: int) -> Array:
    """``function`` of every path, as many at once as fit in memory with ``entries`` array entries per path."""
    num = jax.tree.leaves(paths)[0].shape[0]
    at_once = max(1, MAX_ENTRIES // entries)
    if num <= at_once:
        return jax.vmap(function)(paths)
    return lax.map(jax.checkpoint(function, prevent_cse=False), paths, batch_size=at_once)


def _values(prior: RandomFunctions, kernel: KernelLike, num_dims: int, feature: Feature) -> Array:
    """The inducing variables of prior functions, shape (num, ..., M)."""
    if isinstance(feature, InducingPoints):
        Z = feature.points
        return _for_each_path(lambda g: g(Z), prior, Z[..., 0].size * prior.width)
    assert isinstance(feature, InducingPatches)
    patches, locations = feature.patches, feature.locations
    term = term_at(prior, kernel, num_dims, feature.term(kernel).place)
    return _for_each_path(lambda g: patch_response(g, patches, locations), term, feature.num * prior.width)


def _num_dims(kernel: Any, features: Sequence[Feature]) -> int:
    """Number of columns of the inputs; refuses sets for which prior functions have no values."""
    for s in features:
        if not isinstance(s, InducingPoints | InducingPatches):
            raise TypeError(
                "Paths need sets of inducing points or patches, where prior functions can be evaluated; got "
                f"{type(s).__name__}. For draws at inputs that are known in advance use "
                "f.joint(X).sample(rng_key)."
            )
    known = input_dim(features)
    if known is not None:
        return known
    images = component(
        kernel,
        lambda c: isinstance(c.kernel, Convolutional) and not c.restrictions,
        "Where no set is of inducing points, paths take the number of input columns from images, and need one term of the kernel "
        "that is `kernels.Convolutional` of all columns",
    )
    return math.prod(images.kernel.image_shape)
