"""Checks of what users hand in. Each says what was expected, what came, and the likely fix.

Shapes and dtypes are checked always, while the model is traced, that is, before anything is compiled. Values can only be
looked at when they are concrete arrays: now, or, of a program of :func:`with_checks`, when it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from numpyro_orthgp.foreign import as_jax, without_mask

__all__ = [
    "Unobserved", "check_columns", "check_finite", "check_floating", "check_inputs", "check_integer", "check_is_key", "check_key",
    "check_option", "check_params", "check_same_dtype", "inspect", "is_concrete", "no_function", "refuse_rounded", "with_checks",
]  # fmt: skip

_Result = TypeVar("_Result")
_Check = Callable[..., None]

# In a program of `with_checks`: its trace, and the checks that wait for its values.
_waiting: ContextVar[tuple[Any, list[tuple[_Check, tuple[Any, ...]]]] | None] = ContextVar("waiting", default=None)


class Unobserved(ValueError):
    """The model of a fit draws a site that should be observed."""


def is_concrete(x: Any) -> bool:
    """Whether the values of ``x`` can be looked at now (false for a traced array)."""
    return not isinstance(x, jax.core.Tracer)


def inspect(check: _Check, *values: Any) -> None:
    """Call ``check(*values)``, which raises if they are not what they should be, as soon as they can be looked at.

    That is now where they are concrete, and at the end of a program of :func:`with_checks`. Under any other ``jit`` it is never.

    :param values: arrays, or pytrees of them.
    """
    waiting = _waiting.get()
    if all(is_concrete(leaf) for leaf in jax.tree.leaves(values)):
        check(*values)
    elif waiting is not None and waiting[0] == get_opaque_trace_state():  # not in a loop or a vmap of the program
        waiting[1].append((check, values))


@jax.tree_util.register_pytree_node_class
class Waiting:
    """Checks of a program's values, to be made when it has run; a pytree of these values."""

    def __init__(self, checks: tuple[_Check, ...], values: tuple[tuple[Any, ...], ...]) -> None:
        self.checks, self.values = checks, values

    def inspect(self) -> None:
        """Make them, or where this is within another such program, let them wait for its end."""
        for check, values in zip(self.checks, self.values, strict=True):
            inspect(check, *values)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[_Check, ...]]:
        return (self.values,), self.checks

    @classmethod
    def tree_unflatten(cls, checks: tuple[_Check, ...], children: tuple[Any, ...]) -> Waiting:
        return cls(checks, *children)


def with_checks(function: Callable[..., _Result]) -> Callable[..., tuple[_Result, Waiting]]:
    """``function`` for ``jit``: what it returns, and the checks that it could not make while it was traced."""

    @wraps(function)
    def program(*args: Any, **kwargs: Any) -> tuple[_Result, Waiting]:
        waiting: list[tuple[_Check, tuple[Any, ...]]] = []
        token = _waiting.set((get_opaque_trace_state(), waiting))
        try:
            result = function(*args, **kwargs)
        finally:
            _waiting.reset(token)
        return result, Waiting(tuple(check for check, _ in waiting), tuple(values for _, values in waiting))

    return program


def no_function(value: Any) -> str:
    """What came where a function was expected, for a message: a class is likely to be one that was not called."""
    if isinstance(value, type):
        return f"the class {value.__name__}. Did you mean `{value.__name__}(...)`, an instance?"
    return f"an object of type {type(value).__name__}."


def check_option(name: str, value: str, known: Collection[str]) -> str:
    """Return ``value`` if it is one of the ``known`` names of the option ``name``.

    :raises ValueError: otherwise, naming the known ones.
    """
    if value not in known:
        listed = ", ".join(repr(k) for k in known)
        raise ValueError(f"Unknown `{name}` {value!r}; known are {listed}.")
    return value


def check_integer(name: str, value: Any, least: int | None = 1) -> int:
    """Return ``value`` as an integer of at least ``least``, by default a positive one.

    :raises ValueError: if it is none.
    """
    number = value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else None
    if number is None or (least is not None and number < least):
        wanted = {None: "an integer", 1: "a positive integer"}.get(least, f"an integer of at least {least}")
        raise ValueError(f"`{name}` must be {wanted}; got {value!r}.")
    return number


def check_params(of: str, sites: dict[str, Any], params: Mapping[str, Any], hint: str = "") -> None:
    """Refuse parameters that would stay at their starting values unnoticed.

    :param of: whose sites these are, "model" or "guide".
    :param hint: a further likely reason.
    :raises ValueError: naming those that ``params`` lacks.
    """
    missing = [name for name, site in sites.items() if site["type"] == "param" and name not in params]
    if missing:
        raise ValueError(
            f"`params` must hold all parameters of the {of}; it lacks {', '.join(repr(n) for n in missing)}. Pass those of the "
            f"fit: svi_result.params, or svi.get_params(state). {hint}".rstrip()
        )


