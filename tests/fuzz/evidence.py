"""log p(y) of a program: in closed form for Gaussian noise, else by importance sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, logsumexp

from tests import oracles
from tests.fuzz.outcomes import OUTCOMES
from tests.fuzz.programs import Program, Site
from tests.fuzz.witnesses import (
    Looks,
    Params,
    all_values,
    jacobian,
    log_density,
    log_priors,
    looks,
    noise_of_entries,
    on_gaussian_scale,
)  # fmt: skip


class Evidence(NamedTuple):
    """log p(y) with a standard error, zero where it is exact."""

    value: float
    error: float


def evidence(program: Program, params: Params, num: int = 20000) -> Evidence | None:
    """log p(y, hyperparameters); ``None`` where importance sampling has too few effective draws."""
    found, calls = looks(program)
    F = all_values(program, calls, params)
    prior = log_priors(program, params)
    L = np.zeros((sum(len(k.seen.L) for k in found), len(F.mean)))
    offset, start = [], 0
    for look in found:
        L[start : start + len(look.seen.L), look.entries] = look.seen.L
        offset.append(look.seen.offset)
        start += len(look.seen.L)
    cov, offset = L @ F.prior @ L.T, np.concatenate(offset)
    for look in found:  # rows drawn one by one are of functions of their own
        if look.seen.pointwise:
            return None
    if all(look.site.outcome in ("gaussian", "log_normal", "warped") for look in found):
        y = np.concatenate([on_gaussian_scale(k.site, k.seen) for k in found])
        s2 = np.concatenate([noise_of_entries(k.site, k.seen) for k in found]) ** 2
        keep = np.concatenate([np.repeat(row_mask(k.site), len(k.seen.L) // len(k.site.y)) for k in found])
        change = np.concatenate([jacobian(k.site, k.seen) for k in found])
        exact = oracles.log_normal(y[keep], offset[keep], cov[np.ix_(keep, keep)] + np.diag(s2[keep]))
        return Evidence(exact - change[keep].sum() + prior, 0.0)
    return sampled_evidence(found, offset, cov, prior, num)


def row_mask(site: Site) -> np.ndarray:
    return np.ones(len(site.y), bool) if site.mask is None else np.array(site.mask)


def sampled_evidence(found: list[Looks], offset, cov, prior: float, num: int) -> Evidence | None:
    """Importance sampling from a wide Student around the mode, in coordinates in which the prior of eta is N(0, I)."""
    values, vectors = np.linalg.eigh(cov)
    kept = values > 1e-12 * values.max()
    root = vectors[:, kept] * np.sqrt(values[kept])
    densities = [log_density(k.site) for k in found]
    masks = [row_mask(k.site) for k in found]

    def log_joint(z: np.ndarray) -> np.ndarray:
        eta, total, start = offset + z @ root.T, -0.5 * (z**2).sum(-1) - z.shape[-1] * 0.5 * np.log(2 * np.pi), 0
        for look, density, mask in zip(found, densities, masks, strict=True):
            size, columns = len(look.seen.L), OUTCOMES[look.site.outcome].columns
            part = eta[..., start : start + size]
            part = part.reshape(*part.shape[:-1], -1, columns) if columns > 1 else part
            entries = density(part)
            total = total + (entries.reshape(*entries.shape[:-1], len(mask), -1).sum(-1) * mask).sum(-1)
            start += size
        return total

    mode, precision = _mode(log_joint, root.shape[1])
    rng, d, df = np.random.default_rng(0), root.shape[1], 6.0
    T = np.linalg.inv(np.linalg.cholesky(precision)).T * 1.05
    e, chi = rng.normal(size=(num, d)), rng.chisquare(df, num) / df
    x = e / np.sqrt(chi)[:, None]
    z = mode + x @ T.T
    log_q = gammaln((df + d) / 2) - gammaln(df / 2) - d / 2 * np.log(df * np.pi) - np.linalg.slogdet(T)[1]
    log_q = log_q - (df + d) / 2 * np.log1p((x**2).sum(-1) / df)
    log_w = log_joint(z) - log_q
    w = np.exp(log_w - log_w.max())
    if not np.isfinite(log_w).all() or w.sum() ** 2 / (w**2).sum() < 0.03 * num:
        return None
    return Evidence(float(logsumexp(log_w) - np.log(num)) + prior, float(w.std() / w.mean() / np.sqrt(num)))


def _mode(log_joint: Callable[[np.ndarray], np.ndarray], d: int) -> tuple[np.ndarray, np.ndarray]:
    """A maximum by Newton's steps, derivatives by differences, and minus the Hessian there."""
    z, h = np.zeros(d), 1e-3
    steps = h * np.eye(d)
    pairs = [(i, j) for i in range(d) for j in range(i)]
    for _ in range(30):
        up, down, here = log_joint(z + steps), log_joint(z - steps), log_joint(z[None])[0]
        gradient = (up - down) / (2 * h)
        H = np.diag((up + down - 2 * here) / h**2)
        if pairs:
            both = [
                log_joint(np.array([z + a * steps[i] + b * steps[j] for i, j in pairs]))
                for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1))
            ]
            for (i, j), value in zip(pairs, (both[0] - both[1] - both[2] + both[3]) / (4 * h**2), strict=True):
                H[i, j] = H[j, i] = value
        eigenvalues, vectors = np.linalg.eigh(-H)
        P = (vectors * np.maximum(eigenvalues, 0.3)) @ vectors.T
        step = np.linalg.solve(P, gradient)
        step *= min(1.0, 2.0 / max(np.abs(step).max(), 1e-12))
        sizes = 0.5 ** np.arange(8)
        ahead = log_joint(z + sizes[:, None] * step)
        z = z + sizes[np.nanargmax(ahead)] * step
        if np.abs(step).max() < 1e-3:
            break
    return z, P
