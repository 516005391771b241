"""Checkpoints of small models with random weights.

- `SIZES`: a model of each family; `SOME` are names of them; `BOTH` parametrizes a test over two.
- `params`, `model_of`, `save`: random weights, the sharded model, and a run directory with a checkpoint of them.
- `variables`: what a model is applied to.
- `whole`, `without_padding`, `assert_same`, `contents`: whole arrays, their comparison, and the files of a folder.
"""

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest

import zero
from zero.checkpoints.manager import Checkpoints
from zero.models.config import HEAD, VOCABULARY, GPTConfig
from zero.models.families import FAMILIES
from zero.partition.layout import derive_layout
from zero.training.sharded_gpt import ShardedGPT

ALIBI = GPTConfig(
    embedding_dim=42,
    vocab_size=101,
    num_head=3,  # not a power of two: the slopes interleave
    block_size=128,
    dropout=0.1,
    N=3,
    vocab_chunks=4,  # three rows of padding
    embedding_norm=True,
    norm_epsilon=1e-4,
)
LEARNED = dataclasses.replace(ALIBI, alibi_attn=False, embedding_norm=False)
# Heads that share keys and values, odd numbers of them, and windows that a text of some tokens leaves.
NEO = dataclasses.replace(LEARNED, N=4, windows=(0, 7), attention_scale="none", qkv_bias=False)
NEOX = dataclasses.replace(LEARNED, embedding_dim=48, **{**FAMILIES["gpt_neox"], "norm_epsilon": 1e-4})
_GROUPED: dict[str, Any] = {"num_head": 6, "head_dim": 10, "kv_heads": 2, "mlp_dim": 61}


def _of(family: str, **changes: Any) -> GPTConfig:
    return dataclasses.replace(LEARNED, **{**FAMILIES[family], **_GROUPED, "norm_epsilon": 1e-4, **changes})


