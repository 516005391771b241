"""Exported folders: what transformers computes with them, and that they are whole or not there at all."""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.exchange.greedy import greedy
from tests.exchange.random_weights import (
    ALIBI,
    BOTH,
    LEARNED,
    SIZES,
    SOME,
    assert_same,
    contents,
    model_of,
    params,
    save,
    whole,
    without_padding,
)
from tests.helpers import cli, kills
from tests.helpers.vllm_rules import objections, tensors_of
from zero.base.errors import UserError
from zero.checkpoints.manager import Checkpoints
from zero.exchange import export as exporting
from zero.exchange import zero_weights
from zero.exchange.export import export
from zero.exchange.warm_start import warm_start
from zero.models.config import GPTConfig
from zero.models.gpt import GPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


OTHERS = ("gpt_neox_sequential", "llama_tied", "olmo2", "granite", "gemma", "apertus")  # apertus writes constants too
WRITTEN = ("gpt_neox_sequential", "llama_tied", "granite", "gemma", "apertus")
READ = ("gpt_neox", "gpt_oss", "gemma3")  # those in `SOME` whose logits test_models_of_transformers compares


def few(names: Sequence[str], wide: Sequence[str]) -> list[Any]:
    """The sizes of these names, some of them wide; all others are slow."""
    marks = {name: pytest.mark.wide if name in wide else () for name in names}
    return [pytest.param(size, marks=marks.get(name, pytest.mark.slow)) for name, size in SIZES.items()]


