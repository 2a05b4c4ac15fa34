r"""The interface of families of Gaussians over whitened inducing variables, whose prior is :math:`N(0, I)`.

A family is a subclass of :class:`Whitened`, a dataclass whose fields are the parameters of one member: the mean ``loc`` and
the parameters of its covariance S. A family must define :meth:`~Whitened.start` and :meth:`~Whitened.spread`. All other methods
follow from these through one M x M factor; a family with faster formulas overrides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints

from numpyro_orthgp.gaussians.constraints import dense_lower_cholesky
from numpyro_orthgp.gaussians.natural_step import diagonal_step, full_step
from numpyro_orthgp.math.products import PRECISION, combine, diagonal, lower_matmul_transposed
from numpyro_orthgp.math.triangular import solve_lower
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["Diagonal", "Full", "Shifted", "Value", "Whitened"]


@dataclass(frozen=True)
class Whitened:
    r"""A member of a family of Gaussians :math:`q(e) = N(m, S)`, with leading batch axes. Register each subclass as a pytree::

        @jax.tree_util.register_dataclass
        @dataclass(frozen=True)
        class Isotropic(Whitened):
            scale: jax.Array  # shape (...)

            name = "isotropic"
            constraints = {"scale": dist.constraints.positive}

            @classmethod
            def start(cls, shape, scale):
                return cls(jnp.zeros(shape, scale.dtype), jnp.full(shape[:-1], scale))

            def spread(self, A):
                return self.scale[..., None, None] * A

    and give it to a guide, ``AutoSparseGP(model, covariance=Isotropic)``. Its parameters are ``{gp}.u{i}_loc`` and one for each
    other field, here ``{gp}.u{i}_scale``. Functions of several outputs may share a covariance: then the other fields lack the
    leading axis of ``loc``.

    :param loc: mean, shape (..., M).
    """

    loc: Array

    #: The family's name for users.
    name: ClassVar[str]
    #: The constraint of each field except ``loc``.
    constraints: ClassVar[Mapping[str, Any]] = {}
    #: Whether it is a single value with zero covariance.
    is_value: ClassVar[bool] = False
    #: Whether :meth:`natural_step` is known.
    has_natural_step: ClassVar[bool] = False

    @classmethod
    def start(cls, shape: tuple[int, ...], scale: Array) -> Whitened:
        """The member that a fit begins with: mean zero, independent variables.

        Options, such as a rank, are further arguments with defaults; ``partial(cls.start, rank=3)`` is then a ``covariance``.

        :param shape: shape of ``loc``.
        :param scale: standard deviation of each variable, shape (), in the desired dtype.
        """
        raise NotImplementedError

    def spread(self, A: Array) -> Array | None:
        r"""A matrix :math:`W` with :math:`W^\top W = A^\top S A`, the covariance that q explains at the inputs of ``A``.

        :param A: projections, shape (..., M, B). If functions share a kernel, it lacks the leading axes of the fields: broadcast.
        :return: shape (..., K, B) for any K of at least M, or ``None`` for a known value, with zero covariance.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ parameters

    @classmethod
    def parts(cls) -> tuple[str, ...]:
        """The names of the fields, ``loc`` first."""
        return tuple(f.name for f in fields(cls))

    def given(self, **values: Array) -> Whitened:
        """This member with other parameters, as an optimizer stored them."""
        return replace(self, **values)

    def parameters(self) -> dict[str, Array]:
        """The parameters within their constraints, by name of the field, separately for each function."""
        return {name: self._of_each(name) for name in self.parts()}

    def _of_each(self, name: str) -> Array:
        value, batch = getattr(self, name), self.loc.shape[:-1]
        own = jnp.shape(value)[max(jnp.ndim(value) - self.event_dim(name), 0) :]
        return jnp.broadcast_to(value, batch + own)

    def event_dim(self, name: str) -> int:
        """Number of axes of a field for a single function."""
        if name == "loc":
            return 1
        if self.loc.ndim == 1:
            return jnp.ndim(getattr(self, name))
        try:
            start = jax.eval_shape(lambda: type(self).start(self.loc.shape[-1:], jnp.ones((), self.loc.dtype)))
        except TypeError as error:
            raise TypeError(
                f"With several functions {type(self).__name__}.start(shape, scale) must work without further arguments: it shows "
                "how many axes the parameters of one have. Give the others default values, or define `event_dim(name)`."
            ) from error
        return getattr(start, name).ndim

    # ------------------------------------------------------------ what bounds ask

    def kl_from_prior(self) -> Array:
        r"""KL divergence from the whitened prior, summed over batch axes.

        .. math:: KL[N(m, S) \,\|\, N(0, I)] = \tfrac12 \left( |m|^2 + \mathrm{tr}\, S - M - \log |S| \right)

        :return: in nats, shape ().
        """
        return (jnp.sum(self.loc**2) + self._total(self.excess_trace())) / 2 - self._total(self.half_log_det())

    def excess_trace(self) -> Array:
        """tr S - M of each covariance, exactly zero for the prior's."""
        T = self.lower_root()
        return jnp.sum(T**2 - jnp.eye(T.shape[-1], dtype=T.dtype), (-2, -1))

    def half_log_det(self) -> Array:
        """Half the log determinant of each covariance."""
        return jnp.sum(jnp.log(jnp.abs(diagonal(self.lower_root()))), -1)

    def log_density(self, value: Array) -> Array:
        """Log density at ``value``, shape (sample_shape) + (..., M), summed over the family's batch axes."""
        centred = self.standardized((value - self.loc)[..., None])[..., 0]
        event = tuple(range(-self.loc.ndim, 0))
        normal = -jnp.sum(centred**2, event) / 2 - self.loc.size * jnp.log(2 * jnp.pi) / 2
        return normal - self._total(self.half_log_det())

    def _total(self, of_each: Array) -> Array:
        """Sum over all functions, some of which may share a covariance."""
        return jnp.sum(jnp.broadcast_to(of_each, self.loc.shape[:-1]))

    # ------------------------------------------------------------ roots of S

    def lower_root(self) -> Array:
        r"""A lower-triangular T with :math:`S = T T^\top`, shape (..., M, M)."""
        W = self.spread(jnp.eye(self.loc.shape[-1], dtype=self.loc.dtype))
        assert W is not None
        return jnp.swapaxes(jnp.linalg.qr(W, mode="r"), -1, -2)

    def standardized(self, V: Array) -> Array:
        """R^-1 V for some root R of S = R R', shape (..., M, n)."""
        return solve_lower(self.lower_root(), V)

    def variance(self) -> Array:
        """The diagonal of S, shape (..., M)."""
        return jnp.sum(self.lower_root() ** 2, -1)

    def sample(self, rng_key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws, shape ``sample_shape`` + (..., M)."""
        noise = jax.random.normal(rng_key, sample_shape + self.loc.shape, self.loc.dtype)
        return self.loc + jnp.einsum("...km,...m->...k", self.lower_root(), noise, precision=PRECISION)

    def principal_axes(self) -> tuple[Array | None, Whitened]:
        r"""q in coordinates in which its covariance is diagonal.

        :return: the orthogonal :math:`V` of :math:`S = V \, \mathrm{diag}(s^2) V^\top`, shape (..., M, M), or ``None`` for the
            identity; and the law of :math:`V^\top e`.
        """
        # Singular values of the root: small eigenvalues of S itself would be lost in rounding errors of its largest one.
        V, scale, _ = jnp.linalg.svd(self.lower_root())
        loc = combine(self.loc, V)
        return V, Diagonal(loc, jnp.broadcast_to(scale, loc.shape))

    # ------------------------------------------------------------ steps

    def natural_step(self, gradient: Whitened, rate: ArrayLike) -> Whitened:
        """One step of length ``rate`` along the natural gradient, shortened if it would leave the positive-definite cone.

        :param gradient: derivatives of a loss with respect to the parameters, in the same fields.
        :param rate: the length; 1 reaches the optimum for a Gaussian likelihood with full data.
        """
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Full(Whitened):
    r"""Any covariance: "full".

    :param scale_tril: the lower-triangular :math:`T` of :math:`S = T T^\top`, shape (..., M, M).
    """

    scale_tril: Array

    name = "full"
    constraints = {"scale_tril": dense_lower_cholesky}
    has_natural_step = True

    @classmethod
    def start(cls, shape: tuple[int, ...], scale: Array) -> Full:
        return cls(jnp.zeros(shape, scale.dtype), _scaled_identity(scale, shape))

    def given(self, **values: Array) -> Full:
        return replace(self, **values | {"scale_tril": jnp.tril(values["scale_tril"])})

    def parameters(self) -> dict[str, Array]:
        # With positive pivots: another optimizer may have moved natural parameters across zero.
        signs = jnp.where(diagonal(self.scale_tril) < 0, -1, 1)[..., None, :]
        return Whitened.parameters(replace(self, scale_tril=self.scale_tril * signs))

    def spread(self, A: Array) -> Array:
        return lower_matmul_transposed(self.scale_tril, A)

    def lower_root(self) -> Array:
        return self.scale_tril

    def natural_step(self, gradient: Whitened, rate: ArrayLike) -> Full:
        assert isinstance(gradient, Full)
        loc, T = full_step(self.loc, self.scale_tril, gradient.loc, gradient.scale_tril, rate)
        return replace(self, loc=loc, scale_tril=T)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Diagonal(Whitened):
    """Independent variables: "diagonal".

    :param scale: standard deviations, shape (..., M).
    """

    scale: Array

    name = "diagonal"
    constraints = {"scale": constraints.positive}
    has_natural_step = True

    @classmethod
    def start(cls, shape: tuple[int, ...], scale: Array) -> Diagonal:
        return cls(jnp.zeros(shape, scale.dtype), jnp.full(shape, scale))

    def parameters(self) -> dict[str, Array]:
        return Whitened.parameters(replace(self, scale=jnp.abs(self.scale)))

    def spread(self, A: Array) -> Array:
        return self.scale[..., None] * A

    def excess_trace(self) -> Array:
        return jnp.sum(self.scale**2 - 1, -1)

    def half_log_det(self) -> Array:
        return jnp.sum(jnp.log(jnp.abs(self.scale)), -1)

    def lower_root(self) -> Array:
        return self.scale[..., None] * jnp.eye(self.scale.shape[-1], dtype=self.scale.dtype)

    def standardized(self, V: Array) -> Array:
        return V / self.scale[..., None]

    def variance(self) -> Array:
        return self.scale**2

    def sample(self, rng_key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.loc + self.scale * jax.random.normal(rng_key, sample_shape + self.loc.shape, self.loc.dtype)

    def principal_axes(self) -> tuple[None, Whitened]:
        return None, self

    def natural_step(self, gradient: Whitened, rate: ArrayLike) -> Diagonal:
        assert isinstance(gradient, Diagonal)
        loc, scale = diagonal_step(self.loc, self.scale, gradient.loc, gradient.scale, rate)
        return replace(self, loc=loc, scale=scale)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shifted(Whitened):
    """The prior with another mean, S = I: "prior"."""

    name = "prior"

    @classmethod
    def start(cls, shape: tuple[int, ...], scale: Array) -> Shifted:
        return cls(jnp.zeros(shape, scale.dtype))

    def spread(self, A: Array) -> Array:
        return A

    def excess_trace(self) -> Array:
        return jnp.zeros((), self.loc.dtype)

    def half_log_det(self) -> Array:
        return jnp.zeros((), self.loc.dtype)

    def lower_root(self) -> Array:
        return jnp.eye(self.loc.shape[-1], dtype=self.loc.dtype)

    def standardized(self, V: Array) -> Array:
        return V

    def variance(self) -> Array:
        return jnp.ones_like(self.loc)

    def sample(self, rng_key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.loc + jax.random.normal(rng_key, sample_shape + self.loc.shape, self.loc.dtype)

    def principal_axes(self) -> tuple[None, Whitened]:
        return None, self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Value(Whitened):
    """One value, S = 0. Models get it from any inference without a guide of this package."""

    name = "value"
    is_value = True

    def spread(self, A: Array) -> None:
        return None

    def excess_trace(self) -> Array:
        return -jnp.full((), self.loc.shape[-1], self.loc.dtype)

    def half_log_det(self) -> Array:
        return -jnp.full((), jnp.inf, self.loc.dtype)

    def lower_root(self) -> Array:
        return jnp.zeros((self.loc.shape[-1],) * 2, self.loc.dtype)

    def variance(self) -> Array:
        return jnp.zeros_like(self.loc)

    def sample(self, rng_key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Array:
        return jnp.broadcast_to(self.loc, sample_shape + self.loc.shape)

    def principal_axes(self) -> tuple[None, Whitened]:
        return None, self


@partial(jax.jit, static_argnums=1)  # one program instead of one for each operation
def _scaled_identity(scale: Array, shape: tuple[int, ...]) -> Array:
    return scale * jnp.broadcast_to(jnp.eye(shape[-1], dtype=scale.dtype), (*shape, shape[-1]))