def check_floating(name: str, x: Any) -> jax.Array:
    """Return ``x`` as an array of floating-point numbers. This is the rule of the package for all that is to be real numbers:

    * Floating arrays keep their dtype; NumPy's float64 becomes float32 while 64-bit mode is off, as JAX does everywhere.
    * Integers and truth values become JAX's default floating dtype, where each is a number of that dtype: up to 2^24 in
      float32, 2^53 in float64. Under ``jit`` they are not looked at.
    * Everything else is refused: text, categories, complex numbers, half precision, masked arrays with entries missing, and
      integers that rounding would change.

    :raises TypeError: for what is no real number.
    :raises ValueError: for integers that the floating dtype does not hold.
    """
    given, x = x, without_mask(name, x, "Fill them in, array.filled(...), or leave these rows out.")
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu":
        inspect(partial(refuse_rounded, name), x)  # before JAX would wrap them around
    elif isinstance(x, np.ndarray) and x.dtype.kind == "f" and (x.dtype.itemsize > 8 or not x.dtype.isnative):
        x = x.astype(np.float64 if x.dtype.itemsize > 8 else x.dtype.newbyteorder("="))  # JAX has no others
    try:
        x = as_jax(x)
    except OverflowError:  # of Python's integers
        refuse_rounded(name, x)
        raise
    except (TypeError, ValueError) as error:
        if hasattr(x, "places"):
            raise TypeError(
                f"`{name}` must be an array of inputs here; got {type(x).__name__}, a linear functional. Only a "
                "single function takes functionals: f(...), f.joint(...), paths(...). The derivative or average "
                "of a deep GP, of patches or under uncertain inputs is not known. Draw values of f, and compute "
                "with these."
            ) from error
        raise TypeError(
            f"`{name}` must be an array of floating-point numbers; got {_described(given)}. {_to_numbers(name, x)}"
        ) from error
    if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool:
        inspect(partial(refuse_rounded, name), x)
        return x.astype(jnp.result_type(float))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`{name}` must hold real numbers; got {x.dtype}. Pass real and imaginary parts as columns.")
    if x.dtype.itemsize < 4:
        raise TypeError(
            f"`{name}` is {x.dtype}, of {jnp.finfo(x.dtype).precision} digits, too few for the factors of covariances. Convert it: "
            f"jnp.asarray({name}, jnp.float32)."
        )
    return x


def refuse_rounded(name: str, x: Any) -> None:
    dtype = jnp.result_type(float)
    values = np.asarray(x)
    most = 2 ** (jnp.finfo(dtype).nmant + 1)
    bad = (values > most) | (values < -most) if values.dtype.kind in "iu" else np.zeros(0, bool)
    if bad.any():
        raise ValueError(
            f"`{name}` is {values.dtype} and holds {values[bad][0]}, which {dtype} would round: it holds whole "
            f"numbers exactly up to {most}. Subtract an offset while they are integers, {name} - {name}.min(), or "
            "use 64 bits (numpyro.enable_x64())."
        )


def _to_numbers(name: str, x: Any) -> str:
    """What makes numbers of what JAX has no arrays for."""
    if hasattr(x, "toarray"):
        return f"A sparse matrix is not one: pass {name}.toarray()."
    if getattr(getattr(x, "dtype", None), "kind", "") in ("m", "M"):
        return f"Times need a start and a unit: ({name} - {name}.min()) / np.timedelta64(1, 'D') has days."
    return (
        "Text and categories need numbers: for each a column of zeros and ones (one-hot), or one column of their indices, for "
        "kernels.Coregion(W, kappa).on(column)."
    )


def _described(x: Any) -> str:
    dtypes = x.dtypes if hasattr(x, "columns") and hasattr(x, "dtypes") else [getattr(x, "dtype", "")]
    kinds = sorted({str(dtype) for dtype in dtypes})
    return f"{type(x).__name__} of {', '.join(kinds)}" if any(kinds) else type(x).__name__


def check_same_dtype(name: str, X: Any, dtype: Any) -> Any:
    """Return inputs ``X`` if they have the dtype of the inducing variables.

    :raises TypeError: if not.
    """
    if X.dtype != dtype:
        raise TypeError(
            f"`{name}` is {X.dtype} but the inducing variables are {dtype}, and nothing is cast silently. "
            f"Convert one: jnp.asarray({name}, Z.dtype)."
        )
    return X


def check_finite(name: str, x: jax.Array) -> jax.Array:
    """Return ``x``, refusing NaN and infinity in a concrete array.

    :raises ValueError: with the number of bad entries and where the first one is.
    """
    inspect(partial(_refuse_infinite, name), x)
    return x


def _refuse_infinite(name: str, x: jax.Array) -> None:
    bad = ~np.isfinite(np.asarray(x))
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"`{name}` must be finite; got {int(bad.sum())} NaN or infinite of {bad.size} entries, "
            f"the first at {first}. Remove or impute those rows (missing outputs can be masked, inputs cannot)."
        )


