"""Fused attention kernels: zero's own for TPU, jax's for TPU (splash) and NVIDIA's (cuDNN), and their limits.

Shapes are named by suffix: B rows, T positions, H heads of queries, G heads of keys, K head dimension.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from zero.models.attention.blockwise import blockwise_attention
from zero.models.attention.scores import Form, alibi_columns, alibi_slopes
from zero.models.attention.tpu_kernels import TPU_KERNELS, TpuKernel
from zero.models.stack import ATTENTION_OUTPUT

_SPLASH_BLOCKS = (512, 256, 128)  # positions per block; the largest that divides a row
_BY_KIND = {
    "TPU v2": "tpu_v2",
    "TPU v3": "tpu_v2",
    "TPU v5 lite": "tpu_v5e",
    "TPU v5": "tpu_v5e",
    "TPU v6 lite": "tpu_v6e",
    "TPU7x": "tpu_v6e",
}


def kernel_of(platform: str, device_kind: str) -> str | None:
    """The kernel for a kind of device: a name of `TPU_KERNELS`, "cudnn", or None.

    cuDNN's needs compute capability 8.0, which NVIDIA's GPUs named Tesla (T4, V100, P100) do not have.

    >>> kernel_of("tpu", "TPU v5 lite"), kernel_of("tpu", "TPU v3"), kernel_of("gpu", "NVIDIA H100")
    ('tpu_v5e', 'tpu_v2', 'cudnn')
    >>> kernel_of("gpu", "Tesla T4")
    """
    if platform == "tpu":
        return _BY_KIND.get(device_kind, "tpu_v4")
    if platform == "gpu" and not device_kind.startswith("Tesla"):
        return "cudnn"
    return None


def chosen_kernel(choice: str, platform: str, device_kind: str, *, positions: int, dtype: str) -> str | None:
    """The kernel that `model.attention` asks for on a kind of device, as `kernel_of` names it; None for none.

    `auto` takes it in rows of this many positions if it is faster: on TPU by the compiler's cycles, on GPU as measured
    (docs/decisions/attention.md). cuDNN's has no float32.

    >>> [chosen_kernel("auto", "tpu", "TPU v4", positions=positions, dtype="bfloat16") for positions in (256, 512)]
    [None, 'tpu_v4']
    >>> chosen_kernel("kernel", "gpu", "NVIDIA H100", positions=512, dtype="float32")
    """
    if platform == "gpu" and dtype == "float32":
        return None
    is_faster = platform in ("tpu", "gpu") and positions >= 512
    if choice == "kernel" or (choice == "auto" and is_faster):
        return kernel_of(platform, device_kind)
    return None


def missing_in(
    kernel: str | None,
    form: Form,
    *,
    positions: int,
    width: int,
    drops: bool,
    has_bias: bool,
    has_segments: bool,
) -> str | None:
    """The first feature that this attention, with T queries and keys, needs and the kernel lacks; None if none.

    `kernel` is as returned by `kernel_of`; heads have this `width`.
    """
    tpu_kernel = TPU_KERNELS.get(kernel or "")
    is_tpu = tpu_kernel is not None
    is_only_own = tpu_kernel is not None and not tpu_kernel.has_splash
    by_name = {
        "a kernel for this device and zero.compute_dtype": kernel is None,
        "ALiBi": form.has_alibi and not is_tpu,
        "a cap of scores with ALiBi": form.has_alibi and form.cap is not None,
        "T5's bias": has_bias,
        "dropout of attention": drops,
        "a further logit": form.has_extra_logit,
        "rows that are cut around a ring": form.row_group.ring > 1,
        f"rows of {positions} positions": is_tpu and positions % _SPLASH_BLOCKS[-1] > 0,
        "a cap of scores": kernel == "cudnn" and form.cap is not None,
        "segments": kernel == "cudnn" and has_segments,
        f"heads of {width}": kernel == "cudnn" and (width % 8 > 0 or width > 128),  # 256 on Hopper alone
        f"rows of {positions} positions with heads of {width} on this TPU": is_only_own
        and not _fuses(kernel, form, positions, width),
    }
    return next((name for name, is_missing in by_name.items() if is_missing), None)


def splits_heads(kernel: str | None, form: Form, *, positions: int, width: int) -> bool:
    """Whether products around attention should have heads as dimensions, in front of positions.

    Arguments as for `missing_in`. Source: docs/decisions/attention.md
    """
    if kernel not in TPU_KERNELS:
        return kernel is not None
    if not _fuses(kernel, form, positions, width):
        return True
    return width % 128 > 0 and width > TPU_KERNELS[kernel].narrow


def fuses_rotation(kernel: str | None, positions: int, width: int, pairs: int) -> bool:
    """Whether `fused_rotation` supports heads of this width with this many rotated pairs."""
    return kernel in TPU_KERNELS and positions % 8 == 0 and width % 128 == 0 and width == 2 * pairs


def fused_rotation(x_BTHK: jax.Array, cos_BT1R: jax.Array, sin_BT1R: jax.Array) -> jax.Array:
    """`zero.models.positions.rotary.rotate` in a kernel for TPU."""
    from zero.models.attention.rotary_kernel import fused_rotate  # Pallas takes long to import

    return fused_rotate(x_BTHK, cos_BT1R[:, :, 0], sin_BT1R[:, :, 0])


def kernel_attention(
    kernel: str,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    *,
    form: Form,
    starts_BT: jax.Array | None = None,
) -> jax.Array:
    """Causal attention `(B, T, H, K)` by a kernel in which nothing is missing (`missing_in`).

    A plan of GPUs on a machine without one only traces this: blocks, with as much memory, as jax traces cuDNN's kernel
    beside a GPU only.
    """
    if kernel == "cudnn" and jax.default_backend() != "gpu":
        return blockwise_attention(q_BTHK, k_BTGK, v_BTGK, form=form)
    if kernel == "cudnn":
        return cudnn_attention(q_BTHK, k_BTGK, v_BTGK, form=form)
    if _fuses(kernel, form, q_BTHK.shape[1], q_BTHK.shape[3]):
        return own_attention(TPU_KERNELS[kernel], q_BTHK, k_BTGK, v_BTGK, form=form, starts_BT=starts_BT)
    return splash_attention(q_BTHK, k_BTGK, v_BTGK, form=form, starts_BT=starts_BT)


def _fuses(kernel: str | None, form: Form, positions: int, width: int) -> bool:
    """Whether `fused_attention` computes this form; splash attention is slower, and has the rest."""
    return kernel in TPU_KERNELS and TPU_KERNELS[kernel].most_sharing(form.window, positions, width) > 0


def own_attention(
    generation: TpuKernel,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    *,
    form: Form,
    starts_BT: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """zero's own kernel for TPU (`fused_attention`); `interpret` emulates it on CPU.

    A head of keys that too many heads of queries share is repeated, so that fewer share each copy.
    """
    # Imported here because Pallas takes longer to import than the rest of this package.
    from zero.models.attention.fused_kernel import fused_attention

    _, positions, heads, width = q_BTHK.shape
    shared = heads // k_BTGK.shape[2]
    fitting = min(shared, generation.most_sharing(form.window, positions, width))
    repeats = next(shared // size for size in range(fitting, 0, -1) if shared % size == 0)
    if repeats > 1:
        k_BTGK, v_BTGK = (jnp.repeat(x, repeats, axis=2) for x in (k_BTGK, v_BTGK))
    slopes_H = None
    if form.has_alibi:
        slopes_H = form.row_group.part(jnp.asarray(alibi_slopes(q_BTHK.shape[2] * form.row_group.size)), 0)
    return fused_attention(
        q_BTHK,
        k_BTGK,
        v_BTGK,
        slopes_H,
        starts_BT,
        scale=1 / form.divisor_of(q_BTHK.shape[-1]),
        generation=generation,
        window=form.window,
        cap=form.cap,
        interpret=interpret,
    )


def splash_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    *,
    form: Form,
    starts_BT: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """jax's Pallas kernel for TPU; `interpret` emulates it on CPU.

    ALiBi is part of the products of queries and keys: both are up to 6 columns wider (`alibi_columns`).
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    positions, heads = q_BTHK.shape[1:3]
    block = next(size for size in _SPLASH_BLOCKS if positions % size == 0)
    mask: Any = splash_attention_mask.CausalMask((positions, positions))
    if form.window:
        mask = splash_attention_mask.LocalMask((positions, positions), (form.window - 1, 0), 0)
    sizes: dict[str, Any] = {
        f"block_{name}": block for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    }
    # A separate kernel for the gradient of queries: fused with the keys' it would be stored once per block of keys.
    sizes |= {"block_q_dq": block, "block_kv_dq": block}
    attend = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=form.cap,
        residual_checkpoint_name=ATTENTION_OUTPUT,
        interpret=interpret,
    )

    def one_row(q_THK: jax.Array, k_TGK: jax.Array, v_TGK: jax.Array, starts_T: jax.Array | None) -> jax.Array:
        segments = None if starts_T is None else splash_attention_kernel.SegmentIds(starts_T, starts_T)
        attended = attend(*(x.swapaxes(0, 1) for x in (q_THK, k_TGK, v_TGK)), segment_ids=segments)
        return attended.swapaxes(0, 1).astype(q_THK.dtype)

    q_BTHK = q_BTHK * (1 / form.divisor_of(q_BTHK.shape[-1]))
    if form.has_alibi:
        query_columns_HC, key_columns_TC = map(jnp.asarray, alibi_columns(heads * form.row_group.size, positions))
        q_BTHK = _with_columns(q_BTHK, form.row_group.part(query_columns_HC, 0))
        k_BTGK = _with_columns(k_BTGK, key_columns_TC[:, None])
    return jax.vmap(one_row)(q_BTHK, k_BTGK, v_BTGK, starts_BT)


def _with_columns(x_BTHK: jax.Array, columns: jax.Array) -> jax.Array:
    """Heads that end in these columns, `(H, C)` or `(T, 1, C)`.

    A sum, because XLA for TPU would write columns that are repeated to memory for a concatenation.
    """
    columns = columns.reshape((1,) * (4 - columns.ndim) + columns.shape).astype(x_BTHK.dtype)
    ends = [(0, 0)] * 3
    return jnp.pad(x_BTHK, [*ends, (0, columns.shape[-1])]) + jnp.pad(columns, [*ends, (x_BTHK.shape[-1], 0)])


def cudnn_attention(
    q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, *, form: Form, implementation: Any = "cudnn"
) -> jax.Array:
    """cuDNN's kernel for GPU; `implementation="xla"` is jax's own in its place."""
    options: dict[str, Any] = {"scale": 1 / form.divisor_of(q_BTHK.shape[-1]), "is_causal": True}
    if form.window:
        options["local_window_size"] = (form.window - 1, 0)
    return jax.nn.dot_product_attention(q_BTHK, k_BTGK, v_BTGK, implementation=implementation, **options)
