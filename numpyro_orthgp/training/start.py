"""The initial state of training, from ``svi.init``. It is computed by one compiled program if the guide allows it.

Two things prevent simple compilation of ``svi.init``. First, checks see no values under ``jit``: ``inspect`` in ``errors.py``
delays the checks until the program has run. Second, NumPyro's guides keep arrays of their first call. The arrays of ``AutoDelta``
are known, and the program returns them too (``KeptArrays``). The ``hyper`` guide of ``AutoSparseGP`` is started first, by a call
of ``svi.init`` that ends there (``AutoSparseGP.prepared``).

If anything raises, ``svi.init`` is called without compilation. The error then points to its cause, and models that cannot be
compiled still start. In compiled programs, NumPyro checks distribution arguments only if they are Python numbers or belong to
priors. Other wrong arguments usually make the first loss infinite or NaN, and ``fit`` reports that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.errors import is_concrete
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
    return _with_kept_arrays if KeptArrays.are_known(guide) else None


def _prepared(svi: Any, init: Callable[..., Any], *given: Any) -> Any:
    with svi.guide.prepared(lambda: init(*given), run_checked):
        return _checked(svi, run_checked(init, *given))


def _with_kept_arrays(svi: Any, init: Callable[..., Any], *given: Any) -> Any:
    kept = KeptArrays(svi.guide)

    def init_and_kept(*given: Any) -> Any:
        return init(*given), kept.taken()

    try:
        state, arrays = run_checked(init_and_kept, *given)
        kept.put(arrays)
        return _checked(svi, state)
    except BaseException:
        kept.forget()
        raise


def _checked(svi: Any, state: Any) -> Any:
    """
    :raises TypeError: if the ``SVI`` has kept tracers of the program.
    """
    if not all(is_concrete(leaf) for leaf in jax.tree.leaves(svi.constrain_fn.args)):
        raise TypeError("Bounds that the model computes would be kept as tracers.")
    return state
