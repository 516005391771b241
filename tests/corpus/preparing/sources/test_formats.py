"""The same text through every format gives the same rows; what is wrong in a file is named."""

import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import bucket, sources
from tests.helpers.corpora import COMMAND, REPOSITORY, call, make, tokens_of
from tests.helpers.loaders import open_loader
from zero.base.errors import UserError
from zero.corpus.preparing import documents
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import Corpus, prepare
from zero.corpus.preparing.sources.source import Source
from zero.corpus.preparing.sources.tensors import read_tensor
from zero.corpus.preparing.verify import verify
from zero.corpus.text.tokenizers import ByteTokenizer
from zero.files import storage

WRITERS = sources.write_text | sources.write_ids
SOME_IDS = next(iter(sources.write_ids))
SPLITS = {"train": 60, "val": 9, "test": 5}


def texts(split: str) -> list[str]:
    words = random.Random(split)
    return [f"{split} {i}: " + "é\u2028x" * words.randrange(20) for i in range(SPLITS[split])]


def write(root: Path, kind: str) -> Path:
    """A folder with the documents of the three splits."""
    root.mkdir(parents=True)
    for split in SPLITS:
        WRITERS[kind](root / split, texts(split))
    return root


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The rows of each split: its documents, joined with the end of text and cut."""
    rows = {}
    for split in SPLITS:
        tokens = [token for text in texts(split) for token in (*text.encode(), sources.END)]
        tokens += [-1] * (-len(tokens) % 16)
        rows[split] = np.reshape(tokens, (-1, 16)).tolist()
    return rows


def checksum(corpus: Corpus) -> int:
    """Of the batches of two epochs, as in `samples_checksum` of a run."""
    total = 0
    for batch in open_loader(corpus.train_index, global_rows=8, context=16, vocab_size=256, max_epochs=2).batches():
        for row in batch.tokens:
            total = zlib.crc32(row, total)
    return total


_CHECKSUMS: set[int] = set()


def make_and_die(method: str, *args: Any, **options: Any) -> None:
    """`make` in another process, killed by SIGKILL at the eighth file of the corpus that it renames.

    Not by a fork of this process, whose jax has threads. A "forkserver" imports only once, in its first environment.
    """
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_make_and_die, args=args, kwargs=options)
    process.start()
    process.join(900)
    assert process.exitcode == -signal.SIGKILL


def _make_and_die(source: Path | str, folder: Path, *args: Any, **options: Any) -> None:
    documents.UNIT_BYTES = 300
    renames = itertools.count()

    def count(event: str, arguments: Any) -> None:
        # Python renames too: the bytecode of each module that is imported for the first time.
        in_corpus = event == "os.rename" and str(arguments[1]).startswith(str(folder))
        if in_corpus and next(renames) == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    make(source, folder, *args, **options)


@pytest.mark.parametrize("kind", WRITERS)
def test_same_rows_from_every_format(
    kind: str, expected: dict[str, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, rows and samples_checksum do not depend on the format, nor the splits on anything but their names."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 300)  # many units
    source = write(tmp_path / "source", kind)
    if list(source.glob("*.json")):  # in a folder they may be settings
        source = source / "*.json"
    corpus = make(source, tmp_path, splits="official", key="ids" if kind == "tfrecord" else "text")
    assert corpus.test_index is not None
    for index, split in ((corpus.train_index, "train"), (corpus.validation_index, "val"), (corpus.test_index, "test")):
        assert tokens_of(index, 16).tolist() == expected[split]
        assert verify(index) == []
    _CHECKSUMS.add(checksum(corpus))
    assert len(_CHECKSUMS) == 1
    opened = Source(str(source), "ids" if kind == "tfrecord" else "text", 0.1)
    assert sum(unit.size for unit in opened.units()) == opened.size


@pytest.mark.parametrize(
    "kind",
    [
        *("parquet", "tar.xz", SOME_IDS),
        *(
            pytest.param(kind, marks=pytest.mark.wide)
            for kind in ("arrow", "tar", "json.xz", *sources.write_ids)
            if kind != SOME_IDS
        ),
    ],
)
def test_interrupted_and_called_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after some shards, a second call gives the same bytes, and no index before them."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 300)
    source = write(tmp_path / "source", kind)
    options: dict[str, Any] = {"splits": "official", "key": "ids" if kind == "tfrecord" else "text"}
    whole = make(source, tmp_path / "whole", **options)
    make_and_die("forkserver", source, tmp_path / "parts", **options)
    assert list((tmp_path / "parts").rglob("*.tar")) and not list((tmp_path / "parts").rglob("*.index"))
    parts = make(source, tmp_path / "parts", **options)
    assert parts.train == whole.train
    for name in ("corpus/c/manifest.json", "corpus/c/train-00000.tar", "corpus/c/test-00000.tar"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_arrays_without_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an array of tokens the last part is for validation, of each file."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 64)
    for name, first in (("a", 100), ("b", 1000)):
        np.save(tmp_path / f"{name}.npy", np.arange(first, first + 100, dtype=np.uint16).reshape(10, 10))

    class Many(ByteTokenizer):
        vocab_size = 1 << 16

    corpus = prepare(
        str(tmp_path / "*.npy"),
        "c",
        CorpusOptions(Many(), row_tokens=10, validation_fraction=0.2),
        directory=tmp_path,
        index_directory=tmp_path,
    )
    train, validation = (tokens_of(index, 10) for index in (corpus.train_index, corpus.validation_index))
    assert [t for t in train.ravel().tolist() if t > 0] == [*range(100, 180), *range(1000, 1080)]
    assert [t for t in validation.ravel().tolist() if t > 0] == [*range(180, 200), *range(1080, 1100)]


@pytest.mark.parametrize("kind", ["npy", "nanoGPT"])
def test_arrays_have_no_documents(kind: str, tmp_path: Path) -> None:
    """What counts documents is refused: the pieces in which an array is read would be taken for them."""
    source = write(tmp_path / "source", kind)
    options: list[dict[str, Any]] = [{"deduplicate": True}, {"minimum_tokens": 9}, {"one_document_per_row": True}]
    for option in options:
        with pytest.raises(UserError, match=f"is one long text, but {next(iter(option))} expects documents"):
            make(source, tmp_path, **option)


def test_slices_of_tables_are_small(tmp_path: Path) -> None:
    """A unit takes no more of a table to a worker than its own rows."""
    import pyarrow

    table = pyarrow.table({"text": ["x" * 1000] * 4000})
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file:
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    sizes = [len(pickle.dumps(unit)) for unit in Source(str(tmp_path / "a.arrow"), "text", 0.1).units()]
    assert len(sizes) == 4 and max(sizes) < 1_200_000


def test_bucket_folders_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a glob and one object of a bucket give the rows of the same files here; a repeat continues."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 300)
    root = tmp_path / "root"
    write(root / "a", "jsonl.gz")
    write(root / "b" / "deep", "parquet")
    write(root / "c", "nanoGPT")
    (root / "a" / "image.png").write_bytes(b"no text")
    with bucket.serving() as address:
        bucket.use(monkeypatch, address)
        bucket.upload(root, f"gs://{bucket.BUCKET}/files")
        for number, place in enumerate(["/a", "/**/*.parquet", "/[!b]/train.*", "/?/val.jsonl.gz", "/c/train.bin"]):
            remote, local = f"gs://{bucket.BUCKET}/files{place}", f"{root}{place}"
            name = f"n{number}"
            if "train.*" in place:
                with pytest.raises(UserError, match="both token files and text files"):
                    make(remote, tmp_path, name)
                continue
            far, near = make(remote, tmp_path / "far", name), make(local, tmp_path / "near", name)
            assert (far.train, far.validation) == (near.train, near.validation)
            assert tokens_of(far.train_index, 16).tolist() == tokens_of(near.train_index, 16).tolist()
        for wrong in ("/nothing", "/*.none"):
            with pytest.raises(UserError, match="no such file or folder"):
                make(f"gs://{bucket.BUCKET}/files{wrong}", tmp_path, "wrong")
        half = tmp_path / "half"
        make_and_die("spawn", f"gs://{bucket.BUCKET}/files/a", half, "n0")
        again = make(f"gs://{bucket.BUCKET}/files/a", half, "n0")
        assert again.train == make(root / "a", tmp_path / "near", "n0").train


def test_tensors_of_torch() -> None:
    """What torch.save writes is read, whatever its strides and integer type, and is what the tests write."""
    torch = pytest.importorskip("torch")
    whole = torch.arange(-12, 12)

    def saved(value: Any) -> bytes:
        buffer = BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()

    for value in (
        whole, whole[3:9], whole.view(4, 6).t(), whole[::5], whole.to(torch.int32), whole.to(torch.uint8),
        whole.to(torch.int16).view(2, 3, 4), torch.arange(5).to(torch.uint16),
    ):  # fmt: skip
        np.testing.assert_array_equal(read_tensor(saved(value), "it"), value.numpy())
    numbers = np.arange(7)
    assert torch.load(BytesIO(sources.torch_tensor(numbers)), weights_only=True).tolist() == numbers.tolist()

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, ("touch /tmp/evil",))

    for value, message in (
        (Evil(), r"refers to (posix|os)\.system, which is not called"),
        (whole.float(), r"expected a tensor of integers; found torch\.FloatStorage"),
        ({"ids": whole}, "expected one tensor of integers; found a dictionary"),
        ([whole], "expected one tensor of integers; found a list"),
        (torch.nn.Parameter(whole.float()), "expected .*(FloatStorage|dictionary)"),
        (whole.tolist(), "expected one tensor of integers"),
    ):
        with pytest.raises(UserError, match=f"^it: .*{message}"):
            read_tensor(saved(value), "it")
    old = BytesIO()
    torch.save(whole, old, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"it: expected a zip of torch\.save"):
        read_tensor(old.getvalue(), "it")


def test_tensors_beyond_their_storage() -> None:
    """Every prefix of a file, and shapes that its bytes do not hold, are refused and read nothing."""
    good = sources.torch_tensor(np.arange(4))
    assert read_tensor(good, "it").tolist() == [0, 1, 2, 3]
    for size in range(0, len(good), 7):
        with pytest.raises(UserError, match=r"^it: "):
            read_tensor(good[:size], "it")
    with zipfile.ZipFile(BytesIO(good)) as archive:
        description, content = archive.read("archive/data.pkl"), archive.read("archive/data/0")
    with pytest.raises(UserError, match=r"it: .*a tensor of shape \(4,\) and 3 values"):
        read_tensor(sources.torch_zip(description, content[:-8]), "it")
    for at in range(len(description)):  # any byte that is wrong is an error, or another tensor of these bytes
        for wrong in (0, 0x52, 0xFF):
            changed = description[:at] + bytes([wrong]) + description[at + 1 :]
            try:
                found = read_tensor(sources.torch_zip(changed, content), "it")
            except UserError as error:
                assert str(error).startswith("it: ")
            else:
                assert found.dtype != np.int64 or set(found.ravel().tolist()) <= {0, 1, 2, 3}


def test_official_names(tmp_path: Path) -> None:
    """--splits official needs names that say the split, and a training split."""
    source = write(tmp_path / "source", "jsonl")
    (source / "test.jsonl").rename(source / "other.jsonl")
    done = call(source, "--splits", "official", "--directory", tmp_path, "--index-directory", tmp_path)
    assert done.returncode == 2 and "found other.jsonl" in done.stderr and len(done.stderr.splitlines()) == 1
    (source / "other.jsonl").unlink()
    (source / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"expects names with train, .*; found val\.jsonl"):
        make(source, tmp_path, splits="official")


def test_parts_of_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--splits with numbers of bytes cuts one text there, at the beginning of a character."""
    text = "abcé" * 40  # 200 bytes
    (tmp_path / "enwik").write_text(text)
    monkeypatch.setattr(documents, "UNIT_BYTES", 37)
    corpus = make(tmp_path / "enwik", tmp_path, splits="104,46,50")
    assert corpus.test is not None and corpus.test_index is not None
    assert [split.bytes for split in (corpus.train, corpus.validation, corpus.test)] == [103, 47, 50]
    indices = (corpus.train_index, corpus.validation_index, corpus.test_index)
    rows = [tokens_of(index, 16).ravel() for index in indices]
    assert b"".join(bytes(row[row > 0].astype(np.uint8)) for row in rows).decode() == text
    with pytest.raises(UserError, match="has 200 bytes, and --splits 100,99 is 199"):
        make(tmp_path / "enwik", tmp_path, "d", splits="100,99")
    for splits, message in (("1", "two or three numbers"), ("a,b", "two or three numbers")):
        with pytest.raises(UserError, match=message):
            make(tmp_path / "enwik", tmp_path, "d", splits=splits)


