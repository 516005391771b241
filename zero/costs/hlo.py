"""The instructions of a compiled program, its traffic, and the part of it that is hidden, read from the program's text.

XLA's own totals count the body of a loop once.

XLA for TPU runs a collective beside other instructions in one of two ways. Either it, or the call of a computation that
contains it, has a start and a done, and runs beside the instructions between them. Or it is a chain of fusions that
have the same `chain_id`: a start, fusions in each of which a matrix product and a part of the collective run, and a
done; each of them contains the collective.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)$", re.DOTALL)
_CHAIN = re.compile(r'chain_id="(\d+)"')
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_ON_CORE = re.compile(r"called_computations=\{%?([\w.\-]+)\}")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
# A mesh whose devices are numbered from 0 on, or in the order of `device_ids`, and its axes that a group has.
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]+)\]"
    r"(?:, device_ids=\(\[(?P<devices>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?\))? \{(?P<grouped>[^}:]+)\}"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**63 - 1  # written by the compiler for a narrow product that is fused with a collective
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_COUNTER = re.compile(r"[su]32\[\]")
_NAME = re.compile(r"[\w.\-]+")
_OPERAND = re.compile(r"%([\w.\-]+)")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ASYNC_CALLS = ("async-start", "call-start")  # of a computation; the latter on a SparseCore
_PRODUCTS = ("dot", "convolution")
# Targets of custom calls that multiply: of cuBLAS and cuDNN, and kernels of Pallas for TPU.
_KERNELS = re.compile(r'custom_call_target="(__cublas|__cudnn|tpu_custom_call)')


class Instruction(NamedTuple):
    """One instruction of a computation: `name = result op(rest`."""

    name: str
    result: str
    op: str
    rest: str

    @property
    def cycles(self) -> int | None:
        """The TPU compiler's estimate, if it has one."""
        match = _CYCLES.search(self.rest)
        if match is None or self.has_unknown_cycles:
            return None
        return int(match[1])

    @property
    def has_unknown_cycles(self) -> bool:
        """Whether the compiler has noted that it cannot estimate it.

        >>> Instruction("f", "", "fusion", '"estimated_cycles":"9223372036854775807"').has_unknown_cycles
        True
        """
        match = _CYCLES.search(self.rest)
        return match is not None and int(match[1]) == _UNKNOWN_CYCLES

    @property
    def op_name(self) -> str:
        """The path of the operation in the traced function, or the name of an argument."""
        match = _OP_NAME.search(self.rest)
        if match is None:
            return ""
        return _ESCAPED.sub(r"\1", match[1])

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        return _OPERAND.findall(self.rest.partition(")")[0])

    @property
    def called(self) -> list[str]:
        """Names of computations that it calls, except in a loop.

        >>> Instruction("c", "f32[]", "conditional", "%p), branch_computations={%first, %second}").called
        ['first', 'second']
        """
        names = _CALLED.findall(self.rest)
        for branches in _BRANCHES.findall(self.rest):
            names += _NAME.findall(branches)
        return names


Bodies = dict[str, list[Instruction]]  # the instructions of each computation


class Collective(NamedTuple):
    """One collective of a program.

    In a ring of k devices, a gather or a scatter of n bytes sends n (k - 1) / k, an all-reduce twice as much.
    """

    kind: str  # one of `COLLECTIVES`
    sent: int  # bytes per device in one run of the program; a loop counts once per iteration
    arguments: str  # the rest of its line
    is_hidden: bool  # whether a matrix product runs at the same time


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program.

    Raises:
      ValueError: the iterations of a loop or the devices of a collective cannot be read.
    """
    bodies, entry = computations(text)
    beside_call = _beside_calls(bodies)
    collectives: list[Collective] = []
    chains: dict[str, int] = {}  # the place of each chain among the collectives
    for name, runs in runs_of(bodies, entry).items():
        for number, instruction in enumerate(bodies[name]):
            kind = kind_of(instruction)
            if kind is None:
                continue
            chain = chain_of(instruction)
            if instruction.op != kind:
                beside = _until_done(bodies[name], number)
            elif chain:
                beside = bodies[name]
            else:
                beside = beside_call.get(name, [])
            is_hidden = _any_multiplies(beside, bodies)
            if chain and chain in chains:
                index = chains[chain]
                first = collectives[index]
                collectives[index] = first._replace(is_hidden=first.is_hidden or is_hidden)
                continue
            if chain:
                chains[chain] = len(collectives)
            collectives.append(Collective(kind, round(runs * bytes_sent(instruction)), instruction.rest, is_hidden))
    return collectives


def _beside_calls(bodies: Bodies) -> dict[str, list[Instruction]]:
    """The instructions that run beside each computation that is called asynchronously."""
    beside = {}
    for body in bodies.values():
        for number, instruction in enumerate(body):
            if instruction.op in ASYNC_CALLS:
                for called in instruction.called:
                    beside[called] = _until_done(body, number)
                    for inner in bodies[called]:
                        if inner.op == "call":
                            beside |= dict.fromkeys(inner.called, beside[called])
    return beside


def is_kernel(instruction: Instruction) -> bool:
    """Whether it is a kernel of Pallas for TPU."""
    return 'custom_call_target="tpu_custom_call"' in instruction.rest


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction is or starts, None for all others."""
    kind = instruction.op.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def chain_of(instruction: Instruction) -> str | None:
    """The number of the chain of fusions that a collective is spread over; None if it is not spread."""
    match = _CHAIN.search(instruction.rest)
    if match is None:
        return None
    return match[1]


