"""The default guide for other latent sites than gps: points for hyperparameters, Gaussians for random effects.

A point is a poor estimate of a random effect. If J effects have a prior with an estimated scale, the joint mode of both is far
from their posteriors. Non-centred, b_j = scale e_j with e_j ~ N(0, 1), a larger scale lets all e_j be smaller, so the scale is too
large. Centred, b_j ~ N(0, scale^2), the density grows without bound as all b_j and the scale go to zero. With a Gaussian for each
effect, effects are integrated out, and the scale's mode is that of a bound on its marginal posterior
(``benchmarks/hierarchical.py`` compares all of these with NUTS).

NumPyro's guides with random initial values start at prior medians here. Otherwise a level ~ N(-6, 1) that starts at 1 may drive the
functions, whose parameters move at the same rate, to a region from which they do not return.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import ExitStack, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.infer import init_to_median, init_to_uniform
from numpyro.infer.autoguide import AutoDelta, AutoGuide

from numpyro_orthgp.guides.gaussians import what_is_read
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["PointsAndEffects", "effects_of", "started_at_medians"]

_FUNCTIONS = "functions of numpyro_orthgp"
START_SCALE = 0.1  # initial standard deviation of an effect's Gaussian in the unconstrained space, as in AutoNormal


class PointsAndEffects(AutoDelta):
    """Posterior modes for hyperparameters, a Gaussian for each random effect; the default ``hyper`` of ``AutoSparseGP``.

    Random effects are latent sites with more than one value that

    * are inside a plate, and may be any real number; or
    * have a prior that depends on another latent site, or on a parameter: ``Normal(0, spread).expand([J])``. One whose prior
      depends on a function, ``Normal(f(X).sample(), s)``, may have a single value.

    All other sites are points, as in ``AutoDelta``. This includes a vector with a fixed prior outside of a plate: it may hold
    coefficients, or effects that the model multiplies by their scale. Put effects into a plate, or use
    ``hyper=AutoNormal``; :func:`~numpyro_orthgp.check` names such sites.

    Parameters are ``{site}_auto_loc``, and for effects also ``{site}_auto_scale``: mean and standard deviation in the unconstrained
    space, as in ``AutoNormal``. With effects the loss is random, so ``fit_lbfgs`` refuses it; ``hyper=AutoDelta`` has no effects.

    :param model: a NumPyro model.
    :param init_scale: initial standard deviation of effects.
    :param options: options of ``AutoDelta``.
    """

    scale_constraint = constraints.softplus_positive

    def __init__(self, model: Callable[..., Any], *, init_scale: float = START_SCALE, **options: Any) -> None:
        super().__init__(model, **options)
        self._init_scale = init_scale
        self._effects: dict[str, Any] = {}  # by name, the transform from real numbers to the support

    @property
    def effects(self) -> tuple[str, ...]:
        """Names of the sites with a Gaussian; empty before the first call."""
        return tuple(self._effects)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        after = getattr(self.model, "after_functions", ())
        for name in effects_of(self.model, self.prototype_trace, args, kwargs, after):
            transform = biject_to(self.prototype_trace[name]["fn"].support)
            self._init_locs[name] = transform.inv(self._init_locs[name])
            self._effects[name] = transform

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the guide with the arguments of the model."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        result = {}
        for name, site in self.prototype_trace.items():
            if site["type"] != "sample" or site["is_observed"]:
                continue
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                result[name] = numpyro.sample(name, self._of(name, site["fn"]))
        return result

    def _of(self, name: str, prior: Any) -> Any:
        loc_name, start = f"{name}_{self.prefix}_loc", self._init_locs[name]
        if name not in self._effects:
            loc = numpyro.param(loc_name, start, constraint=prior.support, event_dim=prior.event_dim)
            return dist.Delta(loc).to_event(prior.event_dim)
        transform = self._effects[name]
        event_dim = transform.domain.event_dim + prior.event_dim - transform.codomain.event_dim
        loc = numpyro.param(loc_name, start, event_dim=event_dim)
        scale = numpyro.param(
            f"{name}_{self.prefix}_scale",
            jnp.full(jnp.shape(start), self._init_scale, jnp.result_type(start)),
            constraint=self.scale_constraint,
            event_dim=event_dim,
        )
        normal = dist.Normal(loc, scale).to_event(event_dim)
        return normal if _is_real(prior.support) else dist.TransformedDistribution(normal, transform)

    def sample_posterior(
        self, rng_key: PRNGKey, params: dict[str, Any], *args: Any, sample_shape: tuple[int, ...] = (), **kwargs: Any
    ) -> dict[str, Array]:
        """Samples of all latent sites, each of shape ``sample_shape`` + the site's."""
        found = super().sample_posterior(rng_key, params, *args, sample_shape=sample_shape, **kwargs)
        for i, (name, transform) in enumerate(self._effects.items()):
            loc, scale = (params[f"{name}_{self.prefix}_{part}"] for part in ("loc", "scale"))
            noise = jax.random.normal(jax.random.fold_in(rng_key, i), (*sample_shape, *loc.shape), loc.dtype)
            found[name] = transform(loc + scale * noise)
        return found

    def median(self, params: dict[str, Any]) -> dict[str, Array]:
        """Points, and medians of effects, by name of the site."""
        return {n: self._effects[n](v) if n in self._effects else v for n, v in super().median(params).items()}


