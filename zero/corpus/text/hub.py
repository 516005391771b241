"""Files of models on the Hugging Face hub, in the cache of its library (huggingface_hub, in the extra hub)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero.base.errors import Unavailable, UserError, first_line, install_command

PREFIX = "hf:"


def download(source: str, files: Sequence[str], revision: str | None = None) -> Path:
    """The local folder with these files (patterns) of `hf:NAME` or `hf:NAME@REVISION`; its name is the commit.

    Files come from `HF_ENDPOINT` into the cache of the hub's own library, once for all its users; what is there already
    is not fetched again. Without the hub (or with `HF_HUB_OFFLINE=1`) the revision is taken from the cache. `revision`
    takes the place of the one in `source`; without any it is `main`.

    Raises:
      UserError: the model or revision does not exist, or huggingface_hub is missing.
      Unavailable: the hub cannot be reached, and the cache does not hold it.
    """
    name, _, named = source.removeprefix(PREFIX).partition("@")
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise UserError(f"{source}: huggingface_hub is missing; {install_command('hub')}") from None
    options: Any = {"revision": revision or named or None, "endpoint": os.environ.get("HF_ENDPOINT")}
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), **options))
    except errors.LocalEntryNotFoundError as error:
        raise Unavailable(f"{source}: the hub cannot be reached, and this revision is not in the cache") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, ValueError) as error:
        raise UserError(f"{source}: {first_line(error)}") from error
    except OSError as error:
        raise Unavailable(f"{source}: {first_line(error)}") from error
