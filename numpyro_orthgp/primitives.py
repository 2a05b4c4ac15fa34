"""The primitive :func:`gp`: the only room that knows NumPyro's message stack.

A guide hands the Gaussian from which it drew a site's value to the model in the site's ``infer`` dictionary, which
NumPyro's ``replay`` copies from guide to model. :func:`gp` looks there: with a :class:`Belief` it integrates over the
Gaussian, with none it takes the value.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
from jax import lax
from jax.tree_util import Partial
from numpyro.distributions import constraints
from numpyro.infer import RenyiELBO
from numpyro.primitives import Messenger, apply_stack

from numpyro_orthgp.constraints import natural as natural_constraint
from numpyro_orthgp.distributions import WhitenedPrior
from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.inducing import Feature, MeanOnly, as_sets, covariance_of_points
from numpyro_orthgp.marginals import Names
from numpyro_orthgp.math.gaussian import Whitened
from numpyro_orthgp.math.linalg import PRECISION, add_jitter, default_jitter, inverse_cholesky
from numpyro_orthgp.math.natural import precondition
from numpyro_orthgp.math.projection import Block, decompose, project, residual_covariance, residual_variance
from numpyro_orthgp.process import GPFunction, MeanShift
from numpyro_orthgp.types import Array, ArrayLike, KernelLike

__all__ = ["Belief", "CollectFunctions", "Site", "belief_of", "gp", "site_of"]

_KEY = "numpyro_orthgp"

# Up to so many mean-only points the inverse of their Fisher matrix preconditions natural gradients, beyond its diagonal.
MAX_EXACT_FISHER = 1024


class Site(NamedTuple):
    """What the model writes into the ``infer`` of a whitened inducing site, for guides to read.

    :param position: position of the set in its gp.
    :param shape: event shape of the site, (M,) or (P, M).
    :param dtype: dtype of the site.
    """

    position: int
    shape: tuple[int, ...]
    dtype: Any


class Belief(NamedTuple):
    """What a guide writes there, for the model to read.

    :param q: the Gaussian that the site's value was drawn from; ``None`` asks the model to use the value.
    :param residual_scale: v, shape () or (P,), on the first site of a gp whose residual is tightened; else ``None``.
    :param natural: whether the gp's parameters are stepped along natural gradients; then those of mean-only weights are
        preconditioned.
    """

    q: Whitened | None
    residual_scale: Array | None
    natural: bool = False

    def as_infer(self) -> dict[str, Any]:
        """The ``infer`` argument of the guide's ``numpyro.sample``."""
        return {_KEY: self}


def belief_of(message: dict[str, Any]) -> Belief | None:
    """The belief in a site's message, if a guide of this package put one there."""
    found = message["infer"].get(_KEY)
    return found if isinstance(found, Belief) else None


def site_of(message: dict[str, Any]) -> Site | None:
    """What :func:`gp` wrote into the message of one of its sites; ``None`` for sites that are not its own."""
    found = message.get("infer", {}).get(_KEY) if message["type"] == "sample" else None
    return found if isinstance(found, Site) else None


class _LastMessage(Messenger):
    """Keeps the message of the site it saw last, as every other handler has left it (renamed by ``scope``, say)."""

    message: dict[str, Any]

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            self.message = msg


class CollectFunctions(Messenger):
    """Collects the functions that a model's ``gp`` statements make, by their full names."""

    def __init__(self, fn: Any = None) -> None:
        super().__init__(fn)
        self.functions: dict[str, GPFunction] = {}

    def __enter__(self) -> CollectFunctions:
        super().__enter__()
        return self

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == _KEY:
            self.functions[msg["site"]] = msg["value"]


