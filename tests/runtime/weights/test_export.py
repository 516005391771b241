"""Weights in and out: what transformers computes with an exported model, and what comes back of it."""

import dataclasses
import json
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import zero
from zero.models.gpt import GPT, GPTConfig, init_cache
from zero.partition.layout import derive_layout
from zero.runtime.checkpoints.manager import Checkpoints
from zero.runtime.errors import UserError
from zero.runtime.weights import interchange
from zero.runtime.weights.interchange import average, export, repeated_blocks, warm_start
from zero.training.step import ShardedGPT

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

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
BOTH = pytest.mark.parametrize("size", [ALIBI, LEARNED], ids=["bloom", "gpt2"])
RUN = {"data": {"tokenizer": "bytes"}}


def model_of(size: GPTConfig, devices: int = 8, stage: int = 3) -> ShardedGPT:
    return ShardedGPT(size, zero.Axis("zero", (1, devices)), stage)


@cache
def params(size: GPTConfig, seed: int = 0) -> Any:
    """Whole arrays; every leaf random and large enough to matter, scales of both signs against endless repetition."""
    rng = np.random.default_rng(seed)
    spread = {"kernel": 0.5, "scale": 1.0, "bias": 0.1, "table": 0.1}

    def one(leaf: zero.LeafLayout) -> np.ndarray:
        return rng.normal(0, spread[leaf.path[-1]], leaf.shape).astype(leaf.dtype)

    return model_of(size).layout.map(one)


def save(place: Path, size: GPTConfig, *seeds: int, values: Any = None, meta: Any = RUN) -> None:
    """A directory of checkpoints of weights, random ones unless given, steps as the seeds, from shards of 8 devices."""
    model = model_of(size)

    def one(leaf: zero.LeafLayout, target: jax.ShapeDtypeStruct, x: np.ndarray) -> jax.Array:
        padded = np.pad(x, [(0, p - n) for n, p in zip(leaf.shape, leaf.padded_shape, strict=True)])
        return jax.device_put(padded, target.sharding)

    layout = derive_layout(lambda tree: {"params": tree}, model.layout)
    with Checkpoints(place, keep=9) as checkpoints:
        for seed in seeds:
            whole = model.layout.map(one, zero.global_shapes(model.layout, model.axis), values or params(size, seed))
            checkpoints.save(seed, {"params": whole}, layout, {"config": meta, "size": dataclasses.asdict(size)})


def whole(shards: Any, model: ShardedGPT) -> Any:
    """Logical arrays on this host, of what `warm_start` returned."""
    return model.layout.map(
        lambda leaf, x: np.asarray(x)[tuple(slice(n) for n in leaf.shape)],
        zero.to_global(shards, model.layout, model.axis),
    )


def assert_same(got: Any, expected: Any) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def without_padding(tree: Any, size: GPTConfig) -> Any:
    table = tree["vocabulary"]["table"].reshape(-1, size.embedding_dim)[: size.vocab_size]
    return {**tree, "vocabulary": {"table": table}}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@cache
