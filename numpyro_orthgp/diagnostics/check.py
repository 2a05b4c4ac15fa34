"""One look at a fit, :func:`check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.diagnostics.calibration import calibrate, with_held_out
from numpyro_orthgp.diagnostics.comparison import compare
from numpyro_orthgp.diagnostics.convergence import convergence_of
from numpyro_orthgp.diagnostics.draws import Arguments, GuideDraws
from numpyro_orthgp.diagnostics.health import FunctionHealth, health_of, inputs_of, residual_scales
from numpyro_orthgp.diagnostics.hierarchy import points_of, starts_of
from numpyro_orthgp.diagnostics.importance import ParetoK, check_guide, khat_of
from numpyro_orthgp.diagnostics.integration import integration_errors
from numpyro_orthgp.diagnostics.layout import Trace
from numpyro_orthgp.diagnostics.nearby import nearby_gains
from numpyro_orthgp.diagnostics.outputs import outputs_of_fit
from numpyro_orthgp.diagnostics.plugged import plugged_of
from numpyro_orthgp.diagnostics.replay import Replay, look
from numpyro_orthgp.diagnostics.report import Report
from numpyro_orthgp.diagnostics.resolution import arguments_of, coarse_of
from numpyro_orthgp.diagnostics.samples import samples_of
from numpyro_orthgp.diagnostics.scales import scales_of
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.guides import posterior
from numpyro_orthgp.inducing import Functional
from numpyro_orthgp.inducing.rows import Rows
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["check"]

LEAST = 25  # draws for a tail of weights


def check(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    *args: Any,
    losses: ArrayLike | None = None,
    starts: Sequence[ArrayLike] | None = None,
    held_out: tuple[Any, ...] | Mapping[str, Any] | None = None,
    nuts: int | None = None,
    num_samples: int = 1000,
    rng_key: PRNGKey | None = None,
    **kwargs: Any,
) -> Report:
    r"""One look at a fit: a page of text that says what was measured and what to do about it.

    ::

        known = {"losses": fit.losses, "held_out": (X_test, y_test)}
        print(ogp.check(model, guide, fit.params, X, y, **known, nuts=200))

    The page has, for each function,

    * its sets: number of points, divergence of q from the prior (zero: the set does nothing), share of the prior variance at
      the data that it explains; the least *pivot*, which is the variance of an inducing variable given those before it, relative
      to the kernel's; how many *repeat* others, with next to no variance of their own; the jitter, and what the Cholesky factor
      took beyond it;
    * the share of the prior variance that no set explains, over the inputs: where it is large, points are missing. Of a guide
      that draws hyperparameters both are those of one draw. Where inputs repeat it says how many are distinct;

    and for the fit

    * columns of the data that their dtype does not resolve, as unix seconds in float32: an offset should be taken off;
    * whether the loss still falls, or was lower before, if ``losses`` are given; whether other ``starts`` end where this one does;
    * sites that take the mean or the variance of a function as numbers, ``dist.Normal(f(X).mean, s)``: their loss is no bound;
    * sites that are points for the guide and look like random effects;
    * the share of the variance of the outputs that predictions explain, of Gaussian outputs and counts each without its own row;
      Gaussian noise beside the standard deviation of the outputs; whether counts vary more than Poisson's, Gaussian outputs have
      outliers, rows come twice, lengthscales are too short for the inputs, or columns differ in scale and lengthscales do not;
    * v of the tightened bound: 1 is the prior's residual, smaller values say how much the bound would like to have less of it. It
      is each point's own under Gaussian noise, also beneath ``LogNormal``, ``Transformed`` and ``Mixture``, else that of a gp;
    * what Gauss-Hermite nodes miss of each output's expectation, in nats per point, beside some thousands of nodes: where a density
      is narrow beside f, or has a kink, the bound may be too high. Likelihoods in closed form have no such line;
    * of Gaussian noise about one function, what near rows say that the inducing points do not, in nats per row: what groups of 16
      would add to the tightened bound, and what the 32 nearest rows would add to the density of rows that are left out
      (:func:`with_neighbors`);
    * the Pareto k-hat of the guide's importance weights (:func:`khat`);
    * predictions of held-out data: mean log density, and how many outputs lie in their predictive intervals. What is masked does
      not count, down to single entries; a censored time lies with its probability in what the interval has beyond it;
    * the guide beside a short run of NUTS on the same model, with parameters as they were fitted: hyperparameters, and the function
      at up to 200 of the data. Missing outputs are integrated out. For few data only: it costs what NUTS costs.

    The numbers are attributes of the result, also those that the page sums up: ``report.functions["f"].residual``,
    ``report.held_out["y"].pit`` (see ``plots.calibration``), ``report.outputs["y"]``, ``report.scales["f"]``,
    ``report.nuts.sites``, ``report.advice``.

    :param model: the model that was fitted.
    :param guide: its guide.
    :param params: ``SVIRunResult.params`` or ``svi.get_params(state)``.
    :param args: arguments of the model: the data with observations. Floating JAX arrays among them are traced. Of a large plate,
        ``plate("data", N, subsample_size=len(X))``, a sample of the rows is enough: each then counts for as many as the plate says,
        and the page says that it is a sample. With latent variables of single rows it must be all of them.
    :param losses: of the fit, shape (num_steps,).
    :param starts: losses of other fits of the same model and data, each from another start (another key, or ``init_params``).
    :param held_out: data that were not fitted: a tuple that takes the place of the first positional arguments, ``(X_test,
        y_test)``, or a dict of arguments by name, ``{"X": X_test, "y": y_test, "N": 100}``.
    :param nuts: number of draws, after as many to warm up, of each of two chains; by default NUTS is not run.
    :param num_samples: number of draws of the guide, at least 25.
    :param rng_key: default ``jax.random.PRNGKey(0)``.
    :return: what was found; ``str`` of it is the page.
    :raises ValueError: if parameters are missing, guide or data do not fit the model, nothing is observed, a sample of rows
        meets latent variables of single rows or ``nuts``, or ``held_out`` is given for a CollapsedGP.
    :raises TypeError: if ``guide`` cannot be called, or ``params`` or ``held_out`` are of a wrong type.
    """
    check_guide(guide, params)
    check_integer("num_samples", num_samples, least=LEAST)
    if nuts is not None:
        check_integer("nuts", nuts, least=LEAST)
    convergence = None if losses is None else convergence_of(losses)
    held_args = None if held_out is None else with_held_out(model, args, kwargs, held_out)
    draw_key, model_key, test_key, nuts_key = jax.random.split(jax.random.PRNGKey(0) if rng_key is None else rng_key, 4)
    arguments = Arguments(args, kwargs)
    source = GuideDraws(guide, params, arguments, draw_key)
    layout = look(model, arguments, source, fitted=True, whole=False)
    samples = samples_of(model, arguments, source, nuts)
    if held_args is not None and layout.collapsed:
        raise ValueError(
            f"`held_out` is for outputs that are independent given the functions. Those of `{layout.collapsed[0]}`, a "
            "CollapsedGP, are not: other data have another prior. Predict from the fit: CollapsedGP(...).posterior(y)(X_test)."
        )
    replay = Replay(model, arguments, source.draw(num_samples), layout)
    functions, scales, inputs = _functions(replay, guide, model_key)
    arrays = arguments_of(model, args, kwargs)
    subject = Subject(model, guide, params, arguments, layout, draw_key)
    return Report(
        functions,
        residual_scales(subject),
        _khat(replay, model_key),
        convergence,
        {} if held_args is None else calibrate(model, guide, params, *held_args, num_samples, test_key),
        None if nuts is None else compare(replay, nuts, nuts_key),
        layout.collapsed,
        coarse_of(arrays | inputs),
        integration_errors(subject),
        # Of a sample near rows are not those of the data.
        {} if samples else nearby_gains(subject),
        samples,
        points_of(replay),
        None if starts is None else starts_of(losses, starts),
        outputs_of_fit(subject, arrays),
        {name: found for name, (f, X) in scales.items() if (found := scales_of(f, X, arrays)) is not None},
        plugged_of(subject),
    )


def _functions(
    replay: Replay, guide: Callable[..., Any], rng_key: PRNGKey
) -> tuple[dict[str, FunctionHealth], dict[str, tuple[GPFunction, Array]], dict[str, Array]]:
    """All functions with the guide's Gaussians, at the inputs where the outputs of one draw depend on them; and these inputs."""
    arguments, params = replay.arguments, replay.draws.params

    def fitted(arrays: Any, params: Any) -> dict[str, GPFunction]:
        args, kwargs = arguments.join(arrays)
        return posterior(replay.model, guide, params, *args, **kwargs)

    def inputs(sites: Trace, functions: dict[str, GPFunction], key: PRNGKey) -> dict[str, Rows]:
        collapsed = {
            n: s["fn"].X for n, s in sites.items() if isinstance(s.get("fn"), CollapsedGP) and s["is_observed"]
        }
        return inputs_of(sites, functions, key) | {name: jnp.asarray(X) for name, X in collapsed.items()}

    at, _ = replay.ends(inputs, rng_key)
    functions = jax.jit(fitted)(arguments.arrays, params)
    health = {name: health_of(name, f, at.get(name)) for name, f in functions.items()}
    seen = {name: X for name, X in at.items() if not isinstance(X, Functional)}
    pairs = {name: (functions[name], X) for name, X in seen.items() if name in functions}
    return health, pairs, {f"inputs of {name}": X for name, X in seen.items()}


def _khat(replay: Replay, rng_key: PRNGKey) -> ParetoK | str:
    try:
        return khat_of(replay, rng_key)
    except (ValueError, FloatingPointError) as error:
        return str(error)
