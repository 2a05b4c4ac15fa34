"""Run every inference algorithm, automatic guide, handler and effect of NumPyro with a small model, and write down what happens.

    python docs/corners.py            # the table of docs/guide/numpyro.md
    python docs/corners.py --only SVI # some of the rows, printed

A row works if its result is finite. Otherwise the table has the type and the first sentence of the error, also if
NumPyro raises it for any model. Needs funsor.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers, infer
from numpyro.contrib import control_flow, einstein
from numpyro.contrib.module import eqx_module, flax_module
from numpyro.infer import MCMC, SVI, Predictive, autoguide, reparam

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

TABLE = Path(__file__).parent / "guide" / "corners.md"
N = 20
KEY = jax.random.PRNGKey(0)
ROWS: dict[str, dict[str, Callable[[], Any]]] = {}


def row(section: str, name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def note(function: Callable[[], Any]) -> Callable[[], Any]:
        ROWS.setdefault(section, {})[name] = function
        return function

    return note


# ---------------------------------------------------------------- models


def data() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (N, 1))
    return jnp.asarray(X), jnp.asarray(np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=N))


Z = jnp.linspace(-2.0, 2.0, 5)[:, None]


def model(X: Any, y: Any = None) -> None:
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = ogp.gp("f", kernels.RBF(scale), Z)
    with numpyro.plate("data", N):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)


def scale_and_noise(X: Any, y: Any = None) -> None:
    """Two hyperparameters: flows need more than one."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = ogp.gp("f", kernels.RBF(scale), Z)
    with numpyro.plate("data", N):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def batches(X: Any, y: Any = None) -> None:
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = ogp.gp("f", kernels.RBF(scale), Z)
    with numpyro.plate("data", N, subsample_size=10) as rows:
        numpyro.sample("y", likelihoods.Gaussian(f(X[rows]), 0.3), obs=None if y is None else y[rows])


def mixture(X: Any, y: Any = None) -> None:
    f = ogp.gp("f", kernels.RBF(0.7), Z)
    with numpyro.plate("data", N):
        z = numpyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        numpyro.sample("y", likelihoods.Gaussian(f(X), jnp.array([0.2, 1.0])[z]), obs=y)


def one_of_two(X: Any, y: Any = None) -> None:
    z = numpyro.sample("z", dist.Bernoulli(0.3))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    f = ogp.gp("f", kernels.RBF(scale), Z)
    with numpyro.plate("data", N):
        numpyro.sample("y", likelihoods.Gaussian(f(X), jnp.array([0.2, 1.0])[z]), obs=y)


def fit(model: Any, guide: Any = None, elbo: Any = None, steps: int = 3, **options: Any) -> Any:
    guide = ogp.AutoSparseGP(model, **options) if guide is None else guide
    svi = SVI(model, guide, optax.adam(0.01), elbo or infer.Trace_ELBO())
    result = svi.run(KEY, steps, *data(), progress_bar=False)
    finite(result.losses)
    return guide, result


