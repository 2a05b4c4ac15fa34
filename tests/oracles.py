"""Dense float64 reference formulas, written straight from the papers: numpy and scipy.special only.

Nothing here is shared with the package, so that agreement means something. Explicit inverses and N x N
matrices are the point. A kernel is any callable ``k(A, B) -> (n, m)``; data are rows ``X`` (N, D) and one
output ``y`` (N,); ``noise`` is a *variance*, a number or one per point (N,).

``jitter`` is an absolute amount for the diagonal of K_uu, or a list of one amount per set. For several sets
it means that the inducing values are u_i = f(Z_i) + e_i with independent e_i ~ N(0, jitter_i I), so set i has
the covariance C_i + jitter_i I, where C_i conditions on the earlier *jittered* sets. Nothing is added to
Cov[f, u] or Cov[f, f].

Papers: [S] Shi, Titsias, Mnih 2020 (SOLVE-GP, workshop version with appendices); [T25] Titsias 2025 (new
bounds); [C] Salimbeni et al. 2018 (orthogonally decoupled GPs; appendix); [SG] Snelson, Ghahramani 2006
(FITC).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.linalg import cholesky, inv, slogdet
from scipy.special import gammaln, log_ndtr, logsumexp, roots_legendre

Kernel = Callable[[np.ndarray, np.ndarray], np.ndarray]
LogDensity = Callable[[np.ndarray, np.ndarray], np.ndarray]


@cache
def legendre(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes in [-1, 1] and weights of a Gauss-Legendre rule; NumPy's own take seconds for thousands of nodes."""
    return roots_legendre(num)


class WhitenedSet(NamedTuple):
    """Inducing points Z (M, D) and q(e) = N(loc, cov), e = L^{-1} u_perp, L the Cholesky factor of its prior."""

    Z: np.ndarray
    loc: np.ndarray
    cov: np.ndarray


class MeanOnlySet(NamedTuple):
    """Points H (H, D) with weights a (H,): they move the mean of q(f) by C_fH a and leave its covariance."""

    H: np.ndarray
    a: np.ndarray


# ---------------------------------------------------------------- kernels


def stationary(shape: Callable[[np.ndarray], np.ndarray], variance, lengthscale) -> Kernel:
    """variance * shape(r), r the Euclidean distance after dividing each coordinate by its lengthscale."""

    def kernel(A, B=None):
        if B is None:
            return np.full(len(A), float(variance))
        difference = (A[:, None, :] - B[None, :, :]) / lengthscale
        return variance * shape(np.sqrt((difference**2).sum(-1)))

    return kernel


def rbf(variance=1.0, lengthscale=1.0) -> Kernel:
    return stationary(lambda r: np.exp(-(r**2) / 2), variance, lengthscale)


def matern12(variance=1.0, lengthscale=1.0) -> Kernel:
    return stationary(lambda r: np.exp(-r), variance, lengthscale)


def matern32(variance=1.0, lengthscale=1.0) -> Kernel:
    return stationary(lambda r: (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r), variance, lengthscale)


def matern52(variance=1.0, lengthscale=1.0) -> Kernel:
    return stationary(lambda r: (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r), variance, lengthscale)


KERNELS = {"RBF": rbf, "Matern12": matern12, "Matern32": matern32, "Matern52": matern52}


# ---------------------------------------------------------------- Gaussians


def noise_vector(noise, N: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(noise, float), (N,))


def log_normal(y, mean, cov) -> float:
    """log N(y | mean, cov) with a full covariance."""
    d = y - mean
    return float(-0.5 * (d @ inv(cov) @ d + slogdet(cov)[1] + len(d) * np.log(2 * np.pi)))


def kl_normal(m0, S0, m1, S1) -> float:
    """KL[N(m0, S0) || N(m1, S1)] with full covariances."""
    P, d = inv(S1), m1 - m0
    return float(0.5 * (np.trace(P @ S0) + d @ P @ d - len(d) + slogdet(S1)[1] - slogdet(S0)[1]))


# ---------------------------------------------------------------- exact GP


def exact_log_marginal(k: Kernel, X, y, noise) -> float:
    """log N(y | 0, Kff + S), [T25] Eq. 2."""
    return log_normal(y, 0.0, k(X, X) + np.diag(noise_vector(noise, len(X))))


