"""The settings of zero's attention kernel, by generation of TPU."""

from typing import NamedTuple


class TpuKernel(NamedTuple):
    """The settings of `fused_attention` for generations of TPU (docs/decisions/attention.md)."""

    block: int  # queries of a tile of scores, and its keys in the backward pass
    keys: int  # of a tile in the forward pass
    gradient: int  # most bytes of VMEM for the gradient of queries, in float32
    vmem: int | None = None  # bytes that a kernel may use; None for the compiler's limit
    in_float32: bool = False  # Mosaic compiles no bfloat16 product; the units round float32 to bfloat16 themselves
    has_splash: bool = True  # whether jax's splash attention compiles too
    narrow: int = 0  # heads up to this width do not fill a matrix unit, and stay together in products


CHUNK = 1024  # positions whose loops are unrolled; with 2,048 the compiler spills too many registers
_MIB = 2**20
# By the first generation that they are for.
TPU_KERNELS = {
    "tpu_v2": TpuKernel(256, 256, _MIB, in_float32=True, has_splash=False),
    "tpu_v4": TpuKernel(256, 256, 4 * _MIB),
    "tpu_v5e": TpuKernel(256, 128, 32 * _MIB, vmem=48 * _MIB),
    "tpu_v6e": TpuKernel(512, 256, 32 * _MIB, vmem=48 * _MIB, narrow=128),
}
