"""What zero and others have written as a source: index files, shards of token ids, and what is refused by its name."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import bucket, sources
from tests.helpers.corpora import both, call, documents_of, make, tokens_of
from tests.helpers.shards import loader
from zero.base.errors import UserError
from zero.corpus.format import own_formats
from zero.corpus.format.index_files import read_index
from zero.corpus.preparing.prepare import Corpus
from zero.files import storage
from zero.record import run_files as run_directory


@pytest.fixture
def made(folder: Path, tmp_path: Path) -> Corpus:
    return make(folder, tmp_path)


def test_an_index_file_is_its_shards(made: Corpus, folder: Path, tmp_path: Path):
    """A corpus of zero's own gets rows of another length, and other splits, without its text: the same documents."""
    again = make(made.train_index, tmp_path, "again", row_tokens=24)
    assert both(again, 24) == sorted(documents_of(made.train_index, 16))
    whole = make(f"{tmp_path}/index/c_{{train,validation}}.index", tmp_path, "whole", splits="official", row_tokens=24)
    for index, before in ((whole.train_index, made.train_index), (whole.validation_index, made.validation_index)):
        # Where a document goes on in the next shard it is two.
        joined = "".join(documents_of(index, 24))
        assert joined == "".join(documents_of(before, 16))


def test_an_index_file_and_its_shards_in_a_bucket(
    made: Corpus, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bucket.use(monkeypatch, server)
    place = f"gs://{bucket.BUCKET}/own"
    bucket.upload(Path(made.directory), f"{place}/shards")
    lines = [f"{place}/shards/{Path(shard.path).name}" for shard in read_index(made.train_index)]
    storage.write(f"{place}/remote.index", "\n".join(lines).encode())
    (tmp_path / "local.index").write_text("\n".join(lines))
    for number, index in enumerate((f"{place}/remote.index", str(tmp_path / "local.index"))):
        again = make(index, tmp_path, f"again{number}", row_tokens=24)
        assert both(again, 24) == sorted(documents_of(made.train_index, 16))
    storage.write(f"{place}/remote.index", b"shards/nowhere.tar\n")
    with pytest.raises(UserError, match=r"remote\.index: gs://bucket/own/shards/nowhere\.tar is missing"):
        make(f"{place}/remote.index", tmp_path, "missing")


def test_documents_of_shards_are_packed_and_deduplicated(made: Corpus, tmp_path: Path):
    """As documents of text are."""
    lines = [json.dumps({"text": text}) for text in ["one", "two, longer", "one", "a third, longer than a row of them"]]
    (tmp_path / "t.jsonl").write_text("\n".join(lines * 3))
    options = {"pack": "best-fit", "deduplicate": True, "validation_fraction": 0.4, "row_tokens": 48, "splits": "all"}
    first = make(tmp_path / "t.jsonl", tmp_path, "joined")
    source = f"{tmp_path}/index/joined_{{train,validation}}.index"
    again = make(source, tmp_path, "again", **options)
    assert again.duplicates == 9 and again.train.documents + again.validation.documents == 3
    assert both(again, 48) == sorted({json.loads(line)["text"] for line in lines})
    assert first.train.documents + first.validation.documents == 12


@pytest.mark.parametrize("rows_per_member", [1, 5])
def test_shards_of_others(rows_per_member: int, tmp_path: Path):
    """Rows in .npy members of any name and type, with an end of text between documents, or without any."""
    joined = np.frombuffer(b"first\0a second one\0third, which the rows cut\0", np.uint8)
    rows = np.pad(joined, (0, -len(joined) % 9)).reshape(-1, 9)
    members = {}
    for first in range(0, len(rows), rows_per_member):
        file = io.BytesIO()
        np.save(file, rows[first : first + rows_per_member].astype(np.int32).squeeze())
        members[f"{first:03}.tokens.npy"] = file.getvalue()
    (tmp_path / "others.tar").write_bytes(sources.tar(members))
    corpus = make(tmp_path / "others.tar", tmp_path)
    assert [text for text in both(corpus) if text] == ["a second one", "first", "third, which the rows cut"]


def test_rows_without_an_end_of_text_stay_rows(tmp_path: Path):
    file = io.BytesIO()
    np.save(file, np.arange(1, 241).reshape(15, 16))
    (tmp_path / "others.tar").write_bytes(sources.tar({"0.input_id.npy": file.getvalue()}))
    corpus = make(tmp_path / "others.tar", tmp_path)
    rows = np.concatenate([tokens_of(index, 16) for index in (corpus.train_index, corpus.validation_index)])
    assert sorted(rows.tolist()) == np.arange(1, 241).reshape(15, 16).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": 300}, "train_tokenizer expects text"),
        ({}, "--begin-rows, which ends a document at each row: prepare its text again"),
    ],
)
def test_rows_that_are_no_documents(options: dict, message: str, folder: Path, tmp_path: Path):
    begun = make(folder, tmp_path, begin_rows=True)
    with pytest.raises(UserError, match=message):
        make(begun.train_index, tmp_path, "again", **options)


