"""`zero-train --doctor [key=value ...]`: whether this machine can train, with the remedy of each fault (packaging).

It takes the arguments of a training run, joins the other hosts as training does, and prints one line per check.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero.base.errors import UserError, first_line, install_command
from zero.partition.global_arrays import pmap_devices
from zero.partition.pmapped import pmap

if TYPE_CHECKING:
    from zero.hosts import startup
    from zero.job.sharding import Sharding
    from zero.models.config import GPTConfig
    from zero.run import directory, step_programs

GIB = 2**30
SHOWN = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint")
STATE_BYTES = 12  # per parameter in a checkpoint: float32 weights and the two moments of AdamW
SLOW = 0.5  # share of the published peak, or of the median device, below which something is wrong
BUCKET_SECONDS = 60  # for an answer of the bucket
STALL_MINUTES = 3  # in a collective, after which the watchdog logs the stacks and ends this process


class Fault(Exception):
    """What is wrong, and its remedy."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(found)
        self.remedy = remedy


class Settings(NamedTuple):
    """The run that the arguments describe."""

    distributed: startup.DistributedKeys
    zero: Sharding
    profile: step_programs.StepProgramKeys
    data: directory.DirectoryKeys
    size: GPTConfig
    slice_of_tpus: str | None = None  # as it was chosen, such as +preset=v3-32


def main(arguments: Sequence[str]) -> int:
    """Prints one line per check of this host, and one per fault.

    Returns:
      The exit status: 0, or 1 if there is a fault.
    """
    faults = _show("packages", packages, "")
    try:
        settings, mistakes = _settings(arguments)
    except ImportError as error:  # nothing else can be examined without them
        return _verdict(faults + _line("settings", Fault(first_line(error), install_command("train"))))
    for mistake in mistakes:
        faults += _line("settings", Fault(mistake, "fix it; the other checks use the defaults"))
    for name, (check, remedy) in CHECKS.items():
        faults += _show(name, partial(check, settings), remedy)
    return _verdict(faults)


def _settings(arguments: Sequence[str]) -> tuple[Settings, list[str]]:
    """The settings of these arguments, or the default ones and a line for each mistake."""
    from zero.commands.cli import compose

    overrides = [argument for argument in arguments if not argument.startswith("--resume")]
    chosen: Iterator[str] = (argument for argument in overrides if argument.startswith(("+slice=", "+preset=")))
    try:
        config, size = compose(overrides)
        mistakes = []
    except UserError as error:
        config, size = compose([])
        chosen = iter(())
        mistakes = str(error).splitlines()
    sections = (config.distributed, config.zero, config.profile, config.data)
    return Settings(*sections, size, next(chosen, None)), mistakes


# ---- the checks: each returns what it found, or raises a Fault or an error of a library -----------------------------


def packages() -> str:
    """Versions, which have to be those that zero-pmap and jax ask for, the plugins of accelerators included."""
    wrong = [*_unmet("zero-pmap", ("", "train"), optional=False)]
    wrong += _unmet("jax", ("", "tpu", "cuda12", "cuda13", "cuda12-local", "cuda13-local"), optional=True)
    if wrong:
        install = dict.fromkeys(f"'{requirement}'" for _, requirement in wrong)
        raise Fault("; ".join(problem for problem, _ in wrong), f"pip install -U {' '.join(install)}")
    versions = {name: _version(name) for name in SHOWN}
    installed = [f"{name} {version}" for name, version in versions.items() if version]
    return ", ".join([f"Python {platform.python_version()}", *installed])


def _unmet(distribution: str, extras: Sequence[str], *, optional: bool) -> Iterator[tuple[str, str]]:
    """Unmet requirements of a distribution: the version found, and the version required."""
    from packaging.requirements import Requirement

    for text in requires(distribution) or ():
        requirement = Requirement(text)
        name = requirement.name
        specifier = requirement.specifier
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        installed = _version(name)
        if installed is None and not optional:
            yield f"{name} is missing", f"{name}{specifier}"
        elif installed is not None and not specifier.contains(installed, prereleases=True):
            yield (
                f"{name} {installed} does not satisfy {specifier}, which {distribution} requires",
                f"{name}{specifier}",
            )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def hosts(settings: Settings) -> str:
    """Joins the other hosts and starts the devices, exactly as training does."""
    from zero.hosts import startup

    options = asdict(settings.distributed) | {"stall_minutes": STALL_MINUTES, "start_minutes": None}
    index, count = startup.start(**options, overlap_gathers=settings.zero.overlap_gathers)
    if count > 1:
        return f"host {index} of {count}"
    return "one host"