def greedy(size: GPTConfig, prompt: tuple[int, ...], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `(length,)` and the logits `(length, V)` that they were chosen by, one device, with a cache."""
    apply = partial(GPT(size).apply, {"params": params(size)}, method="logits")
    cache = init_cache(size, 1, len(prompt) + length, jnp.float32)
    first: Any = apply(jnp.asarray([prompt]), cache)

    def write(carry: Any, position: jax.Array) -> Any:
        logits_BV, cache = carry
        token_B = jnp.argmax(logits_BV, axis=-1)
        return apply(token_B[:, None], cache, position), (token_B[0], logits_BV[0])

    positions = jnp.arange(len(prompt), len(prompt) + length)
    _, (tokens, logits) = jax.jit(partial(lax.scan, write))(first, positions)
    return np.asarray(tokens), np.asarray(logits)


@BOTH
def test_transformers_computes_the_same_logits_and_writes_the_same_text(size: GPTConfig, tmp_path: Path) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    save(tmp_path / "checkpoints", size, 0)
    export(str(tmp_path / "checkpoints"), tmp_path / "hf")
    auto: Any = transformers.AutoModelForCausalLM
    model, loaded = auto.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(loaded.values())
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


@BOTH
def test_exported_imported_and_exported_again_is_the_same_to_the_byte(size: GPTConfig, tmp_path: Path) -> None:
    save(tmp_path / "first", size, 3, 7)
    export(str(tmp_path / "first"), tmp_path / "hf", 3)
    for devices, stage in [(8, 3), (3, 1), (1, 2), (8, 0)]:
        model = model_of(size, devices, stage)
        shards = warm_start(str(tmp_path / "hf"), model)
        assert_same(
            jax.tree.map(lambda x: x.shape[1:], shards), jax.tree.map(lambda x: x.shape, model.layout.shard_shapes())
        )
        assert_same(without_padding(whole(shards, model), size), without_padding(params(size, 3), size))
    save(tmp_path / "second", size, 9, values=whole(shards, model))
    export(str(tmp_path / "second"), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "hf")
    assert sorted(contents(tmp_path / "hf")) == ["config.json", "model.safetensors"]


@BOTH
def test_many_files_hold_what_one_holds(size: GPTConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interchange, "MAX_FILE_BYTES", 30_000)
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


def test_model_that_transformers_made_is_read(tmp_path: Path) -> None:
    import torch
    import transformers

    config = transformers.BloomConfig(vocab_size=101, hidden_size=42, n_layer=2, n_head=3, layer_norm_epsilon=1e-4)
    theirs: Any = transformers.BloomForCausalLM(config)
    theirs.to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    size = dataclasses.replace(ALIBI, N=2)
    model = model_of(size)
    read = whole(warm_start(str(tmp_path), model), model)
    fused = theirs.transformer.h[1].self_attention.query_key_value.weight.detach().float().numpy()  # (3 D, D)
    np.testing.assert_array_equal(read["blocks"]["key"]["kernel"][1].T[14:28], fused[42 + 14 : 42 + 28])  # head 1


def test_tokenizer_goes_with_the_model(tmp_path: Path) -> None:
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "words.json"))
    save(tmp_path / "run", LEARNED, 0, meta={"data": {"tokenizer": str(tmp_path / "words.json")}})
    export(str(tmp_path / "run"), tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("b a a")["input_ids"] == [1, 0, 0]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 3)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 3


def test_deeper_model_repeats_blocks(tmp_path: Path) -> None:
    save(tmp_path / "run", LEARNED, 0)
    export(str(tmp_path / "run"), tmp_path / "hf")
    expected = {6: [0, 0, 1, 1, 2, 2], 4: [0, 1, 2, 2], 9: [0, 0, 0, 1, 1, 1, 2, 2, 2]}
    for place in ("run", "hf"):
        for blocks, order in expected.items():
            model = model_of(dataclasses.replace(LEARNED, N=blocks))
            grown = whole(warm_start(str(tmp_path / place), model), model)
            for name in ("query", "mlp_out"):
                before = params(LEARNED)["blocks"][name]["kernel"]
                np.testing.assert_array_equal(grown["blocks"][name]["kernel"], before[np.array(order)])
            np.testing.assert_array_equal(grown["positions"]["table"], params(LEARNED)["positions"]["table"])
    assert repeated_blocks(6, 8, "") == [0, 1, 2, 2, 3, 4, 5, 5]


def test_average_is_the_mean_of_the_steps_and_a_run_of_its_own(tmp_path: Path) -> None:
    meta = {"data": {"tokenizer": "bytes", "bucket_path": "elsewhere", "checkpoint_directory": "there"}}
    save(tmp_path / "run", ALIBI, 2, 5, 6, meta=meta)
    assert average(str(tmp_path / "run"), tmp_path / "two", [6, 2]) == [2, 6]
    assert average(str(tmp_path / "run"), tmp_path / "all") == [2, 5, 6]
    model = model_of(ALIBI)
    for name, seeds in (("two", (2, 6)), ("all", (2, 5, 6))):
        got = whole(warm_start(str(tmp_path / name), model), model)
        expected = jax.tree.map(lambda *xs: np.mean(xs, axis=0, dtype=np.float64), *(params(ALIBI, s) for s in seeds))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    export(str(tmp_path / "two"), tmp_path / "hf")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"embedding_dim": 45}, r"leaf params/\S+: holds .*42.*, this run expects .*45"),
        ({"num_head": 6}, "num_head is 3, this run expects 6"),
        ({"norm_epsilon": 1e-6}, "norm_epsilon is 0.0001, this run expects 1e-06"),
        ({"N": 2}, "N=3 blocks do not grow to N=2, only to a multiple or to 4/3 of 3"),
        ({"N": 5}, "N=3 blocks do not grow to N=5"),
        ({"block_size": 256}, r"leaf params/positions/table: holds \(128, 42\), this run expects \(256, 42\)"),
        ({"alibi_attn": True}, "leaf params/positions/table: holds .*, this run expects nothing"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_are_refused_in_a_line(change: dict[str, Any], line: str, tmp_path: Path) -> None:
    save(tmp_path, LEARNED, 1)
    with pytest.raises(UserError, match=line) as caught:
        warm_start(str(tmp_path), model_of(dataclasses.replace(LEARNED, **change)))
    assert str(caught.value).startswith(str(tmp_path)) or str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"vocab_size": 128}, r"tensor wte.weight: holds \(101, 42\), leaf vocabulary/table expects \(128, 42\)"),
        ({"block_size": 256}, r"tensor wpe.weight: holds \(128, 42\), leaf positions/table expects \(256, 42\)"),
        ({"embedding_dim": 45}, r"tensor h.0.attn.c_proj.bias: holds \(42,\), leaf \S+ expects \(45,\)"),
        ({"num_head": 6}, "num_head is 3, this run expects 6"),
        ({"alibi_attn": True}, "tensor wpe.weight: this model has no leaf for it"),
        ({"embedding_norm": True}, "gpt2 has nothing for leaf embedding_norm/"),
    ],
    ids=str,
)
def test_folder_that_does_not_fit_is_refused_in_a_line(
    change: dict[str, Any], line: str, tmp_path: Path, hf: Path
) -> None:
    with pytest.raises(UserError, match=line) as caught:
        warm_start(str(hf), model_of(dataclasses.replace(LEARNED, **change)))
    assert str(hf) in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exported")
    save(place / "run", LEARNED, 0)
    export(str(place / "run"), place / "hf")
    return place / "hf"


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("model_type", "llama", "model_type 'llama': expected one of 'gpt2', 'bloom'"),
        ("activation_function", "relu", "activation_function is 'relu', our model has 'gelu_new'"),
        ("tie_word_embeddings", False, "tie_word_embeddings is False"),
    ],
)
def test_another_architecture_is_refused_in_a_line(key: str, value: Any, line: str, hf: Path, tmp_path: Path) -> None:
    for name, data in contents(hf).items():
        (tmp_path / name).write_bytes(data)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {key: value}))
    with pytest.raises(UserError, match=line):
        warm_start(str(tmp_path), model_of(LEARNED))


def test_broken_folders_are_refused_in_a_line(hf: Path, tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(UserError) as caught:
            warm_start(str(tmp_path), model_of(LEARNED))
        return str(caught.value)

    assert "expected a run directory, a directory of checkpoints, or a Hugging Face folder" in refusal()
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not JSON" in refusal()
    (tmp_path / "config.json").write_bytes((hf / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    assert "model.safetensors is missing; weights are read from safetensors, and from nothing else" in refusal()
    (tmp_path / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:-7])
    assert "model.safetensors: not a safetensors file" in refusal()


def test_export_refuses_in_a_line(tmp_path: Path) -> None:
    save(tmp_path / "plain", dataclasses.replace(ALIBI, embedding_norm=False), 0)
    with pytest.raises(UserError, match="no architecture of transformers equals a model that has ALiBi without"):
        export(str(tmp_path / "plain"), tmp_path / "hf")
    save(tmp_path / "run", LEARNED, 3, 4)
    with pytest.raises(UserError, match=r"run: no step 5; there are 3, 4"):
        export(str(tmp_path / "run"), tmp_path / "hf", 5)
    assert not (tmp_path / "hf").exists()
    (tmp_path / "hf").mkdir()
    with pytest.raises(UserError, match="hf is there already; nothing is overwritten"):
        export(str(tmp_path / "run"), tmp_path / "hf")
    assert contents(tmp_path / "hf") == {}
