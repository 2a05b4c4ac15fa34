"""Random programs that use f in many ways, beside the same source in a world of plain values (tests/values_world.py).

tests/fuzz has dense formulas for models that are linear in f. Here the axes are how a program is written, and what it does with
draws: products, ratios, functions as inputs or noise of others, loops, helpers, handlers. A program is a few lines of source, and
both worlds run these lines. So to add an axis, add a line to one of the tables below, and what it means, if that is not plain, to
``WORLDS`` of tests/values_world.py. A failing program is printed.

More: ``pytest tests/test_program_fuzz.py --slow``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_orthgp as ogp
from tests.values_world import execute, noted

N, DRAWS, SIGMAS = 4, 2500, 5.0

# Draws of F at x, shape (N,). G is the other function.
ATOMS = [
    "{F}({x}).sample()",
    "{F}({x}).sample(None, (1,))[0]",
    "{F}({x}).draw(numpyro.prng_key())",
    "{F}.joint({x}).sample(numpyro.prng_key())",
    "(w * {F}({x}) + 0.3).sample()",
    "{F}(ogp.Average(nodes, jnp.array([0.5, 0.5]))).sample()",
    "{F}(jnp.concatenate([{x}, BASE])).sample()[:N]",
    "{F}({x}[::-1]).sample()[::-1]",
    "jnp.stack([{F}({x}[i : i + 1]).sample()[0] for i in range(N)])",
    "jnp.full(N, {F}(BASE).sample()[0])",
    "{F}(jnp.tanh({G}({x}).sample())[:, None]).sample()",
    "helper({F}, {x})",
    "Helper({F})({x})",
    "jit(jnp.sin)({F}({x}).sample())",
    "{F}({F}({x}).sample()[:, None]).sample()",
    "jnp.vectorize(lambda x: {F}(x[None, None]).sample()[0])({x}[:, 0])",
    "handlers.block(lambda: {F}({x}).sample())()",
    "vmap(lambda x: {F}(x[None]).sample()[0])({x})",
    "vmap(jit(lambda x: {F}(x[None]).sample()[0]))({x})",
    "vmap(lambda x: {F}(x[None]).sample()[0] + {F}(x[None] + 0.5).sample()[0])({x})",
    "lax.map(lambda x: {F}(x[None]).sample()[0] - {F}(BASE).sample()[0], {x})",
    "lax.scan(lambda c, x: (c + {F}(x[None]).sample()[0], c), 0.0, {x})[1]",
    "lax.scan(lambda c, x: (c + 0.3 * {F}((x + c)[None]).sample()[0], {F}((x + c)[None]).sample()[0]), 0.0, {x})[1]",
    "lax.fori_loop(0, N, lambda i, c: c.at[i].set({F}({x}[i][None]).sample()[0]), jnp.zeros(N))",
    "vmap(lambda x: {F}(x[None]).sample()[0] - lax.map(lambda t: {F}((x + t)[None]).sample()[0], TWO).sum())({x})",
    "lax.map(lambda x: {F}(x[None]).sample()[0] - vmap(lambda t: {F}((x + t)[None]).sample()[0])(TWO).sum(), {x})",
]
# What is computed from draws.
COMBINED = [
    "{a}",
    "{a} - {b}",
    "jnp.maximum({a}, {b})",
    "0.5 * jnp.cumsum({a})",
    "{a} - {a}.mean()",
    "{a} * jnp.tanh({b})",
    "{a} / (1 + ({b}) ** 2)",
    "{a} - ({b})[0]",
    "jnp.where({a} > 0, {a}, {b})",
    "jnp.sort({a})",
    "jnp.linalg.solve(jnp.eye(N) + 0.1 * jnp.diag({a} ** 2), y)",
]
NUMPYRO = {
    "y": ["dist.Normal({v}, 0.8)", "dist.Normal({v}, jnp.exp(0.3 * {a}))"],
    "counts": ["dist.Poisson(jnp.exp(jnp.clip({v}, -3, 2)))"],
    "labels": ["dist.Bernoulli(logits={v})"],
}
# Marginals, and likelihoods of them.
MARGINALS = [
    "F(X)", "w * F(X2) + 0.5", "F(X) + {g}", "F(({g})[:, None])", "helper_of_marginals(F, X)", "jit(F)(X)",
    "F(ogp.Average(nodes, jnp.array([0.5, 0.5])))", "ogp.stack([F(X), G(X2)])[..., 0]", "ogp.stack([F(X), G(X2)]).pick(which)",
    "(ogp.stack([F(X), G(X2)]) @ jnp.ones((2, 1)))[..., 0]", "ogp.DeepGP([G, F])(X)",
    "F(jnp.tanh(G(X).independent().sample())[:, None])", "F(jnp.concatenate([jnp.zeros(1), y[:-1]])[:, None])",
]  # fmt: skip
LIKELIHOODS = {
    "y": [
        "likelihoods.Gaussian({m}, 0.7)", "likelihoods.StudentT({m}, 4.0, 0.7)", "likelihoods.Gaussian({m}, jnp.exp(0.3 * {g}))",
        "ogp.Likelihood({m}, lambda v: dist.Normal(jnp.tanh(v), 0.7))",
        "likelihoods.HeteroskedasticGaussian(ogp.stack([F(X), 0.3 * G(X2)]))",
        "dist.Normal(F(X).independent().sample() * G(X2).independent().sample(), 0.8)",
        "dist.Normal(h(X)[..., 0].independent().sample() * h(X)[..., 1].independent().sample(), 0.8)",
        "likelihoods.Gaussian(h(ogp.Tasks(X, which)), 0.8)",
        "dist.Normal(h(ogp.Tasks(X, which)).sample() - h(X2).sample()[:, 0], 0.8)",
        "dist.Normal((h(X) @ W).sample()[:, 0] + h(X2[::-1]).sample()[:, 1], 0.8)",
        "dist.Normal(h.joint(X).sample(numpyro.prng_key())[0] * h(X)[..., 0].sample(), 0.8)",
    ],
    "counts": ["likelihoods.Poisson({m})"],
    "labels": ["likelihoods.Bernoulli({m})"],
}  # fmt: skip
# How a distribution d becomes a site of y, its data o.
AROUND = [
    "with numpyro.plate('p{y}', N):\n    numpyro.sample('{y}', {d}, obs={o})",
    "numpyro.sample('{y}', ({d}).to_event(1), obs={o})",
    "with handlers.scale(scale=0.5), numpyro.plate('p{y}', N):\n    numpyro.sample('{y}', {d}, obs={o})",
    "with numpyro.plate('p{y}', N), handlers.scale(scale=w):\n    numpyro.sample('{y}', {d}, obs={o})",
    "with numpyro.plate('p{y}', N), handlers.mask(mask=seen):\n    numpyro.sample('{y}', {d}, obs={o})",
    "with numpyro.plate('p{y}', N):\n    numpyro.sample('{y}', ({d}).mask(seen), obs={o})",
    "with numpyro.plate('p{y}', 2 * N, subsample_size=N):\n    numpyro.sample('{y}', {d}, obs={o})",
    "numpyro.factor('{y}', ({d}).log_prob({o}).sum())",
]
# Sites that are written in another way.
OTHERS = [
    # rows of a plate that subsamples
    "v{y} = G(X).sample()\nwith numpyro.plate('p{y}', N, subsample_size=2) as i:\n    numpyro.sample('{y}', {s}, obs=y[i])",
    # loops with densities, sites and states
    "numpyro.factor('{y}', lax.scan(lambda c, r: (c + likelihoods.Gaussian(F(r[0][None]), 0.8).log_prob(r[1][None])[0], None), "
    "0.0, (X, y))[0])",
    "def step(c, r):\n    numpyro.sample('{y}', {l}, obs=r[1][None])\n    return c, None\nscan(step, 0.0, (X, y))",
    "def step(c, r):\n    c = numpyro.sample('state', dist.Normal(c + 0.5 * {t}[:, None], 0.5).to_event(2))\n"
    "    numpyro.sample('{y}', dist.Normal(G(c).sample(), 0.5), obs=r[1][None])\n    return c, None\n"
    "scan(step, jnp.ones((1, 1)), (X, y))",
    # latent inputs
    "v = G(X).sample()\nwith numpyro.plate('p{y}', N):\n    x = ogp.latent_inputs('x', N, 1)\n"
    "    numpyro.sample('{y}', {i}, obs=y)",
]
WITHIN = {
    "s": ["likelihoods.Gaussian(F(X[i]) + v{y}[i], 0.8)", "dist.Normal(F(X[i]).independent().sample(), 0.8)",
          "dist.Normal(v{y}[i] * F(X[i]).sample() - F(BASE).sample()[0], 0.8)"],
    "l": ["likelihoods.Gaussian(F(r[0][None]), 0.8)", "dist.Normal(F(r[0][None]).sample() - F(BASE).sample(), 0.8)",
          "dist.Normal(F(r[0][None]).sample() - F(r[0][None] + 0.5).sample(), 0.8)"],
    "t": ["F(c).sample()", "(F(c).sample() - F(BASE).sample())", "F(jnp.concatenate([c, r[0][None]])).sample()[:1]"],
    "i": ["likelihoods.Gaussian(F.expected(x), 0.8)", "likelihoods.Gaussian(F(x) + w * v, 0.8)", "dist.Normal(F(x).sample(), 0.8)"],
}  # fmt: skip
HANDLED = [
    "",
    "",
    "model = handlers.scope(model, prefix='s')",
    "model = handlers.condition(model, {'g.u0': jnp.array([0.3, -0.6])})",
    "model = handlers.do(model, {'a': 0.1})",
]
HEAD = """
W = jnp.array([[1.0, 0.5], [-0.4, 1.0]])
TWO = jnp.array([0.3, 0.5])
def helper(f, X): return f(X).sample()
def helper_of_marginals(f, X): return f(X)
class Helper:
    def __init__(self, f): self.f = f
    def __call__(self, X): return self.f(X).sample()
