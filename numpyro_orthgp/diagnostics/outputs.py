"""Distances of outputs from their predictions. They show fits that explain nothing, overdispersion, outliers and duplicates.

A row that was fitted pulls its own prediction towards it, with leverage h = e / s^2: the variance that inducing variables explain
under the best q, over the noise variance. Without the row its distance r would be r / (1 - h), as for any linear smoother with
fixed parameters. That distance has variance s^2 / (1 - h), plus the residual of f, which no row has pulled. For Poisson counts s^2
is 1 / rate, since f is the logarithm of the rate.

The mean of q decides how a row pulls, not its covariance, which may be the prior's, or that of a divergence with a weight. So e is
computed of the noise. Where f(X) is not one function at arrays, e is that of q, unless it exceeds s^2, as that of no best q does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.collapsed.bounds import Bound
from numpyro_orthgp.collapsed.sums import Prior, Rows, project_inputs, sum_over_points
from numpyro_orthgp.diagnostics.layout import Layout, Trace
from numpyro_orthgp.diagnostics.nearby import regressions
from numpyro_orthgp.diagnostics.sites import mask_of
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.diagnostics.tails import tail_gain
from numpyro_orthgp.diagnostics.words import percent
from numpyro_orthgp.functions.arithmetic import draw_scaled, draw_shifted
from numpyro_orthgp.functions.draws import draw_process
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.guides.posterior import functions_of
from numpyro_orthgp.likelihoods import (
    Bernoulli,
    Gaussian,
    HeteroskedasticGaussian,
    Laplace,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from numpyro_orthgp.likelihoods.base import unwrap
from numpyro_orthgp.math.blocks import MAX_ENTRIES, map_blocks
from numpyro_orthgp.math.cholesky import inverse_cholesky
from numpyro_orthgp.math.grouped import added_identity
from numpyro_orthgp.math.products import diagonal, lower_matmul
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["LEAST", "OutputFit", "outputs_of_fit"]

WITH_MEAN = (Bernoulli, Gaussian, HeteroskedasticGaussian, Laplace, NegativeBinomial, Poisson, StudentT)
GAUSSIAN = ("Gaussian", "CollapsedGP")
LEAST = 20  # outputs; fewer say nothing
LITTLE = 0.05  # share of the variance of outputs
SPARED = 0.1  # of the noise, at the least, where a row pulls its own prediction
CLEAR = 4.0  # standard errors
TOO_FAR = 1.3  # dispersion of counts
GAINED, AT_LEAST = 0.03, 6.0  # nats per row, and of all, that heavier tails gain
MOST_ENTRIES = 10_000_000
MEDIAN_OF_NORMAL = 0.6745  # of the absolute value of a standard normal variable


@dataclass(frozen=True)
class OutputFit:
    """Fitted outputs compared with their predictions.

    :param likelihood: class of the likelihood.
    :param functions: names of the gps that it depends on.
    :param num: number of outputs that are not masked.
    :param sd: standard deviation of the outputs.
    :param explained: share of their variance that predictions explain. Gaussian outputs and counts are predicted without their own
        row. Negative if the mean of all outputs would be closer.
    :param noise: standard deviation of Gaussian noise, else NaN.
    :param dispersion: mean squared distance of counts from their means over Poisson's variance, 1 for Poisson counts; else NaN.
    :param dispersion_error: its standard error if the counts are Poisson.
    :param df, gain: the Student t distribution nearest to the standardized distances from Gaussian predictions, and its gain over
        the best normal one, nats per output; infinite and 0 for others.
    :param num_repeated: number of rows that repeat an earlier one in inputs and outputs, if outputs are not whole numbers and
        chance cannot explain it.
    :param mean: of the outputs.
    :param missed: distance of outputs with Gaussian noise from predictions, over what noise and residual allow, median: 1 if these
        are right; NaN for others.
    :param below_zero: share of predictive distributions with Gaussian noise that reach below zero by two standard deviations; 0 for
        others.
    :param values: "whole numbers", "counts" (whole numbers from 0 on), "two values", or "" for others.
    :param num_rarest: number of the rarer one of two values; 0 for others.
    """

    likelihood: str
    functions: tuple[str, ...]
    num: int
    sd: float
    explained: float
    noise: float
    dispersion: float
    dispersion_error: float
    df: float
    gain: float
    num_repeated: int
    mean: float = np.nan
    missed: float = np.nan
    below_zero: float = 0.0
    values: str = ""
    num_rarest: int = 0

    def __str__(self) -> str:
        if not self.sd:
            return f"all outputs are {self.mean:.6g}"
        share = percent(self.explained) if self.explained > 0 else "none"
        noise = "" if np.isnan(self.noise) else f"; noise {self.noise:.3g}, of a standard deviation of {self.sd:.3g}"
        counts = (
            "" if np.isnan(self.dispersion) else f"; dispersion {self.dispersion:.3g} (1 for {self.likelihood} counts)"
        )
        return f"predictions explain {share} of the variance of the data{noise}{counts}"

    @property
    def says_nothing(self) -> bool:
        """Whether predictions explain next to nothing of the outputs."""
        return bool(self.num >= LEAST and self.explained < LITTLE)

    @property
    def overdispersed(self) -> bool:
        """Whether counts are clearly further from their means than Poisson's are."""
        excess = self.dispersion - 1
        return bool(self.num >= LEAST and excess > max(TOO_FAR - 1, CLEAR * self.dispersion_error))

    @property
    def has_outliers(self) -> bool:
        """Whether a Student t distribution is clearly more likely than the normal one."""
        return self.num >= LEAST and self.gain > max(GAINED, AT_LEAST / self.num)


