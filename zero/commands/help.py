"""`--help`: one screen; `--help KEY`: a key, a section, a group or one of its choices, or the model sizes."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zero.base.errors import UserError
from zero.base.versions import version_of
from zero.commands.modes import MODES
from zero.config.constraints import shown
from zero.config.files import conf_directory
from zero.config.keys import Group, Key, Section, all_keys, members_of
from zero.job.sizes import load_sizes

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
            mistakes.append(MODES.unknown(name))
    if mistakes:
        raise UserError("\n".join(mistakes))
    return "\n\n".join(pages)


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
    for group, choices in MODES.choices().items():
        yield from _list(group, choices)
    yield ""
    yield "Presets and other files of settings, such as +preset=v3-8:"
    for group, meaning in ADDED.items():
        yield from _list(f"+{group}", _files(group), meaning)
    yield ""
    yield "Keys, by section:"
    plain = [member.name for member in members_of(MODES.first) if isinstance(member, Key) and member.name != "mode"]
    yield f"  {'':<12} {', '.join(plain)}"
    for member in members_of(MODES.first):
        if isinstance(member, Section):
            count = len(list(all_keys(member.kind)))
            noun = "key" if count == 1 else "keys"
            yield f"  {member.name:<12} {count} {noun}"
    yield ""
    yield f"model.size is one of {len(load_sizes())} sizes, or FILE:ENTRY: --help sizes"
    yield from _wrapped(
        "--help KEY, SECTION, GROUP or GROUP=CHOICE explains it. --cfg job prints the configuration, --multirun sweeps "
        "over key=a,b; --resume=auto continues or starts; --version. docs/reference/keys.md has all keys."
    )


def _files(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_directory() / group).glob("*.yaml") if path.stem != "common")


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
        yield from _list("model.size", load_sizes(), "FILE:ENTRY, or an entry of conf/model_config.yaml or conf/models")
    elif name in ADDED:
        yield from _list(f"+{name}", _files(name), ADDED[name])
    elif name in MODES.groups:
        yield f"{name}: {MODES.groups[name].comment} One of:"
        for choice, kind in MODES.groups[name].choices.items():
            yield ""
            yield from _choice(MODES.groups[name], choice, kind)
    elif name == "mode":
        for mode, kind in MODES.kinds.items():
            yield from _wrapped(f"mode={mode}: {_first_line(kind)}")
    elif name in MODES.own_sections:
        yield from _section(f"{name}.", MODES.own_sections[name])
    elif name.startswith("mode=") and name.partition("=")[2] in MODES.kinds:
        mode = name.partition("=")[2]
        yield from _wrapped(f"mode={mode}: {_first_line(MODES.kinds[mode])}")
        if mode in MODES.own_sections:
            yield from _section(f"{mode}.", MODES.own_sections[mode])
    elif (
        name.partition("=")[0] in MODES.groups
        and name.partition("=")[2] in MODES.groups[name.partition("=")[0]].choices
    ):
        group, _, choice = name.partition("=")
        yield from _choice(MODES.groups[group], choice, MODES.groups[group].choices[choice])
    else:
        yield from _key_or_section(name)


def _key_or_section(name: str) -> Iterator[str]:
    for member in members_of(MODES.first):
        if isinstance(member, Section) and member.name == name:
            yield from _section(f"{name}.", member.kind)
    for key, owner in _every_key():
        if key.name == name:
            yield from explained(key, owner)


def _every_key() -> Iterator[tuple[Key, str]]:
    """Each key with the choice or mode that has it; "" if every run has it."""
    for key in all_keys(MODES.first):
        if key.name.partition(".")[0] not in MODES.groups:
            yield key, ""
    for group in MODES.groups.values():
        for choice, kind in group.choices.items():
            for key in all_keys(kind, f"{group.name}."):
                yield key, f"{group.name}={choice}"
    for mode, kind in MODES.own_sections.items():
        for key in all_keys(kind, f"{mode}."):
            yield key, f"mode={mode}"


def _section(prefix: str, kind: type) -> Iterator[str]:
    for key in all_keys(kind, prefix):
        yield from explained(key)


def _choice(group: Group, choice: str, kind: type) -> Iterator[str]:
    yield from _wrapped(f"{group.name}={choice}: {_first_line(kind)}")
    yield from _section(f"{group.name}.", kind)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def explained(key: Key, owner: str = "") -> Iterator[str]:
    """A key, its default, its meaning and its values, wrapped."""
    yield f"{key.name}={yaml_text(key.default)}" + (f" ({owner})" if owner else "")
    for line in key.lines:
        yield from _wrapped(line, "    ", "      ")
    if key.check is not None:
        expects = f"expects {key.check.expected}"
        if key.is_optional:
            expects += ", or null"
        yield from _wrapped(expects, "    ", "      ")


def yaml_text(value: Any) -> str:
    """A value as a person would write it in YAML.

    >>> yaml_text(0.003), yaml_text(10**11), yaml_text([2, 3]), yaml_text(0.1), yaml_text({})
    ('3.0e-3', '100_000_000_000', '[2, 3]', '0.1', '{}')
    """
    if isinstance(value, float) and 0 < value < 0.01:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if isinstance(value, int) and value >= 10_000:
        return f"{value:_}"
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_text, value))}]"
    return shown(value)
