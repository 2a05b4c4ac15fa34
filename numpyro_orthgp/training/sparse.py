"""Sparse matrices of scipy: rows become dense where a batch needs them, so a matrix never is dense as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["SparseRows", "is_sparse"]


def is_sparse(leaf: Any) -> bool:
    """Whether it is a sparse matrix or array of scipy, in any format."""
    return hasattr(leaf, "tocsr") and hasattr(leaf, "toarray")


class SparseRows:
    """A sparse matrix as an array that is read in slices of rows.

    :param matrix: shape (N, D), of any format. Rows are cut from compressed sparse rows; other formats are converted once.
    """

    is_unmarked = True  # only the rows tell that they were changed: there is no file

    def __init__(self, matrix: Any) -> None:
        self.rows = matrix.tocsr()
        self.shape, self.dtype = self.rows.shape, self.rows.dtype
        self.chunks = (1, *self.shape[1:])

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.asarray(self.rows[rows].toarray())