def check_inputs(name: str, X: Any, dim: int | None = None, *, latents: bool = False) -> jax.Array:
    """Return inputs as a floating array of shape (n, D), finite, not empty, with ``D = dim`` if ``dim`` is given.

    What becomes floating is said at :func:`check_floating`.

    :param latents: allow shape (P, n, D) too, points of their own for each latent function.
    :raises TypeError: if they are no real numbers.
    :raises ValueError: if the shape or a value is wrong.
    """
    X = check_floating(name, X)
    if X.ndim != 2 and not (latents and X.ndim == 3):
        hint = " Points of their own for each latent function have shape (P, n, D)." if latents else ""
        hint = f" For one input dimension use {name}[:, None]." if X.ndim == 1 else hint
        raise ValueError(f"`{name}` must have shape (n, D); got {X.shape}.{hint}")
    if 0 in X.shape:
        raise ValueError(f"`{name}` must hold at least one point of at least one dimension; got shape {X.shape}.")
    if dim is not None and X.shape[-1] != dim:
        hint = f" Did you pass {name}.T?" if X.shape[0] == dim and X.ndim == 2 else ""
        raise ValueError(f"`{name}` must have shape (n, D) with D = {dim}; got {X.shape}.{hint}")
    inspect(partial(_refuse_overflow, name), X)
    return check_finite(name, X)


def _refuse_overflow(name: str, X: jax.Array) -> None:
    if X.dtype != jnp.float64:  # units that reach so far there are in use, and kernels divide by lengthscales first
        return
    values, most = np.asarray(X), np.sqrt(np.finfo(float).max)
    largest = max(values.max(), -values.min())
    if most < largest < np.inf:
        value = values.flat[abs(values).argmax()]
        raise ValueError(
            f"`{name}` holds {value:.3g}, whose square is no number in {X.dtype}: distances and products are infinite. "
            "Does it stand for a missing value? Then impute it, or remove the row. Else divide the column by its scale."
        )


def check_key(key: jax.Array | None, what: str) -> jax.Array:
    """The random key of a draw.

    :param what: what is drawn, in the plural.
    :raises ValueError: if there is none.
    """
    if key is None:
        raise ValueError(
            f"{what} belong in a model or a guide, which inference calls; here there is no random key. To run a model by itself "
            "wrap it, numpyro.handlers.seed(model, 0); fitted functions come from posterior(model, guide, params, ...); a "
            "distribution by itself draws with a key, .sample(jax.random.PRNGKey(0))."
        )
    return check_is_key(key)


def check_is_key(key: Any) -> jax.Array:
    """Return ``key`` if it is one random key, of ``jax.random.key`` or ``jax.random.PRNGKey``.

    :raises TypeError: otherwise.
    """
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (shape == () if typed else dtype == np.uint32 and len(shape) == 1):
        came = f"an array of shape {shape} and dtype {dtype}" if dtype is not None else repr(key)
        raise TypeError(
            f"A random key is expected first, jax.random.PRNGKey(0); got {came}. A number or shape of draws comes after it: "
            "f(X).sample(rng_key, (3,)), f.sample_paths(rng_key, 3). In a seeded model a key is numpyro.prng_key(). Many keys are "
            "for jax.vmap."
        )
    return key


def check_columns(key: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The columns that a key picks from marginals of ``shape``: an integer array, shape () for a single one.

    :raises TypeError: for a key that does not pick columns.
    :raises IndexError: if there is no such column.
    :raises ValueError: if none is picked, or one twice.
    """
    every_row = isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], (slice, type(...)))
    if len(shape) != 2 or not every_row or key[0] not in (..., slice(None)):
        long = " For one output in each row (task[i] in row i, long format): f(Tasks(X, task)), or f(Tasks(X, task, W)) with @ W."
        if shared := isinstance(key, tuple) and any(k is None for k in key):
            long = " For P outputs that share one function: stack([f(X)]) @ jnp.ones((1, P)), plus offsets (P,)."
        raise TypeError(
            f"f(X)[..., p] picks outputs of an f(X) of shape (B, P) and nothing else; got the key {_shown(key)} for shape {shape}. "
            f"For other inputs index X: f(X[rows]).{long if shared or (len(shape) == 2 and isinstance(key, tuple)) else ''}"
        )
    P, p = shape[1], key[1]
    if not is_concrete(p):
        raise TypeError(
            "In f(X)[..., p] p must be known while the model is traced; got an array that JAX computes, such as rows of a plate "
            "that subsamples. One output for each row: f(X).pick(p), for p of shape (B,). A subset of outputs: f(X) @ W, W one-hot."
        )
    columns = np.arange(P)[p] if isinstance(p, slice) else np.asarray(p)
    if columns.ndim > 1 or not np.issubdtype(columns.dtype, np.integer):
        raise TypeError(f"In f(X)[..., p] p must be an integer, a slice or a list of integers; got {p!r}.")
    if ((columns < -P) | (columns >= P)).any():
        raise IndexError(f"In f(X)[..., p] p must lie in 0..{P - 1} for f(X) of shape {shape}; got {p}.")
    if not 0 < columns.size == len(np.unique(columns % P)):
        raise ValueError(f"In f(X)[..., p] p must pick at least one output, and none twice; got {p}.")
    return columns % P


def _shown(key: Any) -> str:
    """A key for a message: arrays by their shape."""
    if isinstance(key, tuple):
        return f"({', '.join(map(_shown, key))})"
    return f"array of shape {np.shape(key)}" if np.ndim(key) else str(key)
