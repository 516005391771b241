"""Published chat templates, as TRL ships them: their answers are found, and are those that TRL marks.

For each template TRL has a copy with `{% generation %}` marks. Where both render the same text, zero learns from the
unmarked one what TRL learns, less what the generation prompt has written already.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import trl

from tests.helpers.brought import save_tokenizer
from zero.base.errors import Unavailable, UserError
from zero.corpus.preparing.documents import read_entry
from zero.corpus.preparing.sources.completions import CompletionReader
from zero.corpus.preparing.sources.conversations import dropped_calls, learned_spans
from zero.corpus.text import chat_template
from zero.corpus.text.chat_template import ChatTemplate

FOLDER = Path(trl.__file__).parent / "chat_templates"
SPECIAL = (("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<pad>"), ("unk_token", "<unk>"))
EMPTY = "<think>\n\n</think>\n\n"  # Qwen's thoughts of an answer without any


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


FUNCTION: dict[str, Any] = {"name": "weather", "arguments": {"city": "X"}}
CALL = assistant("", tool_calls=[{"type": "function", "id": "abcdefghi", "function": FUNCTION}])
TOOL = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "T1"}
THOUGHTS = [{"reasoning_content": f"R{i}", "thinking": f"R{i}"} for i in (1, 2)]
CHATS = {
    "one": [user("Q1"), assistant("A1 <b>")],
    "several": [user("Q1"), assistant("<A1> b"), user("Q2"), assistant("A2")],
    "tools": [user("Q1"), assistant("A1"), user("Q2"), CALL, TOOL, assistant("A3")],
    "reasoning": [user("Q1"), assistant("A1", **THOUGHTS[0]), user("Q2"), assistant("A2", **THOUGHTS[1])],
}
# Not GLM 4's, whose answers end with the header of the next turn, nor those for images.
FAMILIES = [
    *("cohere", "cohere2", "deepseekv3", "gemma", "gemma3", "gptoss", "lfm2_v2", "llama3", "muse_glimmer"),
    *("nemotron_3_nano", "phi3", "phi3_5", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
    *("qwen3_8", "qwen3_instruct_2507"),
]
# Templates that end in an error for tools or, of Phi 3, do not write what a tool says.
WITHOUT_TOOLS = ("cohere", "cohere2", "gemma", "gemma3", "phi3", "phi3_5")


def template(name: str) -> ChatTemplate:
    return ChatTemplate(name, (FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), SPECIAL, None, 0.0)


def answers(name: str, chat: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The text of a conversation, and each answer in it; the last line break of a span does not matter."""
    of_name = template(name)
    text = of_name.render(chat, add_generation_prompt=False)
    spans: list[tuple[int, int]] = []
    for start, stop in learned_spans(text, chat, None, of_name, ("assistant",)):
        if spans and spans[-1][1] == start:  # of one answer
            start = spans.pop()[0]
        spans.append((start, stop))
    return text, [text[start:stop].rstrip("\n") for start, stop in spans]


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_trl(name: str, kind: str) -> None:
    chat = CHATS[kind]
    if kind == "tools" and name == "deepseekv3":  # it writes the arguments as they are
        function = {**FUNCTION, "arguments": json.dumps(FUNCTION["arguments"])}
        chat = [*chat[:3], assistant("", tool_calls=[{"type": "function", "function": function}]), *chat[4:]]
    if kind == "tools" and name in WITHOUT_TOOLS:
        with pytest.raises(UserError, match=r"cannot render these messages|message 4 outside of its loop"):
            answers(name, chat)
        return
    text, ours = answers(name, chat)
    of_training, theirs = answers(f"{name}_training", chat)
    assert len(ours) == len(theirs) == sum(message["role"] == "assistant" for message in chat)
    first = next(i for i, message in enumerate(chat) if message["role"] == "assistant")
    asking = template(name).render(chat[:first], add_generation_prompt=True)
    if text != of_training:  # TRL's copy writes thoughts before earlier answers, too
        assert name.startswith("qwen3") or (name, kind) == ("deepseekv3", "tools")
        ours, theirs = ours[-1:], theirs[-1:]
    for answer, marked in zip(ours, theirs, strict=True):
        header = marked.removesuffix(answer)
        assert header + answer == marked
        assert header in asking or header == "<｜tool▁outputs▁end｜>", (header, answer)


