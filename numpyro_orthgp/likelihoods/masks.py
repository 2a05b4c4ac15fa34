"""Masks for likelihoods whose residual is tightened in groups of rows, which are then no longer independent.

NumPyro puts a mask around a distribution (``handlers.mask``, ``obs_mask``, ``.mask``). It sets log densities of masked rows to zero
afterwards. The tightening cost of a group is not a sum over rows, so the result would not be a bound. Here the wrapped likelihood
is told which rows have no output, and removes their residual from the group.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, NoReturn

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.constraints import _Real

from numpyro_orthgp.functions.arithmetic import outputs_first
from numpyro_orthgp.functions.callers import is_calling
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.sites import states_may_differ
from numpyro_orthgp.likelihoods.checks import ToldOfCallers, refused_as_latent
from numpyro_orthgp.likelihoods.expanded import Expanded
from numpyro_orthgp.math.grouped import scale_groups

__all__ = ["ToldOfMasks", "refuse_enumerated_groups", "refuse_groups"]


class _RealOfGroups(_Real):
    """Real numbers. Only a NumPyro mask asks this constraint for values, to replace hidden ones."""

    def feasible_like(self, prototype: Any) -> NoReturn:
        raise ValueError(
            "With `group_size` a likelihood must know which rows are masked, but it was not told of this mask, "
            "so the loss would not be a bound. Mask the likelihood itself: likelihood.mask(mask).to_event(1), or "
            "numpyro.handlers.mask. Do not use dist.MaskedDistribution, or a mask beneath dist.Independent."
        )


_REAL_OF_GROUPS = _RealOfGroups()
biject_to.register(_RealOfGroups, lambda _: biject_to(constraints.real))


class ToldOfMasks(ToldOfCallers):
    """A likelihood that is told of masks if its function's residual is tightened in groups of rows."""

    marginals: Marginals
    told = False  # whether it knows which rows have no output, if any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (getter := getattr(vars(cls).get("support"), "fget", None)) is not None:
            cls.support = refused_as_latent(getter)

    @property
    def real_of_groups(self) -> constraints.Constraint:
        """The support: real numbers, which raise an error for a mask that the likelihood was not told of."""
        return constraints.real if self.told else _REAL_OF_GROUPS

    def mask(self, mask: Any) -> dist.Distribution:
        return super().mask(mask) if mask is True or self.marginals.groups is None else _told(self, mask)

    def to_event(self, reinterpreted_batch_ndims: int | None = None) -> dist.Distribution:
        num = len(self.batch_shape) if reinterpreted_batch_ndims is None else reinterpreted_batch_ndims
        if num == 0:
            return self
        return _Events(self, num) if self.marginals.groups is None else _Together(self, num)

    def expand(self, batch_shape: tuple[int, ...]) -> dist.Distribution:
        if self.marginals.groups is not None and tuple(batch_shape) != self.batch_shape:
            raise ValueError(
                f"With `group_size` a likelihood has the batch shape {self.batch_shape} alone; a plate around it "
                f"wants {tuple(batch_shape)}. Leave `group_size` out, or give each row an output of its own."
            )
        return self if tuple(batch_shape) == self.batch_shape else Expanded(self, batch_shape)

    def refuse_wrappers(self) -> None:
        """Refuse groups of rows within wrappers of NumPyro that combine log densities row by row and tell nobody of masks.

        :raises ValueError: if one of them asks for the log density.
        """
        if is_calling("_MixtureBase", "log_prob"):
            refuse_groups("a mixture of NumPyro's")
        if is_calling(dist.TransformedDistribution, "log_prob") and is_calling(dist.MaskedDistribution, "log_prob"):
            raise ValueError(
                "A likelihood whose residual is tightened in groups of rows (`group_size`) is not told of a mask by "
                "dist.TransformedDistribution, and would not give a bound. Use numpyro_orthgp.likelihoods.Transformed(likelihood, "
                "transforms), which takes the same arguments and may be masked."
            )

    def without(self, mask: Any) -> Any:
        """The likelihood with the residual of only those points that have an output.

        :param mask: True where there is an output; broadcasts to the batch shape.
        """
        changed, m = copy(self), self.marginals
        assert m.groups is not None
        if any(size > 1 for size in jnp.shape(mask)[: -len(m.own_shape)]):
            refuse_enumerated_groups()
        seen = jnp.broadcast_to(jnp.asarray(mask), self.batch_shape).astype(m.mean.dtype)
        changed.told = True
        changed.marginals = replace(m, groups=scale_groups(m.groups, outputs_first(seen, m.own_shape)))
        return changed


def refuse_groups(likelihood: str) -> NoReturn:
    """
    :raises ValueError: always: the bound is not known for groups of rows with this likelihood.
    """
    raise ValueError(
        f"`group_size` needs Gaussian noise on functions that are not mixed; {likelihood} here needs the variance "
        "of each row, or has functions that f(X) @ W mixes. Leave `group_size` out for this gp: "
        f"group_size={{'another gp': 16}}."
    )


def refuse_enumerated_groups() -> None:
    """
    :raises ValueError: if a group's cost would use one state of a discrete site for all its rows.
    """
    if states_may_differ():
        raise ValueError(
            "With `group_size` all rows of a group have one charge, so noise, factors of f(X) and masks must not "
            "depend on an enumerated site of each row. Offsets of f(X) may depend on it, and all of them may "
            "depend on a site outside of plates. Leave `group_size` out for this gp: "
            "group_size={'another gp': 16}."
        )


class _Events(ToldOfCallers, dist.Independent):
    """``to_event`` of a likelihood."""


class _Told(dist.MaskedDistribution):
    """A mask that the wrapped likelihood knows of. It handles further masks too."""

    def mask(self, mask: Any) -> dist.Distribution:
        return _told(self, mask)

    def to_event(self, reinterpreted_batch_ndims: int | None = None) -> dist.Distribution:
        return _Together(
            self, len(self.batch_shape) if reinterpreted_batch_ndims is None else reinterpreted_batch_ndims
        )


class _Together(_Events):
    """``to_event`` of a likelihood that must know of masks."""

    def mask(self, mask: Any) -> dist.Distribution:
        return _told(self, mask)


def _told(fn: Any, mask: Any) -> dist.Distribution:
    """Mask ``fn``, and tell the wrapped likelihood.

    :param mask: broadcasts to the batch shape of ``fn``. A Python bool applies to all rows.
    """
    return _Told(fn if isinstance(mask, bool) else _hidden(fn, mask), mask)


def _hidden(fn: Any, mask: Any) -> Any:
    if isinstance(fn, dist.MaskedDistribution):
        return _Told(_hidden(fn.base_dist, mask), fn._mask)
    if isinstance(fn, dist.Independent):
        num = fn.reinterpreted_batch_ndims
        return _Together(_hidden(fn.base_dist, mask[(..., *(None,) * num)]), num)
    return fn.without(mask)
