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

from zero.corpus.format.example import CLASSIFIED, LABELLED, PAIR, TEXT, Example
from zero.corpus.preparing.documents import Reader
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.sources.classes import CLASSIFIED_TEXT, ClassReader
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
      reader: of the template and the options to what reads an example of an object, with its first texts and members.
      help: of the option.
      objective: the one that a run on such a corpus chooses first.
      overrides: of the options to what a run needs beside the objective and the files.
      with_others: from the texts that were read, of the examples of a shard and of the shard before it, if any, to all
        texts of the shard; None: all were read.
    """

    example: Example
    texts: tuple[str, ...]
    reader: Callable[[ChatTemplate | None, CorpusOptions], Reader]
    help: str
    objective: str
    overrides: Callable[[CorpusOptions], list[str]] = lambda options: []
    with_others: Callable[[ExampleTexts, ExampleTexts | None], ExampleTexts] | None = None

    @property
    def texts_read(self) -> int:
        """The texts that a reader gives for each example."""
        return self.example.texts if self.with_others is None else 1

    def all_texts(self, read: ExampleTexts, before: ExampleTexts | None) -> ExampleTexts:
        """All texts of the examples of a shard; `before` are those read of the shard before it."""
        if self.with_others is None:
            return read
        return self.with_others(read, before)


def with_mismatched(read: ExampleTexts, before: ExampleTexts | None = None) -> ExampleTexts:
    """Beside each text `(n, 1, T)`, its prompt with the nearest earlier answer of another prompt, cut to a row.

    Before the first example of the shard comes the last one, as TRL's KTOTrainer rotates the answers of a batch, and
    before all of them the shard before. Where all of these have the same prompt, it gets no answer.

    >>> rows, learned = np.array([[[5, 6, 7, 0]], [[1, 2, 0, 0]]]), np.array([[[0, 0, 1, 0]], [[0, 1, 0, 0]]])
    >>> with_mismatched(ExampleTexts(rows, np.array([[3], [2]]), learned)).rows[:, 1].tolist()
    [[5, 6, 2, 0], [1, 7, 0, 0]]
    """
    rows, lengths, completions = (np.concatenate([x, np.zeros_like(x)], axis=1) for x in read)
    own = _prompts_and_answers(read)
    line = [*(_prompts_and_answers(before) if before is not None else []), *own, *own]
    answer = np.empty(0, rows.dtype)  # of the nearest other prompt
    for number, (prompt, _) in enumerate(line):
        if number and line[number - 1].prompt.tobytes() != prompt.tobytes():
            answer = line[number - 1].answer
        place = number - len(line) + len(own)
        if place >= 0:
            length = len(prompt)
            end = min(length + len(answer), rows.shape[2])
            rows[place, 1, :length] = prompt
            rows[place, 1, length:end] = answer[: end - length]
            completions[place, 1, length:end] = 1
            lengths[place, 1] = end
    return ExampleTexts(rows, lengths, completions)


class _PromptAndAnswer(NamedTuple):
    prompt: np.ndarray
    answer: np.ndarray


def _prompts_and_answers(read: ExampleTexts) -> list[_PromptAndAnswer]:
    is_learned = read.completions[:, 0] != 0
    prompts = read.lengths[:, 0] - is_learned.sum(axis=1)
    return [
        _PromptAndAnswer(row[:prompt], row[learned])
        for row, learned, prompt in zip(read.rows[:, 0], is_learned, prompts.tolist(), strict=True)
    ]


def classes(options: CorpusOptions) -> list[str]:
    """The number of classes, which numbers alone do not say, and their names.

    >>> classes(CorpusOptions(300, 16, label_names=("no", "yes")))
    ['objective.num_labels=2', 'model.override.score_outputs=2', "objective.label_names=['no','yes']"]
    """
    count = str(len(options.label_names) or "CLASSES")
    numbers = [f"objective.num_labels={count}", f"model.override.score_outputs={count}"]
    if not options.label_names:
        return numbers
    escaped = [name.replace("'", "\\'") for name in options.label_names]  # true and 01 stay texts only in quotes
    names = ",".join(f"'{name}'" for name in escaped)
    return [*numbers, f"objective.label_names=[{names}]"]


def _named(*kinds: ExampleKind) -> Mapping[str, ExampleKind]:
    return MappingProxyType({kind.example.option.removeprefix("--"): kind for kind in kinds})


EXAMPLE_KINDS = _named(
    ExampleKind(
        PAIR,
        ANSWERS,
        lambda template, options: PreferenceReader(template),
        'read pairs, "prompt", "chosen" and "rejected", texts or messages, for objective=dpo and others',
        "dpo",
    ),
    ExampleKind(
        LABELLED,
        (ANSWER, MISMATCHED),
        lambda template, options: LabelReader(template),
        'read "prompt", "completion" and "label", whether the completion is desirable, for objective=kto',
        "kto",
        with_others=with_mismatched,
    ),
    ExampleKind(
        CLASSIFIED,
        (CLASSIFIED_TEXT,),
        lambda template, options: ClassReader(options.key, options.label_key, options.label_names),
        'read "text" and "label", a number from 0 on or a name of --label-names, for objective=classification',
        "classification",
        classes,
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
