"""The form of the arguments, and texts that Hydra would read as something else (hydra)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from zero.base.errors import UserError
from zero.commands.modes import MODES
from zero.config.files import literal
from zero.config.messages import did_you_mean

INDEX_FILES = ("data.index_path_train", "data.index_path_validation", "evaluate.index")  # may have braces of a shell
_BRACES = re.compile(r"[^\[{'\"]*\{[^{}:]*(,|\.\.)[^{}:]*\}[^\]}'\"]*")
FREE_TEXT = {"sample.prompt"}  # keys whose text may hold what Hydra would read as syntax, such as ${HOME}


# Hydra's, and with the word after it; the rest is the trainer's.
OPTIONS = (
    *("--cfg", "--config-dir", "--config-name", "--config-path", "--experimental-rerun", "--info", "--package"),
    *("-c", "-cd", "-cn", "-cp", "-i", "-p"),
)
FLAGS = (
    *("--hydra-help", "--multirun", "--resolve", "--run", "--shell-completion", "--version", "-m", "-r", "-sc"),
    *("--doctor", "--help", "-h", "--resume"),
)


def check_form(arguments: Sequence[str]) -> None:
    """Raises UserError for arguments that are neither an option nor key=value."""
    lines = []
    takes_next = False
    names = [argument.partition("=")[0] for argument in arguments]
    for name in INDEX_FILES:
        if (name, name) in pairwise(names):  # apart from each other the later one counts, as for any key
            lines.append(
                f"{name}: given {names.count(name)} times; if a shell expanded the braces, quote them: "
                f"'{name}=a-{{1,2}}.index'"
            )
    for argument in arguments:
        is_value = takes_next
        takes_next = argument in OPTIONS
        name = argument.partition("=")[0]
        if argument.startswith("-"):
            if not is_value and name not in (*OPTIONS, *FLAGS):
                meant = did_you_mean(name, (*OPTIONS, *FLAGS)) or "settings are written key=value (see --help)"
                lines.append(f"{argument}: no such option; {meant}")
        elif not is_value and "=" not in argument and not argument.startswith("~"):
            hint = f"mode={argument}" if argument in MODES.kinds else "training.total_steps=50"
            lines.append(f"{argument}: expected key=value, such as {hint}; see --help")
    if lines:
        raise UserError("\n".join(lines))


def take_text_literally(arguments: Sequence[str]) -> list[str]:
    """Quotes, in Hydra's syntax, texts that its grammar would refuse or read as something else.

    A key of `FREE_TEXT` takes its value as it is written. Any other text is quoted unless Hydra reads it as a text, an
    interpolation or a sweep. So is the value of any other key, Hydra's own included, if Hydra's grammar refuses it. A
    value that is quoted as a whole stays, and so do null and a list of free texts. Index files with braces of a shell
    are quoted, as in `data.index_path_train=train-{000..099}.tar`.

    >>> take_text_literally(["sample.prompt=def main(", "sample.prompt='a, b'", "seed=7", "data.corpus=my (old) text"])
    ["sample.prompt='def main('", "sample.prompt='a, b'", 'seed=7', "data.corpus='my (old) text'"]
    >>> take_text_literally(["hydra.run.dir=runs/été", "hydra.run.dir=été/${now:%Y}", "+preset=v3-8", "-m"])
    ["hydra.run.dir='runs/été'", "hydra.run.dir='été/${now:%Y}'", '+preset=v3-8', '-m']
    """
    is_sweep = "--multirun" in arguments or "-m" in arguments
    return [_literally(argument, is_sweep) for argument in arguments]


def _literally(argument: str, is_sweep: bool) -> str:
    name, _, value = argument.partition("=")
    key = MODES.keys.get(name.lstrip("+"))
    is_free = name.lstrip("+") in FREE_TEXT
    if name in INDEX_FILES and _BRACES.fullmatch(value):
        return f"{name}={_quoted(value)}"
    if argument.startswith(("-", "~")) or "=" not in argument or value == "null":
        return argument
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        if key is None:  # a path of Hydra's, which may have interpolations
            return f"{name}={QuotedString(value, Quote.single).with_quotes()}"
        return f"{name}={_quoted(value)}"
    if key is None or not (is_free or key.kind is str):
        return argument
    if override.is_sweep_override():
        stays = is_sweep or not is_free
    elif is_free:
        is_quoted = re.fullmatch(r"(['\"]).*\1", value, re.DOTALL) is not None
        stays = is_quoted or isinstance(override.value(), list)
    else:
        stays = isinstance(override.value(), str)
    if stays:
        return argument
    return f"{name}={_quoted(value)}"


def _quoted(text: str) -> str:
    """A text in Hydra's quotes, in which nothing is an interpolation."""
    return QuotedString(literal(text), Quote.single).with_quotes()
