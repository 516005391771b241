"""The settings of zero's attention kernel, by generation of TPU, and how they cut rows."""

import math
from typing import NamedTuple

_LANES = 128
_CHUNK = 1024  # positions whose loops are unrolled; with 2,048 the compiler spills too many registers


class TpuKernel(NamedTuple):
    """The settings of `fused_attention` for generations of TPU (docs/decisions/attention.md)."""

    block: int  # queries of a tile of scores, and its keys in the backward pass
    tile_keys: int  # keys of a tile in the forward pass
    gradient: int  # most bytes of VMEM for the gradient of queries, in float32
    vmem: int | None = None  # bytes that a kernel may use; None for the compiler's limit
    in_float32: bool = False  # Mosaic compiles no bfloat16 product; the units round float32 to bfloat16 themselves
    has_splash: bool = True  # whether jax's splash attention compiles too
    narrow: int = 0  # heads up to this width do not fill a matrix unit, and stay together in products

    def cut(self, positions: int, width: int, itemsize: int) -> tuple[int, int, int]:
        """Positions of a block, blocks of a chunk, and chunks of a row, for heads of this width and bytes per number.

        Chunks are shorter for wide heads, for narrow ones, which are padded to whole lanes, and where products take
        operands in float32, so that they fit in VMEM. Heads wider than 128 count as wide, or wider than 256 where a
        kernel may use more VMEM and numbers have two bytes.

        >>> v6e = TPU_KERNELS["tpu_v6e"]
        >>> v6e.cut(8192, 128, 2), v6e.cut(8192, 512, 2), v6e.cut(1920, 128, 2)
        ((512, 2, 8), (512, 1, 16), (128, 5, 3))
        """
        wide = _LANES
        if self.vmem is not None and itemsize == 2:
            wide = 2 * _LANES
        most = _CHUNK * wide // max(wide, width)
        if width % _LANES > 0 or (self.in_float32 and itemsize == 4):
            most //= 2
        return cut_positions(positions, self.block, most)

    def most_sharing(self, window: int, positions: int, width: int) -> int:
        """How many heads of queries, each of this width, may share one head of keys.

        VMEM holds their gradients of queries: of a row, or of the chunks that a window (0: none) touches.

        >>> v6e = TPU_KERNELS["tpu_v6e"]
        >>> [v6e.most_sharing(0, positions, 128) for positions in (4096, 8192, 32768, 65536)]
        [16, 8, 2, 1]
        >>> v6e.most_sharing(4096, 65536, 128)
        12
        """
        most_held = max(self._held(window, positions, width, itemsize) for itemsize in (2, 4))
        return self.gradient // (4 * most_held * max(width, _LANES))

    def _held(self, window: int, positions: int, width: int, itemsize: int) -> int:
        """Positions whose gradients the backward kernel holds."""
        if not window:
            return positions
        block, blocks, _ = self.cut(positions, width, itemsize)
        chunk = block * blocks
        return min(positions, (chunks_reached(window, chunk) + 1) * chunk)


def chunks_reached(window: int, chunk: int) -> int:
    """How many chunks before its own the earliest key that a query sees can lie.

    >>> [chunks_reached(window, 1024) for window in (1, 2, 1025, 1026)]
    [0, 1, 1, 2]
    """
    return math.ceil((window - 1) / chunk)


def cut_positions(positions: int, block: int, most: int) -> tuple[int, int, int]:
    """Positions of a block, at most `block`; blocks of a chunk of at most `most` positions; chunks.

    >>> cut_positions(8192, 512, 1024), cut_positions(1920, 256, 1024), cut_positions(4096, 512, 204)
    ((512, 2, 8), (128, 5, 3), (128, 1, 32))
    """
    fitting = [size for size in (512, 256, _LANES) if size <= min(block, most) and positions % size == 0]
    block = max(fitting, default=_LANES)
    blocks = next(count for count in range(max(1, most // block), 0, -1) if positions // block % count == 0)
    return block, blocks, positions // block // blocks


_MIB = 2**20
# By the first generation that they are for.
TPU_KERNELS = {
    "tpu_v2": TpuKernel(256, 256, _MIB, in_float32=True, has_splash=False),
    "tpu_v4": TpuKernel(256, 256, 4 * _MIB),
    "tpu_v5e": TpuKernel(256, 128, 32 * _MIB, vmem=48 * _MIB),
    "tpu_v6e": TpuKernel(512, 256, 32 * _MIB, vmem=48 * _MIB, narrow=128),
}
