"""What is asked of a program: each property compares what the package computes with what :mod:`tests.fuzz.witnesses` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.util import log_density

import numpyro_orthgp as ogp
from tests.fuzz import collapsed, nested, witnesses
from tests.fuzz.collapsed import Collapsed
from tests.fuzz.nested import Nested
from tests.fuzz.programs import Program

NUM_KEYS = 500
NUM_DRAWS = 400
# Rounding, relative to the size of what is compared, and standard errors from which on an average of draws is wrong. What is found
# beyond is looked at again with twenty times as many draws.
RELATIVE = {"float64": 1e-7, "float32": 3e-4}
SIGMAS = 5.0


@dataclass
class Run:
    """A program as it was run.

    :param failures: what was found, a line each.
    """

    program: Program | Nested | Collapsed
    properties: tuple[str, ...]
    failures: list[str] = field(default_factory=list)
    space: dict[str, Any] = field(default_factory=dict)

    def fail(self, name: str, message: str) -> None:
        self.failures.append(f"{name}: {message}")

    def expect(self, name: str, value: Any, expected: Any, times: float = 1.0) -> None:
        """Fail unless two arrays are the same up to rounding."""
        value, expected = np.asarray(value, float), np.asarray(expected, float)
        allowed = times * RELATIVE[self.program.dtype] * (1 + np.abs(expected).max())
        if value.shape != expected.shape or not np.abs(value - expected).max() <= allowed:
            self.fail(name, f"{value.tolist()}, dense formula {expected.tolist()}")

    def slope(self, function: Callable[[Any], float], params: dict[str, Any], gradient: dict[str, Any]) -> None:
        """Fail unless the gradient is that of differences, along a random direction."""
        rng = np.random.default_rng(self.program.seed)
        # Entries of factors above the diagonal are no parameters.
        direction = {
            n: np.tril(d) if n.endswith("scale_tril") else d
            for n, d in ((n, rng.normal(size=v.shape)) for n, v in params.items())
        }

        def at(step: float) -> float:
            return function({n: v + step * direction[n] for n, v in params.items()})

        slope, h = sum(float(np.sum(gradient[n] * direction[n])) for n in params), 1e-5
        first, second = ((at(k * h) - at(-k * h)) / (2 * k * h) for k in (1, 2))
        differences, doubt = (4 * first - second) / 3, abs(first - second)
        size = abs(slope) + abs(at(0.0)) + 1
        # Where draws cross a kink of the kernel within a step the two differ by as much.
        if not abs(slope - differences) <= 1e-6 * size + doubt:
            self.fail("gradient", f"slope {slope:.9g}, by differences {differences:.9g} ({first:.9g} and {second:.9g})")


def execute(program: Program) -> dict[str, Any]:
    """The names that the text of a program defines."""
    space: dict[str, Any] = {}
    exec(compile(program.source(), f"<seed {program.seed}>", "exec"), space)
    return space


def chosen(program: Program) -> tuple[str, ...]:
    """The properties that a seed looks at, beside the bound."""
    rng = np.random.default_rng([34, program.seed])
    often = {
        "gradient": 0.3,
        "fitted": 0.4,
        "posterior": 0.27,
        "minibatch": 0.12,
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


# ---------------------------------------------------------------- what the package says


Values = dict[str, Any]


def compute(run: Run) -> Values:
    """Everything at once, as one compiled program."""
    function = jax.jit(whole(run))
    run.space["function"] = function
    keys = keys_of(run, run.program.seed)
    return jax.tree.map(np.asarray, function(params_of(run), keys))


def keys_of(run: Run, seed: int) -> Any:
    """Keys to average over; one for a loss that is exact."""
    return jax.random.split(jax.random.PRNGKey(seed), NUM_KEYS if is_random(run) else 1)


def params_of(run: Run) -> dict[str, Any]:
    return {name: jnp.asarray(value) for name, value in run.space["params"].items()}


def test_inputs(program: Program) -> np.ndarray:
    """Inputs of predictions: two of the data, two between."""
    X = np.array(program.X)
    return np.concatenate([X[:2], np.round((X[1:3] + X[2:4]) / 2, 2) if not _has_tasks(program) else X[2:4]])


def _has_tasks(program: Program) -> bool:
    from tests.fuzz.covariances import names

    return any("Coregion" in names(g.tree) for g in program.gps)


def whole(run: Run) -> Callable[..., Values]:
    """Losses for keys, and what else the properties need."""
    program, space = run.program, run.space
    model, guide = space["model"], space["guide"]
    elbo = Trace_ELBO() if "trace" in run.properties else TraceMeanField_ELBO()
    X_new = test_inputs(program).astype(program.dtype)

    def losses(params: Any, keys: Any) -> Any:
        if not is_random(run):
            return elbo.loss(keys[0], params, model, guide)[None]
        return jax.vmap(lambda key: elbo.loss(key, params, model, guide))(keys)

    def function(params: Any, keys: Any) -> Values:
        values: Values = {}
        if "gradient" in run.properties:
            mean = jax.value_and_grad(lambda p: ((each := losses(p, keys)).mean(), each), has_aux=True)
            (_, values["losses"]), values["gradient"] = mean(params)
        else:
            values["losses"] = losses(params, keys)
        if "posterior" in run.properties:
            for name, f in ogp.posterior(model, guide, params).items():
                marginals, joint = f(X_new), f.joint(X_new)
                values[name] = {
                    "mean": marginals.mean,
                    "variance": marginals.variance,
                    "covariance": joint.covariance_matrix,
                    "draws": marginals.sample(keys[0], (NUM_DRAWS,)),
                }
        if "potential" in run.properties:
            drawn = {k: v for k, v in latents(program).items()}
            values["log_density"] = log_density(model, (), {}, {**only_model(params), **drawn})[0]
        return values

    return function


def is_random(run: Run) -> bool:
    return run.program.random or "trace" in run.properties


def latents(program: Program) -> dict[str, jnp.ndarray]:
    """Values of all inducing variables."""
    rng, values = np.random.default_rng(program.seed), {}
    for g in program.gps:
        batch = () if g.num_latents is None else (g.num_latents,)
        for i, Z in enumerate(g.sets):
            values[f"{g.name}.u{i}"] = jnp.asarray(
                np.round(rng.normal(size=(*batch, np.shape(Z)[-2])), 2), program.dtype
            )
    return values


def only_model(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters without those of q."""
    ends = ("_loc", "_scale", "_scale_tril")
    return {n: v for n, v in params.items() if not (n.endswith(ends) and "lengthscale" not in n)}


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
    for name, wrong in (("bound", different(run, losses, bound)), ("evidence", too_high(run, losses, bound, params))):
        if wrong and again:
            losses_again = again[0]()
            wrong = (
                different(run, losses_again, bound) if name == "bound" else too_high(run, losses_again, bound, params)
            )
        if wrong:
            run.fail(name, wrong)
    return None


