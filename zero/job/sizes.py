"""Model sizes: the entries of conf/model_config.yaml and conf/models, or of the user's own file (omegaconf)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero.base.errors import UserError
from zero.base.keys import key
from zero.config.files import conf_directory, literal, read_yaml
from zero.config.messages import describe, did_you_mean
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.models.gpt import parameter_axes

_HEADINGS = re.compile(r'^"?([^\s:"]+)"?: # ([\d,]+) parameters', re.MULTILINE)  # of the entries; tests recount them
_COUNT = re.compile(r"(?:.*[^\d.])?(\d+(?:\.\d+)?)([kmbt])", re.IGNORECASE)
_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_SUGGESTED = 4  # sizes
_FARTHEST = 1.5  # times as many parameters, or as few


def _is_same_entry(one: str, other: str) -> bool:
    """Whether two names denote the same entry of a file, which may have moved; other names must be equal.

    >>> _is_same_entry("my.yaml:mine", "other/my.yaml:mine"), _is_same_entry("my.yaml:bytes", "bytes")
    (True, False)
    >>> _is_same_entry("hf:a/b@c", "hf:a/b@d")
    False
    """
    paths = [path for path, _, _ in (one.rpartition(":"), other.rpartition(":"))]
    is_file = all(path and path != "hf" for path in paths)
    return one == other or (is_file and one.rpartition(":")[2] == other.rpartition(":")[2])


@dataclass(frozen=True)
class SizeKeys:
    """Which model it is: keys of section `model`."""

    size: str = key(
        "bytes",
        None,
        "An entry of conf/model_config.yaml or of a file in conf/models.",
        "my.yaml:mine: the entry mine of my.yaml, your own file in the format of conf/model_config.yaml.",
        "hf:NAME@REVISION or a Hugging Face folder: the model of its config.json; with warm_start, by default the "
        "model of model_path.",
        fixed=_is_same_entry,
    )
    override: dict[str, Any] = key(
        {},
        None,
        "Overrides keys of the entry, such as model.override.N=24 model.override.embedding_dim=512.",
        fixed=True,
    )

    def __str__(self) -> str:
        """The model's name in messages."""
        return f"model.size={self.size}"


