"""Programs in which something random goes into a function: latent inputs, a layer below, a hyperparameter with a distribution.

Their bound is an average over it of bounds of the plain kind; in one dimension for each row, so NumPy integrates it on a grid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import logsumexp

from tests import oracles
from tests.fuzz import draw, witnesses
from tests.fuzz.covariances import Hyper, listed
from tests.fuzz.evidence import Evidence
from tests.fuzz.outcomes import OUTCOMES
from tests.fuzz.programs import GP, HEADER, declare, guide, points_of, show

KINDS = {"latent": 3, "expected": 2, "deep": 4, "hyper": 2}
# None whose density falls exponentially: averages over random inputs would have no variance to speak of.
OUTCOMES_HERE = ("gaussian", "gaussian", "bernoulli", "binomial", "softplus_poisson", "student", "log_normal")


@dataclass(frozen=True)
class Nested:
    """A choice; see :class:`tests.fuzz.programs.Program` for what has the same name.

    :param kind: "latent" (f at a draw of latent inputs), "expected" (``f.expected``), "deep" (g at f(X) + slope X) or "hyper" (a
        hyperparameter under ``AutoNormal``).
    :param written: whether a deep GP is written as ``DeepGP`` or as two calls.
    """

    seed: int
    kind: str
    X: Any
    gps: tuple[GP, ...]
    slope: float
    written: bool
    outcome: str
    numbers: tuple[tuple[str, Any], ...]
    y: Any
    params: tuple[tuple[str, Any], ...]
    guide: str = "auto"
    dtype: str = "float64"

    @property
    def num(self) -> int:
        return len(self.X)

    @property
    def random(self) -> bool:
        return self.kind != "expected"

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def last(self) -> GP:
        return self.gps[-1]

    def gp(self, name: str) -> GP:
        return next(g for g in self.gps if g.name == name)

    def values(self) -> dict[str, np.ndarray]:
        return {name: np.array(value, float) for name, value in self.params}

    def source(self) -> str:
        return source(self)


def nested(seed: int) -> Nested:
    """The program of a seed."""
    rng = np.random.default_rng([56, seed])
    kind = draw.pick(rng, KINDS)
    N = int(rng.integers(3, 5))
    X = draw.points(rng, N, 1, False)
    P = 2 if kind in ("latent", "expected") and draw.chance(rng, 0.4) else None
    names = "fg" if kind == "deep" else "f"
    gps = tuple(replace(draw.draw_gp(rng, name, X, P, "hand", False, "float64"), jitter=1e-6) for name in names)
    if kind == "hyper":
        tree = (draw.pick(rng, {"RBF": 1, "Matern32": 1}), Hyper("f_lengthscale", 1.0, "sample"))
        gps = (replace(gps[0], tree=("scaled", tree, draw.rounded(rng.uniform(0.5, 2)))),)
    if kind == "expected":
        gps = tuple(
            replace(
                g, mean_only=None, tree=draw.expectable(rng), sets=tuple(_shared(Z) for Z in g.sets), told=P is not None
            )
            for g in gps
        )
    outcome = "gaussian" if kind == "expected" else str(rng.choice(OUTCOMES_HERE))
    numbers = OUTCOMES[outcome].numbers(rng)
    shape = (N,) if P is None else (N, P)
    y = np.asarray(OUTCOMES[outcome].draw(rng, rng.normal(size=shape), **numbers), float)
    y = np.maximum(np.round(y, 2), 0.01) if outcome == "log_normal" else y
    slope = draw.rounded(rng.uniform(-1, 1))
    made = Nested(
        seed, kind, X, gps, slope, draw.chance(rng, 0.6), outcome, tuple(numbers.items()), draw.rounded(y), ()
    )
    params = dict(draw.draw_params(rng, made))
    if kind in ("latent", "expected"):
        params |= {
            "x_loc": draw.rounded(rng.normal(size=(N, 1))),
            "x_scale": draw.rounded(rng.uniform(0.2, 0.9, (N, 1))),
        }
    if kind == "hyper":
        params |= {
            "f_lengthscale_auto_loc": draw.rounded(rng.normal() * 0.4),
            "f_lengthscale_auto_scale": draw.rounded(rng.uniform(0.1, 0.6)),
        }
    return replace(made, params=tuple(params.items()))


def _shared(Z: Any) -> Any:
    """Points that all functions share."""
    return Z[0] if np.ndim(Z) == 3 else Z


# ---------------------------------------------------------------- text


def source(program: Nested) -> str:
    lines = [HEADER.format(dtype=program.dtype)]
    if any("function" in repr(g.tree) for g in program.gps):
        from tests.fuzz.programs import AS_FUNCTION

        lines.append(AS_FUNCTION)
    lines += [f"X = A({listed(program.X)})", f"y = A({listed(program.y)})"]
    for g in program.gps:
        lines += [f"{name} = A({listed(Z)})" for name, Z in points_of(g).items()]
    lines += ["", "def model():"] + ["    " + line for g in program.gps for line in declare(g)]
    numbers = {n: show(v) for n, v in program.numbers}
    fn = (OUTCOMES[program.outcome].ours or "").format(f="eta", **numbers)
    fn += ".to_event(1)" if np.ndim(program.y) == 2 else ""
    lines += [f'    with numpyro.plate("rows", {program.num}):']
    lines += ["        " + line for line in body(program)] + [f'        numpyro.sample("y", {fn}, obs=y)', ""]
    options = {
        "latent": ', latents={"x": None}',
        "expected": ', latents={"x": None}',
        "hyper": ", hyper=AutoNormal",
    }.get(program.kind, "")
    (line,) = guide(program)
    lines.append(line.removesuffix(")") + options + ")")
    lines.append(f"params = {{{', '.join(f'{n!r}: A({listed(v)})' for n, v in program.params)}}}")
    return "\n".join(lines) + "\n"


def body(program: Nested) -> list[str]:
    if program.kind == "hyper":
        return ["eta = f(X)"]
    if program.kind in ("latent", "expected"):
        call = "f.expected(x)" if program.kind == "expected" else "f(x)"
        return [f'x = ogp.latent_inputs("x", {program.num}, 1)', f"eta = {call}"]
    if program.written:
        return [f"eta = ogp.DeepGP([f, g], means=[A([[{program.slope}]])])(X)"]
    return [f"h = f(X).sample() + {program.slope} * X[:, 0]", "eta = g(h[:, None])"]


# ---------------------------------------------------------------- the bound


def bound(program: Nested, params: witnesses.Params) -> witnesses.Bound:
    if program.kind == "hyper":
        return averaged_over_hyper(program, params)
    rest = -sum(witnesses.divergence(witnesses.belief(g, params, p)) for g in program.gps for p in range(g.latents))
    loc, scale, cost = inputs(program, params)
    if program.kind in ("latent", "expected"):
        rest -= 0.5 * np.sum(scale**2 + loc**2 - 1 - 2 * np.log(scale))
    rest -= cost
    t, w = GRID
    exact = by_nodes = rest
    for i in range(program.num):
        for p in range(program.last.latents):
            moments = at_inputs(program, program.last, params, p, (loc[i] + scale[i] * t)[:, None])
            if program.kind == "expected":
                mean, explained, residual, v = moments
                first = w @ mean
                moments = tuple(
                    np.atleast_1d(a) for a in (first, w @ (explained + mean**2) - first**2, w @ residual, v)
                )
                terms = row_terms(program, i, p, *moments)
                exact, by_nodes = exact + terms[0][0], by_nodes + terms[1][0]
                continue
            terms = row_terms(program, i, p, *moments)
            exact, by_nodes = exact + float(w @ terms[0]), by_nodes + float(w @ terms[1])
    return witnesses.Bound(float(exact), float(by_nodes))


def inputs(program: Nested, params: witnesses.Params) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean and standard deviation of each row's random input to the last function, and what v of the layer below costs."""
    if program.kind in ("latent", "expected"):
        return params["x_loc"][:, 0], params["x_scale"][:, 0], 0.0
    X = np.array(program.X)
    mean, explained, residual, v = at_inputs(program, program.gps[0], params, 0, X)
    cost = len(X) * float(np.sum(v - np.log(v) - 1)) / 2
    return mean + program.slope * X[:, 0], np.sqrt(explained + v * residual), cost


