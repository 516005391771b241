"""Prompts with completions, and conversations: which tokens are learned, in shards and back, as transformers has it."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from tests.helpers.corpora import call, digest, make, tokens_of
from tests.helpers.loaders import open_loader
from zero.base.errors import UserError
from zero.corpus.preparing import documents
from zero.corpus.preparing.prepare import Corpus
from zero.corpus.preparing.sources.completions import CompletionReader
from zero.corpus.text.chat_template import load_chat_template
from zero.corpus.text.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, train_tokenizer

PAIRS = [{"prompt": f"{i} is {'odd' * (i % 3)}? é", "completion": f" yes, {i}\n" + "no" * (i % 7)} for i in range(30)]
CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\n' }}\n"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}\n"
    "{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}\n"
    "{{- '\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}\n"
)
# Its marks hold the line break behind an answer, as those of TRL's copy for Qwen 3 do.
BROKEN = CHATML.replace("'<|im_end|>' }}{% endgeneration %}", "'<|im_end|>\n' }}{% endgeneration %}")
INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('only users and assistants') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + ' <|im_end|>' }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
BARE = (  # answers whose first and last tokens may be shared with what is beside them
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
SHARED = [
    [{"role": role, "content": f"{text}{i}" if not j else text} for j, (role, text) in enumerate(chat)]
    for i in range(3)
    for chat in [
        [("user", "It"), ("assistant", " is sha"), ("user", "rd")],
        [("user", "It shard "), ("user", " sh"), ("assistant", "ard")],
    ]
]
CHATS = [
    [{"role": "user", "content": f"What is {i}? é<|im_start|>"}, {"role": "assistant", "content": f"It is {i}.\n\n"}]
    for i in range(12)
]
CHATS += [
    [{"role": "user", "content": "One?"}, *CHATS[i][1:], {"role": "user", "content": "shard"}, *CHATS[i - 1][1:]]
    for i in range(12)
]
AGENT = (
    "{%- if tools or messages[0].role == 'system' %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{%- if tools %}{{ '# Tools' }}{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{% endif %}"
    "{{- '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{{ '<call>' + (call.function | tojson) }}{% endfor %}"
    "{{- '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{%- elif message.role == 'tool' %}{{ '<|im_start|>tool\n' + message.content }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- elif message.role == 'user' %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of é", "parameters": WEATHER}}]
CALL = '<call>{"name": "weather", "arguments": {"city": "Málaga 0"}}'
CALLS: list[list[dict[str, Any]]] = [
    [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "What is it?"},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": f"Málaga {i}"}}}],
        },
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "no rain"},
        {"role": "assistant", "content": "Sunny, I think."},
        {"role": "user", "content": "And here?"},
        {"role": "assistant", "content": "Shard."},
    ]
    for i in range(9)
]
TURNS = ("system", "user", "assistant", "tool", "assistant", "user", "assistant")


def json_lines(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def learned_of(index: str, row_tokens: int = 16, vocab_size: int = 1 << 16) -> np.ndarray:
    """All tokens of a split in order; ~t for a token t that is not learned."""
    options: dict[str, Any] = {"shuffle": False, "max_epochs": 1, "only_completions": True}
    loader = open_loader(index, global_rows=1, context=row_tokens, vocab_size=vocab_size, **options)
    tokens = np.concatenate([batch.tokens for batch in loader.batches()]).ravel()
    return np.trim_zeros(tokens + 1, "b") - 1


def documents_of(corpus: Corpus, end: int, vocab_size: int) -> list[tuple[list[int], list[bool]]]:
    """Tokens and which of them are learned, document by document of both splits, sorted."""
    found = []
    for index in (corpus.train_index, corpus.validation_index):
        tokens = learned_of(index, vocab_size=vocab_size)
        if tokens[-1] not in (end, ~end):  # ~0 is written as padding is: the last end was taken for it
            tokens = np.append(tokens, ~end)
        ids = np.maximum(tokens, ~tokens)
        np.testing.assert_array_equal(tokens_of(index, 16).ravel()[: len(ids)], ids)  # what others read is the same
        for part in np.split(np.arange(len(ids)), np.flatnonzero(ids == end) + 1)[:-1]:
            found.append((ids[part].tolist(), (tokens[part] >= 0).tolist()))
    return sorted(found)


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers has it, without a chat template yet."""
    place = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    tokenizer = HFTokenizer.from_buffer(train_tokenizer(["user assistant What is it? It is [INST] shard"] * 9, 300))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", "<bos>")])
    tokenizer.save(str(place))
    return place


