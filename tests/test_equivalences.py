"""Methods that must agree with each other: the table of section 4 of the design as equalities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import block_diag

import numpyro_orthgp as ogp
from numpyro_orthgp.functions import function as process
from numpyro_orthgp.functions import mean_only as mean_shift
from numpyro_orthgp.functions.projection import decompose
from tests import oracles, problems

NOISE = 0.4
K = problems.kernel_oracle("matern52")


def elbo(params, X, y, **kwargs):
    kwargs = {"likelihood": problems.gaussian(NOISE)} | kwargs
    return -float(problems.loss(params, jnp.asarray(X), jnp.asarray(y), **kwargs))


def optimal(X, y, Z, noise=NOISE**2):
    mean, cov = oracles.optimal_q(K, X, y, Z, noise, whitened=True)
    return [(mean, np.linalg.cholesky((cov + cov.T) / 2))]


def test_svgp_at_its_optimum_is_the_collapsed_bound(rng):
    X, y = problems.data(rng)
    Z = problems.sets(rng, [8])[0]
    params = problems.q_params(optimal(X, y, Z))
    np.testing.assert_allclose(elbo(params, X, y, inducing=Z), oracles.titsias2009(K, X, y, Z, NOISE**2), rtol=1e-9)
    tight = elbo(params, X, y, inducing=Z, residual="tight")
    np.testing.assert_allclose(tight, oracles.titsias2025(K, X, y, Z, NOISE**2), rtol=1e-9)


def test_all_data_as_inducing_points_is_the_exact_gp(rng):
    X, y = problems.data(rng, N=20)
    params = problems.q_params(optimal(X, y, X))
    exact = oracles.exact_log_marginal(K, X, y, NOISE**2)
    np.testing.assert_allclose(elbo(params, X, y, inducing=X), exact, rtol=1e-9)
    f = problems.posterior(params, jnp.asarray(X), jnp.asarray(y), inducing=X, likelihood=problems.gaussian(NOISE))
    Xs = rng.uniform(-3, 3, (7, 2))
    mean, cov = oracles.exact_predict(K, X, y, NOISE**2, Xs)
    np.testing.assert_allclose(f(Xs).mean, mean, rtol=1e-8)
    np.testing.assert_allclose(f.joint(Xs).covariance_matrix, cov, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("sizes", [[5, 4], [3, 4, 2], [2, 2, 2, 3]], ids=str)
@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_sets_are_the_union_with_block_diagonal_covariance(rng, sizes, residual):
    """Shi 2020, App. F: in whitened coordinates the structured covariance of the union is block diagonal."""
    X, y = problems.data(rng)
    Zs = problems.sets(rng, sizes)
    qs = [problems.random_q(rng, M) for M in sizes]
    union = [(np.concatenate([m for m, _ in qs]), block_diag(*(T for _, T in qs)))]
    apart = elbo(problems.q_params(qs), X, y, inducing=Zs, residual=residual)
    together = elbo(problems.q_params(union), X, y, inducing=np.concatenate(Zs), residual=residual)
    np.testing.assert_allclose(apart, together, rtol=1e-10)


def test_prior_covariance_is_mean_only(rng):
    X, y = problems.data(rng)
    Z, O = problems.sets(rng, [5, 4])
    q, a = problems.random_q(rng, 5), rng.normal(size=4)
    k = 1.3 * ogp.kernels.Matern52(jnp.asarray([0.9, 0.9]))
    blocks = decompose([[k(Z, Z)], [k(Z, O), k(O, O)]], 0.0)
    params = problems.q_params([q]) | {
        "f.u1_loc": jnp.linalg.solve(blocks[1].whitener.T, a),
        "f.u1_weights": jnp.asarray(a),
    }
    prior, prior_tight, mean_only, mean_only_tight = (
        elbo(params, X, y, inducing=[Z, second], residual=residual, **options)
        for second, options in ((O, {"covariance": ["full", "prior"]}), (ogp.MeanOnly(O), {}))
        for residual in ("prior", "tight")
    )
    np.testing.assert_allclose(prior, mean_only, rtol=1e-10)
    # Tightening shrinks what no set explains, and mean-only points leave more of it: theirs is the better bound.
    assert mean_only_tight > prior_tight > prior


def test_second_set_at_its_prior_changes_nothing(rng):
    X, y = problems.data(rng)
    Z, O = problems.sets(rng, [5, 4])
    params = problems.q_params([problems.random_q(rng, 5), (np.zeros(4), np.eye(4))]) | {"f.u1_weights": jnp.zeros(4)}
    alone = elbo(params, X, y, inducing=Z)
    np.testing.assert_allclose(elbo(params, X, y, inducing=[Z, O]), alone, rtol=1e-12)
    np.testing.assert_allclose(elbo(params, X, y, inducing=[Z, ogp.MeanOnly(O)]), alone, rtol=1e-12)


def test_solvegp_optimum_lies_between_the_two_svgps(rng):
    """titsias2009(Z) <= SOLVE-GP(Z, O) at its best q <= titsias2009(Z and O)."""
    X, y = problems.data(rng)
    Z, O = problems.sets(rng, [4, 5])
    noise = NOISE**2
    m_v, S_v = oracles.solvegp_optimal_qv(K, X, y, Z, O, noise)
    m_u, S_u = oracles.solvegp_optimal_qu(K, X, y, Z, O, noise, m_v)
    L_u = np.linalg.cholesky(K(Z, Z))
    L_v = np.linalg.cholesky(oracles.orthogonal_process(K, Z)(O, O))
    qs = [
        (np.linalg.solve(L, m), np.linalg.cholesky(np.linalg.solve(L, np.linalg.solve(L, S).T)))
        for L, m, S in ((L_u, m_u, S_u), (L_v, m_v, S_v))
    ]
    best = elbo(problems.q_params(qs), X, y, inducing=[Z, O])
    collapsed = oracles.solvegp_collapsed(K, X, y, Z, O, noise, m_v, S_v)
    np.testing.assert_allclose(best, collapsed, rtol=1e-9)
    assert oracles.titsias2009(K, X, y, Z, noise) < best < oracles.titsias2009(K, X, y, np.concatenate([Z, O]), noise)


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_minibatches_average_to_the_full_batch(rng, residual):
    """Plates scale the data terms and never the divergence."""
    X, y = problems.data(rng, N=30)
    Zs = problems.sets(rng, [4, 3])
    params = problems.q_params([problems.random_q(rng, 4), problems.random_q(rng, 3)])
    params["f.u2_weights"] = jnp.asarray(rng.normal(size=3))
    kwargs = {"inducing": [*Zs, ogp.MeanOnly(problems.sets(rng, [3])[0])], "residual": residual}
    full = elbo(params, X, y, **kwargs)
    batches = [elbo(params, X[i : i + 10], y[i : i + 10], N=30, **kwargs) for i in (0, 10, 20)]
    np.testing.assert_allclose(np.mean(batches), full, rtol=1e-12)
    assert np.std(batches) > 0.1


@pytest.mark.parametrize("num_latents", [None, 2])
def test_blocks_of_points_and_inputs_change_nothing(rng, monkeypatch, num_latents):
    """Mean-only points in blocks of three, and predictions in blocks of four rows, which do not divide their numbers."""
    X, y = (jnp.asarray(a) for a in problems.data(rng, N=13))
    batch = () if num_latents is None else (num_latents,)
    params = {"f.u0_loc": rng.normal(size=(*batch, 4)), "f.u1_weights": rng.normal(size=(*batch, 9))}
    params["f.u0_scale_tril"] = np.tril(rng.normal(size=(*batch, 4, 4)), -1) + 0.7 * np.eye(4)
    params["Z"], params["H"] = problems.sets(rng, [4, 9])
    params = jax.tree.map(jnp.asarray, params)
    Y = y if num_latents is None else jnp.stack([y, -y], -1)

    def results(params):
        kwargs = {"likelihood": problems.gaussian(NOISE), "num_latents": num_latents, "to_event": len(batch)}
        kwargs["inducing"] = [params["Z"], ogp.MeanOnly(params["H"])]
        ours = {name: value for name, value in params.items() if name not in ("Z", "H")}
        f = problems.posterior(ours, X, Y, **kwargs)(X)
        return problems.loss(params, X, Y, **kwargs), f.mean, f.explained, f.residual

    def values_and_gradients(params):
        return results(params), jax.grad(lambda p: sum(jnp.sum(r**2) for r in results(p)[1:]) + results(p)[0])(params)

    whole = jax.jit(values_and_gradients)(params)
    for name, value in {"MAX_ENTRIES": 12, "MIN_BLOCK": 4}.items():
        monkeypatch.setattr(process, name, value)
    monkeypatch.setattr(mean_shift, "MAX_ENTRIES", 12)
    in_blocks = jax.jit(lambda params: values_and_gradients(params))  # a function that JAX has not traced yet
    text = str(in_blocks.trace(params).jaxpr)
    assert "13,9]" not in text and "9,13]" not in text  # no covariance of all inputs with all mean-only points
    three_points_at_a_time = "length=3" in text  # 12 values for 4 variables; 6 for two functions, one point at a time
    assert three_points_at_a_time == (num_latents is None)
    for a, b in zip(*map(jax.tree.leaves, (whole, in_blocks(params))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


def test_latent_functions_are_separate_gps(rng):
    """P latents with one kernel, and with one kernel per latent, equal P separate functions."""
    X, _ = problems.data(rng)
    Y = rng.normal(size=(len(X), 3))
    Zs = problems.sets(rng, [4, 3])
    qs = [[problems.random_q(rng, M) for M in (4, 3)] for _ in range(3)]
    by_set = [tuple(np.stack(parts) for parts in zip(*latents, strict=True)) for latents in zip(*qs, strict=True)]
    stacked = problems.q_params(by_set)
    lengthscales = rng.uniform(0.5, 1.5, (3, 2))
    for shared in (True, False):
        separate = sum(
            elbo(problems.q_params(q), X, Y[:, p], inducing=Zs, lengthscale=0.9 if shared else lengthscales[p])
            for p, q in enumerate(qs)
        )
        kwargs = {"num_latents": 3} if shared else {"lengthscale": lengthscales, "variance": np.full(3, 1.3)}
        np.testing.assert_allclose(elbo(stacked, X, Y, inducing=Zs, to_event=1, **kwargs), separate, rtol=1e-10)
