r"""Online variational conditioning: conditions a fitted function on new data (Maddox, Stanton, Wilson 2021).

q(f) is a Gaussian process, so it can be the prior for new data. The new inputs become one more orthogonal set, so
:math:`f(x_n) = A(x_n)^\top e`. Each observation becomes a Gaussian factor :math:`\exp(\lambda_n f_n - \tfrac12 \pi_n f_n^2)`. Its
parameters are those of conjugate-computation variational inference (Khan and Lin 2017):

.. math:: \pi_n = -2\, \partial_{v_n} E, \qquad \lambda_n = \partial_{m_n} E + \pi_n m_n,
    \qquad E = E_{N(f_n; m_n, v_n)}[\log p(y_n \mid f_n)].

With Gaussian noise the first step gives them, and the result is exact. Otherwise they are iterated to the best Gaussian
posterior. The full step overshoots far from the data, and if a likelihood mixes functions, each of which corrects the same error.
So if the bound would fall, the step is halved. There is a warning if iterations end before they have converged.

Data correlate the new inputs with all sets, so all are joined into one set. In it each variable keeps its own jitter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax

from numpyro_orthgp.closures import as_pytree
from numpyro_orthgp.errors import check_integer, inspect
from numpyro_orthgp.foreign import as_outputs, check_labels_of_tables
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.mean_only import MeanShift, project_shift
from numpyro_orthgp.functions.prior import check_jitter
from numpyro_orthgp.functions.projection import Block, extend, joint_whitener, project
from numpyro_orthgp.functions.rounding import MUCH_ROUNDED, rounding_of
from numpyro_orthgp.functions.sites import refuse_while_fitting
from numpyro_orthgp.gaussians.family import Full, Shifted, Whitened
from numpyro_orthgp.inducing import InducingPoints
from numpyro_orthgp.likelihoods.base import check_observed
from numpyro_orthgp.likelihoods.wrapped import MASK
from numpyro_orthgp.math.cholesky import inverse_cholesky, root_of_inverse
from numpyro_orthgp.math.kept import run_as_one
from numpyro_orthgp.math.linalg import join, safe_sqrt
from numpyro_orthgp.math.products import diagonal, matmul
from numpyro_orthgp.online.checks import check_function
from numpyro_orthgp.online.noise import as_likelihood, check_likelihood
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["condition"]

_MOST = 16_384  # variables of the result, of which some ten square matrices of 2 GB are held in float64
# The bound's gradient may still move a mean by so many standard deviations of the function before the new data.
_SETTLED = 0.01


class _Grown(NamedTuple):
    """A function with one more set, still at its prior, and the variables of all sets joined.

    :param points: inducing points of all sets.
    :param blocks: blocks of all sets.
    :param mean: mean of the function at the new inputs, shape (..., B).
    :param A: projections of the new inputs on all sets, shape (..., M, B).
    :param loc: mean of all whitened variables, shape (..., M).
    :param scale: lower-triangular root of their covariance, shape (..., M, M).
    :param shift: mean-only points.
    """

    points: tuple[Array, ...]
    blocks: tuple[Block, ...]
    mean: Array
    A: Array
    loc: Array
    scale: Array
    shift: MeanShift | None


class _Sites(NamedTuple):
    """The factors of all points, pi and lambda, each of shape (B,) or (P, B)."""

    precision: Array
    slope: Array


class _Iteration(NamedTuple):
    """The state of the search for the factors.

    :param best: the factors with the highest bound so far.
    :param target: the full update of ``best``, from the marginals under ``best``.
    :param bound: expected log density minus divergence, at ``best``, shape ().
    :param size: the next step, as a share of the way from ``best`` to ``target``, shape ().
    :param move: the change of each mean by the bound's gradient alone, zero at the best Gaussian, shape (..., B).
    """

    best: _Sites
    target: _Sites
    bound: Array
    size: Array
    move: Array

    def tried(self) -> _Sites:
        return jax.tree.map(lambda old, new: old + self.size * (new - old), self.best, self.target)


def condition(
    f: GPFunction,
    X: ArrayLike,
    y: Any,
    likelihood: ArrayLike | Callable[[Marginals], dist.Distribution],
    *,
    num_steps: int = 20,
    step_size: float = 1.0,
    jitter: float | None = None,
) -> GPFunction:
    """Condition a function on new observations. Their inputs become further inducing points.

    ::

        f = condition(f, X_new, y_new, noise)  # the standard deviation of Gaussian noise
        f = condition(f, X_new, labels, likelihoods.Bernoulli)

    The cost is O((M + B)^3). The result has M + B inducing points, in one set with a full covariance; :func:`compress` reduces
    their number. Hyperparameters do not change, nor do values of inducing variables (an MCMC draw).

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import CollapsedGP, kernels, likelihoods, online
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> f = CollapsedGP(kernels.RBF(0.3), X, X[::10], 0.1).posterior(jnp.sin(6 * X[:, 0]))
    >>> X_new, y_new = jnp.array([[2.0]]), jnp.array([1.5])
    >>> g = online.condition(f, X_new, y_new, lambda f: likelihoods.Gaussian(f, 0.1))
    >>> print(f(X_new).mean.round(2), g(X_new).mean.round(2), g.num_inducing)
    [0.] [1.49] 6

    :param f: a fitted function, from :func:`~numpyro_orthgp.posterior` or this module. Its sets must be inducing points.
    :param X: new inputs, shape (B, D).
    :param y: their observations, with the likelihood's shape.
    :param likelihood: a function from marginals f(X) to the likelihood of y, including all its parameters; or the standard
        deviation of Gaussian noise, a number or an array that broadcasts to y.
    :param num_steps: number of updates of the factors. 1 is enough for Gaussian noise of known size; a likelihood that mixes latent
        functions may need hundreds. Outside of ``jit`` there is a warning if the factors have not converged.
    :param step_size: largest step, in (0, 1]. Steps are halved automatically if the bound would fall.
    :param jitter: relative jitter of the new points, as for :func:`~numpyro_orthgp.gp`.
    :raises TypeError: if ``f`` is no function of one gp, a set of it is not inducing points, ``X`` has another dtype, or what
        ``likelihood`` makes of marginals is no likelihood of this package.
    :raises ValueError: if shapes do not match, y lies outside of the likelihood's support (NaN, which a mask may hide, does),
        ``num_steps`` or ``step_size`` is out of range, there are more than 16384 points, or a guide is fitting ``f``, within its
        model.
    """
    check_function("condition", f)
    refuse_while_fitting("condition", f.fitting)
    if not all(isinstance(s, InducingPoints) for s in f.features):
        raise TypeError("`condition` needs a function whose sets are inducing points; compress(f, points) makes one.")
    check_integer("num_steps", num_steps)
    if not 0 < step_size <= 1:
        raise ValueError(f"`step_size` must be in (0, 1], a share of the way; got {step_size!r}.")
    check_labels_of_tables(("X", "y"), (X, y))
    y = as_outputs("y", y, MASK)
    dtype = f.features[0].dtype
    y = y.astype(dtype) if jnp.issubdtype(y.dtype, jnp.floating) else y
    make, X, jitter = as_likelihood(likelihood, dtype), f.checked(X), check_jitter(jitter, dtype)

    num = f.num_inducing + len(X)
    if num > _MOST:
        raise ValueError(
            f"`condition` makes one set of all points, {f.num_inducing} old and {len(X)} new ones, and needs several matrices of "
            f"{num} x {num}; the limit is {_MOST}. Give it some thousand rows at a time, with `compress` after each, or add the "
            "new rows to a fit; Gaussian noise on any number of rows: online.from_blocks."
        )
    condition_all = partial(_condition, num_steps, step_size, jitter)
    result, end, rounding = run_as_one(condition_all, as_pytree(make), f, X, y)
    inspect(partial(_warn_rounded, dtype), rounding)
    if num_steps > 1:  # the first step starts without factors
        inspect(partial(_warn_unsettled, num_steps), *end)
    return replace(result, kernel=f.kernel, tables=f.tables)


def _condition(
    num_steps: int, step_size: float, jitter: float, make: Any, f: GPFunction, X: Array, y: Array
) -> tuple[GPFunction, tuple[Array, Array], Array]:
    """The function given the factors; of the last step how far means moved, with the variances before, each (..., B); and how much
    of the result's standard deviations is rounding, shape (..., M)."""
    points = [s.points for s in f.features if isinstance(s, InducingPoints)]
    grown = _grow(f, points, X, jitter)
    root = matmul(jnp.swapaxes(grown.scale, -1, -2), grown.A)  # of the covariance at the new inputs, (..., M, B)

    def given(mean: Array, variance: Array) -> dist.Distribution:
        mean, variance = (a.T if f.num_latents else a for a in (mean, variance))
        return make(Marginals(mean, variance, jnp.zeros_like(variance)))

    def expected(mean: Array, variance: Array) -> Array:
        return jnp.sum(given(mean, variance).log_prob(y))

    fn = given(grown.mean, jnp.sum(root**2, -2))
    check_likelihood(fn)
    check_observed("y", fn, y)
    zeros = jnp.zeros_like(grown.mean)
    nothing, size = _Sites(zeros, zeros), jnp.asarray(step_size, zeros.dtype)
    start = _Iteration(nothing, nothing, jnp.full_like(size, -jnp.inf), size, zeros)
    last = lax.fori_loop(0, num_steps, lambda _, state: _step(state, grown.mean, root, expected, step_size), start)
    # The next factors have no bound yet. One step ends with them, and so do data whose bound is not finite, which must be visible.
    is_known = jnp.isfinite(last.bound) & (num_steps > 1)
    sites = jax.tree.map(lambda best, tried: jnp.where(is_known, best, tried), last.best, last.tried())
    result = _given(f, grown, root, sites)
    at = join(grown.points, -2, event_dim=2)
    rounding = jnp.zeros(()) if at.ndim > 2 else rounding_of(result, at, result.project(at))
    return result, (last.move, jnp.sum(root**2, -2)), rounding