def finite(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        assert np.isfinite(np.asarray(leaf, float)).all(), "not finite"


def sample(kernel: Any, **options: Any) -> None:
    mcmc = MCMC(kernel, num_warmup=3, num_samples=3, progress_bar=False, **options)
    mcmc.run(KEY, *data())
    finite(mcmc.get_samples())


def predicted(model: Any, guide: Any, result: Any) -> None:
    """What a fitted function predicts."""
    f = ogp.posterior(model, guide, result.params, *data())["f"]
    finite((f(data()[0]).mean, f(data()[0]).variance))


# ---------------------------------------------------------------- inference

for _name in ("Trace_ELBO", "TraceMeanField_ELBO", "TraceGraph_ELBO"):
    row("Inference", f"`SVI`, `{_name}`")(lambda name=_name: predicted(model, *fit(model, elbo=getattr(infer, name)())))


@row("Inference", "`SVI`, `TraceEnum_ELBO`, a discrete site for each row")
def _() -> None:
    predicted(mixture, *fit(mixture, elbo=infer.TraceEnum_ELBO()))


@row("Inference", "`SVI`, `RenyiELBO`")
def _() -> None:
    fit(model, elbo=infer.RenyiELBO(num_particles=2))


@row("Inference", "`SVI`, `RenyiELBO`, `analytic=False`")
def _() -> None:
    predicted(model, *fit(model, elbo=infer.RenyiELBO(num_particles=2), analytic=False, hyper=autoguide.AutoNormal))


row("Inference", "`NUTS`")(lambda: sample(infer.NUTS(model)))
row("Inference", "`NUTS`, a discrete site for each row")(lambda: sample(infer.NUTS(mixture)))
row("Inference", "`HMC`")(lambda: sample(infer.HMC(model)))
row("Inference", "`BarkerMH`")(lambda: sample(infer.BarkerMH(model)))
row("Inference", "`SA`")(lambda: sample(infer.SA(model)))
row("Inference", "`AIES`")(lambda: sample(infer.AIES(model), num_chains=14, chain_method="vectorized"))
row("Inference", "`ESS`")(lambda: sample(infer.ESS(model), num_chains=14, chain_method="vectorized"))
row("Inference", "`HMCECS`")(lambda: sample(infer.HMCECS(infer.NUTS(batches), num_blocks=2)))
row("Inference", "`DiscreteHMCGibbs`")(lambda: sample(infer.DiscreteHMCGibbs(infer.NUTS(one_of_two))))
row("Inference", "`MixedHMC`")(lambda: sample(infer.MixedHMC(infer.HMC(one_of_two), num_discrete_updates=2)))


@row("Inference", "`HMCGibbs`")
def _() -> None:
    def scale(rng_key: Any, gibbs_sites: Any, hmc_sites: Any) -> Any:
        return {"scale": jnp.exp(0.1 * jax.random.normal(rng_key))}

    sample(infer.HMCGibbs(infer.NUTS(model), gibbs_fn=scale, gibbs_sites=["scale"]))


@row("Inference", "`SteinVI`")
def _() -> None:
    guide = ogp.AutoSparseGP(model, hyper=autoguide.AutoNormal)
    optimizer = numpyro.optim.Adagrad(0.1)
    stein = einstein.SteinVI(model, guide, optimizer, einstein.RBFKernel(), num_stein_particles=3)
    finite(stein.run(KEY, 2, *data(), progress_bar=False).losses)


@row("Inference", "`SVGD`")
def _() -> None:
    stein = einstein.SVGD(model, numpyro.optim.Adagrad(0.1), einstein.RBFKernel(), num_stein_particles=3)
    finite(stein.run(KEY, 2, *data(), progress_bar=False).losses)


@row("Inference", "`natural_gradient` around `numpyro.optim.Adam`")
def _() -> None:
    guide = ogp.AutoSparseGP(model, natural=True)
    svi = SVI(model, guide, ogp.natural_gradient(numpyro.optim.Adam(0.01), 0.5), infer.TraceMeanField_ELBO())
    finite(svi.run(KEY, 3, *data(), progress_bar=False).losses)


@row("Inference", "`Predictive` of a guide")
def _() -> None:
    guide, result = fit(model)
    finite(Predictive(model, guide=guide, params=result.params, num_samples=3)(KEY, data()[0]))


# ---------------------------------------------------------------- automatic guides

GUIDES = {
    name: getattr(autoguide, name)
    for name in autoguide.__all__
    if name not in ("AutoContinuous", "AutoGuide", "AutoGuideList")
}


def made(name: str, model: Any) -> Any:
    if "Batched" in name:
        return GUIDES[name](model, batch_ndim=0)
    if name == "AutoSurrogateLikelihoodDAIS":
        return GUIDES[name](model, surrogate_model=lambda: numpyro.sample("scale", dist.LogNormal(0.0, 0.5)))
    if name == "AutoSemiDAIS":
        return GUIDES[name](model, lambda: None)
    return GUIDES[name](model)


for _name in GUIDES:
    row("As `hyper` of `AutoSparseGP`", f"`{_name}`")(
        lambda name=_name: predicted(scale_and_noise, *fit(scale_and_noise, hyper=lambda rest: made(name, rest)))
    )
    row("As the guide of the whole model", f"`{_name}`")(
        # A Laplace approximation is one at a mode only.
        lambda name=_name: predicted(model, *fit(model, guide=made(name, model), steps=300 if "Laplace" in name else 3))
    )


@row("As the guide of the whole model", "`AutoGuideList` with a part `AutoSparseGP`")
def _() -> None:
    guide = autoguide.AutoGuideList(model)
    guide.append(ogp.AutoSparseGP(handlers.block(model, hide=["scale"])))
    guide.append(autoguide.AutoNormal(handlers.block(model, expose=["scale"])))
    fit(model, guide=guide)


# ---------------------------------------------------------------- handlers


def with_prior(X: Any, y: Any = None) -> None:
    scale = numpyro.param("scale", jnp.asarray(0.5), constraint=dist.constraints.positive)
    f = ogp.gp("f", kernels.RBF(scale), Z)
    with numpyro.plate("data", N):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)


