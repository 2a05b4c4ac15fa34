r"""A fit of a table in one file, for :meth:`TableFit.save` and :func:`load`.

The file is NumPy's ``npz``. One of its arrays holds a description in JSON, as bytes. Loading executes nothing and reads no pickle.
The function is kept as its arrays. Their order is that of the function which this library makes from the same model. That order
follows from shapes alone, so loading fits and decomposes nothing again.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.tabular.columns import Column, Columns
from numpyro_orthgp.tabular.labels import Labels
from numpyro_orthgp.tabular.level_means import LevelMeans
from numpyro_orthgp.tabular.mixtures import Mixture
from numpyro_orthgp.tabular.near import Near
from numpyro_orthgp.tabular.stages import Found, Stage
from numpyro_orthgp.tabular.votes import Votes
from numpyro_orthgp.tabular.warps import Warp
from numpyro_orthgp.training.checkpoint import place, replacing

__all__ = ["read_fit", "write_fit"]

FORMAT, VERSION = "numpyro_orthgp fit of a table", 12
BAD = (
    OSError,
    EOFError,
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,
)

Arrays = dict[str, np.ndarray]


def write_fit(path: Any, description: dict[str, Any], arrays: Arrays) -> None:
    """Write a whole file, or none. Those may read it who may read any new file of the user.

    :raises ValueError: if it cannot be written.
    """
    path = place(path)
    arrays = {
        name: np.ascontiguousarray(array) if np.ndim(array) else np.asarray(array) for name, array in arrays.items()
    }
    text = json.dumps({"format": FORMAT, "version": VERSION, "digest": digest(arrays)} | description)
    if any(array.dtype == object for array in arrays.values()):
        raise ValueError("Arrays of Python objects cannot be saved without pickle.")
    try:
        if path.exists() and not path.is_file():  # it would be replaced by a file
            raise ValueError(f"{path} cannot be written: it is a folder, a device or a pipe.")
        with replacing(path) as file:
            np.savez(file, description=np.frombuffer(text.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}.") from error


def read_fit(path: Any, restore: Callable[[dict[str, Any], Arrays], Any]) -> Any:
    """The result of ``restore`` for a file's description and arrays.

    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: if it is damaged, not a saved fit, or of another version of the format.
    """
    path = place(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    if not path.is_file():  # reading a pipe would never end
        raise ValueError(f"{path} cannot be read: it is a folder, a device or a pipe.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # damaged zip files and arrays raise many kinds of errors
        raise ValueError(f"{path} cannot be read: it is damaged, or no file of fit.save(path). ({error})") from error
    try:
        description = json.loads(arrays.pop("description").tobytes().decode())
        found, version = description["format"], description["version"]
    except (*BAD, AttributeError) as error:
        raise ValueError(f"{path} is no file of fit.save(path): it has no description.") from error
    if found != FORMAT:
        raise ValueError(f"{path} is no file of fit.save(path), but of {found!r}.")
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version!r} of the format, of which this library reads version {VERSION}. Take a newer library, "
            "or the one that saved it, or fit and save again."
        )
    if description.get("digest") != digest(arrays):
        raise ValueError(f"{path} is damaged: its arrays are not those that were saved.")
    try:
        return restore(description, arrays)
    except (*BAD, AttributeError) as error:
        raise ValueError(f"{path} is damaged: what it says does not fit together. ({error})") from error


def digest(arrays: Arrays) -> str:
    """Digest of names, dtypes, shapes and values."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{name} {array.dtype.str} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def describe_columns(columns: Columns) -> dict[str, Any]:
    return {"columns": [asdict(column) for column in columns.columns], "kept": list(columns.kept)}


def columns_of(description: dict[str, Any]) -> Columns:
    read: dict[str, Callable[[Any], Any]] = {
        "levels": _tuple,
        "seen": _tuple,
        "means": _means,
        "warp": _warp,
        "periods": _tuple,
    }
    columns = [Column(**c | {key: of(c[key]) for key, of in read.items()}) for c in description["columns"]]
    return Columns(tuple(columns), tuple(description["kept"]))


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _means(found: dict[str, Any] | None) -> LevelMeans | None:
    return None if found is None else LevelMeans(tuple(found["levels"]), tuple(map(tuple, found["values"])))


