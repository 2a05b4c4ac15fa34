"""ArviZ's groups: variables, names of their axes, and labels along them.

This file names the axes and builds xarray's datasets by hand. ``from_dict`` has different signatures in ArviZ 0.x and 1.x, and has
one table of dimensions for all groups, although y has fewer axes in ``log_likelihood``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpyro

from numpyro_orthgp.diagnostics.draws import Draws
from numpyro_orthgp.diagnostics.layout import Layout, Output
from numpyro_orthgp.diagnostics.versions import tree_of

__all__ = ["Groups"]

Variables = dict[str, tuple[tuple[str, ...], np.ndarray]]  # by name: names of the axes, values


@dataclass
class Groups:
    """
    :param layout: what the model has.
    :param coords: the user's labels of dimensions.
    :param dims: the user's names of the dimensions of a variable.
    """

    layout: Layout
    coords: Mapping[str, Any]
    dims: Mapping[str, Sequence[str]]
    _outputs: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    _groups: dict[str, Variables] = field(default_factory=dict)
    _labels: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dims = {_clean(name): tuple(own) for name, own in self.dims.items()}
        self.coords = {_clean(name): labels for name, labels in self.coords.items()}
        known = self.layout.functions | self.layout.deterministic | self.layout.latents
        for name, own in (known | {output.name: output.dims for output in self.layout.outputs}).items():
            self._dims_of(name, own)  # before anything is computed

    def add_draws(self, draws: Draws, visited: Mapping[str, Any]) -> None:
        """Posterior, sampler statistics, and draws of outputs; the latter are stored until the masks are known."""
        known = self.layout.functions | self.layout.deterministic | self.layout.latents
        drawn = dict(visited["functions"]) | visited["deterministic"] | draws.values
        for name in [*self.layout.functions, *self.layout.latents, *self.layout.deterministic]:
            self._add("posterior", name, known[name], _by_chain(drawn[name], draws.shape))
        self._groups["sample_stats"] = {
            name: (("chain", "draw"), np.asarray(value)) for name, value in draws.statistics.items()
        }
        for group in ("posterior_predictive", "log_likelihood"):
            self._outputs[group] = {name: _by_chain(value, draws.shape) for name, value in visited[group].items()}

    def add_data(self, first: Mapping[str, Any], last: Mapping[str, Any]) -> None:
        """What does not depend on draws.

        :param first: as the model sees it at the first draw.
        :param last: at the last one.
        :raises ValueError: if the masks depend on the draw.
        """
        same = {part: _equal(first[part], last[part]) for part in first}
        for output in self.layout.outputs:
            name, mask = output.name, first["masks"].get(output.name)
            if mask is not None and name not in same["masks"]:
                raise ValueError(f"The mask of `{name}` must not depend on latent sites; it differs between draws.")
            self._add_output(output, np.asarray(first["observed"][name]), mask)
        named = list(same["params"].values())
        points = {n: v for n, v in same["points"].items() if not any(np.array_equal(v, value) for value in named)}
        for name, value in (same["params"] | points).items():
            self._add("constant_data", name, (), value)
        inputs = same["inputs"]
        shared = all(np.array_equal(X, next(iter(inputs.values()))) for X in inputs.values())
        for function, X in inputs.items():
            name = "X" if shared else f"{function}_X"
            rows = self._dims_of(function, self.layout.functions[function])[0]
            self._add("constant_data", name, (rows, f"{name}_dim"), X)

    def tree(self) -> Any:
        """All groups, as an ``InferenceData`` (ArviZ 0.x) or a ``DataTree`` (1.x).

        :raises ValueError: if ``coords`` or ``dims`` name something that does not exist.
        """
        import xarray as xr

        variables = {name for group in self._groups.values() for name in group}
        axes = {dim for group in self._groups.values() for own, _ in group.values() for dim in own}
        for option, given, there in (("dims", self.dims, variables), ("coords", self.coords, axes)):
            if unknown := [name for name in given if name not in there]:
                raise ValueError(f"`{option}` has {unknown}, which are not there; there are {sorted(there)}.")
        attrs = {"inference_library": "numpyro", "inference_library_version": numpyro.__version__}
        datasets: dict[str, Any] = {
            group: xr.Dataset(own, self._coords_of(own), {**attrs, "creation_library": "numpyro_orthgp"})
            for group, own in self._groups.items()
            if own
        }
        return tree_of(datasets)

    def _add_output(self, output: Output, observed: np.ndarray, mask: Any) -> None:
        dims = self._dims_of(output.name, output.dims)
        name, batch = _clean(output.name), output.batch
        mask = np.broadcast_to(True if mask is None else mask, observed.shape)
        rows = mask.any(tuple(range(batch, mask.ndim)))
        kept = None if rows.all() else np.flatnonzero(rows)
        if kept is not None:
            entries = f"{name}_observed"
            labels = self._label(dims[0], rows.size) if batch == 1 else np.arange(rows.size)
            self._labels[entries] = labels[kept]
            mask = mask.reshape(-1, *mask.shape[batch:])[kept]
        parts = {"observed_data": observed} | {
            group: values.get(output.name) for group, values in self._outputs.items()
        }
        for group, values in parts.items():
            if values is None:
                continue
            leading = () if group == "observed_data" else ("chain", "draw")
            own = dims[:batch] if group == "log_likelihood" else dims
            if kept is not None:
                head, tail = values.shape[: len(leading)], values.shape[len(leading) + batch :]
                values, own = values.reshape(*head, -1, *tail).take(kept, len(leading)), (entries, *own[batch:])
            if group != "log_likelihood" and not mask.all():
                values = np.where(mask, values, np.nan)  # single entries of rows that are there
            self._groups.setdefault(group, {})[name] = (*leading, *own), values

    def _add(self, group: str, name: str, dims: tuple[str, ...], values: Any) -> None:
        """Add a variable. ``dims`` has the names of its first axes, as far as they are known."""
        values, leading = np.asarray(values), ("chain", "draw") if group == "posterior" else ()
        numbered = tuple(f"{name}_dim_{i}" for i in range(len(dims), values.ndim - len(leading)))
        self._groups.setdefault(group, {})[_clean(name)] = leading + self._dims_of(name, dims + numbered), values

    def _dims_of(self, name: str, dims: tuple[str, ...]) -> tuple[str, ...]:
        """The user's names of axes, then those of the model."""
        given = self.dims.get(_clean(name), ())
        if len(given) > len(dims):
            raise ValueError(
                f"`dims['{name}']` names {len(given)} dimensions; `{name}` has {len(dims)} beside chain and draw."
            )
        return (*given, *map(_clean, dims[len(given) :]))

    def _label(self, dim: str, size: int) -> np.ndarray:
        labels = self._labels.get(dim)
        labels = np.asarray(self.coords.get(dim, np.arange(size) if labels is None else labels))
        if len(labels) != size:
            raise ValueError(
                f"`coords['{dim}']` must have {size} labels, one per entry of the dimension; got {len(labels)}."
            )
        return labels

    def _coords_of(self, variables: Variables) -> dict[str, np.ndarray]:
        sizes = {d: n for dims, values in variables.values() for d, n in zip(dims, values.shape, strict=True)}
        return {dim: self._label(dim, size) for dim, size in sizes.items()}


def _equal(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Those arrays that are equal."""
    pairs = {name: (np.asarray(value), np.asarray(last[name])) for name, value in first.items()}
    exact = {n: np.array_equal(a, b, equal_nan=np.issubdtype(a.dtype, np.floating)) for n, (a, b) in pairs.items()}
    return {name: pair[0] for name, pair in pairs.items() if exact[name]}


def _by_chain(values: Any, shape: tuple[int, int]) -> np.ndarray:
    values = np.asarray(values)
    return values.reshape(*shape, *values.shape[1:])


def _clean(name: str) -> str:
    """A name without "/", which separates groups in ArviZ and NetCDF."""
    return name.replace("/", ".")
