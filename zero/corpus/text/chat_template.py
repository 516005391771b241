"""Chat templates: how a tokenizer spells a conversation, rendered as transformers renders it."""

from __future__ import annotations

import atexit
import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero.errors import UserError, first_line
from zero.files import storage
from zero.files.parsing import json_object, reading

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"  # files beside a tokenizer
RENDERER = Path(__file__).with_name("chat_renderer.py")


@dataclass(frozen=True)
class ChatTemplate:
    """How a tokenizer spells a conversation: its Jinja template, rendered as transformers renders it.

    A template has no clock, so that the same conversation is always the same text.
    """

    path: str
    text: str
    special_tokens: tuple[tuple[str, str], ...]  # such as ("bos_token", "<s>")

    @property
    def digest(self) -> str:
        """A hash of everything that determines the rendered text."""
        return hashlib.sha256(json.dumps([self.text, self.special_tokens]).encode()).hexdigest()[:16]

    @property
    def marks_generation(self) -> bool:
        """Whether it marks the assistant's turns."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None

    def render(self, messages: Sequence[Any], add_generation_prompt: bool, tools: Sequence[Any] | None = None) -> str:
        """The text of a conversation; with `add_generation_prompt` up to where an answer begins.

        `tools` are descriptions of functions that the assistant may call. Raises UserError for messages that the
        template does not accept, and for a template that fails or takes more time or memory than `chat_renderer.py`
        allows.
        """
        text: str = self._ask(messages, add_generation_prompt, tools)["text"]
        return text

    def generated(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[tuple[int, int]]:
        """The spans `(start, stop)` of characters that `{% generation %}` marks; raises as `render`."""
        return [(start, stop) for start, stop in self._ask(messages, False, tools)["generated"]]

    def _ask(self, messages: Sequence[Any], add_generation_prompt: bool, tools: Sequence[Any] | None) -> dict[str, Any]:
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        variables |= {"tools": tools, "documents": None, **dict(self.special_tokens)}
        answer = _renderer.ask({"template": self.text, "variables": variables})
        if "error" in answer:
            raise UserError(f"{self.path} cannot render these messages: {answer['error']}")
        return answer


class _Renderer:
    """The process that renders templates. It starts with the first request, and again after one that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
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
        try:
            line = json.dumps(request)
        except (RecursionError, ValueError) as error:
            return {"error": first_line(error)}
        with suppress(BrokenPipeError):  # it has ended, and so has its answer
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer:
            return json.loads(answer)
        status = self.close()
        return {"error": "it takes too long" if status == -signal.SIGPROF else f"its process ended with {status}"}

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


def load_chat_template(tokenizer: str) -> ChatTemplate | None:
    """The chat template beside the file of a tokenizer, as in a Hugging Face folder; None where there is none.

    Raises UserError for files that hold something else.
    """
    folder = storage.parent(tokenizer)
    paths = {name: storage.join(folder, name) for name in (CONFIG, TEMPLATE)}
    path = paths[CONFIG]
    config = json_object(storage.read_bytes(path), path) if storage.exists(path) else {}
    text = config.get("chat_template")
    if isinstance(text, list):  # several, by name
        with reading(f"{path}: expected names and templates under chat_template"):
            text = {entry["name"]: entry["template"] for entry in text}.get("default")
    if storage.exists(paths[TEMPLATE]):
        path = paths[TEMPLATE]
        with reading(f"{path} is not UTF-8 text"):
            text = storage.read_bytes(path).decode("utf-8")
    if text is None:
        return None
    if not isinstance(text, str):
        raise UserError(f"{path}: chat_template is {type(text).__name__}; expected text")
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    spelled = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return ChatTemplate(
        path, text, tuple(sorted((key, name) for key, name in spelled.items() if isinstance(name, str)))
    )
