"""Pairs of texts: from JSON lines to rows of two texts and back, and what is wrong with a line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.corpora import call, make
from tests.helpers.loaders import open_loader
from zero.base.errors import UserError
from zero.corpus.format.example import PAIR, TEXT
from zero.corpus.preparing.prepare import Corpus
from zero.corpus.preparing.sources.preferences import PreferenceReader
from zero.corpus.text.chat_template import ChatTemplate

LINES = [{"prompt": f"{i} é?", "chosen": " yes" + "!" * (i % 4), "rejected": " no" + "?" * (i % 3)} for i in range(40)]
TEMPLATE = ChatTemplate(
    "chat_template.jinja",
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '|' }}{% endfor %}"
    "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}",
    (),
)
USER, OTHER = {"role": "user", "content": "What?"}, {"role": "user", "content": "So?"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(index: str, context: int = 16, **options: Any) -> np.ndarray:
    """The rows of an index `(rows, 2, context)`, ~t for what is not learned; -1 is padding."""
    marks: dict[str, Any] = {"only_completions": True, "example": PAIR, "max_epochs": 1, "shuffle": False}
    loader = open_loader(index, global_rows=1, context=context, vocab_size=256, **marks | options)
    return np.concatenate([batch.tokens for batch in loader.batches()]).reshape(-1, 2, context)


def expected(line: dict[str, str], context: int = 16) -> list[list[int]]:
    prompt = [~byte for byte in line["prompt"].encode()]
    texts = [[*prompt, *line[key].encode(), 0][:context] for key in ("chosen", "rejected")]
    return [[*text, *[-1] * (context - len(text))] for text in texts]


def both(corpus: Corpus, **options: Any) -> list[Any]:
    return sorted([*read(corpus.train_index, **options).tolist(), *read(corpus.validation_index, **options).tolist()])


def test_both_texts_are_one_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What follows the prompt is learned, the end of text too; a shorter context cuts each text, and says so."""
    corpus = make(write(tmp_path / "a.jsonl", LINES), tmp_path, examples="preferences")
    assert both(corpus) == sorted(expected(line) for line in LINES)
    assert corpus.train.rows + corpus.validation.rows == corpus.train.documents + corpus.validation.documents == 40
    assert "leaves out" not in caplog.text
    assert both(corpus, context=8) == sorted(expected(line, 8) for line in LINES)
    assert "data.crop=first with data.max_context=8 leaves out" in caplog.text


def test_order_is_that_of_other_rows(tmp_path: Path) -> None:
    """Shuffled, in parts of hosts and continued from a cursor, each row is once in an epoch with its values."""
    corpus = make(write(tmp_path / "a.jsonl", LINES), tmp_path, examples="preferences")
    inputs = read(corpus.train_index).reshape(-1, 32)
    values = np.arange(2 * len(inputs), dtype=np.float32).reshape(-1, 2)
    options: dict[str, Any] = {"global_rows": 4, "context": 16, "vocab_size": 256, "only_completions": True}
    options |= {"example": PAIR, "columns": {corpus.train_index: {"reference": values}}, "seed": 3, "max_epochs": 2}
    batches = list(open_loader(corpus.train_index, **options).batches())
    hosts = [
        open_loader(corpus.train_index, **options, host=host, hosts=2).batches(batches[1].cursor) for host in (0, 1)
    ]
    seen = []
    for batch, *parts in zip(batches[2:], *hosts, strict=True):
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), batch.tokens)
        references = [part.extra["reference"] for part in parts]
        np.testing.assert_array_equal(np.concatenate(references), batch.extra["reference"])
    for batch in batches:
        for row, own in zip(batch.tokens, batch.extra["reference"], strict=True):
            number = int(own[0]) // 2
            np.testing.assert_array_equal(inputs[number], row)
            assert own.tolist() == values[number].tolist()
            seen.append(number)
    assert len(seen) == 2 * len(inputs) // 4 * 4 and sorted(seen[: len(inputs)]) != seen[: len(inputs)]


