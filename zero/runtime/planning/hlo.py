"""Traffic of a compiled program, and the part of it that is hidden, read from the program's text.

XLA's own totals count the body of a loop once.

XLA for TPU runs a collective beside other instructions in one of two ways. Either it has a start and a done, and what
is scheduled between them runs meanwhile. Or it is a chain of fusions that have the same `chain_id`: a start, fusions in
each of which a matrix product and a part of the collective run, and a done; each of them contains the collective.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z\-]*)\((.*)$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) =")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_PRODUCTS = ("dot", "convolution")
# Targets of custom calls that multiply: of cuBLAS and cuDNN, and kernels of Pallas for TPU.
_KERNELS = re.compile(r'custom_call_target="(__cublas|__cudnn|tpu_custom_call)')


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
      kind: one of `COLLECTIVES`.
      sent: bytes that one device sends for it in one run of the program; a loop counts once per iteration. Of n bytes
        on k devices, in a ring: a gather or a scatter sends n (k - 1) / k, an all-reduce twice as much.
      arguments: the rest of its line.
      is_hidden: whether a matrix product runs at the same time.
    """

    kind: str
    sent: int
    arguments: str
    is_hidden: bool


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program.

    Raises:
      ValueError: the iterations of a loop or the devices of a collective cannot be read.
    """
    bodies, entry = _computations(text)
    found: list[Collective] = []
    chains: dict[str, int] = {}  # the place among those found of each chain
    for name, runs in _runs(bodies, entry).items():
        for number, line in enumerate(bodies[name]):
            match = _INSTRUCTION.match(line)
            kind = match[2].removesuffix("-start") if match else None
            if match is None or kind not in COLLECTIVES:
                continue
            chain = _CHAIN.search(match[3])
            if match[2] != kind:
                beside = _until_done(bodies[name], number)
            else:
                beside = bodies[name] if chain else []
            is_hidden = any(_multiplies(other, bodies) for other in beside)
            if chain and chain[1] in chains:
                place = chains[chain[1]]
                found[place] = found[place]._replace(is_hidden=found[place].is_hidden or is_hidden)
                continue
            if chain:
                chains[chain[1]] = len(found)
            found.append(Collective(kind, round(runs * _sent(kind, *match.groups())), match[3], is_hidden))
    return found


def bytes_by_kind(found: Iterable[Collective]) -> dict[str, int]:
    """Bytes that one device sends in one run of the program, by kind of collective."""
    totals: Counter[str] = Counter()
    for collective in found:
        totals[collective.kind] += collective.sent
    return dict(totals)


def across_hosts(found: Iterable[Collective], hosts: Sequence[int]) -> list[Collective]:
    """Those with a group of devices of several hosts; `hosts` has the host of each device."""
    return [collective for collective in found if _spans_hosts(collective.arguments, hosts)]


def hidden_share(found: Iterable[Collective]) -> float | None:
    """The share of the bytes of gathers that are sent while matrix products run; None where nothing is gathered."""
    gathers = [collective for collective in found if collective.kind == "all-gather"]
    total = sum(gather.sent for gather in gathers)
    return sum(gather.sent for gather in gathers if gather.is_hidden) / total if total else None


def _until_done(lines: list[str], start: int) -> list[str]:
    """The lines between the start of a collective and its done."""
    name = _NAME.match(lines[start])
    assert name, lines[start]
    operand = re.compile(rf"-done\(.*%?{re.escape(name[1])}\)")
    done = next(number for number in range(start + 1, len(lines)) if operand.search(lines[number]))
    return lines[start + 1 : done]


def _multiplies(line: str, bodies: dict[str, list[str]]) -> bool:
    """Whether an instruction is a matrix product, a kernel of them, or a fusion that contains one."""
    match = _INSTRUCTION.match(line)
    if match is None:
        return False
    called = _CALLED.findall(match[3]) if match[2] == "fusion" else []
    is_product = match[2] in _PRODUCTS or (match[2] == "custom-call" and _KERNELS.search(match[3]) is not None)
    return is_product or any(_multiplies(inner, bodies) for name in called for inner in bodies[name])


def _sent(kind: str, result: str, op: str, rest: str) -> float:
    sizes = [_array_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(result)]
    if op == "all-gather-start":  # (operands, results)
        size = sum(sizes[len(sizes) // 2 :])
    elif op == "collective-permute-start":  # (operand, result, contexts)
        size = sizes[1]
    else:
        size = sum(sizes)
    if kind == "collective-permute":
        return size
    k = len(_groups(rest)[0])
    # The result of a reduce-scatter is 1/k of its operand.
    return size * {"all-reduce": 2 * (k - 1) / k, "reduce-scatter": k - 1}.get(kind, (k - 1) / k)


def _groups(rest: str) -> list[list[int]]:
    """The devices of each group of a collective, or of each pair of a permutation, in one of XLA's three notations."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}", rest):
        return [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape = list(map(int, iota[2].split(",")))
        numbers = np.arange(math.prod(shape)).reshape(shape)
        if iota[3]:
            numbers = numbers.transpose(list(map(int, iota[3].split(","))))
        return numbers.reshape(-1, int(iota[1])).tolist()
    if mesh := re.search(r"replica_groups=mesh\[([^\]]+)\] \{([^}:]+)\}", rest):  # since jaxlib 0.12
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        grouped = re.findall(r"'([^']+)'", mesh[2])
        order = [*(name for name in sizes if name not in grouped), *grouped]
        numbers = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        numbers = numbers.transpose([list(sizes).index(name) for name in order])
        return numbers.reshape(-1, math.prod(sizes[name] for name in grouped)).tolist()
    raise ValueError(f"replica groups not understood: {rest[:200]}")


def _spans_hosts(rest: str, hosts: Sequence[int]) -> bool:
    """Whether a group is of devices of several hosts."""
    return any(len({hosts[device] for device in group}) > 1 for group in _groups(rest))


def _array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(_BITS.findall(dtype)[0])
    return math.prod(map(int, filter(None, dims.split(",")))) * bits // 8


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the entry."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            bodies[name] = []
            entry = name if match[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _runs(bodies: dict[str, list[str]], entry: str) -> dict[str, int]:
    """How many times each computation runs."""
    runs: defaultdict[str, int] = defaultdict(int)

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for line in bodies[name]:
            if not (match := _INSTRUCTION.match(line)):
                continue
            op, rest = match[2], match[3]
            if op == "while":
                condition, body = (re.search(rf"{part}=%?([\w.\-]+)", rest) for part in ("condition", "body"))
                assert condition and body, line
                visit(body[1], times * _trips(rest, bodies, condition[1]))
                continue
            branches = [name for list_ in _BRANCHES.findall(rest) for name in re.findall(r"[\w.\-]+", list_)]
            for other in _CALLED.findall(rest) + branches:
                visit(other, times)

    visit(entry, 1)
    return runs


def _trips(rest: str, bodies: dict[str, list[str]], condition: str) -> int:
    """Iterations of a loop: as XLA has noted, or from a condition that compares a counter from 0 with a constant."""
    if noted := re.search(r'known_trip_count":\{"n":"(\d+)"', rest):
        return int(noted[1])
    lines = bodies[condition]
    text = "\n".join(lines + [line for other in _CALLED.findall("\n".join(lines)) for line in bodies[other]])
    limits = re.findall(r"= s32\[\]\S* constant\((\d+)\)", text)
    if len(limits) != 1 or "direction=LT" not in text:
        raise ValueError(f"the number of iterations of a loop cannot be read from its condition:\n{text}")
    return int(limits[0])
