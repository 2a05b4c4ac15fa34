""":func:`check`, which measures a fit and prints a page about it."""

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
from numpyro_orthgp.diagnostics.formulas import formulas_of
from numpyro_orthgp.diagnostics.health import FunctionHealth, health_of, inputs_of, residual_scales
from numpyro_orthgp.diagnostics.hierarchy import points_of, starts_of
from numpyro_orthgp.diagnostics.importance import ParetoK, check_guide, khat_of
from numpyro_orthgp.diagnostics.integration import averaging_errors, integration_errors
from numpyro_orthgp.diagnostics.layout import Trace
from numpyro_orthgp.diagnostics.means_alone import means_alone_of
from numpyro_orthgp.diagnostics.nearby import nearby_gains
from numpyro_orthgp.diagnostics.outputs import outputs_of_fit
from numpyro_orthgp.diagnostics.plugged import own_draws_of, plugged_of, unpaid_of
from numpyro_orthgp.diagnostics.replay import Replay, look
from numpyro_orthgp.diagnostics.report import Report
from numpyro_orthgp.diagnostics.resolution import arguments_of, coarse_of
from numpyro_orthgp.diagnostics.samples import samples_of
from numpyro_orthgp.diagnostics.scales import scales_of
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.diagnostics.unsettled import unsettled_of
from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.guides.posterior import fitted_trace, functions_of
from numpyro_orthgp.inducing import Functional
from numpyro_orthgp.inducing.rows import Rows
from numpyro_orthgp.math.kept import run_kept
from numpyro_orthgp.math.turns import in_turn
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["check"]

LEAST = 25  # draws for a tail of weights


