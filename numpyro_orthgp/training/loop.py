"""The training loop, :func:`fit`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from numpyro_orthgp.errors import check_integer, check_option
from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.checkpoint import Snapshot
from numpyro_orthgp.training.devices import Devices
from numpyro_orthgp.training.fingerprint import fingerprint, sample_of
from numpyro_orthgp.training.lazy_rows import bytes_of_tables, rows_of, sharding_of
from numpyro_orthgp.training.local import Feed, Local, Shards
from numpyro_orthgp.training.orders import Blocks
from numpyro_orthgp.training.plan import Plan
from numpyro_orthgp.training.resolution import warn_of_coarse
from numpyro_orthgp.training.result import FitResult, Fitted, Progress
from numpyro_orthgp.training.run import Keeper, Run
from numpyro_orthgp.training.start import initial_state
from numpyro_orthgp.training.steps import compile_steps, strongly_typed, update_of
from numpyro_orthgp.training.stopping import EarlyStopping, default_window
from numpyro_orthgp.training.streamed import Streamed
from numpyro_orthgp.training.streams import Source

__all__ = ["check_types", "fit", "seed_of", "start_of"]


def fit(
    svi: Any,
    rng_key: jax.Array,
    data: tuple[Any, ...] | dict[str, Any] | Source | Local,
    *,
    batch_size: int | None = None,
    group_size: int | None = None,
    shuffle: Blocks | None = None,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    stands_for: int | None = None,
    init_params: dict[str, Any] | None = None,
    init_state: Any = None,
    steps_per_call: int | None = None,
    progress_bar: bool = True,
    early_stopping: EarlyStopping | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 1000,
    resume: bool | Literal["anyway"] = True,
    mesh: Mesh | None = None,
    callback: Callable[[Progress], Any] | None = None,
    **kwargs: Any,
) -> FitResult:
    r"""Train any NumPyro ``SVI`` on shuffled minibatches of data in host memory.

    ::

        optim = optax.adam(optax.cosine_decay_schedule(1e-2, 5000))
        svi = SVI(model, guide, optim, TraceMeanField_ELBO())
        steps = {"batch_size": 1024, "num_steps": 5000}
        result = ogp.fit(svi, random.PRNGKey(0), (X, y), **steps, N=len(X), Z=Z)
        f = ogp.posterior(model, guide, result.params, X[:1], N=len(X), Z=Z)["f"]

    Each step is one ``svi.update(state, *batch, **kwargs)``. The model says itself how many points a batch stands for, in
    ``numpyro.plate("data", N, subsample_size=len(X))``; a model that forgets gets a warning, and so does one whose N is not the
    number of rows (see ``stands_for``). Plates of that kind pick the rows of the batch, so latent variables of single rows
    (``latent_inputs``) are those of the batch too. Rates that change are optax's schedules.

    **What a step sees.** Every epoch is all N rows once, in an order of its own; batches follow each other without regard to the
    ends of epochs, so none is smaller. Without ``batch_size`` every step sees all the data, in the order that they have, and the
    fit takes the same steps as ``SVI.run``.

    **What is guaranteed.** With ``checkpoint="run.npz"`` the same call, repeated after a crash, a kill or Ctrl-C, goes on from the
    last checkpoint and ends with the same bits as a run without interruption; after it has ended it returns its result at
    once, and more steps may be asked for. A file is replaced as a whole or not at all, and it is refused by another problem: it
    holds digests of the data (all of them; of a memory map of more than 256 MiB 1024 rows, its size and its time) and of the
    program of the loss (model, guide, objective, and every number and array that is a constant of them), not of the optimizer's
    rates, which may change. Nothing but the data, ``rng_key``, ``batch_size`` and the start has a say in parameters and losses: not
    where calls to the device end, nor the progress bar, nor callbacks. Another ``steps_per_call`` is another program: on a CPU the
    last bits are the same too. NumPyro's ``Trace_ELBO`` adds up sites in the order of a set of names, so that between processes the
    last bits of losses may depend on ``PYTHONHASHSEED``.

    **If a loss is not finite** the fit stops with a RuntimeWarning and returns the last state whose loss was finite. **Ctrl-C** (a
    ``KeyboardInterrupt``, which ``callback`` may raise too) returns the best state so far and leaves a checkpoint of the last.

    **Several devices.** With ``mesh``, each batch is divided among all its devices, along all its axes, and every device has a
    copy of the state; losses are the same up to rounding. After ``jax.distributed.initialize()`` these may be devices of
    several processes: each calls ``fit`` with the same arguments and reads its share of the rows only, or has rows of its own
    (:class:`~numpyro_orthgp.training.Local`). The first one writes checkpoints, and what it finds in its file is sent to the
    others. Results are ordinary arrays in every process. Ctrl-C in one process, and what its reader, metric or callback raises,
    ends all of them after the call to the device.

    >>> import jax.numpy as jnp, numpyro, optax
    >>> from jax.random import PRNGKey
    >>> from numpyro.infer import SVI, TraceMeanField_ELBO
    >>> import numpyro_orthgp as ogp
    >>> X = jnp.linspace(0.0, 1.0, 500)[:, None]
    >>> def model(X, y):
    ...     f = ogp.gp("f", ogp.kernels.RBF(0.3), jnp.linspace(0.0, 1.0, 8)[:, None])
    ...     with numpyro.plate("data", 500, subsample_size=len(X)):
    ...         numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.1), obs=y)
    >>> svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.05), TraceMeanField_ELBO())
    >>> data, steps = (X, jnp.sin(6 * X[:, 0])), {"batch_size": 100, "num_epochs": 4}
    >>> result = ogp.fit(svi, PRNGKey(0), data, **steps, progress_bar=False)
    >>> result.status, result.num_steps, result.losses.shape
    ('finished', 20, (20,))

    :param svi: a NumPyro ``SVI``, or anything with its ``init``, ``update`` and ``get_params``.
    :param rng_key: a key, for ``svi.init`` and for the order of rows.
    :param data: a tuple of arrays, positional arguments of model and guide, or a dict of them, keyword arguments. Arrays (NumPy,
        ``np.memmap``, JAX; nested tuples and dicts of them too) have a first axis of length N, and are cast as JAX would. Datasets
        of h5py, arrays of zarr and :func:`~numpyro_orthgp.training.columns` of parquet and arrow tables are read where rows are
        needed, in block shuffles. Or what gives the batches itself: a :class:`~numpyro_orthgp.training.Stream` of a loader, or
        any :class:`~numpyro_orthgp.training.Source`. Or :class:`~numpyro_orthgp.training.Local` rows of each process.
    :param batch_size: rows of a step; by default all N, or those of the source's batches.
    :param group_size: rows that follow each other in the data and come together in batches: whole groups in random order, for a
        guide with ``group_size``. It divides ``batch_size``. Of N rows that are no whole number of groups as many as there are
        too many are left out of each epoch, each row as often as any other.
    :param shuffle: :class:`~numpyro_orthgp.training.Blocks` for rows in blocks that are read as one piece, as data on disk need it;
        by default for lazy arrays, while rows of NumPy's, ``np.memmap`` among them, come each from its own place.
    :param num_epochs: how often to go through the data: ceil(num_epochs N / batch_size) steps.
    :param num_steps: number of steps; exactly one of the two is given.
    :param stands_for: number of observations that the N rows stand for, if it is not N: the size of the model's plate, then. A
        plate that takes the rows of a batch for another number of them is warned of.
    :param init_params: values of parameters to start from, as for ``SVI.init``; names that no parameter has are warned of.
    :param init_state: an ``SVIState`` to start from; a checkpoint comes before it.
    :param steps_per_call: the most steps that the device takes before Python looks after checkpoints, the bar and Ctrl-C. By
        default about half a second's, at most 1000, and at most 16 MB of batches.
    :param progress_bar: show one, with minus the mean loss of the last call as ELBO; on the first process only.
    :param early_stopping: when to give up; see :class:`~numpyro_orthgp.EarlyStopping`.
    :param checkpoint: a file to go on from and to write to: every ``checkpoint_every`` steps and whenever the fit ends.
    :param checkpoint_every: steps between checkpoints.
    :param resume: False begins anew, and overwrites the file. "anyway" goes on from a file of another problem, if all shapes are
        the same: other data, a model that was changed, or a newer JAX.
    :param mesh: devices to divide batches among; their number must divide ``batch_size``.
    :param callback: called with a :class:`~numpyro_orthgp.training.Progress` after each call to the device.
    :param kwargs: further keyword arguments of model and guide, as they are: constants of a step.
        For a model whose argument has a name of those above use ``functools.partial``.
    :return: parameters, state, losses, how it ended, and after how many steps.
    :raises TypeError: if ``svi``, ``data`` or ``mesh`` are not what they should be.
    :raises ValueError: if not exactly one of ``num_epochs`` and ``num_steps`` is given; for sizes that do not fit each other; for
        numbers that do not fit into the dtype that JAX casts them to; for a checkpoint that is damaged, a folder, cannot be
        written, or is of another run: other data, program, ``batch_size``, key, parameters or windows.
    :raises FloatingPointError: if the very first loss is not finite.
    """
    check_types(svi, early_stopping, callback, init_params, init_state, resume)
    data = data.data if isinstance(data, Local) and len(data.lengths) == 1 else data
    devices = Devices(mesh, isinstance(data, Local))
    batches = _batches(data, batch_size, seed_of(rng_key), group_size, shuffle, checkpoint is not None, devices)
    _warn_of_groups(svi, batches)
    warn_of_coarse(batches.names, batches.arrays, batches.dtypes)
    stands_for = batches.num_rows if stands_for is None else check_integer("stands_for", stands_for)
    num_steps = _num_steps(num_epochs, num_steps, batches)
    _agree(batches, devices)
    window = (early_stopping and early_stopping.every) or default_window(batches.num_rows, batches.batch_size)
    with rows_of(svi, stands_for, batches.batch_size):
        state = start_of(svi, rng_key, batches, init_params, init_state, kwargs)
    devices.of_state = devices.replicated if devices.is_distributed else sharding_of(svi, state, devices.replicated)
    keeper = None
    if checkpoint is not None:
        rules: dict[str, Any] = {"stands_for": stands_for, "window": window, "starts": init_state is None}
        rules["values"] = batches.values() if isinstance(batches, Shards) else None
        rules["score"] = "loss" if early_stopping is None or early_stopping.metric is None else "metric"
        mark = devices.of_first(partial(fingerprint, svi, state, batches, kwargs, **rules))
        keeper = Keeper(Path(checkpoint), check_integer("checkpoint_every", checkpoint_every), mark, devices, batches)
    now, before = (keeper and keeper.begin(state, resume)) or (Snapshot(0, devices.put_state(state)), np.zeros(0))
    periods = [window] if keeper is None else [window, keeper.every]
    losses = np.zeros(max(num_steps, now.step), jax.dtypes.canonicalize_dtype(float))
    losses[: now.step] = before
    update = update_of(svi, batches.num_rows, stands_for, kwargs, devices.replicated)
    plan = _plan(num_steps, periods, steps_per_call, batches, devices, bytes_of_tables(svi, state))
    run = Run(
        svi=svi,
        steps=compile_steps(svi, update, plan.capacity, batches.is_full, devices),
        batches=batches,
        full=batches.everything(devices.put_rows) if batches.is_full and now.step < num_steps else None,
        plan=plan,
        devices=devices,
        early_stopping=early_stopping,
        window=window,
        keeper=keeper,
        callback=callback,
        show=progress_bar and jax.process_index() == 0,
        now=now,
        losses=losses,
        num_losses=now.step,
    )
    kept = data if isinstance(batches, Batches) else batches.kept()
    with devices.interrupts_wait():
        return run.fit().of(Fitted(svi, kept, batches.batch_size, batches.num_rows, kwargs, batches.is_part))


def _batches(
    data: Any,
    batch_size: int | None,
    seed: tuple[int, ...],
    group_size: int | None,
    shuffle: Blocks | None,
    has_checkpoint: bool,
    devices: Devices,
) -> Feed:
    """What gives the rows of a step.

    :raises TypeError: for a loader that is not wrapped.
    :raises ValueError: for options that a source's batches do not have, and a checkpoint of what cannot go on.
    """
    is_local = isinstance(data, Local)
    if isinstance(data, (tuple, dict)) or not (is_local or isinstance(data, Source)):
        return Batches(data, batch_size, seed, group_size, shuffle)
    for name, given in (("group_size", group_size), ("shuffle", None if is_local else shuffle)):
        if given is not None:
            raise ValueError(
                f"`{name}` is of arrays of one process, whose rows `fit` puts in order; the batches of a source are in its own."
            )
    if has_checkpoint and not getattr(data.data if is_local else data, "is_resumable", True):
        raise ValueError(
            "`checkpoint` needs batches that come again when the run goes on, and an iterator gives them once. Pass the loader "
            "that it is of, or a function that makes it: Stream(lambda: make_iterator(), num_rows=N)."
        )
    return Shards(data, batch_size, seed, shuffle, devices) if is_local else Streamed(data, batch_size, seed)


def _agree(batches: Feed, devices: Devices) -> None:
    """Refuse what devices cannot share and processes do not agree on, before they put anything together."""
    devices.check_shares(batches.batch_size, batches.is_full)
    devices.check_equal(partial(sample_of, batches), batches.num_rows, isinstance(batches, Shards))
    if isinstance(batches, Shards):
        batches.begin()


def seed_of(rng_key: Any) -> tuple[int, ...]:
    """The words of a PRNG key.

    :raises TypeError: if it is none.
    """
    try:
        return tuple(int(word) for word in np.asarray(jax.random.key_data(rng_key)).ravel())
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(f"`rng_key` must be a key, such as jax.random.PRNGKey(0); got {rng_key!r}.") from error


def check_types(svi: Any, early_stopping: Any, callback: Any, init_params: Any, init_state: Any, resume: Any) -> None:
    for method in ("init", "update", "get_params"):
        if not callable(getattr(svi, method, None)):
            raise TypeError(f"`svi` must be a numpyro.infer.SVI; got {type(svi).__name__}, which has no `{method}`.")
    if not (early_stopping is None or isinstance(early_stopping, EarlyStopping)):
        raise TypeError(f"`early_stopping` must be an EarlyStopping; got {type(early_stopping).__name__}.")
    if not (callback is None or callable(callback)):
        raise TypeError(f"`callback` must be a function of a Progress; got {type(callback).__name__}.")
    if isinstance(resume, str):
        check_option("resume", resume, ("anyway",))
    for name, value, part in (("init_params", init_params, "params"), ("init_state", init_state, "state")):
        if isinstance(value, FitResult):
            raise TypeError(f"`{name}` must be a part of a FitResult, result.{part}; got all of it.")


def _warn_of_groups(svi: Any, batches: Feed) -> None:
    wanted = getattr(getattr(svi, "guide", None), "group_size", None)
    sizes = [size for size in (wanted.values() if isinstance(wanted, dict) else [wanted]) if isinstance(size, int)]
    if sizes and not batches.is_full and any(batches.group_size % size for size in sizes):
        size = min(sizes)
        warnings.warn(
            f"The guide tightens the residual in groups of {size} consecutive rows, but batches hold groups of "
            f"{batches.group_size} rows: rows that are not near each other gain nothing. Sort the data by "
            f"init.groups(X, {size}) and say fit(..., group_size={size}).",
            UserWarning,
            stacklevel=3,
        )


def _num_steps(num_epochs: int | None, num_steps: int | None, batches: Feed) -> int:
    if (num_epochs is None) == (num_steps is None):
        got = "neither" if num_steps is None else "both"
        raise ValueError(f"Exactly one of `num_epochs` and `num_steps` must be given; got {got}.")
    if num_steps is not None:
        return check_integer("num_steps", num_steps)
    return -(-check_integer("num_epochs", num_epochs) * batches.num_rows // batches.batch_size)


def start_of(
    svi: Any,
    rng_key: Any,
    batches: Feed,
    init_params: dict[str, Any] | None,
    state: Any,
    kwargs: dict[str, Any],
) -> Any:
    """The state to start from. Guides look at the model while they are initialised, even if the state is given."""
    if state is None or getattr(svi, "constrain_fn", None) is None:
        made = initial_state(svi, rng_key, batches.first(), init_params, kwargs)
        state = made if state is None else state
        if init_params:
            _warn_of_unknown(init_params, svi.get_params(made))
    return strongly_typed(state)


def _warn_of_unknown(init_params: dict[str, Any], params: dict[str, Any]) -> None:
    unknown = [name for name in init_params if name not in params]
    if unknown:
        warnings.warn(
            f"`init_params` has {', '.join(map(repr, unknown))}, of which model and guide have no parameter, so nothing starts "
            f"there. They have {', '.join(map(repr, sorted(params)))}.",
            UserWarning,
            stacklevel=4,
        )


def _plan(
    num_steps: int,
    periods: list[int],
    steps_per_call: int | None,
    batches: Feed,
    devices: Devices,
    size_of_tables: int,
) -> Plan:
    if steps_per_call is not None:
        check_integer("steps_per_call", steps_per_call)
    size = 0 if batches.is_full else batches.bytes_per_step
    return Plan(num_steps, periods, steps_per_call, size, not devices.is_distributed, size_of_tables)
