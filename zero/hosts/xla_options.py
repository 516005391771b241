"""Options of XLA: a run sets them for its process before XLA starts, and `mode=plan` compiles with the same ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from zero.hosts.speeds import SPEEDS

log = logging.getLogger(__name__)

# Gathers and all-to-alls run beside computation; on SparseCores gathers and reduce-scatters.
# Source: docs/decisions/collectives.md
GATHERS, EXCHANGES = "xla_enable_async_all_gather", "xla_tpu_enable_async_all_to_all"
OVERLAP_ON_TPU = (GATHERS, EXCHANGES)
# The most chips of a slice whose all-to-alls run beside computation: "Async all-to-all not supported on limited ICI"
# ends a compilation for more (libtpu 0.0.42 and 0.0.52).
MOST_CHIPS = {"TPU v5 lite": 16}
SPARSECORES_GATHER = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
OVERLAP_ON_SPARSECORES = (SPARSECORES_GATHER, "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter")
# SparseCores of a v5p run gathers alone, for both TensorCores of a chip, with the options of Google's recipe for
# DeepSeek-V3. Source: AI-Hypercomputer/tpu-recipes, training/v5p/DeepSeek3-671B-MaxText
GATHERS_ON_SPARSECORES = {
    "TPU v5": (
        SPARSECORES_GATHER,
        "xla_tpu_use_tc_device_shape_on_sc",
        "xla_sc_disable_megacore_partitioning",
    )
}
# The scheduler expects reduce-scatters of SparseCores to take a fraction of the time that their bytes are on the links,
# and starts them so late that the end of a layer waits. Source: benchmarks/measured/hidden-gathers.md
SCATTER_LATENCY = "xla_tpu_sparse_core_reduce_scatter_latency_multiplier"
SCATTERS_TAKE = {"TPU v6 lite": 4}
# Without it XLA turns more gathers into all-reduces, which send twice the bytes: over large slices with three
# dimensions, and of narrow leaves on a v6e, where the TensorCore runs them. Gathers fused into products would hide the
# rest, but libtpu from 0.0.44 on refuses them on v4 and v5p: they may give wrong results.
TRUE_GATHERS = "xla_tpu_prefer_async_allgather_to_allreduce"
# The scheduler lets transfers of SparseCores queue, so that more of them run beside products.
# Source: benchmarks/measured/hidden-gathers.md
QUEUE = "xla_tpu_enable_sparse_core_offload_queuing_in_lhs"
QUEUES = ("TPU v6 lite",)
# SparseCores run all-to-alls whose parts are in the first dimension, as those of gradients are
# (zero/partition/collectives/arrays.py); another one ends the compilation. For slices whose scatters are all-to-alls,
# by their chips.
EXCHANGES_ON_SPARSECORES = "xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all"
EXCHANGED_OVER = {"TPU v6 lite": (16, 64)}
# There the scheduler starts loads from the host's memory so late that the end of a layer waits for them, unless it
# expects a far slower link. Of 0.0003 to 0.003 the best. Source: benchmarks/measured/hidden-gathers.md
HOST_LINK, EXPECTED_LINK = "xla_tpu_pcie_bandwidth_multiplier", 0.0007
VMEM = "xla_tpu_scoped_vmem_limit_kib"  # of one fusion
# Bytes of the stacks of libtpu's threads. The compiler overflows its default (64 KiB, by the addresses of its trace)
# where products are fused into products of products: it estimates their cost by recursion (libtpu 0.0.42).
STACKS = {"fibers_default_thread_stack_size": 2 * 2**20}
# Collectives start early and overlap with computation, the next layer's with this one's.
# Source: docs.jax.dev/en/latest/gpu_performance_tips.html
OVERLAP_ON_GPU = (
    "xla_gpu_enable_latency_hiding_scheduler",
    "xla_gpu_enable_pipelined_all_gather",
    "xla_gpu_enable_pipelined_reduce_scatter",
    "xla_gpu_enable_while_loop_double_buffering",
)
# Source: jax/_src/hardware_utils.py; v2 and v3 have the same number.
PCI = Path("/sys/bus/pci/devices")
PCI_VENDOR = "0x1ae0"
PCI_DEVICES = {
    "0x005e": "TPU v4",
    "0x0062": "TPU v5",
    "0x0063": "TPU v5 lite",
    "0x006f": "TPU v6 lite",
    "0x0076": "TPU7x",
}


def overlaps_exchanges(device_kind: str | None, chips: int) -> bool:
    """Whether all-to-alls on a slice of this many chips overlap with computation.

    >>> overlaps_exchanges("TPU v5 lite", 16), overlaps_exchanges("TPU v5 lite", 32), overlaps_exchanges("TPU v4", 64)
    (True, False, True)
    """
    return chips <= MOST_CHIPS.get(device_kind or "", chips)


def for_tpu(device_kind: str | None, chips: int, overlap_gathers: bool) -> dict[str, bool | int]:
    """Options for slices of this many chips of a TPU kind, as jax names it; None for an unknown kind.

    >>> for_tpu("TPU v3", 32, True)
    {'xla_enable_async_all_gather': True, 'xla_tpu_enable_async_all_to_all': True}
    """
    speed = SPEEDS.get(device_kind or "")
    names: tuple[str, ...] = OVERLAP_ON_TPU
    if speed is not None and speed.offloads:
        names += OVERLAP_ON_SPARSECORES
    names += GATHERS_ON_SPARSECORES.get(device_kind or "", ())
    if device_kind in QUEUES or (speed is not None and speed.dims == 3):
        names += (TRUE_GATHERS,)
    if device_kind in QUEUES:
        names += (QUEUE,)
    options: dict[str, bool | int] = dict.fromkeys(names, overlap_gathers)
    if overlap_gathers and device_kind in SCATTERS_TAKE:
        options[SCATTER_LATENCY] = SCATTERS_TAKE[device_kind]
    options[EXCHANGES] = overlap_gathers and overlaps_exchanges(device_kind, chips)
    if speed is not None and speed.vmem_kib is not None:
        options[VMEM] = speed.vmem_kib
    return options


def without_groups(device_kind: str | None, chips: int) -> dict[str, bool | float]:
    """Further options of a training run with `overlap_gathers` that has no tensor, context or expert groups.

    >>> list(without_groups("TPU v6 lite", 64)) == [EXCHANGES_ON_SPARSECORES, HOST_LINK]
    True
    >>> without_groups("TPU v6 lite", 256), without_groups("TPU v4", 64)
    ({}, {})
    """
    if chips not in EXCHANGED_OVER.get(device_kind or "", ()):
        return {}
    return {EXCHANGES_ON_SPARSECORES: True, HOST_LINK: EXPECTED_LINK}


def enlarge_stacks() -> None:
    """Gives the threads of libtpu's compiler, which has to start after this, stacks that no program overflows."""
    _append("LIBTPU_INIT_ARGS", STACKS)