def exact_predict(k: Kernel, X, y, noise, Xs):
    """Mean and covariance of f(Xs) given y."""
    G = k(Xs, X) @ inv(k(X, X) + np.diag(noise_vector(noise, len(X))))
    return G @ y, k(Xs, Xs) - G @ k(X, Xs)


# ---------------------------------------------------------------- collapsed bounds, one set


def prior_inducing(k: Kernel, Z, jitter=0.0) -> np.ndarray:
    return k(Z, Z) + jitter * np.eye(len(Z))


def nystrom(k: Kernel, X, Z, jitter=0.0):
    """Qff = Kfu Kuu^{-1} Kuf and the residual covariance Kff - Qff, both (N, N)."""
    Q = k(X, Z) @ inv(prior_inducing(k, Z, jitter)) @ k(Z, X)
    return Q, k(X, X) - Q


def dtc(k: Kernel, X, y, Z, noise, jitter=0.0) -> float:
    """log N(y | 0, Qff + S): the first term of [T25] Eq. 8; not a bound."""
    Q, _ = nystrom(k, X, Z, jitter)
    return log_normal(y, 0.0, Q + np.diag(noise_vector(noise, len(X))))


def titsias2009(k: Kernel, X, y, Z, noise, jitter=0.0) -> float:
    """[T25] Eq. 8 = [S] Eq. 7: trace term -sum_i r_i / (2 s_i^2)."""
    r = np.diag(nystrom(k, X, Z, jitter)[1])
    return dtc(k, X, y, Z, noise, jitter) - 0.5 * float(np.sum(r / noise_vector(noise, len(X))))


def titsias2025(k: Kernel, X, y, Z, noise, jitter=0.0) -> float:
    """[T25] Eq. 16; noise that differs per point enters as r_i / s_i^2 (see `tight_covariance`)."""
    r = np.diag(nystrom(k, X, Z, jitter)[1])
    return dtc(k, X, y, Z, noise, jitter) - 0.5 * float(np.sum(np.log1p(r / noise_vector(noise, len(X)))))


def artemev2021(k: Kernel, X, y, Z, noise, jitter=0.0) -> float:
    """[T25] Eq. 36: the best single v for all points."""
    r = np.diag(nystrom(k, X, Z, jitter)[1])
    ratio = np.mean(r / noise_vector(noise, len(X)))
    return dtc(k, X, y, Z, noise, jitter) - 0.5 * len(X) * float(np.log1p(ratio))


def conditional_bound(k: Kernel, X, y, Z, noise, jitter=0.0) -> float:
    """[S] App. B, Eq. 11: Jensen only over f_perp."""
    Q, R = nystrom(k, X, Z, jitter)
    A = Q + np.diag(noise_vector(noise, len(X)))
    return log_normal(y, 0.0, A) - 0.5 * float(np.trace(inv(A) @ R))


def expected_residual(k: Kernel, loc, scale, Z, num=20) -> np.ndarray:
    """E[K_ff - K_fu K_uu^-1 K_uf] at independent inputs N(loc, diag(scale^2)) of two columns, by product Gauss-Hermite rules."""
    t, w = np.polynomial.hermite_e.hermegauss(num)
    nodes = np.stack(np.meshgrid(t, t, indexing="ij"), -1).reshape(-1, 2)
    w = np.outer(w, w).ravel() / w.sum() ** 2
    R, P = np.zeros((len(loc), len(loc))), inv(prior_inducing(k, Z))
    at = [m + s * nodes for m, s in zip(loc, scale, strict=True)]
    for i, x in enumerate(at):
        R[i, i] = w @ (k(x) - np.einsum("sm,mn,sn->s", k(x, Z), P, k(x, Z)))
        for j in range(i):
            R[i, j] = R[j, i] = w @ (k(x, at[j]) - k(x, Z) @ P @ k(Z, at[j])) @ w
    return R


def fitc(k: Kernel, X, y, Z, noise, jitter=0.0) -> float:
    """[SG]: log N(y | 0, Qff + diag(Kff - Qff) + S)."""
    Q, R = nystrom(k, X, Z, jitter)
    return log_normal(y, 0.0, Q + np.diag(np.diag(R) + noise_vector(noise, len(X))))


