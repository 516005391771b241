"""FLOPs of matrix products, counted in a jaxpr."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from zero.models.branches import branches_of
from zero.models.config import GPTConfig
from zero.models.gpt import GPT, variable_shapes
from zero.models.part import ATTENTION


def model_flops(config: GPTConfig, rows: int, context: int, *, frozen: bool = False) -> int:
    """FLOPs of the forward and backward pass on `rows` sequences of `context` tokens, without rematerialization.

    The backward pass of a matrix product is two products of the same size, so this is three times the forward pass; it
    is one where the parameters are `frozen`, whose adapters are not counted.
    Attention counts all positions of the row, as in the source, or the positions of the window; the delta rule counts
    the products of its chunks. Branches count with their outputs.

    Source: "model FLOPs" of Chowdhery et al., PaLM, arXiv 2204.02311, appendix B.
    """
    # T5's bias is looked up by a matrix product, which is not a model FLOP.
    positions = "none" if config.positions == "t5" else config.positions
    whole = dataclasses.replace(config, windows=(0,), positions=positions)
    model = GPT(whole)
    variables = variable_shapes(whole)
    tokens = jax.ShapeDtypeStruct((rows, context), jnp.int32)

    def forward(variables: Any, tokens: jax.Array) -> Any:
        inputs = {branch.key: branch.inputs_like(tokens) for branch in branches_of(config)}
        return model.apply(variables, tokens, tokens, inputs=inputs, method="scores")

    products = matmul_flops(jax.make_jaxpr(forward)(variables, tokens).jaxpr)
    unseen = sum(context - min(context, window or context) for window in config.windows)
    layers = config.layer_count * config.mixers.count(ATTENTION) // len(config.mixers)
    local = 2 * 2 * rows * context * (unseen * layers // len(config.windows)) * config.num_head * config.head_width
    return (2 if frozen else 3) * (products - local)


def matmul_flops(jaxpr: Any) -> int:
    """FLOPs of all matrix products of a jaxpr, two per multiply-add. The body of a scan counts once per iteration.

    The most expensive branch of a `cond` counts.

    Raises:
      ValueError: a matrix product in a loop of unknown length.
    """
    return flops_by_operands(jaxpr).total()


def flops_by_operands(jaxpr: Any) -> Counter[str]:
    """`matmul_flops` by what is multiplied: "int8", "float8", and "" for anything wider.

    >>> x = jnp.ones((2, 3), jnp.int8)
    >>> flops_by_operands(jax.make_jaxpr(lambda x: x @ x.T)(x).jaxpr)
    Counter({'int8': 24})
    """
    total: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            total[_operands(eqn)] += _product_flops(eqn)
            continue
        inner = [flops_by_operands(sub) for sub in jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "while" and any(flops.total() for flops in inner):
            raise ValueError("a matrix product in a while loop of unknown length")
        if eqn.primitive.name == "cond":
            inner = [max(inner, key=Counter.total)]
        for flops in inner:
            for operands, count in flops.items():
                total[operands] += eqn.params.get("length", 1) * count
    return total


def _operands(eqn: Any) -> str:
    """The narrowest form that both operands of a product have."""
    names = [variable.aval.dtype.name for variable in eqn.invars[:2]]
    return next((form for form in ("int8", "float8") if all(name.startswith(form) for name in names)), "")


def _product_flops(eqn: Any) -> int:
    shape = eqn.invars[0].aval.shape
    out = eqn.outvars[0].aval.shape
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
    else:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        if set(numbers.lhs_ragged_dimensions) & set(contracted):  # groups split the contracted dimension
            out = out[1:]
    return 2 * math.prod(out) * math.prod(shape[dim] for dim in contracted)
