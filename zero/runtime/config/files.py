"""The files of conf/: where they are, in the repository and in an installed wheel, and the model sizes (omegaconf)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import zero
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.runtime.config.check import describe
from zero.runtime.errors import UserError
from zero.runtime.parsing import reading


def conf_directory() -> Path:
    """The directory of config.yaml: in an installed wheel `zero/conf`, which in the repository is a link to `conf`."""
    return Path(zero.__file__).resolve().parent / "conf"


def read_yaml(path: Path, message: str, kind: type[UserError] = UserError) -> dict[str, Any]:
    """The mapping in a YAML file of string keys, its interpolations resolved.

    Raises:
      kind: it holds anything else; `message` begins the line.
    """
    data = path.read_bytes()
    with reading(message, YAMLError, OmegaConfBaseException, OSError, kind=kind):  # OSError: the YAML is a number
        content: Any = OmegaConf.to_container(OmegaConf.load(io.StringIO(data.decode("utf-8"))), resolve=True)
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise TypeError("found something else than names with values")
    return content


def load_sizes(path: Path | None = None) -> dict[str, GPTConfig]:
    """The model sizes of `conf/model_config.yaml`, or of another such file.

    Raises:
      UserError: the file or a key of a size is missing, unknown, of another type, or impossible; every size that is
        wrong has a line.
    """
    path = conf_directory() / "model_config.yaml" if path is None else path
    if not path.is_file():
        raise UserError(f"{path}: not found; expected the model sizes")
    schema = OmegaConf.structured(GPTConfig)
    OmegaConf.set_readonly(schema, False)  # GPTConfig is frozen, and the size is merged into its schema
    sizes, mistakes = {}, []
    for size, entry in read_yaml(path, f"{path}: expected the model sizes").items():
        try:
            checked = OmegaConf.to_container(OmegaConf.merge(schema, _with_family(entry or {})), throw_on_missing=True)
            sizes[str(size)] = GPTConfig(**checked)  # type: ignore[arg-type]  # the mapping that was merged
        except OmegaConfBaseException as error:
            mistakes.append(f"{path}: size {size!r}: {describe(error)}")
        except ValueError as error:
            mistakes.append(f"{path}: size {size!r}: {error}")
    if mistakes:
        raise UserError("\n".join(mistakes))
    return sizes


def _with_family(entry: Any) -> dict[str, Any]:
    """The keys of an entry, over those of its family.

    Raises:
      ValueError: there is no such family, or the entry has no keys.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"expected the keys of a model, got {entry!r}")
    own = {key: value for key, value in entry.items() if key != "family"}
    family = entry.get("family")
    if family is None:
        return own
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return {**FAMILIES[family], **own}
