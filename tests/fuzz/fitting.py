"""Some steps of an optimizer, after which bounds are compared again."""

from __future__ import annotations

from typing import Any

import numpy as np

NUM_STEPS = 60


def fitted(gradient: Any, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parameters after steps of Adam, with two decimals.

    :param gradient: of the loss, a function of parameters.
    """
    free = {n: to_free(n, v) for n, v in params.items()}
    first, second = ({n: np.zeros_like(v) for n, v in free.items()} for _ in range(2))
    for step in range(1, NUM_STEPS + 1):
        now = {n: from_free(n, v) for n, v in free.items()}
        gradients = gradient(now)
        for n in free:
            d = np.asarray(gradients[n], float) * slope_of_free(n, now[n])
            first[n] = 0.8 * first[n] + 0.2 * d
            second[n] = 0.95 * second[n] + 0.05 * d**2
            change = first[n] / (1 - 0.8**step) / np.sqrt(second[n] / (1 - 0.95**step) + 1e-12)
            free[n] = free[n] - 0.1 * np.where(np.isfinite(change), change, 0)
    return {n: least(n, np.round(from_free(n, v), 2)) for n, v in free.items()}


def least(name: str, value: np.ndarray) -> np.ndarray:
    """Rounded to zero nothing is positive."""
    if name.endswith("scale_tril"):
        return np.where(np.eye(value.shape[-1]) * (value < 0.05), 0.05, value)
    return np.maximum(value, 0.05) if is_positive(name) else value


def is_positive(name: str) -> bool:
    sampled = name.endswith("_auto_loc") and ".u" not in name
    return sampled or name.endswith("_scale") or name.endswith(("_variance", "_lengthscale"))


def to_free(name: str, value: Any) -> np.ndarray:
    """Real coordinates: logarithms of what is positive, of diagonals too."""
    value = np.asarray(value, float)
    if name.endswith("scale_tril"):
        eye = np.eye(value.shape[-1], dtype=bool)
        return np.where(eye, np.log(np.where(eye, value, 1)), np.tril(value))
    return np.log(value) if is_positive(name) else value


def from_free(name: str, value: np.ndarray) -> np.ndarray:
    if name.endswith("scale_tril"):
        return np.where(np.eye(value.shape[-1], dtype=bool), np.exp(np.minimum(value, 3)), np.tril(value))
    return np.exp(np.minimum(value, 3)) if is_positive(name) else value


def slope_of_free(name: str, value: np.ndarray) -> np.ndarray:
    """Derivative of a parameter for its real coordinate."""
    if name.endswith("scale_tril"):
        return np.where(np.eye(value.shape[-1], dtype=bool), value, np.tril(np.ones_like(value)))
    return value if is_positive(name) else np.ones_like(value)
