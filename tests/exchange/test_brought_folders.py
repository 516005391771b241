"""A folder as it is on the hub, used at once: its size, ids, logits, stops and texts are those of transformers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import zero
from tests.helpers.brought import MODELS, save_folder
from zero.corpus.text.tokenizers import encode_prompt, load_tokenizer
from zero.exchange.brought import brought
from zero.exchange.warm_start import warm_start
from zero.inference.harness_tasks import adapter
from zero.inference.scoring import Scorer
from zero.inference.trained_model import TrainedModel
from zero.training.sharded_gpt import ShardedGPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported


def opened(folder: Path, devices: int) -> TrainedModel:
    found = brought(str(folder))
    assert found is not None
    model = ShardedGPT(found.size, zero.Axis("zero", (1, devices)), 3)
    return TrainedModel(model, warm_start(str(folder), model), load_tokenizer(found.tokenizer()), None)


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in [*MODELS][1:])])
def test_greedy_texts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Up to each end of the folder's list, whichever comes, through the harness; losses too."""
    import torch
    import transformers

    save_folder(tmp_path, family)
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