def test_qwen_3_looks_ahead() -> None:
    """Its template writes no thoughts before an answer that a question follows: refused before, by message 1."""
    assert answers("qwen3", CHATS["several"])[1] == ["<A1> b<|im_end|>", f"{EMPTY}A2<|im_end|>"]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "X"}}\n</tool_call><|im_end|>'
    assert answers("qwen3", CHATS["tools"])[1] == ["A1<|im_end|>", call, f"{EMPTY}A3<|im_end|>"]
    thoughts = "<think>\nR2\n</think>\n\nA2<|im_end|>"
    assert answers("qwen3", CHATS["reasoning"])[1] == ["A1<|im_end|>", thoughts]


def test_a_renderer_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a machine without memory, between two requests or within an answer: no message is called broken for it."""
    qwen = template("qwen3")
    text = qwen.render(CHATS["one"], False)
    renderer = chat_template._renderer
    answer = chat_template._Renderer._answer
    left = 1

    def killed(self: Any, line: str) -> str:
        nonlocal left
        whole = answer(self, line)
        if left == 0:
            return whole
        left -= 1
        self._process.kill()
        return whole[:10]

    assert renderer._process is not None
    renderer._process.kill()
    assert qwen.render(CHATS["one"], False) == text
    monkeypatch.setattr(chat_template._Renderer, "_answer", killed)
    assert qwen.render(CHATS["one"], False) == text and left == 0
    left = 2
    with pytest.raises(Unavailable, match=r"^here: the process of chat templates was killed 2 times"):
        read_entry(CompletionReader(qwen), {"messages": CHATS["one"]}, "here")


def test_variables() -> None:
    """Of the template, and of a line; those of the messages are refused."""
    qwen = template("qwen3")
    silent = qwen.with_variables({"enable_thinking": False})
    question = CHATS["one"][:1]
    assert silent.render(question, True) == qwen.render(question, True) + EMPTY
    assert silent.digest != qwen.digest == qwen.with_variables({}).digest
    reader = CompletionReader(qwen)
    document = reader({"messages": CHATS["one"], "chat_template_kwargs": {"enable_thinking": False}}, "here")
    (span,) = document.completions or ()
    assert isinstance(document.content, str) and document.content[slice(*span)] == "A1 <b><|im_end|>\n"
    with pytest.raises(UserError, match="template variables: messages comes from"):
        qwen.with_variables({"messages": 1})
    with pytest.raises(UserError, match=r"here: chat_template_kwargs: expected an object; found \[1\]"):
        reader({"messages": CHATS["one"], "chat_template_kwargs": [1]}, "here")


def test_calls_that_a_template_leaves_out() -> None:
    for name, count in (("qwen3", 0), ("gptoss", 0), ("llama3", 1), ("lfm2", 1)):
        of_name = template(name)
        text = of_name.render(CHATS["tools"], add_generation_prompt=False)
        assert dropped_calls(text, CHATS["tools"], None, of_name) == count


# With the constructs of SmolLM 3's: a mode of reasoning by a variable or by the system message, a system block that
# is always written, with the date, tools by a variable of the template's own, and what a tool says as a user's turn.
BY_MODE = r"""
{%- set mode = "quick" if enable_thinking is defined and not enable_thinking else "slow" %}
{{- "<|im_start|>system\n" }}
{%- if messages[0].role == "system" %}
    {%- set rules = messages[0].content %}
    {%- if "/quick" in rules %}{% set mode = "quick" %}{% endif %}
    {%- set rules = rules.replace("/quick", "").rstrip() %}
{%- endif %}
{{- "Date: " + strftime_now("%d %B %Y") + "\nMode: " + mode + "\n\n" }}
{{- (rules if rules else "Think first." if mode == "slow" else "Answer.") + "\n" }}
{%- if xml_tools is defined %}
    {%- set listed = namespace(text="<tools>\n") %}
    {%- for tool in xml_tools %}{% set listed.text = listed.text + (tool | string) + "\n" %}{% endfor %}
    {{- listed.text + "</tools>\n" }}
{%- endif %}
{{- "<|im_end|>\n" }}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else "" %}
    {%- if message.role in ("user", "tool") %}
        {{- "<|im_start|>user\n" + content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" %}
        BEGIN
        {%- if mode == "slow" %}
            {{- "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else %}
            {{- "<|im_start|>assistant\n<think>\n\n</think>\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- endif %}
        END
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" + ("" if mode == "slow" else "<think>\n\n</think>\n") }}
{%- endif %}"""
MARKED = BY_MODE.replace("BEGIN", "{%- generation %}").replace("END", "{%- endgeneration %}")
PLAIN = BY_MODE.replace("        BEGIN\n", "").replace("        END\n", "")
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


BY_TURN: dict[str, dict[str, Any]] = {
    "several": {"messages": CHATS["several"]},
    "system": {"messages": [system("R"), *CHATS["several"]]},
    "quick": {"messages": [system("R /quick"), *CHATS["several"]]},
    "calls": {"messages": CHATS["tools"]},
    "tools": {"messages": [system("R"), *CHATS["tools"]], "tools": TOOLS},
    "reasoning": {"messages": CHATS["reasoning"], "chat_template_kwargs": {"enable_thinking": False}},
    "own tools": {"messages": CHATS["several"], "chat_template_kwargs": {"xml_tools": TOOLS}},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of transformers, with the special tokens of SmolLM 3."""
    import transformers

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, "smollm3")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", BY_TURN)
@pytest.mark.parametrize("name", ["llama4", "by mode"])
def test_answers_are_completions_of_trl(name: str, kind: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer of a conversation is what TRL learns of it as the completion of all messages before it."""
    from transformers.models.llama4 import processing_llama4

    text = processing_llama4.chat_template if name == "llama4" else PLAIN
    line = BY_TURN[kind]
    chat = line["messages"]
    variables = line.get("chat_template_kwargs", {})
    monkeypatch.setattr(tokenizer, "chat_template", text)
    expected = []
    for i, message in enumerate(chat):
        if message["role"] == "assistant":
            example = {**line, "prompt": chat[:i], "completion": [message]}
            del example["messages"]
            expected.append(trl.apply_chat_template(example, tokenizer)["completion"])
    special = tuple(tokenizer.special_tokens_map.items())
    document = CompletionReader(ChatTemplate(name, text, special, None, time.time()))(line, "here")
    assert isinstance(document.content, str)
    assert document.content == tokenizer.apply_chat_template(chat, tools=line.get("tools"), tokenize=False, **variables)
    assert [document.content[slice(*span)] for span in document.completions or ()] == expected


@pytest.mark.parametrize("kind", BY_TURN)
def test_marks_with_headers(kind: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that marks its answers together with their headers: the tokens that TRL learns by its mask."""
    monkeypatch.setattr(tokenizer, "chat_template", MARKED)
    line = BY_TURN[kind]
    encoded = tokenizer.apply_chat_template(
        line["messages"],
        tools=line.get("tools"),
        return_assistant_tokens_mask=True,
        return_dict=True,
        **line.get("chat_template_kwargs", {}),
    )
    document = CompletionReader(ChatTemplate("marked", MARKED, SPECIAL, None, time.time()))(line, "here")
    assert document.is_exact and isinstance(document.content, str)
    learned = "".join(document.content[slice(*span)] for span in document.completions or ())
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert learned == tokenizer.decode([token for token, is_learned in pairs if is_learned])
    assert learned.count("<|im_start|>assistant\n") == sum(
        message["role"] == "assistant" for message in line["messages"]
    )
