"""Folders of corpora: the lock of the process that prepares one."""

import os
from pathlib import Path

import pytest

from zero.corpus.format import directory


@pytest.mark.parametrize("is_writable", [True, False])
def test_an_error_within_the_lock_stays(is_writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a folder that can only be read: it is not the error of making the folder."""
    monkeypatch.setattr(os, "access", lambda path, mode: is_writable)
    with pytest.raises(OSError, match="no more memory"), directory.locked(str(tmp_path)):
        raise OSError("no more memory")
