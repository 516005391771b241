"""What is printed from declared keys: conf/config.yaml, the head of conf/model_config.yaml, docs/reference/keys.md."""

from __future__ import annotations

import html
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field
from typing import Any

from zero.config.constraints import shown
from zero.config.declared import whole_kind
from zero.config.keys import Key, Section, all_keys, members_of
from zero.config.schema import GROUPS, MODE_SECTIONS, MODES
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.part import ConfigPart, own_keys

HEAD = """\
# python main_zero.py
#
# Hardware   any; without an accelerator it runs on 2 virtual CPU devices, so that the state is really sharded
# Takes      2:55 on two idle cores
# Expect     validation/loss 1.38 nats per byte after 960 steps
#
# Any key can be set on the command line: python main_zero.py training.total_steps=50 zero.stage=1
# A value of null switches a feature off or leaves a choice to the program; the comment of the key explains which.
# python main_zero.py --help KEY explains a key, --help optimizer a group and its choices.

defaults: # groups: optimizer=lion on the command line chooses another
  - schema # model.override takes any key
"""
HYDRA = """
hydra:
  job:
    name: main_zero # of the log, main_zero.log
  job_logging:
    formatters:
      terminal:
        (): zero.tracking.terminal_log.TerminalFormatter # short lines on a terminal, whole ones elsewhere
    filters:
      once:
        (): zero.tracking.terminal_log.WarnOnce
    handlers:
      console:
        formatter: terminal
        filters: [once]
        stream: ext://sys.stderr # Standard output is for results: text of mode=sample, JSON of mode=evaluate.
      file:
        class: zero.files.appending.LogFile # which a full disk does not fill the terminal with tracebacks of
  output_subdir: null # No .hydra/: the run writes a config.yaml of its own, which a refused start must not change.
  run:
    dir: ${new_directory:runs/${now:%Y-%m-%d}/${now:%H-%M-%S}} # or the same with -2, if another start has it
  sweep:
    dir: ${new_directory:runs/multirun/${now:%Y-%m-%d_%H-%M-%S}}
    subdir: ${hydra.job.num}
"""


MODELS = """\
# Model sizes, chosen by model.size. A test recounts the parameters in each comment. model.override changes keys of an
# entry, and model.size=my.yaml:mine names one of another file. Published models are in conf/models, a file for all
# names with one beginning. What follows is printed from zero/models (python -m docs.print_reference).
#
"""
COLUMN, WIDTH = 23, 128  # of the meanings of a model's keys


def config_yaml() -> str:
    """The text of conf/config.yaml."""
    groups = [
        f"  - {name}: {next(iter(choices))} # {', '.join(choices)}" for name, choices in choices_of_groups().items()
    ]
    return HEAD + "\n".join([*groups, "  - _self_", "", *_section(whole_kind())]) + "\n" + HYDRA


def models_head() -> str:
    """The comments before the entries of conf/model_config.yaml: the keys of a model, part by part."""
    families = (
        f"An entry may name a family, which sets those of the keys below that its published models have in common: "
        f"{', '.join(FAMILIES)} (zero/models/families.py). Without a family a key has the default in parentheses."
    )
    lines = [*_wrapped(families, "# ")]
    for part in reversed(GPTConfig.__mro__):
        if issubclass(part, ConfigPart) and part is not ConfigPart and own_keys(part):
            lines += ["#", *_wrapped(str(part.__doc__).partition("\n")[0], "# ")]
            for field in own_keys(part):
                lines += _wrapped(meaning_of(field), f"# {field.name}".ljust(COLUMN - 1) + " ")
    return MODELS + "\n".join(lines) + "\n"


def meaning_of(field: Field[Any]) -> str:
    """The default of a model's key, if it has one, and what it means.

    >>> from zero.models.mlp import MLP
    >>> [meaning_of(field) for field in own_keys(MLP) if field.name == "gated"]
    ['(false) the activation multiplies a second product, as in SwiGLU: activation silu, gated true']
    """
    default = field.default
    meaning = field.metadata["meaning"]
    if default is MISSING:
        return str(meaning)
    if default is None:
        return f"({field.metadata['none']}) {meaning}"
    if isinstance(default, tuple):
        default = list(default)
    value = f"{default:g}" if isinstance(default, float) else shown(default)
    return f"({value}) {meaning}"


def _wrapped(text: str, start: str) -> list[str]:
    """Lines of a comment, of which the first begins with `start`."""
    indent = "#".ljust(len(start))
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)


def choices_of_groups() -> dict[str, list[str]]:
    """The names of the choices of each group, the default first."""
    return {name: list(group.choices) for name, group in GROUPS.items()} | {"mode": list(MODES)}


def _section(kind: type, depth: int = 0) -> Iterator[str]:
    """A line for each key, then lines that explain its values; groups are in the list of defaults."""
    indent = "  " * depth
    for member in members_of(kind):
        if isinstance(member, Key) and member.name != "mode":
            first, *more = member.lines
            yield f"{indent}{member.name}: {yaml_text(member.default)} # {first}"
            for line in more:
                yield f"{indent}  # {line}"
        elif isinstance(member, Section):
            if depth == 0:
                yield ""
            yield f"{indent}{member.name}: # {member.comment}" if member.comment else f"{indent}{member.name}:"
            yield from _section(member.kind, depth + 1)


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


KEYS_HEAD = """\
# Keys

Every key of the configuration, its default and its meaning. This page and `conf/config.yaml` are printed from the
declarations in `zero/config` and `zero/run/features` (`python -m docs.print_reference`); `--help KEY` explains a key in
the terminal.
"""


def keys_page() -> str:
    """The text of docs/reference/keys.md."""
    top = [member for member in members_of(whole_kind()) if isinstance(member, Key) and member.name != "mode"]
    lines = [KEYS_HEAD, *_table(top)]
    for section in members_of(whole_kind()):
        if isinstance(section, Section):
            lines += ["", f"## {section.name}", "", *_table(all_keys(section.kind, f"{section.name}."))]
    for group in GROUPS.values():
        lines += ["", f"## {group.name}=", "", f"{group.comment} The first is the default."]
        for name, kind in group.choices.items():
            lines += ["", f"### {group.name}={name}", "", " ".join(inspect.cleandoc(str(kind.__doc__)).split())]
            keys = list(all_keys(kind, f"{group.name}."))
            lines += ["", *_table(keys)] if keys else []
    lines += ["", "## mode="]
    for mode, config in MODES.items():
        lines += ["", f"### mode={mode}", "", " ".join(inspect.cleandoc(str(config.__doc__)).split())]
        if mode in MODE_SECTIONS:
            lines += ["", *_table(all_keys(MODE_SECTIONS[mode], f"{mode}."))]
    return "\n".join(lines) + "\n"


def _table(keys: Iterable[Key]) -> Iterator[str]:
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for key in keys:
        meaning = "<br>".join(html.escape(line, quote=False).replace("|", "\\|") for line in key.lines)
        yield f"| `{key.name}` | `{yaml_text(key.default)}` | {meaning} |"
