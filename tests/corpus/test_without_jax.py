"""`zero.corpus` and `zero.files` where jax cannot be imported. tests/test_packaging.py installs them on their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.without_jax import LIBRARIES, use_corpus

REPOSITORY = Path(__file__).parents[2]
ZERO_PREPARE = [sys.executable, "-c", "from zero.corpus.preparing.zero_prepare import main; main()"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which the libraries that a machine without jax lacks cannot be imported, by child processes either."""
    for name in LIBRARIES:
        (tmp_path / "blocked" / name).mkdir(parents=True)
        program = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')"
        (tmp_path / "blocked" / name / "__init__.py").write_text(program)
    return dict(os.environ) | {"PYTHONPATH": f"{tmp_path / 'blocked'}:{REPOSITORY}"}


def test_corpus_is_prepared_verified_and_read(environment: dict[str, str], tmp_path: Path) -> None:
    use_corpus(tmp_path, sys.executable, ZERO_PREPARE, environment)


def test_only_public_names_need_jax(environment: dict[str, str]) -> None:
    """Modules are imported from zero, and unknown names looked up, as everywhere; a public name says what it lacks."""
    code = """if True:
        import zero
        from zero import corpus, files
        from zero.base import errors
        assert "shard_optimizer" in dir(zero) and not hasattr(zero, "nothing")
        zero.shard_optimizer
    """
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'jax'", done.stderr
