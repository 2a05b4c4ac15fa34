"""Advice of ``check``: rules that turn measurements into sentences.

The measurements are numbers in dataclasses (``health``, ``calibration``, ``comparison``, ``convergence``). Each sentence of advice
comes from one rule on them. A user who disagrees with a threshold can read the number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from numpyro_orthgp.diagnostics.advice_on_outputs import advice_on_outputs
from numpyro_orthgp.diagnostics.calibration import LEVELS, Calibration
from numpyro_orthgp.diagnostics.comparison import Comparison
from numpyro_orthgp.diagnostics.convergence import Convergence
from numpyro_orthgp.diagnostics.health import FunctionHealth, SetHealth
from numpyro_orthgp.diagnostics.importance import LIMIT, ParetoK
from numpyro_orthgp.diagnostics.integration import IntegrationError
from numpyro_orthgp.diagnostics.nearby import Nearby
from numpyro_orthgp.diagnostics.outputs import LEAST, OutputFit
from numpyro_orthgp.diagnostics.scales import ALONE, SAME, Scales, advice_on_scales
from numpyro_orthgp.diagnostics.words import listed, percent
from numpyro_orthgp.functions.rounding import MUCH_ROUNDED
from numpyro_orthgp.math.resolution import REMEDY

__all__ = ["advise"]

IDLE = 0.01  # nats, as for `online.drop_sets`
MUCH_REPEATED = 0.25  # share of a set's points
OFFSET = 5e-4  # standard deviations of f that a mean is rounded by; projections make it up to a thousand times as large
MUCH_OUTSIDE = 0.2  # share of held-out rows
MUCH_LEFT = 0.1  # share of the prior variance that no set explains
SMALL_V = 0.8
NARROW, WIDE = 0.7, 1.4  # standard deviations of q over those of NUTS
FAR = 0.5  # standard deviations between means
CLEAR = 3  # standard errors
CONVERGED = 1.05  # R-hat
MISSED = 0.01  # nats per point that an integral is off
GAINED = 0.02  # nats per row that near rows would add

AT_NAN = "Take a smaller learning rate, more jitter or float64; ogp.fit stops at the first such step and returns the one before it."
SMALLER = "take a smaller learning rate, or a schedule that ends small (optax.cosine_decay_schedule)"


def advise(
    functions: Mapping[str, FunctionHealth],
    residual_scales: Mapping[str, np.ndarray],
    khat: ParetoK | str,
    convergence: Convergence | None,
    held_out: Mapping[str, Calibration],
    nuts: Comparison | None,
    collapsed: tuple[str, ...],
    coarse: tuple[str, ...],
    integration: Mapping[str, IntegrationError],
    nearby: Mapping[str, Nearby],
    outputs: Mapping[str, OutputFit],
    scales: Mapping[str, Scales],
) -> Iterator[str]:
    """Sentences, most urgent first."""
    for words in coarse:
        yield f"{words}. {REMEDY}"
    if convergence is not None:
        yield from _on_loss(convergence)
    for name, found in scales.items():
        yield from advice_on_scales(name, found)
    yield from advice_on_outputs(outputs, functions, scales)
    for name, health in functions.items():
        yield from _on_function(name, health, name in scales and scales[name].farthest > SAME)
    for name, error in integration.items():
        yield from _on_integral(name, error)
    for name, calibration in held_out.items():
        yield from _on_calibration(name, calibration, outputs.get(name))
    if nuts is not None:
        yield from _on_nuts(nuts)
    for name, health in functions.items():
        told = any(name in fit.functions and fit.says_nothing for fit in outputs.values())
        yield from _on_idle_sets(name, health, told)
        if name not in scales or scales[name].nearest >= ALONE:  # else more points would not help
            yield from _on_residual(name, health)
    for name, v in residual_scales.items():
        if np.median(v) < SMALL_V:
            yield (
                f"The tightened bound of {name} prefers less residual than the prior has (v = {np.median(v):.2g}). More points "
                "would improve the fit."
            )
    for name, gain in nearby.items():
        if gain.neighbors > GAINED:
            yield (
                f"Rows near an input tell more about {name} than the inducing points do. ogp.with_neighbors(f, X, y, noise) would "
                f"improve predictions by {gain.neighbors:.2g} nats per row."
            )
    yield from _on_weights(khat, held_out, nuts, collapsed)


def _on_function(name: str, health: FunctionHealth, is_level: bool) -> Iterator[str]:
    """
    :param is_level: whether the function is the same number at all inputs.
    """
    if is_one := health.num_distinct == 1 and health.residual is not None and len(health.residual) >= LEAST:
        yield (
            f"All {len(health.residual)} inputs of {name} are the same. Is this the column that was meant? Times since 1970 and "
            f"other large numbers are rounded in {health.dtype}: subtract an offset while they are float64 or integers."
        )
    if health.rounding > MUCH_ROUNDED:
        yield (
            f"Up to {percent(min(health.rounding, 1))} of the standard deviation of {name} is rounding: the posterior variance "
            f"there is not far above that of {health.dtype}. Use 64-bit floats (numpyro.enable_x64()), or fewer points."
        )
    far, relative = health.offset
    if health.dtype and np.finfo(health.dtype).eps * relative > OFFSET:
        yield (
            f"{name} is {far:.3g} from the mean of its prior at the data, {relative:.2g} of its standard deviations, so in "
            f"{health.dtype} rounding may move it by as much as its uncertainty. Subtract the mean of the outputs before the "
            "fit (y = y - y.mean()), or add a constant to f(X). Or use 64-bit floats (numpyro.enable_x64())."
        )
    yield from _on_gaussians(name, health)
    for s in health.sets if not (is_one or is_level) else ():  # else points repeat each other wherever they are
        yield from _on_factor(s)


def _on_loss(convergence: Convergence) -> Iterator[str]:
    if convergence.num_not_finite:
        yield f"The loss is not finite: do not trust these parameters. {AT_NAN}"
    if convergence.falling:
        yield "The loss is still falling: take more steps, or a larger learning rate at the start."
    if convergence.rising:
        yield f"The loss is rising: {SMALLER}."
    elif convergence.was_lower:
        yield f"The loss was {convergence.risen:.3g} nats lower earlier in the fit: {SMALLER}."


def _on_gaussians(name: str, health: FunctionHealth) -> Iterator[str]:
    if broken := [s.name for s in health.sets if np.isinf(s.divergence)]:
        yield (
            f"The Gaussian of {listed(broken)} is not finite: the fit broke down, and nothing on this page holds. {AT_NAN}"
        )
    if drawn := [s.name for s in health.sets if np.isnan(s.divergence)]:
        yield (
            f"Of {listed(drawn)} the guide gives one value, not a Gaussian, so standard deviations of {name} lack that of the "
            "guide: intervals from posterior(...) are too narrow. Take AutoSparseGP(model), or predict with draws of the guide."
        )


def _on_factor(s: SetHealth) -> Iterator[str]:
    if s.rescue > 0:
        yield (
            f"The covariance of {s.name} needed extra jitter, {s.rescue:.0e} of the kernel's variance. Its points lie too close to "
            "each other for this lengthscale and dtype. Take fewer points, or float64."
        )
    if s.repeats > MUCH_REPEATED * s.num:
        yield f"{s.repeats} of {s.num} points of {s.name} are redundant given the points before them. Take fewer points."


def _on_integral(name: str, found: IntegrationError) -> Iterator[str]:
    if found.size < MISSED:
        return
    what = "The loss is then no bound" if found.mean > MISSED else "A fit may exploit this error"
    yield (
        f"{found.num_points} quadrature nodes are too few for {name}: the error is {found.size:.2g} nats per point "
        f"({found.mean:+.2g} on average). {what}. The density of y is narrow compared with the spread of f, or has a kink. Take a "
        f"likelihood with a closed form (Laplace, AsymmetricLaplace), or more nodes: "
        f"integrator=ogp.GaussHermite({5 * found.num_points})."
    )


def _on_idle_sets(name: str, health: FunctionHealth, told: bool) -> Iterator[str]:
    """
    :param told: whether other advice already says that the fit explains nothing of an output of this function.
    """
    idle = [s for s in health.sets if s.divergence < IDLE]
    if len(idle) == len(health.sets) and not health.num_mean_only:
        if not told:
            yield (
                f"q of {name} still equals its prior ({sum(s.divergence for s in idle):.1g} nats). Either the data tell nothing "
                f"about {name}, or the fit is stuck or unfinished. Try other starts (init_params=, starts=), more steps, or longer "
                "lengthscales."
            )
        idle = []
    for s in idle:
        drop = "" if health.num_mean_only else ", or drop it with online.drop_sets"
        yield f"{s.name} does nothing (KL {s.divergence:.1g} nats): leave it out{drop}."


def _on_residual(name: str, health: FunctionHealth) -> Iterator[str]:
    if health.residual is None:
        return
    left = np.quantile(health.residual, 0.95)
    if left > MUCH_LEFT:
        yield (
            f"At 5 % of the inputs the inducing points of {name} leave {percent(left)} of the prior variance or more unexplained "
            f"(most at input {health.worst}). Add points there: init.greedy_variance(kernel, X, num, given=Z)."
        )


def _on_calibration(name: str, calibration: Calibration, fit: OutputFit | None) -> Iterator[str]:
    if calibration.pit is None:
        return
    excess = {level: calibration.coverage(level) - level for level in LEVELS}
    clear = [level for level, e in excess.items() if abs(e) > CLEAR * calibration.standard_error(level)]
    if not clear:
        return
    level = clear[0]
    law = "the likelihood may have too light tails"
    if fit is not None and fit.likelihood == "Poisson":
        law = "counts may vary more than Poisson's (likelihoods.NegativeBinomial)"
    narrow = (
        "narrow",
        f"there may be too few inducing points, the noise may be too small, {law}, or q may be too narrow in hyperparameters",
    )
    wide = "wide", "the noise may be too large, or the fit unfinished"
    what, why = narrow if excess[level] < 0 else wide
    if calibration.outside > MUCH_OUTSIDE:
        why = (
            f"{percent(calibration.outside)} of the held-out rows are beyond the range of the inputs that were fitted, where "
            f"predictions go back to the prior and only the kernel says what f does; {why}"
        )
    yield (
        f"Predictive intervals of {name} are too {what}: {percent(level)} intervals contain {percent(calibration.coverage(level))} "
        f"of the held-out data. Possible causes: {why}."
    )


def _on_nuts(nuts: Comparison) -> Iterator[str]:
    if not nuts.rhat < CONVERGED:
        yield f"NUTS has not converged (R-hat {nuts.rhat:.2f}): take more draws before you compare."
        return
    points = [name for name, m in nuts.sites.items() if np.all(m.scale_q == 0)]
    if points:
        are = "is a point estimate" if len(points) == 1 else "are point estimates"
        yield (
            f"{listed(points)} {are} in this guide, but NUTS finds a spread. hyper=AutoNormal, or another autoguide, gives a "
            "distribution."
        )
    far = [name for name, m in nuts.sites.items() if (m.shift > FAR).any()]
    narrow = [name for name, m in nuts.sites.items() if (m.ratio < NARROW).any() and name not in points]
    if far:
        yield f"q and NUTS have different means of {listed(far)}. Has the fit converged?"
    if narrow:
        yield f"q is too narrow in {listed(narrow)}: hyper=AutoMultivariateNormal follows correlations."
    for name, m in nuts.functions.items():
        ratio = float(np.median(m.ratio))
        if not NARROW < ratio < WIDE or np.median(m.shift) > FAR:
            why = "Has the fit converged?"
            if len(nuts.functions) > 1:
                why = "Under the guide different gps are independent. If the data depend only on their sum, compare the sum."
            yield f"q and NUTS disagree about {name} itself: standard deviations of q are {ratio:.2f} times those of NUTS. {why}"


def _on_weights(
    khat: ParetoK | str, held_out: Mapping[str, Calibration], nuts: Comparison | None, collapsed: tuple[str, ...]
) -> Iterator[str]:
    if isinstance(khat, str) or khat.khat < khat.threshold:
        return
    if khat.khat < LIMIT:
        yield "k-hat needs more draws: num_samples=4000."
        return
    tells = [] if held_out else ["Check predictions of held-out data" + ("." if collapsed else " (held_out=).")]
    tells += [] if nuts is not None else ["With few data, compare with NUTS (nuts=200)."]
    if tells:
        fine = (
            "k-hat judges q as a whole. It is large for many inducing variables even if means and variances are right."
        )
        yield " ".join([fine, *tells])
