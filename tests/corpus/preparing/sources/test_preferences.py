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
from zero.corpus.preparing.sources.preferences import PreferenceReader, shared_messages, shared_text
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
        ({"chosen": "b", "rejected": "c"}, 'expected a string under "prompt", or one that begins both answers'),
        ({"prompt": 5, "chosen": "b", "rejected": "c"}, 'expected a string under "prompt", .*; found a number'),
        ({"prompt": "a", "chosen": "b", "rejected": []}, 'expected a string under "rejected", as .*; found a list'),
        ({"prompt": "a", "chosen": [YES], "rejected": [NO]}, 'under "prompt", or a string that is one of the messages'),
        ({"chosen": [YES], "rejected": [NO]}, 'expected messages under "prompt", or at the beginning of both answers'),
        ({"prompt": [USER, YES], "chosen": [NO], "rejected": [NO]}, 'expected messages under "prompt"'),
        ({"chosen": [USER, YES], "rejected": [USER]}, 'expected messages under "prompt", or at the beginning of both'),
        ({"prompt": [USER], "chosen": [YES], "rejected": [USER]}, 'role "assistant" after the prompt under "rejected"'),
        ({"prompt": [USER], "chosen": [YES], "rejected": [{**NO, "weight": 0}]}, r'rejected\[0\] is marked otherwise'),
        ({"prompt": "So?", "chosen": [USER, YES], "rejected": [USER, NO]}, 'a string that is one of the messages that'),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2}, '"margin" is 2: no objective of zero reads it'),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": 2}, '"weight" is 2: a batch weighs all'),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "system": "d"}, '"system" is "d": a prompt that is a string'),
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
    with pytest.raises(UserError, match=r"holds 2 texts per row, but the objective reads rows of running text"):
        read(corpus.train_index, example=TEXT)
    texts = [{"prompt": line["prompt"], "completion": line["chosen"]} for line in LINES]
    other = make(write(tmp_path / "b.jsonl", texts), tmp_path, name="b", completions=True)
    with pytest.raises(
        UserError,
        match=r"has the shape \(4, 16\); the objective expects \(rows, 2, tokens\)",
    ):
        read(other.train_index)


def test_published_sets(tmp_path: Path) -> None:
    """UltraFeedback's prompt is a string beside whole conversations; HH has only what both answers begin with."""
    reader = PreferenceReader(TEMPLATE)
    apart = reader({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, "here")
    scores = {"score_chosen": 8.5, "score_rejected": 7.0}
    feedback = {"prompt": "What?", "prompt_id": "7f", "chosen": [USER, YES], "rejected": [USER, NO], **scores}
    read_feedback = reader(feedback, "here")
    assert read_feedback.unread == ("prompt_id", "score_chosen", "score_rejected")
    assert read_feedback._replace(unread=()) == apart._replace(
        other_texts=tuple(text._replace(unread=read_feedback.unread) for text in apart.other_texts)
    )
    start = "\n\nHuman: What?\n\nAssistant:"
    hh = reader({"chosen": f"{start} yes", "rejected": f"{start} no"}, "here")
    assert (hh.content, hh.completions) == (f"{start} yes", ((len(start), len(start) + 4),))
    assert hh.other_texts[0].content == f"{start} no"


@pytest.mark.wide
def test_shared_beginning_is_that_of_trl() -> None:
    trl = pytest.importorskip("trl.data_utils")
    for texts in [("a b c", "a b d"), ("ab c", "ab"), ("so so", "so so"), ("q: x", "q:  y"), ("q: x y", "q: x z")]:
        chosen, rejected = texts
        assert shared_text(chosen, rejected) == trl.extract_prompt({"chosen": chosen, "rejected": rejected})["prompt"]
    for chats in [([USER, YES], [USER, NO]), ([USER, YES], [USER, YES]), ([USER, NO, OTHER, YES], [USER, NO, OTHER])]:
        expected = trl.extract_prompt({"chosen": chats[0], "rejected": chats[1]})["prompt"]
        assert shared_messages(*chats) == expected


def test_calls_of_tools_in_answers() -> None:
    """In the prompt and in both answers, as the template writes them; those that it leaves out are counted."""
    writes = ChatTemplate(
        "chat_template.jinja",
        "{% for t in tools %}{{ t.name }};{% endfor %}{% for m in messages %}{{ m.role[0] + ':' }}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}|{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}",
        (),
    )
    calls = [{"role": "assistant", "tool_calls": [{"function": {"name": name}}]} for name in ("f", "g", "h")]
    answer = {"role": "tool", "content": "5"}
    entry: dict[str, Any] = {
        "prompt": [USER, calls[0], answer],
        "chosen": [calls[1], answer, YES],
        "rejected": [calls[2]],
    }
    chosen = PreferenceReader(writes)({**entry, "tools": [{"name": "f"}]}, "here")
    start = 'f;u:What?|a:{"name": "f"}|t:5|a:'
    assert chosen.content == start + '{"name": "g"}|t:5|a:yes|' and chosen.completions is not None
    assert chosen.completions == ((len(start), len(str(chosen.content))),) and chosen.dropped_calls == 0
    (rejected,) = chosen.other_texts
    assert rejected.content == start + '{"name": "h"}|'
    rendered = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    for document, said in ((chosen, entry["chosen"]), (rejected, entry["rejected"])):
        texts, _ = rendered([[*entry["prompt"], *said]], tools=[{"name": "f"}], chat_template=writes.text)
        assert [document.content] == texts
    drops = ChatTemplate("t", "{% for m in messages %}{{ m.role[0] + ':' + (m.content or '') + '|' }}{% endfor %}", ())
    dropped = PreferenceReader(drops)({**entry, "prompt": [USER, answer]}, "here")
    assert (dropped.dropped_calls, dropped.other_texts[0].dropped_calls) == (1, 1)
