"""A SentencePiece .model as a file of the `tokenizers` library.

docs/decisions/preparing.md says which conversions are exact.
"""

from __future__ import annotations

from typing import Any

from zero.base.errors import UserError
from zero.corpus.text.pieces import merges
from zero.files.parsing import reading

_UNIGRAM, _BPE = 1, 2  # of the model type in sentencepiece_model.proto
_TYPES = {3: "WORD", 4: "CHAR"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of pieces
_BLANK = "▁"


def converted(path: str, proto: Any, *, prefixes_once: bool = False) -> bytes:
    """The .json file of a parsed model. Raises UserError, with `path`, for what such a file cannot express.

    A model that begins a text with a blank begins what follows a special token with one too, or with `prefixes_once`
    only the text, as transformers does without `legacy`.
    """
    with reading(f"tokenizer {path} is not a complete model of SentencePiece", Exception):
        return _converted(path, proto, prefixes_once)


def _converted(path: str, proto: Any, prefixes_once: bool) -> bytes:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    _check(path, proto)
    names = [piece.piece for piece in proto.pieces]
    spec = proto.trainer_spec
    normal = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    if spec.model_type == _BPE:
        pairs = list(merges({piece: -score for piece, score in normal.items()}))
        vocabulary = {name: i for i, name in enumerate(names)}
        unknown = names[spec.unk_id]
        made: Any = models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=spec.byte_fallback)
    else:
        # The library would find control symbols and bytes in a text that spells them: their characters score higher.
        longest = max(map(len, set(names) - set(normal)))
        hidden = (longest + 1) * min(normal.values()) - 1
        scores = [(name, normal.get(name, hidden)) for name in names]
        made = models.Unigram(scores, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)
    tokenizer = tokenizers.Tokenizer(made)
    prefixes_once = prefixes_once and proto.normalizer_spec.add_dummy_prefix
    tokenizer.normalizer = _normalizer(proto.normalizer_spec, prefixes=not prefixes_once)
    if prefixes_once:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_BLANK, prepend_scheme="first", split=False)
    parts: list[Any] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    special = [piece.piece for piece in proto.pieces if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in special])
    return tokenizer.to_str(pretty=True).encode()


def with_ends(data: bytes, before: str | None, after: str | None) -> bytes:
    """A .json file whose post-processor adds these tokens before and behind every text; None, or no token: nothing."""
    import tokenizers
    from tokenizers import processors

    tokenizer = tokenizers.Tokenizer.from_buffer(data)
    ids = {name: tokenizer.token_to_id(name) for name in (before, after) if name is not None}
    known = [(name, token) for name, token in ids.items() if token is not None]
    if not known:
        return data
    added = dict(known)
    first = f"{before}:0 " if before in added else ""
    last = f" {after}:0" if after in added else ""
    single = f"{first}$A:0{last}"
    pair = f"{single} {single.replace(':0', ':1').replace('$A', '$B')}"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=known)
    return tokenizer.to_str(pretty=True).encode()


def _check(path: str, proto: Any) -> None:
    """Raises UserError for a model whose ids a file of the tokenizers library cannot give."""
    objection = _objection(proto)
    if objection is not None:
        raise UserError(
            f"tokenizer {path} cannot be converted to a file of the tokenizers library: {objection}; use the "
            "tokenizer.json of the same model if its authors provide one"
        )


def _objection(proto: Any) -> str | None:
    """What the tokenizers library lacks that a model has; None for nothing."""
    spec = proto.trainer_spec
    if spec.model_type not in (_UNIGRAM, _BPE):
        return f"its type is {_TYPES.get(spec.model_type, spec.model_type)}; expected UNIGRAM or BPE"
    if spec.treat_whitespace_as_suffix or not proto.normalizer_spec.escape_whitespaces:
        return "it marks spaces differently from ▁ before a word"
    types = {piece.piece: piece.type for piece in proto.pieces}
    unused = [name for name, kind in types.items() if kind == _UNUSED]
    if unused:
        return f"it has unused pieces, such as {unused[0]!r}"
    normal = [piece for piece in proto.pieces if piece.type == _NORMAL]
    characters = set("".join(piece.piece for piece in normal))
    missing = sorted(character for character in characters if types.get(character) != _NORMAL)
    if missing:
        return f"{missing[0]!r} is a character of some pieces, but not a piece"
    if spec.model_type != _BPE:
        return None
    tied: dict[float, list[str]] = {}  # joined pieces, by their score
    for piece in normal:
        if len(piece.piece) > 1:
            tied.setdefault(piece.score, []).append(piece.piece)
    ambiguous = [group for group in tied.values() if len(group) > 1 and len(set("".join(group))) > 1]
    if ambiguous:
        return f"{' and '.join(map(repr, ambiguous[0][:2]))} have the same score"
    short = [name for name, kind in types.items() if kind != _NORMAL and len(name) == 1]
    if short:
        return f"its symbol {short[0]!r} is one character"
    return None


def _normalizer(spec: Any, *, prefixes: bool) -> Any:
    """What SentencePiece does to a text before it is cut into pieces."""
    from tokenizers import Regex, normalizers

    parts: list[Any] = []
    if spec.precompiled_charsmap:
        parts.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        parts += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix and prefixes:
        parts.append(normalizers.Prepend(_BLANK))
    parts.append(normalizers.Replace(" ", _BLANK))
    if spec.remove_extra_whitespaces:
        parts.append(normalizers.Replace(Regex(rf"{_BLANK}+\z"), ""))
    return normalizers.Sequence(parts)
