"""Each key of a record is read, refused by name, or named as not read; and no record ends in a traceback."""

import json
import random
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from docs.print_reference import records_page
from tests.helpers import sources
from tests.helpers.corpora import call
from zero.corpus.preparing.documents import Document, TextReader, as_text, read_entry
from zero.corpus.preparing.sources.completions import CompletionReader
from zero.corpus.preparing.sources.conversations import MARKS, MESSAGE, SYSTEM_KEYS, VARIABLES
from zero.corpus.preparing.sources.labels import LabelReader
from zero.corpus.preparing.sources.preferences import PreferenceReader
from zero.corpus.preparing.sources.record_keys import RecordKeys, is_empty
from zero.corpus.text.chat_template import ChatTemplate

LOOP = "{% for m in messages %}{{ m.role + ':' + (m.content or m.thoughts) + '|' }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}assistant:{% endif %}"
PLAIN = ChatTemplate("template", LOOP + ASKS, ())
MARKED = ChatTemplate(
    "template",
    "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '|' }}"
    "{% endgeneration %}{% else %}{{ m.content + '|' }}{% endif %}{% endfor %}" + ASKS,
    (),
)
ASK = {"role": "user", "content": "What?"}
YES = {"role": "assistant", "content": "yes"}
NO = {"role": "assistant", "content": "no"}
TURNS = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "yes"}]
RECORDS: dict[str, tuple[CompletionReader | PreferenceReader | LabelReader, RecordKeys, dict[str, Any]]] = {
    "completion": (CompletionReader(PLAIN), CompletionReader.FORMS[0], {"prompt": "a", "completion": "b"}),
    "answer": (CompletionReader(PLAIN), CompletionReader.FORMS[1], {"prompt": [ASK], "completion": [YES]}),
    "chat": (CompletionReader(PLAIN), CompletionReader.FORMS[2], {"messages": [ASK, YES]}),
    "ShareGPT": (CompletionReader(PLAIN), CompletionReader.FORMS[3], {"conversations": TURNS}),
    "pair": (PreferenceReader(PLAIN), PreferenceReader.FORMS[0], {"prompt": "a", "chosen": "b", "rejected": "c"}),
    "chats": (PreferenceReader(PLAIN), PreferenceReader.FORMS[1], {"chosen": [ASK, YES], "rejected": [ASK, NO]}),
    "label": (LabelReader(PLAIN), LabelReader.FORMS[0], {"prompt": "a", "completion": "b", "label": True}),
    "labeled chat": (LabelReader(PLAIN), LabelReader.FORMS[1], {"prompt": [ASK], "completion": [YES], "label": True}),
}
VALUES = {"label": False, "kto_tag": True, "weight": 0.5, "sample_weight": 0, "margin": 1.5}  # else "x"


def texts(document: Document) -> list[tuple[Any, Any]]:
    return [(text.content, text.completions) for text in (document, *document.other_texts)]


def learned(document: Document) -> list[str]:
    return [str(document.content)[start:stop] for start, stop in document.completions or ()]


def record_of(name: str, **more: Any) -> Document:
    reader, _, record = RECORDS[name]
    return read_entry(reader, {**record, **more}, "a.jsonl, line 7")


@pytest.mark.parametrize("name", RECORDS)
def test_refused_keys_are_named(name: str) -> None:
    """With the file, the line, the value and what to do; an empty value says nothing."""
    plain = record_of(name)
    assert not plain.problem
    for key, remedy in RECORDS[name][1].refused.items():
        value = VALUES.get(key, "x")
        document = record_of(name, **{key: value})
        assert key in document.problem.replace("label", key) and remedy in document.problem
        assert document.problem.startswith("a.jsonl, line 7: ")
        nothing: list[Any] = [None, "", [], {}]
        for empty in nothing:
            if key != "label":  # a label is a label
                assert record_of(name, **{key: empty}) == plain
    if "weight" in RECORDS[name][1].refused:
        assert record_of(name, weight=1) == plain


@pytest.mark.parametrize("name", RECORDS)
def test_other_keys_are_named_as_not_read(name: str) -> None:
    document = record_of(
        name, url="http://a.b", id=5, **({} if "chat" in name or name == "ShareGPT" else {"messages": [NO]})
    )
    assert document.unread[:2] == ("url", "id") and texts(document) == texts(record_of(name))


