"""Answers with labels: from JSON lines to rows of an answer and another's answer, with a label, and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import call, make
from tests.helpers.loaders import open_loader
from zero.base.errors import UserError
from zero.corpus.format.example import LABELLED
from zero.corpus.preparing.sources.labels import LabelReader
from zero.corpus.text.chat_template import ChatTemplate

LINES: list[dict[str, Any]] = [
    {"prompt": f"{i} é" + "??" * (i % 4), "completion": " y" + "!!" * (3 - i % 4), "label": i % 3 == 0}
    for i in range(40)
]
TEMPLATE = ChatTemplate(
    "chat_template.jinja",
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}",
    (),
)
USER, YES = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "yes"}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def text_of(prompt: str, completion: str) -> list[int]:
    text = [~byte for byte in prompt.encode()] + [*completion.encode(), 0]
    return [*text[:16], *[-1] * (16 - len(text))]


def read(index: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows `(rows, 2, 16)` and labels `(rows,)` in the order of the shards."""
    form: dict[str, Any] = {"only_completions": True, "example": LABELLED, "max_epochs": 1, "shuffle": False}
    loader = open_loader(index, global_rows=1, context=16, vocab_size=256, **form)
    batches = list(loader.batches())
    rows = np.concatenate([batch.tokens for batch in batches]).reshape(-1, 2, 16)
    return rows, np.concatenate([batch.extra["label"] for batch in batches])


def test_each_prompt_has_the_answer_before_it(tmp_path: Path) -> None:
    """In a shard the first takes that of the last; an answer that does not fit is cut."""
    corpus = make(write(tmp_path / "a.jsonl", LINES), tmp_path, examples="labels", validation_fraction=0)
    rows, labels = read(corpus.train_index)
    assert labels.tolist() == [int(line["label"]) for line in LINES]
    of_shard = 8
    for number, line in enumerate(LINES):
        first = number // of_shard * of_shard
        before = LINES[first + (number - first - 1) % of_shard]
        assert rows[number, 0].tolist() == text_of(line["prompt"], line["completion"])
        assert rows[number, 1].tolist() == text_of(line["prompt"], before["completion"])
    assert (rows[:, 1, -1] >= 0).any() and (rows[:, 0, -1] < 0).all()


def test_answer_is_of_another_prompt(tmp_path: Path) -> None:
    """A good and then a bad answer of each prompt: the nearest earlier answer of another prompt, also across shards."""
    lines = [
        {"prompt": f"prompt {number // 2}", "completion": f" {number}", "label": number % 2 == 0}
        for number in range(10)
    ]
    lines += [{"prompt": "prompt 4", "completion": f" {number}", "label": True} for number in range(10, 18)]
    corpus = make(write(tmp_path / "a.jsonl", lines), tmp_path, examples="labels", validation_fraction=0)
    rows, _ = read(corpus.train_index)
    nearest = [7, 7, 1, 1, 3, 3, 5, 5, 7, 7, 7, 7, 7, 7, 7, 7]  # shards of eight
    for row, line, other in zip(rows, lines, nearest, strict=False):
        assert row[1].tolist() == text_of(str(line["prompt"]), str(lines[other]["completion"])), line
    assert corpus.unmatched == 2  # the shards of the last two, and the one before, hold one prompt
    assert [row[1].tolist() for row in rows[16:]] == 2 * [[*(~byte for byte in b"prompt 4"), *8 * [-1]]]


def test_command(tmp_path: Path) -> None:
    """Long ones are left out, with the objective that reads the corpus; a look at it names both texts."""
    source = write(tmp_path / "a.jsonl", [*LINES, {**LINES[1], "completion": "x" * 20}])
    places = ("--directory", tmp_path / "corpus", "--index-directory", tmp_path / "index")
    done = call(source, "--labels", "--row-tokens", "16", *places)
    assert done.returncode == 0, done.stderr
    assert "left out 1 example because a text has more than" in done.stdout and "objective=kto" in done.stdout
    shown = call(tmp_path / "index" / "a_train.index", "--peek", "2").stdout
    assert shown.count(", answer: ") == shown.count(", another's answer: ") == 2
    assert "―――― another's answer ――――" in (tmp_path / "corpus" / "a" / "report.html").read_text().replace("&#39;", "'")
    assert call(source, "--labels", "--completions", *places).returncode == 2
    write(source, [{**line, "prompt": "the only one"} for line in LINES])
    done = call(source, "--labels", "--row-tokens", "32", "--name", "one", *places)
    assert "40 examples without an answer of another prompt" in done.stdout, done.stdout


def test_messages() -> None:
    document = LabelReader(TEMPLATE)({"prompt": [USER], "completion": [YES], "label": False}, "here")
    assert (document.content, document.completions, document.members) == ("u:What?|a:yes|", ((10, 14),), (0,))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"prompt": "a", "completion": "b"}, 'expected true or false under "label"; found completion, prompt'),
        ({"prompt": "a", "completion": "b", "label": 1}, 'expected true or false under "label"; it is 1: write true'),
        ({"prompt": "a", "label": True}, 'list of messages under "completion"; found label, prompt'),
        ({"prompt": "a", "completion": [YES], "label": True}, 'expected "prompt" and "completion", both strings or'),
    ],
)
def test_mistakes_are_named(entry: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^a.jsonl, line 7: .*{message}"):
        LabelReader(TEMPLATE)(entry, "a.jsonl, line 7")


def test_other_corpora_are_refused(tmp_path: Path) -> None:
    """Pairs, which have no labels."""
    pairs = [{"prompt": line["prompt"], "chosen": line["completion"], "rejected": "no"} for line in LINES]
    corpus = make(write(tmp_path / "a.jsonl", pairs), tmp_path, examples="preferences")
    with pytest.raises(UserError, match=r"and label\.npy of \(rows,\), which zero-prepare --labels writes"):
        read(corpus.train_index)
