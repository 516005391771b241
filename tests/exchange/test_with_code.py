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
from zero.exchange.architecture import UNWRITTEN
from zero.exchange.export import export
from zero.exchange.hf_config import write_config
from zero.exchange.with_code import ZERO, computed_keys
from zero.models import mlp
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gated_layer import OWN_KEYS
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


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("size", [PLAIN, LEARNED, MUP], ids=["alibi", "learned", "rotary"])
def test_padded_prompts_change_nothing(size: GPTConfig, name: str, tmp_path: Path) -> None:
    """Padding before a shorter prompt of a batch changes none of its logits; transformers 5.24 renamed the cache."""
    import torch

    model = load(exported(size, tmp_path))
    rows = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 7, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    with torch.no_grad():
        both, alone = model(rows, attention_mask=mask).logits, model(rows[1:, 2:]).logits
        first = model(rows[:, :4], attention_mask=mask[:, :4], use_cache=True)
        last = model(rows[:, 4:], attention_mask=mask, **{name: first.past_key_values}).logits
    torch.testing.assert_close(both[1:, 2:], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(last[:, 0], both[:, -1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("argument", ["caches", "num_items_in_batch", "inputs_embeds", "output_attentions"])
def test_arguments_without_effect_are_refused(argument: str, code: Any) -> None:
    """A text of another meaning of an argument would be wrong without an error."""
    import torch

    with pytest.raises((TypeError, ValueError), match=argument.removeprefix("inputs_").removeprefix("output_")):
        code(torch.tensor([[1, 2]]), **{argument: torch.ones(1)})


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(exported(PLAIN, tmp_path_factory.mktemp("plain")))


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
    with pytest.raises(
        UserError, match=r"^modeling_zero\.py does not compute this model: it has experts=None, this model"
    ):
        export(str(tmp_path / "experts"), tmp_path / "x", with_code=True)
    assert not (tmp_path / "x").exists()


_LATENT: dict[str, Any] = {
    "positions": "rotary",
    "alibi_attn": False,
    "rotary_dim": 4,
    "kv_heads": None,
    "windows": (0,),
    "head_dim": 14,
    "extra_logit": False,
    "latent_dim": 12,
}
_ROTARY: dict[str, Any] = {"positions": "rotary", "alibi_attn": False}
_DELTA: dict[str, Any] = {
    "mixers": ("delta",),
    "alibi_attn": False,
    "positions": "none",
    "windows": (0,),
    "kv_heads": None,
    "qkv_bias": False,
    "out_bias": False,
}
# Another value of each key of a model, with the keys that it needs; a flag without an entry is changed to the opposite.
CHANGES: dict[str, dict[str, Any]] = {
    "kv_heads": {"kv_heads": 1},
    "num_head": {"num_head": 2, "kv_heads": None, "head_dim": 14},
    "head_dim": {"head_dim": 10},
    "mlp_dim": {"mlp_dim": 20},
    "N": {"N": 4, "windows": (0,)},
    "dropout": {"dropout": 0.2},
    "windows": {"windows": (5,)},
    "mixers": _DELTA,
    "positions": {"positions": "none", "alibi_attn": False},
    "norm": {"norm": "rms_offset", "qk_norm_over": "head"},
    "norm_place": {"norm_place": "after"},
    "norm_epsilon": {"norm_epsilon": 0.1},
    "qk_norm_over": {"qk_norm_over": "projection", "qk_norm": True, "norm": "rms"},
    "activation": {"activation": "gelu_exact"},
    "attention_scale": {"attention_scale": "none", "parametrization": "standard", "mup_base_width": None},
    "attention_cap": {"attention_cap": 2.0},
    "parametrization": {"parametrization": "mup", "mup_base_width": 16, "tied": False, "attention_scale": None},
    "mup_base_width": {"mup_base_width": 8, "parametrization": "mup", "tied": False, "attention_scale": None},
    "init": {"init": "fan_in"},
    "head_init": {"head_init": "zero"},
    "zero_init": {"zero_init": ("query",)},
    "rotary_scaling": {"rotary_scaling": ("linear", 2.0), "positions": "rotary", "alibi_attn": False},
    "rotary_base": {"rotary_base": 100.0, **_ROTARY},
    "rotary_fraction": {"rotary_fraction": 0.4, **_ROTARY},
    "rotary_dim": {"rotary_dim": 4, "positions": "rotary", "alibi_attn": False},
    "local_rotary_base": {"local_rotary_base": 50.0, "windows": (0, 5), "N": 4},
    "unrotated_every": {"unrotated_every": 2, "N": 4, "windows": (0,)},
    "logit_cap": {"logit_cap": 3.0},
    "experts": {"experts": 4},
    "experts_per_token": {"experts": 4, "experts_per_token": 2},
    "experts_every": {"experts": 4, "experts_every": 3, "windows": (0,)},
    "router": {"experts": 4, "router": "sigmoid"},
    "normalize_router": {"experts": 4, "experts_per_token": 2, "normalize_router": True},
    "router_scale": {"experts": 4, "router_scale": 2.0},
    "router_groups": {"experts": 4, "router_groups": 2},
    "router_groups_per_token": {"experts": 8, "router_groups": 4, "router_groups_per_token": 2},
    "router_bias_rate": {"experts": 4, "router_bias_rate": 0.1},
    "shared_dim": {"experts": 4, "shared_dim": 42},
    "shared_gate": {"experts": 4, "shared_dim": 42, "shared_gate": True},
    "first_dense": {"experts": 4, "first_dense": 1, "windows": (0,)},
    "dense_dim": {"experts": 4, "first_dense": 1, "dense_dim": 20, "windows": (0,)},
    "expert_capacity": {"experts": 4, "expert_capacity": 1.0},
    "expert_priority": {"experts": 4, "expert_priority": "position"},
    "balance_choices": {"experts": 4, "balance_choices": "first"},
    "balance_loss": {"experts": 4, "balance_loss": 0.1},
    "router_z_loss": {"experts": 4, "router_z_loss": 0.1},
    "predictor": {"predictor": True, "positions": "none", "alibi_attn": False, "windows": (0,)},
    "layer": {**FAMILIES["vq"], "num_head": 1, "codes": 4, "vq_block": 4, "key_width": 4},
    "embedding_dim": {"embedding_dim": 48},
    "score_outputs": {"score_outputs": 2},
    "vocab_size": {"vocab_size": 257},
    "block_size": {"block_size": 256},
    "embedding_dropout": {"embedding_dropout": 0.1},
    "attention_dropout": {"attention_dropout": 0.1},
    "residual_dropout": {"residual_dropout": 0.1},
    "vocab_chunks": {"vocab_chunks": 3},
    "z_loss": {"z_loss": 0.1},
    "embedding_multiplier": {"embedding_multiplier": 3.0},
    "residual_multiplier": {"residual_multiplier": 0.5},
    "output_scale": {"output_scale": 0.5},
    "query_latent_dim": {**_LATENT, "query_latent_dim": 8},
    "value_dim": {**_LATENT, "value_dim": 6},
    "latent_dim": _LATENT,
    "delta_key_heads": {**_DELTA, "delta_key_heads": 1},
    "delta_value_heads": {**_DELTA, "delta_value_heads": 6},
    "delta_key_dim": {**_DELTA, "delta_key_dim": 6},
    "delta_value_dim": {**_DELTA, "delta_value_dim": 6},
    "delta_taps": {**_DELTA, "delta_taps": 3},
    "linear_features": {**_DELTA, "mixers": ("linear",), "linear_features": "relu"},
    "linear_epsilon": {**_DELTA, "mixers": ("linear",), "linear_epsilon": 1e-3},
}
BASES = {
    "plain": PLAIN,
    "mixed": MIXED,
    "llama": dataclasses.replace(SIZES["llama"], vocab_size=256, rotary_scaling=None),
}
KEYS = [field for field in dataclasses.fields(GPTConfig) if field.name not in OWN_KEYS]


def changed(base: GPTConfig, key: str) -> GPTConfig | None:
    """The base with another value of a key; None if it cannot have that."""
    value = getattr(base, key)
    assert key in CHANGES or isinstance(value, bool), (
        f"{key} is a new key of a model: give CHANGES another value of it, and an export with code has to write it "
        "(ZERO in zero/exchange/with_code.py, and modeling_zero.py) or refuses it"
    )
    try:
        other = dataclasses.replace(base, **CHANGES.get(key, {key: not value}))
    except ValueError:
        return None
    return None if getattr(other, key) == value else other


def written(size: GPTConfig) -> dict[str, Any]:
    """config.json of an export with code, without the keys of its tokenizer."""
    return {**write_config(ZERO, size), **computed_keys(size)}


@pytest.mark.parametrize("field", KEYS, ids=lambda field: field.name)
def test_each_key_is_written_or_refused(field: Any) -> None:
    """Or belongs to training alone, or to the shapes of weights."""
    others = {name: other for name, base in BASES.items() if (other := changed(base, field.name)) is not None}
    assert others, f"{field.name}: no base takes the value of CHANGES"
    for name, other in others.items():
        if ZERO.differences(other):
            with pytest.raises(UserError, match=_refused_as(field.name)):
                computed_keys(other)
        else:
            assert written(other) != written(BASES[name]) or field.name in UNWRITTEN, (name, field.name)


def _refused_as(key: str) -> str:
    """The name of a key in the refusal of a model that needs it only beside another."""
    of_part = {
        "delta": "mixers",
        "linear": "mixers",
        "latent": "latent_dim",
        "balance": "experts",
        "router": "experts",
        "expert": "experts",
    }
    return next((f"({key}|{name})=" for start, name in of_part.items() if key.startswith(start)), f"{key}=")


@pytest.mark.slow
@pytest.mark.parametrize("field", KEYS, ids=lambda field: field.name)
def test_each_key_that_is_written_is_computed(field: Any, tmp_path: Path) -> None:
    """The logits of the exported folder are those of the changed model: no key is lost in silence."""
    import torch

    tokens = np.random.default_rng(0).integers(0, 256, (2, 24), np.int32)
    for name, base in BASES.items():
        other = changed(base, field.name)
        if other is None or ZERO.differences(other):
            continue
        losses: Any = jax.jit(GPT(other).apply)({"params": params(other)}, tokens[:, :-1], tokens[:, 1:])
        with torch.no_grad():
            logits = load(exported(other, tmp_path / name))(torch.from_numpy(tokens[:, :-1]).long()).logits
        scores = -torch.log_softmax(logits, -1).numpy()
        theirs = np.take_along_axis(scores, tokens[:, 1:, None], 2)[..., 0]
        np.testing.assert_allclose(losses, theirs, atol=2e-4, rtol=1e-4, err_msg=name)
