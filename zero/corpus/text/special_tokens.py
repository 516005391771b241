"""The special tokens of a tokenizer by id, from the files beside it, as transformers reads them.

A folder of Hugging Face names them several times. transformers takes them so, and so does this module:

- bos_token, eos_token and pad_token from tokenizer_config.json. Where that file lists no `added_tokens_decoder`, the
  names in special_tokens_map.json replace its own.
- What stands before and behind every text from the post-processor of tokenizer.json.
- The ends of a generated text from generation_config.json, and without that file from config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zero.base.errors import UserError
from zero.files import storage
from zero.files.parsing import json_object, reading

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
SENTENCEPIECE = "tokenizer.model"  # which llama.cpp's converter reads even beside a tokenizer.json
# What is copied with a tokenizer, so that the copy has the same special tokens. config.json describes a model.
COMPANIONS = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, GENERATION_CONFIG, TEMPLATE, SENTENCEPIECE)


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of a tokenizer's special tokens.

    Attributes:
      end_of_text: ends a document of a corpus.
      eos: the tokenizer's own end, which differs from `end_of_text` if it ends each turn of a conversation.
      answer_end: ends a completion, and is learned: `eos` if a generated text stops there, else another of `ends`.
      ends: a generated text stops at any of these.
      first: a text that is generated from nothing begins with it.
      begin: the tokenizer's beginning of text; None if no file names it.
      before: what encoding puts in front of every text, at most once.
      after: what encoding puts behind every text.
      turn_ends: the members of `ends` that the chat template writes after a turn.
      separators: tokens that begin a document within a row, and tokens after which one begins.
      padding: fills rows; None if no file names it.
      is_brought: files beside the tokenizer describe it or its model, so that a prompt is encoded as transformers
        encodes it. Without them a prompt follows an end of text, as the documents of a corpus do.
      contradictions: a sentence for each disagreement between files, saying which of them counts.
    """

    end_of_text: int
    eos: int
    answer_end: int
    ends: tuple[int, ...]
    first: int
    begin: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    turn_ends: tuple[int, ...] = ()
    separators: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    padding: int | None = None
    is_brought: bool = False
    contradictions: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of the files beside a tokenizer; an empty object for a missing file."""

    folder: str
    tokenizer: Mapping[str, Any]
    special: Mapping[str, Any]
    added: Mapping[str, Any]
    generation: Mapping[str, Any]
    model: Mapping[str, Any]

    @classmethod
    def from_folder(cls, folder: str) -> TokenizerFiles:
        """Raises UserError for a file that holds no JSON object."""

        def content(name: str) -> dict[str, Any]:
            path = storage.join(folder, name)
            if not storage.exists(path):
                return {}
            return json_object(storage.read_bytes(path), path)

        names = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, GENERATION_CONFIG, MODEL_CONFIG)
        return cls(folder, *map(content, names))

    @property
    def names(self) -> dict[str, str]:
        """The spelling of each named token, such as {"bos_token": "<s>"}."""
        names = {key: value for key, value in self.tokenizer.items() if key.endswith("_token")}
        if "added_tokens_decoder" not in self.tokenizer:
            names |= {key: value for key, value in self.special.items() if key.endswith("_token")}
        spelled = {key: value.get("content") if isinstance(value, dict) else value for key, value in names.items()}
        return {key: value for key, value in spelled.items() if isinstance(value, str)}

    @property
    def added_tokens(self) -> dict[int, dict[str, Any]]:
        """The tokens added to the tokenizer's file, by id, in order: spelling and options.

        Raises:
          UserError: a file has an unexpected form.
        """
        with reading(f"{self.folder}: added_tokens_decoder or {ADDED_TOKENS} has an unexpected form"):
            if "added_tokens_decoder" in self.tokenizer:
                listed = self.tokenizer["added_tokens_decoder"]
                return {int(number): dict(listed[number]) for number in sorted(listed, key=int)}
            named = set(self.names.values())
            return {
                int(number): {"content": name, "normalized": name not in named, "special": name in named}
                for name, number in sorted(self.added.items(), key=lambda item: int(item[1]))
            }


def _ids(content: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The ids under a key; a model may have more of them than its tokenizer."""
    value = content.get(key)
    listed = value if isinstance(value, list) else [value]
    return tuple(i for i in listed if isinstance(i, int) and not isinstance(i, bool) and i >= 0)


def companions(folder: str) -> dict[str, bytes]:
    """The files beside a tokenizer that a copy of it needs, by name.

    Where a folder has no generation_config.json, its config.json names the ends: the copy gets these as the
    generation_config.json that transformers would save.
    """
    paths = {name: storage.join(folder, name) for name in COMPANIONS}
    files = {name: storage.read_bytes(path) for name, path in paths.items() if storage.exists(path)}
    if GENERATION_CONFIG not in files:
        model = TokenizerFiles.from_folder(folder).model
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        kept = {key: model[key] for key in keys if model.get(key) is not None}
        if kept:
            files[GENERATION_CONFIG] = as_json({"_from_model_config": True, **kept})
    return files