SIZES = {
    "gpt2": LEARNED,
    "bloom": ALIBI,
    "gpt_neo": NEO,
    "gpt_neox": NEOX,
    "gpt_neox_sequential": dataclasses.replace(NEOX, parallel_residual=False, tied=True, rotary_fraction=0.5),
    "llama": _of("llama", num_head=3, kv_heads=1, rotary_base=500.0, rotary_scaling=(8.0, 1.0, 4.0, 64.0)),
    "llama_tied": _of("llama", tied=True),
    "mistral": _of("mistral", windows=(9,)),
    "qwen2": _of("qwen2", N=2, rotary_scaling=("yarn", 4.0, 32.0, 8.0, 1.0, 1.1)),
    "qwen3": _of("qwen3", kv_heads=3),
    "smollm3": _of("smollm3", N=4, unrotated_every=2),
    "olmo2": _of("olmo2", N=2),
    "olmo3": _of("olmo3", N=4, kv_heads=6, windows=(9, 9, 9, 0), rotary_scaling=("yarn", 8.0, 16.0, 32.0, 1.0, 1.2)),
    "stablelm": _of(
        "stablelm", N=2, embedding_dim=48, head_dim=None, num_head=3, kv_heads=1, rotary_fraction=0.5, qkv_bias=True
    ),
    "starcoder2": _of(
        "starcoder2", N=2, embedding_dim=48, head_dim=None, num_head=3, kv_heads=1, windows=(9,), embedding_dropout=0.2
    ),
    "phi3": _of("phi3", N=2, windows=(9,), rotary_fraction=0.8),
    "granite": _of(
        "granite", N=2, embedding_multiplier=3.0, residual_multiplier=0.5, attention_scale=0.25, output_scale=0.5
    ),
    "gemma": _of("gemma", N=2, kv_heads=1),
    # Torch multiplies groups of tokens only where rows are whole 16 bytes long.
    "mixtral": _of("mixtral", N=2, embedding_dim=44, mlp_dim=20, experts=5, expert_capacity=1.0),
    "qwen3_moe": _of(
        "qwen3_moe", N=2, embedding_dim=44, mlp_dim=12, experts=7, experts_per_token=3, normalize_router=False
    ),
    "glm4_moe": _of(
        "glm4_moe",
        embedding_dim=44,
        mlp_dim=12,
        experts=8,
        experts_per_token=3,
        shared_dim=24,
        dense_dim=61,
        router_groups=4,
        router_groups_per_token=2,
        router_scale=2.5,
        rotary_base=1e4,
        qk_norm=True,
        qkv_bias=True,
        head_dim=12,
    ),
    "deepseek_v3": _of(
        "deepseek_v3",
        N=4,
        kv_heads=None,
        embedding_dim=44,
        mlp_dim=12,
        experts=8,
        experts_per_token=3,
        shared_dim=24,
        dense_dim=61,
        router_groups=4,
        router_groups_per_token=2,
        head_dim=16,
        rotary_dim=6,
        latent_dim=12,
        query_latent_dim=20,
        value_dim=14,
        rotary_scaling=("yarn", 8.0, 64.0, 4.0, 1.0, 1.2),
        attention_scale=float(16**-0.5 * (0.1 * 0.7 * np.log(8.0) + 1) ** 2),
    ),
    "deepseek_v3 without latent queries": _of(
        "deepseek_v3",
        N=4,
        num_head=3,
        kv_heads=None,
        embedding_dim=52,
        mlp_dim=20,
        experts=6,
        experts_per_token=2,
        shared_dim=20,
        dense_dim=61,
        router_groups=1,
        router_groups_per_token=1,
        head_dim=13,
        rotary_dim=10,
        latent_dim=9,
        query_latent_dim=None,
        value_dim=13,
        rotary_interleaved=False,
        normalize_router=False,
        router_scale=1.3,
        first_dense=1,
    ),
    "ministral": _of("ministral", N=4, windows=(9, 0)),
    "seed_oss": _of("seed_oss", N=2),
    "arcee": _of("arcee", N=2),
    "apertus": _of("apertus", N=2, rotary_base=500.0, rotary_scaling=(8.0, 1.0, 4.0, 64.0)),
    "ernie4_5": _of("ernie4_5", N=2, attention_dropout=0.0),
    "glm4": _of("glm4", N=2, head_dim=12),
    "olmoe": _of(
        "olmoe",
        N=2,
        embedding_dim=48,
        head_dim=None,
        num_head=3,
        kv_heads=1,
        mlp_dim=20,
        experts=7,
        experts_per_token=3,
    ),
    "granitemoe": _of(
        "granitemoe",
        N=2,
        embedding_dim=48,
        head_dim=None,
        num_head=3,
        kv_heads=1,
        mlp_dim=20,
        experts=5,
        experts_per_token=2,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_scale=0.3,
        output_scale=0.5,
    ),
    "gpt_oss": _of(
        "gpt_oss",
        N=2,
        embedding_dim=44,
        mlp_dim=20,
        experts=5,
        experts_per_token=2,
        windows=(9, 0),
        rotary_base=500.0,
        rotary_scaling=("yarn_unrounded", 8.0, 64.0, 4.0, 1.0, 1.2),
    ),
    "gemma2": _of("gemma2", N=4, windows=(9, 0), attention_cap=3.0, logit_cap=5.0),
    "gemma3": _of(
        "gemma3", N=4, windows=(9, 0), logit_cap=5.0, rotary_scaling=("linear", 8.0), attention_scale=20**-0.5
    ),
}
SOME = ("gpt2", "bloom", "gpt_neox", "phi3", "gpt_oss", "gemma3")  # tied or not, joined products, experts, biases
BOTH = pytest.mark.parametrize("size", [ALIBI, LEARNED], ids=["bloom", "gpt2"])
RUN = {"data": {"tokenizer": "bytes"}}


def model_of(size: GPTConfig, devices: int = 8, stage: int = 3) -> ShardedGPT:
    return ShardedGPT(size, zero.Axis("zero", (1, devices)), stage)


