"""Chat templates: how a tokenizer spells a conversation, rendered as transformers renders it."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero.base.errors import Unavailable, UserError, first_line
from zero.corpus.text.special_tokens import TEMPLATE, TOKENIZER_CONFIG, TokenizerFiles
from zero.files import storage
from zero.files.parsing import reading

DATE = "SOURCE_DATE_EPOCH"  # the environment variable of reproducible builds: seconds since 1970
_VARIABLES = ("messages", "add_generation_prompt", "tools", "documents")  # that every template is given
RENDERER = Path(__file__).with_name("chat_renderer.py")
ATTEMPTS = 2  # at a request whose process is killed from outside


@dataclass(frozen=True)
class ChatTemplate:
    """How a tokenizer spells a conversation: its Jinja template, rendered as transformers renders it.

    A template has no clock but the one it is given, so that the same conversation is always the same text.

    Attributes:
      path: of its file, for errors.
      text: the template.
      special_tokens: such as ("bos_token", "<s>").
      with_tools: the template of conversations with tools, where that is another one.
      date: seconds since 1970 for templates that write the date (`strftime_now`); None: they do without, or fail.
      variables: template variables as JSON, such as `{"enable_thinking": false}`; "" for none.
    """

    path: str
    text: str
    special_tokens: tuple[tuple[str, str], ...]
    with_tools: str | None = None
    date: float | None = None
    variables: str = ""

    def with_variables(self, variables: Mapping[str, Any] | None) -> ChatTemplate:
        """The template with these additional variables; raises UserError for names that every template has."""
        if not variables:
            return self
        reserved = sorted(variables.keys() & {*_VARIABLES, *dict(self.special_tokens)})
        if reserved:
            raise UserError(f"template variables: {reserved[0]} comes from the messages or the tokenizer")
        known = json.loads(self.variables) if self.variables else {}
        # Only their own names are sorted: a template may write an object, such as a tool, as it is.
        ordered = dict(sorted((known | dict(variables)).items()))
        return replace(self, variables=json.dumps(ordered))

    @property
    def digest(self) -> str:
        """A hash of everything that determines the rendered text."""
        content: list[Any] = [self.text, self.special_tokens]
        if self.with_tools is not None:
            content.append(self.with_tools)
        if self.date is not None and "strftime_now" in self.text:
            content.append(self.date)
        if self.variables:
            content.append(self.variables)
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def marks_generation(self) -> bool:
        """Whether it marks the assistant's turns."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None

    def render(self, messages: Sequence[Any], add_generation_prompt: bool, tools: Sequence[Any] | None = None) -> str:
        """The text of a conversation; with `add_generation_prompt`, up to the beginning of an answer.

        `tools` are descriptions of functions that the assistant may call. Raises UserError for messages that the
        template does not accept, and for a template that fails or takes more time or memory than `chat_renderer.py`
        allows.
        """
        text: str = self._ask(messages, add_generation_prompt, tools)["text"]
        return text

    def generated(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[tuple[int, int]]:
        """The spans `(start, stop)` of characters that `{% generation %}` marks; raises as `render`."""
        return [(start, stop) for start, stop in self._ask(messages, False, tools)["generated"]]

    def turns(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> dict[int, tuple[int, int]]:
        """The characters `(start, stop)` that the template's loop writes for each message, by its number.

        A message is missing if no loop over messages writes it. Raises as `render`.
        """
        return {message: (start, stop) for message, start, stop in self._ask(messages, False, tools)["turns"]}

    def _ask(self, messages: Sequence[Any], add_generation_prompt: bool, tools: Sequence[Any] | None) -> dict[str, Any]:
        variables: dict[str, Any] = json.loads(self.variables) if self.variables else {}
        variables |= {
            "messages": [_present(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        variables |= {"tools": tools, "documents": None, **dict(self.special_tokens)}
        text = self.text if tools is None or self.with_tools is None else self.with_tools
        answer = _renderer.ask({"template": text, "variables": variables, "date": self.date})
        if "error" in answer:
            error = answer["error"]
            remedy = f"; {DATE} in the environment sets the date" if "strftime_now" in error else ""
            raise UserError(f"{self.path} cannot render these messages: {error}{remedy}")
        return answer


def _present(message: Any) -> Any:
    """A message without the keys that hold null, as transformers takes it.

    >>> _present({"role": "assistant", "content": None})
    {'role': 'assistant'}
    """
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value is not None}


class _Renderer:
    """The process that renders templates. It starts with the first request, and again after one that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; `{"error": ...}` if it cannot be rendered.

        Raises:
          Unavailable: the process was killed from outside, and so was the next one.
        """
        try:
            line = json.dumps(request)
        except (RecursionError, TypeError, ValueError) as error:  # a date, for instance
            return {"error": first_line(error)}
        for _ in range(ATTEMPTS):
            answer = self._answer(line)
            if answer.endswith("\n"):  # else it died within it
                return json.loads(answer)
            status = self.close()
            if status != -signal.SIGKILL:  # a template has no way to this signal
                reason = "it takes too long" if status == -signal.SIGPROF else f"its process ended with {status}"
                return {"error": reason}
        raise Unavailable(f"the process of chat templates was killed {ATTEMPTS} times, probably out of memory")

    def _answer(self, line: str) -> str:
        """A line, or a part of one from a process that has died."""
        if self._process is None:
            # -P: the modules beside the program must not be imported. A Ctrl-C is only for this process.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(RENDERER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and so has its answer
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> int:
        """Ends the process, if there is one; returns its status."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        with process, suppress(BrokenPipeError):
            if process.stdin is not None:
                process.stdin.close()
        return process.returncode


_renderer = _Renderer()
atexit.register(_renderer.close)


def load_chat_template(tokenizer: str, date: float | None = None) -> ChatTemplate | None:
    """The chat template beside the file of a tokenizer, as in a Hugging Face folder; None if there is none.

    The date comes from SOURCE_DATE_EPOCH if the environment sets it.

    Raises UserError for files that hold something else.
    """
    files = TokenizerFiles.from_folder(storage.parent(tokenizer))
    path, texts = _texts(files)
    if "default" not in texts:
        return None
    if DATE in os.environ:
        with reading(f"{DATE}: expected seconds since 1970"):
            date = float(os.environ[DATE])
    return ChatTemplate(path, texts["default"], tuple(sorted(files.names.items())), texts.get("tool_use"), date)


def template_text(files: TokenizerFiles) -> str | None:
    """The text of the chat template in a folder; raises as `load_chat_template`."""
    return _texts(files)[1].get("default")


def _texts(files: TokenizerFiles) -> tuple[str, dict[str, str]]:
    """The file of the templates, and their texts by name."""
    path = storage.join(files.folder, TEMPLATE)
    if storage.exists(path):
        with reading(f"{path} is not UTF-8 text"):
            return path, {"default": storage.read_bytes(path).decode("utf-8")}
    path = storage.join(files.folder, TOKENIZER_CONFIG)
    templates = files.tokenizer.get("chat_template")
    if isinstance(templates, list):  # several, by name
        with reading(f"{path}: expected names and templates under chat_template"):
            texts = {entry["name"]: entry["template"] for entry in templates}
    else:
        texts = {} if templates is None else {"default": templates}
    for text in texts.values():
        if not isinstance(text, str):
            raise UserError(f"{path}: chat_template is {type(text).__name__}; expected text")
    return path, texts