def outputs_of_fit(subject: Subject, arrays: Mapping[str, Any]) -> dict[str, OutputFit]:
    """By name, for outputs whose predictions have a known mean.

    :param arrays: among the model's arguments, by name.
    """
    kinds: dict[str, str] = {}
    layout = subject.layout

    def collect(sites: Trace, fitting: dict[str, GPFunction]) -> dict[str, dict[str, Array]]:
        found = {name: moments for name, moments in _collapsed(layout, sites, fitting)}
        kinds.update(dict.fromkeys(found, "CollapsedGP"))
        for output in layout.outputs:
            fn, y = unwrap(sites[output.site]["fn"])[0], jnp.asarray(sites[output.site]["value"])
            if isinstance(fn, WITH_MEAN):
                kinds[output.name] = type(fn).__name__
                mask, weight = mask_of(sites[output.site]["fn"]), sites[output.site]["scale"]
                seen = jnp.broadcast_to(True if mask is None else mask, y.shape)
                found[output.name] = _moments(fn, y, seen, 1.0 if weight is None else weight)
        return found

    found = jax.device_get(subject.measure(collect))
    sources = {name: tuple(sorted(layout.sources.get(name) or ())) or (name,) for name in found}
    return {
        name: fit
        for name, moments in found.items()
        if (fit := _judged(kinds[name], sources[name], moments, arrays)) is not None
    }


def _collapsed(layout: Layout, sites: Trace, fitting: dict[str, GPFunction]) -> Iterator[tuple[str, dict[str, Array]]]:
    outputs = {o.name: unwrap(sites[o.site]["fn"])[0] for o in layout.outputs if o.name in layout.collapsed}
    if not outputs:
        return
    for name, f, X, y, noise in regressions(layout, sites, functions_of(sites, fitting)):
        if isinstance(outputs.get(name), CollapsedGP):
            m = f(X)
            parts = {"leverage": m.explained / noise**2, "residual": m.residual, "noise": noise}
            yield name, {"y": y, "mean": m.mean, "seen": jnp.ones(y.shape, bool), **parts}


def _moments(fn: Any, y: Array, seen: Array, weight: ArrayLike) -> dict[str, Array]:
    """Quantities of each output, shape of y.

    :param seen: where it is observed.
    :param weight: of each row, shape () or (B,): above one if it stands for others, below one as a power of its density.
    """
    m, found = fn.marginals, {"mean": fn.mean}
    if isinstance(fn, Gaussian):
        found |= {"leverage": _leverage(m, fn.scale, seen, weight), "residual": m.residual_variance, "noise": fn.scale}
    elif isinstance(fn, Poisson) and fn.link == "exp":
        found |= {"leverage": _leverage(m, 1 / jnp.sqrt(fn.mean), seen, weight)}
    return {"y": y, "seen": seen} | {name: jnp.broadcast_to(v, y.shape) for name, v in found.items()}


