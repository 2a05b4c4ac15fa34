"""Errors for functions and marginals that are used as an array, a number or a condition.

JAX's own functions, such as ``jnp.exp(f(X))``, look for ``__jax_array__``. So do the operators of arrays, before they pass
``array + f(X)`` on to us, so an error there would make this sum impossible. Only functions get an error in our words. NumPy asks
``__array_ufunc__``, for functions and operators alike.
"""

from __future__ import annotations

import numbers
import operator
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["NoArray", "NoNumber"]

_VALUES = (
    "In a model give it to a likelihood of numpyro_orthgp, likelihoods.Gaussian(f(X), s), which integrates it out, or draw values, "
    "f(X).sample(). After a fit take f(X).mean and f(X).variance."
)


class NoArray:
    """An object that NumPy would silently convert to an array of one object."""

    _instead: ClassVar[str] = "It is a function: call it at inputs, f(X).mean."

    if not TYPE_CHECKING:  # or type checkers would allow it

        def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise TypeError(f"{type(self).__name__} is no array. {self._instead}")

        def _refuse(self, *args: Any) -> NoReturn:
            self.__array__()

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
        __matmul__ = __rmatmul__ = __neg__ = __pow__ = __rpow__ = __float__ = __int__ = __getitem__ = __iter__ = _refuse
        __lt__ = __le__ = __gt__ = __ge__ = _refuse

        @property
        def __jax_array__(self) -> NoReturn:
            # The name of JAX's own check; without it an error of JAX follows, "requires ndarray or scalar arguments".
            if sys._getframe(1).f_code.co_name == "_arraylike":
                self.__array__()
            raise AttributeError

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{type(self).__name__} has no `{name}`. {self._instead}", name=name, obj=self)


def _refuse_as_value(x: Any) -> None:
    try:
        x.__array__()
    except TypeError as error:
        raise ValueError(error) from None  # JAX would put words of its own in place of a TypeError's


# Functions of `jax.lax` look for handlers of classes. These are not public: where there are none, an error in JAX's words follows.
with suppress(ImportError, AttributeError):
    import_module("jax._src.dtypes").register_canonicalize_value_handler(NoArray, _refuse_as_value)

# What NumPy makes of an operator with one of its arrays or numbers in front.
_OPERATORS = {
    np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul, np.divide: operator.truediv,
    np.matmul: operator.matmul, np.power: operator.pow, np.remainder: operator.mod, np.floor_divide: operator.floordiv,
    np.less: operator.lt, np.less_equal: operator.le, np.greater: operator.gt, np.greater_equal: operator.ge,
    np.equal: operator.eq, np.not_equal: operator.ne,
}  # fmt: skip


class NoNumber(NoArray):
    """The marginals of a function: Gaussian distributions and no numbers."""

    _instead: ClassVar[str] = f"f(X) has the distribution of f at each row. {_VALUES}"

    if not TYPE_CHECKING:

        def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
            if method != "__call__" or options or ufunc not in _OPERATORS:
                self.__array__()
            # JAX's arrays leave operators to us, see above; NumPy's would come back here.
            return _OPERATORS[ufunc](*(jnp.asarray(a) if isinstance(a, np.ndarray | np.generic) else a for a in inputs))

        def _refuse_number(self, *args: Any) -> NoReturn:
            raise TypeError(f"f(X) is a distribution at each row, and no number. {_VALUES}")

        __float__ = __int__ = __complex__ = __round__ = _refuse_number

        def _refuse_function(self, *args: Any) -> NoReturn:
            raise TypeError(
                "Only sums with arrays, multiples, and f(X) @ W are Gaussian, so other operations on f(X) give no marginals. Use "
                "numpyro_orthgp.Likelihood(f(X), lambda f: ...), whose f are values, or draw f: f(X).sample()."
            )

        __abs__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __rtruediv__ = __rpow__ = _refuse_function
        __divmod__ = __rdivmod__ = _refuse_function

        def _refuse_condition(self, *args: Any) -> NoReturn:
            raise TypeError(
                "f(X) is a distribution at each row, so it is neither true nor false, nor above or below a number. The probability "
                "of f(X) > c is jax.scipy.stats.norm.sf(c, m.mean, m.variance**0.5) for m = f(X). Draws can be compared: "
                "f(X).sample() > c."
            )

        __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse_condition
        __invert__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse_condition

        def __eq__(self, other: object) -> bool:
            """Whether they are the same object.

            :raises TypeError: for an array or a number.
            """
            if isinstance(other, (numbers.Number, np.ndarray, jax.Array)):
                self._refuse_condition()
            return self is other

        __hash__ = None

        def __len__(self) -> NoReturn:
            raise TypeError("f(X) has no length. The number of its rows is f(X).shape[0].")

        def __iter__(self) -> NoReturn:
            raise TypeError(
                "f(X) cannot be iterated over or unpacked. Outputs are f(X)[..., p] for p in range(f(X).shape[-1]); for single "
                f"rows call f(X[i : i + 1]). {_VALUES}"
            )
