"""Folders with their own code compute what zero computes, in PyTorch, for every choice of a layer."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.exchange.greedy import greedy
from tests.exchange.random_weights import ALIBI, LEARNED, SIZES, params, save
from zero.base.errors import UserError
from zero.corpus.text.tokenizers import ByteTokenizer
from zero.exchange.export import export
from zero.models import mlp
from zero.models.config import GPTConfig
from zero.models.gpt import GPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

# The default model's choices, and models that have each choice that no family has.
PLAIN = dataclasses.replace(ALIBI, embedding_norm=False, vocab_size=256)
MUP = dataclasses.replace(
    PLAIN,
    alibi_attn=False,
    positions="rotary",
    norm="rms",
    tied=False,
    qk_norm=True,
    activation="relu",
    parametrization="mup",
    mup_base_width=16,
    attention_scale=None,
)
MIXED = dataclasses.replace(
    PLAIN,
    alibi_attn=False,
    positions="t5",
    num_head=6,
    kv_heads=2,
    windows=(0, 5, 9),
    norm_place="both",
    extra_logit=True,
    attention_scale=0.3,
    activation="squared_relu",
    embedding_multiplier=2.0,
    scale_output=True,
    output_scale=1.5,
)
SINUSOIDS = dataclasses.replace(
    PLAIN,
    alibi_attn=False,
    positions="sinusoidal",
    parallel_residual=True,
    gated=True,
    mlp_bias=False,
    attention_cap=4.0,
    activation="selu",
    scale_embedding=True,
    final_norm=False,
    output_scale=0.1,  # without a norm logits are large, and so are their last digits
)
OWN = {"plain": PLAIN, "mup": MUP, "mixed": MIXED, "sinusoids": SINUSOIDS}
REFUSED = ("ernie4_5", "glm4", "apertus")  # whose positions or activation the code does not compute
OTHERS = {name: size for name, size in SIZES.items() if size.experts is None and name not in REFUSED}


def load(folder: Path) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    auto: Any = transformers.AutoModelForCausalLM
    model, loaded = auto.from_pretrained(folder, output_loading_info=True, trust_remote_code=True)
    assert not any(loaded.values())
    return model


def exported(size: GPTConfig, place: Path) -> Path:
    save(place / "checkpoints", size, 0)
    export(str(place / "checkpoints"), place / "hf", with_code=True)
    return place / "hf"


@pytest.mark.parametrize(
    "size",
    [
        *(
            pytest.param(size, marks=pytest.mark.wide if name in ("plain", "sinusoids") else ())
            for name, size in OWN.items()
        ),
        *(pytest.param(size, marks=pytest.mark.slow) for size in OTHERS.values()),
    ],
    ids=[*OWN, *OTHERS],
)
def test_code_computes_the_same(size: GPTConfig, tmp_path: Path) -> None:
    """PyTorch computes the same logits and writes the same text, beyond the trained context as well."""
    import torch

    model = load(exported(size, tmp_path))
    prompt, length = (17, 4, 99), 140 if size is PLAIN else 100
    assert size is not PLAIN or length > size.block_size
    tokens, logits = greedy(size, prompt, length)
    assert len(set(tokens.tolist())) > 5  # not one word a hundred times
    x = torch.tensor([prompt + tuple(tokens.tolist())])
    with torch.no_grad():
        theirs = model(x).logits[0, len(prompt) - 1 : -1].numpy()
    np.testing.assert_allclose(logits, theirs, atol=1e-4, rtol=0)
    options = {"do_sample": False, "max_new_tokens": length, "eos_token_id": None, "pad_token_id": 0}
    written = model.generate(x[:, : len(prompt)], attention_mask=torch.ones(1, len(prompt)), **options)
    assert written[0, len(prompt) :].tolist() == tokens.tolist()


def test_code_knows_every_activation() -> None:
    """Each activation of a model is in the code of an export as well, or its export is refused."""
    from zero.exchange import modeling_zero

    refused = {"clamped_swiglu", "xielu"}
    assert {*modeling_zero.ACTIVATIONS} == {*mlp.ACTIVATIONS} - refused


@pytest.mark.wide
def test_loss_without_gains(tmp_path: Path) -> None:
    """Norms without gains give the same loss."""
    import torch

    bare = dataclasses.replace(MUP, norm_gains=False)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 40), np.int32)
    x = torch.from_numpy(tokens).long()
    losses: Any = GPT(bare).apply({"params": params(bare)}, tokens[:, :-1], tokens[:, 1:])
    loss = load(exported(bare, tmp_path))(x, labels=x).loss
    np.testing.assert_allclose(loss.item(), np.asarray(losses).mean(), rtol=1e-5)


@pytest.mark.parametrize("size", [PLAIN, LEARNED, MUP], ids=["alibi", "learned", "rotary"])
def test_padded_prompts_change_nothing(size: GPTConfig, tmp_path: Path) -> None:
    """Padding before a shorter prompt of a batch changes none of its logits."""
    import torch

    model = load(exported(size, tmp_path))
    rows = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 7, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    with torch.no_grad():
        both, alone = model(rows, attention_mask=mask).logits, model(rows[1:, 2:]).logits
        first = model(rows[:, :4], attention_mask=mask[:, :4], use_cache=True)
        last = model(rows[:, 4:], attention_mask=mask, past_key_values=first.past_key_values).logits
    torch.testing.assert_close(both[1:, 2:], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(last[:, 0], both[:, -1], atol=1e-5, rtol=0)


@pytest.mark.wide
def test_harness_loads_the_code(tmp_path: Path) -> None:
    """lm-evaluation-harness gets our likelihoods from the folder, with the tokenizer that it holds."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder = exported(PLAIN, tmp_path)
    texts = [("the shard", " gather"), ("zéro", " ä stage\n  two")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(texts)]
    harness = HFLM(pretrained=str(folder), device="cpu", trust_remote_code=True)
    assert harness.max_length == PLAIN.block_size
    for (context, text), (found, _) in zip(texts, harness.loglikelihood(requests, disable_tqdm=True), strict=True):
        tokens = np.asarray([*(context + text).encode()])
        losses: Any = GPT(PLAIN).apply({"params": params(PLAIN)}, jnp.asarray(tokens[None, :-1]), tokens[None, 1:])
        np.testing.assert_allclose(found, -float(jax.device_get(losses)[0, -len(text.encode()) :].sum()), rtol=1e-4)