@pytest.mark.parametrize("size", few([*SOME, *OTHERS], wide=[*READ, *WRITTEN]), ids=SIZES)
def test_equals_transformers(size: GPTConfig, tmp_path: Path) -> None:
    """transformers computes the same logits and writes the same text."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    save(tmp_path / "checkpoints", size, 0)
    export(str(tmp_path / "checkpoints"), tmp_path / "hf")
    auto: Any = transformers.AutoModelForCausalLM
    model, loaded = auto.from_pretrained(tmp_path / "hf", output_loading_info=True, attn_implementation="eager")
    assert not any(loaded.values())
    model.save_pretrained(tmp_path / "theirs")  # in memory experts are one tensor
    names = {*tensors_of(tmp_path / "theirs")[0]}
    if "gpt_neox.embed_in.weight" in names:  # vLLM's class keeps the name of the head that transformers 5 has changed
        names = {name.replace("lm_head", "embed_out") for name in names}
    assert not objections(tmp_path / "hf", names)
    prompt = (17, 4, 99)
    tokens, logits = greedy(size, prompt, 100)
    assert len(set(tokens.tolist())) > 10  # not one word a hundred times
    x = torch.tensor([prompt + tuple(tokens.tolist())])
    with torch.no_grad():
        theirs = model(x).logits[0, len(prompt) - 1 : -1].numpy()
    np.testing.assert_allclose(logits, theirs, atol=1e-4, rtol=0)
    written = model.generate(
        x[:, : len(prompt)],
        attention_mask=torch.ones(1, len(prompt)),
        do_sample=False,
        max_new_tokens=100,
        eos_token_id=None,
    )
    assert written[0, len(prompt) :].tolist() == tokens.tolist()


# test_equals_transformers exports each, and test_hf_folder.py reads them.
@pytest.mark.parametrize("size", few([*SOME, "apertus"], wide=[*READ, "phi3", "gpt2", "apertus"]), ids=SIZES)
def test_round_trip_of_an_export(size: GPTConfig, tmp_path: Path) -> None:
    """A model that is exported, imported and exported again has the same bytes."""
    save(tmp_path / "first", size, 3, 7)
    export(str(tmp_path / "first"), tmp_path / "hf", 3)
    for devices, stage in [(8, 3), (1, 2), (3, 1)] if size is ALIBI else [(8, 0)]:
        model = model_of(size, devices, stage)
        shards = warm_start(str(tmp_path / "hf"), model)
        assert_same(jax.tree.map(lambda x: x.shape[1:], shards), jax.tree.map(lambda x: x.shape, model.weight_shapes()))
        assert_same(without_padding(whole(shards, model), size), without_padding(params(size, 3), size))
    save(tmp_path / "second", size, 9, values=whole(shards, model))
    export(str(tmp_path / "second"), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "hf")
    assert sorted(contents(tmp_path / "hf")) == FILES
    assert not objections(tmp_path / "hf")


@BOTH
def test_many_files_hold_what_one_holds(size: GPTConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", 30_000)
    save(tmp_path / "run", size, 0)
    export(str(tmp_path / "run"), tmp_path / "hf")
    files = [name for name in contents(tmp_path / "hf") if name.endswith(".safetensors")]
    assert len(files) > 5 and all((tmp_path / "hf" / name).stat().st_size < 40_000 for name in files)
    model = model_of(size)
    read = whole(warm_start(str(tmp_path / "hf"), model), model)
    assert_same(without_padding(read, size), without_padding(params(size), size))

    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    _, loaded = auto.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loaded.values())


def test_tokenizer_goes_with_the_model(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "words.json"))
    save(tmp_path / "run", LEARNED, 0, meta={"data": {"tokenizer": str(tmp_path / "words.json")}})
    export(str(tmp_path / "run"), tmp_path / "plain")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template is None
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "?"}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token + messages[0].content }}")
    export(str(tmp_path / "run"), tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("b a a")["input_ids"] == [1, 0, 0]
    rendered: Any = tokenizer.apply_chat_template([{"role": "user", "content": " a b"}])
    assert rendered["input_ids"] == [2, 0, 1]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 3)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 3


def test_export_refuses_in_a_line(tmp_path: Path) -> None:
    save(tmp_path / "plain", dataclasses.replace(ALIBI, embedding_norm=False), 0)
    with pytest.raises(UserError, match="gpt2 has alibi_attn=False, this model True; bloom has embedding_norm"):
        export(str(tmp_path / "plain"), tmp_path / "hf")
    save(tmp_path / "uneven", dataclasses.replace(SIZES["gemma2"], embedding_dim=44, head_dim=10), 0)
    with pytest.raises(UserError, match="gemma2 has embedding_dim divisible by num_head, this model 44 and 6"):
        export(str(tmp_path / "uneven"), tmp_path / "hf")
    save(tmp_path / "run", LEARNED, 3, 4)
    with pytest.raises(UserError, match=r"run: no step 5; there are 3, 4"):
        export(str(tmp_path / "run"), tmp_path / "hf", 5)
    assert not (tmp_path / "hf").exists()
    (tmp_path / "hf").mkdir()
    with pytest.raises(UserError, match="hf already exists and is never overwritten"):
        export(str(tmp_path / "run"), tmp_path / "hf")
    assert contents(tmp_path / "hf") == {}


def test_failed_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that fails leaves nothing and can be repeated."""
    save(tmp_path / "run", LEARNED, 0)
    read = Checkpoints.read

    def fail(self: Checkpoints, step: int, name: str) -> np.ndarray:
        if name.startswith("params/norm/"):
            raise UserError("the disk is gone")
        return read(self, step, name)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="the disk is gone"):
        patch.setattr(Checkpoints, "read", fail)
        patch.setattr(exporting, "MAX_FILE_BYTES", 30_000)  # so that files are written before
        export(str(tmp_path / "run"), tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    export(str(tmp_path / "run"), tmp_path / "hf")
    assert sorted(contents(tmp_path / "hf")) == FILES


def test_export_of_the_average(tmp_path: Path) -> None:
    """The moving average is exported, and used for a start, in place of the weights."""
    save(tmp_path / "run", LEARNED, 4, ema=9)
    save(tmp_path / "average", LEARNED, 9)
    model = model_of(LEARNED)
    assert export(str(tmp_path / "run"), tmp_path / "weights") == 4
    assert export(str(tmp_path / "run"), tmp_path / "ema", ema=True) == 4
    export(str(tmp_path / "average"), tmp_path / "expected")
    assert contents(tmp_path / "ema") == contents(tmp_path / "expected") != contents(tmp_path / "weights")
    for ema, seed in ((False, 4), (True, 9)):
        assert_same(whole(warm_start(str(tmp_path / "run"), model, ema=ema), model), params(LEARNED, seed))
    for refused in (
        lambda: export(str(tmp_path / "average"), tmp_path / "x", ema=True),
        lambda: warm_start(str(tmp_path / "average"), model, ema=True),
    ):
        with pytest.raises(UserError, match=r"average, step 9: has no moving average of the weights; training.ema"):
            refused()
    with pytest.raises(UserError, match=r"weights: a Hugging Face folder has no moving average"):
        warm_start(str(tmp_path / "weights"), model, ema=True)


def test_bfloat16_weights_are_exported_in_float32(tmp_path: Path) -> None:
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(ALIBI, 3))
    for name, values in (("narrow", rounded), ("wide", jax.tree.map(lambda x: x.astype(np.float32), rounded))):
        save(tmp_path / name, ALIBI, 3, values=values)
        export(str(tmp_path / name), tmp_path / f"{name}-hf")
    assert contents(tmp_path / "narrow-hf") == contents(tmp_path / "wide-hf")


