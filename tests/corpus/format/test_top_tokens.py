"""A teacher's tokens beside an index file: written in batches, read from the disk, and what is wrong with them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from zero.base.errors import Unavailable, UserError
from zero.corpus.format import row_blocks
from zero.corpus.format.top_tokens import read_top_tokens, write_top_tokens

pytestmark = pytest.mark.quick


def test_written_and_read(tmp_path: Path) -> None:
    index = str(tmp_path / "web.index")
    with pytest.raises(UserError, match=r"web\.teacher\.json: no such file; mode=evaluate evaluate\.top_tokens=32"):
        read_top_tokens(index)
    tokens = np.arange(24).reshape(3, 4, 2)
    values = -1 - tokens.astype(np.float32)
    described = write_top_tokens(
        index, (3, 4, 2), 300, [3, "blocks", "x"], [(tokens[:2], values[:2]), (tokens[2:], values[2:])]
    )
    found, arrays = read_top_tokens(index)
    assert found == described and (found.shape, found.largest) == ((3, 4, 2), 23)
    assert arrays["tokens"].dtype == np.uint16 and isinstance(arrays["tokens"].array, np.memmap)
    np.testing.assert_array_equal(arrays["tokens"][:], tokens)
    np.testing.assert_array_equal(arrays["log_probabilities"][1:3], values[1:3])
    assert arrays["log_probabilities"].cut(1)[:2].shape == (2, 4, 1)
    assert {path.name for path in tmp_path.iterdir()} == {
        "web.teacher.json",
        "web.teacher-tokens.npy",
        "web.teacher-log_probabilities.npy",
    }


def test_damage_is_named(tmp_path: Path) -> None:
    """A file that is cut, and one of another shape; one bit in a header, which digests of values do not cover."""
    index = str(tmp_path / "web.index")
    batch = np.zeros((3, 4, 2)), np.full((3, 4, 2), -1.0)
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
    path.write_bytes(whole.replace(b"'<u2'", b"'>u2'"))
    with pytest.raises(UserError, match=r"teacher-tokens\.npy is damaged; .*: its dtype is >u2; expected "):
        read_top_tokens(index)
    path.write_bytes(whole.replace(b"{'descr'", b"z'descr'"))
    with pytest.raises(UserError, match=r"web\.teacher-tokens\.npy is damaged; write it again"):
        read_top_tokens(index)
    path.write_bytes(whole)
    description = tmp_path / "web.teacher.json"
    description.write_text(description.read_text().replace('"tokens"', '"uokens"'))
    with pytest.raises(UserError, match=r"teacher\.json is damaged; .*: it has digests of uokens, log_probabilities"):
        read_top_tokens(index)


def test_second_writer_is_refused(tmp_path: Path) -> None:
    """While one process writes, another one is refused with its name; earlier values stay until the end."""
    index = str(tmp_path / "web.index")
    tokens = np.arange(24).reshape(3, 4, 2)
    earlier, later = (np.full((3, 4, 2), value, np.float32) for value in (-1, -2))
    write_top_tokens(index, (3, 4, 2), 300, [], [(tokens, earlier)])

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield tokens[:1], later[:1]
        with pytest.raises(
            Unavailable, match=rf"web\.teacher: a teacher's tokens: process {os.getpid()} on .* is writing"
        ):
            write_top_tokens(index, (3, 4, 2), 300, [], [(tokens, earlier)])
        np.testing.assert_array_equal(read_top_tokens(index)[1]["log_probabilities"][:], earlier)
        yield tokens[1:], later[1:]

    write_top_tokens(index, (3, 4, 2), 300, [], batches())
    np.testing.assert_array_equal(read_top_tokens(index)[1]["log_probabilities"][:], later)
    assert len(list(tmp_path.iterdir())) == 3


def test_rows_that_did_not_come(tmp_path: Path) -> None:
    """Tokens of fewer or more rows than the index file has replace nothing."""
    index = str(tmp_path / "web.index")
    tokens = np.arange(24).reshape(3, 4, 2)
    values = -1 - tokens.astype(np.float32)
    write_top_tokens(index, tokens.shape, 300, [], [(tokens, values)])
    for batches in ([(tokens[:2], values[:2])], [(tokens, values), (tokens[:1], values[:1])]):
        given = sum(len(batch) for batch, _ in batches)
        with pytest.raises(UserError, match=rf"web\.teacher: the teacher gave the tokens of {given} rows; expected 3"):
            write_top_tokens(index, tokens.shape, 300, [], batches)
    np.testing.assert_array_equal(read_top_tokens(index)[1]["tokens"][:], tokens)
    assert len(list(tmp_path.iterdir())) == 3


def test_damaged_rows_are_refused_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows are a block: other blocks of the file are read, and the damaged one is named."""
    monkeypatch.setattr(row_blocks, "_BLOCK_BYTES", 64)
    index = str(tmp_path / "web.index")
    tokens = np.arange(40).reshape(5, 4, 2)
    write_top_tokens(index, (5, 4, 2), 300, [], [(tokens[:3], -tokens[:3] - 1.0), (tokens[3:], -tokens[3:] - 1.0)])
    for name in ("tokens", "log_probabilities"):
        path = tmp_path / f"web.teacher-{name}.npy"
        whole = path.read_bytes()
        array = np.load(path)
        array[3, 0, 0] += 1
        np.save(path, array)
        damaged = read_top_tokens(index)[1][name]
        np.testing.assert_array_equal(damaged[:2], array[:2])
        np.testing.assert_array_equal(damaged[4:], array[4:])
        with pytest.raises(
            UserError, match=rf"web\.teacher-{name}\.npy, rows 2 to 3: other values than were stored.*rite"
        ):
            damaged[1:5]
        path.write_bytes(whole)


