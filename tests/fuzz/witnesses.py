"""Dense float64 answers for a program: moments of q(f), its bound and log p(y). NumPy only, nothing of the package.

All values F of all functions at all inputs that the program looks at are one Gaussian vector, with a dense covariance. A view is a
matrix L, so eta = offset + L F is Gaussian too, and each bound is a sum of integrals over one of its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.linalg import block_diag
from scipy.special import erf

from tests import oracles
from tests.fuzz import covariances
from tests.fuzz.outcomes import OUTCOMES
from tests.fuzz.programs import GP, Program, Site
from tests.fuzz.views import Call, Seen

Params = Mapping[str, np.ndarray]
DEFAULT_JITTER = {"float32": 1e-6, "float64": 1e-10}


# ---------------------------------------------------------------- one function


class Belief(NamedTuple):
    """What is known of one latent function: its kernel, whitened sets, their jitter, mean-only points."""

    kernel: covariances.Dense
    sets: list[oracles.WhitenedSet]
    jitter: np.ndarray
    mean_only: oracles.MeanOnlySet | None


def hyper_values(g: GP, params: Params) -> dict[str, np.ndarray]:
    values = {}
    for h in g.hypers():
        name = h.name if h.how == "param" else f"{h.name}_auto_loc"
        values[h.name] = np.asarray(params[name], float)
    return values


def belief(g: GP, params: Params, p: int, dtype: str = "float64") -> Belief:
    """That of latent function p."""
    kernel = covariances.dense(g.tree, hyper_values(g, params), p)
    relative = DEFAULT_JITTER[dtype] if g.jitter is None else g.jitter
    sets, jitters = [], []
    for i in range(len(g.sets)):
        Z = _of_latent(np.asarray(params.get(f"{g.name}_Z{i}", g.sets[i]), float), p, 2)
        mean, cov = _whitened(g, i, params, p)
        sets.append(oracles.WhitenedSet(Z, mean, cov))
        scale = np.diag(kernel(Z, Z)).mean()
        jitters.append(relative * (scale if scale > 0 else 1.0))
    mean_only = None
    if g.mean_only is not None:
        H = _of_latent(np.asarray(params.get(f"{g.name}_H", g.mean_only), float), p, 2)
        a = _of_latent(np.asarray(params[f"{g.name}.u{len(g.sets)}_weights"], float), p, 1)
        mean_only = oracles.MeanOnlySet(H, a)
    return Belief(kernel, sets, np.array(jitters), mean_only)


def _of_latent(value: np.ndarray, p: int, ndim: int) -> np.ndarray:
    return value[p] if value.ndim > ndim else value


def _whitened(g: GP, i: int, params: Params, p: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of q(e_i)."""
    name = f"{g.name}.u{i}"
    if name in params:  # a value, as NUTS has
        value = _of_latent(np.asarray(params[name], float), p, 1)
        return value, np.zeros((len(value), len(value)))
    if f"{name}_auto_loc" in params:
        mean, scale = (_of_latent(np.asarray(params[f"{name}_auto_{part}"], float), p, 1) for part in ("loc", "scale"))
        return mean, np.diag(scale**2)
    mean = _of_latent(np.asarray(params[f"{name}_loc"], float), p, 1)
    if g.covariances[i] == "prior":
        return mean, np.eye(len(mean))
    if g.covariances[i] == "diagonal":
        return mean, np.diag(_of_latent(np.asarray(params[f"{name}_scale"], float), p, 1) ** 2)
    if g.covariances[i] == "low_rank":
        s, U, V = (
            _of_latent(np.asarray(params[f"{name}_{part}"], float), p, n)
            for part, n in (("scale", 1), ("left", 2), ("right", 2))
        )
        R = np.diag(s) + U @ V.T
        return mean, R @ R.T
    T = np.tril(_of_latent(np.asarray(params[f"{name}_scale_tril"], float), p, 2))
    return mean, T @ T.T


def divergence(b: Belief) -> float:
    """KL of the whitened sets, and what mean-only points pay; of values that are given minus their log density."""
    kl = 0.0
    for s in b.sets:
        if not s.cov.any():
            kl += 0.5 * (s.loc @ s.loc + len(s.loc) * np.log(2 * np.pi))
            continue
        kl += 0.5 * (np.trace(s.cov) + s.loc @ s.loc - len(s.loc) - np.linalg.slogdet(s.cov)[1])
    if b.mean_only is not None:
        H, a = b.mean_only
        kl += 0.5 * a @ oracles.residual_covariance(b.kernel, b.sets, H, b.jitter) @ a
    return float(kl)


