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
from numpyro_orthgp.math.grouped import log_det
C = [jnp.eye(32) + 0.1 * (i + 1) * jnp.ones((512, 32, 32)) for i in range(4)]
f = jax.jit(lambda C: [log_det(c).sum() for c in C])
for _ in range(30):
    jax.block_until_ready(f(C))
print("all came back")
"""

ON_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, numpyro, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from numpyro.infer import SVI, TraceMeanField_ELBO
import numpyro_orthgp as ogp
from numpyro_orthgp.math.grouped import log_det

mesh = Mesh(np.array(jax.devices()), ("data",))
assert mesh.size == 8

def compiled(function, *args):
    program = jax.jit(function).lower(*args).compile()
    assert "all-gather" not in program.as_text()
    return program(*args)

root = np.random.default_rng(0).normal(size=(2, 24, 16, 16)).astype(np.float32)
C = np.eye(16, dtype=np.float32) + root @ np.swapaxes(root, -1, -2)
value = compiled(log_det, jax.device_put(C, NamedSharding(mesh, P(None, "data"))))
np.testing.assert_allclose(value, np.linalg.slogdet(C)[1], rtol=1e-5)

N = 4096
X = np.sort(np.random.default_rng(0).normal(size=(N, 2)), 0).astype(np.float32)
y = np.sin(X[:, 0])

def model(X, y):
    f = ogp.gp("f", ogp.kernels.RBF(1.0), jnp.asarray(np.linspace(-2, 2, 32, dtype=np.float32).reshape(16, 2)))
    with numpyro.plate("data", N):
        numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.1), obs=y)

guide = ogp.AutoSparseGP(model, residual="tight", group_size=16)
svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
state = svi.init(jax.random.PRNGKey(0), X, y)
_, loss = compiled(svi.update, state, *jax.device_put((X, y), NamedSharding(mesh, P("data"))))
np.testing.assert_allclose(loss, jax.jit(svi.update)(state, X, y)[1], rtol=1e-5)
print("groups stay where they are")
"""


def test_several_batches_of_groups_do_not_wait_for_each_other():
    """Of two or more functions in one model. They waited for ever, now and then, as threads of one pool."""
    assert "all came back" in output_of(SEVERAL, 1)


def test_groups_on_eight_devices_stay_there():
    """Each device has the factors of its own groups: their matrices are not gathered, and no device waits for another."""
    assert "groups stay where they are" in output_of(ON_DEVICES, 8)


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
        own = np.asarray(charges(jnp.asarray(D, jnp.float32)[None], jnp.diag(D), jnp.ones(3, jnp.float32)))
        np.testing.assert_allclose(own.sum(), np.linalg.slogdet(np.eye(3) + D)[1], rtol=1e-5)
        root = np.sqrt(weights)
        assert weights @ own >= np.linalg.slogdet(np.eye(3) + root[:, None] * D * root)[1]