def gp(
    name: str,
    kernel: KernelLike,
    inducing: ArrayLike | Feature | Sequence[Any],
    *,
    num_latents: int | None = None,
    jitter: float | None = None,
) -> GPFunction:
    r"""Declare a function with a Gaussian-process prior, seen through sets of inducing variables.

    Each set lives in the orthogonal complement of those before it:

    .. math:: f(x) = \sum_i A_i(x)^\top e_i + \text{residual}(x), \qquad e_i \sim N(0, I),

    with :math:`A_i` as in :mod:`numpyro_orthgp.math.projection`. The whitened variables :math:`e_i` are the ordinary
    NumPyro latent sites ``{name}.u0``, ``{name}.u1``, ... One set is SVGP [1], two SOLVE-GP [2]; a last entry
    :class:`MeanOnly` makes it ODVGP [3] and declares the param site ``{name}.u{i}_weights``, shape (H,) or (P, H).

    Under a guide of this package the function's marginals are those of q(f); under anything else (NUTS, ``Predictive``,
    NumPyro's autoguides, ``condition``) those of p(f | u).

    :param name: name of the function, the prefix of its sites.
    :param kernel: covariance function; ``kernel(X1, X2)`` of shape (n, m), or (P, n, m) for one per latent function.
    :param inducing: inducing points of shape (M, D), same units as the data's inputs, or (P, M, D), points of its own for each
        latent function; or a feature; or a list of sets.
    :param num_latents: number P of independent functions that share the kernel and inducing points; ``None`` for one function
        without a latent axis, or for as many as hyperparameters or points have a leading axis of.
    :param jitter: variance of independent noise on the inducing variables, relative to the mean of the kernel's diagonal;
        by default 1e-6 in float32 and 1e-10 in float64. Zero is respected. Where the Cholesky factor does not exist
        even so, more is added.
    :return: the function, callable at inputs.
    :raises ValueError: inside a plate (which would scale the divergence); for wrong shapes, empty sets, NaN or infinity; if the
        guide's beliefs have other sizes.
    :raises TypeError: for integer inputs, or a kernel that cannot be called.

    **References:**

    1. Hensman, Matthews, Ghahramani. Scalable Variational Gaussian Process Classification. 2015.
    2. Shi, Titsias, Mnih. Sparse Orthogonal Variational Inference for Gaussian Processes. 2020. Eqs. 2-4.
    3. Salimbeni, Cheng, Boots, Deisenroth. Orthogonally Decoupled Variational Gaussian Processes. 2018.
    """
    features, mean_only = as_sets(inducing)
    kernel = _as_pytree(kernel)
    covariances = [[other.covariance(kernel, s) for other in features[: i + 1]] for i, s in enumerate(features)]
    num_latents = _check_latents(num_latents, covariances[0][0], features[0].num)
    blocks = decompose(covariances, _check_jitter(jitter, features[0].dtype))

    batch = () if num_latents is None else (num_latents,)
    messages = [_inducing_site(f"{name}.u{i}", Site(i, (*batch, s.num), s.dtype)) for i, s in enumerate(features)]
    known = [_known(message) for message in messages]
    belief = belief_of(messages[0])
    natural = belief is not None and belief.natural
    full_name = messages[0]["name"].removesuffix(".u0")
    f = GPFunction(
        kernel,
        features,
        blocks,
        tuple(known),
        shift=_mean_shift(f"{name}.u{len(features)}", kernel, features, blocks, mean_only, batch, natural),
        residual_scale=None if belief is None else belief.residual_scale,
        num_latents=num_latents,
        pointwise=belief is not None,
        names=Names(name),
    )
    apply_stack({"type": _KEY, "site": full_name, "value": f, "fn": None, "args": (), "kwargs": {}})
    return f


def _inducing_site(name: str, site: Site) -> dict[str, Any]:
    reader = _LastMessage()
    with reader:
        numpyro.sample(name, WhitenedPrior(site.shape, site.dtype), infer={_KEY: site})
    message = reader.message
    if message["cond_indep_stack"]:
        plates = ", ".join(repr(frame.name) for frame in message["cond_indep_stack"])
        raise ValueError(
            f"gp() must be declared outside of plates, whose scale would multiply its divergence; `{name}` is inside {plates}. "
            "Declare f = gp(...) before the plate and call f(X) inside it."
        )
    return message


def _known(message: dict[str, Any]) -> Whitened:
    belief = belief_of(message)
    value = message["value"]
    if belief is None or belief.q is None:
        return Whitened(value, None, "value")
    if belief.q.loc.shape != message["fn"].event_shape:
        raise ValueError(
            f"The guide's q of `{message['name']}` has shape {belief.q.loc.shape}; the model's inducing variables have shape "
            f"{message['fn'].event_shape}. Give the guide the numbers of inducing points that the model uses."
        )
    _refuse_importance_weights(message["name"])
    return belief.q


def _refuse_importance_weights(name: str) -> None:
    # With the Gaussian integrated out, the weight p(u)/q(u) of a particle would average to one inside the logarithm and the
    # "bound" would lose its divergence. Neither model nor guide is told the objective, so look who is calling; this runs
    # while tracing only.
    frame: Any = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), RenyiELBO):
            raise ValueError(
                f"RenyiELBO weighs particles by importance and must see values, but the guide of `{name}` hands over its Gaussian: "
                "the result would not be a bound. Use AutoSparseGP(model, analytic=False) or gp_posterior(..., analytic=False)."
            )
        frame = frame.f_back