def upper_bound(k: Kernel, X, y, Z, noise: float, jitter=0.0) -> float:
    """Titsias 2014: an upper bound of log p(y), one noise variance for all points."""
    Q, R = nystrom(k, X, Z, jitter)
    A, eye = Q + noise * np.eye(len(X)), np.eye(len(X))
    quadratic = y @ inv(A + np.trace(R) * eye) @ y
    return float(-0.5 * (slogdet(A)[1] + quadratic + len(X) * np.log(2 * np.pi)))


def upper_bound_per_point(k: Kernel, X, y, Z, noise, jitter=0.0) -> float:
    """The same for noise of each point: of the data y_i / s_i, whose kernel is k(x_i, x_j) / (s_i s_j) and noise 1."""
    s = np.sqrt(noise_vector(noise, len(X)))
    Q, R = (A / np.outer(s, s) for A in nystrom(k, X, Z, jitter))
    eye, scaled = np.eye(len(X)), y / s
    quadratic = scaled @ inv(Q + (1 + np.trace(R)) * eye) @ scaled
    return float(-0.5 * (slogdet(Q + eye)[1] + quadratic + len(X) * np.log(2 * np.pi)) - np.sum(np.log(s)))


def pep(k: Kernel, X, y, Z, noise, alpha: float, jitter=0.0) -> float:
    """Power expectation propagation (Bui, Yan, Turner 2017, Sec. 3.5): FITC for alpha = 1, Titsias 2009 for alpha -> 0."""
    Q, R = nystrom(k, X, Z, jitter)
    r, s = np.diag(R), noise_vector(noise, len(X))
    charge = (1 - alpha) / (2 * alpha) * np.sum(np.log(1 + alpha * r / s))
    return log_normal(y, 0.0, Q + np.diag(alpha * r + s)) - float(charge)


COLLAPSED = {
    "titsias2009": titsias2009,
    "titsias2025": titsias2025,
    "artemev2021": artemev2021,
    "conditional": conditional_bound,
    "fitc": fitc,
    "dtc": dtc,
}


def optimal_q(k: Kernel, X, y, Z, noise, jitter=0.0, *, whitened=False):
    """Mean and covariance of the best q(u), [T25] Eq. 29 (Titsias 2009); whitened: of e = chol(Kuu)^{-1} u.

    The same for "titsias2009", "titsias2025" and "artemev2021". For FITC pass ``noise + r``.
    """
    Kuu, Kuf = prior_inducing(k, Z, jitter), k(Z, X)
    S = inv(np.diag(noise_vector(noise, len(X))))
    B = inv(Kuu + Kuf @ S @ Kuf.T)
    mean, cov = Kuu @ B @ Kuf @ S @ y, Kuu @ B @ Kuu
    return whiten(mean, cov, Kuu) if whitened else (mean, cov)


def whiten(mean, cov, K):
    """Coordinates e = chol(K)^{-1} u of the Gaussian N(mean, cov) of u."""
    W = inv(cholesky(K))
    return W @ mean, W @ cov @ W.T


def fitc_noise(k: Kernel, X, Z, noise, jitter=0.0) -> np.ndarray:
    """The noise with which DTC is FITC: s_i^2 + r_i."""
    return noise_vector(noise, len(X)) + np.diag(nystrom(k, X, Z, jitter)[1])


def matrix_sqrt(A) -> np.ndarray:
    """Symmetric root of a positive semidefinite matrix."""
    values, vectors = np.linalg.eigh(A)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def tight_covariance(R, noise, v) -> np.ndarray:
    """Cov q(f | u) of [T25] Eq. 13, per-point noise scaled out first (exactly Eq. 13 if all noises are equal).

    R = S^{1/2} R~ S^{1/2}, S = diag(noise); the answer is S^{1/2} R~^{1/2} diag(v) R~^{1/2} S^{1/2}.
    """
    s = np.sqrt(noise_vector(noise, len(R)))
    root = matrix_sqrt(R / np.outer(s, s))
    return np.outer(s, s) * (root @ np.diag(noise_vector(v, len(R))) @ root)


# ---------------------------------------------------------------- collapsed bounds, two sets


def orthogonal_process(k: Kernel, Z, jitter=0.0) -> Kernel:
    """C(A, B) = k(A, B) - k(A, Z) Kuu^{-1} k(Z, B), [S] Eq. 15."""
    P = inv(prior_inducing(k, Z, jitter))
    return lambda A, B: k(A, B) - k(A, Z) @ P @ k(Z, B)


