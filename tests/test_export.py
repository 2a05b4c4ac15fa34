"""The update step compiles for accelerators that are not here, and is the same on several devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
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


@pytest.mark.parametrize("num_latents", [None, 2])
def test_predictions_are_exported_for_any_number_of_rows(rng, num_latents):
    X, y = problems.data(rng, 30)
    y = y if num_latents is None else np.stack([y, -y], -1)
    f = ogp.CollapsedGP(ogp.kernels.Matern32(1.0), X, X[:6], 0.1, num_outputs=num_latents).posterior(y)
    (rows,) = export.symbolic_shape("rows")

    def predict(X):
        marginals = f(X)
        return marginals.mean, marginals.variance

    exported = export.export(jax.jit(predict))(jax.ShapeDtypeStruct((rows, X.shape[1]), X.dtype))
    for num in (1, 7, 30):
        for a, b in zip(exported.call(X[:num]), predict(X[:num]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


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


def output_of(script, num_devices):
    """What a script prints on so many simulated devices."""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.slow
def test_sharded_over_four_devices_gives_the_same_losses():
    assert "same losses on 4 devices" in output_of(SHARDED, 4)


COLLECTIVES = """
import re, jax, jax.numpy as jnp, numpy as np, numpyro, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from numpyro.infer import SVI, TraceMeanField_ELBO
import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

N, M = 4096, 16
mesh = Mesh(np.array(jax.devices()), ("data",))
assert mesh.size == 8
X = np.random.default_rng(0).normal(size=(N, 3)).astype("f")
y, Z = np.sin(X[:, 0]), X[:M]
rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
Xs, ys = jax.device_put((X, y), rows)
Z = jax.device_put(Z, everywhere)
kernel = kernels.RBF(1.0)

def bound(Z, X, y):
    return ogp.CollapsedGP(kernel, X, Z, 0.1, block_size=512).log_prob(y)

def optimum(Z, X, y):
    return ogp.CollapsedGP(kernel, X, Z, 0.1, block_size=512).posterior(y).beliefs[0].loc

def model(X, y, Z):
    f = ogp.gp("f", kernel, Z)
    with numpyro.plate("data", N):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1), obs=y)

svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
state = svi.init(jax.random.PRNGKey(0), X, y, Z)
f = ogp.CollapsedGP(kernel, X[:200], np.asarray(Z), 0.1).posterior(y[:200])

def predictions(X):
    import numpyro_orthgp.functions.function as function
    function.MIN_BLOCK, function.MAX_ENTRIES = 512, 1
    marginals = f(X)
    return marginals.mean, marginals.variance

programs = {
    "bound": (jax.value_and_grad(bound), Z, Xs, ys),
    "optimum": (optimum, Z, Xs, ys),
    "step": (lambda state, X, y: svi.update(state, X, y, Z), state, Xs, ys),
    "predictions": (predictions, Xs),
}
kinds = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"
for name, (function, *args) in programs.items():
    compiled = jax.jit(function).lower(*args).compile()
    lines = [line for line in compiled.as_text().splitlines() if re.search(rf" ({kinds})(-start)?\\(", line)]
    sizes = []
    for line in lines:
        assert " all-reduce" in line, (name, line[:300])
        result = line.split("=", 1)[1].split("all-reduce")[0]
        sizes += [int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"\\[([\\d,]*)\\]", result)]
    assert sum(sizes) < 4 * M * M + 100, (name, sizes)
    print(name, len(lines), sum(sizes))
    if name == "predictions":
        assert not lines or sum(sizes) < 100
        assert all(s.spec == P("data") for s in jax.tree.leaves(compiled.output_shardings))
    alone = jax.jit(function)(*jax.tree.map(np.asarray, args))
    for a, b in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(alone), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * float(jnp.abs(b).max()))
print("rows stay where they are")
"""


def test_rows_on_eight_devices_stay_there():
    """Of sharded rows nothing is gathered: what travels is sums, as small as the inducing variables."""
    assert "rows stay where they are" in output_of(COLLECTIVES, 8)