@pytest.mark.parametrize(("value", "message"), [(-0.1, "add up to 1.81, more than 1"), (np.nan, "not all are finite")])
def test_impossible_probabilities_are_refused(tmp_path: Path, value: float, message: str) -> None:
    """When they are written; and when they are read, of files that an earlier version has written without digests."""
    index = str(tmp_path / "web.index")
    tokens = np.zeros((3, 4, 2))
    with pytest.raises(UserError, match=rf"web\.teacher: the teacher's log-probabilities: .*{message}"):
        write_top_tokens(index, tokens.shape, 300, [], [(tokens, np.full(tokens.shape, value))])
    assert list(tmp_path.iterdir()) == []
    write_top_tokens(index, tokens.shape, 300, [], [(tokens, np.full(tokens.shape, -1.0))])
    description = tmp_path / "web.teacher.json"
    facts = json.loads(description.read_text())
    description.write_text(json.dumps({key: facts[key] for key in facts if key not in ("blocks", "block_rows")}))
    np.save(tmp_path / "web.teacher-log_probabilities.npy", np.full(tokens.shape, value, np.float32))
    with pytest.raises(UserError, match=rf"log_probabilities\.npy, rows 0 to 2: .*{message}; restore it"):
        read_top_tokens(index)[1]["log_probabilities"][:]


def test_earlier_version_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its files have no digests of rows, and are read."""
    index = str(tmp_path / "web.index")
    values = np.full((3, 4, 2), -1.0, np.float32)
    write_top_tokens(index, values.shape, 300, [], [(np.zeros(values.shape), values)])
    description = tmp_path / "web.teacher.json"
    facts = json.loads(description.read_text())
    assert len(facts["blocks"]["tokens"]) == 1
    description.write_text(json.dumps({key: facts[key] for key in facts if key not in ("blocks", "block_rows")}))
    np.testing.assert_array_equal(read_top_tokens(index)[1]["log_probabilities"][:], values)
    (warning,) = caplog.messages
    assert "is of an earlier version, which stored no digests of rows" in warning
