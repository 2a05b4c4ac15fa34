"""Fingerprints of runs: two runs with the same fingerprint solve the same problem in the same steps.

A fingerprint covers what must not change: the data and the program. The program's digest is of the loss's dataflow, without the
optimizer and regardless of the order of sums (``math/program.py``). The learning rate may change: that is the likely fix
after divergence, so another optimizer gives only a warning. Starting values are compared to 1e-3, and differences give only a
warning too, as k-means on a GPU is not bitwise repeatable.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np

from numpyro_orthgp.math.digest import digest_of_array, to_host
from numpyro_orthgp.math.program import Program, program_of
from numpyro_orthgp.training.batches import Batch
from numpyro_orthgp.training.columns import rows_of
from numpyro_orthgp.training.digest import digest_of_data
from numpyro_orthgp.training.local import Feed, Shards
from numpyro_orthgp.training.start import one_thread
from numpyro_orthgp.training.steps import update_of

__all__ = ["check_same", "fingerprint", "sample_of"]

# If any of these differ, the message names them with both values, and omits differences that follow from them.
PLAIN = ("N", "batch_size", "group_size", "num_groups", "blocks", "seed", "every", "score", "data", "state")
FEW = 16  # rows that processes compare
TOLERANCE = 1e-3  # of starting values: if they are computed from data, not all devices repeat the last bits


def fingerprint(
    svi: Any,
    state: Any,
    batches: Feed,
    kwargs: dict[str, Any],
    *,
    stands_for: int,
    window: int,
    score: str,
    starts: bool,
    values: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What must be equal in two runs, so that one can continue the other.

    Of the optimizer only the shapes of its state must be equal: its rates may change.

    :param state: the state at the start of the run.
    :param kwargs: further keyword arguments of model and guide.
    :param window: steps in a window of early stopping.
    :param score: how a window is scored.
    :param starts: whether ``svi.init`` made the state.
    :param values: digests of the data; by default they are computed here.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = list(zip(batches.names, batches.arrays, batches.dtypes, strict=True))
    size = batches.batch_size
    batch = Batch(
        jax.tree.unflatten(batches.tree, [jax.ShapeDtypeStruct((size, *a.shape[1:]), d) for _, a, d in arrays]),
        None if batches.is_stream else jax.ShapeDtypeStruct((size,), np.int32),  # type: ignore[arg-type]
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    with one_thread():
        program = program_of(update_of(_loss_only(svi), batches.num_rows, stands_for, kwargs), shapes, batch)
    return {
        "N": batches.num_rows,
        "batch_size": size,
        **({} if batches.group_size == 1 else {"group_size": batches.group_size}),
        **({} if batches.num_groups is None else {"num_groups": batches.num_groups}),
        **({} if batches.blocks is None else {"blocks": list(batches.blocks)}),
        "seed": list(batches.seed),
        "every": window,
        "score": score,
        "data": [f"{name}: {dtype}{list(a.shape[1:])}" for name, a, dtype in arrays],
        "state": [f"{jax.tree_util.keystr(path)}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves],
        # For a stream this covers the first batch; `Streamed.mark` covers later ones.
        "values": values or {name: digest_of_data(a, dtype) for name, a, dtype in arrays},
        "operations": program.operations,
        "constants": program.constants,
        "optimizer": _optimizer_of(svi, state),
        "keywords": {name: _in_words(x) for name, x in kwargs.items()},
        "start": _summary(svi.get_params(state)) if starts else None,
        "versions": {name: _version(name) for name in ("jax", "numpyro", "numpyro_orthgp")},
    }


def sample_of(batches: Feed) -> str:
    """What processes must agree on, computed cheaply: row counts, dtypes, the key's words and a digest of a few rows."""
    parts = [f"batch_size={batches.batch_size}, key {batches.seed}"]
    for name, array, dtype in zip(batches.names, batches.arrays, batches.dtypes, strict=True):
        parts.append(f"{name}: {dtype}{list(array.shape[1:])}")
        if not isinstance(batches, Shards):
            rows = np.unique(np.linspace(0, len(array) - 1, FEW).astype(int))
            parts.append(digest_of_array(rows_of(getattr(array, "leaf", array), rows), dtype))
    return ", ".join([*parts, f"blocks {batches.blocks}"])


def check_same(name: str, found: dict[str, Any], wanted: dict[str, Any], anyway: bool = False) -> None:
    """Raise an error if a run would continue from another run's file.

    :param name: name of the file.
    :param found: the file's fingerprint.
    :param anyway: whether other data and another program give only a warning.
    :raises ValueError: if something differs. The message names it.
    """
    differences = [text for key in PLAIN if (text := _difference(key, found.get(key), wanted.get(key)))]
    same_shapes = not differences
    if same_shapes:
        differences = [*_of_data(found, wanted), *_of_program(found, wanted)]
    if differences and not (anyway and same_shapes):
        raise ValueError(
            f"`checkpoint` {name} is of another run: they differ in {', '.join(differences)}. Use another file, or pass "
            "resume=False to begin anew and overwrite this one"
            + ("; resume='anyway' takes its parameters as the start of this run." if same_shapes else ".")
        )
    if differences:
        warnings.warn(
            f"The fit goes on from `checkpoint` {name} of another run: they differ in {', '.join(differences)}.",
            UserWarning,
            stacklevel=5,
        )
    if optimizer := _of_optimizer(found.get("optimizer"), wanted.get("optimizer")):
        warnings.warn(
            f"The optimizer {optimizer} the run in `checkpoint` {name}. The fit goes on with this one.",
            UserWarning,
            stacklevel=5,
        )
    if moved := _moved(found.get("start"), wanted.get("start")):
        warnings.warn(
            f"The starting values of {', '.join(moved)} are not those of the run in `checkpoint` {name}, which goes on from where "
            "it was. For a fit from these values use another file, or resume=False.",
            UserWarning,
            stacklevel=5,
        )


