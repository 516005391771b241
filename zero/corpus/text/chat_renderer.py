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
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2.0  # of computation for one conversation, which takes less than a millisecond
MEMORY = 1 << 30  # bytes of address space
LONGEST_ERROR = 300  # characters
# Around what a template marks with {% generation %}, while it is rendered: no text holds them by chance.
BEGIN, END = (f"<{secrets.token_hex(16)}{end}>" for end in ("", "/"))


def main() -> None:
    """Answers each request `{"template", "variables", "date"}` with `{"text": ...}` or `{"error": ...}`.

    Beside the text are, as `generated`, the spans `(start, stop)` of characters that `{% generation %}` marks.

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
            template = compiled(request["template"], request["date"])
            answer = json.dumps(divided(template.render(**request["variables"])))
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
        # A call block, as in transformers: what is set inside is not set after it.
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END


def divided(text: str) -> dict[str, Any]:
    """The text without marks, and the spans `(start, stop)` of characters that they mark."""
    plain = ""
    marks = []
    for part in re.split(f"({BEGIN}|{END})", text):
        if part in (BEGIN, END):
            marks.append(len(plain))
        else:
            plain += part
    return {"text": plain, "generated": list(zip(marks[::2], marks[1::2], strict=False))}


@cache
def compiled(text: str, date: float | None) -> jinja2.Template:
    """The template of a text; with a date, in seconds since 1970, it has the function `strftime_now`."""
    extensions: list[Any] = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    if date is not None:
        environment.globals["strftime_now"] = datetime.fromtimestamp(date).strftime
    return environment.from_string(text)


if __name__ == "__main__":
    main()
