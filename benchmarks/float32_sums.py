"""What rounding costs collapsed bounds in float32: values and slopes beside float64, by numbers of rows and sizes of the noise.

Prints, for "dtc" (no charge for the residual, so what is left is sums), the bound in float64, the error of float32 in nats and in
units in the last place of the value itself, and the relative error of the derivative by the lengthscale.

    python -m benchmarks.float32_sums --rows 10000 1000000 --noise 0.1 0.01
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_orthgp as ogp


def problem(num_rows: int, noise: float, num_points: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(num_rows, 2))
    y = np.sin(6 * X[:, 0]) * np.cos(4 * X[:, 1]) + noise * rng.normal(size=num_rows)
    return X.astype(np.float32), y.astype(np.float32), rng.uniform(size=(num_points, 2)).astype(np.float32)


def bound_and_slope(num_rows: int, noise: float, dtype: type) -> tuple[float, float]:
    X, y, Z = (jnp.asarray(a, dtype) for a in problem(num_rows, noise))
    scale = jnp.asarray(np.float32(noise), dtype)

    def bound(lengthscale: jax.Array, X: jax.Array, y: jax.Array) -> jax.Array:
        kernel = ogp.kernels.Matern52(lengthscale)
        return ogp.CollapsedGP(kernel, X, Z, scale, bound="dtc", jitter=1e-6).log_prob(y)

    value, slope = jax.jit(jax.value_and_grad(bound))(jnp.asarray(0.5, dtype), X, y)
    return float(value), float(slope)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.1, 0.01])
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print(f"{'rows':>10s} {'noise':>7s} {'bound, float64':>16s} {'error':>9s} {'last place':>10s} {'slope':>9s}")
    for num_rows in args.rows:
        for noise in args.noise:
            value, slope = bound_and_slope(num_rows, noise, jnp.float64)
            coarse, coarse_slope = bound_and_slope(num_rows, noise, jnp.float32)
            place = np.spacing(np.float32(abs(value)))
            print(
                f"{num_rows:10d} {noise:7.3f} {value:16.2f} {coarse - value:9.2f} {place:10.3f} {coarse_slope / slope - 1:9.1e}"
            )


if __name__ == "__main__":
    main()
