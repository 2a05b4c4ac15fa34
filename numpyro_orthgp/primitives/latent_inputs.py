"""The primitive :func:`latent_inputs`: inputs that are latent variables, as in a GP-LVM.

They are one site of batch shape (B,) and event shape (Q,), inside or outside of a plate. The guide makes the model's plate once,
with the same arguments, and all parts of the guide pick the same rows (``SamePlates`` in ``guides/handlers.py``). Where an array is
expected, the draw is used; ``CollapsedGP`` and ``f.expected`` use the Gaussian.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.functions.latent_inputs import LatentInputs
from numpyro_orthgp.primitives.messages import (
    MESSAGE,
    InputBelief,
    InputSite,
    is_integrated,
    sample_and_read,
)

__all__ = ["latent_inputs"]


def latent_inputs(
    name: str, num: int, dim: int, *, prior: dist.Distribution | None = None, dtype: Any = None
) -> LatentInputs:
    """Declare latent inputs, one row for each of ``num`` points: the latent variables of a GP-LVM.

    They are one ordinary sample site, ``name``. Without a plate, or in a plate over the points, it holds all points. In a
    plate that subsamples it holds those of the minibatch::

        X = latent_inputs("X", N, 2)                # Bayesian GP-LVM, collapsed
        numpyro.sample("y", CollapsedGP(kernel, X, Z, noise), obs=Y)

        f = gp("f", kernel, [Z, O], num_latents=D)  # any likelihood, minibatches
        with numpyro.plate("data", N, subsample_size=B) as index:
            X = latent_inputs("X", N, 2)
            numpyro.sample("y", likelihoods.Poisson(f(X)).to_event(1), obs=Y[index])

    Guides of this package (:class:`AutoSparseGP`, :func:`latent_inputs_posterior`) pass their Gaussian to the model. Then
    ``CollapsedGP`` integrates the inputs out, while ``f(X)`` uses a draw.

    >>> import numpyro
    >>> from numpyro_orthgp import latent_inputs
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     X = latent_inputs("X", 100, 2)
    ...     with numpyro.plate("rows", 100, subsample_size=10):
    ...         batch = latent_inputs("X_batch", 100, 2)
    >>> X.shape, batch.shape
    ((100, 2), (10, 2))

    :param name: name of the site; the guide's parameters are ``{name}_loc`` and ``{name}_scale``, shape (N, D).
    :param num: number of all points N.
    :param dim: number of latent dimensions D.
    :param prior: distribution of one row, event shape (D,), or of each row, batch shape (N,); by default N(0, I).
    :param dtype: dtype of the draws without a Gaussian from a guide; by default JAX's default floating dtype.
    :return: the inputs, usable like an array of shape (B, D).
    :raises ValueError: if ``num`` or ``dim`` is not positive, or prior, guide's Gaussian or surrounding plate have other sizes.

    **References:**

    1. Lawrence. Probabilistic non-linear principal component analysis with Gaussian process latent variable models. 2005.
    2. Titsias, Lawrence. Bayesian Gaussian process latent variable model. 2010.
    """
    num, dim = check_integer("num", num), check_integer("dim", dim)
    fn = dist.Normal(jnp.zeros(dim), 1.0).to_event(1) if prior is None else prior
    if fn.event_shape != (dim,) or fn.batch_shape not in ((), (1,), (num,)):
        raise ValueError(
            f"`prior` must be a distribution of rows, event shape ({dim},) and batch shape () or ({num},); got event shape "
            f"{fn.event_shape} and batch shape {fn.batch_shape}. Use .to_event(1) to make the last axis an event."
        )
    rows = numpyro.subsample(jnp.arange(num), event_dim=0)  # rows that the surrounding plate has picked
    if fn.batch_shape == (num,) and rows.shape != (num,):
        raise ValueError(
            f"`prior` has batch shape ({num},) but the plate around `{name}` picks {rows.shape[0]} rows. Give the prior of those "
            "rows, indexed by what the plate returns."
        )
    message = sample_and_read(name, fn.expand(rows.shape), InputSite(num, dim))
    return _read(message, dtype)


def _read(message: dict[str, Any], dtype: Any) -> LatentInputs:
    value, belief, shape = message["value"], message["infer"].get(MESSAGE), message["fn"].shape()
    if not (isinstance(belief, InputBelief) and is_integrated(belief, message["name"])):
        if jnp.shape(value) != shape:
            raise ValueError(
                f"The value of `{message['name']}` has shape {jnp.shape(value)}; the model's latent inputs have shape {shape}."
            )
        return LatentInputs(value if dtype is None else value.astype(dtype))
    if belief.loc.shape != shape or belief.scale.shape != shape:
        raise ValueError(
            f"The guide's Gaussian of `{message['name']}` has mean and scale of shapes {belief.loc.shape} and "
            f"{belief.scale.shape}; the model's latent inputs have shape {shape}."
        )
    # NumPyro draws in the default dtype, not in that of the parameters.
    return LatentInputs(value.astype(belief.loc.dtype), belief.loc, belief.scale)
