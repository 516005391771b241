"""Published peaks of each kind of accelerator, and the constants that convert the compiler's cycles to seconds."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple


class SplashShares(NamedTuple):
    """Shares of the peak that the kernels of splash attention reach.

    Attributes:
      fwd: forward.
      dq: gradient of queries.
      dkv: gradients of keys and values.
      fused: all gradients.
    """

    fwd: float
    dq: float
    dkv: float
    fused: float


class Speed(NamedTuple):
    """Published peaks of one device as jax counts them: half a chip on v2 and v3."""

    flops: float  # bfloat16 operations per second
    memory: float  # bytes per second between HBM and the device
    network: float  # bytes per second that leave the device for others of the slice
    capacity: float = math.inf  # bytes of HBM
    per_cycle: int = 0  # operations of its matrix units per cycle; 0: the compiler writes no cycles
    dims: int = 0  # of the torus; 0: no torus
    ring: int = 0  # positions of a dimension whose ends are linked
    devices: int = 1  # per chip
    fused: float = 0.0  # share of `flops` that zero's attention kernel, or cuDNN's, reaches on blocks that it computes
    wide: float = 0.0  # the same with heads wider than 128, which fill units of 256 columns; 0: as `fused`
    splash: SplashShares | None = None  # the same for jax's splash attention; None: it does not run there
    wide_splash: SplashShares | None = None  # with heads wider than 128; None: as `splash`
    host: float = 16e9  # bytes per second between a chip and the memory of its host, in each direction
    host_memory: float = math.inf  # bytes of the memory of a host per chip
    between_slices: float = 0.0  # bytes per second that a device sends to other slices; 0: it has none
    offloads: bool = False  # whether a SparseCore can run reduce-scatters of a whole slice, beside computation
    int8: float = 1.0  # times `flops`: products of int8 with sums in int32
    int8_by_xla: float = 0.0  # the same, multiplied by their scales, as XLA reaches it; 0: as `int8`
    float8: float = 1.0  # times `flops`: products of float8 with sums in float32
    vmem_kib: int | None = None  # that a fusion may use (docs/decisions/attention.md); None: by the compiler

    @property
    def clock(self) -> float:
        """Cycles per second."""
        return self.flops / self.per_cycle

    def attention(self, width: int) -> float:
        """The share of `flops` that zero's attention kernel, or cuDNN's, reaches with heads of this width.

        >>> SPEEDS["TPU v6 lite"].attention(128), SPEEDS["TPU v6 lite"].attention(256), SPEEDS["TPU v4"].attention(256)
        (0.45, 0.7, 0.77)
        """
        return self.wide if self.wide and width > 128 else self.fused

    def products(self, operands: str) -> float:
        """Operations per second of matrix products of "int8", of "float8", or ("") of bfloat16."""
        return self.flops * {"int8": self.int8, "float8": self.float8}.get(operands, 1.0)

    def gain(self, operands: str) -> float:
        """How many times as fast XLA multiplies "int8" or "float8", with their scales, as it multiplies bfloat16.

        >>> SPEEDS["TPU v5 lite"].gain("int8"), SPEEDS["TPU v6 lite"].gain("int8"), SPEEDS["TPU v6 lite"].gain("float8")
        (2.0, 1.17, 1.0)
        """
        if operands == "int8" and self.int8_by_xla:
            return self.int8_by_xla
        return self.products(operands) / self.flops

    @property
    def link(self) -> float:
        """Bytes per second that one link between two chips carries in one direction."""
        return self.network * self.devices / (2 * self.dims)

    @property
    def host_share(self) -> float:
        """Bytes of the memory of a host per device that activations may take; infinite if not known.

        >>> SPEEDS["TPU v5 lite"].host_share, SPEEDS["NVIDIA L4"].host_share
        (38400000000.0, inf)
        """
        return HOST_SHARE * self.host_memory / self.devices


GIB = 2**30
HOST_SHARE = 0.8  # of a host's memory; the rest is for the system, the data and copies of a checkpoint being saved
_MXU = 2 * 128 * 128  # operations per cycle of a matrix unit
_CUDNN = 0.4  # share of the peak that cuDNN's attention reaches on an H100 (benchmarks/measured/kernels-on-h100.md)
# Shares of kernels by their bundles: benchmarks/measured/predicted-time.md. Other generations were counted as a whole.
_SPLASH_V6E = SplashShares(fwd=0.28, dq=0.36, dkv=0.38, fused=0.45)
_WIDE_SPLASH_V6E = SplashShares(fwd=0.47, dq=0.57, dkv=0.54, fused=0.60)

# Sources: cloud.google.com/tpu/docs/v3, v4, v5e, v5p and v6e, system architecture: peak compute, HBM bandwidth, number
# of matrix units, and all-reduce bandwidth of a pod divided by its chips (v5p: half of the bidirectional bandwidth of a
# chip). v6e has two units of 256 x 256, which take two rows per cycle: the compiler rates products at 1.4 times the
# speed of one row. v2: Jouppi et al., A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 63(7),
# table 3: four links of 496 Gbit/s. Rings (jax-ml.github.io/scaling-book/tpus): v2 and v3 the whole pod, v5e and v6e
# 16 chips, v4 and v5p every four chips. Shares of kernels: docs/decisions/plans.md.
# TPU7x: cloud.google.com/tpu/docs/tpu7x, half a chip, which is one device; its two units are a v6e's, by the cycles
# that the compiler gives products, and so is its share of splash attention.
# Between slices: 25, 50, 100 and 100 Gbit/s per chip of v5e, v5p, v6e and TPU7x (cloud.google.com/tpu/docs/v6e and
# tpu7x: data center network); of others 25 GB/s per host (jax-ml.github.io/scaling-book/tpus), of 8 devices or 4 of v4.
# 8 bits: the same pages. int8 is twice as fast on v5e, v5p and v6e, float8 on TPU7x; a v4 multiplies int8 as fast as
# bfloat16, and where a page names no int8 or float8, or the same figure, it counts as bfloat16. What XLA reaches is by
# the compiler's cycles (benchmarks/measured/products-in-8-bits.md): on a v5e twice the speed, on a v6e less.
# Memory of hosts, in GB per chip: of v5p, v6e and TPU7x the page of TPU7x (448, 720 and 960 for four chips); of v5e the
# machine types ct5lp-hightpu-1t to -8t (48 for one, 384 for eight); of v4 ct4p-hightpu-4t (407 for four); of v2
# and v3 what a v3-8 shows (335 for four). Types: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
# Host: PCIe, about 16 GB/s per chip (jax-ml.github.io/scaling-book/tpus). A v6e has the fifth generation of PCIe
# (docs.cloud.google.com/tpu/docs/v6e), of sixteen lanes by published steps (benchmarks/measured/predicted-time.md,
# waits for the host's link). A TPU7x, of which nothing is published, counts as half of that.
# NVIDIA: data sheets of H200, H100 (SXM), A100, L4, T4 and HGX B200, and appendix A of the Ada GPU architecture paper:
# dense bfloat16 with float32 sums, NVLink in one direction, or PCIe (x16) where there is none. T4 has no bfloat16: its
# float16 peak, which bfloat16 does not reach.
SPEEDS = {
    "TPU v2": Speed(
        45e12 / 2,
        700e9 / 2,
        4 * 62e9 / 2,
        8 * GIB,
        per_cycle=_MXU,
        dims=2,
        ring=16,
        devices=2,
        fused=0.95,
        host_memory=335e9 / 4,
        between_slices=25e9 / 8,
    ),
    "TPU v3": Speed(
        123e12 / 2,
        900e9 / 2,
        340e12 / 1024 / 2,
        16 * GIB,
        per_cycle=2 * _MXU,
        dims=2,
        ring=32,
        devices=2,
        fused=0.82,
        host_memory=335e9 / 4,
        between_slices=25e9 / 8,
    ),
    "TPU v4": Speed(
        275e12,
        1200e9,
        1.1e15 / 4096,
        32 * GIB,
        per_cycle=8 * _MXU,
        dims=3,
        ring=4,
        splash=SplashShares(*[0.7] * 4),
        fused=0.77,
        host_memory=407e9 / 4,
        between_slices=25e9 / 4,
    ),
    "TPU v5 lite": Speed(
        197e12,
        819e9,
        51.2e12 / 256,
        16 * GIB,
        per_cycle=4 * _MXU,
        dims=2,
        ring=16,
        splash=SplashShares(*[0.85] * 4),
        fused=0.87,
        int8=2,
        host_memory=48e9,
        between_slices=25e9 / 8,
        vmem_kib=32 * 1024,
    ),
    "TPU v5": Speed(
        459e12,
        2765e9,
        600e9,
        95 * GIB,
        per_cycle=8 * _MXU,
        dims=3,
        ring=4,
        splash=SplashShares(*[0.83] * 4),
        fused=0.86,
        int8=2,
        host_memory=448e9 / 4,
        between_slices=50e9 / 8,
        vmem_kib=32 * 1024,
    ),
    "TPU v6 lite": Speed(
        918e12,
        1640e9,
        102.4e12 / 256,
        32 * GIB,
        per_cycle=16 * _MXU,
        dims=2,
        ring=16,
        splash=_SPLASH_V6E,
        wide_splash=_WIDE_SPLASH_V6E,
        fused=0.45,
        wide=0.7,
        int8=2,
        int8_by_xla=1.17,
        host_memory=720e9 / 4,
        between_slices=100e9 / 8,
        host=63e9,
        offloads=True,
        vmem_kib=64 * 1024,
    ),
    "TPU7x": Speed(
        2307e12 / 2,
        7380e9 / 2,
        600e9 / 2,
        96 * GIB,
        per_cycle=16 * _MXU,
        dims=3,
        ring=4,
        devices=2,
        splash=_SPLASH_V6E,
        wide_splash=_WIDE_SPLASH_V6E,
        fused=0.5,
        wide=0.81,
        float8=2,
        host_memory=960e9 / 4,
        between_slices=100e9 / 8 / 2,
        host=32e9,
        offloads=True,
        vmem_kib=64 * 1024,
    ),
    "NVIDIA A100-SXM4-40GB": Speed(312e12, 1555e9, 300e9, 40e9, fused=_CUDNN, int8=2),
    "NVIDIA A100-SXM4-80GB": Speed(312e12, 2039e9, 300e9, 80e9, fused=_CUDNN, int8=2),
    "NVIDIA B200": Speed(2250e12, 8000e9, 900e9, 180e9, fused=_CUDNN, int8=2, float8=2),
    "NVIDIA GeForce RTX 4090": Speed(165.2e12, 1008e9, 32e9, 24e9, fused=_CUDNN, int8=4, float8=2),
    "NVIDIA H100 80GB HBM3": Speed(989e12, 3350e9, 450e9, 80e9, fused=_CUDNN, int8=2, float8=2),
    "NVIDIA H200": Speed(989e12, 4800e9, 450e9, 141e9, fused=_CUDNN, int8=2, float8=2),
    "NVIDIA L4": Speed(121e12, 300e9, 32e9, 24e9, fused=_CUDNN, int8=2, float8=2),
    "Tesla T4": Speed(65e12, 320e9, 16e9, 16e9, fused=_CUDNN, int8=2),
}
HOP = 1e-6  # seconds from a chip to the next one, about (jax-ml.github.io/scaling-book/sharding)


def usable_bytes(device: Any) -> float:
    """Bytes of the memory of a device that programs may take: of a GPU what jax allocates; infinite if not known.

    >>> from zero.costs.formula import gpus
    >>> usable_bytes(gpus("gpu:h100x1")[0])
    60000000000.0
    """
    speed = SPEEDS.get(device.device_kind)
    if speed is None:
        return math.inf
    return speed.capacity * (jax_share() if device.platform == "gpu" else 1.0)


def jax_share() -> float:
    """The share of a GPU's memory that jax allocates, by the variable that jaxlib reads, or by its earlier name."""
    share = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    return float(share or 0.75)


def peak_flops(device: Any) -> float | None:
    """Published peak of a device in bfloat16 operations per second, None if it is not in `SPEEDS`."""
    speed = SPEEDS.get(device.device_kind)
    return None if speed is None else speed.flops


def host_memory(devices: Sequence[Any]) -> int | None:
    """Bytes of the memory of one host that activations may take; None if it is not known.

    Args:
      devices: of a whole slice, as jax describes them.
    """
    speed = SPEEDS.get(devices[0].device_kind)
    if speed is None or math.isinf(speed.host_memory):
        return None
    hosts = len({device.process_index for device in devices})
    return int(speed.host_share * len(devices) / hosts)
