"""Seconds of the instructions of a program for TPU before the compiler has counted cycles: products, vectors, memory.

An instruction takes as long as the busiest of the matrix units, the vector units and the memory. Their rates are those
that the compiler's own cycles show (benchmarks/measured/planning.md).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import NamedTuple

from zero.costs.hlo import Bodies, Instruction
from zero.hosts.speeds import Speed

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_BITS = re.compile(r"\d+")
_NOT_IN_HBM = "S("  # in the layout of an array
_FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota", "reshape", "slice")
_VIEWS = ("bitcast", "reshape")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_PRECISION = re.compile(r"operand_precision=\{(\w+),")
_PASSES = {"highest": 6, "high": 3}  # products of bfloat16 for one of float32


class Rates(NamedTuple):
    """What instructions reach in the compiler's cycles.

    Attributes:
      products: share of the peak of the matrix units.
      memory: share of the bandwidth of HBM.
      vmem: bandwidth of VMEM in an elementwise instruction, as a multiple of HBM's.
      elements: elementwise results per cycle.
      reductions: share of the bandwidth of HBM in sums that are not fused.
    """

    products: float
    memory: float
    vmem: float
    elements: float
    reductions: float


# By generation; of v2, of which no program was compared, there are none.
RATES = {
    "TPU v3": Rates(0.93, 0.57, 0.82, 0.42 * 1024, 0.29),
    "TPU v4": Rates(0.90, 0.26, 0.65, 0.78 * 1024, 0.20),
    "TPU v5 lite": Rates(0.98, 0.41, 0.68, 5.0 * 1024, 0.08),
    "TPU v5": Rates(0.96, 0.38, 1.0, 1.34 * 1024, 0.10),
    "TPU v6 lite": Rates(0.84, 0.41, 0.47, 0.73 * 1024, 0.07),
    "TPU7x": Rates(0.91, 0.32, 0.91, 0.99 * 1024, 0.60),
}


class Work(NamedTuple):
    """What an instruction does.

    Attributes:
      flops: of products, by the dtype of their operands: "int8", "float8", or "" of bfloat16.
      elements: that vector instructions compute.
      hbm: bytes moved to and from HBM.
      vmem: bytes moved to and from VMEM.
    """

    flops: dict[str, float]
    elements: float
    hbm: float
    vmem: float


def estimated_seconds(instruction: Instruction, work: Work, speed: Speed, rates: Rates) -> float:
    """Seconds of an instruction that does not run beside others."""
    hbm = work.hbm / speed.memory
    vmem = work.vmem / speed.memory
    if instruction.op == "reduce":
        return (hbm + vmem) / rates.reductions
    if work.flops:
        products = sum(flops / speed.products(operands) for operands, flops in work.flops.items())
        return max(products / rates.products, hbm / rates.memory)
    return max(hbm / rates.memory + vmem / rates.vmem, work.elements / (rates.elements * speed.clock))


class Works:
    """Reads the work of instructions from the computations of a program."""

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self._users: dict[str, defaultdict[str, list[Instruction]]] = {}

    def of(self, instruction: Instruction, results: dict[str, str]) -> Work:
        """The work of an instruction.

        Args:
          instruction: a fusion, or one instruction.
          results: the types of the instructions around it, by name.
        """
        operands = [results.get(name, "") for name in instruction.operands]
        flops: defaultdict[str, float] = defaultdict(float)
        if instruction.op != "fusion":
            elements = self._compute(instruction, operands, flops)
            moved = [(array, 1.0) for array in (instruction.result, *operands)]
        else:
            called = instruction.called[0]
            elements = self._compute_all(called, flops)
            moved = self._moved(instruction.result, operands, called)
        sizes = [(array, share * _bytes(array)) for array, share in moved]
        hbm = sum(size for array, size in sizes if _NOT_IN_HBM not in array)
        vmem = sum(size for array, size in sizes if _NOT_IN_HBM in array)
        return Work(dict(flops), elements, hbm, vmem)

    def _compute_all(self, name: str, flops: dict[str, float]) -> float:
        results = {x.name: x.result for x in self.bodies[name]}
        elements = 0.0
        for x in self.bodies[name]:
            if _is_view(x):
                continue
            if x.op == "fusion":
                elements += self._compute_all(x.called[0], flops)
            else:
                elements += self._compute(x, [results.get(operand, "") for operand in x.operands], flops)
        return elements

    def _compute(self, instruction: Instruction, operands: list[str], flops: dict[str, float]) -> float:
        """Adds the operations of a product to `flops`; returns the elements that others compute."""
        op = instruction.op
        if op == "convolution":
            narrow = {"s8": "int8", "f8": "float8"}.get(operands[0][:2], "")
            flops[narrow] += convolution_flops(instruction, operands)
            return 0
        if op == "dot":
            flops[""] += dot_flops(instruction, operands)
            return 0
        if op in _FREE:
            return 0
        if op.startswith("reduce"):
            return max(map(_elements, operands), default=0)
        if op == "dynamic-update-slice":
            return _elements(operands[1])
        return _elements(instruction.result)

    def _moved(self, result: str, operands: list[str], called: str) -> list[tuple[str, float]]:
        """The arrays that a fusion reads and writes, and the share of each: of a stack only the slices."""
        moved = []
        for number, array in enumerate(operands):
            elements = _elements(array)
            if elements:
                moved.append((array, min(1.0, self._elements_read(called, number) / elements)))
        results = [match[0] for match in _ARRAY.finditer(result)]
        root = self.bodies[called][-1]
        roots = root.operands if root.op == "tuple" else [root.name] * len(results)
        for array, made in zip(results, roots, strict=True):
            moved.append((array, self._share_written(called, made)))
        return moved

    def _share_written(self, called: str, name: str) -> float:
        """The share of a result that a fusion writes: of a stack in place only the slice."""
        inner = {x.name: x for x in self.bodies[called]}
        made = inner[name]
        while _is_view(made):
            made = inner[made.operands[0]]
        if made.op in ("parameter", "get-tuple-element"):
            return 0.0
        if made.op == "fusion" and self.bodies[made.called[0]][-1].op != "tuple":
            return self._share_written(made.called[0], self.bodies[made.called[0]][-1].name)
        if made.op == "dynamic-update-slice":
            return _elements(inner[made.operands[1]].result) / max(1, _elements(made.result))
        return 1.0

    def _elements_read(self, called: str, number: int) -> float:
        """The elements that a fusion reads of an operand: of one that it takes slices of, these."""
        for x in self.bodies[called]:
            if x.op == "parameter" and x.rest.startswith(f"{number})"):
                return self._elements_used(called, x.name)
        return math.inf

    def _elements_used(self, called: str, name: str) -> float:
        used = 0.0
        for user in self._users_in(called)[name]:
            if _is_view(user):
                used += self._elements_used(called, user.name)
            elif user.op in ("dynamic-slice", "slice", "gather"):
                used += _elements(user.result)
            elif user.op == "fusion":
                used += self._elements_read(user.called[0], user.operands.index(name))
            elif user.op != "tuple" and (user.op != "dynamic-update-slice" or user.operands[0] != name):
                return math.inf
        return used

    def _users_in(self, called: str) -> defaultdict[str, list[Instruction]]:
        if called not in self._users:
            users: defaultdict[str, list[Instruction]] = defaultdict(list)
            for x in self.bodies[called]:
                for operand in dict.fromkeys(x.operands):
                    users[operand].append(x)
            self._users[called] = users
        return self._users[called]


def _is_view(instruction: Instruction) -> bool:
    """Whether an instruction is its operand, with another layout of tiles perhaps."""
    is_alias = instruction.op == "fusion" and "output_to_operand_aliasing={{}: (0, {})}" in instruction.rest
    return instruction.op in _VIEWS or (is_alias and "copy_fusion" in instruction.called[0])


def convolution_flops(instruction: Instruction, operands: list[str]) -> float:
    """Operations of a convolution, as which XLA for TPU writes every product.

    A dimension of a batch, or of several heads, is one of the window, in which most positions are padding.

    >>> heads = Instruction("c", "bf16[4,1024,12,64]{1,3,2,0}", "convolution",
    ...     "%a, %b), window={size=1x12 pad=0_0x11_11 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f")
    >>> convolution_flops(heads, ["bf16[4,1024,768,1]", "bf16[768,12,64,1]"]) == 2 * 4 * 1024 * 768 * 768
    True
    """
    labels = _LABELS.search(instruction.rest)
    assert labels is not None, instruction.rest
    left, right, out = (_dims(array) for array in (*operands[:2], instruction.result))
    window = _WINDOW.search(instruction.rest)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    precision = _PRECISION.search(instruction.rest)
    flops = 2.0 * _PASSES.get(precision[1], 1) if precision else 2.0
    flops *= out[labels[3].index("b")] * out[labels[3].index("f")] * right[labels[2].index("i")]
    for dim, size in enumerate(map(int, fields.get("size", "").split("x") if fields else [])):
        given = {key: values.split("x")[dim] for key, values in fields.items()}
        low = int(given.get("pad", "0_0").split("_")[0])
        stride, left_dilation, right_dilation = (
            int(given.get(key, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        extent = left_dilation * left[labels[1].index(str(dim))]
        valid = 0
        for position in range(out[labels[3].index(str(dim))]):
            places = range(position * stride - low, position * stride - low + size * right_dilation, right_dilation)
            valid += sum(1 for place in places if 0 <= place < extent and place % left_dilation == 0)
        flops *= valid
    return flops


def dot_flops(instruction: Instruction, operands: list[str]) -> float:
    """Operations of a matrix product, as XLA for CPUs writes it.

    >>> heads = Instruction("d", "bf16[4,256,128]{2,1,0}", "dot",
    ...     "%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}")
    >>> dot_flops(heads, ["bf16[4,256,64]", "bf16[4,128,64]"]) == 2 * 4 * 256 * 128 * 64
    True
    """
    contracted = _CONTRACTED.search(instruction.rest)
    assert contracted is not None, instruction.rest
    left = _dims(operands[0])
    summed = math.prod(left[int(dim)] for dim in contracted[1].split(",") if dim)
    return 2.0 * math.prod(_dims(instruction.result)) * summed


def _dims(array: str) -> list[int]:
    match = _ARRAY.search(array)
    return [] if match is None else [int(size) for size in match[2].split(",") if size]


def _elements(array: str) -> int:
    match = _ARRAY.search(array)
    return 0 if match is None else _size(match[2], match[3] or "")


def _size(dims: str, layout: str) -> int:
    """The elements of an array as it is laid out: the innermost dimension fills lanes of 128.

    >>> _size("48,1024,64", "2,1,0:T(8,128)(2,1)")
    6291456
    """
    sizes = [int(size) for size in dims.split(",") if size]
    innermost = layout.partition(":")[0].partition(",")[0]
    if len(sizes) > 1 and innermost.isdigit() and ",128)" in layout:
        sizes[int(innermost)] = 128 * math.ceil(sizes[int(innermost)] / 128)
    return math.prod(sizes)


def _bytes(arrays: str) -> float:
    size = 0.0
    for dtype, dims, layout in _ARRAY.findall(arrays):
        bits = 8 if dtype == "pred" else int(_BITS.findall(dtype)[0])
        size += _size(dims, layout) * bits / 8
    return size