def solvegp_perp(k: Kernel, X, Z, O, m_v, S_v, jitter=(0.0, 0.0)):
    """Mean and covariance of q(f_perp), [S] Eqs. 17-18; m_v, S_v unwhitened, of v_perp."""
    C = orthogonal_process(k, Z, jitter[0])
    Cvv = C(O, O) + jitter[1] * np.eye(len(O))
    G = C(X, O) @ inv(Cvv)
    return G @ m_v, C(X, X) + G @ (S_v - Cvv) @ G.T, kl_normal(m_v, S_v, np.zeros(len(O)), Cvv)


def solvegp_collapsed(k: Kernel, X, y, Z, O, noise, m_v, S_v, jitter=(0.0, 0.0), *, conditional=False):
    """[S] Eq. 21; ``conditional`` replaces its trace term as [S] Eq. 11 does that of Eq. 7."""
    mean, S_perp, kl = solvegp_perp(k, X, Z, O, m_v, S_v, jitter)
    s = noise_vector(noise, len(X))
    A = nystrom(k, X, Z, jitter[0])[0] + np.diag(s)
    trace = np.trace(inv(A) @ S_perp) if conditional else np.sum(np.diag(S_perp) / s)
    return log_normal(y, mean, A) - 0.5 * float(trace) - kl


def solvegp_collapsed_prior_covariance(k: Kernel, X, y, Z, O, noise, m_v, jitter=(0.0, 0.0)) -> float:
    """[S] Eq. 22: S_v = Cvv, only the mean is learned."""
    C = orthogonal_process(k, Z, jitter[0])
    P = inv(C(O, O) + jitter[1] * np.eye(len(O)))
    Q, R = nystrom(k, X, Z, jitter[0])
    s = noise_vector(noise, len(X))
    fit = log_normal(y, C(X, O) @ P @ m_v, Q + np.diag(s))
    return fit - 0.5 * float(np.sum(np.diag(R) / s)) - 0.5 * float(m_v @ P @ m_v)


def solvegp_optimal_qv(k: Kernel, X, y, Z, O, noise, jitter=(0.0, 0.0)):
    """The (m_v, S_v), unwhitened, that maximise [S] Eq. 21 (set its two derivatives to zero)."""
    C = orthogonal_process(k, Z, jitter[0])
    Cvv = C(O, O) + jitter[1] * np.eye(len(O))
    G, s = C(X, O) @ inv(Cvv), noise_vector(noise, len(X))
    A = inv(nystrom(k, X, Z, jitter[0])[0] + np.diag(s))
    m_v = inv(inv(Cvv) + G.T @ A @ G) @ G.T @ A @ y
    return m_v, inv(inv(Cvv) + G.T @ np.diag(1 / s) @ G)


def solvegp_optimal_qu(k: Kernel, X, y, Z, O, noise, m_v, jitter=(0.0, 0.0)):
    """The best q(u), unwhitened, given q(v_perp): that of one set for the data y - m_perp, [S] Eqs. 19-20."""
    m_perp = solvegp_perp(k, X, Z, O, m_v, np.eye(len(O)), jitter)[0]
    return optimal_q(k, X, y - m_perp, Z, noise, jitter[0])


# ---------------------------------------------------------------- q(f) of any number of sets


def _jitters(sets: Sequence[WhitenedSet], jitter) -> np.ndarray:
    return np.broadcast_to(np.asarray(jitter, float), (len(sets),))


def union(k: Kernel, sets: Sequence[WhitenedSet], jitter=0.0):
    """All points; prior covariance, q mean and q covariance of all inducing values u_1, ..., u_K together.

    [S] Eqs. 25-26 and the structured mean and covariance below them, applied once per set: given the earlier
    sets u_<, u_i = W u_< + v_i with W = K_i< K_<<^{-1} and v_i independent of u_< under q, v_i ~ N(L_i m_i,
    L_i S_i L_i^T).
    """
    Z = np.concatenate([s.Z for s in sets])
    sizes = [len(s.Z) for s in sets]
    K = k(Z, Z) + np.diag(np.repeat(_jitters(sets, jitter), sizes))
    mean, cov = np.zeros(len(Z)), np.zeros((len(Z), len(Z)))
    start = 0
    for s, size in zip(sets, sizes, strict=True):
        old, new = slice(0, start), slice(start, start + size)
        W = K[new, old] @ inv(K[old, old])
        L = cholesky(K[new, new] - W @ K[old, new])
        mean[new] = W @ mean[old] + L @ s.loc
        cov[new, old] = W @ cov[old, old]
        cov[old, new] = cov[new, old].T
        cov[new, new] = W @ cov[old, old] @ W.T + L @ s.cov @ L.T
        start += size
    return Z, K, mean, cov


