"""Kernels as small trees: each is printed as an expression of numpyro_orthgp.kernels and evaluated densely by NumPy.

A tree is a tuple, its first entry a name. Numbers in it are floats, nested tuples, or a :class:`Hyper`, a hyperparameter that the
model declares and whose value is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Tree = tuple[Any, ...]
Dense = Callable[..., np.ndarray]


class Hyper(NamedTuple):
    """A hyperparameter declared by ``numpyro.param`` or ``numpyro.sample``.

    :param start: its value, a float or nested tuples.
    :param how: "param" or "sample", the latter with a log-normal prior.
    """

    name: str
    start: Any
    how: str


# Of finite rank: their covariance of more inducing points than that is regular by its jitter alone.
LOW_RANK = ("Linear", "Polynomial", "Constant", "Coregion", "Periodic")


def hypers(tree: Any) -> list[Hyper]:
    """Those in a tree, in order."""
    if isinstance(tree, Hyper):
        return [tree]
    return [h for part in tree for h in hypers(part)] if isinstance(tree, tuple) else []


def names(tree: Tree) -> list[str]:
    """Of all kernels in a tree."""
    return [tree[0], *(n for part in tree[1:] if is_tree(part) for n in names(part))]


def is_tree(part: Any) -> bool:
    return isinstance(part, tuple) and not isinstance(part, Hyper) and bool(part) and isinstance(part[0], str)


def number(value: Any) -> str:
    """The expression of a number or array."""
    if isinstance(value, Hyper):
        return value.name
    return f"A({listed(value)})" if isinstance(value, tuple) else repr(value)


def listed(value: Any) -> str:
    """Nested tuples as nested lists."""
    return "[" + ", ".join(map(listed, value)) + "]" if isinstance(value, tuple) else repr(value)


def code(tree: Tree) -> str:
    """The expression of a kernel."""
    name, *parts = tree
    match name:
        case "sum":
            return f"({code(parts[0])} + {code(parts[1])})"
        case "product":
            return f"({code(parts[0])} * {code(parts[1])})"
        case "scaled":
            return f"{number(parts[1])} * {code(parts[0])}"
        case "on":
            inner = code(parts[0])
            return f"({inner}).on({list(parts[1])})" if " * " in inner else f"{inner}.on({list(parts[1])})"
        case "function":
            return f"as_function({code(parts[0])})"
        case "Polynomial":
            return f"kernels.Polynomial({', '.join(map(number, parts))})"
    return f"kernels.{name}({', '.join(map(number, parts))})"


def parts_of(tree: Tree) -> list[Tree]:
    """Summands from left to right, as ``f.term`` counts them."""
    name, *parts = tree
    if name == "sum":
        return [part for side in parts for part in parts_of(side)]
    if name in ("scaled", "on"):
        return [(name, part, parts[1]) for part in parts_of(parts[0])]
    return [tree]


def dense_of_terms(tree: Tree, values: Mapping[str, Any], p: int, terms: Sequence[tuple[int, ...]]) -> Dense:
    """Covariances of f and of some of its summands: the last column of inputs says which of ``terms`` a row is of."""
    parts = [dense(part, values, p) for part in parts_of(tree)]
    member = np.array([[not term or s in term for s in range(len(parts))] for term in terms])

    def kernel(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        a, b = member[A[:, -1].astype(int)], member[B[:, -1].astype(int)]
        return sum(k(A[:, :-1], B[:, :-1]) * np.outer(a[:, s], b[:, s]) for s, k in enumerate(parts))

    return kernel


def dense(tree: Tree, values: Mapping[str, Any], p: int = 0) -> Dense:
    """``k(A, B)``, the covariance matrix of latent function p; ``values`` are those of its hyperparameters."""
    name, *parts = tree
    if name in ("sum", "product"):
        left, right = (dense(part, values, p) for part in parts)
        if name == "sum":
            return lambda A, B: left(A, B) + right(A, B)
        return lambda A, B: left(A, B) * right(A, B)
    if name == "scaled":
        inner, variance = dense(parts[0], values, p), scalar(parts[1], values, p)
        return lambda A, B: variance * inner(A, B)
    if name == "on":
        inner, dims = dense(parts[0], values, p), list(parts[1])
        return lambda A, B: inner(A[:, dims], B[:, dims])
    if name == "function":
        return dense(parts[0], values, p)
    return PLAIN[name](p, *(looked_up(part, values) for part in parts))


def looked_up(part: Any, values: Mapping[str, Any]) -> np.ndarray:
    return np.asarray(values[part.name] if isinstance(part, Hyper) else part, float)


def scalar(part: Any, values: Mapping[str, Any], p: int) -> float:
    """A number of shape () or (P,)."""
    value = looked_up(part, values)
    return float(value[p] if value.ndim else value)


def _scale(value: np.ndarray, p: int) -> np.ndarray:
    """One per dimension, of shape (), (D,) or (P, D)."""
    return value[p] if value.ndim == 2 else value


def _one(value: np.ndarray, p: int) -> float:
    return float(value[p] if value.ndim else value)


def _radial(shape: Callable[..., np.ndarray]) -> Callable[..., Dense]:
    def build(p: int, lengthscale: np.ndarray, *others: np.ndarray) -> Dense:
        scale, rest = _scale(lengthscale, p), [_one(o, p) for o in others]

        def kernel(A: np.ndarray, B: np.ndarray) -> np.ndarray:
            return shape(np.sqrt((((A[:, None] - B[None]) / scale) ** 2).sum(-1)), *rest)

        return kernel

    return build


def _periodic(p: int, lengthscale: np.ndarray, period: np.ndarray) -> Dense:
    scale, length = _scale(lengthscale, p), _scale(period, p)
    return lambda A, B: np.exp(-2 * (np.sin(np.pi * (A[:, None] - B[None]) / length) ** 2 / scale**2).sum(-1))


def _inner(A: np.ndarray, B: np.ndarray, weights: Any) -> np.ndarray:
    return (A[:, None] * B[None] * weights).sum(-1)


def _polynomial(p: int, degree: np.ndarray, variance: np.ndarray, offset: np.ndarray) -> Dense:
    return lambda A, B: (_inner(A, B, _scale(variance, p)) + _one(offset, p)) ** int(degree)


def _arc_cosine(p: int, order: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Dense:
    """Cho and Saul 2009, Eqs. 3-7."""

    def kernel(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        w, b = _scale(weight, p), _one(bias, p)
        lengths = [np.sqrt((X**2 * w).sum(-1) + b) for X in (A, B)]
        norms = np.outer(*lengths)
        angle = np.arccos(np.clip((_inner(A, B, w) + b) / norms, -1, 1))
        if int(order) == 0:
            return 1 - angle / np.pi
        if int(order) == 1:
            return norms * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / np.pi
        J = 3 * np.sin(angle) * np.cos(angle) + (np.pi - angle) * (1 + 2 * np.cos(angle) ** 2)
        return norms**2 * J / np.pi

    return kernel


def _white(p: int, value: np.ndarray) -> Dense:
    return lambda A, B: _one(value, p) * (A[:, None] == B[None]).all(-1)


def _coregion(p: int, W: np.ndarray, kappa: np.ndarray) -> Dense:
    tasks = W @ W.T + np.diag(np.broadcast_to(kappa, len(W)))
    return lambda A, B: tasks[np.ix_(A[:, 0].astype(int), B[:, 0].astype(int))]


PLAIN: dict[str, Callable[..., Dense]] = {
    "RBF": _radial(lambda r: np.exp(-(r**2) / 2)),
    "Matern12": _radial(lambda r: np.exp(-r)),
    "Matern32": _radial(lambda r: (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r)),
    "Matern52": _radial(lambda r: (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r)),
    "RationalQuadratic": _radial(lambda r, alpha: (1 + r**2 / (2 * alpha)) ** -alpha),
    "Periodic": _periodic,
    "Linear": lambda p, variance: lambda A, B: _inner(A, B, _scale(variance, p)),
    "Polynomial": _polynomial,
    "ArcCosine": _arc_cosine,
    "Constant": lambda p, value: lambda A, B: np.full((len(A), len(B)), _one(value, p)),
    "White": _white,
    "Coregion": _coregion,
}