def scoped(X: Any, y: Any = None) -> None:
    with handlers.scope(prefix="a"):
        model(X, y)


def masked(X: Any, y: Any = None) -> None:
    with handlers.mask(mask=X[:, 0] > 0):
        with_prior_of(model, X, y)


def with_prior_of(inner: Any, X: Any, y: Any) -> None:
    f = ogp.gp("f", kernels.RBF(0.5), Z)
    with numpyro.plate("data", N):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)


def rows_masked(X: Any, y: Any = None) -> None:
    f = ogp.gp("f", kernels.RBF(0.5), Z)
    with numpyro.plate("data", N), handlers.mask(mask=X[:, 0] > 0):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)


def same(changed: Any) -> Callable[[], None]:
    return lambda: predicted(changed, *fit(changed))


_handlers: dict[str, Callable[[], Any]] = {
    "block": lambda: fit(handlers.block(model, hide=["scale"]), guide=None),
    "condition": same(handlers.condition(model, {"scale": jnp.asarray(0.5)})),
    "condition, of inducing variables": lambda: finite(
        handlers.trace(handlers.seed(handlers.condition(model, {"f.u0": jnp.zeros(5)}), 0))
        .get_trace(*data())["y"]["fn"]
        .mean
    ),
    "do": same(handlers.do(model, {"scale": jnp.asarray(0.5)})),
    "infer_config": same(handlers.infer_config(model, lambda site: {})),
    "lift": same(handlers.lift(with_prior, prior={"scale": dist.LogNormal(0.0, 0.5)})),
    "mask, of rows": lambda: predicted(rows_masked, *fit(rows_masked)),
    "reparam": same(handlers.reparam(model, config={"scale": reparam.TransformReparam()})),
    "scale": same(handlers.scale(model, 0.5)),
    "seed, trace": lambda: finite(
        handlers.trace(handlers.seed(model, 0)).get_trace(*data())["y"]["fn"].log_prob(data()[1])
    ),
    "scope": lambda: fit(scoped),
    "substitute": same(handlers.substitute(model, {"scale": jnp.asarray(0.5)})),
    "uncondition": lambda: finite(
        handlers.trace(handlers.seed(handlers.uncondition(model), 0)).get_trace(*data())["y"]["value"]
    ),
}
for _name, _function in _handlers.items():
    row("Handlers", f"`{_name}`" if "," not in _name else f"`{_name.split(',')[0]}`,{_name.partition(',')[2]}")(
        _function
    )


@row("Handlers", "`replay` of a guide")
def _() -> None:
    guide, result = fit(model)
    emitted = handlers.trace(handlers.seed(handlers.substitute(guide, result.params), 0)).get_trace(*data())
    finite(handlers.trace(handlers.seed(handlers.replay(model, emitted), 0)).get_trace(*data())["y"]["fn"].mean)


@row("Handlers", "`collapse`, of a conjugate pair beside a gp")
def _() -> None:
    def conjugate(X: Any, y: Any = None) -> None:
        f = ogp.gp("f", kernels.RBF(0.5), Z)
        with handlers.collapse():
            p = numpyro.sample("p", dist.Beta(1.0, 1.0))
            numpyro.sample("b", dist.Bernoulli(p), obs=1)
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)

    sample(infer.NUTS(conjugate))


@row("Handlers", "`infer_discrete`")
def _() -> None:
    from numpyro.contrib.funsor import config_enumerate, infer_discrete

    guide, result = fit(mixture, elbo=infer.TraceEnum_ELBO())
    emitted = handlers.trace(handlers.seed(handlers.substitute(guide, result.params), 0)).get_trace(*data())
    values = {name: site["value"] for name, site in emitted.items() if site["type"] == "sample"}
    fixed = handlers.seed(handlers.substitute(config_enumerate(mixture), values), 0)
    with handlers.trace() as sites:
        infer_discrete(fixed, first_available_dim=-2, rng_key=KEY)(*data())
    assert sites["z"]["value"].shape == (N,)


# ---------------------------------------------------------------- effects


