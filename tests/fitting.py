"""A small linear model for the tests of the training loop, and the loop that it is compared with, written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO

from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.loop import seed_of

N = 50
KEY = jax.random.PRNGKey(3)


def data(num: int = N) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num, 3))
    return X, X @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=num)


def model(X, y=None, *, N=N):
    """Quick to compile, hence no plate: its random subsample alone takes a second."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.handlers.scale(scale=N / len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 0.5).to_event(1), obs=y)


def guide(X, y=None, *, N=N):
    loc = numpyro.param("loc", jnp.zeros(3))
    numpyro.sample("w", dist.Normal(loc, 0.1).to_event(1))


def make(optimizer: Any = None, loss: Any = None, model: Callable[..., Any] = model, guide: Any = guide) -> SVI:
    return SVI(model, guide, optimizer or optax.adam(0.05), loss or Trace_ELBO())


def by_hand(svi: SVI, key: Any, arrays: tuple[Any, ...], batch_size: int, num_steps: int, **kwargs: Any):
    """The states and losses of steps taken one at a time, on rows picked by plain indexing."""
    rows = Batches(arrays, batch_size, seed_of(key)).row_numbers(0, num_steps)
    update = jax.jit(lambda state, *batch: svi.update(state, *batch, **kwargs))
    state = svi.init(key, *(jnp.asarray(a[rows[0]]) for a in arrays), **kwargs)
    states, losses = [state], []
    for row in rows:
        state, loss = update(state, *(jnp.asarray(a[row]) for a in arrays))
        states.append(state)
        losses.append(float(loss))
    return states, np.asarray(losses)


def leaves(tree: Any) -> list[np.ndarray]:
    is_key = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def assert_same_bits(a: Any, b: Any) -> None:
    if jax.default_backend() != "cpu":  # XLA's sums on GPUs have no fixed order
        return assert_close(a, b, 1e-10)
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def assert_close(a: Any, b: Any, rtol: float = 1e-12) -> None:
    for x, y in zip(leaves(a), leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-14)
