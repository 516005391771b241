"""Names of keys: of all choices and modes, those that were renamed, and what a misspelled one may have meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cache

from zero.config.declared import whole_kind
from zero.config.keys import Key, all_keys
from zero.config.schema import GROUPS, MODE_SECTIONS

# Keys that are chosen as groups, keys of earlier versions that have another name now (MOVED), and others of them: what
# to write in place of them.
CHOSEN = {
    "optimizer.name": "optimizer",
    "objective.name": "objective",
    "tuning.name": "tuning",
    "schedule.name": "schedule",
    "training.objective": "objective",
    "tuning.method": "tuning",
}
MOVED = {
    "training.verify_every": "verify.every",
    "training.statistics": "statistics.every",
}
RENAMED = MOVED | {
    "training.dpo_beta": "objective.beta, with objective=dpo",
    "training.harness_frequency": "harness.tasks, which run at each evaluation,",
    "harness.every": "harness.tasks, which run at each evaluation,",
    "training.skip_bad_steps": "training.max_skipped_in_a_row, of which 0 skips none,",
    "data.keep_every_hours": "data.keep_every=2h",
    "data.cache_bytes": "90 % of the free space on the disk of data.cache_directory",
    "model.sizes": "model.size=FILE:ENTRY",
    "model.ema": "evaluate.ema with mode=evaluate, sample.ema with mode=sample, and model.warm_start=ema",
    "zero.replicate": "evaluate.replicate with mode=evaluate, sample.replicate with mode=sample",
    "zero.weight_dtype": "evaluate.weight_dtype with mode=evaluate, sample.weight_dtype with mode=sample",
}


_NUMBER = re.compile(r"(\d+)")


@cache
def owners() -> dict[str, tuple[str, ...]]:
    """Every key with the choices or the mode that have it, such as optimizer=lion; none: every run has it."""
    owners_of_key: dict[str, tuple[str, ...]] = {}
    for group in GROUPS.values():
        for name, kind in group.choices.items():
            for key in all_keys(kind, f"{group.name}."):
                owners_of_key[key.name] = (*owners_of_key.get(key.name, ()), f"{group.name}={name}")
    for mode, kind in MODE_SECTIONS.items():
        owners_of_key |= {key.name: (f"mode={mode}",) for key in all_keys(kind, f"{mode}.")}
    return {key.name: () for key in all_keys(whole_kind())} | owners_of_key


@cache
def declared_keys() -> dict[str, Key]:
    """Every key by its name, of all choices and modes; of several choices that of the last one."""
    keys = {key.name: key for key in all_keys(whole_kind())}
    for group in GROUPS.values():
        for kind in group.choices.values():
            keys |= {key.name: key for key in all_keys(kind, f"{group.name}.")}
    for mode, kind in MODE_SECTIONS.items():
        keys |= {key.name: key for key in all_keys(kind, f"{mode}.")}
    return keys


def moved(name: str, value: str = "...") -> str | None:
    """What to write in place of a key that is chosen as a group or was renamed; None if it is neither."""
    if name in CHOSEN:
        group = CHOSEN[name]
        value = "none" if name == "tuning.method" and value == "all" else value
        return f"{name}: use {group}={value}"
    return f"{name}: it is {RENAMED[name]} now" if name in RENAMED else None


def did_you_mean(value: object, options: Sequence[str]) -> str:
    """The options that a misspelled one may have meant, as a question; nothing if none is similar.

    >>> did_you_mean("v3-9", ["v3-8", "v3-32"]), did_you_mean("qwen", ["v3-8"])
    ('did you mean v3-8?', '')
    """
    similar = difflib.get_close_matches(str(value), options, n=2, cutoff=0.7)
    return f"did you mean {' or '.join(similar)}?" if similar else ""


def in_order(options: Iterable[str]) -> list[str]:
    """Names in the order of their letters and numbers.

    >>> in_order(["v3-32", "v3-8", "v3-8-host", "v10"])
    ['v3-8', 'v3-8-host', 'v3-32', 'v10']
    """
    return sorted(options, key=lambda name: [int(part) if part.isdigit() else part for part in _NUMBER.split(name)])


def unknown_field(name: str, names: Sequence[str]) -> str:
    """A line for a key of a record, such as a model, that has no such key.

    >>> unknown_field("num_kv_head", ["num_head", "kv_heads", "windows"])
    'num_kv_head: there is no such key; did you mean num_head or kv_heads?'
    >>> unknown_field("x", ["num_head", "windows"])
    'x: there is no such key; expected one of num_head, windows'
    """
    similar = difflib.get_close_matches(name, names, n=2)
    if similar:
        return f"{name}: there is no such key; did you mean {' or '.join(similar)}?"
    return f"{name}: there is no such key; expected one of {', '.join(names)}"


def unknown(name: str) -> str:
    """A line for a key that this run does not have: who has it, else the key that was probably meant, else all."""
    instead = moved(name)
    if instead is not None:
        return instead
    known = owners()
    if name in MODE_SECTIONS:
        return f"{name}: only applies to mode={name}"
    if known.get(name):
        return f"{name}: only applies to {' and '.join(known[name])}"
    sections = {key.partition(".")[0] for key in known}
    similar = difflib.get_close_matches(name, [*known, *sections], n=1, cutoff=0.75)
    if similar:
        return f"{name}: there is no such key; did you mean {similar[0]}?"
    prefix = name.rpartition(".")[0]
    siblings = [key.removeprefix(f"{prefix}.") for key in known if prefix and key.startswith(f"{prefix}.")]
    names = dict.fromkeys(key.partition(".")[0] for key in siblings or known)
    return f"{name}: there is no such key; expected one of {', '.join(names)}"
