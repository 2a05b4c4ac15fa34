"""The dense oracles against values computed by other libraries, and against each other."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.linalg import cholesky, inv

from tests import oracles as orc
from tests.oracles import MeanOnlySet, WhitenedSet

CLOSE = dict(rtol=1e-9, atol=1e-10)


def load(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def array(x) -> np.ndarray:
    return np.array(x, float)


def close(actual, desired, **tolerance):
    np.testing.assert_allclose(actual, array(desired), **{**CLOSE, **tolerance})


def kernel_of(inputs, name=None):
    scale = array(inputs.get("lengthscales", inputs.get("lengthscale")))
    return orc.KERNELS[name or inputs.get("kernel", "RBF")](inputs["variance"], scale)


def as_whitened(Z, K, loc, scale_tril, whitened: bool) -> WhitenedSet:
    """A set from the stored (loc, scale_tril); `whitened` says what those numbers mean."""
    cov = scale_tril @ scale_tril.T
    return WhitenedSet(Z, loc, cov) if whitened else WhitenedSet(Z, *orc.whiten(loc, cov, K))


def stored_sets(inputs, whitened: bool, output: int = 0) -> list[WhitenedSet]:
    """The set Z, and O if there is one, with q of the given output."""
    k, Z = kernel_of(inputs), array(inputs["Z"])
    names = ("qu_mu", "qu_sqrt") if "O" in inputs else ("q_mu", "q_sqrt")
    loc, tril = array(inputs[names[0]])[:, output], array(inputs[names[1]])[output]
    sets = [as_whitened(Z, k(Z, Z), loc, tril, whitened)]
    if "O" in inputs:
        O = array(inputs["O"])
        loc, tril = array(inputs["qv_mu"])[:, output], array(inputs["qv_sqrt"])[output]
        sets.append(as_whitened(O, orc.orthogonal_process(k, Z)(O, O), loc, tril, whitened))
    return sets


# ---------------------------------------------------------------- case 1: exact GP, SGPR, FITC


@pytest.mark.parametrize("M", [7, 15])
@pytest.mark.parametrize("name", ["RBF", "Matern12", "Matern32", "Matern52"])
def test_exact_sgpr_fitc(golden, name, M):
    case = load(golden, "case01_sgpr_fitc_snelson")
    inputs, out = case["inputs"], case["outputs"][f"{name}_M{M}"]
    high = case["crosscheck"]["highprec"][f"{name}_M{M}"]
    X, y, Xs, Z = array(inputs["X"]), array(inputs["y"])[:, 0], array(inputs["Xtest"]), array(inputs["Z"][str(M)])
    k, noise = kernel_of(inputs, name), inputs["noise_variance"]

    close(orc.exact_log_marginal(k, X, y, noise), out["log_marginal_likelihood"], rtol=1e-8)
    mean, cov = orc.exact_predict(k, X, y, noise, Xs)
    close(mean, array(out["exact_f_mean"])[:, 0], rtol=1e-8)
    close(np.diag(cov), array(out["exact_f_var"])[:, 0], rtol=1e-8)

    close(orc.titsias2009(k, X, y, Z, noise), high["sgpr_elbo"])
    close(orc.titsias2009(k, X, y, Z, noise), out["sgpr_elbo"])
    close(orc.dtc(k, X, y, Z, noise), high["dtc_log_lik"])
    close(orc.upper_bound(k, X, y, Z, noise), high["sgpr_upper_bound"], rtol=1e-8)
    close(orc.fitc(k, X, y, Z, noise), out["fitc_log_lik"])
    close(np.trace(orc.nystrom(k, X, Z)[1]), high["trace_Kff_minus_Qff"], rtol=1e-8)

    # Explicit inverses at RBF, M = 15 cost 1e-9 of the mean (absolute), within the stored tolerance.
    stored = dict(rtol=1e-8, atol=1e-8)
    m, S = orc.optimal_q(k, X, y, Z, noise)
    close(m, array(out["sgpr_qu_mean"])[:, 0])
    close(S, out["sgpr_qu_cov"])
    sets = [WhitenedSet(Z, *orc.optimal_q(k, X, y, Z, noise, whitened=True))]
    mean, cov = orc.q_f(k, sets, Xs)
    close(mean, array(out["sgpr_f_mean"])[:, 0], **stored)
    close(np.diag(cov), array(out["sgpr_f_var"])[:, 0], **stored)
    close(cov[:10, :10], out["sgpr_f_cov_first10"], **stored)

    fitc = orc.optimal_q(k, X, y, Z, orc.fitc_noise(k, X, Z, noise), whitened=True)
    mean, cov = orc.q_f(k, [WhitenedSet(Z, *fitc)], Xs)
    close(mean, array(out["fitc_f_mean"])[:, 0], **stored)
    close(np.diag(cov), array(out["fitc_f_var"])[:, 0], **stored)


# ---------------------------------------------------------------- case 2: SVGP, several likelihoods

LIKELIHOODS = {
    "gaussian": lambda p: orc.log_gaussian(p["variance"]),
    "bernoulli_logit": lambda p: orc.log_bernoulli_logit,
    "bernoulli_probit_exact": lambda p: orc.log_bernoulli_probit,
    "poisson_exp": lambda p: orc.log_poisson(p["binsize"]),
}


@pytest.mark.parametrize("whitened", [True, False])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_svgp(golden, name, whitened):
    case, which = load(golden, f"case02_svgp_{name}"), "whitened" if whitened else "unwhitened"
    inputs, out, true = case["inputs"], case["outputs"][which], case["crosscheck"][which]["true"]
    k, X, y = kernel_of(inputs), array(inputs["X"]), array(inputs["y"])[:, 0]
    sets, log_density = stored_sets(inputs, whitened), LIKELIHOODS[name](inputs["likelihood"])

    mean, cov = orc.q_f(k, sets, X)
    var = np.diag(cov)
    close(mean, array(out["f_mean"])[:, 0])
    close(var, array(out["f_var"])[:, 0])
    test_mean, test_cov = orc.q_f(k, sets, array(inputs["Xtest"]))
    close(test_mean, array(out["f_mean_test"])[:, 0])
    close(np.diag(test_cov), array(out["f_var_test"])[:, 0])
    close(test_cov, array(out["f_cov_test"])[0])
    close(orc.kl_q(k, sets), out["prior_kl"])

    close(orc.expected_log_density(log_density, y, mean, var), true["variational_expectations"])
    close(orc.log_predictive(log_density, y, mean, var), true["predict_log_density"])
    close(orc.elbo(k, sets, X, y, log_density), true["elbo"])
    close(orc.elbo(k, sets, X, y, log_density), out["gh100"]["elbo"])
    if name == "gaussian":
        close(orc.elbo_gaussian(k, sets, X, y, inputs["likelihood"]["variance"]), true["elbo"])
        terms = orc.gaussian_terms(k, sets, X, y, inputs["likelihood"]["variance"])
        close(4 * terms.sum() - out["prior_kl"], out["gh20"]["elbo_num_data_4N"])


@pytest.mark.parametrize("whitened", [True, False])
def test_softmax(golden, whitened):
    case, which = load(golden, "case02_svgp_multiclass_softmax"), "whitened" if whitened else "unwhitened"
    inputs, out = case["inputs"], case["outputs"][which]
    k, X, y = kernel_of(inputs), array(inputs["X"]), array(inputs["y"])[:, 0].astype(int)
    latents = [stored_sets(inputs, whitened, p) for p in range(3)]
    moments = [orc.q_f(k, sets, X) for sets in latents]
    mean, var = np.stack([m for m, _ in moments], 1), np.stack([np.diag(C) for _, C in moments], 1)
    close(mean, out["f_mean"])
    close(var, out["f_var"])
    log_p, p = orc.softmax3(mean, var)
    rows = np.arange(len(y))
    kl = sum(orc.kl_q(k, sets) for sets in latents)
    close(kl, out["prior_kl"])
    close(log_p[rows, y], out["variational_expectations"])
    close(p, out["predict_mean"])
    close(np.log(p[rows, y]), out["predict_log_density"])
    close(log_p[rows, y].sum() - kl, out["elbo"])


# ---------------------------------------------------------------- case 3: SOLVE-GP


def check_solvegp(k, sets, inputs, out, output=0):
    X, Xs, Z = array(inputs["X"]), array(inputs["Xtest"]), sets[0].Z
    mean, cov = orc.q_f(k, sets, Xs)
    close(mean, array(out["f_mean"])[:, output])
    close(cov, array(out["f_cov"])[output])
    close(np.diag(cov), array(out["f_var"])[:, output])
    mean, cov = orc.q_f(k, sets, X)
    close(mean, array(out["f_mean_train"])[:, output])
    close(np.diag(cov), array(out["f_var_train"])[:, output])
    # The parallel part: one set, less what p(f | u) adds; the orthogonal part: q(f_perp) of Eqs. 17-18.
    mean, cov = orc.q_f(k, sets[:1], Xs)
    close(mean, array(out["f_par_mean"])[:, output])
    close(np.diag(cov - orc.residual_covariance(k, sets[:1], Xs)), array(out["f_par_var"])[:, output])
    C = orc.orthogonal_process(k, Z)(sets[1].Z, sets[1].Z)
    m_v, S_v = cholesky(C) @ sets[1].loc, cholesky(C) @ sets[1].cov @ cholesky(C).T
    mean, cov, kl_v = orc.solvegp_perp(k, Xs, Z, sets[1].Z, m_v, S_v)
    close(mean, array(out["f_perp_mean"])[:, output])
    close(np.diag(cov), array(out["f_perp_var"])[:, output])
    return orc.kl_q(k, sets[:1]), kl_v


@pytest.mark.parametrize("whitened", [True, False])
def test_solvegp_gaussian(golden, whitened):
    case = load(golden, "case03_solvegp_snelson_gaussian")
    inputs, out = case["inputs"], case["outputs"]["whitened" if whitened else "unwhitened"]
    k, sets = kernel_of(inputs), stored_sets(inputs, whitened)
    kl_u, kl_v = check_solvegp(k, sets, inputs, out)
    close([kl_u, kl_v], [out["kl_u"], out["kl_v"]])
    close(orc.kl_q(k, sets), out["kl_u"] + out["kl_v"])
    X, y = array(inputs["X"]), array(inputs["Y"])[:, 0]
    close(orc.elbo_gaussian(k, sets, X, y, inputs["likelihood_params"]["variance"]), out["elbo"])
    union = case["crosscheck"]["whitened" if whitened else "unwhitened"]["gpflow2_union"]
    _, _, m, S = orc.union(k, sets)
    close(m, array(union["q_mu_union"])[:, 0])
    tril = array(union["q_sqrt_union"])[0]
    close(S, tril @ tril.T)


@pytest.mark.parametrize("whitened", [True, False])
def test_solvegp_two_dimensions(golden, whitened):
    # The stored ELBO has a jittered probit and 20 Gauss-Hermite points; q(f) and the KL terms are exact.
    case = load(golden, "case03_solvegp_2d_bernoulli")
    inputs, out = case["inputs"], case["outputs"]["whitened" if whitened else "unwhitened"]
    k, sets = kernel_of(inputs), stored_sets(inputs, whitened)
    close(check_solvegp(k, sets, inputs, out), [out["kl_u"], out["kl_v"]])
    close(orc.kl_q(k, sets), out["kl_u"] + out["kl_v"])
    y, mean, var = array(inputs["Y"])[:, 0], array(out["f_mean_train"])[:, 0], array(out["f_var_train"])[:, 0]

    t, w = np.polynomial.hermite_e.hermegauss(20)
    density = jittered_probit(y, mean + np.sqrt(var) * t[:, None])
    fit = (w[:, None] / w.sum() * density).sum()
    close(fit - out["kl_u"] - out["kl_v"], out["elbo"])


def jittered_probit(y, f):
    p = np.exp(orc.log_bernoulli_probit(1.0, f)) * (1 - 2e-3) + 1e-3
    return np.where(y == 1, np.log(p), np.log1p(-p))


def test_solvegp_two_outputs(golden):
    """Two outputs: the authors' SOLVE-GP run beside case 4, its S_v = Cvv."""
    case = load(golden, "case04_odvgp_2d_gaussian_2outputs")
    inputs, out = case["inputs"], case["crosscheck"]["solvegp_authors"]
    k, X, Y = kernel_of(inputs), array(inputs["X"]), array(inputs["Y"])
    sets = [stored_sets(inputs, False, p) for p in range(2)]
    kl = np.sum([check_solvegp(k, sets[p], inputs, out, p) for p in range(2)], 0)
    close(kl, [out["kl_u"], out["kl_v"]])
    noise = inputs["likelihood_params"]["variance"]
    close(sum(orc.elbo_gaussian(k, sets[p], X, Y[:, p], noise) for p in range(2)), out["elbo"])