def test_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "checkpoints", LEARNED, 0)
    command = ["zero-weights", "export", str(tmp_path / "checkpoints"), str(tmp_path / "hf")]
    monkeypatch.setattr(sys, "argv", command)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # of a file, in bytes: to the program, a full disk
    try:
        with pytest.raises(SystemExit, match=r"^1$"):
            zero_weights.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "File too large" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    "command", [pytest.param("export", marks=pytest.mark.wide), pytest.param("average", marks=pytest.mark.slow)]
)
def test_a_killed_command_leaves_nothing_to_the_next(command: str, tmp_path: Path) -> None:
    """Killed when it has written everything but the name, and once more while it writes."""
    save(tmp_path / "checkpoints", LEARNED, 0)
    (tmp_path / ".settings.0123abcd").mkdir()
    where = cli.environment() | {"PYTHONPATH": str(cli.MAIN.parent)}
    moments = (
        kills.Rule("os.rename", "/new$", "kill before"),
        kills.Rule("open", r"/\.new\.[0-9a-f]{8}/", "kill after"),
    )

    def start(code: str) -> subprocess.CompletedProcess[str]:
        program = f"exec({code!r})\nfrom zero.exchange import zero_weights\nzero_weights.main()"
        line = [sys.executable, "-c", program, command, "checkpoints", "new"]
        return subprocess.run(line, cwd=tmp_path, env=where, capture_output=True, text=True)

    for moment in moments:
        done = start(kills.at(moment))
        assert done.returncode == -signal.SIGKILL, done.stderr
        left = {path.name for path in tmp_path.iterdir()} - {"checkpoints", ".settings.0123abcd"}
        assert len(left) == 1 and left.pop().startswith(".new.")
    done = start("")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".settings.0123abcd", "checkpoints", "new"]


@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3", pytest.param("gpt_neox", marks=pytest.mark.slow)]
)
def test_export_of_mup(family: str, tmp_path: Path) -> None:
    """A model in mup is exported as the standard model with the same logits.

    To the bit: with heads of 16 queries are a quarter as large.
    """
    mup: dict[str, Any] = {"parametrization": "mup", "mup_base_width": 16, "attention_scale": None}
    standard = dataclasses.replace(SIZES[family], embedding_dim=48, num_head=3, head_dim=16, kv_heads=3, mlp_dim=192)
    trained = dataclasses.replace(standard, **mup)
    save(tmp_path / "run", trained, 0)
    export(str(tmp_path / "run"), tmp_path / "hf")
    model = model_of(standard)
    read = whole(warm_start(str(tmp_path / "hf"), model), model)
    tokens = np.random.default_rng(0).integers(0, standard.vocab_size, (2, 40))

    def losses(size: GPTConfig, values: Any) -> np.ndarray:
        return np.asarray(jax.jit(GPT(size).apply)({"params": values}, tokens, tokens))

    np.testing.assert_array_equal(losses(standard, read), losses(trained, params(trained)))
    with pytest.raises(UserError, match="attention_scale is sqrt, this run expects linear"):
        warm_start(str(tmp_path / "hf"), model_of(trained))


def test_rounded_mup_is_not_exported(tmp_path: Path) -> None:
    """A model in mup whose queries would be rounded is not exported."""
    mup: dict[str, Any] = {"parametrization": "mup", "mup_base_width": 16, "attention_scale": None}
    save(tmp_path / "run", dataclasses.replace(SIZES["llama"], **mup), 0)
    with pytest.raises(UserError, match="attention_scale=sqrt, this model linear"):
        export(str(tmp_path / "run"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_further_layer_is_left_out(tmp_path: Path) -> None:
    """The folder of a model with a predictor is that of the model without it, and has no weights for the predictor."""
    size = dataclasses.replace(SIZES["glm4_moe"], N=2, predictor=True)
    weights = params(size)
    save(tmp_path / "with", size, 0)
    without = {name: tree for name, tree in weights.items() if not name.startswith("predictor")}
    assert len(without) == len(weights) - 3
    without["router_bias"] = {"blocks": weights["router_bias"]["blocks"]}
    save(tmp_path / "without", dataclasses.replace(size, predictor=False), 0, values=without)
    for name in ("with", "without"):
        export(str(tmp_path / name), tmp_path / f"hf {name}")
    assert contents(tmp_path / "hf with") == contents(tmp_path / "hf without")
    with pytest.raises(UserError, match="hf with: expected predictor: false, as it has no layer that predicts"):
        warm_start(str(tmp_path / "hf with"), model_of(size))
