"""The process in which chat templates are rendered: a line of JSON in, a line of JSON out (jinja2).

A template is a program that comes with the files of a model, and may use any amount of time and memory: the process
limits both. It does not import zero, which would take seconds.
"""

from __future__ import annotations

import json
import re
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2.0  # of computation for one conversation, which takes less than a millisecond
MEMORY = 1 << 30  # bytes of address space
LONGEST_ERROR = 300  # characters
SECRET = secrets.token_hex(16)  # within each mark of a rendered text: no text holds it by chance
BEGIN, END = f"<{SECRET}>", f"<{SECRET}/>"  # around what a template marks with {% generation %}
_MARK = re.compile(f"(<{SECRET}[^>]*>)")


def main() -> None:
    """Answers each request `{"template", "variables", "date"}` with `{"text": ...}` or `{"error": ...}`.

    Beside the text are, as `generated`, the spans `(start, stop)` of characters that `{% generation %}` marks, and as
    `turns` the triples `(message, start, stop)` of what the loops over messages write for each message.

    A request that takes longer than `SECONDS` ends the process by SIGPROF, also in the middle of one operation.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Both may be inherited: a profiler in the process that started this one ignores or blocks the signal.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            request = json.loads(line)
            answer = json.dumps(rendered(request["template"], request["variables"], request["date"]))
        except Exception as error:  # noqa: BLE001  a template raises whatever its expressions do
            answer = json.dumps({"error": (str(error) or type(error).__name__)[:LONGEST_ERROR]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


class Generation(Extension):
    """`{% generation %}`, with which some templates mark the assistant's turns."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As in transformers, variables set inside a call block do not leak out of it.
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END


class Turns(Extension):
    """Marks what each loop over messages writes for each of them."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.messages: list[Any] = []
        self._loops_over_messages: set[int] = set()

    def mark(self, tree: nodes.Template) -> None:
        """Adds the marks to a parsed template."""
        loops = list(tree.find_all(nodes.For))
        numbers = {id(loop): number for number, loop in enumerate(loops)}
        for node in [tree, *tree.find_all(nodes.Node)]:
            for name, value in list(node.iter_fields()):
                if isinstance(value, list) and any(isinstance(child, nodes.For) for child in value):
                    setattr(node, name, [new for child in value for new in self._with_end(child, numbers)])
        for loop in loops:
            if isinstance(loop.target, nodes.Name):
                item = nodes.Name(loop.target.name, "load")
                begin = self.call_method("_begin", [item, nodes.Const(numbers[id(loop)])])
                loop.body.insert(0, nodes.Output([begin]).set_lineno(loop.lineno))

    def _with_end(self, node: nodes.Node, numbers: dict[int, int]) -> list[nodes.Node]:
        if not isinstance(node, nodes.For):
            return [node]
        end = self.call_method("_end", [nodes.Const(numbers[id(node)])])
        return [node, nodes.Output([end]).set_lineno(node.lineno)]

    def _begin(self, item: Any, loop: int) -> str:
        for number, message in enumerate(self.messages):
            if message is item:
                self._loops_over_messages.add(loop)
                return f"<{SECRET}:{loop}:{number}>"
        return ""

    def _end(self, loop: int) -> str:
        if loop not in self._loops_over_messages:
            return ""
        self._loops_over_messages.remove(loop)
        return f"<{SECRET}:{loop}:>"


class Divided(NamedTuple):
    """A text without marks, and the spans of characters that they mark, as the answers of `main` have them."""

    text: str
    generated: list[tuple[int, int]]
    turns: list[tuple[int, int, int]]


def divided(text: str) -> Divided:
    """Takes the marks out of a rendered text."""
    plain = ""
    generated = []
    turns = []
    open_turns: list[tuple[str, int, int]] = []  # loop, message and start; a loop may look ahead within another's turn
    for part in _MARK.split(text):
        if part in (BEGIN, END):
            generated.append(len(plain))
        elif _MARK.fullmatch(part):
            _, loop, message = part.removesuffix(">").split(":")
            if any(loop == open_loop for open_loop, _, _ in open_turns):
                while open_turns[-1][0] != loop:  # a loop that was left in its midst
                    open_turns.pop()
                _, number, start = open_turns.pop()
                if len(plain) > start:
                    turns.append((number, start, len(plain)))
            if message:
                open_turns.append((loop, int(message), len(plain)))
        else:
            plain += part
    return Divided(plain, list(zip(generated[::2], generated[1::2], strict=False)), turns)


def rendered(text: str, variables: dict[str, Any], date: float | None) -> dict[str, Any]:
    """The text that a template makes of its variables, and its spans."""
    plain = divided(compiled(text, date, marks_turns=False).render(**variables))
    template = compiled(text, date, marks_turns=True)
    extension = template.environment.extensions[Turns.identifier]
    assert isinstance(extension, Turns)
    extension.messages = variables["messages"]
    marked = divided(template.render(**variables))
    # A template that computes with what its loop writes may make another text with marks in it.
    turns = marked.turns if marked.text == plain.text else []
    return {"text": plain.text, "generated": plain.generated, "turns": turns}


@cache
def compiled(text: str, date: float | None, marks_turns: bool) -> jinja2.Template:
    """The template of a text; with a date, in seconds since 1970, it has the function `strftime_now`."""
    extensions: list[Any] = [Generation, Turns, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    if date is not None:
        environment.globals["strftime_now"] = datetime.fromtimestamp(date).strftime
    tree = environment.parse(text)
    if marks_turns:
        extension = environment.extensions[Turns.identifier]
        assert isinstance(extension, Turns)
        extension.mark(tree)
    return environment.from_string(tree)


if __name__ == "__main__":
    main()