@cache
def params(size: GPTConfig, seed: int = 0) -> Any:
    """Whole arrays; every leaf random and large enough to matter, scales of both signs against endless repetition."""
    rng = np.random.default_rng(seed)
    spread = {"kernel": 0.5, "scale": 1.0, "bias": 0.1, "table": 0.1, "relative_bias": 1.0, "logits": 1.0}
    spread |= {"taps": 0.5, "log_rate": 0.5, "offset": 0.5, "positive": 1.0, "negative": 1.0}

    def one(leaf: zero.groups.LeafLayout) -> np.ndarray:
        return rng.normal(0, spread[leaf.path[-1]], leaf.shape).astype(leaf.dtype)

    model = model_of(size)
    return {**model.layout.map(one), **{name: layout.map(one) for name, layout in model.collection_layouts.items()}}


def variables(size: GPTConfig, tree: Any) -> dict[str, Any]:
    """What the model is applied to, of weights as `params` and `whole` return them."""
    own, collections = model_of(size).split(tree)
    return {"params": own, **collections}


def save(
    place: Path,
    size: GPTConfig,
    *seeds: int,
    values: Any = None,
    meta: Any = RUN,
    ema: int | None = None,
    last_step: int | None = None,
    checksums: Mapping[str, int] = MappingProxyType({}),
    brought: Mapping[str, Any] | None = None,
) -> None:
    """A directory of checkpoints of weights, steps as the seeds, from shards of 8 devices.

    The weights are random unless given; with `ema` there is a moving average, random from this seed. `last_step`,
    `checksums` and `brought`, of the folder that the run started from, are those of the metadata.
    """
    model = model_of(size)

    def one(leaf: zero.groups.LeafLayout, target: jax.ShapeDtypeStruct, x: np.ndarray) -> jax.Array:
        pads = [(0, p - n) for n, p in zip(leaf.shape, leaf.padded_shape, strict=True)]
        padded = np.pad(x, pads) if pads else x
        return jax.device_put(padded, target.sharding)

    def padded(tree: Any) -> Any:
        return model.layout.map(one, zero.global_shapes(model.layout, model.axis), tree)

    averages = {} if ema is None else {"ema": padded(model.split(params(size, ema))[0])}

    def state_of(tree: Any) -> Any:
        return {
            "params": tree,
            "averages": {**dict.fromkeys(averages, tree), **model.new_collections(jax.random.key(0))},
        }

    layout = derive_layout(state_of, model.layout)
    with Checkpoints(place, keep=9) as checkpoints:
        for seed in seeds:
            own, collections = model.split(values or params(size, seed))
            beside = {
                name: own_layout.map(one, zero.global_shapes(own_layout, model.axis), collections[name])
                for name, own_layout in model.collection_layouts.items()
            }
            state = {"params": padded(own), "averages": {**averages, **beside}}
            config = {"tuning": {"name": "none"}} | meta
            facts = {"config": config, "size": dataclasses.asdict(size), "last_step": last_step}
            facts["checksums"] = dict(checksums)
            facts |= {} if brought is None else {"brought": dict(brought)}
            checkpoints.save(seed, state, layout, facts)


def whole(shards: Any, model: ShardedGPT) -> Any:
    """Logical arrays on this host, of what `warm_start` returned."""

    def of(layout: zero.Layout, tree: Any) -> Any:
        return layout.map(
            lambda leaf, x: np.asarray(x)[tuple(slice(n) for n in leaf.shape)], zero.to_global(tree, layout, model.axis)
        )

    own, collections = model.split(shards)
    beside = {name: of(layout, collections[name]) for name, layout in model.collection_layouts.items()}
    return {**of(model.layout, own), **beside}


def assert_same(got: Any, expected: Any) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def without_padding(tree: Any, size: GPTConfig) -> Any:
    names = [name for name in size.stacked if name in (VOCABULARY, HEAD)]
    tables = {name: tree[name]["table"].reshape(-1, size.embedding_dim)[: size.vocab_size] for name in names}
    return {**tree, **{name: {"table": table} for name, table in tables.items()}}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
