"""The devices to compile for, present or not (libtpu, through jax)."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero.base.errors import UnknownTopology, UserError, install_command
from zero.costs import formula
from zero.hosts import xla_options
from zero.hosts.speeds import usable_bytes
from zero.hosts.startup import device_memory
from zero.partition.pmapped import pmap

SLICES = re.compile(r"(\d+)x((?:v|tpu7x).+)")  # of one kind: 2xv5e-256
LOCAL = {"local": None, "cpu": "cpu", "gpu": "cuda"}  # devices of this machine, and jax's name of their platform

# For each generation: units per chip as counted in a slice's name, and the dimensions of its torus.
GENERATIONS = {"v2": (2, 2), "v3": (2, 2), "v4": (2, 3), "v5e": (1, 2), "v5p": (2, 3), "v6e": (1, 2), "tpu7x": (2, 3)}
ALIASES = {"v5litepod": "v5e", "v5lite": "v5e"}


def slices_in(topology: str) -> tuple[int, str]:
    """The number of slices in a topology, and the name of one.

    >>> slices_in("2xv5e-256"), slices_in("v3-32")
    ((2, 'v5e-256'), (1, 'v3-32'))
    """
    match = SLICES.fullmatch(topology)
    if match is None:
        return 1, topology
    return int(match[1]), match[2]


def slice_shape(name: str) -> str:
    """libtpu's name of a slice such as `v3-32`; names such as `v3:4x4` are returned unchanged.

    Raises:
      UnknownTopology: the slice does not exist.

    >>> slice_shape("v3-32"), slice_shape("v4-32"), slice_shape("v5litepod-16"), slice_shape("v3:2x2")
    ('v3:4x4', 'v4:2x2x4', 'v5e:4x4', 'v3:2x2')
    """
    match = re.fullmatch(r"(v\w+|tpu7x)-(\d+)", name)
    if match is None and ":" not in name:
        raise UnknownTopology(
            f"topology={name}: expected a slice such as v3-32 or v3:4x4, GPUs as gpu:h100x8, or one of "
            f"{', '.join(LOCAL)}"
        )
    if match is None:
        return name
    generation = ALIASES.get(match[1], match[1])
    count = int(match[2])
    if generation not in GENERATIONS:
        raise UnknownTopology(f"topology={name}: expected one of {', '.join(GENERATIONS)} before the hyphen")
    cores, dims = GENERATIONS[generation]
    chips = count // cores
    if count % cores or chips < 1 or chips & (chips - 1):
        rule = "a power of two" if cores == 1 else f"{cores} times a power of two"
        raise UnknownTopology(
            f"topology={name}: expected {match[1]}- and a number that is {rule}; name other slices by "
            f"their shape, such as {generation}:{'x'.join(['2'] * (dims - 1) + ['4'])}"
        )
    power = chips.bit_length() - 1
    shape = [2 ** ((power + dim) // dims) for dim in range(dims)]
    return f"{generation}:{'x'.join(map(str, sorted(shape, key=lambda size: (size == 1, size))))}"


def prepare_environment(topology: str) -> None:
    """Sets the environment variables that jax reads at its start in the processes that compile.

    Raises:
      UnknownTopology: the topology has no such name, or the TPU compiler is not installed.
    """
    if topology in LOCAL:
        if platform := LOCAL[topology]:
            os.environ["JAX_PLATFORMS"] = platform
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if topology.startswith(formula.PREFIX):
        formula.gpus(topology)  # a misspelled name is refused before processes start
        return
    prepare_compiler(topology)


def prepare_compiler(topology: str) -> None:
    """Sets the environment variables that libtpu reads when it is loaded to compile for a slice.

    Raises:
      UnknownTopology: there is no such slice, or the TPU compiler is not installed.
    """
    slice_shape(slices_in(topology)[1])
    if importlib.util.find_spec("libtpu") is None:
        raise UnknownTopology(
            f"topology={topology}: the TPU compiler (libtpu) is not installed. On x86-64 Linux, without a TPU: "
            + install_command("plan")
        )
    # Do not ask a metadata server for a TPU, and let several processes load libtpu at once.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    # Compilers allocate millions of small objects: their processes take a tenth less time if they keep freed ones.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.tcache_count=65535:glibc.malloc.mxfast=0")
    xla_options.enlarge_stacks()


def topology(name: str) -> list[Any]:
    """The devices of a TPU slice, or of several, which need not be attached: `zero.topology`.

    A mesh of them goes into the shardings of a program that `zero.plan` is asked about:

    >>> import numpy as np
    >>> jax.sharding.Mesh(np.reshape(topology("v5e-8"), (2, 4)), ("data", "model")).size
    8

    Args:
      name: such as "v5e-16", "v4-32", "v3:2x2", or "2xv5e-16" for two slices.

    The compiler is loaded into this process. On a machine that has TPUs plan in a process of its own: this one may
    not be able to use them afterwards.

    Returns:
      Devices in jax's order, which only compilers accept.

    Raises:
      UnknownTopology: there is no such slice, or no compiler: it is the extra `plan`, on x86-64 Linux.
    """
    prepare_compiler(name)
    return find_devices(name)


def find_devices(topology: str) -> list[Any]:
    """The devices of slices or of GPU nodes, which need not exist, or of this machine.

    Raises:
      UnknownTopology: there are no such devices.
    """
    if topology in LOCAL:
        try:
            return list(jax.local_devices())
        except (RuntimeError, AssertionError) as error:  # AssertionError: jax has no CUDA plugin
            raise UnknownTopology(f"topology={topology}: jax finds no such device on this machine") from error
    if topology.startswith(formula.PREFIX):
        return list(formula.gpus(topology))
    from jax.experimental import topologies

    count, name = slices_in(topology)
    shape = slice_shape(name)
    # v4 and v5p run both cores of a chip as one device.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if shape.startswith(("v4:", "v5p:")) else {}
    if set(shape.partition(":")[2].split("x")) == {"1"}:  # a host of one chip; libtpu assumes four
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        described = topologies.get_topology_desc(topology_name=shape, platform="tpu", num_slices=count, **options)
    except jax.errors.JaxRuntimeError as error:
        status, _, reason = str(error).splitlines()[0].partition(": ")
        if status != "INVALID_ARGUMENT":  # not a mistake of the user
            raise
        raise UnknownTopology(f"topology={topology}: {reason}") from error
    return sorted(described.devices, key=lambda device: getattr(device, "slice_index", 0))


def slices_of(devices: Sequence[Any]) -> int:
    """The number of TPU slices that these devices form, by jax's slice indices; 1 for all other devices.

    jax gives such indices to CPUs and GPUs as well.

    Raises:
      UserError: the slices have different sizes, or their devices are interleaved in pmap's order.
    """
    if devices[0].platform != "tpu":
        return 1
    numbers = [getattr(device, "slice_index", 0) for device in devices]
    sizes = {number: numbers.count(number) for number in numbers}
    if len({*sizes.values()}) > 1:
        shown = ", ".join(f"{size} devices of slice {number}" for number, size in sizes.items())
        raise UserError(f"expected slices of equal size, got {shown}")
    if numbers != sorted(numbers):
        raise UserError(f"expected the devices of a slice next to each other, got slices {numbers}")
    return len(sizes)


def available_bytes(devices: list[Any]) -> int:
    """Memory of one device for programs and their data, by its compiler or allocator; on CPU an equal share."""
    device = devices[0]
    if isinstance(device, formula.Gpu):
        return int(usable_bytes(device))
    if device.platform != "tpu" or device.client is jax.local_devices()[0].client:
        return device_memory()
    program = pmap(lambda x: x + 1, "batch", devices, donate_argnums=0)
    too_much = jax.ShapeDtypeStruct((len(devices), 120 * 2**28), jnp.float32)  # libtpu 0.0.40 fails on twice as much
    try:
        program.lower(too_much).compile()
    except jax.errors.JaxRuntimeError as error:
        return out_of_memory(error)[1]
    raise AssertionError("120 GiB fitted on a device")


def out_of_memory(error: Exception) -> tuple[int, int]:
    """The bytes that a program needs and the bytes available, from the TPU compiler's error.

    Raises:
      Exception: the error itself, if it has another cause.
    """
    number = r"([\d.]+)([KMGT]?)"
    for pattern in (rf"\({number}\) exceeds available HBM \({number}\)", rf"Used {number} of {number} hbm"):
        if match := re.search(pattern, str(error)):
            units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
            return int(float(match[1]) * units[match[2]]), int(float(match[3]) * units[match[4]])
    raise error
