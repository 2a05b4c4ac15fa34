"""Whether a variational posterior is close enough to the posterior to be corrected by importance weights.

The comparison is with the posterior of the model in which residuals of different points are independent given u
(``diagnostics/sites.py``). A tightened q is compared at v = 1, like predictions. Mean-only points have no draws, so ``khat``
refuses them and ``to_arviz`` leaves out ``lp`` and ``log_q``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.diagnostics.draws import Arguments, Draws, GuideDraws
from numpyro_orthgp.diagnostics.layout import Layout
from numpyro_orthgp.diagnostics.replay import Replay, look
from numpyro_orthgp.diagnostics.sites import log_joint
from numpyro_orthgp.diagnostics.versions import smooth_weights
from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.math.turns import in_turn
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["LIMIT", "ParetoK", "check_guide", "khat", "khat_of", "log_density_of_guide"]

LIMIT = 0.7  # beyond it not even smoothed weights have a reliable average


class ParetoK(NamedTuple):
    """What :func:`khat` finds.

    :param khat: shape of the generalized Pareto distribution of the largest weights; minus infinity if the largest weights are
        equal.
    :param ess: effective sample size of the smoothed weights, at most ``num_samples``.
    :param num_samples: number of draws.
    :param log_weights: log p - log q of each draw, not smoothed, in nats, shape (num_samples,).
    """

    khat: float
    ess: float
    num_samples: int
    log_weights: np.ndarray

    @property
    def threshold(self) -> float:
        """min(1 - 1 / log10 S, 0.7): if k-hat is larger, S draws are too few (Vehtari et al. 2024)."""
        return min(1 - 1 / np.log10(self.num_samples), LIMIT)

    def __str__(self) -> str:
        if self.khat < min(0.5, self.threshold):
            verdict = "good: q is close to the posterior"
        elif self.khat < self.threshold:
            verdict = "usable: importance weights can correct q"
        elif self.khat < LIMIT:
            verdict = f"too few draws: with {self.num_samples} k-hat must be below {self.threshold:.2f}"
        else:
            verdict = "do not trust q: the weights have no reliable average"
        return f"k-hat = {self.khat:.2f} ({verdict}; {self.num_samples} draws are worth {self.ess:.0f})"


@in_turn()
def khat(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    *args: Any,
    num_samples: int = 1000,
    rng_key: PRNGKey | None = None,
    **kwargs: Any,
) -> ParetoK:
    r"""How far a fitted guide is from the posterior: the Pareto k-hat of its importance weights [1].

    ::

        print(ogp.khat(model, guide, svi_result.params, X, y))

    Draws :math:`(u_s, \theta_s)` of the guide get the weights

    .. math:: \log w_s &= \log p(u_s, \theta_s) + \sum_i \log p(y_i \mid u_s, \theta_s) - \log q(u_s, \theta_s), \\
        p(y_i \mid u, \theta) &= \int p(y_i \mid f_i) \, p(f_i \mid u, \theta) \, df_i,

    and a generalized Pareto distribution is fitted to the largest weights. Below 0.5, q is good. Up to min(1 - 1 / log10 S, 0.7)
    [2], averages with these weights are reliable. Above, they are not. k-hat grows with the number of dimensions. With hundreds of
    inducing variables it is often above 0.7 even if means and variances are right.

    q is compared with the posterior given the inducing points. There residuals of different points are independent given u, as in
    FITC's model, and so are those of outputs that mix the same functions. If the inducing points leave little residual, this is the
    exact model. For a tightened guide (``residual="tight"``) only q(u, theta) is judged, with the prior's residual, as in
    predictions. Fixed values (``AutoDelta``, ``numpyro.param``) are conditioned on. Draws inside the model (``f(X).sample()``,
    inner layers of a :class:`DeepGP`) are drawn too.

    The guide may use beliefs (``analytic=True``); only values of its draws are used here. Use float64 if N is large, since the
    weights are differences of sums over N points.

    >>> import jax.numpy as jnp, numpyro, optax
    >>> from jax.random import PRNGKey
    >>> from numpyro.infer import SVI, TraceMeanField_ELBO
    >>> import numpyro_orthgp as ogp
    >>> X = jnp.linspace(0.0, 1.0, 40)[:, None]
    >>> y = jnp.sin(6 * X[:, 0])
    >>> def model(X, y):
    ...     f = ogp.gp("f", ogp.kernels.RBF(0.3), X[::5])
    ...     with numpyro.plate("data", len(X)):
    ...         numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.2), obs=y)
    >>> guide = ogp.AutoSparseGP(model, natural=True)
    >>> optim = ogp.natural_gradient(optax.adam(1e-2), 1.0)
    >>> svi = SVI(model, guide, optim, TraceMeanField_ELBO())
    >>> params = svi.run(PRNGKey(0), 2, X, y, progress_bar=False).params
    >>> k = ogp.khat(model, guide, params, X, y)
    >>> k.num_samples, bool(k.khat < k.threshold)
    (1000, True)

    :param model: the model that was fitted.
    :param guide: its guide.
    :param params: ``SVIRunResult.params`` or ``svi.get_params(state)``.
    :param args: arguments of the model, all of the data with observations. Floating JAX arrays among them are traced.
    :param num_samples: number of draws S, at least 25.
    :param rng_key: default ``jax.random.key(0)``.
    :raises ValueError: if parameters are missing, guide or data do not fit the model, there are mean-only points (parameters
        without draws), or all draws of the guide are equal.
    :raises TypeError: if ``guide`` cannot be called or ``params`` is no dict.
    :raises FloatingPointError: if weights are NaN or infinite.

    **References:**

    1. Yao, Vehtari, Simpson, Gelman. Yes, but Did It Work?: Evaluating Variational Inference. 2018.
    2. Vehtari, Simpson, Gelman, Yao, Gabry. Pareto Smoothed Importance Sampling. 2024.
    """
    check_guide(guide, params)
    check_integer("num_samples", num_samples, least=25)  # with fewer there is no tail
    draw_key, model_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    arguments = Arguments(args, kwargs)
    source = GuideDraws(guide, params, arguments, draw_key)
    layout = look(model, arguments, source, fitted=True)
    _check_mean_only(layout)
    return khat_of(Replay(model, arguments, source.draw(num_samples), layout), model_key)


def khat_of(replay: Replay, rng_key: PRNGKey) -> ParetoK:
    """:func:`khat` of draws of a guide.

    :raises ValueError: if there are mean-only points, or all draws are the same.
    :raises FloatingPointError: if weights are NaN or infinite.
    """
    _check_mean_only(replay.layout)
    if not replay.varies:
        raise ValueError(
            "The guide draws the same point each time, so it has no spread to compare with the posterior's."
        )

    def visit(sites: Any, functions: Any, key: PRNGKey) -> Array:
        return log_joint(sites, replay.layout.hidden)

    log_p = replay.map(visit, rng_key, densities=True)
    log_q = log_density_of_guide(replay.draws, replay.layout)
    return _smoothed(np.asarray(log_p, float), np.asarray(log_q, float), float(jnp.finfo(log_p.dtype).eps))


def _check_mean_only(layout: Layout) -> None:
    if layout.mean_only:
        raise ValueError(
            f"k-hat needs draws of all of q, but the mean-only points of {', '.join(map(repr, layout.mean_only))} are parameters, "
            "not latent sites. Use a set with covariance 'prior' in their place to check its q."
        )


def check_guide(guide: Any, params: Any) -> None:
    """Refuse what is not a guide and its parameters.

    :raises TypeError: saying what was expected.
    """
    if not callable(guide):
        raise TypeError(
            f"`guide` must be the guide, a callable; got {type(guide).__name__}. Of an SVI object pass svi.guide. Draws of MCMC "
            "have no guide: to_arviz(model, mcmc, None, ...) takes the MCMC object."
        )
    if not isinstance(params, dict):
        raise TypeError(
            f"`params` must be the dict of fitted parameters; got {type(params).__name__}. It comes before the model's arguments: "
            "(model, guide, svi_result.params, X, y)."
        )


def log_density_of_guide(draws: Draws, layout: Layout) -> Array:
    """log q of each draw, shape (S,). Missing outputs, which the guide draws from the model, are integrated out."""
    assert draws.log_q is not None
    terms = [term for name, term in draws.log_q.items() if name not in layout.hidden]
    return sum(terms, start=jnp.zeros(draws.shape[1]))


def _smoothed(log_p: np.ndarray, log_q: np.ndarray, eps: float) -> ParetoK:
    log_weights = log_p - log_q
    num = len(log_weights)
    bad = ~np.isfinite(log_weights)
    if not bad.all():
        bad &= log_weights != -np.inf  # some draws may be impossible under the model and weigh nothing
    if bad.any():
        raise FloatingPointError(
            f"{int(bad.sum())} of {num} log weights are NaN or infinite, the first with log p = {log_p[bad][0]} and log q = "
            f"{log_q[bad][0]}. Has the fit diverged? Otherwise use float64."
        )
    rounding = 100 * eps * max(np.abs(log_q).max(), 1.0, *np.abs(log_p[np.isfinite(log_p)]))
    if np.ptp(log_weights) <= rounding:
        return ParetoK(-np.inf, float(num), num, log_weights)  # there is no tail to fit to
    if np.ptp(np.sort(log_weights)[-_tail(num) :]) <= rounding:
        smoothed, k = log_weights, -np.inf  # nor is there one above many weights that are equal: they are bounded
    else:
        smoothed, k = smooth_weights(log_weights)
    weights = np.exp(smoothed - smoothed.max())
    return ParetoK(k, float(weights.sum() ** 2 / (weights**2).sum()), num, log_weights)


def _tail(num: int) -> int:
    """Number of largest weights to which the distribution is fitted (Vehtari et al. 2024)."""
    return int(min(num / 5, 3 * np.sqrt(num)))
