"""The Gaussian marginals of latent functions at inputs, and their arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from numpyro_orthgp.errors import check_columns, check_is_key, inspect
from numpyro_orthgp.functions import arithmetic
from numpyro_orthgp.functions.frozen import constant_if_frozen
from numpyro_orthgp.functions.keys import key_in_run
from numpyro_orthgp.functions.no_array import NoNumber
from numpyro_orthgp.functions.runs import DrawInRun
from numpyro_orthgp.functions.sites import Names, charge, refuse_uncharged
from numpyro_orthgp.math.grouped import scale_groups
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["Marginals"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Marginals(NoNumber):
    r"""The Gaussian marginals of latent functions at B inputs.

    Latent functions are independent of each other given the inputs; ``mixing`` turns L of them into P outputs.

    :param mean: means of the outputs, shape (B,) or (B, P).
    :param explained: variance of each latent function that comes from its inducing variables, shape (B,) or (B, L).
    :param residual: variance of each latent function that no inducing variable explains, same shape.
    :param mixing: ``None`` if outputs are latent functions, else shape (L, P) or (B, L, P), with P = 1 for a mean of shape (B,).
    :param residual_scale: if the guide tightens the residual, its v of Titsias 2025 Eq. 23: shape () or (L,), or (B,) or (B, L) if
        rows belong to different functions; ``None`` for the prior's residual.
    :param joint: draws the outputs jointly, ``joint(rng_key, sample_shape)``; ``None`` if draws are point by point.
    :param total: explained + residual, if its derivative takes fewer operations than that of the sum; else ``None``, for example
        after one of both was replaced.
    :param groups: the residual's covariance within each of n groups of G consecutive inputs, shape (n, G, G) or (L, n, G, G), if
        the guide tightens it in groups; else ``None``. A shorter last group is padded with arbitrary entries.
    :param lead: number of axes from enumerated discrete sites, in front of all axes above (``functions/arithmetic.py``); 0 if
        nothing is enumerated.
    """

    mean: Array
    explained: Array
    residual: Array
    mixing: Array | None = None
    residual_scale: Array | None = None
    joint: Any = None
    names: Names | None = field(default=None, metadata={"static": True})
    total: Array | None = None
    groups: Array | None = None
    lead: int = field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """(B,) or (B, P), with axes of enumeration in front."""
        return self.mean.shape

    @property
    def own_shape(self) -> tuple[int, ...]:
        """(B,) or (B, P), without axes of enumeration."""
        return self.mean.shape[self.lead :]

    @property
    def num_latents(self) -> int | None:
        """Number L of latent functions, ``None`` for a single one."""
        return None if self.explained.ndim == self.lead + 1 else self.explained.shape[-1]

    @property
    def tight(self) -> bool:
        """Whether the guide uses the tightened bound."""
        return self.residual_scale is not None

    @property
    def latent_variance(self) -> Array:
        """Variance of each latent function, explained + v residual, shape (B,) or (B, L)."""
        if self.total is not None and not self.tight:
            return self.total
        return self.explained + self._latent_residual

    @property
    def explained_variance(self) -> Array:
        """The part of the outputs' variance that comes from inducing variables, shape of ``mean``."""
        return self._mixed(self.explained, 2)

    @property
    def residual_variance(self) -> Array:
        """The part of the outputs' variance that no inducing variable explains (scaled by v while training tightened)."""
        return self._mixed(self._latent_residual, 2)

    @property
    def variance(self) -> Array:
        """Variances of the outputs, shape of ``mean``."""
        return self._mixed(self.latent_variance, 2)

    @property
    def tightening_cost(self) -> Array:
        r"""The cost of v in the bound, if each output has its own y: :math:`(v - \log v - 1)/2`, shape of ``mean``.

        This is the regularizer of Titsias 2025, Eq. 23; zero if not tightened. If outputs mix latent functions, each output is
        charged for all of them. This is a bound for any mask of outputs, and with learned v no worse than v = 1.
        """
        if self.mixing is None:
            return self._latent_cost
        cost = self.point_cost
        return jnp.broadcast_to(cost if len(self.own_shape) == 1 else cost[..., None], self.mean.shape)

    @property
    def point_cost(self) -> Array:
        """The cost of v in the bound, if one y depends on all latent functions of its point; shape (B,)."""
        return self._latent_cost if self.num_latents is None else self._latent_cost.sum(-1)

    @property
    def _latent_residual(self) -> Array:
        return self.residual if self.residual_scale is None else self.residual_scale * self.residual

    @property
    def _latent_cost(self) -> Array:
        v = jnp.ones((), self.mean.dtype) if self.residual_scale is None else self.residual_scale
        return jnp.broadcast_to((v - jnp.log(v) - 1) / 2, jnp.broadcast_shapes(v.shape, self.explained.shape))

    def at(self, nodes: Array) -> Array:
        """Outputs for standard-normal ``nodes`` of shape (S, B) or (S, B, L), shape (S,) + ``shape``.

        Nodes have axes of size one in place of axes of enumeration. For a bound they must be random numbers, or a rule's: a latent
        site of the model has a Gaussian of its own under the guide, and the loss is then no bound (:func:`check` says so). Each
        row is drawn by itself, and ``AutoSparseGP`` refuses a y of several; :meth:`sample` draws one function.
        """
        return self._noted(constant_if_frozen(self._at(nodes), nodes), at_nodes=True)

    def _at(self, nodes: Array) -> Array:
        return self.mean + self._mixed(safe_sqrt(self.latent_variance) * nodes)

    def sample(self, rng_key: PRNGKey | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw the outputs: values of one function at all B inputs, at a cost of B^3.

        One run of a model sees one function (:mod:`numpyro_orthgp.functions.runs`): the inducing variables are drawn once, and a
        second call of f gets values consistent with the first. One y may depend on f at many inputs, as for an average, a
        difference or an integral. The objective of a guide of this package is then still a bound, also if it is tightened.

        If each y depends only on f at its own row, as in the layers of a deep GP, :meth:`independent` gives a bound too, with less
        noise and without this cost: ``f(X).independent().sample()``. Within ``scan`` or ``vmap`` draws of a step are of one
        function, but each step draws its own residual, as in FITC. In ``jit``, ``checkpoint``, ``cond``, ``grad`` they are refused.

        Do not combine a draw with marginals of the same function within one y: ``f(a) + f(b).sample()`` integrates over ``f(a)`` as
        if both were independent, which is no bound. Draw both. (This form is refused; ``AutoSparseGP`` and ``check`` also find
        draws behind further arithmetic.)

        :param rng_key: by default :func:`numpyro.prng_key`, inside of a seeded model. In a fit one that is given is joined with it.
        :return: shape ``sample_shape`` + (B,) or (B, P).
        :raises ValueError: without a key; for a joint draw at more than 8192 inputs, or 2048 while a guide of this package is
            fitted.
        """
        rng_key = key_in_run(self.names, rng_key, self.mean, self.explained, arithmetic.rows_drawn(self.joint))
        if self.groups is not None:
            raise ValueError(
                "`sample()` is not known with `group_size`: the residual of a draw is tightened by one number "
                "for all rows, not in groups. Leave `group_size` out for this gp: "
                "group_size={'another gp': 16}."
            )
        if self.names is not None:
            self.names.note_weight(self.own_shape[0])
        if self.tight and self.names is not None:
            charge(self.names.fresh(), self.point_cost, self.names.weights())
        if self.joint is None and self.names is not None:
            self.names.drawn_by_rows()
        return self._noted(self._draw(rng_key, sample_shape))

    def draw(self, rng_key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Array:
        """:meth:`sample` with a key and without a site. It is refused while a tightened residual is fitted (ValueError)."""
        if self.tight and self.names is not None:
            refuse_uncharged("f(X).draw(rng_key)")
        rng_key = key_in_run(self.names, check_is_key(rng_key), self.mean, arithmetic.rows_drawn(self.joint))
        return self._noted(self._draw(rng_key, sample_shape))

    def _noted(self, draws: Array, *, at_nodes: bool = False) -> Array:
        names = self.names if at_nodes or self.joint is None else None
        return draws if names is None else names.moved(draws, self, at_nodes=at_nodes)

    def _draw(self, rng_key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw without a charge for a tightened residual, which is left to the caller."""
        if self.joint is None:
            nodes = jax.random.normal(rng_key, sample_shape + self.explained.shape, self.mean.dtype)
            return constant_if_frozen(self._at(nodes))
        return constant_if_frozen(self.joint(rng_key, sample_shape))

    def independent(self) -> Marginals:
        """The same marginals, drawn independently at each input; such draws are not draws of one function.

        Use it where each y depends on f at its own row only: ``AutoSparseGP`` refuses a y of two such draws, or of several rows.
        """
        return replace(self, joint=None)

    def __getitem__(self, key: Any) -> Marginals:
        """Pick outputs: ``m[..., p]`` is one output, shape (B,); ``m[..., a:b]`` and ``m[..., [p, q]]`` are several.

        So each output can have its own likelihood: ``Gaussian(m[..., 0], scale)``, ``Bernoulli(m[..., 1])``. A picked output that
        mixes latent functions still depends on all L of them.

        :param key: ``[..., p]`` or ``[:, p]`` with p an integer, a slice, or different integers in the desired order.
        :raises IndexError: if there is no such output.
        :raises TypeError: for any other key; to pick rows, index X.
        :raises ValueError: if no output is picked, or one twice.
        """
        columns = check_columns(key, self.own_shape)
        joint = None if self.joint is None else Partial(arithmetic.draw_columns, self.joint, columns)
        if self.mixing is None:
            v = self.residual_scale
            v = None if v is None else jnp.broadcast_to(v, (*v.shape[:-1], self.shape[-1]))[..., columns]
            groups = None if self.groups is None else self.groups[..., columns, :, :, :]
            others = {"residual_scale": v, "groups": groups, "names": self.names and self.names.of_columns(columns)}
            picked = self._with_variances(lambda variance: variance[..., columns], **others)
        else:
            picked = replace(self, mixing=self.mixing[..., np.atleast_1d(columns)])
        return replace(picked, mean=self.mean[..., columns], joint=joint)

    def pick(self, which: ArrayLike) -> Marginals:
        """Pick one output of each row, ``which[n]`` for row n: shape (B,) from (B, P).

        This serves mixtures whose component chooses the function. If the function of each row is known,
        ``f(Tasks(X, task))`` costs less (:class:`~numpyro_orthgp.Tasks`)::

            z = numpyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})  # in the plate of the rows
            numpyro.sample("y", Gaussian(stack([f(X), g(X)]).pick(z), noise), obs=y)

        :param which: integers of shape (B,), or () for all rows; or the value of a site that NumPyro enumerates.
        :raises TypeError: if they are not integers.
        :raises ValueError: for another shape, for concrete integers outside of 0..P-1 (under ``jit`` means are NaN there), or if
            the residual is tightened in groups.
        """
        which = arithmetic.check_rows(which, self.mean, self.lead)
        inspect(partial(arithmetic.refuse_no_output, self.shape[-1]), which)
        which = jnp.where(which < 0, self.shape[-1], which)  # under `jit` negative indices give NaN
        if self.groups is not None:
            raise ValueError(
                "`pick` chooses a function for each row, so rows of one group would be of different functions. "
                "Leave `group_size` out for the gp that `pick` chooses from."
            )
        m = self._lifted(which.ndim - 1)
        joint = None if self.joint is None else Partial(arithmetic.draw_of_rows, self.joint, which)
        mean = arithmetic.of_rows(self.mean, which)
        if m.mixing is not None:
            W = m.mixing if m.mixing.ndim > 2 else m.mixing[None]  # (..., 1 or B, L, P)
            return replace(m, mean=mean, mixing=arithmetic.of_rows(W, which[..., None])[..., None], joint=joint)
        v = self.residual_scale
        v = v if v is None or v.ndim == 0 else arithmetic.of_rows(v if v.ndim > 1 else v[None], which)
        return replace(
            m._with_variances(lambda variance: arithmetic.of_rows(variance, which), residual_scale=v),
            mean=mean,
            joint=joint,
        )

    def __add__(self, shift: ArrayLike) -> Marginals:
        """Add an array, such as a mean function, an offset or fixed effects."""
        self._refuse_own_draw("+", shift)
        shift = arithmetic.operand("+", shift, self.mean.dtype)
        lead = arithmetic.check_operand("+", shift, self.mean, self.lead)
        joint = None if self.joint is None else Partial(arithmetic.draw_shifted, self.joint, shift)
        return replace(self._lifted(lead), mean=self.mean + shift, joint=joint)

    __radd__ = __add__

    def __sub__(self, shift: ArrayLike) -> Marginals:
        self._refuse_own_draw("-", shift)
        return self + (-arithmetic.operand("-", shift, self.mean.dtype))

    def __rsub__(self, shift: ArrayLike) -> Marginals:
        return -self + arithmetic.operand("-", shift, self.mean.dtype)

    def __mul__(self, factor: ArrayLike) -> Marginals:
        """Multiply by an array, such as an amplitude or a known covariate (a varying coefficient)."""
        self._refuse_own_draw("*", factor)
        factor = arithmetic.operand("*", factor, self.mean.dtype)
        lead = arithmetic.check_operand("*", factor, self.mean, self.lead)
        joint = None if self.joint is None else Partial(arithmetic.draw_scaled, self.joint, factor)
        m, own = self._lifted(lead), self.own_shape
        if m.mixing is None:
            square, groups = factor**2, m.groups
            if groups is not None:
                groups = scale_groups(
                    groups, arithmetic.outputs_first(jnp.broadcast_to(factor, factor.shape[: -len(own)] + own), own)
                )
            scaled = m._with_variances(lambda variance: variance * square, groups=groups)
        else:
            scaled = replace(m, mixing=m.mixing * arithmetic.of_outputs(factor, own))
        return replace(scaled, mean=self.mean * factor, joint=joint)

    __rmul__ = __mul__

    def __truediv__(self, divisor: ArrayLike) -> Marginals:
        return self * (1 / arithmetic.operand("/", divisor, self.mean.dtype))

    def __neg__(self) -> Marginals:
        return self * -1.0

    def __matmul__(self, W: ArrayLike) -> Marginals:
        """Mix P functions to Q outputs, ``f(X) @ W`` with W of shape (P, Q): the linear model of coregionalization."""
        W = arithmetic.operand("@", W, self.mean.dtype)
        lead = arithmetic.check_weights(W, self.mean, self.lead)
        mixing = W if self.mixing is None else jnp.matmul(self.mixing, W, precision=PRECISION)
        joint = None if self.joint is None else Partial(arithmetic.draw_mixed, self.joint, W)
        return replace(self._lifted(lead), mean=arithmetic.mix_rows(self.mean, W), mixing=mixing, joint=joint)

    def __rmatmul__(self, A: Any) -> Marginals:
        raise TypeError(arithmetic.OF_ROWS)

    def __pow__(self, exponent: Any) -> Marginals:
        raise TypeError(arithmetic.NOT_LINEAR)

    def _refuse_own_draw(self, symbol: str, value: Any) -> None:
        """Refuse draws of the same function while fitting: marginals are integrated over as if independent of the draws."""
        joint, _ = arithmetic.drawn_from(self.joint)
        run = getattr(joint.args[0], "run", None) if isinstance(joint, DrawInRun) and joint.args else None
        if run is not None and run.has_drawn(value):
            raise ValueError(
                f"`f(a) {symbol} f(b).sample()` would treat the marginals of f and a draw of the same f as "
                f"independent, and the loss would not be a bound. Draw both: f(a).sample() {symbol} f(b).sample()."
            )

    def _lifted(self, lead: int) -> Marginals:
        """The same with ``lead`` axes of enumeration; new ones have size one."""
        extra = lead - self.lead
        if extra <= 0:
            return self
        lifted = self._with_variances(lambda variance: variance.reshape((1,) * extra + variance.shape))
        return replace(lifted, mean=self.mean.reshape((1,) * extra + self.mean.shape), lead=lead)

    def _with_variances(self, change: Callable[[Array], Array], **others: Any) -> Marginals:
        """The same with each kind of variance changed."""
        total = None if self.total is None else change(self.total)
        return replace(self, explained=change(self.explained), residual=change(self.residual), total=total, **others)

    def _mixed(self, latent: Array, power: int = 1) -> Array:
        """Latent (..., B, L) to outputs (..., B) or (..., B, P), with weights ``mixing**power``."""
        if self.mixing is None:
            return latent
        outputs = arithmetic.weighted(latent, self.mixing**power)
        return outputs[..., 0] if len(self.own_shape) == 1 else outputs
