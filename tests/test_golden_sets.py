"""SOLVE-GP, ODVGP, the tightened bounds and the exact GP against values that other people's code computed."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import handlers
from numpyro.infer import TraceMeanField_ELBO
from scipy.special import ndtr

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from tests import oracles

KERNELS = {"RBF": kernels.RBF, "Matern12": kernels.Matern12, "Matern32": kernels.Matern32, "Matern52": kernels.Matern52}


def load(folder, name):
    case = json.loads((folder / f"{name}.json").read_text())
    inputs = {k: np.array(v) if isinstance(v, list) else v for k, v in case["inputs"].items()}
    return inputs, case["outputs"]


def whitened(mean, sqrt, L, is_whitened):
    """(M, P) means and (P, M, M) factors, in whitened coordinates with the latent axis first."""
    if is_whitened:
        return jnp.asarray(mean.T), jnp.asarray(sqrt)
    return jnp.asarray(np.linalg.solve(L, mean).T), jnp.asarray(np.linalg.solve(L, sqrt))


class JitteredProbit(likelihoods.ExpectedLikelihood):
    """GPflow's probit link, Phi(f) (1 - 2e-3) + 1e-3; adding a likelihood takes these few lines."""

    def conditional(self, f):
        return numpyro.distributions.BernoulliProbs(jax.scipy.special.ndtr(f) * (1 - 2e-3) + 1e-3)


def likelihood_of(inputs):
    if inputs["likelihood"] == "gaussian":
        scale = inputs["likelihood_params"]["variance"] ** 0.5
        return lambda m: likelihoods.Gaussian(m, scale).to_event(1)
    return lambda m: JitteredProbit(m).to_event(1)


def model(X, Y, *, inputs, sets, likelihood):
    kernel = inputs["variance"] * KERNELS[inputs.get("kernel", "RBF")](jnp.asarray(inputs["lengthscales"]))
    f = ogp.gp("f", kernel, sets, num_latents=Y.shape[1], jitter=0.0)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihood(f(X)), obs=Y)


def evaluate(params, inputs, sets, likelihood, **options):
    args = (jnp.asarray(inputs["X"]), jnp.asarray(inputs["Y"]))
    kwargs = {"inputs": inputs, "sets": sets, "likelihood": likelihood}
    guide = ogp.AutoSparseGP(model, **options)

    @jax.jit
    def both(params):
        elbo = -TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide, *args, **kwargs)
        return elbo, ogp.posterior(model, guide, params, *args, **kwargs)["f"]

    return both(params)


def factors(inputs):
    k = oracles.rbf(inputs["variance"], np.asarray(inputs["lengthscales"]))
    return np.linalg.cholesky(k(inputs["Z"], inputs["Z"])), np.linalg.cholesky(
        oracles.orthogonal_process(k, inputs["Z"])(inputs["O"], inputs["O"])
    )


