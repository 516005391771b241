"""Tokenizers: what was encoded is decoded, and nothing that a model generates makes them raise."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from zero.base.errors import UserError
from zero.corpus.text.tokenizers import FileTokenizer, Tokenizer, TokenizerIdentity, load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat. " * 20], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "bpe.json"
    tokenizer.save(str(path))
    return path


@given(st.text())
def test_bytes_round_trip_without_nul(text: str):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.replace("\0", "")
    assert tokenizer.end_of_text not in ids


@given(st.lists(st.integers(-1, 70_000)))
def test_any_ids_decode(ids: list[int]):
    assert isinstance(load_tokenizer("bytes").decode(np.array(ids, np.int64)), str)


def test_lone_surrogates_of_json_are_encoded(bpe_file: Path):
    assert load_tokenizer("bytes").encode("a\ud800").tolist() == [97, 0xED, 0xA0, 0x80]
    assert load_tokenizer(str(bpe_file)).decode(load_tokenizer(str(bpe_file)).encode("a\ud800")) == "a?"


def test_file_tokenizer(bpe_file: Path):
    tokenizer = load_tokenizer(str(bpe_file))
    text = "the cat é — <|endoftext|> sat"
    ids = tokenizer.encode(text)
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.end_of_text == 1 and 1 not in ids  # the text only talks about it
    assert len(ids) < len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 1, -1, 10**6]) == text + "<|endoftext|>"
    assert tokenizer.decode([*ids, 1, -1, 10**6], skip_special=True) == text
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("é")[:1])


def test_vocabulary_counts_holes(bpe_file: Path, tmp_path: Path):
    text = (
        bpe_file.read_text().replace('"id": 1,', '"id": 1000,').replace('"<|endoftext|>": 1,', '"<|endoftext|>": 1000,')
    )
    (tmp_path / "holes.json").write_text(text)
    tokenizer = load_tokenizer(str(tmp_path / "holes.json"))
    assert tokenizer.end_of_text == 1000 and tokenizer.vocab_size == 1001


def test_names_tell_tokenizers_apart(bpe_file: Path, tmp_path: Path):
    other = tmp_path / bpe_file.name
    other.write_text(bpe_file.read_text() + "\n")
    names = {load_tokenizer(str(path)).name for path in ("bytes", bpe_file, other)}
    assert len(names) == 3


def test_bad_files_are_refused(bpe_file: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"nowhere\.json: no such file"):
        load_tokenizer("nowhere.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"bad\.json is not a file of the tokenizers library"):
        load_tokenizer(str(tmp_path / "bad.json"))
    (tmp_path / "endless.json").write_text(bpe_file.read_text().replace("<|endoftext|>", "<other>"))
    with pytest.raises(UserError, match=r"endless\.json has no token that ends a text; expected"):
        load_tokenizer(str(tmp_path / "endless.json"))


def test_training_depends_on_the_texts_alone():
    texts = [f"{i} gathers and {i * i} shards, zéro\n" for i in range(3000)]
    data = train_tokenizer(texts, 600)
    program = "import sys; from zero.corpus.text.tokenizers import train_tokenizer; " + (
        "texts = [f'{i} gathers and {i * i} shards, zéro\\n' for i in range(3000)]; "
        "sys.stdout.buffer.write(train_tokenizer(texts, 600))"
    )
    for threads in ("1", "3"):
        other = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        again = subprocess.run([sys.executable, "-c", program], env=other, stdout=subprocess.PIPE, check=True)
        assert again.stdout == data
    tokenizer = FileTokenizer("bpe.json", data)
    assert tokenizer.vocab_size == 600 and len(tokenizer.encode(texts[7])) < len(texts[7]) / 2


@given(st.text())
def test_a_trained_tokenizer_writes_any_text(text: str):
    tokenizer = FileTokenizer("bpe.json", train_tokenizer(["some words"], 257))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_endless_template_after_a_profiler() -> None:
    """A template that never ends is stopped, also where the process ignores the signal that stops it.

    In a process of its own: a timer of a profiler may still run in this one, and the signal's default action ends it.
    """
    program = """
import signal
from zero.base.errors import UserError
from zero.corpus.text.chat_template import ChatTemplate
signal.signal(signal.SIGPROF, signal.SIG_IGN)
text = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
try:
    ChatTemplate("template", text, ()).render([], add_generation_prompt=False)
except UserError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "it takes too long" in ended.stdout, ended.stderr


@given(st.just(0.3))
def test_slow_example(seconds: float):
    """An example has no deadline (tests/conftest.py): Hypothesis' own of 0.2 s fails on a busy machine."""
    time.sleep(seconds)


@pytest.mark.parametrize(
    ("name", "content", "changed"),
    [
        ("tokenizer_config.json", None, "(first=0, )?begin=0, and the files beside bpe.json .* say .*begin=None"),
        ("tokenizer_config.json", {"eos_token": "a", "bos_token": "<pad>"}, "end_of_text=1, .* say end_of_text="),
        ("generation_config.json", {"eos_token_id": [1, 5]}, r"ends=\[1, 2\], .* say ends=\[1, 5\]"),
        ("added_tokens.json", None, r"added_tokens=\{'270': .*'content': '<new>'.* say added_tokens=\{\}"),
    ],
)
def test_files_beside_a_tokenizer_belong_to_its_identity(
    name: str, content: dict[str, Any] | None, changed: str, bpe_file: Path, tmp_path: Path
):
    """Those that another path has too are the same tokenizer; one that is missing there, or another one, is named."""
    files = {
        "bpe.json": bpe_file.read_text(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>", "bos_token": "<pad>"}),
        "generation_config.json": json.dumps({"eos_token_id": [1, 2], "temperature": 1}),
        "added_tokens.json": json.dumps({"<new>": 270}),
    }

    def written(folder: str, replaced: dict[str, str | None]) -> Tokenizer:
        (tmp_path / folder).mkdir()
        for file, text in (files | replaced).items():
            if text is not None:
                (tmp_path / folder / file).write_text(text)
        return load_tokenizer(str(tmp_path / folder / "bpe.json"))

    recorded = TokenizerIdentity(*json.loads(json.dumps(TokenizerIdentity.of(written("first", {})))))
    same = written("same", {"generation_config.json": json.dumps({"eos_token_id": [1, 2], "temperature": 0.5})})
    recorded.check("step 3", same, is_resumed=True)
    other = written("other", {name: None if content is None else json.dumps(content)})
    with pytest.raises(UserError, match=rf"^data\.tokenizer: step 3 was trained with {changed}"):
        recorded.check("step 3", other, is_resumed=True)
    if name == "generation_config.json":  # where a text stops, a run that is sampled is free to change
        recorded.check("step 3", other)
    else:
        with pytest.raises(UserError, match=changed):
            recorded.check("step 3", other)