def test_long_and_repeated_pairs_are_left_out(tmp_path: Path) -> None:
    """A pair with a text that is longer than a row is left out and counted; so is one with both texts of another."""
    other = {**LINES[0], "rejected": " never"}
    long = {**LINES[1], "rejected": "x" * 20}
    source = write(tmp_path / "a.jsonl", [*LINES, other, long, LINES[0]])
    corpus = make(source, tmp_path, examples="preferences", deduplicate=True)
    assert both(corpus) == sorted(expected(line) for line in [*LINES, other])
    assert (corpus.long, corpus.duplicates) == (1, 1)
    with pytest.raises(UserError, match=r"b\.jsonl: 40 examples have a text of more tokens than --row-tokens 4"):
        make(write(tmp_path / "b.jsonl", LINES), tmp_path, name="d", examples="preferences", row_tokens=4)


def test_command(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [*LINES, {**LINES[1], "rejected": "x" * 20}])
    places = ("--directory", tmp_path / "corpus", "--index-directory", tmp_path / "index")
    done = call(source, "--preferences", "--row-tokens", "16", *places)
    assert done.returncode == 0, done.stderr
    assert "left out 1 example because a text has more than --row-tokens 16" in done.stdout
    assert read(str(tmp_path / "index" / "a_train.index")).shape[1:] == (2, 16)
    assert call(source, "--preferences", "--completions", *places).returncode == 2
    shown = call(tmp_path / "index" / "a_train.index", "--peek", "2").stdout
    assert shown.count("row 19, chosen: ") == shown.count("row 19, rejected: ") == 1 and shown.count(" yes") == 2


def test_messages() -> None:
    """With the prompt apart, and at the beginning of both answers; an answer may be several turns."""
    reader = PreferenceReader(TEMPLATE)
    apart = reader({"prompt": [USER], "chosen": [YES], "rejected": [NO, OTHER, YES]}, "here")
    within = reader({"chosen": [USER, YES], "rejected": [USER, NO, OTHER, YES]}, "here")
    assert apart == within
    assert apart.content == "u:What?|a:yes|" and apart.completions == ((10, 14),) and apart.has_special
    (rejected,) = apart.other_texts
    assert rejected.content == "u:What?|a:no|u:So?|a:yes|" and rejected.completions == ((10, 25),)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, 'expected a string or a list of .* under "rejected"; found chosen, prompt'),
        ([1], 'expected a string or a list of messages under "chosen"; found no object'),
        ({"chosen": "b", "rejected": "c"}, 'expected a string under "prompt", as under "chosen"; found nothing'),
        ({"prompt": "a", "chosen": "b", "rejected": []}, 'expected a string under "rejected", as .*; found list'),
        ({"prompt": "a", "chosen": [YES], "rejected": [NO]}, 'expected a list of messages under "prompt"; found str'),
        ({"chosen": [YES], "rejected": [NO]}, 'expected messages under "prompt", or at the beginning of both answers'),
        ({"prompt": [USER, YES], "chosen": [NO], "rejected": [NO]}, 'expected messages under "prompt"'),
        ({"chosen": [USER, YES], "rejected": [USER]}, 'role "assistant" after the prompt under "rejected"'),
        ({"prompt": [USER], "chosen": [{"content": "a"}], "rejected": [NO]}, r'chosen\[0\]: expected an object with a'),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO], "tools": [{}]}, "cannot render .*: no tools"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO], "tools": 1}, "tools: expected a list of objects"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, entry: Any, message: str) -> None:
    """The file, the line and the key."""
    with pytest.raises(UserError, match=f"^a.jsonl, line 7: .*{message}"):
        PreferenceReader(TEMPLATE)(entry, "a.jsonl, line 7")


def test_line_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [LINES[0], {"prompt": "a", "chosen": [YES], "rejected": [NO]}])
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: messages need a chat template"):
        make(source, tmp_path, examples="preferences")


def test_other_corpora_are_refused(tmp_path: Path) -> None:
    """Pairs where texts are expected, and the other way round."""
    corpus = make(write(tmp_path / "a.jsonl", LINES), tmp_path, examples="preferences")
    with pytest.raises(UserError, match=r"holds 2 texts per row, but the objective reads rows of one text"):
        read(corpus.train_index, example=TEXT)
    texts = [{"prompt": line["prompt"], "completion": line["chosen"]} for line in LINES]
    other = make(write(tmp_path / "b.jsonl", texts), tmp_path, name="b", completions=True)
    with pytest.raises(
        UserError,
        match=r"has the shape \(4, 16\); the objective expects \(rows, 2, tokens\)",
    ):
        read(other.train_index)
