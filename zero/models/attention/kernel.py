"""Fused attention kernels of jax (splash, for TPU) and NVIDIA (cuDNN), and their limits.

Shapes are named by suffix: B rows, T positions, H heads of queries, G heads of keys, K head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from zero.models.attention.scores import Form, alibi_columns
from zero.models.stack import ATTENTION

_TPUS_WITHOUT_KERNEL = ("TPU v2", "TPU v3")  # Mosaic compiles no bfloat16 matrix product for them
_SPLASH_BLOCKS = (512, 256, 128)  # positions per block; the largest that divides a row


def kernel_of(platform: str, device_kind: str) -> str | None:
    """The kernel for a kind of device: "splash", "cudnn", or None.

    >>> kernel_of("tpu", "TPU v5 lite"), kernel_of("tpu", "TPU v3"), kernel_of("gpu", "NVIDIA H100")
    ('splash', None, 'cudnn')
    """
    if platform == "tpu":
        return None if device_kind in _TPUS_WITHOUT_KERNEL else "splash"
    return "cudnn" if platform == "gpu" else None


def chosen_kernel(choice: str, platform: str, device_kind: str, *, positions: int, has_alibi: bool) -> str | None:
    """The kernel that `model.attention` asks for on a kind of device: "splash", "cudnn", or None.

    `auto` takes it on TPU in rows of this many positions if the compiler's cycles predict that it is faster
    (docs/decisions/attention.md).

    >>> [chosen_kernel("auto", "tpu", "TPU v4", positions=512, has_alibi=has_alibi) for has_alibi in (False, True)]
    ['splash', None]
    """
    is_faster = platform == "tpu" and positions >= (1024 if has_alibi else 512)
    return kernel_of(platform, device_kind) if choice == "kernel" or (choice == "auto" and is_faster) else None


def missing_in(
    kernel: str | None, form: Form, *, positions: int, drops: bool, has_bias: bool, has_segments: bool
) -> str | None:
    """The first feature that this attention, with T queries and keys, needs and the kernel lacks; None if none.

    Args:
      kernel: as returned by `kernel_of`.
      form: the form of the scores.
      positions: positions of a row.
      drops: whether probabilities are dropped.
      has_bias: whether T5's bias is added.
      has_segments: whether a row has several segments.
    """
    by_name = {
        "a kernel for this device": kernel is None,
        "ALiBi": form.has_alibi and kernel != "splash",
        "a cap of scores with ALiBi": form.has_alibi and form.cap is not None,
        "T5's bias": has_bias,
        "dropout of attention": drops,
        "a further logit": form.has_extra_logit,
        "rows that are cut around a ring": form.cut.ring > 1,
        f"rows of {positions} positions": kernel == "splash" and positions % _SPLASH_BLOCKS[-1] > 0,
        "a cap of scores": kernel == "cudnn" and form.cap is not None,
        "segments": kernel == "cudnn" and has_segments,
    }
    return next((name for name, is_missing in by_name.items() if is_missing), None)


def kernel_attention(
    kernel: str,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    *,
    form: Form,
    starts_BT: jax.Array | None = None,
) -> jax.Array:
    """Causal attention `(B, T, H, K)` for which `missing_in` returns None.

    Args:
      kernel: as returned by `kernel_of`.
      others: as for `dense_attention`.
    """
    if kernel == "splash":
        return splash_attention(q_BTHK, k_BTGK, v_BTGK, form=form, starts_BT=starts_BT)
    return cudnn_attention(q_BTHK, k_BTGK, v_BTGK, form=form)


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
    # Imported here because Pallas takes longer to import than the rest of this package.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    positions, heads = q_BTHK.shape[1:3]
    block = next(size for size in _SPLASH_BLOCKS if positions % size == 0)
    one: Any = splash_attention_mask.CausalMask((positions, positions))
    if form.window:
        one = splash_attention_mask.LocalMask((positions, positions), (form.window - 1, 0), 0)
    sizes: dict[str, Any] = {
        f"block_{name}": block for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    }
    # A separate kernel for the gradient of queries: fused with that of keys it would be stored once per block of keys.
    sizes |= {"block_q_dq": block, "block_kv_dq": block}
    attend = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([one] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=form.cap,
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )

    def one_row(q_THK: jax.Array, k_TGK: jax.Array, v_TGK: jax.Array, starts_T: jax.Array | None) -> jax.Array:
        segments = None if starts_T is None else splash_attention_kernel.SegmentIds(starts_T, starts_T)
        attended: jax.Array = attend(*(x.swapaxes(0, 1) for x in (q_THK, k_TGK, v_TGK)), segment_ids=segments)
        return attended.swapaxes(0, 1).astype(q_THK.dtype)

    q_BTHK = q_BTHK * _scale(q_BTHK, form)
    if form.has_alibi:
        of_queries_HC, of_keys_TC = map(jnp.asarray, alibi_columns(heads * form.cut.size, positions))
        q_BTHK = _with_columns(q_BTHK, form.cut.part(of_queries_HC, 0))
        k_BTGK = _with_columns(k_BTGK, of_keys_TC[:, None])
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
    options: dict[str, Any] = {"scale": _scale(q_BTHK, form), "is_causal": True}
    if form.window:
        options["local_window_size"] = (form.window - 1, 0)
    return jax.nn.dot_product_attention(q_BTHK, k_BTGK, v_BTGK, implementation=implementation, **options)


def _scale(q_BTHK: jax.Array, form: Form) -> float:
    return 1 / (math.sqrt(q_BTHK.shape[-1]) if form.divisor is None else form.divisor)
