"""The optimizer that moves every Gaussian of a guide along its natural gradient, and leaves the rest to another optimizer.

**Parameters are kept.** With ``natural=True`` q is still stored as ``f.u{i}_loc`` and ``f.u{i}_scale_tril``, not as natural
parameters. So a fit can be read, saved and continued by any optimizer. The type of their unconstrained form marks them:
:class:`~numpyro_orthgp.gaussians.constraints.Natural`, a wrapper around the array. The step uses ordinary gradients
(:mod:`numpyro_orthgp.gaussians.natural_step`).

**Steps that are too long.** If the next gradient is not finite, or its squared length has grown a million times, the
Gaussians go back and try a quarter of the step, while everything else waits.

**One after the other.** Steps of several sets are made to depend on each other: two branches running at once inside
``lax.scan`` made the CPU runtime of jaxlib 0.10.2 wait forever in about one run of six on two cores. It is not known whether the
cause is that of ``one_by_one`` in ``math/linalg.py``.

**Parameters that move only the mean take no natural step.** The Fisher matrix is the identity for a "prior" set and C for
mean-only weights. Neither contains the curvature of the data, so plain steps diverge unless they are far too short to be useful:
1e-3 where others take 0.1, on 4000 rows of kin40k. So an adaptive optimizer moves these parameters, as in Salimbeni et al. 2018,
Sec. 3.4. Gradients of weights arrive preconditioned by C^-1 (Eq. 16a), or by its diagonal for more than 1024 points (Eq. 17; this
has no effect on Adam, which divides by the size of each entry). ``benchmarks/decoupled_bases.py`` compares this with the hybrid
and the decoupled basis of Cheng and Boots 2017, which are not part of the library: they have the same optimum but reach it far more
slowly or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.optim import _NumPyroOptim

from numpyro_orthgp.errors import inspect
from numpyro_orthgp.gaussians.constraints import Natural
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.gaussians.optimizers import as_optax
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["is_waiting", "natural_gradient"]


# If a gradient's squared length, in units of q, grows by more in one step, the step was far too long for its formula.
_MOST_GROWTH = 1e6

# Factor that shortens a step after such a gradient, or after one that is not finite.
_SHORTER = 0.25


class _Past(NamedTuple):
    """The start of the Gaussians' last step, to which a step that was too long goes back."""

    params: dict[str, Natural]
    gradients: dict[str, Natural]
    size: Array
    length: Array


class _State(NamedTuple):
    step: Array
    others: Any
    mean_only: Any
    past: _Past