def residual_covariance(k: Kernel, sets: Sequence[WhitenedSet], X, jitter=0.0) -> np.ndarray:
    """Cov[f | u_1, ..., u_K], (N, N); its diagonal is r."""
    Z, K, _, _ = union(k, sets, jitter)
    return k(X, X) - k(X, Z) @ inv(K) @ k(Z, X)


def q_f(k: Kernel, sets: Sequence[WhitenedSet], X, jitter=0.0, mean_only: MeanOnlySet | None = None):
    """Mean (N,) and covariance (N, N) of q(f(X)): the conditional GP averaged over q(union).

    [T25] Eq. 21, [S] Eqs. 23-24.

    A mean-only set adds (K_fH - K_fu Kuu^{-1} K_uH) a to the mean, [C] App. A.2.
    """
    Z, K, m, S = union(k, sets, jitter)
    G = k(X, Z) @ inv(K)
    mean = G @ m
    if mean_only is not None:
        H, a = mean_only
        mean = mean + (k(X, H) - G @ k(Z, H)) @ a
    return mean, k(X, X) - G @ k(Z, X) + G @ S @ G.T


def with_neighbors(k: Kernel, sets: Sequence[WhitenedSet], X, y, noise, x, rows, mean_only: MeanOnlySet | None = None):
    """Mean, explained and residual variance of f at one input x (1, D) given u and outputs of some rows: p(f | u, y_b) q(u)."""
    X, y, S = np.concatenate([x, X[rows]]), y[rows], np.diag(noise[rows])
    mean, cov = q_f(k, sets, X, mean_only=mean_only)
    D = residual_covariance(k, sets, X)
    g = np.linalg.solve(D[1:, 1:] + S, D[1:, 0])
    w = np.append(1.0, -g)
    return mean[0] + g @ (y - mean[1:]), w @ (cov - D) @ w, D[0, 0] - g @ D[1:, 0]


def kl_q(k: Kernel, sets: Sequence[WhitenedSet], jitter=0.0, mean_only: MeanOnlySet | None = None) -> float:
    """KL[q || p] of all inducing values together; a mean-only set adds a^T C_HH a / 2, [C] App. A.1."""
    Z, K, m, S = union(k, sets, jitter)
    kl = kl_normal(m, S, np.zeros(len(Z)), K)
    if mean_only is not None:
        H, a = mean_only
        kl += 0.5 * float(a @ (k(H, H) - k(H, Z) @ inv(K) @ k(Z, H)) @ a)
    return kl


# ---------------------------------------------------------------- uncollapsed bounds


def residual_cost(v, N: int) -> float:
    """KL[q(f | u) || p(f | u)] = sum_i (v_i - log v_i - 1) / 2, [T25] Lemma 3.1."""
    v = noise_vector(v, N)
    return float(0.5 * np.sum(v - np.log(v) - 1))


def expected_log_normal(y, mean, var, noise) -> np.ndarray:
    """E_{N(f | mean, var)} log N(y | f, noise), per point."""
    return -0.5 * (np.log(2 * np.pi * noise) + ((y - mean) ** 2 + var) / noise)


def gaussian_terms(k: Kernel, sets, X, y, noise, jitter=0.0, mean_only=None, v=1.0) -> np.ndarray:
    """The N data terms, Gaussian likelihood, less the cost of v; v="optimal" is v_i = 1 / (1 + r_i / s_i^2).

    [T25] Eq. 20 for v = 1, Eq. 15 before q(u) is optimised for any v, Eq. 18 for the best v.
    """
    mean, cov = q_f(k, sets, X, jitter, mean_only)
    r, s = np.diag(residual_covariance(k, sets, X, jitter)), noise_vector(noise, len(X))
    v = 1 / (1 + r / s) if isinstance(v, str) else noise_vector(v, len(X))
    return expected_log_normal(y, mean, np.diag(cov) - r + v * r, s) - 0.5 * (v - np.log(v) - 1)


