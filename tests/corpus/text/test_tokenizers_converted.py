"""SentencePiece models and tiktoken files give the ids of the libraries that own them, for any text."""

import base64
import io
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_train

from tests.helpers.corpora import make, tokens_of
from zero.base.errors import UserError
from zero.corpus.text.sentencepiece_library import SentencePiece
from zero.corpus.text.sentencepiece_model import converted
from zero.corpus.text.tiktoken_file import ENCODINGS
from zero.corpus.text.tokenizers import FileTokenizer, SentencePieceTokenizer, load_tokenizer

LINES = [
    f"{i} shards are gathered, {'0' * (i % 5)}{'  ' * (i % 3)}scattered: "
    f"1/2 < 0xABCDEF > in queue {i} k ababab zéro-{i}=={'_' * i}"
    for i in range(60)
]
# Spelled control symbols and bytes, blanks of all kinds, runs, letters outside the vocabulary and of several bytes.
PARTS = (
    """<s> </s> <unk> <0x0A> <|endoftext|> ▁ abab bab 00 000 __ 's 'LL 'ſ re é zéro ß ﬁ Ω 日本 한 ¼ ٣ gathered -1 123"""
)
BLANKS = [
    " ",
    "  ",
    " " * 7,
    " " * 15,
    "\n\n",
    " \n",
    "\t ",
    "e\u0301",
    "\r\n",
    *"\U0001f600\u200b\x85\xa0\u2028\u3000\r\n\t\0",
]
AWKWARD = st.lists(st.sampled_from(PARTS.split() + BLANKS) | st.text(max_size=3), max_size=12).map("".join)
KINDS: dict[str, dict[str, Any]] = {
    "BPE as Llama's": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "BPE with runs of blanks": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "BPE": {"model_type": "bpe", "normalization_rule_name": "identity", "add_dummy_prefix": False},
    "BPE without bytes": {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": False},
    "BPE of NFKC": {"model_type": "bpe"},
    "Unigram": {"model_type": "unigram", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "Unigram of NFKC": {"model_type": "unigram"},
}


def trained(**options: Any) -> bytes:
    """A small model of SentencePiece."""
    model = io.BytesIO()
    options = {
        "vocab_size": 360,
        "byte_fallback": True,
        "minloglevel": 2,
        "num_threads": 1,
        "character_coverage": 1.0,
    } | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=model, **options)
    return model.getvalue()


def changed(change: Callable[[Any], None], **options: Any) -> bytes:
    proto = SentencePiece("it.model", trained(**KINDS["BPE"] | options)).proto
    change(proto)
    return proto.SerializeToString()


def _add_runs(proto: Any) -> None:
    """Runs of blanks with one score, as in the models of Llama and Mistral; one length is missing there too."""
    blank = next(piece for piece in proto.pieces if piece.piece == "▁")
    for length in (2, 4, 8, 5, 6, 3, 9):
        if not any(piece.piece == "▁" * length for piece in proto.pieces):
            proto.pieces.add(piece="▁" * length, score=-1e9, type=blank.type)


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[FileTokenizer, Any]]:
    """The converted file of each kind, without the library's help, and the library with the same model."""
    found = {}
    for kind, options in KINDS.items():
        model = changed(_add_runs, **options) if "runs" in kind else trained(**options)
        library = sentencepiece.SentencePieceProcessor(model_proto=model)
        found[kind] = (FileTokenizer("it.json", converted("it.model", SentencePiece("it.model", model).proto)), library)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_converted_sentencepiece(kind: str, models: dict[str, tuple[FileTokenizer, Any]]) -> None:
    """Equal ids; of Unigram, whose scores the library adds in float32, at least a segmentation of the same score.

    The tables of NFKC are the exception: the tokenizers library applies them to a letter with its marks as one.
    """
    tokenizer, library = models[kind]
    assert tokenizer.vocab_size == library.vocab_size()

    @settings(max_examples=60, deadline=None)
    @given(AWKWARD)
    def check(text: str) -> None:
        if "NFKC" in kind:
            text = "".join(character for character in text if not is_joined(character))
        ours, theirs = tokenizer.encode(text).tolist(), library.encode(text)
        if "Unigram" in kind and ours != theirs:
            scores = [sum(map(library.get_score, ids)) for ids in (ours, theirs)]
            assert scores[0] == pytest.approx(scores[1], rel=1e-6)
        else:
            assert ours == theirs
        if library.unk_id() not in theirs:
            assert library.decode(theirs).lstrip() == tokenizer.decode(theirs).lstrip()

    check()


def is_joined(character: str) -> bool:
    """Whether a character may form one grapheme with its neighbors: marks, joiners, jamo of Hangul, \\r with \\n."""
    is_mark = unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf", "Lm")
    return is_mark or character == "\r" or "\u1100" <= character <= "\u11ff"