def natural_gradient(
    others: optax.GradientTransformation | _NumPyroOptim,
    learning_rate: ArrayLike | Callable[[Array], Any],
    *,
    ramp_up: int = 0,
    mean_only: optax.GradientTransformation | _NumPyroOptim | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Natural gradients for the Gaussians of a guide with ``natural=True``; ``others`` updates all other parameters.

    ::

        guide = AutoSparseGP(model, natural=True)
        optim = natural_gradient(optax.adam(1e-2), learning_rate=0.1)
        svi = SVI(model, guide, optim, TraceMeanField_ELBO())

    Each set of inducing variables takes its own step (the Fisher matrix of q is block diagonal), and all use the same
    gradient. With Gaussian noise, one set and all data, one step of length 1 reaches the optimum of q. A step that
    would make a covariance indefinite is shortened. See :mod:`numpyro_orthgp.gaussians.natural_step` for the formula.

    A step is taken back if the next gradient is not finite, or more than 1000 times as long as before. For example, with counts of
    a million and a log link, the first step leads to means of a million, whose exponential overflows. The Gaussians go back and try
    a quarter of the step, until a gradient is usable; everything else waits. Losses of such steps, also infinite ones, stay in the
    history. :func:`fit` stops at the first loss that is not finite, and SVI's ``stable_update`` refuses such steps before they can
    be taken back. In these cases start near the data, with ``f(X) + jnp.log(y.mean())`` for counts.

    Parameters that move only the mean take no natural step. It would diverge, since their Fisher matrix, the prior's covariance,
    does not contain the curvature of the data. ``others`` updates sets with covariance "prior", and ``mean_only`` the weights of
    :class:`~numpyro_orthgp.MeanOnly` points. Gradients of the weights arrive preconditioned by the Fisher matrix, or by its
    diagonal for more than 1024 points (Eqs. 16a and 17 of [3], who also use an adaptive optimizer). Adam cancels a fixed diagonal;
    the full matrix helps it at larger rates.

    >>> import jax.numpy as jnp, numpyro, optax
    >>> from jax.random import PRNGKey
    >>> from numpyro.infer import SVI, TraceMeanField_ELBO
    >>> import numpyro_orthgp as ogp
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> y, Z, kernel = jnp.sin(6 * X[:, 0]), X[::10], ogp.kernels.RBF(0.3)
    >>> def model():
    ...     f = ogp.gp("f", kernel, Z)
    ...     with numpyro.plate("data", len(X)):
    ...         numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.5), obs=y)
    >>> guide = ogp.AutoSparseGP(model, natural=True)
    >>> optim = ogp.natural_gradient(optax.adam(1e-2), 1.0)
    >>> svi = SVI(model, guide, optim, TraceMeanField_ELBO())
    >>> losses = svi.run(PRNGKey(0), 2, progress_bar=False).losses
    >>> best = ogp.CollapsedGP(kernel, X, Z, 0.5, bound="titsias2009").log_prob(y)
    >>> print((-losses).round(2), best.round(2))  # before the first step, after it; the optimum
    [-162.55  -21.13] -21.13

    :param others: optimizer, from optax or ``numpyro.optim``, of hyperparameters, inducing points, residual scales and the rest.
    :param learning_rate: length of the natural steps, or a schedule of it. Usual values: 1 for Gaussian noise and full data
        with one set of full covariance; at most 1 over their number for several sets or functions; about 0.1 for minibatches, other
        likelihoods or diagonal covariances, and where hyperparameters are drawn, as by ``hyper=AutoNormal``: a step of 1 goes to
        the optimum for one draw. If the model draws f, ``f(X).sample()``, q follows the noise at any constant rate: let it fall
        to zero, ``optax.cosine_decay_schedule(0.1, num_steps)``, or use ``TraceMeanField_ELBO(num_particles=10)``.
        :func:`check` says how far from its optimum q is.
    :param ramp_up: number of first steps over which the length grows, log-linearly, from 1/10,000 of its value. Use it for
        non-Gaussian likelihoods, whose first steps from a poor start are too long otherwise (Salimbeni, Eleftheriadis, Hensman
        2018, Sec. 5).
    :param mean_only: optimizer of the weights of ``MeanOnly`` points. Their size is that of y divided by the noise variance, so
        they need larger steps than hyperparameters: ``optax.adam`` with 0.1 for labels or minibatches, up to 1 for
        regression on all data. By default ``others``.
    :return: an optax transformation; its ``update`` needs ``params``, which NumPyro's ``SVI`` passes.
    :raises TypeError: if ``others`` or ``mean_only`` is not an optimizer, or calls the loss itself.
    :raises ValueError: if ``learning_rate`` is not positive or ``ramp_up`` negative; from ``init``, if no Gaussian was declared
        ``natural``.

    **References:**

    1. Hensman, Fusi, Lawrence. Gaussian Processes for Big Data. 2013.
    2. Salimbeni, Eleftheriadis, Hensman. Natural Gradients in Practice. 2018.
    3. Salimbeni, Cheng, Boots, Deisenroth. Orthogonally Decoupled Variational Gaussian Processes. 2018. Eqs. 16-17.
    """
    optimizers = [
        as_optax("others", others),
        as_optax("mean_only", optax.identity() if mean_only is None else mean_only),
    ]
    if not callable(learning_rate):
        inspect(_refuse_not_positive, learning_rate)
    if ramp_up < 0:
        raise ValueError(f"`ramp_up` must be a number of steps, 0 for none; got {ramp_up}.")

    def split(tree: dict[str, Any], gaussians: list[_Gaussian]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parameters for ``others`` and those for ``mean_only``."""
        stepped = {name for q in gaussians for name in q.names}
        weights = {n for n, v in tree.items() if isinstance(v, Natural) and n not in stepped and mean_only is not None}
        return {n: v for n, v in tree.items() if n not in stepped | weights}, {n: tree[n] for n in weights}

    def init(params: dict[str, Any]) -> _State:
        parts = split(params, _gaussians(params))
        states = (o.init(p) for o, p in zip(optimizers, parts, strict=True))
        of_others, of_weights = states
        return _State(jnp.zeros((), jnp.int32), of_others, of_weights, _no_past(params))

    def update(
        gradients: dict[str, Any], state: _State, params: dict[str, Any] | None = None, **extra: Any
    ) -> tuple[dict[str, Any], _State]:
        if params is None:
            raise ValueError("natural_gradient needs the parameters: call update(gradients, state, params).")
        gaussians = _gaussians(params)
        before = (state.others, state.mean_only)
        parts = zip(optimizers, split(gradients, gaussians), before, split(params, gaussians), strict=True)
        updates, states = zip(*(o.update(g, s, p, **extra) for o, g, s, p in parts), strict=True)
        past, too_long = _look_back(gaussians, params, gradients, state.past)
        updates = jax.tree.map(lambda u: jnp.where(too_long, jnp.zeros_like(u), u), updates)
        states = jax.tree.map(lambda old, new: jnp.where(too_long, old, new), before, states)
        rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
        if ramp_up:
            rate = rate * 10.0 ** (-4 * jnp.maximum(1 - state.step / ramp_up, 0))
        rate = rate * past.length
        merged = {name: value for part in updates for name, value in part.items()}
        merged |= _natural_updates(gaussians, params, past, rate)
        return merged, _State(state.step + 1, states[0], states[1], past)

    return optax.GradientTransformationExtraArgs(init, update)


