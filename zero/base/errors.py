"""Errors that are shown as one line, and the exit status that they end a program with."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# errno values that mean an invalid path; failures of disks and networks may be temporary.
WRONG_PATH = {errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EPERM}
WRONG_PATH |= {errno.ELOOP, errno.EROFS}
FULL_DISK = {errno.EDQUOT, errno.ENOSPC}
LONGEST_LINE = 300  # characters of the message of a library, which may quote a whole file


class UserError(Exception):
    """A mistake of the user: shown without a traceback, one line per mistake.

    The same command would fail again, so a launcher does not repeat it.
    """

    status = 2  # as argparse and Hydra end on a wrong command line


class UnknownTopology(UserError):
    """A topology that does not exist, or that this machine cannot compile for; the text begins with `topology=`."""


class Unavailable(UserError):
    """Storage, the network, a device or another host failed: shown as one line as well, but a repeat may succeed."""

    status = 1


def file_error(message: str, error: OSError) -> UserError:
    """An error with this message and the status that `error` deserves: Unavailable unless the path is wrong."""
    return (UserError if error.errno in WRONG_PATH else Unavailable)(message)


def reason(error: OSError) -> str:
    """What the system says of an error, without its number and path.

    >>> reason(FileNotFoundError(2, "No such file or directory", "a.txt")), reason(OSError("no answer"))
    ('No such file or directory', 'no answer')
    """
    if error.strerror is not None:
        return error.strerror
    return str(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, truncated if long; the name of its class if it has no message."""
    if type(error) is KeyError:  # its message is the key
        return f"{error} is missing"
    if mark := getattr(error, "problem_mark", None):  # of YAML, whose message is several lines
        return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', None) or error}"
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    half = LONGEST_LINE // 2  # the reason may stand at the end
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[:half]} ... {line[-half:]}"


def full_disk(error: BaseException) -> str | None:
    """What a full disk is called, where it is the cause of this error; a library may have made its own error of it.

    >>> full_disk(ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes to file 4: No space left on device [...]"))
    'No space left on device'
    """
    names = [os.strerror(number) for number in sorted(FULL_DISK)]
    return next((name for name in names if name in str(error)), None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Ends a command with one line and the status of the error. An OSError concerns a file, and names it."""
    try:
        yield
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit((error if isinstance(error, UserError) else file_error("", error)).status)


# The option of prepareTPUVM.sh that installs an extra of pyproject.toml.
_OPTIONS = {"train": "", "plan": " --plan", "parquet": " --parquet"}


def install_command(extra: str) -> str:
    """The command that adds an extra of pyproject.toml, with tested versions; zero is on no index: it needs a clone."""
    clone = Path(__file__).parents[2]
    if not (clone / "pyproject.toml").is_file():
        return f"pip install '.[{extra}]' in a clone of zero"
    folder = "." if clone == Path.cwd() else str(clone)
    if (
        extra in _OPTIONS and Path(sys.prefix) == clone / ".venv"
    ):  # an environment of somebody's own is not the script's
        return f"{shlex.quote(f'{folder}/prepareTPUVM.sh')}{_OPTIONS[extra]}"
    constraints = shlex.quote(f"{folder}/constraints.txt")
    return f"pip install -c {constraints} -e {shlex.quote(f'{folder}[{extra}]')}"


def trainer() -> tuple[str, ...]:
    """The words that start the trainer from the current directory: of a clone, or of the installed package."""
    if Path("main_zero.py").is_file():
        return ("python", "main_zero.py")
    return ("zero-train",)
