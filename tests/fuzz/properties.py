"""What is asked of a program: each property compares what the package computes with what :mod:`tests.fuzz.witnesses` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import TraceMeanField_ELBO

import numpyro_orthgp as ogp
from tests.fuzz import collapsed, nested, witnesses
from tests.fuzz import evidence as exact
from tests.fuzz.collapsed import Collapsed
from tests.fuzz.fitting import fitted
from tests.fuzz.nested import Nested
from tests.fuzz.programs import Program
from tests.fuzz.runs import (
    RELATIVE,
    SIGMAS,
    TIMES,
    Run,
    Values,
    compute,
    execute,
    is_random,
    keys_of,
    latents,
    more_losses,
    only_model,
    params_of,
    test_inputs,
)  # fmt: skip


def chosen(program: Program) -> tuple[str, ...]:
    """The properties that a seed looks at, beside the bound."""
    rng = np.random.default_rng([34, program.seed])
    often = {
        "gradient": 0.3,
        "fitted": 0.4,
        "posterior": 0.27,
        "minibatch": 0.25,
        "potential": 0.1,
        "loose": 0.1,
        "trace": 0.12,
    }
    drawn = {name for name, p in often.items() if rng.uniform() < p}
    if program.dtype == "float32" or program.guide == "natural":  # whose gradient is that of another thing
        drawn.discard("gradient")
    if "gradient" not in drawn or (isinstance(program, Nested) and program.kind == "hyper"):
        drawn.discard("fitted")
    if isinstance(program, Collapsed):
        return tuple(sorted(drawn & {"gradient"}))
    if isinstance(program, Nested):
        return tuple(sorted(drawn & {"gradient", "fitted", "trace"}))
    by_row = all(program.sees(s).by_row for s in program.sites)
    if not by_row or program.plate != "rows" or program.num % 2 or any(s.mask is not None for s in program.sites):
        drawn.discard("minibatch")
    if program.plate == "more" or program.random or any(h.how == "sample" for g in program.gps for h in g.hypers()):
        drawn.discard("potential")
    if not any(g.residual == "tight" for g in program.gps):
        drawn.discard("loose")
    if program.guide not in ("auto", "sampled", "natural"):
        drawn -= {"scope", "condition"}
    if all(len(g.sets) < 2 for g in program.gps):
        drawn.discard("condition")
    return tuple(sorted(drawn))


def check(program: Program) -> Run:
    """Run a program and compare."""
    run = Run(program, chosen(program))
    try:
        run.space = execute(program)
        if isinstance(program, Collapsed):
            collapsed.look_at(run)
            return run
        values = compute(run)
        compare_bound(run, values)
        for name in run.properties:
            if name in PROPERTIES:
                PROPERTIES[name](run, values)
    except Exception as error:
        run.fail("raises", f"{type(error).__name__}: {str(error)[:1500]}")
    return run


# ---------------------------------------------------------------- properties


def compare_bound(run: Run, values: Values) -> None:
    """The loss is the dense formula, and no less than -log p(y)."""
    program = run.program
    losses = np.asarray(values["losses"], float)
    if not np.isfinite(losses).all():
        return run.fail("bound", f"losses are not finite: {losses[:5]}")
    params = program.values()
    bound = dense_bound(program, params)
    again = [lambda: more_losses(run, params_of(run))] if is_random(run) else []
    for name, wrong in (
        ("bound", different(run, losses, bound, params)),
        ("evidence", too_high(run, losses, bound, params)),
    ):
        if wrong and again:
            losses_again = again[0]()
            wrong = (different if name == "bound" else too_high)(run, losses_again, bound, params)
        if wrong:
            run.fail(name, wrong)
    return None


def dense_bound(program: Program | Nested, params: witnesses.Params) -> witnesses.Bound:
    return (nested if isinstance(program, Nested) else witnesses).bound(program, params)


def _estimate(losses: np.ndarray) -> tuple[float, float]:
    """The bound and its standard error."""
    return -losses.mean(), losses.std() / np.sqrt(len(losses)) if len(losses) > 1 else 0.0


def tolerance(program: Program, *sizes: float) -> float:
    return RELATIVE[program.dtype] * (1 + sum(map(abs, sizes)))


def different(run: Run, losses: np.ndarray, bound: witnesses.Bound, params: witnesses.Params) -> str:
    value, error = _estimate(losses)
    low, high = min(bound), max(bound)
    allowed = tolerance(run.program, *bound) + SIGMAS * error
    off = max(low - value, value - high)
    if off <= allowed or off <= allowed + 10 * own_error(run.program, params, bound):
        return ""
    return f"ELBO {value:.9g} (se {error:.2g}), dense formula {bound.exact:.9g} (by 20 nodes {bound.by_nodes:.9g})"


def own_error(program: Program | Nested, params: witnesses.Params, bound: witnesses.Bound) -> float:
    """How far the dense formula moves if parameters do by rounding: far where points coincide, since it inverts K."""
    factors = (1 + 1e-14, 1 - 1e-14, 1 + 3e-14)
    if isinstance(program, Nested):
        return 0.0
    return max(abs(dense_bound(program, {n: v * a for n, v in params.items()}).exact - bound.exact) for a in factors)


def too_high(run: Run, losses: np.ndarray, bound: witnesses.Bound, params: witnesses.Params) -> str:
    program = run.program
    if program.scale != 1:  # weighed rows have no density
        return ""
    evidence = (nested if isinstance(program, Nested) else exact).evidence(program, params)
    if evidence is None:
        return ""
    value, error = _estimate(losses)
    allowed = (
        tolerance(program, value) + SIGMAS * np.hypot(error, evidence.error) + max(bound.by_nodes - bound.exact, 0)
    )
    if value <= evidence.value + allowed:
        return ""
    return f"ELBO {value:.6g} (se {error:.2g}) above log p(y) {evidence.value:.6g} (se {evidence.error:.2g})"


def compare_gradient(run: Run, values: Values) -> None:
    """The gradient is that of differences, along a random direction."""
    keys = keys_of(run, run.program.seed)
    run.slope(lambda p: float(run.space["function"](p, keys)["losses"].mean()), params_of(run), values["gradient"])


def compare_posterior(run: Run, values: Values) -> None:
    """posterior's mean, variance, covariance and draws are those of the dense formula."""
    program = run.program
    X_new = test_inputs(program)
    for g in program.gps:
        mean, cov = witnesses.predictions(program, program.values(), g.name, X_new)
        got = values[g.name]
        if g.num_latents is None:
            got = {
                "mean": got["mean"][None],
                "variance": got["variance"][None],
                "covariance": got["covariance"][None],
                "draws": got["draws"][:, None],
            }
        else:
            got = {
                **got,
                "mean": got["mean"].T,
                "variance": got["variance"].T,
                "draws": np.moveaxis(got["draws"], -1, 1),
            }
        rtol = 10 * RELATIVE[program.dtype]
        for name, expected in (("mean", mean), ("variance", np.diagonal(cov, axis1=1, axis2=2)), ("covariance", cov)):
            wrong = np.abs(got[name] - expected).max()
            if not wrong <= rtol * (1 + np.abs(expected).max()):
                run.fail(
                    "posterior",
                    f"{name} of {g.name} at {X_new.tolist()}: {got[name].tolist()}, dense {expected.tolist()}",
                )
        for p in range(g.latents):
            wrong_draws(run, g.name, np.asarray(got["draws"][:, p], float), mean[p], cov[p])


