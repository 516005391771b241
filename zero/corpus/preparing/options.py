"""What the rows of a corpus are made of, checked before a source is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero.base.errors import UserError
from zero.corpus.format.example import CLASSIFIED
from zero.corpus.preparing.documents import DOCUMENT_BYTES
from zero.corpus.preparing.filters.table import recorded_filters
from zero.corpus.preparing.near_duplicates import Nearness
from zero.corpus.preparing.packing import DEFAULT, JOINED, PACKINGS
from zero.corpus.preparing.sources.arrays import TOKEN_BITS
from zero.corpus.preparing.sources.changes import FORMS
from zero.corpus.preparing.sources.completions import LEARNED
from zero.corpus.text.tokenizers import Tokenizer
from zero.files.parsing import reading

CLASSIFICATION = CLASSIFIED.option.removeprefix("--")


def option(default: Any, meaning: str, *, metavar: str | None = None, choices: Sequence[Any] | None = None) -> Any:
    """A field that `zero-prepare` takes as an option of its name; its type says how the value is read."""
    of_parser = {"help": meaning, "default": default}
    if metavar is not None:
        of_parser["metavar"] = metavar
    if choices is not None:
        of_parser["choices"] = choices
    return dataclasses.field(default=default, metadata=of_parser)


@dataclass(frozen=True)
class CorpusOptions:
    """What the rows of a corpus are made of, and how: the options of `zero-prepare --help`.

    >>> CorpusOptions(tokenizer=32000, row_tokens=1).check()
    Traceback (most recent call last):
    zero.base.errors.UserError: row_tokens 1 must be at least 2
    """

    tokenizer: Tokenizer | int  # a number: train one of so many tokens on the source, as directory/name/tokenizer.json
    row_tokens: int = option(1024, "tokens per row, the longest context to train with (1024)")
    one_document_per_row: bool = option(False, "start each document in a new row and pad, instead of joining documents")
    cut_documents: bool = option(
        False,
        "keep only the first of these rows, and end it with the end of text; with --completions, end it after the "
        "last completion that fits, so that no turn is cut",
    )
    begin_rows: bool = option(
        False,
        "begin each row with the end of text, so that all of its other tokens, one less than --row-tokens, are "
        "predicted",
    )
    pack: str | None = option(
        None,
        "best-fit (the default with --completions): choose documents that fill a row together, so that only "
        "documents longer than a row are cut; joined (the default otherwise): one after the other, cut at the end of "
        "each row",
        choices=(*PACKINGS, JOINED),
    )
    validation_fraction: float = option(0.05, "share of the documents for validation (0.05); 0: none")
    splits: str | None = option(
        None,
        "official: use the files or splits named train, validation and test; all: read all files, whatever their "
        "names (by default validation and test files are skipped); or the bytes of each split of one text, such as "
        "90000000,5000000,5000000",
    )
    minimum_tokens: int = option(0, "leave out shorter documents; the end of text counts")
    skip_broken: int = option(  # not recorded, but the number of documents that are left out
        0,
        "leave out up to N documents that cannot be read: lines that are not JSON, null texts, files that are not "
        "UTF-8; each is counted and listed (0)",
        metavar="N",
    )
    normalize: str | None = option(None, "Unicode normalization of all text", choices=sorted(FORMS))
    deduplicate: bool = option(False, "leave out documents equal to an earlier one")
    shuffle: bool = option(False, "shuffle documents across all parts, by a hash of their text")
    near_duplicates: float | None = option(
        None,
        "leave out documents that share this much of their 5-grams with an earlier one, such as 0.8",
        metavar="SHARE",
    )
    filters: tuple[tuple[str, str], ...] = ()  # keys of `FILTERS`, with their values
    document_bytes: int = option(
        DOCUMENT_BYTES,
        f"longest document; a longer one is broken, as documents that cannot be read ({DOCUMENT_BYTES})",
        metavar="BYTES",
    )
    rows_per_member: int = option(256, "rows in one array of a shard (256)")
    rows_per_shard: int = option(8192, "rows in a shard (8192)")
    key: str = option("text", 'key of the text in a JSON object, or of the ids in a TFRecord ("text")')
    token_bits: int | None = option(
        None,
        "bits of each token of a .bin without a header (16; 32 with a vocabulary above 65536)",
        choices=TOKEN_BITS,
    )
    lines: bool = option(False, "treat each line of a text as a document; reads all files of a folder")
    completions: bool = option(
        False,
        'read "prompt" and "completion", or "messages", and record what training.loss_on=completion learns',
    )
    loss_on: tuple[str, ...] = option(
        LEARNED,
        f"roles whose messages --completions marks as learned ({','.join(LEARNED)})",
        metavar="ROLE,...",
    )
    template_variables: str = option(
        "{}",
        "template variables, such as '{\"enable_thinking\": false}'; a line's chat_template_kwargs win",
        metavar="JSON",
    )
    examples: str | None = None  # a key of `EXAMPLE_KINDS`
    label_names: tuple[str, ...] = option(
        (), "names of the classes of --classification, in the order of their numbers", metavar="NAME,..."
    )
    label_key: str = option("label", 'key of the label of --classification ("label")', metavar="KEY")
    tokenizer_source: str | None = None  # the tokenizer's origin, such as hf:NAME@COMMIT

    def check(self) -> None:
        """Raises UserError for values that are wrong or contradict each other."""
        if not 0 <= self.validation_fraction < 1:
            raise UserError(f"validation_fraction must be at least 0 and below 1, not {self.validation_fraction}")
        with reading("--template-variables: expected a JSON object, such as '{\"enable_thinking\": false}'"):
            dict(json.loads(self.template_variables).items())
        if self.row_tokens < 2:
            raise UserError(f"row_tokens {self.row_tokens} must be at least 2")
        if self.rows_per_member < 1 or self.rows_per_shard < 1 or self.rows_per_shard % self.rows_per_member:
            raise UserError(
                f"rows_per_shard {self.rows_per_shard} must be a multiple of rows_per_member {self.rows_per_member}"
            )
        if self.document_bytes < 1:
            raise UserError(f"--document-bytes {self.document_bytes}: expected at least 1")
        if self.token_bits == TOKEN_BITS[0] and self.bits_of_tokens != TOKEN_BITS[0]:
            raise UserError("--token-bits 16 cannot hold the ids of a vocabulary of more than 65,536 tokens")
        if self.skip_broken < 0:
            raise UserError(f"--skip-broken {self.skip_broken}: expected a number of documents")
        has_prompts = self.completions or self.examples is not None
        if self.near_duplicates is not None and has_prompts:
            raise UserError("--near-duplicates expects documents of text, not prompts or chats")
        if self.shuffle and has_prompts:
            raise UserError("--shuffle expects documents of text, not prompts or chats")
        if self.completions and self.examples is not None:
            raise UserError(f"--completions and --{self.examples} cannot be combined")
        if not self.completions and self.loss_on != LEARNED:
            raise UserError(f"--loss-on {' '.join(self.loss_on)} requires --completions")
        if self.examples != CLASSIFICATION and (self.label_names or self.label_key != "label"):
            raise UserError("--label-names and --label-key require --classification")
        if len({*self.label_names}) < len(self.label_names):
            raise UserError(f"--label-names {','.join(self.label_names)}: expected different names")
        if self.cut_documents and self.examples is not None:
            raise UserError(f"--cut-documents and --{self.examples} cannot be combined")
        if self.cut_documents and not self.one_document_per_row:
            raise UserError("--cut-documents requires --one-document-per-row")
        if self.begin_rows and self.examples is not None:
            raise UserError(f"--begin-rows and --{self.examples} cannot be combined")
        if self.pack not in (None, JOINED) and self.is_unjoined:
            option = self.examples or "one_document_per_row"
            raise UserError(f"pack={self.pack} joins documents in a row, but {option} does not: choose one of them")

    @property
    def bits_of_tokens(self) -> int | None:
        """Bits of each token of a .bin without a header; None: 16, if it does not look like 32."""
        if not isinstance(self.tokenizer, int) and self.tokenizer.vocab_size > 1 << TOKEN_BITS[0]:
            return TOKEN_BITS[1]
        return self.token_bits

    @property
    def is_unjoined(self) -> bool:
        """Whether a row holds a single document, or an example."""
        return self.one_document_per_row or self.examples is not None

    @property
    def packing(self) -> str | None:
        """A key of `packing.PACKINGS`; None: documents are joined without regard to rows, or not at all."""
        if self.pack is None and self.completions and not self.is_unjoined:
            return DEFAULT
        return None if self.pack == JOINED else self.pack

    def expects_documents(self) -> list[str]:
        """The options that have been chosen and that one long text cannot follow."""
        options = {
            "one_document_per_row": self.is_unjoined,
            "pack": self.packing is not None,
            "minimum_tokens": self.minimum_tokens > 0,
            "deduplicate": self.deduplicate,
        }
        options["shuffle"] = self.shuffle
        options["near_duplicates"] = self.near_duplicates is not None
        options |= dict.fromkeys(dict(self.filters), True)
        return [name for name, is_chosen in options.items() if is_chosen]

    def recorded(self, chat_template: str | None) -> dict[str, Any]:
        """The options as recorded in the manifest, with the chat template's digest; null for an unused option."""
        near = None if self.near_duplicates is None else Nearness(self.near_duplicates).recorded()
        return {
            "key": self.key,
            "train_tokenizer": self.tokenizer if isinstance(self.tokenizer, int) else None,
            "row_tokens": self.row_tokens,
            "one_document_per_row": self.is_unjoined,
            "validation_fraction": self.validation_fraction,
            "rows_per_member": self.rows_per_member,
            "rows_per_shard": self.rows_per_shard,
            "cut_documents": self.cut_documents or None,
            "begin_rows": self.begin_rows or None,
            "pack": self.packing,
            "completions": self.completions or None,
            "examples": self.examples,
            "label_key": self.label_key if self.examples == CLASSIFICATION else None,
            "label_names": list(self.label_names) or None,
            "loss_on": None if self.loss_on == LEARNED else list(self.loss_on),
            "chat_template": chat_template,
            "splits": self.splits,
            "lines": self.lines or None,
            "minimum_tokens": self.minimum_tokens or None,
            "normalize": self.normalize,
            "deduplicate": self.deduplicate or None,
            "tokenizer_source": self.tokenizer_source,
            "shuffle": self.shuffle or None,
            "near_duplicates": near,
            "template_variables": None if self.template_variables == "{}" else self.template_variables,
            "document_bytes": None if self.document_bytes == DOCUMENT_BYTES else self.document_bytes,
            "filters": recorded_filters(dict(self.filters)) or None,
        }