# ---------------------------------------------------------------- case 4: ODVGP


@pytest.mark.parametrize("name", ["snelson_gaussian", "2d_gaussian_2outputs"])
def test_odvgp(golden, name):
    case = load(golden, f"case04_odvgp_{name}")
    inputs, out = case["inputs"], case["outputs"]
    k, X, Y, Xs, O = (kernel_of(inputs), *(array(inputs[n]) for n in ("X", "Y", "Xtest", "O")))
    noise, elbo, kl = inputs["likelihood_params"]["variance"], 0.0, 0.0
    for p in range(Y.shape[1]):
        sets = stored_sets(inputs, False, p)
        mean_only = MeanOnlySet(O, array(inputs["a_gamma_effective"])[:, p])
        # The same model said twice: weights a, and a second set with S = I and L e = m_v.
        for args in ({"sets": sets[:1], "mean_only": mean_only}, {"sets": sets}):
            mean, cov = orc.q_f(k, X=Xs, **args)
            close(mean, array(out["f_mean"])[:, p])
            close(cov, array(out["f_cov"])[p])
            close(np.diag(cov), array(out["f_var"])[:, p])
        kl += orc.kl_q(k, sets[:1], mean_only=mean_only)
        elbo += orc.elbo_gaussian(k, sets[:1], X, Y[:, p], noise, mean_only=mean_only)
    close(kl, out["kl"])
    close(elbo, out["elbo"])