def with_template(chat_tokenizer: Path, place: Path, template: str, is_file: bool = False) -> tuple[Tokenizer, Any]:
    """The tokenizer beside a chat template: ours, and that of transformers."""
    place.mkdir()
    config: dict[str, Any] = {"bos_token": {"content": "<bos>"}, "add_bos_token": True, "eos_token": "<|im_end|>"}
    if is_file:
        (place / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    path = place / "tokenizer.json"
    path.write_bytes(chat_tokenizer.read_bytes())
    from transformers import PreTrainedTokenizerFast  # here, as every worker imports every module of tests

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<bos>", eos_token="<|im_end|>")
    theirs.chat_template = template
    return load_tokenizer(str(path)), theirs


def test_what_follows_a_prompt_is_learned(tmp_path: Path):
    """In bytes, where every document is known."""
    corpus = make(json_lines(tmp_path / "a.jsonl", PAIRS), tmp_path, completions=True, pack="joined")
    expected = []
    for pair in PAIRS:
        prompt, completion = (pair[key].encode() for key in ("prompt", "completion"))
        is_learned = [False] * len(prompt) + [True] * (len(completion) + 1)  # the end of text as well
        expected.append(([*prompt, *completion, 0], is_learned))
    assert documents_of(corpus, 0, 256) == sorted(expected)


def test_workers_change_nothing(tmp_path: Path, chat_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of workers and a second call change nothing."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 4000)  # of some 30,000
    source = json_lines(tmp_path / "a.jsonl", PAIRS * 20)
    tokenizer, digests = load_tokenizer(str(chat_tokenizer)), set()
    for workers in (1, 2):
        options: dict[str, Any] = {"tokenizer": tokenizer, "workers": workers, "completions": True}
        make(source, tmp_path / str(workers), **options)
        make(source, tmp_path / str(workers), **options)
        digests.add(digest(tmp_path / str(workers)))
    assert len(digests) == 1
    with pytest.raises(UserError, match=r"was prepared with completions=True, not completions=None"):
        make(source, tmp_path / "1", tokenizer=tokenizer, pack="best-fit")


def test_documents_in_own_rows(tmp_path: Path):
    """Each document is in rows of its own."""
    corpus = make(json_lines(tmp_path / "a.jsonl", PAIRS), tmp_path, completions=True, one_document_per_row=True)
    loader = open_loader(
        corpus.train_index, global_rows=1, context=16, vocab_size=256, shuffle=False, only_completions=True
    )
    row = next(loader.batches()).tokens[0]
    text = bytes(np.maximum(row, ~row).astype(np.uint8)).decode(errors="ignore")
    (pair,) = (pair for pair in PAIRS if (pair["prompt"] + pair["completion"]).startswith(text))
    assert (row < 0).sum() == len(pair["prompt"].encode())


@pytest.mark.parametrize(
    ("template", "is_file", "is_marked"),
    [
        (CHATML, False, True),
        (CHATML, True, True),
        (INST, False, True),
        (BROKEN, False, True),
        (CHATML, False, False),
        (INST, False, False),
        (BARE, False, True),
    ],
)
def test_conversations_are_those_of_transformers(
    tmp_path: Path, chat_tokenizer: Path, template: str, is_file: bool, is_marked: bool
) -> None:
    """Where the template marks answers, and where it does not."""
    ours, theirs = with_template(chat_tokenizer, tmp_path / "chat", template, is_file)
    if not is_marked:
        ours, _ = with_template(chat_tokenizer, tmp_path / "plain", re.sub("{% (end)?generation %}", "", template))
    chats = SHARED if template == BARE else CHATS
    source = json_lines(tmp_path / "a.jsonl", [{"messages": chat} for chat in chats])
    corpus = make(source, tmp_path, tokenizer=ours, completions=True, pack="joined")
    expected = []
    for chat in chats:
        found = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        is_learned = [*map(bool, found["assistant_masks"])]
        # A turn that has ended is not ended again: what divides documents is read only.
        expected.append(([*found["input_ids"], ours.end_of_text], [*is_learned, template == BARE]))
    assert documents_of(corpus, ours.end_of_text, ours.vocab_size) == sorted(expected)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), None], ids=["list", "json", "none"])
