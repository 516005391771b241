"""Text to tokens and back: bytes without any file, or a Hugging Face `tokenizers` file by path."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from zero.runtime import UserError

if TYPE_CHECKING:
    import tokenizers

# How published tokenizers call the token between two documents, most specific first.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """What the rest asks of a tokenizer. Ids are below `vocab_size`; `end_of_text` stands between two documents."""

    name: str  # tells two tokenizers apart: "bytes", or file name and hash
    vocab_size: int
    end_of_text: int

    def encode(self, text: str) -> np.ndarray:
        """A 1-D array of ids. `end_of_text` is never among them, whatever the text says."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text for any ids: broken UTF-8 becomes U+FFFD, `end_of_text` and ids that mean nothing are left out."""
        ...

    def byte_lengths(self) -> np.ndarray:
        """How many bytes of text each id stands for, int64 `(vocab_size,)`; 0 for `end_of_text`."""
        ...


class ByteTokenizer:
    """One token a byte of UTF-8. The NUL byte is the end of text; NULs inside a text are dropped.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("zéro").tolist()
    [122, 195, 169, 114, 111]
    >>> tokenizer.decode([122, 195, 0, 111])
    'z\ufffdo'
    """

    name = "bytes"
    vocab_size = 256
    end_of_text = 0

    def encode(self, text: str) -> np.ndarray:
        # JSON can hold lone surrogates, which strict UTF-8 refuses; nothing of a document should be lost.
        return np.frombuffer(text.encode("utf-8", "surrogatepass").replace(b"\0", b""), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 < i < 256).decode("utf-8", "replace")

    def byte_lengths(self) -> np.ndarray:
        return np.where(np.arange(256) == self.end_of_text, 0, 1)


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, read from its .json file."""

    def __init__(self, path: Path):
        import tokenizers  # only who names a file pays for it

        data = path.read_bytes()
        self.name = f"{path.name} sha256:{hashlib.sha256(data).hexdigest()[:16]}"
        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # for a bad file the library raises a bare Exception and nothing narrower
            raise UserError(f"tokenizer {path} is not a file of the tokenizers library: {error}") from error
        # A text that says "<|endoftext|>" must not end a document.
        self._tokenizer.encode_special_tokens = True
        # Files may leave holes between the ids of their added tokens: the count of tokens would be too small.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        ids = [self._tokenizer.token_to_id(name) for name in _END_OF_TEXT]
        found = next((i for i in ids if i is not None), None)
        if found is None:
            raise UserError(
                f"tokenizer {path} has no token that ends a text: expected one of {', '.join(_END_OF_TEXT)}"
            )
        self.end_of_text: int = found

    def encode(self, text: str) -> np.ndarray:
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot cross into Rust
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size and i != self.end_of_text]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def byte_lengths(self) -> np.ndarray:
        """By the vocabulary's spelling: a character a byte (byte-level), `▁` for a blank, `<0x0A>` for a byte."""
        is_byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in special:
                continue
            spelled = re.sub(r"^<0x[0-9A-F]{2}>$", "?", token).replace("▁", " ")
            lengths[i] = len(token) if is_byte_level else len(spelled.encode())
        return lengths


def load_tokenizer(name: str) -> Tokenizer:
    """`"bytes"`, or the path of a Hugging Face `tokenizers` .json file.

    Raises UserError where no such file stands or it cannot be used.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if not path.is_file():
        raise UserError(f'tokenizer {name}: no such file; expected "bytes" or the path of a tokenizers .json file')
    return FileTokenizer(path)