def effects_of(
    model: Callable[..., Any], trace: dict[str, Any], args: Any, kwargs: Any, after: Collection[str] = ()
) -> tuple[str, ...]:
    """Names of a model's random effects, as :class:`PointsAndEffects` defines them.

    :param model: a model whose latent sites are only hyperparameters and effects.
    :param trace: trace of the model.
    :param after: names of sites that may depend on a function of this package; the model is then a ``WithoutGPs``.
    """
    latent = {n: s for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
    many = {
        n: s for n, s in latent.items() if not s["fn"].support.is_discrete and (jnp.size(s["value"]) > 1 or n in after)
    }
    in_plates = {n for n, s in many.items() if s["cond_indep_stack"] and _is_real(s["fn"].support)}
    if not many.keys() - in_plates:
        return tuple(n for n in many if n in in_plates)
    values = {n: s["value"] for n, s in trace.items() if n in latent or s["type"] == "param"}

    def run(values: dict[str, Any]) -> dict[str, Any]:
        moved = model.moved(values[_FUNCTIONS]) if after else nullcontext()  # type: ignore[attr-defined]
        with handlers.block(), moved:
            known = handlers.substitute(handlers.seed(model, jax.random.key(0)), values)
            return handlers.trace(known).get_trace(*args, **kwargs)

    functions = {_FUNCTIONS: jnp.zeros(())} if after else {}
    read = what_is_read(run, values | functions, many.keys() - in_plates)
    effects = {n for n, of in read.items() if _FUNCTIONS in of or (of and jnp.size(latent[n]["value"]) > 1)}
    return tuple(n for n in many if n in in_plates | effects)


def started_at_medians(hyper: Callable[..., Any], model: Callable[..., Any]) -> Any:
    """The guide that ``hyper`` makes. NumPyro's classes with random initial values start at prior medians.

    :raises TypeError: for what makes no guide, such as a name.
    """
    if not callable(hyper):
        raise TypeError(
            f"`hyper` must make a guide from a model, such as the class AutoNormal of numpyro.infer.autoguide; got {hyper!r}."
        )
    if isinstance(hyper, type) and issubclass(hyper, AutoGuide):
        start = inspect.signature(hyper).parameters.get("init_loc_fn")
        if start is not None and start.default is init_to_uniform:
            return hyper(model, init_loc_fn=init_to_median)
    return hyper(model)


def _is_real(support: Any) -> bool:
    base = support.base_constraint if isinstance(support, constraints.independent) else support
    return isinstance(base, type(constraints.real))
