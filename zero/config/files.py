"""Locates the files of conf/, in the repository and in an installed wheel, and reads YAML (omegaconf)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.constructor import ConstructorError

from zero.base.errors import UserError
from zero.files.parsing import reading

_INTERPOLATION = re.compile(r"(\\*)\$\{")


def conf_directory() -> Path:
    """The directory of config.yaml: in an installed wheel `zero/conf`, which in the repository is a link to `conf`."""
    return Path(__file__).resolve().parents[1] / "conf"


def read_yaml(path: Path, message: str, kind: type[UserError] = UserError) -> dict[str, Any]:
    """The mapping in a YAML file of string keys. Its texts are texts: `${...}` is not resolved.

    Raises:
      kind: it holds anything else; `message` begins the line.
    """
    data = path.read_bytes()
    with reading(message, YAMLError, OmegaConfBaseException, OSError, kind=kind):  # OSError: the YAML is a number
        content = _content(data.decode("utf-8"))
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise TypeError("expected names with values")
    return content


def _content(text: str) -> Any:
    """What omegaconf makes of a text, in a tenth of the time where it is plain: libyaml scans it, and not Python.

    A text that libyaml rejects, or that has more in it, is left to omegaconf, whose errors match those for Hydra's
    files.
    """
    loader = _quick_loader()
    if loader is not None and "\t" not in text:  # libyaml takes a tab where the other scanner takes none
        with suppress(YAMLError):
            content = yaml.load(text, loader)
            if isinstance(content, dict) and is_plain(content):
                return content
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))


def literal(value: Any) -> Any:
    r"""The value with its texts escaped for omegaconf, which then resolves no interpolation in them.

    Everything that did not come from the command line passes through it: omegaconf's resolvers read the environment and
    make directories.

    >>> print(literal({"path": "${oc.env:HOME}"}))
    {'path': '\\${oc.env:HOME}'}
    >>> OmegaConf.to_container(OmegaConf.create(literal({"path": ["${oc.env:HOME}"]})), resolve=True)
    {'path': ['${oc.env:HOME}']}
    """
    if isinstance(value, dict):
        return {key: literal(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [literal(element) for element in value]
    if isinstance(value, str):
        return _INTERPOLATION.sub(r"\1\1\\${", value)
    return value


def is_plain(value: Any) -> bool:
    """Whether a value is what omegaconf would leave as it is: string keys, numbers and texts.

    >>> is_plain({"sizes": [1, 2.5, None], "name": "a"}), is_plain({1: "a"})
    (True, False)
    """
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _constructed(loader: Any, node: yaml.MappingNode) -> Iterator[dict[Any, Any]]:
    """The mapping of a node. Raises ConstructorError for a repeated key; YAML's own loaders take the last one."""
    names = [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]
    if len(set(names)) < len(names):
        raise ConstructorError("while constructing a mapping", node.start_mark, "found a repeated key")
    return yaml.constructor.SafeConstructor.construct_yaml_map(loader, node)


@cache
def _quick_loader() -> Any:
    """libyaml's loader with the rules of omegaconf; None without libyaml.

    These are: a key is not repeated, a number may have an exponent without a dot or a sign (1e-3, 1.5e3), and a date is
    a text.
    """
    if not yaml.__with_libyaml__:
        return None

    class QuickLoader(yaml.CSafeLoader):
        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
            for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
        }

    exponent = re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
    QuickLoader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    QuickLoader.add_constructor("tag:yaml.org,2002:map", _constructed)
    return QuickLoader
