"""The covariance of f within groups of rows, beside NumPy."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp.functions.within import root_within

X = np.linspace(-2.0, 2.0, 9)[:, None]
Z, NODES = X[::3], np.random.default_rng(5).uniform(-2.6, 2.6, (12, 1))
GROUPS = np.arange(12).reshape(4, 3)
FACTOR = np.linspace(-1.0, 2.0, 12)


def rbf(A, B):
    return 0.7 * np.exp(-0.5 * (A - B.T) ** 2 / 0.8**2)


@pytest.mark.parametrize("v", [None, 0.4])
def test_covariance_within_groups(v):
    collapsed = ogp.CollapsedGP(0.7 * kernels.RBF(0.8), jnp.asarray(X), jnp.asarray(Z), 0.3, jitter=1e-12)
    f = collapsed.posterior(jnp.sin(2 * jnp.asarray(X[:, 0])))
    # The best q(u) of Titsias (2009), and the residual that is v times the prior's.
    A = np.linalg.solve(rbf(Z, Z), rbf(Z, NODES))
    S = rbf(Z, Z) @ np.linalg.solve(rbf(Z, Z) + rbf(Z, X) @ rbf(X, Z) / 0.09, rbf(Z, Z))
    residual = rbf(NODES, NODES) - rbf(NODES, Z) @ A
    assert np.diag(residual).max() > 0.01
    C = A.T @ S @ A + (1.0 if v is None else v) * residual
    m = replace(f, residual_scale=None if v is None else jnp.asarray(v))(jnp.asarray(NODES))
    for marginals, expected in ((m, C), (m * FACTOR + FACTOR, np.diag(FACTOR) @ C @ np.diag(FACTOR))):
        root = np.asarray(root_within(marginals.joint, 3))
        wanted = np.stack([expected[np.ix_(g, g)] for g in GROUPS])
        np.testing.assert_allclose(root @ np.swapaxes(root, 1, 2), wanted, atol=1e-6)
