"""A model run again at draws of its latent sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_orthgp.diagnostics.draws import Arguments, Draws, check_params
from numpyro_orthgp.diagnostics.layout import Layout, Trace, layout_of
from numpyro_orthgp.math.blocks import map_blocks
from numpyro_orthgp.primitives.messages import CollectFunctions
from numpyro_orthgp.process import GPFunction
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["Replay"]

Visit = Callable[[Trace, dict[str, GPFunction], PRNGKey], Any]

# Numbers held at once for all draws of a block, and nodes at which a likelihood may evaluate each f(x).
MAX_ENTRIES = 2**24
NODES = 128


@dataclass(frozen=True)
class Replay:
    """A model, its arguments, and draws of its latent sites."""

    model: Callable[..., Any]
    arguments: Arguments
    draws: Draws

    def layout(self, rng_key: PRNGKey) -> Layout:
        """What the model has.

        :raises ValueError: if the draws do not fit the model, or the model is not one that can be looked at.
        """
        found: list[Layout] = []
        first = {name: v[0] for name, v in self.draws.values.items()}

        def look(arrays: Any, params: Any, values: Any) -> Array:
            sites, functions = self._run(arrays, params, values, rng_key)
            if self.draws.log_q is not None:
                check_params("model", sites, params)
            found.append(layout_of(sites, functions))
            return jnp.zeros(())

        jax.eval_shape(look, self.arguments.arrays, self.draws.params, first)
        layout = found[0]
        missing = set(layout.latents) - set(first)
        # Of MCMC, deterministic sites are among the draws.
        unknown = set(first) - set(layout.latents) - set(layout.hidden) if self.draws.log_q is not None else set()
        if missing or unknown:
            raise ValueError(
                f"The draws do not fit the model: it has sites {sorted(missing)} that were not drawn, and no sites "
                f"{sorted(unknown)}. Pass the guide, or the MCMC object, with which this model was fitted."
            )
        return layout

    def map(self, visit: Visit, layout: Layout, rng_key: PRNGKey) -> Any:
        """``visit(trace, functions, key)`` at each draw: arrays of leading size S. Compiled as a whole, in blocks of draws."""
        fixed, varying = self._split(layout)
        # With fixed hyperparameters all draws of a block share covariances and their factors.
        size = layout.num_values
        per_draw = size * (NODES if set(varying) <= set(layout.inducing) else max(NODES, size))
        keys = jax.random.split(rng_key, self.draws.shape[0] * self.draws.shape[1])

        def visit_all(arrays: Any, params: Any, fixed: Any, varying: Any, keys: PRNGKey) -> Any:
            def one(row: Any) -> Any:
                values, key = row
                model_key, own_key = jax.random.split(key)
                return visit(*self._run(arrays, params, fixed | values, model_key), own_key)

            return map_blocks(jax.vmap(one), (varying, keys), max(MAX_ENTRIES // per_draw, 1))

        return jax.jit(visit_all)(self.arguments.arrays, self.draws.params, fixed, varying, keys)

    def ends(self, visit: Visit, rng_key: PRNGKey) -> tuple[Any, Any]:
        """``visit`` at the first and at the last draw: what is equal there is taken for constant."""

        def both(arrays: Any, params: Any, values: Any) -> Any:
            first, last = ({name: v[i] for name, v in values.items()} for i in (0, 1))
            keys = jax.random.split(rng_key)
            return tuple(visit(*self._run(arrays, params, v, k), k) for v, k in zip((first, last), keys, strict=True))

        values = {name: v[np.array([0, -1])] for name, v in self.draws.values.items()}
        return jax.jit(both)(self.arguments.arrays, self.draws.params, values)

    def varies(self, layout: Layout) -> bool:
        """Whether there is a draw that differs from the first."""
        return bool(self._split(layout)[1])

    def _split(self, layout: Layout) -> tuple[dict[str, Array], dict[str, Array]]:
        """Sites whose draws are all the same, and those that vary."""
        values = {name: v for name, v in self.draws.values.items() if name in layout.latents}
        same = {name: bool(np.all(np.asarray(v) == np.asarray(v[:1]))) for name, v in values.items()}
        return {n: v[0] for n, v in values.items() if same[n]}, {n: v for n, v in values.items() if not same[n]}

    def _run(self, arrays: Any, params: Any, values: Any, rng_key: PRNGKey) -> tuple[Trace, dict[str, GPFunction]]:
        def pick(site: dict[str, Any]) -> Any:
            if site["type"] == "param":
                return params.get(site["name"])
            value = values.get(site["name"]) if site["type"] == "sample" else None
            if value is not None and value.shape != tuple(site["fn"].shape()):
                raise ValueError(
                    f"The draws of `{site['name']}` have shape {value.shape}; the model's site has shape "
                    f"{tuple(site['fn'].shape())}. Pass the data, and the inducing points, with which the model was fitted."
                )
            return value

        args, kwargs = self.arguments.join(arrays)
        model = handlers.substitute(handlers.seed(self.model, rng_key), substitute_fn=pick)
        with handlers.block(), CollectFunctions() as collected:
            sites = handlers.trace(model).get_trace(*args, **kwargs)
        return sites, collected.functions