def wrong_draws(run: Run, name: str, draws: np.ndarray, mean: np.ndarray, cov: np.ndarray) -> None:
    """Draws, whitened by the covariance that they should have, are standard normal."""
    values, vectors = np.linalg.eigh(cov)
    kept = values > 1e-4 * values.max()
    z = (draws - mean) @ vectors[:, kept] / np.sqrt(values[kept])
    S = len(z)
    off = np.abs(z.mean(0)).max() * np.sqrt(S)
    spread = np.abs((z.T @ z / S - np.eye(z.shape[1])) / np.sqrt(1 + np.eye(z.shape[1]))).max() * np.sqrt(S)
    if off > 5.5 or spread > 7:
        run.fail("draws", f"of {name}: mean {off:.1f}, covariance {spread:.1f} standard errors from the dense formula")


def compare_loose(run: Run, values: Values) -> None:
    """At the same q a tightened bound of Gaussian noise is no lower; others are the loose bound at v = 1."""
    program = run.program
    # Of noise of each row's own the best v is taken, else v = 1 gives the loose bound.
    one = {n: (np.ones_like(v) if n.endswith("_residual_scale") else v) for n, v in program.values().items()}
    params = {n: jnp.asarray(v, program.dtype) for n, v in one.items()}
    keys = keys_of(run, run.program.seed)
    tight = np.asarray(run.space["function"](params, keys)["losses"], float)
    loose = replace(program, gps=tuple(replace(g, residual="prior") for g in program.gps))
    space = execute(loose)
    kept = {n: v for n, v in params.items() if not n.endswith("_residual_scale")}
    elbo = TraceMeanField_ELBO()
    losses = jax.jit(jax.vmap(lambda key: elbo.loss(key, kept, space["model"], space["guide"])))(keys)
    (a, error), (b, _) = _estimate(tight), _estimate(np.asarray(losses, float))
    allowed = tolerance(program, a, b) + 2 * SIGMAS * error
    if not a >= b - allowed:
        run.fail("loose", f"tight {a:.9g} below loose {b:.9g}")


