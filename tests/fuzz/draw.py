"""What a seed decides: random choices, small and well conditioned, that make a :class:`Program`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from tests.fuzz import covariances, witnesses
from tests.fuzz.covariances import LOW_RANK, Hyper, Tree
from tests.fuzz.functionals import SLOPES
from tests.fuzz.outcomes import AREAS, OUTCOMES
from tests.fuzz.programs import GP, Program, Site
from tests.fuzz.views import View

Rng = np.random.Generator

# How often each way of looking at functions is drawn.
VIEWS = {
    "plain": 4,
    "outputs": 3,
    "shifted": 1,
    "scaled": 1,
    "mixed": 2,
    "picked": 2,
    "stacked": 2,
    "summed": 1,
    "draws": 2,
    "independent": 1,
    "bins": 2,
    "weighed": 2,
    "difference": 2,
    "added": 1,
    "classes": 1,
    "two sites": 1,
    "two calls": 1,
    "beside": 1,
    "rows": 5,
    "tasks": 3,
    "areas": 2,
}
SINGLE = [name for name, o in OUTCOMES.items() if o.columns == 1]
DRAWABLE = [name for name in SINGLE if OUTCOMES[name].plain]


def rounded(values: Any) -> Any:
    """Nested tuples of numbers with two decimals."""
    values = np.round(np.asarray(values, float), 2) + 0.0
    return values.item() if values.ndim == 0 else tuple(rounded(v) for v in values)


def pick(rng: Rng, weights: dict[str, float]) -> str:
    names = list(weights)
    p = np.array([weights[n] for n in names], float)
    return names[rng.choice(len(names), p=p / p.sum())]


def chance(rng: Rng, p: float) -> bool:
    return bool(rng.uniform() < p)


# Kinds of rows of a functional.
ROWS = {"values": 1, "average": 2, "centred": 1, "slope": 2, "curvature": 1, "direction": 1, "both": 1, "integral": 2}
BY_ROW = (
    "plain",
    "independent",
    "joined",
    "shifted",
    "scaled",
    "mixed",
    "picked",
    "stacked",
    "summed",
    "added",
    "beside",
)
# Beyond these exponentials of eta have averages that no number of draws finds.
LARGEST_VARIANCE, LARGEST_MEAN = 2.5, 4.0


def program(seed: int) -> Program:
    """The program of a seed: the first of its attempts whose functions are of a size that data have."""
    return next(p for attempt in itertools.count() if moderate(p := attempted(seed, attempt)))


def moderate(made: Program) -> bool:
    """Whether all that y sees has moderate moments, and derivatives."""
    params = made.values()
    for look in witnesses.looks(made)[0]:
        F, L = witnesses.all_values(made, look.seen.calls, params), look.seen.L
        mean, prior = look.seen.offset + L @ F.mean, np.diag(L @ F.prior @ L.T)
        given = np.diag(L @ (F.explained + F.residual) @ L.T)
        if np.abs(mean).max() > LARGEST_MEAN or max(prior.max() / 2, given.max()) > LARGEST_VARIANCE:
            return False
        learned = [Z for n, Z in params.items() if n[1:3] == "_Z"]
        if not all(apart(Z, call.X) for Z in learned for call in look.seen.calls):
            return False
    return True


def apart(Z: Any, X: Any) -> bool:
    """Whether no learned point lies on an input, where a rough kernel has a kink, and no derivative."""
    Z, X = np.asarray(Z, float), np.asarray(X, float)
    return np.abs(Z.reshape(-1, 1, X.shape[1]) - X).max(-1).min() > 0.005


def attempted(seed: int, attempt: int) -> Program:
    rng = np.random.default_rng([12, seed, attempt])
    dtype = "float32" if chance(rng, 0.12) else "float64"
    N, D = int(rng.integers(4, 7)), int(rng.integers(1, 3))
    tasks = D == 2 and chance(rng, 0.15)
    view = pick(rng, VIEWS)
    rows = pick(rng, ROWS if view == "rows" else {"values": 2, "slope": 1 if view == "tasks" else 0})
    tasks = tasks and rows not in ("integral", "direction")
    X = points(rng, N, D, tasks)
    P = {
        "outputs": 2,
        "mixed": int(rng.integers(1, 4)),
        "picked": 2,
        "classes": 3,
        "tasks": int(rng.integers(2, 4)),
    }.get(view)
    P = 2 if view == "rows" and chance(rng, 0.2) else P
    guide = pick(rng, {"auto": 7, "hand": 2, "natural": 1, "sampled": 1, "normal": 1})
    num_gps = 2 if view in ("stacked", "summed", "added", "two sites", "beside") else 1
    gps = tuple(draw_gp(rng, "fg"[i], X, P, guide, tasks, dtype, rows) for i in range(num_gps))
    if view in ("stacked", "summed", "two sites") and guide not in ("normal",):
        gps = tuple(replace(g, residual=gps[0].residual) for g in gps)
    plate = pick(rng, {"rows": 6, "event": 2, "scale": 1, "more": 1})
    if view in ("rows", "tasks", "areas"):
        sites = (draw_functional(rng, view, rows, X, gps[0], guide, tasks),)
    else:
        sites = tuple(draw_sites(rng, view, X, P, tasks))
    if plate == "more":
        if all(site.view.kind in BY_ROW for site in sites):  # draws outside of the plate would not be weighed with it
            sites = tuple(replace(s, inside=True) for s in sites)
        else:
            plate = "rows"
    in_plate = plate in ("rows", "more")
    if not in_plate or guide not in ("auto", "natural"):
        sites = tuple(replace(s, masked_by="handler" if in_plate else "distribution") for s in sites)
    total = N + int(rng.integers(1, 6)) if plate in ("scale", "more") else N
    made = Program(seed, dtype, X, gps, sites, plate, total, guide, ())
    return replace(made, params=draw_params(rng, made))


# ---------------------------------------------------------------- inputs and kernels


def points(rng: Rng, num: int, D: int, tasks: bool, others: Any = ()) -> Any:
    """Points in [-2, 2]^D, apart from each other and from others; the last column an index of tasks."""
    found = [np.array(p) for p in others]
    start, least = len(found), 0.3 if D == 1 else 0.5
    while len(found) < start + num:
        x = np.round(rng.uniform(-2.5, 2.5, D), 2)
        if tasks:
            x[-1] = rng.integers(2)
        if all(np.abs(x - z).max() > least for z in found):
            found.append(x)
        least *= 0.97
    return rounded(found[start:])


def draw_kernel(rng: Rng, D: int, P: int | None, tasks: bool, name: str, guide: str, rows: str) -> Tree:
    """A tree whose first variance and lengthscale may be hyperparameters of the model; smooth where slopes are seen."""
    smooth = rows in SLOPES
    leading = P is not None and chance(rng, 0.4)

    def hyper(suffix: str, shape: tuple[int, ...]) -> Any:
        how = pick(rng, {"constant": 1, "param": 1, "sample": 0.0 if guide in ("hand", "normal") else 0.5})
        value = rounded(rng.uniform(0.6, 1.6, shape))
        return value if how == "constant" else Hyper(f"{name}_{suffix}", value, how)

    dims = D - tasks
    shape: tuple[int, ...] = (P, dims) if leading else (dims,) if chance(rng, 0.5) else ()
    rough = {} if smooth else {"Matern12": 1, "Matern32": 2, "Matern52": 2}
    family = pick(rng, {"RBF": 3, **rough, "RationalQuadratic": 1})
    tree: Tree = (family, hyper("lengthscale", shape))
    if family == "RationalQuadratic":
        tree = (*tree, rounded(rng.uniform(0.5, 2.0, (P,) if leading else ())))
    if tasks:
        W, kappa = rounded(rng.normal(size=(2, 2))), rounded(rng.uniform(0.1, 0.5, 2))
        tree = ("product", ("on", tree, tuple(range(dims))), ("on", ("Coregion", W, kappa), (D - 1,)))
    elif chance(rng, 0.4):
        other = draw_other(rng, D, rows)
        if D == 2 and chance(rng, 0.3):
            other = ("on", draw_other(rng, 1, rows), (int(rng.integers(2)),))
        tree = (("sum" if chance(rng, 0.6) else "product"), tree, other)
    if chance(rng, 0.75):
        tree = ("scaled", tree, hyper("variance", (P,) if leading else ()))
    if not leading and chance(rng, 0.12):
        tree = ("function", tree)
    elif chance(rng, 0.12) and not smooth and rows != "integral":
        tree = ("sum", tree, ("White", rounded(rng.uniform(0.1, 0.5))))
    return tree


def draw_other(rng: Rng, D: int, rows: str) -> Tree:
    rough = {} if rows in SLOPES else {"Matern32": 1, "ArcCosine": 2}
    short = {} if rows == "curvature" else {"Periodic": 2}  # beside the steps of a witness by differences
    name = pick(rng, {"RBF": 1, **rough, **short, "Linear": 2, "Constant": 1, "Polynomial": 1})
    numbers = {
        "Periodic": lambda: (rounded(rng.uniform(0.7, 1.5)), rounded(rng.uniform(1.5, 3.0))),
        "Polynomial": lambda: (2, rounded(rng.uniform(0.2, 0.6)), rounded(rng.uniform(0.3, 1.0))),
        "ArcCosine": lambda: (int(rng.integers(3)), rounded(rng.uniform(0.5, 1.0)), rounded(rng.uniform(0.3, 1.0))),
    }
    return (name, *numbers.get(name, lambda: (rounded(rng.uniform(0.5, 1.5)),))())


def expectable(rng: Rng) -> Tree:
    """A kernel of one dimension whose expectations are in closed form."""
    first = ("RBF", rounded(rng.uniform(0.7, 1.4)))
    trees = [first, ("sum", first, ("Linear", rounded(rng.uniform(0.3, 1)))), ("sum", first, ("Constant", 0.4))]
    return ("scaled", trees[rng.integers(3)], rounded(rng.uniform(0.5, 2)))


def draw_gp(
    rng: Rng, name: str, X: Any, P: int | None, guide: str, tasks: bool, dtype: str, rows: str = "values"
) -> GP:
    D = len(X[0])
    tree = draw_kernel(rng, D, P, tasks, name, guide, rows)
    own = P is not None and not tasks and chance(rng, 0.2)  # points of each function's own
    sizes = rng.integers(1, 4, pick_count(rng))
    every = (
        points(rng, int(sizes.sum()) + 3, D, tasks)
        if not chance(rng, 0.25)
        else points_of_rows(rng, X, int(sizes.sum()) + 3, D, tasks)
    )
    cuts = np.cumsum(sizes)
    sets = [every[a:b] for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]
    mean_only = every[cuts[-1] : cuts[-1] + int(rng.integers(1, 4))] if chance(rng, 0.12) else None
    if own:
        sets = [rounded(np.array([np.array(Z) + 0.1 * k for k in range(P)])) for Z in sets]
        mean_only = None
    kinds = {"full": 5, "diagonal": 2, "prior": 1.5, "low_rank": 0 if guide == "natural" else 1.5}
    covariances_of = tuple(pick(rng, kinds) for _ in sets)
    low = any(n in LOW_RANK for n in covariances.names(tree)) and covariances.names(tree)[0] != "sum"
    jitter = 1e-3 if low else [None, 1e-8, 1e-5][int(rng.integers(3))]
    leading = own or _has_leading(tree)
    return GP(
        name,
        tree,
        tuple(sets),
        mean_only,
        P,
        P is not None and (not leading or chance(rng, 0.5)),
        chance(rng, 0.3) and not tasks,
        jitter if dtype == "float64" else 1e-3 if low else 1e-4,
        ("diagonal",) * len(sets) if guide == "normal" else covariances_of,
        "tight" if chance(rng, 0.4) and guide != "normal" else "prior",
    )


def pick_count(rng: Rng) -> int:
    return int(rng.choice([1, 2, 3], p=(0.45, 0.4, 0.15)))


def points_of_rows(rng: Rng, X: Any, num: int, D: int, tasks: bool) -> Any:
    """Inducing points of which the first are data inputs."""
    rows = [X[i] for i in rng.permutation(len(X))[: min(num, 2)]]
    return (*rows, *points(rng, num - len(rows), D, tasks, rows))


def _has_leading(tree: Any) -> bool:
    """Whether hyperparameters have an axis of functions."""
    if tree[0] in ("RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic"):
        value = tree[1].start if isinstance(tree[1], Hyper) else tree[1]
        return np.ndim(value) == 2
    return any(_has_leading(part) for part in tree[1:] if covariances.is_tree(part))


# ---------------------------------------------------------------- observations


def draw_sites(rng: Rng, view: str, X: Any, P: int | None, tasks: bool) -> list[Site]:
    N, D = len(X), len(X[0])

    def array(*shape: int) -> Any:
        return rounded(rng.uniform(0.4, 1.4, shape) * rng.choice([-1, 1], shape))

    def site(name: str, v: View, outcomes: list[str], K: int | None = None) -> Site:
        return draw_site(rng, name, v, outcomes, N if K is None else (N, K))

    drawn = {
        "draws": lambda: View("plain", ("f",), True),
        "independent": lambda: View("joined" if chance(rng, 0.4) else "independent", ("f",), True),
        "bins": lambda: View("bins", ("f",), True, (("nodes", points(rng, 2 * N, D, tasks)),)),
        "weighed": lambda: View("weighed", ("f",), True, (("B", weights(rng, N)),)),
        "difference": lambda: View("difference", ("f",), True, (("X2", points(rng, N, D, tasks)),)),
        "added": lambda: View("added", ("f", "g"), True, (("c", array(N)),)),
    }
    if view in drawn:
        return [site("y", drawn[view](), DRAWABLE)]
    if view == "two calls":
        kinds = [drawn[str(rng.choice(["draws", "bins", "weighed"]))](), View("plain", ("f",))]
        return [site("y0", kinds[0], DRAWABLE), site("y1", kinds[1], SINGLE)]
    if view == "beside":
        return [site("y", View("beside", ("f", "g"), False, (("c", array(N)),)), SINGLE)]
    if view == "two sites":
        kinds = [
            View("plain", ("f",)),
            View("plain", ("g",)) if chance(rng, 0.5) else View("summed", ("f", "g"), False, (("w", array(2, 1)),)),
        ]
        return [site(f"y{i}", v, SINGLE) for i, v in enumerate(kinds)]
    if view == "picked":
        W = (("W", array(P, 2)),) if chance(rng, 0.4) else ()
        return [
            site(f"y{p}", View("picked", ("f",), False, W if p == 0 else tuple(("W1", w) for _, w in W), p), SINGLE)
            for p in range(2)
        ]
    if view == "classes":
        return [site("y", View("plain", ("f",)), ["categorical"])]
    if view == "outputs":
        if chance(rng, 0.25):
            return [site("y", View("plain", ("f",)), ["heteroskedastic"])]
        more = chance(rng, 0.3)
        v = View("shifted", ("f",), False, (("m", array(N)),)) if more else View("plain", ("f",), chance(rng, 0.15))
        return [site("y", v, DRAWABLE if v.drawn else SINGLE, 2)]
    if view == "mixed":
        Q = int(rng.integers(1, 4))
        v = View("mixed", ("f",), chance(rng, 0.15), (("W", array(P, Q)),))
        if Q == 2 and chance(rng, 0.3):
            return [site("y", v, ["heteroskedastic"])]
        return [site("y", v, DRAWABLE if v.drawn else SINGLE, Q)]
    if view == "stacked":
        if chance(rng, 0.5):
            return [site("y", View("stacked", ("f", "g")), ["heteroskedastic"])]
        return [site("y", View("stacked", ("f", "g")), SINGLE, 2)]
    if view == "summed":
        return [site("y", View("summed", ("f", "g"), False, (("w", array(2, 1)),)), SINGLE)]
    more = {"shifted": (("m", array(N)),), "scaled": (("c", array(N)),)}.get(view, ())
    return [site("y", View(view, ("f",), False, more), SINGLE)]


def draw_functional(rng: Rng, view: str, rows: str, X: Any, g: GP, guide: str, tasks: bool) -> Site:
    """A site that sees functionals, tasks or areas, of f or of a term of it."""
    N, D = np.shape(X)
    parts, opaque = len(covariances.parts_of(g.tree)), "function" in covariances.names(g.tree)
    term = tuple(sorted(rng.permutation(parts)[: 1 + (parts > 2)].tolist())) if parts > 1 and chance(rng, 0.5) else ()
    if opaque and g.num_latents is not None:
        term = ()
    if view == "areas":
        biased = guide in ("sampled", "normal")  # for a bound of means and variances it matters what is drawn
        outcome = str(rng.choice([a for a in AREAS if not (biased and OUTCOMES[a].bound)]))
        Q = OUTCOMES[outcome].columns
        nodes = rounded(np.reshape(points(rng, N * Q, D, tasks), (N, Q, D)))
        return draw_site(rng, "y", View("areas", ("f",), False, (("nodes", nodes),), 0, rows, term), [outcome], N)
    drawn = chance(rng, 0.25)
    arrays = of_tasks(rng, N, g.num_latents) if view == "tasks" else of_rows(rng, rows, X, g, tasks, term)
    shape = (N, 2) if view == "rows" and g.num_latents else N
    v = View(view, ("f",), drawn, arrays, 0, rows, term)
    return draw_site(rng, "y", v, DRAWABLE if drawn else SINGLE, shape)


def of_tasks(rng: Rng, N: int, P: int | None) -> tuple[tuple[str, Any], ...]:
    """Tasks, and where they mix the functions how: P = L, or L + T with T = P - 1."""
    kind = pick(rng, {"independent": 2, "mixing": 1, "own": 1})
    T = {"independent": P, "mixing": 3, "own": P - 1}[kind]
    task = ("task", rounded(rng.integers(T, size=N)))
    W = ("W", rounded(rng.uniform(0.4, 1.2, (1 if kind == "own" else P, T)) * rng.choice([-1, 1])))
    return {"independent": (task,), "mixing": (task, W), "own": (task, W, ("own", rounded(rng.uniform(0.3, 1, T))))}[
        kind
    ]


def of_rows(rng: Rng, rows: str, X: Any, g: GP, tasks: bool, term: tuple[int, ...]) -> tuple[tuple[str, Any], ...]:
    """Nodes, directions and corners."""
    N, D = np.shape(X)
    if rows == "average":
        nodes = np.reshape(points(rng, 2 * N, D, tasks), (N, 2, D))
        return ("nodes", rounded(nodes)), ("w", rounded(rng.uniform(-1, 1, (N, 2))))
    if rows == "centred":
        return (("over", points(rng, 2, D, tasks)),)
    if rows == "direction":
        V = rng.normal(size=(N, D))
        return (("V", rounded(V / np.linalg.norm(V, axis=1, keepdims=True))),)
    if rows == "integral":
        lower = np.array(X) - rng.uniform(0.1, 0.5, (N, D))
        parts = [covariances.parts_of(g.tree)[i] for i in term] or [g.tree]
        exact = all(set(covariances.names(part)) <= CLOSED for part in parts) and not _has_leading(g.tree)
        upper = np.array(X) + rng.uniform(0.1, 0.5, (N, D))
        return ("lower", rounded(lower)), ("upper", rounded(upper)), ("kind", (float(exact), float(chance(rng, 0.5))))
    return ()


# Kernels whose integrals over boxes are in closed form.
CLOSED = {"RBF", "Constant", "sum", "product", "scaled", "on"}


def weights(rng: Rng, N: int) -> Any:
    """Running sums, contrasts, or anything."""
    kind = rng.integers(3)
    if kind == 0:
        return rounded(np.tril(np.ones((N, N))) * 0.5)
    return rounded(np.eye(N) - np.eye(N, k=1) if kind == 1 else rng.uniform(-0.7, 0.7, (N, N)))


def draw_site(rng: Rng, name: str, view: View, outcomes: list[str], shape: Any) -> Site:
    outcome = "gaussian" if "gaussian" in outcomes and chance(rng, 0.3) else str(rng.choice(outcomes))
    o, N = OUTCOMES[outcome], shape if isinstance(shape, int) else shape[0]
    numbers = o.numbers(rng)
    if outcome in AREAS:
        numbers["w"] = rounded(rng.uniform(0.2, 1.0, (N, o.columns)))
    if outcome == "gaussian" and isinstance(shape, int) and chance(rng, 0.3):
        numbers = {"s": rounded(rng.uniform(0.3, 1.0, N))}
    size = (shape,) if isinstance(shape, int) else shape
    eta = rng.normal(size=(*size, o.columns) if o.columns > 1 else size)
    y = np.asarray(o.draw(rng, eta, **{n: np.array(v) for n, v in numbers.items()}), float)
    positive = outcome in ("beta", "exponential", "gamma", "weibull", "log_normal", "warped")
    y = np.maximum(np.round(y, 2), 0.01) if positive else y
    masked = chance(rng, 0.25)
    mask = tuple(bool(m) for m in (rng.uniform(size=N) < 0.7)) if masked else None
    how = "plain" if view.drawn else "general" if o.plain and chance(rng, 0.12) else "ours"
    ways = {"handler": 1, "distribution": 1, "obs_mask": 0.6 if isinstance(shape, int) and how == "ours" else 0}
    masked_by = pick(rng, ways) if isinstance(shape, int) else "handler"
    inside = chance(rng, 0.5)
    return Site(name, view, outcome, tuple(numbers.items()), how, rounded(y), mask, masked_by, inside)


# ---------------------------------------------------------------- parameters


def draw_params(rng: Rng, program: Program) -> tuple[tuple[str, Any], ...]:
    """Random values of all parameters."""
    params: dict[str, Any] = {}
    for g in program.gps:
        for h in g.hypers():
            name = h.name if h.how == "param" else f"{h.name}_auto_loc"
            params[name] = rounded(rng.uniform(0.6, 1.6, np.shape(h.start)))
        if g.learned:
            for i, Z in enumerate(g.sets):
                moved = (rounded(np.array(Z) + rng.uniform(-0.05, 0.05, np.shape(Z))) for _ in itertools.count())
                params[f"{g.name}_Z{i}"] = next(Z for Z in moved if apart(Z, program.X))
            if g.mean_only is not None:
                params[f"{g.name}_H"] = g.mean_only
        batch = () if g.num_latents is None else (g.num_latents,)
        for i, Z in enumerate(g.sets):
            params |= draw_q(rng, f"{g.name}.u{i}", (*batch, np.shape(Z)[-2]), g.covariances[i], program.guide)
        if g.mean_only is not None:
            params[f"{g.name}.u{len(g.sets)}_weights"] = rounded(rng.normal(size=(*batch, len(g.mean_only))))
        if g.residual == "tight" and program.guide != "normal":
            params[f"{g.name}_residual_scale"] = rounded(rng.uniform(0.3, 1.5, batch))
    return tuple(params.items())


def draw_q(rng: Rng, name: str, shape: tuple[int, ...], kind: str, guide: str) -> dict[str, Any]:
    loc, scale = rounded(rng.normal(size=shape)), rounded(rng.uniform(0.3, 1.2, shape))
    if guide == "normal":
        return {f"{name}_auto_loc": loc, f"{name}_auto_scale": scale}
    if kind == "prior":
        return {f"{name}_loc": loc}
    if kind == "diagonal":
        return {f"{name}_loc": loc, f"{name}_scale": scale}
    M = shape[-1]
    if kind == "low_rank":
        left, right = (rounded(0.5 * rng.normal(size=(*shape, min(M, 16)))) for _ in range(2))
        return {f"{name}_loc": loc, f"{name}_scale": scale, f"{name}_left": left, f"{name}_right": right}
    T = np.tril(0.4 * rng.normal(size=(*shape, M)), -1) + np.eye(M) * np.array(scale)[..., None]
    return {f"{name}_loc": loc, f"{name}_scale_tril": rounded(T)}
