"""Programs compiled for a slice, or cached by an earlier plan: their text and memory, all that a plan reads.

The compiler for TPU spends nearly all of its time on machine code, of which a plan reads the cycles alone. Long before,
it knows the schedule and where each array is, and writes both to a directory on request. A program that is read from
there has no cycles. The compiler keeps running in a thread, until the plan ends its process.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from zero.costs.topology import slices_of
from zero.files import storage
from zero.hosts import xla_options
from zero.hosts.speeds import SPEEDS

log = logging.getLogger(__name__)

# Environment variables from which the compiler reads further options.
VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
# Of plans alone: machine instructions are not reordered, which takes a tenth of the time and changes no figure.
UNORDERED = {"xla_jf_vliw_scheduler": False}
# What the compiler writes to a directory once memory is assigned: the schedule, twice, and the bytes of each memory.
SCHEDULE = "*.after_optimizations.txt"
SCHEDULE_AGAIN = "*.after_optimizations_after_buffer_assignment.txt"
MEMORY_REPORT = "*.after_optimizations-memory-usage-report.txt"
BUFFERS = "*.after_optimizations-buffer-assignment.txt"
LIVE_RANGES = "*.after_optimizations-live-range.txt"
_SPACE = re.compile(r"Memory Space: .*\(color=(\d+)\)\s+Total bytes: (\d+)")
_DEVICE, _HOST = "0", "5"  # colors of memories
_REPORTS = ("buffers", "live_ranges", "assigned_bytes")  # fields of a kept program, for its page
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Memory:
    """The fields of jax's `CompiledMemoryStats` that a plan reads, under the same names.

    With arrays on the host, jax's peak is the arguments plus the temporaries of the device or of the host, whichever
    are larger. Here the peak is that sum or the bytes that the compiler assigns on the device, whichever is smaller.
    """

    peak_memory_in_bytes: int
    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    host_temp_size_in_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class KeptProgram:
    """A program with the two methods of `jax.stages.Compiled` that a plan calls.

    Attributes:
      text: what `as_text` returns.
      memory: what `memory_analysis` returns.
      is_whole: False: read before the machine code, so that the text has no cycles.
      buffers: the compiler's report of the memory that it assigned to each array; empty if it wrote none.
      live_ranges: its report of the instructions between which each array is alive, likewise.
      assigned_bytes: of the memory of a device, in the schedule; None if there was no schedule.
    """

    text: str
    memory: Memory
    is_whole: bool = True
    buffers: str = ""
    live_ranges: str = ""
    assigned_bytes: int | None = None

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> Memory:
        return self.memory


@dataclasses.dataclass(frozen=True)
class _Compilation:
    """A compilation for TPU, in a thread that keeps running.

    Attributes:
      compiled: the whole program.
      schedule: the program as scheduled; None if the compiler ended before it wrote a schedule.
      refused: a program that does not fit as the compiler left it; None for all others.
      directory: where the compiler writes; deleted once the schedule has been read, and made again by the compiler.
    """

    compiled: Future[Any]
    schedule: KeptProgram | None
    refused: KeptProgram | None
    directory: str

    def whole(self) -> KeptProgram:
        """Waits for the whole program."""
        try:
            compiled = self.compiled.result()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)
        sizes = compiled.memory_analysis()
        memory = Memory(**{field.name: getattr(sizes, field.name) for field in dataclasses.fields(Memory)})
        if memory.host_temp_size_in_bytes and self.schedule is not None:
            peak = min(memory.peak_memory_in_bytes, self.schedule.memory.peak_memory_in_bytes)  # neither is below it
            memory = dataclasses.replace(memory, peak_memory_in_bytes=peak)
        kept = KeptProgram(compiled.as_text(), memory)
        if self.schedule is None:
            return kept
        return dataclasses.replace(
            kept,
            buffers=self.schedule.buffers,
            live_ranges=self.schedule.live_ranges,
            assigned_bytes=self.schedule.assigned_bytes,
        )


def _begin(lowered: Any, options: Mapping[str, bool | int] | None) -> _Compilation:
    """Begins a compilation, and waits until its schedule is written."""
    directory = tempfile.mkdtemp()
    to_directory = {**(options or {}), "xla_dump_to": directory, "xla_dump_hlo_as_text": True}
    compiled = ThreadPoolExecutor(1).submit(lowered.compile, to_directory)
    try:
        schedule = read_schedule(Path(directory))
        while schedule is None and not compiled.done():
            time.sleep(_POLL_SECONDS)
            schedule = read_schedule(Path(directory))
        refused = _read_reports(Path(directory)) if schedule is None else None
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return _Compilation(compiled, schedule, refused, directory)


class Compiler:
    """Compiles for `devices` with the options of a run, and caches programs for TPU slices.

    A file is named after a digest of everything that the result depends on: the lowered program with the paths of its
    operations, the devices, the options and the versions. So a file is never out of date. Without source lines an edit
    that changes none of these compiles nothing again.

    Args:
      devices: all devices of the program.
      options: of the compiler; None: its own.
      directory: the cache; None: no cache.
    """

    def __init__(
        self,
        devices: Sequence[Any],
        options: Mapping[str, bool | int] | None,
        directory: Path | None = None,
    ) -> None:
        self.devices = devices
        self.options = {**(options or {}), **UNORDERED} if devices[0].platform == "tpu" else options
        self.directory = directory if devices[0].platform == "tpu" else None
        places = [(device.id, device.process_index, getattr(device, "coords", None)) for device in devices]
        self._surroundings = [
            devices[0].device_kind,
            places,
            sorted((self.options or {}).items()),
            [os.environ.get(name) for name in VARIABLES],
        ]
        self._running: dict[str, _Compilation] = {}  # by digest
        self.refused: KeptProgram | None = None  # the last program, if it did not fit

    def compile(self, program: Any, *arguments: Any, whole: bool = True) -> Any:
        """The compiled program, for TPU a `KeptProgram`.

        Args:
          program: a pmapped function.
          arguments: their shapes and dtypes.
          whole: whether to wait for the machine code. If not, the program has no cycles, unless it is cached or the
            compiler has ended first.

        Raises:
          jax.errors.JaxRuntimeError: from the compiler, if the program does not fit.
        """
        return self.compile_lowered(self.lower(program, *arguments), whole)

    def lower(self, program: Any, *arguments: Any) -> Any:
        """The lowered program."""
        with source_frames(0):
            return program.lower(*arguments)

    def compile_lowered(self, lowered: Any, whole: bool = True) -> Any:
        """`compile` of a lowered program."""
        if self.devices[0].platform != "tpu":
            return lowered.compile(self.options)
        digest = self._digest(lowered)
        kept = self._read(digest, whole)
        if kept is not None:
            return kept
        if digest not in self._running:
            self._running[digest] = _begin(lowered, self.options)
        compilation = self._running[digest]
        kept = compilation.schedule
        self.refused = compilation.refused
        if whole or kept is None:
            kept = compilation.whole()
        path = self._file(digest, kept.is_whole)
        if path is not None:
            _write(path, kept)
        return kept

    def _file(self, digest: str, whole: bool) -> Path | None:
        if self.directory is None:
            return None
        return self.directory / (f"{digest}.json.gz" if whole else f"{digest}.schedule.json.gz")

    def _read(self, digest: str, whole: bool) -> KeptProgram | None:
        """A cached program; the whole one if there are both."""
        for is_whole in (True,) if whole else (True, False):
            path = self._file(digest, is_whole)
            kept = None if path is None else _read(path)
            if kept is not None:
                return dataclasses.replace(kept, is_whole=is_whole)
        return None

    def _digest(self, lowered: Any) -> str:
        versions = [version(name) for name in ("jax", "jaxlib", "libtpu")]
        surroundings = json.dumps([*self._surroundings, versions], default=str)
        text = lowered.as_text(debug_info=True)  # its paths name the parts of the model
        return hashlib.sha256(f"{surroundings}\n{text}".encode()).hexdigest()


def read_schedule(directory: Path) -> KeptProgram | None:
    """The program that the compiler has written to a directory; None if it has not written all of it yet."""
    paths = [next(directory.glob(pattern), None) for pattern in (SCHEDULE, SCHEDULE_AGAIN, MEMORY_REPORT)]
    if None in paths:
        return None
    text, again, report = (path.read_text() for path in paths if path is not None)
    if not text or len(text) != len(again) or _DEVICE not in dict(_SPACE.findall(report)):
        return None
    return _read_reports(directory)


def _read_reports(directory: Path) -> KeptProgram | None:
    """The program that the compiler has written to a directory, with what it has written about its memory.

    Returns:
      None if memory has not been assigned.
    """
    patterns = (SCHEDULE, MEMORY_REPORT, BUFFERS, LIVE_RANGES)
    text, report, buffers, live_ranges = (
        "".join(path.read_text() for path in directory.glob(pattern)) for pattern in patterns
    )
    sizes = {color: int(size) for color, size in _SPACE.findall(report)}
    if not text or _DEVICE not in sizes:
        return None
    peak = sizes[_DEVICE]
    memory = Memory(peak, 0, 0, 0, peak, sizes.get(_HOST, 0))
    return KeptProgram(text, memory, is_whole=False, buffers=buffers, live_ranges=live_ranges, assigned_bytes=peak)


def compiler_options(devices: Sequence[Any], overlap_gathers: bool) -> dict[str, bool | int] | None:
    """The compiler options that a run sets for its process."""
    if devices[0].platform != "tpu":
        return None
    kind = devices[0].device_kind
    chips = len(devices) // slices_of(devices) // (SPEEDS[kind].devices if kind in SPEEDS else 1)
    return xla_options.for_tpu(kind, chips, overlap_gathers)


@contextmanager
def source_frames(most: int) -> Iterator[None]:
    """Programs that are lowered inside name at most so many files and lines of Python for each operation, or kernel."""
    frames = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", most)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)


def _read(path: Path) -> KeptProgram | None:
    """The program in a file; None if it does not exist or is damaged, which is logged."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        reports = {name: content[name] for name in _REPORTS if name in content}  # earlier versions kept none
        return KeptProgram(content["text"], Memory(**content["memory"]), **reports)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        log.warning("%s: %s; compiling the program again", path, error)
        return None


def _write(path: Path, program: KeptProgram) -> None:
    """Writes a program to the cache. If the directory is not writable, logs that and continues without it."""
    reports = {name: getattr(program, name) for name in _REPORTS}
    content = json.dumps({"text": program.text, "memory": dataclasses.asdict(program.memory), **reports}).encode()
    try:
        storage.write(path, gzip.compress(content, 6, mtime=0))  # its checksum shows damage
    except OSError as error:
        log.warning("%s; the compiled program is not kept", error)
