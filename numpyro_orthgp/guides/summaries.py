"""NumPyro's further methods of automatic guides: draws, medians and quantiles of all latent sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from numpyro import handlers
from numpyro.infer.autoguide import AutoDelta, AutoGuide

from numpyro_orthgp.errors import check_params, inspect
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.guides.parameters import refuse_lists
from numpyro_orthgp.math.compiled import one_program
from numpyro_orthgp.math.turns import in_turn
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["Summaries"]


class Summaries(AutoGuide):
    """The methods of :class:`AutoSparseGP` that describe the posterior; its own module has the others."""

    _hyper: Any

    @in_turn()
    def sample_posterior(
        self, rng_key: PRNGKey, params: dict[str, Any], *args: Any, sample_shape: tuple[int, ...] = (), **kwargs: Any
    ) -> dict[str, Array]:
        """Samples of all latent sites, each of shape ``sample_shape`` + the site's."""
        refuse_lists(params)

        def draw(key: PRNGKey) -> dict[str, Array]:
            return handlers.substitute(handlers.seed(self, key), params)(*args, **kwargs)

        if not sample_shape:
            return draw(rng_key)
        draws = jax.vmap(draw)(jax.random.split(rng_key, math.prod(sample_shape)))
        return jax.tree.map(lambda x: x.reshape(sample_shape + x.shape[1:]), draws)

    def median(self, params: dict[str, Any]) -> dict[str, Array]:
        """Posterior medians of all latent sites, by site name (including those of ``hyper``, if it has medians).

        Sites whose distribution depends on the model's arguments are left out: latent inputs of an encoder, and outputs hidden by
        ``obs_mask``.

        :raises RuntimeError: before the first call, which finds the sites.
        :raises ValueError: if ``params`` lacks parameters of this guide.
        :raises NotImplementedError: if ``hyper`` has no medians.
        """
        medians = self._of_hyper("median", params)
        gaussians = self._marginals(params)
        return medians | {name: loc for name, (loc, _) in gaussians.items()}

    def quantiles(self, params: dict[str, Any], quantiles: ArrayLike | Sequence[float]) -> dict[str, Array]:
        """Marginal posterior quantiles of each latent variable, by site name.

        Whitened inducing variables and latent inputs are Gaussian. Other sites have the quantiles of ``hyper``, which are all equal
        for the points of :class:`~numpyro.infer.autoguide.AutoDelta`. The sites are those of :meth:`median`. For quantiles of f use
        its marginals, :func:`posterior`.

        :param quantiles: probabilities between 0 and 1, shape (n,).
        :return: shape (n,) + the site's, in the order of ``quantiles``.
        :raises RuntimeError: before the first call, which finds the sites.
        :raises ValueError: if a probability is not between 0 and 1, or ``params`` lacks parameters of this guide.
        :raises NotImplementedError: if ``hyper`` has no quantiles.
        """
        p = jnp.atleast_1d(jnp.asarray(quantiles, float))
        inspect(_refuse_no_probabilities, p)
        found = self._of_hyper("quantiles", params, p)
        return found | {name: _normal_quantiles(*q, p) for name, q in self._marginals(params).items()}

    def get_posterior(self, params: dict[str, Any]) -> NoReturn:
        """NumPyro's guides with one joint distribution have this method; here each set of a gp has its own distribution.

        :raises NotImplementedError: always, with the alternatives.
        """
        _refuse_joint("get_posterior")

    def get_transform(self, params: dict[str, Any]) -> NoReturn:
        """As :meth:`get_posterior`."""
        _refuse_joint("get_transform")

    def get_base_dist(self) -> NoReturn:
        """As :meth:`get_posterior`."""
        _refuse_joint("get_base_dist")

    @in_turn()
    def _of_hyper(self, what: str, params: dict[str, Any], *args: Any) -> dict[str, Array]:
        """Medians or quantiles of the sites of ``hyper``."""
        if self.prototype_trace is None:
            raise RuntimeError(
                "This guide has not seen its model yet, so it knows no sites. Call it first: guide(*args) under "
                "numpyro.handlers.seed, or svi.init."
            )
        refuse_lists(params)
        if not self._others:
            return {}
        try:
            return dict(getattr(self._hyper, what)(params, *args))
        except (AttributeError, NotImplementedError) as error:
            if what == "quantiles" and isinstance(self._hyper, AutoDelta):
                (p,) = args
                points = self._hyper.median(params)
                return {name: jnp.broadcast_to(value, (len(p), *jnp.shape(value))) for name, value in points.items()}
            raise NotImplementedError(
                f"{type(self._hyper).__name__}, the guide of {', '.join(sorted(map(repr, self._others)))}, knows no {what}. Draw: "
                "guide.sample_posterior(rng_key, params, *args, sample_shape=(1000,)), and take jnp.quantile of the draws."
            ) from error

    def _marginals(self, params: Mapping[str, Any]) -> dict[str, tuple[Array, Array]]:
        """Means and standard deviations of inducing variables and of latent inputs that are not encoded, by site."""
        found = {name: (q.loc, jnp.sqrt(q.variance())) for name, q in self._gaussians(params).items()}
        for name in self._own_inputs:
            check_params("guide", {f"{name}_{part}": {"type": "param"} for part in ("loc", "scale")}, params)
            found[name] = params[f"{name}_loc"], params[f"{name}_scale"]
        return found

    def _gaussians(self, params: Mapping[str, Any]) -> dict[str, Whitened]:
        raise NotImplementedError

    @property
    def _others(self) -> set[str]:
        raise NotImplementedError

    @property
    def _own_inputs(self) -> list[str]:
        raise NotImplementedError


@one_program
def _normal_quantiles(loc: Array, scale: Array, p: Array) -> Array:
    """Shape (n, ...)."""
    return loc + scale * ndtri(p.astype(loc.dtype)).reshape(-1, *(1,) * loc.ndim)


def _refuse_no_probabilities(p: Array) -> None:
    values = np.asarray(p)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"`quantiles` must be probabilities between 0 and 1; got {values.tolist()}.")


def _refuse_joint(method: str) -> NoReturn:
    raise NotImplementedError(
        f"{method} is for guides of one joint distribution, AutoContinuous; AutoSparseGP has a Gaussian for each set of each gp. "
        "Use posterior(model, guide, params, ...) for functions, and guide.sample_posterior, .median or .quantiles for sites. "
        "NeuTraReparam needs one of NumPyro's guides, as AutoMultivariateNormal(model)."
    )