def set_before_start(overlap_gathers: bool, extra: str | None, hosts: int = 1, in_groups: bool = True) -> None:
    """Sets the options for TPU, and for NVIDIA's GPUs; a value that is set already stays.

    `extra` is what `startup.accelerator` returns: "cuda12" for any of NVIDIA's GPUs. `hosts` are those of the job, each
    with as many chips as this machine. `in_groups` is false if a training run has no groups (`without_groups`).

    XLA reads the environment variables LIBTPU_INIT_ARGS and XLA_FLAGS when it starts.
    """
    kind, chips = _tpus_of_this_machine()
    chips *= hosts
    if kind in MOST_CHIPS or kind in EXCHANGED_OVER:
        chips //= _slices_of_the_job()
    _append("LIBTPU_INIT_ARGS", for_tpu(kind, chips, overlap_gathers))
    if overlap_gathers and not in_groups:
        _append("LIBTPU_INIT_ARGS", without_groups(kind, chips))
    enlarge_stacks()
    if extra == "cuda12":
        _append("XLA_FLAGS", dict.fromkeys(OVERLAP_ON_GPU, overlap_gathers))
        log.info("XLA_FLAGS=%s", os.environ["XLA_FLAGS"])


def _slices_of_the_job() -> int:
    """The slices of TPUs, where jax too finds their number: in the environment, or in the metadata of the machine."""
    from jax._src.clusters.cloud_tpu_cluster import get_tpu_env_value  # jax has no public name for it

    try:
        return int(get_tpu_env_value("MEGASCALE_NUM_SLICES") or 1)
    except OSError as error:
        log.warning("assuming one slice: MEGASCALE_NUM_SLICES is not set, and there is no metadata (%s)", error)
        return 1


def _tpus_of_this_machine() -> tuple[str | None, int]:
    """The kind of the TPUs of this machine by the numbers of its PCI devices, if one is known, and how many it has."""
    kinds = []
    for vendor in PCI.glob("*/vendor"):
        number = vendor.with_name("device").read_text().strip()
        if vendor.read_text().strip() == PCI_VENDOR and number in PCI_DEVICES:
            kinds.append(PCI_DEVICES[number])
    if not kinds:
        return None, 0
    return kinds[0], len(kinds)


def _append(variable: str, options: Mapping[str, bool | float]) -> None:
    """Appends the options that an environment variable does not set yet."""
    flags = os.environ.get(variable, "")
    names = {option.partition("=")[0] for option in flags.split()}
    added = [f"--{name}={str(value).lower()}" for name, value in options.items() if f"--{name}" not in names]
    os.environ[variable] = " ".join([flags, *added]).strip()
