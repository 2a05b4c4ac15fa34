"""Words for likelihoods whose rows are not those of the plates around them: NumPyro would name the two shapes alone."""

from __future__ import annotations

from typing import Any

import numpyro
from numpyro.primitives import _PYRO_STACK

__all__ = ["at_another_axis", "refuse_other_rows"]


def refuse_other_rows(shape: tuple[int, ...]) -> None:
    """Refuse a likelihood with other numbers of rows than the plates around it.

    :param shape: its batch shape.
    :raises ValueError: if a plate of the running model has another number of rows.
    """
    plates = [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]
    for plate in plates:
        rows, picked = shape[plate.dim] if -plate.dim <= len(shape) else 1, plate.subsample_size
        if rows in (1, picked):
            continue
        raise ValueError(
            f"The likelihood has batch shape {shape}, and the plate {plate.name!r} around it has {picked} rows at dim={plate.dim}. "
            + _fix(shape, plate, plates)
        )


def _fix(shape: tuple[int, ...], plate: Any, plates: list[Any]) -> str:
    """
    :param plate: the one that has another number of rows.
    :param plates: all plates, outer ones first.
    """
    name, picked = plate.name, plate.subsample_size
    if shape[:1] == (picked,) and plate.dim == -1:
        return "Its last axis has the outputs of a row: write likelihood.to_event(1)."
    if plate.dim == -2 and shape[1:] == (picked,):
        return (
            f"Rows of f(X) are at dim=-2, its outputs at dim=-1: numpyro.plate({name!r}, {picked}, dim=-1), the plate of "
            "the rows with dim=-2, and y of shape (rows, outputs)."
        )
    of_rows = next((p for p in plates if p.subsample_size == shape[-1]), None)
    if len(shape) == 1 and of_rows is not None:  # at another dim
        return (
            f"Rows of one function are at dim=-1, and its repetitions in front of them: numpyro.plate({of_rows.name!r}, "
            f"{shape[0]}, dim=-1), the plate {name!r} with dim={of_rows.dim}, and y of shape ({picked}, {shape[0]}). If each "
            f"column of y has a function of its own, declare it so: gp(..., num_latents={picked})."
        )
    if picked < plate.size:
        return (
            f"Give f, y and masks the rows that the plate picks: with numpyro.plate({name!r}, N, subsample_size=...) as "
            "rows, write f(X[rows]) and obs=y[rows]; or pass the rows of a minibatch, with subsample_size=len(X)."
        )
    return (
        f"Give the plate the number of rows, numpyro.plate({name!r}, len(X)); in predictions, N=len(X_new). If it is of several y "
        "for all rows, make the rows an event, likelihood.to_event(1)."
    )


def at_another_axis(size: int, rows: int, plate: int, name: str = "") -> str:
    """Words for a plate that is not at the axis of the rows, so that each of them counts as often as there are rows.

    :param size: the number of rows.
    :param rows, plate: the axes of the batch of the two.
    """
    fix = (
        f"Leave dim={plate} out there."
        if rows == -1
        else f"Rows are in front of outputs: write likelihood.to_event(1), or f(X)[..., 0] with y of shape ({size},)."
    )
    return (
        f"{size} times: its rows are at dim={rows}, and the plate {name and repr(name) + ' '}of as many rows is at "
        f"dim={plate}. {fix}"
    )
