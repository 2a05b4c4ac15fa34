"""Error of quadrature in a fit, compared with thousands of nodes: of a likelihood's expectations, and of averages over inputs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.diagnostics.layout import Trace
from numpyro_orthgp.diagnostics.sites import mask_of
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.functions.expected import Nodes, nodes_of
from numpyro_orthgp.functions.latent_inputs import LatentInputs
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, GaussHermite, is_expected, unwrap
from numpyro_orthgp.likelihoods.mixture import Mixture
from numpyro_orthgp.likelihoods.stacked import Stacked
from numpyro_orthgp.math.quadrature import sobol_normal
from numpyro_orthgp.types import Array

__all__ = ["IntegrationError", "averaging_errors", "dense_expectation", "integration_errors", "which_count"]

# Of the dense rule: how far it goes, in standard deviations; nodes for one function, for each of two, for several together; how
# many are looked at together.
_REACH, _LINE, _PLANE, _SPACE, _PART = 9.0, 4096, 160, 2**14, 32


@dataclass(frozen=True)
class IntegrationError:
    """
    :param num_points: nodes of the fit, for each latent function that a point mixes.
    :param error: their value of E_q(f)[log p(y | f)] minus the true value, in nats, flat, without masked points.
    """

    num_points: int
    error: np.ndarray

    @property
    def mean(self) -> float:
        """By how much the bound is too high, in nats per point."""
        return float(self.error.mean())

    @property
    def size(self) -> float:
        """The mean of the absolute errors."""
        return float(np.abs(self.error).mean())

    @property
    def most(self) -> float:
        """The largest absolute error."""
        return float(np.abs(self.error).max())


def integration_errors(subject: Subject) -> dict[str, IntegrationError]:
    """The error for each output that uses Gauss-Hermite nodes, at the fitted marginals (of one draw, if hyperparameters are drawn).

    The reference is the trapezoidal rule, which copes with kinks and narrow peaks; for more than two functions, Sobol points.
    """
    numbers: dict[str, int] = {}

    def collect(sites: Trace, functions: Any) -> dict[str, tuple[Array, Array]]:
        found = {}
        for output in subject.layout.outputs:
            fn, y = sites[output.site]["fn"], jnp.asarray(sites[output.site]["value"])
            if is_expected(fn) and (probe := _probe(fn, y)).dim is not None:
                numbers[output.name] = probe.num_points
                found[output.name] = _expected(fn, y) - dense_expectation(fn, y, probe.dim), which_count(fn, y)
        return found

    found = jax.device_get(subject.measure(collect))
    kept = {name: error[mask & np.isfinite(error)] for name, (error, mask) in found.items()}
    return {name: IntegrationError(numbers[name], np.asarray(e, float)) for name, e in kept.items() if e.size}


def averaging_errors(subject: Subject) -> dict[str, float]:
    """What nodes over uncertain inputs miss, by name of the output, for outputs whose averages have no closed form: in units of the
    prior's standard deviation (``nodes_miss`` in ``functions/expected.py``)."""

    def collect(sites: Trace, functions: Any) -> dict[str, Array]:
        beneath = {output.name: _averaged(sites[output.site]["fn"]) for output in subject.layout.outputs}
        return {name: jnp.stack([n.missed() for n in nodes]) for name, nodes in beneath.items() if nodes}

    return {name: float(np.max(missed)) for name, missed in subject.measure(collect).items()}


def _averaged(fn: Any) -> list[Nodes]:
    if isinstance(fn, CollapsedGP):
        X = fn.X
        if not isinstance(X, LatentInputs) or X.loc is None or X.scale is None:
            return []
        nodes = nodes_of(fn.kernel, fn.features, fn._prior().blocks, X.loc, X.scale, fn.num_points)
        return [] if nodes is None else [nodes]
    leaves = jax.tree.leaves(fn, is_leaf=lambda leaf: isinstance(leaf, Nodes))
    # Inside `scan` the arrays of all steps are stacked.
    return [leaf for leaf in leaves if isinstance(leaf, Nodes) and leaf.loc.ndim == 2]


