"""The files of conf/: where they are, in the repository and in an installed wheel, and how YAML is read (omegaconf)."""

from __future__ import annotations

import io
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zero.base.errors import UserError
from zero.files.parsing import reading


def conf_directory() -> Path:
    """The directory of config.yaml: in an installed wheel `zero/conf`, which in the repository is a link to `conf`."""
    return Path(__file__).resolve().parents[1] / "conf"


def read_yaml(path: Path, message: str, kind: type[UserError] = UserError) -> dict[str, Any]:
    """The mapping in a YAML file of string keys, its interpolations resolved.

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

    A text that libyaml refuses or that has more in it is left to omegaconf, whose errors are those of Hydra's files.
    """
    loader = _quick_loader()
    if loader is not None and "\t" not in text:  # libyaml takes a tab where the other scanner takes none
        with suppress(YAMLError):
            content = yaml.load(text, loader)
            if isinstance(content, dict) and is_plain(content):
                return content
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=True)


def is_plain(value: Any) -> bool:
    """Whether a value is what omegaconf would leave as it is: names, numbers and texts without an interpolation.

    >>> is_plain({"sizes": [1, 2.5, None], "name": "a"}), is_plain({"name": "${sizes}"}), is_plain({1: "a"})
    (True, False, False)
    """
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(of_key) for key, of_key in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, str):
        return "${" not in value
    return value is None or isinstance(value, (bool, int, float))


@cache
def _quick_loader() -> Any:
    """omegaconf's loader, which refuses a repeated key and reads 1e-3 as a number, on libyaml; None without libyaml."""
    if not yaml.__with_libyaml__:
        return None
    loader = get_yaml_loader()

    class QuickLoader(yaml.cyaml.CParser, loader):  # type: ignore[misc, valid-type]
        def __init__(self, stream: str) -> None:
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return QuickLoader