def at_inputs(program: Nested, g: GP, params: witnesses.Params, p: int, X: np.ndarray) -> tuple[np.ndarray, ...]:
    """Mean, explained and residual variance of g's function p at inputs, and v."""
    b = witnesses.belief(g, params, p)
    mean, cov = oracles.q_f(b.kernel, b.sets, X, b.jitter, b.mean_only)
    residual = np.diag(oracles.residual_covariance(b.kernel, b.sets, X, b.jitter))
    v = np.ones(())
    if g.residual == "tight":
        v = np.asarray(params[f"{g.name}_residual_scale"])
    return mean, np.diag(cov) - residual, residual, v[p] if v.ndim else v


def row_terms(program: Nested, i: int, p: int, mean, explained, residual, v) -> tuple[np.ndarray, np.ndarray]:
    """E[log p(y_ip | f)] less the cost of v, at each of several moments; exactly and by 20 nodes."""
    y = np.array(program.y, float).reshape(program.num, -1)[i, p]
    numbers = {n: np.array(value, float) for n, value in program.numbers}
    density = OUTCOMES[program.outcome].log_density
    if program.last.residual == "tight" and program.outcome in ("gaussian", "log_normal"):
        s2, change = numbers["s"] ** 2, np.log(y) if program.outcome == "log_normal" else 0.0
        z = np.log(y) if program.outcome == "log_normal" else y
        fit = oracles.expected_log_normal(z, mean, explained, s2) - 0.5 * np.log1p(residual / s2) - change
        return fit, fit
    sd = np.sqrt(np.maximum(explained + v * residual, 0))
    cost = (v - np.log(v) - 1) / 2
    both = [
        w @ density(np.full(len(mean), y), mean + sd * t[:, None], **numbers) - cost for t, w in (FINE, witnesses.NODES)
    ]
    return both[0], both[1]