def _refuse_not_positive(learning_rate: ArrayLike) -> None:
    if not np.asarray(learning_rate) > 0:
        raise ValueError(f"`learning_rate` must be positive; got {learning_rate}.")


def is_waiting(state: Any) -> Array | None:
    """Whether the last step was taken back while everything else waited; None for the state of another optimizer."""
    return state.past.length < 1 if isinstance(state, _State) else None


class _Gaussian(NamedTuple):
    """One q among the parameters.

    :param family: a subclass of :class:`Whitened`.
    :param names: names of its parameters, in the order of the family's fields.
    """

    family: type[Whitened]
    names: tuple[str, ...]

    def member(self, tree: dict[str, Any]) -> Whitened:
        """The Gaussian, or its gradient, whose parameters are in ``tree``."""
        return self.family(*(tree[name].value for name in self.names))


def _gaussians(params: dict[str, Any]) -> list[_Gaussian]:
    found = []
    for name, value in params.items():
        if isinstance(value, Natural) and value.part == "loc":
            prefix = name.removesuffix("loc")
            found.append(_Gaussian(value.family, tuple(prefix + part for part in value.family.parts())))
    if not found:
        raise ValueError(
            "natural_gradient found no Gaussian to step: make the guide with AutoSparseGP(model, natural=True), or "
            "gp_posterior(..., natural=True). A set with covariance 'prior' has none: its natural gradient is the gradient."
        )
    return found


def _no_past(params: dict[str, Any]) -> _Past:
    start = {name: params[name] for q in _gaussians(params) for name in q.names}
    one = jnp.ones((), jnp.result_type(*jax.tree.leaves(start)))
    # There is no earlier gradient for comparison. An infinite size would stop fits with jax_debug_infs.
    most = jnp.finfo(one.dtype).max / _MOST_GROWTH
    return _Past(start, jax.tree.map(jnp.zeros_like, start), one * most, one)


def _look_back(
    gaussians: list[_Gaussian], params: dict[str, Any], gradients: dict[str, Any], past: _Past
) -> tuple[_Past, Array]:
    """The start and length of the next step, and whether the last step was too long."""
    size, finite = jnp.zeros_like(past.size), jnp.ones((), bool)
    for q in gaussians:
        gradient = q.member(gradients)
        ahead = q.member(params).spread(gradient.loc[..., None])
        assert ahead is not None
        size = size + jnp.sum(ahead**2)
        finite = jax.tree.reduce(lambda known, g: known & jnp.isfinite(g).all(), gradient, finite)
    too_long = ~finite | (size > _MOST_GROWTH * jnp.maximum(past.size, 1))
    now = _Past(
        {name: params[name] for name in past.params},
        {name: gradients[name] for name in past.params},
        size,
        jnp.ones_like(past.length),
    )
    again = past._replace(length=past.length * _SHORTER)
    return jax.tree.map(lambda old, new: jnp.where(too_long, old, new), again, now), too_long


def _natural_updates(
    gaussians: list[_Gaussian], params: dict[str, Any], past: _Past, rate: ArrayLike
) -> dict[str, Natural]:
    merged: dict[str, Natural] = {}
    last: Any = 0.0
    for q in gaussians:
        # One after the other: if two of them run at once, each with a branch, inside `lax.scan`, the CPU runtime of
        # jaxlib 0.10.2 may wait forever. An `optimization_barrier` instead of a dependency did not help.
        end = q.names[-1]
        after_last = jax.tree.map(lambda g, last=last: g + 0 * jnp.asarray(last, g.dtype), past.gradients[end])
        step = _natural_update(q, params, past.params, past.gradients | {end: after_last}, rate)
        last = step[end].value.ravel()[0]
        merged |= step
    return merged


def _natural_update(
    q: _Gaussian, params: dict[str, Any], start: dict[str, Any], gradients: dict[str, Any], rate: ArrayLike
) -> dict[str, Natural]:
    """The update from the parameters to the end of a step from ``start``; zero if that end is not finite."""
    before = q.member(start)
    after = before.natural_step(q.member(gradients), rate)
    finite = jax.tree.reduce(lambda known, a: known & jnp.isfinite(a).all(), after, jnp.ones((), bool))
    change = jax.tree.map(lambda a, b: jnp.where(finite, a - b, jnp.zeros_like(b)), after, q.member(params))
    # Wrapped like the parameters, since an optimizer adds trees with one structure.
    return {
        n: Natural(getattr(change, part), q.family, part) for n, part in zip(q.names, q.family.parts(), strict=True)
    }
