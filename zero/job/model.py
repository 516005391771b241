"""The model to train, on an axis of devices."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from zero.base.keys import INT32, Check, Mistakes, key, one_of
from zero.corpus.text.tokenizers import TokenizerKeys, load_tokenizer
from zero.hosts.speeds import SPEEDS
from zero.job.sharding import Sharding
from zero.models.attention.blockwise import CHOICES as ATTENTION_CHOICES
from zero.models.attention.blockwise import blockwise_from
from zero.models.attention.dense import query_block
from zero.models.attention.kernel import chosen_kernel
from zero.models.attention_keys import missing_in_kernel
from zero.models.config import GPTConfig
from zero.models.products import EIGHT_BITS
from zero.models.stack import KINDS, OFFLOADED
from zero.partition.collectives.axis import Axis
from zero.training.batch import UNDIVIDED, Separators
from zero.training.sharded_gpt import ShardedGPT
from zero.training.tuning import Tuning

log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class AttentionKeys:
    """How attention is computed: keys of section `model`."""

    attention: str = key(
        "auto",
        one_of(*ATTENTION_CHOICES),
        "dense stores a score per pair of positions; blockwise needs memory linear in the context.",
        "kernel: on TPU a kernel of zero's own or jax's splash attention, cuDNN's on GPU; falls back to auto where "
        "unsupported.",
        "auto: on TPU and GPU the kernel from 512 positions on; elsewhere, or without it, blockwise in long contexts.",
        in_scores=True,
    )


@dataclass(frozen=True)
class RowKeys(TokenizerKeys):
    """What a row of tokens is: keys of section `data`."""

    max_context: Any = key(
        None,
        Check(  # an integer after the check
            lambda value: value is None or (isinstance(value, int) and 2 <= value <= INT32), "at least 2, or null"
        ),
        "Sequence length in training; all tokens but the first are predicted. null: block_size of the model.",
        in_scores=True,
        fixed=True,
    )
    last_target: bool | None = key(
        None,
        None,
        "true: rows have max_context + 1 tokens, and the extra token is the target of the last position.",
        "false: the last position of a row has no target and is not trained.",
        "null: true if the rows of all index files have max_context + 1 tokens, else false.",
        in_scores=True,
        fixed=True,
    )
    isolate_documents: bool = key(
        False,
        None,
        "Masks attention and restarts positions at the end-of-text tokens of data.tokenizer that separate documents "
        "in a row.",
        in_scores=True,
    )

    def row_mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        if self.max_context > model_config.block_size:
            yield "data.max_context", f"2 to {model_config.block_size}, the block_size of {model_label}, or null"
        if self.isolate_documents and model_config.alone is not None:
            yield "data.isolate_documents", f"false, as {model_label} has {model_config.alone.noun}"
        switch = model_config.rotary_switch
        if switch is not None and self.isolate_documents and self.max_context > switch:
            yield "data.isolate_documents", f"false, as rotary frequencies depend on the length of rows beyond {switch}"


def make_model(
    model_config: GPTConfig,
    axis: Axis,
    zero: Sharding,
    attention: AttentionKeys,
    rows: RowKeys,
    tuning: Tuning | None = None,
    *,
    device: Any = None,
) -> ShardedGPT:
    """The model of a checked configuration on an axis of devices.

    Args:
      tuning: which part is trained; None for all of it.
      device: one of the axis's devices; None for one of jax's.
    """
    device = device or jax.devices()[0]
    platform = device.platform
    warn_of_rounding(zero.product_dtype, device.device_kind)
    has_activations = "activations" in OFFLOADED[zero.offload]
    stores_all = platform == "cpu" and not zero.fused_update and not has_activations
    compute_dtype = if_auto(zero.compute_dtype, "float32" if platform == "cpu" else "bfloat16")
    wire_dtype = if_auto(zero.wire_dtype, None)
    remat = if_auto(zero.remat, "none" if stores_all else "full")
    is_divided = rows.isolate_documents
    separators = Separators(*load_tokenizer(rows.tokenizer).special.separators) if is_divided else UNDIVIDED
    context = rows.max_context
    kernel = chosen_kernel(attention.attention, platform, device.device_kind, positions=context, dtype=compute_dtype)
    if axis.replicas == 1 and axis.copies_dtype is not None:  # for example after the loss of a slice
        log.warning("zero.replica_wire_dtype=%s: no effect, because there is one copy of the state", axis.copies_dtype)
    model = ShardedGPT(
        model_config,
        axis,
        zero.stage,
        compute_dtype,
        wire_dtype=wire_dtype,
        reduce_dtype=zero.reduce_dtype,
        gradient_dtype=zero.gradient_dtype,
        remat=remat,
        offload=KINDS if has_activations else (),
        blockwise_from=blockwise_from(attention.attention, platform),
        query_block=query_block(attention.attention, platform),
        master_dtype=zero.master_dtype,
        separators=separators,
        gather_dtype=zero.gather_dtype if zero.gather_dtype == "int8" else None,
        kernel=kernel,
        tuning=tuning,
        product_dtype=zero.product_dtype,
        gathers_rounded=zero.gather_dtype == "products",
        last_target=bool(rows.last_target),
    )
    missing = missing_in_kernel(kernel, model_config, model.row_group, context, has_segments=is_divided)
    if missing is not None and attention.attention == "kernel":
        log.warning("model.attention=kernel does not support %s; using model.attention=auto", missing)
    if missing is not None:  # so that nothing counts on it, such as `zero.remat=auto`
        model = dataclasses.replace(model, kernel=None)
    return model


_PAYS = 1.25  # times as fast; below, rounding takes what the products save (benchmarks/measured/products-in-8-bits.md)


def warn_of_rounding(product_dtype: str, device_kind: str) -> None:
    """Says if products in 8 bits will hardly make a step faster on this kind of device."""
    if product_dtype not in EIGHT_BITS or device_kind not in SPEEDS:
        return
    gain = SPEEDS[device_kind].gain(product_dtype.removesuffix("_all"))
    if gain < _PAYS:
        log.warning(
            "zero.product_dtype=%s: a %s multiplies these %g times as fast as bfloat16, which rounding them uses up; "
            "auto may be as fast or faster",
            product_dtype,
            device_kind,
            gain,
        )


def if_auto(value: T, automatic: U) -> T | U:
    """The value of a key, or the default if it is auto.

    >>> if_auto("int8", "bfloat16"), if_auto("auto", "bfloat16")
    ('int8', 'bfloat16')
    """
    return automatic if value == "auto" else value
