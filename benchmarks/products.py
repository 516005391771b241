"""Cycles of a product with weights in 16 and in 8 bits, by the TPU compiler, without a TPU.

    python benchmarks/products.py [--topology v5e-4] [--sizes 8192 4096 14336] [--forms bfloat16 int8 ...] [--parts]

Compiles a product of `positions x inputs` with `inputs x outputs`, and the product with both of its gradients, in each
form, and prints cycles of all instructions and how many times as fast as bfloat16 that is. Operands are bfloat16
arguments of the program, so that rounding them is counted and nothing before it is. `bare` multiplies int8 operands
that are given, and `aqt` and `qwix` are the products of these libraries, if they are installed (aqtp 0.9, qwix 0.1.8):
int8 forward and for the gradient of the inputs, bfloat16 for that of the weights. --parts prints the longest
instructions.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

from zero.costs import hlo
from zero.costs.topology import find_devices, prepare_environment
from zero.hosts import xla_options
from zero.models.products import PRODUCTS

NUMBERS = (((2,), (0,)), ((), ()))


def aqt() -> Callable[..., jax.Array]:
    """AQT's third configuration, with the gradient of weights in 16 bits and without random rounding."""
    config: Any = importlib.import_module("aqt.jax.v2.config")

    dot_general = config.config_v3(fwd_bits=8, dlhs_bits=8, drhs_bits=None)
    config.set_stochastic_rounding(dot_general, False, False, "jax.uniform")
    return lambda x, w: dot_general(x, w, NUMBERS)


def qwix() -> Callable[..., jax.Array]:
    """Qwix's product of quantized training, which its provider puts in the place of `lax.dot_general`."""
    dot_general_qt: Any = importlib.import_module("qwix._src.core.dot_general_qt")

    options: Any = {"lhs_qtype": "int8", "rhs_qtype": "int8", "dlhs_grad_qtype": "int8", "dlhs_residual_qtype": "int8"}
    of_product = dot_general_qt.DotGeneralQtConfig(**options, use_original_residuals=True)
    return lambda x, w: dot_general_qt.dot_general_qt(x, w, NUMBERS, of_product)


def cycles(program: Callable[..., Any], shapes: list[jax.ShapeDtypeStruct], devices: list[Any], parts: bool) -> int:
    """Estimated cycles of all instructions of a program on one device."""
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(devices[0])) for x in shapes]
    options: Any = xla_options.for_tpu(devices[0].device_kind, len(devices), True)
    text = jax.jit(program).lower(*placed).compile(options).as_text()
    bodies, entry = hlo.computations(str(text))
    counted = [instruction for instruction in bodies[entry] if instruction.cycles]
    if parts:
        for instruction in sorted(counted, key=lambda one: -(one.cycles or 0))[:8]:
            print(f"    {instruction.cycles:>10,} {instruction.name} {instruction.result[:70]} {instruction.op_name}")
    return sum(instruction.cycles or 0 for instruction in counted)


def with_gradients(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, grad: jax.Array) -> Any:
    y, pull_back = jax.vjp(product, x, w)
    return y, pull_back(grad)


def bare(x: jax.Array, w: jax.Array) -> jax.Array:
    sums = lax.dot_general(x, w, NUMBERS, preferred_element_type=jnp.int32)
    return (sums.astype(jnp.float32) * 1e-4).astype(jnp.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e-4")
    parser.add_argument("--sizes", type=int, nargs=3, default=(8192, 4096, 14336))
    parser.add_argument("--forms", nargs="+", default=["bfloat16", "bare", "int8", "aqt", "qwix"])
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    prepare_environment(options.topology)
    devices = find_devices(options.topology)
    positions, inputs, outputs = options.sizes

    def arrays(dtype: Any) -> list[jax.ShapeDtypeStruct]:
        shapes = ((1, positions, inputs), (inputs, outputs), (1, positions, outputs))
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    first: dict[str, int] = {}
    libraries = {"aqt": aqt, "qwix": qwix}
    for form in options.forms:
        programs: dict[str, tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]]
        if form == "bare":
            programs = {"forward": (bare, arrays(jnp.int8)[:2])}
        else:
            product = libraries[form]() if form in libraries else PRODUCTS["auto" if form == "bfloat16" else form]
            both = partial(with_gradients, product)
            programs = {"forward": (product, arrays(jnp.bfloat16)[:2]), "with gradients": (both, arrays(jnp.bfloat16))}
        for name, (program, shapes) in programs.items():
            count = cycles(program, shapes, devices, options.parts)
            first.setdefault(name, count)
            print(
                f"{options.topology} {form:>9} {name:>14}: {count:>11,} cycles, {first[name] / count:.2f}", flush=True
            )


if __name__ == "__main__":
    main()
