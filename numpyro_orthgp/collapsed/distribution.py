"""`CollapsedGP`: outputs of Gaussian-process regression as a NumPyro distribution whose log density is a collapsed bound.

It learns the number of outputs from y. Until this is known, its ``shape()`` is (N, 1), so that NumPyro's comparison of shapes
accepts both (N,) and (N, D). ``num_outputs`` is needed only to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_orthgp.collapsed import checks
from numpyro_orthgp.collapsed.bounds import Bound, Statistics, conditional_gain, log_evidence, log_upper_bound, optimum
from numpyro_orthgp.collapsed.sums import Prior, Rows, project_inputs, sum_over_points, without_orthogonal
from numpyro_orthgp.errors import check_inputs, check_key, check_same_dtype
from numpyro_orthgp.foreign import KnownTables
from numpyro_orthgp.functions.draws import MAX_JOINT_DRAW
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.latent_inputs import LatentInputs
from numpyro_orthgp.functions.prior import as_kernel, check_jitter, check_latents, decompose_sets
from numpyro_orthgp.functions.projection import Block, residual_covariance
from numpyro_orthgp.functions.sites import refuse_drawn_by_rows, refuse_enumerated, told_of_enumeration
from numpyro_orthgp.gaussians.family import Full, Whitened
from numpyro_orthgp.inducing import Feature, as_sets, input_dim
from numpyro_orthgp.math.cholesky import safe_cholesky
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.linalg import add_jitter, default_jitter, jitter_scale
from numpyro_orthgp.math.products import diagonal, matmul
from numpyro_orthgp.math.resolution import warn_of_coarse_inputs, warn_of_offset
from numpyro_orthgp.types import Array, ArrayLike, KernelLike, PRNGKey

__all__ = ["CollapsedGP"]

# Matrices with more entries are computed in blocks of rows, unless the user says otherwise: computing a block twice in the cache
# takes less time than writing it to memory and reading it again. Kernel expectations are worth keeping up to a larger size.
MAX_ENTRIES = 2**22
MAX_ENTRIES_EXPECTATIONS = 2**25


class CollapsedGP(dist.Distribution):
    r"""Outputs y = f(X) + noise of a GP f, as a distribution whose ``log_prob`` is a bound with q(u) integrated out.

    ::

        def model(X, y):
            lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
            noise = numpyro.sample("noise", dist.HalfNormal(1.0))
            numpyro.sample("y", CollapsedGP(kernels.RBF(lengthscale), X, Z, noise), obs=y)

    It works with all inference algorithms of NumPyro: ``SVI`` with any guide, ``NUTS``, ``condition``. Use it outside of plates,
    since it is one joint density of all N points. The bounds and their formulas are in
    :mod:`numpyro_orthgp.collapsed.bounds`. "titsias2009", "artemev2021", "titsias2025" (the default) and "conditional" (Shi et al.
    2020, App. B) are lower bounds of log p(y), in this order but for the last. "fitc", "dtc" and "pep" are other approximations,
    for comparison.

    Time is O(N M^2). With several sets [Z, O, ...] it is the collapsed SOLVE-GP (Shi et al. 2020, Eq. 21), at the best q(v) in
    closed form or, with ``orthogonal``, at a guide's q(v). Outputs (N, D) are independent functions. They share kernel and noise,
    unless these have an axis of outputs.

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import CollapsedGP, kernels
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> Z, y = X[::12], jnp.sin(6 * X[:, 0])
    >>> d = CollapsedGP(kernels.RBF(0.3), X, Z, 0.1)
    >>> print(d.log_prob(y).round(1), d.upper_bound(y).round(1))  # log p(y) is in between
    47.7 52.0
    >>> print(d.posterior(y)(jnp.array([[0.26]])).mean.round(2))
    [1.]

    :param kernel: covariance function; hyperparameters may have a leading axis of D, one for each output.
    :param X: inputs, shape (N, Q), or :func:`latent_inputs`: if the guide gives these a Gaussian, the bound is that of the
        Bayesian GP-LVM (Titsias and Lawrence 2010; Titsias 2025, App. B.5), through kernel expectations.
    :param inducing: inducing points, shape (M, Q), a feature, or a list of sets.
    :param noise_scale: standard deviation of the noise, units of y, shape (), (N,) for noise of each point, (1, D) or (N, D).
    :param bound: one of "titsias2009", "titsias2025", "artemev2021", "conditional" (at most 5000 points), "fitc", "dtc", "pep".
    :param alpha: the power of "pep", in (0, 1].
    :param group_size: G, for "titsias2025", "fitc" and "pep": the residual is treated in groups of G consecutive points, not point
        by point. Larger groups of nearby points give better bounds, at a cost of N G (M + G). Sort the data by
        :func:`numpyro_orthgp.init.groups`.
    :param orthogonal: the result of :func:`orthogonal` for the sets after the first; ``None`` uses the best Gaussians.
    :param loc: prior mean at X, shape (), (N,), (N, D) or (1, D).
    :param observed: True where y is observed, shape (N,) or (N, D); by default everywhere. Other entries of y may be NaN.
    :param num_outputs: D, needed only to draw outputs of shape (N, D).
    :param jitter: as for :func:`gp`; with latent inputs by default 1e-4 in float32 and 1e-6 in float64, since rounding errors of
        kernel expectations are magnified more. Use float64 for the Bayesian GP-LVM.
    :param block_size: points per block, for memory O(M^2 + block_size M); a gradient computes each block twice. By default there is
        one block if matrices have at most 2^22 entries, and otherwise blocks of 2^20 entries; larger blocks suit accelerators.
    :param num_points: Gauss-Hermite nodes per dimension for kernel expectations without closed form; as for ``f.expected(X)``.
    :raises ValueError: for wrong shapes or values, unknown or contradictory options; in a fit after
        ``f(X).independent().sample()``, whose rows are not drawn jointly.
    :raises TypeError: for integer inputs or outputs.

    **References:**

    1. Titsias. Variational Learning of Inducing Variables in Sparse Gaussian Processes. 2009.
    2. Titsias. New Bounds for Sparse Variational Gaussian Processes. 2025. Eqs. 8, 16, 36.
    3. Shi, Titsias, Mnih. Sparse Orthogonal Variational Inference for Gaussian Processes. 2020. Eqs. 11, 21, 22.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("kernel", "X", "features", "noise_scale", "loc", "observed", "orthogonal")
    pytree_aux_fields = (
        "bound", "alpha", "group_size", "num_outputs", "jitter", "block_size", "num_points", "_separate", "_tables",
    )  # fmt: skip

    def __init__(
        self,
        kernel: KernelLike,
        X: ArrayLike | LatentInputs,
        inducing: ArrayLike | Feature | Sequence[Any],
        noise_scale: ArrayLike,
        *,
        bound: str = "titsias2025",
        alpha: float | None = None,
        group_size: int | None = None,
        orthogonal: Sequence[Whitened] | None = None,
        loc: ArrayLike = 0.0,
        observed: ArrayLike | None = None,
        num_outputs: int | None = None,
        jitter: float | None = None,
        block_size: int | None = None,
        num_points: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        refuse_drawn_by_rows("CollapsedGP sees all rows at once")
        features, mean_only = as_sets(inducing)
        if mean_only is not None:
            raise ValueError("`CollapsedGP` takes no MeanOnly points: its q is optimal. Make them a second set.")
        self.features, self.kernel, self.bound = features, as_kernel(kernel), bound
        checked = check_inputs("X", X, dim=input_dim(features))
        self.X = X if isinstance(X, LatentInputs) else checked
        self._tables = KnownTables.of(X, inducing)
        self._tables.labels = getattr(X, "index", None)
        check_same_dtype("X", self.X, features[0].dtype)
        warn_of_coarse_inputs("X", checked, X)
        N = self.X.shape[0]
        uncertain = self._uncertain
        self.alpha = checks.check_bound(bound, alpha, N, len(features), orthogonal is not None, uncertain)
        self.group_size = checks.check_group_size(group_size, bound, N)
        checks.check_given(orthogonal, features)
        self.orthogonal = None if orthogonal is None else tuple(orthogonal)
        with told_of_enumeration():
            self.noise_scale = checks.check_noise(noise_scale, N)
            self.observed = checks.check_observed(observed, N)
            self.loc = checks.check_loc(loc, N)
            self._separate = check_latents(None, self.kernel, features, None if uncertain else checked)
        if num_outputs is None:
            refuse_enumerated(self._separate)
        self.jitter = check_jitter(jitter, features[0].dtype, expectations=uncertain)
        self.block_size, self.num_points = checks.check_block_size(block_size), num_points
        self.num_outputs = self._check_num_outputs(num_outputs)
        shape = (N,) if self.num_outputs is None else (N, self.num_outputs)
        super().__init__((), shape, validate_args=validate_args)

    def shape(self, sample_shape: tuple[int, ...] = ()) -> tuple[int, ...]:
        # NumPyro compares it with the shape of y, (N,) or (N, D); this shape accepts both.
        return tuple(sample_shape) + (self.event_shape if self.num_outputs else (*self.event_shape, 1))

    @property
    def support(self) -> Any:
        return constraints.independent(constraints.real, self.event_dim)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        """The bound on log p(y), in nats, shape ().

        :param value: y, shape (N,) or (N, D).
        :raises TypeError: if y is not floating.
        :raises ValueError: if it has another shape, or holds NaN where it counts as observed.
        """
        return self._log_bound(self._checked(value))

    @one_program
    def _log_bound(self, y: Array) -> Array:
        prior, rows = self._prior(), self._rows(y)
        sums = sum_over_points(prior, rows, self._bound, self._rows_at_once(rows))
        evidence = log_evidence(sums, self._sizes, self.bound)
        return evidence + self._conditional_gain(prior, rows, sums) if self.bound == "conditional" else evidence

    def upper_bound(self, value: ArrayLike) -> Array:
        """An upper bound on log p(y) (Titsias 2014), in nats, shape (). With ``log_prob`` it brackets the exact value.

        The gap measures the quality of the inducing points at these hyperparameters.

        :param value: y, shape (N,) or (N, D).
        :raises ValueError: for latent inputs with a Gaussian, for which no upper bound is known.
        """
        if self._uncertain:
            raise ValueError("`upper_bound` needs known inputs; no upper bound is known for latent inputs.")
        return self._log_upper_bound(self._checked(value))

    @one_program
    def _log_upper_bound(self, y: Array) -> Array:
        prior, rows = self._prior()._replace(given=None), self._rows(y)
        return jnp.sum(log_upper_bound(sum_over_points(prior, rows, Bound("titsias2009"), self._rows_at_once(rows))))

    def posterior(self, value: ArrayLike) -> GPFunction:
        """The function given y, under the best q(u), as from :func:`numpyro_orthgp.posterior` after ``SVI``.

        With ``loc`` it is the function without this mean; predict with f(X) + loc. For "conditional" q(u) is that of
        "titsias2009", the best that is independent of the residual.

        :param value: y, shape (N,) or (N, D).
        :return: one function, or D of them (``num_latents`` = D).
        """
        return self._posterior(self._checked(value))

    def _posterior(self, y: Array, sums: Statistics | None = None) -> GPFunction:
        blocks, moments = self._optimum(y, sums)
        # Latent axes of size 1 count too.
        latent = self._separate is not None or any(q.loc.ndim == 2 for q in self.orthogonal or ())
        single = y.ndim == 1 and not latent
        beliefs = []
        for mean, scale in moments:
            mean = mean[..., 0] if mean.ndim == 3 else mean.T  # (D, M)
            beliefs.append(Full(mean[0] if single else mean, scale))
        num_latents = None if single else 1 if y.ndim == 1 else y.shape[1]
        given = (*beliefs, *(self.orthogonal or ()))
        return GPFunction(self.kernel, self.features, blocks, given, num_latents=num_latents, tables=self._tables)

    @one_program
    def _optimum(self, y: Array, sums: Statistics | None) -> tuple[tuple[Block, ...], list[tuple[Array, Array]]]:
        prior = self._prior()
        return prior.blocks, optimum(self._sums(y, None, prior) if sums is None else sums, self._sizes)

    @one_program
    def _sums(self, y: Array, offset: Array | None = None, prior: Prior | None = None) -> Statistics:
        rows = self._rows(y)
        return sum_over_points(prior or self._prior(), rows, self._bound, self._rows_at_once(rows), offset)

    def sample(self, key: PRNGKey | None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of y from the exact prior N(loc, K + noise), for any bound, at the draw of latent inputs.

        :raises ValueError: for more than 8192 points, whose covariance matrix is too large.
        """
        key = check_key(key, "outputs of CollapsedGP")
        N = self.event_shape[0]
        if N > MAX_JOINT_DRAW:
            raise ValueError(
                f"Draws of y need the Cholesky factor of an N x N matrix; the limit is N = {MAX_JOINT_DRAW}, got {N}. Draw at "
                "fewer inputs, or predict with .posterior(y)."
            )
        X = jnp.asarray(self.X)
        K, D = self.kernel(X, X), self.num_outputs or 1
        scale = jitter_scale(diagonal(K))
        L = safe_cholesky(add_jitter(K, default_jitter(K.dtype) * scale), scale)
        f_key, noise_key = jax.random.split(key)
        f = matmul(L, jax.random.normal(f_key, (*sample_shape, D, N, 1), X.dtype))[..., 0]
        noise = self.noise_scale * jax.random.normal(noise_key, (*sample_shape, N, D), X.dtype)
        y = jnp.swapaxes(f, -1, -2) + noise + self._columns(self.loc)
        return y if self.num_outputs else y[..., 0]

    @property
    def mean(self) -> Array:
        return self._as_event(self._columns(self.loc))

    @property
    def variance(self) -> Array:
        return self._as_event(jnp.atleast_2d(self.kernel(jnp.asarray(self.X))).T + self.noise_scale**2)

    def expand(self, batch_shape: tuple[int, ...]) -> dist.Distribution:
        if tuple(batch_shape) == ():
            return self
        raise ValueError(
            "CollapsedGP is one joint density of all its points and cannot be repeated: use it outside of plates, with all of "
            "the data. For minibatches use gp(...) and a likelihood."
        )

    @property
    def _uncertain(self) -> bool:
        return isinstance(self.X, LatentInputs) and self.X.scale is not None

    @property
    def _bound(self) -> Bound:
        return Bound(self.bound, self.alpha, self.group_size)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Number of inducing variables of each set that is integrated out."""
        sizes = tuple(s.num for s in self.features)
        return sizes if self.orthogonal is None else sizes[:1]

    def _check_num_outputs(self, num_outputs: int | None) -> int | None:
        if self._separate is not None:
            if self._uncertain:
                raise ValueError("With latent inputs the kernel's hyperparameters must not have a leading axis.")
            if num_outputs not in (None, self._separate):
                raise ValueError(
                    f"`num_outputs` is {num_outputs} but the kernel or the inducing points have a leading axis of {self._separate}."
                )
            num_outputs = self._separate
        parts = {"noise_scale": self.noise_scale, "loc": self._columns(self.loc), "observed": self.observed}
        return checks.check_columns(num_outputs, parts)

    def _prior(self) -> Prior:
        blocks = decompose_sets(self.kernel, self.features, self.jitter)
        return Prior(self.kernel, self.features, blocks, self.orthogonal, self.num_points)

    def _checked(self, value: ArrayLike) -> Array:
        y = checks.check_outputs(value, self.event_shape[0], self.num_outputs, self.observed, self._tables.labels)
        warn_of_offset("`y`", (y if y.ndim == 2 else y[:, None]) - self._columns(self.loc), self.observed)
        D = y.shape[1] if y.ndim == 2 else 1
        for q in self.orthogonal or ():
            if q.loc.shape[:-1] not in ((), (D,)) or (q.loc.ndim == 1 and D > 1):
                raise ValueError(
                    f"y has shape {y.shape} but `orthogonal` a q of shape {q.loc.shape}: give orthogonal() num_latents={D}."
                )
        return y

    def _rows(self, y: Array) -> Rows:
        precision = 1 / jnp.square(self.noise_scale)
        if self.observed is not None:
            precision = jnp.where(self.observed, precision, 0)
        precision = jnp.broadcast_to(precision, (len(y), precision.shape[-1] if precision.ndim == 2 else 1))
        Y = (y if y.ndim == 2 else y[:, None]) - self._columns(self.loc)
        precision = precision[:, 0] if precision.shape[1] == 1 else precision
        if isinstance(self.X, LatentInputs) and self.X.loc is not None:
            return Rows(self.X.loc, self.X.scale, Y, precision)
        return Rows(jnp.asarray(self.X), None, Y, precision)

    def _rows_at_once(self, rows: Rows) -> int | None:
        if self.block_size is not None:
            return self.block_size
        M = sum(s.num for s in self.features)
        outputs = rows.precision.shape[1] if rows.precision.ndim == 2 else self._separate or 1
        of_one_row = M * (M if self._uncertain else outputs)
        most = MAX_ENTRIES_EXPECTATIONS if self._uncertain else MAX_ENTRIES
        return None if len(rows.Y) * of_one_row <= most else max(1, most // (4 * of_one_row))

    def _conditional_gain(self, prior: Prior, rows: Rows, sums: Statistics) -> Array:
        A = project_inputs(prior, rows.X)
        given = prior.given or ()
        Y, _ = without_orthogonal(given, A[1:], rows.Y)
        residual = residual_covariance(self.kernel(rows.X, rows.X), A, A)
        for q, Ai in zip(given, A[1:], strict=True):
            W = q.spread(Ai)
            residual = residual if W is None else residual + matmul(jnp.swapaxes(W, -1, -2), W)
        precision = jnp.broadcast_to(rows.precision.T, (Y.shape[1], Y.shape[0]))
        return jnp.sum(conditional_gain(sums, A[0], residual, precision))

    def _columns(self, x: Array) -> Array:
        return x[:, None] if x.ndim == 1 and x.shape != (1,) else x

    def _as_event(self, columns: Array) -> Array:
        y = jnp.broadcast_to(columns, (self.event_shape[0], self.num_outputs or 1))
        return y if self.num_outputs else y[:, 0]