# ---------------------------------------------------------------- case 5: Titsias 2025

CASE5 = ["snelson_matern32_M10", "snelson_rbf_M7", "snelson_rbf_M15"]


def case5(golden, name):
    case = load(golden, f"case05_titsias2025_{name}")
    inputs, out = case["inputs"], case["outputs"]
    y = array(inputs["y"])[:, 0]
    return kernel_of(inputs), array(inputs["X"]), y, array(inputs["Z"]), inputs["noise_variance"], out


@pytest.mark.parametrize("name", CASE5)
def test_titsias2025_collapsed(golden, name):
    k, X, y, Z, noise, out = case5(golden, name)
    r = np.diag(orc.nystrom(k, X, Z)[1])
    close(orc.exact_log_marginal(k, X, y, noise), out["log_marginal_likelihood"])
    close(orc.dtc(k, X, y, Z, noise), out["log_lik_Q"])
    close(orc.titsias2025(k, X, y, Z, noise), out["F_new"])
    close(orc.artemev2021(k, X, y, Z, noise), out["F_spherical"])
    close(orc.titsias2009(k, X, y, Z, noise), out["F_titsias2009"])
    close(r, out["kii_minus_qii"], rtol=1e-8)
    close(1 / (1 + r / noise), out["v_opt"], rtol=1e-8)