class Sizes(Mapping[str, GPTConfig]):
    """Model sizes by name, each made on request, because there are many and a run needs one.

    Args:
      path: the file with their entries.
      families: a directory of further files. Each has the entries whose names begin with the file's name, and is read
        when such a name, or the list of all names, is requested.
    """

    def __init__(self, path: Path, families: Path | None = None) -> None:
        """Raises UserError if the file does not exist, or does not map names to values."""
        if not path.is_file():
            raise UserError(f"{path}: not found; expected the model sizes")
        self.path = path
        self._families = {} if families is None else {file.stem: file for file in sorted(families.glob("*.yaml"))}
        self._read: dict[Path, dict[str, Any]] = {}
        self._chosen: dict[str, GPTConfig] = {}  # keyed by the keys as written
        self._entries(path)

    def _entries(self, path: Path) -> dict[str, Any]:
        """The entries of a file; reads it once."""
        if path not in self._read:
            self._read[path] = read_yaml(path, f"{path}: expected the model sizes")
        return self._read[path]

    def _file(self, name: str) -> Path:
        """The file with this size, if any: of the files whose name is a prefix of the size's, the longest."""
        stems = [stem for stem in self._families if name.startswith(stem)]
        if name in self._entries(self.path) or not stems:
            return self.path
        return self._families[max(stems, key=len)]

    def entry(self, name: str) -> Any:
        """The keys of a size as written, without its family's. Raises KeyError if there is no such size."""
        return self._entries(self._file(name))[name]

    def __getitem__(self, name: str) -> GPTConfig:
        """Raises UserError if the entry is wrong, and KeyError if there is none."""
        entry = self.entry(name)
        try:
            return _make_size(entry or {})
        except ValueError as error:
            raise UserError(f"{self._file(name)}: size {name!r}: {error}") from error

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries(self._file(name))

    def __iter__(self) -> Iterator[str]:
        for path in (self.path, *self._families.values()):
            yield from self._entries(path)

    def __len__(self) -> int:
        return len(list(iter(self)))

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The number of parameters by the name of each size, smallest first, as their files say."""
        texts = [path.read_text() for path in (self.path, *self._families.values())]
        counts = {name: int(count.replace(",", "")) for text in texts for name, count in _HEADINGS.findall(text)}
        return dict(sorted(counts.items(), key=lambda entry: entry[1]))

    def about(self, name: str) -> list[str]:
        """The sizes with about as many parameters as a name says; none if it says no number or nothing is close.

        >>> load_sizes().about("1.2b")[:2], load_sizes().about("mine")
        (['1_1b_vq', '1_3b'], [])
        """
        wanted = _COUNT.fullmatch(name.replace("_", "."))
        if wanted is None or not float(wanted[1]):
            return []
        count = float(wanted[1]) * _UNITS[wanted[2].lower()]
        distances = {size: abs(math.log(parameters / count)) for size, parameters in self.parameters.items()}
        near = [size for size in sorted(distances, key=distances.__getitem__) if distances[size] < math.log(_FARTHEST)]
        return near[:_SUGGESTED]

    def chosen(self, model: SizeKeys) -> GPTConfig:
        """The size that these keys select: an entry of these sizes or of a file, with `model.override` applied.

        Raises:
          UserError: the size does not exist, a file is wrong, or the overrides make an impossible model.
        """
        path, _, name = model.size.rpartition(":")
        if path:
            entry = _entry_of_file(model.size, path, name)
        elif model.size in self:
            entry = self.entry(model.size)
        else:
            meant = did_you_mean(model.size, list(self))
            if not meant and (near := self.about(model.size)):
                meant = f"no such size; of about as many parameters are {', '.join(near)};"
            expected = meant or "no such size;"
            raise UserError(
                f"model.size={model.size}: {expected} --help sizes lists all, or FILE:ENTRY, such as my.yaml:mine"
            )
        keys = {**entry, **model.override}
        written = repr(keys)  # 2 and 2.0 are equal but written differently
        try:
            if written not in self._chosen:
                self._chosen[written] = _make_size(keys)
            return self._chosen[written]
        except ValueError as error:
            raise UserError(f"model.size={model.size} with model.override={model.override}: {error}") from error


def _entry_of_file(size: str, path: str, name: str) -> Any:
    """The entry of this name in a file, as written; `size` is the user's FILE:NAME.

    Raises:
      UserError: the file does not exist, lacks the entry, or is wrong.
    """
    if not Path(path).is_file():
        raise UserError(f"model.size={size}: {path} not found; if it has moved, set model.size=FILE:{name}")
    sizes = load_sizes(Path(path))
    if name not in sizes:
        raise UserError(f"model.size={size}: expected an entry of {path}: {', '.join(sizes)}")
    return sizes.entry(name)


def load_sizes(path: Path | None = None) -> Sizes:
    """The model sizes of `conf/model_config.yaml` and `conf/models`, or of a file, which is checked here.

    Raises:
      UserError: the file or a key of a size is missing, unknown, of another type, or impossible; one line for every
        wrong size.
    """
    if path is None:
        return _packaged_sizes()
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


@cache
def _packaged_sizes() -> Sizes:
    return Sizes(conf_directory() / "model_config.yaml", conf_directory() / "models")


def _make_size(entry: Any) -> GPTConfig:
    """The model of an entry.

    Raises:
      ValueError: a key is missing, unknown, of another type, or impossible.
    """
    keys = _with_family(entry)
    if keys.get("num_head", 0) is None and isinstance(keys.get("head_dim"), int) and keys["head_dim"] > 0:
        keys["num_head"], rest = divmod(keys["embedding_dim"], keys["head_dim"])
        if rest:
            raise ValueError(f"embedding_dim {keys['embedding_dim']} is not a multiple of head_dim {keys['head_dim']}")
    schema = OmegaConf.structured(GPTConfig)
    OmegaConf.set_readonly(schema, False)  # GPTConfig is frozen, and the entry is merged into its schema
    try:
        checked = OmegaConf.to_container(OmegaConf.merge(schema, literal(keys)), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(describe(error)) from error
    size = GPTConfig(**checked)  # type: ignore[arg-type]  # the mapping that was merged
    if size.zero_init:
        parameter_axes(size)  # raises if no layer has such a matrix
    return size


def _with_family(entry: Any) -> dict[str, Any]:
    """The keys of an entry, merged over its family's.

    Raises:
      ValueError: there is no such family, or the entry has no keys.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"expected the keys of a model, got {entry!r}")
    own_keys = {key: value for key, value in entry.items() if key != "family"}
    family = entry.get("family")
    if family is None:
        return own_keys
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return {**FAMILIES[family], **own_keys}
