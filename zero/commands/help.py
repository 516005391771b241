"""`--help`: one screen; `--help KEY`: a key, a section, a group or one of its choices, or the model sizes."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zero.base.errors import UserError, exit_on_error
from zero.base.text_table import in_columns
from zero.base.versions import version_of
from zero.commands.declared import CONF, Choice, DeclaredKey, declared, sizes_in_files
from zero.hosts.signals import IgnoreBrokenPipe

OPTIONS = {"--help", "-h", "--version"}
WIDEST = 100  # columns; a narrower terminal has shorter lines
COMMANDS = {
    "": "train a small model",
    "training.total_steps=50 zero.stage=1": "set keys",
    "--resume": "continue a run",
    "mode=sample sample.prompt='def main('": "sample from it",
    "mode=plan +preset=v3-32": "predict memory",
    "--doctor": "check the machine",
}
ADDED = {
    "preset": "a model on a slice",
    "slice": "a TPU slice",
    "memory": "settings that fit larger models",
    "recipe": "a published run",
    "tune": "a model of a Hugging Face folder",
}


def main(arguments: Sequence[str]) -> None:
    """Prints what `--help` or `--version`, one of these arguments, asks for; the others are names to explain."""
    sys.stdout = IgnoreBrokenPipe(sys.stdout)
    with exit_on_error():
        if "--version" in arguments:
            print(version_text())
        else:
            print(help_text([argument for argument in arguments if not argument.startswith("-")]))


def help_text(names: Sequence[str]) -> str:
    """One screen, or what these names mean.

    Raises:
      UserError: a line for each name that nothing has.
    """
    if not names:
        return "\n".join(_screen())
    pages = []
    mistakes = []
    for name in names:
        lines = list(_page(name.lstrip("+")))
        if lines:
            pages.append("\n".join(lines))
        else:
            mistakes.append(_unknown(name))
    if mistakes:
        raise UserError("\n".join(mistakes))
    return "\n\n".join(pages)


def _unknown(name: str) -> str:
    from zero.config.messages import unknown_key  # it imports Hydra, which takes half a second

    return unknown_key(name, declared().owners(), declared().groups)


def version_text() -> str:
    """The version of zero and of jax."""
    return f"zero {version_of('zero-pmap')}, jax {version_of('jax')}"


def _screen() -> Iterator[str]:
    yield "Trains transformers with ZeRO on jax.pmap: state is sharded over all devices."
    yield ""
    yield "  python main_zero.py [key=value ...] [--resume]"
    yield ""
    for arguments, meaning in COMMANDS.items():
        yield f"  python main_zero.py {arguments:<38} {meaning}"
    yield ""
    yield "Groups, such as optimizer=lion; the first is the default:"
    for group_name, group in declared().groups.items():
        yield from _list(group_name, group.choices)
    yield from _list("mode", declared().modes)
    yield ""
    yield "Presets and other files of settings, such as +preset=v3-8:"
    for folder, meaning in ADDED.items():
        yield from _list(f"+{folder}", _files(folder), meaning)
    yield ""
    yield "Keys, by section:"
    for section, keys in declared().sections.items():
        if section:
            noun = "key" if len(keys) == 1 else "keys"
            yield f"  {section:<12} {len(keys)} {noun}"
        else:
            yield f"  {'':<12} {', '.join(key.name for key in keys if key.name != 'mode')}"
    yield ""
    yield "model.size is an entry of conf/models, or FILE:ENTRY: --help sizes"
    yield from _wrapped(
        "--help KEY, SECTION, GROUP or GROUP=CHOICE explains it. --cfg job prints the configuration, --multirun sweeps "
        "over key=a,b; --resume=auto continues or starts; --version. docs/reference/keys.md has all keys."
    )


def _files(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "common")


def _list(name: str, values: Iterable[str], meaning: str = "") -> list[str]:
    text = ", ".join(values)
    if meaning:
        text = f"{meaning}: {text}"
    return _wrapped(text, f"  {name:<12} ", " " * 15)


def _wrapped(text: str, start: str = "", further: str = "") -> list[str]:
    """The lines of a text in the width of the terminal; `start` begins the first one, `further` all others."""
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=further, break_on_hyphens=False)


def _page(name: str) -> Iterator[str]:
    """What this name means, as far as it is one; no line if it is none."""
    if name == "sizes":
        yield from _wrapped("model.size: FILE:ENTRY, or an entry of conf/model_config.yaml or conf/models:")
        yield ""
        yield from _size_table(CONF)
    elif name in ADDED:
        yield from _list(f"+{name}", _files(name), ADDED[name])
    elif name in declared().groups:
        group = declared().groups[name]
        yield f"{name}: {group.meaning} One of:"
        for choice_name, choice in group.choices.items():
            yield ""
            yield from _choice(f"{name}={choice_name}", choice)
    elif name == "mode":
        for mode_name, mode in declared().modes.items():
            yield from _wrapped(f"mode={mode_name}: {mode.meaning}")
    elif name in _all_choices():
        yield from _choice(name, _all_choices()[name])
    elif name in declared().modes and declared().modes[name].keys:
        yield from _keys(declared().modes[name].keys)
    else:
        if name and name in declared().sections:
            yield from _keys(declared().sections[name])
        yield from _key(name)


def _all_choices() -> dict[str, Choice]:
    """Every choice of a group, and every mode, by its argument, such as optimizer=lion."""
    choices = {f"mode={name}": mode for name, mode in declared().modes.items()}
    for group_name, group in declared().groups.items():
        choices |= {f"{group_name}={name}": choice for name, choice in group.choices.items()}
    return choices


def _size_table(conf: Path) -> Iterator[str]:
    """The sizes, smallest first, and a remark if some were not counted."""
    sizes = sizes_in_files(conf)
    names = ["model.size", *(size.name for size in sizes)]
    rows = [["parameters", "layers", "width", "context"]]
    for size in sizes:
        rows.append([_count(number) for number in (size.parameters, size.layers, size.width, size.context)])
    families = ["family", *(size.family for size in sizes)]
    width = max(map(len, names))
    for name, counts, family in zip(names, in_columns(rows), families, strict=True):
        yield f"{name:<{width}}  {counts}  {family}".rstrip()
    if any(size.parameters is None for size in sizes):
        yield ""
        yield from _wrapped(
            "-: not counted, because the entry was changed or added. mode=plan model.size=NAME counts its parameters."
        )


def _count(number: Any) -> str:
    """A cell of the table of sizes. A file may hold a value of any type: one that is no number is printed unchanged.

    >>> _count(8030261248), _count(None), _count("many")
    ('8,030,261,248', '-', 'many')
    """
    if number is None:
        return "-"
    if isinstance(number, int):
        return f"{number:,}"
    return str(number)


def _key(name: str) -> Iterator[str]:
    """A key, once for each choice that has it."""
    for keys in declared().sections.values():
        for key in keys:
            if key.name == name and name.partition(".")[0] not in declared().groups:
                yield from explained(key)
    for argument, choice in _all_choices().items():
        for key in choice.keys:
            if key.name == name:
                yield from explained(key, argument)


def _keys(keys: Iterable[DeclaredKey]) -> Iterator[str]:
    for key in keys:
        yield from explained(key)


def _choice(argument: str, choice: Choice) -> Iterator[str]:
    yield from _wrapped(f"{argument}: {choice.meaning}")
    yield from _keys(choice.keys)


def explained(key: DeclaredKey, owner: str = "") -> Iterator[str]:
    """A key, its default, its meaning and its values, wrapped."""
    yield f"{key.name}={key.default}" + (f" ({owner})" if owner else "")
    for line in key.lines:
        yield from _wrapped(line, "    ", "      ")
    if key.expects:
        yield from _wrapped(f"expects {key.expects}", "    ", "      ")