def bytes_by_kind(collectives: Iterable[Collective]) -> dict[str, int]:
    """Bytes that one device sends in one run of the program, by kind of collective."""
    totals: Counter[str] = Counter()
    for collective in collectives:
        totals[collective.kind] += collective.sent
    return dict(totals)


def across_hosts(collectives: Iterable[Collective], hosts: Sequence[int]) -> list[Collective]:
    """The collectives with a group of devices of several hosts; `hosts` has the host of each device."""

    def crosses(group: list[int]) -> bool:
        return len({hosts[device] for device in group}) > 1

    return [collective for collective in collectives if any(map(crosses, groups_of(collective.arguments)))]


def hidden_share(collectives: Iterable[Collective]) -> float | None:
    """The share of the bytes of gathers that are sent while matrix products run; None without gathers."""
    gathers = [collective for collective in collectives if collective.kind == "all-gather"]
    total = sum(gather.sent for gather in gathers)
    if total == 0:
        return None
    return sum(gather.sent for gather in gathers if gather.is_hidden) / total


def _until_done(body: list[Instruction], start: int) -> list[Instruction]:
    """The instructions between the start of a collective and its done."""
    name = body[start].name
    ends = (n for n in range(start + 1, len(body)) if body[n].op.endswith("-done") and body[n].operands == [name])
    return body[start + 1 : next(ends)]


def _multiplies(instruction: Instruction, bodies: Bodies) -> bool:
    """Whether an instruction is a matrix product, a kernel of them, or a fusion that contains one."""
    op = instruction.op
    if op == "custom-call":
        return _KERNELS.search(instruction.rest) is not None
    if op == "fusion":
        return any(_any_multiplies(bodies[name], bodies) for name in _CALLED.findall(instruction.rest))
    return op in _PRODUCTS


def _any_multiplies(body: list[Instruction], bodies: Bodies) -> bool:
    return any(_multiplies(instruction, bodies) for instruction in body)


