"""The function of a Gaussian process as a model sees it: callable at inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.tree_util import Partial

from numpyro_orthgp.errors import check_inputs, check_same_dtype
from numpyro_orthgp.functions.expected import AveragedMarginals, average
from numpyro_orthgp.functions.groups import covariance_of_groups
from numpyro_orthgp.functions.latent_inputs import LatentInputs
from numpyro_orthgp.functions.marginals import Marginals, check_joint_draw
from numpyro_orthgp.functions.mean_only import MeanShift, weigh_points
from numpyro_orthgp.functions.paths import Paths, draw_paths
from numpyro_orthgp.functions.prior import joint_root
from numpyro_orthgp.functions.projection import Block, all_moments, project, residual_covariance, turn
from numpyro_orthgp.functions.runs import DrawInRun, Run
from numpyro_orthgp.functions.sites import Names
from numpyro_orthgp.functions.stacking import draw_stacked
from numpyro_orthgp.gaussians.family import Value, Whitened
from numpyro_orthgp.inducing import Feature, InducingPoints, input_dim
from numpyro_orthgp.math.blocks import MAX_ENTRIES, map_blocks
from numpyro_orthgp.math.cholesky import safe_cholesky
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.linalg import (
    add_jitter,
    clip_rounding,
    default_jitter,
    jitter_scale,
    join,
    safe_sqrt,
    with_derivative_of,
)
from numpyro_orthgp.math.products import PRECISION, combine, diagonal, matmul
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["GPFunction", "draw_process", "drawn_functions"]

# Rows worked on at once are no fewer than that, or products of matrices turn into products with vectors.
MIN_BLOCK = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GPFunction:
    """A function with a Gaussian-process prior and what is known about its inducing variables.

    ``f(X)`` gives the marginals at inputs, ``f.joint(X)`` the full covariance. A pytree: it can be returned from ``jit``,
    mapped over with ``vmap``, saved and restored.

    :param kernel: the covariance function.
    :param features: the sets of inducing variables.
    :param blocks: their orthogonal decomposition.
    :param beliefs: a Gaussian or a value for the whitened inducing variables of each set.
    :param shift: mean-only points, or ``None``.
    :param residual_scale: see :class:`Marginals`.
    :param group_size: G, where the residual is tightened in groups of G consecutive inputs; else ``None``.
    :param num_latents: P, or ``None`` for a single function.
    :param fitting: whether a guide of this package is being fitted, whose draw of the inducing variables is ``values``.
    :param values: what the whitened inducing variables of each set are in this run of the model, for draws; ``None`` where there is
        no run, and draws are of q(f).
    :param run: what this run of the model has drawn of the function.
    """

    kernel: Any
    features: tuple[Feature, ...]
    blocks: tuple[Block, ...]
    beliefs: tuple[Whitened, ...]
    shift: MeanShift | None = None
    residual_scale: Array | None = None
    num_latents: int | None = field(default=None, metadata={"static": True})
    fitting: bool = field(default=False, metadata={"static": True})
    names: Names | None = field(default=None, metadata={"static": True})
    values: tuple[Array, ...] | None = None
    run: Run | None = None
    group_size: int | None = field(default=None, metadata={"static": True})

    @property
    def drawn(self) -> tuple[int, ...]:
        """Positions of the sets that are known by a value, a draw or a point, not by a Gaussian: variances lack what it would add.

        Empty for a :func:`posterior` whose guide has a Gaussian of each set.
        """
        return tuple(i for i, q in enumerate(self.beliefs) if q.is_value)

    def __call__(self, X: ArrayLike | LatentInputs) -> Marginals:
        """Marginals of the function at inputs.

        Costs O(B M^2) per set and never forms a B x B matrix. Outside of a fit many inputs are worked on block by block, in
        memory O(M^2 + B).

        :param X: inputs, shape (B, D), same units as the inducing points.
        :return: marginals of shape (B,), or (B, P) with P latent functions.
        :raises TypeError: if ``X`` is not floating, or of another dtype than the inducing points.
        :raises ValueError: if ``X`` has another shape or holds NaN or infinity.
        """
        X = self.checked(X)
        mean, explained, residual, total, groups = self._moments(X)
        joint = (DrawInRun if self.fitting else Partial)(draw_process, self, X)
        return Marginals(mean, explained, residual, None, self.residual_scale, joint, self.names, total, groups)

    @one_program
    def _moments(self, X: Array) -> tuple[Array, Array, Array, Array, Array | None]:
        """Mean, explained and residual variance and their sum, (B,) or (B, P), and the residual's covariance within groups."""
        size = max(MAX_ENTRIES // (self.num_inducing * (self.num_latents or 1)), MIN_BLOCK)
        # While fitting a batch is small, and may be spread over devices.
        return map_blocks(self._moments_at_once, X, len(X) if self.fitting else size)

    def _moments_at_once(self, X: Array) -> tuple[Array, Array, Array, Array, Array | None]:
        covariances = [s.covariance_with_inputs(self.kernel, X) for s in self.features]
        how: Any = {"equal_weights": self.residual_scale is None, "group_size": self.group_size}
        added, grams = all_moments(self._without_shift(), self.blocks, covariances, **how)
        mean, variance = added.mean + self._shift_at([InducingPoints(X)]), self.kernel(X)
        residual = clip_rounding(variance + added.change)
        groups = None if grams is None else covariance_of_groups(self.kernel, X, grams, residual)
        total = with_derivative_of(added.explained + residual, variance + added.net)
        mean, explained, residual, total = (self._columns(a) for a in (mean, added.explained, residual, total))
        return mean, explained, residual, total, None if groups is None else self._per_latent(groups, event_dim=3)

    def expected(self, X: LatentInputs, *, num_points: int = 20) -> Marginals:
        r"""Moments at latent inputs averaged over their Gaussian in closed form, for Gaussian noise.

        With :class:`~numpyro_orthgp.likelihoods.Gaussian` the bound is that of the Bayesian GP-LVM, on minibatches too, without the
        noise of draws::

            with numpyro.plate("rows", N, subsample_size=B) as rows:
                X = latent_inputs("X", N, 2)
                numpyro.sample("y", likelihoods.Gaussian(f.expected(X), noise).to_event(1), obs=Y[rows])

        Formulas in :mod:`numpyro_orthgp.functions.expected`. In float64 rounding errors grow with the inverse of the jitter: give
        :func:`gp` a ``jitter`` of 1e-6 there. In float32 second moments are whitened as sums of squares
        (:mod:`numpyro_orthgp.kernels.hermite`), and standard deviations are right to about 2 % of themselves or 0.001 at the
        default jitter, for kernels of variance one. Where no guide has told a Gaussian (NUTS, ``Predictive``),
        this is f at the draw.

        :param X: what :func:`latent_inputs` returns, B points.
        :param num_points: quadrature nodes per dimension for kernels without closed-form expectations.
        :return: moments of shape (B,) or (B, P); other likelihoods refuse them, since they need more than moments.
        :raises TypeError: if ``X`` is not latent inputs, or inducing variables are not points.
        :raises ValueError: for mean-only points, or hyperparameters or points of each latent function's own.
        """
        if self.group_size is not None:
            raise ValueError(
                "f.expected(X) knows no groups of rows, whose covariances it would need; leave `group_size` out."
            )
        if not isinstance(X, LatentInputs):
            raise TypeError(f"f.expected(X) needs what latent_inputs() returns; got {type(X).__name__}. Use f(X).")
        if X.loc is None or X.scale is None:
            return self(X)
        if self.shift is not None:
            raise ValueError("f.expected(X) is not known with MeanOnly points; use draws, f(X).")
        loc = self.checked(X.loc)
        mean, explained, residual = average(
            self.kernel, self.features, self.blocks, self.beliefs, loc, X.scale, num_points
        )
        mean, explained, residual = (self._columns(a) for a in (mean, explained, residual))
        return AveragedMarginals(mean, explained, residual, None, self.residual_scale, None, self.names)

    def joint(self, X: ArrayLike) -> dist.MultivariateNormal:
        r"""Joint distribution at inputs, with the full B x B covariance (Shi et al. 2020, Eqs. 23-24).

        :param X: inputs, shape (B, D).
        :return: event shape (B,); batch shape (P,) with P latent functions.
        :raises TypeError, ValueError: as for ``f(X)``.
        """
        mean, scale_tril = self._joint_moments(self.checked(X))
        return dist.MultivariateNormal(mean, scale_tril=scale_tril)

    @one_program
    def _joint_moments(self, X: Array) -> tuple[Array, Array]:
        A = self.project(X)
        K = self.kernel(X, X)
        scale = jitter_scale(diagonal(K))
        L = safe_cholesky(add_jitter(self.covariance(K, A), default_jitter(K.dtype) * scale), scale)
        return self.mean([InducingPoints(X)], A), self._per_latent(L, event_dim=2)

    def _at_values(self) -> GPFunction:
        """The function of this run: given the values that its inducing variables have in it."""
        if self.values is None:
            return self
        return replace(self, beliefs=tuple(Value(value) for value in self.values))

    def _draw_in_run(self, run: Run, X: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
        """Draws given this run's inducing variables and what it has drawn before, shape ``shape`` + (B,) or (B, P)."""
        f, drawn, B = self._at_values(), run.drawn, len(X)
        all_drawn = X if drawn is None else jnp.concatenate([drawn.X, X])
        L = joint_root(self.kernel, self.features, self.blocks, all_drawn)[..., -B:, :]
        known = [q.loc for q in f._without_shift()] + ([] if drawn is None else [drawn.noise])
        mean = combine(join(known, -1, event_dim=1), jnp.swapaxes(L[..., :-B], -1, -2))
        mean = self._per_latent(mean + self._shift_at([InducingPoints(X)]), event_dim=1)
        noise = jax.random.normal(rng_key, (*shape, *mean.shape), X.dtype)
        if self.residual_scale is not None:  # spherical in the residual's whitened coordinates (Titsias 2025, Sec. 3.3)
            noise = safe_sqrt(self.residual_scale)[..., None] * noise
        draws = mean + jnp.einsum("...bc,...c->...b", L[..., -B:], noise, precision=PRECISION)
        draws = draws if self.num_latents is None else jnp.swapaxes(draws, -1, -2)
        if not shape:
            run.note(X, noise, draws)
        return draws

    def diagonalized(self) -> GPFunction:
        r"""The same function in coordinates in which q's covariances are diagonal: faster at very many inputs.

        With :math:`S_i = V_i \, \mathrm{diag}(s_i^2) V_i^\top` the explained variance :math:`\sum_i |S_i^{1/2} A_i(x)|^2` is
        a weighted sum of the squares of :math:`V_i^\top A_i(x)`, so that one product of matrices per set is left of two. Unlike
        a cache of :math:`L^{-\top} (I - S) L^{-1}` this loses no digits in float32.

        Costs one singular value decomposition per set. It is for predictions: derivatives for parameters do not exist where S has
        equal eigenvalues, those for inputs do.

        :return: a function whose marginals, joint distributions and paths are those of this one.
        """
        turned = [q.principal_axes() for q in self.beliefs]
        rotations, beliefs = [V for V, _ in turned], tuple(q for _, q in turned)
        shift = self.shift
        if shift is not None:
            pairs = zip(rotations, shift.projected, strict=True)
            shift = replace(shift, projected=tuple(a if V is None else combine(a, V) for V, a in pairs))
        return replace(self, blocks=turn(self.blocks, rotations), beliefs=beliefs, shift=shift)

    def sample_paths(self, rng_key: PRNGKey, num: int, *, num_features: int = 1024) -> Paths:
        r"""Functions drawn from the process, callable at any inputs, again and again: pathwise conditioning [1, 2].

        .. math:: f(x) = g(x) + \sum_i A_i(x)^\top (e_i - \hat e_i), \qquad e_i \sim q(e_i)

        with :math:`g` a prior function made of random features and :math:`\hat e_i` its own whitened inducing variables. Mean and
        covariance are exactly those of :meth:`joint` for any number of features; the law of one path becomes Gaussian as it
        grows (:mod:`numpyro_orthgp.kernels.random_features`).

        A path costs O(M (L D + M)) to draw and O((L + M) D) at each input, M the size of all sets together; a draw from ``joint``
        costs O(B^3) for B inputs, and others cannot follow.

        The first draw outside of ``jax.jit`` compiles many small operations; inside it is one.

        :param num: how many.
        :param num_features: random features L of each path, for each term of a sum of kernels.
        :return: :class:`~numpyro_orthgp.functions.paths.Paths`; ``paths(X)`` has shape (num, B), or (num, B, P) with P latent
            functions.
        :raises TypeError: for kernels without random features (`White`, tinygp's, functions), or sets that are neither inducing
            points nor patches.
        :raises ValueError: while a tightened bound is being fitted: its residual is not the prior's.

        **References:**

        1. Wilson et al. Efficiently Sampling Functions from Gaussian Process Posteriors. 2020.
        2. Wilson et al. Pathwise Conditioning of Gaussian Processes. 2021.
        """
        if self.residual_scale is not None:
            raise ValueError(
                "Paths have the prior's residual, but here it is scaled, as a guide with residual='tight' does while fitting. Draw "
                "from the fitted function: posterior(model, guide, params, ...)['f'].sample_paths(rng_key, num)."
            )
        return draw_paths(
            rng_key,
            num,
            num_features,
            kernel=self.kernel,
            features=self.features,
            blocks=self.blocks,
            beliefs=self._at_values().beliefs,
            shift=self.shift,
            num_latents=self.num_latents,
        )

    def checked(self, X: Any) -> Array:
        """Inputs as an array, refused if they do not go with the inducing variables."""
        X = check_inputs("X", X, dim=input_dim(self.features))
        return check_same_dtype("X", X, self.features[0].dtype)

    @property
    def num_inducing(self) -> int:
        """Number of inducing variables of all sets together."""
        return sum(s.num for s in self.features)

    def project(self, X: Array) -> tuple[Array, ...]:
        """The projections A_i(X) on each set, shapes (..., M_i, B); see :mod:`numpyro_orthgp.functions.projection`."""
        return project(self.blocks, [s.covariance_with_inputs(self.kernel, X) for s in self.features])

    def mean(self, features: Sequence[Feature], A: Sequence[Array]) -> Array:
        """Mean of variables whose projections are A: at inputs X, ``[InducingPoints(X)]``; shape (..., B)."""
        return sum(
            (combine(q.loc, Ai) for q, Ai in zip(self._without_shift(), A, strict=True)), start=self._shift_at(features)
        )

    def _without_shift(self) -> list[Whitened]:
        """The beliefs, from whose means that part is taken which mean-only points add at :meth:`_shift_at`."""
        if self.shift is None:
            return list(self.beliefs)
        return [replace(q, loc=q.loc - a) for q, a in zip(self.beliefs, self.shift.projected, strict=True)]

    def _shift_at(self, features: Sequence[Feature]) -> Array:
        """Weighted prior covariances with the mean-only points, shape (..., B); zero without these."""
        if self.shift is None:
            return jnp.zeros((), self.features[0].dtype)
        return join(weigh_points(self.kernel, features, self.shift.points, self.shift.weights), -1, event_dim=1)

    def covariance(self, K: Array, A: Sequence[Array]) -> Array:
        """Covariance of variables with prior covariance K whose projections are A, shape (..., B, B)."""
        covariance = residual_covariance(K, A, A)
        for q, Ai in zip(self.beliefs, A, strict=True):
            W = q.spread(Ai)
            if W is not None:
                covariance = covariance + matmul(jnp.swapaxes(W, -1, -2), W)
        return covariance

    def _columns(self, values: Array) -> Array:
        """(B,) or (P, B) to (B,) or (B, P)."""
        values = self._per_latent(values, event_dim=1)
        return values if self.num_latents is None else values.T

    def _per_latent(self, values: Array, event_dim: int) -> Array:
        P, batch = self.num_latents, values.shape[: values.ndim - event_dim]
        if batch not in ((), (P,)):
            raise ValueError(
                f"The function has num_latents={P}, but its kernel or inducing variables a leading axis of {batch[0]}."
            )
        return values if P is None else jnp.broadcast_to(values, (P, *values.shape[values.ndim - event_dim :]))


def draw_process(f: GPFunction, X: Array, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    """Draws of f(X), shape ``shape`` + (B,) or (B, P): in a run of a model of its one function, elsewhere of q(f)."""
    check_joint_draw(len(X), fitting=f.fitting)
    if f.run is not None:
        known = f.run.values_at(X)
        if known is None:
            return f._draw_in_run(f.run, X, rng_key, shape)
        # Where S draws are asked for they are all of the one function.
        return jnp.broadcast_to(known, (*shape, *known.shape)) if shape else known
    # NumPyro draws in the default dtype, whatever that of the function.
    draws = f.joint(X).sample(rng_key, shape).astype(X.dtype)
    return draws if f.num_latents is None else jnp.swapaxes(draws, -1, -2)


def drawn_functions(joint: Any) -> Iterator[tuple[GPFunction, Array]]:
    """What ``Marginals.joint`` draws: each function beneath, and its inputs."""
    if not isinstance(joint, Partial | DrawInRun) or joint.func is None:
        return
    if joint.func is draw_process:
        yield joint.args
    elif joint.func is draw_stacked:
        (marginals,) = joint.args
        for m in marginals:
            yield from drawn_functions(m.joint)
    else:  # arithmetic on marginals; patches are no function at the inputs themselves
        yield from drawn_functions(joint.args[0])
