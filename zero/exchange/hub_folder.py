"""Models of the Hugging Face hub, by name (huggingface_hub, of the extra hub)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax

from zero.base.errors import Unavailable, UserError
from zero.corpus.text.hub import download
from zero.corpus.text.special_tokens import COMPANIONS
from zero.hosts import agreement

log = logging.getLogger(__name__)

# What is read of a repository: weights are safetensors or nothing, and nothing of it is ever run.
FILES_BUT_WEIGHTS = ("config.json", "tokenizer.json", "tokenizer.model", *COMPANIONS)
FILES = ("model*.safetensors", "model.safetensors.index.json", *FILES_BUT_WEIGHTS)


def hub_folder(source: str) -> Path:
    """The local folder of `hf:NAME` or `hf:NAME@REVISION`, a branch, a tag or a commit; by default `main`.

    All hosts take the commit that host 0 has found, and the log names it, so that a later run can ask for the same.

    Raises:
      UserError, Unavailable: as `zero.corpus.text.hub.download`.
    """
    folder: Path | None = None
    answer: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            folder = download(source, FILES)
            answer = {"commit": folder.name}
        except UserError as error:
            answer = {"error": str(error), "status": error.status}
    answer = json.loads(agreement.broadcast(f"hub {source}", json.dumps(answer)))
    if "error" in answer:
        raise (Unavailable if answer["status"] == Unavailable.status else UserError)(answer["error"])
    log.info("%s is %s@%s", source, source.partition("@")[0], answer["commit"])
    if folder is None:
        folder = download(source, FILES, answer["commit"])
    return folder
