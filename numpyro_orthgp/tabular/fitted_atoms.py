"""The probabilities of atoms: a classification of all rows, kept beside a regression of those at no atom."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.tabular.atoms import Atoms
from numpyro_orthgp.tabular.classification import ClassificationFit
from numpyro_orthgp.tabular.files import Arrays, group
from numpyro_orthgp.types import Array

__all__ = ["AtomsFit"]

NAME = "atoms"  # under which its arrays are saved


class AtomsFit(NamedTuple):
    """
    :param values: the atoms, in order, shape (K,).
    :param fit: the classification; class k is that of the kth atom, and class K of all other outputs.
    """

    values: np.ndarray
    fit: ClassificationFit

    def at(self, X: Any) -> Atoms:
        """Probabilities at the rows of a table."""
        return Atoms(self.values, self.fit.predict(X).probabilities[:, :-1])

    def of_program(self, X: Array) -> Atoms:
        """The same within an exported program, for the array of the classification."""
        found: Any = self.fit._program_of_table(X)["probabilities"][:, :-1]
        return Atoms(jnp.asarray(self.values), found)  # type: ignore[arg-type]

    def described(self) -> tuple[dict[str, Any], Arrays]:
        description, arrays = self.fit._described()
        return {"values": self.values.tolist(), "fit": description}, {f"{NAME}/{k}": v for k, v in arrays.items()}

    @classmethod
    def restored(cls, description: dict[str, Any], arrays: Arrays) -> AtomsFit:
        fit: Any = ClassificationFit._restored(description["fit"], group(arrays, NAME))
        return cls(np.array(description["values"]), fit)

    def words(self) -> str:
        counts = np.bincount(self.fit.y, minlength=len(self.values) + 1)
        shown = " and ".join(f"{value:g} in {num}" for value, num in zip(self.values, counts, strict=False))
        found = self.fit.found
        how = (
            "their shares, as columns say no more"
            if found.is_mean
            else f"classification, {len(found.Z)} inducing points"
        )
        return f"y is {shown} of {self.fit.num_rows} rows, with probabilities by {how}\n  all that follows is of the other rows"
