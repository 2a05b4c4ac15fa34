"""Convolutional kernels, inducing patches and SVGP with them against values that GPflow computed (jitter 0, float64)."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.inducing import InducingPatches

CASES = ("unweighted", "weighted", "weighted_ard")


def model(X, y=None, *, kernel, patches, noise_variance):
    f = ogp.gp("f", kernel, InducingPatches(patches), jitter=0.0)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise_variance**0.5), obs=y)


@pytest.mark.parametrize("name", CASES)
def test_gpflow_values(golden, name):
    case = json.loads((golden / f"case10_conv_8x8_3x3_{name}.json").read_text())
    given = {k: np.array(v) if isinstance(v, list) else v for k, v in case["inputs"].items()}
    expected = {k: np.array(v) for k, v in case["outputs"].items()}
    X, X2, y = given["X"], given["X2"], given["y"][:, 0]
    shapes = {"image_shape": tuple(given["image_shape"]), "patch_shape": tuple(given["patch_shape"])}
    # GPflow divides by the number of patches.
    weights = given["weights"] / len(given["weights"])
    kernel = given["variance"] * kernels.Convolutional(kernels.RBF(given["lengthscales"]), weights=weights, **shapes)
    params = {"f.u0_loc": jnp.asarray(given["q_mu"][:, 0]), "f.u0_scale_tril": jnp.asarray(given["q_sqrt"][0])}
    kwargs = {"kernel": kernel, "patches": jnp.asarray(given["Z"]), "noise_variance": given["noise_variance"]}
    guide = ogp.AutoSparseGP(model)

    @jax.jit
    def ours(params, X, X2):
        feature = InducingPatches(kwargs["patches"])
        loss = TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide, X, y, **kwargs)
        f = ogp.posterior(model, guide, params, X, y, **kwargs)["f"](X)
        return {
            "patches": kernels.extract_patches(X, **shapes),
            "Kuu": feature.covariance(kernel, feature),
            "Kuf": feature.covariance_with_inputs(kernel, X),
            "K": kernel(X, X),
            "K_X_X2": kernel(X, X2),
            "K_diag": kernel(X),
            "svgp_elbo": -loss,
            "svgp_f_mean": f.mean[:, None],
            "svgp_f_var": f.variance[:, None],
        }

    for key, value in ours(params, X, X2).items():
        assert_allclose(value, expected[key], rtol=1e-9, atol=1e-11, err_msg=key)
