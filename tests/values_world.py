"""A second world for the programs of users: f is a table of values, a likelihood takes values, and loops are loops of Python.

:func:`execute` runs the source of a model with the package, or here, where nothing of it is used but the formulas of kernels. Here
``f(X)`` draws the values of f at X when it is asked for them, given the inducing variables and all values before, in float64 with
dense matrices. So ``Trace_ELBO`` of the model in this world, with the draws of the package's guide, has the mean

.. math:: E_{q(u)} E_{p(f \\mid u)} [\\log p(y \\mid f)] - KL[q(u), p(u)],

which is what the package promises for each program that it does not refuse, however f enters.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.primitives import Messenger

import numpyro_orthgp as ogp

JITTER = 1e-10

_tables: list[Table] = []  # of the running model
_guide_trace: dict[str, Any] = {}


class Values:
    """What stands for marginals: values of f."""

    __array_ufunc__ = None

    def __init__(self, values: Any) -> None:
        self.values = values

    def sample(self, rng_key: Any = None, sample_shape: tuple[int, ...] = ()) -> Any:
        return jnp.broadcast_to(self.values, sample_shape + self.values.shape)

    def independent(self) -> Values:
        return self

    def pick(self, which: Any) -> Values:
        return Values(jnp.take_along_axis(self.values, jnp.asarray(which)[:, None], 1)[:, 0])

    def __getitem__(self, key: Any) -> Values:
        return Values(self.values[key])

    def __add__(self, other: Any) -> Values:
        return Values(self.values + other)

    def __mul__(self, other: Any) -> Values:
        return Values(self.values * other)

    def __matmul__(self, W: Any) -> Values:
        return Values(self.values @ W)

    __radd__, __rmul__, draw = __add__, __mul__, sample


class Table:
    """A function, given its whitened inducing variables."""

    def __init__(self, kernel: Any, Z: Any, num_latents: int | None, whitened: Any) -> None:
        self.kernel, self.Z, self.batch, self.whitened = (
            kernel,
            Z,
            () if num_latents is None else (num_latents,),
            whitened,
        )
        self.seen: list[tuple[Any, Any]] = []  # inputs, and what was drawn for them
        _tables.append(self)

    def __call__(self, X: Any) -> Values:
        if isinstance(X, ogp.Average):
            values = self._values(X.nodes.reshape(-1, X.nodes.shape[-1])).reshape(X.nodes.shape[:2])
            return Values(jnp.sum(values * X.weights, 1))
        if isinstance(X, ogp.Tasks):
            return Values(self._values(X.X)).pick(X.task)
        return Values(self._values(jnp.asarray(X)))

    expected = __call__

    def _values(self, X: Any) -> Any:
        every = jnp.concatenate([self.Z, *(at for at, _ in self.seen), X])
        jitter = JITTER * jnp.mean(self.kernel(self.Z)) * jnp.eye(len(every))
        L = jnp.linalg.cholesky(self.kernel(every, every) + jitter)
        noise = jax.random.normal(numpyro.prng_key(), (*self.batch, len(X)))
        known = jnp.concatenate([self.whitened, *(drawn for _, drawn in self.seen), noise], -1)
        self.seen.append((X, noise))
        return (known @ L.T)[..., -len(X) :].T

    def joint(self, X: Any) -> Any:
        return SimpleNamespace(sample=lambda key, shape=(): jnp.broadcast_to(v := self(X).values.T, shape + v.shape))

    def sample_paths(self, rng_key: Any, num: int) -> Callable[[Any], Any]:
        assert num == 1
        return lambda X: self(X).values[None]


def gp(name: str, kernel: Any, inducing: Any, *, num_latents: int | None = None) -> Table:
    sets = inducing if isinstance(inducing, list) else [inducing]
    shapes = [(*(() if num_latents is None else (num_latents,)), len(Z)) for Z in sets]
    parts = [
        numpyro.sample(f"{name}.u{i}", dist.Normal(0, 1).expand(shape).to_event(len(shape)))
        for i, shape in enumerate(shapes)
    ]
    return Table(kernel, jnp.concatenate(sets), num_latents, jnp.concatenate(parts, -1))


def latent_inputs(name: str, num: int, dim: int) -> Any:
    return numpyro.sample(name, dist.Normal(0, 1).expand((num, dim)).to_event(1))


def deep(layers: list[Table]) -> Callable[[Any], Values]:
    return lambda X: layers[-1](layers[0](X).values[:, None] if len(layers) == 2 else X)


# ---------------------------------------------------------------- loops


class _Step(Messenger):
    """Values that are drawn in a step are known in this step, and sites have its number."""

    def __init__(self, step: int, *, sites: bool = False) -> None:
        super().__init__(None)
        self.step, self.sites = step, sites

    def __enter__(self) -> Any:
        self.kept = [(table, list(table.seen)) for table in _tables]
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        for table, seen in self.kept:
            table.seen[:] = seen

    def process_message(self, msg: dict[str, Any]) -> None:
        if self.sites and msg["type"] == "sample":
            if not msg["is_observed"]:
                drawn = {
                    name.rpartition("/")[2]: site for name, site in _guide_trace.items()
                }  # scopes put a prefix before names
                msg["value"], msg["is_observed"] = drawn[msg["name"]]["value"][self.step], True
            msg["name"] = f"{msg['name']}_{self.step}"


def _scan(body: Any, init: Any, xs: Any, length: Any = None, *, sites: bool = False) -> Any:
    carry, results = init, []
    for i in range(len(jax.tree.leaves(xs)[0])):
        with _Step(i, sites=sites):
            carry, result = body(carry, jax.tree.map(lambda x, i=i: x[i], xs))
        results.append(result)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *results)


def _fori_loop(lower: int, upper: int, body: Any, init: Any) -> Any:
    return _scan(lambda carry, i: (body(i, carry), None), init, np.arange(lower, upper))[0]


def _map(body: Any, xs: Any) -> Any:
    return _scan(lambda carry, x: (carry, body(x)), None, xs)[1]


def _of_values(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda f, *args: make(f.values, *args)


_likelihoods = SimpleNamespace(
    Gaussian=_of_values(dist.Normal),
    Poisson=_of_values(lambda f: dist.Poisson(jnp.exp(f))),
    Bernoulli=_of_values(lambda f: dist.Bernoulli(logits=f)),
    StudentT=_of_values(lambda f, df, scale: dist.StudentT(df, f, scale)),
    HeteroskedasticGaussian=_of_values(lambda f: dist.Normal(f[:, 0], jnp.exp(f[:, 1]))),
)
_package = SimpleNamespace(
    gp=gp, latent_inputs=latent_inputs, DeepGP=deep, Average=ogp.Average, Tasks=ogp.Tasks,
    Likelihood=_of_values(lambda f, given: given(f)), stack=lambda parts: Values(jnp.stack([m.values for m in parts], -1)),
)  # fmt: skip
_LOOPS = {
    "lax": SimpleNamespace(scan=_scan, map=_map, fori_loop=_fori_loop),
    "vmap": lambda body: lambda xs: _map(body, xs),
    "jit": lambda f: f,
    "scan": lambda body, init, xs: _scan(body, init, xs, sites=True),
}
WORLDS: dict[str, dict[str, Any]] = {
    "values": {"ogp": _package, "likelihoods": _likelihoods, **_LOOPS},
    "package": {
        "ogp": ogp, "likelihoods": ogp.likelihoods, "lax": jax.lax, "vmap": jax.vmap, "jit": jax.jit, "scan": scan,
    },
}  # fmt: skip


def execute(source: str, world: str, data: dict[str, Any]) -> Callable[[], Any]:
    """The ``model`` that a program defines, in one of :data:`WORLDS`."""
    space = {"jnp": jnp, "numpyro": numpyro, "dist": dist, "handlers": handlers, "kernels": ogp.kernels}
    space |= WORLDS[world] | data
    exec(compile(source, "<program>", "exec"), space)
    return space["model"]


def noted(guide: Callable[[], Any]) -> Callable[[], Any]:
    """A guide whose draws steps of loops can find."""

    def noting() -> Any:
        _tables.clear()
        with handlers.trace() as trace:
            drawn = guide()
        _guide_trace.clear()
        _guide_trace.update(trace)
        return drawn

    return noting
