"""Traffic of a compiled program, read from its text: XLA's own totals count the body of a loop once."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def collective_bytes(text: str, hosts: Sequence[int] | None = None) -> dict[str, int]:
    """Bytes that one device sends in one run of the program, by kind of collective; a loop counts once per iteration.

    Of n bytes on k devices, in a ring: a gather or a scatter sends n (k - 1) / k, an all-reduce twice as much. With the
    host of each device, `hosts`, only collectives with a group of devices of several hosts count.

    Raises:
      ValueError: the number of iterations of a loop cannot be read.
    """
    bodies, entry = _computations(text)
    totals: Counter[str] = Counter()
    for name, runs in _runs(bodies, entry).items():
        for match in filter(None, map(_INSTRUCTION.match, bodies[name])):
            kind = match[2].removesuffix("-start")
            if kind in COLLECTIVES and (hosts is None or _spans_hosts(match[3], hosts)):
                totals[kind] += round(runs * _sent(kind, *match.groups()))
    return dict(totals)


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
    group = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    if group:
        k = group[1].count(",") + 1
    else:
        iota = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
        if iota is None:
            raise ValueError(f"replica groups of {op} not understood: {rest[:200]}")
        k = int(iota[1])
    # The result of a reduce-scatter is 1/k of its operand.
    return size * {"all-reduce": 2 * (k - 1) / k, "reduce-scatter": k - 1}.get(kind, (k - 1) / k)


def _spans_hosts(rest: str, hosts: Sequence[int]) -> bool:
    """Whether a group of a collective, or a pair of a permutation, is of devices of several hosts."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}", rest):
        groups = [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    elif iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape = list(map(int, iota[3].split(",")))
        numbers = np.arange(math.prod(shape)).reshape(shape)
        if iota[4]:
            numbers = numbers.transpose(list(map(int, iota[4].split(","))))
        groups = numbers.reshape(int(iota[1]), int(iota[2])).tolist()
    else:
        raise ValueError(f"replica groups not understood: {rest[:200]}")
    return any(len({hosts[device] for device in group}) > 1 for group in groups)


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
