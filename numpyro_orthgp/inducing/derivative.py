r"""Derivatives of f, such as slopes and curvatures, along columns of the inputs or along directions.

The covariances are derivatives of the kernel, :math:`\mathrm{cov}(f(z), \partial_d f(x)) = \partial k(z, x) / \partial x_d` and
:math:`\mathrm{cov}(\partial_d f(x), \partial_e f(x')) = \partial^2 k(x, x') / \partial x_d \partial x'_e` (Rasmussen and
Williams 2006, Sec. 9.4). They come from forward differentiation of the kernel itself: all rows in one pass, at about twice the cost
of values for each order. Our kernels are written so that this is right where two inputs coincide. For kernels of users, concrete
values show whether this holds, and whether the process has the derivative at all: the difference of two nearby values should have
the variance of the derivative. At a kink it has far more, while the derivative of the kernel may be zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_finite, check_floating, check_inputs, check_integer, check_same_dtype, inspect
from numpyro_orthgp.inducing.functional import Evaluated, Functional, Values
from numpyro_orthgp.kernels.smoothness import check_smooth, is_known
from numpyro_orthgp.kernels.summands import Place, select
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Derivative"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Derivative(Functional):
    r"""Derivatives of f at inputs: :math:`\partial f / \partial x_d`, or along a direction, or of higher order.

    ``f(Derivative(X, 0))`` are marginals like ``f(X)``. So derivatives may be observed, with their own likelihood, and
    predicted::

        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)
        numpyro.sample("slope", likelihoods.Gaussian(f(Derivative(X, 0)), slope_noise), obs=slope)
        numpyro.sample("up", likelihoods.Bernoulli(f(Derivative(grid, 0)) * 100.0, "probit"), obs=ones)  # monotone

    Their units are those of f divided by those of the inputs, once for each order. Inducing variables may be values only, or also
    derivatives, in the same set or a second one: ``gp("f", kernel, concatenate([Z, Derivative(Z, 0)]))``,
    ``[Z, Derivative(Z, 0)]``.

    >>> import jax, jax.numpy as jnp, numpyro
    >>> from numpyro_orthgp import Derivative, gp, kernels
    >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     f = gp("f", kernels.Matern52(0.5), X)
    >>> slope = jax.vmap(jax.grad(lambda x: f(x[None]).mean[0]))(X)[:, 0]
    >>> bool(jnp.allclose(f(Derivative(X, 0)).mean, slope, atol=1e-3))
    True

    :param X: inputs, shape (B, D).
    :param dim: the input column, or several for a derivative of higher order: ``(0, 0)`` is the second derivative along column 0,
        and ``(0, 1)`` the mixed one. Negative columns count from the end. It may be left out if D = 1.
    :param direction: instead of ``dim`` a direction v of any length, shape (D,) or (B, D), for :math:`v^\top \nabla f`.
    :param places: summands of the kernel to which it applies, set by ``f.term(...)``; ``None`` for the whole f.
    :raises TypeError: when used, if ``X`` or ``direction`` are not floating, or of another dtype than the inducing variables.
    :raises ValueError: when used, for wrong shapes; for a column that does not exist; if the process has no such derivative
        (Matern 1/2 has none, Matern 3/2 no second; White and images have none; for kernels that are functions, only if their values
        are concrete).
    """

    X: ArrayLike
    dim: int | tuple[int, ...] | None = field(default=None, metadata={"static": True})
    direction: ArrayLike | None = None
    places: tuple[Place, ...] | None = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        if isinstance(self.dim, list):
            object.__setattr__(self, "dim", tuple(self.dim))

    @property
    def num(self) -> int:
        return jnp.shape(self.X)[0]

    @property
    def dtype(self) -> Any:
        return jnp.result_type(self.X)

    def checked(self, dim: int | None, dtype: Any) -> Derivative:
        X = check_same_dtype("X", check_inputs("X", self.X, dim=dim), dtype)
        D = X.shape[1]
        if self.direction is not None:
            if self.dim is not None:
                raise ValueError("Derivative takes `dim` or `direction`; got both.")
            direction = check_finite("direction", check_floating("direction", self.direction))
            if direction.shape not in ((D,), X.shape):
                raise ValueError(
                    f"`direction` must have shape (D,) or (B, D) = {X.shape} to match `X`; got {direction.shape}."
                )
            return replace(self, X=X, direction=jnp.broadcast_to(direction, X.shape).astype(dtype))
        if self.dim is None and D > 1:
            raise ValueError(f"Derivative needs `dim`, the input column, one of 0..{D - 1}; got none.")
        dims = self.dim if isinstance(self.dim, tuple) else (0 if self.dim is None else self.dim,)
        dims = tuple(check_integer("dim", d, least=None) for d in dims)
        if not dims or any(not -D <= d < D for d in dims):
            raise ValueError(f"`dim` must lie in 0..{D - 1} for inputs with D = {D}; got {self.dim}.")
        return replace(self, X=X, dim=tuple(sorted(d % D for d in dims)))

    def check(self, kernel: Any) -> None:
        dims = (None,) if self.direction is not None else self.dim
        check_smooth(kernel, dims if isinstance(dims, tuple) else (dims,), jnp.shape(self.X)[-1])

    def looked_at(self, kernel: Any) -> Derivative:
        part = select(kernel, self.places)
        if not is_known(part):
            few = jax.tree.map(lambda a: a[:5], self)
            variance, by_differences, rounding = few._both_ways(part)
            inspect(_refuse_kinks, variance, by_differences, rounding)
        return self

    @one_program
    def _both_ways(self, kernel: Any) -> tuple[Array, Array, Array]:
        """The variance; the same by differences of derivatives of one order less, over twice the step; and its rounding error."""
        X, dims = jnp.asarray(self.X), self.dim if isinstance(self.dim, tuple) else ()
        along = jnp.zeros_like(X).at[:, dims[-1]].set(1) if dims else jnp.asarray(self.direction)
        eps = jnp.finfo(X.dtype).eps
        h = eps**0.25 * jnp.maximum(1, jnp.abs(X).max())
        ends = [Derivative(X + s * h * along, dims[:-1]) if dims[1:] else Values(X + s * h * along) for s in (1, -1)]
        a, b = (end.variance(kernel) for end in ends)
        between = jnp.diagonal(ends[0].covariance(kernel, ends[1]), axis1=-2, axis2=-1)
        return self.variance(kernel), (a + b - 2 * between) / (4 * h**2), 16 * eps * (a + b) / h**2

    def apply(self, function: Evaluated) -> Array:
        X = jnp.asarray(self.X)
        if self.direction is not None:
            return _along(function, jnp.asarray(self.direction))(X)
        for dim in self.dim if isinstance(self.dim, tuple) else (self.dim or 0,):
            function = _along(function, jnp.zeros_like(X).at[..., dim].set(1))
        return function(X)


def _refuse_kinks(variance: Array, by_differences: Array, rounding: Array) -> None:
    if np.isnan(variance).any() and not np.isnan(by_differences).any():
        raise ValueError(
            "The derivative of the kernel is NaN where two inputs coincide, as that of a square root of zero is. Write the kernel "
            "such that it has one there (jnp.where on both sides of the root), or take one of numpyro_orthgp.kernels."
        )
    if (np.asarray(by_differences) > 4 * np.asarray(variance) + np.asarray(rounding)).all():
        raise ValueError(
            "A process with this kernel has no such derivative: the kernel has a kink where two inputs coincide. "
            f"Differences over short steps have variance {float(np.max(by_differences)):.3g}; the derivative of "
            f"the kernel gives {float(np.max(variance)):.3g}. Take a smoother kernel, or the derivative of the "
            "other terms alone: f.term(...)(Derivative(X, dim))."
        )


def _along(function: Evaluated, directions: Array) -> Evaluated:
    """The derivative of each input's value along that input's direction; directions have shape (B, D)."""
    return lambda X: jax.jvp(function, (X,), (directions,))[1]
