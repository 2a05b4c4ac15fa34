r"""Deep Gaussian processes: functions of functions.

The doubly stochastic bound of Salimbeni and Deisenroth 2017 needs only marginals: draw the first layer at the data, evaluate the
second layer at the draw, and so on. In a model this is ``f2(f1(X).independent().sample())``. :class:`DeepGP` does this for any
number of layers. It can draw several values for each point; their average inside the logarithm gives a tighter bound (Salimbeni,
Dutordoir, Hensman, Deisenroth 2019). With :math:`\ell_s(u)` the expected log density at the draw :math:`h_s` given the inducing
variables u,

.. math:: \log p(y) + \mathrm{KL} \ge E_{q(u)} E_{h_1, \dots, h_S \mid u} \log \tfrac1S \sum_s w_s e^{\ell_s(u)}
    \ge E_{h} \log \tfrac1S \sum_s w_s e^{E_{q(u_L)} \ell_s}

The second step takes the last layer's expectation in closed form; it holds because log-sum-exp is convex. The draws of a point
share the inducing variables of all layers that they pass.

With one draw this is a bound for the deep GP itself. With more draws it is a bound for another model: there, as in FITC, residuals
of inner layers are independent between data points given the inducing variables. The reason is that the average is taken point by
point, while residuals of nearby inputs are correlated. If inducing variables explain little of an inner layer, the value can
exceed the deep GP's evidence (docs/theory/deep.md, with a test).

Draws from the marginals, each with other inducing variables, would give no bound: the average over q(u) would move into the
logarithm without the KL divergence that pays for it. So each point has one e ~ q(e) for each layer, and its draws differ in their
residuals (``functions/shared_draws.py``). In a tightened inner layer, residuals are drawn with variance v r and weighted by the
ratio of both densities, which depends only on v and the standardized draw. With many draws v no longer matters, as a test shows.

**Groups of rows.** The last layer's residual may be tightened in groups of rows (:mod:`numpyro_orthgp.functions.groups`). The cost
of a group in the bound depends on the draws at all its rows, so inner layers are drawn jointly within groups. This takes
N G (M + G) for each function.

**Predictions** are mixtures: with functions from ``posterior``, :meth:`~numpyro_orthgp.DeepGP.particles` draws independently, and
``likelihoods.Mixture`` averages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_orthgp.closures import as_pytree
from numpyro_orthgp.errors import check_inputs, check_integer, check_is_key
from numpyro_orthgp.functions.draws import drawn_functions
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.keys import key_in_run, prng_key
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.paths import Paths
from numpyro_orthgp.functions.shared_draws import draw_by_groups, draw_grouped
from numpyro_orthgp.math.grouped import Grouping
from numpyro_orthgp.math.products import matmul
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["DeepGP"]

Mean = Callable[[Array], Array] | ArrayLike | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeepGP:
    r"""A stack of layers: :math:`f_L(\dots f_2(f_1(x) + m_1(x)) \dots)`.

    ::

        f1 = gp("f1", k1, [Z1, O1], num_latents=5)
        f2 = gp("f2", k2, [Z2, O2])
        deep = DeepGP([f1, f2], means=[W])          # inner layer: f1(X) + X @ W
        with numpyro.plate("data", N, subsample_size=len(X)):
            numpyro.sample("y", likelihoods.Gaussian(deep(X), noise), obs=y)

    It is a pytree of functions that are declared as usual. So every layer may have orthogonal sets, mean-only points or its own
    guide. If a guide tightens an inner layer, each evaluation adds the cost of v at each point. To predict, build the stack again
    from the functions of :func:`posterior` and average over draws, :meth:`particles` with :class:`likelihoods.Mixture`.

    >>> import jax.numpy as jnp, numpyro
    >>> from numpyro_orthgp import DeepGP, gp, kernels
    >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     f1 = gp("f1", kernels.RBF(1.0), X, num_latents=2)
    ...     f2 = gp("f2", kernels.RBF(1.0), jnp.concatenate([X, X], 1))
    ...     deep = DeepGP([f1, f2], means=[jnp.ones((1, 2))])
    ...     print(deep(X).shape)
    (5,)

    :param layers: functions, the first at the data's inputs; or, except for :meth:`particles`, any callables that map inputs to
        :class:`Marginals`.
    :param means: the mean function of each inner layer: a matrix W of shape (D, P) for ``X @ W`` (:func:`init.linear_mean`), a
        callable, or ``None``; by default there are none. Without means, draws from many layers lose their inputs (Duvenaud et al.
        2014).
    :raises ValueError: if there is no layer, or not one mean for each inner layer; when called, if the number of a mean's columns
        is not that of its layer's functions.
    """

    layers: Sequence[Any]
    means: Sequence[Mean] | None = field(default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.layers, list | tuple):  # a placeholder of a tree transformation
            return
        inner = len(self.layers) - 1
        if inner < 0:
            raise ValueError("`layers` must hold at least one function; got none.")
        if hasattr(self.means, "shape") or callable(self.means):
            raise TypeError(
                "`means` must be a list, one entry for each inner layer; got a single mean. Did you mean `means=[W]`?"
            )
        if isinstance(self.means, list | tuple) and len(self.means) != inner:
            raise ValueError(
                f"`means` must have one entry for each inner layer, {inner} for {inner + 1} layers; got {len(self.means)}. The "
                "last layer's is added to what comes out: deep(X) + mean."
            )
        if self.means is not None:
            means = tuple(as_pytree(mean) if callable(mean) else mean for mean in self.means)
            object.__setattr__(self, "means", means)

    def __call__(self, X: ArrayLike, *, rng_key: PRNGKey | None = None) -> Marginals:
        """The last layer's marginals at one draw of the layers before it.

        While fitting, each row is drawn separately; if the last layer is tightened in groups of rows, jointly within groups.

        :param X: inputs, shape (B, D).
        :param rng_key: by default one of the model's (:func:`numpyro.prng_key`).
        :return: shape (B,), or (B, P) if the last layer has P functions.
        :raises ValueError: without a key.
        """
        H, grouping = check_inputs("X", X), getattr(self.layers[-1], "grouping", None)
        self._check_no_groups()
        for i, layer in enumerate(self.layers[:-1]):
            marginals = layer(H) if grouping is None else _by_groups(layer, H, grouping)
            mean = self._mean(i, H, marginals.shape[1] if len(marginals.shape) == 2 else 1)
            if mean is not None:
                marginals = marginals + (mean[:, 0] if len(marginals.shape) == 1 else mean)
            if grouping is None:
                marginals = _row_by_row(marginals)
            H = _columns(marginals.sample(None if rng_key is None else jax.random.fold_in(check_is_key(rng_key), i)))
        return self.layers[-1](H)

    def particles(self, X: ArrayLike, num_samples: int, *, rng_key: PRNGKey | None = None) -> tuple[Marginals, Array]:
        """The last layer's marginals at several draws for each point, for :class:`likelihoods.Mixture`.

        While fitting, the draws of a point share inducing variables. The mixture is then a bound for the model whose inner
        residuals are independent between points (see the module); more draws make it tighter.
        With functions from :func:`posterior` these are independent draws of the posterior, and the mixture is the predictive
        distribution of each point.

        :param X: inputs, shape (B, D).
        :param num_samples: number of draws S for each point.
        :param rng_key: by default one of the model's (:func:`numpyro.prng_key`).
        :return: marginals of shape (B S,) or (B S, P), with the draws of a point next to each other, and their log importance
            weights, shape (B, S), zero unless an inner layer is tightened.
        :raises TypeError: if a layer is not a :class:`GPFunction`.
        :raises ValueError: if ``num_samples`` is not positive, or without a key.
        """
        rng_key, H = self._checked(X, num_samples, rng_key), check_inputs("X", X)
        B = len(H)
        log_weights = jnp.zeros((B, num_samples), H.dtype)
        # All draws of a point have the same inputs in the first layer: project them once.
        H, repeats = H[:, None], num_samples
        for i, layer in enumerate(self.layers[:-1]):
            key = jax.random.fold_in(rng_key, i)
            mean = self._mean(i, H.reshape(-1, H.shape[-1]), layer.num_latents or 1)
            H, weights = _particles(layer, H, key, repeats)
            if mean is not None:
                H = H + jnp.repeat(mean, repeats, axis=0)
            log_weights, repeats = log_weights + weights.reshape(B, num_samples), 1
            H = H.reshape(B, num_samples, H.shape[-1])
        H = jnp.broadcast_to(H, (B, num_samples, H.shape[-1]))
        # The rows of one point are not draws of one function.
        return self.layers[-1](H.reshape(B * num_samples, -1)).independent(), log_weights

    def sample_paths(self, rng_key: PRNGKey, num: int, *, num_features: int = 1024) -> Callable[[ArrayLike], Array]:
        """Draw functions from the whole stack: paths of each layer, evaluated at the paths of the layer before.

        :param num: number of functions.
        :param num_features: random features of each path, see :meth:`GPFunction.sample_paths`.
        :return: ``paths(X)`` of shape (num, B), or (num, B, P) if the last layer has P functions, at inputs of shape (B, D).
        :raises TypeError, ValueError: as :meth:`GPFunction.sample_paths` does, and for layers that are not functions.
        """
        self._check_layers()
        keys = jax.random.split(check_is_key(rng_key), len(self.layers))
        paths = [f.sample_paths(key, num, num_features=num_features) for f, key in zip(self.layers, keys, strict=True)]
        return Partial(_run_paths, self, paths)

    def _mean(self, i: int, H: Array, num: int) -> Array | None:
        """The mean of layer i, with ``num`` functions, at inputs H: shape (n, num), or ``None``."""
        mean = None if self.means is None else self.means[i]
        if mean is None:
            return None
        if not callable(mean) and jnp.shape(mean)[:1] != H.shape[1:]:
            raise ValueError(
                f"`means[{i}]` must have shape ({H.shape[1]}, {num}), from the columns of the inputs to the {num} function(s) of "
                f"layers[{i}]; got {jnp.shape(mean)}."
            )
        values = _columns(jnp.asarray(mean(H) if callable(mean) else matmul(H, jnp.asarray(mean))))
        if values.shape != (len(H), num):
            raise ValueError(
                f"`means[{i}]` must give shape ({len(H)}, {num}) for the {num} function(s) of layers[{i}]; got {values.shape}. "
                "Did you mean gp(..., num_latents=P)?"
            )
        return values

    def _checked(self, X: ArrayLike, num_samples: int, rng_key: PRNGKey | None) -> PRNGKey:
        check_integer("num_samples", num_samples)
        self._check_layers()
        self._check_no_groups()
        if self.layers[-1].grouping is not None:
            raise ValueError(
                "`group_size` makes groups of different rows, but these rows are several draws of one point. "
                "Leave `group_size` out, or take one draw, deep(X)."
            )
        rng_key = (
            prng_key(jnp.asarray(X)) if rng_key is None else key_in_run(self.layers[0].names, rng_key, jnp.asarray(X))
        )
        if rng_key is None:
            raise ValueError(
                "`particles` needs a random key: give `rng_key`, or run the model under numpyro.handlers.seed. Inference without "
                "randomness (NUTS) cannot draw inner layers."
            )
        return rng_key

    def _check_no_groups(self) -> None:
        if any(getattr(layer, "grouping", None) is not None for layer in self.layers[:-1]):
            raise ValueError(
                "`group_size` is not for inner layers: they are drawn, and the residual of a draw is tightened "
                "by one number for all rows. Give `group_size` for the last layer alone: "
                "group_size={'its name': 16}."
            )

    def _check_layers(self) -> None:
        for layer in self.layers:
            if not isinstance(layer, GPFunction):
                raise TypeError(
                    f"Several draws need layers made by gp() or posterior(); got {type(layer).__name__}. Call the stack instead, "
                    "deep(X), and average over several keys."
                )


def _run_paths(deep: DeepGP, paths: Sequence[Paths], X: ArrayLike) -> Array:
    H = check_inputs("X", X)
    for i, path in enumerate(paths[:-1]):
        rows = H.reshape(-1, H.shape[-1])
        values = path(H)
        H = values if values.ndim == 3 else values[..., None]
        mean = deep._mean(i, rows, H.shape[2])
        if mean is not None:
            H = H + mean.reshape(-1, H.shape[1], H.shape[2])  # one for all paths in the first layer
    return paths[-1](H)


def _particles(layer: GPFunction, H: Array, rng_key: PRNGKey, repeats: int) -> tuple[Array, Array]:
    """Draws at (B, R, D) inputs, shape (B R repeats, P), and their log weights, (B R repeats)."""
    B, R, D = H.shape
    if not layer.fitting:
        values = layer(H.reshape(B * R, D)).independent()._draw(rng_key, (repeats,))
        values = _columns(jnp.moveaxis(values, 0, 1).reshape(B * R * repeats, *values.shape[2:]))
        return values, jnp.zeros(B * R * repeats, H.dtype)
    draw = draw_grouped(layer, H, rng_key, repeats)
    values = jnp.moveaxis(draw.values, 0, 2)
    return _columns(values.reshape(B * R * repeats, *values.shape[3:])), jnp.moveaxis(draw.log_weights, 0, 2).ravel()


def _by_groups(layer: Any, H: Array, grouping: Grouping) -> Marginals:
    """Marginals that are drawn jointly within each group, since the cost of a group depends on all its rows.

    :raises TypeError: for a layer without joint draws.
    """
    if not isinstance(layer, GPFunction):
        raise TypeError(
            "A last layer that is tightened in groups of rows needs inner layers made by gp(), which are drawn jointly within "
            f"groups; got {type(layer).__name__}. Leave `group_size` out for the last layer."
        )
    joint = Partial(draw_by_groups, replace(layer, grouping=grouping), H)
    return replace(layer(H), joint=joint) if layer.fitting else layer(H)


def _row_by_row(marginals: Marginals) -> Marginals:
    """Marginals that are drawn row by row while fitting, since each y depends on its own row of a layer."""
    fitting = any(f.fitting for f, _ in drawn_functions(marginals.joint))
    return marginals.independent() if fitting else marginals


def _columns(values: Array) -> Array:
    """Inputs of the next layer, shape (B, P)."""
    return values[:, None] if values.ndim == 1 else values