@pytest.mark.parametrize("name", CASE5)
def test_titsias2025_uncollapsed(golden, name):
    k, X, y, Z, noise, out = case5(golden, name)
    unc = out["uncollapsed"]
    sets = [as_whitened(Z, k(Z, Z), array(unc["q_mu"])[:, 0], array(unc["q_sqrt"])[0], False)]
    r, N = np.diag(orc.nystrom(k, X, Z)[1]), len(X)
    v_sphere = 1 / (1 + r.sum() / (N * noise))

    def bound(sets, v):
        return orc.elbo_gaussian(k, sets, X, y, noise, v=v)

    # RBF, M = 15: an unwhitened random q at an ill-conditioned Kuu; GPflow's SVGP is 1.3e-9 away there.
    close(bound(sets, array(unc["v_diag"])), unc["F_v_diag"])
    close(bound(sets, unc["v_spherical"]), unc["F_v_spherical"])
    close(bound(sets, 1.0), unc["F_v_one"])
    close(bound(sets, "optimal"), unc["F_v_diag_opt"])
    close(bound(sets, v_sphere), unc["F_v_spherical_opt"])
    m, S = orc.optimal_q(k, X, y, Z, noise)
    close(m, np.ravel(unc["optimal_qu_mean"]), rtol=1e-8)
    close(S, unc["optimal_qu_cov"], rtol=1e-8)
    best = [WhitenedSet(Z, *orc.optimal_q(k, X, y, Z, noise, whitened=True))]
    close(bound(best, "optimal"), unc["F_opt_qu_v_opt"])
    close(bound(best, v_sphere), unc["F_opt_qu_v_spherical_opt"])
    close(bound(best, 1.0), unc["F_opt_qu_v_one"])


