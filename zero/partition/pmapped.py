"""The only place that calls `jax.pmap`, or knows what it was called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from zero.partition.collectives.ordering import in_order

# Variables of `jax.pmap` that a pmapped function is made again from.
NEEDED = frozenset(
    ("axis_name", "in_axes", "out_axes_flat", "out_axes_tree", "static_broadcasted_tuple", "donate_tuple")
)


def pmap(fn: Callable[..., Any], axis_name: str, devices: Sequence[Any] | None = None, **options: Any) -> Any:
    """`jax.pmap` of a per-device function, on CPU with its collectives `in_order`."""
    is_cpu = (devices or jax.devices())[0].platform == "cpu"
    return jax.pmap(in_order(fn) if is_cpu else fn, axis_name=axis_name, devices=devices, **options)


class PmapArguments(NamedTuple):
    """What `jax.pmap` was called with.

    Attributes:
      fn: the function of one device.
      donate_argnums: as `jax.pmap` takes them, static arguments included in the count.
    """

    fn: Callable[..., Any]
    axis_name: Any
    in_axes: Any
    out_axes: Any
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]

    def on(self, devices: Sequence[Any]) -> Any:
        """The same pmapped function on other devices."""
        return jax.pmap(
            self.fn,
            self.axis_name,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
            static_broadcasted_argnums=self.static_argnums,
            donate_argnums=self.donate_argnums,
            devices=devices,
        )


def arguments_of_pmap(pmapped: Any) -> PmapArguments | None:
    """What a pmapped function was made from, which jax keeps in the variables of nested functions.

    Returns:
      None for what `jax.pmap` has not made.

    Raises:
      RuntimeError: this version of jax keeps them elsewhere.

    >>> arguments_of_pmap(jax.pmap(abs, "i", in_axes=None, static_broadcasted_argnums=0, donate_argnums=1))[1:]
    ('i', None, 0, (0,), (1,))
    """
    infer = _variables(getattr(pmapped, "lower", None)).get("infer_params")
    if not hasattr(pmapped, "__wrapped__") or infer is None or hasattr(pmapped, "trace"):  # `jax.jit` has the latter
        return None
    made = _variables(infer)
    if missing := NEEDED - made.keys():
        names = ", ".join(sorted(missing))
        raise RuntimeError(f"jax {jax.__version__} hides {names} of a pmapped function")
    static = tuple(made["static_broadcasted_tuple"])
    donated = list(made["donate_tuple"])  # counted without the static arguments
    for number in sorted(static):
        donated = [place + 1 if place >= number else place for place in donated]
    out_axes = jax.tree.unflatten(made["out_axes_tree"], made["out_axes_flat"])
    return PmapArguments(pmapped.__wrapped__, made["axis_name"], made["in_axes"], out_axes, static, tuple(donated))


def _variables(fn: Callable[..., Any] | None) -> dict[str, Any]:
    """The variables that a nested function has from the function around it."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return {}
    cells = getattr(fn, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
