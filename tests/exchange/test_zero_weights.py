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

import pytest

from tests.exchange.on_the_hub import save_as_on_the_hub, save_checkpoint
from zero.exchange.architecture_table import ARCHITECTURES
from zero.exchange.export import export
from zero.exchange.hub_model import open_hf_model
from zero.models.config import GPTConfig

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

SOME = ("llama", "gpt2")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"


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