def dense_bound(program: Program | Nested, params: witnesses.Params) -> witnesses.Bound:
    return (nested if isinstance(program, Nested) else witnesses).bound(program, params)


def more_losses(run: Run, params: Any) -> np.ndarray:
    """Twenty times as many."""
    parts = []
    for i in range(20):
        keys = keys_of(run, 10_000 + 100 * run.program.seed + i)
        parts.append(np.asarray(run.space["function"](params, keys)["losses"], float))
    return np.concatenate(parts)


def _estimate(losses: np.ndarray) -> tuple[float, float]:
    """The bound and its standard error."""
    return -losses.mean(), losses.std() / np.sqrt(len(losses)) if len(losses) > 1 else 0.0


def tolerance(program: Program, *sizes: float) -> float:
    return RELATIVE[program.dtype] * (1 + sum(map(abs, sizes)))


def different(run: Run, losses: np.ndarray, bound: witnesses.Bound) -> str:
    value, error = _estimate(losses)
    low, high = min(bound), max(bound)
    allowed = tolerance(run.program, *bound) + SIGMAS * error
    if low - allowed <= value <= high + allowed:
        return ""
    return f"ELBO {value:.9g} (se {error:.2g}), dense formula {bound.exact:.9g} (by 20 nodes {bound.by_nodes:.9g})"


def too_high(run: Run, losses: np.ndarray, bound: witnesses.Bound, params: witnesses.Params) -> str:
    program = run.program
    if program.scale != 1:  # weighed rows have no density
        return ""
    evidence = (nested if isinstance(program, Nested) else witnesses).evidence(program, params)
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


