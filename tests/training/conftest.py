"""Fixtures of the tests of training."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of transformers with a tokenizer, which TRL's trainers start from."""
    from tests.helpers.brought import save_folder

    folder = tmp_path_factory.mktemp("trl") / "folder"
    save_folder(folder, "llama")
    return folder