def _leverage(m: Marginals, noise: Array, seen: Array, weight: ArrayLike) -> Array:
    """How far the prediction of each row follows its own output, for Gaussian noise about m; shape of m."""
    joint, scale = m.joint, jnp.broadcast_to(noise, m.shape)
    weight = jnp.reshape(jnp.asarray(weight), (-1, *(1 for _ in m.shape[1:])))
    while getattr(joint, "func", None) in (draw_shifted, draw_scaled):
        by_factor, (joint, operand) = joint.func is draw_scaled, joint.args
        scale = scale / jnp.abs(operand) if by_factor else scale
    f, X = joint.args if getattr(joint, "func", None) is draw_process else (None, None)
    if f is None or not isinstance(X, jax.Array) or m.shape != seen.shape:
        of_q = jnp.minimum(weight, 1) * m.explained_variance / noise**2
        return jnp.where(of_q < 1, of_q, 0)
    prior, precision = Prior(f.kernel, f.features, f.blocks), jnp.where(seen, weight / scale**2, 0)
    size = max(MAX_ENTRIES // (f.num_inducing * (f.num_latents or 1)), 1)
    rows = Rows(X, None, jnp.zeros((len(X), precision[0].size), X.dtype), precision)
    P = added_identity(sum_over_points(prior, rows, Bound("titsias2009"), size).gram)
    W = inverse_cholesky(P, diagonal(P).mean(-1))  # of all sets together, as their means are

    def explained(X: Array) -> Array:
        return jnp.sum(lower_matmul(W, jnp.concatenate(project_inputs(prior, X), -2)) ** 2, -2).T

    return map_blocks(explained, X, size) * jnp.minimum(weight, 1) / scale**2


def _judged(
    kind: str, functions: tuple[str, ...], moments: dict[str, np.ndarray], arrays: Mapping[str, Any]
) -> OutputFit | None:
    seen = moments["seen"] & np.isfinite(moments["y"]) & np.isfinite(moments["mean"])
    of = {name: np.asarray(v, float)[seen] for name, v in moments.items() if name != "seen"}
    y, mean = of["y"], of["mean"]
    if not len(y) or (np.ptp(y) == 0 and len(y) < LEAST):
        return None
    noise = dispersion = error = np.nan
    df, gain, far = np.inf, 0.0, np.nan
    free = np.maximum(1 - of["leverage"], SPARED) if "leverage" in of else np.ones(len(y))
    if "noise" in of:
        square = of["noise"] ** 2
        noise = float(np.sqrt(square.mean()))
        distances = (y - mean) / np.sqrt(free * square + of["residual"])
        df, gain = tail_gain(distances)
        far = float(np.median(np.abs(distances)) / MEDIAN_OF_NORMAL)
    elif "leverage" in of:
        dispersion = float(np.sum((y - mean) ** 2 / mean) / free.sum())
        error = float(np.sqrt(np.sum(2 + 1 / mean)) / free.sum())
    explained, repeated = np.nan, 0
    if np.ptp(y) > 0:
        explained, repeated = 1 - np.mean(((y - mean) / free) ** 2) / y.var(), _repeated(moments["y"], arrays)
    below = np.mean(mean < 2 * np.sqrt(of["noise"] ** 2 + of["residual"])) if kind in GAUSSIAN else 0.0
    numbers = float(y.std()), float(explained), noise, dispersion, error, df, gain, repeated
    own = float(y.mean()), far, float(below)
    return OutputFit(kind, functions, len(y), *numbers, *own, *_values(y))


def _values(y: np.ndarray) -> tuple[str, int]:
    """What kind of numbers the outputs are, and of two values the number of the rarer one."""
    values, counts = np.unique(y[: 10 * LEAST], return_counts=True)
    if len(values) == 2:
        values, counts = np.unique(y, return_counts=True)
    if len(values) == 2:
        return "two values", int(counts.min())
    if not (y == np.round(y)).all():
        return "", 0
    return "counts" if y.min() >= 0 else "whole numbers", 0


def _repeated(y: np.ndarray, arrays: Mapping[str, Any]) -> int:
    """Rows that repeat an earlier one, where most of those that repeat its inputs do."""
    if y.ndim != 1 or not np.isfinite(y).all() or (y == np.round(y)).all():
        return 0
    rows = [np.asarray(a).reshape(len(y), -1) for a in arrays.values() if np.shape(a)[:1] == y.shape]
    inputs = [a for a in rows if not (a.shape[1] == 1 and np.array_equal(a[:, 0], y))]
    if len(inputs) == len(rows) or not inputs or sum(a.size for a in inputs) > MOST_ENTRIES:
        return 0
    X = np.concatenate(inputs, 1)
    again = len(y) - len(np.unique(X, axis=0))
    both = len(y) - len(np.unique(np.column_stack([X, y]), axis=0))
    return both if 2 * both > again else 0