def as_json(content: Mapping[str, Any]) -> bytes:
    """A JSON file, the same bytes for the same content."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


class Vocabulary(NamedTuple):
    """What the file of a tokenizer says of its special tokens.

    Attributes:
      path: of the file, for errors.
      id_of: the id of a spelling; None for no token.
      name_of: the spelling of an id.
      size: the number of ids.
      special: the ids of special tokens.
      before: what encoding puts in front of every text.
      after: what encoding puts behind it.
      ends_by_spelling: tokens that are spelled as an end of text; the first is one where no other file names any.
    """

    path: str
    id_of: Callable[[str], int | None]
    name_of: Callable[[int], str | None]
    size: int
    special: Collection[int]
    before: tuple[int, ...]
    after: tuple[int, ...]
    ends_by_spelling: Sequence[int]


def read_special_tokens(vocabulary: Vocabulary, files: TokenizerFiles, template: str | None) -> SpecialTokens:
    """The special tokens of a tokenizer, by the files beside it and the text of its chat template.

    Raises:
      UserError: nothing ends a text.
    """
    lines: list[str] = []

    def listed(key: str) -> tuple[int, ...]:
        generation_ids = _ids(files.generation, key)
        model_ids = _ids(files.model, key)
        if generation_ids and set(model_ids) - set(generation_ids):
            lines.append(
                f"{key} is {list(model_ids)} in {MODEL_CONFIG} and {list(generation_ids)} in {GENERATION_CONFIG}; the "
                "latter is used"
            )
        return generation_ids or model_ids

    def named(key: str) -> int | None:
        name = files.names.get(key)
        token = None if name is None else vocabulary.id_of(name)
        if name is not None and token is None:
            lines.append(f"{key} is {name!r}, which is not a token of the tokenizer; it is ignored")
        return token

    ends = listed("eos_token_id")
    end = named("eos_token")
    if end is None:
        # The ids of config.json may be the defaults of its class, which are not special tokens of this tokenizer.
        known = [i for i in ends if i < vocabulary.size]
        end = next(iter((*(i for i in known if i in vocabulary.special), *vocabulary.ends_by_spelling, *known)), None)
    if end is None:
        raise UserError(
            f"tokenizer {vocabulary.path} has no token that ends a text; expected eos_token in a {TOKENIZER_CONFIG} "
            "beside it"
        )
    if ends and end not in ends:
        lines.append(f"eos_token is {end}, and eos_token_id {list(ends)}; generation only stops at the latter")
    before = vocabulary.before
    begin = named("bos_token")
    begins_generation = listed("bos_token_id")
    if before and begin is not None and before[0] != begin:
        lines.append(f"bos_token is {begin}, but every text begins with {before[0]}; the latter is used")
    padding = named("pad_token")
    if padding is None:
        padding = next(iter(listed("pad_token_id")), None)
    dividers = dict.fromkeys(i for i in (end, *ends, *vocabulary.ends_by_spelling) if i < vocabulary.size)
    written = [i for i in dividers if _is_written(i, vocabulary.name_of(i), template, end, "eos_token")]
    # A token that ends each turn of a conversation does not divide documents, if there is another.
    end_of_text = next((i for i in dividers if i not in written), end)
    is_brought = any((files.tokenizer, files.special, files.generation, files.model))
    separators: tuple[tuple[int, ...], tuple[int, ...]] = (end_of_text, *before[:1]), ()
    if is_brought:
        name = None if begin is None else vocabulary.name_of(begin)
        writes_begin = _is_written(begin, name, template, begin, "bos_token")
        first = next(iter(before), begin if writes_begin else None)
        separators = _separators_of_chats(first, end_of_text, ends_turns=end_of_text in written)
    firsts = (*before, *begins_generation, begin, end)
    return SpecialTokens(
        end_of_text=end_of_text,
        eos=end,
        answer_end=end if end in ends else next((i for i in ends if i in vocabulary.special), end),
        ends=ends or (end,),
        first=next(i for i in firsts if i is not None),
        begin=before[0] if before else begin,
        before=before,
        after=vocabulary.after,
        turn_ends=tuple(i for i in written if i in (end, *ends)),
        separators=separators,
        padding=padding,
        is_brought=is_brought,
        contradictions=tuple(lines),
    )


def _separators_of_chats(
    first: int | None, end_of_text: int, ends_turns: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`SpecialTokens.separators`, given the token `first` that begins every text, if any.

    An end of text after each turn does not separate, if there is a beginning of text.
    """
    if first is None or first == end_of_text:
        return (), (end_of_text,)
    return (first,), () if ends_turns else (end_of_text,)


def _is_written(token: int | None, name: str | None, template: str | None, named: int | None, variable: str) -> bool:
    """Whether a chat template writes a token: by its spelling, or the one of a variable such as eos_token by that."""
    if token is None or template is None or name is None:
        return False
    return name in template or (token == named and variable in template)
