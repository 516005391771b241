"""A Hugging Face folder, or a model of the hub: its model and its tokenizer, in place of a run or of a model size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from zero.base.errors import UserError
from zero.corpus.text.hub import PREFIX, download
from zero.corpus.text.tokenizers import load_tokenizer
from zero.exchange.hf_config import read_architecture, read_size
from zero.exchange.hf_folder import CONFIG_FILE, HuggingFaceFolder
from zero.exchange.hub_folder import FILES, FILES_BUT_WEIGHTS
from zero.exchange.text_part import text_config
from zero.files.parsing import json_object
from zero.job.sizes import SizeKeys, Sizes, load_sizes
from zero.models.config import GPTConfig

TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # the first that a folder has is used


@dataclass(frozen=True)
class HubModel:
    """A folder and the model in it, in place of the entries of conf/model_config.yaml.

    Attributes:
      name: of the model, `hf:NAME@COMMIT` or the path of the folder: a value of model.size that never changes.
    """

    name: str
    path: Path
    size: GPTConfig

    def chosen(self, model: SizeKeys) -> GPTConfig:
        """Its size with `model.override`; raises UserError if that is impossible."""
        try:
            return dataclasses.replace(self.size, **model.override)
        except (TypeError, ValueError) as error:
            raise UserError(f"model.override={model.override} of {self.path}: {error}") from error

    def override_for(self, tokenizer: str) -> dict[str, int]:
        """What `model.override` needs for another tokenizer, whose tokens the model may lack."""
        tokens = load_tokenizer(tokenizer).vocab_size
        if tokens > self.size.vocab_size:
            return {"vocab_size": tokens}
        return {}

    def tokenizer(self) -> str:
        """The path of its tokenizer; raises UserError if it has none that zero reads."""
        for name in TOKENIZERS:
            if (self.path / name).is_file():
                return str(self.path / name)
        raise UserError(f"{self.path}: holds no tokenizer; expected {' or '.join(TOKENIZERS)}, or data.tokenizer")


def open_hf_model(path: str) -> HubModel | None:
    """The model of a Hugging Face folder or of `hf:NAME@REVISION`; None for another path.

    Raises:
      UserError, Unavailable: the model does not exist, or zero does not support it.
    """
    folder = Path(path)
    if path.startswith(PREFIX):
        folder = download(path, FILES)
    elif not is_folder(folder):
        return None
    with HuggingFaceFolder(folder) as opened:
        return HubModel(_lasting_name(path, folder), folder, opened.whole_size())


def open_hf_config(path: str) -> HubModel | None:
    """Like `open_hf_model`, by the config.json alone: no weights are read or downloaded."""
    folder = Path(path)
    if path.startswith(PREFIX):
        folder = download(path, FILES_BUT_WEIGHTS)
    elif not is_folder(folder):
        return None
    origin = str(folder / CONFIG_FILE)
    config = text_config(origin, json_object((folder / CONFIG_FILE).read_bytes(), origin))
    architecture = read_architecture(origin, config)
    layers = config.get(architecture.layers_key, config.get(architecture.aliases.get(architecture.layers_key, "")))
    if type(layers) is not int or layers < 1:
        raise UserError(f"{origin}: {architecture.layers_key} is {layers!r}; expected the number of layers")
    return HubModel(_lasting_name(path, folder), folder, read_size(origin, config, architecture, layers))


def sizes_named(size: str) -> Sizes | HubModel:
    """Where model.size is found: the model of a folder or of the hub that it names, or the entries of files.

    Raises as `open_hf_model`.
    """
    return open_hf_config(size) or load_sizes()


def _lasting_name(path: str, folder: Path) -> str:
    """The folder of a download has the name of its commit."""
    if path.startswith(PREFIX):
        return f"{path.partition('@')[0]}@{folder.name}"
    return str(folder.resolve())


def is_folder(path: Path) -> bool:
    """Whether a directory is a Hugging Face folder."""
    return (path / CONFIG_FILE).is_file()
