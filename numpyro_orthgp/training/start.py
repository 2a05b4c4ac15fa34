"""Where training starts: the state that ``svi.init`` makes, by one compiled program where the guide allows it.

Two things stand in the way of compiling ``svi.init``. Checks of values see none under ``jit``: ``inspect`` in ``errors.py``
keeps them until the program has run. And NumPyro's guides keep arrays of their first call. Those of ``AutoDelta`` are known, and
the program returns them too (``KeptArrays``). The ``hyper`` guide of ``AutoSparseGP`` is started first, by a call of ``svi.init``
that ends there (``AutoSparseGP.prepared``).

If anything raises, ``svi.init`` is called as NumPyro means it: whatever is wrong is said where it is, and models that cannot be
compiled start as before. NumPyro's own checks of its distributions' arguments then see Python numbers and priors only. Of other
arguments that are wrong the first loss is not finite as a rule, and ``fit`` says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.guides.looking import KeptArrays
from numpyro_orthgp.training.batches import as_arguments
from numpyro_orthgp.training.kept import run_checked

__all__ = ["initial_state"]

logger = logging.getLogger(__name__)


def initial_state(
    svi: Any, rng_key: jax.Array, batch: Any, init_params: dict[str, Any] | None, kwargs: dict[str, Any]
) -> Any:
    """``svi.init`` for a batch of data.

    Outside of ``jit`` it is compiled operation by operation, which takes longer than to compile a step. NumPyro's guides keep
    arrays of their first call, which must not be under ``jit``; a guide with a method ``prepared`` can be made ready for it.
    """
    options = {} if init_params is None else {"init_params": init_params}

    def init(rng_key: jax.Array, batch: Any, options: dict[str, Any]) -> Any:
        args, keywords = as_arguments(batch)
        return svi.init(rng_key, *args, **options, **keywords, **kwargs)

    given = (rng_key, batch, options)
    if (compiled := _way_to_compile(getattr(svi, "guide", None))) is not None:
        try:
            return compiled(svi, init, *jax.tree.map(jnp.asarray, given))
        except Exception:  # an error, which is said best where it is, or what `jit` cannot do
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
    :raises TypeError: if the ``SVI`` has kept what only the program knows.
    """
    if not all(is_concrete(leaf) for leaf in jax.tree.leaves(svi.constrain_fn.args)):
        raise TypeError("Bounds that the model computes would be kept as tracers.")
    return state
