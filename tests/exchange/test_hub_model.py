"""A folder as it is on the hub, used at once: its size, ids, logits, stops and texts are those of transformers."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

import zero
from tests.exchange.random_weights import SIZES
from tests.helpers.brought import MODELS, ODD, save_folder
from zero.base.errors import UserError
from zero.commands.cli import compose
from zero.corpus.text.tokenizers import encode_prompt, load_tokenizer
from zero.exchange.architecture_table import architecture_of
from zero.exchange.hf_config import read_size, write_config
from zero.exchange.hub_model import open_hf_model
from zero.exchange.warm_start import warm_start
from zero.inference.harness_tasks import adapter
from zero.inference.scoring import Scorer
from zero.inference.trained_model import TrainedModel
from zero.models.config import GPTConfig
from zero.training.sharded_gpt import ShardedGPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported


def opened(folder: Path, devices: int) -> TrainedModel:
    found = open_hf_model(str(folder))
    assert found is not None
    model = ShardedGPT(found.size, zero.Axis("zero", (1, devices)), 3)
    return TrainedModel(model, warm_start(str(folder), model), load_tokenizer(found.tokenizer()), None)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param(name, changes, marks=() if (name, changes) == ("llama", {}) else pytest.mark.slow)
        for name in MODELS
        for changes in ({}, ODD)
    ],
)
def test_greedy_texts_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Up to each end of the folder's list, whichever comes, through the harness; losses too."""
    import torch
    import transformers

    save_folder(tmp_path, family, **changes)
    trained = opened(tmp_path, 3)
    harness = adapter(Scorer(trained, 64, 4))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompts = ["shard gather", "zéro", "stage layout don't"]
    plain = [encode_prompt(trained.tokenizer, prompt) for prompt in prompts]
    ends = []
    for prompt, ids in zip(prompts, plain, strict=True):
        encoded = theirs(prompt, return_tensors="pt")
        assert encoded.input_ids[0].tolist() == ids.tolist()
        text = model.generate(**encoded, do_sample=False, max_new_tokens=20, eos_token_id=-1)
        ends.append(int(text[0, len(ids) + 4]))
    # Tokens that this model writes, so that texts stop in their midst.
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": sorted(set(ends)), "do_sample": False}))
    model.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    trained = trained._replace(tokenizer=load_tokenizer(trained.tokenizer.path))  # type: ignore[attr-defined]
    assert set(trained.tokenizer.special.ends) == set(ends)
    harness = adapter(Scorer(trained, 64, 4))
    for prompt, ids in zip(prompts, plain, strict=True):
        encoded = theirs(prompt, return_tensors="pt")
        expected = model.generate(**encoded, max_new_tokens=20)[0, len(ids) :].tolist()
        (written,) = list(harness._write([ids], 20))[-1]
        text, is_ended = harness._until(written, ())
        assert is_ended and len(expected) < 20 and expected[-1] in ends
        assert written[: len(expected)].tolist() == expected
        assert text == theirs.decode(expected[:-1], skip_special_tokens=True)


def test_whole_sizes(tmp_path: Path) -> None:
    """What a config.json describes is the model that was written, of each family."""
    for name, size in SIZES.items():
        architecture = architecture_of(size)
        again = read_size("config.json", write_config(architecture, size), architecture, size.N)
        differing = {
            field.name: (getattr(size, field.name), getattr(again, field.name))
            for field in dataclasses.fields(GPTConfig)
            if getattr(size, field.name) != getattr(again, field.name)
        }
        allowed = {"vocab_chunks", "dropout", "balance_loss", "experts", "kv_heads", "head_dim", "mlp_dim"}
        allowed |= {"attention_dropout", "residual_dropout", "embedding_dropout", "expert_capacity"}
        assert set(differing) <= allowed, (name, differing)
        for derived in ("key_heads", "head_width", "mlp_width", "experts", "attention_drop_rate"):
            assert getattr(again, derived) == getattr(size, derived)


def test_modes_take_a_folder(tmp_path: Path) -> None:
    """mode=sample and mode=evaluate: the size and the tokenizer of the folder; what only a run has is refused."""
    save_folder(tmp_path, "qwen2")
    for keys in (["mode=sample"], ["mode=evaluate", "evaluate.index=texts.index"]):
        config, size = compose([*keys, f"model.model_path={tmp_path}"])
        assert (size.embedding_dim, size.N, size.tied, size.qkv_bias) == (36, 2, True, True)
        assert config.data.tokenizer == str(tmp_path / "tokenizer.json")
        assert config.data.max_context == 64
        with pytest.raises(UserError, match=r"data\.resume_step=3: .* is not a run and has no checkpoints"):
            compose([*keys, f"model.model_path={tmp_path}", "data.resume_step=3"])
    with pytest.raises(
        UserError, match=r"evaluate\.validation=true: expected false, or evaluate\.index, as .* hold no"
    ):
        compose(["mode=evaluate", f"model.model_path={tmp_path}"])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"holds no tokenizer; expected tokenizer\.json or tokenizer\.model"):
        compose(["mode=sample", f"model.model_path={tmp_path}"])
