"""Text to tokens and back: bytes, or a file of Hugging Face's `tokenizers`, which can be trained or converted here."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from zero.base.errors import UserError
from zero.base.keys import key, not_empty
from zero.corpus.text import sentencepiece_model, tiktoken_file
from zero.corpus.text.chat_template import template_text
from zero.corpus.text.pieces import byte_spellings
from zero.corpus.text.sentencepiece_library import SentencePiece
from zero.corpus.text.special_tokens import (
    COMPANIONS,
    MODEL_CONFIG,
    SpecialTokens,
    TokenizerFiles,
    Vocabulary,
    read_special_tokens,
)
from zero.files import storage
from zero.files.parsing import reading

if TYPE_CHECKING:
    import tokenizers

MOST_TOKENS = 1 << 24  # of a vocabulary: tables of a number for each token fit into memory
BYTES_END_OF_TEXT = "<|endoftext|>"  # of bytes, in a file
# Spellings of an end of text, for a tokenizer without files that name its own.
_END_OF_TEXT = (BYTES_END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[SEP]")


@dataclass(frozen=True)
class TokenizerKeys:
    """The key of the tokenizer, in section `data`."""

    tokenizer: str = key(
        "bytes",
        not_empty(),
        "bytes, or the path of a tokenizer.json (Hugging Face), a SentencePiece .model or a .tiktoken file.",
    )


OF_GENERATION = (
    "ends",
    "answer_end",
    "first",
    "turn_ends",
    "separators",
)  # fields of `SpecialTokens` that no text and no prompt depends on

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The interface of all tokenizers. Ids are below `vocab_size`; `end_of_text` separates two documents."""

    name: str  # "bytes", or file name and hash
    vocab_size: int
    special: SpecialTokens
    added_tokens: Mapping[int, Mapping[str, Any]]  # tokens that only the files beside it list: id, spelling and options

    @property
    def end_of_text(self) -> int:
        """That of `special`."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """A 1-D array of ids. No special token is among them, even if the text spells it."""
        ...

    def encode_whole(self, text: str, adds_begin: bool = True) -> np.ndarray:
        """A text as transformers encodes it: spelled special tokens become tokens, and it has its beginning, once.

        Without `adds_begin`, nothing is put before or behind it.
        """
        ...

    def encode_with_spans(self, text: str, has_special: bool) -> tuple[np.ndarray, np.ndarray]:
        """Ids (n,), and (n, 2) the number of characters of the text before each and up to its end.

        With `has_special`, the spelling of a special token becomes that token, `end_of_text` included.
        """
        ...

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text for any ids: invalid UTF-8 becomes U+FFFD, unknown ids are left out.

        Special tokens are spelled, as far as they have a spelling; with `skip_special` they are left out.
        """
        ...

    def byte_lengths(self) -> np.ndarray:
        """The number of bytes of text per id, int64 `(vocab_size,)`; 0 for special tokens."""
        ...


