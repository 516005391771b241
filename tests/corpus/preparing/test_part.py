"""Parts: a corpus of many is the corpus of one, cut elsewhere; each is made, found and repaired by itself."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import bucket
from tests.helpers.corpora import COMMAND, REPOSITORY, both, call, digest, documents_of, kill_workers, make
from zero.base.errors import Unavailable, UserError
from zero.corpus.format.index_files import read_index
from zero.corpus.format.manifest import find
from zero.corpus.preparing import documents
from zero.corpus.preparing.options import CorpusOptions
from zero.corpus.preparing.prepare import prepare
from zero.corpus.preparing.processes import Task, run_in_processes
from zero.corpus.preparing.sources.source import Source
from zero.corpus.preparing.verify import verify
from zero.corpus.reading.contents import shard_facts
from zero.corpus.text.tokenizers import ByteTokenizer, load_tokenizer
from zero.files import storage

PART_BYTES = 2500


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(alphabet="aé\r", max_size=30), min_size=1, max_size=30),
    part_bytes=st.integers(1, 300),
    unit_bytes=st.integers(1, 60),
    ends=st.booleans(),
    has_lines=st.booleans(),
)
def test_pieces_of_a_file_hold_each_line_once(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    part_bytes: int,
    unit_bytes: int,
    ends: bool,
    has_lines: bool,
):
    path = tmp_path_factory.mktemp("pieces") / ("a.txt" if has_lines else "a.jsonl")
    written = texts if has_lines else [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\n".join(written).encode() + b"\n" * ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "UNIT_BYTES", unit_bytes)
        source = Source(str(path), "text", 0.2, has_lines=has_lines, part_bytes=part_bytes)
        of_parts = [source.part(number) for number in range(source.parts)]
        units = itertools.chain.from_iterable(part.units() for part in of_parts)
        read = itertools.chain.from_iterable(unit.documents() for unit in units)
        found = [document.content for document in read if document]
    expected = [text.removesuffix("\r") for text in texts if text.strip()] if has_lines else texts
    assert found == expected
    assert sum(part.size or 0 for part in of_parts) == source.size
    assert len(of_parts) == max(1, -(-path.stat().st_size // part_bytes))


def test_parts_are_the_corpus(folder: Path, tmp_path: Path, bpe: Path):
    """The documents of one part, for any number of processes the same bytes, and an index that the loader reads."""
    options: dict[str, Any] = {"tokenizer": load_tokenizer(str(bpe)), "part_bytes": 4500}
    one = make(folder, tmp_path / "one", workers=1)
    in_parts = make(folder, tmp_path / "parts", workers=1, part_bytes=4500)
    assert both(in_parts) == both(one)
    assert documents_of(in_parts.train_index, 16) == documents_of(one.train_index, 16)  # in their order
    digests = set()
    for workers in (1, 2):
        place = tmp_path / str(workers)
        corpus = make(folder, place, workers=workers, **options)
        digests.add(digest(place))
    assert len(digests) == 1
    names = [Path(shard.path).name for shard in read_index(corpus.train_index)]
    assert names == sorted(names) and {name[:11] for name in names} == {f"part-0000{part}-" for part in range(3)}
    assert (corpus.train.shards, corpus.train.rows) == (len(names), sum(s.rows for s in read_index(corpus.train_index)))
    assert verify(corpus.train_index, load_tokenizer(str(bpe))) == verify(corpus.directory) == []


def test_duplicates_of_other_parts(lines: Path, tmp_path: Path):
    """The first of equal documents stays, in whichever part; the documents are those of a corpus of one part."""
    one = make(lines, tmp_path / "one", workers=1, deduplicate=True)
    for workers in (1, 2):
        corpus = make(lines, tmp_path / str(workers), workers=workers, deduplicate=True, part_bytes=PART_BYTES)
        assert corpus.duplicates == one.duplicates > 100
        assert documents_of(corpus.train_index, 16) == documents_of(one.train_index, 16)
        assert not (Path(corpus.directory) / "passes").exists()
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


def test_damaged_part_is_made_again_alone(lines: Path, tmp_path: Path):
    corpus = make(lines, tmp_path, workers=1, part_bytes=PART_BYTES)
    place = Path(corpus.directory)
    before = digest(tmp_path / "corpus")
    times = {path: path.stat().st_mtime_ns for path in place.glob("part-*")}
    shard = place / "part-00001-00002.tar"
    damaged = bytearray(shard.read_bytes())
    damaged[700] ^= 1
    shard.write_bytes(damaged)
    (line,) = verify(corpus.train_index)
    remedy = re.search(r"part-00001-00002\.tar does not match its checksum; remove (.*part-00001\.json), and", line)
    assert remedy
    Path(remedy[1]).unlink()
    make(lines, tmp_path, workers=1, part_bytes=PART_BYTES)
    assert digest(tmp_path / "corpus") == before and verify(corpus.train_index) == []
    again = {path.name[:10] for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert again == {"part-00001"}
    shard.unlink()  # which the call notices by itself
    make(lines, tmp_path, workers=1, part_bytes=PART_BYTES)
    assert digest(tmp_path / "corpus") == before
    (place / "part-00002.json").write_text((place / "part-00002.json").read_text() + " ")
    assert verify(corpus.directory) == [f"{place}/part-00002.json does not match its checksum"]


def test_parts_of_another_call(lines: Path, tmp_path: Path, bpe: Path):
    """Another tokenizer, other parts, files that were added: refused by name, or only what differs is made again."""
    options: dict[str, Any] = {"workers": 1, "part_bytes": PART_BYTES}
    corpus = make(lines, tmp_path, **options)
    place = Path(corpus.directory)
    other: dict[str, Any] = {"tokenizer": load_tokenizer(str(bpe))}
    with pytest.raises(UserError, match=r"corpus .*/c was prepared with tokenizer=bytes, not tokenizer=bpe\.json"):
        make(lines, tmp_path, **options, **other)
    (place / "manifest.json").unlink()  # as a killed call leaves it
    message = r"part 0 \(.*lines: 0\.jsonl\): corpus .*part-00000\.json was prepared with tokenizer=bytes, not"
    with pytest.raises(UserError, match=message):
        make(lines, tmp_path, **options, **other)
    make(lines, tmp_path, **options)
    with pytest.raises(UserError, match="was prepared with part_bytes=2500, not part_bytes=3000"):
        make(lines, tmp_path, workers=1, part_bytes=3000)
    with pytest.raises(UserError, match="was prepared with part_bytes=2500, not part_bytes=None"):
        make(lines, tmp_path, workers=1)
    times = {path: path.stat().st_mtime_ns for path in place.glob("part-*")}
    shutil.copy(lines / "0.jsonl", lines / "4.jsonl")
    with pytest.raises(UserError, match="had other files"):
        make(lines, tmp_path, **options)
    longer = make(lines, tmp_path, **options, overwrite=True)
    assert longer.train.documents + longer.validation.documents == 300
    assert {path: path.stat().st_mtime_ns for path in times} == times
    whole = make(lines, tmp_path, workers=1, overwrite=True)  # of one part: none of the others is left
    assert {path.name for path in Path(whole.directory).glob("*.json")} == {"manifest.json", "written.json"}
    assert not list(place.glob("part-*"))


def test_edited_source_of_a_finished_corpus(lines: Path, tmp_path: Path):
    options: dict[str, Any] = {"workers": 1, "part_bytes": PART_BYTES}
    make(lines, tmp_path, **options)
    path = lines / "2.jsonl"
    path.write_text(path.read_text().replace("some", "more"))
    with pytest.raises(UserError, match=r"was prepared when .*lines: 2\.jsonl had other contents"):
        make(lines, tmp_path, **options)
    make(lines, tmp_path, **options, overwrite=True)


def test_identity_is_that_of_the_parts(lines: Path, tmp_path: Path):
    """A start reads the manifest of the corpus, not those of its parts; the facts change with a part's contents."""
    options: dict[str, Any] = {"workers": 1, "part_bytes": PART_BYTES}
    corpus = make(lines, tmp_path / "a", **options)
    shards = read_index(corpus.train_index)
    facts = shard_facts(shards)
    assert {fact.known_by for fact in facts} == {"manifest"}
    assert len({fact.value for fact in facts}) == len(shards)
    for path in Path(corpus.directory).glob("part-*.json"):
        path.unlink()
    assert shard_facts(shards) == facts
    path = lines / "2.jsonl"
    path.write_text(path.read_text().replace("some", "more"))
    changed = make(lines, tmp_path / "b", **options)
    others = shard_facts(read_index(changed.train_index))
    same = [fact == other for fact, other in zip(facts, others, strict=True)]
    assert 0 < sum(same) < len(same)
    manifest = find(corpus.directory)
    assert manifest is not None and len(manifest["parts"]) == 4 and "shards" not in manifest["train"]


