"""The files of conf/: where they are, in the repository and in an installed wheel, and the model sizes (omegaconf)."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import zero
from zero.config.check import describe
from zero.config.schema import Model
from zero.errors import UserError
from zero.files.parsing import reading
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES


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


class Sizes(Mapping[str, GPTConfig]):
    """Model sizes by name, each made when it is asked for, as there are many and a run needs one.

    Attributes:
      path: the file that they were read from.
      entries: the keys of each size as they are written, which overrides are merged over, without those of its family.
    """

    def __init__(self, path: Path) -> None:
        """Raises UserError where there is no such file, or not one of names with values."""
        if not path.is_file():
            raise UserError(f"{path}: not found; expected the model sizes")
        self.path = path
        self.entries = read_yaml(path, f"{path}: expected the model sizes")

    def __getitem__(self, name: str) -> GPTConfig:
        """Raises UserError where the entry is wrong, and KeyError where there is none."""
        try:
            return _make_size(self.entries[name] or {})
        except ValueError as error:
            raise UserError(f"{self.path}: size {name!r}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def chosen(self, model: Model) -> GPTConfig:
        """The size that these keys name: its entry, in `model.sizes` if it has one there, and `model.override` over it.

        Raises:
          UserError: there is no such size, a file is wrong, or the model is impossible with these overrides.
        """
        files = [self, *([] if model.sizes is None else [load_sizes(Path(model.sizes))])]
        entries = {name: entry for file in files for name, entry in file.entries.items()}
        if model.size not in entries:
            places = " and ".join(["conf/model_config.yaml", *([] if model.sizes is None else [model.sizes])])
            raise UserError(f"model.size={model.size}: expected one of {', '.join(entries)} ({places})")
        try:
            return _make_size({**entries[model.size], **model.override})
        except ValueError as error:
            raise UserError(f"model.size={model.size} with model.override={model.override}: {error}") from error


def load_sizes(path: Path | None = None) -> Sizes:
    """The model sizes of `conf/model_config.yaml`, which tests check, or of another such file, checked here.

    Raises:
      UserError: the file or a key of a size is missing, unknown, of another type, or impossible; every size that is
        wrong has a line.
    """
    if path is None:
        return Sizes(conf_directory() / "model_config.yaml")
    sizes = Sizes(path)
    mistakes = []
    for name in sizes:
        try:
            sizes[name]
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError("\n".join(mistakes))
    return sizes


def _make_size(entry: Any) -> GPTConfig:
    """The model of an entry.

    Raises:
      ValueError: a key is missing, unknown, of another type, or impossible.
    """
    keys = _with_family(entry)
    if keys.get("num_head", 0) is None and isinstance(keys.get("head_dim"), int) and keys["head_dim"] > 0:
        keys["num_head"], rest = divmod(keys["embedding_dim"], keys["head_dim"])
        if rest:
            raise ValueError(f"embedding_dim {keys['embedding_dim']} is no multiple of head_dim {keys['head_dim']}")
    schema = OmegaConf.structured(GPTConfig)
    OmegaConf.set_readonly(schema, False)  # GPTConfig is frozen, and the entry is merged into its schema
    try:
        checked = OmegaConf.to_container(OmegaConf.merge(schema, keys), throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(describe(error)) from error
    return GPTConfig(**checked)  # type: ignore[arg-type]  # the mapping that was merged


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
