"""The automatic guide, :class:`AutoSparseGP`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoGuide

from numpyro_orthgp.errors import check_option, is_concrete
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.guides.declare import (
    Covariance,
    Residual,
    SetOfQ,
    check_names,
    declare_sets,
    fitted,
    grouping_of,
    latent_inputs_posterior,
    per_set,
    residual_of,
    start_of_inputs,
)
from numpyro_orthgp.guides.handlers import InModelOrder, KeysUsed, OutputsByRow, SamePlates, WithoutGPs, hidden_by_mask
from numpyro_orthgp.guides.hyper import PointsAndEffects, started_at_medians
from numpyro_orthgp.guides.looking import look, looked_at, start
from numpyro_orthgp.guides.missing import check_handlers, refuse_objective, refuse_unobserved, sample_missing
from numpyro_orthgp.guides.own_draws import refuse_own_draws
from numpyro_orthgp.guides.parameters import refuse_own_names
from numpyro_orthgp.guides.summaries import Summaries
from numpyro_orthgp.guides.weights import refuse_weights
from numpyro_orthgp.likelihoods.base import check_observed, is_expected
from numpyro_orthgp.likelihoods.wrapped import refuse_outer_product
from numpyro_orthgp.primitives.messages import InputSite, Site, input_site_of, is_enumerated, single_site_of

__all__ = ["AutoSparseGP"]


def _of(name: str, option: Any, default: Any) -> Any:
    """The value of an option for one gp: the same for all, or by name."""
    return option.get(name, default) if isinstance(option, Mapping) else option


class _Prepared(Exception):
    """The ``hyper`` guide has started."""


class AutoSparseGP(Summaries):
    """The automatic guide: a Gaussian for every gp of the model, a NumPyro autoguide for every other latent site.

    ::

        AutoSparseGP(model)                                 # full covariances, points for hyperparameters
        AutoSparseGP(model, residual="tight")               # the tightened bound of Titsias 2025; group_size=16 for groups of rows
        AutoSparseGP(model, covariance=["full", "prior"])   # the second set moves the mean only
        AutoSparseGP(model, hyper=AutoNormal)               # fully Bayesian hyperparameters
        AutoSparseGP(model, natural=True)                   # for natural_gradient(optax.adam(1e-2), 0.1)
        # for latent inputs:
        AutoSparseGP(model, latents={"X": init.pca(Y, 2)})  # a Gaussian for each point, with these initial means
        AutoSparseGP(model, latents={"X": encoder})         # encoder(*args, **kwargs) -> loc, scale

    Its param sites are those of :func:`gp_posterior`, ``{name}_loc`` and ``{name}_scale``, shape (N, D), for latent inputs, and
    those of ``hyper``. By default ``hyper`` has points, and a Gaussian per random effect: the loss bounds log p(y, points).

    >>> import jax.numpy as jnp, numpyro, optax
    >>> from jax.random import PRNGKey
    >>> from numpyro.infer import SVI, TraceMeanField_ELBO
    >>> import numpyro_orthgp as ogp
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> def model(X, y):
    ...     f = ogp.gp("f", ogp.kernels.RBF(0.3), [X[::10], X[5::10]])
    ...     with numpyro.plate("data", len(X)):
    ...         numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.1), obs=y)
    >>> svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(1e-2), TraceMeanField_ELBO())
    >>> params = svi.get_params(svi.init(PRNGKey(0), X, jnp.sin(6 * X[:, 0])))
    >>> {name: value.shape for name, value in params.items()}
    {'f.u0_loc': (5,), 'f.u0_scale_tril': (5, 5), 'f.u1_loc': (5,), 'f.u1_scale_tril': (5, 5)}

    :param model: a NumPyro model.
    :param covariance: "full", "diagonal", "low_rank" or "prior" for all sets, or a family (see :func:`gp_posterior`); one per set;
        or a dict of these by gp name.
    :param residual: "prior", "tight" or a function (see :func:`gp_posterior`); or a dict of these by gp name.
    :param group_size, num_groups: with "tight", the number of rows in a group, and of groups at the end of a minibatch (see
        :func:`gp_posterior`); or dicts by gp name.
    :param natural, analytic: as for :func:`gp_posterior`; ``natural`` may be a dict of bools by gp name.
    :param init_scale: initial standard deviation of q in whitened coordinates (1 is the prior's); or a dict by gp name. For
        deep GPs ``{"f1": 0.01}`` starts an inner layer near its mean function.
    :param latents: by name of :func:`latent_inputs`: initial means, shape (N, D), or (means, standard deviations), the
        latter by default 0.3; or an encoder, called with the model's arguments inside the model's plate, that returns means
        and standard deviations of the plate's rows. Without initial means, these are random.
    :param hyper: makes the guide for all other latent sites from the model: an AutoGuide class, started at prior medians,
        or any callable such as ``lambda model: AutoNormal(model, init_scale=0.01)``.
    :raises ValueError: for unknown options; at the first call, for gp names that the model does not have, and for
        observations outside the support of their likelihood.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        covariance: Covariance | Sequence[Covariance] | Mapping[str, Covariance | Sequence[Covariance]] = "full",
        residual: str | Residual | Mapping[str, str | Residual] = "prior",
        group_size: int | Mapping[str, int] | None = None,
        num_groups: int | Mapping[str, int] | None = None,
        natural: bool | Mapping[str, bool] = False,
        analytic: bool = True,
        init_scale: float | Mapping[str, float] = 1.0,
        latents: Mapping[str, Any] | None = None,
        hyper: Callable[[Callable[..., Any]], Any] = PointsAndEffects,
    ) -> None:
        super().__init__(model)
        self.prototype_trace: dict[str, dict[str, str]] | None = None
        check_names(covariance, residual)
        self.covariance, self.residual, self.group_size, self.num_groups = covariance, residual, group_size, num_groups
        self.natural, self.analytic, self.init_scale = natural, analytic, init_scale
        self.latents = dict(latents or {})
        self._rest = WithoutGPs(model)
        self._hyper = started_at_medians(hyper, self._rest)
        self._order: list[str] = []  # latent sites, in the model's order
        self._gps: dict[str, list[Site]] = {}  # all sets, also those conditioned on
        self._inputs: dict[str, InputSite] = {}
        self._plate_of: dict[str, str] = {}  # name of the plate around latent inputs
        self._missing: set[str] = set()  # latent sites from `obs_mask`
        self._enumerated: list[str] = []  # that no guide draws
        self._preparing: Callable[..., Any] | None = None  # compiles the separate start of `hyper`
        self._keys_of_start = 0  # number of keys that `hyper` took in its separate start

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the guide with the arguments of the model.

        :return: the values of the model's latent sites.
        """
        if self.prototype_trace is None:
            look(lambda: self._setup_prototype(*args, **kwargs), only_abstractly=self._preparing is not None)
        refuse_objective(self._enumerated, self._in_loops)
        with handlers.trace() as emitted:
            self._sample_latents(*args, **kwargs)
            refuse_own_names(emitted, self.prototype_trace or {})
            if self._missing:
                sample_missing(self.model, dict(emitted), args, kwargs)
        return {name: site["value"] for name, site in emitted.items() if site["type"] == "sample"}

    @contextmanager
    def prepared(self, start: Callable[[], Any], compiled: Callable[..., Any]) -> Iterator[None]:
        """Context in which ``start`` may be compiled. From its first call this guide keeps only names, but ``hyper`` keeps arrays.

        :param start: calls the guide, such as ``svi.init``. It first runs until ``hyper`` has started.
        :param compiled: ``compiled(function, rng_key)`` runs a function as one program.
        """
        is_new = self.prototype_trace is None
        try:
            if is_new:
                self._preparing = compiled
                with suppress(Exception):  # `start` may need values
                    jax.eval_shape(start)
                if self.prototype_trace is None or self._hyper_is_new():
                    with suppress(_Prepared):
                        start()
                self._preparing, self.prototype_trace = None, None
            yield
        except BaseException:
            self._preparing = None
            if is_new:  # the next call looks at the model again, and reports the error
                self.prototype_trace = None
            raise

    @property
    def _inducing_sites(self) -> list[str]:
        names = [f"{gp}.u{site.position}" for gp, sites in self._gps.items() for site in sites]
        return [name for name in names if name in self._order]

    @property
    def _others(self) -> set[str]:
        """Latent sites of the ``hyper`` guide."""
        return set(self._order) - set(self._inducing_sites) - set(self._inputs) - self._missing

    @property
    def _own_inputs(self) -> list[str]:
        """Latent inputs whose parameters belong to the guide, not to an encoder."""
        return [name for name in self._inputs if not callable(self.latents.get(name))]

    def _gaussians(self, params: Mapping[str, Any]) -> dict[str, Whitened]:
        starts = {f"{gp}.u{site.position}": q for gp in self._gps for site, q in self._starts(gp)}
        return {name: fitted(name, q, params) for name, q in starts.items()}

    def _starts(self, name: str) -> list[tuple[Site, Whitened]]:
        """The latent sets of a gp, each with its initial Gaussian."""
        sites = self._gps[name]
        starts = per_set("covariance", _of(name, self.covariance, "full"), len(sites))
        scale = _of(name, self.init_scale, 1.0)
        return [
            (site, begin(site.shape, jnp.asarray(scale, site.dtype)))
            for site, begin in zip(sites, starts, strict=True)
            if f"{name}.u{site.position}" in self._order
        ]

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> bool:
        self.prototype_trace = None  # also after an abstract look, if the look with values raises
        with looked_at() as (declared, functions, self._in_loops):
            seeded = partial(handlers.seed(self.model, jax.random.key(0)), *args, **kwargs)
            messages = handlers.trace(seeded).get_trace()
        check_handlers(declared, messages, self._in_loops)
        self._order, self._gps, self._inputs, seen = [], {}, {}, True
        self._missing = {name for name in messages if hidden_by_mask(name, messages)}
        self._enumerated = [name for name, message in messages.items() if is_enumerated(message)]
        for name, message in messages.items():
            if message["type"] != "sample":
                continue
            site, inputs = single_site_of(message), input_site_of(message)
            if site is not None:
                self._gps.setdefault(name.removesuffix(f".u{site.position}"), []).append(site)
            if message["is_observed"]:
                seen = check_observed(name, message["fn"], message["value"]) and seen
                refuse_outer_product(name, message)
                continue
            if is_enumerated(message):
                continue
            refuse_unobserved(name, message, messages)
            if inputs is not None:
                self._inputs[name] = inputs
                self._note_plates(name, message)
            if site is not None or name in self._missing or not is_expected(message["fn"]):
                self._order.append(name)
        self._check_names()
        tight = [f for name, f in functions.items() if residual_of(_of(name, self.residual, "prior"))]
        refuse_weights(seeded, self.num_groups, tight, messages)
        refuse_own_draws(self.model, args, kwargs, messages, functions.values())
        # Keep only this: under `jit` the messages hold tracers, which must not outlive it.
        self.prototype_trace = {name: {"type": message["type"]} for name, message in messages.items()}
        return seen

    def _note_plates(self, name: str, message: dict[str, Any]) -> None:
        frames = message["cond_indep_stack"]
        if len(frames) > 1:
            raise ValueError(
                f"latent_inputs() must be in at most one plate, that of the points; `{name}` is in "
                f"{', '.join(repr(frame.name) for frame in frames)}."
            )
        if frames:
            self._plate_of[name] = frames[0].name

    def _check_names(self) -> None:
        if not self._gps and not self._inputs:
            raise ValueError(
                "AutoSparseGP found no gp(), orthogonal() or latent_inputs() in the model. Use a NumPyro autoguide (CollapsedGP "
                "needs no other), or declare f = gp(name, kernel, Z)."
            )
        of_gps = ("covariance", "residual", "group_size", "num_groups", "natural", "init_scale")
        for option in ("latents", *of_gps):
            value, names = getattr(self, option), list(self._inputs if option == "latents" else self._gps)
            for name in value if isinstance(value, Mapping) else ():
                check_option(f"{option} key", name, names)

    def _sample_latents(self, *args: Any, **kwargs: Any) -> None:
        if self._preparing and not (self._hyper_is_new() and is_concrete(jnp.zeros(()))):
            raise _Prepared
        plates = self._plates(*args, **kwargs)
        pending: list[tuple[int, Callable[[], Any]]] = []
        for name, sites in self._gps.items():
            latent = [site.position for site in sites if f"{name}.u{site.position}" in self._order]
            if latent:
                first = self._order.index(f"{name}.u{latent[0]}")
                pending.append((first, partial(self._sample_gp, name, latent)))
        for name in self._inputs:
            emit = partial(self._sample_inputs, name, plates.get(self._plate_of.get(name, "")), *args, **kwargs)
            pending.append((self._order.index(name), emit))
        picked = {}
        for plate in plates.values():
            with plate as index:
                picked[plate.name] = index
        with InModelOrder(self._order, pending) as in_order:
            if self._others:
                in_order.emit(before=min(map(self._order.index, self._others)))
                starting = self._rest.only(self._others) if self._hyper_is_new() else nullcontext()
                for _ in range(self._keys_of_start):
                    numpyro.prng_key()
                self._keys_of_start = 0
                with SamePlates(picked), starting, KeysUsed(self._hyper_is_new) as used:
                    start(self._hyper, self._preparing, args, kwargs)
                    if not self._preparing:
                        self._hyper(*args, **kwargs)
                if self._preparing:
                    self._keys_of_start = used.count
                    raise _Prepared
        in_order.emit()

    def _hyper_is_new(self) -> bool:
        """Whether ``hyper`` is a NumPyro guide that must start; its first call takes random keys that later calls do not."""
        return isinstance(self._hyper, AutoGuide) and self._hyper.prototype_trace is None and bool(self._others)

    def _sample_gp(self, name: str, latent: Sequence[int]) -> None:
        sites = self._gps[name]
        starts = per_set("covariance", _of(name, self.covariance, "full"), len(sites))
        residual = residual_of(_of(name, self.residual, "prior"))
        sets = [
            SetOfQ(s.position, s.shape[-1], begin)
            for s, begin in zip(sites, starts, strict=True)
            if s.position in latent
        ]
        declare_sets(
            name,
            sets,
            residual=residual if sites[0].position == 0 else None,  # otherwise the first set is integrated out, with v
            grouping=grouping_of(_of(name, self.group_size, None), _of(name, self.num_groups, None), residual),
            batch=sites[0].shape[:-1],
            natural=_of(name, self.natural, False),
            analytic=self.analytic,
            init_scale=_of(name, self.init_scale, 1.0),
            dtype=sites[0].dtype,
        )

    def _sample_inputs(self, name: str, plate: numpyro.plate | None, *args: Any, **kwargs: Any) -> None:
        num, dim = self._inputs[name]
        start = self.latents.get(name)
        with plate or nullcontext():
            if callable(start):
                loc, scale = start(*args, **kwargs)
            else:
                loc, scale = start_of_inputs(name, start, (num, dim))
                loc = numpyro.param(f"{name}_loc", loc, event_dim=1)
                scale = numpyro.param(f"{name}_scale", scale, constraint=constraints.positive, event_dim=1)
            latent_inputs_posterior(name, loc, scale, analytic=self.analytic)

    def _plates(self, *args: Any, **kwargs: Any) -> dict[str, numpyro.plate]:
        """The model's plates around latent inputs and hidden outputs, at these arguments, by name."""
        if not self._plate_of and not self._missing:
            return {}
        messages: dict[str, Any] = {}

        def note() -> bool:
            with handlers.block(), OutputsByRow():
                model = handlers.trace(handlers.seed(self.model, jax.random.key(0)))
                messages.update(model.get_trace(*args, **kwargs))
            return True

        look(note, only_abstractly=self._preparing is not None)
        missing = [name for name in messages if name in self._missing]  # none if there is no mask, as in predictions
        frames = [frame for name in (*self._plate_of, *missing) for frame in messages[name]["cond_indep_stack"]]
        # One plate per name, since two would pick different rows.
        dims = {frame.name: frame.dim for frame in frames}
        return {name: numpyro.plate(name, *messages[name]["args"], dim=dim) for name, dim in dims.items()}
