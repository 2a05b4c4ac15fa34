r"""Random functions with a given covariance. They are finite sums of random features, and can be evaluated at any input.

A kernel is expanded to a sum of products of elementary kernels. Each product :math:`k` becomes an independent sum

.. math:: f(x) = \frac{1}{\sqrt L} \sum_{l=1}^L a_l\, \phi_l(x), \qquad E[\phi_l(x)\, \phi_l(y)] = k(x, y)

whose amplitudes :math:`a_l` have :math:`E[a_l^2] = 1`, are independent of the features :math:`\phi_l`, and satisfy
:math:`E[a_l\, \phi_l(x)] = 0`. Every function draws its own features, so mean and covariance are exactly those of the
process for *any* L. Only higher moments depend on L: they become Gaussian as L grows (the excess kurtosis falls as 1 / L).
The features of a product are products of the features of its factors.

=========================================  =====================================================================================
kernel                                     one feature
=========================================  =====================================================================================
`RBF`, `Matern12`, `Matern32`, `Matern52`  :math:`\sqrt2 \cos(w^\top x + b)` with uniform phase, the frequency w from the spectral
                                           density [1]: normal; multivariate Student t with :math:`2 \nu` degrees of freedom
`RationalQuadratic`                        the same, w normal with a Gamma-distributed variance
`Periodic`                                 the same, :math:`w_d = 2 \pi n_d / p_d`, :math:`n_d` the difference of two Poisson
                                           variables with rate :math:`1 / (2 \ell_d^2)`: its Fourier coefficients
                                           :math:`e^{-1/\ell^2} I_n(1/\ell^2)` are probabilities of that (Skellam) distribution
`Linear`, `Polynomial`                     one random affine function for each factor
`ArcCosine`                                :math:`\sqrt2 \max(0, w^\top x + b)^n`: a random unit of the layer that defines it
`Coregion`                                 :math:`W g + \sqrt\kappa\, h` looked up at the task, g and h standard normal
`Constant`                                 1
`Convolutional`                            the weighted sum over patches of a random function of a patch, see
                                           ``kernels/patch_features.py``
=========================================  =====================================================================================

Stationary factors of a product share one cosine, and their frequencies add. For cosines :math:`a_l \sqrt2` is
Rayleigh-distributed, so the value at a single input is exactly Gaussian, as with pairs of sine and cosine, at half the cost.
Functions of `Constant`, `Linear` and `Coregion` alone are exactly Gaussian.

Draws are differentiable with respect to hyperparameters, except for the lengthscale of `Periodic`, which enters through
integers.

**References:**

1. Rahimi, Recht. Random Features for Large-Scale Kernel Machines. 2007.
2. Cho, Saul. Kernel Methods for Deep Learning. 2009.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.closures import Closure
from numpyro_orthgp.kernels.base import Constant, Function, Named, Product, Restricted, Scaled, Sum
from numpyro_orthgp.kernels.coregion import Coregion
from numpyro_orthgp.kernels.dot_product import ArcCosine, Linear, Polynomial
from numpyro_orthgp.kernels.hyperparameters import as_array, per_dimension, per_latent
from numpyro_orthgp.kernels.spectral import FREQUENCIES, Draw
from numpyro_orthgp.kernels.white import White
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.products import PRECISION, matmul
from numpyro_orthgp.types import Array, KernelLike, PRNGKey

__all__ = ["Draw", "RandomFunctions", "draw_functions", "register", "term_at", "terms_at"]

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "cosine": jnp.cos,
    "affine": lambda a: a,
    "rectified 0": lambda a: math.sqrt(2) * (a > 0).astype(a.dtype),
    "rectified 1": lambda a: math.sqrt(2) * jnp.maximum(a, 0),
    "rectified 2": lambda a: math.sqrt(2) * jnp.square(jnp.maximum(a, 0)),
}


class Factor(Protocol):
    """Features of one factor of a product of kernels: a pytree whose leaves have the batch axes first."""

    @property
    def width(self) -> int: ...

    def __call__(self, X: Array) -> Array: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ridge:
    """Features :math:`g(w_l^T x + b_l)`.

    :param weights: w, shape (..., L, D).
    :param offsets: b, shape (..., L).
    :param activation: the name of g.
    """

    weights: Array
    offsets: Array
    activation: str = field(metadata={"static": True})

    @property
    def width(self) -> int:
        """Numbers that one input takes."""
        return self.weights.shape[-2]

    def __call__(self, X: Array) -> Array:
        activate = _ACTIVATIONS[self.activation]
        return activate(matmul(X, jnp.swapaxes(self.weights, -1, -2)) + self.offsets[..., None, :])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Table:
    """Features that have one value per task.

    :param values: shape (..., L, T).
    :param column: the column of the inputs that holds the task index.
    """

    values: Array
    column: int = field(metadata={"static": True})

    @property
    def width(self) -> int:
        """Numbers that one input takes."""
        return sum(self.values.shape[-2:])

    def __call__(self, X: Array) -> Array:
        chosen = X[..., self.column, None] == jnp.arange(self.values.shape[-1], dtype=X.dtype)
        looked_up = matmul(chosen.astype(X.dtype), jnp.swapaxes(self.values, -1, -2))
        return jnp.where(chosen.any(-1, keepdims=True), looked_up, jnp.nan)  # as in `Coregion`


class Term(NamedTuple):
    r"""The function :math:`\sum_l a_l \prod_j \phi_{jl}(x)`.

    :param amplitudes: a, shape (..., L), including the normalization of the sum.
    :param factors: the features :math:`\phi_j` of each factor. Each maps inputs (..., B, D) to (..., B, L).
    """

    amplitudes: Array
    factors: tuple[Factor, ...]

    def __call__(self, X: Array) -> Array:
        features = math.prod((factor(X) for factor in self.factors), start=jnp.ones((*X.shape[:-1], 1), X.dtype))
        return jnp.einsum("...bl,...l->...b", features, self.amplitudes, precision=PRECISION)


class RandomFunctions(NamedTuple):
    """Functions drawn from a Gaussian process prior by `draw_functions`. Every leaf has the batch axes first.

    :param terms: independent functions, whose sum is the function.
    """

    terms: tuple[Term, ...]

    @property
    def width(self) -> int:
        """How many numbers one input of one function needs in memory."""
        return max(sum((factor.width for factor in term.factors), start=1) for term in self.terms)

    def __call__(self, X: Array) -> Array:
        """Values at inputs.

        :param X: shape (..., B, D). Leading axes broadcast against the batch.
        :return: shape ``(*batch, B)``.
        """
        return sum((term(X) for term in self.terms[1:]), start=self.terms[0](X))


def draw_functions(
    rng_key: PRNGKey, kernel: KernelLike, batch: tuple[int, ...], num_dims: int, *, num_features: int, dtype: Any
) -> RandomFunctions:
    """Draw functions with mean zero and exactly the covariance ``kernel``. Each function has its own random features.

    :param kernel: built from the kernels listed above with ``+``, ``*``, scaling and ``.on``. If hyperparameters have a leading
        axis of P, ``batch`` must end with P.
    :param batch: shape of the independent draws.
    :param num_dims: number of input dimensions D.
    :param num_features: L, for each product of elementary kernels.
    :param dtype: dtype of the inputs.
    :raises TypeError: for kernels without known random features, and for `White`.
    """
    summands = _multiplied_out(kernel, np.arange(num_dims))
    keys = jax.random.split(rng_key, len(summands))
    draws = [Draw(key, batch, num_features, 1, np.arange(num_dims), num_dims, jnp.dtype(dtype)) for key in keys]
    return RandomFunctions(tuple(map(_draw_term, summands, draws)))


def term_at(functions: RandomFunctions, kernel: KernelLike, num_dims: int, place: tuple[str, ...]) -> Term:
    """The term of ``functions`` (drawn from ``kernel``) that belongs to the summand at ``place`` (of a ``Component``)."""
    return terms_at(functions, kernel, num_dims, [place]).terms[0]


def terms_at(functions: RandomFunctions, kernel: KernelLike, num_dims: int, places: Any) -> RandomFunctions:
    """The terms of ``functions`` (drawn from ``kernel``) that belong to the summands at ``places``."""
    of_terms = [summand.place for summand in _multiplied_out(kernel, np.arange(num_dims))]
    pairs = zip(functions.terms, of_terms, strict=True)
    return RandomFunctions(tuple(term for term, place in pairs if place in places))


class _Summand(NamedTuple):
    """One summand of a kernel: a product of variances and elementary kernels, with the columns of each kernel.

    :param place: its position in the sum, as in ``Component``. Summands of a product have the product's position, its factors
        ``None``.
    """

    kernels: tuple[tuple[Any, Any], ...] = ()
    variances: tuple[Any, ...] = ()
    place: tuple[str, ...] | None = None

    def times(self, other: _Summand) -> _Summand:
        return _Summand(self.kernels + other.kernels, self.variances + other.variances)

    @property
    def single(self) -> bool:
        """Whether the function itself is the only feature."""
        return len(self.kernels) == 1 and type(self.kernels[0][0]) in _SINGLE


def _multiplied_out(kernel: Any, columns: Any, place: tuple[str, ...] = ()) -> list[_Summand]:
    kind = type(kernel)  # not subclasses, which may compute something else
    if kind is Sum:
        left = _multiplied_out(kernel.left, columns, (*place, "left"))
        return left + _multiplied_out(kernel.right, columns, (*place, "right"))
    if kind is Product:
        right = _multiplied_out(kernel.right, columns)
        return [a.times(b)._replace(place=place) for a in _multiplied_out(kernel.left, columns) for b in right]
    if kind is Scaled:
        scaled = _multiplied_out(kernel.kernel, columns, place)
        return [s._replace(variances=(*s.variances, kernel.variance)) for s in scaled]
    if kind is Named:
        return _multiplied_out(kernel.kernel, columns, place)
    if kind is Restricted:
        return _multiplied_out(kernel.kernel, kernel.columns(columns), place)
    if kind is Constant:
        return [_Summand((), (kernel.value,), place)]
    if kind is Polynomial and kernel.degree == 1:
        linear = Linear(kernel.variance)
        return [_Summand(((linear, columns),), place=place), _Summand((), (kernel.offset,), place)]
    _check_known(kernel)
    return [_Summand(((kernel, columns),), place=place)]


def _check_known(kernel: Any) -> None:
    instead = "For draws at inputs that are known in advance use f.joint(X).sample(rng_key)."
    if type(kernel) is White:
        raise TypeError(
            "A path needs a kernel without White: white noise has an independent value at every input and cannot be drawn as a "
            f"function. Leave it to the likelihood's noise. {instead}"
        )
    if type(kernel) not in FREQUENCIES and type(kernel) not in _FEATURES:
        known = ", ".join(sorted(kind.__name__ for kind in (*FREQUENCIES, *_FEATURES, Constant)))
        name: Any = kernel.function if isinstance(kernel, Function) else kernel
        name = name if isinstance(kernel, Function | Closure) else type(kernel).__name__
        raise TypeError(
            f"A path needs random features of every part of the kernel; those of {name} are not known. Known are "
            f"{known}, and their sums, products, multiples and restrictions to columns. A class of your own becomes known by "
            f"`{__name__}.register`. {instead}"
        )


def _draw_term(summand: _Summand, draw: Draw) -> Term:
    if summand.single:
        draw = draw._replace(num_features=1, num_inner_features=draw.num_features)
    elif not summand.kernels:
        draw = draw._replace(num_features=1)
    own_key, phase_key, *keys = jax.random.split(draw.rng_key, 2 + len(summand.kernels))
    frequencies, factors = [], []
    for (kernel, columns), key in zip(summand.kernels, keys, strict=True):
        part = draw._replace(rng_key=key, columns=columns)
        if type(kernel) in FREQUENCIES:
            frequencies.append(part.embed(FREQUENCIES[type(kernel)](kernel, part)))
        else:
            factors += _FEATURES[type(kernel)](kernel, part)
    if frequencies:
        phases = jax.random.uniform(phase_key, draw.shape, draw.dtype, maxval=2 * math.pi)
        factors.append(Ridge(sum(frequencies[1:], start=frequencies[0]), phases, "cosine"))
        # A uniform number may be zero (one of 2^23 in float32), and jax turns it into an infinite amplitude.
        largest = math.sqrt(-2 * math.log(jnp.finfo(draw.dtype).eps))
        amplitudes = jnp.minimum(
            jax.random.rayleigh(own_key, jnp.ones((), draw.dtype), draw.shape, draw.dtype), largest
        )
    elif summand.single:
        amplitudes = jnp.ones(draw.shape, draw.dtype)
    else:
        amplitudes = jax.random.normal(own_key, draw.shape, draw.dtype)
    for variance in summand.variances:
        amplitudes = amplitudes * safe_sqrt(per_latent("variance", variance, amplitudes, axes=1))
    return Term(amplitudes / math.sqrt(draw.num_features), tuple(factors))


# Features of other kernels: (kernel, draw) -> factors. Their product is the feature.

Rule = Callable[[Any, Draw], list[Factor]]


def _affine(draw: Draw, variance: Any, offset: Any, activation: str = "affine") -> Ridge:
    """Ridge functions of random affine functions with covariance x' diag(variance) y + offset."""
    z, b = draw.normals(len(draw.columns), 1)
    weights = draw.embed(safe_sqrt(per_dimension("variance", variance, z)) * z)
    return Ridge(weights, (safe_sqrt(per_latent("offset", offset, b)) * b)[..., 0], activation)


