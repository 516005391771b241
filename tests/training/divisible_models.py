"""`MODELS`: a small model of every family, whose heads groups of devices divide; `DIVISIBLE` is the plain one."""

import dataclasses
from typing import Any

from tests.training.small_gpt import CONFIG
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES

DIVISIBLE = dataclasses.replace(CONFIG, embedding_dim=48, num_head=8, block_size=16)
_GROUPED: dict[str, Any] = {"head_dim": 10, "kv_heads": 4, "mlp_dim": 56}


def _of(family: str, **changes: Any) -> GPTConfig:
    return dataclasses.replace(DIVISIBLE, **{"embedding_norm": False, **FAMILIES[family], **changes})


MODELS = {
    "gpt2": _of("gpt2", embedding_dropout=0.2),
    "bloom": _of("bloom"),
    "gpt_neo": _of("gpt_neo", windows=(0, 5)),
    "gpt_neox": _of("gpt_neox", embedding_dim=64),
    "llama": _of("llama", **_GROUPED, rotary_scaling=(8.0, 1.0, 4.0, 6.0)),
    "mistral": _of("mistral", **_GROUPED, windows=(5,)),
    "qwen3": _of("qwen3", **_GROUPED),
    "apertus": _of("apertus", **_GROUPED, rotary_scaling=(8.0, 1.0, 4.0, 6.0)),
    "gemma2": _of("gemma2", **_GROUPED, N=4, windows=(5, 0), attention_cap=0.5, logit_cap=0.5),
    "gpt_oss": _of("gpt_oss", **_GROUPED, windows=(5, 0), experts=8, experts_per_token=2),
    "qwen3_next": _of(
        "qwen3_next", **{**_GROUPED, "head_dim": 8}, mixers=("delta", "attention"), delta_key_heads=4,
        delta_value_heads=8, delta_key_dim=4, delta_value_dim=5, experts=4, experts_per_token=2, shared_dim=24,
    ),
    "dense_lm": _of("dense_lm", z_loss=0.1),
    "plain": DIVISIBLE,
}  # fmt: skip
