"""The tokenizer of a model of the Hugging Face hub, by its name."""

from __future__ import annotations

from zero.runtime.errors import UserError
from zero.runtime.text.chat_template import CONFIG, TEMPLATE
from zero.runtime.text.hub import PREFIX, download
from zero.runtime.text.tokenizers import FileTokenizer

TOKENIZER = "tokenizer.json"


def hub_tokenizer(place: str) -> tuple[FileTokenizer, str]:
    """The tokenizer of `hf:NAME` or `hf:NAME@REVISION`, and `hf:NAME@COMMIT`, which is the same for ever.

    Raises:
      UserError: as `download`; or the model has no tokenizer.json, or one that cannot be used.
    """
    folder = download(place, (TOKENIZER, CONFIG, TEMPLATE))
    path = folder / TOKENIZER
    if not path.is_file():
        raise UserError(f"{place} has no {TOKENIZER}; expected a model with a file of the tokenizers library")
    return FileTokenizer(str(path), path.read_bytes()), f"{place.partition('@')[0]}@{folder.name}"


def is_hub(name: str | None) -> bool:
    return name is not None and name.startswith(PREFIX)
