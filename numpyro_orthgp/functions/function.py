"""The function of a Gaussian process as a model sees it: callable at inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.tree_util import Partial

from numpyro_orthgp.errors import check_inputs, check_same_dtype
from numpyro_orthgp.foreign import KnownTables, refuse_other_order
from numpyro_orthgp.functions.draws import Joint, JointInRun, draw_process, in_run, paths_of
from numpyro_orthgp.functions.expected import AveragedMarginals, average, nodes_of
from numpyro_orthgp.functions.groups import covariance_of_groups, moments_of_groups
from numpyro_orthgp.functions.latent_inputs import LatentInputs
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.mean_only import MeanShift, weigh_points
from numpyro_orthgp.functions.no_array import NoArray
from numpyro_orthgp.functions.paths import Paths
from numpyro_orthgp.functions.prior import root_given
from numpyro_orthgp.functions.projection import Block, all_moments, project, residual_covariance, turn
from numpyro_orthgp.functions.runs import DrawInRun, Run, refuse_stacked
from numpyro_orthgp.functions.sites import Names, as_seen, drawn_values, model_running, refuse_drawn_by_rows
from numpyro_orthgp.functions.tasks import joint_of_tasks, marginals_of_tasks
from numpyro_orthgp.functions.terms import Term
from numpyro_orthgp.gaussians.family import Value, Whitened
from numpyro_orthgp.inducing import Feature, input_dim
from numpyro_orthgp.inducing.functional import Concatenated, Functional
from numpyro_orthgp.inducing.rows import (
    Rows,
    as_feature,
    covariance_with_rows,
    variance_of_rows,
)
from numpyro_orthgp.inducing.tasks import Tasks
from numpyro_orthgp.kernels.summands import find_summands
from numpyro_orthgp.math.blocks import MAX_ENTRIES, map_blocks
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.grouped import Grouping
from numpyro_orthgp.math.linalg import clip_rounding, join, with_derivative_of
from numpyro_orthgp.math.products import combine, matmul
from numpyro_orthgp.math.resolution import warn_of_coarse_inputs
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["GPFunction"]

MIN_BLOCK = 256  # least number of rows in a block: with fewer, products of matrices turn into products with vectors


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # equal if identical, so that jax.jit(f) can hash it
class GPFunction(NoArray):
    """A function with a Gaussian-process prior, and Gaussians or values for its inducing variables.

    ``f(X)`` returns the marginals at inputs, ``f.joint(X)`` the joint distribution. It is a pytree, for ``jit``, ``vmap``, files.

    :param kernel: the covariance function.
    :param features: the sets of inducing variables.
    :param blocks: their orthogonal decomposition.
    :param beliefs: a Gaussian or a value for the whitened inducing variables of each set.
    :param shift: mean-only points, or ``None``.
    :param residual_scale: see :class:`Marginals`.
    :param grouping: which inputs are in groups, if the residual is tightened in groups of consecutive inputs; else ``None``.
    :param num_latents: P, or ``None`` for a single function.
    :param fitting: whether a guide of this package is being fitted; ``values`` are then its draw of the inducing variables.
    :param values: of each set's whitened inducing variables in this run of the model; ``None`` outside, where draws are from q(f).
    :param run: the function's draws in this run of the model.
    :param tables: the order of columns of tables that it knows.
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
    grouping: Grouping | None = field(default=None, metadata={"static": True})
    tables: KnownTables | None = field(default=None, metadata={"static": True})

    @property
    def drawn(self) -> tuple[int, ...]:
        """Positions of the sets that have a value (a draw or a point) and no Gaussian; variances lack the Gaussian's contribution.

        Empty for a :func:`posterior` whose guide has a Gaussian for each set.
        """
        return tuple(i for i, q in enumerate(self.beliefs) if q.is_value)

    def __call__(self, X: ArrayLike | LatentInputs | Functional | Tasks) -> Marginals:
        """Marginals of the function at inputs, or of a linear functional of it for each row, such as a derivative or an average.

        Costs O(B M^2) per set, without a B x B matrix. Outside of a fit many inputs are processed in blocks, in O(M^2 + B) memory.

        :param X: inputs, shape (B, D), same units as the inducing points; or a functional, such as ``Derivative(X, 0)``; or one of
            these with the task of each row, ``Tasks(X, task)``.
        :return: marginals of shape (B,), or (B, P) with P latent functions.
        :raises TypeError: if ``X`` is not floating, or of another dtype than the inducing points.
        :raises ValueError: if ``X`` has another shape or holds NaN or infinity.
        """
        if isinstance(X, Tasks):
            return marginals_of_tasks(self, self._rows(X.X), X.checked(*self._kind))
        X = self._rows(X)
        if self.grouping is not None and self.fitting:
            refuse_drawn_by_rows("A residual is tightened in groups of rows (`group_size`)")
        mean, explained, residual, total, groups = self._moments(X)
        joint = (DrawInRun if self.fitting else Partial)(draw_process, self, X)
        m = Marginals(mean, explained, residual, None, self.residual_scale, joint, self.names, total, groups)
        return as_seen("see_marginals", self, X, m)

    @one_program
    def _moments(self, X: Rows) -> tuple[Array, Array, Array, Array, Array | None]:
        """Mean, explained and residual variance and their sum, (B,) or (B, P), and the residual's covariance within groups."""
        if isinstance(X, Concatenated):
            return jax.tree.map(lambda *parts: jnp.concatenate(parts), *map(self._moments, X.parts))
        size = max(MAX_ENTRIES // (self.num_inducing * (self.num_latents or 1)), MIN_BLOCK)
        if isinstance(X, Functional):
            size = max(size // X.width, 1)
        # While fitting, a batch is small, and may be distributed over devices.
        if self.grouping is not None and not self.fitting and not isinstance(X, Functional):
            return moments_of_groups(self._moments_at_once, jnp.asarray(X), self.grouping.size, size)
        return map_blocks(self._moments_at_once, X, len(X) if self.fitting else size)

    def _moments_at_once(self, X: Rows) -> tuple[Array, Array, Array, Array, Array | None]:
        covariances = [covariance_with_rows(self.kernel, s, X) for s in self.features]
        how: Any = {"equal_weights": self.residual_scale is None, "grouping": self.grouping}
        added, grams = all_moments(self._without_shift(), self.blocks, covariances, **how)
        mean, variance = added.mean + self._shift_at([as_feature(X)]), variance_of_rows(self.kernel, X)
        residual = clip_rounding(variance + added.change)
        groups = None if grams is None else covariance_of_groups(self.kernel, jnp.asarray(X), grams, residual)
        total = with_derivative_of(added.explained + residual, variance + added.net)
        mean, explained, residual, total = (self._columns(a) for a in (mean, added.explained, residual, total))
        return mean, explained, residual, total, None if groups is None else self._per_latent(groups, event_dim=3)

    def expected(self, X: LatentInputs, *, num_points: int | None = None) -> Marginals:
        r"""Moments at latent inputs, averaged over their Gaussian in closed form, for Gaussian noise.

        With :class:`~numpyro_orthgp.likelihoods.Gaussian` this gives the bound of the Bayesian GP-LVM, also on minibatches, without
        the noise of draws::

            with numpyro.plate("rows", N, subsample_size=B) as rows:
                X = latent_inputs("X", N, 2)
                numpyro.sample("y", likelihoods.Gaussian(f.expected(X), noise).to_event(1), obs=Y[rows])

        Formulas are in :mod:`numpyro_orthgp.functions.expected`. In float64 standard deviations are accurate to about 1e-4 at
        the default jitter of :func:`gp`, and to 1e-6 at a ``jitter`` of 1e-6. In float32 second moments are whitened as sums of
        squares (:mod:`numpyro_orthgp.kernels.hermite`); at the default jitter and a kernel variance of one, they are accurate to
        about 2 % or 0.001 if inputs are known to a lengthscale, and to 6 % beyond. Without a Gaussian from a guide (NUTS,
        ``Predictive``), this is f at the draw.

        :param X: the result of :func:`latent_inputs`, B points.
        :param num_points: Gauss-Hermite nodes per dimension for kernels without closed-form expectations; by default 128 nodes in
            one dimension, 32 x 32 in two, else 1024 Sobol points (:mod:`numpyro_orthgp.kernels.expectations`).
        :return: moments of shape (B,) or (B, P); likelihoods that need more than moments refuse them.
        :raises TypeError: if ``X`` is not latent inputs, or inducing variables are not points.
        :raises ValueError: for mean-only points, and for hyperparameters or points that differ between latent functions; with
            `group_size`, for kernels without closed-form expectations.
        """
        if not isinstance(X, LatentInputs):
            raise TypeError(f"f.expected(X) needs what latent_inputs() returns; got {type(X).__name__}. Use f(X).")
        if X.loc is None or X.scale is None:
            return self(X)
        if self.shift is not None:
            raise ValueError("f.expected(X) is not known with MeanOnly points; use draws, f(X).")
        loc = self.checked(X.loc)
        mean, explained, residual, groups = average(
            self.kernel, self.features, self.blocks, self.beliefs, loc, X.scale, num_points, self.grouping
        )
        mean, explained, residual = (self._columns(a) for a in (mean, explained, residual))
        groups = None if groups is None else self._per_latent(groups, event_dim=3)
        nodes = nodes_of(self.kernel, self.features, self.blocks, loc, X.scale, num_points)
        how: Any = {"residual_scale": self.residual_scale, "names": self.names, "groups": groups, "nodes": nodes}
        return AveragedMarginals(mean, explained, residual, **how)

    def term(self, which: str | int | Any) -> Term:
        """Posterior of one term, or of several together, of a function whose kernel is a sum; exact given q.

        ::

            f = gp("f", k1.named("trend") + k2.named("season"), Z)
            f.term("trend")(X).mean, f.term("trend")(X).variance

        :param which: a name given by ``kernel.named``; a position in the sum; a kernel that is part of the sum; or a list of these.
        :raises TypeError: if ``which`` is none of these.
        :raises ValueError: if there is no such term.
        """
        return Term(self, find_summands(self.kernel, which))

    def joint(self, X: ArrayLike | Functional | Tasks) -> dist.MultivariateNormal:
        r"""Joint distribution at inputs, with the full B x B covariance (Shi et al. 2020, Eqs. 23-24).

        In a running model it is conditional on the inducing variables and earlier draws of this run.

        :param X: inputs, shape (B, D); or a functional, also one of several kinds (:func:`concatenate`).
        :return: event shape (B,); batch shape (P,) with P latent functions.
        :raises TypeError, ValueError: as for ``f(X)``.
        """
        if isinstance(X, Tasks):
            return joint_of_tasks(self, self._rows(X.X), X.checked(*self._kind))
        if in_run(self):
            return JointInRun(self, self._rows(X))
        return self._joint(self._rows(X))

    @one_program
    def _joint(self, X: Rows) -> dist.MultivariateNormal:
        A = self.project(X)
        L = root_given(self.kernel, self.features, self.blocks, self.beliefs, X, A)
        # NumPyro's own check of the factor would take twenty programs.
        mean, L = self.mean_from([as_feature(X)], A), self._per_latent(L, event_dim=2)
        return Joint(mean, scale_tril=L, validate_args=False)

    def _at_values(self) -> GPFunction:
        """The function given the values that its inducing variables have in this run."""
        known = drawn_values(self.values, self.names)
        return self if known is None else replace(self, beliefs=tuple(map(Value, known)))

    def diagonalized(self) -> GPFunction:
        r"""The same function in coordinates with diagonal covariances of q: faster at very many inputs.

        With :math:`S_i = V_i \, \mathrm{diag}(s_i^2) V_i^\top` the explained variance :math:`\sum_i |S_i^{1/2} A_i(x)|^2` is
        a weighted sum of the squares of :math:`V_i^\top A_i(x)`. So each set needs one matrix product instead of two. Unlike
        a cache of :math:`L^{-\top} (I - S) L^{-1}`, this loses no digits in float32.

        It costs one singular value decomposition per set. It is for predictions and does nothing in a fit: if S has equal
        eigenvalues, derivatives with respect to parameters do not exist, but those with respect to inputs do.

        :return: a function with the same marginals, joint distributions and paths.
        """
        if self.fitting:
            return self
        turned = [q.principal_axes() for q in self.beliefs]
        rotations, beliefs, shift = [V for V, _ in turned], tuple(q for _, q in turned), self.shift
        if shift is not None:
            pairs = zip(rotations, shift.projected, strict=True)
            shift = replace(shift, projected=tuple(a if V is None else combine(a, V) for V, a in pairs))
        return replace(self, blocks=turn(self.blocks, rotations), beliefs=beliefs, shift=shift)

    def sample_paths(self, rng_key: PRNGKey, num: int, *, num_features: int = 1024) -> Paths:
        r"""Draw functions that can be evaluated at any inputs, any number of times: pathwise conditioning [1, 2].

        .. math:: f(x) = g(x) + \sum_i A_i(x)^\top (e_i - \hat e_i), \qquad e_i \sim q(e_i)

        with :math:`g` a prior function of random features and :math:`\hat e_i` its whitened inducing variables. For any number of
        features, mean and covariance are exactly those of :meth:`joint`. With more features the law of one path approaches a
        Gaussian (:mod:`numpyro_orthgp.kernels.random_features`).

        A path costs O(M (L D + M)), and O((L + M) D) at each input, with M inducing variables in all; a draw from ``joint`` O(B^3).

        In a running model a single path is the function of the run: it goes through the values that were drawn before, later draws
        are its values, and another call returns the same path.

        :param num: number of paths.
        :param num_features: number L of random features of each path, for each term of a sum of kernels.
        :return: :class:`~numpyro_orthgp.functions.paths.Paths`; ``paths(X)`` has shape (num, B), or (num, B, P) with P latent
            functions.
        :raises TypeError: for kernels without random features (`White`, tinygp's, functions), or sets without points or patches.
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
        return paths_of(self, rng_key, num, num_features)

    def checked(self, X: Any) -> Array:
        """Inputs as an array; they are refused if they do not match the inducing variables, or tables of earlier calls."""
        refuse_other_order(X, {} if self.tables is None else self.tables)
        refuse_stacked(self)
        dim, dtype = self._kind
        X, given = check_same_dtype("X", check_inputs("X", X, dim=dim), dtype), X
        if model_running() is not None:  # predictions at few rows would take half as long again
            warn_of_coarse_inputs("X", X, given)
        return X

    def _rows(self, X: Any) -> Rows:
        if not isinstance(X, Functional):
            return self.checked(X)
        if self.grouping is not None:
            raise ValueError(
                f"Groups of rows are of values of f at inputs, not of functionals or terms of it; got {type(X).__name__}. Leave "
                "`group_size` out for this gp: group_size={'another gp': 16}."
            )
        return X.checked(*self._kind).looked_at(self.kernel)

    @property
    def _kind(self) -> tuple[int | None, Any]:
        """Number of input dimensions, if known, and dtype."""
        return input_dim(self.features), self.features[0].dtype

    @property
    def num_inducing(self) -> int:
        """Number of inducing variables of all sets together."""
        return sum(s.num for s in self.features)

    def project(self, X: Array | Functional) -> tuple[Array, ...]:
        """The projections A_i(X) on each set, shapes (..., M_i, B); see :mod:`numpyro_orthgp.functions.projection`."""
        return project(self.blocks, [covariance_with_rows(self.kernel, s, X) for s in self.features])

    def mean_from(self, features: Sequence[Feature], A: Sequence[Array]) -> Array:
        """Mean of variables with projections A, shape (..., B); for inputs X, features are ``[InducingPoints(X)]``."""
        return sum(
            (combine(q.loc, Ai) for q, Ai in zip(self._without_shift(), A, strict=True)), start=self._shift_at(features)
        )

    def _without_shift(self) -> list[Whitened]:
        """The beliefs, with means reduced by the part that mean-only points add in :meth:`_shift_at`."""
        if self.shift is None:
            return list(self.beliefs)
        return [replace(q, loc=q.loc - a) for q, a in zip(self.beliefs, self.shift.projected, strict=True)]

    def _shift_at(self, features: Sequence[Feature]) -> Array:
        """Weighted prior covariances with the mean-only points, shape (..., B); zero without such points."""
        if self.shift is None:
            return jnp.zeros((), self.features[0].dtype)
        return join(weigh_points(self.kernel, features, self.shift.points, self.shift.weights), -1, event_dim=1)

    def covariance_from(self, K: Array, A: Sequence[Array]) -> Array:
        """Covariance of variables with prior covariance K and projections A, shape (..., B, B)."""
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
