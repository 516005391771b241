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

from zero.hosts import xla_options
from zero.hosts.speeds import SPEEDS
from zero.job.devices import slices_of
from zero.training.streamed_update import LoweredStep, SpanPrograms

log = logging.getLogger(__name__)

# Environment variables from which the compiler reads further options.
VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
# Of plans alone: machine instructions are not reordered, which takes a tenth of the time and changes no figure.
UNORDERED = {"xla_jf_vliw_scheduler": False}
# What the compiler writes to a directory once memory is assigned: the schedule, twice, and the bytes of each memory.
SCHEDULE = "*.after_optimizations.txt"
SCHEDULE_AGAIN = "*.after_optimizations_after_buffer_assignment.txt"
MEMORY_REPORT = "*.after_optimizations-memory-usage-report.txt"
_SPACE = re.compile(r"Memory Space: .*\(color=(\d+)\)\s+Total bytes: (\d+)")
_DEVICE, _HOST = "0", "5"  # colors of memories
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
    """A cached program, with the two methods of `jax.stages.Compiled` that a plan calls."""

    text: str
    memory: Memory
    is_whole: bool = True  # False: read before the machine code, so that the text has no cycles

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
      directory: where the compiler writes; deleted once the schedule has been read, and made again by the compiler.
    """

    compiled: Future[Any]
    schedule: KeptProgram | None
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
        return KeptProgram(compiled.as_text(), memory)


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
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return _Compilation(compiled, schedule, directory)


class Compiler:
    """Compiles for `devices` with the options of a run, and caches programs for TPU slices.

    A file is named after a digest of everything that the result depends on: the lowered program with the paths of its
    operations, the devices, the options and the versions. So a file is never out of date. Source lines are left out of
    the program, so that an edit that changes none of these compiles nothing again.

    Args:
      devices: all devices of the program.
      overlap_gathers: `zero.overlap_gathers`.
      directory: the cache; None: no cache.
    """

    def __init__(self, devices: Sequence[Any], overlap_gathers: bool, directory: Path | None = None) -> None:
        self.devices = devices
        options = compiler_options(devices, overlap_gathers)
        self.options = None if options is None else options | UNORDERED
        self.directory = directory if devices[0].platform == "tpu" else None
        places = [(device.id, device.process_index, getattr(device, "coords", None)) for device in devices]
        self._surroundings = [
            devices[0].device_kind,
            places,
            sorted((self.options or {}).items()),
            [os.environ.get(name) for name in VARIABLES],
        ]
        self._running: dict[str, _Compilation] = {}  # by digest

    def compile(self, program: Any, *arguments: Any, whole: bool = True) -> Any:
        """The compiled program, for TPU a `KeptProgram`; for a step of several programs, the step with such programs.

        Args:
          program: a pmapped function, or a step of several.
          arguments: their shapes and dtypes.
          whole: whether to wait for the machine code. If not, the program has no cycles, unless it is cached, is one of
            several, or the compiler has ended first.

        Raises:
          jax.errors.JaxRuntimeError: from the compiler, if the program does not fit.
        """
        with _without_source_lines():
            lowered = program.lower(*arguments)
        if isinstance(lowered, LoweredStep):
            programs = SpanPrograms(*map(self._compile, lowered.programs))
            return dataclasses.replace(lowered.step, programs=programs)
        return self._compile(lowered, whole)

    def _compile(self, lowered: Any, whole: bool = True) -> Any:
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
    sizes = {color: int(size) for color, size in _SPACE.findall(report)}
    if not text or len(text) != len(again) or _DEVICE not in sizes:
        return None
    peak = sizes[_DEVICE]
    return KeptProgram(text, Memory(peak, 0, 0, 0, peak, sizes.get(_HOST, 0)), is_whole=False)


def compiler_options(devices: Sequence[Any], overlap_gathers: bool) -> dict[str, bool | int] | None:
    """The compiler options that a run sets for its process."""
    if devices[0].platform != "tpu":
        return None
    kind = devices[0].device_kind
    chips = len(devices) // slices_of(devices) // (SPEEDS[kind].devices if kind in SPEEDS else 1)
    return xla_options.for_tpu(kind, chips, overlap_gathers)


@contextmanager
def _without_source_lines() -> Iterator[None]:
    """Programs that are lowered inside, with their Pallas kernels, do not name files and lines of Python."""
    frames = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)


def _read(path: Path) -> KeptProgram | None:
    """The program in a file; None if it does not exist or is damaged, which is logged."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        return KeptProgram(content["text"], Memory(**content["memory"]))
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        log.warning("%s: %s; compiling the program again", path, error)
        return None


def _write(path: Path, program: KeptProgram) -> None:
    """Writes a program to the cache. If the directory is not writable, logs that and continues without it."""
    content = json.dumps({"text": program.text, "memory": dataclasses.asdict(program.memory)}).encode()
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(gzip.compress(content, 6, mtime=0))  # its checksum shows damage
        part.replace(path)
    except OSError as error:
        log.warning("%s: %s; the compiled program is not kept", path, error)
        part.unlink(missing_ok=True)
