"""`CollapsedGP` against values that other people's code, or 400-bit arithmetic, computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import numpyro_orthgp as ogp
from numpyro_orthgp.gaussians.family import Full
from tests import oracles
from tests.test_golden_sets import KERNELS
from tests.test_oracles_golden import CASE5, array, load

# Those of the files.
CLOSE = dict(rtol=1e-8, atol=1e-8)
GRADIENT = dict(rtol=1e-6, atol=1e-6)


def kernel_of(inputs, name=None):
    return inputs["variance"] * KERNELS[name or inputs.get("kernel", "RBF")](array(inputs["lengthscales"]))


@pytest.mark.parametrize("M", [7, pytest.param(15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["RBF", *(pytest.param(n, marks=pytest.mark.slow) for n in KERNELS if n != "RBF")])
def test_sgpr_fitc(golden, name, M):
    case = load(golden, "case01_sgpr_fitc_snelson")
    inputs, out = case["inputs"], case["outputs"][f"{name}_M{M}"]
    high = case["crosscheck"]["highprec"][f"{name}_M{M}"]
    X, y, Xs, Z = array(inputs["X"]), array(inputs["y"])[:, 0], array(inputs["Xtest"]), array(inputs["Z"][str(M)])
    hyper = {n: inputs[n] for n in ("variance", "lengthscale", "noise_variance")} | {"Z": Z}

    def gp(bound, hyper):
        kernel = hyper["variance"] * KERNELS[name](hyper["lengthscale"])
        return ogp.CollapsedGP(kernel, X, hyper["Z"], jnp.sqrt(hyper["noise_variance"]), bound=bound, jitter=0.0)

    @jax.jit
    def values(hyper):
        found = {}
        for bound in ("titsias2009", "fitc"):
            f = gp(bound, hyper).posterior(y)
            found[bound] = *jax.value_and_grad(lambda h, b=bound: gp(b, h).log_prob(y))(hyper), f(Xs), f(Z), f.joint(Z)
        covariance = gp("titsias2009", hyper).posterior(y).joint(Xs[:10]).covariance_matrix
        return found, gp("dtc", hyper).log_prob(y), gp("dtc", hyper).upper_bound(y), covariance

    found, dtc, upper, covariance = values(jax.tree.map(jnp.asarray, hyper))
    for bound, short, value in (("titsias2009", "sgpr", "sgpr_elbo"), ("fitc", "fitc", "fitc_log_lik")):
        evidence, gradient, f, *_ = found[bound]
        assert_allclose(evidence, out[value], **CLOSE)
        assert_allclose(evidence, high[value], **CLOSE)
        for n, expected in out[f"{value}_grad"].items():
            assert_allclose(np.ravel(gradient[n]), np.ravel(expected), **GRADIENT, err_msg=f"{bound} {n}")
        assert_allclose(f.mean, np.ravel(out[f"{short}_f_mean"]), **CLOSE)
        assert_allclose(f.variance, np.ravel(out[f"{short}_f_var"]), **CLOSE)
    assert_allclose(dtc, high["dtc_log_lik"], **CLOSE)
    assert_allclose(upper, out["sgpr_upper_bound"], **CLOSE)
    assert_allclose(covariance, out["sgpr_f_cov_first10"], **CLOSE)
    *_, at_Z, joint = found["titsias2009"]
    assert_allclose(at_Z.mean, np.ravel(out["sgpr_qu_mean"]), **CLOSE)
    assert_allclose(joint.covariance_matrix, out["sgpr_qu_cov"], **CLOSE)


@pytest.mark.parametrize("name", [CASE5[0], *(pytest.param(n, marks=pytest.mark.slow) for n in CASE5[1:])])
def test_titsias2025_and_the_conditional_bound(golden, name):
    case, conditional = (load(golden, f"case0{c}_{name}") for c, name in
                         ((5, f"titsias2025_{name}"), (7, f"conditional_bound_{name}")))  # fmt: skip
    inputs, out = case["inputs"], case["outputs"]
    X, y, Z, scale = array(inputs["X"]), array(inputs["y"])[:, 0], array(inputs["Z"]), inputs["noise_variance"] ** 0.5
    keys = {
        "dtc": out["log_lik_Q"],
        "titsias2025": out["F_new"],
        "artemev2021": out["F_spherical"],
        "titsias2009": out["F_titsias2009"],
        "conditional": conditional["outputs"]["F_conditional"],
    }

    @jax.jit
    def values(X, y, Z):
        def gp(bound, Z=Z):
            return ogp.CollapsedGP(kernel_of(inputs), X, Z, scale, bound=bound, jitter=0.0)

        f = gp("titsias2025").posterior(y)
        return {b: gp(b).log_prob(y) for b in keys}, f(X).residual_variance, f(Z).mean, f.joint(Z).covariance_matrix

    ours, residual, mean, covariance = values(X, y, Z)
    for bound, expected in keys.items():
        assert_allclose(ours[bound], expected, **CLOSE, err_msg=bound)
    assert_allclose(residual, out["kii_minus_qii"], **CLOSE)
    assert_allclose(mean, np.ravel(out["uncollapsed"]["optimal_qu_mean"]), **CLOSE)
    assert_allclose(covariance, out["uncollapsed"]["optimal_qu_cov"], **CLOSE)


@jax.jit
def _solvegp_values(kernel, X, y, Z, O, Xs, scale, m, T):
    def gp(bound, sets, **options):
        return ogp.CollapsedGP(kernel, X, sets, scale, bound=bound, jitter=0.0, **options)

    q = (Full(m, T),)
    given = gp("titsias2009", [Z, O], orthogonal=q)
    f, best = given.posterior(y), gp("titsias2009", [Z, O])
    return {
        "given": given.log_prob(y), "conditional": gp("conditional", [Z, O], orthogonal=q).log_prob(y),
        "best": best.log_prob(y), "Z": gp("titsias2009", Z).log_prob(y),
        "union": gp("titsias2009", jnp.concatenate([Z, O])).log_prob(y),
    }, f(Xs), f(Z), f.joint(Z), best.posterior(y)(Xs)  # fmt: skip


@pytest.mark.parametrize("name", ["collapsed_snelson", "collapsed_full_optimum_snelson"])
def test_solvegp(golden, name):
    case = load(golden, f"case06_solvegp_{name}_gaussian")
    inputs, out, cross = case["inputs"], case["outputs"], case["crosscheck"]
    X, y, Z, O, Xs = (array(inputs[n]) for n in ("X", "Y", "Z", "O", "Xtest"))
    y, scale = y[:, 0], inputs["likelihood_params"]["variance"] ** 0.5
    k = oracles.rbf(inputs["variance"], array(inputs["lengthscales"]))
    L = np.linalg.cholesky(oracles.orthogonal_process(k, Z)(O, O))
    m, T = np.linalg.solve(L, array(inputs["qv_mu"]))[:, 0], np.linalg.solve(L, array(inputs["qv_sqrt"])[0])

    ours, f, at_Z, joint, best = _solvegp_values(kernel_of(inputs), X, y, Z, O, Xs, scale, m, T)
    kl = oracles.kl_normal(m, T @ T.T, np.zeros(len(m)), np.eye(len(m)))
    assert_allclose(ours["given"] - kl, out["collapsed_bound"], **CLOSE)
    assert_allclose(ours["given"] - kl, cross["authors_uncollapsed_at_optimal_qu"], **CLOSE)
    assert_allclose(ours["conditional"] - kl, out["conditional_bound_with_qv"], **CLOSE)
    assert_allclose(ours["Z"], cross["sgpr_Z"], **CLOSE)
    assert_allclose(ours["union"], cross["sgpr_union"], **CLOSE)
    assert_allclose(at_Z.mean, np.ravel(out["optimal_qu_mean"]), **CLOSE)
    assert_allclose(joint.covariance_matrix, out["optimal_qu_cov"], **CLOSE)
    assert_allclose(f.mean, np.ravel(out["f_mean"]), **CLOSE)
    assert_allclose(f.variance, np.ravel(out["f_var"]), **CLOSE)
    if "full_optimum" in name:
        assert_allclose(ours["best"], out["collapsed_bound"], **CLOSE)
        assert_allclose(best.mean, np.ravel(out["f_mean"]), **CLOSE)
        assert_allclose(best.variance, np.ravel(out["f_var"]), **CLOSE)
    else:
        assert ours["best"] > out["collapsed_bound"] + 1
