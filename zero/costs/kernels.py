"""Predicted seconds of kernels, for which the compiler writes no cycles into the text of a program."""

from __future__ import annotations

import math
import re

from zero.costs import hlo
from zero.costs.hlo import Instruction
from zero.hosts.speeds import Speed

NOTED_FLOPS = re.compile(r'"cost_estimate":{"flops":"(\d+)"')  # by the author of a kernel
_ZERO_KERNEL = re.compile(r'zero_attention_(?:fwd|bwd)_(\d+).*"cost_estimate":{"flops":"(\d+)"')  # width, operations
# Products of two matrices per block of scores, over the width of queries and keys and over the width of values, in each
# of jax's splash attention kernels, and of tokamax's. The fused "dkv" computes the gradient of queries too, once per
# block of keys, so one of its results has a dimension more than the queries.
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2), "fused": (3, 2)}
_MASK = re.compile(r"s8\[(?:\d+,)?(\d+),(\d+)\]")
_HEADS = re.compile(r"(?:bf16|f32)\[([\d,]+)\]")
# tokamax's kernels list the blocks that they compute, and note the sizes of blocks and which dimension of queries is
# the minor one. A list of all blocks is shortened on the device, to those of a causal row.
_LISTED = re.compile(r"s(?:8|32)\[(\d+)\]")
_BLOCKS = re.compile(r'\\"block_q(?:_dkv)?\\": (\d+), \\"block_kv(?:_dkv)?\\": (\d+)')
_POSITIONS_LAST = '\\"q_layout\\": 2'
# XLA's inversion of triangular matrices, its dimensions and the innermost one; its bundles per element of 128 matrices
# that lie side by side in lanes, or per row of a matrix that has the lanes for itself (measured in delta-rule.md).
_INVERSION = re.compile(r'custom_call_target="InvertDiagBlocks')
_LAID_OUT = re.compile(r"f32\[([\d,]+)\]\{(\d+)")
_BUNDLES_PER_ELEMENT = 18.1
_BUNDLES_PER_ROW = 27.9


def kernel_seconds(instruction: Instruction, speed: Speed) -> float:
    """Predicted seconds of one run of a Pallas kernel: the largest of its lower bounds.

    They are the time to read and write its arrays, and that of its products. If these are not known, the operations in
    its `cost_estimate` at the device's peak and its cycles (`kernel_cycles.py`) are bounds, too.
    """
    shapes = _operand_shapes(instruction)
    bounds = [(sum(hlo.sizes_of(instruction.result)) + sum(hlo.sizes_of(shapes))) / speed.memory]
    products = product_seconds(instruction, speed)
    noted = NOTED_FLOPS.search(instruction.rest)
    if products is not None:
        bounds.append(products)
    elif noted is not None:
        bounds.append(int(noted[1]) / speed.flops)
    if products is None and instruction.cycles is not None:
        bounds.append(instruction.cycles / speed.clock)
    return max(bounds)


def product_seconds(instruction: Instruction, speed: Speed) -> float | None:
    """Seconds of the products of an attention kernel, at the share of the peak that it reaches; None for other kernels.

    zero's own kernels note their operations in the program; splash attention's follow from its shapes.
    """
    zero_kernel = _ZERO_KERNEL.search(instruction.rest)
    if zero_kernel is not None and speed.fused:
        width, flops = map(int, zero_kernel.groups())
        return flops / (speed.attention(width) * speed.flops)
    splash = _SPLASH.match(instruction.name)
    if splash is None or speed.splash is None:
        return None
    shapes = _operand_shapes(instruction)
    heads = [_dims(found) for found in _HEADS.findall(shapes)[:3]]
    if len(heads) < 3:
        return None
    queries, _, values = heads
    if _POSITIONS_LAST in instruction.rest:
        queries[-2:] = reversed(queries[-2:])
    scores = _computed_scores(instruction, shapes, queries[-2], splash[1])
    if scores is None:
        return None
    kernel = splash[1]
    if kernel == "dkv" and any(len(_dims(result)) > len(queries) for result in _HEADS.findall(instruction.result)):
        kernel = "fused"
    over_width, over_values = _PRODUCTS[kernel]
    columns = over_width * _padded(queries[-1]) + over_values * _padded(values[-1])
    shares = speed.splash
    if queries[-1] > 128 and speed.wide_splash is not None:
        shares = speed.wide_splash
    share: float = getattr(shares, kernel)
    return 2 * math.prod(queries[:-2]) * scores * columns / (share * speed.flops)


def _computed_scores(instruction: Instruction, shapes: str, positions: int, kernel: str) -> int | None:
    """The scores of one head in the blocks that a splash attention kernel computes; None if it does not say."""
    if mask := _MASK.search(shapes):
        blocks, widest = map(int, mask.groups())
        if kernel == "dkv":  # the grid of keys and queries is transposed
            blocks, widest = sorted((blocks, widest), reverse=True)
        return sum(min(number + 1, widest) for number in range(blocks)) * (positions // blocks) ** 2
    listed, sizes = _LISTED.search(shapes), _BLOCKS.search(instruction.rest)
    if listed is None or sizes is None:
        return None
    of_queries, of_keys = map(int, sizes.groups())
    computed = int(listed[1])
    if computed * of_queries * of_keys == positions**2:
        computed = sum(math.ceil(end / of_keys) for end in range(of_queries, positions + 1, of_queries))
    return computed * of_queries * of_keys


def is_inversion(instruction: Instruction) -> bool:
    """Whether it is XLA's inversion of triangular matrices."""
    return _INVERSION.search(instruction.rest) is not None


def inversion_seconds(instruction: Instruction, speed: Speed) -> float:
    """Seconds of XLA's inversion of triangular matrices, which has no cycles in the text (one core of a chip computes).

    >>> from zero.hosts.speeds import SPEEDS
    >>> inversion = Instruction("i", "f32[4,32,64,64]{3,2,1,0:T(8,128)}", "custom-call", "")
    >>> inversion_seconds(inversion, SPEEDS["TPU v5"]) / inversion_seconds(
    ...     inversion._replace(result="f32[128,64,64]{0,2,1:T(8,128)}"), SPEEDS["TPU v5"]
    ... )  # doctest: +ELLIPSIS
    3.08...
    """
    match = _LAID_OUT.match(instruction.result)
    assert match is not None, instruction.result
    *matrices, _, size = _dims(match[1])
    innermost = int(match[2])
    if innermost < len(matrices):
        groups = math.prod(matrices) // matrices[innermost] * math.ceil(matrices[innermost] / 128)
        bundles = groups * _BUNDLES_PER_ELEMENT * size**2
    else:
        bundles = math.prod(matrices) * _BUNDLES_PER_ROW * size
    return bundles / speed.clock


def _dims(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _padded(size: int) -> int:
    """The columns that a product occupies: a unit has 128.

    >>> _padded(64), _padded(192)
    (128, 256)
    """
    return 128 * math.ceil(size / 128)


def _operand_shapes(instruction: Instruction) -> str:
    return instruction.rest.partition("operand_layout_constraints={")[2].partition("}}")[0]