def test_packed_and_marked_rows_are_refused(folder: Path, tmp_path: Path):
    packed = make(folder, tmp_path, "packed", pack="best-fit")
    with pytest.raises(UserError, match="--pack best-fit, which cut documents"):
        make(packed.train_index, tmp_path, "again")
    lines = [json.dumps({"prompt": f"{number}:", "completion": " c"}) for number in range(9)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    completions = make(tmp_path / "c.jsonl", tmp_path, "completions", completions=True)
    with pytest.raises(UserError, match="sample 000000000 marks completions, which other rows would lose"):
        make(completions.train_index, tmp_path, "again")


def test_what_zero_writes_is_refused_by_name(made: Corpus, tmp_path: Path):
    """As a source and in place of an index file."""
    run = tmp_path / "run"
    run.mkdir()
    for name in (run_directory.CONFIG_FILE, run_directory.COMMAND_FILE, "notes.txt"):
        (run / name).write_text("x: 1")
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "240").mkdir(parents=True)
    (checkpoints / "240" / "_CHECKPOINT_METADATA").touch()
    wrong = {
        f"{made.directory}/manifest.json": "is the manifest of a corpus",
        str(run): "is a run directory",
        str(checkpoints): "is a folder of checkpoints",
        str(checkpoints / "240"): "is a folder of checkpoints",
    }
    for path, words in wrong.items():
        done = call(path, "--row-tokens", "16")
        assert (done.returncode, done.stdout) == (2, "") and f"{path} {words}" in done.stderr
        with pytest.raises(UserError, match=rf"^index file {path} .*{words.removeprefix('is ')}"):
            loader(path)
    done = call(made.directory, "--row-tokens", "16")
    assert done.returncode == 2 and "index file of it, such as data/index/c_train.index" in done.stderr
    of_run = {run_directory.COMMAND_FILE, run_directory.LAYOUT_FILE, run_directory.METRICS_FILE}
    assert own_formats._OF_RUN == run_directory.CONFIG_FILE and own_formats._OTHERS_OF_RUN == of_run


@pytest.mark.parametrize("suffix", ["tar.gz", "tar"])
def test_shards_of_tensors_in_an_index_for_training(suffix: str, tmp_path: Path):
    """As fattorib/ZeRO-transformer lists them: said what they are, and prepared from the same index file."""
    texts = [f"document {number}" for number in range(30)]
    sources.write_ids["torch"](tmp_path / "a", texts)
    if suffix == "tar":
        (tmp_path / "a.tar").write_bytes(gzip.decompress((tmp_path / "a.tar.gz").read_bytes()))
    (tmp_path / "it.index").write_text(f"a.{suffix}\n")
    what = "is compressed" if suffix == "tar.gz" else r"holds no input_id\.npy, only \.pth"
    with pytest.raises(UserError, match=rf"shard .*a\.{suffix} {what}.*zero-prepare .*a\.{suffix} --tokenizer"):
        loader(tmp_path / "it.index")
    (tmp_path / "counted.index").write_text(f"a.{suffix} # 3 rows\n")
    with pytest.raises(UserError, match=r"zero-prepare"):
        next(loader(tmp_path / "counted.index").batches())
    assert both(make(tmp_path / "it.index", tmp_path)) == sorted(texts)
    with pytest.raises(UserError, match=r"a\.tar is compressed|a\.tar\.gz is compressed|holds no"):
        loader(tmp_path / f"a.{suffix}")


def test_braces(made: Corpus, tmp_path: Path):
    """In an index file, of index files, of shards in their place, and on the command line."""
    shards = read_index(made.train_index)
    last = len(shards) - 1
    pattern = f"{made.directory}/train-{{00000..{last:05d}}}.tar"
    (tmp_path / "braces.index").write_text(f"{pattern}\n")
    assert last > 3 and list(read_index(tmp_path / "braces.index")) == [
        shard.__class__(f"{made.directory}/{Path(shard.path).name}", shard.rows) for shard in shards
    ]
    expected = tokens_of(made.train_index, 16).tolist()
    assert tokens_of(pattern, 16).tolist() == expected
    assert len(loader(f"{tmp_path}/index/c_{{train,validation}}.index").shards) > len(shards)
    texts = [f"document {number}" for number in range(40)]
    for part in range(4):
        (tmp_path / f"t{part:02}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[part::4]))
    assert both(make(f"{tmp_path}/t{{00..02}}.jsonl", tmp_path, "some")) == sorted(
        t for t in texts if t not in texts[3::4]
    )
    (tmp_path / "{1,2}.txt").write_text("a name like that\n" * 9)
    assert make(f"{tmp_path}/{{1,2}}.txt", tmp_path, "named").train.tokens > 100
    with pytest.raises(UserError, match=r"{00\.\.,a}\.jsonl: no such file|its braces do not follow the syntax|no such"):
        make(f"{tmp_path}/t{{00,..}}.jsonl", tmp_path, "wrong")


def test_damage_in_a_tar_of_others_is_not_its_end(tmp_path: Path):
    """A header that is damaged, and an archive that ends between two members, where tarfile says nothing."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(40):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 9
            archive.addfile(member, io.BytesIO(b"some text"))
    data = (tmp_path / "a.tar").read_bytes()
    for damaged, words in (
        (data[: 1024 * 20], "unexpected end of file"),
        (data[: 20 * 1024] + b"x" + data[20 * 1024 + 1 :], "checksum"),
    ):
        (tmp_path / "a.tar").write_bytes(damaged)
        with pytest.raises(UserError, match=rf"a\.tar is truncated or damaged: .*{words}"):
            make(tmp_path / "a.tar", tmp_path)
