"""A model run again at draws of its latent sites.

Draws are substituted as plain values. No belief reaches ``gp``, so f has the law p(f | u), and weights depend on the u that was
drawn. Guides need no ``analytic=False`` for this. If only inducing variables vary, all draws share covariances and factors, which
``vmap`` does not batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_orthgp.diagnostics.draws import Arguments, Draws, GuideDraws, density
from numpyro_orthgp.diagnostics.layout import Layout, Trace, layout_of
from numpyro_orthgp.errors import check_params
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.guides.parameters import Checked, check_model_params
from numpyro_orthgp.likelihoods.base import is_expected, log_predictive
from numpyro_orthgp.math.blocks import map_blocks
from numpyro_orthgp.math.kept import run_kept
from numpyro_orthgp.primitives.messages import collected_functions, is_enumerated
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["Replay", "look", "run"]

Visit = Callable[[Trace, dict[str, GPFunction], PRNGKey], Any]

# Numbers held at once for all draws of a block, and nodes at which a likelihood may evaluate each f(x).
MAX_ENTRIES = 2**24
NODES = 128
SHARING = 8  # draws after which their own work is most of it, not the covariances that they share


@dataclass(frozen=True)
class Replay:
    """A model, its arguments, and draws of its latent sites."""

    model: Callable[..., Any]
    arguments: Arguments
    draws: Draws
    layout: Layout

    def map(self, visit: Visit, rng_key: PRNGKey, *, densities: bool = False) -> Any:
        """``visit(trace, functions, key)`` at each draw: arrays of leading size S. Compiled as a whole, in blocks of draws.

        :param densities: whether it returns only sums of predictive densities.
        """
        fixed, varying = self._split()
        # With fixed hyperparameters all draws of a block share covariances and their factors.
        size, shared = self.layout.num_values, set(varying) <= set(self.layout.inducing)
        per_draw = size * (NODES if shared else max(NODES, size))
        num = MAX_ENTRIES // per_draw
        if shared and densities and self.layout.node_by_node:
            num = max(num, min(SHARING, MAX_ENTRIES // size))
        keys = jax.random.split(rng_key, self.draws.shape[0] * self.draws.shape[1])

        def visit_all(arrays: Any, params: Any, fixed: Any, varying: Any, keys: PRNGKey) -> Any:
            def one(row: Any) -> Any:
                values, key = row
                return self._visit(visit, arrays, params, fixed | values, key)

            return map_blocks(jax.vmap(one), (varying, keys), max(num, 1))

        return run_kept(visit_all, self.arguments.arrays, self.draws.params, fixed, varying, keys)

    def ends(self, visit: Visit, rng_key: PRNGKey) -> tuple[Any, Any]:
        """``visit`` at the first and at the last draw. Values that are equal there count as constant."""
        values = {name: np.asarray(v)[[0, -1]] for name, v in self._latents().items()}
        each = jax.vmap(lambda *row: self._visit(visit, *row), in_axes=(None, None, 0, 0))

        def both(*args: Any) -> tuple[Any, Any]:
            found = each(*args)
            return jax.tree.map(lambda v: v[0], found), jax.tree.map(lambda v: v[1], found)

        return run_kept(both, self.arguments.arrays, self.draws.params, values, jax.random.split(rng_key))

    @property
    def varies(self) -> bool:
        """Whether there is a draw that differs from the first."""
        return bool(self._split()[1])

    def _latents(self) -> dict[str, Array]:
        return {name: v for name, v in self.draws.values.items() if name in self.layout.latents}

    def _split(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Sites whose draws are all the same, and those that vary."""
        values = self._latents()
        same = {name: bool(np.all(np.asarray(v) == np.asarray(v[:1]))) for name, v in values.items()}
        return {n: v[0] for n, v in values.items() if same[n]}, {n: v for n, v in values.items() if not same[n]}

    def _visit(self, visit: Visit, arrays: Any, params: Any, values: Any, rng_key: PRNGKey) -> Any:
        model_key, own_key = jax.random.split(rng_key)
        return visit(*run(self.model, self.arguments.join(arrays), params, values, model_key), own_key)


