"""Turns any error of a parser of an external file into one line."""

from __future__ import annotations

import json
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zero.base.errors import UserError, first_line

# Errors of parsers for input that is malformed, truncated, nested too deeply or too large, and of the first access to
# a value of another kind, such as a list instead of an object.
MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,  # of numpy, which parses the header of a .npy file as Python
)


@contextmanager
def reading(message: str, *also: type[Exception], kind: type[UserError] = UserError) -> Iterator[None]:
    """Turns the errors of a parser into one line. The block holds the parser and the first accesses to its result.

    An OSError passes: it concerns the disk, not the contents of a file. `message` begins the line, `also` are errors of
    this parser besides `MALFORMED`.
    """
    parser_errors: tuple[type[Exception], ...] = (*MALFORMED, *also)
    try:
        yield
    except parser_errors as error:
        if isinstance(error, UserError):
            raise
        raise kind(f"{message}: {first_line(error)}") from error


def json_object(data: bytes, place: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
      UserError: it holds anything else; `place` begins the message.
    """
    with reading(f"{place}: expected a JSON object"):
        content = json.loads(data)
        if not isinstance(content, dict):
            raise TypeError(f"found {type(content).__name__}")
    return content
