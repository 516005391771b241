"""A teacher's tokens beside an index file: written in batches, read from the disk, and what is wrong with them."""

from pathlib import Path

import numpy as np
import pytest

from zero.base.errors import UserError
from zero.corpus.format.top_tokens import read_top_tokens, write_top_tokens


def test_written_and_read(tmp_path: Path) -> None:
    index = str(tmp_path / "web.index")
    with pytest.raises(UserError, match=r"web\.teacher\.json: no such file; mode=evaluate evaluate\.top_tokens=32"):
        read_top_tokens(index)
    tokens = np.arange(24).reshape(3, 4, 2)
    values = -tokens.astype(np.float32)
    described = write_top_tokens(
        index, (3, 4, 2), 300, [3, "blocks", "x"], [(tokens[:2], values[:2]), (tokens[2:], values[2:])]
    )
    found, arrays = read_top_tokens(index)
    assert found == described and (found.shape, found.largest) == ((3, 4, 2), 23)
    assert arrays["tokens"].dtype == np.uint16 and isinstance(arrays["tokens"], np.memmap)
    np.testing.assert_array_equal(arrays["tokens"], tokens)
    np.testing.assert_array_equal(arrays["log_probabilities"], values)
    assert {path.name for path in tmp_path.iterdir()} == {
        "web.teacher.json",
        "web.teacher-tokens.npy",
        "web.teacher-log_probabilities.npy",
    }


def test_damage_is_named(tmp_path: Path) -> None:
    """A file that is cut, and one of another shape."""
    index = str(tmp_path / "web.index")
    batch = np.zeros((3, 4, 2)), np.zeros((3, 4, 2))
    write_top_tokens(index, (3, 4, 2), 300, [], [batch])
    path = tmp_path / "web.teacher-tokens.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(UserError, match=r"web\.teacher-tokens\.npy is damaged; write it again"):
        read_top_tokens(index)
    np.save(path, np.zeros((3, 4, 1), np.uint16))
    with pytest.raises(UserError, match=r"its shape \(3, 4, 1\) is not \(3, 4, 2\)"):
        read_top_tokens(index)
    with pytest.raises(UserError, match="are written beside an index file on a disk"):
        write_top_tokens("gs://bucket/web.index", (3, 4, 2), 300, [], [batch])
