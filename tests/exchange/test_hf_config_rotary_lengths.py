"""Rotary frequencies that depend on the length of a row: as in transformers, below and beyond the original context."""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.config.composing import Only, compose
from tests.exchange.random_weights import SIZES, contents, model_of, params, save, whole
from zero.base.errors import UserError
from zero.commands.modes import check
from zero.exchange.export import export
from zero.exchange.warm_start import warm_start
from zero.inference.generate import generate
from zero.models.config import GPTConfig
from zero.models.gpt import GPT
from zero.training.inference import Sampling
from zero.training.programs import make_inference

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

ORIGINAL, LONG = 32, 70


def longrope(pairs: int) -> tuple[Any, ...]:
    """Divisors of which none is another's."""
    return ("longrope", float(ORIGINAL), 1.2, *np.linspace(1, 1.5, pairs).round(3), *np.linspace(2, 9, pairs).round(3))


DYNAMIC = ("dynamic", 4.0, float(ORIGINAL))
SCALED: dict[str, GPTConfig] = {
    "phi3": dataclasses.replace(SIZES["phi3"], embedding_dim=60, rotary_scaling=longrope(4)),
    "llama_longrope": dataclasses.replace(SIZES["llama"], rotary_scaling=longrope(5)),
    "llama_dynamic": dataclasses.replace(SIZES["llama"], rotary_scaling=DYNAMIC),
    "qwen2": dataclasses.replace(SIZES["qwen2"], rotary_scaling=DYNAMIC),
    "gpt_neox": dataclasses.replace(SIZES["gpt_neox"], rotary_fraction=0.5, rotary_scaling=DYNAMIC),
    "gemma3": dataclasses.replace(SIZES["gemma3"], rotary_scaling=DYNAMIC),
    "olmo3": dataclasses.replace(SIZES["olmo3"], rotary_scaling=longrope(5)),
}


QUICK = ("phi3", "llama_dynamic")


@pytest.fixture(
    scope="module",
    params=[*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SCALED if name not in QUICK)],
)
def size(request: pytest.FixtureRequest) -> GPTConfig:
    return SCALED[request.param]


@pytest.fixture(scope="module")
def folder(size: GPTConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scaled")
    save(place / "run", size, 0)
    export(str(place / "run"), place / "hf")
    return place / "hf"


@pytest.mark.parametrize("positions", [pytest.param(ORIGINAL, marks=pytest.mark.wide), ORIGINAL + 1, LONG])
def test_logits_equal_transformers(size: GPTConfig, folder: Path, positions: int) -> None:
    """Logits of rows of each length, of a model that has seen no other."""
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, attn_implementation="eager")
    tokens = np.random.default_rng(0).integers(0, 101, (1, positions))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits[:, -1].numpy()
    apply: Any = jax.jit(partial(GPT(size).apply, {"params": params(size)}, method="logits"))
    np.testing.assert_allclose(apply(tokens)[0], expected, atol=1e-4, rtol=0)


def test_round_trip(size: GPTConfig, folder: Path, tmp_path: Path) -> None:
    """A folder that is imported and exported again has the same bytes."""
    model = model_of(size, 3)
    save(tmp_path / "run", size, 0, values=whole(warm_start(str(folder), model), model))
    export(str(tmp_path / "run"), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)


@pytest.mark.wide
@pytest.mark.parametrize(("prompt", "count"), [pytest.param(5, 24, marks=pytest.mark.wide), (40, 16)])
def test_greedy_texts(size: GPTConfig, folder: Path, prompt: int, count: int) -> None:
    """Texts that stay on one side of the original context are those of transformers; others are refused."""
    import torch
    import transformers

    model = model_of(size)
    programs = make_inference(model, Sampling(temperature=0.0))
    shards, tokens = warm_start(str(folder), model), np.arange(prompt, dtype=np.int32) * 7 % 101

    def text(count: int) -> np.ndarray:
        *_, rows = generate(programs, shards, [tokens], count, seed=0, chunk=8)
        return rows[0]

    with pytest.raises(UserError, match=r"texts of up to \d+ tokens: .* change beyond 32 positions"):
        text(32) if prompt < ORIGINAL else next(generate(programs, shards, [tokens, tokens[:9]], 8, seed=0, chunk=8))
    if prompt > ORIGINAL and size.rotary_kind == "dynamic":
        with pytest.raises(UserError, match=r"expected at most 32 tokens with the prompt$"):
            text(count)
        return
    auto: Any = transformers.AutoModelForCausalLM
    x = torch.tensor(tokens)[None].long()
    written = auto.from_pretrained(folder, attn_implementation="eager").generate(
        x, attention_mask=torch.ones_like(x), do_sample=False, max_new_tokens=count, eos_token_id=None
    )
    assert text(count)[: prompt + count].tolist() == written[0].tolist()


def test_phi3_names(tmp_path: Path) -> None:
    """The names of the scaling in the first folders of Phi-3, and its length where the file does not state it."""
    size = SCALED["phi3"]
    save(tmp_path / "run", size, 0)
    export(str(tmp_path / "run"), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    scaling = {**config["rope_scaling"], "type": "su"}
    del scaling["rope_type"], scaling["attention_factor"], scaling["original_max_position_embeddings"]
    path.write_text(json.dumps(config | {"rope_scaling": scaling}))
    length = (1 + np.log(128 / 32) / np.log(32)) ** 0.5
    scaled = (*size.rotary_scaling[:2], length, *size.rotary_scaling[3:]) if size.rotary_scaling else ()
    warm_start(str(tmp_path / "hf"), model_of(dataclasses.replace(size, rotary_scaling=scaled)))
    path.write_text(json.dumps(config | {"rope_scaling": {**scaling, "short_factor": [1.0]}}))
    with pytest.raises(UserError, match="as many numbers in short_factor as in long_factor"):
        warm_start(str(tmp_path / "hf"), model_of(size))


def test_refusals() -> None:
    """What depends on the length of a document is refused, and divisors that are not those of the pairs."""
    with pytest.raises(
        UserError, match=r"data.isolate_documents=true: expected false, as rotary frequencies depend on"
    ):
        check(compose("data.isolate_documents=true", "data.max_context=128"), Only(SCALED["phi3"]))
    with pytest.raises(ValueError, match="longrope must have 2 x 4 divisors, for the pairs of 8 rotated dimensions"):
        dataclasses.replace(SCALED["phi3"], rotary_scaling=longrope(5))