def _mean_shift(
    name: str,
    kernel: KernelLike,
    features: Sequence[Feature],
    blocks: Sequence[Block],
    mean_only: MeanOnly | None,
    batch: tuple[int, ...],
    natural: bool,
) -> MeanShift | None:
    r"""Declare the weights a of the mean-only points and charge :math:`a^\top C a / 2` (Salimbeni et al. 2018, Prop. A.1)."""
    if mean_only is None:
        return None
    points, H = mean_only.points, mean_only.num
    # A parameter of the model, like the inducing points: then every guide, Predictive and posterior see the same shift.
    constraint = natural_constraint if natural else constraints.real
    weights = numpyro.param(f"{name}_weights", jnp.zeros((*batch, H), points.dtype), constraint=constraint)
    if weights.shape != (*batch, H):
        raise ValueError(
            f"`{name}_weights` must have shape {(*batch, H)}, one weight per mean-only point; got {weights.shape}."
        )
    if natural:
        weights = precondition(weights, *_root_of_fisher(kernel, features, blocks, points))
    # A_i(points) a needs vector solves only: project K(Z_i, points) a as if it were one input.
    products = [
        jnp.einsum("...mh,...h->...m", s.covariance_with_inputs(kernel, points), weights, precision=PRECISION)
        for s in features
    ]
    projected = tuple(p[..., 0] for p in project(blocks, [p[..., None] for p in products]))
    columns, scaled = _columns(mean_only, weights)
    K = covariance_of_points(kernel, points, points[..., columns, :])
    quadratic = jnp.sum(weights * jnp.einsum("...hs,...s->...h", K, scaled, precision=PRECISION))
    cost = (quadratic - sum(jnp.sum(p**2) for p in projected)) / 2
    numpyro.factor(f"{name}_kl", -cost)
    return MeanShift(points, weights, projected)


def _root_of_fisher(
    kernel: KernelLike, features: Sequence[Feature], blocks: Sequence[Block], points: Array
) -> tuple[Array, bool]:
    """W with W'W = C^-1 for the mean-only points, C their covariance given the sets; of its diagonal alone if they are many."""
    diagonal = points.shape[-2] > MAX_EXACT_FISHER
    A = project(blocks, [s.covariance_with_inputs(kernel, points) for s in features])
    variance = kernel(points)
    scale = variance.mean(-1)
    jitter = default_jitter(variance.dtype) * scale
    if diagonal:
        return lax.stop_gradient(1 / jnp.sqrt(residual_variance(variance, A) + jitter[..., None])), True
    C = add_jitter(residual_covariance(covariance_of_points(kernel, points, points), A, A), jitter)
    return lax.stop_gradient(inverse_cholesky(C, scale)), False


def _columns(mean_only: MeanOnly, weights: Array) -> tuple[Any, Array]:
    """Columns of C that enter the penalty, and their weights scaled so that the sum stays unbiased."""
    H, size = mean_only.num, mean_only.subsample_size or mean_only.num
    rng_key = None if size == H else numpyro.prng_key()
    if rng_key is None:
        return slice(None), weights
    columns = jax.random.choice(rng_key, H, (size,), replace=False)
    return columns, weights[..., columns] * (H / size)


def _as_pytree(kernel: Any) -> Any:
    if not callable(kernel):
        raise TypeError(
            f"`kernel` must be callable as kernel(X1, X2) and kernel(X); got {type(kernel).__name__}. "
            "Take one of numpyro_orthgp.kernels, a tinygp kernel, or a function."
        )
    opaque = jax.tree_util.treedef_is_leaf(jax.tree_util.tree_structure(kernel))
    return Partial(kernel) if opaque else kernel


def _check_latents(num_latents: int | None, K: Array, num: int) -> int | None:
    if K.ndim not in (2, 3) or K.shape[-2:] != (num, num):
        raise ValueError(
            f"`kernel(Z, Z)` must have shape (M, M) or (P, M, M) with M = {num}; got {K.shape}. Do the kernel's "
            "hyperparameters have shape (), (D,), or a leading axis of one entry per latent function?"
        )
    batch = K.shape[0] if K.ndim == 3 else None
    if num_latents is None:
        return batch
    if isinstance(num_latents, bool) or not isinstance(num_latents, int) or num_latents < 1:
        raise ValueError(f"`num_latents` must be a positive integer or None; got {num_latents!r}.")
    if batch not in (None, num_latents):
        raise ValueError(
            f"`num_latents` is {num_latents} but the kernel's hyperparameters or the inducing points have a leading axis of "
            f"{batch}."
        )
    return num_latents


def _check_jitter(jitter: float | None, dtype: Any) -> float:
    if jitter is None:
        return default_jitter(dtype)
    if is_concrete(jitter) and not 0 <= jitter < 1:
        raise ValueError(f"`jitter` must be in [0, 1), relative to the kernel's variance; got {jitter}.")
    return jitter
