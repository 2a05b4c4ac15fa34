"""ArviZ's groups, put together: variables, the names of their axes and the labels along them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpyro

from numpyro_orthgp.diagnostics.draws import Draws
from numpyro_orthgp.diagnostics.layout import Layout, Output

__all__ = ["Groups"]

Variables = dict[str, tuple[tuple[str, ...], np.ndarray]]  # by name: names of the axes, values


@dataclass
class Groups:
    """
    :param layout: what the model has.
    :param shape: numbers of chains and draws.
    :param coords: the user's labels of dimensions.
    :param dims: the user's names of the dimensions of a variable.
    """

    layout: Layout
    shape: tuple[int, int]
    coords: Mapping[str, Any]
    dims: Mapping[str, Sequence[str]]
    _outputs: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    _groups: dict[str, Variables] = field(default_factory=dict)
    _labels: dict[str, np.ndarray] = field(default_factory=dict)

    def add_draws(self, draws: Draws, visited: Mapping[str, Any]) -> None:
        """Posterior, sampler statistics, and the draws of outputs, which wait for the masks."""
        posterior = {}
        known = self.layout.functions | self.layout.deterministic | self.layout.latents
        drawn = dict(visited["functions"]) | visited["deterministic"] | draws.values
        for name in [*self.layout.functions, *self.layout.latents, *self.layout.deterministic]:
            posterior[name] = self._variable(name, known[name], self._by_chain(drawn[name]), 2)
        self._groups["posterior"] = posterior
        self._groups["sample_stats"] = {
            name: (("chain", "draw"), np.asarray(value)) for name, value in draws.statistics.items()
        }
        for group in ("posterior_predictive", "log_likelihood"):
            self._outputs[group] = {name: self._by_chain(value) for name, value in visited[group].items()}

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
        constants: Variables = {}
        for name, X in self._inputs(same["inputs"]).items():
            function = name.removesuffix("_X") if name != "X" else next(iter(same["inputs"]))
            rows = self._dims_of(function, self.layout.functions[function], None)[0]
            constants[name] = self._variable(name, (rows, f"{name}_dim"), X, 0)
        for name, value in same["params"].items():
            constants[name] = self._variable(name, (), value, 0)
        named = list(same["params"].values())
        for name, points in same["points"].items():
            if not any(np.array_equal(points, value) for value in named):
                constants[name] = self._variable(name, (), points, 0)
        self._groups["constant_data"] = constants

    def tree(self) -> Any:
        """All of it, as an ``InferenceData`` (ArviZ 0.x) or a ``DataTree`` (1.x).

        :raises ValueError: for ``coords`` or ``dims`` of nothing that is there.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # 0.23 announces 1.0 when it is imported
            import arviz as az
        import xarray as xr

        variables = {name for group in self._groups.values() for name in group}
        axes = {dim for group in self._groups.values() for own, _ in group.values() for dim in own}
        for option, given, there in (("dims", self.dims, variables), ("coords", self.coords, axes)):
            if unknown := [name for name in given if name.replace("/", ".") not in there]:
                raise ValueError(f"`{option}` has {unknown}, which are not there; there are {sorted(there)}.")
        attrs = {"inference_library": "numpyro", "inference_library_version": numpyro.__version__}
        datasets: dict[str, Any] = {
            group: xr.Dataset(own, self._coords_of(own), {**attrs, "creation_library": "numpyro_orthgp"})
            for group, own in self._groups.items()
            if own
        }
        if hasattr(az, "InferenceData"):
            return az.InferenceData(**datasets)
        return xr.DataTree.from_dict(datasets)

    def _add_output(self, output: Output, observed: np.ndarray, mask: Any) -> None:
        dims = self._dims_of(output.name, output.dims, len(output.dims))
        name, batch = output.name.replace("/", "."), output.batch
        kept = None if mask is None or np.all(mask) else np.flatnonzero(np.asarray(mask).reshape(-1))
        if kept is not None:
            entries = f"{name}_observed"
            labels = self._label(dims[0], np.size(mask)) if batch == 1 else np.arange(np.size(mask))
            self._labels[entries] = labels[kept]
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
            self._groups.setdefault(group, {})[name] = (*leading, *own), values

    def _inputs(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One ``X`` where all functions have the same inputs."""
        arrays = list(inputs.values())
        if arrays and all(np.array_equal(arrays[0], X) for X in arrays):
            return {"X": arrays[0]}
        return {f"{name}_X": X for name, X in inputs.items()}

    def _by_chain(self, values: Any) -> np.ndarray:
        values = np.asarray(values)
        return values.reshape(*self.shape, *values.shape[1:])

    def _variable(
        self, name: str, dims: tuple[str, ...], values: Any, leading: int
    ) -> tuple[tuple[str, ...], np.ndarray]:
        values = np.asarray(values)
        return ("chain", "draw")[:leading] + self._dims_of(name, dims, values.ndim - leading), values

    def _dims_of(self, name: str, dims: tuple[str, ...], ndim: int | None) -> tuple[str, ...]:
        """The user's names of axes, then those of the model, then numbered ones."""
        ndim = len(dims) if ndim is None else ndim
        given = tuple(self.dims.get(name, ()))
        if len(given) > ndim:
            raise ValueError(
                f"`dims['{name}']` names {len(given)} dimensions; `{name}` has {ndim} beside chain and draw."
            )
        dims = given + dims[len(given) :]
        return tuple(d.replace("/", ".") for d in dims + tuple(f"{name}_dim_{i}" for i in range(len(dims), ndim)))

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