@pytest.mark.parametrize("key", SYSTEM_KEYS)
@pytest.mark.parametrize("name", ["answer", "chat", "ShareGPT", "chats", "labeled chat"])
def test_system_texts_are_obeyed(name: str, key: str) -> None:
    """As a first message, which the template has to write."""
    for content, text in zip(texts(record_of(name, **{key: "Be short."})), texts(record_of(name)), strict=True):
        assert content[0] == f"system:Be short.|{text[0]}"
        assert content[1] == tuple((start + 17, stop + 17) for start, stop in text[1])
    other = "system_prompt" if key == "system" else "system"
    assert "hold different system texts: keep one" in record_of(name, **{key: "Be short.", other: "No."}).problem
    assert "expected a string" in record_of(name, **{key: 5}).problem
    silent = ChatTemplate(
        "template",
        LOOP.replace("%}{{", "%}{% if m.role != 'system' %}{{", 1).replace("}}{% endfor", "}}{% endif %}{% endfor")
        + ASKS,
        (),
    )
    reader, _, record = RECORDS[name]
    document = read_entry(type(reader)(silent), {**record, key: "Be short."}, "here")
    assert "template writes no system text, and the line has one under" in document.problem


def test_two_system_texts_have_to_agree() -> None:
    said = [{"role": "system", "content": "Be short."}, ASK, YES]
    assert not record_of("chat", messages=said, system="Be short.").problem
    assert "hold different system texts: keep one" in record_of("chat", messages=said, system="No.").problem


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("mark", MARKS)
def test_marks_are_obeyed(template: ChatTemplate, mark: str) -> None:
    """A message of weight 0 is read and not learned, whether the template marks answers or not."""
    turns = [ASK, {**NO, mark: 0}, ASK, {**YES, mark: 1}]
    read = CompletionReader(template)
    document = read_entry(read, {"messages": turns}, "here")
    assert learned(document) == ["yes|"] and document.content == "user:What?|assistant:no|user:What?|assistant:yes|"
    assert learned(read_entry(read, {"messages": [ASK, NO, ASK, YES]}, "here")) == ["no|", "yes|"]
    shares = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "no", mark: False}, *TURNS]
    assert learned(read_entry(read, {"conversations": shares}, "here")) == ["yes|"]


@pytest.mark.parametrize(
    ("messages", "roles", "problem"),
    [
        ([ASK, {**YES, "weight": 0.5}], ("assistant",), r"messages[1].weight is 0.5; expected 0 or 1"),
        ([ASK, {**YES, "train": "no"}], ("assistant",), r'messages[1].train is "no"; expected 0 or 1'),
        ([ASK, {**YES, "weight": 0, "train": True}], ("assistant",), "messages[1]: weight and train contradict"),
        ([ASK, {**YES, "weight": 0}], ("assistant",), "all messages are marked not to be learned"),
        ([{**ASK, "train": True}, YES], ("assistant",), 'messages[0] is marked to be learned, and --loss-on does not'),
        ([{**ASK, "train": False}, ASK, YES], ("user",), 'neighboring messages of the role "user" are one turn'),
        ([ASK, {**YES, "train_detail": [{"begin_offset": 0}]}], ("assistant",), '"messages.train_detail" is'),
        ([{**ASK, "images": ["a.png"]}, YES], ("assistant",), '"messages.images" is ["a.png"]: zero learns text alone'),
        ([{"role": "user", "content": 5}, YES], ("assistant",), "messages[0].content is a number; expected a string"),
        ([{"role": "user", "content": None}, YES], ("assistant",), "[0].content is null; expected"),
        ([ASK, {"role": "assistant"}], ("assistant",), "messages[1].content is null; expected a string"),
        ([{"role": "user", "content": ["a"]}, YES], ("assistant",), "content is a list, which template does not"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, YES],
            ("assistant",),
            'messages[0].content has a part of the type "image"',
        ),
    ],
)  # fmt: skip
def test_messages_are_refused(messages: list[Any], roles: tuple[str, ...], problem: str) -> None:
    document = read_entry(CompletionReader(PLAIN, roles), {"messages": messages}, "a.jsonl, line 7")
    assert document.problem.startswith("a.jsonl, line 7: ") and problem in document.problem


