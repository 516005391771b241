"""Generates conf/config.yaml, conf/help.json, the head of conf/model_config.yaml and reference pages from declarations.

`python -m docs.print_reference`, after a key or a metric has changed.
"""

from __future__ import annotations

import html
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field
from itertools import chain
from typing import Any

from zero.base.keys import REQUIRED, Key, Section, all_keys, members_of, shown
from zero.commands.declared import CONF, FILE, Choice, ChoiceGroup, Declared, DeclaredKey, Size, digest_of_entry
from zero.commands.modes import MODES
from zero.config.files import conf_directory
from zero.corpus.preparing.sources.classes import ClassReader
from zero.corpus.preparing.sources.completions import CompletionReader
from zero.corpus.preparing.sources.conversations import MESSAGE, TURN
from zero.corpus.preparing.sources.labels import LabelReader
from zero.corpus.preparing.sources.preferences import PreferenceReader
from zero.corpus.preparing.sources.record_keys import RecordKeys
from zero.job.sizes import load_sizes
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.part import ConfigPart, own_keys
from zero.run import run, step_metrics
from zero.run.feature_table import FEATURES
from zero.tracking.metrics import Metric

HEAD = """\
# python main_zero.py
#
# Hardware   any; without an accelerator it runs on 2 virtual CPU devices, so that the state is really sharded
# Takes      3 to 8 minutes on two idle cores
# Expect     validation/loss about 1.37 nats per byte after 960 steps
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
    root:
      level: WARNING # of other libraries
    loggers:
      zero:
        level: INFO
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
    groups = [f"  - {name}: {next(iter(choices))} # {', '.join(choices)}" for name, choices in MODES.choices().items()]
    return HEAD + "\n".join([*groups, "  - _self_", "", *_section(MODES.first)]) + "\n" + HYDRA


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


def help_of_declarations() -> Declared:
    """The content of conf/help.json."""
    sections: dict[str, tuple[DeclaredKey, ...]] = {"": ()}
    for member in members_of(MODES.first):
        if isinstance(member, Key):
            sections[""] += (_declared_key(member),)
        elif isinstance(member, Section):
            sections[member.name] = _declared_keys(member.kind, f"{member.name}.")
    groups = {}
    for name, group in MODES.groups.items():
        choices = {
            choice: Choice(_first_line(kind), _declared_keys(kind, f"{name}."))
            for choice, kind in group.choices.items()
        }
        groups[name] = ChoiceGroup(group.comment, choices)
    modes = {}
    for name, kind in MODES.kinds.items():
        own_section = MODES.own_sections.get(name)
        keys = () if own_section is None else _declared_keys(own_section, f"{name}.")
        modes[name] = Choice(_first_line(kind), keys)
    return Declared(sections, groups, modes, tuple(_sizes()))


def _declared_keys(kind: type, prefix: str) -> tuple[DeclaredKey, ...]:
    return tuple(_declared_key(key) for key in all_keys(kind, prefix))


def _declared_key(key: Key) -> DeclaredKey:
    expects = ""
    if key.check is not None:
        expects = key.check.expected
        if key.is_optional:
            expects += ", or null"
    return DeclaredKey(key.name, yaml_text(key.default), key.lines, expects)


def _sizes() -> Iterator[Size]:
    sizes = load_sizes()
    for name, parameters in sizes.parameters.items():
        size = sizes[name]
        entry = sizes.entry(name)
        family, digest = entry.get("family", ""), digest_of_entry(entry)
        yield Size(name, parameters, size.N, size.embedding_dim, size.block_size, family, digest)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def models_head() -> str:
    """The comments before the entries of conf/model_config.yaml: the keys of a model, part by part."""
    families = (
        "An entry may set a family, which sets the keys below that its published models have in common: "
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
    meaning = " ".join(field.metadata["lines"])
    if default is REQUIRED:
        return meaning
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


KEYS_HEAD = """\
# Keys

