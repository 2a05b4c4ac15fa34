r"""Inducing variables that are Fourier coefficients of a Matern process on an interval.

A Matern kernel of order :math:`p - 1/2`, scaled by :math:`v`, belongs to a process with :math:`(\lambda + d/dx)^p f = ` white
noise of density :math:`v c \lambda^{2p-1}`, :math:`\lambda = \sqrt{2p - 1} / \ell`. Its state :math:`s = (f, f'/\lambda,
\dots)` of p entries is Markov with covariance :math:`v P`. So its RKHS on :math:`[a, b]` has the inner product

.. math::
    \langle g, h \rangle = \frac{1}{v} \Big( \frac{1}{c \lambda^{2p-1}} \int_a^b
        \big(\lambda + \tfrac{d}{dx}\big)^p g \; \big(\lambda + \tfrac{d}{dx}\big)^p h \, dx + s_g(a)^\top P^{-1} s_h(a) \Big)

(Durrande et al. 2016 and Hensman et al. 2018 write it out for p = 1, 2, 3). For cosines and sines of whole periods the
integral is diagonal, and the contribution of the edge has rank p.

**Static.** The features hold no arrays, so equal ones never recompile; an interval that depends on a minibatch is refused.

**Scaled.** The variables are divided by their standard deviation, because jitter is relative to the mean variance, and raw
variances differ by orders of magnitude.

**Edges.** Waves are periodic, so they leave a residual of rank p (1, 2, 3 for Matern 1/2, 3/2, 5/2) near the edges. An orthogonal
second set of p points explains it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_integer, is_concrete
from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.inducing.interdomain import covariance_across, floating_dtype
from numpyro_orthgp.kernels.base import Kernel
from numpyro_orthgp.kernels.components import Component, component
from numpyro_orthgp.kernels.hyperparameters import per_dimension
from numpyro_orthgp.kernels.stationary import Matern12, Matern32, Matern52
from numpyro_orthgp.math.products import matmul
from numpyro_orthgp.types import Array, KernelLike

__all__ = ["FourierFeatures"]

# For each p: the density c of the white noise, and R with R'R = P^-1, P the covariance of the state.
_ORDERS: dict[type[Kernel], int] = {Matern12: 1, Matern32: 2, Matern52: 3}
_DENSITY = {1: 2.0, 2: 4.0, 3: 16 / 3}
_STATE = {1: np.eye(1), 2: np.eye(2), 3: np.array([[1, 0, -1 / 3], [0, 1 / 3, 0], [-1 / 3, 0, 1]])}
_ROOT = {p: np.linalg.cholesky(np.linalg.inv(P)).T for p, P in _STATE.items()}

# Distance at which a continuation has faded to zero in any dtype; beyond it the polynomial could overflow.
_FADED = 1000.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FourierFeatures:
    r"""Variational Fourier features [1]: projections of the function on cosines and sines of an interval.

    .. math::
        u_m \propto \langle \phi_m, f \rangle, \quad \phi = 1, \cos \omega_1 (x - a), \dots, \sin \omega_1 (x - a), \dots,
        \quad \omega_m = 2 \pi m / (b - a)

    with the inner product of the RKHS of a `Matern12`, `Matern32` or `Matern52` kernel on :math:`[a, b]`. The covariance with
    f(x) is :math:`\phi(x)` inside of the interval. Outside it is the exact continuation :math:`e^{-s} \sum_{k<p} \frac{s^k}{k!}
    (1 \pm \lambda^{-1} \tfrac{d}{dx})^k \phi(\text{edge})`, with s the distance to the edge in units of :math:`1 / \lambda` (f
    outside depends on f inside only through its state at the edge).

    Bounds hold for any interval and any data. Waves are periodic, but the function is not. So any number of waves leaves a
    residual of rank p (1, 2 or 3 for the three kernels). It is about half of the variance at the edges, and fades away from them.
    So let the interval reach beyond the data by a few lengthscales, or add a few points as a second set: with p points or more near
    an edge, as in ``[FourierFeatures(...), Z]``, the residual on the interval vanishes as ``num_frequencies`` grows.

    In a sum of kernels of single columns each term has its own features::

        kernel = v0 * Matern32(l0).on(0) + v1 * Matern52(l1).on(1)
        of_0, of_1 = FourierFeatures(20, 0.0, 1.0, dim=0), FourierFeatures(20, -3.0, 3.0, dim=1)
        f = gp("f", kernel, [of_0, of_1])

    These are independent, and the covariance of a set is diagonal plus rank p. The library does not exploit this: sets take
    Cholesky factors of M x M matrices, like points. Each variable is divided by its standard deviation, and so has the variance
    of f. Whitening hides this scale, but jitter is relative to the mean variance, and variances of the raw projections differ by
    many orders of magnitude.

    :param num_frequencies: number of frequencies above zero; there are 2 ``num_frequencies`` + 1 features.
    :param lower: lower edge a of the interval, a number known before tracing, units of the inputs.
    :param upper: upper edge b.
    :param dim: the input column of their Matern kernel, as in ``kernel.on(dim)`` (for inputs with one column it is column 0);
        ``None`` if the sum has only one Matern kernel of a single column.
    :param dtype: floating dtype; by default that of the edges, which for Python's numbers is JAX's default.
    :raises TypeError: if the edges are traced or not numbers, or the dtype is not floating.
    :raises ValueError: if ``num_frequencies`` is not positive, or the edges are not finite and in order. When used: if the
        kernel has no such term, or several (two Matern kernels of one column cannot be told apart); beside other Fourier
        features of the same term.

    **References:**

    1. Hensman, Durrande, Solin. Variational Fourier Features for Gaussian Processes. 2018.
    2. Durrande, Hensman, Rattray, Lawrence. Detecting Periodicities with Gaussian Processes. 2016. The RKHS of Matern kernels.
    """

    num_frequencies: int = field(metadata={"static": True})
    lower: float = field(metadata={"static": True})
    upper: float = field(metadata={"static": True})
    _: KW_ONLY
    dim: int | None = field(default=None, metadata={"static": True})
    dtype: Any = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        lower, upper = (_edge(name, getattr(self, name)) for name in ("lower", "upper"))
        if not lower < upper:
            raise ValueError(f"`lower` must be below `upper`, the edges of the interval; got {lower} and {upper}.")
        values = {
            "num_frequencies": check_integer("num_frequencies", self.num_frequencies),
            "lower": lower,
            "upper": upper,
            "dim": None if self.dim is None else check_integer("dim", self.dim, least=None),
            "dtype": floating_dtype(self.dtype, self.lower, self.upper),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def num(self) -> int:
        return 2 * self.num_frequencies + 1

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        """Covariance with another feature, shape (..., M, M_other); zero with features of an independent term.

        :raises ValueError: if ``other`` are different Fourier features of the same term.
        """
        term = self.term(kernel)
        if not isinstance(other, FourierFeatures) or _columns(other.term(kernel)) != _columns(term):
            return covariance_across(self, kernel, other)
        if replace(other, dim=self.dim) != self:
            raise ValueError(
                "Two sets of Fourier features on the same column share what they explain; use one with more frequencies, or "
                f"inducing points as the next set. Got {self} and {other}."
            )
        basis = self._basis(term.kernel)
        diagonal = basis.integral * jnp.eye(self.num, dtype=basis.integral.dtype)
        return term.scaled(diagonal + matmul(basis.edge, basis.edge.swapaxes(-1, -2)))

    def covariance_with_inputs(self, kernel: KernelLike, X: Array) -> Array:
        """Covariance with the function at inputs ``X`` (B, D), or (P, B, D), shape (..., M, B).

        :raises ValueError: if the term's kernel sees more than one column, or one that does not exist.
        """
        term = self.term(kernel)
        x = term.columns(X)
        if x.shape[-1] != 1:
            raise ValueError(
                f"Fourier features need a {type(term.kernel).__name__} of one column; this one sees all {x.shape[-1]} columns of "
                f"the inputs. Restrict it: {type(term.kernel).__name__}(lengthscale).on(0)."
            )
        a, b, basis = self.lower, self.upper, self._basis(term.kernel)
        x = x[..., None, :, 0]  # (..., 1, B)
        is_inside = (a <= x) & (x <= b)
        # Not `clip`, which would halve the derivative at the edges.
        inside = self._waves(jnp.where(is_inside, (x - a) / (b - a), 0))
        distance = jnp.clip(basis.rate * jnp.maximum(a - x, x - b), 0, _FADED)
        outside = self._continuation(basis, distance, jnp.sign(x - a))
        return term.scaled(jnp.where(is_inside, inside, outside) / basis.deviation)

    @property
    def _harmonics(self) -> np.ndarray:
        """The multiple m of each feature: cosines, then sines, shape (M, 1)."""
        return np.r_[0 : self.num_frequencies + 1, 1 : self.num_frequencies + 1][:, None].astype(self.dtype)

    @property
    def _even(self) -> np.ndarray:
        """1 for cosines and 0 for sines, shape (M, 1)."""
        return (np.arange(self.num) <= self.num_frequencies)[:, None].astype(self.dtype)

    def _basis(self, kernel: Any) -> _Basis:
        p, even = _ORDERS[type(kernel)], self._even
        lengthscale = per_dimension("lengthscale", kernel.lengthscale, jnp.zeros((1, 1), self.dtype))
        rate = np.sqrt(2 * p - 1).astype(self.dtype) / lengthscale
        length = rate * (self.upper - self.lower)
        omega = 2 * np.pi * self._harmonics / length
        share = np.where(self._harmonics == 0, 1, 0.5).astype(self.dtype)  # the mean square of a wave
        # For features divided by the root of the inner product's integral, so that high powers of omega cancel.
        root = (1 + omega**2) ** (p / 2) * jnp.sqrt(length * share / _DENSITY[p])
        state = jnp.concatenate([even + 0 * omega, (1 - even) * omega, -even * omega**2][:p], -1)
        edge = matmul(state / root, jnp.asarray(_ROOT[p].T, self.dtype))
        norm = jnp.sqrt(1 + jnp.sum(edge**2, -1, keepdims=True))
        return _Basis(p, rate, omega, root * norm, 1 / norm**2, edge / norm)

    def _waves(self, t: Array) -> Array:
        """Cosines and sines at a fraction ``t`` (..., 1, B) of the interval, shape (..., M, B)."""
        cosines, sines = np.split(2 * np.pi * self._harmonics, [self.num_frequencies + 1])
        return jnp.concatenate([jnp.cos(cosines * t), jnp.sin(sines * t)], -2)

    def _continuation(self, basis: _Basis, s: Array, side: Array) -> Array:
        """Covariances outside of the interval, which decay with the distance ``s`` (..., 1, B) from the edge, on one side.

        They solve the equation of the process from its state at the edge, where all waves have their values at zero. The k-th
        coefficient is the real or imaginary part of (1 + i omega)^k. At the lower edge (``side`` -1) sines change sign.
        """
        even, odd = self._even, (1 - self._even) * side
        coefficients = [even, even + odd * basis.omega, even * (1 - basis.omega**2) + 2 * odd * basis.omega]
        powers = [1, s, s**2 / 2]
        terms = zip(powers[: basis.order], coefficients, strict=False)
        return jnp.exp(-s) * sum(power * c for power, c in terms)

    def term(self, kernel: KernelLike) -> Component:
        """The term of the kernel that the features belong to."""
        of = "of a single column" if self.dim is None else f"of column {self.dim}"
        example = f"variance * Matern32(lengthscale).on({self.dim or 0})"
        return component(
            kernel,
            self._matches,
            f"FourierFeatures(dim={self.dim}) need a kernel with exactly one term Matern12, Matern32 or Matern52 {of}, such as "
            f"{example}",
        )

    def _matches(self, term: Component) -> bool:
        if type(term.kernel) not in _ORDERS:
            return False
        columns = _columns(term)
        return len(columns) == 1 and self.dim in (None, columns[0])


class _Basis(NamedTuple):
    """M features under one kernel of unit variance, with a leading axis P if hyperparameters differ between latent functions.

    :param order: p.
    :param rate: lambda, shape () or (1,), or (P, 1, 1).
    :param omega: frequencies in units of lambda, shape (..., M, 1).
    :param deviation: root of <phi, phi>, the divisor of each feature, shape (..., M, 1).
    :param integral: contribution of the integral to the covariance, a diagonal, shape (..., M, 1).
    :param edge: contribution of the edge, factors E of E E', shape (..., M, p).
    """

    order: int
    rate: Array
    omega: Array
    deviation: Array
    integral: Array
    edge: Array


def _edge(name: str, value: Any) -> float:
    if not is_concrete(value):
        raise TypeError(
            f"`{name}` must be a number known before tracing; got a traced value. Compute the interval outside of the model, from "
            "all of the data: FourierFeatures(M, float(X.min()) - margin, float(X.max()) + margin)."
        )
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be a number, an edge of the interval; got {type(value).__name__}.") from error
    if not np.isfinite(number):
        raise ValueError(f"`{name}` must be finite; got {number}.")
    return number


def _columns(term: Component) -> tuple[int, ...]:
    """The columns that a term's kernel sees, as numbered by the user; (0,) if it is not restricted."""
    columns: Any = np.array([term.restrictions[0].dims if term.restrictions else (0,)])
    for restriction in term.restrictions[1:]:
        columns = restriction.columns(columns)
    return tuple(columns[0].tolist())
