"""The latent sites and outputs of a model, and the names of their axes."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.functions.draws import drawn_functions
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.guides.handlers import hidden_by_mask
from numpyro_orthgp.inducing.rows import Rows
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, is_expected, unwrap
from numpyro_orthgp.likelihoods.stacked import Stacked
from numpyro_orthgp.likelihoods.sums import OfSum
from numpyro_orthgp.likelihoods.transformed import Transformed
from numpyro_orthgp.likelihoods.wrapped import refuse_outer_product
from numpyro_orthgp.primitives.messages import input_site_of, site_of
from numpyro_orthgp.types import PRNGKey

__all__ = [
    "Layout",
    "Output",
    "Trace",
    "functions_at_data",
    "is_marginals",
    "is_missing_output",
    "layout_of",
    "output_key",
    "outputs_of",
]

Trace = dict[str, dict[str, Any]]

OF_FUNCTIONS = 2**31  # the number of no output


@dataclass(frozen=True)
class Output:
    """An observed site.

    :param site: its name in the trace, which with ``obs_mask`` is the name that the model gives plus "_observed".
    :param name: the name that the model gives.
    :param dims: names of the axes of one y, batch axes first.
    :param batch: number of batch axes.
    :param plates: names and sizes of the plates around it.
    """

    site: str
    name: str
    dims: tuple[str, ...]
    batch: int
    plates: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Layout:
    """
    :param latents: latent sites, with the names of their axes.
    :param inducing: those of them that are whitened inducing variables.
    :param hidden: latent sites that stand for missing outputs.
    :param deterministic: deterministic sites, with the names of their axes.
    :param outputs: observed sites.
    :param collapsed: observed sites that integrate out their inducing variables.
    :param functions: functions at the data, with the names of their axes.
    :param sources: names of the gps whose values each output depends on.
    :param num_values: number of values of f that the largest output depends on.
    :param node_by_node: whether the predictive densities of all outputs hold no more than a few numbers for each value of f.
    :param mean_only: functions with mean-only points.
    :param params: names of the model's parameters.
    """

    latents: dict[str, tuple[str, ...]]
    inducing: tuple[str, ...]
    hidden: tuple[str, ...]
    deterministic: dict[str, tuple[str, ...]]
    outputs: tuple[Output, ...]
    collapsed: tuple[str, ...]
    functions: dict[str, tuple[str, ...]]
    sources: dict[str, frozenset[str]]
    num_values: int
    node_by_node: bool
    mean_only: tuple[str, ...]
    params: tuple[str, ...]


def layout_of(
    sites: Trace, functions: dict[str, GPFunction], whole: bool = True, needed: Container[str] = ()
) -> Layout:
    """
    :param whole: whether plates must hold all of their rows.
    :param needed: sites of missing values that are latent like others, since other sites depend on them.
    :raises ValueError: if no site is observed, a plate has picked some of its rows only, or rows and values are of two shapes.
    """
    for name, site in sites.items():
        if whole and site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            size, picked = site["args"]
            raise ValueError(
                f"Diagnostics need all the data at once, but plate '{name}' of size {size} holds {picked} rows. Pass "
                "the full data instead of a minibatch; `check` accepts a sample of the rows."
            )
        if site["type"] == "sample" and site["is_observed"]:  # `AutoSparseGP` does so too, other guides do not
            refuse_outer_product(name, site)
    outputs = outputs_of(sites)
    if not outputs:
        raise ValueError(
            "The model has no observed site. Pass the observations too, as for the fit: model(X, y). A numpyro.factor is one "
            "number, without data points to judge: for a model that has only those, posterior(model, guide, params, ...) "
            "gives the functions."
        )
    latents = {n: s for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
    hidden = tuple(n for n, site in latents.items() if is_missing_output(n, site, sites) and n not in needed)
    restored = {output.name for output in outputs if output.name != output.site}
    return Layout(
        {n: _dims(s, n, s["fn"].event_dim) for n, s in latents.items() if n not in hidden},
        tuple(n for n, s in latents.items() if site_of(s) is not None),
        hidden,
        {n: _dims(s, n, jnp.ndim(s["value"])) for n, s in sites.items() if _kept(s) and n not in restored},
        outputs,
        tuple(o.name for o in outputs if isinstance(sites[o.site]["fn"], CollapsedGP)),
        {
            name: _function_dims(name, output, f, X)
            for name, output, f, X, _ in functions_at_data(sites, functions, jax.random.key(0))
        },
        {o.name: frozenset(_name(f, functions) for f, _ in _functions_of(sites[o.site]["fn"])) for o in outputs},
        max((m.explained.size for o in outputs for m in _marginals(sites[o.site]["fn"])), default=1),
        all(_is_node_by_node(sites[o.site]["fn"]) for o in outputs),
        tuple(name for name, f in functions.items() if f.shift is not None),
        tuple(name for name, site in sites.items() if site["type"] == "param" and hasattr(site["value"], "shape")),
    )


def outputs_of(sites: Trace) -> tuple[Output, ...]:
    """The observed sites of a trace, without ``numpyro.factor`` and without inducing variables or inputs."""
    found = []
    for site_name, site in sites.items():
        if site["type"] != "sample" or not site["is_observed"] or isinstance(site["fn"], dist.Unit):
            continue
        if site_of(site) is not None or input_site_of(site) is not None:
            continue
        name = site_name.removesuffix("_observed")
        name = name if hidden_by_mask(f"{name}_unobserved", sites) else site_name
        event_dim = site["fn"].event_dim
        plates = tuple((frame.name, frame.size) for frame in site["cond_indep_stack"])
        dims = _dims(site, name, event_dim)
        found.append(Output(site_name, name, dims, len(dims) - event_dim, plates))
    return tuple(found)


def functions_at_data(
    sites: Trace, functions: dict[str, GPFunction], rng_key: PRNGKey
) -> Iterator[tuple[str, Output, GPFunction, Rows, PRNGKey]]:
    """Each gp that outputs depend on, once for all outputs that use it at the same inputs.

    :return: name of the gp, the first of these outputs, the function, its inputs, and the key of its draw.
    """
    f_key = output_key(rng_key, OF_FUNCTIONS)
    seen: list[tuple[GPFunction, Rows]] = []
    named: set[str] = set()
    for output in outputs_of(sites):
        for f, X in _functions_of(sites[output.site]["fn"]):
            if any(f is g and X is at for g, at in seen):
                continue
            name = _name(f, functions)
            while name in named:
                name = f"{name}_{output.name}"
            yield name, output, f, X, jax.random.fold_in(f_key, len(seen))
            seen.append((f, X))
            named.add(name)


def output_key(rng_key: PRNGKey, i: int) -> PRNGKey:
    """The key with which output ``i`` is drawn."""
    return jax.random.fold_in(rng_key, i)


def is_missing_output(name: str, site: Mapping[str, Any], sites: Trace) -> bool:
    """Whether a sample site is an unobserved output: one that a mask hides, or a likelihood of ours without ``obs``."""
    return not site["is_observed"] and (hidden_by_mask(name, sites) or is_expected(site["fn"]))


def is_marginals(leaf: Any) -> bool:
    return isinstance(leaf, Marginals)


def _is_node_by_node(fn: Any) -> bool:
    """Whether a predictive density is in closed form, or looks at one node after the other (``log_normal_expectation``)."""
    likelihood, _ = unwrap(fn)
    if not isinstance(likelihood, ExpectedLikelihood):
        return not is_expected(fn)
    return likelihood.by_default and not likelihood.mixes and not isinstance(likelihood, OfSum | Transformed)


def _kept(site: Mapping[str, Any]) -> bool:
    value = site["value"]
    return site["type"] == "deterministic" and hasattr(value, "shape") and not is_marginals(value)


def _dims(site: Mapping[str, Any], name: str, event_dim: int) -> tuple[str, ...]:
    """Names of the axes of a site's value: those of plates, and its own numbered ones."""
    shape = jnp.shape(site["value"])
    batch = len(shape) - event_dim
    plates = {frame.dim + batch: frame for frame in site.get("cond_indep_stack", ())}
    dims = []
    for axis, size in enumerate(shape):
        plate = plates.get(axis)
        dims.append(plate.name if plate is not None and plate.size == size and axis < batch else f"{name}_dim_{axis}")
    return tuple(dims)


def _function_dims(name: str, output: Output, f: GPFunction, X: Rows) -> tuple[str, ...]:
    plates = [plate for plate, _ in output.plates]
    over_data = len(plates) == 1 and output.plates[0][1] == len(X)
    return (plates[0] if over_data else f"{name}_dim", *(() if f.num_latents is None else (f"{name}_latent",)))


def _functions_of(fn: Any) -> Iterator[tuple[GPFunction, Rows]]:
    """The functions beneath a likelihood, and their inputs."""
    for m in _marginals(fn):
        yield from drawn_functions(m.joint)


def _name(f: GPFunction, functions: Mapping[str, GPFunction]) -> str:
    return next((name for name, g in functions.items() if g is f), f.names.prefix if f.names else "f")


def _marginals(fn: Any) -> list[Marginals]:
    # Inside `scan` a function is evaluated at inputs of each step's own, and all its arrays are stacked.
    taken = is_expected(fn) and not isinstance(unwrap(fn)[0], Stacked)
    leaves = jax.tree.leaves(fn, is_leaf=is_marginals) if taken else []
    return [leaf for leaf in leaves if is_marginals(leaf)]
