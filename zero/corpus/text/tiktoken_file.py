"""A .tiktoken file as a file of the `tokenizers` library, with the same ids.

The file holds only the tokens with their ranks. The pattern that cuts a text into words and the special tokens belong
to an encoding, which the name of the file gives: cl100k_base.tiktoken.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, NamedTuple

from zero.base.errors import UserError
from zero.corpus.text.pieces import byte_spellings, merges
from zero.files.parsing import reading


class _Encoding(NamedTuple):
    pattern: str
    special: dict[str, int]


# tiktoken's patterns in the syntax of Oniguruma, in which $ is the end of a line and {1,3}+ repeats {1,3}.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++\z|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++\z|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_END = "<|endoftext|>"
_MIDDLE = {"<|fim_prefix|>": 50281, "<|fim_middle|>": 50282, "<|fim_suffix|>": 50283}
ENCODINGS = {
    "gpt2": _Encoding(_GPT2, {_END: 50256}),
    "r50k_base": _Encoding(_GPT2, {_END: 50256}),
    "p50k_base": _Encoding(_GPT2, {_END: 50256}),
    "p50k_edit": _Encoding(_GPT2, {_END: 50256, **_MIDDLE}),
    "cl100k_base": _Encoding(
        _CL100K, {_END: 100257, **{name: i + 49977 for name, i in _MIDDLE.items()}, "<|endofprompt|>": 100276}
    ),
    "o200k_base": _Encoding(_O200K, {_END: 199999, "<|endofprompt|>": 200018}),
}


def converted(path: str, data: bytes) -> bytes:
    """The .json file of the tokens in a .tiktoken file, with the pattern and the special tokens of their encoding.

    Raises:
      UserError: its name is not a known encoding, or it does not contain the ranks of its tokens.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel, Split

    name = Path(path).stem
    if name not in ENCODINGS:
        raise UserError(
            f"tokenizer {path}: the name of the file determines the encoding; expected one of {', '.join(ENCODINGS)}, "
            "as in cl100k_base.tiktoken"
        )
    encoding = ENCODINGS[name]
    ranks = _ranks(path, data, encoding.special)
    spelling = byte_spellings()

    def spelled(token: bytes) -> str:
        return "".join(spelling[byte] for byte in token)

    tokens = {spelled(token): rank for token, rank in ranks.items()}
    # A word that is a token is taken whole, as in tiktoken.
    tokenizer = tokenizers.Tokenizer(models.BPE(tokens | encoding.special, list(merges(tokens)), ignore_merges=True))
    split: Any = Split(tokenizers.Regex(encoding.pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [tokenizers.AddedToken(token, special=True, normalized=False) for token in encoding.special]
    tokenizer.add_special_tokens(special)
    return tokenizer.to_str(pretty=True).encode()


def _ranks(path: str, data: bytes, special: dict[str, int]) -> dict[bytes, int]:
    """Each token of the file, and its rank, which is its id."""
    ranks: dict[bytes, int] = {}
    lines = [line for line in data.splitlines() if line]
    for number, line in enumerate(lines, 1):
        with reading(f"tokenizer {path}, line {number}: expected a token in base64 and its rank"):
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    used = {*ranks.values()}
    twice = len(used) < len(lines) or used & {*special.values()}
    if missing or twice or min(used) < 0:
        mistake = f"no token for byte {missing[0]}" if missing else "two tokens of one rank, or a negative one"
        raise UserError(f"tokenizer {path} has {mistake}; each token needs a unique rank, and all 256 bytes a token")
    return ranks