def _grow(f: GPFunction, points: Sequence[Array], X: Array, jitter: float) -> _Grown:
    new = InducingPoints(X)
    features = (*f.features, new)
    row = [s.covariance(f.kernel, new) for s in features]
    blocks = extend(f.blocks, row, jitter)
    A, loc, shift = project(blocks, row), jnp.zeros(len(X), X.dtype), f.shift
    mean = f.mean_from([new], A[:-1])
    if shift is not None:
        # The effect of mean-only points in the new set's directions becomes the mean of its variables.
        loc = project_shift(f.kernel, features, blocks, shift.points, shift.weights)[-1]
        shift = replace(shift, projected=(*shift.projected, loc))
    beliefs = (*f.beliefs, Shifted(loc))
    batch = () if f.num_latents is None else (f.num_latents,)

    def each(part: Array, event_dim: int) -> Array:
        return jnp.broadcast_to(part, batch + part.shape[part.ndim - event_dim :])

    mean, A_all = each(mean, 1), each(join(A, -2, event_dim=2), 2)
    loc = each(join([q.loc for q in beliefs], -1, event_dim=1), 1)
    return _Grown((*points, X), blocks, mean, A_all, loc, _joint_root(beliefs, batch), shift)


def _joint_root(beliefs: Sequence[Whitened], batch: tuple[int, ...]) -> Array:
    """The block-diagonal root of the covariance of all whitened variables, shape (*batch, M, M)."""
    ends = list(accumulate(q.loc.shape[-1] for q in beliefs))
    root = jnp.zeros((*batch, ends[-1], ends[-1]), beliefs[0].loc.dtype)
    for q, end in zip(beliefs, ends, strict=True):
        own = slice(end - q.loc.shape[-1], end)
        root = root.at[..., own, own].set(q.lower_root())
    return root