# ---------------------------------------------------------------- all values of all functions


class Values(NamedTuple):
    """The Gaussian of F.

    :param prior: its prior covariance.
    :param explained: covariance that comes from inducing variables.
    :param residual: covariance that none explains, with v = 1.
    :param v: of each entry.
    """

    prior: np.ndarray
    mean: np.ndarray
    explained: np.ndarray
    residual: np.ndarray
    v: np.ndarray


def all_values(program: Program, calls: list[Call], params: Params, tight: bool = True) -> Values:
    """F at all calls, in the order of :mod:`tests.fuzz.views`."""
    owner = []  # of each entry: function, latent, row among all rows of that function
    rows: dict[str, list[Call]] = {}
    for call in calls:
        start = sum(c.num for c in rows.get(call.function, []))
        rows.setdefault(call.function, []).append(call)
        P = program.gp(call.function).latents
        owner += [(call.function, p, start + i) for i in range(call.num) for p in range(P)]
    size = len(owner)
    prior, mean, explained, residual = (
        np.zeros((size, size)),
        np.zeros(size),
        np.zeros((size, size)),
        np.zeros((size, size)),
    )
    v = np.ones(size)
    for name, parts in rows.items():
        g = program.gp(name)
        terms = [(), *sorted({call.term for call in parts} - {()})]
        X = np.concatenate([_told(call.X, terms.index(call.term)) for call in parts])
        W = block_diag(*[np.eye(call.num) if call.weights is None else call.weights for call in parts])
        for p in range(g.latents):
            mine = np.array([i for i, (f, q, _) in enumerate(owner) if (f, q) == (name, p)])
            at = np.array([owner[i][2] for i in mine])
            b, block = _of_terms(g, belief(g, params, p, program.dtype), params, p, terms), np.ix_(mine, mine)
            m, S = oracles.q_f(b.kernel, b.sets, X, b.jitter, b.mean_only)
            R = oracles.residual_covariance(b.kernel, b.sets, X, b.jitter)
            m, S, R = W @ m, W @ S @ W.T, W @ R @ W.T
            prior[block] = (W @ b.kernel(X, X) @ W.T)[np.ix_(at, at)]
            mean[mine], explained[block], residual[block] = m[at], (S - R)[np.ix_(at, at)], R[np.ix_(at, at)]
            scale = params.get(f"{name}_residual_scale")
            if tight and g.residual == "tight" and scale is not None:
                v[mine] = _of_latent(np.asarray(scale, float), p, 0)
    return Values(prior, mean, explained, residual, v)


def _told(X: np.ndarray, term: int = 0) -> np.ndarray:
    """Inputs with a last column that says what term rows are of."""
    return np.concatenate([X, np.full((len(X), 1), float(term))], 1)


def _of_terms(g: GP, b: Belief, params: Params, p: int, terms: list[tuple[int, ...]]) -> Belief:
    """The same belief where inputs have that column."""
    kernel = covariances.dense_of_terms(g.tree, hyper_values(g, params), p, terms)
    sets = [s._replace(Z=_told(s.Z)) for s in b.sets]
    return b._replace(kernel=kernel, sets=sets, mean_only=b.mean_only and b.mean_only._replace(H=_told(b.mean_only.H)))


class Looks(NamedTuple):
    """What one site sees: its view, and F of all sites with the entries that are its own."""

    site: Site
    seen: Seen
    entries: slice


def looks(program: Program) -> tuple[list[Looks], list[Call]]:
    found, calls, start = [], [], 0
    for site in program.sites:
        seen = program.sees(site)
        size = seen.L.shape[1]
        found.append(Looks(site, seen, slice(start, start + size)))
        calls += seen.calls
        start += size
    return found, calls


# ---------------------------------------------------------------- the bound


class Bound(NamedTuple):
    """The ELBO with exact integrals, and with the 20 nodes of Gauss and Hermite that the package's default has."""

    exact: float
    by_nodes: float


