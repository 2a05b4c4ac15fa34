"""Draws of a model's latent sites, from a fitted guide or from MCMC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_orthgp.errors import check_params, is_concrete
from numpyro_orthgp.foreign import as_numpy, check_labels_of_tables, in_bits_of_now
from numpyro_orthgp.guides.parameters import Checked, check_guide_sites
from numpyro_orthgp.math.blocks import map_blocks
from numpyro_orthgp.math.kept import run_kept
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["Arguments", "Draws", "GuideDraws", "density", "draws_of_mcmc"]

DRAWS_AT_ONCE = 256  # of a guide, whose sites are small beside what the model makes of them

# What NumPyro's samplers call their statistics, and what ArviZ does.
STATISTICS = {"accept_prob": "acceptance_rate", "num_steps": "n_steps", "adapt_state.step_size": "step_size"}


@dataclass(frozen=True)
class Draws:
    """Draws of the latent sites, one chain after another.

    :param values: values by name of the site, shape (S, ...).
    :param shape: number of chains, and number of draws in each; their product is S.
    :param params: values of ``numpyro.param`` sites.
    :param log_q: log density of the guide by name of its site, shape (S,); ``None`` for MCMC.
    :param statistics: the sampler's statistics, under ArviZ's names, shape (chains, draws).
    """

    values: dict[str, Array]
    shape: tuple[int, int]
    params: dict[str, Any]
    log_q: dict[str, Array] | None
    statistics: dict[str, np.ndarray]

    @property
    def shapes(self) -> dict[str, Any]:
        """Shapes of one draw."""
        return {name: jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for name, v in self.values.items()}

    def first(self) -> dict[str, Array]:
        """One draw."""
        return {name: v[0] for name, v in self.values.items()}


class Arguments:
    """The arguments of a model, split into inputs of the compiled program and the rest.

    Floating JAX arrays become inputs: as constants, XLA would spend its time on folding them. The model gets everything else
    (sizes, options, NumPy arrays) as the user gave it.

    :raises ValueError: for tables of pandas that have their rows in different orders.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
        check_labels_of_tables(
            [f"argument{jax.tree_util.keystr(path[1:])}" for path, _ in named], [leaf for _, leaf in named]
        )
        leaves, self._tree = jax.tree.flatten(in_bits_of_now((args, kwargs)))
        # pandas compares a series with a tracer by itself.
        self._leaves = [as_numpy("y", x) if hasattr(x, "index") and np.ndim(x) == 1 else x for x in leaves]
        self.arrays = {i: leaf for i, leaf in enumerate(self._leaves) if _is_input(leaf)}

    def join(self, arrays: Mapping[int, Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``args`` and ``kwargs`` with these in place of :attr:`arrays`."""
        return jax.tree.unflatten(self._tree, [arrays.get(i, leaf) for i, leaf in enumerate(self._leaves)])


class GuideDraws:
    """A guide, for its draws. The shapes of the draws are known before any is computed.

    :raises ValueError: if ``params`` lacks a parameter of the guide.
    :raises TypeError: under ``jit``.
    """

    def __init__(
        self, guide: Callable[..., Any], params: dict[str, Any], arguments: Arguments, rng_key: PRNGKey
    ) -> None:
        params = in_bits_of_now(params)
        self.guide, self.params, self.arguments, self.rng_key = guide, params, arguments, rng_key
        if not all(map(is_concrete, jax.tree.leaves((params, arguments.arrays, rng_key)))):
            raise TypeError(
                "Diagnostics and predictions by draws look at numbers and compile their own programs. Call them outside of jax.jit "
                "and jax.vmap. Within, use posterior(model, guide, params, ...)."
            )
        if getattr(guide, "prototype_trace", True) is None:
            # An automatic guide stores what it learns of the model at its first call, which must be outside of `jit`.
            args, kwargs = arguments.join(arguments.arrays)
            with handlers.block():
                handlers.substitute(Checked(handlers.seed(guide, rng_key), params, guide), params)(*args, **kwargs)
        self.shapes: dict[str, Any] = jax.eval_shape(self._draw, arguments.arrays, params, rng_key)[0]

    def first(self) -> dict[str, Array]:
        """One draw."""
        return run_kept(self._draw, self.arguments.arrays, self.params, self.rng_key)[0]

    def draw(self, num_samples: int) -> Draws:
        """Values of all sites, and the log density of each."""

        def draw_all(arrays: Any, params: dict[str, Any], key: PRNGKey) -> Any:
            keys = jax.random.split(key, num_samples)
            return map_blocks(jax.vmap(lambda key: self._draw(arrays, params, key)), keys, DRAWS_AT_ONCE)

        values, log_q = run_kept(draw_all, self.arguments.arrays, self.params, self.rng_key)
        return Draws(values, (1, num_samples), self.params, log_q, {})

    def _draw(self, arrays: Any, params: dict[str, Any], key: PRNGKey) -> tuple[dict[str, Array], dict[str, Array]]:
        args, kwargs = self.arguments.join(arrays)
        # Traced values have no numbers to look at; the user's have.
        fitted = handlers.substitute(Checked(handlers.seed(self.guide, key), self.params, self.guide), params)
        with handlers.block():
            sites = handlers.trace(fitted).get_trace(*args, **kwargs)
        check_guide_sites(sites, params, self.guide)
        check_params("guide", sites, params)
        drawn = {name: site for name, site in sites.items() if site["type"] == "sample"}
        values = {n: s["value"] for n, s in drawn.items() if not (s["is_observed"] or s["infer"].get("is_auxiliary"))}
        return values, {name: jnp.sum(density(site)) for name, site in drawn.items()}


def draws_of_mcmc(mcmc: MCMC, params: dict[str, Any]) -> Draws:
    """All draws that MCMC has kept.

    :raises ValueError: if MCMC has not been run.
    """
    if mcmc.last_state is None:
        raise ValueError("The MCMC object has no draws yet. Run it first: mcmc.run(rng_key, X, y).")
    samples = mcmc.get_samples(group_by_chain=True)
    if not isinstance(samples, dict) or not samples:
        raise ValueError(
            "The MCMC object must hold draws by name of the site; got none. Did the model have latent sites?"
        )
    first = next(iter(samples.values()))
    values = {name: jnp.asarray(v).reshape(-1, *v.shape[2:]) for name, v in samples.items()}
    return Draws(values, first.shape[:2], params, None, _statistics(mcmc, first.shape[:2]))


def density(site: dict[str, Any], log_prob: Callable[[Any, Any], Array] | None = None) -> Array:
    """Log density of a site at its value, scaled as its plates say, shape of the batch.

    :param log_prob: a function of distribution and value that replaces the distribution's own.
    """
    fn, value = site["fn"], site["value"]
    if log_prob is not None:
        terms = log_prob(fn, value)
    else:
        terms = fn.log_prob(value, site["intermediates"]) if site["intermediates"] else fn.log_prob(value)
    return terms if site["scale"] is None else site["scale"] * terms


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.ndim > 0 and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _statistics(mcmc: MCMC, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    fields = {name: np.asarray(v) for name, v in mcmc.get_extra_fields(group_by_chain=True).items()}
    found = {STATISTICS.get(name, name): v for name, v in fields.items() if v.shape == shape}
    if "potential_energy" in found:
        found["lp"] = -found.pop("potential_energy")
    if "n_steps" in found:
        found["tree_depth"] = np.log2(np.maximum(found["n_steps"], 1)).astype(int) + 1
    return found
