"""Draws of a fitted model, with outputs and log densities, for ArviZ.

Parameters go to ``constant_data``. All draws of a site of ``AutoDelta`` are equal, so ArviZ shows a point estimate as a point.
Outputs of an observed ``CollapsedGP`` are refused: they are not independent given the hyperparameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC

from numpyro_orthgp.diagnostics.draws import Arguments, Draws, GuideDraws, draws_of_mcmc
from numpyro_orthgp.diagnostics.given import given_functions
from numpyro_orthgp.diagnostics.groups import Groups
from numpyro_orthgp.diagnostics.importance import check_guide, log_density_of_guide
from numpyro_orthgp.diagnostics.layout import Layout, Trace, functions_at_data, output_key
from numpyro_orthgp.diagnostics.means_alone import warn_of_means_alone
from numpyro_orthgp.diagnostics.replay import Replay, look
from numpyro_orthgp.diagnostics.sites import function_draw, log_joint, mask_of, predictive_draw
from numpyro_orthgp.diagnostics.subject import Drawn
from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.inducing import Functional
from numpyro_orthgp.likelihoods.base import log_predictive
from numpyro_orthgp.math.turns import in_turn
from numpyro_orthgp.types import PRNGKey

__all__ = ["to_arviz"]

NUM_SAMPLES = 1000


@in_turn()
def to_arviz(
    model: Callable[..., Any],
    guide: Callable[..., Any] | MCMC,
    params: dict[str, Any] | None,
    *args: Any,
    rng_key: PRNGKey | None = None,
    num_samples: int | None = None,
    posterior_predictive: bool = True,
    log_likelihood: bool = True,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    **kwargs: Any,
) -> Any:
    r"""Draws of a fitted model for ArviZ: ``az.summary``, ``az.loo``, ``az.compare``, posterior predictive plots, NetCDF files.

    ::

        data = ogp.to_arviz(model, guide, svi_result.params, X, y, num_samples=2000)
        data = ogp.to_arviz(model, mcmc, None, X, y)  # all draws that MCMC kept, in their chains
        az.loo(data)

    The model runs at each draw :math:`(u_s, \theta_s)` of the guide and gives these groups:

    * ``posterior``: the latent sites, including whitened inducing variables ``f.u0``; deterministic sites; and the values of each
      gp at the data, ``f``, with axes (N,) or (N, P). Up to 8192 inputs one draw is one function; beyond, each point is drawn on
      its own. If outputs depend on f at several arrays X, the second and later ones are called ``f_y``, after the output, and have
      their own draws given the inducing variables. Only functions under a likelihood of this package are found. For others use
      ``numpyro.deterministic``.
    * ``posterior_predictive``: observed sites. All outputs of a draw belong to the same f. Times are drawn without censoring.
    * ``log_likelihood``, for ``az.loo`` and ``az.compare``: log density of each point, with f(x_i) integrated out given the draw,

      .. math:: \log p(y_i \mid u_s, \theta_s) = \log \int p(y_i \mid f_i) \, p(f_i \mid u_s, \theta_s) \, df_i,

      the logarithm of an average. (In a fit the likelihood's ``log_prob`` is the average of a logarithm.) For sites with other
      distributions it is their ``log_prob``.
    * ``sample_stats``: for a guide ``lp``, :math:`\log p(u_s, \theta_s) + \sum_i \log p(y_i \mid u_s, \theta_s)`, and ``log_q``,
      :math:`\log q(u_s, \theta_s)`. Their differences are the log weights of :func:`khat`. With mean-only points, which have no
      draws, both are absent. For MCMC, the sampler's statistics.
    * ``observed_data``, and ``constant_data``: inputs ``X`` (``f_X`` if functions have different inputs), the model's parameters
      under their names, and inducing points that are no parameters, ``f.u0_points``.

    All groups except the posterior leave out masked and missing outputs; their axis is ``y_observed``. Missing values on which
    other sites depend, such as gaps of a covariate that ``obs_mask`` fills, are latent, ``x_unobserved``. Entries of y that are
    masked beneath ``to_event`` are NaN, and ``log_likelihood`` is that of the other entries. "/" in names, as ``scope`` writes,
    becomes ".", since ArviZ separates groups by "/".

    >>> import jax.numpy as jnp, numpyro, optax
    >>> from jax.random import PRNGKey
    >>> from numpyro.infer import SVI, TraceMeanField_ELBO
    >>> import numpyro_orthgp as ogp
    >>> X = jnp.linspace(0.0, 1.0, 40)[:, None]
    >>> y = jnp.sin(6 * X[:, 0])
    >>> def model(X, y):
    ...     f = ogp.gp("f", ogp.kernels.RBF(0.3), X[::10])
    ...     with numpyro.plate("data", len(X)):
    ...         numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.2), obs=y)
    >>> guide = ogp.AutoSparseGP(model, natural=True)
    >>> optim = ogp.natural_gradient(optax.adam(1e-2), 1.0)
    >>> svi = SVI(model, guide, optim, TraceMeanField_ELBO())
    >>> params = svi.run(PRNGKey(0), 2, X, y, progress_bar=False).params
    >>> data = ogp.to_arviz(model, guide, params, X, y, num_samples=100)
    >>> {name: data.posterior[name].shape for name in ("f", "f.u0")}
    {'f': (1, 100, 40), 'f.u0': (1, 100, 4)}

    :param model: the model that was fitted.
    :param guide: its guide, or the ``MCMC`` object that has been run.
    :param params: ``SVIRunResult.params`` or ``svi.get_params(state)``; for MCMC values of ``numpyro.param`` sites, or ``None``.
    :param args: arguments of the model: all of the data with observations. Floating JAX arrays among them are traced.
    :param rng_key: default ``jax.random.key(0)``.
    :param num_samples: number of draws of a guide, by default 1000. For MCMC all draws are taken.
    :param posterior_predictive: whether to draw outputs.
    :param log_likelihood: whether to add the log densities of single outputs.
    :param coords: labels of dimensions; by default 0, 1, ...
    :param dims: names of the dimensions of a variable, without chain and draw. By default axes over the data have the name
        of the plate, or are called ``f_dim``; axes over latent functions ``f_latent``.
    :return: an ``InferenceData`` of ArviZ 0.x, or a ``DataTree`` as ArviZ 1.x uses.
    :raises ValueError: if parameters are missing, guide or data do not fit the model, nothing is observed, a plate holds a
        minibatch, or ``coords`` and ``dims`` do not fit the variables; for an observed :class:`CollapsedGP`, whose outputs are
        not independent given the draw, unless both groups of outputs are switched off.
    :raises TypeError: if ``guide`` is neither a guide nor an ``MCMC`` object, or ``params`` is no dict.
    """
    draw_key, model_key, constant_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key, 3)
    arguments = Arguments(args, kwargs)
    source = _source(guide, params, arguments, num_samples, draw_key)
    layout = look(model, arguments, source, fitted=isinstance(source, GuideDraws))
    if layout.collapsed and (posterior_predictive or log_likelihood):
        raise ValueError(
            f"The outputs of `{layout.collapsed[0]}`, a CollapsedGP, are not independent given a draw. For its "
            "hyperparameters alone pass posterior_predictive=False and log_likelihood=False."
        )
    groups = Groups(layout, coords or {}, dims or {})
    if isinstance(source, Draws):
        warn_of_means_alone(Drawn(model, arguments, source), sorted({u.rpartition(".u")[0] for u in layout.inducing}))
    draws = (
        source.draw(NUM_SAMPLES if num_samples is None else num_samples) if isinstance(source, GuideDraws) else source
    )
    replay = Replay(model, arguments, draws, layout)

    def visit(sites: Trace, functions: dict[str, GPFunction], key: PRNGKey) -> dict[str, Any]:
        return _visit(sites, functions, key, layout, posterior_predictive, log_likelihood)

    visited = replay.map(visit, model_key)
    if draws.log_q is not None and not layout.mean_only:
        draws.statistics["lp"] = np.asarray(visited["lp"]).reshape(draws.shape)
        draws.statistics["log_q"] = np.asarray(log_density_of_guide(draws, layout)).reshape(draws.shape)
    groups.add_draws(draws, visited)
    groups.add_data(*replay.ends(lambda sites, functions, key: _constants(sites, functions, key, layout), constant_key))
    return groups.tree()


def _source(
    guide: Any, params: Any, arguments: Arguments, num_samples: int | None, rng_key: PRNGKey
) -> GuideDraws | Draws:
    if num_samples is not None:
        check_integer("num_samples", num_samples)
    if not isinstance(guide, MCMC):
        check_guide(guide, params)
        return GuideDraws(guide, params, arguments, rng_key)
    if params is not None and not isinstance(params, dict):
        raise TypeError(
            f"`params` must be a dict, or None with MCMC; got {type(params).__name__}. It comes before the model's arguments: "
            "to_arviz(model, mcmc, None, X, y)."
        )
    if num_samples is not None:
        raise ValueError(
            "`num_samples` is for guides; for MCMC all draws are taken. Thin the chains: MCMC(..., thinning=2)."
        )
    return draws_of_mcmc(guide, params or {})


def _visit(
    sites: Trace,
    functions: dict[str, GPFunction],
    rng_key: PRNGKey,
    layout: Layout,
    posterior_predictive: bool,
    log_likelihood: bool,
) -> dict[str, Any]:
    """What one draw adds to the groups."""
    collapsed = bool(layout.collapsed)
    outputs = {} if collapsed else {o.name: sites[o.site] for o in layout.outputs}
    at_data = [(name, f, X, key) for name, _, f, X, key in functions_at_data(sites, functions, rng_key)]
    values = {name: function_draw(f, X, key) for name, f, X, key in at_data}
    drawn = [(f, X, values[name]) for name, f, X, _ in at_data]
    return {
        "lp": log_joint(sites, layout.hidden),
        "functions": values,
        "deterministic": {name: sites[name]["value"] for name in layout.deterministic},
        "posterior_predictive": {
            name: predictive_draw(given_functions(site["fn"], drawn), output_key(rng_key, i))
            for i, (name, site) in enumerate(outputs.items())
            if posterior_predictive
        },
        "log_likelihood": {
            name: log_predictive(site["fn"], site["value"]) for name, site in outputs.items() if log_likelihood
        },
    }


def _constants(
    sites: Trace, functions: dict[str, GPFunction], rng_key: PRNGKey, layout: Layout
) -> dict[str, dict[str, Any]]:
    """What may be the same for all draws."""
    masks = {output.name: mask_of(sites[output.site]["fn"]) for output in layout.outputs}
    points = {
        f"{name}.u{i}_points": feature.points
        for name, f in functions.items()
        for i, feature in enumerate(f.features)
        if hasattr(feature, "points")
    }
    return {
        "observed": {output.name: sites[output.site]["value"] for output in layout.outputs},
        "masks": {name: mask for name, mask in masks.items() if mask is not None},
        "inputs": {
            name: X
            for name, _, _, X, _ in functions_at_data(sites, functions, rng_key)
            if not isinstance(X, Functional)
        },
        "params": {name: sites[name]["value"] for name in layout.params},
        "points": points,
    }