def encode_prompt(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The tokens after which a model continues a text, at least one, int32.

    As transformers encodes it where the tokenizer was brought; else after an end of text, as the documents of a corpus.
    """
    special = tokenizer.special
    ids = tokenizer.encode_whole(text) if special.is_brought else tokenizer.encode(text)
    if not special.is_brought:
        ids = np.append(special.end_of_text, ids)
    elif not len(ids):
        ids = np.asarray([special.first])
    return ids.astype(np.int32)


def is_same_tokenizer(one: str, other: str) -> bool:
    """Whether two names of tokenizers are of the same one: they end in a digest of the file, which may have moved.

    >>> is_same_tokenizer("a.json sha256:04", "copy.json sha256:04"), is_same_tokenizer("bytes", "a.json sha256:04")
    (True, False)
    """
    return one.rpartition(":")[2] == other.rpartition(":")[2]


class TokenizerIdentity(NamedTuple):
    """What identifies a tokenizer in a checkpoint, as JSON holds it; None before a run has begun.

    Attributes:
      name: with a digest of its file.
      beside: what the files beside it decide: fields of `SpecialTokens`, and "added_tokens".
    """

    name: str | None
    beside: dict[str, Any] | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerIdentity:
        beside = asdict(tokenizer.special) | {"added_tokens": dict(tokenizer.added_tokens)}
        del beside["contradictions"]  # sentences for readers
        return cls(tokenizer.name, json.loads(json.dumps(beside)))

    def check(self, origin: str, tokenizer: Tokenizer, is_resumed: bool = False) -> None:
        """Raises UserError if this, of a checkpoint, belongs to another tokenizer, or to other files beside it.

        Where a generated text begins and stops may differ, except for a run that is resumed, which writes samples.
        """
        if self.name is not None and not is_same_tokenizer(self.name, tokenizer.name):
            raise UserError(
                f"data.tokenizer: {origin} was trained with tokenizer {self.name}, but this is {tokenizer.name}; "
                "expected a copy of that file, at any path"
            )
        now = TokenizerIdentity.of(tokenizer).beside
        if self.beside is None or now is None:
            return
        keys = [key for key in now if is_resumed or key not in OF_GENERATION]
        changed = [key for key in keys if self.beside.get(key) != now[key]]
        if changed:
            before = ", ".join(f"{key}={self.beside.get(key)}" for key in changed)
            after = ", ".join(f"{key}={now[key]}" for key in changed)
            raise UserError(
                f"data.tokenizer: {origin} was trained with {before}, and the files beside {tokenizer.name} say "
                f"{after}; expected the files from the start of the run, of {', '.join((*COMPANIONS, MODEL_CONFIG))}"
            )


class ByteTokenizer:
    """One token per byte of UTF-8. The NUL byte is the end of text; NULs inside a text are dropped.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("zéro").tolist()
    [122, 195, 169, 114, 111]
    >>> tokenizer.decode([122, 195, 0, 111])
    'z\ufffdo'
    """

    name = "bytes"
    vocab_size = 256
    end_of_text = 0
    added_tokens: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    special = SpecialTokens(end_of_text=0, eos=0, answer_end=0, ends=(0,), first=0, separators=((0,), ()))

    def encode(self, text: str) -> np.ndarray:
        # JSON can hold lone surrogates, which strict UTF-8 refuses; nothing of a document should be lost.
        return np.frombuffer(text.encode("utf-8", "surrogatepass").replace(b"\0", b""), np.uint8)

    def encode_whole(self, text: str, adds_begin: bool = True) -> np.ndarray:
        return self.encode(text)

    def encode_with_spans(self, text: str, has_special: bool) -> tuple[np.ndarray, np.ndarray]:
        starts = np.asarray([i for i, character in enumerate(text) for _ in self.encode(character)], np.int64)
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        return bytes(i for i in map(int, ids) if 0 < i < 256).decode("utf-8", "replace")

    def byte_lengths(self) -> np.ndarray:
        return np.where(np.arange(256) == self.end_of_text, 0, 1)


def bytes_as_file() -> bytes:
    """`ByteTokenizer` as a file of Hugging Face's `tokenizers`; the end of text is `BYTES_END_OF_TEXT`."""
    names = byte_spellings()
    end = ByteTokenizer.end_of_text
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    names[end] = BYTES_END_OF_TEXT  # a NUL inside a text is unknown, and dropped
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": end, "content": BYTES_END_OF_TEXT, **flags, "special": True}],
        "pre_tokenizer": {**level, "use_regex": False},
        "decoder": {**level, "use_regex": False},
        "model": {"type": "BPE", "vocab": {name: byte for byte, name in names.items()}, "merges": []},
    }
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from the bytes of its .json file and the files beside it."""

    def __init__(self, path: str, data: bytes, files: TokenizerFiles | None = None):
        import tokenizers  # the import takes long, and bytes do not need it

        self.path = path
        self.data = data
        self.name = f"{Path(path).name} sha256:{hashlib.sha256(data).hexdigest()[:16]}"
        # For a bad file the library raises a bare Exception and nothing narrower.
        with reading(f"tokenizer {path} is not a file of the tokenizers library", Exception):
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(data)
        # Those of the file would cut a text silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.files = TokenizerFiles.from_folder(storage.parent(path)) if files is None else files
        self.added_tokens: Mapping[int, Mapping[str, Any]] = self._add_tokens()
        # A text that contains "<|endoftext|>" must not end a document.
        self._tokenizer.encode_special_tokens = True
        # Files may leave holes between the ids of their added tokens: the count of tokens would be too small.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size > MOST_TOKENS:
            raise UserError(f"tokenizer {path}: its highest id is {self.vocab_size - 1}; expected less than 2**24")
        vocabulary = Vocabulary(
            path,
            self._tokenizer.token_to_id,
            self._tokenizer.id_to_token,
            self.vocab_size,
            self._special(),
            *self._around(),
            self._ends_by_spelling(),
        )
        self.special = read_special_tokens(vocabulary, self.files, template_text(self.files))

    @property
    def end_of_text(self) -> int:
        return self.special.end_of_text

    def spelling(self, token: int) -> str:
        """The name of a token in the vocabulary."""
        name = self._tokenizer.id_to_token(token)
        assert name is not None
        return name

    def _add_tokens(self) -> dict[int, dict[str, Any]]:
        """Adds the tokens that only files beside the tokenizer list, as transformers does."""
        import tokenizers

        added = {}
        for number, options in self.files.added_tokens.items():
            with reading(f"{self.files.folder}: token {number} of added_tokens_decoder has an unexpected form"):
                token = tokenizers.AddedToken(**options)
            if self._tokenizer.token_to_id(token.content) is None:
                self._tokenizer.add_tokens([token])
                if self._tokenizer.token_to_id(token.content) != number:
                    raise UserError(
                        f"{self.files.folder}: added_tokens_decoder has {token.content!r} as token {number}, and the "
                        f"tokenizer would add it as {self._tokenizer.token_to_id(token.content)}"
                    )
                added[number] = options
        return added

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the post-processor puts before a text, and behind it."""
        with reading(f"tokenizer {self.path} cannot encode a text", Exception):
            encoding = self._tokenizer.encode("a", add_special_tokens=True)
        is_added = np.asarray(encoding.special_tokens_mask, bool)
        text = np.flatnonzero(~is_added)
        first, last = (text[0], text[-1] + 1) if len(text) else (len(is_added), len(is_added))
        return tuple(encoding.ids[:first]), tuple(encoding.ids[last:])

    def _special(self) -> set[int]:
        return {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}

    def _ends_by_spelling(self) -> list[int]:
        """Tokens spelled like an end of text; only the special ones, if there are any."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        known = [ids[name] for name in _END_OF_TEXT if name in ids]
        special = self._special()
        return [i for i in known if i in special or special.isdisjoint(known)]

    def __reduce__(self) -> tuple[type[FileTokenizer], tuple[str, bytes, TokenizerFiles]]:
        # For worker processes: the library's own copy loses encode_special_tokens.
        return FileTokenizer, (self.path, self.data, self.files)

    def encode(self, text: str) -> np.ndarray:
        # The fast one leaves out the offsets of each token, and takes two thirds of the time.
        with reading(f"tokenizer {self.path} cannot encode a text", Exception):
            (encoding,) = self._tokenizer.encode_batch_fast([_without_surrogates(text)], add_special_tokens=False)
        return np.asarray(encoding.ids, np.uint32)

    def encode_whole(self, text: str, adds_begin: bool = True) -> np.ndarray:
        ids = self._encoding(text, has_special=True).ids
        if adds_begin:
            before = list(self.special.before)
            has_before = len(before) > 0 and ids[: len(before)] == before  # the text spells it
            ids = [*([] if has_before else before), *ids, *self.special.after]
        return np.asarray(ids, np.uint32)

    def _encoding(self, text: str, has_special: bool) -> tokenizers.Encoding:
        self._tokenizer.encode_special_tokens = not has_special
        try:
            with reading(f"tokenizer {self.path} cannot encode a text", Exception):
                return self._tokenizer.encode(_without_surrogates(text), add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode_with_spans(self, text: str, has_special: bool) -> tuple[np.ndarray, np.ndarray]:
        encoding = self._encoding(text, has_special)
        return np.asarray(encoding.ids, np.uint32), np.asarray(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special)

    def byte_lengths(self) -> np.ndarray:
        """The length of each token's spelling: a character per byte (byte-level), `▁` a blank, `<0x0A>` a byte."""
        is_byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        special = self._special()
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in special:
                continue
            spelled = re.sub(r"^<0x[0-9A-F]{2}>$", "?", token).replace("▁", " ")
            lengths[i] = len(token) if is_byte_level else len(spelled.encode())
        return lengths


