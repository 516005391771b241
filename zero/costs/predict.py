"""Seconds of a compiled program for TPU: the compiler's cycles, and transfers that no computation hides.

The compiler writes into the program how many cycles it expects each fusion and copy to take. Instructions run one after
another in the order of the text. Collectives, prefetches, and copies to and from the host's memory that have a start
and a done occupy the network, the memory, or the host's link meanwhile; the program waits for their rest at their done.
Sources: benchmarks/measured/predicted-time.md.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from zero.costs import hlo
from zero.costs.between_slices import crossing_of, rendezvous_of
from zero.costs.hlo import Bodies, Instruction
from zero.costs.kernels import inversion_seconds, is_inversion, kernel_seconds, product_seconds
from zero.costs.rates import RATES, Rates, Works, estimated_seconds
from zero.hosts.speeds import SPEEDS, Speed
from zero.hosts.torus import collective_seconds

# Parts of a model, by the first pattern that is found in the path of an operation.
PARTS = {
    "gathers": r"zero_gather|all_gather",
    "scatters": r"zero_scatter|zero_borrow|reduce_scatter",
    "norms": r"TransformerLayer\._norm|/norm[./]",
    "dropout": r"dropout|bernoulli|random_bits|threefry",
    "attention scores": r"_attend.*(?:dot_general|pallas_call)|splash",
    "softmax": r"_attend",
    "delta rule": r"delta_rule",
    "projections": r"_attention",
    "experts": r"router|experts",
    "MLP": r"_mlp",
    "vocabulary": r"GPT\.embed|GPT\._embed|GPT\.score|vocabulary|head",
    "other layers": r"GPT",
}
COPIES, EXCHANGES, UPDATE = "copies", "exchanges", "update"  # exchanges: between the devices of a group, of activations
BETWEEN_SLICES = "between slices"
_MARKS = {"rematted_computation": "recomputed", "transpose(": "backward", "jvp(": "forward"}
PHASES = ("forward", "recomputed", "backward", UPDATE)
_COPIES = ("copy", "copy-done", "slice-done", "reshape", "transpose", "pad", "bitcast-convert")
# Instructions that move data but have no estimate; others without one are scalars.
_MOVES = ("fusion", "concatenate", "gather", "scatter", "sort", "copy", "transpose", "custom-call")
# Instructions whose cycles the compiler writes with the machine code.
_ESTIMATED = ("fusion", "copy", "convert", "broadcast", "reshape", "transpose", "convolution", "reduce")
_CUSTOM = "kind=kCustom"  # gathers and scatters, which have no cycles afterwards either
_SCALAR = re.compile(r"[a-z]+\d+\[\]")
_ON_HOST = "S(5)"  # in the layout of an array
_TO_HOST, _FROM_HOST = "to host", "from host"
# Copies beside computation, of arrays or of slices of a stack.
_COPY_STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
_IN_VMEM = re.compile(r"\b[a-z]+\d*\[[\d,]*\]\{[^}]*S\([1-9]\)[^}]*\}")
# Tiles that are shorter than the eight rows of a vector register: sums over them are not limited by memory.
_SHORT_TILES = re.compile(r"T\([124],128\)")
_NO_DATA = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast|Sharding)')

# Lanes of the time axis beside the units that transfers occupy, which are "network", "memory" and the host's link.
CORE, SPARSE_CORE = "TensorCore", "SparseCore"


class TimedPart(NamedTuple):
    """A share of the time: a part of the model, and forward, recomputed, backward or update."""

    name: str
    phase: str


class Event(NamedTuple):
    """What one instruction occupies while its computation runs once.

    Attributes:
      lane: `CORE`, `SPARSE_CORE`, or the unit of a transfer.
      begin: seconds since the computation began.
      seconds: for which the lane is occupied.
      instruction: as scheduled; of a wait the instruction that ends it.
      part: the part of the model, as far as names of operations show it.
      waits_for: of a wait, the instruction that started the transfer.
      calls: the computation that a loop, a call or a branch runs.
      times: how often it runs it.
      is_guess: whether the seconds are those of the bytes that an instruction touches, for want of cycles.
    """

    lane: str
    begin: float
    seconds: float
    instruction: Instruction
    part: TimedPart
    waits_for: Instruction | None = None
    calls: str | None = None
    times: int = 1
    is_guess: bool = False


class Timeline(NamedTuple):
    """The events of each computation that runs, and the computation that runs first."""

    entry: str
    events: dict[str, list[Event]]

    def runs(self) -> Iterator[tuple[Event, int]]:
        """Each event that calls nothing, and how often it takes place in one run of the program."""
        yield from self._runs(self.entry, 1)

    def _runs(self, computation: str, times: int) -> Iterator[tuple[Event, int]]:
        for event in self.events[computation]:
            if event.calls is None:
                yield event, times
            else:
                yield from self._runs(event.calls, times * event.times)


class Prediction(NamedTuple):
    """The time of one run of a program."""

    seconds: float
    by_part: dict[TimedPart, float]  # seconds, which sum to `seconds`
    exposed_seconds: float  # in which only collectives run
    exposed_bytes: float  # that a device sends in these seconds
    host_link_bytes: float = 0.0  # sent over the link of a device and its host, both directions
    host_link_seconds: float = 0.0  # in which the busier direction is occupied
    host_exposed_seconds: float = 0.0  # in which the program waits for either
    timeline: Timeline | None = None  # of one program


def predict(
    text: str, devices: Sequence[Any], is_whole: bool = True, unknown_trips: int | None = None
) -> Prediction | None:
    """The time of a program's `as_text()` on its devices.

    Args:
      text: of a compiled program.
      devices: on which it runs.
      is_whole: whether it was compiled to the end. If not, the compiler has written no cycles, and `rates.py` estimates
        what fusions take.
      unknown_trips: of loops that end when their data say so; None: an error.

    Returns:
      None if the compiler writes no cycles for these devices, or if there are no rates of them.
    """
    speed = SPEEDS.get(devices[0].device_kind)
    rates = None if is_whole else RATES.get(devices[0].device_kind)
    if speed is None or not speed.per_cycle or (rates is None and '"estimated_cycles"' not in text):
        return None
    bodies, entry = hlo.computations(text)
    places = [(*device.coords, device.core_on_chip) for device in devices]
    schedule = _Schedule(bodies, speed, places, rates, unknown_trips)
    spent = schedule.play(entry)
    to_host = spent.host_seconds[_TO_HOST]
    from_host = spent.host_seconds[_FROM_HOST]
    return Prediction(
        spent.total(),
        dict(spent.by_part),
        spent.exposed_seconds,
        spent.exposed_bytes,
        host_link_bytes=(to_host + from_host) * speed.host / speed.devices,
        host_link_seconds=max(to_host, from_host),
        host_exposed_seconds=spent.host_exposed_seconds,
        timeline=Timeline(entry, {name: played.events for name, played in schedule.played.items()}),
    )


def part_of(instruction: Instruction) -> TimedPart:
    """The part that an instruction belongs to, by the path of the operation that XLA names it after.

    >>> part_of(Instruction("f", "", "fusion", 'metadata={op_name="jvp(GPT)/TransformerLayer._mlp/mul"}'))
    TimedPart(name='MLP', phase='forward')
    """
    path = instruction.op_name
    phase = next((phase for mark, phase in _MARKS.items() if mark in path), UPDATE)
    name = next((name for name, pattern in PARTS.items() if re.search(pattern, path)), UPDATE)
    if hlo.kind_of(instruction) is not None:
        if name == "scatters":
            return TimedPart(name, "backward")
        if phase == UPDATE and "TransformerLayer" in path:  # of a merged reduction only the end of the path is left
            phase = "backward" if "checkpoint" in path else "forward"
        if name != "gathers":
            name = EXCHANGES
    elif instruction.op in _COPIES:
        name = COPIES
    return TimedPart(name, phase)


def transfer_seconds(instruction: Instruction, places: Sequence[tuple[int, ...]], speed: Speed) -> float:
    """Seconds of a collective on an idle network; `places` are the places of the program's devices."""
    group = hlo.groups_of(instruction.rest)[0]
    is_ring = "StrategyRing{colors:1 " in instruction.rest  # one ring through all devices, in both directions
    kind = hlo.kind_of(instruction)
    assert kind is not None
    return collective_seconds(kind, hlo.bytes_sent(instruction), group, places, speed, is_ring=is_ring)


