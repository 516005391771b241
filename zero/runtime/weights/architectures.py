"""The architectures of `transformers` that compute what a GPT of zero computes: names, shapes and layouts of tensors.

docs/decisions/interchange.md says which and why. In zero the layers are stacked and query, key and value are leaves of
their own; `transformers` stores one tensor per layer, and query, key and value in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero.models.config import BLOCKS, VOCABULARY, GPTConfig
from zero.partition.layout import LeafLayout
from zero.runtime.errors import UserError

FUSED_QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Architecture:
    """How `transformers` names and stores the parts of a GPT.

    Attributes:
      model_type, class_name: as in config.json.
      sizes: keys of config.json, and the attribute of `GPTConfig` that each holds.
      fixed: keys that must have these values, which are also the defaults where config.json lacks them.
      written: keys of an export that say nothing about the weights.
      modules: the names of zero's modules to those of `transformers`, with `{}` for the number of the layer.
      is_linear: kernels are stored `(out, in)`, and query, key and value side by side head by head; otherwise
        `(in, out)`, one after the other.
    """

    model_type: str
    class_name: str
    sizes: Mapping[str, str]
    fixed: Mapping[str, Any]
    written: Mapping[str, Any]
    modules: Mapping[str, str]
    is_linear: bool

    def tensor_name(self, leaf: str) -> str:
        """`h.{}.attn.c_attn.weight` for `blocks/query/kernel`, with `{}` for the number of the layer."""
        module, _, kind = leaf.rpartition("/")
        return f"{self.modules[module]}.{'bias' if kind == 'bias' else 'weight'}"

    def tensor_shape(self, leaf: LeafLayout, size: GPTConfig) -> tuple[int, ...]:
        """The shape of the tensor that holds this leaf, of one layer."""
        if leaf.path[0] == VOCABULARY:
            return (size.vocab_size, size.embedding_dim)
        shape = leaf.shape[1:] if leaf.stacked else leaf.shape
        if leaf.path[-2] in FUSED_QKV:
            shape = (*shape[:-1], 3 * shape[-1])
        return shape[::-1] if self.is_linear and leaf.path[-1] == "kernel" else shape

    def pack(self, leaf: str, arrays: Sequence[np.ndarray], size: GPTConfig) -> np.ndarray:
        """The tensor of a leaf, or of the leaves of query, key and value; leading dimensions stay."""
        whole = arrays[0]
        if leaf.startswith(f"{VOCABULARY}/"):
            return whole.reshape(-1, size.embedding_dim)[: size.vocab_size]
        if len(arrays) > 1:
            heads = [x.reshape(*x.shape[:-1], size.num_head, -1) for x in arrays]
            whole = np.stack(heads, axis=-2 if self.is_linear else -3).reshape(*whole.shape[:-1], -1)
        return whole.swapaxes(-1, -2) if self.is_linear and leaf.endswith("kernel") else whole

    def unpack(self, leaf: LeafLayout, tensor: np.ndarray, size: GPTConfig) -> np.ndarray:
        """The leaf, or one layer of it, from its tensor; the inverse of `pack`."""
        if leaf.path[0] == VOCABULARY:
            rows = size.vocab_chunks * size.chunk_rows - size.vocab_size
            return np.pad(tensor, ((0, rows), (0, 0))).reshape(leaf.shape)
        if self.is_linear and leaf.path[-1] == "kernel":
            tensor = tensor.swapaxes(-1, -2)
        if leaf.path[-2] not in FUSED_QKV:
            return tensor
        outer = tensor.shape[:-1]
        dims = (size.num_head, 3, -1) if self.is_linear else (3, size.num_head, -1)
        heads = tensor.reshape(*outer, *dims).take(FUSED_QKV.index(leaf.path[-2]), axis=-2 if self.is_linear else -3)
        return heads.reshape(*outer, -1)


GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    sizes={
        "vocab_size": "vocab_size",
        "n_positions": "block_size",
        "n_embd": "embedding_dim",
        "n_layer": "N",
        "n_head": "num_head",
        "layer_norm_epsilon": "norm_epsilon",
        "attn_pdrop": "dropout",
        "resid_pdrop": "dropout",
    },
    fixed={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    written={"embd_pdrop": 0.0},
    modules={
        VOCABULARY: "wte",
        "positions": "wpe",
        f"{BLOCKS}/norm_attention": "h.{}.ln_1",
        f"{BLOCKS}/query": "h.{}.attn.c_attn",
        f"{BLOCKS}/key": "h.{}.attn.c_attn",
        f"{BLOCKS}/value": "h.{}.attn.c_attn",
        f"{BLOCKS}/attention_out": "h.{}.attn.c_proj",
        f"{BLOCKS}/norm_mlp": "h.{}.ln_2",
        f"{BLOCKS}/mlp_in": "h.{}.mlp.c_fc",
        f"{BLOCKS}/mlp_out": "h.{}.mlp.c_proj",
        "norm": "ln_f",
    },
    is_linear=False,
)
BLOOM = Architecture(
    model_type="bloom",
    class_name="BloomForCausalLM",
    sizes={
        "vocab_size": "vocab_size",
        "seq_length": "block_size",
        "hidden_size": "embedding_dim",
        "n_layer": "N",
        "n_head": "num_head",
        "layer_norm_epsilon": "norm_epsilon",
        "attention_dropout": "dropout",
        "hidden_dropout": "dropout",
    },
    fixed={"apply_residual_connection_post_layernorm": False, "tie_word_embeddings": True},
    written={},
    modules={
        VOCABULARY: "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        f"{BLOCKS}/norm_attention": "h.{}.input_layernorm",
        f"{BLOCKS}/query": "h.{}.self_attention.query_key_value",
        f"{BLOCKS}/key": "h.{}.self_attention.query_key_value",
        f"{BLOCKS}/value": "h.{}.self_attention.query_key_value",
        f"{BLOCKS}/attention_out": "h.{}.self_attention.dense",
        f"{BLOCKS}/norm_mlp": "h.{}.post_attention_layernorm",
        f"{BLOCKS}/mlp_in": "h.{}.mlp.dense_h_to_4h",
        f"{BLOCKS}/mlp_out": "h.{}.mlp.dense_4h_to_h",
        "norm": "ln_f",
    },
    is_linear=True,
)
ARCHITECTURES = {one.model_type: one for one in (GPT2, BLOOM)}


def architecture_of(size: GPTConfig) -> Architecture:
    """The architecture that computes the same as a GPT of this size.

    Raises:
      UserError: there is none.
    """
    if size.alibi_attn == size.embedding_norm:
        return BLOOM if size.alibi_attn else GPT2
    has = "ALiBi without embedding_norm" if size.alibi_attn else "learned positions with embedding_norm"
    raise UserError(
        f"no architecture of transformers equals a model that has {has}: GPT-2 equals learned positions without it, "
        "BLOOM equals ALiBi with it"
    )
