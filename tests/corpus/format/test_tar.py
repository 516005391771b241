"""Tars as tar and others write them: no file is lost without a word."""

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.corpora import make
from tests.helpers.shards import npy
from zero.base.errors import UserError
from zero.corpus import Rows
from zero.corpus.format.shards import count_rows

pytestmark = pytest.mark.quick
LONG = f"{'x' * 90}/{'y' * 90}"
LINK = ("--dereference --hard-dereference and without --sparse", "so its contents are not in their place")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for i in range(4):
        np.save(folder / f"{i:03}.input_id.npy", np.arange(10 * i, 10 * i + 4, dtype=np.uint16))
    return folder


def archive(folder: Path, *options: str) -> Path:
    path = folder.parent / "it.tar"
    subprocess.run(["tar", "cf", path, "--sort=name", *options, "."], cwd=folder, check=True)
    return path


def first_tokens(path: Path) -> list[int]:
    index = path.with_suffix(".index")
    index.write_text(f"{path.name}\n")
    rows = Rows(index, batch=1, context=4, seed=None, epochs=1)
    return [tokens[0, 0] for tokens in rows]


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_formats(folder: Path, form: str):
    if form in ("gnu", "posix"):
        long = folder / LONG
        long.mkdir(parents=True)
        np.save(long / "größe-日本.input_id.npy", np.arange(70, 74, dtype=np.uint16))
    path = archive(folder, f"--format={form}")
    expected = [0, 10, 20, 30, *([70] if form in ("gnu", "posix") else [])]
    assert first_tokens(path) == expected and count_rows(path) == len(expected)


def test_the_long_name_of_a_folder_is_not_that_of_the_next_file(folder: Path):
    (folder / LONG).mkdir(parents=True)
    path = folder.parent / "it.tar"
    subprocess.run(["tar", "cf", path, f"{LONG}/", "003.input_id.npy"], cwd=folder, check=True)
    assert first_tokens(path) == [30]


def hard_link(folder: Path) -> None:
    os.link(folder / "002.input_id.npy", folder / "009.input_id.npy")


def symbolic_link(folder: Path) -> None:
    (folder / "009.input_id.npy").symlink_to("002.input_id.npy")


def sparse(folder: Path) -> None:
    data = npy(np.zeros((4, 40_000), np.uint16))
    with open(folder / "009.input_id.npy", "wb") as file:
        file.write(data[:128])
        file.truncate(len(data))


@pytest.mark.parametrize(
    ("change", "options", "kind"),
    [
        (hard_link, (), "a hard link"),
        (symbolic_link, (), "a symbolic link"),
        (sparse, ("--sparse", "--format=gnu"), "a sparse file"),
        (sparse, ("--sparse", "--format=posix"), "a sparse file"),
    ],
)
def test_files_whose_contents_are_elsewhere(
    folder: Path, change: Callable[[Path], None], options: tuple[str, ...], kind: str
):
    change(folder)
    path = archive(folder, *options)
    for read in (count_rows, first_tokens):
        with pytest.raises(UserError, match=rf"it\.tar: \./009\.input_id\.npy is {kind}, {LINK[1]}; .* {LINK[0]}"):
            read(path)
    whole = archive(folder, "--dereference", "--hard-dereference")
    assert count_rows(whole) == (8 if kind == "a sparse file" else 5)


def test_links_in_tars_of_text(folder: Path, tmp_path: Path):
    """zero-prepare reads them by webdataset, which would leave them out."""
    for path in folder.iterdir():
        path.unlink()
    for i in range(9):
        (folder / f"{i}.txt").write_text(f"document {i}")
    os.link(folder / "3.txt", folder / "9.txt")
    path = archive(folder)
    with pytest.raises(UserError, match=rf"9\.txt is a hard link, {LINK[1]}; .* {LINK[0]}"):
        make(path, tmp_path, "c")


def test_archives_joined_by_cat(folder: Path, tmp_path: Path):
    first = archive(folder)
    second = first.rename(tmp_path / "second.tar")
    first = archive(folder)
    joined = tmp_path / "joined.tar"
    joined.write_bytes(first.read_bytes() + second.read_bytes())
    for read in (count_rows, first_tokens):
        with pytest.raises(UserError, match=r"joined\.tar: data follow the end of the archive.* --concatenate"):
            read(joined)
    subprocess.run(["tar", "--concatenate", "-f", first, second], check=True)
    assert first_tokens(first) == [0, 10, 20, 30] * 2


def test_texts_joined_by_cat(tmp_path: Path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.txt").write_text(f"document {i}")
    path = archive(folder)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(UserError, match=r"it\.tar: data follow the end of the archive"):
        make(path, tmp_path, "c")


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ({"comment": "x\n18 path=evil.txt\n"}, tarfile.REGTYPE),  # no record of its own
        ({"path": "a\nb.input_id.npy"}, tarfile.REGTYPE),
        ({}, tarfile.CONTTYPE),
    ],
)
def test_records_of_posix_and_other_kinds(tmp_path: Path, header: dict[str, str], kind: bytes):
    path = tmp_path / "it.tar"
    data = npy(np.arange(4, dtype=np.uint16))
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as written:
        member = tarfile.TarInfo("a.input_id.npy")
        member.size, member.type = len(data), kind
        member.pax_headers = header
        written.addfile(member, io.BytesIO(data))
    assert first_tokens(path) == [0]


def test_an_empty_member_is_named(folder: Path):
    (folder / "empty.input_id.npy").touch()
    with pytest.raises(UserError, match=r"it\.tar: \./empty\.input_id\.npy is not a complete \.npy array"):
        count_rows(archive(folder))
