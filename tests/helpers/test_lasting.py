"""Runs that follow each other in one process find what a process of their own would (tests/helpers/lasting.py)."""

import ast
import logging
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from tests.helpers import cli, lasting
from tests.helpers.rooms import SOURCES
from zero.corpus.text import tokenizers


def cached_effects(source: str) -> Iterator[str]:
    """The cached functions of a module that return nothing: what they do, they do once per process.

    >>> list(cached_effects("@cache\\ndef warn() -> None: ...\\n@cache\\ndef three() -> int: ..."))
    ['warn']
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.returns is None or ast.unparse(node.returns) != "None":
            continue
        if any(ast.unparse(decorator).startswith(("cache", "lru_cache")) for decorator in node.decorator_list):
            yield node.name


def test_effects_of_once_are_known() -> None:
    """All but the setting of the process's allocator are had again by each run."""
    found = {f"{module}.{name}" for module, path in SOURCES.items() for name in cached_effects(path.read_text())}
    again = {f"{function.__module__}.{function.__name__}" for function in lasting.ONCE}
    assert found == again | {"zero.hosts.startup.keep_freed_memory"}


def test_a_line_is_printed_by_each_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tokenizers._warn_once("a tokenizer contradicts itself")
        assert len(caplog.messages) == 1
        lasting.print_again()
        tokenizers._warn_once("a tokenizer contradicts itself")
        assert len(caplog.messages) == 2


def test_environment_of_a_run() -> None:
    """A variable that is not given is gone, but for those that this process has read."""
    with patch.dict(os.environ, {"WANDB_CACHE_DIR": "of the run before", "NPROC": "16"}):
        others = {name: value for name, value in os.environ.items() if name != "WANDB_CACHE_DIR"}
        lasting.take_environment(others | {"NETRC": "here", "NPROC": "1"})
        assert "WANDB_CACHE_DIR" not in os.environ
        assert (os.environ["NETRC"], os.environ["NPROC"]) == ("here", "16")


def test_each_run_has_its_environment(lasting: cli.Lasting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own variables reach a run; one with another setting of jax is not begun."""
    job = (*cli.TINY, "data.index_path_train=${oc.env:INDEX_OF_A_TEST}")
    for name in ("first.index", "second.index"):
        monkeypatch.setenv("INDEX_OF_A_TEST", name)
        cli.check_refusal(lasting.run(*job), name)
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    done = lasting.run(*job)
    assert (done.returncode, done.stderr) == (1, "JAX_LOG_COMPILES: this process has read other values; fork the run")