def test_contents_that_the_template_writes() -> None:
    """A list of texts where the template writes lists; thoughts without a content."""
    template = ChatTemplate(
        "t", "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}", ()
    )
    parts = [[{"type": "text", "text": text}] for text in ("What?", "yes")]
    messages = [{"role": "user", "content": parts[0]}, {"role": "assistant", "content": parts[1]}]
    assert read_entry(CompletionReader(template), {"messages": messages}, "here").content == "What?;yes;"
    printed = ChatTemplate("t", "{% for m in messages %}{{ m.content }};{% endfor %}", ())
    problem = read_entry(CompletionReader(printed), {"messages": messages}, "here").problem
    assert "messages[0].content is a list, which t does not write: join its texts to one string" in problem
    thinks = {"role": "assistant", "thoughts": "hm"}
    assert learned(record_of("chat", messages=[ASK, thinks])) == ["hm|"]
    assert record_of("chat", messages=[ASK, {**YES, "reasoning": "hm", "thoughts": "hm"}]).unread == (
        "messages.reasoning",
    )


def test_notes_of_the_command(tmp_path: Path) -> None:
    """One line for a corpus of any format, shuffled and in parts too."""
    entries = [{"id": number, "text": f"text {number}", "url": "a"} for number in range(60)]
    lines = "".join(
        json.dumps({key: entry[key] for key in list(entry)[number % 2 :]}) + "\n"
        for number, entry in enumerate(entries)
    )
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.parquet").write_bytes(
        sources.parquet_bytes({key: [entry[key] for entry in entries] for key in ("text", "url", "id")})
    )
    places = ("--directory", tmp_path / "c", "--index-directory", tmp_path / "i", "--row-tokens", "16")
    assert "keys not read: url, id\n" in call(tmp_path / "a.jsonl", *places).stdout
    assert "keys not read: id, url\n" in call(tmp_path / "b.parquet", *places).stdout
    parts = ("--part-bytes", "900", "--shuffle", "--name", "parts")
    assert "keys not read: url, id\n" in call(tmp_path / "a.jsonl", *places, *parts).stdout
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": entry["text"]}) + "\n" for entry in entries))
    assert "not read" not in call(tmp_path / "d.jsonl", *places).stdout


def test_reference() -> None:
    """The page is printed from the tables of the readers."""
    page = Path(__file__).parents[4] / "docs" / "reference" / "records.md"
    assert page.read_text() == records_page()


def random_value(rng: random.Random, depth: int = 0) -> Any:
    simple = [
        None,
        True,
        False,
        0,
        1,
        0.5,
        float("nan"),
        "",
        "x",
        "\ud83d",
        b"\xff",
        b"x",
        date(2020, 1, 1),
        Decimal(1),
    ]
    if depth > 3 or rng.random() < 0.5:
        return rng.choice(simple)
    if rng.random() < 0.5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    keys = rng.choices([*MESSAGE.read, *MESSAGE.refused, "from", "value", "type", "text", "x"], k=rng.randrange(4))
    return {key: random_value(rng, depth + 1) for key in keys}


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """All containers within a value, each with a key."""
    found: list[tuple[Any, Any]] = []
    for key, item in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
        found.append((value, key))
        if isinstance(item, dict | list):
            found += places_of(item)
    return found


def check_record(rng: random.Random, name: str) -> None:
    """A record with a key more, or a value changed, at any depth."""
    reader, form, record = RECORDS[name]
    entry = json.loads(json.dumps(record))
    key = rng.choice([*form.read, *form.refused, *SYSTEM_KEYS, *MARKS, "url", "text", "messages", "tools", VARIABLES])
    value = random_value(rng)
    is_more = rng.random() < 0.5
    if is_more:
        entry[key] = value
    else:
        container, place = rng.choice(places_of(entry))
        container[place] = value
    document = read_entry(reader, as_text(entry), "a.jsonl, line 7")
    assert isinstance(document, Document)
    assert not document.problem or document.problem.startswith("a.jsonl, line 7")
    if is_more and key not in form.read and not document.problem:
        said_nothing = is_empty(as_text(value)) or (key in form.refused and value == 1)
        assert key in document.unread or (key in form.refused and said_nothing), (key, value)


@pytest.mark.parametrize("name", RECORDS)
def test_random_records(name: str) -> None:
    for seed in range(60):
        check_record(random.Random(f"{name} {seed}"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_many_random_records(name: str) -> None:
    for seed in range(60, 4000):
        check_record(random.Random(f"{name} {seed}"), name)


@pytest.mark.parametrize("make", [lambda rng: random_value(rng), lambda rng: {"text": random_value(rng), "url": 1}])
def test_random_texts(make: Callable[[random.Random], Any]) -> None:
    for seed in range(200):
        entry = as_text(make(random.Random(seed)))
        document = read_entry(TextReader("text"), entry, "a.jsonl, line 7")
        if not document.problem:
            assert document.unread == tuple(key for key in entry if key != "text")