def compare_minibatch(run: Run, values: Values) -> None:
    """The mean over halves of the data is the whole."""
    program, space, params = run.program, run.space, params_of(run)
    N, elbo = program.num, TraceMeanField_ELBO()
    keys = keys_of(run, 1)
    halves = []
    for rows in (np.arange(0, N, 2), np.arange(1, N, 2)):
        losses = jax.jit(jax.vmap(lambda key, rows=rows: elbo.loss(key, params, space["model"], space["guide"], rows)))(
            keys
        )
        halves.append(np.asarray(losses, float))
    value, error = _estimate(np.concatenate(halves))
    error = np.sqrt(sum(_estimate(h)[1] ** 2 for h in halves)) / 2
    bound = witnesses.bound(program, program.values())
    allowed = tolerance(program, *bound) + (SIGMAS + 1) * error
    if not min(bound) - allowed <= value <= max(bound) + allowed:
        run.fail("minibatch", f"halves average to {value:.9g} (se {error:.2g}), the whole is {bound.exact:.9g}")


def compare_scope(run: Run, values: Values) -> None:
    """Another prefix of names changes nothing."""
    program, space = run.program, run.space
    scoped = handlers.scope(space["model"], prefix="s")
    params = {f"s/{n}": v for n, v in params_of(run).items()}
    compare_other(run, "scope", scoped, params, "s/", witnesses.bound(program, program.values()))


def compare_condition(run: Run, values: Values) -> None:
    """A set whose values are given: no belief, no divergence, its prior density."""
    program, space = run.program, run.space
    g = next(g for g in program.gps if len(g.sets) > 1)
    name = f"{g.name}.u{program.seed % len(g.sets)}"
    value = latents(program)[name]
    conditioned = handlers.condition(space["model"], {name: value})
    params = {n: v for n, v in params_of(run).items() if not n.startswith(name)}
    dense = {**{n: np.asarray(v, float) for n, v in params.items()}, name: np.asarray(value, float)}
    compare_other(run, "condition", conditioned, params, "", witnesses.bound(program, dense))


def compare_other(run: Run, name: str, model: Callable, params: Values, prefix: str, bound: witnesses.Bound) -> None:
    """The bound of another model with a guide like the program's."""
    program = run.program
    guide = ogp.AutoSparseGP(
        model,
        covariance={prefix + g.name: list(g.covariances) for g in program.gps},
        residual={prefix + g.name: g.residual for g in program.gps},
        analytic=program.guide != "sampled",
        natural=program.guide == "natural",
    )
    loss = jax.jit(jax.vmap(lambda key: TraceMeanField_ELBO().loss(key, params, model, guide)))
    keys = keys_of(run, 2)
    losses = (
        np.concatenate([np.asarray(loss(keys_of(run, i)), float) for i in range(3)]) if len(keys) > 1 else loss(keys)
    )
    if wrong := different(run, np.asarray(losses, float), bound, program.values()):
        run.fail(name, wrong)


def compare_potential(run: Run, values: Values) -> None:
    """The joint density at values of the inducing variables: their prior and E[log p(y | f)] given them."""
    program = run.program
    drawn = {n: np.asarray(v, float) for n, v in latents(program).items()}
    params = {**only_model(program.values()), **drawn}
    given = replace(program, gps=tuple(replace(g, residual="prior") for g in program.gps))
    found, calls = witnesses.looks(given)
    F = witnesses.all_values(given, calls, params)
    terms = [witnesses.data_terms(given, look, F) for look in found]
    prior = -sum(
        witnesses.divergence(witnesses.belief(g, params, p, program.dtype)) for g in given.gps for p in range(g.latents)
    )
    both = [prior + sum(t.exact for t in terms), prior + sum(t.by_nodes for t in terms)]
    value, allowed = float(values["log_density"]), tolerance(program, *both)
    if not min(both) - allowed <= value <= max(both) + allowed:
        run.fail("potential", f"log density {value:.9g}, dense formula {both[0]:.9g}")


def compare_fitted(run: Run, values: Values) -> None:
    """After some steps of Adam the bound is still the dense formula, and below log p(y)."""
    program, keys = run.program, keys_of(run, run.program.seed)

    def as_arrays(params: Values) -> Values:
        return {n: jnp.asarray(v, program.dtype) for n, v in params.items()}

    params = fitted(lambda p: run.space["function"](as_arrays(p), keys)["gradient"], params_of(run))
    again = as_arrays(params)
    losses = more_losses(run, again, TIMES)
    bound = dense_bound(program, params)
    for wrong in (different(run, losses, bound, params), too_high(run, losses, bound, params)):
        if wrong:
            text = ", ".join(f"{n!r}: A({v.tolist()})" for n, v in params.items())
            run.fail("fitted", f"{wrong}; at params = {{{text}}}")


PROPERTIES: dict[str, Callable[[Run, Values], None]] = {
    "gradient": compare_gradient,
    "fitted": compare_fitted,
    "posterior": compare_posterior,
    "loose": compare_loose,
    "minibatch": compare_minibatch,
    "potential": compare_potential,
    "scope": compare_scope,
    "condition": compare_condition,
}