def _linear(kernel: Linear, draw: Draw) -> list[Factor]:
    return [_affine(draw, kernel.variance, 0.0)]


def _polynomial(kernel: Polynomial, draw: Draw) -> list[Factor]:
    keys = jax.random.split(draw.rng_key, kernel.degree)
    return [_affine(draw._replace(rng_key=key), kernel.variance, kernel.offset) for key in keys]


def _arc_cosine(kernel: ArcCosine, draw: Draw) -> list[Factor]:
    return [_affine(draw, kernel.weight_variance, kernel.bias_variance, f"rectified {kernel.order}")]


def _coregion(kernel: Coregion, draw: Draw) -> list[Factor]:
    W, kappa = as_array(kernel.W, draw.dtype), as_array(kernel.kappa, draw.dtype)
    g, h = draw.normals(W.shape[-1], W.shape[-2])
    own = safe_sqrt(kappa if kappa.ndim < 2 else kappa[:, None, :]) * h
    return [Table(matmul(g, jnp.swapaxes(W, -1, -2)) + own, int(draw.columns[0]))]


_FEATURES: dict[type, Rule] = {
    Linear: _linear,
    Polynomial: _polynomial,
    ArcCosine: _arc_cosine,
    Coregion: _coregion,
}
_SINGLE: set[type] = {Linear, Coregion}


def register(kind: type, *, single: bool = False, stationary: bool = False) -> Callable[[Any], Any]:
    """Decorator that registers the random features of a kernel class, also of one's own: posterior paths then know them.

    The decorated rule maps a kernel and a :class:`Draw` to a list of factors phi_j with
    E[prod_j phi_jl(x) prod_j phi_jl(y)] = k(x, y) for each l. Factors with different l are independent.

    :param single: whether a function of this kernel, outside of products, is one feature made of ``draw.num_inner_features``.
    :param stationary: whether the rule draws frequencies w with E[cos(w' (x - y))] = k(x, y) instead, of shape
        ``(*draw.shape, len(draw.columns))``.
    """

    def decorate(rule: Any) -> Any:
        (FREQUENCIES if stationary else _FEATURES)[kind] = rule
        if single:
            _SINGLE.add(kind)
        return rule

    return decorate
