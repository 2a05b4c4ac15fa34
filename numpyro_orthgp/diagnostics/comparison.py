"""Compare a fitted guide with a short NUTS run of the same model.

NUTS samples p(u, theta) exp(E[log p(y | f)]), normalized. This is the best q of any family for the same bound. Each chain starts
at another draw of the guide. So differences show the cost of the guide's family and of its optimization. They do not show the
cost of few inducing points; residuals show that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import unconstrain_fn

from numpyro_orthgp.diagnostics.draws import Arguments, Draws, draws_of_mcmc
from numpyro_orthgp.diagnostics.layout import Layout, Trace, functions_at_data
from numpyro_orthgp.diagnostics.replay import Replay
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.inducing import concatenate
from numpyro_orthgp.inducing.functional import Concatenated
from numpyro_orthgp.inducing.rows import Rows
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["CHAINS", "Comparison", "Moments", "compare"]

CHAINS = 2
MAX_POINTS = 200  # of the data at which functions are compared


@dataclass(frozen=True)
class Moments:
    """Means and standard deviations under the guide and under NUTS, arrays of the same shape."""

    loc_q: np.ndarray
    scale_q: np.ndarray
    loc: np.ndarray
    scale: np.ndarray

    @property
    def shift(self) -> np.ndarray:
        """Distance of the means, in standard deviations of NUTS."""
        return _relative(np.abs(self.loc_q - self.loc), self.scale, same=0.0)

    @property
    def ratio(self) -> np.ndarray:
        """Standard deviations of the guide over those of NUTS."""
        return _relative(self.scale_q, self.scale, same=1.0)


@dataclass(frozen=True)
class Comparison:
    """
    :param sites: latent sites other than inducing variables.
    :param functions: values of functions at some of the data, shape (B,) or (B, P).
    :param num_samples: draws of each of the two chains.
    :param rhat: largest split R-hat of all latent sites: above 1.05 NUTS itself has not converged.
    :param ess: smallest effective sample size of all latent sites.
    :param divergences: number of divergent transitions.
    """

    sites: dict[str, Moments]
    functions: dict[str, Moments]
    num_samples: int
    rhat: float
    ess: float
    divergences: int


def compare(replay: Replay, num_samples: int, rng_key: PRNGKey) -> Comparison:
    """Run NUTS on the model of draws of a guide, each chain from another draw, and compare the two.

    Parameters are those of the fit. Missing outputs are integrated out. NUTS draws from p(u, theta) exp(E[log p(y | f)]),
    normalized, the best q of any family for the bound with the prior's residual (Hensman, Matthews, Filippone, Ghahramani 2015).
    """
    mcmc_key, points_key, model_key = jax.random.split(rng_key, 3)
    arguments, layout, draws = replay.arguments, replay.layout, replay.draws
    mcmc = _run(replay.model, arguments, draws, layout, num_samples, mcmc_key)
    exact = draws_of_mcmc(mcmc, draws.params)
    pick = _picked(points_key)

    def visit(sites: Trace, functions: dict[str, GPFunction], key: PRNGKey) -> dict[str, Array]:
        return {
            name: f(pick(X)).independent()._draw(key) for name, _, f, X, key in functions_at_data(sites, functions, key)
        }

    at_data = [Replay(replay.model, arguments, d, layout).map(visit, model_key) for d in (draws, exact)]
    by_chain = mcmc.get_samples(group_by_chain=True)
    latent = [np.asarray(by_chain[name]) for name in layout.latents]
    return Comparison(
        {n: _moments(draws.values[n], exact.values[n]) for n in layout.latents if n not in layout.inducing},
        {name: _moments(at_data[0][name], at_data[1][name]) for name in at_data[0]},
        num_samples,
        max((float(np.max(split_gelman_rubin(v))) for v in latent), default=np.nan),
        min((float(np.min(effective_sample_size(v))) for v in latent), default=np.nan),
        int(mcmc.get_extra_fields()["diverging"].sum()),
    )


def _run(
    model: Callable[..., Any], arguments: Arguments, draws: Draws, layout: Layout, num_samples: int, rng_key: PRNGKey
) -> MCMC:
    fitted = _without(layout.hidden, handlers.substitute(model, data=draws.params))
    args, kwargs = arguments.join(arguments.arrays)
    # Chains from one starting point would agree even if they had not converged.
    starts = [
        unconstrain_fn(fitted, args, kwargs, {name: draws.values[name][chain] for name in layout.latents})
        for chain in range(CHAINS)
    ]
    mcmc = MCMC(
        NUTS(fitted),
        num_warmup=num_samples,
        num_samples=num_samples,
        num_chains=CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    start = jax.tree.map(lambda *values: jnp.stack(values), *starts)
    mcmc.run(rng_key, *args, init_params=start, extra_fields=("diverging",), **kwargs)
    return mcmc


def _without(hidden: tuple[str, ...], model: Callable[..., Any]) -> Callable[..., Any]:
    """The model with missing outputs integrated out. Sampled under an expected log density they would bias all other sites."""

    def fixed(site: dict[str, Any]) -> Array | None:
        return jnp.zeros(site["fn"].shape()) if site["name"] in hidden else None

    return handlers.block(handlers.substitute(model, substitute_fn=fixed), hide=list(hidden)) if hidden else model


def _picked(rng_key: PRNGKey) -> Callable[[Rows], Rows]:
    def pick(X: Rows) -> Rows:
        if isinstance(X, Concatenated):
            return concatenate([pick(part) for part in X.parts])
        rows = jnp.sort(jax.random.permutation(rng_key, len(X))[:MAX_POINTS])
        return X if len(X) <= MAX_POINTS else jax.tree.map(lambda a: a[rows], X)

    return pick


def _relative(value: np.ndarray, scale: np.ndarray, same: float) -> np.ndarray:
    """The quotient; ``same`` where both are zero, as for a function that is known there (a linear function at zero)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((value == 0) & (scale == 0), same, value / scale)


def _moments(q: Array, exact: Array) -> Moments:
    both = [np.asarray(draws, float) for draws in (q, exact)]
    return Moments(*(moment for draws in both for moment in (draws.mean(0), draws.std(0))))
