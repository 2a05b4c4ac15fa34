"""Who takes part in which task. No library is imported here: each has an interpreter of its own."""

from __future__ import annotations

from typing import NamedTuple


class Library(NamedTuple):
    """A module of this folder, with a function for each task it has, and the packages whose versions are printed."""

    module: str
    packages: tuple[str, ...]


LIBRARIES = {
    "ours": Library("ours", ("jax", "jaxlib", "numpyro", "optax")),
    "plain": Library("plain", ("jax", "jaxlib", "optax")),
    "floor": Library("floor", ()),
    "gpflow": Library("gpflow_", ("gpflow", "tensorflow", "tensorflow-cpu")),
    "gpytorch": Library("gpytorch_", ("gpytorch", "linear-operator", "torch")),
    "gpjax": Library("gpjax_", ("gpjax", "jax", "jaxlib")),
}
PEERS = ("gpflow", "gpytorch", "gpjax")


class Contender(NamedTuple):
    """One row of a table.

    :param library: a key of ``LIBRARIES``.
    :param variant: what the module's function of the task is told. Of several variants of a peer the fastest of the first round
        goes on, so that it is shown at its best.
    :param same: whether its value must equal that of the first contender.
    """

    library: str
    variant: str
    same: bool = True

    @property
    def name(self) -> str:
        return self.variant if self.library in ("ours", "plain") else f"{self.library} ({self.variant})"


PLAIN = Contender("plain", "plain JAX")
FLOOR = Contender("floor", "matrix product", same=False)

# The first contender of a task is what the others are compared with.
TASKS: dict[str, list[Contender]] = {
    "step": [
        Contender("ours", "SVGP"),
        Contender("ours", "SVGP, in a loop"),
        PLAIN,
        FLOOR,
        Contender("gpflow", "graph"),
        Contender("gpflow", "XLA"),
        Contender("gpytorch", "default"),
        Contender("gpytorch", "Cholesky"),
        Contender("gpytorch", "one dtype"),
        Contender("gpytorch", "one dtype, one thread"),
        Contender("gpjax", "jit"),
        Contender("gpjax", "loop"),
    ],
    "solve": [
        Contender("ours", "SVGP, all points"),
        Contender("ours", "SOLVE-GP", same=False),
        Contender("ours", "SOLVE-GP, tight", same=False),
        Contender("ours", "SVGP, half the points", same=False),
        Contender("ours", "SVGP, all points, in a loop"),
        Contender("ours", "SOLVE-GP, in a loop", same=False),
    ],
    "odvgp": [
        Contender("ours", "SVGP"),
        Contender("ours", "ODVGP", same=False),
        Contender("ours", "ODVGP, columns subsampled", same=False),
    ],
    "collapsed": [
        Contender("ours", "titsias2009"),
        Contender("ours", "titsias2025", same=False),
        Contender("ours", "titsias2009, at once"),
        Contender("gpflow", "graph"),
        Contender("gpflow", "XLA"),
        Contender("gpytorch", "default"),
        Contender("gpytorch", "default, one thread"),
        Contender("gpjax", "jit"),
    ],
    "prediction": [
        Contender("ours", "SVGP"),
        Contender("ours", "SVGP, diagonalized"),
        Contender("gpflow", "graph"),
        Contender("gpflow", "XLA"),
        Contender("gpytorch", "default"),
        Contender("gpytorch", "one dtype"),
        Contender("gpytorch", "one dtype, one thread"),
        Contender("gpjax", "jit"),
        Contender("gpjax", "jit, conditioned once"),
    ],
    "startup": [
        Contender("ours", "SVGP, fit"),
        Contender("ours", "SVGP, fit, hyperparameters with priors", same=False),
        Contender("ours", "SVGP, svi.init"),
        Contender("ours", "SVGP, jitted svi.init"),
        PLAIN,
        Contender("gpflow", "graph"),
        Contender("gpytorch", "default"),
        Contender("gpjax", "jit"),
    ],
}
TASKS["restart"] = TASKS["startup"]
STARTS = ("startup", "restart")  # what is timed is a process, not steps


def tolerance(contender: Contender, dtype: str) -> float:
    """Relative difference from the first contender's value that is put down to rounding."""
    if dtype == "float32":
        return 1e-3
    fixed_jitter = contender == PLAIN  # 1e-6 in any dtype, where the others have 1e-10
    return 1e-4 if fixed_jitter else 1e-6
