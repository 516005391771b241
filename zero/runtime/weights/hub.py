"""Models of the Hugging Face hub, by name (huggingface_hub, of the extra hub)."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import jax

from zero.runtime.errors import Unavailable, UserError, first_line, install_command
from zero.runtime.hosts import agreement

log = logging.getLogger(__name__)

PREFIX = "hf:"
# What is read of a repository: weights are safetensors or nothing, and nothing of it is ever run.
_FILES = (
    *("config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)


def hub_folder(place: str) -> Path:
    """The local folder of `hf:NAME` or `hf:NAME@REVISION`, a branch, a tag or a commit; by default `main`.

    Files come from `HF_ENDPOINT` into the cache of the hub's own library, once for all its users; what is there already
    is not fetched again. Without the hub (or with `HF_HUB_OFFLINE=1`) the revision is taken from the cache. All hosts
    take the commit that host 0 has found, and the log names it, so that a later run can ask for the same.

    Raises:
      UserError: there is no such model or revision, or huggingface_hub is missing.
      Unavailable: the hub cannot be reached, and the cache does not hold it.
    """
    name, _, revision = place.removeprefix(PREFIX).partition("@")
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise UserError(f"{place}: huggingface_hub is missing; {install_command('hub')}") from None

    def fetch(revision: str | None) -> Path:
        options: Any = {"revision": revision, "allow_patterns": list(_FILES), "endpoint": os.environ.get("HF_ENDPOINT")}
        try:
            return Path(huggingface_hub.snapshot_download(name, **options))
        except errors.LocalEntryNotFoundError as error:
            raise Unavailable(f"{place}: the hub cannot be reached, and the cache has no such revision") from error
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, ValueError) as error:
            raise UserError(f"{place}: {first_line(error)}") from error
        except OSError as error:
            raise Unavailable(f"{place}: {first_line(error)}") from error

    found: Path | None = None
    answer: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            found = fetch(revision or None)
            answer = {"commit": found.name}
        except UserError as error:
            answer = {"error": str(error), "status": error.status}
    answer = json.loads(agreement.broadcast(f"hub {place}", json.dumps(answer)))
    if "error" in answer:
        raise (Unavailable if answer["status"] == Unavailable.status else UserError)(answer["error"])
    log.info("%s is %s%s@%s", place, PREFIX, name, answer["commit"])
    return found or fetch(answer["commit"])