def _difference(key: str, then: Any, now: Any) -> str | None:
    if isinstance(now, list) and isinstance(then, list) and key != "seed":
        only = [sorted(set(map(str, a)) - set(map(str, b))) for a, b in ((then, now), (now, then))]
        then, now = (entries[0] if entries else "nothing" for entries in only)
    return f"{key} ({then} in the file, {now} now)" if then != now else None


def _of_data(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    then, now = found.get("values") or {}, wanted.get("values") or {}
    return [f"the values of {k} ({then.get(k)} in the file, {v} now)" for k, v in now.items() if then.get(k) != v]


def _of_program(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    if found.get("constants") == wanted.get("constants"):
        return []
    then, now = found.get("keywords") or {}, wanted.get("keywords") or {}
    names = [k for k in {**then, **now} if then.get(k) != now.get(k)]
    texts = [f"the keyword {k} ({then.get(k, 'nothing')} in the file, {now.get(k, 'nothing')} now)" for k in names]
    if found.get("operations") != wanted.get("operations"):
        texts.append("what model, guide and objective compute (a kernel, a likelihood, an option)")
    elif not texts:
        texts.append("numbers or arrays that are constants of model, guide or objective (a noise, N, inducing points)")
    then, now = found.get("versions") or {}, wanted.get("versions") or {}
    texts += [
        f"the version of {k} ({then.get(k)} in the file, {v} now), which may trace the same model to another program"
        for k, v in now.items()
        if then.get(k) != v
    ]
    return texts


def _of_optimizer(then: Any, now: Any) -> str | None:
    if not then or not now or list(then) == list(now):
        return None
    return "has other numbers, such as a rate, than in" if then[0] == now[0] else "computes other steps than in"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # not installed
        return "unknown"


def _in_words(x: Any) -> str:
    if hasattr(x, "__array__") and hasattr(x, "shape"):
        array = to_host(x)
        return f"{array.dtype}{list(array.shape)} {digest_of_array(array)[:8]}"
    return repr(x) if isinstance(x, (bool, int, float, complex, str, type(None))) else type(x).__name__


def _summary(params: Any) -> dict[str, list[float]]:
    """Size of each parameter and its projection onto a fixed direction, which nearly every change alters."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    found = {}
    for path, leaf in leaves:
        x = to_host(leaf).astype(np.float64).ravel()
        found[jax.tree_util.keystr(path, simple=True, separator=".")] = [
            float(np.linalg.norm(x)),
            float(x @ np.cos(np.arange(1.0, x.size + 1))),
        ]
    return found


def _moved(then: dict[str, list[float]] | None, now: dict[str, list[float]] | None) -> list[str]:
    if then is None or now is None:
        return []
    near = lambda a, b: abs(a - b) <= TOLERANCE * max(abs(a), abs(b))  # noqa: E731
    return [
        name
        for name, (size, projection) in now.items()
        if name in then and not (near(then[name][0], size) and abs(then[name][1] - projection) <= TOLERANCE * size)
    ]


def _loss_only(svi: Any) -> Any:
    """An SVI whose steps compute the loss but do not change parameters, so that the optimizer's rates do not count.

    An object that is not an ``SVI`` is returned unchanged, with its whole ``update``.
    """
    optim = getattr(svi, "optim", None)
    if not hasattr(optim, "eval_and_update"):
        return svi
    other = copy.copy(svi)
    other.optim = _NoOptimizer(optim)
    return other


def _optimizer_of(svi: Any, state: Any) -> Program | None:
    """The program of the optimizer's step; ``None`` if it cannot be traced by itself, as that of :func:`lazy_rows`."""
    try:
        optim, optim_state = svi.optim, state.optim_state
        shapes = jax.eval_shape(lambda s: (optim.get_params(s), s), optim_state)
        value = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(float))
        return program_of(lambda gradient, s, loss: optim.update(gradient, s, value=loss), *shapes, value)
    except Exception:
        return None


class _NoOptimizer:
    """An optimizer without its step. All else that a subclass of ``SVI`` may use is unchanged."""

    def __init__(self, optim: Any) -> None:
        self._optim = optim

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optim, name)

    def eval_and_update(self, fn: Callable[[Any], Any], state: Any, **_: Any) -> tuple[Any, Any]:
        return fn(self._optim.get_params(state)), state
