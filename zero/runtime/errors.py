"""Errors that are shown as one line, and the exit status that they end a program with."""

from pathlib import Path


class UserError(Exception):
    """A mistake of the person at the keyboard: shown without a traceback, a line for each mistake.

    The same command would fail again, so a launcher does not repeat it.
    """

    status = 2  # as argparse and Hydra end on a wrong command line


class Unavailable(UserError):
    """Storage, the network or another host failed: shown as one line as well, but a repeat may succeed."""

    status = 1


def install_command(extra: str) -> str:
    """The command that adds an extra of pyproject.toml: to the clone that runs, or else to the installed package."""
    clone = Path(__file__).parents[2]
    source = f"-e '{clone}[" if (clone / "pyproject.toml").is_file() else "'zero-pmap["
    return f"pip install {source}{extra}]'"