def compare_potential(run: Run, values: Values) -> None:
    """The joint density at values of the inducing variables: their prior and E[log p(y | f)] given them."""
    program = run.program
    drawn = {n: np.asarray(v, float) for n, v in latents(program).items()}
    params = {**only_model(program.values()), **drawn}
    given = replace(program, gps=tuple(replace(g, residual="prior") for g in program.gps))
    found, calls = witnesses.looks(given)
    F = witnesses.all_values(given, calls, params)
    terms = [witnesses.data_terms(given, look, F) for look in found]
    prior = -0.5 * sum(np.sum(u**2) + u.size * np.log(2 * np.pi) for u in drawn.values())
    for g in given.gps:
        for p in range(g.latents if g.mean_only is not None else 0):
            H, a = (b := witnesses.belief(g, params, p, program.dtype)).mean_only
            prior -= 0.5 * a @ witnesses.oracles.residual_covariance(b.kernel, b.sets, H, b.jitter) @ a
    both = [prior + sum(t.exact for t in terms), prior + sum(t.by_nodes for t in terms)]
    value, allowed = float(values["log_density"]), tolerance(program, *both)
    if not min(both) - allowed <= value <= max(both) + allowed:
        run.fail("potential", f"log density {value:.9g}, dense formula {both[0]:.9g}")


def compare_fitted(run: Run, values: Values) -> None:
    """After some steps of Adam the bound is still the dense formula, and below log p(y)."""
    program, keys = run.program, keys_of(run, run.program.seed)
    free = {n: to_free(n, v) for n, v in params_of(run).items()}
    first, second = ({n: np.zeros_like(v) for n, v in free.items()} for _ in range(2))
    for step in range(1, NUM_STEPS + 1):
        params = {n: from_free(n, v) for n, v in free.items()}
        gradient = run.space["function"]({n: jnp.asarray(v, program.dtype) for n, v in params.items()}, keys)[
            "gradient"
        ]
        for n in free:
            d = np.asarray(gradient[n], float) * slope_of_free(n, params[n])
            first[n] = 0.8 * first[n] + 0.2 * d
            second[n] = 0.95 * second[n] + 0.05 * d**2
            change = first[n] / (1 - 0.8**step) / np.sqrt(second[n] / (1 - 0.95**step) + 1e-12)
            free[n] = free[n] - 0.1 * np.where(np.isfinite(change), change, 0)
    params = {n: np.round(from_free(n, v), 2) for n, v in free.items()}
    params = {n: np.maximum(v, 0.05) if is_positive(n) else v for n, v in params.items()}
    params = {
        n: np.where(np.eye(v.shape[-1]) * (v < 0.05), 0.05, v) if n.endswith("scale_tril") else v
        for n, v in params.items()
    }
    again = {n: jnp.asarray(v, program.dtype) for n, v in params.items()}
    losses = (
        more_losses(run, again) if is_random(run) else np.asarray(run.space["function"](again, keys)["losses"], float)
    )
    bound = dense_bound(program, params)
    for wrong in (different(run, losses, bound), too_high(run, losses, bound, params)):
        if wrong:
            text = ", ".join(f"{n!r}: A({v.tolist()})" for n, v in params.items())
            run.fail("fitted", f"{wrong}; at params = {{{text}}}")


NUM_STEPS = 60


def is_positive(name: str) -> bool:
    sampled = name.endswith("_auto_loc") and ".u" not in name
    return sampled or name.endswith("_scale") or name.endswith(("_variance", "_lengthscale"))


def to_free(name: str, value: Any) -> np.ndarray:
    """Real coordinates: logarithms of what is positive, of diagonals too."""
    value = np.asarray(value, float)
    if name.endswith("scale_tril"):
        eye = np.eye(value.shape[-1], dtype=bool)
        return np.where(eye, np.log(np.where(eye, value, 1)), np.tril(value))
    return np.log(value) if is_positive(name) else value


def from_free(name: str, value: np.ndarray) -> np.ndarray:
    if name.endswith("scale_tril"):
        return np.where(np.eye(value.shape[-1], dtype=bool), np.exp(np.minimum(value, 3)), np.tril(value))
    return np.exp(np.minimum(value, 3)) if is_positive(name) else value


def slope_of_free(name: str, value: np.ndarray) -> np.ndarray:
    """Derivative of a parameter for its real coordinate."""
    if name.endswith("scale_tril"):
        return np.where(np.eye(value.shape[-1], dtype=bool), value, np.tril(np.ones_like(value)))
    return value if is_positive(name) else np.ones_like(value)


PROPERTIES: dict[str, Callable[[Run, Values], None]] = {
    "gradient": compare_gradient,
    "fitted": compare_fitted,
    "posterior": compare_posterior,
    "loose": compare_loose,
    "minibatch": compare_minibatch,
    "potential": compare_potential,
}