def devices(settings: Settings) -> str:
    from zero.hosts import hardware, startup

    if (missing := hardware.missing_driver()) is not None:
        raise Fault(missing.problem, missing.remedy)
    local = jax.local_devices()
    platform_name = jax.default_backend()
    extra = hardware.accelerator()
    if platform_name == "cpu" and extra is None and settings.slice_of_tpus is not None and not hardware.wants_cpu():
        raise Fault(f"{settings.slice_of_tpus} is for TPUs, and this machine has none", "run it on the slice")
    if platform_name == "cpu" and extra is not None:
        hidden = os.environ.get("JAX_PLATFORMS")
        remedy = f"unset JAX_PLATFORMS, which is {hidden}" if hidden else f"pip install -U 'jax[{extra}]'"
        raise Fault("jax uses the CPU, though this machine has an accelerator", remedy)
    kinds = " and ".join(sorted({device.device_kind for device in local}))
    memory = f"{startup.device_memory() / GIB:.1f} GiB of memory each"
    return f"{jax.device_count()} x {kinds}, {len(local)} of them on this host, {memory}"


def collectives(settings: Settings) -> str:
    """Two sums, sums within pairs, a gather and a scatter over all devices of all hosts, compared exactly."""
    from zero.hosts import watchdog

    ordered = pmap_devices()
    count = len(ordered)
    first = ordered.index(jax.local_devices()[0])
    pairs = [[i, i + 1] for i in range(0, count - count % 2, 2)] if count % 2 == 0 else [[i] for i in range(count)]
    group = len(pairs[0])

    def on_device(one: jax.Array) -> dict[str, jax.Array]:
        me = lax.axis_index("doctor")
        everyone = jnp.arange(count)
        whole = count * (count - 1) // 2
        in_pair = group * (me - me % group) + group * (group - 1) // 2
        return {
            "psum": lax.psum(me * one, "doctor") == whole,
            "a second psum": lax.psum(one, "doctor") == count,
            "psum within groups": lax.psum(me * one, "doctor", axis_index_groups=pairs) == in_pair,
            "all_gather": jnp.all(lax.all_gather(me * one, "doctor") == everyone),
            "psum_scatter": lax.psum_scatter(me * one + everyone, "doctor") == whole + count * me,
        }

    watchdog.progress()  # from here on a stall ends this process
    started = time.monotonic()
    right = jax.device_get(pmap(on_device, "doctor")(np.ones(jax.local_device_count(), np.int32)))
    wrong = []
    for name, flags in right.items():
        wrong += [f"{name} on device {first + i}" for i in np.flatnonzero(~flags)]
    if wrong:
        raise Fault(f"wrong results: {', '.join(wrong)}", CHECKS["collectives"][1])
    return (
        f"{len(right)} kinds over {count} devices are exact; {time.monotonic() - started:.1f} s including compilation"
    )


def matrix_products(settings: Settings) -> str:
    """The speed of each device of this host, measured alone, beside the published peak."""
    from zero.hosts.speeds import peak_flops

    local = jax.local_devices()
    is_cpu = local[0].platform == "cpu"
    size, times, dtype = (512, 4, jnp.float32) if is_cpu else (4096, 32, jnp.bfloat16)
    multiply = jax.jit(lambda x: lax.fori_loop(0, times, lambda _, y: (x @ y) / size, x))
    rates = []
    for device in local:
        x = jax.device_put(jnp.ones((size, size), dtype), device)
        seconds = []
        for _ in range(4):  # the first one compiles
            started = time.perf_counter()
            multiply(x).block_until_ready()
            seconds.append(time.perf_counter() - started)
        rates.append(2 * size**3 * times / min(seconds[1:]))
    slowest = min(rates)
    peak = settings.profile.peak_flops or peak_flops(local[0])
    share = "" if peak is None else f", {slowest / peak:.0%} of the published peak"
    text = f"{slowest / 1e12:.3g} TFLOP/s on the slowest device of this host{share} ({dtype.__name__})"
    expected = max(peak or 0.0, 0.0 if is_cpu else statistics.median(rates))  # virtual devices share the cores
    if slowest < SLOW * expected:
        raise Fault(f"{text}: device {rates.index(slowest)} of this host", CHECKS["matrix products"][1])
    return text


