"""Factors of many groups: several at a time on few cores, and where rounding leaves none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.functions.groups import charges
from numpyro_orthgp.math.grouped import group_whitener, log_det
from tests.test_export import output_of

SEVERAL = """
import jax, jax.numpy as jnp
from numpyro_orthgp.functions.groups import charges
from numpyro_orthgp.math.grouped import log_det
C = [jnp.eye(32) + 0.1 * (i + 1) * jnp.ones((512, 32, 32)) for i in range(4)]
f = jax.jit(lambda C: [log_det(c).sum() for c in C])
for _ in range(30):
    jax.block_until_ready(f(C))
print("all came back")
"""


def test_several_batches_of_groups_do_not_wait_for_each_other():
    """Of two or more functions in one model. They waited for ever, now and then, as threads of one pool."""
    assert "all came back" in output_of(SEVERAL, 1)


def test_a_group_without_a_factor_is_charged_row_by_row():
    bad, good = np.full((3, 3), 1e8) + np.diag([0.0, -10.0, 5.0]), np.eye(3) + 0.5
    C = jnp.asarray(np.stack([bad, good]), jnp.float32)
    charged = log_det(C)
    np.testing.assert_allclose(charged, [np.log(np.diag(bad)).sum(), np.linalg.slogdet(good)[1]], rtol=1e-5)
    slope = jax.grad(lambda C: log_det(C).sum())(C)
    np.testing.assert_allclose(slope, [np.diag(1 / np.diag(bad)), np.linalg.inv(good)], rtol=1e-5, atol=1e-12)
    whitened = jax.grad(lambda C: jnp.log(jnp.diagonal(group_whitener(C), axis1=1, axis2=2)).sum())(C)
    np.testing.assert_allclose(-2 * np.tril(whitened + whitened.mT) / 2, np.tril(slope), rtol=1e-4, atol=1e-6)


def test_a_row_that_stands_for_several_pays_its_own_share():
    """Equal shares charged a heavy row with the residual of the group too little: no bound on the weighted evidence."""
    weights = np.array([9.0, 1.0, 2.0])
    for D in (np.diag([0.3, 0.0, 0.0]), np.full((3, 3), 0.2) + np.diag([0.5, 0.1, 0.0])):
        own = np.asarray(charges(jnp.asarray(D, jnp.float32)[None], jnp.ones(3, jnp.float32)))
        np.testing.assert_allclose(own.sum(), np.linalg.slogdet(np.eye(3) + D)[1], rtol=1e-5)
        root = np.sqrt(weights)
        assert weights @ own >= np.linalg.slogdet(np.eye(3) + root[:, None] * D * root)[1]