class SentencePieceTokenizer(FileTokenizer):
    """Encodes documents with the sentencepiece library; everything else comes from the converted file.

    The file is stored with a corpus.

    Raises:
      UserError: the library is missing, it is not such a model, or one that cannot be converted.
    """

    def __init__(self, path: str, model: bytes, files: TokenizerFiles | None = None):
        self._model = model
        self._library = SentencePiece(path, model)
        files = TokenizerFiles.from_folder(storage.parent(path)) if files is None else files
        # A .model has no post-processor: here, and only here, transformers takes what tokenizer_config.json says.
        added = {
            kind: files.names.get(f"{kind}_token") if files.tokenizer.get(f"add_{kind}_token") else None
            for kind in ("bos", "eos")
        }
        is_llamas = str(files.tokenizer.get("tokenizer_class")).startswith("LlamaTokenizer")
        once = not files.tokenizer.get("legacy", not is_llamas)
        data = sentencepiece_model.converted(path, self._library.proto, prefixes_once=once)
        super().__init__(path, sentencepiece_model.with_ends(data, added["bos"], added["eos"]), files)

    def __reduce__(self) -> tuple[type[FileTokenizer], tuple[str, bytes, TokenizerFiles]]:
        return SentencePieceTokenizer, (self.path, self._model, self.files)

    def _ends_by_spelling(self) -> list[int]:
        end = int(self._library.proto.trainer_spec.eos_id)
        return [end] if end >= 0 else super()._ends_by_spelling()

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._library.encode(_without_surrogates(text)), np.uint32)