def _step(
    state: _Iteration, mean: Array, root: Array, expected: Callable[[Array, Array], Array], step_size: float
) -> _Iteration:
    """Try the next factors. If the bound falls, the step was too long."""
    sites = state.tried()
    pi = safe_sqrt(sites.precision)[..., None, :] * root  # (..., M, B)
    eye = jnp.eye(pi.shape[-1], dtype=pi.dtype)
    W = inverse_cholesky(eye + matmul(jnp.swapaxes(pi, -1, -2), pi), jnp.ones(pi.shape[:-2], pi.dtype))
    explained = matmul(W, matmul(jnp.swapaxes(pi, -1, -2), root))  # (..., B, B)
    variance = jnp.maximum(jnp.sum(root**2, -2) - jnp.sum(explained**2, -2), 0)
    pull = sites.slope - sites.precision * mean
    own = matmul(jnp.swapaxes(root, -1, -2), matmul(root, pull[..., None]))[..., 0]
    moved = own - matmul(jnp.swapaxes(explained, -1, -2), matmul(explained, pull[..., None]))[..., 0]
    m = mean + moved
    fit, (slope, curvature) = jax.value_and_grad(expected, (0, 1))(m, variance)
    # The log of the factors' mean under the prior, and the mean of their log.
    linear, square = jnp.sum(pull * moved), jnp.sum(sites.precision * (variance + moved**2)) / 2
    evidence = linear / 2 + jnp.sum(jnp.log(diagonal(W)))
    bound = lax.stop_gradient(fit - (linear - square - evidence))
    # `moved` is a small difference of large terms; one of these is `own`.
    rounding = 100 * jnp.finfo(bound.dtype).eps * lax.stop_gradient(jnp.abs(fit) + jnp.sum(pull * own) + square)
    # The first step has no factors yet: values that are not finite come from data or likelihood, and must be visible.
    better = (jnp.isfinite(bound) & (bound >= state.bound - rounding)) | jnp.isneginf(state.bound)
    # If the likelihood is not log-concave, the factor's precision would be negative. It is then zero.
    precision = jnp.maximum(-2 * curvature, 0)
    target = _Sites(precision, slope + precision * m)
    move = variance * (slope - sites.slope + sites.precision * m)
    best, target, bound, move = jax.tree.map(
        lambda new, old: jnp.where(better, new, old),
        (sites, target, bound, move),
        (state.best, state.target, state.bound, state.move),
    )
    size = jnp.where(better, jnp.minimum(2 * state.size, step_size), state.size / 2)
    return _Iteration(best, target, bound, size, move)


