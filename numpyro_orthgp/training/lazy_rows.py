"""The optimizer that updates parameters of single rows only for the rows of the batch.

The gradient with respect to a table of N rows is zero except for the B rows of the batch. Automatic differentiation and Adam still
process all N rows, so the cost of a step grows with N. Here rows are taken out of the table before the loss is differentiated and
put back after the step, in place within the loop of ``fit``. Rows of the optimizer's state are treated in the same way.

**Each row has its own optimizer**, which counts its own steps. With one count for all, as in PyTorch's SparseAdam and TensorFlow's
LazyAdam, the bias of the moments counts as corrected when a row is seen first. Adam's first step would then be 3 times as long as
its rate, and the next steps up to 6.5 times. Schedules count the steps of the fit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from numpyro.optim import _NumPyroOptim, _value_and_grad

from numpyro_orthgp.gaussians.natural_gradient import is_waiting
from numpyro_orthgp.gaussians.optimizers import as_optax
from numpyro_orthgp.training.tables import Picked, RowsOfBatch, known_rows
from numpyro_orthgp.types import Array

__all__ = ["LazyRows", "bytes_of_tables", "lazy_rows", "params_have_nan", "rows_of", "sharding_of"]

# Parts of an optimizer's state that count the steps of the fit, whatever rows these see.
_SCHEDULES = (optax.ScaleByScheduleState,)
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


def lazy_rows(
    others: optax.GradientTransformation | _NumPyroOptim, rows: optax.GradientTransformation | None = None
) -> LazyRows:
    r"""An optimizer for :func:`fit` whose cost per step does not grow with the number of rows that have their own parameters.

    ::

        def model(Y):
            f = gp("f", kernel, Z, num_latents=D)
            with numpyro.plate("data", N, subsample_size=len(Y)):
                X = latent_inputs("X", N, 2)
                numpyro.sample("y", likelihoods.Gaussian(f(X), noise).to_event(1), obs=Y)

        guide = AutoSparseGP(model, latents={"X": init.pca(Y, 2)})
        svi = SVI(model, guide, lazy_rows(optax.adam(1e-2), rows=optax.adam(5e-2)), TraceMeanField_ELBO())
        result = fit(svi, key, (Y,), batch_size=256, num_epochs=20)

    Means and scales of latent inputs are tables of N rows, and a step sees B of them. It computes gradients for these rows and
    updates only them. Other rows and their optimizer states do not change. Every row has its own optimizer, so Adam's moments and
    their bias correction follow the steps that this row has taken. After :math:`t_n` steps of row n,

    .. math:: x_n \leftarrow x_n - \eta \frac{m_n / (1 - \beta_1^{t_n})}{\sqrt{v_n / (1 - \beta_2^{t_n})} + \epsilon}.

    If a step sees all rows, this is Adam. On minibatches it is not: Adam also moves rows outside of the batch, along the rest of
    their last gradients, and lets their moments decay. Schedules of optax count the steps of the fit. Transformations that combine
    several entries, such as clipping by a norm, combine the entries of one row.

    Tables are ``numpyro.param`` sites with ``event_dim`` inside the plate of the data: those of :func:`latent_inputs` under
    :class:`AutoSparseGP`, those of random effects of single rows under it or ``AutoNormal``, and your own, in model or
    guide. For any other parameter with N rows there is a warning, and it is updated as a whole.

    >>> import jax, jax.numpy as jnp, numpyro, optax
    >>> from jax.random import PRNGKey
    >>> from numpyro.infer import SVI, TraceMeanField_ELBO
    >>> import numpyro_orthgp as ogp
    >>> Y, Z = jnp.sin(jnp.arange(60.0)).reshape(20, 3), jnp.linspace(-2.0, 2.0, 5)[:, None]
    >>> def model(Y):
    ...     f = ogp.gp("f", ogp.kernels.RBF(1.0), Z, num_latents=3)
    ...     with numpyro.plate("data", 20, subsample_size=len(Y)):
    ...         X = ogp.latent_inputs("X", 20, 1)
    ...         numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.5).to_event(1), obs=Y)
    >>> start = jnp.zeros((20, 1))
    >>> guide = ogp.AutoSparseGP(model, latents={"X": start})
    >>> svi = SVI(model, guide, ogp.lazy_rows(optax.adam(0.1)), TraceMeanField_ELBO())
    >>> result = ogp.fit(svi, PRNGKey(0), (Y,), batch_size=4, num_steps=3, progress_bar=False)
    >>> int((result.params["X_scale"] != 0.3).sum())  # rows of three batches
    12

    :param others: optimizer for all other parameters, from optax or ``numpyro.optim``, or :func:`natural_gradient`. When
        :func:`natural_gradient` takes a step back, rows wait.
    :param rows: optax optimizer for each row; by default ``others``. A row takes one step per epoch, so use a larger rate, such as
        five times that of ``others``.
    :return: an optimizer for ``SVI``. It works only within ``fit``, which knows the rows of a batch.
    :raises TypeError: if ``others`` or ``rows`` are not such optimizers.
    :raises ValueError: from ``fit``, if no parameter is a table, a table is also read outside of the plate, or its constraint
        differs from row to row; from ``SVI.init`` and ``SVI.update`` outside of ``fit``.
    """
    rows = others if rows is None else rows
    if not isinstance(rows, optax.GradientTransformation):
        raise TypeError(
            f"`rows` must be an optimizer of optax, such as optax.adam(1e-2), as every row has its own; got {type(rows).__name__}."
        )
    return LazyRows(as_optax("others", others), optax.with_extra_args_support(rows))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """
    :param params: parameters that are not tables, unconstrained, by name.
    :param tables: parameters that are tables.
    :param of_others, of_rows: states of the optimizers; the state of rows has a first axis of N, except for schedules.
    :param has_nan: whether an updated row, or any row at the start, is NaN.
    :param axes: name of each table, and the axis of its rows.
    """

    params: dict[str, Any]
    tables: dict[str, Array]
    of_others: Any
    of_rows: Any
    has_nan: Array
    axes: tuple[tuple[str, int], ...] = field(metadata={"static": True})


class LazyRows(_NumPyroOptim):
    """The result of :func:`lazy_rows`. NumPyro passes the loss to its optimizers, so this one can choose what to differentiate."""

    def __init__(self, others: optax.GradientTransformationExtraArgs, rows: Any) -> None:
        super().__init__(lambda: (self._start, _refuse_update, _all_params))
        self.others, self.rows = others, rows

    def _start(self, params: dict[str, Any]) -> _State:
        found = known_rows("SVI.init").checked_tables(params)
        tables = {name: params[name] for name in found}
        others = {name: value for name, value in params.items() if name not in found}
        template = jax.eval_shape(self.rows.init, jax.tree.map(lambda a, x: jnp.take(x, 0, a), found, tables))
        of_rows = jax.vmap(self.rows.init, (found,), _axes_of_state(template))(tables)
        return _State(
            others, tables, self.others.init(others), of_rows, _has_nan(tables), axes=tuple(sorted(found.items()))
        )

    def eval_and_update(
        self, fn: Callable[[Any], tuple[Any, Any]], state: Any, forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Any, Any], Any]:
        """A step that differentiates with respect to rows of the batch and to all parameters that are not tables."""
        step, now = state[0], _lazy(state)
        batch, axes = known_rows("SVI.update"), dict(now.axes)
        picked = batch.picked(next(now.tables[name].shape[axis] for name, axis in now.axes))
        given = {name: picked.take(x, axes[name]) for name, x in now.tables.items()}

        def loss(parts: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Any, Any]:
            rows = {name: picked.in_batch(x, axes[name]) for name, x in parts[1].items()}
            with batch.handed(rows):
                return fn({**parts[0], **rows})

        (value, aux), gradients = _value_and_grad(loss, (now.params, given), forward_mode_differentiation)
        updates, of_others = self.others.update(gradients[0], now.of_others, now.params, value=value)
        moved = self._stepped(now.of_rows, axes, picked, given, gradients[1], value, is_waiting(of_others))
        tables = {name: picked.put(now.tables[name], x, axes[name]) for name, x in moved[0].items()}
        after = replace(
            now,
            params=optax.apply_updates(now.params, updates),
            tables=tables,
            of_others=of_others,
            of_rows=moved[1],
            has_nan=now.has_nan | _has_nan([picked.in_batch(x, axes[name]) for name, x in moved[0].items()]),
        )
        return (value, aux), (step + 1, after)

    def _stepped(
        self,
        state: Any,
        axes: dict[str, int],
        picked: Picked,
        rows: Any,
        gradients: Any,
        value: Any,
        waits: Array | None,
    ) -> tuple[dict[str, Array], Any]:
        """Rows after their step, and the optimizer state of all rows."""

        def step(gradient: Any, state: Any, row: Any) -> tuple[Any, Any]:
            update, of_row = self.rows.update(gradient, state, row, value=value)
            moved = optax.apply_updates(row, update), of_row
            if waits is None:
                return moved
            return jax.tree.map(lambda old, new: jnp.where(waits, old, new), (row, state), moved)

        of_state = _axes_of_state(state)
        before = _by_rows(lambda x: picked.take(x, 0), of_state, state)
        gradients = jax.tree.map(picked.everywhere, gradients)
        new, after = jax.vmap(step, (axes, of_state, axes), (axes, of_state))(gradients, before, rows)
        return new, _by_rows(lambda x, y: picked.put(x, y, 0), of_state, state, after)

    def eval_and_stable_update(self, *_: Any, **__: Any) -> Any:
        """Not supported for rows: ``fit`` itself finds the last good state."""
        raise ValueError(
            "lazy_rows has no `stable_update`: ogp.fit takes its steps, and goes back where a loss is not finite."
        )


def params_have_nan(svi: Any, state: Any) -> Array:
    """Whether any entry of the parameters is NaN, shape (). In tables only updated rows are checked."""
    if not isinstance(getattr(svi, "optim", None), LazyRows):
        return _has_nan(svi.get_params(state))
    now = _lazy(state.optim_state)
    return now.has_nan | _has_nan(svi.constrain_fn(now.params))


def sharding_of(svi: Any, state: Any, everywhere: NamedSharding | None) -> Any:
    """Layout of a state on a mesh. Tables are sharded by rows, if their number allows it; every device has a copy of the rest.

    :param everywhere: sharding for arrays that every device has a copy of; ``None`` on one device.
    :return: ``everywhere``, or a tree with the state's structure.
    """
    if everywhere is None or not isinstance(getattr(svi, "optim", None), LazyRows):
        return everywhere
    mesh, now = everywhere.mesh, _lazy(state.optim_state)

    def of(axis: int, x: Any) -> NamedSharding:
        shared = NamedSharding(mesh, PartitionSpec(*[None] * axis, mesh.axis_names))
        return everywhere if x.shape[axis] % mesh.size else shared

    step, _ = state.optim_state
    whole = jax.tree.map(lambda _: everywhere, state._replace(optim_state=(step, now)))
    axes = dict(now.axes)
    of_rows = _by_rows(lambda x, _: of(0, x), _axes_of_state(now.of_rows), now.of_rows, whole.optim_state[1].of_rows)
    tables = {name: of(axes[name], x) for name, x in now.tables.items()}
    return whole._replace(optim_state=(everywhere, replace(whole.optim_state[1], tables=tables, of_rows=of_rows)))


def bytes_of_tables(svi: Any, state: Any) -> int:
    """Size of a state's arrays with one entry per row. Each call to the device copies them once. 0 without :func:`lazy_rows`."""
    if not isinstance(getattr(svi, "optim", None), LazyRows):
        return 0
    now = _lazy(state.optim_state)
    return sum(x.nbytes for x in jax.tree.leaves((now.tables, now.of_rows)))


