"""The fitted functions of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.foreign import in_bits_of_now
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.guides.asking import Answers, Asking
from numpyro_orthgp.guides.handlers import EvenRows, OutputsByRow, hidden_by_mask
from numpyro_orthgp.guides.parameters import (
    Checked,
    check_guide_sites,
    check_model_params,
    refuse_other_guide,
    refuse_own_names,
)
from numpyro_orthgp.likelihoods.base import is_expected
from numpyro_orthgp.math.dependence import reached
from numpyro_orthgp.math.turns import in_turn
from numpyro_orthgp.primitives.messages import MESSAGE, Belief, collected_functions, is_enumerated, site_of
from numpyro_orthgp.types import PRNGKey

__all__ = ["fitted_trace", "functions_of", "posterior"]

Trace = dict[str, dict[str, Any]]


def posterior(
    model: Callable[..., Any],
    guide: Callable[..., Any] | None,
    params: dict[str, Any],
    *args: Any,
    rng_key: PRNGKey | None = None,
    **kwargs: Any,
) -> dict[str, GPFunction]:
    """The fitted functions of a model, ready to be called at test inputs. Works under ``jax.jit``, where it is much faster.

    Inside another model the functions are constants. If a guide has not been called yet and its ``hyper`` has sites, call it
    outside of ``jit`` first, like NumPyro's guides: they keep arrays from their first call.

    The functions carry the guide's Gaussians. Means and variances are then exact, without sampling of inducing variables. This
    holds for guides of this package, also with ``analytic=False``; for hand-written guides that draw ``f.u0`` from ``Normal`` or
    ``MultivariateNormal``, or affine maps of them; for ``AutoNormal``; and for NumPyro's guides with one joint Gaussian, if it is
    diagonal, or if it has one set of one function (given the draws of all other sites). With any other guide (``AutoDelta``,
    flows, several correlated sets, a Gaussian on whose draw another site depends) a set has one draw, and variances lack the
    guide's contribution. Then map over ``rng_key``; ``f.drawn`` lists such sets, :func:`check` names them, and a warning says so
    of draws without an ``rng_key``. Other latent sites are drawn once (a point for ``AutoDelta``); under a random ``hyper`` guide
    map over ``rng_key`` with ``jax.vmap`` for a mixture.
    So is what the model itself draws, such as a path in the kernel of another function.
    The residual is always the prior's (v = 1), also after tightened training (Titsias 2025, Sec. 3.1).

    >>> import jax.numpy as jnp, numpyro, optax
    >>> from jax.random import PRNGKey
    >>> from numpyro.infer import SVI, TraceMeanField_ELBO
    >>> import numpyro_orthgp as ogp
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> def model(X, y=None):
    ...     f = ogp.gp("f", ogp.kernels.RBF(0.3), jnp.linspace(0.0, 1.0, 8)[:, None])
    ...     with numpyro.plate("data", len(X)):
    ...         numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.1), obs=y)
    >>> guide = ogp.AutoSparseGP(model, natural=True)
    >>> optim = ogp.natural_gradient(optax.adam(1e-2), 1.0)
    >>> svi = SVI(model, guide, optim, TraceMeanField_ELBO())
    >>> result = svi.run(PRNGKey(0), 2, X, jnp.sin(6 * X[:, 0]), progress_bar=False)
    >>> f = ogp.posterior(model, guide, result.params, X)["f"]
    >>> X_test = jnp.array([[0.3], [0.6], [3.0]])  # the last one far from the data
    >>> print(f(X_test).mean.round(2), f(X_test).variance.round(2))
    [ 0.97 -0.45  0.  ] [0. 0. 1.]

    :param model: the model that was fitted.
    :param guide: its guide; ``None`` if ``params`` holds values of latent sites, such as one draw of ``MCMC``.
    :param params: ``SVIRunResult.params`` or ``svi.get_params(state)``. It must hold all of the model's parameters. With none of
        them a warning says that they have their initial values.
    :param args: arguments of the model; the training inputs, or any inputs of the right shape.
    :param rng_key: key for the latent sites that the guide draws; default ``jax.random.key(0)``.
    :return: a :class:`GPFunction` for each gp, by full name (with the prefix of ``handlers.scope``), and for each observed
        :class:`CollapsedGP`, by the name of its site.
    :raises TypeError: if ``params`` is not a dictionary, or ``guide`` cannot be called.
    :raises ValueError: if ``params`` lacks parameters of the guide, or some but not all of the model's; if a parameter violates
        its constraint, as those in the optimizer's state do; if model and guide are swapped; if there is neither a guide nor values
        of inducing variables; or if guide or model have no such function.
    """
    functions = functions_of(*fitted_trace(model, guide, params, args, kwargs, rng_key))
    if not functions:
        raise ValueError(
            "The model has no gp(), and no CollapsedGP that is observed, so there is no function to return. Does it need its "
            "observations, as in the fit? (model, guide, params, X, y)"
        )
    if rng_key is None:
        _warn_of_random_sets(lambda key: fitted_trace(model, guide, params, args, kwargs, key)[1], functions)
    return functions


def functions_of(sites: Trace, fitting: Mapping[str, GPFunction]) -> dict[str, GPFunction]:
    """The functions of a trace, ready to be called at test inputs, including those of its ``CollapsedGP`` sites.

    :param sites, fitting: results of :func:`fitted_trace`.
    """
    functions = {
        name: replace(f, fitting=False, residual_scale=None, grouping=None, values=None, run=None)
        for name, f in fitting.items()
    }
    return functions | {name: s["fn"].posterior(s["value"]) for name, s in sites.items() if _collapsed(s)}


def fitted_trace(
    model: Callable[..., Any],
    guide: Callable[..., Any] | None,
    params: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rng_key: PRNGKey | None = None,
) -> tuple[Trace, dict[str, GPFunction]]:
    """The sites of a fitted model under its guide, and the functions of its ``gp`` statements, as they are while fitting."""
    if not (guide is None or callable(guide)):
        raise TypeError(
            f"`guide` must be the guide that was fitted, or None where `params` holds values; got {type(guide).__name__}. For a "
            "draw of MCMC: posterior(model, None, {name: values[i] for name, values in mcmc.get_samples().items()}, ...)."
        )
    if not isinstance(params, Mapping):
        raise TypeError(
            "`params` must be a dictionary of parameters by their names, result.params or svi.get_params(state); got "
            f"{type(params).__name__}."
        )
    params = in_bits_of_now(params)
    guide_key, model_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    guide_trace: Trace = {}
    # Inside another model these sites do not belong to that model.
    with in_turn(), handlers.block(), EvenRows(None):
        if guide is not None:
            is_new, seeded = getattr(guide, "prototype_trace", True) is None, handlers.seed(guide, guide_key)
            with_params = handlers.substitute(Checked(seeded, params, guide), params)
            if is_new:  # its first call takes random keys, and draws other values than later ones
                with_params(*args, **kwargs)
            guide_trace = handlers.trace(with_params).get_trace(*args, **kwargs)
            check_guide_sites(guide_trace, params, guide)
            answers = Answers(guide, seeded, params, guide_trace, args, kwargs, laplace=not is_new)

        def run(model_key: PRNGKey, inputs: bool = True) -> tuple[Trace, dict[str, GPFunction]]:
            asking = fitted = Checked(handlers.seed(model, model_key), params)
            if guide is not None:
                asking = Asking(fitted, answers, inputs)
                fitted = handlers.replay(asking, asking.trace)
            try:
                with collected_functions() as functions, OutputsByRow():
                    return handlers.trace(handlers.substitute(fitted, params)).get_trace(*args, **kwargs), functions
            except ValueError:
                # Some bounds of CollapsedGP cannot use Gaussians of latent inputs, and were fitted with draws.
                if not getattr(asking, "has_inputs", False) or not inputs:
                    raise
                return run(model_key, inputs=False)

        sites, functions = run(model_key)
        if rng_key is None:
            _warn_of_own_draws(lambda key: run(key)[1], functions, model_key)
    _check(sites, guide_trace, params)
    check_model_params(sites, guide_trace, params, guided=guide is not None)
    _warn_of_prior_draws(sites, guide_trace, params, functions)
    return sites, functions


def _check(sites: Trace, guide_trace: Trace, params: Mapping[str, Any]) -> None:
    refuse_own_names(guide_trace, sites)
    _check_known(sites, guide_trace, params)
    _check_sizes(sites)
    refuse_other_guide(guide_trace, sites, params)


def _check_known(sites: dict[str, Any], guide_trace: dict[str, Any], params: Mapping[str, Any]) -> None:
    ours = {n for n, s in guide_trace.items() if s["type"] == "sample" and _of_ours(s)}
    here = {n.rpartition(".u")[0] for n in ours.intersection(sites)}
    strange = [
        n for n in ours if n not in sites and n.rpartition(".u")[0] in here
    ]  # a gp may be left out of predictions
    if strange:
        raise ValueError(
            f"The guide draws {', '.join(map(repr, strange))}, which the model does not have. The guide must be one of this model, "
            "with as many sets for each gp."
        )
    unknown = [n for n, s in sites.items() if site_of(s) is not None and n not in guide_trace and n not in params]
    unknown = [name for name in unknown if not sites[name]["is_observed"]]
    if unknown:
        raise ValueError(
            f"Nothing says what {', '.join(map(repr, unknown))} are, and the function would be a draw of its prior. Without a "
            "guide `params` must hold a value for each; a guide must be one of this model."
        )


def _check_sizes(sites: Trace) -> None:
    """Refuse several values for a site of one number: two lengthscales of a stack would be those of two columns."""
    for name, site in sites.items():
        if site["type"] != "sample" or site["is_observed"] or site["cond_indep_stack"] or is_enumerated(site):
            continue
        if not is_expected(site["fn"]) and site["fn"].shape() == () and jnp.size(site["value"]) > 1:
            raise ValueError(
                f"`{name}` is one number in the model; guide or `params` give it shape {jnp.shape(site['value'])}. Pass one draw, "
                "and for many map over them with jax.vmap."
            )


def _warn_of_prior_draws(sites: Trace, guide_trace: Trace, params: Mapping[str, Any], functions: Iterable[str]) -> None:
    """Warn of hyperparameters that neither guide nor parameters know. Sites after the last function cannot change any."""
    names = list(sites)
    ours = [i for i, name in enumerate(names) if MESSAGE in sites[name].get("infer", {})]
    drawn = [
        name
        for name in names[: max(ours, default=0)]
        if sites[name]["type"] == "sample"
        and not sites[name]["is_observed"]
        and name not in guide_trace
        and name not in params
        and not is_enumerated(sites[name])
        and not is_expected(sites[name]["fn"])
        and not hidden_by_mask(name, sites)
    ]
    if drawn and functions:
        warnings.warn(
            f"{', '.join(map(repr, drawn))} is drawn from its prior, since neither the guide nor `params` says what it is, and the "
            "functions may depend on it. Give the guide that was fitted with this model, or its value in `params`.",
            UserWarning,
            stacklevel=4,
        )


def _warn_of_own_draws(
    run: Callable[[PRNGKey], Mapping[str, GPFunction]], functions: Mapping[str, GPFunction], rng_key: PRNGKey
) -> None:
    """Warn of functions whose prior depends on a draw of another one, such as a kernel with a path in it: they are of one draw.

    :param run: the functions of a run of the model, from its random key.
    """
    drawn = [name for name, f in functions.items() if f.names is not None and (f.names.drawn or f.names.by_rows)]
    if not drawn or len(functions) < 2:
        return
    sizes: dict[str, int] = {}

    def arrays_of(key: PRNGKey) -> list[Any]:
        leaves = {name: jax.tree.leaves(replace(f, values=None, run=None)) for name, f in run(key).items()}
        sizes.update({name: len(of) for name, of in leaves.items()})
        return list(chain(*leaves.values()))

    marks = iter(_depend_on_key(arrays_of, rng_key))
    random = [name for name, size in sizes.items() if any([next(marks, False) for _ in range(size)])]
    if random:
        are, of = "is" if len(random) == 1 else "are", [name for name in drawn if name not in random] or drawn
        warnings.warn(
            f"{', '.join(map(repr, random))} {are} given one draw of {', '.join(map(repr, of))}, "
            "on which the kernel or the inducing points depend: means and variances are those of this draw. Map "
            "over rng_key= with jax.vmap for the mixture over draws.",
            UserWarning,
            stacklevel=4,
        )


def _depend_on_key(run: Callable[[PRNGKey], list[Any]], rng_key: PRNGKey) -> list[bool]:
    """Which arrays of a run depend on its random key; an empty list, if that is not known."""
    try:
        return [bool(of) for of in reached(jax.make_jaxpr(run)(rng_key).jaxpr, [frozenset(["key"])])]
    except Exception:  # the model needs values
        return []


def _warn_of_random_sets(
    run: Callable[[PRNGKey], Mapping[str, GPFunction]], functions: Mapping[str, GPFunction]
) -> None:
    """Warn of functions with the value of a set that the guide draws anew each time, as those of flows do.

    :param run: the functions of a run of guide and model, from its random key.
    """
    sets = [(name, i) for name, f in functions.items() for i in f.drawn]
    if not sets:
        return

    def values_of(key: PRNGKey) -> list[Any]:
        found = run(key)
        return [found[name].beliefs[i].loc for name, i in sets]

    marks = _depend_on_key(values_of, jax.random.key(0))
    if random := [f"{name}.u{i}" for (name, i), mark in zip(sets, marks, strict=False) if mark]:
        warnings.warn(
            f"The guide gives one draw of {', '.join(map(repr, random))}, and no Gaussian of it alone: means and variances are "
            "those of this draw, and variances lack what the guide adds. Map over rng_key= with jax.vmap for the mixture over "
            "draws, or fit AutoSparseGP(model).",
            UserWarning,
            stacklevel=3,
        )


def _of_ours(site: dict[str, Any]) -> bool:
    return isinstance(site["infer"].get(MESSAGE), Belief)


def _collapsed(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and site["is_observed"] and isinstance(site["fn"], CollapsedGP)
