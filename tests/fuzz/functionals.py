"""Rows that are linear functionals of f, rows of tasks, and areas: as they are written, and as weighted sums of values.

Derivatives are differences of so high an order that they are derivatives to ten digits, integrals a rule of many nodes; nothing
here knows a derivative or an integral of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.linalg import block_diag

from tests import oracles
from tests.fuzz import views
from tests.fuzz.views import Call, Seen, View

FIRST = np.array([1 / 280, -4 / 105, 1 / 5, -4 / 5, 0, 4 / 5, -1 / 5, 4 / 105, -1 / 280])
SECOND = np.array([-1 / 560, 8 / 315, -1 / 5, 8 / 5, -205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560])
STEP, LONG_STEP = 0.01, 0.05  # of first and of second derivatives
SLOPES = ("slope", "curvature", "direction", "both")  # of smooth kernels only
SCALE = {"slope": 0.4, "curvature": 0.15, "direction": 0.4, "both": 0.4}  # so that all are of the size of values
RULE, EXACT_RULE = 8, 12  # nodes of an integral: the package's own, and what stands for a closed form

Rows = tuple[str, np.ndarray, np.ndarray]  # expression, nodes, weights of nodes in each row


def values(X: np.ndarray, names: list[str], arrays: list[np.ndarray]) -> Rows:
    return "X[rows]", X, np.eye(len(X))


def average(X, names, arrays):
    """Nodes and weights of each row's own."""
    nodes, w = arrays
    return f"ogp.Average({names[0]}[rows], {names[1]}[rows])", nodes.reshape(-1, nodes.shape[-1]), block_diag(*w)


def centred(X, names, arrays):
    """Values less an average over the same inputs."""
    (over,) = arrays
    W = np.concatenate([np.eye(len(X)), np.full((len(X), len(over)), -1 / len(over))], 1)
    return f"ogp.centred(X[rows], {names[0]})", np.concatenate([X, over]), W


def differences(X: np.ndarray, along: np.ndarray, weights: np.ndarray, h: float, order: int) -> tuple[Any, Any]:
    nodes = X[:, None] + h * np.arange(-4, 5)[:, None] * along[:, None]
    return nodes.reshape(-1, X.shape[1]), np.kron(np.eye(len(X)), weights[None] / h**order)


def slope(X, names, arrays):
    first = np.broadcast_to(np.eye(X.shape[1])[0], X.shape)
    return "ogp.Derivative(X[rows], 0)", *differences(X, first, FIRST, STEP, 1)


def curvature(X, names, arrays):
    first = np.broadcast_to(np.eye(X.shape[1])[0], X.shape)
    return "ogp.Derivative(X[rows], (0, 0))", *differences(X, first, SECOND, LONG_STEP, 2)


def direction(X, names, arrays):
    return f"ogp.Derivative(X[rows], direction={names[0]}[rows])", *differences(X, arrays[0], FIRST, STEP, 1)


def both(X, names, arrays):
    """Values in some rows, slopes in the others; not row by row."""
    _, nodes, W = slope(X[2:], names, arrays)
    return (
        "ogp.concatenate([X[:2], ogp.Derivative(X[2:], 0)])",
        np.concatenate([X[:2], nodes]),
        block_diag(np.eye(2), W),
    )


def integral(X, names, arrays):
    """Over boxes; the last array says whether the kernel has a closed form, and whether averages are asked for."""
    lower, upper, (exact, share) = arrays
    x, w = oracles.legendre(EXACT_RULE if exact else RULE)
    D = X.shape[1]
    grid = np.stack(np.meshgrid(*[x] * D, indexing="ij"), -1).reshape(-1, D)
    weights = np.prod(np.stack(np.meshgrid(*[w] * D, indexing="ij"), -1), -1).ravel() / 2**D
    nodes = lower[:, None] + (upper - lower)[:, None] * (grid + 1) / 2
    size = np.ones(len(lower)) if share else np.prod(upper - lower, -1)
    text = f"ogp.Integral({names[0]}[rows], {names[1]}[rows], average={bool(share)})"
    return text, nodes.reshape(-1, D), np.kron(np.diag(size), weights[None])


ROWS = {f.__name__: f for f in (values, average, centred, slope, curvature, direction, both, integral)}


def see_rows(view: View, X: np.ndarray, latents, names: list[str], arrays: list[np.ndarray]) -> Seen:
    """f(rows), of f or a term of it, of one function or P."""
    f, N, P = view.functions[0], len(X), latents[view.functions[0]]
    text, nodes, W = ROWS[view.rows](X, names, arrays)
    shape = (N,) if P is None else (N, P)
    c, size = SCALE.get(view.rows, 1.0), int(np.prod(shape))
    expression = f"{called(view)}({text})"
    if c != 1:
        expression = f"({expression} * {c})"
    expression += ".sample()" if view.drawn else ""
    call = Call(f, nodes, weights=W, term=view.term)
    return Seen([], expression, [call], c * np.eye(size), np.zeros(size), shape, by_row=view.rows != "both")


def called(view: View) -> str:
    """f, or some of its terms."""
    f, term = view.functions[0], view.term
    return f"{f}.term({term[0] if len(term) == 1 else list(term)})" if term else f


def see_tasks(view: View, X: np.ndarray, latents, names: list[str], arrays: list[np.ndarray]) -> Seen:
    """f(Tasks(rows, task)), of independent functions, of mixtures, and of mixtures with functions of each task's own."""
    f, N, P = view.functions[0], len(X), latents[view.functions[0]]
    task = arrays[0].astype(int)
    W = np.eye(P)
    if len(arrays) > 1:
        W = arrays[1] if len(arrays) == 2 else np.concatenate([arrays[1], np.diag(arrays[2])])
    text, nodes, sums = ROWS[view.rows](X, [], [])
    L = np.zeros((N, N * P))
    for i, t in enumerate(task):
        L[i, i * P : (i + 1) * P] = W[:, t]
    c = SCALE.get(view.rows, 1.0)
    expression = f"{called(view)}(ogp.Tasks({', '.join([text, f'{names[0]}[rows]', *names[1:]])}))"
    expression = (expression if c == 1 else f"({expression} * {c})") + (".sample()" if view.drawn else "")
    call = Call(f, nodes, weights=sums, term=view.term)
    return Seen([], expression, [call], c * L, np.zeros(N), (N,), mixes=len(arrays) > 1)


def see_areas(view: View, X: np.ndarray, latents, names: list[str], arrays: list[np.ndarray]) -> Seen:
    """f at the nodes of each area, which one y sees together."""
    (nodes,) = arrays
    N, Q, D = nodes.shape
    expression = f"{called(view)}({names[0]}[rows].reshape(-1, {D}))"
    call = Call(view.functions[0], nodes.reshape(-1, D), term=view.term)
    return Seen([], expression, [call], np.eye(N * Q), np.zeros(N * Q), (N, Q), together=Q)


KINDS = views.KINDS | {"rows": see_rows, "tasks": see_tasks, "areas": see_areas}


def see(view: View, X: np.ndarray, latents: Mapping[str, int | None]) -> Seen:
    """A view in a model whose functions have so many latents."""
    arrays = {name: np.array(value, float) for name, value in view.arrays}
    seen = KINDS[view.kind](view, X, latents, list(arrays), list(arrays.values()))
    return seen._replace(calls=[call._replace(drawn=True) for call in seen.calls]) if view.drawn else seen