Every key of the configuration, its default and its meaning. This page and `conf/config.yaml` are printed from the
declarations beside the code that reads them (`python -m docs.print_reference`); `--help KEY` explains a key in
the terminal.
"""


def keys_page() -> str:
    """The text of docs/reference/keys.md."""
    top = [member for member in members_of(MODES.first) if isinstance(member, Key) and member.name != "mode"]
    lines = [KEYS_HEAD, *_table(top, {})]
    for section in members_of(MODES.first):
        if isinstance(section, Section):
            lines += ["", f"## {section.name}", "", *_table(all_keys(section.kind, f"{section.name}."), {})]
    for group in MODES.groups.values():
        lines += ["", f"## {group.name}=", "", f"{group.comment} The first is the default."]
        explained: dict[str, str] = {}
        for name, kind in group.choices.items():
            choice = f"{group.name}={name}"
            lines += ["", f"### {choice}", "", " ".join(inspect.cleandoc(str(kind.__doc__)).split())]
            keys = list(all_keys(kind, f"{group.name}."))
            lines += ["", *_table(keys, explained)] if keys else []
            for row in _table(keys, {}):
                explained.setdefault(row, choice)
    lines += ["", "## mode="]
    for mode, config in MODES.kinds.items():
        lines += ["", f"### mode={mode}", "", " ".join(inspect.cleandoc(str(config.__doc__)).split())]
        if mode in MODES.own_sections:
            lines += ["", *_table(all_keys(MODES.own_sections[mode], f"{mode}."), {})]
    return "\n".join(lines) + "\n"


def _table(keys: Iterable[Key], explained: Mapping[str, str]) -> Iterator[str]:
    """Rows of keys; a long row that the table of another choice already has names that choice."""
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for key in keys:
        start = f"| `{key.name}` | `{yaml_text(key.default)}` |"
        meaning = "<br>".join(html.escape(line, quote=False).replace("|", "\\|") for line in key.lines)
        row = f"{start} {meaning} |"
        if row in explained and len(meaning) > 80:
            row = f"{start} as for `{explained[row]}` |"
        yield row


METRICS_HEAD = """\
# Metrics

A run writes one JSON object per line to `metrics.jsonl`: every `training.log_frequency` steps, and at each evaluation
and checkpoint. Weights & Biases and TensorBoard show them by step in the panels
`train/`, `validation/`, `perf/`, `data/` and `experts/`, without checksums, and the sampled texts as a table.

- Of two lines for one step the later one counts.
- A resume writes `{"event": "resume", "step": STEP}`.
- Times are means over the steps since the line before, without those that were compiled.
- A metric is left out where it does not apply. One that is not finite is `null`.

This page is printed from the declarations in `zero/run` (`python -m docs.print_reference`).

| metric | meaning |
|---|---|
"""


def metrics_page() -> str:
    """The text of docs/reference/metrics.md."""
    rows = []
    for metric in all_metrics():
        names = ", ".join(f"`{name}`" for name in metric.names)
        rows.append(f"| {names} | {metric.sentence} |\n")
    return METRICS_HEAD + "".join(rows)


def all_metrics() -> list[Metric]:
    """The metrics of every run, then those that each feature adds."""
    feature_metrics = chain.from_iterable(feature.metrics for feature in FEATURES)
    return [*run.METRICS, *step_metrics.METRICS, *step_metrics.metrics_of_objectives(), *feature_metrics]


RECORDS_HEAD = """\
# Records

zero-prepare reads records: lines and elements of JSON, rows of tables, samples of tars. Each key is read, or is refused
with an error that names it, or is named in one line after the corpus: `keys not read: url, id`. A refused key without a
value (null, an empty text or list) is ignored, and so is a `weight` of 1. The marks of messages are those of OpenAI
(`weight`), axolotl (`train`), ms-swift and xtuner (`loss`); `system` is LLaMA-Factory's.

Without an option a record has one text, under `text` or the key that `--key` names. No key of it is refused.

This page is printed from the tables of the readers (`python -m docs.print_reference`).
"""


def records_page() -> str:
    """The text of docs/reference/records.md."""
    readers: dict[str, Iterable[RecordKeys]] = {"--completions": CompletionReader.FORMS}
    readers |= {"--preferences": PreferenceReader.FORMS, "--labels": LabelReader.FORMS}
    readers |= {"--classification": ClassReader.FORMS}
    readers["Messages and turns within a record"] = (MESSAGE, TURN)
    lines = [RECORDS_HEAD]
    for title, forms in readers.items():
        lines.append(f"## {title}\n")
        for form in forms:
            lines += [f"`{form.form}`\n", "| key | |", "|---|---|"]
            lines += [f"| {keys} | {meaning} |" for meaning, keys in _keys_by_meaning(form.read)]
            lines += [f"| {keys} | refused: {remedy} |" for remedy, keys in _keys_by_meaning(form.refused)]
            lines.append("")
    lines.append("Any other key of a message that the chat template names is read by the template.")
    return "\n".join(lines) + "\n"


def _keys_by_meaning(meanings: Mapping[str, str]) -> list[tuple[str, str]]:
    """Each meaning with the keys that have it."""
    keys: dict[str, list[str]] = {}
    for key, meaning in meanings.items():
        keys.setdefault(meaning, []).append(f"`{key}`")
    return [(meaning, ", ".join(names)) for meaning, names in keys.items()]


if __name__ == "__main__":
    (conf_directory() / "config.yaml").write_text(config_yaml())
    (CONF / FILE).write_text(help_of_declarations().to_json())
    models = conf_directory() / "model_config.yaml"
    _, separator, entries = models.read_text().partition("\ntest:")
    models.write_text(models_head() + separator + entries)
    reference = conf_directory().resolve().parent / "docs" / "reference"
    (reference / "keys.md").write_text(keys_page())
    (reference / "metrics.md").write_text(metrics_page())
    (reference / "records.md").write_text(records_page())
