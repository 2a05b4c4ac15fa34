"""What a row costs that is a functional of f: covariances with M inducing points and the variance, in operations and in time.

    python -m benchmarks.functionals [--rows 1000,4000] [--points 64,256] [--nodes 8]

RBF of two columns, float32. Operations are as XLA counts them in the compiled program, over B M: where rows have a fixed number
of nodes they are one number for all B and M.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_orthgp as ogp
from benchmarks.many_functions import seconds
from numpyro_orthgp import kernels
from numpyro_orthgp.inducing.functional import Functional

KERNEL = kernels.Matern52(0.7).named("rough") + kernels.RBF(0.5)
BOXES = kernels.RBF(0.5)  # has a closed form


def kinds(X: Any, num_nodes: int) -> dict[str, tuple[Any, Functional]]:
    """Functionals of as many rows as X has."""
    nodes = X[:, None] + 0.1 * jax.random.normal(jax.random.PRNGKey(0), (len(X), num_nodes, X.shape[1]), X.dtype)
    return {
        "values": (KERNEL, ogp.concatenate([X])),
        "slopes": (KERNEL, ogp.Derivative(X, 0)),
        "curvatures": (KERNEL, ogp.Derivative(X, (0, 0))),
        f"averages of {num_nodes}": (KERNEL, ogp.Average(nodes)),
        f"integrals, {num_nodes}^2 nodes": (KERNEL, ogp.Integral(X, X + 0.2, num_nodes=num_nodes)),
        "integrals, closed": (BOXES, ogp.Integral(X, X + 0.2)),
    }


@jax.jit
def moments(kernel: Any, rows: Functional, Z: Any) -> tuple[Any, Any]:
    return rows.covariance_with_inputs(kernel, Z), rows.variance(kernel)


def operations(*args: Any) -> float:
    found = moments.lower(*args).compile().cost_analysis()
    return (found[0] if isinstance(found, list) else found)["flops"]


def case(name: str, B: int, M: int, num_nodes: int) -> tuple[Any, Functional, Any]:
    rng = np.random.default_rng(0)
    X, Z = (jnp.asarray(rng.uniform(size=(n, 2)), jnp.float32) for n in (B, M))
    kernel, rows = kinds(X, num_nodes)[name]
    return kernel, rows.checked(2, jnp.float32), Z


def main(argv: list[str] | None = None) -> list[tuple[str, int, int, float, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--rows", "1000,4000"), ("--points", "64,256")):
        parser.add_argument(name, type=lambda text: [int(n) for n in text.split(",")], default=default)
    parser.add_argument("--nodes", type=int, default=8)
    args = parser.parse_args(argv)
    found = []
    print(f"{'rows are':28s}{'B':>7s}{'M':>6s}{'operations / B M':>18s}{'ns / B M':>10s}")
    for name in kinds(jnp.zeros((1, 2)), args.nodes):
        for B in args.rows:
            for M in args.points:
                of = case(name, B, M, args.nodes)
                count, ns = operations(*of) / (B * M), 1e9 * seconds(moments, *of) / (B * M)
                found.append((name, B, M, count, ns))
                print(f"{name:28s}{B:7d}{M:6d}{count:18.1f}{ns:10.2f}", flush=True)
    return found


if __name__ == "__main__":
    main()