def look(
    model: Callable[..., Any], arguments: Arguments, source: GuideDraws | Draws, fitted: bool, whole: bool = True
) -> Layout:
    """The layout of a model; nothing is computed, unless values are missing.

    :param source: the draws of each site.
    :param fitted: whether all parameters must be there, and all drawn sites must be sites of the model. (MCMC's draws also hold
        deterministic sites.)
    :param whole: whether plates must hold all of their rows.
    :raises ValueError: if the draws do not fit the model, or diagnostics do not support the model.
    """
    shapes = source.shapes
    found: list[Layout] = []
    enumerated: set[str] = set()

    def trace(needed: Collection[str], arrays: Any, params: Any, values: Any) -> Array:
        sites, functions = run(Checked(model, source.params), arguments.join(arrays), params, values, jax.random.key(0))
        if fitted:
            check_params("model", sites, params)
        else:
            check_model_params(sites, shapes, params, guided=False)
        found.append(layout_of(sites, functions, whole, needed))
        enumerated.update(name for name, site in sites.items() if is_enumerated(site))
        return jnp.zeros(())

    jax.eval_shape(partial(trace, ()), arguments.arrays, source.params, shapes)
    missing = set(found[0].latents) - set(shapes)
    unknown = set(shapes) - set(found[0].latents) - set(found[0].hidden) if fitted else set()
    if summed := sorted(missing & enumerated):
        raise ValueError(
            f"Diagnostics need draws of all latent sites, and NumPyro sums over {summed}, which the model marks by "
            "infer={'enumerate': 'parallel'}. `posterior` and NumPyro's Predictive need none; Predictive(model, guide=guide, "
            "params=params, num_samples=100, infer_discrete=True) draws them. Where each row has its own, a likelihood that sums "
            "over it needs no such site: Likelihood(f(X), lambda f: dist.MixtureSameFamily(dist.Categorical(w), "
            "dist.Normal(f[..., None] + shifts, s)))."
        )
    if missing or unknown:
        raise ValueError(
            f"The draws do not fit the model: it has sites {sorted(missing)} that were not drawn, and no sites "
            f"{sorted(unknown)}. Pass the guide, or the MCMC object, with which this model was fitted."
        )
    if needed := _needed(model, arguments, source, set(found[0].hidden) & set(shapes)):
        jax.eval_shape(partial(trace, needed), arguments.arrays, source.params, shapes)
    return found[-1]


def _needed(
    model: Callable[..., Any], arguments: Arguments, source: GuideDraws | Draws, hidden: Collection[str]
) -> Collection[str]:
    """Sites of missing values on which densities of other sites depend: covariates with gaps, not outputs.

    :raises ValueError: if one of them has a likelihood of this package, which is no distribution of a latent value.
    """
    if not hidden:
        return ()
    ours: set[str] = set()

    def densities(arrays: Any, params: Any, values: Any) -> dict[str, Array]:
        sites, _ = run(model, arguments.join(arrays), params, values, jax.random.key(0))
        ours.update(name for name in hidden if is_expected(sites[name]["fn"]))
        drawn = {name: site for name, site in sites.items() if site["type"] == "sample" and name not in hidden}
        return {name: density(s, log_predictive if s["is_observed"] else None) for name, s in drawn.items()}

    compiled, values = partial(run_kept, densities), source.first()
    as_drawn = compiled(arguments.arrays, source.params, values)
    needed = []
    for name in hidden:
        v = values[name]
        moved = compiled(
            arguments.arrays, source.params, values | {name: ~v if v.dtype == bool else v + 1 + jnp.abs(v)}
        )
        if not all(_same(as_drawn[n], moved[n]) for n in moved):
            needed.append(name)
    if refused := sorted(ours.intersection(needed)):
        raise ValueError(
            f"Other sites depend on unobserved values of {', '.join(map(repr, refused))}. These need a NumPyro distribution, not a "
            "likelihood of this package, which integrates f out of outputs: dist.Normal(f(X).sample(), noise), or for NUTS, with "
            "m = f(X), dist.Normal(m.mean, jnp.sqrt(m.variance + noise**2))."
        )
    return needed


def run(
    model: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    params: Any,
    values: Any,
    rng_key: PRNGKey,
) -> tuple[Trace, dict[str, GPFunction]]:
    """The model's trace and functions where its latent sites have these values.

    :raises ValueError: if a value has another shape than the model's site.
    """

    def pick(site: dict[str, Any]) -> Any:
        if site["type"] == "param":
            return params.get(site["name"])
        value = values.get(site["name"]) if site["type"] == "sample" else None
        # In `scan` NumPyro takes each step's part of the value; the number of steps is known only afterwards.
        if value is not None and "_scan_current_index" not in site["infer"]:
            _check_shape(site["name"], value, site["fn"].shape())
        return value

    args, kwargs = arguments
    known = handlers.substitute(handlers.seed(model, rng_key), substitute_fn=pick)
    with handlers.block(), collected_functions() as functions:
        sites = handlers.trace(known).get_trace(*args, **kwargs)
    for name in sites.keys() & values.keys():
        _check_shape(name, values[name], sites[name]["value"].shape)
    return sites, functions


def _same(a: Array, b: Array) -> bool:
    """Up to rounding: some devices do not add in the same order each time."""
    slack = 100 * float(jnp.finfo(a.dtype).eps)
    return np.allclose(a, b, rtol=slack, atol=slack, equal_nan=True)


def _check_shape(name: str, drawn: Array, shape: tuple[int, ...]) -> None:
    if drawn.shape != tuple(shape):
        raise ValueError(
            f"The draws of `{name}` have shape {drawn.shape}; the model's site has shape {tuple(shape)}. Pass the data, and the "
            "inducing points, with which the model was fitted."
        )
