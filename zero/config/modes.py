"""What the program can be told: a configuration for each mode, and the names of all keys in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from zero.base.keys import Group, Key, Mistakes, Section, all_keys, key, members_of
from zero.config.messages import chosen_instead, unknown_key


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The configuration class of a mode: a dataclass whose fields are keys, sections and groups.

    Each rule between keys is a method of the section whose key its message names; these three call them.
    """

    mode: str = key("train", None, "What the program does: train, evaluate, sample or plan.")
    resume: str | None = key(
        None,
        None,
        "The run directory to resume; set by the flags --resume and --resume=auto, not by hand.",
        per_host=True,
    )

    def fitted(self, size: Any) -> Self:
        """The same with the values that follow from the size of the model in place of null."""
        return self

    def mistakes(self, size: Any) -> Mistakes:
        """Contradictions between keys, or with the model: a key, and what was expected."""
        yield from ()

    def without_effect(self) -> Mistakes:
        """The keys that have no effect given the others, each with the reason; groups by name."""
        yield from ()


@dataclasses.dataclass(frozen=True)
class Modes:
    """The configurations of a program, by the names of its modes; a run is saved with the first.

    A mode may have its own keys, in a section with the mode's name.
    """

    kinds: Mapping[str, type[Configuration]]

    @property
    def first(self) -> type[Configuration]:
        return next(iter(self.kinds.values()))

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups of the first mode, by name."""
        return {member.name: member for member in members_of(self.first) if isinstance(member, Group)}

    @cached_property
    def own_sections(self) -> dict[str, type]:
        """The section of the keys that only one mode has, by the name of the mode."""
        return {
            mode: member.kind
            for mode, kind in self.kinds.items()
            for member in members_of(kind)
            if isinstance(member, Section) and member.name == mode
        }

    @cached_property
    def keys(self) -> dict[str, Key]:
        """Every key by its name, of all choices and modes; if several choices have it, the last one's."""
        keys = {each.name: each for each in all_keys(self.first)}
        for group in self.groups.values():
            for kind in group.choices.values():
                keys |= {each.name: each for each in all_keys(kind, f"{group.name}.")}
        for mode, kind in self.own_sections.items():
            keys |= {each.name: each for each in all_keys(kind, f"{mode}.")}
        return keys

    @cached_property
    def owners(self) -> dict[str, tuple[str, ...]]:
        """Every key with the choices or the mode that have it, such as optimizer=lion; none: every run has it."""
        choices_by_key: dict[str, tuple[str, ...]] = {}
        for group in self.groups.values():
            for name, kind in group.choices.items():
                for each in all_keys(kind, f"{group.name}."):
                    choices_by_key[each.name] = (*choices_by_key.get(each.name, ()), f"{group.name}={name}")
        for mode, kind in self.own_sections.items():
            choices_by_key |= {each.name: (f"mode={mode}",) for each in all_keys(kind, f"{mode}.")}
        return {each.name: () for each in all_keys(self.first)} | choices_by_key

    def choices(self) -> dict[str, list[str]]:
        """The names of the choices of each group, the default first; the modes are one as well."""
        return {name: list(group.choices) for name, group in self.groups.items()} | {"mode": list(self.kinds)}

    def chosen(self, name: str, value: str = "...") -> str | None:
        """The replacement for the name of a choice used as a key; None for any other name."""
        return chosen_instead(name, self.groups, value)

    def unknown(self, name: str) -> str:
        """A line for a key that this run does not have: who has it, else the one that was probably meant, else all."""
        return unknown_key(name, self.owners, self.groups)