@in_turn()
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
    r"""Measure a fit. The result prints as a page of numbers, with advice at the end.

    ::

        known = {"losses": fit.losses, "held_out": (X_test, y_test)}
        print(ogp.check(model, guide, fit.params, X, y, **known, nuts=200))

    For each function the page shows

    * a table of its sets. Columns: number of points; KL divergence of q from the prior (a set with zero does nothing); share of the
      prior variance at the data that the set explains; the smallest *pivot*, which is the variance of an inducing variable given
      those before it, relative to the kernel's variance; the number of variables that *repeat* others, with almost no variance of
      their own; the jitter, and what the Cholesky factor needed beyond it;
    * how much of its standard deviations is rounding, if that is more than 2 % somewhere;
    * the share of the prior variance that no set explains, over the inputs. Where it is large, more points are needed. If the
      guide draws hyperparameters, the page shows one draw. If inputs repeat, it says how many are distinct.

    For the fit it shows

    * columns of the data that their dtype does not resolve, such as unix seconds in float32; subtract an offset from these;
    * functions so far from the mean of their prior that float32 has few digits for what varies: subtract the mean of the outputs;
    * whether the loss is still falling, or was lower earlier (with ``losses``), and whether other ``starts`` end at the same loss;
    * sites that take the mean or the variance of a function as numbers, ``dist.Normal(f(X).mean, s)``: their loss is no bound; and
      likelihoods that take draws of a function beside its marginals, ``Gaussian(f(X), jnp.exp(f(X).sample()))``: nor is theirs;
    * sites that take the mean of a function given its inducing variables, ``f.joint(X).mean``, as if these left no variance;
    * tightened residuals of which the loss does not have the whole cost, under guides by hand;
    * how far q is from its optimum, if it took natural steps: with a random loss and a constant rate it may be far off;
    * sites that are point estimates in the guide and look like random effects;
    * the share of the outputs' variance that predictions explain (Gaussian outputs and counts are predicted without their own
      row), and the Gaussian noise with the standard deviation of the outputs. Advice follows if counts vary more than Poisson's,
      Gaussian outputs have outliers, rows are duplicated, lengthscales are too short for the inputs, or columns have different
      scales and lengthscales have not followed;
    * v of the tightened bound. v = 1 is the prior's residual; a smaller v says that the bound prefers less residual. Under Gaussian
      noise, also beneath ``LogNormal``, ``Transformed`` and ``Mixture``, each point has its own v, otherwise each gp has one;
    * the error of Gauss-Hermite nodes in each output's expectation, in nats per point, measured with some thousands of nodes. If
      the density of y is narrow compared with f, or has a kink, the bound may be too high. Likelihoods with closed forms have no
      such line;
    * what nodes miss that average a kernel over uncertain inputs, if the kernel has no closed form for that;
    * what nearby rows would add, in nats per row, if an output has Gaussian noise and depends on one function: groups of 16 to the
      tightened bound, and the 32 nearest rows to the predictive density of rows left out (:func:`with_neighbors`);
    * the Pareto k-hat of the guide's importance weights (:func:`khat`);
    * predictions of held-out data: mean log density, and the share of outputs inside their predictive intervals. Masked entries do
      not count. A censored time counts with the probability that the true time is in the interval;
    * the guide compared with a short run of NUTS on the same model, with the fitted parameters: hyperparameters, and the function
      at up to 200 of the data. Missing outputs are integrated out. This costs a NUTS run, so it is for few data.

    All numbers are attributes of the result, in full where the page sums up: ``report.functions["f"].residual``,
    ``report.held_out["y"].pit`` (see ``plots.calibration``), ``report.outputs["y"]``, ``report.scales["f"]``,
    ``report.nuts.sites``, ``report.advice``.

    :param model: the model that was fitted.
    :param guide: its guide.
    :param params: ``SVIRunResult.params`` or ``svi.get_params(state)``.
    :param args: arguments of the model: the data with observations. Floating JAX arrays among them are traced. For a large plate,
        ``plate("data", N, subsample_size=len(X))``, a sample of the rows is enough. Each row is then weighted as the plate says,
        and the page says that it is a sample. A model with latent variables of single rows needs all rows.
    :param losses: losses of the fit, shape (num_steps,).
    :param starts: losses of other fits of the same model and data, each from another start (another key, or ``init_params``).
    :param held_out: data that were not fitted: a tuple that replaces the first positional arguments, ``(X_test, y_test)``, or a
        dict of arguments by name, ``{"X": X_test, "y": y_test, "N": 100}``.
    :param nuts: number of NUTS draws in each of two chains, after the same number of warm-up steps; by default NUTS is not run.
    :param num_samples: number of draws of the guide, at least 25.
    :param rng_key: default ``jax.random.key(0)``.
    :return: a ``Report``; ``str`` of it is the page.
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
    draw_key, model_key, test_key, nuts_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key, 4)
    arguments = Arguments(args, kwargs)
    source = GuideDraws(guide, params, arguments, draw_key)
    layout = look(model, arguments, source, fitted=True, whole=False)
    samples = samples_of(model, arguments, source, nuts)
    if held_args is not None and layout.collapsed:
        raise ValueError(
            f"`held_out` needs outputs that are independent given the functions. The outputs of `{layout.collapsed[0]}`, a "
            "CollapsedGP, are not: other data have another prior. Predict from the fit: CollapsedGP(...).posterior(y)(X_test)."
        )
    replay = Replay(model, arguments, source.draw(num_samples), layout)
    functions, scales, inputs = _functions(replay, guide, model_key)
    gps = [name for name in functions if name not in layout.collapsed]
    arrays = arguments_of(model, args, kwargs)
    subject = Subject(model, guide, source.params, arguments, layout, draw_key)
    return Report(
        functions,
        residual_scales(subject),
        _khat(replay, model_key),
        convergence,
        {} if held_args is None else calibrate(model, guide, params, *held_args, num_samples, test_key, arrays),
        None if nuts is None else compare(replay, nuts, nuts_key),
        layout.collapsed,
        coarse_of(arrays | inputs),
        integration_errors(subject),
        {} if samples else nearby_gains(subject),  # of a sample near rows are not those of the data
        samples,
        points_of(replay),
        None if starts is None else starts_of(losses, starts),
        outputs_of_fit(subject, arrays),
        {name: found for name, (f, X) in scales.items() if (found := scales_of(f, X, arrays)) is not None},
        plugged_of(subject, gps),
        own_draws_of(subject),
        {} if samples else unsettled_of(subject),
        averaging_errors(subject),
        means_alone_of(subject, gps),
        unpaid_of(subject),
        formulas_of(subject),
    )


def _functions(
    replay: Replay, guide: Callable[..., Any], rng_key: PRNGKey
) -> tuple[dict[str, FunctionHealth], dict[str, tuple[GPFunction, Array]], dict[str, Array]]:
    """All functions with the guide's Gaussians, and the inputs at which the outputs of one draw depend on them."""
    arguments, params = replay.arguments, replay.draws.params

    def fitted(arrays: Any, params: Any) -> dict[str, GPFunction]:
        args, kwargs = arguments.join(arrays)
        return functions_of(*fitted_trace(replay.model, guide, params, args, kwargs))  # advice says what is drawn

    def inputs(sites: Trace, functions: dict[str, GPFunction], key: PRNGKey) -> dict[str, Rows]:
        collapsed = {
            n: s["fn"].X for n, s in sites.items() if isinstance(s.get("fn"), CollapsedGP) and s["is_observed"]
        }
        return inputs_of(sites, functions, key) | {name: jnp.asarray(X) for name, X in collapsed.items()}

    at, _ = replay.ends(inputs, rng_key)
    functions = run_kept(fitted, arguments.arrays, params)
    health = {name: health_of(name, f, at.get(name)) for name, f in functions.items()}
    seen = {name: X for name, X in at.items() if not isinstance(X, Functional)}
    pairs = {name: (functions[name], X) for name, X in seen.items() if name in functions}
    return health, pairs, {f"inputs of {name}": X for name, X in seen.items()}


def _khat(replay: Replay, rng_key: PRNGKey) -> ParetoK | str:
    try:
        return khat_of(replay, rng_key)
    except (ValueError, FloatingPointError) as error:
        return str(error)