def test_folder_holds_a_byte_tokenizer(tmp_path: Path) -> None:
    """The tokenizer of a model of bytes goes with it, as a file."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(exported(PLAIN, tmp_path))
    ours = ByteTokenizer()
    for text in ("a plain text", "zéro \u2028\n\t 日本 🙂  two", "a\0b", bytes(range(1, 128)).decode()):
        assert tokenizer(text)["input_ids"] == ours.encode(text).tolist()
        assert tokenizer.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert tokenizer.eos_token_id == ours.end_of_text


def test_code_stands_alone(tmp_path: Path) -> None:
    """The code imports nothing of zero, and what it does not compute is refused."""
    folder = exported(PLAIN, tmp_path)
    names = ["config.json", "model.safetensors", "modeling_zero.py", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    code = (folder / "modeling_zero.py").read_text()
    assert set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)) == {"math", "torch", "transformers"}
    assert json.loads((folder / "config.json").read_text())["auto_map"]["AutoConfig"] == "modeling_zero.ZeroConfig"
    save(tmp_path / "experts", SIZES["mixtral"], 0)
    with pytest.raises(UserError, match=r"^this model has experts, which modeling_zero\.py does not compute"):
        export(str(tmp_path / "experts"), tmp_path / "x", with_code=True)
    assert not (tmp_path / "x").exists()