def test_tools_are_those_of_transformers(tmp_path: Path, chat_tokenizer: Path, tools: Any) -> None:
    """A system turn, tools of the line, calls and their answers: the masks of TRL's `assistant_only_loss`."""
    ours, theirs = with_template(chat_tokenizer, tmp_path / "chat", AGENT)
    lines = [{"messages": chat, "tools": tools} for chat in CALLS]
    document = CompletionReader(load_chat_template(str(tmp_path / "chat" / "tokenizer.json")))(lines[0], "here")
    assert ("# Tools" in str(document.content)) == (tools is not None) and '{"city": "Málaga 0"}' in document.content
    corpus = make(json_lines(tmp_path / "a.jsonl", lines), tmp_path, tokenizer=ours, completions=True, pack="joined")
    expected = []
    for chat in CALLS:
        given: dict[str, Any] = {"tools": tools and TOOLS, "return_dict": True, "return_assistant_tokens_mask": True}
        found = theirs.apply_chat_template(chat, **given)
        assert 0 < sum(found["assistant_masks"]) < len(found["input_ids"])
        is_learned = [*map(bool, found["assistant_masks"]), False]
        expected.append(([*found["input_ids"], ours.end_of_text], is_learned))
    assert documents_of(corpus, ours.end_of_text, ours.vocab_size) == sorted(expected)


def test_turns_are_never_cut(tmp_path: Path, chat_tokenizer: Path) -> None:
    """A long conversation ends behind its last answer that fits; one whose first is too long is left out."""
    ours, theirs = with_template(chat_tokenizer, tmp_path / "chat", CHATML)
    two = CHATS[15]
    short = [[two[0], {"role": "assistant", "content": str(number)}] for number in range(4)]
    long = [two[0], {"role": "assistant", "content": "shard " * 40}]
    ids = theirs.apply_chat_template(two[:2], return_dict=True, return_assistant_tokens_mask=True)
    kept = [int(i) for i in np.trim_zeros(np.multiply(ids["assistant_masks"], np.arange(len(ids["input_ids"]))), "b")]
    row = len(kept) + 3
    options: dict[str, Any] = {"completions": True, "one_document_per_row": True, "row_tokens": row}
    lines = [{"messages": chat} for chat in [two, long, *short]]
    corpus = make(json_lines(tmp_path / "a.jsonl", lines), tmp_path, tokenizer=ours, cut_documents=True, **options)
    assert (corpus.cut, corpus.long, corpus.train.documents + corpus.validation.documents) == (1, 1, 5)
    rows = [learned_of(index, row).reshape(-1) for index in (corpus.train_index, corpus.validation_index)]
    expected = np.where(ids["assistant_masks"], ids["input_ids"], ~np.array(ids["input_ids"]))[: len(kept)]
    text = " ".join(map(str, np.concatenate(rows)))
    assert " ".join(map(str, expected)) in text
    with pytest.raises(UserError, match="documents have a first completion of more tokens than --row-tokens"):
        few = json_lines(tmp_path / "b.jsonl", [{"messages": long}] * 2)
        make(few, tmp_path, "few", tokenizer=ours, cut_documents=True, **options)


@pytest.mark.parametrize(
    ("roles", "learned"),
    [
        (("assistant",), ["{}<|im_end|>\n", "Sunny, I think.<|im_end|>\n"]),
        (("user",), ["<|im_start|>user\nAnd here?<|im_end|>\n"]),
        (("tool",), ["<|im_start|>tool\nsun<|im_start|>tool\nno rain<|im_end|>\n"]),
        (("system", "tool"), ["be short", "sun<|im_start|>tool\nno rain<|im_end|>\n"]),
    ],
)
@pytest.mark.parametrize("is_marked", [True, False])
def test_roles_are_learned(
    tmp_path: Path, chat_tokenizer: Path, roles: tuple[str, ...], learned: list[str], is_marked: bool
) -> None:
    """The turns of the given roles are learned, those of others than the assistant with their headers."""
    template = AGENT if is_marked else re.sub("{% (end)?generation %}", "", AGENT)
    with_template(chat_tokenizer, tmp_path / "chat", template)
    read = CompletionReader(load_chat_template(str(tmp_path / "chat" / "tokenizer.json")), roles)
    document = read({"messages": CALLS[0]}, "here")
    spans = document.completions
    assert spans and len(spans) == sum(role in roles for role in TURNS)
    found = "".join(str(document.content)[start:stop] for start, stop in spans)
    for part in learned:
        assert part.format(CALL) in (found if not is_marked else found.replace("<|im_end|>", "<|im_end|>\n"))
    others = {"assistant": "Sunny, I", "user": "And here", "tool": "no rain", "system": "be short"}
    assert [role for role, text in others.items() if text in found] == [role for role in others if role in roles]


