"""Draws of new outputs of a fitted model, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from numpyro_orthgp.diagnostics.draws import Arguments, GuideDraws
from numpyro_orthgp.diagnostics.importance import check_guide
from numpyro_orthgp.diagnostics.replay import MAX_ENTRIES, NODES, run
from numpyro_orthgp.errors import check_integer, check_params
from numpyro_orthgp.guides.handlers import OutputsByRow
from numpyro_orthgp.guides.parameters import Checked
from numpyro_orthgp.math.blocks import map_blocks
from numpyro_orthgp.math.kept import run_kept
from numpyro_orthgp.math.turns import in_turn
from numpyro_orthgp.types import PRNGKey

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True)
class Prediction:
    """New outputs of one site.

    :param draws: one draw of the outputs for each draw of the guide, shape (S, ...).
    """

    draws: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Shape of the outputs."""
        return self.draws.mean(0)

    @property
    def sd(self) -> np.ndarray:
        """Standard deviation of a new output, noise included, shape of the outputs."""
        return self.draws.std(0)

    def quantile(self, level: Any) -> np.ndarray:
        """Quantiles of a new output, shape of ``level`` + shape of the outputs."""
        return np.quantile(self.draws, level, axis=0)

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the central interval that holds a new output with this probability."""
        lower, upper = self.quantile([0.5 - level / 2, 0.5 + level / 2])
        return lower, upper

    def __repr__(self) -> str:
        return f"<Prediction of shape {self.draws.shape[1:]}, {len(self.draws)} draws: mean, sd, quantile, interval>"


@in_turn()
def predict(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_samples: int,
    rng_key: PRNGKey | None = None,
) -> dict[str, Prediction]:
    """Draws of the unobserved outputs of a model, by name of the site.

    Given the draw of the guide, each row is drawn separately. So no covariance between rows is computed, for any number of rows.

    :param args: arguments of the model, outputs ``None``.
    :raises ValueError: if the model has no site to draw.
    """
    check_guide(guide, params)
    check_integer("num_samples", num_samples)
    draw_key, model_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    arguments = Arguments(args, kwargs)
    draws = GuideDraws(guide, params, arguments, draw_key).draw(num_samples)
    params = draws.params

    def one(arrays: Any, params: Any, values: Any, key: PRNGKey) -> dict[str, Any]:
        fitted = Checked(model, draws.params)

        def by_row(*args: Any, **kwargs: Any) -> Any:
            with OutputsByRow():
                return fitted(*args, **kwargs)

        sites, _ = run(by_row, arguments.join(arrays), params, values, key)
        check_params("model", sites, params)
        new = {n: s for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"] and n not in values}
        if not new:
            raise ValueError(
                "The model has no output to draw: all are observed. Leave outputs out, `obs=None`, as in def model(X, y=None)."
            )
        return {n: s["value"] for n, s in new.items()}

    keys = jax.random.split(model_key, num_samples)
    shapes = jax.eval_shape(one, arguments.arrays, params, draws.first(), keys[0])
    size = sum(int(np.prod(s.shape)) for s in shapes.values())

    def all_draws(arrays: Any, params: Any, values: Any, keys: PRNGKey) -> Any:
        per_draw = size * NODES
        each = jax.vmap(lambda row: one(arrays, params, *row))
        return map_blocks(each, (values, keys), max(MAX_ENTRIES // max(per_draw, 1), 1))

    found = run_kept(all_draws, arguments.arrays, params, draws.values, keys)
    return {name: Prediction(np.asarray(values)) for name, values in found.items()}