def bound(program: Program, params: Params, tight: bool = True) -> Bound:
    """The expected loss, negative: divergences, priors of hyperparameters at their values, costs and data terms."""
    found, calls = looks(program)
    F = all_values(program, calls, params, tight)
    exact = by_nodes = 0.0
    for look in found:
        terms = data_terms(program, look, F, tight)
        exact, by_nodes = exact + terms.exact, by_nodes + terms.by_nodes
    rest = log_priors(program, params)
    for g in program.gps:
        rest -= sum(divergence(belief(g, params, p, program.dtype)) for p in range(g.latents))
    return Bound(exact + rest, by_nodes + rest)


def log_priors(program: Program, params: Params) -> float:
    """Of hyperparameters that are estimated by their mode; LogNormal(0, 0.7)."""
    total = 0.0
    for g in program.gps:
        for h in g.hypers():
            if h.how == "sample":
                value = np.asarray(params[f"{h.name}_auto_loc"], float)
                total += np.sum(_log_normal(np.log(value), 0.0, 0.7) - np.log(value))
    return float(total)


def _log_normal(y, m, s):
    return -0.5 * np.log(2 * np.pi) - np.log(s) - 0.5 * ((y - m) / s) ** 2


def data_terms(program: Program, look: Looks, F: Values, tight: bool = True) -> Bound:
    """Sum over rows of E[log p(y | eta)], less what v costs."""
    site, seen = look.site, look.seen
    mean, prior_v, v = F.mean[look.entries], F.residual[look.entries, look.entries], F.v[look.entries]
    explained = F.explained[look.entries, look.entries]
    root = np.sqrt(v)
    residual = root[:, None] * prior_v * root  # v is one number for each function, so this is v C
    drawn = np.concatenate([np.full(c.num * program.gp(c.function).latents, c.drawn) for c in seen.calls])
    of_one_y = np.kron(np.eye(len(drawn) // seen.together), np.ones((seen.together, seen.together))) > 0
    together = np.outer(drawn, drawn) & (not seen.pointwise) | of_one_y
    explained, residual = explained * together, residual * together
    eta = seen.offset + seen.L @ mean
    weight = row_weights(program, site)
    is_tight = tight and any(program.gp(c.function).residual == "tight" for c in seen.calls if not c.drawn)
    paid = np.sum((v - np.log(v) - 1)[drawn]) / 2 * (program.scale if program.plate == "more" else 1)
    if is_tight and closed_form(program, site, seen):
        s2 = noise_of_entries(site, seen) ** 2
        r = np.diag(seen.L @ np.diag(np.where(drawn, 0, np.diag(prior_v))) @ seen.L.T)
        e = np.diag(seen.L @ (explained + residual * np.outer(drawn, drawn)) @ seen.L.T)
        fit = oracles.expected_log_normal(on_gaussian_scale(site, seen), eta, e, s2) - 0.5 * np.log1p(r / s2)
        fit -= jacobian(site, seen)
        return Bound(*(2 * (float(weight @ fit.reshape(len(weight), -1).sum(1)) - paid,)))
    cost = point_costs(program, site, seen, np.where(drawn, 1, v)) if is_tight else np.zeros(len(weight))
    terms = expectations(site, seen, eta, seen.L @ (explained + residual) @ seen.L.T)
    return Bound(*(float(weight @ (t - cost)) - paid for t in terms))


def row_weights(program: Program, site: Site) -> np.ndarray:
    mask = np.ones(len(site.y)) if site.mask is None else np.array(site.mask, float)
    return mask * program.scale


def closed_form(program: Program, site: Site, seen: Seen) -> bool:
    """Whether each row has its own best v."""
    return site.how == "ours" and site.outcome in ("gaussian", "log_normal", "warped") and not seen.mixes


def point_costs(program: Program, site: Site, seen: Seen, v: np.ndarray) -> np.ndarray:
    """(v - log v - 1) / 2 of each row's functions; outputs that mix functions, and have a y each, pay for all of them each."""
    cost, rows = (v - np.log(v) - 1) / 2, len(site.y)
    # Entries of F are ordered by call, then row, then function.
    of_row = cost.reshape(rows, -1) if len(seen.calls) == 1 else cost.reshape(-1, rows).T
    if OUTCOMES[site.outcome].columns > 1:
        return of_row.sum(1)
    return np.abs(np.sign(seen.L)).dot(cost).reshape(rows, -1).sum(1)


def noise_of_entries(site: Site, seen: Seen) -> np.ndarray:
    """The standard deviation of Gaussian noise of each entry of eta."""
    rows = len(site.y)
    return np.repeat(np.broadcast_to(np.array(dict(site.numbers)["s"], float), (rows,)), len(seen.L) // rows)


def on_gaussian_scale(site: Site, seen: Seen) -> np.ndarray:
    """y as a row for each entry of eta, on the scale of a Gaussian."""
    y = np.array(site.y, float).ravel()
    return np.log(y) if site.outcome in ("log_normal", "warped") else y


def jacobian(site: Site, seen: Seen) -> np.ndarray:
    y = np.array(site.y, float).ravel()
    return np.log(y) if site.outcome in ("log_normal", "warped") else np.zeros(len(y))


# ---------------------------------------------------------------- integrals over one row


def log_density(site: Site) -> Callable[[np.ndarray], np.ndarray]:
    """log p(y | eta) of each entry of y, flat; eta of shape (..., E) or (..., N, K)."""
    outcome = OUTCOMES[site.outcome]
    y = np.array(site.y, float).ravel()
    numbers = {n: np.array(v, float) for n, v in site.numbers}
    per_row = {
        n: np.repeat(v, len(y) // len(v), 0) if v.ndim and len(v) == len(site.y) and n != "cuts" else v
        for n, v in numbers.items()
    }
    return lambda eta: outcome.log_density(y, eta, **per_row)


def expectations(site: Site, seen: Seen, mean: np.ndarray, cov: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E[log p(y_i | eta_i)] of each row, exactly and by 20 nodes per dimension, both (N,)."""
    outcome, density, rows = OUTCOMES[site.outcome], log_density(site), len(site.y)
    if outcome.bound is not None:
        numbers = {n: np.array(v, float) for n, v in site.numbers}
        shape = (rows, outcome.columns)
        value = outcome.bound(np.array(site.y, float), mean.reshape(shape), np.diag(cov).reshape(shape), **numbers)
        return value, value
    if outcome.columns == 1:
        sd = np.sqrt(np.maximum(np.diag(cov), 0))
        both = [(w @ density(mean + sd * t[:, None])).reshape(rows, -1).sum(1) for t, w in (FINE, NODES)]
        if site.outcome == "laplace":  # its kink is beyond the rule of equal steps
            both[0] = laplace(site, mean, sd).reshape(rows, -1).sum(1)
        return both[0], both[1]
    K = outcome.columns
    roots = np.stack([root_of(cov[i * K : (i + 1) * K, i * K : (i + 1) * K]) for i in range(rows)])
    answers = []
    for t, w in (COARSE[K], NODES):
        grid = np.stack(np.meshgrid(*[t] * K, indexing="ij"), -1).reshape(-1, K)
        weights = np.prod(np.stack(np.meshgrid(*[w] * K, indexing="ij"), -1), -1).ravel()
        eta = mean.reshape(rows, K) + np.einsum("nij,sj->sni", roots, grid)
        answers.append(weights @ density(eta))
    return answers[0], answers[1]


def laplace(site: Site, mean: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """E[-log 2s - |y - f| / s], the mean of a folded normal."""
    d, s = np.array(site.y, float).ravel() - mean, float(dict(site.numbers)["s"])
    sd = np.maximum(sd, 1e-300)
    folded = sd * np.sqrt(2 / np.pi) * np.exp(-((d / sd) ** 2) / 2) + d * erf(d / sd / np.sqrt(2))
    return -np.log(2 * s) - folded / s


def root_of(S: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(S)
    return vectors * np.sqrt(np.maximum(values, 0))


def trapezoid(num: int, width: float) -> tuple[np.ndarray, np.ndarray]:
    t = np.linspace(-width, width, num)
    w = np.exp(-(t**2) / 2) / np.sqrt(2 * np.pi) * (t[1] - t[0])
    return t, w


def _hermite(num: int) -> tuple[np.ndarray, np.ndarray]:
    t, w = np.polynomial.hermite_e.hermegauss(num)
    return t, w / np.sqrt(2 * np.pi)


FINE, NODES = trapezoid(4001, 12.0), _hermite(20)
COARSE = {2: _hermite(40), 3: _hermite(24)}


# ---------------------------------------------------------------- predictions


def predictions(program: Program, params: Params, name: str, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (P, B) and covariance (P, B, B) of q(f(X)), v = 1."""
    g = program.gp(name)
    both = []
    for p in range(g.latents):
        b = belief(g, params, p, program.dtype)
        both.append(oracles.q_f(b.kernel, b.sets, X, b.jitter, b.mean_only))
    return np.stack([m for m, _ in both]), np.stack([S for _, S in both])