@pytest.mark.parametrize("whitened", [True, False])
def test_titsias2025_spherical_poisson(golden, whitened):
    case = load(golden, "case05_titsias2025_spherical_poisson_exp")
    inputs, out = case["inputs"], case["outputs"]["whitened" if whitened else "unwhitened"]
    k, X, y, sets = kernel_of(inputs), array(inputs["X"]), array(inputs["y"])[:, 0], stored_sets(inputs, whitened)
    log_density = orc.log_poisson()
    mean, cov = orc.q_f(k, sets, X)
    r = np.diag(orc.residual_covariance(k, sets, X))
    close(mean, array(out["f_mean"])[:, 0])
    close(np.diag(cov) - r, array(out["var_from_qu"])[:, 0])
    close(r, array(out["kii_minus_qii"])[:, 0])
    close(orc.kl_q(k, sets), out["kl_u"])
    for v in (1, 0.7, 0.3):
        moments = orc.spherical_moments(k, sets, X, v=v)
        close(orc.expected_log_density(log_density, y, *moments), out[f"v_{v}"]["variational_expectations"])
        close(orc.elbo(k, sets, X, y, log_density, v=v), out[f"v_{v}"]["elbo"])
    close(orc.elbo(k, sets, X, y, log_density, v=out["v_opt"]), out["elbo_v_opt"])


# ---------------------------------------------------------------- cases 6 and 7: collapsed SOLVE-GP, App. B


@pytest.mark.parametrize("name", ["collapsed_snelson", "collapsed_full_optimum_snelson"])
def test_solvegp_collapsed(golden, name):
    case = load(golden, f"case06_solvegp_{name}_gaussian")
    inputs, out, cross = case["inputs"], case["outputs"], case["crosscheck"]
    k, X, y, Z, O = (kernel_of(inputs), *(array(inputs[n]) for n in ("X", "Y", "Z", "O")))
    y, noise = y[:, 0], inputs["likelihood_params"]["variance"]
    m_v, T_v = array(inputs["qv_mu"])[:, 0], array(inputs["qv_sqrt"])[0]
    S_v = T_v @ T_v.T

    close(orc.solvegp_collapsed(k, X, y, Z, O, noise, m_v, S_v), out["collapsed_bound"])
    conditional = orc.solvegp_collapsed(k, X, y, Z, O, noise, m_v, S_v, conditional=True)
    close(conditional, out["conditional_bound_with_qv"])
    close(orc.titsias2009(k, X, y, Z, noise), cross["sgpr_Z"])
    close(orc.titsias2009(k, X, y, np.concatenate([Z, O]), noise), cross["sgpr_union"])

    m, S = orc.solvegp_optimal_qu(k, X, y, Z, O, noise, m_v)
    close(m, np.ravel(out["optimal_qu_mean"]))
    close(S, out["optimal_qu_cov"])
    C = orc.orthogonal_process(k, Z)(O, O)
    sets = [WhitenedSet(Z, *orc.whiten(m, S, k(Z, Z))), WhitenedSet(O, *orc.whiten(m_v, S_v, C))]
    mean, cov = orc.q_f(k, sets, array(inputs["Xtest"]))
    close(mean, array(out["f_mean"])[:, 0])
    close(np.diag(cov), array(out["f_var"])[:, 0])
    close(orc.elbo_gaussian(k, sets, X, y, noise), cross["authors_uncollapsed_at_optimal_qu"])

    best_m, best_S = orc.solvegp_optimal_qv(k, X, y, Z, O, noise)
    best = orc.solvegp_collapsed(k, X, y, Z, O, noise, best_m, best_S)
    assert best >= out["collapsed_bound"] - 1e-9
    if "full_optimum" in name:
        close(best_m, m_v)
        close(best_S, S_v)