def disk(settings: Settings) -> str:
    """Free space for the run, and for its checkpoints if they stay on this host."""
    from zero.models.gpt import variable_shapes
    from zero.record.run_files import checkpoint_directory

    data = settings.data
    place = checkpoint_directory(Path.cwd(), data.bucket_path, data.checkpoint_directory)
    is_local = isinstance(place, Path)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variable_shapes(settings.size)))
    # The best one, the kept ones, and the one being written.
    needed = GIB + (STATE_BYTES * parameters * (data.keep_checkpoints + 2) if is_local else 0)
    where = next(path for path in (Path(place) if is_local else Path.cwd(), *Path(place).parents) if path.exists())
    free = shutil.disk_usage(where).free
    text = f"{free / GIB:.1f} GiB free in {where}, this run needs about {needed / GIB:.1f}"
    if not os.access(where, os.W_OK):
        raise Fault(f"{where} is not writable", "start in another directory, or set data.checkpoint_directory")
    if free < needed:
        raise Fault(text, "free some space, lower data.keep_checkpoints, or set data.bucket_path")
    return text


def bucket(settings: Settings) -> str:
    """Writes, reads, lists and deletes a small object in the place of the checkpoints."""
    from zero.files import storage

    data = settings.data
    if not data.bucket_path:
        return "none (data.bucket_path)"
    folder = storage.join(storage.bucket(data.bucket_path), data.checkpoint_directory) + "-doctor"
    url = f"{folder}/{secrets.token_hex(8)}"
    content = secrets.token_bytes(64)
    started = time.monotonic()
    with storage.deadline_of(BUCKET_SECONDS):
        storage.write(url, content)
        is_kept = storage.read_bytes(url) == content and url in storage.list_files(folder)
        storage.remove(url)
    if not is_kept:
        raise Fault(f"{url} was written, but reads back differently", "check the bucket with gcloud storage ls")
    return f"{storage.bucket(data.bucket_path)} can be written, read, listed; {time.monotonic() - started:.1f} s"


# In this order; each with a remedy for errors raised by libraries.
CHECKS: dict[str, tuple[Callable[[Settings], str], str]] = {
    "hosts": (hosts, "start this command on all hosts at once; end other programs that use the accelerators"),
    "devices": (devices, "end other programs that use the accelerators, or restart this machine"),
    "collectives": (collectives, "restart all hosts; if it happens again, delete the slice and create another one"),
    "matrix products": (matrix_products, "end other programs that use this device; if there are none, replace it"),
    "disk": (disk, "set data.checkpoint_directory to one that exists"),
    "bucket": (
        bucket,
        "gcloud auth application-default login, or give the account of this machine roles/storage.objectAdmin and "
        "roles/storage.legacyBucketReader on the bucket",
    ),
}


# ---- what is printed ------------------------------------------------------------------------------------------------


def _show(name: str, check: Callable[[], str], remedy: str) -> int:
    """Prints the line of a check; the number of faults that it found."""
    try:
        return _line(name, check())
    except Fault as fault:
        return _line(name, fault)
    except ImportError as error:
        return _line(name, Fault(first_line(error), install_command("train")))
    except (UserError, OSError, RuntimeError) as error:  # jax's own errors are RuntimeErrors
        return _line(name, Fault(first_line(error), remedy))


def _line(name: str, result: str | Fault) -> int:
    if isinstance(result, Fault):
        print(f"FAULT  {name:15}  {result}; remedy: {result.remedy}", flush=True)
        return 1
    print(f"ok     {name:15}  {result}", flush=True)
    return 0


def _verdict(faults: int) -> int:
    if not faults:
        print("no faults", flush=True)
        return 0
    noun = "fault" if faults == 1 else "faults"
    print(f"{faults} {noun}", flush=True)
    return 1
