"""Shards of any origin: what is read from them, and the name of every sample that cannot be used."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.shards import first_tokens, loader, npy, write_corpus, write_tar
from zero.base.errors import UserError
from zero.corpus.format.shards import count_rows, read_samples

pytestmark = pytest.mark.quick


def test_kinds_of_members(tmp_path: Path):
    """Members of one row, lengths and other members are read."""
    members = {
        "a.txt": b"not for us",
        "a.input_id.npy": npy(np.arange(6)),
        "b.input_id.npy": npy(np.arange(10, 22, dtype=np.uint64).reshape(2, 6)),
        "b.length.npy": npy(np.array([2, 6])),
        "c.length.npy": npy(np.array(3)),
        "c.input_id.npy": npy(
            np.array([20, 21, 22, -9, 99_999], np.int32)
        ),  # what lies behind the end is not looked at
    }
    write_tar(tmp_path / "s.tar", members)
    (tmp_path / "it.index").write_text("  s.tar  \n")
    (batch,) = loader(tmp_path / "it.index", shuffle=False, max_epochs=1).batches()
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [10, 11, -1, -1], [16, 17, 18, 19], [20, 21, 22, -1]]


def test_samples_are_those_of_webdataset(tmp_path: Path):
    """Folders, dots, upper case, files without a suffix and a key that comes back."""
    from webdataset.tariterators import group_by_keys

    names = [
        "a.input_id.npy",
        "a.TXT",
        "b/a.x",
        "b/c.d/e.f.g",
        "b/c.d/e.h",
        "none",
        "b/none",
        ".x",
        "b/.x",
        "a.x",
        "é.",
        "z",
    ]
    members = {name: name.encode() for name in names}
    write_tar(tmp_path / "s.tar", members)
    files = [{"fname": name, "data": data, "__url__": "s"} for name, data in members.items()]
    expected = [{key: one[key] for key in one if key != "__url__"} for one in group_by_keys(files)]
    with open(tmp_path / "s.tar", "rb") as stream:
        assert list(read_samples("s.tar", stream)) == expected and len(expected) == 6


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_any_form(tmp_path: Path, form: int):
    """Long names, names outside ASCII, folders and marked members, as `tarfile` writes them."""
    names = ["a", "part/" + "b" * 80, "folder" * 16 + "/c", "é/dé"] + ["e" * 150] * (form != tarfile.USTAR_FORMAT)
    with tarfile.open(tmp_path / "s.tar", "w", format=form) as archive:
        for number, name in enumerate(["__not__/x", *names]):
            data = npy(np.arange(number, number + 4))
            member = tarfile.TarInfo(f"{name}.input_id.npy")
            member.size, member.mtime = len(data), 0.5 if form == tarfile.PAX_FORMAT else 0
            archive.addfile(member, io.BytesIO(data))
        folder = tarfile.TarInfo("z.input_id.npy")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    (tmp_path / "it.index").write_text("s.tar\n")
    shards = loader(tmp_path / "it.index", shuffle=False, max_epochs=1, global_rows=1)
    assert shards.rows == len(names)
    assert first_tokens(shards.batches()) == [[number + 1] for number in range(len(names))]
    with open(tmp_path / "s.tar", "rb") as stream:
        keys = [sample["__key__"] for sample in read_samples(shards.corpora[0].shards[0].path, stream)]
    assert keys == names


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(4))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"x.txt": b"text"}, r"sample x has no member input_id\.npy, only txt"),
        ({"x.input_id.npy": npy(np.ones(4))}, r"sample x: member input_id\.npy must hold integers, not float64"),
        ({"x.input_id.npy": npy(np.ones((1, 1, 4), int))}, r"sample x: input_id\.npy must have 1 or 2 dimensions"),
        ({"x.input_id.npy": npy(np.array(7))}, r"sample x: input_id\.npy must have 1 or 2 dimensions, not 0"),
        ({"x.input_id.npy": npy(np.arange(3))}, r"sample x has rows of 3 tokens, but the model reads 4; prepare"),
        ({"x.input_id.npy": npy(np.zeros(0, int))}, r"sample x has rows of 0 tokens, but the model reads 4"),
        ({"x.input_id.npy": npy(np.zeros((3, 0), int))}, r"sample x has rows of 0 tokens"),
        ({"x.input_id.npy": npy(np.zeros((0, 0), int))}, r"sample x has rows of 0 tokens"),
        (
            {"x.input_id.npy": npy(np.arange(4)).replace(b"(4,), ", b"(-4,),")},
            r"sample x: member input_id\.npy is not a complete .*its shape is \(-4,\)",
        ),
        (  # numpy raises a TokenError for this one
            {"x.input_id.npy": npy(np.arange(4)).replace(b"(4,), ", b"(4,,,(")},
            r"sample x: member input_id\.npy is not a complete .*cannot parse its header",
        ),
        ({"x.input_id.npy": npy(np.array([0, 1, 60_000, 2]))}, r"sample x holds token 60000, outside the vocabulary"),
        ({"x.input_id.npy": npy(np.array([0, 1, -1, 2]))}, r"sample x holds token -1, outside the vocabulary of 60000"),
        (
            {"x.input_id.npy": npy(np.array([{}]), allow_pickle=True)},
            r"sample x: member input_id\.npy must hold integers, not object",
        ),
        ({"x.input_id.npy": npy(np.arange(4))[:-1]}, r"sample x: member input_id\.npy is not a complete \.npy"),
        ({"x.input_id.npy": b"PK\x03\x04 zip"}, r"sample x: member input_id\.npy is not a complete \.npy"),
        ({"x.input_id.npy": npz()}, r"sample x: member input_id\.npy is not a complete \.npy"),
        ({"x.input_id.npy": b""}, r"sample x: member input_id\.npy is not a complete \.npy"),
        (
            {"x.input_id.npy": npy(np.ones((2, 4), int)), "x.length.npy": npy(np.ones(3, int))},
            r"sample x: length\.npy must hold one length for each of 2 rows",
        ),
        ({"x.input_id.npy": npy(np.ones(4, int)), "x.length.npy": npy(np.array(-1))}, r"sample x: length\.npy must"),
    ],
)
def test_bad_samples_are_named(tmp_path: Path, members: dict[str, bytes], message: str):
    good = {f"{i}.input_id.npy": npy(np.arange(4)) for i in range(3)}
    write_tar(tmp_path / "s.tar", good | members)
    (tmp_path / "it.index").write_text("s.tar # 4 rows\n")
    with pytest.raises(UserError, match=r"^shard .*s\.tar, " + message) as caught:
        list(loader(tmp_path / "it.index", max_epochs=1).batches())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("counted", [True, False])
def test_truncated_and_damaged_shards_are_named(tmp_path: Path, counted: bool):
    index = write_corpus(tmp_path, [9], counted=counted)
    path = tmp_path / "shard-0.tar"
    data = path.read_bytes()
    damaged = bytearray(data)
    damaged[1024:1060] = b"?" * 36
    cuts = [data[:size] for size in (0, 1, 512, 600, 1024, 1500, 2048, 2100)]
    causes = ["unexpected end of file"] * len(cuts) + ["header does not match its checksum", "not a tar header"]
    begin = "" if counted else r"index file .*it\.index: "
    for wrong, cause in zip([*cuts, bytes(damaged), b"plain text " * 200], causes, strict=True):
        path.write_bytes(wrong)
        damage = rf"^{begin}shard \S*shard-0\.tar is truncated or damaged: .*{cause}"
        with pytest.raises(UserError, match=damage) as caught:
            list(loader(index, max_epochs=1).batches())
        assert "\n" not in str(caught.value)
        with pytest.raises(UserError, match="truncated or damaged"):
            count_rows(path)


def test_prompts_are_complements(tmp_path: Path):
    """Tokens that are not completions are read as their complements.

    For a loader that asks for it; for any other one the member is one of the others.
    """
    members = {
        "a.input_id.npy": npy(np.arange(12).reshape(2, 6)),
        "a.completion.npy": npy(np.array([[0, 0, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]], np.uint8)),
        "a.length.npy": npy(np.array([6, 2])),
        "b.input_id.npy": npy(np.array([59_999, 0, 7, 8], np.uint16)),
        "b.completion.npy": npy(np.array([0, 0, 2, 0])),
    }
    write_tar(tmp_path / "s.tar", members)
    (tmp_path / "it.index").write_text("s.tar # 3 rows\n")
    options: dict[str, Any] = {"shuffle": False, "max_epochs": 1, "global_rows": 3}
    (batch,) = loader(tmp_path / "it.index", only_completions=True, **options).batches()
    assert batch.tokens.tolist() == [[~0, ~1, 2, 3], [6, ~7, -1, -1], [~59_999, ~0, 7, ~8]]
    (batch,) = loader(tmp_path / "it.index", **options).batches()
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [6, 7, -1, -1], [59_999, 0, 7, 8]]


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_corpus_without_completions_is_named(tmp_path: Path, skip_bad: bool):
    """It is no damage that could be skipped."""
    data = loader(write_corpus(tmp_path, [9]), only_completions=True, skip_bad=skip_bad)
    with pytest.raises(UserError, match=r"shard .*, sample \d+ has no member completion\.npy.*zero-prepare --compl"):
        next(data.batches())


def test_completions_of_another_shape_are_named(tmp_path: Path):
    members = {"x.input_id.npy": npy(np.ones((2, 4), int)), "x.completion.npy": npy(np.ones((2, 5), int))}
    write_tar(tmp_path / "s.tar", members)
    (tmp_path / "it.index").write_text("s.tar # 2 rows\n")
    with pytest.raises(UserError, match=r"sample x: completion\.npy must have the shape \(2, 4\) of input_id\.npy"):
        next(loader(tmp_path / "it.index", only_completions=True).batches())
