"""Convergence of bases that use more points for the mean than for the covariance, hyperparameters and points fixed.

The experiment of Salimbeni, Cheng, Boots, Deisenroth 2018, Fig. 2a and 2b [1]: as many points gamma for the mean as there are
inducing points beta. Prints the bound on all training data after 1, 3, 10, ... steps, its optimum, and the time of a step, for

* Coupled: SVGP with beta; by Adam, and by natural gradients (Nat)
* Orth: ODVGP, ``ogp.gp("f", kernel, [beta, ogp.MeanOnly(gamma)])``; by both
* Hybrid: the same functions, gamma's part of the mean not made orthogonal to beta's; by Adam
* Decoupled: a mean with weights of all points, and a covariance by its precision (Cheng and Boots 2017); by Adam
* SOLVE-GP: ``ogp.gp("f", kernel, [beta, gamma])``, a covariance for gamma too; by natural gradients

Orth, Hybrid and Decoupled have the same optimum. Matern 3/2, float64, q starts at the prior. Example::

    python benchmarks/decoupled_bases.py --data kin40k.npz
    python benchmarks/decoupled_bases.py --data ringnorm.npz --likelihood bernoulli --variance 5 --mean-only 0.3

Labels say whether y is above its mean. Hybrid and Decoupled live here only: they are the bases to avoid. With all rows in every
step XLA works out once what depends on points alone, so that steps are faster than in a fit that learns these.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from benchmarks.natural_gradients import load
from numpyro_orthgp import init, kernels, likelihoods
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.projection import decompose, project, residual_variance
from numpyro_orthgp.gaussians.constraints import dense_lower_cholesky
from numpyro_orthgp.math.linalg import add_jitter, default_jitter
from numpyro_orthgp.math.triangular import solve_lower

CHECKPOINTS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)


# ---------------------------------------------------------------- bases: from kernel and points to the function x -> q(f(x))


def coupled(kernel, beta, gamma):
    return ogp.gp("f", kernel, beta)


def orth(kernel, beta, gamma):
    return ogp.gp("f", kernel, [beta, ogp.MeanOnly(gamma)])


def solve_gp(kernel, beta, gamma):
    return ogp.gp("f", kernel, [beta, gamma])


def hybrid(kernel, beta, gamma):
    r"""Mean :math:`k_{x \gamma} a + k_{x \beta} K_\beta^{-1} m` with the covariance of SVGP ([1], Eq. 11).

    The divergence has the whole mean's squared norm in the kernel's function space in the place of the squared norm of m. As in
    the library :math:`m = L e` and :math:`S = L T T^\top L^\top`, :math:`L L^\top = K_\beta`, so that nothing but the basis of the
    mean differs from Orth, whose e is :math:`e + L^{-1} K_{\beta \gamma} a`.
    """
    M, H = len(beta), len(gamma)
    L = jnp.linalg.cholesky(prior_covariance(kernel, beta))
    a = numpyro.param("a", jnp.zeros(H))
    e = numpyro.param("e", jnp.zeros(M))
    T = numpyro.param("T", jnp.eye(M), constraint=dense_lower_cholesky)
    across = solve_lower(L, kernel(beta, gamma)) @ a
    norm = a @ kernel(gamma, gamma) @ a + 2 * e @ across + e @ e
    spread = jnp.sum(T**2) - M - 2 * jnp.sum(jnp.log(jnp.diag(T)))
    numpyro.factor("kl", -(norm + spread) / 2)

    def f(X):
        A = solve_lower(L, kernel(beta, X))
        return Marginals(kernel(X, gamma) @ a + e @ A, jnp.sum((T.T @ A) ** 2, 0), kernel(X) - jnp.sum(A**2, 0))

    return f


def decoupled(kernel, beta, gamma):
    r"""Mean :math:`k_{x \alpha} a`, covariance :math:`k_{xx'} - k_{x \beta} (B^{-1} + K_\beta)^{-1} k_{\beta x'}` ([1], Eq. 8).

    alpha is gamma and beta together, as in the experiments of [1]; with B = R R' and H = I + R' K_beta R

    .. math:: KL = \tfrac12 \left( a^\top K_\alpha a + \log |H| - \mathrm{tr}(K_\beta R H^{-1} R^\top) \right)

    It is SVGP's covariance with :math:`S^{-1} = K_\beta^{-1} + B`: whatever only shrinks the prior, as the optimum does. R = 0,
    the prior, is a stationary point; R starts beside it.
    """
    K = prior_covariance(kernel, beta)
    a_gamma = numpyro.param("a_gamma", jnp.zeros(len(gamma)))
    a_beta = numpyro.param("a_beta", jnp.zeros(len(beta)))
    R = jnp.tril(numpyro.param("R", 1e-3 * jnp.eye(len(beta))))
    C = jnp.linalg.cholesky(jnp.eye(len(beta)) + R.T @ K @ R)
    V = solve_lower(C, R.T)
    norm = a_gamma @ kernel(gamma, gamma) @ a_gamma + 2 * a_gamma @ kernel(gamma, beta) @ a_beta + a_beta @ K @ a_beta
    spread = 2 * jnp.sum(jnp.log(jnp.diag(C))) - jnp.sum((V @ K) * V)
    numpyro.factor("kl", -(norm + spread) / 2)

    def f(X):
        cross = kernel(beta, X)
        variance = kernel(X) - jnp.sum((V @ cross) ** 2, 0)
        return Marginals(kernel(X, gamma) @ a_gamma + a_beta @ cross, jnp.zeros_like(variance), variance)

    return f


def prior_covariance(kernel, Z):
    """K with the library's jitter."""
    return add_jitter(kernel(Z, Z), default_jitter(Z.dtype) * kernel(Z).mean())