def test_duplicates_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal documents the first is kept, after a normalization too, and short ones are left out."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 100)
    lines = [f"document {i % 20}" for i in range(50)] + ["ﬁne", "fine", "a", "b"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    options: dict[str, Any] = {"deduplicate": True, "normalize": "nfkc", "minimum_tokens": 3}
    corpus = make(tmp_path / "a.jsonl", tmp_path, **options)
    assert (corpus.duplicates, corpus.short) == (31, 2)
    assert corpus.train.documents + corpus.validation.documents == 21
    manifest = json.loads((Path(corpus.directory) / "manifest.json").read_text())
    assert (manifest["duplicates"], manifest["short"], manifest["normalize"]) == (31, 2, "nfkc")
    assert make(tmp_path / "a.jsonl", tmp_path, **options) == corpus
    with pytest.raises(UserError, match="was prepared with deduplicate=True, not deduplicate=None"):
        make(tmp_path / "a.jsonl", tmp_path, **(options | {"deduplicate": False}))


@pytest.mark.slow
def test_killed_with_workers(tmp_path: Path, bpe: Path) -> None:
    """kill -9 of the command in the middle of a Parquet source, with workers and duplicates: the same bytes."""
    source = tmp_path / "source"
    source.mkdir()
    for part in range(6):
        sources.write_text["parquet"](source / f"{part}", [f"{i % 4000} gather scatter " * 40 for i in range(6000)])
    options = ["--name", "c", "--tokenizer", str(bpe), "--deduplicate", "--workers", "2", "--rows-per-shard", "256"]

    def command(place: str) -> list[str]:
        folders = ["--directory", str(tmp_path / place), "--index-directory", str(tmp_path / place)]
        return [*COMMAND, str(source), *options, *folders]

    subprocess.run(command("whole"), cwd=REPOSITORY, check=True)
    process = subprocess.Popen(command("parts"), cwd=REPOSITORY)
    while process.poll() is None and len(list((tmp_path / "parts").rglob("*.tar"))) < 3:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not list((tmp_path / "parts").rglob("*.index"))
    subprocess.run(command("parts"), cwd=REPOSITORY, check=True)
    for path in (tmp_path / "whole").rglob("*.*"):
        assert (tmp_path / "parts" / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()
    assert storage.exists(str(tmp_path / "parts" / "c_train.index"))