def test_bucket_and_disk_are_equal(lines: Path, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch):
    """From a bucket, a large object in ranges, to a bucket; the parts are those of the disk."""
    bucket.use(monkeypatch, server)
    root = f"gs://{bucket.BUCKET}/parts"
    (lines / "9.jsonl").write_text("".join(json.dumps({"text": f"large {number}"}) + "\n" for number in range(300)))
    bucket.upload(lines, f"{root}/lines")
    near = make(lines, tmp_path, workers=1, part_bytes=PART_BYTES)
    options = CorpusOptions(ByteTokenizer(), row_tokens=16, rows_per_member=4, rows_per_shard=8)
    places: dict[str, Any] = {"directory": f"{root}/corpus", "index_directory": f"{root}/index"}
    far = prepare(f"{root}/lines", "c", options, **places, workers=1, part_bytes=PART_BYTES)
    assert far.train == near.train
    for path in Path(near.directory).glob("part-*.tar"):
        assert storage.read_bytes(f"{root}/corpus/c/{path.name}") == path.read_bytes()
    assert verify(far.train_index) == []


def test_file_that_is_listed_twice(lines: Path, tmp_path: Path):
    """A glob finds a file by each way that leads to it."""
    (lines / "sub").mkdir()
    shutil.copy(lines / "0.jsonl", lines / "sub" / "0.jsonl")
    with pytest.raises(
        UserError, match=r"\*\*/\*\*/\*\.jsonl: .*0\.jsonl appears 2 times; a source lists each file once"
    ):
        make(f"{lines}/**/**/*.jsonl", tmp_path)