def bytes_sent(instruction: Instruction) -> float:
    """Bytes that one device sends for a collective in one run of it, as in `Collective`."""
    op = instruction.op
    kind = kind_of(instruction)
    sizes = sizes_of(instruction.result)
    if op == "all-gather-start":  # (operands, results)
        size = sum(sizes[len(sizes) // 2 :])
    elif op in ("collective-permute-start", "all-to-all-start"):  # (operand, result, contexts)
        size = sizes[1]
    else:
        size = sum(sizes)
    if kind == "collective-permute":
        return size
    k = len(groups_of(instruction.rest)[0])
    if kind == "all-reduce":
        return size * 2 * (k - 1) / k
    if kind == "reduce-scatter":  # the result is 1/k of the operand
        return size * (k - 1)
    return size * (k - 1) / k


def sizes_of(arrays: str) -> list[int]:
    """Bytes of each array in a type such as `(f32[8]{0}, bf16[4,2]{1,0})`."""
    return [_array_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(arrays)]


def groups_of(rest: str) -> list[list[int]]:
    """The devices of each group of a collective, or of each pair of a permutation, in one of XLA's three notations."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}", rest):
        return [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return _numbers(iota[2], iota[3]).reshape(-1, int(iota[1])).tolist()
    if mesh := _MESH.search(rest):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh["sizes"])}
        grouped = re.findall(r"'([^']+)'", mesh["grouped"])
        order = [*(name for name in sizes if name not in grouped), *grouped]
        devices = mesh["devices"] or ",".join(map(str, sizes.values()))
        numbers = _numbers(devices, mesh["order"]).reshape(list(sizes.values()))
        numbers = numbers.transpose([list(sizes).index(name) for name in order])
        return numbers.reshape(-1, math.prod(sizes[name] for name in grouped)).tolist()
    raise ValueError(f"replica groups not understood: {rest[:200]}")


def _numbers(shape: str, order: str | None) -> np.ndarray:
    """The numbers from 0 on in an array of this shape, with its dimensions in another order: "16,8" and "1,0"."""
    sizes = list(map(int, shape.split(",")))
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    if order is None:
        return numbers
    return numbers.transpose(list(map(int, order.split(","))))


def _array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(_BITS.findall(dtype)[0])
    return math.prod(map(int, filter(None, dims.split(",")))) * bits // 8


def computations(text: str) -> tuple[Bodies, str]:
    """The instructions of each computation, and the name of the entry."""
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            lines[name] = []
            if match[1]:
                entry = name
        elif line == "}":
            name = ""
        elif name and line.startswith(" "):
            lines[name].append(line)
        elif name:  # metadata of kernels has line breaks
            lines[name][-1] += "\n" + line
    bodies = {name: _instructions(body) for name, body in lines.items()}
    return {name: _calls_on_cores(_as_run(name, body)) for name, body in bodies.items()}, entry


def _instructions(lines: list[str]) -> list[Instruction]:
    """The instructions among the lines of a computation."""
    matches = (_INSTRUCTION.match(line) for line in lines)
    return [Instruction(*match.groups()) for match in matches if match is not None]


def _as_run(name: str, body: list[Instruction]) -> list[Instruction]:
    """The body of a fusion that XLA for TPU writes as an all-reduce and a slice, and runs as a reduce-scatter."""
    if not name.startswith("all-reduce-scatter"):
        return body
    reduced = []
    for instruction in body:
        if instruction.op == "all-reduce":
            instruction = instruction._replace(op="reduce-scatter", result=body[-1].result)
        reduced.append(instruction)
    return reduced


def _calls_on_cores(body: list[Instruction]) -> list[Instruction]:
    """Calls on a SparseCore in the notation of libtpu 0.0.52, rewritten in the notation of 0.0.42.

    A `custom-call-start` names the computation, and a `custom-call-update`, which has the operands, starts it.
    """
    called: dict[str, str] = {}  # the computation of each start, by its name
    calls = []
    for instruction in body:
        if instruction.op == "custom-call-start" and (match := _CALLED_ON_CORE.search(instruction.rest)):
            called[instruction.name] = match[1]
        if instruction.op == "custom-call-update" and instruction.operands[0] in called:
            computation = called[instruction.operands[0]]
            instruction = instruction._replace(op="call-start", rest=f"{instruction.rest}, calls=%{computation}")
        calls.append(instruction)
    return calls


def runs_of(bodies: Bodies, entry: str, unknown_trips: int | None = None) -> dict[str, int]:
    """How many times each computation runs; `unknown_trips` as for `loop_of`."""
    runs: defaultdict[str, int] = defaultdict(int)

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for instruction in bodies[name]:
            if instruction.op == "while":
                body, trips = loop_of(instruction, bodies, unknown_trips)
                visit(body, times * trips)
                continue
            for called in instruction.called:
                visit(called, times)

    visit(entry, 1)
    return runs


def loop_of(instruction: Instruction, bodies: Bodies, unknown_trips: int | None = None) -> tuple[str, int]:
    """The body of a loop and its iterations: as XLA has noted, or from a condition that compares a counter.

    The counter starts at 0, or later where XLA runs the first iterations ahead of the loop.

    Args:
      instruction: the loop.
      bodies: of its program.
      unknown_trips: the iterations of a loop that ends when its data say so.

    Raises:
      ValueError: the iterations cannot be read, and `unknown_trips` is None.
    """
    rest = instruction.rest
    condition, body = (re.search(rf"{part}=%?([\w.\-]+)", rest) for part in ("condition", "body"))
    assert condition and body, rest
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', rest):
        return body[1], int(noted[1])
    instructions = list(bodies[condition[1]])
    for compared in bodies[condition[1]]:
        for name in compared.called:
            instructions += bodies[name]
    limits = [x.rest.partition(")")[0] for x in instructions if x.op == "constant" and _COUNTER.match(x.result)]
    if len(limits) != 1 or not any("direction=LT" in x.rest for x in instructions):
        if unknown_trips is not None:
            return body[1], unknown_trips
        lines = "\n".join(f"{x.name} = {x.result} {x.op}({x.rest}" for x in instructions)
        raise ValueError(f"the number of iterations of a loop cannot be read from its condition:\n{lines}")
    return body[1], int(limits[0]) - _first_count(instruction, bodies[condition[1]], bodies)


def loops_that_data_end(bodies: Bodies) -> list[Instruction]:
    """The loops whose iterations cannot be read from the program."""
    loops = [instruction for body in bodies.values() for instruction in body if instruction.op == "while"]
    return [loop for loop in loops if loop_of(loop, bodies, unknown_trips=-1)[1] == -1]


def _first_count(loop: Instruction, condition: list[Instruction], bodies: Bodies) -> int:
    """The value of a loop's counter before the first iteration; 0 if the program does not contain it as a constant."""
    counters = [x for x in condition if x.op == "get-tuple-element" and _COUNTER.match(x.result)]
    around = next((body for body in bodies.values() if loop in body), [])
    by_name = {instruction.name: instruction for instruction in around}
    carried = by_name.get(loop.operands[0])
    if len(counters) != 1 or carried is None or carried.op != "tuple":
        return 0
    index = counters[0].rest.partition("index=")[2].partition(",")[0]
    count = by_name.get(carried.operands[int(index)])
    while count is not None and count.op in ("copy", "bitcast"):
        count = by_name.get(count.operands[0])
    if count is not None and count.op == "constant":
        return int(count.rest.partition(")")[0])
    return 0
