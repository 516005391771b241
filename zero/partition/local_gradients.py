"""Gradients that differ between devices, as values that are not arrays until a sharded optimizer reduces them.

They are a device's own unreduced gradients, or its slices of reduced ones. A transform that computes with them on the
way, such as clipping by the global norm around a sharded optimizer, would use different numbers on each device without
an error. Here it gets no numbers at all.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import numpy as np

from zero.partition.layout import PyTree, named_leaves

_READ = (
    "this computes with gradients that zero.local marked, which differ between devices until zero.shard_optimizer "
    "reduces them. Put a transform that reads gradients inside: zero.shard_optimizer(optax.chain(...), axis_name); or "
    "reduce them first, by lax.pmean(grads, axis_name), and pass reduction=None to zero.shard_optimizer. Functions "
    "that only take arrays, such as jax.jit and lax.cond, need unmarked gradients: call zero.local inside them"
)


class NoArrayError(ValueError, AttributeError):
    """An array attribute of a marked gradient was read; as an AttributeError it also works with `hasattr`."""


class LocalGradient:
    """One device's own gradient of a leaf, or its slice of a reduced one, which only a sharded optimizer reads.

    It has the shape and dtype of the array. Any other use raises a ValueError: it is neither an array nor a pytree node
    through which a function of arrays could be mapped.
    """

    __slots__ = ("_array",)

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self._array)

    @property
    def dtype(self) -> Any:
        return jax.dtypes.result_type(self._array)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def __jax_array__(self) -> NoReturn:
        # jax looks this up wherever it expects an array: under jit, lax.cond, jnp functions and arithmetic with arrays.
        raise ValueError(_READ)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(_READ)

    def __getattr__(self, name: str) -> NoReturn:
        raise NoArrayError(f"a gradient that zero.local marked has no {name!r}: {_READ}")

    def __repr__(self) -> str:
        # Functions that check for arrays themselves, such as optax's abs_sq, quote it in their errors.
        return f"LocalGradient({self.dtype}{list(self.shape)}; read it inside zero.shard_optimizer)"


def _refused(*_: Any) -> NoReturn:
    raise ValueError(_READ)


for _operator in (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor"),
    *("lshift", "rshift"),
):
    setattr(LocalGradient, f"__{_operator}__", _refused)
    setattr(LocalGradient, f"__r{_operator}__", _refused)
for _operator in (
    *("neg", "pos", "abs", "invert", "bool", "int", "float", "complex", "index", "round", "len", "iter", "getitem"),
    *("lt", "le", "gt", "ge", "contains"),
):
    setattr(LocalGradient, f"__{_operator}__", _refused)


def local(grads: PyTree) -> PyTree:
    """Marks a device's own gradients, which a sharded optimizer reduces: `tx.update(zero.local(grads), ...)`.

    Use it in place of `lax.pmean(grads, axis_name)`, or after the last computation with the slices of `scatter_mean`.
    Until `update` reads them, the leaves are not arrays, because their values differ between devices: computing with
    them raises a ValueError.

    Per device: arrays in, a tree of the same structure out. No communication.

    >>> import jax.numpy as jnp
    >>> grads = local({"w": jnp.ones((2, 3))})
    >>> grads
    {'w': LocalGradient(float32[2, 3]; read it inside zero.shard_optimizer)}
    >>> grads["w"] / jnp.float32(2)
    Traceback (most recent call last):
    ValueError: this computes with gradients that zero.local marked, which differ between devices until ...
    """
    return jax.tree.map(lambda x: x if isinstance(x, LocalGradient) else LocalGradient(x), grads)


def arrays_of(updates: PyTree, axis_name: str, reduction: str | None) -> PyTree:
    """The arrays of gradients marked by `local`, or, for None, of unmarked whole reduced gradients.

    Raises:
      TypeError: a leaf is marked but should not be, or vice versa.
    """
    for name, x in named_leaves(updates):
        is_marked = isinstance(x, LocalGradient)
        if is_marked == (reduction is not None):
            continue
        if is_marked:
            raise TypeError(
                f"leaf {name}: zero.local marks gradients that are not reduced, and reduction=None expects reduced "
                "ones: leave reduction out, or pass lax.pmean(grads, axis_name)"
            )
        if reduction == "scattered":
            raise TypeError(
                f"leaf {name}: the gradient is an array, expected a slice that zero.local marks, after the last "
                "computation with slices: tx.update(zero.local(grads), ...). A transform around this optimizer would "
                "compute with the slices of each device by itself"
            )
        raise TypeError(
            f"leaf {name}: the gradient is an array, expected this device's own, not reduced, which zero.local marks: "
            f"write zero.local(grads) where the program has lax.pmean(grads, {axis_name!r}). Gradients that are "
            "reduced already need zero.shard_optimizer(..., reduction=None)"
        )
    return jax.tree.map(_array, updates)


def _array(x: Any) -> Any:
    return x._array if isinstance(x, LocalGradient) else x
