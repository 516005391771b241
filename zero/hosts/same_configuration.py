"""Checks that all hosts have the same configuration; with different ones they would wait forever or diverge."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zero.base.errors import UserError
from zero.hosts import agreement


def check_same_configuration(values: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Compares values, the model, the version of jax and the code of zero with all other hosts.

    Args:
      values: of the checked configuration by the names of keys, without those that name something of one host.
      model: the keys of its size.

    Raises:
      UserError: on all hosts, a line for each key that differs, with its values and the hosts that have them.
    """
    facts = {f"{key} of the model (model_config.yaml)": value for key, value in model.items()}
    facts |= values
    facts |= {f"the version of {package}": version(package) for package in ("jax", "jaxlib")}
    facts["zero's code (by a digest of its files)"] = source_digest(Path(__file__).parents[1])
    texts = {key: json.dumps(value, default=str) for key, value in facts.items()}
    if mistakes := _differences(texts):
        raise UserError("\n".join(f"{mistake}; all hosts need the same value" for mistake in mistakes))


def source_digest(package: Path) -> str:
    """A digest of the names and contents of the modules below a folder."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _differences(texts: dict[str, str]) -> list[str]:
    """Each key whose text is not the same on all hosts."""
    first = json.loads(agreement.broadcast("configuration", json.dumps(texts)))
    mine: dict[str, Any] = {
        key: texts.get(key, "nothing") for key in sorted(first | texts) if texts.get(key) != first.get(key)
    }
    differing: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for host, text in agreement.reports("configuration", json.dumps(mine) if mine else None).items():
        for key, value in json.loads(text).items():
            differing[key][value].append(host)
    return [
        f"{key}: host 0 has {first.get(key, 'nothing')}, "
        + ", ".join(f"{_hosts(hosts)} {value}" for value, hosts in differing[key].items())
        for key in sorted(differing)
    ]


def _hosts(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"host {numbers[0]} has"
    return f"hosts {', '.join(map(str, numbers))} have"