def _warp(found: list[float] | None) -> Warp | None:
    return None if found is None else Warp(*found)


def describe_found(found: Found) -> tuple[dict[str, Any], Arrays]:
    names = ("baseline", "is_mean", "sharpness", "votes", "regularity")
    description = {name: getattr(found, name) for name in names}
    description["stages"] = [list(stage) for stage in found.stages]
    arrays = {"Z": found.Z} if found.losses is None else {"Z": found.Z, "losses": np.asarray(found.losses)}
    for group, values in (("values", found.values), ("params", found.params), ("errors", vars(found.errors))):
        arrays |= {f"{group}/{name}": np.asarray(value) for name, value in values.items()}
    if found.near is not None:
        values, Z, *rest = found.near
        description["near"] = rest
        arrays |= {"neighbors/Z": Z} | {f"neighbors/values/{name}": np.asarray(value) for name, value in values.items()}
    return description, arrays


def found_of(description: dict[str, Any], arrays: Arrays) -> Found:
    stages = [Stage(*stage) for stage in description["stages"]]
    rest = {name: value for name, value in description.items() if name not in ("stages", "near")}
    if "near" in description:
        rest["near"] = Near(group(arrays, "neighbors/values"), arrays["neighbors/Z"], *description["near"])
    rest["votes"] = None if rest["votes"] is None else Votes(*rest["votes"])
    rest |= {"losses": arrays.get("losses"), "errors": Mixture(**group(arrays, "errors"))}
    return Found(group(arrays, "values"), arrays["Z"], group(arrays, "params"), stages, **rest)


def group(arrays: Arrays, name: str) -> Arrays:
    """Arrays whose names begin with ``name/``, under the rest of their names."""
    start = f"{name}/"
    return {key.removeprefix(start): value for key, value in arrays.items() if key.startswith(start)}


def describe_labels(labels: Labels) -> tuple[dict[str, Any], Arrays]:
    """Text in object arrays is saved as NumPy's text, and loaded as objects."""
    arrays = {"classes": plain(labels.classes)}
    if labels.levels is not None:
        arrays["levels"] = plain(labels.levels)
    return {"objects": labels.classes.dtype == object, "ordered": labels.ordered}, arrays


def labels_of(description: dict[str, Any], arrays: Arrays) -> Labels:
    classes, levels = arrays["classes"], arrays.get("levels")
    if description["objects"]:
        classes = classes.astype(object)
    if levels is not None and levels.dtype.kind == "U":
        levels = levels.astype(object)
    return Labels(classes, levels, description["ordered"])


def plain(values: np.ndarray) -> np.ndarray:
    return values.astype(str) if values.dtype == object else values


def describe_function(f: Any, recipe: Callable[[], Any], name: str = "function") -> Arrays:
    """The arrays of a function, with names that begin with ``name/``.

    :param recipe: makes the function of the model; only its shapes are evaluated.
    :raises ValueError: if the function has another structure.
    """
    leaves = jax.tree.leaves(f)
    expected: Any = jax.eval_shape(recipe)
    trees: list[Any] = [jax.tree.structure(f), jax.tree.structure(expected)]
    if trees[0] != trees[1] or [np.shape(a) for a in leaves] != [a.shape for a in jax.tree.leaves(expected)]:
        raise ValueError(
            "This fit's function is not the one of its model, and a kernel or function of your own cannot be described in a file "
            "without pickle. Save `params` with numpy.savez, and keep the model's code beside it."
        )
    return {f"{name}/{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}


def function_from(arrays: Arrays, recipe: Callable[[], Any], name: str = "function") -> Any:
    """
    :raises ValueError: if arrays are missing, or have other shapes or dtypes.
    """
    expected, tree = jax.tree.flatten(jax.eval_shape(recipe))
    found = group(arrays, name)
    leaves = [found[str(i)] for i in range(len(expected))]
    for leaf, shape in zip(leaves, expected, strict=True):
        if leaf.shape != shape.shape or leaf.dtype != shape.dtype:
            raise ValueError(
                f"an array of the function is {leaf.dtype} of shape {leaf.shape}, not {shape.dtype} of {shape.shape}"
            )
    return jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in leaves])
