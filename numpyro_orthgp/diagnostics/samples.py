"""``check`` on a sample of the rows: which plates hold one, and which measurements are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.diagnostics.draws import Arguments, GuideDraws
from numpyro_orthgp.diagnostics.replay import run
from numpyro_orthgp.math.kept import run_kept
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["samples_of", "words_of_sample"]


def samples_of(
    model: Callable[..., Any], arguments: Arguments, source: GuideDraws, nuts: int | None
) -> dict[str, tuple[int, int]]:
    """Number of rows passed and number of rows in all, by name of the plate, for plates that hold a part of their rows.

    :raises ValueError: if a latent site in such a plate needs the numbers of its rows, or if NUTS is asked for.
    """
    found: dict[str, tuple[int, int]] = {}
    local: list[tuple[str, str]] = []

    def note(arrays: Any, params: Any, values: Any) -> Array:
        sites, _ = run(model, arguments.join(arrays), params, values, jax.random.key(0))
        plates = {name: site["args"] for name, site in sites.items() if site["type"] == "plate"}
        found.update({name: (n, size) for name, (size, n) in plates.items() if n not in (None, size)})
        for name, site in sites.items():
            if site["type"] == "sample" and name in values:
                local.extend((name, frame.name) for frame in site["cond_indep_stack"] if frame.name in found)
        return jnp.zeros(())

    jax.eval_shape(note, arguments.arrays, source.params, source.shapes)
    for name, plate in local:
        n, size = found[plate]
        raise ValueError(
            f"`{name}` has a value for each row of plate '{plate}', which holds {n} of its {size} rows, and it is unknown which. "
            "Pass the full data."
        )
    if found and nuts is not None:
        plate, (n, size) = next(iter(found.items()))
        raise ValueError(
            f"`nuts` needs all the data, but plate '{plate}' holds {n} of its {size} rows. Leave `nuts` out, or pass the full data."
        )
    if found:
        _refuse_random_rows(model, arguments, source)
    return found


def _refuse_random_rows(model: Callable[..., Any], arguments: Arguments, source: GuideDraws) -> None:
    """
    :raises ValueError: if the model's plate picks rows at random, others at each draw.
    """

    def observed(arrays: Any, params: Any, values: Any, key: PRNGKey) -> dict[str, Array]:
        sites, _ = run(model, arguments.join(arrays), params, values, key)
        return {n: s["value"] for n, s in sites.items() if s["type"] == "sample" and s["is_observed"]}

    known = arguments.arrays, source.params, source.first()
    first, second = (run_kept(observed, *known, jax.random.key(i)) for i in range(2))
    for name, y in first.items():
        if not np.array_equal(y, second[name], equal_nan=np.issubdtype(y.dtype, np.floating)):
            raise ValueError(
                f"Diagnostics need all the data at once, or the same rows of them at each draw; the plate of `{name}` picks rows "
                "at random. Pass its number of rows as its size."
            )


def words_of_sample(plate: str, sizes: tuple[int, int]) -> str:
    """A line of the page."""
    n, size = sizes
    return f"a sample: {n} of the {size} rows of plate '{plate}', each counted {size / n:.3g} times"
