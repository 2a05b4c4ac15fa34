"""Guides that hand their Gaussians to the model: :func:`gp_posterior` by hand, :class:`AutoSparseGP` automatically."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoDelta, AutoGuide
from numpyro.primitives import Messenger

from numpyro_orthgp.constraints import dense_lower_cholesky
from numpyro_orthgp.constraints import natural as natural_constraint
from numpyro_orthgp.distributions import WhitenedGaussian
from numpyro_orthgp.errors import check_option
from numpyro_orthgp.likelihoods.base import check_observed, is_expected
from numpyro_orthgp.math.gaussian import COVARIANCES, Whitened
from numpyro_orthgp.primitives import Belief, CollectFunctions, Site, site_of
from numpyro_orthgp.process import GPFunction
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["AutoSparseGP", "gp_posterior", "posterior"]

RESIDUALS = ("prior", "tight")


def gp_posterior(
    name: str,
    num_inducing: int | Sequence[int],
    *,
    covariance: str | Sequence[str] = "full",
    residual: str = "prior",
    num_latents: int | None = None,
    natural: bool = False,
    analytic: bool = True,
    dtype: Any = None,
) -> list[Array]:
    """Declare q for one gp in a hand-written guide.

    For each set i it declares the param sites ``{name}.u{i}_loc``, shape (M_i,) or (P, M_i), and ``{name}.u{i}_scale_tril``,
    shape (M_i, M_i) or (P, M_i, M_i), for covariance "full", or ``{name}.u{i}_scale`` for "diagonal"; then the sample
    site ``{name}.u{i}``. A ``MeanOnly`` set has its weights in the model and is not counted here.

    :param name: the name that the model gave its gp.
    :param num_inducing: number of inducing variables, one per set.
    :param covariance: of q in whitened coordinates: "full", "diagonal" or "prior" (the identity); one for all sets or one per set.
    :param residual: "tight" for the tightened bound of Titsias 2025 (a param site ``{name}_residual_scale`` for v, used by
        likelihoods that are not Gaussian, whose optimal v is known), or "prior".
    :param num_latents: P, if the model's gp has it.
    :param natural: whether :func:`~numpyro_orthgp.natural_gradient` is to step these Gaussians, and ``MeanOnly`` weights have
        preconditioned gradients. Names and values of the parameters are the same.
    :param analytic: whether to hand the Gaussian itself to the model, which then integrates over it, or only samples, as
        importance-weighted objectives (``RenyiELBO``) need.
    :param dtype: dtype of the parameters; default JAX's default floating dtype.
    :return: a sample of the whitened inducing variables of each set.
    :raises ValueError: for an unknown option or a wrong number of them.
    """
    sizes = [num_inducing] if isinstance(num_inducing, int) else list(num_inducing)
    kinds = _per_set("covariance", covariance, len(sizes))
    check_option("residual", residual, RESIDUALS)
    dtype = jnp.dtype(dtype or jnp.result_type(float))
    batch = () if num_latents is None else (num_latents,)
    v = None
    if residual == "tight":
        v = numpyro.param(f"{name}_residual_scale", jnp.ones(batch, dtype), constraint=constraints.positive)
    values = []
    for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        q = _family(f"{name}.u{i}", (*batch, size), kind, natural, dtype)
        belief = Belief(q if analytic else None, v if i == 0 else None, natural)
        values.append(numpyro.sample(f"{name}.u{i}", WhitenedGaussian(q), infer=belief.as_infer()))
    return values


def _family(name: str, shape: tuple[int, ...], covariance: str, natural: bool, dtype: Any) -> Whitened:
    """Declare the parameters of one q, starting at the prior."""

    def declare(suffix: str, start: Array, constraint: Any) -> Array:
        # With the prior's covariance the natural gradient is the gradient, for any optimizer to follow.
        own = natural and covariance != "prior"
        return numpyro.param(f"{name}_{suffix}", start, constraint=natural_constraint if own else constraint)

    loc = declare("loc", jnp.zeros(shape, dtype), constraints.real)
    if covariance == "full":
        eye = jnp.broadcast_to(jnp.eye(shape[-1], dtype=dtype), (*shape, shape[-1]))
        scale = jnp.tril(declare("scale_tril", eye, dense_lower_cholesky))
    elif covariance == "diagonal":
        scale = declare("scale", jnp.ones(shape, dtype), constraints.positive)
    else:
        scale = None
    return Whitened(loc, scale, covariance)  # type: ignore[arg-type]


def _per_set(option: str, value: str | Sequence[str], num_sets: int) -> list[str]:
    values = [value] * num_sets if isinstance(value, str) else list(value)
    if len(values) != num_sets:
        raise ValueError(f"`{option}` must be one name or one per set, {num_sets} here; got {len(values)}: {values}.")
    return [check_option(option, v, COVARIANCES) for v in values]


def _of(name: str, option: Any, default: Any) -> Any:
    """What an option says about one gp: the same for all, or by name."""
    return option.get(name, default) if isinstance(option, Mapping) else option


class AutoSparseGP(AutoGuide):
    """The automatic guide: a Gaussian for every gp of the model, a NumPyro autoguide for every other latent site.

    ::

        guide = AutoSparseGP(model)                                 # full covariances, MAP for the rest
        guide = AutoSparseGP(model, residual="tight")               # the tightened bound of Titsias 2025
        guide = AutoSparseGP(model, covariance=["full", "prior"])   # SOLVE-GP whose second set moves the mean only
        guide = AutoSparseGP(model, hyper=AutoNormal)               # fully Bayesian hyperparameters
        guide = AutoSparseGP(model, natural=True)                   # for natural_gradient(optax.adam(1e-2), 0.1)

    Its param sites are those of :func:`gp_posterior` and of the ``hyper`` guide. The default ``hyper`` estimates sampled
    hyperparameters by their posterior mode: the loss then holds their log prior, and is a bound on log p(y, hyperparameters).

    :param model: a NumPyro model.
    :param covariance: "full", "diagonal" or "prior" for all sets; or one per set; or a dict of these by gp name.
    :param residual: "prior" or "tight"; or a dict of these by gp name.
    :param natural: let :func:`~numpyro_orthgp.natural_gradient` step the Gaussians; or a dict of bools by gp name.
    :param analytic: hand Gaussians to the model, not only samples; see :func:`gp_posterior`.
    :param hyper: what makes the guide for all other latent sites out of the model: an AutoGuide class or any callable
        such as ``lambda model: AutoNormal(model, init_scale=0.01)``.
    :raises ValueError: for unknown options; at the first call, for gp names that the model does not have, and for
        observations outside the support of their likelihood.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        covariance: str | Sequence[str] | Mapping[str, str | Sequence[str]] = "full",
        residual: str | Mapping[str, str] = "prior",
        natural: bool | Mapping[str, bool] = False,
        analytic: bool = True,
        hyper: Callable[[Callable[..., Any]], Any] = AutoDelta,
    ) -> None:
        super().__init__(model)
        for option, value, known in (("covariance", covariance, COVARIANCES), ("residual", residual, RESIDUALS)):
            if isinstance(value, str):
                check_option(option, value, known)
        self.covariance, self.residual, self.natural, self.analytic = covariance, residual, natural, analytic
        self._hyper = hyper(_WithoutGPs(model))
        self._order: list[str] = []  # latent sites, as the model has them
        self._gps: dict[str, list[Site]] = {}
        self._missing: set[str] = set()  # those of them that `obs_mask` made

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the guide; with the arguments of the model.

        :return: the values of the model's latent sites.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        with handlers.trace() as emitted:
            self._sample_latents(*args, **kwargs)
            if self._missing:
                self._sample_missing(emitted, *args, **kwargs)
        return {name: site["value"] for name, site in emitted.items() if site["type"] == "sample"}

    def sample_posterior(
        self, rng_key: PRNGKey, params: dict[str, Any], *args: Any, sample_shape: tuple[int, ...] = (), **kwargs: Any
    ) -> dict[str, Array]:
        """Samples of all latent sites, each of shape ``sample_shape`` + the site's."""

        def draw(key: PRNGKey) -> dict[str, Array]:
            return handlers.substitute(handlers.seed(self, key), params)(*args, **kwargs)

        if not sample_shape:
            return draw(rng_key)
        draws = jax.vmap(draw)(jax.random.split(rng_key, math.prod(sample_shape)))
        return jax.tree.map(lambda x: x.reshape(sample_shape + x.shape[1:]), draws)

    def median(self, params: dict[str, Any]) -> dict[str, Array]:
        """Posterior medians of all latent sites, by site name (those of ``hyper`` if it has medians)."""
        medians = dict(self._hyper.median(params)) if self._has_hyper else {}
        return medians | {name: params[f"{name}_loc"] for name in self._inducing_sites}

    @property
    def _inducing_sites(self) -> list[str]:
        return [f"{gp}.u{site.position}" for gp, sites in self._gps.items() for site in sites]

    @property
    def _has_hyper(self) -> bool:
        return bool(set(self._order) - set(self._inducing_sites) - self._missing)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with handlers.block():
            rng_key = jax.random.PRNGKey(0)
            messages = handlers.trace(handlers.seed(self.model, rng_key)).get_trace(*args, **kwargs)
        self._order, self._gps = [], {}
        self._missing = {name for name in messages if _hidden_by_mask(name, messages)}
        for name, message in messages.items():
            if message["type"] != "sample":
                continue
            if message["is_observed"]:
                check_observed(name, message["fn"], message["value"])
                continue
            site = site_of(message)
            if site is not None:
                self._gps.setdefault(name.removesuffix(f".u{site.position}"), []).append(site)
            if site is not None or name in self._missing or not is_expected(message["fn"]):
                self._order.append(name)
        self._check_names()
        # Names only: under `jit` the messages hold tracers, which must not outlive it.
        self.prototype_trace = dict.fromkeys(messages)

    def _check_names(self) -> None:
        if not self._gps:
            raise ValueError(
                "AutoSparseGP found no gp() in the model. Use a NumPyro autoguide, or declare f = gp(name, kernel, Z)."
            )
        for option in ("covariance", "residual", "natural"):
            value = getattr(self, option)
            if isinstance(value, Mapping):
                for name in value:
                    check_option(f"{option} key", name, list(self._gps))

    def _sample_latents(self, *args: Any, **kwargs: Any) -> None:
        pending = [(self._order.index(f"{name}.u0"), name) for name in self._gps]
        others = [i for i, name in enumerate(self._order) if name not in self._inducing_sites]
        with _InModelOrder(self._order, others, pending, self._sample_gp) as in_order:
            in_order.emit_before_next(after=-1)
            if self._has_hyper:
                self._hyper(*args, **kwargs)
        in_order.emit_rest()

    def _sample_gp(self, name: str) -> None:
        sites = self._gps[name]
        shape = sites[0].shape
        gp_posterior(
            name,
            [s.shape[-1] for s in sites],
            covariance=_of(name, self.covariance, "full"),
            residual=_of(name, self.residual, "prior"),
            natural=_of(name, self.natural, False),
            num_latents=shape[0] if len(shape) == 2 else None,
            analytic=self.analytic,
            dtype=sites[0].dtype,
        )

    def _sample_missing(self, emitted: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # Outputs hidden by `obs_mask` are latent sites that weigh nothing. Their posterior is their predictive
        # distribution, which only the model knows: run it under what has been drawn so far.
        with handlers.block():
            model = handlers.replay(handlers.seed(self.model, jax.random.PRNGKey(0)), dict(emitted))
            messages = handlers.trace(model).get_trace(*args, **kwargs)
        for name, message in messages.items():
            if _hidden_by_mask(name, messages) and not message["is_observed"]:
                numpyro.sample(name, message["fn"])


def _hidden_by_mask(name: str, names: Container[str]) -> bool:
    """Whether a site is the hidden part of one with `obs_mask`, which NumPyro calls {site}_unobserved beside {site}_observed."""
    return name.endswith("_unobserved") and name.removesuffix("_unobserved") + "_observed" in names


class _WithoutGPs(Messenger):
    """A model whose gp sites, and outputs hidden by `obs_mask`, no outer handler sees: what is left is for ``hyper``."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)
        self._seen: set[str] = set()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample":
            return
        self._seen.add(msg["name"])
        if msg["is_observed"]:
            return
        if site_of(msg) is not None or is_expected(msg["fn"]) or _hidden_by_mask(msg["name"], self._seen):
            if msg["value"] is None:
                msg["value"] = jnp.zeros(msg["fn"].shape(), getattr(site_of(msg), "dtype", None))
            msg["stop"] = True


class _InModelOrder(Messenger):
    """Emits each gp's sites between the other latent sites where the model has them, as TraceMeanField_ELBO asks."""

    def __init__(
        self, order: list[str], others: list[int], pending: list[tuple[int, str]], emit: Callable[[str], None]
    ) -> None:
        super().__init__()
        self.order, self.others, self.pending, self.emit = order, others, sorted(pending), emit

    def __enter__(self) -> _InModelOrder:
        super().__enter__()
        return self

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        # Inside a plate the gp's sites would become part of it: wait for the next site outside.
        if msg["type"] == "sample" and not msg["cond_indep_stack"]:
            index = self.order.index(msg["name"]) if msg["name"] in self.order else -1
            if index in self.others:
                self.emit_before_next(after=index)

    def emit_before_next(self, after: int) -> None:
        upcoming = [i for i in self.others if i > after]
        while self.pending and (not upcoming or self.pending[0][0] < upcoming[0]):
            self.emit(self.pending.pop(0)[1])

    def emit_rest(self) -> None:
        while self.pending:
            self.emit(self.pending.pop(0)[1])


def posterior(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    *args: Any,
    rng_key: PRNGKey | None = None,
    **kwargs: Any,
) -> dict[str, GPFunction]:
    """The fitted functions of a model, ready to be called at test inputs. Works under ``jax.jit``, where it is much faster.

    With a guide of this package the functions carry its Gaussians: means and variances are exact, with no sampling over
    inducing variables. Other latent sites are drawn once (a point for ``AutoDelta``); under a random ``hyper`` guide
    map over ``rng_key`` with ``jax.vmap`` for a mixture. The residual is always the prior's (v = 1), also after
    tightened training (Titsias 2025, Sec. 3.1).

    :param model: the model that was fitted.
    :param guide: its guide.
    :param params: ``SVIRunResult.params`` or ``svi.get_params(state)``.
    :param args: arguments of the model; the training inputs, or any inputs of the right shape.
    :param rng_key: for the latent sites that the guide draws; default ``jax.random.PRNGKey(0)``.
    :return: a :class:`GPFunction` for each gp, by full name (with the prefix of ``handlers.scope``).
    """
    guide_key, model_key = jax.random.split(jax.random.PRNGKey(0) if rng_key is None else rng_key)
    guide_trace = handlers.trace(handlers.substitute(handlers.seed(guide, guide_key), params)).get_trace(
        *args, **kwargs
    )
    fitted = handlers.substitute(handlers.replay(handlers.seed(model, model_key), guide_trace), params)
    with handlers.block(), CollectFunctions() as collected:
        fitted(*args, **kwargs)
    return {name: replace(f, pointwise=False, residual_scale=None) for name, f in collected.functions.items()}