def averaged_over_hyper(program: Nested, params: witnesses.Params) -> witnesses.Bound:
    """E over the lengthscale of what the bound is at each."""
    g, X, total = program.gps[0], np.array(program.X), np.zeros(2)
    loc, scale = float(params["f_lengthscale_auto_loc"]), float(params["f_lengthscale_auto_scale"])
    t, w = witnesses.NODES
    for node, weight in zip(t, w, strict=True):
        given = {**params, "f_lengthscale_auto_loc": np.exp(loc + scale * node)}
        moments = at_inputs(program, g, given, 0, X)
        for i in range(program.num):
            terms = row_terms(program, i, 0, *(m[i : i + 1] if np.ndim(m) else m for m in moments))
            total += weight * np.array([terms[0][0], terms[1][0]])
        total -= weight * witnesses.divergence(witnesses.belief(g, given, 0))
    kl = np.log(0.7 / scale) + (scale**2 + loc**2) / (2 * 0.49) - 0.5
    return witnesses.Bound(*(total - kl).tolist())


GRID, FINE = witnesses.trapezoid(241, 8.0), witnesses.trapezoid(401, 9.0)


# ---------------------------------------------------------------- log p(y)


def evidence(program: Nested, params: witnesses.Params, num: int = 2000) -> Evidence | None:
    """log p(y) for Gaussian noise and one function, by draws of what is random."""
    if program.outcome not in ("gaussian", "log_normal") or np.ndim(program.y) == 2:
        return None
    y, change = np.array(program.y), 0.0
    if program.outcome == "log_normal":
        y, change = np.log(y), -np.log(y).sum()
    noise, rng, N, X = dict(program.numbers)["s"] ** 2, np.random.default_rng(0), program.num, np.array(program.X)
    g = program.last
    if program.kind == "hyper":
        log_scales = rng.normal(size=num) * 0.7
        kernels = (witnesses.belief(g, {**params, "f_lengthscale_auto_loc": np.exp(s)}, 0).kernel for s in log_scales)
        log_w = np.array([oracles.log_normal(y, 0.0, k(X, X) + noise * np.eye(N)) for k in kernels])
    else:
        kernel = witnesses.belief(g, params, 0).kernel
        if program.kind == "deep":
            K = witnesses.belief(program.gps[0], params, 0).kernel(X, X)
            inner, log_ratio = (
                program.slope * X[:, 0] + rng.normal(size=(num, N)) @ witnesses.root_of(K).T,
                np.zeros(num),
            )
        else:
            inner, log_ratio = rng.normal(size=(num, N)), np.zeros(num)
        log_w = (
            np.array([oracles.log_normal(y, 0.0, kernel(h[:, None], h[:, None]) + noise * np.eye(N)) for h in inner])
            + log_ratio
        )
    w = np.exp(log_w - log_w.max())
    if w.sum() ** 2 / (w**2).sum() < 0.03 * num:
        return None
    return Evidence(float(logsumexp(log_w) - np.log(num) + change), float(w.std() / w.mean() / np.sqrt(num)))
