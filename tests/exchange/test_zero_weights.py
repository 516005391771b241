"""A folder of Hugging Face, read and written by zero-weights without training, is the same folder.

Files of the tokenizer and of generation are the same bytes, and weights the same bits; the keys of config.json that
differ are those of the table in docs/reference/families.md.
"""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import pytest

import zero
from tests.exchange.small_models import small, theirs
from tests.helpers.brought import HOMES, save_tokenizer
from zero.checkpoints.manager import Checkpoints
from zero.exchange.architecture_table import ARCHITECTURES
from zero.exchange.export import export
from zero.exchange.hub_model import open_hf_model
from zero.exchange.warm_start import described_folder, warm_start
from zero.models.config import GPTConfig
from zero.partition.layout import derive_layout
from zero.training.sharded_gpt import ShardedGPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

SOME = ("llama", "gpt2")
OTHER_HOMES = {"gemma3_text": "gemma3", "qwen3": "qwen2"}
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"


def save_as_on_the_hub(folder: Path, model_type: str) -> None:
    """Random weights in bfloat16 by transformers, with a tokenizer of this or another family."""
    import torch

    model = theirs(small(model_type) | {"vocab_size": 350}).to(torch.bfloat16)
    with torch.no_grad():
        for x in model.parameters():
            x.view(-1)[:2] = torch.tensor([1e-30, -1e5])  # which float16 does not have
    for name, x in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            x.data = x.data.float() + 1e-6  # transformers keeps it in float32
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    home = OTHER_HOMES.get(model_type, model_type)
    save_tokenizer(folder, home if home in HOMES else "llama3")


def save_checkpoint(place: Path, folder: Path) -> None:
    """What a run holds that began with a folder, before its first step."""
    found = open_hf_model(str(folder))
    assert found is not None
    model = ShardedGPT(found.size, zero.Axis("zero", (1, jax.device_count())), 3)
    weights, collections = model.split(warm_start(str(folder), model))
    whole = zero.to_host(weights, model.layout, model.axis)
    layouts = model.collection_layouts
    averages = {name: zero.to_host(collections[name], layout, model.axis) for name, layout in layouts.items()}
    config = {"data": {"tokenizer": found.tokenizer()}, "tuning": {"name": "none"}}
    meta = {"config": config, "size": dataclasses.asdict(found.size), "brought": described_folder(str(folder))}
    alone = ShardedGPT(found.size, zero.Axis("zero", (1, 1)), 0)

    def state_of(params: Any) -> Any:
        return {"params": params, "averages": alone.new_collections(jax.random.key(0))}

    with Checkpoints(place, keep=1) as checkpoints:
        checkpoints.save(1, {"params": whole, "averages": averages}, derive_layout(state_of, alone.layout), meta)


def size_of(folder: Path) -> GPTConfig:
    """The model of a folder, with the widths that follow from others."""
    found = open_hf_model(str(folder))
    assert found is not None
    size = found.size
    widths = {"head_dim": size.head_width, "kv_heads": size.key_heads, "mlp_dim": size.mlp_width}
    return dataclasses.replace(size, **widths)  # type: ignore[arg-type]


def tensors(folder: Path) -> dict[str, tuple[Any, bytes]]:
    """Dtype, shape and bits of each tensor by its name."""
    import torch
    from safetensors.torch import load_file

    loaded = load_file(folder / "model.safetensors")
    return {
        name: ((str(x.dtype), tuple(x.shape)), x.contiguous().view(torch.uint8).numpy().tobytes())
        for name, x in loaded.items()
    }


def named_keys() -> set[str]:
    """The keys of config.json in the table of the page."""
    table = PAGE.read_text(encoding="utf-8").partition("| keys of config.json |")[2].partition("\n\n")[0]
    return {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_there_and_back(model_type: str, tmp_path: Path) -> None:
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    save_as_on_the_hub(folder, model_type)
    save_checkpoint(tmp_path / "run", folder)
    export(str(tmp_path / "run"), copy)
    assert tensors(copy) == tensors(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    copied = {path.name: path.read_bytes() for path in copy.iterdir()}
    assert copied.keys() == files.keys()
    names = [json.loads(each.pop("tokenizer_config.json")) for each in (files, copied)]
    if model_type == "gpt2":  # its files name no end, so that the class of the tokenizer would add rules of its own
        names[0] |= {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    assert names[0] == names[1]
    configs = [json.loads(each.pop("config.json")) for each in (files, copied)]
    assert {name for name in files if files[name] != copied[name]} <= {"model.safetensors"}  # its tensors' order
    differing = {key for key in {*configs[0], *configs[1]} if configs[0].get(key, ()) != configs[1].get(key, ())}
    assert differing <= named_keys()
    assert size_of(copy) == size_of(folder)