# ---------------------------------------------------------------- training


def model(X, y, *, N, basis, likelihood, kernel, beta, gamma):
    f = basis(kernel, beta, gamma)
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihood(f(X)), obs=y)


class Method(NamedTuple):
    basis: Callable
    optimizer: optax.GradientTransformation
    natural: bool = False

    def svi(self, N, likelihood):
        ours = self.basis in (coupled, orth, solve_gp)  # the other two have only parameters, and nothing to guide
        guide = ogp.AutoSparseGP(model, natural=self.natural) if ours else lambda *args, **kwargs: None
        return SVI(model, guide, self.optimizer, TraceMeanField_ELBO(), N=N, basis=self.basis, likelihood=likelihood)


def train(method, likelihood, X, y, rows, checkpoints, **fixed):
    """Bounds on all data (nats) after the given numbers of steps, and seconds per step.

    :param rows: rows of the data for each step, shape (steps, B); ``None`` for all of them.
    """
    svi = method.svi(len(X), likelihood)
    state = jax.jit(partial(svi.init, jax.random.PRNGKey(0)))(X[:2], y[:2], **fixed)

    def step(i, state, rows, X, y, fixed):
        batch = (X, y) if rows is None else (X[rows[i]], y[rows[i]])
        return svi.update(state, *batch, **fixed)[0]

    def steps(state, start, stop, *data):  # all of them arguments: a constant would be worked out at compile time
        return jax.lax.fori_loop(start, stop, lambda i, s: step(i, s, *data), state)

    data = (rows, X, y, fixed)
    run = jax.jit(steps).lower(state, 0, 0, *data).compile()
    bound = jax.jit(lambda state, X, y, fixed: -svi.evaluate(state, X, y, **fixed))
    bounds, seconds, done = [], 0.0, 0
    for stop in checkpoints:
        begin = time.perf_counter()
        state = jax.block_until_ready(run(state, done, stop, *data))
        seconds, done = seconds + time.perf_counter() - begin, stop
        bounds.append(float(bound(state, X, y, fixed)))
    return np.array(bounds), seconds / done


# ---------------------------------------------------------------- optima


@partial(jax.jit, static_argnames=("likelihood", "num_covariances", "iterations"))
def optimum(X, y, kernel, sets, *, likelihood, num_covariances=1, iterations=1):
    r"""The best bound for a mean in the span of all sets and a Gaussian with covariance for each of the first ``num_covariances``.

    Each iteration solves the problem with Gaussian noise whose precisions and residuals are :math:`-2\, \partial E / \partial v`
    and :math:`\partial E / \partial m`, E(m, v) being the expected log likelihoods. That is Newton's step for the mean and a
    natural one of length 1 for the covariances. For Gaussian noise it is the problem itself, and one iteration is enough.
    """
    covariances = [[kernel(other, s) for other in sets[: i + 1]] for i, s in enumerate(sets)]
    A = project(decompose(covariances, default_jitter(X.dtype)), [kernel(s, X) for s in sets])
    features, blocks = jnp.concatenate(A), A[:num_covariances]
    residual = residual_variance(kernel(X), blocks)

    def expected(mean, variance):
        return likelihood(Marginals(mean, jnp.zeros_like(variance), variance)).log_prob(y).sum()

    def iterate(_, state):
        mean, variance, _ = state
        slopes, curvatures = jax.grad(expected, (0, 1))(mean, variance)
        precision = -2 * curvatures
        joint = jnp.eye(len(features)) + (features * precision) @ features.T
        w = jnp.linalg.solve(joint, features @ (precision * mean + slopes))
        variance, kl = residual, w @ w / 2
        for Ai in blocks:
            C = jnp.linalg.cholesky(jnp.eye(len(Ai)) + (Ai * precision) @ Ai.T)  # S = (C C')^-1
            variance = variance + jnp.sum(solve_lower(C, Ai) ** 2, 0)
            kl = kl + (jnp.sum(solve_lower(C, jnp.eye(len(Ai))) ** 2) - len(Ai)) / 2 + jnp.sum(jnp.log(jnp.diag(C)))
        mean = features.T @ w
        return mean, variance, expected(mean, variance) - kl

    start = (jnp.zeros_like(y), kernel(X), jnp.zeros((), y.dtype))
    return jax.lax.fori_loop(0, iterations, iterate, start)[2]


