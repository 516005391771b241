"""Seconds of a compiled program for TPU: the compiler's cycles, and transfers that no computation hides.

The compiler writes into the program how many cycles it expects each fusion and copy to take. Instructions run one after
another in the order of the text. Collectives, prefetches, and copies to and from the host's memory that have a start
and a done occupy the network, the memory, or the host's link meanwhile; the program waits for their rest at their done.
Sources: docs/decisions/predicted-time.md.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from zero.cycles import hlo
from zero.cycles.hlo import Bodies, Instruction
from zero.hosts.speeds import HOP, SPEEDS, Speed

# Parts of a model, by the first pattern that is found in the path of an operation.
PARTS = {
    "gathers": r"zero_gather|all_gather",
    "scatters": r"zero_scatter|zero_borrow|reduce_scatter",
    "norms": r"TransformerLayer\._norm|/norm[./]",
    "dropout": r"dropout|bernoulli|random_bits|threefry",
    "attention scores": r"_attend.*(?:dot_general|pallas_call)|splash",
    "softmax": r"_attend",
    "projections": r"_attention",
    "experts": r"router|experts",
    "MLP": r"_mlp",
    "vocabulary": r"GPT\.embed|GPT\._embed|GPT\.score|vocabulary|head",
    "other layers": r"GPT",
}
COPIES, EXCHANGES, UPDATE = "copies", "exchanges", "update"  # exchanges: between the devices of a group, of activations
_MARKS = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward"}
PHASES = ("forward", "recomputed", "backward", UPDATE)
_COPIES = ("copy", "copy-done", "slice-done", "reshape", "transpose", "pad", "bitcast-convert")
# Instructions that move data but have no estimate; others without one are scalars.
_MOVES = ("fusion", "concatenate", "gather", "scatter", "sort", "copy", "transpose", "custom-call")
_SCALAR = re.compile(r"[a-z]+\d+\[\]")
_ON_HOST = "S(5)"  # in the layout of an array
_IN_VMEM = re.compile(r"\b[a-z]+\d*\[[\d,]*\]\{[^}]*S\([1-9]\)[^}]*\}")
_NO_DATA = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast|Sharding)')
# Products of two matrices per block of scores, over the width of queries and keys and over that of values, in each of
# jax's splash attention kernels. "dkv" with three results is the fused one, which computes the gradient of queries too.
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2), "fused": (3, 2)}
_OWN = re.compile(r'zero_attention_(?:fwd|bwd).*"cost_estimate":{"flops":"(\d+)"')
_MASK = re.compile(r"s8\[(?:\d+,)?(\d+),(\d+)\]")
_HEADS = re.compile(r"(?:bf16|f32)\[([\d,]+)\]")


class Part(NamedTuple):
    """A share of the time: a part of the model, and forward, recomputed, backward or update."""

    name: str
    phase: str


class Prediction(NamedTuple):
    """The time of one run of a program."""

    seconds: float
    by_part: dict[Part, float]  # seconds, which sum to `seconds`
    exposed_seconds: float  # in which only collectives run
    exposed_bytes: float  # that a device sends in these seconds


def predict(text: str, devices: Sequence[Any]) -> Prediction | None:
    """The time of a program's `as_text()` on its devices; None if the compiler has written no cycles."""
    speed = SPEEDS.get(devices[0].device_kind)
    if speed is None or not speed.per_cycle or '"estimated_cycles"' not in text:
        return None
    bodies, entry = hlo.computations(text)
    seconds = _Schedule(bodies, speed, [(*device.coords, device.core_on_chip) for device in devices]).play(entry)
    by_part = {key: value for key, value in seconds.items() if isinstance(key, Part)}
    return Prediction(sum(by_part.values()), by_part, seconds.get("seconds", 0.0), seconds.get("bytes", 0.0))


def part_of(instruction: Instruction) -> Part:
    """The part that an instruction belongs to, by the path of the operation that XLA names it after.

    >>> part_of(Instruction("f", "", "fusion", 'metadata={op_name="jvp(GPT)/TransformerLayer._mlp/mul"}'))
    Part(name='MLP', phase='forward')
    """
    path = instruction.op_name
    phase = next((phase for mark, phase in _MARKS.items() if mark in path), UPDATE)
    name = next((name for name, pattern in PARTS.items() if re.search(pattern, path)), UPDATE)
    if hlo.kind_of(instruction) is not None:
        if name == "scatters":
            return Part(name, "backward")
        if phase == UPDATE and "TransformerLayer" in path:  # of a merged reduction only the end of the path is left
            phase = "backward" if "checkpoint" in path else "forward"
        return Part(name if name == "gathers" else EXCHANGES, phase)
    return Part(COPIES if instruction.op in _COPIES else name, phase)


