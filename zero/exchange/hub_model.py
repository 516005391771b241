"""A Hugging Face folder, or a model of the hub, in place of a run: its model, its weights and its tokenizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from zero.base.errors import UserError
from zero.config.schema import Model
from zero.corpus.text.hub import PREFIX, download
from zero.exchange.hf_folder import CONFIG_FILE, HuggingFaceFolder
from zero.exchange.hub_folder import FILES
from zero.models.config import GPTConfig

TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # the first that a folder has is used


@dataclass(frozen=True)
class HubModel:
    """A folder and the model in it, in place of the entries of conf/model_config.yaml."""

    path: Path
    size: GPTConfig

    def chosen(self, model: Model) -> GPTConfig:
        """Its size with `model.override`; raises UserError where that is impossible."""
        try:
            return dataclasses.replace(self.size, **model.override)
        except (TypeError, ValueError) as error:
            raise UserError(f"model.override={model.override} of {self.path}: {error}") from error

    def tokenizer(self) -> str:
        """The path of its tokenizer; raises UserError if it has none that is read."""
        for name in TOKENIZERS:
            if (self.path / name).is_file():
                return str(self.path / name)
        raise UserError(f"{self.path}: holds no tokenizer; expected {' or '.join(TOKENIZERS)}, or data.tokenizer")


def open_hf_model(path: str) -> HubModel | None:
    """The model of a Hugging Face folder or of `hf:NAME@REVISION`; None for another path.

    Raises:
      UserError, Unavailable: there is no such model, or none that zero computes.
    """
    folder = Path(path)
    if path.startswith(PREFIX):
        folder = download(path, FILES)
    elif not is_folder(folder):
        return None
    with HuggingFaceFolder(folder) as opened:
        return HubModel(folder, opened.whole_size())


def is_folder(path: Path) -> bool:
    """Whether a directory is a Hugging Face folder."""
    return (path / CONFIG_FILE).is_file()