def rows_of(
    svi: Any, size: int, batch_size: int, rows: Array | None = None, everywhere: Sharding | None = None
) -> AbstractContextManager[Any]:
    """A context that tells :func:`lazy_rows` the rows of the batch. It has no effect on other optimizers.

    :param size: size of the plate whose rows have parameters.
    :param batch_size: how many rows the plate picks.
    :param rows: their numbers, shape (B,); ``None`` for all, in order.
    :param everywhere: sharding for arrays that every device has a copy of, on a mesh.
    """
    if not isinstance(getattr(svi, "optim", None), LazyRows):
        return nullcontext()
    return RowsOfBatch(size, batch_size, rows, everywhere)


def _axes_of_state(state: Any) -> Any:
    """The row axis of an optimizer's arrays, 0; ``None`` for schedules, which count the steps of the fit."""

    def axis(node: Any) -> Any:
        if isinstance(node, _INJECTED):
            shared = {name: None for name in node._fields if name != "inner_state"}
            return node._replace(**shared, inner_state=_axes_of_state(node.inner_state))
        return None if isinstance(node, _SCHEDULES) else 0

    return jax.tree.map(axis, state, is_leaf=lambda node: isinstance(node, (*_SCHEDULES, *_INJECTED)))


def _by_rows(function: Callable[..., Any], axes: Any, first: Any, *rest: Any) -> Any:
    """Apply a function to the arrays of states that have rows. Other arrays are taken from the last state."""

    def at(axis: int | None, *nodes: Any) -> Any:
        return nodes[-1] if axis is None else jax.tree.map(function, *nodes)

    return jax.tree.map(at, axes, first, *rest, is_leaf=lambda axis: axis is None)


def _lazy(state: Any) -> _State:
    """
    :raises TypeError: for the state of another optimizer.
    """
    if not isinstance(state[1], _State):
        raise TypeError(
            "`init_state` must be the state of a fit with lazy_rows, result.state; got another optimizer's. Start from its "
            "parameters: init_params=result.params."
        )
    return state[1]


def _all_params(state: _State) -> dict[str, Any]:
    return {**state.params, **state.tables}


def _refuse_update(*_: Any) -> Any:
    raise ValueError("lazy_rows takes no gradients of whole tables: call svi.update within ogp.fit, not optim.update.")


def _has_nan(tree: Any) -> Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.any(jnp.asarray([jnp.any(jnp.isnan(x)) for x in floats], bool))
