"""Counts with SVGP, the tightened bound and the full GP: the experiments of Titsias 2025, Sec. 5.4 and Table 5.

    python benchmarks/poisson.py [--data nyc_bicycle_kaggle210.npz] [--steps 4000] [--repeats 5]

First 50 counts on a grid over [-10, 10] with rate 3.5 + 3 sin x and 6 inducing points. With ``--data`` (arrays ``X`` of high and
low temperature, and ``counts``, whose first column is the Brooklyn bridge) the mean test log likelihood of M = 8, 16 and 32 points
over random splits into 90% and 10%. Squared-exponential kernel, natural gradients for q and Adam for the rest, float64; the full
GP is SVGP with an inducing point at each distinct input.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods


def model(X, y=None, *, Z, learn_points, lengthscale=1.0, offset=None):
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", jnp.full(X.shape[1], lengthscale), constraint=positive)
    scale = numpyro.param("scale", jnp.asarray(1.0), constraint=positive)
    offset = 0.0 if offset is None else numpyro.param("offset", jnp.asarray(offset))
    Z = numpyro.param("Z", Z) if learn_points else Z
    f = ogp.gp("f", scale**2 * kernels.RBF(lengthscale), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Poisson(f(X) + offset), obs=y)


def fit(X, y, Z, residual, steps, rate=0.02, **kwargs):
    """The bound (nats) and parameters after natural steps for q and Adam for the rest."""
    guide = ogp.AutoSparseGP(model, residual=residual, natural=True)
    optimizer = ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(rate, steps)), 0.1, ramp_up=20)
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO(), Z=Z, **kwargs)

    @jax.jit
    def run(X, y):
        state = svi.init(jax.random.PRNGKey(0), X, y)
        state, losses = jax.lax.scan(lambda s, _: svi.update(s, X, y), state, None, length=steps)
        return state, -svi.evaluate(state, X, y), losses

    state, bound, losses = run(X, y)
    return float(bound), svi.get_params(state), np.asarray(losses)


def toy_data(seed):
    x = np.linspace(-10, 10, 50)
    return jnp.asarray(x[:, None]), jnp.asarray(np.random.default_rng(seed).poisson(3.5 + 3 * np.sin(x)).astype(float))


def toy(seed, steps):
    """Bounds of SVGP, the tightened SVGP and the full GP on one draw of the toy data, and the learned v."""
    X, y = toy_data(seed)
    # Inducing points have local optima: the best of several starts, the same ones for both bounds.
    starts = [jnp.linspace(-end, end, 6)[:, None] for end in (7, 8, 9, 10)]
    loose = max(fit(X, y, Z, "prior", steps, learn_points=True)[0] for Z in starts)
    tight, params, _ = max((fit(X, y, Z, "tight", steps, learn_points=True) for Z in starts), key=lambda run: run[0])
    full, _, _ = fit(X, y, X, "prior", steps, learn_points=False)
    return loose, tight, full, float(params["f_residual_scale"])


def bikes(path, seed, steps, sizes=(8, 16, 32)):
    """Mean test log likelihood by method, for one random split."""
    data = np.load(path)
    X, y = data["X"][:, :2], data["counts"][:, 0]
    X = (X - X.mean(0)) / X.std(0)
    order = np.random.default_rng(seed).permutation(len(X))
    test, train = order[: len(X) // 10], order[len(X) // 10 :]
    X_train, y_train = jnp.asarray(X[train]), jnp.asarray(y[train])
    # From zero, exp(f) would begin at astronomical rates; from long lengthscales, whose many counts weigh much, it never returns.
    start = {"offset": float(np.log(y_train.mean())), "lengthscale": 0.3}
    distinct = jnp.asarray(np.unique(X[train], axis=0))
    cases = [("Full GP", distinct, "prior")]
    for M in sizes:
        Z = init.kmeans(jax.random.PRNGKey(seed), X_train, M)
        cases += [(f"SVGP {M}", Z, "prior"), (f"SVGP-new {M}", Z, "tight")]
    scores = {}
    for name, Z, residual in cases:
        kwargs = {"Z": Z, "learn_points": name != "Full GP", **start}
        bound, params, _ = fit(X_train, y_train, residual=residual, steps=steps, rate=0.05, **kwargs)
        guide = ogp.AutoSparseGP(model, residual=residual)
        f = jax.jit(lambda p, g=guide, k=kwargs: ogp.posterior(model, g, p, X_train, y_train, **k)["f"])(params)
        likelihood = likelihoods.Poisson(f(jnp.asarray(X[test])) + params["offset"], integrator=ogp.GaussHermite(100))
        v = float(params.get("f_residual_scale", 1.0))
        scores[name] = float(likelihood.log_predictive(y[test]).mean()), bound, v
    return scores


def main(argv=None):
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="npz file with X and counts")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)

    print("toy: bound of SVGP, tightened, full GP; v")
    for seed in range(args.repeats):
        loose, tight, full, v = toy(seed, args.steps)
        print(f"  seed {seed}: {loose:.3f} {tight:.3f} {full:.3f}; v = {v:.3f}")
    if args.data:
        runs = [bikes(args.data, seed, args.steps) for seed in range(args.repeats)]
        print("bikes: test log likelihood per point (standard error), bound, v")
        for name in runs[0]:
            scores, bounds, v = np.array([run[name] for run in runs]).T
            error = scores.std(ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else float("nan")
            print(f"  {name:12s} {scores.mean():9.3f} ({error:.3f}) {bounds.mean():10.1f} {v.mean():.4f}")


if __name__ == "__main__":
    main()