def library_encodings(ranks: dict[bytes, int]) -> dict[str, tiktoken.Encoding]:
    """The library's own encodings, with these ranks in place of those that it would download."""
    loaders: Any = dict.fromkeys(("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"), lambda *_, **__: ranks)
    with mock.patch.multiple(tiktoken_ext.openai_public, **loaders):
        made = {name: make() for name, make in tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS.items()}
    return {name: tiktoken.Encoding(**{**one, "explicit_n_vocab": None}) for name, one in made.items()}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Tokens of a small tiktoken encoding; one of them no sequence of joins leads to."""
    pattern = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
    found = bpe_train(data="\n".join(LINES), vocab_size=330, pat_str=pattern, visualise=None)
    return {**found, b" unjoined": len(found)}


def tiktoken_file(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@pytest.mark.parametrize("name", ["r50k_base", "p50k_edit", "cl100k_base", "o200k_base"])
def test_converted_tiktoken(name: str, ranks: dict[bytes, int], tmp_path: Path) -> None:
    """Equal ids for any text, with the library's own pattern and special tokens."""
    path = tmp_path / f"{name}.tiktoken"
    path.write_bytes(tiktoken_file(ranks))
    tokenizer, library = load_tokenizer(str(path)), library_encodings(ranks)[name]
    assert tokenizer.vocab_size == library.n_vocab and tokenizer.end_of_text == library.eot_token
    assert tokenizer.encode("an unjoined").tolist()[-1] == ranks[b" unjoined"]

    @settings(max_examples=60, deadline=None)
    @given(AWKWARD)
    def check(text: str) -> None:
        ids = library.encode_ordinary(text)
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.decode(ids) == text
        special, _ = tokenizer.encode_with_spans(text, has_special=True)
        assert special.tolist() == library.encode(text, allowed_special="all")

    check()


def test_named_encodings(ranks: dict[bytes, int]) -> None:
    """Names and special tokens are the library's."""
    for name, one in library_encodings(ranks).items():
        assert name == "o200k_harmony" or ENCODINGS[name].special == one._special_tokens


def test_corpus_of_a_model(tmp_path: Path) -> None:
    """zero-prepare with a model: the library's ids in the shards, whatever marks a text has; tokenizer.json beside."""
    model, documents = trained(**KINDS["Unigram of NFKC"]), [f"ﬁ\u0301 {line}" for line in LINES]
    (tmp_path / "it.model").write_bytes(model)
    (tmp_path / "text").mkdir()
    for i, text in enumerate(documents):
        (tmp_path / "text" / f"{i:02}.txt").write_text(text)
    tokenizer = load_tokenizer(str(tmp_path / "it.model"))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    corpus = make(tmp_path / "text", tmp_path, tokenizer=tokenizer, workers=2)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    found = np.concatenate([tokens_of(index, 16).ravel() for index in (corpus.train_index, corpus.validation_index)])
    found = found[found >= 0]
    ended = {tuple(part) for part in np.split(found, np.flatnonzero(found == tokenizer.end_of_text) + 1)} - {()}
    assert ended == {(*library.encode(text), tokenizer.end_of_text) for text in documents}
    kept = load_tokenizer(str(Path(corpus.directory, "tokenizer.json")))
    assert kept.name.rpartition(":")[2] == tokenizer.name.rpartition(":")[2]


def _same_score(proto: Any) -> None:
    proto.pieces[-1].score = -1.0
    for piece in proto.pieces:
        if len(piece.piece) == 2:
            piece.score = -1.0


UNCONVERTIBLE: dict[str, Callable[[], bytes]] = {
    "its type is CHAR; expected UNIGRAM or BPE": lambda: trained(model_type="char"),
    "it marks spaces differently": lambda: trained(**KINDS["BPE"], treat_whitespace_as_suffix=True),
    "it has unused pieces, such as 'z'": lambda: changed(
        lambda proto: setattr(next(p for p in proto.pieces if p.piece == "z"), "type", 5)
    ),
    "its symbol '%' is one character": lambda: trained(**KINDS["BPE"], user_defined_symbols=["%"]),
    "'z' is a character of some pieces, but not a piece": lambda: changed(
        lambda proto: setattr(next(p for p in proto.pieces if p.piece == "z"), "piece", "zzzz")
    ),
    "'.+' and '.+' have the same score": lambda: changed(_same_score),
    "is not a model of SentencePiece": lambda: b"\xff" * 99,
    "has no token that ends a text": lambda: trained(**KINDS["BPE"], eos_id=-1),
}


@pytest.mark.parametrize("message", UNCONVERTIBLE)
def test_unconvertible_models(message: str, tmp_path: Path) -> None:
    """What a file of the tokenizers library cannot express is refused by name."""
    (tmp_path / "it.model").write_bytes(UNCONVERTIBLE[message]())
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(str(tmp_path / "it.model"))
    assert str(tmp_path / "it.model") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("other", lambda data: data, "the name of the file determines the encoding; expected one of gpt2, "),
        ("gpt2", lambda data: data + b"YWI=\n", "line 332: expected a token in base64 and its rank"),
        ("gpt2", lambda data: b"?" + data, "line 1: expected a token in base64 and its rank"),
        ("gpt2", lambda data: data + b"YWJhYmFiYWI= 7\n", "two tokens of one rank"),
        ("gpt2", lambda data: data + b"YWJhYmFiYWI= 50256\n", "two tokens of one rank"),
        ("gpt2", lambda data: data.partition(b"\n")[2], "has no token for byte 0"),
        ("gpt2", lambda data: b"", "has no token for byte 0"),
    ],
)
def test_damaged_ranks(
    name: str, damage: Callable[[bytes], bytes], message: str, ranks: dict[bytes, int], tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.tiktoken"
    path.write_bytes(damage(tiktoken_file(ranks)))
    with pytest.raises(UserError, match=rf"{name}\.tiktoken.* {message}"):
        load_tokenizer(str(path))
