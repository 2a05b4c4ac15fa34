"""The initial state of training, from ``svi.init``. It is computed by one compiled program if the guide allows it.

Three things prevent simple compilation of ``svi.init``. First, checks see no values under ``jit``: ``inspect`` in ``errors.py``
delays the checks until the program has run. Second, NumPyro's guides keep arrays of their first call. The arrays of ``AutoDelta``
are known, and the program returns them too (``KeptArrays``). The ``hyper`` guide of ``AutoSparseGP`` is started first, by a call
of ``svi.init`` that ends there (``AutoSparseGP.prepared``). Third, the ``SVI`` keeps bounds of its parameters.

If anything raises, ``svi.init`` is called without compilation. The error then points to its cause, and models that cannot be
compiled still start. In compiled programs, NumPyro checks distribution arguments only if they are Python numbers or belong to
priors. Other wrong arguments usually make the first loss infinite or NaN, and ``fit`` reports that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.guides.looking import KeptArrays
from numpyro_orthgp.math.kept import run_checked
from numpyro_orthgp.math.turns import in_turn
from numpyro_orthgp.processes import refuse_fork
from numpyro_orthgp.training.batches import as_arguments

__all__ = ["initial_state", "one_thread"]

logger = logging.getLogger(__name__)
_fitting = threading.RLock()


@contextmanager
def one_thread() -> Iterator[None]:
    """A context for one thread at a time, since NumPyro has one stack of handlers for all of them.

    :raises RuntimeError: if another thread is in it.
    """
    refuse_fork()
    if not _fitting.acquire(blocking=False):
        raise RuntimeError(
            "Another thread is fitting a model. NumPyro has one stack of handlers for all threads, so the models would mix. Fit "
            "one after the other, or each in a process of its own, as joblib does by default."
        )
    try:
        yield
    finally:
        _fitting.release()


@in_turn()
def initial_state(
    svi: Any, rng_key: jax.Array, batch: Any, init_params: dict[str, Any] | None, kwargs: dict[str, Any]
) -> Any:
    """``svi.init`` for a batch of data.

    Without ``jit``, each operation is compiled separately, which takes longer than compiling a step. NumPyro's guides keep arrays
    of their first call, so that call must not be under ``jit``. A guide with a method ``prepared`` can be prepared for ``jit``.
    """
    options = {} if init_params is None else {"init_params": init_params}

    def init(rng_key: jax.Array, batch: Any, options: dict[str, Any]) -> Any:
        args, keywords = as_arguments(batch)
        return svi.init(rng_key, *args, **options, **keywords, **kwargs)

    given = (rng_key, batch, options)
    if (compiled := _way_to_compile(getattr(svi, "guide", None))) is not None:
        try:
            return compiled(svi, init, *jax.tree.map(jnp.asarray, given))
        except Exception:  # an error, best reported where it occurs, or something that `jit` cannot do
            logger.debug("svi.init is not compiled as a whole:", exc_info=True)
    return init(*given)


def _way_to_compile(guide: Any) -> Callable[..., Any] | None:
    if hasattr(guide, "prepared"):
        return _prepared
    if KeptArrays.are_known(guide):
        return _with_kept_arrays
    return _with_bounds if KeptArrays.are_put(guide) else None


def _prepared(svi: Any, init: Callable[..., Any], *given: Any) -> Any:
    with svi.guide.prepared(lambda: init(*given), run_checked):
        return _with_bounds(svi, init, *given)


def _with_kept_arrays(svi: Any, init: Callable[..., Any], *given: Any) -> Any:
    kept = KeptArrays(svi.guide)

    def init_and_kept(*given: Any) -> Any:
        return init(*given), kept.taken()

    try:
        state, arrays = _with_bounds(svi, init_and_kept, *given)
        kept.put(arrays)
        return state
    except BaseException:
        kept.forget()
        raise


def _with_bounds(svi: Any, start: Callable[..., Any], *given: Any) -> Any:
    """``start``, which calls ``svi.init``, as one program. The ``SVI`` keeps the transforms of its parameters, and in these the
    bounds that the model computes, such as that of a noise; in a program they are tracers, so it returns them too.
    """

    def start_and_bounds(*given: Any) -> Any:
        return start(*given), _bounds_of(svi)

    try:
        result, bounds = run_checked(start_and_bounds, *given)
    except BaseException:
        svi.constrain_fn = None
        raise
    kept, tree = jax.tree.flatten(svi.constrain_fn.args)
    known = iter(bounds)
    kept = [next(known) if isinstance(leaf, jax.Array) else leaf for leaf in kept]
    svi.constrain_fn = partial(svi.constrain_fn.func, *jax.tree.unflatten(tree, kept))
    return result


def _bounds_of(svi: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(svi.constrain_fn.args) if isinstance(leaf, jax.Array)]
