"""A terminal: programs run in it as a person sees them.

- `in_terminals`: runs programs in pseudo-terminals of some width and returns the `Screen` of each.
- `Screen`: the lines on it, and every line that was overwritten.
"""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+")


class Screen:
    """What the output of a program looks like, with the few control sequences that a live line needs.

    >>> screen = Screen(10)
    >>> screen.feed("one\\r\\x1b[2Ka line of 15 c\\r\\n")
    >>> screen.lines, screen.erased
    (['a line of ', '15 c', ''], ['one'])
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.erased: list[str] = []
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for match in _CONTROL.finditer(text):
            if match[0] == "\r":
                self._column = 0
            elif match[0] == "\n":
                self._down()
            elif match[2]:
                self._obey(match[1], match[2])
            else:
                for character in match[0]:
                    self._put(character)

    def _put(self, character: str) -> None:
        if self._column == self.columns:  # terminals wrap when the next character comes
            self._column = 0
            self._down()
        line = self.lines[self._row].ljust(self._column)
        self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self.lines):
            self.lines.append("")

    def _obey(self, numbers: str, command: str) -> None:
        if command == "K" and numbers == "2":
            self.erased.append(self.lines[self._row])
            self.lines[self._row] = ""
        elif command == "A":
            self._row -= int(numbers or 1)
        elif command != "m" and (numbers, command) not in (("?25", "l"), ("?25", "h")):  # colors; the cursor
            raise ValueError(f"the screen does not know ESC[{numbers}{command}")


def in_terminals(cases: Sequence[tuple[str, int]], imports: str = "") -> list[tuple[int, Screen]]:
    """The exit status and the screen of each Python program, in a terminal of so many columns.

    They are forked from one process, which has run `imports` before.
    """
    command = [sys.executable, __file__, imports, json.dumps(cases)]
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    results = []
    for (_, columns), (status, output) in zip(cases, json.loads(done.stdout), strict=True):
        screen = Screen(columns)
        screen.feed(output)
        results.append((status, screen))
    return results


def _run(program: str, columns: int) -> tuple[int, str]:
    """The exit status of a program in a terminal, and all that it wrote there."""
    process, controller = pty.fork()
    if process == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        sys.stdout = os.fdopen(1, "w")  # the one before was made for a pipe
        exec(program, {"__name__": "__main__"})
        sys.exit()
    output = b""
    while part := _read(controller):
        output += part
    os.close(controller)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), output.decode()


def _read(controller: int) -> bytes:
    """The next bytes; none once the program has closed its terminal, which Linux reports as an error."""
    try:
        return os.read(controller, 65536)
    except OSError:
        return b""


if __name__ == "__main__":
    exec(sys.argv[1])
    print(json.dumps([_run(program, columns) for program, columns in json.loads(sys.argv[2])]))
