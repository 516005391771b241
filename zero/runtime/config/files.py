"""The files of conf/: where they are, in the repository and in an installed wheel, and the model sizes (omegaconf)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import zero
from zero.models.config import GPTConfig
from zero.models.families import FAMILIES
from zero.runtime.config.check import describe
from zero.runtime.errors import UserError


def conf_directory() -> Path:
    """The directory of config.yaml: in an installed wheel `zero/conf`, which in the repository is a link to `conf`."""
    return Path(zero.__file__).resolve().parent / "conf"


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
    for size, entry in OmegaConf.load(path).items():
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
      ValueError: there is no such family.
    """
    own = {key: value for key, value in entry.items() if key != "family"}
    family = entry.get("family")
    if family is None:
        return own
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return {**FAMILIES[family], **own}
