"""The kinds of examples that zero-prepare makes of the objects of a source, a row each, for objectives that read them.

A new kind is an entry of `EXAMPLE_KINDS`: the option of zero-prepare, what manifests record, the corpus page and
`--peek` follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from zero.corpus.format.example import LABELLED, PAIR, TEXT, Example
from zero.corpus.preparing.documents import Reader
from zero.corpus.preparing.sources.labels import ANSWER, MISMATCHED, LabelReader
from zero.corpus.preparing.sources.preferences import ANSWERS, PreferenceReader
from zero.corpus.text.chat_template import ChatTemplate


class ExampleTexts(NamedTuple):
    """The texts of some examples: tokens `(n, k, T)`, their numbers `(n, k)`, and which are learned `(n, k, T)`."""

    rows: np.ndarray
    lengths: np.ndarray
    completions: np.ndarray


@dataclass(frozen=True)
class ExampleKind:
    """A kind of examples.

    Attributes:
      example: the contents of a row; its `option` without dashes is the key of the table.
      texts: the names of the texts of a row, in order.
      reader: of the template to what reads an example of an object, with its first texts and its members.
      help: of the option.
      objective: the one that a run on such a corpus chooses first.
      with_others: from the texts that were read, of the examples of a shard, to all texts; None: all were read.
    """

    example: Example
    texts: tuple[str, ...]
    reader: Callable[[ChatTemplate | None], Reader]
    help: str
    objective: str
    with_others: Callable[[ExampleTexts], ExampleTexts] | None = None

    @property
    def texts_read(self) -> int:
        """The texts that a reader gives for each example."""
        return self.example.texts if self.with_others is None else 1

    def all_texts(self, read: ExampleTexts) -> ExampleTexts:
        """All texts of the examples of a shard."""
        if self.with_others is None:
            return read
        return self.with_others(read)


def with_mismatched(read: ExampleTexts) -> ExampleTexts:
    """Beside each text `(n, 1, T)`, its prompt with the answer of the example before it, cut to a row.

    The first example takes the answer of the last one, as TRL's KTOTrainer rotates the answers of a batch.

    >>> rows, learned = np.array([[[5, 6, 7, 0]], [[1, 2, 0, 0]]]), np.array([[[0, 0, 1, 0]], [[0, 1, 0, 0]]])
    >>> with_mismatched(ExampleTexts(rows, np.array([[3], [2]]), learned)).rows[:, 1].tolist()
    [[5, 6, 2, 0], [1, 7, 0, 0]]
    """
    rows, lengths, completions = (np.concatenate([x, np.zeros_like(x)], axis=1) for x in read)
    is_learned = read.completions[:, 0] != 0
    answers = [row[learned] for row, learned in zip(read.rows[:, 0], is_learned, strict=True)]
    prompts = read.lengths[:, 0] - is_learned.sum(axis=1)
    for number, prompt in enumerate(prompts.tolist()):
        answer = answers[number - 1][: rows.shape[2] - prompt]
        end = prompt + len(answer)
        rows[number, 1, :prompt] = rows[number, 0, :prompt]
        rows[number, 1, prompt:end] = answer
        completions[number, 1, prompt:end] = 1
        lengths[number, 1] = end
    return ExampleTexts(rows, lengths, completions)


def _named(*kinds: ExampleKind) -> Mapping[str, ExampleKind]:
    return MappingProxyType({kind.example.option.removeprefix("--"): kind for kind in kinds})


EXAMPLE_KINDS = _named(
    ExampleKind(
        PAIR,
        ANSWERS,
        PreferenceReader,
        'read pairs, "prompt", "chosen" and "rejected", texts or messages, for objective=dpo and others',
        "dpo",
    ),
    ExampleKind(
        LABELLED,
        (ANSWER, MISMATCHED),
        LabelReader,
        'read "prompt", "completion" and "label", whether the completion is desirable, for objective=kto',
        "kto",
        with_mismatched,
    ),
)


def kind_of(manifest: Mapping[str, Any]) -> ExampleKind | None:
    """The kind of examples of a corpus, by its manifest or its arguments; None: rows of running text."""
    name = manifest.get("examples")
    if name is None:
        return None
    return EXAMPLE_KINDS[name]


def example_of(kind: ExampleKind | None) -> Example:
    """What a row holds."""
    return TEXT if kind is None else kind.example