def test_mistakes_in_messages_are_named(tmp_path: Path, chat_tokenizer: Path) -> None:
    """The file, the line, the key and the place in it."""
    tokenizer, _ = with_template(chat_tokenizer, tmp_path / "chat", AGENT)
    for entry, roles, message in [
        (
            {"messages": [{"content": "a"}]},
            "assistant",
            r'a.jsonl, line 2: messages\[0\]: expected .*"role"; found content',
        ),
        ({"messages": ["a"]}, "assistant", r'line 2: messages\[0\]: expected an object with a "role"; found str'),
        (
            {"messages": [*CHATS[0], {"role": "assistant", "tool_calls": {"name": "f"}}]},
            "assistant",
            r'line 2: messages\[2\].tool_calls: expected a list of objects; found {"name": "f"}',
        ),
        ({"messages": CHATS[0], "tools": "[1"}, "assistant", "line 2: tools: expected a list, or the JSON of one: "),
        (
            {"messages": CHATS[0], "tools": ["f"]},
            "assistant",
            r'line 2: tools: expected a list of objects; found \["f"\]',
        ),
        ({"messages": CHATS[0]}, "tool,system", 'line 2: no message has the role "tool" or "system"'),
    ]:
        source = json_lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}, entry])
        with pytest.raises(UserError, match=message):
            make(
                source, tmp_path, tokenizer=tokenizer, completions=True, pack="joined", loss_on=tuple(roles.split(","))
            )
    with pytest.raises(UserError, match="--loss-on tool requires --completions"):
        make(source, tmp_path, tokenizer=tokenizer, loss_on=("tool",))


def test_what_cannot_be_learned_is_named(tmp_path: Path, chat_tokenizer: Path):
    chat, path = {"messages": CHATS[0]}, tmp_path / "a.jsonl"
    tokenizer, _ = with_template(chat_tokenizer, tmp_path / "chat", INST)
    last = "{% for i in range(messages | length) %}{{ messages[i].content }}{% if loop.last %}!{% endif %}{% endfor %}"
    other, _ = with_template(chat_tokenizer, tmp_path / "other", last)
    twice = "{% for m in messages %}{{ m.content + '<|endoftext|><|im_end|>' }}{% endfor %}"
    ended, _ = with_template(chat_tokenizer, tmp_path / "ended", twice)
    system = {"messages": [{"role": "system", "content": "be short"}, *CHATS[0]]}
    for entry, own, message in [
        ({"prompt": "a"}, tokenizer, 'line 2: expected "prompt" and "completion", both strings .*; found prompt'),
        ([1], tokenizer, 'line 2: expected "prompt" and .*; found no object'),
        ({**PAIRS[0], "label": True}, tokenizer, 'line 2: "label" says which completions are desirable'),
        ({"instruction": "a", "input": "", "output": "b"}, tokenizer, "line 2: Alpaca lines do not say how"),
        (
            {"conversations": [{"from": "observation", "value": "a"}]},
            tokenizer,
            r"line 2: conversations\[0\] is from 'observation'; expected human, user, gpt, assistant, system",
        ),
        (chat, load_tokenizer(str(chat_tokenizer)), "line 2: messages need a chat template"),
        (chat, ByteTokenizer(), "line 2: messages need a chat template"),
        (system, tokenizer, "line 2: .*cannot render these messages: only users and assistants"),
        ({"messages": CHATS[0][:1]}, tokenizer, 'line 2: no message has the role "assistant"'),
        ({"messages": CHATS[-1]}, other, "line 2: .*renders message 1 differently .*, and message 0 outside of"),
        (chat, ended, r"line 2: its text contains token 287, .*--one-document-per-row accepts it"),
    ]:
        json_lines(path, [PAIRS[0], entry])
        with pytest.raises(UserError, match=message):
            make(path, tmp_path, tokenizer=own, completions=True, pack="joined")
    make(path, tmp_path, tokenizer=ended, completions=True, one_document_per_row=True)
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(UserError, match=r"b\.txt: expected JSON lines"):
        make(tmp_path / "b.txt", tmp_path, completions=True, pack="joined")


def test_the_command(tmp_path: Path):
    source = json_lines(tmp_path / "a.jsonl", PAIRS)
    places = ("--directory", tmp_path / "corpus", "--index-directory", tmp_path / "index")
    done = call(source, "--completions", "--row-tokens", "16", *places)
    assert done.returncode == 0, done.stderr
    assert (learned_of(str(tmp_path / "index" / "a_train.index")) < 0).any()


