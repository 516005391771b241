"""All keys, modes, groups and sizes as conf/help.json describes them, for programs that do not wait for jax.

The declarations stand beside the code that reads them, whose import takes seconds. `python -m docs.print_reference`
writes the file from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

CONF = Path(__file__).resolve().parents[1] / "conf"
FILE = "help.json"


@dataclass(frozen=True)
class DeclaredKey:
    """A key as `--help` explains it.

    Attributes:
      name: with its section, such as training.batch_size.
      default: as YAML.
      lines: what it means: a sentence, and lines that explain its values.
      expects: which values it accepts; "" if its type says it.
    """

    name: str
    default: str
    lines: tuple[str, ...]
    expects: str


@dataclass(frozen=True)
class Choice:
    """A mode, or a choice of a group: its meaning, and the keys that it adds."""

    meaning: str
    keys: tuple[DeclaredKey, ...]


@dataclass(frozen=True)
class ChoiceGroup:
    """Choices by name, of which a run has one; the first is the default."""

    meaning: str
    choices: dict[str, Choice]


@dataclass(frozen=True)
class Size:
    """A size of a model.

    Attributes:
      parameters: None if an entry was changed since they were counted.
      layers: None if the entry does not say it; so for `width` and `context`.
      family: "" if it belongs to none.
      entry: the digest of the keys that were counted; "" of others.
    """

    name: str
    parameters: int | None
    layers: int | None
    width: int | None
    context: int | None
    family: str
    entry: str


@dataclass(frozen=True)
class Declared:
    """What the program can be told.

    Attributes:
      sections: the keys of every run, by the name of their section; those of "" are in no section.
      groups: by name, such as optimizer.
      modes: by name, such as sample.
      sizes: the packaged sizes as they were counted, smallest first; `sizes_in_files` are those of today.
    """

    sections: dict[str, tuple[DeclaredKey, ...]]
    groups: dict[str, ChoiceGroup]
    modes: dict[str, Choice]
    sizes: tuple[Size, ...]

    def owners(self) -> dict[str, tuple[str, ...]]:
        """Every key with the choices or the mode that have it, such as optimizer=lion; none: every run has it."""
        owners: dict[str, tuple[str, ...]] = {key.name: () for keys in self.sections.values() for key in keys}
        for name, group in self.groups.items():
            for choice_name, choice in group.choices.items():
                for key in choice.keys:
                    owners[key.name] = (*owners.get(key.name, ()), f"{name}={choice_name}")
        for name, mode in self.modes.items():
            owners |= {key.name: (f"mode={name}",) for key in mode.keys}
        return owners

    def to_json(self) -> str:
        """The text of conf/help.json."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` writes."""
        content = json.loads(text)
        groups = {
            name: ChoiceGroup(group["meaning"], _choices(group["choices"])) for name, group in content["groups"].items()
        }
        return cls(
            {name: _keys(keys) for name, keys in content["sections"].items()},
            groups,
            _choices(content["modes"]),
            tuple(Size(**size) for size in content["sizes"]),
        )


@cache
def declared() -> Declared:
    """What conf/help.json of this package describes."""
    return Declared.from_json((CONF / FILE).read_text(encoding="utf-8"))


def digest_of_entry(entry: Mapping[str, Any]) -> str:
    """Equal for equal keys of a size, whatever their order.

    >>> digest_of_entry({"N": 2, "tied": True}) == digest_of_entry({"tied": True, "N": 2})
    True
    """
    return hashlib.sha256(json.dumps(entry, sort_keys=True, default=str).encode()).hexdigest()[:16]


def sizes_in_files(conf: Path = CONF) -> tuple[Size, ...]:
    """The sizes that conf/model_config.yaml and conf/models hold now, smallest first; those that changed come last.

    Raises:
      UserError: a file is not YAML, or does not map names to values.
    """
    from zero.config.files import read_yaml  # imports omegaconf, which other pages do without

    counted = {size.name: size for size in declared().sizes}
    sizes: list[Size] = []
    others: list[Size] = []
    for path in (conf / "model_config.yaml", *sorted((conf / "models").glob("*.yaml"))):
        for name, entry in read_yaml(path, f"{path}: expected the model sizes").items():
            keys = entry or {}
            if name in counted and digest_of_entry(keys) == counted[name].entry:
                sizes.append(counted[name])
                continue
            layers, width, context = (keys.get(key) for key in ("N", "embedding_dim", "block_size"))
            others.append(Size(name, None, layers, width, context, keys.get("family", ""), ""))
    order = list(counted)
    return (*sorted(sizes, key=lambda size: order.index(size.name)), *others)


def _keys(keys: list[dict[str, Any]]) -> tuple[DeclaredKey, ...]:
    return tuple(DeclaredKey(key["name"], key["default"], tuple(key["lines"]), key["expects"]) for key in keys)


def _choices(choices: dict[str, dict[str, Any]]) -> dict[str, Choice]:
    return {name: Choice(choice["meaning"], _keys(choice["keys"])) for name, choice in choices.items()}