def elbo_gaussian(k: Kernel, sets, X, y, noise, jitter=0.0, mean_only=None, v=1.0) -> float:
    """Uncollapsed bound, Gaussian likelihood: `gaussian_terms` less `kl_q`."""
    terms = gaussian_terms(k, sets, X, y, noise, jitter, mean_only, v)
    return float(np.sum(terms)) - kl_q(k, sets, jitter, mean_only)


def spherical_moments(k: Kernel, sets, X, jitter=0.0, mean_only=None, v=1.0):
    """Mean and variance (N,) of q(f_i) in [T25] Prop. 3.5: explained variance + v r."""
    mean, cov = q_f(k, sets, X, jitter, mean_only)
    r = np.diag(residual_covariance(k, sets, X, jitter))
    return mean, np.diag(cov) - r + v * r


def elbo(k: Kernel, sets, X, y, log_density: LogDensity, jitter=0.0, mean_only=None, v=1.0) -> float:
    """Uncollapsed bound for any p(y | f), [T25] Eq. 23 (Eq. 20 for v = 1)."""
    mean, var = spherical_moments(k, sets, X, jitter, mean_only, v)
    fit = np.sum(expected_log_density(log_density, y, mean, var))
    return float(fit) - residual_cost(v, len(X)) - kl_q(k, sets, jitter, mean_only)


# ---------------------------------------------------------------- one-dimensional integrals


def _trapezoid(mean, var, num_nodes: int, width: float):
    """Nodes (num_nodes, N) and log weights (num_nodes, 1) for E_{N(mean, var)}: trapezoid rule on +-width sd.

    For smooth integrands this rule converges geometrically, and nothing else here uses Gauss-Hermite.
    """
    t = np.linspace(-width, width, num_nodes)
    log_w = -0.5 * t**2 - 0.5 * np.log(2 * np.pi) + np.log(t[1] - t[0])
    return mean + np.sqrt(var) * t[:, None], log_w[:, None]


def expected_log_density(log_density: LogDensity, y, mean, var, *, num_nodes=4001, width=12.0) -> np.ndarray:
    """E_{N(f | mean, var)} log p(y | f), per point (N,)."""
    f, log_w = _trapezoid(mean, var, num_nodes, width)
    return np.sum(np.exp(log_w) * log_density(y, f), axis=0)


def log_predictive(log_density: LogDensity, y, mean, var, *, num_nodes=4001, width=12.0) -> np.ndarray:
    """log E_{N(f | mean, var)} p(y | f), per point (N,)."""
    f, log_w = _trapezoid(mean, var, num_nodes, width)
    return logsumexp(log_w + log_density(y, f), axis=0)


def log_bernoulli_logit(y, f):
    """y in {0, 1}, p(y = 1 | f) = 1 / (1 + exp(-f))."""
    return -np.logaddexp(0.0, -(2 * y - 1) * f)


def log_bernoulli_probit(y, f):
    """y in {0, 1}, p(y = 1 | f) = Phi(f), without any jitter."""
    return log_ndtr((2 * y - 1) * f)


def log_poisson(exposure=1.0) -> LogDensity:
    """Counts with rate exposure * exp(f)."""
    return lambda y, f: y * (f + np.log(exposure)) - exposure * np.exp(f) - gammaln(y + 1)


def log_student_t(df: float, scale: float) -> LogDensity:
    """Student's t around f."""
    const = gammaln((df + 1) / 2) - gammaln(df / 2) - 0.5 * np.log(df * np.pi) - np.log(scale)
    return lambda y, f: const - (df + 1) / 2 * np.log1p(((y - f) / scale) ** 2 / df)


def log_gaussian(noise) -> LogDensity:
    return lambda y, f: -0.5 * (np.log(2 * np.pi * noise) + (y - f) ** 2 / noise)


# ---------------------------------------------------------------- softmax, three classes


