"""`--help`: one screen; `--help KEY`: a key, a section, a group or one of its choices, or the model sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from zero.base.errors import UserError
from zero.base.versions import version_of
from zero.config.declared import whole_kind
from zero.config.files import conf_directory, load_sizes
from zero.config.keys import Group, Key, Section, all_keys, members_of
from zero.config.names import unknown
from zero.config.printed import choices_of_groups, yaml_text
from zero.config.schema import GROUPS, MODE_SECTIONS, MODES

WIDTH = 100  # columns of a terminal
COMMANDS = {
    "": "trains the default job: a small model",
    "training.total_steps=50 zero.stage=1": "trains with other values of keys",
    "--resume": "continues the newest run",
    "mode=sample sample.prompt='def main('": "continues a text with the newest run",
    "mode=plan +preset=v3-32": "predicts memory and time, without a TPU",
    "--doctor": "examines this machine",
}
ADDED = {
    "preset": "a model on a slice",
    "slice": "a TPU slice",
    "memory": "what makes larger models fit",
    "recipe": "a published run",
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
            mistakes.append(unknown(name))
    if mistakes:
        raise UserError("\n".join(mistakes))
    return "\n\n".join(pages)


def version_text() -> str:
    """The version of zero and of jax."""
    return f"zero {version_of('zero-pmap')}, jax {version_of('jax')}"


def _screen() -> Iterator[str]:
    yield "Trains GPTs whose state is sharded over all devices (ZeRO), with nothing but jax.pmap."
    yield ""
    yield "  python main_zero.py [key=value ...] [--resume]"
    yield ""
    for arguments, meaning in COMMANDS.items():
        yield f"  python main_zero.py {arguments:<38} {meaning}"
    yield ""
    yield "Groups, such as optimizer=lion; the first is the default:"
    for group, choices in choices_of_groups().items():
        yield f"  {group:<12} {', '.join(choices)}"
    yield ""
    yield "Files of settings, such as +preset=v3-8:"
    for group, meaning in ADDED.items():
        yield from _list(f"+{group}", meaning, _files(group))
    yield ""
    yield "Keys, by section:"
    plain = [member.name for member in members_of(whole_kind()) if isinstance(member, Key) and member.name != "mode"]
    yield f"  {'':<12} {', '.join(plain)}"
    for member in members_of(whole_kind()):
        if isinstance(member, Section):
            count = len(list(all_keys(member.kind)))
            noun = "key" if count == 1 else "keys"
            yield f"  {member.name:<12} {count} {noun}"
    yield ""
    yield f"model.size is one of {len(load_sizes())} sizes, or FILE:ENTRY: --help sizes"
    yield "--help KEY, SECTION, GROUP or GROUP=CHOICE explains it. --cfg job prints the configuration, --multirun"
    yield "sweeps over key=a,b; --resume=auto continues or starts; --version. docs/reference/keys.md has all keys."


def _files(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_directory() / group).glob("*.yaml") if path.stem != "common")


def _list(name: str, meaning: str, values: Iterable[str]) -> list[str]:
    text = f"{meaning}: {', '.join(values)}"
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {name:<12} ", subsequent_indent=" " * 15, break_on_hyphens=False
    )


def _page(name: str) -> Iterator[str]:
    """What this name means, as far as it is one; no line if it is none."""
    if name == "sizes":
        yield from _list("model.size", "FILE:ENTRY, or an entry of conf/model_config.yaml or conf/models", load_sizes())
    elif name in ADDED:
        yield from _list(f"+{name}", ADDED[name], _files(name))
    elif name in GROUPS:
        yield f"{name}: {GROUPS[name].comment} One of:"
        for choice, kind in GROUPS[name].choices.items():
            yield ""
            yield from _choice(GROUPS[name], choice, kind)
    elif name == "mode":
        for mode, kind in MODES.items():
            yield from textwrap.wrap(f"mode={mode}: {_first_line(kind)}", WIDTH)
    elif name in MODE_SECTIONS:
        yield from _section(f"{name}.", MODE_SECTIONS[name])
    elif name.startswith("mode=") and name.partition("=")[2] in MODES:
        mode = name.partition("=")[2]
        yield from textwrap.wrap(f"mode={mode}: {_first_line(MODES[mode])}", WIDTH)
        if mode in MODE_SECTIONS:
            yield from _section(f"{mode}.", MODE_SECTIONS[mode])
    elif name.partition("=")[0] in GROUPS and name.partition("=")[2] in GROUPS[name.partition("=")[0]].choices:
        group, _, choice = name.partition("=")
        yield from _choice(GROUPS[group], choice, GROUPS[group].choices[choice])
    else:
        yield from _key_or_section(name)


def _key_or_section(name: str) -> Iterator[str]:
    for member in members_of(whole_kind()):
        if isinstance(member, Section) and member.name == name:
            yield from _section(f"{name}.", member.kind)
    for key, owner in _every_key():
        if key.name == name:
            yield from explained(key, owner)


def _every_key() -> Iterator[tuple[Key, str]]:
    """Each key with what has it: nothing if every run has it."""
    for key in all_keys(whole_kind()):
        if key.name.partition(".")[0] not in GROUPS:
            yield key, ""
    for group in GROUPS.values():
        for choice, kind in group.choices.items():
            for key in all_keys(kind, f"{group.name}."):
                yield key, f"{group.name}={choice}"
    for mode, kind in MODE_SECTIONS.items():
        for key in all_keys(kind, f"{mode}."):
            yield key, f"mode={mode}"


def _section(prefix: str, kind: type) -> Iterator[str]:
    for key in all_keys(kind, prefix):
        yield from explained(key)


def _choice(group: Group, choice: str, kind: type) -> Iterator[str]:
    yield f"{group.name}={choice}: {_first_line(kind)}"
    yield from _section(f"{group.name}.", kind)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def explained(key: Key, owner: str = "") -> Iterator[str]:
    """A key, its default, its meaning and its values, wrapped."""
    yield f"{key.name}={yaml_text(key.default)}" + (f" ({owner})" if owner else "")
    for line in key.lines:
        yield from textwrap.wrap(line, WIDTH, initial_indent="    ", subsequent_indent="      ")
    if key.check is not None:
        expects = f"expects {key.check.expected}"
        if key.is_optional:
            expects += ", or null"
        yield from textwrap.wrap(expects, WIDTH, initial_indent="    ", subsequent_indent="      ")