@pytest.mark.parametrize("name", CASE5)
def test_conditional_bound(golden, name):
    case = load(golden, f"case07_conditional_bound_{name}")
    inputs, out = case["inputs"], case["outputs"]
    k, X, y, Z = kernel_of(inputs), array(inputs["X"]), array(inputs["y"])[:, 0], array(inputs["Z"])
    close(orc.conditional_bound(k, X, y, Z, inputs["noise_variance"]), out["F_conditional"])


# ---------------------------------------------------------------- the oracles against each other


def problem(rng, N=25, sizes=(4, 3, 5), D=2):
    """Random data, kernel, per-point noise variances, and sets with random q."""
    k = orc.matern32(1.3, array([0.7, 1.4])[:D])
    X = rng.normal(size=(N, D))
    y = np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=N)
    noise = rng.uniform(0.05, 0.5, N)
    sets = []
    for M in sizes:
        T = np.eye(M) + 0.3 * rng.normal(size=(M, M))
        sets.append(WhitenedSet(rng.normal(size=(M, D)), rng.normal(size=M), T @ T.T))
    return k, X, y, noise, sets


def test_inducing_points_at_the_data_give_the_exact_gp(rng):
    k, X, y, noise, _ = problem(rng)
    Xs = rng.normal(size=(6, 2))
    exact = orc.exact_log_marginal(k, X, y, noise)
    for bound in orc.COLLAPSED.values():
        close(bound(k, X, y, X, noise), exact)
    sets = [WhitenedSet(X, *orc.optimal_q(k, X, y, X, noise, whitened=True))]
    for actual, desired in zip(orc.q_f(k, sets, Xs), orc.exact_predict(k, X, y, noise, Xs), strict=True):
        close(actual, desired)
    close(orc.elbo_gaussian(k, sets, X, y, noise), exact)


@pytest.mark.parametrize("jitter", [0.0, 1e-2])
@pytest.mark.parametrize("seed", range(5))
def test_order_of_the_bounds(seed, jitter):
    k, X, y, noise, (first, second, _) = problem(np.random.default_rng(seed))
    exact = orc.exact_log_marginal(k, X, y, noise)
    values = {name: f(k, X, y, first.Z, noise, jitter) for name, f in orc.COLLAPSED.items()}
    assert exact >= values["titsias2025"] >= values["artemev2021"] >= values["titsias2009"]
    assert exact >= values["conditional"] >= values["titsias2009"]
    two = dict(Z=first.Z, O=second.Z, noise=noise, jitter=(jitter, jitter))
    m_v, S_v = orc.solvegp_optimal_qv(k, X, y, **two)
    solve = orc.solvegp_collapsed(k, X, y, m_v=m_v, S_v=S_v, **two)
    union = orc.titsias2009(k, X, y, np.concatenate([first.Z, second.Z]), noise, jitter)
    assert values["titsias2009"] <= solve <= union <= exact