def check_predictions(f, inputs, expected):
    Xtest = jnp.asarray(inputs["Xtest"])
    np.testing.assert_allclose(f(Xtest).mean, expected["f_mean"], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(f(Xtest).variance, expected["f_var"], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(f.joint(Xtest).covariance_matrix, expected["f_cov"], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("coordinates", ["whitened", "unwhitened"])
@pytest.mark.parametrize("name", ["case03_solvegp_snelson_gaussian", "case03_solvegp_2d_bernoulli"])
def test_solvegp(golden, name, coordinates):
    inputs, outputs = load(golden, name)
    expected = outputs[coordinates]
    params = {}
    for i, (which, L) in enumerate(zip("uv", factors(inputs), strict=True)):
        m, T = whitened(inputs[f"q{which}_mu"], inputs[f"q{which}_sqrt"], L, coordinates == "whitened")
        params |= {f"f.u{i}_loc": m, f"f.u{i}_scale_tril": T}
    elbo, f = evaluate(params, inputs, [inputs["Z"], inputs["O"]], likelihood_of(inputs))
    np.testing.assert_allclose(elbo, expected["elbo"], rtol=1e-9)
    check_predictions(f, inputs, expected)


@pytest.mark.parametrize("as_mean_only", [True, False])
@pytest.mark.parametrize("name", ["case04_odvgp_snelson_gaussian", "case04_odvgp_2d_gaussian_2outputs"])
def test_odvgp(golden, name, as_mean_only):
    inputs, expected = load(golden, name)
    L_u, L_v = factors(inputs)
    m, T = whitened(inputs["qu_mu"], inputs["qu_sqrt"], L_u, False)
    params = {"f.u0_loc": m, "f.u0_scale_tril": T}
    if as_mean_only:
        params["f.u1_weights"] = jnp.asarray(inputs["a_gamma_effective"].T)
        elbo, f = evaluate(params, inputs, [inputs["Z"], ogp.MeanOnly(inputs["O"])], likelihood_of(inputs))
    else:
        params["f.u1_loc"] = jnp.asarray(np.linalg.solve(L_v, inputs["qv_mu"]).T)
        elbo, f = evaluate(
            params, inputs, [inputs["Z"], inputs["O"]], likelihood_of(inputs), covariance=["full", "prior"]
        )
    np.testing.assert_allclose(elbo, expected["elbo"], rtol=1e-9)
    check_predictions(f, inputs, expected)


@pytest.mark.parametrize("name", ["snelson_rbf_M7", "snelson_rbf_M15", "snelson_matern32_M10"])
def test_tightened_gaussian(golden, name):
    inputs, expected = load(golden, f"case05_titsias2025_{name}")
    inputs["Y"] = inputs["y"]
    k = {"RBF": oracles.rbf, "Matern32": oracles.matern32}[inputs["kernel"]](
        inputs["variance"], np.asarray(inputs["lengthscales"])
    )
    L = np.linalg.cholesky(k(inputs["Z"], inputs["Z"]))
    likelihood = lambda m: likelihoods.Gaussian(m, inputs["noise_variance"] ** 0.5).to_event(1)  # noqa: E731
    uncollapsed = {key: np.array(v) for key, v in expected["uncollapsed"].items()}

    def bound(mean, T, residual):
        m, T = whitened(mean, T, L, False)
        return evaluate({"f.u0_loc": m, "f.u0_scale_tril": T}, inputs, inputs["Z"], likelihood, residual=residual)[0]

    q = (uncollapsed["q_mu"], uncollapsed["q_sqrt"])
    np.testing.assert_allclose(bound(*q, "prior"), uncollapsed["F_v_one"], rtol=1e-8)
    np.testing.assert_allclose(bound(*q, "tight"), uncollapsed["F_v_diag_opt"], rtol=1e-8)
    best = oracles.optimal_q(k, inputs["X"], inputs["y"][:, 0], inputs["Z"], inputs["noise_variance"])
    best = (best[0][:, None], np.linalg.cholesky(best[1])[None])
    np.testing.assert_allclose(bound(*best, "prior"), expected["F_titsias2009"], rtol=1e-8)
    np.testing.assert_allclose(bound(*best, "tight"), expected["F_new"], rtol=1e-8)


@pytest.mark.parametrize("coordinates", ["whitened", "unwhitened"])
@pytest.mark.parametrize("v", ["1", "0.7", "0.3"])
def test_spherical_residual(golden, coordinates, v):
    inputs, outputs = load(golden, "case05_titsias2025_spherical_poisson_exp")
    inputs["Y"] = inputs["y"]
    k = oracles.matern32(inputs["variance"], np.asarray(inputs["lengthscales"]))
    L = np.linalg.cholesky(k(inputs["Z"], inputs["Z"]))
    m, T = whitened(inputs["q_mu"], inputs["q_sqrt"], L, coordinates == "whitened")
    params = {"f.u0_loc": m, "f.u0_scale_tril": T, "f_residual_scale": jnp.full(1, float(v))}
    elbo, _ = evaluate(params, inputs, inputs["Z"], lambda m: likelihoods.Poisson(m).to_event(1), residual="tight")
    np.testing.assert_allclose(elbo, outputs[coordinates][f"v_{v}"]["elbo"], rtol=1e-9)
    # At the stored best v the bound is stationary in v.
    best = jnp.full(1, outputs[coordinates]["v_opt"])

    def at(v):
        likelihood = lambda m: likelihoods.Poisson(m).to_event(1)  # noqa: E731
        return evaluate(params | {"f_residual_scale": v}, inputs, inputs["Z"], likelihood, residual="tight")[0]

    assert abs(float(jax.grad(at)(best)[0])) < 1e-4


@pytest.mark.parametrize("name", ["collapsed", "collapsed_full_optimum"])
def test_solvegp_at_the_optimal_first_set_is_its_collapsed_bound(golden, name):
    inputs, expected = load(golden, f"case06_solvegp_{name}_snelson_gaussian")
    L_u, L_v = factors(inputs)
    T_u = np.linalg.cholesky(np.array(expected["optimal_qu_cov"]))[None]
    m_u, T_u = whitened(np.array(expected["optimal_qu_mean"]), T_u, L_u, False)
    m_v, T_v = whitened(inputs["qv_mu"], inputs["qv_sqrt"], L_v, False)
    params = {"f.u0_loc": m_u, "f.u0_scale_tril": T_u, "f.u1_loc": m_v, "f.u1_scale_tril": T_v}
    elbo, f = evaluate(params, inputs, [inputs["Z"], inputs["O"]], likelihood_of(inputs))
    np.testing.assert_allclose(elbo, expected["collapsed_bound"], rtol=1e-8)
    np.testing.assert_allclose(f(jnp.asarray(inputs["Xtest"])).mean, expected["f_mean"], rtol=1e-7)


@pytest.mark.parametrize("name", ["RBF_M15", "Matern12_M7", "Matern32_M15", "Matern52_M7"])
def test_sgpr_and_exact_predictions(golden, name):
    """SVGP at GPflow's optimal q(u) is its SGPR; with Z = X the exact GP."""
    inputs, outputs = load(golden, "case01_sgpr_fitc_snelson")
    kernel_name, size = name.split("_M")
    expected = {key: np.array(v) for key, v in outputs[name].items() if not isinstance(v, dict)}
    inputs |= {"Y": inputs["y"], "lengthscales": [inputs["lengthscale"]], "kernel": kernel_name}
    Z, noise = np.array(inputs["Z"][size]), inputs["noise_variance"]
    k = {"RBF": oracles.rbf, "Matern12": oracles.matern12, "Matern32": oracles.matern32, "Matern52": oracles.matern52}[
        kernel_name
    ]
    k = k(inputs["variance"], inputs["lengthscale"])
    mean, cov = oracles.optimal_q(k, inputs["X"], inputs["y"][:, 0], Z, noise, whitened=True)
    params = {"f.u0_loc": jnp.asarray(mean[None]), "f.u0_scale_tril": jnp.asarray(np.linalg.cholesky(cov)[None])}
    likelihood = lambda m: likelihoods.Gaussian(m, noise**0.5).to_event(1)  # noqa: E731
    elbo, f = evaluate(params, inputs, Z, likelihood)
    np.testing.assert_allclose(elbo, expected["sgpr_elbo"], rtol=1e-8)
    marginals = f(jnp.asarray(inputs["Xtest"]))
    np.testing.assert_allclose(marginals.mean, expected["sgpr_f_mean"], rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(marginals.variance, expected["sgpr_f_var"], rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(likelihoods.Gaussian(marginals, noise**0.5).variance, expected["sgpr_y_var"], rtol=1e-7)
    first = f.joint(jnp.asarray(inputs["Xtest"][:10])).covariance_matrix[0]
    np.testing.assert_allclose(first, expected["sgpr_f_cov_first10"], rtol=1e-7, atol=1e-8)
    gradient = jax.jit(jax.grad(lambda Z: evaluate(params, inputs, Z, likelihood)[0]))(jnp.asarray(Z))
    # Envelope theorem: at the best q the collapsed bound has the same gradient.
    np.testing.assert_allclose(gradient, outputs[name]["sgpr_elbo_grad"]["Z"], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["shared_kernel_shared_Z", "separate_kernels_shared_Z", "lmc_shared_Z"])
def test_many_outputs(golden, name):
    inputs, outputs = load(golden, f"case11_{name}")
    expected = outputs["whitened"]
    parts = [
        spec["variance"] * KERNELS[spec["kernel"]](jnp.asarray(spec["lengthscales"])) for spec in inputs["kernels"]
    ]
    q_mu, q_sqrt, Z = jnp.asarray(inputs["q_mu"].T), jnp.asarray(inputs["q_sqrt"]), inputs["Z"][0]
    shared, mixed = name.startswith("shared"), name.startswith("lmc")

    def outputs_at(functions, X):
        fX = functions["f"](X) if shared else ogp.stack([functions[f"f{i}"](X) for i in range(len(parts))])
        return fX @ inputs["W"].T if mixed else fX

    def model(X, Y):
        if shared:
            functions = {"f": ogp.gp("f", parts[0], Z, num_latents=len(parts), jitter=0.0)}
        else:
            functions = {f"f{i}": ogp.gp(f"f{i}", k, Z, jitter=0.0) for i, k in enumerate(parts)}
        with numpyro.plate("data", len(X)):
            scale = inputs["noise_variance"] ** 0.5
            numpyro.sample("y", likelihoods.Gaussian(outputs_at(functions, X), scale).to_event(1), obs=Y)

    params = {"f.u0_loc": q_mu, "f.u0_scale_tril": q_sqrt}
    for i in range(len(parts)):
        params |= {f"f{i}.u0_loc": q_mu[i], f"f{i}.u0_scale_tril": q_sqrt[i]}
    args = (jnp.asarray(inputs["X"]), jnp.asarray(inputs["Y"]))
    guide = ogp.AutoSparseGP(model)
    elbo = -TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide, *args)
    np.testing.assert_allclose(elbo, expected["elbo"], rtol=1e-9)
    marginals = outputs_at(ogp.posterior(model, guide, params, *args), jnp.asarray(inputs["Xtest"]))
    np.testing.assert_allclose(marginals.mean, expected["f_mean"], rtol=1e-9)
    np.testing.assert_allclose(marginals.variance, expected["f_var"], rtol=1e-9)


def test_probit_link_of_the_golden_files(golden):
    """The few-line likelihood above is GPflow's link, and differs from Phi."""
    with handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(1.0), jnp.zeros((1, 1)))
    p = JitteredProbit(f(jnp.zeros((1, 1)))).conditional(jnp.asarray(3.0)).probs
    assert abs(float(p) - ndtr(3.0)) > 1e-4
