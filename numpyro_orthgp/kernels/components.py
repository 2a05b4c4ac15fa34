"""Finds the term of a sum of kernels that an inter-domain feature belongs to.

Inter-domain inducing variables (patches, Fourier features) are functionals of one independent part of the function:
f = f_1 + f_2 and u = L[f_1]. Their covariances involve only the kernel of f_1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from numpyro_orthgp.kernels.base import Named, Restricted, Scaled, Sum
from numpyro_orthgp.kernels.hyperparameters import per_latent
from numpyro_orthgp.types import Array, KernelLike

__all__ = ["Component", "component"]


class Component(NamedTuple):
    """A term of a sum of kernels: ``variance * kernel.on(...)``.

    :param kernel: the kernel without factors and restrictions.
    :param variances: its factors, shapes () or (P,).
    :param restrictions: its restrictions to columns, outermost first.
    :param place: its position in the sum. It distinguishes terms with the same kernel.
    """

    kernel: Any
    variances: tuple[Any, ...] = ()
    restrictions: tuple[Restricted, ...] = ()
    place: tuple[str, ...] = ()

    def columns(self, X: Array) -> Array:
        """The columns of inputs (..., n, D) that the kernel sees, shape (..., n, D')."""
        for restriction in self.restrictions:
            X = restriction.columns(X)
        return X

    def scaled(self, values: Array) -> Array:
        """``values``, shape (..., n, m), times the factors. Factors of shape (P,) add a leading axis of P."""
        for variance in self.variances:
            values = per_latent("variance", variance, values, axes=2) * values
        return values


def component(kernel: KernelLike, matches: Callable[[Component], bool], what: str) -> Component:
    """The only term of a kernel for which ``matches`` is true.

    :param what: names the feature and the kernels that it needs, for the error message.
    :raises ValueError: if no term matches, or several do.
    """
    found = [term for term in _components(kernel, Component(kernel)) if matches(term)]
    if len(found) != 1:
        raise ValueError(f"{what}; got {len(found) or 'no'} such terms in {kernel}.")
    return found[0]


def _components(kernel: Any, outer: Component) -> Iterator[Component]:
    if type(kernel) is Sum:
        yield from _components(kernel.left, outer._replace(place=(*outer.place, "left")))
        yield from _components(kernel.right, outer._replace(place=(*outer.place, "right")))
    elif type(kernel) is Scaled:
        yield from _components(kernel.kernel, outer._replace(variances=(*outer.variances, kernel.variance)))
    elif type(kernel) is Named:
        yield from _components(kernel.kernel, outer)
    elif type(kernel) is Restricted:
        yield from _components(kernel.kernel, outer._replace(restrictions=(*outer.restrictions, kernel)))
    else:
        yield outer._replace(kernel=kernel)
