"""The update step compiles for accelerators that are not here, and is the same on several devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from tests import problems


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("sizes", [(5, 4), (300, 70)])  # the larger by halves, in strips, and LAPACK calls of batches
def test_update_exports(rng, platform, dtype, sizes):
    if platform == "tpu" and dtype == jnp.float64:
        pytest.skip("TPUs have no Cholesky factor in float64")
    X, y = (jnp.asarray(a, dtype) for a in problems.data(rng, 16))
    Z, O = (jnp.asarray(s, dtype) for s in problems.sets(rng, sizes))
    kwargs = {"inducing": [Z, O], "likelihood": problems.gaussian(0.3), "jitter": None, "N": 100}
    if max(sizes) > 100:
        y, kwargs = jnp.stack([y, -y], -1), kwargs | {"lengthscale": [[0.9], [0.5]], "num_latents": 2, "to_event": 1}
    guide = ogp.AutoSparseGP(problems.model, residual="tight")
    svi = SVI(problems.model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    state = svi.init(jax.random.PRNGKey(0), X, y, **kwargs)
    leaves, tree = jax.tree.flatten(state)

    def step(leaves, X, y):
        state, loss = svi.update(jax.tree.unflatten(tree, leaves), X, y, **kwargs)
        return jax.tree.leaves(state), loss

    exported = export.export(jax.jit(step), platforms=[platform])(leaves, X, y)
    assert exported.platforms == (platform,) and len(exported.mlir_module_serialized) > 1000
    # Left to itself an accelerator rounds products to TF32 or bfloat16.
    products = [line for line in exported.mlir_module().splitlines() if "stablehlo.dot" in line]
    assert len(products) > 20
    assert [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line] == []


SHARDED = """
import jax, numpy as np, optax
import jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from numpyro.infer import SVI, TraceMeanField_ELBO
import numpyro_orthgp as ogp
from tests import problems

assert len(jax.devices()) == 4
rng = np.random.default_rng(0)
X, y = (jnp.asarray(a) for a in problems.data(rng, 32))
sets = [jnp.asarray(s) for s in problems.sets(rng, [5, 4])]
kwargs = {"inducing": sets, "likelihood": problems.gaussian(0.3), "jitter": None, "N": 100}
svi = SVI(problems.model, ogp.AutoSparseGP(problems.model), optax.adam(0.05), TraceMeanField_ELBO())
step = jax.jit(lambda state, X, y: svi.update(state, X, y, **kwargs))
mesh = Mesh(np.array(jax.devices()), ("data",))
runs = []
for spec in (P(), P("data")):
    Xs, ys = (jax.device_put(a, NamedSharding(mesh, spec)) for a in (X, y))
    assert len(Xs.sharding.device_set) == 4
    state = svi.init(jax.random.PRNGKey(0), X, y, **kwargs)
    losses = []
    for _ in range(8):
        state, loss = step(state, Xs, ys)
        losses.append(float(loss))
    runs.append(losses)
np.testing.assert_allclose(runs[1], runs[0], rtol=1e-10)
assert runs[0][-1] < runs[0][0]
print("same losses on 4 devices")
"""


@pytest.mark.slow
def test_sharded_over_four_devices_gives_the_same_losses():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env=env,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "same losses on 4 devices" in run.stdout