def softmax3(mean, var, *, num_nodes=64, width=9.0):
    """E[log softmax(f)] and E[softmax(f)], both (N, 3), for independent f_c ~ N(mean_c, var_c), c = 1, 2, 3.

    Tensor Gauss-Legendre rule with num_nodes^3 nodes on +-width standard deviations.
    """
    t, w = legendre(num_nodes)
    t, w = width * t, width * w * np.exp(-0.5 * (width * t) ** 2) / np.sqrt(2 * np.pi)
    T = np.stack(np.meshgrid(t, t, t, indexing="ij"), -1).reshape(-1, 3)
    W = (w[:, None, None] * w[:, None] * w).ravel()
    log_p, p = [], []
    for m, s in zip(mean, np.sqrt(var), strict=True):
        f = m + s * T
        log_softmax = f - np.log(np.exp(f - f.max(-1, keepdims=True)).sum(-1, keepdims=True))
        log_softmax -= f.max(-1, keepdims=True)
        log_p.append(W @ log_softmax)
        p.append(W @ np.exp(log_softmax))
    return np.array(log_p), np.array(p)


def largest_of_normals(mean, scale, c: int, *, num_nodes=16):
    """P(f_c is the largest) of independent normals f_j, and its derivatives with respect to their means.

    E[prod_j Phi((m_c + s_c t - m_j) / s_j)] by Gauss-Legendre between points half a width apart about each step of the product.
    """
    mean, scale = np.asarray(mean, float), np.asarray(scale, float)
    others = np.delete(np.arange(len(mean)), c)
    steps = (mean[others, None] - mean[c] + scale[others, None] * np.arange(-10, 10.5, 0.5)) / scale[c]
    ends = np.unique(np.clip(np.append(steps, np.arange(-12, 12.5, 0.5)), -12, 12))
    t, w = legendre(num_nodes)
    half = np.diff(ends)[:, None] / 2
    nodes, weights = (ends[:-1, None] + half * (1 + t)).ravel(), (half * w).ravel()
    z = (mean[c] - mean[others] + scale[c] * nodes[:, None]) / scale[others]
    log_p = log_ndtr(z)
    weights = weights * np.exp(log_p.sum(1) - nodes**2 / 2) / np.sqrt(2 * np.pi)
    slopes = weights @ (np.exp(-(z**2) / 2 - log_p) / np.sqrt(2 * np.pi)) / scale[others]
    gradient = np.zeros(len(mean))
    gradient[others], gradient[c] = -slopes, slopes.sum()
    return weights.sum(), gradient


# ---------------------------------------------------------------- linear functionals of f

# Kernels of rows that say what they are of: all of the above takes them for inputs.


def of_derivatives(variance, lengthscale) -> Kernel:
    """RBF; rows (x, n) of shape (N, 2 D), for the derivative of order n_d along each x_d.

    With g(t) = exp(-t^2 / 2) and g^(n) = (-1)^n He_n g (Hermite polynomials of the probabilists), each column gives
    d^a/dx^a d^b/dx'^b g((x - x') / l) = (-1)^b l^-(a + b) g^(a + b)((x - x') / l).
    """

    def k(A, B):
        D = A.shape[1] // 2
        K = np.full((len(A), len(B)), float(variance))
        for d in range(D):
            t = (A[:, None, d] - B[None, :, d]) / lengthscale
            a, b = (rows[:, D + d].astype(int) for rows in (A, B))
            n = a[:, None] + b[None, :]
            He = np.select([n == i for i in range(5)], [np.polynomial.hermite_e.HermiteE.basis(i)(t) for i in range(5)])
            K = K * (-1.0) ** (n + b[None, :]) * lengthscale ** (-1.0 * n) * He * np.exp(-(t**2) / 2)
        return K

    return k


def of_sums(k: Kernel) -> Kernel:
    """Rows of shape (N, Q, D + 1): sums over Q nodes, whose last column holds their weights."""

    def summed(A, B):
        left, right = (rows.reshape(-1, rows.shape[-1]) for rows in (A, B))
        K = left[:, -1:] * k(left[:, :-1], right[:, :-1]) * right[:, -1]
        return K.reshape(len(A), A.shape[1], len(B), B.shape[1]).sum((1, 3))

    return summed


def of_terms(kernels: Sequence[Kernel]) -> Kernel:
    """Rows (x, j) of shape (N, D + 1): values of f_j, or for j = 0 of f = f_1 + f_2 + ..., independent a priori."""

    def k(A, B):
        a, b = A[:, -1:], B[:, -1]
        return sum(
            k(A[:, :-1], B[:, :-1]) * np.isin(a, (0, j)) * np.isin(b, (0, j)) for j, k in enumerate(kernels, start=1)
        )

    return k