def transfer_seconds(instruction: Instruction, places: Sequence[tuple[int, ...]], speed: Speed) -> float:
    """Seconds of a collective on an idle network.

    Each dimension of the torus that a group spans carries its share of the bytes, over a line once, over a ring in both
    directions. An all-to-all takes as long as the links in the middle of the longest dimension, which half of all bytes
    cross. Groups that lie between each other on a line share its links, as do the cores of a chip that are in different
    groups. `places` holds for each device of the program the coordinates of its chip and the core on it.
    """
    group = [places[device] for device in hlo.groups_of(instruction.rest)[0]]
    chips = {place[:-1] for place in group}
    sent = hlo.bytes_sent(instruction)
    kind = hlo.kind_of(instruction)
    if len(chips) == 1:  # the cores of a chip share its memory
        return 2 * sent / speed.memory
    rates = []  # bytes per second of each dimension
    crossings = []  # bytes on a middle link of each dimension, over `sent`
    hops = 0.0
    sizes = [1 + max(place[dim] for place in places) for dim in range(speed.dims)]
    rings = [size % speed.ring == 0 for size in sizes]
    if speed.dims == 3:  # linked by optical switches, all dimensions or none
        rings = [all(rings)] * 3
    for dim, is_ring in enumerate(rings):
        found = sorted({chip[dim] for chip in chips})
        extent = found[-1] - found[0] + 1
        if len(found) > 1:
            between = math.ceil(extent / len(found))
            is_ring &= len(found) * between == sizes[dim]
            rates.append(speed.link * (2 if is_ring else 1) / between)
            crossings.append(len(found) / 4 * len(group) / (len(group) - 1))
            hops += (extent - 1) / (2 if is_ring else 1)
    if kind == "all-to-all":  # of all cores of a chip, each with bytes of its own
        seconds = speed.devices * max(sent * part / rate for part, rate in zip(crossings, rates, strict=True))
    else:  # the compiler notes where it uses one ring through all devices, in both directions
        is_ring = "StrategyRing{colors:1 " in instruction.rest
        rate = min(sum(rates), 2 * speed.link) if is_ring else sum(rates)
        seconds = sent / rate * speed.devices * len(chips) / len(group)
    return seconds + (2 if kind == "all-reduce" else 1) * hops * HOP


def kernel_seconds(instruction: Instruction, speed: Speed) -> float:
    """Seconds of a Pallas kernel: attention by its products, any other one by the memory it touches.

    zero's own kernels note their operations in the program; those of splash attention follow from its shapes.
    """
    shapes = instruction.rest.partition("operand_layout_constraints={")[2].partition("}}")[0]
    moved = sum(hlo.sizes_of(instruction.result)) + sum(hlo.sizes_of(shapes))
    own = _OWN.search(instruction.rest)
    if own is not None and speed.fused:
        return max(int(own[1]) / (speed.fused * speed.flops), moved / speed.memory)
    found = _SPLASH.match(instruction.name)
    mask = _MASK.search(shapes)
    if found is None or mask is None or not speed.splash:
        return moved / speed.memory
    (*rows, positions, width), _, (*_, values) = (map(int, x.split(",")) for x in _HEADS.findall(shapes)[:3])
    blocks, widest = map(int, mask.groups())
    if found[1] == "dkv":  # the grid of keys and queries is transposed
        blocks, widest = max(blocks, widest), min(blocks, widest)
    computed = sum(min(number + 1, widest) for number in range(blocks))
    block = positions // blocks
    is_fused = found[1] == "dkv" and len(hlo.sizes_of(instruction.result)) == 3
    over = zip(_PRODUCTS["fused" if is_fused else found[1]], (width, values), strict=True)
    columns = sum(count * 128 * math.ceil(size / 128) for count, size in over)  # a unit has 128
    flops = 2 * math.prod(rows) * computed * block**2 * columns
    return max(flops / (speed.splash * speed.flops), moved / speed.memory)


Spent = defaultdict[Part | str, float]