class _Spent:
    """Seconds by part, and among them those in which only collectives run, with the bytes sent meanwhile.

    Beside them seconds of each direction of the host's link, and those in which the program waits for it.
    """

    def __init__(self) -> None:
        self.by_part: defaultdict[TimedPart, float] = defaultdict(float)
        self.exposed_seconds = 0.0
        self.exposed_bytes = 0.0
        self.host_seconds = dict.fromkeys((_TO_HOST, _FROM_HOST), 0.0)
        self.host_exposed_seconds = 0.0
        self.events: list[Event] = []

    def total(self) -> float:
        return sum(self.by_part.values())

    def add(self, spent: _Spent, times: int) -> None:
        """Adds the seconds of one run of a computation that runs several times."""
        for part, seconds in spent.by_part.items():
            self.by_part[part] += times * seconds
        self.exposed_seconds += times * spent.exposed_seconds
        self.exposed_bytes += times * spent.exposed_bytes
        for direction, seconds in spent.host_seconds.items():
            self.host_seconds[direction] += times * seconds
        self.host_exposed_seconds += times * spent.host_exposed_seconds


class _Schedule:
    """Plays the computations of a program."""

    def __init__(
        self,
        bodies: Bodies,
        speed: Speed,
        places: Sequence[tuple[int, ...]],
        rates: Rates | None = None,
        unknown_trips: int | None = None,
    ) -> None:
        self.bodies = bodies
        self.works = Works(bodies)
        self.rates = rates  # of instructions without cycles; None: the program has cycles
        self.speed = speed
        self.places = places
        self.unknown_trips = unknown_trips
        self.played: dict[str, _Spent] = {}

    def play(self, name: str) -> _Spent:
        """What one run of a computation spends."""
        if name not in self.played:
            self.played[name] = self._play(self.bodies[name])
        return self.played[name]

    def _play(self, body: list[Instruction]) -> _Spent:
        spent = _Spent()
        now = 0.0
        free = dict.fromkeys(("network", "memory", _TO_HOST, _FROM_HOST, BETWEEN_SLICES), 0.0)
        running: dict[str, tuple[float, float, Instruction]] = {}  # end, seconds and start, by name or chain
        results = {instruction.name: instruction.result for instruction in body}
        collectives_in: dict[str, list[Instruction]] = {}
        chains: dict[str, str] = {}
        for instruction in body:
            if instruction.op in ("fusion", *hlo.ASYNC_CALLS):
                collectives_in[instruction.name] = self._collectives_in(instruction)
            for collective in collectives_in.get(instruction.name, []):
                chain = hlo.chain_of(collective)
                if chain:
                    chains[instruction.name] = chain
        last = {chain: name for name, chain in chains.items()}
        met_at: dict[str, str] = {}  # the rendezvous of each send to other slices and of each receive

        def wait(end: float, seconds: float, started: Instruction, ended: Instruction) -> None:
            nonlocal now
            waited = max(0.0, end - now)
            now += waited
            crossing = crossing_of(started)
            part = part_of(ended)
            sent = 0.0
            if crossing is not None:
                part = TimedPart(BETWEEN_SLICES, UPDATE)
                sent = crossing.sent
            elif hlo.kind_of(started) is not None:
                part = part_of(self._named(started))
                sent = hlo.bytes_sent(started)
            spent.by_part[part] += waited
            if waited:
                spent.events.append(Event(CORE, now - waited, waited, ended, part, waits_for=started))
            if _ON_HOST in started.result:
                spent.host_exposed_seconds += waited
            if sent and waited:
                spent.exposed_seconds += waited
                spent.exposed_bytes += sent * min(1.0, waited / seconds)

        def start(name: str, unit: str, seconds: float, started: Instruction, lane: str | None = None) -> None:
            begin = max(now, free[unit])
            free[unit] = begin + seconds
            running[name] = free[unit], seconds, started
            part = part_of(self._named(started))
            spent.events.append(Event(lane or unit, begin, seconds, started, part))
            if unit in spent.host_seconds:
                spent.host_seconds[unit] += seconds

        def send(name: str, collective: Instruction, lane: str | None = None) -> None:
            start(name, "network", transfer_seconds(collective, self.places, self.speed), collective, lane)

        def called(instruction: Instruction, computation: str, times: int) -> None:
            seconds = times * self.play(computation).total()
            event = Event(CORE, now, seconds, instruction, part_of(instruction), calls=computation, times=times)
            spent.events.append(event)

        for instruction in body:
            name = instruction.name
            op = instruction.op
            collectives = collectives_in.get(name, [])
            if op == "while":
                loop, trips = hlo.loop_of(instruction, self.bodies, self.unknown_trips)
                called(instruction, loop, trips)
                spent.add(self.play(loop), trips)
                now += trips * self.play(loop).total()
            elif op in ("call", "conditional"):
                name_of_longest = max(instruction.called, key=lambda name: self.play(name).total())
                longest = self.play(name_of_longest)
                called(instruction, name_of_longest, 1)
                spent.add(longest, 1)
                now += longest.total()
            elif (rendezvous := rendezvous_of(instruction)) is not None:
                met_at[name] = rendezvous
                crossing = crossing_of(instruction)
                if crossing is not None:
                    seconds = crossing.sent / self.speed.between_slices
                    start(crossing.rendezvous, BETWEEN_SLICES, seconds, instruction)
            elif op.endswith("-done"):
                begun = met_at.get(instruction.operands[0], instruction.operands[0])
                if begun in running:
                    wait(*running.pop(begun), instruction)
            elif op in _COPY_STARTS or (op in hlo.ASYNC_CALLS and not collectives):
                start(name, *self._move(instruction), instruction)
            elif op in hlo.ASYNC_CALLS:
                send(name, collectives[0], SPARSE_CORE if op == "call-start" else None)
            elif hlo.kind_of(instruction) is not None:
                send(name, instruction)
                if not op.endswith("-start"):
                    wait(*running.pop(name), instruction)
            else:
                chain = chains.get(name)
                if chain and chain not in running:
                    send(chain, collectives[0])
                seconds = self._compute_seconds(instruction, results)
                if seconds:
                    part = part_of(instruction)
                    spent.by_part[part] += seconds
                    is_guess = self._is_guess(instruction)
                    spent.events.append(Event(CORE, now, seconds, instruction, part, is_guess=is_guess))
                now += seconds
                if chain and last[chain] == name:
                    wait(*running.pop(chain), instruction)
                elif collectives and not chain:  # a collective with operations on its result
                    send(name, collectives[0])
                    wait(*running.pop(name), instruction)
        return spent

    def _move(self, started: Instruction) -> tuple[str, float]:
        """The unit that a copy, or a slice copied from or into an array, occupies, and for how many seconds.

        Copies to the host and from the host run at the same time.
        """
        arrays = _SCALAR.sub("", started.result)  # without indices and contexts
        size = min(hlo.sizes_of(arrays), default=0)
        if _ON_HOST not in arrays:
            return "memory", size / self.speed.memory
        if started.called:
            is_stored = _ON_HOST in self.bodies[started.called[0]][-1].result
        elif started.op == "copy-start":
            is_stored = _ON_HOST in arrays.partition("}")[0]
        else:  # the stack comes first, whether a slice of it is read or written
            is_stored = started.op == "dynamic-update-slice-start"
        unit = _TO_HOST if is_stored else _FROM_HOST
        return unit, size * self.speed.devices / self.speed.host

    def _named(self, collective: Instruction) -> Instruction:
        """The instruction with the path of its reduction, if XLA has merged collectives and left out their own."""
        path = collective.op_name
        if not path and collective.called:
            path = self.bodies[collective.called[0]][-1].op_name
        return collective._replace(rest=f'metadata={{op_name="{path}"}}')

    def _collectives_in(self, instruction: Instruction) -> list[Instruction]:
        collectives = []
        for name in instruction.called:
            for called in self.bodies[name]:
                if hlo.kind_of(called) is not None:
                    collectives.append(called)
                elif called.op == "call":  # of a computation on a SparseCore, before the compiler inlines it
                    collectives += self._collectives_in(called)
        return collectives

    def _is_guess(self, instruction: Instruction) -> bool:
        """Whether nothing but the bytes that an instruction touches says how long it takes."""
        if hlo.is_kernel(instruction):
            counted = (instruction.cycles or 0) / self.speed.clock
            is_known = product_seconds(instruction, self.speed) is not None
            return not is_known and counted < kernel_seconds(instruction, self.speed)
        if instruction.cycles is not None or is_inversion(instruction):
            return False
        return self.rates is None or instruction.op not in _ESTIMATED

    def _compute_seconds(self, instruction: Instruction, results: dict[str, str]) -> float:
        """Seconds of an instruction that does not overlap with others."""
        arrays = [instruction.result, *(results.get(name, "") for name in instruction.operands)]
        seconds = self._estimated_seconds(instruction, arrays, results)
        if instruction.op != "reduce" or any(map(_SHORT_TILES.search, arrays)):
            return seconds
        # The compiler estimates 2 to 35 times as long as its own loop streams the array from HBM.
        return min(seconds, sum(sum(hlo.sizes_of(array)) for array in arrays) / self.speed.memory)

    def _estimated_seconds(self, instruction: Instruction, arrays: list[str], results: dict[str, str]) -> float:
        if hlo.is_kernel(instruction):
            return kernel_seconds(instruction, self.speed)
        if instruction.cycles is not None:
            return instruction.cycles / self.speed.clock
        if is_inversion(instruction):
            return inversion_seconds(instruction, self.speed)
        if self.rates is not None and instruction.op in _ESTIMATED:
            work = self.works.of(instruction, results)
            if work.flops or not (_CUSTOM in instruction.rest or self._collectives_in(instruction)):
                return estimated_seconds(instruction, work, self.speed, self.rates)
        is_idle = instruction.op not in _MOVES or _NO_DATA.search(instruction.rest) or self._collectives_in(instruction)
        if is_idle and not instruction.has_unknown_cycles:
            return 0.0
        return sum(sum(hlo.sizes_of(_IN_VMEM.sub("", array))) for array in arrays) / self.speed.memory
