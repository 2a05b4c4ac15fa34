"""Programs of :class:`CollapsedGP`: its bounds, the other end of the bracket, predictions, and the Bayesian GP-LVM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import TraceMeanField_ELBO
from numpyro.infer.util import log_density

from tests import oracles
from tests.fuzz import covariances, draw, witnesses
from tests.fuzz.covariances import listed
from tests.fuzz.programs import AS_FUNCTION, GP, HEADER, declare, points_of

BOUNDS = ("titsias2009", "titsias2025", "artemev2021", "conditional", "fitc", "dtc", "pep")
ARE_BOUNDS = ("titsias2009", "titsias2025", "artemev2021", "conditional")


@dataclass(frozen=True)
class Collapsed:
    """A choice; see :class:`tests.fuzz.programs.Program` for what has the same name.

    :param noise: standard deviation, one or one per row.
    :param loc: prior mean of each row, or ``None``.
    :param observed: which rows, or ``None``.
    :param latent: whether inputs are latent and have a Gaussian.
    :param y: (N,) or (N, 2).
    """

    seed: int
    X: Any
    gps: tuple[GP, ...]
    bound: str
    noise: Any
    loc: Any
    observed: tuple[bool, ...] | None
    latent: bool
    block_size: int | None
    y: Any
    params: tuple[tuple[str, Any], ...]
    guide: str = "hand"
    dtype: str = "float64"

    @property
    def num(self) -> int:
        return len(self.X)

    def values(self) -> dict[str, np.ndarray]:
        return {name: np.array(value, float) for name, value in self.params}

    def source(self) -> str:
        return source(self)


def collapsed(seed: int) -> Collapsed:
    """The program of a seed."""
    rng = np.random.default_rng([90, seed])
    N, latent = int(rng.integers(4, 7)), draw.chance(rng, 0.25)
    D = 1 if latent else int(rng.integers(1, 3))
    X = draw.points(rng, N, D, False)
    g = replace(draw.draw_gp(rng, "f", X, None, "hand", False, "float64"), mean_only=None, residual="prior")
    bound = str(rng.choice(BOUNDS))
    if latent:
        g = replace(g, tree=draw.expectable(rng), sets=g.sets[:1], jitter=1e-6)
        bound = str(rng.choice(("titsias2009", "titsias2025")))
    if bound in ("fitc", "dtc", "pep", "conditional"):
        g = replace(g, sets=g.sets[:1])
    g = replace(g, sets=g.sets[:2], covariances=g.covariances[: len(g.sets)])
    per_row = draw.chance(rng, 0.3) and bound != "artemev2021" and not latent
    noise = draw.rounded(rng.uniform(0.3, 1.0, N if per_row else ()))
    loc = draw.rounded(rng.normal(size=N)) if draw.chance(rng, 0.25) else None
    observed = tuple((rng.uniform(size=N) < 0.75).tolist()) if draw.chance(rng, 0.25) and not latent else None
    observed = None if observed is None or sum(observed) < 2 else observed
    y = draw.rounded(rng.normal(size=(N, 2) if draw.chance(rng, 0.3) else N))
    made = Collapsed(seed, X, (g,), bound, noise, loc, observed, latent, 2 if draw.chance(rng, 0.2) else None, y, ())
    params = {n: v for n, v in draw.draw_params(rng, made) if ".u" not in n}
    if latent:
        params |= {
            "x_loc": draw.rounded(rng.normal(size=(N, 1))),
            "x_scale": draw.rounded(rng.uniform(0.2, 0.9, (N, 1))),
        }
    return replace(made, params=tuple(params.items()))


def source(program: Collapsed) -> str:
    g = program.gps[0]
    lines = [HEADER.format(dtype=program.dtype)]
    if "function" in covariances.names(g.tree):
        lines.append(AS_FUNCTION)
    lines += [f"X = A({listed(program.X)})", f"y = A({listed(program.y)})"]
    lines += [f"{name} = A({listed(Z)})" for name, Z in points_of(g).items()]
    *hypers, statement = declare(g)
    _, kernel_and_sets = statement.split('ogp.gp("f", ')
    arguments = kernel_and_sets.removesuffix(")")
    jitter = ""
    if ", jitter=" in arguments:
        arguments, jitter = arguments.rsplit(", jitter=", 1)
        jitter = f", jitter={jitter}"
    kernel = covariances.code(g.tree)
    inducing = arguments.removeprefix(kernel + ", ")
    options = f", bound={program.bound!r}" + (", alpha=0.6" if program.bound == "pep" else "")
    if program.loc is not None:
        column = "[:, None]" if np.ndim(program.y) == 2 else ""
        options += f", loc=A({listed(program.loc)}){column}"
    if program.observed is not None:
        options += f", observed=np.array({list(program.observed)})"
    if program.block_size is not None:
        options += f", block_size={program.block_size}"
    noise = f"A({listed(program.noise)})"
    x = "X"
    lines += ["", "def model():", *("    " + h for h in hypers)]
    if program.latent:
        x = "x"
        lines.append(f'    x = ogp.latent_inputs("x", {program.num}, 1)')
    lines.append(f"    law = ogp.CollapsedGP({kernel}, {x}, {inducing}, {noise}{options}{jitter})")
    lines += ['    numpyro.sample("y", law, obs=y)', "    return law", ""]
    lines.append('guide = ogp.AutoSparseGP(model, latents={"x": None})' if program.latent else "guide = None")
    lines.append(f"params = {{{', '.join(f'{n!r}: A({listed(v)})' for n, v in program.params)}}}")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- comparison


def look_at(run: Any) -> None:
    """Compare a program, as :func:`tests.fuzz.properties.check` does."""
    program, space = run.program, run.space
    model, guide = space["model"], space["guide"]
    X_new = np.array([[-1.3] * len(program.X[0]), list(program.X[0]), [0.4] * len(program.X[0])])

    def whole(params: Any) -> dict[str, Any]:
        if program.latent:
            return {"value": -TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide)}
        from numpyro import handlers

        law = handlers.block(handlers.substitute(model, params))()
        f = law.posterior(space["y"])(X_new)
        values = {"mean": f.mean, "variance": f.variance, "upper": law.upper_bound(space["y"])}
        if "gradient" in run.properties:
            values["gradient"] = jax.grad(lambda p: log_density(model, (), {}, p)[0])(params)
        return {**values, "value": log_density(model, (), {}, params)[0]}

    function = jax.jit(whole)
    params = {n: jnp.asarray(v) for n, v in space["params"].items()}
    values = jax.tree.map(np.asarray, function(params))
    k, sets, jitter, X, columns, noise = dense(program)
    if program.latent:
        return run.expect("bound", values["value"], latent_bound(program))
    exact = sum(oracles.exact_log_marginal(k, X, y, noise) for y in columns)
    value = sum(dense_bound(program, k, X, y, noise, sets, jitter) for y in columns)
    run.expect("bound", values["value"], value)
    if program.bound in ARE_BOUNDS and not values["value"] <= exact + 1e-7 * (1 + abs(exact)):
        run.fail("evidence", f"{program.bound} is {values['value']:.9g}, log p(y) {exact:.9g}")
    if not values["upper"] >= exact - 1e-7 * (1 + abs(exact)):
        run.fail("evidence", f"upper bound {values['upper']:.9g}, log p(y) {exact:.9g}")
    if len(sets) == 1 and program.bound != "pep":
        compare_predictions(run, program, values, (k, sets, jitter, X, columns, noise), X_new)
    if "gradient" in run.properties and params:
        run.slope(lambda p: float(function(p)["value"]), params, values["gradient"])
    return None


def dense(program: Collapsed) -> tuple[Any, ...]:
    """Kernel, sets, jitter, and the observed rows: inputs, columns of y less loc, noise variance."""
    g, params = program.gps[0], program.values()
    k = covariances.dense(g.tree, witnesses.hyper_values(g, params))
    relative = witnesses.DEFAULT_JITTER["float64"] if g.jitter is None else g.jitter
    sets = [np.array(params.get(f"f_Z{i}", Z), float) for i, Z in enumerate(g.sets)]
    jitter = [relative * np.diag(k(Z, Z)).mean() for Z in sets]
    keep = np.ones(program.num, bool) if program.observed is None else np.array(program.observed)
    y = np.array(program.y, float).reshape(program.num, -1)
    y = y - (0 if program.loc is None else np.array(program.loc)[:, None])
    noise = np.broadcast_to(np.array(program.noise, float) ** 2, (program.num,))[keep]
    return k, sets, jitter, np.array(program.X)[keep], y[keep].T, noise


def dense_bound(program: Collapsed, k, X, y, noise, sets, jitter) -> float:
    if len(sets) == 1:
        if program.bound == "pep":
            return oracles.pep(k, X, y, sets[0], noise, 0.6, jitter[0])
        return oracles.COLLAPSED[program.bound](k, X, y, sets[0], noise, jitter[0])
    best = oracles.solvegp_optimal_qv(k, X, y, *sets, noise, jitter)
    value = oracles.solvegp_collapsed(k, X, y, *sets, noise, *best, jitter)
    both = [oracles.WhitenedSet(Z, np.zeros(len(Z)), np.eye(len(Z))) for Z in sets]
    ratio = np.diag(oracles.residual_covariance(k, both, X, jitter)) / noise
    gain = {"titsias2009": 0.0, "titsias2025": np.sum(ratio - np.log1p(ratio)) / 2}
    gain["artemev2021"] = (np.sum(ratio) - len(ratio) * np.log1p(ratio.mean())) / 2
    return value + gain[program.bound]


def compare_predictions(run: Any, program: Collapsed, values: Any, given: Any, X_new: np.ndarray) -> None:
    k, (Z,), (jitter,), X, columns, noise = given
    if program.bound == "fitc":
        noise = oracles.fitc_noise(k, X, Z, noise, jitter)
    means = []
    for y in columns:
        loc, cov = oracles.optimal_q(k, X, y, Z, noise, jitter, whitened=True)
        mean, S = oracles.q_f(k, [oracles.WhitenedSet(Z, loc, cov)], X_new, jitter)
        means.append(mean)
    mean = np.stack(means, -1) if np.ndim(program.y) == 2 else means[0]
    variance = np.broadcast_to(np.diag(S)[:, None], mean.shape) if mean.ndim == 2 else np.diag(S)
    run.expect("posterior", values["mean"], mean)
    run.expect("posterior", values["variance"], variance)


def latent_bound(program: Collapsed) -> float:
    """Titsias and Lawrence 2010 by numerical psi statistics; its tightened form, Titsias 2025, App. B.5."""
    k, (Z,), (jitter,), _, columns, noise = dense(program)
    params, s2 = program.values(), float(noise[0])
    loc, scale = params["x_loc"][:, 0], params["x_scale"][:, 0]
    t, w = witnesses.trapezoid(241, 8.0)
    K = k(Z, Z) + jitter * np.eye(len(Z))
    psi1, psi2, residual = [], np.zeros_like(K), []
    for m, s in zip(loc, scale, strict=True):
        x = (m + s * t)[:, None]
        A = k(x, Z)
        second = A.T @ (w[:, None] * A)
        psi1.append(w @ A)
        psi2 += second
        residual.append(w @ np.diag(k(x, x)) - np.trace(np.linalg.solve(K, second)))
    psi1, ratio = np.stack(psi1), np.array(residual) / s2
    B = K + psi2 / s2
    total = -0.5 * np.sum(scale**2 + loc**2 - 1 - 2 * np.log(scale))
    for y in columns:
        fit = psi1.T @ y / s2
        total += -0.5 * (
            len(y) * np.log(2 * np.pi * s2) + np.linalg.slogdet(B)[1] - np.linalg.slogdet(K)[1] + y @ y / s2
        )
        total += 0.5 * fit @ np.linalg.solve(B, fit)
        total -= 0.5 * (ratio.sum() if program.bound == "titsias2009" else np.log1p(ratio).sum())
    return float(total)


Look = Callable[[Any], None]