class _Part:
    """An integrator: part ``index`` of the dense rule for ``dim`` functions, its weights summing to one."""

    def __init__(self, index: Any, dim: int) -> None:
        self.index = index
        self.rule = _rule(dim)

    @property
    def share(self) -> Array:
        """The weight of this part among all."""
        return jnp.asarray(self.rule[1].sum(-1))[self.index]

    def nodes(self, rng_key: Any, batch: tuple[int, ...], dim: int | None, dtype: Any) -> tuple[Array, Array]:
        nodes, weights = (jnp.asarray(a, dtype)[self.index] for a in self.rule)
        shape = (-1,) + (1,) * len(batch) + ((dim,) if dim else ())
        return nodes.reshape(shape), weights / weights.sum()


class _Probe:
    """An integrator that records its calls; ``dim`` is ``None`` if there was none."""

    dim: int | None = None
    num_points = 0

    def nodes(self, rng_key: Any, batch: tuple[int, ...], dim: int | None, dtype: Any) -> tuple[Array, Array]:
        self.dim = dim or 1
        return GaussHermite(2).nodes(rng_key, batch, dim, dtype)


def _probe(fn: Any, y: Array) -> _Probe:
    probe = _Probe()
    jax.eval_shape(lambda y: _expected(fn, y, probe), y)
    return probe


def dense_expectation(fn: Any, y: Array, dim: int) -> Array:
    """Average over parts. Expectations are linear in the weights, except for terms in closed form, which are equal in all parts."""

    def add(total: Array, index: Array) -> tuple[Array, None]:
        part = _Part(index, dim)
        return total + part.share.astype(total.dtype) * _expected(fn, y, part), None

    shape = jax.eval_shape(lambda y: _expected(fn, y), y)
    total, _ = lax.scan(add, jnp.zeros(shape.shape, shape.dtype), jnp.arange(len(_rule(dim)[1])))
    return total


def _expected(fn: Any, y: Array, rule: Any = None) -> Array:
    """E_q(f)[log p(y | f)] of a likelihood, also a wrapped one, with another rule in place of Gauss-Hermite nodes."""
    fn, _ = unwrap(fn)
    if isinstance(fn, Stacked):
        axis = y.ndim - len(fn.batch_shape) - len(fn.event_shape)
        return jax.vmap(lambda step, y: _expected(step, y, rule), (0, axis), axis)(fn.steps, y)
    if isinstance(fn, Mixture):
        values = _expected(fn.components, fn._repeated(y), rule)
        return values.reshape(*fn.log_weights.shape, *values.shape[1:]).mean(1)
    return _with_rule(fn, rule, y).expected_log_density(y)


def _with_rule(fn: ExpectedLikelihood, rule: Any, y: Array) -> ExpectedLikelihood:
    if rule is None:
        return fn
    fn = copy.copy(fn)
    if isinstance(fn.integrator, GaussHermite):
        if isinstance(rule, _Probe):
            rule.num_points = fn._num_nodes(y)
        fn.integrator = rule
    if isinstance(inner := getattr(fn, "likelihood", None), ExpectedLikelihood):  # of what it wraps
        fn.likelihood = _with_rule(inner, rule, y)
    return fn


def which_count(fn: Any, y: Array) -> Array:
    """Which expectations are not masked, in their shape."""
    shape = jax.eval_shape(lambda y: _expected(fn, y), y).shape
    mask = mask_of(fn)
    if mask is None:
        return jnp.ones(shape, bool)
    mask = jnp.broadcast_to(mask, y.shape)
    return mask.any(tuple(range(len(shape), mask.ndim)))


def _rule(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes, shape (parts, S, dim), and weights, shape (parts, S)."""
    if dim > 2:
        with jax.ensure_compile_time_eval():
            nodes = np.asarray(sobol_normal(_SPACE, dim, jnp.result_type(float)))
        weights = np.full(_SPACE, 1 / _SPACE)
    else:
        t = np.linspace(-_REACH, _REACH, _LINE if dim == 1 else _PLANE)
        w = np.exp(-(t**2) / 2)
        nodes = np.stack(np.meshgrid(*[t] * dim, indexing="ij"), -1).reshape(-1, dim)
        weights = np.prod(np.meshgrid(*[w / w.sum()] * dim, indexing="ij"), axis=0).ravel()
    return nodes.reshape(-1, _PART, dim), weights.reshape(-1, _PART)