def test_bucket_without_permission(lines: Path, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch):
    """One line that names the object, whether it is read or written, in the caller's own process or in another one."""
    with bucket.disturbed(bucket.Proxy(server, budget=10**6, faults=("403",))) as address:
        bucket.use(monkeypatch, address)
        for source, place in ((f"gs://{bucket.BUCKET}/lines", str(tmp_path)), (str(lines), f"gs://{bucket.BUCKET}/c")):
            folders = ["--directory", place, "--index-directory", place, "--part-bytes", "2500"]
            done = call(source, *folders, "--name", "c")
            line = done.stderr.removesuffix("\n")
            assert done.returncode == 2 and len(line.splitlines()) == 1, line
            assert f"gs://{bucket.BUCKET}/" in line and "access denied" in line


def test_options_of_the_command(lines: Path, tmp_path: Path):
    places = ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index"), "--workers", "1"]
    done = call(lines, *places, "--part-bytes", "2500", "--row-tokens", "16")
    assert done.returncode == 0 and (tmp_path / "corpus" / "lines" / "part-00003.json").exists()
    done = call(lines, *places, "--part-bytes", "0")
    assert (done.returncode, done.stderr) == (2, "error: part_bytes must be at least 1, not 0\n")


def _count_and_die(place: str) -> None:
    """Is killed at its first two calls."""
    calls = len(list(Path(place).iterdir()))
    Path(place, str(calls)).touch()
    if calls < 2:
        os.kill(os.getpid(), signal.SIGKILL)


def _always_die(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(message: str) -> None:
    raise UserError(message)


@pytest.mark.wide  # the test below kills workers
def test_killed_process_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (task,) = run_in_processes(_count_and_die, [Task("part 7", str(tmp_path))], 1)
    assert task.name == "part 7" and len(list(tmp_path.iterdir())) == 3
    assert caplog.text.count("part 7: its process was killed by signal 9; restarting it") == 2
    with pytest.raises(Unavailable, match="part 8: its process was killed by signal 9, 3 times"):
        list(run_in_processes(_always_die, [Task("part 8", None)], 1))
    with pytest.raises(UserError, match=r"^it is wrong$"):
        list(run_in_processes(_fail, [Task("part 9", "it is wrong")], 1))


def test_worker_that_is_killed_again_and_again(lines: Path, tmp_path: Path):
    """The command ends with status 1 and one line, which names the part; the parts that are done stay."""
    places = ["--directory", str(tmp_path / "corpus"), "--index-directory", str(tmp_path / "index")]
    process = subprocess.Popen(
        [*COMMAND, str(lines), *places, "--part-bytes", "2500", "--workers", "2"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    killed = kill_workers(process)
    _, said = process.communicate()
    assert process.returncode == 1 and killed >= 3
    assert re.search(
        r"\nerror: part \d \(.*lines: \d\.jsonl\): its process was killed by signal 9, 3 times; probably out of memory",
        said,
    )
    assert not (tmp_path / "index").exists()
