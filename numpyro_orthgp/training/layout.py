"""Parameters that the devices of a mesh share out, such as those of many latent functions. XLA divides the work as they lie."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_orthgp.training.lazy_rows import LazyRows, sharding_of

__all__ = ["Layout", "axes_of_rows", "check_layout", "layout_of_state"]

Layout = Mapping[str, PartitionSpec]


def check_layout(layout: Any, mesh: Any) -> None:
    """
    :raises TypeError: if it does not map patterns of names to partition specs.
    :raises ValueError: without a mesh of one process, or for axes that it does not have.
    """
    if layout is None:
        return
    if not (isinstance(layout, Mapping) and all(isinstance(spec, PartitionSpec) for spec in layout.values())):
        raise TypeError(
            "`layout` must map names of parameters to jax.sharding.PartitionSpec, such as {'f.*': PartitionSpec('functions')}; got "
            f"{layout!r}."
        )
    if not isinstance(mesh, Mesh) or len({d.process_index for d in mesh.devices.flat}) > 1:
        raise ValueError("`layout` needs `mesh`, of devices of one process.")
    unknown = _axes(layout) - set(mesh.axis_names)
    if unknown:
        raise ValueError(
            f"`layout` names the axis {min(unknown)!r}; the axes of `mesh` are {', '.join(map(repr, mesh.axis_names))}."
        )


def axes_of_rows(mesh: Mesh, layout: Layout | None) -> tuple[str, ...]:
    """The axes of a mesh that divide the rows of a batch: all that no parameter lies along."""
    return tuple(str(name) for name in mesh.axis_names if name not in _axes(layout or {}))


def layout_of_state(svi: Any, state: Any, layout: Layout | None, everywhere: NamedSharding | None) -> Any:
    """Layout of a state: parameters with these names, and what the optimizer keeps of the same shape for each, are divided.

    :param everywhere: sharding for arrays that every device has a copy of; ``None`` on one device.
    :return: ``everywhere``, or a tree with the state's structure.
    :raises ValueError: if a name is that of no parameter, if its axes cannot be divided evenly, or with :func:`lazy_rows`.
    """
    if layout is None or everywhere is None:
        return sharding_of(svi, state, everywhere)
    if isinstance(getattr(svi, "optim", None), LazyRows):
        raise ValueError("`layout` does not go with lazy_rows, which divides its tables among all devices.")
    mesh, found = everywhere.mesh, set[str]()

    def of(path: Any, x: Any) -> NamedSharding:
        names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        for pattern, spec in layout.items():
            name = next((n for n in names if fnmatchcase(n, pattern)), None)
            if name is None or np.ndim(x) < len(spec):
                continue
            found.add(pattern)
            for size, axes in zip(np.shape(x), spec, strict=False):
                shares = int(np.prod([mesh.shape[axis] for axis in _names(axes)]))
                if size % shares:
                    raise ValueError(
                        f"`layout` divides {name!r}, of shape {np.shape(x)}, by {spec}: {shares} devices cannot share {size} "
                        "evenly. Use another mesh, or leave the parameter out."
                    )
            return NamedSharding(mesh, spec)
        return everywhere

    result = jax.tree_util.tree_map_with_path(of, state)
    if missing := set(layout) - found:
        raise ValueError(f"`layout` names {min(missing)!r}, which is no parameter that has so many axes.")
    return result


def _axes(layout: Layout) -> set[str]:
    return {name for spec in layout.values() for axes in spec for name in _names(axes)}


def _names(axes: Any) -> tuple[str, ...]:
    """The names in an entry of a partition spec: ``None``, a name, or several."""
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)
