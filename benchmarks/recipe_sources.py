"""Compares each recipe with the run that it names, and prints the heads of recipes and the tables of their page.

    python benchmarks/recipe_sources.py            # rewrites conf/recipe/*.yaml and docs/reference/from-other-code.md
    python benchmarks/recipe_sources.py --compare  # prints what differs without a reason; status 1 if anything does

docs/sources/recipes.yaml has the values of each run and the files that they are from.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zero.commands.cli import compose
from zero.job.sizes import load_sizes
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.planning.config import PlanConfig
from zero.training.optimizers.optimizer import hyperparameters
from zero.training.schedules import learning_rate

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = REPOSITORY / "docs" / "sources" / "recipes.yaml"
PAGE = REPOSITORY / "docs" / "reference" / "from-other-code.md"
RECIPES = REPOSITORY / "conf" / "recipe"
SIZES = load_sizes()
# Keys of an entry of a model by the attributes of GPTConfig that say what follows from them.
_RESOLVED = {
    "alibi_attn": "position_kind",
    "positions": "position_kind",
    "dropout": "residual_drop_rate",
    "residual_dropout": "residual_drop_rate",
    "mlp_dim": "mlp_width",
    "head_dim": "head_width",
}
_DERIVED = ("position_kind", "residual_drop_rate", "attention_drop_rate", "mlp_width", "head_width", "key_heads")
_WIDTH = 120


class Row(NamedTuple):
    """One value of a run: its key here, its value, its name in the source, and the file."""

    key: str
    value: Any
    theirs: str
    file: str


class Difference(NamedTuple):
    """A value of a recipe that is not that of its run, and why."""

    here: Any
    why: str


@dataclass(frozen=True)
class Run:
    """The run that a recipe names.

    Attributes:
      run, slice, published: sentences.
      rows: its values.
      differs: keys of rows whose value is another one here.
      beside: differences that no key describes.
    """

    run: str
    slice: str
    published: str
    rows: tuple[Row, ...]
    differs: Mapping[str, Difference]
    beside: tuple[str, ...]

    @property
    def files(self) -> list[str]:
        """The files that the rows are from, each once."""
        return list(dict.fromkeys(row.file for row in self.rows))


def _rows(values: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    for file, of_file in values.items():
        for key, (value, theirs) in of_file.items():
            yield Row(key, value, str(theirs), file)


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text())
    return table


def load_runs() -> dict[str, Run]:
    """The runs of docs/sources/recipes.yaml, by the name of the recipe.

    Raises:
      ValueError: a recipe has two rows for a key, or a difference without a row.
    """
    runs = {}
    for name, entry in _table()["recipes"].items():
        rows = [row for like in entry["like"] for row in _rows(_table()["runs"][like])]
        rows += _rows(entry["values"])
        differs = {key: Difference(**found) for key, found in entry.get("differs", {}).items()}
        keys = [row.key for row in rows]
        wrong = {key for key in keys if keys.count(key) > 1} | (set(differs) - set(keys))
        if wrong:
            raise ValueError(f"{name}: expected one row each for {', '.join(sorted(wrong))}")
        beside = tuple(entry.get("beside", ()))
        runs[name] = Run(entry["run"], entry["slice"], entry["published"], tuple(rows), differs, beside)
    return runs


def hosts_of(config: PlanConfig) -> int:
    """The hosts of the slice that a recipe is planned for; those of a v3 have 8 devices."""
    return int(config.plan.topology.partition("-")[2]) // 8


def resolved(config: PlanConfig, size: GPTConfig) -> dict[str, Any]:
    """What a configuration does, by the keys of the table."""
    sections: dict[str, Any] = {"training": config.training, "data": config.data}
    values = {
        f"{name}.{field.name}": getattr(section, field.name)
        for name, section in sections.items()
        for field in fields(section)
    }
    values |= {f"model.{field.name}": getattr(size, field.name) for field in fields(size)}
    values |= {f"model.{name}": getattr(size, name) for name in _DERIVED}
    values["model.mlp_width_multiple"] = size.mlp_width / size.embedding_dim
    optimizer = hyperparameters(config.optimizer.name) | config.optimizer.hyperparameters()
    values |= {f"optimizer.{name}": value for name, value in optimizer.items()}
    rows = config.training.batch_size * hosts_of(config)
    values |= {
        "seed": config.seed,
        "optimizer": config.optimizer.name,
        "schedule": config.schedule.name,
        "schedule.last": learning_rate(config.training, config.schedule).last,
        "step.rows": rows,
        "step.tokens": rows * (size.update_tokens or config.data.max_context),
    }
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


@cache
def values_of(recipe: str) -> dict[str, Any]:
    """`resolved`, of a recipe as it is."""
    return resolved(*compose([f"+recipe={recipe}", "mode=plan"]))


def disagreements(run: Run, values: Mapping[str, Any]) -> list[str]:
    """A line for each value that is neither that of the run nor that of a difference with a reason.

    >>> run = Run("", "", "", (Row("seed", 1, "rng", "main.py"),), {}, ())
    >>> disagreements(run, {"seed": 1}), disagreements(run, {"seed": 2})
    ([], ['seed is 2, the run has 1 (rng, main.py)'])
    """
    lines = []
    for row in run.rows:
        difference = run.differs.get(row.key)
        value = values.get(row.key, "not set")  # a hyperparameter of another optimizer
        if difference is None and value != row.value:
            lines.append(f"{row.key} is {value}, the run has {row.value} ({row.theirs}, {row.file})")
        elif difference is not None and (value != difference.here or value == row.value):
            lines.append(f"{row.key} is {value}, where {difference.here} in place of {row.value} has a reason")
    return lines


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def keys_set_by(recipe: str) -> set[str]:
    """The keys that a recipe, its model's entry and its model's family set, as the table names them."""
    text = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    chosen = {name: section for name, section in text.items() if name != "defaults"}
    override = chosen["model"].pop("override", {})
    entry = SIZES.entry(chosen["model"]["size"])
    of_model = {**FAMILIES.get(entry.get("family", ""), {}), **entry, **override}
    keys = set(_leaves(chosen)) | {f"model.{_RESOLVED.get(name, name)}" for name in of_model}
    return {"schedule.last" if key == "schedule.decay_end" else key for key in keys}


def without_a_row(recipe: str, run: Run) -> set[str]:
    """The keys that a recipe sets, which the table neither has nor calls `ours`."""
    known = {row.key for row in run.rows} | set(_table()["ours"])
    return {key for key in keys_set_by(recipe) if key not in known and key.partition(".")[0] not in known}


def differences_of(run: Run) -> list[str]:
    """All differences of a recipe from its run, as sentences."""
    return [*(f"{key}: {found.why}" for key, found in run.differs.items()), *run.beside]


def head_of(name: str, run: Run) -> str:
    """The comment at the head of a recipe."""
    data = (
        ""
        if name.startswith("lingvo")
        else " data.index_path_train=TRAIN.index data.index_path_validation=VALIDATION.index"
    )
    lines = ["# @package _global_", f"# python main_zero.py +recipe={name}{data}", "#", f"# {run.run}."]
    parts = {"Slice": [run.slice], "Published": [run.published], "Source": run.files, "Differs": differences_of(run)}
    for title, sentences in parts.items():
        for number, sentence in enumerate(
            sentences or ["nothing beside what docs/reference/from-other-code.md says of all recipes"]
        ):
            first = f"# {title if number == 0 else '':<10} "
            lines += textwrap.wrap(
                sentence, _WIDTH, initial_indent=first, subsequent_indent=f"# {'':<10}   ", break_on_hyphens=False
            )
    return "\n".join(lines) + "\n"


def with_head(text: str, head: str) -> str:
    """A recipe with another comment at its head."""
    return head + "\n" + text[text.index("defaults:") :]


def _number(value: float) -> str:
    """A number as the page prints it.

    >>> _number(2.5e-4), _number(524288), _number(0.015625)
    ('2.5e-4', '524,288', '2^-6')
    """
    if value >= 1:
        return f"{value:,.0f}"
    if value == 2**-6:
        return "2^-6"
    if value >= 1e-3:
        return f"{value:g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def table_row(name: str, run: Run, values: Mapping[str, Any]) -> str:
    """The row of a recipe in the first table of the page."""
    optimizer = f"{values['optimizer']}"
    if values["training.weight_decay"]:
        optimizer += f", decay {_number(values['training.weight_decay'])}"
    if values["training.max_gradient_norm"]:
        optimizer += f", clip {values['training.max_gradient_norm']:g}"
    if values["training.max_gradient_value"]:
        optimizer += f", clip of elements {values['training.max_gradient_value']:g}"
    peak = f"{_number(values['training.peak_learning_rate'])}, {values['schedule']}"
    steps = _number(values["training.total_steps"])
    if values["schedule.last"] != values["training.total_steps"]:
        steps += f" (decay to {_number(values['schedule.last'])})"
    columns = (
        f"`{name}`",
        f"{values['model.N']} x {_number(values['model.embedding_dim'])}",
        _number(values["step.tokens"]),
        peak,
        f"{steps}, {_number(values['training.warmup_steps'])}",
        optimizer,
        run.published,
    )
    return f"| {' | '.join(columns)} |"


def _shortened(names: Sequence[str], all_names: Iterable[str]) -> str:
    """Names of recipes, as their longest prefix if it selects no others.

    >>> recipes = ["gpt-neo-125m", "gpt-neo-13b", "lingvo-41b"]
    >>> _shortened(recipes[:2], recipes), _shortened(recipes[:1], recipes), _shortened(recipes, recipes)
    ('`gpt-neo-*`', '`gpt-neo-125m`', '`gpt-neo-125m`, `gpt-neo-13b`, `lingvo-41b`')
    """
    parts = names[0].split("-")
    for count in range(len(parts) - 1, 0, -1):
        prefix = "-".join(parts[:count])
        if len(names) > 1 and [name for name in all_names if name.startswith(f"{prefix}-")] == list(names):
            return f"`{prefix}-*`"
    return ", ".join(f"`{name}`" for name in names)


def page_part() -> str:
    """The tables of recipes in docs/reference/from-other-code.md: what each does, and how it differs from its run."""
    titles = ("recipe", "layers", "tokens per update", "learning rate", "steps, warmup", "optimizer", "published")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    runs = load_runs()
    for name, run in runs.items():
        lines.append(table_row(name, run, values_of(name)))
    lines += ["", "Differences from the published runs:", "", "| recipe | differs |", "|---|---|"]
    lines.append(f"| all | {'; '.join(_table()['everywhere'])} |")
    of_differences: dict[str, list[str]] = {}
    for name, run in runs.items():
        for sentence in differences_of(run):
            of_differences.setdefault(sentence, []).append(name)
    for sentence, names in of_differences.items():
        lines.append(f"| {_shortened(names, runs)} | {sentence} |")
    return "\n".join(lines) + "\n"


START, END = "<!-- printed by benchmarks/recipe_sources.py -->\n", "<!-- end -->\n"


def with_part(page: str, part: str, start: str = START) -> str:
    """The page with another text between two marks, of which the second is `END`."""
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(END)
    return before + start + part + END + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="print what differs, and write nothing")
    if parser.parse_args().compare:
        lines = []
        for name, run in load_runs().items():
            lines += [f"{name}: {line}" for line in disagreements(run, values_of(name))]
            lines += [f"{name}: {key} has no row" for key in sorted(without_a_row(name, run))]
        print("\n".join(lines))
        return int(bool(lines))
    for name, run in load_runs().items():
        path = RECIPES / f"{name}.yaml"
        path.write_text(with_head(path.read_text(), head_of(name, run)))
    PAGE.write_text(with_part(PAGE.read_text(), page_part()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