@pytest.mark.parametrize("v", ["prior", "optimal"])
def test_collapsed_is_uncollapsed_at_its_best_q(rng, v):
    k, X, y, noise, (first, *_) = problem(rng)
    for jitter in (0.0, 0.03):
        q = orc.optimal_q(k, X, y, first.Z, noise, jitter, whitened=True)
        value = orc.elbo_gaussian(k, [WhitenedSet(first.Z, *q)], X, y, noise, jitter, v=1.0 if v == "prior" else v)
        bound = orc.titsias2009 if v == "prior" else orc.titsias2025
        close(value, bound(k, X, y, first.Z, noise, jitter))


def test_tight_bound_is_the_elbo_of_its_definition(rng):
    """Noise that differs per point: the N x N definition, E log p(y | f) - KL[q(f | u) || p(f | u)] - KL[q(u) || p(u)]."""
    k, X, y, noise, (first, *_) = problem(rng, N=12)
    R = orc.residual_covariance(k, [first], X)
    explained = np.diag(orc.q_f(k, [first], X)[1]) - np.diag(R)
    mean = orc.q_f(k, [first], X)[0]
    for v in (1 / (1 + np.diag(R) / noise), rng.uniform(0.2, 1.5, len(X))):
        V = orc.tight_covariance(R, noise, v)
        fit = orc.expected_log_normal(y, mean, explained + np.diag(V), noise).sum()
        cost = orc.kl_normal(np.zeros(len(X)), V, np.zeros(len(X)), R)
        close(cost, orc.residual_cost(v, len(X)), rtol=1e-8)
        literal = fit - cost - orc.kl_q(k, [first])
        close(orc.elbo_gaussian(k, [first], X, y, noise, v=v), literal, rtol=1e-8)
    best = orc.elbo_gaussian(k, [first], X, y, noise, v="optimal")
    assert best > literal
    assert best > orc.elbo_gaussian(k, [first], X, y, noise)


@pytest.mark.parametrize("jitter", [0.0, (0.01, 0.02, 0.03)])
def test_sets_by_the_recursion_of_the_design(rng, jitter):
    """q(f) and KL from the union equal the sums over sets of A_i^T e_i, jitter on each C_i."""
    k, X, _, _, sets = problem(rng)
    A_Z, mean, cov = [], 0.0, k(X, X)
    done: list[tuple[np.ndarray, np.ndarray]] = []  # earlier points and factors
    for s, eps in zip(sets, np.broadcast_to(jitter, (3,)), strict=True):

        def project(points):
            out = []
            for i, (Z, L) in enumerate(done):
                rest = sum((out_j.T @ o for out_j, o in zip(A_Z[i], out, strict=True)), np.zeros((len(Z), len(points))))
                out.append(inv(L) @ (k(Z, points) - rest))
            return out

        A_own = project(s.Z)
        C = k(s.Z, s.Z) - sum((A.T @ A for A in A_own), np.zeros((len(s.Z), len(s.Z))))
        done.append((s.Z, cholesky(C + eps * np.eye(len(s.Z)))))
        A_Z.append(A_own)
        A = project(X)[-1]
        mean = mean + A.T @ s.loc
        cov = cov + A.T @ (s.cov - np.eye(len(s.Z))) @ A
    close(orc.q_f(k, sets, X, jitter)[0], mean)
    close(orc.q_f(k, sets, X, jitter)[1], cov)
    kl = sum(orc.kl_normal(s.loc, s.cov, np.zeros(len(s.loc)), np.eye(len(s.loc))) for s in sets)
    close(orc.kl_q(k, sets, jitter), kl)


def test_mean_only_is_a_set_with_the_prior_covariance(rng):
    k, X, y, noise, sets = problem(rng)
    a = rng.normal(size=5)
    H, jitter = sets[2].Z, (0.01, 0.02, 0.0)
    C = orc.residual_covariance(k, sets[:2], H, jitter[:2])
    whole = [*sets[:2], WhitenedSet(H, cholesky(C).T @ a, np.eye(5))]
    part = dict(sets=sets[:2], jitter=jitter[:2], mean_only=MeanOnlySet(H, a))
    for actual, desired in zip(orc.q_f(k, X=X, **part), orc.q_f(k, whole, X, jitter), strict=True):
        close(actual, desired)
    close(orc.kl_q(k, **part), orc.kl_q(k, whole, jitter))
    close(orc.elbo_gaussian(k, X=X, y=y, noise=noise, **part), orc.elbo_gaussian(k, whole, X, y, noise, jitter))