def model():
    a = numpyro.sample('a', dist.Normal(0.2, 0.5))
    f = ogp.gp('f', 1.2 * kernels.RBF(jnp.exp(0.2 * a)), {Z1})
    g = ogp.gp('g', 0.9 * kernels.{kernel}(0.8), {Z2})
"""
OBJECTIVES = [TraceMeanField_ELBO, Trace_ELBO, TraceGraph_ELBO]
GUIDES: list[dict[str, Any]] = [{}, {"covariance": "diagonal"}, {"analytic": False}]


def program(choose: Callable[[Any], Any]) -> str:
    """Source of a model.

    :param choose: picks one of a list.
    """
    lines: list[str] = []

    def vector(F: str) -> str:
        form = choose(ATOMS)
        lines.append(f"v{len(lines)} = " + form.format(F=F, G={"F": "G", "G": "F"}[F], x=choose(["X", "X", "X2"])))
        return lines[-1].split(" = ")[0]

    def site(y: str) -> str:
        data, kind = choose(["y", "counts", "labels"]), choose(["draws", "draws", "marginals", "other"])
        if kind == "other":
            form = choose(OTHERS)
            for name, forms in WITHIN.items():
                if f"{{{name}}}" in form:
                    form = form.replace(f"{{{name}}}", choose(forms))
            return form.replace("{y}", y)
        if kind == "draws":
            v = choose(COMBINED).format(a=vector("F"), b=vector(choose("FG")))
            d = choose(NUMPYRO[data]).format(v=f"({v})", a=vector("G"))
        else:
            form = choose(LIKELIHOODS[data])
            # Marginals beside a draw of their own function are refused, see ``test_own_draws``.
            d = form.replace("{m}", choose([m for m in MARGINALS if "{g}" not in form or "G" not in m]))
            d = d.replace("{g}", vector("G")) if "{g}" in d else d
        return choose(AROUND).format(y=y, d=d, o=data)

    body: list[str] = []
    for y in choose([["y0"], ["y0"], ["y0", "y1"]]):
        start, text = len(lines), site(y)
        body += [choose(["F, G = f, g", "F, G = g, f"]), *lines[start:], *text.split("\n")]
    if any("h(" in line or "h." in line for line in body):
        body.insert(0, "h = ogp.gp('h', kernels.Matern52(1.0), Z, num_latents=2)")
    sets = {"Z1": choose(["Z", "[Z, O]"]), "Z2": choose(["Z", "[Z, O]"])}
    head = HEAD.format(kernel=choose(["Matern32", "Matern52"]), **sets)
    # Under `scope` NumPyro's scan does not replay its own latent sites, with any guide.
    handled = [h for h in HANDLED if "scope" not in h or not any("'state'" in line for line in body)]
    return head + "".join(f"    {line}\n" for line in body) + choose(handled)


def data(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    X, X2 = np.sort(rng.uniform(0, 5, (N, 1)), 0), rng.uniform(0, 5, (N, 1))
    X2[:1] = X[:1]
    arrays = {
        "X": X, "X2": X2, "BASE": rng.uniform(0, 5, (1, 1)), "Z": np.array([[1.0], [4.0]]), "O": np.array([[2.7]]),
        "nodes": rng.uniform(0, 5, (N, 2, 1)), "w": rng.uniform(0.5, 1.5, N), "y": np.sin(X[:, 0]) + 0.5 * rng.normal(size=N),
        "counts": rng.poisson(1.5, N), "labels": rng.integers(0, 2, N), "seen": np.arange(N) != 2, "which": rng.integers(0, 2, N),
    }  # fmt: skip
    return {"N": N, **{name: jnp.asarray(value) for name, value in arrays.items()}}


def moved(params: dict[str, Any], seed: int) -> dict[str, Any]:
    """Parameters away from the start."""
    rng = np.random.default_rng(seed)

    def of(name: str, value: Any) -> Any:
        if name.endswith("scale_tril"):
            return np.tril(0.25 * rng.normal(size=value.shape), -1) + rng.uniform(0.3, 0.9) * np.eye(value.shape[-1])
        return value + 0.4 * rng.normal(size=value.shape) if name.endswith("_loc") else 0.7 * value

    return {name: jnp.asarray(of(name, value)) for name, value in params.items()}


def elbos(objective: Any, params: Any, model: Any, guide: Any, seed: int) -> np.ndarray:
    # One by one: a batch of small factors may wait for ever on few cores.
    run = jax.jit(lambda keys: jax.lax.map(lambda key: -objective.loss(key, params, model, guide), keys))
    return np.asarray(run(jax.random.split(jax.random.PRNGKey(seed), DRAWS)))


def assert_same(source: str, objective: Any, options: dict[str, Any], hyper: Any, seed: int) -> None:
    """The mean of the package's bound is that of log p(y | f) minus the divergence, f drawn from dense formulas."""
    model, plain = (execute(source, world, data(seed)) for world in ("package", "values"))
    guide = ogp.AutoSparseGP(model, hyper=hyper, **options)
    svi = SVI(model, guide, optax.sgd(0.0), objective)
    params = moved(svi.get_params(jax.jit(svi.init)(jax.random.PRNGKey(seed))), seed)
    ours = elbos(objective, params, model, guide, seed)
    expected = elbos(Trace_ELBO(), params, plain, noted(guide), seed + 1)
    error = np.sqrt((ours.var() + expected.var()) / DRAWS) + 1e-6 * abs(expected.mean())
    assert abs(ours.mean() - expected.mean()) < SIGMAS * error, (
        f"{ours.mean()}, not {expected.mean()} ({error})\n{source}"
    )


def compare_one(chosen: st.DataObject) -> None:
    def choose(options: Any) -> Any:
        return chosen.draw(st.sampled_from(list(options)))

    source = program(choose)
    objective = choose(OBJECTIVES)() if "expected" not in source else TraceMeanField_ELBO()
    hyper = choose([AutoNormal, AutoMultivariateNormal])
    options = choose(GUIDES) if "expected" not in source else {}
    assert_same(source, objective, options, hyper, chosen.draw(st.integers(0, 99)))


OPTIONS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "phases": [Phase.generate],  # smaller programs that fail too would take half an hour
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=2, **OPTIONS)
@given(st.data())
def test_a_program_means_what_it_says(chosen):
    compare_one(chosen)


@pytest.mark.slow
@settings(max_examples=60, **OPTIONS)
@given(st.data())
def test_many_programs_mean_what_they_say(chosen):
    compare_one(chosen)
    jax.clear_caches()