def _warn_rounded(dtype: Any, rounding: Array) -> None:
    most = float(jnp.max(rounding))
    if most > MUCH_ROUNDED:
        warnings.warn(
            f"After `condition` up to {min(most, 1):.0%} of the function's standard deviation at its points is rounding: the "
            f"variance there is not far above that of {dtype}. Use 64-bit floats (numpyro.enable_x64()), or fewer points.",
            stacklevel=4,
        )


def _warn_unsettled(num_steps: int, move: Array, variance: Array) -> None:
    distance = float((np.abs(np.asarray(move)) / np.sqrt(np.maximum(variance, np.finfo(variance.dtype).tiny))).max())
    if not distance <= _SETTLED:
        warnings.warn(
            f"`condition` has not found the best Gaussian: after {num_steps} steps means still move by up to {distance:.2g} "
            "standard deviations. Give it a larger `num_steps`; a likelihood that mixes latent functions takes hundreds.",
            stacklevel=4,
        )


def _given(f: GPFunction, grown: _Grown, root: Array, sites: _Sites) -> GPFunction:
    """The function given the factors, with one set of all points and S'^-1 = S^-1 + A diag(pi) A'."""
    pi = safe_sqrt(sites.precision)[..., None, :] * root
    Q = jnp.eye(pi.shape[-2], dtype=pi.dtype) + matmul(pi, jnp.swapaxes(pi, -1, -2))
    # T' = T F with F F' = Q^-1.
    scale = jnp.tril(matmul(grown.scale, root_of_inverse(Q, jnp.ones(Q.shape[:-2], Q.dtype))))
    pull = matmul(grown.A, (sites.slope - sites.precision * grown.mean)[..., None])
    loc = grown.loc + matmul(scale, matmul(jnp.swapaxes(scale, -1, -2), pull))[..., 0]
    shift = grown.shift
    if shift is not None:
        shift = replace(shift, projected=(join(shift.projected, -1, event_dim=1),))
    triangular = all(b.triangular for b in grown.blocks)
    sizes = (b.whitener.shape[-1] for b in grown.blocks)
    jitters = [jnp.broadcast_to(b.jitter, (*b.jitter.shape[:-1], M)) for b, M in zip(grown.blocks, sizes, strict=True)]
    block = Block(joint_whitener(grown.blocks), (), join(jitters, -1, event_dim=1), triangular=triangular)
    return GPFunction(
        f.kernel,
        (InducingPoints(join(grown.points, -2, event_dim=2)),),
        (block,),
        (Full(loc, scale),),
        shift,
        num_latents=f.num_latents,
    )
