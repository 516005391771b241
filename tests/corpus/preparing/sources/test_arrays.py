"""Arrays of tokens: how many bits each has, where the file does not say it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import WordLevel

from tests.helpers.corpora import call, make, tokens_of
from tests.helpers.sources import megatron
from zero.base.errors import UserError
from zero.corpus.text.tokenizers import Tokenizer, load_tokenizer

WIDE = 70_000
IDS = np.random.default_rng(0).integers(1, 256, 80)


@pytest.fixture(scope="module")
def wide_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One of 70,000 tokens, which 16 bits cannot number."""
    path = tmp_path_factory.mktemp("wide") / "tokenizer.json"
    vocabulary = {"</s>": 0, **{f"t{number}": number for number in range(1, WIDE)}}
    HFTokenizer(WordLevel(vocabulary, unk_token="</s>")).save(str(path))
    return load_tokenizer(str(path))


def tokens(corpus: Any, vocab_size: int) -> list[int]:
    indices = (corpus.train_index, corpus.validation_index)
    rows = np.concatenate([tokens_of(index, 16, vocab_size).ravel() for index in indices])
    return rows[rows > 0].tolist()


def test_wide_vocabularies_have_32_bits(tmp_path: Path, wide_tokenizer: Tokenizer) -> None:
    ids = np.random.default_rng(0).integers(1, WIDE, 80)
    (tmp_path / "a.bin").write_bytes(ids.astype("<u4").tobytes())
    assert tokens(make(tmp_path / "a.bin", tmp_path, tokenizer=wide_tokenizer), WIDE) == ids.tolist()
    with pytest.raises(UserError, match="--token-bits 16 cannot hold the ids of a vocabulary of more than 65,536"):
        make(tmp_path / "a.bin", tmp_path, tokenizer=wide_tokenizer, token_bits=16)
    (tmp_path / "b.bin").write_bytes(ids.astype("<u4").tobytes()[:-2])
    with pytest.raises(UserError, match=r"b\.bin has 318 bytes: expected tokens of 4 bytes each"):
        make(tmp_path / "b.bin", tmp_path, "b", tokenizer=wide_tokenizer)
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(UserError, match=r"c\.txt: --token-bits expects a \.bin without a header"):
        make(tmp_path / "c.txt", tmp_path, "c.txt", token_bits=32)


def test_narrow_tokens_of_32_bits_are_noticed(tmp_path: Path) -> None:
    """Every second number of 16 bits is 0; the error names the option, and its answer is recorded."""
    (tmp_path / "a.bin").write_bytes(IDS.astype("<u4").tobytes())
    places = ("--directory", tmp_path / "corpus", "--index-directory", tmp_path / "index", "--row-tokens", "16")
    done = call(tmp_path / "a.bin", *places)
    assert done.returncode == 2 and "so its tokens have 32 bits: --token-bits 32 reads them" in done.stderr
    assert call(tmp_path / "a.bin", *places, "--token-bits", "32").returncode == 0
    assert '"token_bits": 32' in (tmp_path / "corpus" / "a" / "manifest.json").read_text()
    assert (
        "was prepared with token_bits=32, not token_bits=16"
        in call(tmp_path / "a.bin", *places, "--token-bits", "16").stderr
    )
    wide = make(tmp_path / "a.bin", tmp_path, "wide", token_bits=32)
    assert tokens(wide, 256) == IDS.tolist()
    narrow = make(tmp_path / "a.bin", tmp_path, "narrow", token_bits=16)
    assert tokens(narrow, 256) == IDS.tolist() and narrow.train.tokens > 1.9 * wide.train.tokens


def test_16_bits_are_read_and_recorded_as_before(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(IDS.astype("<u2").tobytes())
    assert tokens(make(tmp_path / "a.bin", tmp_path), 256) == IDS.tolist()
    assert "token_bits" not in (tmp_path / "corpus" / "c" / "manifest.json").read_text()


def test_types_of_megatron(tmp_path: Path, wide_tokenizer: Tokenizer) -> None:
    """An index says the type of its tokens: 16 bits with a sign, and 32, under a vocabulary of 32 bits."""
    ids = np.random.default_rng(0).integers(1, 1 << 15, 80)
    for code, dtype in ((3, "<i2"), (4, "<i4"), (8, "<u2")):
        megatron(tmp_path / f"{code}", [half.astype(dtype) for half in np.split(ids, 4)], code)
        corpus = make(tmp_path / f"{code}.bin", tmp_path, f"c{code}", tokenizer=wide_tokenizer)
        assert sorted(tokens(corpus, WIDE)) == sorted(ids.tolist())
        assert corpus.train.documents + corpus.validation.documents == 4