def test_cut_conversations_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents with rows of their own: how often one is longer than a row."""
    lines = [{"prompt": "a" * 20, "completion": "b" * length} for length in (4, 11, 12, 40)]
    corpus = make(json_lines(tmp_path / "a.jsonl", lines * 9), tmp_path, completions=True, one_document_per_row=True)
    found = corpus.train.truncations + corpus.validation.truncations
    assert found == 9 * (1 + 1 + 2 + 3)  # rows of 16 tokens, an end behind each


def test_default_template(tmp_path: Path, chat_tokenizer: Path):
    """Of several templates the default one is taken."""
    with_template(chat_tokenizer, tmp_path / "chat", INST)
    config = tmp_path / "chat" / "tokenizer_config.json"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": several}))
    template = load_chat_template(str(tmp_path / "chat" / "tokenizer.json"))
    assert template and template.special_tokens == (("bos_token", "<bos>"), ("eos_token", "<|im_end|>"))
    document = CompletionReader(template)({"prompt": "a", "completion": "b"}, "here")
    assert document.content == "ab" and template.render(CHATS[0], False) == CHATS[0][0]["content"]


def test_lines_of_other_programs(tmp_path: Path, chat_tokenizer: Path) -> None:
    """ShareGPT's conversations, and messages under "prompt" and "completion", are the chats that they stand for."""
    tokenizer, _ = with_template(chat_tokenizer, tmp_path / "chat", CHATML)
    speakers = {"user": "human", "assistant": "gpt"}
    lines = {
        "messages": [{"messages": chat} for chat in CHATS],
        "sharegpt": [
            {"conversations": [{"from": speakers[turn["role"]], "value": turn["content"]} for turn in chat]}
            for chat in CHATS
        ],
        "answers": [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS],
    }
    found = {}
    for name, entries in lines.items():
        source = json_lines(tmp_path / f"{name}.jsonl", entries)
        corpus = make(source, tmp_path, name, tokenizer=tokenizer, completions=True, pack="joined")
        found[name] = documents_of(corpus, tokenizer.end_of_text, tokenizer.vocab_size)
    assert found["sharegpt"] == found["messages"]
    assert [ids for ids, _ in found["answers"]] == [ids for ids, _ in found["messages"]]
    texts = {tokenizer.decode(np.asarray(ids)[is_learned]) for ids, is_learned in found["answers"]}
    assert texts == {f"{chat[-1]['content']}<|im_end|>\n" for chat in CHATS}  # the last answer only


def test_no_documents_for_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--validation-fraction 0` sets none aside; equal documents cannot be divided."""
    places = ("--directory", tmp_path / "corpus", "--index-directory", tmp_path / "index", "--row-tokens", "16")
    source = json_lines(tmp_path / "a.jsonl", PAIRS[:1] * 9)
    done = call(source, "--completions", *places)
    assert done.returncode == 2 and "holds only equal documents" in done.stderr
    done = call(source, "--completions", "--validation-fraction", "0", *places)
    assert done.returncode == 0 and "data.index_path_validation=null" in done.stdout, done.stderr
    assert not (tmp_path / "index" / "a_validation.index").exists()
    assert learned_of(str(tmp_path / "index" / "a_train.index")).size
    again = call(source, "--completions", "--validation-fraction", "0", *places)
    assert again.returncode == 0 and again.stdout == done.stdout


def test_calls_and_variables_of_the_command(tmp_path: Path, chat_tokenizer: Path) -> None:
    """Tool calls that the template leaves out are counted; its variables are recorded."""
    with_template(chat_tokenizer, tmp_path / "chat", CHATML.replace("message.content", "message.content or name"))
    places = ("--directory", tmp_path / "corpus", "--index-directory", tmp_path / "index", "--row-tokens", "16")
    options = ("--completions", "--tokenizer", tmp_path / "chat" / "tokenizer.json", *places)
    lines = [{"messages": [{"role": "user", "content": str(i)}, *chat]} for i, chat in enumerate(CALLS)]
    source = json_lines(tmp_path / "a.jsonl", lines)
    done = call(source, *options, "--template-variables", '{"name": "Al"}')
    assert done.returncode == 0, done.stderr
    assert "9 messages have tool calls that the chat template does not write" in done.stdout
    assert "was prepared with " in call(source, *options, "--template-variables", '{"name": "Bo"}').stderr
    assert "expected a JSON object" in call(source, *options, "--template-variables", "name").stderr
