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
from numpyro_orthgp.math.resolution import warn_of_coarse
from numpyro_orthgp.training.arrays import NOT_TRACED
from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.checkpoint import Snapshot, place
from numpyro_orthgp.training.devices import Devices
from numpyro_orthgp.training.fingerprint import fingerprint, sample_of
from numpyro_orthgp.training.groups import check_groups
from numpyro_orthgp.training.layout import Layout
from numpyro_orthgp.training.lazy_rows import bytes_of_tables, rows_of
from numpyro_orthgp.training.local import Feed, Local, Shards
from numpyro_orthgp.training.orders import Blocks
from numpyro_orthgp.training.plan import Plan
from numpyro_orthgp.training.result import FitResult, Fitted, Progress
from numpyro_orthgp.training.run import Keeper, Run
from numpyro_orthgp.training.start import initial_state, one_thread
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
    num_groups: int | None = None,
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
    layout: Layout | None = None,
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

    Each step is one ``svi.update(state, *batch, **kwargs)``. The model itself says how many points a batch stands for, with
    ``numpyro.plate("data", N, subsample_size=len(X))``. If it does not, or if its N is not the number of rows (see ``stands_for``),
    there is a warning. Such plates pick the rows of the batch, so latent variables of single rows (``latent_inputs``) belong to
    the batch too. For learning rates that change, use optax's schedules.

    **What a step sees.** Every epoch has all N rows once, in its own random order. Batches cross the ends of epochs, so all have
    the same size. Without ``batch_size`` every step sees all data, in their own order, and the fit takes the same steps as
    ``SVI.run``.

    **What is guaranteed.** With ``checkpoint="run.npz"``, repeat the same call after an error, a kill or Ctrl-C: it continues from
    the last checkpoint and ends with the same bits as a run without interruption. After the run has ended, the call returns its
    result at once, and you may ask for more steps. A file is replaced atomically, and refused for another problem. It contains
    digests of the data (all rows; for more than 256 MiB on disk, 1024 rows, and sizes and times of files) and of the program of
    the loss: model, guide, objective, and all their constant numbers and arrays. The optimizer may change, with a warning.
    Parameters and losses depend only on the data, ``rng_key``, ``batch_size`` and the start: not on where calls to the
    device end, the progress bar or callbacks. Another ``steps_per_call`` is another program, with the same last bits on a CPU.
    NumPyro's ``Trace_ELBO`` adds up sites in the order of a set of names, so the last bits of losses may depend on
    ``PYTHONHASHSEED`` between processes.

    **If a loss is not finite**, the fit stops with a RuntimeWarning and returns the last state with a finite loss. **Ctrl-C** (a
    ``KeyboardInterrupt``, which ``callback`` may also raise) returns the best state so far and leaves a checkpoint of the last.

    **Several devices.** With ``mesh``, each batch is divided among all devices of the mesh, along all its axes, and every device
    has a copy of the state, unless ``layout`` divides parameters along some of the axes. Losses are the same up to rounding. After
    ``jax.distributed.initialize()`` the devices may belong to several processes. Each process calls ``fit`` with the same arguments
    and reads only its share of the rows, or has its own rows (:class:`~numpyro_orthgp.training.Local`). The first process writes
    checkpoints, and sends the content of its file to the others. Results are ordinary arrays in every process. Ctrl-C in one
    process, or an error in its reader, metric or callback, ends all processes after the call to the device.

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

    :param svi: a NumPyro ``SVI``, or any object with its ``init``, ``update`` and ``get_params``.
    :param rng_key: a key for ``svi.init`` and for the order of rows.
    :param data: a tuple of arrays (positional arguments of model and guide) or a dict of arrays (keyword arguments). Arrays (NumPy,
        ``np.memmap``, JAX; also nested tuples and dicts of them) have a first axis of length N, and are cast as JAX would. Datasets
        of h5py, arrays of zarr and :func:`~numpyro_orthgp.training.columns` of parquet and arrow tables are read where rows are
        needed, in block shuffles. For batches from a loader, use a :class:`~numpyro_orthgp.training.Stream` or any other
        :class:`~numpyro_orthgp.training.Source`. If each process has its own rows, use :class:`~numpyro_orthgp.training.Local`.
    :param batch_size: rows of a step; by default all N, or those of the source's batches.
    :param group_size: number of consecutive rows that stay together: batches contain whole groups in random order, for a guide
        with ``group_size``. It must divide ``batch_size``, and the size of blocks. If N is not a multiple of it, each epoch leaves
        out as many rows as exceed a multiple, each row equally often.
    :param num_groups: number of groups that each batch ends with, for a guide with ``num_groups``; the rows before them are single
        ones from anywhere, in a random order of their own. For arrays in memory.
    :param shuffle: :class:`~numpyro_orthgp.training.Blocks` to read rows in blocks, each in one piece, as is best for data on disk.
        This is the default for lazy arrays. NumPy arrays, including ``np.memmap``, are by default read row by row.
    :param num_epochs: number of passes through the data: ceil(num_epochs N / batch_size) steps.
    :param num_steps: number of steps; give either this or ``num_epochs``.
    :param stands_for: number of observations that the N rows stand for, if it is not N. The model's plate must have this size;
        otherwise there is a warning.
    :param init_params: initial values of parameters, as for ``SVI.init``. For names that no parameter has there is a warning.
    :param init_state: an ``SVIState`` to start from; a checkpoint takes precedence.
    :param steps_per_call: largest number of steps on the device before Python handles checkpoints, the progress bar and Ctrl-C. By
        default about half a second's steps, at most 1000, and at most 16 MB of batches.
    :param progress_bar: show a progress bar, with minus the mean loss of the last call as ELBO; on the first process only.
    :param early_stopping: when to stop early; see :class:`~numpyro_orthgp.EarlyStopping`.
    :param checkpoint: a file to continue from, and to write every ``checkpoint_every`` steps and when the fit ends or is
        interrupted, and before an error of a source of data, a metric or the callback goes on.
    :param checkpoint_every: steps between checkpoints.
    :param resume: ``False`` starts again and overwrites the file. "anyway" continues from a file of another problem, if all shapes
        are equal: other data, a changed model, or a newer JAX.
    :param mesh: devices that share each batch; their number must divide ``batch_size``, or N without one.
    :param layout: parameters that devices share out: a ``jax.sharding.PartitionSpec`` for each name or pattern of names, such as
        ``{"f.*": PartitionSpec("functions")}``. Axes of ``mesh`` in these do not divide rows.
    :param callback: called with a :class:`~numpyro_orthgp.training.Progress` after each call to the device.
    :param kwargs: further keyword arguments of model and guide, unchanged: constants of a step.
        If the model has an argument with one of the names above, use ``functools.partial``.
    :return: parameters, state, losses, how the fit ended, and after how many steps.
    :raises TypeError: if ``svi``, ``data`` or ``mesh`` have the wrong type.
    :raises ValueError: if not exactly one of ``num_epochs`` and ``num_steps`` is given; if sizes do not fit each other; if numbers
        do not fit into the dtype to which JAX casts them; for a checkpoint that is damaged, a folder, cannot be written, or belongs
        to another run: other data, program, ``batch_size``, key, parameters or windows.
    :raises FloatingPointError: if the very first loss is not finite.
    """
    check_types(svi, early_stopping, callback, init_params, init_state, resume)
    data = data.data if isinstance(data, Local) and len(data.lengths) == 1 else data
    devices, how = Devices(mesh, isinstance(data, Local), layout), (batch_size, group_size, num_groups, shuffle)
    batches = _batches(data, seed_of(rng_key), how, checkpoint is not None, devices)
    check_groups(svi, batches)
    warn_of_coarse(batches.names, batches.arrays, batches.dtypes)
    stands_for = batches.num_rows if stands_for is None else check_integer("stands_for", stands_for)
    num_steps = _num_steps(num_epochs, num_steps, batches)
    _agree(batches, devices)
    window = (early_stopping and early_stopping.every) or default_window(batches.num_rows, batches.batch_size)
    with rows_of(svi, stands_for, batches.batch_size), one_thread():
        state = start_of(svi, rng_key, batches, init_params, init_state, kwargs)
    devices.lay_out(svi, state)
    keeper = None
    if checkpoint is not None:
        rules: dict[str, Any] = {"stands_for": stands_for, "window": window, "starts": init_state is None}
        rules["values"] = batches.values() if isinstance(batches, Shards) else None
        rules["score"] = "loss" if early_stopping is None or early_stopping.metric is None else "metric"
        mark = devices.of_first(partial(fingerprint, svi, state, batches, kwargs, **rules))
        keeper = Keeper(place(checkpoint), check_integer("checkpoint_every", checkpoint_every), mark, devices, batches)
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
    fitted = Fitted(svi, batches.kept(), batches.batch_size, batches.num_rows, kwargs, batches.is_part, batches.tables)
    with devices.interrupts_wait(), one_thread():
        return run.fit().of(fitted)


def _batches(
    data: Any,
    seed: tuple[int, ...],
    how: tuple[int | None, int | None, int | None, Blocks | None],
    has_checkpoint: bool,
    devices: Devices,
) -> Feed:
    """The object that provides the rows of each step.

    :param how: ``batch_size``, ``group_size``, ``num_groups`` and ``shuffle``.
    :raises TypeError: for a loader that is not wrapped.
    :raises ValueError: for options that a source does not support, and for a checkpoint with a source that cannot resume.
    """
    batch_size, group_size, num_groups, shuffle = how
    is_local = isinstance(data, Local)
    if isinstance(data, (tuple, dict)) or not (is_local or isinstance(data, Source)):
        return Batches(data, batch_size, seed, group_size, shuffle, num_groups)
    if is_local and num_groups is not None:
        raise ValueError(
            "`num_groups` is for arrays of one process; with training.Local all rows are in groups of `group_size`."
        )
    for name, given in (("group_size", group_size), ("num_groups", num_groups), ("shuffle", shuffle)):
        if given is not None and not is_local:
            raise ValueError(
                f"`{name}` is for arrays, whose rows `fit` puts in order. The batches of a source have their own order."
            )
    if has_checkpoint and not getattr(data.data if is_local else data, "is_resumable", True):
        raise ValueError(
            "`checkpoint` needs batches that can be read again when the run goes on; an iterator gives them "
            "once. Pass the loader that the iterator is made from, or a function that makes it: Stream(lambda: "
            "make_iterator(), num_rows=N)."
        )
    return (
        Shards(data, batch_size, seed, group_size, shuffle, devices) if is_local else Streamed(data, batch_size, seed)
    )


def _agree(batches: Feed, devices: Devices) -> None:
    """Check that devices can share batches and that processes agree, before they exchange anything."""
    devices.check_shares(batches.batch_size, batches.is_full)
    devices.check_equal(partial(sample_of, batches), batches.num_rows, isinstance(batches, Shards))
    if isinstance(batches, Shards):
        batches.begin()


def seed_of(rng_key: Any) -> tuple[int, ...]:
    """The words of a PRNG key.

    :raises TypeError: if ``rng_key`` is not a key, or is one of a program that is traced.
    """
    try:
        return tuple(int(word) for word in np.asarray(jax.random.key_data(rng_key)).ravel())
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise TypeError(NOT_TRACED) from error
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
    """The initial state. Guides trace the model while they are initialised, even if the state is given."""
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
