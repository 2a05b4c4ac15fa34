"""What an observation sees of the functions of a model: the statement that says so, and the same as a matrix.

Every view is linear: eta = offset + L F, with F all values of all functions that are called, call by call, row by row, function by
function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class View:
    """A choice.

    :param kind: a name of :data:`KINDS`, or of those of :mod:`tests.fuzz.functionals`.
    :param functions: names of the gps that are called.
    :param drawn: whether eta is a draw, ``sample()``, or marginals.
    :param arrays: what it needs beside X, by the name that it has in the program.
    :param column: of what is picked.
    :param rows: what functions are called at, a name of :data:`tests.fuzz.functionals.ROWS`; inputs by default.
    :param term: positions of summands of the kernel that are seen; all by default.
    """

    kind: str
    functions: tuple[str, ...]
    drawn: bool = False
    arrays: tuple[tuple[str, Any], ...] = ()
    column: int = 0
    rows: str = "values"
    term: tuple[int, ...] = ()


class Call(NamedTuple):
    """f(X), or f(X).sample().

    :param weights: of values at X in each row, where rows are weighted sums of values; shape (rows, len(X)).
    :param term: positions of summands of the kernel, where it is of these alone.
    """

    function: str
    X: np.ndarray
    drawn: bool = False
    weights: np.ndarray | None = None
    term: tuple[int, ...] = ()

    @property
    def num(self) -> int:
        """How many rows."""
        return len(self.X) if self.weights is None else len(self.weights)


class Seen(NamedTuple):
    """A view of a model.

    :param lines: statements before.
    :param expression: eta in the program.
    :param calls: of functions; eta = offset + L F.
    :param shape: of eta, (N,) or (N, K).
    :param by_row: whether row i of eta depends on row i of X alone.
    :param mixes: whether outputs mix functions.
    :param pointwise: whether draws are independent from row to row.
    :param together: how many entries of eta one y sees, each of them at inputs of its own.
    """

    lines: list[str]
    expression: str
    calls: list[Call]
    L: np.ndarray
    offset: np.ndarray
    shape: tuple[int, ...]
    by_row: bool = True
    mixes: bool = False
    pointwise: bool = False
    together: int = 1


def _end(view: View, drawn: str = ".sample()") -> str:
    return drawn if view.drawn else ""


def _plain(view, X, latents, names, arrays):
    """f(X), of one function or P; independent: draws of each row by itself."""
    f, N = view.functions[0], len(X)
    P = latents[f]
    shape = (N,) if P is None else (N, P)
    independent = view.kind == "independent"
    expression = f"{f}(X[rows])" + (".independent()" if independent else "") + _end(view)
    size = int(np.prod(shape))
    return Seen([], expression, [Call(f, X)], np.eye(size), np.zeros(size), shape, pointwise=independent)


def _joined(view, X, latents, names, arrays):
    """Rows of f(X), of two draws row by row."""
    f = view.functions[0]
    parts = [f"{f}(X[rows][{part}]).independent().sample()" for part in (":1", "1:")]
    seen = _plain(view, X, latents, names, arrays)
    return seen._replace(expression=f"jnp.concatenate([{', '.join(parts)}])", pointwise=True)


def _shifted(view, X, latents, names, arrays):
    """f(X) + m."""
    seen, (m,) = _plain(view, X, latents, names, arrays), arrays
    offset = np.broadcast_to(m.reshape(-1, *(1,) * (len(seen.shape) - 1)), seen.shape).ravel()
    column = "" if len(seen.shape) == 1 else "[:, None]"
    f = view.functions[0]
    return seen._replace(expression=f"({f}(X[rows]) + {names[0]}[rows]{column})" + _end(view), offset=offset)


def _scaled(view, X, latents, names, arrays):
    """f(X) * c, a varying coefficient."""
    seen, (c,) = _plain(view, X, latents, names, arrays), arrays
    factor = np.broadcast_to(c.reshape(-1, *(1,) * (len(seen.shape) - 1)), seen.shape).ravel()
    column = "" if len(seen.shape) == 1 else "[:, None]"
    f = view.functions[0]
    return seen._replace(expression=f"({f}(X[rows]) * {names[0]}[rows]{column})" + _end(view), L=np.diag(factor))


def _mixed(view, X, latents, names, arrays):
    """f(X) @ W."""
    f, N, (W,) = view.functions[0], len(X), arrays
    L = np.kron(np.eye(N), W.T)
    expression = f"({f}(X[rows]) @ {names[0]})" + _end(view)
    return Seen([], expression, [Call(f, X)], L, np.zeros(len(L)), (N, W.shape[1]), mixes=True)


def _picked(view, X, latents, names, arrays):
    """f(X)[..., p], or (f(X) @ W)[..., p] of a mixture."""
    seen = (_mixed if arrays else _plain)(view, X, latents, names, arrays)
    rows = np.arange(len(X)) * seen.shape[1] + view.column
    marginals = seen.expression.removesuffix(".sample()")
    expression = f"{marginals}[..., {view.column}]" + _end(view)
    return seen._replace(expression=expression, L=seen.L[rows], offset=seen.offset[rows], shape=(len(X),))


def _stacked(view, X, latents, names, arrays):
    """stack([f(X), g(X)])."""
    N, K = len(X), len(view.functions)
    L = np.zeros((N * K, K * N))
    for i in range(N):
        for k in range(K):
            L[i * K + k, k * N + i] = 1
    calls = [Call(f, X) for f in view.functions]
    expression = f"ogp.stack([{', '.join(f'{f}(X[rows])' for f in view.functions)}])" + _end(view)
    return Seen([], expression, calls, L, np.zeros(N * K), (N, K))


def _summed(view, X, latents, names, arrays):
    """(stack([f(X), g(X)]) @ w)[..., 0]."""
    seen, (w,) = _stacked(view, X, latents, names, arrays), arrays
    N = len(X)
    L = np.kron(np.eye(N), w[:, 0]) @ seen.L
    marginals = seen.expression.removesuffix(".sample()")
    expression = f"({marginals} @ {names[0]})[..., 0]" + _end(view)
    return Seen([], expression, seen.calls, L, np.zeros(N), (N,), mixes=True)


def _bins(view, X, latents, names, arrays):
    """Averages over J inputs for each y."""
    f, (nodes,) = view.functions[0], arrays
    N, J = len(X), len(nodes) // len(X)
    L = np.kron(np.eye(N), np.full((1, J), 1 / J))
    expression = f"{f}({names[0]}).sample().reshape({N}, {J}).mean(1)"
    return Seen([], expression, [Call(f, nodes)], L, np.zeros(N), (N,), by_row=False)


def _weighed(view, X, latents, names, arrays):
    """B @ f(X): integrals, running sums, contrasts."""
    f, (B,) = view.functions[0], arrays
    expression = f"{names[0]} @ {f}(X[rows]).sample()"
    return Seen([], expression, [Call(f, X)], B, np.zeros(len(B)), (len(B),), by_row=False)


def _difference(view, X, latents, names, arrays):
    """f(X) - f(X2), two calls of one function."""
    f, (X2,) = view.functions[0], arrays
    N = len(X)
    lines = [f"first = {f}(X[rows]).sample()", f"second = {f}({names[0]}).sample()"]
    L = np.concatenate([np.eye(N), -np.eye(N)], 1)
    return Seen(lines, "first - second", [Call(f, X), Call(f, X2)], L, np.zeros(N), (N,), by_row=False)


def _added(view, X, latents, names, arrays):
    """c f(X) + g(X), draws of two functions."""
    f, g = view.functions
    (c,) = arrays
    expression = f"{names[0]}[rows] * {f}(X[rows]).sample() + {g}(X[rows]).sample()"
    L = np.concatenate([np.diag(c), np.eye(len(X))], 1)
    return Seen([], expression, [Call(f, X), Call(g, X)], L, np.zeros(len(X)), (len(X),))


def _beside(view, X, latents, names, arrays):
    """f(X) + c g(X), marginals of one function at a draw of another."""
    f, g = view.functions
    (c,) = arrays
    expression = f"{f}(X[rows]) + {names[0]}[rows] * {g}(X[rows]).sample()"
    L = np.concatenate([np.eye(len(X)), np.diag(c)], 1)
    return Seen([], expression, [Call(f, X), Call(g, X, True)], L, np.zeros(len(X)), (len(X),))


KINDS = {
    "plain": _plain,
    "independent": _plain,
    "joined": _joined,
    "shifted": _shifted,
    "scaled": _scaled,
    "mixed": _mixed,
    "picked": _picked,
    "stacked": _stacked,
    "summed": _summed,
    "bins": _bins,
    "weighed": _weighed,
    "difference": _difference,
    "added": _added,
    "beside": _beside,
}