def effect(name: str, body: Callable[[Any, Any, Any], Any], **options: Any) -> None:
    def changed(X: Any, y: Any = None) -> None:
        f = ogp.gp("f", kernels.RBF(0.5), Z)
        body(f, X, y)

    row("Effects", name)(lambda: predicted(changed, *fit(changed, **options)))


def _observe(mean: Any, y: Any, noise: Any = 0.3) -> None:
    with numpyro.plate("data", N):
        numpyro.sample("y", likelihoods.Gaussian(mean, noise), obs=y)


def _nested(f: Any, X: Any, y: Any) -> None:
    with numpyro.plate("groups", 2, dim=-2):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    _observe(f(X) + level[(np.arange(N) % 2), 0], y)


def _scan(f: Any, X: Any, y: Any) -> None:
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        rows, outputs = x
        numpyro.sample("y", likelihoods.Gaussian(f(rows), 0.3).to_event(1), obs=outputs)
        return carry, None

    control_flow.scan(step, 0.0, (X.reshape(5, 4, 1), None if y is None else y.reshape(5, 4)))


def _cond(f: Any, X: Any, y: Any) -> None:
    def shift(value: float) -> Callable[[Any], Any]:
        return lambda _: numpyro.deterministic("shift", jnp.asarray(value))

    _observe(f(X) + control_flow.cond(X[0, 0] > 0, shift(1.0), shift(0.0), None), y)


def _gp_in_plate(f: Any, X: Any, y: Any) -> None:
    with numpyro.plate("groups", 2):
        ogp.gp("g", kernels.RBF(0.5), Z)


def _equinox(f: Any, X: Any, y: Any) -> None:
    import equinox as eqx

    net = eqx_module("net", eqx.nn.MLP(1, 1, 4, 1, key=jax.random.PRNGKey(1)))
    _observe(f(X) + jax.vmap(net)(X)[:, 0], y)


def _flax(f: Any, X: Any, y: Any) -> None:
    import flax.linen as nn

    net = flax_module("net", nn.Dense(1), input_shape=(1,))
    _observe(f(X) + net(X)[:, 0], y)


def _random_flax(f: Any, X: Any, y: Any) -> None:
    import flax.linen as nn
    from numpyro.contrib.module import random_flax_module

    net = random_flax_module("net", nn.Dense(1), prior=dist.Normal(0.0, 1.0), input_shape=(1,))
    _observe(f(X) + net(X)[:, 0], y)


def _mutable(f: Any, X: Any, y: Any) -> None:
    numpyro.primitives.mutable("calls", {"number": 0.0})["number"] += 1.0
    _observe(f(X), y)


def _deterministic(f: Any, X: Any, y: Any) -> None:
    numpyro.deterministic("slope", f(X).mean[0])
    _observe(f(X), y)


def _factor(f: Any, X: Any, y: Any) -> None:
    numpyro.factor("penalty", -jnp.sum(f(X).mean ** 2))
    _observe(f(X), y)


row("Effects", "`plate` that subsamples")(lambda: predicted(batches, *fit(batches)))
effect("`plate` within `plate`", _nested)
effect("`gp` within `plate`", _gp_in_plate)
effect("`scan`", _scan)
effect("`cond`", _cond)
effect("`deterministic`", _deterministic)
effect("`factor`", _factor)
effect("`flax_module`", _flax)
effect("`random_flax_module`", _random_flax)
effect("`eqx_module`", _equinox)
effect("`mutable`", _mutable)


# ---------------------------------------------------------------- the table


def outcome(function: Callable[[], Any]) -> str:
    """ "works", or the words of the error, its type first."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function()
    except Exception as error:
        words = " ".join(str(error).split()).replace("|", "\\|")
        first = words.split(". ")[0].rstrip(".")
        return f"{type(error).__name__}: {first}"
    return "works"


def table(only: str = "") -> str:
    lines = ["<!-- made by docs/corners.py -->"]
    for section, rows in ROWS.items():
        chosen = {name: function for name, function in rows.items() if only.lower() in f"{section} {name}".lower()}
        if chosen:
            lines += ["", f"### {section}", "", "| what | outcome |", "| --- | --- |"]
            for name, function in chosen.items():
                lines.append(f"| {name} | {outcome(function)} |")
                print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose section or name has this in it; printed only")
    only = parser.parse_args().only
    text = table(only)
    if not only:
        TABLE.write_text(text)