def test_collapsed_solvegp_special_cases(rng):
    k, X, y, noise, (first, second, _) = problem(rng)
    Z, O, jitter = first.Z, second.Z, (0.01, 0.02)
    Kuu, C = orc.prior_inducing(k, Z, 0.01), orc.residual_covariance(k, [first], O, 0.01) + 0.02 * np.eye(3)
    m_v = cholesky(C) @ second.loc
    prior = orc.solvegp_collapsed(k, X, y, Z, O, noise, m_v, C, jitter)
    close(prior, orc.solvegp_collapsed_prior_covariance(k, X, y, Z, O, noise, m_v, jitter))
    none = orc.solvegp_collapsed(k, X, y, Z, O, noise, np.zeros(3), C, jitter)
    close(none, orc.titsias2009(k, X, y, Z, noise, 0.01))
    S_v = cholesky(C) @ second.cov @ cholesky(C).T
    q_u = orc.whiten(*orc.solvegp_optimal_qu(k, X, y, Z, O, noise, m_v, jitter), Kuu)
    uncollapsed = orc.elbo_gaussian(k, [WhitenedSet(Z, *q_u), second], X, y, noise, jitter)
    close(uncollapsed, orc.solvegp_collapsed(k, X, y, Z, O, noise, m_v, S_v, jitter))


def test_best_q_of_the_orthogonal_set_is_a_maximum(rng):
    k, X, y, noise, (first, second, _) = problem(rng)
    args = (k, X, y, first.Z, second.Z, noise)
    m, S = orc.solvegp_optimal_qv(*args)
    best = orc.solvegp_collapsed(*args, m, S)
    for _ in range(5):
        T = cholesky(S) @ (np.eye(3) + 1e-3 * rng.normal(size=(3, 3)))
        assert orc.solvegp_collapsed(*args, m + 1e-3 * rng.normal(size=3), T @ T.T) < best


def test_integrals_agree_with_closed_forms(rng):
    y, mean, var = rng.normal(size=9), rng.normal(size=9), rng.uniform(0.01, 4.0, 9)
    close(orc.expected_log_density(orc.log_gaussian(0.3), y, mean, var), orc.expected_log_normal(y, mean, var, 0.3))
    log_p = [orc.log_normal(y[i : i + 1], mean[i : i + 1], np.array([[var[i] + 0.3]])) for i in range(9)]
    close(orc.log_predictive(orc.log_gaussian(0.3), y, mean, var), log_p)
    counts = np.arange(9.0)
    exact = counts * (mean + np.log(1.7)) - 1.7 * np.exp(mean + var / 2) - orc.gammaln(counts + 1)
    close(orc.expected_log_density(orc.log_poisson(1.7), counts, mean, var), exact)
    probit = orc.log_ndtr(mean / np.sqrt(1 + var))
    close(orc.log_predictive(orc.log_bernoulli_probit, np.ones(9), mean, var), probit)
    student = orc.log_student_t(3.0, 0.4)
    coarse = orc.expected_log_density(student, y, mean, var, num_nodes=2001)
    close(orc.expected_log_density(student, y, mean, var), coarse)
    grid = np.linspace(-400, 400, 800001)
    close(np.exp(student(0.3, grid)).sum() * (grid[1] - grid[0]), 1.0, rtol=1e-6)
    close(orc.expected_log_density(student, y, mean, np.zeros(9)), student(y, mean))


def test_general_elbo_is_the_gaussian_one(rng):
    k, X, y, _, sets = problem(rng)
    for v in (1.0, 0.6):
        general = orc.elbo(k, sets, X, y, orc.log_gaussian(0.2), 0.01, v=v)
        close(general, orc.elbo_gaussian(k, sets, X, y, 0.2, 0.01, v=v))
