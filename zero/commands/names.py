"""Refuses misspelled keys before jax is imported, which takes seconds.

conf/help.json has the names of all keys, of all modes and choices.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from zero.commands.declared import CONF, declared
from zero.config.messages import similar_key

_NAME = re.compile(r"[A-Za-z_][\w.]*")
# Options beside which the names are those of the trainer. Others explain names, or bring a configuration of their own.
_OPTIONS = {"--resume", "--resume=auto", "--multirun", "-m", "--run", "-r"}


def main(arguments: Sequence[str]) -> None:
    """Ends the program with status 2 if a key=value has a key that no configuration has.

    Only these mistakes are then named; the values, and what is wrong together, are checked with the configuration.
    """
    if any(argument.startswith("-") and argument not in _OPTIONS for argument in arguments):
        return
    keys = list(declared().owners())
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    unknown = unknown_names(arguments, keys, groups)
    for name in unknown:
        print(f"error: {similar_key(name, keys)}", file=sys.stderr)
    if unknown:
        sys.exit(2)


def unknown_names(arguments: Iterable[str], keys: Sequence[str], groups: Iterable[str]) -> list[str]:
    """The names of keys in arguments that are no key, no section, no group, and nothing below a key or in Hydra's.

    >>> arguments = ["zero.stge=1", "zero.stage=1", "model.override.N=2", "+preset=v3-8"]
    >>> unknown_names(arguments, ["zero.stage", "model.override"], ["preset"])
    ['zero.stge']
    """
    known = {"hydra", *groups}
    for key in keys:
        parts = key.split(".")
        known |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    whole = {"hydra", *keys}  # what may have further parts, as model.override has
    unknown = []
    for argument in arguments:
        name = argument.partition("=")[0].lstrip("+~")
        parts = name.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts))}
        is_name = "=" in argument and _NAME.fullmatch(name) is not None
        if is_name and name not in known and not above & whole and parts[-1] != "name":
            unknown.append(name)
    return unknown
