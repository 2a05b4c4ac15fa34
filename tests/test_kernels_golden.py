"""Kernels and their gradients against values of another library, and of 50-digit arithmetic where that one rounds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_orthgp.kernels import (
    RBF,
    ArcCosine,
    Constant,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    Polynomial,
    RationalQuadratic,
    White,
)


def _arccosine(p):
    return p["variance"] * ArcCosine(p["order"], np.array(p["weight_variances"]), p["bias_variance"])


def _periodic(p):  # the lengthscale of exp(-sin^2 / (2 l^2)) is half of ours
    return p["variance"] * Periodic(2 * np.array(p["lengthscales"]), np.array(p["period"]))


def _polynomial(p):
    return Polynomial(p["degree"], np.array(p["variance"]), p["offset"])


KERNELS = {
    "rbf": lambda p: p["variance"] * RBF(np.array(p["lengthscales"])),
    "matern12": lambda p: p["variance"] * Matern12(np.array(p["lengthscales"])),
    "matern32": lambda p: p["variance"] * Matern32(np.array(p["lengthscales"])),
    "matern52": lambda p: p["variance"] * Matern52(np.array(p["lengthscales"])),
    "rational_quadratic": lambda p: p["variance"] * RationalQuadratic(np.array(p["lengthscales"]), p["alpha"]),
    "linear": lambda p: Linear(p["variance"]),
    "linear_ard": lambda p: Linear(np.array(p["variance"])),
    "polynomial2": _polynomial,
    "polynomial3": _polynomial,
    "constant": lambda p: Constant(p["variance"]),
    "white": lambda p: White(p["variance"]),
    "periodic_rbf": _periodic,
    "periodic_rbf_ardperiod": _periodic,
    "arccosine0": _arccosine,
    "arccosine1": _arccosine,
    "arccosine2": _arccosine,
}


@pytest.mark.parametrize("name", KERNELS)
def test_values(name, golden):
    case = json.loads((golden / "case12_kernels.json").read_text())
    X, X2 = np.array(case["inputs"]["X"]), np.array(case["inputs"]["X2"])
    kernel = KERNELS[name](case["outputs"][name]["params"])
    computed = {"K_X": kernel(X, X), "K_X_X2": kernel(X, X2), "K_diag": kernel(X)}
    if name == "white":  # that library's is 0 between two arrays, whatever they hold
        del computed["K_X_X2"]
    for key, value in computed.items():
        np.testing.assert_allclose(value, case["crosscheck"]["truth"][name][key], rtol=1e-12, atol=1e-12)
        if name not in ("matern12", "arccosine0"):  # that library rounds these
            np.testing.assert_allclose(value, case["outputs"][name][key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cls", [RBF, Matern12, Matern32, Matern52])
def test_gradients(cls, golden):
    case = json.loads((golden / "case12_kernel_gradients.json").read_text())
    inputs, truth = case["inputs"], case["crosscheck"]["truth"][cls.__name__.lower()]
    X, X2 = jnp.array(inputs["X"]), jnp.array(inputs["X2"])
    lengthscale = jnp.array(inputs["lengthscales"])

    def total(A, B, lengthscale, variance, W):
        return (W * (variance * cls(lengthscale))(A, B)).sum()

    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(
        X, X2, lengthscale, inputs["variance"], jnp.array(inputs["W"])
    )
    for key, value in zip(("dA", "dB", "dls", "dvar"), gradient, strict=True):
        np.testing.assert_allclose(value, truth["X_X2"][key], rtol=1e-8, atol=1e-8)
    W = jnp.array(case["outputs"][cls.__name__.lower()]["K_X"]["W"])
    both = jax.jit(jax.grad(lambda X: total(X, X, lengthscale, inputs["variance"], W)))(X)
    np.testing.assert_allclose(both, truth["K_X"]["dA"], rtol=1e-8, atol=1e-8)