def _without_surrogates(text: str) -> str:
    """The text with a question mark for each lone surrogate, which cannot cross into Rust."""
    return text.encode("utf-8", "replace").decode("utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """The .json file of a byte-level BPE tokenizer (GPT-2's kind) with at most `vocab_size` tokens.

    The 256 bytes are among them, so that any text can be encoded, and <|endoftext|>, which is token 0. The same texts
    give the same file. Raises UserError if the vocabulary is too small for that.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size <= 256:
        raise UserError(f"a tokenizer of {vocab_size} tokens cannot be trained: 256 bytes and the end of text need 257")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_without_surrogates, texts), trainer)
    return tokenizer.to_str(pretty=True).encode("utf-8")


def load_tokenizer(name: str) -> Tokenizer:
    """`"bytes"`, or the path or gs:// URL of a file: of the `tokenizers` library, SentencePiece (.model) or tiktoken.

    Raises UserError if there is no such file or it cannot be used.
    """
    if name == "bytes":
        return ByteTokenizer()
    try:
        # The last suffix that is known: Mistral's models are called tokenizer.model.v3.
        suffix = next((suffix for suffix in reversed(Path(name).suffixes) if suffix in _FORMATS), ".json")
        tokenizer = _FORMATS[suffix](name, storage.read_bytes(name))
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(
            f'tokenizer {name}: no such file; expected "bytes" or the path of a tokenizers .json file, a SentencePiece '
            ".model or a .tiktoken file"
        ) from None
    for contradiction in tokenizer.special.contradictions:
        _warn_once(f"tokenizer {name}: {contradiction}, as in transformers")
    return tokenizer


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


_FORMATS: dict[str, Callable[[str, bytes], FileTokenizer]] = {
    ".json": FileTokenizer,
    ".model": SentencePieceTokenizer,
    ".tiktoken": lambda path, data: FileTokenizer(path, tiktoken_file.converted(path, data)),
}
