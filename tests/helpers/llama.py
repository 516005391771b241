"""A small Llama: `size`, its entry among the model sizes, and `save`, a folder of random weights by transformers."""

from pathlib import Path
from typing import Any

from zero.models.config import GPTConfig
from zero.models.families import FAMILIES


def size(context: int, dropout: float = 0.0) -> GPTConfig:
    llama: dict[str, Any] = {**FAMILIES["llama"], "kv_heads": 2, "mlp_dim": 61}
    return GPTConfig(embedding_dim=48, vocab_size=300, num_head=6, block_size=context, dropout=dropout, N=2, **llama)


def save(folder: Path, context: int) -> None:
    import transformers

    shape: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 61, "num_hidden_layers": 2, "vocab_size": 300}
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    config = transformers.LlamaConfig(**shape, **heads, max_position_embeddings=context, initializer_range=0.2)
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
