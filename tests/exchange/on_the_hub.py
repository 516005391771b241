"""Folders of each architecture as they lie on the hub, and checkpoints of runs that began with them.

- `save_as_on_the_hub`: a folder with random weights and the files of a tokenizer.
- `save_checkpoint`: a run directory with its weights.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax

import zero
from tests.exchange.small_models import small, theirs
from tests.helpers.brought import HOMES, save_tokenizer
from zero.checkpoints.manager import Checkpoints
from zero.exchange.hub_model import open_hf_model
from zero.exchange.warm_start import described_folder, warm_start
from zero.partition.layout import derive_layout
from zero.training.sharded_gpt import ShardedGPT

OTHER_HOMES = {"gemma3_text": "gemma3", "qwen3": "qwen2"}


def save_as_on_the_hub(folder: Path, model_type: str) -> None:
    """Random weights in bfloat16 by transformers, with a tokenizer of this or another family."""
    import torch

    model = theirs(small(model_type) | {"vocab_size": 350}).to(torch.bfloat16)
    with torch.no_grad():
        for x in model.parameters():
            x.view(-1)[:2] = torch.tensor([1e-30, -1e5])[: x.numel()]  # which float16 does not have
    for name, x in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            x.data = x.data.float() + 1e-6  # transformers keeps it in float32
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    home = OTHER_HOMES.get(model_type, model_type)
    save_tokenizer(folder, home if home in HOMES else "llama3")


def save_checkpoint(place: Path, folder: Path, *, is_described: bool = True) -> None:
    """What a run holds that began with a folder, before its first step; with nothing of its config.json if told so."""
    found = open_hf_model(str(folder))
    assert found is not None
    model = ShardedGPT(found.size, zero.Axis("zero", (1, jax.device_count())), 3)
    weights, collections = model.split(warm_start(str(folder), model))
    whole = zero.to_host(weights, model.layout, model.axis)
    layouts = model.collection_layouts
    averages = {name: zero.to_host(collections[name], layout, model.axis) for name, layout in layouts.items()}
    config = {"data": {"tokenizer": found.tokenizer()}, "tuning": {"name": "none"}}
    meta: dict[str, Any] = {"config": config, "size": dataclasses.asdict(found.size)}
    if is_described:
        meta["brought"] = described_folder(str(folder))
    alone = ShardedGPT(found.size, zero.Axis("zero", (1, 1)), 0)

    def state_of(params: Any) -> Any:
        return {"params": params, "averages": alone.new_collections(jax.random.key(0))}

    with Checkpoints(place, keep=1) as checkpoints:
        checkpoints.save(1, {"params": whole, "averages": averages}, derive_layout(state_of, alone.layout), meta)