class _Schedule:
    """Plays the computations of a program."""

    def __init__(self, bodies: Bodies, speed: Speed, places: Sequence[tuple[int, ...]]) -> None:
        self.bodies = bodies
        self.speed = speed
        self.places = places
        self.played: dict[str, Spent] = {}

    def play(self, name: str) -> Spent:
        """Seconds of one run of a computation, by part; exposed "seconds" and "bytes" of collectives among them."""
        if name not in self.played:
            self.played[name] = self._play(self.bodies[name])
        return self.played[name]

    def _play(self, body: list[Instruction]) -> Spent:
        spent: Spent = defaultdict(float)
        now = 0.0
        free = dict.fromkeys(("network", "memory", "to host", "from host"), 0.0)
        running: dict[str, tuple[float, float, Instruction]] = {}  # end, seconds and start, by name or chain
        results = {one.name: one.result for one in body}
        inner = {one.name: self._collectives_in(one) for one in body if one.op in ("fusion", *hlo.ASYNC_CALLS)}
        chains: dict[str, str] = {}
        for name, collectives in inner.items():
            for collective in collectives:
                chain = hlo.chain_of(collective)
                if chain:
                    chains[name] = chain
        last = {chain: name for name, chain in chains.items()}

        def wait(end: float, seconds: float, started: Instruction, ended: Instruction) -> None:
            nonlocal now
            waited = max(0.0, end - now)
            now += waited
            is_collective = hlo.kind_of(started) is not None
            spent[part_of(self._named(started) if is_collective else ended)] += waited
            if is_collective and waited:
                spent["seconds"] += waited
                spent["bytes"] += hlo.bytes_sent(started) * min(1.0, waited / seconds)

        def start(name: str, unit: str, seconds: float, started: Instruction) -> None:
            free[unit] = max(now, free[unit]) + seconds
            running[name] = free[unit], seconds, started

        for one in body:
            op = one.op
            within = inner.get(one.name, [])
            if op == "while":
                loop, trips = hlo.loop_of(one, self.bodies)
                now += _add(spent, self.play(loop), trips)
            elif op in ("call", "conditional"):
                now += _add(spent, max(map(self.play, one.called), key=_total), 1)
            elif op.endswith("-done"):
                if one.operands[0] in running:
                    wait(*running.pop(one.operands[0]), one)
            elif op in ("copy-start", "slice-start") or (op in hlo.ASYNC_CALLS and not within):
                start(one.name, *self._move(one), one)
            elif hlo.kind_of(one) or op in hlo.ASYNC_CALLS:
                collective = one if hlo.kind_of(one) else within[0]
                start(one.name, "network", transfer_seconds(collective, self.places, self.speed), collective)
                if not op.endswith("-start"):
                    wait(*running.pop(one.name), one)
            else:
                chain = chains.get(one.name)
                if chain and chain not in running:
                    start(chain, "network", transfer_seconds(within[0], self.places, self.speed), within[0])
                seconds = self._compute_seconds(one, results)
                now += seconds
                if seconds:
                    spent[part_of(one)] += seconds
                if chain and last[chain] == one.name:
                    wait(*running.pop(chain), one)
                elif within and not chain:  # a collective with operations on its result
                    start(one.name, "network", transfer_seconds(within[0], self.places, self.speed), within[0])
                    wait(*running.pop(one.name), one)
        return spent

    def _move(self, started: Instruction) -> tuple[str, float]:
        """The unit that a copy, or a slice copied from or into an array, occupies, and for how many seconds.

        Copies to the host and from the host run at the same time.
        """
        arrays = _SCALAR.sub("", started.result)  # without indices and contexts
        size = min(hlo.sizes_of(arrays), default=0)
        if _ON_HOST not in arrays:
            return "memory", size / self.speed.memory
        result = self.bodies[started.called[0]][-1].result if started.called else arrays.partition("}")[0]
        unit = "to host" if _ON_HOST in result else "from host"
        return unit, size * self.speed.devices / self.speed.host

    def _named(self, collective: Instruction) -> Instruction:
        """The instruction with the path of its reduction, if XLA has merged collectives and left out their own."""
        path = collective.op_name or next((self.bodies[name][-1].op_name for name in collective.called), "")
        return collective._replace(rest=f'metadata={{op_name="{path}"}}')

    def _collectives_in(self, instruction: Instruction) -> list[Instruction]:
        inside = [other for name in instruction.called for other in self.bodies[name]]
        return [other for other in inside if hlo.kind_of(other)]

    def _compute_seconds(self, one: Instruction, results: dict[str, str]) -> float:
        """Seconds of an instruction that does not overlap with others."""
        if one.cycles is not None:
            return one.cycles / self.speed.clock
        if 'custom_call_target="tpu_custom_call"' in one.rest:
            return kernel_seconds(one, self.speed)
        if one.op not in _MOVES or _NO_DATA.search(one.rest) or self._collectives_in(one):
            return 0.0
        arrays = [one.result, *(results.get(name, "") for name in one.operands)]
        return sum(sum(hlo.sizes_of(_IN_VMEM.sub("", array))) for array in arrays) / self.speed.memory


def _add(spent: Spent, more: Spent, times: int) -> float:
    for key, value in more.items():
        spent[key] += times * value
    return times * _total(more)


def _total(spent: Spent) -> float:
    return sum(value for key, value in spent.items() if isinstance(key, Part))