# ---------------------------------------------------------------- the table


def methods(args):
    adam = optax.adam(args.adam)
    natural = ogp.natural_gradient(adam, args.rate, ramp_up=args.ramp_up, mean_only=optax.adam(args.mean_only))
    return {
        "Coupled": Method(coupled, adam),
        "CoupledNat": Method(coupled, natural, True),
        "Orth": Method(orth, adam),
        "OrthNat": Method(orth, natural, True),
        "Hybrid": Method(hybrid, adam),
        "Decoupled": Method(decoupled, adam),
        "SOLVE-GP": Method(solve_gp, natural, True),
    }


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="npz file with X and y (kin40k, ringnorm)")
    parser.add_argument("--likelihood", choices=("gaussian", "bernoulli"), default="gaussian")
    parser.add_argument("--num-data", type=int, default=5000, help="rows to use at most")
    parser.add_argument("--num-inducing", type=int, default=100, help="|beta| and |gamma|")
    parser.add_argument("--batch-size", type=int, help="by default all rows")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--variance", type=float, default=1.0)
    parser.add_argument("--lengthscale", type=float, default=4.0)
    parser.add_argument("--noise", type=float, default=0.25)
    parser.add_argument("--adam", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=0.5, help="length of natural steps")
    parser.add_argument("--ramp-up", type=int, default=0, help="steps over which that length grows")
    parser.add_argument("--mean-only", type=float, default=1.0, help="OrthNat: Adam's rate for gamma's weights")
    parser.add_argument("--only", nargs="+", help="names of the methods to run")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    jax.config.update("jax_enable_x64", True)
    X, y = (jnp.asarray(a, jnp.float64) for a in load(args.data, args.num_data, args.seed))
    likelihood = partial(likelihoods.Gaussian, scale=args.noise)
    if args.likelihood == "bernoulli":
        y, likelihood = (y > y.mean()).astype(float), likelihoods.Bernoulli
    rng, M = np.random.default_rng(args.seed), args.num_inducing
    kernel = args.variance * kernels.Matern32(args.lengthscale)
    beta = init.kmeans(jax.random.PRNGKey(args.seed), X, M)
    gamma = X[rng.choice(len(X), M, replace=False)]
    rows = jnp.asarray(rng.integers(0, len(X), (args.steps, args.batch_size))) if args.batch_size else None
    checkpoints = [s for s in CHECKPOINTS if s < args.steps] + [args.steps]

    iterations = 1 if args.likelihood == "gaussian" else 20

    def best(basis):
        sets = [beta] if basis is coupled else [beta, gamma]
        covariances = 2 if basis is solve_gp else 1
        return optimum(X, y, kernel, sets, likelihood=likelihood, num_covariances=covariances, iterations=iterations)

    print_head(args, len(X), checkpoints)
    for name, method in methods(args).items():
        if args.only and name not in args.only:
            continue
        bounds, seconds = train(method, likelihood, X, y, rows, checkpoints, kernel=kernel, beta=beta, gamma=gamma)
        values = [*bounds, best(method.basis)]
        print(f"{name:12s}" + "".join(f"{v / len(X):>10.4f}" for v in values) + f"{1e3 * seconds:>10.1f}", flush=True)


def print_head(args, N, checkpoints):
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "not set")
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}, {os.cpu_count()} CPUs, OPENBLAS_NUM_THREADS {threads}")
    print(f"{args.likelihood}, N = {N}, B = {args.batch_size or N}, {args.num_inducing} points in beta and in gamma")
    print(
        f"Adam({args.adam}); natural steps of {args.rate}, with Adam({args.mean_only}) for the weights of OrthNat's gamma"
    )
    print(f"{'nats / point':12s}" + "".join(f"{s:>10d}" for s in checkpoints) + f"{'optimum':>10s}{'ms / step':>10s}")


if __name__ == "__main__":
    main()
