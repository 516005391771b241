"""Verifying: every difference from the manifest is named."""

import re
from pathlib import Path

import pytest

from tests.helpers.corpora import call, make
from zero.base.errors import UserError
from zero.corpus.format.manifest import check_tokenizer
from zero.corpus.preparing.verify import verify
from zero.corpus.text.tokenizers import ByteTokenizer, load_tokenizer


def test_verify_names_what_differs(folder: Path, tmp_path: Path, bpe: Path):
    corpus = make(folder, tmp_path, tokenizer=load_tokenizer(str(bpe)))
    place = Path(corpus.directory)
    for good in (corpus.directory, corpus.train_index, corpus.validation_index):
        assert verify(good, load_tokenizer(str(bpe))) == []
    done = call(corpus.train_index, "--verify")
    assert done.returncode == 0 and "matches its manifest" in done.stdout

    assert [line.rpartition(" was prepared ")[2] for line in verify(corpus.directory, ByteTokenizer())] == [
        f"with tokenizer {load_tokenizer(str(bpe)).name}, not bytes"
    ]
    shards = sorted(place.glob("train-*.tar"))
    data = bytearray(shards[1].read_bytes())
    data[700] ^= 1
    shards[1].write_bytes(data)
    shards[2].unlink()
    shards[0].write_bytes(shards[0].read_bytes()[:-512])
    (place / "train-99999.tar").write_bytes(b"")
    (place / "tokenizer.json").write_text((place / "tokenizer.json").read_text() + " ")
    Path(corpus.train_index).write_text(Path(corpus.train_index).read_text().replace("00003.tar # 8", "00003.tar # 7"))
    done = call(corpus.train_index, "--verify")
    assert done.returncode == 1 and done.stderr == ""
    expected = [
        r"c_train.index does not list the shards of",
        r"train-99999.tar is not in the manifest",
        r"train-00000.tar has \d+ bytes; expected \d+",
        r"train-00001.tar does not match its checksum",
        r"train-00002.tar is missing",
        r"tokenizer.json is not the tokenizer of this corpus",
    ]
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.search(pattern, line)


def test_verify_of_what_is_no_corpus(folder: Path, tmp_path: Path):
    for name in ("nowhere", "nowhere_train.index"):
        with pytest.raises(UserError, match=rf"{name}.*: no such file; expected a corpus made by"):
            verify(str(tmp_path / name))
    place = tmp_path / "corpus" / "c"
    place.mkdir(parents=True)
    for foreign in ("{", "[]", "{}", '{"train": {"shards": 3}, "validation": {"shards": 1}}'):
        (place / "manifest.json").write_text(foreign)
        for use in (lambda: verify(str(place)), lambda: make(folder, tmp_path, overwrite=True)):
            with pytest.raises(UserError, match=r"manifest\.json is not a manifest that this version can read"):
                use()


def test_tokenizer_in_the_manifest(folder: Path, tmp_path: Path, bpe: Path):
    """The tokenizer of a corpus is read from its manifest."""
    corpus = make(folder, tmp_path, tokenizer=load_tokenizer(str(bpe)))
    copy = tmp_path / "another_name.json"
    copy.write_bytes(bpe.read_bytes())
    check_tokenizer(corpus.directory, load_tokenizer(str(copy)))
    with pytest.raises(UserError, match=r"was prepared with tokenizer bpe\.json sha256:\w+, not bytes"):
        check_tokenizer(corpus.directory, ByteTokenizer())
    Path(corpus.directory, "manifest.json").unlink()  # as in shards of another program
    check_tokenizer(corpus.directory, ByteTokenizer())
